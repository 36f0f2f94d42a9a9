// Products of 8-bit activations with levels, for instructions that add four products to a 32-bit sum.

// M rows of 8-bit activations times P panels of levels. For each block or half block:
//   sum = fma(float(sum of level x - zero sum of x), scale of w * scale of x, sum), then fma(minimum, share, sum)
template <Format format, bool fine, bool minimums, int P, int M>
static void multiply_int8(const Matrix &w, const uint8_t *const panels[P], const Activations &a, int64_t row, float *out) {
  constexpr int halves = fine ? 2 : 1, groups = 8 / halves;
  const int64_t blocks = w.inputs / BLOCK;
  const Blocks place = w.blocks();
  Floats sum[M][P];
  for (int m = 0; m < M; m++)
    for (int i = 0; i < P; i++) sum[m][i] = all(0);
  for (int64_t b = 0; b < blocks; b++) {
    Bytes levels[P][8];
    for (int i = 0; i < P; i++) {
      const uint8_t *p = panels[i] + place.at(b), *lower = lower_plane<format>(panels + i, b);
      fetch_ahead<format, M>(a, p, lower);
      load_levels<format>(p, lower, levels[i]);
    }
    for (int h = 0; h < halves; h++) {
      Floats scale[P], minimum[P];
      for (int i = 0; i < P; i++) {
        const uint8_t *scales = panels[i] + place.at(b) + LEVEL_BYTES<format>, *factors = panels[i] + place.factors_at(b);
        scale[i] = load_scales(w, scales, h, factors);
        if (minimums) minimum[i] = load_minimums(w, scales, h, factors);
      }
      for (int m = 0; m < M; m++) {
        const int64_t block = (row + m) * blocks + b, part = block * halves + h;
        const int8_t *x = a.levels + block * BLOCK + h * 16;
        const Bytes zero = all_sums(minimums || format == UPPER ? 0 : -w.zero * a.sums[fine][part]);
        Bytes products[P];
        for (int i = 0; i < P; i++) products[i] = zero;
        for (int k = 0; k < groups; k++) {
          const Four four = all_fours(x + 4 * k);
          for (int i = 0; i < P; i++) products[i] = dot<format == BITS8 || format == PLANES>(products[i], levels[i][h * groups + k], four);
        }
        for (int i = 0; i < P; i++) {
          Floats integers = to_floats(products[i]);
          if (format == UPPER) integers = from_upper(w, integers, (float)a.sums[fine][part]);
          sum[m][i] = fma(integers, mul(scale[i], all(a.scales[block])), sum[m][i]);
          if (minimums) sum[m][i] = fma(minimum[i], all(a.shares[fine][part]), sum[m][i]);
        }
      }
    }
  }
  for (int m = 0; m < M; m++)
    for (int i = 0; i < P; i++) store(out + (m * 2 + i) * PANEL, sum[m][i]);
}
