// Rows of x -> int8, with what stands before and beside it, in one read of x:
//
//   load (gate * silu, + residual) -> * norm weight -> / smooth -> Hadamard -> amax -> int8 codes, and fp16
//   of the same values before rounding to integers -> . down (matrix instructions) -> fixed-order sum -> low
//
// The factor of an RMS norm changes no code: it only multiplies the row's scale, so its sum is off the path.
// A CTA takes up to 8 rows. A row belongs to `kThreads` neighbouring threads, a thread has units of 16
// columns: four strides of the Hadamard are inside a thread, two between four lanes. Everything is asked for
// before anything is used: down goes to shared memory meanwhile. Nothing depends on how many rows there are:
// sums run over units, and over eight slices of the columns, in one order, so a row of a batch has the bits
// of that row alone. Few rows, sm_90: a cluster of 8 CTAs a row, each with one slice of down; the first one
// writes.
#include "launch.cuh"
#include "quantize_row.cuh"

namespace lowbit::cuda {

constexpr int kSlices = 8;

struct Whole {  // 16 columns as they lie in memory; fp16 and bf16 use the first half
  uint4 q[4];
};
LOWBIT_DEVICE void fetch(Whole& r, const void* x, size_t at, Dtype dtype) {
  if (dtype == Dtype::kFloat32) {
    const uint4* p = reinterpret_cast<const uint4*>(static_cast<const float*>(x) + at);
#pragma unroll
    for (int i = 0; i < 4; i++) r.q[i] = p[i];
  } else {
    const uint4* p = reinterpret_cast<const uint4*>(static_cast<const uint16_t*>(x) + at);
    r.q[0] = p[0], r.q[1] = p[1];
  }
}
LOWBIT_DEVICE void to_floats(float (&v)[kUnit], const Whole& r, Dtype dtype) {
  const uint32_t* w = reinterpret_cast<const uint32_t*>(r.q);
  if (dtype == Dtype::kFloat32) {
#pragma unroll
    for (int i = 0; i < kUnit; i++) v[i] = __uint_as_float(w[i]);
  } else {
    const bool bf16 = dtype == Dtype::kBfloat16;
#pragma unroll
    for (int i = 0; i < 8; i++) {
      const float2 f = widen(w[i], bf16);
      v[2 * i] = f.x, v[2 * i + 1] = f.y;
    }
  }
}

// v += what was fetched, rounded to the dtype; the rounded sum goes back and is what goes on.
LOWBIT_DEVICE void add_residual(float (&v)[kUnit], const Whole& r, void* residual, size_t at, Dtype dtype) {
  float old[kUnit];
  to_floats(old, r, dtype);
#pragma unroll
  for (int i = 0; i < kUnit; i++) v[i] += old[i];
  if (dtype == Dtype::kFloat32) {
    float4* p = reinterpret_cast<float4*>(static_cast<float*>(residual) + at);
#pragma unroll
    for (int i = 0; i < 4; i++) p[i] = make_float4(v[4 * i], v[4 * i + 1], v[4 * i + 2], v[4 * i + 3]);
    return;
  }
  const bool bf16 = dtype == Dtype::kBfloat16;
  uint32_t w[8];
#pragma unroll
  for (int i = 0; i < 8; i++) {
    w[i] = pack2(v[2 * i], v[2 * i + 1], bf16);
    const float2 f = widen(w[i], bf16);
    v[2 * i] = f.x, v[2 * i + 1] = f.y;
  }
  uint4* p = reinterpret_cast<uint4*>(static_cast<uint16_t*>(residual) + at);
  p[0] = make_uint4(w[0], w[1], w[2], w[3]), p[1] = make_uint4(w[4], w[5], w[6], w[7]);
}

// Sum over the units of a row in one order, whatever the number of threads.
LOWBIT_DEVICE float sum_units(const float* sums, int units, int lane) {
  float s = 0.f;
  for (int u = lane; u < units; u += 32) s += sums[u];
#pragma unroll
  for (int to = 16; to; to /= 2) s += __shfl_xor_sync(~0u, s, to);
  return s;
}

struct Shape {       // of a launch
  int rows;          // a CTA
  int split;         // CTAs of a cluster that share the slices
  int staged;        // chunks of 16 ranks whose down is in shared memory
  bool reciprocals;  // of smooth are in shared memory too
};

// Matrix instructions for a row: 16 columns each, whole blocks of 64.
__host__ __device__ inline int steps_of_row(const QuantizeArgs& a) { return (a.k + 63) / 64 * 4; }
LOWBIT_DEVICE int slice_begin(const QuantizeArgs& a, int slice) { return steps_of_row(a) * slice / kSlices; }

LOWBIT_DEVICE void stage_vector(float* to, const float* from, int k) {
  for (int i = threadIdx.x; i < k / 4; i += blockDim.x) ptx::copy16(ptx::shared(to + 4 * i), from + 4 * i);
}
// Asks for this CTA's slices of the staged chunks; they lie one behind the other.
LOWBIT_DEVICE void stage_down(const QuantizeArgs& a, const Shape& shape, uint4* to, int rank) {
  const int per = kSlices / shape.split, begin = slice_begin(a, rank * per),
            steps = slice_begin(a, (rank + 1) * per) - begin;
  const uint4* down = static_cast<const uint4*>(a.down);
  for (int c = 0; c < shape.staged; c++)
    for (int i = threadIdx.x; i < steps * 32; i += blockDim.x)
      ptx::copy16(ptx::shared(to + c * steps * 32 + i),
                  down + ((size_t)c * steps_of_row(a) + begin) * 32 + i);
  asm volatile("cp.async.commit_group;" ::: "memory");
}

// low = downT v for the rows of the CTA: v in fp16 in shared memory, [rows][kp + 8]. Slice by slice of the
// columns, then the slices in order. parts [chunk][slice][16 ranks][8 rows].
LOWBIT_DEVICE void multiply_down(const QuantizeArgs& a, const Shape& shape, const uint4* staged,
                                 const __half* v, float* parts, int first_row, int rank) {
  const int warp = threadIdx.x >> 5, warps = blockDim.x >> 5, lane = threadIdx.x & 31, g = lane >> 2,
            t = lane & 3;
  const int chunks = a.rank / 16, stride = a.kp + 8, eights = (a.m + 7) / 8, per = kSlices / shape.split;
  const int origin = slice_begin(a, rank * per), mine = slice_begin(a, (rank + 1) * per) - origin;
  for (int task = warp; task < chunks * per; task += warps) {
    const int chunk = task / per, slice = rank * per + task % per, begin = slice_begin(a, slice);
    const int steps = slice_begin(a, slice + 1) - begin;
    float c[4] = {0.f, 0.f, 0.f, 0.f};
    const __half* row = v + (g < shape.rows ? g : 0) * stride + 16 * t;
    auto step = [&](const uint4& d, int s) {  // 16 of 64 columns: 4 of each 16
      const int all = begin + s;
      const uint2 b = *reinterpret_cast<const uint2*>(row + all / 4 * 64 + all % 4 * 4);
      ptx::mma_f16(c, d, b.x, b.y);
    };
    if (chunk < shape.staged) {
      const uint4* from = staged + (chunk * mine + begin - origin) * 32 + lane;
#pragma unroll 4
      for (int s = 0; s < steps; s++) step(from[s * 32], s);
    } else {
      const uint4* from =
          static_cast<const uint4*>(a.down) + ((size_t)chunk * steps_of_row(a) + begin) * 32 + lane;
#pragma unroll 8
      for (int s = 0; s < steps; s++) step(__ldg(from + s * 32), s);
    }
    float* out = parts + (chunk * kSlices + slice) * 128;
    const int at[4] = {g * 8 + 2 * t, g * 8 + 2 * t + 1, (g + 8) * 8 + 2 * t, (g + 8) * 8 + 2 * t + 1};
#pragma unroll
    for (int i = 0; i < 4; i++) {
#if __CUDA_ARCH__ >= 900
      if (shape.split > 1) {
        asm volatile("st.shared::cluster.f32 [%0], %1;" ::"r"(ptx::in_cta(ptx::shared(out + at[i]), 0)),
                     "f"(c[i])
                     : "memory");
        continue;
      }
#endif
      out[at[i]] = c[i];
    }
  }
#if __CUDA_ARCH__ >= 900
  if (shape.split > 1) {
    ptx::cluster_arrive();
    ptx::cluster_wait();
    if (rank) return;
  }
#endif
  __syncthreads();
  for (int i = threadIdx.x; i < chunks * 8 * shape.rows; i += blockDim.x) {  // a pair of ranks of a row
    const int r = i % (chunks * 8) * 2, row = i / (chunks * 8), m = first_row + row;
    if (m >= a.m) continue;
    const float* p = parts + (r / 16) * kSlices * 128 + (r % 16) * 8 + row;
    float lo = 0.f, hi = 0.f;
#pragma unroll
    for (int s = 0; s < kSlices; s++) lo += p[s * 128], hi += p[s * 128 + 8];
    uint32_t* to = static_cast<uint32_t*>(a.low) + ((size_t)(r / 16) * eights + m / 8) * 64;
    to[(r % 16) / 8 * 32 + (m % 8) * 4 + (r % 8) / 2] = pack2(lo, hi, false);
  }
}

// kUnits: units a thread. Shared memory: staged down | fp16 rows [rows][kp + 8] | parts | unit sums | maxima
// a warp. With one unit a thread, 7 rows of 64 threads: two such CTAs fit the registers of a multiprocessor.
constexpr int most_threads(int units) { return units == 1 ? 448 : 512; }

template <int kUnits, int kThreads>
__global__ void __launch_bounds__(most_threads(kUnits), kUnits == 1 ? 2 : 1)
    quantize_rows(const QuantizeArgs a, const Shape shape) {
  extern __shared__ uint4 raw_rows[];
  const int chunks = a.rank / 16, stride = a.kp + 8, units = a.k / kUnit, all_units = a.kp / kUnit;
  const int rank = shape.split > 1 ? blockIdx.x % shape.split : 0, per = kSlices / shape.split;
  uint4* staged = raw_rows;
  // Slices differ by a step at most; every CTA takes the room of the largest, so that parts lie alike in a
  // cluster.
  const int room = (steps_of_row(a) * per + kSlices - 1) / kSlices + 1;
  __half* halves = reinterpret_cast<__half*>(staged + shape.staged * room * 32);
  float* parts = reinterpret_cast<float*>(halves + (chunks ? shape.rows * stride : 0));
  float* norms = parts + chunks * kSlices * 128;
  float* smooths = norms + (a.norm ? a.k : 0);
  float* sums = smooths + (a.smooth ? (shape.reciprocals ? 2 : 1) * a.k : 0);
  uint32_t* maxima = reinterpret_cast<uint32_t*>(sums + (a.norm ? shape.rows * units : 0));
  const int row = threadIdx.x / kThreads, lane = threadIdx.x & 31, r = threadIdx.x % kThreads;
  const int first_row = blockIdx.x / shape.split * shape.rows, m = first_row + row;
  const bool live = m < a.m;
#if __CUDA_ARCH__ >= 900
  if (shape.split > 1) ptx::cluster_arrive();  // waited for before the first CTA's memory is written
#endif
  if (a.norm) stage_vector(norms, a.norm, a.k);
  if (a.smooth) stage_vector(smooths, a.smooth, (shape.reciprocals ? 2 : 1) * a.k);
  asm volatile("cp.async.commit_group;" ::: "memory");
  if (chunks)
    stage_down(a, shape, staged, rank);
  else
    asm volatile("cp.async.commit_group;" ::: "memory");
  ptx::previous_grid();
  ptx::let_next_grid_start();  // only now: what the next kernel reads early was complete before this one

  float v[kUnits][kUnit];
  constexpr int kTogether = kUnits == 4 ? 1 : kUnits;  // units whose loads are in flight together: registers
  const size_t first = (size_t)m * a.k * (a.silu ? 2 : 1), beside = a.silu ? first + a.k : (size_t)m * a.k;
  const void* second = a.silu ? a.x : a.residual;
#pragma unroll
  for (int u0 = 0; u0 < kUnits; u0 += kTogether) {
    Whole x[kTogether], other[kTogether];
#pragma unroll
    for (int u = 0; u < kTogether; u++) {
      const int unit = (u0 + u) * kThreads + r;
      if (!live || unit >= units) continue;
      fetch(x[u], a.x, first + unit * kUnit, a.dtype);
      if (second) fetch(other[u], second, beside + unit * kUnit, a.dtype);
    }
    if (u0 == 0 && (a.norm || a.smooth)) {
      asm volatile("cp.async.wait_group 1;" ::: "memory");
      __syncthreads();
    }
#pragma unroll
    for (int u = 0; u < kTogether; u++) {
      const int unit = (u0 + u) * kThreads + r;
      float (&w)[kUnit] = v[u0 + u];
      if (!live || unit >= units) {
#pragma unroll
        for (int i = 0; i < kUnit; i++) w[i] = 0.f;
        continue;
      }
      to_floats(w, x[u], a.dtype);
      if (a.silu) {
        float up[kUnit];
        to_floats(up, other[u], a.dtype);
        gate(w, up);
      }
      if (!a.silu && a.residual)
        add_residual(w, other[u], a.residual, (size_t)m * a.k + unit * kUnit, a.dtype);
      if (a.norm) {
        float s = 0.f;
#pragma unroll
        for (int i = 0; i < kUnit; i++) s = fmaf(w[i], w[i], s);
        sums[row * units + unit] = s;
        multiply(w, norms + unit * kUnit);
      }
      if (a.smooth) {
        divide(w, smooths + unit * kUnit,
               shape.reciprocals ? smooths + a.k + unit * kUnit : a.smooth + a.k + unit * kUnit);
      }
    }
  }
  uint32_t most = 0;
#pragma unroll
  for (int u = 0; u < kUnits; u++) {
    if (a.hadamard) hadamard(v[u], lane);
    most = max(most, largest(v[u], a.hadamard));
  }
  most = __reduce_max_sync(~0u, most);
  constexpr int kWarps = kThreads / 32;
  if (lane == 0) maxima[threadIdx.x / 32] = most;
  __syncthreads();
#pragma unroll
  for (int w = 0; w < kWarps; w++) most = max(most, maxima[row * kWarps + w]);
  const float size = __uint_as_float(most), eighth = a.hadamard ? 0.125f : 1.f;
  float norm = 1.f;
  if (a.norm && (r < 32 || a.four))
    norm = 1.f / sqrtf(sum_units(sums + row * units, units, lane) / a.k + a.eps);
  const float amax = size * eighth;  // before the norm's factor
  const bool usable = amax >= kTiny && most < 0x7F800000u;
  const float factor = usable ? __fdiv_rn(127.f, amax) * eighth : 0.f;
  if (live && r == 0 && rank == 0) a.scales[m] = amax < kTiny ? 0.f : __fdiv_rn(amax, 127.f) * norm;
#pragma unroll
  for (int u = 0; u < kUnits; u++) {
    const int unit = u * kThreads + r;
    if (a.four) store_four(a, v[u], rank == 0 ? m : a.m, unit * kUnit, eighth, norm);
    if (unit >= all_units) continue;
#pragma unroll
    for (int i = 0; i < kUnit; i++) v[u][i] = usable ? v[u][i] * factor : 0.f;
    if (chunks) {
      uint32_t h[8];
#pragma unroll
      for (int i = 0; i < 8; i++) h[i] = pack2(v[u][2 * i], v[u][2 * i + 1], false);
      uint4* to = reinterpret_cast<uint4*>(halves + row * stride + unit * kUnit);
      to[0] = make_uint4(h[0], h[1], h[2], h[3]), to[1] = make_uint4(h[4], h[5], h[6], h[7]);
    }
    if (live && rank == 0 && !a.four)
      store_unit(v[u],
                 a.codes + (size_t)m * a.kp + (a.tile_order ? unit / 4 * 64 + unit % 4 * 4 : unit * kUnit),
                 a.tile_order);
  }
  if (!chunks) return;
  asm volatile("cp.async.wait_all;" ::: "memory");
#if __CUDA_ARCH__ >= 900
  if (shape.split > 1) ptx::cluster_wait();
#endif
  __syncthreads();
  multiply_down(a, shape, staged, halves, parts, first_row, rank);
}

template <int kUnits, int kThreads>
static const char* launch(const QuantizeArgs& a, const Device& device, Stream stream) {
  const void* kernel = reinterpret_cast<const void*>(quantize_rows<kUnits, kThreads>);
  constexpr int kMost = most_threads(kUnits) / kThreads < kRows ? most_threads(kUnits) / kThreads : kRows;
  Shape shape{(a.m + device.multiprocessors - 1) / device.multiprocessors, 1, 0};
  if (shape.rows > kMost) shape.rows = kMost;
  if (a.rank && a.m <= 16 && device.capability >= 90) shape.split = kSlices, shape.rows = 1;
  const int room =
      ((steps_of_row(a) * (kSlices / shape.split) + kSlices - 1) / kSlices + 1) * 512;  // bytes a chunk
  const auto bytes = [&] {
    return shape.staged * room + (a.rank ? shape.rows * (a.kp + 8) * 2 + a.rank / 16 * kSlices * 512 : 0) +
           (a.norm ? (shape.rows * (a.k / kUnit) + a.k) * 4 : 0) +
           (a.smooth ? a.k * (shape.reciprocals ? 8 : 4) : 0) + shape.rows * (kThreads / 32) * 4 + 16;
  };
  shape.reciprocals = true;
  while (shape.rows > 1 && bytes() > device.shared) shape.rows--;
  if (bytes() > device.shared) shape.reciprocals = false;
  if (bytes() > device.shared) return "K: one row with its low rank does not fit the shared memory";
  while (shape.staged < a.rank / 16) {
    shape.staged++;
    if (bytes() > device.shared) {
      shape.staged--;
      break;
    }
  }
  static bool allowed[kMostDevices];
  if (const char* wrong = allow_shared(kernel, device.shared, device, allowed)) return wrong;
  QuantizeArgs copy = a;
  void* args[] = {&copy, &shape};
  return start(kernel, (a.m + shape.rows - 1) / shape.rows * shape.split, shape.rows * kThreads, bytes(),
               shape.split, device, stream, args);
}

const char* launch_quantize(const QuantizeArgs& a, const Device& d, Stream s) {
  const char* wrong = nullptr;
  if (launch_quantize_plain(a, d, s, &wrong) || launch_quantize_short(a, d, s, &wrong)) return wrong;
  const int units = (a.kp + kUnit - 1) / kUnit;
  if (a.m <= 32 && units > 64 && units <= 256)
    return launch<1, 256>(a, d, s);  // few rows: more threads for each
  if (units <= 64) return launch<1, 64>(a, d, s);
  if (units <= 128) return launch<2, 64>(a, d, s);
  if (units <= 192) return launch<3, 64>(a, d, s);
  if (units <= 256) return launch<4, 64>(a, d, s);
  if (units <= 512) return launch<2, 256>(a, d, s);
  if (units <= 1024) return launch<4, 256>(a, d, s);
  if (units <= 2048) return launch<4, 512>(a, d, s);
  return "K: accepted is at most 32768";
}

}  // namespace lowbit::cuda
