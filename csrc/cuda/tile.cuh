// A packed weight: tiles of 64 channels x 128 columns, in the order [N / 64][K / 128], each contiguous.
//
// Columns of a 64-block are taken in the order of its slots: slot (s, r, t, b) holds column 16t + 8s + 4r + b
// and lies at byte 32s + 16r + 4t + b of a row of the activations ("tile order"). So one lane of a GEMV finds
// its operands of two matrix instructions in 16 consecutive bytes of a plain row, and a GEMM reads the tile
// order.
//
// 4 bit, 4096 B: the 16-byte chunk of (warp w, half h, lane = 4g + t) is at ((2w + h) * 32 + lane) * 16. Byte
// b of its word j: low nibble = slot (0, j >> 1, t, b) of channel 16w + g + 8 (j & 1) in half h, high nibble
// = slot (1, ...). A chunk is the A operand of two matrix instructions of k32. Behind the codes, at (8w + g)
// * 4 values: {channel g half 0, channel g+8 half 0, channel g half 1, channel g+8 half 1} of warp w:
//   two-level: int8 multipliers, 128 B; group: fp16 scales, 256 B.
// Codes are two's complement with channel scales, otherwise code + 8.
// 8 bit, 8192 B: 64 rows of 128 B; the 16-byte chunk c of row r is at chunk c ^ (r & 7) (what the 128B
// swizzle expects).
#pragma once
#include "kernels.h"
#include "ptx.cuh"

namespace lowbit::cuda {

constexpr int kTileChannels = 64, kTileColumns = 128, kCodeBytes = 4096;

__host__ __device__ constexpr int tile_bytes(Mode mode) {
  return mode == kW8          ? 8192
         : mode == kW4Channel ? kCodeBytes
                              : kCodeBytes + (mode == kW4TwoLevel ? 128 : 256);
}

// What a channel scale multiplies: the codes times 16, where unpacking leaves them in the high half of the
// byte.
__host__ __device__ constexpr float code_unit(Mode mode) { return mode == kW4Channel ? 1.0f / 16 : 1.0f; }

// The multipliers of the two rows of a lane, one half: sign-extended.
struct Steps {
  int a, b;
};
LOWBIT_DEVICE Steps steps_of(uint32_t word, int half) {
  const int shift = 16 * half;
  return {(int)(word << (24 - shift)) >> 24, (int)(word << (16 - shift)) >> 24};
}

// Four words -> the A operands of two matrix instructions, int8 in every byte.
template <Mode mode>
LOWBIT_DEVICE void unpack(const uint4& v, Steps m, uint32_t (&lo)[4], uint32_t (&hi)[4]) {
  const uint32_t w[4] = {v.x, v.y, v.z, v.w};
#pragma unroll
  for (int j = 0; j < 4; j++) {
    if constexpr (mode == kW4Channel) {  // 16 q
      hi[j] = w[j] & 0xF0F0F0F0u;
      lo[j] = (w[j] << 4) & 0xF0F0F0F0u;
    } else {
      const uint32_t l = w[j] & 0x0F0F0F0Fu, h = (w[j] >> 4) & 0x0F0F0F0Fu;
      if constexpr (mode == kW4TwoLevel) {  // every byte is 128 + (u - 8) m, 8 .. 248: no carries
        const uint32_t s = j & 1 ? m.b : m.a, c = 0x80808080u - s * 0x08080808u;
        lo[j] = (l * s + c) ^ 0x80808080u;
        hi[j] = (h * s + c) ^ 0x80808080u;
      } else {
        lo[j] = (l + 0x78787878u) ^ 0x80808080u;
        hi[j] = (h + 0x78787878u) ^ 0x80808080u;
      }
    }
  }
}

LOWBIT_DEVICE float2 half2_float2(uint32_t h) {
  return __half22float2(*reinterpret_cast<const __half2*>(&h));
}

LOWBIT_DEVICE float2 widen(uint32_t w, bool bf16) {  // two fp16 or bf16
  return bf16 ? make_float2(__uint_as_float(w << 16), __uint_as_float(w & 0xFFFF0000u)) : half2_float2(w);
}
LOWBIT_DEVICE float silu(float x) { return __fdividef(x, 1.f + __expf(-x)); }

// Block `at` of low, [halves of 8 ranks][8 rows][8 ranks], as the B operand of mma_f16.
LOWBIT_DEVICE uint2 low_of(const void* low, size_t at, int lane) {
  const uint32_t* p = static_cast<const uint32_t*>(low) + at * 64 + lane;
  return {p[0], p[32]};
}

// f += up . low (`chunks` of rank 16) of 16 channels from `row` on and the eight rows of x number `eight`, as
// mma_f16 has them.
template <class Args>
LOWBIT_DEVICE void add_low_rank(float (&f)[4], const Args& a, int row, int eight, int eights, int chunks,
                                int lane) {
  for (int c = 0; c < chunks; c++) {
    const uint4 up =
        __ldg(static_cast<const uint4*>(a.up) + ((size_t)c * (a.np / 16) + row / 16) * 32 + lane);
    const uint2 low = low_of(a.low, (size_t)c * eights + eight, lane);
    ptx::mma_f16(f, up, low.x, low.y);
  }
}

// Two floats -> two fp16 or bf16.
LOWBIT_DEVICE uint32_t pack2(float a, float b, bool bf16) {
  uint32_t v;
  if (bf16)
    asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(v) : "f"(b), "f"(a));
  else
    asm("cvt.rn.f16x2.f32 %0, %1, %2;" : "=r"(v) : "f"(b), "f"(a));
  return v;
}
LOWBIT_DEVICE void store_one(void* y, size_t at, float v, Dtype dtype) {
  if (dtype == Dtype::kFloat32)
    static_cast<float*>(y)[at] = v;
  else if (dtype == Dtype::kBfloat16)
    static_cast<__nv_bfloat16*>(y)[at] = __float2bfloat16(v);
  else
    static_cast<__half*>(y)[at] = __float2half(v);
}

}  // namespace lowbit::cuda
