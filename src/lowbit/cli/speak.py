"""``lowbit speak``: text to speech in a reference's voice, one line or many."""

from __future__ import annotations

import argparse
import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

from lowbit.cli.show import as_json
from lowbit.types import FormatError

if TYPE_CHECKING:
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
        "-o", "--out", required=True, metavar="OUT", help="a .wav; with --lines a directory for 0001.wav ..."
    )
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
    one.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    import torch
    from tqdm import tqdm

    from lowbit.models.omnivoice import load_omnivoice, voice_of
    from lowbit.models.speech import write_wav
    from lowbit.omnivoice import accelerate

    lines, targets = _lines(args)
    _references(lines)
    floats = {"fp32": torch.float32, "fp16": torch.float16, "bf16": torch.bfloat16}
    model = load_omnivoice(args.model, args.device, floats.get(args.precision))
    accelerate(model, args.weights, args.precision, progress=sys.stderr.isatty())
    args.after_stop = f"what was spoken is in {args.out}"
    voices: dict[Any, Any] = {}
    rows: list[dict[str, Any]] = []
    for line, target in tqdm(
        list(zip(lines, targets, strict=True)), desc="speaking", unit="line", disable=None, leave=False
    ):
        began = time.perf_counter()
        key = (line.ref_audio, line.ref_text)
        if key not in voices:
            voices[key] = voice_of(model, line)
        torch.manual_seed(args.seed)
        audio = model.generate(
            text=line.text, language=line.language, voice_clone_prompt=voices[key], duration=line.duration,
            num_step=args.steps,
        )[0]  # fmt: skip
        if not len(audio):
            print(f"note: {line.where}: nothing but silence was generated", file=sys.stderr)
        target.parent.mkdir(parents=True, exist_ok=True)
        write_wav(target, audio, model.sampling_rate)
        seconds = len(audio) / model.sampling_rate
        rows.append({"file": str(target), "seconds": seconds, "took": time.perf_counter() - began, "text": line.text})
    _report(args, rows)
    return 0


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


def _report(args: argparse.Namespace, rows: list[dict[str, Any]]) -> None:
    spoken, took = sum(row["seconds"] for row in rows), sum(row["took"] for row in rows)
    if args.json:
        as_json({"lines": rows, "seconds": spoken, "took": took, "rtf": took / spoken if spoken else None})
        return
    where = rows[0]["file"] if len(rows) == 1 else f"{len(rows)} files in {args.out}"
    rtf = f", {took / spoken:.3f} s a second of it" if spoken else ""
    print(f"{where}: {spoken:.2f} s of speech in {took:.2f} s{rtf}")
