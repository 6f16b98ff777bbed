// Codes -> float weights, for what the integer kernels do not take (zero points, odd groups, float
// activations): cuBLAS multiplies. w[n,k] = scales[n,g] (codes[n,k] - zeros[n,g]), one rounding. A thread
// makes 8 columns of a row.
#include "dequantize.h"
#include "launch.cuh"
#include "tile.cuh"

namespace lowbit::cuda {

__global__ void __launch_bounds__(256) dequantize(const DequantizeArgs a) {
  const int eights = (a.k + 7) / 8;
  const size_t item = (size_t)blockIdx.x * 256 + threadIdx.x;
  ptx::previous_grid();
  ptx::let_next_grid_start();
  if (item >= (size_t)a.n * eights) return;
  const int n = item / eights, first = item % eights * 8;
  const float* scales = a.scales + (size_t)n * a.groups;
  const uint8_t* zeros = a.zeros ? a.zeros + (size_t)n * a.groups : nullptr;
  const uint8_t* codes = a.codes + (size_t)n * (a.bits == 4 ? a.k / 2 : a.k);
#pragma unroll
  for (int i = 0; i < 8; i++) {
    const int k = first + i;
    if (k >= a.k) return;
    int q;
    if (a.bits == 4) {
      const int nibble = codes[k / 2] >> (k & 1 ? 4 : 0) & 15;
      q = zeros ? nibble : (nibble ^ 8) - 8;
    } else {
      q = zeros ? codes[k] : static_cast<int8_t>(codes[k]);
    }
    const int g = k / a.group;
    store_one(a.w, (size_t)n * a.k + k, scales[g] * static_cast<float>(q - (zeros ? zeros[g] : 0)), a.dtype);
  }
}

const char* launch_dequantize(const DequantizeArgs& a, const Device& d, Stream stream) {
  DequantizeArgs copy = a;
  void* args[] = {&copy};
  const size_t items = (size_t)a.n * ((a.k + 7) / 8);
  return start(reinterpret_cast<const void*>(dequantize), (items + 255) / 256, 256, 0, 1, d, stream, args);
}

}  // namespace lowbit::cuda
