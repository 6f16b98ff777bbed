"""What the voice engine refuses: each in one line, and the model is as it was. On the real class, tiny; devices are pretended."""

from __future__ import annotations

import copy
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import tiny_omnivoice as tiny
from lowbit import omnivoice, ops_cuda
from lowbit.engines import packed, packed_stack
from lowbit.engines.omnivoice_step import Step
from lowbit.models.omnivoice import Line, voice_of
from lowbit.models.speech import write_wav
from lowbit.types import FormatError
from test_omnivoice import CASES, assert_same, assert_untouched, save, speak, state

pytest.importorskip("transformers")


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Any:
    return tiny.ready(tiny.write(tmp_path_factory.mktemp("omnivoice")))


@pytest.fixture(autouse=True)
def _as_it_was(model: Any) -> Any:
    """Whatever a test asks for in vain, the model is as it was when it is restored."""
    before = state(model)
    yield
    omnivoice.restore(model)
    assert_untouched(model, before)


def refused(message: str, call: Callable[[], Any]) -> None:
    with pytest.raises(FormatError, match=message) as caught:
        call()
    assert "\n" not in str(caught.value)


def accelerate_refused(model: Any, message: str, *arguments: Any, **more: Any) -> None:
    """Refused, and at once as it was: not only after ``restore``."""
    before = state(model)
    refused(message, lambda: omnivoice.accelerate(model, *arguments, **more))
    assert_untouched(model, before)


# -- texts and references -------------------------------------------------------------------------------------------


@pytest.mark.parametrize("text", ["", " \n\t"])
def test_empty_texts(model: Any, text: str) -> None:
    want = speak(model, CASES["single"], True)
    omnivoice.accelerate(model, chunk_tokens=8192)
    refused(r"text\[1\]: found", lambda: speak(model, dict(text=["Fine.", text]), True))
    refused(r"text\[0\]: found", lambda: speak(model, dict(text=text, voice=True), True))
    assert_same(speak(model, CASES["single"], True), want)  # and it goes on


def test_references_that_cannot_be_read_or_heard(model: Any, tmp_path: Path) -> None:
    write_wav(tmp_path / "silent.wav", np.zeros(24000, np.float32), 24000)
    (tmp_path / "noise.wav").write_bytes(b"no audio at all")
    (tmp_path / "cut.wav").write_bytes(b"RIFF\x24\x00\x00\x00WAVEfmt ")
    write_wav(tmp_path / "slow.wav", np.full(900, 0.5, np.float32), 800)
    for name, message in (
        ("silent.wav", r"silent.wav: reference: found silence \(RMS 0"),
        ("noise.wav", "noise.wav: reference: found"),
        ("cut.wav", "cut.wav: reference: found"),
        ("none.wav", "none.wav: reference: found no such file"),
        ("slow.wav", "found 900 samples at 800 Hz, accepted is at least 0.2 s of at least 1 kHz"),
    ):
        refused(message, lambda name=name: voice_of(model, Line("Fine.", tmp_path / name, "x")))


def test_a_silent_reference_that_the_model_took(model: Any) -> None:
    """``preprocess_prompt=False`` cuts no silence, so that the model's own code makes a prompt of nothing."""
    silent = model.create_voice_clone_prompt((torch.zeros(1, 24000), 24000), ref_text="x", preprocess_prompt=False)
    assert silent.ref_rms == 0 and silent.ref_audio_tokens.shape[-1]
    broken = copy.copy(silent)
    broken.ref_rms = float("nan")
    omnivoice.accelerate(model)
    for voice, told in ((silent, "0.0"), (broken, "nan")):
        case = dict(text="Fine.", duration=0.2, voice_clone_prompt=voice)
        refused(rf"ref_audio\[0\]: found loudness {told}, accepted is", lambda case=case: speak(model, case, True))
    assert len(speak(model, dict(text="Fine."), False)[0]) == 1


def test_another_sample_rate_is_resampled_and_speaks_as_stock_does(model: Any, tmp_path: Path) -> None:
    write_wav(tmp_path / "slow.wav", tiny.voice(rate=16000)[0].numpy(), 16000)
    voice = voice_of(model, Line("Fine.", tmp_path / "slow.wav", "The harbour was quiet."))
    assert abs(voice.ref_audio_tokens.shape[-1] - model.voice.ref_audio_tokens.shape[-1]) <= 1  # as long as it lasts
    case = dict(text="Fine.", duration=0.4, voice_clone_prompt=voice)
    want = speak(model, case, True)
    omnivoice.accelerate(model)
    assert_same(speak(model, case, True), want)


# -- checkpoints ----------------------------------------------------------------------------------------------------


def test_checkpoints_of_other_models(model: Any, tmp_path: Path) -> None:
    same_shape = tiny.load(tiny.write(tmp_path / "seed", seed=1))
    save(same_shape, tmp_path / "other")
    accelerate_refused(
        model, "base_sha256: found weights made from .*, accepted is .*, this model's", tmp_path / "other"
    )
    wide = tiny.load(tiny.write(tmp_path / "sizes", intermediate_size=192))
    save(wide, tmp_path / "wide", base_sha256=None)
    with pytest.warns(UserWarning, match="names no base weights"):
        accelerate_refused(model, r"layers.0.mlp.gate_proj: found shape \[192, 64\]", tmp_path / "wide")
    deep = tiny.load(tiny.write(tmp_path / "layers", num_hidden_layers=3))
    save(deep, tmp_path / "deep", base_sha256=None)
    with pytest.warns(UserWarning, match="names no base weights"):
        accelerate_refused(model, r"weights: found 'layers.2.self_attn.q_proj'", tmp_path / "deep")
    (tmp_path / "empty").mkdir()
    accelerate_refused(model, "empty: files: found nothing, accepted is model.safetensors", tmp_path / "empty")


# -- devices --------------------------------------------------------------------------------------------------------


@pytest.fixture
def full(monkeypatch: pytest.MonkeyPatch) -> Callable[..., None]:
    """A CUDA device of 0.25 GiB."""
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device: (2**28, 2**34))

    def out_of_memory(*_: Any, **__: Any) -> None:
        raise torch.cuda.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB.\nMore lines.")

    return out_of_memory


@pytest.mark.parametrize(
    "more", [{}, {"precision": "w8a8", "free_originals": True}, {"precision": [(2, "fp32"), (None, "w8a8")]}]
)
@pytest.mark.parametrize("where", ["omnivoice.Graphs", "packed.product_of"], ids=["graphs", "second layer"])
def test_too_little_memory_at_the_start(
    model: Any, full: Callable[..., None], monkeypatch: pytest.MonkeyPatch, where: str, more: dict[str, Any]
) -> None:
    make, calls = packed.product_of, []

    def later(*arguments: Any) -> Any:
        calls.append(1)
        return make(*arguments) if len(calls) < 6 else full()

    monkeypatch.setattr(f"lowbit.engines.{where}", full if where.endswith("Graphs") else later)
    message = "memory: found 0.2 GiB free on cpu after a failed try, accepted is more: fewer or smaller buckets"
    accelerate_refused(model, message, **more)
    assert "_lowbit_engine" not in model.__dict__


@pytest.mark.parametrize("name", ["single", "long"])
def test_too_little_memory_for_an_utterance(
    model: Any, full: Callable[..., None], monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    want = speak(model, CASES[name], True)
    omnivoice.accelerate(model, chunk_tokens=8192, codec_frames=400)
    message = "memory: found 0.2 GiB free on cpu after a failed try, accepted is more: shorter texts, fewer at once"
    for place in ("lowbit.engines.omnivoice_step.Step.__call__", "lowbit.engines.omnivoice.decode"):
        with monkeypatch.context() as patch:
            patch.setattr(place, full)
            refused(message, lambda: speak(model, CASES[name], True))
    got = speak(model, CASES[name], True)  # and it goes on
    for a, b in zip(got[0], want[0], strict=True):
        np.testing.assert_allclose(a, b, rtol=0, atol=2e-5 * float(np.abs(b).max()))
    assert Step.__call__ is not full


@pytest.mark.parametrize("precision", ["w8a8", [(2, "fp32"), (None, "w4a8")], {"*.down_proj": "w4a4"}])
def test_a_chip_without_kernels(model: Any, monkeypatch: pytest.MonkeyPatch, precision: Any) -> None:
    resolve = packed_stack.resolve

    def on_a_t4(precision: Any, linears: Any, weights: Any, device: Any) -> Any:
        return resolve(precision, linears, weights, torch.device("cuda", 0))

    for module in ("packed", "omnivoice_stages"):
        monkeypatch.setattr(f"lowbit.engines.{module}.resolve", on_a_t4)
    monkeypatch.setattr(ops_cuda, "refuses", lambda device: "Tesla T4 has compute capability 7.5")
    accelerate_refused(model, "accepted here is 'fp32': Tesla T4 has compute capability 7.5", precision=precision)


def test_a_device_that_has_no_kernels_at_all(model: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    resolve = packed_stack.resolve
    monkeypatch.setattr(
        "lowbit.engines.omnivoice_stages.resolve",
        lambda p, linears, w, device: resolve(p, linears, w, torch.device("mps")),
    )
    accelerate_refused(model, "precision: found 'w8a8' on mps, accepted are cpu and cuda", precision="w8a8")
