"""Llama-like models at the speed of their kernels: one native call per token, or per chunk of a prompt.

Embedding, RMSNorm, rotation, key/value cache, attention, SiLU and residuals run in csrc/cpu/decoder.cpp between the
kernels of the quantized linears; Python only picks the token. A model that does not fit is refused with the reason.
"""

from __future__ import annotations

import weakref
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from lowbit import layouts, ops
from lowbit.checkpoint.residency import drop_clean_pages
from lowbit.engines.llama_parts import Parts, collect, refuses
from lowbit.layouts import pages
from lowbit.nn import QuantLinear
from lowbit.quantize import rtn
from lowbit.types import Activation, FormatError, Scheme

if TYPE_CHECKING:
    from lowbit.engines.decode import CausalLM

__all__ = ["CHUNK", "HEADS", "Decoder", "State", "native", "pack_head", "refuses"]

HEADS = ("w8a8", "float")
CHUNK = 128  # tokens of a prompt a call: their rows and one strip of weights stay in L2
_NONE = torch.empty(0)


def pack_head(head: nn.Linear) -> QuantLinear:
    """The output head in 8 bits with 8-bit activations, one scale per row and 64 columns (a row's side data takes 64
    bytes a group anyway). Rounded and packed some rows at a time; the float head stays as it is."""
    n, k = head.weight.shape
    group = next((g for g in (64, 32) if k % g == 0), k)
    scheme = Scheme("head", bits=8, group_size=group, symmetric=True, activation=Activation(8, "group"))
    step = 4096
    blocks = [layouts.pack(rtn(head.weight[at : at + step].detach(), scheme)) for at in range(0, n, step)]
    if len({block.shape[1:] for block in blocks}) > 1:  # float32 scales in some of them
        blocks = [layouts.pack(rtn(head.weight.detach(), scheme))]
    with torch.inference_mode(False), torch.no_grad():
        shape = (sum(block.shape[0] for block in blocks), *blocks[0].shape[1:])
        packed = torch.cat(blocks, out=pages.empty(shape, torch.uint8))
        return QuantLinear(
            packed, n, k, bits=8, group_size=group, symmetric=True, activation="group",
            bias=None if head.bias is None else head.bias.detach(),
        )  # fmt: skip


class Decoder:
    """A model as the native step reads it. Shares every tensor with the model but the 8-bit head, which is its own.

    ``limit`` is the most positions it can run (the sliding window of a model that has one), None for any number.
    Not picklable and not copyable: it is a handle of this process.
    """

    def __init__(self, parts: Parts, head: nn.Module, rotary: nn.Module, vocabulary: int) -> None:
        layers, heads, kv_heads, head_dim, intermediate = parts.sizes
        self.layers, self.kv_heads, self.head_dim, self.limit = layers, kv_heads, head_dim, parts.window
        self.hidden, self.vocabulary = parts.embedding.shape[1], vocabulary
        self.head = head
        self._rotary = rotary
        self._angles: tuple[Tensor, Tensor] | None = None
        native = isinstance(head, QuantLinear)
        tensors = [parts.embedding.detach().contiguous(), _float(parts.norm)]
        sizes = [layers, heads, kv_heads, head_dim, intermediate, int(native)]
        if isinstance(head, QuantLinear):
            _add(head, tensors, sizes)
        for norms, linears in parts.layers:
            tensors += [_NONE if norm is None else _float(norm) for norm in norms]
            for linear in linears:
                _add(linear, tensors, sizes)
        self.width = vocabulary if native else self.hidden  # of a row that a step gives
        self.number = ops.decoder_new(tensors, sizes, parts.eps, parts.scale)
        weakref.finalize(self, ops.decoder_free, self.number)

    @classmethod
    def from_model(cls, model: CausalLM, *, head: str = "w8a8") -> Decoder:
        """``head``: "w8a8" packs a float output head in 8 bits, "float" runs it as it is; a quantized one is used as
        it is. FormatError with the reason where the model does not fit (see ``refuses``)."""
        if head not in HEADS:
            raise FormatError(f"head: found {head!r}, accepted are {', '.join(HEADS)}")
        parts = collect(model)
        made = parts.head
        if head == "w8a8" and isinstance(made, nn.Linear):
            made = pack_head(made)
            if model.name_or_path:  # of an embedding that is mapped, only some rows are needed again
                drop_clean_pages(model.name_or_path)
        return cls(parts, made, parts.rotary, _rows(parts.head))

    def start(self, capacity: int = 256, cache_dtype: torch.dtype = torch.float32, chunk: int = CHUNK) -> State:
        """An empty cache for one sequence. It grows by itself; ``capacity`` saves the copies. ``cache_dtype``
        float32 or float16; ``chunk`` tokens of a prompt go into one native call."""
        return State(self, capacity, cache_dtype, chunk)

    def angles(self, positions: int) -> tuple[Tensor, Tensor]:
        """cos and sin, float32 [at least ``positions``, head_dim / 2]."""
        if self._angles is None or self._angles[0].shape[0] < positions:
            half = self.head_dim // 2
            where = torch.arange(positions).unsqueeze(0)
            both = self._rotary(torch.empty(1, dtype=torch.float32), where)
            cosines, sines = (t[0, :, :half].to(torch.float32).contiguous() for t in both)
            self._angles = cosines, sines
        return self._angles

    def finish(self, rows: Tensor) -> Tensor:
        """Logits of the rows that a step gave."""
        if isinstance(self.head, QuantLinear):
            return rows
        assert isinstance(self.head, nn.Linear)
        logits: Tensor = self.head(rows.to(self.head.weight.dtype)).float()
        return logits

    def __reduce__(self) -> Any:
        raise TypeError("a Decoder is a handle of this process; make one from the model where it is needed")


class State:
    """The cache of one sequence and what a step writes into. ``length`` positions are filled; set it lower to go back."""

    def __init__(self, decoder: Decoder, capacity: int, cache_dtype: torch.dtype, chunk: int) -> None:
        if cache_dtype not in (torch.float32, torch.float16):
            raise FormatError(f"cache_dtype: found {cache_dtype}, accepted are float32, float16")
        if chunk < 1:
            raise FormatError(f"chunk: found {chunk}, accepted is at least 1")
        self.decoder, self.chunk, self.length, self.capacity = decoder, chunk, 0, 0
        self._dtype = cache_dtype
        self._keys = self._values = torch.empty(0, dtype=cache_dtype)
        self._scratch, self._scratch_for = torch.empty(0, dtype=torch.uint8), (0, 0)
        self._row = torch.empty(1, decoder.width)
        self._reserve(max(capacity, 16))

    @torch.inference_mode()
    def feed(self, ids: Tensor | Sequence[int], keep: int = 1, isa: str = "") -> Tensor:
        """Append tokens (int64 [T], T ≥ 1) and return float32 logits [keep, vocabulary] of the last ``keep`` of them.

        With ``keep`` 1 the result may be a buffer that the next call overwrites. RuntimeError names a token outside
        the vocabulary; FormatError where the sequence grows past the decoder's ``limit``.
        """
        tokens = torch.as_tensor(ids, dtype=torch.long).reshape(-1)
        count = tokens.shape[0]
        if not 0 <= keep <= count or count == 0:
            raise FormatError(f"keep: found {keep} of {count} tokens, accepted is 0 .. their number, of at least 1")
        end = self.length + count
        if self.decoder.limit is not None and end > self.decoder.limit:
            raise FormatError(f"length: found {end}, accepted is at most {self.decoder.limit} (sliding window)")
        if end > self.capacity:
            self._reserve(max(end, 2 * self.capacity))
        wanted = (min(count, self.chunk), torch.get_num_threads())
        if wanted[0] > self._scratch_for[0] or wanted[1] != self._scratch_for[1]:
            wanted = (max(wanted[0], self._scratch_for[0]), wanted[1])
            self._scratch = torch.empty(ops.decoder_scratch(self.decoder.number, wanted[0]), dtype=torch.uint8)
            self._scratch_for = wanted
        out = self._row if keep == 1 else torch.empty(keep, self.decoder.width)
        for begin in range(0, count, self.chunk):
            part = tokens[begin : begin + self.chunk]
            stop = begin + part.shape[0]
            rows = out[max(begin - (count - keep), 0) : max(stop - (count - keep), 0)]
            ops.decoder_step(
                self.decoder.number, part, self.length, self._keys, self._values, self._cosines, self._sines,
                self._scratch, rows, isa,
            )  # fmt: skip
            self.length += part.shape[0]
        return self.decoder.finish(out)

    def cache_bytes(self) -> int:
        return (self._keys.numel() + self._values.numel()) * self._keys.element_size()

    @torch.inference_mode()
    def _reserve(self, positions: int) -> None:
        d = self.decoder
        capacity = -(-positions // 16) * 16
        # keys stand 16 positions side by side (csrc/cpu/decoder.h); zeros, for nothing unwritten may be NaN
        keys = torch.zeros(d.layers, d.kv_heads, capacity // 16, d.head_dim, 16, dtype=self._dtype)
        values = torch.zeros(d.layers, d.kv_heads, capacity, d.head_dim, dtype=self._dtype)
        if self.capacity:
            keys[:, :, : self.capacity // 16] = self._keys
            values[:, :, : self.capacity] = self._values
        self._keys, self._values, self.capacity = keys, values, capacity
        self._cosines, self._sines = d.angles(capacity)


def _rows(head: nn.Module) -> int:
    assert isinstance(head, (nn.Linear, QuantLinear))
    return head.out_features


def _float(tensor: Tensor) -> Tensor:
    return tensor.detach().to(torch.float32).contiguous()


def _add(linear: QuantLinear, tensors: list[Tensor], sizes: list[int]) -> None:
    side = (linear.bias, linear.perm, linear.smooth, linear.down, linear.up)
    tensors += [linear.packed, *(_NONE if t is None else t for t in side)]
    sizes += [linear.group_size, linear.bits, ops.ACTIVATIONS[linear.activation], linear.hadamard]


_made: weakref.WeakKeyDictionary[nn.Module, tuple[object, Decoder]] = weakref.WeakKeyDictionary()


def native(model: CausalLM, head: str = "w8a8") -> Decoder:
    """``Decoder.from_model``, made once and again only where a tensor of the model was replaced or written to."""
    parts = collect(model)
    settings = [(one.activation, one.hadamard) for _, linears in parts.layers for one in linears]
    state = [(id(t), t.data_ptr(), 0 if t.is_inference() else t._version) for t in parts.tensors()]
    mark: object = (head, settings, state)
    known = _made.get(model)
    if known is None or known[0] != mark:
        known = (mark, Decoder.from_model(model, head=head))
        _made[model] = known
    return known[1]
