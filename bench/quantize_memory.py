"""What quantizing the linears of one input takes of a GPU, beside what models/memory.py says. Runs on a CUDA device.

PYTHONPATH=src python bench/quantize_memory.py
"""

from __future__ import annotations

import torch

from lowbit.models.memory import SOLVING_HESSIAN, SOLVING_WEIGHT, STATISTICS
from lowbit.quantize import InputStats, Options, quantize_linears
from lowbit.types import SCHEMES

SHAPES = ((1024, 1024), (4096, 1024), (1024, 4096), (16384, 4096), (4096, 8192))


def main() -> None:
    torch.manual_seed(0)
    torch.linalg.eigh(torch.eye(4, device="cuda", dtype=torch.float64))
    for n, k in SHAPES:
        x = torch.randn(8192, k, device="cuda") * torch.linspace(0.1, 3, k, device="cuda")
        w = torch.randn(n, k, device="cuda") * 0.02
        before = torch.cuda.memory_allocated()
        stats = InputStats(k)
        stats.add(x)
        kept = torch.cuda.memory_allocated() - before
        print(f"{n}x{k} statistics: {kept / (k * k):.1f} bytes a value of the Hessian (said: {STATISTICS})")
        for scheme, method, scales in (
            ("w4a8", "gptq", "group"), ("w4a4", "svdquant", "group"), ("w4a4", "svdquant", "two-level"), ("w8a8", "gptq", "group"),
        ):  # fmt: skip
            torch.cuda.reset_peak_memory_stats()
            start = torch.cuda.memory_allocated()
            quantize_linears({"a": w}, stats, SCHEMES[scheme], Options(method=method, scales=scales))  # type: ignore[arg-type]
            took = torch.cuda.max_memory_allocated() - start
            said = SOLVING_HESSIAN * k * k + SOLVING_WEIGHT * n * k
            print(f"{n}x{k} {scheme} {method} {scales}: {took / 1e9:.3f} GB, said {said / 1e9:.3f}: {took / said:.2f}")


if __name__ == "__main__":
    main()
