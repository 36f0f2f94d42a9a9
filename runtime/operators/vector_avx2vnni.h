// Sixteen lanes in two registers: AVX2 with AVX-VNNI, which adds four products to a 32-bit sum. AVX-512 has the same instruction with
// another encoding, which tests use to run these kernels.
#define EESD_DOT _mm256_dpbusd_epi32
#define EESD_PAIRS 0
#include "vector_avx2.h"
