"""Perplexity of plain model directories beside the model they came from, as lines like those of bench/accuracy.py.

    PYTHONPATH=src python bench/peer_accuracy/score.py MODEL TEXT OUT.jsonl [DIR ...] [--device cuda] [--span 60000 --span 100000] [--tokens 8192]

Every DIR has the settings.json that quantize_*.py wrote; windows, first tokens and the mean are those of `lowbit eval`.
"""

from __future__ import annotations

import argparse
import json
import math
import sys
import time
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

import lowbit
from lowbit.bench.timer import machine
from lowbit.prove.compare import nll_of, token_ids

OWN = (  # said elsewhere in the line
    "peer", "gptqmodel", "auto-round", "bits", "group", "symmetric", "torch", "transformers", "bits_per_weight", "seconds",
    "device", "linears",
)  # fmt: skip


class Score(NamedTuple):
    nll: Tensor  # float64 [T], nats
    top: Tensor  # int64 [T]
    seconds: float


@torch.inference_mode()
def score(folder: Path, spans: dict[int, list[Tensor]], device: str) -> dict[int, Score]:
    """First token of the span -> what the model gave every token but the first of each window."""
    import transformers

    model = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32, local_files_only=True)
    model = model.eval().to(device)
    found = {}
    for start, windows in spans.items():
        began = time.perf_counter()
        nll, top = [], []
        for window in windows:
            ids = window.to(device)
            logits = model(input_ids=ids[None], use_cache=False).logits[0, :-1]
            nll.append(nll_of(logits, ids[1:]).cpu())
            top.append(logits.argmax(-1).cpu())
        found[start] = Score(torch.cat(nll), torch.cat(top), time.perf_counter() - began)
    return found


def kept_score(folder: Path, spans: dict[int, list[Tensor]], device: str, file: Path | None) -> dict[int, Score]:
    """``score`` through a file of its results; what is there for other spans is made again."""
    if file is not None and file.exists():
        found = {start: Score(*parts) for start, parts in torch.load(file, weights_only=True).items()}
        if all(start in found and found[start].nll.numel() == sum(len(w) - 1 for w in spans[start]) for start in spans):
            return found
    found = score(folder, spans, device)
    if file is not None:
        torch.save({start: tuple(parts) for start, parts in found.items()}, file)
    return found


def model_name(folder: Path) -> str:
    """As bench/accuracy.py calls it."""
    c = json.loads((folder / "config.json").read_text("utf-8"))
    shape = f"{c['num_hidden_layers']} layers, hidden {c['hidden_size']}, vocabulary {c['vocab_size']}"
    return f"{folder.name} ({c['model_type']}, {shape})"


def name_of(settings: dict[str, Any]) -> str:
    """What distinguishes a row: the tool, the grid, the choices that are not its defaults."""
    tool = settings["peer"]
    parts = [f"{tool} {settings[tool.lower()]}, g{settings['group']} {'' if settings['symmetric'] else 'a'}symmetric"]
    if settings.get("order", "gar") != "gar":
        parts.append({"static": "act-order, static groups", "free": "act-order", "none": "no order"}[settings["order"]])
    if settings.get("mse"):
        parts.append(f"mse {settings['mse']:g}")
    if "iters" in settings:
        parts.append(f"{settings['iters']} iterations")
    if settings.get("enable_neuqi"):
        parts.append("neuqi")
    return ", ".join(parts)


def line_of(settings: dict[str, Any], after: Score, before: Score) -> dict[str, Any]:
    difference = after.nll - before.nll
    ratio = math.exp(float(difference.mean()))
    tool = settings["peer"]
    return {
        "name": name_of(settings),
        "table": "peers",
        "scheme": f"w{settings['bits']}",
        "method": tool,
        "peer": f"{tool} {settings[tool.lower()]}",
        "settings": {key: value for key, value in settings.items() if key not in OWN},
        "options": {"group": settings["group"], "symmetric": settings["symmetric"]},
        "act": "a16",
        "bits_per_weight": round(settings["bits_per_weight"], 4),
        "quantize_s": settings["seconds"],
        "seconds": settings["seconds"],
        "quantize_cpu_s": settings.get("cpu_seconds"),
        "quantize_device": settings["device"],
        "calibration_tokens": settings["samples"] * settings["sample_tokens"],
        "tokens": after.nll.numel(),
        "ppl": math.exp(float(after.nll.mean())),
        "ppl_ref": math.exp(float(before.nll.mean())),
        "ratio": ratio,
        "se": ratio * float(difference.std()) / difference.numel() ** 0.5,
        "top1": float((after.top == before.top).double().mean()),
        "eval_s": round(after.seconds, 2),
    }


def main() -> None:
    p = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    p.add_argument("model", type=Path)
    p.add_argument("text", type=Path)
    p.add_argument("out", type=Path)
    p.add_argument("dirs", type=Path, nargs="*", metavar="DIR")
    p.add_argument("--device", default="cpu")
    p.add_argument("--span", type=int, action="append", metavar="START", help="first token (default: 60000 and 100000)")
    p.add_argument("--tokens", type=int, default=8192, metavar="N", help="of each span")
    p.add_argument("--context", type=int, default=1024, metavar="N")
    p.add_argument("--calibration", default="c4.txt", help="what the lines call the text of the samples")
    p.add_argument("--name", help="what the lines call the model (default: its directory and shape)")
    p.add_argument(
        "--reference", type=Path, metavar="FILE", help="the model's own scores: read, or written where absent"
    )
    p.add_argument("--commit", help="where the working tree is no checkout")
    p.add_argument("--threads", type=int, metavar="N")
    args = p.parse_args()
    if args.threads:
        torch.set_num_threads(args.threads)

    import transformers

    tokenizer = transformers.AutoTokenizer.from_pretrained(args.model, local_files_only=True)
    starts = args.span or [60000, 100000]
    ids = token_ids(args.text.read_text("utf-8"), tokenizer, max(starts) + args.tokens)
    length = args.tokens // args.context * args.context
    spans = {start: list(ids[start : start + length].split(args.context)) for start in starts}
    if ids.numel() < max(starts) + length or not length:
        sys.exit(f"{args.text}: found {ids.numel()} tokens, accepted are at least {max(starts) + args.tokens}")
    before = kept_score(args.model, spans, args.device, args.reference)
    on = machine()
    args.out.parent.mkdir(parents=True, exist_ok=True)
    for folder in args.dirs:
        settings = json.loads((folder / "settings.json").read_text("utf-8"))
        after = score(folder, spans, args.device)
        for start in starts:
            line = {
                "bench": "accuracy",
                "kind": "accuracy",
                "model": args.name or model_name(args.model),
                "text": args.text.name,
                "context": args.context,
                "calibration": [args.calibration, settings["samples"] * settings["sample_tokens"]]
                + [settings["sample_tokens"]],
                "runs": "the peer's dequantized weights in float32",
                "span": [start, start + length],
                **line_of(settings, after[start], before[start]),
                "device": torch.cuda.get_device_name() if args.device.startswith("cuda") else on["chip"],
                "torch": settings["torch"],
                "transformers": settings["transformers"],
                "lowbit": lowbit.__version__,
                "python": on["python"],
                "commit": args.commit or on["commit"],
                "date": on["date"],
            }
            with args.out.open("a", encoding="utf-8") as file:
                file.write(json.dumps(line) + "\n")
            shown = f"{line['ppl']:.3f} / {line['ppl_ref']:.3f} = {line['ratio']:.4f} ± {line['se']:.4f}"
            print(f"{line['name']:64} {start:7} {shown}  {line['bits_per_weight']:.3f} bits", flush=True)


if __name__ == "__main__":
    main()
