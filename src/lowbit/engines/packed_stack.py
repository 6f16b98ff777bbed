"""Which stacks the packed engine runs, and in which precision each of their linears."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from fnmatch import fnmatchcase
from typing import Any

import torch
from torch import nn

from lowbit import ops_cuda
from lowbit.engines.packed_linears import FLOATS, INTEGERS, PRECISIONS
from lowbit.types import FormatError, QuantizedWeight

FIXED_ROPE = ("default", "linear", "llama3", "yarn")  # one table of angles for every length
GROUPS = {  # siblings that read one x
    "qkv": ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj"),
    "o": ("self_attn.o_proj",),
    "gate_up": ("mlp.gate_proj", "mlp.up_proj"),
    "down": ("mlp.down_proj",),
}
LINEARS = tuple(name for names in GROUPS.values() for name in names)
Precision = str | Mapping[str, str] | None


def linears_of(stack: Any) -> dict[str, nn.Linear]:
    """{"layers.0.self_attn.q_proj": linear, ...} in the order of the modules. FormatError where the stack is none that
    the engine runs."""
    config = getattr(stack, "config", None)
    if config is None or not hasattr(stack, "layers") or not hasattr(stack, "rotary_emb"):
        raise _refuse("model", type(stack).__name__, "a stack of layers like transformers' Qwen3Model")
    if getattr(config, "hidden_act", "silu") != "silu":
        raise _refuse("hidden_act", repr(config.hidden_act), "'silu'")
    kind = (getattr(config, "rope_parameters", None) or {}).get("rope_type", "default")
    if kind not in FIXED_ROPE:
        raise _refuse("rope_type", repr(kind), ", ".join(FIXED_ROPE))
    found: dict[str, nn.Linear] = {}
    for index, block in enumerate(stack.layers):
        window = getattr(getattr(block, "self_attn", None), "sliding_window", None)
        if window is not None:
            raise _refuse(f"layers.{index}.self_attn.sliding_window", window, "none")
        for name in LINEARS:
            try:
                linear = block.get_submodule(name)
            except AttributeError:
                raise _refuse(f"layers.{index}", f"no {name}", "a layer like Qwen3's") from None
            if type(linear) is not nn.Linear:
                raise _refuse(f"layers.{index}.{name}", type(linear).__name__, "nn.Linear")
            found[f"layers.{index}.{name}"] = linear
    if not found:
        raise _refuse("layers", "none", "at least one")
    places = {(linear.weight.device, linear.weight.dtype) for linear in found.values()}
    if len(places) > 1:
        raise _refuse("layers", ", ".join(sorted(f"{d} {t}" for d, t in places)), "one device and one dtype")
    return found


def resolve(
    precision: Precision,
    linears: Mapping[str, nn.Linear],
    weights: Mapping[str, QuantizedWeight],
    device: torch.device,
) -> dict[str, str]:
    """The precision of every linear. FormatError for words that are none, and for what the device cannot run."""
    own = next(iter(linears.values())).weight.dtype
    if own not in FLOATS.values():
        raise _refuse("model", own, ", ".join(FLOATS))
    as_is = next(name for name, dtype in FLOATS.items() if dtype == own)
    rows: Sequence[tuple[str, str]] = ()
    if isinstance(precision, str):
        rows = [("*", precision)]
    elif precision is not None:
        rows = list(precision.items())
    for pattern, word in rows:
        if word not in PRECISIONS:
            raise FormatError(f"precision: found {word!r}, accepted are {', '.join(PRECISIONS)}")
        if not any(fnmatchcase(name, pattern) for name in linears):
            raise FormatError(f"precision: found the pattern {pattern!r}, accepted are patterns that fit a linear")
    found: dict[str, str] = {}
    for name in linears:
        asked = next((w for pattern, w in reversed(rows) if fnmatchcase(name, pattern)), None)
        found[name] = asked or (declared(weights[name]) if name in weights else as_is)
    for word in set(found.values()):
        if word in FLOATS and word != as_is:
            raise FormatError(f"precision: found {word!r} with a model in {as_is}, accepted is {as_is!r}, or to load it "
                              f"with dtype={str(FLOATS[word])}")  # fmt: skip
        if word in INTEGERS and device.type == "cuda":
            why = ops_cuda.refuses(device)
            if why is not None:
                raise FormatError(f"precision: found {word!r}, accepted here is {as_is!r}: {why}")
        if word in INTEGERS and device.type not in ("cpu", "cuda"):
            raise FormatError(f"precision: found {word!r} on {device.type}, accepted are cpu and cuda")
    return found


def declared(q: QuantizedWeight) -> str:
    """The precision that a weight asks for."""
    if q.bits == 8:
        return "w8a8"
    return "w4a4" if q.activation is not None and q.activation.bits == 4 else "w4a8"


def _refuse(where: str, found: object, accepted: str) -> FormatError:
    return FormatError(f"{where}: found {found}, accepted by the packed engine is {accepted}")
