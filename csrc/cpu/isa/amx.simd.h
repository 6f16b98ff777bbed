// AMX: eight registers of 16 rows of 64 bytes, and one instruction that multiplies two of them. Tiles 0..3
// are sums [x rows][w rows] of int32, 2 tiles of x by 2 of w; 4 and 5 hold x, 16 rows of 64 columns; 6 and 7
// hold w, 16 lines of a panel: 64 columns of 16 rows. All else is AVX-512.
#include "avx512vnni.simd.h"

// Stores that the compiler has put off are done, and nothing read before is still good: the tile loads of gcc
// say nothing of the memory they read.
static inline void memory_is_read() { __asm__ volatile("" : : : "memory"); }

// `rows`: of the two tiles of x, 0 for no second; `unit`: bytes of a row of x in a tile.
static inline void open_tiles(int rows0, int rows1, int unit) {
  struct alignas(64) Config {
    uint8_t palette, start_row, reserved[14];
    uint16_t row_bytes[16];
    uint8_t rows[16];
  } c = {};
  static_assert(sizeof(Config) == 64);
  const int rows[2] = {rows0, rows1};
  c.palette = 1;
  for (int i = 0; i < 2; ++i) {
    for (int sum = 2 * i; sum < 2 * i + 2; ++sum)
      c.rows[sum] = static_cast<uint8_t>(rows[i]), c.row_bytes[sum] = rows[i] ? 64 : 0;
    c.rows[4 + i] = static_cast<uint8_t>(rows[i]);
    c.row_bytes[4 + i] = static_cast<uint16_t>(rows[i] ? unit : 0);
    c.rows[6 + i] = static_cast<uint8_t>(unit / 4), c.row_bytes[6 + i] = 64;
  }
  __asm__ volatile("" : : "r"(&c) : "memory");
  _tile_loadconfig(&c);
}
static inline void close_tiles() { _tile_release(); }

// The number of a tile is part of the instruction: one branch a number.
template <int kT>
static inline void load_x(const int8_t* x, int64_t row_bytes) {
  if constexpr (kT == 0) _tile_loadd(4, x, row_bytes);
  if constexpr (kT == 1) _tile_loadd(5, x, row_bytes);
}
template <int kP>
static inline void load_w(const uint8_t* lines) {
  if constexpr (kP == 0) _tile_loadd(6, lines, 64);
  if constexpr (kP == 1) _tile_loadd(7, lines, 64);
}
template <int kT, int kP>
static inline void zero_sum() {
  if constexpr (kT == 0 && kP == 0) _tile_zero(0);
  if constexpr (kT == 0 && kP == 1) _tile_zero(1);
  if constexpr (kT == 1 && kP == 0) _tile_zero(2);
  if constexpr (kT == 1 && kP == 1) _tile_zero(3);
}
template <int kT, int kP>
static inline void load_sum(const int32_t* sum) {
  if constexpr (kT == 0 && kP == 0) _tile_loadd(0, sum, 64);
  if constexpr (kT == 0 && kP == 1) _tile_loadd(1, sum, 64);
  if constexpr (kT == 1 && kP == 0) _tile_loadd(2, sum, 64);
  if constexpr (kT == 1 && kP == 1) _tile_loadd(3, sum, 64);
}
template <int kT, int kP>
static inline void store_sum(int32_t* sum) {
  if constexpr (kT == 0 && kP == 0) _tile_stored(0, sum, 64);
  if constexpr (kT == 0 && kP == 1) _tile_stored(1, sum, 64);
  if constexpr (kT == 1 && kP == 0) _tile_stored(2, sum, 64);
  if constexpr (kT == 1 && kP == 1) _tile_stored(3, sum, 64);
}
template <int kT, int kP>
static inline void dot_signed() {  // x signed, w signed
  if constexpr (kT == 0 && kP == 0) _tile_dpbssd(0, 4, 6);
  if constexpr (kT == 0 && kP == 1) _tile_dpbssd(1, 4, 7);
  if constexpr (kT == 1 && kP == 0) _tile_dpbssd(2, 5, 6);
  if constexpr (kT == 1 && kP == 1) _tile_dpbssd(3, 5, 7);
}
template <int kT, int kP>
static inline void dot_unsigned() {  // x signed, w unsigned
  if constexpr (kT == 0 && kP == 0) _tile_dpbsud(0, 4, 6);
  if constexpr (kT == 0 && kP == 1) _tile_dpbsud(1, 4, 7);
  if constexpr (kT == 1 && kP == 0) _tile_dpbsud(2, 5, 6);
  if constexpr (kT == 1 && kP == 1) _tile_dpbsud(3, 5, 7);
}

constexpr int kTilePrefetch =
    4096;  // bytes ahead, into L2; on a Xeon 2 to 8 KB alike, none 1.3 times slower at M = 16

// 4-bit codes become bytes, and their zero points go off on the way: |code - zero| <= 15 is an int8, and
// Σ (code - zero)·a is the same integer.
struct TileW4 {
  static constexpr bool kUnpacks = true, kCorrects = false;
  static constexpr int kMaxCode = 15, kColumnBytes = 8;  // of 16 rows
  static inline void unpack(const uint8_t* lines, const uint8_t* zeros, int64_t columns, uint8_t* out) {
    const I low = splat8(15), zero = _mm512_mullo_epi32(load_u8(zeros), splat_i(0x01010101));
    for (int64_t k = 0; k < columns; k += 8, lines += 64, out += 128) {
      __builtin_prefetch(lines + kTilePrefetch, 0, 2);
      const I raw = load_i(lines);
      _mm512_storeu_si512(out, _mm512_sub_epi8(and_i(raw, low), zero));
      _mm512_storeu_si512(out + 64, _mm512_sub_epi8(and_i(srli16(raw, 4), low), zero));
    }
  }
  template <int kT, int kP>
  static inline void dot() {
    dot_signed<kT, kP>();
  }
};

// 8-bit codes are tiles as they lie. Less a zero point they would not fit a byte, so that is taken off the
// sums.
struct TileW8 {
  static constexpr bool kUnpacks = false, kCorrects = true;
  static constexpr int kMaxCode = 255, kColumnBytes = 16;
  static inline void unpack(const uint8_t* lines, const uint8_t*, int64_t columns, uint8_t*) {
    for (int64_t k = 0; k < columns; k += 4, lines += 64) __builtin_prefetch(lines + kTilePrefetch, 0, 2);
  }
  template <int kT, int kP>
  static inline void dot() {
    dot_unsigned<kT, kP>();
  }
};
