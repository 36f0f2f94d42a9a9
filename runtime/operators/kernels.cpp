// The kernels for one instruction set, EESD_KERNELS, for which vector_<name>.h defines 16 lanes. setup.py compiles this file once for
// each instruction set. EESD_MISSING means that the compiler does not support the instruction set, or that the set belongs to another
// machine.
#include "kernels.h"

#define STRING_OF(text) #text
#define STRING(text) STRING_OF(text)
#define JOIN_OF(a, b) a##b
#define JOIN(a, b) JOIN_OF(a, b)

namespace eesd {
extern const Kernels JOIN(EESD_KERNELS, _kernels);
}

#ifdef EESD_MISSING
const eesd::Kernels eesd::JOIN(EESD_KERNELS, _kernels) = {
    STRING(EESD_KERNELS), [] { return false; }, nullptr, nullptr, nullptr, nullptr, nullptr, nullptr, nullptr, nullptr, nullptr, nullptr};
#else
#include <math.h>
#if defined __x86_64__ || defined _M_X64
#include <cpuid.h>
#include <immintrin.h>
#elif defined __aarch64__
#include <arm_neon.h>
#if defined __linux__
#include <sys/auxv.h>
#elif defined __APPLE__
#include <sys/sysctl.h>
#elif defined _WIN32
extern "C" __declspec(dllimport) int IsProcessorFeaturePresent(unsigned long);
#endif
#endif

namespace eesd {
namespace {
#include STRING(JOIN(vector_, EESD_KERNELS).h)
//
#include "rows.h"
//
#include "levels.h"
//
#include EESD_INTEGERS
//
#include "products.h"
//
#include "attention.h"
//
#include "topk.h"
//
#include "experts.h"
//
#include "delta.h"
}  // namespace

const Kernels JOIN(EESD_KERNELS, _kernels) = {
    STRING(EESD_KERNELS), supported, prepare, multiply, write, attend, finish, top, route, combine, mix, step};
}  // namespace eesd
#endif
