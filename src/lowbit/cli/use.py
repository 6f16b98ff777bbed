"""Commands that run a model: ``run`` (text) and ``bench``."""

from __future__ import annotations

import argparse
import atexit
import os
import sys
from typing import Any

from lowbit.cli.show import as_json, loading
from lowbit.types import FormatError


def add(commands: Any, common: argparse.ArgumentParser) -> None:
    """Register the two commands."""
    run = commands.add_parser("run", parents=[common], help="generate text")
    run.add_argument("model")
    run.add_argument("--prompt", required=True)
    run.add_argument("--max-new-tokens", type=int, default=128, metavar="N")
    run.add_argument("--chat", action="store_true", help="wrap the prompt in the model's chat template")
    run.add_argument("--temperature", type=float, default=0.0, help="0 is greedy (default)")
    run.add_argument("--top-k", type=int, default=0, help="0 is all (default)")
    run.add_argument("--top-p", type=float, default=1.0)
    run.add_argument("--seed", type=int, default=0)
    run.add_argument(
        "--engine", choices=("auto", "native", "transformers"), default="auto",
        help="native: one compiled call a token; auto (default) is native where the model fits",
    )  # fmt: skip
    run.add_argument(
        "--head", choices=("w8a8", "float"), default="w8a8",
        help="what the native engine makes of a float output head (default: a copy in 8 bits)",
    )  # fmt: skip
    loading(run)
    run.set_defaults(run=generate)

    # Parsed by the bench itself; here for the list of commands only.
    commands.add_parser("bench", help="time the kernels: lowbit bench layers --help")


def generate(args: argparse.Namespace) -> int:
    import torch

    from lowbit.engines.decode import TextStream, decode, encode, load_model
    from lowbit.models.plain_tokenizer import plain_tokenizer
    from lowbit.models.tokenizer import tokenizer_of

    # templates are transformers' business
    tokenizer = (None if args.chat else plain_tokenizer(args.model)) or tokenizer_of(args.model)
    processes = int(os.environ.get("WORLD_SIZE", "1")) if "RANK" in os.environ else 1  # torchrun says so
    if processes > 1:
        if args.engine == "native":
            raise FormatError(f"engine: found native, accepted in {processes} processes is transformers")
        args.engine = "transformers"
    model = load_model(args.model, args.activation, getattr(torch, args.dtype), args.engine)
    first = processes == 1 or _cut_over(model, processes) == 0
    stream = TextStream(tokenizer, _write if first and not args.json else lambda text: None)
    if first and not args.json and not args.chat:
        _write(args.prompt)
    result = decode(
        model, encode(tokenizer, args.prompt, args.chat), args.max_new_tokens, temperature=args.temperature,
        top_k=args.top_k, top_p=args.top_p, seed=args.seed, on_token=stream, engine=args.engine, head=args.head,
    )  # fmt: skip
    stream.close()
    if not first:
        return 0
    if args.json:
        rates = {"prefill_tokens_per_s": result.prefill_rate, "decode_tokens_per_s": result.decode_rate}
        as_json({"text": stream.text(), **result._asdict(), **rates})
        return 0
    print(flush=True)
    why = f" ({result.reason})" if result.reason else ""
    why += f" in {processes} processes" if processes > 1 else ""
    print(f"engine {result.engine}{why}", file=sys.stderr)
    prefill = f"prefill {result.prompt_tokens} tokens, {result.prefill_rate:.1f} tokens/s"
    print(f"{prefill}; decode {len(result.tokens)} tokens, {result.decode_rate:.1f} tokens/s", file=sys.stderr)
    return 0


def _cut_over(model: Any, processes: int) -> int:
    """Cut the model over the processes of torchrun; returns the rank of this one."""
    import torch.distributed as dist
    from torch.distributed.device_mesh import init_device_mesh

    from lowbit.models.parallel import parallelize

    if not dist.is_initialized():
        dist.init_process_group("gloo")
        atexit.register(dist.destroy_process_group)
    parallelize(model, init_device_mesh("cpu", (processes,)))
    return dist.get_rank()


def _write(text: str) -> None:
    print(text, end="", flush=True)


BENCHES = ("layers", "peers", "models", "rtf", "numbers")


def bench(args: argparse.Namespace) -> int:
    """Hand the rest of the line to ``lowbit.bench.<name>.main``."""
    import importlib

    if not args.rest or args.rest[0] not in BENCHES:
        found = repr(args.rest[0]) if args.rest else "nothing"
        if found in ("'-h'", "'--help'"):
            print(f"usage: lowbit bench {' | '.join(BENCHES)} ...   (lowbit bench layers --help lists its options)")
            return 0
        raise FormatError(f"bench: found {found}, accepted are {', '.join(BENCHES)}")
    module = importlib.import_module(f"lowbit.bench.{args.rest[0]}")
    return int(module.main(args.rest[1:]) or 0)
