"""transformers' own from_pretrained, generate, save_pretrained and pipeline with our layers, and torch.export."""

from __future__ import annotations

import importlib
import io
import json
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

import lowbit
from lowbit.checkpoint import open_checkpoint, write_checkpoint
from lowbit.types import FormatError
from test_models import IDS, VOCAB, dequantized, error, logits, save_as, save_plain, tiny

transformers = pytest.importorskip("transformers")
SHARED = Path(__file__).parents[1] / ".." / "shared" / "checkpoints" / "smollm2-135m-gptq-w4g64-sym"


@pytest.fixture(autouse=True)
def _enabled() -> Iterator[None]:
    transformers.utils.logging.disable_progress_bar()
    lowbit.enable_transformers()
    yield
    lowbit.disable_transformers()


def load(path: Path, **options: Any) -> Any:
    return transformers.AutoModelForCausalLM.from_pretrained(path, **{"dtype": torch.float32, **options})


def packed(model: Any) -> dict[str, lowbit.QuantLinear]:
    return {name: module for name, module in model.named_modules() if isinstance(module, lowbit.QuantLinear)}


def generate(model: Any, ids: torch.Tensor = IDS, mask: torch.Tensor | None = None, **options: Any) -> list[list[int]]:
    mask = torch.ones_like(ids) if mask is None else mask
    out = model.generate(ids, attention_mask=mask, max_new_tokens=6, do_sample=False, eos_token_id=None, **options)
    rows: list[list[int]] = out[:, ids.shape[1] :].tolist()
    return rows


# ---- the switch ------------------------------------------------------------------------------------------------------
def test_what_the_switch_and_a_config_change_is_undone() -> None:
    from transformers.quantizers import auto

    def look() -> tuple[dict[str, object], dict[str, object], object]:
        tables = auto.AUTO_QUANTIZATION_CONFIG_MAPPING, auto.AUTO_QUANTIZER_MAPPING
        return dict(tables[0]), dict(tables[1]), auto.AutoHfQuantizer.__dict__["merge_quantization_configs"]

    lowbit.disable_transformers()
    stock = look()
    assert {name for name, found in stock[0].items() if found.__module__.startswith("lowbit")} == {"lowbit"}
    assert stock[2].__func__.__module__ == auto.__name__  # type: ignore[attr-defined]
    lowbit.LowbitConfig()
    assert look()[:2] == stock[:2] and look()[2] is not stock[2]
    lowbit.disable_transformers()
    assert look() == stock
    for _ in range(2):
        lowbit.enable_transformers()
    lowbit.LowbitConfig()
    taken = {name for name, found in look()[0].items() if found is lowbit.LowbitConfig}
    assert taken == {"gptq", "awq", "compressed-tensors", "auto-round", "lowbit"}
    lowbit.disable_transformers()
    assert look() == stock


def test_a_config_passed_explicitly_needs_no_switch(tmp_path: Path) -> None:
    lowbit.disable_transformers()
    save_as(tiny(), tmp_path, "gptq")
    model = load(tmp_path, quantization_config=lowbit.LowbitConfig(activation="token"))
    assert {layer.activation for layer in packed(model).values()} == {"token"}
    assert torch.equal(logits(model), logits(lowbit.load(tmp_path, activation="token")))
    from transformers.quantizers import auto

    assert auto.AUTO_QUANTIZATION_CONFIG_MAPPING["gptq"] is transformers.GPTQConfig
    with pytest.raises(ValueError, match="AwqConfig"):  # what transformers says of other classes is what it said
        load(tmp_path, quantization_config=transformers.AwqConfig())


# ---- loading and saving ----------------------------------------------------------------------------------------------
@pytest.mark.parametrize("format", ["gptq", "gptq_v2", "awq", "compressed-tensors"])
def test_from_pretrained_runs_our_layers_and_saves_what_it_read(format: str, tmp_path: Path) -> None:
    layers = save_as(tiny("qwen2"), tmp_path / "a", format)  # with biases
    want = logits(lowbit.load(tmp_path / "a"))
    model, info = load(tmp_path / "a", output_loading_info=True)
    assert set(packed(model)) == set(layers) and torch.equal(logits(model), want)
    assert not info["missing_keys"] and not info["unexpected_keys"] and not info["mismatched_keys"]
    model.save_pretrained(tmp_path / "b")
    old, new = open_checkpoint(tmp_path / "a"), open_checkpoint(tmp_path / "b")
    assert set(old) == set(new) and all(torch.equal(old[name], new[name]) for name in old)
    assert new.quantization == old.quantization
    assert torch.equal(logits(load(tmp_path / "b")), want)


def test_a_real_checkpoint_is_read_and_written_to_the_bit(tmp_path: Path) -> None:
    if not SHARED.is_dir():
        pytest.skip("no shared/checkpoints beside the repository")
    model = load(SHARED)
    assert len(packed(model)) == 210
    model.save_pretrained(tmp_path)
    old, new = open_checkpoint(SHARED), open_checkpoint(tmp_path)
    assert set(old) == set(new) and all(torch.equal(old[name].float(), new[name].float()) for name in old)


@pytest.mark.parametrize("scheme", ["w4a8", "fp16"])
def test_lowbits_own_files(scheme: str, tmp_path: Path) -> None:
    model = tiny()
    lowbit.quantize(model, scheme, "rtn", progress=False)
    lowbit.save(model, tmp_path / "a")
    loaded = load(tmp_path / "a")
    assert len(packed(loaded)) == 14 and torch.equal(logits(loaded), logits(model))
    loaded.save_pretrained(tmp_path / "b")
    old, new = open_checkpoint(tmp_path / "a"), open_checkpoint(tmp_path / "b")
    assert new.metadata == old.metadata and new.quantization == old.quantization
    assert torch.equal(logits(lowbit.load(tmp_path / "b")), logits(model))


def test_plain_weights_are_rounded_where_a_scheme_asks(tmp_path: Path) -> None:
    save_plain(tiny(), tmp_path / "a")
    want = tiny()
    lowbit.quantize(want, "w8a8", "rtn", progress=False)
    model = load(tmp_path / "a", quantization_config=lowbit.LowbitConfig(scheme="w8a8"))
    assert len(packed(model)) == 14 and torch.equal(logits(model), logits(want))
    model.save_pretrained(tmp_path / "b")
    assert torch.equal(logits(lowbit.load(tmp_path / "b")), logits(want))


def test_another_format_can_be_saved(tmp_path: Path) -> None:
    save_as(tiny(), tmp_path / "a", "awq")
    model = load(tmp_path / "a", quantization_config=lowbit.LowbitConfig(save_as="compressed-tensors"))
    model.save_pretrained(tmp_path / "b")
    quantization = json.loads((tmp_path / "b/config.json").read_text())["quantization_config"]
    assert quantization["quant_method"] == "compressed-tensors"
    assert torch.equal(logits(load(tmp_path / "b")), logits(model))


def test_auto_round_and_lowbit_save(tmp_path: Path) -> None:
    save_as(tiny(), tmp_path / "a", "gptq")
    held = open_checkpoint(tmp_path / "a")
    named = {"quant_method": "auto-round", "packing_format": "auto_round:auto_gptq"}
    config = held.config | {"quantization_config": {**(held.quantization or {}), **named}}
    write_checkpoint(tmp_path / "b", {name: held[name] for name in held}, config)
    model = load(tmp_path / "b")
    want = logits(lowbit.load(tmp_path / "a"))
    assert len(packed(model)) == 14 and torch.equal(logits(model), want)
    lowbit.save(model, tmp_path / "c")
    assert open_checkpoint(tmp_path / "c").metadata and torch.equal(logits(lowbit.load(tmp_path / "c")), want)


def test_a_quantized_head_is_untied_and_kept(tmp_path: Path) -> None:
    layers = save_as(tiny(tie_word_embeddings=True), tmp_path / "a", "gptq", head=True)
    model = load(tmp_path / "a")
    assert "lm_head" in layers and set(packed(model)) == set(layers)
    assert torch.equal(logits(model), logits(lowbit.load(tmp_path / "a")))
    model.save_pretrained(tmp_path / "b")
    assert torch.equal(logits(load(tmp_path / "b")), logits(model))


def test_models_without_a_head_and_with_another_one(tmp_path: Path) -> None:
    layers = save_as(tiny(), tmp_path, "gptq", head=True)
    base = transformers.AutoModel.from_pretrained(tmp_path, dtype=torch.float32)
    want = lowbit.load(tmp_path).model
    with torch.inference_mode():
        assert torch.equal(base(IDS).last_hidden_state, want(IDS).last_hidden_state)
    judge = transformers.AutoModelForSequenceClassification.from_pretrained(tmp_path, num_labels=3)
    assert len(packed(base)) == len(packed(judge)) == len(layers) - 1


def test_sixteen_bit_dtypes_and_dequantize(tmp_path: Path) -> None:
    layers = save_as(tiny(), tmp_path, "gptq")
    for dtype in (torch.bfloat16, torch.float16):
        model = load(tmp_path, dtype=dtype)
        assert logits(model).dtype == dtype and model.model.embed_tokens.weight.dtype == dtype
    plain = load(tmp_path).dequantize()
    assert not packed(plain) and not hasattr(plain.config, "quantization_config")
    assert error(logits(plain), logits(dequantized(tiny(), layers))) < 1e-6


# ---- generating ------------------------------------------------------------------------------------------------------
def test_generate_greedy_static_beams_and_batches_agree_with_torch(tmp_path: Path) -> None:
    stock = dequantized(tiny(), save_as(tiny(), tmp_path, "gptq"))
    model = load(tmp_path, quantization_config=lowbit.LowbitConfig(activation="none"))
    want = generate(stock)
    assert generate(model) == generate(model, cache_implementation="static") == want
    assert generate(model, num_beams=3) == generate(stock, num_beams=3)
    other = torch.randint(3, VOCAB, (1, 7), generator=torch.Generator().manual_seed(9))
    padded = torch.cat([IDS, torch.cat([torch.zeros(1, 5, dtype=torch.long), other], 1)])
    mask = torch.ones_like(padded)
    mask[1, :5] = 0
    assert generate(model, padded, mask) == want + generate(model, other)
    assert len({token for row in want + generate(model, other) for token in row}) > 3  # not one token over and over


def test_generate_compiles_the_step_of_a_static_cache(tmp_path: Path) -> None:
    save_as(tiny(), tmp_path, "gptq")
    model = load(tmp_path)
    compiling = transformers.CompileConfig(backend="eager", mode=None, fullgraph=True)
    compiling._compile_all_devices = True
    torch._dynamo.utils.counters.clear()
    got = generate(model, cache_implementation="static", compile_config=compiling)
    assert torch._dynamo.utils.counters["stats"]["unique_graphs"] > 0
    assert got == generate(model, cache_implementation="static", disable_compile=True)


def test_pipeline(tmp_path: Path) -> None:
    tokenizers = pytest.importorskip("tokenizers")
    words = {f"w{i}": i for i in range(VOCAB)}
    made = tokenizers.Tokenizer(tokenizers.models.WordLevel(words, unk_token="w0"))
    made.pre_tokenizer = tokenizers.pre_tokenizers.Whitespace()
    tokenizer = transformers.PreTrainedTokenizerFast(tokenizer_object=made, pad_token="w0", eos_token="w2")
    save_as(tiny(), tmp_path, "awq")
    tokenizer.save_pretrained(tmp_path)
    run = transformers.pipeline("text-generation", model=str(tmp_path), dtype=torch.float32)
    assert len(packed(run.model)) == 14
    found = run("w5 w6 w7", max_new_tokens=5, do_sample=False, return_full_text=False)[0]["generated_text"]
    ids = lowbit.load(tmp_path).generate(torch.tensor([[5, 6, 7]]), max_new_tokens=5, do_sample=False, pad_token_id=0)
    assert found.split() == [f"w{i}" for i in ids[0, 3:].tolist() if i != 2]


# ---- bad input -------------------------------------------------------------------------------------------------------
def test_what_cannot_be_loaded_is_refused_in_one_line(tmp_path: Path) -> None:
    def line(name: str, **options: Any) -> str:
        with pytest.raises(FormatError) as caught:
            load(tmp_path / name, **options)
        assert "\n" not in str(caught.value)
        return str(caught.value)

    save_as(tiny(), tmp_path / "short", "gptq", drop=("model.norm.weight",))
    assert "model.norm.weight" in line("short")
    save_as(tiny(), tmp_path / "scales", "gptq", drop=("model.layers.1.mlp.up_proj.scales",))
    assert "model.layers.1.mlp.up_proj" in line("scales")
    save_as(tiny(), tmp_path / "three", "gptq")
    held = open_checkpoint(tmp_path / "three")
    config = held.config | {"quantization_config": {**(held.quantization or {}), "bits": 3}}
    write_checkpoint(tmp_path / "three", {name: held[name].clone() for name in held}, config)
    assert "bits" in line("three")
    config = held.config | {"intermediate_size": 192}
    write_checkpoint(tmp_path / "wide", {name: held[name] for name in held}, config)
    assert "[128, 64]" in line("wide") and "[192, 64]" in line("wide")
    for option in ({"activation": "bytes"}, {"scheme": "w5"}, {"save_as": "zip"}):
        with pytest.raises(FormatError, match="accepted are"):
            lowbit.LowbitConfig(**option)  # type: ignore[arg-type]


def test_no_transformers_or_an_old_one_is_said_in_one_line(monkeypatch: pytest.MonkeyPatch) -> None:
    name = "lowbit.models.from_pretrained"
    monkeypatch.delitem(sys.modules, name)
    with monkeypatch.context() as old:
        old.setattr(sys.modules["transformers"], "__version__", "4.57.1")
        with pytest.raises(ImportError, match=r"needs transformers 5.0 or newer .* found 4\.57\.1$"):
            importlib.import_module(name)
    monkeypatch.setitem(sys.modules, "transformers", None)  # type: ignore[arg-type]
    with pytest.raises(ImportError, match="needs transformers 5.0 or newer") as caught:
        importlib.import_module(name)
    assert "\n" not in str(caught.value)


def test_what_a_format_cannot_hold_is_refused_when_saving(tmp_path: Path) -> None:
    model = tiny()
    lowbit.quantize(model, "w8a8", "rtn", progress=False)
    lowbit.save(model, tmp_path / "a")
    loaded = load(tmp_path / "a", quantization_config=lowbit.LowbitConfig(save_as="awq"))
    with pytest.raises(FormatError, match="bits"):
        loaded.save_pretrained(tmp_path / "b")


# ---- torch.export ----------------------------------------------------------------------------------------------------
@pytest.mark.parametrize("scheme", ["w4a8", "w8a8", "fp16"])
def test_a_layer_is_exported_with_any_number_of_rows(scheme: str) -> None:
    torch.manual_seed(0)
    layer = lowbit.QuantLinear.from_linear(torch.nn.Linear(64, 48), scheme)
    rows = torch.export.Dim("rows", min=1, max=4096)
    with torch.no_grad():
        made = torch.export.export(layer, (torch.randn(4, 64),), dynamic_shapes=({0: rows},))
    assert [str(node.target) for node in made.graph.nodes if node.op == "call_function"] == ["lowbit.linear.default"]
    file = io.BytesIO()
    torch.export.save(made, file)
    file.seek(0)
    x = torch.randn(7, 64)
    assert torch.equal(torch.export.load(file).module()(x), layer(x))


def test_a_model_of_two_layers_is_exported(tmp_path: Path) -> None:
    save_as(tiny(), tmp_path, "gptq")
    model = load(tmp_path)
    tokens = torch.export.Dim("tokens", min=2, max=128)
    inputs, shapes = {"input_ids": IDS, "use_cache": False}, {"input_ids": {1: tokens}, "use_cache": None}
    with torch.no_grad():
        made = torch.export.export(model, (), inputs, dynamic_shapes=shapes, strict=False)
    assert sum("lowbit.linear" in str(node.target) for node in made.graph.nodes) == len(packed(model)) == 14
    ids = torch.randint(3, VOCAB, (1, 20))
    with torch.no_grad():
        assert torch.equal(made.module()(input_ids=ids, use_cache=False).logits, logits(model, ids))
