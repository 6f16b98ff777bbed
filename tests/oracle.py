"""The exact answer, by the rules of the numerics and by no other way: integers in int64, every fma rounded once.

Nothing here calls the package. The rules (M rows of x, N outputs, K inputs, g a weight group):

* x is widened to float32, divided by ``smooth`` (float32), rotated by the Hadamard, permuted;
* int8 activations, one scale per token or per weight group: amax = max|x|; amax < 2^-100 gives sa = 0 and q = 0;
  otherwise sa = amax / 127 and q = rint(x * (127 / amax)), each step in float32, halves to even;
* d = Σ q·code - zero·Σ q is an exact integer, then float32(d), rounded to nearest;
* per token: acc = fma(d, s, acc) in order of g; y = sa·acc, or with a bias fma(acc, sa, bias);
* per group: acc = fma(d, float32(s·sa_g), acc) in order of g; y = acc, or acc + bias;
* what a low rank gives (``branch``) is added to that in float32;
* one last rounding to the dtype of x.
"""

from __future__ import annotations

from fractions import Fraction
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

F32 = NDArray[np.float32]
TINY = np.float32(2.0**-100)


def fma(a: Any, b: Any, c: Any) -> F32:
    """a·b + c of float32 arrays, rounded once to float32.

    The product of two float32 is exact in float64. The sum is taken in float64 rounded to odd (its error is known from
    Knuth's two-sum), which has enough spare bits that the second rounding, to float32, is the only one that counts.
    """
    a, b, c = (np.asarray(v, np.float32).astype(np.float64) for v in (a, b, c))
    with np.errstate(all="ignore"):
        p = a * b
        s = p + c
        t = s - p
        error = (p - (s - t)) + (c - t)
        even = (np.atleast_1d(s).view(np.int64).reshape(np.shape(s)) & 1) == 0
        fix = np.isfinite(s) & np.isfinite(error) & (error != 0) & even
        s = np.where(fix, np.nextafter(s, np.where(error > 0, np.inf, -np.inf)), s)
        return np.asarray(s.astype(np.float32))


def round_float32(v: Fraction) -> np.float32:
    """A rational to the nearest float32, ties to even, by rational arithmetic alone (|v| below 2^127)."""
    if v == 0:
        return np.float32(0)
    sign, v = (-1, -v) if v < 0 else (1, v)
    e = v.numerator.bit_length() - v.denominator.bit_length()
    if v < Fraction(2) ** e:
        e -= 1  # now 2^e <= v < 2^(e+1)
    ulp = Fraction(2) ** max(e - 23, -149)
    return np.float32(sign * float(round(v / ulp) * ulp))  # round() of a Fraction is half to even


def fma_fraction(a: float, b: float, c: float) -> np.float32:
    """The same as :func:`fma` for three finite numbers, by rational arithmetic: what :func:`fma` is tested against."""
    return round_float32(Fraction(float(a)) * Fraction(float(b)) + Fraction(float(c)))


def group_of(k: int, group_size: int) -> NDArray[np.int64]:
    """[K] the group of each column."""
    return np.arange(k, dtype=np.int64) // group_size


def quantize(x: F32, group_size: int) -> tuple[NDArray[np.int64], F32]:
    """Rows [M, K] to int8 values [M, K] (as int64) and scales [M, ceil(K / group_size)]. x is finite."""
    m, k = x.shape
    groups = -(-k // group_size)
    q = np.zeros((m, k), np.int64)
    sa = np.zeros((m, groups), np.float32)
    for g in range(groups):
        part = x[:, g * group_size : (g + 1) * group_size]
        amax = np.abs(part).max(axis=1)
        on = amax >= TINY
        sa[on, g] = amax[on] / np.float32(127)
        q[on, g * group_size : (g + 1) * group_size] = np.rint(part[on] * (np.float32(127) / amax[on])[:, None])
    return q, sa


def inside(x: Tensor, smooth: Tensor | None = None, hadamard: int = 0) -> F32:
    """x' [M, K]: float32, smoothed, rotated value by value in the order of reference.hadamard."""
    out = (x.float() if smooth is None else x.float() / smooth.float()).numpy()
    stride, column = 1, np.arange(out.shape[1])
    while stride < hadamard:
        second = (column // stride) % 2 == 1
        out = np.where(second, out[:, column ^ stride] - out, out + out[:, column ^ stride])
        stride *= 2
    return np.ascontiguousarray(out * np.float32(0.125) if hadamard else out)


def prepare(x: Tensor, perm: Tensor | None = None, smooth: Tensor | None = None, hadamard: int = 0) -> F32:
    """x [M, K] as the quantizer sees it: float32, smoothed, rotated, permuted."""
    out = inside(x, smooth, hadamard)
    return out if perm is None else np.ascontiguousarray(out[:, perm.long().numpy()])


def chained(x: F32, factor: F32, length: int) -> F32:
    """x [M, J] times factor [J, N]: fma chains over ``length`` values of j from 0, and these added in order from 0."""
    total = np.zeros((x.shape[0], factor.shape[1]), np.float32)
    for begin in range(0, x.shape[1], length):
        chain = np.zeros_like(total)
        for j in range(begin, min(begin + length, x.shape[1])):
            chain = fma(
                np.broadcast_to(x[:, j, None], chain.shape), np.broadcast_to(factor[None, j], chain.shape), chain
            )
        total = total + chain
    return total


def branch(inner: F32, down: Tensor, up: Tensor) -> F32:
    """What a low rank adds [M, N], for x' [M, K], down [K, R], up [N, R]: csrc/cpu/low_rank.body.h has the order."""
    hidden = chained(inner, down.float().numpy(), 64)
    return chained(hidden, np.ascontiguousarray(up.float().numpy().T), 16)


def linear(
    x: Tensor,
    codes: Tensor,
    scales: Tensor,
    zeros: Tensor | None,
    group_size: int,
    activation: str = "token",
    perm: Tensor | None = None,
    smooth: Tensor | None = None,
    bias: Tensor | None = None,
    hadamard: int = 0,
    low_rank: tuple[Tensor, Tensor] | None = None,
) -> Tensor:
    """y [M, N] in the dtype of x [M, K], for codes [N, K], scales [N, G], zeros [N, G] or None. x is finite."""
    xs = prepare(x, perm, smooth, hadamard)
    (m, k), n = xs.shape, codes.shape[0]
    w = codes.numpy().astype(np.int64)
    s = scales.float().numpy()
    z = np.zeros(s.shape, np.int64) if zeros is None else zeros.numpy().astype(np.int64)
    q, sa = quantize(xs, group_size if activation == "group" else k)
    acc = np.zeros((m, n), np.float32)
    for g in range(s.shape[1]):
        cut = slice(g * group_size, (g + 1) * group_size)
        d = q[:, cut] @ w[:, cut].T - q[:, cut].sum(1)[:, None] * z[None, :, g]
        factor = s[None, :, g] * sa[:, g, None] if activation == "group" else np.broadcast_to(s[None, :, g], (m, n))
        acc = fma(d.astype(np.float32), factor, acc)
    b = None if bias is None else bias.float().numpy()[None, :]
    if activation == "group":
        y = acc if b is None else acc + b
    else:
        y = (
            sa[:, :1] * acc
            if b is None
            else fma(acc, np.broadcast_to(sa[:, :1], acc.shape), np.broadcast_to(b, acc.shape))
        )
    if low_rank is not None:
        y = y + branch(inside(x, smooth, hadamard), *low_rank)
    return torch.from_numpy(np.ascontiguousarray(y)).to(x.dtype)


def linear_fraction(
    x: Tensor, codes: Tensor, scales: Tensor, zeros: Tensor | None, group_size: int, activation: str = "token"
) -> Tensor:
    """:func:`linear` again, one output at a time in rational arithmetic: slow, and it shares no shortcut with it."""
    k = x.shape[1]
    g = group_size
    q, sa = quantize(prepare(x), g if activation == "group" else k)
    y = torch.empty(x.shape[0], codes.shape[0])
    for i in range(x.shape[0]):
        for j in range(codes.shape[0]):
            acc = np.float32(0)
            for b in range(-(-k // g)):
                zero = 0 if zeros is None else int(zeros[j, b])
                d = sum(int(q[i, c]) * (int(codes[j, c]) - zero) for c in range(b * g, min(k, b * g + g)))
                s = Fraction(float(scales[j, b]))
                if activation == "group":
                    s = Fraction(float(round_float32(s * Fraction(float(sa[i, b])))))
                acc = fma_fraction(float(round_float32(Fraction(d))), float(s), float(acc))
            y[i, j] = float(acc)
            if activation != "group":
                y[i, j] = float(round_float32(Fraction(float(acc)) * Fraction(float(sa[i, 0]))))
    return y.to(x.dtype)


def dequantize(
    codes: Tensor, scales: Tensor, zeros: Tensor | None, group_size: int, perm: Tensor | None = None
) -> Tensor:
    """W [N, K] in float64, in the order of the input's columns."""
    g = torch.from_numpy(group_of(codes.shape[1], group_size))
    z = 0.0 if zeros is None else zeros.double()[:, g]
    w = scales.double()[:, g] * (codes.double() - z)
    if perm is None:
        return w
    out = torch.empty_like(w)
    out[:, perm.long()] = w
    return out


def same_bits(a: Tensor, b: Tensor) -> bool:
    """Equal dtype, shape and bytes; only the payload of a NaN is free."""
    if a.dtype != b.dtype or a.shape != b.shape:
        return False
    a, b = (v.detach().contiguous().reshape(-1) for v in (a, b))
    if a.is_floating_point():
        if not torch.equal(a.isnan(), b.isnan()):
            return False
        a, b = (torch.where(v.isnan(), torch.zeros_like(v), v) for v in (a, b))
    return bytes(a.view(torch.uint8).numpy()) == bytes(b.view(torch.uint8).numpy())
