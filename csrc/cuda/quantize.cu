// Rows of x -> int8, with what stands before and beside it, in one read of x:
//
//   load (gate * silu, + residual) -> RMS norm -> / smooth -> Hadamard -> amax -> int8 codes, and fp16 of the same values
//   before rounding to integers -> . down (matrix instructions) -> fixed-order sum -> low
//
// A CTA takes up to 8 rows. A row belongs to `kThreads` neighbouring threads, a thread has units of 16 columns: four
// strides of the Hadamard are inside a thread, two between four lanes. Nothing depends on how many rows there are: sums
// run over units, and over eight slices of the columns, in one order, so a row of a batch has the bits of that row alone.
#include "launch.cuh"
#include "tile.cuh"

namespace lowbit::cuda {

constexpr int kUnit = 16, kSlices = 8, kRows = 8;
constexpr float kTiny = 0x1p-100f;  // a row below this is zero

LOWBIT_DEVICE float from_bf16(uint32_t half) { return __uint_as_float(half << 16); }

// 16 columns as float32.
LOWBIT_DEVICE void load_unit(float (&v)[kUnit], const void* x, size_t at, Dtype dtype) {
  if (dtype == Dtype::kFloat32) {
    const float4* p = reinterpret_cast<const float4*>(static_cast<const float*>(x) + at);
#pragma unroll
    for (int i = 0; i < 4; i++) {
      const float4 q = p[i];
      v[4 * i] = q.x, v[4 * i + 1] = q.y, v[4 * i + 2] = q.z, v[4 * i + 3] = q.w;
    }
    return;
  }
  const uint4* p = reinterpret_cast<const uint4*>(static_cast<const uint16_t*>(x) + at);
  const uint4 q[2] = {p[0], p[1]};
#pragma unroll
  for (int i = 0; i < 8; i++) {
    const uint32_t w = reinterpret_cast<const uint32_t*>(q)[i];
    if (dtype == Dtype::kBfloat16) {
      v[2 * i] = from_bf16(w & 0xFFFF), v[2 * i + 1] = __uint_as_float(w & 0xFFFF0000u);
    } else {
      const float2 f = half2_float2(w);
      v[2 * i] = f.x, v[2 * i + 1] = f.y;
    }
  }
}

// x += residual, rounded to the dtype; the rounded sum goes to the residual and is what goes on.
LOWBIT_DEVICE void add_residual(float (&v)[kUnit], void* residual, size_t at, Dtype dtype) {
  float r[kUnit];
  load_unit(r, residual, at, dtype);
#pragma unroll
  for (int i = 0; i < kUnit; i++) v[i] += r[i];
  if (dtype == Dtype::kFloat32) {
    float4* p = reinterpret_cast<float4*>(static_cast<float*>(residual) + at);
#pragma unroll
    for (int i = 0; i < 4; i++) p[i] = make_float4(v[4 * i], v[4 * i + 1], v[4 * i + 2], v[4 * i + 3]);
    return;
  }
  const bool bf16 = dtype == Dtype::kBfloat16;
  uint4 q[2];
#pragma unroll
  for (int i = 0; i < 8; i++) {
    const uint32_t w = pack2(v[2 * i], v[2 * i + 1], bf16);
    reinterpret_cast<uint32_t*>(q)[i] = w;
    const float2 f = bf16 ? make_float2(from_bf16(w & 0xFFFF), __uint_as_float(w & 0xFFFF0000u)) : half2_float2(w);
    v[2 * i] = f.x, v[2 * i + 1] = f.y;
  }
  uint4* p = reinterpret_cast<uint4*>(static_cast<uint16_t*>(residual) + at);
  p[0] = q[0], p[1] = q[1];
}

LOWBIT_DEVICE void gate(float (&v)[kUnit], const void* x, size_t at_up, Dtype dtype) {
  float up[kUnit];
  load_unit(up, x, at_up, dtype);
#pragma unroll
  for (int i = 0; i < kUnit; i++) v[i] = __fdividef(v[i], 1.f + __expf(-v[i])) * up[i];
}

LOWBIT_DEVICE void scale_unit(float (&v)[kUnit], const float* by, bool divide, float factor) {
  const float4* p = reinterpret_cast<const float4*>(by);
#pragma unroll
  for (int i = 0; i < 4; i++) {
    const float4 q = __ldg(p + i);
    const float s[4] = {q.x, q.y, q.z, q.w};
#pragma unroll
    for (int j = 0; j < 4; j++) v[4 * i + j] = divide ? __fdiv_rn(v[4 * i + j], s[j]) : (v[4 * i + j] * factor) * s[j];
  }
}

// H64 / 8: strides 1, 2, 4, 8 here, 16 and 32 with the lanes 1 and 2 away.
LOWBIT_DEVICE void hadamard(float (&v)[kUnit], int lane) {
#pragma unroll
  for (int stride = 1; stride < kUnit; stride *= 2) {
#pragma unroll
    for (int i = 0; i < kUnit; i++) {
      if (i & stride) continue;
      const float a = v[i], b = v[i + stride];
      v[i] = a + b, v[i + stride] = a - b;
    }
  }
#pragma unroll
  for (int to = 1; to < 4; to *= 2) {
    const float sign = lane & to ? -1.f : 1.f;
#pragma unroll
    for (int i = 0; i < kUnit; i++) {
      const float other = __shfl_xor_sync(~0u, v[i], to);
      v[i] = fmaf(sign, v[i], other);  // exact product: one rounding, as in a + b and a - b
    }
  }
#pragma unroll
  for (int i = 0; i < kUnit; i++) v[i] *= 0.125f;
}

// Sum over the units of a row in one order, whatever the number of threads.
LOWBIT_DEVICE float sum_units(const float* sums, int units, int lane) {
  float s = 0.f;
  for (int u = lane; u < units; u += 32) s += sums[u];
#pragma unroll
  for (int to = 16; to; to /= 2) s += __shfl_xor_sync(~0u, s, to);
  return s;
}

LOWBIT_DEVICE void store_codes(const float (&v)[kUnit], float factor, int8_t* row, int unit, bool tile_order) {
  uint32_t w[4];
#pragma unroll
  for (int i = 0; i < 4; i++) {
    int q[4];
#pragma unroll
    for (int j = 0; j < 4; j++) q[j] = __float2int_rn(v[4 * i + j] * factor);
    const uint32_t a = __byte_perm(q[0], q[1], 0x0040), b = __byte_perm(q[2], q[3], 0x0040);
    w[i] = __byte_perm(a, b, 0x5410);
  }
  if (!tile_order) {
    *reinterpret_cast<uint4*>(row + unit * kUnit) = make_uint4(w[0], w[1], w[2], w[3]);
    return;
  }
  uint32_t* to = reinterpret_cast<uint32_t*>(row + unit / 4 * 64) + unit % 4;
#pragma unroll
  for (int i = 0; i < 4; i++) to[4 * i] = w[i];  // slots (s, r) = (i / 2, i % 2)
}

// low = downT v for the rows of the CTA: v in fp16 in shared memory, [rows][kp + 8]. Slice by slice of the columns, then
// the slices in order.
LOWBIT_DEVICE void multiply_down(const QuantizeArgs& a, const __half* v, float* parts, int rows, int first_row) {
  const int warp = threadIdx.x >> 5, warps = blockDim.x >> 5, lane = threadIdx.x & 31, g = lane >> 2, t = lane & 3;
  const int steps = a.k / 16, chunks = a.rank / 16, stride = a.kp + 8, eights = (a.m + 7) / 8;
  const uint4* down = static_cast<const uint4*>(a.down);
  for (int task = warp; task < chunks * kSlices; task += warps) {
    const int chunk = task / kSlices, slice = task % kSlices;
    const int begin = steps * slice / kSlices, end = steps * (slice + 1) / kSlices;
    float c[4] = {0.f, 0.f, 0.f, 0.f};
    const __half* row = v + (g < rows ? g : 0) * stride + 2 * t;
    const uint4* from = down + (size_t)chunk * steps * 32 + lane;
#pragma unroll 8
    for (int s = begin; s < end; s++) {
      const uint4 d = __ldg(from + s * 32);
      const uint32_t b0 = *reinterpret_cast<const uint32_t*>(row + 16 * s);
      const uint32_t b1 = *reinterpret_cast<const uint32_t*>(row + 16 * s + 8);
      ptx::mma_f16(c, d, b0, b1);
    }
    float* out = parts + task * 128;  // [16 ranks][8 rows]
    out[g * 8 + 2 * t] = c[0], out[g * 8 + 2 * t + 1] = c[1];
    out[(g + 8) * 8 + 2 * t] = c[2], out[(g + 8) * 8 + 2 * t + 1] = c[3];
  }
  __syncthreads();
  for (int i = threadIdx.x; i < chunks * 8 * rows; i += blockDim.x) {  // a pair of ranks of a row
    const int r = i % (chunks * 8) * 2, row = i / (chunks * 8), m = first_row + row;
    if (m >= a.m) continue;
    const float* p = parts + (r / 16) * kSlices * 128 + (r % 16) * 8 + row;
    float lo = 0.f, hi = 0.f;
#pragma unroll
    for (int s = 0; s < kSlices; s++) lo += p[s * 128], hi += p[s * 128 + 8];
    uint32_t* to = static_cast<uint32_t*>(a.low) + ((size_t)(r / 16) * eights + m / 8) * 64;
    to[((m % 8) * 4 + (r % 8) / 2) * 2 + (r % 16) / 8] = pack2(lo, hi, false);
  }
}

// kUnits: units a thread. Shared memory: fp16 rows [rows][kp + 8] | parts | unit sums or per-warp maxima.
template <int kUnits, int kThreads>
__global__ void __launch_bounds__(512, 1) quantize_rows(const QuantizeArgs a, int rows) {
  extern __shared__ float4 raw[];
  const int chunks = a.rank / 16, stride = a.kp + 8, units = a.k / kUnit, all_units = a.kp / kUnit;
  __half* halves = reinterpret_cast<__half*>(raw);
  float* parts = reinterpret_cast<float*>(halves + (chunks ? rows * stride : 0));
  float* sums = parts + chunks * kSlices * 128;
  uint32_t* maxima = reinterpret_cast<uint32_t*>(sums + (a.norm ? rows * units : 0));
  const int row = threadIdx.x / kThreads, lane = threadIdx.x & 31, r = threadIdx.x % kThreads;
  const int first_row = blockIdx.x * rows, m = first_row + row;
  const bool live = m < a.m;
  ptx::previous_grid();
  ptx::let_next_grid_start();  // only now: what the next kernel reads early was complete before this one

  float v[kUnits][kUnit];
#pragma unroll
  for (int u = 0; u < kUnits; u++) {
    const int unit = u * kThreads + r;
    if (live && unit < units) {
      load_unit(v[u], a.x, (size_t)m * a.k * (a.silu ? 2 : 1) + unit * kUnit, a.dtype);
    } else {
#pragma unroll
      for (int i = 0; i < kUnit; i++) v[u][i] = 0.f;
    }
  }
#pragma unroll
  for (int u = 0; u < kUnits; u++) {
    const int unit = u * kThreads + r;
    if (!live || unit >= units) continue;
    if (a.silu) gate(v[u], a.x, (size_t)m * a.k * 2 + a.k + unit * kUnit, a.dtype);
    if (a.residual) add_residual(v[u], a.residual, (size_t)m * a.k + unit * kUnit, a.dtype);
  }
  if (a.norm) {
#pragma unroll
    for (int u = 0; u < kUnits; u++) {
      float s = 0.f;
#pragma unroll
      for (int i = 0; i < kUnit; i++) s = fmaf(v[u][i], v[u][i], s);
      const int unit = u * kThreads + r;
      if (unit < units) sums[row * units + unit] = s;
    }
    __syncthreads();
    const float mean = sum_units(sums + row * units, units, lane) / a.k;
    const float factor = 1.f / sqrtf(mean + a.eps);
#pragma unroll
    for (int u = 0; u < kUnits; u++) {
      const int unit = u * kThreads + r;
      if (unit < units) scale_unit(v[u], a.norm + unit * kUnit, false, factor);
    }
  }
  uint32_t most = 0;  // bits of |v|: NaN is above infinity is above all
#pragma unroll
  for (int u = 0; u < kUnits; u++) {
    const int unit = u * kThreads + r;
    if (a.smooth && unit < units) scale_unit(v[u], a.smooth + unit * kUnit, true, 1.f);
    if (a.hadamard) hadamard(v[u], lane);
#pragma unroll
    for (int i = 0; i < kUnit; i++) most = max(most, __float_as_uint(v[u][i]) & 0x7FFFFFFFu);
  }
  most = __reduce_max_sync(~0u, most);
  constexpr int kWarps = kThreads / 32;
  if (lane == 0) maxima[threadIdx.x / 32] = most;
  __syncthreads();
#pragma unroll
  for (int w = 0; w < kWarps; w++) most = max(most, maxima[row * kWarps + w]);
  const float amax = __uint_as_float(most);
  const bool usable = amax >= kTiny && most < 0x7F800000u;
  const float factor = usable ? __fdiv_rn(127.f, amax) : 0.f;
  if (live && r == 0) a.scales[m] = amax < kTiny ? 0.f : __fdiv_rn(amax, 127.f);
#pragma unroll
  for (int u = 0; u < kUnits; u++) {
    const int unit = u * kThreads + r;
    if (unit >= all_units) continue;
    if (!usable) {
#pragma unroll
      for (int i = 0; i < kUnit; i++) v[u][i] = 0.f;
    }
    if (live) store_codes(v[u], factor, a.codes + (size_t)m * a.kp, unit, a.tile_order);
    if (chunks) {
      uint32_t h[8];
#pragma unroll
      for (int i = 0; i < 8; i++) h[i] = pack2(v[u][2 * i] * factor, v[u][2 * i + 1] * factor, false);
      uint4* to = reinterpret_cast<uint4*>(halves + row * stride + unit * kUnit);
      to[0] = make_uint4(h[0], h[1], h[2], h[3]), to[1] = make_uint4(h[4], h[5], h[6], h[7]);
    }
  }
  if (!chunks) return;
  __syncthreads();
  multiply_down(a, halves, parts, rows, first_row);
}

template <int kUnits, int kThreads>
static const char* launch(const QuantizeArgs& a, const Device& device, Stream stream) {
  const void* kernel = reinterpret_cast<const void*>(quantize_rows<kUnits, kThreads>);
  constexpr int kMost = 512 / kThreads < kRows ? 512 / kThreads : kRows;
  int rows = (a.m + device.multiprocessors - 1) / device.multiprocessors;
  if (rows > kMost) rows = kMost;
  const auto bytes = [&](int rows) {
    return (a.rank ? rows * (a.kp + 8) * 2 + a.rank / 16 * kSlices * 512 : 0) + (a.norm ? rows * (a.k / kUnit) * 4 : 0) +
           rows * (kThreads / 32) * 4 + 16;
  };
  while (rows > 1 && bytes(rows) > device.shared) rows--;
  if (bytes(rows) > device.shared) return "K: one row with its low rank does not fit the shared memory";
  static bool allowed[kMostDevices];
  if (const char* wrong = allow_shared(kernel, device.shared, device, allowed)) return wrong;
  QuantizeArgs copy = a;
  void* args[] = {&copy, &rows};
  return start(kernel, (a.m + rows - 1) / rows, rows * kThreads, bytes(rows), 1, device,
               stream, args);
}

const char* launch_quantize(const QuantizeArgs& a, const Device& d, Stream s) {
  const int units = (a.kp + kUnit - 1) / kUnit;
  if (a.m <= 32 && units > 64 && units <= 256) return launch<1, 256>(a, d, s);  // few rows: more threads for each
  if (units <= 64) return launch<1, 64>(a, d, s);
  if (units <= 128) return launch<2, 64>(a, d, s);
  if (units <= 192) return launch<3, 64>(a, d, s);
  if (units <= 256) return launch<4, 64>(a, d, s);
  if (units <= 512) return launch<2, 256>(a, d, s);
  if (units <= 768) return launch<3, 256>(a, d, s);
  if (units <= 1024) return launch<4, 256>(a, d, s);
  if (units <= 2048) return launch<4, 512>(a, d, s);
  return "K: accepted is at most 32768";
}

}  // namespace lowbit::cuda
