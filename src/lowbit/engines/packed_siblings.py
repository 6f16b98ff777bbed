"""Siblings that read one x as one: float parameters in one memory, quantized weights as one value, gate and up in turn."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from lowbit.layouts import mma_tiles
from lowbit.types import LowRank, QuantizedWeight


def share(parameters: Sequence[Tensor]) -> Tensor:
    """One tensor [ΣN, ...] of several parameters, which become views of it: no second copy, and what is written into them
    counts at once. ``unshare`` gives each its own memory again."""
    if len(parameters) == 1:
        return parameters[0].data
    joined = torch.cat([p.data for p in parameters])
    for parameter, part in zip(parameters, torch.split(joined, [len(p) for p in parameters]), strict=True):
        parameter.data = part
    return joined


def shared_by(parameters: Sequence[Tensor]) -> Tensor | None:
    """What ``share`` made of the parameters, where it did so before."""
    first, rows = parameters[0].data, 0
    end, home = first.data_ptr(), first.untyped_storage().data_ptr()
    for p in parameters:
        if not p.is_contiguous() or p.data_ptr() != end or p.data.untyped_storage().data_ptr() != home:
            return None
        end, rows = end + p.nbytes, rows + len(p)
    return first.as_strided((rows, *first.shape[1:]), first.stride())


def unshare(parameters: Sequence[Tensor]) -> None:
    if len(parameters) > 1:
        for parameter in parameters:
            parameter.data = parameter.data.clone()


def fuse(weights: Sequence[QuantizedWeight]) -> QuantizedWeight | str:
    """Siblings that read one x as one weight over ΣN rows, exactly; or why that cannot be.

    Low ranks with one ``down`` share it; others stand block by block: down [K, ΣR], up block-diagonal [ΣN, ΣR].
    """
    first = weights[0]
    if len(weights) == 1:
        return first
    for field in ("k", "bits", "group_size", "hadamard", "activation", "symmetric"):
        if any(getattr(q, field) != getattr(first, field) for q in weights):
            return f"their {field} differs"
    for field in ("smooth", "perm"):
        values = [getattr(q, field) for q in weights]
        same = all((v is None) == (values[0] is None) for v in values)
        if not same or (values[0] is not None and not all(torch.equal(v, values[0]) for v in values)):
            return f"their {field} differs"
    scales, biases = [q.scales for q in weights], [q.bias for q in weights]
    if len({s.dtype for s in scales}) > 1:
        scales = [s.float() for s in scales]
    zeros = [q.zeros for q in weights if q.zeros is not None]
    bias = None
    if any(b is not None for b in biases):
        bias = torch.cat([q.scales.new_zeros(q.n) if q.bias is None else q.bias for q in weights])
    return first.with_(
        codes=torch.cat([q.codes for q in weights]),
        scales=torch.cat(scales),
        zeros=torch.cat(zeros) if zeros else None,
        low_rank=_low_ranks(weights),
        bias=bias,
        notes=(),
    )


def in_turn(q: QuantizedWeight) -> QuantizedWeight:
    """Gate and up as ``fuse`` joins them, in the order of rows that a gated product takes."""
    rows = mma_tiles.gated_order(q.n).to(q.codes.device)
    low = None if q.low_rank is None else LowRank(q.low_rank.down, q.low_rank.up[rows])
    return q.with_(
        codes=q.codes[rows],
        scales=q.scales[rows],
        zeros=None if q.zeros is None else q.zeros[rows],
        low_rank=low,
        bias=None if q.bias is None else q.bias[rows],
        notes=(),
    )


def _low_ranks(weights: Sequence[QuantizedWeight]) -> LowRank | None:
    present = [(at, q.low_rank) for at, q in enumerate(weights) if q.low_rank is not None and q.low_rank.down.shape[1]]
    if not present:
        return None
    first = present[0][1]
    if len(present) == len(weights) and all(torch.equal(low.down, first.down) for _, low in present):
        return LowRank(first.down, torch.cat([low.up for _, low in present]))
    starts = torch.tensor([0, *(q.n for q in weights)]).cumsum(0).tolist()
    rank = sum(low.down.shape[1] for _, low in present)
    dtype = torch.float16 if all(low.up.dtype == torch.float16 for _, low in present) else torch.float32
    up = torch.zeros(starts[-1], rank, dtype=dtype, device=first.up.device)
    column = 0
    for at, low in present:
        width = low.up.shape[1]
        up[starts[at] : starts[at + 1], column : column + width] = low.up.to(dtype)
        column += width
    return LowRank(torch.cat([low.down.to(dtype) for _, low in present], 1), up)
