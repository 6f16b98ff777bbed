// The attention path beside the linears: RMS norm and rotary embedding of queries and keys, in place in the
// packed rows of the fused projection, and the inverse RMS of rows alone. A warp a head (128 columns) or a
// row; float32 inside, one rounding at the end.
#include "launch.cuh"
#include "tile.cuh"

namespace lowbit::cuda {

constexpr int kHead = 128, kRopeWarps = 8;

LOWBIT_DEVICE float2 load2(const void* p, size_t at, Dtype dtype) {
  if (dtype == Dtype::kFloat32) return *reinterpret_cast<const float2*>(static_cast<const float*>(p) + at);
  const uint32_t w = *reinterpret_cast<const uint32_t*>(static_cast<const uint16_t*>(p) + at);
  return dtype == Dtype::kBfloat16 ? make_float2(__uint_as_float(w << 16), __uint_as_float(w & 0xFFFF0000u))
                                   : half2_float2(w);
}
LOWBIT_DEVICE void store2(void* p, size_t at, float2 v, Dtype dtype) {
  if (dtype == Dtype::kFloat32)
    *reinterpret_cast<float2*>(static_cast<float*>(p) + at) = v;
  else
    *reinterpret_cast<uint32_t*>(static_cast<uint16_t*>(p) + at) = pack2(v.x, v.y, dtype == Dtype::kBfloat16);
}
LOWBIT_DEVICE float warp_sum(float s) {
#pragma unroll
  for (int to = 16; to; to /= 2) s += __shfl_xor_sync(~0u, s, to);
  return s;
}

// Lane l has columns 2l, 2l+1 and 64 + 2l, 64 + 2l + 1 of a head: the pairs that rotate together.
__global__ void __launch_bounds__(kRopeWarps * 32) norm_rope(const RopeArgs a) {
  const int lane = threadIdx.x & 31, heads = a.heads + a.kv_heads;
  const int item = blockIdx.x * kRopeWarps + (threadIdx.x >> 5), m = item / heads, head = item % heads;
  const bool query = head < a.heads;
  const float* weight = query ? a.q_norm : a.k_norm;
  float2 w0 = {1.f, 1.f}, w1 = {1.f, 1.f};
  if (weight)
    w0 = load2(weight, 2 * lane, Dtype::kFloat32), w1 = load2(weight, 64 + 2 * lane, Dtype::kFloat32);
  ptx::previous_grid();
  ptx::let_next_grid_start();
  if (m >= a.m) return;
  const size_t at =
      (size_t)m * (a.heads + 2 * a.kv_heads) * kHead + head * kHead + 2 * lane;  // queries, keys, values
  float2 x0 = load2(a.qkv, at, a.dtype), x1 = load2(a.qkv, at + 64, a.dtype);
  if (weight) {
    const float s = warp_sum(x0.x * x0.x + x0.y * x0.y + x1.x * x1.x + x1.y * x1.y);
    const float factor = 1.f / sqrtf(s / kHead + a.eps);
    x0 = {x0.x * factor * w0.x, x0.y * factor * w0.y}, x1 = {x1.x * factor * w1.x, x1.y * factor * w1.y};
  }
  const float2 c = load2(a.cosines, (size_t)m * 64 + 2 * lane, Dtype::kFloat32);
  const float2 s = load2(a.sines, (size_t)m * 64 + 2 * lane, Dtype::kFloat32);
  store2(a.qkv, at, {fmaf(-x1.x, s.x, x0.x * c.x), fmaf(-x1.y, s.y, x0.y * c.y)}, a.dtype);
  store2(a.qkv, at + 64, {fmaf(x0.x, s.x, x1.x * c.x), fmaf(x0.y, s.y, x1.y * c.y)}, a.dtype);
}

__global__ void __launch_bounds__(kRopeWarps * 32)
    inverse_rms(const void* x, float* out, int m, int k, float eps, Dtype dtype) {
  const int lane = threadIdx.x & 31, row = blockIdx.x * kRopeWarps + (threadIdx.x >> 5);
  ptx::previous_grid();
  ptx::let_next_grid_start();
  if (row >= m) return;
  float s = 0.f;
  for (int i = 2 * lane; i < k; i += 64) {
    const float2 v = load2(x, (size_t)row * k + i, dtype);
    s = fmaf(v.x, v.x, fmaf(v.y, v.y, s));
  }
  s = warp_sum(s);
  if (lane == 0) out[row] = 1.f / sqrtf(s / k + eps);
}

const char* launch_norm_rope(const RopeArgs& a, const Device& d, Stream stream) {
  RopeArgs copy = a;
  void* args[] = {&copy};
  const int items = a.m * (a.heads + a.kv_heads);
  return start(reinterpret_cast<const void*>(norm_rope), (items + kRopeWarps - 1) / kRopeWarps,
               kRopeWarps * 32, 0, 1, d, stream, args);
}
const char* launch_inverse_rms(const void* x, float* out, int m, int k, float eps, Dtype dtype,
                               const Device& d, Stream stream) {
  void* args[] = {&x, &out, &m, &k, &eps, &dtype};
  return start(reinterpret_cast<const void*>(inverse_rms), (m + kRopeWarps - 1) / kRopeWarps, kRopeWarps * 32,
               0, 1, d, stream, args);
}

}  // namespace lowbit::cuda
