// The end of a decoding step of a masked token model: from logits to the slots that are revealed.
//
//   guided_score: z = c + g (c - u) of a slot's classes; the likeliest one below mask_id, and max z -
//   logsumexp z, less the
//                 penalty of its codebook, over the temperature, plus noise; -inf where nothing may be
//                 written. A warp a slot.
//   reveal:       the k slots of an item with the largest scores get their token; k is read on the device. A
//   CTA an item: the
//                 k-th largest is found digit by digit from histograms, equal ones are taken in order of
//                 their slots.
#include "launch.cuh"
#include "tile.cuh"

namespace lowbit::cuda {

constexpr int kScoreWarps = 8, kRevealThreads = 512;

template <class T>
LOWBIT_DEVICE float to_float(T v);
template <>
__device__ __forceinline__ float to_float(float v) {
  return v;
}
template <>
__device__ __forceinline__ float to_float(__half v) {
  return __half2float(v);
}
template <>
__device__ __forceinline__ float to_float(__nv_bfloat16 v) {
  return __bfloat162float(v);
}

template <class T>
__global__ void __launch_bounds__(kScoreWarps * 32) guided_score(const ScoreArgs a) {
  const int lane = threadIdx.x & 31, slots = a.items * a.frames * a.books;
  const int slot = blockIdx.x * kScoreWarps + (threadIdx.x >> 5);  // [item][frame][book]
  ptx::previous_grid();
  ptx::let_next_grid_start();
  if (slot >= slots) return;
  const T* c = static_cast<const T*>(a.logits) + (size_t)slot * a.classes;
  const T* u = c + (size_t)slots * a.classes;
  const float g = *a.guidance;
  auto z = [&](int i) {
    const float x = to_float(c[i]);
    return x + g * (x - to_float(u[i]));
  };
  float best = -INFINITY, most = -INFINITY;
  int at = 0;
  for (int i = lane; i < a.classes; i += 32) {
    const float v = z(i);
    if (i < a.mask_id && v > best) best = v, at = i;
    most = fmaxf(most, v);
  }
#pragma unroll
  for (int to = 16; to; to /= 2) {
    const float other = __shfl_xor_sync(~0u, best, to);
    const int where = __shfl_xor_sync(~0u, at, to);
    if (other > best || (other == best && where < at)) best = other, at = where;
    most = fmaxf(most, __shfl_xor_sync(~0u, most, to));
  }
  float sum = 0.f;
  for (int i = lane; i < a.classes; i += 32) sum += expf(z(i) - most);
#pragma unroll
  for (int to = 16; to; to /= 2) sum += __shfl_xor_sync(~0u, sum, to);
  if (lane) return;
  const int book = slot % a.books, frame = slot / a.books % a.frames, item = slot / a.books / a.frames;
  const size_t out = ((size_t)item * a.books + book) * a.frames + frame;
  const bool open = a.valid[item * a.frames + frame] && a.tokens[out] == a.mask_id;
  a.pred[out] = at;
  const float score = (best - (most + logf(sum)) - a.penalty[book]) * __fdiv_rn(1.f, *a.temperature);
  a.score[out] = open ? score + a.noise[out] : -INFINITY;
}

// Larger scores have larger keys.
LOWBIT_DEVICE uint32_t key_of(float score) {
  const uint32_t b = __float_as_uint(score);
  return b >> 31 ? ~b : b | 0x80000000u;
}

__global__ void __launch_bounds__(kRevealThreads) reveal(const RevealArgs a) {
  extern __shared__ uint32_t keys[];
  __shared__ uint32_t counts[256], digit, above;
  const int item = blockIdx.x, lane = threadIdx.x & 31;
  ptx::previous_grid();
  ptx::let_next_grid_start();
  const float* score = a.score + (size_t)item * a.slots;
  for (int i = threadIdx.x; i < a.slots; i += kRevealThreads) keys[i] = key_of(score[i]);
  const int64_t asked = a.k[item];
  uint32_t left = asked < 0         ? 0
                  : asked > a.slots ? a.slots
                                    : (uint32_t)asked;  // still to be found among keys of `prefix`
  if (left == 0) return;
  uint32_t prefix = 0, mask = 0;
  for (int shift = 24; shift >= 0; shift -= 8) {
    for (int i = threadIdx.x; i < 256; i += kRevealThreads) counts[i] = 0;
    __syncthreads();
    for (int i = threadIdx.x; i < a.slots; i += kRevealThreads)
      if ((keys[i] & mask) == prefix) atomicAdd(&counts[keys[i] >> shift & 255], 1u);
    __syncthreads();
    if (threadIdx.x < 32) {  // lane l has digits 255 - 8l .. 248 - 8l, from the largest down
      uint32_t mine[8], total = 0;
#pragma unroll
      for (int j = 0; j < 8; j++) mine[j] = counts[255 - 8 * lane - j], total += mine[j];
      uint32_t before = total;
#pragma unroll
      for (int to = 1; to < 32; to *= 2) {
        const uint32_t other = __shfl_up_sync(~0u, before, to);
        if (lane >= to) before += other;
      }
      before -= total;
      if (before < left && left <= before + total) {
        int j = 0;
        while (before + mine[j] < left) before += mine[j++];
        digit = 255 - 8 * lane - j, above = before;
      }
    }
    __syncthreads();
    prefix |= digit << shift, mask |= 255u << shift, left -= above;
  }
  const uint32_t nothing = key_of(-INFINITY);
  int64_t* tokens = a.tokens + (size_t)item * a.slots;
  const int64_t* pred = a.pred + (size_t)item * a.slots;
  for (int i = threadIdx.x; i < a.slots; i += kRevealThreads) {
    bool chosen = keys[i] > prefix;
    if (keys[i] == prefix) {
      uint32_t earlier = 0;
      for (int j = 0; j < i; j++) earlier += keys[j] == prefix;
      chosen = earlier < left;
    }
    if (chosen && keys[i] > nothing) tokens[i] = pred[i];
  }
}

const char* launch_guided_score(const ScoreArgs& a, const Device& d, Stream stream) {
  const void* kernel = a.dtype == Dtype::kFloat32 ? reinterpret_cast<const void*>(guided_score<float>)
                       : a.dtype == Dtype::kBfloat16
                           ? reinterpret_cast<const void*>(guided_score<__nv_bfloat16>)
                           : reinterpret_cast<const void*>(guided_score<__half>);
  ScoreArgs copy = a;
  void* args[] = {&copy};
  const int slots = a.items * a.frames * a.books;
  return start(kernel, (slots + kScoreWarps - 1) / kScoreWarps, kScoreWarps * 32, 0, 1, d, stream, args);
}
const char* launch_reveal(const RevealArgs& a, const Device& d, Stream stream) {
  const int bytes = a.slots * 4;
  if (bytes + 2048 > d.shared) return "slots: an item's scores do not fit the shared memory";
  const void* kernel = reinterpret_cast<const void*>(reveal);
  static bool allowed[kMostDevices];
  if (const char* wrong = allow_shared(kernel, d.shared - 2048, d, allowed)) return wrong;
  RevealArgs copy = a;
  void* args[] = {&copy};
  return start(kernel, a.items, kRevealThreads, bytes, 1, d, stream, args);
}

}  // namespace lowbit::cuda
