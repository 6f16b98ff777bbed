"""The operators under the modules: held to an exact oracle, and every tier held to scalar, byte for byte."""

from __future__ import annotations

import itertools
from fractions import Fraction

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

import oracle
from lowbit import layouts, ops, reference
from lowbit.layouts import arm_panels, panels
from lowbit.types import QuantizedWeight
from samples import DTYPES, FILLS, ROWS, generator, rows, weight

TIERS = ops.cpu_isas()
CODES = {"token": 0, "group": 1, None: 2}
every_dtype = pytest.mark.parametrize("dtype", DTYPES, ids=lambda d: str(d)[6:])
every_tier = pytest.mark.parametrize("isa", TIERS)


def run(x: Tensor, q: QuantizedWeight, activation: str | None, isa: str = "", packed: Tensor | None = None) -> Tensor:
    packed = panels.pack(q) if packed is None else packed
    smooth = None if q.smooth is None else q.smooth.float()
    return ops.linear(x, packed, q.n, q.group_size, q.bits, CODES[activation], q.bias, q.perm, smooth, isa)


def exact(x: Tensor, q: QuantizedWeight, activation: str) -> Tensor:
    return oracle.linear(x, q.codes, q.scales, q.zeros, q.group_size, activation, q.perm, q.smooth, q.bias)


# ---- the oracle itself -----------------------------------------------------------------------------------------------
def test_the_fast_fma_of_the_oracle_is_the_rational_one() -> None:
    r = np.random.default_rng(0)
    a, b, c = (
        r.standard_normal(3000).astype(np.float32) * np.exp2(r.integers(-40, 40, 3000)).astype(np.float32)
        for _ in range(3)
    )
    c[:1000] = -(a[:1000] * b[:1000])  # cancellation: what is left is the rounding error of the product
    c[1000:1500] = (a[1000:1500] * b[1000:1500]) * np.float32(2.0**24)  # the product is a tie or near one
    a[1500:1700] *= np.float32(2.0**-70)  # results among the subnormals
    b[1500:1700] *= np.float32(2.0**-70)
    c[1500:1700] = 0
    got = oracle.fma(a, b, c)
    want = np.array([oracle.fma_fraction(*v) for v in zip(a, b, c, strict=True)])
    assert (got == want).all() and np.isfinite(want).all()
    assert (want[:1000] != 0).any() and (a.astype(np.float32) * b + c != want).any()  # two roundings would be wrong


def test_rounding_of_rationals() -> None:
    tie = Fraction(2**24 + 1)
    assert oracle.round_float32(tie) == 2**24 and oracle.round_float32(tie + 2) == 2**24 + 4
    assert oracle.round_float32(Fraction(2) ** -149 * Fraction(1, 2)) == 0
    assert oracle.round_float32(-(Fraction(2) ** -149) * Fraction(3, 2)) == -(2.0**-148)


@pytest.mark.parametrize("activation", ["token", "group"])
@pytest.mark.parametrize("bits", [4, 8])
def test_the_fast_oracle_is_the_rational_one(bits: int, activation: str) -> None:
    q = weight(5, 70, 20, bits=bits)
    for dtype in DTYPES:
        x = rows(3, 70, dtype)
        slow = oracle.linear_fraction(x, q.codes, q.scales, q.zeros, 20, activation)
        assert oracle.same_bits(oracle.linear(x, q.codes, q.scales, q.zeros, 20, activation), slow)


# ---- layouts ---------------------------------------------------------------------------------------------------------
def test_every_layout_has_a_test_here() -> None:
    assert set(layouts.LAYOUTS) - {"mma_tiles"} == {"x86_panels", "arm_panels", "half_panels"}  # test_mma_tiles.py


@given(
    n=st.integers(1, 50),
    k=st.integers(1, 150),
    g=st.integers(1, 150),
    bits=st.sampled_from([4, 8]),
    zeros=st.booleans(),
)
def test_panels_round_trip(n: int, k: int, g: int, bits: int, zeros: bool) -> None:
    for scale_dtype in DTYPES:
        q = weight(n, k, min(g, k), bits=bits, zeros=zeros, scale_dtype=scale_dtype)
        for layout in (panels, arm_panels):
            codes, scales, back = layout.unpack(layout.pack(q), n, k, q.group_size, bits, symmetric=not zeros)
            assert torch.equal(codes, q.codes) and codes.dtype == q.codes.dtype
            assert torch.equal(scales.float(), q.scales.float())
            assert back is None if q.zeros is None else back is not None and torch.equal(back, q.zeros)


@given(n=st.integers(1, 50), k=st.integers(1, 90))
def test_half_panels_round_trip(n: int, k: int) -> None:
    w = torch.randn(n, k, generator=generator(n, k)).half()
    assert oracle.same_bits(panels.unpack_half(panels.pack_half(w), n, k), w)


@pytest.mark.parametrize("bits", [4, 8])
def test_where_each_code_lies(bits: int) -> None:
    """One code at a time, against the drawing in kernels.h, written here a second time."""
    n, k, g = 20, 50, 20  # 2 panels, 3 groups padded to 32 columns, the last one short
    per_line = 8 if bits == 4 else 4
    code_bytes = 32 // per_line * 64
    for row, column in itertools.product((0, 1, 15, 16, 19), (0, 3, 4, 7, 8, 19, 20, 39, 40, 49)):
        codes = torch.zeros(n, k, dtype=torch.uint8)
        codes[row, column] = 5
        q = QuantizedWeight(codes, torch.zeros(n, 3).half(), g, bits, torch.zeros(n, 3, dtype=torch.uint8))
        packed = panels.pack(q)
        assert packed.shape == (2, 3, code_bytes + 64)
        group, inside = divmod(column, g)
        line, place = divmod(inside, per_line)
        byte = 64 * line + 4 * (row % 16) + place % 4
        lines = packed[:, :, :code_bytes]
        assert lines.nonzero().tolist() == [[row // 16, group, byte]]
        assert packed[row // 16, group, byte] == (5 << 4 if place >= 4 else 5)


@pytest.mark.parametrize("wide", [False, True])
def test_where_scales_and_zeros_lie(wide: bool) -> None:
    n, k, g = 20, 64, 32
    value = 1 / 3 if wide else 0.5
    for row, group in itertools.product((0, 15, 16, 19), (0, 1)):
        scales, zeros = torch.zeros(n, 2), torch.zeros(n, 2, dtype=torch.uint8)
        scales[row, group], zeros[row, group] = value, 11
        packed = panels.pack(QuantizedWeight(torch.zeros(n, k, dtype=torch.uint8), scales, g, 4, zeros))
        size = 4 if wide else 2
        assert packed.shape == (2, 2, 256 + (128 if wide else 64))
        tail = packed[row // 16, group, 256:]
        at = size * (row % 16)
        number = tail[at : at + size].clone().view(torch.float32 if wide else torch.float16)
        assert number.item() == scales[row, group].item()
        assert tail[16 * size + row % 16] == 11
        expected = int((number.view(torch.uint8) != 0).sum()) + 1
        assert int((packed[:, :, : 256 + 16 * size + 16] != 0).sum()) == expected  # and nothing anywhere else


def test_scales_are_never_rounded_in_silence() -> None:
    for value, tail in (
        (0.5, 64),
        (2.0**-24, 64),
        (65504.0, 64),
        (98304.0, 128),
        (1e-9, 128),
        (2.0**-25, 128),
        (1 / 3, 128),
    ):
        q = QuantizedWeight(torch.ones(16, 32, dtype=torch.int8), torch.full((16, 1), value), 32, 4)
        packed = panels.pack(q)
        assert packed.shape[2] == 256 + tail, value
        assert panels.unpack(packed, 16, 32, 32, 4)[1].float()[0, 0] == torch.tensor(value)


# ---- int8 activations: the oracle ------------------------------------------------------------------------------------
shapes = {
    "m": st.sampled_from([1, 2, 3, 4, 5, 8, 9, 17]),
    "n": st.integers(1, 50),
    "k": st.integers(1, 260),
    "g": st.sampled_from([1, 3, 8, 16, 20, 32, 64, 128, -1]),
}


@every_tier
@every_dtype
@pytest.mark.parametrize("activation", ["token", "group"])
@given(
    **shapes, bits=st.sampled_from([4, 8]), zeros=st.booleans(), extras=st.integers(0, 7), fill=st.sampled_from(FILLS)
)
def test_integer_kernels_are_the_oracle(
    isa: str,
    dtype: torch.dtype,
    activation: str,
    m: int,
    n: int,
    k: int,
    g: int,
    bits: int,
    zeros: bool,
    extras: int,
    fill: str,
) -> None:
    g = k if g == -1 else min(g, k)
    scale_dtype = DTYPES[(m + n) % 3]
    q = weight(
        n,
        k,
        g,
        bits=bits,
        zeros=zeros,
        fill=fill,
        perm=bool(extras & 1),
        smooth=bool(extras & 2),
        bias=bool(extras & 4),
        scale_dtype=scale_dtype,
    )
    x = rows(m, k, dtype, fill)
    got, want = run(x, q, activation, isa), exact(x, q, activation)
    assert oracle.same_bits(got, want)


@every_tier
@pytest.mark.parametrize("activation", ["token", "group"])
@pytest.mark.parametrize("bits", [4, 8])
@pytest.mark.parametrize("fill", FILLS)
def test_long_sums(isa: str, bits: int, activation: str, fill: str) -> None:
    """One group of 20,000 columns, all at ±127 and the extreme codes: d passes 2^24, where float32 must round."""
    k = 20000
    q = weight(17, k, -1, bits=bits, fill=fill)
    x = rows(3, k, fill=fill)
    assert oracle.same_bits(run(x, q, activation, isa), exact(x, q, activation))


@every_tier
def test_the_longest_8_bit_group(isa: str) -> None:
    """127 * 255 * 66,310 is just below 2^31; a longer one is refused, and in shorter groups the same K runs."""
    k = 66310
    q = weight(1, k, -1, bits=8, fill="high")
    x = rows(1, k, fill="high")
    assert oracle.same_bits(run(x, q, "token", isa), exact(x, q, "token"))
    longer = weight(1, 70000, -1, bits=8, fill="high")
    with pytest.raises((RuntimeError, ValueError), match="70000"):
        run(rows(1, 70000), longer, "token", isa)
    shorter = weight(1, 70000, 128, bits=8, fill="high")
    assert oracle.same_bits(run(rows(2, 70000), shorter, "token", isa), exact(rows(2, 70000), shorter, "token"))


# ---- every tier is scalar --------------------------------------------------------------------------------------------
@every_dtype
@pytest.mark.parametrize("activation", ["token", "group", None])
@pytest.mark.parametrize("bits", [4, 8])
def test_tiers_are_scalar_at_every_m(bits: int, activation: str | None, dtype: torch.dtype) -> None:
    n, k = 70, 165
    for index, (g, fill) in enumerate(itertools.product((8, 32, 128, -1), FILLS)):
        q = weight(n, k, g, bits=bits, fill=fill, perm=index % 2 == 0, smooth=index % 3 == 0, bias=index % 4 != 0)
        packed = panels.pack(q)
        x = rows(max(ROWS), k, dtype, fill)
        whole = run(x, q, activation, "scalar", packed)
        for tier in TIERS:
            for m in ROWS if tier != "scalar" else (1, 5):
                got = run(x[:m], q, activation, tier, packed)
                assert oracle.same_bits(got, whole[:m]), (tier, m, g, fill)


@every_tier
@every_dtype
@pytest.mark.parametrize("activation", ["token", "group", None])
def test_rows_and_threads(isa: str, dtype: torch.dtype, activation: str | None) -> None:
    q = weight(130, 256, 64, bias=True)
    packed, x = panels.pack(q), rows(129, 256, dtype)
    whole = run(x, q, activation, isa, packed)
    for i in range(0, 129, 8):
        assert oracle.same_bits(run(x[i : i + 1], q, activation, isa, packed), whole[i : i + 1])
    before = torch.get_num_threads()
    try:
        for threads in (1, 2, 3):
            torch.set_num_threads(threads)
            assert oracle.same_bits(run(x, q, activation, isa, packed), whole)
            assert oracle.same_bits(run(x[:1], q, activation, isa, packed), whole[:1])
    finally:
        torch.set_num_threads(before)


@every_tier
@every_dtype
def test_broken_values_give_the_bytes_of_scalar(isa: str, dtype: torch.dtype) -> None:
    """NaN, infinities, subnormals and -0 in x: the same bytes in every tier, the payload of a NaN included."""
    specials = torch.tensor([float("nan"), float("inf"), float("-inf"), 1e-40, -0.0, 2.0**-100, 3e38, -3e38]).to(dtype)
    for bits, activation in itertools.product((4, 8), CODES):
        q = weight(33, 96, 32, bits=bits, bias=True)
        x = rows(16, 96, dtype)
        for i in range(8):
            x[i, 11 * i] = specials[i]
            x[8 + i] = specials[i]
        got, want = run(x, q, activation, isa), run(x, q, activation, "scalar")
        assert bytes(got.view(torch.uint8).numpy()) == bytes(want.view(torch.uint8).numpy())


# ---- float activations and float16 storage ---------------------------------------------------------------------------
def float_oracle(x: Tensor, q: QuantizedWeight) -> Tensor:
    """One fma chain over the columns of a group, one over the groups, then the bias: the order that kernels.h states."""
    xs, w, s = oracle.prepare(x, q.perm, q.smooth), q.codes.numpy().astype(np.int64), q.scales.float().numpy()
    total = np.zeros((x.shape[0], q.n), np.float32)
    for g in range(s.shape[1]):
        part = np.zeros_like(total)
        for j in range(g * q.group_size, min(q.k, (g + 1) * q.group_size)):
            code = w[:, j] - (0 if q.zeros is None else q.zeros.numpy().astype(np.int64)[:, g])
            part = oracle.fma(
                np.broadcast_to(xs[:, j, None], part.shape), np.broadcast_to(code.astype(np.float32), part.shape), part
            )
        total = oracle.fma(part, np.broadcast_to(s[None, :, g], total.shape), total)
    if q.bias is not None:
        total = total + q.bias.numpy()
    return torch.from_numpy(total).to(x.dtype)


@every_tier
@every_dtype
@given(
    m=st.sampled_from([1, 2, 5, 9]),
    n=st.integers(1, 40),
    k=st.integers(1, 100),
    g=st.sampled_from([1, 8, 20, 32, -1]),
    bits=st.sampled_from([4, 8]),
    extras=st.integers(0, 15),
)
def test_float_activations(
    isa: str, dtype: torch.dtype, m: int, n: int, k: int, g: int, bits: int, extras: int
) -> None:
    g = k if g == -1 else min(g, k)
    q = weight(
        n,
        k,
        g,
        bits=bits,
        perm=bool(extras & 1),
        smooth=bool(extras & 2),
        bias=bool(extras & 4),
        zeros=bool(extras & 8),
    )
    x = rows(m, k, dtype)
    got = run(x, q, None, isa)
    assert oracle.same_bits(got, float_oracle(x, q))
    if dtype == torch.float32:
        xs = torch.from_numpy(oracle.prepare(x, q.perm, q.smooth)).double()
        w = oracle.dequantize(q.codes, q.scales, q.zeros, g)
        want, size = xs @ w.t(), xs.abs() @ w.abs().t()
        if q.bias is not None:
            want, size = want + q.bias, size + q.bias.abs()
        assert bool(((got.double() - want).abs() <= 1e-6 * size + 1e-30).all())


@every_tier
@every_dtype
@given(m=st.sampled_from([1, 2, 3, 4, 5, 8, 9, 33]), n=st.integers(1, 70), k=st.integers(1, 200), bias=st.booleans())
def test_half_storage(isa: str, dtype: torch.dtype, m: int, n: int, k: int, bias: bool) -> None:
    r = generator(n, k)
    w = torch.randn(n, k, generator=r).half()
    w[0, 0], w[n - 1, k - 1] = 2.0**-24, 65504
    b = torch.randn(n, generator=r) if bias else None
    x = rows(m, k, dtype)
    got = ops.linear(x, panels.pack_half(w), n, k, 16, 2, b, None, None, isa)
    part = np.zeros((m, n), np.float32)
    xs, ws = oracle.prepare(x), w.float().numpy()
    for j in range(k):
        part = oracle.fma(
            np.broadcast_to(xs[:, j, None], part.shape), np.broadcast_to(ws[None, :, j], part.shape), part
        )
    want = torch.from_numpy(part if b is None else part + b.numpy()).to(dtype)
    assert oracle.same_bits(got, want)


# ---- quantize_rows ---------------------------------------------------------------------------------------------------
@every_tier
@every_dtype
@given(m=st.integers(0, 9), k=st.integers(1, 300), g=st.sampled_from([0, 1, 8, 20, 32, 64]))
def test_quantize_rows(isa: str, dtype: torch.dtype, m: int, k: int, g: int) -> None:
    x = rows(m, k, dtype)
    q, s = ops.quantize_rows(x, g, isa)
    want_q, want_s = oracle.quantize(oracle.prepare(x), g or k)
    assert torch.equal(q.long(), torch.from_numpy(want_q))
    assert torch.equal(s.reshape(m, -1) if m else s.reshape(0, want_s.shape[1]), torch.from_numpy(want_s))


@every_tier
def test_quantize_rows_over_every_exponent(isa: str) -> None:
    x = torch.tensor([[2.0**e, -(2.0**e) / 3] for e in range(-149, 128)])
    q, s = ops.quantize_rows(x, 0, isa)
    want_q, want_s = oracle.quantize(x.numpy(), 2)
    assert torch.equal(q.long(), torch.from_numpy(want_q)) and torch.equal(s, torch.from_numpy(want_s[:, 0]))
    assert bool((s[:49] == 0).all()) and bool((s[49:] > 0).all())  # 2^-100 is row 49


def test_the_plain_reference_agrees_with_the_oracle() -> None:
    """reference.quantize_rows is exact too; reference.linear adds in float64 and may differ in the last bits only."""
    from lowbit.types import Activation

    for activation, g in (("token", None), ("group", 20)):
        q = weight(24, 90, 20, perm=True, smooth=True, bias=True)
        x = rows(7, 90)
        codes, scales = reference.quantize_rows(torch.from_numpy(oracle.prepare(x)), g)
        want_q, want_s = oracle.quantize(oracle.prepare(x), g or 90)
        assert torch.equal(codes.long(), torch.from_numpy(want_q)) and torch.equal(scales, torch.from_numpy(want_s))
        y = reference.linear(x, q, Activation(8, activation))  # type: ignore[arg-type]
        assert reference.error(y, exact(x, q, activation)) < 3e-7


# ---- what an operator owes to torch ----------------------------------------------------------------------------------
def op_samples() -> list[tuple[str, tuple[object, ...]]]:
    q = weight(24, 64, 32, perm=True, smooth=True, bias=True)
    assert q.smooth is not None
    x, packed = rows(3, 64), panels.pack(q)
    half = panels.pack_half(torch.randn(24, 64).half())
    samples: list[tuple[str, tuple[object, ...]]] = [
        ("linear", (x, packed, 24, 32, 4, a, q.bias, q.perm, q.smooth.float())) for a in CODES.values()
    ]
    samples += [
        ("linear", (rows(6, 64, torch.bfloat16).reshape(2, 3, 64), packed, 24, 32, 4, 0)),
        ("linear", (x[0].half(), packed, 24, 32, 4, 1)),
        ("linear", (x[:0], packed, 24, 32, 4, 1)),
        ("linear", (x.t().contiguous().t(), packed, 24, 32, 4, 1)),
        ("linear", (x, half, 24, 64, 16, 2)),
        ("quantize_rows", (x,)),
        ("quantize_rows", (x, 20)),
        ("quantize_rows", (x[:0], 20)),
    ]
    qkv, angles = rows(5, 64), (rows(5, 8), rows(5, 8))
    bounds = torch.tensor([0, 2, 2, 5], dtype=torch.int32)
    samples += [
        ("add_norm", (x.clone(), x, torch.ones(64), 1e-6)),
        ("add_norm", (x.clone(), None, torch.ones(64), 1e-6)),
        ("silu_mul", (x,)),
        ("packed_attention", (qkv, torch.ones(16), torch.ones(16), *angles, bounds, 2, 1, 1e-6, 0.25)),
        ("packed_attention", (qkv[:0], None, None, *(a[:0] for a in angles), bounds[:1], 2, 1, 0.0, 0.25)),
    ]
    return samples


def test_every_operator_has_a_sample() -> None:
    schemas = {s.name for s in torch._C._jit_get_all_schemas() if s.name.startswith(f"{ops.NAMESPACE}::")}
    names = {s.split("::")[1] for s in schemas}
    handles = {"decoder_new", "decoder_free", "decoder_scratch", "decoder_step"}  # test_llama_engine.py has the step
    names = {
        name for name in names if not name.startswith("cuda_")
    }  # test_cuda_gpu.py, and their shapes in test_mma_tiles.py
    assert names - {"cpu_isas", "cpu_isa"} - handles == {name for name, _ in op_samples()}


@pytest.mark.parametrize("index", range(len(op_samples())))
def test_opcheck(index: int) -> None:
    name, arguments = op_samples()[index]
    torch.library.opcheck(getattr(getattr(torch.ops, ops.NAMESPACE), name).default, arguments)


def test_tier_names() -> None:
    assert TIERS[-1] == "scalar" and len(set(TIERS)) == len(TIERS)
    order = ["amx", "avx512vnni", "avxvnni", "avx2", "i8mm", "dotprod", "neon", "scalar"]
    assert sorted(TIERS, key=order.index) == TIERS and ops.cpu_isa() in TIERS
    q = weight(16, 32, 32)
    with pytest.raises(RuntimeError, match="mmx") as e:
        run(rows(1, 32), q, "token", "mmx")
    assert all(t in str(e.value) for t in TIERS)


def test_an_operator_refuses_what_does_not_fit() -> None:
    q = weight(24, 64, 32, perm=True)
    x, packed = rows(2, 64), panels.pack(q)
    good: dict[str, object] = dict(x=x, weight=packed, n=24, group_size=32, bits=4, activation=0)
    ops.linear(**good)  # type: ignore[arg-type]
    for change in (
        {"n": 40},
        {"n": 0},
        {"n": -1},
        {"group_size": 0},
        {"group_size": -1},
        {"group_size": 64},
        {"bits": 8},
        {"bits": 3},
        {"bits": 16},
        {"activation": 3},
        {"activation": -1},
        {"weight": packed[:, :, :-1]},
        {"weight": packed[:1]},
        {"weight": packed.to(torch.int8)},
        {"weight": packed[0]},
        {"x": x[:, :32]},
        {"x": torch.tensor(1.0)},
        {"x": x.double()},
        {"x": torch.zeros(2, 0)},
        {"bias": torch.zeros(23)},
        {"bias": torch.zeros(24).half()},
        {"perm": torch.full((64,), 64, dtype=torch.int32)},
        {"perm": torch.full((64,), -1, dtype=torch.int32)},
        {"perm": torch.arange(64)},
        {"perm": torch.arange(63, dtype=torch.int32)},
        {"smooth": torch.ones(63)},
    ):
        with pytest.raises(RuntimeError, match="found|accepted"):
            ops.linear(**(good | change))  # type: ignore[arg-type]
    for bad in (torch.zeros(4), torch.zeros(2, 4).double(), torch.zeros(2, 0)):
        with pytest.raises(RuntimeError, match="found"):
            ops.quantize_rows(bad)
