"""Activation order: a tensor that names the group of every input column, and the permutation it stands for."""

from __future__ import annotations

import torch
from torch import Tensor

from ..types import QuantizedWeight
from .checks import refuse, short


def read_order(
    where: str, field: str, g_idx: Tensor | None, k: int, group: int, groups: int, declared: bool | None
) -> tuple[Tensor | None, str]:
    """``perm`` int32 [K] (stable sort of the group numbers), or None where columns lie in order; and a note.

    A tensor that says nothing (absent, empty, all 0, all -1) counts as absent. ``declared`` is what the
    configuration says of activation order; a file that declares it and then says nothing is refused.
    """
    in_order = torch.arange(k, dtype=torch.int64) // group
    if g_idx is None or g_idx.numel() == 0:
        return None, _silent(where, field, "nothing", groups, declared, "")
    if tuple(g_idx.shape) != (k,):
        raise refuse(where, field, f"shape {list(g_idx.shape)}", f"[{k}] (K)")
    if g_idx.dtype not in (torch.int32, torch.int64):
        raise refuse(where, field, short(g_idx.dtype), "int32, int64")
    index = g_idx.to(device="cpu", dtype=torch.int64)
    if torch.equal(index, in_order):
        return None, "activation order declared, columns in order" if declared and groups > 1 else ""
    if bool((index == 0).all()):
        return None, _silent(where, field, "all 0", groups, declared, f"{field} all 0 taken as absent")
    if bool((index == -1).all()):
        return None, _silent(where, field, "all -1", groups, declared, f"{field} all -1 taken as absent")
    outside = ((index < 0) | (index >= groups)).nonzero().flatten()
    if outside.numel():
        at = int(outside[0])
        raise refuse(where, f"{field}[{at}]", int(index[at]), f"0 .. {groups - 1} (groups)")
    perm = torch.argsort(index, stable=True)
    if not torch.equal(index[perm], in_order):
        counts = torch.bincount(index, minlength=groups).tolist()
        raise refuse(where, field, f"groups of {counts[:8]} columns", f"{group} columns a group, the last may be short")
    note = "" if declared is not False else "activation order in the tensors although the configuration declares none"
    return perm.to(torch.int32), note


def _silent(where: str, field: str, found: str, groups: int, declared: bool | None, note: str) -> str:
    if declared and groups > 1:
        accepted = "a group number for every column where activation order is declared"
        raise refuse(where, field, found, accepted)
    return note if groups > 1 else ""


def write_order(q: QuantizedWeight) -> tuple[Tensor, Tensor]:
    """Codes [N, K] back in the order of the inputs, and the group number int32 [K] of every input."""
    group = torch.arange(q.k, dtype=torch.int32, device=q.codes.device) // q.group_size
    if q.perm is None:
        return q.codes, group
    perm = q.perm.long()
    return torch.empty_like(q.codes).index_copy_(1, perm, q.codes), torch.empty_like(group).index_copy_(0, perm, group)
