"""Attention that rounds its rows on a GPU: the bits of its two parts, one after the other, whether the chip joins them or not."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from lowbit import ops_cuda

WHY = ops_cuda.refuses(0)
pytestmark = [pytest.mark.gpu, pytest.mark.skipif(WHY is not None, reason=WHY or "")]
DEVICE = torch.device("cuda:0")
DTYPES = (torch.float16, torch.bfloat16)
ENDS = {
    1: [0, 1], 16: [0, 16], 17: [0, 3, 17], 63: [0, 63], 64: [0, 64, 64], 65: [0, 0, 65], 172: [0, 111, 172],
    685: [0, 64, 64, 65, 435, 685], 2049: [0, 1, 1140, 1140, 1890, 2049],
}  # fmt: skip
JOINED = ((4, 2), (10, 5), (16, 8))  # where the chip can
SCALE = 0.09
Views = tuple[Tensor, Tensor, Tensor]
Rounded = tuple[Tensor, Tensor]


def views(m: int, heads: int, kv: int, dtype: torch.dtype) -> Views:
    """Of one projection."""
    generator = torch.Generator(device=DEVICE).manual_seed(m)
    qkv = (1.5 * torch.randn(m, heads + 2 * kv, 128, generator=generator, device=DEVICE)).to(dtype)
    return qkv[:, :heads], qkv[:, heads : heads + kv], qkv[:, heads + kv :]


def bounds_of(ends: list[int]) -> Tensor:
    return torch.tensor(ends, dtype=torch.int32, device=DEVICE)


def rounded(qkv: Views, bounds: Tensor, order: bool = True) -> Rounded:
    return ops_cuda.attention_quantize(*qkv, bounds, SCALE, order)


def same(one: Rounded, other: Rounded, keep: Tensor | slice = slice(None)) -> bool:
    return all(torch.equal(a[keep], b[keep]) for a, b in zip(one, other, strict=True))


@pytest.mark.parametrize(("heads", "kv"), [*JOINED, (2, 1), (8, 8), (4, 1), (24, 12)])  # the last four are two launches
@pytest.mark.parametrize("dtype", DTYPES)
def test_attention_and_its_quantizer_are_their_parts(heads: int, kv: int, dtype: torch.dtype) -> None:
    for m, ends in ENDS.items():
        qkv, bounds = views(m, heads, kv, dtype), bounds_of(ends)
        y = ops_cuda.attention(*qkv, bounds, SCALE).flatten(1)
        for order in (True, False):
            want = ops_cuda.quantize(y, tile_order=order)[:2]
            got = rounded(qkv, bounds, order)
            assert bool(got[1].isfinite().all()) and same(got, want), (m, order)
            assert same(rounded(qkv, bounds, order), got), (m, order)


@pytest.mark.parametrize("bad", [float("nan"), float("inf"), float("-inf")])
@pytest.mark.parametrize("dtype", DTYPES)
def test_what_is_no_number_stays_in_its_row_or_its_segment(dtype: torch.dtype, bad: float) -> None:
    """A query is one row's; a value is its segment's, also where the last tile of the segment before reaches it."""
    qkv, bounds = tuple(t.clone() for t in views(300, 16, 8, dtype)), bounds_of([0, 70, 70, 200, 300])
    clean = rounded(qkv, bounds)
    at = torch.arange(300, device=DEVICE)
    for which, row, keep in ((0, 131, at != 131), (2, 75, (at < 70) | (at >= 200))):
        kept = qkv[which][row].clone()
        qkv[which][row, 1, 5] = bad
        dirty = rounded(qkv, bounds)
        assert same(dirty, clean, keep)
        spoilt = ~dirty[1].isfinite()
        assert bool(spoilt.any()) and not bool(spoilt[keep].any()) and not bool(dirty[0][spoilt].any())
        qkv[which][row] = kept


def test_a_segment_is_rounded_as_if_it_were_alone() -> None:
    qkv, part = views(500, 16, 8, torch.float16), slice(130, 437)
    whole = rounded(qkv, bounds_of([0, 130, 437, 500]))
    q, k, v = (t[part] for t in qkv)
    alone = rounded((q, k, v), bounds_of([0, 307]))
    assert same(alone, (whole[0][part], whole[1][part]))


def test_the_heads_here_are_those_that_the_chip_joins() -> None:
    hopper = torch.cuda.get_device_capability(DEVICE) == (9, 0)
    assert [ops_cuda.joins(DEVICE, *pair) for pair in JOINED] == [hopper] * len(JOINED)
