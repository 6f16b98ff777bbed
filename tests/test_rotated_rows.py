"""Smoothing, Hadamard and low rank inside the operators: reference.py's bits in, the oracle's bits out, in every tier."""

from __future__ import annotations

import itertools
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

import oracle
from lowbit import ops, reference
from lowbit.layouts import panels
from lowbit.types import Activation, LowRank, QuantizedWeight
from samples import DTYPES, ROWS, generator, rows, weight

TIERS = ops.cpu_isas()
CODES = {"token": 0, "group": 1, None: 2}
every_dtype = pytest.mark.parametrize("dtype", DTYPES, ids=lambda d: str(d)[6:])
every_tier = pytest.mark.parametrize("isa", TIERS)


def layer(
    n: int, k: int, group: int, rank: int, *, hadamard: int = 64, wide: bool = False, **parts: Any
) -> QuantizedWeight:
    q = weight(n, k, group, **parts).with_(hadamard=hadamard)
    r = generator(n, k, rank, wide)
    down, up = ((torch.randn(size, rank, generator=r) / 8) for size in (k, n))
    return q.with_(low_rank=LowRank(down, up) if wide else LowRank(down.half(), up.half())) if rank else q


def factors(q: QuantizedWeight) -> dict[str, Tensor]:
    if q.low_rank is None:
        return {}
    down, up = q.low_rank
    return {"down": panels.pack_half(down.T, down.dtype), "up": panels.pack_half(up, up.dtype)}


def run(x: Tensor, q: QuantizedWeight, activation: str | None, isa: str = "", packed: Tensor | None = None) -> Tensor:
    packed = panels.pack(q) if packed is None else packed
    smooth = None if q.smooth is None else q.smooth.float()
    return ops.linear(
        x, packed, q.n, q.group_size, q.bits, CODES[activation], q.bias, q.perm, smooth, isa,
        hadamard=q.hadamard, **factors(q),
    )  # fmt: skip


def exact(x: Tensor, q: QuantizedWeight, activation: str) -> Tensor:
    return oracle.linear(
        x, q.codes, q.scales, q.zeros, q.group_size, activation, q.perm, q.smooth, q.bias, q.hadamard, q.low_rank
    )


# ---- x' and its codes --------------------------------------------------------------------------------------------------
def test_the_oracle_rotates_as_the_reference_does() -> None:
    q = layer(3, 192, 64, 0, smooth=True)
    for dtype in DTYPES:
        x = rows(5, 192, dtype)
        assert oracle.same_bits(torch.from_numpy(oracle.inside(x, q.smooth, 64)), reference.transform(x, q))


@every_tier
@every_dtype
@given(m=st.integers(0, 9), blocks=st.integers(1, 5), g=st.sampled_from([0, 20, 32, 64]), extras=st.integers(0, 3))
def test_codes_and_scales_are_the_references(
    isa: str, dtype: torch.dtype, m: int, blocks: int, g: int, extras: int
) -> None:
    k = 64 * blocks
    q = layer(2, k, 32, 0, smooth=bool(extras & 1), perm=bool(extras & 2))
    x = rows(m, k, dtype)
    smooth = None if q.smooth is None else q.smooth.float()
    codes, scales = ops.quantize_rows(x, g, isa, perm=q.perm, smooth=smooth, hadamard=64)
    inside = reference.transform(x, q)
    want = reference.quantize_rows(inside if q.perm is None else inside[:, q.perm.long()], g or None)
    assert torch.equal(codes, want[0]) and oracle.same_bits(scales.reshape(want[1].shape), want[1])


@every_tier
@every_dtype
def test_the_float_rows_are_the_references(isa: str, dtype: torch.dtype) -> None:
    """An identity in float16 gives x' back: one exact product and zeros."""
    eye = panels.pack_half(torch.eye(192).half())
    q = layer(2, 192, 64, 0, smooth=True)
    assert q.smooth is not None
    for m in (1, 2, 7, 33):
        x = rows(m, 192, dtype)
        got = ops.linear(x, eye, 192, 192, 16, 2, None, None, q.smooth.float(), isa, hadamard=64)
        assert oracle.same_bits(got, reference.transform(x, q).to(dtype) + 0.0)


# ---- the whole layer -----------------------------------------------------------------------------------------------------
@every_tier
@every_dtype
@pytest.mark.parametrize("activation", ["token", "group"])
@given(
    m=st.sampled_from([1, 2, 3, 5, 9, 17]),
    n=st.integers(1, 50),
    blocks=st.integers(1, 4),
    g=st.sampled_from([20, 32, 64, -1]),
    rank=st.sampled_from([0, 1, 5, 16, 20, 35]),
    bits=st.sampled_from([4, 8]),
    extras=st.integers(0, 31),
)
def test_a_layer_is_the_oracle(
    isa: str,
    dtype: torch.dtype,
    activation: str,
    m: int,
    n: int,
    blocks: int,
    g: int,
    rank: int,
    bits: int,
    extras: int,
) -> None:
    q = layer(
        n, 64 * blocks, g, rank, wide=bool(extras & 1), bits=bits, perm=bool(extras & 2), smooth=bool(extras & 4),
        bias=bool(extras & 8), zeros=bool(extras & 16),
    )  # fmt: skip
    x = rows(m, q.k, dtype)
    assert oracle.same_bits(run(x, q, activation, isa), exact(x, q, activation))


@every_tier
@pytest.mark.parametrize("wide", [False, True])
@given(k=st.integers(1, 150), m=st.sampled_from([1, 4, 9]), rank=st.sampled_from([3, 16]))
def test_a_low_rank_without_a_hadamard(isa: str, wide: bool, k: int, m: int, rank: int) -> None:
    """The published form: no smoothing, no rotation, any width."""
    q = layer(19, k, min(32, k), rank, hadamard=0, wide=wide, zeros=False)
    x = rows(m, k)
    assert oracle.same_bits(run(x, q, "group", isa), exact(x, q, "group"))


@every_dtype
@pytest.mark.parametrize("activation", ["token", "group", None])
def test_tiers_are_scalar_at_every_m(activation: str | None, dtype: torch.dtype) -> None:
    for g, rank, wide in ((64, 16, False), (20, 50, True), (128, 33, False)):
        q = layer(70, 320, g, rank, wide=wide, perm=g == 20, smooth=True, bias=True)
        packed, x = panels.pack(q), rows(max(ROWS), 320, dtype)
        whole = run(x, q, activation, "scalar", packed)
        for tier in TIERS:
            for m in ROWS if tier != "scalar" else (1, 5):
                assert oracle.same_bits(run(x[:m], q, activation, tier, packed), whole[:m]), (tier, m, g)


def test_the_low_rank_beside_float_activations() -> None:
    """y is that of the same layer without the low rank, plus the branch, in float32."""
    q = layer(40, 128, 32, 16, smooth=True, bias=True)
    x = rows(9, 128)
    plain = run(x, q.with_(low_rank=None), None)
    assert q.low_rank is not None
    branch = torch.from_numpy(oracle.branch(oracle.inside(x, q.smooth, 64), *q.low_rank))
    assert oracle.same_bits(run(x, q, None), plain + branch)


@every_tier
def test_rows_and_threads(isa: str) -> None:
    q = layer(130, 256, 64, 32, smooth=True, bias=True)
    packed, x = panels.pack(q), rows(129, 256, torch.float16)
    whole = run(x, q, "token", isa, packed)
    for i in range(0, 129, 8):
        assert oracle.same_bits(run(x[i : i + 1], q, "token", isa, packed), whole[i : i + 1])
    before = torch.get_num_threads()
    try:
        for threads in (1, 2, 3):
            torch.set_num_threads(threads)
            assert oracle.same_bits(run(x, q, "token", isa, packed), whole)
    finally:
        torch.set_num_threads(before)
    strided = torch.cat([x, x], 1)[:, :256]
    assert not strided.is_contiguous() and oracle.same_bits(run(strided, q, "token", isa, packed), whole)


@every_tier
@every_dtype
def test_broken_values_stay_in_their_row_and_give_the_bytes_of_scalar(isa: str, dtype: torch.dtype) -> None:
    specials = torch.tensor([float("nan"), float("inf"), float("-inf"), 1e-40, -0.0, 2.0**-100, 3e38, -3e38]).to(dtype)
    for rank, activation in itertools.product((0, 20), CODES):
        q = layer(33, 128, 32, rank, smooth=True, bias=True)
        x = rows(17, 128, dtype)
        clean = run(x, q, activation, isa)
        for i in range(8):
            x[2 * i, 11 * i] = specials[i]
        got, want = run(x, q, activation, isa), run(x, q, activation, "scalar")
        assert bytes(got.view(torch.uint8).numpy()) == bytes(want.view(torch.uint8).numpy())
        assert oracle.same_bits(got[1::2], clean[1::2])
        assert not bool(torch.isfinite(got[0:6:2]).any())


# ---- what an operator owes to torch --------------------------------------------------------------------------------------
def op_samples() -> list[tuple[Any, tuple[Any, ...], dict[str, Any]]]:
    q = layer(24, 128, 32, 16, smooth=True, perm=True)
    assert q.smooth is not None
    x, packed, namespace = rows(3, 128), panels.pack(q), getattr(torch.ops, ops.NAMESPACE)
    base = (packed, 24, 32, 4, 0, None, q.perm, q.smooth.float())
    whole: dict[str, Any] = {"hadamard": 64, **factors(q)}
    return [
        (namespace.linear.default, (x, *base), whole),
        (namespace.linear.default, (x[:0], *base), whole),
        (namespace.linear.default, (x.bfloat16(), *base), {"hadamard": 64}),
        (namespace.linear.default, (x.reshape(1, 3, 128), *base), factors(layer(24, 128, 32, 5, wide=True))),
        (namespace.quantize_rows.default, (x, 20), {"perm": q.perm, "smooth": q.smooth.float(), "hadamard": 64}),
    ]


@pytest.mark.parametrize("index", range(len(op_samples())))
def test_opcheck(index: int) -> None:
    op, arguments, named = op_samples()[index]
    torch.library.opcheck(op, arguments, named)


def test_an_operator_refuses_what_does_not_fit() -> None:
    q = layer(24, 128, 32, 16)
    whole = factors(q)
    down, up = whole["down"], whole["up"]

    good = {"x": rows(2, 128), "weight": panels.pack(q), "hadamard": 64, **whole}

    def call(**changes: Any) -> Tensor:
        return ops.linear(n=24, group_size=32, bits=4, activation=0, **{**good, **changes})

    call()
    odd = weight(24, 96, 32)
    for change in (
        {"hadamard": 32}, {"hadamard": -64}, {"down": None}, {"up": None}, {"down": down[:, :64]}, {"up": up[:1]},
        {"down": down.bfloat16()}, {"up": up.double()}, {"down": torch.cat([down, down])}, {"up": up[:, :, :8]},
        {"up": up[:, :15]}, {"up": up[0]}, {"down": down.mT.contiguous().mT},
        {"x": rows(2, 96), "weight": panels.pack(odd)},
    ):  # fmt: skip
        with pytest.raises(RuntimeError, match="found|accepted"):
            call(**change)
    with pytest.raises(RuntimeError, match="hadamard: found 64 with K=96, accepted is a multiple of 64"):
        ops.quantize_rows(rows(2, 96), hadamard=64)


def test_reference_linear_is_near() -> None:
    q = layer(40, 192, 64, 16, smooth=True, bias=True)
    x = rows(20, 192)
    for activation in ("token", "group"):
        want = reference.linear(x, q, Activation(8, activation))  # type: ignore[arg-type]
        assert reference.error(run(x, q, activation), want) < 1e-6
    assert np.isfinite(run(x, q, "token").numpy()).all()
