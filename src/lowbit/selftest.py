"""Every tier that the CPU has, and the GPU, against the reference: small layers of every kind. A JSON line each on stdout."""

from __future__ import annotations

import json
import time
from collections.abc import Iterator

import torch
from torch import Tensor

from . import ops, ops_cuda, reference
from .layouts import panels
from .nn import QuantLinear
from .types import Activation, QuantizedWeight

TOLERANCE = 1e-6  # Frobenius-relative; float32 sums of a few hundred terms, measured 1e-7 .. 4e-7
CUDA_TOLERANCE = 1e-3  # the low rank and y in float16 there
N, K = 72, 320  # neither a whole number of panels nor of large groups


def layers() -> Iterator[tuple[QuantizedWeight, str | None]]:
    """4 and 8 bits, with and without zeros, act-order, smoothing, Hadamard; each with the activation it runs with."""
    g = torch.Generator().manual_seed(0)
    for bits, group, zeros, plain in (
        (4, 64, True, True),
        (4, 128, False, False),
        (8, K, False, True),
        (8, 32, True, False),
    ):
        groups = -(-K // group)
        low, high = (0, 2**bits) if zeros else (-(2 ** (bits - 1)), 2 ** (bits - 1))
        q = QuantizedWeight(
            torch.randint(low, high, (N, K), generator=g).to(torch.uint8 if zeros else torch.int8),
            ((torch.rand(N, groups, generator=g) + 0.1) / 64).half(),
            group,
            bits,
            torch.randint(0, 2**bits, (N, groups), generator=g).to(torch.uint8) if zeros else None,
            None if plain else torch.randperm(K, generator=g).int(),
            bias=torch.randn(N, generator=g),
            smooth=None if plain else torch.rand(K, generator=g) + 0.5,
            hadamard=0 if plain else 64,
        )
        for activation in ("token", "group", None):
            yield q, activation


def of_tier(tier: str) -> tuple[float, list[Tensor]]:
    """The largest error of a tier over all layers and dtypes, and what it gave."""
    worst, results = 0.0, []
    for q, activation in layers():
        layer = QuantLinear.from_quantized(q, activation)
        x = torch.randn(5, K, generator=torch.Generator().manual_seed(1))
        y = ops.linear(
            x, layer.packed, q.n, q.group_size, q.bits, ops.ACTIVATIONS[activation], layer.bias, layer.perm, layer.smooth,
            tier, hadamard=q.hadamard,
        )  # fmt: skip
        wanted = reference.linear(x, q, Activation(8, activation) if activation else Activation(16, "none"))  # type: ignore[arg-type]
        worst = max(worst, reference.error(y, wanted))
        results.append(y)
    half = torch.randn(N, K, generator=torch.Generator().manual_seed(2)).half()
    x = torch.randn(3, K, generator=torch.Generator().manual_seed(3))
    y = ops.linear(x, panels.pack_half(half), N, K, 16, ops.ACTIVATIONS[None], isa=tier)
    return max(worst, reference.error(y, x.double() @ half.double().T)), [*results, y]


def of_device(device: str) -> float:
    """The largest error of a GPU's kernels against the reference on the CPU. What the integer tiles do not take (zero points,
    permuted columns) runs with float activations there, and is compared with those."""
    worst = 0.0
    for q, activation in layers():
        if activation != "token":
            continue
        x = torch.randn(32, K, generator=torch.Generator().manual_seed(1))
        layer = QuantLinear.from_quantized(q.to(torch.device(device)), activation)
        floats = layer.on_device is None and layer.on_float is not None
        arithmetic = Activation(16, "none") if floats else Activation(8, "token")
        for rows in (1, 32):  # a product of its own for a few rows
            y = layer(x[:rows].to(device)).cpu()
            worst = max(worst, reference.error(y, reference.linear(x[:rows], q, arithmetic)))
    return worst


def _say(**line: object) -> None:
    print(json.dumps(line), flush=True)


def main() -> int:
    torch.set_num_threads(1)
    first: list[Tensor] = []
    for tier in ops.cpu_isas():
        _say(start=tier)
        began = time.perf_counter()
        worst, results = of_tier(tier)
        first = first or results
        same = all(torch.equal(a, b) for a, b in zip(first, results, strict=True))
        bits = "" if same else ", not the bits of the best tier"
        took = f"{1e3 * (time.perf_counter() - began):.0f} ms"
        found = f"error {worst:.1e} over {len(results)} layers in {took}{bits}"
        _say(tier=tier, right=worst <= TOLERANCE and same, found=found, error=worst)
    for i in range(torch.cuda.device_count() if torch.cuda.is_available() else 0):
        if ops_cuda.refuses(i) is None:
            _say(start=f"cuda:{i}")
            worst = of_device(f"cuda:{i}")
            _say(tier=f"cuda:{i}", right=worst <= CUDA_TOLERANCE, found=f"error {worst:.1e}", error=worst)
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
