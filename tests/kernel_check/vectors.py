"""Writes the cases that kernel_check reads: random and extreme layers, packed by lowbit for the asked layout."""

from __future__ import annotations

import itertools
import random
import struct
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import torch
from torch import Tensor

from lowbit.layouts import LAYOUTS, panels
from samples import DTYPES, FILLS, rows, weight

MAGIC = 0x6C627631


class Case(NamedTuple):
    bits: int
    activation: int  # 0 token, 1 group, 2 none
    m: int
    n: int
    k: int
    group: int
    dtype: torch.dtype = torch.float32
    fill: str = "random"
    zeros: bool = True
    scale_dtype: torch.dtype = torch.float16
    extras: int = 0  # 1 perm, 2 smooth, 4 bias
    broken: bool = False  # NaN, infinities, subnormals in x
    hadamard: int = 0
    rank: int = 0
    wide_factors: bool = False  # float32, else float16


def cases() -> Iterator[Case]:
    """Every tile height and tail, every group from 1 column to K, all dtypes and extras, the integer extremes, long K."""
    r = random.Random(3)
    heights = (1, 2, 3, 4, 5, 6, 7, 8, 9, 11, 13, 16, 23, 24, 33)
    for bits, activation, m in itertools.product((4, 8), (0, 1, 2), heights):
        for group in (32, r.choice((1, 5, 16, 20, 48, 64)), r.choice((96, 128, 160, 250))):
            k = group * r.randint(1, 3) + r.randint(0, group - 1) if group > 8 else r.randint(8, 40)
            yield Case(
                bits, activation, m, r.choice((1, 15, 16, 17, 40)), k, min(group, k), r.choice(DTYPES), r.choice(FILLS),
                r.random() < 0.7, r.choice(DTYPES), r.randint(0, 7),
            )  # fmt: skip
    for bits, activation, m, fill in itertools.product((4, 8), (0, 1), (1, 3, 7, 8, 13), FILLS):
        yield Case(bits, activation, m, 33, 512, 128, fill=fill)
    for bits, m, fill in itertools.product((4, 8), (1, 2, 9), ("high", "low", "spread", "random")):
        yield Case(bits, 0, m, 17, 6001, 6001, fill=fill)  # one group: sums beyond 2^22 and, in 8 bits, beyond 2^24
    for group in (128, 160, 1088):  # more rows than stay in L2 beside a panel
        yield Case(4, 1, 40, 33, 8200, group)
    yield Case(8, 0, 40, 16, 8200, 8200)
    for bits, activation, m in itertools.product((4, 8), (0, 1, 2), heights):  # what stands around a W4A4 weight
        k, group = r.choice((64, 192, 320, 576)), r.choice((20, 32, 64, 128))
        for rank in (r.choice((0, 1, 7)), r.choice((16, 33, 64))):
            yield Case(
                bits, activation, m, r.choice((1, 15, 17, 40)), k, min(group, k), r.choice(DTYPES), "random",
                r.random() < 0.5, extras=r.randint(0, 7), hadamard=64, rank=rank, wide_factors=r.random() < 0.3,
            )  # fmt: skip
        yield Case(bits, activation, m, 17, 150, 50, extras=r.randint(0, 7), rank=16, wide_factors=m % 2 == 0)
    for activation, m in itertools.product((0, 1), (1, 9)):  # more columns than one round of blocks
        yield Case(4, activation, m, 33, 1536, 64, hadamard=64, rank=48, extras=7)
    for bits, activation, dtype in itertools.product((4, 8), (0, 1, 2), DTYPES):
        yield Case(bits, activation, 16, 33, 128, 32, dtype, extras=6, broken=True, hadamard=64)
        yield Case(bits, activation, 16, 33, 96, 32, dtype, extras=4, broken=True)
    for m, k, dtype in itertools.product((1, 2, 5, 8, 9), (1, 6, 64, 131), DTYPES):
        yield Case(16, 2, m, r.choice((1, 16, 35)), k, k, dtype, extras=r.randint(0, 7), broken=k == 64)


def broken(x: Tensor) -> Tensor:
    odd = torch.tensor([float("nan"), float("inf"), float("-inf"), 1e-40, -0.0, 2.0**-100, 3e38, -3e38]).to(x.dtype)
    for i in range(min(8, x.shape[0])):
        x[i, (11 * i) % x.shape[1]] = odd[i]
    for i in range(8, min(16, x.shape[0])):
        x[i] = odd[i - 8]
    return x


def write(path: Path, layout: str, every: int = 1) -> int:
    """All cases (or each ``every``-th) to ``path``; returns how many."""
    chosen = list(cases())[::every]
    with path.open("wb") as file:
        file.write(struct.pack("<2q", MAGIC, len(chosen)))
        for c in chosen:
            _write(file, c, layout)
    return len(chosen)


def _write(file: object, c: Case, layout: str) -> None:
    q = weight(
        c.n, c.k, c.group, bits=8 if c.bits == 16 else c.bits, zeros=c.zeros, fill=c.fill, scale_dtype=c.scale_dtype,
        perm=bool(c.extras & 1), smooth=bool(c.extras & 2), bias=bool(c.extras & 4),
    )  # fmt: skip
    x = rows(c.m, c.k, c.dtype, c.fill)
    if c.broken:
        x = broken(x.clone())
    middle = 1 << (q.bits - 1)
    codes = q.codes if q.zeros is not None else (q.codes.to(torch.int16) + middle).to(torch.uint8)
    zeros = q.zeros if q.zeros is not None else torch.full_like(q.scales, middle, dtype=torch.uint8)
    parts = [codes, zeros, q.scales.float(), x]
    if c.bits == 16:
        half = (torch.randn(c.n, c.k, generator=torch.Generator().manual_seed(c.k)) * 2).half()
        packed = LAYOUTS["half_panels"].pack(half)
        group_bytes, wide, parts = packed.shape[1] * 32, 0, [half, x]
    else:
        packed = LAYOUTS[layout].pack(q)
        group_bytes = packed.shape[2]
        wide = int(group_bytes - -(-c.group // 32) * 32 * 16 * c.bits // 8 == 128)
    for optional in (q.perm, None if q.smooth is None else q.smooth.float(), q.bias):
        if optional is not None:
            parts.append(optional)
    r, dtype = torch.Generator().manual_seed(c.k), torch.float32 if c.wide_factors else torch.float16
    down, up = ((torch.randn(size, c.rank, generator=r) / 8).to(dtype) for size in (c.k, c.n))
    factors = [down.T, up] if c.rank else []
    parts += [down.float(), up.float()]
    header = (
        c.bits, c.activation, DTYPES.index(c.dtype), c.m, c.n, c.k, c.group, wide, int(q.perm is not None),
        int(q.smooth is not None), int(q.bias is not None), group_bytes, c.hadamard, c.rank, int(c.wide_factors),
    )  # fmt: skip
    file.write(struct.pack("<15q", *header))  # type: ignore[attr-defined]
    for part in [*parts, packed, *(panels.pack_half(f, dtype) for f in factors)]:
        file.write(part.contiguous().view(torch.uint8).numpy().tobytes())  # type: ignore[attr-defined]
