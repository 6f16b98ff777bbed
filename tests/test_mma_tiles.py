"""The tiles of the CUDA kernels: what is where, by one-hot and by round trip; no GPU needed."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from lowbit import reference
from lowbit.layouts import LAYOUTS, mma_tiles
from lowbit.types import FormatError, LowRank, QuantizedWeight

MODES = ("w8", "channel", "two-level", "groups")


def weight(mode: str, n: int, k: int, group: int = 64) -> QuantizedWeight:
    g = torch.Generator().manual_seed(n + k)
    channel = torch.rand(n, 1, generator=g).bfloat16().float() + 2**-7
    if mode == "w8":
        return QuantizedWeight(torch.randint(-128, 128, (n, k), generator=g).to(torch.int8), channel, k, 8)
    codes = torch.randint(-8, 8, (n, k), generator=g).to(torch.int8)
    if mode == "channel":
        return QuantizedWeight(codes, channel, k, 4)
    groups = -(-k // group)
    if mode == "groups":
        return QuantizedWeight(codes, (channel * (1 + torch.rand(n, groups, generator=g))).half(), group, 4)
    steps = torch.randint(-15, 16, (n, groups), generator=g)
    steps[:, 0] = 15
    steps[:, -1] = 1
    channel = torch.ldexp(torch.ones(n, 1), torch.randint(-9, 0, (n, 1), generator=g))
    return QuantizedWeight(codes, channel * steps, group, 4)


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("n, k", [(64, 256), (200, 640), (72, 192), (16, 4096), (1, 64)])
def test_pack_then_unpack_is_identity(mode: str, n: int, k: int) -> None:
    q = weight(mode, n, k)
    tiles = LAYOUTS["mma_tiles"].pack(q)
    assert tiles.weight.shape == (-(-n // 64), -(-k // 256) * 2, mma_tiles.BYTES[tiles.mode])
    codes, scales = mma_tiles.unpack(tiles, n, k)
    assert torch.equal(codes, q.codes)
    wide = reference.expand(scales, k if scales.shape[1] == 1 else 64, k)
    assert torch.equal(codes * wide, reference.dequantize_codes(q))


@pytest.mark.parametrize("group", [128, 256])
def test_wider_groups_repeat_their_scale(group: int) -> None:
    q = weight("groups", 64, 512, group)
    codes, scales = mma_tiles.unpack(mma_tiles.pack(q), 64, 512)
    assert torch.equal(codes * reference.expand(scales, 64, 512), reference.dequantize_codes(q))


def where(packed: Tensor) -> tuple[int, ...]:
    """The one byte that differs from an empty weight."""
    found = packed.reshape(-1).nonzero()
    assert len(found) == 1
    return tuple(int(i) for i in torch.unravel_index(found[0, 0], packed.shape))


@pytest.mark.parametrize("n, k", [(0, 0), (13, 77), (64, 128), (127, 255), (40, 17)])
def test_a_4_bit_code_lies_where_the_drawing_says(n: int, k: int) -> None:
    codes = torch.zeros(128, 256, dtype=torch.int8)
    codes[n, k] = 5
    packed = mma_tiles.pack(QuantizedWeight(codes, torch.ones(128, 1), 256, 4)).weight
    w, row = n % 64 // 16, n % 16
    half, t, s, r, b = k % 128 // 64, k % 64 // 16, k % 16 // 8, k % 8 // 4, k % 4
    lane, j = 4 * (row % 8) + t, 2 * r + row // 8
    assert where(packed) == (n // 64, k // 128, ((2 * w + half) * 32 + lane) * 16 + 4 * j + b)
    assert int(packed.max()) == (5 << 4 if s else 5)


@pytest.mark.parametrize("n, k", [(0, 0), (13, 77), (64, 128), (127, 255)])
def test_an_8_bit_code_lies_where_the_drawing_says(n: int, k: int) -> None:
    codes = torch.zeros(128, 256, dtype=torch.int8)
    codes[n, k] = 5
    packed = mma_tiles.pack(QuantizedWeight(codes, torch.ones(128, 1), 256, 8)).weight
    half, t, s, r, b = k % 128 // 64, k % 64 // 16, k % 16 // 8, k % 8 // 4, k % 4
    byte = 64 * half + 32 * s + 16 * r + 4 * t + b
    assert where(packed) == (n // 64, k // 128, n % 64 * 128 + ((byte // 16) ^ (n % 8)) * 16 + byte % 16)


def test_tile_order_is_a_permutation_of_each_block_and_undone() -> None:
    x = torch.arange(5 * 192).reshape(5, 192)
    order = mma_tiles.tile_order(x)
    assert torch.equal(mma_tiles.plain_order(order), x)
    assert torch.equal(order.reshape(5, 3, 64).sort(-1).values, x.reshape(5, 3, 64))


@pytest.mark.parametrize("rank", [16, 48])
def test_the_low_rank_survives_packing(rank: int) -> None:
    g = torch.Generator().manual_seed(rank)
    low = LowRank(torch.randn(128, rank, generator=g).half(), torch.randn(72, rank, generator=g).half())
    branch = mma_tiles.pack_branch(low, 72)
    assert branch.up.shape == (rank // 16, 8, 32, 8) and branch.down.shape == (rank // 16, 8, 32, 8)
    back = mma_tiles.unpack_branch(branch, 72)
    assert torch.equal(back.down, low.down) and torch.equal(back.up, low.up)
    assert float(branch.down[0, 3, 4 * 5 + 2, 2 * 1 + 1]) == float(low.down[16 * 3 + 5, 13])  # row g+8, column 2t+1
    hidden = torch.randn(11, rank, generator=g).half()
    assert torch.equal(mma_tiles.unpack_low(mma_tiles.pack_low(hidden), 11), hidden)


def test_a_low_rank_that_could_overflow_fp16_is_balanced() -> None:
    down, up = torch.full((4096, 16), 40.0), torch.full((64, 16), 2.0**-9)
    branch = mma_tiles.pack_branch(LowRank(down, up), 64)
    back = mma_tiles.unpack_branch(branch, 64)
    assert float(back.down.abs().sum(0).max()) * 127 <= 65504
    assert torch.allclose(back.down.double() @ back.up.double().T, down.double() @ up.double().T, rtol=1e-3)
    with pytest.raises(FormatError, match="low_rank: found values beyond float16"):
        mma_tiles.pack_branch(LowRank(down, torch.full((64, 16), 60000.0)), 64)


@pytest.mark.parametrize(
    "change, reason",
    [
        ({"perm": torch.arange(256, dtype=torch.int32)}, "permuted"),
        ({"zeros": torch.zeros(64, 4, dtype=torch.uint8), "codes": torch.zeros(64, 256, dtype=torch.uint8)}, "zero"),
        ({"group_size": 32, "scales": torch.ones(64, 8)}, "the group is 32 columns"),
        ({"low_rank": LowRank(torch.zeros(256, 8), torch.zeros(64, 8))}, "the low rank is 8"),
        ({"scales": 1 + torch.rand(64, 4, generator=torch.Generator().manual_seed(0))}, "no fp16 numbers"),
    ],
)
def test_what_the_tiles_cannot_hold_is_refused_by_name(change: dict[str, object], reason: str) -> None:
    q = QuantizedWeight(torch.zeros(64, 256, dtype=torch.int8), torch.ones(64, 4), 64, 4).with_(**change)
    assert reason in (mma_tiles.refuses(q) or "")
    with pytest.raises(FormatError, match="weight: "):
        mma_tiles.pack(q)


def test_the_oracle_is_the_dequantized_product() -> None:
    q = weight("two-level", 40, 128)
    tiles = mma_tiles.pack(q)
    codes, scales = mma_tiles.unpack(tiles, 40, 128)
    x = torch.randn(6, 128)
    a, sa = reference.quantize_rows(x)
    plain = codes * reference.expand(scales / tiles.channel[:40, None], 64, 128)
    got = reference.cuda_linear(a, sa[:, 0], plain, tiles.channel[:40], None, None, torch.ones(40))
    want = reference.linear(x, q.with_(bias=torch.ones(40)), reference.Activation(8, "token"))
    assert reference.error(got, want) < 1e-6
