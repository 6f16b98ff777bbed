// What a CTA of the Hopper GEMM is: tile, shared memory, the ring of stages and the warps that fill it.
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
  static constexpr int groups = tile.warpgroups, tokens = tile.tokens, stages = tile.stages,
                       split = tile.split;
  static constexpr bool persistent = tile.persistent, group_scales = mode == kW4Group;
  static constexpr int channels = 64 * groups, threads = groups * 128 + 128;
  // CTAs a multiprocessor has registers for. Small tiles leave room for the quantizer that comes next, or
  // that they come after: either starts while the other still runs.
  static constexpr int ctas = groups == 1                   ? (tokens <= 64   ? 3
                                                               : tokens < 200 ? 2
                                                                              : 1)
                              : groups == 2 && tokens <= 64 ? 2
                                                            : 1;
  // What a launch gives a thread; the producers hand their share to the consumers.
  static constexpr int launch_registers = 65536 / (threads * ctas) / 8 * 8;
  static constexpr int producer_registers = groups == 3 ? 32 : 40;
  static constexpr bool moves_registers = launch_registers < 216;
  static constexpr int consumer_registers =
      (launch_registers * threads - 128 * producer_registers) / (128 * groups) / 8 * 8;
  static constexpr int own = tokens / split;  // tokens that this CTA finishes
  static constexpr int weight = tile_bytes(mode), x_bytes = tokens * 128,
                       stage_bytes = x_bytes + groups * weight;
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
__device__ __forceinline__ void produce(const Cta<C>& c, const GemmArgs& a, const CUtensorMap* map_x,
                                        int warp) {
  const int tiles_n = a.np / C::channels, total = tiles_n * ((a.m + C::tokens - 1) / C::tokens);
  const int all_blocks = a.kp >> 7, items = c.blocks + a.chunks, eights = (a.m + 7) / 8;
  auto load_w = [&](int s, int ct, int block) {
#pragma unroll
    for (int g = 0; g < C::groups; g++)
      ptx::load_bulk(
          c.smem + s * C::stage + C::x_bytes + g * C::weight,
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
    if (rows)
      ptx::load_bulk(c.smem + s * C::stage, a.low + ((size_t)chunk * eights + first) * 256, rows * 256,
                     c.full + 8 * s);
#pragma unroll
    for (int g = 0; g < C::groups; g++)
      ptx::load_bulk(c.smem + s * C::stage + C::x_bytes + g * C::weight,
                     a.up + ((size_t)chunk * (a.np / 16) + (ct * C::groups + g) * 4) * 512, 2048,
                     c.full + 8 * s);
  };
  constexpr uint32_t bytes = C::x_bytes + C::groups * C::weight;
  // The first tile: two stages of weights are asked for before the previous grid has ended (more would queue
  // ahead of x).
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

}  // namespace lowbit::cuda
