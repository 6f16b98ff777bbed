"""The tiles of the CUDA kernels: what is where, by one-hot and by round trip; no GPU needed."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from lowbit import ops_cuda, reference
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


@pytest.mark.parametrize(("rank", "k"), [(16, 128), (48, 128), (32, 80)])
def test_the_low_rank_survives_packing(rank: int, k: int) -> None:
    g = torch.Generator().manual_seed(rank)
    low = LowRank(torch.randn(k, rank, generator=g).half(), torch.randn(72, rank, generator=g).half())
    branch = mma_tiles.pack_branch(low, 72)
    assert branch.up.shape == (rank // 16, 8, 32, 8) and branch.down.shape == (rank // 16, 8, 32, 8)
    back = mma_tiles.unpack_branch(branch, 72, k)
    assert torch.equal(back.down, low.down) and torch.equal(back.up, low.up)
    # step 3, g = 5, t = 2, column half 0, row half 1, second of the pair
    assert float(branch.down[0, 3, 4 * 5 + 2, 2 * 1 + 1]) == float(low.down[16 * 2 + 4 * 3 + 1, 13])
    hidden = torch.randn(11, rank, generator=g).half()
    assert torch.equal(mma_tiles.unpack_low(mma_tiles.pack_low(hidden), 11), hidden)


def test_a_low_rank_that_could_overflow_fp16_is_balanced() -> None:
    down, up = torch.full((4096, 16), 40.0), torch.full((64, 16), 2.0**-9)
    branch = mma_tiles.pack_branch(LowRank(down, up), 64)
    back = mma_tiles.unpack_branch(branch, 64, 4096)
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


def test_the_cuda_operators_have_shapes_without_a_gpu() -> None:
    def meta(*shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
        return torch.empty(shape, dtype=dtype, device="meta")

    x, down = meta(5, 320, dtype=torch.float16), meta(1, 20, 32, 8, dtype=torch.float16)
    codes, scales, low = ops_cuda.quantize(x, down=down, hadamard=True)
    assert (codes.shape, codes.dtype, scales.shape, low.shape) == ((5, 512), torch.int8, (5,), (1, 1, 128))
    half = meta(5, 640, dtype=torch.float16)
    assert ops_cuda.quantize(half, silu=True)[0].shape == (5, 512)
    y = ops_cuda.linear(
        codes, scales, low, meta(2, 4, 4096), meta(128), None, None, 72, mma_tiles.CHANNEL, torch.bfloat16
    )
    assert (y.shape, y.dtype) == ((5, 72), torch.bfloat16)
    four = ops_cuda.quantize4(x)
    assert [tuple(t.shape) for t in four] == [(5, 256), (8, 128), (5,), (0, 1, 128)]
    y = ops_cuda.linear4(four[0], four[1], four[2], None, meta(128, 256), meta(8, 128), None, None, 72, torch.float32)
    assert (y.shape, y.dtype) == ((5, 72), torch.float32)
    w = ops_cuda.dequantize(meta(3, 40), meta(3, 2), None, 80, 40, 4, torch.float16)
    assert (w.shape, w.dtype) == ((3, 80), torch.float16)
    assert ops_cuda.inverse_rms(meta(7, 64), 1e-6).shape == (7,)
    assert ops_cuda.norm_rope(meta(7, 512), None, None, meta(7, 64), meta(7, 64), 2, 1) is None


@pytest.mark.skipif(torch.version.cuda is not None, reason="a torch with CUDA")
def test_a_torch_without_cuda_is_told_so_and_imports() -> None:
    assert ops_cuda.refuses("cuda:0") == "this torch has no CUDA"


@pytest.mark.parametrize(
    "version, found", [("12.8", "torch was built with CUDA 12.8, accepted is 13.x"), (None, "this torch has no CUDA")]
)
def test_another_cuda_is_named(version: str | None, found: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.version, "cuda", version)
    assert ops_cuda._load_cuda() == found


def test_an_old_chip_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ops_cuda, "_NO_CUDA", "")
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (7, 5))
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: "Tesla T4")
    why = ops_cuda.refuses(0)
    assert why == "Tesla T4 has compute capability 7.5, accepted are 8.0 and newer (Ampere, Ada, Hopper)"
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (9, 0))
    assert ops_cuda.refuses(0) is None and not ops_cuda.has_int4(0)


def test_the_order_of_a_gated_product_takes_eight_rows_of_each_in_turn() -> None:
    order = mma_tiles.gated_order(48).tolist()
    assert sorted(order) == list(range(48))
    assert order[:24] == [*range(8), *range(24, 32), *range(8, 16)]
