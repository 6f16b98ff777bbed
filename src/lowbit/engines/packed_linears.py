"""The linears of a transformer layer as the packed engine runs them: siblings side by side, one product.

Every product has one signature: ``product(x, residual=None, norm=None, silu=False)``. What comes before the product
(silu(gate) * up; adding x to the residual stream, in place; RMS norm) is one launch with the quantizer where there is
a kernel for it, and plain torch elsewhere.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import NamedTuple, Protocol

import torch
from torch import Tensor, nn

from lowbit import ops, ops_cuda
from lowbit.cuda import DeviceLinear, FourBitLinear
from lowbit.engines.packed_siblings import fuse, in_turn, share, shared_by
from lowbit.layouts import mma_tiles
from lowbit.nn import QuantLinear
from lowbit.quantize import rtn
from lowbit.types import SCHEMES, Activation, FormatError, QuantizedWeight, Scheme

FLOATS = {"fp32": torch.float32, "fp16": torch.float16, "bf16": torch.bfloat16}
INTEGERS = {"w8a8": (8, 8), "w4a8": (4, 8), "w4a4": (4, 4)}  # bits of the weight, of the activations
PRECISIONS = (*FLOATS, *INTEGERS)


class Norm(NamedTuple):
    """An RMSNorm of the model: its weight in the model's dtype and in float32."""

    weight: Tensor
    wide: Tensor
    eps: float

    def __call__(self, x: Tensor) -> Tensor:
        """On the CPU in the very order of transformers' Qwen3RMSNorm; one fused launch on CUDA."""
        if x.is_cuda:
            return torch.nn.functional.rms_norm(x, (x.shape[-1],), self.weight, self.eps)
        wide = x.float()
        wide = wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + self.eps)
        return self.weight * wide.to(x.dtype)


class Product(Protocol):
    kind: str  # what `Backbone.explain` says
    gated: bool  # its rows are gate and up, and it gives silu(gate) * up

    def __call__(
        self, x: Tensor, residual: Tensor | None = None, norm: Norm | None = None, silu: bool = False
    ) -> Tensor: ...


def before(x: Tensor, residual: Tensor | None, norm: Norm | None, silu: bool) -> Tensor:
    """What comes before a product, in torch."""
    if silu:
        gate, up = x.chunk(2, -1)
        x = torch.nn.functional.silu(gate) * up
    if residual is not None:
        x = residual.add_(x)
    return x if norm is None else norm(x)


def before_integers(x: Tensor, residual: Tensor | None, norm: Norm | None, silu: bool) -> Tensor:
    """The same by our own operators, where x is float32 on a CPU: one pass each, other last bits than torch's. Not before
    a float product, which owes stock its bits."""
    wide = x.device.type == "cpu" and x.dtype == torch.float32 and x.dim() == 2 and x.is_contiguous()
    if not wide or x.shape[1] % (32 if silu else 16):
        return before(x, residual, norm, silu)
    if silu:
        x = ops.silu_mul(x)
    if norm is None or x.shape[1] % 16:
        return before(x, residual, norm, False)
    return (
        ops.add_norm(x, None, norm.wide, norm.eps)
        if residual is None
        else ops.add_norm(residual, x, norm.wide, norm.eps)
    )


class FloatProduct:
    """weight [N, K] in the model's dtype."""

    gated = False

    def __init__(self, weight: Tensor, bias: Tensor | None) -> None:
        self.weight, self.bias, self.kind = weight, bias, str(weight.dtype).removeprefix("torch.")

    def __call__(
        self, x: Tensor, residual: Tensor | None = None, norm: Norm | None = None, silu: bool = False
    ) -> Tensor:
        return torch.nn.functional.linear(before(x, residual, norm, silu), self.weight, self.bias)


class LayerProduct:
    """A QuantLinear: every CPU tier, and on CUDA what the tiles do not take."""

    gated = False

    def __init__(self, layer: QuantLinear, why: str | None = None) -> None:
        self.layer, self.why = layer, why
        kernel = "" if layer.choice is None else layer.choice.kernel.name
        self.kind = f"{kernel} w{layer.bits}, activations {layer.activation or 'float'}" + (f" ({why})" if why else "")

    def __call__(
        self, x: Tensor, residual: Tensor | None = None, norm: Norm | None = None, silu: bool = False
    ) -> Tensor:
        return self.layer.compute(before_integers(x, residual, norm, silu))


class TileProduct:
    """Two launches on CUDA: everything before the product with the quantizer, then the product. 8-bit activations."""

    def __init__(self, q: QuantizedWeight, gated: bool = False) -> None:
        self.layer, self.gated = DeviceLinear(in_turn(q) if gated else q, gated), gated
        self.kind = f"cuda_tiles w{q.bits}, activations int8 a row" + (", then silu(gate) * up" if gated else "")

    def __call__(
        self, x: Tensor, residual: Tensor | None = None, norm: Norm | None = None, silu: bool = False
    ) -> Tensor:
        return self.layer.fused(
            x, residual, None if norm is None else norm.wide, 0.0 if norm is None else norm.eps, silu
        )


class Int4Product:
    """The same with 4-bit activations on INT4 tensor cores."""

    gated = False

    def __init__(self, q: QuantizedWeight) -> None:
        self.layer = FourBitLinear(q, 1.0 if q.activation is None else q.activation.clip)
        self.kind = "cuda_int4 w4, activations int4 a group of 64"

    def __call__(
        self, x: Tensor, residual: Tensor | None = None, norm: Norm | None = None, silu: bool = False
    ) -> Tensor:
        return self.layer.fused(
            x, residual, None if norm is None else norm.wide, 0.0 if norm is None else norm.eps, silu
        )


class SideBySide:
    """Siblings that cannot be one weight: what comes before runs once, the outputs are laid side by side."""

    gated = False

    def __init__(self, products: Sequence[Product], why: str) -> None:
        self.products = list(products)
        self._before = before if any(map(is_float, products)) else before_integers
        self.kind = f"{' | '.join(product.kind for product in products)} ({why})"

    def __call__(
        self, x: Tensor, residual: Tensor | None = None, norm: Norm | None = None, silu: bool = False
    ) -> Tensor:
        inside = self._before(x, residual, norm, silu)
        return torch.cat([product(inside) for product in self.products], -1)


def is_float(product: Product) -> bool:
    """Whether some of a product multiplies the model's own weights."""
    return isinstance(product, FloatProduct) or (
        isinstance(product, SideBySide) and any(map(is_float, product.products))
    )


# -- from weights ---------------------------------------------------------------------------------------------------


def nearest(linear: nn.Linear, precision: str) -> QuantizedWeight:
    """Round a live weight to nearest as its device wants it: on CUDA signed codes with two-level scales (w4) and one int8
    scale a row of x; on the CPU groups of 64 with zero points, and one scale a group of x."""
    bits, _ = INTEGERS[precision]
    scheme: Scheme = SCHEMES["w8a8" if bits == 8 else "w4a8"]
    weight = linear.weight.detach()
    if bits == 4 and weight.is_cuda:
        q = rtn(weight, Scheme("w4a8", symmetric=True, activation=Activation(8, "token")), "two-level")
    else:
        q = rtn(weight, scheme)
    return q.with_(bias=None if linear.bias is None else linear.bias.detach())


def integer_product(q: QuantizedWeight, precision: str, gate: bool = False) -> Product:
    """The fastest product of a weight on its device in ``precision`` (w8a8, w4a8, w4a4); of gate and up with silu(gate) *
    up behind it where ``gate`` and the chip's GEMM can.

    w4a4 runs 4-bit activations where the chip multiplies 4-bit numbers by itself, and 8-bit ones elsewhere.
    """
    device, why = q.codes.device, off_tiles(q, q.codes.device)
    if device.type == "cuda" and why is None:
        four = INTEGERS[precision][1] == 4 and q.bits == 4 and q.k % 64 == 0 and ops_cuda.has_int4(device)
        return Int4Product(q) if four else TileProduct(q, gate and q.n % 16 == 0 and ops_cuda.gates(device))
    return LayerProduct(QuantLinear.from_quantized(q), why)


def off_tiles(q: QuantizedWeight, device: torch.device) -> str | None:
    """Why a weight cannot run the integer tiles of a CUDA device and takes the float path; None where nothing is lost."""
    return mma_tiles.refuses(q) if device.type == "cuda" else None


def reasons(product: Product) -> list[str]:
    """What ``off_tiles`` said of a product, or of each of its siblings."""
    if isinstance(product, SideBySide):
        return list(dict.fromkeys(why for one in product.products for why in reasons(one)))
    return [product.why] if isinstance(product, LayerProduct) and product.why is not None else []


def product_of(
    linears: Mapping[str, nn.Linear],
    precisions: Mapping[str, str],
    weights: Mapping[str, QuantizedWeight],
    gate: bool = False,
) -> tuple[Product, list[Tensor]]:
    """The product of sibling linears {name: linear}, each with a precision; and the parameters that now share memory.
    ``gate``: they are gate and up, see ``integer_product``."""
    chosen = {precisions[name] for name in linears}
    shared: list[Tensor] = []
    if len(chosen) > 1:
        parts = [product_of({name: linear}, precisions, weights)[0] for name, linear in linears.items()]
        return SideBySide(parts, "their precision differs"), shared
    precision = chosen.pop()
    if precision in FLOATS:
        biases = [linear.bias for linear in linears.values()]
        if any(b is not None for b in biases):  # a copy: small, and of those that have none zeros
            bias = torch.cat([one.weight.new_zeros(len(one.weight)) if one.bias is None else one.bias.detach()
                              for one in linears.values()])  # fmt: skip
        else:
            bias = None
        shared = [linear.weight for linear in linears.values()]
        known = shared_by(shared)
        return (FloatProduct(share(shared), bias), shared) if known is None else (FloatProduct(known, bias), [])
    values = [_value(name, linear, precision, weights) for name, linear in linears.items()]
    joined = fuse(values)
    if isinstance(joined, QuantizedWeight):
        return integer_product(joined, precision, gate), shared
    return SideBySide([integer_product(q, precision) for q in values], joined), shared


def _value(name: str, linear: nn.Linear, precision: str, weights: Mapping[str, QuantizedWeight]) -> QuantizedWeight:
    q = weights.get(name)
    if q is None:
        return nearest(linear, precision)
    if (q.n, q.k) != (linear.out_features, linear.in_features):
        raise FormatError(f"{name}: found shape {[q.n, q.k]}, accepted is {[linear.out_features, linear.in_features]}")
    if q.bits != INTEGERS[precision][0]:
        raise FormatError(f"{name}: found {q.bits}-bit codes, accepted with precision {precision!r} are "
                          f"{INTEGERS[precision][0]} bits")  # fmt: skip
    q.check_values(name)
    return q.to(linear.weight.device)
