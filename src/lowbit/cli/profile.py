"""``lowbit profile``: where the time of a run went, and a trace to look at."""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from lowbit.cli.show import as_json, loading, table
from lowbit.types import FormatError

if TYPE_CHECKING:
    from lowbit.prove.profile import Profile
    from lowbit.prove.profile_gaps import Gap, Inside
    from lowbit.prove.profile_runs import Run

TRACES = (".json", ".json.gz")


def add(commands: Any, common: argparse.ArgumentParser) -> None:
    """Register the command."""
    one = commands.add_parser(
        "profile", parents=[common], help="time by kind of work, idle time and its causes, and a Chrome trace"
    )
    one.add_argument("model", nargs="?", help="a causal language model, or a trace (.json, .json.gz) to read instead")
    one.add_argument("--omnivoice", metavar="DIR", help="generate speech with this model (package omnivoice)")
    one.add_argument(
        "--random", choices=("full", "deep", "tiny"),
        help="the same with random weights, made on the spot (full: the published shape)",
    )  # fmt: skip
    one.add_argument(
        "--accelerate", metavar="PRECISION",
        help="--omnivoice: profile lowbit's engine in this precision (model: its own dtype; w8a8, w4a8, w4a4)",
    )  # fmt: skip
    one.add_argument(
        "--weights", metavar="DIR", help="--accelerate: a checkpoint that lowbit quantize made of the model"
    )
    one.add_argument("--prompt", help="of a language model; default: 32 fixed tokens, without a tokenizer")
    one.add_argument("--tokens", type=int, metavar="N", help="to decode; a step is a token (16)")
    one.add_argument("--audio", type=float, metavar="S", help="seconds of speech (2)")
    one.add_argument("--steps", type=int, metavar="N", help="decoding steps of --omnivoice (32), or steps in a trace")
    one.add_argument("--calls", type=int, default=1, metavar="N", help="how often to run it under the profiler (1)")
    one.add_argument("--trace", metavar="FILE", help="keep the trace: .json or .json.gz, for Perfetto")
    one.add_argument("--out", metavar="FILE", help="write the figures as JSON too")
    one.add_argument("--tabulate", nargs="+", metavar="FILE", help="no run: a Markdown table of what --out wrote")
    one.add_argument("--into", metavar="PAGE", help="--tabulate: put it between the marks of a Markdown page")
    one.add_argument("--no-stacks", action="store_true", help="leave out Python calls: no causes of gaps, truer times")
    one.add_argument("--device", choices=("cpu", "cuda"), default="cpu")
    one.add_argument("--engine", choices=("auto", "native", "transformers"), default="auto")
    loading(one)
    one.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    from lowbit.prove import profile as prof

    if args.tabulate:
        return _tabulate(args)
    if sum(given is not None for given in (args.model, args.omnivoice, args.random)) != 1:
        raise FormatError(
            "profile: accepted is one of a model directory, a trace file, --omnivoice DIR and --random SIZE"
        )
    if args.into:
        raise FormatError(f"--into: found {args.into}, accepted with --tabulate")
    if args.trace and not args.trace.endswith(TRACES):
        raise FormatError(f"--trace: found {args.trace}, accepted is a name that ends in {' or '.join(TRACES)}")
    if args.model and args.model.endswith(TRACES):
        found, what, facts = prof.of_file(args.model, args.steps), f"trace {args.model}", {}
    else:
        job = _job(args)
        what = job.what
        found = prof.profile(job.call, args.calls, per_call=job.steps, stacks=not args.no_stacks, path=args.trace)
        if args.device == "cuda" and found.device != "gpu":
            raise FormatError("profile: found no kernel in the trace, accepted is a GPU that CUPTI may trace")
        facts = _facts(found.device)
    document = {"what": what, **facts, **found.as_dict()}
    if args.out:
        Path(args.out).write_text(json.dumps(document, default=str) + "\n", "utf-8")
    if args.json:
        as_json(document)
        return 0
    _print(found, what)
    return 0


def _tabulate(args: argparse.Namespace) -> int:
    from lowbit.prove import profile_table

    text = profile_table.markdown(profile_table.read(args.tabulate))
    if args.into:
        profile_table.into(args.into, text)
        print(f"wrote {args.into}")
    else:
        print(text)
    return 0


def _facts(device: str) -> dict[str, Any]:
    """What the figures were measured on."""
    import torch

    from lowbit.bench.timer import machine

    here = machine()
    chip = torch.cuda.get_device_name() if device == "gpu" and torch.cuda.is_available() else here["chip"]
    return {"chip": chip, **{key: here[key] for key in ("torch", "lowbit", "commit", "date")}}


def _job(args: argparse.Namespace) -> Run:
    import torch

    from lowbit.ops_cuda import device_there
    from lowbit.prove import profile_runs

    device_there(args.device, "--device")
    dtype = getattr(torch, args.dtype)
    own = (
        {"--prompt": args.prompt, "--tokens": args.tokens}
        if args.omnivoice or args.random
        else {"--audio": args.audio, "--steps": args.steps, "--accelerate": args.accelerate, "--weights": args.weights}
    )
    for name, value in own.items():
        if value is not None:
            raise FormatError(
                f"{name}: found {value!r}, accepted {'without' if args.omnivoice or args.random else 'with'} --omnivoice"
            )
    if args.omnivoice or args.random:
        return profile_runs.omnivoice(
            args.omnivoice, audio=2.0 if args.audio is None else args.audio, steps=32 if args.steps is None else args.steps,
            device=args.device, dtype=dtype, prepare=_prepare(args), made=_made(args, dtype),
        )  # fmt: skip
    return profile_runs.text(
        args.model, args.prompt, 16 if args.tokens is None else args.tokens, device=args.device, engine=args.engine,
        activation=args.activation, dtype=dtype,
    )  # fmt: skip


def _made(args: argparse.Namespace, dtype: Any) -> Callable[[], Any] | None:
    if args.random is None:
        return None
    from lowbit.bench.rtf_model import random_model

    return lambda: random_model(args.random, args.device, dtype)


def _prepare(args: argparse.Namespace) -> Callable[[Any], object] | None:
    """What makes an engine of the model, None for the stock one."""
    if args.accelerate is None and args.weights is None:
        return None
    from lowbit.omnivoice import accelerate

    precision = None if args.accelerate in (None, "model") else args.accelerate
    return lambda model: accelerate(model, args.weights, precision)


def _print(found: Profile, what: str) -> None:
    from lowbit.prove.profile_gaps import BOUNDARY

    gpu = found.device == "gpu"
    unit = "kernels" if gpu else "operators"
    each = found.per_step()
    table(f"{what}: {found.steps} steps", ["category", "ms", "%", unit, "mean us"], [
        [row.category, f"{row.ms:.3f}", f"{100 * row.share:.1f}", row.events, f"{row.mean_us:.1f}"] for row in found.rows
    ])  # fmt: skip
    print()
    where = "no kernel on any stream" if gpu else "in no operator (Python, and the profiler itself)"
    rows = [
        ["span, ms", f"{each['span_ms']:.3f}"],
        ["busy, ms", f"{each['busy_ms']:.3f}"],
        [f"{where}, %", f"{100 * found.idle:.1f}"],
        [unit, f"{each['events']:.1f}"],
    ]
    if found.wall_ms is not None:
        rows.insert(0, ["without the profiler, ms", f"{found.wall_ms:.3f}"])
    if found.launches is not None:
        rows += [
            ["launches", f"{each['launches']:.1f}"],
            ["CPU time in launches, us", f"{each['launch_us']:.1f}"],
            ["GPU idle for want of a launch, us", f"{each['late_us']:.1f}"],
            [f"GPU idle in gaps up to {BOUNDARY:g} us, us", f"{each['boundary_us']:.1f}"],
        ]
    table("a step", ["", "mean"], rows)
    if found.inside is not None:
        _print_inside(found.inside, found.steps)
    print(f"\n{found.gap_count} gaps, {found.gap_count - found.boundaries} above {BOUNDARY:g} us; the largest:")
    _print_gaps(found.gaps)
    if found.trace:
        print(f"trace: {found.trace}")


def _print_inside(inside: Inside, steps: int) -> None:
    """Between the first kernel of a generation and its last."""
    from lowbit.prove.profile_gaps import BOUNDARY

    rows = [
        ["span, us", f"{inside.span_us:.1f}"],
        ["no kernel runs, us", f"{inside.span_us - inside.busy_us:.1f}"],
        [f"gaps above {BOUNDARY:g} us", str(inside.gap_count)],
        ["their sum, us", f"{inside.gap_us:.1f}"],
        ["of them from the first replay to the last", str(inside.step_gaps)],
        ["their sum, us", f"{inside.step_gap_us:.1f}"],
        ["replays of graphs", str(inside.replays)],
        ["kernels in replays", str(inside.replay_events)],
        ["boundaries of kernels in replays, us", f"{inside.boundary_us:.1f}"],
        ["a kernel, us", f"{inside.boundary_mean_us:.2f}"],
        ["a step, us", f"{inside.boundary_us / steps:.1f}"],
        ["kernels that begin before the last one ended", str(inside.overlaps)],
        ["by, us", f"{inside.overlap_us:.1f}"],
    ]
    print()
    table(f"inside {inside.runs} x {inside.of}, from the first kernel to the last", ["", ""], rows)
    if inside.gaps:
        print(f"\nthe largest of {inside.gap_count} gaps above {BOUNDARY:g} us in there:")
        _print_gaps(inside.gaps)


def _print_gaps(gaps: Sequence[Gap]) -> None:
    from lowbit.prove.profile import cause

    table("", ["at ms", "us", "before it", "after it", "CPU was in"], [
        [f"{gap.start_us / 1e3:.3f}", f"{gap.us:.1f}", _short(gap.before), _short(gap.after), cause(gap.stack) or "-"]
        for gap in gaps
    ])  # fmt: skip


def _short(name: str) -> str:
    return name if len(name) <= 40 else name[:37] + "..."
