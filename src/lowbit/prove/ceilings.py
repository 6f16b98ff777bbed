"""A chip's ceilings as this machine reaches them: copies and products of torch, a few seconds in all."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from lowbit.nn import QuantLinear
from lowbit.ops_cuda import device_there
from lowbit.prove.chips import Chip, Rate
from lowbit.types import FormatError

Call = Callable[[], Any]


def measure(device: str, name: str, seconds: float = 0.4, size: int | None = None, mb: int = 256) -> Chip:
    """A ``Chip`` called ``name`` from what copies of ``mb`` MiB and square products of ``size`` reach on ``device``
    ("cpu" or "cuda"), the best of ``seconds`` each (with as many threads as torch has on a CPU).

    A unit that torch has no product for here is absent, so work falls back as on a chip that lacks it; INT4 always.
    """
    if device not in ("cpu", "cuda"):
        raise FormatError(f"--measure: found --device {device}, accepted is cpu or cuda")
    device_there(device, "--device")
    with torch.inference_mode():
        bandwidth = _bandwidth(device, seconds, mb)
        rates = _rates_cuda(seconds, size or 8192) if device == "cuda" else _rates_cpu(seconds, size or 1024)
    cores = None if device == "cuda" else torch.get_num_threads()
    return Chip(name, bandwidth, rates, r"(?!)", cores)


def _best(call: Call, device: str, seconds: float) -> float:
    """Seconds of the fastest call, after one that is not counted."""
    call()
    least: float = float("inf")
    end = time.perf_counter() + seconds
    while True:
        if device == "cuda":
            began, done = (torch.cuda.Event(enable_timing=True) for _ in range(2))  # type: ignore[no-untyped-call]
            began.record()
            call()
            done.record()
            done.synchronize()
            took = float(began.elapsed_time(done)) / 1e3
        else:
            start = time.perf_counter()
            call()
            took = time.perf_counter() - start
        least = min(least, took)
        if time.perf_counter() >= end:
            return least


def _bandwidth(device: str, seconds: float, mb: int) -> Rate:
    """The faster of a copy (bytes read and written) and a sum (bytes read)."""
    source = torch.ones(mb << 18, device=device)
    target = torch.empty_like(source)
    size = source.numel() * source.element_size()
    copied = 2 * size / _best(lambda: target.copy_(source), device, seconds)
    read = size / _best(source.sum, device, seconds)
    return Rate(max(copied, read), f"measured, {mb} MiB: copy {copied / 1e9:.1f}, sum {read / 1e9:.1f} GB/s")


def _rates_cpu(seconds: float, n: int) -> dict[str, Rate]:
    a = torch.randn(n, n)
    rates = {"fp32": _rate("torch mm float32", lambda: a @ a, n, "cpu", seconds)}
    half = a.half()
    sixteen = _rate("torch mm float16", lambda: half @ half, n, "cpu", seconds)
    if sixteen.per_second > rates["fp32"].per_second:  # else halves are storage, and arithmetic is float32
        rates["fp16"] = sixteen
    layer = QuantLinear.from_linear(torch.nn.Linear(n, n, bias=False), "w8a8")
    codes = torch.randint(-127, 128, (n, n), dtype=torch.int8)
    eights = [_rate("lowbit w8a8", lambda: layer(a), n, "cpu", seconds)]
    eights += _tried("torch _int_mm", lambda: torch._int_mm(codes, codes), n, "cpu", seconds)
    rates["int8"] = max(eights, key=lambda rate: rate.per_second)
    return rates


def _rates_cuda(seconds: float, n: int) -> dict[str, Rate]:
    a = torch.randn(n, n, device="cuda")
    small = a[:4096, :4096].contiguous()
    found = {"fp32": [_rate("torch mm float32", lambda: small @ small, len(small), "cuda", seconds)]}
    half = a.half()
    found["fp16"] = [_rate("torch mm float16", lambda: half @ half, n, "cuda", seconds)]
    codes = torch.randint(-127, 128, (n, n), dtype=torch.int8, device="cuda")
    found["int8"] = _tried("torch _int_mm", lambda: torch._int_mm(codes, codes.T), n, "cuda", seconds)

    def eight() -> Tensor:
        return torch._scaled_mm(quarter, quarter.T, scale_a=one, scale_b=one, out_dtype=torch.float16)

    one = torch.ones((), device="cuda")
    quarter = half.to(torch.float8_e4m3fn)
    found["fp8"] = _tried("torch _scaled_mm", eight, n, "cuda", seconds)
    return {unit: rates[0] for unit, rates in found.items() if rates}


def _rate(what: str, call: Call, n: int, device: str, seconds: float) -> Rate:
    return Rate(2.0 * n**3 / _best(call, device, seconds), f"measured, {what}, {n} x {n} x {n}")


def _tried(what: str, call: Call, n: int, device: str, seconds: float) -> list[Rate]:
    """Nothing where this torch or this chip has no such product."""
    try:
        return [_rate(what, call, n, device, seconds)]
    except (RuntimeError, NotImplementedError, ValueError):
        return []
