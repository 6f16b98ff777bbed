"""Which quantization configuration counts, of the several files that may hold one."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from .files import json_file, plain, refuse

SIDE_FILES = ("quantize_config.json", "quantization_config.json", "quant_config.json")


def read_quantization(root: Path, config: Mapping[str, Any]) -> dict[str, Any] | None:
    """The quantization configuration: config.json's, its text_config's, then the side files in order.

    Files that agree may repeat one another; two that differ in what decides the weights are refused.
    """
    found: list[tuple[str, dict[str, Any]]] = []
    text = config.get("text_config")
    for where, holder in (("config.json", config), ("config.json text_config", text)):
        inner = holder.get("quantization_config") if isinstance(holder, Mapping) else None
        if inner is not None:
            if not isinstance(inner, dict):
                raise refuse(root / "config.json", "quantization_config", type(inner).__name__, "an object")
            found.append((where, inner))
    found += [(name, side) for name in SIDE_FILES if (side := json_file(root, name)) is not None]
    for where, one in found:
        if one.get("model_file_base_name") is not None:
            plain(one["model_file_base_name"], root / where, "model_file_base_name")
    for where, other in found[1:]:
        first, second = _decisive(found[0][1]), _decisive(other)
        for key in first.keys() & second.keys():
            if first[key] != second[key]:
                values = f"{first[key]!r} in {found[0][0]}, {second[key]!r} in {where}"
                raise refuse(root, key, values, "the same in every configuration file")
    return found[0][1] if found else None


def _decisive(config: Mapping[str, Any]) -> dict[str, Any]:
    """The values that decide how weights are decoded, in one spelling."""
    names = {
        "bits": "bits", "w_bit": "bits", "group_size": "group_size", "q_group_size": "group_size", "sym": "sym",
        "desc_act": "desc_act", "quant_method": "quant_method", "checkpoint_format": "checkpoint_format",
        "zero_point": "zero_point", "version": "version", "packing_format": "packing_format", "format": "format",
    }  # fmt: skip
    row: dict[str, Any] = {}
    for key, name in names.items():
        value = config.get(key)
        if isinstance(value, str):
            value = int(value) if value.lstrip("-").isdigit() else value.lower()
        if value is not None:
            row.setdefault(name, value)
    return row
