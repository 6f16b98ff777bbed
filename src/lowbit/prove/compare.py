"""Two ways to say what quantization cost: perplexity on a text, and the error of each layer's output."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, NamedTuple

import torch
from torch import Tensor, nn

from lowbit.types import FormatError

if TYPE_CHECKING:
    from transformers import PreTrainedModel, PreTrainedTokenizerBase

Progress = Callable[[int, int], None]  # (done, total)


class Perplexity(NamedTuple):
    """exp of the mean negative log likelihood (nats per token) over ``scored`` tokens."""

    perplexity: float  # inf beyond a float
    nll: float  # the mean, nats per token
    scored: int
    windows: int  # that the text was cut into
    seconds: float  # of wall time


@torch.inference_mode()
def perplexity(
    model: PreTrainedModel,
    text: str | Sequence[int] | Tensor,
    tokenizer: PreTrainedTokenizerBase | None = None,
    *,
    context: int = 1024,
    tokens: int | None = None,
    skip: int = 0,
    progress: Progress | None = None,
) -> Perplexity:
    """Perplexity of ``text`` (a string with its tokenizer, or token ids [T], integers).

    No special tokens; ``skip`` tokens are dropped, then at most ``tokens`` are used, cut into windows of ``context``
    that do not overlap; each window starts from nothing and its first token is not scored. A last, shorter window is
    left out unless it is the only one. ``progress`` is called with (windows done, windows in all).
    Raises FormatError where there are fewer than two tokens to score, or an argument is out of range.
    Source: Jelinek et al., "Perplexity, a measure of the difficulty of speech recognition tasks", 1977; docs/accuracy.md.
    """
    windows = windows_of(text, tokenizer, context=context, tokens=tokens, skip=skip)
    began = time.perf_counter()
    nll = []
    for done, window in enumerate(windows):
        if progress is not None:
            progress(done, len(windows))
        batch = window.to(model.device).reshape(1, -1)
        nll.append(nll_of(model(input_ids=batch, use_cache=False).logits[0, :-1], batch[0, 1:]))
    if progress is not None:
        progress(len(windows), len(windows))
    every = torch.cat(nll)
    return Perplexity(
        perplexity_of(every), float(every.mean()), every.numel(), len(windows), time.perf_counter() - began
    )


def perplexity_of(nll: Tensor) -> float:
    """exp of the mean of [T]; inf where that is NaN or beyond a float."""
    mean = float(nll.mean())
    return math.exp(mean) if mean < 700 else math.inf  # NaN compares false


def windows_of(
    text: str | Sequence[int] | Tensor,
    tokenizer: PreTrainedTokenizerBase | None = None,
    *,
    context: int = 1024,
    tokens: int | None = None,
    skip: int = 0,
) -> list[Tensor]:
    """The windows that ``perplexity`` scores, int64 [context] each; it says how they are cut and what is refused."""
    if context < 2 or skip < 0 or (tokens is not None and tokens < 2):
        found = f"context {context}, skip {skip}, tokens {tokens}"
        raise FormatError(f"perplexity: found {found}, accepted are context >= 2, skip >= 0, tokens >= 2")
    ids = token_ids(text, tokenizer, None if tokens is None else skip + tokens)[skip:]
    ids = ids[: max(ids.numel() // context * context, min(ids.numel(), context))]
    if ids.numel() < 2:
        raise FormatError(f"text: found {ids.numel()} tokens after skipping {skip}, accepted is at least 2")
    return [ids[start : start + context] for start in range(0, ids.numel(), context)]


def nll_of(logits: Tensor, targets: Tensor, rows: int = 128) -> Tensor:
    """-log softmax(logits)[target], float64 [T], of any float logits [T, V]; in slices, so that no copy of all is made."""
    parts = []
    for start in range(0, targets.numel(), rows):
        want, wide = targets[start : start + rows], logits[start : start + rows].float()
        log_sum = torch.logsumexp(wide, -1).double()
        parts.append(log_sum - wide.gather(-1, want[:, None])[:, 0].double())
    return torch.cat(parts) if parts else torch.zeros(0, dtype=torch.float64)


def token_ids(
    text: str | Sequence[int] | Tensor, tokenizer: PreTrainedTokenizerBase | None, most: int | None = None
) -> Tensor:
    """int64 [T] of a text (no special tokens) or of ids as they are; at most ``most``.

    Only as much text as ``most`` tokens can need is tokenized: 16 characters a token, doubled until it is enough.
    """
    if not isinstance(text, str):
        ids = torch.as_tensor(text, dtype=torch.long).reshape(-1)
        return ids if most is None else ids[:most]
    if tokenizer is None:
        raise FormatError("text: found a string without a tokenizer, accepted are token ids or both")
    cut = len(text) if most is None else 16 * most
    while True:
        found = tokenizer(text[:cut], add_special_tokens=False, verbose=False)["input_ids"]
        # one spare token: the last one before the cut may be part of a longer one
        if cut >= len(text) or (most is not None and len(found) > most + 8):
            return torch.tensor(found[:most], dtype=torch.long)
        cut *= 2


class LayerError(NamedTuple):
    """Frobenius-relative error of one layer's output against the dense linear it replaced."""

    name: str  # dotted, of the linear
    error: float
    rows: int  # of x


@torch.inference_mode()
def layer_errors(
    reference: nn.Module,
    model: nn.Module,
    ids: Sequence[int] | Tensor | None = None,
    *,
    rows: int = 64,
    seed: int = 0,
    progress: Progress | None = None,
) -> list[LayerError]:
    """For every nn.Linear of ``reference`` that is something else in ``model``: |y - y_ref| / |y_ref|.

    x is Gaussian [rows, K] float32, or, with ``ids`` (integers [T]), what ``reference`` itself feeds the layer for those tokens (at most
    ``rows`` of them, evenly spread, the first one left out). Both models must live on the same device; memory for x is one layer's at a time in the Gaussian
    case and ``rows`` times the sum of K otherwise. RuntimeError of torch where the devices differ.
    Source: the error that docs/numbers.md uses everywhere, Frobenius-relative.
    """
    pairs = [
        (name, dense, other)
        for name, dense in reference.named_modules()
        if isinstance(dense, nn.Linear) and not isinstance(other := _get(model, name), (nn.Linear, type(None)))
    ]
    inputs = {} if ids is None else _inputs(reference, [name for name, _, _ in pairs], ids, rows)
    generator = torch.Generator().manual_seed(seed)
    out = []
    for done, (name, dense, other) in enumerate(pairs):
        x = inputs.get(name)
        if x is None:
            x = torch.randn(rows, dense.in_features, generator=generator)
        x = x.to(dense.weight.device, dense.weight.dtype)
        want = dense(x).double()
        out.append(LayerError(name, float((other(x).double() - want).norm() / want.norm().clamp_min(1e-300)), len(x)))
        if progress is not None:
            progress(done + 1, len(pairs))
    return out


def _get(model: nn.Module, name: str) -> nn.Module | None:
    try:
        return model.get_submodule(name)
    except AttributeError:
        return None


def _inputs(model: nn.Module, names: list[str], ids: Sequence[int] | Tensor, rows: int) -> dict[str, Tensor]:
    caught: dict[str, Tensor] = {}

    def catcher(name: str) -> Callable[[nn.Module, tuple[Tensor, ...]], None]:
        def catch(_: nn.Module, args: tuple[Tensor, ...]) -> None:
            flat = args[0].reshape(-1, args[0].shape[-1])
            first = min(1, flat.shape[0] - 1)  # the first token's input is so large in some layers that it would be all
            spread = torch.linspace(first, flat.shape[0] - 1, min(rows, flat.shape[0] - first)).round().long()
            caught[name] = flat[spread.to(flat.device)].clone()

        return catch

    handles = [model.get_submodule(name).register_forward_pre_hook(catcher(name)) for name in names]
    try:
        model(input_ids=torch.as_tensor(ids, dtype=torch.long).reshape(1, -1))
    finally:
        for handle in handles:
            handle.remove()
    return caught
