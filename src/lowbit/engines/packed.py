"""A Qwen3-shaped stack over a packed batch: segments one after the other, no padding, everyone in a segment sees everyone.

    x [M, H] ─┬─ residual ────────────┬───────────────┬─── next layer
              └ norm ─ qkv ─ norm_rope ─ attention ─ o ┴ norm ─ gate_up ─ silu·mul ─ down ┘

Per layer that is four products, the norm and rotation of queries and keys, and attention (packed_attention.py). On a CUDA device with
integer weights adding, norm, silu·mul and rounding are inside the products and their quantizers (packed_linears.py): ten launches,
nine where attention rounds its rows for o (``joined``).
Nothing in a forward waits for the device, so it can be captured in a CUDA graph.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from lowbit import ops, ops_cuda
from lowbit.cuda import FEW, DeviceLinear
from lowbit.engines.packed_attention import ATTENTIONS, Spans, choose
from lowbit.engines.packed_linears import FLOATS, Norm, Product, TileProduct, is_float, product_of, reasons
from lowbit.engines.packed_siblings import unshare
from lowbit.engines.packed_stack import GROUPS, Precision, linears_of, resolve
from lowbit.types import FormatError, QuantizedWeight


class Rotation(NamedTuple):
    """Angles of M packed rows: float32 [M, D / 2] each."""

    cosines: Tensor
    sines: Tensor


class _Layer(NamedTuple):
    input_norm: Norm
    qkv: Product
    q_norm: Norm | None
    k_norm: Norm | None
    o: Product
    post_norm: Norm
    gate_up: Product
    down: Product
    scale: float
    at_once: bool  # norm, rotation and attention are one operator
    joined: DeviceLinear | None  # o, where attention can round its rows


class Watch(NamedTuple):
    """A tensor that the engine reads or has copied: where it is looked up, and what it was then."""

    name: str
    holder: dict[str, Any]
    key: str
    pointer: int
    version: int | None  # None where writing into it is seen at once

    def changed(self) -> bool:
        now = self.holder[self.key]
        return now.data_ptr() != self.pointer or (self.version is not None and _version(now) != self.version)


def _version(tensor: Tensor) -> int:
    return 0 if tensor.is_inference() else tensor._version


class Backbone:
    """The layers of ``stack`` (transformers' Qwen3Model, or one shaped like it) in some precision.

    ``precision``: one of fp32, fp16, bf16 (the dtype of the model), w8a8, w4a8, w4a4 for every linear, or a mapping from
    patterns of linear names ("layers.0.*", "*.down_proj") to them, of which the last that fits counts; None is the
    weight's own where ``weights`` {"layers.0.self_attn.q_proj": QuantizedWeight} has one and the model's dtype elsewhere.
    Weights that are not in ``weights`` are rounded to nearest. ``attention`` forces a row of ATTENTIONS. ``after_layer`` is
    called with the number of each layer once its products are made. ``joined``: whether attention rounds its rows for o in its
    own launch where ``ops_cuda.joins`` and a ``plain`` o allow, and there are too many for the GEMV; it gives the same bits.
    ``kinds`` says where.

    Float weights of siblings become views of one tensor until ``close``; the stack itself stays usable throughout.
    FormatError names the first thing that does not fit, before anything is changed.
    """

    def __init__(
        self,
        stack: Any,
        precision: Precision = None,
        weights: Mapping[str, QuantizedWeight] | None = None,
        attention: str | None = None,
        *,
        after_layer: Callable[[int], None] | None = None,
        joined: bool = True,
    ) -> None:
        linears = linears_of(stack)
        config = stack.config
        first = next(iter(linears.values())).weight
        self.device, self.dtype = first.device, first.dtype
        attn = stack.layers[0].self_attn
        self.head_dim = int(attn.head_dim)
        self.heads = linears["layers.0.self_attn.q_proj"].out_features // self.head_dim
        self.kv_heads = linears["layers.0.self_attn.k_proj"].out_features // self.head_dim
        self.hidden = int(first.shape[1])
        weights = weights or {}
        for name in weights:
            if name not in linears:
                raise FormatError(
                    f"weights: found {name!r}, accepted are linears of the model (layers.0.self_attn.q_proj)"
                )
        precisions = resolve(precision, linears, weights, self.device)
        # Refuses a word that is no way.
        way = choose(self.device, self.dtype, self.head_dim, FEW + 1, attention)
        self._joins = joined and way == "ours" and ops_cuda.joins(self.device, self.heads, self.kv_heads)
        self._forced = attention
        self.kernel_rope = self.device.type == "cuda" and self.head_dim == 128 and ops_cuda.refuses(self.device) is None
        self.precisions = precisions
        self.kinds: dict[str, str] = {}
        self.in_float: dict[str, str] = {}  # products of integer weights that the device's tiles do not take, and why
        self._undo = ExitStack()
        self._rotary: Any = stack.rotary_emb
        self._table: Rotation | None = None
        self.layers: list[_Layer] = []
        with torch.inference_mode(False), torch.no_grad():
            try:
                self.norm = _norm(stack.norm)
                for index, block in enumerate(stack.layers[: config.num_hidden_layers]):
                    self.layers.append(self._layer(index, block, linears, weights))
                    if after_layer is not None:
                        after_layer(index)
            except BaseException:
                self.close()
                raise
        self._stack, self._linears = stack, linears
        self.remember()

    def remember(self) -> None:
        """From now on, what ``check`` compares with is what is there now."""
        self.watched = list(self._watch(self._stack, self._linears))

    def close(self) -> None:
        """Give siblings their own memory back, with what is in them now."""
        with torch.inference_mode(False), torch.no_grad():
            self._undo.close()

    def _layer(
        self, index: int, block: Any, linears: Mapping[str, nn.Linear], weights: Mapping[str, QuantizedWeight]
    ) -> _Layer:
        made: dict[str, Product] = {}
        for group, names in GROUPS.items():
            members = {f"layers.{index}.{name}": linears[f"layers.{index}.{name}"] for name in names}
            made[group], shared = product_of(members, self.precisions, weights, group == "gate_up")
            self._undo.callback(unshare, shared)
            self.kinds[f"layers.{index}.{group}"] = made[group].kind
            if why := reasons(made[group]):
                self.in_float[f"layers.{index}.{group}"] = ", ".join(why)
        attn = block.self_attn
        q_norm, k_norm = (
            None if getattr(attn, n, None) is None else _norm(getattr(attn, n)) for n in ("q_norm", "k_norm")
        )
        ours = self.device.type == "cpu" and self.dtype == torch.float32 and self.head_dim % 16 == 0
        at_once = ours and self._forced is None and not is_float(made["qkv"])
        o = made["o"]
        rounded = o.layer if self._joins and isinstance(o, TileProduct) and o.layer.plain else None
        if rounded is not None:
            self.kinds[f"layers.{index}.o"] += f", from {FEW + 1} rows on rounded by attention"
        return _Layer(
            _norm(block.input_layernorm), made["qkv"], q_norm, k_norm, o, _norm(block.post_attention_layernorm),
            made["gate_up"], made["down"], float(attn.scaling), at_once, rounded,
        )  # fmt: skip

    def _watch(self, stack: Any, linears: Mapping[str, nn.Linear]) -> Iterator[Watch]:
        for name, module in stack.named_modules():
            if name == "embed_tokens":
                continue
            for key, tensor in module._parameters.items():
                if tensor is not None:
                    live = self.precisions.get(name) in FLOATS and key == "weight"
                    copied = (
                        not live if name in linears else self.device.type == "cuda" and tensor.dtype != torch.float32
                    )
                    yield Watch(
                        f"{name}.{key}",
                        module._parameters,
                        key,
                        tensor.data_ptr(),
                        _version(tensor) if copied else None,
                    )

    def check(self) -> None:
        """FormatError where the stack's weights were replaced, moved, or written to after they were quantized."""
        for row in self.watched:
            if row.changed():
                raise FormatError(
                    f"{row.name}: found other weights than those that were accelerated, accepted are the same ones: "
                    "restore the model and accelerate it again"
                )

    def angles(self, positions: Tensor) -> Rotation:
        """Cosines and sines of positions int64 [M]; the table grows by itself."""
        top = int(positions.max()) + 1 if positions.numel() else 1
        if self._table is None or len(self._table[0]) < top:
            with torch.inference_mode(False), torch.no_grad():
                rows = torch.arange(max(2048, 1 << (top - 1).bit_length()), device=self.device)[None]
                both = self._rotary(torch.empty(1, dtype=torch.float32, device=self.device), rows)
                cosines, sines = (t[0, :, : self.head_dim // 2].float().contiguous() for t in both)
                self._table = Rotation(cosines, sines)
        there = positions.to(self.device)
        return Rotation(self._table.cosines[there], self._table.sines[there])

    def attention(self, rows: int) -> str:
        """Which row of ``packed_attention.ATTENTIONS`` runs over so many packed rows; "ours" on a CPU is one operator with norm
        and rotation, in every layer whose q, k and v come of integers."""
        if all(layer.at_once for layer in self.layers):
            return "ours"
        return choose(self.device, self.dtype, self.head_dim, rows, self._forced)

    def __call__(self, x: Tensor, rotation: Rotation, spans: Spans, rows: Tensor | None = None) -> Tensor:
        """x [M, H] -> the stack's last hidden state [M, H], or of ``rows`` int64 [R] alone [R, H]. x stays as it is."""
        stream, added = x.clone(), None
        mix = self._mix(rotation, spans, len(x), x.dtype)
        y = stream
        for layer in self.layers:
            y = mix(layer.qkv(y, added, layer.input_norm), layer)
            y = layer.gate_up(y, stream, layer.post_norm)
            y = layer.down(y, silu=not layer.gate_up.gated)
            added = stream
        if rows is not None:
            stream, y = stream[rows], y[rows]
        return self.norm(stream if added is None else stream + y)

    def _mix(
        self, rotation: Rotation, spans: Spans, rows: int, dtype: torch.dtype
    ) -> Callable[[Tensor, _Layer], Tensor]:
        """What attention and o of a layer make of its qkv [M, (H + 2 G) D]: [M, H D], then [M, hidden]."""
        way = choose(self.device, self.dtype, self.head_dim, rows, self._forced)
        attend, rotate = ATTENTIONS[way](spans), self._rotate(rotation, dtype)
        joined = way == "ours" and rows > FEW

        def mix(qkv: Tensor, layer: _Layer) -> Tensor:
            if layer.at_once:
                q_norm, k_norm = (None if n is None else n.wide for n in (layer.q_norm, layer.k_norm))
                eps = 0.0 if layer.q_norm is None else layer.q_norm.eps
                y = ops.packed_attention(
                    qkv, q_norm, k_norm, rotation.cosines, rotation.sines, spans.bounds, self.heads, self.kv_heads, eps,
                    layer.scale,
                )  # fmt: skip
                return layer.o(y)
            q, k, v = rotate(qkv, layer)
            if joined and layer.joined is not None:
                return layer.joined.of_attention(q, k, v, spans.bounds, layer.scale)
            return layer.o(attend(q, k, v, layer.scale).flatten(1))

        return mix

    def _rotate(
        self, rotation: Rotation, dtype: torch.dtype
    ) -> Callable[[Tensor, _Layer], tuple[Tensor, Tensor, Tensor]]:
        heads, kv, width = self.heads, self.kv_heads, self.head_dim
        if not self.kernel_rope:
            cosines, sines = (torch.cat([t, t], -1).to(dtype)[:, None] for t in rotation)

        def split(qkv: Tensor) -> tuple[Tensor, Tensor, Tensor]:
            parts = qkv.view(len(qkv), -1, width)
            return parts[:, :heads], parts[:, heads : heads + kv], parts[:, heads + kv :]

        def by_kernel(qkv: Tensor, layer: _Layer) -> tuple[Tensor, Tensor, Tensor]:
            norms = [None if n is None else n.wide for n in (layer.q_norm, layer.k_norm)]
            eps = 0.0 if layer.q_norm is None else layer.q_norm.eps
            ops_cuda.norm_rope(qkv, norms[0], norms[1], rotation.cosines, rotation.sines, heads, kv, eps)
            return split(qkv)

        def in_torch(qkv: Tensor, layer: _Layer) -> tuple[Tensor, Tensor, Tensor]:
            q, k, v = split(qkv)
            q = q if layer.q_norm is None else layer.q_norm(q)
            k = k if layer.k_norm is None else layer.k_norm(k)
            return turned(q, cosines, sines), turned(k, cosines, sines), v

        return by_kernel if self.kernel_rope else in_torch


def turned(x: Tensor, cosines: Tensor, sines: Tensor) -> Tensor:
    """Rotary position: columns i and i + D / 2 of x [M, heads, D] by angles [M, 1, D]."""
    a, b = x.chunk(2, -1)
    return x * cosines + torch.cat([-b, a], -1) * sines


def _norm(module: Any) -> Norm:
    weight = module.weight.detach()
    return Norm(weight, weight.float(), float(module.variance_epsilon))
