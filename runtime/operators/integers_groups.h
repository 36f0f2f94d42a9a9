// Products of 8-bit activations with levels, computed group by group if registers cannot hold a block. Without an instruction that adds
// four products to a 32-bit sum, vpmaddubsw adds two products in 16 bits. Only RUN groups are added up in 16 bits, so that no sum
// overflows: 15 127 2 8 = 30480, 31 127 2 4 = 31496, 63 127 2 2 = 32004. In that case 8-bit levels are multiplied in two halves of 4 bits.

template <Format format> constexpr int RUN = format == BITS5 ? 4 : format == BITS6 ? 2 : 8;

// The levels of group k; for 8-bit levels, their lower or upper halves.
template <Format format, int shift> static inline Bytes load_group(const uint8_t *p, int k) {
#ifdef EESD_DOT
  if (format == BITS8) return load_bytes(p + 64 * k);
#endif
  if (format == BITS8) return low_bits(load_bytes(p + 64 * k), shift, 15);
  const Bytes low = low_bits(load_bytes(p + 64 * (k % 4)), 4 * (k / 4), 15);
  if (format == BITS5) return join_bits(low, spread_bits(p + 256 + 8 * k, 16), 0);
  if (format == BITS6) return join_bits(low, low_bits(load_bytes(p + 256 + 64 * (k / 4)), 2 * (k % 4), 3), 4);
  return low;
}

#ifdef EESD_DOT
// Four products of each column and row, in all groups of a block or half of one; M rows of x are `stride` apart.
template <Format format, bool fine, int shift, int M>
static inline void add_groups(const uint8_t *p, int half, const int8_t *x, int64_t stride, Bytes sums[M]) {
  constexpr int groups = fine ? 4 : 8;
  asm("" : "+r"(x), "+r"(p));  // what another call has loaded would take registers
  for (int m = 0; m < M; m++) sums[m] = all_sums(0);
#pragma GCC unroll 8
  for (int i = 0; i < groups; i += 2) {
    const int k = fine ? 4 * half + i : i / 4 * 2 + i / 2 % 2 * 4;
    Bytes first = load_group<format, shift>(p, k), second = load_group<format, shift>(p, k + 1);
#pragma GCC unroll 8
    for (int m = EESD_PAIRS ? M / 2 * 2 : 0; m < M; m++) {
      sums[m] = dot<format == BITS8>(sums[m], first, all_fours(x + m * stride + 4 * k));
      sums[m] = dot<format == BITS8>(sums[m], second, all_fours(x + m * stride + 4 * k + 4));
    }
#if EESD_PAIRS
    interleave(first, second);
    for (int m = 0; m + 1 < M; m += 2) dot_pair(sums + m, first, second, x + m * stride + 4 * k, stride);
#endif
  }
#if EESD_PAIRS
  for (int m = 0; m + 1 < M; m += 2) split_pair(sums + m);
#endif
}
#else
// Four products of each column and row, in all groups of a block or half of one; M rows of x are `stride` apart.
template <Format format, bool fine, int shift, int M>
static inline void add_groups(const uint8_t *p, int half, const int8_t *x, int64_t stride, Bytes sums[M]) {
  constexpr int groups = fine ? 4 : 8, run = RUN<format> < groups ? RUN<format> : groups;
  asm("" : "+r"(x), "+r"(p));  // what another call has loaded would take registers
  Bytes narrow[M];
#pragma GCC unroll 8
  for (int i = 0; i < groups; i++) {
    const int k = fine ? 4 * half + i : i / 2 + i % 2 * 4;  // two groups share bytes
    const Bytes levels = load_group<format, shift>(p, k);
#pragma GCC unroll 8
    for (int m = 0; m < M; m++) {
      const Bytes pairs = multiply_pairs(levels, all_fours(x + m * stride + 4 * k));
      narrow[m] = i % run ? add_pairs(narrow[m], pairs) : pairs;
      keep_order(narrow[m]);
      if (i % run == run - 1) sums[m] = i < run ? join_pairs(narrow[m]) : add_sums(sums[m], join_pairs(narrow[m]));
    }
  }
}
#endif

// M rows of 8-bit activations times a panel of levels. For each block or half block:
//   sum = fma(float(sum of level x - zero sum of x), scale of w * scale of x, sum), then fma(minimum, share, sum)
template <Format format, bool fine, bool minimums, int P, int M>
static void multiply_int8(const Matrix &w, const uint8_t *const panels[P], const Activations &a, int64_t row, float *out) {
  constexpr int halves = fine ? 2 : 1;
  const int64_t blocks = w.inputs / BLOCK;
  const Blocks place = w.blocks();
#ifdef EESD_DOT
  constexpr bool both = format == PLANES;
#else
  constexpr bool both = format == BITS8 || format == PLANES;
#endif
  Floats sum[M];
  for (int m = 0; m < M; m++) sum[m] = all(0);
  for (int64_t b = 0; b < blocks; b++) {
    const uint8_t *p = panels[0] + place.at(b), *scales = p + LEVEL_BYTES<format>, *factors = panels[0] + place.factors_at(b);
    const uint8_t *lower = lower_plane<format>(panels, b);
    fetch_ahead<format, M>(a, p, lower);
    for (int h = 0; h < halves; h++) {
      const int8_t *x = a.levels + (row * blocks + b) * BLOCK;
      Bytes products[M];
      add_groups<format, fine, 0, M>(format == PLANES ? lower : p, h, x, w.inputs, products);
      if (both) {
        Bytes high[M];
        add_groups<format, fine, format == BITS8 ? 4 : 0, M>(p, h, x, w.inputs, high);
        for (int m = 0; m < M; m++) products[m] = add_sums(products[m], shift_sums(high[m], 4));
      }
      const Floats scale = load_scales(w, scales, h, factors);
      const Floats minimum = minimums ? load_minimums(w, scales, h, factors) : all(0);
      for (int m = 0; m < M; m++) {
        const int64_t block = (row + m) * blocks + b, part = block * halves + h;
        if (!minimums && format != UPPER) products[m] = add_sums(products[m], all_sums(-w.zero * a.sums[fine][part]));
        Floats integers = to_floats(products[m]);
        if (format == UPPER) integers = from_upper(w, integers, (float)a.sums[fine][part]);
        sum[m] = fma(integers, mul(scale, all(a.scales[block])), sum[m]);
        if (minimums) sum[m] = fma(minimum, all(a.shares[fine][part]), sum[m]);
      }
    }
  }
  for (int m = 0; m < M; m++) store(out + m * 2 * PANEL, sum[m]);
}
