// What the CUDA kernels are called with: argument structs and launchers. No torch, no CUDA header.
#pragma once
#include <cstddef>
#include <cstdint>

struct CUstream_st;

namespace lowbit::cuda {

using Stream = CUstream_st*;

enum class Dtype : int { kFloat32 = 0, kBfloat16 = 1, kFloat16 = 2 };  // as in cpu/kernels.h

// How a packed weight is scaled (tile.cuh draws the tiles).
enum Mode : int {
  kW8 = 0,          // int8, one scale a channel
  kW4Channel = 1,   // 4 bit, one scale a channel
  kW4TwoLevel = 2,  // 4 bit, one scale a channel times an integer -15 .. 15 per 64 columns
  kW4Group = 3,     // 4 bit, one fp16 scale per 64 columns
};
constexpr int kModes = 4;

// x [m, k] -> codes int8 [m, kp], scale [m], and low = downT x' in units of the row's scale.
struct QuantizeArgs {
  const void* x;        // [m, k] of dtype, or [m, 2k] with silu: gate, then up
  void* residual;       // [m, k] of dtype or null: x += residual, and the rounded sum is written back here
  const float* norm;    // [k] or null: RMS norm with this weight
  const float* smooth;  // [2, k] or null: what x is divided by (values of fp16), and 1 over it
  const void* down;     // fp16 A fragments [rank / 16][ceil(k / 64)][4][32 lanes][16 B] or null
  int8_t* codes;        // [m, kp]
  float* scales;        // [m]
  void* low;            // fp16 [rank / 16][ceil(m / 8)][halves of 8 ranks][8 rows][8 ranks]
  float eps;            //
  int m, k, kp;         // kp: k rounded up to 256, the columns beyond k become 0
  int rank;             // multiple of 16
  bool hadamard, silu;  //
  // Four bits (INT4 tensor cores): codes uint8 [m, kp / 2], element 2j low; a scale per 64 columns,
  // group_scales [kp / 64, mp] with mp = m rounded up to 128; scales stay the unit of low.
  bool four;
  float clip;           // of amax, before the 4-bit scale is taken
  float* group_scales;  //
  bool tile_order;      // a row in the order of the GEMM's tiles instead of plain
  Dtype dtype;          //
};

// y [m, n] = scales * (channel * (codes . weight) + up . low) + bias
struct LinearArgs {
  const int8_t* codes;    // [m, kp] in tile order (GEMV: plain)
  const float* scales;    // [m]
  const void* low;        // as above, or null with rank 0
  const uint8_t* weight;  // tiles [np / 64][kp / 128]
  const float* channel;   // [np]
  const float* bias;      // [np] or null
  const void* up;         // fp16 A fragments [rank / 16][np / 16][32 lanes][16 B]
  void* y;                // [m, n] of dtype
  int m, n, np, kp;       // np: n rounded up to 64
  int rank;               //
  Mode mode;              //
  Dtype dtype;            //
  // Hopper's GEMM: y [m, n / 2] = silu(gate) * up; rows 16 i .. 16 i + 7 of the weight are those of the gate,
  // the next eight those of up.
  bool gated;
};

struct Device {
  int index;
  int multiprocessors;
  int capability;  // 80, 86, 89, 90, ...
  int shared;      // bytes that a CTA can have
};

// y [m, n] = sum over groups of 64 columns of group_scales * weight_scales * (codes . weight) + scales * (up
// . low) + bias
struct Int4Args {
  const uint8_t* codes;        // [m, kp / 2]
  const float* group_scales;   // [kp / 64, mp]
  const float* scales;         // [m]
  const void* low;             //
  const uint8_t* weight;       // [np, kp / 2], two's complement, element 2j low; np: n rounded up to 128
  const float* weight_scales;  // [kp / 64, np]
  const float* bias;           // [np] or null
  const void* up;              // [rank / 16][np / 16][32 lanes][16 B]
  void* y;                     // [m, n]
  int m, n, np, kp, mp, rank;  //
  Dtype dtype;                 //
};

constexpr int kHead = 128;  // columns of a head

// Rows of queries, keys and values [m, (heads + 2 kv_heads) * 128]: norm (or none) and rotation of queries
// and keys.
struct RopeArgs {
  void* qkv;
  const float *q_norm, *k_norm;  // [128] or null
  const float *cosines, *sines;  // [m, 64]
  int m, heads, kv_heads;
  float eps;
  Dtype dtype;
};

// y [m, heads, 128] = softmax(scale q k^T) v inside each segment of the m rows. Strides are those of rows, in
// elements; the heads of a row lie side by side.
struct AttentionArgs {
  const void *q, *k, *v;  // [m, heads, 128], [m, kv_heads, 128] twice
  const int* bounds;      // [segments + 1], 0 .. m
  void* y;
  int64_t q_stride, k_stride, v_stride;
  int m, heads, kv_heads, segments;
  float scale;
  Dtype dtype;
};

// Logits [2, items, frames, books, classes], conditional and unconditional -> token and score of every slot
// [items, books, frames].
struct ScoreArgs {
  const void* logits;
  const float *guidance, *temperature;  // [1]
  const float* penalty;                 // [books]
  const float* noise;                   // [items, books, frames]
  const bool* valid;                    // [items, frames]
  const int64_t* tokens;                // [items, books, frames]
  int64_t* pred;
  float* score;
  int items, frames, books, classes, mask_id;
  Dtype dtype;
};

// tokens [items, slots] = pred at the k[item] slots of largest score.
struct RevealArgs {
  int64_t* tokens;
  const int64_t *pred, *k;
  const float* score;
  int items, slots;
};

constexpr int kMostDevices = 64;

// One tile shape of the GEMM, as a row of the table.
struct TileRow {
  int warpgroups, tokens, stages, split;
  bool persistent;
};

// Each returns null, or what went wrong (a string that lives on).
const char* launch_quantize(const QuantizeArgs&, const Device&, Stream);
bool launch_quantize_short(const QuantizeArgs&, const Device&, Stream,
                           const char** wrong);  // false: not its case
bool launch_quantize_plain(const QuantizeArgs&, const Device&, Stream,
                           const char** wrong);                                   // false: the same
const char* launch_gemm_sm90(const LinearArgs&, int row, const Device&, Stream);  // row -1: by the table
const char* launch_gemm_mma(const LinearArgs&, const Device&, Stream);            // any chip
const char* launch_gemv(const LinearArgs&, const Device&, Stream);
const char* launch_gemm_int4(const Int4Args&, const Device&, Stream);
const char* launch_norm_rope(const RopeArgs&, const Device&, Stream);
const char* launch_inverse_rms(const void* x, float* out, int m, int k, float eps, Dtype, const Device&,
                               Stream);
const char* launch_guided_score(const ScoreArgs&, const Device&, Stream);
const char* launch_attention(const AttentionArgs&, const Device&, Stream);
bool launch_attention_sm90(const AttentionArgs&, const Device&, Stream,
                           const char** wrong);  // false: not its case
// Attention whose rows are rounded at once (q.x unused, q.k = heads * 128). False: not its case.
bool launch_attention_quantize(const AttentionArgs&, const QuantizeArgs&, const Device&, Stream,
                               const char** wrong);
const char* launch_reveal(const RevealArgs&, const Device&, Stream);
const char* query_device(int index, Device*);  // cached, one entry a device

}  // namespace lowbit::cuda
