"""Our own format: canonical row-major codes, packed for a machine only when loaded.

Per linear of N outputs, K inputs, G groups:

* ``qweight``: 4 bits uint8 [N, ceil(K / 2)], element 2j in the low nibble, two's complement, or unsigned where there
  is ``w_zeros``; an odd K has one padding nibble of 0 at the end of a row. 8 bits int8 [N, K]; where there is
  ``w_zeros`` the same bytes are the unsigned codes.
* ``w_scales`` float16 or float32 [N, G], of two-level scales the products, exactly (``reference.two_level``);
  ``w_zeros`` of 8-bit codes uint8 [N, G], of 4-bit codes uint8 [N, ceil(G / 2)], group 2j in the low nibble (a byte a
  group, [N, G], is read too: the widths tell which); ``perm`` int32 [K]; ``smooth`` [K];
  ``proj_down`` [K, R] and ``proj_up`` [N, R]; ``bias`` [N]. Floats are float16 where that is exact, else float32.

The file's metadata key ``lowbit`` is JSON: version, method, bits, group_size, rank, hadamard, base_sha256, and
``linears``: name -> bits, group_size, k, hadamard, activation. A file without it is the published SVDQuant form:
signed 4 bit, group = K / G, no Hadamard.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from ..types import Activation, LowRank, QuantizedWeight, Scheme
from . import bitpack
from .checks import (
    SCALE_DTYPES,
    accepted_bits,
    finite,
    integer,
    join,
    mapping,
    optional,
    read_bias,
    refuse,
    require,
    shaped,
    typed,
    warn,
)

MARKER = (".qweight",)
VERSION = 1
FLOATS = (torch.float16, torch.float32, torch.bfloat16)


def read(tensors: Mapping[str, Tensor], prefix: str, config: Mapping[str, Any]) -> QuantizedWeight:
    """One layer of a lowbit file; ``config`` is the file's metadata, {} for the published SVDQuant form."""
    entry = _entry(config, prefix)
    qweight, scales = require(tensors, prefix, ("qweight", "w_scales"))
    zeros = optional(tensors, prefix, "w_zeros")
    typed(prefix, "qweight", qweight, (torch.uint8, torch.int8))
    n, columns = shaped(prefix, "qweight", qweight, (None, None))
    bits = 8 if qweight.dtype == torch.int8 else 4
    if entry.get("bits") is not None and accepted_bits(prefix, entry["bits"]) != bits:
        accepted = "uint8 with 4 bits, int8 with 8"
        raise refuse(prefix, "bits", f"{entry['bits']} with qweight {str(qweight.dtype)[6:]}", accepted)
    k = columns if bits == 8 else _width(prefix, entry, columns)
    typed(prefix, "w_scales", scales, SCALE_DTYPES)
    groups = shaped(prefix, "w_scales", scales, (n, None), "(N, G)")[1]
    group = _group(prefix, entry, k, groups)
    if zeros is not None:
        zeros = _zeros(prefix, zeros, bits, n, groups)
    finite(prefix, "w_scales", scales)
    perm = _perm(tensors, prefix, k)
    smooth = _vector(tensors, prefix, "smooth", k)
    if smooth is not None and not bool((smooth > 0).all()):
        raise refuse(prefix, "smooth", float(smooth.min()), "values > 0")
    low_rank = _low_rank(tensors, prefix, n, k)
    bias = read_bias(tensors, prefix, n)
    hadamard = integer(prefix, "hadamard", entry.get("hadamard", 0), "0, 64")
    if hadamard not in (0, 64):
        raise refuse(prefix, "hadamard", hadamard, "0, 64")
    activation = _activation(prefix, entry.get("activation"))
    notes = () if config else (warn(prefix, "no lowbit metadata: read as SVDQuant, base weights unchecked"),)
    if bits == 8:
        codes = qweight if zeros is None else qweight.view(torch.uint8)
    else:
        nibbles = bitpack.unpack_bytes(qweight, 4)[:, :k].contiguous()
        codes = nibbles if zeros is not None else bitpack.sign_extend(nibbles)
    return QuantizedWeight(
        codes=codes, scales=scales, group_size=group, bits=bits, zeros=zeros, perm=perm, low_rank=low_rank,
        smooth=smooth, hadamard=hadamard, activation=activation, bias=bias, notes=notes,
    )  # fmt: skip


def _entry(config: Mapping[str, Any], prefix: str) -> dict[str, Any]:
    version = config.get("version", VERSION)
    if version != VERSION:
        raise refuse("lowbit metadata", "version", repr(version), str(VERSION))
    linears = mapping("lowbit metadata", "linears", config.get("linears"))
    if linears and prefix not in linears:
        raise refuse(prefix, "linears", "no row for this layer in the lowbit metadata", "one row for every linear")
    own = mapping(prefix, "linears", linears.get(prefix))
    whole = {key: value for key, value in config.items() if key in ("bits", "group_size", "hadamard", "activation")}
    return {**whole, **own}


def _width(prefix: str, entry: Mapping[str, Any], columns: int) -> int:
    if entry.get("k") is None:
        return 2 * columns
    k = integer(prefix, "k", entry["k"], "K")
    if -(-k // 2) != columns:
        raise refuse(prefix, "k", f"{k} with {columns} bytes a row of qweight", "K with ceil(K / 2) bytes a row")
    return k


def _group(prefix: str, entry: Mapping[str, Any], k: int, groups: int) -> int:
    declared = entry.get("group_size")
    if declared is None:
        if groups < 1 or k % groups:
            raise refuse(prefix, "w_scales", f"{groups} groups for K = {k}", "a number of groups that divides K")
        return max(k // groups, 1)
    size = integer(prefix, "group_size", declared, "-1, or a positive number")
    group = max(k, 1) if size == -1 else min(size, max(k, 1))
    if group < 1 or -(-k // group) != groups:
        raise refuse(prefix, "group_size", f"{size} with {groups} groups for K = {k}", "ceil(K / group_size) groups")
    return group


def _zeros(prefix: str, stored: Tensor, bits: int, n: int, groups: int) -> Tensor:
    """uint8 [N, G], from two groups a byte where 4-bit codes have them so."""
    typed(prefix, "w_zeros", stored, (torch.uint8,))
    if bits == 4 and groups > 1 and tuple(stored.shape) == (n, -(-groups // 2)):
        return bitpack.unpack_bytes(stored, 4)[:, :groups].contiguous()
    shaped(prefix, "w_zeros", stored, (n, groups), "(N, G)")
    if bits == 4 and stored.numel() and int(stored.max()) > 15:
        raise refuse(prefix, "w_zeros", int(stored.max()), "0 .. 15")
    return stored


def _perm(tensors: Mapping[str, Tensor], prefix: str, k: int) -> Tensor | None:
    perm = optional(tensors, prefix, "perm")
    if perm is None:
        return None
    shaped(prefix, "perm", typed(prefix, "perm", perm, (torch.int32,)), (k,), "(K)")
    if not torch.equal(perm.long().sort().values, torch.arange(k, device=perm.device)):
        raise refuse(prefix, "perm", "values that are no permutation", f"each of 0 .. {k - 1} once")
    return perm


def _vector(tensors: Mapping[str, Tensor], prefix: str, suffix: str, size: int) -> Tensor | None:
    vector = optional(tensors, prefix, suffix)
    if vector is None:
        return None
    return finite(prefix, suffix, typed(prefix, suffix, _sized(prefix, suffix, vector, (size,)), FLOATS))


def _sized(prefix: str, suffix: str, tensor: Tensor, want: Sequence[int | None]) -> Tensor:
    shaped(prefix, suffix, tensor, want)
    return tensor


def _low_rank(tensors: Mapping[str, Tensor], prefix: str, n: int, k: int) -> LowRank | None:
    down, up = optional(tensors, prefix, "proj_down"), optional(tensors, prefix, "proj_up")
    if down is None and up is None:
        return None
    down, up = require(tensors, prefix, ("proj_down", "proj_up"))
    rank = shaped(prefix, "proj_down", typed(prefix, "proj_down", down, FLOATS), (k, None), "(K, R)")[1]
    shaped(prefix, "proj_up", typed(prefix, "proj_up", up, FLOATS), (n, rank), "(N, R)")
    return LowRank(finite(prefix, "proj_down", down), finite(prefix, "proj_up", up))


def _activation(prefix: str, value: object) -> Activation | None:
    if value is None:
        return None
    row = mapping(prefix, "activation", value)
    granularity, bits = row.get("granularity"), integer(prefix, "activation.bits", row.get("bits"), "4, 8, 16")
    if bits not in (4, 8, 16):
        raise refuse(prefix, "activation.bits", bits, "4, 8, 16")
    clip = row.get("clip", 1.0)
    if not isinstance(clip, (int, float)) or isinstance(clip, bool) or not 0 < clip < float("inf"):
        raise refuse(prefix, "activation.clip", repr(clip), "a number > 0")
    for known in ("token", "group", "none"):
        if granularity == known:
            return Activation(bits, known, float(clip))
    raise refuse(prefix, "activation.granularity", repr(granularity), "token, group, none")


def write(q: QuantizedWeight, prefix: str) -> dict[str, Tensor]:
    """The layer's tensors; everything a QuantizedWeight holds has a place. Its row of metadata is `describe`."""
    codes = q.codes.contiguous()
    if q.bits == 8:
        qweight = codes.view(torch.int8)
    else:
        qweight = _nibbles(codes.view(torch.uint8))
    zeros = q.zeros if q.zeros is None or q.bits == 8 else _nibbles(q.zeros)
    tensors: dict[str, Tensor | None] = {
        "qweight": qweight,
        "w_scales": exact_half(q.scales),
        "w_zeros": zeros,
        "perm": None if q.perm is None else q.perm.to(torch.int32),
        "smooth": None if q.smooth is None else exact_half(q.smooth),
        "proj_down": None if q.low_rank is None else exact_half(q.low_rank.down),
        "proj_up": None if q.low_rank is None else exact_half(q.low_rank.up),
        "bias": q.bias,
    }
    return {join(prefix, suffix): tensor.contiguous() for suffix, tensor in tensors.items() if tensor is not None}


def _nibbles(values: Tensor) -> Tensor:
    """uint8 [N, X] of 0 .. 15 -> [N, ceil(X / 2)], element 2j in the low nibble."""
    return bitpack.pack_bytes(torch.nn.functional.pad(values, (0, values.shape[1] % 2)), 4).contiguous()


def exact_half(tensor: Tensor) -> Tensor:
    """The tensor as float16 where that changes no value, else as float32; on meta, where there are none, as it is."""
    if tensor.is_meta:
        return tensor
    half = tensor.to(torch.float16)
    return half if torch.equal(half.to(tensor.dtype), tensor) else tensor.to(torch.float32)


def describe(q: QuantizedWeight) -> dict[str, Any]:
    """The metadata row of one linear."""
    return {
        "bits": q.bits,
        "group_size": q.group_size,
        "k": q.k,
        "hadamard": q.hadamard,
        "activation": None if q.activation is None else dict(q.activation._asdict()),
    }


def metadata(
    rows: Mapping[str, Mapping[str, Any]], method: str, *, rank: int = 0, base_sha256: str | None = None
) -> dict[str, Any]:
    """The file's metadata from the rows of `describe`, in the order of the file; bits and group are the commonest."""
    bits = Counter(int(row["bits"]) for row in rows.values()).most_common(1)
    group = Counter(int(row["group_size"]) for row in rows.values()).most_common(1)
    return {
        "version": VERSION,
        "method": method,
        "bits": bits[0][0] if bits else None,
        "group_size": group[0][0] if group else None,
        "rank": rank,
        "hadamard": max((int(row["hadamard"]) for row in rows.values()), default=0),
        "base_sha256": base_sha256,
        "linears": {prefix: dict(row) for prefix, row in rows.items()},
    }


def config(scheme: Scheme, ignored: Sequence[str]) -> dict[str, Any]:
    """``quantization_config`` for config.json. The decisive rows are in the file's metadata."""
    if scheme.bits not in (4, 8):
        raise refuse("lowbit", "bits", scheme.bits, "4, 8")
    return {
        "quant_method": "lowbit",
        "version": VERSION,
        "bits": scheme.bits,
        "group_size": scheme.group_size,
        "activation": dict(scheme.activation._asdict()),
        "ignore": list(ignored),
    }
