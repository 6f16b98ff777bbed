"""Hadamard, low rank, two-level scales, smoothing and SVDQuant, each against a naive oracle; QNT-01, QNT-05, QNT-06."""

from __future__ import annotations

import dataclasses
import math
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

import samples
from lowbit import reference
from lowbit.quantize import (
    InputStats,
    Options,
    effective,
    gptq,
    linears,
    lowrank,
    quantize_linears,
    rtn,
    smoothing,
    svdquant,
)
from lowbit.quantize.channel import fake_quantize
from lowbit.quantize.hadamard import rotate, rotate_hessian
from lowbit.quantize.lowrank import Factors, metric, refit, stored, truncated
from lowbit.quantize.scales import CHANNEL_DIVISORS, Fit, Grid, decode, encode, groups_of, share_channel
from lowbit.quantize.smooth import CLIPS, activation_clip
from lowbit.reference import dequantize, expand_int8, two_level
from lowbit.types import SCHEMES, Activation, FormatError, LowRank, QuantizedWeight, Scheme

W4A4 = SCHEMES["w4a4"]


def outliers(k: int, rows: int, seed: int = 0) -> Tensor:
    """Inputs [rows, k] that depend on each other, a few channels far larger than the rest."""
    g = torch.Generator().manual_seed(seed)
    x = torch.randn(rows, k, generator=g) @ (torch.eye(k) + 0.1 * torch.randn(k, k, generator=g))
    x[:, ::29] *= 15
    return x


def gram(x: Tensor) -> Tensor:
    return (x.double().T @ x.double() / x.shape[0]).float()


def stats_of(x: Tensor) -> InputStats:
    stats = InputStats(x.shape[-1])
    stats.add(x)
    return stats


def sylvester(block: int) -> Tensor:
    h = torch.ones(1, 1, dtype=torch.float64)
    while h.shape[0] < block:
        h = torch.kron(torch.tensor([[1.0, 1.0], [1.0, -1.0]], dtype=torch.float64), h)
    return h


# --- Hadamard


@pytest.mark.parametrize("block", (1, 2, 8, 64, 256))
def test_hadamard_is_sylvesters_matrix(block: int) -> None:
    x = torch.randn(3, 5, 2 * block)
    want = (x.double().reshape(3, 5, 2, block) @ sylvester(block)).reshape(x.shape) / math.sqrt(block)
    assert torch.allclose(reference.hadamard(x, block).double(), want, atol=1e-5)
    signs = reference.hadamard(torch.eye(block), block) * math.sqrt(block)  # row i: H e_i
    assert torch.allclose(signs.double(), sylvester(block), atol=1e-5)


def test_hadamard_is_orthogonal_and_its_own_inverse() -> None:
    h = rotate(torch.eye(192))
    assert torch.equal(h @ h.T, torch.eye(192)) and torch.equal(h, h.T)  # entries ±1/8: exact
    assert int((h != 0).sum()) == 192 * 64
    x = torch.randn(40, 192)
    assert torch.allclose(rotate(rotate(x)), x, atol=1e-5)
    assert torch.allclose(rotate(x).norm(dim=1), x.norm(dim=1), rtol=1e-5)
    w = torch.randn(7, 192)
    assert torch.allclose(rotate(x) @ rotate(w).T, x @ w.T, atol=1e-4)
    assert torch.allclose(rotate_hessian(gram(x)), gram(rotate(x)), atol=1e-5)


def test_a_row_is_rotated_to_the_same_bits_alone() -> None:
    x = torch.randn(33, 128)
    assert torch.equal(rotate(x), torch.stack([rotate(row) for row in x]))
    assert rotate(torch.empty(0, 128)).shape == (0, 128)
    for width in (80, 63):
        with pytest.raises(FormatError, match=f"hadamard: found width {width}, accepted are multiples of 64"):
            rotate(torch.randn(2, width))
    with pytest.raises(FormatError, match="hadamard: found block 48 with width 96"):
        reference.hadamard(torch.randn(2, 96), 48)


# --- low rank


@pytest.mark.parametrize(("n", "k"), ((96, 40), (40, 96), (64, 64), (1, 30), (30, 1)))
@pytest.mark.parametrize("rank", (0, 1, 16, 200))
def test_truncated_is_the_singular_value_decomposition(n: int, k: int, rank: int) -> None:
    m = torch.randn(n, k)
    used = min(rank, n, k)
    u, s, v = torch.linalg.svd(m.double(), full_matrices=False)
    want = (u[:, :used] * s[:used]) @ v[:used]
    found = truncated(m, rank)
    assert found.down.shape == (k, used) and found.up.shape == (n, used)
    assert torch.allclose(found.product().double(), want, atol=1e-5)
    assert torch.allclose(found.up.norm(dim=0).double(), s[:used], rtol=1e-5)
    assert torch.allclose(found.down.T @ found.down, torch.eye(used), atol=1e-5)


def test_subspace_iteration_comes_close_to_the_optimum(monkeypatch: pytest.MonkeyPatch) -> None:
    m = torch.randn(300, 260) @ torch.diag(torch.linspace(1, 0.2, 260))
    left = float((m - truncated(m, 16).product()).norm())
    assert float((m - truncated(m, 16, rough=True).product()).norm()) < 1.02 * left
    monkeypatch.setattr(lowrank, "EXACT", 0)
    found = truncated(m, 16)
    assert left <= float((m - found.product()).norm()) < 1.001 * left
    assert torch.equal(found.up, truncated(m, 16).up)  # a fixed start


def test_qnt05_matrices_with_little_in_them() -> None:
    assert not bool(truncated(torch.zeros(64, 48), 16).product().any())
    one = torch.outer(torch.randn(64), torch.randn(48))
    assert torch.allclose(truncated(one, 16).product(), one, atol=1e-5)
    twins = torch.diag(torch.tensor([3.0, 3.0, 1.0] + [0.0] * 29))  # two equal singular values
    assert torch.allclose(truncated(twins, 2).product(), twins * (twins > 2), atol=1e-6)
    for rough in (False, True):
        with pytest.raises(FormatError, match="low rank: found NaN or Inf"):
            truncated(torch.full((64, 64), math.nan), 16, rough=rough)


@pytest.mark.parametrize("rank", (1, 8, 16))
def test_refit_is_the_least_squares_low_rank(rank: int) -> None:
    x, e = outliers(64, 2000), torch.randn(48, 64) * 0.02
    through = metric(gram(x), 0.0)
    assert torch.allclose((through @ through.T).float(), gram(x), rtol=1e-4, atol=1e-4)
    found = refit(e, rank, through)
    # no rank-r matrix does better than what the singular values of E C leave (Eckart and Young)
    values = torch.linalg.svdvals(e.double() @ through)
    left = float((((e - found.product()).double() @ through) ** 2).sum())
    assert left == pytest.approx(float(values[rank:].square().sum()), rel=1e-4)
    # with one factor held, the other is the least-squares solution on the inputs themselves
    hidden, want = x.double() @ found.down.double(), x.double() @ e.double().T
    assert torch.allclose(torch.linalg.lstsq(hidden, want).solution.T, found.up.double(), rtol=1e-3, atol=1e-5)
    plain = truncated(e, rank)
    assert left < float((((e - plain.product()).double() @ through) ** 2).sum())


def test_metric_damps_until_it_factorises() -> None:
    assert torch.equal(metric(torch.zeros(8, 8)), torch.eye(8).double())
    h = torch.ones(8, 8)
    c = metric(h)
    assert torch.allclose(c @ c.T, h.double() + 0.01 * torch.eye(8).double())
    h = torch.eye(8)
    h[0, 1] = h[1, 0] = 1.05  # eigenvalue -0.05
    assert torch.allclose(metric(h) @ metric(h).T, h.double() + 0.1 * torch.eye(8).double(), atol=1e-7)


def test_stored_factors_are_float16_balanced_and_padded() -> None:
    f = truncated(torch.randn(48, 64), 8)
    low = stored(f, 16)
    assert low.down.dtype == low.up.dtype == torch.float16
    assert low.down.shape == (64, 16) and low.up.shape == (48, 16)
    assert not bool(low.down[:, 8:].any()) and not bool(low.up[:, 8:].any())
    assert torch.allclose(low.down[:, :8].float().norm(dim=0), low.up[:, :8].float().norm(dim=0), rtol=1e-3)
    product = low.up.float() @ low.down.float().T
    assert float((product - f.product()).norm()) < 1e-3 * float(f.product().norm())
    for size in (1e-12, 1e12):  # outside what float16 holds
        low = stored(truncated(torch.randn(48, 64) * size, 8), 16)
        assert low.down.dtype == torch.float32 and bool(torch.isfinite(low.up).all())
    nothing = stored(Factors(torch.zeros(64, 4), torch.zeros(48, 4)), 16)
    assert not bool(nothing.down.any()) and not bool(nothing.up.any())


# --- two-level and channel scales


def naive_shared(sizes: list[float], columns: Tensor, group: int) -> tuple[float, list[float]]:
    """(loss, scales) of the best channel scale for one row of weights, number by number."""
    best: tuple[float, list[float]] = (math.inf, [])
    for divisor in CHANNEL_DIVISORS:
        raw = max(sizes) / divisor
        exponent = math.floor(math.log2(raw)) - 6
        channel = round(raw / 2**exponent) * 2**exponent
        scales = [min(max(round(s / channel), 1), 15) * channel for s in sizes]
        loss = 0.0
        for i, w in enumerate(columns.tolist()):
            s = scales[i // group]
            loss += (min(max(round(w / s), -8), 7) * s - w) ** 2
        if loss < best[0]:
            best = (loss, scales)
    return best


def test_a_channel_scale_is_the_best_of_five() -> None:
    w = torch.randn(128, 20).double() * torch.exp(torch.randn(4, 20)).double().repeat_interleave(32, 0)
    grid = Grid(4, True, torch.float32)
    fits = [Fit(w[c].abs().amax(0) / 7, torch.zeros(20).double()) for c in groups_of(128, 32)]
    found = share_channel(fits, w, grid, 32)
    for row in range(20):
        loss, scales = naive_shared([float(f.scale[row]) for f in fits], w[:, row], 32)
        got = [float(f.scale[row]) for f in found]
        error = sum(
            float((decode(encode(w[c], f, grid), f) - w[c])[:, row].square().sum())
            for c, f in zip(groups_of(128, 32), found, strict=True)
        )
        assert error == pytest.approx(loss, rel=1e-9) and got == pytest.approx(scales, rel=1e-9)


@given(
    n=st.integers(1, 12),
    groups=st.integers(1, 6),
    size=st.floats(-25, 25),
    spread=st.floats(0, 8),
    clip=st.booleans(),
    seed=st.integers(0, 1000),
)
def test_two_level_expands_to_int8_exactly(
    n: int, groups: int, size: float, spread: float, clip: bool, seed: int
) -> None:
    g = torch.Generator().manual_seed(seed)
    k = 16 * groups
    w = torch.randn(n, k, generator=g) * 2.0**size
    w = w * torch.exp(spread * torch.rand(n, groups, generator=g)).repeat_interleave(16, 1)
    w[0, :16] = 0
    scheme = Scheme("s", 4, 16, True)
    h = gram(torch.randn(64, k, generator=g))
    for q in (rtn(w, scheme, "two-level"), gptq(w, h, scheme, scales="two-level", clip=clip)):
        q.check_values()
        ints, channel = expand_int8(q)
        assert ints.dtype == torch.int8 and int(ints.abs().max()) <= 120
        assert torch.equal(channel[:, None] * ints.float(), dequantize(q))
        levels = two_level(q.scales)
        assert levels is not None and int(levels.steps.abs().min()) >= 1 and int(levels.steps.abs().max()) <= 15
        assert torch.equal(levels.channel[:, None] * levels.steps.float(), q.scales.float())
    assert not bool(dequantize(rtn(w, scheme, "two-level"))[0, :16].any())


def test_two_level_of_scales_that_are_none() -> None:
    assert two_level(torch.tensor([[1.0, 1.5], [1.0, 1.01]])) is None
    assert two_level(torch.tensor([[1.0, 16.0]])) is None
    found = two_level(torch.tensor([[-0.75, 0.5, 0.0], [0.0, 0.0, 0.0], [7.0, 7.0, -7.0]]))
    assert found is not None
    assert found.steps.tolist() == [[-3, 2, 0], [0, 0, 0], [1, 1, -1]] and found.channel.tolist() == [0.25, 1.0, 7.0]
    with pytest.raises(ValueError, match="scales: found none that are integer multiples"):
        expand_int8(rtn(torch.randn(4, 128), Scheme("s", 4, 64, True)))


def test_channel_scales_are_one_a_row_and_expand_as_well() -> None:
    x, w = outliers(128, 600), torch.randn(24, 128)
    for q in (rtn(w, W4A4, "channel"), gptq(w, gram(x), W4A4, scales="channel")):
        assert q.scales.shape == (24, 1) and q.group_size == 128
        ints, channel = expand_int8(q)
        assert torch.equal(channel[:, None] * ints.float(), dequantize(q))
    assert float((x @ (w - dequantize(q)).T).norm()) < float((x @ (w - dequantize(rtn(w, W4A4, "channel"))).T).norm())


@pytest.mark.parametrize("act_order", (False, True))
def test_gptq_behind_two_level_scales_still_beats_rounding(act_order: bool) -> None:
    x, w = outliers(256, 1000), torch.randn(64, 256) * 0.05

    def lost(q: QuantizedWeight) -> float:
        return float((x @ (w - dequantize(q)).T).norm())

    two = gptq(w, gram(x), W4A4, scales="two-level", act_order=act_order)
    assert lost(two) < 0.8 * lost(rtn(w, W4A4, "two-level"))
    assert lost(two) < 1.15 * lost(gptq(w, gram(x), W4A4, act_order=act_order))


def test_scales_are_checked() -> None:
    w = torch.randn(8, 64)
    with pytest.raises(FormatError, match="scales: found 'row', accepted are group, two-level, channel"):
        rtn(w, W4A4, "row")  # type: ignore[arg-type]
    for scheme in (SCHEMES["w4a8"], SCHEMES["w8a8"]):
        with pytest.raises(FormatError, match="scales: found two-level with . bits .* accepted are symmetric 4-bit"):
            gptq(w, torch.eye(64), scheme, scales="two-level")
    with pytest.raises(FormatError, match="scales: found 'row'"):
        Options(scales="row")  # type: ignore[arg-type]


# --- 4-bit activations


def test_four_bit_activations_number_by_number() -> None:
    x = torch.randn(5, 130)
    x[0, :64], x[1, 3], x[2, 70] = 0, math.nan, math.inf
    for clip in (1.0, 0.95):
        codes, scales = reference.quantize_rows(x, 64, Activation(4, "group", clip))
        assert codes.dtype == torch.int8 and scales.shape == (5, 3)
        for row in range(5):
            for g in range(3):
                part = x[row, g * 64 : (g + 1) * 64]
                amax = part.abs().max()
                if not bool(torch.isfinite(amax)):
                    assert not math.isfinite(float(scales[row, g])) and not bool(codes[row, g * 64 : g * 64 + 64].any())
                    continue
                sa = clip * amax / 7
                assert float(scales[row, g]) == float(sa)
                for i, v in enumerate(part):
                    want = min(max(round(float(v / sa)), -8), 7) if float(amax) else 0
                    assert int(codes[row, g * 64 + i]) == want


@pytest.mark.parametrize("group", (32, 64, 192))
def test_four_bit_activations_come_in_64_whatever_the_weight_does(group: int) -> None:
    x, w = torch.randn(7, 192), torch.randn(12, 192)
    q = rtn(w, Scheme("s", 4, group, True, Activation(4, "group")))
    q = q.with_(smooth=torch.rand(192).half() + 0.5, hadamard=64, perm=torch.randperm(192).to(torch.int32))
    q = q.with_(low_rank=LowRank(torch.randn(192, 16).half(), torch.randn(12, 16).half()), bias=torch.randn(12))
    inside = rotate(x / q.smooth.float())  # type: ignore[union-attr]
    seen = fake_quantize(inside[:, q.perm.long()], W4A4, group)  # type: ignore[union-attr]
    w = reference.dequantize_codes(q)
    branch = (inside @ q.low_rank.down.float()) @ q.low_rank.up.float().T  # type: ignore[union-attr]
    assert torch.allclose(reference.linear(x, q), seen @ w.T + branch + q.bias, rtol=1e-4, atol=1e-4)
    exact = reference.linear(x, q, Activation(16, "none"))
    assert torch.allclose(x @ effective(q).T + q.bias, exact, rtol=1e-3, atol=1e-3)
    assert 0.02 < reference.error(reference.linear(x, q), exact) < 0.3


# --- smoothing


def test_smoothing_lowers_the_error_that_the_layer_will_have() -> None:
    x = outliers(128, 512)
    weights = [torch.randn(48, 128) * 0.05, torch.randn(80, 128) * 0.05]
    s = stats_of(x)
    sample = s.sample()
    for rank, block in ((0, 0), (16, 0), (16, 64)):
        found = smoothing(weights, sample, s.rms(), s.absmax(), W4A4, rank=rank, hadamard=block)
        assert found.smooth is not None and found.error < found.plain
        assert found.smooth.dtype == torch.float16 and bool((found.smooth > 0).all())
        total = size = 0.0  # what reference.linear makes of the winner
        for w in weights:
            inside = w * found.smooth.float()
            inside = rotate(inside) if block else inside
            low = truncated(inside, rank, rough=True)
            q = rtn(inside - low.product(), W4A4).with_(smooth=found.smooth, hadamard=block)
            q = q.with_(low_rank=LowRank(low.down, low.up) if rank else None)
            total += float((reference.linear(sample, q) - sample @ w.T).square().sum())
            size += float((sample @ w.T).square().sum())
        assert found.error == pytest.approx(total / size, rel=0.02)


@pytest.mark.parametrize("shape", ("flat", "peaked"))
def test_the_clip_of_activations_is_the_best_of_a_few(shape: str) -> None:
    x = outliers(128, 256)
    if shape == "flat":  # every entry of a group equally large: nothing is gained by clipping
        x = torch.sign(x) * torch.rand(256, 128).clamp_min(0.98)
    weights = [torch.randn(40, 128), torch.randn(24, 128)]
    solved = [svdquant([w], gram(x), W4A4)[0].weight for w in weights]
    losses = {
        clip: sum(
            float((reference.linear(x, q, Activation(4, "group", clip)) - x @ w.T).square().sum())
            for w, q in zip(weights, solved, strict=True)
        )
        for clip in CLIPS
    }
    found = activation_clip(weights, solved, x)
    assert losses[found] == pytest.approx(min(losses.values()), rel=1e-4)
    assert found < 1 or shape == "flat"


# --- SVDQuant


def lost(x: Tensor, w: Tensor, q: QuantizedWeight) -> float:
    return reference.error(reference.linear(x, q), x @ w.T)


def test_the_default_recipe_beats_the_published_one_beats_rounding() -> None:
    x, w = outliers(192, 2000), torch.randn(128, 192) * 0.05
    s = stats_of(x)
    smooth = smoothing([w], s.sample(), s.rms(), s.absmax(), W4A4).smooth
    found = svdquant([w], s.hessian(), W4A4, smooth=smooth)[0]
    published = svdquant([w], s.hessian(), W4A4, recipe="iterative")[0]
    for one in (found, published):
        one.weight.check_values()
        assert one.weight.codes.dtype == torch.int8 and one.weight.activation == Activation(4, "group")
        low = one.weight.low_rank
        assert low is not None and low.down.shape == (192, 16) and low.down.dtype == torch.float16 and one.rank == 16
    assert published.weight.smooth is None and published.weight.hadamard == 0
    assert found.weight.hadamard == 64 and torch.equal(found.weight.smooth, smooth)
    held_out = outliers(192, 500)[-400:]
    by = [lost(held_out, w, q) for q in (found.weight, published.weight, rtn(w, W4A4))]
    assert by[0] < 0.4 * by[1] < 0.4 * by[2]
    bare = svdquant([w], s.hessian(), W4A4, rank=0, smooth=smooth)[0]
    assert bare.weight.low_rank is None and by[0] < lost(held_out, w, bare.weight)
    wide = svdquant([w], s.hessian(), W4A4, rank=64, smooth=smooth)[0]
    assert lost(held_out, w, wide.weight) < by[0]


def test_the_published_recipe_is_what_it_says() -> None:
    x, w = outliers(128, 1000), torch.randn(40, 128)
    h = gram(x)
    best: tuple[float, QuantizedWeight, Tensor] | None = None
    low, rounds = torch.zeros_like(w), []
    for _ in range(3):
        q = gptq(w - low, h, W4A4, act_order=False, clip=False)
        u, s, v = torch.linalg.svd((w - dequantize(q)).double(), full_matrices=False)
        factors = stored(Factors(v[:16].T.float(), (u[:, :16] * s[:16]).float()), 16)
        low = factors.up.float() @ factors.down.float().T
        rest = w - dequantize(q) - low
        rounds.append(float(((rest @ h) * rest).sum()))
        if best is not None and rounds[-1] >= best[0]:
            break
        best = (rounds[-1], q, low)
    found = svdquant([w], h, W4A4, recipe="iterative")[0]
    assert found.errors == pytest.approx(rounds, rel=1e-3)
    assert best is not None and torch.equal(found.weight.codes, best[1].codes)
    assert found.weight.low_rank is not None
    got = found.weight.low_rank.up.float() @ found.weight.low_rank.down.float().T
    assert torch.allclose(got, best[2], atol=2e-3 * float(best[2].abs().max()))


@pytest.mark.parametrize("recipe", ("default", "iterative"))
def test_qnt05_the_round_of_least_error_is_kept(recipe: Any) -> None:
    x = outliers(128, 700)
    for seed in range(6):
        w = torch.randn(32, 128, generator=torch.Generator().manual_seed(seed))
        one = svdquant([w], gram(x), W4A4, recipe=recipe, rank=16, hadamard=0)[0]
        rest = w - effective(one.weight)
        assert float(((rest @ gram(x)) * rest).sum()) == pytest.approx(min(one.errors), rel=1e-3)


@pytest.mark.parametrize("recipe", ("default", "iterative"))
@pytest.mark.parametrize("scales", ("group", "two-level", "channel"))
def test_linears_of_one_input_together_are_as_each_alone(recipe: Any, scales: Any) -> None:
    x = outliers(128, 900)
    weights = [torch.randn(n, 128) for n in (64, 48, 32)]
    smooth = (torch.rand(128) + 0.5).half()
    both = svdquant(weights, gram(x), W4A4, recipe=recipe, scales=scales, smooth=smooth)
    for w, one in zip(weights, both, strict=True):
        alone = svdquant([w], gram(x), W4A4, recipe=recipe, scales=scales, smooth=smooth)[0]
        assert alone.errors[0] == pytest.approx(one.errors[0], rel=0.01)  # later rounds amplify the last bits of sums
        assert min(alone.errors) == pytest.approx(min(one.errors), rel=0.05)
        assert (two_level(one.weight.scales) is not None) == (scales != "group")
    again = svdquant(weights, gram(x), W4A4, recipe=recipe, scales=scales, smooth=smooth)
    for a, b in zip(both, again, strict=True):
        assert torch.equal(a.weight.codes, b.weight.codes) and torch.equal(a.weight.scales, b.weight.scales)
        assert all(torch.equal(p, q) for p, q in zip(a.weight.low_rank or (), b.weight.low_rank or (), strict=True))


@pytest.mark.parametrize(("n", "k"), ((8, 64), (1, 64), (64, 8)))
def test_qnt05_narrow_layers_get_the_rank_they_have(n: int, k: int) -> None:
    w, x = torch.randn(n, k), torch.randn(300, k)
    scheme = dataclasses.replace(W4A4, group_size=-1)
    for recipe in ("default", "iterative"):
        one = svdquant([w], gram(x), scheme, recipe=recipe, hadamard=64 if k == 64 else 0)[0]  # type: ignore[arg-type]
        assert one.rank == min(16, n, k) and one.weight.low_rank is not None
        assert one.weight.low_rank.down.shape == (k, 16) and one.weight.low_rank.up.shape == (n, 16)
        exact = reference.linear(x, one.weight, Activation(16, "none"))  # a full rank stands for all of w
        assert reference.error(exact, x @ w.T) < 2e-3


def test_qnt05_ranks_and_weights_that_are_refused() -> None:
    w, h = torch.randn(64, 64), torch.eye(64)
    for rank in (15, 17, 96, 128, -1):
        with pytest.raises(FormatError, match=f"rank: found {rank}, accepted are 0, 16, 32, 64"):
            svdquant([w], h, W4A4, rank=rank)
        with pytest.raises(FormatError, match=f"rank: found {rank}"):
            Options("svdquant", rank=rank)
    with pytest.raises(FormatError, match="recipe: found 'best', accepted are default, iterative"):
        svdquant([w], h, W4A4, recipe="best")  # type: ignore[arg-type]
    for recipe in ("default", "iterative"):
        with pytest.raises(FormatError, match="found NaN or Inf"):
            svdquant([torch.full((64, 64), math.nan)], h, W4A4, recipe=recipe)  # type: ignore[arg-type]
        with pytest.raises(FormatError, match="hessian: found NaN or Inf"):
            svdquant([w], torch.full((64, 64), math.inf), W4A4, recipe=recipe)  # type: ignore[arg-type]
        nothing = svdquant([w * 0], h, W4A4, recipe=recipe)[0].weight  # type: ignore[arg-type]
        assert not bool(effective(nothing).any())
        one = svdquant([torch.outer(w[0], w[1])], h, W4A4, recipe=recipe)[0].weight  # type: ignore[arg-type]
        one.check_values()
        assert float((effective(one) - torch.outer(w[0], w[1])).norm()) < 0.02 * float(torch.outer(w[0], w[1]).norm())


@pytest.mark.parametrize("case", ("rank 1", "3 samples", "twins", "spread", "dead", "zero"))
@pytest.mark.parametrize("recipe", ("default", "iterative"))
def test_qnt01_hessians_that_are_not_positive_definite(case: str, recipe: Any) -> None:
    x = samples.awkward(case)
    w = torch.randn(64, 128)
    q, row = quantize_linears({"a": w}, stats_of(x), W4A4, Options("svdquant", recipe=recipe))["a"]
    q.check_values()
    assert bool(torch.isfinite(effective(q)).all()) and row.tokens == x.shape[0]
    assert row.error_after <= row.error_before + 1e-6 and row.method.startswith(("svdquant16", "rtn"))
    assert case == "zero" or row.damping is not None
    assert any("no factorisation" in note for note in row.notes) == (row.damping is None)
    if case == "dead":  # what never fires is kept all the same
        assert float((w - effective(q))[:, ::3].norm()) < 0.6 * float(w[:, ::3].norm())


@pytest.mark.parametrize("fill", ("zero", "tiny", "one tiny", "equal", "huge"))
@pytest.mark.parametrize("scales", ("group", "two-level", "channel"))
def test_qnt06_groups_with_little_in_them(fill: str, scales: Any) -> None:
    w = torch.randn(16, 128)
    block = {"zero": torch.zeros(64), "tiny": torch.full((64,), 1e-9), "equal": torch.full((64,), 0.3)}
    block |= {"one tiny": torch.zeros(64).index_fill(0, torch.tensor(5), 1e-9), "huge": torch.full((64,), 6e4)}
    w[3, :64] = block[fill]
    w[4] = torch.cat([block[fill], block[fill]])
    q = rtn(w, W4A4, scales)
    q.check_values()
    step = q.scales.float().abs().repeat_interleave(q.group_size, 1)
    assert bool((q.scales != 0).all()) and bool(((dequantize(q) - w).abs() <= step * 0.51).all())
    one = svdquant([w], torch.eye(128), W4A4, scales=scales, hadamard=0)[0].weight
    one.check_values()
    assert bool(torch.isfinite(effective(one)).all())
    if fill == "zero":
        assert not bool(dequantize(q)[4].any())


def test_rows_of_the_report_say_what_was_done() -> None:
    x = outliers(128, 600)
    weights = {"q": torch.randn(64, 128), "v": torch.randn(8, 128)}
    options = Options("svdquant", scales="two-level")
    done = quantize_linears(weights, stats_of(x), W4A4, options, {"v": Activation(8, "group")})
    assert [row.method for _, row in done.values()] == ["svdquant16"] * 2
    four = done["q"][0].activation
    assert four is not None and four[:2] == (4, "group") and done["v"][0].activation == Activation(8, "group")
    assert done["q"][1].clip == four.clip and done["v"][1].clip is None and done["q"][1].rank == done["v"][1].rank == 16
    assert "rank 8 of 16, all that the shape has" in done["v"][1].notes
    assert done["q"][1].notes[0].startswith("smoothing r")
    plain = quantize_linears(weights, stats_of(x), W4A4, Options("svdquant", recipe="iterative"))
    assert not any("smoothing" in note or "clip" in note for _, row in plain.values() for note in row.notes)
    for name, (q, row) in done.items():
        assert row.error_after == pytest.approx(lost(stats_of(x).sample(), weights[name], q), rel=1e-5)
        assert row.error_after < 0.5 * row.error_before


def test_qnt03_without_a_token_siblings_keep_one_form() -> None:
    for stats in (None, InputStats(128)):
        q, row = quantize_linears({"a": torch.randn(32, 128)}, stats, W4A4, Options("svdquant"))["a"]
        assert row.notes == ("saw no token: quantized for white inputs",) and row.tokens == 0
        assert q.low_rank is not None and q.hadamard == 64 and q.smooth is None and math.isnan(row.error_after)
        q.check_values()


def test_a_layer_that_the_branch_would_harm_is_rounded_and_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    real = linears.svdquant

    def harmful(*args: Any, **kwargs: Any) -> Any:
        return [s._replace(weight=s.weight.with_(scales=s.weight.scales * 20)) for s in real(*args, **kwargs)]

    monkeypatch.setattr(linears, "svdquant", harmful)
    w = torch.randn(64, 128)
    q, row = quantize_linears({"a": w}, stats_of(outliers(128, 300)), W4A4, Options("svdquant"))["a"]
    assert row.method == "rtn" and row.notes[-1] == "rounded to nearest: svdquant was worse"
    assert torch.equal(q.codes, rtn(w, W4A4).codes) and row.error_after == row.error_before


@pytest.mark.parametrize("method", ("gptq", "svdquant"))
def test_a_channel_that_calibration_hardly_saw(method: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """It may fire in the next text: what it then loses is of the size of what others lose, not a thousand times more."""
    x, w = outliers(128, 1000), torch.randn(64, 128) * 0.05
    x[:, 5] *= 1e-5
    fires = outliers(128, 200, seed=1)

    def error() -> float:
        q, _ = quantize_linears({"w": w}, stats_of(x), W4A4, Options(method))["w"]
        return lost(fires, w, q)

    found = error()
    assert found < 0.2
    monkeypatch.setattr(InputStats, "cautious", lambda self: (self.rms(), self.absmax()))
    assert error() > (20 if method == "svdquant" else 3) * found
