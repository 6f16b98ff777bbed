"""Attention inside segments on a GPU, against torch's in float32."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

from lowbit import ops_cuda

WHY = ops_cuda.refuses(0)
pytestmark = [pytest.mark.gpu, pytest.mark.skipif(WHY is not None, reason=WHY or "")]


def rows(m: int, heads: int, kv: int, dtype: torch.dtype, seed: int = 0) -> tuple[Tensor, Tensor, Tensor]:
    """Views of one packed projection."""
    g = torch.Generator(device="cuda:0").manual_seed(seed + m)
    qkv = (1.5 * torch.randn(m, heads + 2 * kv, 128, generator=g, device="cuda:0")).to(dtype)
    return qkv[:, :heads], qkv[:, heads : heads + kv], qkv[:, heads + kv :]


def plain(q: Tensor, k: Tensor, v: Tensor, ends: list[int], scale: float) -> Tensor:
    out = torch.zeros_like(q, dtype=torch.float32)
    for a, b in zip(ends, ends[1:]):
        if b > a:
            one = [t[a:b].float().transpose(0, 1)[None] for t in (q, k, v)]
            with torch.nn.attention.sdpa_kernel(torch.nn.attention.SDPBackend.MATH):
                out[a:b] = scaled_dot_product_attention(*one, scale=scale, enable_gqa=True)[0].transpose(0, 1)
    return out


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
@pytest.mark.parametrize(
    "ends", [[0, 1], [0, 64], [0, 65, 65, 200], [0, 435, 685], [0, 3, 70, 70, 71, 333], [0, 1140, 1890]]
)
@pytest.mark.parametrize(("heads", "kv"), [(16, 8), (4, 1)])
def test_segments_attend_to_themselves(ends: list[int], heads: int, kv: int, dtype: torch.dtype) -> None:
    q, k, v = rows(ends[-1], heads, kv, dtype)
    bounds = torch.tensor(ends, dtype=torch.int32, device="cuda:0")
    scale = 128**-0.5
    got = ops_cuda.attention(q, k, v, bounds, scale).float()
    want = plain(q, k, v, ends, scale)
    error = float((got - want).norm() / want.norm())
    assert error < (2e-3 if dtype == torch.float16 else 1.2e-2)
    assert torch.equal(got, ops_cuda.attention(q, k, v, bounds, scale).float())


def test_a_segment_has_the_same_bits_whatever_stands_beside_it() -> None:
    q, k, v = rows(500, 16, 8, torch.float16)
    bounds = torch.tensor([0, 130, 437, 500], dtype=torch.int32, device="cuda:0")
    every = ops_cuda.attention(q, k, v, bounds, 0.1)
    alone = torch.tensor([0, 307], dtype=torch.int32, device="cuda:0")
    assert torch.equal(every[130:437], ops_cuda.attention(q[130:437], k[130:437], v[130:437], alone, 0.1))


def test_a_row_that_is_not_a_number_stays_in_its_segment() -> None:
    q, k, v = rows(200, 4, 2, torch.float16)
    v = v.clone()
    v[150, 1, 3] = float("nan")
    y = ops_cuda.attention(q, k, v, torch.tensor([0, 120, 200], dtype=torch.int32, device="cuda:0"), 0.1)
    assert bool(torch.isfinite(y[:120]).all()) and bool(torch.isnan(y[120:]).any())
