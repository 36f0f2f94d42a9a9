// Sixteen lanes in four registers: NEON with products of matrices of 8 bits (i8mm), two rows and two columns at a time.
#define EESD_PAIRS 1
#include "vector_neon.h"
