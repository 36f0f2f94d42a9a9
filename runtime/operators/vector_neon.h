// Sixteen lanes in four registers: NEON of AArch64 with dot products (ARMv8.2).

#define EESD_INTEGERS "integers_groups.h"
#define EESD_DOT
#ifndef EESD_PAIRS
#define EESD_PAIRS 0
#endif
#define EESD_ROWS 4
#define EESD_PANELS 1
#define EESD_SUMS 8
// Sums that attention holds in registers: of some queries with some tiles of keys, or with some vectors of values.
constexpr int QUERY_BLOCK = 4, KEY_TILES = 1;
constexpr int vectors_beside(int queries) { return queries == 1 ? 4 : queries == 2 ? 2 : 1; }
constexpr int64_t AHEAD = 2048;

#define EACH for (int i = 0; i < 4; i++)

struct Floats { float32x4_t v[4]; };
struct Bytes { uint8x16_t v[4]; };  // or 16 sums of int32_t

static inline int32x4_t ints(uint8x16_t a) { return vreinterpretq_s32_u8(a); }
static inline uint8x16_t bytes(int32x4_t a) { return vreinterpretq_u8_s32(a); }

static inline Floats load(const float *p) { Floats r; EACH r.v[i] = vld1q_f32(p + 4 * i); return r; }
static inline void store(float *p, Floats a) { EACH vst1q_f32(p + 4 * i, a.v[i]); }
static inline Floats all(float a) { Floats r; EACH r.v[i] = vdupq_n_f32(a); return r; }
static inline Floats add(Floats a, Floats b) { EACH a.v[i] = vaddq_f32(a.v[i], b.v[i]); return a; }
static inline Floats sub(Floats a, Floats b) { EACH a.v[i] = vsubq_f32(a.v[i], b.v[i]); return a; }
static inline Floats mul(Floats a, Floats b) { EACH a.v[i] = vmulq_f32(a.v[i], b.v[i]); return a; }
static inline Floats div(Floats a, Floats b) { EACH a.v[i] = vdivq_f32(a.v[i], b.v[i]); return a; }
static inline Floats fma(Floats a, Floats b, Floats c) { EACH c.v[i] = vfmaq_f32(c.v[i], a.v[i], b.v[i]); return c; }
// vmaxq_f32 would return a NaN of either argument. Like the other vector files, this returns the second argument if one of them is NaN.
static inline float32x4_t larger_quarter(float32x4_t a, float32x4_t b) { return vbslq_f32(vcgtq_f32(a, b), a, b); }
static inline Floats larger(Floats a, Floats b) { EACH a.v[i] = larger_quarter(a.v[i], b.v[i]); return a; }
static inline Floats smaller(Floats a, Floats b) { EACH a.v[i] = vbslq_f32(vcltq_f32(a.v[i], b.v[i]), a.v[i], b.v[i]); return a; }
static inline Floats absolute(Floats a) { EACH a.v[i] = vabsq_f32(a.v[i]); return a; }
static inline float add_lanes(Floats a) {
  const float32x4_t quarter = vaddq_f32(vaddq_f32(a.v[0], a.v[2]), vaddq_f32(a.v[1], a.v[3]));
  const float32x2_t pair = vadd_f32(vget_low_f32(quarter), vget_high_f32(quarter));
  return vget_lane_f32(pair, 0) + vget_lane_f32(pair, 1);
}
static inline float largest_lane(Floats a) {
  return vmaxvq_f32(larger_quarter(larger_quarter(a.v[0], a.v[2]), larger_quarter(a.v[1], a.v[3])));
}
static inline Floats nearest(Floats a) { EACH a.v[i] = vrndnq_f32(a.v[i]); return a; }

static inline Floats load_bfloat16(const uint16_t *p) {
  Floats r;
  EACH r.v[i] = vreinterpretq_f32_u32(vshll_n_u16(vld1_u16(p + 4 * i), 16));
  return r;
}
static inline Floats load_float16(const uint16_t *p) {
  Floats r;
  EACH r.v[i] = vcvt_f32_f16(vreinterpret_f16_u16(vld1_u16(p + 4 * i)));
  return r;
}
static inline Floats load_int8(const int8_t *p) {
  Floats r;
  const int8x16_t all = vld1q_s8(p);
  const int16x8_t half[2] = {vmovl_s8(vget_low_s8(all)), vmovl_s8(vget_high_s8(all))};
  EACH r.v[i] = vcvtq_f32_s32(vmovl_s16(i % 2 ? vget_high_s16(half[i / 2]) : vget_low_s16(half[i / 2])));
  return r;
}
static inline Floats power_of_two(Floats a) {
  EACH a.v[i] = vreinterpretq_f32_s32(vshlq_n_s32(vaddq_s32(vcvtnq_s32_f32(a.v[i]), vdupq_n_s32(127)), 23));
  return a;
}

static inline void store_int8(int8_t *p, Floats a) {
  int16x4_t words[4];
  EACH words[i] = vmovn_s32(vcvtnq_s32_f32(a.v[i]));
  vst1q_s8(p, vcombine_s8(vmovn_s16(vcombine_s16(words[0], words[1])), vmovn_s16(vcombine_s16(words[2], words[3]))));
}
static inline Bytes load_bytes(const uint8_t *p) { Bytes r; EACH r.v[i] = vld1q_u8(p + 16 * i); return r; }
static inline Bytes all_sums(int32_t a) { Bytes r; EACH r.v[i] = bytes(vdupq_n_s32(a)); return r; }
static inline Bytes add_sums(Bytes a, Bytes b) { EACH a.v[i] = bytes(vaddq_s32(ints(a.v[i]), ints(b.v[i]))); return a; }
static inline Floats to_floats(Bytes a) { Floats r; EACH r.v[i] = vcvtq_f32_s32(ints(a.v[i])); return r; }
static inline Bytes low_bits(Bytes a, int shift, int mask) {
  EACH a.v[i] = vandq_u8(vshlq_u8(a.v[i], vdupq_n_s8((int8_t)-shift)), vdupq_n_u8((uint8_t)mask));
  return a;
}
static inline Bytes join_bits(Bytes low, Bytes high, int shift) {
  EACH low.v[i] = vorrq_u8(low.v[i], vshlq_u8(high.v[i], vdupq_n_s8((int8_t)shift)));
  return low;
}
static inline Bytes join_halves(Bytes low, Bytes high, bool second) {
  EACH low.v[i] = second ? vsriq_n_u8(high.v[i], low.v[i], 4) : vsliq_n_u8(low.v[i], high.v[i], 4);
  return low;
}
static inline Bytes spread_bits(const uint8_t *mask, int value) {
  const uint8x16_t bit = vreinterpretq_u8_u64(vdupq_n_u64(0x8040201008040201u));
  Bytes r;
  EACH {
    const uint8x16_t own = vcombine_u8(vdup_n_u8(mask[2 * i]), vdup_n_u8(mask[2 * i + 1]));
    r.v[i] = vandq_u8(vtstq_u8(own, bit), vdupq_n_u8((uint8_t)value));
  }
  return r;
}
struct Four { int8x16_t v; };
static inline Four all_fours(const int8_t *x) {
  int32_t four;
  memcpy(&four, x, 4);
  return {vreinterpretq_s8_s32(vdupq_n_s32(four))};
}
template <bool wide> static inline Bytes dot(Bytes sums, Bytes levels, Four four) {
#if EESD_PAIRS
  EACH sums.v[i] = bytes(vusdotq_s32(ints(sums.v[i]), levels.v[i], four.v));
#else  // sdot takes signed levels, so levels up to 127 fit; larger levels are multiplied in two halves
  const Bytes low = wide ? low_bits(levels, 0, 15) : levels, high = low_bits(levels, 4, 15);
  EACH {
    int32x4_t sum = vdotq_s32(ints(sums.v[i]), vreinterpretq_s8_u8(low.v[i]), four.v);
    if (wide) sum = vaddq_s32(sum, vshlq_n_s32(vdotq_s32(vdupq_n_s32(0), vreinterpretq_s8_u8(high.v[i]), four.v), 4));
    sums.v[i] = bytes(sum);
  }
#endif
  return sums;
}
static inline Bytes shift_sums(Bytes x, int shift) { EACH x.v[i] = bytes(vshlq_s32(ints(x.v[i]), vdupq_n_s32(shift))); return x; }
#if EESD_PAIRS
// Put the eight levels of a column in two groups next to each other: columns 0, 1, 4, 5, ... in `first`, columns 2, 3, 6, 7, ... in
// `second`.
static inline void interleave(Bytes &first, Bytes &second) {
  EACH {
    const uint32x4_t a = vreinterpretq_u32_u8(first.v[i]), b = vreinterpretq_u32_u8(second.v[i]);
    first.v[i] = vreinterpretq_u8_u32(vzip1q_u32(a, b)), second.v[i] = vreinterpretq_u8_u32(vzip2q_u32(a, b));
  }
}
// Add eight products of each column with two rows. A register has the sums of two columns for both rows.
static inline void dot_pair(Bytes sums[2], Bytes first, Bytes second, const int8_t *x, int64_t stride) {
  const int8x16_t rows = vcombine_s8(vld1_s8(x), vld1_s8(x + stride));
  EACH sums[0].v[i] = bytes(vusmmlaq_s32(ints(sums[0].v[i]), first.v[i], rows));
  EACH sums[1].v[i] = bytes(vusmmlaq_s32(ints(sums[1].v[i]), second.v[i], rows));
}
static inline void split_pair(Bytes sums[2]) {
  EACH {
    const int32x4_t a = ints(sums[0].v[i]), b = ints(sums[1].v[i]);
    sums[0].v[i] = bytes(vuzp1q_s32(a, b)), sums[1].v[i] = bytes(vuzp2q_s32(a, b));
  }
}
#endif
struct Words { int16x8_t v[2][2]; };  // of each half of the lanes, the first level and the second one
static inline Words load_words(const int8_t *p) {
  const int8x16x2_t both = vld2q_s8(p);
  Words r;
  for (int k = 0; k < 2; k++) r.v[0][k] = vmovl_s8(vget_low_s8(both.val[k])), r.v[1][k] = vmovl_s8(vget_high_s8(both.val[k]));
  return r;
}
static inline Bytes dot(Bytes sums, Words levels, const int16_t *two) {
  EACH for (int k = 0; k < 2; k++) {
    const int16x8_t half = levels.v[i / 2][k];
    sums.v[i] = bytes(vmlal_n_s16(ints(sums.v[i]), i % 2 ? vget_high_s16(half) : vget_low_s16(half), two[k]));
  }
  return sums;
}
static inline Floats level(Bytes a, int k) {
  Floats r;
  EACH r.v[i] = vcvtq_f32_u32(vandq_u32(vshlq_u32(vreinterpretq_u32_u8(a.v[i]), vdupq_n_s32(-8 * k)), vdupq_n_u32(255)));
  return r;
}
static inline void prefetch(const void *p) { __builtin_prefetch(p); }
static inline void fetch_second(const void *p) { __builtin_prefetch(p, 0, 2); }
static bool supported() {
#if defined __linux__
  return (EESD_PAIRS ? getauxval(AT_HWCAP2) >> 13 & 1 : getauxval(AT_HWCAP) >> 20 & 1) != 0;  // HWCAP2_I8MM, HWCAP_ASIMDDP
#elif defined __APPLE__
  int found = !EESD_PAIRS;  // Apple's processors all have dot products
  size_t size = sizeof found;
  if (EESD_PAIRS) sysctlbyname("hw.optional.arm.FEAT_I8MM", &found, &size, nullptr, 0);
  return found != 0;
#else
  return IsProcessorFeaturePresent(EESD_PAIRS ? 66 : 43) != 0;  // PF_ARM_V82_I8MM_..., PF_ARM_V82_DP_INSTRUCTIONS_AVAILABLE
#endif
}
#undef EACH
