"""``lowbit eval --speech``: the likelihood of transcripts and the word errors of speech recognisers."""

from __future__ import annotations

import argparse
from collections import Counter
from datetime import date
from typing import Any

from lowbit.cli.show import as_json, bar, table
from lowbit.types import FormatError


def add_options(command: argparse.ArgumentParser) -> None:
    command.add_argument(
        "--speech", metavar="FILE", help='instead of --text: lines {"audio": WAV, "text": TRANSCRIPT}, for Whisper'
    )
    command.add_argument("--wer", action="store_true", help="with --speech: transcribe too, and count word errors")


def evaluate(args: argparse.Namespace) -> int:
    """Every model in turn; one JSON document of a model alone, so that lines can be collected."""
    if args.text:
        raise FormatError("eval: found --text and --speech, accepted is one of them")
    import torch

    from lowbit.models.load import exactly, load
    from lowbit.models.speech import Listener, read_lines
    from lowbit.prove.speech import likelihood, word_errors

    lines = read_lines(args.speech)
    results: list[dict[str, Any]] = []
    for directory in args.model:
        model = load(directory, activation=args.activation, dtype=getattr(torch, args.dtype))
        listener = Listener.of(model, str(model.name_or_path))
        simulated = exactly(model) if args.exact else 0
        score = likelihood(model, listener, lines, bar(directory, "clip"))
        errors = word_errors(model, listener, lines, bar(f"{directory}: words", "clip")) if args.wer else None
        results.append(
            {
                "bench": "speech", "model": directory, **describe(directory, args.activation, simulated), "nll": score.nll,
                "wer": None if errors is None else errors.wer, "words": None if errors is None else errors.words,
                "tokens": score.tokens, "clips": score.clips, "seconds": score.seconds,
                "date": date.today().isoformat(), "torch": torch.__version__, "threads": torch.get_num_threads(),
            }
        )  # fmt: skip
        del model
    if args.json:
        as_json(results[0] if len(results) == 1 else {"models": results})
        return 0
    columns = ["model", "scheme", "method", "bits", "activations", "nll", "wer", "tokens", "seconds"]
    table("", columns, [
        [r["model"], r["scheme"], r["method"], f"{r['bits_per_weight']:.2f}", r["activation"], f"{r['nll']:.4f}",
         "-" if r["wer"] is None else f"{r['wer']:.4f}", r["tokens"], f"{r['seconds']:.0f}"] for r in results
    ])  # fmt: skip
    return 0


def describe(directory: str, activation: str | None, simulated: int) -> dict[str, Any]:
    """What a checkpoint is: scheme, method, rank, bits a weight with everything counted that its linears store, and
    how the activations were rounded."""
    from lowbit.checkpoint import open_checkpoint
    from lowbit.models.load import local_directory
    from lowbit.models.plan import format_of
    from lowbit.prove.inspect import inspect_checkpoint

    path = local_directory(directory)
    info = inspect_checkpoint(path)
    if not info.layers:
        return {"scheme": "float", "method": "-", "rank": 0, "bits_per_weight": 32.0, "activation": "float"}
    settings = format_of(open_checkpoint(path))[1]
    usual = Counter((layer.bits, layer.group, layer.activation.split(" clip")[0]) for layer in info.layers)
    bits, group, declared = usual.most_common(1)[0][0]
    per_weight = 8 * sum(layer.bytes for layer in info.layers) / sum(layer.n * layer.k for layer in info.layers)
    wide = max(layer.k for layer in info.layers) == group or len({layer.group for layer in info.layers}) > 1
    four = declared.startswith("4 ")
    ran = declared if activation is None else activation
    if four and activation is None:
        hadamard = any("hadamard" in layer.extras for layer in info.layers)
        ran = "4 group, simulated" if simulated else "8 token" if hadamard else "8 group"
    return {
        "scheme": f"w{bits}a{declared.split()[0]}" + ("" if wide else f" g{group}"),
        "method": str(settings.get("method") or info.format), "rank": int(settings.get("rank") or 0),
        "bits_per_weight": per_weight, "activation": ran,
    }  # fmt: skip
