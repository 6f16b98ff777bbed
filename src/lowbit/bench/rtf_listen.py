"""``listen.html``: what every engine said, side by side: a player, the waveform, the spectrogram. One file, nothing from
elsewhere: the audio is in it."""

from __future__ import annotations

import base64
import io
import struct
import tempfile
import zlib
from collections.abc import Mapping, Sequence
from html import escape
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import numpy as np
import torch

from lowbit.models.omnivoice import RATE
from lowbit.models.speech import pcm, write_wav
from lowbit.prove import report, svg

WIDE, TALL = 300, 56  # of a picture, pixels
BINS = 80  # rows of a spectrogram
_STYLE = """<style>
.row { display: flex; flex-wrap: wrap; gap: 1rem; margin: .5rem 0 2rem; }
.row figure { margin: 0; width: 300px; } .row audio { width: 300px; height: 34px; }
.row img { width: 300px; height: 80px; display: block; image-rendering: auto; }
</style>"""


def page(title: str, note: str, rows: Sequence[tuple[str, str, Mapping[str, Any]]], facts: Mapping[str, str]) -> str:
    """The page. ``rows``: (name, text, {engine: float32 [samples]}); ``facts``: {engine: what to say under it}."""
    parts = [_STYLE, report.paragraph(note)]
    for name, text, said in rows:
        top = max((float(np.abs(audio).max()) for audio in said.values() if len(audio)), default=0.0) or 1.0
        cells = "\n".join(_cell(engine, audio, top, facts.get(engine, "")) for engine, audio in said.items())
        parts.append(f'<h2>{escape(name)}</h2>\n{report.paragraph(text)}\n<div class="row">\n{cells}\n</div>')
    return report.page(title, parts)


def _cell(engine: str, audio: Any, top: float, fact: str) -> str:
    head = f"<figure><figcaption><b>{escape(engine)}</b> {escape(fact)}</figcaption>"
    if not len(audio):
        return f"{head}<p>nothing was heard: all of it was cut as silence</p></figure>"
    kind, data = encoded(audio)
    player = f'<audio controls preload="none" src="data:audio/{kind};base64,{data}"></audio>'
    picture = base64.b64encode(png(spectrogram(audio))).decode()
    seen = f'<img alt="spectrogram of {escape(engine)}" src="data:image/png;base64,{picture}">'
    return f"{head}\n{player}\n{waveform(audio, top)}\n{seen}\n</figure>"


def encoded(audio: Any) -> tuple[str, str]:
    """(kind, base64): FLAC where soundfile is there, else WAV, 16 bits at 24 kHz."""
    if find_spec("soundfile") is not None:
        import soundfile

        buffer = io.BytesIO()
        soundfile.write(buffer, pcm(audio), RATE, format="FLAC", subtype="PCM_16")
        return "flac", base64.b64encode(buffer.getvalue()).decode()
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "a.wav"
        write_wav(path, audio, RATE)
        return "wav", base64.b64encode(path.read_bytes()).decode()


def waveform(audio: Any, top: float) -> str:
    """Least and largest sample of every column, as one SVG path; ``top`` reaches the edge."""
    parts = np.array_split(np.asarray(audio, dtype=np.float32), min(WIDE, len(audio)))
    middle = TALL / 2
    path = "".join(
        f"M{x} {middle - middle * float(part.max()) / top:.1f}V{middle - middle * float(part.min()) / top:.1f}"
        for x, part in enumerate(parts)
    )
    drawn = f'<path d="{path}" stroke="{svg.COLOURS[0]}" fill="none"/>'
    size = f'width="{WIDE}" height="{TALL}" viewBox="0 0 {WIDE} {TALL}"'
    return f'<svg {size} role="img" aria-label="waveform">{drawn}</svg>'


def spectrogram(audio: Any) -> Any:
    """uint8 [80, <= 300]: dB below the loudest, 80 of them, low frequencies at the bottom."""
    x = torch.from_numpy(np.array(audio, dtype=np.float32))  # a copy: it may be read-only
    if len(x) < 1024:
        x = torch.nn.functional.pad(x, (0, 1024 - len(x)))
    hop = max(256, -(-len(x) // WIDE))
    power = torch.stft(x, 1024, hop, window=torch.hann_window(1024), return_complex=True).abs().square()
    bands = power[: 512 // BINS * BINS].reshape(BINS, -1, power.shape[1]).mean(1)
    db = 10 * torch.log10(bands / bands.max().clamp_min(1e-20) + 1e-8)
    return ((db / 80 + 1).clamp(0, 1) * 255).to(torch.uint8).flip(0).numpy()


def png(pixels: Any) -> bytes:
    """uint8 [H, W] as a grey PNG (RFC 2083), loud dark."""
    height, width = pixels.shape

    def chunk(kind: bytes, data: bytes) -> bytes:
        return struct.pack(">I", len(data)) + kind + data + struct.pack(">I", zlib.crc32(kind + data))

    rows = b"".join(b"\0" + (255 - row).tobytes() for row in pixels)
    header = struct.pack(">IIBBBBB", width, height, 8, 0, 0, 0, 0)
    return b"\x89PNG\r\n\x1a\n" + chunk(b"IHDR", header) + chunk(b"IDAT", zlib.compress(rows, 9)) + chunk(b"IEND", b"")
