"""Several checkpoints, plain and quantized, over the same tokens: one row each.

One model is in memory at a time; with ``kl`` or ``layers`` the reference stays beside it. Of the reference is kept what it
gave each token (its negative log likelihood and most likely token) and, with ``agreement``, what it wrote.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from lowbit.checkpoint import open_checkpoint
from lowbit.models.load import exactly, load, local_directory
from lowbit.models.plan import format_of
from lowbit.models.save import model_bytes
from lowbit.models.tokenizer import tokenizer_of
from lowbit.prove import generation
from lowbit.prove.compare import Progress, layer_errors, perplexity_of, windows_of
from lowbit.prove.paired import Scores, agreement, mean_of, ratio, score
from lowbit.prove.stored import stored
from lowbit.types import FormatError

if TYPE_CHECKING:
    from transformers import PreTrainedModel

ROWS = 128  # inputs of a layer that its error is taken over


@dataclass(frozen=True)
class Questions:
    """What to measure, and on which tokens (see ``compare.perplexity``)."""

    context: int = 1024
    tokens: int | None = None
    skip: int = 0
    activation: str | None = None  # override what the quantized checkpoints declare
    dtype: torch.dtype = torch.float32  # of what is dense, the reference included
    exact: bool = False  # true 4-bit activations where a layer declares them
    kl: bool = False
    agreement: int = 0  # prompts to continue
    layers: bool = False


def evaluate(
    directories: Sequence[str],
    text: str,
    questions: Questions,
    reference: str | None = None,
    progress: Callable[[str], Progress] | None = None,
) -> dict[str, Any]:
    """{"reference": directory or None, "models": [a row for each directory]}, JSON-able.

    The reference is ``reference``, else the first plain directory; without one there are no comparisons, and FormatError
    where ``questions`` ask for some. Every row has model, perplexity, nll, scored, windows, seconds, bytes (in memory),
    bits_per_weight, disk_bytes, simulated_4_bit_linears; of comparisons ratio and ratio_se, kl and kl_se (nats), top1 and
    top1_se, generation (an Agreement), layers (name, error, rows). FormatError where a model's tokenizer gives other tokens.
    """
    base = reference or next((d for d in directories if _plain(d)), None)
    asked = [
        w
        for w, on in (("--kl", questions.kl), ("--agreement", questions.agreement), ("--layers", questions.layers))
        if on
    ]
    if base is None and asked:
        raise FormatError(f"{asked[0]}: found no plain directory to compare with, accepted is one, or --reference DIR")
    compares = base is not None and (reference is not None or len(directories) > 1)
    if asked and not compares:
        raise FormatError(f"{asked[0]}: found one plain directory alone, accepted is another to compare with it")
    windows = _windows(base or directories[0], text, questions)
    kept: PreTrainedModel | None = None
    before: Scores | None = None
    written: Tensor | None = None
    beside: dict[str, Any] = {}
    if compares and base is not None:
        kept = _load(base, questions)
        beside = {"bytes": model_bytes(kept), "simulated_4_bit_linears": exactly(kept) if questions.exact else 0}
        before = score(kept, windows, progress=progress(base) if progress else None)
        if questions.agreement:
            written = generation.continue_greedily(kept, generation.prompts_of(windows, questions.agreement))
        if not (questions.kl or questions.layers):
            kept = None
    rows = []
    for directory in directories:
        tell = progress(directory) if progress else None
        if before is not None and directory == base:
            rows.append(_row(directory, before, windows, beside))
            continue
        if len(directories) > 1 or reference is not None:
            _same_tokens(directory, text, questions, windows)
        model = _load(directory, questions)
        known = {"simulated_4_bit_linears": exactly(model) if questions.exact else 0, "bytes": model_bytes(model)}
        found = score(model, windows, kept if questions.kl else None, tell)
        row = _row(directory, found, windows, known)
        if before is not None:
            row |= _against(found, before)
        if written is not None:
            mine = generation.continue_greedily(model, generation.prompts_of(windows, questions.agreement))
            row["generation"] = generation.agreement(mine, written)._asdict()
        if questions.layers and kept is not None:
            errors = layer_errors(kept, model, windows[0], rows=ROWS)
            row["layers"] = [e._asdict() for e in errors]
        rows.append(row)
        del model
    return {"reference": base if compares else None, "models": rows}


def _plain(directory: str) -> bool:
    return format_of(open_checkpoint(local_directory(directory)))[0] is None


def _load(directory: str, questions: Questions) -> PreTrainedModel:
    return load(directory, activation=questions.activation, dtype=questions.dtype)


def _windows(directory: str, text: str, q: Questions) -> list[Tensor]:
    tokenizer = tokenizer_of(directory)
    return windows_of(text, tokenizer, context=q.context, tokens=q.tokens, skip=q.skip)


def _same_tokens(directory: str, text: str, questions: Questions, windows: Sequence[Tensor]) -> None:
    own = _windows(directory, text, questions)
    if len(own) != len(windows) or not all(torch.equal(a, b) for a, b in zip(own, windows, strict=True)):
        raise FormatError(
            f"{directory}: found a tokenizer that gives other tokens than the reference's, accepted is the same one"
        )


def _row(directory: str, found: Scores, windows: Sequence[Tensor], known: dict[str, Any]) -> dict[str, Any]:
    size = stored(directory)
    return {
        "model": directory,
        "perplexity": perplexity_of(found.nll),
        "nll": float(found.nll.mean()),
        "scored": found.nll.numel(),
        "windows": len(windows),
        "seconds": found.seconds,
        **known,
        "format": size.format,
        "bits_per_weight": size.bits_per_weight,
        "disk_bytes": size.bytes,
    }


def _against(found: Scores, before: Scores) -> dict[str, Any]:
    by, top = ratio(found.nll, before.nll), agreement(found, before)
    row = {"ratio": by.value, "ratio_se": by.error, "top1": top.value, "top1_se": top.error}
    if found.kl is not None:
        kl = mean_of(found.kl)
        row |= {"kl": kl.value, "kl_se": kl.error}
    return row


def budget_of(directory: str) -> dict[str, Any] | None:
    """What ``lowbit quantize --budget`` measured and chose, as the checkpoint keeps it; None where it was not asked."""
    found = open_checkpoint(local_directory(directory)).metadata.get("budget")
    return found if isinstance(found, dict) else None


def name_of(directory: str, directories: Sequence[str]) -> str:
    """The last part of a path, or the whole of it where another ends in the same."""
    same = [other for other in directories if Path(other).name == Path(directory).name]
    return directory if len(same) > 1 else Path(directory).name
