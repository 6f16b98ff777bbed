"""compressed-tensors, as llm-compressor and auto-round write it: ``pack-quantized`` and ``int-quantized``.

pack-quantized: ``weight_packed`` int32 [N, ceil(K * bits / 32)] along K, each code stored plus 2**(bits - 1);
``weight_scale`` [N, G]; ``weight_shape`` [2] = (N, K); asymmetric: ``weight_zero_point`` int32
[ceil(N * bits / 32), G] along N, stored plus the same; old activation order: ``weight_g_idx`` int [K].
int-quantized: ``weight`` int8 [N, K] (also for 4 bits), ``weight_scale`` [N, G], ``weight_zero_point`` int8 [N, G].
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from ..types import Activation, QuantizedWeight, Scheme
from . import bitpack
from .checks import (
    SCALE_DTYPES,
    centred,
    finite,
    join,
    optional,
    read_bias,
    refuse,
    require,
    shaped,
    typed,
    uncentred,
    weight_only,
)
from .ct_scheme import CtScheme, module_scheme
from .order import read_order, write_order

MARKER = (".weight_packed", ".weight_scale")


def read(tensors: Mapping[str, Tensor], prefix: str, config: Mapping[str, Any]) -> QuantizedWeight:
    """One layer of a compressed-tensors checkpoint, by the config group that names it.

    The declared activation scheme (8 bits, dynamic, per token or per weight group) goes into ``activation``.
    Float types, block strategy, static input scales, output activations, sparsity and transforms are refused by name.
    """
    scheme = module_scheme(config, prefix)
    return _read_packed(tensors, prefix, scheme) if scheme.packed else _read_int(tensors, prefix, scheme)


def _read_packed(tensors: Mapping[str, Tensor], prefix: str, scheme: CtScheme) -> QuantizedWeight:
    bits = scheme.bits
    packed, scales = require(tensors, prefix, ("weight_packed", "weight_scale"))
    typed(prefix, "weight_packed", packed, (torch.int32,))
    n, words = shaped(prefix, "weight_packed", packed, (None, None))
    k = _logical_width(tensors, prefix, n, words, bits)
    group, groups = _scales(prefix, scales, scheme, n, k)
    notes: list[str] = []
    zeros = _packed_zeros(tensors, prefix, scheme, n, groups)
    g_idx = optional(tensors, prefix, "weight_g_idx")
    perm, note = read_order(prefix, "weight_g_idx", g_idx, k, group, groups, scheme.act_order)
    notes += [note] if note else []
    bias = read_bias(tensors, prefix, n)
    codes = bitpack.unpack_words(packed, bits)[:, :k].contiguous()
    if perm is not None:
        codes = codes[:, perm.long()]
    codes, kept = (bitpack.to_signed(codes, bits), None) if zeros is None else centred(codes, zeros, bits)
    return QuantizedWeight(
        codes=codes, scales=_plain(scales), group_size=group, bits=bits, zeros=kept, perm=perm, bias=bias,
        activation=_activation(scheme, prefix, group), notes=tuple(notes),
    )  # fmt: skip


def _read_int(tensors: Mapping[str, Tensor], prefix: str, scheme: CtScheme) -> QuantizedWeight:
    bits, mid = scheme.bits, bitpack.middle(scheme.bits)
    weight, scales = require(tensors, prefix, ("weight", "weight_scale"))
    typed(prefix, "weight", weight, (torch.int8,))
    n, k = shaped(prefix, "weight", weight, (None, None))
    group, groups = _scales(prefix, scales, scheme, n, k)
    zeros = optional(tensors, prefix, "weight_zero_point")
    unsigned: Tensor | None = None
    if zeros is None and not scheme.symmetric:
        raise refuse(prefix, "weight_zero_point", "none", "one in an asymmetric scheme")
    if zeros is not None:
        unsigned = _plain_zeros(prefix, zeros, scheme, n, groups)
    g_idx = optional(tensors, prefix, "weight_g_idx")
    perm, note = read_order(prefix, "weight_g_idx", g_idx, k, group, groups, scheme.act_order)
    bias = read_bias(tensors, prefix, n)
    if weight.numel() and bits == 4:
        low, high = int(weight.min()), int(weight.max())
        if low < -mid or high >= mid:
            raise refuse(prefix, "weight", f"codes {low} .. {high}", f"{-mid} .. {mid - 1} at {bits} bits")
    codes = weight if perm is None else weight[:, perm.long()]
    kept: Tensor | None = None
    if unsigned is not None and not bool((unsigned == mid).all()):
        codes, kept = bitpack.to_unsigned(codes.contiguous(), bits), unsigned
    return QuantizedWeight(
        codes=codes, scales=_plain(scales), group_size=group, bits=bits, zeros=kept, perm=perm, bias=bias,
        activation=_activation(scheme, prefix, group), notes=(note,) if note else (),
    )  # fmt: skip


def _logical_width(tensors: Mapping[str, Tensor], prefix: str, n: int, words: int, bits: int) -> int:
    shape = optional(tensors, prefix, "weight_shape")
    if shape is None:
        return words * 32 // bits
    typed(prefix, "weight_shape", shape, (torch.int64, torch.int32))
    shaped(prefix, "weight_shape", shape, (2,))
    rows, k = (int(size) for size in shape.tolist())
    if rows != n or k < 0 or -(-k * bits // 32) != words:
        found = f"[{rows}, {k}] for weight_packed {[n, words]} at {bits} bits"
        raise refuse(prefix, "weight_shape", found, "(N, K) with ceil(K * bits / 32) words a row")
    return k


def _scales(prefix: str, scales: Tensor, scheme: CtScheme, n: int, k: int) -> tuple[int, int]:
    """Group size and number of groups, after the scales have been checked."""
    typed(prefix, "weight_scale", scales, SCALE_DTYPES)
    group = max(k, 1) if scheme.group_size is None else min(scheme.group_size, max(k, 1))
    groups = -(-k // group)
    if scheme.group_size is None and scales.dim() == 1:
        shaped(prefix, "weight_scale", scales, (n,), "(N)")
    else:
        meaning = f"(N, ceil(K / group)) for K = {k}, group_size {scheme.group_size or 'K'}"
        shaped(prefix, "weight_scale", scales, (n, groups), meaning)
    finite(prefix, "weight_scale", scales)
    return group, groups


def _plain(scales: Tensor) -> Tensor:
    return scales.unsqueeze(1) if scales.dim() == 1 else scales


def _packed_zeros(tensors: Mapping[str, Tensor], prefix: str, scheme: CtScheme, n: int, groups: int) -> Tensor | None:
    """Zero points uint8 [N, G] of a pack-quantized layer, None for a symmetric one without the tensor."""
    zeros = optional(tensors, prefix, "weight_zero_point")
    if zeros is None:
        if scheme.symmetric:
            return None
        raise refuse(prefix, "weight_zero_point", "none", "one in an asymmetric scheme")
    if zeros.dtype == torch.int8:  # written before zero points were packed
        return _plain_zeros(prefix, zeros, scheme, n, groups)
    typed(prefix, "weight_zero_point", zeros, (torch.int32, torch.int8))
    words = -(-n * scheme.bits // 32)
    shaped(prefix, "weight_zero_point", zeros, (words, groups), "(ceil(N * bits / 32), G)")
    unsigned = bitpack.unpack_words(zeros.t().contiguous(), scheme.bits).t()[:n].contiguous()
    return _check_symmetric(prefix, scheme, unsigned)


def _plain_zeros(prefix: str, zeros: Tensor, scheme: CtScheme, n: int, groups: int) -> Tensor:
    typed(prefix, "weight_zero_point", zeros, (torch.int8,))
    if zeros.dim() == 1 and scheme.group_size is None:
        zeros = zeros.unsqueeze(1)
    shaped(prefix, "weight_zero_point", zeros, (n, groups), "(N, G)")
    mid = bitpack.middle(scheme.bits)
    if zeros.numel() and (int(zeros.min()) < -mid or int(zeros.max()) >= mid):
        found = f"{int(zeros.min())} .. {int(zeros.max())}"
        raise refuse(prefix, "weight_zero_point", found, f"{-mid} .. {mid - 1}")
    return _check_symmetric(prefix, scheme, bitpack.to_unsigned(zeros.contiguous(), scheme.bits))


def _check_symmetric(prefix: str, scheme: CtScheme, unsigned: Tensor) -> Tensor:
    if scheme.symmetric and not bool((unsigned == bitpack.middle(scheme.bits)).all()):
        raise refuse(prefix, "weight_zero_point", "values other than 0 in a symmetric scheme", "none, or all 0")
    return unsigned


def _activation(scheme: CtScheme, prefix: str, group: int) -> Activation | None:
    if scheme.activation is None or scheme.activation_group is None or scheme.activation_group == group:
        return scheme.activation
    found = f"{scheme.activation_group} with weights in groups of {group}"
    raise refuse(prefix, "input_activations.group_size", found, "the group_size of the weights")


def write(q: QuantizedWeight, prefix: str) -> dict[str, Tensor]:
    """The layer as int-quantized where its activations are declared per token, else as pack-quantized.

    Activations per group are this package's default for a file that declares nothing, so they are not declared.
    Refuses smoothing, low rank, a Hadamard, 4-bit activations and a short last group.
    """
    weight_only(q, prefix, "compressed-tensors")
    if q.group_size != q.k and q.k % q.group_size:
        raise refuse(prefix, "group_size", f"{q.group_size} for K = {q.k}", "a divisor of K in compressed-tensors")
    scales = q.scales.contiguous()
    unsigned, zeros = uncentred(q)
    codes, g_idx = write_order(q.with_(codes=unsigned, zeros=zeros))
    if _per_token(q.activation):
        if q.perm is not None:
            raise refuse(prefix, "perm", "activation order", "none in int-quantized; pack-quantized holds it")
        tensors = {"weight": bitpack.to_signed(codes, q.bits), "weight_scale": scales}
        if q.zeros is not None:
            tensors["weight_zero_point"] = bitpack.to_signed(zeros, q.bits)
    else:
        tensors = {
            "weight_packed": bitpack.pack_words(codes, q.bits),
            "weight_scale": scales,
            "weight_shape": torch.tensor([q.n, q.k], dtype=torch.int64),
        }
        if q.zeros is not None:
            tensors["weight_zero_point"] = bitpack.pack_words(zeros.t().contiguous(), q.bits).t().contiguous()
        if q.perm is not None:
            tensors["weight_g_idx"] = g_idx
    if q.bias is not None:
        tensors["bias"] = q.bias
    return {join(prefix, suffix): tensor for suffix, tensor in tensors.items()}


def _per_token(activation: Activation | None) -> bool:
    return activation is not None and activation.granularity == "token"


def config_group(
    targets: Sequence[str], bits: int, group_size: int, symmetric: bool, activation: Activation | None, act_order: bool
) -> dict[str, Any]:
    """One row of ``config_groups``; ``group_size`` -1 is one scale a row ("channel")."""
    weights: dict[str, Any] = {
        "num_bits": bits,
        "type": "int",
        "symmetric": symmetric,
        "strategy": "channel" if group_size == -1 else "group",
        "group_size": None if group_size == -1 else group_size,
        "dynamic": False,
        "actorder": "group" if act_order else None,
    }
    token = {"num_bits": 8, "type": "int", "symmetric": True, "strategy": "token", "dynamic": True, "group_size": None}
    return {
        "targets": list(targets),
        "weights": weights,
        "input_activations": token if _per_token(activation) else None,
        "output_activations": None,
        "format": "int-quantized" if _per_token(activation) else "pack-quantized",
    }


def whole_config(groups: Sequence[Mapping[str, Any]], ignored: Sequence[str]) -> dict[str, Any]:
    """``quantization_config`` from its config groups."""
    formats = {str(group["format"]) for group in groups}
    return {
        "quant_method": "compressed-tensors",
        "format": formats.pop() if len(formats) == 1 else "mixed-precision",
        "quantization_status": "compressed",
        "config_groups": {f"group_{index}": dict(group) for index, group in enumerate(groups)},
        "ignore": list(ignored),
        "kv_cache_scheme": None,
    }


def config(scheme: Scheme, ignored: Sequence[str]) -> dict[str, Any]:
    """``quantization_config`` of a compressed-tensors checkpoint of one scheme."""
    if scheme.bits not in (4, 8):
        raise refuse("compressed-tensors", "bits", scheme.bits, "4, 8")
    row = config_group(["Linear"], scheme.bits, scheme.group_size, scheme.symmetric, scheme.activation, False)
    return whole_config([row], ignored)
