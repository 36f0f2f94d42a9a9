// Attention over caches in place. A token sees positions in order: those of its context lie in slots of the same number, those
// behind it in the slots of its path. Tiles of 16 and chunks of 128 are counted by position, so a token of a tree has the bits
// that it has in a chain.

constexpr int64_t TILES = CHUNK / 16;
constexpr int64_t QUERIES = 32;  // queries whose scores over a chunk are kept at once

static void rotate(const float *x, const float *cos, const float *sin, int64_t half, float *y) {
  for (int64_t i = 0; i < half; i++) {
    const float first = x[i], second = x[half + i];
    y[i] = first * cos[i] - second * sin[i];
    y[half + i] = second * cos[i] + first * sin[i];
  }
}

static void write(const Attention &job, int64_t first_token, int64_t last_token) {
  const int64_t size = job.head_dim, half = size / 2, width = job.width;
  float head[MAX_WIDTH], normed[MAX_WIDTH];
  for (int64_t t = first_token; t < last_token; t++) {
    const Token &token = job.tokens[t];
    const float *x = job.qkv + t * (job.heads + 2 * job.kv_heads) * size;
    const float *cos = job.cos + token.position * half, *sin = job.sin + token.position * half;
    for (int64_t h = 0; h < job.heads; h++, x += size) {
      if (job.q_norm) normalize(x, job.q_norm, job.epsilon, size, normed);
      rotate(job.q_norm ? normed : x, cos, sin, half, job.q + (t * job.heads + h) * width);
    }
    for (int64_t h = 0; h < job.kv_heads; h++, x += size) {
      if (job.k_norm) normalize(x, job.k_norm, job.epsilon, size, normed);
      rotate(job.k_norm ? normed : x, cos, sin, half, head);
      float *key = job.keys(token, h) + token.slot / 16 * width * 16 + token.slot % 16;
      for (int64_t d = 0; d < size; d++) key[d * 16] = head[d];
    }
    for (int64_t h = 0; h < job.kv_heads; h++, x += size) memcpy(job.values(token, h) + token.slot * width, x, size * 4);
  }
}

// The keys and values of a chunk's positions by tiles: those of the cache, or copies where a path is part of the tile. Keys are
// read two tiles at a time, so the last one may stand twice.
struct Tiles {
  const float *keys[TILES], *values[TILES];
};

static void find_tiles(const Attention &job, const Token &token, int64_t kv, int64_t start, float *copies, Tiles *tiles) {
  const float *keys = job.keys(token, kv), *values = job.values(token, kv);
  const int64_t width = job.width;
  for (int64_t i = 0; i < TILES && start + i * 16 < token.seen(); i++) {
    const int64_t first = start + i * 16;
    if (!token.path_length || first + 16 <= token.context) {
      tiles->keys[i] = keys + first / 16 * width * 16;
      tiles->values[i] = values + first * width;
      continue;
    }
    float *key = copies + i * 32 * width, *value = key + 16 * width;
    for (int64_t j = 0; j < 16; j++) {
      const int64_t position = first + j < token.seen() ? first + j : token.seen() - 1;
      const int64_t slot = position < token.context ? position : token.path[position - token.context];
      const float *from = keys + slot / 16 * width * 16 + slot % 16;
      for (int64_t d = 0; d < width; d++) key[d * 16 + j] = from[d * 16];
      memcpy(value + j * width, values + slot * width, width * 4);
    }
    tiles->keys[i] = key;
    tiles->values[i] = value;
  }
  for (int64_t i = 1; i < TILES; i++)
    if (!tiles->keys[i]) tiles->keys[i] = tiles->keys[i - 1];
}

// Scores of Q queries with the keys of two tiles: score = fma(key[d], query[d], score), d = 0, 1, ..., then times the scale.
template <int Q>
static void score_tiles(const float *const *keys, const float *const *queries, int64_t size, float scale, float *scores) {
  Floats left[Q], right[Q];
  for (int q = 0; q < Q; q++) left[q] = right[q] = all(0);
  for (int64_t d = 0; d < size; d++) {
    const Floats first = load(keys[0] + d * 16), second = load(keys[1] + d * 16);
    for (int q = 0; q < Q; q++) {
      const Floats value = all(queries[q][d]);
      left[q] = fma(first, value, left[q]);
      right[q] = fma(second, value, right[q]);
    }
  }
  for (int q = 0; q < Q; q++) {
    store(scores + q * CHUNK, mul(left[q], all(scale)));
    store(scores + q * CHUNK + 16, mul(right[q], all(scale)));
  }
}

using ScoreTiles = void (*)(const float *const *, const float *const *, int64_t, float, float *);
static const ScoreTiles score_some[] = {
    nullptr, score_tiles<1>, score_tiles<2>, score_tiles<3>, score_tiles<4>,
#if EESD_ROWS == 8
    score_tiles<5>, score_tiles<6>, score_tiles<7>, score_tiles<8>,
#endif
};

// out = fma(weight[j], value[j], out) for the positions j from `first` to `last` - 1, of Q queries and V registers of values.
template <int Q, int V>
static void add_values(const Tiles &tiles, int64_t width, int64_t first, int64_t last, const float *weights, float *const *out) {
  Floats sum[Q][V];
  for (int q = 0; q < Q; q++)
    for (int v = 0; v < V; v++) sum[q][v] = load(out[q] + 16 * v);
  for (int64_t j = first; j < last; j++) {
    const float *value = tiles.values[j / 16] + j % 16 * width;
    for (int v = 0; v < V; v++) {
      const Floats part = load(value + 16 * v);
      for (int q = 0; q < Q; q++) sum[q][v] = fma(all(weights[q * CHUNK + j]), part, sum[q][v]);
    }
  }
  for (int q = 0; q < Q; q++)
    for (int v = 0; v < V; v++) store(out[q] + 16 * v, sum[q][v]);
}

template <int Q>
static void add_some(const Tiles &tiles, int64_t width, int64_t first, int64_t last, const float *weights, float *const *out) {
  Tiles moved = tiles;
  float *to[Q];
  for (int64_t d = 0; d < width;) {
    const int64_t step = width - d >= 64 ? 64 : 16;
    for (int q = 0; q < Q; q++) to[q] = out[q] + d;
    for (int64_t i = first / 16; i * 16 < last; i++) moved.values[i] = tiles.values[i] + d;
    (step == 64 ? add_values<Q, 4> : add_values<Q, 1>)(moved, width, first, last, weights, to);
    d += step;
  }
}

using AddSome = void (*)(const Tiles &, int64_t, int64_t, int64_t, const float *, float *const *);
static const AddSome add_few[] = {nullptr, add_some<1>, add_some<2>, add_some<3>, add_some<4>};

// The softmax weights of a query over `seen` positions of a chunk, in place of the scores. Gives the maximum and the sum.
static void weigh(float *scores, int64_t seen, float *result) {
  const int64_t end = (seen + 15) / 16 * 16;
  for (int64_t j = seen; j < end; j++) scores[j] = -3e38f;
  Floats most = load(scores);
  for (int64_t j = 16; j < end; j += 16) most = larger(load(scores + j), most);
  result[0] = largest_lane(most);
  for (int64_t j = 0; j < end; j += 16) store(scores + j, exponential(sub(load(scores + j), all(result[0]))));
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

// A query over one chunk: the positions of the chunk that it sees, and where its part [2 + width] goes.
struct Query {
  const float *q;
  int64_t seen;
  float *part;
};

// Scores, weights and sums of values, of queries with the same tiles.
static void attend_chunk(const Attention &job, const Tiles &tiles, const Query *queries, int64_t count) {
  float scores[QUERIES * CHUNK];
  const float *q[QUERIES];
  float *out[QUERIES];
  int64_t most = 0, fewest = CHUNK;
  for (int64_t i = 0; i < count; i++) {
    q[i] = queries[i].q;
    out[i] = queries[i].part + 2;
    most = queries[i].seen > most ? queries[i].seen : most;
    fewest = least(fewest, queries[i].seen);
  }
  for (int64_t tile = 0; tile * 16 < most; tile += 2)
    for (int64_t i = 0; i < count; i += EESD_ROWS)
      score_some[least(EESD_ROWS, count - i)](tiles.keys + tile, q + i, job.head_dim, job.scale, scores + i * CHUNK + tile * 16);
  for (int64_t i = 0; i < count; i++) {
    weigh(scores + i * CHUNK, queries[i].seen, queries[i].part);
    for (int64_t d = 0; d < job.width; d += 16) store(out[i] + d, all(0));
  }
  for (int64_t i = 0; i < count; i += 4) add_few[least(4, count - i)](tiles, job.width, 0, fewest, scores + i * CHUNK, out + i);
  for (int64_t i = 0; i < count; i++)  // the positions that not all of them see
    if (queries[i].seen > fewest) add_some<1>(tiles, job.width, fewest, queries[i].seen, scores + i * CHUNK, out + i);
}

// Tokens of one sequence with the same tiles (those of a chain, or a single one), over one chunk, for the heads of one KV head.
static void attend_tokens(const Attention &job, int64_t first, int64_t last, int64_t kv, int64_t chunk) {
  const int64_t group = job.heads / job.kv_heads, start = chunk * CHUNK, stop = (last - first) * group;
  const Token *longest = job.tokens + first;
  for (int64_t t = first; t < last; t++)
    if (job.tokens[t].seen() > longest->seen()) longest = job.tokens + t;
  if (longest->seen() <= start) return;
  Tiles tiles = {};
  float copies[TILES * 32 * MAX_WIDTH], scratch[QUERIES * (2 + MAX_WIDTH)];
  find_tiles(job, *longest, kv, start, copies, &tiles);
  const bool folds = job.chunks == 1 && chunk > 0;
  Query queries[QUERIES];
  float *own[QUERIES];
  for (int64_t i = 0, count = 0; i < stop; i++) {
    const int64_t t = first + i / group, head = kv * group + i % group, seen = job.tokens[t].seen() - start;
    if (seen > 0) {
      own[count] = job.part(t, head, job.chunks == 1 ? 0 : chunk);
      float *part = folds ? scratch + count * (2 + job.width) : own[count];
      queries[count++] = {job.q + (t * job.heads + head) * job.width, least(seen, CHUNK), part};
    }
    if (count < QUERIES && (i + 1 < stop || count == 0)) continue;
    attend_chunk(job, tiles, queries, count);
    for (int64_t n = 0; folds && n < count; n++) merge(own[n], queries[n].part, job.width);
    count = 0;
  }
}

static void attend(const Attention &job, int64_t first_token, int64_t last_token, int64_t kv, int64_t first_chunk,
                   int64_t last_chunk) {
  for (int64_t chunk = first_chunk; chunk < last_chunk; chunk++)
    for (int64_t first = first_token, last; first < last_token; first = last) {
      last = first + 1;
      while (!job.tokens[first].path_length && last < last_token && !job.tokens[last].path_length) last++;
      attend_tokens(job, first, last, kv, chunk);
    }
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
