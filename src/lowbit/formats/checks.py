"""What every importer asks of a tensor before it touches a weight, and the one wording of a refusal."""

from __future__ import annotations

import warnings
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from ..types import FormatError, QuantizedWeight
from .bitpack import middle, to_signed, to_unsigned

SCALE_DTYPES = (torch.float16, torch.bfloat16, torch.float32)


def refuse(where: str, field: str, found: object, accepted: str) -> FormatError:
    """The exception to raise: layer or file, field, the value found, what is accepted."""
    return FormatError(f"{where}: {field}: found {found}, accepted is {accepted}")


def warn(where: str, text: str) -> str:
    """Warn about a layer and return the same text for its notes."""
    warnings.warn(f"{where}: {text}", stacklevel=3)
    return text


def join(prefix: str, suffix: str) -> str:
    """The name of a layer's tensor; an empty prefix is the root module."""
    return f"{prefix}.{suffix}" if prefix else suffix


def require(tensors: Mapping[str, Tensor], prefix: str, suffixes: Sequence[str]) -> list[Tensor]:
    """The layer's tensors, or a refusal that lists every one that is missing."""
    missing = [join(prefix, suffix) for suffix in suffixes if join(prefix, suffix) not in tensors]
    if missing:
        raise refuse(prefix, "tensors", f"no {', '.join(missing)}", f"a layer with {', '.join(suffixes)}")
    return [tensors[join(prefix, suffix)] for suffix in suffixes]


def optional(tensors: Mapping[str, Tensor], prefix: str, suffix: str) -> Tensor | None:
    name = join(prefix, suffix)
    return tensors[name] if name in tensors else None


def shaped(where: str, field: str, tensor: Tensor, want: Sequence[int | None], meaning: str = "") -> tuple[int, ...]:
    """The shape of a tensor if it is ``want`` (None is any size)."""
    found = tuple(tensor.shape)
    if len(found) != len(want) or any(w is not None and w != f for f, w in zip(found, want, strict=True)):
        shown = ", ".join("any" if w is None else str(w) for w in want)
        raise refuse(where, field, f"shape {list(found)}", f"[{shown}]{' ' + meaning if meaning else ''}")
    return found


def typed(where: str, field: str, tensor: Tensor, want: Sequence[torch.dtype]) -> Tensor:
    """The tensor if its dtype is one of ``want``."""
    if tensor.dtype not in want:
        raise refuse(where, field, short(tensor.dtype), ", ".join(short(dtype) for dtype in want))
    return tensor


def short(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def finite(where: str, field: str, tensor: Tensor) -> Tensor:
    """The tensor if it holds neither NaN nor Inf."""
    if not bool(torch.isfinite(tensor).all()):
        raise refuse(where, field, "NaN or Inf", "finite values")
    return tensor


def read_bias(tensors: Mapping[str, Tensor], prefix: str, n: int) -> Tensor | None:
    """``<prefix>.bias`` [N], where the file has one."""
    bias = optional(tensors, prefix, "bias")
    if bias is None:
        return None
    shaped(prefix, "bias", bias, (n,), "(N)")
    return finite(prefix, "bias", typed(prefix, "bias", bias, SCALE_DTYPES))


def integer(where: str, field: str, value: object, accepted: str) -> int:
    """An integer from JSON; a string of digits is taken too, as some writers put one there."""
    if isinstance(value, str) and value.strip().lstrip("-").isdigit():
        return int(value)
    if isinstance(value, int) and not isinstance(value, bool):
        return value
    raise refuse(where, field, repr(value), accepted)


def flag(where: str, field: str, value: object) -> bool | None:
    """A boolean from JSON, None where it is absent."""
    if value is None or isinstance(value, bool):
        return value
    raise refuse(where, field, repr(value), "true, false")


def mapping(where: str, field: str, value: object) -> Mapping[str, Any]:
    """An object from JSON; None is the empty one."""
    if value is None:
        return {}
    if isinstance(value, Mapping):
        return value
    raise refuse(where, field, repr(value), "an object")


def accepted_bits(where: str, value: object) -> int:
    """4 or 8."""
    bits = integer(where, "bits", value, "4, 8")
    if bits not in (4, 8):
        raise refuse(where, "bits", bits, "4, 8")
    return bits


def group_of(where: str, group_size: int, k: int) -> int:
    """The real group of a layer: -1 is one group over K, and a group larger than K is K."""
    if group_size == -1:
        return max(k, 1)
    if group_size < 1:
        raise refuse(where, "group_size", group_size, "-1, or a positive number")
    return min(group_size, max(k, 1))


def centred(codes: Tensor, zeros: Tensor, bits: int) -> tuple[Tensor, Tensor | None]:
    """Unsigned codes and zeros as they travel: int8 without zeros where every zero point is the middle."""
    if bool((zeros == middle(bits)).all()):
        return to_signed(codes, bits), None
    return codes, zeros


def uncentred(q: QuantizedWeight) -> tuple[Tensor, Tensor]:
    """The inverse of `centred`: uint8 codes [N, K] and uint8 zeros [N, G] of any weight."""
    if q.zeros is not None:
        return q.codes, q.zeros
    zeros = torch.full((q.n, q.groups), middle(q.bits), dtype=torch.uint8, device=q.codes.device)
    return to_unsigned(q.codes, q.bits), zeros


def weight_only(q: QuantizedWeight, prefix: str, name: str) -> None:
    """Refuse what a weight-only format has no tensor for, naming it."""
    parts = {
        "low_rank": q.low_rank is not None,
        "smooth": q.smooth is not None,
        "hadamard": q.hadamard != 0,
        "activation": q.activation is not None and q.activation.bits == 4,
    }
    held = [part for part, there in parts.items() if there]
    if held:
        raise refuse(
            prefix, ", ".join(held), f"in a layer to be written as {name}", "none; the lowbit format holds them"
        )


def half_scales(q: QuantizedWeight, prefix: str, name: str) -> Tensor:
    """The scales as float16, if that changes no value."""
    half = q.scales.to(torch.float16)
    if not torch.equal(half.float(), q.scales.float()):
        accepted = f"values that float16 holds exactly, as {name} stores them"
        raise refuse(prefix, "scales", f"{short(q.scales.dtype)} values that float16 would round", accepted)
    return half
