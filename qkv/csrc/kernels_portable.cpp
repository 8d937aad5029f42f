#define QKV_SIMD "simd_portable.h"
#define QKV_TABLE kernels_portable
#include "isa.inc"
