// Up to 16 rows of x: 4-bit weights streamed once at the memory's rate, on every chip from sm_80 on.
//
// A group is 16 channels x all columns; 8 warps split its blocks of 128 columns. A warp has two batches of
// `kBlocks` blocks in flight (32 B of codes a lane and block), of the next group if need be; the first are
// asked for before the previous grid has ended. mma.m16n8k32; the warps' sums meet in shared memory in one
// order.
#include "launch.cuh"
#include "tile.cuh"

namespace lowbit::cuda {

constexpr int kWarps = 8, kBlocks = 2;

template <Mode mode>
struct Batch {  // blocks in flight
  uint4 codes[kBlocks][2];
  uint2 scales[kBlocks];
};

struct Tail {  // what the end of a group needs
  uint4 up;
  float2 channel, bias;
};

struct Walk {  // where a warp is: a group of channels, a batch of its blocks
  int group, batch;
};

template <Mode mode, int kEights>
struct Gemv {
  const LinearArgs& a;
  const int warp = threadIdx.x >> 5, lane = threadIdx.x & 31, g = lane >> 2, t = lane & 3;
  const int all = a.kp / kTileColumns, begin = all * warp / kWarps, end = all * (warp + 1) / kWarps;
  const int batches = max(1, (end - begin + kBlocks - 1) / kBlocks);

  __device__ __forceinline__ Gemv(const LinearArgs& args) : a(args) {}

  __device__ __forceinline__ Walk after(Walk w) const {
    return w.batch + 1 < batches ? Walk{w.group, w.batch + 1} : Walk{w.group + (int)gridDim.x, 0};
  }

  __device__ __forceinline__ void load(Batch<mode>& b, Walk w) const {
    const int w4 = w.group & 3, first = begin + w.batch * kBlocks;
    const uint8_t* p = a.weight + ((size_t)(w.group >> 2) * all + first) * tile_bytes(mode);
#pragma unroll
    for (int i = 0; i < kBlocks; i++, p += tile_bytes(mode)) {
      if (first + i >= end) break;
      b.codes[i][0] = ptx::stream128(p + (w4 * 64 + lane) * 16);
      b.codes[i][1] = ptx::stream128(p + (w4 * 64 + 32 + lane) * 16);
      if constexpr (mode == kW4TwoLevel) b.scales[i].x = ptx::stream32(p + kCodeBytes + (w4 * 8 + g) * 4);
      if constexpr (mode == kW4Group) b.scales[i] = ptx::stream64(p + kCodeBytes + (w4 * 8 + g) * 8);
    }
  }

  __device__ __forceinline__ void load(Tail& b, int group) const {
    const int n = group * 16 + g;
    b.channel = {a.channel[n] * code_unit(mode), a.channel[n + 8] * code_unit(mode)};
    b.bias = {0.f, 0.f};
    if (a.bias) b.bias = {a.bias[n], a.bias[n + 8]};
    if (a.rank) b.up = __ldg(static_cast<const uint4*>(a.up) + (size_t)group * 32 + lane);
  }

  __device__ __forceinline__ const int8_t* x_at(int block, int half, int eight) const {
    return a.codes + (size_t)min(g + 8 * eight, a.m - 1) * a.kp + block * 128 + half * 64 + t * 16;
  }

  template <class T>
  __device__ __forceinline__ void multiply(const Batch<mode>& b, Walk w, T (&acc)[kEights][4]) const {
    const int first = begin + w.batch * kBlocks;
    // All of a batch at once, so that their latencies pass together; rows beyond M repeat the last one. No
    // __ldg: it may rise above the wait for the grid that writes the codes.
    uint4 xs[kBlocks][2][kEights];
#pragma unroll
    for (int i = 0; i < kBlocks; i++)
#pragma unroll
      for (int h = 0; h < 2; h++)
#pragma unroll
        for (int e = 0; e < kEights; e++)
          xs[i][h][e] = *reinterpret_cast<const uint4*>(x_at(max(min(first + i, end - 1), 0), h, e));
#pragma unroll
    for (int i = 0; i < kBlocks; i++) {
      if (first + i >= end) break;
#pragma unroll
      for (int h = 0; h < 2; h++) {
        uint32_t a0[4], a1[4];
        unpack<mode>(b.codes[i][h], steps_of(b.scales[i].x, h), a0, a1);
#pragma unroll
        for (int e = 0; e < kEights; e++) {
          const uint4 x = xs[i][h][e];
          if constexpr (mode == kW4Group) {
            const float2 s = half2_float2(h ? b.scales[i].y : b.scales[i].x);
            int c[4] = {0, 0, 0, 0};
            ptx::mma_s8(c, a0, x.x, x.y);
            ptx::mma_s8(c, a1, x.z, x.w);
#pragma unroll
            for (int q = 0; q < 4; q++) acc[e][q] = fmaf(q < 2 ? s.x : s.y, (float)c[q], acc[e][q]);
          } else {
            ptx::mma_s8(acc[e], a0, x.x, x.y);
            ptx::mma_s8(acc[e], a1, x.z, x.w);
          }
        }
      }
    }
  }
};

template <Mode mode, int kEights>  // kEights: blocks of 8 rows of x
__global__ void __launch_bounds__(kWarps * 32, 2) gemv(const LinearArgs a) {
  using Sum = std::conditional_t<mode == kW4Group, float, int>;
  __shared__ uint4 sums[2][kWarps][kEights][32];
  const Gemv<mode, kEights> v(a);
  const int groups = a.np / 16, eights = (a.m + 7) / 8;
  Batch<mode> even, odd;
  Tail tail{};
  Walk now{(int)blockIdx.x, 0}, ahead = v.after(now);
  ptx::let_next_grid_start();
  v.load(even, now);
  if (ahead.group < groups) v.load(odd, ahead);
  if (v.warp < kEights) v.load(tail, now.group);
  ahead = v.after(ahead);
  ptx::previous_grid();
  const int e = v.warp, token = 8 * e + 2 * v.t;  // of a warp that ends a group
  float sx[2] = {0.f, 0.f};
  uint2 low = {0, 0};
  if (e < kEights) {
    if (token < a.m) sx[0] = a.scales[token];
    if (token + 1 < a.m) sx[1] = a.scales[token + 1];
    if (a.rank && e < eights) low = low_of(a.low, e, v.lane);
  }
  Sum acc[kEights][4] = {};
  int turn = 0;
  auto finish = [&](int group) {
#pragma unroll
    for (int i = 0; i < kEights; i++) {
      sums[turn][v.warp][i][v.lane] = *reinterpret_cast<uint4*>(acc[i]);
#pragma unroll
      for (int q = 0; q < 4; q++) acc[i][q] = 0;
    }
    __syncthreads();
    if (e < eights) {
      Sum s[4] = {};
#pragma unroll
      for (int w = 0; w < kWarps; w++) {
        const uint4 p = sums[turn][w][e][v.lane];
        const uint32_t words[4] = {p.x, p.y, p.z, p.w};
#pragma unroll
        for (int q = 0; q < 4; q++) s[q] += *reinterpret_cast<const Sum*>(&words[q]);
      }
      float f[4];
#pragma unroll
      for (int q = 0; q < 4; q++) f[q] = (float)s[q] * (q < 2 ? tail.channel.x : tail.channel.y);
      if (a.rank) ptx::mma_f16(f, tail.up, low.x, low.y);
      for (int c = 1; c < a.rank / 16; c++) {
        const uint4 up = __ldg(static_cast<const uint4*>(a.up) + ((size_t)c * groups + group) * 32 + v.lane);
        const uint2 l = low_of(a.low, c * eights + e, v.lane);
        ptx::mma_f16(f, up, l.x, l.y);
      }
#pragma unroll
      for (int q = 0; q < 4; q++) {
        const int m = token + (q & 1), n = group * 16 + v.g + 8 * (q >> 1);
        if (m < a.m && n < a.n)
          store_one(a.y, (size_t)m * a.n + n, fmaf(f[q], sx[q & 1], q < 2 ? tail.bias.x : tail.bias.y),
                    a.dtype);
      }
    }
    turn ^= 1;  // one barrier a group is enough: these sums are read before the next but one are written
  };
  auto step = [&](Batch<mode>& mine) {  // false after the last group
    v.multiply(mine, now, acc);
    if (ahead.group < groups) v.load(mine, ahead);
    ahead = v.after(ahead);
    const Walk then = v.after(now);
    if (then.batch == 0) {
      finish(now.group);
      if (e < kEights && then.group < groups) v.load(tail, then.group);
    }
    now = then;
    return now.group < groups;
  };
  while (step(even) && step(odd)) {
  }
}

template <Mode mode>
static const char* launch(const LinearArgs& a, const Device& d, Stream stream) {
  const void* kernel =
      a.m <= 8 ? reinterpret_cast<const void*>(gemv<mode, 1>) : reinterpret_cast<const void*>(gemv<mode, 2>);
  const int groups = a.np / 16, slots = d.multiprocessors * 2;
  LinearArgs copy = a;
  void* args[] = {&copy};
  return start(kernel, groups < slots ? groups : slots, kWarps * 32, 0, 1, d, stream, args);
}

const char* launch_gemv(const LinearArgs& a, const Device& d, Stream s) {
  if (a.m > 16) return "M: accepted is at most 16";
  switch (a.mode) {
    case kW4Channel:
      return launch<kW4Channel>(a, d, s);
    case kW4TwoLevel:
      return launch<kW4TwoLevel>(a, d, s);
    case kW4Group:
      return launch<kW4Group>(a, d, s);
    default:
      return "mode: accepted are the 4-bit ones";
  }
}

}  // namespace lowbit::cuda
