"""GPTQ, as AutoGPTQ, GPTQModel and auto-round write it: format 1 (zero points stored minus one) and ``gptq_v2``.

A layer of N outputs, K inputs and G = ceil(K / group) groups:

* ``qweight`` int32 [K * bits / 32, N]: codes along K, the first in the low bits;
* ``qzeros`` int32 [G, N * bits / 32]: zero points along N; format 1 stores them minus one, subtracted from the whole
  word by GPTQModel, so that a zero point of 0 borrows from its neighbour;
* ``scales`` float [G, N], and ``g_idx`` int [K], the group of every input where activation order was used.

``w[n, k] = scales[g, n] * (code[k, n] - zero[g, n])`` with g = g_idx[k].
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from ..types import QuantizedWeight, Scheme
from . import bitpack
from .checks import (
    SCALE_DTYPES,
    centred,
    finite,
    group_of,
    half_scales,
    join,
    mapping,
    optional,
    read_bias,
    refuse,
    require,
    shaped,
    typed,
    uncentred,
    warn,
    weight_only,
)
from .order import read_order, write_order
from .settings import Settings, settings

MARKER = (".qweight",)
FORMATS_HELD = ("gptq", "gptq_v2")

# How a tool takes one from the zero points of format 1. It matters only where one is 0 and so stored as all ones.
# "word": from the whole word (borrows), or never below 0; "field": modulo 2**bits in each field;
# "lost": in 32 bits without a mask, which destroys every later field of the word.
WRITERS = {
    "gptqmodel": "word", "lowbit": "word", "auto-round": "word",
    "olive": "field",
    "auto_gptq": "lost", "autogptq": "lost", "auto-gptq": "lost", "gptq-for-llama": "lost",
}  # fmt: skip


def read(tensors: Mapping[str, Tensor], prefix: str, config: Mapping[str, Any]) -> QuantizedWeight:
    """One layer of a GPTQ checkpoint.

    ``config`` is the quantization configuration: ``bits`` is needed, ``group_size`` is checked against the tensors
    (without it g_idx or the shapes decide), ``sym`` is cross-checked with the zero points, ``checkpoint_format``
    "gptq" (or absent) or "gptq_v2". Raises FormatError before any weight is copied.
    """
    version = declared_format(config, prefix)
    rule = settings(config, prefix)
    bits = rule.bits
    if config.get("pack_dtype") not in (None, "int32", "torch.int32"):
        raise refuse(prefix, "pack_dtype", repr(config["pack_dtype"]), "int32")
    qweight, qzeros, scales = require(tensors, prefix, ("qweight", "qzeros", "scales"))
    g_idx = optional(tensors, prefix, "g_idx")
    for field, tensor in (("qweight", qweight), ("qzeros", qzeros)):
        typed(prefix, field, tensor, (torch.int32,))
        shaped(prefix, field, tensor, (None, None))
    typed(prefix, "scales", scales, SCALE_DTYPES)
    groups, n = shaped(prefix, "scales", scales, (None, qweight.shape[1]), "(G, N as in qweight)")
    k = _check_width(prefix, rule, qweight, qzeros, g_idx, groups, n)
    group = _check_groups(prefix, rule, k, groups, g_idx)
    shaped(prefix, "qzeros", qzeros, (groups, n * bits // 32), "(G as in scales, N * bits / 32)")
    perm, note = read_order(prefix, "g_idx", g_idx, k, group, groups, rule.desc_act)
    notes = [note] if note else []
    finite(prefix, "scales", scales)
    zeros, more = _read_zeros(prefix, qzeros, rule, version, config)
    bias = read_bias(tensors, prefix, n)
    codes = bitpack.unpack_words(qweight.t().contiguous(), bits)
    if perm is not None:
        codes = codes[:, perm.long()]
    codes, kept = centred(codes, zeros, bits)
    return QuantizedWeight(
        codes=codes, scales=scales.t().contiguous(), group_size=group, bits=bits, zeros=kept, perm=perm, bias=bias,
        notes=tuple(notes + more),
    )  # fmt: skip


def declared_format(config: Mapping[str, Any], prefix: str = "quantization_config") -> str:
    """ "gptq" or "gptq_v2", from ``checkpoint_format`` or ``format``; other layouts are refused by name."""
    if config.get("is_marlin_format"):
        raise refuse(prefix, "is_marlin_format", "true", "gptq, gptq_v2")
    labels = [str(config[key]) for key in ("checkpoint_format", "format") if config.get(key) is not None]
    for label in labels:
        if label not in FORMATS_HELD:
            raise refuse(prefix, "checkpoint_format", repr(label), ", ".join(FORMATS_HELD))
    if len(set(labels)) > 1:
        raise refuse(prefix, "checkpoint_format", f"{labels[0]!r} beside format {labels[1]!r}", "one of them")
    return labels[0] if labels else "gptq"


def _check_width(
    prefix: str, rule: Settings, qweight: Tensor, qzeros: Tensor, g_idx: Tensor | None, groups: int, n: int
) -> int:
    """K, after the declared bits have been held against the shapes of three tensors."""
    bits, rows, words = rule.bits, qweight.shape[0], qzeros.shape[1]
    k = rows * 32 // bits
    if words * 32 != n * bits:
        if n and words * 32 % n == 0 and words * 32 // n in (2, 3, 4, 5, 6, 8):
            found = f"{bits} in the configuration, {words * 32 // n} in qzeros {list(qzeros.shape)} for N = {n}"
            raise refuse(prefix, "bits", found, "the same in both")
        found = f"shape {list(qzeros.shape)} for scales {[groups, n]}"
        raise refuse(prefix, "qzeros", found, f"[{groups}, {n * bits / 32:g}] (G, N * bits / 32)")
    if g_idx is not None and g_idx.numel() not in (0, k):
        length = g_idx.numel()
        if rows * 32 % length == 0:
            found = (
                f"{bits} in the configuration, {rows * 32 // length} in qweight {list(qweight.shape)} for K = {length}"
            )
            raise refuse(prefix, "bits", found, "the same in both")
        raise refuse(prefix, "g_idx", f"shape {list(g_idx.shape)}", f"[{k}] (K of qweight {list(qweight.shape)})")
    if rule.group_size not in (None, -1) and rule.group_size and rule.group_size > 0:
        for other in (4, 8):
            if other != bits and -(-k // rule.group_size) != groups == -(-(rows * 32 // other) // rule.group_size):
                found = f"{bits} in the configuration, {other} in qweight {list(qweight.shape)} with {groups} groups"
                raise refuse(prefix, "bits", found, "the same in both")
    return k


def _check_groups(prefix: str, rule: Settings, k: int, groups: int, g_idx: Tensor | None) -> int:
    if rule.group_size is not None:
        group = group_of(prefix, rule.group_size, k)
        if -(-k // group) != groups:
            found = f"{rule.group_size} in the configuration, {groups} groups in scales for K = {k}"
            raise refuse(prefix, "group_size", found, "a group size that gives as many groups as scales has")
        return group
    if g_idx is not None and g_idx.numel() == k and int(g_idx.min()) >= 0 and int(g_idx.max()) == groups - 1:
        counted = int(torch.bincount(g_idx.to(torch.int64).cpu()).max())
        if -(-k // counted) == groups:
            return counted
    if groups < 1 or k % groups:
        raise refuse(prefix, "group_size", f"none in the configuration, {groups} groups for K = {k}", "a group_size")
    return max(k // groups, 1)


def _read_zeros(
    prefix: str, qzeros: Tensor, rule: Settings, version: str, config: Mapping[str, Any]
) -> tuple[Tensor, list[str]]:
    """Zero points uint8 [N, G] and notes."""
    bits, mid, notes = rule.bits, bitpack.middle(rule.bits), list[str]()
    stored = bitpack.unpack_words(qzeros, bits)
    if version == "gptq_v2":
        zeros = stored
    else:
        zeros = bitpack.unpack_words(bitpack.add_to_fields(qzeros, bits, 1), bits)
        if rule.sym is not True and bool((stored == (1 << bits) - 1).any()):
            zeros, note = _wrapped(prefix, stored, zeros, bits, config)
            notes.append(note)
    if zeros.numel() and not bool((zeros == mid).all()):
        first = int(zeros.flatten()[0])
        constant = bool((zeros == first).all())
        if rule.sym is True:
            off_by_one = mid + 1 if version == "gptq" else mid - 1
            if not constant or first != off_by_one:
                found = f"true with zero points {int(zeros.min())} .. {int(zeros.max())}"
                raise refuse(prefix, "sym", found, f"true only where every zero point is {mid}")
            other = "gptq_v2" if version == "gptq" else "gptq"
            text = f"zero points stored as in {other} under the label {version}; sym is true, so {mid} was taken"
            notes.append(warn(prefix, text))
            zeros = torch.full_like(zeros, mid)
        elif rule.sym is None and constant and abs(first - mid) == 1:
            text = f"every zero point is {first}; if the layer is symmetric, its checkpoint_format {version} is wrong"
            notes.append(warn(prefix, text))
    return zeros.t().contiguous(), notes


def _wrapped(prefix: str, stored: Tensor, by_word: Tensor, bits: int, config: Mapping[str, Any]) -> tuple[Tensor, str]:
    """Format 1 with a stored all-ones field: a zero point of 0 that wrapped, in the way of the tool that wrote it."""
    writer = _writer(config)
    top = (1 << bits) - 1
    how = WRITERS.get(writer)
    if how == "word":
        return by_word, f"zero points of 0 stored as {top}, whole words as {writer} writes them"
    if how == "field":
        return (stored + 1) & top, f"zero points of 0 stored as {top}, field by field as {writer} writes them"
    if how == "lost":
        fields = stored.reshape(stored.shape[0], -1, bitpack.fields_per_word(bits))
        if bool((fields[..., :-1] == top).any()):
            raise refuse(prefix, "qzeros", f"a zero point of 0 written by {writer}, which spoils its word", "gptq_v2")
        return by_word, f"zero points of 0 stored as {top}"
    text = (
        f"a zero point of 0 is stored as {top} and the configuration names no known writer (meta.quantizer); "
        "read by whole words, as GPTQModel writes them"
    )
    return by_word, warn(prefix, text)


def _writer(config: Mapping[str, Any]) -> str:
    quantizer = mapping("quantization_config", "meta", config.get("meta")).get("quantizer")
    first = (
        quantizer[0] if isinstance(quantizer, Sequence) and not isinstance(quantizer, str) and quantizer else quantizer
    )
    if isinstance(first, str) and first:
        return first.split(":")[0].strip().lower()
    if isinstance(config.get("provider"), str):
        return str(config["provider"]).lower()
    return "auto-round" if "autoround_version" in config else ""


def write(q: QuantizedWeight, prefix: str) -> dict[str, Tensor]:
    """The layer in format 1. Refuses smoothing, low rank, a Hadamard, and scales that float16 would round.

    A zero point of 0 borrows from its neighbour in the word, as GPTQModel writes and reads it. Tools that add one
    field by field get such a word wrong, and GPTQModel's loader takes asymmetric format 1 from itself alone, so
    `gptq_v2` is the better choice for asymmetric weights.
    """
    return _write(q, prefix, "gptq")


def write_v2(q: QuantizedWeight, prefix: str) -> dict[str, Tensor]:
    """The layer in ``gptq_v2``, zero points as they are; refuses what `write` refuses."""
    return _write(q, prefix, "gptq_v2")


def _write(q: QuantizedWeight, prefix: str, version: str) -> dict[str, Tensor]:
    weight_only(q, prefix, version)
    fields = bitpack.fields_per_word(q.bits)
    for field, size in (("K", q.k), ("N", q.n)):
        if size % fields:
            raise refuse(prefix, field, size, f"a multiple of {fields} at {q.bits} bits in {version}")
    scales = half_scales(q, prefix, version)
    _, zeros = uncentred(q)
    codes, g_idx = write_order(q.with_(codes=uncentred(q)[0], zeros=zeros))
    qzeros = bitpack.pack_words(zeros.t().contiguous(), q.bits)
    tensors = {
        "qweight": bitpack.pack_words(codes, q.bits).t().contiguous(),
        "qzeros": bitpack.add_to_fields(qzeros, q.bits, -1) if version == "gptq" else qzeros,
        "scales": scales.t().contiguous(),
        "g_idx": g_idx,
    }
    if q.bias is not None:
        tensors["bias"] = q.bias
    return {join(prefix, suffix): tensor for suffix, tensor in tensors.items()}


def config(scheme: Scheme, ignored: Sequence[str]) -> dict[str, Any]:
    """``quantization_config`` of a format 1 checkpoint."""
    return _config(scheme, ignored, "gptq")


def config_v2(scheme: Scheme, ignored: Sequence[str]) -> dict[str, Any]:
    """``quantization_config`` of a ``gptq_v2`` checkpoint."""
    return _config(scheme, ignored, "gptq_v2")


def _config(scheme: Scheme, ignored: Sequence[str], version: str) -> dict[str, Any]:
    if scheme.bits not in (4, 8):
        raise refuse(version, "bits", scheme.bits, "4, 8")
    found: dict[str, Any] = {
        "quant_method": "gptq",
        "checkpoint_format": version,
        "format": version,
        "bits": scheme.bits,
        "group_size": scheme.group_size,
        "sym": scheme.symmetric,
        "desc_act": False,
        "lm_head": False,
        "pack_dtype": "int32",
        "meta": {"quantizer": ["lowbit:1"]},
    }
    if ignored:
        found["modules_to_not_convert"] = list(ignored)
    return found
