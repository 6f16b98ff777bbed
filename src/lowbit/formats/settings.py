"""What a GPTQ or AWQ configuration says of one module: bits, group, symmetry, order; with per-module rules."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

from .checks import accepted_bits, flag, integer, mapping, refuse

# Keys of a per-module rule. The second set steers how a tool quantizes and says nothing about the file.
DECODING_KEYS = {"bits", "group_size", "sym", "desc_act"}
NEUTRAL_KEYS = {
    "act_bits", "act_data_type", "act_dynamic", "act_group_aware", "act_group_size", "act_sym", "adapter",
    "damp_auto_increment", "damp_percent", "data_type", "fallback", "foem", "gptaq", "hessian", "lm_head", "meta",
    "mse", "scale_dtype", "static_groups", "super_bits", "super_group_size", "true_sequential", "v2", "v2_alpha",
}  # fmt: skip


@dataclass(frozen=True)
class Settings:
    """One module's row of the configuration; None is absent."""

    bits: int
    group_size: int | None
    sym: bool | None
    desc_act: bool | None


def settings(config: Mapping[str, Any], prefix: str) -> Settings:
    """The settings of one module: the file's defaults, then the first rule that matches its name."""
    bits = config.get("bits", config.get("w_bit"))
    group = config.get("group_size", config.get("q_group_size"))
    base = Settings(
        bits=_raw_bits(prefix, bits),
        group_size=None if group is None else integer(prefix, "group_size", group, "-1, or a positive number"),
        sym=flag(prefix, "sym", config.get("sym")),
        desc_act=flag(prefix, "desc_act", config.get("desc_act")),
    )
    rule = _dynamic(config, prefix) or _extra(config, prefix)
    if rule:
        base = replace(base, **_decoded(prefix, rule))
    return replace(base, bits=accepted_bits(prefix, base.bits))


def _raw_bits(prefix: str, value: object) -> int:
    if value is None:
        raise refuse(prefix, "bits", "nothing in the quantization configuration", "4, 8")
    return integer(prefix, "bits", value, "4, 8")


def _dynamic(config: Mapping[str, Any], prefix: str) -> Mapping[str, Any]:
    """GPTQModel's ``dynamic``: regular expressions, "-:" leaves a module dense, "+:" or no sign overrides."""
    for pattern, rule in mapping(prefix, "dynamic", config.get("dynamic")).items():
        sign, body = (pattern[:2], pattern[2:]) if pattern[:2] in ("+:", "-:") else ("+:", pattern)
        if _matches(prefix, "dynamic", body):
            if sign == "-:":
                raise refuse(prefix, "dynamic", f"rule {pattern!r}, which leaves it dense", "no quantized tensors then")
            return _known(prefix, f"dynamic[{pattern!r}]", rule)
    return {}


def _extra(config: Mapping[str, Any], prefix: str) -> Mapping[str, Any]:
    """auto-round's ``extra_config``: full module names, or regular expressions."""
    extra = mapping(prefix, "extra_config", config.get("extra_config"))
    if prefix in extra:
        return _known(prefix, "extra_config", extra[prefix])
    for pattern, rule in extra.items():
        if any(sign in pattern for sign in "*+^$[(|") and _matches(prefix, "extra_config", pattern):
            return _known(prefix, f"extra_config[{pattern!r}]", rule)
    return {}


def _matches(prefix: str, field: str, pattern: str) -> bool:
    try:
        return re.match(pattern, prefix) is not None
    except re.error as error:
        raise refuse(prefix, field, f"{pattern!r} ({error})", "regular expressions") from None


def _known(prefix: str, field: str, rule: object) -> Mapping[str, Any]:
    row = mapping(prefix, field, rule)
    unknown = sorted(set(row) - DECODING_KEYS - NEUTRAL_KEYS)
    if unknown:
        raise refuse(prefix, field, f"unknown key {unknown[0]!r}", ", ".join(sorted(DECODING_KEYS)))
    return row


def _decoded(prefix: str, rule: Mapping[str, Any]) -> dict[str, Any]:
    changes: dict[str, Any] = {}
    for key in ("bits", "group_size"):
        if rule.get(key) is not None:
            changes[key] = integer(prefix, key, rule[key], "an integer")
    for key in ("sym", "desc_act"):
        if rule.get(key) is not None:
            changes[key] = flag(prefix, key, rule[key])
    return changes
