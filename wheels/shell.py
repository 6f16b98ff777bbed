"""What the scripts that build and try the released files share: commands, downloads, and parts that are skipped aloud.

A part that lacks something from outside (a download, a system package) raises Unavailable. It is then SKIPPED, which is said
again in the last lines; with --strict it fails. Everything else that goes wrong ends the run.
"""

from __future__ import annotations

import os
import subprocess
import time
from collections.abc import Callable, Mapping
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
FETCH_SECONDS = 600  # for one environment; the largest, torch for CUDA, took 290


class Unavailable(Exception):
    """What a check needs cannot be had here: what, and why, in one line."""


def say(text: str) -> None:
    print(f"== {text}", flush=True)


def run(*command: str | Path, env: Mapping[str, str] | None = None, cwd: Path = ROOT) -> str:
    """What a command that must succeed said; shown whole where it fails."""
    done = subprocess.run(
        command, cwd=cwd, env={**os.environ, **(env or {})}, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
    )
    if done.returncode:
        lines = [line for line in done.stdout.splitlines() if "is ignored: it is neither" not in line]
        raise SystemExit("\n".join([*lines, f"failed with {done.returncode}: {' '.join(map(str, command))}"]))
    return done.stdout


def fetch(what: str, *command: str | Path, cwd: Path = ROOT, seconds: float = FETCH_SECONDS) -> None:
    """A command that downloads. Unavailable where it fails or hangs, with the last thing it said."""
    try:
        done = subprocess.run(
            command, cwd=cwd, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, timeout=seconds
        )
    except subprocess.TimeoutExpired:
        raise Unavailable(f"{what}: no end of the download in {seconds:.0f} seconds") from None
    except FileNotFoundError:
        raise Unavailable(f"{what}: {command[0]} not found") from None
    if done.returncode:
        errors = [line for line in done.stdout.splitlines() if line.strip() and "is ignored: it is neither" not in line]
        said = [line for line in errors if line.startswith(("ERROR", "E: "))] or errors or ["nothing was said"]
        raise Unavailable(f"{what} could not be downloaded: {said[-1].strip()}")


class Parts:
    """The parts of a run, each with its time; those that were skipped, for the end."""

    def __init__(self, strict: bool = False) -> None:
        self.strict = strict
        self.lines: list[str] = []
        self.skipped = 0

    def part(self, name: str, work: Callable[[], object]) -> None:
        began = time.monotonic()
        try:
            work()
            self.lines.append(f"{name}: {time.monotonic() - began:.0f} s")
        except Unavailable as why:
            self.skipped += 1
            self.lines.append(f"SKIPPED {name}: {why}")
            say(self.lines[-1])

    def end(self) -> int:
        """Print what was done and what was not; the exit status."""
        for line in self.lines:
            print(line if line.startswith("SKIPPED") else f"== {line}", flush=True)
        return int(self.strict and self.skipped > 0)
