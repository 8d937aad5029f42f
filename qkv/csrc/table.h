#pragma once
#include <cstdint>

#include "abi.h"

// What one build of the kernels offers.
struct KernelTable {
  int (*attend)(const QkvAttend&);
  int (*encode)(const QkvRows&, const QkvPlane&, bool is_key, int64_t batch, int64_t heads, int64_t n, int64_t offset,
                int threads);
  int (*decode)(const QkvRows&, const QkvPlane&, bool is_key, int64_t batch, int64_t heads, int64_t n, int64_t offset,
                int threads);
};
