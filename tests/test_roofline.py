"""The roofline: counts against sums done by hand, ceilings, what runs where, the command line."""

from __future__ import annotations

import json
import math
import xml.etree.ElementTree as ET
from pathlib import Path
from typing import Any

import pytest

from lowbit.cli import main
from lowbit.prove import ceilings, measured, roofline, roofline_plot, shapes, work
from lowbit.prove.chips import CHIPS, Chip, Rate, preset
from lowbit.prove.work import PRECISIONS
from lowbit.types import FormatError

ROOT = Path(__file__).parents[1]
L4 = CHIPS["l4"]


def run(capsys: pytest.CaptureFixture[str], *arguments: object) -> dict[str, Any]:
    assert main(["roofline", *map(str, arguments), "--json"]) == 0
    found: dict[str, Any] = json.loads(capsys.readouterr().out)
    return found


def refused(capsys: pytest.CaptureFixture[str], *arguments: object) -> str:
    assert main(["roofline", *map(str, arguments)]) == 2
    out, err = capsys.readouterr()
    assert not out and len(err.splitlines()) == 1
    return err


def test_the_check_value(capsys: pytest.CaptureFixture[str]) -> None:
    """700 x 2048 x 1024 on an L4, from the issue."""
    found = run(capsys, "--device", "l4", "--linear", "700x2048x1024")
    (fp16,) = [row for row in found["linears"] if row["precision"] == "fp16"]
    assert [round(fp16[key], 3) for key in ("gflop", "mb")] == [2.936, 8.495]
    assert [round(fp16[key], 1) for key in ("flop_per_byte", "us")] == [345.6, 28.3]
    assert fp16["bound"] == "memory" and fp16["runs_at"] == "fp16"
    assert fp16["share_of_break_even"] == pytest.approx(fp16["flop_per_byte"] / (121e12 / 300e9))


def test_bytes_of_every_precision_by_hand() -> None:
    m, n, k, low = 3, 64, 128, 16
    sizes = {name: work.product("", m, n, k, p) for name, p in PRECISIONS.items()}
    y = 2 * m * n
    assert sizes["fp16"].bytes == 2 * (m * k + n * k) + y
    assert sizes["fp8"].bytes == sizes["w8a8"].bytes == m * k + 4 * m + n * k + 4 * n + y
    assert sizes["w4a8"].bytes == m * k + 4 * m + n * k // 2 + 2 * n * 2 + y  # two groups of 64
    lows = 2 * low * (m + n)
    assert sizes["w4a4"].bytes == m * k // 2 + 4 * m * 2 + n * k // 2 + 2 * n * 2 + y + lows
    assert sizes["w4a4"].operations == (("int4", 2 * m * n * k), ("fp16", 2 * m * n * low))
    assert {w.operations for name, w in sizes.items() if name in ("w8a8", "w4a8")} == {(("int8", 2 * m * n * k),)}


def test_the_quantize_pass_by_hand() -> None:
    m, k = 3, 128
    plain = work.rows("", m, k, PRECISIONS["w8a8"])
    assert plain.bytes == 2 * m * k + m * k + 4 * m and plain.operations == (("fp32", 3 * m * k),)
    low = work.rows("", m, k, PRECISIONS["w4a4"], reads=2, keeps=1, extra=5, rank=16)
    assert low.bytes == 3 * 2 * m * k + m * k // 2 + 4 * m * 2 + 2 * 16 * (m + k)
    assert low.operations == (("fp32", m * k * (5 + 3 + 6)), ("fp16", 2 * m * k * 16))
    assert work.rows("", m, k, PRECISIONS["fp16"], reads=2, keeps=1, extra=5).bytes == 4 * 2 * m * k
    assert [w.name for w in work.linear(3, 64, 128, PRECISIONS["w4a4"])] == ["quantize 3x64x128", "3x64x128"]
    assert len(work.linear(3, 64, 128, PRECISIONS["fp16"])) == 1


def test_time_is_the_longer_of_the_two_and_units_add_up() -> None:
    chip = Chip("c", Rate(100.0, ""), {"fp32": Rate(10.0, ""), "fp16": Rate(1000.0, ""), "int8": Rate(2000.0, "")}, "c")
    row = roofline.place(work.Work("w", (("int8", 4000), ("fp16", 1000)), 200, 7), chip)
    assert row.compute == 2 + 1 and row.memory == 2 and row.seconds == 3 and row.total == 21
    assert row.bound == "compute" and row.share == 1.5 and row.break_even == 20 and row.intensity == 25
    slow = roofline.place(work.Work("w", (("int8", 1000),), 200), chip)
    assert slow.bound == "memory" and slow.seconds == 2 and slow.share == slow.intensity / slow.break_even == 0.25


def test_what_a_chip_lacks_runs_elsewhere_and_says_so() -> None:
    hopper, note = PRECISIONS["w4a4"].on(CHIPS["h200"])
    assert (hopper.unit, hopper.act, hopper.weight, hopper.low_rank) == ("int8", 8, 4, True)
    assert note == "no INT4 tensor core: runs at INT8"
    assert PRECISIONS["w4a4"].on(L4) == (PRECISIONS["w4a4"], "")
    ampere, note = PRECISIONS["fp8"].on(CHIPS["a100"])
    assert (ampere.unit, ampere.act, ampere.weight) == ("fp16", 16, 8) and note == "no FP8 tensor core: runs at FP16"
    board, note = PRECISIONS["fp16"].on(CHIPS["pi5"])
    assert board.unit == "fp32" and board.act == 16 and note == "no FP16 arithmetic: runs at FP32"


def test_presets_are_dense_and_say_where_they_come_from() -> None:
    for name, chip in CHIPS.items():
        assert chip.bandwidth.source and all(rate.source for rate in chip.rates.values()), name
        assert chip.rate("int8") > chip.rate("fp32")
        if chip.cores is None:  # each halving of the width at most doubles a dense rate
            assert chip.rate("int8") <= 4.001 * chip.rate("fp16"), name
        if "int4" in chip.rates:
            assert chip.rate("int4") == 2 * chip.rate("int8"), name
        if "fp8" in chip.rates:
            assert chip.rate("fp8") == pytest.approx(2 * chip.rate("fp16"), rel=3e-3), name
    assert "int4" not in CHIPS["h100"].rates and "int4" not in CHIPS["h200"].rates
    assert L4.break_even("int4") == pytest.approx(1617, abs=1)
    assert preset("RTX 4090") is CHIPS["rtx4090"] and preset("Pi-5") is CHIPS["pi5"]
    two = CHIPS["zen5"].of_cores(2)
    assert (
        two.rate("fp32") == CHIPS["zen5"].rate("fp32") / 8 == 2 * 4.3e9 * 64
        and two.bandwidth == CHIPS["zen5"].bandwidth
    )
    with pytest.raises(FormatError, match="accepted on Raspberry Pi 5 is 1 to 4"):
        CHIPS["pi5"].of_cores(5)
    assert L4.of_cores(3) is L4
    assert L4.matches("NVIDIA L4") and not L4.matches("NVIDIA L40S") and CHIPS["pi5"].matches("0xd0b")


def test_omnivoice_by_hand() -> None:
    """28 layers of 7 linears: 440.4 M products a row, 2 operations each."""
    segments = work.audio_segments(685, 250)
    assert [(s.queries, s.keys, s.pairs) for s in segments] == [(435, 435, 435**2), (250, 250, 250**2)]
    found = roofline.step(shapes.OMNIVOICE, segments, L4, "fp16")
    by_name = {row.name: row for row in found.rows}
    products = [by_name[name] for name in ("qkv", "o", "gate, up", "down")]
    assert {row.times for row in products} == {28}
    weights = 28 * (1024 * 4096 + 2048 * 1024 + 1024 * 6144 + 3072 * 1024)
    assert weights == pytest.approx(440.4e6, rel=1e-4)
    assert sum(row.times * row.operations for row in products) == 2 * 685 * weights
    assert by_name["attention"].operations == 4 * (435**2 + 250**2) * 16 * 128
    assert by_name["attention"].bytes == 2 * 128 * 685 * (2 * 16 + 2 * 8)
    assert by_name["heads"].operations == 2 * 500 * 8200 * 1024
    assert found.seconds == pytest.approx(sum(row.times * row.seconds for row in found.rows))
    assert found.kernels == 28 * 9 + 4 and len(roofline.step(shapes.OMNIVOICE, segments, L4, "w4a4").rows) == 14
    said = roofline.utterance(found, L4, 10.0)
    assert said.backbone == pytest.approx(32 * found.seconds) and said.codec == pytest.approx(136e9 / 30.3e12)
    assert said.rtf == pytest.approx((said.backbone + said.codec) / 10)


def test_fewer_bits_move_fewer_bytes_and_take_no_longer() -> None:
    segments = work.audio_segments(685, 250)
    steps = {name: roofline.step(shapes.OMNIVOICE, segments, L4, name) for name in PRECISIONS}
    assert steps["w4a4"].bytes < steps["w4a8"].bytes < steps["w8a8"].bytes < steps["fp16"].bytes
    assert steps["w4a4"].seconds < steps["w4a8"].seconds < steps["w8a8"].seconds < steps["fp16"].seconds


def test_published_figures_stand_apart_from_predicted_ones(capsys: pytest.CaptureFixture[str]) -> None:
    found = run(capsys, "--device", "l4", "--model", "omnivoice", "--tokens", "685")
    assert {x["audio"] for x in found["rtf_predicted"]} == {10.0} and {x["steps"] for x in found["rtf_predicted"]} == {
        32
    }
    assert [x["rtf"] for x in found["rtf_published_by_others"]] == [0.145, 0.094, 0.071, 0.056]
    assert all(x["rtf"] < 0.056 for x in found["rtf_predicted"])  # floors
    assert "rtf_published_by_others" not in run(capsys, "--device", "h200", "--model", "omnivoice")
    assert main(["roofline", "--device", "l4", "--model", "omnivoice"]) == 0
    text = capsys.readouterr().out
    assert "RTF, predicted" in text and "RTF, published" in text and "published by others" in text


def test_causal_attention_counts_what_is_seen() -> None:
    (segment,) = work.text_segments(3, 5)
    assert segment.pairs == 6 + 7 + 8
    (one,) = work.text_segments(1, 0)
    assert one.pairs == 1


def test_configs(tmp_path: Path) -> None:
    llama = {
        "model_type": "llama", "hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2,
        "num_attention_heads": 4, "num_key_value_heads": 2, "vocab_size": 100,
    }  # fmt: skip
    (tmp_path / "config.json").write_text(json.dumps(llama))
    assert shapes.read_config(tmp_path) == shapes.Shape("llama", 2, 64, 4, 2, 16, 128, 100)
    inner = {
        **llama, "model_type": "qwen3", "hidden_size": 1024, "head_dim": 128, "intermediate_size": 3072,
        "num_hidden_layers": 28, "num_attention_heads": 16, "num_key_value_heads": 8,
    }  # fmt: skip
    audio = {"model_type": "omnivoice", "num_audio_codebook": 8, "audio_vocab_size": 1025, "llm_config": inner}
    assert shapes.of_config(audio) == shapes.OMNIVOICE
    for change, words in (
        ({"hidden_size": None}, "hidden_size: found None"),
        ({"num_hidden_layers": "2"}, "num_hidden_layers: found '2'"),
        ({"num_experts": 8}, "num_experts: found 8, accepted is a model without experts"),
    ):
        with pytest.raises(FormatError, match=words):
            shapes.of_config({**llama, **change})
    (tmp_path / "config.json").write_text("{")
    with pytest.raises(FormatError, match="found no JSON"):
        shapes.read_config(tmp_path)


LINES = (
    {"bench": "layers", "name": "ours", "n": 64, "k": 128, "m": 2, "threads": 1, "scheme": "w4a8", "group": 64,
     "x_dtype": "float32", "median_ms": 0.5, "in_cache": False, "chip": "here"},
    {"bench": "layers", "name": "ours", "n": 64, "k": 128, "m": 2, "threads": 1, "scheme": "w4a8", "group": 64,
     "x_dtype": "float32", "median_ms": 0.5, "in_cache": True, "chip": "here"},
    {"bench": "layers", "name": "peer", "n": 64, "k": 128, "m": 2, "threads": 1, "peer": "ggml", "x_dtype": "float32",
     "median_ms": 0.5, "in_cache": False, "chip": "here"},
    {"bench": "cuda", "gemm": "w8", "shape": "qkv", "m": 685, "us": 7.0, "table": 7.5, "rank": 16, "chip": "here"},
    {"bench": "cuda", "layer": "w4two", "m": 685, "linears": 31.0, "by_table": 31.0, "rank": 16, "chip": "here"},
    {"bench": "cuda", "peers": "4096x4096", "m": 16, "fp16": 140.0, "tinygemm": 22.0, "rank": 16, "chip": "here"},
    {"bench": "cuda-layers", "name": "lowbit w4grp with quantize", "n": 64, "k": 128, "m": 17, "rank": 0, "cold_us": 3.0,
     "warm_us": 2.0, "chip": "here"},
    {"bench": "accuracy"},
)  # fmt: skip


def test_measured_lines_beside_their_prediction(tmp_path: Path) -> None:
    file = tmp_path / "lines.jsonl"
    file.write_text("".join(json.dumps(line) + "\n" for line in LINES))
    found, others = measured.read([file])
    assert others == 3 and [x.precision for x in found] == ["w4a8", "w8a8", "w4a8", "fp16", "w4a8"]
    assert [x.seconds for x in found] == pytest.approx([5e-4, 7.5e-6, 31e-6, 140e-6, 3e-6])
    cpu, gemm, layer, peer, both = found
    assert [w.bytes for w in cpu.items] == [(4 + 1) * 2 * 128 + 8, 64 * 64 + 256 + 4 * 2 * 64 + 2 * 128 + 8]
    assert gemm.items[0].operations == (("int8", 2 * 685 * 4096 * 1024), ("fp16", 2 * 685 * 4096 * 16))
    assert len(layer.items) == 4 and len(both.items) == 2 and peer.items[0].operations == (("fp16", 2 * 16 * 4096**2),)
    here = L4._replace(name="here")
    compared = measured.compare(found, here)
    assert len(compared) == 5
    one = compared[3]
    assert one.predicted == pytest.approx(one.rows[0].bytes / 300e9) and one.share == pytest.approx(
        one.predicted / 140e-6
    )
    assert one.as_dict()["measured_us"] == pytest.approx(140.0)
    assert len(measured.compare(found, here, threads=2)) == 4
    with pytest.raises(FormatError, match="found lines of here, accepted with this --device are those of NVIDIA L4"):
        measured.compare(found, L4)
    file.write_text('{"bench": "cuda", "gemm": "w8"}\n')
    with pytest.raises(FormatError, match=r"lines.jsonl: line 1: found no 'chip'"):
        measured.read([file])
    file.write_text("[1]\n")
    with pytest.raises(FormatError, match="line 1: found a JSON list"):
        measured.read([file])


def test_the_kept_lines_of_the_h200_are_read() -> None:
    file = ROOT / "bench/results/cuda/2026-11-30-h200.jsonl"
    found, others = measured.read([file])
    compared = measured.compare(found, CHIPS["h200"])
    assert len(compared) == len(found) > 100
    rest = [line for line in map(json.loads, file.read_text().splitlines()) if not measured._of_line(line)]
    # every product is read; attention, rotation, rounding and the like are of something else
    assert len(rest) == others and not any({"gemm", "gemv"} & set(line) for line in rest)
    assert all(0 < one.share < 1 for one in compared)  # nothing is faster than its floor


def test_the_plot_has_the_ceilings_and_the_points(tmp_path: Path) -> None:
    rows = roofline.linears([(700, 2048, 1024)], L4)
    file = tmp_path / "lines.jsonl"
    file.write_text(json.dumps(LINES[5]) + "\n")
    compared = measured.compare(measured.read([file])[0], L4._replace(name="here"))
    drawing = roofline_plot.draw(L4, rows, compared)
    root = ET.fromstring(drawing)
    space = "{http://www.w3.org/2000/svg}"
    words = " ".join(root.itertext())
    assert "300 GB/s" in words and "fp16 121" in words and "fp8, int8 242.5" in words and "int4 485" in words
    assert "measured fp16" in words and "NVIDIA L4" in words
    lines = [
        [tuple(map(float, p.split(","))) for p in e.attrib["points"].split()] for e in root.iter(space + "polyline")
    ]
    (slope,) = [line for line in lines if line[0][1] != line[1][1]]
    flat = [line for line in lines if line is not slope]
    assert len(flat) == 4
    rise = (slope[1][1] - slope[0][1]) / (slope[1][0] - slope[0][0])
    for line in flat:  # every roof begins on the slope
        assert line[0][1] == pytest.approx(slope[0][1] + rise * (line[0][0] - slope[0][0]), abs=0.3)
    marks = [(float(e.attrib["cx"]), float(e.attrib["cy"])) for e in root.iter(space + "circle")]
    under = [y - (slope[0][1] + rise * (x - slope[0][0])) for x, y in marks if x < flat[0][0][0]]
    assert under and min(under) > -0.3  # no mark above the slope


def test_measuring_ceilings_on_this_machine() -> None:
    chip = ceilings.measure("cpu", "here", seconds=0.0, size=64, mb=4)
    assert chip.bandwidth.per_second > 1e6 and {"fp32", "int8"} <= set(chip.rates) and "int4" not in chip.rates
    assert all(math.isfinite(rate.per_second) and "measured" in rate.source for rate in chip.rates.values())
    assert roofline.linears([(1, 64, 64)], chip)[0].seconds > 0
    with pytest.raises(FormatError, match="found --device tpu"):
        ceilings.measure("tpu", "")


def test_the_command_line(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    drawing = tmp_path / "roof.svg"
    assert (
        main(
            ["roofline", "--device", "h200", "--linear", "1x64x128", "--precision", "int8,w4a4", "--plot", str(drawing)]
        )
        == 0
    )
    text = capsys.readouterr().out
    assert "no INT4 tensor core: runs at INT8" in text and "w8a8" in text and "fp16 " in text and drawing.is_file()
    for arguments, words in (
        (("--device", "l5", "--linear", "1x2x3"), "--device: found 'l5', accepted are l4, a10"),
        (("--device", "cpu", "--linear", "1x2x3"), "accepted with --measure"),
        (("--device", "l4", "--measure", "--linear", "1x2x3"), "accepted is cpu or cuda"),
        (("--device", "l4"), "found nothing to predict"),
        (("--device", "l4", "--linear", "1x2"), "found '1x2', accepted is MxNxK"),
        (("--device", "l4", "--linear", "0x2x3"), "found '0x2x3'"),
        (("--device", "l4", "--linear", "1x2x3", "--precision", "w2"), "--precision: found 'w2'"),
        (("--device", "l4", "--model", "gpt"), "--model: found 'gpt', accepted is omnivoice"),
        (("--device", "l4", "--model", "omnivoice", "--tokens", "100", "--audio", "10"), "accepted is 500 or more"),
        (("--device", "l4", "--model", "omnivoice", "--context", "3"), "--context: found 3"),
        (("--device", "l4", "--config", tmp_path / "no"), "accepted is a config.json"),
        (("--device", "l4", "--measured", tmp_path / "no"), "accepted are JSON lines"),
    ):
        assert words in refused(capsys, *arguments), arguments


def test_the_page_says_what_the_command_prints(capsys: pytest.CaptureFixture[str]) -> None:
    page = (ROOT / "docs/roofline.md").read_text("utf-8")
    assert main("roofline --device l4 --linear 700x2048x1024 --precision fp16".split()) == 0
    row = capsys.readouterr().out.splitlines()[-1].split()
    assert "| " + " | ".join(row) + " |" in page
    words = " ".join(page.split())
    segments = work.audio_segments(685, 250)
    steps = {name: roofline.step(shapes.OMNIVOICE, segments, L4, name) for name in PRECISIONS}
    ms = {name: f"{1e3 * step.seconds:.2f}" for name, step in steps.items()}
    said = "{fp16} ms in fp16, {fp8} in fp8 and 8-bit integers, {w4a8} in w4a8 and {w4a4} in w4a4".format(**ms)
    assert said in words and ms["fp8"] == ms["w8a8"]
    factors = [f"{roofline.utterance(steps[name], L4, 10.0).rtf:.3f}" for name in ("fp16", "fp8", "w4a8", "w4a4")]
    assert "{}, {}, {} and {}, *predicted*".format(*factors) in words
