// Sixteen lanes in plain C++: the specification of the other vector files, and the kernels for processors without them.

// The file for products with levels, and the maximum numbers that a kernel holds in registers:
#define EESD_INTEGERS "integers.h"
#define EESD_ROWS 4   /* rows */
#define EESD_PANELS 2 /* panels of levels */
#define EESD_SUMS 8   /* sums of rows and two panels of floats */
// Sums that attention holds in registers: of some queries with some tiles of keys, or with some vectors of values.
constexpr int QUERY_BLOCK = 4, KEY_TILES = 1;
constexpr int vectors_beside(int queries) { return queries == 1 ? 2 : 1; }
constexpr int64_t AHEAD = 0;  // bytes by which levels are fetched before they are needed

struct Floats {
  float lane[16];
};
struct Bytes {  // 64 bytes: four levels of each of 16 columns, or 16 sums
  union {
    uint8_t byte[64];
    int32_t lane[16];
  };
};

#define EACH for (int i = 0; i < 16; i++)

static inline Floats load(const float *p) { Floats r; memcpy(r.lane, p, 64); return r; }
static inline void store(float *p, Floats a) { memcpy(p, a.lane, 64); }
static inline Floats all(float a) { Floats r; EACH r.lane[i] = a; return r; }
static inline Floats add(Floats a, Floats b) { EACH a.lane[i] += b.lane[i]; return a; }
static inline Floats sub(Floats a, Floats b) { EACH a.lane[i] -= b.lane[i]; return a; }
static inline Floats mul(Floats a, Floats b) { EACH a.lane[i] *= b.lane[i]; return a; }
static inline Floats div(Floats a, Floats b) { EACH a.lane[i] /= b.lane[i]; return a; }
static inline Floats fma(Floats a, Floats b, Floats c) { EACH c.lane[i] = fmaf(a.lane[i], b.lane[i], c.lane[i]); return c; }
static inline Floats larger(Floats a, Floats b) { EACH a.lane[i] = a.lane[i] > b.lane[i] ? a.lane[i] : b.lane[i]; return a; }
static inline Floats smaller(Floats a, Floats b) { EACH a.lane[i] = a.lane[i] < b.lane[i] ? a.lane[i] : b.lane[i]; return a; }
static inline Floats absolute(Floats a) { EACH a.lane[i] = fabsf(a.lane[i]); return a; }
// Sums and maxima of all lanes, computed by halves: lanes i and i + 8, then i and i + 4, i + 2, i + 1.
static inline float add_lanes(Floats a) {
  for (int width = 8; width; width /= 2)
    for (int i = 0; i < width; i++) a.lane[i] += a.lane[i + width];
  return a.lane[0];
}
static inline float largest_lane(Floats a) {
  for (int width = 8; width; width /= 2)
    for (int i = 0; i < width; i++) a.lane[i] = a.lane[i] > a.lane[i + width] ? a.lane[i] : a.lane[i + width];
  return a.lane[0];
}
static inline Floats nearest(Floats a) { EACH a.lane[i] = nearbyintf(a.lane[i]); return a; }

static inline Floats load_bfloat16(const uint16_t *p) {
  Floats r;
  EACH { uint32_t bits = (uint32_t)p[i] << 16; memcpy(&r.lane[i], &bits, 4); }
  return r;
}

static inline Floats load_float16(const uint16_t *p) { Floats r; EACH r.lane[i] = float_of(p[i]); return r; }
static inline Floats load_int8(const int8_t *p) { Floats r; EACH r.lane[i] = p[i]; return r; }

// 2^a for whole numbers `a` from -126 to 127.
static inline Floats power_of_two(Floats a) {
  EACH { uint32_t bits = (uint32_t)((int32_t)a.lane[i] + 127) << 23; memcpy(&a.lane[i], &bits, 4); }
  return a;
}

static inline void store_int8(int8_t *p, Floats a) { EACH p[i] = (int8_t)nearbyintf(a.lane[i]); }
static inline Bytes load_bytes(const uint8_t *p) { Bytes r; memcpy(r.byte, p, 64); return r; }
static inline Bytes all_sums(int32_t a) { Bytes r; EACH r.lane[i] = a; return r; }
static inline Bytes add_sums(Bytes a, Bytes b) { EACH a.lane[i] += b.lane[i]; return a; }
static inline Floats to_floats(Bytes a) { Floats r; EACH r.lane[i] = (float)a.lane[i]; return r; }
// The bits of each byte from `shift` on, limited by `mask`.
static inline Bytes low_bits(Bytes a, int shift, int mask) {
  for (int i = 0; i < 64; i++) a.byte[i] = a.byte[i] >> shift & mask;
  return a;
}
static inline Bytes join_bits(Bytes low, Bytes high, int shift) {
  for (int i = 0; i < 64; i++) low.byte[i] |= high.byte[i] << shift;
  return low;
}
// Join bits 0-3 of each byte of `low` and of `high` to a byte; with `second`, bits 4-7 of both.
static inline Bytes join_halves(Bytes low, Bytes high, bool second) {
  for (int i = 0; i < 64; i++) low.byte[i] = second ? low.byte[i] >> 4 | (high.byte[i] & 240) : (low.byte[i] & 15) | high.byte[i] << 4;
  return low;
}
// Bytes that are `value` where a mask of 64 bits has a 1, and 0 elsewhere.
static inline Bytes spread_bits(const uint8_t *mask, int value) {
  Bytes r;
  for (int i = 0; i < 64; i++) r.byte[i] = mask[i / 8] >> i % 8 & 1 ? value : 0;
  return r;
}
struct Four {  // four activations, the same for all columns
  const int8_t *x;
};
static inline Four all_fours(const int8_t *x) { return {x}; }
// sums + four unsigned levels of each column times four signed activations. `wide` means that levels may be larger than 127.
template <bool wide> static inline Bytes dot(Bytes sums, Bytes levels, Four four) {
  EACH for (int k = 0; k < 4; k++) sums.lane[i] += levels.byte[4 * i + k] * four.x[k];
  return sums;
}
// Two signed levels of each lane; and sums plus the products of these levels with two numbers.
struct Words {
  int16_t word[32];
};
static inline Words load_words(const int8_t *p) { Words r; for (int i = 0; i < 32; i++) r.word[i] = p[i]; return r; }
static inline Bytes dot(Bytes sums, Words levels, const int16_t *two) {
  EACH for (int k = 0; k < 2; k++) sums.lane[i] += levels.word[2 * i + k] * two[k];
  return sums;
}
// The k-th of the four levels of each column.
static inline Floats level(Bytes a, int k) { Floats r; EACH r.lane[i] = (float)a.byte[4 * i + k]; return r; }
static inline void prefetch(const void *) {}
static inline void fetch_second(const void *) {}
static bool supported() { return true; }
#undef EACH
