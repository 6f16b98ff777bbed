// The linear layer on Hopper:
// y[m,n] = sx[m] * (channel[n] * sum_k x[m,k] w[n,k] + sum_r low[m,r] up[n,r]) + bias[n].
//
// The weights are wgmma's A operand (64 channels a warpgroup), the tokens are its N dimension, so the token
// tile may be any multiple of 16 and is chosen to fill the multiprocessors with one wave.
//
//            tokens           a CTA: 1-3 consumer warpgroups + 4 producer warps, one lane each
//          +-----------+      a stage of the ring: x [tokens, 128 B of columns, swizzled] | weight tiles
//  channels|  Y^T tile |      after the last columns: 16 ranks of low (x part) | of up (weight part)
//          +-----------+
//
// schedule -> load -> unpack -> multiply -> (exchange) -> low rank -> scale -> transpose -> store.
// With split 2, a pair of CTAs halves the columns; each sends the other the sums of the other's half of the
// tokens.
#pragma once
#include "gemm_sm90_products.cuh"

namespace lowbit::cuda {

// Split 2: send the sums of the peer's tokens, take those of the own ones. f [own / 2] is what is kept.
template <class C, class T>
__device__ __forceinline__ void exchange(const Cta<C>& c, const T (&d)[C::tokens / 2],
                                         T (&mine)[C::own / 2]) {
  constexpr int blocks = C::own / 8, width = C::groups * 128;
  const uint32_t at = c.smem + C::peer_at + threadIdx.x * 16;
#pragma unroll
  for (int r = 0; r < 2; r++) {
    if (r == c.rank) {
#pragma unroll
      for (int i = 0; i < blocks * 4; i++) mine[i] = d[r * blocks * 4 + i];
    } else {
      const uint32_t to = ptx::in_cta(at, r), bar = ptx::in_cta(c.peer_bar, r);
      const T* from = d + r * blocks * 4;
#pragma unroll
      for (int j = 0; j < blocks; j++) {
        uint32_t v[4];
#pragma unroll
        for (int i = 0; i < 4; i++) v[i] = *reinterpret_cast<const uint32_t*>(&from[4 * j + i]);
        ptx::send(to + j * width * 16, bar, v[0], v[1], v[2], v[3]);
      }
    }
  }
  ptx::wait(c.peer_bar, 0);
#pragma unroll
  for (int j = 0; j < blocks; j++) {
    const uint4 v = ptx::lds128(at + j * width * 16);
    const uint32_t e[4] = {v.x, v.y, v.z, v.w};
#pragma unroll
    for (int i = 0; i < 4; i++) mine[4 * j + i] += *reinterpret_cast<const T*>(&e[i]);
  }
}

// f += up . low, 16 ranks a stage of the ring, one instruction of the tensor core.
template <class C>
__device__ __forceinline__ void add_low_rank(const Cta<C>& c, Ring<C::stages>& ring, float (&f)[C::own / 2],
                                             int chunks, int wg, int w4, int lane) {
  if (!chunks) return;
  int bits[C::own / 2];
#pragma unroll
  for (int i = 0; i < C::own / 2; i++) bits[i] = __float_as_int(f[i]);
#pragma unroll 1
  for (int i = 0; i < chunks; i++) {
    ptx::wait(c.full + 8 * ring.s, ring.phase);
    const uint32_t st = c.smem + ring.s * C::stage;
    const uint4 up = ptx::lds128(st + C::x_bytes + wg * C::weight + w4 * 512 + lane * 16);
    ptx::mma_fence();
    Wgmma<C::own>::f16(bits, up, ptx::plain_descriptor(st));
    ptx::mma_commit();
    ptx::mma_wait<0>();
    release(c, ring.s);
    ring.next();
  }
  ptx::touch(bits);
#pragma unroll
  for (int i = 0; i < C::own / 2; i++) f[i] = __int_as_float(bits[i]);
}

template <bool value>
struct Half {
  static constexpr bool bf16 = value;
};

// y = f * scale + bias, rounded, transposed through shared memory: row = token (64 channels, 128 B,
// swizzled).
template <class C>
__device__ __forceinline__ void store_tile(const Cta<C>& c, const GemmArgs& a, const CUtensorMap* map_y,
                                           const float (&f)[C::own / 2], float2 bias, int n0, int m0, int wg,
                                           int w4, int lane) {
  constexpr int blocks = C::own / 8;
  const uint32_t out = c.smem + C::out_at + wg * C::own * 128;
  const uint32_t scales = c.smem + C::scale_at + (wg * C::tokens + c.rank * C::own) * 4;
  const int g = lane >> 2, t = lane & 3, mat = lane >> 3, i8 = lane & 7;
  const uint32_t chunk = ((2 * w4 + (mat & 1)) ^ i8) * 16;
  auto y = [&](int j, int q, int e, float2 x) {
    return fmaf(f[4 * j + 2 * q + e], e ? x.y : x.x, q ? bias.y : bias.x);
  };
  if (a.dtype == Dtype::kFloat32) {  // straight from the registers
#pragma unroll
    for (int j = 0; j < blocks; j++) {
      const float2 x = ptx::lds_float2(scales + (8 * j + 2 * t) * 4);
#pragma unroll
      for (int i = 0; i < 4; i++) {
        const int token = m0 + 8 * j + 2 * t + (i & 1), n = n0 + w4 * 16 + g + 8 * (i >> 1);
        if (token < a.m && n < a.n)
          static_cast<float*>(a.y)[(size_t)token * a.n + n] = y(j, i >> 1, i & 1, x);
      }
    }
    return;
  }
  auto transpose = [&](auto half) {  // fp16 or bf16: one branch for the tile
#pragma unroll
    for (int j = 0; j < blocks; j += 2) {
      uint32_t h[4];
#pragma unroll
      for (int b = 0; b < 2; b++) {
        if (j + b < blocks) {
          const float2 x = ptx::lds_float2(scales + (8 * (j + b) + 2 * t) * 4);
#pragma unroll
          for (int q = 0; q < 2; q++) h[2 * b + q] = pack2(y(j + b, q, 0, x), y(j + b, q, 1, x), half.bf16);
        }
      }
      if (j + 1 < blocks)
        ptx::stmatrix4(out + (8 * (j + (mat >> 1)) + i8) * 128 + chunk, h[0], h[1], h[2], h[3]);
      else
        ptx::stmatrix2(out + (8 * j + i8) * 128 + chunk, h[0], h[1]);
    }
  };
  if (a.dtype == Dtype::kBfloat16)
    transpose(Half<true>{});
  else
    transpose(Half<false>{});
  ptx::proxy_fence();
  ptx::named_barrier(1 + wg, 128);
  if ((threadIdx.x & 127) == 0) ptx::store_2d(map_y, out, n0, m0);
}

// The same for silu(gate) * up: a thread has both, gate as channel g and up as channel g + 8 of its warp, so
// a token is 32 columns, 64 B.
template <class C>
__device__ __forceinline__ void store_gated(const Cta<C>& c, const GemmArgs& a, const CUtensorMap* map_y,
                                            const float (&f)[C::own / 2], float2 bias, int n0, int m0, int wg,
                                            int w4, int lane) {
  constexpr int blocks = C::own / 8;
  const uint32_t scales = c.smem + C::scale_at + (wg * C::tokens + c.rank * C::own) * 4;
  const int g = lane >> 2, t = lane & 3, mat = lane >> 3, i8 = lane & 7;
  auto z = [&](int j, int e, float2 x) {
    const float scale = e ? x.y : x.x;
    return silu(fmaf(f[4 * j + e], scale, bias.x)) * fmaf(f[4 * j + 2 + e], scale, bias.y);
  };
  if (a.dtype == Dtype::kFloat32) {
#pragma unroll
    for (int j = 0; j < blocks; j++) {
      const float2 x = ptx::lds_float2(scales + (8 * j + 2 * t) * 4);
#pragma unroll
      for (int e = 0; e < 2; e++) {
        const int token = m0 + 8 * j + 2 * t + e, n = n0 / 2 + w4 * 8 + g;
        if (token < a.m && 2 * n < a.n) static_cast<float*>(a.y)[(size_t)token * (a.n / 2) + n] = z(j, e, x);
      }
    }
    return;
  }
  const uint32_t out = c.smem + C::out_at + wg * C::own * 64, row = (w4 ^ (i8 >> 1)) * 16 + i8 * 64;
  const bool bf16 = a.dtype == Dtype::kBfloat16;
#pragma unroll
  for (int j = 0; j < blocks; j += 4) {
    uint32_t h[4];
#pragma unroll
    for (int b = 0; b < 4; b++) {
      if (j + b >= blocks) continue;
      const float2 x = ptx::lds_float2(scales + (8 * (j + b) + 2 * t) * 4);
      h[b] = pack2(z(j + b, 0, x), z(j + b, 1, x), bf16);
    }
    const uint32_t to = out + j * 512 + row;
    if (j + 3 < blocks) {
      ptx::stmatrix4(to + mat * 512, h[0], h[1], h[2], h[3]);
    } else {
      if (blocks - j > 1) ptx::stmatrix2(to + (mat & 1) * 512, h[0], h[1]);
      if (blocks - j & 1) ptx::stmatrix1(to + (blocks - j - 1) * 512, h[blocks - j - 1]);
    }
  }
  ptx::proxy_fence();
  ptx::named_barrier(1 + wg, 128);
  if ((threadIdx.x & 127) == 0) ptx::store_2d(map_y, out, n0 / 2, m0);
}

template <class C, bool gated>
__device__ __forceinline__ void consume(const Cta<C>& c, const GemmArgs& a, const CUtensorMap* map_y) {
  const int warp = threadIdx.x >> 5, lane = threadIdx.x & 31, wg = warp >> 2, w4 = warp & 3,
            wtid = threadIdx.x & 127;
  const int tiles_n = a.np / C::channels, total = tiles_n * ((a.m + C::tokens - 1) / C::tokens);
  const uint32_t scales = c.smem + C::scale_at + wg * C::tokens * 4;
  Ring<C::stages> ring;
  bool first = true;
#pragma unroll 1
  for (int tile = blockIdx.x / C::split; tile < total; tile += gridDim.x / C::split) {
    const int n0 = tile % tiles_n * C::channels + wg * 64, m0 = tile / tiles_n * C::tokens;
    const int row = n0 + w4 * 16 + (lane >> 2);
    const float2 channel = {a.channel[row] * code_unit(C::mode), a.channel[row + 8] * code_unit(C::mode)};
    float2 bias = {0.f, 0.f};
    if (a.bias) bias = {a.bias[row], a.bias[row + 8]};
    if (first) ptx::previous_grid(), first = false;
    // To shared memory after the product, so that the load costs nothing. No __ldg: the compiler may move
    // such a load above the wait for the previous grid, which writes what it reads.
    float sx[2];
#pragma unroll
    for (int i = 0; i < 2; i++) {
      const int e = wtid + 128 * i;
      sx[i] = e < C::tokens && m0 + e < a.m ? a.scales[m0 + e] : 0.f;
    }
    float f[C::own / 2];
    if constexpr (C::group_scales) {
      if constexpr (C::split > 1) {
        float acc[C::tokens / 2];
        multiply_groups(c, ring, acc, wg, w4, lane);
        exchange(c, acc, f);
      } else {
        multiply_groups(c, ring, f, wg, w4, lane);
      }
#pragma unroll
      for (int i = 0; i < C::own / 2; i++) f[i] *= i & 2 ? channel.y : channel.x;
    } else {
      int d[C::tokens / 2], mine[C::own / 2];
      multiply(c, ring, d, wg, w4, lane);
      if constexpr (C::split > 1) {
        exchange(c, d, mine);
      } else {
#pragma unroll
        for (int i = 0; i < C::own / 2; i++) mine[i] = d[i];
      }
#pragma unroll
      for (int i = 0; i < C::own / 2; i++) f[i] = (float)mine[i] * (i & 2 ? channel.y : channel.x);
    }
    add_low_rank(c, ring, f, a.chunks, wg, w4, lane);
    if constexpr (C::persistent) {
      if (wtid == 0) ptx::store_read();  // the last tile has left the output buffer
    } else {
      ptx::named_barrier(8,
                         C::groups * 128);  // every warpgroup has left the stages, which the output replaces
    }
#pragma unroll
    for (int i = 0; i < 2; i++)
      if (wtid + 128 * i < C::tokens) ptx::sts_float(scales + (wtid + 128 * i) * 4, sx[i]);
    ptx::named_barrier(1 + wg, 128);
    if constexpr (gated)
      store_gated(c, a, map_y, f, bias, n0, m0 + c.rank * C::own, wg, w4, lane);
    else
      store_tile(c, a, map_y, f, bias, n0, m0 + c.rank * C::own, wg, w4, lane);
    if constexpr (C::persistent) {
      if (a.dtype == Dtype::kFloat32)
        ptx::named_barrier(1 + wg, 128);  // the scales are read before the next tile writes them
    }
  }
  if (wtid == 0) ptx::store_read();
}

template <class C, bool gated>
__global__ void __launch_bounds__(C::threads, C::ctas)
    gemm_sm90(const __grid_constant__ CUtensorMap map_x, const __grid_constant__ CUtensorMap map_y,
              const __grid_constant__ GemmArgs a) {
  extern __shared__ uint8_t raw[];
  const Cta<C> c(raw, a);
  const int warp = threadIdx.x >> 5;
  if (threadIdx.x == C::groups * 128) {
    for (int i = 0; i < C::stages; i++) {
      ptx::barrier_init(c.full + 8 * i, 1);
      ptx::barrier_init(c.empty + 8 * i, C::groups * 4);
    }
    if constexpr (C::split > 1) ptx::barrier_init(c.peer_bar, 1);
    ptx::barrier_fence();
    if constexpr (C::split > 1) ptx::expect(c.peer_bar, C::peer_bytes);
  }
  if (threadIdx.x == 0) ptx::prefetch(&map_x), ptx::prefetch(&map_y);
  ptx::let_next_grid_start();
  __syncthreads();
  if constexpr (C::split > 1) ptx::cluster_arrive();  // waited for where the peer is first touched
  if (warp >= C::groups * 4) {
    if constexpr (C::moves_registers) ptx::fewer_registers<C::producer_registers>();
    if (C::split > 1 && (threadIdx.x & 31) != 0) ptx::cluster_wait();
    if ((threadIdx.x & 31) == 0) {
      produce(c, a, &map_x, warp - C::groups * 4);
      if (C::split > 1) ptx::cluster_wait();
    }
    __syncwarp();
  } else {
    if constexpr (C::moves_registers) ptx::more_registers<C::consumer_registers>();
    if constexpr (C::split > 1) ptx::cluster_wait();
    consume<C, gated>(c, a, &map_y);
  }
}

}  // namespace lowbit::cuda
