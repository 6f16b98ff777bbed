"""A model against its reference over the same tokens: what both gave each token, and the figures that follow from it.

One window at a time: the reference's logits of a window exist only while the model's are compared with them.
"""

from __future__ import annotations

import math
import time
from collections.abc import Sequence
from typing import TYPE_CHECKING, NamedTuple

import torch
from torch import Tensor

from lowbit.prove.compare import Progress, nll_of
from lowbit.reference import divergence
from lowbit.types import FormatError

if TYPE_CHECKING:
    from transformers import PreTrainedModel


class Scores(NamedTuple):
    """What a model gave each scored token, on the CPU."""

    nll: Tensor  # float64 [T], nats
    top: Tensor  # int64 [T], its most likely token
    kl: Tensor | None  # float64 [T], KL(reference || model) of the whole distribution, nats
    seconds: float  # of the model's own passes


class Estimate(NamedTuple):
    """A mean over tokens and its standard error, tokens taken as independent."""

    value: float
    error: float


@torch.inference_mode()
def score(
    model: PreTrainedModel,
    windows: Sequence[Tensor],
    reference: PreTrainedModel | None = None,
    progress: Progress | None = None,
) -> Scores:
    """Run ``windows`` (int64 [T] each, see ``compare.windows_of``) through the model; the first token of each is not scored.

    With ``reference`` (it may be on another device) it runs too, and every distribution is compared with its own.
    """
    nll, top, kl = [], [], []
    seconds = 0.0
    for done, window in enumerate(windows):
        if progress is not None:
            progress(done, len(windows))
        began = time.perf_counter()
        logits = _logits(model, window)
        nll.append(nll_of(logits, window[1:].to(logits.device)).cpu())  # to the CPU: waits for the device
        top.append(logits.argmax(-1).cpu())
        seconds += time.perf_counter() - began
        if reference is not None:
            kl.append(divergence(_logits(reference, window), logits).cpu())
    if progress is not None:
        progress(len(windows), len(windows))
    return Scores(torch.cat(nll), torch.cat(top), torch.cat(kl) if kl else None, seconds)


def _logits(model: PreTrainedModel, window: Tensor) -> Tensor:
    """[T - 1, V]: what predicts the second token of the window and those after it."""
    logits: Tensor = model(input_ids=window.to(model.device).reshape(1, -1), use_cache=False).logits[0, :-1]
    return logits


def agreement(scores: Scores, reference: Scores) -> Estimate:
    """The share of tokens at which both models find the same next token most likely (after the same, given text)."""
    return mean_of(scores.top == reference.top)


def ratio(nll: Tensor, reference: Tensor) -> Estimate:
    """Perplexity over the reference's, of the same tokens [T]: exp(mean d), d the differences; error: that times
    std(d) / sqrt(T), which is the error of a paired comparison. FormatError where the tokens are not the same in number.
    """
    if nll.shape != reference.shape:
        raise FormatError(f"ratio: found {nll.numel()} and {reference.numel()} tokens, accepted are the same tokens")
    value, error = mean_of(nll - reference)
    value = math.exp(value) if value < 700 else math.inf
    return Estimate(value, value * error)


def mean_of(values: Tensor) -> Estimate:
    """Mean of [T] and its standard error (NaN for a single token)."""
    values = values.double()
    return Estimate(float(values.mean()), float(values.std() / values.numel() ** 0.5))
