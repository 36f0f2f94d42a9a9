// Attention that reads and writes caches in place. A token sees positions in order: the positions of its context are in the slots with the
// same numbers, later positions are in the slots of its path. Tiles of 16 and chunks of 128 are divided by position, so a token of a tree
// gets the same bits as in a chain.

constexpr int64_t TILES = CHUNK / 16;
constexpr int64_t QUERIES = 48;  // maximum number of queries whose scores over a chunk are kept at once
constexpr float MOST = 32767;    // for products with levels: the level of the largest number of a query, or of a chunk's weights

// The types of the numbers by which cells are multiplied, and of sums. 8-bit levels are multiplied by 16-bit levels, two at a time. The
// sums are integers that fit 32 bits (127 MOST MAX_HEAD < 2^31), so the order of terms does not matter.
template <typename Cell> struct Kind {
  using Factor = float;
  using Sum = Floats;
};
template <> struct Kind<int8_t> {
  using Factor = int16_t;
  using Sum = Bytes;
};
static inline Floats load_cells(const float *p) { return load(p); }
static inline Floats load_cells(const uint16_t *p) { return load_float16(p); }
static inline Words load_cells(const int8_t *p) { return load_words(p); }
static inline Floats add_products(Floats sum, Floats cells, const float *x) { return fma(cells, all(*x), sum); }
static inline Bytes add_products(Bytes sum, Words cells, const int16_t *x) { return dot(sum, cells, x); }
// A sum that continues from `out`, or a new sum of integers.
static inline void begin(Floats &sum, const float *out) { sum = load(out); }
static inline void begin(Bytes &sum, const float *) { sum = all_sums(0); }
static inline Floats ended(Floats sum, float) { return sum; }
static inline Floats ended(Bytes sum, float scale) { return mul(to_floats(sum), all(scale)); }

// Turn sums into scores: multiply by the query's factor and, with levels, by the scales of the keys.
static inline Floats scored(Floats sum, const void *, int64_t, float factor) { return mul(sum, all(factor)); }
static inline Floats scored(Bytes sum, const int8_t *keys, int64_t width, float factor) {
  return mul(to_floats(sum), mul(load(scales_of(keys, width)), all(factor)));
}

// Call work(first, Number) for blocks of 0 to count - 1. A block has at most `Most` numbers, and all blocks have about the same size.
template <int Most, typename Work> static void in_blocks(int64_t count, const Work &work) {
  const int64_t blocks = (count + Most - 1) / Most;
  for (int64_t b = 0, first = 0, last; b < blocks; b++, first = last) {
    last = count * (b + 1) / blocks;
    with_number<Most>(last - first, [&](auto number) { work(first, number); });
  }
}

static void rotate(const float *x, const float *cos, const float *sin, int64_t half, float *y) {
  if (!cos) return void(memcpy(y, x, 2 * half * sizeof(float)));
  for (int64_t i = 0; i < half; i++) {
    const float first = x[i], second = x[half + i];
    y[i] = first * cos[i] - second * sin[i];
    y[half + i] = second * cos[i] + first * sin[i];
  }
}

// Normalize a head, if there is a norm, and rotate it.
static void turn(const Attention &job, const float *x, const float *norm, const float *cos, const float *sin, float *y) {
  float normed[MAX_WIDTH];
  if (norm && !job.norms_last) normalize(x, norm, job.epsilon, job.head_dim, normed);
  rotate(norm && !job.norms_last ? normed : x, cos, sin, job.head_dim / 2, y);
  if (norm && job.norms_last) normalize(y, norm, job.epsilon, job.head_dim, y);
}

// Round a row to levels (its largest number becomes `most` or -most), and pad it with zeros to a multiple of 16. Returns the scale. If a
// number is not finite, the scale is NaN and all levels are 0.
static float round_levels(const float *x, int64_t size, float most, int16_t *levels) {
  float rounded[MAX_WIDTH];
  const auto part = [&](int64_t i) { return load_some(x + i, least(16, size - i)); };
  Floats largest = all(0), sum = all(0);
  for (int64_t i = 0; i < size; i += 16) largest = larger(absolute(part(i)), largest);
  const float m = largest_lane(largest), inverse = m >= 0x1p-100f ? most / m : 0;
  for (int64_t i = 0; i < size; i += 16) {
    const Floats level = nearest(mul(part(i), all(inverse)));
    sum = add(sum, level);
    store(rounded + i, level);
  }
  const float added = add_lanes(sum);
  const bool finite = added == added;  // infinity gives NaN, too: it is multiplied by 0
  for (int64_t i = 0; i < (size + 15) / 16 * 16; i++) levels[i] = finite ? (int16_t)rounded[i] : 0;
  return finite ? m / most : __builtin_nanf("");
}

// Write a row into the cells of a slot in a tile; at(d) is the place of number d.
template <typename Cell, typename At> static void write_row(const Attention &job, const float *x, Cell *tile, int64_t slot, const At &at) {
  int16_t levels[MAX_WIDTH];
  if constexpr (PAIR<Cell> == 2) scales_of(tile, job.width)[slot % 16] = round_levels(x, job.head_dim, 127, levels);
  for (int64_t d = 0; d < job.head_dim; d++) {
    if constexpr (PAIR<Cell> == 2) tile[at(d)] = (int8_t)levels[d];
    else if constexpr (sizeof(Cell) == 2) tile[at(d)] = half_of(x[d]);
    else tile[at(d)] = x[d];
  }
}

// For caches of levels, a query is stored as [width] 16-bit levels, followed by its scale times the scale of all scores.
static void write_query(const Attention &job, const float *x, float *q) {
  if (job.cells == LEVELS) q[job.width / 2] = job.scale * round_levels(x, job.head_dim, MOST, reinterpret_cast<int16_t *>(q));
  else memcpy(q, x, job.head_dim * sizeof(float));
}

// A query or key of latent attention: a part that stays, and a part that is rotated.
static void turn_latent(const Attention &job, const float *still, const float *turned, const float *cos, const float *sin, float *y) {
  memcpy(y, still, job.rank * sizeof(float));
  rotate(turned, cos, sin, (job.head_dim - job.rank) / 2, y + job.rank);
}

// Rotate queries and keys, and write keys and values into the cache.
template <typename Cell> static void write_cells(const Attention &job, int64_t first_token, int64_t last_token) {
  const int64_t size = job.head_dim, rotated = size - job.rank, half = rotated / 2;
  float head[MAX_WIDTH];
  for (int64_t t = first_token; t < last_token; t++) {
    const Token &token = job.tokens[t];
    const float *x = job.qkv + t * job.columns;
    const float *cos = job.cos ? job.cos + token.position * half : nullptr, *sin = job.sin ? job.sin + token.position * half : nullptr;
    const int64_t slot = token.slot, tile = slot / 16 * tile_of<Cell>(job.width);
    const auto key_place = [&](int64_t d) { return key_at<Cell>(slot, d); };
    if (job.rank) {
      const float *row = x + job.heads * size;
      for (int64_t h = 0; h < job.heads; h++) {
        turn_latent(job, x + h * job.rank, x + job.heads * job.rank + h * rotated, cos, sin, head);
        write_query(job, head, job.q + (t * job.heads + h) * job.width);
      }
      turn_latent(job, row, row + job.rank, cos, sin, head);
      write_row(job, head, job.keys<Cell>(token, 0) + tile, slot, key_place);
      continue;
    }
    for (int64_t h = 0; h < job.heads; h++, x += size) {
      turn(job, x, job.q_norm, cos, sin, head);
      write_query(job, head, job.q + (t * job.heads + h) * job.width);
    }
    if (!job.writes) continue;
    for (int64_t h = 0; h < job.kv_heads; h++, x += size) {
      turn(job, x, job.k_norm, cos, sin, head);
      write_row(job, head, job.keys<Cell>(token, h) + tile, slot, key_place);
    }
    for (int64_t h = 0; h < job.kv_heads; h++, x += size)
      write_row(job, x, job.values<Cell>(token, h) + tile, slot, [&](int64_t d) { return value_at<Cell>(slot, d, job.width); });
  }
}

static void write(const Attention &job, int64_t first_token, int64_t last_token) {
  with_cells(job.cells, [&](auto cell) { write_cells<decltype(cell)>(job, first_token, last_token); });
}

// The tiles of keys and values of a chunk's positions: tiles of the cache, or copies if a path is part of the tile. Several tiles of keys
// are read at a time, so the last tile may be listed twice.
template <typename Cell> struct Tiles {
  const Cell *keys[TILES], *values[TILES];
  const Cell *next;  // keys of the next chunk, to be fetched in time
};

// Copy a slot's rows from a tile of keys and a tile of values to a place in two other tiles.
template <typename Cell>
static void copy_row(const Cell *keys, const Cell *values, int64_t slot, int64_t width, Cell *key, Cell *value, int64_t place) {
  for (int64_t d = 0; d < width; d++) key[key_at<Cell>(place, d)] = keys[key_at<Cell>(slot, d)];
  for (int64_t d = 0; d < width; d++) value[value_at<Cell>(place, d, width)] = values[value_at<Cell>(slot, d, width)];
  if (PAIR<Cell> == 1) return;
  scales_of(key, width)[place % 16] = scales_of(keys, width)[slot % 16];
  scales_of(value, width)[place % 16] = scales_of(values, width)[slot % 16];
}

// The values of a tile of rows: the first numbers of each row, in the layout of values.
template <typename Cell> static void values_of(const Cell *rows, int64_t width, Cell *values) {
  for (int64_t first = 0; first < width; first += 16)
    for (int64_t i = 0; i < 16; i++)
      for (int64_t d = first; d < first + 16; d++) values[value_at<Cell>(i, d, width)] = rows[key_at<Cell>(i, d)];
}

template <typename Cell>
static void find_tiles(const Attention &job, const Token &token, int64_t kv, int64_t start, Cell *copies, Tiles<Cell> *tiles) {
  const Cell *keys = job.keys<Cell>(token, kv), *values = job.values<Cell>(token, kv);
  const int64_t size = tile_of<Cell>(job.width);
  for (int64_t i = 0; i < TILES && start + i * 16 < token.seen(); i++) {
    const int64_t first = start + i * 16, end = least(first + 16, token.seen());
    tiles->keys[i] = keys + first / 16 * size;
    tiles->values[i] = values + first / 16 * size;
    Cell *key = copies + i * 2 * size, *value = key + size;
    const bool as_stored = !token.path_length || first + 16 <= token.context;
    if (!as_stored) {
      if (first < token.context) {
        memcpy(key, tiles->keys[i], size * sizeof(Cell));
        memcpy(value, tiles->values[i], size * sizeof(Cell));
      }
      for (int64_t place = first < token.context ? token.context : first; place < end; place++) {
        const int64_t slot = token.path[place - token.context], tile = slot / 16 * size;
        copy_row(keys + tile, values + tile, slot, job.width, key, value, place);
      }
      tiles->keys[i] = key;
      tiles->values[i] = value;
    }
    if (!job.rank) continue;
    values_of(tiles->keys[i], job.value_width, value);
    tiles->values[i] = value;
  }
  tiles->next = keys + (start + (start + CHUNK < token.context ? CHUNK : 0)) / 16 * size;
  for (int64_t i = 1; i < TILES; i++)
    if (!tiles->keys[i]) tiles->keys[i] = tiles->keys[i - 1];
}

// Cells to fetch while vectors are read, some with each vector. They go into the second-level cache if there are few queries, because
// memory is then the bottleneck.
template <typename Cell> struct Ahead {
  const Cell *from;
  int64_t step;
};
template <int Q, typename Cell> static inline void fetch(const Ahead<Cell> &ahead, int64_t vector) {
  if constexpr (Q < 8) fetch_second(ahead.from + vector * ahead.step);
  else prefetch(ahead.from + vector * ahead.step);
}

// The part of some tiles that is fetched while `some` of `count` queries, from number `first` on, read the same number of tiles.
template <typename Cell>
static Ahead<Cell> share_of(const Attention &job, const Cell *from, int64_t tiles, int64_t first, int64_t some, int64_t count) {
  const int64_t cells = tiles * tile_of<Cell>(job.width), vectors = tiles * job.width / PAIR<Cell>;
  return {from + cells * first / count, cells * some / (count * vectors)};
}

// A query over one chunk. The query sees the positions `first` to `seen` - 1 of the chunk; `part` is the memory for its part of the result
// [2 + width].
struct Query {
  const float *q;
  int64_t first, seen;
  float *part;
};

// Scores of Q queries with the keys of some tiles: score = fma(key[d], query[d], score), d = 0, 1, ..., or the sum of products of levels;
// then the score is multiplied by the scale.
template <int Q, typename Cell>
static void score_tiles(const Attention &job, const Cell *const *keys, const Query *queries, float *scores, const Ahead<Cell> &ahead) {
  using Factor = typename Kind<Cell>::Factor;
  constexpr int64_t p = PAIR<Cell>;
  const int64_t vectors = job.head_dim / p;
  typename Kind<Cell>::Sum sum[Q][KEY_TILES];
  const float zeros[16] = {0};
  for (int q = 0; q < Q; q++)
    for (int t = 0; t < KEY_TILES; t++) begin(sum[q][t], zeros);
  for (int64_t i = 0; i < vectors; i++) {
    decltype(load_cells(*keys)) key[KEY_TILES];
    for (int t = 0; t < KEY_TILES; t++) {
      key[t] = load_cells(keys[t] + i * 16 * p);
      fetch<Q>(ahead, t * vectors + i);
    }
    for (int q = 0; q < Q; q++)
      for (int t = 0; t < KEY_TILES; t++)
        sum[q][t] = add_products(sum[q][t], key[t], reinterpret_cast<const Factor *>(queries[q].q) + i * p);
  }
  for (int q = 0; q < Q; q++) {
    const float factor = job.cells == LEVELS ? queries[q].q[job.width / 2] : job.scale;
    for (int t = 0; t < KEY_TILES; t++) store(scores + q * CHUNK + t * 16, scored(sum[q][t], keys[t], job.width, factor));
  }
}

// out = fma(weight[j], value[j], out) for the positions j from `first` to `last` - 1, for Q queries and V vectors of values. With levels,
// out is the sum of products, times a scale of each query.
template <int Q, int V, typename Cell>
static void add_values(const Cell *const *values, int64_t width, int64_t first, int64_t last,
                       const typename Kind<Cell>::Factor *weights, const float *scales, float *const *out, int64_t d,
                       const Ahead<Cell> &ahead) {
  constexpr int64_t p = PAIR<Cell>;
  typename Kind<Cell>::Sum sum[Q][V];
  for (int q = 0; q < Q; q++)
    for (int v = 0; v < V; v++) begin(sum[q][v], out[q] + d + 16 * v);
  for (int64_t start = first, stop; start < last; start = stop) {  // of a tile
    stop = least(start / 16 * 16 + 16, last);
    const Cell *value = values[start / 16] + start % 16 * width + d * p;
    for (int64_t j = start; j < stop; j += p, value += width * p) {
      for (int v = 0; v < V; v++) {
        const auto part = load_cells(value + 16 * v * p);
        fetch<Q>(ahead, ((d / 16 + v) * CHUNK + j) / p);
        for (int q = 0; q < Q; q++) sum[q][v] = add_products(sum[q][v], part, weights + q * CHUNK + j);
      }
    }
  }
  for (int q = 0; q < Q; q++)
    for (int v = 0; v < V; v++) store(out[q] + d + 16 * v, ended(sum[q][v], scales[q]));
}

template <int Q, typename Cell>
static void add_all_values(const Tiles<Cell> &tiles, int64_t width, int64_t first, int64_t last,
                           const typename Kind<Cell>::Factor *weights, const float *scales, float *const *out,
                           const Ahead<Cell> &ahead) {
  constexpr int V = vectors_beside(Q);
  int64_t d = 0;
  for (; d + 16 * V <= width; d += 16 * V) add_values<Q, V>(tiles.values, width, first, last, weights, scales, out, d, ahead);
  for (; d < width; d += 16) add_values<Q, 1>(tiles.values, width, first, last, weights, scales, out, d, ahead);
}

// Limit scores to the cap: s = cap - 2 cap / (exp(2 s / cap) + 1), which is cap tanh(s / cap).
static void limit(float *scores, int64_t end, float cap) {
  for (int64_t j = 0; j < end; j += 16) {
    const Floats s = load(scores + j), grown = exponential(div(add(s, s), all(cap)));
    store(scores + j, sub(all(cap), div(all(cap + cap), add(grown, all(1.f)))));
  }
}

// Set the values outside `first` to `seen` - 1 to `value`.
static void leave(float *scores, int64_t first, int64_t seen, float value) {
  for (int64_t j = 0; j < first; j++) scores[j] = value;
  for (int64_t j = seen; j < (seen + 15) / 16 * 16; j++) scores[j] = value;
}

// The softmax weights of a query over the positions `first` to `seen` - 1 of a chunk, in place of the scores. Returns the maximum
// and the sum.
static void weigh(float *scores, int64_t first, int64_t seen, float *result) {
  leave(scores, first, seen, -3e38f);
  Floats most = load(scores);
  for (int64_t j = 16; j < seen; j += 16) most = larger(load(scores + j), most);
  result[0] = largest_lane(most);
  for (int64_t j = 0; j < seen; j += 16) store(scores + j, exponential(sub(load(scores + j), all(result[0]))));
  leave(scores, first, seen, 0);
  Floats sum = load(scores);
  for (int64_t j = 16; j < seen; j += 16) sum = add(sum, load(scores + j));
  result[1] = add_lanes(sum);
}

// Round the weights of a query, times the scales of values, to levels. The levels of further positions are 0. Returns the scale of the
// levels.
static float weigh_levels(const Tiles<int8_t> &tiles, int64_t width, const Query &query, float *weights, int16_t *levels) {
  for (int64_t j = 0; j < query.seen; j += 16)
    store(weights + j, mul(load(weights + j), load(scales_of(tiles.values[j / 16], width))));
  leave(weights, query.first, query.seen, 0);
  memset(levels, 0, CHUNK * sizeof(int16_t));
  return round_levels(weights, (query.seen + 15) / 16 * 16, MOST, levels);
}

// Merge a chunk's part [2 + width] into the part of the previous chunks.
static void merge(float *part, const float *chunk, int64_t width) {
  const bool grows = chunk[0] > part[0];
  const Floats less = exponential(all(grows ? part[0] - chunk[0] : chunk[0] - part[0])), one = all(1.f);
  const Floats old_factor = grows ? less : one, factor = grows ? one : less;
  float sums[16];
  store(sums, fma(all(part[1]), old_factor, mul(all(chunk[1]), factor)));
  part[0] = grows ? chunk[0] : part[0];
  part[1] = sums[0];
  for (int64_t d = 2; d < 2 + width; d += 16)
    store(part + d, fma(load(part + d), old_factor, mul(load(chunk + d), factor)));
}

// Compute the scores, weights and value sums of queries that read the same tiles.
template <typename Cell>
static void attend_chunk(const Attention &job, const Tiles<Cell> &tiles, const Query *queries, int64_t count) {
  constexpr bool levels = PAIR<Cell> > 1;
  float scores[QUERIES * CHUNK], scales[QUERIES];
  int16_t rounded[levels ? QUERIES * CHUNK : 1];
  float *out[QUERIES];
  int64_t most = 0;
  for (int64_t i = 0; i < count; i++) {
    out[i] = queries[i].part + 2;
    most = queries[i].seen > most ? queries[i].seen : most;
  }
  for (int64_t tile = 0; tile * 16 < most; tile += KEY_TILES)
    in_blocks<QUERY_BLOCK>(count, [&](int64_t i, auto number) {
      const Ahead<Cell> ahead = share_of(job, tiles.values[tile], KEY_TILES, i, number.value, count);
      score_tiles<number.value>(job, tiles.keys + tile, queries + i, scores + i * CHUNK + tile * 16, ahead);
    });
  for (int64_t i = 0; i < count; i++) {
    if (job.cap > 0) limit(scores + i * CHUNK, (queries[i].seen + 15) / 16 * 16, job.cap);
    weigh(scores + i * CHUNK, queries[i].first, queries[i].seen, queries[i].part);
    if constexpr (levels) scales[i] = weigh_levels(tiles, job.width, queries[i], scores + i * CHUNK, rounded + i * CHUNK);
    for (int64_t d = 0; d < job.width; d += 16) store(out[i] + d, all(0));
  }
  const typename Kind<Cell>::Factor *factors;
  if constexpr (levels) factors = rounded;
  else factors = scores;
  in_blocks<QUERY_BLOCK>(count, [&](int64_t i, auto number) {
    int64_t shared = queries[i].seen;  // with levels, further positions have weights of 0
    for (int64_t n = i + 1; n < i + number.value; n++)
      shared = (queries[n].seen < shared) != levels ? queries[n].seen : shared;
    const Ahead<Cell> ahead = share_of(job, tiles.next, TILES, i, number.value, count);
    add_all_values<number.value>(tiles, job.value_width, 0, shared, factors + i * CHUNK, scales + i, out + i, ahead);
    for (int64_t n = i; !levels && n < i + number.value; n++)  // positions that only some of these queries see
      add_all_values<1>(tiles, job.value_width, shared, queries[n].seen, factors + n * CHUNK, scales + n, out + n, ahead);
  });
}

// Attention over one chunk, for the heads of one KV head: tokens of one sequence that read the same tiles.
template <typename Cell>
static void attend_tokens(const Attention &job, int64_t first, int64_t last, int64_t kv, int64_t chunk) {
  const int64_t group = job.heads / job.kv_heads, start = chunk * CHUNK, stop = (last - first) * group;
  const Token *longest = job.tokens + first;
  for (int64_t t = first; t < last; t++)
    if (job.tokens[t].seen() > longest->seen()) longest = job.tokens + t;
  if (longest->seen() <= start) return;
  Tiles<Cell> tiles = {};
  alignas(64) Cell copies[TILES * 2 * (16 * MAX_WIDTH + 64)];
  float scratch[QUERIES * (2 + MAX_WIDTH)];
  find_tiles(job, *longest, kv, start, copies, &tiles);
  const bool folds = job.chunks == 1 && chunk > 0;
  Query queries[QUERIES];
  float *own[QUERIES];
  for (int64_t i = 0, count = 0; i < stop; i++) {
    const int64_t t = first + i / group, head = kv * group + i % group, seen = job.tokens[t].seen() - start;
    int64_t from = job.window && seen > job.window ? seen - job.window : 0;  // where the window begins
    if (job.hides_first && chunk == 0 && from == 0 && seen > 1) from = 1;
    if (from >= CHUNK && !folds) {
      float *part = job.part(t, head, job.chunks == 1 ? 0 : chunk);
      memset(part, 0, (2 + job.width) * sizeof(float));
      part[0] = -3e38f;
    } else if (from < CHUNK && seen > 0) {
      own[count] = job.part(t, head, job.chunks == 1 ? 0 : chunk);
      float *part = folds ? scratch + count * (2 + job.width) : own[count];
      queries[count++] = {job.q + (t * job.heads + head) * job.width, from, least(seen, CHUNK), part};
    }
    if (count < QUERIES && (i + 1 < stop || count == 0)) continue;
    attend_chunk(job, tiles, queries, count);
    for (int64_t n = 0; folds && n < count; n++) merge(own[n], queries[n].part, job.width);
    count = 0;
  }
}

// Neighbouring tokens whose paths begin after the chunk read its tiles together. If paths are part of the chunk, each token has separate
// tiles.
template <typename Cell>
static void attend_cells(const Attention &job, int64_t first_token, int64_t last_token, int64_t kv, int64_t first_chunk,
                         int64_t last_chunk) {
  for (int64_t chunk = first_chunk; chunk < last_chunk; chunk++) {
    const auto shares = [&](const Token &token) { return !token.path_length || token.context >= (chunk + 1) * CHUNK; };
    for (int64_t first = first_token, last; first < last_token; first = last) {
      last = first + 1;
      while (shares(job.tokens[first]) && last < last_token && shares(job.tokens[last])) last++;
      attend_tokens<Cell>(job, first, last, kv, chunk);
    }
  }
}

static void attend(const Attention &job, int64_t first_token, int64_t last_token, int64_t kv, int64_t first_chunk,
                   int64_t last_chunk) {
  with_cells(job.cells, [&](auto cell) { attend_cells<decltype(cell)>(job, first_token, last_token, kv, first_chunk, last_chunk); });
}

static void finish(const Attention &job, int64_t first_token, int64_t last_token) {
  for (int64_t t = first_token; t < last_token; t++) {
    const int64_t chunks = job.chunks == 1 ? 1 : (job.tokens[t].seen() + CHUNK - 1) / CHUNK;
    for (int64_t h = 0; h < job.heads; h++) {
      float *part = job.part(t, h, 0), sum[16];
      for (int64_t c = 1; c < chunks; c++) merge(part, job.part(t, h, c), job.width);
      if (job.sinks) {
        float sink[2 + MAX_WIDTH] = {job.sinks[h], 1};
        merge(part, sink, job.width);
      }
      store(sum, div(all(1.f), all(part[1])));
      float *y = job.y + (t * job.heads + h) * job.value_dim;
      for (int64_t d = 0; d < job.value_dim; d++) y[d] = part[2 + d] * sum[0];
    }
  }
}
