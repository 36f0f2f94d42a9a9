// Attention over caches in place. A token sees positions in order: those of its context lie in slots of the same number, those
// behind it in the slots of its path. Tiles of 16 and chunks of 128 are counted by position, so a token of a tree has the bits
// that it has in a chain.

constexpr int64_t TILES = CHUNK / 16;
constexpr int64_t QUERIES = 48;  // queries whose scores over a chunk are kept at once
static inline Floats load_cells(const float *p) { return load(p); }
static inline Floats load_cells(const uint16_t *p) { return load_float16(p); }

template <int N> struct Number {
  static constexpr int value = N;
};

// work(Number<count>) for a count from 1 to Most.
template <int Most, typename Work> static void with_number(int64_t count, const Work &work) {
  if constexpr (Most > 1) {
    if (count < Most) return with_number<Most - 1>(count, work);
  }
  work(Number<Most>{});
}

// work(first, Number) for blocks of 0 to count - 1 that hold at most so many, and about the same number each.
template <int Most, typename Work> static void in_blocks(int64_t count, const Work &work) {
  const int64_t blocks = (count + Most - 1) / Most;
  for (int64_t b = 0, first = 0, last; b < blocks; b++, first = last) {
    last = count * (b + 1) / blocks;
    with_number<Most>(last - first, [&](auto number) { work(first, number); });
  }
}

static void rotate(const float *x, const float *cos, const float *sin, int64_t half, float *y) {
  if (!cos) {
    memcpy(y, x, 2 * half * sizeof(float));
    return;
  }
  for (int64_t i = 0; i < half; i++) {
    const float first = x[i], second = x[half + i];
    y[i] = first * cos[i] - second * sin[i];
    y[half + i] = second * cos[i] + first * sin[i];
  }
}

template <typename Cell> static Cell round_to(float x);
template <> float round_to<float>(float x) { return x; }
template <> uint16_t round_to<uint16_t>(float x) { return half_of(x); }

// Rotate queries and keys, and write keys and values into the cache.
template <typename Cell> static void write_cells(const Attention &job, int64_t first_token, int64_t last_token) {
  const int64_t size = job.head_dim, half = size / 2, width = job.width;
  float head[MAX_WIDTH], normed[MAX_WIDTH];
  for (int64_t t = first_token; t < last_token; t++) {
    const Token &token = job.tokens[t];
    const float *x = job.qkv + t * (job.heads + 2 * job.kv_heads) * size;
    const float *cos = job.cos ? job.cos + token.position * half : nullptr, *sin = job.sin ? job.sin + token.position * half : nullptr;
    for (int64_t h = 0; h < job.heads; h++, x += size) {
      if (job.q_norm) normalize(x, job.q_norm, job.epsilon, size, normed);
      rotate(job.q_norm ? normed : x, cos, sin, half, job.q + (t * job.heads + h) * width);
    }
    for (int64_t h = 0; h < job.kv_heads; h++, x += size) {
      if (job.k_norm) normalize(x, job.k_norm, job.epsilon, size, normed);
      rotate(job.k_norm ? normed : x, cos, sin, half, head);
      Cell *key = job.keys<Cell>(token, h) + token.slot / 16 * width * 16 + token.slot % 16;
      for (int64_t d = 0; d < size; d++) key[d * 16] = round_to<Cell>(head[d]);
    }
    for (int64_t h = 0; h < job.kv_heads; h++, x += size) {
      Cell *value = job.values<Cell>(token, h) + token.slot * width;
      for (int64_t d = 0; d < size; d++) value[d] = round_to<Cell>(x[d]);
    }
  }
}

static void write(const Attention &job, int64_t first_token, int64_t last_token) {
  (job.float16 ? write_cells<uint16_t> : write_cells<float>)(job, first_token, last_token);
}

// The keys and values of a chunk's positions by tiles: those of the cache, or copies where a path is part of the tile. Keys are
// read some tiles at a time, so the last one may stand twice.
template <typename Cell> struct Tiles {
  const Cell *keys[TILES], *values[TILES];
  const Cell *next;  // keys of the next chunk, which are fetched in time
};

template <typename Cell>
static void find_tiles(const Attention &job, const Token &token, int64_t kv, int64_t start, Cell *copies, Tiles<Cell> *tiles) {
  const Cell *keys = job.keys<Cell>(token, kv), *values = job.values<Cell>(token, kv);
  const int64_t width = job.width;
  for (int64_t i = 0; i < TILES && start + i * 16 < token.seen(); i++) {
    const int64_t first = start + i * 16;
    if (!token.path_length || first + 16 <= token.context) {
      tiles->keys[i] = keys + first / 16 * width * 16;
      tiles->values[i] = values + first * width;
      continue;
    }
    Cell *key = copies + i * 32 * width, *value = key + 16 * width;
    for (int64_t j = 0; j < 16; j++) {
      const int64_t position = first + j < token.seen() ? first + j : token.seen() - 1;
      const int64_t slot = position < token.context ? position : token.path[position - token.context];
      const Cell *from = keys + slot / 16 * width * 16 + slot % 16;
      for (int64_t d = 0; d < width; d++) key[d * 16 + j] = from[d * 16];
      memcpy(value + j * width, values + slot * width, width * sizeof(Cell));
    }
    tiles->keys[i] = key;
    tiles->values[i] = value;
  }
  tiles->next = keys + (start + (start + CHUNK < token.context ? CHUNK : 0)) * width;
  for (int64_t i = 1; i < TILES; i++)
    if (!tiles->keys[i]) tiles->keys[i] = tiles->keys[i - 1];
}

// What comes into the cache while vectors are read: so many cells for each of them, which is steadier than all at once.
template <typename Cell> struct Ahead {
  const Cell *from;
  int64_t step;
  void fetch(int64_t vector) const { prefetch(from + vector * step); }
};

// The part of `vectors` vectors that is fetched while `some` queries behind the first ones of `count` read as many.
template <typename Cell>
static Ahead<Cell> share_of(const Cell *from, int64_t vectors, int64_t first, int64_t some, int64_t count) {
  return {from + vectors * 16 * first / count, 16 * some / count};
}

// Scores of Q queries with the keys of some tiles: score = fma(key[d], query[d], score), d = 0, 1, ..., then times the scale.
template <int Q, typename Cell>
static void score_tiles(const Cell *const *keys, const float *const *queries, int64_t size, float scale, float *scores,
                        const Ahead<Cell> &ahead) {
  Floats sum[Q][KEY_TILES];
  for (int q = 0; q < Q; q++)
    for (int t = 0; t < KEY_TILES; t++) sum[q][t] = all(0);
  for (int64_t d = 0; d < size; d++) {
    Floats key[KEY_TILES];
    for (int t = 0; t < KEY_TILES; t++) {
      key[t] = load_cells(keys[t] + d * 16);
      ahead.fetch(t * size + d);
    }
    for (int q = 0; q < Q; q++) {
      const Floats value = all(queries[q][d]);
      for (int t = 0; t < KEY_TILES; t++) sum[q][t] = fma(key[t], value, sum[q][t]);
    }
  }
  for (int q = 0; q < Q; q++)
    for (int t = 0; t < KEY_TILES; t++) store(scores + q * CHUNK + t * 16, mul(sum[q][t], all(scale)));
}

// out = fma(weight[j], value[j], out) for the positions j from `first` to `last` - 1, of Q queries and V vectors of values.
template <int Q, int V, typename Cell>
static void add_values(const Cell *const *values, int64_t width, int64_t first, int64_t last, const float *weights,
                       float *const *out, int64_t d, const Ahead<Cell> &ahead) {
  Floats sum[Q][V];
  for (int q = 0; q < Q; q++)
    for (int v = 0; v < V; v++) sum[q][v] = load(out[q] + d + 16 * v);
  for (int64_t start = first, stop; start < last; start = stop) {  // of a tile
    stop = least(start / 16 * 16 + 16, last);
    const Cell *value = values[start / 16] + start % 16 * width + d;
    for (int64_t j = start; j < stop; j++, value += width) {
      for (int v = 0; v < V; v++) {
        const Floats part = load_cells(value + 16 * v);
        ahead.fetch((d / 16 + v) * CHUNK + j);
        for (int q = 0; q < Q; q++) sum[q][v] = fma(all(weights[q * CHUNK + j]), part, sum[q][v]);
      }
    }
  }
  for (int q = 0; q < Q; q++)
    for (int v = 0; v < V; v++) store(out[q] + d + 16 * v, sum[q][v]);
}

template <int Q, typename Cell>
static void add_all_values(const Tiles<Cell> &tiles, int64_t width, int64_t first, int64_t last, const float *weights,
                           float *const *out, const Ahead<Cell> &ahead) {
  constexpr int V = vectors_beside(Q);
  int64_t d = 0;
  for (; d + 16 * V <= width; d += 16 * V) add_values<Q, V>(tiles.values, width, first, last, weights, out, d, ahead);
  for (; d < width; d += 16) add_values<Q, 1>(tiles.values, width, first, last, weights, out, d, ahead);
}

// Scores that are large become the cap: s = cap - 2 cap / (exp(2 s / cap) + 1), which is cap tanh(s / cap).
static void limit(float *scores, int64_t end, float cap) {
  for (int64_t j = 0; j < end; j += 16) {
    const Floats s = load(scores + j), grown = exponential(div(add(s, s), all(cap)));
    store(scores + j, sub(all(cap), div(all(cap + cap), add(grown, all(1.f)))));
  }
}

// The softmax weights of a query over the positions `first` to `seen` - 1 of a chunk, in place of the scores. Gives the maximum
// and the sum.
static void weigh(float *scores, int64_t first, int64_t seen, float *result) {
  const int64_t end = (seen + 15) / 16 * 16;
  for (int64_t j = 0; j < first; j++) scores[j] = -3e38f;
  for (int64_t j = seen; j < end; j++) scores[j] = -3e38f;
  Floats most = load(scores);
  for (int64_t j = 16; j < end; j += 16) most = larger(load(scores + j), most);
  result[0] = largest_lane(most);
  for (int64_t j = 0; j < end; j += 16) store(scores + j, exponential(sub(load(scores + j), all(result[0]))));
  for (int64_t j = 0; j < first; j++) scores[j] = 0;
  for (int64_t j = seen; j < end; j++) scores[j] = 0;
  Floats sum = load(scores);
  for (int64_t j = 16; j < end; j += 16) sum = add(sum, load(scores + j));
  result[1] = add_lanes(sum);
}

// Add a chunk's part [2 + width] to that of the chunks before it.
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

// A query over one chunk: the positions of the chunk that it sees, `first` to `seen` - 1, and where its part [2 + width] goes.
struct Query {
  const float *q;
  int64_t first, seen;
  float *part;
};

// Scores, weights and sums of values, of queries with the same tiles.
template <typename Cell>
static void attend_chunk(const Attention &job, const Tiles<Cell> &tiles, const Query *queries, int64_t count) {
  float scores[QUERIES * CHUNK];
  const float *q[QUERIES];
  float *out[QUERIES];
  int64_t most = 0;
  for (int64_t i = 0; i < count; i++) {
    q[i] = queries[i].q;
    out[i] = queries[i].part + 2;
    most = queries[i].seen > most ? queries[i].seen : most;
  }
  for (int64_t tile = 0; tile * 16 < most; tile += KEY_TILES)
    in_blocks<QUERY_BLOCK>(count, [&](int64_t i, auto number) {
      const Ahead<Cell> ahead = share_of(tiles.values[tile], job.width * KEY_TILES, i, number.value, count);
      score_tiles<number.value>(tiles.keys + tile, q + i, job.head_dim, job.scale, scores + i * CHUNK + tile * 16, ahead);
    });
  for (int64_t i = 0; i < count; i++) {
    if (job.cap > 0) limit(scores + i * CHUNK, (queries[i].seen + 15) / 16 * 16, job.cap);
    weigh(scores + i * CHUNK, queries[i].first, queries[i].seen, queries[i].part);
    for (int64_t d = 0; d < job.width; d += 16) store(out[i] + d, all(0));
  }
  in_blocks<QUERY_BLOCK>(count, [&](int64_t i, auto number) {
    int64_t fewest = CHUNK;
    for (int64_t n = i; n < i + number.value; n++) fewest = least(fewest, queries[n].seen);
    const Ahead<Cell> ahead = share_of(tiles.next, job.width * TILES, i, number.value, count);
    add_all_values<number.value>(tiles, job.width, 0, fewest, scores + i * CHUNK, out + i, ahead);
    for (int64_t n = i; n < i + number.value; n++)  // the positions that not all of them see
      add_all_values<1>(tiles, job.width, fewest, queries[n].seen, scores + n * CHUNK, out + n, ahead);
  });
}

// Tokens of one sequence with the same tiles, over one chunk, for the heads of one KV head.
template <typename Cell>
static void attend_tokens(const Attention &job, int64_t first, int64_t last, int64_t kv, int64_t chunk) {
  const int64_t group = job.heads / job.kv_heads, start = chunk * CHUNK, stop = (last - first) * group;
  const Token *longest = job.tokens + first;
  for (int64_t t = first; t < last; t++)
    if (job.tokens[t].seen() > longest->seen()) longest = job.tokens + t;
  if (longest->seen() <= start) return;
  Tiles<Cell> tiles = {};
  Cell copies[TILES * 32 * MAX_WIDTH];
  float scratch[QUERIES * (2 + MAX_WIDTH)];
  find_tiles(job, *longest, kv, start, copies, &tiles);
  const bool folds = job.chunks == 1 && chunk > 0;
  Query queries[QUERIES];
  float *own[QUERIES];
  for (int64_t i = 0, count = 0; i < stop; i++) {
    const int64_t t = first + i / group, head = kv * group + i % group, seen = job.tokens[t].seen() - start;
    int64_t from = job.window && seen > job.window ? seen - job.window : 0;  // the window begins there
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

// Neighbours whose paths begin behind the chunk read its tiles together. Where paths are part of it, each token has its own.
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
  (job.float16 ? attend_cells<uint16_t> : attend_cells<float>)(job, first_token, last_token, kv, first_chunk, last_chunk);
}

static void finish(const Attention &job, int64_t first_token, int64_t last_token) {
  for (int64_t t = first_token; t < last_token; t++) {
    const int64_t chunks = job.chunks == 1 ? 1 : (job.tokens[t].seen() + CHUNK - 1) / CHUNK;
    for (int64_t h = 0; h < job.heads; h++) {
      float *part = job.part(t, h, 0), sum[16];
      for (int64_t c = 1; c < chunks; c++) merge(part, job.part(t, h, c), job.width);
      store(sum, div(all(1.f), all(part[1])));
      float *y = job.y + (t * job.heads + h) * job.head_dim;
      for (int64_t d = 0; d < job.head_dim; d++) y[d] = part[2 + d] * sum[0];
    }
  }
}
