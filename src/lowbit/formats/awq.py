"""AWQ in AutoAWQ's GEMM layout, as AutoAWQ, GPTQModel and auto-round write it.

* ``qweight`` int32 [K, N / 8] and ``qzeros`` int32 [G, N / 8]: along N, nibble p of a word (low first) holds column
  [0, 2, 4, 6, 1, 3, 5, 7][p] of its eight; zero points are stored as they are;
* ``scales`` float [G, N]. No activation order.
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
    flag,
    group_of,
    half_scales,
    join,
    read_bias,
    refuse,
    require,
    shaped,
    typed,
    uncentred,
    weight_only,
)
from .settings import settings

MARKER = (".qweight",)
ORDER = [0, 2, 4, 6, 1, 3, 5, 7]  # the column in each nibble
INVERSE = [0, 4, 1, 5, 2, 6, 3, 7]  # the nibble of each column


def read(tensors: Mapping[str, Tensor], prefix: str, config: Mapping[str, Any]) -> QuantizedWeight:
    """One layer of an AWQ checkpoint; ``qzeros`` are always read, whatever ``zero_point`` or ``sym`` say."""
    check_version(config, prefix)
    rule = settings(config, prefix)
    if rule.bits != 4:
        raise refuse(prefix, "bits", rule.bits, "4 in an AWQ checkpoint")
    flag(prefix, "zero_point", config.get("zero_point"))
    qweight, qzeros, scales = require(tensors, prefix, ("qweight", "qzeros", "scales"))
    for field, tensor in (("qweight", qweight), ("qzeros", qzeros)):
        typed(prefix, field, tensor, (torch.int32,))
    k, words = shaped(prefix, "qweight", qweight, (None, None))
    typed(prefix, "scales", scales, SCALE_DTYPES)
    groups, n = shaped(prefix, "scales", scales, (None, words * 8), "(G, N of qweight)")
    shaped(prefix, "qzeros", qzeros, (groups, words), "(G, N / 8)")
    group = k // max(groups, 1) if rule.group_size is None else group_of(prefix, rule.group_size, k)
    if k % max(group, 1) or group * groups != k:
        found = f"{rule.group_size} with {groups} rows of scales for K = {k}"
        raise refuse(prefix, "group_size", found, "K / group_size rows without a rest")
    finite(prefix, "scales", scales)
    bias = read_bias(tensors, prefix, n)
    zeros = _unpack(qzeros).t().contiguous()
    codes, kept = centred(_unpack(qweight).t().contiguous(), zeros, 4)
    notes = ("zero_point is true, every zero point is 8",) if kept is None and config.get("zero_point") else ()
    return QuantizedWeight(
        codes=codes, scales=scales.t().contiguous(), group_size=group, bits=4, zeros=kept, bias=bias, notes=notes
    )


def check_version(config: Mapping[str, Any], prefix: str = "quantization_config") -> None:
    """Refuse every layout but GEMM by its name."""
    for key in ("version", "format", "checkpoint_format"):
        label = config.get(key)
        if label is not None and str(label).lower() != "gemm":
            raise refuse(prefix, key, repr(label), "gemm")


def _unpack(words: Tensor) -> Tensor:
    fields = bitpack.unpack_words(words, 4)
    return fields.reshape(fields.shape[0], -1, 8)[..., INVERSE].flatten(-2)


def _pack(codes: Tensor) -> Tensor:
    ordered = codes.reshape(codes.shape[0], -1, 8)[..., ORDER].flatten(-2)
    return bitpack.pack_words(ordered, 4)


def write(q: QuantizedWeight, prefix: str) -> dict[str, Tensor]:
    """The layer in the GEMM layout. Refuses 8 bits, activation order, a short last group, smoothing, low rank."""
    weight_only(q, prefix, "awq")
    if q.bits != 4:
        raise refuse(prefix, "bits", q.bits, "4 in awq")
    if q.perm is not None:
        raise refuse(prefix, "perm", "activation order", "none in awq; gptq holds it")
    if q.n % 8:
        raise refuse(prefix, "N", q.n, "a multiple of 8 in awq")
    if q.k % q.group_size:
        raise refuse(prefix, "group_size", f"{q.group_size} for K = {q.k}", "a divisor of K in awq")
    scales = half_scales(q, prefix, "awq")
    codes, zeros = uncentred(q)
    tensors = {
        "qweight": _pack(codes.t().contiguous()),
        "qzeros": _pack(zeros.t().contiguous()),
        "scales": scales.t().contiguous(),
    }
    if q.bias is not None:
        tensors["bias"] = q.bias
    return {join(prefix, suffix): tensor for suffix, tensor in tensors.items()}


def config(scheme: Scheme, ignored: Sequence[str]) -> dict[str, Any]:
    """``quantization_config`` of an AWQ checkpoint; symmetric weights are stored with zero points of 8."""
    if scheme.bits != 4:
        raise refuse("awq", "bits", scheme.bits, "4")
    return {
        "quant_method": "awq",
        "version": "gemm",
        "bits": 4,
        "group_size": scheme.group_size,
        "zero_point": True,
        "modules_to_not_convert": list(ignored) or None,
    }
