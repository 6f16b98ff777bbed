"""The bench measures what it says: turns, rotation, right results beside every time. Never how fast."""

from __future__ import annotations

import json
import shutil
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import pytest
import torch
import transformers

import lowbit
from lowbit import ops
from lowbit.bench import chart, layers, model_worker, models, numbers, peers, timer
from lowbit.bench.model_peers import PEERS
from lowbit.bench.timer import Competitor
from lowbit.prove.report import Bar, bars
from lowbit.reference import dequantize
from lowbit.types import FormatError

# Frobenius-relative, Gaussian x and w, against float32 products with exactly the weights that the layer holds.
ERRORS = {"w4a8": 2e-2, "w8a8": 2e-2, "w4a16": 1e-5, "w8a16": 1e-5, "fp16": 1e-5}


def run(tmp_path: Path, *options: str) -> list[dict[str, object]]:
    file = tmp_path / "lines.jsonl"
    assert layers.main([*options, "--seconds", "0", "--json", str(file)]) == 0
    return [json.loads(line) for line in file.read_text().splitlines()]


def test_every_competitor_is_timed_and_right(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    threads = torch.get_num_threads()
    lines = run(
        tmp_path,
        "--shape",
        "64x128,48x64",
        "--M",
        "1,5",
        "--group",
        "32",
        "--tier",
        "all",
        "--activation",
        "token,group,none",
    )
    assert torch.get_num_threads() == threads
    tiers = ops.cpu_isas()
    ours = [line for line in lines if "tier" in line]
    cases = 2 * 2  # shapes x rows
    assert len(ours) == cases * len(tiers) * 6  # w4a8 twice, w4a16, w8a8, w8a16, fp16
    assert len({(line["name"], line["n"], line["m"]) for line in lines}) == len(lines)
    for line in ours:
        assert float(str(line["error"])) < ERRORS[str(line["scheme"])], line
    peers = {str(line["peer"]): float(str(line["error"])) for line in lines if "peer" in line}
    assert peers["float32"] < 1e-6 and peers["bfloat16"] < 1e-2 and peers["float16"] < 2e-3
    assert peers.get("int4pack", 0.0) < 1e-2  # absent where torch cannot do the shape
    table = capsys.readouterr().out
    assert all(str(line["name"]) in table for line in lines)


def test_a_line_says_where_it_comes_from(tmp_path: Path) -> None:
    (line, *_) = run(
        tmp_path, "--shape", "32x64", "--M", "2", "--group", "64", "--schemes", "w4a8", "--peers", "float32"
    )
    for key in "chip flags cores pages torch lowbit python date threads copies in_cache repeats weight_bytes".split():
        assert line[key] not in (None, ""), key
    assert line["torch"] == torch.__version__ and line["ratio"] == 1.0 and line["ratio_to"] == line["name"]
    assert line["weight_bytes"] == 2 * 1 * (64 * 16 // 2 + 64)
    assert int(str(line["repeats"])) >= 11


def test_competitors_take_turns_on_rotated_weights() -> None:
    seen: list[str] = []

    def call(name: str) -> timer.Competitor:
        return Competitor(name, [lambda i=i: seen.append(f"{name}{i}") for i in range(3)])

    times = timer.race([call("a"), call("b")], seconds=0, least_rounds=4)
    assert seen[:6] == ["a0", "a1", "a2", "b0", "b1", "b2"]  # warm-up
    assert seen[6:] == ["a0", "b0", "a1", "b1", "a2", "b2", "a0", "b0"]
    assert times["a"].repeats == 4 and 0 <= times["a"].least <= times["a"].median
    seen.clear()
    timer.race([call("a")], seconds=0, least_rounds=2, in_cache=True)
    assert seen[3:] == ["a0"] * 4  # an untimed call before each timed one


def test_copies_exceed_the_last_level_cache() -> None:
    cache = timer.last_level_cache()
    assert timer.copies_needed(cache) == 2
    assert timer.copies_needed(cache // 8) * (cache // 8) >= 2 * (cache // 8 * 8)
    assert timer.copies_needed(10 * cache) == 2 and timer.copies_needed(1) == 256


@pytest.mark.parametrize(
    ("options", "said"),
    [
        (["--tier", "mmx"], "--tier: found 'mmx'"),
        (["--shape", "64x64", "--group", "48"], "--group: found 48, accepted here is a divisor of K=64"),
    ],
)
def test_options_that_do_not_fit_are_refused(options: list[str], said: str) -> None:
    with pytest.raises(FormatError, match=said):
        layers.main([*options, "--seconds", "0"])


def test_weights_of_the_bench_round_to_nearest() -> None:
    torch.manual_seed(0)
    w = torch.randn(16, 64)
    for bits, group in ((4, 32), (8, 64)):
        q = peers.quantize(w, bits, group)
        step = q.scales.float().repeat_interleave(group, 1)
        wrong = (dequantize(q) - w).abs() / step
        assert float(wrong.max()) < (0.51 if bits == 8 else 1.01)  # 4 bits: the ends may clip by a rounded zero point


def test_a_missing_peer_is_named_with_its_install_line(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.delenv("GGML_DIR", raising=False)
    monkeypatch.setitem(peers.PEERS, "ort", peers.PEERS["ort"]._replace(needs="no_such_module_here"))
    assert list(peers.entries(["ort", "ggml"], torch.randn(64, 64), 32, 1)) == []
    told = capsys.readouterr().err
    assert "ort is left out: no_such_module_here is missing (pip install onnx onnxruntime)" in told
    assert "ggml is left out: GGML_DIR is missing (npm pack" in told


@pytest.mark.parametrize("name", [name for name, peer in peers.PEERS.items() if peer.needs == "torch"])
def test_a_peer_computes_the_layer(name: str) -> None:
    weight, x = torch.randn(64, 128), torch.randn(4, 128)
    for entry in peers.entries([name], weight, 32, 1):
        xs = {dtype: x.to(getattr(torch, dtype)) for dtype in ("float32", "bfloat16", "float16")}
        want = x @ entry.exact.T
        assert (entry.make(xs)().float() - want).norm() / want.norm() < 0.03


def test_a_peer_that_fails_when_called_leaves_the_others(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    def entry(weight: torch.Tensor, group: int, threads: int) -> peers.Entry:
        def make(xs: Mapping[str, torch.Tensor]) -> peers.Call:
            raise NotImplementedError("not at 4 bits")

        return peers.Entry("late refusal", {"peer": "ort"}, 1, make, weight)

    monkeypatch.setitem(peers.PEERS, "ort", peers.Peer(entry))
    lines = run(tmp_path, "--shape", "32x64", "--M", "1,2", "--group", "64", "--peers", "ort,float32")
    assert {line["name"] for line in lines if "peer" in line} == {"torch float32 linear"}
    assert capsys.readouterr().err.count("late refusal is left out: not at 4 bits") == 2


# ---- charts ---------------------------------------------------------------------------------------------------------

SVG = "{http://www.w3.org/2000/svg}"


def drawn(svg: str) -> list[ElementTree.Element]:
    """The bars of a chart, which has to be XML as it is, without anything that runs or is fetched."""
    root = ElementTree.fromstring(svg)
    assert root.tag == f"{SVG}svg" and {e.tag.removeprefix(SVG) for e in root.iter()} <= {
        "svg",
        "rect",
        "text",
        "title",
    }
    assert not any("href" in name or name.startswith("on") for e in root.iter() for name in e.attrib)
    return [e for e in root.iter(f"{SVG}rect") if e.get("class") == "bar"]


def test_a_chart_has_a_bar_for_every_row_in_proportion(tmp_path: Path) -> None:
    options = ["--shape", "32x64", "--M", "1,4", "--group", "64", "--peers", "float32,bfloat16"]
    lines = run(tmp_path, *options, "--chart", str(tmp_path / "chart.svg"))
    text = (tmp_path / "chart.svg").read_text("utf-8")
    assert text == chart.layers(lines)
    found = drawn(text)
    assert len(found) == len(lines)
    for start in (0, len(lines) // 2):  # a panel for every M, on a scale of its own
        panel, shown = lines[start : start + len(lines) // 2], found[start : start + len(lines) // 2]
        most = max(float(str(line["gops"])) for line in panel)
        longest = max(float(bar.attrib["width"]) for bar in shown)
        for line, bar in zip(panel, shown):
            assert float(bar.attrib["width"]) == pytest.approx(longest * float(str(line["gops"])) / most, abs=0.11)
            assert str(line["name"]) in str(bar[0].text)
    assert len({bar.get("fill") for bar in found}) == 2  # ours, theirs


def test_bars_are_escaped_and_refuse_what_has_no_length() -> None:
    (bar,) = drawn(bars([("<a&b>", [Bar("x<y", 1.0, '"&"')])], "<what>"))
    assert bar[0].text == 'x<y: 1; "&"'
    assert drawn(bars([], "nothing")) == []
    for value in (-1.0, float("nan"), float("inf")):
        with pytest.raises(ValueError, match="bars: found"):
            bars([("a", [Bar("x", value)])], "w")


# ---- whole models ---------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """A random llama, and the same in 4 bits."""
    source, out = tmp_path_factory.mktemp("source"), tmp_path_factory.mktemp("lowbit") / "model"
    torch.manual_seed(0)
    config = transformers.LlamaConfig(
        vocab_size=96, hidden_size=64, intermediate_size=128, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=2, initializer_range=0.2,
    )  # fmt: skip
    model = transformers.LlamaForCausalLM(config).eval()
    model.save_pretrained(source)
    lowbit.quantize(model, "w4a8", "rtn", progress=False)
    lowbit.save(model, out)
    return {"source": str(source), "model": str(out)}


@pytest.fixture
def torch_as_it_was() -> Iterator[None]:
    threads = torch.get_num_threads()
    yield
    torch.set_grad_enabled(True)
    torch.set_num_threads(threads)


@pytest.mark.usefixtures("torch_as_it_was")
def test_engines_on_torch_decode_what_the_model_decodes(tiny: dict[str, str], tmp_path: Path) -> None:
    ids = [5, 17, 3, 80]
    job = {**tiny, "threads": 1, "short": ids, "long": ids * 3, "steps": 6, "reference": str(tmp_path / "kept.npy")}
    answers, last = {}, {}
    for name in ("float32", "bfloat16", "transformers", "native"):
        engine, answers[name] = model_worker.load({**job, "peer": name})
        found = model_worker.turn(engine, job)
        assert len(found["steps"]) == 6 and min(found["steps"]) > 0 and found["prefill"] > 0
        tokens, times = engine.generate(ids, 3)
        assert tokens == answers[name]["tokens"][:3] and times == sorted(times)
        last[name] = torch.from_numpy(engine.logits().copy())
    truth = transformers.LlamaForCausalLM.from_pretrained(tiny["source"])
    want = truth.generate(torch.tensor([ids]), max_new_tokens=7, do_sample=False, eos_token_id=None, pad_token_id=0)
    assert answers["float32"]["tokens"] == want[0, 4:].tolist() and answers["float32"]["error"] == 0
    assert 0 < answers["bfloat16"]["error"] < 0.05 < answers["transformers"]["error"] < 1
    assert abs(answers["native"]["error"] - answers["transformers"]["error"]) < 0.1  # but for the 8-bit head
    nbytes = sum(p.nbytes for p in truth.parameters())
    assert answers["float32"]["weight_bytes"] >= nbytes > answers["bfloat16"]["weight_bytes"] >= nbytes // 2
    assert all(answer["above"] == "torch" and answer["resident"] >= 0 for answer in answers.values())


def test_models_end_to_end(
    tiny: dict[str, str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.delenv("GGML_DIR", raising=False)
    files = [str(tmp_path / name) for name in ("lines.jsonl", "chart.svg")]
    options = ["--peers", "native,float32,ggml,ort,openvino", "--rounds", "2", "--prompt", "4", "--decode", "5"]
    paths = ["--model", tiny["model"], "--source", tiny["source"], "--ort", tiny["source"]]
    false = ["--python", f"ort={shutil.which('false')}"]
    assert models.main([*paths, *options, *false, "--prefill", "9", "--json", files[0], "--chart", files[1]]) == 0
    out, told = capsys.readouterr()
    for name in ("ggml", "openvino"):
        assert f"{name} is left out: a path is missing ({PEERS[name].install})" in told
    assert f"ort is left out: its process ended with 1: no word ({PEERS['ort'].install})" in told
    lines = [json.loads(line) for line in Path(files[0]).read_text().splitlines()]
    assert [line["peer"] for line in lines] == ["native", "float32"]
    for line in lines:
        assert line["rounds"] == 2 and line["threads"] == 1 and line["ratio_to"] == "lowbit native"
        assert (line["prompt_tokens"], line["decode_tokens"], line["prefill_tokens"]) == (4, 5, 9)
        assert 0 < line["decode"] <= line["decode_best"] and 0 < line["prefill"] <= line["prefill_best"]
        assert line["weight_bytes"] > 0 and line["cpu"] > 0 and line["above"] == "torch"
        assert (
            line["peak_bytes"] >= line["resident_bytes"] >= 0
            and line["model"] == "llama, 2 layers, hidden 64, vocabulary 96"
        )
        assert line["name"] in out
    assert lines[1]["same"] == 6 and lines[1]["error"] == 0 and lines[0]["error"] > 0
    assert lines[0]["decode_ratio"] == lines[0]["prefill_ratio"] == 1.0

    svg = Path(files[1]).read_text("utf-8")
    assert svg == chart.models(lines) and len(drawn(svg)) == 2 * len(lines)  # decoding and prefill
    read = numbers.read([files[0]])
    page = numbers.page(read)
    assert "![bars of the models in lines.jsonl](charts/lines-models.svg)" in page
    rows = [row for row in page.splitlines() if row.startswith("|")]
    assert len(rows) == 2 + len(lines) and len({row.count(" |") for row in rows if "---" not in row}) == 1
    assert f"| torch float32 | 1 | {lines[1]['decode']:.1f} |" in page
    assert numbers.main([files[0], "--out", str(tmp_path / "page.md")]) == 0
    assert (tmp_path / "page.md").read_text("utf-8") == page
    assert (tmp_path / "charts" / "lines-models.svg").read_text("utf-8") == svg


class Scripted:
    """A worker that takes the times it is told to."""

    turns: list[str] = []
    closed: list[str] = []

    def __init__(self, name: str, job: Mapping[str, Any], python: str | None, folder: Path) -> None:
        self.name, self.round = name, 0

    def answer(self) -> dict[str, Any]:
        if self.name == "bfloat16":
            return {"missing": "no such dtype"}
        tokens = [1, 2, 3, 4] if self.name == "float32" else [1, 2, 9, 4]
        return {
            "tokens": tokens, "error": 0.25, "resident": 7, "base": 10, "weight_bytes": 5, "version": "1", "load_s": 0.0,
            "above": "torch",
        }  # fmt: skip

    def turn(self) -> dict[str, Any]:
        self.turns.append(self.name)
        if self.name == "ort":
            return {"missing": "it died"}
        slow, busy = (2 if self.name == "float32" else 1), (1, 5, 1)[self.round]
        steps = [(0.01, 0.02), (0.02, 0.01), (0.01, 0.01)][self.round]
        self.round += 1
        return {"steps": [slow * s * busy for s in steps], "prefill": 0.1 * slow * busy, "cpu": 1.0, "peak": 30}

    def close(self) -> None:
        self.closed.append(self.name)

    def __enter__(self) -> Scripted:
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()


def test_peers_take_turns_and_rounds_are_compared_with_themselves(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(models, "Worker", Scripted)
    Scripted.turns, Scripted.closed = [], []
    job = {"threads": 1, "name": "m", "short": [0], "long": [0] * 10, "steps": 2}
    given = ["native", "bfloat16", "ort", "float32"]
    ours, theirs = models.race(given, job, 3, {}, tmp_path)
    assert Scripted.turns == ["native", "ort", "float32", "float32", "native", "native", "float32"]
    assert set(Scripted.closed) == set(given)
    told = capsys.readouterr().err
    assert "bfloat16 is left out: no such dtype" in told and "ort is left out: it died" in told
    assert theirs["decode_ratio"] == theirs["prefill_ratio"] == 2.0  # though one round was five times as slow
    assert ours["decode"] == round(2 / 0.03, 2) and ours["decode_best"] == round(2 / 0.02, 2)
    assert ours["prefill"] == ours["prefill_best"] == 100.0
    assert (ours["same"], theirs["same"]) == (2, 4) and ours["peak_bytes"] == 20


def test_a_waiting_worker_is_stopped_and_has_no_torch(tmp_path: Path) -> None:
    if not Path("/proc/self/stat").exists():
        pytest.skip("needs /proc")
    asked = {"ggml": str(tmp_path), "requantize": ["a", "b"]}
    with models.Worker("ggml", asked, None, tmp_path) as worker:
        assert worker.answer() == {"missing": f"FileNotFoundError: no libllama in {tmp_path}"}
        here = Path(f"/proc/{worker.pid}")
        for _ in range(500):  # the signal takes its time
            state = here.joinpath("stat").read_text().rsplit(")", 1)[1].split()[0]
            if state == "T":
                break
            time.sleep(0.01)
        assert state == "T"
        assert "libtorch" not in here.joinpath("maps").read_text()
    assert not here.exists()


@pytest.mark.parametrize(
    ("options", "said"),
    [
        (["--model", "nowhere"], "--model: found 'nowhere', accepted is a path that exists"),
        ([], "found neither --model nor --source"),
    ],
)
def test_models_that_are_not_there_are_refused(options: Sequence[str], said: str) -> None:
    with pytest.raises(FormatError, match=said):
        models.main(options)


@pytest.mark.parametrize("value", ["ort", "ort=", "mlx=python"])
def test_a_python_has_to_be_one_of_a_peer(value: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        models.main(["--python", value])
    assert f"found {value!r}, accepted is PEER=PATH" in capsys.readouterr().err


def test_ids_are_text_where_there_is_a_tokenizer(tmp_path: Path) -> None:
    from tokenizers import Tokenizer
    from tokenizers import models as kinds

    ids = models.token_ids(tmp_path, 50, 40)
    assert len(ids) == 40 and max(ids) < 50 and len(set(ids)) > 10 and ids == models.token_ids(tmp_path, 50, 40)
    alphabet = {letter: index for index, letter in enumerate("abcdefghijklmnopqrstuvwxyz")}
    Tokenizer(kinds.BPE(alphabet, [])).save(str(tmp_path / "tokenizer.json"))
    text = "".join("abcdefghijklmnopqrstuvwxyz"[token] for token in models.token_ids(tmp_path, 26, 600))
    assert text.startswith("clockmakerwholived") and len(text) == 600
