"""What an engine's precision does to the tokens: against the reference engine at equal seeds, and at equal inputs.

Tokens of whole utterances part for good after one near-tie, so their agreement says little; the divergence of the guided
distributions at the slots that the reference reveals next, on the reference's own boards, is the figure to look at.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from lowbit.bench.rtf_set import Sample
from lowbit.engines.omnivoice import Engine
from lowbit.engines.omnivoice_batch import Batch, draw, home_of, items_of
from lowbit.engines.omnivoice_step import Board
from lowbit.models.omnivoice_quantize import moments


class Quality(NamedTuple):
    """Means over revealed slots: nats of KL (reference, engine), and how often the likeliest token is the same."""

    kl: float
    top1: float
    slots: int


class Path(NamedTuple):
    """What the reference did: its boards before some steps, the slots revealed there, and its guided log probabilities."""

    task: Any
    config: Any
    tokens: list[Tensor]  # int64 [C, T] each
    revealed: list[Tensor]  # bool [C, T]
    logs: list[Tensor]  # float32 [R, V] of the revealed slots


def agreement(ours: Sequence[Tensor], reference: Sequence[Tensor]) -> float:
    """Share of equal tokens of two runs [C, T] a chunk."""
    same = sum(int((a == b).sum()) for a, b in zip(ours, reference, strict=True))
    return same / max(1, sum(t.numel() for t in reference))


@torch.inference_mode()
def path_of(engine: Engine, sample: Sample, prompt: Any, steps: int, seed: int) -> Path:
    """Decode a sample by the reference engine, without a graph, and keep its boards at the first, the last and three steps
    between."""
    model = engine.model
    task = model._preprocess_all(
        text=sample.line.text, language=sample.line.language, voice_clone_prompt=prompt, duration=sample.seconds
    )
    config = home_of(model).OmniVoiceGenerationConfig(num_step=steps)
    items = items_of(model, task, config)
    board, packed = _board(engine, items, config)
    torch.manual_seed(seed)
    noise = packed.noise(draw([items], steps, engine.backbone.device))
    path = Path(task, config, [], [], [])
    for step, count in enumerate(items[0].counts):
        before = board.tokens[0].clone()
        board.k[0] = count
        board.noise.copy_(noise[step])
        logits = engine.step.logits(board)[:, 0] if step in moments(steps) else None
        engine.step(board)
        revealed = board.tokens[0] != before
        if logits is not None and bool(revealed.any()):
            path.tokens.append(before)
            path.revealed.append(revealed)
            path.logs.append(_guided(logits.transpose(1, 2), revealed, config))
    return path


@torch.inference_mode()
def of_engine(engine: Engine, path: Path) -> Quality:
    """An engine of ours on the reference's boards."""
    items = items_of(engine.model, path.task, path.config)
    board, _ = _board(engine, items, path.config)
    logs = []
    for tokens, revealed in zip(path.tokens, path.revealed, strict=True):
        board.tokens[0] = tokens
        logits = engine.step.logits(board)[:, 0]
        logs.append(_guided(logits.transpose(1, 2), revealed, path.config))
    return _compare(path, logs)


@torch.inference_mode()
def of_stock(model: Any, path: Path) -> Quality:
    """Stock's own loop, with the reference's boards put before each of its forwards."""
    call, logs = model.forward, list[Tensor]()
    frames = path.tokens[0].shape[1]

    def forward(input_ids: Tensor, **more: Any) -> Any:
        at, length = len(logs), input_ids.shape[2]
        ids = input_ids.clone()
        ids[0, :, length - frames :] = ids[1, :, :frames] = path.tokens[at]
        out = call(input_ids=ids, **more)
        both = torch.stack([out.logits[0, :, length - frames :], out.logits[1, :, :frames]]).float()
        logs.append(_guided(both, path.revealed[at], path.config))
        return out

    before = model.__dict__.get("forward")
    model.__dict__["forward"] = forward
    try:
        config = type(path.config)(**{**vars(path.config), "num_step": len(path.tokens)})
        type(model)._generate_iterative(model, path.task, config)
    finally:
        if before is None:
            del model.__dict__["forward"]
        else:
            model.__dict__["forward"] = before
    return _compare(path, logs)


def _board(engine: Engine, items: Sequence[Any], config: Any) -> tuple[Board, Batch]:
    packed = Batch(engine.model, items, config.guidance_scale != 0)
    board = engine.step.board(packed.m, 1, packed.frames, len(packed.ends) - 1)
    board.longest = max(b - a for a, b in zip(packed.ends, packed.ends[1:]))
    packed.write(board, engine.backbone, config, engine.step.mask_id)
    return board, packed


def _guided(logits: Tensor, revealed: Tensor, config: Any) -> Tensor:
    """Log probabilities under guidance [R, V] of the revealed slots, from float32 [2, C, T, V]."""
    cond, uncond = (side[revealed] for side in logits)
    return torch.log_softmax(cond + config.guidance_scale * (cond - uncond), -1)


def _compare(path: Path, logs: Sequence[Tensor]) -> Quality:
    kl = same = slots = 0.0
    for want, got in zip(path.logs, logs, strict=True):
        wide = want.double()
        kl += max(0.0, float((wide.exp() * (wide - got.double())).sum()))
        same += float((want.argmax(-1) == got.argmax(-1)).sum())
        slots += len(want)
    return Quality(kl / slots, same / slots, int(slots))
