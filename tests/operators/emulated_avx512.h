// AVX-512 and AVX-VNNI on processors with AVX2: included before kernels.cpp, SIMDe's functions take the place of the instructions.
// Functions that SIMDe 0.7.4 lacks, or that have other bits there, are here as two halves of 256 bits or as loops over lanes.
#include <cpuid.h>
#include <stdint.h>
#include <string.h>

#define SIMDE_ENABLE_NATIVE_ALIASES
#include <simde/x86/avx512.h>

namespace emulated {
template <typename Half, typename Whole> Half half(const Whole &a, int index) {
  Half part;
  memcpy(&part, (const char *)&a + 32 * index, 32);
  return part;
}
template <typename Whole, typename Half> Whole join(Half low, Half high) {
  Whole a;
  memcpy(&a, &low, 32), memcpy((char *)&a + 32, &high, 32);
  return a;
}
// The lanes of the result from those of a, one by one, each as a number of the type To.
template <typename From, typename To, typename Whole, typename Vector> Whole each(const Vector &a) {
  From from[16];
  To to[16];
  memcpy(from, &a, sizeof from);
  for (int i = 0; i < 16; i++) to[i] = (To)from[i];
  Whole result;
  memcpy(&result, to, sizeof to);
  return result;
}

static inline __m512 abs_ps(__m512 a) {  // SIMDe's leaves -0 as it is
  const __m256 sign = _mm256_set1_ps(-0.f);
  return join<__m512>(_mm256_andnot_ps(sign, half<__m256>(a, 0)), _mm256_andnot_ps(sign, half<__m256>(a, 1)));
}
static inline __m512i cvtps_epi32(__m512 a) {
  return join<__m512i>(_mm256_cvtps_epi32(half<__m256>(a, 0)), _mm256_cvtps_epi32(half<__m256>(a, 1)));
}
static inline __m512 cvtepi32_ps(__m512i a) {
  return join<__m512>(_mm256_cvtepi32_ps(half<__m256i>(a, 0)), _mm256_cvtepi32_ps(half<__m256i>(a, 1)));
}
static inline __m512 cvtph_ps(__m256i a) {
  return join<__m512>(_mm256_cvtph_ps(_mm256_castsi256_si128(a)), _mm256_cvtph_ps(_mm256_extracti128_si256(a, 1)));
}
}  // namespace emulated

#undef _mm512_abs_ps
#undef _mm512_cvtps_epi32
#undef _mm512_cvtepi32_ps
#undef _mm512_cvtph_ps
#undef _mm512_cvtepi32_epi8
#undef _mm512_cvtepi8_epi32
#undef _mm512_cvtepu16_epi32
#undef _mm512_extractf32x8_ps
#define _mm512_abs_ps emulated::abs_ps
#define _mm512_cvtps_epi32 emulated::cvtps_epi32
#define _mm512_cvtepi32_ps emulated::cvtepi32_ps
#define _mm512_cvtph_ps emulated::cvtph_ps
#define _mm512_cvtepi32_epi8 emulated::each<uint32_t, uint8_t, __m128i>
#define _mm512_cvtepi8_epi32 emulated::each<int8_t, int32_t, __m512i>
#define _mm512_cvtepu16_epi32 emulated::each<uint16_t, int32_t, __m512i>
#define _mm512_extractf32x8_ps emulated::half<__m256>
#define __builtin_cpu_supports(feature) 1
#define __get_cpuid_count(leaf, index, a, b, c, d) (*(a) = 16)  // AVX-VNNI
