"""What ``lowbit bench layers --device cuda`` sets beside our kernels: torch's own products, in graphs as ours."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import NamedTuple

import torch
from torch import Tensor


class Side(NamedTuple):
    """A competitor at one shape: ``calls(x)`` for x float16 [M, K], one for each copy of its weight."""

    name: str
    calls: Callable[[Tensor], list[Callable[[], object]]]


def floats(dtype: torch.dtype, n: int, k: int, copies: int, device: torch.device) -> list[Side]:
    w = [torch.randn(n, k, device=device).to(dtype) for _ in range(copies)]
    name = f"cuBLAS {str(dtype).removeprefix('torch.')}"
    return [Side(name, lambda x: [partial(torch.matmul, y, a.T) for y in (x.to(dtype),) for a in w])]


def fp8(n: int, k: int, copies: int, device: torch.device) -> list[Side]:
    one = torch.ones((), device=device)
    w = [torch.randn(n, k, device=device).to(torch.float8_e4m3fn) for _ in range(copies)]
    call = partial(torch._scaled_mm, scale_a=one, scale_b=one, out_dtype=torch.float16)

    def calls(x: Tensor) -> list[Callable[[], object]]:
        y = torch.nn.functional.pad(x, (0, 0, 0, -len(x) % 16)).to(torch.float8_e4m3fn)
        return [partial(call, y, a.T) for a in w]

    return [Side("fp8 _scaled_mm", calls)]


def int8(n: int, k: int, copies: int, device: torch.device) -> list[Side]:
    w = [torch.randint(-128, 128, (n, k), device=device, dtype=torch.int8) for _ in range(copies)]

    def calls(x: Tensor) -> list[Callable[[], object]]:
        rows = max(24, len(x) + -len(x) % 8)  # it takes more than 16 rows, in eights
        y = torch.nn.functional.pad(x, (0, 0, 0, rows - len(x))).to(torch.int8)
        return [partial(torch._int_mm, y, a.T) for a in w]

    return [Side("int8 _int_mm", calls)]


def tinygemm(n: int, k: int, copies: int, device: torch.device) -> list[Side]:
    raw = torch.randint(0, 256, (n, k // 2), device=device, dtype=torch.uint8)
    w = [torch._convert_weight_to_int4pack(raw, 8) for _ in range(copies)]
    scales = torch.rand(k // 64, n, 2, device=device).bfloat16()
    return [
        Side(
            "tinygemm int4",
            lambda x: [partial(torch._weight_int4pack_mm, y, a, 64, scales) for y in (x.bfloat16(),) for a in w],
        )
    ]
