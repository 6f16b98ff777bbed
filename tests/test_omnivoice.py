"""lowbit.omnivoice on the real class with random weights: the same waveforms as stock, and undone without a trace."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import tiny_omnivoice as tiny
from lowbit import omnivoice

pytest.importorskip("transformers")
LONG = "The geese crossed. Nobody saw them. It rained all night."
CHUNKS = dict(audio_chunk_threshold=1.5, audio_chunk_duration=1.2)
# arguments of generate; "voice" adds the reference
CASES: dict[str, dict[str, Any]] = {
    "single": dict(text=tiny.TEXT, duration=1.2, voice=True),
    "batch": dict(text=[tiny.TEXT, "Short.", tiny.TEXT + " Then it rained."], voice=True),
    "auto": dict(text="Two words.", language="en"),
    "design": dict(text="Two words.", instruct="female, low pitch, british accent"),
    "long": dict(text=LONG, voice=True, **CHUNKS),
    "long, auto": dict(text=LONG, **CHUNKS),
    "two long, one short": dict(text=[LONG, "Hm.", LONG + " Still."], voice=True, **CHUNKS),
    "no guidance": dict(text=tiny.TEXT, duration=1.2, voice=True, guidance_scale=0.0),
    "drawn tokens": dict(text=[tiny.TEXT, "Short."], voice=True, class_temperature=0.7),
    "drawn tokens, long": dict(text=LONG, voice=True, class_temperature=0.7, **CHUNKS),
    "other settings": dict(
        text=tiny.TEXT, duration=1.2, voice=True, layer_penalty_factor=0.5, t_shift=0.7, denoise=False
    ),
    "one frame": dict(text="A.", duration=0.04),
    "more steps than slots": dict(text="A.", duration=0.04, num_step=12),
}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny.write(tmp_path_factory.mktemp("omnivoice"))


@pytest.fixture(scope="module")
def model(folder: Path) -> Any:
    found = tiny.load(folder)
    found.voice = tiny.prompt(found)
    return found


@pytest.fixture(autouse=True)
def _restored(model: Any) -> Any:
    yield
    omnivoice.restore(model)


def speak(model: Any, case: dict[str, Any], warm: bool, seed: int = 7) -> tuple[list[np.ndarray], float]:
    """Waveforms, and the number that the generator gives next."""
    settings = {"num_step": 6, "postprocess_output": False, "position_temperature": 5.0 if warm else 0.0, **case}
    if settings.pop("voice", False):
        settings["voice_clone_prompt"] = model.voice
    torch.manual_seed(seed)
    return model.generate(**settings), float(torch.rand(()))


@pytest.fixture(scope="module")
def stock(model: Any) -> Any:
    """What the model itself says, each case once."""
    known: dict[tuple[str, bool], tuple[list[np.ndarray], float]] = {}

    def say(name: str, warm: bool) -> tuple[list[np.ndarray], float]:
        assert "_generate_iterative" not in model.__dict__
        if (name, warm) not in known:
            known[name, warm] = speak(model, CASES[name], warm)
        return known[name, warm]

    return say


def assert_same(got: tuple[list[np.ndarray], float], want: tuple[list[np.ndarray], float]) -> None:
    assert len(got[0]) == len(want[0])
    for a, b in zip(got[0], want[0], strict=True):
        np.testing.assert_array_equal(a, b)
    assert got[1] == want[1]  # as many draws as stock


@pytest.mark.parametrize("warm", [False, True], ids=["greedy", "seeded"])
@pytest.mark.parametrize("name", CASES)
def test_waveforms_are_those_of_stock(model: Any, stock: Any, name: str, warm: bool) -> None:
    want = stock(name, warm)
    omnivoice.accelerate(model, chunk_tokens=8192)
    assert_same(speak(model, CASES[name], warm), want)
    assert omnivoice.engine_of(model).stats()["taken"]["plain"] >= 1
