"""An OmniVoice of a directory, and the voices that it clones: what speaking, quantizing, profiling and benches share."""

from __future__ import annotations

import json
import os
import warnings
import wave
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

from lowbit.models.load import local_directory
from lowbit.models.speech import read_wav
from lowbit.ops_cuda import device_there
from lowbit.types import FormatError

RATE = 24000
SILENT = 10 ** (-50 / 20)  # RMS at or below which nothing is heard: where OmniVoice itself cuts
INSTALL = "accepted after pip install lowbit[speech] (beside a torch of your own: docs/omnivoice.md)"


class Line(NamedTuple):
    """A text to speak and whom it should sound like; ``where`` names it for errors."""

    text: str
    ref_audio: Path | None = None  # None: the model picks a voice
    ref_text: str | None = None
    duration: float | None = None  # seconds; None: the model's estimate
    language: str | None = None
    where: str = "--text"


def package() -> Any:
    """The package omnivoice. FormatError where it is not installed, or not importable."""
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", RuntimeWarning)  # pydub misses ffmpeg, which nothing here asks for
            import omnivoice
    except (ImportError, OSError) as error:  # torchaudio's own libraries need another build of torch
        told = " ".join(str(error).split())[:120]
        raise FormatError(f"omnivoice: found no package that can be imported ({told}), {INSTALL}") from error
    return omnivoice


def is_omnivoice(path: Path) -> bool:
    """Whether a directory says that it holds an OmniVoice."""
    try:
        config = json.loads((path / "config.json").read_text("utf-8"))
    except (OSError, ValueError):
        return False
    return isinstance(config, dict) and config.get("model_type") == "omnivoice"


def load_omnivoice(
    path: str | os.PathLike[str], device: str | torch.device = "cpu", dtype: torch.dtype | None = None
) -> Any:
    """The model with its tokenizers, from a directory or a cached hub id; float16 on CUDA and float32 elsewhere where
    ``dtype`` is None. FormatError for what is no OmniVoice, and for a device that is not there."""
    folder, kind = local_directory(path), device_there(device, "--device")
    if not is_omnivoice(folder):
        raise FormatError(f"{folder}: config.json: found no model_type 'omnivoice', accepted is a directory with one")
    home = package()
    if dtype is None:
        dtype = torch.float16 if kind.type == "cuda" else torch.float32
    from transformers.utils import logging

    quiet = logging.is_progress_bar_enabled()
    logging.disable_progress_bar()  # type: ignore[no-untyped-call]
    try:
        return home.OmniVoice.from_pretrained(str(folder), device_map=str(device), dtype=dtype)
    finally:
        if quiet:
            logging.enable_progress_bar()  # type: ignore[no-untyped-call]


def is_trained(model: Any) -> bool:
    """False for weights as a random start leaves them: every norm of the stack is exactly 1."""
    return any(not bool((block.input_layernorm.weight == 1).all()) for block in model.llm.layers)


# -- references -----------------------------------------------------------------------------------------------------


def read_reference(path: str | os.PathLike[str], where: str = "") -> tuple[Tensor, int]:
    """(float32 [1, samples], rate) of a reference; the model resamples it where the rate is another than its own. FormatError for a file that cannot be read, is empty or silent."""
    name = f"{where}{': ' if where else ''}{os.fspath(path)}"
    try:
        samples, rate = read_wav(Path(path))
    except (OSError, EOFError, wave.Error, RuntimeError, ValueError) as error:
        told = "no such file" if isinstance(error, FileNotFoundError) else str(error) or type(error).__name__
        raise FormatError(f"{name}: reference: found {told}, accepted is a wav (or what soundfile reads)") from error
    heard = torch.from_numpy(samples)[None]
    if rate < 1000 or heard.shape[1] < rate // 5:
        found = f"{heard.shape[1]} samples at {rate} Hz"
        raise FormatError(f"{name}: reference: found {found}, accepted is at least 0.2 s of at least 1 kHz")
    if not bool(torch.isfinite(heard).all()):
        raise FormatError(f"{name}: reference: found samples that are no numbers, accepted are finite ones")
    loudness = float(heard.square().mean().sqrt())
    if loudness <= SILENT:
        raise FormatError(
            f"{name}: reference: found silence (RMS {loudness:.1e}), accepted is a voice above {SILENT:.1e} of full scale"
        )
    return heard, rate


def made_up_voice(seconds: float) -> Tensor:
    """Float32 [1, samples] at 24 kHz: a voiced sound whose pitch and loudness wander, so that nothing trims it away. The
    same samples every time."""
    t = torch.arange(int(RATE * seconds), dtype=torch.float64) / RATE
    phase = torch.cumsum(2 * torch.pi * (140 + 25 * torch.sin(9 * t)) / RATE, 0)
    buzz = sum(torch.sin(k * phase) / k for k in range(1, 9))
    return (0.06 * buzz * (0.6 + 0.4 * torch.sin(17 * t))).float()[None]


def voice_of(model: Any, line: Line, made_up: float | None = None) -> Any:
    """The model's prompt for a line's reference; ``made_up`` seconds of a made-up voice, or None, where it has none."""
    if line.ref_audio is None:
        if made_up is None:
            return None
        return model.create_voice_clone_prompt((made_up_voice(made_up), RATE), ref_text="The harbour was quiet.")
    heard = read_reference(line.ref_audio, line.where)
    if line.ref_text is None or not line.ref_text.strip():
        raise FormatError(f"{line.where}: ref_text: found nothing, accepted is what {line.ref_audio} says")
    try:
        return model.create_voice_clone_prompt(heard, ref_text=line.ref_text)
    except ValueError as error:
        raise FormatError(f"{line.where}: {line.ref_audio}: reference: found {error}") from error


# -- lines ----------------------------------------------------------------------------------------------------------


def read_lines(path: str | os.PathLike[str], base: Line | None = None) -> list[Line]:
    """Every line of a file: of ``.jsonl`` an object {"text", and optionally "ref_audio", "ref_text", "duration",
    "language"}, a relative path beginning at the folder of the file; of any other file its text. What a line does not
    say, ``base`` does. FormatError naming line and field, and for a file without lines."""
    path, base = Path(path), base or Line("")
    try:
        text = path.read_text("utf-8")
    except OSError as error:
        raise FormatError(f"{path}: found {error.strerror or error}, accepted is a .jsonl or text file") from error
    except UnicodeDecodeError as error:
        raise FormatError(f"{path}: found byte {error.object[error.start]:#x}, accepted is UTF-8 text") from error
    found = list(_lines(path, text, base))
    if not found:
        raise FormatError(f'{path}: found no line, accepted are texts, or lines {{"text": ..., "ref_audio": PATH}}')
    return found


def _lines(path: Path, text: str, base: Line) -> Iterator[Line]:
    for number, line in enumerate(text.splitlines(), 1):
        where = f"{path}, line {number}"
        if not line.strip():
            continue
        if path.suffix != ".jsonl":
            yield base._replace(text=line.strip(), where=where)
            continue
        try:
            row = json.loads(line)
        except ValueError:
            row = None
        if not isinstance(row, dict):
            raise FormatError(f'{where}: found no JSON object, accepted is one with a field "text"')
        for field in ("text", "ref_audio", "ref_text", "language"):
            value = row.get(field)
            if value is not None and not isinstance(value, str):
                raise FormatError(f"{where}: {field}: found {repr(value)[:40]}, accepted is a string")
        if not (row.get("text") or "").strip():
            raise FormatError(f"{where}: text: found nothing, accepted is a text with something to say")
        seconds = row.get("duration")
        if seconds is not None and (
            isinstance(seconds, bool) or not isinstance(seconds, (int, float)) or not seconds > 0
        ):
            raise FormatError(f"{where}: duration: found {seconds!r}, accepted is a number of seconds above 0")
        yield base._replace(
            text=row["text"], where=where, duration=None if seconds is None else float(seconds),
            language=row.get("language", base.language), ref_text=row.get("ref_text", base.ref_text),
            ref_audio=path.parent / row["ref_audio"] if row.get("ref_audio") else base.ref_audio,
        )  # fmt: skip
