"""``lowbit speak``: text to speech in a reference's voice, one line or many."""

from __future__ import annotations

import argparse
import functools
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

from lowbit.cli.show import as_json, clustering, refuse_cluster
from lowbit.types import FormatError

if TYPE_CHECKING:
    from lowbit.engines.speaker import How, Spoken, Utterance
    from lowbit.models.omnivoice import Line


def add(commands: Any, common: argparse.ArgumentParser) -> None:
    """Register the command."""
    one = commands.add_parser("speak", parents=[common], help="speak text in the voice of a recording (OmniVoice)")
    one.add_argument("--model", required=True, metavar="DIR", help="an OmniVoice: directory, or cached hub id")
    one.add_argument("--ref", metavar="WAV", help="a few seconds of the voice (default: the model picks one)")
    one.add_argument("--ref-text", metavar="TEXT", help="what is said in it")
    one.add_argument("--text", help="what to say")
    one.add_argument(
        "--lines", metavar="FILE",
        help='many: a text a line, or .jsonl of {"text", "ref_audio", "ref_text", "duration", "language"}',
    )  # fmt: skip
    one.add_argument(
        "-o", "--out", required=True, metavar="OUT",
        help="a .wav; with --lines a directory for 0001.wav ..., where what is there from the same is kept",
    )  # fmt: skip
    one.add_argument("--weights", metavar="DIR", help="a checkpoint that lowbit quantize made of this model")
    one.add_argument(
        "--precision", choices=("fp32", "fp16", "bf16", "w8a8", "w4a8", "w4a4"),
        help="default: what --weights declare, else the model's dtype (fp16 on CUDA, fp32 on a CPU)",
    )  # fmt: skip
    one.add_argument("--device", default="cpu", help="cpu (default) or cuda")
    one.add_argument("--seed", type=int, default=0, help="of every line (0)")
    one.add_argument("--steps", type=int, default=32, metavar="N", help="decoding steps (32)")
    one.add_argument("--duration", type=float, metavar="S", help="seconds of each line (default: the model's estimate)")
    one.add_argument("--language", metavar="L", help="en, zh, ... (default: none named)")
    clustering(one, "--lines")
    one.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    from tqdm import tqdm

    from lowbit.engines.speaker import How, Speaker, kept, utterances

    refuse_cluster(args, "lines")
    began = time.perf_counter()
    lines, targets = _lines(args)
    _references(lines)
    how = How(args.model, args.weights, args.precision, args.device, args.seed, args.steps)
    todo = utterances(how, lines, targets)
    rows: dict[Path, Spoken] = {}
    if args.lines is not None:
        rows = {what.target: there for what in todo if (there := kept(what))}
        args.after_stop = f"what was spoken is in {args.out}, the same command goes on there"
    if rows:
        print(f"note: {len(rows)} of {len(lines)} lines are in {args.out} already", file=sys.stderr)
    left = [what for what in todo if what.target not in rows]
    if args.ray:
        done = _on_a_cluster(args, how, left)
    else:
        speaker = Speaker(how, progress=sys.stderr.isatty()) if left else None
        done = ((what, speaker(what)) for what in left if speaker)
    with tqdm(total=len(left), desc="speaking", unit="line", disable=None, leave=False) as bar:
        for what, row in done:
            rows[what.target] = row
            bar.update()
            if not row.seconds:
                _note(f"{what.line.where}: nothing but silence was generated")
    _report(args, [rows[target] for target in targets], time.perf_counter() - began)
    return 0


def _on_a_cluster(args: argparse.Namespace, how: How, left: list[Utterance]) -> Iterator[tuple[Utterance, Spoken]]:
    """Each line when its file is written. FormatError at the end where some were not."""
    from lowbit import cluster
    from lowbit.engines.speaker import speaks, weight

    cluster.package()
    if not left:
        return
    out, failed = Path(args.out).resolve(), list[str]()
    with cluster.mark(out) as mark, cluster.cluster(args.workers, args.threads, args.device == "cuda") as pool:
        make = functools.partial(speaks, how.anywhere(), functools.partial(cluster.seen, mark))
        batches = cluster.balanced(left, weight, pool.workers)
        for what, row, why in cluster.spread(make, batches, pool, _note):
            if row is None:
                failed.append(f"{what.line.where}: {why}")
            else:
                yield what, row
    if failed:
        more = f" ({len(failed)} of {len(left)} lines were not spoken, the others are in {args.out})"
        raise FormatError(failed[0] + more)


def _note(text: str) -> None:
    from tqdm import tqdm

    tqdm.write(f"note: {text}", sys.stderr)


def _lines(args: argparse.Namespace) -> tuple[list[Line], list[Path]]:
    """What to say and where to, all of it checked. FormatError for what does not fit together."""
    from lowbit.models.omnivoice import Line, read_lines

    if (args.text is None) == (args.lines is None):
        raise FormatError("speak: accepted is one of --text TEXT and --lines FILE")
    if (args.ref is None) != (args.ref_text is None) and args.lines is None:
        missing = "--ref-text" if args.ref_text is None else "--ref"
        raise FormatError(f"{missing}: found nothing, accepted are both: a recording and what is said in it")
    if args.steps < 1:
        raise FormatError(f"--steps: found {args.steps}, accepted is 1 or more")
    if args.duration is not None and not args.duration > 0:
        raise FormatError(f"--duration: found {args.duration:g}, accepted is more than 0 seconds")
    out = Path(args.out)
    ref = None if args.ref is None else Path(args.ref)
    base = Line("", ref, args.ref_text, args.duration, args.language)
    if args.lines is None:
        if not args.text.strip():
            raise FormatError(f"--text: found {args.text!r}, accepted is a text with something to say")
        if out.suffix.lower() != ".wav" or out.is_dir():
            raise FormatError(f"--out: found {args.out}, accepted with --text is the name of a .wav file")
        return [base._replace(text=args.text)], [out]
    if out.exists() and not out.is_dir():
        raise FormatError(f"--out: found a file, {args.out}, accepted with --lines is a directory")
    lines = read_lines(args.lines, base)
    if args.ray:  # the other machines begin elsewhere
        out = out.resolve()
        lines = [line._replace(ref_audio=line.ref_audio and line.ref_audio.resolve()) for line in lines]
    return lines, [out / f"{number:04}.wav" for number in range(1, len(lines) + 1)]


def _references(lines: list[Line]) -> None:
    """Every recording is read before the model is: FormatError for one that cannot be used, a note for another rate."""
    from lowbit.models.omnivoice import RATE, read_reference

    seen: set[Path] = set()
    for line in lines:
        if line.ref_audio is None:
            continue
        if not (line.ref_text or "").strip():
            raise FormatError(f"{line.where}: ref_text: found nothing, accepted is what is said in {line.ref_audio}")
        if line.ref_audio not in seen:
            seen.add(line.ref_audio)
            rate = read_reference(line.ref_audio)[1]
            if rate != RATE:
                print(f"note: {line.ref_audio}: {rate} Hz, resampled to {RATE} Hz", file=sys.stderr)


def _report(args: argparse.Namespace, rows: list[Spoken], wall: float) -> None:
    """What was spoken, and how long it took; of files that were there already only that they are."""
    new = [row for row in rows if not row.kept]
    spoken, took = sum(row.seconds for row in new), sum(row.took for row in new)
    if args.json:
        total = {"seconds": spoken, "took": took, "rtf": took / spoken if spoken else None, "wall": wall}
        as_json({"lines": [row._asdict() for row in rows], **total})
        return
    where = rows[0].file if len(rows) == 1 else f"{len(rows)} files in {args.out}"
    rtf = f", {took / spoken:.3f} s a second of it" if spoken else ""
    all_in_all = f"; {wall:.2f} s with all that a cluster needs" if args.ray else ""
    print(f"{where}: {spoken:.2f} s of speech in {took:.2f} s{rtf}{all_in_all}")
