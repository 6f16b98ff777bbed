"""The block-by-block walk over tiny random models; QNT-01 d, QNT-03, QNT-04, resuming, input forms."""

from __future__ import annotations

import copy
import dataclasses
import json
import math
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from lowbit.models import calibrate
from lowbit.models.calibrate import quantize_model
from lowbit.models.calibration_inputs import read_calibration
from lowbit.models.collect import collect
from lowbit.models.walk import capture
from lowbit.quantize import InputStats, Options, effective, quantize_linears, rtn
from lowbit.types import SCHEMES, FormatError, QuantizedWeight

transformers = pytest.importorskip("transformers")
W4 = SCHEMES["w4a8"]
LINEARS = ["self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj", "self_attn.o_proj"]
LINEARS += ["mlp.gate_proj", "mlp.up_proj", "mlp.down_proj"]
SIZES = {
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 3,
    "num_attention_heads": 2,
    "vocab_size": 97,
}
SIZES |= {"num_key_value_heads": 1, "head_dim": 32, "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2}


def llama(**changes: Any) -> nn.Module:
    torch.manual_seed(1)
    model: nn.Module = transformers.LlamaForCausalLM(transformers.LlamaConfig(**(SIZES | changes)))
    return model.eval()


def ids(*shape: int, seed: int = 0) -> Tensor:
    return torch.randint(3, 97, shape, generator=torch.Generator().manual_seed(seed))


class Letters:
    """A tokenizer: one token a letter."""

    def __call__(self, text: str, **_: Any) -> dict[str, list[int]]:
        return {"input_ids": [ord(c) % 97 for c in text]}


def same(a: dict[str, QuantizedWeight], b: dict[str, QuantizedWeight]) -> bool:
    """Equal to the byte."""

    def equal(x: Tensor | None, y: Tensor | None) -> bool:
        return (x is None) == (y is None) and (x is None or y is None or torch.equal(x, y))

    fields = ("codes", "scales", "zeros", "smooth", "bias")
    return a.keys() == b.keys() and all(equal(getattr(a[n], f), getattr(b[n], f)) for n in a for f in fields)


# --- the walk


@pytest.mark.parametrize("method", ("rtn", "gptq"))
@pytest.mark.parametrize("scheme", ("w4a8", "w8a8"))
def test_every_linear_of_the_blocks_and_none_else(method: Any, scheme: str) -> None:
    model = llama()
    before = copy.deepcopy(model)
    result, report = quantize_model(model, scheme, method, [ids(8, 64)], progress=False)
    names = [f"model.layers.{i}.{n}" for i in range(3) for n in LINEARS]
    assert list(result) == names and [r.name for r in report.rows] == names
    for name, parameter in model.named_parameters():
        layer = name.removesuffix(".weight")
        if layer in result:
            assert torch.equal(parameter, effective(result[layer]))
            result[layer].check_values(layer)
            assert result[layer].activation == SCHEMES[scheme].activation
        else:
            assert torch.equal(parameter, before.get_parameter(name))
    assert all(r.tokens == 512 for r in report.rows) and report.calibration_tokens == 512
    assert all(r.method.startswith(method) and 0 < r.error_after for r in report.rows)
    if method == "gptq":
        assert all(r.error_after <= r.error_before and r.damping == 0.01 for r in report.rows if scheme == "w4a8")
    assert str(report).count("\n") == 21 and json.dumps(report.to_dict())
    with torch.no_grad():
        x = ids(2, 64, seed=5)
        change = (model(x).logits - before(x).logits).norm() / before(x).logits.norm()
    assert float(change) < (0.2 if scheme == "w4a8" else 0.02)


@pytest.mark.parametrize("inputs", ("quantized", "float"))
def test_a_block_is_measured_on_what_the_blocks_before_it_give(inputs: Any) -> None:
    """An independent walk with plain hooks over the whole model, weights replaced one block at a time."""
    model, twin = llama(), llama()
    result, _ = quantize_model(model, W4, "gptq", [ids(6, 32)], inputs=inputs, progress=False)
    groups = [LINEARS[:3], LINEARS[3:4], LINEARS[4:6], LINEARS[6:]]
    for i in range(3):
        layer = twin.get_submodule(f"model.layers.{i}")
        stats = [InputStats(layer.get_submodule(g[0]).in_features) for g in groups]
        handles = [
            layer.get_submodule(g[0]).register_forward_pre_hook(lambda _, args, s=s: s.add(args[0]))
            for g, s in zip(groups, stats, strict=True)
        ]
        with torch.no_grad():
            twin(ids(6, 32))
        for handle in handles:
            handle.remove()
        for group, s in zip(groups, stats, strict=True):
            done = quantize_linears({n: layer.get_submodule(n).weight for n in group}, s, W4, Options())
            for n, (q, _) in done.items():
                found = result[f"model.layers.{i}.{n}"]
                assert float((q.codes == found.codes).float().mean()) > 0.999
                assert q.smooth is None or (found.smooth is not None and torch.equal(q.smooth, found.smooth))
                if inputs == "quantized":
                    layer.get_submodule(n).weight.data.copy_(effective(found))


def test_qkv_and_gate_up_share_one_hessian() -> None:
    model = llama()
    blocks = list(model.get_submodule("model.layers").children())
    run = capture(model, blocks, read_calibration([ids(4, 16)]))
    assert run.order == [0, 1, 2] and not run.more and not run.traces[0].held
    linears = {n: blocks[0].get_submodule(n) for n in LINEARS}
    with torch.no_grad():
        found = collect(blocks[0], linears, run.traces, 0, hessian=True, seed=0)  # type: ignore[arg-type]
    assert [names for names, _ in found] == [LINEARS[:3], LINEARS[3:4], LINEARS[4:6], LINEARS[6:]]
    assert all(s.tokens == 64 for _, s in found)
    assert all(not b._forward_pre_hooks and "forward" not in b.__dict__ for b in model.modules())


def test_channel_scales_are_shared_by_the_linears_of_one_input() -> None:
    model = llama()
    with torch.no_grad():
        for name, p in model.named_parameters():
            if "layernorm" in name:
                p[::7] *= 30
    result, report = quantize_model(model, W4, "gptq", [ids(8, 64)], progress=False)
    for i in range(3):
        for group in (LINEARS[:3], LINEARS[4:6]):
            smooths = [result[f"model.layers.{i}.{n}"].smooth for n in group]
            assert smooths[0] is not None and smooths[0].dtype == torch.float16
            assert all(s is not None and torch.equal(s, smooths[0]) for s in smooths)
    assert sum(r.method == "gptq+scales" for r in report.rows) >= 15
    result, report = quantize_model(llama(), W4, "gptq", [ids(8, 64)], channel_scales=False, progress=False)
    assert all(q.smooth is None for q in result.values())


def test_blocks_with_masks_of_their_own() -> None:
    """Gemma 3 gives sliding and full attention layers different masks and rotations; a stand-in run must keep them."""
    config = transformers.Gemma3TextConfig(
        **(SIZES | {"num_hidden_layers": 4, "sliding_window": 8, "sliding_window_pattern": 2})
    )
    torch.manual_seed(0)
    model = transformers.Gemma3ForCausalLM(config).eval()
    blocks = list(model.get_submodule("model.layers").children())
    x = ids(2, 40)
    (trace,) = capture(model, blocks, read_calibration([x])).traces
    seen: list[Tensor] = []
    handle = model.get_submodule("model.norm").register_forward_pre_hook(lambda _, args: seen.append(args[0]))
    with torch.no_grad():
        model(x)
        handle.remove()
        for step, block in enumerate(blocks):
            trace.advance(block, step)
    assert list(trace.outputs) == [3] and torch.equal(trace.outputs[3], seen[0])


@pytest.mark.parametrize("family", ("Qwen2", "Qwen3", "Mistral", "Phi", "Phi3", "OPT"))
def test_other_families(family: str) -> None:
    sizes = dict(SIZES)
    if family == "OPT":
        sizes |= {"ffn_dim": 128, "word_embed_proj_dim": 64}
    torch.manual_seed(0)
    model = getattr(transformers, f"{family}ForCausalLM")(getattr(transformers, f"{family}Config")(**sizes)).eval()
    path = "model.decoder.layers" if family == "OPT" else None
    result, report = quantize_model(model, W4, "gptq", [ids(4, 32)], blocks=path, progress=False)
    inside = [n for n, m in model.named_modules() if isinstance(m, nn.Linear) and ".layers." in n]
    assert sorted(result) == sorted(inside) and all(r.tokens == 128 for r in report.rows)
    for name, q in result.items():
        bias = model.get_submodule(name).bias
        assert (q.bias is None) == (bias is None) and (bias is None or torch.equal(q.bias, bias.float()))


def test_skip_and_training_mode() -> None:
    model = llama().train()
    dense = model.get_parameter("model.layers.1.mlp.down_proj.weight").clone()
    result, _ = quantize_model(
        model, W4, "gptq", [ids(2, 32)], skip=("lm_head", "down_proj", "model.layers.2"), progress=False
    )
    assert list(result) == [f"model.layers.{i}.{n}" for i in range(2) for n in LINEARS[:6]]
    assert torch.equal(model.get_parameter("model.layers.1.mlp.down_proj.weight"), dense)
    assert all(m.training for m in model.modules())


def test_progress_is_told_per_block() -> None:
    told: list[tuple[int, int, str]] = []
    quantize_model(llama(), W4, "gptq", [ids(2, 32)], progress=lambda *a: told.append(a))
    assert told == [(i + 1, 3, f"model.layers.{i}") for i in range(3)]


def test_no_gradients_are_kept() -> None:
    model = llama()
    quantize_model(model, W4, "gptq", [ids(2, 32)], progress=False)
    assert all(p.grad is None and p.grad_fn is None for p in model.parameters())
    assert torch.is_grad_enabled()


# --- determinism and resuming


def test_the_same_run_gives_the_same_bytes() -> None:
    a, _ = quantize_model(llama(), W4, "gptq", [ids(8, 64)], progress=False)
    b, _ = quantize_model(llama(), W4, "gptq", [ids(8, 64)], progress=False)
    assert same(a, b)


def test_qnt04_batch_size_hardly_matters() -> None:
    """Stated tolerance: sums see the same rows in the same order; only torch's products may differ in the last bit."""
    runs = [
        quantize_model(llama(), W4, "gptq", [ids(8, 64)], batch_tokens=64 * b, progress=False)[0] for b in (1, 2, 4)
    ]
    for name, q in runs[0].items():
        for other in runs[1:]:
            assert float((q.codes == other[name].codes).float().mean()) > 0.995
            assert torch.allclose(q.scales.float(), other[name].scales.float(), rtol=0.05)


def test_qnt04_padding_changes_nothing_but_the_last_bits() -> None:
    short, long = ids(1, 3), ids(1, 7, seed=2)
    padded = torch.zeros(2, 7, dtype=torch.long)
    padded[0, :3], padded[1] = short[0], long[0]
    mask = torch.zeros(2, 7, dtype=torch.long)
    mask[0, :3] = mask[1] = 1
    apart = quantize_model(llama(), W4, "gptq", [short, long], progress=False)
    together = quantize_model(llama(), W4, "gptq", [{"input_ids": padded, "attention_mask": mask}], progress=False)
    for a, b in zip(apart[1].rows, together[1].rows, strict=True):
        assert a.tokens == b.tokens == 10
        assert a.error_after == pytest.approx(b.error_after, rel=0.05)
    first = "model.layers.0.self_attn.q_proj"
    assert float((apart[0][first].codes == together[0][first].codes).float().mean()) > 0.999


@pytest.mark.parametrize("inputs", ("quantized", "float"))
def test_resuming_continues_to_the_same_bytes(tmp_path: Path, inputs: Any) -> None:
    options: dict[str, Any] = {"inputs": inputs}
    whole, rows = quantize_model(llama(), W4, "gptq", [ids(8, 64)], progress=False, **options)

    def stop(done: int, total: int, label: str) -> None:
        if done == 2:
            raise KeyboardInterrupt

    model = llama()
    with pytest.raises(KeyboardInterrupt):
        quantize_model(model, W4, "gptq", [ids(8, 64)], resume_dir=tmp_path, progress=stop, **options)
    assert all(not m._forward_pre_hooks and "forward" not in m.__dict__ for m in model.modules())
    assert len(list(tmp_path.glob("block-*.safetensors"))) == 2 and not list(tmp_path.glob("*.part"))

    solved: list[str] = []
    real = calibrate.quantize_linears

    def counting(weights: Any, *args: Any) -> Any:
        solved.extend(weights)
        return real(weights, *args)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(calibrate, "quantize_linears", counting)
        again, report = quantize_model(
            llama(), W4, "gptq", [ids(8, 64)], resume_dir=tmp_path, progress=False, **options
        )
    assert sorted(solved) == sorted(f"model.layers.2.{n}" for n in LINEARS)  # only what was missing
    assert same(whole, again)
    assert [r._replace(error_before=0, error_after=0) for r in report.rows] == [
        r._replace(error_before=0, error_after=0) for r in rows.rows
    ]
    assert again["model.layers.0.mlp.up_proj"].activation == W4.activation


def test_resuming_refuses_another_run(tmp_path: Path) -> None:
    quantize_model(llama(), W4, "gptq", [ids(2, 32)], resume_dir=tmp_path, progress=False)
    with pytest.raises(FormatError, match=r"run.json: seed: found 0 of an earlier run, this run has 3"):
        quantize_model(llama(), W4, "gptq", [ids(2, 32)], resume_dir=tmp_path, seed=3, progress=False)
    with pytest.raises(FormatError, match=r"run.json: calibration: found"):
        quantize_model(llama(), W4, "gptq", [ids(2, 32, seed=9)], resume_dir=tmp_path, progress=False)
    changed = llama()
    changed.get_parameter("model.layers.0.mlp.up_proj.weight").data[0, 0] += 1
    with pytest.raises(FormatError, match=r"block-0000.safetensors: weights: found another sha256"):
        quantize_model(changed, W4, "gptq", [ids(2, 32)], resume_dir=tmp_path, progress=False)


# --- QNT-01 d, QNT-03: bad activations, layers that saw nothing


def test_qnt01_inf_names_layer_and_sample_and_keeps_what_is_done(tmp_path: Path) -> None:
    model = llama()
    samples = [ids(1, 16, seed=i) for i in range(4)]
    samples[2][0, 5] = 2  # the only one with token 2

    model.get_parameter("model.embed_tokens.weight").data[2] = math.inf
    with pytest.raises(
        FormatError, match=r"model\.layers\.\d\.\S+: sample 2: activations: found (nan|inf|-inf) in row"
    ):
        quantize_model(model, W4, "gptq", samples, resume_dir=tmp_path, progress=False)

    model = llama()
    norm = model.get_submodule("model.layers.1.post_attention_layernorm")
    norm.weight.data[3] = math.inf
    with pytest.raises(FormatError, match=r"model\.layers\.1\.mlp\.gate_proj: sample 0: activations"):
        quantize_model(model, W4, "gptq", samples, resume_dir=tmp_path / "b", progress=False)
    assert [p.name for p in (tmp_path / "b").glob("block-*")] == ["block-0000.safetensors"]


class Experts(nn.Module):
    """Blocks as QNT-03 has them: eight experts of which the router always takes the first; a linear called by F.linear."""

    def __init__(self) -> None:
        super().__init__()
        self.experts = nn.ModuleList(nn.Linear(64, 64) for _ in range(8))
        self.proj = nn.Linear(64, 64)
        self.branch = nn.Linear(64, 64)

    def forward(self, hidden_states: Tensor, **_: Any) -> Tensor:
        flat = hidden_states.reshape(-1, 64)
        y = self.experts[0](flat).reshape(hidden_states.shape)
        return hidden_states + nn.functional.linear(y, self.proj.weight)


class Routed(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(97, 64)
        self.layers = nn.ModuleList(Experts() for _ in range(9))
        self.lm_head = nn.Linear(64, 97)

    def forward(self, input_ids: Tensor) -> Tensor:
        x = self.embed(input_ids)
        for layer in self.layers:
            x = layer(x)
        logits: Tensor = self.lm_head(x)
        return logits


def test_qnt03_layers_that_saw_no_token() -> None:
    torch.manual_seed(0)
    model = Routed()
    original = copy.deepcopy(model)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        result, report = quantize_model(model, W4, "gptq", [ids(4, 16)], progress=False)
    rows = {r.name: r for r in report.rows}
    assert len(rows) == 90
    unseen = [f"layers.0.experts.{i}" for i in range(1, 8)] + ["layers.0.proj", "layers.0.branch"]
    told = "\n".join(str(w.message) for w in caught)
    for name in unseen:
        assert rows[name].tokens == 0 and rows[name].method == "rtn"
        assert rows[name].notes == ("saw no token: rounded to nearest",)
        assert f"{name}: saw no token in calibration: rounded to nearest" in told
        assert torch.equal(result[name].codes, rtn(original.get_submodule(name).weight, W4).codes)
    assert rows["layers.0.experts.0"].tokens == 64 and rows["layers.0.experts.0"].method.startswith("gptq")
    assert {(q.bits, q.group_size, q.zeros is None) for q in result.values()} == {(4, 64, False)}
    assert all(bool(torch.isfinite(effective(q)).all()) for q in result.values())
    with pytest.raises(
        FormatError, match=r"layers\.0\.experts\.1: saw no token in calibration; accepted is at least 1"
    ):
        quantize_model(Routed(), W4, "gptq", [ids(4, 16)], missing="error", progress=False)


def test_qnt01_a_linear_called_four_times_a_pass() -> None:
    class Looped(Experts):
        def forward(self, hidden_states: Tensor, **_: Any) -> Tensor:
            for _i in range(4):
                hidden_states = hidden_states + torch.tanh(self.proj(hidden_states))
            return hidden_states

    torch.manual_seed(0)
    model = Routed()
    shared = Looped()
    model.layers = nn.ModuleList([shared, Looped(), shared, shared])  # and one block that comes three times
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        result, report = quantize_model(model, W4, "gptq", [ids(4, 16)], blocks="layers", progress=False)
    rows = {r.name: r for r in report.rows}
    assert rows["layers.0.proj"].tokens == rows["layers.1.proj"].tokens == 4 * 64
    assert "layers.2.proj" not in rows and rows["layers.1.proj"].error_after <= rows["layers.1.proj"].error_before
    assert torch.equal(shared.proj.weight, effective(result["layers.0.proj"]))


# --- refusals, before any work


def untouched(model: nn.Module, *args: Any, match: str, **kwargs: Any) -> None:
    before = {n: p.clone() for n, p in model.named_parameters()}
    calls: list[int] = []
    handle = model.register_forward_pre_hook(lambda *_: calls.append(1))
    with pytest.raises(FormatError, match=match):
        quantize_model(model, *args, progress=False, **kwargs)
    handle.remove()
    assert not calls and all(torch.equal(p, before[n]) for n, p in model.named_parameters())


def test_widths_off_the_group_are_all_named() -> None:
    model = llama(intermediate_size=80)
    names = ", ".join(rf"model\.layers\.{i}\.mlp\.down_proj \(80\)" for i in range(3))
    untouched(
        model, W4, "gptq", [ids(2, 16)], match=f"group_size: found 64, which does not divide the width of {names};"
    )
    result, _ = quantize_model(model, dataclasses.replace(W4, group_size=-1), "gptq", [ids(4, 16)], progress=False)
    assert result["model.layers.0.mlp.down_proj"].group_size == 80


@pytest.mark.parametrize(
    "nothing", ([], [torch.empty(0, dtype=torch.long)], [""], [{"input_ids": torch.empty(1, 0)}], iter(()))
)
def test_qnt03_empty_calibration(nothing: Any) -> None:
    untouched(llama(), W4, "gptq", nothing, Letters(), match="calibration: found 0 tokens, accepted is at least 1")


def test_other_refusals(tmp_path: Path) -> None:
    untouched(llama(), W4, "gptq", None, match="calibration: found None, accepted for method gptq")
    untouched(llama(), "w3a3", "gptq", [ids(1, 4)], match="scheme: found 'w3a3', accepted are w4a8")
    untouched(llama(), W4, "magic", [ids(1, 4)], match="method: found 'magic'")
    untouched(llama(), W4, "gptq", ["text"], match="tokenizer: found None")
    untouched(llama(), W4, "gptq", tmp_path / "none.txt", Letters(), match="calibration: found no file")
    untouched(llama(), W4, "gptq", [torch.randn(4)], match="found torch.float32")
    untouched(llama(), W4, "gptq", [ids(1, 4)], blocks="model.nowhere", match="blocks: found no module 'model.nowhere'")
    untouched(llama(), W4, "gptq", [ids(1, 4)], skip=("model",), match="found no linear to quantize")
    untouched(llama(), W4, "gptq", [ids(1, 4)], missing="ignore", match="missing: found 'ignore'")


def test_rtn_without_calibration() -> None:
    model = llama()
    weights = {n: p.clone() for n, p in model.named_parameters()}
    result, report = quantize_model(model, W4, "rtn", progress=False)
    assert all(
        torch.equal(q.codes, rtn(weights[f"{n}.weight"], W4).codes) and q.smooth is None for n, q in result.items()
    )
    assert len(result) == 21 and all(r.method == "rtn" and math.isnan(r.error_after) for r in report.rows)


# --- calibration inputs


def lengths(batches: Any) -> list[tuple[int, ...]]:
    return [tuple(b.inputs["input_ids"].shape) for b in batches]


def test_text_jsonl_and_strings_are_one_stream(tmp_path: Path) -> None:
    text = "".join(chr(97 + i % 23) for i in range(1000))
    plain, lines = tmp_path / "a.txt", tmp_path / "a.jsonl"
    plain.write_text(text)
    lines.write_text(
        "\n".join(json.dumps({"text": text[i : i + 100], "other": 1}) for i in range(0, 1000, 100)) + "\n\n"
    )
    forms: list[Any] = [plain, str(lines), [text], (text[i : i + 7] for i in range(0, 1000, 7))]
    found = [read_calibration(f, Letters(), tokens=320, window=64, batch_tokens=128, seed=4) for f in forms]
    for batches in found:
        assert lengths(batches) == [(2, 64), (2, 64), (1, 64)] and [b.first for b in batches] == [0, 2, 4]
        assert all(
            torch.equal(a.inputs["input_ids"], b.inputs["input_ids"]) for a, b in zip(batches, found[0], strict=True)
        )
    stream = torch.tensor([ord(c) % 97 for c in text])
    windows = {tuple(stream[i * 64 : (i + 1) * 64].tolist()) for i in range(15)}
    assert all(tuple(r.tolist()) in windows for b in found[0] for r in b.inputs["input_ids"])
    other = read_calibration(plain, Letters(), tokens=320, window=64, seed=5)
    assert not torch.equal(other[0].inputs["input_ids"][:2], found[0][0].inputs["input_ids"])
    assert lengths(read_calibration(["abc"], Letters(), window=64)) == [(1, 3)]


def test_bad_lines_are_named(tmp_path: Path) -> None:
    path = tmp_path / "a.jsonl"
    for line, message in (
        ("{", "line 2: accepted is"),
        ('{"txt": 1}', "line 2: accepted"),
        ('{"text": 1}', "line 2: text: found int"),
    ):
        path.write_text('{"text": "fine"}\n' + line)
        with pytest.raises(FormatError, match=message):
            read_calibration(path, Letters())
    path.with_suffix(".txt").write_bytes(b"abc\xff")
    with pytest.raises(FormatError, match="found byte 0xff, accepted is UTF-8"):
        read_calibration(path.with_suffix(".txt"), Letters())


def test_token_tensors_stay_whole_and_mappings_pass_through() -> None:
    batches = read_calibration([ids(5), ids(2, 5), ids(9), [3, 4, 5]], tokens=100, batch_tokens=10)
    assert lengths(batches) == [(2, 5), (1, 5), (1, 9), (1, 3)] and [b.first for b in batches] == [0, 2, 3, 4]
    assert sum(b.tokens for b in batches) == 27

    def forever() -> Iterator[dict[str, Tensor]]:
        while True:
            yield {
                "input_ids": ids(2, 8),
                "attention_mask": torch.ones(2, 8, dtype=torch.long).index_fill(1, torch.tensor([7]), 0),
            }

    batches = read_calibration(forever(), tokens=40)
    assert [b.tokens for b in batches] == [14, 14, 14] and [b.first for b in batches] == [0, 2, 4]
    assert batches[0].mask is not None and int(batches[0].mask.sum()) == 14
