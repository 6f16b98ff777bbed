"""docs/numbers.md is what the generator makes of the kept JSON lines, to the letter."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import pytest

from lowbit.bench import accuracy, cuda_figures, cuda_kernels, numbers
from lowbit.types import FormatError

ROOT = Path(__file__).parents[1]


def kept() -> list[str]:
    """The files in the order in which `make accuracy` gives them."""
    results = ROOT / "bench" / "results"
    return [str(path) for folder in (results, results / "cuda") for path in sorted(folder.glob("*.jsonl"))]


def test_the_page_is_generated() -> None:
    lines = numbers.read(kept())
    assert lines and (ROOT / "docs" / "numbers.md").read_text("utf-8") == numbers.page(lines)
    kernels = (ROOT / "docs" / "kernels.md").read_text("utf-8")
    assert kernels == cuda_kernels.fill(kernels, [x for x in lines if x["bench"] == "cuda"])


def test_every_line_is_in_a_table() -> None:
    counted([x for x in numbers.read(kept()) if x["bench"] not in (*numbers.OF_CUDA, "rtf")])


def counted(lines: list[dict[str, Any]]) -> None:
    """A row a line of speed; one for all spans of a way to quantize; and the heads of the tables."""
    judged = [x for x in lines if x["bench"] == "accuracy"]
    rows = [row for row in numbers.page(lines).splitlines() if row.startswith("| ") and "---" not in row]
    wanted = len(lines) - len(judged) + len({accuracy.row_of(x) for x in judged})
    assert len(rows) == wanted + numbers.page(lines).count("\n|---|")
    page = numbers.page(lines)
    assert all(f"{x['ratio']:.4f}" in page for x in judged)
    assert all(f"{x['kl']:.4f} ± {x['kl_se']:.4f}" in page for x in judged if "kl" in x)


def test_the_charts_are_generated_and_linked() -> None:
    lines = numbers.read(kept())
    found = {path.name: path.read_text("utf-8") for path in (ROOT / "docs" / "charts").iterdir()}
    assert found == numbers.charts(lines)
    assert all(f"](charts/{name})" in numbers.page(lines) for name in found)


def test_other_files_are_refused(tmp_path: Path) -> None:
    for text in ("not json", "[1]", '{"bench": "other"}'):
        path = tmp_path / "x.jsonl"
        path.write_text(text, "utf-8")
        with pytest.raises(FormatError, match=r"x\.jsonl line 1: found"):
            numbers.read([str(path)])


def judged(name: str, table: str, act: str, bits: float, *ratios: float) -> list[dict[str, Any]]:
    """Lines of bench/accuracy.py, one a span."""
    base = {"bench": "accuracy", "model": "m", "text": "t", "context": 1024, "calibration": ["c4", 32768, 256],
            "device": "d", "torch": "2", "lowbit": "0", "commit": "c", "date": "2026", "name": name, "table": table,
            "act": act, "bits_per_weight": bits, "quantize_s": 12.3, "method": "gptq", "options": {"group": 64}, "se": 0.004, "kl": 0.1, "kl_se": 0.002}  # fmt: skip
    return [
        {**base, "span": [start, start + 8192], "ppl_ref": 19.5 + i, "ratio": ratio, "kl": 0.1 + ratio / 100}
        for i, (start, ratio) in enumerate(zip((60000, 100000), ratios, strict=True))
    ]


def test_accuracy_stands_beside_what_was_to_be_reached(tmp_path: Path) -> None:
    made = [
        *judged("w4a4 rank 16", "w4a4", "a4", 5.0, 1.16, 1.21),
        *judged("w4 g64 symmetric, gptq", "w4", "a8", 4.27, 1.11, 1.115),
        *judged("w4 g64 asymmetric, gptq", "w4", "a8", 4.4, 1.10, 1.10),  # more bits than its target allows
        *({**x, "activation_bits": 4.98} for x in judged("w4a4 rank 16", "w4a4", "a4, budget 5", 5.0, 1.15, 1.15)),
        *judged("w4a4 rank 16, iterative", "w4a4", "a4", 5.0, 3.06, 3.1),
        *({**x, "method": "rtn"} for x in judged("w4 g64 symmetric, rtn", "w4", "a4", 4.25, 4.0, 4.1)),
    ]
    peer = {"settings": {"iters": 200, "samples": 128}, "quantize_device": "GPU"}
    for x in judged("tool 1.0, g64 symmetric", "peers", "a16", 4.25, 1.2, 1.2):
        made.append({key: value for key, value in {**x, **peer}.items() if key not in ("kl", "kl_se")})
    path = tmp_path / "a.jsonl"
    path.write_text("".join(json.dumps(x) + "\n" for x in made), "utf-8")
    lines = numbers.read([str(path)])
    counted(lines)
    page = numbers.page(lines)
    rows = {
        row.split("|")[1].strip(): row for row in page.splitlines() if row.startswith("| w4") and "budget" not in row
    }
    assert "| a4, budget 5 (4.98 bits) |" in page
    assert "| **1.1600** ± 0.0040 |" in rows["w4a4 rank 16"] and "| 1.2100 ± 0.0040 |" in rows["w4a4 rank 16"]
    assert "| 1.2 (1.14) |" in rows["w4a4 rank 16"] and "**1.1150**" in rows["w4 g64 symmetric, gptq"]
    assert "1.12" not in rows["w4 g64 asymmetric, gptq"] and "**" not in rows["w4 g64 asymmetric, gptq"]
    assert "tokens 60000 … 68191: 19.500; tokens 100000 … 108191: 20.500" in page
    assert "| iters 200, samples 128 | 12 s on GPU |" in page
    drawn = {name: "".join(ElementTree.fromstring(svg).itertext()) for name, svg in numbers.charts(lines).items()}
    assert all(f"](charts/{name})" in page for name in drawn)
    assert "1 points not shown" in drawn["accuracy-1-bits.svg"]  # 4.1 is off the scale
    assert "(1 above 1.6 left out)" in drawn["accuracy-1-loss.svg"]
    assert "21.0 ± 0.4 %, 5.00 bits" in drawn["accuracy-1-loss.svg"]


def test_every_target_names_a_recipe_of_the_script() -> None:
    import importlib.util

    spec = importlib.util.spec_from_file_location("accuracy_script", ROOT / "bench" / "accuracy.py")
    assert spec is not None and spec.loader is not None
    script = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(script)
    known = {(recipe.name, act) for recipe in script.RECIPES for act in recipe.acts}
    assert set(accuracy.NAMED) <= known
    assert {group for group, _ in accuracy.GROUPS} <= {r.scheme.group_size for r in script.RECIPES if r.table == "w4"}
    assert {recipe.table for recipe in script.RECIPES} <= set(accuracy.TABLES)


def cuda(**line: Any) -> dict[str, Any]:
    return {"bench": "cuda", "chip": "NVIDIA H200", "cuda": "13.0", "torch": "2", "lowbit": "0", "date": "2026-12-01",
            "rank": 16, "source": "x.jsonl", **line}  # fmt: skip


def test_of_several_lines_of_a_case_the_last_counts() -> None:
    chain = {"layer": "w4two", "m": 685, "linears": 30.5, "quantize": 9.0, "all": 40.0}
    lines = [
        cuda(**chain, by_table=29.4, date="2026-12-02"),
        cuda(**chain, by_table=25.1, date="2026-12-03"),
        cuda(**chain, by_table=99.0),
        cuda(peers="layer", m=685, fp16=44.1, fp8=36.8),
        cuda(FAIL="speed", gemm="w8", m=685, shape="qkv", error="no"),
        cuda(error="w4two", shape="4096x1024", m=685, frobenius=9e-3),
        cuda(quantize="685x1024", plain_r0=2.0, add_norm_r16=2.7),
        cuda(quantize="low", worst=1e-3),
    ]
    page = numbers.page(lines)
    rows = {row.split("|")[1].strip(): row.split("|")[2:-1] for row in page.splitlines() if row.startswith("| ")}
    whole = rows["four fused linears of a layer, M=685, two-level scales"]
    assert [cell.strip() for cell in whole[:2]] == ["≤ 30, aim 24", "**25.1**"]  # 99.0 stands later, but is older
    assert "fp16 44.1, fp8 36.8, prototype without low rank 29.5" in whole[2]
    fused = rows["activation quantize + low-rank down, fused with add + RMSNorm, M=685, K=1024"]
    assert [cell.strip() for cell in fused] == ["≤ 2.5", "2.7", ""]
    assert rows["error, W4A8, rank 16, M=685, 4096×1024, two-level scales"][1].strip() == "**9.00e-03**"
    assert rows["four fused linears of a layer, M=172, two-level scales"][1].strip() == "not measured"
    assert "**Checks that failed in these runs:** speed" in page and "25.1 / 40.0" in page
    assert all(f"≤ {f.most:g}" in page for f in cuda_figures.FIGURES)


def test_joined_launches_stand_beside_the_two_that_they_are() -> None:
    lines = [
        cuda(joined="attention", m=685, apart=12.84, us=11.36),
        cuda(joined="attention", m=172, apart=8.0, us=8.0),
        cuda(joined="layer", m=685, apart=60.5, us=52.25),
    ]
    rows = numbers.page(lines).splitlines()
    assert "| µs, attention and the quantizer of o apart / joined | M=172 | M=685 |" in rows
    assert "| attention | 8.0 / 8.0 | 12.8 / 11.4 |" in rows and "| layer | | 60.5 / 52.2 |" in rows


def test_a_predicted_figure_stands_in_no_measured_column() -> None:
    known = {"bench": "predicted", "chip": "NVIDIA L4", "lowbit": "0", "date": "2026-12-01", "source": "p.jsonl"}
    foretold = [
        {
            **known,
            "loop": "gemm_int4<64>",
            "matrix": 32,
            "issued": 20.0,
            "tensor_cycles": 1024.0,
            "issue_cycles": 1280.0,
        },
        {**known, "int4": "qkv", "shape": "4096x1024", "m": 685, "us": 17.58, "bound": "schedulers"},
        {**known, "layer": "w4a4", "m": 685, "us": 67.79},
    ]
    row = "| qkv, 4096×1024 | 685 | *17.6* | schedulers | |"
    assert row in numbers.page(foretold).splitlines()
    mine = cuda(chip="NVIDIA L4", int4="qkv", shape="4096x1024", m=685, us=21.25, with_quantize=25.0)
    page = numbers.page([*foretold, mine])
    assert "| qkv, 4096×1024 | 685 | *17.6* | schedulers | 21.2 |" in page.splitlines()
    assert "to reach | measured" not in page  # those are the H200's
    assert "17.6" not in page.replace("*17.6*", "") and "67.8" not in page.replace("*67.8*", "")


def test_the_sweep_over_m_is_a_table() -> None:
    known = {"bench": "cuda-layers", "chip": "NVIDIA H200", "n": 128, "k": 256, "torch": "2", "date": "2026-12-01",
             "source": "s.jsonl"}  # fmt: skip
    lines = [
        {**known, "name": name, "m": m, "cold_us": 2.0 * m, "warm_us": 1.0 * m, "copies": 2, "ratio": 1.0}
        for name in ("lowbit w8", "cuBLAS float16")
        for m in (1, 16)
    ]
    lines += [{**known, "name": "tinygemm int4", "left_out": "no such operator"}]
    page = numbers.page(lines)
    assert "| | M=1 | M=16 |" in page and "| lowbit w8 | 2.0 / 1.0 | 32.0 / 16.0 |" in page
    assert "Left out: tinygemm int4: no such operator." in page


def test_the_table_of_kernels_has_limits_and_shares() -> None:
    line = cuda(gemm="w4two", shape="qkv", m=685, us=7.0, table=7.2, portable=38.0)
    rows = [row for row in cuda_kernels.table([line]).splitlines() if "| 4096×1024, M=685 |" in row]
    # 2.9 G products at 132 * 4096 * 1.84 GHz are 2.9 µs, 40 % of 7.2
    assert "| 2.9 G | 2.9, tensor cores | 7.2 | 40 % |" in rows[0] and "| 38.0 | 8 % |" in rows[1]
    assert cuda_kernels.table([]).count("not measured") == len(cuda_kernels.ROWS)
    page = f"a\n{cuda_kernels.BEGIN}\nold\n{cuda_kernels.END}\nb"
    filled = cuda_kernels.fill(page, [line])
    assert "old" not in filled and filled.startswith("a\n") and filled.endswith("\nb")
    assert cuda_kernels.fill(filled, [line]) == filled
    with pytest.raises(ValueError, match="accepted is a page with both"):
        cuda_kernels.fill("nothing", [])
