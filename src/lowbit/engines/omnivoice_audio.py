"""OmniVoice's trimming of silence without a loop over 10 ms slices: the same samples out as its own pydub path.

What pydub means, in one place: time is whole milliseconds, a piece's length its frames in ms, rounded; a slice that rounding made
too long gets frames of 0; a slice is silent where its rounded-down RMS of int16 is at most -50 dBFS, which is 103.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

Samples = NDArray[np.int16]
LOUD = 104**2  # the smallest mean square whose rounded-down root is above -50 dBFS of 32768 (103.62)
STEP = 10  # ms between the slices that are looked at


class Piece:
    """int16 samples [T] at a rate, sliced as pydub slices them."""

    def __init__(self, samples: Samples, rate: int) -> None:
        self.samples, self.rate = samples, rate
        self.ms = round(1000 * (float(len(samples)) / rate))
        self._block = rate * STEP // 1000 if rate * STEP % 1000 == 0 else 1  # frames whose squares are summed at once
        self._sums: NDArray[np.float64] | None = None

    def frame(self, ms: int) -> int:
        return int(ms * (self.rate / 1000.0))

    def cut(self, start: int, end: int) -> Samples:
        """[start, end) in ms."""
        a, b = self.frame(min(start, self.ms)), self.frame(min(end, self.ms))
        found = self.samples[a:b]
        missing = b - a - len(found)
        return np.pad(found, (0, missing)) if missing > 0 and len(found) else found

    def silent(self, starts: NDArray[np.int64], length: int) -> NDArray[np.bool_]:
        """Which slices of ``length`` ms are silent. Sums of squares are whole numbers below 2^53, so exact in float64."""
        if self._sums is None:
            wide = np.pad(self.samples, (0, -len(self.samples) % self._block)).astype(np.float64)
            blocks = wide.reshape(-1, self._block)
            self._sums = np.concatenate([[0.0], np.cumsum(np.einsum("ij,ij->i", blocks, blocks))])
        scale = self.rate / 1000.0
        a = (np.minimum(starts, self.ms) * scale).astype(np.int64)
        b = (np.minimum(starts + length, self.ms) * scale).astype(np.int64)
        energy = self._until(b) - self._until(a)
        quiet: NDArray[np.bool_] = energy < LOUD * (b - a).astype(np.float64)
        return quiet | (b <= a)

    def _until(self, frames: NDArray[np.int64]) -> NDArray[np.float64]:
        """Sum of squares of everything before each frame."""
        assert self._sums is not None
        inside = np.minimum(frames, len(self.samples))
        whole = inside // self._block
        found: NDArray[np.float64] = self._sums[whole]
        for at in np.flatnonzero(inside % self._block):
            rest = self.samples[whole[at] * self._block : inside[at]].astype(np.float64)
            found[at] += rest @ rest
        return found


def silences(piece: Piece, least: int) -> list[list[int]]:
    """Ranges [start, end) in ms that are silent for at least ``least`` ms."""
    if piece.ms < least:
        return []
    last = piece.ms - least
    starts = np.arange(0, last + 1, STEP)
    if last % STEP:
        starts = np.append(starts, last)
    starts = starts[piece.silent(starts, least)]
    if not len(starts):
        return []
    apart = np.flatnonzero((np.diff(starts) != STEP) & (np.diff(starts) > least))
    begins, ends = starts[np.append(0, apart + 1)], starts[np.append(apart, len(starts) - 1)] + least
    return [[int(a), int(b)] for a, b in zip(begins, ends, strict=True)]


def loud(piece: Piece, least: int) -> list[list[int]]:
    """What lies between the silences, [start, end) in ms."""
    quiet = silences(piece, least)
    if not quiet:
        return [[0, piece.ms]]
    if quiet[0] == [0, piece.ms]:
        return []
    ends = [0, *(b for _, b in quiet)]
    found = [[begin, start] for begin, (start, _) in zip(ends, quiet)]
    if ends[-1] != piece.ms:
        found.append([ends[-1], piece.ms])
    return found[1:] if found[0] == [0, 0] else found


def shortened(piece: Piece, most: int) -> Samples:
    """Silences of more than ``most`` ms cut out of the middle, ``most`` ms kept around what is heard."""
    ranges = [[a - most, b + most] for a, b in loud(piece, most)]
    for one, other in zip(ranges, ranges[1:]):
        if other[0] < one[1]:
            one[1] = other[0] = (one[1] + other[0]) // 2
    parts = [piece.cut(max(a, 0), min(b, piece.ms)) for a, b in ranges]
    return np.concatenate([np.zeros(0, np.int16), *parts])


def without_lead(samples: Samples, rate: int, keep: int) -> Samples:
    """Silence at the beginning shortened to ``keep`` ms."""
    piece = Piece(samples, rate)
    starts = np.arange(0, piece.ms, STEP)
    heard = np.flatnonzero(~piece.silent(starts, STEP))
    begin = int(starts[heard[0]]) if len(heard) else piece.ms
    return piece.cut(max(0, begin - keep), piece.ms)


def remove_silence(
    audio: NDArray[np.float32], rate: int, mid_sil: int = 300, lead_sil: int = 100, trail_sil: int = 300
) -> NDArray[np.float32]:
    """float32 [1, T] -> [1, T'], as ``omnivoice.utils.audio.remove_silence`` (which works on more channels too)."""
    samples = (audio[0] * 32768.0).clip(-32768, 32767).astype(np.int16)
    if mid_sil > 0:
        samples = shortened(Piece(samples, rate), mid_sil)
    samples = without_lead(samples, rate, lead_sil)
    samples = without_lead(samples[::-1], rate, trail_sil)[::-1]
    return samples.astype(np.float32)[None] / np.float32(32768.0)


def post_process(model: Any, audio: NDArray[np.float32], rms: float | None, config: Any) -> Any:
    """In the place of OmniVoice._post_process_audio: this trimming, then the model's own volume, fades and padding."""
    if not config.postprocess_output or audio.shape[0] != 1:
        return type(model)._post_process_audio(model, audio, ref_rms=rms, gen_config=config)
    audio = remove_silence(audio, model.sampling_rate, mid_sil=500, lead_sil=100, trail_sil=100)
    after = _Untrimmed(config)
    return type(model)._post_process_audio(model, audio, ref_rms=rms, gen_config=after)


class _Untrimmed:
    """A generation config whose trimming was done."""

    postprocess_output = False

    def __init__(self, config: Any) -> None:
        self._config = config

    def __getattr__(self, name: str) -> Any:
        return getattr(self._config, name)
