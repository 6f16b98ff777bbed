"""The quantizer of activations on a GPU: short rows (up to 3072 columns) and the border to the general kernel, every
step before it, against reference.py; the same bits for a row in any batch."""

from __future__ import annotations

import itertools
import math

import pytest
import torch
from torch import Tensor

from lowbit import ops_cuda, reference
from lowbit.layouts import mma_tiles as tiles
from lowbit.types import LowRank

WHY = ops_cuda.refuses(0)
pytestmark = [pytest.mark.gpu, pytest.mark.skipif(WHY is not None, reason=WHY or "")]

DEVICE = "cuda"
BEFORE = ("nothing", "norm", "residual", "silu")
WIDTHS = (16, 48, 64, 80, 192, 256, 576, 1024, 1040, 2048, 2112, 2816, 3072, 3136)
ROWS = (1, 2, 7, 8, 9, 33, 172, 685, 1057, 2049)  # a cluster of CTAs a row, one CTA, more CTAs than multiprocessors
RANKS = (0, 16, 32, 48, 64)


def cases() -> list[tuple[int, int, int, str]]:
    """Every width with every rank and step before, M in turn: pairs that no figure of ours would meet as well."""
    grid = itertools.product(WIDTHS, RANKS, BEFORE)
    return [(ROWS[i % len(ROWS)], k, rank, before) for i, (k, rank, before) in enumerate(grid)]


def drawn(m: int, k: int, dtype: torch.dtype, seed: int) -> Tensor:
    g = torch.Generator(device=DEVICE).manual_seed(seed)
    return torch.randn(m, k, generator=g, device=DEVICE).to(dtype)


def arguments(m: int, k: int, rank: int, before: str, dtype: torch.dtype, hadamard: bool, smooth: bool) -> dict:
    a: dict = dict(x=drawn(m, 2 * k if before == "silu" else k, dtype, 1), hadamard=hadamard, silu=before == "silu")
    if before in ("norm", "residual"):
        a |= dict(norm=1 + 0.1 * drawn(1, k, torch.float32, 2)[0], eps=1e-6)
    if before == "residual":
        a |= dict(residual=drawn(m, k, dtype, 3))
    if smooth:
        a |= dict(smooth=tiles.pack_smooth(drawn(1, k, torch.float32, 4)[0].abs().half() + 0.5))
    if rank:
        down = (drawn(k, rank, torch.float32, 5) / math.sqrt(k)).half()
        a |= dict(down=tiles.pack_branch(LowRank(down, torch.zeros(64, rank, device=DEVICE)), 64).down)
    return a


def run(a: dict, rows: slice = slice(None), **more: bool) -> tuple[Tensor, Tensor, Tensor | None, Tensor | None]:
    """codes in plain order, scales, low [M, R] (None without low rank), the residual behind it."""
    kept = a["residual"][rows].clone() if "residual" in a else None
    x = a["x"][rows].contiguous()
    codes, scales, low = ops_cuda.quantize(x, **{k: v for k, v in a.items() if k not in ("x", "residual")}
                                           | dict(residual=kept) | more)  # fmt: skip
    plain = tiles.plain_order(codes) if more.get("tile_order", True) else codes
    return plain, scales, tiles.unpack_low(low, len(x)) if "down" in a else None, kept


def inside(a: dict, before: str) -> tuple[Tensor, Tensor | None]:
    """What is quantized, but for the factor of the norm, which is in no code; and that factor. On a CPU: a GPU may
    divide by a product with the reciprocal."""
    x = a["x"].cpu()
    factor = None
    if before == "silu":
        gate, up = x.float().chunk(2, -1)
        y = torch.nn.functional.silu(gate) * up
    else:
        total = (x.float() + a["residual"].cpu().float()).to(x.dtype) if before == "residual" else x
        y = total.float()
        if "norm" in a:
            factor = 1 / (y.double().square().mean(-1) + a["eps"]).sqrt()
            y = y * a["norm"].cpu()
    if "smooth" in a:
        y = y / a["smooth"][0].cpu()
    return reference.hadamard(y, 64) if a["hadamard"] else y, factor


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=lambda d: str(d)[6:])
def test_codes_scales_and_low_are_the_references(dtype: torch.dtype) -> None:
    for i, (m, k, rank, before) in enumerate(cases()):
        where = f"{m}x{k} {before} rank {rank}"
        a = arguments(m, k, rank, before, dtype, hadamard=k % 64 == 0 and i % 5 != 0, smooth=i % 3 == 0)
        codes, scales, low, kept = run(a)
        want, factor = inside(a, before)
        q, sa = reference.quantize_rows(want)
        assert not bool(codes[:, k:].any()), where
        wrong = int((codes[:, :k].cpu() != q).sum())
        exact = before != "silu"  # whose exponential is the chip's
        assert wrong == 0 if exact else wrong <= 2e-3 * q.numel() + 1, (where, wrong)
        ideal = sa[:, 0].double() * (1 if factor is None else factor)
        assert bool(((scales.cpu() - ideal).abs() <= (2e-6 if exact else 2e-3) * ideal).all()), where
        if exact and factor is None:
            assert torch.equal(scales.cpu(), sa[:, 0]), where
        if kept is not None:
            assert torch.equal(kept.cpu(), (a["x"].cpu().float() + a["residual"].cpu().float()).to(dtype)), where
        if rank:
            plain = tiles.unpack_branch(tiles.Branch(a["down"].cpu(), tiles.pack_branch(LowRank(
                torch.zeros(k, rank), torch.zeros(64, rank)), 64).up), 64, k).down.double()  # fmt: skip
            h = (want * (127 / want.abs().amax(1, keepdim=True))).half().double() @ plain
            off = (low.cpu().double() - h).abs().max().item() / h.abs().max().item()
            assert off < (1.5e-3 if exact else 1e-2), (where, off)


@pytest.mark.parametrize("before", BEFORE)
def test_a_row_has_its_bits_in_any_batch_and_order(before: str) -> None:
    for k, rank in ((1024, 16), (1040, 48), (2048, 32), (3072, 16), (3072, 32), (3072, 0), (192, 64)):
        a = arguments(2049, k, rank, before, torch.float16, hadamard=k % 64 == 0, smooth=k == 2048)
        whole = run(a)
        for size in (1, 5, 16, 172, 264, 528, 685, 1057):
            for part, all_rows in zip(run(a, slice(3, 3 + size)), whole, strict=True):
                assert part is None or all_rows is None or torch.equal(part, all_rows[3 : 3 + size]), (k, rank, size)
        for part, all_rows in zip(run(a, tile_order=False), whole, strict=True):
            assert part is None or all_rows is None or torch.equal(part, all_rows), (k, rank)
        for _ in range(3):  # a run gives the bits of the run before
            assert all(p is None or torch.equal(p, w) for p, w in zip(run(a), whole, strict=True))


@pytest.mark.parametrize("before", BEFORE)
@pytest.mark.parametrize("bad", [float("nan"), float("inf"), float("-inf"), 0.0, 1e-6], ids=str)
def test_a_bad_row_touches_no_other(before: str, bad: float) -> None:
    """Not finite: a scale that is none and codes of zero. Zero: a scale of zero. Tiny but above: as any row."""
    for (k, rank), hadamard in itertools.product(((1024, 16), (3072, 32), (576, 0)), (False, True)):
        a = arguments(40, k, rank, before, torch.float16, hadamard, smooth=False)
        clean = run(a)
        for row in (0, 13, 39):
            dirty = a | dict(x=a["x"].clone())
            if math.isfinite(bad):
                dirty["x"][row] = bad
                if "residual" in a:
                    dirty["residual"] = a["residual"].clone()
                    dirty["residual"][row] = 0
            else:
                dirty["x"][row, k // 2] = bad
            got = run(dirty)
            keep = torch.arange(40, device=DEVICE) != row
            for g, c in zip(got, clean, strict=True):
                assert g is None or c is None or len(g) != 40 or torch.equal(g[keep], c[keep]), (k, row)
            codes, scale = got[0][row], got[1][row]
            if math.isfinite(bad):
                assert bool(torch.isfinite(scale)) and (bad != 0.0 or (scale == 0 and not bool(codes.any())))
            else:
                assert not bool(torch.isfinite(scale)) and not bool(codes.any())
                assert not rank or not bool(got[2][row].any())
