// The attention path beside the linears: RMS norm and rotary embedding of queries and keys, in place in the
// packed rows of the fused projection, and the inverse RMS of rows alone. Eight lanes a head (128 columns), a
// warp a row; float32 inside, one rounding at the end.
#include "launch.cuh"
#include "tile.cuh"

namespace lowbit::cuda {

constexpr int kRopeWarps = 8;

LOWBIT_DEVICE float2 load2(const void* p, size_t at, Dtype dtype) {
  if (dtype == Dtype::kFloat32) return *reinterpret_cast<const float2*>(static_cast<const float*>(p) + at);
  const uint32_t w = *reinterpret_cast<const uint32_t*>(static_cast<const uint16_t*>(p) + at);
  return widen(w, dtype == Dtype::kBfloat16);
}
LOWBIT_DEVICE float warp_sum(float s) {
#pragma unroll
  for (int to = 16; to; to /= 2) s += __shfl_xor_sync(~0u, s, to);
  return s;
}

struct Eight {  // columns
  float v[8];
};
LOWBIT_DEVICE Eight eight(const float* p) {
  const float4 a = reinterpret_cast<const float4*>(p)[0], b = reinterpret_cast<const float4*>(p)[1];
  return {a.x, a.y, a.z, a.w, b.x, b.y, b.z, b.w};
}
LOWBIT_DEVICE Eight eight(const uint4& q, bool bf16) {
  const uint32_t w[4] = {q.x, q.y, q.z, q.w};
  Eight e;
#pragma unroll
  for (int i = 0; i < 4; i++) {
    const float2 f = widen(w[i], bf16);
    e.v[2 * i] = f.x, e.v[2 * i + 1] = f.y;
  }
  return e;
}
LOWBIT_DEVICE uint4 rounded(const Eight& e, bool bf16) {
  return make_uint4(pack2(e.v[0], e.v[1], bf16), pack2(e.v[2], e.v[3], bf16), pack2(e.v[4], e.v[5], bf16),
                    pack2(e.v[6], e.v[7], bf16));
}

struct Pair {
  Eight low, high;  // columns below 64, and those they rotate with
};

// x normed by `weight` (or not) and turned; all lanes of the warp take part.
LOWBIT_DEVICE void norm_and_turn(Pair& x, bool norm, const Pair& weight, const Eight& cosine,
                                 const Eight& sine, float eps) {
  if (norm) {
    float sum[4] = {};
#pragma unroll
    for (int i = 0; i < 8; i++)
      sum[i & 3] = fmaf(x.low.v[i], x.low.v[i], fmaf(x.high.v[i], x.high.v[i], sum[i & 3]));
    float total = (sum[0] + sum[1]) + (sum[2] + sum[3]);
#pragma unroll
    for (int to = 4; to; to /= 2) total += __shfl_xor_sync(~0u, total, to);
    const float factor = 1.f / sqrtf(total / kHead + eps);
#pragma unroll
    for (int i = 0; i < 8; i++)
      x.low.v[i] = x.low.v[i] * factor * weight.low.v[i],
      x.high.v[i] = x.high.v[i] * factor * weight.high.v[i];
  }
#pragma unroll
  for (int i = 0; i < 8; i++) {
    const float a = x.low.v[i], b = x.high.v[i], c = cosine.v[i], s = sine.v[i];
    x.low.v[i] = fmaf(-b, s, a * c), x.high.v[i] = fmaf(a, s, b * c);
  }
}

LOWBIT_DEVICE Eight load8(const void* p, size_t at, Dtype dtype) {
  return dtype == Dtype::kFloat32
             ? eight(static_cast<const float*>(p) + at)
             : eight(*reinterpret_cast<const uint4*>(static_cast<const uint16_t*>(p) + at),
                     dtype == Dtype::kBfloat16);
}
LOWBIT_DEVICE void store8(void* p, size_t at, const Eight& e, Dtype dtype) {
  if (dtype == Dtype::kFloat32) {
    float4* q = reinterpret_cast<float4*>(static_cast<float*>(p) + at);
    q[0] = make_float4(e.v[0], e.v[1], e.v[2], e.v[3]), q[1] = make_float4(e.v[4], e.v[5], e.v[6], e.v[7]);
  } else {
    *reinterpret_cast<uint4*>(static_cast<uint16_t*>(p) + at) = rounded(e, dtype == Dtype::kBfloat16);
  }
}

// Lane l of the eight of a head has columns 8l .. 8l + 7 and 64 + 8l .., the pairs that rotate together.
__global__ void __launch_bounds__(kRopeWarps * 32) norm_rope(const RopeArgs a) {
  const int l = threadIdx.x & 7, heads = a.heads + a.kv_heads;
  const int item = blockIdx.x * (kRopeWarps * 4) + (threadIdx.x >> 3), m = item / heads, head = item % heads;
  const float* weight = head < a.heads ? a.q_norm : a.k_norm;
  Pair w{};
  if (weight) w = {eight(weight + 8 * l), eight(weight + 64 + 8 * l)};
  ptx::previous_grid();
  ptx::let_next_grid_start();
  const bool live = m < a.m;  // the others go along: all lanes of a warp exchange sums
  const size_t angle = (size_t)(live ? m : 0) * 64 + 8 * l;
  const size_t at = (size_t)(live ? m : 0) * (a.heads + 2 * a.kv_heads) * kHead + head * kHead + 8 * l;
  Pair x = {load8(a.qkv, at, a.dtype), load8(a.qkv, at + 64, a.dtype)};  // queries, keys, values
  norm_and_turn(x, weight != nullptr, w, eight(a.cosines + angle), eight(a.sines + angle), a.eps);
  if (!live) return;
  store8(a.qkv, at, x.low, a.dtype), store8(a.qkv, at + 64, x.high, a.dtype);
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
  return start(reinterpret_cast<const void*>(norm_rope), (items + 4 * kRopeWarps - 1) / (4 * kRopeWarps),
               kRopeWarps * 32, 0, 1, d, stream, args);
}
const char* launch_inverse_rms(const void* x, float* out, int m, int k, float eps, Dtype dtype,
                               const Device& d, Stream stream) {
  void* args[] = {&x, &out, &m, &k, &eps, &dtype};
  return start(reinterpret_cast<const void*>(inverse_rms), (m + kRopeWarps - 1) / kRopeWarps, kRopeWarps * 32,
               0, 1, d, stream, args);
}

}  // namespace lowbit::cuda
