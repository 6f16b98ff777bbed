"""W4A4 with a low rank over whole tiny models: quantize, save, load, resume, overrides, and the command line."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import lowbit
import samples
from lowbit import reference
from lowbit.checkpoint import open_checkpoint
from lowbit.cli import main
from lowbit.models.calibrate import quantize_model
from lowbit.models.load import exactly
from lowbit.models.overrides import activations_of, parse
from lowbit.prove.inspect import inspect_checkpoint
from lowbit.quantize import effective
from lowbit.reference import two_level
from lowbit.types import Activation, FormatError, QuantizedWeight

transformers = pytest.importorskip("transformers")
FORMS: list[dict[str, Any]] = [{}, {"scales": "two-level"}, {"scales": "channel"}, {"recipe": "iterative"}, {"rank": 0}]
FORMS += [{"rank": 32, "hadamard": False}, {"channel_scales": False}]
NAMES = ["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"]


def llama(**changes: Any) -> Any:
    sizes = {"hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2, "num_attention_heads": 2,
             "vocab_size": 97, "num_key_value_heads": 1, "head_dim": 32, "pad_token_id": 0, "bos_token_id": 1,
             "eos_token_id": 2, "initializer_range": 0.2, **changes}  # fmt: skip
    torch.manual_seed(1)
    return transformers.LlamaForCausalLM(transformers.LlamaConfig(**sizes)).eval()


def ids(*shape: int) -> Tensor:
    return torch.randint(3, 97, shape, generator=torch.Generator().manual_seed(0))


def logits(model: nn.Module) -> Tensor:
    with torch.inference_mode():
        found: Tensor = model(input_ids=ids(2, 24)).logits
        return found


def layers(model: nn.Module) -> list[lowbit.QuantLinear]:
    return [m for m in model.modules() if isinstance(m, lowbit.QuantLinear)]


def same(a: QuantizedWeight, b: QuantizedWeight) -> bool:
    def equal(x: Tensor | None, y: Tensor | None) -> bool:
        return (x is None) == (y is None) and (x is None or y is None or torch.equal(x.float(), y.float()))

    tensors = all(equal(getattr(a, f), getattr(b, f)) for f in ("codes", "scales", "zeros", "smooth", "bias"))
    branch = zip(a.low_rank or (None, None), b.low_rank or (None, None), strict=True)
    rest = (a.activation, a.hadamard, a.group_size, a.bits) == (b.activation, b.hadamard, b.group_size, b.bits)
    return tensors and rest and all(equal(x, y) for x, y in branch)


@pytest.mark.parametrize("form", FORMS, ids=str)
def test_a_saved_model_is_the_same_to_the_bit(form: dict[str, Any], tmp_path: Path) -> None:
    model = llama()
    dense = logits(model)
    report = lowbit.quantize(model, "w4a4", calibration=[ids(8, 64)], progress=False, **form)
    rank = form.get("rank", 16)
    assert report.method == "svdquant" and {r.method for r in report.rows} <= {f"svdquant{rank}", "rtn"}
    assert all(r.error_after <= r.error_before for r in report.rows)
    before, kept = logits(model), [layer.to_quantized() for layer in layers(model)]
    assert 0 < reference.error(before, dense) < 0.5
    lowbit.save(model, tmp_path)
    again = lowbit.load(tmp_path)
    assert torch.equal(logits(again), before)
    assert all(same(a, b.to_quantized()) for a, b in zip(kept, layers(again), strict=True))
    said = open_checkpoint(tmp_path).metadata
    assert (said["method"], said["rank"]) == ("svdquant", rank)
    rotated = form.get("hadamard", True) and form.get("recipe") != "iterative"
    assert said["hadamard"] == (64 if rotated else 0)
    for info, q in zip(inspect_checkpoint(tmp_path).layers, kept, strict=True):
        assert info.activation.startswith("4 group") and (f"low rank {rank}" in info.extras) == (q.low_rank is not None)
        assert ("hadamard 64" in info.extras) == bool(q.hadamard) and ("smooth" in info.extras) == (
            q.smooth is not None
        )
        if form.get("scales"):
            assert two_level(q.scales) is not None
        if form.get("scales") == "channel" or q.k > 64 and form.get("scales"):
            word = "channel scales" if form["scales"] == "channel" else "two-level scales"
            assert word in info.extras
    assert exactly(again) == 14  # true 4-bit activations: farther from the float model than 8-bit ones
    assert reference.error(logits(again), dense) > reference.error(before, dense)


def test_true_four_bit_activations_are_the_references(tmp_path: Path) -> None:
    model = llama()
    lowbit.quantize(model, "w4a4", calibration=[ids(8, 64)], progress=False)
    exactly(model)
    for layer in layers(model):
        x = torch.randn(9, layer.in_features)
        want = reference.linear(x, layer.to_quantized())
        assert reference.error(layer(x), want) < 1e-6


def test_overrides_choose_the_activations_of_some_linears(tmp_path: Path) -> None:
    model = llama()
    given = {"down_proj": "a8", "layers.1": "a8-token", "model.layers.1.self_attn.o_proj": Activation(16, "none")}
    with pytest.raises(FormatError, match="override: found 'layers.1', which names no quantized linear"):
        lowbit.quantize(model, "w4a4", calibration=[ids(2, 32)], progress=False, overrides=given)
    given = {"down_proj": "a8", "model.layers.1": "a8-token", "model.layers.1.self_attn.o_proj": Activation(16, "none")}
    lowbit.quantize(model, "w4a4", calibration=[ids(8, 64)], progress=False, overrides=given)
    lowbit.save(model, tmp_path)
    shown = {info.name: info.activation for info in inspect_checkpoint(tmp_path).layers}
    assert shown["model.layers.0.mlp.down_proj"] == "8 group" and shown["model.layers.0.mlp.up_proj"].startswith(
        "4 group"
    )
    assert shown["model.layers.1.self_attn.o_proj"] == "16 none" and shown["model.layers.1.mlp.down_proj"] == "8 token"
    loaded = lowbit.load(tmp_path)
    assert loaded.model.layers[1].self_attn.o_proj.activation is None
    assert exactly(loaded) == 6 and torch.equal(logits(lowbit.load(tmp_path)), logits(model))


def test_overrides_are_parsed() -> None:
    assert parse("down_proj=a8") == ("down_proj", Activation(8, "group"))
    for text in ("down_proj", "=a8", "x=a5", "a8"):
        with pytest.raises(
            FormatError, match="override: found .*, accepted is NAME=PRECISION with a4, a8, a8-token, a16"
        ):
            parse(text)
    names = ["b.0.up", "b.0.down", "b.1.up"]
    assert activations_of(names, {"b.0": "a8", "up": "a4"}) == {
        "b.0.up": Activation(4, "group"), "b.0.down": Activation(8, "group"), "b.1.up": Activation(4, "group"),
    }  # fmt: skip


@pytest.mark.parametrize("inputs", ("quantized", "float"))
def test_blocks_see_what_the_quantized_ones_before_give(inputs: Any) -> None:
    model = llama()
    result, report = quantize_model(model, "w4a4", "svdquant", [ids(8, 64)], progress=False, inputs=inputs)
    for name, q in result.items():
        assert torch.equal(model.get_submodule(name).weight, effective(q))
    assert [r.tokens for r in report.rows] == [512] * 14


def test_resuming_and_repeating_give_the_same_bytes(tmp_path: Path) -> None:
    whole, _ = quantize_model(llama(), "w4a4", "svdquant", [ids(4, 64)], progress=False)

    def stop(done: int, total: int, label: str) -> None:
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        quantize_model(llama(), "w4a4", "svdquant", [ids(4, 64)], resume_dir=tmp_path, progress=stop)
    assert len(list(tmp_path.glob("block-*.safetensors"))) == 1
    again, _ = quantize_model(llama(), "w4a4", "svdquant", [ids(4, 64)], resume_dir=tmp_path, progress=False)
    assert whole.keys() == again.keys() and all(same(whole[n], again[n]) for n in whole)
    with pytest.raises(FormatError, match="run.json: options: found"):
        quantize_model(llama(), "w4a4", "svdquant", [ids(4, 64)], resume_dir=tmp_path, rank=32, progress=False)


def test_refusals_come_before_any_work() -> None:
    narrow = {"intermediate_size": 96}
    cases: list[tuple[dict[str, Any], dict[str, Any], str]] = [
        (
            narrow,
            {"scales": "channel"},
            r"hadamard: found widths that 64 does not divide: .*layers.0.mlp.down_proj \(96\)",
        ),
        (narrow, {}, r"group_size: found 64, which does not divide .*layers.1.mlp.down_proj \(96\)"),
        ({}, {"rank": 17}, "rank: found 17, accepted are 0, 16, 32, 64"),
        ({}, {"recipe": "svd"}, "recipe: found 'svd', accepted are default, iterative"),
        ({}, {"scales": "rows"}, "scales: found 'rows', accepted are group, two-level, channel"),
        ({}, {"calibration": None}, "calibration: found None, accepted for method svdquant is text or inputs"),
        ({}, {"overrides": {"down": "a8"}}, "override: found 'down', which names no quantized linear"),
    ]
    for sizes, options, said in cases:
        model = llama(**sizes)
        before = [p.clone() for p in model.parameters()]
        with pytest.raises(FormatError, match=said):
            lowbit.quantize(model, "w4a4", **{"calibration": [ids(2, 32)], "progress": False, **options})
        assert all(torch.equal(a, b) for a, b in zip(before, model.parameters(), strict=True))
    model = llama(**narrow)  # off: it works
    lowbit.quantize(model, "w4a4", calibration=[ids(2, 32)], progress=False, scales="channel", hadamard=False)
    with pytest.raises(FormatError, match="scales: found two-level with 4 bits asymmetric codes"):
        lowbit.quantize(llama(), "w4a8", calibration=[ids(2, 32)], progress=False, scales="two-level")


def test_gptq_with_two_level_scales_and_the_same_weights_with_8_bit_activations(tmp_path: Path) -> None:
    model = llama()
    lowbit.quantize(
        model, "w4a8", "gptq", [ids(8, 64)], symmetric=True, activation="token", scales="two-level", progress=False
    )
    assert all(two_level(layer.to_quantized().scales) is not None for layer in layers(model))
    model = llama()
    lowbit.quantize(model, "w4a8", "svdquant", [ids(8, 64)], symmetric=True, activation="token", progress=False)
    lowbit.save(model, tmp_path)
    assert {info.activation for info in inspect_checkpoint(tmp_path).layers} == {"8 token"}
    assert torch.equal(logits(lowbit.load(tmp_path)), logits(model)) and exactly(model) == 0


def test_what_other_formats_cannot_hold_is_refused_by_name(tmp_path: Path) -> None:
    model = llama()
    lowbit.quantize(model, "w4a4", calibration=[ids(8, 64)], progress=False)
    lowbit.save(model, tmp_path / "in")
    assert main(["convert", str(tmp_path / "in"), str(tmp_path / "out"), "--to", "gptq", "--json"]) == 2
    assert not (tmp_path / "out").exists()
    assert main(["convert", str(tmp_path / "in"), str(tmp_path / "same"), "--to", "lowbit", "--json"]) == 0
    assert torch.equal(logits(lowbit.load(tmp_path / "same")), logits(lowbit.load(tmp_path / "in")))
    assert open_checkpoint(tmp_path / "same").metadata["rank"] == 16


@pytest.fixture(scope="module")
def plain(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A random llama with a byte tokenizer and a text."""
    path = tmp_path_factory.mktemp("plain")
    tokenizer = samples.byte_tokenizer(pad_token="<pad>")
    tokenizer.save_pretrained(path)
    llama(vocab_size=len(tokenizer)).save_pretrained(path)
    (path / "text.txt").write_text("The quick brown fox jumps over the lazy dog; it was not amused. " * 40, "utf-8")
    return path


def test_the_command_line(plain: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    text = plain / "text.txt"
    found = samples.json_of(
        capsys, "quantize", plain, tmp_path / "out", "--scheme", "w4a4", "--rank", 16, "--recipe", "default", "--scales",
        "two-level", "--override", "down_proj=a8", "--calibration", text, "--tokens", 512,
    )  # fmt: skip
    assert {row["method"] for row in found["rows"]} == {"svdquant16"} and found["scheme"]["name"] == "w4a4"
    shown = samples.json_of(capsys, "inspect", tmp_path / "out")["layers"]
    assert {row["activation"] for row in shown if row["name"].endswith("down_proj")} == {"8 group"}
    assert {row["activation"][:7] for row in shown if not row["name"].endswith("down_proj")} == {"4 group"}
    assert all(row["extras"].startswith("smooth, low rank 16, hadamard 64") for row in shown)
    common = ["eval", tmp_path / "out", "--text", text, "--tokens", 512, "--context", 64]
    eight, four = samples.json_of(capsys, *common), samples.json_of(capsys, *common, "--exact")
    assert (eight["simulated_4_bit_linears"], four["simulated_4_bit_linears"]) == (0, 12)
    assert four["perplexity"] != eight["perplexity"]
    layer = samples.json_of(capsys, "explain", tmp_path / "out")["layers"][0]
    assert (layer["kernel"], layer["activation"], layer["declared_activation_bits"]) == ("cpu_linear_w4", "token", 4)
    assert (layer["rank"], layer["hadamard"]) == (16, 64)


def test_the_command_line_refuses(plain: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    common = ["quantize", str(plain), str(tmp_path / "out")]
    for arguments, said in (
        (["--rank", "16", "--method", "rtn"], "--rank, --recipe, --no-hadamard: found with method rtn"),
        (["--scheme", "w4a4"], "--calibration: found nothing"),
        (["--scheme", "w4a4", "--rank", "20", "--calibration", str(plain / "text.txt")], "rank: found 20"),
        (["--method", "rtn", "--override", "up_proj"], "override: found 'up_proj', accepted is NAME=PRECISION"),
    ):
        capsys.readouterr()
        assert main([*common, *arguments]) == 2
        out, err = capsys.readouterr()
        assert said in err and not out and len(err.splitlines()) == 1 and not (tmp_path / "out").exists()
