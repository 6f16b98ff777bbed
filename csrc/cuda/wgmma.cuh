// wgmma m64nNk32, s8 x s8 -> s32: D [64 channels x N tokens] in registers. One macro, one line a width.
//
// ss(d, A descriptor, B descriptor, accumulate)      both operands in shared memory
// rs(d, A registers, B descriptor, accumulate)       A [64 x 32] in registers
// f16(d, A registers, B descriptor)                  m64nNk16, f16 x f16 -> f32 added to d, whose bits are
// floats
#pragma once
#include <cstdint>

// clang-format off

namespace lowbit::cuda {

template <int N>
struct Wgmma;

#define LOWBIT_R0 "%0,%1,%2,%3,%4,%5,%6,%7"
#define LOWBIT_R1 "%8,%9,%10,%11,%12,%13,%14,%15"
#define LOWBIT_R2 "%16,%17,%18,%19,%20,%21,%22,%23"
#define LOWBIT_R3 "%24,%25,%26,%27,%28,%29,%30,%31"
#define LOWBIT_R4 "%32,%33,%34,%35,%36,%37,%38,%39"
#define LOWBIT_R5 "%40,%41,%42,%43,%44,%45,%46,%47"
#define LOWBIT_R6 "%48,%49,%50,%51,%52,%53,%54,%55"
#define LOWBIT_R7 "%56,%57,%58,%59,%60,%61,%62,%63"
#define LOWBIT_R8 "%64,%65,%66,%67,%68,%69,%70,%71"
#define LOWBIT_R9 "%72,%73,%74,%75,%76,%77,%78,%79"
#define LOWBIT_R10 "%80,%81,%82,%83,%84,%85,%86,%87"
#define LOWBIT_R11 "%88,%89,%90,%91,%92,%93,%94,%95"
#define LOWBIT_R12 "%96,%97,%98,%99,%100,%101,%102,%103"
#define LOWBIT_R13 "%104,%105,%106,%107,%108,%109,%110,%111"
#define LOWBIT_R14 "%112,%113,%114,%115,%116,%117,%118,%119"
#define LOWBIT_D(i) "+r"(d[i]), "+r"(d[i + 1]), "+r"(d[i + 2]), "+r"(d[i + 3]), "+r"(d[i + 4]), "+r"(d[i + 5]), "+r"(d[i + 6]), "+r"(d[i + 7])

// REGS: the registers of D; DS: the same as operands; A0 .. A5: the numbers of the operands that follow them.
#define LOWBIT_WGMMA(N, REGS, DS, A0, A1, A2, A3, A4, A5)                                                          \
  template <>                                                                                                      \
  struct Wgmma<N> {                                                                                                \
    static __device__ __forceinline__ void ss(int (&d)[N / 2], uint64_t a, uint64_t b, int accumulate) {           \
      asm volatile("{\n.reg .pred p;\nsetp.ne.b32 p, %" A2 ", 0;\n"                                                \
                   "wgmma.mma_async.sync.aligned.m64n" #N "k32.s32.s8.s8 {" REGS "}, %" A0 ", %" A1 ", p;\n}\n"    \
                   : DS                                                                                            \
                   : "l"(a), "l"(b), "r"(accumulate));                                                             \
    }                                                                                                              \
    static __device__ __forceinline__ void rs(int (&d)[N / 2], const uint32_t (&a)[4], uint64_t b,                 \
                                              int accumulate) {                                                    \
      asm volatile("{\n.reg .pred p;\nsetp.ne.b32 p, %" A5 ", 0;\n"                                                \
                   "wgmma.mma_async.sync.aligned.m64n" #N "k32.s32.s8.s8 {" REGS "}, {%" A0 ",%" A1 ",%" A2 ",%" A3 \
                   "}, %" A4 ", p;\n}\n"                                                                           \
                   : DS                                                                                            \
                   : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b), "r"(accumulate));                         \
    }                                                                                                              \
    static __device__ __forceinline__ void f16(int (&d)[N / 2], const uint4& a, uint64_t b) {                      \
      asm volatile("wgmma.mma_async.sync.aligned.m64n" #N "k16.f32.f16.f16 {" REGS "}, {%" A0 ",%" A1 ",%" A2      \
                   ",%" A3 "}, %" A4 ", 1, 1, 1, 0;\n"                                                              \
                   : DS                                                                                            \
                   : "r"(a.x), "r"(a.y), "r"(a.z), "r"(a.w), "l"(b));                                              \
    }                                                                                                              \
  };

#define LOWBIT_COMMA ,
LOWBIT_WGMMA(16, LOWBIT_R0, LOWBIT_D(0), "8", "9", "10", "11", "12", "13")
LOWBIT_WGMMA(24, LOWBIT_R0 ",%8,%9,%10,%11", LOWBIT_D(0) LOWBIT_COMMA "+r"(d[8]) LOWBIT_COMMA "+r"(d[9]) LOWBIT_COMMA "+r"(d[10]) LOWBIT_COMMA "+r"(d[11]), "12", "13", "14", "15", "16", "17")
LOWBIT_WGMMA(32, LOWBIT_R0 "," LOWBIT_R1, LOWBIT_D(0) LOWBIT_COMMA LOWBIT_D(8), "16", "17", "18", "19", "20", "21")
LOWBIT_WGMMA(48, LOWBIT_R0 "," LOWBIT_R1 "," LOWBIT_R2, LOWBIT_D(0) LOWBIT_COMMA LOWBIT_D(8) LOWBIT_COMMA LOWBIT_D(16), "24", "25", "26", "27", "28", "29")
LOWBIT_WGMMA(64, LOWBIT_R0 "," LOWBIT_R1 "," LOWBIT_R2 "," LOWBIT_R3, LOWBIT_D(0) LOWBIT_COMMA LOWBIT_D(8) LOWBIT_COMMA LOWBIT_D(16) LOWBIT_COMMA LOWBIT_D(24), "32", "33", "34", "35", "36", "37")
LOWBIT_WGMMA(96, LOWBIT_R0 "," LOWBIT_R1 "," LOWBIT_R2 "," LOWBIT_R3 "," LOWBIT_R4 "," LOWBIT_R5, LOWBIT_D(0) LOWBIT_COMMA LOWBIT_D(8) LOWBIT_COMMA LOWBIT_D(16) LOWBIT_COMMA LOWBIT_D(24) LOWBIT_COMMA LOWBIT_D(32) LOWBIT_COMMA LOWBIT_D(40), "48", "49", "50", "51", "52", "53")
LOWBIT_WGMMA(128, LOWBIT_R0 "," LOWBIT_R1 "," LOWBIT_R2 "," LOWBIT_R3 "," LOWBIT_R4 "," LOWBIT_R5 "," LOWBIT_R6 "," LOWBIT_R7, LOWBIT_D(0) LOWBIT_COMMA LOWBIT_D(8) LOWBIT_COMMA LOWBIT_D(16) LOWBIT_COMMA LOWBIT_D(24) LOWBIT_COMMA LOWBIT_D(32) LOWBIT_COMMA LOWBIT_D(40) LOWBIT_COMMA LOWBIT_D(48) LOWBIT_COMMA LOWBIT_D(56), "64", "65", "66", "67", "68", "69")
LOWBIT_WGMMA(176, LOWBIT_R0 "," LOWBIT_R1 "," LOWBIT_R2 "," LOWBIT_R3 "," LOWBIT_R4 "," LOWBIT_R5 "," LOWBIT_R6 "," LOWBIT_R7 "," LOWBIT_R8 "," LOWBIT_R9 "," LOWBIT_R10, LOWBIT_D(0) LOWBIT_COMMA LOWBIT_D(8) LOWBIT_COMMA LOWBIT_D(16) LOWBIT_COMMA LOWBIT_D(24) LOWBIT_COMMA LOWBIT_D(32) LOWBIT_COMMA LOWBIT_D(40) LOWBIT_COMMA LOWBIT_D(48) LOWBIT_COMMA LOWBIT_D(56) LOWBIT_COMMA LOWBIT_D(64) LOWBIT_COMMA LOWBIT_D(72) LOWBIT_COMMA LOWBIT_D(80), "88", "89", "90", "91", "92", "93")
LOWBIT_WGMMA(192, LOWBIT_R0 "," LOWBIT_R1 "," LOWBIT_R2 "," LOWBIT_R3 "," LOWBIT_R4 "," LOWBIT_R5 "," LOWBIT_R6 "," LOWBIT_R7 "," LOWBIT_R8 "," LOWBIT_R9 "," LOWBIT_R10 "," LOWBIT_R11, LOWBIT_D(0) LOWBIT_COMMA LOWBIT_D(8) LOWBIT_COMMA LOWBIT_D(16) LOWBIT_COMMA LOWBIT_D(24) LOWBIT_COMMA LOWBIT_D(32) LOWBIT_COMMA LOWBIT_D(40) LOWBIT_COMMA LOWBIT_D(48) LOWBIT_COMMA LOWBIT_D(56) LOWBIT_COMMA LOWBIT_D(64) LOWBIT_COMMA LOWBIT_D(72) LOWBIT_COMMA LOWBIT_D(80) LOWBIT_COMMA LOWBIT_D(88), "96", "97", "98", "99", "100", "101")
LOWBIT_WGMMA(240, LOWBIT_R0 "," LOWBIT_R1 "," LOWBIT_R2 "," LOWBIT_R3 "," LOWBIT_R4 "," LOWBIT_R5 "," LOWBIT_R6 "," LOWBIT_R7 "," LOWBIT_R8 "," LOWBIT_R9 "," LOWBIT_R10 "," LOWBIT_R11 "," LOWBIT_R12 "," LOWBIT_R13 "," LOWBIT_R14, LOWBIT_D(0) LOWBIT_COMMA LOWBIT_D(8) LOWBIT_COMMA LOWBIT_D(16) LOWBIT_COMMA LOWBIT_D(24) LOWBIT_COMMA LOWBIT_D(32) LOWBIT_COMMA LOWBIT_D(40) LOWBIT_COMMA LOWBIT_D(48) LOWBIT_COMMA LOWBIT_D(56) LOWBIT_COMMA LOWBIT_D(64) LOWBIT_COMMA LOWBIT_D(72) LOWBIT_COMMA LOWBIT_D(80) LOWBIT_COMMA LOWBIT_D(88) LOWBIT_COMMA LOWBIT_D(96) LOWBIT_COMMA LOWBIT_D(104) LOWBIT_COMMA LOWBIT_D(112), "120", "121", "122", "123", "124", "125")

#undef LOWBIT_WGMMA

// The products of an attention, A [64 x 16] in registers, added to d (or not): keys() has B [64 x 16], columns of the
// head side by side; values() has B [128 x 16], 16 rows of 128 columns.
template <bool bf16>
struct WgmmaFloat;

#define LOWBIT_F(i) "+f"(d[i]), "+f"(d[i + 1]), "+f"(d[i + 2]), "+f"(d[i + 3]), "+f"(d[i + 4]), "+f"(d[i + 5]), "+f"(d[i + 6]), "+f"(d[i + 7])
#define LOWBIT_KEYS_D LOWBIT_F(0), LOWBIT_F(8), LOWBIT_F(16), LOWBIT_F(24)
#define LOWBIT_VALUES_D LOWBIT_KEYS_D, LOWBIT_F(32), LOWBIT_F(40), LOWBIT_F(48), LOWBIT_F(56)
#define LOWBIT_KEYS_REGS LOWBIT_R0 "," LOWBIT_R1 "," LOWBIT_R2 "," LOWBIT_R3
#define LOWBIT_VALUES_REGS LOWBIT_KEYS_REGS "," LOWBIT_R4 "," LOWBIT_R5 "," LOWBIT_R6 "," LOWBIT_R7

#define LOWBIT_ATTEND(NAME, N, TYPE, REGS, DS, A0, A1, A2, A3, A4, A5, ROWS)                                            \
  static __device__ __forceinline__ void NAME(float (&d)[N / 2], const uint4& a, uint64_t b, int accumulate) {       \
    asm volatile("{\n.reg .pred p;\nsetp.ne.b32 p, %" A5 ", 0;\n"                                                    \
                 "wgmma.mma_async.sync.aligned.m64n" #N "k16.f32." TYPE "." TYPE " {" REGS "}, {%" A0 ",%" A1 ",%" A2 \
                 ",%" A3 "}, %" A4 ", p, 1, 1, " ROWS ";\n}\n"                                                        \
                 : DS                                                                                                \
                 : "r"(a.x), "r"(a.y), "r"(a.z), "r"(a.w), "l"(b), "r"(accumulate));                                 \
  }
#define LOWBIT_ATTENTION(BF16, TYPE)                                                                                     \
  template <>                                                                                                        \
  struct WgmmaFloat<BF16> {                                                                                          \
    LOWBIT_ATTEND(keys, 64, TYPE, LOWBIT_KEYS_REGS, LOWBIT_KEYS_D, "32", "33", "34", "35", "36", "37", "0")             \
    LOWBIT_ATTEND(values, 128, TYPE, LOWBIT_VALUES_REGS, LOWBIT_VALUES_D, "64", "65", "66", "67", "68", "69", "1")      \
  };
LOWBIT_ATTENTION(false, "f16")
LOWBIT_ATTENTION(true, "bf16")

#undef LOWBIT_ATTENTION
#undef LOWBIT_ATTEND
#undef LOWBIT_F
#undef LOWBIT_COMMA
#undef LOWBIT_D

}  // namespace lowbit::cuda
