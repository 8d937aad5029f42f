#define QKV_SIMD "simd_neon.h"
#define QKV_TABLE kernels_neon
#include "isa.inc"
