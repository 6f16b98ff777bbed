"""What a compressed-tensors configuration says of one module; everything not supported is refused by name."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from ..types import Activation
from .checks import accepted_bits, flag, integer, mapping, refuse

PACKED = ("pack-quantized",)
PLAIN = ("int-quantized", "naive-quantized")
ORDERS = {None: None, "weight": False, "static": False, "group": True, "dynamic": True}


@dataclass(frozen=True)
class CtScheme:
    """One module's weights and activations. ``group_size`` None is one scale a row (strategy "channel")."""

    packed: bool
    bits: int
    symmetric: bool
    group_size: int | None
    act_order: bool | None
    activation: Activation | None
    activation_group: int | None


def module_scheme(config: Mapping[str, Any], prefix: str) -> CtScheme:
    """The scheme of the config group that names the module; names beat "Linear"."""
    _whole_model(config)
    for name in _names(prefix, "ignore", config.get("ignore")):
        if _is(prefix, name):
            raise refuse(prefix, "ignore", repr(name), "no quantized tensors for an ignored module")
    group = _group_for(config, prefix)
    label = str(group.get("format") or config.get("format") or "")
    if label not in PACKED + PLAIN:
        raise refuse(prefix, "format", repr(label), ", ".join(PACKED + PLAIN))
    if group.get("output_activations") is not None:
        raise refuse(prefix, "output_activations", "a scheme", "null")
    if group.get("weights") is None:
        raise refuse(prefix, "weights", "null", "a weight scheme of type int")
    weights = mapping(prefix, "weights", group.get("weights"))
    bits, symmetric, group_size = _weights(prefix, weights)
    order = weights.get("actorder")
    if isinstance(order, bool):
        order = "group" if order else None
    if order not in ORDERS:
        raise refuse(prefix, "actorder", repr(order), "null, weight, static, group, dynamic")
    activation, activation_group = _inputs(prefix, group.get("input_activations"))
    return CtScheme(label in PACKED, bits, symmetric, group_size, ORDERS[order], activation, activation_group)


def _whole_model(config: Mapping[str, Any]) -> None:
    where = "quantization_config"
    if config.get("kv_cache_scheme") is not None:
        raise refuse(where, "kv_cache_scheme", "a scheme", "null")
    sparsity = mapping(where, "sparsity_config", config.get("sparsity_config"))
    if sparsity and sparsity.get("format") not in (None, "dense"):
        raise refuse(where, "sparsity_config", repr(sparsity.get("format")), "none, dense")
    if mapping(where, "transform_config", config.get("transform_config")).get("config_groups"):
        raise refuse(where, "transform_config", "transforms", "none")


def _names(where: str, field: str, value: object) -> Sequence[str]:
    if value is None:
        return ()
    if not isinstance(value, Sequence) or isinstance(value, str) or not all(isinstance(name, str) for name in value):
        raise refuse(where, field, repr(value), "a list of names")
    return value


def _is(prefix: str, name: str) -> bool:
    if not name.startswith("re:"):
        return name == prefix
    try:
        return re.match(name[3:], prefix) is not None
    except re.error as error:
        raise refuse(prefix, "targets", f"{name!r} ({error})", "regular expressions") from None


def _group_for(config: Mapping[str, Any], prefix: str) -> Mapping[str, Any]:
    rows = mapping(prefix, "config_groups", config.get("config_groups"))
    groups = [mapping(prefix, f"config_groups.{key}", row) for key, row in rows.items()]
    for group in groups:
        if any(_is(prefix, name) for name in _names(prefix, "targets", group.get("targets"))):
            return group
    for group in groups:
        if "Linear" in _names(prefix, "targets", group.get("targets")):
            return group
    raise refuse(prefix, "config_groups", "no group that names this module", "one with its name, or Linear")


def _weights(prefix: str, weights: Mapping[str, Any]) -> tuple[int, bool, int | None]:
    if weights.get("type", "int") != "int":
        raise refuse(prefix, "weights.type", repr(weights["type"]), "int")
    bits = accepted_bits(prefix, weights.get("num_bits", 8))
    if weights.get("dynamic") not in (None, False):
        raise refuse(prefix, "weights.dynamic", repr(weights["dynamic"]), "false")
    if weights.get("block_structure") is not None:
        raise refuse(prefix, "weights.block_structure", repr(weights["block_structure"]), "null")
    symmetric = flag(prefix, "weights.symmetric", weights.get("symmetric"))
    group_size = weights.get("group_size")
    size = None if group_size is None else integer(prefix, "weights.group_size", group_size, "a number, -1, null")
    strategy = weights.get("strategy") or ("channel" if size in (None, -1) else "group")
    if strategy not in ("group", "channel"):
        raise refuse(prefix, "weights.strategy", repr(strategy), "group, channel")
    if strategy == "group" and (size is None or size < 1):
        raise refuse(prefix, "weights.group_size", group_size, "a positive number with strategy group")
    return bits, symmetric is not False, size if strategy == "group" else None


def _inputs(prefix: str, value: object) -> tuple[Activation | None, int | None]:
    """The declared activation scheme, and its group size where it is per group."""
    if value is None:
        return None, None
    inputs = mapping(prefix, "input_activations", value)
    asked = {
        "type": (inputs.get("type", "int"), ("int",)),
        "num_bits": (inputs.get("num_bits", 8), (8,)),
        "symmetric": (inputs.get("symmetric", True), (True,)),
        "dynamic": (inputs.get("dynamic", False), (True,)),
        "strategy": (inputs.get("strategy") or "none", ("token", "group")),
    }
    for field, (found, accepted) in asked.items():
        if found not in accepted or (isinstance(found, bool) and found is not accepted[0]):
            shown = ", ".join(str(value).lower() if isinstance(value, bool) else str(value) for value in accepted)
            raise refuse(prefix, f"input_activations.{field}", repr(found), shown)
    if inputs["strategy"] == "token":
        return Activation(8, "token"), None
    size = integer(prefix, "input_activations.group_size", inputs.get("group_size"), "the group_size of the weights")
    return Activation(8, "group"), size
