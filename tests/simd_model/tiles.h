// What the tile instructions of AMX-INT8 do, in plain C++, after their definition in Intel's manual. No
// emulator of them can be had here. Force-included after model.h, or alone where the CPU has AVX-512. What
// would fault on a CPU ends the program with a word on the reason: a configuration with wrong fields, tiles
// that do not fit each other, an instruction while nothing is configured. So does a program that ends with
// tiles still configured. LOWBIT_BREAK_* put one mistake in, to see that it is noticed.
#pragma once
#include <immintrin.h>

#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>

namespace model {

struct Tiles {
  static constexpr int kTiles = 8, kMostRows = 16, kMostBytes = 64;
  bool open = false;
  int rows[kTiles] = {}, bytes[kTiles] = {};
  uint8_t data[kTiles][kMostRows][kMostBytes] = {};
  ~Tiles() { expect(!open, "the program ended without tilerelease"); }

  static void expect(bool fine, const char* what) {
    if (fine) return;
    std::printf("tiles: %s\n", what);
    std::fflush(stdout);
    std::_Exit(3);
  }
  // A tile that is used: configured, and not of size 0.
  void used(int t) const { expect(open && rows[t] && bytes[t], "a tile that is not configured"); }

  // 64 bytes: palette, start_row, 14 reserved, 16 words of bytes a row, 16 bytes of rows. All tiles become
  // zero.
  void configure(const void* memory) {
    uint8_t c[64];
    std::memcpy(c, memory, sizeof c);
    expect(c[0] == 1 && c[1] == 0, "palette or start_row");
    for (int i = 2; i < 16; ++i) expect(!c[i], "a reserved byte");
    for (int t = 0; t < 16; ++t) {
      const int b = c[16 + 2 * t] | c[17 + 2 * t] << 8, r = c[48 + t];
      expect(t < kTiles ? b <= kMostBytes && r <= kMostRows : !b && !r, "rows or bytes of a tile");
      expect(!b == !r, "rows without bytes");
      if (t < kTiles) rows[t] = r, bytes[t] = b;
    }
    std::memset(data, 0, sizeof data);
    open = true;
  }
  void release() {
#if defined(LOWBIT_BREAK_RELEASE)
    return;
#endif
    open = false;
    std::memset(rows, 0, sizeof rows), std::memset(bytes, 0, sizeof bytes);
  }
  void zero(int t) {
    used(t);
    std::memset(data[t], 0, sizeof data[t]);
  }
  void load(int t, const void* base, int64_t stride) {
    zero(t);
    for (int r = 0; r < rows[t]; ++r)
      std::memcpy(data[t][r], static_cast<const uint8_t*>(base) + r * stride, static_cast<size_t>(bytes[t]));
  }
  void store(int t, void* base, int64_t stride) const {
    used(t);
    for (int r = 0; r < rows[t]; ++r)
      std::memcpy(static_cast<uint8_t*>(base) + r * stride, data[t][r], static_cast<size_t>(bytes[t]));
  }
  // c[m][n] += a[m][4k + i] * b[k][4n + i]; int32 that wraps, does not saturate; rows beyond become zero.
  template <class A, class B>
  void dot(int c, int a, int b) {
    used(c), used(a), used(b);
    expect(c != a && c != b && a != b, "one tile twice in a product");
    expect(rows[c] == rows[a] && bytes[c] == bytes[b], "a product into a tile of another size");
    expect(bytes[a] % 4 == 0 && bytes[b] % 4 == 0 && bytes[a] / 4 == rows[b], "depths that differ");
    for (int m = 0; m < rows[c]; ++m)
      for (int n = 0; n < bytes[c] / 4; ++n) {
        uint32_t sum;
        std::memcpy(&sum, &data[c][m][4 * n], 4);
        for (int k = 0; k < rows[b]; ++k)
          for (int i = 0; i < 4; ++i)
            sum += static_cast<uint32_t>(static_cast<A>(data[a][m][4 * k + i]) *
                                         static_cast<B>(data[b][k][4 * n + i]));
        std::memcpy(&data[c][m][4 * n], &sum, 4);
      }
  }
};
static Tiles tiles;

static inline void tile_config(const void* p) { tiles.configure(p); }
static inline void tile_release() { tiles.release(); }

}  // namespace model

#undef _tile_loadd
#undef _tile_stored
#undef _tile_zero
#undef _tile_dpbssd
#undef _tile_dpbsud
#define _tile_loadconfig model::tile_config
#define _tile_release model::tile_release
#define _tile_loadd(t, base, stride) model::tiles.load(t, base, stride)
#define _tile_stored(t, base, stride) model::tiles.store(t, base, stride)
#define _tile_zero(t) model::tiles.zero(t)
#if defined(LOWBIT_BREAK_SIGN)
#define _tile_dpbssd(c, a, b) (model::tiles.dot<int8_t, uint8_t>(c, a, b))
#define _tile_dpbsud(c, a, b) (model::tiles.dot<int8_t, int8_t>(c, a, b))
#elif defined(LOWBIT_BREAK_OPERANDS)
#define _tile_dpbssd(c, a, b) (model::tiles.dot<int8_t, int8_t>(c, b, a))
#define _tile_dpbsud(c, a, b) (model::tiles.dot<int8_t, uint8_t>(c, b, a))
#else
#define _tile_dpbssd(c, a, b) (model::tiles.dot<int8_t, int8_t>(c, a, b))
#define _tile_dpbsud(c, a, b) (model::tiles.dot<int8_t, uint8_t>(c, a, b))
#endif
