// Which row of tiles a shape gets.
#include "gemm_sm90_rows.cuh"

namespace lowbit::cuda {

struct Rows {
  const Row* rows;
  int count;
  const Row* resident;  // kResident of them behind the others, or null

  const Row& operator[](int i) const { return i < count ? rows[i] : resident[i - count]; }
  int all() const { return count + (resident ? kResident : 0); }
};
static Rows rows_of(Mode mode) {
  switch (mode) {
    case kW8:
      return {kRowsW8, kCountW8, nullptr};
    case kW4Channel:
      return {kRowsW4Channel, kCountW4Channel, kResidentChannel};
    case kW4TwoLevel:
      return {kRowsW4TwoLevel, kCountW4TwoLevel, kResidentTwoLevel};
    default:
      return {kRowsW4Group, kCountW4Group, nullptr};
  }
}
int gemm_sm90_rows(Mode mode) { return rows_of(mode).all(); }
bool gemm_sm90_row(Mode mode, int row, TileRow* out) {
  const Rows r = rows_of(mode);
  if (row < 0 || row >= r.all()) return false;
  *out = r[row].tile;
  return true;
}

static bool fits(const Row& row, const LinearArgs& a, const Device& device) {
  const int all = a.kp / 128, blocks = all / row.tile.split;
  if (a.np % (64 * row.tile.warpgroups) || row.shared(a.rank / 16) > device.shared) return false;
  if (row.tile.blocks) return all == row.tile.blocks && a.dtype != Dtype::kFloat32;
  return all % row.tile.split == 0 && blocks % 2 == 0;
}

// Cycles of a launch, from what bounds a tile: 4096 products a cycle, 45 bytes a cycle into a multiprocessor, the part
// that does not overlap. Fitted to the measured rows; good to 10 %, which is what tells rows apart.
static double cycles(const Row& row, const LinearArgs& a, const Device& device) {
  const TileRow& t = row.tile;
  const int tiles_n = a.np / (64 * t.warpgroups);
  if (t.blocks) {
    const Spread s = spread(t, tiles_n, a.m, device.multiprocessors);
    const double tokens = s.passes / 2 * (t.tokens + t.second) + s.passes % 2 * t.tokens;
    const long waves = ((long)tiles_n * s.groups + device.multiprocessors - 1) / device.multiprocessors;
    return 2500 + waves * (2.0 * t.warpgroups * 1.1 * tokens * t.blocks + 6.0 * t.warpgroups * t.second);
  }
  const int blocks = a.kp / 128 / t.split;
  const long tiles = (long)tiles_n * ((a.m + t.tokens - 1) / t.tokens) * t.split;
  const long slots = (long)device.multiprocessors * row.ctas, waves = (tiles + slots - 1) / slots;
  const double share = tiles <= device.multiprocessors ? 1 : row.ctas;  // CTAs that share one multiprocessor
  const double product = 2.0 * t.warpgroups * t.tokens * (a.mode == kW4Group ? 1.7 : 1.1);
  const double bytes = t.tokens * 128 + t.warpgroups * tile_bytes(a.mode);
  const double block = product > bytes / 45 ? product : bytes / 45;
  const double end = 1500 + 8.0 * t.warpgroups * t.tokens / t.split * share + (t.split > 1 ? 2000 : 0);
  const double loop = blocks * (block > 160 ? block : 160) * share;
  return 1500 + waves * loop + (t.persistent ? end : waves * end);
}

// Measured on an H200 (docs/numbers.md); the model decides for every other shape.
struct Measured {
  bool groups;  // fp16 scales
  int n, k, most, row;
};
static const Measured kMeasured[] = {
    {false, 4096, 1024, 256, 3}, {false, 1024, 2048, 256, 2}, {false, 6144, 1024, 256, 6}, {false, 1024, 3072, 256, 2},
    {true, 6144, 1024, 256, 2},  {true, 4096, 1024, 900, 6},  {true, 1024, 2048, 900, 3},  {true, 6144, 1024, 2048, 6},
    {true, 1024, 3072, 900, 3},
};

static int choose(const Rows& r, const LinearArgs& a, const Device& device) {
  if (a.m > 64)
    for (const Measured& m : kMeasured)
      if (m.groups == (a.mode == kW4Group) && m.n == a.n && m.k == a.kp && a.m <= m.most && fits(r[m.row], a, device))
        return m.row;
  int best = -1;
  double least = 1e30;
  for (int i = 0; i < r.all(); i++) {
    const double c = fits(r[i], a, device) ? cycles(r[i], a, device) : 1e30;
    if (c < least) least = c, best = i;
  }
  return best;
}

const char* launch_gemm_sm90(const LinearArgs& a, int row, const Device& device, Stream stream) {
  const Rows r = rows_of(a.mode);
  if (row >= r.all()) return "row: there are fewer rows of tiles";
  if (row < 0) row = choose(r, a, device);
  if (row < 0 || !fits(r[row], a, device)) return "row: the tile does not divide the shape";
  return r[row].launch(a, device, stream);
}

}  // namespace lowbit::cuda
