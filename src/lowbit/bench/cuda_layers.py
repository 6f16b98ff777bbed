"""``lowbit bench layers --device cuda``: one linear layer on a GPU, ours and the peers, as replays of graphs.

A graph holds one launch (ours: two, quantize and product) for each of many copies of the weight, so that none is in L2
when its turn comes ("cold"); "warm" launches one copy over and over. Times are medians of CUDA events around replays.
Our weights are random codes; low rank and bias are in the product and, as "with quantize", in the whole.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor

from lowbit import ops_cuda
from lowbit.layouts import mma_tiles as tiles
from lowbit.types import FormatError, LowRank, QuantizedWeight

MODES = {"w8": tiles.W8, "w4ch": tiles.CHANNEL, "w4two": tiles.TWO_LEVEL, "w4grp": tiles.GROUPS}
RANK = 16
L2_BYTES = 128 << 20  # what the copies of a weight take together: twice the L2 of an H200


def replayed(calls: Sequence[Callable[[], object]], repeats: int = 7) -> float:
    """Microseconds for all calls together: one graph of them, median of ``repeats`` replays."""
    stream = torch.cuda.Stream()  # type: ignore[no-untyped-call]
    with torch.cuda.stream(stream):
        for call in calls[:8]:
            call()
        torch.cuda.synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, stream=stream):
            for call in calls:
                call()
        graph.replay()
        times = []
        for _ in range(repeats):
            begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))  # type: ignore[no-untyped-call]
            begin.record(stream)
            graph.replay()
            end.record(stream)
            end.synchronize()
            times.append(begin.elapsed_time(end) * 1e3)
    return float(statistics.median(times))


def weight(mode: str, n: int, k: int, device: torch.device, seed: int = 0) -> QuantizedWeight:
    """Random codes whose scales select ``mode``."""
    g = torch.Generator(device=device).manual_seed(seed + n + k)

    def draw(low: int, high: int, *shape: int) -> Tensor:
        return torch.randint(low, high, shape, generator=g, device=device)

    channel = (0.002 + 0.004 * torch.rand(n, 1, generator=g, device=device)).bfloat16().float()
    if mode == "w8":
        return QuantizedWeight(draw(-128, 128, n, k).to(torch.int8), channel, k, 8)
    codes, groups = draw(-8, 8, n, k).to(torch.int8), -(-k // 64)
    if mode == "w4ch":
        return QuantizedWeight(codes, channel, k, 4)
    if mode == "w4two":
        steps = draw(1, 16, n, groups) * (1 - 2 * draw(0, 2, n, groups))
        steps[:, 0] = 15
        steps[:, -1] = 1
        return QuantizedWeight(codes, channel * steps, 64, 4)
    return QuantizedWeight(codes, (channel * (0.5 + torch.rand(n, groups, generator=g, device=device))).half(), 64, 4)


class Stack:
    """One shape in one mode: many copies of the weight."""

    def __init__(self, mode: str, n: int, k: int, copies: int, device: torch.device, rank: int = RANK) -> None:
        self.mode, self.n, self.k, self.rank = MODES[mode], n, k, rank
        t = tiles.pack(weight(mode, n, k, device))
        self.weights = [t.weight.clone() for _ in range(copies)]
        self.channel, self.bias = t.channel, torch.randn(len(t.channel), device=device)
        low = LowRank(torch.randn(k, rank, device=device) / k**0.5, torch.randn(n, rank, device=device) / 50)
        branches = [tiles.pack_branch(low, n) for _ in range(copies)] if rank else []
        self.down, self.up = [b.down for b in branches], [b.up for b in branches]

    def few(self, m: int) -> bool:
        return m <= 16 and self.mode != tiles.W8

    def quantize(self, i: int, x: Tensor, **before: Any) -> tuple[Tensor, Tensor, Tensor]:
        few = self.few(x.shape[0])
        return ops_cuda.quantize(
            x, hadamard=True, down=self.down[i] if self.rank else None, tile_order=not few, **before
        )

    def product(self, i: int, x: tuple[Tensor, Tensor, Tensor], row: int | None = None) -> Tensor:
        row = (ops_cuda.GEMV if self.few(x[0].shape[0]) else -1) if row is None else row
        up = self.up[i] if self.rank else None
        return ops_cuda.linear(*x, self.weights[i], self.channel, self.bias, up, self.n, self.mode, torch.float16, row)

    def both(self, i: int, x: Tensor, **before: Any) -> Tensor:
        return self.product(i, self.quantize(i, x, **before))


class Case(NamedTuple):
    name: str
    calls: list[Callable[[], object]]


def ours(n: int, k: int, m: int, x: Tensor, modes: Sequence[str]) -> Iterator[Case]:
    for mode in modes:
        bytes_ = tiles.BYTES[MODES[mode]] * -(-n // 64) * -(-k // 256) * 2
        stack = Stack(mode, n, k, max(2, -(-L2_BYTES // bytes_)), x.device)
        ready = stack.quantize(0, x)
        every = range(len(stack.weights))
        yield Case(f"lowbit {mode}", [partial(stack.product, i, ready) for i in every])
        yield Case(f"lowbit {mode} with quantize", [partial(stack.both, i, x) for i in every])


def peers(n: int, k: int, m: int, x: Tensor) -> Iterator[Case]:
    """cuBLAS fp16 and bf16, fp8 and int8 of torch (weights only as packed; x is there already), tinygemm."""
    copies = max(2, -(-L2_BYTES // (n * k)))
    for dtype in (torch.float16, torch.bfloat16):
        w = [torch.randn(n, k, device=x.device).to(dtype) for _ in range(copies)]
        y = x.to(dtype)
        yield Case(f"cuBLAS {str(dtype).removeprefix('torch.')}", [partial(torch.matmul, y, a.T) for a in w])
    one = torch.ones((), device=x.device)
    w8 = [torch.randn(n, k, device=x.device).to(torch.float8_e4m3fn) for _ in range(copies)]
    x8 = torch.nn.functional.pad(x, (0, 0, 0, -m % 16)).to(torch.float8_e4m3fn)
    fp8 = partial(torch._scaled_mm, scale_a=one, scale_b=one, out_dtype=torch.float16)
    yield Case("fp8 _scaled_mm", [partial(fp8, x8, a.T) for a in w8])
    if m > 16:
        wi = [torch.randint(-128, 128, (n, k), device=x.device, dtype=torch.int8) for _ in range(copies)]
        xi = torch.nn.functional.pad(x, (0, 0, 0, -m % 8)).to(torch.int8)
        yield Case("int8 _int_mm", [partial(torch._int_mm, xi, a.T) for a in wi])
    raw = torch.randint(0, 255, (n, k // 2), device=x.device, dtype=torch.uint8)
    w4 = [torch._convert_weight_to_int4pack(raw, 8) for _ in range(copies * 2)]
    xb, sz = x.bfloat16(), torch.rand(k // 64, n, 2, device=x.device).bfloat16()
    yield Case("tinygemm int4", [partial(torch._weight_int4pack_mm, xb, a, 64, sz) for a in w4])


def run(shapes: Sequence[tuple[int, int]], rows: Sequence[int], modes: Sequence[str]) -> Iterator[dict[str, Any]]:
    """A JSON line a case. FormatError where there is no such device."""
    why = ops_cuda.refuses(0)
    if why is not None:
        raise FormatError(f"--device: found cuda, but {why}")
    device = torch.device("cuda")
    chip = {"chip": torch.cuda.get_device_name(device), "cuda": torch.version.cuda, "torch": torch.__version__}
    for n, k in shapes:
        for m in rows:
            x = torch.randn(m, k, device=device).half()
            for cases in (ours(n, k, m, x, modes), peers(n, k, m, x)):
                while True:
                    try:
                        case = next(cases)
                    except StopIteration:
                        break
                    except RuntimeError as error:  # a peer that this torch or this shape has not
                        yield {
                            "bench": "layers",
                            "device": "cuda",
                            "n": n,
                            "k": k,
                            "m": m,
                            "left_out": str(error)[:120],
                        }
                        break
                    count = len(case.calls)
                    cold, warm = replayed(case.calls) / count, replayed(case.calls[:1] * count) / count
                    yield {
                        "bench": "cuda-layers", "name": case.name, "n": n, "k": k, "m": m, "rank": RANK,
                        "cold_us": round(cold, 3), "warm_us": round(warm, 3), "copies": count, **chip,
                    }  # fmt: skip
