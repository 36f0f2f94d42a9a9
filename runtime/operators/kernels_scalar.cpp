// The kernels in plain C++: the specification.
#include "kernels.h"

#include <math.h>
#ifdef __x86_64__
#include <immintrin.h>
#endif

namespace eesd {
namespace {
#include "vector_scalar.h"
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
  return true;
}
}  // namespace

const Kernels scalar_kernels = {"scalar", supported, prepare, multiply, write, attend, finish, top, route, combine};
}  // namespace eesd
