// The kernels in AVX-512 with VNNI.
#include "kernels.h"

#include <math.h>
#ifdef __x86_64__
#include <immintrin.h>
#endif

namespace eesd {
#ifdef __x86_64__
namespace {
#include "vector_avx512.h"
//
#include "rows.h"
//
#include "levels.h"
//
#include "integers.h"
//
#include "products.h"
//
#include "attention.h"
//
#include "topk.h"
//
#include "experts.h"

bool supported() {
  return __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") && __builtin_cpu_supports("avx512vl") &&
         __builtin_cpu_supports("avx512dq") && __builtin_cpu_supports("avx512vnni");
}
}  // namespace

const Kernels avx512_kernels = {"avx512", supported, prepare, multiply, write, attend, finish, top, route, combine};
#else
const Kernels avx512_kernels = {"avx512", [] { return false; }, nullptr, nullptr, nullptr, nullptr, nullptr, nullptr, nullptr, nullptr};
#endif
}  // namespace eesd
