"""One run on a GPU: are the CUDA kernels right, and how fast. Builds nothing; every check stands alone.

    PYTHONPATH=src python3 bench/gpu_check.py [quantize gemm gemv speed chain peers] [w8 w4ch w4two w4grp] [FILE.json]

Sections and modes in processes of their own (run_gpu_check.sh): a kernel that hangs or faults costs its own part only.

Exact means bit for bit against float64 sums of integers with power-of-two scales.
"""

from __future__ import annotations

import json
import statistics
import sys
import time
import traceback
from collections.abc import Callable, Sequence
from pathlib import Path

import torch
from torch import Tensor

from lowbit import ops, reference
from lowbit.layouts import mma_tiles as tiles
from lowbit.types import LowRank, QuantizedWeight

DEVICE = torch.device("cuda")
MODES = {"w8": tiles.W8, "w4ch": tiles.CHANNEL, "w4two": tiles.TWO_LEVEL, "w4grp": tiles.GROUPS}
LAYER = {"qkv": (4096, 1024), "o": (1024, 2048), "gate_up": (6144, 1024), "down": (1024, 3072)}
LAYERS = 28
lines: list[dict[str, object]] = []
failed: list[str] = []


def say(**line: object) -> None:
    lines.append(line)
    print(" ".join(f"{k}={v:.4g}" if isinstance(v, float) else f"{k}={v}" for k, v in line.items()), flush=True)


def check(name: str, good: bool, **more: object) -> None:
    if not good:
        failed.append(name)
        say(FAIL=name, **more)


def guarded(run: Callable[[], None]) -> None:
    began = time.perf_counter()
    try:
        run()
    except Exception as error:  # one broken kernel must not cost the rest of the run
        failed.append(run.__name__)
        print("".join(traceback.format_exception(error)[-3:]), flush=True)
    print(f"-- {run.__name__}: {time.perf_counter() - began:.1f} s", flush=True)


def weight(mode: str, n: int, k: int, exact: bool, seed: int = 0) -> QuantizedWeight:
    g = torch.Generator(device=DEVICE).manual_seed(seed + n + k)

    def draw(low: int, high: int, *shape: int) -> Tensor:
        return torch.randint(low, high, shape, generator=g, device=DEVICE)

    if exact:
        channel = torch.ldexp(torch.ones(n, 1, device=DEVICE), draw(-9, -5, n, 1))
    else:
        channel = (0.002 + 0.004 * torch.rand(n, 1, generator=g, device=DEVICE)).bfloat16().float()
    if mode == "w8":
        return QuantizedWeight(draw(-128, 128, n, k).to(torch.int8), channel, k, 8)
    codes = draw(-8, 8, n, k).to(torch.int8)
    if mode == "w4ch":
        return QuantizedWeight(codes, channel, k, 4)
    groups = -(-k // 64)
    if mode == "w4two":
        steps = draw(1, 16, n, groups) * (1 - 2 * draw(0, 2, n, groups))
        steps[:, 0] = 15
        steps[:, -1] = 1
        return QuantizedWeight(codes, channel * steps, 64, 4)
    if exact:  # powers of two: sums are exact in float32 as long as 2^24 holds them
        scales = torch.ldexp(torch.ones(n, groups, device=DEVICE), draw(-2, 1, n, groups)).half()
        scales[:, 0] = 0.625  # no two-level scales: 5/8
        scales[:, 1:2] = 17 / 16
        return QuantizedWeight(codes, scales, 64, 4)
    return QuantizedWeight(codes, (channel * (0.5 + torch.rand(n, groups, generator=g, device=DEVICE))).half(), 64, 4)


def plain(q: QuantizedWeight, t: tiles.Tiles) -> Tensor:
    """The weight without its channel scale, float [N, K]."""
    codes, scales = tiles.unpack(t, q.n, q.k)
    if scales.shape[1] == 1:
        return codes.double()
    return codes.double() * reference.expand((scales / t.channel[: q.n, None]).double(), 64, q.k)


def codes_of(m: int, k: int, seed: int = 1) -> Tensor:
    g = torch.Generator(device=DEVICE).manual_seed(seed + m)
    x = torch.randint(-127, 128, (m, k), generator=g, device=DEVICE).to(torch.int8)
    return torch.nn.functional.pad(x, (0, -k % 256))


def quantize() -> None:
    g = torch.Generator(device=DEVICE).manual_seed(3)
    cases = [(1, 1024), (5, 1024), (685, 1024), (17, 2048), (172, 3072), (3, 4096), (33, 4096), (4, 11008), (9, 576), (2, 14336), (1, 32768), (40, 80)]
    worst = 0.0
    for m, k in cases:
        for dtype in (torch.float16, torch.bfloat16, torch.float32):
            for had in (True, False):
                if had and k % 64:
                    continue
                x = torch.randn(m, k, generator=g, device=DEVICE).to(dtype)
                x[m // 2] = 0
                smooth = (0.5 + torch.rand(k, generator=g, device=DEVICE)) if had else None
                down = (torch.randn(k, 16, generator=g, device=DEVICE) / k**0.5).half()
                branch = tiles.pack_branch(LowRank(down, torch.zeros(64, 16, device=DEVICE)), 64)
                codes, scales, low = ops.cuda_quantize(x, smooth=smooth, hadamard=had, down=branch.down, tile_order=had)
                inside = x.float() if smooth is None else x.float() / smooth
                inside = reference.hadamard(inside, 64) if had else inside
                want, sa = reference.quantize_rows(inside)
                got = tiles.plain_order(codes) if had else codes
                name = f"quantize {m}x{k} {dtype} had={had}"
                check(name + " codes", torch.equal(got[:, :k], want) and not bool(got[:, k:].any()), wrong=int((got[:, :k] != want).sum()))
                check(name + " scales", torch.equal(scales, sa[:, 0]))
                factor = torch.where(sa > 0, 127 / inside.abs().amax(1, keepdim=True), torch.zeros_like(sa))
                ideal = ((inside * factor).half().double() @ down.double())
                off = (tiles.unpack_low(low, m).double() - ideal).abs().max().item() / max(ideal.abs().max().item(), 1e-9)
                worst = max(worst, off)
                check(name + " low", off < 1.5e-3, off=off)
    say(quantize="low", worst=worst)
    # behind a norm, with a residual, gated
    for m, k, dtype in ((685, 1024, torch.float16), (3, 4096, torch.bfloat16), (17, 3072, torch.float32)):
        x, res = (torch.randn(m, k, generator=g, device=DEVICE).to(dtype) for _ in range(2))
        w = 1 + 0.1 * torch.randn(k, generator=g, device=DEVICE)
        kept = res.clone()
        codes, scales, _ = ops.cuda_quantize(x, residual=kept, norm=w, eps=1e-6, hadamard=True)
        total = (x.float() + res.float()).to(dtype)
        inside = reference.hadamard(reference.rms_norm(total, w, 1e-6), 64)
        want, sa = reference.quantize_rows(inside)
        wrong = (tiles.plain_order(codes)[:, :k] != want).float().mean().item()
        check("residual kept", torch.equal(kept, total))
        check("norm", wrong < 1e-3 and bool((scales - sa[:, 0]).abs().max() < 1e-5 * sa.max()), wrong=wrong)
        both = torch.randn(m, 2 * k, generator=g, device=DEVICE).to(dtype)
        codes, scales, _ = ops.cuda_quantize(both, silu=True, hadamard=True)
        inside = reference.hadamard(torch.nn.functional.silu(both[:, :k].float()) * both[:, k:].float(), 64)
        want, sa = reference.quantize_rows(inside)
        wrong = (tiles.plain_order(codes)[:, :k] != want).float().mean().item()
        check("silu", wrong < 1e-3, wrong=wrong)
    # one bad row; a row alone
    x = torch.randn(40, 1024, generator=g, device=DEVICE).half()
    w = torch.ones(1024, device=DEVICE)
    down = tiles.pack_branch(LowRank(torch.randn(1024, 32, device=DEVICE), torch.zeros(64, 32, device=DEVICE)), 64).down
    clean = ops.cuda_quantize(x, norm=w, eps=1e-6, hadamard=True, down=down)
    for bad in (float("nan"), float("inf")):
        dirty = x.clone()
        dirty[7, 100] = bad
        c, s, low = ops.cuda_quantize(dirty, norm=w, eps=1e-6, hadamard=True, down=down)
        keep = torch.arange(40, device=DEVICE) != 7
        same = torch.equal(c[keep], clean[0][keep]) and torch.equal(s[keep], clean[1][keep])
        same = same and torch.equal(tiles.unpack_low(low, 40)[keep], tiles.unpack_low(clean[2], 40)[keep])
        check(f"{bad} stays in its row", same and not bool(torch.isfinite(s[7])) and not bool(c[7].any()))
    alone = [ops.cuda_quantize(x[i : i + 1], norm=w, eps=1e-6, hadamard=True, down=down) for i in range(40)]
    check("row alone: codes", torch.equal(torch.cat([a[0] for a in alone]), clean[0]))
    check("row alone: low", torch.equal(torch.cat([tiles.unpack_low(a[2], 1) for a in alone]), tiles.unpack_low(clean[2], 40)))
    wide = torch.randn(300, 4096, device=DEVICE).half()
    many = ops.cuda_quantize(wide, norm=torch.ones(4096, device=DEVICE), eps=1e-6, hadamard=True)
    few = ops.cuda_quantize(wide[:9], norm=torch.ones(4096, device=DEVICE), eps=1e-6, hadamard=True)
    check("row alone: 4096", torch.equal(many[0][:9], few[0]) and torch.equal(many[1][:9], few[1]))


def linear(q: QuantizedWeight, m: int, rows: Sequence[int], rank: int = 0, bias: bool = False, exact: bool = True, dtype: torch.dtype = torch.float16) -> None:
    t = tiles.pack(q)
    base = plain(q, t)
    n, k = q.n, q.k
    x = codes_of(m, k)
    g = torch.Generator(device=DEVICE).manual_seed(5)
    sx = torch.ldexp(torch.ones(m, device=DEVICE), torch.randint(-7, -3, (m,), generator=g, device=DEVICE)) if exact else 0.01 + 0.02 * torch.rand(m, generator=g, device=DEVICE)
    low = up = low_p = up_p = b = None
    if rank:
        low = torch.randint(-30, 30, (m, rank), generator=g, device=DEVICE).half() if exact else (20 * torch.randn(m, rank, generator=g, device=DEVICE)).half()
        up = (torch.randint(-8, 8, (n, rank), generator=g, device=DEVICE) / 64).half() if exact else (0.02 * torch.randn(n, rank, generator=g, device=DEVICE)).half()
        up_p = tiles.pack_branch(LowRank(torch.zeros(k, rank, device=DEVICE), up), n).up
        low_p = tiles.pack_low(low)
    if bias:
        b = torch.randint(-9, 9, (n,), generator=g, device=DEVICE).float()
        b_p = torch.nn.functional.pad(b, (0, -n % 64))
    want64 = reference.cuda_linear(x[:, :k], sx, base, t.channel[:n], low, up, b)
    want = want64.float().to(dtype)
    for row in rows:
        order = x if row == ops.GEMV else tiles.tile_order(x)
        name = f"mode{t.mode} {n}x{k} M={m} row={row} rank={rank} bias={bias} {dtype}"
        try:
            y = ops.cuda_linear(order, sx, low_p, t.weight, t.channel, b_p if bias else None, up_p, n, t.mode, dtype, row)
        except RuntimeError as error:
            if "does not divide" in str(error):
                continue
            raise
        torch.cuda.synchronize()
        again = ops.cuda_linear(order, sx, low_p, t.weight, t.channel, b_p if bias else None, up_p, n, t.mode, dtype, row)
        check(name + " again", torch.equal(y, again))
        rounds = t.mode == tiles.GROUPS and row != ops.GEMV  # its sums carry 12582912 along: about 0.3 of a scale a group
        if exact and not rounds:
            check(name, torch.equal(y, want), wrong=int((y != want).sum()), worst=float((y.double() - want64).abs().max()), shape=str(tuple(y.shape)))
        else:
            off = reference.error(y, want64)
            check(name, off < (3e-3 if dtype == torch.bfloat16 else 8e-4 if rounds else 5e-4), off=off)


def rows_of(mode: str) -> range:
    return range(-1, 7 if mode == "w4grp" else 11)


def gemm() -> None:
    for mode in MODES:
        for n, k in ((384, 512), (128, 1024)):
            q = weight(mode, n, k, exact=True)
            for m in (1, 5, 16, 17, 172, 648, 685, 2049):
                linear(q, m, list(rows_of(mode)))
        q = weight(mode, 384, 1024, exact=True)
        linear(q, 172, list(rows_of(mode)), rank=16, bias=True)
        linear(q, 685, list(rows_of(mode)), rank=32, bias=True, dtype=torch.float32)
        linear(q, 250, list(rows_of(mode)), rank=64, bias=True, dtype=torch.bfloat16)
        linear(weight(mode, 6144, 1024, exact=True), 685, list(rows_of(mode)), rank=16)
        linear(weight(mode, 1024, 3072, exact=True), 685, list(rows_of(mode)), rank=16)
        linear(weight(mode, 384, 1024, exact=False), 685, list(rows_of(mode)), rank=16, bias=True, exact=False)
        linear(weight(mode, 4096, 1024, exact=False), 1890, list(rows_of(mode)), rank=16, bias=True, exact=False)
        linear(weight(mode, 200, 640, exact=True), 77, [-1], rank=16, bias=True)  # off the tile
        linear(weight(mode, 72, 192, exact=True), 33, [-1], bias=True, dtype=torch.float32)
        linear(weight(mode, 256, 11008, exact=False), 100, [-1], exact=False)
        torch.cuda.synchronize()
        print(f"   gemm {mode} done, failed so far {len(failed)}", flush=True)
        linear(q, 0, [-1])


def gemv() -> None:
    for mode in [m for m in MODES if m != "w8"]:
        for n, k in ((128, 512), (4096, 4096), (11008, 4096), (192, 11008), (1024, 3072), (64, 256)):
            exact = mode != "w4grp" or k <= 1024
            q = weight(mode, n, k, exact=exact)
            for m in (1, 5, 8, 9, 16):
                linear(q, m, [ops.GEMV], exact=exact)
        q = weight(mode, 384, 1024, exact=True)
        linear(q, 16, [ops.GEMV, 0], rank=32, bias=True)
        linear(q, 1, [ops.GEMV], rank=64, bias=True, dtype=torch.float32)
        if mode != "w4grp":  # a row alone has the bits of the batch, whichever kernel runs
            q = weight(mode, 1024, 2048, exact=False)
            t = tiles.pack(q)
            low = torch.randn(40, 16, device=DEVICE).half() * 20
            up = tiles.pack_branch(LowRank(torch.zeros(2048, 16, device=DEVICE), torch.randn(1024, 16, device=DEVICE) / 50), 1024).up
            x, sx, b = codes_of(40, 2048), torch.rand(40, device=DEVICE), torch.randn(1024, device=DEVICE)
            batch = ops.cuda_linear(tiles.tile_order(x), sx, tiles.pack_low(low), *t[:2], b, up, 1024, t.mode, torch.float16)
            one = ops.cuda_linear(x[3:4], sx[3:4], tiles.pack_low(low[3:4]), *t[:2], b, up, 1024, t.mode, torch.float16, ops.GEMV)
            check(f"{mode}: row alone through the GEMV", torch.equal(one[0], batch[3]), wrong=int((one[0] != batch[3]).sum()))


# -- speed ----------------------------------------------------------------------------------------------------------


def replayed(calls: Sequence[Callable[[], object]], repeats: int = 7) -> float:
    """Microseconds for all calls together: one graph of them, median of replays."""
    stream = torch.cuda.Stream()
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
            a, b = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            a.record(stream)
            graph.replay()
            b.record(stream)
            b.synchronize()
            times.append(a.elapsed_time(b) * 1e3)
    del graph
    return statistics.median(times)


class Layer:
    """One shape in one mode: weights of many layers, random bytes that cost what real ones cost."""

    def __init__(self, mode: str, n: int, k: int, copies: int, rank: int = 16) -> None:
        self.mode, self.n, self.k = MODES[mode], n, k
        t = tiles.pack(weight(mode, n, k, exact=False))
        self.weights = [t.weight.clone() for _ in range(copies)]
        self.channel, self.bias = t.channel, torch.randn(len(t.channel), device=DEVICE)
        low = LowRank(torch.randn(k, rank, device=DEVICE) / k**0.5, torch.randn(n, rank, device=DEVICE) / 50)
        branches = [tiles.pack_branch(low, n) for _ in range(copies)] if rank else []
        self.down, self.up = [b.down for b in branches], [b.up for b in branches]
        self.rank = rank

    def call(self, i: int, x: tuple[Tensor, Tensor, Tensor], row: int, dtype: torch.dtype = torch.float16) -> Tensor:
        codes, scales, low = x
        up = self.up[i] if self.rank else None
        return ops.cuda_linear(codes, scales, low, self.weights[i], self.channel, self.bias, up, self.n, self.mode, dtype, row)


best: dict[tuple[str, str, int], int] = {}


def speed() -> None:
    """Every row of tiles at every shape, and the GEMV."""
    for mode in MODES:
        for name, (n, k) in LAYER.items():
            layer = Layer(mode, n, k, LAYERS)
            for m in (16, 172, 685, 1890):
                x = ops.cuda_quantize(torch.randn(m, k, device=DEVICE).half(), hadamard=True, down=layer.down[0])
                found = {}
                for row in rows_of(mode):
                    try:
                        found[row] = replayed([lambda i=i, row=row: layer.call(i, x, row) for i in range(LAYERS)], 5) / LAYERS
                    except RuntimeError as error:
                        if "does not divide" not in str(error):
                            say(FAIL="speed", mode=mode, shape=name, m=m, row=row, error=str(error)[:80])
                            failed.append("speed")
                top = min(found, key=lambda r: found[r])
                best[mode, name, m] = top
                order = sorted(found, key=lambda r: found[r])
                say(gemm=mode, shape=name, m=m, best=top, us=found[top], table=found[-1], rest=",".join(f"{r}:{found[r]:.2f}" for r in order[1:7]))
    for n, k in ((4096, 4096), (11008, 4096)):
        for mode in [m for m in MODES if m != "w8"]:
            bytes_ = tiles.BYTES[MODES[mode]] * (n // 64) * (k // 128)
            copies = max(8, (256 << 20) // bytes_)
            layer = Layer(mode, n, k, copies)
            for m in (1, 8, 16):
                x = ops.cuda_quantize(torch.randn(m, k, device=DEVICE).half(), hadamard=True, down=layer.down[0], tile_order=False)
                us = replayed([lambda i=i: layer.call(i, x, ops.GEMV) for i in range(copies)]) / copies
                h = torch.randn(m, k, device=DEVICE).half()

                def both(i: int, h: Tensor = h, layer: Layer = layer) -> Tensor:
                    return layer.call(i, ops.cuda_quantize(h, hadamard=True, down=layer.down[i], tile_order=False), ops.GEMV)

                pair = replayed([lambda i=i: both(i) for i in range(copies)]) / copies
                say(gemv=mode, shape=f"{n}x{k}", m=m, us=us, gbps=bytes_ / us * 1e-3, with_quantize=pair)
            del layer
    for m, k in ((1, 1024), (16, 1024), (172, 1024), (685, 1024), (1890, 1024), (685, 2048), (685, 3072), (1, 4096), (16, 4096), (685, 4096)):
        g = torch.randn(m, k, device=DEVICE).half()
        res, w, two = g.clone(), torch.ones(k, device=DEVICE), torch.randn(m, 2 * k, device=DEVICE).half()
        out: dict[str, float] = {}
        for rank in (0, 16, 32):
            down = tiles.pack_branch(LowRank(torch.randn(k, rank, device=DEVICE), torch.zeros(64, rank, device=DEVICE)), 64).down if rank else None
            out[f"plain_r{rank}"] = replayed([lambda down=down: ops.cuda_quantize(g, hadamard=True, down=down)] * 28) / 28
            out[f"add_norm_r{rank}"] = replayed([lambda down=down: ops.cuda_quantize(g, residual=res, norm=w, eps=1e-6, hadamard=True, down=down)] * 28) / 28
            res.zero_()
        out["silu_r16"] = replayed([lambda: ops.cuda_quantize(two, silu=True, hadamard=True, down=down)] * 28) / 28
        say(quantize=f"{m}x{k}", **out)


def chain() -> None:
    """28 layers of four linears; the GEMMs alone, then with quantize (norm, residual, silu) before each."""
    for mode in MODES:
        parts = {name: Layer(mode, n, k, LAYERS) for name, (n, k) in LAYER.items()}
        for m in (1, 16, 172, 685, 1890):
            small = m <= 16 and mode != "w8"
            row = {name: ops.GEMV if small else best.get((mode, name, m), -1) for name in LAYER}
            inputs = {name: torch.randn(m, k * (2 if name == "down" else 1), device=DEVICE).half() for name, (_, k) in LAYER.items()}
            res = torch.zeros(m, 1024, device=DEVICE).half()
            norm = torch.ones(1024, device=DEVICE)

            def quant(name: str, i: int, m: int = m, small: bool = small, inputs: dict[str, Tensor] = inputs, res: Tensor = res, norm: Tensor = norm) -> tuple[Tensor, Tensor, Tensor]:
                fused = {"residual": res, "norm": norm, "eps": 1e-6} if name in ("qkv", "gate_up") else {"silu": name == "down"}
                return ops.cuda_quantize(inputs[name], hadamard=True, down=parts[name].down[i], tile_order=not small, **fused)

            ready = {name: quant(name, 0) for name in LAYER}
            alone = [lambda name=name, i=i: parts[name].call(i, ready[name], row[name]) for i in range(LAYERS) for name in LAYER]
            table = [lambda name=name, i=i: parts[name].call(i, ready[name], ops.GEMV if small else -1) for i in range(LAYERS) for name in LAYER]
            full = [lambda name=name, i=i: parts[name].call(i, quant(name, i), row[name]) for i in range(LAYERS) for name in LAYER]
            quants = [lambda name=name, i=i: quant(name, i) for i in range(LAYERS) for name in LAYER]
            say(layer=mode, m=m, linears=replayed(alone) / LAYERS, by_table=replayed(table) / LAYERS, quantize=replayed(quants) / LAYERS, all=replayed(full) / LAYERS)


def peers() -> None:
    for m in (1, 16, 172, 685, 1890):
        out: dict[str, float] = {}
        half = {name: [torch.randn(n, k, device=DEVICE).half() for _ in range(LAYERS)] for name, (n, k) in LAYER.items()}
        x = {name: torch.randn(m, k, device=DEVICE).half() for name, (_, k) in LAYER.items()}
        out["fp16"] = replayed([lambda n=n, i=i: x[n] @ half[n][i].T for i in range(LAYERS) for n in LAYER]) / LAYERS
        try:
            one = torch.ones((), device=DEVICE)
            f8 = {n: [w.to(torch.float8_e4m3fn) for w in half[n]] for n in LAYER}
            x8 = {n: torch.nn.functional.pad(x[n], (0, 0, 0, -m % 16)).to(torch.float8_e4m3fn) for n in LAYER}
            out["fp8"] = replayed([lambda n=n, i=i: torch._scaled_mm(x8[n], f8[n][i].T, one, one, out_dtype=torch.float16) for i in range(LAYERS) for n in LAYER]) / LAYERS
        except RuntimeError as error:
            print("fp8:", str(error)[:100])
        if m > 16:
            i8 = {n: [torch.randint(-128, 128, w.shape, device=DEVICE).to(torch.int8) for w in half[n]] for n in LAYER}
            xi = {n: torch.nn.functional.pad(x[n], (0, 0, 0, -m % 8)).to(torch.int8) for n in LAYER}
            out["int_mm"] = replayed([lambda n=n, i=i: torch._int_mm(xi[n], i8[n][i].T) for i in range(LAYERS) for n in LAYER]) / LAYERS
        say(peers="layer", m=m, **out)
    for n, k in ((4096, 4096), (11008, 4096)):
        copies = max(4, (256 << 20) // (n * k))
        w = [torch.randn(n, k, device=DEVICE).half() for _ in range(copies)]
        w4 = [torch._convert_weight_to_int4pack(torch.randint(0, 255, (n, k // 2), device=DEVICE, dtype=torch.uint8), 8) for _ in range(copies * 2)]
        sz = torch.rand(k // 64, n, 2, device=DEVICE).bfloat16()
        for m in (1, 16):
            xh = torch.randn(m, k, device=DEVICE).half()
            xb = xh.bfloat16()
            say(peers=f"{n}x{k}", m=m, fp16=replayed([lambda i=i: xh @ w[i].T for i in range(copies)]) / copies,
                tinygemm=replayed([lambda i=i: torch._weight_int4pack_mm(xb, w4[i], 64, sz) for i in range(copies * 2)]) / copies / 2)  # fmt: skip


def main() -> None:
    names = [a for a in sys.argv[1:] if not a.startswith("--") and not a.endswith(".json")]
    target = next((a for a in sys.argv[1:] if a.endswith(".json")), None)
    print("torch", torch.__version__, torch.cuda.get_device_name(0), "refuses:", ops.cuda_refuses(0), flush=True)
    every = (quantize, gemm, gemv, speed, chain, peers)
    for mode in [m for m in MODES if names and m not in names and any(n in MODES for n in names)]:
        del MODES[mode]  # "gemm w8": that mode alone
    for run in every:
        if not names or run.__name__ in names:
            guarded(run)
    print(f"failed: {len(failed)}", *failed[:40], sep="\n  ", flush=True)
    if target:
        Path(target).write_text("".join(json.dumps(line) + "\n" for line in lines))


if __name__ == "__main__":
    main()
