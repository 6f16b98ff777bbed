"""Speech with transcripts: lines of a JSONL file -> what a speech recogniser of transformers is called with.

A line is {"audio": PATH, "text": TRANSCRIPT}; a relative path begins at the folder of the file. Audio is a wav of the
model's rate (16 kHz), several channels are averaged.
"""

from __future__ import annotations

import json
import os
import struct
import wave
from collections.abc import Iterator
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from ..types import FormatError

SILENCE = 4  # one of so many silent positions is counted


@dataclass(frozen=True)
class Line:
    """One line of a speech file; ``where`` names it for errors."""

    audio: Path
    text: str
    where: str

    def samples(self, rate: int) -> Any:
        """float32 [samples] in -1 .. 1 of the audio. FormatError naming line and field where it cannot be read, has
        another rate, or is empty."""
        try:
            found, has = read_wav(self.audio)
        except (OSError, EOFError, wave.Error, RuntimeError, ValueError) as error:
            why = (
                "no such file"
                if isinstance(error, FileNotFoundError)
                else f"{self.audio.name} ({str(error) or type(error).__name__})"
            )
            raise FormatError(f"{self.where}: audio: found {why}, accepted is a wav of {rate} Hz") from error
        if has != rate:
            raise FormatError(f"{self.where}: audio: found {has} Hz, accepted is {rate} Hz")
        if not len(found):
            raise FormatError(f"{self.where}: audio: found no sample, accepted is at least 1")
        return found


def read_wav(path: Path) -> tuple[Any, int]:
    """(float32 [samples], rate) of a PCM wav; of whatever soundfile reads where that is installed."""
    try:
        with wave.open(str(path), "rb") as file:
            width, channels, rate = file.getsampwidth(), file.getnchannels(), file.getframerate()
            data = file.readframes(file.getnframes())
    except wave.Error:
        if find_spec("soundfile") is None:
            raise
        import soundfile

        x, rate = soundfile.read(path, dtype="float32", always_2d=True)
        return x.mean(1), int(rate)
    if width == 1:
        x = np.frombuffer(data, np.uint8).astype(np.float32) / 128 - 1
    elif width == 2:
        x = np.frombuffer(data, "<i2").astype(np.float32) / 2**15
    elif width in (3, 4):
        raw = np.frombuffer(data, np.uint8).reshape(-1, width)[:, -3:]  # 24 bits are what float32 holds
        wide = np.zeros((len(raw), 4), np.uint8)
        wide[:, 1:] = raw
        x = wide.view("<i4")[:, 0].astype(np.float32) / 2**31
    else:
        raise ValueError(f"{8 * width} bits a sample")
    return x.reshape(-1, channels).mean(1), rate


def write_wav(path: str | os.PathLike[str], audio: Any, rate: int, comment: str = "") -> None:
    """float32 [samples] as 16-bit PCM, whole or not at all. ``comment`` goes into the file's information, behind the
    samples, where players and ``comment_of`` find it."""
    path = Path(path)
    partial = path.with_name(path.name + ".partial")
    with partial.open("wb") as raw:
        with wave.open(raw, "wb") as file:
            file.setnchannels(1)
            file.setsampwidth(2)
            file.setframerate(rate)
            file.writeframes(pcm(audio).tobytes())
        if comment:
            text = comment.encode() + b"\0"
            text += b"\0" * (len(text) % 2)
            raw.write(b"LIST" + struct.pack("<I", 12 + len(text)) + b"INFOICMT" + struct.pack("<I", len(text)) + text)
            size = raw.tell() - 8
            raw.seek(4)
            raw.write(struct.pack("<I", size))
        raw.flush()
        os.fsync(raw.fileno())
    partial.replace(path)


def comment_of(path: str | os.PathLike[str]) -> str | None:
    """The comment of a wav that ``write_wav`` wrote; None where there is none, or no such file."""
    try:
        with Path(path).open("rb") as file:
            if file.read(12)[:4] != b"RIFF":
                return None
            while len(head := file.read(8)) == 8:
                tag, size = head[:4], struct.unpack("<I", head[4:])[0]
                if tag == b"LIST" and (data := file.read(size))[:8] == b"INFOICMT":
                    return data[12:].rstrip(b"\0").decode(errors="replace")
                if tag != b"LIST":
                    file.seek(size + size % 2, os.SEEK_CUR)
    except OSError:
        pass
    return None


def pcm(audio: Any) -> Any:
    """float32 -> little-endian int16."""
    return np.clip(np.rint(np.asarray(audio) * 32767.0), -32768, 32767).astype("<i2")


def read_lines(path: str | os.PathLike[str]) -> list[Line]:
    """Every line of a speech file. FormatError naming line and field for anything else, and for a file without lines."""
    path = Path(path)
    try:
        text = path.read_text("utf-8")
    except OSError as error:
        raise FormatError(f"{path}: found {error.strerror or error}, accepted is a .jsonl file of speech") from error
    except UnicodeDecodeError as error:
        raise FormatError(f"{path}: found byte {error.object[error.start]:#x}, accepted is UTF-8 text") from error
    lines = []
    for number, line in enumerate(text.splitlines(), 1):
        if not line.strip():
            continue
        where = f"{path}, line {number}"
        try:
            row = json.loads(line)
        except ValueError:
            row = None
        if not isinstance(row, dict):
            raise FormatError(f'{where}: found no JSON object, accepted is one with fields "audio" and "text"')
        for field in ("audio", "text"):
            found = row.get(field)
            if not isinstance(found, str) or not found.strip():
                said = "nothing" if found is None else "an empty string" if found == "" else repr(found)[:40]
                raise FormatError(f"{where}: {field}: found {said}, accepted is a string")
        lines.append(Line(path.parent / row["audio"], row["text"], where))
    if not lines:
        raise FormatError(f'{path}: found no line, accepted are lines {{"audio": PATH, "text": TRANSCRIPT}}')
    return lines


class Listener:
    """A feature extractor and a tokenizer, and the tokens that a transcript begins and ends with."""

    def __init__(self, extractor: Any, tokenizer: Any, prefix: list[int], end: int, most: int) -> None:
        self.extractor, self.tokenizer, self.prefix, self.end = extractor, tokenizer, prefix, end
        self.most = most  # tokens, prefix and end counted
        self.rate: int = extractor.sampling_rate

    @classmethod
    def of(cls, model: Any, directory: str | os.PathLike[str]) -> Listener:
        """Those of a model directory. FormatError where there is none, or where the model takes no speech."""
        from transformers import AutoFeatureExtractor, AutoTokenizer

        if not takes_speech(model):
            raise FormatError(f"{directory}: found {type(model).__name__}, accepted with speech is Whisper")
        try:
            extractor = AutoFeatureExtractor.from_pretrained(directory, local_files_only=True)  # type: ignore[no-untyped-call]
            tokenizer = AutoTokenizer.from_pretrained(directory, local_files_only=True)
        except (OSError, ValueError, KeyError) as error:
            told = (str(error).strip() or type(error).__name__).splitlines()[0]
            raise FormatError(f"{directory}: found no feature extractor and tokenizer that load ({told})") from error
        settings, config = model.generation_config, model.config
        prefix = [_first(settings, config, "decoder_start_token_id")]
        for table, choice, usual in (("lang_to_id", "language", "<|en|>"), ("task_to_id", "task", "transcribe")):
            known = getattr(settings, table, None)
            if known:
                word = getattr(settings, choice, None) or usual
                if word not in known:
                    raise FormatError(f"{directory}: {choice}: found {word!r}, accepted are {', '.join(known)}")
                prefix.append(int(known[word]))
        if getattr(settings, "no_timestamps_token_id", None) is not None:
            prefix.append(int(settings.no_timestamps_token_id))
        return cls(extractor, tokenizer, prefix, _first(settings, config, "eos_token_id"), config.max_target_positions)

    def features(self, line: Line) -> Tensor:
        """Log-mel features float32 [1, mels, frames] of the first 30 s (or what the extractor is set to), zeros after."""
        found = self.extractor(line.samples(self.rate), sampling_rate=self.rate, return_tensors="pt")
        features: Tensor = found["input_features"]
        return features

    def tokens(self, line: Line) -> list[int]:
        """The transcript with a blank before it, as speech recognisers write, and the end."""
        ids = self.tokenizer(" " + " ".join(line.text.split()), add_special_tokens=False)["input_ids"]
        count = len(self.prefix) + len(ids)
        if count > self.most:
            raise FormatError(f"{line.where}: text: found {count} tokens, accepted are at most {self.most}")
        return [*ids, self.end]

    def call(self, line: Line) -> dict[str, Tensor]:
        """What the model is called with to predict every token of the transcript from those before it."""
        ids = torch.tensor([[*self.prefix, *self.tokens(line)[:-1]]])
        return {"input_features": self.features(line), "decoder_input_ids": ids}

    def heard(self, line: Line) -> Tensor:
        """bool [1, positions]: the encoder's positions that statistics are taken of: those with audio, and every fourth of
        the silence behind it that fills up the 30 s, to its end. Nats a token that W4A8 of the encoder alone cost
        Whisper-base with 24 clips: this .0098, all positions .0137, audio and as much silence .0176 (2026-11-30)."""
        positions = self.extractor.nb_max_frames // 2  # two frames a position
        speech = -(-len(line.samples(self.rate)) // (2 * self.extractor.hop_length))
        at = torch.arange(positions)[None]
        heard: Tensor = (at < speech) | (at % SILENCE == 0)
        return heard

    def inputs(self, path: Path) -> Iterator[tuple[dict[str, Tensor], Tensor]]:
        """``call`` and ``heard`` for every line of a speech file, whose form is checked before the first."""
        for line in read_lines(path):
            yield self.call(line), self.heard(line)


def takes_speech(model: Any) -> bool:
    """Whether a model is called with ``input_features`` and answers with tokens."""
    kind = getattr(getattr(model, "config", None), "model_type", None)
    return getattr(model, "main_input_name", None) == "input_features" and kind == "whisper"


def _first(settings: Any, config: Any, key: str) -> int:
    found = getattr(settings, key, None)
    found = getattr(config, key, None) if found is None else found
    if isinstance(found, list):
        found = found[0]
    if not isinstance(found, int):
        raise FormatError(f"generation_config.json: {key}: found {found!r}, accepted is a token id")
    return found
