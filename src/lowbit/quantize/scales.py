"""The scale and zero point of a group: plain (min/max), or the best of a few clipped ones.

Groups are [g, N]: g input columns by N output rows, so that a column of the weight is contiguous. A candidate scale is
rounded to the dtype it will be stored in *before* codes are computed with it.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from ..types import FormatError, Scheme

CLIP_ASYMMETRIC = (1.0, 0.95, 0.9, 0.85, 0.8, 0.74, 0.68)  # of the range
CLIP_SYMMETRIC = (1.0, 0.96, 0.92, 0.88, 0.84, 0.8, 0.75, 0.7)  # of absmax, on the largest positive code
CLIP_SIGNED = (1.0, 0.95, 0.9, 0.85)  # of the entry of largest |w|, on the lowest code: the scale takes its sign
_HALF_LOW, _HALF_HIGH = 2.0**-14, 65504.0  # normal fp16


class Grid(NamedTuple):
    """What codes a scheme has, and how its scales are stored."""

    bits: int
    symmetric: bool
    dtype: torch.dtype  # of the stored scales: float16 or float32

    @property
    def low(self) -> int:
        return -(1 << (self.bits - 1)) if self.symmetric else 0

    @property
    def high(self) -> int:
        return (1 << (self.bits - 1)) - 1 if self.symmetric else (1 << self.bits) - 1


class Fit(NamedTuple):
    """Scale [N] (float32, a value that the stored dtype holds, never 0) and zero point [N] (0 where symmetric)."""

    scale: Tensor
    zero: Tensor


def groups_of(k: int, group_size: int) -> list[slice]:
    """The column ranges of the groups; the last may be short."""
    return [slice(i, min(i + group_size, k)) for i in range(0, k, group_size)]


def grid_for(weight: Tensor, scheme: Scheme, group_size: int) -> Grid:
    """The grid of a weight [N, K] float32: fp16 scales where every one, clipped or not, is a normal fp16 number."""
    if scheme.bits not in (4, 8):
        raise FormatError(f"scheme {scheme.name}: bits: found {scheme.bits}, accepted for rounding are 4 and 8")
    if not bool(torch.isfinite(weight).all()):
        raise FormatError("weight: found NaN or Inf, accepted are finite values")
    grid = Grid(scheme.bits, scheme.symmetric, torch.float16)
    k = weight.shape[1]
    steps = [_base_step(weight[:, columns].T, grid) for columns in groups_of(k, group_size)]
    step = torch.cat([*steps, weight.new_zeros(0)])
    smallest = step.where(step > 0, torch.inf).amin() if step.numel() else torch.inf
    if smallest * 0.4 < _HALF_LOW or (step > _HALF_HIGH).any():
        return grid._replace(dtype=torch.float32)
    return grid


def fit(w: Tensor, grid: Grid, importance: Tensor | None = None) -> Fit:
    """Scale and zero of a group w [g, N] float.

    ``importance`` None: min/max. Otherwise [g], the weight of a column's squared error, and the best clipped candidate
    is taken. A group of zeros gets scale 1 and code = zero, which is exactly 0.
    """
    best: Fit | None = None
    least: Tensor | None = None
    for candidate in _candidates(w, grid, clipped=importance is not None):
        if importance is None:
            return candidate
        error = decode(encode(w, candidate, grid), candidate).sub_(w).square_()
        total = importance.to(w.dtype) @ error
        if best is None or least is None:
            best, least = candidate, total
        else:
            better = total < least
            least = torch.where(better, total, least)
            best = Fit(torch.where(better, candidate.scale, best.scale), torch.where(better, candidate.zero, best.zero))
    assert best is not None
    return best


def encode(w: Tensor, f: Fit, grid: Grid) -> Tensor:
    """Codes of w [..., N], kept in w's dtype. Halves go to even, as everywhere."""
    return (w / f.scale).round_().add_(f.zero).clamp_(grid.low, grid.high)


def decode(codes: Tensor, f: Fit) -> Tensor:
    """The values of codes [..., N]."""
    return (codes - f.zero).mul_(f.scale)


def _base_step(w: Tensor, grid: Grid) -> Tensor:
    """The unclipped step of a group [g, N]; 0 for a group of zeros."""
    if grid.symmetric:
        return w.abs().amax(0) / grid.high
    return w.amax(0).clamp_min(0) / grid.high - w.amin(0).clamp_max(0) / grid.high  # two quotients: no overflow


def _stored(scale: Tensor, grid: Grid) -> Tensor:
    """The nearest scale that the stored dtype holds, never 0 and never Inf; 0 becomes 1."""
    floor, top = (_HALF_LOW, _HALF_HIGH) if grid.dtype == torch.float16 else (2.0**-126, torch.finfo(torch.float32).max)
    size = scale.abs().clamp(floor, top).to(grid.dtype).to(scale.dtype)
    return torch.where(scale == 0, 1.0, torch.where(scale < 0, -size, size))


def _candidates(w: Tensor, grid: Grid, clipped: bool) -> list[Fit]:
    base = _base_step(w, grid)
    if grid.symmetric:
        scales = [base * r for r in (CLIP_SYMMETRIC if clipped else (1.0,))]
        if clipped:
            peak = w.gather(0, w.abs().argmax(0, keepdim=True))[0] / grid.low
            scales += [peak * r for r in CLIP_SIGNED]
        nothing = torch.zeros_like(base)
        return [Fit(_stored(s, grid), nothing) for s in scales]
    low = w.amin(0).clamp_max(0)
    fits = []
    for r in CLIP_ASYMMETRIC if clipped else (1.0,):
        scale = _stored(base * r, grid)
        fits.append(Fit(scale, (-low * r / scale).round_().clamp_(grid.low, grid.high)))
    return fits
