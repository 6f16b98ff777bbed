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
// bits whatever M, CTA or cluster it is in. Rows beyond M repeat the last one: they write its codes once
// more, which are the same, and nothing else.
#include "launch.cuh"
#include "quantize_row.cuh"

namespace lowbit::cuda {

enum Before { kNothing, kNorm, kGate };

constexpr int kMostSplit = 4;
// The sums of a block, four floats a lane: in a CTA that is alone, over the block of down that they were made
// from, else in the first CTA of the cluster. Either way neighbours lie 16 bytes further in their banks.
constexpr int kPart = 132;
__host__ __device__ constexpr int part_step(bool cluster) { return cluster ? kPart : 512; }
LOWBIT_DEVICE int part_of(bool cluster, int block) {
  return cluster ? block * kPart : block * 512 + (block & 3) * 4;
}

struct ShortShape {
  int warps, split;            // of a CTA; of a cluster
  int chunks, blocks, filled;  // of 64 columns: of a row of codes, of x
  int room;                    // blocks of a CTA, at most
  int first[kMostSplit + 1];   // block of each CTA of a cluster, and `blocks`
  // Shared memory, in floats: down [chunk][room] 512 | of a cluster, parts [chunk][block] kPart | of a
  // cluster or without low rank, codes that change lanes [block of the CTA][8 rows] kCodeRow bytes | smooth,
  // 1 / smooth | sums of squares [block][8 rows] | maxima [split][8 rows] | four mbarriers. The same places
  // in every CTA of a cluster.
  int parts, swap, smooth, sums, maxima, barriers, bytes;
};

// Makes the compiler have a value here, not where it is used: what can be known before the wait is.
template <class T>
LOWBIT_DEVICE void hold(T*& p) {
  asm volatile("" : "+l"(p));
  __builtin_assume(__isGlobal(p));
}
LOWBIT_DEVICE void hold(uint32_t& v) { asm volatile("" : "+r"(v)); }
LOWBIT_DEVICE void hold(int& v) { asm volatile("" : "+r"(v)); }

// low of eight rows from parts [chunk][block][lane] of four: c0, c1 (rank g, rows 2t, 2t+1), c2, c3 (rank g +
// 8). A warp takes the lanes 4g + pair: its four threads of a g every fourth block in order, then each keeps
// one sum of the four. `p`, `to`: the thread's first block of a chunk of ranks, and where its sum goes if the
// row is `live`.
template <bool kCluster>
LOWBIT_DEVICE void store_low(const ShortShape& s, uint32_t p, __half* to, bool live, int t) {
  constexpr int kStep = part_step(kCluster) * 4;
  const bool odd = t & 1, upper = t & 2;  // keeps the ranks g + 8; keeps the row 2t + 1
  float c[4] = {0.f, 0.f, 0.f, 0.f};
  int left = s.blocks >> 2;
#pragma unroll 1
  for (; left >= 4; left -= 4, p += 16 * kStep) {
    uint4 q[4];
#pragma unroll
    for (int i = 0; i < 4; i++) q[i] = ptx::lds128(p + i * 4 * kStep);
#pragma unroll
    for (int i = 0; i < 4; i++) {
      c[0] += __uint_as_float(q[i].x), c[1] += __uint_as_float(q[i].y);
      c[2] += __uint_as_float(q[i].z), c[3] += __uint_as_float(q[i].w);
    }
  }
#pragma unroll 1
  for (; left; left--, p += 4 * kStep) {
    const uint4 q = ptx::lds128(p);
    c[0] += __uint_as_float(q.x), c[1] += __uint_as_float(q.y);
    c[2] += __uint_as_float(q.z), c[3] += __uint_as_float(q.w);
  }
  const float one = __shfl_xor_sync(~0u, odd ? c[0] : c[2], 1),
              two = __shfl_xor_sync(~0u, odd ? c[1] : c[3], 1);
  const float lo = (odd ? c[2] : c[0]) + one, hi = (odd ? c[3] : c[1]) + two;
  const float sum = (upper ? hi : lo) + __shfl_xor_sync(~0u, upper ? lo : hi, 2);
  if (live) *to = __float2half_rn(sum);
}

LOWBIT_DEVICE int first_of(const ShortShape& s,
                           int rank) {  // no array of the arguments that a thread could index
  return rank < 2   ? (rank < 1 ? s.first[0] : s.first[1])
         : rank < 3 ? s.first[2]
         : rank < 4 ? s.first[3]
                    : s.first[4];
}

template <Before before, bool bf16, int kUnits, bool kCluster, bool kLow>
__global__ void __launch_bounds__(kUnits == 1 ? 1024 : 768)
    quantize_short_rows(const QuantizeArgs a, const ShortShape s) {
  extern __shared__ uint4 raw_rows[];
  float* const memory = reinterpret_cast<float*>(raw_rows);
  const uint32_t at = ptx::shared(raw_rows), bars = at + s.barriers * 4;
  const uint32_t vectors = bars, downs = bars + 8, peers = bars + 16, sent = bars + 24;
  const int lane = threadIdx.x & 31;
  int warp = threadIdx.x >> 5, g = lane >> 2, t = lane & 3;
  int group = kCluster ? ptx::cluster() : blockIdx.x;
  const int rank = kCluster ? ptx::cta_of_cluster() : 0;
  const int first = kCluster ? first_of(s, rank) : 0,
            mine = kCluster ? first_of(s, rank + 1) - first : s.blocks;
  const int with_x = min(mine, s.filled - first);
  const int row = group * kRows + g, m = min(row, a.m - 1);
  const bool live = row < a.m;
  const int column = (first + warp) * kBlock + t * kUnit,
            stride = s.warps * kBlock;  // first unit; to the next
  // Alone, a CTA has a warp for every `kUnits` blocks; of a cluster, some have one block less than others.
  const auto mine_is = [&](int u) { return !kCluster || warp + u * s.warps < mine; };
  const auto inside = [&](int u) { return mine_is(u) && column + u * stride < a.k; };
  const uint16_t* x =
      static_cast<const uint16_t*>(a.x) + (size_t)m * (before == kGate ? 2 * a.k : a.k) + column;
  uint16_t* residual = static_cast<uint16_t*>(a.residual) + (size_t)m * a.k + column;
  int8_t* codes = a.codes + (size_t)m * a.kp + column;
  uint32_t fragment = at + warp * 2048 + lane * 16, part[kUnits];
#pragma unroll
  for (int u = 0; u < kUnits; u++)
    part[u] = at + (s.parts + part_of(kCluster, first + warp + u * s.warps)) * 4 + lane * 16;
  // Where the codes of the row change lanes: behind the sums of the block, or on their own.
  constexpr int kSwap = kLow && !kCluster ? 2048 : kRows * kCodeRow;
  uint32_t swap = at + (kLow && !kCluster ? 1024 : s.swap * 4) + warp * kSwap + g * kCodeRow;
  // Who adds the sums of low: the last four warps for the first chunk of ranks, and so on, as far as there
  // are.
  const int quads = s.warps >> 2, chunk = (s.warps - 1 - warp) >> 2;
  uint32_t adds = 0;
  __half* low = nullptr;
  const auto find_low = [&] {
    const int pair = (s.warps - 1 - warp) & 3;
    adds = at + s.parts * 4 + chunk * s.blocks * (part_step(kCluster) * 4) + part_of(kCluster, t) * 4 +
           (g * 4 + pair) * 16;
    low = static_cast<__half*>(a.low) + ((size_t)(chunk * ((a.m + 7) >> 3) + group) * 2 + (t & 1)) * 64 +
          (pair * 2 + (t >> 1)) * 8 + g;
  };
  if (threadIdx.x == 0) {
#pragma unroll
    for (int i = 0; i < 4; i++) ptx::barrier_init(bars + 8 * i, 1);
    ptx::barrier_fence();
    if (a.smooth) {
      const uint32_t size = (min((first + mine) * kBlock, a.k) - first * kBlock) * 4;
      ptx::expect(vectors, 2 * size);
      ptx::load_bulk(at + s.smooth * 4, a.smooth + first * kBlock, size, vectors);
      ptx::load_bulk(at + (s.smooth + s.room * kBlock) * 4, a.smooth + a.k + first * kBlock, size, vectors);
    }
    if (kLow) {
      ptx::expect(downs, s.chunks * with_x * 2048);
#pragma unroll 1
      for (int c = 0; c < s.chunks; c++)
        ptx::load_bulk(at + c * s.room * 2048,
                       static_cast<const uint4*>(a.down) + ((size_t)c * s.filled + first) * 128,
                       with_x * 2048, downs);
    }
    if (kCluster) {
      ptx::expect(peers, (s.split - 1) * kRows * 4);
      if (rank == 0)
        ptx::expect(sent, (s.blocks - mine) * (s.chunks * 512 + (before == kNorm ? kRows * 4 : 0)));
    }
  }
  if (threadIdx.x < (kCluster ? s.split * kRows : kRows))
    reinterpret_cast<uint32_t*>(memory)[s.maxima + threadIdx.x] = 0;
  uint4 weights[kUnits][4];  // of the norm: weights, so they are on their way before the wait
  if (before == kNorm) {
#pragma unroll
    for (int u = 0; u < kUnits; u++) {
      const float* from = a.norm + (inside(u) ? column + u * stride : 0);
#pragma unroll
      for (int i = 0; i < 4; i++) weights[u][i] = ptx::stream128(from + 4 * i);
    }
  }
  __syncthreads();
  if (kCluster) ptx::cluster_arrive(), ptx::cluster_wait();  // the barriers of every CTA are made
  hold(x), hold(codes), hold(fragment), hold(part[0]), hold(swap), hold(warp), hold(group), hold(g), hold(t);
  if (before == kNorm) hold(residual);
  if (kLow && kUnits == 1) find_low(), hold(adds), hold(low);  // two units leave no registers
  ptx::previous_grid();
  ptx::let_next_grid_start();  // only now: what the next kernel reads early was complete before this one

  Raw<false> in[kUnits], other[kUnits];
#pragma unroll
  for (int u = 0; u < kUnits; u++) {
    in[u].q[0] = in[u].q[1] = other[u].q[0] = other[u].q[1] = make_uint4(0, 0, 0, 0);
    if (!inside(u)) continue;
    fetch(in[u], x, u * stride);
    if (before == kGate) fetch(other[u], x + a.k, u * stride);
    if (before == kNorm && a.residual) fetch(other[u], residual, u * stride);
  }
  if (a.smooth) ptx::wait(vectors, 0);
  float v[kUnits][kUnit];
  uint32_t most = 0;
#pragma unroll
  for (int u = 0; u < kUnits; u++) {
    if (before == kNorm && a.residual) {
      add(in[u], other[u], bf16);
      __syncwarp();  // the rows that repeat the last one have read it
      if (live && inside(u)) put(residual, u * stride, in[u]);
    }
    to_floats(v[u], in[u], bf16);
    if (before == kGate) {
      float up[kUnit];
      to_floats(up, other[u], bf16);
      gate(v[u], up);
    }
    if (before == kNorm) {
      const float squares = sum_of_squares(v[u]);
      if (t == 0 && mine_is(u)) memory[s.sums + (first + warp + u * s.warps) * kRows + g] = squares;
#pragma unroll
      for (int i = 0; i < kUnit; i++)
        v[u][i] *= __uint_as_float(reinterpret_cast<const uint32_t*>(weights[u])[i]);
    }
    if (a.smooth) {  // beyond the row, zeros divided by anything finite
      const int here = inside(u) ? (warp + u * s.warps) * kBlock + t * kUnit : 0;
      divide(v[u], memory + s.smooth + here, memory + s.smooth + s.room * kBlock + here);
    }
    if (a.hadamard) hadamard(v[u], lane);
    most = max(most, largest(v[u]));
  }
  most = max(most, __shfl_xor_sync(~0u, most, 1));
  most = max(most, __shfl_xor_sync(~0u, most, 2));
  uint32_t* maxima = reinterpret_cast<uint32_t*>(memory) + s.maxima;
  if (t == 0) atomicMax(maxima + rank * kRows + g, most);
  uint4 down[4];  // of the first chunk, fetched while the row's maximum is on its way; two units have no room
                  // for it
  if (kLow && kUnits == 1) {
    ptx::wait(downs, 0);
#pragma unroll
    for (int i = 0; i < 4; i++) down[i] = ptx::lds128(fragment + i * 512);
  }
  __syncthreads();
  if (kCluster) {
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
  if (kCluster) {
#pragma unroll 1
    for (int r = 1; r < s.split; r++) most = max(most, maxima[r * kRows + g]);
  }
  if (kLow && kUnits == 2) ptx::wait(downs, 0);
  const float eighth = a.hadamard ? 0.125f : 1.f, amax = __uint_as_float(most) * eighth;
  const bool common = amax >= kTiny && amax < kHuge;
  float factor = quotient_of_127(amax) * eighth;
  if (!__all_sync(~0u, common)) {
    const bool usable = amax >= kTiny && most < 0x7F800000u;
    if (!common) factor = usable ? __fdiv_rn(127.f, amax) * eighth : 0.f;
    if (!usable) {
#pragma unroll
      for (int u = 0; u < kUnits; u++)
#pragma unroll
        for (int i = 0; i < kUnit; i++) v[u][i] = 0.f;
    }
  }
#pragma unroll
  for (int u = 0; u < kUnits; u++) {
    if (!mine_is(u)) continue;
#pragma unroll
    for (int i = 0; i < kUnit; i++) v[u][i] *= factor;
    if (kLow) {
      const int block = warp + u * s.warps;
      uint32_t h[8];
#pragma unroll
      for (int i = 0; i < 8; i++) h[i] = pack2(v[u][2 * i], v[u][2 * i + 1], false);
      const auto sums = [&](float (&acc)[4], int chunk) {
        if (block >= with_x) return;
        const uint32_t from = fragment + (chunk * s.room + u * s.warps) * 2048;
#pragma unroll
        for (int i = 0; i < 4; i++) {
          const uint4 weight = kUnits == 1 && chunk == 0 ? down[i] : ptx::lds128(from + i * 512);
          ptx::mma_f16(acc, weight, h[2 * i], h[2 * i + 1]);
        }
      };
      const auto keep = [&](const float (&acc)[4], int chunk) {
        const uint32_t to = part[u] + chunk * s.blocks * (part_step(kCluster) * 4);
        const uint32_t w[4] = {__float_as_uint(acc[0]), __float_as_uint(acc[1]), __float_as_uint(acc[2]),
                               __float_as_uint(acc[3])};
        if (kCluster && rank)
          ptx::send(ptx::in_cta(to, 0), ptx::in_cta(sent, 0), w[0], w[1], w[2], w[3]);
        else
          ptx::sts128(to, make_uint4(w[0], w[1], w[2], w[3]));
      };
      float acc[4] = {0.f, 0.f, 0.f, 0.f};
      sums(acc, 0);
      store_unit(v[u], codes + u * stride, a.tile_order, swap + u * s.warps * kSwap,
                 t);  // while the products are made
      keep(acc, 0);
#pragma unroll 1
      for (int chunk = 1; chunk < s.chunks; chunk++) {
        float more[4] = {0.f, 0.f, 0.f, 0.f};
        sums(more, chunk), keep(more, chunk);
      }
    } else {
      store_unit(v[u], codes + u * stride, a.tile_order, swap + u * s.warps * kSwap, t);
    }
  }
  if (kCluster && rank) return;
  if (kCluster) ptx::wait(sent, 0);
  if (kLow) {  // nobody waits but those that add
    if (chunk < quads && chunk < s.chunks) {
      const int row = group * kRows + ((s.warps - 1 - warp) & 3) * 2 + (t >> 1);
      if (kUnits == 2) find_low(), hold(adds), hold(low);
      ptx::named_barrier(1, s.warps * 32);
      store_low<kCluster>(s, adds, low, row < a.m, t);
#pragma unroll 1
      for (int c = chunk + quads; c < s.chunks; c += quads) {
        adds += quads * s.blocks * (part_step(kCluster) * 4), low += quads * ((a.m + 7) >> 3) * 128;
        store_low<kCluster>(s, adds, low, row < a.m, t);
      }
    } else {
      ptx::named_arrive(1, s.warps * 32);
    }
  }
  if (warp == 0) {  // the scale: the factor of the norm is in no code
    const float norm =
        before == kNorm ? inverse_rms(memory + s.sums + g, kRows, s.filled, t, a.k, a.eps) : 1.f;
    if (live && t == 0) a.scales[m] = amax < kTiny ? 0.f : __fdiv_rn(amax, 127.f) * norm;
  }
}

template <Before before, bool bf16, int kUnits, bool kCluster, bool kLow>
static const char* launch(const QuantizeArgs& a, const ShortShape& s, const Device& device, Stream stream) {
  const void* kernel =
      reinterpret_cast<const void*>(quantize_short_rows<before, bf16, kUnits, kCluster, kLow>);
  static bool allowed[kMostDevices];
  if (const char* wrong = allow_shared(kernel, device.shared, device, allowed)) return wrong;
  QuantizeArgs copy = a;
  ShortShape shape = s;
  void* args[] = {&copy, &shape};
  return start(kernel, (a.m + kRows - 1) / kRows * s.split, s.warps * 32, s.bytes, s.split, device, stream,
               args);
}
template <Before before, bool bf16, bool kLow>
static const char* launch(const QuantizeArgs& a, const ShortShape& s, const Device& d, Stream stream) {
  return s.split > 1         ? launch<before, bf16, 1, true, kLow>(a, s, d, stream)
         : s.room <= s.warps ? launch<before, bf16, 1, false, kLow>(a, s, d, stream)
                             : launch<before, bf16, 2, false, kLow>(a, s, d, stream);
}
template <Before before, bool bf16>
static const char* launch(const QuantizeArgs& a, const ShortShape& s, const Device& d, Stream stream) {
  return s.chunks ? launch<before, bf16, true>(a, s, d, stream)
                  : launch<before, bf16, false>(a, s, d, stream);
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
    for (int r = 0; r <= split; r++) s.first[r] = s.blocks * r / split;
    s.parts = split > 1 ? s.chunks * s.room * 512 : 0;
    s.swap = s.chunks * (split > 1 ? s.room * 512 + s.blocks * kPart : s.blocks * 512);
    s.smooth = s.swap + (split > 1 || !s.chunks ? s.room * kRows * kCodeRow / 4 : 0);
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
