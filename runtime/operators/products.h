// Products of a few rows with panels of a weight. Every (row, column) has a separate sum, over the inputs in order.

constexpr int64_t ROW_BYTES = 1 << 17;   // bytes of activations that stay in the cache while panels are read
constexpr int ONE_STREAM = 5;            // up to this number of rows, a thread reads 16-bit weights of one panel at a time

static inline Floats load_weights(Format format, const uint8_t *panel, int64_t k) {
  if (format == FLOAT32) return load((const float *)panel + k * PANEL);
  const uint16_t *narrow = (const uint16_t *)panel + k * PANEL;
  return format == FLOAT16 ? load_float16(narrow) : load_bfloat16(narrow);
}

// M rows of x times P panels: sum = fma(x[k], w[k], sum), k = 0, 1, ...
template <Format format, int P, int M>
static void multiply_floats(const uint8_t *const panels[P], const float *x, int64_t inputs, float *out) {
  Floats sum[M][P];
  for (int m = 0; m < M; m++)
    for (int i = 0; i < P; i++) sum[m][i] = all(0);
  constexpr int64_t size = format == FLOAT32 ? 4 : 2, line = 64 / (PANEL * size);
  for (int64_t k = 0; k < inputs; k++) {
    Floats weights[P];
    for (int i = 0; i < P; i++) {
      if (k % line == 0) prefetch(panels[i] + k * PANEL * size + PAGE);
      weights[i] = load_weights(format, panels[i], k);
    }
    for (int m = 0; m < M; m++) {
      const Floats v = all(x[m * inputs + k]);
      for (int i = 0; i < P; i++) sum[m][i] = fma(v, weights[i], sum[m][i]);
    }
  }
  for (int m = 0; m < M; m++)
    for (int i = 0; i < P; i++) store(out + (m * 2 + i) * PANEL, sum[m][i]);
}

// M rows of float32 activations times a panel of levels. For each block or half block, with sums of the even and of the odd inputs:
//   sum = fma(even + odd, scale, sum), then fma(minimum, share, sum)
template <Format format, bool fine, int M>
static void multiply_float32(const Matrix &w, const uint8_t *const *panel, const Activations &a, int64_t row, float *out) {
  constexpr int halves = fine ? 2 : 1, groups = 8 / halves;
  const int64_t blocks = w.inputs / BLOCK;
  const Blocks place = w.blocks();
  const auto value = [&](Floats q) { return format == UPPER ? from_upper(w, q, 1) : sub(q, all((float)w.zero)); };
  Floats sum[M];
  for (int m = 0; m < M; m++) sum[m] = all(0);
  for (int64_t b = 0; b < blocks; b++) {
    const uint8_t *p = *panel + place.at(b), *scales = p + LEVEL_BYTES<format>, *factors = *panel + place.factors_at(b);
    const uint8_t *lower = lower_plane<format>(panel, b);
    fetch_ahead<format, M>(a, p, lower);
    Bytes levels[8];
    load_levels<format>(p, lower, levels);
    for (int h = 0; h < halves; h++) {
      Floats even[M], odd[M];
      for (int m = 0; m < M; m++) even[m] = odd[m] = all(0);
      for (int k = 0; k < 4 * groups; k += 2) {
        const Floats first = value(level(levels[h * 4 + k / 4], k % 4));
        const Floats second = value(level(levels[h * 4 + k / 4], k % 4 + 1));
        const float *x = a.x + row * w.inputs + b * BLOCK + h * 16 + k;
        for (int m = 0; m < M; m++) {
          even[m] = fma(first, all(x[m * w.inputs]), even[m]);
          odd[m] = fma(second, all(x[m * w.inputs + 1]), odd[m]);
        }
      }
      const Floats scale = load_scales(w, scales, h, factors);
      const Floats minimum = w.minimums ? load_minimums(w, scales, h, factors) : all(0);
      for (int m = 0; m < M; m++) {
        sum[m] = fma(add(even[m], odd[m]), scale, sum[m]);
        if (w.minimums) sum[m] = fma(minimum, all(a.shares[fine][((row + m) * blocks + b) * halves + h]), sum[m]);
      }
    }
  }
  for (int m = 0; m < M; m++) store(out + m * 2 * PANEL, sum[m]);
}

// M rows times P panels with levels of the same kind. Planes have one scale for 32 inputs, and no minimums.
template <Format format, int P, int M>
static void multiply_levels(const Matrix &w, const uint8_t *const panels[P], const Activations &a, int64_t row, float *out) {
  constexpr bool any = format < PLANES;
  if (a.levels && w.fine)
    return (w.minimums ? multiply_int8<format, any, any, P, M> : multiply_int8<format, any, false, P, M>)(w, panels, a, row, out);
  if (a.levels)
    return (w.minimums ? multiply_int8<format, false, any, P, M> : multiply_int8<format, false, false, P, M>)(w, panels, a, row, out);
  for (int i = 0; i < P; i++)
    (w.fine ? multiply_float32<format, any, M> : multiply_float32<format, false, M>)(w, panels + i, a, row, out + i * PANEL);
}

template <int P, int M>
static void multiply_panels(const Matrix &w, const uint8_t *const panels[P], const Activations &a, int64_t row, float *out) {
  if (w.format == BITS4) multiply_levels<BITS4, P, M>(w, panels, a, row, out);
  if (w.format == BITS5) multiply_levels<BITS5, P, M>(w, panels, a, row, out);
  if (w.format == BITS6) multiply_levels<BITS6, P, M>(w, panels, a, row, out);
  if (w.format == BITS8) multiply_levels<BITS8, P, M>(w, panels, a, row, out);
  if (w.format == PLANES) multiply_levels<PLANES, P, M>(w, panels, a, row, out);
  if (w.format == UPPER) multiply_levels<UPPER, P, M>(w, panels, a, row, out);
}

template <Format format, int M>
static void multiply_two(const uint8_t *const panels[2], int count, const float *x, int64_t inputs, float *out) {
  if (count == 2 && M > (format == FLOAT32 ? 1 : ONE_STREAM) && M * 2 <= EESD_SUMS) return multiply_floats<format, 2, M>(panels, x, inputs, out);
  for (int i = 0; i < count; i++) multiply_floats<format, 1, M>(panels + i, x, inputs, out + i * PANEL);
}

// M rows, from `row` on, times one or two panels. The result is out [M, 2, 16].
template <int M>
static void multiply_rows(const Matrix *const w[2], const int64_t panels[2], int count, const Activations &a, int64_t row,
                          float *out) {
  const uint8_t *at[4] = {};  // panels, and their lower planes
  for (int i = 0; i < count; i++) {
    at[i] = w[i]->data + panels[i] * w[i]->panel_bytes();
    if (w[i]->has_planes()) at[i + 2] = w[i]->data + w[i]->lower_at(panels[i]);
  }
  const float *x = a.x + row * w[0]->inputs;
  const int64_t inputs = w[0]->inputs;
  if (w[0]->format == FLOAT32) return multiply_two<FLOAT32, M>(at, count, x, inputs, out);
  if (w[0]->format == FLOAT16) return multiply_two<FLOAT16, M>(at, count, x, inputs, out);
  if (w[0]->format == BFLOAT16) return multiply_two<BFLOAT16, M>(at, count, x, inputs, out);
  if (EESD_PANELS == 2 && count == 2 && w[0]->same_kind(*w[1]))
    return multiply_panels<EESD_PANELS, M>(*w[0], at, a, row, out);
  multiply_panels<1, M>(*w[0], at, a, row, out);
  if (count == 2) multiply_panels<1, M>(*w[1], at + 1, a, row, out + PANEL);
}

// Write rows of a panel's results to their places. With gating, the bias has already been added.
static void put(const Product &job, int64_t row, int64_t rows, int64_t column, int64_t columns, const float *out) {
  for (int m = 0; m < rows; m++) {
    const int64_t at = (row + m) * job.outputs + column;
    Floats values = load(out + m * 2 * PANEL);
    if (job.bias && !job.gating) values = add(values, load_some(job.bias + column, columns));
    if (job.residual) values = add(values, load_some(job.residual + at, columns));
    store_some(job.y + at, columns, values);
  }
}

constexpr float CLAMP = 7, CLAMPED_SLOPE = 1.702f;  // of gpt-oss

// silu(gate) or gelu(gate), by a division.
static inline Floats activated(Floats g, Gating gating) {
  Floats a = g;
  if (gating == CLAMPED) a = mul(g, all(CLAMPED_SLOPE));
  if (gating == GELU) a = mul(g, fma(mul(g, g), all(0.0713548163f), all(1.59576912f)));
  return div(g, add(all(1.f), exponential(sub(all(0), a))));
}

// Replace the gate, next to which is its up part, by silu(gate) up, or the same with another activation.
static void gate(const Product &job, int64_t rows, int64_t column, int64_t columns, float *out) {
  for (int m = 0; m < rows; m++, out += 2 * PANEL) {
    Floats g = load(out), u = load(out + PANEL);
    if (job.bias) {
      g = add(g, load_some(job.bias + column, columns));
      u = add(u, load_some(job.bias + job.outputs + column, columns));
    }
    if (job.gating == CLAMPED) {
      g = sub(all(0), larger(all(-CLAMP), sub(all(0), g)));  // NaN stays, because it is the second argument
      u = sub(all(0), larger(all(-CLAMP), sub(all(0), larger(all(-CLAMP), u))));
      u = add(u, all(1.f));
    }
    store(out, mul(activated(g, job.gating), u));
  }
}

// Multiply all rows of a block by a panel, or by two panels side by side.
static void multiply_block(const Product &job, const Matrix *const w[2], const int64_t panels[2], int count, int64_t offset,
                            int64_t first_row, int64_t last_row) {
  float out[EESD_ROWS * 2 * PANEL];
  for (int64_t row = first_row, rows; row < last_row; row += rows) {
    const int64_t left = last_row - row, tiles = (left + EESD_ROWS - 1) / EESD_ROWS;
    rows = (left + tiles - 1) / tiles;
    with_number<EESD_ROWS>(rows, [&](auto number) { multiply_rows<number.value>(w, panels, count, job.a, row, out); });
    const int64_t column = panels[0] * PANEL, columns = least(PANEL, w[0]->outputs - column);
    if (job.gating) gate(job, rows, column, columns, out);
    put(job, row, rows, offset + column, columns, out);
    const int64_t second = panels[1] * PANEL;
    if (count == 2 && !job.gating) put(job, row, rows, offset + second, least(PANEL, w[0]->outputs - second), out + PANEL);
  }
}

// Panels are numbered consecutively over all parts. With gating, j stands for the gate's panel j and the up part's panel j. Levels of two
// panels at a time come from both halves of the panels, so that each half is read from beginning to end, as processors fetch best.
static void multiply(const Product &job, int64_t first_panel, int64_t last_panel) {
  const int64_t fitting = ROW_BYTES / (job.parts->inputs * (job.a.levels ? 1 : 4)) / EESD_ROWS * EESD_ROWS;
  const int64_t row_block = fitting < 48 ? 48 : fitting;
  for (int64_t row = 0; row < job.rows; row += row_block) {
    const int64_t last_row = least(row + row_block, job.rows);
    int64_t before = 0, offset = 0;
    for (const Matrix *w = job.parts; w < job.parts + (job.gating ? 1 : job.num_parts); w++) {
      const int64_t last = least(last_panel - before, w->panels());
      const int64_t first = first_panel > before ? first_panel - before : 0, half = (last - first + 1) / 2;
      const bool halves = EESD_PANELS == 2 && !job.gating && job.a.levels && w->has_levels();
      const int64_t distance = job.gating ? 0 : halves ? half : 1, end = halves ? first + half : last;
      for (int64_t p = first; p < end;) {
        const int pair = job.gating || p + distance < last ? 2 : 1;
        const Matrix *const both[2] = {w, job.gating ? w + 1 : w};
        const int64_t panels[2] = {p, p + distance};
        multiply_block(job, both, panels, pair, offset, row, last_row);
        p += distance == 1 ? pair : 1;
      }
      before += w->panels();
      offset += w->outputs;
    }
  }
}
