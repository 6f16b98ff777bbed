"""What quantization cost a speech recogniser: likelihood of known transcripts, and word errors of what it writes."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, NamedTuple

import torch

from lowbit.models.speech import Line, Listener
from lowbit.prove.compare import nll_of

if TYPE_CHECKING:
    from transformers import PreTrainedModel

Progress = Callable[[int, int], None]  # (clips done, clips)
LONGEST = 200  # tokens of a transcription: one that goes round in circles is cut


class SpeechScore(NamedTuple):
    """``nll``: mean negative log likelihood in nats per token of the transcripts, their end counted, each token
    predicted from the audio and the right tokens before it."""

    nll: float
    tokens: int
    clips: int
    seconds: float


class WordErrors(NamedTuple):
    """``wer``: words that have to be put in, left out or changed, over the words of the transcripts."""

    wer: float
    errors: int
    words: int
    seconds: float


@torch.inference_mode()
def likelihood(
    model: PreTrainedModel, listener: Listener, lines: Sequence[Line], progress: Progress | None = None
) -> SpeechScore:
    """Teacher-forced likelihood of the transcripts, clip by clip. Smooth, and so fit to compare quantizations; word
    errors of a few clips are not."""
    began = time.perf_counter()
    total, count = 0.0, 0
    for done, line in enumerate(lines):
        if progress is not None:
            progress(done, len(lines))
        want = torch.tensor(listener.tokens(line), device=model.device)
        inputs = {key: value.to(model.device) for key, value in listener.call(line).items()}
        logits = model(**inputs, use_cache=False).logits[0, len(listener.prefix) - 1 :]
        total += float(nll_of(logits, want).sum())
        count += want.numel()
    if progress is not None:
        progress(len(lines), len(lines))
    return SpeechScore(total / count, count, len(lines), time.perf_counter() - began)


@torch.inference_mode()
def word_errors(
    model: PreTrainedModel, listener: Listener, lines: Sequence[Line], progress: Progress | None = None
) -> WordErrors:
    """Greedy transcription of every clip against its transcript, both in the spelling of Whisper's English normalizer."""
    from transformers.models.whisper.english_normalizer import EnglishTextNormalizer

    normal = EnglishTextNormalizer({})  # type: ignore[no-untyped-call]
    began = time.perf_counter()
    errors, words = 0, 0
    most = min(listener.most, len(listener.prefix) + LONGEST)
    for done, line in enumerate(lines):
        if progress is not None:
            progress(done, len(lines))
        features = listener.features(line).to(model.device)
        start = torch.tensor([listener.prefix], device=model.device)
        ids = model.generate(  # type: ignore[operator]
            features, decoder_input_ids=start, max_length=most, do_sample=False, num_beams=1
        )
        written = listener.tokenizer.decode(ids[0], skip_special_tokens=True)
        want = normal(line.text).split()
        errors += distance(want, normal(written).split())
        words += len(want)
    if progress is not None:
        progress(len(lines), len(lines))
    return WordErrors(errors / max(words, 1), errors, words, time.perf_counter() - began)


def distance(want: Sequence[str], found: Sequence[str]) -> int:
    """Least number of words put in, left out or changed that makes one of the other (Levenshtein, 1966)."""
    row = list(range(len(found) + 1))
    for i, a in enumerate(want, 1):
        before, row[0] = row[0], i
        for j, b in enumerate(found, 1):
            before, row[j] = row[j], min(row[j] + 1, row[j - 1] + 1, before + (a != b))
    return row[-1]
