// Read the levels, scales and minimums of a panel.

constexpr int64_t PAGE = 1 << 12;  // bytes; a processor's automatic fetching ends at the end of a page
constexpr int64_t NEAR = 1 << 11;  // bytes by which levels are fetched from the second cache to the first
template <Format format> constexpr int64_t LEVEL_BYTES = format == BITS5 ? 320 : format == BITS6 ? 384 : format == BITS8 ? 512 : HALF;

// The lower plane of a block. In `panel`, the lower plane is two places after the upper plane.
template <Format format> static inline const uint8_t *lower_plane(const uint8_t *const *panel, int64_t block) {
  return format == PLANES ? panel[2] + block * HALF : nullptr;
}

// Fetch levels ahead: whole blocks, in two steps, because the first cache has few places for lines that come from memory. For one row,
// only a line of the next page may be fetched for each block. Some processors then fetch that page automatically (fetching.h).
template <Format format, int rows> static inline void fetch_ahead(const Activations &a, const uint8_t *block, const uint8_t *lower) {
  const bool whole = rows > 1 || a.whole_blocks;
  if (!whole) {
    fetch_second(block + PAGE);
    if (format == PLANES) fetch_second(lower + PAGE);
    return;
  }
  constexpr int64_t bytes = LEVEL_BYTES<format> + 64;
  for (int64_t i = 0; i < bytes; i += 64) {
    fetch_second(block + AHEAD + i);
    prefetch(block + NEAR + i);
  }
  for (int64_t i = 0; format == PLANES && i < HALF; i += 64) {
    fetch_second(lower + AHEAD + i);
    prefetch(lower + NEAR + i);
  }
}

// Load the levels of a block, 32 inputs of 16 columns: levels[i] has the inputs 4 i to 4 i + 3 of each column.
template <Format format> static inline void load_levels(const uint8_t *p, const uint8_t *lower, Bytes levels[8]) {
  if (format == BITS8) {
    for (int i = 0; i < 8; i++) levels[i] = load_bytes(p + 64 * i);
    return;
  }
  for (int i = 0; i < 4; i++) {
    const Bytes pair = load_bytes(p + 64 * i), low = format == PLANES ? load_bytes(lower + 64 * i) : pair;
    levels[i] = format == PLANES ? join_halves(low, pair, false) : low_bits(pair, 0, 15);
    levels[i + 4] = format == PLANES ? join_halves(low, pair, true) : low_bits(pair, 4, 15);
  }
  if (format == BITS5)
    for (int i = 0; i < 8; i++) levels[i] = join_bits(levels[i], spread_bits(p + 256 + 8 * i, 16), 0);
  if (format == BITS6)
    for (int i = 0; i < 8; i++)
      levels[i] = join_bits(levels[i], low_bits(load_bytes(p + 256 + 64 * (i / 4)), 2 * (i % 4), 3), 4);
}

// Convert an upper half h, or a sum of `count` of them, to levels minus the level of 0. Each h stands for 16 h + 7.5. The result is
// exact.
static inline Floats from_upper(const Matrix &w, Floats h, float count) { return fma(h, all(16.f), all((7.5f - (float)w.zero) * count)); }

// Load sixteen of the scales or minimums that follow a block's levels. `factors` are the factors of split scales.
static inline Floats load_scales(const Matrix &w, const uint8_t *p, int index, const uint8_t *factors) {
  if (w.scales == SPLIT) return mul(load_int8((const int8_t *)p + index * PANEL), load_float16((const uint16_t *)factors));
  return w.scales == WIDE ? load((const float *)p + index * PANEL) : load_float16((const uint16_t *)p + index * PANEL);
}
static inline Floats load_minimums(const Matrix &w, const uint8_t *p, int index, const uint8_t *factors) {
  return load_scales(w, p, (w.fine ? 2 : 1) + index, factors + PANEL * 2);
}
