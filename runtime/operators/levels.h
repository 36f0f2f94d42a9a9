// Levels, scales and minimums of a panel, as kernels read them.

constexpr int64_t PAGE = 1 << 12;  // bytes; what is read so far ahead arrives in time
template <Format format> constexpr int64_t LEVEL_BYTES = format == BITS5 ? 320 : format == BITS6 ? 384 : format == BITS8 ? 512 : HALF;

// The block of the lower plane, if there are two. Its panel stands two places after the upper one.
template <Format format> static inline const uint8_t *lower_plane(const uint8_t *const *panel, int64_t block) {
  return format == PLANES ? panel[2] + block * HALF : nullptr;
}

// Fetch what is read soon. Into the first cache: a Zen 4 fetches half as fast into the second (decision 0120).
template <Format format> static inline void fetch_ahead(const uint8_t *block, const uint8_t *lower) {
  for (int64_t i = 0; i < LEVEL_BYTES<format> + 64; i += 64) prefetch(block + PAGE + i);
  for (int64_t i = 0; format == PLANES && i < HALF; i += 64) prefetch(lower + PAGE + i);
}

// The levels of group k of a block: four inputs of 16 columns.
template <Format format> static inline Bytes load_group(const uint8_t *p, const uint8_t *lower, int k) {
  if (format == BITS8) return load_bytes(p + 64 * k);
  const Bytes pair = load_bytes(p + 64 * (k % 4));
  if (format == PLANES) return join_halves(load_bytes(lower + 64 * (k % 4)), pair, k >= 4);
  const Bytes low = low_bits(pair, 4 * (k / 4), 15);
  if (format == BITS5) return join_bits(low, spread_bits(p + 256 + 8 * k, 16), 0);
  if (format == BITS6) return join_bits(low, low_bits(load_bytes(p + 256 + 64 * (k / 4)), 2 * (k % 4), 3), 4);
  return low;
}

// Upper halves h, or a sum of theirs, without the level of 0: each stands for the level 16 h + 7.5. A sum has `count` levels. Exact.
static inline Floats from_upper(const Matrix &w, Floats h, float count) { return fma(h, all(16.f), all((7.5f - (float)w.zero) * count)); }

// Sixteen of the scales or minimums behind a block's levels; `factors` are those of split ones.
static inline Floats load_scales(const Matrix &w, const uint8_t *p, int index, const uint8_t *factors) {
  if (w.scales == SPLIT) return mul(load_int8((const int8_t *)p + index * PANEL), load_float16((const uint16_t *)factors));
  return w.scales == WIDE ? load((const float *)p + index * PANEL) : load_float16((const uint16_t *)p + index * PANEL);
}
static inline Floats load_minimums(const Matrix &w, const uint8_t *p, int index, const uint8_t *factors) {
  return load_scales(w, p, (w.fine ? 2 : 1) + index, factors + PANEL * 2);
}
