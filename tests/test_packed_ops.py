"""The operators between the linears of a packed stack on the CPU: every tier against plain torch, and against each other."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from lowbit import native, ops, plain

TIERS = ops.cpu_isas()
LENGTHS = (300, 0, 1, 17, 40)  # more keys than a softmax takes at once, none, one, and what fills no tile
pytestmark = pytest.mark.skipif(not native.COMPILED, reason="no compiled kernels here")


def random(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def attention(heads: int, kv: int, width: int, norms: bool) -> tuple[Any, ...]:
    rows = sum(LENGTHS)
    angle = random(rows, width // 2, seed=1)
    weights = [random(width, seed=s).abs() + 0.5 if norms else None for s in (2, 3)]
    bounds = torch.tensor([0, *LENGTHS]).cumsum(0).int()
    qkv = random(rows, (heads + 2 * kv) * width)
    return qkv, *weights, angle.cos(), angle.sin(), bounds, heads, kv, 1e-6, width**-0.5


@pytest.mark.parametrize(("heads", "kv", "width", "norms"), [(4, 2, 32, True), (3, 1, 16, False), (2, 2, 48, True)])
def test_attention(heads: int, kv: int, width: int, norms: bool) -> None:
    qkv, *rest = attention(heads, kv, width, norms)
    want = plain.packed_attention(qkv, *rest)
    got = [ops.packed_attention(qkv.clone(), *rest, isa=tier) for tier in TIERS]
    torch.testing.assert_close(got[0], want, rtol=2e-5, atol=2e-5)
    assert all(torch.equal(got[0], other) for other in got[1:])


def test_a_segment_is_as_it_is_alone_and_sees_no_other() -> None:
    qkv, q, k, c, s, bounds, *rest = attention(4, 2, 32, True)
    whole = ops.packed_attention(qkv.clone(), q, k, c, s, bounds, *rest)
    here = slice(int(bounds[3]), int(bounds[4]))
    only = torch.tensor([0, LENGTHS[3]], dtype=torch.int32)
    alone = ops.packed_attention(qkv[here].clone(), q, k, c[here], s[here], only, *rest)
    assert torch.equal(alone, whole[here])
    qkv[: LENGTHS[0]] = torch.nan
    dirty = ops.packed_attention(qkv, q, k, c, s, bounds, *rest)
    assert bool(dirty[: LENGTHS[0]].isnan().all()) and torch.equal(dirty[LENGTHS[0] :], whole[LENGTHS[0] :])


def test_add_norm_and_silu_mul() -> None:
    x, add, weight, both = random(19, 96), random(19, 96, seed=1), random(96, seed=2), 20 * random(19, 96, seed=3)
    for more in (None, add):
        want, stream = x if more is None else x + more, [x.clone() for _ in TIERS]
        got = [ops.add_norm(s, more, weight, 1e-6, tier) for s, tier in zip(stream, TIERS, strict=True)]
        assert all(torch.equal(s, want) for s in stream) and all(torch.equal(got[0], y) for y in got[1:])
        torch.testing.assert_close(got[0], plain.add_norm(x.clone(), more, weight, 1e-6), rtol=1e-5, atol=1e-6)
    both[3, 5] = torch.nan
    done = [ops.silu_mul(both, tier) for tier in TIERS]
    torch.testing.assert_close(done[0], plain.silu_mul(both), rtol=1e-5, atol=1e-6, equal_nan=True)
    assert all(torch.equal(done[0].nan_to_num(7), y.nan_to_num(7)) for y in done[1:])


def test_what_does_not_fit_is_refused() -> None:
    arguments = list(attention(4, 2, 32, True))
    for at, value, words in (
        (0, arguments[0].double(), "qkv: accepted is a contiguous float32"),
        (1, random(31), "q_norm: accepted is a contiguous float32 \\[32\\]"),
        (3, random(3, 16), "cosines: accepted"),
        (5, arguments[5].long(), "bounds: accepted is a contiguous int32"),
        (5, arguments[5][:-1], "bounds: found 0 .. 318, accepted is 0 .. 358"),
        (5, torch.tensor([0, 400, 358], dtype=torch.int32), "bounds: found 358 after 400"),
        (6, 3, "heads: found 3 and 2"),
        (6, 10, "qkv: found 256 columns, accepted are 14 heads"),
    ):
        wrong = [value if i == at else a for i, a in enumerate(arguments)]
        with pytest.raises(RuntimeError, match=words):
            ops.packed_attention(*wrong)
    for call, words in (
        (
            lambda: ops.add_norm(random(2, 24), None, random(24), 1e-6),
            "x: accepted is \\[M, N\\] with N a multiple of 16",
        ),
        (lambda: ops.add_norm(random(2, 32), random(3, 32), random(32), 1e-6), "add: accepted"),
        (lambda: ops.silu_mul(random(2, 16)), "x: found 16 columns, accepted is a multiple of 32"),
    ):
        with pytest.raises(RuntimeError, match=words):
            call()
