"""One decoding step of OmniVoice over static buffers: embed, stack, heads, score, reveal.

    tokens [B, C, T] ─ embed ─► x [M, H] ─ stack ─► hidden, rows of targets only ─ heads ─► logits
           ▲                                                                                  │
           └──────── reveal: the k best of the still masked ◄── noise, penalty ◄── score ◄────┘

B items, C = 8 codebooks, T target frames (of the longest item), M packed rows: the conditional segment of each item and
its unconditional one, which is the targets alone at positions 0 .. T - 1. Only target rows of x change from step to step.
``score`` and ``reveal`` are the two seams where a kernel may stand.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from lowbit import ops_cuda
from lowbit.engines.packed import Backbone, Rotation
from lowbit.engines.packed_attention import Spans

Score = Callable[[Tensor, Tensor, Tensor, int], tuple[Tensor, Tensor]]
Reveal = Callable[[Tensor, Tensor, Tensor, Tensor], None]


def score(cond: Tensor, uncond: Tensor, guidance: Tensor, mask_id: int) -> tuple[Tensor, Tensor]:
    """Likeliest token [...] and its log probability under guidance, from raw logits [..., V] float32.

    z = c + g (c - u); the token is argmax z without the mask class, the score max z - logsumexp z with it. Equal to three
    log_softmax in exact arithmetic: what they subtract is the same for every class of a row.
    """
    z = cond + guidance * (cond - uncond)
    best, token = z[..., :mask_id].max(-1)
    return token, best - z.logsumexp(-1)


def score_as_stock(cond: Tensor, uncond: Tensor, guidance: Tensor, mask_id: int) -> tuple[Tensor, Tensor]:
    """The same with the roundings of OmniVoice's own code, for a CPU, where it costs nothing beside the stack."""
    c = torch.log_softmax(cond, -1)
    if bool(guidance != 0):
        c = torch.log_softmax(c + guidance * (c - torch.log_softmax(uncond, -1)), -1)
    c[..., mask_id] = -torch.inf
    return c.argmax(-1), c.max(-1).values


def reveal(tokens: Tensor, pred: Tensor, score: Tensor, k: Tensor) -> None:
    """Write the ``k`` [B] best-scored slots of every row of tokens [B, S] from pred [B, S], in place.

    score [B, S] is -inf where nothing may be written. k is read on the device: nothing waits for it.
    """
    order = score.argsort(dim=1, descending=True)
    chosen = torch.arange(order.shape[1], device=k.device) < k[:, None]
    here = torch.zeros_like(chosen).scatter_(1, order, chosen)
    tokens.copy_(torch.where(here, pred, tokens))


SCORES: dict[str, Score] = {"cpu": score_as_stock}  # of other devices: score
REVEALS: dict[str, Reveal] = {}  # of other devices: reveal


@dataclass
class Board:
    """Everything that a step reads and writes, for B items, T frames and M packed rows."""

    x: Tensor  # [M + 1, H]; row M is where what belongs nowhere is written
    rotation: Rotation  # [M, D / 2]
    bounds: Tensor  # int32 [S + 1]
    longest: int  # at least the rows of the longest segment
    rows: Tensor  # int64 [2, B, T]: the packed row of each target, conditional and unconditional; M where there is none
    tokens: Tensor  # int64 [B, C, T]
    valid: Tensor  # bool [B, 1, T]: frames that the item has
    noise: Tensor  # float32 [B, C, T], added to the score
    k: Tensor  # int64 [B]: slots to reveal now
    penalty: Tensor  # float32 [C, 1], taken from the score
    temperature: Tensor  # float32 [], divides the score
    guidance: Tensor  # float32 []


class Step:
    """A callable over a Board; holds the model's embedding and heads and the packed stack."""

    def __init__(
        self, model: Any, backbone: Backbone, score_with: Score | None = None, reveal_with: Reveal | None = None
    ):
        self.backbone = backbone
        self.books, self.mask_id = int(model.config.num_audio_codebook), int(model.config.audio_mask_id)
        self._embed, self._heads = model.audio_embeddings, model.audio_heads
        self._offsets = model.codebook_layer_offsets
        kind = backbone.device.type
        self.score = score_with or SCORES.get(kind, score)
        self.reveal = reveal_with or REVEALS.get(kind, reveal)
        ours = score_with is None and reveal_with is None and kind == "cuda"
        self.fused = ours and ops_cuda.refuses(backbone.device) is None  # both in a launch each, logits as they come

    def board(self, size: int, items: int, frames: int, segments: int) -> Board:
        """A Board that can be run as it is: one segment of ``size`` rows, nothing to reveal."""
        device, b = self.backbone.device, self.backbone
        with torch.inference_mode(False):
            bounds = torch.full((segments + 1,), size, dtype=torch.int32, device=device)
            bounds[0] = 0
            half = b.head_dim // 2
            return Board(
                x=torch.zeros(size + 1, b.hidden, dtype=b.dtype, device=device),
                rotation=Rotation(torch.ones(size, half, device=device), torch.zeros(size, half, device=device)),
                bounds=bounds,
                longest=size,
                rows=torch.full((2, items, frames), size, device=device),
                tokens=torch.full((items, self.books, frames), self.mask_id, device=device),
                valid=torch.zeros(items, 1, frames, dtype=torch.bool, device=device),
                noise=torch.zeros(items, self.books, frames, device=device),
                k=torch.zeros(items, dtype=torch.int64, device=device),
                penalty=torch.zeros(self.books, 1, device=device),
                temperature=torch.ones((), device=device),
                guidance=torch.zeros((), device=device),
            )

    def logits(self, b: Board) -> Tensor:
        """float32 [2, B, T, C, V] of the target rows."""
        return self._logits(b).float()

    def _logits(self, b: Board) -> Tensor:
        """The same in the dtype of the heads."""
        embedded = self._embed(b.tokens + self._offsets[:, None]).sum(1)  # [B, T, H]
        x = b.x
        x.index_copy_(0, b.rows.flatten(), embedded.to(x.dtype).expand(2, -1, -1, -1).reshape(-1, x.shape[1]))
        m = x.shape[0] - 1
        reads = b.rows.flatten().clamp(max=m - 1)
        hidden = self.backbone(x[:m], b.rotation, Spans(b.bounds, b.longest), reads)
        heads: Tensor = self._heads(hidden)
        return heads.view(*b.rows.shape, self.books, -1)

    def __call__(self, b: Board) -> None:
        """One step, in place on ``b.tokens``."""
        if self.fused:
            pred, best = ops_cuda.guided_score(
                self._logits(b), b.guidance, b.penalty, b.temperature, b.noise, b.valid, b.tokens, self.mask_id
            )
            ops_cuda.reveal(b.tokens.flatten(1), pred.flatten(1), best.flatten(1), b.k)
            return
        cond, uncond = self.logits(b)
        pred, best = self.score(cond, uncond, b.guidance, self.mask_id)
        best = best.transpose(1, 2) - b.penalty
        # torch divides by a Python number on CUDA by way of its reciprocal, and so does OmniVoice
        best = best * b.temperature.reciprocal() if best.is_cuda else best / b.temperature
        best = (best + b.noise).masked_fill(~b.valid | (b.tokens != self.mask_id), -torch.inf)
        self.reveal(b.tokens.flatten(1), pred.transpose(1, 2).flatten(1), best.flatten(1), b.k)
