"""Sizes of a transformer as the roofline counts it, built in or from a ``config.json``."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

from lowbit.types import FormatError


class Shape(NamedTuple):
    """A stack of Llama or Qwen3 blocks: grouped-query attention and a gated MLP. ``classes``: rows of the output head;
    ``codebooks``: of audio (OmniVoice), 0 of text."""

    name: str
    layers: int
    hidden: int
    heads: int
    kv_heads: int
    head_dim: int
    intermediate: int
    classes: int
    qk_norm: bool = False
    codebooks: int = 0


# omnivoice 0.2.1 as published: 196 linears, 8 codebooks of 1025 classes
OMNIVOICE = Shape("omnivoice", 28, 1024, 16, 8, 128, 3072, 8 * 1025, True, 8)
MODELS = {"omnivoice": OMNIVOICE}
_MIXTURES = ("num_experts", "num_local_experts", "n_routed_experts")


def read_config(path: str | os.PathLike[str]) -> Shape:
    """The sizes of a model directory (or of its ``config.json``): Llama, Qwen and the like, or OmniVoice.

    FormatError where a size is absent or no positive whole number, and for mixtures of experts.
    """
    file = Path(path)
    file = file / "config.json" if file.is_dir() else file
    try:
        config = json.loads(file.read_text("utf-8"))
    except OSError as error:
        raise FormatError(f"{file}: found {error.strerror or error}, accepted is a config.json") from error
    except ValueError as error:
        raise FormatError(f"{file}: found no JSON ({error}), accepted is a config.json") from error
    if not isinstance(config, dict):
        raise FormatError(f"{file}: found a JSON {type(config).__name__}, accepted is an object")
    return of_config(config, str(file))


def of_config(config: Mapping[str, Any], where: str = "config") -> Shape:
    """As ``read_config``, of a mapping."""
    audio = isinstance(config.get("llm_config"), Mapping)
    inner: Mapping[str, Any] = config["llm_config"] if audio else config
    for name in _MIXTURES:
        if inner.get(name):
            raise FormatError(f"{where}: {name}: found {inner[name]}, accepted is a model without experts")

    def size(source: Mapping[str, Any], name: str, other: int | None = None) -> int:
        value = source.get(name)
        value = other if value is None and other is not None else value
        if isinstance(value, bool) or not isinstance(value, int) or value < 1:
            raise FormatError(
                f"{where}: {name}: found {value!r}, accepted is a whole number from 1 on (a Llama or Qwen3 shape)"
            )
        return value

    hidden, heads = size(inner, "hidden_size"), size(inner, "num_attention_heads")
    codebooks = size(config, "num_audio_codebook") if audio else 0
    kind = str(inner.get("model_type", "?"))
    return Shape(
        str(config.get("model_type", "?")), size(inner, "num_hidden_layers"), hidden, heads,
        size(inner, "num_key_value_heads", heads), size(inner, "head_dim", max(hidden // heads, 1)),
        size(inner, "intermediate_size"),
        codebooks * size(config, "audio_vocab_size") if audio else size(inner, "vocab_size"),
        kind.startswith("qwen3"), codebooks,
    )  # fmt: skip
