// Four-bit weights times four-bit activations on INT4 tensor cores (sm_80, sm_86, sm_89): groups of 64
// columns on both sides, each one matrix instruction (m16n8k64). Hopper and newer have no such instruction;
// there it is emulated, exact and slow, for tests.
//
//   y[m,n] = sum_g sa[g,m] sw[g,n] (a_m . w_n over group g) + sx[m] (up . low) + bias
//
// A CTA is 128 channels x `kTokens` rows, 8 warps: 4 along the channels, 2 along the rows. A block is 256
// columns: rows of 128 B on both sides as the checkpoint has them (element 2j in the low nibble), 16-byte
// chunk c of row r at c ^ (r & 7), and four groups of scales. Three stages (cp.async), one barrier for the
// four groups of a block.
//
// The accumulator starts at 0x4B400000, whose bits read as the float 12582912 + sum, |sum| <= 4096: one
// subtraction makes the float, exactly, where a conversion would take four times as long on sm_86. All that
// follows is float32.
#include "launch.cuh"
#include "tile.cuh"

namespace lowbit::cuda {
namespace {

constexpr int kChannels = 128, kStages = 3, kThreads = 256, kBlock = 256, kGroups = 4;
constexpr int kMagic = 0x4B400000;

LOWBIT_DEVICE void mma_s4(int (&c)[4], const uint4& a, uint32_t b0, uint32_t b1) {
  asm volatile(
      "mma.sync.aligned.m16n8k64.row.col.s32.s4.s4.s32 {%0,%1,%2,%3},{%4,%5,%6,%7},{%8,%9},{%10,%10,%10,%10};"
      : "=r"(c[0]), "=r"(c[1]), "=r"(c[2]), "=r"(c[3])
      : "r"(a.x), "r"(a.y), "r"(a.z), "r"(a.w), "r"(b0), "r"(b1), "r"(kMagic));
}

template <int kTokens>
struct Block4 {
  static constexpr int eights = kTokens / 16, w_at = kTokens * 128, sw_at = w_at + kChannels * 128;
  static constexpr int sa_at = sw_at + kGroups * kChannels * 4, stage = sa_at + kGroups * kTokens * 4;
  static constexpr int out_stride = kChannels + 4, out_bytes = kTokens * out_stride * 4;
  static constexpr int shared = kStages * stage > out_bytes ? kStages * stage : out_bytes;
};

// Rows of 128 B: codes [rows][kp / 2], bytes block * 128 of each.
template <int rows>
LOWBIT_DEVICE void load_rows(uint32_t to, const uint8_t* codes, int stride, int block, int first, int most) {
  for (int i = threadIdx.x; i < rows * 8; i += kThreads) {
    const int row = i / 8, c = i % 8;
    ptx::copy16(to + row * 128 + ((c ^ (row & 7)) * 16),
                codes + (size_t)min(first + row, most - 1) * stride + block * 128 + c * 16);
  }
}
// Scales of four groups: [groups][width], `count` of them from `first`; the width is a multiple of 128.
template <int count>
LOWBIT_DEVICE void load_scales(uint32_t to, const float* scales, int width, int block, int first) {
  for (int i = threadIdx.x; i < kGroups * count / 4; i += kThreads) {
    const int g = i / (count / 4), c = i % (count / 4);
    ptx::copy16(to + (g * count + c * 4) * 4, scales + (size_t)(block * kGroups + g) * width + first + c * 4);
  }
}

template <int kTokens>
LOWBIT_DEVICE void load_block(const Int4Args& a, uint32_t to, int block, int n0, int m0) {
  using B = Block4<kTokens>;
  load_rows<kTokens>(to, a.codes, a.kp / 2, block, m0, a.m);
  load_rows<kChannels>(to + B::w_at, a.weight, a.kp / 2, block, n0, a.np);
  load_scales<kChannels>(to + B::sw_at, a.weight_scales, a.np, block, n0);
  load_scales<kTokens>(to + B::sa_at, a.group_scales, a.mp, block, m0);
  ptx::commit_copies();
}

template <int kTokens>
__global__ void __launch_bounds__(kThreads, 1) gemm_int4(const Int4Args a) {
  using B = Block4<kTokens>;
  extern __shared__ uint4 raw_int4[];
  const uint32_t smem = ptx::shared(raw_int4);
  const int warp = threadIdx.x >> 5, lane = threadIdx.x & 31, g = lane >> 2, t = lane & 3;
  const int first_channel = (warp & 3) * 32, first_token = (warp >> 2) * (kTokens / 2);
  const int tiles_n = a.np / kChannels, n0 = blockIdx.x % tiles_n * kChannels,
            m0 = blockIdx.x / tiles_n * kTokens;
  const int blocks = a.kp / kBlock;
  ptx::let_next_grid_start();
  ptx::previous_grid();
#pragma unroll
  for (int s = 0; s < kStages - 1; s++) {
    if (s < blocks)
      load_block<kTokens>(a, smem + s * B::stage, s, n0, m0);
    else
      ptx::commit_copies();
  }
  float acc[2][B::eights][4] = {};
#pragma unroll 1
  for (int block = 0; block < blocks; block++) {
    ptx::wait_copies<kStages - 2>();
    __syncthreads();  // the block is there, and everybody has left the stage that is loaded next
    const int next = block + kStages - 1;
    if (next < blocks)
      load_block<kTokens>(a, smem + next % kStages * B::stage, next, n0, m0);
    else
      ptx::commit_copies();
    const uint32_t x = smem + block % kStages * B::stage, w = x + B::w_at;
#pragma unroll
    for (int pair = 0; pair < kGroups / 2; pair++) {  // two groups share the loads of x
      uint4 wa[2][2];
      float sw[2][2][2];  // group of the pair, 16 channels, row half
#pragma unroll
      for (int h = 0; h < 2; h++) {
#pragma unroll
        for (int i = 0; i < 2; i++) {
          const int row = first_channel + 16 * i + (lane & 15), chunk = 2 * (2 * pair + h) + (lane >> 4);
          wa[h][i] = ptx::ldmatrix4(w + row * 128 + ((chunk ^ (row & 7)) * 16));
          const uint32_t s = x + B::sw_at + ((2 * pair + h) * kChannels + first_channel + 16 * i + g) * 4;
          sw[h][i][0] = __uint_as_float(ptx::lds32(s)), sw[h][i][1] = __uint_as_float(ptx::lds32(s + 32));
        }
      }
#pragma unroll
      for (int j = 0; j < B::eights; j++) {
        const int row = first_token + 8 * j + (lane & 7), chunk = 4 * pair + (lane >> 3);
        const uint4 b = ptx::ldmatrix4(x + row * 128 + ((chunk ^ (row & 7)) * 16));
#pragma unroll
        for (int h = 0; h < 2; h++) {
          const float2 sa =
              ptx::lds_float2(x + B::sa_at + ((2 * pair + h) * kTokens + first_token + 8 * j + 2 * t) * 4);
#pragma unroll
          for (int i = 0; i < 2; i++) {
            int c[4];
            mma_s4(c, wa[h][i], h ? b.z : b.x, h ? b.w : b.y);
#pragma unroll
            for (int q = 0; q < 4; q++)
              acc[i][j][q] = fmaf(__int_as_float(c[q]) - 12582912.f, sw[h][i][q >> 1] * (q & 1 ? sa.y : sa.x),
                                  acc[i][j][q]);
          }
        }
      }
    }
  }
  ptx::wait_copies<0>();
  __syncthreads();  // the output takes the place of the stages
  float* out = reinterpret_cast<float*>(raw_int4);
  const int eights = (a.m + 7) / 8, chunks = a.rank / 16;
#pragma unroll
  for (int i = 0; i < 2; i++) {
    const int row = n0 + first_channel + 16 * i;
    float2 bias = {0.f, 0.f};
    if (a.bias) bias = {a.bias[row + g], a.bias[row + g + 8]};
#pragma unroll
    for (int j = 0; j < B::eights; j++) {
      const int token = first_token + 8 * j, eight = (m0 + token) / 8;
      if (eight >= eights) continue;
      float f[4] = {0.f, 0.f, 0.f, 0.f};
      add_low_rank(f, a, row, eight, eights, chunks, lane);
#pragma unroll
      for (int q = 0; q < 4; q++) {
        const int at = token + 2 * t + (q & 1), m = m0 + at;
        const float sx = m < a.m ? a.scales[m] : 0.f;
        out[at * B::out_stride + first_channel + 16 * i + g + 8 * (q >> 1)] =
            fmaf(f[q], sx, acc[i][j][q]) + (q < 2 ? bias.x : bias.y);
      }
    }
  }
  __syncthreads();
  for (int i = threadIdx.x; i < kTokens * kChannels / 4; i += kThreads) {  // four channels of a row
    const int at = i / (kChannels / 4), c = i % (kChannels / 4) * 4, m = m0 + at, n = n0 + c;
    if (m >= a.m) continue;
    const float* v = out + at * B::out_stride + c;
    const size_t to = (size_t)m * a.n + n;
    if (a.n % 4 == 0 && n + 4 <= a.n && a.dtype != Dtype::kFloat32) {
      const bool bf16 = a.dtype == Dtype::kBfloat16;
      *reinterpret_cast<uint2*>(static_cast<uint16_t*>(a.y) + to) =
          make_uint2(pack2(v[0], v[1], bf16), pack2(v[2], v[3], bf16));
    } else {
      for (int e = 0; e < 4 && n + e < a.n; e++) store_one(a.y, to + e, v[e], a.dtype);
    }
  }
}

template <int kTokens>
const char* launch(const Int4Args& a, const Device& device, Stream stream) {
  const void* kernel = reinterpret_cast<const void*>(gemm_int4<kTokens>);
  static bool allowed[kMostDevices];
  if (const char* wrong = allow_shared(kernel, Block4<kTokens>::shared, device, allowed)) return wrong;
  Int4Args copy = a;
  void* args[] = {&copy};
  const int grid = a.np / kChannels * ((a.m + kTokens - 1) / kTokens);
  return start(kernel, grid, kThreads, Block4<kTokens>::shared, 1, device, stream, args);
}

}  // namespace

const char* launch_gemm_int4(const Int4Args& a, const Device& d, Stream s) {
  const int wide = a.np / kChannels * ((a.m + 63) / 64);
  return a.m <= 32 || wide < d.multiprocessors ? launch<32>(a, d, s) : launch<64>(a, d, s);
}

}  // namespace lowbit::cuda
