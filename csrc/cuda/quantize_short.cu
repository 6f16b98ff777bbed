// Rows of x -> int8 as quantize.cu draws it, for the common case in as few instructions as it takes: Hopper
// and newer, fp16 or bf16, up to 3072 columns.
//
//          64 columns: a unit of 16 for each of 4 lanes        a CTA: 8 rows and a share of their columns (a
//          cluster of `split`
//        +------+------+------+------+                         CTAs has them all), a warp `kUnits` blocks
//        of 64.
//   row g|  t=0 |  t=1 |  t=2 |  t=3 |  x 8 rows = a warp      Lane 4g + t has row g, so its 16 values are
//   the B operand of
//        +------+------+------+------+                         four matrix instructions as they stand.
//
// What is known of a launch is a template argument; what does not depend on x comes by the copy engine before
// the previous grid has ended. CTAs of a cluster send each other the maxima of the rows, and the first one
// the sums of low, into its mbarriers: a barrier of the cluster would wait for every store before it (0.4
// us). Each block of 64 columns gives one sum for low, and these are added in order, so a row has the same
// bits whatever M, CTA or cluster it is in. Rows beyond M repeat the last one and write nothing.
#include "launch.cuh"
#include "quantize_row.cuh"

namespace lowbit::cuda {

enum Before { kNothing, kNorm, kGate };

constexpr int kMostSplit = 4, kPart = 32;  // CTAs of a cluster; float4 of a block's sums, one a lane

struct ShortShape {
  int warps, split;            // of a CTA; of a cluster
  int chunks, blocks, filled;  // of 64 columns: of a row of codes, of x
  int room;                    // blocks of a CTA, at most
  // Shared memory, in floats: down [chunk][room] 512 | parts [chunk][block] 128 | norm | smooth, 1 / smooth |
  // sums of squares [block][8 rows] | maxima [split][8 rows] | four mbarriers. The same places in every CTA
  // of a cluster.
  int parts, norm, smooth, sums, maxima, barriers, bytes;
};

// low of eight rows from parts [chunk][block][lane] of four: c0, c1 (rank g, rows 2t, 2t+1), c2, c3 (rank g +
// 8). Four threads a pair of ranks, each every fourth block in order.
LOWBIT_DEVICE void store_low(const QuantizeArgs& a, const float* parts, int chunks, int blocks, int eight) {
  const int eights = (a.m + 7) / 8;
  for (int i = threadIdx.x; i < chunks * 256; i += blockDim.x) {
    const int part = i & 3, row = (i >> 2) & 7, pair = (i >> 5) & 7, chunk = i >> 8;
    const int rank = pair * 2, lane = (rank & 7) * 4 + row / 2;
    const float* p = parts + (chunk * blocks + part) * 128 + lane * 4 + (rank >> 3) * 2 + (row & 1);
    float lo = 0.f, hi = 0.f;
#pragma unroll 4
    for (int b = part; b < blocks; b += 4, p += 512) lo += p[0], hi += p[16];  // 4 lanes on: the next rank
#pragma unroll
    for (int to = 1; to < 4; to *= 2) {
      lo += __shfl_xor_sync(~0u, lo, to);
      hi += __shfl_xor_sync(~0u, hi, to);
    }
    if (part || eight * kRows + row >= a.m) continue;
    static_cast<uint32_t*>(a.low)[((chunk * eights + eight) * 2 + pair / 4) * 32 + row * 4 + pair % 4] =
        pack2(lo, hi, false);
  }
}

template <Before before, bool bf16, int kUnits>
__global__ void __launch_bounds__(kUnits == 1 ? 1024 : 768)
    quantize_short_rows(const QuantizeArgs a, const ShortShape s) {
  extern __shared__ uint4 raw_rows[];
  float* const memory = reinterpret_cast<float*>(raw_rows);
  const uint32_t at = ptx::shared(raw_rows), bars = at + s.barriers * 4;
  const uint32_t vectors = bars, downs = bars + 8, peers = bars + 16, sent = bars + 24;
  const int warp = threadIdx.x >> 5, lane = threadIdx.x & 31, g = lane >> 2, t = lane & 3;
  const int rank = s.split > 1 ? blockIdx.x % s.split : 0,
            group = s.split > 1 ? blockIdx.x / s.split : blockIdx.x;
  const int first = s.split > 1 ? s.blocks * rank / s.split : 0;
  const int mine = s.split > 1 ? s.blocks * (rank + 1) / s.split - first : s.blocks,
            with_x = min(mine, s.filled - first);
  const int row = group * kRows + g, m = min(row, a.m - 1);
  const bool live = row < a.m;
  const int column = (first + warp) * kBlock + t * kUnit,
            stride = s.warps * kBlock;  // of the first unit; to the next
  const uint16_t* x =
      static_cast<const uint16_t*>(a.x) + (size_t)m * (before == kGate ? 2 * a.k : a.k) + column;
  uint16_t* residual = static_cast<uint16_t*>(a.residual) + (size_t)m * a.k + column;
  int8_t* codes = a.codes + (size_t)m * a.kp + (a.tile_order ? column - t * (kUnit - 4) : column);
  if (threadIdx.x == 0) {
#pragma unroll
    for (int i = 0; i < 4; i++) ptx::barrier_init(bars + 8 * i, 1);
    ptx::barrier_fence();
    const uint32_t size = (min((first + mine) * kBlock, a.k) - first * kBlock) * 4;
    ptx::expect(vectors, (before == kNorm ? size : 0) + (a.smooth ? 2 * size : 0));
    if (before == kNorm) ptx::load_bulk(at + s.norm * 4, a.norm + first * kBlock, size, vectors);
    if (a.smooth) {
      ptx::load_bulk(at + s.smooth * 4, a.smooth + first * kBlock, size, vectors);
      ptx::load_bulk(at + (s.smooth + s.room * kBlock) * 4, a.smooth + a.k + first * kBlock, size, vectors);
    }
    if (s.chunks) {
      ptx::expect(downs, s.chunks * with_x * 2048);
      for (int c = 0; c < s.chunks; c++)
        ptx::load_bulk(at + c * s.room * 2048,
                       static_cast<const uint4*>(a.down) + ((size_t)c * s.filled + first) * 128,
                       with_x * 2048, downs);
    }
    if (s.split > 1) {
      ptx::expect(peers, (s.split - 1) * kRows * 4);
      if (rank == 0)
        ptx::expect(sent, (s.blocks - mine) * (s.chunks * 512 + (before == kNorm ? kRows * 4 : 0)));
    }
  }
  if (threadIdx.x < kMostSplit * kRows && threadIdx.x < s.split * kRows)
    reinterpret_cast<uint32_t*>(memory)[s.maxima + threadIdx.x] = 0;
  __syncthreads();
  if (s.split > 1) ptx::cluster_arrive(), ptx::cluster_wait();  // the barriers of every CTA are made
  ptx::previous_grid();
  ptx::let_next_grid_start();  // only now: what the next kernel reads early was complete before this one

  Raw<false> in[kUnits], other[kUnits];
#pragma unroll
  for (int u = 0; u < kUnits; u++) {
    in[u].q[0] = in[u].q[1] = other[u].q[0] = other[u].q[1] = make_uint4(0, 0, 0, 0);
    if (warp + u * s.warps >= mine || column + u * stride >= a.k) continue;
    fetch(in[u], x, u * stride);
    if (before == kGate) fetch(other[u], x + a.k, u * stride);
    if (before == kNorm && a.residual) fetch(other[u], residual, u * stride);
  }
  if (before == kNorm || a.smooth) ptx::wait(vectors, 0);
  float v[kUnits][kUnit];
  uint32_t most = 0;
#pragma unroll
  for (int u = 0; u < kUnits; u++) {
    if (before == kNorm && a.residual) {
      add(in[u], other[u], bf16);
      if (live && warp + u * s.warps < mine && column + u * stride < a.k) put(residual, u * stride, in[u]);
    }
    to_floats(v[u], in[u], bf16);
    if (before == kGate) {
      float up[kUnit];
      to_floats(up, other[u], bf16);
      gate(v[u], up);
    }
    const bool inside = warp + u * s.warps < mine && column + u * stride < a.k;
    const int here = inside ? (warp + u * s.warps) * kBlock + t * kUnit
                            : 0;  // beyond the row, zeros times anything finite
    if (before == kNorm) {
      float q[4] = {0.f, 0.f, 0.f, 0.f};
#pragma unroll
      for (int i = 0; i < kUnit; i++) q[i & 3] = fmaf(v[u][i], v[u][i], q[i & 3]);
      q[0] = (q[0] + q[1]) + (q[2] + q[3]);
      q[0] += __shfl_xor_sync(~0u, q[0], 1);
      q[0] += __shfl_xor_sync(~0u, q[0], 2);
      if (t == 0 && warp + u * s.warps < mine)
        memory[s.sums + (first + warp + u * s.warps) * kRows + g] = q[0];
      multiply(v[u], memory + s.norm + here);
    }
    if (a.smooth) divide(v[u], memory + s.smooth + here, memory + s.smooth + s.room * kBlock + here);
    if (a.hadamard) hadamard(v[u], lane);
    most = max(most, largest(v[u], a.hadamard));
  }
  most = max(most, __shfl_xor_sync(~0u, most, 1));
  most = max(most, __shfl_xor_sync(~0u, most, 2));
  uint32_t* maxima = reinterpret_cast<uint32_t*>(memory) + s.maxima;
  if (t == 0) atomicMax(maxima + rank * kRows + g, most);
  __syncthreads();
  if (s.split > 1) {
    if (threadIdx.x < 2 * s.split && threadIdx.x / 2 != rank) {
      const uint4 q = ptx::lds128(at + (s.maxima + rank * kRows + threadIdx.x % 2 * 4) * 4);
      ptx::send(ptx::in_cta(at + (s.maxima + rank * kRows + threadIdx.x % 2 * 4) * 4, threadIdx.x / 2),
                ptx::in_cta(peers, threadIdx.x / 2), q.x, q.y, q.z, q.w);
    }
    if (before == kNorm && rank && threadIdx.x < 2 * mine) {
      const uint32_t from = at + (s.sums + first * kRows + threadIdx.x * 4) * 4;
      const uint4 q = ptx::lds128(from);
      ptx::send(ptx::in_cta(from, 0), ptx::in_cta(sent, 0), q.x, q.y, q.z, q.w);
    }
    ptx::wait(peers, 0);
  }
  most = maxima[g];
  for (int r = 1; r < s.split; r++) most = max(most, maxima[r * kRows + g]);
  const float eighth = a.hadamard ? 0.125f : 1.f, amax = __uint_as_float(most) * eighth;
  const bool usable = amax >= kTiny && most < 0x7F800000u;
  const float factor = usable ? __fdiv_rn(127.f, amax) * eighth : 0.f;
  if (s.chunks) ptx::wait(downs, 0);
#pragma unroll
  for (int u = 0; u < kUnits; u++) {
    const int block = warp + u * s.warps;
    if (block >= mine) continue;
#pragma unroll
    for (int i = 0; i < kUnit; i++) v[u][i] *= factor;
    if (!usable) {
#pragma unroll
      for (int i = 0; i < kUnit; i++) v[u][i] = 0.f;
    }
    uint32_t h[8];
#pragma unroll
    for (int i = 0; i < 8; i++) h[i] = pack2(v[u][2 * i], v[u][2 * i + 1], false);
    for (int chunk = 0; chunk < s.chunks; chunk++) {
      float acc[4] = {0.f, 0.f, 0.f, 0.f};
      if (block < with_x) {
        const uint32_t from = at + (chunk * s.room + block) * 2048 + lane * 16;
#pragma unroll
        for (int i = 0; i < 4; i++) ptx::mma_f16(acc, ptx::lds128(from + i * 512), h[2 * i], h[2 * i + 1]);
      }
      const uint32_t to = at + (s.parts + (chunk * s.blocks + first + block) * 128 + lane * 4) * 4;
      const uint32_t w[4] = {__float_as_uint(acc[0]), __float_as_uint(acc[1]), __float_as_uint(acc[2]),
                             __float_as_uint(acc[3])};
      if (rank == 0)
        ptx::sts128(to, make_uint4(w[0], w[1], w[2], w[3]));
      else
        ptx::send(ptx::in_cta(to, 0), ptx::in_cta(sent, 0), w[0], w[1], w[2], w[3]);
    }
    if (live) store_unit(v[u], codes + u * stride, a.tile_order);
  }
  if (rank) return;
  if (s.split > 1) ptx::wait(sent, 0);
  if (s.chunks) {
    __syncthreads();
    store_low(a, memory + s.parts, s.chunks, s.blocks, group);
  }
  if (warp == s.warps - 1) {  // the scale: the factor of the norm is in no code
    float norm = 1.f;
    if (before == kNorm) {
      float q = 0.f;
      for (int b = t; b < s.filled; b += 4) q += memory[s.sums + b * kRows + g];
      q += __shfl_xor_sync(~0u, q, 1);
      q += __shfl_xor_sync(~0u, q, 2);
      norm = 1.f / sqrtf(q / a.k + a.eps);
    }
    if (live && t == 0) a.scales[m] = amax < kTiny ? 0.f : __fdiv_rn(amax, 127.f) * norm;
  }
}

template <Before before, bool bf16, int kUnits>
static const char* launch(const QuantizeArgs& a, const ShortShape& s, const Device& device, Stream stream) {
  const void* kernel = reinterpret_cast<const void*>(quantize_short_rows<before, bf16, kUnits>);
  static bool allowed[kMostDevices];
  if (const char* wrong = allow_shared(kernel, device.shared, device, allowed)) return wrong;
  QuantizeArgs copy = a;
  ShortShape shape = s;
  void* args[] = {&copy, &shape};
  return start(kernel, (a.m + kRows - 1) / kRows * s.split, s.warps * 32, s.bytes, s.split, device, stream,
               args);
}
template <Before before, bool bf16>
static const char* launch(const QuantizeArgs& a, const ShortShape& s, const Device& d, Stream stream) {
  return s.room <= s.warps ? launch<before, bf16, 1>(a, s, d, stream)
                           : launch<before, bf16, 2>(a, s, d, stream);
}
template <Before before>
static const char* launch(const QuantizeArgs& a, const ShortShape& s, const Device& d, Stream stream) {
  return a.dtype == Dtype::kBfloat16 ? launch<before, true>(a, s, d, stream)
                                     : launch<before, false>(a, s, d, stream);
}

// False where quantize.cu has to do it; whether it has does not depend on M.
bool launch_quantize_short(const QuantizeArgs& a, const Device& d, Stream stream, const char** wrong) {
  if (d.capability < 90 || a.four || a.dtype == Dtype::kFloat32 || a.k > 3072 || a.rank > 64) return false;
  if ((a.silu && a.norm) || (a.residual && !a.norm)) return false;
  ShortShape s{};
  s.chunks = a.rank / 16, s.blocks = a.kp / kBlock, s.filled = (a.k + kBlock - 1) / kBlock;
  const auto place = [&](int split) {
    s.split = split, s.room = (s.blocks + split - 1) / split;
    s.warps = s.room <= 32 ? s.room : (s.room + 1) / 2;
    s.parts = s.chunks * s.room * 512;
    s.norm = s.parts + s.chunks * s.blocks * 128;
    s.smooth = s.norm + (a.norm ? s.room * kBlock : 0);
    s.sums = s.smooth + (a.smooth ? 2 * s.room * kBlock : 0);
    s.maxima = s.sums + (a.norm ? s.blocks * kRows : 0);
    s.barriers = s.maxima + split * kRows, s.bytes = s.barriers * 4 + 32;
  };
  place(1);
  if (s.bytes > d.shared) return false;
  // As many CTAs for a row as leave no multiprocessor with two (measured on an H200, 2026-11-30: 172 rows of
  // 3072, gated, 4.0 us with four CTAs, 7.1 with one; 685 rows 10.8 with two, two on some
  // multiprocessors, 7.4 with one).
  int best = 1;
  for (int split = 2; split <= kMostSplit && s.blocks >= 4 * split; split++)
    if ((a.m + kRows - 1) / kRows * split <= d.multiprocessors) best = split;
  place(best);
  *wrong = a.silu   ? launch<kGate>(a, s, d, stream)
           : a.norm ? launch<kNorm>(a, s, d, stream)
                    : launch<kNothing>(a, s, d, stream);
  return true;
}

}  // namespace lowbit::cuda
