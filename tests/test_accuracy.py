"""bench/accuracy.py and what it stands on: the simulation equals the reference, the paired figures equal naive ones."""

from __future__ import annotations

import importlib.util
import json
import math
import subprocess
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
from torch import nn

import samples
from lowbit import reference
from lowbit.formats import lowbit as lowbit_format
from lowbit.prove.paired import agreement, mean_of, ratio, score
from lowbit.prove.simulate import Simulated, running, simulate, stored_bits
from lowbit.types import Activation, FormatError, LowRank, QuantizedWeight

transformers = pytest.importorskip("transformers")
ROOT = Path(__file__).parents[1]
ACTIVATIONS = [Activation(16, "none"), Activation(8, "token"), Activation(8, "group"), Activation(4, "group", 0.85)]
TEXT = "The quick brown fox jumps over the lazy dog; it was not amused. " * 40


def script() -> ModuleType:
    spec = importlib.util.spec_from_file_location("accuracy", ROOT / "bench" / "accuracy.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules["accuracy"] = module
    spec.loader.exec_module(module)
    return module


def full(form: str) -> QuantizedWeight:
    """Weights [96, 192] of every form, behind transforms or not."""
    g = samples.generator(form)
    q = samples.weight(96, 192, 64, zeros=form == "zeros", perm=form == "perm", smooth=form != "plain", bias=True)
    if form == "eight":
        return samples.weight(96, 192, -1, bits=8, zeros=False, smooth=True)
    if form != "branch":
        return q
    branch = LowRank(torch.randn(192, 16, generator=g).half() / 8, torch.randn(96, 16, generator=g).half() / 8)
    q = samples.weight(96, 192, 64, zeros=False, smooth=True, bias=True)
    return q.with_(low_rank=branch, hadamard=64)


@pytest.mark.parametrize("activation", ACTIVATIONS, ids=str)
@pytest.mark.parametrize("form", ["plain", "zeros", "perm", "branch", "eight"])
def test_the_simulation_is_the_reference(form: str, activation: Activation) -> None:
    q, x = full(form).with_(activation=activation), samples.rows(33, 192)
    x[3] = 0
    want = reference.linear(x, q)
    got = Simulated(q)(x.reshape(3, 11, 192)).reshape(33, 96)
    assert reference.error(got, want) < 1e-5
    assert float((got - want).abs().max()) < 1e-5 * float(want.abs().max())
    other = Activation(8, "token") if activation.bits != 8 else Activation(16, "none")
    assert reference.error(got, reference.linear(x, q, other)) > 1e-4  # the bound tells activations apart


def test_activations_change_for_a_while_and_come_back() -> None:
    model = nn.Sequential(nn.Linear(192, 96))
    q = full("branch").with_(activation=Activation(4, "group"))
    layers = simulate(model, {"0": q})
    x = samples.rows(5, 192)
    four = model(x)
    with running(layers, {"0": Activation(8, "token")}):
        assert reference.error(model(x), reference.linear(x, q, Activation(8, "token"))) < 1e-5
    assert torch.equal(model(x), four)


def test_stored_bits_count_everything_but_the_bias() -> None:
    q = samples.weight(64, 128, 64, zeros=False, smooth=True, bias=True)
    # codes 4, an fp16 scale a group of 64, one fp16 a column of 64 rows
    assert stored_bits({"a": q}) == 4 + 16 / 64 + 16 / 64
    zeros = samples.weight(64, 128, 64, zeros=True, smooth=True, bias=True)
    of_zeros = lowbit_format.write(zeros, "a")["a.w_zeros"].nbytes
    assert stored_bits({"a": zeros}) == 4 + 16 / 64 + 16 / 64 + 8 * of_zeros / (64 * 128) and of_zeros > 0
    branch = LowRank(torch.zeros(128, 16).half(), torch.zeros(64, 16).half())
    assert stored_bits({"a": q.with_(low_rank=branch)}) == 4 + 16 / 64 + 16 / 64 + 16 * 16 * (128 + 64) / (64 * 128)


def test_the_ratio_is_paired() -> None:
    a, b = torch.tensor([1.0, 3.0, 2.0, 4.0]).double(), torch.tensor([1.5, 2.5, 2.5, 4.5]).double()
    found = ratio(b, a)
    assert math.isclose(found.value, math.exp(0.25))  # the differences are .5, -.5, .5, .5
    assert math.isclose(found.error, math.exp(0.25) * 0.5 / math.sqrt(4))
    assert ratio(a + 1, a).error < 1e-12  # equal differences: nothing is uncertain
    assert math.isclose(mean_of(b).error, float(b.std()) / 2)
    with pytest.raises(FormatError, match="found 3 and 4 tokens"):
        ratio(b[:3], a)


def test_divergence_is_the_naive_sum() -> None:
    p, q = torch.randn(300, 50), torch.randn(300, 50)
    wide = torch.softmax(p.double(), -1), torch.softmax(q.double(), -1)
    want = (wide[0] * (wide[0].log() - wide[1].log())).sum(-1)
    assert torch.allclose(reference.divergence(p, q), want, atol=1e-6)
    assert float(reference.divergence(p, p).abs().max()) == 0


@pytest.fixture(scope="module")
def plain(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("plain")
    samples.byte_tokenizer(pad_token="<pad>").save_pretrained(path)
    torch.manual_seed(0)
    config = transformers.LlamaConfig(
        vocab_size=259, hidden_size=64, intermediate_size=128, num_hidden_layers=2, num_attention_heads=2,
        num_key_value_heads=1, head_dim=32, initializer_range=0.2, bos_token_id=1, eos_token_id=2, pad_token_id=0,
    )  # fmt: skip
    transformers.LlamaForCausalLM(config).save_pretrained(path)
    (path / "text.txt").write_text(TEXT, "utf-8")
    return path


def arguments(plain: Path, out: Path, *more: str) -> list[str]:
    text = str(plain / "text.txt")
    sizes = ["--spans", "64", "500", "--tokens", "128", "--context", "64", "--calibration-tokens", "512"]
    return ["--model", str(plain), "--calibration", text, "--text", text, "--out", str(out), *sizes, *more]


def test_the_script_writes_every_line_once(plain: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    module, out = script(), tmp_path / "lines.jsonl"
    names = ["w4a4 rank 16", "w4 g32 asymmetric, rtn", "w8 per row, gptq"]
    chosen = [word for name in names for word in ("--exactly", name)]
    assert module.main(arguments(plain, out, *chosen)) == 0
    lines = [json.loads(text) for text in out.read_text().splitlines()]
    acts = {r.name: r.acts for r in module.RECIPES}
    want = {(n, a, s) for n in names for a in acts[n] for s in (64, 500)}
    assert {(x["name"], x["act"], x["span"][0]) for x in lines} == want and len(lines) == len(want)
    assert all(x["tokens"] == 126 and x["span"][1] == x["span"][0] + 128 for x in lines)
    by = {(x["name"], x["act"], x["span"][0]): x for x in lines}
    four, eight = by["w4a4 rank 16", "a4", 64], by["w4a4 rank 16", "a8-token", 64]
    assert four["ppl"] != eight["ppl"] and four["ppl_ref"] == eight["ppl_ref"] and four["kl"] > eight["kl"] > 0
    assert math.isclose(four["ratio"], four["ppl"] / four["ppl_ref"], rel_tol=1e-9) and four["se"] > 0
    assert by["w8 per row, gptq", "a8-token", 64]["bits_per_weight"] > 8
    spent = {act: by["w4a4 rank 16", act, 64] for act in ("a4", "a4, budget 4.5", "a4, budget 6", "a8-token")}
    bits = [x["activation_bits"] for x in spent.values()]
    assert bits[0] == 4 and 4 < bits[1] <= 4.5 and 5 < bits[2] <= 6 and bits[3] == 8
    assert spent["a4"]["kl"] > spent["a4, budget 6"]["kl"] > spent["a8-token"]["kl"]
    for x in lines:
        assert {"model", "method", "options", "device", "torch", "transformers", "lowbit", "date"} <= set(x)
    size = out.stat().st_size
    assert module.main(arguments(plain, out, *chosen)) == 0 and out.stat().st_size == size  # nothing is done twice


def test_its_figures_are_those_of_the_quantized_model(plain: Path, tmp_path: Path) -> None:
    """The same recipe through the command line's own path and the reference's 4-bit activations in the layers."""
    import lowbit
    from lowbit.models.load import exactly
    from lowbit.prove.compare import perplexity

    out = tmp_path / "lines.jsonl"
    assert script().main(arguments(plain, out, "--exactly", "w4a4 rank 16")) == 0
    line = next(x for x in map(json.loads, out.read_text().splitlines()) if x["act"] == "a4" and x["span"][0] == 64)
    tokenizer = transformers.AutoTokenizer.from_pretrained(plain)
    model = lowbit.load(plain)
    lowbit.quantize(model, "w4a4", calibration=plain / "text.txt", tokenizer=tokenizer, tokens=512, progress=False)
    exactly(model)
    found = perplexity(model, TEXT, tokenizer, context=64, tokens=128, skip=64)
    assert math.isclose(found.perplexity, line["ppl"], rel_tol=1e-4)
    plain_model = lowbit.load(plain)
    assert math.isclose(perplexity(plain_model, TEXT, tokenizer, context=64, tokens=128, skip=64).perplexity,
                        line["ppl_ref"], rel_tol=1e-5)  # fmt: skip


def test_a_checkpoint_of_others_is_read(plain: Path, tmp_path: Path) -> None:
    import lowbit

    model = lowbit.load(plain)
    lowbit.quantize(model, "w4a8", "rtn", progress=False)
    lowbit.save(model, tmp_path / "made")
    out = tmp_path / "lines.jsonl"
    more = ["--checkpoint", f"somebody's={tmp_path / 'made'}", "--acts", "a8"]
    assert script().main(arguments(plain, out, *more)) == 0
    assert script().main(arguments(plain, out, "--exactly", "w4 g64 asymmetric, rtn")) == 0
    theirs, *_, ours = [x for x in map(json.loads, out.read_text().splitlines()) if x["span"][0] == 64]
    assert theirs["name"] == "somebody's" and ours["act"] == "a8" and theirs["ppl"] == ours["ppl"]
    assert theirs["bits_per_weight"] == ours["bits_per_weight"]


def test_wrong_arguments_are_one_line(plain: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    module = script()
    for words in (["--rows", "no such"], ["--rows", "rtn", "--spans", "99999"]):
        try:
            assert module.main(arguments(plain, tmp_path / "x", *words)) == 2
        except FormatError as error:
            assert "99999" in str(error)
    assert module.main(["--model", str(plain)]) == 2 and "--text, --out" in capsys.readouterr().err


def test_nothing_of_it_needs_the_compiled_library(tmp_path: Path) -> None:
    """The script's imports and a pass of its layers, in a copy of the package that has no library."""
    import shutil

    copied = tmp_path / "src" / "lowbit"
    shutil.copytree(ROOT / "src" / "lowbit", copied, ignore=shutil.ignore_patterns("*.so", "__pycache__"))
    (tmp_path / "bench").mkdir()
    shutil.copy(ROOT / "bench" / "accuracy.py", tmp_path / "bench")
    command = [sys.executable, str(tmp_path / "bench" / "accuracy.py"), "--list"]
    alone = {"PATH": "", "PYTHONPATH": str(tmp_path / "src")}
    done = subprocess.run(command, capture_output=True, text=True, cwd=tmp_path, env=alone)
    assert done.returncode == 0 and "w4a4 rank 16" in done.stdout, done.stderr


def test_scores_without_a_reference(plain: Path) -> None:
    model: Any = transformers.AutoModelForCausalLM.from_pretrained(plain).eval()
    windows = [torch.arange(10, 40), torch.arange(50, 60)]
    alone, same = score(model, windows), score(model, windows, model)
    assert alone.kl is None and torch.equal(alone.nll, same.nll) and alone.nll.shape == (38,)
    assert same.kl is not None and float(same.kl.abs().max()) == 0 and agreement(same, alone).value == 1
