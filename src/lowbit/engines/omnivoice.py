"""OmniVoice's generation over the packed stack: ``accelerate`` patches one instance, ``restore`` undoes it.

Written for ``omnivoice`` 0.2.1 (Zhu et al., "OmniVoice", 2026) over transformers 5.3 and newer; reads the model's weights and
calls its own prompt, schedule and text code, so that the same seeds give the same tokens.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from types import MethodType
from typing import Any

import torch
from torch import Tensor

from lowbit.engines.graphs import BUCKETS, Graphs, Slot
from lowbit.engines.omnivoice_audio import post_process
from lowbit.engines.omnivoice_batch import Batch, Item, Later, draw, home_of, items_of, portions
from lowbit.engines.omnivoice_codec import decode
from lowbit.engines.omnivoice_stages import Plan, Stages, backbones_of, explained, warn_of_floats
from lowbit.engines.omnivoice_step import Board, Reveal, Score, Step
from lowbit.engines.packed_stack import Precision
from lowbit.engines.packed_weights import Weights, read_weights
from lowbit.types import FormatError

CHUNK_TOKENS, CODEC_FRAMES = 8192, 1500
_KEY = "_lowbit_engine"
_ABSENT = object()


def accelerate(
    model: Any,
    weights: Weights | None = None,
    precision: Precision | Stages = None,
    buckets: Sequence[int] | str | None = None,
    *,
    attention: str | None = None,
    batch: int = 1,
    graphs: bool = True,
    chunk_tokens: int | None = None,
    codec_frames: int | None = None,
    trim: bool = True,
    score: Score | None = None,
    reveal: Reveal | None = None,
    free_originals: bool = False,
    progress: bool = False,
) -> Any:
    """Let ``model.generate`` decode over the packed stack; returns the model. On CUDA every bucket is captured here.

    ``weights``: a lowbit checkpoint (directory or file) or {linear: QuantizedWeight}; None rounds the live weights where
    ``precision`` asks for integers. ``precision``: see ``packed.Backbone``; None is what the weights declare, and without
    weights the dtype of the model, which changes no token; a list of (steps, precision) gives each decoding step its own, the
    last one's steps None for the rest: [(16, "fp16"), (None, "w4a8")]. ``buckets``: packed tokens; None is 128 .. 2304 on CUDA and no
    padding without graphs; "fine" has steps of 64 up to 1024 and of 128 up to 2304. ``batch``: utterances in one graph; more run without one. ``chunk_tokens``: packed tokens at a time
    of a long text's chunks, which are decoded together; 0 leaves them one after the other; None is 8192 on CUDA and 0 on
    a CPU. ``codec_frames``: frames of several items or chunks that the codec decodes at a time, 0 one item after the other,
    None 1500 on CUDA and 0 on a CPU. ``trim``: cut silence by our own code, to the same samples. ``attention``, ``score``,
    ``reveal`` replace a part (packed_attention.ATTENTIONS, omnivoice_step). ``free_originals``: weights that no step reads in
    float leave the device until ``restore`` brings them back (packed_originals).

    Else the weights stay the model's own: siblings become views of one tensor in float precisions. One call at a time.
    FormatError with the reason, and the model as it was, where anything does not fit. A warning where integer weights
    run in float because the CUDA device's integer tiles do not take them. Source: Zhu et al., "OmniVoice", 2026, for what is
    decoded; docs/omnivoice.md for how.
    """
    if not any(kind.__name__ == "OmniVoice" for kind in type(model).__mro__):
        raise FormatError(f"model: found {type(model).__name__}, accepted is an OmniVoice (of the package omnivoice)")
    if _KEY in model.__dict__:
        raise FormatError("model: found accelerated already, accepted is to restore it first")
    limits = (("batch", batch, 1), ("chunk_tokens", chunk_tokens or 0, 0), ("codec_frames", codec_frames or 0, 0))
    for name, value, least in limits:
        if value < least:
            raise FormatError(f"{name}: found {value}, accepted is at least {least}")
    plan = Plan(precision)
    given = read_weights(model.llm, weights)
    undo = ExitStack()
    with _memory(model.device, "fewer or smaller buckets, or an integer precision"), undo:
        backbones = backbones_of(model.llm, plan, given, attention, free_originals, undo)
        steps = [Step(model, backbone, score, reveal) for backbone in backbones]
        engine = Engine(model, plan, steps, undo, buckets=buckets, batch=batch, graphs=graphs, progress=progress)
        on_cuda = engine.backbone.device.type == "cuda"
        engine.chunk_tokens = CHUNK_TOKENS if chunk_tokens is None and on_cuda else chunk_tokens or 0
        engine.codec_frames = CODEC_FRAMES if codec_frames is None and on_cuda else codec_frames or 0
        engine.patch(trim)
        warn_of_floats(backbones)
        engine.keep(undo.pop_all())
    return model


def restore(model: Any) -> Any:
    """The model as it was before ``accelerate``, bit by bit; returns it. Does nothing to one that is not
    accelerated; nothing is refused."""
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
        plan: Plan,
        steps: Sequence[Step],
        undo: ExitStack,
        *,
        buckets: Sequence[int] | str | None,
        batch: int,
        graphs: bool,
        progress: bool,
    ) -> None:
        backbone = steps[0].backbone  # what is said of the first holds of all, but for products and their kinds
        self.model, self.plan, self.steps, self.batch = model, plan, list(steps), batch
        self.step, self.backbone = steps[0], backbone
        self.chunk_tokens = self.codec_frames = 0
        self._ahead: list[tuple[Tensor, Any]] = []  # tokens that were just made, and their audio once one was asked for
        self._undo, self._lock = undo, threading.RLock()
        self._plain = buckets is None and (backbone.device.type != "cuda" or not graphs)
        self._waiting: list[list[Item]] | None = None  # groups of chunks, while a long text is taken apart
        self.graphs: Graphs[Board] = Graphs(
            self.steps, self._board, buckets=BUCKETS if buckets is None else buckets, device=backbone.device,
            watch=self._check, capture=graphs, progress=progress,
        )  # fmt: skip

    def patch(self, trim: bool) -> None:
        """Put the engine's methods before those of the model's class, on this instance alone."""
        methods: dict[str, Callable[..., Any]] = {"_generate_iterative": self._iterative}
        if self.chunk_tokens:
            methods["_generate_chunked"] = self._chunked
        if self.codec_frames:
            methods["_decode_and_post_process"] = self._audio
        if trim:
            methods["_post_process_audio"] = self._post_process
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

    def keep(self, undo: ExitStack) -> None:
        """All went well: what ``close`` is to undo."""
        self._undo = undo

    def close(self) -> None:
        with self._lock:
            self._undo.close()
            self.graphs.slots.clear()

    def stats(self) -> dict[str, Any]:
        """How often each bucket (and the plain call) was taken, and how many graphs there are."""
        captured = sum(slot.captured for slot in self.graphs.slots.values())
        ways = {size: self.backbone.attention(size) for size in self.graphs.slots}
        return {"taken": dict(self.graphs.counts), "captured": captured, "attention": ways}

    def explain(self) -> dict[str, str]:
        """{"layers.0.qkv": what runs there}."""
        return explained(self.plan, [step.backbone for step in self.steps])

    def _check(self) -> None:
        for step in self.steps:
            step.backbone.check()

    def __reduce__(self) -> Any:
        raise TypeError("an accelerated model is a handle of this process: restore it before it is copied or pickled")

    # -- decoding ---------------------------------------------------------------------------------------------------

    @torch.inference_mode()
    def _iterative(self, task: Any, config: Any) -> list[Any]:
        """In the place of OmniVoice._generate_iterative: int64 [C, T] of every item."""
        with self._lock, _memory(self.backbone.device):
            self.plan.of(config.num_step)  # refuses before anything is drawn
            items = items_of(self.model, task, config)
            independent = all(reference is not None for reference in task.ref_audio_tokens)
            if self._waiting is not None and independent and config.class_temperature <= 0:
                self._waiting.append(items)
                return [Later(len(self._waiting) - 1, i) for i in range(len(items))]
            done = self._decode([items], config, limit=None)
            if self.codec_frames:
                self._ahead = [(tokens, None) for tokens in done]
            return done

    @torch.inference_mode()
    def _chunked(self, task: Any, config: Any) -> list[list[Tensor]]:
        """In the place of OmniVoice._generate_chunked, which takes the text apart as ever; the chunks that do not wait for
        one another are then decoded together, with the noise that each would have had."""
        with self._lock, _memory(self.backbone.device):
            self._waiting = []
            try:
                chunks = type(self.model)._generate_chunked(self.model, task, config)
                groups = self._waiting
            finally:
                self._waiting = None
            done = self._decode(groups, config, limit=self.chunk_tokens) if groups else []
            starts = [sum(len(g) for g in groups[:i]) for i in range(len(groups))]
            return [[done[starts[c.group] + c.at] if isinstance(c, Later) else c for c in row] for row in chunks]

    def _audio(self, tokens: Any, rms: float | None, gen_config: Any) -> Any:
        """In the place of OmniVoice._decode_and_post_process: chunks of one text, or what was generated together, through
        the codec at once."""
        with self._lock, _memory(self.backbone.device):
            codec, home = self.model.audio_tokenizer, home_of(self.model)
            if isinstance(tokens, list):
                wave = home.cross_fade_chunks(decode(codec, tokens, self.codec_frames), self.model.sampling_rate)
            else:
                if not any(tokens is known for known, _ in self._ahead):
                    self._ahead = [(tokens, None)]
                if self._ahead[0][1] is None:
                    codes = [known for known, _ in self._ahead]
                    self._ahead = list(zip(codes, decode(codec, codes, self.codec_frames), strict=True))
                at = next(i for i, (known, _) in enumerate(self._ahead) if tokens is known)
                wave = self._ahead.pop(at)[1]
            return self.model._post_process_audio(wave, ref_rms=rms, gen_config=gen_config).squeeze(0)

    def _post_process(self, generated_audio: Any, ref_rms: float | None, gen_config: Any) -> Any:
        """In the place of OmniVoice._post_process_audio."""
        return post_process(self.model, generated_audio, ref_rms, gen_config)

    def _decode(self, groups: Sequence[Sequence[Item]], config: Any, limit: int | None) -> list[Tensor]:
        """Tokens of all items; ``groups`` is the order in which they draw noise, ``limit`` packed tokens at a time."""
        items = [item for group in groups for item in group]
        warm = config.position_temperature > 0 and config.class_temperature <= 0
        device = self.backbone.device
        drawn = draw(groups, config.num_step, device) if warm else []
        done: list[Tensor] = []
        for begin, end in portions(items, limit):
            packed = Batch(self.model, items[begin:end], config.guidance_scale != 0)
            sampled = config.class_temperature > 0
            slot = self._slot(packed, plain=sampled or len(packed.items) > self.batch)
            packed.write(slot.buffers, self.backbone, config, self.step.mask_id)
            if sampled:
                self._sample(slot.buffers, packed, config)
            else:
                self._run(slot, packed, packed.noise(drawn[begin:end]) if warm else None, self.plan.of(config.num_step))
            done += [slot.buffers.tokens[i, :, : item.frames].clone() for i, item in enumerate(packed.items)]
        return done

    def _run(self, slot: Slot[Board], packed: Batch, noise: Tensor | None, stages: Sequence[int]) -> None:
        board, counts = slot.buffers, packed.schedule(self.backbone.device)
        for step in range(len(counts)):
            if not any(item.counts[step] for item in packed.items):
                continue  # nothing is revealed, so nothing depends on this step
            board.k[: len(packed.items)] = counts[step]
            if noise is not None:
                board.noise[: len(packed.items), :, : packed.frames] = noise[step]
            slot.run(stages[step])

    def _sample(self, board: Board, packed: Batch, config: Any) -> None:
        """class_temperature > 0: tokens are drawn too, by the model's own code and in its order."""
        home = home_of(self.model)
        for step, stage in enumerate(self.plan.of(config.num_step)):
            logits = self.steps[stage].logits(board)  # [2, B, T, C, V]
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


@contextmanager
def _memory(
    device: torch.device, advice: str = "shorter texts, fewer at once, or a smaller chunk_tokens"
) -> Iterator[None]:
    """A device that runs out of memory is told of in one line, once what was tried is undone."""
    try:
        yield
    except torch.cuda.OutOfMemoryError as error:
        free = torch.cuda.mem_get_info(device)[0] / 2**30
        raise FormatError(
            f"memory: found {free:.1f} GiB free on {device} after a failed try, accepted is more: {advice}"
        ) from error
