// Sixteen lanes in two registers: AVX2 with FMA and F16C.

#define EESD_INTEGERS "integers_groups.h"
#define EESD_ROWS 6
#define EESD_PANELS 1
#define EESD_SUMS 4
// Sums that attention holds in registers: of some queries with some tiles of keys, or with some vectors of values.
constexpr int QUERY_BLOCK = 6, KEY_TILES = 1;
constexpr int vectors_beside(int queries) { return queries == 1 ? 4 : queries <= 3 ? 2 : 1; }
constexpr int64_t AHEAD = 6144;

struct Floats { __m256 a, b; };
struct Bytes { __m256i a, b; };

#define BOTH(f) {f(x.a, y.a), f(x.b, y.b)}
static inline Floats load(const float *p) { return {_mm256_loadu_ps(p), _mm256_loadu_ps(p + 8)}; }
static inline void store(float *p, Floats x) { _mm256_storeu_ps(p, x.a); _mm256_storeu_ps(p + 8, x.b); }
static inline Floats all(float a) { return {_mm256_set1_ps(a), _mm256_set1_ps(a)}; }
static inline Floats add(Floats x, Floats y) { return BOTH(_mm256_add_ps); }
static inline Floats sub(Floats x, Floats y) { return BOTH(_mm256_sub_ps); }
static inline Floats mul(Floats x, Floats y) { return BOTH(_mm256_mul_ps); }
static inline Floats div(Floats x, Floats y) { return BOTH(_mm256_div_ps); }
static inline Floats larger(Floats x, Floats y) { return BOTH(_mm256_max_ps); }
static inline Floats smaller(Floats x, Floats y) { return BOTH(_mm256_min_ps); }
static inline Floats fma(Floats x, Floats y, Floats z) {
  return {_mm256_fmadd_ps(x.a, y.a, z.a), _mm256_fmadd_ps(x.b, y.b, z.b)};
}
static inline Floats absolute(Floats x) {
  const Floats y = {_mm256_set1_ps(-0.f), _mm256_set1_ps(-0.f)};
  return {_mm256_andnot_ps(y.a, x.a), _mm256_andnot_ps(y.b, x.b)};
}
static inline float add_quarter(__m128 a) {
  a = _mm_add_ps(a, _mm_movehl_ps(a, a));
  return _mm_cvtss_f32(_mm_add_ss(a, _mm_movehdup_ps(a)));
}
static inline float largest_quarter(__m128 a) {
  a = _mm_max_ps(a, _mm_movehl_ps(a, a));
  return _mm_cvtss_f32(_mm_max_ss(a, _mm_movehdup_ps(a)));
}
static inline float add_lanes(Floats x) {
  const __m256 half = _mm256_add_ps(x.a, x.b);
  return add_quarter(_mm_add_ps(_mm256_castps256_ps128(half), _mm256_extractf128_ps(half, 1)));
}
static inline float largest_lane(Floats x) {
  const __m256 half = _mm256_max_ps(x.a, x.b);
  return largest_quarter(_mm_max_ps(_mm256_castps256_ps128(half), _mm256_extractf128_ps(half, 1)));
}
static inline Floats nearest(Floats x) {
  const int mode = _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC;
  return {_mm256_round_ps(x.a, mode), _mm256_round_ps(x.b, mode)};
}

static inline __m256 bfloat16_half(const uint16_t *p) {
  return _mm256_castsi256_ps(_mm256_slli_epi32(_mm256_cvtepu16_epi32(_mm_loadu_si128((const __m128i *)p)), 16));
}
static inline Floats load_bfloat16(const uint16_t *p) { return {bfloat16_half(p), bfloat16_half(p + 8)}; }
static inline Floats load_float16(const uint16_t *p) {
  return {_mm256_cvtph_ps(_mm_loadu_si128((const __m128i *)p)), _mm256_cvtph_ps(_mm_loadu_si128((const __m128i *)(p + 8)))};
}
static inline __m256 int8_half(const int8_t *p) {
  return _mm256_cvtepi32_ps(_mm256_cvtepi8_epi32(_mm_loadl_epi64((const __m128i *)p)));
}
static inline Floats load_int8(const int8_t *p) { return {int8_half(p), int8_half(p + 8)}; }
static inline __m256 power_half(__m256 x) {
  return _mm256_castsi256_ps(_mm256_slli_epi32(_mm256_add_epi32(_mm256_cvtps_epi32(x), _mm256_set1_epi32(127)), 23));
}
static inline Floats power_of_two(Floats x) { return {power_half(x.a), power_half(x.b)}; }

static inline void store_int8(int8_t *p, Floats x) {
  const __m256i words = _mm256_permute4x64_epi64(_mm256_packs_epi32(_mm256_cvtps_epi32(x.a), _mm256_cvtps_epi32(x.b)), 0xD8);
  _mm_storeu_si128((__m128i *)p, _mm_packs_epi16(_mm256_castsi256_si128(words), _mm256_extracti128_si256(words, 1)));
}
static inline Bytes load_bytes(const uint8_t *p) {
  return {_mm256_loadu_si256((const __m256i *)p), _mm256_loadu_si256((const __m256i *)(p + 32))};
}
static inline Bytes all_sums(int32_t a) { return {_mm256_set1_epi32(a), _mm256_set1_epi32(a)}; }
static inline Bytes add_sums(Bytes x, Bytes y) { return BOTH(_mm256_add_epi32); }
static inline Floats to_floats(Bytes x) { return {_mm256_cvtepi32_ps(x.a), _mm256_cvtepi32_ps(x.b)}; }
static inline Bytes low_bits(Bytes x, int shift, int mask) {
  const __m256i m = _mm256_set1_epi8((char)mask);
  return {_mm256_and_si256(_mm256_srli_epi16(x.a, shift), m), _mm256_and_si256(_mm256_srli_epi16(x.b, shift), m)};
}
static inline Bytes join_bits(Bytes x, Bytes high, int shift) {
  return {_mm256_or_si256(x.a, _mm256_slli_epi16(high.a, shift)), _mm256_or_si256(x.b, _mm256_slli_epi16(high.b, shift))};
}
static inline Bytes join_halves(Bytes low, Bytes high, bool second) {
  const Bytes own = low_bits(low, second ? 4 : 0, 15), other = low_bits(high, 0, second ? 240 : 15);
  return join_bits(own, other, second ? 0 : 4);
}
static inline __m256i spread_half(const uint8_t *mask, int value) {
  int32_t bits;
  memcpy(&bits, mask, 4);
  const __m256i byte_of_bit = _mm256_setr_epi64x(0, 0x0101010101010101, 0x0202020202020202, 0x0303030303030303);
  const __m256i bit = _mm256_set1_epi64x((long long)0x8040201008040201u);
  const __m256i own = _mm256_and_si256(_mm256_shuffle_epi8(_mm256_set1_epi32(bits), byte_of_bit), bit);
  return _mm256_and_si256(_mm256_cmpeq_epi8(own, bit), _mm256_set1_epi8((char)value));
}
static inline Bytes spread_bits(const uint8_t *mask, int value) {
  return {spread_half(mask, value), spread_half(mask + 4, value)};
}
struct Four { __m256i v; };
static inline Four all_fours(const int8_t *x) {
  int32_t four;
  memcpy(&four, x, 4);
  return {_mm256_set1_epi32(four)};
}
// Keep the compiler from delaying sums, because delayed sums would not fit in registers.
static inline void keep_order(Bytes &x) { asm("" : "+x"(x.a), "+x"(x.b)); }
#ifdef EESD_DOT
template <bool wide> static inline Bytes dot(Bytes x, Bytes levels, Four four) {
  return {EESD_DOT(x.a, levels.a, four.v), EESD_DOT(x.b, levels.b, four.v)};
}
#else
// Products of unsigned levels with signed activations, added in pairs in 16 bits; sums of these pairs; and pairs of these sums, added in 32
// bits.
static inline Bytes multiply_pairs(Bytes levels, Four four) {
  return {_mm256_maddubs_epi16(levels.a, four.v), _mm256_maddubs_epi16(levels.b, four.v)};
}
static inline Bytes add_pairs(Bytes x, Bytes y) { return BOTH(_mm256_add_epi16); }
static inline Bytes join_pairs(Bytes x) {
  const __m256i ones = _mm256_set1_epi16(1);
  return {_mm256_madd_epi16(x.a, ones), _mm256_madd_epi16(x.b, ones)};
}
#endif
static inline Bytes shift_sums(Bytes x, int shift) { return {_mm256_slli_epi32(x.a, shift), _mm256_slli_epi32(x.b, shift)}; }
struct Words { __m256i a, b; };
static inline Words load_words(const int8_t *p) {
  return {_mm256_cvtepi8_epi16(_mm_loadu_si128((const __m128i *)p)), _mm256_cvtepi8_epi16(_mm_loadu_si128((const __m128i *)p + 1))};
}
static inline Bytes dot(Bytes sums, Words levels, const int16_t *two) {
  int32_t both;
  memcpy(&both, two, 4);
  const __m256i x = _mm256_set1_epi32(both);
#ifdef EESD_DOT
  return {_mm256_dpwssd_epi32(sums.a, levels.a, x), _mm256_dpwssd_epi32(sums.b, levels.b, x)};
#else
  return add_sums(sums, {_mm256_madd_epi16(levels.a, x), _mm256_madd_epi16(levels.b, x)});
#endif
}
static inline Floats level(Bytes x, int k) {
  const __m256i m = _mm256_set1_epi32(255);
  return {_mm256_cvtepi32_ps(_mm256_and_si256(_mm256_srli_epi32(x.a, 8 * k), m)),
          _mm256_cvtepi32_ps(_mm256_and_si256(_mm256_srli_epi32(x.b, 8 * k), m))};
}
static inline void prefetch(const void *p) { _mm_prefetch((const char *)p, _MM_HINT_T0); }
static inline void fetch_second(const void *p) { _mm_prefetch((const char *)p, _MM_HINT_T1); }  // into the second-level cache
static bool supported() {
#if defined __AVX512VNNI__
  if (!__builtin_cpu_supports("avx512vl") || !__builtin_cpu_supports("avx512vnni")) return false;
#elif defined EESD_DOT
  unsigned own[4] = {};
  if (!__get_cpuid_count(7, 1, own, own + 1, own + 2, own + 3) || !(own[0] >> 4 & 1)) return false;  // AVX-VNNI
#endif
  return __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma") && __builtin_cpu_supports("f16c");
}
#undef BOTH
