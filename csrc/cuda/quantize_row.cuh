// The verbs of the quantizer on one unit of a row: 16 columns of one thread, 64 of four neighbours.
#pragma once
#include "tile.cuh"

namespace lowbit::cuda {

constexpr int kUnit = 16, kBlock = 64, kRows = 8;
constexpr float kTiny = 0x1p-100f;  // a row below this is zero
constexpr float kHuge = 0x1p120f;   // below this, quotient_of_127 holds
constexpr float kRound =
    12582912.f;  // 1.5 * 2^23: adding it rounds to an integer, whose low byte is the low byte of the bits

template <bool kWide>  // float32, or fp16 and bf16
struct Raw {           // 16 columns as they lie in memory
  uint4 q[kWide ? 4 : 2];
};
template <bool kWide>
LOWBIT_DEVICE void fetch(Raw<kWide>& r, const void* x, size_t at) {
  const uint4* p = reinterpret_cast<const uint4*>(static_cast<const uint8_t*>(x) + at * (kWide ? 4 : 2));
#pragma unroll
  for (int i = 0; i < (kWide ? 4 : 2); i++) r.q[i] = p[i];
}
template <bool kWide>
LOWBIT_DEVICE void put(void* x, size_t at, const Raw<kWide>& r) {
  uint4* p = reinterpret_cast<uint4*>(static_cast<uint8_t*>(x) + at * (kWide ? 4 : 2));
#pragma unroll
  for (int i = 0; i < (kWide ? 4 : 2); i++) p[i] = r.q[i];
}
template <bool kWide>
LOWBIT_DEVICE void to_floats(float (&v)[kUnit], const Raw<kWide>& r, bool bf16) {
  const uint32_t* w = reinterpret_cast<const uint32_t*>(r.q);
#pragma unroll
  for (int i = 0; i < kUnit; i++) {
    if constexpr (kWide) {
      v[i] = __uint_as_float(w[i]);
    } else if (i % 2 == 0) {
      const float2 f = widen(w[i / 2], bf16);
      v[i] = f.x, v[i + 1] = f.y;
    }
  }
}

// r += what was fetched, rounded to the dtype. Two numbers of 11 bits added in fp16 are the float sum,
// rounded.
template <bool kWide>
LOWBIT_DEVICE void add(Raw<kWide>& r, const Raw<kWide>& other, bool bf16) {
  uint32_t* w = reinterpret_cast<uint32_t*>(r.q);
  const uint32_t* o = reinterpret_cast<const uint32_t*>(other.q);
#pragma unroll
  for (int i = 0; i < (kWide ? 16 : 8); i++) {
    if constexpr (kWide) {
      w[i] = __float_as_uint(__uint_as_float(w[i]) + __uint_as_float(o[i]));
    } else if (bf16) {
      const __nv_bfloat162 s =
          __hadd2(*reinterpret_cast<__nv_bfloat162*>(&w[i]), *reinterpret_cast<const __nv_bfloat162*>(&o[i]));
      w[i] = *reinterpret_cast<const uint32_t*>(&s);
    } else {
      const __half2 s = __hadd2(*reinterpret_cast<__half2*>(&w[i]), *reinterpret_cast<const __half2*>(&o[i]));
      w[i] = *reinterpret_cast<const uint32_t*>(&s);
    }
  }
}

LOWBIT_DEVICE void gate(float (&v)[kUnit], const float (&up)[kUnit]) {
#pragma unroll
  for (int i = 0; i < kUnit; i++) v[i] = silu(v[i]) * up[i];
}

// Of a block of 64 columns, in its four lanes.
LOWBIT_DEVICE float sum_of_squares(const float (&v)[kUnit]) {
  float q[4] = {0.f, 0.f, 0.f, 0.f};
#pragma unroll
  for (int i = 0; i < kUnit; i++) q[i & 3] = fmaf(v[i], v[i], q[i & 3]);
  q[0] = (q[0] + q[1]) + (q[2] + q[3]);
  q[0] += __shfl_xor_sync(~0u, q[0], 1);
  q[0] += __shfl_xor_sync(~0u, q[0], 2);
  return q[0];
}
// The factor of an RMS norm from the sums of squares of a row's blocks, `step` floats apart: lane t of four
// adds every fourth.
LOWBIT_DEVICE float inverse_rms(const float* sums, int step, int blocks, int t, int k, float eps) {
  float q = 0.f;
  for (int b = t; b < blocks; b += 4) q += sums[b * step];
  q += __shfl_xor_sync(~0u, q, 1);
  q += __shfl_xor_sync(~0u, q, 2);
  return 1.f / sqrtf(q / k + eps);
}

LOWBIT_DEVICE void multiply(float (&v)[kUnit], const float* by) {
#pragma unroll
  for (int i = 0; i < 4; i++) {
    const float4 q = reinterpret_cast<const float4*>(by)[i];
    v[4 * i] *= q.x, v[4 * i + 1] *= q.y, v[4 * i + 2] *= q.z, v[4 * i + 3] *= q.w;
  }
}
// v / s, correctly rounded, with r = 1 / s at hand: the error of v * r is taken off once (Markstein 1990). s
// has 11 bits, so no quotient is closer than 2^-36 to the middle of two floats and the estimate errs by
// 2^-47. An infinity leaves no error to take off: the maximum lets the NaN fall.
LOWBIT_DEVICE void divide(float (&v)[kUnit], const float* by, const float* reciprocal) {
#pragma unroll
  for (int i = 0; i < 4; i++) {
    const float4 p = reinterpret_cast<const float4*>(by)[i],
                 q = reinterpret_cast<const float4*>(reciprocal)[i];
    const float s[4] = {p.x, p.y, p.z, p.w}, r[4] = {q.x, q.y, q.z, q.w};
#pragma unroll
    for (int j = 0; j < 4; j++) {
      float& x = v[4 * i + j];
      const float t = x * r[j], e = fmaxf(fmaf(-t, s[j], x), -3.4e38f);
      x = fmaf(e, r[j], t);
    }
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

LOWBIT_DEVICE float larger(float a, float b) {
  float m;
  asm("max.NaN.f32 %0, %1, %2;" : "=f"(m) : "f"(a), "f"(b));
  return m;
}
// The same for any v, in one instruction a value: a NaN becomes the largest of all. Four chains, not one
// long.
LOWBIT_DEVICE uint32_t largest(const float (&v)[kUnit]) {
  float m[4];
#pragma unroll
  for (int i = 0; i < 4; i++) m[i] = fabsf(v[i]);
#pragma unroll
  for (int i = 4; i < kUnit; i++) m[i & 3] = larger(m[i & 3], fabsf(v[i]));
  return __float_as_uint(larger(larger(m[0], m[1]), larger(m[2], m[3]))) & 0x7FFFFFFFu;
}

// 127 / amax, correctly rounded, for kTiny <= amax < kHuge: what a division is without its look at the
// exponents.
LOWBIT_DEVICE float quotient_of_127(float amax) {
  float r;
  asm("rcp.approx.ftz.f32 %0, %1;" : "=f"(r) : "f"(amax));
  r = fmaf(r, fmaf(-amax, r, 1.f), r);
  float q = 127.f * r;
  q = fmaf(r, fmaf(-amax, q, 127.f), q);
  return fmaf(r, fmaf(-amax, q, 127.f), q);
}

// v, scaled to -127 .. 127 -> 16 bytes.
LOWBIT_DEVICE void codes_of(const float (&v)[kUnit], uint32_t (&w)[4]) {
#pragma unroll
  for (int i = 0; i < 4; i++) {
    uint32_t q[4];
#pragma unroll
    for (int j = 0; j < 4; j++) q[j] = __float_as_uint(v[4 * i + j] + kRound);
    w[i] = __byte_perm(__byte_perm(q[0], q[1], 0x0040), __byte_perm(q[2], q[3], 0x0040), 0x5410);
  }
}
// `to`: the unit's 16 bytes in plain order, its first 4 in the order of tiles.
LOWBIT_DEVICE void store_unit(const float (&v)[kUnit], int8_t* to, bool tile_order) {
  uint32_t w[4];
  codes_of(v, w);
  if (!tile_order) {
    *reinterpret_cast<uint4*>(to) = make_uint4(w[0], w[1], w[2], w[3]);
    return;
  }
#pragma unroll
  for (int i = 0; i < 4; i++) reinterpret_cast<uint32_t*>(to)[4 * i] = w[i];  // slots (s, r) = (i / 2, i % 2)
}

// The four lanes of a row change words: what lane t stores at 16 t of the block in the order of tiles.
// Through shared memory, rows of 80 B so that no two lanes meet in a bank; `row`: where the lane's row begins
// there. All lanes of the warp take part.
constexpr int kCodeRow = 80;
LOWBIT_DEVICE uint4 in_tile_order(const uint32_t (&w)[4], uint32_t row, int t) {
#pragma unroll
  for (int i = 0; i < 4; i++) ptx::sts32(row + 4 * t + 16 * i, w[i]);
  __syncwarp();
  return ptx::lds128(row + 16 * t);
}
// The same as store_unit with one store in either order; `to` is the plain one's.
LOWBIT_DEVICE void store_unit(const float (&v)[kUnit], int8_t* to, bool tile_order, uint32_t row, int t) {
  uint32_t w[4];
  codes_of(v, w);
  uint4 q = make_uint4(w[0], w[1], w[2], w[3]);
  if (tile_order) q = in_tile_order(w, row, t);
  *reinterpret_cast<uint4*>(to) = q;
}

// Codes of 4 bits, a scale per 64 columns (four lanes): sa = clip * amax / 7, q = clamp(rint(v / sa), -8, 7).
// `eighth` is what the values still lack (1/8 of the Hadamard), `norm` the factor of an RMS norm, which goes
// into the scale alone.
LOWBIT_DEVICE void store_four(const QuantizeArgs& a, const float (&v)[kUnit], int m, int column, float eighth,
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
  if (m >= a.m || column >= a.kp) return;
  const int mp = (a.m + 127) / 128 * 128;
  *reinterpret_cast<uint2*>(a.codes + (size_t)m * (a.kp / 2) + column / 2) = make_uint2(w[0], w[1]);
  if (column % kBlock == 0)
    a.group_scales[(size_t)(column / kBlock) * mp + m] = amax < kTiny ? 0.f : scale * norm;
}

}  // namespace lowbit::cuda
