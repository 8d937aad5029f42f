// The binary interface between Python (ctypes) and the kernels. Pointers, strides and lengths only: nothing of torch.
// The structures below are mirrored field by field in qkv/native.py; a size check at load time guards them.
#pragma once
#include <cstdint>

// The library is compiled with hidden visibility: these are what it shows.
#pragma GCC visibility push(default)
extern "C" {

// How a plane (keys or values of one region) is stored. Float formats keep rows [token][channel]; the one-byte
// formats keep tiles, see qkv/formats/layout.py: keys [token/16][channel/2][16][2], values [token/2][channel][2]. Codes
// of n bits are packed in units of 32, 4 n bytes: keys [token/16][channel/2], values [token/2][channel/16].
enum QkvFormat : int32_t {
  QKV_F32 = 0,
  QKV_BF16 = 1,
  QKV_F16 = 2,
  QKV_INT8 = 3,
  QKV_E4M3 = 4,
  QKV_E5M2 = 5,
  QKV_INT2 = 6,  // unsigned whole numbers, with an offset
  QKV_INT3 = 7,
  QKV_INT4 = 8,
  QKV_INT5 = 9,
  QKV_INT6 = 10,
  QKV_LUT4 = 11,  // code books: a table says what a code stands for
  QKV_LUT8 = 12,
};

// What shares a scale: a token (bfloat16, no offset), a head (float32), a group of channels of a token
// ([group][token]), or a channel of a group of tokens ([token / group][channel]).
enum QkvScale : int32_t {
  QKV_SCALE_NONE = 0,
  QKV_SCALE_TOKEN = 1,
  QKV_SCALE_HEAD = 2,
  QKV_SCALE_GROUP = 3,
  QKV_SCALE_CHANNEL = 4,
};

// How scales per token, group and channel are stored, see qkv/formats/scale_types.py.
enum QkvScaleType : int32_t { QKV_BF16_SCALE = 0, QKV_UE5M3 = 1, QKV_E8M0 = 2, QKV_E4M3_SCALE = 3, QKV_F32_SCALE = 4 };

// x = code * scale + offset. A zero point is an int8 number of steps; the middle is that of the codes, below zero.
enum QkvOffset : int32_t { QKV_OFFSET_NONE = 0, QKV_ZERO_POINT = 1, QKV_OFFSET_BF16 = 2, QKV_OFFSET_MIDDLE = 3 };

enum QkvMask : int32_t { QKV_MASK_NONE = 0, QKV_MASK_BOOL = 1, QKV_MASK_F32 = 2 };

struct QkvPlane {
  void* codes;
  void* scale;
  void* offset;             // shaped as scale, or null
  const float* table;       // of a code book, or null
  // To encode with a code book: the nearest codes of a number by its first 16 bits, as a signed integer from the lowest
  // on: up to `bound` one code, above it another. Null: it is not encoded here.
  const float* bound;
  const uint8_t* below;
  const uint8_t* above;
  const float* signs;       // [dim] of 1 and -1: rows were multiplied by them, then by Hadamard matrices; or null
  const float* centre;      // [heads][dim], subtracted from rows before all that, or null
  const float* multiplier;  // [heads][dim], rows were divided by it then, or null
  int64_t codes_stride[2];  // bytes from one batch row / head to the next
  int64_t scale_stride[2];  // elements from one batch row / head to the next, of scale and offset
  int64_t group_stride;     // elements from one group to the next, of scale and offset
  int32_t format;           // QkvFormat
  int32_t scale_kind;       // QkvScale
  int32_t scale_type;       // QkvScaleType
  int32_t offset_type;      // QkvOffset
  int32_t group;            // channels, or tokens, that share a scale
  int32_t rotation;         // channels of one Hadamard matrix, a power of two
  float cut;                // of a range: this part at either end is left to saturate
  int32_t reserved;
};

// A run of consecutive tokens stored in one format. The regions of a cache share one softmax.
struct QkvRegion {
  QkvPlane key;
  QkvPlane value;
  int64_t skip;    // tokens in front that are stored but not to be seen
  int64_t length;  // tokens behind them
};

struct QkvAttend {
  const void* query;            // [batch, kv_heads * group, q_len, key_dim], channel stride 1
  void* out;                    // [batch, q_len, kv_heads * group, value_dim], contiguous, dtype of the query
  const void* mask;             // see mask_kind; columns follow the regions in order
  const float* sinks;           // [kv_heads * group] extra logits without a value, or null
  const QkvRegion* regions;
  int64_t query_stride[3];      // elements: batch, head, position
  int64_t mask_stride[4];       // elements: batch, head, position, column (0 where broadcast)
  int64_t batch, kv_heads, group, q_len, key_dim, value_dim, n_regions;
  float softmax_scale;
  float softcap;                // 0: none
  int32_t query_dtype;          // QKV_F32, QKV_BF16 or QKV_F16
  int32_t mask_kind;            // QkvMask
  int32_t causal;               // row i sees columns <= kv_len - q_len + i
  int32_t threads;
};

// Rows to be encoded into, or decoded from, one plane.
struct QkvRows {
  void* rows;           // [batch, heads, n, dim], channel stride 1
  int64_t stride[3];    // elements: batch, head, token
  int64_t dim;          // channels
  int32_t dtype;        // QKV_F32, QKV_BF16 or QKV_F16
  int32_t reserved;
};

// One token's keys and values, to be encoded into one segment: all that a step of decoding has to say in one argument.
struct QkvAppend {
  void* keys;    // as key_rows.rows and value_rows.rows, which are not looked at
  void* values;
  int64_t offset, batch, heads;
  QkvRows key_rows, value_rows;
  QkvPlane key, value;
};

// Each returns 0, or a negative number when an argument is outside what the kernels serve.
int qkv_attend(const QkvAttend* args);
int qkv_encode(const QkvRows* rows, const QkvPlane* plane, int32_t is_key, int64_t batch, int64_t heads, int64_t n,
               int64_t offset, int32_t threads);
int qkv_decode(const QkvRows* rows, const QkvPlane* plane, int32_t is_key, int64_t batch, int64_t heads, int64_t n,
               int64_t offset, int32_t threads);

int qkv_append(const QkvAppend* args);

// "avx512", "avx2", "neon" or "portable": what this processor is served with. qkv_select forces one (tests); it
// returns 0, or -1 when the processor or the build lacks it.
const char* qkv_isa(void);
int qkv_select(const char* name);
// sizeof(QkvPlane) | sizeof(QkvRegion) << 16 | sizeof(QkvAttend) << 32 | sizeof(QkvRows) << 48
int64_t qkv_abi(void);
}
#pragma GCC visibility pop
