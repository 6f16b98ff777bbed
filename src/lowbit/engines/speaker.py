"""Lines of text to wav files, each by itself: what ``lowbit speak`` does in one process, and every worker of a cluster.

A file carries in its comment a digest of all that it was made from, so that a second run knows what is there already.
"""

from __future__ import annotations

import hashlib
import json
import os
import time
import wave
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any, NamedTuple

import torch

from lowbit.engines.omnivoice import accelerate
from lowbit.models.files import files_of
from lowbit.models.load import local_directory
from lowbit.models.omnivoice import Line, load_omnivoice, voice_of
from lowbit.models.speech import comment_of, write_wav

FLOATS = {"fp32": torch.float32, "fp16": torch.float16, "bf16": torch.bfloat16}


class How(NamedTuple):
    """What the lines of a run share. ``seed`` counts for each of them."""

    model: str  # directory or cached hub id
    weights: str | None = None
    precision: str | None = None
    device: str = "cpu"
    seed: int = 0
    steps: int = 32

    def anywhere(self) -> How:
        """The same for a process that begins in another directory."""
        path = Path(self.weights) if self.weights else None
        weights = str(path.resolve()) if path and path.exists() else self.weights
        return self._replace(model=str(local_directory(self.model).resolve()), weights=weights)


class Utterance(NamedTuple):
    """One line, the wav that it becomes, and the comment that says what that was made from."""

    line: Line
    target: Path
    comment: str


class Spoken(NamedTuple):
    """One file: seconds of audio, seconds that it took, whether an earlier run had written it."""

    file: str
    seconds: float
    took: float
    text: str
    kept: bool = False
    worker: int = 0  # the process that spoke it


class Speaker:
    """A model that is loaded once, and the voices that it has heard."""

    def __init__(self, how: How, progress: bool = False) -> None:
        self.how = how
        self.model: Any = load_omnivoice(how.model, how.device, FLOATS.get(how.precision or ""))
        accelerate(self.model, how.weights, how.precision, progress=progress)
        self._voices: dict[Any, Any] = {}

    def __call__(self, what: Utterance) -> Spoken:
        """Speak one line into its file, which appears whole."""
        line, target, comment = what
        began = time.perf_counter()
        key = (line.ref_audio, line.ref_text)
        if key not in self._voices:
            self._voices[key] = voice_of(self.model, line)
        torch.manual_seed(self.how.seed)
        audio = self.model.generate(
            text=line.text, language=line.language, voice_clone_prompt=self._voices[key], duration=line.duration,
            num_step=self.how.steps,
        )[0]  # fmt: skip
        target.parent.mkdir(parents=True, exist_ok=True)
        write_wav(target, audio, self.model.sampling_rate, comment)
        seconds = len(audio) / self.model.sampling_rate
        return Spoken(str(target), seconds, time.perf_counter() - began, line.text, False, os.getpid())

    def once(self, what: Utterance) -> Spoken:
        """The same, unless the file is there and was made from the same."""
        return kept(what) or self(what)


def speaks(how: How, ready: Callable[[], None]) -> Callable[[Utterance], Spoken]:
    """What a worker does, once it is ``ready``."""
    ready()
    return Speaker(how).once


def weight(what: Utterance) -> float:
    """About how long a line takes beside others: seconds where they are given, else the bytes of its text at 15 a second
    (of a script with three bytes a letter, five letters)."""
    return what.line.duration or len(what.line.text.encode()) / 15


def kept(what: Utterance) -> Spoken | None:
    """The file of an utterance where it is there already and was made from the same; else None."""
    if comment_of(what.target) != what.comment:
        return None
    with wave.open(str(what.target), "rb") as file:
        return Spoken(str(what.target), file.getnframes() / file.getframerate(), 0.0, what.line.text, True)


def utterances(how: How, lines: Iterable[Line], targets: Iterable[Path]) -> list[Utterance]:
    """Every line with its comment: a sha256 of its text, its reference's bytes, the settings, and which weight files
    there are (names, sizes, times)."""
    weights = how.weights if how.weights and Path(how.weights).exists() else None  # else refused when it is read
    run = [*how[2:], *(files_of(folder) for folder in (how.model, weights) if folder)]
    heard: dict[Path, str] = {}
    found = []
    for line, target in zip(lines, targets, strict=True):
        if line.ref_audio is not None and line.ref_audio not in heard:
            heard[line.ref_audio] = hashlib.sha256(line.ref_audio.read_bytes()).hexdigest()
        voice = None if line.ref_audio is None else heard[line.ref_audio]
        made_from = [run, line.text, voice, line.ref_text, line.duration, line.language]
        digest = hashlib.sha256(json.dumps(made_from).encode()).hexdigest()
        found.append(Utterance(line, target, f"synthetic speech, lowbit speak {digest[:32]}"))
    return found
