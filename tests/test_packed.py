"""The packed stack against transformers' own Qwen3Model: floats, integers, siblings as one weight, what is refused."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from lowbit import ops_cuda, reference
from lowbit.engines import packed, packed_linears
from lowbit.engines.packed import Backbone
from lowbit.engines.packed_attention import ATTENTIONS, CHOICE, Spans, choose
from lowbit.engines.packed_linears import SideBySide, TileProduct
from lowbit.engines.packed_siblings import fuse, in_turn
from lowbit.engines.packed_stack import linears_of
from lowbit.layouts import mma_tiles
from lowbit.quantize import rtn
from lowbit.types import Activation, FormatError, LowRank, QuantizedWeight, Scheme

transformers = pytest.importorskip("transformers")
SIZES = dict(
    vocab_size=32, hidden_size=128, intermediate_size=192, num_hidden_layers=2, num_attention_heads=4,
    num_key_value_heads=2, head_dim=32, max_position_embeddings=512,
)  # fmt: skip
LENGTHS = (23, 9, 0, 1, 40)
DEVICES = ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)]


def stack(device: str = "cpu", dtype: torch.dtype = torch.float32, **changes: Any) -> Any:
    torch.manual_seed(1)
    model = transformers.Qwen3Model(transformers.Qwen3Config(**{**SIZES, **changes})).eval()
    for name, parameter in model.named_parameters():
        if "norm" in name:
            parameter.data.uniform_(0.5, 1.5)
    return model.to(device, dtype).requires_grad_(False)


def spans(device: str, lengths: tuple[int, ...] = LENGTHS) -> Spans:
    bounds = torch.tensor([0, *lengths]).cumsum(0).to(device, torch.int32)
    return Spans(bounds, max(lengths))


def positions(lengths: tuple[int, ...] = LENGTHS) -> Tensor:
    return torch.cat([torch.arange(n) for n in lengths])


def run(backbone: Backbone, x: Tensor, rows: Tensor | None = None) -> Tensor:
    with torch.inference_mode():
        return backbone(x, backbone.angles(positions()), spans(str(x.device)), rows)


def by_transformers(model: Any, x: Tensor) -> Tensor:
    """Each segment alone, everyone sees everyone."""
    with torch.inference_mode():
        done = []
        for part in x.split(list(LENGTHS)):
            if len(part):
                mask = torch.ones(1, 1, len(part), len(part), dtype=torch.bool, device=x.device)
                out = model(inputs_embeds=part[None], attention_mask=mask, use_cache=False)
                done.append(out.last_hidden_state[0])
        return torch.cat(done)


def inputs(device: str = "cpu", dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.randn(sum(LENGTHS), SIZES["hidden_size"], generator=torch.Generator().manual_seed(3)).to(device, dtype)


def test_on_a_cpu_integers_run_our_operators_and_floats_those_of_torch() -> None:
    model, x = stack(), inputs()
    for precision, ours in (
        (None, 0),
        ("w8a8", 2),
        ({"*": "w8a8", "layers.0.*": "fp32"}, 1),
        ({"*": "w8a8", "*.k_proj": "fp32"}, 0),
    ):
        backbone = Backbone(model, precision)
        assert sum(layer.at_once for layer in backbone.layers) == ours
        assert (backbone.attention(64) == "ours") == (ours == 2)
        forced = Backbone(model, precision, attention="segments")
        assert not any(layer.at_once for layer in forced.layers) and forced.attention(64) == "segments"
        a, b = run(backbone, x), run(forced, x)
        assert torch.equal(a, b) if not ours else 0 < reference.error(a, b) < 2e-2  # a rounding of x may fall elsewhere


@pytest.mark.parametrize("attention", ["segments", "masked"])
@pytest.mark.parametrize("device", DEVICES)
def test_float32_is_transformers_to_rounding(device: str, attention: str) -> None:
    model, x = stack(device), inputs(device)
    backbone = Backbone(model, attention=attention)
    kept = x.clone()
    torch.testing.assert_close(run(backbone, x), by_transformers(model, x), rtol=1e-5, atol=1e-5)
    assert torch.equal(x, kept)
    rows = torch.tensor([3, 70, 3], device=device)
    torch.testing.assert_close(run(backbone, x, rows), run(backbone, x)[rows], rtol=1e-6, atol=1e-6)


@pytest.mark.gpu
@pytest.mark.parametrize("head_dim", [32, 128])
@pytest.mark.parametrize("attention", list(ATTENTIONS))
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_sixteen_bits_are_transformers_to_rounding(dtype: torch.dtype, attention: str, head_dim: int) -> None:
    wide = stack("cuda", head_dim=head_dim)
    if attention == "ours" and head_dim != 128:
        with pytest.raises(FormatError, match="attention: found 'ours' with heads of 32"):
            Backbone(wide, attention=attention)
        return
    want = by_transformers(wide, inputs("cuda"))
    backbone = Backbone(stack("cuda", dtype, head_dim=head_dim), attention=attention)
    assert backbone.kernel_rope == (head_dim == 128)
    limit = 4e-3 if dtype == torch.float16 else 3e-2
    assert reference.error(run(backbone, inputs("cuda", dtype)), want) < limit


def test_biases_and_layers_without_head_norms() -> None:
    model = stack(attention_bias=True)
    for name, parameter in model.named_parameters():
        if name.endswith("bias"):
            parameter.data.normal_()
    torch.testing.assert_close(run(Backbone(model), inputs()), by_transformers(model, inputs()), rtol=1e-5, atol=1e-5)
    llama = transformers.LlamaModel(transformers.LlamaConfig(**SIZES)).eval().requires_grad_(False)
    torch.testing.assert_close(run(Backbone(llama), inputs()), by_transformers(llama, inputs()), rtol=1e-5, atol=1e-5)


def test_a_segment_does_not_see_another() -> None:
    backbone = Backbone(stack())
    x = inputs()
    clean = run(backbone, x)
    x[: LENGTHS[0]] = torch.nan
    dirty = run(backbone, x)
    assert torch.equal(dirty[LENGTHS[0] :], clean[LENGTHS[0] :]) and bool(dirty[: LENGTHS[0]].isnan().all())


def test_siblings_are_views_of_one_weight_until_it_is_closed() -> None:
    model = stack()
    before = {name: (p, p.data_ptr(), p.clone()) for name, p in model.named_parameters()}
    backbone = Backbone(model)
    attn = model.layers[0].self_attn
    assert attn.k_proj.weight.untyped_storage().data_ptr() == attn.q_proj.weight.untyped_storage().data_ptr()
    attn.k_proj.weight.mul_(2)  # seen at once, in both
    backbone.check()
    torch.testing.assert_close(run(backbone, inputs()), by_transformers(model, inputs()), rtol=1e-5, atol=1e-5)
    attn.k_proj.weight.mul_(0.5)
    backbone.close()
    for name, parameter in model.named_parameters():
        assert parameter is before[name][0] and torch.equal(parameter, before[name][2])
        assert parameter.untyped_storage().nbytes() == parameter.numel() * 4


@pytest.mark.parametrize("precision", [None, "w8a8"])
def test_weights_that_change_under_it_are_named(precision: str | None) -> None:
    model = stack()
    backbone = Backbone(model, precision)
    backbone.check()
    weight = model.layers[1].mlp.up_proj.weight
    weight.add_(1)
    if precision is None:
        backbone.check()
        model.layers[1].mlp.up_proj.weight = torch.nn.Parameter(weight.clone(), requires_grad=False)
    with pytest.raises(FormatError, match=r"layers\.1\.mlp\.up_proj\.weight: found other weights"):
        backbone.check()


# -- integers -------------------------------------------------------------------------------------------------------

MOST = {"w8a8": 0.03, "w4a8": 0.25, "w4a4": 0.5}


@pytest.mark.parametrize("precision", list(MOST))
@pytest.mark.parametrize("device", DEVICES)
def test_integers_are_near_the_floats(device: str, precision: str) -> None:
    dtype = torch.float32 if device == "cpu" else torch.float16
    x = inputs(device, dtype)
    want = by_transformers(stack(device), x.float())
    backbone = Backbone(stack(device, dtype), precision)
    error = reference.error(run(backbone, x), want)
    assert 1e-4 < error < MOST[precision]
    assert set(backbone.kinds) == {f"layers.{i}.{g}" for i in range(2) for g in ("qkv", "o", "gate_up", "down")}
    if device == "cuda":
        assert all(kind.startswith(("cuda_tiles", "cuda_int4")) for kind in backbone.kinds.values())


def test_a_precision_for_each_linear() -> None:
    model, x = stack(), inputs()
    mixed = Backbone(model, {"*": "w8a8", "layers.0.*": "fp32", "*.down_proj": "w4a8", "*.v_proj": "w4a8"})
    assert mixed.kinds["layers.0.o"] == "float32" and " w8" in mixed.kinds["layers.1.o"]
    assert " w4" in mixed.kinds["layers.0.down"] and "precision differs" in mixed.kinds["layers.1.qkv"]
    assert isinstance(mixed.layers[0].qkv, SideBySide)
    assert reference.error(run(mixed, x), by_transformers(model, x)) < 0.1


def value(n: int, seed: int, rank: int = 0, **changes: Any) -> QuantizedWeight:
    g = torch.Generator().manual_seed(seed)
    scheme = Scheme("w4a8", symmetric=True, activation=Activation(8, "token"))
    q = rtn(torch.randn(n, 128, generator=g), scheme, "two-level")
    low = (
        LowRank(torch.randn(128, rank, generator=g).half(), torch.randn(n, rank, generator=g).half()) if rank else None
    )
    return q.with_(low_rank=low, **changes)


SMOOTH = torch.linspace(0.5, 2, 128)


@pytest.mark.parametrize(
    "siblings",
    {
        "plain": [value(64, 1), value(32, 2), value(32, 3)],
        "smoothed and rotated": [value(64, i, smooth=SMOOTH.clone(), hadamard=64) for i in range(3)],
        "low ranks": [value(64, 1, 16), value(32, 2, 32), value(48, 3, 16)],
        "one without a low rank": [value(64, 1, 16), value(32, 2)],
        "one down": [q.with_(low_rank=LowRank(torch.ones(128, 16).half(), torch.ones(64, 16).half() * i))
                     for i, q in enumerate([value(64, 1), value(64, 2)], 1)],
        "biases": [value(64, 1, bias=torch.ones(64)), value(32, 2)],
    }.items(),
    ids=lambda item: item[0],
)  # fmt: skip
def test_siblings_as_one_weight_compute_the_same(siblings: tuple[str, list[QuantizedWeight]]) -> None:
    name, parts = siblings
    joined = fuse(parts)
    assert isinstance(joined, QuantizedWeight) and joined.n == sum(q.n for q in parts)
    if joined.low_rank is not None:
        assert joined.low_rank.down.shape[1] == (16 if name.startswith("one") else 64)
    x = inputs()
    want = torch.cat([reference.linear(x, q) for q in parts], -1)
    torch.testing.assert_close(reference.linear(x, joined), want, rtol=1e-5, atol=1e-4)


@pytest.mark.parametrize(
    ("change", "why"),
    [
        (dict(smooth=SMOOTH), "smooth"),
        (dict(hadamard=64), "hadamard"),
        (dict(perm=torch.arange(127, -1, -1, dtype=torch.int32)), "perm"),
        (dict(activation=Activation(4, "group")), "activation"),
    ],
)
def test_siblings_that_differ_stay_apart_and_are_right(change: dict[str, Any], why: str) -> None:
    parts = [value(32, 2), value(32, 3)]
    assert fuse([value(64, 1), parts[0], parts[1].with_(**change)]) == f"their {why} differs"
    model, x = stack(), inputs()
    names = {f"layers.0.self_attn.{n}_proj": i for i, n in enumerate("qkv")}
    weights = {name: value(128 if i == 0 else 64, i, **(change if i == 2 else {})) for name, i in names.items()}
    backbone = Backbone(model, "w4a8", weights)
    assert isinstance(backbone.layers[0].qkv, SideBySide) and f"{why} differs" in backbone.kinds["layers.0.qkv"]
    got = backbone.layers[0].qkv(x)
    activation = None if why == "activation" else Activation(8, "token")
    want = torch.cat([reference.linear(x, q, activation if i < 2 else Activation(8, "group" if why == "activation" else "token"))
                      for i, q in enumerate(weights.values())], -1)  # fmt: skip
    assert reference.error(got, want) < 1e-3


def test_gate_and_up_in_turn_are_the_same_rows() -> None:
    """Eight rows of the gate, eight of up: of every tensor of the value that has a row an output."""
    torch.manual_seed(4)
    gate, up = (rtn(torch.randn(32, 64), Scheme("w4a8", symmetric=True, activation=Activation(8, "token")), "two-level")
                .with_(bias=torch.randn(32), low_rank=LowRank(torch.randn(64, 4), torch.randn(32, 4))) for _ in range(2))  # fmt: skip
    joined = fuse([gate, up])
    assert isinstance(joined, QuantizedWeight) and joined.low_rank is not None
    turned = in_turn(joined)
    x = torch.randn(3, 64)
    y, z = (reference.linear(x, q, None).view(3, -1) for q in (joined, turned))
    assert torch.equal(z.view(3, 4, 2, 8)[:, :, 0].flatten(1), y[:, :32])
    assert torch.equal(z.view(3, 4, 2, 8)[:, :, 1].flatten(1), y[:, 32:])


# -- the launches of a CUDA device, done by the reference --------------------------------------------------------------


def quantize(x: Tensor, *, residual: Any, norm: Any, eps: float, smooth: Any, down: Any, hadamard: bool, silu: bool,
             tile_order: bool) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    """ops_cuda.quantize, columns in plain order."""
    assert down is None and x.is_contiguous() and (residual is None or residual.is_contiguous())
    y = x.float()
    if silu:
        gate, up = y.chunk(2, -1)
        y = torch.nn.functional.silu(gate) * up
    if residual is not None:
        residual.add_(y)
        y = residual.float()
    if norm is not None:
        y = reference.rms_norm(y, norm, eps)
    y = reference.inside(y, smooth, 64 if hadamard else 0)
    codes, scales = reference.quantize_rows(y)
    return codes, scales[:, 0], y.new_empty(0)


def linear(codes: Tensor, scales: Tensor, low: Tensor, weight: Tensor, channel: Tensor, bias: Any, up: Any, n: int,
           mode: int, dtype: torch.dtype, row: int, gated: bool) -> Tensor:  # fmt: skip
    w, wide = mma_tiles.unpack(mma_tiles.Tiles(weight, channel, mode), n, codes.shape[1])
    w = w.float() * reference.expand(wide, mma_tiles.GROUP if wide.shape[1] > 1 else codes.shape[1], codes.shape[1])
    y = scales[:, None] * (codes.float() @ w.T)
    y = y if bias is None else y + bias[:n]
    if gated:  # eight rows of the gate, eight of up, in turn
        gate, up = y.view(len(y), -1, 2, 8).unbind(2)
        y = (torch.nn.functional.silu(gate) * up).flatten(1)
    return y.to(dtype)


def norm_rope(
    qkv: Tensor, q_norm: Any, k_norm: Any, cosines: Tensor, sines: Tensor, heads: int, kv: int, eps: float
) -> None:
    assert qkv.is_contiguous() and cosines.shape == (len(qkv), 64)
    parts = qkv.view(len(qkv), -1, 128)
    parts[:, :heads] = reference.norm_rope(parts[:, :heads], q_norm, cosines, sines, eps)
    parts[:, heads : heads + kv] = reference.norm_rope(parts[:, heads : heads + kv], k_norm, cosines, sines, eps)


@pytest.mark.parametrize("gated", [False, True])
@pytest.mark.parametrize("precision", ["w8a8", "w4a8", {"*": "w8a8", "*.v_proj": "w4a8", "layers.1.mlp.*": "fp32"}])
def test_the_launches_of_a_gpu_add_up_to_the_layer(
    precision: Any, gated: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Nine launches and attention a layer, in this order; what they compute is what the CPU's kernels compute."""
    model, x = stack(head_dim=128), inputs()
    scheme = Scheme("w4a8", symmetric=True, activation=Activation(8, "token"))
    weights = {name: packed_linears.nearest(one, "w8a8") for name, one in linears_of(model).items()}
    rounded = {name: rtn(one.weight, scheme, "two-level") for name, one in linears_of(model).items()}
    words = packed.resolve(precision, linears_of(model), {}, torch.device("cpu"))
    weights = {name: rounded[name] if words[name] == "w4a8" else q for name, q in weights.items()}
    want = run(Backbone(model, precision, weights), x)
    calls: list[str] = []
    for function in (quantize, linear, norm_rope):

        def noted(*args: Any, _do: Any = function, **kwargs: Any) -> Any:
            calls.append(_do.__name__)
            return _do(*args, **kwargs)

        monkeypatch.setattr(ops_cuda, function.__name__, noted)
    monkeypatch.setattr(packed_linears, "integer_product", lambda q, word, gate=False: TileProduct(q, gate and gated))
    backbone = Backbone(model, precision, weights, attention="segments")
    backbone.kernel_rope = True
    got = run(backbone, x)
    assert reference.error(got, want) < 2e-3
    if isinstance(precision, str):
        product = ["quantize", "linear"]
        assert calls == [*product, "norm_rope", *product, *product, *product] * 2


# -- what is refused ------------------------------------------------------------------------------------------------


def test_what_does_not_fit_is_named_and_changes_nothing() -> None:
    model = stack()
    before = {name: p.data_ptr() for name, p in model.named_parameters()}
    q = value(64, 1)
    for arguments, message in (
        (dict(precision="fp8"), "precision: found 'fp8', accepted are fp32"),
        (dict(precision="fp16"), "precision: found 'fp16' with a model in fp32"),
        (dict(precision={"nothing": "w8a8"}), "pattern 'nothing'"),
        (dict(attention="fast"), "attention: found 'fast'"),
        (dict(weights={"layers.7.mlp.up_proj": q}), "layers.7"),
        (dict(weights={"layers.1.mlp.down_proj": q}), r"layers\.1\.mlp\.down_proj: found shape \[64, 128\]"),
        (dict(weights={"layers.1.self_attn.k_proj": q}, precision="w8a8"), "4-bit codes"),
        (
            dict(weights={"layers.1.self_attn.k_proj": q.with_(scales=q.scales * torch.nan)}),
            r"k_proj: scales: found NaN",
        ),
    ):
        with pytest.raises(FormatError, match=message):
            Backbone(model, **arguments)
        assert {name: p.data_ptr() for name, p in model.named_parameters()}.keys() == before.keys()
        for p in model.parameters():
            assert p.untyped_storage().nbytes() == p.numel() * 4  # no views left behind


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        (dict(hidden_act="gelu"), "hidden_act: found 'gelu'"),
        (dict(use_sliding_window=True, sliding_window=8, max_window_layers=0), "sliding_window: found 8"),
        (
            dict(rope_parameters={"rope_type": "dynamic", "rope_theta": 1e4, "factor": 2.0}),
            "rope_type: found 'dynamic'",
        ),
    ],
)
def test_other_stacks_are_refused(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(FormatError, match=message):
        Backbone(stack(**changes))
    with pytest.raises(FormatError, match="model: found Linear"):
        linears_of(torch.nn.Linear(2, 2))


def test_the_table_of_attentions_names_rows_that_exist() -> None:
    cpu, cuda, half = torch.device("cpu"), torch.device("cuda"), torch.float16
    assert all(name in ATTENTIONS for *_, name in CHOICE)
    assert choose(cpu, torch.float32, 128, 500) == "segments"
    assert choose(cuda, torch.float32, 128, 500) == "masked"
    assert choose(cuda, half, 128, 500, ours=False) == choose(cuda, half, 128, 2000) in ("varlen", "masked")
    assert choose(cuda, half, 128, 500, "masked") == "masked"
