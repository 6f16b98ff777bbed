"""`lowbit eval` of several checkpoints: figures against naive ones, agreement, layers, and the page."""

from __future__ import annotations

import math
import re
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import pytest
import torch

import lowbit
import samples
from lowbit.cli import main
from lowbit.prove import report
from lowbit.prove.compare import windows_of
from lowbit.prove.generation import agreement, continue_greedily, prompts_of
from lowbit.prove.heat import Grid, grid, heat_map, sensitivity_bars
from lowbit.prove.report import Point
from lowbit.prove.several import name_of
from lowbit.prove.stored import stored
from lowbit.types import FormatError

transformers = pytest.importorskip("transformers")
TEXT = "Pack my box with five dozen liquor jugs, then sphinx of black quartz, judge my vow. " * 30
SVG = "{http://www.w3.org/2000/svg}"


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """plain, w4a4 (with a budget), w8a8 and another plain model, all of one tokenizer; text.txt."""
    path = tmp_path_factory.mktemp("models")
    (path / "text.txt").write_text(TEXT, "utf-8")
    for seed, name in enumerate(("plain", "other")):
        samples.byte_tokenizer(eos_token="</s>").save_pretrained(path / name)
        torch.manual_seed(seed)
        config = transformers.LlamaConfig(
            vocab_size=259, hidden_size=64, intermediate_size=128, num_hidden_layers=2, num_attention_heads=2,
            num_key_value_heads=1, head_dim=32, initializer_range=0.2, bos_token_id=1, eos_token_id=2, pad_token_id=0,
        )  # fmt: skip
        transformers.LlamaForCausalLM(config).save_pretrained(path / name)
    tokenizer = transformers.AutoTokenizer.from_pretrained(path / "plain")
    for name, options in (("w4a4", {"budget": 5.0}), ("w8a8", {"method": "rtn"})):
        model = lowbit.load(path / "plain")
        text = None if "method" in options else path / "text.txt"
        lowbit.quantize(model, name, calibration=text, tokenizer=tokenizer, tokens=512, progress=False, **options)
        lowbit.save(model, path / name)
    return path


def common(models: Path) -> list[object]:
    return ["--text", models / "text.txt", "--tokens", 192, "--context", 64, "--skip", 5]


def logits(path: Path) -> torch.Tensor:
    """[189, 259]: float64 log probabilities of what eval scores, by hand."""
    model, tokenizer = lowbit.load(path), transformers.AutoTokenizer.from_pretrained(path)
    with torch.inference_mode():
        parts = [model(w[None]).logits[0, :-1] for w in windows_of(TEXT, tokenizer, context=64, tokens=192, skip=5)]
    return torch.log_softmax(torch.cat(parts).double(), -1)


def test_one_table_over_the_same_tokens(models: Path, capsys: pytest.CaptureFixture[str]) -> None:
    names = ["w4a4", "plain", "w8a8"]
    found = samples.json_of(capsys, "eval", *(models / n for n in names), *common(models), "--kl")
    assert found["reference"] == str(models / "plain")
    rows = dict(zip(names, found["models"], strict=True))
    targets = torch.cat([w[1:] for w in windows_of(TEXT, transformers.AutoTokenizer.from_pretrained(models / "plain"),
                                                   context=64, tokens=192, skip=5)])  # fmt: skip
    p = logits(models / "plain")
    for name in ("w4a4", "w8a8"):
        q, row = logits(models / name), rows[name]
        d = (p - q).gather(1, targets[:, None])[:, 0]
        assert row["scored"] == 189 and row["ratio"] == pytest.approx(math.exp(float(d.mean())), rel=1e-6)
        assert row["ratio"] == pytest.approx(row["perplexity"] / rows["plain"]["perplexity"], rel=1e-9)
        assert row["ratio_se"] == pytest.approx(row["ratio"] * float(d.std()) / math.sqrt(189), rel=1e-4)
        kl = (p.exp() * (p - q)).sum(1)
        assert row["kl"] == pytest.approx(float(kl.mean()), rel=1e-3, abs=1e-7)
        assert row["kl_se"] == pytest.approx(float(kl.std()) / math.sqrt(189), rel=1e-3)
        assert row["top1"] == pytest.approx(float((p.argmax(1) == q.argmax(1)).double().mean()))
    assert "ratio" not in rows["plain"] and rows["w8a8"]["kl"] < rows["w4a4"]["kl"]


def test_the_reference_may_be_named_and_4_bits_simulated(models: Path, capsys: pytest.CaptureFixture[str]) -> None:
    found = samples.json_of(capsys, "eval", models / "w4a4", *common(models), "--reference", models / "plain")
    exact = samples.json_of(
        capsys, "eval", models / "w4a4", *common(models), "--reference", models / "plain", "--exact"
    )
    assert found["reference"] == str(models / "plain") and len(found["models"]) == 1
    assert exact["models"][0]["ratio"] != found["models"][0]["ratio"]
    assert 0 < exact["models"][0]["simulated_4_bit_linears"] < 14  # the budget took some
    turned = samples.json_of(
        capsys, "eval", models / "plain", *common(models), "--reference", models / "w4a4", "--exact"
    )
    assert turned["models"][0]["ratio"] == pytest.approx(1 / exact["models"][0]["ratio"], rel=1e-9)
    both = samples.json_of(
        capsys, "eval", models / "plain", models / "other", *common(models), "--reference", models / "other"
    )
    assert "ratio" in both["models"][0] and "ratio" not in both["models"][1]


def test_stored_sizes_count_everything(models: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert stored(models / "plain")[0] == 32 and stored(models / "plain").format is None
    weights = 2 * (64 * 64 * 2 + 32 * 64 * 2 + 3 * 64 * 128)
    eight = stored(models / "w8a8")
    rows = 2 * (64 * 3 + 2 * 32 + 2 * 128)  # one scale a row, float16; no smoothing without calibration
    assert eight.weights == weights and eight.bits_per_weight == 8 + 16 * rows / weights and eight.format == "lowbit"
    files = sum(f.stat().st_size for f in (models / "w8a8").glob("*.safetensors"))
    assert eight.bytes == files
    found = samples.json_of(capsys, "eval", models / "w4a4", *common(models))
    assert found["bits_per_weight"] == stored(models / "w4a4").bits_per_weight > 4 + 16 / 64


def test_where_two_texts_part() -> None:
    want = torch.tensor([[1, 2, 3, 4], [1, 2, 3, 4], [9, 2, 3, 4]])
    got = torch.tensor([[1, 2, 3, 4], [1, 2, 9, 4], [1, 2, 3, 4]])
    found = agreement(got, want)
    assert (found.prompts, found.length, found.identical) == (3, 4, 1)
    assert found.first_difference == 2 and found.share == 0.5  # 4, 2 and 0 of 4
    with pytest.raises(FormatError, match=r"found continuations \[3, 4\] and \[2, 4\]"):
        agreement(got, want[:2])


def test_prompts_are_spread_over_the_text() -> None:
    windows = [torch.arange(50), torch.arange(50, 100)]
    assert prompts_of(windows, 4, 3).tolist() == [[0, 1, 2], [25, 26, 27], [50, 51, 52], [75, 76, 77]]
    assert prompts_of(windows, 50, 8).shape == (50, 2)  # never into the next one
    with pytest.raises(FormatError, match="found 101 prompts of 100 tokens"):
        prompts_of(windows, 101)


def test_greedy_continuations_are_those_of_whole_passes(models: Path) -> None:
    model = lowbit.load(models / "plain")
    prompts = torch.randint(3, 259, (3, 7), generator=torch.Generator().manual_seed(3))
    got = continue_greedily(model, prompts, length=5, batch=2)
    text = prompts
    with torch.inference_mode():
        for _ in range(5):
            text = torch.cat([text, model(text).logits[:, -1:].argmax(-1)], 1)
    assert torch.equal(got, text[:, 7:])


def test_agreement_and_layers_in_the_rows(models: Path, capsys: pytest.CaptureFixture[str]) -> None:
    more = ["--agreement", 3, "--layers"]
    rows = samples.json_of(capsys, "eval", models / "plain", models / "w4a4", models / "plain", *common(models), *more)[
        "models"
    ]
    assert "generation" not in rows[0] and rows[1]["generation"]["prompts"] == 3
    assert 0 <= rows[1]["generation"]["share"] <= 1
    assert [e["name"] for e in rows[1]["layers"]][:2] == [f"model.layers.0.self_attn.{n}_proj" for n in "qk"]
    assert len(rows[1]["layers"]) == 14 and all(0 < e["error"] < 1 and e["rows"] == 63 for e in rows[1]["layers"])
    assert (
        main(["eval", *(str(models / n) for n in ("plain", "w4a4")), *map(str, common(models)), *map(str, more)]) == 0
    )
    out = capsys.readouterr().out
    assert "same text" in out and "down_proj" in out and "±" in out and "bits/weight" in out


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["w4a4", "w8a8", "--kl"], "--kl: found no plain directory to compare with"),
        (["w4a4", "--agreement"], "--agreement: found no plain directory"),
        (["w4a4", "--layers"], "--layers: found no plain directory"),
        (["plain", "w4a4", "--agreement", "-1"], "--agreement: found -1"),
        (["plain", "w4a4", "--agreement", "999"], "agreement: found 999 prompts of 192 tokens"),
        (["plain", "--kl"], "--kl: found one plain directory alone"),
        (["plain", "w4a4", "--reference", "nowhere"], "nowhere: found no such directory"),
    ],
)
def test_what_cannot_be_compared_is_refused(
    words: list[str], said: str, models: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    names = {"plain", "w4a4", "w8a8"}
    arguments = [str(models / w) if w in names else w for w in words]
    assert main(["eval", *arguments, *map(str, common(models))]) == 2
    out, err = capsys.readouterr()
    assert said in err and len(err.splitlines()) == 1 and not out


def test_other_tokens_are_refused(models: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    from tokenizers import Tokenizer, pre_tokenizers
    from tokenizers import models as kinds

    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())  # the same bytes under other numbers
    tokenizer = Tokenizer(kinds.BPE({token: number for number, token in enumerate(alphabet)}, []))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    model = lowbit.load(models / "plain")
    model.name_or_path = ""
    lowbit.save(model, tmp_path / "odd")
    transformers.PreTrainedTokenizerFast(tokenizer_object=tokenizer).save_pretrained(tmp_path / "odd")
    assert main(["eval", str(models / "plain"), str(tmp_path / "odd"), *map(str, common(models))]) == 2
    assert "odd: found a tokenizer that gives other tokens" in capsys.readouterr().err


# -- drawings and the page -----------------------------------------------------------------------------------------------


def rects(svg: str) -> list[ElementTree.Element]:
    return [r for r in ElementTree.fromstring(svg).iter(f"{SVG}rect") if r.find(f"{SVG}title") is not None]


def tip(rect: ElementTree.Element) -> str:
    title = rect.find(f"{SVG}title")
    assert title is not None and title.text is not None
    return title.text


def test_a_grid_has_blocks_and_linears() -> None:
    names = ["m.layers.0.a.q", "m.layers.0.mlp.up", "m.layers.10.a.q", "lm_head"]
    found = grid([{"name": n, "error": i / 10} for i, n in enumerate(names)])
    assert found == Grid(
        ["0", "10", "-"], ["q", "up", "lm_head"], [[0, 0.1, None], [0.2, None, None], [None, None, 0.3]]
    )
    twice = grid([{"name": n, "error": 1.0} for n in ("l.0.attn.out", "l.0.mlp.out")])
    assert twice.columns == ["attn.out", "mlp.out"]


def test_a_heat_map_is_darker_for_more() -> None:
    cells = Grid(["0", "1"], ["q", "<k>"], [[0.01, 0.1], [0.03, None]])
    marks = {tip(r): r.attrib for r in rects(heat_map(cells, "errors")) if tip(r).startswith("block")}
    assert len(marks) == 3

    def light(words: str) -> int:
        return sum(int(marks[words]["fill"][i : i + 2], 16) for i in (1, 3, 5))

    assert light("block 0, q: 0.01") > light("block 1, q: 0.03") > light("block 0, <k>: 0.1")
    assert float(marks["block 1, q: 0.03"]["x"]) > float(marks["block 0, q: 0.01"]["x"])
    assert heat_map(Grid([], [], []), "nothing").startswith("<svg")
    assert heat_map(Grid(["0"], ["q"], [[float("nan")]]), "nothing").startswith("<svg")


def test_sensitivity_bars_are_in_proportion_and_say_what_was_chosen() -> None:
    def choice(block: int, name: str, weights: int, loss: float | None, bits: int) -> dict[str, Any]:
        return {"names": [f"l.{block}.{name}"], "weights": weights, "sensitivity": loss, "bits": bits}

    budget = {"choices": [choice(0, "o", 100, 0.2, 4), choice(1, "o", 100, 0.4, 8), choice(0, "d", 400, 0.4, 4),
                          choice(1, "d", 400, None, 8)]}  # fmt: skip
    bars = {tip(r): r.attrib for r in rects(sensitivity_bars(budget, "w")) if r.get("class") == "bar"}
    heights = {words: float(found["height"]) for words, found in bars.items()}
    first, second, third = (heights[w] for w in ("block 0, o: KL 0.2, 4 bits", "block 1, o: KL 0.4, 8 bits",
                                                 "block 0, d: KL 0.4, 4 bits"))  # fmt: skip
    assert len(bars) == 3 and second == pytest.approx(2 * first, abs=0.2) and third == pytest.approx(first / 2, abs=0.2)
    assert bars["block 1, o: KL 0.4, 8 bits"]["fill"] != bars["block 0, o: KL 0.2, 4 bits"]["fill"]


def test_labels_cover_neither_marks_nor_each_other() -> None:
    """Twenty marks in one place: every label that is written has its own place."""
    points = [Point(4 + 0.001 * i, 1 + 0.0005 * i, f"a long name {i}") for i in range(20)]
    svg = report.plot({"a": points, "b": [Point(9, 9)]}, "x", "y")
    root = ElementTree.fromstring(svg)
    labels = [t for t in root.iter(f"{SVG}text") if (t.text or "").startswith("a long name")]
    places = [(float(t.attrib["x"]), float(t.attrib["y"])) for t in labels]
    assert 1 <= len(labels) < 20
    for i, (x, y) in enumerate(places):
        assert all(abs(y - b) >= 14 or abs(x - a) >= 6.6 * 13 for a, b in places[:i])


def test_the_page_has_every_part_and_stands_alone(
    models: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    target = tmp_path / "report.html"
    paths = [models / n for n in ("plain", "w4a4", "w8a8")]
    found = samples.json_of(capsys, "eval", *paths, *common(models), "--kl", "--report", target)
    html = target.read_text("utf-8")
    for title in ("Quality against size", "Layer by layer", "Sensitivity"):
        assert f"<h2>{title}</h2>" in html
    assert html.count("<svg") == 4 and all(f"{row['ratio']:.4f}" in html for row in found["models"] if "ratio" in row)
    assert not re.search(
        r"(?:src|href)\s*=|<script|@import|url\(|https?:", html.replace(' xmlns="http://www.w3.org/2000/svg"', "")
    )
    alone = tmp_path / "alone.html"
    assert main(["eval", str(models / "w4a4"), *map(str, common(models)), "--report", str(alone)]) == 0
    assert "Sensitivity" in alone.read_text("utf-8") and "Layer by layer" not in alone.read_text("utf-8")


def test_names_are_short_where_that_is_clear() -> None:
    assert name_of("a/x", ["a/x", "b/y"]) == "x" and name_of("a/x", ["a/x", "b/x"]) == "a/x"
