// Attention inside the segments of a packed batch on Hopper's tensor cores: heads of 128, both ways (no
// causal mask), fp16 or bf16. attention.cu does the same on older chips, and for views the copy engine cannot
// read.
//
//   warpgroup 0: 64 queries of one head   | a CTA: two items of the (query tile, head) pairs that read the
//   warpgroup 1: 64 queries of the next   | same keys; with two heads a key head, those of one query tile
//   warpgroup 2: one lane, the copy engine | q once; k and v of the segment, 64 rows a stage of the ring
//
//   S(b + 1) = q k^T and O += P(b) v are asked for together; maximum and exponentials of S(b + 1) run under
//   O's products and those of the other warpgroup.
//
// Segments are bounds [0, ..] in device memory: a CTA finds its own by counting tiles, so a graph needs no
// lengths. A query's sums run over its segment alone, in one order, so its bits do not depend on what else is
// in the batch. The copy engine brings rows beyond a segment too: their scores become -inf, their v zeros,
// since a NaN of a neighbour times a zero would be NaN.
//
// Where the next product's quantizer wants nothing but a scale a row, the CTAs of a query tile are a cluster,
// which has whole rows, and write its codes instead of y (attention_rounded, round_rows.cuh).
#include "launch.cuh"
#include "round_rows.cuh"
#include "wgmma.cuh"

namespace lowbit::cuda {

constexpr int kTileRows = 64, kHalf = kTileRows * 128,
              kTile = 2 * kHalf;  // halves: 64 columns, 128 B a row
constexpr int kStages = 4, kItems = 2, kThreads = kItems * 128 + 128;
constexpr int kKeysAt = kItems * kTile, kValuesAt = kKeysAt + kStages * kTile,
              kBarAt = kValuesAt + kStages * kTile;
constexpr int kMaximaAt = kBarAt + 8 * (2 + 4 * kStages), kMostCtas = 8;
constexpr int kAttentionShared = kMaximaAt + 1024;  // 1024 to align by hand
constexpr int kRoundedShared = kAttentionShared + kMostCtas * kItems * kTileRows * 4;
static_assert(kMaximaAt % 16 == 0);

namespace {

struct Bars {
  uint32_t q, peers, k, v, k_left, v_left;  // one each, then one a stage
  __device__ explicit Bars(uint32_t at)
      : q(at),
        peers(at + 8),
        k(at + 16),
        v(k + 8 * kStages),
        k_left(v + 8 * kStages),
        v_left(k_left + 8 * kStages) {}
};

struct Work {
  int begin, end, first_item;  // rows of the segment; item i: 64 queries from begin + i / ratio * 64 on of
                               // the key head's query head i % ratio
};

// The segment of the CTA's pair of items, `ratio` query heads a key head: lanes count the tiles of 32
// segments at once. end 0: none is left.
__device__ __forceinline__ Work find(const AttentionArgs& a, int ratio, int pair) {
  const int lane = threadIdx.x & 31;
  for (int base = 0; base < a.segments; base += 32) {
    const int s = base + lane;
    const int begin = s < a.segments ? a.bounds[s] : 0, end = s < a.segments ? a.bounds[s + 1] : 0;
    const int mine = ((end - begin + kTileRows - 1) / kTileRows * ratio + kItems - 1) / kItems;
    int upto = mine;
#pragma unroll
    for (int d = 1; d < 32; d *= 2) {
      const int other = __shfl_up_sync(~0u, upto, d);
      if (lane >= d) upto += other;
    }
    const uint32_t past = __ballot_sync(~0u, pair < upto);
    if (past) {
      const int from = __ffs(past) - 1;
      return {__shfl_sync(~0u, begin, from), __shfl_sync(~0u, end, from),
              (pair - __shfl_sync(~0u, upto - mine, from)) * kItems};
    }
    pair -= __shfl_sync(~0u, upto, 31);
  }
  return {0, 0, 0};
}

__device__ __forceinline__ void load_tile(uint32_t to, const CUtensorMap* map, int column, int row,
                                          uint32_t bar) {
  ptx::load_2d(to, map, column, row, bar);
  ptx::load_2d(to + kHalf, map, column + 64, row, bar);
}

// Exponentials of the scores of a thread's two rows, over what their maximum was when it last grew by more
// than 2^kSlack: so they reach 2^kSlack at most, and what is summed already shrinks seldom. True: it does, by
// `shrink`.
constexpr float kSlack = 8.f;
__device__ __forceinline__ bool softmax(float (&s)[32], float (&most)[2], float (&sum)[2], float (&shrink)[2],
                                        float scale) {
  float now[2] = {s[0], s[2]};
#pragma unroll
  for (int i = 0; i < 32; i++) now[i >> 1 & 1] = fmaxf(now[i >> 1 & 1], s[i]);
  float base[2];
  bool grown = false;
#pragma unroll
  for (int r = 0; r < 2; r++) {
    now[r] = fmaxf(now[r], __shfl_xor_sync(~0u, now[r], 1));
    now[r] = fmaxf(now[r], __shfl_xor_sync(~0u, now[r], 2));
    const bool grows = (now[r] - most[r]) * scale > kSlack;
    shrink[r] = grows ? ptx::exp2((most[r] - now[r]) * scale) : 1.f;
    most[r] = grows ? now[r] : most[r];
    base[r] = most[r] * scale, sum[r] *= shrink[r], grown |= grows;
  }
#pragma unroll
  for (int i = 0; i < 32; i++) {
    s[i] = ptx::exp2(fmaf(s[i], scale, -base[i >> 1 & 1]));
    sum[i >> 1 & 1] += s[i];
  }
  return __any_sync(~0u, grown);
}

// `rounding`: of attention_rounded, what becomes of y.
template <bool bf16, bool rounded>
__device__ __forceinline__ void attend(const AttentionArgs& a, const Work& work, uint32_t smem,
                                       const Bars& bar, int ratio, int key_head, const QuantizeArgs* rounding,
                                       const RoundPlaces& places) {
  const int wg = threadIdx.x >> 7, w4 = threadIdx.x >> 5 & 3, lane = threadIdx.x & 31, g = lane >> 2,
            t = lane & 3;
  const int length = work.end - work.begin, blocks = (length + kTileRows - 1) / kTileRows;
  const uint32_t own = smem + wg * kTile;  // q, and y at the end
  auto chunk_at = [&](int row, int chunk) {
    return own + (chunk >> 3) * kHalf + row * 128 + ((chunk & 7) ^ (row & 7)) * 16;
  };
  const int item = work.first_item + wg, m0 = work.begin + item / ratio * kTileRows;
  ptx::wait(bar.q, 0);
  uint4 query[8];  // 16 rows of this warp, 16 columns each
#pragma unroll
  for (int i = 0; i < 8; i++) query[i] = ptx::ldmatrix4(chunk_at(w4 * 16 + (lane & 15), 2 * i + (lane >> 4)));
  float s[32], out[64] = {};
  uint4 p[4];
  float most[2] = {-INFINITY, -INFINITY}, sum[2] = {0.f, 0.f}, shrink[2];
  bool grown;
  auto scores = [&](int block) {  // s = q k^T, running on return
    const int at = block % kStages;
    ptx::wait(bar.k + 8 * at, block / kStages & 1);
    const uint64_t b = ptx::descriptor(smem + kKeysAt + at * kTile);
    ptx::mma_fence();
#pragma unroll
    for (int i = 0; i < 8; i++)
      WgmmaFloat<bf16>::keys(s, query[i], b + (i / 4 * kHalf + i % 4 * 32) / 16, i > 0);
    ptx::mma_commit();
  };
  auto clear = [&](int block) {  // v of rows beyond the segment
    const int at = block % kStages;
    ptx::wait(bar.v + 8 * at, block / kStages & 1);
    const uint32_t v = smem + kValuesAt + at * kTile;
    const int left = length - block * kTileRows;
    if (left < kTileRows) {
      for (int c = left * 8 + (threadIdx.x & 127); c < kTileRows * 8; c += 128)
        ptx::sts128(v + c * 16, {}), ptx::sts128(v + kHalf + c * 16, {});
      ptx::proxy_fence();
      ptx::named_barrier(1 + wg, 128);
    }
  };
  auto values = [&](int block) {  // out += p v, running on return
    const int at = block % kStages;
    ptx::wait(bar.v + 8 * at, block / kStages & 1);
    const uint32_t v = smem + kValuesAt + at * kTile;
    const uint64_t b = ptx::row_descriptor(v, kHalf);
    ptx::mma_fence();
#pragma unroll
    for (int i = 0; i < 4; i++) WgmmaFloat<bf16>::values(out, p[i], b + i * 2048 / 16, 1);
    ptx::mma_commit();
  };
  auto leave = [&](uint32_t b, int block) {
    __syncwarp();
    if (lane == 0) ptx::arrive(b + 8 * (block % kStages));
  };
  auto weigh = [&](int block) {  // s -> exponentials
    const int left = length - block * kTileRows;
    if (left < kTileRows) {
#pragma unroll
      for (int i = 0; i < 32; i++)
        if (i / 4 * 8 + 2 * t + (i & 1) >= left) s[i] = -INFINITY;
    }
    grown = softmax(s, most, sum, shrink, a.scale);
  };
  // The warpgroups take turns at the tensor cores, so that one weighs its scores while the other multiplies.
  // What is summed is waited for behind the barrier: before it, the compiler would wait first and weigh then.
  constexpr int kTurn = 3;
  auto settle = [&] {
    ptx::mma_wait<0>();
    ptx::touch(out);
    if (grown) {
#pragma unroll
      for (int i = 0; i < 64; i++) out[i] *= shrink[i >> 1 & 1];
    }
#pragma unroll
    for (int i = 0; i < 4; i++)
      p[i] = {pack2(s[8 * i], s[8 * i + 1], bf16), pack2(s[8 * i + 2], s[8 * i + 3], bf16),
              pack2(s[8 * i + 4], s[8 * i + 5], bf16), pack2(s[8 * i + 6], s[8 * i + 7], bf16)};
  };
  scores(0);
  ptx::mma_wait<0>();
  ptx::touch(s);
  leave(bar.k_left, 0);
  if (wg && blocks > 1) ptx::named_arrive(kTurn, kItems * 128);
  weigh(0);
#pragma unroll 1
  for (int block = 1; block < blocks; block++) {
    ptx::named_barrier(kTurn + wg, kItems * 128);
    settle();
    if (block > 1) leave(bar.v_left, block - 2);
    scores(block);
    values(block - 1);
    if (!wg || block + 1 < blocks) ptx::named_arrive(kTurn + 1 - wg, kItems * 128);
    ptx::mma_wait<1>();
    ptx::touch(s);
    leave(bar.k_left, block);
    weigh(block);
  }
  ptx::named_barrier(1 + wg, 128);
  settle();
  clear(blocks - 1);
  values(blocks - 1);
  ptx::mma_wait<0>();
  ptx::touch(out);
#pragma unroll
  for (int r = 0; r < 2; r++) {
    sum[r] += __shfl_xor_sync(~0u, sum[r], 1);
    sum[r] += __shfl_xor_sync(~0u, sum[r], 2);
    const float by = 1.f / sum[r];
#pragma unroll
    for (int n = 0; n < 16; n++)  // through the place of q: 16 rows of this warp, which has read them
      ptx::sts32(chunk_at(w4 * 16 + g + 8 * r, n) + 4 * t,
                 pack2(out[4 * n + 2 * r] * by, out[4 * n + 2 * r + 1] * by, bf16));
  }
  __syncwarp();
  if constexpr (rounded) {
    Raw<false> in[4];  // 16 rows of 128 columns: four units
#pragma unroll
    for (int u = 0; u < 4; u++)
#pragma unroll
      for (int j = 0; j < 2; j++)
        in[u].q[j] = ptx::lds128(chunk_at(w4 * 16 + u / 2 * 8 + g, u % 2 * 8 + 2 * t + j));
    ptx::cluster_wait();
    round_rows<bf16, 4, 2, kTileRows, kItems>(
        *rounding, places, in, (key_head * kItems + wg) * 2, [&](int u) { return 2 * w4 + u / 2; }, m0,
        work.end, own + w4 * 2048);
    return;
  }
  const int row0 = m0 + w4 * 16, head = key_head * ratio + item % ratio;
#pragma unroll
  for (int i = 0; i < 8; i++) {
    const int row = 2 * i + (lane >> 4), chunk = lane & 15;
    const uint4 y = ptx::lds128(chunk_at(w4 * 16 + row, chunk));
    if (row0 + row < work.end)
      *reinterpret_cast<uint4*>(static_cast<uint16_t*>(a.y) +
                                ((size_t)(row0 + row) * a.heads + head) * kHead + chunk * 8) = y;
  }
}

// The first lane of warpgroup 2: q, and the tiles of k and v.
__device__ __forceinline__ void produce(const CUtensorMap* map_q, const CUtensorMap* map_k,
                                        const CUtensorMap* map_v, const Work& work, uint32_t smem,
                                        const Bars& bar, int ratio, int key_head) {
  ptx::expect(bar.q, kItems * kTile);
  for (int i = 0; i < kItems;
       i++) {  // rows beyond the batch come as zeros; those of a neighbour are not stored
    const int item = work.first_item + i;
    load_tile(smem + i * kTile, map_q, (key_head * ratio + item % ratio) * kHead,
              work.begin + item / ratio * kTileRows, bar.q);
  }
  const int blocks = (work.end - work.begin + kTileRows - 1) / kTileRows;
  for (int block = 0; block < blocks; block++) {
    const int at = block % kStages, column = key_head * kHead, row = work.begin + block * kTileRows;
    const int parity = block / kStages & 1 ^ 1;
    ptx::wait(bar.k_left + 8 * at, parity);
    ptx::expect(bar.k + 8 * at, kTile);
    load_tile(smem + kKeysAt + at * kTile, map_k, column, row, bar.k + 8 * at);
    ptx::wait(bar.v_left + 8 * at, parity);
    ptx::expect(bar.v + 8 * at, kTile);
    load_tile(smem + kValuesAt + at * kTile, map_v, column, row, bar.v + 8 * at);
  }
}

// One CTA: the items of number `pair`, of the query heads that share `key_head`.
template <bool bf16, bool rounded>
__device__ __forceinline__ void run(const CUtensorMap* map_q, const CUtensorMap* map_k,
                                    const CUtensorMap* map_v, const AttentionArgs& a, int pair, int key_head,
                                    const QuantizeArgs* rounding) {
  extern __shared__ uint8_t raw[];
  const uint32_t smem = (ptx::shared(raw) + 1023) & ~1023u;
  const Bars bar(smem + kBarAt);
  const int ratio = rounded ? kItems : a.heads / a.kv_heads;
  const RoundPlaces places = {reinterpret_cast<const uint32_t*>(raw + (smem - ptx::shared(raw)) + kMaximaAt),
                              smem + kMaximaAt, bar.peers, key_head, a.kv_heads};
  if (threadIdx.x == kItems * 128) {
    ptx::barrier_init(bar.q, 1), ptx::barrier_init(bar.peers, 1);
    for (int i = 0; i < kStages; i++) {
      ptx::barrier_init(bar.k + 8 * i, 1), ptx::barrier_init(bar.v + 8 * i, 1);
      ptx::barrier_init(bar.k_left + 8 * i, kItems * 4), ptx::barrier_init(bar.v_left + 8 * i, kItems * 4);
    }
    ptx::barrier_fence();
    if constexpr (rounded) ptx::expect(bar.peers, a.kv_heads * kItems * kTileRows * 4);
    ptx::prefetch(map_q), ptx::prefetch(map_k), ptx::prefetch(map_v);
  }
  __syncthreads();
  if constexpr (rounded) ptx::cluster_arrive();  // waited for where another CTA is first touched
  ptx::previous_grid();
  ptx::let_next_grid_start();
  const Work work = find(a, ratio, pair);
  if (!work.end) {  // nor has the rest of the cluster any
    if constexpr (rounded) ptx::cluster_wait();
    return;
  }
  if (threadIdx.x < kItems * 128) {
    ptx::more_registers<240>();
    attend<bf16, rounded>(a, work, smem, bar, ratio, key_head, rounding, places);
    return;
  }
  ptx::fewer_registers<24>();
  if (threadIdx.x == kItems * 128) produce(map_q, map_k, map_v, work, smem, bar, ratio, key_head);
  if constexpr (rounded) {
    __syncwarp();
    ptx::cluster_wait();
  }
}

template <bool bf16>
__global__ void __launch_bounds__(kThreads, 1)
    attention_sm90(const __grid_constant__ CUtensorMap map_q, const __grid_constant__ CUtensorMap map_k,
                   const __grid_constant__ CUtensorMap map_v, const __grid_constant__ AttentionArgs a) {
  run<bf16, false>(&map_q, &map_k, &map_v, a, blockIdx.x, blockIdx.y, nullptr);
}

template <bool bf16>
__global__ void __launch_bounds__(kThreads, 1)
    attention_rounded(const __grid_constant__ CUtensorMap map_q, const __grid_constant__ CUtensorMap map_k,
                      const __grid_constant__ CUtensorMap map_v, const __grid_constant__ AttentionArgs a,
                      const __grid_constant__ QuantizeArgs rounding) {
  run<bf16, true>(&map_q, &map_k, &map_v, a, blockIdx.y, blockIdx.x, &rounding);
}

// False where the copy engine cannot read the views.
bool maps_of(CUtensorMap (&maps)[3], const AttentionArgs& a, const char** wrong) {
  const struct {
    const void* base;
    int64_t stride;
    int heads;
  } views[3] = {{a.q, a.q_stride, a.heads}, {a.k, a.k_stride, a.kv_heads}, {a.v, a.v_stride, a.kv_heads}};
  for (int i = 0; i < 3 && !*wrong; i++) {
    if (reinterpret_cast<uintptr_t>(views[i].base) % 16 || views[i].stride % 8) return false;
    *wrong = tensor_map(&maps[i], views[i].base, 2, views[i].heads * kHead, a.m, 64, kTileRows,
                        views[i].stride * 2);
  }
  return true;
}

// `kernels`: fp16, bf16.
const char* launch(const void* const (&kernels)[2], CUtensorMap (&maps)[3], const AttentionArgs& a,
                   QuantizeArgs* rounding, const Device& d, Stream stream) {
  static bool allowed[2][2][kMostDevices];
  const bool bf16 = a.dtype == Dtype::kBfloat16;
  const int shared = rounding ? kRoundedShared : kAttentionShared;
  if (const char* wrong = allow_shared(kernels[bf16], shared, d, allowed[rounding != nullptr][bf16]))
    return wrong;
  AttentionArgs copy = a;
  copy.scale *= 1.4426950408889634f;  // powers of two inside
  void* args[] = {&maps[0], &maps[1], &maps[2], &copy, rounding};
  const int ratio = a.heads / a.kv_heads, tiles = a.m / kTileRows + a.segments;
  const int pairs = (tiles * ratio + (ratio % kItems ? a.segments : 0) + kItems - 1) / kItems;
  return rounding ? start(kernels[bf16], a.kv_heads, kThreads, shared, a.kv_heads, d, stream, args, pairs)
                  : start(kernels[bf16], pairs, kThreads, shared, 1, d, stream, args, a.kv_heads);
}

}  // namespace

bool launch_attention_sm90(const AttentionArgs& a, const Device& d, Stream stream, const char** wrong) {
  static const void* const kernels[2] = {reinterpret_cast<const void*>(attention_sm90<false>),
                                         reinterpret_cast<const void*>(attention_sm90<true>)};
  CUtensorMap maps[3];
  if (d.capability != 90 || !maps_of(maps, a, wrong)) return false;
  if (!*wrong) *wrong = launch(kernels, maps, a, nullptr, d, stream);
  return true;
}

bool launch_attention_quantize(const AttentionArgs& a, const QuantizeArgs& q, const Device& d, Stream stream,
                               const char** wrong) {
  static const void* const kernels[2] = {reinterpret_cast<const void*>(attention_rounded<false>),
                                         reinterpret_cast<const void*>(attention_rounded<true>)};
  if (d.capability != 90 || q.norm || q.residual || q.smooth || q.hadamard || q.rank || q.silu || q.four)
    return false;
  if (a.heads != kItems * a.kv_heads || a.kv_heads < 2 || a.kv_heads > kMostCtas) return false;
  CUtensorMap maps[3];
  if (!maps_of(maps, a, wrong)) return false;
  QuantizeArgs rounding = q;
  if (!*wrong) *wrong = launch(kernels, maps, a, &rounding, d, stream);
  return true;
}

}  // namespace lowbit::cuda
