"""``lowbit bench layers``: one linear layer, our tiers against torch, all in one run."""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

from lowbit import layouts, ops
from lowbit.bench import chart, cuda_layers, peers
from lowbit.bench.entry import Call, Entry, quantize
from lowbit.bench.peers import PEERS
from lowbit.bench.shell import integers, padded, sink, words
from lowbit.bench.timer import Competitor, copies_needed, machine, pages, race
from lowbit.layouts import pages as arena
from lowbit.layouts import panels
from lowbit.reference import dequantize
from lowbit.types import FormatError

SCHEMES = ("w4a8", "w8a8", "fp16")
OF_THE_CPU = ("group", "threads", "tier", "activation", "schemes", "peers", "dtype", "in_cache", "chart")  # options


class Problem(NamedTuple):
    """One shape. ``x`` [M, K] float32; the quantized weights of every scheme come from the same Gaussian W."""

    n: int
    k: int
    m: int
    group: int
    x: Tensor


def main(
    argv: Sequence[str] | None = None, prog: str = "lowbit bench layers", default_peers: Sequence[str] = peers.OF_TORCH
) -> int:
    """Run the cases, write a JSON line each, print a table last. Returns 0; FormatError for options that do not fit."""
    options = parser(prog, list(default_peers))
    args = options.parse_args(argv)
    if args.device == "cuda":
        for name in OF_THE_CPU:
            if getattr(args, name) != options.get_default(name):
                raise FormatError(
                    f"--{name.replace('_', '-')}: found {getattr(args, name)!r}, accepted on cuda is none"
                )
        return _on_cuda(args)
    args.M, args.shape = args.M or [1, 4, 16, 128], args.shape or [(4096, 4096)]
    here = ops.cpu_isas()
    tiers = here if args.tier == "all" else [ops.cpu_isa() if t == "auto" else t for t in args.tier.split(",")]
    for tier in tiers:
        if tier not in here:
            raise FormatError(f"--tier: found {tier!r}, accepted here are all, auto, {', '.join(here)}")
    lines: list[dict[str, Any]] = []
    torch.manual_seed(args.seed)
    facts, before = machine(), torch.get_num_threads()
    try:
        with sink(args.json) as write, torch.inference_mode():
            for threads in args.threads:
                torch.set_num_threads(threads)
                for n, k in args.shape:
                    for line in run_shape(n, k, args, tiers, threads):
                        lines.append({**line, **facts, "pages": pages()})
                        write(json.dumps(lines[-1]))
    finally:
        torch.set_num_threads(before)
    if args.chart:
        Path(args.chart).write_text(chart.layers(lines), "utf-8")
    if args.json != "-":
        print(text_table(lines))
    return 0


def parser(prog: str, default_peers: list[str]) -> argparse.ArgumentParser:
    p = argparse.ArgumentParser(prog=prog, description=__doc__)
    p.add_argument(
        "--shape", type=_shapes, metavar="NxK",
        help="out x in features, comma separated; of itself 4096x4096, and on cuda those of OmniVoice's layer too",
    )  # fmt: skip
    p.add_argument("--device", choices=("cpu", "cuda"), default="cpu", help="cuda: our kernels and the peers in graphs")
    p.add_argument("--M", type=integers, metavar="M",
                   help="rows of x, comma separated; of itself 1,4,16,128, and on cuda the powers of two up to 2048")  # fmt: skip
    p.add_argument("--group", type=int, default=128, help="group size of the 4-bit weights")
    p.add_argument("--threads", type=integers, default=[1], metavar="T")
    p.add_argument("--tier", default="auto", help="auto, all, or names: " + ",".join(ops.cpu_isas()))
    p.add_argument("--activation", type=words("token", "group", "none"), default=["group"], metavar="A",
                   help="token, group, none (float activations), comma separated")  # fmt: skip
    p.add_argument("--schemes", type=words(*SCHEMES), default=list(SCHEMES), metavar="S", help=", ".join(SCHEMES))
    p.add_argument("--peers", type=words(*PEERS), default=default_peers, metavar="P", help=", ".join(PEERS))
    p.add_argument("--dtype", choices=("float32", "bfloat16", "float16"), default="float32", help="of our x and y")
    p.add_argument("--in-cache", action="store_true", help="one copy of each weight, touched before each call")
    p.add_argument("--seconds", type=float, default=1.0, help="a competitor and case, on average")
    p.add_argument("--seed", type=int, default=0)
    p.add_argument(
        "--json", nargs="?", const="-", metavar="FILE", help="append JSON lines to FILE (stdout without one)"
    )
    p.add_argument("--chart", metavar="FILE", help="draw the rows as an SVG bar chart")
    return p


def _on_cuda(args: argparse.Namespace) -> int:
    lines = []
    torch.manual_seed(args.seed)
    with sink(args.json) as write, torch.inference_mode():
        for line in cuda_layers.run(
            args.shape or cuda_layers.SHAPES, args.M or cuda_layers.ROWS, list(cuda_layers.MODES)
        ):
            lines.append(line)
            write(json.dumps(line))
    if args.json != "-":
        print(cuda_table(lines))
    return 0


def cuda_table(lines: Sequence[dict[str, Any]]) -> str:
    """The lines of one run on a GPU as text; what was left out comes last, with its reason."""
    rows = [
        [
            f"{x['n']}x{x['k']} {x['name']}", str(x["m"]), f"{x['cold_us']:.2f}", f"{x['warm_us']:.2f}",
            "" if x["ratio"] is None else f"{x['ratio']:.2f}",
        ]
        for x in lines
        if "cold_us" in x
    ]  # fmt: skip
    out = padded([["", "M", "us, cold L2", "us, warm", f"x {cuda_layers.BASE}"], *rows])
    for x in lines:
        if "left_out" in x:
            out.append(
                f"left out: {x['n']}x{x['k']} {x['name']}{', M=' + str(x['m']) if 'm' in x else ''}: {x['left_out']}"
            )
    return "\n".join(out)


def run_shape(n: int, k: int, args: argparse.Namespace, tiers: list[str], threads: int) -> Iterator[dict[str, Any]]:
    """All rows of x for one shape: the weights are packed once."""
    weight = torch.randn(n, k)
    entries = list(ours(weight, args, tiers))
    given = list(peers.entries(args.peers, weight, args.group, threads))
    total = len(args.M)
    for index, m in enumerate(args.M):
        print(f"{n}x{k}, M={m}, threads {threads} ({index + 1} of {total})", file=sys.stderr, flush=True)
        x = torch.randn(m, k)
        yield from _case(Problem(n, k, m, args.group, x), [*entries, *given], args, threads)


def ours(weight: Tensor, args: argparse.Namespace, tiers: list[str]) -> Iterator[Entry]:
    """A row per scheme, activation and tier."""
    n, k = weight.shape
    for scheme in args.schemes:
        if scheme == "fp16":
            packed, exact, group, bits = panels.pack_half(weight), weight.half().float(), k, 16
        else:
            q = quantize(weight, 4, args.group) if scheme == "w4a8" else quantize(weight, 8, k)
            packed, exact, group, bits = layouts.pack(q), dequantize(q), q.group_size, q.bits
        for kind in _kinds(scheme, args.activation):
            label = scheme.replace("a8", "a16") if kind == "none" else scheme
            for tier in tiers:
                name = f"lowbit {label}{f' {kind}' if label == 'w4a8' else ''} {tier}"
                facts = {"scheme": label, "activation": kind, "tier": tier, "group": group}
                call = partial(_our_call, packed, n, group, bits, kind, tier, args.dtype)
                yield Entry(name, facts, packed.nbytes, call, exact)


def _kinds(scheme: str, wanted: Sequence[str]) -> list[str]:
    """Which activations a scheme is timed with: 8-bit rows of one group are per token whatever int8 is asked for."""
    if scheme == "fp16":
        return ["none"]
    if scheme == "w8a8":
        return [kind for kind in ("token", "none") if kind in wanted or (kind == "token" and "group" in wanted)]
    return list(wanted)


def _our_call(
    packed: Tensor, n: int, group: int, bits: int, kind: str, tier: str, dtype: str, xs: Mapping[str, Tensor]
) -> Call:
    mine = arena.empty(tuple(packed.shape), packed.dtype).copy_(packed)  # on the pages that QuantLinear has
    x, activation = xs[dtype], ops.ACTIVATIONS[None if kind == "none" else kind]
    return lambda: ops.linear(x, mine, n, group, bits, activation, isa=tier)


def _case(p: Problem, entries: list[Entry], args: argparse.Namespace, threads: int) -> Iterator[dict[str, Any]]:
    xs = {name: p.x.to(getattr(torch, name)) for name in ("float32", "bfloat16", "float16")}
    competitors, errors, copies = [], {}, {}
    for entry in list(entries):
        copies[entry.name] = 1 if args.in_cache else copies_needed(entry.weight_bytes)
        want = p.x @ entry.exact.T
        try:
            calls = [entry.make(xs) for _ in range(copies[entry.name])]
            errors[entry.name] = float((calls[0]().float() - want).norm() / want.norm())
        except Exception as error:  # a peer that only says so when it is called
            if "peer" not in entry.facts:
                raise
            peers.left_out(entry.name, error)
            entries = [other for other in entries if other is not entry]
            continue
        competitors.append(Competitor(entry.name, calls))
    times = race(competitors, args.seconds, in_cache=args.in_cache)
    base = next((entry.name for entry in entries if entry.name.startswith("lowbit")), None)
    for entry in entries:
        t = times[entry.name]
        yield {
            "bench": "layers", "name": entry.name, "n": p.n, "k": p.k, "m": p.m, "threads": threads, **entry.facts,
            "x_dtype": entry.facts.get("x_dtype", args.dtype),
            "median_ms": round(t.median, 5), "min_ms": round(t.least, 5), "repeats": t.repeats,
            "gops": round(2e-6 * p.m * p.n * p.k / t.median, 2), "weight_bytes": entry.weight_bytes,
            "gb_per_s": round(1e-6 * entry.weight_bytes / t.median, 2), "error": float(f"{errors[entry.name]:.3g}"),
            "ratio": round(t.median / times[base].median, 3) if base else None, "ratio_to": base,
            "copies": copies[entry.name], "in_cache": args.in_cache,
        }  # fmt: skip


def text_table(lines: Sequence[dict[str, Any]]) -> str:
    """The lines of one run as text. ``x ours`` is the median over that of the first of our rows in the same case."""
    head = ["", "M", "threads", "median ms", "min ms", "GOPS", "GB/s", "error", "x ours", "repeats"]
    rows = []
    for line in lines:
        ratio = "" if line["ratio"] is None else f"{line['ratio']:.2f}"
        figures = [
            f"{line['median_ms']:.4f}",
            f"{line['min_ms']:.4f}",
            f"{line['gops']:.1f}",
            f"{line['gb_per_s']:.1f}",
        ]
        name = f"{line['n']}x{line['k']} {line['name']}"
        rows.append(
            [name, str(line["m"]), str(line["threads"]), *figures, f"{line['error']:.1e}", ratio, str(line["repeats"])]
        )
    out = padded([head, *rows])
    if lines:
        first = lines[0]
        cached = "in cache" if first["in_cache"] else "weights rotated out of cache"
        versions = f"torch {first['torch']}, lowbit {first['lowbit']}"
        out.append(f"{first['chip']}; {first['pages']}; {cached}; {versions}; {first['date']}")
    return "\n".join(out)


def _shapes(text: str) -> list[tuple[int, int]]:
    pairs = [tuple(integers(part.replace("x", ","))) for part in text.split(",")]
    if any(len(pair) != 2 for pair in pairs):
        raise argparse.ArgumentTypeError(f"found {text!r}, accepted is NxK, as 4096x4096")
    return [(pair[0], pair[1]) for pair in pairs]
