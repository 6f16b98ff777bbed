"""``lowbit bench rtf`` on a tiny model of random weights: what is compared is comparable, and what is written is what ran.
Never how fast."""

from __future__ import annotations

import base64
import json
import re
import types
import zlib
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import tiny_omnivoice as tiny
from lowbit import omnivoice
from lowbit.bench import numbers, rtf, rtf_engines, rtf_judges, rtf_listen, rtf_page, rtf_quality, rtf_step, rtf_time
from lowbit.bench.rtf_model import random_model, twin
from lowbit.bench.rtf_set import TEXTS, Sample, samples, voices
from lowbit.models.omnivoice import Line, is_trained
from lowbit.omnivoice import engine_of
from lowbit.types import FormatError

CPU = torch.device("cpu")
SETTINGS = rtf_engines.Settings(CPU)


@pytest.fixture(scope="module")
def model() -> Any:
    tiny.package()
    return random_model("tiny", "cpu", torch.float32)


@pytest.fixture(scope="module")
def made(model: Any) -> Any:
    names = ("stock", "fp16", "w8a8", "w4a8")
    found = {name: rtf_engines.ENGINES[name].make(model, name, SETTINGS) for name in names}
    yield found
    rtf_engines.close(found)


def test_the_set_is_a_voice_clone_set() -> None:
    found = samples()
    assert len(found) >= 10 and len({s.name for s in found}) == len(found)
    scripts = {(re.search(r"[^\x00-\x7f]", text) or " ")[0] > "\u024f" for _, _, _, text in TEXTS}
    assert scripts == {True, False} and max(s.seconds for s in found) > 30
    assert [s.seconds for s in samples(cap=1.5)] == [1.5] * len(found)
    assert [s.name for s in samples(most=2)] == [found[0].name, found[len(found) // 2].name]


def test_a_set_of_ones_own_is_read_and_one_without_lengths_refused(tmp_path: Path) -> None:
    row = {"text": "Two words.", "ref_audio": "a.wav", "ref_text": "What is said.", "duration": 2}
    (tmp_path / "set.jsonl").write_text(json.dumps(row) + "\n")
    (sample,) = samples(tmp_path / "set.jsonl")
    assert sample.line.ref_audio == tmp_path / "a.wav" and sample.seconds == 2.0
    (tmp_path / "set.jsonl").write_text(json.dumps({"text": "Two words."}))
    with pytest.raises(FormatError, match="set.jsonl, line 1: duration: found nothing"):
        samples(tmp_path / "set.jsonl")


def test_random_models_are_whole_equal_and_known_as_untrained(model: Any) -> None:
    other = random_model("tiny", "cpu", torch.float32)
    for a, b in zip(model.parameters(), other.parameters(), strict=True):
        assert torch.equal(a, b)
    assert not is_trained(model)
    other.llm.layers[1].input_layernorm.weight.data[0] = 1.01
    assert is_trained(other)
    half = random_model("tiny", "cpu", torch.bfloat16)
    assert half.llm.dtype == torch.bfloat16 and half.audio_tokenizer.dtype == torch.float32
    assert half.llm.rotary_emb.inv_freq.dtype == torch.float32
    ids = model.text_tokenizer("<|text_start|>Seven geese<|text_end|>").input_ids
    assert len(ids) == 2 + 3 and max(ids) < model.llm.config.vocab_size  # four bytes a token


def test_engines_share_weights_and_each_keeps_its_own_patch(model: Any, made: dict[str, Any]) -> None:
    pointers = {made[name].llm.layers[0].mlp.up_proj.weight.data_ptr() for name in made}
    assert len(pointers) == 1
    assert "_generate_iterative" not in model.__dict__ and "_generate_iterative" not in made["stock"].__dict__
    assert engine_of(made["w8a8"]).explain() != engine_of(made["fp16"]).explain()


def test_every_stage_is_inside_the_next_and_seeds_are_equal(model: Any, made: dict[str, Any]) -> None:
    (sample,) = samples(most=1, cap=1.0)
    (prompt,) = voices(model, [sample])
    taken = {}
    for name, one in made.items():
        before = dict(one.__dict__)
        ear = rtf_time.Ear(one, lambda: None)
        taken[name] = rtf_time.take(ear, sample, prompt, {"num_step": 4}, 3, CPU)
        ear.close()
        assert one.__dict__ == before
    for t in taken.values():
        assert 0 < t.loop <= t.codec <= t.total and t.first is None
        assert [tuple(x.shape) for x in t.tokens] == [(8, 25)]
    assert rtf_quality.agreement(taken["stock"].tokens, taken["fp16"].tokens) == 1.0  # in fp32 the engine is stock
    assert 0.3 < rtf_quality.agreement(taken["w4a8"].tokens, taken["fp16"].tokens) < 1.0
    np.testing.assert_array_equal(taken["stock"].audio, taken["fp16"].audio)


def test_the_first_chunk_of_a_long_text_is_timed_by_itself(model: Any, made: dict[str, Any]) -> None:
    text = "The geese crossed. Nobody saw them. It rained all night."
    sample = Sample("long", Line(text), 4.0)
    how = {"num_step": 2, "audio_chunk_threshold": 2.0, "audio_chunk_duration": 1.5}
    first = rtf_time.chunked(model, sample, None, how)
    assert first is not None and text.startswith(first) and len(first) < len(text)
    assert rtf_time.chunked(model, sample._replace(seconds=1.9), None, how) is None
    ear = rtf_time.Ear(made["fp16"], lambda: None)
    taken = rtf_time.take(ear, sample, voices(model, [sample])[0], how, 0, CPU)
    ear.close()
    assert len(taken.tokens) > 1 and taken.first is not None and 0 < taken.first
    measured = rtf_time.figures([taken], 4.0)
    assert measured["first_ms"] == 1e3 * taken.first and measured["rtf"] == taken.total / 4.0


def test_divergence_is_zero_for_the_same_arithmetic_and_grows_with_fewer_bits(model: Any, made: dict[str, Any]) -> None:
    (sample,) = samples(most=1, cap=1.0)
    path = rtf_quality.path_of(engine_of(made["fp16"]), sample, voices(model, [sample])[0], 8, 0)
    assert path.tokens[0].eq(1024).all() and int(path.revealed[-1].sum()) == path.logs[-1].shape[0]
    same = rtf_quality.of_engine(engine_of(made["fp16"]), path)
    stock = rtf_quality.of_stock(made["stock"], path)
    eight, four = (rtf_quality.of_engine(engine_of(made[name]), path) for name in ("w8a8", "w4a8"))
    assert same.kl == 0.0 and same.top1 == 1.0 and stock.top1 == 1.0 and stock.kl < 1e-6
    assert stock.kl < eight.kl < four.kl and four.top1 <= eight.top1
    assert "forward" not in made["stock"].__dict__


def test_the_baseline_of_plain_torch_is_the_same_stack(model: Any, made: dict[str, Any]) -> None:
    engine = engine_of(made["fp16"])
    with torch.inference_mode():
        x, rotation, spans = rtf_step._packed_inputs(engine, 60, 64)
        assert spans.bounds.tolist() == [0, 38, 60, 64] and spans.longest == 38
        want = engine.backbone(x, rotation, spans)
        cosines, sines = (torch.cat([t, t], -1)[:, None] for t in rotation)
        got = rtf_step.Packed(model.llm, compile=False)(x, cosines, sines, spans)
    torch.testing.assert_close(got, want, rtol=0, atol=1e-5)


def test_a_step_has_a_line_an_engine(made: dict[str, Any]) -> None:
    found = list(rtf_step.lines(made, [60], 2, CPU, compiled=False))
    assert [line["engine"] for line in found] == list(made)
    assert all(line["ms"] > 0 and line["m"] == line["c"] + line["u"] for line in found)
    assert ["step_ms" in line for line in found] == [False, True, True, True]


def test_what_cannot_run_is_a_row_that_says_why(model: Any) -> None:
    for name, why in (("stock-graph", "need a CUDA device"), ("flashinfer", "has no apply_flashinfer")):
        with pytest.raises(FormatError, match=why):
            rtf_engines.ENGINES[name].make(model, name, SETTINGS)


def test_the_command_writes_lines_drawings_a_page_and_a_chapter(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    tiny.package()
    out = tmp_path / "run.jsonl"
    words = (
        "--random tiny --samples 2 --seconds 0.6 --steps 2 --rounds 1 --listen 1 --engines stock,fp16,w4a8,stock-graph"
    )
    assert rtf.main([*words.split(), "--out", str(out)]) == 0
    assert "stock-graph: not run: CUDA graphs need" in capsys.readouterr().out
    lines = [json.loads(text) for text in out.read_text().splitlines()]
    assert len([x for x in lines if x["kind"] == "sample"]) == 2 * 3
    engines = {x["engine"]: x for x in lines if x["kind"] == "engine"}
    assert engines.keys() == {"stock", "fp16", "w4a8", "stock-graph"} and "why" in engines["stock-graph"]
    for name in ("stock", "fp16", "w4a8"):
        assert {engines[name][key] for key in rtf_judges.KEYS} == {"random weights"}  # never a number
    assert engines["fp16"]["reference"] and engines["stock"]["tokens_same"] == 1.0
    assert all(x["bench"] == "rtf" and x["model"] == "tiny, random weights" and x["chip"] and x["date"] for x in lines)
    assert {f.name for f in tmp_path.iterdir()} == {
        "run.jsonl", "run-engines.svg", "run-samples.svg", "run-listen.html"
    }  # fmt: skip

    read = numbers.read([str(out)])
    page = numbers.page(read)
    assert "## Voice clone:" in page and "| fp16\\* |" in page and "Not run: `stock-graph`" in page
    for name in numbers.charts(read):
        assert f"(charts/{name})" in page


def test_steps_stand_beside_what_was_to_be_reached() -> None:
    facts = {"bench": "rtf", "chip": rtf_page.TARGETS_OF, "date": "d", "model": "full", "torch": "t", "lowbit": "l", "cuda": "13",
             "steps": 32, "source": "f", "kind": "step", "m": 685, "c": 435, "u": 250, "rounds": 3}  # fmt: skip
    lines = [
        {**facts, "engine": name, "ms": ms} for name, ms in (("packed-compile", 2.5), ("w4a8", 1.25), ("w8a8", 1.6))
    ]
    text = rtf_page.chapter(lines)
    assert "| w4a8: layers over 685 rows | ≤ 1.5 ms | **1.25 ms** |" in text
    assert "| w4a8: layers over 685 rows, over packed-compile | ≥ 1.6× | **2.00×** |" in text
    assert "| 685 = 435 + 250 | w4a8 | **1.250** (≤ 1.5) | | | 0.50 | 3 |" in text and "| w8a8 | 1.600 |" in text


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ([], "accepted is one of --model DIR and --random"),
        (["--random", "tiny", "--ref", "a.wav"], "accepted are both"),
        (["--random", "tiny", "--weights", "fp16=x"], "--weights: found 'fp16=x'"),
        (["--random", "tiny", "--seconds", "0"], "--seconds: found 0"),
        (["--random", "tiny", "--device", "mps"], "--device: found mps"),
        (["--model", "nowhere"], "found no such directory"),
    ],
)
def test_arguments_that_do_not_fit_are_one_line(arguments: list[str], message: str) -> None:
    with pytest.raises(FormatError, match=message):
        rtf.main(arguments)


def test_a_replayed_forward_gets_what_the_loop_writes(model: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """The logic of ``stock-graph`` on the CPU: a graph that only repeats what it captured, into the same memory."""
    captures: list[int] = []

    def captured(call: Any, pool: Any) -> tuple[Any, Any]:
        out = call()
        captures.append(1)

        def replay() -> None:
            out.logits.copy_(call().logits)

        return types.SimpleNamespace(replay=replay), out

    monkeypatch.setattr(torch.cuda, "graph_pool_handle", lambda: None)
    monkeypatch.setattr(rtf_engines, "captured", captured)
    cuda = SETTINGS._replace(device=torch.device("cuda"))
    one = rtf_engines.ENGINES["stock-graph"].make(model, "stock-graph", cuda)
    short, long = samples(most=2, cap=1.0)
    prompts = voices(model, [short, long])
    for sample, prompt in zip((short, long, short), (*prompts, prompts[0])):  # back to a shape that is known
        found = []
        for instance in (twin(model), one):
            torch.manual_seed(1)
            found.append(rtf_time.speak(instance, sample, prompt, {"num_step": 3}))
        np.testing.assert_array_equal(*found)
    assert len(captures) == 2


# -- what is heard --------------------------------------------------------------------------------------------------


def test_pictures_and_audio_of_the_listening_page_are_those_of_the_samples() -> None:
    soundfile = pytest.importorskip("soundfile")
    tone = (0.5 * np.sin(2 * np.pi * 3000 * np.arange(24000) / 24000)).astype(np.float32)
    picture = rtf_listen.spectrogram(tone)
    assert picture.shape[0] == 80 and picture.shape[1] <= 300
    assert int(picture.mean(1).argmax()) == 79 - int(3000 / 24000 * 1024 / 6)  # 6 bins a row, low ones at the bottom
    data = rtf_listen.png(picture)
    at = data.index(b"IDAT") + 4
    size = int.from_bytes(data[at - 8 : at - 4], "big")
    rows = np.frombuffer(zlib.decompress(data[at : at + size]), np.uint8).reshape(80, -1)
    assert np.array_equal(255 - rows[:, 1:], picture)
    kind, text = rtf_listen.encoded(tone)
    import io

    back, rate = soundfile.read(io.BytesIO(base64.b64decode(text)), dtype="float32")
    assert kind == "flac" and rate == 24000 and np.abs(back - tone).max() < 1e-4
    page = rtf_listen.page("t", "n", [("a", "Text & more", {"stock": tone, "w4a8": tone[:0]})], {"stock": "RTF 1"})
    assert "Text &amp; more" in page and "cut as silence" in page and page.count("<audio") == 1
    assert "http" not in page.replace("http://www.w3.org", "")


def test_judges_say_what_is_missing_or_give_a_number(monkeypatch: pytest.MonkeyPatch) -> None:
    import sys

    said = [rtf_judges.Said(Sample("a", Line("Text.", language="en"), 1.0), np.full(2400, 0.1, np.float32))]
    for name in ("speechmos", "resemblyzer"):
        monkeypatch.setitem(sys.modules, name, None)
    found = rtf_judges.judge(said)
    assert found == {"wer": "no --asr DIR", "similarity": "no recorded reference", "mos": "no package speechmos"}
    mos = types.ModuleType("speechmos")
    mos.dnsmos = types.SimpleNamespace(run=lambda x, rate: {"ovrl_mos": float(len(x)) / rate})  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "speechmos", mos)
    pytest.importorskip("torchaudio")
    assert rtf_judges.judge(said)["mos"] == pytest.approx(0.1)  # 16 kHz is what it hears


def test_turns_begin_with_another_one_each_round() -> None:
    order: list[str] = []
    found = rtf_time.rounds(["a", "b", "c"], lambda name: order.append(name) or len(order), 2)
    assert order == ["a", "b", "c", "b", "c", "a"] and found == {"a": [1, 6], "b": [2, 4], "c": [3, 5]}
    assert rtf_time.percentile([3.0, 1.0, 2.0], 0.5) == 2.0 and rtf_time.percentile([0.0, 1.0], 0.95) == 0.95


# -- on a GPU -------------------------------------------------------------------------------------------------------


@pytest.mark.gpu
def test_a_replayed_forward_of_stock_gives_the_logits_of_stock() -> None:
    tiny.package()
    where = torch.device("cuda")
    model = random_model("tiny", where, torch.float16)
    graph = rtf_engines.ENGINES["stock-graph"].make(model, "stock-graph", rtf_engines.Settings(where))
    with torch.inference_mode():
        for seed, length in ((0, 40), (1, 40), (2, 56)):
            torch.manual_seed(seed)
            inputs = dict(
                input_ids=torch.randint(0, 1000, (2, 8, length), device=where),
                audio_mask=torch.ones(2, length, dtype=torch.bool, device=where),
                attention_mask=torch.ones(2, 1, length, length, dtype=torch.bool, device=where).tril(seed * 8),
            )
            want, got = model(**inputs).logits, graph(**inputs).logits
            torch.testing.assert_close(got, want, rtol=0, atol=4e-3)


@pytest.mark.gpu
def test_steps_on_a_gpu_have_a_bucket_and_the_compiled_baseline() -> None:
    tiny.package()
    where = torch.device("cuda")
    model = random_model("tiny", where, torch.float16)
    made = {
        n: rtf_engines.ENGINES[n].make(model, n, rtf_engines.Settings(where, buckets=(128,))) for n in ("stock", "fp16")
    }
    found = {line["engine"]: line for line in rtf_step.lines(made, [60], 2, where, compiled=True)}
    rtf_engines.close(made)
    assert found["fp16"]["bucket_ms"] > 0 and found["stock"]["ms"] > 0
    assert "ms" in found[rtf_step.BASELINE], found[rtf_step.BASELINE].get("why")


def test_twins_are_accelerated_one_by_one(model: Any) -> None:
    one = omnivoice.accelerate(twin(model))
    assert "_generate_iterative" in one.__dict__ and "_generate_iterative" not in model.__dict__
    omnivoice.restore(one)
