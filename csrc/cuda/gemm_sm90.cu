// Which row of tiles a shape gets.
#include "gemm_sm90_rows.cuh"

namespace lowbit::cuda {

struct Rows {
  const Row* rows;
  int count;
};
static Rows rows_of(Mode mode) {
  switch (mode) {
    case kW8:
      return {kRowsW8, kCountW8};
    case kW4Channel:
      return {kRowsW4Channel, kCountW4Channel};
    case kW4TwoLevel:
      return {kRowsW4TwoLevel, kCountW4TwoLevel};
    default:
      return {kRowsW4Group, kCountW4Group};
  }
}

static bool fits(const Row& row, const LinearArgs& a) {
  if (a.gated && !row.gated) return false;
  const int all = a.kp / 128, blocks = all / row.tile.split;
  return a.np % (64 * row.tile.warpgroups) == 0 && all % row.tile.split == 0 && blocks % 2 == 0;
}

// Cycles of a launch, from what bounds a tile: 4096 products a cycle, 45 bytes a cycle into a multiprocessor,
// the part that does not overlap. Fitted to the measured rows; it tells good rows from bad ones.
static double cycles(const Row& row, const LinearArgs& a, const Device& device) {
  const TileRow& t = row.tile;
  const int blocks = a.kp / 128 / t.split;
  const long tiles = (long)(a.np / (64 * t.warpgroups)) * ((a.m + t.tokens - 1) / t.tokens) * t.split;
  const long slots = (long)device.multiprocessors * row.ctas, waves = (tiles + slots - 1) / slots;
  const double share = tiles <= device.multiprocessors ? 1 : row.ctas;  // CTAs that share one multiprocessor
  const double product = 2.0 * t.warpgroups * t.tokens * (a.mode == kW4Group ? 1.7 : 1.1);
  const double bytes = t.tokens * 128 + t.warpgroups * tile_bytes(a.mode);
  const double block = product > bytes / 45 ? product : bytes / 45;
  const double end = 1500 + 8.0 * t.warpgroups * t.tokens / t.split * share + (t.split > 1 ? 2000 : 0);
  const double loop = blocks * (block > 160 ? block : 160) * share;
  return 1500 + waves * loop + (t.persistent ? end : waves * end);
}

// Measured on an H200, 2026-11-30: shapes of the fused linears of a Qwen3 layer of 1024, up to `most` rows.
// The model decides for every other shape. Up to 384 rows the 4-bit ones are those with which whole layers
// are fastest (two-level scales, attention and quantizers between): 33.8 us a layer of 172 rows and 40.2 of
// 256, where the rows of before gave 35.4 and 47.3. They split the columns of fewer and larger tiles. From
// 385 rows on, and up to 64, those that are fastest alone; between the rows that were timed, those with as
// few waves.
struct Measured {
  int modes;  // a bit each
  int n, k, most, row;
  int low = 3;  // 1: without low rank, 2: with one
};
constexpr int kW8Bit = 1 << kW8, kChannelBit = 1 << kW4Channel, kTwoBit = 1 << kW4TwoLevel,
              kGroupBit = 1 << kW4Group;
constexpr int kDense = kW8Bit | kChannelBit | kTwoBit, kShort = kW8Bit | kChannelBit,
              kFour = kChannelBit | kTwoBit;
static const Measured kMeasured[] = {
    // qkv
    {kFour, 4096, 1024, 128, 15},
    {kFour, 4096, 1024, 192, 6},
    {kFour, 4096, 1024, 256, 15},
    {kFour, 4096, 1024, 384, 6},
    {kFour, 4096, 1024, 512, 9},
    {kW8Bit, 4096, 1024, 192, 6},
    {kW8Bit, 4096, 1024, 256, 3},
    {kDense, 4096, 1024, 704, 7},
    {kDense, 4096, 1024, 768, 11},
    {kFour, 4096, 1024, 960, 10},
    {kFour, 4096, 1024, 1024, 9},
    {kFour, 4096, 1024, 1408, 7},
    {kFour, 4096, 1024, 1536, 11},
    {kDense, 4096, 1024, 2048, 10},
    {kGroupBit, 4096, 1024, 256, 2},
    {kGroupBit, 4096, 1024, 2048, 6},
    // o
    {kFour, 1024, 2048, 64, 2},
    {kFour, 1024, 2048, 128, 1},
    {kFour, 1024, 2048, 192, 13},
    {kFour, 1024, 2048, 512, 14},
    {kW8Bit, 1024, 2048, 256, 2},
    {kShort, 1024, 2048, 720, 3},
    {kTwoBit, 1024, 2048, 720, 6},
    {kFour, 1024, 2048, 768, 6},
    {kFour, 1024, 2048, 1408, 4},
    {kDense, 1024, 2048, 2048, 9},
    {kGroupBit, 1024, 2048, 256, 1},
    {kGroupBit, 1024, 2048, 900, 2},
    {kGroupBit, 1024, 2048, 2048, 4},
    // gate and up
    {kFour, 6144, 1024, 128, 15},
    {kFour, 6144, 1024, 176, 4, 1},
    {kFour, 6144, 1024, 256, 6},
    {kFour, 6144, 1024, 384, 8},
    {kW8Bit, 6144, 1024, 176, 4},
    {kW8Bit, 6144, 1024, 256, 6},
    {kDense, 6144, 1024, 704, 8},
    {kDense, 6144, 1024, 768, 12},
    {kFour, 6144, 1024, 1200, 10},
    {kFour, 6144, 1024, 1408, 8},
    {kFour, 6144, 1024, 1536, 12},
    {kDense, 6144, 1024, 2048, 10},
    {kGroupBit, 6144, 1024, 256, 2},
    {kGroupBit, 6144, 1024, 2048, 6},
    // down
    {kFour, 1024, 3072, 64, 2},
    {kFour, 1024, 3072, 128, 14},
    {kFour, 1024, 3072, 384, 13},
    {kFour, 1024, 3072, 512, 14},
    {kW8Bit, 1024, 3072, 192, 1},
    {kW8Bit, 1024, 3072, 256, 2},
    {kShort, 1024, 3072, 720, 3},
    {kTwoBit, 1024, 3072, 720, 5},
    {kFour, 1024, 3072, 768, 6},
    {kFour, 1024, 3072, 1408, 4},
    {kDense, 1024, 3072, 2048, 9},
    {kGroupBit, 1024, 3072, 256, 1},
    {kGroupBit, 1024, 3072, 900, 2},
    {kGroupBit, 1024, 3072, 2048, 4},
};

static int choose(const Rows& r, const LinearArgs& a, const Device& device) {
  for (const Measured& m : kMeasured)
    if (m.modes >> a.mode & 1 && m.n == a.n && m.k == a.kp && a.m <= m.most && (a.m > 64 || m.most <= 64) &&
        m.low & (a.rank ? 2 : 1) && (!a.gated || r.rows[m.row].gated))
      return m.row;
  int best = -1;
  double least = 1e30;
  for (int i = 0; i < r.count; i++) {
    const double c = fits(r.rows[i], a) ? cycles(r.rows[i], a, device) : 1e30;
    if (c < least) least = c, best = i;
  }
  return best;
}

const char* launch_gemm_sm90(const LinearArgs& a, int row, const Device& device, Stream stream) {
  const Rows r = rows_of(a.mode);
  if (row >= r.count) return "row: there are fewer rows of tiles";
  if (row < 0) row = choose(r, a, device);
  if (row < 0 || !fits(r.rows[row], a)) return "row: the tile does not divide the shape, or has no gated end";
  return (a.gated ? r.rows[row].gated : r.rows[row].launch)(a, device, stream);
}

}  // namespace lowbit::cuda
