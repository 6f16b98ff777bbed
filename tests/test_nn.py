"""QuantLinear: what it is made of, what comes back out, and the outputs that the import cases name for a whole layer."""

from __future__ import annotations

import copy
import inspect
import json
import pickle
import warnings
from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from safetensors.torch import save_file
from torch import Tensor, nn

import oracle
from lowbit import dispatch, ops, reference
from lowbit.formats import lowbit as lowbit_format
from lowbit.nn import QuantLinear, W4A4Linear
from lowbit.quantize import effective
from lowbit.types import SCHEMES, Activation, FormatError, LowRank, QuantizedWeight, Scheme
from samples import DTYPES, awq_words, flat, generator, ramp, rows, weight, words

ACTIVATIONS = ("group", "token", None)
MANY = (1, 2, 8, 33, 200)  # every path through the kernels


def same_weight(a: QuantizedWeight, b: QuantizedWeight) -> bool:
    fields = ("codes", "zeros", "perm")
    floats = ("scales", "smooth", "bias")
    pairs = [(getattr(a, f), getattr(b, f)) for f in fields]
    pairs += [tuple(None if t is None else t.float() for t in (getattr(a, f), getattr(b, f))) for f in floats]  # type: ignore[misc]
    equal = all((x is None) == (y is None) and (x is None or torch.equal(x, y)) for x, y in pairs)
    return equal and (a.bits, a.group_size, a.symmetric) == (b.bits, b.group_size, b.symmetric)


# ---- from_quantized, to_quantized ------------------------------------------------------------------------------------
@pytest.mark.parametrize("activation", ACTIVATIONS)
@given(
    n=st.integers(1, 40),
    k=st.integers(1, 120),
    g=st.sampled_from([1, 8, 20, 32, 64, -1]),
    bits=st.sampled_from([4, 8]),
    extras=st.integers(0, 15),
)
def test_to_quantized_gives_back_what_went_in(
    activation: str | None, n: int, k: int, g: int, bits: int, extras: int
) -> None:
    g = k if g == -1 else min(g, k)
    q = weight(
        n,
        k,
        g,
        bits=bits,
        zeros=bool(extras & 1),
        perm=bool(extras & 2),
        smooth=bool(extras & 4),
        bias=bool(extras & 8),
    )
    m = QuantLinear.from_quantized(q, activation)
    back = m.to_quantized()
    assert same_weight(q, back)
    again = QuantLinear.from_quantized(back)  # what it ran with is declared, and obeyed
    assert again.activation == activation and same_weight(again.to_quantized(), q)
    x = rows(3, k)
    assert oracle.same_bits(m(x), again(x))
    if activation is not None:
        want = oracle.linear(x, q.codes, q.scales, q.zeros, g, activation, q.perm, q.smooth, q.bias)
        assert oracle.same_bits(m(x), want)
    w = oracle.dequantize(q.codes, q.scales, q.zeros, g, q.perm)
    w = w if q.smooth is None else w / q.smooth.double()
    assert torch.allclose(m.dequantize().double(), w, rtol=1e-6)


def test_activations_as_the_checkpoint_declares_them_else_group() -> None:
    for declared, want in (
        (None, "group"),
        (Activation(8, "token"), "token"),
        (Activation(8, "group"), "group"),
        (Activation(16, "none"), None),
    ):
        assert QuantLinear.from_quantized(weight(16, 64, 32, activation=declared)).activation == want
        for asked in ACTIVATIONS:  # and an explicit word wins
            assert QuantLinear.from_quantized(weight(16, 64, 32, activation=declared), asked).activation == asked
    with pytest.raises(FormatError, match="'channel'"):
        QuantLinear.from_quantized(weight(16, 64, 32), "channel")


def test_the_activation_can_be_changed_later() -> None:
    q, x = weight(16, 64, 32), rows(3, 64)
    m = QuantLinear.from_quantized(q, "group")
    for activation in ACTIVATIONS:
        m.activation = activation
        assert oracle.same_bits(m(x), QuantLinear.from_quantized(q, activation)(x))
    with pytest.raises(FormatError, match="accepted"):
        m.activation = "row"


def test_the_default_of_group_is_closer_than_token() -> None:
    """One large input in a row spoils the int8 step of the row, or of its group only."""
    q = weight(64, 256, 32)
    x = rows(20, 256)
    x[:, 7] *= 1000
    truth = QuantLinear.from_quantized(q, None)(x)
    by = {a: float((QuantLinear.from_quantized(q, a)(x) - truth).norm()) for a in ("group", "token")}
    assert by["group"] < 0.5 * by["token"]


# ---- from_linear -----------------------------------------------------------------------------------------------------
@pytest.mark.parametrize("scheme", [*SCHEMES, Scheme("own", group_size=32, symmetric=True)], ids=str)
@pytest.mark.parametrize("dtype", DTYPES, ids=lambda d: str(d)[6:])
@pytest.mark.parametrize("bias", [False, True])
def test_from_linear(scheme: str | Scheme, dtype: torch.dtype, bias: bool) -> None:
    linear = nn.Linear(128, 24, bias=bias, dtype=dtype)
    m = QuantLinear.from_linear(linear, scheme)
    rule = SCHEMES[scheme] if isinstance(scheme, str) else scheme
    assert (m.in_features, m.out_features, m.bits) == (128, 24, rule.bits)
    assert (m.bias is not None) == bias
    for count in MANY:
        x = rows(count, 128, dtype)
        y, want = m(x), linear(x).detach()
        assert y.dtype == dtype
        bound = {4: 0.2, 8: 0.02, 16: 0.01}[rule.bits]
        assert float((y.float() - want.float()).norm()) < bound * float(want.float().norm())
    w = m.dequantize()
    step = {4: 1 / 8 if rule.symmetric else 1 / 15, 8: 1 / 127, 16: 2**-11}[rule.bits]
    assert float((w - linear.weight.detach().float()).abs().max()) <= 1.01 * step * float(
        linear.weight.detach().float().abs().max()
    )


def test_from_linear_refuses() -> None:
    with pytest.raises(FormatError, match="w3a8.*w4a8"):
        QuantLinear.from_linear(nn.Linear(8, 8), "w3a8")
    too_big = nn.Linear(8, 8)
    with torch.no_grad():
        too_big.weight[0, 0] = 1e6
    with pytest.raises(FormatError, match="65504"):
        QuantLinear.from_linear(too_big, "fp16")
    broken = nn.Linear(8, 8)
    with torch.no_grad():
        broken.weight[0, 0] = float("nan")
    for scheme in SCHEMES:
        with pytest.raises(FormatError, match="NaN|nan|Inf|finite"):
            QuantLinear.from_linear(broken, scheme)


def test_float16_storage_takes_float_activations_only() -> None:
    m = QuantLinear.from_linear(nn.Linear(8, 8), "fp16")
    with pytest.raises(FormatError, match="None"):
        m.activation = "token"


@given(k=st.integers(1, 70), n=st.integers(1, 40))
def test_float16_storage_holds_the_weight(k: int, n: int) -> None:
    linear = nn.Linear(k, n)
    m = QuantLinear.from_linear(linear, "fp16")
    assert torch.equal(m.dequantize(), linear.weight.half().float())


# ---- what the reference runs, and what is said about it --------------------------------------------------------------
def test_explain_names_the_kernel_and_the_tier() -> None:
    for bits, kernel in ((4, "cpu_linear_w4"), (8, "cpu_linear_w8")):
        said = QuantLinear.from_quantized(weight(16, 64, 32, bits=bits)).explain()
        assert said["kernel"] == kernel and said["tier"] == ops.cpu_isa() and said["activation"] == "group"
        passed = dict(said["passed_over"])
        assert set(passed) & set(ops.cpu_isas()) == set() or "QM_CPU_ISA" in str(passed)
        assert all(passed.values())
    said = QuantLinear.from_linear(nn.Linear(8, 8), "fp16").explain()
    assert said["kernel"] == "cpu_linear_f16" and said["tier"] == ops.cpu_isa()


def test_what_no_kernel_takes_runs_in_the_reference_and_says_so() -> None:
    q = weight(2, 66400, -1, bits=8, zeros=False, bias=True)
    for activation in ACTIVATIONS:
        m = QuantLinear.from_quantized(q, activation)
        said = m.explain()
        assert said["kernel"] == "reference" and "can exceed int32" in str(said["passed_over"])
        x = rows(5, 66400)
        declared = Activation(16, "none") if activation is None else Activation(8, activation)  # type: ignore[arg-type]
        assert torch.equal(m(x), reference.linear(x, q, declared)) and m(x.half()).dtype == torch.float16
    assert [k.name for k in dispatch.KERNELS][-1] == "reference"


# ---- smoothing, Hadamard and low rank around the kernel ------------------------------------------------------------
FOUR = Activation(4, "group")


def branched(declared: Activation = FOUR, half: bool = True, **parts: bool) -> QuantizedWeight:
    q = weight(40, 192, 64, zeros=False, smooth=True, bias=True, activation=declared, **parts)
    r = generator("low rank")
    factors = [torch.randn(n, 16, generator=r) / 40 for n in (192, 40)]
    return q.with_(hadamard=64, low_rank=LowRank(*(t.half() if half else t for t in factors)))


@pytest.mark.parametrize("half", [True, False], ids=["float16 factors", "float32 factors"])
@pytest.mark.parametrize("perm", [False, True])
@pytest.mark.parametrize("activation", ACTIVATIONS)
def test_transforms_and_branch_are_the_references(half: bool, perm: bool, activation: str | None) -> None:
    q = branched(half=half, perm=perm)
    m = QuantLinear.from_quantized(q, activation)
    assert m.explain()["kernel"] == "cpu_linear_w4" and (m.rank, m.hadamard) == (16, 64)
    declared = Activation(16, "none") if activation is None else Activation(8, activation)  # type: ignore[arg-type]
    for count in MANY:
        x = rows(count, 192)
        want = reference.linear(x, q, declared)
        assert float((m(x) - want).norm()) <= 2e-6 * float(want.norm())
    x = rows(33, 192)
    assert torch.equal(m(x), torch.cat([m(row[None]) for row in x]))  # to the bit
    if activation is not None:
        q_half = (q.codes, q.scales, q.zeros, 64, activation, q.perm, q.smooth, q.bias, 64, q.low_rank)
        assert oracle.same_bits(m(x), oracle.linear(x, *q_half))
    for dtype in DTYPES:
        assert torch.equal(m(x.to(dtype)), m(x.to(dtype).float()).to(dtype))
    assert torch.allclose(m.dequantize(), effective(q), atol=1e-6)
    assert torch.equal(pickle.loads(pickle.dumps(m))(x), m(x)) and torch.equal(copy.deepcopy(m)(x), m(x))
    assert m(torch.empty(2, 0, 192)).shape == (2, 0, 40)


def test_a_weight_that_declares_four_bits_runs_in_eight_and_is_saved_with_four() -> None:
    q = branched()
    m = QuantLinear.from_quantized(q)
    assert m.activation == "token" and m.activation_bits == 8 and m.declares() == Activation(4, "group")
    assert QuantLinear.from_quantized(q.with_(hadamard=0)).activation == "group"
    assert m.explain()["declared_activation_bits"] == 4
    again = m.to_quantized()
    assert again.activation == q.activation and again.hadamard == 64 and again.low_rank is not None
    assert q.low_rank is not None and all(torch.equal(a, b) for a, b in zip(again.low_rank, q.low_rank, strict=True))
    for field in ("codes", "scales", "smooth", "bias"):
        assert torch.equal(getattr(again, field), getattr(q, field).float() if field == "smooth" else getattr(q, field))
    m.activation = "group"  # what a user sets is what is saved
    assert m.declares() == Activation(8, "group")


@pytest.mark.parametrize("perm", [False, True])
@pytest.mark.parametrize("clip", [1.0, 0.95])
def test_four_bits_are_simulated_as_the_reference_has_them(perm: bool, clip: float) -> None:
    q = branched(Activation(4, "group", clip), perm=perm)
    m = QuantLinear.from_quantized(q)
    eight = m(rows(9, 192))
    m.activation_bits = 4
    for count in MANY:
        x = rows(count, 192)
        want = reference.linear(x, q)
        assert float((m(x) - want).norm()) <= 2e-6 * float(want.norm())
    assert float((m(rows(9, 192)) - eight).norm()) > 0.01 * float(eight.norm())
    x = rows(3, 192)
    x[1, 5] = float("nan")
    bad = torch.isnan(m(x)).all(1)
    assert bad.tolist() == [False, True, False]
    assert m.declares() == Activation(4, "group", clip)
    with pytest.raises(FormatError, match="activation_bits: found 3, accepted are 4 and 8"):
        m.activation_bits = 3
    with pytest.raises(FormatError, match="activation_bits: found 4, accepted with float activations is 8"):
        QuantLinear.from_quantized(q, None).activation_bits = 4


@pytest.mark.parametrize("activation", ACTIVATIONS)
@pytest.mark.parametrize("half", [True, False], ids=["float16 factors", "float32 factors"])
def test_a_branched_layer_copies_pickles_and_loads(half: bool, activation: str | None) -> None:
    m = QuantLinear.from_quantized(branched(half=half, perm=True), activation)
    other = QuantLinear.from_quantized(branched(half=half).with_(bias=torch.ones(40)), activation)
    x = rows(5, 192)
    assert not torch.equal(other(x), m(x))
    other.perm = torch.empty_like(m.perm)
    other.load_state_dict(m.state_dict())
    with torch.inference_mode():
        inside = m(x)
    for again in (other, copy.deepcopy(m), pickle.loads(pickle.dumps(m)), m.half()):
        assert oracle.same_bits(again(x), inside)
    low, want = m.to_quantized().low_rank, branched(half=half).low_rank
    assert low is not None and want is not None
    assert all(torch.equal(a, b) and a.dtype == b.dtype for a, b in zip(low, want, strict=True))


@pytest.mark.parametrize("published", [False, True])
def test_w4a4_linear_from_a_checkpoint(tmp_path: Path, published: bool) -> None:
    q = branched() if not published else branched().with_(smooth=None, hadamard=0, activation=None)
    name = "layers.0.proj"
    said = {} if published else {"lowbit": json.dumps({"linears": {name: lowbit_format.describe(q)}})}
    save_file(lowbit_format.write(q, name), tmp_path / "m.safetensors", said)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        m = W4A4Linear.from_checkpoint(tmp_path / "m.safetensors", name)
        four = W4A4Linear.from_checkpoint(tmp_path / "m.safetensors", name, activation_bits=4)
    x = rows(5, 192)
    assert oracle.same_bits(m(x), QuantLinear.from_quantized(q)(x)) and m.activation == (
        "group" if published else "token"
    )
    want = reference.linear(x, q, FOUR)
    assert four.activation_bits == 4 and float((four(x) - want).norm()) <= 2e-6 * float(want.norm())
    assert isinstance(copy.deepcopy(m), W4A4Linear) and (m.in_features, m.out_features) == (192, 40)
    assert torch.equal(torch.compile(m, fullgraph=True, backend="eager")(x), m(x))
    with pytest.raises(FormatError, match="codes: found 8 bits, symmetric True, accepted are signed 4-bit codes"):
        W4A4Linear.from_quantized(weight(8, 64, 64, bits=8, zeros=False))
    with pytest.raises(FormatError, match="layers.1.proj"):
        W4A4Linear.from_checkpoint(tmp_path / "m.safetensors", "layers.1.proj")


def test_transforms_compile_and_pass_gradients() -> None:
    m = QuantLinear.from_quantized(branched(), None)
    x = rows(5, 192).requires_grad_()
    m(x).sum().backward()
    assert x.grad is not None and torch.allclose(x.grad, m.dequantize().sum(0).expand(5, -1), atol=1e-4)
    compiled = torch.compile(m, fullgraph=True, backend="eager")
    assert torch.equal(compiled(x.detach()), m(x.detach()))


def test_packed_bytes() -> None:
    m = QuantLinear.from_quantized(weight(64, 256, 64))
    assert m.packed_bytes() == sum(t.numel() * t.element_size() for t in m.buffers())
    assert m.packed_bytes() == 4 * 4 * (64 * 8 + 64)  # 4 panels, 4 groups: 64 columns * 8 bytes, and a 64-byte tail
    fp16 = QuantLinear.from_linear(nn.Linear(256, 64, bias=False), "fp16")
    assert fp16.packed_bytes() == 64 * 256 * 2


def test_extra_repr_shows_what_matters() -> None:
    shown = repr(QuantLinear.from_quantized(weight(24, 64, 32, bias=True)))
    for part in ("in_features=64", "out_features=24", "bias=True", "bits=4", "group_size=32", "activation=group"):
        assert part in shown


def test_it_is_no_parameter_and_half_leaves_it_alone() -> None:
    m = QuantLinear.from_quantized(weight(24, 64, 32, perm=True, smooth=True, bias=True))
    x = rows(3, 64)
    want = m(x)
    assert list(m.parameters()) == []
    for change in ("half", "bfloat16", "double", "float", "cpu", "eval", "train"):
        getattr(m, change)()
        assert oracle.same_bits(m(x), want), change
    m.to(torch.float16)
    m.requires_grad_(False)
    assert oracle.same_bits(m(x), want)


def test_every_from_has_the_signature_of_the_contract() -> None:
    names = lambda f: list(inspect.signature(f).parameters)  # noqa: E731
    assert names(QuantLinear.from_gptq_tensors)[:6] == ["qweight", "qzeros", "scales", "g_idx", "bias", "zero_offset"]
    assert names(QuantLinear.from_awq_tensors)[:3] == ["qweight", "qzeros", "scales"]
    assert names(QuantLinear.from_linear)[:2] == ["linear", "scheme"]
    assert names(QuantLinear.from_quantized)[:1] == ["q"]
    assert inspect.signature(QuantLinear.from_gptq_tensors).parameters["zero_offset"].default == 1


def test_a_wrong_width_of_x_is_refused_for_a_short_last_group_too() -> None:
    for k, others in ((80, (79, 81, 65, 96, 64)), (64, (63, 33, 65, 128))):
        m = QuantLinear.from_quantized(weight(16, k, 32))
        for other in others:
            with pytest.raises((ValueError, RuntimeError), match=str(k)):
                m(torch.randn(2, other))


# ---- tensors of a checkpoint, and the outputs that the case list names -----------------------------------------------
def gptq_layer(q: QuantizedWeight, offset: int = 1, **more: object) -> QuantLinear:
    assert q.zeros is not None
    stored = (words(q.zeros.t().contiguous(), 1).long() - 0x11111111 * offset) % 2**32
    qzeros = torch.where(stored >= 2**31, stored - 2**32, stored).to(torch.int32)
    return QuantLinear.from_gptq_tensors(
        words(q.codes.t().contiguous(), 0), qzeros, q.scales.t().contiguous(), zero_offset=offset, **more
    )  # type: ignore[arg-type]


@pytest.mark.parametrize("activation", ACTIVATIONS)
@pytest.mark.parametrize("offset", [1, 0])
@pytest.mark.parametrize("n", [8, 40, 48])
def test_imp_01_and_06_ramp(activation: str | None, offset: int, n: int) -> None:
    m = gptq_layer(ramp(n), offset, activation=activation)
    for count in MANY:
        assert torch.allclose(m(torch.ones(count, 32)), torch.full((count, n), -8.0), rtol=1e-6)


@pytest.mark.parametrize("activation", ACTIVATIONS)
def test_imp_04_act_order(activation: str | None) -> None:
    """1616 for q would mean that the order was ignored."""
    q = flat(8, 64, 32, torch.tensor([1.0, 100.0]).half())
    x = (torch.arange(64) % 2 == 0).float()[None]
    for g_idx, want in (
        (torch.arange(64) % 2, 32.0),
        (torch.arange(64) // 32, 1616.0),
        (1 - torch.arange(64) % 2, 3200.0),
    ):
        m = gptq_layer(q, g_idx=g_idx.int(), activation=activation)
        for count in MANY:
            assert torch.allclose(m(x.expand(count, 64)), torch.full((count, 8), want), rtol=1e-6)


def test_imp_07_eight_bits() -> None:
    """+128 and +383 would mean that the zero point 128 went through a signed byte."""
    codes = torch.where(torch.arange(32) % 2 == 0, 0, 255).to(torch.uint8).expand(32, 32).contiguous()
    q = QuantizedWeight(codes, torch.ones(32, 1).half(), 32, 8, torch.full((32, 1), 128, dtype=torch.uint8))
    for activation in ACTIVATIONS:
        y = QuantLinear.from_quantized(q, activation)(torch.eye(32)[:2])
        assert torch.allclose(y, torch.tensor([[-128.0], [127.0]]).expand(2, 32), rtol=1e-6)


@pytest.mark.parametrize("n", [8, 24])
def test_imp_10_awq_columns(n: int) -> None:
    codes = (torch.arange(n) % 8).expand(32, n)
    zeros = (torch.arange(n) % 8 + 8).reshape(1, n)
    m = QuantLinear.from_awq_tensors(
        awq_words(codes), awq_words(zeros), torch.arange(1, n + 1).half()[None], activation=None
    )
    want = (-8.0 * torch.arange(1, n + 1)).expand(32, n)
    assert torch.equal(m(torch.eye(32)), want)
    qzeros = awq_words(torch.zeros(1, n, dtype=torch.long))
    m = QuantLinear.from_awq_tensors(awq_words(codes), qzeros, torch.ones(1, n).half(), activation=None)
    assert torch.equal(m(torch.eye(32)), (torch.arange(n) % 8).float().expand(32, n))


@pytest.mark.parametrize("activation", ACTIVATIONS)
def test_imp_12_scales_of_any_size(activation: str | None) -> None:
    def y(scale: Tensor, x: float, code: int = 9) -> Tensor:
        q = flat(8, 32, 32, scale.reshape(1))
        m = QuantLinear.from_quantized(q.with_(codes=torch.full_like(q.codes, code)), activation)
        return m(torch.full((2, 32), x))

    assert torch.allclose(y(torch.tensor(98304.0, dtype=torch.bfloat16), 2.0**-10), torch.tensor(3072.0), rtol=1e-6)
    assert torch.allclose(y(torch.tensor(1e-9), 1000.0, 15), torch.tensor(2.24e-4), rtol=1e-6)
    assert torch.allclose(y(torch.tensor(2.0**-24).half(), 1.0), torch.tensor(32 * 2.0**-24), rtol=1e-6, atol=0)
    assert torch.equal(y(torch.tensor(0.0).half(), 5.0), torch.zeros(2, 8))
    assert torch.allclose(y(torch.tensor(-0.5).half(), 1.0), torch.tensor(-16.0), rtol=1e-6)
    for bad in (float("inf"), float("nan")):
        with pytest.raises(FormatError, match="scales"):
            y(torch.tensor(bad).half(), 1.0)
    for dtype in (torch.float64, torch.int32):
        with pytest.raises(FormatError, match=str(dtype)):
            y(torch.ones(1, dtype=dtype), 1.0)


@pytest.mark.parametrize("activation", ACTIVATIONS)
def test_imp_13_bias_once(activation: str | None) -> None:
    bias = torch.arange(1, 9).float()
    q = ramp()
    for dtype in DTYPES:
        for b in (bias, bias.bfloat16(), bias.half()):
            m = gptq_layer(q, bias=b, activation=activation)
            for count in (1, 200):
                y = m(torch.zeros(count, 32, dtype=dtype))
                assert y.dtype == dtype and torch.equal(y.float(), bias.expand(count, 8))
    none = gptq_layer(q, activation=activation)
    assert none.bias is None and torch.equal(none(torch.zeros(3, 32)), torch.zeros(3, 8))


def test_the_layer_keeps_no_hold_on_what_it_was_made_of() -> None:
    q = weight(24, 64, 32, perm=True, smooth=True, bias=True)
    x = rows(3, 64)
    m = QuantLinear.from_quantized(q)
    want = m(x)
    kept = copy.deepcopy(q)
    for t in (q.codes, q.scales, q.zeros, q.perm, q.smooth, q.bias):
        assert t is not None
        t.zero_()
    assert oracle.same_bits(m(x), want)
    assert same_weight(m.to_quantized(), kept)
