// The largest values of a row, and their log-probabilities.

constexpr int64_t STRIP = 64;  // columns that are searched together, and only if one of them is large enough

// Natural logarithm of a normal number larger than 0 (Cephes, logf).
static inline float logarithm(float a) {
  uint32_t bits;
  memcpy(&bits, &a, 4);
  float exponent = (float)((int32_t)(bits >> 23) - 126), r;
  bits = (bits & 0x7fffff) | 0x3f000000;
  memcpy(&r, &bits, 4);  // from 1/2 to 1
  if (r < 0.707106781f) exponent -= 1, r += r;
  r -= 1;
  const float c[] = {-1.1514610310e-1f, 1.1676998740e-1f, -1.2420140846e-1f, 1.4249322787e-1f,
                     -1.6668057665e-1f, 2.0000714765e-1f, -2.4999993993e-1f, 3.3333331174e-1f};
  float p = 7.0376836292e-2f;
  for (float next : c) p = p * r + next;
  const float square = r * r;
  p = p * r * square - 2.12194440e-4f * exponent;
  return p - 0.5f * square + r + 0.693359375f * exponent;
}

// Insert a value into the sorted list of the `count` largest values so far. Among equal values, the earlier value stays first.
static inline void insert(float value, int64_t column, int64_t count, float *values, int64_t *columns) {
  int64_t at = count;
  for (; at > 0 && values[at - 1] < value; at--) values[at] = values[at - 1], columns[at] = columns[at - 1];
  values[at] = value;
  columns[at] = column;
}

static void find_largest(const float *x, const TopK &job, float *values, int64_t *columns) {
  int64_t count = 0;
  for (int64_t first = 0; first < job.columns; first += STRIP) {
    const int64_t last = least(first + STRIP, job.columns);
    if (count == job.k && last - first == STRIP) {
      Floats most = all(-INFINITY);
      for (int64_t i = first; i < last; i += 16) most = larger(load(x + i), most);
      if (!(largest_lane(most) > values[job.k - 1])) continue;
    }
    for (int64_t i = first; i < last; i++) {
      const float value = x[i] == x[i] ? x[i] : -INFINITY;
      if (count < job.k) insert(value, i, count++, values, columns);
      else if (value > values[job.k - 1]) insert(value, i, job.k - 1, values, columns);
    }
  }
}

static void top(const TopK &job, int64_t first_row, int64_t last_row) {
  for (int64_t row = first_row; row < last_row; row++) {
    const float *x = job.logits + row * job.columns;
    float *values = job.logprobs + row * job.k;
    find_largest(x, job, values, job.found + row * job.k);
    const Floats most = all(values[0]);
    Floats sum = all(0);
    int64_t i = 0;
    for (; i + 16 <= job.columns; i += 16) sum = add(sum, exponential(sub(load(x + i), most)));
    float rest[16] = {0};
    store(rest, exponential(sub(load_some(x + i, job.columns - i), most)));
    if (i < job.columns) sum = add(sum, load_some(rest, job.columns - i));
    const float normalizer = logarithm(add_lanes(sum)), largest = values[0];
    for (i = 0; i < job.k; i++) values[i] = values[i] - largest - normalizer;
  }
}
