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
int gemm_sm90_rows(Mode mode) { return rows_of(mode).count; }
bool gemm_sm90_row(Mode mode, int row, TileRow* out) {
  const Rows r = rows_of(mode);
  if (row < 0 || row >= r.count) return false;
  *out = r.rows[row].tile;
  return true;
}

static bool fits(const Row& row, const LinearArgs& a) {
  const int blocks = a.kp / 128 / row.tile.split;
  return a.np % (64 * row.tile.warpgroups) == 0 && a.kp / 128 % row.tile.split == 0 && blocks % 2 == 0;
}

// Cycles of a launch, from what bounds a tile: 4096 products a cycle, 45 bytes a cycle into a multiprocessor, the part
// that does not overlap. Fitted to the measured rows; good to 10 %, which is what tells rows apart.
static double cycles(const Row& row, const LinearArgs& a, const Device& device) {
  const TileRow& t = row.tile;
  const int blocks = a.kp / 128 / t.split;
  const long tiles = (long)(a.np / (64 * t.warpgroups)) * ((a.m + t.tokens - 1) / t.tokens) * t.split;
  const long slots = (long)device.multiprocessors * row.ctas, waves = (tiles + slots - 1) / slots;
  const double share = tiles <= device.multiprocessors ? 1 : row.ctas;  // CTAs that share one multiprocessor
  const double product = 2.0 * t.warpgroups * t.tokens * (a.mode == kW4Group ? 1.7 : 1.1);
  const double bytes = t.tokens * 128 + t.warpgroups * tile_bytes(a.mode);
  const double block = product > bytes / 45 ? product : bytes / 45;
  const double end = 500 + 6.0 * t.warpgroups * t.tokens / t.split * share + (t.split > 1 ? 1100 : 0);
  const double loop = blocks * (block > 160 ? block : 160) * share;
  return 1500 + waves * loop + (t.persistent ? end : waves * end);
}

const char* launch_gemm_sm90(const LinearArgs& a, int row, const Device& device, Stream stream) {
  const Rows r = rows_of(a.mode);
  if (row >= r.count) return "row: there are fewer rows of tiles";
  if (row < 0) {
    double least = 1e30;
    for (int i = 0; i < r.count; i++) {
      const double c = fits(r.rows[i], a) ? cycles(r.rows[i], a, device) : 1e30;
      if (c < least) least = c, row = i;
    }
  }
  if (row < 0 || !fits(r.rows[row], a)) return "row: the tile does not divide the shape";
  return r.rows[row].launch(a, device, stream);
}

}  // namespace lowbit::cuda
