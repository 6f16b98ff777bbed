"""Rounding, GPTQ, statistics and channel scales, each against a naive oracle; QNT-01, QNT-04, QNT-06."""

from __future__ import annotations

import dataclasses
import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

import samples
from lowbit.quantize import (
    InputStats,
    NonFinite,
    Options,
    channel_scales,
    effective,
    gptq,
    linears,
    quantize_linears,
    rtn,
    solve,
)
from lowbit.quantize.channel import ChannelScales, normalise
from lowbit.quantize.gptq import eliminate, factorise, invert_upper
from lowbit.quantize.scales import CLIP_ASYMMETRIC, CLIP_SIGNED, CLIP_SYMMETRIC, Grid, decode, encode, fit, groups_of
from lowbit.reference import dequantize
from lowbit.types import SCHEMES, Activation, FormatError, QuantizedWeight, Scheme

W4 = SCHEMES["w4a8"]
W4_SYM = dataclasses.replace(W4, symmetric=True)
SCHEME_CASES = [
    Scheme(f"{bits}-{group}-{symmetric}", bits, group, symmetric)
    for bits in (4, 8)
    for group in (-1, 32, 64)
    for symmetric in (False, True)
]


def correlated(k: int, rows: int, seed: int = 0) -> Tensor:
    """Inputs [rows, k] with channels that depend on each other and differ in size, as those of a real layer do."""
    g = torch.Generator().manual_seed(seed)
    mix = torch.eye(k) + 0.2 * torch.randn(k, k, generator=g)
    return torch.randn(rows, k, generator=g) @ mix * torch.exp(0.8 * torch.randn(k, generator=g))


def gram(x: Tensor) -> Tensor:
    x = x.double()
    return (x.T @ x / x.shape[0]).float()


def error(x: Tensor, w: Tensor, q: QuantizedWeight) -> float:
    """||X (W - Wq)||, in float64."""
    return float((x.double() @ (w.double() - effective(q).double()).T).norm())


# --- round to nearest


def naive_rtn(w: Tensor, scheme: Scheme) -> tuple[Tensor, Tensor, Tensor]:
    """Codes, scales and zeros of a plain weight, number by number in Python floats; fp16 scales."""
    n, k = w.shape
    size = k if scheme.group_size == -1 else scheme.group_size
    groups = math.ceil(k / size)
    codes, scales, zeros = torch.zeros(n, k), torch.zeros(n, groups), torch.zeros(n, groups)
    for row in range(n):
        for g in range(groups):
            values = w[row, g * size : (g + 1) * size]
            if scheme.symmetric:
                low, high = -(2 ** (scheme.bits - 1)), 2 ** (scheme.bits - 1) - 1
                s, z = float((values.abs().max() / high).half()), 0
            else:
                low, high = 0, 2**scheme.bits - 1
                bottom, top = min(float(values.min()), 0.0), max(float(values.max()), 0.0)
                s = float(torch.tensor(top / high - bottom / high).half())
                z = min(max(round(-bottom / s), low), high)
            scales[row, g], zeros[row, g] = s, z
            for i, v in enumerate(values.tolist()):
                codes[row, g * size + i] = min(max(round(v / s) + z, low), high)
    return codes, scales, zeros


@pytest.mark.parametrize("scheme", SCHEME_CASES, ids=lambda s: s.name)
@pytest.mark.parametrize("k", (128, 80))
def test_rtn_is_the_naive_loop(scheme: Scheme, k: int) -> None:
    w = torch.randn(5, k) * 0.1
    q = rtn(w, scheme)
    codes, scales, zeros = naive_rtn(w, scheme)
    assert q.scales.dtype == torch.float16 and torch.equal(q.scales.float(), scales)
    assert (q.zeros is None) == scheme.symmetric
    if q.zeros is not None:
        assert q.zeros.dtype == torch.uint8 and torch.equal(q.zeros.float(), zeros)
    assert torch.equal(q.codes.float(), codes)
    assert q.group_size == (k if scheme.group_size == -1 else scheme.group_size) and q.bits == scheme.bits
    assert q.activation == scheme.activation
    q.check_values()


@given(
    bits=st.sampled_from((4, 8)),
    symmetric=st.booleans(),
    group=st.sampled_from((-1, 16, 64)),
    k=st.integers(1, 150),
    size=st.floats(-30, 30),
    shift=st.floats(-3, 3),
    seed=st.integers(0, 1000),
)
def test_rtn_error_is_half_a_step(
    bits: int, symmetric: bool, group: int, k: int, size: float, shift: float, seed: int
) -> None:
    g = torch.Generator().manual_seed(seed)
    w = (torch.randn(4, k, generator=g) + shift) * 10.0**size
    group = k if group > k else group
    q = rtn(w, Scheme("any", bits, group, symmetric))
    q.check_values()
    step = q.scales.double().repeat_interleave(q.group_size, 1)[:, :k]
    # A stored scale is within 2^-11 of the wanted one, and codes reach 2^bits steps away from it.
    slack = 0.5 + 2.0**bits * 2.0**-11 + 1e-3
    assert bool(((w.double() - dequantize(q).double()).abs() <= step * slack).all())


def test_scales_are_fp16_only_where_fp16_holds_them() -> None:
    assert rtn(torch.randn(4, 64), W4).scales.dtype == torch.float16
    for factor in (1e-7, 1e8):
        w = torch.randn(4, 64) * factor
        q = rtn(w, W4)
        assert q.scales.dtype == torch.float32
        assert float((w - dequantize(q)).abs().max()) <= 0.51 * float(q.scales.max())


@pytest.mark.parametrize("method", ("rtn", "gptq"))
@pytest.mark.parametrize("symmetric", (False, True))
@pytest.mark.parametrize("bits", (4, 8))
def test_qnt06_groups_with_no_content(method: str, symmetric: bool, bits: int) -> None:
    scheme = Scheme("any", bits, 32, symmetric)
    w = torch.zeros(6, 64)
    w[1, :32] = 1e-9
    w[2, 5] = 1e-9
    w[3] = 0.25
    w[4, 7] = 6e4
    w[5, :32] = -1e-42  # below the smallest normal number
    q = rtn(w, scheme) if method == "rtn" else gptq(w, torch.eye(64), scheme)
    back = dequantize(q)
    q.check_values()
    assert bool(torch.isfinite(back).all()) and bool((q.scales != 0).all())
    assert torch.equal(back[0], torch.zeros(64)) and torch.equal(back[1, 32:], torch.zeros(32))
    steps = q.scales.float().abs().repeat_interleave(32, 1)
    assert bool(((back - w).abs() <= steps).all())
    assert float((back[1, :32] - 1e-9).abs().max()) <= 1e-9  # one step of what the group can need
    assert abs(float(back[3, 0]) - 0.25) < 0.02 and abs(float(back[4, 7]) - 6e4) < 6e4 * 0.05


@pytest.mark.parametrize("shape", ((72, 80), (1, 64), (64, 1), (3, 2880)))
def test_qnt06_odd_widths_need_no_padding(shape: tuple[int, int]) -> None:
    w = torch.randn(*shape)
    x = torch.randn(16, shape[1])
    for q in (rtn(w, dataclasses.replace(W4, group_size=-1)), gptq(w, gram(x), dataclasses.replace(W4, group_size=-1))):
        assert q.codes.shape == shape and q.scales.shape == (shape[0], 1)
    short = rtn(torch.randn(4, 80), W4)  # the last group has 16 columns
    assert short.scales.shape == (4, 2) and short.codes.shape == (4, 80)


@pytest.mark.parametrize("bad", (math.nan, math.inf))
def test_non_finite_weights_are_refused(bad: float) -> None:
    w = torch.randn(4, 64)
    w[2, 3] = bad
    with pytest.raises(FormatError, match="weight: found NaN or Inf"):
        rtn(w, W4)
    with pytest.raises(FormatError, match="weight: found NaN or Inf"):
        gptq(w, torch.eye(64), W4)
    with pytest.raises(FormatError, match="bits: found 16"):
        rtn(torch.randn(4, 64), SCHEMES["fp16"])


# --- clip search


@pytest.mark.parametrize("symmetric", (False, True))
def test_clip_search_takes_the_best_candidate(symmetric: bool) -> None:
    grid = Grid(4, symmetric, torch.float32)
    w, importance = torch.randn(64, 7).double(), torch.rand(64).double()
    w[3, 2] = 6.0
    best = fit(w, grid, importance)
    for column in range(7):
        v = w[:, column]
        errors = []
        if symmetric:
            peak = v[v.abs().argmax()]
            candidates = [(float(v.abs().max()) / 7 * r, 0.0) for r in CLIP_SYMMETRIC]
            candidates += [(float(peak) / -8 * r, 0.0) for r in CLIP_SIGNED]
        else:
            low, high = min(float(v.min()), 0), max(float(v.max()), 0)
            candidates = [((high - low) / 15 * r, 0.0) for r in CLIP_ASYMMETRIC]
            candidates = [
                (s, float(min(max(round(-low * r / s), 0), 15)))
                for (s, _), r in zip(candidates, CLIP_ASYMMETRIC, strict=True)
            ]
        for s, z in candidates:
            code = ((v / s).round() + z).clamp(grid.low, grid.high)
            errors.append(float((importance * ((code - z) * s - v) ** 2).sum()))
        f = type(best)(best.scale[column], best.zero[column])
        found = float((importance * (decode(encode(v, f, grid), f) - v) ** 2).sum())
        assert found == pytest.approx(min(errors), rel=1e-5)


# --- GPTQ


def naive_gptq(
    w: Tensor, h: Tensor, order: Tensor, grid: Grid, group_size: int, static: bool, clip: bool
) -> tuple[Tensor, list[Tensor]]:
    """Column by column, the inverse Hessian of the columns that are left recomputed by elimination each time. [K, N]."""
    k = w.shape[0]
    inverse = torch.linalg.inv(h[order][:, order])
    diagonal = torch.empty(k, dtype=w.dtype)  # U_jj^2 = the j-th diagonal entry at its turn
    probe = inverse.clone()
    for j in range(k):
        diagonal[j] = probe[j, j]
        probe = probe - torch.outer(probe[:, j], probe[j]) / probe[j, j]
    importance = 1 / diagonal
    importance = importance / importance.max()
    fits: dict[int, tuple[Tensor, Tensor]] = {}
    if static:
        original = torch.empty_like(importance)
        original[order] = importance
        for g, columns in enumerate(groups_of(k, group_size)):
            fits[g] = fit(w[columns], grid, original[columns] if clip else None)
    work, codes = w[order].clone(), torch.empty_like(w)
    for j in range(k):
        g = int(order[j]) // group_size
        if not static and j % group_size == 0:
            end = min(j + group_size, k)
            fits[g] = fit(work[j:end], grid, importance[j:end] if clip else None)
        s, z = fits[g]
        code = ((work[j] / s).round() + z).clamp(grid.low, grid.high)
        codes[order[j]] = code
        residual = (work[j] - (code - z) * s) / inverse[j, j]
        work[j + 1 :] -= torch.outer(inverse[j + 1 :, j], residual)
        inverse = inverse - torch.outer(inverse[:, j], inverse[j]) / inverse[j, j]
    return codes, [fits[g][0] for g in sorted(fits)]


@pytest.mark.parametrize("clip", (False, True))
@pytest.mark.parametrize("static", (False, True))
@pytest.mark.parametrize("symmetric", (False, True))
@pytest.mark.parametrize(("k", "group"), ((96, 32), (320, 160), (300, 300), (272, 64)))
def test_blocked_update_is_column_by_column_elimination(
    clip: bool, static: bool, symmetric: bool, k: int, group: int
) -> None:
    w = torch.randn(k, 6).double()
    h = correlated(k, 4 * k).double()
    h = h.T @ h / (4 * k)
    h.diagonal().add_(0.01 * h.diagonal().mean())
    order = h.diagonal().argsort(descending=True, stable=True) if static else torch.arange(k)
    factor, _, _ = factorise(h[order][:, order], 0.0)
    assert factor is not None
    grid = Grid(4, symmetric, torch.float32)
    codes, fits, loss = eliminate(w, factor, order, grid, group, static=static, clip=clip)
    expected, scales = naive_gptq(w, h, order, grid, group, static, clip)
    assert torch.equal(codes, expected)
    zeros = torch.stack([f.zero for f in fits]).repeat_interleave(group, 0)[:k]
    residual = w - (codes - zeros) * torch.stack([f.scale for f in fits]).repeat_interleave(group, 0)[:k]
    assert torch.allclose(loss, ((residual.T @ h) * residual.T).sum(1), rtol=1e-8)
    assert all(torch.allclose(f.scale, s, rtol=1e-6, atol=0) for f, s in zip(fits, scales, strict=True))


def test_factor_is_the_upper_cholesky_of_the_inverse() -> None:
    h = gram(correlated(300, 900)).double()
    factor, damping, tried = factorise(h, 0.01)
    assert factor is not None and damping == 0.01 and tried == (0.01,)
    h.diagonal().add_(0.01 * h.diagonal().mean())
    assert torch.allclose(factor, torch.linalg.cholesky(torch.linalg.inv(h), upper=True), rtol=1e-8, atol=1e-8)
    r = torch.randn(300, 300).double().triu() + 30 * torch.eye(300).double()
    assert torch.allclose(invert_upper(r) @ r, torch.eye(300).double(), atol=1e-12)


@pytest.mark.parametrize("scheme", SCHEME_CASES, ids=lambda s: s.name)
def test_gptq_beats_rounding_by_far_on_correlated_inputs(scheme: Scheme) -> None:
    x, w = correlated(128, 1024), torch.randn(48, 128) * 0.05
    q = gptq(w, gram(x), scheme)
    q.check_values()
    assert q.scales.dtype == torch.float16 and q.perm is None and q.notes == ()
    assert error(x, w, q) < 0.8 * error(x, w, rtn(w, scheme))
    assert error(x, w, q) <= error(x, w, gptq(w, gram(x), scheme, act_order=False, clip=False)) * 1.02


@pytest.mark.parametrize("case", ("rank 1", "3 samples", "twins", "spread", "dead"))
@pytest.mark.parametrize("scheme", (W4, W4_SYM), ids=("asymmetric", "symmetric"))
@pytest.mark.parametrize("damp", (0.0, 0.01))
def test_qnt01_hessians_that_are_not_positive_definite(case: str, scheme: Scheme, damp: float) -> None:
    x = samples.awkward(case)
    w = torch.randn(64, 128)
    outcome = solve(w, gram(x), scheme, damp=damp)
    outcome.weight.check_values()
    assert error(x, w, outcome.weight) <= error(x, w, rtn(w, scheme)) * (1 + 1e-4)
    assert outcome.damping is not None and outcome.tried[-1] == outcome.damping and outcome.tried[0] == damp
    if damp == 0 and case in ("3 samples", "dead"):
        assert len(outcome.tried) > 1  # it grew, and every step is on record
    if case == "dead":  # what never fires is rounded, not thrown away
        steps = outcome.weight.scales.float().abs().repeat_interleave(64, 1)
        assert bool(((w - dequantize(outcome.weight)).abs()[:, ::3] <= 8 * steps[:, ::3]).all())
        assert float((w - dequantize(outcome.weight))[:, ::3].norm()) < 0.2 * float(w[:, ::3].norm())


def test_qnt01_damping_grows_until_an_indefinite_hessian_factorises() -> None:
    h = torch.eye(64)
    h[0, 1] = h[1, 0] = 1.05  # eigenvalue -0.05
    outcome = solve(torch.randn(8, 64), h, W4)
    assert outcome.tried == pytest.approx((0.01, 0.1)) and outcome.damping == pytest.approx(0.1)


def test_qnt01_falls_back_to_rounding_and_says_so() -> None:
    w = torch.randn(8, 64)
    never = -torch.ones(64, 64) * 50 + 51.0 * torch.eye(64)
    for h in (never, torch.zeros(64, 64)):
        outcome = solve(w, h, W4)
        assert outcome.damping is None and bool(outcome.kept.all())
        assert torch.equal(outcome.weight.codes, rtn(w, W4).codes)
        assert outcome.weight.notes[0].startswith("rounded to nearest: the Hessian")
    with pytest.raises(FormatError, match="hessian: found NaN or Inf"):
        gptq(w, torch.full((64, 64), math.nan), W4)
    with pytest.raises(FormatError, match=r"hessian: found shape \[3, 3\], accepted is \[64, 64\]"):
        gptq(w, torch.eye(3), W4)


@pytest.mark.parametrize("scheme", (W4, W4_SYM), ids=("asymmetric", "symmetric"))
def test_rows_where_gptq_is_worse_keep_rounding(scheme: Scheme) -> None:
    """Damping that drowns the Hessian leaves little but a clip search in the wrong metric: some rows lose by it."""
    x, w = correlated(64, 256), torch.randn(96, 64)
    outcome = solve(w, gram(x), scheme, damp=10)
    kept, plain = outcome.kept, rtn(w, scheme)
    assert 0 < int(kept.sum()) < 96
    assert outcome.weight.notes == (f"{int(kept.sum())} of 96 rows kept at round-to-nearest, where GPTQ was worse",)
    rows = [(x.double() @ (w - effective(q)).double().T).norm(dim=0) for q in (outcome.weight, plain)]
    assert bool((rows[0] <= rows[1] * (1 + 1e-5)).all()) and torch.equal(rows[0][kept], rows[1][kept])
    assert torch.equal(outcome.weight.codes[kept], plain.codes[kept])
    assert not torch.equal(outcome.weight.codes[~kept], plain.codes[~kept])


def test_weights_on_the_grid_stay_exact() -> None:
    scales = torch.full((16, 1), 0.125)
    codes = torch.randint(0, 16, (16, 64))
    codes[:, 0], codes[:, 1] = 0, 15
    w = (codes - 8) * scales
    x = correlated(64, 256)
    q = gptq(w, gram(x), W4)
    assert error(x, w, q) <= error(x, w, rtn(w, W4)) * (1 + 1e-4) + 1e-6
    assert torch.equal(dequantize(rtn(w, W4)), w)


def test_gptq_gives_the_same_bytes_again() -> None:
    x, w = correlated(128, 512), torch.randn(64, 128)
    a, b = gptq(w, gram(x), W4), gptq(w, gram(x), W4)
    assert torch.equal(a.codes, b.codes) and torch.equal(a.scales, b.scales)


# --- statistics


def test_qnt04_padding_and_batching() -> None:
    short, long = torch.randn(1, 3, 32), torch.randn(1, 7, 32)
    apart = InputStats(32)
    apart.add(short)
    apart.add(long)
    padded = torch.full((2, 7, 32), 1000.0)
    padded[0, :3], padded[1] = short[0], long[0]
    mask = torch.zeros(2, 7, dtype=torch.bool)
    mask[0, :3] = mask[1] = True
    together = InputStats(32)
    together.add(padded, mask)
    exact = torch.cat([short[0], long[0]]).double()
    expected = (exact.T @ exact / 10).float()
    for stats in (apart, together):
        assert stats.tokens == 10
        assert torch.allclose(stats.hessian(), expected, rtol=1e-5, atol=1e-6)
        assert float(stats.absmax().max()) < 10
    assert torch.equal(apart.hessian(), together.hessian()) and torch.equal(apart.sample(), together.sample())


def test_qnt04_fp16_does_not_overflow() -> None:
    stats = InputStats(4)
    stats.add(torch.tensor([[300.0, 0, 1, -2]], dtype=torch.float16))
    assert stats.hessian().diagonal().tolist() == [90000.0, 0.0, 1.0, 4.0]
    huge = InputStats(2)
    huge.add(torch.tensor([[1e18, 1.0]]))
    assert torch.allclose(huge.hessian(), torch.tensor([[1e36, 1e18], [1e18, 1.0]]))


@given(cuts=st.lists(st.integers(1, 5200), max_size=6), seed=st.integers(0, 50))
def test_statistics_do_not_depend_on_the_split(cuts: list[int], seed: int) -> None:
    x = torch.randn(5200, 24, generator=torch.Generator().manual_seed(seed))
    whole, split = InputStats(24, rows=50, seed=3), InputStats(24, rows=50, seed=3)
    whole.add(x.view(2, 50, 52, 24))
    edges = [0, *sorted(set(cuts) - {5200}), 5200]
    for a, b in zip(edges, edges[1:], strict=False):
        split.add(x[a:b])
    assert whole.tokens == split.tokens == 5200
    assert torch.equal(whole.hessian(), split.hessian()) and torch.equal(whole.sample(), split.sample())
    exact = x.double()
    assert torch.allclose(whole.hessian().double(), exact.T @ exact / 5200, rtol=1e-5, atol=1e-6)
    assert torch.allclose(whole.rms().double(), exact.square().mean(0).sqrt(), rtol=1e-5)
    assert torch.equal(whole.absmax(), x.abs().amax(0))
    rows = {tuple(r) for r in x.tolist()}
    assert whole.sample().shape == (50, 24) and all(tuple(r) in rows for r in whole.sample().tolist())


def test_the_sample_is_drawn_from_everywhere() -> None:
    stats = InputStats(1, rows=256, hessian=False)
    stats.add(torch.arange(20000.0)[:, None])
    sample = stats.sample()[:, 0]
    assert sample.unique().numel() == 256 and abs(float(sample.mean()) - 10000) < 1500
    assert float(stats.rms()) == pytest.approx(math.sqrt(sum(i * i for i in range(20000)) / 20000))
    with pytest.raises(ValueError, match="without a Hessian"):
        stats.hessian()


def test_hessian_is_symmetric_and_a_long_sum_stays_exact() -> None:
    stats = InputStats(600)
    x = correlated(600, 700)
    for _ in range(8):
        stats.add(x)
    h = stats.hessian()
    assert torch.equal(h, h.T)
    assert torch.allclose(h, gram(x), rtol=1e-5, atol=1e-5 * float(gram(x).abs().max()))


@pytest.mark.parametrize("bad", (math.nan, math.inf, -math.inf))
def test_qnt01_non_finite_activations_are_named(bad: float) -> None:
    x = torch.randn(2, 5, 8)
    x[1, 2, 3] = bad
    with pytest.raises(NonFinite, match="row 7, channel 3") as caught:
        InputStats(8).add(x)
    assert caught.value.row == 7
    mask = torch.ones(2, 5, dtype=torch.bool)
    mask[0, 0] = False
    with pytest.raises(NonFinite, match="row 7"):
        InputStats(8).add(x, mask)
    mask[1, 2] = False
    InputStats(8).add(x, mask)  # padding may hold anything
    with pytest.raises(FormatError, match="width 8, accepted is 9"):
        InputStats(9).add(x)


# --- channel scales and layers


def stats_of(x: Tensor) -> InputStats:
    stats = InputStats(x.shape[-1])
    stats.add(x)
    return stats


@pytest.mark.parametrize("scheme", (W4, W4_SYM, SCHEMES["w8a8"]), ids=lambda s: f"{s.name}-{s.symmetric}")
def test_channel_scales_lower_the_error_they_are_judged_by(scheme: Scheme) -> None:
    x, w = torch.randn(512, 128), torch.randn(64, 128) * 0.05
    x[:, 5] *= 40
    x[:, 70] *= 25
    x[:, 9] = 0
    s = stats_of(x)
    found = channel_scales(w, s.sample(), s.rms(), s.absmax(), scheme)
    assert found.smooth is not None and found.error < found.plain
    assert (
        found.smooth.dtype == torch.float16
        and bool((found.smooth > 0).all())
        and bool(torch.isfinite(found.smooth).all())
    )
    again = rtn(w * found.smooth.float(), scheme).with_(smooth=found.smooth)
    if scheme.activation.granularity == "group":
        assert error(x, w, again) < 0.8 * error(x, w, rtn(w, scheme))


def test_channel_scales_are_normalised() -> None:
    s = torch.exp(torch.randn(64))
    assert torch.equal(normalise(s), normalise(s * 2.0**20))
    assert float(normalise(s).max() * normalise(s).min()) == pytest.approx(1, rel=2e-3)
    assert normalise(torch.tensor([1e-9, 1.0, 1e9])).tolist() == pytest.approx([1e-3, 1, 1e3], rel=1e-3)


@pytest.mark.parametrize("size", (1e-6, 1e6))
def test_qnt04_extreme_channels_stay_inside_fp16(size: float) -> None:
    x, w = torch.randn(512, 64), torch.randn(16, 64)
    x[:, 3] *= size
    s = stats_of(x)
    found = channel_scales(w, s.sample(), s.rms(), s.absmax(), W4)
    if found.smooth is not None:
        assert float(found.smooth.min()) >= 0.9e-3 and float(found.smooth.max()) <= 1.1e3
    results = quantize_linears({"a": w}, s, W4, Options())
    q, row = results["a"]
    q.check_values("a")
    assert row.error_after <= row.error_before


def test_linears_of_one_input_share_scales_and_equal_a_joint_run() -> None:
    x = correlated(128, 1024)
    weights = {"q": torch.randn(64, 128), "k": torch.randn(32, 128) * 0.1, "v": torch.randn(32, 128)}
    s = stats_of(x)
    results = quantize_linears(weights, s, W4, Options())
    smooths = [q.smooth for q, _ in results.values()]
    assert smooths[0] is not None and all(m is not None and torch.equal(m, smooths[0]) for m in smooths)
    h = s.hessian() / (smooths[0].float()[:, None] * smooths[0].float()[None, :])
    for name, (q, row) in results.items():
        alone = gptq(weights[name] * smooths[0].float(), h, W4)
        assert float((alone.codes == q.codes).float().mean()) > 0.999 and torch.equal(alone.scales, q.scales)
        assert row.method == "gptq+scales" and row.damping == 0.01 and row.tokens == 1024
        exact = float((s.sample() @ (weights[name] - effective(q)).T).norm() / (s.sample() @ weights[name].T).norm())
        assert row.error_after == pytest.approx(exact, rel=1e-4) and row.error_after < row.error_before


def test_a_layer_never_gets_worse_than_rounding() -> None:
    x = torch.randn(1, 64).repeat(300, 1)
    for w in (torch.zeros(8, 64), torch.ones(8, 64), torch.randn(8, 64)):
        q, row = quantize_linears({"a": w}, stats_of(x), W4, Options())["a"]
        assert row.error_after <= row.error_before and bool(torch.isfinite(effective(q)).all())


def test_a_layer_that_scales_would_harm_is_rounded_and_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    bad = normalise(torch.logspace(-3, 3, 64)[torch.randperm(64)])
    monkeypatch.setattr(linears, "channel_scales", lambda *_: ChannelScales(bad, "bad", 0.0, 1.0))
    x, w = torch.randn(300, 64), torch.randn(8, 64)
    q, row = quantize_linears({"a": w}, stats_of(x), W4, Options())["a"]
    assert row.method == "rtn" and row.damping is None and row.error_after == row.error_before
    assert row.notes == ("channel scales bad", "rounded to nearest: gptq was worse in ||X (W - Wq)||")
    assert q.smooth is None and torch.equal(q.codes, rtn(w, W4).codes)


def test_without_statistics_or_tokens_rounding_is_what_remains() -> None:
    w = torch.randn(8, 64)
    q, row = quantize_linears({"a": w}, None, W4, Options("rtn"))["a"]
    assert torch.equal(q.codes, rtn(w, W4).codes) and row.method == "rtn" and row.notes == ()
    q, row = quantize_linears({"a": w}, InputStats(64), W4, Options())["a"]
    assert (
        torch.equal(q.codes, rtn(w, W4).codes)
        and row.tokens == 0
        and row.notes == ("saw no token: rounded to nearest",)
    )


def test_options_are_checked() -> None:
    with pytest.raises(FormatError, match="method: found 'awq', accepted are rtn, gptq"):
        Options("awq")  # type: ignore[arg-type]
    with pytest.raises(FormatError, match="damp: found -1"):
        Options(damp=-1)


def test_w8a8_carries_its_activation_rule() -> None:
    q = rtn(torch.randn(8, 80), SCHEMES["w8a8"])
    assert q.activation == Activation(8, "token") and q.scales.shape == (8, 1) and q.codes.dtype == torch.int8
    assert int(q.codes.abs().max()) == 127
