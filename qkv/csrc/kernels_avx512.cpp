#define QKV_SIMD "simd_avx512.h"
#define QKV_TABLE kernels_avx512
#include "isa.inc"
