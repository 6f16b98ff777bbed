"""The command line: ``lowbit quantize | convert | inspect | run | eval | explain | profile | roofline |
bench | speak | doctor``."""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Sequence
from typing import NoReturn

from lowbit import doctor
from lowbit.cli import evaluate, look, make, profile, roofline, speak, use
from lowbit.types import one_line


class _Parser(argparse.ArgumentParser):
    """Says what is wrong in one line; `--help` has the rest."""

    def error(self, message: str) -> NoReturn:
        self.exit(2, f"{self.prog}: {message} ({self.prog} --help lists what is accepted)\n")


def parser() -> argparse.ArgumentParser:
    """All commands. Every one takes ``--json`` and ``--debug``."""
    common = argparse.ArgumentParser(add_help=False)
    common.add_argument("--json", action="store_true", help="print one JSON document instead of a table")
    common.add_argument("--debug", action="store_true", help="show a traceback on errors")
    common.add_argument("--threads", type=_positive, metavar="N", help="threads torch may use (default: all)")
    top = _Parser(prog="lowbit", description="4- and 8-bit linear layers under PyTorch: quantize, pack, run, prove.")
    commands = top.add_subparsers(dest="command", required=True, metavar="COMMAND", parser_class=_Parser)
    for module in (make, look, use, evaluate, profile, roofline, speak, doctor):
        module.add(commands, common)
    return top


def _positive(text: str) -> int:
    value = int(text)
    if value < 1:
        raise argparse.ArgumentTypeError(f"found {value}, accepted is 1 or more")
    return value


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command. Returns 0, 2 for an error (one line on stderr), 130 for Ctrl-C."""
    arguments = list(sys.argv[1:] if argv is None else argv)
    if arguments[:1] == ["bench"]:  # its options are the benches' own
        args = argparse.Namespace(command="bench", debug="--debug" in arguments, threads=None, run=use.bench)
        args.rest = [word for word in arguments[1:] if word != "--debug"]
    else:
        args = parser().parse_args(arguments)
    if args.threads:
        import torch

        torch.set_num_threads(args.threads)
    try:
        return int(args.run(args) or 0)
    except KeyboardInterrupt:
        print(f"\nlowbit: stopped; {getattr(args, 'after_stop', 'nothing was written')}", file=sys.stderr)
        return 130
    except BrokenPipeError:  # the reader of a pipe went away: nothing left to say, nor to flush at exit
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 0
    except Exception as error:
        if args.debug:
            raise
        print(f"lowbit: {one_line(error)}", file=sys.stderr)
        return 2
