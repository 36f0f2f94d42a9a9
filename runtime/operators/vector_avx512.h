// Sixteen lanes in one register: AVX-512 with VNNI.

#define EESD_INTEGERS "integers.h"
#define EESD_ROWS 8
#define EESD_PANELS 2
#define EESD_SUMS 16
// Sums that attention holds in registers: of some queries with some tiles of keys, or with some vectors of values.
constexpr int QUERY_BLOCK = 8, KEY_TILES = 2;
constexpr int vectors_beside(int queries) { return queries <= 4 ? 4 : 2; }
constexpr int64_t AHEAD = 16384;

struct Floats { __m512 v; };
struct Bytes { __m512i v; };

static inline Floats load(const float *p) { return {_mm512_loadu_ps(p)}; }
static inline void store(float *p, Floats a) { _mm512_storeu_ps(p, a.v); }
static inline Floats all(float a) { return {_mm512_set1_ps(a)}; }
static inline Floats add(Floats a, Floats b) { return {_mm512_add_ps(a.v, b.v)}; }
static inline Floats sub(Floats a, Floats b) { return {_mm512_sub_ps(a.v, b.v)}; }
static inline Floats mul(Floats a, Floats b) { return {_mm512_mul_ps(a.v, b.v)}; }
static inline Floats div(Floats a, Floats b) { return {_mm512_div_ps(a.v, b.v)}; }
static inline Floats fma(Floats a, Floats b, Floats c) { return {_mm512_fmadd_ps(a.v, b.v, c.v)}; }
static inline Floats larger(Floats a, Floats b) { return {_mm512_max_ps(a.v, b.v)}; }
static inline Floats smaller(Floats a, Floats b) { return {_mm512_min_ps(a.v, b.v)}; }
static inline Floats absolute(Floats a) { return {_mm512_abs_ps(a.v)}; }
static inline float add_quarter(__m128 a) {
  a = _mm_add_ps(a, _mm_movehl_ps(a, a));
  return _mm_cvtss_f32(_mm_add_ss(a, _mm_movehdup_ps(a)));
}
static inline float largest_quarter(__m128 a) {
  a = _mm_max_ps(a, _mm_movehl_ps(a, a));
  return _mm_cvtss_f32(_mm_max_ss(a, _mm_movehdup_ps(a)));
}
static inline __m256 upper_half(__m512 a) { return _mm512_extractf32x8_ps(a, 1); }
static inline float add_lanes(Floats a) {
  const __m256 half = _mm256_add_ps(_mm512_castps512_ps256(a.v), upper_half(a.v));
  return add_quarter(_mm_add_ps(_mm256_castps256_ps128(half), _mm256_extractf128_ps(half, 1)));
}
static inline float largest_lane(Floats a) {
  const __m256 half = _mm256_max_ps(_mm512_castps512_ps256(a.v), upper_half(a.v));
  return largest_quarter(_mm_max_ps(_mm256_castps256_ps128(half), _mm256_extractf128_ps(half, 1)));
}
static inline Floats nearest(Floats a) { return {_mm512_roundscale_ps(a.v, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC)}; }

static inline Floats load_bfloat16(const uint16_t *p) {
  return {_mm512_castsi512_ps(_mm512_slli_epi32(_mm512_cvtepu16_epi32(_mm256_loadu_si256((const __m256i *)p)), 16))};
}
static inline Floats load_float16(const uint16_t *p) { return {_mm512_cvtph_ps(_mm256_loadu_si256((const __m256i *)p))}; }
static inline Floats load_int8(const int8_t *p) {
  return {_mm512_cvtepi32_ps(_mm512_cvtepi8_epi32(_mm_loadu_si128((const __m128i *)p)))};
}
static inline Floats power_of_two(Floats a) {
  return {_mm512_castsi512_ps(_mm512_slli_epi32(_mm512_add_epi32(_mm512_cvtps_epi32(a.v), _mm512_set1_epi32(127)), 23))};
}

static inline void store_int8(int8_t *p, Floats a) {
  _mm_storeu_si128((__m128i *)p, _mm512_cvtepi32_epi8(_mm512_cvtps_epi32(a.v)));
}
static inline Bytes load_bytes(const uint8_t *p) { return {_mm512_loadu_si512(p)}; }
static inline Bytes all_sums(int32_t a) { return {_mm512_set1_epi32(a)}; }
static inline Bytes add_sums(Bytes a, Bytes b) { return {_mm512_add_epi32(a.v, b.v)}; }
static inline Floats to_floats(Bytes a) { return {_mm512_cvtepi32_ps(a.v)}; }
static inline Bytes low_bits(Bytes a, int shift, int mask) {
  return {_mm512_and_si512(_mm512_srli_epi16(a.v, shift), _mm512_set1_epi8((char)mask))};
}
static inline Bytes join_bits(Bytes low, Bytes high, int shift) {
  return {_mm512_or_si512(low.v, _mm512_slli_epi16(high.v, shift))};  // the bits of `high` stay in their bytes
}
static inline Bytes join_halves(Bytes low, Bytes high, bool second) {
  if (second) low.v = _mm512_srli_epi16(low.v, 4);
  else high.v = _mm512_slli_epi16(high.v, 4);
  return {_mm512_ternarylogic_epi32(_mm512_set1_epi8(15), low.v, high.v, 0xCA)};  // bits of `low` where the mask is 1
}
static inline Bytes spread_bits(const uint8_t *mask, int value) {
  uint64_t bits;
  memcpy(&bits, mask, 8);
  return {_mm512_maskz_set1_epi8(bits, (char)value)};
}
struct Four { __m512i v; };
static inline Four all_fours(const int8_t *x) {
  int32_t four;
  memcpy(&four, x, 4);
  return {_mm512_set1_epi32(four)};
}
template <bool wide> static inline Bytes dot(Bytes sums, Bytes levels, Four four) {
  return {_mm512_dpbusd_epi32(sums.v, levels.v, four.v)};
}
struct Words { __m512i v; };
static inline Words load_words(const int8_t *p) { return {_mm512_cvtepi8_epi16(_mm256_loadu_si256((const __m256i *)p))}; }
static inline Bytes dot(Bytes sums, Words levels, const int16_t *two) {
  int32_t both;
  memcpy(&both, two, 4);
  return {_mm512_dpwssd_epi32(sums.v, levels.v, _mm512_set1_epi32(both))};
}
static inline Floats level(Bytes a, int k) {
  const __m512i at = _mm512_add_epi32(_mm512_set4_epi32(12, 8, 4, 0), _mm512_set1_epi32((int)0x80808000 + k));  // of 128 bits
  return {_mm512_cvtepi32_ps(_mm512_shuffle_epi8(a.v, at))};
}
static inline void prefetch(const void *p) { _mm_prefetch((const char *)p, _MM_HINT_T0); }
static inline void fetch_second(const void *p) { _mm_prefetch((const char *)p, _MM_HINT_T1); }  // into the second-level cache
static bool supported() {
  return __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") && __builtin_cpu_supports("avx512vl") &&
         __builtin_cpu_supports("avx512dq") && __builtin_cpu_supports("avx512vnni");
}
