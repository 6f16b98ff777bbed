"""Where the packed engine's quantized weights come from: a checkpoint that was made of this very model, or a mapping."""

from __future__ import annotations

import os
import warnings
from collections.abc import Mapping
from typing import Any

from lowbit.checkpoint import open_checkpoint
from lowbit.engines.packed_stack import linears_of
from lowbit.formats import detect, quantized_layers, read_layer
from lowbit.models.api import sha256_of
from lowbit.types import FormatError, QuantizedWeight

Weights = str | os.PathLike[str] | Mapping[str, QuantizedWeight]


def read_weights(stack: Any, weights: Weights | None) -> dict[str, QuantizedWeight]:
    """{"layers.0.self_attn.q_proj": weight} of a checkpoint or a mapping, whatever stands before "layers." in a name."""
    if weights is None:
        return {}
    if isinstance(weights, Mapping):
        return {_short(name): q for name, q in weights.items()}
    checkpoint = open_checkpoint(weights)
    settings = checkpoint.metadata or checkpoint.quantization or {}
    kind = detect(settings, checkpoint)
    if kind is None:
        raise FormatError(
            f"{os.fspath(weights)}: found no quantized linears, accepted is what `lowbit quantize` writes"
        )
    names = quantized_layers(checkpoint, kind, settings)
    base = settings.get("base_sha256") if kind == "lowbit" else None
    if base is None:
        warnings.warn(
            f"{os.fspath(weights)}: names no base weights, they were not compared with the model's", stacklevel=3
        )
    else:
        linears = linears_of(stack)
        have = {_short(name) for name in names}
        found = sha256_of(linear.weight for name, linear in linears.items() if name in have)
        if found != base:
            raise FormatError(
                f"{os.fspath(weights)}: base_sha256: found weights made from {base[:12]}…, accepted is {found[:12]}…, this "
                "model's: quantize this model, or load the one that was quantized"
            )
    return {_short(name): read_layer(checkpoint, name, kind, settings) for name in names}


def _short(name: str) -> str:
    return name[name.index("layers.") :] if "layers." in name and "audio_tokenizer" not in name else name
