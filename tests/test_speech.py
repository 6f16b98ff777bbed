"""Speech: lines and wavs, likelihood and word errors of a tiny Whisper, and the commands over it."""

from __future__ import annotations

import json
import math
import struct
import wave
from functools import lru_cache
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import lowbit
import samples
from lowbit.cli import main
from lowbit.models.calibration_inputs import read_calibration
from lowbit.models.speech import Listener, read_lines, read_wav
from lowbit.prove.speech import distance, likelihood, word_errors
from lowbit.types import FormatError

transformers = pytest.importorskip("transformers")


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("speech")
    samples.whisper(path / "model")
    samples.speech(path)
    return path


@pytest.fixture(scope="module")
def quantized(folder: Path) -> Path:
    arguments = [
        "quantize",
        folder / "model",
        folder / "q",
        "--scheme",
        "w4a4",
        "--calibration",
        folder / "speech.jsonl",
    ]
    assert main([*map(str, arguments), "--json"]) == 0
    return folder / "q"


def test_lines_become_calls_of_the_model(folder: Path) -> None:
    model = lowbit.load(folder / "model")
    assert type(model).__name__ == "WhisperForConditionalGeneration"
    listener = Listener.of(model, folder / "model")
    assert listener.prefix == [1] and listener.end == 2 and listener.rate == 16000
    batches = read_calibration(folder / "speech.jsonl", listener)
    assert [b.tokens for b in batches] == [1 + len(" one fox"), 1 + len(" two lazy dogs"), 1 + len(" and a third line")]
    first = batches[0].inputs
    assert first["input_features"].shape == (1, 16, 100) and first["decoder_input_ids"][0, 0] == 1
    assert listener.tokenizer.decode(first["decoder_input_ids"][0, 1:]) == " one fox"
    # 0.4 s of 1 s: 20 positions of 50, and 20, 24, .. 48 of the silence
    assert batches[0].mask is not None and batches[0].mask.shape == (1, 50)
    assert batches[0].mask[0].nonzero()[:, 0].tolist() == [*range(20), *range(20, 50, 4)]
    assert [b.first for b in read_calibration(folder / "speech.jsonl", listener, tokens=10)] == [0, 1]
    settings = model.generation_config
    settings.lang_to_id, settings.task_to_id, settings.no_timestamps_token_id = {"<|en|>": 7}, {"transcribe": 8}, 9
    assert Listener.of(model, folder / "model").prefix == [1, 7, 8, 9]
    settings.language = "<|xx|>"
    with pytest.raises(FormatError, match=r"language: found '<\|xx\|>', accepted are <\|en\|>"):
        Listener.of(model, folder / "model")


@pytest.mark.parametrize(
    ("line", "match"),
    [
        ("{", "line 2: found no JSON object, accepted is one with fields"),
        ("[1]", "line 2: found no JSON object"),
        ('{"text": "a"}', "line 2: audio: found nothing, accepted is a string"),
        ('{"audio": "0.wav"}', "line 2: text: found nothing, accepted is a string"),
        ('{"audio": "0.wav", "text": 3}', "line 2: text: found 3, accepted is a string"),
        ('{"audio": "0.wav", "text": ""}', "line 2: text: found an empty string"),
        ('{"audio": "none.wav", "text": "a"}', "line 2: audio: found no such file, accepted is a wav of 16000 Hz"),
        ('{"audio": "slow.wav", "text": "a"}', "line 2: audio: found 8000 Hz, accepted is 16000 Hz"),
        ('{"audio": "empty.wav", "text": "a"}', "line 2: audio: found no sample"),
        ('{"audio": "text.wav", "text": "a"}', r"line 2: audio: found text.wav \(.+\), accepted is a wav"),
        ('{"audio": "0.wav", "text": "' + "long " * 20 + '"}', "line 2: text: found 101 tokens, accepted are at most 64"),
    ],
)  # fmt: skip
def test_bad_lines_name_line_and_field(line: str, match: str, folder: Path, tmp_path: Path) -> None:
    for name, seconds, rate in (("0", 0.1, 16000), ("slow", 0.1, 8000), ("empty", 0, 16000)):
        samples.wav(tmp_path / f"{name}.wav", seconds, rate)
    (tmp_path / "text.wav").write_text("no wav")
    (tmp_path / "s.jsonl").write_text(json.dumps({"audio": "0.wav", "text": "good"}) + "\n" + line + "\n")
    listener = Listener.of(lowbit.load(folder / "model"), folder / "model")
    with pytest.raises(FormatError, match=match) as caught:
        read_calibration(tmp_path / "s.jsonl", listener)
    assert str(tmp_path / "s.jsonl") in str(caught.value) and "\n" not in str(caught.value)


def test_files_that_are_no_lines(tmp_path: Path) -> None:
    with pytest.raises(FormatError, match="none.jsonl: found No such file"):
        read_lines(tmp_path / "none.jsonl")
    (tmp_path / "a.jsonl").write_text("\n\n")
    with pytest.raises(FormatError, match="found no line, accepted are lines"):
        read_lines(tmp_path / "a.jsonl")
    (tmp_path / "a.jsonl").write_bytes(b"\xff\n")
    with pytest.raises(FormatError, match="found byte 0xff"):
        read_lines(tmp_path / "a.jsonl")


@pytest.mark.parametrize("width", (1, 2, 3, 4))
def test_wavs_of_every_width(width: int, tmp_path: Path) -> None:
    want = np.array([[0.5, -0.25], [-1.0, 0.75], [0.0, 0.125]])
    whole = np.round(want.reshape(-1) * 2 ** (8 * width - 1)).astype(np.int64).clip(max=2 ** (8 * width - 1) - 1)
    data = b"".join(
        struct.pack("<B", int(v) + 128) if width == 1 else int(v).to_bytes(width, "little", signed=True) for v in whole
    )
    with wave.open(str(tmp_path / "a.wav"), "wb") as file:
        file.setnchannels(2)
        file.setsampwidth(width)
        file.setframerate(16000)
        file.writeframes(data)
    found, rate = read_wav(tmp_path / "a.wav")
    assert rate == 16000 and found.shape == (3,)
    assert np.allclose(found, want.mean(1), atol=2 ** -(8 * width - 2))


@torch.no_grad()
def test_the_likelihood_is_that_of_every_token_from_those_before_it(folder: Path) -> None:
    """By hand: the model is called once for every token, with the tokens before it alone."""
    model = lowbit.load(folder / "model")
    listener = Listener.of(model, folder / "model")
    lines = read_lines(folder / "speech.jsonl")
    total, count = 0.0, 0
    for line in lines:
        known = [*listener.prefix]
        for token in [*listener.tokenizer(" " + line.text, add_special_tokens=False)["input_ids"], 2]:
            logits = model(input_features=listener.features(line), decoder_input_ids=torch.tensor([known])).logits
            p = torch.softmax(logits[0, -1].double(), 0)[token]
            total, count = total - math.log(float(p)), count + 1
            known.append(token)
    found = likelihood(model, listener, lines)
    assert found.tokens == count and found.clips == 3 and found.nll == pytest.approx(total / count, rel=1e-5)


def test_distance_of_words() -> None:
    @lru_cache(None)
    def naive(a: tuple[str, ...], b: tuple[str, ...]) -> int:
        if not a or not b:
            return len(a) + len(b)
        return min(naive(a[1:], b) + 1, naive(a, b[1:]) + 1, naive(a[1:], b[1:]) + (a[0] != b[0]))

    texts = ["", "a", "a b c", "b c", "c b a", "a x c d", "a a a b"]
    for one in texts:
        for two in texts:
            assert distance(one.split(), two.split()) == naive(tuple(one.split()), tuple(two.split()))


def test_word_errors_count_against_what_is_written(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    model = lowbit.load(folder / "model")
    listener = Listener.of(model, folder / "model")
    lines = read_lines(folder / "speech.jsonl")
    found = word_errors(model, listener, lines)
    assert found.words == 9 and found.errors == round(found.wer * 9)
    written = iter(["One fox!", "too lazy dogs", "a third"])
    monkeypatch.setattr(type(listener.tokenizer), "decode", lambda *_, **__: next(written))
    assert word_errors(model, listener, lines)[:3] == (3 / 9, 3, 9)  # two/too, and, line


def test_eval_of_speech(folder: Path, quantized: Path, capsys: pytest.CaptureFixture[str]) -> None:
    def run(*arguments: object) -> dict[str, Any]:
        capsys.readouterr()
        assert main(["eval", *map(str, arguments), "--speech", str(folder / "speech.jsonl"), "--json"]) == 0
        found: dict[str, Any] = json.loads(capsys.readouterr().out)
        return found

    plain = run(folder / "model", "--wer")
    assert plain["scheme"] == "float" and plain["tokens"] == 42 and plain["words"] == 9 and plain["wer"] is not None
    model = lowbit.load(quantized)
    want = likelihood(model, Listener.of(model, quantized), read_lines(folder / "speech.jsonl"))
    found = run(quantized)
    assert found["nll"] == want.nll and found["wer"] is None
    assert (found["scheme"], found["method"], found["rank"]) == ("w4a4 g64", "svdquant", 16)
    assert (
        found["activation"] == "8 token" and 12 < found["bits_per_weight"] < 13
    )  # 8 of them the branch: the model is narrow
    exact = run(quantized, "--exact")
    assert exact["activation"] == "4 group, simulated" and exact["nll"] != found["nll"]
    both = run(folder / "model", quantized)["models"]
    assert [row["nll"] for row in both] == [plain["nll"], found["nll"]]
    assert main(["eval", str(quantized), "--speech", str(folder / "speech.jsonl")]) == 0
    assert "w4a4 g64" in capsys.readouterr().out
    assert main(["eval", str(quantized)]) == 2 and "neither --text nor --speech" in capsys.readouterr().err


def test_the_report_has_a_row_for_every_linear(
    folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    words = ["quantize", folder / "model", tmp_path / "q", "--scheme", "w4a4", "--calibration", folder / "speech.jsonl"]
    assert main([str(word) for word in words]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[0].split() == [
        "layer",
        "method",
        "error",
        "rounded",
        "error",
        "rank",
        "clip",
        "damp",
        "tokens",
        "notes",
    ]
    assert len(lines) == 1 + 32 + 1
    first = lines[1].split()
    assert first[0] == "model.encoder.layers.0.self_attn.k_proj" and first[1] == "svdquant16" and first[4] == "16"
    assert 0.5 < float(first[5]) <= 1


def test_keyword_mappings_and_a_listener_that_is_found(folder: Path) -> None:
    """The API takes the calls themselves, or the file alone: the directory of the model has what reads it."""
    model = lowbit.load(folder / "model")
    listener = Listener.of(model, folder / "model")
    calls = [listener.call(line) for line in read_lines(folder / "speech.jsonl")]
    report = lowbit.quantize(model, "w4a8", calibration=calls, progress=False)
    assert report.calibration_tokens == 42 and report.rows[0].tokens == 150
    report = lowbit.quantize(lowbit.load(folder / "model"), "w4a8", calibration=folder / "speech.jsonl", progress=False)
    assert report.calibration_tokens == 42 and report.rows[0].tokens == 28 + 31 + 35
