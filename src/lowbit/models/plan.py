"""Match the names of a checkpoint with those of a model, and refuse what does not fit, before any data is read."""

from __future__ import annotations

import warnings
from collections.abc import Mapping
from typing import Any, NamedTuple

from torch import nn

from lowbit.checkpoint import Checkpoint
from lowbit.formats import FORMATS, Format, detect, quantized_layers
from lowbit.models.replace import get_linear
from lowbit.types import FormatError


class Plan(NamedTuple):
    """What goes where. Keys are names in the model, values names in the file."""

    format: Format | None
    config: Mapping[str, Any]  # what the format's reader is given
    layers: dict[str, str]  # quantized linears
    halves: dict[str, str]  # linears kept in fp16
    dense: dict[str, str]  # tensors


def format_of(checkpoint: Checkpoint) -> tuple[str | None, Mapping[str, Any]]:
    """(format name or None for plain weights, what its reader is given: for lowbit the metadata of the file)."""
    found = detect(checkpoint.metadata or checkpoint.quantization, list(checkpoint))
    return found, (checkpoint.metadata if found == "lowbit" else checkpoint.quantization) or {}


# Prefixes as other exporters write them -> as the model names them; the first row that fits is taken for the whole file.
_RENAMES: tuple[tuple[str, str], ...] = (
    ("", ""),
    ("model.model.", "model."),
    ("language_model.model.", "model.language_model."),
    ("language_model.", "model.language_model."),
    ("model.language_model.", "model."),
    ("", "model."),
    ("model.", ""),
)


def make_plan(model: nn.Module, checkpoint: Checkpoint) -> Plan:
    """Match the names of the file with those of the model. Raises FormatError for a format that is not known."""
    names = list(checkpoint)
    found, config = format_of(checkpoint)
    reader = FORMATS[found] if found is not None else None
    prefixes = quantized_layers(names, found, config) if found is not None else []
    halves = [name for name in (config.get("fp16_layers") or ()) if found == "lowbit"]
    inside = {f"{prefix}." for prefix in prefixes}
    dense = [name for name in names if not _under(name, inside)]
    modules = {name for name, _ in model.named_modules()}
    state = set(model.state_dict())

    def score(rule: tuple[str, str]) -> int:
        hits = sum(_rename(prefix, rule) in modules for prefix in prefixes)
        return hits + sum(_rename(name, rule) in state for name in dense)

    rule = max(_RENAMES, key=score)  # the first of equals
    return Plan(
        reader,
        config,
        {_rename(name, rule): name for name in prefixes},
        {_rename(name, rule): name for name in halves},
        {_rename(name, rule): name for name in dense},
    )


def _under(name: str, prefixes: set[str]) -> bool:
    return f"{name.rpartition('.')[0]}." in prefixes


def _rename(name: str, rule: tuple[str, str]) -> str:
    old, new = rule
    if name.startswith("lm_head"):
        return name
    return new + name[len(old) :] if name.startswith(old) else name


def check_names(model: nn.Module, plan: Plan, checkpoint: Checkpoint) -> None:
    """Refuse missing and unexpected names and wrong shapes, from headers alone."""
    state = model.state_dict()
    quantized = {f"{name}.{part}" for name in plan.layers for part in ("weight", "bias")}
    for name, source in plan.layers.items():
        linear = get_linear(model, name)
        if linear.bias is not None and f"{source}.bias" not in checkpoint:
            raise FormatError(f"{name}: found no bias in {checkpoint.path.name}, the architecture demands {name}.bias")
    tied = tied_names(model)
    missing = [
        name
        for name in state
        if name not in quantized and name not in plan.dense and not _tied_to_present(name, tied, plan)
    ]
    if missing:
        raise FormatError(f"{checkpoint.path}: found no tensor for {listed(missing)}, accepted is a complete model")
    ignored = []
    for name, source in plan.dense.items():
        if name not in state:
            if name.endswith(".bias") and name.removesuffix("bias") + "weight" in state:
                raise FormatError(f"{name}: found a bias in the file, the architecture has none there")
            if not name.endswith(("rotary_emb.inv_freq", "masked_bias", "attn.bias")):
                ignored.append(source)
        elif tuple(checkpoint.shape(source)) != tuple(state[name].shape):
            found, want = list(checkpoint.shape(source)), list(state[name].shape)
            raise FormatError(f"{source}: found shape {found}, accepted is {want} (config.json)")
    if ignored:
        warnings.warn(f"{checkpoint.path.name}: not part of {type(model).__name__}: {listed(ignored)}", stacklevel=3)


def listed(names: list[str], most: int = 8) -> str:
    """Names for an error line, the first ``most`` of them."""
    return ", ".join(names[:most]) + (f" and {len(names) - most} more" if len(names) > most else "")


def tied_names(model: Any) -> dict[str, str]:
    """{name: the name it shares storage with}, as config.json asks."""
    return dict(model.get_expanded_tied_weights_keys(all_submodels=True))


def _tied_to_present(name: str, tied: Mapping[str, str], plan: Plan) -> bool:
    partners = [tied[name]] if name in tied else [target for target, source in tied.items() if source == name]
    return any(partner in plan.dense for partner in partners)
