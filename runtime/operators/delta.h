// The gated delta rule and state spaces: the results of a token's convolution, and the steps of a head's state.

static inline Floats logistic(Floats a) { return div(all(1.f), add(all(1.f), exponential(sub(all(0), a)))); }
static inline Floats silu(Floats a) { return div(a, add(all(1.f), exponential(sub(all(0), a)))); }

// log(1 + e^a), with a small relative error even for small results.
static inline float softplus(float a) {
  if (a > 20.f) return a;
  float lane[16];
  store(lane, exponential(all(a)));
  const float sum = 1.f + lane[0];
  return sum == 1.f ? lane[0] : logarithm(sum) * lane[0] / (sum - 1.f);
}

// y = x / |x| * scale.
static inline void make_unit(const float *x, float scale, int64_t size, float *y) {
  Floats squares = all(0);
  for (int64_t i = 0; i < size; i += 16) {
    const Floats part = load_some(x + i, least(16, size - i));
    squares = fma(part, part, squares);
  }
  const float factor = 1.f / __builtin_sqrtf(add_lanes(squares) + DELTA_EPSILON);
  for (int64_t i = 0; i < size; i += 16) {
    const int64_t count = least(16, size - i);
    store_some(y + i, count, mul(mul(load_some(x + i, count), all(factor)), all(scale)));
  }
}

// Write the records of tokens, and the other inputs of the tokens' steps. For the delta rule, values take the place of deltas.
static void mix(const DeltaRule &job, int64_t first_token, int64_t last_token) {
  const int64_t keys = job.keys(), mixed = job.mixed();
  for (int64_t t = first_token; t < last_token; t++) {
    const float *x = job.x + t * job.columns(), *const *before = job.before + t * (job.taps - 1);
    float *record = job.records[t], *convolved = job.convolved + t * mixed;
    memcpy(record, x, (size_t)mixed * sizeof(float));
    for (int64_t i = 0; i < mixed; i += 16) {
      const int64_t count = least(16, mixed - i);
      Floats sum = job.taps_bias ? load_some(job.taps_bias + i, count) : all(0);
      for (int64_t distance = job.taps - 1; distance >= 0; distance--) {
        const float *state = distance ? before[distance - 1] : x;
        if (!state) continue;
        sum = fma(load_some(job.weights + (job.taps - 1 - distance) * mixed + i, count), load_some(state + i, count), sum);
      }
      store_some(convolved + i, count, silu(sum));
    }
    const float scale = 1.f / __builtin_sqrtf((float)job.key_dim);
    if (job.space) memcpy(record + mixed, convolved + keys, (size_t)keys * sizeof(float));
    for (int64_t h = 0; !job.space && h < job.key_heads; h++) {
      const int64_t at = h * job.key_dim;
      make_unit(convolved + at, scale, job.key_dim, convolved + at);
      make_unit(convolved + keys + at, 1.f, job.key_dim, record + mixed + at);
    }
    const float *inputs = x + job.columns() - job.value_heads, *values = convolved + 2 * keys;
    float *deltas = record + mixed + keys, *logs = deltas + job.values();
    for (int64_t h = 0; h < job.value_heads; h++) {
      float rate[16];
      store(rate, exponential(all(job.decay[h])));
      const float size = softplus(inputs[h] + job.bias[h]);
      logs[h] = (0 - size) * rate[0];
      for (int64_t j = h * job.value_dim; j < (h + 1) * job.value_dim; j++) deltas[j] = job.space ? values[j] * size : values[j];
    }
  }
}

// One step of a block of columns, from column d on, of a state [key_dim, width]. Without a query, only the state changes.
template <int count> static inline void step_columns(const DeltaRule &job, const float *key, const float *query, Floats decay, Floats rate,
                                                     int64_t d, const float *from, float *to, float *deltas, float *y) {
  Floats delta[count], sum[count];
  for (int c = 0; c < count; c++) delta[c] = load_some(deltas + d + 16 * c, least(16, job.value_dim - d - 16 * c));
  if (query && !job.space) {
    for (int c = 0; c < count; c++) sum[c] = all(0);
    for (int64_t k = 0; k < job.key_dim; k++)
      for (int c = 0; c < count; c++) sum[c] = fma(mul(load(from + k * job.width + d + 16 * c), decay), all(key[k]), sum[c]);
    for (int c = 0; c < count; c++) {
      delta[c] = mul(sub(delta[c], sum[c]), rate);
      store_some(deltas + d + 16 * c, least(16, job.value_dim - d - 16 * c), delta[c]);
    }
  }
  for (int c = 0; c < count; c++) sum[c] = all(0);
  for (int64_t k = 0; k < job.key_dim; k++)
    for (int c = 0; c < count; c++) {
      const int64_t at = k * job.width + d + 16 * c;
      const Floats state = fma(all(key[k]), delta[c], mul(load(from + at), decay));
      store(to + at, state);
      if (query) sum[c] = fma(state, all(query[k]), sum[c]);
    }
  if (!query) return;
  for (int c = 0; c < count; c++) store_some(y + d + 16 * c, least(16, job.value_dim - d - 16 * c), sum[c]);
}

// Steps of a head's state over `count` records that are `stride` floats apart. `from` and `to` may be the same. If the records belong to
// tokens of the call, `token` is the first of these tokens, deltas are computed and outputs are written; if not, `token` is -1. Columns of
// a state do not depend on each other, so a block of them takes all steps while it is in the cache.
static void step(const DeltaRule &job, int64_t token, float *record, int64_t stride, int64_t count, int64_t head, const float *from,
                 float *to) {
  const int64_t keys = job.keys(), mixed = job.mixed(), key_at = head / (job.value_heads / job.key_heads) * job.key_dim;
  const bool computes = token >= 0;
  for (int64_t d = 0; d < job.width; d += 64)
    for (int64_t i = 0; i < count; i++) {
      float *own = record + i * stride, *deltas = own + mixed + keys + head * job.value_dim;
      const Floats decay = exponential(all(own[mixed + keys + job.values() + head]));
      const float *query = computes ? job.convolved + (token + i) * mixed + key_at : nullptr;
      float *y = computes ? job.y + (token + i) * job.values() + head * job.value_dim : nullptr;
      const Floats rate = computes && !job.space ? logistic(all(job.x[(token + i) * job.columns() + mixed + job.values() + head])) : all(0);
      with_number<4>(least(4, (job.width - d) / 16), [&](auto vectors) {
        step_columns<decltype(vectors)::value>(job, own + mixed + key_at, query, decay, rate, d, i ? to : from, to, deltas, y);
      });
    }
  for (int64_t i = 0; computes && i < count; i++) {
    float *y = job.y + (token + i) * job.values() + head * job.value_dim;
    if (!job.space) normalize(y, job.norm, job.epsilon, job.value_dim, y);
    const float *gate = job.x + (token + i) * job.columns() + mixed + head * job.value_dim;
    const float *value = job.convolved + (token + i) * mixed + 2 * keys + head * job.value_dim;
    for (int64_t j = 0; j < job.value_dim; j += 16) {
      const int64_t some = least(16, job.value_dim - j);
      Floats out = load_some(y + j, some);
      if (job.space) out = fma(all(job.skip[head]), load_some(value + j, some), out);
      store_some(y + j, some, mul(out, silu(load_some(gate + j, some))));
    }
  }
}
