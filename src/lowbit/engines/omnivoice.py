"""OmniVoice's generation over the packed stack: ``accelerate`` patches one instance, ``restore`` undoes it.

Written for ``omnivoice`` 0.2.1 (Zhu et al., "OmniVoice", 2026) over transformers 5.3 and newer; reads the model's weights and
calls its own prompt, schedule and text code, so that the same seeds give the same tokens.
"""

from __future__ import annotations

import os
import threading
import warnings
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from types import MethodType
from typing import Any

import torch
from torch import Tensor

from lowbit.checkpoint import open_checkpoint
from lowbit.engines.graphs import BUCKETS, Graphs, Slot
from lowbit.engines.omnivoice_batch import Batch, Item, draw, home_of, items_of
from lowbit.engines.omnivoice_step import Board, Reveal, Score, Step
from lowbit.engines.packed import Backbone, Precision, linears_of
from lowbit.formats import detect, quantized_layers, read_layer
from lowbit.models.api import sha256_of
from lowbit.types import FormatError, QuantizedWeight

CHUNK_TOKENS = 8192
_KEY = "_lowbit_engine"
_ABSENT = object()
Weights = str | os.PathLike[str] | Mapping[str, QuantizedWeight]


def accelerate(
    model: Any,
    weights: Weights | None = None,
    precision: Precision = None,
    buckets: Sequence[int] | None = None,
    *,
    attention: str | None = None,
    batch: int = 1,
    graphs: bool = True,
    chunk_tokens: int | None = None,
    score: Score | None = None,
    reveal: Reveal | None = None,
    progress: bool = False,
) -> Any:
    """Let ``model.generate`` decode over the packed stack; returns the model. On CUDA every bucket is captured here.

    ``weights``: a lowbit checkpoint (directory or file) or {linear: QuantizedWeight}; None rounds the live weights where
    ``precision`` asks for integers. ``precision``: see ``packed.Backbone``; None is what the weights declare, and without
    weights the dtype of the model, which changes no token. ``buckets``: packed tokens; None is 128 .. 2304 on CUDA and no
    padding without graphs. ``batch``: utterances in one graph; more run without one. ``chunk_tokens``: packed tokens at a time
    of a long text's chunks, which are decoded together; 0 leaves them one after the other; None is 8192 on CUDA and 0 on
    a CPU. ``attention``, ``score``,
    ``reveal`` replace a part (packed_attention.ATTENTIONS, omnivoice_step).

    The weights stay the model's own: siblings become views of one tensor in float precisions. One call at a time.
    FormatError with the reason, and the model as it was, where anything does not fit.
    """
    if not any(kind.__name__ == "OmniVoice" for kind in type(model).__mro__):
        raise FormatError(f"model: found {type(model).__name__}, accepted is an OmniVoice (of the package omnivoice)")
    if _KEY in model.__dict__:
        raise FormatError("model: found accelerated already, accepted is to restore it first")
    for name, value, least in (("batch", batch, 1), ("chunk_tokens", chunk_tokens or 0, 0)):
        if value < least:
            raise FormatError(f"{name}: found {value}, accepted is at least {least}")
    stack = model.llm
    given = _weights(stack, weights)
    undo = ExitStack()
    try:
        backbone = Backbone(stack, precision, given, attention)
        undo.callback(backbone.close)
        if chunk_tokens is None:
            chunk_tokens = CHUNK_TOKENS if backbone.device.type == "cuda" else 0
        engine = Engine(model, backbone, buckets, batch, graphs, chunk_tokens, score, reveal, progress, undo)
        engine.patch()
    except BaseException as error:
        undo.close()
        if isinstance(error, torch.cuda.OutOfMemoryError):
            free = torch.cuda.mem_get_info(linears_device(stack))[0] / 2**30
            raise FormatError(
                f"memory: found {free:.1f} GiB free on {linears_device(stack)} after a failed try, accepted is more: "
                "fewer or smaller buckets, or an integer precision"
            ) from error
        raise
    return model


def restore(model: Any) -> Any:
    """The model as it was before ``accelerate``, bit by bit; returns it. Does nothing to one that is not accelerated."""
    engine = getattr(model, "__dict__", {}).get(_KEY)
    if engine is not None:
        engine.close()
    return model


def engine_of(model: Any) -> Engine:
    """The engine of an accelerated model. FormatError where there is none."""
    engine = getattr(model, "__dict__", {}).get(_KEY)
    if engine is None:
        raise FormatError("model: found no engine, accepted is a model that was accelerated")
    found: Engine = engine
    return found


class Engine:
    """What ``accelerate`` put on one model. ``stats`` says what ran, ``explain`` what runs."""

    def __init__(
        self,
        model: Any,
        backbone: Backbone,
        buckets: Sequence[int] | None,
        batch: int,
        graphs: bool,
        chunk_tokens: int,
        score: Score | None,
        reveal: Reveal | None,
        progress: bool,
        undo: ExitStack,
    ) -> None:
        self.model, self.backbone, self.batch, self.chunk_tokens = model, backbone, batch, chunk_tokens
        self.step = Step(model, backbone, score, reveal)
        self._undo, self._lock = undo, threading.RLock()
        self._plain = buckets is None and (backbone.device.type != "cuda" or not graphs)
        self._waiting: list[list[Item]] | None = None  # groups of chunks, while a long text is taken apart
        self.graphs: Graphs[Board] = Graphs(
            self.step, self._board, buckets=BUCKETS if buckets is None else buckets, device=backbone.device,
            watch=backbone.check, capture=graphs, progress=progress,
        )  # fmt: skip

    def patch(self) -> None:
        """Put the engine's methods before those of the model's class, on this instance alone."""
        methods: dict[str, Callable[..., Any]] = {"_generate_iterative": self._iterative}
        if self.chunk_tokens:
            methods["_generate_chunked"] = self._chunked
        for name, method in methods.items():
            self._set(name, MethodType(lambda _, *args, _call=method, **kwargs: _call(*args, **kwargs), self.model))
        self._set(_KEY, self)

    def _set(self, name: str, value: object) -> None:
        space = self.model.__dict__
        before = space.get(name, _ABSENT)

        def back() -> None:
            if before is _ABSENT:
                space.pop(name, None)
            else:
                space[name] = before

        self._undo.callback(back)
        space[name] = value

    def close(self) -> None:
        with self._lock:
            self._undo.close()
            self.graphs.slots.clear()

    def stats(self) -> dict[str, Any]:
        """How often each bucket (and the plain call) was taken, and how many graphs there are."""
        captured = sum(slot.captured for slot in self.graphs.slots.values())
        return {"taken": dict(self.graphs.counts), "captured": captured, "attention": self.backbone.attention}

    def explain(self) -> dict[str, str]:
        """{"layers.0.qkv": what runs there}."""
        return dict(self.backbone.kinds)

    def __reduce__(self) -> Any:
        raise TypeError("an accelerated model is a handle of this process: restore it before it is copied or pickled")

    # -- decoding ---------------------------------------------------------------------------------------------------

    @torch.inference_mode()
    def _iterative(self, task: Any, config: Any) -> list[Any]:
        """In the place of OmniVoice._generate_iterative: int64 [C, T] of every item."""
        with self._lock:
            items = items_of(self.model, task, config)
            independent = all(reference is not None for reference in task.ref_audio_tokens)
            if self._waiting is not None and independent and config.class_temperature <= 0:
                self._waiting.append(items)
                return [_Later(len(self._waiting) - 1, i) for i in range(len(items))]
            return self._decode([items], config, limit=None)

    @torch.inference_mode()
    def _chunked(self, task: Any, config: Any) -> list[list[Tensor]]:
        """In the place of OmniVoice._generate_chunked, which takes the text apart as ever; the chunks that do not wait for
        one another are then decoded together, with the noise that each would have had."""
        with self._lock:
            self._waiting = []
            try:
                chunks = type(self.model)._generate_chunked(self.model, task, config)
                groups = self._waiting
            finally:
                self._waiting = None
            done = self._decode(groups, config, limit=self.chunk_tokens) if groups else []
            starts = [sum(len(g) for g in groups[:i]) for i in range(len(groups))]
            return [[done[starts[c.group] + c.at] if isinstance(c, _Later) else c for c in row] for row in chunks]

    def _decode(self, groups: Sequence[Sequence[Item]], config: Any, limit: int | None) -> list[Tensor]:
        """Tokens of all items; ``groups`` is the order in which they draw noise, ``limit`` packed tokens at a time."""
        items = [item for group in groups for item in group]
        warm = config.position_temperature > 0 and config.class_temperature <= 0
        device = self.backbone.device
        drawn = draw(groups, config.num_step, device) if warm else []
        done: list[Tensor] = []
        for begin, end in _portions(items, limit):
            packed = Batch(self.model, items[begin:end], config.guidance_scale != 0)
            sampled = config.class_temperature > 0
            slot = self._slot(packed, plain=sampled or len(packed.items) > self.batch)
            packed.write(slot.buffers, self.backbone, config, self.step.mask_id)
            if sampled:
                self._sample(slot.buffers, packed, config)
            else:
                self._run(slot, packed, packed.noise(drawn[begin:end]) if warm else None)
            done += [slot.buffers.tokens[i, :, : item.frames].clone() for i, item in enumerate(packed.items)]
        return done

    def _run(self, slot: Slot[Board], packed: Batch, noise: Tensor | None) -> None:
        board, counts = slot.buffers, packed.schedule(self.backbone.device)
        for step in range(len(counts)):
            if not any(item.counts[step] for item in packed.items):
                continue  # nothing is revealed, so nothing depends on this step
            board.k[: len(packed.items)] = counts[step]
            if noise is not None:
                board.noise[: len(packed.items), :, : packed.frames] = noise[step]
            slot.run()

    def _sample(self, board: Board, packed: Batch, config: Any) -> None:
        """class_temperature > 0: tokens are drawn too, by the model's own code and in its order."""
        home = home_of(self.model)
        for step in range(config.num_step):
            logits = self.step.logits(board)  # [2, B, T, C, V]
            for i, item in enumerate(packed.items):
                if item.counts[step] <= 0:
                    continue
                cond, uncond = (side[i, : item.frames].transpose(0, 1)[None] for side in logits)
                pred, best = self.model._predict_tokens_with_scoring(cond, uncond, config)
                best = best - board.penalty
                if config.position_temperature > 0:
                    best = home._gumbel_sample(best, config.position_temperature)
                tokens = board.tokens[i, :, : item.frames]
                best = best[0].masked_fill(tokens != self.step.mask_id, -torch.inf)
                at = best.flatten().topk(item.counts[step]).indices
                flat = tokens.flatten()
                flat[at] = pred.flatten()[at]
                tokens.copy_(flat.view_as(tokens))

    def _slot(self, packed: Batch, plain: bool) -> Slot[Board]:
        if plain or self._plain:
            board = self.step.board(packed.m, len(packed.items), packed.frames, len(packed.ends) - 1)
            board.longest = max(b - a for a, b in zip(packed.ends, packed.ends[1:]))
            return self.graphs.lend(packed.m, board)
        return self.graphs.take(packed.size)

    def _board(self, size: int) -> Board:
        return self.step.board(size, self.batch, (size + 1) // 2, 2 * self.batch + 1)


class _Later:
    """Stands for the tokens of a chunk while a text is taken apart."""

    def __init__(self, group: int, at: int) -> None:
        self.group, self.at = group, at


def _portions(items: Sequence[Item], limit: int | None) -> list[tuple[int, int]]:
    """Ranges of items of at most ``limit`` packed tokens, each of at least one item."""
    found, begin, rows = [], 0, 0
    for i, item in enumerate(items):
        own = item.ids.shape[1] + item.frames
        if limit is not None and i > begin and rows + own > limit:
            found.append((begin, i))
            begin, rows = i, 0
        rows += own
    return [*found, (begin, len(items))]


# -- weights --------------------------------------------------------------------------------------------------------


def linears_device(stack: Any) -> torch.device:
    return next(iter(linears_of(stack).values())).weight.device


def _weights(stack: Any, weights: Weights | None) -> dict[str, QuantizedWeight]:
    """{"layers.0.self_attn.q_proj": weight} of a checkpoint or a mapping, whatever stands before "layers." in a name."""
    if weights is None:
        return {}
    if isinstance(weights, Mapping):
        return {_short(name): q for name, q in weights.items()}
    checkpoint = open_checkpoint(weights)
    settings = checkpoint.metadata or checkpoint.quantization or {}
    kind = detect(settings, checkpoint)
    if kind is None:
        raise FormatError(
            f"{os.fspath(weights)}: found no quantized linears, accepted is what `lowbit quantize` writes"
        )
    names = quantized_layers(checkpoint, kind, settings)
    base = settings.get("base_sha256") if kind == "lowbit" else None
    if base is None:
        warnings.warn(
            f"{os.fspath(weights)}: names no base weights, they were not compared with the model's", stacklevel=3
        )
    else:
        linears = linears_of(stack)
        have = {_short(name) for name in names}
        found = sha256_of(linear.weight for name, linear in linears.items() if name in have)
        if found != base:
            raise FormatError(
                f"{os.fspath(weights)}: base_sha256: found weights made from {base[:12]}…, accepted is {found[:12]}…, this "
                "model's: quantize this model, or load the one that was quantized"
            )
    return {_short(name): read_layer(checkpoint, name, kind, settings) for name in names}


def _short(name: str) -> str:
    return name[name.index("layers.") :] if "layers." in name and "audio_tokenizer" not in name else name
