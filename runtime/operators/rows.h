// Activations: root mean square norm, rounding to 8 bits, and row functions that other kernels need.

static inline int64_t least(int64_t a, int64_t b) { return a < b ? a : b; }

template <int N> struct Number {
  static constexpr int value = N;
};

// Call work(Number<count>) for a count from 1 to Most.
template <int Most, typename Work> static void with_number(int64_t count, const Work &work) {
  if constexpr (Most > 1) {
    if (count < Most) return with_number<Most - 1>(count, work);
  }
  work(Number<Most>{});
}

// Load the first `count` of sixteen values; the rest are 0.
static inline Floats load_some(const float *p, int64_t count) {
  if (count == 16) return load(p);
  float lane[16] = {0};
  for (int64_t i = 0; i < count; i++) lane[i] = p[i];
  return load(lane);
}

// Write the first `count` of sixteen values.
static inline void store_some(float *p, int64_t count, Floats values) {
  if (count == 16) return store(p, values);
  float lane[16];
  store(lane, values);
  for (int64_t i = 0; i < count; i++) p[i] = lane[i];
}

// e^a, with an error of about 1 ulp, for `a` from -87 to 88; outside this range, the value at the nearer end of the range (Cephes, expf).
static inline Floats exponential(Floats a) {
  a = smaller(larger(a, all(-87.f)), all(88.f));
  const Floats whole = nearest(mul(a, all(1.44269504f)));
  Floats rest = fma(whole, all(-0.693359375f), a);
  rest = fma(whole, all(2.12194440e-4f), rest);
  Floats p = all(1.9875691500e-4f);
  p = fma(p, rest, all(1.3981999507e-3f));
  p = fma(p, rest, all(8.3334519073e-3f));
  p = fma(p, rest, all(4.1665795894e-2f));
  p = fma(p, rest, all(1.6666665459e-1f));
  p = fma(p, rest, all(5.0000001201e-1f));
  p = fma(p, mul(rest, rest), add(rest, all(1.f)));
  return mul(p, power_of_two(whole));
}

// y = x / rms(x) * weight, for one row. x and y may be the same.
static inline void normalize(const float *x, const float *weight, float epsilon, int64_t size, float *y) {
  const auto part = [size](const float *p, int64_t i) { return load_some(p + i, least(16, size - i)); };
  Floats squares = all(0);
  for (int64_t i = 0; i < size; i += 16) squares = fma(part(x, i), part(x, i), squares);
  const float factor = 1.f / __builtin_sqrtf(add_lanes(squares) / (float)size + epsilon);
  for (int64_t i = 0; i < size; i += 16)
    store_some(y + i, least(16, size - i), mul(mul(part(x, i), all(factor)), part(weight, i)));
}

// Round blocks of 32 values of one row to 8 bits: the largest value becomes level 127 or -127. If it is so small that 127 divided by it
// could be infinite, all levels are 0. If a value is not finite, the scale is NaN, and so are all products of the row.
static inline void round_row(const Preparation &job, const float *x, int64_t row) {
  const int64_t blocks = job.inputs / BLOCK;
  for (int64_t b = 0; b < blocks; b++) {
    const Floats half[2] = {load(x + b * BLOCK), load(x + b * BLOCK + 16)};
    const float largest = largest_lane(larger(absolute(half[0]), absolute(half[1])));
    const float inverse = largest >= 0x1p-100f ? 127.f / largest : 0;
    const int64_t at = row * blocks + b;
    Floats levels[2] = {nearest(mul(half[0], all(inverse))), nearest(mul(half[1], all(inverse)))};
    float added[2] = {add_lanes(levels[0]), add_lanes(levels[1])};
    const bool finite = added[0] + added[1] == added[0] + added[1];  // infinity gives NaN, too: it is multiplied by 0
    const float scale = finite ? largest / 127.f : __builtin_nanf("");
    if (!finite) levels[0] = levels[1] = all(0), added[0] = added[1] = 0;
    int32_t sums[2];
    for (int h = 0; h < 2; h++) {
      store_int8(job.levels + at * BLOCK + h * 16, levels[h]);
      sums[h] = (int32_t)added[h];
      job.sums[1][2 * at + h] = sums[h];
      job.shares[1][2 * at + h] = scale * (float)sums[h];
    }
    job.scales[at] = scale;
    job.sums[0][at] = sums[0] + sums[1];
    job.shares[0][at] = scale * (float)(sums[0] + sums[1]);
  }
}

static inline void add_up_row(const Preparation &job, const float *x, int64_t row) {
  const int64_t blocks = job.inputs / BLOCK;
  for (int64_t b = 0; b < blocks; b++) {
    const Floats first = load(x + b * BLOCK), second = load(x + b * BLOCK + 16);
    const int64_t at = row * blocks + b;
    job.shares[0][at] = add_lanes(add(first, second));
    job.shares[1][2 * at] = add_lanes(first);
    job.shares[1][2 * at + 1] = add_lanes(second);
  }
}

static void prepare(const Preparation &job, int64_t first_row, int64_t last_row) {
  for (int64_t row = first_row; row < last_row; row++) {
    const float *x = job.x + row * job.inputs;
    if (job.norm) {
      float *normed = job.normed + row * job.inputs;
      normalize(x, job.norm, job.epsilon, job.inputs, normed);
      x = normed;
    }
    if (job.int8) round_row(job, x, row);
    else if (job.blocks) add_up_row(job, x, row);
  }
}
