// The main loops of the Hopper GEMM: one accumulator over all columns, or fp16 scales per 64 of them.
#pragma once
#include "gemm_sm90_ring.cuh"

namespace lowbit::cuda {

// The integer product over all columns of this CTA. One scale a channel: one accumulator over all of them.
template <class C>
__device__ __forceinline__ void multiply(const Cta<C>& c, Ring<C::stages>& ring, int (&d)[C::tokens / 2],
                                         int wg, int w4, int lane) {
#pragma unroll
  for (int i = 0; i < C::tokens / 2; i++)
    d[i] = 0;  // else its registers would be taken from one tile to the next
  if constexpr (C::mode == kW8) {
#pragma unroll 1
    for (int block = 0; block < c.blocks; block++) {
      ptx::wait(c.full + 8 * ring.s, ring.phase);
      const uint32_t st = c.smem + ring.s * C::stage;
      const uint64_t da = ptx::descriptor(st + C::x_bytes + wg * C::weight), db = ptx::descriptor(st);
      ptx::mma_fence();
#pragma unroll
      for (int k = 0; k < 4; k++) Wgmma<C::tokens>::ss(d, da + 2 * k, db + 2 * k, 1);
      ptx::mma_commit();
      if (block) ptx::mma_wait<1>(), release(c, ring.last());
      ring.next();
    }
  } else {
#pragma unroll 1
    for (int block = 0; block < c.blocks; block += 2) {
#pragma unroll
      for (int u = 0; u < 2; u++) {  // two copies: the registers of A are read while the next ones are made
        ptx::wait(c.full + 8 * ring.s, ring.phase);
        const uint32_t st = c.smem + ring.s * C::stage, wt = st + C::x_bytes + wg * C::weight;
        const uint4 v0 = ptx::lds128(wt + (w4 * 64 + lane) * 16),
                    v1 = ptx::lds128(wt + (w4 * 64 + 32 + lane) * 16);
        uint32_t steps = 0, a[4][4];
        if constexpr (C::mode == kW4TwoLevel) steps = ptx::lds32(wt + kCodeBytes + (w4 * 8 + lane / 4) * 4);
        unpack<C::mode>(v0, steps_of(steps, 0), a[0], a[1]);
        unpack<C::mode>(v1, steps_of(steps, 1), a[2], a[3]);
        const uint64_t db = ptx::descriptor(st);
        ptx::mma_fence();
#pragma unroll
        for (int k = 0; k < 4; k++) Wgmma<C::tokens>::rs(d, a[k], db + 2 * k, u | 1);
        ptx::mma_commit();
        if (u | block) ptx::mma_wait<1>(), release(c, ring.last());
        ring.next();
      }
    }
  }
  ptx::mma_wait<0>();
  release(c, ring.last());
  ptx::touch(d);
}

// fp16 scales per 64 columns. sum_g s_g (P_g - P_{g-1}) = sum_g (s_g - s_{g+1}) P_g, P the running
// accumulator, which is never cleared: it starts at 0x4B400000, whose bits read as the float 12582912 + P
// while |P| < 2^22, and the offsets cancel. So a group costs one fma an element. P starts anew after 4096
// columns, the most that 2^22 allows.
template <class C>
__device__ __forceinline__ void multiply_groups(const Cta<C>& c, Ring<C::stages>& ring,
                                                float (&acc)[C::tokens / 2], int wg, int w4, int lane) {
  constexpr int kMagic = 0x4B400000, kRestart = 32;
  int d[C::tokens / 2];
#pragma unroll
  for (int i = 0; i < C::tokens / 2; i++) acc[i] = 0.f, d[i] = kMagic;
  float p0 = 0.f, p1 = 0.f;
  auto fold = [&](float s0, float s1) {
    const float c0 = p0 - s0, c1 = p1 - s1;
    p0 = s0, p1 = s1;
    ptx::touch(d);
#pragma unroll
    for (int i = 0; i < C::tokens / 2; i++) acc[i] = fmaf(i & 2 ? c1 : c0, __int_as_float(d[i]), acc[i]);
  };
#pragma unroll 1
  for (int block = 0; block < c.blocks; block++) {
    ptx::wait(c.full + 8 * ring.s, ring.phase);
    const uint32_t st = c.smem + ring.s * C::stage, wt = st + C::x_bytes + wg * C::weight;
    const uint64_t db = ptx::descriptor(st);
    const uint2 sc = ptx::lds64(wt + kCodeBytes + (w4 * 8 + lane / 4) * 8);
    const float2 s01 = half2_float2(sc.x), s23 = half2_float2(sc.y);
    uint32_t a[4][4];
    unpack<kW4Group>(ptx::lds128(wt + (w4 * 64 + lane) * 16), {}, a[0], a[1]);
    ptx::mma_wait<0>();
    if (block) release(c, ring.last());
    if (block && block % kRestart == 0) {
      fold(0.f, 0.f);
#pragma unroll
      for (int i = 0; i < C::tokens / 2; i++) d[i] = kMagic;
    }
    fold(s01.x, s01.y);
    ptx::mma_fence();
    Wgmma<C::tokens>::rs(d, a[0], db, 1);
    Wgmma<C::tokens>::rs(d, a[1], db + 2, 1);
    ptx::mma_commit();
    unpack<kW4Group>(ptx::lds128(wt + (w4 * 64 + 32 + lane) * 16), {}, a[2], a[3]);
    ptx::mma_wait<0>();
    fold(s23.x, s23.y);
    ptx::mma_fence();
    Wgmma<C::tokens>::rs(d, a[2], db + 4, 1);
    Wgmma<C::tokens>::rs(d, a[3], db + 6, 1);
    ptx::mma_commit();
    ring.next();
  }
  ptx::mma_wait<0>();
  fold(0.f, 0.f);
  release(c, ring.last());
}

}  // namespace lowbit::cuda
