"""The state_dict of a layer: the tensors of a checkpoint (formats/lowbit.py), wherever the layer is and however it is packed."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from ..formats import lowbit
from ..formats.checks import join
from ..layouts import panels
from ..types import FormatError, QuantizedWeight

if TYPE_CHECKING:
    from .held import Held

_PACKED = ("packed", "on_device.weight", "on_float.codes")  # what a state_dict held before it was canonical


def names(layer: Held) -> tuple[str, ...]:
    """What the state_dict of this layer holds, without unpacking it."""
    if layer.bits == 16:
        return ("weight",) if layer.bias is None else ("weight", "bias")
    parts = {
        "qweight": True,
        "w_scales": True,
        "w_zeros": not layer.symmetric,
        "perm": layer.perm is not None,
        "smooth": layer.smooth is not None,
        "proj_down": layer.rank > 0,
        "proj_up": layer.rank > 0,
        "bias": layer.bias is not None,
    }
    return tuple(name for name, there in parts.items() if there)


def tensors(layer: Held) -> dict[str, Tensor]:
    """Unpacked for this call, on the layer's device, name -> tensor as formats/lowbit.py has them; float16 storage has
    ``weight`` float16 [N, K]. A scale of -0 is 0: the tiles of two levels have one zero only."""
    if layer.bits == 16:
        weight = panels.unpack_half(layer.packed, layer.out_features, layer.in_features)
        return {"weight": weight} | ({} if layer.bias is None else {"bias": layer.bias})
    q = layer.to_quantized()
    written = lowbit.write(q.with_(scales=q.scales + 0.0), "")
    return {name: written[name] for name in names(layer)}


def refuse_packed(prefix: str, found: Mapping[str, Tensor]) -> None:
    """FormatError for a state_dict that holds the bytes of a kernel, which say neither N, K nor for which machine."""
    for name in _PACKED:
        if name in found:
            raise FormatError(
                f"{prefix}{name}: found bytes packed for a kernel, as state_dict() gave them in early builds of lowbit 0.1; accepted "
                "is the canonical form (qweight, w_scales, ...): load the checkpoint that the layer came from"
            )


def tensor(name: str, value: object) -> Tensor:
    if not isinstance(value, Tensor):
        raise FormatError(f"{name}: found {type(value).__name__}, accepted is a tensor")
    return value.detach()


def plain(layer: Held, found: Mapping[str, Tensor], prefix: str) -> QuantizedWeight:
    """The value that those tensors mean, of the layer's own shape, bits, group and rank; FormatError names what is not."""
    where = prefix.rstrip(".")
    entry = {"bits": layer.bits, "group_size": layer.group_size, "k": layer.in_features, "hadamard": layer.hadamard}
    q = lowbit.read({join(where, name): t for name, t in found.items()}, where, {"linears": {where: entry}})
    rank = 0 if q.low_rank is None else q.low_rank.down.shape[1]
    for name, value, want in (("qweight", q.n, layer.out_features), ("proj_down", rank, layer.rank)):
        if value != want:
            what = "rows" if name == "qweight" else "columns"
            raise FormatError(f"{prefix}{name}: found {value} {what}, accepted is {want}, as the layer has")
    return q


def half(layer: Held, found: Mapping[str, Tensor], prefix: str) -> tuple[Tensor, Tensor | None]:
    """(weight float16 [N, K], bias) of float16 storage."""
    weight, shape = found["weight"], (layer.out_features, layer.in_features)
    if tuple(weight.shape) != shape or not weight.is_floating_point():
        raise FormatError(
            f"{prefix}weight: found {str(weight.dtype)[6:]} {list(weight.shape)}, accepted is floating point {list(shape)}"
        )
    bias = found.get("bias")
    if bias is not None and tuple(bias.shape) != shape[:1]:
        raise FormatError(f"{prefix}bias: found shape {list(bias.shape)}, accepted is {list(shape[:1])}")
    if not bool(torch.isfinite(weight.half()).all()):
        raise FormatError(
            f"{prefix}weight: found {float(weight.abs().max())}, accepted with float16 storage is at most 65504"
        )
    return weight.half(), bias
