"""Quantize a model every way that docs/numbers.md lists, and write one JSON line for each, its activations and its text.

    PYTHONPATH=src python bench/accuracy.py --assets build/accuracy --out bench/results/accuracy.jsonl
    PYTHONPATH=src python bench/accuracy.py --model DIR --calibration c4.txt --text wiki.txt --out bench/results/accuracy.jsonl

``--assets`` unpacks the model and the texts of `make demo` into a folder first (the wiki text without its markup).
One process; a recipe is quantized once and evaluated with every kind of activations it lists, each on every span of the
text. Linears are run by `lowbit.prove.simulate` (the reference's arithmetic in float32), so this needs no compiled
library and runs on a GPU with ``--device cuda``. Lines are appended as they are found; what the file has already is not
done again. ``--rows`` picks recipes by a part of their name, ``--list`` prints them.
"""

from __future__ import annotations

import argparse
import copy
import json
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace as changed
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

import lowbit
from lowbit.bench.timer import machine
from lowbit.checkpoint import open_checkpoint
from lowbit.models.calibrate import quantize_model
from lowbit.models.calibration_inputs import read_calibration
from lowbit.models.plan import make_plan
from lowbit.models.recipes import matches
from lowbit.models.sweep import TOKENS, WINDOW, Sweep, inputs_of
from lowbit.prove.compare import perplexity_of, windows_of
from lowbit.prove.paired import Scores, agreement, mean_of, ratio, score
from lowbit.prove.simulate import Simulated, running, simulate, stored_bits
from lowbit.quantize.budget import Candidate, choose
from lowbit.types import SCHEMES, Activation, QuantizedWeight, Scheme

SPANS = (60000, 100000)  # first tokens: choices were made on the first span, none on the second
GATES = ("gate_proj", "up_proj")


class Recipe(NamedTuple):
    """A row: ``options`` are those of ``quantize_model``, ``acts`` names of ``activations``."""

    name: str
    table: str
    scheme: Scheme
    method: str
    options: dict[str, Any]
    acts: tuple[str, ...]


def _w4(name: str, method: str, group: int, symmetric: bool, acts: tuple[str, ...]) -> Recipe:
    scheme = changed(SCHEMES["w4a8"], group_size=group, symmetric=symmetric)
    return Recipe(name, "w4", scheme, method, {}, acts)


def _svd(name: str, acts: tuple[str, ...] = ("a4", "a8-token"), **options: Any) -> Recipe:
    return Recipe(name, "w4a4", SCHEMES["w4a4"], "svdquant", options, acts)


def _rotated(name: str, group: int, symmetric: bool) -> Recipe:
    """4-bit weights behind smoothing and Hadamard, no low rank: the best that the bits of group scales buy."""
    scheme = changed(SCHEMES["w4a8"], group_size=group, symmetric=symmetric)
    return Recipe(name, "w4", scheme, "svdquant", {"rank": 0}, ("a16", "a8", "a8-token"))


EVERY = ("a4", "a4, gate and up a8", "a4, gate and up a8-token", "a8-token")
W8A8 = SCHEMES["w8a8"]
RECIPES = (
    _svd("w4a4 rank 16", (*EVERY, "a4, budget 4.5", "a4, budget 5", "a4, budget 6", "a4 without clip", "a8", "a16")),
    _svd("w4a4 rank 16, two-level scales", EVERY, scales="two-level"),
    _svd("w4a4 rank 16, channel scales", EVERY, scales="channel"),
    _w4("w4 g64 symmetric, gptq", "gptq", 64, True, ("a16", "a8", "a8-token")),
    _w4("w4 g64 asymmetric, gptq", "gptq", 64, False, ("a16", "a8", "a8-token")),
    _w4("w4 g32 symmetric, gptq", "gptq", 32, True, ("a16", "a8")),
    _w4("w4 g32 asymmetric, gptq", "gptq", 32, False, ("a16", "a8")),
    _rotated("w4 g64 symmetric, smoothing and Hadamard", 64, True),
    _rotated("w4 g64 asymmetric, smoothing and Hadamard", 64, False),
    _rotated("w4 g32 symmetric, smoothing and Hadamard", 32, True),
    _rotated("w4 g32 asymmetric, smoothing and Hadamard", 32, False),
    Recipe("w8 per row, gptq", "w8a8", W8A8, "gptq", {}, ("a8-token",)),
    Recipe("w8 per row, gptq, no channel scales", "w8a8", W8A8, "gptq", {"channel_scales": False}, ("a8-token",)),
    Recipe("w8 per row, rtn", "w8a8", W8A8, "rtn", {}, ("a8-token",)),
    _w4("w4 g64 symmetric, rtn", "rtn", 64, True, ("a16", "a8", "a4")),
    _w4("w4 g64 asymmetric, rtn", "rtn", 64, False, ("a16", "a8")),
    _w4("w4 g32 symmetric, rtn", "rtn", 32, True, ("a16", "a8")),
    _w4("w4 g32 asymmetric, rtn", "rtn", 32, False, ("a16", "a8")),
    _svd("w4a4 rank 0", rank=0),
    _svd("w4a4 rank 32", rank=32),
    _svd("w4a4 rank 64", rank=64),
    _svd("w4a4 rank 16, iterative", recipe="iterative"),
    _svd("w4a4 rank 16, no smoothing", channel_scales=False),
    _svd("w4a4 rank 16, no Hadamard", ("a4", "a8-token", "a8"), hadamard=False),
    _svd("w4a4 rank 16, no search of weight scales", clip=False),
    _svd("w4a4 rank 16, no act-order", act_order=False),
)


WORDS = {"a16": Activation(16, "none"), "a8": Activation(8, "group"), "a8-token": Activation(8, "token")}


def activations(
    act: str, quantized: Mapping[str, QuantizedWeight], measured: Callable[[], list[Candidate]] | None = None
) -> dict[str, Activation]:
    """What every linear runs with under one of the names of a recipe's ``acts``. ``a4`` keeps each linear's own clip.

    ``measured`` gives the sensitivity of every input, for ``a4, budget B``: B bits on average, 8 where it pays most.
    """
    if act in WORDS:
        return dict.fromkeys(quantized, WORDS[act])
    found = {name: _four(q, keep=act != "a4 without clip") for name, q in quantized.items()}
    if act.startswith("a4, gate and up "):
        return found | {name: WORDS[act.rpartition(" ")[2]] for name in quantized if matches(name, GATES)}
    if act.startswith("a4, budget ") and measured is not None:
        candidates = measured()
        bits = choose(candidates, float(act.rpartition(" ")[2]))
        eight = [name for c, b in zip(candidates, bits, strict=True) if b == 8 for name in c.names]
        return found | dict.fromkeys(eight, WORDS["a8-token"])
    if act not in ("a4", "a4 without clip"):
        raise ValueError(f"act: found {act!r}, accepted are {', '.join(WORDS)}, a4 and its variants")
    return found


def _four(q: QuantizedWeight, keep: bool = True) -> Activation:
    own = q.activation if q.activation is not None and q.activation.bits == 4 else Activation(4, "group")
    return own if keep else own._replace(clip=1.0)


def sensitivities(
    model: Any,
    layers: Mapping[str, Simulated],
    quantized: Mapping[str, QuantizedWeight],
    calibration: Any,
    tokenizer: Any,
) -> list[Candidate]:
    """What every input loses at 4 bits with the rest at 8 a token, as ``lowbit quantize --budget`` measures it."""
    text = read_calibration(calibration, tokenizer, tokens=TOKENS, window=WINDOW)

    def switch(names: Sequence[str], bits: int) -> None:
        for name in names:
            layers[name].activation = _four(quantized[name]) if bits == 4 else WORDS["a8-token"]

    with running(layers, dict.fromkeys(quantized, WORDS["a8-token"])):
        sweep = Sweep(model, text, switch)
        groups = inputs_of(model, quantized)
        sizes = [sum(quantized[name].n * quantized[name].k for name in names) for names in groups]
        return [Candidate(names, size, sweep.loss(names)) for names, size in zip(groups, sizes, strict=True)]


def run(
    reference: Any,
    recipes: Sequence[Recipe],
    spans: Mapping[int, list[Tensor]],
    calibration: Any,
    tokenizer: Any,
    options: Mapping[str, Any],
    facts: Mapping[str, Any],
    out: Path,
) -> list[dict[str, Any]]:
    """Every line that ``out`` lacks, appended to it. ``spans``: first token -> windows; ``facts`` go into every line."""
    known = {_key(json.loads(text)) for text in out.read_text("utf-8").splitlines()} if out.exists() else set()
    before = {start: score(reference, windows) for start, windows in spans.items()}
    lines: list[dict[str, Any]] = []
    for recipe in recipes:
        asked = [
            {**facts, **_of_recipe(recipe), "act": act, "span": [start, start + sum(map(len, windows))]}
            for act in recipe.acts
            for start, windows in spans.items()
        ]
        asked = [line for line in asked if _key(line) not in known]
        if not asked:
            continue
        model = copy.deepcopy(reference)
        began = time.perf_counter()
        text = None if recipe.method == "rtn" else calibration
        quantized, report = quantize_model(
            model, recipe.scheme, recipe.method, text, tokenizer, progress=_progress(recipe.name), **options,
            **recipe.options,
        )  # fmt: skip
        seconds = time.perf_counter() - began
        rounded = sum(row.method.startswith("rtn") for row in report.rows)
        made = {
            "quantize_s": round(seconds, 1),
            "calibration_tokens": report.calibration_tokens,
            "rtn_linears": rounded,
        }
        lines += _evaluate(model, reference, quantized, asked, spans, before, made, out, calibration, tokenizer)
        del model, quantized
    return lines


def run_checkpoint(
    reference: Any,
    label: str,
    folder: Path,
    acts: Sequence[str],
    spans: Mapping[int, list[Tensor]],
    facts: Mapping[str, Any],
    out: Path,
) -> list[dict[str, Any]]:
    """The same for a checkpoint of any format that lowbit reads, whoever made it; its dense tensors are not looked at."""
    checkpoint = open_checkpoint(folder)
    model = copy.deepcopy(reference)
    plan = make_plan(model, checkpoint)
    if plan.format is None:
        raise SystemExit(f"{folder}: found plain weights, accepted is a quantized checkpoint")
    quantized = {name: plan.format.read(checkpoint, source, plan.config) for name, source in plan.layers.items()}
    asked = [
        {**facts, "name": label, "table": "checkpoints", "scheme": "w4", "method": label, "options": {}, "act": act}
        | {"span": [start, start + sum(map(len, windows))], "calibration": None}
        for act in acts
        for start, windows in spans.items()
    ]
    before = {start: score(reference, windows) for start, windows in spans.items()}
    made = {"quantize_s": None, "calibration_tokens": None, "rtn_linears": None}
    return _evaluate(model, reference, quantized, asked, spans, before, made, out)


def _evaluate(
    model: Any,
    reference: Any,
    quantized: Mapping[str, QuantizedWeight],
    asked: Sequence[dict[str, Any]],
    spans: Mapping[int, list[Tensor]],
    before: Mapping[int, Scores],
    made: Mapping[str, Any],
    out: Path,
    calibration: Any = None,
    tokenizer: Any = None,
) -> list[dict[str, Any]]:
    layers = simulate(model, quantized)
    measured = cache(lambda: sensitivities(model, layers, quantized, calibration, tokenizer))
    weights = sum(q.n * q.k for q in quantized.values())
    bits = round(stored_bits(quantized), 4)
    lines = []
    for line in asked:
        start = line["span"][0]
        chosen = activations(line["act"], quantized, measured)
        with running(layers, chosen):
            found = score(model, spans[start], reference)
        assert found.kl is not None
        against, kl = ratio(found.nll, before[start].nll), mean_of(found.kl)
        line |= {
            **made,
            "bits_per_weight": bits,
            "activation_bits": round(sum(chosen[n].bits * q.n * q.k for n, q in quantized.items()) / weights, 4),
            "tokens": found.nll.numel(),
            "ppl": perplexity_of(found.nll),
            "ppl_ref": perplexity_of(before[start].nll),
            "ratio": against.value,
            "se": against.error,
            "kl": kl.value,
            "kl_se": kl.error,
            "top1": agreement(found, before[start]).value,
            "eval_s": round(found.seconds, 2),
        }
        with out.open("a", encoding="utf-8") as file:
            file.write(json.dumps(line) + "\n")
        shown = f"{line['ratio']:.4f} ± {line['se']:.4f}  KL {line['kl']:.4f}  {bits:.3f} bits"
        print(f"{line['name']:44} {line['act']:26} {start:7} {shown}", flush=True)
        lines.append(line)
    return lines


def _of_recipe(recipe: Recipe) -> dict[str, Any]:
    s = recipe.scheme
    name = {True: "w4a4" if s.activation.bits == 4 else "w4", False: "w8a8"}[s.bits == 4]
    options = {"group": s.group_size, "symmetric": s.symmetric, **recipe.options}
    line = {"name": recipe.name, "table": recipe.table, "scheme": name, "method": recipe.method, "options": options}
    return line | ({"calibration": None} if recipe.method == "rtn" else {})


def _key(line: Mapping[str, Any]) -> tuple[str, ...]:
    """What makes two lines the same measurement."""
    return tuple(json.dumps(line.get(key)) for key in ("model", "name", "act", "span", "context", "calibration"))


def _progress(name: str) -> Any:
    began = time.perf_counter()

    def tell(done: int, total: int, label: str) -> None:
        if sys.stderr.isatty() or done in (1, total):
            print(f"  {name}: {done}/{total} blocks, {time.perf_counter() - began:.0f} s", file=sys.stderr, flush=True)

    return tell


def _model_name(folder: Path, config: Any) -> str:
    shape = f"{config.num_hidden_layers} layers, hidden {config.hidden_size}, vocabulary {config.vocab_size}"
    return f"{folder.name} ({config.model_type}, {shape})"


def parser() -> argparse.ArgumentParser:
    p = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    p.add_argument("--assets", type=Path, metavar="FOLDER", help="model and texts out of installed packages, kept here")
    p.add_argument("--model", type=Path, help="directory of the plain model")
    p.add_argument("--calibration", metavar="FILE", help="text to calibrate on")
    p.add_argument("--text", type=Path, metavar="FILE", help="text to evaluate on")
    p.add_argument("--out", type=Path, metavar="JSONL", help="lines are appended here")
    p.add_argument("--device", default="cpu")
    p.add_argument("--rows", action="append", metavar="PART", help="recipes whose name has this part (repeatable)")
    p.add_argument("--exactly", action="append", metavar="NAME", help="recipes of this very name (repeatable)")
    p.add_argument("--list", action="store_true", help="print the recipes and stop")
    p.add_argument(
        "--spans", type=int, nargs="+", default=list(SPANS), metavar="START", help="first tokens of the spans"
    )
    p.add_argument("--tokens", type=int, default=8192, metavar="N", help="of each span")
    p.add_argument("--context", type=int, default=1024, metavar="N")
    p.add_argument("--calibration-tokens", type=int, default=32768, metavar="N")
    p.add_argument("--window", type=int, default=256, metavar="N", help="of the calibration")
    p.add_argument("--checkpoint", action="append", default=[], metavar="LABEL=DIR", help="evaluate this one too")
    p.add_argument("--acts", nargs="+", default=["a16", "a8"], metavar="ACT", help="activations of --checkpoint")
    p.add_argument("--name", help="what the lines call the model (default: its directory and shape)")
    p.add_argument("--commit", help="where the working tree is no checkout")
    p.add_argument("--threads", type=int, metavar="N")
    return p


def main(argv: Sequence[str] | None = None) -> int:
    args = parser().parse_args(argv)
    chosen = [r for r in RECIPES if args.rows is None or any(part in r.name for part in args.rows)]
    if args.exactly is not None:
        chosen = [r for r in RECIPES if r.name in args.exactly]
    if args.list:
        for recipe in chosen:
            print(f"{recipe.name:44} {', '.join(recipe.acts)}")
        return 0
    if args.assets is not None:
        model, calibration, text = assets(args.assets)
        args.model, args.calibration, args.text = (
            args.model or model,
            args.calibration or calibration,
            args.text or text,
        )
    absent = [f"--{key}" for key in ("model", "text", "out") if getattr(args, key) is None]
    if args.calibration is None and any(r.method != "rtn" for r in chosen) and not args.checkpoint:
        absent.append("--calibration")
    if absent or not (chosen or args.checkpoint):
        found = f"no {', '.join(absent)}" if absent else f"{args.rows or args.exactly}, which name no recipe"
        print(f"accuracy: found {found} (--help lists what is accepted)", file=sys.stderr)
        return 2
    if args.threads:
        torch.set_num_threads(args.threads)

    import transformers

    tokenizer = transformers.AutoTokenizer.from_pretrained(args.model, local_files_only=True)
    model = transformers.AutoModelForCausalLM.from_pretrained(args.model, dtype=torch.float32, local_files_only=True)
    model = model.eval().requires_grad_(False).to(args.device)
    text = args.text.read_text("utf-8")
    spans = {
        start: windows_of(text, tokenizer, context=args.context, tokens=args.tokens, skip=start) for start in args.spans
    }
    for start, windows in spans.items():
        if sum(map(len, windows)) < args.tokens // args.context * args.context:
            print(f"accuracy: found too few tokens from {start} on in {args.text}", file=sys.stderr)
            return 2
    on = machine()
    gpu = torch.cuda.get_device_name(model.device) if model.device.type == "cuda" else None
    facts = {
        "bench": "accuracy",
        "model": args.name or _model_name(args.model, model.config),
        "text": args.text.name,
        "context": args.context,
        "calibration": [Path(args.calibration).name, args.calibration_tokens, args.window]
        if args.calibration
        else None,
        "runs": "float32 simulation of reference.linear",
        "device": gpu or on["chip"],
        "torch": torch.__version__,
        "transformers": transformers.__version__,
        "lowbit": lowbit.__version__,
        "python": on["python"],
        "commit": args.commit or on["commit"],
        "date": on["date"],
    }
    args.out.parent.mkdir(parents=True, exist_ok=True)
    for pair in args.checkpoint:
        label, _, folder = pair.partition("=")
        run_checkpoint(model, label, Path(folder), args.acts, spans, facts, args.out)
    if args.checkpoint and args.rows is None and args.exactly is None:
        return 0
    options = {"tokens": args.calibration_tokens, "window": args.window}
    run(model, chosen, spans, args.calibration, tokenizer, options, facts, args.out)
    return 0


def assets(folder: Path) -> tuple[Path, Path, Path]:
    """(model, text to calibrate on, text to evaluate on) as the demo has them, unpacked where they are not there yet."""
    sys.path.insert(0, str(Path(__file__).parents[1] / "demo"))
    import assets as packed

    model, texts = folder / "smollm2-135m-shuffled", (folder / "c4.txt", folder / "wiki.txt")
    if not (model / "config.json").exists():
        packed.extract_model(model)
    for path in texts:
        if not path.exists():
            path.write_text(packed.text(path.stem), "utf-8")
    return model, *texts


if __name__ == "__main__":
    sys.exit(main())
