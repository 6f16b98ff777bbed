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

// What a thread copies of every block: a chunk of every 32nd row on both sides, and in threads 0 .. 127 16
// bytes of the weight's scales, in those after them of x's. Its addresses are made once and move by a
// constant between blocks: loops over threadIdx.x were 120 of the 640 instructions of a pass.
template <int kTokens>
struct Copies {
  using B = Block4<kTokens>;
  static constexpr int rows = kThreads / 8;
  const uint8_t* x[kTokens / rows];
  const uint8_t* w[kChannels / rows];
  const float* scales;
  size_t next_groups;  // elements to the scales of the next block
  uint32_t at, scales_at;

  __device__ __forceinline__ Copies(const Int4Args& a, int n0, int m0) {
    const int row = threadIdx.x / 8, c = threadIdx.x % 8, stride = a.kp / 2;
#pragma unroll
    for (int i = 0; i < kTokens / rows; i++)
      x[i] = a.codes + (size_t)min(m0 + row + rows * i, a.m - 1) * stride + c * 16;
#pragma unroll
    for (int i = 0; i < kChannels / rows; i++)
      w[i] = a.weight + (size_t)(n0 + row + rows * i) * stride + c * 16;
    at = row * 128 + ((c ^ (row & 7)) * 16);
    const bool of_weight = threadIdx.x < kChannels;
    const int quads = (of_weight ? kChannels : kTokens) / 4, i = threadIdx.x - (of_weight ? 0 : kChannels);
    const int width = of_weight ? a.np : a.mp;
    scales = (of_weight ? a.weight_scales + n0 : a.group_scales + m0) + (size_t)(i / quads) * width +
             i % quads * 4;
    next_groups = (size_t)kGroups * width;
    scales_at = B::sw_at + threadIdx.x * 16;
    asm volatile("" : "+r"(at), "+r"(scales_at));  // or the compiler makes them anew for every block
  }
  __device__ __forceinline__ void start(uint32_t stage) {
#pragma unroll
    for (int i = 0; i < kTokens / rows; i++) ptx::copy16(stage + at + i * rows * 128, x[i]);
#pragma unroll
    for (int i = 0; i < kChannels / rows; i++) ptx::copy16(stage + at + B::w_at + i * rows * 128, w[i]);
    if (scales_at < B::sw_at + (kChannels + kTokens) * 16) ptx::copy16(stage + scales_at, scales);
#pragma unroll
    for (int i = 0; i < kTokens / rows; i++) x[i] += kBlock / 2;
#pragma unroll
    for (int i = 0; i < kChannels / rows; i++) w[i] += kBlock / 2;
    scales += next_groups;
  }
};

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
  Copies<kTokens> copies(a, n0, m0);
#pragma unroll
  for (int s = 0; s < kStages - 1; s++) {
    if (s < blocks) copies.start(smem + s * B::stage);
    ptx::commit_copies();
  }
  // Where a lane reads in a stage; another pair or group is an exclusive or away, another row a constant.
  const uint32_t w_lane = B::w_at + (first_channel + (lane & 15)) * 128 + (((lane >> 4) ^ (lane & 7)) * 16);
  const uint32_t x_lane = (first_token + (lane & 7)) * 128 + (((lane >> 3) ^ (lane & 7)) * 16);
  const uint32_t sw_lane = B::sw_at + (first_channel + g) * 4, sa_lane = B::sa_at + (first_token + 2 * t) * 4;
  uint32_t x = smem, left = smem + (kStages - 1) * B::stage;  // this block's stage, and the one before
  float acc[2][B::eights][4] = {};
#pragma unroll 1
  for (int block = 0; block < blocks; block++) {
    ptx::wait_copies<kStages - 2>();
    __syncthreads();  // the block is there, and everybody has left the stage that is loaded next
    if (block + kStages - 1 < blocks) copies.start(left);
    ptx::commit_copies();
#pragma unroll
    for (int pair = 0; pair < kGroups / 2; pair++) {  // two groups share the loads of x
      uint4 wa[2][2];
      float sw[2][2][2];  // group of the pair, 16 channels, row half
#pragma unroll
      for (int h = 0; h < 2; h++) {
#pragma unroll
        for (int i = 0; i < 2; i++) {
          wa[h][i] = ptx::ldmatrix4(x + (w_lane ^ (64 * pair + 32 * h)) + 16 * 128 * i);
          const uint32_t s = x + sw_lane + ((2 * pair + h) * kChannels + 16 * i) * 4;
          sw[h][i][0] = __uint_as_float(ptx::lds32(s)), sw[h][i][1] = __uint_as_float(ptx::lds32(s + 32));
        }
      }
#pragma unroll
      for (int j = 0; j < B::eights; j++) {
        const uint4 b = ptx::ldmatrix4(x + (x_lane ^ (64 * pair)) + 8 * 128 * j);
#pragma unroll
        for (int h = 0; h < 2; h++) {
          const float2 sa = ptx::lds_float2(x + sa_lane + ((2 * pair + h) * kTokens + 8 * j) * 4);
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
    left = x, x = x + B::stage == smem + kStages * B::stage ? smem : x + B::stage;
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
