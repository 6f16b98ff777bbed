// The verbs of the quantizer on one unit of 16 columns of a row.
#pragma once
#include "tile.cuh"

namespace lowbit::cuda {

constexpr int kUnit = 16, kSlices = 8, kRows = 8;
constexpr float kTiny = 0x1p-100f;  // a row below this is zero
constexpr float kRound =
    12582912.f;  // 1.5 * 2^23: adding it rounds to an integer, whose low byte is the low byte of the bits

struct Raw {  // 16 columns as they lie in memory; fp16 and bf16 use the first half
  uint4 q[4];
};
LOWBIT_DEVICE void fetch(Raw& r, const void* x, size_t at, Dtype dtype) {
  if (dtype == Dtype::kFloat32) {
    const uint4* p = reinterpret_cast<const uint4*>(static_cast<const float*>(x) + at);
#pragma unroll
    for (int i = 0; i < 4; i++) r.q[i] = p[i];
  } else {
    const uint4* p = reinterpret_cast<const uint4*>(static_cast<const uint16_t*>(x) + at);
    r.q[0] = p[0], r.q[1] = p[1];
  }
}
LOWBIT_DEVICE float2 widen(uint32_t w, bool bf16) {
  return bf16 ? make_float2(__uint_as_float(w << 16), __uint_as_float(w & 0xFFFF0000u)) : half2_float2(w);
}
LOWBIT_DEVICE void to_floats(float (&v)[kUnit], const Raw& r, Dtype dtype) {
  const uint32_t* w = reinterpret_cast<const uint32_t*>(r.q);
  if (dtype == Dtype::kFloat32) {
#pragma unroll
    for (int i = 0; i < kUnit; i++) v[i] = __uint_as_float(w[i]);
  } else {
    const bool bf16 = dtype == Dtype::kBfloat16;
#pragma unroll
    for (int i = 0; i < 8; i++) {
      const float2 f = widen(w[i], bf16);
      v[2 * i] = f.x, v[2 * i + 1] = f.y;
    }
  }
}

// v += what was fetched, rounded to the dtype; the rounded sum goes back and is what goes on.
LOWBIT_DEVICE void add_residual(float (&v)[kUnit], const Raw& r, void* residual, size_t at, Dtype dtype) {
  float old[kUnit];
  to_floats(old, r, dtype);
#pragma unroll
  for (int i = 0; i < kUnit; i++) v[i] += old[i];
  if (dtype == Dtype::kFloat32) {
    float4* p = reinterpret_cast<float4*>(static_cast<float*>(residual) + at);
#pragma unroll
    for (int i = 0; i < 4; i++) p[i] = make_float4(v[4 * i], v[4 * i + 1], v[4 * i + 2], v[4 * i + 3]);
    return;
  }
  const bool bf16 = dtype == Dtype::kBfloat16;
  uint32_t w[8];
#pragma unroll
  for (int i = 0; i < 8; i++) {
    w[i] = pack2(v[2 * i], v[2 * i + 1], bf16);
    const float2 f = widen(w[i], bf16);
    v[2 * i] = f.x, v[2 * i + 1] = f.y;
  }
  uint4* p = reinterpret_cast<uint4*>(static_cast<uint16_t*>(residual) + at);
  p[0] = make_uint4(w[0], w[1], w[2], w[3]), p[1] = make_uint4(w[4], w[5], w[6], w[7]);
}

LOWBIT_DEVICE void gate(float (&v)[kUnit], const Raw& r, Dtype dtype) {
  float up[kUnit];
  to_floats(up, r, dtype);
#pragma unroll
  for (int i = 0; i < kUnit; i++) v[i] = __fdividef(v[i], 1.f + __expf(-v[i])) * up[i];
}

template <bool divide>
LOWBIT_DEVICE void scale_unit(float (&v)[kUnit], const float* by) {
  const float4* p = reinterpret_cast<const float4*>(by);
#pragma unroll
  for (int i = 0; i < 4; i++) {
    const float4 q = p[i];
    const float s[4] = {q.x, q.y, q.z, q.w};
#pragma unroll
    for (int j = 0; j < 4; j++) v[4 * i + j] = divide ? __fdiv_rn(v[4 * i + j], s[j]) : v[4 * i + j] * s[j];
  }
}

// H64 without its 1/8: strides 1, 2, 4, 8 here, 16 and 32 with the lanes 1 and 2 away.
LOWBIT_DEVICE void hadamard(float (&v)[kUnit], int lane) {
#pragma unroll
  for (int stride = 1; stride < kUnit; stride *= 2) {
#pragma unroll
    for (int i = 0; i < kUnit; i++) {
      if (i & stride) continue;
      const float a = v[i], b = v[i + stride];
      v[i] = a + b, v[i + stride] = a - b;
    }
  }
#pragma unroll
  for (int to = 1; to < 4; to *= 2) {
    const float sign = lane & to ? -1.f : 1.f;
#pragma unroll
    for (int i = 0; i < kUnit; i++) {
      const float other = __shfl_xor_sync(~0u, v[i], to);
      v[i] = fmaf(sign, v[i], other);  // exact product: one rounding, as in a + b and a - b
    }
  }
}

// Bits of the largest |v|; NaN is above infinity is above all. Behind a Hadamard what is not finite in a
// block is in its first column too, so the others take the cheaper maximum that passes NaN over.
LOWBIT_DEVICE uint32_t largest(const float (&v)[kUnit], bool mixed) {
  uint32_t most = __float_as_uint(v[0]) & 0x7FFFFFFFu;
  if (mixed) {
    float m = 0.f;
#pragma unroll
    for (int i = 1; i < kUnit; i++) m = fmaxf(m, fabsf(v[i]));
    most = max(most, __float_as_uint(m));
  } else {
#pragma unroll
    for (int i = 1; i < kUnit; i++) most = max(most, __float_as_uint(v[i]) & 0x7FFFFFFFu);
  }
  return most;
}

// Sum over the units of a row in one order, whatever the number of threads.
LOWBIT_DEVICE float sum_units(const float* sums, int units, int lane) {
  float s = 0.f;
  for (int u = lane; u < units; u += 32) s += sums[u];
#pragma unroll
  for (int to = 16; to; to /= 2) s += __shfl_xor_sync(~0u, s, to);
  return s;
}

// v is scaled to -127 .. 127.
LOWBIT_DEVICE void store_codes(const float (&v)[kUnit], int8_t* row, int unit, bool tile_order) {
  uint32_t w[4];
#pragma unroll
  for (int i = 0; i < 4; i++) {
    uint32_t q[4];
#pragma unroll
    for (int j = 0; j < 4; j++) q[j] = __float_as_uint(v[4 * i + j] + kRound);
    w[i] = __byte_perm(__byte_perm(q[0], q[1], 0x0040), __byte_perm(q[2], q[3], 0x0040), 0x5410);
  }
  if (!tile_order) {
    *reinterpret_cast<uint4*>(row + unit * kUnit) = make_uint4(w[0], w[1], w[2], w[3]);
    return;
  }
  uint32_t* to = reinterpret_cast<uint32_t*>(row + unit / 4 * 64) + unit % 4;
#pragma unroll
  for (int i = 0; i < 4; i++) to[4 * i] = w[i];  // slots (s, r) = (i / 2, i % 2)
}

// Codes of 4 bits, a scale per 64 columns (four lanes): sa = clip * amax / 7, q = clamp(rint(v / sa), -8, 7).
// `unit_of` is what the values still lack (1/8 of the Hadamard), `norm` the factor of an RMS norm, which goes
// into the scale alone.
LOWBIT_DEVICE void store_four(const QuantizeArgs& a, const float (&v)[kUnit], int m, int unit, float eighth,
                              float norm) {
  uint32_t most = largest(v, false);
  most = max(most, __shfl_xor_sync(~0u, most, 1));
  most = max(most, __shfl_xor_sync(~0u, most, 2));
  const float amax = __uint_as_float(most) * eighth;
  const bool usable = amax >= kTiny && most < 0x7F800000u;
  const float scale = __fdiv_rn(a.clip * amax, 7.f);
  uint32_t w[2] = {0, 0};
#pragma unroll
  for (int i = 0; i < kUnit; i++) {
    const float q = fminf(fmaxf(rintf(__fdiv_rn(v[i] * eighth, usable ? scale : 1.f)), -8.f), 7.f);
    w[i / 8] |= usable ? ((uint32_t)(int)q & 15u) << (4 * (i % 8)) : 0u;
  }
  if (m >= a.m || unit >= a.kp / kUnit) return;
  const int mp = (a.m + 127) / 128 * 128;
  *reinterpret_cast<uint2*>(a.codes + (size_t)m * (a.kp / 2) + unit * 8) = make_uint2(w[0], w[1]);
  if (unit % 4 == 0) a.group_scales[(size_t)(unit / 4) * mp + m] = amax < kTiny ? 0.f : scale * norm;
}

}  // namespace lowbit::cuda
