"""Quantize by auto-round's own code, on given samples, and write what its weights dequantize to.

    python quantize_auto_round.py MODEL SAMPLES OUT [--recipe best] [--no-sym] [--device cuda]

Tunes in float32 (``amp=False``): the tool's default would round the whole model to bfloat16 first. Recipes are the
tool's: default 200 iterations, best 1000, light 50; the samples are ours, as many and as long as SAMPLES has.
"""

from __future__ import annotations

import argparse
import importlib.util
import sys
import types

import torch
from common import Clock, device_name, parser, read_samples, stored_bits, versions, write_result

RECIPES = {
    "default": {"iters": 200},
    "best": {"iters": 1000},
    "light": {"iters": 50, "lr": 5e-3},
}


def stand_in() -> None:
    """auto-round imports `datasets` for the text it would fetch. Samples are given here: names that fail when called."""
    if importlib.util.find_spec("datasets") is not None:
        return
    module = types.ModuleType("datasets")
    module.__version__ = "0"  # type: ignore[attr-defined]
    module.__spec__ = importlib.util.spec_from_loader("datasets", None)

    def absent(*_: object, **__: object) -> None:
        raise RuntimeError("datasets is not installed: only samples that are given can be used")

    for name in ("Features", "Sequence", "Value", "concatenate_datasets", "load_dataset", "load_from_disk"):
        setattr(module, name, absent)
    for name in ("Dataset", "IterableDataset"):
        setattr(module, name, type(name, (), {}))
    sys.modules["datasets"] = module


def main() -> None:
    p = parser(__doc__)
    p.add_argument("--recipe", choices=RECIPES, default="default")
    p.add_argument("--iters", type=int, metavar="N", help="instead of the recipe's")
    p.add_argument("--batch", type=int, default=8, metavar="SAMPLES")
    p.add_argument("--neuqi", action="store_true", help="its optional search of a first scale (and zero point)")
    p.add_argument(
        "--compile",
        action=argparse.BooleanOptionalAction,
        default=None,
        help="torch.compile (default: as auto-round decides)",
    )
    args = p.parse_args()
    if args.threads:
        torch.set_num_threads(args.threads)
    samples = read_samples(args.samples, args.nsamples)
    recipe = RECIPES[args.recipe] | ({"iters": args.iters} if args.iters is not None else {})
    if args.neuqi:
        recipe["enable_neuqi"] = True

    import transformers

    stand_in()
    from auto_round import AutoRound

    tokenizer = transformers.AutoTokenizer.from_pretrained(args.model, local_files_only=True)
    model = transformers.AutoModelForCausalLM.from_pretrained(args.model, dtype=torch.float32, local_files_only=True)
    batches = [{"input_ids": part, "attention_mask": torch.ones_like(part)} for part in samples.split(args.batch)]
    clock = Clock()
    tool = AutoRound(
        model,
        tokenizer,
        scheme="W4A16",
        bits=args.bits,
        group_size=args.group,
        sym=args.sym,
        dataset=batches,
        seqlen=samples.shape[1],
        nsamples=len(samples),
        batch_size=args.batch,
        device_map=args.device,
        enable_torch_compile=args.compile,
        amp=False,
        **recipe,
    )
    model, layers = tool.quantize()
    seconds = clock.seconds()
    weights = {
        name: module.weight
        for name, module in model.named_modules()
        if isinstance(module, torch.nn.Linear) and int(layers.get(name, {}).get("bits", 16)) == args.bits
    }
    settings = {
        "peer": "auto-round",
        **versions("auto-round", "torch", "transformers"),
        "bits": args.bits,
        "group": args.group,
        "symmetric": args.sym,
        "recipe": args.recipe,
        **recipe,
        "samples": len(samples),
        "sample_tokens": samples.shape[1],
        "batch": args.batch,
        "amp": False,
        "compile": tool.enable_torch_compile,
        "bits_per_weight": stored_bits(weights, args.bits, args.group, args.sym, False),
        **seconds,
        "beside": args.beside,
        "device": device_name(args.device),
    }
    write_result(args.model, args.out, weights, settings, bits=args.bits, group=args.group)


if __name__ == "__main__":
    main()
