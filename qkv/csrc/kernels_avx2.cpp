#define QKV_SIMD "simd_avx2.h"
#define QKV_TABLE kernels_avx2
#include "isa.inc"
