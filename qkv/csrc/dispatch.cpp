// Chooses a build of the kernels for this processor, once, and hands the calls on.
#include <atomic>
#include <cstring>

#include "abi.h"
#include "table.h"

extern const KernelTable kernels_portable;
#ifdef QKV_X86
extern const KernelTable kernels_avx2;
extern const KernelTable kernels_avx512;
#endif
#ifdef QKV_ARM64
extern const KernelTable kernels_neon;
#endif

namespace {

struct Choice {
  const char* name;
  const KernelTable* table;
  bool usable;
};

const Choice* choices() {
  static const Choice all[] = {
#ifdef QKV_X86
      {"avx512", &kernels_avx512,
       __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") && __builtin_cpu_supports("avx512dq") &&
           __builtin_cpu_supports("avx512vl") && __builtin_cpu_supports("avx512vnni")},
      {"avx2", &kernels_avx2, __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma")},
#endif
#ifdef QKV_ARM64
      {"neon", &kernels_neon, true},  // every AArch64 processor has it
#endif
      {"portable", &kernels_portable, true},
      {nullptr, nullptr, false},
  };
  return all;
}

const Choice* best() {
  const Choice* c = choices();
  while (!c->usable) ++c;
  return c;
}

std::atomic<const Choice*> chosen{nullptr};

const Choice* current() {
  const Choice* c = chosen.load(std::memory_order_acquire);
  if (!c) {
    c = best();
    chosen.store(c, std::memory_order_release);
  }
  return c;
}

}  // namespace

extern "C" {

int qkv_attend(const QkvAttend* args) { return current()->table->attend(*args); }

int qkv_encode(const QkvRows* rows, const QkvPlane* plane, int32_t is_key, int64_t batch, int64_t heads, int64_t n,
               int64_t offset, int32_t threads) {
  return current()->table->encode(*rows, *plane, is_key != 0, batch, heads, n, offset, threads);
}

int qkv_decode(const QkvRows* rows, const QkvPlane* plane, int32_t is_key, int64_t batch, int64_t heads, int64_t n,
               int64_t offset, int32_t threads) {
  return current()->table->decode(*rows, *plane, is_key != 0, batch, heads, n, offset, threads);
}

int qkv_append(const QkvAppend* args) {
  const KernelTable& table = *current()->table;
  QkvRows keys = args->key_rows, values = args->value_rows;
  keys.rows = args->keys;
  values.rows = args->values;
  const int code = table.encode(keys, args->key, true, args->batch, args->heads, 1, args->offset, 1);
  return code ? code : table.encode(values, args->value, false, args->batch, args->heads, 1, args->offset, 1);
}

const char* qkv_isa(void) { return current()->name; }

int qkv_select(const char* name) {
  for (const Choice* c = choices(); c->name; ++c) {
    if (std::strcmp(c->name, name) == 0 && c->usable) {
      chosen.store(c, std::memory_order_release);
      return 0;
    }
  }
  return -1;
}

int64_t qkv_abi(void) {
  return static_cast<int64_t>(sizeof(QkvPlane)) | static_cast<int64_t>(sizeof(QkvRegion)) << 16 |
         static_cast<int64_t>(sizeof(QkvAttend)) << 32 | static_cast<int64_t>(sizeof(QkvRows)) << 48;
}
}
