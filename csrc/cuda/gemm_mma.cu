// The linear layer on every chip from sm_80 on, also on those newer than Hopper: the tiles of tile.cuh with
// warp-wide int8 matrix instructions (m16n8k32).
//
// A CTA is 128 channels x `kTokens` rows of x, 8 warps: 4 along the channels (32 each), 2 along the rows.
// Blocks of 128 columns come through three stages of shared memory (cp.async); a block of x is [rows][128 B],
// 16-byte chunk c of row r at c ^ (r & 7). Load -> unpack -> multiply -> low rank -> scale -> through shared
// memory -> store.
#include "launch.cuh"
#include "tile.cuh"

namespace lowbit::cuda {

constexpr int kChannels = 128, kStages = 3, kThreads = 256;

template <Mode mode, int kTokens>
struct Block {
  static constexpr int x_bytes = kTokens * 128, stage = x_bytes + 2 * tile_bytes(mode), eights = kTokens / 16;
  static constexpr int out_stride = kChannels + 4;  // floats or, twice as many, halves
  static constexpr int out_bytes = kTokens * out_stride * 4;
  static constexpr int shared = kStages * stage > out_bytes ? kStages * stage : out_bytes;
};

template <Mode mode, int kTokens>
__device__ __forceinline__ void load_block(const LinearArgs& a, uint32_t to, int block, int n_tile, int m0) {
  using B = Block<mode, kTokens>;
#pragma unroll
  for (int i = threadIdx.x; i < kTokens * 8; i += kThreads) {
    const int row = i / 8, c = i % 8, m = m0 + row;
    ptx::copy16(to + row * 128 + ((c ^ (row & 7)) * 16),
                a.codes + (size_t)min(m, a.m - 1) * a.kp + block * 128 + c * 16, m < a.m);
  }
  const int blocks = a.kp / 128;
#pragma unroll
  for (int h = 0; h < 2; h++) {
    const bool there = n_tile + h < a.np / 64;
    const uint8_t* from =
        a.weight + ((size_t)(there ? n_tile + h : n_tile) * blocks + block) * tile_bytes(mode);
    for (int i = threadIdx.x; i < tile_bytes(mode) / 16; i += kThreads)
      ptx::copy16(to + B::x_bytes + h * tile_bytes(mode) + i * 16, from + i * 16, there);
  }
}

// The A operands of both k32 steps of a half (64 columns), 16 channels.
template <Mode mode>
__device__ __forceinline__ void operands(uint32_t tile, int w4, int half, int lane, uint32_t (&a0)[4],
                                         uint32_t (&a1)[4]) {
  if constexpr (mode == kW8) {
    const int row = 16 * w4 + (lane & 15), chunk = 4 * half + (lane >> 4);
    const uint4 u = ptx::ldmatrix4(tile + row * 128 + ((chunk ^ (row & 7)) * 16));
    const uint4 v = ptx::ldmatrix4(tile + row * 128 + (((chunk + 2) ^ (row & 7)) * 16));
    a0[0] = u.x, a0[1] = u.y, a0[2] = u.z, a0[3] = u.w;
    a1[0] = v.x, a1[1] = v.y, a1[2] = v.z, a1[3] = v.w;
  } else {
    uint32_t steps = 0;
    if constexpr (mode == kW4TwoLevel) steps = ptx::lds32(tile + kCodeBytes + (w4 * 8 + lane / 4) * 4);
    unpack<mode>(ptx::lds128(tile + ((2 * w4 + half) * 32 + lane) * 16), steps_of(steps, half), a0, a1);
  }
}

template <Mode mode, int kTokens>
__global__ void __launch_bounds__(kThreads, 1) gemm_mma(const LinearArgs a) {
  using B = Block<mode, kTokens>;
  using Sum = std::conditional_t<mode == kW4Group, float, int>;
  extern __shared__ uint4 raw_mma[];
  const uint32_t smem = ptx::shared(raw_mma);
  const int warp = threadIdx.x >> 5, lane = threadIdx.x & 31, g = lane >> 2, t = lane & 3;
  const int cw = warp & 3, first_token = (warp >> 2) * (kTokens / 2);
  const int tiles_n = (a.np + kChannels - 1) / kChannels, n0 = blockIdx.x % tiles_n * kChannels;
  const int m0 = blockIdx.x / tiles_n * kTokens, blocks = a.kp / 128;
  ptx::let_next_grid_start();
  ptx::previous_grid();
#pragma unroll
  for (int s = 0; s < kStages - 1; s++) {
    if (s < blocks) load_block<mode, kTokens>(a, smem + s * B::stage, s, n0 / 64, m0);
    ptx::commit_copies();
  }
  Sum acc[2][B::eights][4] = {};
#pragma unroll 1
  for (int block = 0; block < blocks; block++) {
    ptx::wait_copies<kStages - 2>();
    __syncthreads();  // the block is there, and everybody has left the stage that is loaded next
    const int next = block + kStages - 1;
    if (next < blocks) load_block<mode, kTokens>(a, smem + next % kStages * B::stage, next, n0 / 64, m0);
    ptx::commit_copies();
    const uint32_t x = smem + block % kStages * B::stage,
                   tile = x + B::x_bytes + (cw >> 1) * tile_bytes(mode);
#pragma unroll
    for (int h = 0; h < 2; h++) {
      uint32_t a0[2][4], a1[2][4];
      float2 s[2];
#pragma unroll
      for (int i = 0; i < 2; i++) {
        const int w4 = 2 * (cw & 1) + i;
        operands<mode>(tile, w4, h, lane, a0[i], a1[i]);
        if constexpr (mode == kW4Group)
          s[i] = half2_float2(ptx::lds32(tile + kCodeBytes + (w4 * 8 + g) * 8 + 4 * h));
      }
#pragma unroll
      for (int j = 0; j < B::eights; j++) {
        const int row = first_token + 8 * j + (lane & 7), chunk = 4 * h + (lane >> 3);
        const uint4 b = ptx::ldmatrix4(x + row * 128 + ((chunk ^ (row & 7)) * 16));
#pragma unroll
        for (int i = 0; i < 2; i++) {
          if constexpr (mode == kW4Group) {
            int c[4] = {0, 0, 0, 0};
            ptx::mma_s8(c, a0[i], b.x, b.y);
            ptx::mma_s8(c, a1[i], b.z, b.w);
#pragma unroll
            for (int q = 0; q < 4; q++)
              acc[i][j][q] = fmaf(q < 2 ? s[i].x : s[i].y, (float)c[q], acc[i][j][q]);
          } else {
            ptx::mma_s8(acc[i][j], a0[i], b.x, b.y);
            ptx::mma_s8(acc[i][j], a1[i], b.z, b.w);
          }
        }
      }
    }
  }
  ptx::wait_copies<0>();
  __syncthreads();  // the output takes the place of the stages
  float* out = reinterpret_cast<float*>(raw_mma);
  const int eights = (a.m + 7) / 8, chunks = a.rank / 16;
#pragma unroll
  for (int i = 0; i < 2; i++) {
    const int row = n0 + 32 * cw + 16 * i;
    if (row >= a.np) continue;
    const float2 channel = {a.channel[row + g] * code_unit(mode), a.channel[row + g + 8] * code_unit(mode)};
    float2 bias = {0.f, 0.f};
    if (a.bias) bias = {a.bias[row + g], a.bias[row + g + 8]};
#pragma unroll
    for (int j = 0; j < B::eights; j++) {
      const int token = first_token + 8 * j, eight = (m0 + token) / 8;
      float f[4];
#pragma unroll
      for (int q = 0; q < 4; q++) f[q] = (float)acc[i][j][q] * (q < 2 ? channel.x : channel.y);
      if (eight >= eights) continue;
      add_low_rank(f, a, row, eight, eights, chunks, lane);
#pragma unroll
      for (int q = 0; q < 4; q++) {
        const int at = token + 2 * t + (q & 1), m = m0 + at;
        const float sx = m < a.m ? a.scales[m] : 0.f;
        out[at * B::out_stride + 32 * cw + 16 * i + g + 8 * (q >> 1)] =
            fmaf(f[q], sx, q < 2 ? bias.x : bias.y);
      }
    }
  }
  __syncthreads();
  for (int i = threadIdx.x; i < kTokens * kChannels / 4; i += kThreads) {  // four channels of a row
    const int at = i / (kChannels / 4), c = i % (kChannels / 4) * 4, m = m0 + at, n = n0 + c;
    if (m >= a.m) continue;
    const float* v = out + at * B::out_stride + c;
    const size_t to = (size_t)m * a.n + n;
    if (a.n % 4 == 0 && n + 4 <= a.n) {
      if (a.dtype == Dtype::kFloat32) {
        *reinterpret_cast<float4*>(static_cast<float*>(a.y) + to) = make_float4(v[0], v[1], v[2], v[3]);
      } else {
        const bool bf16 = a.dtype == Dtype::kBfloat16;
        *reinterpret_cast<uint2*>(static_cast<uint16_t*>(a.y) + to) =
            make_uint2(pack2(v[0], v[1], bf16), pack2(v[2], v[3], bf16));
      }
    } else {
      for (int e = 0; e < 4 && n + e < a.n; e++) store_one(a.y, to + e, v[e], a.dtype);
    }
  }
}

template <Mode mode, int kTokens>
static const char* launch(const LinearArgs& a, const Device& device, Stream stream) {
  using B = Block<mode, kTokens>;
  const void* kernel = reinterpret_cast<const void*>(gemm_mma<mode, kTokens>);
  static bool allowed[kMostDevices];
  if (const char* wrong = allow_shared(kernel, B::shared, device, allowed)) return wrong;
  LinearArgs copy = a;
  void* args[] = {&copy};
  const int grid = (a.np + kChannels - 1) / kChannels * ((a.m + kTokens - 1) / kTokens);
  return start(kernel, grid, kThreads, B::shared, 1, device, stream, args);
}

template <Mode mode>
static const char* launch_mode(const LinearArgs& a, const Device& d, Stream s) {
  const int wide = (a.np + kChannels - 1) / kChannels * ((a.m + 127) / 128);
  return a.m <= 32 || wide < d.multiprocessors / 2 ? launch<mode, 32>(a, d, s) : launch<mode, 128>(a, d, s);
}

const char* launch_gemm_mma(const LinearArgs& a, const Device& d, Stream s) {
  switch (a.mode) {
    case kW8:
      return launch_mode<kW8>(a, d, s);
    case kW4Channel:
      return launch_mode<kW4Channel>(a, d, s);
    case kW4TwoLevel:
      return launch_mode<kW4TwoLevel>(a, d, s);
    default:
      return launch_mode<kW4Group>(a, d, s);
  }
}

}  // namespace lowbit::cuda
