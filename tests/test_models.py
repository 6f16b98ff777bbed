"""Whole models: families, loading from every format, tying, missing tensors, memory, decoding, perplexity."""

from __future__ import annotations

import importlib
import json
import math
import subprocess
import sys
import warnings
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

import lowbit
from lowbit.checkpoint import open_checkpoint, write_checkpoint
from lowbit.engines.decode import TextStream, decode, encode
from lowbit.formats import FORMATS, config_for
from lowbit.formats.lowbit import describe, metadata
from lowbit.models.api import resolve_scheme
from lowbit.models.recipes import RECIPES, blocks_of, linear_names, recipe_for
from lowbit.models.replace import replace
from lowbit.models.save import model_bytes
from lowbit.prove.compare import layer_errors, nll_of, perplexity, token_ids
from lowbit.prove.inspect import inspect_checkpoint
from lowbit.quantize import rtn
from lowbit.reference import dequantize
from lowbit.types import SCHEMES, Activation, LowRank, QuantizedWeight

transformers = pytest.importorskip("transformers")
VOCAB = 96
SMALL = dict(
    vocab_size=VOCAB, hidden_size=64, intermediate_size=128, num_hidden_layers=2, num_attention_heads=4,
    num_key_value_heads=2, max_position_embeddings=128, bos_token_id=1, eos_token_id=2, pad_token_id=0,
)  # fmt: skip
FAMILIES: dict[str, dict[str, Any]] = {
    "llama": {},
    "mistral": {},
    "qwen2": {},
    "qwen3": {"head_dim": 16},
    "gemma3_text": {"head_dim": 16, "sliding_window": 8, "layer_types": ["sliding_attention", "full_attention"]},
    "phi": {},
    "phi3": {},
}


def tiny(family: str = "llama", seed: int = 0, **changes: Any) -> Any:
    """A random model of a family, every bias and norm random too, so that a dropped one shows."""
    torch.manual_seed(seed)
    config = transformers.AutoConfig.for_model(family, **{**SMALL, **FAMILIES[family], **changes})
    model = transformers.AutoModelForCausalLM.from_config(config, dtype=torch.float32).eval()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.copy_(torch.randn_like(parameter) * (0.2 if parameter.dim() == 1 else 0.08))
    return model


IDS = torch.randint(3, VOCAB, (1, 12), generator=torch.Generator().manual_seed(5))


def logits(model: Any, ids: Tensor = IDS) -> Tensor:
    with torch.inference_mode():
        out: Tensor = model(input_ids=ids).logits
    return out


def error(got: Tensor, want: Tensor) -> float:
    with torch.no_grad():
        return float((got.double() - want.double()).norm() / want.double().norm())


def save_plain(model: Any, path: Path) -> Path:
    model.save_pretrained(path)
    return path


def save_as(model: Any, path: Path, format: str, *, drop: tuple[str, ...] = (), extra: dict[str, Tensor] | None = None,
            head: bool = False, rename: tuple[str, str] = ("", "")) -> dict[str, QuantizedWeight]:  # fmt: skip
    """The model's block linears rounded to 4 bits, group 32, and written as a foreign tool would."""
    scheme = resolve_scheme("w4a8", 32, symmetric=format != "awq")
    names = linear_names(model, recipe_for(model), ("lm_head",)) + (["lm_head"] if head else [])
    layers, tensors = {}, dict(model.state_dict())
    if model.config.tie_word_embeddings:
        tensors.pop("lm_head.weight", None)
    for name in names:
        linear = model.get_submodule(name)
        bias = None if linear.bias is None else linear.bias.detach()
        layers[name] = rtn(linear.weight, scheme).with_(bias=bias, activation=None)
        for part in ("weight", "bias"):
            tensors.pop(f"{name}.{part}", None)
        tensors |= FORMATS[format].write(layers[name], name)
    tensors = {name: tensor for name, tensor in tensors.items() if name not in drop} | (extra or {})
    old, new = rename
    tensors = {(new + n[len(old) :] if old and n.startswith(old) else n): t for n, t in tensors.items()}
    config = model.config.to_dict() | {"quantization_config": config_for(format, layers, ["lm_head"])}
    write_checkpoint(path, tensors, config)
    return layers


def dequantized(model: Any, layers: dict[str, QuantizedWeight]) -> Any:
    """The same model with each weight replaced by what its codes stand for."""
    with torch.no_grad():
        for name, q in layers.items():
            model.get_submodule(name).weight.copy_(dequantize(q))
    return model


# ---- families --------------------------------------------------------------------------------------------------------
def test_every_family_has_a_case() -> None:
    assert {*FAMILIES} | {"gemma3"} == {*RECIPES}  # gemma3: the text model inside the multimodal one, same blocks


@pytest.mark.parametrize("family", FAMILIES)
def test_quantize_save_load_gives_the_same_logits(family: str, tmp_path: Path) -> None:
    model = tiny(family)
    dense = logits(model)
    report = lowbit.quantize(model, "w4a8", "rtn", group_size=32, progress=False)
    quantized = {name for name, module in model.named_modules() if isinstance(module, lowbit.QuantLinear)}
    assert quantized == {row.name for row in report.rows} and len(quantized) == 2 * len(recipe_for(model).linears)
    want = logits(model)
    assert 0 < error(want, dense) < 0.5
    lowbit.save(model, tmp_path)
    loaded = lowbit.load(tmp_path)
    assert not any(tensor.is_meta for tensor in (*loaded.parameters(), *loaded.buffers()))
    assert torch.equal(logits(loaded), want)
    lowbit.save(loaded, tmp_path / "again")
    assert (tmp_path / "again/model.safetensors").read_bytes() == (tmp_path / "model.safetensors").read_bytes()


@pytest.mark.parametrize("family", FAMILIES)
def test_linears_of_one_group_read_the_same_input_and_no_linear_is_left_out(family: str) -> None:
    model = tiny(family)
    recipe = recipe_for(model)
    assert recipe is RECIPES[family]
    seen: dict[str, Tensor] = {}
    _, block = blocks_of(model, recipe)[1]
    assert {n for n, m in block.named_modules() if isinstance(m, nn.Linear)} == set(recipe.linears)
    for name in recipe.linears:
        block.get_submodule(name).register_forward_pre_hook(lambda _, args, name=name: seen.update({name: args[0]}))
    logits(model)
    firsts_in_order = [name for name in seen if name in {group[0] for group in recipe.groups}]
    assert set(seen) == set(recipe.linears) and firsts_in_order == [group[0] for group in recipe.groups]
    for group in recipe.groups:
        assert all(torch.equal(seen[name], seen[group[0]]) for name in group)
    firsts = [seen[group[0]] for group in recipe.groups]
    assert all(a.shape != b.shape or not torch.equal(a, b) for i, a in enumerate(firsts) for b in firsts[:i])


def test_gemma3_multimodal_path_names_its_blocks() -> None:
    text = {**SMALL, **FAMILIES["gemma3_text"]}
    vision = dict(
        hidden_size=32, intermediate_size=32, num_hidden_layers=1, num_attention_heads=2, image_size=28, patch_size=14
    )
    config = transformers.Gemma3Config(text_config=text, vision_config=vision, mm_tokens_per_image=4)
    model = transformers.AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    names = linear_names(model, recipe_for(model), ("lm_head",))
    assert len(names) == 14 and all(name.startswith("model.language_model.layers.") for name in names)


def test_a_family_without_a_row_gets_a_guessed_one() -> None:
    torch.manual_seed(0)
    config = transformers.AutoConfig.for_model("gpt_neox", **{**SMALL, "num_key_value_heads": None})
    model = transformers.AutoModelForCausalLM.from_config(config, dtype=torch.float32).eval()
    before = logits(model)
    report = lowbit.quantize(model, "w8a8", "rtn", progress=False)
    assert len(report.rows) == 2 * 4
    assert 0 < error(logits(model), before) < 0.05


@pytest.mark.parametrize("scheme", SCHEMES)
@pytest.mark.parametrize("activation", [None, "token", "group", "none"])
def test_every_scheme_and_activation_survives_a_save(scheme: str, activation: str | None, tmp_path: Path) -> None:
    model = tiny("qwen2")
    dense = logits(model)
    if scheme == "fp16" and activation in ("token", "group"):
        with pytest.raises(lowbit.FormatError, match="activation: found .*fp16"):
            lowbit.quantize(model, scheme, "rtn", activation=activation, progress=False)
        return
    lowbit.quantize(model, scheme, "rtn", activation=activation, progress=False)
    limit = {"w4a8": 0.6, "w4a16": 0.6, "w4a4": 0.8, "w8a8": 0.08, "fp16": 0.002}[scheme]
    want = logits(model)
    assert 0 < error(want, dense) < limit
    lowbit.save(model, tmp_path)
    loaded = lowbit.load(tmp_path)
    assert torch.equal(logits(loaded), want)
    bits = {"w8a8": 8, "fp16": 16}.get(scheme, 4)
    assert [row.bits for row in inspect_checkpoint(tmp_path).layers] == [bits] * 14
    layer = loaded.model.layers[0].self_attn.q_proj
    declared = {"w4a8": "group", "w8a8": "token", "w4a4": "group"}.get(scheme)
    assert isinstance(layer, lowbit.QuantLinear)
    assert layer.activation == (declared if activation is None else None if activation == "none" else activation)
    assert layer.bias is not None and torch.equal(layer.bias, tiny("qwen2").model.layers[0].self_attn.q_proj.bias.data)


def test_the_argument_of_load_overrides_what_is_declared(tmp_path: Path) -> None:
    model = tiny()
    lowbit.quantize(model, "w8a8", "rtn", progress=False)
    lowbit.save(model, tmp_path)
    found = {
        a: lowbit.load(tmp_path, activation=a).model.layers[1].mlp.up_proj.activation
        for a in ("group", "token", "none")
    }
    assert found == {"group": "group", "token": "token", "none": None}
    with pytest.raises(lowbit.FormatError, match="activation: found 'row', accepted are group, token, none"):
        lowbit.load(tmp_path, activation="row")


def test_everything_that_a_layer_can_hold_survives_a_save(tmp_path: Path) -> None:
    model = tiny()
    for index, parts in enumerate(({"hadamard": 64, "low_rank": LowRank(torch.randn(64, 4).half(), torch.randn(128, 4).half())},
                                   {"smooth": torch.rand(64).half() + 0.5, "perm": torch.randperm(64, dtype=torch.int32)})):  # fmt: skip
        q = rtn(torch.randn(128, 64) * 0.08, resolve_scheme("w4a8", 32)).with_(
            **parts, activation=Activation(8, "token")
        )
        replace(model, f"model.layers.{index}.mlp.up_proj", lowbit.QuantLinear.from_quantized(q))
    lowbit.save(model, tmp_path)
    loaded = lowbit.load(tmp_path)
    assert torch.equal(logits(loaded), logits(model))
    rows = {row.name: row.extras for row in inspect_checkpoint(tmp_path).layers}
    assert rows == {"model.layers.0.mlp.up_proj": "low rank 4, hadamard 64", "model.layers.1.mlp.up_proj": "smooth"}
    said = open_checkpoint(tmp_path).metadata
    assert said["rank"] == 4 and said["hadamard"] == 64


def test_a_hub_id_is_taken_from_the_cache_and_never_downloaded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    hub = pytest.importorskip("huggingface_hub")
    monkeypatch.setattr(hub.constants, "HF_HUB_CACHE", str(tmp_path))
    monkeypatch.setattr(hub.constants, "HF_HUB_OFFLINE", True)
    root = tmp_path / "models--some--model"
    save_plain(tiny(), root / "snapshots" / ("a" * 40))
    (root / "refs").mkdir()
    (root / "refs" / "main").write_text("a" * 40)
    assert torch.equal(logits(lowbit.load("some/model")), logits(tiny()))
    with pytest.raises(lowbit.FormatError, match="some/other: found no such directory and no cached hub model"):
        lowbit.load("some/other")


# ---- formats of others -----------------------------------------------------------------------------------------------
@pytest.mark.parametrize("format", ["gptq", "gptq_v2", "awq", "compressed-tensors"])
@pytest.mark.parametrize("family", ["llama", "qwen2", "phi3"])
def test_loads_what_other_tools_write(format: str, family: str, tmp_path: Path) -> None:
    layers = save_as(tiny(family), tmp_path, format)
    want = logits(dequantized(tiny(family), layers))
    exact = lowbit.load(tmp_path, activation="none")
    assert error(logits(exact), want) < 3e-6
    default = lowbit.load(tmp_path)  # declares nothing: int8 per group
    assert {m.activation for m in default.modules() if isinstance(m, lowbit.QuantLinear)} == {"group"}
    assert 0 < error(logits(default), want) < 0.03
    assert model_bytes(default) < model_bytes(tiny(family))


def _fixtures() -> list[Path]:
    root = Path(__file__).parents[1] / ".." / "shared" / "fixtures"
    return sorted(path.parent for path in root.glob("*/model.safetensors"))


@pytest.mark.parametrize("path", _fixtures(), ids=lambda path: path.name)
def test_whole_fixture_models_load_and_their_layers_compute_what_their_tool_computes(path: Path) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # what importers say of edge cases is tested with them
        model = lowbit.load(path, activation="none")
        declared = lowbit.load(path)
    reference = np.load(path / "reference.npz")
    block = model.model.layers[0]
    for name, layer in (("q_proj", block.self_attn.q_proj), ("down_proj", block.mlp.down_proj)):
        x = torch.from_numpy(reference[f"{name}.x"]).float()
        assert error(layer(x), torch.from_numpy(reference[f"{name}.y_fp64"])) < 2e-6
    assert not any(tensor.is_meta for tensor in (*model.parameters(), *model.buffers()))
    assert torch.isfinite(logits(model)).all()
    assert error(logits(declared), logits(model)) < 0.05
    want = "token" if path.name in ("llmc-rtn-w8a8-int8-1l", "llmc-rtn-w4a8-1l") else "group"
    assert {m.activation for m in declared.modules() if isinstance(m, lowbit.QuantLinear)} == {want}
    assert len(inspect_checkpoint(path).layers) == sum(isinstance(m, lowbit.QuantLinear) for m in model.modules())


@pytest.fixture(scope="module")
def gptq_model(request: pytest.FixtureRequest) -> tuple[Any, Any, Path]:
    path = Path(__file__).parents[1] / ".." / "shared" / "checkpoints" / "smollm2-135m-gptq-w4g64-sym"
    if not path.is_dir():
        pytest.skip("no ../shared/checkpoints beside the project")
    return lowbit.load(path), transformers.AutoTokenizer.from_pretrained(path), path


def test_a_whole_gptq_model_of_another_tool_answers(gptq_model: tuple[Any, Any, Path]) -> None:
    model, tokenizer, _ = gptq_model
    pieces: list[str] = []
    stream = TextStream(tokenizer, pieces.append)
    result = decode(model, encode(tokenizer, "What is the capital of France?", chat=True), 12, on_token=stream)
    stream.close()
    assert "Paris" in "".join(pieces)
    assert "".join(pieces) == tokenizer.decode(result.tokens, skip_special_tokens=True)


def test_its_perplexity_is_that_of_its_own_dequantized_weights(gptq_model: tuple[Any, Any, Path]) -> None:
    model, tokenizer, path = gptq_model
    text = (path.parents[1] / "design.md").read_text("utf-8")
    found = perplexity(model, text, tokenizer, context=128, tokens=256)
    dense, checkpoint = lowbit.load(path), open_checkpoint(path)
    for name, module in list(dense.named_modules()):
        if isinstance(module, lowbit.QuantLinear):
            weight = dequantize(FORMATS["gptq"].read(checkpoint, name, checkpoint.quantization or {}))
            plain = nn.Linear(module.in_features, module.out_features, bias=False, device="meta")
            plain.weight = nn.Parameter(weight, requires_grad=False)
            replace(dense, name, plain)
    want = perplexity(dense, text, tokenizer, context=128, tokens=256)
    assert found.scored == want.scored == 254
    assert want.perplexity < 300  # a real model of real text
    assert found.perplexity == pytest.approx(want.perplexity, rel=0.03)  # int8 activations, on few tokens
    errors = layer_errors(dense, model, token_ids(text, tokenizer, 64))
    assert len(errors) == 210 and max(row.error for row in errors) < 0.06
    for module in model.modules():
        if isinstance(module, lowbit.QuantLinear):
            module.activation = None
    exact = perplexity(model, text, tokenizer, context=128, tokens=256)
    assert exact.perplexity == pytest.approx(want.perplexity, rel=1e-4)


def test_prefixes_of_other_exporters(tmp_path: Path) -> None:
    layers = save_as(tiny(), tmp_path, "gptq", rename=("model.", "model.model."))
    assert error(logits(lowbit.load(tmp_path, activation="none")), logits(dequantized(tiny(), layers))) < 3e-6


# ---- IMP-13: biases --------------------------------------------------------------------------------------------------
def test_a_bias_that_the_architecture_demands_and_the_file_lacks_is_refused(tmp_path: Path) -> None:
    save_as(tiny("qwen2"), tmp_path, "gptq", drop=("model.layers.1.self_attn.k_proj.bias",))
    with pytest.raises(lowbit.FormatError, match=r"model\.layers\.1\.self_attn\.k_proj: found no bias"):
        lowbit.load(tmp_path)


def test_a_bias_that_only_the_file_has_is_kept(tmp_path: Path) -> None:
    bias = torch.arange(1.0, 65.0)
    name = "model.layers.0.self_attn.q_proj"
    layers = save_as(tiny(), tmp_path, "gptq", extra={f"{name}.bias": bias.half()})
    model = lowbit.load(tmp_path, activation="none")
    layer = model.get_submodule(name)
    for rows in (1, 200):
        assert torch.equal(layer(torch.zeros(rows, 64)), bias.expand(rows, 64))
    want = dequantized(tiny(), layers)
    want.get_submodule(name).bias = nn.Parameter(bias)
    assert error(logits(model), logits(want)) < 3e-6


def test_a_bias_of_a_dense_linear_that_has_none_is_refused(tmp_path: Path) -> None:
    save_as(tiny(), tmp_path, "gptq", extra={"lm_head.bias": torch.ones(VOCAB)})
    with pytest.raises(lowbit.FormatError, match=r"lm_head\.bias: found a bias in the file"):
        lowbit.load(tmp_path)


def test_biases_are_added_once_and_zeros_where_none_are(tmp_path: Path) -> None:
    save_as(tiny("qwen2"), tmp_path, "gptq")
    block = lowbit.load(tmp_path).model.layers[0]
    want = tiny("qwen2").model.layers[0].self_attn.q_proj.bias.detach()
    for rows, dtype in ((1, torch.float32), (200, torch.float32), (3, torch.float16)):
        y = block.self_attn.q_proj(torch.zeros(rows, 64, dtype=dtype))
        assert y.dtype == dtype and torch.equal(y, want.to(dtype).expand(rows, -1))
        assert torch.equal(block.self_attn.o_proj(torch.zeros(rows, 64)), torch.zeros(rows, 64))


# ---- IMP-14: which configuration -------------------------------------------------------------------------------------
def test_configuration_files(tmp_path: Path) -> None:
    layers = save_as(tiny(), tmp_path, "gptq")
    want = logits(lowbit.load(tmp_path))
    config = json.loads((tmp_path / "config.json").read_text())
    inner = config.pop("quantization_config")
    for side in ("quantize_config.json", "quantization_config.json"):  # b, c: the side file alone
        (tmp_path / "config.json").write_text(json.dumps(config))
        (tmp_path / side).write_text(json.dumps(inner))
        assert torch.equal(logits(lowbit.load(tmp_path)), want)
        (tmp_path / side).unlink()
    with pytest.raises(lowbit.FormatError, match="quantization"):  # e: none, tensors present
        lowbit.load(tmp_path)
    spelled = {"quant_method": "gptq", "w_bit": "4", "q_group_size": 32, "sym": True}  # f, g
    (tmp_path / "config.json").write_text(json.dumps(config | {"quantization_config": spelled}))
    assert torch.equal(logits(lowbit.load(tmp_path)), want)
    (tmp_path / "quantize_config.json").write_text(json.dumps(inner | {"group_size": 64}))  # d
    with pytest.raises(lowbit.FormatError, match="64.*quantize_config.json"):
        lowbit.load(tmp_path)
    (tmp_path / "quantize_config.json").write_text("{")  # i
    with pytest.raises(lowbit.FormatError, match="quantize_config.json.*invalid JSON"):
        lowbit.load(tmp_path)
    assert layers


# ---- IMP-16: tied embeddings -----------------------------------------------------------------------------------------
def embedding(model: Any) -> Tensor:
    weight: Tensor = model.get_input_embeddings().weight
    return weight


def test_a_quantized_head_stays_quantized_beside_a_tied_embedding(tmp_path: Path) -> None:
    model = tiny(tie_word_embeddings=True)
    save_as(model, tmp_path / "a", "gptq", head=True)
    loaded = lowbit.load(tmp_path / "a")
    want = logits(loaded)
    loaded.tie_weights()
    assert isinstance(loaded.lm_head, lowbit.QuantLinear) and "weight" not in dict(loaded.lm_head.named_parameters())
    assert torch.equal(embedding(loaded), embedding(model)) and torch.equal(logits(loaded), want)
    lowbit.save(loaded, tmp_path / "b")
    again = lowbit.load(tmp_path / "b")
    assert isinstance(again.lm_head, lowbit.QuantLinear) and torch.equal(logits(again), want)


def test_an_absent_head_is_the_embedding(tmp_path: Path) -> None:
    model = tiny(tie_word_embeddings=True)
    layers = save_as(model, tmp_path / "a", "gptq")
    assert "lm_head.weight" not in open_checkpoint(tmp_path / "a")
    loaded = lowbit.load(tmp_path / "a", activation="none")
    assert loaded.lm_head.weight.data_ptr() == embedding(loaded).data_ptr()
    loaded.tie_weights()
    assert loaded.lm_head.weight is embedding(loaded)
    want = logits(dequantized(tiny(tie_word_embeddings=True), layers))
    assert error(logits(loaded), want) < 3e-6
    lowbit.save(loaded, tmp_path / "b")
    assert "lm_head.weight" not in open_checkpoint(tmp_path / "b")
    assert torch.equal(logits(lowbit.load(tmp_path / "b")), logits(loaded))


@pytest.mark.parametrize("equal", [True, False])
def test_a_dense_head_beside_its_embedding(equal: bool, tmp_path: Path) -> None:
    model = tiny(tie_word_embeddings=True)
    head = embedding(model).detach().clone() + (0 if equal else 1)
    save_as(model, tmp_path / "a", "gptq", extra={"lm_head.weight": head})
    loaded = lowbit.load(tmp_path / "a")
    assert (loaded.lm_head.weight is embedding(loaded)) == equal
    loaded.tie_weights()
    assert torch.equal(loaded.lm_head.weight, head) and torch.equal(embedding(loaded), embedding(model))
    lowbit.save(loaded, tmp_path / "b")
    assert ("lm_head.weight" in open_checkpoint(tmp_path / "b")) == (not equal)
    assert torch.equal(logits(lowbit.load(tmp_path / "b")), logits(loaded))


@pytest.mark.parametrize("scheme", ["w4a8", "fp16"])
def test_quantizing_a_tied_head_unties_it_and_leaves_the_embedding_alone(scheme: str, tmp_path: Path) -> None:
    model = tiny(tie_word_embeddings=True)
    before = embedding(model).detach().clone()
    report = lowbit.quantize(model, scheme, "rtn", skip=(), progress=False)
    assert report.rows[-1].name == "lm_head" and isinstance(model.lm_head, lowbit.QuantLinear)
    model.tie_weights()
    assert isinstance(model.lm_head, lowbit.QuantLinear) and torch.equal(embedding(model), before)
    lowbit.save(model, tmp_path)
    loaded = lowbit.load(tmp_path)
    assert torch.equal(embedding(loaded), before) and torch.equal(logits(loaded), logits(model))


# ---- IMP-17: meta and missing ----------------------------------------------------------------------------------------
@pytest.mark.parametrize("family", FAMILIES)
def test_a_plain_directory_computes_what_transformers_computes(family: str, tmp_path: Path) -> None:
    model = tiny(family)
    loaded = lowbit.load(save_plain(model, tmp_path))
    assert not any(tensor.is_meta for tensor in (*loaded.parameters(), *loaded.buffers()))
    want = dict(model.named_buffers())
    assert {name for name, _ in loaded.named_buffers()} == set(want)
    assert all(torch.equal(buffer, want[name]) for name, buffer in loaded.named_buffers())  # inv_freq, embed_scale
    assert torch.equal(logits(loaded), logits(model))


def test_a_layer_that_lost_its_data_says_so() -> None:
    model = tiny()
    lowbit.quantize(model, "w4a8", "rtn", group_size=32, progress=False)
    layer = model.model.layers[0].mlp.up_proj.to("meta")
    with pytest.raises(NotImplementedError, match="no data"):
        layer.to("cpu")


def test_missing_tensors_are_listed(tmp_path: Path) -> None:
    names = ("model.norm.weight", "model.layers.1.input_layernorm.weight")
    save_as(tiny(), tmp_path, "gptq", drop=names)
    with pytest.raises(lowbit.FormatError) as caught:
        lowbit.load(tmp_path)
    assert all(name in str(caught.value) for name in names) and "\n" not in str(caught.value)


def test_a_linear_without_any_tensor_is_listed(tmp_path: Path) -> None:
    name = "model.layers.0.mlp.up_proj"
    save_as(tiny(), tmp_path, "gptq", drop=tuple(f"{name}.{p}" for p in ("qweight", "qzeros", "scales", "g_idx")))
    with pytest.raises(lowbit.FormatError, match=r"found no tensor for model\.layers\.0\.mlp\.up_proj\.weight"):
        lowbit.load(tmp_path)


def test_half_a_quantized_linear_is_refused(tmp_path: Path) -> None:
    save_as(tiny(), tmp_path, "gptq", drop=("model.layers.0.mlp.up_proj.scales",))
    with pytest.raises(lowbit.FormatError, match=r"model\.layers\.0\.mlp\.up_proj.*scales"):
        lowbit.load(tmp_path)


def test_a_quantized_layer_that_the_model_does_not_have_is_refused(tmp_path: Path) -> None:
    q = rtn(torch.randn(64, 64), resolve_scheme("w4a8", 32, symmetric=True))
    save_as(tiny(), tmp_path, "gptq", extra=FORMATS["gptq"].write(q, "model.layers.7.mlp.up_proj"))
    with pytest.raises(lowbit.FormatError, match=r"model\.layers\.7\.mlp\.up_proj: found no such module"):
        lowbit.load(tmp_path)


@pytest.mark.parametrize("plain", [True, False])
def test_shapes_that_the_config_contradicts_are_refused(plain: bool, tmp_path: Path) -> None:
    if plain:
        save_plain(tiny(), tmp_path)
    else:
        save_as(tiny(), tmp_path, "gptq")
    config = json.loads((tmp_path / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps(config | {"intermediate_size": 192}))
    with pytest.raises(lowbit.FormatError, match=r"mlp\.\w+_proj.*found shape \[.*128.*\], accepted is \[.*192.*\]"):
        lowbit.load(tmp_path)


def test_dense_tensors_that_belong_to_nothing_are_named_in_a_warning(tmp_path: Path) -> None:
    save_as(tiny(), tmp_path, "gptq", extra={"model.layers.2.norm.weight": torch.ones(64)})
    with pytest.warns(UserWarning, match=r"model\.layers\.2\.norm\.weight"):
        lowbit.load(tmp_path)


def test_what_is_no_model_is_refused_in_one_line(tmp_path: Path) -> None:
    for path, match in ((tmp_path, "found no config.json"), (tmp_path / "nothing", "found no such directory"),
                        (Path(__file__), "found a file")):  # fmt: skip
        with pytest.raises(lowbit.FormatError, match=match) as caught:
            lowbit.load(path)
        assert "\n" not in str(caught.value)
    save_plain(tiny(), tmp_path)
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "resnet"}))
    with pytest.raises(lowbit.FormatError, match="config.json"):
        lowbit.load(tmp_path)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_dense_parts_take_the_dtype_asked_for(dtype: torch.dtype, tmp_path: Path) -> None:
    model = tiny()
    lowbit.quantize(model, "w4a8", "rtn", group_size=32, progress=False)
    lowbit.save(model, tmp_path)
    loaded = lowbit.load(tmp_path, dtype=dtype)
    assert embedding(loaded).dtype == dtype and loaded.dtype == dtype
    assert logits(loaded).dtype == dtype and error(logits(loaded), logits(model)) < 0.1
    assert loaded.model.rotary_emb.inv_freq.dtype == torch.float32


def test_saving_narrows_dense_tensors_only_where_no_value_changes(tmp_path: Path) -> None:
    model = tiny()
    with torch.no_grad():
        model.model.embed_tokens.weight.copy_(model.model.embed_tokens.weight.bfloat16().float())
    lowbit.save(model, tmp_path / "a")
    checkpoint = open_checkpoint(tmp_path / "a")
    assert checkpoint.dtype("model.embed_tokens.weight") == torch.bfloat16
    assert checkpoint.dtype("lm_head.weight") == torch.float32
    assert torch.equal(logits(lowbit.load(tmp_path / "a")), logits(model))
    lowbit.save(model, tmp_path / "b", dtype=torch.float16)
    assert open_checkpoint(tmp_path / "b").dtype("lm_head.weight") == torch.float16


_MEMORY = """
import re, sys, threading, time
import torch, transformers.models.llama.modeling_llama, lowbit
from lowbit.models.save import model_bytes
torch.set_num_threads(1)
def anonymous():
    return int(re.search(r"RssAnon:\\s+(\\d+)", open("/proc/self/status").read())[1]) * 1024
lowbit.load(sys.argv[1])  # everything lazy is imported and the allocator is warm
before, peak, stop = anonymous(), 0, False
def watch():
    global peak
    while not stop:
        peak = max(peak, anonymous()); time.sleep(0.0005)
thread = threading.Thread(target=watch); thread.start()
model = lowbit.load(sys.argv[2])
stop = True; thread.join()
print(peak - before, model_bytes(model))
"""


@pytest.mark.skipif(not Path("/proc/self/status").exists(), reason="no /proc on this system")
@pytest.mark.parametrize("format", ["lowbit", "gptq"])
def test_loading_stays_below_the_packed_model_and_its_largest_layer(format: str, tmp_path: Path) -> None:
    save_as(tiny(), tmp_path / "small", "gptq")
    # 268 MB in float32, 40 MB packed; the largest layer has 16.8 MB in float32
    shape = dict(hidden_size=1024, intermediate_size=4096, num_hidden_layers=4, vocab_size=512)
    config = transformers.AutoConfig.for_model("llama", **{**SMALL, **shape})
    with torch.device("meta"):
        model = transformers.AutoModelForCausalLM.from_config(config)
    names, layers = linear_names(model, RECIPES["llama"], ("lm_head",)), {}
    tensors = {
        n: torch.ones(p.shape, dtype=torch.float16) for n, p in model.state_dict().items() if n[:-7] not in names
    }
    for name in names:
        linear = model.get_submodule(name)
        zeros = torch.full((linear.out_features, linear.in_features // 64), 7, dtype=torch.uint8)
        codes = torch.randint(0, 16, (linear.out_features, linear.in_features), dtype=torch.uint8)
        q = QuantizedWeight(codes, torch.ones(zeros.shape, dtype=torch.float16), 64, 4, zeros)
        layers[name] = q if format == "lowbit" else q.with_(codes=codes.view(torch.int8) - 8, zeros=None)
        tensors |= FORMATS[format].write(layers[name], name)
    written = config.to_dict() | {"quantization_config": config_for(format, layers, ["lm_head"])}
    rows = {name: describe(q) for name, q in layers.items()}
    write_checkpoint(tmp_path / "large", tensors, written, metadata(rows, "rtn") if format == "lowbit" else None)
    command = [sys.executable, "-c", _MEMORY, tmp_path / "small", tmp_path / "large"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, env=_environment())
    assert done.returncode == 0, done.stderr
    used, packed = (int(word) for word in done.stdout.split())
    assert packed > 30e6
    assert used < packed + 4 * 1024 * 4096 + 2e6, f"{used / 1e6:.1f} MB for {packed / 1e6:.1f} MB packed"


def _environment() -> dict[str, str]:
    import os

    source = str(Path(lowbit.__file__).parents[1])
    return {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, [source, os.environ.get("PYTHONPATH")]))}


def test_import_is_light() -> None:
    code = "import sys, lowbit; lowbit.FormatError; print([m for m in ('transformers', 'rich') if m in sys.modules])"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, env=_environment())
    assert done.stdout.strip() == "[]", done.stderr


def test_the_public_names() -> None:
    names = {"quantize", "load", "save", "explain", "QuantLinear", "QuantizedWeight", "FormatError"}
    names |= {"LowbitConfig", "enable_transformers", "disable_transformers"}
    names |= {"parallelize", "ColwiseQuant", "RowwiseQuant"}
    assert set(lowbit.__all__) == names and names <= set(dir(lowbit))
    importlib.import_module("lowbit.quantize.rtn")  # the subpackage of that name must not take the function's place
    assert callable(lowbit.quantize) and lowbit.quantize.__module__ == "lowbit.models.api"
    with pytest.raises(AttributeError, match="no attribute 'nothing'"):
        _ = lowbit.nothing


# ---- quantize --------------------------------------------------------------------------------------------------------
def test_gptq_beats_rounding_on_what_it_was_calibrated_for(tmp_path: Path) -> None:
    ids = [torch.randint(3, VOCAB, (64,), generator=torch.Generator().manual_seed(s)) for s in range(24)]
    dense = tiny()
    want = logits(dense, torch.stack(ids))
    found = {}
    for method in ("rtn", "gptq"):
        model = tiny()
        report = lowbit.quantize(
            model, "w4a16", method, None if method == "rtn" else ids, group_size=32, progress=False
        )
        assert report.method == method and len(report.rows) == 14
        found[method] = error(logits(model, torch.stack(ids)), want)
    assert found["gptq"] < 0.9 * found["rtn"]
    lowbit.save(model, tmp_path)
    assert torch.equal(logits(lowbit.load(tmp_path)), logits(model))
    said = open_checkpoint(tmp_path).metadata
    assert said["method"] == "gptq" and len(said["base_sha256"]) == 64


def test_arguments_that_fit_nothing_are_refused_and_leave_the_model_alone() -> None:
    model = tiny()
    before = logits(model)
    cases: list[tuple[dict[str, Any], str]] = [
        ({"scheme": "w3a8"}, "scheme: found 'w3a8', accepted are w4a8"),
        ({"method": "awq"}, "method: found 'awq', accepted are rtn, gptq"),
        ({"group_size": 0}, "group_size: found 0"),
        ({"group_size": 48}, "group_size: found 48"),
        ({"activation": "rows"}, "activation: found 'rows'"),
        ({"method": "gptq"}, "calibration: found None"),
    ]
    for arguments, match in cases:
        with pytest.raises(lowbit.FormatError, match=match):
            lowbit.quantize(model, **{"method": "rtn", "progress": False, **arguments})
    assert torch.equal(logits(model), before)


def test_skip_leaves_named_linears_dense() -> None:
    model = tiny()
    lowbit.quantize(model, "w4a8", "rtn", skip=("lm_head", "down_proj", "model.layers.0"), progress=False)
    dense = {name for name, module in model.named_modules() if isinstance(module, nn.Linear)}
    first = {f"model.layers.0.{name}" for name in RECIPES["llama"].linears}
    assert dense == {"lm_head", "model.layers.1.mlp.down_proj"} | first


def test_explain_has_a_row_for_every_layer() -> None:
    model = tiny()
    lowbit.quantize(model, "w4a8", "rtn", group_size=32, progress=False)
    found = lowbit.explain(model)
    assert [row["name"] for row in found.rows] == linear_names(tiny(), RECIPES["llama"], ("lm_head",))
    assert all(row["kernel"] and row["bytes"] > 0 for row in found.rows) and found.dense == ["lm_head"]
    shown = str(found)
    assert all(row["name"] in shown and row["kernel"] in shown for row in found.rows)


# ---- decoding --------------------------------------------------------------------------------------------------------
@pytest.mark.parametrize("family", FAMILIES)
def test_greedy_decoding_is_what_generate_gives(family: str) -> None:
    model = tiny(family)
    got = decode(model, IDS[0], 20, stop=[])
    want = model.generate(
        IDS, attention_mask=torch.ones_like(IDS), max_new_tokens=20, do_sample=False, eos_token_id=None
    )
    assert got.tokens == want[0, IDS.shape[1] :].tolist()
    assert got.prompt_tokens == 12 and got.prefill_rate > 0 and got.decode_rate > 0


def test_decoding_stops_after_an_end_token_and_calls_back() -> None:
    model = tiny()
    free = decode(model, IDS, 20, stop=[]).tokens
    end = free[4]
    heard: list[int] = []
    assert decode(model, IDS, 20, stop=[end], on_token=heard.append).tokens == free[: free.index(end) + 1] == heard
    model.generation_config.eos_token_id = [95, end]
    assert decode(model, IDS, 20).tokens == heard
    assert decode(model, IDS, 0).tokens == []


def test_sampling_is_seeded_and_keeps_within_its_limits() -> None:
    model = tiny()

    def sample(**arguments: Any) -> list[int]:
        return decode(model, IDS, 24, stop=[], temperature=2.0, **arguments).tokens

    greedy = decode(model, IDS, 24, stop=[]).tokens
    assert sample(seed=1) == sample(seed=1) != sample(seed=2)
    assert sample(top_k=1) == sample(top_p=1e-6) == greedy != sample(seed=1)
    with torch.inference_mode():
        allowed = logits(model)[0, -1].topk(3).indices.tolist()
    firsts = {decode(model, IDS, 1, temperature=5.0, top_k=3, seed=seed).tokens[0] for seed in range(60)}
    assert firsts == set(allowed)


@pytest.mark.parametrize("wrong", [{"temperature": -1.0}, {"top_p": 0.0}, {"top_k": -1}, {"max_new_tokens": -1}])
def test_decoding_refuses_arguments_out_of_range(wrong: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match="found .*accepted"):
        decode(tiny(), IDS, **{"max_new_tokens": 4, **wrong})
    with pytest.raises(ValueError, match="prompt: found 0 tokens"):
        decode(tiny(), [], 4)


# ---- perplexity ------------------------------------------------------------------------------------------------------
def test_perplexity_scores_windows_that_do_not_overlap() -> None:
    model = tiny()
    ids = torch.randint(3, VOCAB, (110,), generator=torch.Generator().manual_seed(1))
    seen: list[tuple[int, int]] = []
    got = perplexity(model, ids, context=32, skip=10, progress=lambda done, total: seen.append((done, total)))
    windows = ids[10:106].reshape(3, 32)
    want = nn.functional.cross_entropy(
        logits(model, windows)[:, :-1].double().reshape(-1, VOCAB), windows[:, 1:].reshape(-1)
    )
    assert got.scored == 93 and got.windows == 3 and seen == [(0, 3), (1, 3), (2, 3), (3, 3)]
    assert got.nll == pytest.approx(float(want), rel=1e-7) and got.perplexity == pytest.approx(
        math.exp(float(want)), rel=1e-6
    )
    assert perplexity(model, ids, context=32, skip=10, tokens=64).scored == 62
    assert perplexity(model, ids[:20], context=32).scored == 19  # shorter than one window: that window
    for wrong in ({"context": 1}, {"skip": -1}, {"skip": 109}, {"tokens": 1}):
        with pytest.raises(lowbit.FormatError, match="found .*accepted"):
            perplexity(model, ids, **wrong)
    with pytest.raises(lowbit.FormatError, match="without a tokenizer"):
        perplexity(model, "text")


def test_log_likelihood_is_stable() -> None:
    wide = torch.tensor([[1e4, -1e4, 0.0], [3e38, 0.0, -3e38], [0.0, 0.0, 0.0]])
    got = nll_of(wide, torch.tensor([0, 1, 2]))
    assert got.tolist() == pytest.approx([0.0, 3e38, math.log(3)], rel=1e-6)
    assert nll_of(torch.tensor([[float("nan"), 1.0]]), torch.tensor([1])).isnan().all()


def test_layer_errors_are_of_the_outputs() -> None:
    dense, model = tiny(), tiny()
    lowbit.quantize(model, "w8a8", "rtn", group_size=32, activation="none", progress=False)
    for ids in (None, IDS):
        rows = layer_errors(dense, model, ids)
        assert len(rows) == 14 and all(0 < row.error < 0.02 for row in rows)
        assert {row.rows for row in rows} == ({64} if ids is None else {11})  # without the first token
    layer = model.model.layers[1].mlp.up_proj
    linear = dense.model.layers[1].mlp.up_proj
    x = torch.eye(64)
    want = error(layer(x), linear(x))
    assert next(r.error for r in rows if r.name.endswith("1.mlp.up_proj")) == pytest.approx(want, rel=0.5)
