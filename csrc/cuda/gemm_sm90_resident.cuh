// The Hopper GEMM where the weights of a CTA fit its shared memory (K = 1024: 64 channels are 32 KB): they stay, and the
// tokens pass by, `first` and `second` at a time. What follows a pass - low rank, scaling, rounding, transposing, storing
// - runs under the matrix instructions of the next one, two 8-token blocks a block of columns.
//
//   shared memory: [ weights: blocks x warpgroups tiles ][ x ring: stages x [tokens, 128 B] ][ out ][ up ][ low, two passes ]
//                  [ token scales, two passes ][ barriers ]
#pragma once
#include "gemm_sm90.cuh"

namespace lowbit::cuda {

struct Passes {
  int warpgroups, first, second, stages, blocks;  // blocks of 128 columns in all of K
};

template <Mode mode_, Passes p>
struct ResidentConfig {
  static constexpr Mode mode = mode_;
  static constexpr int groups = p.warpgroups, first = p.first, second = p.second, stages = p.stages, blocks = p.blocks;
  static constexpr int channels = 64 * groups, threads = groups * 128 + 128;
  static constexpr int producer_registers = groups == 3 ? 32 : 40, consumer_registers = groups == 2 ? 232 : 160;
  static constexpr int weight = tile_bytes(mode), block_bytes = groups * weight;
  static constexpr int x_at = (blocks * block_bytes + 1023) / 1024 * 1024, x_bytes = first * 128;
  static constexpr int out_at = x_at + stages * x_bytes, out_bytes = groups * first * 128;
  static constexpr int scale_at = out_at + out_bytes, barrier_at = scale_at + groups * 2 * first * 4;
  static constexpr int low_at = (barrier_at + (blocks + 2 * stages + 3) * 8 + 127) / 128 * 128;
  static constexpr int shared(int chunks) { return low_at + chunks * (2 * first * 32 + groups * 2048) + 1024; }
  static_assert(groups >= 2 && first >= second && stages < blocks && blocks % 2 == 0 && mode != kW4Group && mode != kW8);
};

struct ResidentArgs {
  GemmArgs a;
  int passes;  // of a CTA, at most
};

template <class C>
struct ResidentCta {
  uint32_t smem, w_full, full, empty, low_full, up_full;
  int tile, begin, passes;  // channel tile, first token, passes that have tokens
  __device__ __forceinline__ ResidentCta(const uint8_t* raw, const ResidentArgs& r) {
    smem = (ptx::shared(raw) + 1023) & ~1023u;
    w_full = smem + C::barrier_at, full = w_full + C::blocks * 8, empty = full + C::stages * 8;
    low_full = empty + C::stages * 8, up_full = low_full + 16;
    const int tiles_n = r.a.np / C::channels;
    tile = blockIdx.x % tiles_n;
    begin = blockIdx.x / tiles_n * start_of(r.passes);
    passes = 0;
    while (passes < r.passes && begin + start_of(passes) < r.a.m) passes++;
  }
  static __device__ __forceinline__ int start_of(int pass) {
    return pass / 2 * (C::first + C::second) + (pass & 1) * C::first;
  }
  __device__ __forceinline__ int token(int pass) const { return begin + start_of(pass); }
  __device__ __forceinline__ uint32_t low(int pass, int chunk, int chunks) const {
    return smem + C::low_at + ((pass & 1) * chunks + chunk) * C::first * 32;
  }
  __device__ __forceinline__ uint32_t up(int wg, int chunk, int chunks) const {
    return smem + C::low_at + chunks * 2 * C::first * 32 + (chunk * C::groups + wg) * 2048;
  }
};

template <class C>
__device__ __forceinline__ void produce_passes(const ResidentCta<C>& c, const GemmArgs& a, const CUtensorMap* map_first,
                                               const CUtensorMap* map_second, int warp) {
  auto load_w = [&](int block) {
    ptx::expect(c.w_full + 8 * block, C::block_bytes);
#pragma unroll
    for (int g = 0; g < C::groups; g++)
      ptx::load_bulk(c.smem + block * C::block_bytes + g * C::weight,
                     a.weight + ((size_t)(c.tile * C::groups + g) * C::blocks + block) * C::weight, C::weight,
                     c.w_full + 8 * block);
  };
  auto load_low = [&](int pass) {  // its buffer is free: the ring has shown that the pass before the last is done with
    const int eights = (a.m + 7) / 8, at = c.token(pass) / 8, rows = min((pass & 1 ? C::second : C::first) / 8, eights - at);
    ptx::expect(c.low_full + 8 * (pass & 1), a.chunks * rows * 256);
    for (int i = 0; i < a.chunks; i++)
      ptx::load_bulk(c.low(pass, i, a.chunks), a.low + ((size_t)i * eights + at) * 256, rows * 256, c.low_full + 8 * (pass & 1));
  };
  if (warp < 2) load_w(warp);  // more would queue ahead of the first x
  if (warp == 2 && a.chunks) {
    ptx::expect(c.up_full, a.chunks * C::groups * 2048);
    for (int i = 0; i < a.chunks; i++)
      for (int g = 0; g < C::groups; g++)
        ptx::load_bulk(c.up(g, i, a.chunks), a.up + ((size_t)i * (a.np / 16) + (c.tile * C::groups + g) * 4) * 512, 2048, c.up_full);
  }
  ptx::previous_grid();
  Ring<C::stages> ring;
#pragma unroll 1
  for (int pass = 0; pass < c.passes; pass++) {
#pragma unroll 1
    for (int block = 0; block < C::blocks; block++, ring.next()) {
      if ((ring.s & 3) != warp) continue;
      ptx::wait(c.empty + 8 * ring.s, ring.phase ^ 1);
      ptx::expect(c.full + 8 * ring.s, (pass & 1 ? C::second : C::first) * 128);
      ptx::load_2d(c.smem + C::x_at + ring.s * C::x_bytes, pass & 1 ? map_second : map_first, block * 128, c.token(pass),
                   c.full + 8 * ring.s);
      if (pass == 0 && block >= 2) load_w(block);
      if (block == C::blocks - 1 && a.chunks) load_low(pass);
    }
  }
}

template <class C>
struct Follow {  // what every step of an epilogue needs
  const ResidentCta<C>& c;
  const GemmArgs& a;
  const CUtensorMap *map_first, *map_second;
  float2 channel, bias;
  int wg, w4, lane, n0;
  uint32_t out, scales;  // of the warpgroup

  __device__ __forceinline__ void begin() const {  // the last pass has left the output buffer; the scales are there
    if ((threadIdx.x & 127) == 0) ptx::store_read();
    ptx::named_barrier(1 + wg, 128);
  }
  // Blocks 2 * pair and 2 * pair + 1 of 8 tokens.
  template <int n>
  __device__ __forceinline__ void pair(const int (&d)[n], int pair, int pass) const {
    const int t = lane & 3, mat = lane >> 3, i8 = lane & 7;
    float f[8];
#pragma unroll
    for (int i = 0; i < 8; i++) f[i] = (float)d[8 * pair + i] * (i & 2 ? channel.y : channel.x);
#pragma unroll 1
    for (int i = 0; i < a.chunks; i++) {
      const uint4 up = ptx::lds128(c.up(wg, i, a.chunks) + w4 * 512 + lane * 16);
      const uint32_t low = c.low(pass, i, a.chunks) + pair * 512 + lane * 8;
      const uint2 l0 = ptx::lds64(low), l1 = ptx::lds64(low + 256);
      ptx::mma_f16(f, up, l0.x, l0.y);
      ptx::mma_f16(f + 4, up, l1.x, l1.y);
    }
    uint32_t h[4];
#pragma unroll
    for (int b = 0; b < 2; b++) {
      const float2 x = ptx::lds_float2(scales + ((pass & 1) * C::first + 8 * (2 * pair + b) + 2 * t) * 4);
#pragma unroll
      for (int q = 0; q < 2; q++)
        h[2 * b + q] = pack2(fmaf(f[4 * b + 2 * q], x.x, q ? bias.y : bias.x),
                             fmaf(f[4 * b + 2 * q + 1], x.y, q ? bias.y : bias.x), a.dtype == Dtype::kBfloat16);
    }
    ptx::stmatrix4(out + (8 * (2 * pair + (mat >> 1)) + i8) * 128 + ((2 * w4 + (mat & 1)) ^ i8) * 16, h[0], h[1], h[2], h[3]);
  }
  __device__ __forceinline__ void store(int pass) const {
    ptx::proxy_fence();
    ptx::named_barrier(1 + wg, 128);
    if ((threadIdx.x & 127) == 0) ptx::store_2d(pass & 1 ? map_second : map_first, out, n0, c.token(pass));
  }
};

// One pass over the columns into d, with the epilogue of the pass before it (old) in its shadow.
template <class C, bool follows, int n, int n_old>
__device__ __forceinline__ void run_pass(const Follow<C>& e, Ring<C::stages>& ring, int (&d)[n], const int (&old)[n_old],
                                         int pass) {
  const ResidentCta<C>& c = e.c;
  constexpr int pairs = n_old / 8, per = (pairs + C::blocks - 2) / (C::blocks - 1);
  const int token = c.token(pass) + (threadIdx.x & 127);
  const float sx = (threadIdx.x & 127) < 2 * n && token < e.a.m ? __ldg(e.a.scales + token) : 0.f;
#pragma unroll
  for (int i = 0; i < n; i++) d[i] = 0;
#pragma unroll
  for (int block = 0; block < C::blocks; block++) {
    if (!follows) ptx::wait(c.w_full + 8 * block, 0);
    const uint32_t wt = c.smem + block * C::block_bytes + e.wg * C::weight;
    const uint4 v0 = ptx::lds128(wt + (e.w4 * 64 + e.lane) * 16), v1 = ptx::lds128(wt + (e.w4 * 64 + 32 + e.lane) * 16);
    uint32_t steps = 0, a[4][4];
    if constexpr (C::mode == kW4TwoLevel) steps = ptx::lds32(wt + kCodeBytes + (e.w4 * 8 + e.lane / 4) * 4);
    unpack<C::mode>(v0, steps_of(steps, 0), a[0], a[1]);
    unpack<C::mode>(v1, steps_of(steps, 1), a[2], a[3]);
    ptx::wait(c.full + 8 * ring.s, ring.phase);
    const uint64_t db = ptx::descriptor(c.smem + C::x_at + ring.s * C::x_bytes);
    ptx::mma_fence();
#pragma unroll
    for (int k = 0; k < 4; k++) Wgmma<2 * n>::rs(d, a[k], db + 2 * k, 1);
    ptx::mma_commit();
    if (block) {
      ptx::mma_wait<1>();
      __syncwarp();
      if (e.lane == 0) ptx::arrive(c.empty + 8 * ring.last());
    }
    if (follows) {
      if (block == 0) {
        if (e.a.chunks) ptx::wait(c.low_full + 8 * ((pass - 1) & 1), (pass - 1) >> 1 & 1);
        e.begin();
      }
#pragma unroll
      for (int p = block * per; p < (block + 1) * per && p < pairs; p++) e.pair(old, p, pass - 1);
      if (block * per < pairs && (block + 1) * per >= pairs) e.store(pass - 1);
    }
    ring.next();
  }
  ptx::mma_wait<0>();
  __syncwarp();
  if (e.lane == 0) ptx::arrive(c.empty + 8 * ring.last());
  ptx::touch(d);
  if ((threadIdx.x & 127) < 2 * n) ptx::sts_float(e.scales + ((pass & 1) * C::first + (threadIdx.x & 127)) * 4, sx);
}

template <class C, int n>
__device__ __forceinline__ void end_pass(const Follow<C>& e, const int (&d)[n], int pass) {
  if (e.a.chunks) ptx::wait(e.c.low_full + 8 * (pass & 1), pass >> 1 & 1);
  e.begin();
#pragma unroll
  for (int p = 0; p < n / 8; p++) e.pair(d, p, pass);
  e.store(pass);
}

template <class C>
__global__ void __launch_bounds__(C::threads, 1)
    gemm_sm90_resident(const __grid_constant__ CUtensorMap x_first, const __grid_constant__ CUtensorMap x_second,
                       const __grid_constant__ CUtensorMap y_first, const __grid_constant__ CUtensorMap y_second,
                       const __grid_constant__ ResidentArgs r) {
  extern __shared__ uint8_t raw[];
  const ResidentCta<C> c(raw, r);
  const GemmArgs& a = r.a;
  const int warp = threadIdx.x >> 5, lane = threadIdx.x & 31;
  if (threadIdx.x == C::groups * 128) {
    for (int i = 0; i < C::blocks; i++) ptx::barrier_init(c.w_full + 8 * i, 1);
    for (int i = 0; i < C::stages; i++) ptx::barrier_init(c.full + 8 * i, 1), ptx::barrier_init(c.empty + 8 * i, C::groups * 4);
    for (int i = 0; i < 3; i++) ptx::barrier_init(c.low_full + 8 * i, 1);
    ptx::barrier_fence();
  }
  if (threadIdx.x == 0) {
    for (const CUtensorMap* m : {&x_first, &x_second, &y_first, &y_second}) ptx::prefetch(m);
  }
  ptx::let_next_grid_start();
  __syncthreads();
  if (warp >= C::groups * 4) {
    ptx::fewer_registers<C::producer_registers>();
    if (lane == 0) produce_passes(c, a, &x_first, &x_second, warp - C::groups * 4);
    __syncwarp();
  } else {
    ptx::more_registers<C::consumer_registers>();
    const int wg = warp >> 2, w4 = warp & 3, n0 = c.tile * C::channels + wg * 64, row = n0 + w4 * 16 + (lane >> 2);
    const float unit = code_unit(C::mode);
    Follow<C> e{c, a, &y_first, &y_second, {a.channel[row] * unit, a.channel[row + 8] * unit}, {0.f, 0.f}, wg, w4, lane, n0,
                c.smem + C::out_at + wg * C::first * 128, c.smem + C::scale_at + wg * 2 * C::first * 4};
    if (a.bias) e.bias = {a.bias[row], a.bias[row + 8]};
    ptx::previous_grid();
    if (c.passes > 0) {
      if (a.chunks) ptx::wait(c.up_full, 0);
      Ring<C::stages> ring;
      int d0[C::first / 2], d1[C::second / 2];
      run_pass<C, false>(e, ring, d0, d1, 0);
      int pass = 1;
#pragma unroll 1
      for (; pass + 1 < c.passes; pass += 2) {
        run_pass<C, true>(e, ring, d1, d0, pass);
        run_pass<C, true>(e, ring, d0, d1, pass + 1);
      }
      if (pass < c.passes) {
        run_pass<C, true>(e, ring, d1, d0, pass);
        end_pass(e, d1, pass);
      } else {
        end_pass(e, d0, pass - 1);
      }
    }
    if ((threadIdx.x & 127) == 0) ptx::store_read();
  }
}

}  // namespace lowbit::cuda
