"""What the linears of a checkpoint take on disk."""

from __future__ import annotations

import os
from typing import NamedTuple

import torch
from torch import nn

from lowbit.checkpoint import open_checkpoint
from lowbit.formats import FORMATS
from lowbit.models.load import build_empty, local_directory
from lowbit.models.plan import make_plan
from lowbit.models.recipes import recipe_for
from lowbit.types import FormatError


class Stored(NamedTuple):
    """``bits_per_weight`` counts all that is stored of the linears but biases, quantized or not; ``bytes`` is the files'."""

    bits_per_weight: float
    weights: int
    bytes: int
    format: str | None  # None for plain weights


def stored(path: str | os.PathLike[str]) -> Stored:
    """From headers alone. The linears are those of the model's blocks, and every other that is quantized."""
    checkpoint = open_checkpoint(local_directory(path))
    model = build_empty(checkpoint.path, torch.float32)
    plan = make_plan(model, checkpoint)
    try:
        inside = f"{recipe_for(model).blocks}."
    except FormatError:
        inside = ""
    sources = dict(plan.layers) | dict(plan.halves)
    weights, wanted = 0, set()
    for name, module in model.named_modules():
        if isinstance(module, nn.Linear) and (name in sources or (inside and name.startswith(inside))):
            weights += module.in_features * module.out_features
            dense = plan.dense.get(f"{name}.weight", f"{name}.weight").rpartition(".")[0]
            wanted.add(sources.get(name, dense))
    parts = (t for t in checkpoint if t.rpartition(".")[0] in wanted and not t.endswith(".bias"))
    total = sum(checkpoint.nbytes(t) for t in parts)
    files = {checkpoint.file(t) for t in checkpoint}
    size = sum((checkpoint.path / file).stat().st_size for file in files)
    kind = None if plan.format is None else next(n for n, f in FORMATS.items() if f is plan.format)
    return Stored(8 * total / max(weights, 1), weights, size, kind)
