// The kernels in AVX2 with FMA.
#include "kernels.h"

#include <math.h>
#ifdef __x86_64__
#include <immintrin.h>
#endif

namespace eesd {
#ifdef __x86_64__
namespace {
#include "vector_avx2.h"
//
#include "rows.h"
//
#include "levels.h"
//
#include "integers_avx2.h"
//
#include "products.h"
//
#include "attention.h"
//
#include "topk.h"
//
#include "experts.h"

bool supported() {
  return __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma") && __builtin_cpu_supports("f16c");
}
}  // namespace

const Kernels avx2_kernels = {"avx2", supported, prepare, multiply, write, attend, finish, top, route, combine};
#else
const Kernels avx2_kernels = {"avx2", [] { return false; }, nullptr, nullptr, nullptr, nullptr, nullptr, nullptr, nullptr, nullptr};
#endif
}  // namespace eesd
