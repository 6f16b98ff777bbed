"""What is in a checkpoint, layer by layer, read by the same code that loads it."""

from __future__ import annotations

import os
from typing import NamedTuple

from lowbit.checkpoint import open_checkpoint
from lowbit.formats import FORMATS, quantized_layers
from lowbit.models.plan import format_of
from lowbit.reference import two_level
from lowbit.types import QuantizedWeight


class LayerInfo(NamedTuple):
    """One quantized linear. ``group`` is in input columns, ``bytes`` counts all its tensors in the file."""

    name: str
    format: str
    bits: int
    group: int
    symmetric: bool
    act_order: bool
    n: int
    k: int
    bytes: int
    activation: str
    extras: str  # smoothing, low rank, Hadamard, bias
    notes: tuple[str, ...]


class CheckpointInfo(NamedTuple):
    """A whole checkpoint: its quantized linears, and what else is in it."""

    format: str
    layers: list[LayerInfo]
    dense_tensors: int
    dense_bytes: int
    total_bytes: int


def scale_form(q: QuantizedWeight) -> str:
    """ "channel scales" or "two-level scales" where that is what a symmetric weight has, else nothing."""
    if q.zeros is not None:
        return ""
    if q.groups == 1:
        return "channel scales"
    return "two-level scales" if two_level(q.scales) is not None else ""


def inspect_checkpoint(path: str | os.PathLike[str]) -> CheckpointInfo:
    """Read every quantized linear of a directory (one at a time) and describe it. FormatError for anything malformed."""
    checkpoint = open_checkpoint(path)
    names = list(checkpoint)
    total = sum(checkpoint.nbytes(name) for name in names)
    found, config = format_of(checkpoint)
    if found is None:
        return CheckpointInfo("plain", [], len(names), total, total)
    sizes: dict[str, int] = {}
    for name in names:
        prefix = name.rpartition(".")[0]
        sizes[prefix] = sizes.get(prefix, 0) + checkpoint.nbytes(name)
    layers = []
    for prefix in quantized_layers(names, found, config):
        q = FORMATS[found].read(checkpoint, prefix, config)
        q.check_values(prefix)
        extras = [
            word
            for word, there in (
                ("smooth", q.smooth is not None),
                ("" if q.low_rank is None else f"low rank {q.low_rank.down.shape[1]}", q.low_rank is not None),
                (f"hadamard {q.hadamard}", bool(q.hadamard)),
                (scale_form(q), q.bits == 4 and bool(scale_form(q))),
                ("bias", q.bias is not None),
            )
            if there
        ]
        declared = "-" if q.activation is None else f"{q.activation.bits} {q.activation.granularity}"
        if q.activation is not None and q.activation.clip != 1:
            declared += f" clip {q.activation.clip:g}"
        row = LayerInfo(
            prefix, found, q.bits, q.group_size, q.symmetric, q.perm is not None, q.n, q.k, sizes[prefix],
            declared, ", ".join(extras), q.notes,
        )  # fmt: skip
        layers.append(row)
    for prefix in config.get("fp16_layers") or ():
        n, k = checkpoint.shape(f"{prefix}.weight")
        bias = "bias" if f"{prefix}.bias" in checkpoint else ""
        layers.append(LayerInfo(prefix, found, 16, k, True, False, n, k, sizes[prefix], "16 none", bias, ()))
    quantized = sum(layer.bytes for layer in layers)
    inside = {layer.name for layer in layers}
    dense = [name for name in names if name.rpartition(".")[0] not in inside]
    return CheckpointInfo(found, layers, len(dense), total - quantized, total)
