"""`make nightly`: what `make wheels hub` does in minutes, again with the oldest and the newest torch, which are builds for CUDA.

    python wheels/nightly.py [--torches 2.10.0 2.14.1]

The wheel and the sdist are tried with each; then hub/test_hub.py runs under the newest, in an environment of its own
(build/wheels/hub-<torch>) over the one that the wheel was tried in. Nothing is skipped: what cannot be had is a failure.
"""

from __future__ import annotations

import argparse
import os
import shutil
import subprocess
import sys
from collections.abc import Sequence
from functools import partial
from pathlib import Path

import build
from shell import ROOT, Parts, fetch, run, say


def hub_environment(torch: str) -> Path:
    """The Python of an environment with `kernels` and pytest, over the one that has that torch and the wheel."""
    folder = build.OUT / f"hub-{torch}"
    below = build.environment(torch).parents[1]
    python = folder / "bin" / "python"
    if not (folder / "ready").exists():
        say(f"environment with kernels and torch {torch}")
        shutil.rmtree(folder, ignore_errors=True)
        run(sys.executable, "-m", "venv", folder)
        (site,) = folder.glob("lib/python3*/site-packages")
        (under,) = below.glob("lib/python3*/site-packages")
        (site / "below.pth").write_text(f"{under}\n")
        rows = [word for name in ("all", "hub") for word in ("-r", ROOT / "requirements" / f"{name}.txt")]
        fetch("the kernels loader", python, "-m", "pip", "install", "-qq", "--no-deps", *rows)
        (folder / "ready").touch()
    return python


def hub(torch: str) -> None:
    """The artifact through `kernels`, under a torch built for CUDA."""
    python = hub_environment(torch)
    (wheel,) = build.OUT.glob("lowbit-*x86_64.whl")  # the sdist's was tried last
    run(build.environment(torch), "-m", "pip", "install", "-qq", "--force-reinstall", "--no-deps", "--no-index", wheel)
    say(f"hub/test_hub.py with torch {torch}")
    command = [python, "-m", "pytest", "-q", "-p", "no:logging", ROOT / "hub" / "test_hub.py"]
    code = subprocess.run(command, cwd=ROOT, env={**os.environ, "OMP_NUM_THREADS": "1"}).returncode
    if code:
        raise SystemExit(code)


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--torches", nargs="+", default=[build.OLDEST, build.NEWEST])
    args = parser.parse_args(argv)
    if build.main(["x86_64", "sdist", "--strict", "--torches", *args.torches]):
        return 1
    parts = Parts(strict=True)
    parts.part(f"hub with torch {args.torches[-1]}", partial(hub, args.torches[-1]))
    return parts.end()


if __name__ == "__main__":
    raise SystemExit(main())
