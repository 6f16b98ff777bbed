// The one interface that every instruction set fills: a table of functions over these argument structs.
#pragma once
#include <cstddef>
#include <cstdint>
#include <type_traits>

namespace lowbit::cpu {

// A packed weight is a row of panels, a panel 16 output rows side by side, cut into groups of input columns
// that are padded to a multiple of 32. One group of one panel, in the order the kernel reads it
// (docs/layouts.md draws it):
//
//   codes    x86:
//            4 bit: [padded / 8] lines of 64 B, byte 4n + j = code[n][k + j] | code[n][k + 4 + j] << 4
//            8 bit: [padded / 4] lines of 64 B, byte 4n + j = code[n][k + j]
//            aarch64:
//            4 bit: [padded / 16] lines of 128 B, byte 8n + j = code[n][k + j] | code[n][k + 8 + j] << 4
//            8 bit: [padded / 8] lines of 128 B, byte 8n + j = code[n][k + j]
//   scales   [16] float16, or float32 where float16 cannot hold them
//   zeros    [16] uint8, then padding up to the next 64 B, whose last 4 B are the columns of the group,
//   uint32
//
// Codes are unsigned: a signed weight has 8 (128) added and that zero point.
constexpr int64_t kPanel = 16;
constexpr int64_t kStep = 32;
constexpr int kStripPanels = 4;        // panels that stay in L2 while all rows of x pass over them
constexpr int64_t kNever = INT64_MAX;  // of a number of rows
constexpr int kUnit = 4;  // columns of a row of x that stay together; a tier may have its own (kUnit in isa/)
constexpr int64_t kMixed = 64;    // columns that one Hadamard matrix mixes
constexpr int64_t kMostRows = 8;  // no tier has a larger row_block

enum class Dtype : int { kFloat32 = 0, kBfloat16 = 1, kFloat16 = 2 };
enum class Granularity : int { kToken = 0, kGroup = 1, kNone = 2 };

constexpr int64_t round_up(int64_t x, int64_t step) { return (x + step - 1) / step * step; }

// How one row of x becomes what a kernel reads. Rows are laid out in blocks of `mb` = min(table.row_block,
// rows left); amx has other blocks and units for more than four rows, see linear_tiles.body.h.
struct Rows {
  const void* x;            // [m, k] of `dtype`
  Dtype dtype;              //
  int64_t m, k;             //
  int64_t group, groups;    // columns in a group, ceil(k / group)
  int64_t padded;           // group rounded up to kStep (to 1 for fp16 weights)
  const int32_t* perm;      // [k] or null: column j of the weight reads x[perm[j]]
  const float* smooth;      // [k] or null: x is divided by it first
  bool hadamard;            // then multiplied by blockdiag(H64) / 8; k is a multiple of 64. That is x'
  Granularity granularity;  //
  int8_t* codes;            // token, group: per block [groups * padded / kUnit, mb, kUnit]
  int32_t* sums;            // token, group: per block [groups, mb], sum of the codes of a group
  float* scales;            // token: [m]; group: per block [groups, mb]
  float* floats;            // none: per block [groups * padded, mb]
  float* scratch;           // [scratch_floats] of the calling thread

  // The low rank sees x', before perm and rounding: hidden = downᵀ x'. Panels of 16 columns of `down`, of one
  // weight or of several that share these rows.
  const uint8_t* const* down;  // [down_panels] of [k rounded up to 4, 16] float16, or float32 where wide_down
  int64_t down_panels;         // 0: none
  bool wide_down;              //
  float* hidden;               // [m, down_panels * 16]
};
constexpr int64_t scratch_floats(const Rows& r) {
  return r.groups * r.padded + kMostRows * round_up(r.k, kPanel);
}

struct LinearArgs {
  const Rows* rows;       // after quantize_rows
  const uint8_t* weight;  // [panels, groups, group_bytes]
  int64_t n;              // output columns, panels * 16 rounded down
  int64_t group_bytes;    //
  bool wide_scales;       // float32 scales in the stream
  const float* bias;      // [n] or null
  void* y;                // [m, n] of rows->dtype

  // y += up · hidden, before y is rounded.
  const uint8_t* up;  // [panels, rank, 16] float16, or float32 where wide_up; null: no low rank
  int64_t rank;       // rounded up to 4, with zeros
  bool wide_up;
  const float* hidden;  // [m, rows->down_panels * 16], from the first column of this weight on
};

enum Needs : unsigned {
  kNothing = 0,
  kAvx2 = 1,
  kAvxVnni = 2,
  kAvx512Vnni = 4,
  kAmx = 8,
  kDotprod = 1,
  kI8mm = 2
};

struct NormArgs;  // decoder.h, as is all that the last four functions of a table do
struct AttentionArgs;

struct KernelTable {
  const char* name;  // the word a person types: "scalar", "avx2", ...
  unsigned needs;    // asked of the CPU by dispatch.cpp; code in isa/ may not run before the answer
  int row_block;     // rows of x that one tile holds in registers
  void (*quantize_rows)(const Rows&, int64_t block_begin, int64_t block_end);
  void (*linear_w4)(const LinearArgs&, int64_t panel_begin, int64_t panel_end);  // int or float activations
  void (*linear_w8)(const LinearArgs&, int64_t panel_begin, int64_t panel_end);
  void (*linear_f16)(const LinearArgs&, int64_t panel_begin,
                     int64_t panel_end);  // weight [panels, k, 16] float16
  void (*add_norm)(const NormArgs&, int64_t row_begin, int64_t row_end);
  void (*silu_mul)(float* gate, const float* up, int64_t rows, int64_t stride, int64_t columns);
  void (*append_rows)(const AttentionArgs&, int64_t row_begin, int64_t row_end);
  void (*attend)(const AttentionArgs&, int64_t item_begin, int64_t item_end, float* scratch);
};

extern const KernelTable kScalarTable;
#if defined(__x86_64__)
extern const KernelTable kAvx2Table, kAvxVnniTable, kAvx512VnniTable, kAmxTable;
#elif defined(__aarch64__)
extern const KernelTable kNeonTable, kDotprodTable, kI8mmTable;
#endif

// Best first. pick("") is the best table this CPU allows; a name that cannot run gives nullptr.
const KernelTable* pick(const char* name);
bool supported(const KernelTable& table);
int count();
const KernelTable* at(int i);

}  // namespace lowbit::cpu
