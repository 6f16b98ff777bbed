// Attention inside the segments of a packed batch, heads of 128, both ways (no causal mask), fp16 or bf16.
//
//   keys of the segment, 64 at a time       a CTA: 64 queries of one head and one segment, a warp 16 of them
//          +------+------+--
//   q 64   |  S   |      |  ...             S = q k^T (tensor cores) -> running maximum and sum (float32) ->
//   P in fp16, as
//          +------+------+--                it stands the A operand of O += P v. k and v of the next tile
//          come meanwhile.
//
// Segments are bounds [0, ..] in device memory: a CTA finds its own by counting tiles, so a graph needs no
// lengths. A tile that is left over ends at once. The heads of a group read the same k and v. A query's sums
// run over its segment alone, in one order, so its bits do not depend on what else is in the batch.
#include "launch.cuh"
#include "tile.cuh"

namespace lowbit::cuda {

constexpr int kQueries = 64, kKeys = 64, kAttentionThreads = 128;
constexpr int kTileBytes = kKeys * kHead * 2;

// A row is 16 chunks of 16 B; chunk c of row r lies at c ^ (r & 7).
LOWBIT_DEVICE uint32_t chunk_at(uint32_t base, int row, int chunk) {
  return base + row * 256 + ((chunk ^ (row & 7)) * 16);
}
template <bool bf16>
LOWBIT_DEVICE void mma(float (&c)[4], const uint4& a, uint32_t b0, uint32_t b1) {
  if constexpr (bf16)
    asm volatile(
        "mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 "
        "{%0,%1,%2,%3},{%4,%5,%6,%7},{%8,%9},{%0,%1,%2,%3};"
        : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3])
        : "r"(a.x), "r"(a.y), "r"(a.z), "r"(a.w), "r"(b0), "r"(b1));
  else
    ptx::mma_f16(c, a, b0, b1);
}

// 64 rows of 256 B from `from` on, `stride` elements apart; rows beyond `rows` repeat the last one.
LOWBIT_DEVICE void copy_tile(uint32_t to, const uint16_t* from, int64_t stride, int rows) {
#pragma unroll
  for (int i = 0; i < kKeys * 16 / kAttentionThreads; i++) {
    const int at = threadIdx.x + i * kAttentionThreads, row = at / 16, chunk = at % 16;
    ptx::copy16(chunk_at(to, row, chunk), from + min(row, rows - 1) * stride + chunk * 8);
  }
}

template <bool bf16>
__global__ void __launch_bounds__(kAttentionThreads, 2) attention(const AttentionArgs a) {
  extern __shared__ uint4 raw_tiles[];
  const uint32_t qs = ptx::shared(raw_tiles), ks = qs + kTileBytes, vs = ks + 2 * kTileBytes;
  const int warp = threadIdx.x >> 5, lane = threadIdx.x & 31, g = lane >> 2, t = lane & 3;
  const int head = blockIdx.y, group = head / (a.heads / a.kv_heads);
  ptx::previous_grid();
  ptx::let_next_grid_start();
  int tile = blockIdx.x, begin = 0, end = 0, s = 0;
  for (; s < a.segments; s++) {  // which segment this tile is of
    begin = a.bounds[s], end = a.bounds[s + 1];
    const int tiles = (end - begin + kQueries - 1) / kQueries;
    if (tile < tiles) break;
    tile -= tiles;
  }
  if (s == a.segments) return;
  const int first = begin + tile * kQueries, length = end - begin;
  const uint16_t* q = static_cast<const uint16_t*>(a.q) + first * a.q_stride + head * kHead;
  const uint16_t* k = static_cast<const uint16_t*>(a.k) + begin * a.k_stride + group * kHead;
  const uint16_t* v = static_cast<const uint16_t*>(a.v) + begin * a.v_stride + group * kHead;
  copy_tile(qs, q, a.q_stride, min(end - first, kQueries));
  copy_tile(ks, k, a.k_stride, min(length, kKeys));
  ptx::commit_copies();
  copy_tile(vs, v, a.v_stride, min(length, kKeys));
  ptx::commit_copies();
  ptx::wait_copies<1>();
  __syncthreads();
  uint4 query[8];  // 16 rows of this warp, 16 columns each
#pragma unroll
  for (int i = 0; i < 8; i++)
    query[i] = ptx::ldmatrix4(chunk_at(qs, warp * 16 + (lane & 15), 2 * i + (lane >> 4)));
  float out[16][4] = {};
  float most[2] = {-INFINITY, -INFINITY}, sum[2] = {0.f, 0.f};
  const int blocks = (length + kKeys - 1) / kKeys;
  for (int block = 0; block < blocks; block++) {
    const uint32_t here_k = ks + (block & 1) * kTileBytes, here_v = vs + (block & 1) * kTileBytes;
    if (block) {  // k of this block is there; every warp has left the tiles that come next
      ptx::wait_copies<1>();
      __syncthreads();
    }
    const int next = (block + 1) * kKeys;
    if (next < length)
      copy_tile(ks + (block + 1 & 1) * kTileBytes, k + next * a.k_stride, a.k_stride,
                min(length - next, kKeys));
    ptx::commit_copies();
    float score[8][4] = {};
#pragma unroll
    for (int i = 0; i < 8; i++) {  // 16 columns of the head
#pragma unroll
      for (int n = 0; n < 8;
           n += 2) {  // 16 keys: rows n * 8 + (lane & 7), + 8 for lanes 16 on; columns + 8 for 8 .. 15
        const int row = n * 8 + (lane & 7) + (lane >> 4) * 8;
        const uint4 b = ptx::ldmatrix4(chunk_at(here_k, row, 2 * i + (lane >> 3 & 1)));
        mma<bf16>(score[n], query[i], b.x, b.y);
        mma<bf16>(score[n + 1], query[i], b.z, b.w);
      }
    }
    const int left = length - block * kKeys;
    if (left < kKeys) {
#pragma unroll
      for (int n = 0; n < 8; n++)
#pragma unroll
        for (int e = 0; e < 4; e++)
          if (n * 8 + 2 * t + (e & 1) >= left) score[n][e] = -INFINITY;
    }
    float now[2] = {most[0], most[1]};
#pragma unroll
    for (int n = 0; n < 8; n++) {
      now[0] = fmaxf(now[0], fmaxf(score[n][0], score[n][1]));
      now[1] = fmaxf(now[1], fmaxf(score[n][2], score[n][3]));
    }
    float scaled[2];
#pragma unroll
    for (int r = 0; r < 2; r++) {
      now[r] = fmaxf(now[r], __shfl_xor_sync(~0u, now[r], 1));
      now[r] = fmaxf(now[r], __shfl_xor_sync(~0u, now[r], 2));
      const float shrink = ptx::exp2((most[r] - now[r]) * a.scale);
      most[r] = now[r], scaled[r] = now[r] * a.scale, sum[r] *= shrink;
#pragma unroll
      for (int n = 0; n < 16; n++) out[n][2 * r] *= shrink, out[n][2 * r + 1] *= shrink;
    }
#pragma unroll
    for (int n = 0; n < 8; n++)
#pragma unroll
      for (int e = 0; e < 4; e++) {
        score[n][e] = ptx::exp2(fmaf(score[n][e], a.scale, -scaled[e >> 1]));
        sum[e >> 1] += score[n][e];
      }
    ptx::wait_copies<1>();  // v of this block
    __syncthreads();
    if (next < length)
      copy_tile(vs + (block + 1 & 1) * kTileBytes, v + next * a.v_stride, a.v_stride,
                min(length - next, kKeys));
    ptx::commit_copies();
#pragma unroll
    for (int i = 0; i < 4; i++) {  // 16 keys
      const uint4 p = {pack2(score[2 * i][0], score[2 * i][1], bf16),
                       pack2(score[2 * i][2], score[2 * i][3], bf16),
                       pack2(score[2 * i + 1][0], score[2 * i + 1][1], bf16),
                       pack2(score[2 * i + 1][2], score[2 * i + 1][3], bf16)};
#pragma unroll
      for (int n = 0; n < 16; n += 2) {  // 16 columns: chunks n, n + 1 of keys i * 16 + (lane & 15)
        const uint4 b = ptx::ldmatrix4_trans(chunk_at(here_v, i * 16 + (lane & 15), n + (lane >> 4)));
        mma<bf16>(out[n], p, b.x, b.y);
        mma<bf16>(out[n + 1], p, b.z, b.w);
      }
    }
  }
#pragma unroll
  for (int r = 0; r < 2; r++) {
    sum[r] += __shfl_xor_sync(~0u, sum[r], 1);
    sum[r] += __shfl_xor_sync(~0u, sum[r], 2);
    const int row = first + warp * 16 + g + 8 * r;
    if (row >= end) continue;
    const float by = 1.f / sum[r];
    uint32_t* y = static_cast<uint32_t*>(a.y) + ((size_t)row * a.heads + head) * (kHead / 2) + t;
#pragma unroll
    for (int n = 0; n < 16; n++) y[n * 4] = pack2(out[n][2 * r] * by, out[n][2 * r + 1] * by, bf16);
  }
}

const char* launch_attention(const AttentionArgs& a, const Device& d, Stream stream) {
  if (const char* wrong = nullptr; launch_attention_sm90(a, d, stream, &wrong)) return wrong;
  const void* kernel = a.dtype == Dtype::kBfloat16 ? reinterpret_cast<const void*>(attention<true>)
                                                   : reinterpret_cast<const void*>(attention<false>);
  constexpr int kBytes = 5 * kTileBytes;
  static bool allowed[2][kMostDevices];
  if (const char* wrong = allow_shared(kernel, kBytes, d, allowed[a.dtype == Dtype::kBfloat16])) return wrong;
  AttentionArgs copy = a;
  copy.scale *= 1.4426950408889634f;  // powers of two inside
  void* args[] = {&copy};
  return start(kernel, (a.m + kQueries - 1) / kQueries + a.segments, kAttentionThreads, kBytes, 1, d, stream,
               args, a.heads);
}

}  // namespace lowbit::cuda
