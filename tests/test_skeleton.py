"""The skeleton of the native engine against the model that transformers makes of the same directory."""

from __future__ import annotations

import copy
import json
import pickle
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from huggingface_hub.errors import StrictDataclassError
from hypothesis import given
from hypothesis import strategies as st
from safetensors import safe_open
from safetensors.torch import save_file
from torch import Tensor, nn

import lowbit
import samples
from lowbit.engines.decode import decode, end_tokens, load_model
from lowbit.engines.llama import Decoder, native
from lowbit.models import families
from lowbit.models.replace import replace
from lowbit.models.skeleton import Rotary, SkeletonForCausalLM, as_transformers, load_skeleton
from lowbit.nn import QuantLinear
from lowbit.prove.compare import perplexity
from lowbit.types import FormatError

transformers = pytest.importorskip("transformers")
SIZES = dict(
    vocab_size=200, hidden_size=64, intermediate_size=96, num_hidden_layers=3, num_attention_heads=4,
    num_key_value_heads=2, head_dim=16, max_position_embeddings=512, tie_word_embeddings=True,
    bos_token_id=1, eos_token_id=2, pad_token_id=0,
)  # fmt: skip
LLAMA3 = {"rope_type": "llama3", "rope_theta": 1e4, "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
          "original_max_position_embeddings": 64}  # fmt: skip
LINEAR = {"rope_type": "linear", "rope_theta": 5e5, "factor": 3.0}
MODELS: dict[str, tuple[str, dict[str, Any]]] = {
    "llama, tied": ("llama", {}),
    "llama, untied, biases, llama3 angles": (
        "llama",
        {"tie_word_embeddings": False, "attention_bias": True, "mlp_bias": True, "rope_parameters": LLAMA3},
    ),
    "mistral, untied, window, linear angles": (
        "mistral",
        {"tie_word_embeddings": False, "sliding_window": 40, "rope_parameters": LINEAR},
    ),
    "mistral, tied, no window": ("mistral", {"sliding_window": None}),
    "qwen2, tied, window in the last layers": (
        "qwen2",
        {"use_sliding_window": True, "sliding_window": 48, "max_window_layers": 1},
    ),
    "qwen3, untied": ("qwen3", {"tie_word_embeddings": False, "head_dim": 32}),
    "qwen3, tied, biases": ("qwen3", {"attention_bias": True}),
}


def make(path: Path, name: str, dtype: torch.dtype = torch.float16, scheme: str = "w4a8") -> Path:
    """A directory with a random model, every bias and norm random too, its linears quantized."""
    family, fields = MODELS[name]
    torch.manual_seed(0)
    lowbit.save(samples.random_decoder(family, scheme, **{**SIZES, **fields}), path, dtype)
    return path


def tokens(count: int) -> Tensor:
    return torch.randint(3, 200, (count,), generator=torch.Generator().manual_seed(count))


def bare(path: Path) -> SkeletonForCausalLM:
    found = load_skeleton(path)
    assert found is not None
    return found


def logits(model: Any, head: str, count: int = 40) -> Tensor:
    return Decoder.from_model(model, head=head).start().feed(tokens(count), keep=count)


def edit(path: Path, file: str = "config.json", **fields: Any) -> Path:
    """Set fields of a JSON file; ... removes one."""
    old = json.loads((path / file).read_text()) if (path / file).exists() else {}
    (path / file).write_text(json.dumps({k: v for k, v in {**old, **fields}.items() if v is not ...}))
    return path


# ---- the same model --------------------------------------------------------------------------------------------------
@pytest.mark.parametrize("dtype", [torch.float16, torch.float32])
@pytest.mark.parametrize("name", MODELS)
def test_logits_have_the_bits_of_the_transformers_model(name: str, dtype: torch.dtype, tmp_path: Path) -> None:
    path = make(tmp_path / "m", name, dtype)
    mine, want = load_model(path), lowbit.load(path, dtype=None)
    assert type(mine) is SkeletonForCausalLM
    for head in ("w8a8", "float"):
        assert torch.equal(logits(mine, head), logits(want, head))
    assert Decoder.from_model(mine).limit == Decoder.from_model(want).limit
    tied = mine.lm_head.weight is mine.model.embed_tokens.weight
    assert tied == want.config.tie_word_embeddings == mine.config.tie_word_embeddings
    assert decode(mine, tokens(9), 12, stop=[]).tokens == decode(want, tokens(9), 12, stop=[]).tokens


@pytest.mark.parametrize("scheme", ["fp16", "w8a8"])
def test_a_quantized_head_and_linears_in_fp16(scheme: str, tmp_path: Path) -> None:
    """The config ties, the file does not: its head has a bit width of its own."""
    source = transformers.AutoConfig.for_model("llama", **SIZES)
    model = transformers.AutoModelForCausalLM.from_config(source).eval()
    lowbit.quantize(model, scheme, "rtn" if scheme != "fp16" else None, skip=(), progress=False)
    lowbit.save(model, tmp_path / "m")
    edit(tmp_path / "m", tie_word_embeddings=True)
    mine, want = bare(tmp_path / "m"), lowbit.load(tmp_path / "m", dtype=None)
    assert isinstance(mine.lm_head, QuantLinear) and not mine.config.tie_word_embeddings
    assert torch.equal(logits(mine, "float"), logits(want, "float"))


FOREIGN = ("autoawq-gemm-w4g32-1l", "gptqmodel-gptq-w4g64-sym-descact-1l", "llmc-rtn-w4a8-1l")


@pytest.mark.parametrize("name", FOREIGN)
def test_checkpoints_of_other_tools(name: str, shared: Path) -> None:
    path = shared / "fixtures" / name
    mine, want = bare(path), lowbit.load(path, dtype=None)
    assert torch.equal(logits(mine, "w8a8"), logits(want, "w8a8"))
    token = load_model(path, activation="token")
    assert {m.activation for m in token.modules() if isinstance(m, QuantLinear)} == {"token"}


@pytest.mark.parametrize("name", MODELS)
def test_names_and_shapes_are_those_of_transformers(name: str, tmp_path: Path) -> None:
    family, fields = MODELS[name]
    config = transformers.AutoConfig.for_model(family, **{**SIZES, **fields})
    want = transformers.AutoModelForCausalLM.from_config(config)
    read = families.read({**SIZES, **fields, "model_type": family})
    assert read is not None
    mine = SkeletonForCausalLM(read)
    assert {k: v.shape for k, v in mine.state_dict().items()} == {k: v.shape for k, v in want.state_dict().items()}
    assert mine.get_expanded_tied_weights_keys() == want.get_expanded_tied_weights_keys(all_submodels=True)
    assert all(parameter.is_meta for parameter in mine.parameters())


ANGLES = [
    {"rope_type": "default", "rope_theta": 10000.0}, {"rope_type": "default", "rope_theta": 1000000},
    {**LINEAR}, {**LINEAR, "factor": 4}, {**LLAMA3},
    {**LLAMA3, "rope_theta": 500000.0, "factor": 32.0, "original_max_position_embeddings": 8192},
    {**LLAMA3, "factor": 3, "low_freq_factor": 1, "high_freq_factor": 2.5, "original_max_position_embeddings": 100},
]  # fmt: skip


@pytest.mark.parametrize("rope", ANGLES, ids=lambda rope: f"{rope['rope_type']} {rope['rope_theta']:g}")
@pytest.mark.parametrize("head_dim", [2, 16, 38, 64, 80, 128])
def test_angles_have_the_bits_of_transformers(rope: dict[str, Any], head_dim: int) -> None:
    fields = {**SIZES, "head_dim": head_dim, "max_position_embeddings": 131072, "rope_parameters": rope}
    config = transformers.AutoConfig.for_model("llama", **copy.deepcopy(fields))
    want = transformers.models.llama.modeling_llama.LlamaRotaryEmbedding(config)
    mine = Rotary(families.read({**fields, "model_type": "llama"}))
    assert torch.equal(mine.inv_freq, want.inv_freq)
    for positions in (torch.arange(600)[None], torch.tensor([[7, 100_003, 131_071]])):
        for got, full in zip(mine(torch.empty(1), positions), want(torch.empty(1), positions)):
            assert torch.equal(got, full[..., : head_dim // 2])


# ---- config.json -----------------------------------------------------------------------------------------------------
OLD_LLAMA3 = {key: value for key, value in LLAMA3.items() if key != "rope_theta"}
CONFIGS: dict[str, list[dict[str, Any]]] = {
    "llama": [
        {}, {"hidden_size": 64, "num_attention_heads": 8}, {"num_key_value_heads": None}, {"head_dim": None},
        {"head_dim": 80}, {"rope_theta": 5e5}, {"rope_theta": 50000, "rope_scaling": None},
        {"rope_scaling": {"type": "linear", "factor": 2.0}}, {"rope_theta": 5e5, "rope_scaling": OLD_LLAMA3},
        {"rope_scaling": {**OLD_LLAMA3, "original_max_position_embeddings": 1024}}, {"rope_parameters": LLAMA3},
        {"rope_theta": 7.0, "rope_parameters": {"rope_type": "default"}}, {"partial_rotary_factor": 1.0},
        {"eos_token_id": [1, 2]}, {"eos_token_id": None}, {"tie_word_embeddings": True, "rms_norm_eps": 1e-5},
        {"attention_bias": True}, {"mlp_bias": True}, {"sliding_window": 7}, {"pad_token_id": -1},
    ],
    "mistral": [
        {}, {"sliding_window": None}, {"sliding_window": 77, "head_dim": 32}, {"head_dim": None},
        {"rope_parameters": LINEAR}, {"num_key_value_heads": 4}, {"attention_bias": True},
    ],
    "qwen2": [
        {}, {"num_attention_heads": 64, "num_key_value_heads": None}, {"head_dim": 64}, {"use_sliding_window": True},
        {"use_sliding_window": True, "max_window_layers": 2, "num_hidden_layers": 4},
        {"use_sliding_window": True, "sliding_window": None}, {"rope_theta": 1e6, "attention_bias": False},
        {"layer_types": ["sliding_attention", "full_attention"], "num_hidden_layers": 2},
        {"use_sliding_window": True, "layer_types": ["full_attention", "sliding_attention"], "num_hidden_layers": 2},
    ],
    "qwen3": [
        {}, {"head_dim": 64}, {"attention_bias": True, "tie_word_embeddings": True}, {"num_attention_heads": 64},
        {"use_sliding_window": True, "max_window_layers": 0, "sliding_window": 99},
    ],
}  # fmt: skip
ROWS = [(family, fields) for family, rows in CONFIGS.items() for fields in rows]


def of_transformers(family: str, fields: dict[str, Any]) -> Any:
    return transformers.AutoConfig.for_model(family, **copy.deepcopy(fields))


def agree(mine: families.Config, want: Any) -> None:
    want.rope_parameters.pop("partial_rotary_factor", None)  # only 1 gets here
    mine.rope_parameters.pop("partial_rotary_factor", None)
    for key, value in vars(mine).items():
        if hasattr(want, key):
            assert getattr(want, key) == value, key
    if want.model_type.startswith("qwen"):
        sliding = [kind == "sliding_attention" for kind in want.layer_types]
        assert mine.windows == [want.sliding_window if slides else None for slides in sliding]
    else:
        window = want.sliding_window if want.model_type == "mistral" else None
        assert mine.windows == [window] * want.num_hidden_layers


@pytest.mark.parametrize(("family", "fields"), ROWS, ids=str)
def test_missing_fields_are_filled_in_as_transformers_does(family: str, fields: dict[str, Any]) -> None:
    mine = families.read({**fields, "model_type": family})
    assert mine is not None
    agree(mine, of_transformers(family, fields))


@pytest.mark.parametrize(
    "fields",
    [
        {"model_type": "phi"}, {"model_type": None}, {"model_type": ["llama"]}, {"hidden_act": "gelu"},
        {"hidden_size": "64"}, {"hidden_size": True}, {"hidden_size": 4100}, {"num_key_value_heads": 7},
        {"rms_norm_eps": 1}, {"tie_word_embeddings": None}, {"eos_token_id": "2"}, {"eos_token_id": [2.0]},
        {"layer_types": ["full_attention"] * 32}, {"auto_map": {}}, {"original_max_position_embeddings": 9},
        {"rope_parameters": {"rope_type": "yarn", "factor": 2.0}}, {"rope_scaling": {"type": "dynamic", "factor": 2.0}},
        {"rope_parameters": {"rope_type": "linear"}}, {"rope_parameters": {"rope_type": "linear", "factor": "2"}},
        {"rope_parameters": {"rope_type": "llama3", "factor": 8.0}}, {"rope_parameters": "default"},
        {"rope_theta": None}, {"partial_rotary_factor": 0.5}, {"rope_parameters": {"full_attention": {}}},
        {"rope_parameters": {"rope_type": "default", "partial_rotary_factor": 0.5}}, {"rope_parameters": {"rope_type": 3}},
        {"pad_token_id": 32000}, {"model_type": "qwen3", "head_dim": None}, {"model_type": "qwen2", "head_dim": None},
        {"model_type": "mistral", "num_key_value_heads": None}, {"model_type": "qwen2", "layer_types": ["full"] * 32},
        {"model_type": "qwen2", "layer_types": ["full_attention"]}, {"head_dim": 15},
    ],
    ids=str,
)  # fmt: skip
def test_whatever_is_not_known_takes_the_way_over_transformers(fields: dict[str, Any]) -> None:
    assert families.read({"model_type": "llama", **fields}) is None


def any_of(*values: Any) -> Any:
    return st.sampled_from(values)


@given(
    family=any_of(*CONFIGS),
    fields=st.fixed_dictionaries(
        {},
        optional={
            "hidden_size": any_of(64, 96, 0, None), "num_attention_heads": any_of(4, 6, 32), "head_dim": any_of(16, None, 0),
            "num_key_value_heads": any_of(1, 2, 4, None, 0), "num_hidden_layers": any_of(2, 3), "rms_norm_eps": any_of(1e-5, 0),
            "rope_theta": any_of(1e4, 10000, None, 0), "rope_scaling": any_of(None, {}, LINEAR, OLD_LLAMA3, {"type": "linear"}),
            "rope_parameters": any_of(None, {}, LLAMA3, {"rope_type": "default"}, {"factor": 2.0}),
            "sliding_window": any_of(None, 5, 0), "use_sliding_window": any_of(True, False, None),
            "max_window_layers": any_of(0, 1, 9), "layer_types": any_of(None, ["full_attention"] * 2, ["sliding_attention"] * 3),
            "eos_token_id": any_of(None, 3, [3, 4], [], "x"), "attention_bias": any_of(True, False, 1),
            "partial_rotary_factor": any_of(None, 1, 1.0, 0.25), "max_position_embeddings": any_of(64, 4096),
        },
    ),
)  # fmt: skip
def test_no_answer_differs_from_transformers(family: str, fields: dict[str, Any]) -> None:
    mine = families.read({**fields, "model_type": family})
    if mine is not None:
        agree(mine, of_transformers(family, fields))


# ---- refusals --------------------------------------------------------------------------------------------------------
def rewrite(path: Path, change: Any) -> None:
    """The safetensors file with its tensors changed in place by ``change``."""
    with safe_open(path / "model.safetensors", "pt") as file:
        tensors, metadata = {key: file.get_tensor(key) for key in file.keys()}, file.metadata()
    change(tensors)
    save_file(tensors, path / "model.safetensors", metadata)


def damage(path: Path, what: str) -> None:
    if what == "no norm":
        rewrite(path, lambda tensors: tensors.pop("model.layers.1.input_layernorm.weight"))
    elif what == "no linear":
        rewrite(path, lambda tensors: [tensors.pop(key) for key in list(tensors) if "layers.2.mlp.up_proj" in key])
    elif what == "more layers":
        edit(path, num_hidden_layers=4)
    elif what == "wrong width":
        edit(path, intermediate_size=128)
    elif what == "wrong vocabulary":
        edit(path, vocab_size=300)
    elif what == "text for a number":
        edit(path, hidden_size="64")
    elif what == "no json":
        (path / "config.json").write_text("{")
    elif what == "no family":
        edit(path, model_type=...)
    else:
        edit(path, num_attention_heads=5)


WHAT = ("no norm", "no linear", "more layers", "wrong width", "wrong vocabulary", "text for a number", "no json",
        "no family", "heads that do not divide")  # fmt: skip


@pytest.mark.parametrize("what", WHAT)
def test_malformed_directories_are_refused_in_the_same_words(what: str, tmp_path: Path) -> None:
    damage(make(tmp_path / "m", "llama, tied"), what)
    said = []
    for load in (lowbit.load, load_model):
        with pytest.raises((FormatError, StrictDataclassError)) as caught:
            load(tmp_path / "m")
        said.append((caught.type, str(caught.value)))
    assert said[0] == said[1]


def test_end_tokens_come_from_the_files(tmp_path: Path) -> None:
    path = make(tmp_path / "m", "llama, tied")
    file = path / "generation_config.json"
    for ends, want in ((7, [7]), ([5, 6], [5, 6]), (None, [2]), (..., [2])):
        edit(path, file.name, eos_token_id=ends)
        assert end_tokens(bare(path)) == end_tokens(lowbit.load(path)) == want
    file.unlink()
    assert end_tokens(bare(path)) == end_tokens(lowbit.load(path)) == [2]
    edit(path, eos_token_id=[3, 4])
    assert end_tokens(bare(path)) == [3, 4]
    for text in ('{"eos_token_id": "x"}', "{"):
        file.write_text(text)
        with pytest.raises(FormatError, match="generation_config.json"):
            load_skeleton(path)


# ---- beyond the native engine ----------------------------------------------------------------------------------------
def test_what_the_engine_does_not_run_is_a_transformers_model(tmp_path: Path) -> None:
    path = make(tmp_path / "m", "llama, tied", scheme="fp16")
    rewrite(path, lambda tensors: tensors.update({k: v.float() for k, v in tensors.items() if "norm" in k}))
    plain = transformers.AutoModelForCausalLM.from_config(transformers.AutoConfig.for_model("llama", **SIZES))
    plain.save_pretrained(tmp_path / "plain")
    shutil.copytree(path, tmp_path / "yarn")
    yarn = {"rope_type": "yarn", "rope_theta": 1e4, "factor": 2.0, "original_max_position_embeddings": 256}
    edit(tmp_path / "yarn", rope_parameters=yarn)
    for directory, engine in (("plain", "transformers"), ("yarn", "native")):
        found, want = load_model(tmp_path / directory), lowbit.load(tmp_path / directory)
        assert type(found).__name__ == "LlamaForCausalLM"
        assert decode(found, tokens(5), 3, stop=[]).engine == engine
        assert engine == "native" or torch.equal(found(tokens(5)[None]).logits, want(tokens(5)[None]).logits)
    assert type(load_model(path, engine="transformers")).__name__ == "LlamaForCausalLM"


def test_a_sequence_past_the_window_goes_on_in_transformers(tmp_path: Path) -> None:
    path = make(tmp_path / "m", "mistral, untied, window, linear angles")
    mine, want = load_model(path), lowbit.load(path)
    found = decode(mine, tokens(36), 8, stop=[])
    assert found.engine == "transformers" and "sliding window" in found.reason
    assert found.tokens == decode(want, tokens(36), 8, stop=[]).tokens


def test_the_transformers_model_of_a_skeleton_shares_its_linears(tmp_path: Path) -> None:
    path = make(tmp_path / "m", "qwen2, tied, window in the last layers")
    edit(path, "generation_config.json", eos_token_id=[8])
    mine, want = bare(path), lowbit.load(path)
    full = as_transformers(mine)
    assert as_transformers(mine) is full and as_transformers(mine, torch.bfloat16) is not full
    assert full.model.layers[0].mlp.up_proj is mine.model.layers[0].mlp.up_proj
    ids = tokens(20)[None]
    assert torch.equal(full(ids).logits, want(ids).logits)
    assert end_tokens(full) == [8] and full.name_or_path == want.name_or_path and full.lowbit_made == want.lowbit_made
    assert full.lm_head.weight is full.model.embed_tokens.weight and not full.training
    other = QuantLinear.from_linear(nn.Linear(64, 96, bias=False), "w4a8")
    replace(mine, "model.layers.0.mlp.up_proj", other)
    assert as_transformers(mine).model.layers[0].mlp.up_proj is other
    lowbit.save(as_transformers(mine), tmp_path / "again")
    assert torch.equal(logits(bare(tmp_path / "again"), "float"), logits(mine, "float"))


def test_a_skeleton_says_what_it_is(tmp_path: Path) -> None:
    mine = bare(make(tmp_path / "m", "llama, tied"))
    said = "found a model loaded for the native engine, accepted is one of lowbit.load"
    with pytest.raises(FormatError, match=said):
        mine(tokens(3)[None])
    with pytest.raises(FormatError, match=said):
        perplexity(mine, tokens(64).tolist(), context=32)
    with pytest.raises(AttributeError, match=said):
        mine.generate()
    with pytest.raises(AttributeError, match="can_generate: " + said):
        lowbit.save(mine, tmp_path / "out")
    assert not hasattr(mine, "base_model_prefix") and not (tmp_path / "out").exists()
    for other in (copy.deepcopy(mine), pickle.loads(pickle.dumps(mine))):
        assert torch.equal(logits(other, "float"), logits(mine, "float"))
    assert native(mine) is native(mine)


# ---- what a process imports ------------------------------------------------------------------------------------------
_SCRIPT = """
import json, sys, torch
before = set(sys.modules)
from lowbit.cli import main
from lowbit.engines.decode import decode, load_model
found = decode(load_model(sys.argv[1]), [5, 6, 7], 3)
code = main(["run", sys.argv[1], "--prompt", "The fox", "--max-new-tokens", "3", "--threads", "1"])
heavy = {"transformers", "sympy", "torch._dynamo", "torch.distributed.tensor", "mpmath"} & (set(sys.modules) - before)
print()
print(json.dumps([found.engine, code, sorted(heavy)]))
"""


def test_decoding_imports_nothing_heavy(tmp_path: Path) -> None:
    config = transformers.AutoConfig.for_model("llama", **{**SIZES, "vocab_size": 259})
    model = transformers.AutoModelForCausalLM.from_config(config)
    lowbit.quantize(model, "w4a8", "rtn", group_size=32, progress=False)
    samples.byte_tokenizer(bos_token="<s>", eos_token="</s>", pad_token="<pad>").save_pretrained(tmp_path / "m")
    lowbit.save(model, tmp_path / "m")
    command = [sys.executable, "-c", _SCRIPT, str(tmp_path / "m")]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout.splitlines()[-1]) == ["native", 0, []] and "engine native\n" in done.stderr
