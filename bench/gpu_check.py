"""One run on a GPU: are the CUDA kernels right, and how fast. Builds nothing; every check stands alone.

    PYTHONPATH=src python3 bench/gpu_check.py [quantize gemm gemv int4 rope overlap module small error speed speed4 chain joined peers]
        [w8 w4ch w4two w4grp] [FILE.jsonl]
    PYTHONPATH=src python3 bench/gpu_check.py --target 8.9    where a chip of that compute capability keeps its lines

Sections and modes in processes of their own (run_gpu_check.sh): a kernel that hangs or faults costs its own part only.
Lines are added to FILE, each with the chip, versions, commit and date; `lowbit bench numbers` makes pages of them.

Exact means bit for bit against float64 sums of integers with power-of-two scales.
"""

# ruff: noqa: B023 - every call below is made before its loop goes on
from __future__ import annotations

import json
import re
import sys
import time
import traceback
from collections.abc import Callable, Sequence
from pathlib import Path

import torch
from torch import Tensor

from lowbit import ops_cuda, reference
from lowbit.bench.cuda_layers import RANK, Stack, facts, replayed
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
    cases = [
        (1, 1024),
        (5, 1024),
        (685, 1024),
        (17, 2048),
        (172, 3072),
        (3, 4096),
        (33, 4096),
        (4, 11008),
        (9, 576),
        (2, 14336),
        (1, 32768),
        (40, 80),
    ]
    worst = 0.0
    for m, k in cases:
        for dtype in (torch.float16, torch.bfloat16, torch.float32):
            for had in (True, False):
                if had and k % 64:
                    continue
                x = torch.randn(m, k, generator=g, device=DEVICE).to(dtype)
                x[m // 2] = 0
                smooth = (0.5 + torch.rand(k, generator=g, device=DEVICE)).half() if had else None
                down = (torch.randn(k, 16, generator=g, device=DEVICE) / k**0.5).half()
                branch = tiles.pack_branch(LowRank(down, torch.zeros(64, 16, device=DEVICE)), 64)
                both = None if smooth is None else tiles.pack_smooth(smooth)
                codes, scales, low = ops_cuda.quantize(x, smooth=both, hadamard=had, down=branch.down, tile_order=had)
                inside = x.float() if smooth is None else (x.float().cpu() / smooth.float().cpu()).to(DEVICE)
                inside = reference.hadamard(inside, 64) if had else inside
                want, sa = (
                    t.to(DEVICE) for t in reference.quantize_rows(inside.cpu())
                )  # a GPU's x / 127 is x * (1 / 127)
                got = tiles.plain_order(codes) if had else codes
                name = f"quantize {m}x{k} {dtype} had={had}"
                check(
                    name + " codes",
                    torch.equal(got[:, :k], want) and not bool(got[:, k:].any()),
                    wrong=int((got[:, :k] != want).sum()),
                )
                check(name + " scales", torch.equal(scales, sa[:, 0]))
                factor = torch.where(sa > 0, 127 / inside.abs().amax(1, keepdim=True), torch.zeros_like(sa))
                ideal = (inside * factor).half().double() @ down.double()
                off = (tiles.unpack_low(low, m).double() - ideal).abs().max().item() / max(
                    ideal.abs().max().item(), 1e-9
                )
                worst = max(worst, off)
                check(name + " low", off < 1.5e-3, off=off)
    say(quantize="low", worst=worst)
    # behind a norm, with a residual, gated
    for m, k, dtype in ((685, 1024, torch.float16), (3, 4096, torch.bfloat16), (17, 3072, torch.float32)):
        x, res = (torch.randn(m, k, generator=g, device=DEVICE).to(dtype) for _ in range(2))
        w = 1 + 0.1 * torch.randn(k, generator=g, device=DEVICE)
        kept = res.clone()
        codes, scales, _ = ops_cuda.quantize(x, residual=kept, norm=w, eps=1e-6, hadamard=True)
        total = (x.float() + res.float()).to(dtype)
        inside = reference.hadamard(reference.rms_norm(total, w, 1e-6), 64)
        want, sa = reference.quantize_rows(inside)
        wrong = (tiles.plain_order(codes)[:, :k] != want).float().mean().item()
        check("residual kept", torch.equal(kept, total))
        check("norm", wrong < 1e-3 and bool((scales - sa[:, 0]).abs().max() < 1e-5 * sa.max()), wrong=wrong)
        both = torch.randn(m, 2 * k, generator=g, device=DEVICE).to(dtype)
        codes, scales, _ = ops_cuda.quantize(both, silu=True, hadamard=True)
        inside = reference.hadamard(torch.nn.functional.silu(both[:, :k].float()) * both[:, k:].float(), 64)
        want, sa = reference.quantize_rows(inside)
        wrong = (tiles.plain_order(codes)[:, :k] != want).float().mean().item()
        check("silu", wrong < 1e-3, wrong=wrong)
    # one bad row; a row alone
    x = torch.randn(40, 1024, generator=g, device=DEVICE).half()
    w = torch.ones(1024, device=DEVICE)
    down = tiles.pack_branch(LowRank(torch.randn(1024, 32, device=DEVICE), torch.zeros(64, 32, device=DEVICE)), 64).down
    clean = ops_cuda.quantize(x, norm=w, eps=1e-6, hadamard=True, down=down)
    for bad in (float("nan"), float("inf")):
        dirty = x.clone()
        dirty[7, 100] = bad
        c, s, low = ops_cuda.quantize(dirty, norm=w, eps=1e-6, hadamard=True, down=down)
        keep = torch.arange(40, device=DEVICE) != 7
        same = torch.equal(c[keep], clean[0][keep]) and torch.equal(s[keep], clean[1][keep])
        same = same and torch.equal(tiles.unpack_low(low, 40)[keep], tiles.unpack_low(clean[2], 40)[keep])
        check(f"{bad} stays in its row", same and not bool(torch.isfinite(s[7])) and not bool(c[7].any()))
    alone = [ops_cuda.quantize(x[i : i + 1], norm=w, eps=1e-6, hadamard=True, down=down) for i in range(40)]
    check("row alone: codes", torch.equal(torch.cat([a[0] for a in alone]), clean[0]))
    check(
        "row alone: low",
        torch.equal(torch.cat([tiles.unpack_low(a[2], 1) for a in alone]), tiles.unpack_low(clean[2], 40)),
    )
    wide = torch.randn(300, 4096, device=DEVICE).half()
    many = ops_cuda.quantize(wide, norm=torch.ones(4096, device=DEVICE), eps=1e-6, hadamard=True)
    few = ops_cuda.quantize(wide[:9], norm=torch.ones(4096, device=DEVICE), eps=1e-6, hadamard=True)
    check("row alone: 4096", torch.equal(many[0][:9], few[0]) and torch.equal(many[1][:9], few[1]))


def linear(
    q: QuantizedWeight,
    m: int,
    rows: Sequence[int],
    rank: int = 0,
    bias: bool = False,
    exact: bool = True,
    dtype: torch.dtype = torch.float16,
) -> None:
    t = tiles.pack(q)
    base = plain(q, t)
    n, k = q.n, q.k
    x = codes_of(m, k)
    g = torch.Generator(device=DEVICE).manual_seed(5)
    sx = (
        torch.ldexp(torch.ones(m, device=DEVICE), torch.randint(-7, -3, (m,), generator=g, device=DEVICE))
        if exact
        else 0.01 + 0.02 * torch.rand(m, generator=g, device=DEVICE)
    )
    low = up = low_p = up_p = b = None
    if rank:
        low = (
            torch.randint(-30, 30, (m, rank), generator=g, device=DEVICE).half()
            if exact
            else (20 * torch.randn(m, rank, generator=g, device=DEVICE)).half()
        )
        up = (
            (torch.randint(-8, 8, (n, rank), generator=g, device=DEVICE) / 64).half()
            if exact
            else (0.02 * torch.randn(n, rank, generator=g, device=DEVICE)).half()
        )
        up_p = tiles.pack_branch(LowRank(torch.zeros(k, rank, device=DEVICE), up), n).up
        low_p = tiles.pack_low(low)
    if bias:
        b = torch.randint(-9, 9, (n,), generator=g, device=DEVICE).float()
        b_p = torch.nn.functional.pad(b, (0, -n % 64))
    want64 = reference.cuda_linear(x[:, :k], sx, base, t.channel[:n], low, up, b)
    want = want64.float().to(dtype)
    for row in rows:
        order = x if row == ops_cuda.GEMV else tiles.tile_order(x)
        name = f"mode{t.mode} {n}x{k} M={m} row={row} rank={rank} bias={bias} {dtype}"
        try:
            y = ops_cuda.linear(
                order, sx, low_p, t.weight, t.channel, b_p if bias else None, up_p, n, t.mode, dtype, row
            )
        except RuntimeError as error:
            if "does not divide" in str(error) or "fewer rows" in str(error):
                continue
            raise
        torch.cuda.synchronize()
        again = ops_cuda.linear(
            order, sx, low_p, t.weight, t.channel, b_p if bias else None, up_p, n, t.mode, dtype, row
        )
        check(name + " again", torch.equal(y, again))
        rounds = t.mode == tiles.GROUPS and row not in (
            ops_cuda.GEMV,
            ops_cuda.PORTABLE,
        )  # its sums carry 12582912 along: about 0.3 of a scale a group
        if exact and not rounds:
            check(name, torch.equal(y, want), wrong=int((y != want).sum()), shape=str(tuple(y.shape)))
        else:
            off = reference.error(y, want64)
            check(name, off < (3e-3 if dtype == torch.bfloat16 else 8e-4 if rounds else 5e-4), off=off)
        if HOPPER and row >= -1 and n % 16 == 0:  # as if the rows were those of a gate and its up in turn
            try:
                z = ops_cuda.linear(
                    order, sx, low_p, t.weight, t.channel, b_p if bias else None, up_p, n, t.mode, dtype, row, True
                )
            except RuntimeError as error:
                if "no gated end" in str(error):
                    continue
                raise
            pairs = want64.reshape(m, n // 16, 2, 8)
            ideal = (torch.nn.functional.silu(pairs[:, :, 0]) * pairs[:, :, 1]).reshape(m, n // 2)
            fits = ideal.abs() < 6e4  # what fp16 holds
            off = reference.error(z[fits], ideal[fits])
            check(name + " gated", off < (3e-3 if dtype == torch.bfloat16 else 1e-3 if rounds else 5e-4), off=off)


HOPPER = torch.cuda.is_available() and torch.cuda.get_device_capability() == (9, 0)


def rows_of(mode: str) -> range:
    """The rows of Hopper's tiles; other chips have one GEMM."""
    return range(-1, 20 if HOPPER else 0)  # those that are not there are passed over


def gemm() -> None:
    for mode in MODES:
        for n, k in ((384, 512), (128, 1024)):
            q = weight(mode, n, k, exact=True)
            for m in (1, 5, 16, 17, 172, 648, 685, 2049):
                linear(q, m, [*rows_of(mode), ops_cuda.PORTABLE])
        q = weight(mode, 384, 1024, exact=True)
        every = [*rows_of(mode), ops_cuda.PORTABLE]
        linear(q, 172, every, rank=16, bias=True)
        linear(q, 2049, every, rank=16, bias=True)
        linear(weight(mode, 128, 2048, exact=True), 300, every, rank=48, bias=True)
        linear(q, 685, every, rank=32, bias=True, dtype=torch.float32)
        linear(q, 250, every, rank=64, bias=True, dtype=torch.bfloat16)
        linear(weight(mode, 6144, 1024, exact=True), 685, list(rows_of(mode)), rank=16)
        linear(weight(mode, 1024, 3072, exact=True), 685, list(rows_of(mode)), rank=16)
        linear(weight(mode, 384, 1024, exact=False), 685, list(rows_of(mode)), rank=16, bias=True, exact=False)
        linear(weight(mode, 4096, 1024, exact=False), 1890, list(rows_of(mode)), rank=16, bias=True, exact=False)
        linear(weight(mode, 200, 640, exact=True), 77, [-1, ops_cuda.PORTABLE], rank=16, bias=True)  # off the tile
        linear(weight(mode, 72, 192, exact=True), 33, [-1, ops_cuda.PORTABLE], bias=True, dtype=torch.float32)
        linear(weight(mode, 203, 320, exact=True), 40, [ops_cuda.PORTABLE], bias=True)
        linear(weight(mode, 256, 11008, exact=False), 100, [-1, ops_cuda.PORTABLE], exact=False)
        torch.cuda.synchronize()
        print(f"   gemm {mode} done, failed so far {len(failed)}", flush=True)
        linear(q, 0, [-1])


def gemv() -> None:
    for mode in [m for m in MODES if m != "w8"]:
        for n, k in ((128, 512), (4096, 4096), (11008, 4096), (192, 11008), (1024, 3072), (64, 256)):
            exact = mode != "w4grp" or k <= 1024
            q = weight(mode, n, k, exact=exact)
            for m in (1, 5, 8, 9, 16):
                linear(q, m, [ops_cuda.GEMV], exact=exact)
        q = weight(mode, 384, 1024, exact=True)
        linear(q, 16, [ops_cuda.GEMV, *([0] if HOPPER else [])], rank=32, bias=True)
        linear(q, 1, [ops_cuda.GEMV], rank=64, bias=True, dtype=torch.float32)
        if mode != "w4grp":  # a row alone has the bits of the batch, whichever kernel runs
            q = weight(mode, 1024, 2048, exact=False)
            t = tiles.pack(q)
            low = torch.randn(40, 16, device=DEVICE).half() * 20
            up = tiles.pack_branch(
                LowRank(torch.zeros(2048, 16, device=DEVICE), torch.randn(1024, 16, device=DEVICE) / 50), 1024
            ).up
            x, sx, b = codes_of(40, 2048), torch.rand(40, device=DEVICE), torch.randn(1024, device=DEVICE)
            batch = ops_cuda.linear(
                tiles.tile_order(x), sx, tiles.pack_low(low), *t[:2], b, up, 1024, t.mode, torch.float16
            )
            one = ops_cuda.linear(
                x[3:4], sx[3:4], tiles.pack_low(low[3:4]), *t[:2], b, up, 1024, t.mode, torch.float16, ops_cuda.GEMV
            )
            check(
                f"{mode}: row alone through the GEMV",
                torch.equal(one[0], batch[3]),
                wrong=int((one[0] != batch[3]).sum()),
            )


def int4() -> None:
    """4-bit activations: codes, scales, product; on Hopper the instruction is emulated, so no times here."""
    g = torch.Generator(device=DEVICE).manual_seed(11)
    four = reference.Activation(4, "group")
    for m, n, k, rank in (
        (1, 128, 256, 0),
        (17, 200, 640, 16),
        (172, 384, 1024, 32),
        (685, 1024, 2048, 16),
        (77, 130, 320, 0),
        (5, 128, 11008, 16),
    ):
        for dtype in (torch.float16, torch.float32):
            x = torch.randn(m, k, generator=g, device=DEVICE).to(dtype)
            x[m // 2, :64] = 0
            q = weight("w4two" if rank else "w4grp", n, k, exact=False).with_(bias=torch.randn(n, device=DEVICE))
            low = (
                LowRank(
                    (torch.randn(k, rank, generator=g, device=DEVICE) / k**0.5).half(),
                    (torch.randn(n, rank, generator=g, device=DEVICE) / 8).half(),
                )
                if rank
                else None
            )
            branch = tiles.pack_branch(low, n, 128) if low else None
            codes, groups, scales, hidden = ops_cuda.quantize4(x, hadamard=True, down=branch.down if branch else None)
            inside = reference.hadamard(x.float().cpu(), 64)
            want, sa = reference.quantize_rows(inside, 64, four)
            low_n, high_n = (codes & 15).to(torch.int8), (codes >> 4).to(torch.int8)
            got = torch.stack([low_n, high_n], -1).reshape(m, -1).cpu()
            got = torch.where(got > 7, got - 16, got)
            name = f"int4 {m}x{n}x{k} {dtype}"
            check(
                name + " codes",
                torch.equal(got[:, :k], want) and not bool(got[:, k:].any()),
                wrong=int((got[:, :k] != want).sum()),
            )
            check(name + " group scales", torch.equal(groups.T[:m, : k // 64].cpu(), sa))
            rows = tiles.pack_rows(q)
            bias = torch.nn.functional.pad(q.bias, (0, -n % 128))
            for out in (torch.float16, torch.float32):
                y = ops_cuda.linear4(
                    codes, groups, scales, hidden if rank else None, *rows, bias, branch.up if branch else None, n, out
                )
                ideal = (want.double() * reference.expand(sa.double(), 64, k)).to(DEVICE) @ reference.dequantize_codes(
                    q
                ).double().T + q.bias.double()
                if low:
                    ideal = ideal + (inside.to(DEVICE).double() @ low.down.double()) @ low.up.double().T
                off = reference.error(y, ideal)
                check(f"{name} {out}", off < 5e-4, off=off)
                again = ops_cuda.linear4(
                    codes, groups, scales, hidden if rank else None, *rows, bias, branch.up if branch else None, n, out
                )
                check(f"{name} {out} again", torch.equal(y, again))
    # exact: one group scale 1, integers
    codes = torch.randint(0, 256, (33, 512), generator=g, device=DEVICE, dtype=torch.uint8)
    rows = torch.randint(0, 256, (128, 512), generator=g, device=DEVICE, dtype=torch.uint8)
    one_a, one_w = torch.ones(16, 128, device=DEVICE), torch.ones(16, 128, device=DEVICE)
    y = ops_cuda.linear4(codes, one_a, torch.ones(33, device=DEVICE), None, rows, one_w, None, None, 128, torch.float32)

    def plain_codes(c: Tensor) -> Tensor:
        v = torch.stack([c & 15, c >> 4], -1).reshape(len(c), -1).to(torch.int8)
        return torch.where(v > 7, v - 16, v).double()

    check("int4 exact", torch.equal(y.double(), plain_codes(codes) @ plain_codes(rows).T))


def small() -> None:
    """Every kernel once, small: for compute-sanitizer."""
    for mode in MODES:
        q = weight(mode, 384, 1024, exact=True)
        for m in (5, 100):
            linear(q, m, [*rows_of(mode), ops_cuda.PORTABLE], rank=16, bias=True)
        if mode != "w8":
            linear(q, 9, [ops_cuda.GEMV], rank=32, bias=True, exact=mode != "w4grp")
    down = tiles.pack_branch(LowRank(torch.randn(1024, 32, device=DEVICE), torch.zeros(64, 32, device=DEVICE)), 64).down
    w = torch.ones(1024, device=DEVICE)
    for m in (3, 70):
        x = torch.randn(m, 1024, device=DEVICE).half()
        ops_cuda.quantize(
            x, residual=x.clone(), norm=w, smooth=tiles.pack_smooth(w), eps=1e-6, hadamard=True, down=down
        )
        codes, groups, scales, low = ops_cuda.quantize4(x, hadamard=True, down=down)
        rows = tiles.pack_rows(weight("w4grp", 200, 1024, exact=False))
        ops_cuda.linear4(codes, groups, scales, None, *rows, None, None, 200, torch.float16)
        qkv = torch.randn(m, 4096, device=DEVICE).half()
        angle = torch.zeros(m, 64, device=DEVICE)
        ops_cuda.norm_rope(qkv, w[:128].clone(), None, angle, angle, 16, 8)
        ops_cuda.inverse_rms(qkv, 1e-6)
        bounds = torch.tensor([0, m // 2, m], dtype=torch.int32, device=DEVICE)
        ops_cuda.attention_quantize(*heads_of(m, 4, 2, torch.float16), bounds, 0.1)
        ops_cuda.dequantize(
            torch.zeros(3, 40, dtype=torch.uint8, device=DEVICE),
            torch.ones(3, 2, device=DEVICE),
            None,
            80,
            40,
            4,
            torch.float16,
        )
    torch.cuda.synchronize()


def rope() -> None:
    g = torch.Generator(device=DEVICE).manual_seed(9)
    for m, heads, kv in ((1, 16, 8), (5, 4, 4), (685, 16, 8)):
        for dtype in (torch.float16, torch.bfloat16, torch.float32):
            qkv = torch.randn(m, (heads + 2 * kv) * 128, generator=g, device=DEVICE).to(dtype)
            wq, wk = (1 + 0.1 * torch.randn(128, generator=g, device=DEVICE) for _ in range(2))
            angle = 10 * torch.rand(m, 64, generator=g, device=DEVICE)
            for norm in (True, False):
                got = qkv.clone()
                ops_cuda.norm_rope(got, wq if norm else None, wk if norm else None, angle.cos(), angle.sin(), heads, kv)
                parts = qkv.reshape(m, -1, 128)
                want = torch.cat([
                    reference.norm_rope(parts[:, :heads], wq if norm else None, angle.cos(), angle.sin(), 1e-6),
                    reference.norm_rope(parts[:, heads : heads + kv], wk if norm else None, angle.cos(), angle.sin(), 1e-6),
                    parts[:, heads + kv :].float(),
                ], 1).reshape(m, -1)  # fmt: skip
                off = reference.error(got.float(), want)
                check(
                    f"rope {m} {heads}/{kv} {dtype} norm={norm}",
                    off < {torch.float16: 3e-4, torch.bfloat16: 2.5e-3, torch.float32: 1e-6}[dtype],
                    off=off,
                )
                check(f"rope values {dtype}", torch.equal(got[:, (heads + kv) * 128 :], qkv[:, (heads + kv) * 128 :]))
            x = qkv[:, :300].contiguous()
            rms = ops_cuda.inverse_rms(x, 1e-6)
            check("inverse rms", bool(torch.allclose(rms, torch.rsqrt(x.float().square().mean(1) + 1e-6), rtol=1e-5)))
    qkv = torch.randn(685, 4096, device=DEVICE).half()
    w, c = torch.ones(128, device=DEVICE), torch.ones(685, 64, device=DEVICE)
    say(rope="685 rows, 16/8 heads", us=replayed([lambda: ops_cuda.norm_rope(qkv, w, w, c, c, 16, 8)] * 28) / 28)


def overlap() -> None:
    """Launches that start before their predecessors have ended, in a graph, against the same ones with a pause between."""
    for mode in MODES:
        for m in (3, 16, 40, 172, 685):
            stack = Stack(mode, 1024, 1024, 6, DEVICE)
            xs = [torch.randn(m, 1024, device=DEVICE).half() * (i + 1) for i in range(6)]
            static = [torch.ones_like(x) for x in xs]
            graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(graph):
                outs = [stack.both(i, x) for i, x in enumerate(static)]
            for _ in range(3):
                for s, x in zip(static, xs):
                    s.copy_(x)
                graph.replay()
                torch.cuda.synchronize()
            for i, x in enumerate(xs):
                ready = stack.quantize(i, x)
                torch.cuda.synchronize()
                y = stack.product(i, ready)
                check(f"overlap {mode} M={m} {i}", torch.equal(outs[i], y), wrong=int((outs[i] != y).sum()))


def module() -> None:
    """QuantLinear: moves, dtypes, shapes, graphs, compile, streams, devices, errors."""
    from lowbit.nn import QuantLinear

    torch.manual_seed(0)
    for rows in (4, 40):  # nothing of ours has run in this process: a capture without warm-up
        cold = QuantLinear.from_quantized(weight("w4two", 256, 512, exact=False), "token")
        static = torch.ones(rows, 512, device=DEVICE).half()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            out = cold(static)
        static.copy_(torch.randn(rows, 512, device=DEVICE))
        graph.replay()
        check(f"cold capture of {rows} rows", torch.equal(out, cold(static)))
    for scheme_mode, n, k, rank in (
        ("w4two", 1024, 2048, 16),
        ("w4grp", 384, 1024, 32),
        ("w4ch", 200, 640, 0),
        ("w8", 130, 256, 0),
    ):
        q = weight(scheme_mode, n, k, exact=False).with_(
            bias=torch.randn(n, device=DEVICE), hadamard=0 if scheme_mode == "w8" else 64
        )
        if rank:
            low = LowRank(
                (torch.randn(k, rank, device=DEVICE) / k**0.5).half(), (torch.randn(n, rank, device=DEVICE) / 8).half()
            )
            q = q.with_(low_rank=low, smooth=(0.5 + torch.rand(k, device=DEVICE)).half())
        layer = QuantLinear.from_quantized(q, "token")
        host = {f: getattr(q, f).cpu() for f in ("codes", "scales", "bias", "smooth") if getattr(q, f) is not None}
        q_host = q.with_(**host, low_rank=None if q.low_rank is None else LowRank(*(t.cpu() for t in q.low_rank)))
        on_host = QuantLinear.from_quantized(q_host, "token")
        check(f"{scheme_mode} kernel", layer.explain()["kernel"] == "cuda_tiles", found=layer.explain()["kernel"])
        for shape in ((1, k), (16, k), (3, 7, k), (685, k), (0, k), (k,)):
            for dtype in (torch.float16, torch.bfloat16, torch.float32):
                x = torch.randn(shape, device=DEVICE).to(dtype)
                y = layer(x)
                check(f"{scheme_mode} {shape} {dtype} shape", y.shape == (*shape[:-1], n) and y.dtype == dtype)
                if x.numel():
                    want = reference.linear(x.cpu(), q_host, reference.Activation(8, "token"))
                    off = reference.error(y.float().cpu(), want)
                    check(f"{scheme_mode} {shape} {dtype}", off < (4e-3 if dtype == torch.bfloat16 else 1e-3), off=off)
        x = torch.randn(50, k, device=DEVICE).half()
        check(
            f"{scheme_mode} against the CPU's layer",
            reference.error(layer(x).float().cpu(), on_host(x.cpu().float())) < 1e-3,
        )
        moved = on_host.to(DEVICE)
        check(f"{scheme_mode} moved", torch.equal(moved(x), layer(x)))
        back = moved.cpu().to_quantized()
        same = torch.equal(back.codes, q_host.codes) and torch.equal(
            reference.expand(back.scales.float(), back.group_size, k),
            reference.expand(q_host.scales.float(), q.group_size, k),
        )
        check(f"{scheme_mode} back on the CPU", same)
        layer.half()
        check(f"{scheme_mode} half()", torch.equal(layer(x), QuantLinear.from_quantized(q, "token")(x)))
        with torch.inference_mode():
            check(f"{scheme_mode} inference", layer(x).shape == (50, n))
        if q.bits == 4 and k % 64 == 0:
            layer.activation_bits = 4
            want = reference.linear(x.cpu(), q_host, reference.Activation(4, "group"))
            off = reference.error(layer(x).float().cpu(), want)
            check(f"{scheme_mode} 4-bit activations", off < 1e-3, off=off)
            layer.activation_bits = 8
        xg = x.clone().requires_grad_(True)
        layer(xg).sum().backward()
        check(f"{scheme_mode} gradient", bool(torch.isfinite(xg.grad).all()))
        bad = x.clone()
        bad[3, 5] = float("nan")
        y0, y1 = layer(x), layer(bad)
        keep = torch.arange(50, device=DEVICE) != 3
        check(f"{scheme_mode} NaN row", torch.equal(y0[keep], y1[keep]) and bool(torch.isnan(y1[3]).all()))
        for rows in (7, 40):
            torch._dynamo.reset()  # each layer is a new guard of the same code
            compiled = torch.compile(layer, fullgraph=True, backend="eager", dynamic=False)
            check(f"{scheme_mode} compile", torch.equal(compiled(x[:rows]), layer(x[:rows])))
        static = torch.ones(40, k, device=DEVICE).half()
        graph, side = torch.cuda.CUDAGraph(), torch.cuda.Stream()
        fresh = QuantLinear.from_quantized(q, "token")
        with torch.cuda.graph(graph, stream=side):
            out = fresh(static)  # its first call is inside the capture
        static.copy_(x[:40])
        graph.replay()
        check(f"{scheme_mode} graph", torch.equal(out, layer(x[:40])))
        with torch.cuda.stream(side):
            y = layer(x)
        side.synchronize()
        check(f"{scheme_mode} side stream", torch.equal(y, layer(x)))
    # what the integer kernels do not take, in float
    g = torch.Generator().manual_seed(2)
    gptq = QuantizedWeight(
        torch.randint(0, 16, (96, 160), generator=g, dtype=torch.uint8), torch.rand(96, 5, generator=g).half() / 100, 32, 4,
        zeros=torch.randint(0, 16, (96, 5), generator=g, dtype=torch.uint8), perm=torch.randperm(160, generator=g).int(),
        bias=torch.randn(96, generator=g),
    )  # fmt: skip
    asked = QuantLinear.from_quantized(weight("w4grp", 64, 256, exact=False), None)
    check(
        "float activations by wish",
        asked.on_float is not None and asked(torch.randn(3, 256, device=DEVICE)).shape == (3, 64),
    )
    layer8 = QuantLinear.from_quantized(gptq, "group").to(DEVICE)
    check("GPTQ weight", layer8.explain()["kernel"] == "cuda_float", found=layer8.explain()["kernel"])
    x = torch.randn(9, 160, device=DEVICE)
    want = reference.linear(x.cpu(), gptq, reference.Activation(16, "none"))
    for dtype in (torch.float32, torch.float16, torch.bfloat16):
        off = reference.error(layer8(x.to(dtype)).float().cpu(), want)
        check(
            f"GPTQ weight {dtype}",
            off < {torch.float32: 1e-3, torch.float16: 2e-3, torch.bfloat16: 1e-2}[dtype],
            off=off,
        )
    back = layer8.cpu().to_quantized()
    check(
        "GPTQ weight back",
        torch.equal(back.codes, gptq.codes)
        and torch.equal(back.zeros, gptq.zeros)
        and torch.equal(back.scales, gptq.scales),
    )
    for name, call in {
        "x on the CPU": lambda: layer(torch.randn(3, 256)),
        "wrong K": lambda: layer(torch.randn(3, 255, device=DEVICE)),
        "int x": lambda: layer(torch.ones(3, 256, dtype=torch.int32, device=DEVICE)),
        "K": lambda: ops_cuda.quantize(torch.randn(2, 40, device=DEVICE)),
        "norm's dtype": lambda: ops_cuda.quantize(torch.randn(2, 64, device=DEVICE), norm=torch.ones(64, device=DEVICE).half()),
        "smooth's device": lambda: ops_cuda.quantize(torch.randn(2, 64, device=DEVICE), smooth=torch.ones(64)),
        "smooth's size": lambda: ops_cuda.quantize(torch.randn(2, 64, device=DEVICE), smooth=torch.ones(65, device=DEVICE)),
        "strides": lambda: ops_cuda.quantize(torch.randn(2, 64, device=DEVICE), residual=torch.randn(64, 2, device=DEVICE).T),
        "GEMV of 17 rows": lambda: ops_cuda.linear(codes_of(17, 256), torch.ones(17, device=DEVICE), None, *tiles.pack(weight("w4ch", 64, 256, True))[:2], None, None, 64, tiles.CHANNEL, torch.float16, ops_cuda.GEMV),
        "weight's size": lambda: ops_cuda.linear(codes_of(17, 256), torch.ones(17, device=DEVICE), None, *tiles.pack(weight("w4ch", 64, 512, True))[:2], None, None, 64, tiles.CHANNEL, torch.float16),
        "mode": lambda: ops_cuda.linear(codes_of(17, 256), torch.ones(17, device=DEVICE), None, *tiles.pack(weight("w4ch", 64, 256, True))[:2], None, None, 64, 9, torch.float16),
    }.items():  # fmt: skip
        try:
            call()
            check(f"error: {name}", False)
        except (RuntimeError, ValueError, NotImplementedError) as error:
            print("  ", name, "->", str(error).splitlines()[0][:150])
    check("usable after the errors", layer(torch.randn(2, 256, device=DEVICE)).shape == (2, 130))


# -- figures --------------------------------------------------------------------------------------------------------


def error() -> None:
    """Of a whole layer, quantize included, against the fp32 product of the dequantized weight: Gaussian x, Frobenius."""
    for mode in MODES:
        n, k, m = 4096, 1024, 685
        g = torch.Generator(device=DEVICE).manual_seed(7)
        q = weight(mode, n, k, exact=False)
        low = LowRank(
            torch.randn(k, RANK, generator=g, device=DEVICE) / k**0.5,
            torch.randn(n, RANK, generator=g, device=DEVICE) / 8,
        )
        t, branch = tiles.pack(q), tiles.pack_branch(low, n)
        x = torch.randn(m, k, generator=g, device=DEVICE).half()
        codes, scales, hidden = ops_cuda.quantize(x, hadamard=True, down=branch.down)
        y = ops_cuda.linear(codes, scales, hidden, t.weight, t.channel, None, branch.up, n, t.mode, torch.float16)
        inside = reference.hadamard(x.float(), 64).double()
        want = inside @ reference.dequantize_codes(q).double().T
        want = want + (inside @ low.down.double()) @ low.up.double().T
        off = reference.error(y, want)
        check(f"error {mode}", off < 1e-2, off=off)
        say(error=mode, shape=f"{n}x{k}", m=m, frobenius=off)


# -- speed ----------------------------------------------------------------------------------------------------------


best: dict[tuple[str, str, int], int] = {}


def speed() -> None:
    """Every row of tiles at every shape, and the GEMV."""
    for mode in MODES:
        for name, (n, k) in LAYER.items():
            layer = Stack(mode, n, k, LAYERS, DEVICE)
            for m in (16, 172, 685, 1890):
                x = ops_cuda.quantize(torch.randn(m, k, device=DEVICE).half(), hadamard=True, down=layer.down[0])
                found = {}
                for row in rows_of(mode):
                    try:
                        found[row] = (
                            replayed([lambda i=i, row=row: layer.product(i, x, row) for i in range(LAYERS)], 5) / LAYERS
                        )
                    except RuntimeError as error:
                        if "does not divide" not in str(error) and "fewer rows" not in str(error):
                            say(FAIL="speed", mode=mode, shape=name, m=m, row=row, error=str(error)[:80])
                            failed.append("speed")
                other = (
                    replayed([lambda i=i: layer.product(i, x, ops_cuda.PORTABLE) for i in range(LAYERS)], 5) / LAYERS
                )
                top = min(found, key=lambda r: found[r])
                best[mode, name, m] = top
                order = sorted(found, key=lambda r: found[r])
                say(
                    gemm=mode,
                    shape=name,
                    m=m,
                    best=top,
                    us=found[top],
                    table=found[-1],
                    portable=other,
                    rest=",".join(f"{r}:{found[r]:.2f}" for r in order[1:7]),
                )
    for n, k in ((4096, 4096), (11008, 4096)):
        for mode in [m for m in MODES if m != "w8"]:
            bytes_ = tiles.BYTES[MODES[mode]] * (n // 64) * (k // 128)
            copies = max(8, (256 << 20) // bytes_)
            layer = Stack(mode, n, k, copies, DEVICE)
            for m in (1, 8, 16):
                x = ops_cuda.quantize(
                    torch.randn(m, k, device=DEVICE).half(), hadamard=True, down=layer.down[0], tile_order=False
                )
                us = replayed([lambda i=i: layer.product(i, x, ops_cuda.GEMV) for i in range(copies)]) / copies
                h = torch.randn(m, k, device=DEVICE).half()

                def both(i: int, h: Tensor = h, layer: Stack = layer) -> Tensor:
                    return layer.product(
                        i, ops_cuda.quantize(h, hadamard=True, down=layer.down[i], tile_order=False), ops_cuda.GEMV
                    )

                pair = replayed([lambda i=i: both(i) for i in range(copies)]) / copies
                say(gemv=mode, shape=f"{n}x{k}", m=m, us=us, gbps=bytes_ / us * 1e-3, with_quantize=pair)
    for m, k in (
        (1, 1024),
        (16, 1024),
        (172, 1024),
        (685, 1024),
        (1890, 1024),
        (685, 2048),
        (172, 3072),
        (685, 3072),
        (1890, 3072),
        (1, 4096),
        (16, 4096),
        (685, 4096),
    ):
        g = torch.randn(m, k, device=DEVICE).half()
        res, w, two = g.clone(), torch.ones(k, device=DEVICE), torch.randn(m, 2 * k, device=DEVICE).half()
        out: dict[str, float] = {}
        for rank in (0, 16, 32):
            down = (
                tiles.pack_branch(
                    LowRank(torch.randn(k, rank, device=DEVICE), torch.zeros(64, rank, device=DEVICE)), 64
                ).down
                if rank
                else None
            )
            out[f"plain_r{rank}"] = (
                replayed([lambda down=down: ops_cuda.quantize(g, hadamard=True, down=down)] * 28) / 28
            )
            out[f"bare_r{rank}"] = replayed([lambda down=down: ops_cuda.quantize(g, down=down)] * 28) / 28
            out[f"add_norm_r{rank}"] = (
                replayed(
                    [lambda down=down: ops_cuda.quantize(g, residual=res, norm=w, eps=1e-6, hadamard=True, down=down)]
                    * 28
                )
                / 28
            )
            res.zero_()
        out["silu_r16"] = replayed([lambda: ops_cuda.quantize(two, silu=True, hadamard=True, down=down)] * 28) / 28
        say(quantize=f"{m}x{k}", **out)
    x = torch.randn(685, 1024, device=DEVICE).half()
    say(inverse_rms="685x1024", us=replayed([lambda: ops_cuda.inverse_rms(x, 1e-6)] * 28) / 28)
    n, k = 4096, 4096  # codes that leave L2 between their turns, scales of 64 columns
    codes = [torch.randint(0, 256, (n, k // 2), device=DEVICE, dtype=torch.uint8) for _ in range(16)]
    scales = torch.rand(n, k // 64, device=DEVICE)
    calls = [lambda c=c: ops_cuda.dequantize(c, scales, None, k, 64, 4, torch.float16) for c in codes]
    say(dequantize=f"{n}x{k}", us=replayed(calls) / len(calls))


def speed4() -> None:
    """INT4 tensor cores, where there are any: each shape, and a layer of four, product alone and with quantize."""
    if not ops_cuda.has_int4(0):
        print("speed4: the chip has no INT4 tensor cores", flush=True)
        return
    shared = {}
    for name, (n, k) in LAYER.items():
        low = LowRank(torch.randn(k, RANK, device=DEVICE) / k**0.5, torch.randn(n, RANK, device=DEVICE) / 50)
        rows, branch = tiles.pack_rows(weight("w4grp", n, k, exact=False)), tiles.pack_branch(low, n, 128)
        shared[name] = (
            [tuple(t.clone() for t in (*rows, *branch)) for _ in range(LAYERS)],
            torch.zeros(n, device=DEVICE),
        )
    for m in (1, 16, 172, 685, 1890):
        alone, whole = [], []
        for name, (n, k) in LAYER.items():
            x = torch.randn(m, k, device=DEVICE).half()
            copies, bias = shared[name]
            ready = ops_cuda.quantize4(x, hadamard=True, down=copies[0][2])

            def product(given: tuple[Tensor, ...], kept: tuple[Tensor, ...], bias: Tensor = bias, n: int = n) -> Tensor:
                return ops_cuda.linear4(*given, kept[0], kept[1], bias, kept[3], n, torch.float16)

            mine = [lambda c=c, r=ready, p=product: p(r, c) for c in copies]
            both = [lambda c=c, x=x, p=product: p(ops_cuda.quantize4(x, hadamard=True, down=c[2]), c) for c in copies]
            say(int4=name, shape=f"{n}x{k}", m=m, us=replayed(mine) / LAYERS, with_quantize=replayed(both) / LAYERS)
            alone.append(mine)
            whole.append(both)
        say(
            layer="w4a4",
            m=m,
            linears=replayed([call for each in zip(*alone) for call in each]) / LAYERS,
            all=replayed([call for each in zip(*whole) for call in each]) / LAYERS,
        )


def chain() -> None:
    """28 layers of four linears; the GEMMs alone, then with quantize (norm, residual) before each. SiLU·mul is in the end of
    the product of gate and up where the chip's GEMM has it (more than 16 rows), else in the quantizer behind it."""
    for mode in MODES:
        parts = {name: Stack(mode, n, k, LAYERS, DEVICE) for name, (n, k) in LAYER.items()}
        for m in (1, 16, 172, 685, 1890):
            small = m <= 16 and mode != "w8"
            gated = HOPPER and not small
            row = {name: ops_cuda.GEMV if small else best.get((mode, name, m), -1) for name in LAYER}
            inputs = {
                name: torch.randn(m, k * (2 if name == "down" and not gated else 1), device=DEVICE).half()
                for name, (_, k) in LAYER.items()
            }
            res = torch.zeros(m, 1024, device=DEVICE).half()
            norm = torch.ones(1024, device=DEVICE)

            def quant(
                name: str,
                i: int,
                m: int = m,
                small: bool = small,
                inputs: dict[str, Tensor] = inputs,
                res: Tensor = res,
                norm: Tensor = norm,
                gated: bool = gated,
            ) -> tuple[Tensor, Tensor, Tensor]:
                fused = (
                    {"residual": res, "norm": norm, "eps": 1e-6}
                    if name in ("qkv", "gate_up")
                    else {"silu": name == "down" and not gated}
                )
                return ops_cuda.quantize(
                    inputs[name], hadamard=True, down=parts[name].down[i], tile_order=not small, **fused
                )

            ready = {name: quant(name, 0) for name in LAYER}
            alone = [
                lambda name=name, i=i: parts[name].product(i, ready[name], row[name])
                for i in range(LAYERS)
                for name in LAYER
            ]
            table = [
                lambda name=name, i=i: parts[name].product(i, ready[name], ops_cuda.GEMV if small else -1)
                for i in range(LAYERS)
                for name in LAYER
            ]
            full = [
                lambda name=name, i=i: parts[name].product(
                    i, quant(name, i), ops_cuda.GEMV if small else -1, gated and name == "gate_up"
                )
                for i in range(LAYERS)
                for name in LAYER
            ]
            quants = [lambda name=name, i=i: quant(name, i) for i in range(LAYERS) for name in LAYER]
            say(
                layer=mode,
                m=m,
                linears=replayed(alone) / LAYERS,
                by_table=replayed(table) / LAYERS,
                quantize=replayed(quants) / LAYERS,
                all=replayed(full) / LAYERS,
            )


def heads_of(m: int, heads: int, kv: int, dtype: torch.dtype) -> tuple[Tensor, Tensor, Tensor]:
    """Queries, keys and values as views of one projection."""
    qkv = torch.randn(m, heads + 2 * kv, 128, device=DEVICE).to(dtype)
    return qkv[:, :heads], qkv[:, heads : heads + kv], qkv[:, heads + kv :]


Rounded = tuple[Tensor, Tensor]
Segments = tuple[Tensor, Tensor, Tensor, Tensor, float]  # q, k, v, bounds, scale


def attend_apart(given: Segments) -> Rounded:
    return ops_cuda.quantize(ops_cuda.attention(*given).flatten(1))[:2]


def attend_joined(given: Segments) -> Rounded:
    return ops_cuda.attention_quantize(*given)


def joined_bits() -> None:
    """Attention that rounds against its two parts, bit for bit. All shapes: tests/test_attention_quantize_gpu.py."""
    torch.manual_seed(0)
    for m, ends in ((17, [0, 17]), (172, [0, 111, 172]), (685, [0, 0, 435, 435, 436, 685]), (1890, [0, 1140, 1890])):
        bounds = torch.tensor(ends, dtype=torch.int32, device=DEVICE)
        for heads, kv in ((16, 8), (4, 2), (8, 8)):
            for dtype in (torch.float16, torch.bfloat16):
                given = (*heads_of(m, heads, kv, dtype), bounds, 128**-0.5)
                want = attend_apart(given)
                for turn in range(3):
                    same = all(torch.equal(a, b) for a, b in zip(attend_joined(given), want))
                    check(f"joined attention M={m} {heads}/{kv} {dtype} {turn}", same)


def joined() -> None:
    """Attention that rounds its rows for o: right, and against the two launches; then whole layers of ten and of nine. Nothing
    smooths, rotates or has a low rank, as where the engine joins them."""
    joined_bits()
    if not HOPPER or "w4two" not in MODES:
        return
    parts = {name: Stack("w4two", n, k, LAYERS, DEVICE, rank=0) for name, (n, k) in LAYER.items()}
    for c, m in ((111, 172), (435, 685), (1140, 1890)):
        bounds = torch.tensor([0, c, m], dtype=torch.int32, device=DEVICE)
        given = (*heads_of(m, 16, 8, torch.float16), bounds, 128**-0.5)
        us = [replayed([lambda f=f: f(given)] * LAYERS) / LAYERS for f in (attend_apart, attend_joined)]
        say(joined="attention, 16 heads on 8", m=m, apart=us[0], us=us[1])
        joined_layers(parts, bounds, m)


def joined_layers(parts: dict[str, Stack], bounds: Tensor, m: int) -> None:
    """Layers as the packed engine runs them, each reading what the last one wrote."""
    norm, head = torch.ones(1024, device=DEVICE), torch.ones(128, device=DEVICE)
    angle = torch.rand(m, 64, device=DEVICE)
    cosines, sines = angle.cos(), angle.sin()
    start, stream = torch.randn(m, 1024, device=DEVICE).half(), torch.zeros(m, 1024, device=DEVICE).half()

    def layers(attend: Callable[[Segments], Rounded]) -> Tensor:
        stream.zero_()
        y = start
        for i in range(LAYERS):
            qkv = parts["qkv"].product(i, ops_cuda.quantize(y, residual=stream, norm=norm, eps=1e-6))
            ops_cuda.norm_rope(qkv, head, head, cosines, sines, 16, 8)
            views = qkv.view(m, 32, 128)
            codes, scales = attend((views[:, :16], views[:, 16:24], views[:, 24:], bounds, 128**-0.5))
            y = parts["o"].product(i, (codes, scales, None))
            x = ops_cuda.quantize(y, residual=stream, norm=norm, eps=1e-6)
            y = parts["down"].product(i, ops_cuda.quantize(parts["gate_up"].product(i, x, gated=True)))
        return stream + y

    check(f"joined layers M={m}", torch.equal(layers(attend_joined), layers(attend_apart)))
    us = [replayed([lambda f=f: layers(f)]) / LAYERS for f in (attend_apart, attend_joined)]
    say(joined="layer, two-level scales, no low rank", m=m, apart=us[0], us=us[1])


def attention() -> None:
    """Attention over the segments of an utterance, conditional and unconditional: ours and torch's. Right? tests/test_attention_gpu.py."""
    from lowbit.engines.packed_attention import ATTENTIONS, Spans

    for c, m in ((111, 172), (435, 685), (1140, 1890)):
        qkv = torch.randn(m, 32, 128, device=DEVICE).half()
        q, k, v = qkv[:, :16], qkv[:, 16:24], qkv[:, 24:]
        spans = Spans(torch.tensor([0, c, m], dtype=torch.int32, device=DEVICE), max(c, m - c))
        attend = {name: ATTENTIONS[name](spans) for name in ("ours", "varlen")}
        us = {name: replayed([lambda f=f: f(q, k, v, 128**-0.5)] * 28) / 28 for name, f in attend.items()}
        say(attention=f"{m} = {c} + {m - c} rows, 16/8 heads", us=us["ours"], varlen=us["varlen"])


def decode() -> None:
    """The two launches that end a decoding step. Right? tests/test_decode_step_gpu.py."""
    frames, books, classes = 250, 8, 1025
    logits = torch.randn(2, 1, frames, books, classes, device=DEVICE).half()
    noise, penalty = torch.rand(1, books, frames, device=DEVICE), torch.zeros(books, 1, device=DEVICE)
    one, valid = torch.ones((), device=DEVICE), torch.ones(1, 1, frames, dtype=torch.bool, device=DEVICE)
    tokens = torch.full((1, books, frames), classes - 1, device=DEVICE)
    score = [lambda: ops_cuda.guided_score(logits, one, penalty, one, noise, valid, tokens, classes - 1)]
    say(guided_score=f"{frames} frames, {books} books, {classes} classes, fp16", us=replayed(score * 28) / 28)
    pred, best = (t.reshape(1, -1) for t in score[0]())
    k, flat = torch.full((1,), frames * books // 32, device=DEVICE), tokens.reshape(1, -1)
    say(
        reveal=f"{frames * books} slots",
        us=replayed([lambda: ops_cuda.reveal(flat, pred, best, k)] * 28) / 28,
    )


def peers() -> None:
    one = torch.ones((), device=DEVICE)
    for m in (1, 16, 172, 685, 1890):
        out: dict[str, float] = {}
        half = {
            name: [torch.randn(n, k, device=DEVICE).half() for _ in range(LAYERS)] for name, (n, k) in LAYER.items()
        }
        x = {name: torch.randn(m, k, device=DEVICE).half() for name, (_, k) in LAYER.items()}
        out["fp16"] = replayed([lambda n=n, i=i: x[n] @ half[n][i].T for i in range(LAYERS) for n in LAYER]) / LAYERS
        try:
            f8 = {n: [w.to(torch.float8_e4m3fn) for w in half[n]] for n in LAYER}
            x8 = {n: torch.nn.functional.pad(x[n], (0, 0, 0, -m % 16)).to(torch.float8_e4m3fn) for n in LAYER}
            out["fp8"] = (
                replayed(
                    [
                        lambda n=n, i=i: torch._scaled_mm(x8[n], f8[n][i].T, one, one, out_dtype=torch.float16)
                        for i in range(LAYERS)
                        for n in LAYER
                    ]
                )
                / LAYERS
            )
        except RuntimeError as error:
            print("fp8:", str(error)[:100])
        if m > 16:
            i8 = {n: [torch.randint(-128, 128, w.shape, device=DEVICE).to(torch.int8) for w in half[n]] for n in LAYER}
            xi = {n: torch.nn.functional.pad(x[n], (0, 0, 0, -m % 8)).to(torch.int8) for n in LAYER}
            out["int_mm"] = (
                replayed([lambda n=n, i=i: torch._int_mm(xi[n], i8[n][i].T) for i in range(LAYERS) for n in LAYER])
                / LAYERS
            )
        say(peers="layer", m=m, **out)
    for n, k in ((4096, 4096), (11008, 4096)):
        copies = max(4, (256 << 20) // (n * k))
        w = [torch.randn(n, k, device=DEVICE).half() for _ in range(copies)]
        w4 = [
            torch._convert_weight_to_int4pack(torch.randint(0, 255, (n, k // 2), device=DEVICE, dtype=torch.uint8), 8)
            for _ in range(copies * 2)
        ]
        sz = torch.rand(k // 64, n, 2, device=DEVICE).bfloat16()
        for m in (1, 16):
            xh = torch.randn(m, k, device=DEVICE).half()
            xb = xh.bfloat16()
            out = {"fp16": replayed([lambda i=i: xh @ w[i].T for i in range(copies)]) / copies}
            try:
                x8 = torch.nn.functional.pad(xh, (0, 0, 0, -m % 16)).to(torch.float8_e4m3fn)
                w8 = [a.to(torch.float8_e4m3fn) for a in w]
                scaled = [lambda a=a: torch._scaled_mm(x8, a.T, one, one, out_dtype=torch.float16) for a in w8]
                out["fp8"] = replayed(scaled) / len(scaled)
            except RuntimeError as error:
                print("fp8:", str(error)[:100])
            out["tinygemm"] = (
                replayed([lambda i=i: torch._weight_int4pack_mm(xb, w4[i], 64, sz) for i in range(copies * 2)])
                / copies
                / 2
            )
            say(peers=f"{n}x{k}", m=m, **out)


def target_of(capability: str) -> str:
    """Where the lines of this chip go; SystemExit where it is another."""
    major, minor = torch.cuda.get_device_capability() if torch.cuda.is_available() else (0, 0)
    name = torch.cuda.get_device_name() if major else "no CUDA device"
    if f"{major}.{minor}" != capability:
        print(f"chip: found {name} ({major}.{minor}), accepted is compute capability {capability}", file=sys.stderr)
        raise SystemExit(2)
    why = ops_cuda.refuses(0)
    if why is not None:
        print(f"lowbit: {why}", file=sys.stderr)
        raise SystemExit(2)
    short = re.sub(r"[^a-z0-9]+", "-", name.lower().removeprefix("nvidia ")).strip("-")
    return f"bench/results/cuda/{facts(DEVICE)['date']}-{short}.jsonl"


def main() -> None:
    if "--target" in sys.argv:
        print(target_of(sys.argv[sys.argv.index("--target") + 1]))
        return
    names = [a for a in sys.argv[1:] if not a.startswith("--") and not a.endswith((".json", ".jsonl"))]
    target = next((a for a in sys.argv[1:] if a.endswith((".json", ".jsonl"))), None)
    print("torch", torch.__version__, torch.cuda.get_device_name(0), "refuses:", ops_cuda.refuses(0), flush=True)
    every = (
        quantize, gemm, gemv, int4, rope, overlap, module, small, error, speed, speed4, chain, joined, attention, decode,
        peers,
    )  # fmt: skip
    for mode in [m for m in MODES if names and m not in names and any(n in MODES for n in names)]:
        del MODES[mode]  # "gemm w8": that mode alone
    for run in every:
        if not names or run.__name__ in names:
            guarded(run)
    print(f"failed: {len(failed)}", *failed[:40], sep="\n  ", flush=True)
    if target:
        known = {**facts(DEVICE), "rank": RANK}
        with Path(target).open("a", encoding="utf-8") as file:
            file.writelines(json.dumps({**known, **line}) + "\n" for line in lines)
    if failed:
        raise SystemExit(1)


if __name__ == "__main__":
    main()
