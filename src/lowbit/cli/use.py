"""Commands that run a model: ``run`` (text), ``eval`` (perplexity), ``bench``."""

from __future__ import annotations

import argparse
import sys
from typing import TYPE_CHECKING, Any

from lowbit.cli import speech
from lowbit.cli.show import as_json, bar, megabytes, read_text, table
from lowbit.types import FormatError

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase


def add(commands: Any, common: argparse.ArgumentParser) -> None:
    """Register the three commands."""
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
    _loading(run)
    run.set_defaults(run=generate)

    score = commands.add_parser("eval", parents=[common], help="perplexity on a text, of quantized or plain models")
    score.add_argument("model", nargs="+")
    score.add_argument("--text", metavar="FILE")
    speech.add_options(score)
    score.add_argument("--tokens", type=int, default=16384, metavar="N")
    score.add_argument("--context", type=int, default=1024, metavar="N")
    score.add_argument("--skip", type=int, default=0, metavar="N", help="tokens to leave out at the beginning")
    score.add_argument(
        "--exact",
        action="store_true",
        help="simulate the 4-bit activations that a layer declares (default: run in 8 bits)",
    )
    _loading(score)
    score.set_defaults(run=evaluate)

    # Parsed by the bench itself; here for the list of commands only.
    commands.add_parser("bench", help="time the kernels: lowbit bench layers --help")


def _loading(command: argparse.ArgumentParser) -> None:
    command.add_argument(
        "--activation", choices=("group", "token", "none"), help="override what the checkpoint declares"
    )
    command.add_argument(
        "--dtype", choices=("float32", "bfloat16", "float16"), default="float32", help="of what is dense"
    )


def tokenizer_of(directory: str) -> PreTrainedTokenizerBase:
    """The tokenizer of a model directory. FormatError naming the directory where it has none."""
    from transformers import AutoTokenizer

    from lowbit.models.load import first_line, local_directory

    path = local_directory(directory)
    try:
        return AutoTokenizer.from_pretrained(path, local_files_only=True)
    except (OSError, ValueError, KeyError) as error:
        raise FormatError(f"{path}: found no tokenizer that loads ({first_line(error)})") from error


def generate(args: argparse.Namespace) -> int:
    import torch

    from lowbit.engines.decode import TextStream, decode, encode, load_model

    tokenizer = tokenizer_of(args.model)
    model = load_model(args.model, args.activation, getattr(torch, args.dtype), args.engine)
    stream = TextStream(tokenizer, (lambda text: None) if args.json else _write)
    if not args.json and not args.chat:
        _write(args.prompt)
    result = decode(
        model, encode(tokenizer, args.prompt, args.chat), args.max_new_tokens, temperature=args.temperature,
        top_k=args.top_k, top_p=args.top_p, seed=args.seed, on_token=stream, engine=args.engine, head=args.head,
    )  # fmt: skip
    stream.close()
    if args.json:
        rates = {"prefill_tokens_per_s": result.prefill_rate, "decode_tokens_per_s": result.decode_rate}
        as_json({"text": stream.text(), **result._asdict(), **rates})
        return 0
    print(flush=True)
    why = f" ({result.reason})" if result.reason else ""
    print(f"engine {result.engine}{why}", file=sys.stderr)
    prefill = f"prefill {result.prompt_tokens} tokens, {result.prefill_rate:.1f} tokens/s"
    print(f"{prefill}; decode {len(result.tokens)} tokens, {result.decode_rate:.1f} tokens/s", file=sys.stderr)
    return 0


def _write(text: str) -> None:
    print(text, end="", flush=True)


def evaluate(args: argparse.Namespace) -> int:
    if args.speech:
        return speech.evaluate(args)
    if not args.text:
        raise FormatError("eval: found neither --text nor --speech, accepted is one of them")
    import torch

    from lowbit.models.load import exactly, load
    from lowbit.models.save import model_bytes
    from lowbit.prove.compare import perplexity

    text = read_text(args.text)
    results: list[dict[str, Any]] = []
    for directory in args.model:
        tokenizer = tokenizer_of(directory)
        model = load(directory, activation=args.activation, dtype=getattr(torch, args.dtype))
        simulated = exactly(model) if args.exact else 0
        found = perplexity(
            model, text, tokenizer, context=args.context, tokens=args.tokens, skip=args.skip, progress=bar(directory)
        )
        size = model_bytes(model)
        results.append({"model": directory, **found._asdict(), "bytes": size, "simulated_4_bit_linears": simulated})
        del model
    if args.json:
        as_json(results[0] if len(results) == 1 else {"models": results})
        return 0
    columns = ["model", "perplexity", "tokens scored", "MB in memory", "tokens/s"]
    rows = [
        [r["model"], f"{r['perplexity']:.4f}", r["scored"], megabytes(r["bytes"]), f"{r['scored'] / r['seconds']:.1f}"]
        for r in results
    ]
    table("", columns, rows)
    return 0


BENCHES = ("layers", "peers", "models", "numbers")


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
