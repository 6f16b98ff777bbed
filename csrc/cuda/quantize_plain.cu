// Rows of x -> int8 as quantize.cu draws it, where nothing stands beside it but a residual and a norm: Hopper
// and newer, fp16 or bf16, up to 3072 columns, in the bits of quantize_short.cu. Without matrix instructions
// of eight rows a row needs nobody else:
//
//   a warp: 1024 columns of a row, two units of 16 a lane     a row: up to three warps, which meet once, for
//   a CTA:  four rows                                         its maximum
//
// so that 685 rows are 172 CTAs on every multiprocessor, where groups of eight are 86. What bounds it is L2.
#include "launch.cuh"
#include "quantize_row.cuh"

namespace lowbit::cuda {

constexpr int kCtaRows = 4, kUnits = 2, kMostParts = 3, kPartColumns = kUnits * 32 * kUnit;

template <bool norm, bool bf16>
__global__ void __launch_bounds__(kCtaRows * kMostParts * 32)
    quantize_plain(const QuantizeArgs a, int parts) {
  __shared__ uint32_t maxima[kCtaRows][kMostParts];
  __shared__ float sums[kCtaRows][kMostParts * kPartColumns / kBlock];  // of squares, a block each
  __shared__ __align__(16) uint8_t swap[kCtaRows * kMostParts][kUnits * 8 * kCodeRow];
  const int warp = threadIdx.x >> 5, lane = threadIdx.x & 31, t = lane & 3;
  const int own = warp / parts, part = warp - own * parts, m = blockIdx.x * kCtaRows + own;
  const int column = part * kPartColumns + lane * kUnit;
  const auto inside = [&](int u) { return column + u * 32 * kUnit < a.k; };
  float weight[kUnits][kUnit];
#pragma unroll
  for (int u = 0; u < kUnits; u++) {
#pragma unroll
    for (int i = 0; i < 4; i++) {
      const float4 q = norm && inside(u)
                           ? reinterpret_cast<const float4*>(a.norm + column + u * 32 * kUnit)[i]
                           : make_float4(0.f, 0.f, 0.f, 0.f);
      weight[u][4 * i] = q.x, weight[u][4 * i + 1] = q.y, weight[u][4 * i + 2] = q.z,
                    weight[u][4 * i + 3] = q.w;
    }
  }
  ptx::previous_grid();
  ptx::let_next_grid_start();  // only now: what the next kernel reads early was complete before this one
  if (m >= a.m) return;        // with all warps of the row
  const uint16_t* x = static_cast<const uint16_t*>(a.x) + (size_t)m * a.k + column;
  uint16_t* residual = static_cast<uint16_t*>(a.residual) + (size_t)m * a.k + column;
  Raw<false> in[kUnits], other[kUnits];
#pragma unroll
  for (int u = 0; u < kUnits; u++) {
    in[u].q[0] = in[u].q[1] = other[u].q[0] = other[u].q[1] = make_uint4(0, 0, 0, 0);
    if (!inside(u)) continue;
    fetch(in[u], x, u * 32 * kUnit);
    if (norm && a.residual) fetch(other[u], residual, u * 32 * kUnit);
  }
  float v[kUnits][kUnit];
  uint32_t most = 0;
#pragma unroll
  for (int u = 0; u < kUnits; u++) {
    if (norm && a.residual) {
      add(in[u], other[u], bf16);
      if (inside(u)) put(residual, u * 32 * kUnit, in[u]);
    }
    to_floats(v[u], in[u], bf16);
    if (norm) {
      const float squares = sum_of_squares(v[u]);
      if (t == 0) sums[own][(part * kUnits + u) * 8 + lane / 4] = squares;
#pragma unroll
      for (int i = 0; i < kUnit; i++) v[u][i] *= weight[u][i];
    }
    most = max(most, largest(v[u]));
  }
  most = __reduce_max_sync(~0u, most);
  if (parts > 1) {
    if (lane == 0) maxima[own][part] = most;
    ptx::named_barrier(1 + own, parts * 32);
    most = max(maxima[own][0], maxima[own][1]);
    if (parts > 2) most = max(most, maxima[own][2]);
  }
  const float amax = __uint_as_float(most);
  const bool usable = amax >= kTiny && most < 0x7F800000u;
  const float factor = usable ? __fdiv_rn(127.f, amax) : 0.f;
#pragma unroll
  for (int u = 0; u < kUnits; u++) {
#pragma unroll
    for (int i = 0; i < kUnit; i++) v[u][i] = usable ? v[u][i] * factor : 0.f;
    uint32_t w[4];
    codes_of(v[u], w);
    uint4 q = make_uint4(w[0], w[1], w[2], w[3]);
    if (a.tile_order) q = in_tile_order(w, ptx::shared(swap[warp]) + (u * 8 + lane / 4) * kCodeRow, t);
    const int to = column + u * 32 * kUnit;
    if (to < a.kp) *reinterpret_cast<uint4*>(a.codes + (size_t)m * a.kp + to) = q;
  }
  if (part) return;
  float scale = 1.f;
  if (norm) {  // the factor of the norm is in no code
    __syncwarp();
    scale = inverse_rms(sums[own], 1, (a.k + kBlock - 1) / kBlock, t, a.k, a.eps);
  }
  if (lane == 0) a.scales[m] = amax < kTiny ? 0.f : __fdiv_rn(amax, 127.f) * scale;
}

// False where another kernel has to do it, or does it faster. Measured on an H200, 2026-11-30, this one and
// quantize_short.cu in us: 1024 columns with norm 1.71 and 1.88 (172 rows), 2.32 and 2.42 (685), 3.61
// and 4.44 (1890); 3072 columns 1.62 and 1.46 (16 rows), 1.76 and 1.71, 2.58 and 2.78, 4.23 and 4.96; behind
// a Hadamard, 3072 columns, 3.55 and 3.36 (685).
bool launch_quantize_plain(const QuantizeArgs& a, const Device& d, Stream stream, const char** wrong) {
  if (d.capability < 90 || a.four || a.silu || a.smooth || a.hadamard || a.rank) return false;
  if (a.dtype == Dtype::kFloat32 || a.k > kMostParts * kPartColumns || (a.residual && !a.norm)) return false;
  if (a.k > kPartColumns && a.m < 256) return false;
  static const void* const kernels[2][2] = {{reinterpret_cast<const void*>(quantize_plain<false, false>),
                                             reinterpret_cast<const void*>(quantize_plain<false, true>)},
                                            {reinterpret_cast<const void*>(quantize_plain<true, false>),
                                             reinterpret_cast<const void*>(quantize_plain<true, true>)}};
  QuantizeArgs copy = a;
  int parts = (a.kp + kPartColumns - 1) / kPartColumns;
  void* args[] = {&copy, &parts};
  *wrong = start(kernels[a.norm != nullptr][a.dtype == Dtype::kBfloat16], (a.m + kCtaRows - 1) / kCtaRows,
                 kCtaRows * parts * 32, 0, 1, d, stream, args);
  return true;
}

}  // namespace lowbit::cuda
