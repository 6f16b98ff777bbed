"""One weight cut for several devices: functions of the plain value, before anything is packed.

Column-wise, a rank has N / ranks out features. Row-wise it has K / ranks in features, in whole groups, and its y is one
addend of the sum over ranks. Where a group or a Hadamard block has columns of several ranks' slices of x (activation order),
the ranks share the groups in their own order, and each needs all of x.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from ..types import FormatError, LowRank, QuantizedWeight


class Half(NamedTuple):
    """A linear in float16 storage."""

    weight: Tensor  # [N, K] float16
    bias: Tensor | None  # [N] float


class Inputs(NamedTuple):
    """What a row-wise shard reads where its own slice of x is not enough: columns of x' = Hᵀ(x / smooth), of all of x."""

    columns: Tensor  # [K / ranks] int64
    smooth: Tensor | None  # [K]
    hadamard: int


class RowShard(NamedTuple):
    """``inputs`` None: the weight reads its rank's slice of x. Else it reads the columns that ``inputs`` names."""

    weight: QuantizedWeight
    inputs: Inputs | None


def divided(field: str, size: int, ranks: int, layer: str = "") -> int:
    """size / ranks; FormatError naming layer and field where that is no whole number."""
    if size % ranks:
        raise FormatError(f"{_at(layer)}{field}: found {size}, accepted on {ranks} ranks is a multiple of {ranks}")
    return size // ranks


def row_columns(
    k: int, group_size: int, ranks: int, perm: Tensor | None = None, hadamard: int = 0, layer: str = ""
) -> tuple[Tensor, bool]:
    """Columns of the codes for every rank, int64 [ranks, K / ranks], whole groups in rising order; and whether each
    rank's inputs lie inside its own slice of x' (False: it needs all of it).

    FormatError with the values where K / ranks is no whole number of groups. One group of all K (a scale a row) can be
    cut anywhere.
    """
    width = divided("in_features", k, ranks, layer)
    one = group_size >= k
    if not one and width % group_size:
        possible = [r for r in range(1, k // group_size + 1) if k % r == 0 and k // r % group_size == 0]
        listed = ", ".join(map(str, possible)) or "none"
        raise FormatError(
            f"{_at(layer)}in_features: found {k} in groups of {group_size}, {width} columns on each of {ranks} ranks, "
            f"accepted is a multiple of {group_size} on each (numbers of ranks: {listed})"
        )
    plain = torch.arange(k).reshape(ranks, width)
    uncut = hadamard == 0 or width % hadamard == 0
    if perm is None or not uncut:
        return plain, uncut
    owner = perm.long().cpu() // width
    if not one:
        owners = owner.reshape(-1, group_size)
        if not bool((owners == owners[:, :1]).all()):
            return plain, False
    order = torch.sort(owner, stable=True).indices  # every rank owns exactly `width` inputs
    return order.reshape(ranks, width), True


def column_shard(q: QuantizedWeight, rank: int, ranks: int, layer: str = "") -> QuantizedWeight:
    """Out features ``rank * N / ranks`` and on: with all of x, the same bits as those of the whole. FormatError where
    N / ranks is no whole number."""
    n = divided("out_features", q.n, ranks, layer)

    def mine(tensor: Tensor) -> Tensor:
        return tensor.narrow(0, rank * n, n).contiguous()

    return q.with_(
        codes=mine(q.codes),
        scales=mine(q.scales),
        zeros=None if q.zeros is None else mine(q.zeros),
        bias=None if q.bias is None else mine(q.bias),
        low_rank=None if q.low_rank is None else LowRank(q.low_rank.down, mine(q.low_rank.up)),
    )


def row_shard(q: QuantizedWeight, rank: int, ranks: int, layer: str = "") -> RowShard:
    """In features of one rank. The sum of every rank's y is that of the whole: the low rank is cut with its inputs, and rank
    0 has the bias. FormatError as ``row_columns``."""
    table, local = row_columns(q.k, q.group_size, ranks, q.perm, q.hadamard, layer)
    columns = table[rank].to(q.codes.device)
    width = len(columns)
    group_size = min(q.group_size, width)
    groups = columns[::group_size] // q.group_size
    inputs = columns if q.perm is None else q.perm.long()[columns]
    first = rank * width
    perm = None if q.perm is None or not local else (inputs - first).to(torch.int32)
    reads = torch.arange(first, first + width, device=inputs.device) if local else inputs
    weight = q.with_(
        codes=q.codes[:, columns].contiguous(),
        scales=q.scales[:, groups].contiguous(),
        zeros=None if q.zeros is None else q.zeros[:, groups].contiguous(),
        group_size=group_size,
        perm=perm,
        smooth=q.smooth[reads] if local and q.smooth is not None else None,
        hadamard=q.hadamard if local else 0,
        low_rank=None if q.low_rank is None else LowRank(q.low_rank.down[reads], q.low_rank.up),
        bias=q.bias if rank == 0 else None,
    )
    return RowShard(weight, None if local else Inputs(inputs, q.smooth, q.hadamard))


def column_half(half: Half, rank: int, ranks: int, layer: str = "") -> Half:
    """``column_shard`` of float16 storage."""
    n = divided("out_features", half.weight.shape[0], ranks, layer)
    bias = None if half.bias is None else half.bias.narrow(0, rank * n, n)
    return Half(half.weight.narrow(0, rank * n, n), bias)


def row_half(half: Half, rank: int, ranks: int, layer: str = "") -> Half:
    """``row_shard`` of float16 storage."""
    k = divided("in_features", half.weight.shape[1], ranks, layer)
    return Half(half.weight.narrow(1, rank * k, k), half.bias if rank == 0 else None)


def _at(layer: str) -> str:
    return f"{layer}: " if layer else ""
