"""``lowbit bench layers --device cuda``: one linear layer on a GPU, ours and the peers, as replays of graphs.

A graph holds one launch (ours "with quantize": two) for each of many copies of the weight, so that none is in L2 when
its turn comes ("cold"); "warm" launches one copy over and over. All graphs of a case take turns; a time is the median of
CUDA events around its replays, over the number of copies. Ours are random codes with rank 16 and a bias; "with quantize"
also rotates x, rounds it and takes the low rank's first half. Peers get their x rounded already, and no bias.
"""

from __future__ import annotations

import statistics
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from typing import Any, Protocol

import torch
from torch import Tensor

from lowbit import ops_cuda
from lowbit.bench import cuda_peers
from lowbit.bench.cuda_peers import Side
from lowbit.bench.timer import machine
from lowbit.layouts import mma_tiles as tiles
from lowbit.types import FormatError, LowRank, QuantizedWeight

MODES = {"w8": tiles.W8, "w4ch": tiles.CHANNEL, "w4two": tiles.TWO_LEVEL, "w4grp": tiles.GROUPS}
RANK = 16
L2_BYTES = 128 << 20  # what the copies of a weight take together: more than twice the L2 of an H200 or L4
ROWS = (1, 2, 4, 8, 16, 32, 64, 128, 256, 512, 1024, 2048)
SHAPES = ((4096, 1024), (1024, 2048), (6144, 1024), (1024, 3072), (4096, 4096))  # the layer of OmniVoice, and one more
BASE = "cuBLAS float16"  # what ratios are over
LONG_US = 50_000.0  # all replays of a graph together; beyond it three are enough
Calls = Sequence[Callable[[], object]]


class Timer(Protocol):
    """``prepare`` makes something that can be repeated of some calls; ``time`` repeats it once: microseconds."""

    def prepare(self, calls: Calls) -> Any: ...
    def time(self, prepared: Any) -> float: ...


class Graphs:
    """The timer of a GPU: a CUDA graph of the calls, events around a replay."""

    def __init__(self) -> None:
        self.stream = torch.cuda.Stream()  # type: ignore[no-untyped-call]

    def prepare(self, calls: Calls) -> torch.cuda.CUDAGraph:
        self.stream.wait_stream(torch.cuda.current_stream())  # which made what the calls read
        with torch.cuda.stream(self.stream):
            for call in calls[:8]:  # what a call refuses, it refuses here, before a capture
                call()
            torch.cuda.synchronize()
            graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(graph, stream=self.stream):
                for call in calls:
                    call()
            graph.replay()
        return graph

    def time(self, prepared: torch.cuda.CUDAGraph) -> float:
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))  # type: ignore[no-untyped-call]
        with torch.cuda.stream(self.stream):
            begin.record(self.stream)
            prepared.replay()
            end.record(self.stream)
            end.synchronize()
        return float(begin.elapsed_time(end) * 1e3)


def replayed(calls: Calls, repeats: int = 7) -> float:
    """Microseconds for all calls together: one graph of them, median of ``repeats`` replays."""
    timer = Graphs()
    graph = timer.prepare(calls)
    return float(statistics.median(timer.time(graph) for _ in range(repeats)))


def facts(device: torch.device) -> dict[str, Any]:
    """What stands beside a figure of a GPU: chip, versions, commit, date."""
    here = machine()
    kept = {key: here[key] for key in ("torch", "lowbit", "commit", "date")}
    return {"bench": "cuda", "chip": torch.cuda.get_device_name(device), "cuda": torch.version.cuda, **kept}


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

    def product(
        self, i: int, x: tuple[Tensor, Tensor, Tensor | None], row: int | None = None, gated: bool = False
    ) -> Tensor:
        row = (ops_cuda.GEMV if self.few(x[0].shape[0]) else -1) if row is None else row
        up = self.up[i] if self.rank else None
        weight, half = self.weights[i], torch.float16
        return ops_cuda.linear(*x, weight, self.channel, self.bias, up, self.n, self.mode, half, row, gated)

    def both(self, i: int, x: Tensor, **before: Any) -> Tensor:
        return self.product(i, self.quantize(i, x, **before))


def sides(n: int, k: int, device: torch.device, modes: Sequence[str]) -> Iterator[tuple[str, Callable[[], list[Side]]]]:
    """(name, what makes it): each may fail where the chip, the torch or the shape lacks it, and costs itself alone."""
    for mode in modes:
        yield f"lowbit {mode}", partial(_ours, mode, n, k, device)
    yield "lowbit w4a4", partial(_int4, n, k, device)
    copies = max(2, -(-L2_BYTES // (n * k)))
    for dtype in (torch.float16, torch.bfloat16):
        yield f"cuBLAS {str(dtype).removeprefix('torch.')}", partial(cuda_peers.floats, dtype, n, k, copies, device)
    yield "fp8 _scaled_mm", partial(cuda_peers.fp8, n, k, copies, device)
    yield "int8 _int_mm", partial(cuda_peers.int8, n, k, copies, device)
    yield "tinygemm int4", partial(cuda_peers.tinygemm, n, k, copies * 2, device)


def _ours(mode: str, n: int, k: int, device: torch.device) -> list[Side]:
    bytes_ = tiles.BYTES[MODES[mode]] * -(-n // 64) * -(-k // 256) * 2
    stack = Stack(mode, n, k, max(2, -(-L2_BYTES // bytes_)), device)
    every = range(len(stack.weights))

    def products(x: Tensor) -> list[Callable[[], object]]:
        ready = stack.quantize(0, x)
        return [partial(stack.product, i, ready) for i in every]

    return [
        Side(f"lowbit {mode}", products),
        Side(f"lowbit {mode} with quantize", lambda x: [partial(stack.both, i, x) for i in every]),
    ]


def _int4(n: int, k: int, device: torch.device) -> list[Side]:
    """4-bit activations on INT4 tensor cores, two-level scales."""
    if not ops_cuda.has_int4(device):
        raise FormatError("the chip has no INT4 tensor cores (8.0, 8.6 and 8.9 have)")
    low = LowRank(torch.randn(k, RANK, device=device) / k**0.5, torch.randn(n, RANK, device=device) / 50)
    kept = (*tiles.pack_rows(weight("w4two", n, k, device)), *tiles.pack_branch(low, n, 128))
    copies = [[t.clone() for t in kept] for _ in range(max(2, -(-L2_BYTES // kept[0].numel())))]
    bias = torch.randn(-(-n // 128) * 128, device=device)

    def quantize(x: Tensor, c: list[Tensor]) -> tuple[Tensor, ...]:
        return ops_cuda.quantize4(x, hadamard=True, down=c[2])

    def product(given: tuple[Tensor, ...], c: list[Tensor]) -> Tensor:
        return ops_cuda.linear4(given[0], given[1], given[2], given[3], c[0], c[1], bias, c[3], n, torch.float16)

    def products(x: Tensor) -> list[Callable[[], object]]:
        ready = quantize(x, copies[0])
        return [partial(product, ready, c) for c in copies]

    def both(x: Tensor, c: list[Tensor]) -> Tensor:
        return product(quantize(x, c), c)

    return [
        Side("lowbit w4a4", products),
        Side("lowbit w4a4 with quantize", lambda x: [partial(both, x, c) for c in copies]),
    ]


def reason(error: Exception) -> str:
    """What an exception says, in one short line."""
    return (str(error).splitlines() or [type(error).__name__])[0][:120]


def race(calls: Mapping[str, Calls], timer: Timer, repeats: int = 7) -> dict[str, tuple[float, float] | str]:
    """name -> (microseconds a call cold, warm), or what it said when it was tried. Rounds go over all names in turn; what
    takes long has three."""
    found: dict[str, tuple[float, float] | str] = {}
    ready: dict[str, tuple[Any, Any]] = {}
    for name, mine in calls.items():
        try:
            ready[name] = timer.prepare(mine), timer.prepare(list(mine[:1]) * len(mine))
        except Exception as error:  # of a peer it may be anything, and costs that peer alone
            found[name] = reason(error)
    samples: dict[str, tuple[list[float], list[float]]] = {name: ([], []) for name in ready}
    for round_ in range(repeats):
        for name, graphs in ready.items():
            for graph, times in zip(graphs, samples[name]):
                if round_ < 3 or sum(times) < LONG_US:
                    times.append(timer.time(graph))
    for name, (cold, warm) in samples.items():
        count = len(calls[name])
        found[name] = statistics.median(cold) / count, statistics.median(warm) / count
    return found


def run(shapes: Sequence[tuple[int, int]], rows: Sequence[int], modes: Sequence[str]) -> Iterator[dict[str, Any]]:
    """A JSON line a competitor, shape and M. FormatError where there is no such device."""
    why = ops_cuda.refuses(0)
    if why is not None:
        raise FormatError(f"--device: found cuda, but {why}")
    device = torch.device("cuda")
    known = {**facts(device), "bench": "cuda-layers", "rank": RANK}
    for n, k in shapes:
        for line in run_shape(n, k, rows, modes, device, Graphs()):
            yield {**known, **line}


def run_shape(
    n: int, k: int, rows: Sequence[int], modes: Sequence[str], device: torch.device, timer: Timer
) -> Iterator[dict[str, Any]]:
    """The lines of one shape: all weights are made once, all competitors of an M take turns. What cannot run has a line
    that says why."""
    made: list[Side] = []
    for name, make in sides(n, k, device, modes):
        try:
            made += make()
        except Exception as error:  # as in race
            yield {"name": name, "n": n, "k": k, "left_out": reason(error)}
    for index, m in enumerate(rows):
        print(f"{n}x{k}, M={m} ({index + 1} of {len(rows)})", file=sys.stderr, flush=True)
        x, calls = torch.randn(m, k, device=device).half(), {}
        for side in made:
            try:
                calls[side.name] = side.calls(x)
            except Exception as error:
                yield {"name": side.name, "n": n, "k": k, "m": m, "left_out": reason(error)}
        found = race(calls, timer)
        base = found.get(BASE)
        for name, times in found.items():
            case = {"name": name, "n": n, "k": k, "m": m}
            if isinstance(times, str):
                yield {**case, "left_out": times}
                continue
            cold, warm = times
            ratio = None if base is None or isinstance(base, str) else round(cold / base[0], 3)
            yield {
                **case, "cold_us": round(cold, 3), "warm_us": round(warm, 3), "copies": len(calls[name]),
                "ratio": ratio, "ratio_to": BASE,
            }  # fmt: skip
