"""How what was said sounds: word errors, likeness of the voice, and predicted opinion, by models of others where installed.

Every answer is a number or a few words on why there is none: random weights speak noise, whose scores would mean nothing.
"""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch

from lowbit.bench.rtf_set import Sample
from lowbit.models.omnivoice import RATE, read_reference
from lowbit.models.speech import write_wav
from lowbit.types import FormatError

JUDGED = 16000  # Hz that the judges hear
KEYS = ("wer", "similarity", "mos")
Score = float | str


class Said(NamedTuple):
    """One utterance of an engine: float32 [samples] at 24 kHz."""

    sample: Sample
    audio: Any


def untrained() -> dict[str, Score]:
    return {key: "random weights" for key in KEYS}


def judge(said: Sequence[Said], asr: str | None = None) -> dict[str, Score]:
    """{"wer", "similarity", "mos"}: of all utterances together, or why not."""
    return {"wer": _tried(lambda: word_errors(said, asr)), "similarity": _tried(lambda: similarity(said)),
            "mos": _tried(lambda: opinion(said))}  # fmt: skip


def _tried(call: Callable[[], Score]) -> Score:
    try:
        return call()
    except ImportError as error:
        return f"no package {error.name}"
    except FormatError as error:
        return str(error)


def resampled(audio: Any, rate: int, to: int = JUDGED) -> Any:
    """float32 [samples] at another rate."""
    from torchaudio.functional import resample

    wide = torch.as_tensor(np.asarray(audio, dtype=np.float32))
    return resample(wide, rate, to).numpy()


def word_errors(said: Sequence[Said], asr: str | None) -> Score:
    """Word error rate of the English utterances, as a Whisper of ``asr`` writes them down."""
    if asr is None:
        return "no --asr DIR"
    mine = [s for s in said if (s.sample.line.language or "en").startswith("en") and len(s.audio)]
    if not mine:
        return "no English utterance"
    from lowbit.models.load import load
    from lowbit.models.speech import Line, Listener
    from lowbit.prove import speech

    model = load(asr)
    with tempfile.TemporaryDirectory() as folder:
        lines = []
        for number, one in enumerate(mine):
            path = Path(folder) / f"{number}.wav"
            write_wav(path, resampled(one.audio, RATE), JUDGED)
            lines.append(Line(path, one.sample.line.text, one.sample.name))
        return speech.word_errors(model, Listener.of(model, asr), lines).wer


def similarity(said: Sequence[Said]) -> Score:
    """Mean cosine of GE2E embeddings (resemblyzer) to the reference's, of utterances that had a recording to follow."""
    mine = [s for s in said if s.sample.line.ref_audio is not None and len(s.audio)]
    if not mine:
        return "no recorded reference"
    from resemblyzer import VoiceEncoder, preprocess_wav

    encoder = VoiceEncoder("cpu", verbose=False)

    def embed(audio: Any, rate: int) -> Any:
        return encoder.embed_utterance(preprocess_wav(resampled(audio, rate), source_sr=JUDGED))

    known: dict[Any, Any] = {}
    found = []
    for one in mine:
        path = one.sample.line.ref_audio
        assert path is not None
        if path not in known:
            heard, rate = read_reference(path)
            known[path] = embed(heard[0], rate)
        found.append(float(embed(one.audio, RATE) @ known[path]))
    return float(np.mean(found))


def opinion(said: Sequence[Said]) -> Score:
    """Mean DNSMOS (overall, P.835 form), of speechmos."""
    from speechmos import dnsmos

    heard = [np.clip(resampled(s.audio, RATE), -1, 1).astype(np.float64) for s in said if len(s.audio)]
    if not heard:
        return "nothing was said"
    return float(np.mean([dnsmos.run(x, JUDGED)["ovrl_mos"] for x in heard]))
