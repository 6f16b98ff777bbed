"""OmniVoice from the command line: ``lowbit speak``, ``quantize`` and ``profile --accelerate`` on a tiny model."""

from __future__ import annotations

import json
import wave
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import tiny_omnivoice as tiny
from lowbit import omnivoice, reference
from lowbit.bench import rtf_quality
from lowbit.bench.rtf_set import Sample
from lowbit.checkpoint import open_checkpoint
from lowbit.cli import main
from lowbit.formats import quantized_layers, read_layer
from lowbit.layouts import mma_tiles
from lowbit.models.omnivoice import Line, load_omnivoice, read_lines, read_reference
from lowbit.models.omnivoice_quantize import decoding_inputs, moments, quantize_omnivoice
from lowbit.models.speech import read_wav, write_wav
from lowbit.types import FormatError

pytest.importorskip("transformers")
PROMPTS = [{"text": tiny.TEXT, "ref_audio": "voice.wav", "ref_text": "The harbour was quiet."}, {"text": "Two words."}]


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model, a voice, prompts."""
    return tiny.place(tmp_path_factory.mktemp("speak"), "prompts.jsonl", PROMPTS)


@pytest.fixture(scope="module")
def model(place: Path) -> Any:
    return load_omnivoice(place / "model")


@pytest.fixture(scope="module")
def quantized(place: Path) -> Path:
    command = ["quantize", str(place / "model"), str(place / "w4a4"), "--scheme", "w4a4", "--tokens", "1500"]
    assert main([*command, "--calibration", str(place / "prompts.jsonl"), "--json"]) == 0
    return place / "w4a4"


def speak(place: Path, *arguments: str) -> int:
    return main(["speak", "--model", str(place / "model"), "--steps", "2", *arguments])


def heard(path: Path) -> np.ndarray:
    samples, rate = read_wav(path)
    assert rate == 24000
    return samples


# -- speak ----------------------------------------------------------------------------------------------------------


def test_a_line_is_spoken_as_the_model_speaks_it(place: Path, model: Any, tmp_path: Path) -> None:
    out = tmp_path / "new" / "out.wav"
    voice = ("--ref", str(place / "voice.wav"), "--ref-text", "The harbour was quiet.")
    assert speak(place, *voice, "--text", tiny.TEXT, "--duration", "1.2", "--seed", "5", "-o", str(out)) == 0
    torch.manual_seed(5)
    prompt = model.create_voice_clone_prompt(read_reference(place / "voice.wav"), ref_text="The harbour was quiet.")
    want = model.generate(text=tiny.TEXT, voice_clone_prompt=prompt, duration=1.2, num_step=2)[0]
    np.testing.assert_allclose(heard(out), want, rtol=0, atol=1 / 32767)
    with wave.open(str(out)) as file:
        assert (file.getnchannels(), file.getsampwidth()) == (1, 2)


def test_many_lines_are_many_files_each_as_by_itself(
    place: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "all"
    assert speak(place, "--lines", str(place / "prompts.jsonl"), "-o", str(out), "--json", "--precision", "w8a8") == 0
    told = json.loads(capsys.readouterr().out)
    assert [Path(row["file"]).name for row in told["lines"]] == ["0001.wav", "0002.wav"]
    assert told["rtf"] == pytest.approx(told["took"] / told["seconds"])
    assert speak(place, "--text", "Two words.", "-o", str(tmp_path / "one.wav"), "--precision", "w8a8") == 0
    np.testing.assert_array_equal(heard(out / "0002.wav"), heard(tmp_path / "one.wav"))


def test_another_rate_is_resampled_with_a_note(place: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    write_wav(tmp_path / "slow.wav", tiny.voice(rate=16000)[0].numpy(), 16000)
    reference = ("--ref", str(tmp_path / "slow.wav"), "--ref-text", "Quiet.")
    assert speak(place, *reference, "--text", "Hm.", "-o", str(tmp_path / "a.wav")) == 0
    assert "slow.wav: 16000 Hz, resampled to 24000 Hz" in capsys.readouterr().err


def test_what_cannot_be_spoken_is_one_line(place: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    silent, short, noise = (tmp_path / name for name in ("silent.wav", "short.wav", "noise.wav"))
    write_wav(silent, np.zeros(24000, np.float32), 24000)
    write_wav(short, np.full(100, 0.5, np.float32), 24000)
    noise.write_bytes(b"no audio at all")
    out, said = ("-o", str(tmp_path / "out.wav")), ("--text", "Fine.")
    (tmp_path / "bad.jsonl").write_text('{"text": " "}')
    (tmp_path / "half.jsonl").write_text(json.dumps({"text": "Fine.", "ref_audio": str(place / "voice.wav")}))
    cases: list[tuple[tuple[str, ...], str]] = [
        (("--text", " ", *out), "--text: found ' '"),
        (out, "accepted is one of --text TEXT and --lines FILE"),
        ((*said, "-o", str(tmp_path)), "accepted with --text is the name of a .wav file"),
        ((*said, *out, "--ref", str(silent), "--ref-text", "x"), "found silence"),
        ((*said, *out, "--ref", str(short), "--ref-text", "x"), "found 100 samples at 24000 Hz"),
        ((*said, *out, "--ref", str(noise), "--ref-text", "x"), "noise.wav: reference: found"),
        ((*said, *out, "--ref", str(tmp_path / "no.wav"), "--ref-text", "x"), "no.wav: reference: found no such file"),
        ((*said, *out, "--ref", str(silent)), "--ref-text: found nothing"),
        ((*said, *out, "--duration", "0"), "--duration: found 0"),
        ((*said, *out, "--weights", str(tmp_path / "nowhere")), "nowhere: path: found nothing there"),
        (("--lines", str(tmp_path / "bad.jsonl"), "-o", str(tmp_path)), "bad.jsonl, line 1: text: found nothing"),
        (("--lines", str(tmp_path / "half.jsonl"), "-o", str(tmp_path)), "line 1: ref_text: found nothing"),
    ]
    for arguments, message in cases:
        assert speak(place, *arguments) == 2, arguments
        err = capsys.readouterr().err
        assert message in err and err.count("\n") == 1, err
    assert not (tmp_path / "out.wav").exists()
    assert main(["speak", "--model", str(tmp_path), *said, *out]) == 2
    assert "found no config.json" in capsys.readouterr().err


def test_lines_of_a_file_inherit_what_they_do_not_say(tmp_path: Path) -> None:
    base = Line("", Path("v.wav"), "said", 2.0, "en")
    (tmp_path / "a.txt").write_text("One.\n\n Two. \n")
    first, second = read_lines(tmp_path / "a.txt", base)
    assert (first.text, second.text, second.ref_audio, second.duration) == ("One.", "Two.", Path("v.wav"), 2.0)
    (tmp_path / "a.jsonl").write_text('{"text": "One.", "ref_audio": "w.wav", "duration": 3, "language": "de"}')
    (only,) = read_lines(tmp_path / "a.jsonl", base)
    assert (only.ref_audio, only.ref_text, only.duration, only.language) == (tmp_path / "w.wav", "said", 3.0, "de")
    for text, message in (
        ("[1]", "no JSON object"),
        ('{"text": 3}', "text: found 3"),
        ('{"text": "a", "duration": -1}', "found -1"),
    ):
        (tmp_path / "a.jsonl").write_text(text)
        with pytest.raises(FormatError, match=message):
            read_lines(tmp_path / "a.jsonl")


# -- quantize -------------------------------------------------------------------------------------------------------


def test_calibration_is_what_the_stack_sees_without_its_padding(model: Any, place: Path) -> None:
    lines = read_lines(place / "prompts.jsonl")
    steps = 6
    seen: list[dict[str, torch.Tensor]] = []
    hook = model.llm.register_forward_pre_hook(lambda _, __, call: seen.append(call), with_kwargs=True)
    try:
        found = decoding_inputs(model, lines[:1], 10**9, steps=steps)
    finally:
        hook.remove()
    assert moments(32) == [0, 8, 16, 23, 31] and len(seen) == steps and len(found) == 2 * len(moments(steps))
    for call in (seen[i] for i in moments(steps)):
        rows, mask = call["inputs_embeds"], call["attention_mask"]
        length = int(mask[1, 0, 0].sum())
        assert length < rows.shape[1]
        for want in (rows[:1], rows[1:, :length]):  # the conditional row is the longest, so whole
            assert any(torch.equal(one["inputs_embeds"], want) for one in found)
    for one in found:
        length = one["inputs_embeds"].shape[1]
        assert one["attention_mask"].shape == (1, 1, length, length) and bool(one["attention_mask"].all())
    few = decoding_inputs(model, lines, 400, steps=steps)
    had = [call["inputs_embeds"].shape[1] for call in few]
    assert 400 <= sum(had) and sum(had[:-1]) < 400  # of the last call all


def test_a_checkpoint_is_of_the_stack_alone_and_says_whose_it_is(quantized: Path) -> None:
    checkpoint = open_checkpoint(quantized)
    settings = checkpoint.metadata
    assert settings is not None and "CC-BY-NC" in settings["licence"] and len(settings["base_sha256"]) == 64
    assert len(settings["linears"]) == 14 and all(name.startswith("llm.layers.") for name in settings["linears"])
    assert settings["method"] == "svdquant" and settings["rank"] == 16
    assert {key.split(".")[0] for key in checkpoint} == {"llm"}
    config = json.loads((quantized / "config.json").read_text())
    assert config["model_type"] == "omnivoice" and config["quantization_config"]["quant_method"] == "lowbit"


def test_calibrated_weights_run_and_cost_less_than_rounded_ones(model: Any, quantized: Path) -> None:
    sample = Sample("a", Line(tiny.TEXT), 1.2)
    omnivoice.accelerate(model)
    path = rtf_quality.path_of(omnivoice.engine_of(model), sample, None, 4, 0)
    found = []
    for weights in (None, quantized):
        omnivoice.restore(model)
        omnivoice.accelerate(model, weights, "w4a8" if weights is None else None)
        found.append(rtf_quality.of_engine(omnivoice.engine_of(model), path))
    assert omnivoice.engine_of(model).backbone.precisions["layers.0.mlp.up_proj"] == "w4a4"
    omnivoice.restore(model)
    assert 0 < found[1].kl < 0.5 * found[0].kl and found[1].top1 > 0.8


def test_a_checkpoint_of_another_model_is_refused_and_other_options_too(
    place: Path, quantized: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    tiny.write(tmp_path / "other", seed=1)
    spoken = ["speak", "--model", str(tmp_path / "other"), "--text", "Hm.", "-o", str(tmp_path / "a.wav")]
    assert main([*spoken, "--weights", str(quantized)]) == 2
    assert "base_sha256: found weights made from" in capsys.readouterr().err
    command = ["quantize", str(place / "model"), str(tmp_path / "out"), "--calibration", str(place / "prompts.jsonl")]
    for more, message in (
        (["--budget", "5"], "--budget: found 5.0 with an OmniVoice"),
        (["--head"], "--head: found True with an OmniVoice"),
        (["--scheme", "fp16"], "--scheme: found fp16"),
    ):
        assert main([*command, *more]) == 2
        assert message in capsys.readouterr().err
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize(("scheme", "bits"), [("w4a8", 8), ("w4a4", 4)])
def test_what_is_written_by_default_is_what_tensor_cores_read(
    place: Path, tmp_path: Path, scheme: str, bits: int
) -> None:
    quantize_omnivoice(place / "model", tmp_path, scheme, "rtn", progress=False)
    checkpoint = open_checkpoint(tmp_path)
    settings = checkpoint.metadata or {}
    for name in quantized_layers(checkpoint, "lowbit", settings):
        q = read_layer(checkpoint, name, "lowbit", settings)
        assert mma_tiles.refuses(q) is None and reference.two_level(q.scales) is not None
        assert q.activation is not None and q.activation.bits == bits


def test_rounding_needs_no_prompts(place: Path, model: Any, tmp_path: Path) -> None:
    report = quantize_omnivoice(place / "model", tmp_path / "rtn", "w8a8", "rtn", progress=False)
    assert len(report.rows) == 14
    omnivoice.accelerate(model, tmp_path / "rtn")
    assert set(omnivoice.engine_of(model).backbone.precisions.values()) == {"w8a8"}
    omnivoice.restore(model)


# -- profile --------------------------------------------------------------------------------------------------------


def test_profile_runs_the_engine_in_a_precision(
    place: Path, quantized: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    command = [
        "profile",
        "--omnivoice",
        str(place / "model"),
        "--steps",
        "2",
        "--audio",
        "0.5",
        "--no-stacks",
        "--json",
    ]
    for more in (["--accelerate", "w8a8"], ["--accelerate", "model"], ["--weights", str(quantized)]):
        assert main([*command, *more]) == 0
        assert json.loads(capsys.readouterr().out)["what"].endswith("accelerated")
    assert main([*command, "--accelerate", "w3a3"]) == 2
    assert "precision: found 'w3a3'" in capsys.readouterr().err
    assert main(["profile", str(place / "model"), "--accelerate", "w8a8"]) == 2
    assert "accepted with --omnivoice" in capsys.readouterr().err
