// Host side of the Hopper GEMM: one launcher a row of the tables.
#pragma once
#include "gemm_sm90_resident.cuh"
#include "launch.cuh"

namespace lowbit::cuda {

struct Row {
  TileRow tile;
  int ctas;                  // a multiprocessor
  int (*shared)(int chunks);  // bytes
  const char* (*launch)(const LinearArgs&, const Device&, Stream);
};

template <class C>
const char* launch_row(const LinearArgs& in, const Device& device, Stream stream) {
  const void* kernel = reinterpret_cast<const void*>(gemm_sm90<C>);
  static_assert(C::shared <= 232448, "more shared memory than a multiprocessor has");
  static bool allowed[kMostDevices];
  if (const char* wrong = allow_shared(kernel, C::shared, device, allowed)) return wrong;
  CUtensorMap x, y;
  if (const char* wrong = tensor_map(&x, in.codes, 1, in.kp, in.m, 128, C::tokens)) return wrong;
  if (in.dtype == Dtype::kFloat32)
    y = x;
  else if (const char* wrong = tensor_map(&y, in.y, 2, in.n, in.m, 64, C::own))
    return wrong;
  GemmArgs a{in.weight, in.channel, in.scales, in.bias, static_cast<const uint8_t*>(in.low),
             static_cast<const uint8_t*>(in.up), in.y, in.m, in.n, in.np, in.kp, in.rank / 16, in.dtype};
  const int tiles = in.np / C::channels * ((in.m + C::tokens - 1) / C::tokens), slots = device.multiprocessors * C::ctas;
  const int waves = (tiles + slots - 1) / slots;
  const int grid = C::persistent ? (tiles + waves - 1) / waves : tiles * C::split;
  void* args[] = {&x, &y, &a};
  return start(kernel, grid, C::threads, C::shared, C::split, device, stream, args);
}

template <Mode mode, Tile tile>
constexpr Row row() {
  using C = Config<mode, tile>;
  return {{tile.warpgroups, tile.tokens, tile.stages, tile.split, tile.persistent, 0, 0},
          C::ctas,
          [](int) { return C::shared; },
          launch_row<C>};
}

// How the tokens of m rows fall to the CTAs of a resident row: groups of CTAs, passes of each.
struct Spread {
  int groups, passes;
};
inline Spread spread(const TileRow& t, int tiles_n, int m, int multiprocessors) {
  Spread s{tiles_n < multiprocessors ? multiprocessors / tiles_n : 1, 0};
  const auto covered = [&](int passes) { return passes / 2 * (t.tokens + t.second) + passes % 2 * t.tokens; };
  while (s.groups * covered(s.passes) < m) s.passes++;
  s.groups = (m + covered(s.passes) - 1) / covered(s.passes);
  return s;
}

template <class C>
const char* launch_resident(const LinearArgs& in, const Device& device, Stream stream) {
  const void* kernel = reinterpret_cast<const void*>(gemm_sm90_resident<C>);
  static bool allowed[kMostDevices];
  if (const char* wrong = allow_shared(kernel, device.shared, device, allowed)) return wrong;
  CUtensorMap x[2], y[2];
  const char* wrong = nullptr;
  for (int i = 0; i < 2 && !wrong; i++) {
    wrong = tensor_map(&x[i], in.codes, 1, in.kp, in.m, 128, i ? C::second : C::first);
    if (!wrong) wrong = tensor_map(&y[i], in.y, 2, in.n, in.m, 64, i ? C::second : C::first);
  }
  if (wrong) return wrong;
  const TileRow t{C::groups, C::first, C::stages, 1, false, C::second, C::blocks};
  const int tiles_n = in.np / C::channels;
  const Spread s = spread(t, tiles_n, in.m, device.multiprocessors);
  ResidentArgs r{{in.weight, in.channel, in.scales, in.bias, static_cast<const uint8_t*>(in.low),
                  static_cast<const uint8_t*>(in.up), in.y, in.m, in.n, in.np, in.kp, in.rank / 16, in.dtype},
                 s.passes};
  void* args[] = {&x[0], &x[1], &y[0], &y[1], &r};
  return start(kernel, tiles_n * s.groups, C::threads, C::shared(in.rank / 16), 1, device, stream, args);
}

template <Mode mode, Passes p>
constexpr Row resident_row() {
  using C = ResidentConfig<mode, p>;
  return {{p.warpgroups, p.first, p.stages, 1, false, p.second, p.blocks}, 1, C::shared, launch_resident<C>};
}

constexpr int kResident = 5;  // rows of each mode that has resident weights
extern const Row kRowsW8[], kRowsW4Channel[], kRowsW4TwoLevel[], kRowsW4Group[];
extern const Row kResidentChannel[], kResidentTwoLevel[];
extern const int kCountW8, kCountW4Channel, kCountW4TwoLevel, kCountW4Group;

}  // namespace lowbit::cuda
