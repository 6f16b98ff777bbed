"""Try the aarch64 wheel on another machine: a real aarch64 Python and torch under qemu's user emulation, no root file system.

    python wheels/arm.py WHEEL [--cpu cortex-a76=dotprod max=i8mm]

Debian's packages of Python 3.11 and what it needs are unpacked, not installed, into build/wheels/arm; torch 2.10 (the last
whose aarch64 wheel is a CPU build) and its requirements beside them. Made once.
"""

from __future__ import annotations

import argparse
import shutil
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
ARM = ROOT / "build" / "wheels" / "arm"
SYSTEM, SITE = ARM / "system", ARM / "site"
DEBIAN = (
    "python3.11-minimal libpython3.11-minimal libpython3.11-stdlib libc6 libgcc-s1 libstdc++6 zlib1g libexpat1 libffi8 "
    "libssl3 libbz2-1.0 liblzma5 libuuid1 libcrypt1 libsqlite3-0 libncursesw6 libtinfo6 libreadline8"
).split()
BINARY = ("torch==2.10.0", "numpy==2.4.6", "safetensors==0.8.0")
PURE = ("tqdm", "filelock", "typing-extensions", "sympy", "mpmath", "networkx", "jinja2", "fsspec")
CPUS = {"cortex-a76": "dotprod", "max": "i8mm"}


def run(*command: str | Path, cwd: Path = ROOT) -> str:
    done = subprocess.run(command, cwd=cwd, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
    if done.returncode:
        raise SystemExit(f"{done.stdout}\nfailed with {done.returncode}: {' '.join(map(str, command))}")
    return done.stdout


def unpack_python() -> None:
    """Debian's arm64 packages, with lists and a cache of our own: this machine's apt knows no arm64 afterwards either."""
    state = ARM / "apt"
    for name in ("lists/partial", "cache/archives/partial", "debs"):
        (state / name).mkdir(parents=True, exist_ok=True)
    (state / "status").touch()
    options = [
        "-qq",
        "-o",
        "APT::Architecture=arm64",
        "-o",
        "APT::Architectures=arm64",
        "-o",
        "APT::Sandbox::User=root",
    ]
    for name, value in (("State::lists", "lists"), ("State::status", "status"), ("Cache", "cache")):
        options += ["-o", f"Dir::{name}={state / value}"]
    run("apt-get", *options, "update")
    run("apt-get", *options, "download", *DEBIAN, cwd=state / "debs")
    for deb in sorted((state / "debs").glob("*.deb")):
        run("dpkg", "-x", deb, SYSTEM)


def environment() -> None:
    """The unpacked system and torch, made once."""
    if (ARM / "ready").exists():
        return
    print("== aarch64 Python and torch (the first time this downloads)", flush=True)
    shutil.rmtree(ARM, ignore_errors=True)
    SITE.mkdir(parents=True)
    unpack_python()
    pip = [sys.executable, "-m", "pip", "install", "-qq", "--no-deps", "--target", str(SITE)]
    target = ["--platform", "manylinux_2_28_aarch64", "--platform", "manylinux_2_17_aarch64", "--platform",
              "manylinux2014_aarch64", "--python-version", "3.11", "--only-binary", ":all:"]  # fmt: skip
    run(*pip, *target, *BINARY)
    run(*pip, *target, *PURE, "markupsafe")
    (ARM / "ready").touch()


def emulated(cpu: str, *arguments: str | Path) -> str:
    """Python goes by the name of a script that starts it under qemu, so that it can start itself again."""
    inside = {"PYTHONPATH": SITE, "PYTHONHOME": SYSTEM / "usr", "OMP_NUM_THREADS": "1", "PYTHONDONTWRITEBYTECODE": "1"}
    words = " ".join(f"-E {name}={value}" for name, value in inside.items())
    python = ARM / "python"
    command = (
        f'exec qemu-aarch64-static -cpu {cpu} -L "{SYSTEM}" {words} -0 "{python}" "{SYSTEM}/usr/bin/python3.11" "$@"'
    )
    python.write_text(f"#!/bin/sh\n{command}\n")
    python.chmod(0o755)
    return run(python, *arguments, cwd=ARM)


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("wheel", type=Path)
    parser.add_argument("--cpu", nargs="+", default=[f"{cpu}={tier}" for cpu, tier in CPUS.items()], metavar="CPU=TIER")
    args = parser.parse_args(argv)
    environment()
    for old in SITE.glob("lowbit*"):
        shutil.rmtree(old)
    run(sys.executable, "-m", "zipfile", "-e", args.wheel.resolve(), SITE)
    for pair in args.cpu:
        cpu, _, tier = pair.partition("=")
        said = emulated(cpu, ROOT / "wheels" / "smoke.py", tier)
        print(
            "\n".join(f"{line} (qemu -cpu {cpu})" for line in said.splitlines() if line.startswith("smoke:")),
            flush=True,
        )
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
