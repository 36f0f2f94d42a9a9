// Sixteen lanes in four registers: NEON with products of 8-bit matrices (i8mm), two rows and two columns at a time.
#define EESD_PAIRS 1
#include "vector_neon.h"
