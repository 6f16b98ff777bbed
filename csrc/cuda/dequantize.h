// Codes -> float weights. No torch, no CUDA header.
#pragma once
#include "kernels.h"

namespace lowbit::cuda {

struct DequantizeArgs {
  const uint8_t* codes;  // [n, k / 2], element 2j low, or [n, k] with 8 bits; unsigned where there are zeros
  const float* scales;   // [n, groups]
  const uint8_t* zeros;  // [n, groups] or null
  void* w;               // [n, k] of dtype
  int n, k, group, groups, bits;
  Dtype dtype;
};

const char* launch_dequantize(const DequantizeArgs&, const Device&, Stream);

}  // namespace lowbit::cuda
