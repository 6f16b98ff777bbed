"""How long two models write the same text: greedy continuations of the same prompts."""

from __future__ import annotations

import inspect
from collections.abc import Sequence
from typing import TYPE_CHECKING, NamedTuple

import torch
from torch import Tensor

from lowbit.types import FormatError

if TYPE_CHECKING:
    from transformers import PreTrainedModel

PROMPT, LENGTH = 64, 64  # tokens of a prompt and of what is written after it


class Agreement(NamedTuple):
    """Of greedy continuations: what comes before the first token in which they differ."""

    prompts: int
    length: int  # tokens written after each prompt
    share: float  # tokens before the first difference / tokens written
    first_difference: float  # tokens before it, mean over the prompts; one without a difference counts ``length``
    identical: int  # prompts without a difference


def prompts_of(windows: Sequence[Tensor], count: int, length: int = PROMPT) -> Tensor:
    """``count`` prompts int64 [count, length] out of the windows' tokens, evenly spaced. FormatError where there are too few."""
    ids = torch.cat(list(windows))
    stride = ids.numel() // count if count > 0 else 0
    if stride < 1:
        raise FormatError(f"agreement: found {count} prompts of {ids.numel()} tokens, accepted are 1 .. {ids.numel()}")
    starts = torch.arange(count) * stride
    return ids[starts[:, None] + torch.arange(min(length, stride))]


@torch.inference_mode()
def continue_greedily(model: PreTrainedModel, prompts: Tensor, length: int = LENGTH, batch: int = 16) -> Tensor:
    """The most likely next tokens after each prompt [N, P], int64 [N, length]; no token ends it."""
    done = []
    slot = "cache" if "cache" in inspect.signature(model.forward).parameters else "past_key_values"  # renamed in 5.x
    for start in range(0, prompts.shape[0], batch):
        feed, cache, written = prompts[start : start + batch].to(model.device), None, []
        for _ in range(length):
            out = model(input_ids=feed, use_cache=True, **{slot: cache})
            feed, cache = out.logits[:, -1:].argmax(-1), getattr(out, slot)
            written.append(feed)
        done.append(torch.cat(written, 1).cpu())
    return torch.cat(done)


def agreement(got: Tensor, want: Tensor) -> Agreement:
    """Compare continuations [N, L] of the same prompts."""
    if got.shape != want.shape:
        found = f"{list(got.shape)} and {list(want.shape)}"
        raise FormatError(f"agreement: found continuations {found}, accepted are equal shapes")
    count, length = want.shape
    before = (got == want).long().cumprod(1).sum(1)
    mean = float(before.double().mean())
    return Agreement(count, length, mean / length, mean, int((before == length).sum()))
