"""Checkpoint names and tensors <-> QuantizedWeight. Every oddity of a checkpoint ends in this package.

A format is a row of `FORMATS`: ``read(tensors, prefix, config)``, ``write(q, prefix)``, the suffixes that mark a
quantized linear, and the ``quantization_config`` of a checkpoint of one scheme.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, NamedTuple

from torch import Tensor

from ..types import QuantizedWeight, Scheme
from . import awq, compressed_tensors, gptq, lowbit
from .checks import refuse, uncentred

__all__ = [
    "FORMATS", "Format", "config_for", "detect", "quantized_layers", "read_layer", "summary", "with_zeros",
]  # fmt: skip


class Format(NamedTuple):
    """One checkpoint format."""

    read: Callable[[Mapping[str, Tensor], str, Mapping[str, Any]], QuantizedWeight]
    write: Callable[[QuantizedWeight, str], dict[str, Tensor]]
    marker: tuple[str, ...]
    config: Callable[[Scheme, Sequence[str]], dict[str, Any]]


def _read_v2(tensors: Mapping[str, Tensor], prefix: str, config: Mapping[str, Any]) -> QuantizedWeight:
    if config.get("checkpoint_format") is None and config.get("format") is None:
        config = {**config, "checkpoint_format": "gptq_v2"}
    return gptq.read(tensors, prefix, config)


FORMATS: dict[str, Format] = {
    "gptq": Format(gptq.read, gptq.write, gptq.MARKER, gptq.config),
    "gptq_v2": Format(_read_v2, gptq.write_v2, gptq.MARKER, gptq.config_v2),
    "awq": Format(awq.read, awq.write, awq.MARKER, awq.config),
    "compressed-tensors": Format(
        compressed_tensors.read, compressed_tensors.write, compressed_tensors.MARKER, compressed_tensors.config
    ),
    "lowbit": Format(lowbit.read, lowbit.write, lowbit.MARKER, lowbit.config),
}

_QUANTIZED_SUFFIXES = (".qweight", ".weight_packed")


def detect(config: Mapping[str, Any] | None, names: Iterable[str] = ()) -> str | None:
    """The format of a checkpoint from its quantization configuration (or lowbit metadata) and tensor names.

    None is a plain model. Raises FormatError for a method that is not supported, by its name, and for quantized
    tensors without any configuration.
    """
    names = list(names)
    config = config or {}
    if any(name.endswith(".w_scales") for name in names) or ("linears" in config and "version" in config):
        return "lowbit"
    method = config.get("quant_method") or config.get("method")
    if method is None and config:
        method = _guess(config)
    if method is None:
        marked = next((name for name in names if name.endswith(_QUANTIZED_SUFFIXES)), None)
        if marked is not None:
            accepted = "a quantization_config in config.json, or a quantize_config.json"
            raise refuse(marked, "quantization_config", "none", accepted)
        return None
    name = str(method).lower().replace("_", "-")
    if name in ("auto-round", "intel/auto-round"):
        name = _auto_round(config)
    if name == "gptq":
        return gptq.declared_format(config)
    if name == "awq":
        awq.check_version(config)
        return "awq"
    if name in ("compressed-tensors", "lowbit"):
        return name
    raise refuse("quantization_config", "quant_method", repr(method), ", ".join([*FORMATS, "auto-round"]))


def _guess(config: Mapping[str, Any]) -> str | None:
    if "config_groups" in config:
        return "compressed-tensors"
    if "w_bit" in config or str(config.get("version", "")).lower() in ("gemm", "gemv"):
        return "awq"
    return "gptq" if "bits" in config else None


def _auto_round(config: Mapping[str, Any]) -> str:
    packing = str(config.get("packing_format") or config.get("backend") or "")
    parts = packing.lower().replace("-", "_").split(":")
    for part in parts:
        if part in ("auto_gptq", "gptq"):
            return "gptq"
        if part in ("auto_awq", "awq"):
            return "awq"
        if part == "llm_compressor":
            return "compressed-tensors"
    accepted = "auto_round:auto_gptq, auto_round:auto_awq, auto_round:llm_compressor"
    raise refuse("quantization_config", "packing_format", repr(packing), accepted)


def quantized_layers(names: Iterable[str], format: str, config: Mapping[str, Any]) -> list[str]:
    """The module names of the quantized linears, in the order of the file."""
    found: dict[str, None] = {}
    for name in names:
        for suffix in FORMATS[format].marker:
            if name.endswith(suffix):
                found[name.removesuffix(suffix)] = None
    return list(found)


def read_layer(tensors: Mapping[str, Tensor], prefix: str, format: str, config: Mapping[str, Any]) -> QuantizedWeight:
    """One linear of a checkpoint. ``config`` is the quantization configuration, for lowbit the file's metadata."""
    if format not in FORMATS:
        raise refuse(prefix, "format", repr(format), ", ".join(FORMATS))
    return FORMATS[format].read(tensors, prefix, config)


def with_zeros(q: QuantizedWeight) -> QuantizedWeight:
    """The same weight with explicit zero points: what an asymmetric file needs of a layer that has none."""
    codes, zeros = uncentred(q)
    return q.with_(codes=codes, zeros=zeros)


def config_for(format: str, layers: Mapping[str, QuantizedWeight], ignored: Sequence[str] = ()) -> dict[str, Any]:
    """The exact ``quantization_config`` for these layers, also where bits, group, symmetry or order differ.

    Reads only the fields and shapes of ``layers``, never their data. Raises FormatError where the format has no
    way to say it (AWQ holds one group size).
    """
    if format not in FORMATS:
        raise refuse("config", "format", repr(format), ", ".join(FORMATS))
    grouped = Counter(q.group_size for q in layers.values() if q.group_size != q.k)
    group = grouped.most_common(1)[0][0] if grouped else -1
    rows = {prefix: _row(q, group) for prefix, q in layers.items()}
    base = Counter(rows.values()).most_common(1)[0][0] if rows else _Row(4, 64, False, False, None)
    others = {prefix: row for prefix, row in rows.items() if row != base}
    scheme = Scheme(format, base.bits, base.group_size, base.symmetric)
    if format == "compressed-tensors":
        return _compressed_tensors_config(rows, base, ignored)
    found = FORMATS[format].config(scheme, ignored)
    if format == "awq":
        for prefix, row in others.items():
            if (row.bits, row.group_size) != (base.bits, base.group_size):
                where = f"{row.bits} bits, group {row.group_size} beside {base.bits} bits, group {base.group_size}"
                raise refuse(prefix, "group_size", where, "one for the whole file in awq")
    if format in ("gptq", "gptq_v2"):
        found["sym"] = all(row.symmetric for row in rows.values())
        found["desc_act"] = any(row.act_order for row in rows.values())
        rules = {
            f"+:^{_literal(prefix)}$": {"bits": row.bits, "group_size": row.group_size}
            for prefix, row in others.items()
            if (row.bits, row.group_size) != (base.bits, base.group_size)
        }
        if rules:
            found["dynamic"] = rules
    return found


class _Row(NamedTuple):
    bits: int
    group_size: int  # -1 is one group
    symmetric: bool
    act_order: bool
    activation: str | None  # "token" where it is declared


def _row(q: QuantizedWeight, common: int) -> _Row:
    """``common`` is the group size of the file; a layer of one group says -1 only where it has another."""
    token = q.activation is not None and q.activation.granularity == "token"
    group = common if q.group_size == common else -1 if q.group_size == q.k else q.group_size
    return _Row(q.bits, group, q.symmetric, q.perm is not None, "token" if token else None)


def _literal(prefix: str) -> str:
    return prefix.replace(".", r"\.")


def _compressed_tensors_config(rows: Mapping[str, _Row], base: _Row, ignored: Sequence[str]) -> dict[str, Any]:
    from ..types import Activation

    named: dict[_Row, list[str]] = {base: ["Linear"]}
    for prefix, row in rows.items():
        if row != base:
            named.setdefault(row, []).append(prefix)
    groups = [
        compressed_tensors.config_group(
            targets, row.bits, row.group_size, row.symmetric,
            Activation(8, "token") if row.activation == "token" else None, row.act_order,
        )
        for row, targets in named.items()
    ]  # fmt: skip
    return compressed_tensors.whole_config(groups, ignored)


def summary(q: QuantizedWeight) -> dict[str, Any]:
    """What `lowbit inspect` prints of a layer: bits, group, symmetry, order, shapes, and what the importer met."""
    return {
        "bits": q.bits,
        "group_size": q.group_size,
        "symmetric": q.symmetric,
        "act_order": q.perm is not None,
        "n": q.n,
        "k": q.k,
        "groups": q.groups,
        "scale_dtype": str(q.scales.dtype).removeprefix("torch."),
        "rank": 0 if q.low_rank is None else q.low_rank.down.shape[1],
        "smooth": q.smooth is not None,
        "hadamard": q.hadamard,
        "activation": None if q.activation is None else dict(q.activation._asdict()),
        "bias": q.bias is not None,
        "notes": list(q.notes),
    }
