// Host side of the Hopper GEMM: one launcher a row of the tables.
#pragma once
#include "gemm_sm90.cuh"
#include "launch.cuh"

namespace lowbit::cuda {

struct Row {
  TileRow tile;
  int ctas;  // a multiprocessor
  const char* (*launch)(const LinearArgs&, const Device&, Stream);
  const char* (*gated)(const LinearArgs&, const Device&, Stream);  // with silu(gate) * up at the end, or null
};

// Gated ends are kernels of their own: behind a branch of one kernel they cost the others 4 %.
template <class C, bool gated>
const char* launch_row(const LinearArgs& in, const Device& device, Stream stream) {
  const void* kernel = reinterpret_cast<const void*>(gemm_sm90<C, gated>);
  static_assert(C::shared <= 232448, "more shared memory than a multiprocessor has");
  static bool allowed[kMostDevices];
  if (const char* wrong = allow_shared(kernel, device.shared, device, allowed)) return wrong;
  CUtensorMap x, y;
  if (const char* wrong = tensor_map(&x, in.codes, 1, in.kp, in.m, 128, C::tokens)) return wrong;
  if (in.dtype == Dtype::kFloat32)
    y = x;
  else if (const char* wrong = gated ? tensor_map(&y, in.y, 2, in.n / 2, in.m, 32, C::own)
                                     : tensor_map(&y, in.y, 2, in.n, in.m, 64, C::own))
    return wrong;
  GemmArgs a{in.weight,
             in.channel,
             in.scales,
             in.bias,
             static_cast<const uint8_t*>(in.low),
             static_cast<const uint8_t*>(in.up),
             in.y,
             in.m,
             in.n,
             in.np,
             in.kp,
             in.rank / 16,
             in.dtype};
  const int tiles = in.np / C::channels * ((in.m + C::tokens - 1) / C::tokens),
            slots = device.multiprocessors * C::ctas;
  const int waves = (tiles + slots - 1) / slots;
  const int grid = C::persistent ? (tiles + waves - 1) / waves : tiles * C::split;
  void* args[] = {&x, &y, &a};
  // A multiprocessor each: early CTAs would else pair up on those that are free first.
  constexpr int kAlone = 116 * 1024;
  const bool alone = C::ctas > 1 && grid <= device.multiprocessors && C::shared < kAlone;
  return start(kernel, grid, C::threads, alone ? kAlone : C::shared, C::split, device, stream, args);
}

template <Mode mode, Tile tile, bool gates = false>
constexpr Row row() {
  using C = Config<mode, tile>;
  Row r = {{tile.warpgroups, tile.tokens, tile.stages, tile.split, tile.persistent},
           C::ctas,
           launch_row<C, false>,
           nullptr};
  if constexpr (gates) r.gated = launch_row<C, true>;
  return r;
}

extern const Row kRowsW8[], kRowsW4Channel[], kRowsW4TwoLevel[], kRowsW4Group[];
extern const int kCountW8, kCountW4Channel, kCountW4TwoLevel, kCountW4Group;

}  // namespace lowbit::cuda
