// Rows that a cluster has made, rounded to int8 before they leave it: what quantize_short.cu does to rows in
// memory without smoothing, Hadamard and low rank, in the same bits.
//
//        64 columns       A cluster has all columns of its rows, each CTA `blocks` blocks of 64 of them; a
//      +------+------+    warp takes kUnits units of 8 rows x 64 columns, lane 4g + t has row g and columns
//  8   | unit | unit |    16 t .. 16 t + 15.
//      +------+------+
//
// Every warp sends the maxima of its part of its rows to every CTA, its own as well; who has all of them
// rounds.
#pragma once
#include "quantize_row.cuh"

namespace lowbit::cuda {

struct RoundPlaces {
  const uint32_t*
      maxima;  // [ctas][warpgroups][rows] in shared memory, at the same place in every CTA of the cluster
  uint32_t at, peers;  // its address; the mbarrier that counts what comes: ctas * warpgroups * rows * 4 bytes
  int rank, ctas;      // in the cluster
};

// in[u]: the unit u of this warp: of the block `block + u % kTurns` of the whole row and of the rows eight(u)
// * 8 on of the tile; units of a turn have the same rows. Row 0 of the tile is row `first`, those from `end`
// on are not written. `room`: 16 * kCodeRow bytes of shared memory of the warp's own (two units: the next one
// is written while one is read).
template <bool bf16, int kUnits, int kTurns, int kTileRows, int kWarpgroups, class Eight>
LOWBIT_DEVICE void round_rows(const QuantizeArgs& a, const RoundPlaces& p, const Raw<false> (&in)[kUnits],
                              int block, Eight eight, int first, int end, uint32_t room) {
  constexpr int kEights = kUnits / kTurns;
  const int lane = threadIdx.x & 31, g = lane >> 2, t = lane & 3, wg = threadIdx.x >> 7;
  const int half = lane & 1, cta = lane >> 1;  // lanes 0 .. 15 send four rows each
  uint32_t most[kEights];
#pragma unroll
  for (int u = 0; u < kUnits; u++) {
    float v[kUnit];
    to_floats(v, in[u], bf16);
    const uint32_t m = largest(v);
    most[u / kTurns] = u % kTurns ? max(most[u / kTurns], m) : m;
  }
#pragma unroll
  for (int e = 0; e < kEights; e++) {
    most[e] = max(most[e], __shfl_xor_sync(~0u, most[e], 1));
    most[e] = max(most[e], __shfl_xor_sync(~0u, most[e], 2));
    uint32_t w[4];
#pragma unroll
    for (int i = 0; i < 4; i++) w[i] = __shfl_sync(~0u, most[e], half * 16 + i * 4);
    const uint32_t to =
        p.at + ((p.rank * kWarpgroups + wg) * kTileRows + eight(e * kTurns) * 8 + half * 4) * 4;
    if (cta < p.ctas) ptx::send(ptx::in_cta(to, cta), ptx::in_cta(p.peers, cta), w[0], w[1], w[2], w[3]);
  }
  ptx::wait(p.peers, 0);
#pragma unroll
  for (int e = 0; e < kEights; e++) {
    const int of = eight(e * kTurns), m = first + of * 8 + g;
    uint32_t top = 0;
    for (int r = t; r < p.ctas * kWarpgroups; r += 4) top = max(top, p.maxima[r * kTileRows + of * 8 + g]);
    top = max(top, __shfl_xor_sync(~0u, top, 1));
    top = max(top, __shfl_xor_sync(~0u, top, 2));
    const float amax = __uint_as_float(top);
    const bool usable = amax >= kTiny && top < 0x7F800000u;
    const float factor = usable ? __fdiv_rn(127.f, amax) : 0.f;
    if (m < end && t == 0 && wg == 0 && of % p.ctas == p.rank)
      a.scales[m] = amax < kTiny ? 0.f : __fdiv_rn(amax, 127.f);
#pragma unroll
    for (int u = e * kTurns; u < (e + 1) * kTurns; u++) {
      float v[kUnit];
      to_floats(v, in[u], bf16);
#pragma unroll
      for (int i = 0; i < kUnit; i++) v[i] = usable ? v[i] * factor : 0.f;
      uint32_t w[4];
      codes_of(v, w);
      uint4 q = make_uint4(w[0], w[1], w[2], w[3]);
      if (a.tile_order) q = in_tile_order(w, room + ((u & 1) * 8 + g) * kCodeRow, t);
      if (m < end)
        *reinterpret_cast<uint4*>(a.codes + (size_t)m * a.kp + (block + u % kTurns) * kBlock + t * kUnit) = q;
    }
  }
}

}  // namespace lowbit::cuda
