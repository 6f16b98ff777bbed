"""`lowbit.functional`, as the contract gives it: the importing helpers, the packers, and the linears on plain tensors."""

from __future__ import annotations

import warnings

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

import oracle
from lowbit import functional as F
from samples import AWQ_ORDER, DTYPES, awq_words, generator, rows, weight, word, words


def gptq(codes: Tensor, zeros: Tensor, scales: Tensor, offset: int = 1) -> tuple[Tensor, Tensor, Tensor]:
    """codes [K, N], zeros [G, N], scales [G, N] as GPTQ stores them; v1 keeps zero - 1, subtracted from the whole word."""
    stored = words(zeros, 1).long() - 0x11111111 * offset
    stored = torch.remainder(stored, 2**32)
    return words(codes, 0), torch.where(stored >= 2**31, stored - 2**32, stored).to(torch.int32), scales


def random_gptq(k: int, n: int, g: int, lowest_zero: int = 1) -> tuple[Tensor, Tensor, Tensor]:
    r = generator(k, n, g, lowest_zero)
    codes = torch.randint(0, 16, (k, n), generator=r)
    zeros = torch.randint(lowest_zero, 16, (-(-k // g), n), generator=r)
    return codes, zeros, (torch.rand(-(-k // g), n, generator=r) / 16).half()


# ---- pack_w4, dequant_w4 ---------------------------------------------------------------------------------------------
@pytest.mark.parametrize("dtype", DTYPES)
@given(n=st.integers(1, 70), k=st.integers(1, 200), g=st.sampled_from([1, 7, 8, 16, 20, 32, 64, 128, -1]))
def test_pack_then_dequantize_gives_the_weight(dtype: torch.dtype, n: int, k: int, g: int) -> None:
    g = k if g == -1 or g > k else g
    q = weight(n, k, g, scale_dtype=dtype)
    assert q.zeros is not None
    packed = F.pack_w4(q.codes, q.scales, q.zeros, g)
    got = F.dequant_w4(packed, q.scales, q.zeros, g)
    assert got.dtype == torch.float32 and got.shape == (n, k)
    want = oracle.dequantize(q.codes, q.scales, q.zeros, g).float()  # one product of float32: one rounding
    assert torch.equal(got, want)


def test_pack_takes_any_integer_dtype_of_codes_and_float_zeros() -> None:
    q = weight(24, 64, 32)
    assert q.zeros is not None
    want = F.dequant_w4(F.pack_w4(q.codes, q.scales, q.zeros, 32), q.scales, q.zeros, 32)
    for dtype in (torch.int8, torch.int32, torch.int64):
        packed = F.pack_w4(q.codes.to(dtype), q.scales, q.zeros.to(dtype), 32)
        assert torch.equal(F.dequant_w4(packed, q.scales, q.zeros, 32), want)


@pytest.mark.parametrize(
    "change",
    [
        lambda c, s, z: (c + 8, s, z),
        lambda c, s, z: (c.int() - 9, s, z),
        lambda c, s, z: (c, s[:, :1], z),
        lambda c, s, z: (c, s, z[:, :1]),
        lambda c, s, z: (c, s, z.int() + 16),
        lambda c, s, z: (c, s, z.int() - 16),
        lambda c, s, z: (c, s.double(), z),
        lambda c, s, z: (c, s.int(), z),
        lambda c, s, z: (c, s * float("inf"), z),
        lambda c, s, z: (c, s * float("nan"), z),
        lambda c, s, z: (c[0], s, z),
        lambda c, s, z: (c.float() + 0.5, s, z),
    ],
)
def test_pack_refuses_what_is_malformed(change: object) -> None:
    q = weight(16, 64, 32, fill="spread")
    with pytest.raises(ValueError, match="found"):
        F.pack_w4(*change(q.codes, q.scales, q.zeros), 32)  # type: ignore[operator]


@pytest.mark.parametrize("g", [0, -2, 65])
def test_pack_refuses_a_group_that_is_none(g: int) -> None:
    q = weight(16, 64, 64)
    with pytest.raises(ValueError, match="group_size"):
        F.pack_w4(q.codes, q.scales, q.zeros, g)


# ---- from_gptq -------------------------------------------------------------------------------------------------------
@pytest.mark.parametrize("offset", [1, 0])
@pytest.mark.parametrize(("k", "n", "g"), [(32, 8, 32), (128, 24, 32), (160, 40, 32), (64, 48, 16), (256, 8, 256)])
def test_from_gptq(k: int, n: int, g: int, offset: int) -> None:
    codes, zeros, scales = random_gptq(k, n, g)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        packed, s, z, gs, perm = F.from_gptq(*gptq(codes, zeros, scales, offset), zero_offset=offset)
    assert gs == g and perm is None
    assert s.shape == z.shape == (n, k // g)
    assert torch.equal(z.long(), zeros.t()) and torch.equal(s.float(), scales.t().float())
    want = oracle.dequantize(codes.t(), scales.t(), zeros.t(), g).float()
    assert torch.equal(F.dequant_w4(packed, s, z, gs), want)


def test_from_gptq_with_act_order() -> None:
    k, n, g = 128, 16, 32
    codes, zeros, scales = random_gptq(k, n, g)
    order = torch.randperm(k, generator=generator("order"))
    g_idx = torch.empty(k, dtype=torch.int32)
    g_idx[order] = torch.arange(k, dtype=torch.int32) // g
    packed, s, z, gs, perm = F.from_gptq(*gptq(codes, zeros, scales), g_idx=g_idx)
    assert gs == g and perm is not None and sorted(perm.tolist()) == list(range(k))
    w = scales.double()[g_idx.long()] * (codes.double() - zeros.double()[g_idx.long()])  # [K, N] in the input's order
    assert torch.equal(F.dequant_w4(packed, s, z, gs), w.t()[:, perm.long()].float())
    x = rows(5, k)
    codes_n = codes.t()[:, perm.long()].contiguous()
    want = oracle.linear(x, codes_n, s, z, g, "token", perm=perm)
    assert oracle.same_bits(F.w4a8_linear(x, packed, s, z, gs, perm), want)


@pytest.mark.parametrize("g_idx_dtype", [torch.int32, torch.int64])
def test_from_gptq_takes_the_group_from_g_idx(g_idx_dtype: torch.dtype) -> None:
    """K = 192 in groups of 128: two scale rows, the second of 64 columns; half and half would be the wrong answer."""
    codes = torch.full((192, 32), 9)
    scales = torch.tensor([[1.0], [2.0]]).half().expand(2, 32).contiguous()
    g_idx = (torch.arange(192) // 128).to(g_idx_dtype)
    packed, s, z, gs, perm = F.from_gptq(*gptq(codes, torch.full((2, 32), 8), scales), g_idx=g_idx)
    assert gs == 128 and perm is None
    y = F.w4a8_linear(torch.ones(1, 192), packed, s, z, gs)
    assert torch.allclose(y, torch.full((1, 32), 256.0), rtol=1e-6)


def test_a_stored_15_warns_and_the_borrow_comes_out_right() -> None:
    want = torch.tensor([0, 5, 8, 15, 0, 1, 2, 3])
    qweight, scales = words(torch.full((32, 8), 9), 0), torch.ones(1, 8).half()

    def zeros(value: int, offset: int) -> Tensor:
        return F.from_gptq(qweight, torch.tensor([[word(value)]], dtype=torch.int32), scales, zero_offset=offset)[2]

    assert torch.equal(zeros(0x3210F850, 0).long()[:, 0], want)
    with pytest.warns(UserWarning, match="15"):
        assert torch.equal(zeros(0x20FFE73F, 1).long()[:, 0], want)
    with pytest.warns(
        UserWarning, match="15"
    ):  # written nibble by nibble: not what the whole word means, hence the warning
        assert zeros(0x210FE74F, 1).long()[:, 0].tolist() == [0, 6, 8, 15, 0, 2, 2, 3]


@pytest.mark.parametrize(
    "change",
    [
        {"qweight": torch.zeros(3, 32, dtype=torch.int32)},  # 3 bits
        {"qweight": torch.zeros(8, 32, dtype=torch.int32)},  # 8 bits, or twice the K
        {"qweight": torch.zeros(4, 32, dtype=torch.int64)},
        {"qweight": torch.zeros(4 * 32, dtype=torch.int32)},
        {"qzeros": torch.zeros(1, 3, dtype=torch.int32)},
        {"qzeros": torch.zeros(2, 4, dtype=torch.int32)},
        {"scales": torch.ones(1, 31).half()},
        {"scales": torch.ones(1, 32).double()},
        {"scales": torch.full((1, 32), float("nan")).half()},
        {"g_idx": torch.zeros(31, dtype=torch.int32)},
        {"g_idx": torch.full((32,), 1, dtype=torch.int32)},
        {"zero_offset": 2},
    ],
    ids=str,
)
def test_from_gptq_refuses(change: dict[str, object]) -> None:
    given_: dict[str, object] = {
        "qweight": torch.zeros(4, 32, dtype=torch.int32),
        "qzeros": torch.full((1, 4), 0x77777777, dtype=torch.int32),
        "scales": torch.ones(1, 32).half(),
        "g_idx": torch.zeros(32, dtype=torch.int32),
    }
    F.from_gptq(**given_)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="found"):
        F.from_gptq(**(given_ | change))  # type: ignore[arg-type]


# ---- from_awq --------------------------------------------------------------------------------------------------------
@pytest.mark.parametrize(("k", "n", "g"), [(32, 8, 32), (128, 24, 32), (128, 64, 128)])
def test_from_awq(k: int, n: int, g: int) -> None:
    codes, zeros, scales = random_gptq(k, n, g, lowest_zero=0)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        packed, s, z, gs, perm = F.from_awq(awq_words(codes), awq_words(zeros), scales)
    assert gs == g and perm is None and torch.equal(z.long(), zeros.t())
    want = oracle.dequantize(codes.t(), scales.t(), zeros.t(), g).float()
    assert torch.equal(F.dequant_w4(packed, s, z, gs), want)


def test_the_awq_words_of_the_test_are_those_of_the_case_list() -> None:
    assert AWQ_ORDER[1] == 2
    assert awq_words(torch.arange(8)[None]).item() == 0x75316420
    assert awq_words(torch.arange(8, 16)[None]).item() == word(0xFDB9ECA8) == -38146904


def test_from_awq_refuses() -> None:
    qweight, qzeros, scales = (
        torch.zeros(32, 1, dtype=torch.int32),
        torch.zeros(1, 1, dtype=torch.int32),
        torch.ones(1, 8).half(),
    )
    F.from_awq(qweight, qzeros, scales)
    for bad in (
        (qweight[:, :0], qzeros, scales),
        (qweight, qzeros.expand(2, 1), scales),
        (qweight, qzeros, scales[:, :7]),
        (qweight.float(), qzeros, scales),
        (qweight[:31], torch.zeros(2, 1, dtype=torch.int32), torch.ones(2, 8).half()),
    ):
        with pytest.raises(ValueError, match="found"):
            F.from_awq(*bad)


# ---- quantize_activation ---------------------------------------------------------------------------------------------
@pytest.mark.parametrize("dtype", DTYPES)
@given(m=st.integers(0, 9), k=st.integers(1, 300))
def test_quantize_activation(dtype: torch.dtype, m: int, k: int) -> None:
    x = rows(m, k, dtype)
    q, sa = F.quantize_activation(x)
    want_q, want_sa = oracle.quantize(oracle.prepare(x), k)
    assert q.dtype == torch.int8 and q.shape == (m, k) and sa.dtype == torch.float32
    assert torch.equal(q.long(), torch.from_numpy(want_q))
    assert torch.equal(sa.reshape(-1), torch.from_numpy(want_sa).reshape(-1))


def test_quantize_activation_rounds_half_to_even() -> None:
    x = torch.tensor([[127.0, 0.5, 1.5, 2.5, -0.5, -1.5, -2.5, -127.0]])
    q, sa = F.quantize_activation(x)
    assert q.tolist() == [[127, 0, 2, 2, 0, -2, -2, -127]] and sa.item() == 1.0


def test_quantize_activation_of_nothing_tiny_and_broken_rows() -> None:
    tiny = 2.0**-100
    x = torch.tensor(
        [[0.0, 0.0], [tiny / 2, -tiny / 2], [tiny, -tiny], [float("nan"), 1.0], [float("-inf"), 1.0], [1.0, 2.0]]
    )
    q, sa = F.quantize_activation(x)
    sa = sa.reshape(-1)
    assert q[0].tolist() == q[1].tolist() == [0, 0] and sa[0] == 0 and sa[1] == 0
    assert q[2].tolist() == [127, -127] and sa[2] == tiny / 127
    assert not bool(torch.isfinite(sa[3:5]).any())
    assert sa[5] == 2 / torch.tensor(127.0) and q[5].tolist() == [64, 127]


def test_quantize_activation_keeps_leading_dimensions() -> None:
    x = torch.randn(2, 3, 16)
    q, sa = F.quantize_activation(x)
    flat_q, flat_sa = F.quantize_activation(x.reshape(6, 16))
    assert q.shape == x.shape and torch.equal(q.reshape(6, 16), flat_q)
    assert torch.equal(sa.reshape(-1), flat_sa.reshape(-1))


# ---- w4a8_linear -----------------------------------------------------------------------------------------------------
@pytest.mark.parametrize("dtype", DTYPES)
@given(
    m=st.integers(0, 9),
    n=st.integers(1, 40),
    k=st.integers(1, 150),
    g=st.sampled_from([8, 20, 32, 64, -1]),
    perm=st.booleans(),
    bias=st.booleans(),
)
def test_w4a8_linear_is_the_oracle(dtype: torch.dtype, m: int, n: int, k: int, g: int, perm: bool, bias: bool) -> None:
    g = k if g == -1 or g > k else g
    q = weight(n, k, g, perm=perm, bias=bias)
    x = rows(m, k, dtype)
    packed = F.pack_w4(q.codes, q.scales, q.zeros, g)
    got = F.w4a8_linear(x, packed, q.scales, q.zeros, g, q.perm, q.bias)
    assert oracle.same_bits(got, oracle.linear(x, q.codes, q.scales, q.zeros, g, "token", q.perm, bias=q.bias))


def test_w4a8_linear_checks_what_was_packed() -> None:
    q = weight(16, 64, 32)
    packed, x = F.pack_w4(q.codes, q.scales, q.zeros, 32), torch.randn(2, 64)
    s, z = q.scales, q.zeros
    assert z is not None
    F.w4a8_linear(x, packed, s, z, 32)
    for bad in (
        (x[:, :63], packed, s, z, 32),
        (x, packed, s[:8], z, 32),
        (x, packed, s[:, :1], z[:, :1], 32),
        (x, packed, s, z[:8], 32),
        (x, packed, s, z, 64),
        (x, packed, s, z, 16),
        (x, packed, s, z, 32, torch.arange(63)),
        (x, packed, s, z, 32, None, torch.zeros(15)),
        (x.double(), packed, s, z, 32),
        (x.long(), packed, s, z, 32),
    ):
        with pytest.raises((ValueError, TypeError, RuntimeError), match="found|accepted|expected|got"):
            F.w4a8_linear(*bad)


# ---- w8a8_linear -----------------------------------------------------------------------------------------------------
@pytest.mark.parametrize("dtype", DTYPES)
@given(m=st.integers(0, 9), n=st.integers(1, 40), k=st.integers(1, 200), bias=st.booleans())
def test_w8a8_linear_is_the_oracle(dtype: torch.dtype, m: int, n: int, k: int, bias: bool) -> None:
    q = weight(n, k, -1, bits=8, zeros=False, bias=bias, scale_dtype=torch.float32)
    x = rows(m, k, dtype)
    got = F.w8a8_linear(x, q.codes, q.scales.reshape(-1), q.bias)
    assert oracle.same_bits(got, oracle.linear(x, q.codes, q.scales, None, k, "token", bias=q.bias))


def test_w8a8_linear_takes_a_column_of_scales_and_refuses_other_shapes() -> None:
    q = weight(16, 64, -1, bits=8, zeros=False, scale_dtype=torch.float32)
    x, s = torch.randn(3, 64), q.scales
    assert oracle.same_bits(F.w8a8_linear(x, q.codes, s), F.w8a8_linear(x, q.codes, s.reshape(-1)))
    for bad in (
        (x[:, :63], q.codes, s),
        (x, q.codes, s[:15]),
        (x, q.codes.float(), s),
        (x, q.codes, s, torch.zeros(15)),
    ):
        with pytest.raises((ValueError, TypeError, RuntimeError), match="found|accepted|expected|got"):
            F.w8a8_linear(*bad)


# ---- fp16_gemv -------------------------------------------------------------------------------------------------------
@pytest.mark.parametrize("dtype", DTYPES)
@given(m=st.integers(0, 9), n=st.integers(1, 40), k=st.integers(1, 200), bias=st.booleans())
def test_fp16_gemv(dtype: torch.dtype, m: int, n: int, k: int, bias: bool) -> None:
    r = generator(n, k)
    w, b = torch.randn(n, k, generator=r).half(), (torch.randn(n, generator=r) if bias else None)
    x = rows(m, k, dtype)
    got = F.fp16_gemv(x, w, b)
    assert got.dtype == dtype and got.shape == (m, n)
    want = x.double() @ w.double().t() + (0 if b is None else b.double())
    size = x.double().abs() @ w.double().abs().t() + (0 if b is None else b.double().abs())
    step = {torch.float32: 1e-7, torch.bfloat16: 2**-8, torch.float16: 2**-11}[dtype]
    assert bool(((got.double() - want).abs() <= size * 1e-7 * (4 + k / 8) + want.abs() * step + 1e-7).all())


def test_fp16_gemv_refuses() -> None:
    x, w = torch.randn(2, 8), torch.randn(4, 8).half()
    for bad in ((x[:, :7], w), (x, w.float()), (x.double(), w), (x, w, torch.zeros(3))):
        with pytest.raises((ValueError, TypeError, RuntimeError), match="found|accepted|expected|got"):
            F.fp16_gemv(*bad)


def test_fp16_gemv_in_half_precision_would_lose() -> None:
    """4,096 products of 16: the running sum must be float32, where a float16 sum would stop at 65,504."""
    y = F.fp16_gemv(torch.full((1, 4096), 4.0), torch.full((8, 4096), 4.0).half())
    assert torch.equal(y, torch.full((1, 8), 65536.0))


def test_plain_and_packed_fp16_have_the_same_bits() -> None:
    linear = torch.nn.Linear(72, 40)
    with torch.no_grad():
        linear.weight.copy_(linear.weight.half())
    layer = F.QuantLinear.from_linear(linear, "fp16")
    for m in (1, 5, 33):
        x = rows(m, 72)
        want = F.fp16_gemv(x, linear.weight.detach().half(), linear.bias.detach())
        assert oracle.same_bits(layer(x), want)


def test_the_public_names() -> None:
    names = "pack_w4 from_gptq from_awq dequant_w4 quantize_activation w4a8_linear w8a8_linear fp16_gemv QuantLinear"
    assert sorted(F.__all__) == sorted(names.split())
    assert all(getattr(F, name).__doc__ for name in names.split())
