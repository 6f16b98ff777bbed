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
  const float* smooth;  // [k] or null: x is divided by it
  const void* down;     // fp16 A fragments [rank / 16][k / 16][32 lanes][16 B] or null
  int8_t* codes;        // [m, kp]
  float* scales;        // [m]
  void* low;            // fp16 B fragments [rank / 16][ceil(m / 8)][32 lanes][8 B]
  float eps;            //
  int m, k, kp;         // kp: k rounded up to 256, the columns beyond k become 0
  int rank;             // multiple of 16
  bool hadamard, silu;  //
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
};

struct Device {
  int index;
  int multiprocessors;
  int capability;  // 80, 86, 89, 90, ...
  int shared;      // bytes that a CTA can have
};

constexpr int kMostDevices = 64;

// One tile shape of the GEMM, as a row of the table.
struct TileRow {
  int warpgroups, tokens, stages, split;
  bool persistent;
};

// Each returns null, or what went wrong (a string that lives on).
const char* launch_quantize(const QuantizeArgs&, const Device&, Stream);
const char* launch_gemm_sm90(const LinearArgs&, int row, const Device&, Stream);  // row -1: by the table
const char* launch_gemv(const LinearArgs&, const Device&, Stream);
int gemm_sm90_rows(Mode);
bool gemm_sm90_row(Mode, int row, TileRow*);
const char* query_device(int index, Device*);  // cached, one entry a device

}  // namespace lowbit::cuda
