// Rows of x -> int8, with what stands before and beside it, in one read of x:
//
//   load (+ residual, or gate * silu * up) -> * norm weight -> / smooth -> Hadamard -> amax -> int8 codes,
//   and fp16 of the same values before rounding to integers -> . down (matrix instructions) -> sum -> low
//
//          64 columns: a unit of 16 for each of 4 lanes        a CTA: 8 rows, a warp one block of 64 columns
//        +------+------+------+------+                         (or `kUnits` blocks). Lane 4g + t has row g,
//        so its 16 values
//   row g|  t=0 |  t=1 |  t=2 |  t=3 |  x 8 rows = a warp      are the B operand of four matrix instructions
//   as they
//        +------+------+------+------+                         stand: no exchange through memory before down.
//
// Four strides of the Hadamard are inside a thread, two between four lanes. What does not depend on x (down,
// the vectors) goes to shared memory before the previous grid has ended. The factor of an RMS norm changes no
// code: it only multiplies the row's scale, so its sum is off the path.
// A slice is the run of blocks that one chain of matrix instructions sums: a block up to K = 4096 and rank
// 32, by K and rank alone. Slices are summed in order, so a row has the same bits whatever M, CTA or cluster
// it is in. Columns may be shared by the CTAs of a cluster (sm_90); the first one writes scales and low.
#include <algorithm>
#include <cstdlib>

#include "launch.cuh"
#include "quantize_row.cuh"

namespace lowbit::cuda {

constexpr int kPartBytes = 64 << 10;  // of shared memory, at most, for the sums of slices

// How a launch shares the work. Most rows take kSimple: a slice is a block, a row one CTA, and nothing is
// computed twice.
enum Kind { kSimple, kShared, kLong };

struct Shape {
  int warps, split;   // of a CTA; CTAs that share a row's columns (a cluster)
  int slice, slices;  // blocks of a slice; slices of a row
  int staged, room;   // chunks of 16 ranks whose down is in shared memory; blocks of a CTA
  // Shared memory: down | parts [chunk][slice][16 ranks][8 rows] | norm | smooth, 1 / smooth (of this CTA's
  // columns) | sums of squares [block][8 rows] | maxima [8 rows], two mbarriers. The same places in every CTA
  // of a cluster.
  int parts, norm, smooth, sums, maxima, bytes;

  void place(const QuantizeArgs& a, bool vectors) {
    const int vector = vectors ? room * kBlock * 4 : 0;
    parts = staged * room * 2048;
    norm = parts + a.rank / 16 * slices * 512;
    smooth = norm + (a.norm ? vector : 0);
    sums = smooth + (a.smooth ? 2 * vector : 0);
    maxima = sums + (a.norm ? a.kp / kBlock * kRows * 4 : 0);
    bytes = maxima + kRows * 4 + 16;
  }
};

struct Walk {  // over the blocks of a warp: slice by slice
  int slice, j, block;
};

template <bool kWide, Kind kind>
struct Quantizer {
  const QuantizeArgs& a;
  const Shape& shape;
  uint8_t* memory;
  const int warp = threadIdx.x >> 5, lane = threadIdx.x & 31, g = lane >> 2, t = lane & 3;
  int rank = 0, first = 0, last;  // this CTA's slices
  const int blocks, filled;       // of a row: of its codes; those with columns of x
  int m;
  const bool live, bf16;

  __device__ __forceinline__ Quantizer(const QuantizeArgs& args, const Shape& s, uint8_t* shared)
      : a(args),
        shape(s),
        memory(shared),
        last(s.slices),
        blocks(args.kp / kBlock),
        filled((args.k + kBlock - 1) / kBlock),
        m(row_group() * kRows + g),
        live(m < args.m),
        bf16(args.dtype == Dtype::kBfloat16) {
    if (kind != kSimple && s.split > 1) {
      rank = blockIdx.x % s.split;
      first = s.slices * rank / s.split, last = s.slices * (rank + 1) / s.split;
    }
  }
  __device__ __forceinline__ int row_group() const {
    return kind != kSimple && shape.split > 1 ? blockIdx.x / shape.split : blockIdx.x;
  }
  __device__ __forceinline__ bool shares() const { return kind != kSimple && shape.split > 1; }
  __device__ __forceinline__ float* floats(int at) const { return reinterpret_cast<float*>(memory + at); }
  __device__ __forceinline__ uint32_t* maxima() const {
    return reinterpret_cast<uint32_t*>(memory + shape.maxima);
  }
  __device__ __forceinline__ uint32_t barrier(int i) const {  // 0: norm and smooth are there; 1: down
    return ptx::shared(memory + shape.maxima + kRows * 4 + 8 * i);
  }
  __device__ __forceinline__ int per_slice() const { return kind == kSimple ? 1 : shape.slice; }
  __device__ __forceinline__ Walk start() const { return {first + warp, 0, (first + warp) * per_slice()}; }
  __device__ __forceinline__ void next(Walk& w) const {
    w.block++;
    if (++w.j == per_slice()) w.j = 0, w.slice += shape.warps, w.block = w.slice * per_slice();
  }
  __device__ __forceinline__ bool has(const Walk& w) const {
    return w.block < blocks && (kind == kSimple || w.slice < last);
  }
  __device__ __forceinline__ bool ends(const Walk& w) const {  // a slice
    return kind == kSimple || w.j + 1 == shape.slice || w.block + 1 == blocks;
  }
  __device__ __forceinline__ int column(const Walk& w) const { return w.block * kBlock + t * kUnit; }

  // Before the previous grid has ended: what does not depend on x. One thread asks, where the chip copies by
  // itself.
  __device__ __forceinline__ void stage() const {
    const int begin = first * per_slice(), end = min(last * per_slice(), filled);
    const int columns = min(last * per_slice() * kBlock, a.k) - begin * kBlock;
    const float *norm = a.norm + begin * kBlock, *smooth = a.smooth + begin * kBlock;
    const bool vectors = kind != kLong;
#if __CUDA_ARCH__ >= 900
    if (threadIdx.x == 0) {
      ptx::barrier_init(barrier(0), 1), ptx::barrier_init(barrier(1), 1);
      ptx::barrier_fence();
      const uint32_t bytes = columns * 4;
      if (vectors && (a.norm || a.smooth))
        ptx::expect(barrier(0), (a.norm ? bytes : 0) + (a.smooth ? 2 * bytes : 0));
      if (vectors && a.norm) ptx::load_bulk(ptx::shared(floats(shape.norm)), norm, bytes, barrier(0));
      if (vectors && a.smooth) {
        ptx::load_bulk(ptx::shared(floats(shape.smooth)), smooth, bytes, barrier(0));
        ptx::load_bulk(ptx::shared(floats(shape.smooth) + shape.room * kBlock), smooth + a.k, bytes,
                       barrier(0));
      }
      if (shape.staged) ptx::expect(barrier(1), shape.staged * (end - begin) * 2048);
      for (int c = 0; c < shape.staged; c++)
        ptx::load_bulk(ptx::shared(memory + c * shape.room * 2048),
                       static_cast<const uint4*>(a.down) + ((size_t)c * filled + begin) * 128,
                       (end - begin) * 2048, barrier(1));
    }
#else
    if (vectors) {
      for (int i = threadIdx.x * 4; i < columns; i += blockDim.x * 4) {
        if (a.norm) ptx::copy16(ptx::shared(floats(shape.norm) + i), norm + i);
        if (!a.smooth) continue;
        ptx::copy16(ptx::shared(floats(shape.smooth) + i), smooth + i);
        ptx::copy16(ptx::shared(floats(shape.smooth) + shape.room * kBlock + i), smooth + a.k + i);
      }
    }
    ptx::commit_copies();
    for (int c = 0; c < shape.staged; c++)
      for (int i = threadIdx.x; i < (end - begin) * 128; i += blockDim.x)
        ptx::copy16(ptx::shared(memory + (c * shape.room * 128 + i) * 16),
                    static_cast<const uint4*>(a.down) + ((size_t)c * filled + begin) * 128 + i);
    ptx::commit_copies();
#endif
    if (threadIdx.x < kRows) maxima()[threadIdx.x] = 0;
  }
  // Norm and smooth are there, maxima are zero.
  __device__ __forceinline__ void wait_vectors() const {
#if __CUDA_ARCH__ >= 900
    if (shares()) ptx::cluster_wait();
    __syncthreads();
    if (kind != kLong && (a.norm || a.smooth)) ptx::wait(barrier(0), 0);
#else
    ptx::wait_copies<1>();
    __syncthreads();
#endif
  }
  __device__ __forceinline__ void wait_down() const {  // on older chips before the CTA meets
#if __CUDA_ARCH__ >= 900
    if (shape.staged) ptx::wait(barrier(1), 0);
#endif
  }

  __device__ __forceinline__ void load(Raw<kWide>& x, Raw<kWide>& other, const Walk& w, bool again) const {
    if (!live || column(w) >= a.k) return;
    const size_t at = (size_t)m * a.k + column(w);
    if (again && a.residual) {
      fetch(x, a.residual, at);
      return;
    }
    const size_t from = a.silu ? at + (size_t)m * a.k : at;
    fetch(x, a.x, from);
    if (a.silu) fetch(other, a.x, from + a.k);
    if (a.residual) fetch(other, a.residual, at);
  }

  // v: everything but the factors of the row and of the Hadamard. All lanes of a warp have the same block.
  __device__ __forceinline__ void transform(float (&v)[kUnit], Raw<kWide>& x, const Raw<kWide>& other,
                                            const Walk& w, bool again) const {
    if (live && column(w) < a.k) {
      if (a.residual && !again) {
        add(x, other, bf16);
        put(a.residual, (size_t)m * a.k + column(w), x);
      }
      to_floats(v, x, bf16);
      if (a.silu) {
        float up[kUnit];
        to_floats(up, other, bf16);
        gate(v, up);
      }
    } else {
#pragma unroll
      for (int i = 0; i < kUnit; i++) v[i] = 0.f;
    }
    const int c = min(column(w), a.k - kUnit), here = c - first * per_slice() * kBlock;
    if (a.norm) {
      if (!again) {
        float s = 0.f;
#pragma unroll
        for (int i = 0; i < kUnit; i++) s = fmaf(v[i], v[i], s);
        s += __shfl_xor_sync(~0u, s, 1);
        s += __shfl_xor_sync(~0u, s, 2);
        if (t == 0) to_first(floats(shape.sums) + w.block * kRows + g, s);
      }
      multiply(v, kind == kLong ? a.norm + c : floats(shape.norm) + here);
    }
    if (a.smooth) {
      if constexpr (kind == kLong)
        divide(v, a.smooth + c, a.smooth + a.k + c);
      else
        divide(v, floats(shape.smooth) + here, floats(shape.smooth) + shape.room * kBlock + here);
    }
    if (a.hadamard) hadamard(v, lane);
  }

  // Into the memory of the cluster's first CTA, and of all of them.
  __device__ __forceinline__ void to_first(float* at, float value) const {
#if __CUDA_ARCH__ >= 900
    if (shares()) {
      asm volatile("st.shared::cluster.f32 [%0], %1;" ::"r"(ptx::in_cta(ptx::shared(at), 0)), "f"(value)
                   : "memory");
      return;
    }
#endif
    *at = value;
  }
  __device__ __forceinline__ void offer_maximum(uint32_t most) const {
    most = max(most, __shfl_xor_sync(~0u, most, 1));
    most = max(most, __shfl_xor_sync(~0u, most, 2));
    if (t) return;
#if __CUDA_ARCH__ >= 900
    if (shares()) {
      for (int r = 0; r < shape.split; r++)
        asm volatile("red.shared::cluster.max.u32 [%0], %1;" ::"r"(ptx::in_cta(ptx::shared(maxima() + g), r)),
                     "r"(most)
                     : "memory");
      return;
    }
#endif
    atomicMax(maxima() + g, most);
  }
  __device__ __forceinline__ void meet() const {  // the CTAs that share a row
#if __CUDA_ARCH__ >= 900
    if (shares()) {
      ptx::cluster_arrive();
      ptx::cluster_wait();
      return;
    }
#endif
    __syncthreads();
  }

  // The factor of the RMS norm, sums of squares in one order whatever the launch.
  __device__ __forceinline__ float norm_factor() const {
    const float* sums = floats(shape.sums) + g;
    float s = 0.f;
    for (int b = t; b < filled; b += 4) s += sums[b * kRows];
    s += __shfl_xor_sync(~0u, s, 1);
    s += __shfl_xor_sync(~0u, s, 2);
    return 1.f / sqrtf(s / a.k + a.eps);
  }

  struct Scale {
    float eighth, amax, factor;
    bool usable;
  };
  __device__ __forceinline__ Scale scale() const {
    const uint32_t most = maxima()[g];
    const float eighth = a.hadamard ? 0.125f : 1.f;
    const float amax = __uint_as_float(most) * eighth;  // before the norm's factor
    const bool usable = amax >= kTiny && most < 0x7F800000u;
    return {eighth, amax, usable ? __fdiv_rn(127.f, amax) * eighth : 0.f, usable};
  }

  // Codes, and the same values in fp16 as the operands of four matrix instructions. NaN and Inf leave zeros.
  __device__ __forceinline__ void finish(float (&v)[kUnit], uint32_t (&h)[8], const Scale& s, float norm,
                                         const Walk& w) const {
    if (a.four) store_four(a, v, rank == 0 ? m : a.m, column(w), s.eighth, norm);
#pragma unroll
    for (int i = 0; i < kUnit; i++) v[i] *= s.factor;
    if (!s.usable) {
#pragma unroll
      for (int i = 0; i < kUnit; i++) v[i] = 0.f;
    }
    if (live && !a.four) store_codes(v, a.codes + (size_t)m * a.kp, column(w), a.tile_order);
#pragma unroll
    for (int i = 0; i < 8; i++) h[i] = pack2(v[2 * i], v[2 * i + 1], false);
  }

  __device__ __forceinline__ void multiply_down(float (&acc)[4], const uint32_t (&h)[8], int chunk,
                                                const Walk& w) const {
    if (w.block >= filled) return;
    const int mine = w.block - first * per_slice();
    const uint4* from = static_cast<const uint4*>(a.down) + ((size_t)chunk * filled + w.block) * 128 + lane;
    const uint32_t here = ptx::shared(memory) + ((chunk * shape.room + mine) * 128 + lane) * 16;
    uint4 d[4];
#pragma unroll
    for (int s = 0; s < 4; s++)
      d[s] = chunk < shape.staged ? ptx::lds128(here + s * 512) : __ldg(from + s * 32);
#pragma unroll
    for (int s = 0; s < 4; s++) ptx::mma_f16(acc, d[s], h[2 * s], h[2 * s + 1]);
  }
  __device__ __forceinline__ void store_part(const float (&acc)[4], int chunk, const Walk& w) const {
    float* out = floats(shape.parts) + (chunk * shape.slices + w.slice) * 128 + g * 8 + 2 * t;
    to_first(out, acc[0]), to_first(out + 1, acc[1]);
    to_first(out + 64, acc[2]), to_first(out + 65, acc[3]);
  }
  __device__ __forceinline__ void store_scale(const Scale& s, float norm) const {
    if (live && t == 0) a.scales[m] = s.amax < kTiny ? 0.f : __fdiv_rn(s.amax, 127.f) * norm;
  }
  // low of the rows: four threads a pair of ranks, each every fourth slice in order.
  __device__ __forceinline__ void store_low() const {
    const int chunks = a.rank / 16, eights = (a.m + 7) / 8, eight = row_group();
    for (int i = threadIdx.x; i < chunks * 256; i += blockDim.x) {
      const int part = i & 3, row = (i >> 2) & 7, pair = (i >> 5) & 7, chunk = i >> 8;
      const float* p = floats(shape.parts) + chunk * shape.slices * 128 + pair * 16 + row;
      float lo = 0.f, hi = 0.f;
#pragma unroll 4
      for (int s = part; s < shape.slices; s += 4) lo += p[s * 128], hi += p[s * 128 + 8];
#pragma unroll
      for (int to = 1; to < 4; to *= 2) {
        lo += __shfl_xor_sync(~0u, lo, to);
        hi += __shfl_xor_sync(~0u, hi, to);
      }
      if (part || eight * kRows + row >= a.m) continue;
      static_cast<uint32_t*>(
          a.low)[((size_t)(chunk * eights + eight) * 2 + pair / 4) * 32 + row * 4 + pair % 4] =
          pack2(lo, hi, false);
    }
  }
};

template <int kUnits>
constexpr int most_threads() {
  return kUnits == 1 ? 1024 : kUnits == 2 ? 768 : 512;
}

template <bool kWide, Kind kind>
__device__ __forceinline__ void begin(const Quantizer<kWide, kind>& q) {
  q.stage();
#if __CUDA_ARCH__ >= 900
  if (q.shares()) ptx::cluster_arrive();  // behind the zeros of maxima
#endif
  ptx::previous_grid();
  ptx::let_next_grid_start();  // only now: what the next kernel reads early was complete before this one
}

// Every block of a warp is in its registers at once.
template <int kUnits, bool kWide, Kind kind>
__global__ void __launch_bounds__(most_threads<kUnits>())
    quantize_rows(const QuantizeArgs a, const Shape shape) {
  extern __shared__ uint4 raw_rows[];
  const Quantizer<kWide, kind> q(a, shape, reinterpret_cast<uint8_t*>(raw_rows));
  begin(q);
  float v[kUnits][kUnit];
  constexpr int kTogether = kUnits == 4 || kWide ? 1 : kUnits;  // units whose loads are in flight together
  uint32_t most = 0;
  Walk w = q.start();
#pragma unroll
  for (int u0 = 0; u0 < kUnits; u0 += kTogether) {
    Raw<kWide> x[kTogether], other[kTogether];
    Walk ahead = w;
#pragma unroll
    for (int u = 0; u < kTogether; u++, q.next(ahead))
      if (q.has(ahead)) q.load(x[u], other[u], ahead, false);
    if (u0 == 0) q.wait_vectors();
#pragma unroll
    for (int u = 0; u < kTogether; u++, q.next(w)) {
      if (!q.has(w)) continue;
      q.transform(v[u0 + u], x[u], other[u], w, false);
      most = max(most, largest(v[u0 + u], a.hadamard));
    }
  }
  q.offer_maximum(most);
#if __CUDA_ARCH__ < 900
  ptx::wait_copies<0>();
#endif
  q.meet();
  const auto scale = q.scale();
  const bool writes = q.rank == 0 && q.warp == shape.warps - 1;
  const float norm = a.norm && (writes || a.four) ? q.norm_factor() : 1.f;
  uint32_t h[kUnits][8];
  w = q.start();
#pragma unroll
  for (int u = 0; u < kUnits; u++, q.next(w))
    if (q.has(w)) q.finish(v[u], h[u], scale, norm, w);
  if (writes) q.store_scale(scale, norm);
  if (!a.rank) return;
  q.wait_down();
#pragma unroll 1
  for (int chunk = 0; chunk < a.rank / 16; chunk++) {
    float acc[4] = {0.f, 0.f, 0.f, 0.f};
    w = q.start();
#pragma unroll
    for (int u = 0; u < kUnits; u++, q.next(w)) {
      if (!q.has(w)) continue;
      q.multiply_down(acc, h[u], chunk, w);
      if (!q.ends(w)) continue;
      q.store_part(acc, chunk, w);
#pragma unroll
      for (int i = 0; i < 4; i++) acc[i] = 0.f;
    }
  }
  q.meet();
  if (q.rank == 0) q.store_low();
}

// Rows too long for that: the blocks are read and transformed once for the maximum and once more for the
// codes, and again for every four chunks of ranks.
template <bool kWide>
__global__ void __launch_bounds__(512) quantize_long_rows(const QuantizeArgs a, const Shape shape) {
  extern __shared__ uint4 raw_rows[];
  const Quantizer<kWide, kLong> q(a, shape, reinterpret_cast<uint8_t*>(raw_rows));
  begin(q);
  q.wait_vectors();
  float v[kUnit];
  Raw<kWide> x, other;
  uint32_t most = 0, h[8];
  for (Walk w = q.start(); q.has(w); q.next(w)) {
    q.load(x, other, w, false);
    q.transform(v, x, other, w, false);
    most = max(most, largest(v, a.hadamard));
  }
  q.offer_maximum(most);
#if __CUDA_ARCH__ < 900
  ptx::wait_copies<0>();
#endif
  q.meet();
  const auto scale = q.scale();
  const bool writes = q.rank == 0 && q.warp == shape.warps - 1;
  const float norm = a.norm && (writes || a.four) ? q.norm_factor() : 1.f;
  if (writes) q.store_scale(scale, norm);
  q.wait_down();
  const int chunks = a.rank / 16;
  for (int chunk = 0; chunk == 0 || chunk < chunks; chunk += 4) {
    float acc[4][4] = {};
    for (Walk w = q.start(); q.has(w); q.next(w)) {
      q.load(x, other, w, true);
      q.transform(v, x, other, w, true);
      q.finish(v, h, scale, norm, w);
#pragma unroll
      for (int c = 0; c < 4; c++) {
        if (chunk + c >= chunks) continue;
        q.multiply_down(acc[c], h, chunk + c, w);
        if (!q.ends(w)) continue;
        q.store_part(acc[c], chunk + c, w);
#pragma unroll
        for (int i = 0; i < 4; i++) acc[c][i] = 0.f;
      }
    }
  }
  if (!a.rank) return;
  q.meet();
  if (q.rank == 0) q.store_low();
}

struct Launch {
  const QuantizeArgs& a;
  Shape& shape;
  const Device& device;
  Stream stream;

  const char* run(const void* kernel, bool vectors, bool (&allowed)[kMostDevices]) const {
    Shape& s = shape;
    s.room = (s.slices + s.split - 1) / s.split * s.slice, s.staged = 0;
    s.place(a, vectors);
    if (s.bytes > device.shared)
      return "K: the vectors of a row and its low rank do not fit the shared memory";
    while (s.staged < a.rank / 16) {
      s.staged++, s.place(a, vectors);
      if (s.bytes <= device.shared) continue;
      s.staged--, s.place(a, vectors);
      break;
    }
    if (const char* wrong = allow_shared(kernel, device.shared, device, allowed)) return wrong;
    QuantizeArgs copy = a;
    void* args[] = {&copy, &s};
    return start(kernel, (a.m + kRows - 1) / kRows * s.split, s.warps * 32, s.bytes, s.split, device, stream,
                 args);
  }
  template <int kUnits, bool kWide, Kind kind>
  const char* rows() const {
    static bool allowed[kMostDevices];
    return run(reinterpret_cast<const void*>(quantize_rows<kUnits, kWide, kind>), true, allowed);
  }
  template <int kUnits>
  const char* rows() const {
    const bool wide = a.dtype == Dtype::kFloat32, simple = shape.split == 1 && shape.slice == 1;
    if (wide) return simple ? rows<kUnits, true, kSimple>() : rows<kUnits, true, kShared>();
    return simple ? rows<kUnits, false, kSimple>() : rows<kUnits, false, kShared>();
  }
  template <bool kWide>
  const char* long_rows() const {
    static bool allowed[kMostDevices];
    return run(reinterpret_cast<const void*>(quantize_long_rows<kWide>), false, allowed);
  }
};

const char* launch_quantize(const QuantizeArgs& a, const Device& d, Stream stream) {
  if (a.k > 32768) return "K: accepted is at most 32768";
  Shape s{};
  const int blocks = a.kp / kBlock, most = a.rank ? kPartBytes / (a.rank / 16 * 512) : blocks;
  s.slice = (blocks + most - 1) / most, s.slices = (blocks + s.slice - 1) / s.slice, s.split = 1;
  if (d.capability >= 90 && !a.four) {
    // A row in one CTA unless it is too long for its registers, or few rows would leave most multiprocessors
    // idle.
    const bool few = (a.m + kRows - 1) / kRows * 8 <= d.multiprocessors;
    if (blocks > 64 || (few && blocks > 32)) s.split = std::min({(blocks + 15) / 16, s.slices, 8});
  }
  const Launch launch{a, s, d, stream};
  const int slices = (s.slices + s.split - 1) / s.split;
  for (int units = 1; units <= 4; units *= 2) {
    const int warps = units == 1 ? 32 : units == 2 ? 24 : 16, each = units / s.slice;
    if (each == 0 || slices > warps * each) continue;
    s.warps = (slices + each - 1) / each;
    return units == 1 ? launch.rows<1>() : units == 2 ? launch.rows<2>() : launch.rows<4>();
  }
  s.warps = std::min(slices, 16);
  return a.dtype == Dtype::kFloat32 ? launch.long_rows<true>() : launch.long_rows<false>();
}

}  // namespace lowbit::cuda
