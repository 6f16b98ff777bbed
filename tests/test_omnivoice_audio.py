"""Trimming of silence: sample for sample what OmniVoice's own pydub path gives."""

from __future__ import annotations

import warnings

import numpy as np
import pytest
from numpy.typing import NDArray

import tiny_omnivoice as tiny
from lowbit.engines.omnivoice_audio import remove_silence

pytest.importorskip("transformers")
RATE = 24000
QUIET, NEAR, HEARD = 0.0005, 103.5 / 32768, 0.05  # NEAR: around the limit itself


def bursts(seed: int, samples: int, levels: tuple[float, ...]) -> NDArray[np.float32]:
    """Noise whose level jumps at random times."""
    draw = np.random.default_rng(seed)
    wave, at = draw.standard_normal(samples), 0
    while at < samples:
        length = int(draw.integers(1, RATE * 3 // 2))
        wave[at : at + length] *= draw.choice(levels)
        at += length
    return wave.astype(np.float32)[None]


CASES = {
    "nothing": np.zeros((1, 0), np.float32),
    "one sample": np.full((1, 1), 0.5, np.float32),
    "11 frames, 0 ms": np.full((1, 11), 0.5, np.float32),
    "13 frames, 1 ms": np.full((1, 13), 0.5, np.float32),
    "silence": np.zeros((1, 3 * RATE + 7), np.float32),
    "short silence": np.zeros((1, RATE // 10), np.float32),
    "noise": bursts(0, 2 * RATE + 131, (HEARD,)),
    "silence at both ends": np.pad(bursts(1, RATE + 5, (HEARD,)), ((0, 0), (2 * RATE + 3, RATE + 11))),
    "silence before": np.pad(bursts(1, RATE, (HEARD,)), ((0, 0), (2 * RATE, 0))),
    "a gap": np.concatenate([bursts(2, RATE, (HEARD,)), np.zeros((1, 3 * RATE), np.float32), bursts(3, RATE, (HEARD,))], 1),
    "too loud": bursts(4, RATE, (3.0,)),
    "the limit": np.full((1, RATE), NEAR, np.float32),
    "one click": np.eye(1, 2 * RATE, RATE, dtype=np.float32),
}  # fmt: skip
CASES |= {f"bursts {seed}": bursts(seed, 4 * RATE + 97 * seed, (0.0, QUIET, HEARD)) for seed in range(12)}
CASES |= {f"near bursts {seed}": bursts(seed, 3 * RATE + 37 * seed, (QUIET, NEAR, HEARD)) for seed in range(8)}


@pytest.mark.parametrize("name", CASES)
def test_the_samples_are_those_of_pydub(name: str) -> None:
    tiny.package()
    from omnivoice.utils.audio import remove_silence as stock

    for settings in ((500, 100, 100), (200, 100, 200), (0, 100, 300)):
        want = stock(CASES[name], RATE, *settings)
        got = remove_silence(CASES[name], RATE, *settings)
        assert got.dtype == want.dtype == np.float32
        np.testing.assert_array_equal(got, want)


@pytest.mark.parametrize("rate", [16000, 44100, 22050])
def test_other_rates(rate: int) -> None:
    tiny.package()
    from omnivoice.utils.audio import remove_silence as stock

    with warnings.catch_warnings():
        warnings.simplefilter("error", RuntimeWarning)
        got = remove_silence(CASES["bursts 3"], rate, 500, 100, 100)
    np.testing.assert_array_equal(got, stock(CASES["bursts 3"], rate, 500, 100, 100))
