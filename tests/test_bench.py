"""The bench measures what it says: turns, rotation, right results beside every time. Never how fast."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

from lowbit import ops
from lowbit.bench import layers, peers, timer
from lowbit.bench.timer import Competitor
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
