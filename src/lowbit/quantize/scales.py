"""The scale and zero point of a group: plain (min/max), or the best of a few clipped ones.

Groups are [g, N]: g input columns by N output rows, so that a column of the weight is contiguous. A candidate scale is
rounded to the dtype it will be stored in *before* codes are computed with it.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Literal, NamedTuple

import torch
from torch import Tensor

from ..reference import MOST_STEPS
from ..types import FormatError, Scheme

Scales = Literal["group", "two-level", "channel"]
SCALES: tuple[Scales, ...] = ("group", "two-level", "channel")
CHANNEL_DIVISORS = (15, 14, 13, 12, 11)  # the channel scale is the best of: largest group scale / one of these
_CHANNEL_BITS = 7  # significant bits of a channel scale: times 1 .. 15 it still fits the 11 of fp16

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


def scheme_for(scheme: Scheme, scales: Scales) -> Scheme:
    """The scheme with its weight groups as ``scales`` asks: "channel" is one group a row. FormatError for other words,
    and for two levels over asymmetric or 8-bit codes, which would not fit int8."""
    if scales not in SCALES:
        raise FormatError(f"scales: found {scales!r}, accepted are {', '.join(SCALES)}")
    if scales == "two-level" and (scheme.bits != 4 or not scheme.symmetric):
        found = f"{scheme.bits} bits {'symmetric' if scheme.symmetric else 'asymmetric'}"
        raise FormatError(f"scales: found two-level with {found} codes, accepted are symmetric 4-bit codes")
    return replace(scheme, group_size=-1) if scales == "channel" else scheme


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


def share_channel(
    fits: list[Fit], w: Tensor, grid: Grid, group_size: int, importance: Tensor | None = None
) -> list[Fit]:
    """Move the scale of every group of w [K, N] to an integer 1 .. 15 times one scale a row (its sign stays).

    Of a few channel scales the one of least squared error is taken, a column's error weighted by ``importance`` [K].
    A channel scale has 7 significant bits, so that every product is exact in fp16 where ``grid`` stores fp16.
    """
    columns = groups_of(w.shape[0], group_size)
    empty = torch.stack([(w[c] == 0).all(0) for c in columns])  # their scale of 1 says nothing
    scales = torch.stack([f.scale for f in fits])
    size = scales.abs().masked_fill(empty, 0)
    sign = torch.where(scales < 0, -1.0, 1.0).to(w.dtype)
    top = size.amax(0)
    top = torch.where(top > 0, top, torch.ones_like(top))
    best: Tensor | None = None
    least = torch.full_like(top, torch.inf)
    for divisor in CHANNEL_DIVISORS:
        channel = _short(top / divisor, grid)
        candidate = sign * (size / channel).round_().clamp_(1, MOST_STEPS) * channel
        total = torch.zeros_like(top)
        for g, c in enumerate(columns):
            f = Fit(candidate[g], fits[g].zero)
            error = decode(encode(w[c], f, grid), f).sub_(w[c]).square_()
            total += error.sum(0) if importance is None else importance[c].to(w.dtype) @ error
        better = total < least
        least = torch.where(better, total, least)
        best = candidate if best is None else torch.where(better, candidate, best)
    assert best is not None
    return [Fit(best[g], f.zero) for g, f in enumerate(fits)]


def _short(scale: Tensor, grid: Grid) -> Tensor:
    """Positive scales rounded to 7 significant bits, 15 times which the stored dtype still holds."""
    mantissa, exponent = torch.frexp(scale)
    rounded = torch.ldexp((mantissa * 2**_CHANNEL_BITS).round(), exponent - _CHANNEL_BITS)
    low, high = (2.0**-18, 4352.0) if grid.dtype == torch.float16 else (2.0**-120, 2.0**123)
    return rounded.clamp(low, high)


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
