// The linear layer on Hopper: y[m,n] = sx[m] * (channel[n] * sum_k x[m,k] w[n,k] + sum_r low[m,r] up[n,r]) + bias[n].
//
// The weights are wgmma's A operand (64 channels a warpgroup), the tokens are its N dimension, so the token tile may be
// any multiple of 16 and is chosen to fill the multiprocessors with one wave.
//
//            tokens                    a CTA: 1-3 consumer warpgroups + 4 producer warps, one lane each
//          +-----------+               a stage of the ring: 128 columns of x [tokens, 128 B, swizzled] | weight tiles
//  channels|  Y^T tile |               after the last columns: 16 ranks of low (x part) | of up (weight part)
//          +-----------+
//
// schedule -> load -> unpack -> multiply -> (exchange) -> low rank -> scale -> transpose -> store.
// With split 2, a pair of CTAs halves the columns; each sends the other the sums of the other's half of the tokens.
#pragma once
#include "tile.cuh"
#include "wgmma.cuh"

namespace lowbit::cuda {

struct Tile {
  int warpgroups, tokens, stages, split = 1;
  bool persistent = false;
};

template <Mode mode_, Tile tile>
struct Config {
  static constexpr Mode mode = mode_;
  static constexpr int groups = tile.warpgroups, tokens = tile.tokens, stages = tile.stages, split = tile.split;
  static constexpr bool persistent = tile.persistent, group_scales = mode == kW4Group;
  static constexpr int channels = 64 * groups, threads = groups * 128 + 128;
  static constexpr int ctas = groups == 1 && tokens < 200 ? 2 : 1;  // a multiprocessor
  // A launch gives 65536 / threads registers; the producers hand their share to the consumers.
  static constexpr int producer_registers = groups == 3 ? 32 : 40;
  static constexpr bool moves_registers = !(groups == 1 && ctas == 1);
  static constexpr int consumer_registers = groups == 1 ? 216 : groups == 2 ? 232 : 160;
  static constexpr int own = tokens / split;  // tokens that this CTA finishes
  static constexpr int weight = tile_bytes(mode), x_bytes = tokens * 128, stage_bytes = x_bytes + groups * weight;
  static constexpr int stage = (stage_bytes + 1023) / 1024 * 1024;
  static constexpr int out_bytes = groups * own * 128;  // 64 channels of 2 B a row
  static constexpr int out_at = persistent ? stages * stage : 0;
  static constexpr int ring = stages * stage > out_bytes ? stages * stage : out_bytes;
  static constexpr int peer_at = persistent ? stages * stage + out_bytes : ring;
  static constexpr int peer_bytes = split > 1 ? own / 8 * groups * 2048 : 0;
  static constexpr int scale_at = peer_at + peer_bytes, barrier_at = scale_at + groups * tokens * 4;
  static constexpr int shared = barrier_at + (2 * stages + 1) * 8 + 1024;  // 1024 to align by hand
  static_assert(split <= 2 && tokens % 16 == 0 && own % 8 == 0 && !(split > 1 && persistent));
};

struct GemmArgs {
  const uint8_t* weight;
  const float *channel, *scales, *bias;
  const uint8_t *low, *up;
  void* y;
  int m, n, np, kp, chunks;  // chunks of 16 ranks
  Dtype dtype;
};

// Position in the ring.
template <int stages>
struct Ring {
  int s = 0, phase = 0;
  __device__ __forceinline__ void next() {
    if (++s == stages) s = 0, phase ^= 1;
  }
  __device__ __forceinline__ int last() const { return s ? s - 1 : stages - 1; }
};

template <class C>
struct Cta {  // where things are; the same in every thread
  uint32_t smem, full, empty, peer_bar;
  int rank, blocks, first_block;  // blocks of 128 columns
  __device__ __forceinline__ Cta(const uint8_t* raw, const GemmArgs& a) {
    smem = (ptx::shared(raw) + 1023) & ~1023u;
    full = smem + C::barrier_at, empty = full + C::stages * 8, peer_bar = empty + C::stages * 8;
    rank = C::split > 1 ? blockIdx.x % C::split : 0;
    blocks = (a.kp >> 7) / C::split, first_block = rank * blocks;
  }
};

// One lane of each producer warp; stage s belongs to warp s % 4, so that phases cannot alias.
template <class C>
__device__ __forceinline__ void produce(const Cta<C>& c, const GemmArgs& a, const CUtensorMap* map_x, int warp) {
  const int tiles_n = a.np / C::channels, total = tiles_n * ((a.m + C::tokens - 1) / C::tokens);
  const int all_blocks = a.kp >> 7, items = c.blocks + a.chunks, eights = (a.m + 7) / 8;
  auto load_w = [&](int s, int ct, int block) {
#pragma unroll
    for (int g = 0; g < C::groups; g++)
      ptx::load_bulk(c.smem + s * C::stage + C::x_bytes + g * C::weight,
                     a.weight + ((size_t)(ct * C::groups + g) * all_blocks + c.first_block + block) * C::weight,
                     C::weight, c.full + 8 * s);
  };
  auto load_x = [&](int s, int tt, int block) {
    ptx::load_2d(c.smem + s * C::stage, map_x, (c.first_block + block) * 128, tt * C::tokens, c.full + 8 * s);
  };
  auto load_low = [&](int s, int ct, int tt, int chunk) {
    const int first = (tt * C::tokens + c.rank * C::own) / 8;
    const int rows = max(0, min(C::own / 8, eights - first));
    ptx::expect(c.full + 8 * s, rows * 256 + C::groups * 2048);
    if (rows) ptx::load_bulk(c.smem + s * C::stage, a.low + ((size_t)chunk * eights + first) * 256, rows * 256, c.full + 8 * s);
#pragma unroll
    for (int g = 0; g < C::groups; g++)
      ptx::load_bulk(c.smem + s * C::stage + C::x_bytes + g * C::weight,
                     a.up + ((size_t)chunk * (a.np / 16) + (ct * C::groups + g) * 4) * 512, 2048, c.full + 8 * s);
  };
  constexpr uint32_t bytes = C::x_bytes + C::groups * C::weight;
  // The first tile: two stages of weights are asked for before the previous grid has ended (more would queue ahead of x).
  int tile = blockIdx.x / C::split, item = min(c.blocks, C::stages);
  Ring<C::stages> ring;
  {
    const int ct = tile % tiles_n, tt = tile / tiles_n;
#pragma unroll 1
    for (int i = warp; i < item; i += 4) {
      ptx::expect(c.full + 8 * i, bytes);
      if (i < 2) load_w(i, ct, i);
    }
    ptx::previous_grid();
#pragma unroll 1
    for (int i = warp; i < item; i += 4) {
      load_x(i, tt, i);
      if (i >= 2) load_w(i, ct, i);
    }
    ring.s = item == C::stages ? 0 : item, ring.phase = item == C::stages;
  }
#pragma unroll 1
  for (; tile < total; tile += gridDim.x / C::split, item = 0) {
    const int ct = tile % tiles_n, tt = tile / tiles_n;
#pragma unroll 1
    for (; item < items; item++, ring.next()) {
      const int s = ring.s;
      if ((s & 3) != warp) continue;
      ptx::wait(c.empty + 8 * s, ring.phase ^ 1);
      if (item < c.blocks) {
        ptx::expect(c.full + 8 * s, bytes);
        load_w(s, ct, item);
        load_x(s, tt, item);
      } else {
        load_low(s, ct, tt, item - c.blocks);
      }
    }
  }
}

// A warp is done with a stage.
template <class C>
__device__ __forceinline__ void release(const Cta<C>& c, int s) {
  __syncwarp();
  if ((threadIdx.x & 31) == 0) ptx::arrive(c.empty + 8 * s);
}

// The integer product over all columns of this CTA. One scale a channel: one accumulator over all of them.
template <class C>
__device__ __forceinline__ void multiply(const Cta<C>& c, Ring<C::stages>& ring, int (&d)[C::tokens / 2], int wg, int w4,
                                         int lane) {
#pragma unroll
  for (int i = 0; i < C::tokens / 2; i++) d[i] = 0;  // else its registers would be taken from one tile to the next
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
        const uint4 v0 = ptx::lds128(wt + (w4 * 64 + lane) * 16), v1 = ptx::lds128(wt + (w4 * 64 + 32 + lane) * 16);
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

// fp16 scales per 64 columns. sum_g s_g (P_g - P_{g-1}) = sum_g (s_g - s_{g+1}) P_g, P the running accumulator, which is
// never cleared: it starts at 0x4B400000, whose bits read as the float 12582912 + P while |P| < 2^22, and the offsets
// cancel. So a group costs one fma an element. P starts anew after 4096 columns, the most that 2^22 allows.
template <class C>
__device__ __forceinline__ void multiply_groups(const Cta<C>& c, Ring<C::stages>& ring, float (&acc)[C::tokens / 2], int wg,
                                                int w4, int lane) {
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

// Split 2: send the sums of the peer's tokens, take those of the own ones. f [own / 2] is what is kept.
template <class C, class T>
__device__ __forceinline__ void exchange(const Cta<C>& c, const T (&d)[C::tokens / 2], T (&mine)[C::own / 2]) {
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

// f += up . low, 16 ranks a stage of the ring.
template <class C>
__device__ __forceinline__ void add_low_rank(const Cta<C>& c, Ring<C::stages>& ring, float (&f)[C::own / 2], int chunks,
                                             int wg, int w4, int lane) {
#pragma unroll 1
  for (int i = 0; i < chunks; i++) {
    ptx::wait(c.full + 8 * ring.s, ring.phase);
    const uint32_t st = c.smem + ring.s * C::stage;
    const uint4 up = ptx::lds128(st + C::x_bytes + wg * C::weight + w4 * 512 + lane * 16);
#pragma unroll
    for (int j = 0; j < C::own / 8; j++) {
      const uint2 low = ptx::lds64(st + j * 256 + lane * 8);
      ptx::mma_f16(f + 4 * j, up, low.x, low.y);
    }
    release(c, ring.s);
    ring.next();
  }
}

template <bool value>
struct Half {
  static constexpr bool bf16 = value;
};

// y = f * scale + bias, rounded, transposed through shared memory: row = token (64 channels, 128 B, swizzled).
template <class C>
__device__ __forceinline__ void store_tile(const Cta<C>& c, const GemmArgs& a, const CUtensorMap* map_y,
                                           const float (&f)[C::own / 2], float2 bias, int n0, int m0, int wg, int w4,
                                           int lane) {
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
        if (token < a.m && n < a.n) static_cast<float*>(a.y)[(size_t)token * a.n + n] = y(j, i >> 1, i & 1, x);
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

template <class C>
__device__ __forceinline__ void consume(const Cta<C>& c, const GemmArgs& a, const CUtensorMap* map_y) {
  const int warp = threadIdx.x >> 5, lane = threadIdx.x & 31, wg = warp >> 2, w4 = warp & 3, wtid = threadIdx.x & 127;
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
    // To shared memory after the product, so that the load costs nothing. No __ldg: the compiler may move such a load
    // above the wait for the previous grid, which writes what it reads.
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
      ptx::named_barrier(8, C::groups * 128);  // every warpgroup has left the stages, which the output replaces
    }
#pragma unroll
    for (int i = 0; i < 2; i++)
      if (wtid + 128 * i < C::tokens) ptx::sts_float(scales + (wtid + 128 * i) * 4, sx[i]);
    ptx::named_barrier(1 + wg, 128);
    store_tile(c, a, map_y, f, bias, n0, m0 + c.rank * C::own, wg, w4, lane);
    if constexpr (C::persistent) {
      if (a.dtype == Dtype::kFloat32) ptx::named_barrier(1 + wg, 128);  // the scales are read before the next tile writes them
    }
  }
  if (wtid == 0) ptx::store_read();
}

template <class C>
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
    consume(c, a, &map_y);
  }
}

}  // namespace lowbit::cuda
