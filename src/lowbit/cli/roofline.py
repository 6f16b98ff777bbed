"""``lowbit roofline``: what a chip allows a linear or a model, and how near a measurement came."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from lowbit.cli.show import as_json, table
from lowbit.types import FormatError

if TYPE_CHECKING:
    from lowbit.prove.chips import Chip
    from lowbit.prove.measured import Compared
    from lowbit.prove.roofline import Published, Row, Step, Utterance
    from lowbit.prove.shapes import Shape

ALIASES = {"int8": "w8a8"}


def add(commands: Any, common: argparse.ArgumentParser) -> None:
    """Register the command."""
    one = commands.add_parser(
        "roofline", parents=[common], help="least time a chip needs for a linear or a model, beside measured times"
    )
    one.add_argument(
        "--device", required=True, help="a preset (l4, a10, a100, h100, h200, rtx4090, pi5, pi4, zen5), or cpu or cuda"
    )
    one.add_argument("--measure", action="store_true", help="with cpu or cuda: measure its ceilings first (seconds)")
    one.add_argument(
        "--linear", action="append", default=[], metavar="MxNxK", help="rows, out features, in features; repeatable"
    )
    one.add_argument("--model", metavar="NAME", help="omnivoice")
    one.add_argument("--config", metavar="DIR", help="sizes of a Llama- or Qwen3-shaped model from its config.json")
    one.add_argument("--tokens", type=int, metavar="N", help="rows of a step (685 of omnivoice, else 1)")
    one.add_argument("--context", type=int, default=0, metavar="N", help="tokens already in the cache of a text model")
    one.add_argument(
        "--audio", type=float, metavar="S", help="seconds of speech in a step of omnivoice (10 of 685 tokens)"
    )
    one.add_argument("--precision", metavar="LIST", help="of fp16, fp8, w8a8, w4a8, w4a4 (all)")
    one.add_argument("--group", type=int, default=64, help="columns that share a scale of a 4-bit weight (64)")
    one.add_argument("--rank", type=int, default=16, help="of the low-rank branch of w4a4 (16)")
    one.add_argument(
        "--measured",
        action="append",
        default=[],
        metavar="FILE",
        help="JSON lines of lowbit bench layers or bench/gpu_check.py",
    )
    one.add_argument("--plot", metavar="FILE", help="write the roofline as SVG")
    one.set_defaults(run=roofline)


def roofline(args: argparse.Namespace) -> int:
    from lowbit.prove import measured as lines
    from lowbit.prove import roofline as roof
    from lowbit.prove.shapes import MODELS, read_config

    _check(args)
    chip = _chip(args)
    names = _precisions(args.precision)
    rows = roof.linears([_size(text) for text in args.linear], chip, names, args.group, args.rank)
    shape = read_config(args.config) if args.config else MODELS.get(args.model)
    steps, said = _steps(args, shape, chip, names) if shape else ([], [])
    beside = roof.published(shape, chip)
    compared, others = [], 0
    if args.measured:
        found, others = lines.read(args.measured)
        compared = lines.compare(found, chip, args.threads)
    if args.plot:
        from lowbit.prove import report, roofline_plot

        report.write(args.plot, roofline_plot.draw(chip, rows + [row for step in steps for row in step.rows], compared))
    if args.json:
        as_json(_document(chip, rows, steps, said, beside, compared, others))
        return 0
    _print_chip(chip)
    if rows:
        _print_rows("predicted", rows)
    if steps:
        _print_steps(steps)
    if said:
        _print_rtf(said, beside)
    if args.measured:
        _print_compared(compared, others)
    if args.plot:
        print(f"wrote {args.plot}")
    return 0


def _check(args: argparse.Namespace) -> None:
    from lowbit.prove.shapes import MODELS

    if args.model is not None and args.model not in MODELS:
        raise FormatError(f"--model: found {args.model!r}, accepted is {', '.join(MODELS)} (or --config DIR)")
    if args.model and args.config:
        raise FormatError("roofline: found --model and --config, accepted is one of them")
    if not (args.linear or args.model or args.config or args.measured):
        raise FormatError("roofline: found nothing to predict, accepted is --linear, --model, --config or --measured")
    for name, least in (("tokens", 1), ("context", 0), ("group", 1), ("rank", 0)):
        value = getattr(args, name)
        if value is not None and value < least:
            raise FormatError(f"--{name}: found {value}, accepted is {least} or more")
    if args.audio is not None and not 0 < args.audio < 3600:
        raise FormatError(f"--audio: found {args.audio:g}, accepted are seconds above 0")


def _chip(args: argparse.Namespace) -> Chip:
    from lowbit.prove import chips

    own = args.device in ("cpu", "cuda")
    if args.measure and not own:
        raise FormatError(f"--measure: found --device {args.device}, accepted is cpu or cuda")
    if own and not args.measure:
        raise FormatError(f"--device: found {args.device}, accepted with --measure; presets: {', '.join(chips.CHIPS)}")
    if not own:
        chip = chips.preset(args.device)
        return chip.of_cores(args.threads) if args.threads else chip
    import torch

    from lowbit.bench.timer import machine
    from lowbit.prove import ceilings

    on_gpu = args.device == "cuda" and torch.cuda.is_available()
    return ceilings.measure(args.device, torch.cuda.get_device_name() if on_gpu else machine()["chip"])


def _precisions(text: str | None) -> list[str]:
    from lowbit.prove.work import PRECISIONS

    if text is None:
        return list(PRECISIONS)
    names = [ALIASES.get(word, word) for word in text.split(",")]
    wrong = [name for name in names if name not in PRECISIONS]
    if wrong:
        raise FormatError(f"--precision: found {wrong[0]!r}, accepted are {', '.join(PRECISIONS)}")
    return list(dict.fromkeys(names))


def _size(text: str) -> tuple[int, int, int]:
    parts = text.lower().split("x")
    if len(parts) != 3 or not all(part.isdecimal() and int(part) for part in parts):
        raise FormatError(f"--linear: found {text!r}, accepted is MxNxK, three whole numbers from 1 on")
    m, n, k = map(int, parts)
    return m, n, k


def _steps(
    args: argparse.Namespace, shape: Shape, chip: Chip, names: Sequence[str]
) -> tuple[list[Step], list[Utterance]]:
    """A step in every precision; of OmniVoice, an utterance too."""
    from lowbit.prove import roofline as roof
    from lowbit.prove import work

    tokens = args.tokens or (685 if shape.codebooks else 1)
    if not shape.codebooks:
        if args.audio is not None:
            raise FormatError(f"--audio: found {args.audio:g} for {shape.name}, accepted with omnivoice")
        segments = work.text_segments(tokens, args.context)
        return [roof.step(shape, segments, chip, name, args.group, args.rank) for name in names], []
    if args.context:
        raise FormatError(f"--context: found {args.context} for {shape.name}, accepted is 0: it keeps no cache")
    target = roof.frames(tokens, args.audio)
    segments = work.audio_segments(tokens, target)
    steps = [roof.step(shape, segments, chip, name, args.group, args.rank) for name in names]
    return steps, [roof.utterance(step, chip, target / roof.FRAMES) for step in steps]


def _document(
    chip: Chip, rows: Sequence[Row], steps: Sequence[Step], said: Sequence[Utterance],
    beside: Sequence[Published], compared: Sequence[Compared], others: int,
) -> dict[str, Any]:  # fmt: skip
    from lowbit.prove import roofline as roof

    rates = {unit: {"tops": rate.per_second / 1e12, "source": rate.source} for unit, rate in chip.rates.items()}
    out: dict[str, Any] = {
        "device": chip.name, "gb_per_s": chip.bandwidth.per_second / 1e9, "bandwidth_source": chip.bandwidth.source,
        "rates": rates, "times": "predicted floors",
    }  # fmt: skip
    if rows:
        out["linears"] = [roof.as_dict(row) for row in rows]
    if steps:
        out["steps"] = [
            {
                "precision": step.precision, "note": step.note or None, "ms": 1e3 * step.seconds,
                "gflop": step.operations / 1e9, "mb": step.bytes / 1e6, "kernels": step.kernels,
                "operators": [roof.as_dict(row) for row in step.rows],
            }
            for step in steps
        ]  # fmt: skip
    if said:
        out["rtf_predicted"] = [{**u._asdict(), "rtf": u.rtf} for u in said]
    if beside:
        out["rtf_published_by_others"] = [x._asdict() for x in beside]
    if compared or others:
        out["measured"] = [one.as_dict() for one in compared]
        out["lines_left_out"] = others
    return out


def _print_chip(chip: Chip) -> None:
    ceilings = [("memory", chip.bandwidth, 1e9, "GB/s")]
    ceilings += [
        (unit, rate, 1e12, "TOPS" if unit.startswith("int") else "TFLOPS") for unit, rate in chip.rates.items()
    ]
    table(
        chip.name + (f", {chip.cores} cores" if chip.cores else ""), ["ceiling", "", "source"],
        [[name, f"{rate.per_second / scale:.4g} {unit}", rate.source] for name, rate, scale, unit in ceilings],
    )  # fmt: skip
    print()


def _print_rows(title: str, rows: Sequence[Row]) -> None:
    columns = ["operator", "x", "precision", "GFLOP", "MB", "FLOP/byte", "break-even", "share", "bound", f"us, {title}"]
    table("", columns, [
        [
            row.name, row.times, row.precision or "-", f"{row.operations / 1e9:.3f}", f"{row.bytes / 1e6:.3f}",
            f"{row.intensity:.1f}", f"{row.break_even:.0f}", f"{100 * row.share:.0f}%", row.bound,
            f"{1e6 * row.seconds:.1f}",
        ]
        for row in rows
    ])  # fmt: skip
    _notes({row.precision: row.note for row in rows if row.note})


def _print_steps(steps: Sequence[Step]) -> None:
    """One precision in full; several side by side."""
    if len(steps) == 1:
        _print_rows("predicted", steps[0].rows)
    else:
        longest = max(steps, key=lambda step: len(step.rows))  # one that quantizes has every operator of the others
        words = [_plain(row.name) for row in longest.rows]
        columns = ["operator", "x", *(f"{step.precision}, us" for step in steps)]
        cells = [[{_plain(row.name): row for row in step.rows}.get(word) for step in steps] for word in words]
        table("predicted; c: compute-bound, m: memory-bound", columns, [
            [word, next(row.times for row in line if row), *("" if row is None else _time(row) for row in line)]
            for word, line in zip(words, cells, strict=True)
        ])  # fmt: skip
        _notes({step.precision: step.note for step in steps if step.note})
    print()
    fp16 = next((step.seconds for step in steps if step.precision == "fp16"), None)
    table("whole step, predicted", ["precision", "GFLOP", "MB", "operators", "ms", "over fp16"], [
        [
            step.precision, f"{step.operations / 1e9:.1f}", f"{step.bytes / 1e6:.1f}", step.kernels,
            f"{1e3 * step.seconds:.3f}", "-" if fp16 is None else f"{fp16 / step.seconds:.2f}",
        ]
        for step in steps
    ])  # fmt: skip


def _plain(name: str) -> str:
    return name.replace(", quantize", "")


def _time(row: Row) -> str:
    return f"{1e6 * row.seconds:.1f} {row.bound[0]}"


def _notes(notes: dict[str, str]) -> None:
    for precision, note in notes.items():
        print(f"note: {precision}: {note}")


def _print_rtf(said: Sequence[Utterance], beside: Sequence[Published]) -> None:
    from lowbit.prove import roofline as roof

    print()
    first = said[0]
    title = f"{first.audio:g} s of speech in {first.steps} steps: floors, predicted; no gap between kernels, no prompt encoding, no trimming"
    table(title, ["precision", "backbone ms", "codec ms", "RTF, predicted"], [
        [u.precision, f"{1e3 * u.backbone:.1f}", f"{1e3 * u.codec:.1f}", f"{u.rtf:.4f}"] for u in said
    ])  # fmt: skip
    if not beside:
        return
    print()
    floors = {u.precision: u.rtf for u in said}
    title = f"published by others on an {roof.PUBLISHED_ON} (ten samples, lengths not given), beside the floor above"
    table(title, ["engine", "precision", "RTF, published", "RTF, predicted", "published / predicted"], [
        [x.engine, x.precision, f"{x.rtf:.3f}", f"{floors[x.precision]:.4f}", f"{x.rtf / floors[x.precision]:.1f}"]
        for x in beside
        if x.precision in floors
    ])  # fmt: skip


def _print_compared(compared: Sequence[Compared], others: int) -> None:
    print()
    columns = ["measured", "M", "precision", "FLOP/byte", "bound", "us, predicted", "us, measured", "of the roof"]
    table("", columns, [
        [
            one.measured.name, one.measured.m, one.measured.precision, f"{one.intensity:.1f}", one.bound,
            f"{1e6 * one.predicted:.2f}", f"{1e6 * one.measured.seconds:.2f}", f"{100 * one.share:.0f}%",
        ]
        for one in compared
    ])  # fmt: skip
    if others:
        print(f"{others} lines are of something else than a linear in these precisions")
