// The kernels in NEON with dot products.
#include "kernels.h"

#include <math.h>
#ifdef __aarch64__
#include <arm_neon.h>
#include <sys/auxv.h>
#endif

namespace eesd {
#ifdef __aarch64__
namespace {
#include "vector_neon.h"
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
  return (getauxval(AT_HWCAP) >> 20 & 1) != 0;  // HWCAP_ASIMDDP
}
}  // namespace

const Kernels neon_kernels = {"neon", supported, prepare, multiply, write, attend, finish, top, route, combine};
#else
const Kernels neon_kernels = {"neon", [] { return false; }, nullptr, nullptr, nullptr, nullptr, nullptr, nullptr, nullptr, nullptr};
#endif
}  // namespace eesd
