"""Rounding to nearest: the baseline, and what every other method must not be worse than."""

from __future__ import annotations

import torch
from torch import Tensor

from ..types import LowRank, QuantizedWeight, Scheme
from .scales import Fit, Grid, Scales, encode, fit, grid_for, groups_of, scheme_for, share_channel


def rtn(weight: Tensor, scheme: Scheme, scales: Scales = "group") -> QuantizedWeight:
    """Round a weight [N, K] (any float dtype) to the scheme's codes, min/max scales, no calibration.

    Asymmetric ranges always contain 0. An error is at most half a step (plus what fp16 takes from the scale).
    Scales are float16 where each is a normal fp16 number, else float32; ``scales``: see ``scales.scheme_for``.
    FormatError on NaN, Inf or 16-bit schemes. Source: Jacob et al., "Quantization and Training of Neural Networks for Efficient
    Integer-Arithmetic-Only Inference", 2018, section 2.1, by group.
    """
    scheme = scheme_for(scheme, scales)
    w = weight.detach().float()
    group_size = scheme.group_of(w.shape[1])
    grid = grid_for(w, scheme, group_size)
    transposed = w.T.contiguous()
    columns = groups_of(w.shape[1], group_size)
    fits = [fit(transposed[c], grid) for c in columns]
    if scales == "two-level":
        fits = share_channel(fits, transposed, grid, group_size)
    codes = torch.empty_like(transposed)
    for c, f in zip(columns, fits, strict=True):
        codes[c] = encode(transposed[c], f, grid)
    return build(codes, fits, grid, group_size, scheme)


def take(q: QuantizedWeight, rows: slice | Tensor) -> QuantizedWeight:
    """Some output rows of a quantized weight, copied."""
    return q.with_(
        codes=q.codes[rows].clone(),
        scales=q.scales[rows].clone(),
        zeros=None if q.zeros is None else q.zeros[rows].clone(),
        smooth=None if q.smooth is None else q.smooth.clone(),
        low_rank=None if q.low_rank is None else LowRank(q.low_rank.down.clone(), q.low_rank.up[rows].clone()),
        notes=(),
    )


def build(codes: Tensor, fits: list[Fit], grid: Grid, group_size: int, scheme: Scheme) -> QuantizedWeight:
    """Codes [K, N] in any dtype and the fit of each group -> the value that travels, on their device."""
    return QuantizedWeight(
        codes=codes.T.contiguous().to(torch.int8 if grid.symmetric else torch.uint8),
        scales=torch.stack([f.scale for f in fits], 1).to(grid.dtype),
        zeros=None if grid.symmetric else torch.stack([f.zero for f in fits], 1).to(torch.uint8),
        group_size=group_size,
        bits=grid.bits,
        activation=scheme.activation,
    )
