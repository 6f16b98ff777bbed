#include "gemm_sm90_rows.cuh"
// Scaling takes as many cycles as the product and overlaps only between warpgroups: two small CTAs a
// multiprocessor, or as many warpgroups as fit.
namespace lowbit::cuda {
const Row kRowsW4Group[] = {
    row<kW4Group, Tile{.warpgroups = 1, .tokens = 16, .stages = 6}, true>(),
    row<kW4Group, Tile{.warpgroups = 1, .tokens = 48, .stages = 5, .split = 2}>(),
    row<kW4Group, Tile{.warpgroups = 1, .tokens = 96, .stages = 4}, true>(),
    row<kW4Group, Tile{.warpgroups = 2, .tokens = 96, .stages = 5, .split = 2}>(),
    row<kW4Group, Tile{.warpgroups = 1, .tokens = 128, .stages = 4}>(),
    row<kW4Group, Tile{.warpgroups = 2, .tokens = 176, .stages = 5}>(),
    row<kW4Group, Tile{.warpgroups = 1, .tokens = 176, .stages = 3}, true>(),
};
const int kCountW4Group = sizeof kRowsW4Group / sizeof kRowsW4Group[0];
}  // namespace lowbit::cuda
