// One step of a Llama-like decoder over packed linears: what a layer is, what a step takes, and the arguments
// of the verbs that stand between the linears. No torch here; decoder_ops.cpp checks and calls.
#pragma once
#include <cstdint>
#include <vector>

#include "kernels.h"

namespace lowbit::cpu {

// The cache of one layer: keys [kv_heads, capacity / 16, head_dim, 16] (16 positions side by side, so that
// scores need no horizontal sum), values [kv_heads, capacity, head_dim]; float32, or float16 where `half`.
constexpr int64_t kSegment = 256;  // positions whose softmax is taken at once; segments are merged in order
constexpr int64_t kTileRows = 16;  // rows of x that one item of attention holds

struct NormArgs {       // x += add;  y = x / sqrt(mean(x^2) + eps) * weight
  float* x;             // [m, n]
  const float* add;     // [m, n] or null
  const float* weight;  // [n]
  float* y;             // [m, n]
  int64_t n;            // a multiple of 16
  float eps;
};

struct AttentionArgs {
  float* q;                      // [m, heads * head_dim], before norm and rotation
  float* k;                      // [m, kv_heads * head_dim], likewise; rotated in place
  const float* v;                // [m, kv_heads * head_dim]
  int64_t m, heads, kv_heads;    //
  int64_t head_dim;              // a multiple of 16
  int64_t position;              // of row 0
  const float *q_norm, *k_norm;  // [head_dim] or null: RMSNorm of every head
  float eps, scale;              //
  const float *cosines, *sines;  // [>= position + m, head_dim / 2]
  void *keys, *values;           //
  int64_t capacity;              // a multiple of 16
  bool half;                     //
  int64_t heads_per_item;        // divides heads / kv_heads
  float* out;                    // [m, heads * head_dim]
  int64_t row = 0;               // floats from a row of q, of k, of v to the next; 0: as drawn above
  bool everyone = false;         // every row sees all m; position is 0
};
constexpr int64_t attention_items(const AttentionArgs& a) {
  return a.heads / a.heads_per_item * ((a.m + kTileRows - 1) / kTileRows);
}
// Floats of scratch that one thread needs for attention.
constexpr int64_t attention_scratch(int64_t rows, int64_t heads_per_item, int64_t head_dim) {
  return rows * heads_per_item * (kSegment + 2 * head_dim + 2);
}

// One linear of the model, as QuantLinear holds it.
struct PackedLinear {
  const uint8_t* weight;    // [panels, groups, group_bytes]
  int64_t n, k;             //
  int64_t group, groups;    //
  int64_t padded;           //
  int64_t group_bytes;      //
  int bits;                 // 4, 8, 16
  bool wide_scales;         //
  Granularity granularity;  //
  const float* bias;        // [n] or null
  const int32_t* perm;      // [k] or null
  const float* smooth;      // [k] or null
  bool hadamard;            //
  const uint8_t* down;      // [down_panels, k rounded up to 4, 16], or null: no low rank
  int64_t down_panels;      //
  bool wide_down, wide_up;  // float32 factors, else float16
  const uint8_t* up;        // [panels, rank, 16]
  int64_t rank;             // rounded up to 4
  bool joins;               // reads the rows that the linear before it of the same x reads
};

struct Layer {
  const float *norm, *mlp_norm, *q_norm, *k_norm;  // [hidden], [hidden], [head_dim] or null
  PackedLinear q, k, v, o, gate, up, down;
};

void join(Layer& layer);  // sets `joins`

struct Decoder {
  int64_t hidden, heads, kv_heads, head_dim, intermediate, vocabulary;
  float eps, scale;
  const void* embedding;  // [vocabulary, hidden]
  Dtype embedding_dtype;
  const float* norm;  // [hidden]
  PackedLinear head;  // weight null: a step gives the normed hidden rows
  std::vector<Layer> layers;
};

struct Step {
  const int64_t* ids;  // [m], inside the vocabulary
  int64_t m;
  int64_t position;              // of ids[0]
  void *keys, *values;           // [layers, ...] of the cache drawn above
  int64_t capacity;              // >= position + m
  bool half;                     //
  const float *cosines, *sines;  // [>= position + m, head_dim / 2]
  uint8_t* scratch;              // scratch_bytes(decoder, m, threads), on a cache line
  float* out;                    // [last, vocabulary], or [last, hidden] without a head
  int64_t last;                  // how many rows of the end are wanted, 0 .. m
};

int64_t scratch_bytes(const Decoder& d, int64_t m, int threads);
void decode_step(const Decoder& d, const Step& s, const KernelTable& table, int threads);  // team.h

}  // namespace lowbit::cpu
