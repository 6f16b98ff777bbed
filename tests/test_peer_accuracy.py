"""What the scripts of bench/peer_accuracy share: a result is written only where every linear was really quantized."""

from __future__ import annotations

import importlib.util
import json
import sys
from dataclasses import replace
from pathlib import Path
from types import ModuleType

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from lowbit.quantize.rtn import rtn
from lowbit.reference import dequantize
from lowbit.types import SCHEMES
from samples import generator

HERE = Path(__file__).parents[1] / "bench" / "peer_accuracy"
NAMES = ("model.layers.0.mlp.up_proj", "model.layers.0.mlp.down_proj")
GROUP = 32
SCHEME = replace(SCHEMES["w4a8"], group_size=GROUP)


def script(name: str) -> ModuleType:
    spec = importlib.util.spec_from_file_location(f"peer_accuracy_{name}", HERE / f"{name}.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    return module


common, score = script("common"), script("score")


@pytest.fixture
def model(tmp_path: Path) -> Path:
    folder = tmp_path / "model"
    folder.mkdir()
    tensors = {f"{name}.weight": torch.randn(16, 64, generator=generator(name)) for name in NAMES}
    tensors["model.layers.0.input_layernorm.weight"] = torch.full((64,), 1.001)
    tensors["model.embed_tokens.weight"] = torch.randn(8, 64, generator=generator("embed"))
    save_file(tensors, folder / "model.safetensors")
    (folder / "config.json").write_text("{}")
    return folder


def rounded(model: Path) -> dict[str, Tensor]:
    tensors = load_file(model / "model.safetensors")
    return {name: dequantize(rtn(tensors[f"{name}.weight"], SCHEME)) for name in NAMES}


def test_writes_the_weights_and_leaves_the_rest(
    model: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    weights, out = rounded(model), tmp_path / "out"
    common.write_result(model, out, weights, {"peer": "x"}, bits=4, group=GROUP)
    before, after = load_file(model / "model.safetensors"), load_file(out / "model.safetensors")
    assert before.keys() == after.keys()
    for name, value in after.items():
        assert torch.equal(value, weights.get(name.removesuffix(".weight"), before[name])), name
    assert json.loads((out / "settings.json").read_text()) == {"peer": "x", "linears": 2}
    assert (out / "config.json").exists() and "linears" in capsys.readouterr().out


def test_refuses_what_is_not_quantized(model: Path, tmp_path: Path) -> None:
    good = rounded(model)
    dense = load_file(model / "model.safetensors")[f"{NAMES[0]}.weight"]
    broken = good[NAMES[0]].clone()
    broken[0, 0] = torch.nan
    kept = {**good, NAMES[0]: dense}
    for weights, text in (
        ({NAMES[0]: good[NAMES[0]]}, "down_proj: quantized by one"),
        (kept, "up_proj: found 32 different values in a group"),
        ({**good, NAMES[0]: good[NAMES[0]] + dense * 1e-3}, "different values in a group"),
        ({**good, NAMES[0]: broken}, "1 values not finite"),
    ):
        with pytest.raises(SystemExit, match=text):
            common.write_result(model, tmp_path / "out", weights, {}, bits=4, group=GROUP)
    save_file({f"{name}.weight": value for name, value in good.items()}, model / "model.safetensors")
    with pytest.raises(SystemExit, match="found 2 linears that the peer left"):
        common.write_result(model, tmp_path / "out", good, {}, bits=4, group=GROUP)
    assert not (tmp_path / "out").exists()


def test_groups_of_an_order(model: Path, tmp_path: Path) -> None:
    """Groups of columns that are no neighbours pass with their order, and do not without it."""
    perm = torch.randperm(64, generator=generator("perm"))
    back = torch.argsort(perm)
    tensors = load_file(model / "model.safetensors")
    weights = {name: dequantize(rtn(tensors[f"{name}.weight"][:, perm], SCHEME))[:, back] for name in NAMES}
    order = dict.fromkeys(NAMES, (torch.arange(64) // GROUP)[back])
    common.write_result(model, tmp_path / "out", weights, {}, bits=4, group=GROUP, order=order)
    with pytest.raises(SystemExit, match="different values in a group"):
        common.write_result(model, tmp_path / "out", weights, {}, bits=4, group=GROUP)


def test_stored_bits() -> None:
    weights = {"a": torch.empty(16, 64), "b": torch.empty(48, 64)}
    assert common.stored_bits(weights, 4, 64, True, False) == 4.25
    assert common.stored_bits(weights, 4, 64, False, False) == 4.3125
    assert common.stored_bits(weights, 4, 64, True, True) == 4.25 + 2 * 64 * 32 / (64 * 64)


def test_line_of_a_score() -> None:
    settings = {
        "peer": "GPTQModel", "gptqmodel": "7.7.0", "bits": 4, "group": 64, "symmetric": False, "order": "static",
        "mse": 2.4, "samples": 3, "sample_tokens": 5, "bits_per_weight": 4.3125, "seconds": 7, "device": "x",
    }  # fmt: skip
    nll, top = torch.tensor([1.0, 2.0, 4.0]).double(), torch.tensor([1, 2, 3])
    line = score.line_of(settings, score.Score(nll + 0.5, top.flip(0), 0.25), score.Score(nll, top, 0.25))
    assert line["name"] == "GPTQModel 7.7.0, g64 asymmetric, act-order, static groups, mse 2.4"
    assert line["ratio"] == pytest.approx(1.6487212707) and line["se"] == pytest.approx(0, abs=1e-12)
    assert line["ppl"] / line["ppl_ref"] == pytest.approx(line["ratio"])
    assert line["top1"] == pytest.approx(1 / 3) and line["tokens"] == 3 and line["calibration_tokens"] == 15
    assert "gptqmodel" not in line["settings"] and line["settings"]["mse"] == 2.4


def test_scores_of_the_model_are_kept(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[list[int]] = []

    def made(folder: Path, spans: dict[int, list[Tensor]], device: str) -> dict[int, tuple[Tensor, Tensor, float]]:
        asked.append(list(spans))
        return {start: score.Score(torch.ones(6).double() * start, torch.ones(6), 1.0) for start in spans}

    monkeypatch.setattr(score, "score", made)
    windows = list(torch.arange(8).split(4))
    for spans in ({5: windows}, {5: windows}, {5: windows, 9: windows}, {9: windows}, {9: windows[:1]}):
        found = score.kept_score(tmp_path, spans, "cpu", tmp_path / "kept.pt")
        assert all(float(found[start].nll[0]) == start for start in spans)
    assert asked == [[5], [5, 9], [9]]  # again for a new span, and for one of another length
