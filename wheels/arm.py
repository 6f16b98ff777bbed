"""Try the aarch64 wheel on another machine: a real aarch64 Python and torch under qemu's user emulation, no root file system.

    python wheels/arm.py WHEEL [--cpu cortex-a76=dotprod max=i8mm]

Debian's packages of Python 3.11 and what it needs are unpacked, not installed, into build/wheels/arm; torch 2.10 (the last
whose aarch64 wheel is a CPU build) and its requirements beside them. Made once.
"""

from __future__ import annotations

import argparse
import shutil
import sys
from collections.abc import Sequence
from pathlib import Path

from shell import ROOT, Unavailable, fetch, run, say

COMPILER, EMULATOR = "aarch64-linux-gnu-g++", "qemu-aarch64-static"
ARM = ROOT / "build" / "wheels" / "arm"
SYSTEM, SITE = ARM / "system", ARM / "site"
DEBIAN = (
    "python3.11-minimal libpython3.11-minimal libpython3.11-stdlib libc6 libgcc-s1 libstdc++6 zlib1g libexpat1 libffi8 "
    "libssl3 libbz2-1.0 liblzma5 libuuid1 libcrypt1 libsqlite3-0 libncursesw6 libtinfo6 libreadline8"
).split()
BINARY = ("torch==2.10.0", "numpy==2.4.6", "safetensors==0.8.0")
PURE = ("tqdm", "filelock", "typing-extensions", "sympy", "mpmath", "networkx", "jinja2", "fsspec")
CPUS = {"cortex-a76": "dotprod", "max": "i8mm"}


def unpack_python() -> None:
    """Debian's arm64 packages, with lists and a cache of our own: this machine's apt knows no arm64 afterwards either."""
    state = ARM / "apt"
    for name in ("lists/partial", "cache/archives/partial", "debs"):
        (state / name).mkdir(parents=True, exist_ok=True)
    (state / "status").touch()
    settings = {"APT::Architecture": "arm64", "APT::Architectures": "arm64", "APT::Sandbox::User": "root"}
    for name, value in (("State::lists", "lists"), ("State::status", "status"), ("Cache", "cache")):
        settings[f"Dir::{name}"] = str(state / value)
    options = ["-qq", *(word for pair in settings.items() for word in ("-o", "=".join(pair)))]
    fetch("Debian's lists for arm64", "apt-get", *options, "update")
    fetch("Debian's Python for arm64", "apt-get", *options, "download", *DEBIAN, cwd=state / "debs")
    for deb in sorted((state / "debs").glob("*.deb")):
        run("dpkg", "-x", deb, SYSTEM)


def environment() -> None:
    """The unpacked system and torch, made once."""
    if (ARM / "ready").exists():
        return
    say("aarch64 Python and torch (the first time this downloads)")
    shutil.rmtree(ARM, ignore_errors=True)
    SITE.mkdir(parents=True)
    unpack_python()
    pip = [sys.executable, "-m", "pip", "install", "-qq", "--no-deps", "--target", str(SITE)]
    target = ["--platform", "manylinux_2_28_aarch64", "--platform", "manylinux_2_17_aarch64", "--platform",
              "manylinux2014_aarch64", "--python-version", "3.11", "--only-binary", ":all:"]  # fmt: skip
    fetch("torch 2.10 for aarch64", *pip, *target, *BINARY)
    fetch("what torch for aarch64 requires", *pip, *target, *PURE, "markupsafe")
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


def tried(wheel: Path, cpus: Sequence[str] = tuple(f"{cpu}={tier}" for cpu, tier in CPUS.items())) -> None:
    """Unpack the wheel beside torch and run the smoke tests on each CPU, which must pick that tier."""
    if not shutil.which(EMULATOR):
        raise Unavailable(f"{EMULATOR} not found: on Debian and Ubuntu, install qemu-user-static")
    environment()
    for old in SITE.glob("lowbit*"):
        shutil.rmtree(old)
    run(sys.executable, "-m", "zipfile", "-e", wheel.resolve(), SITE)
    for pair in cpus:
        cpu, _, tier = pair.partition("=")
        for line in emulated(cpu, ROOT / "wheels" / "smoke.py", tier).splitlines():
            if line.startswith("smoke:"):
                print(f"{line} (qemu -cpu {cpu})", flush=True)


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("wheel", type=Path)
    parser.add_argument("--cpu", nargs="+", default=[f"{cpu}={tier}" for cpu, tier in CPUS.items()], metavar="CPU=TIER")
    args = parser.parse_args(argv)
    tried(args.wheel, args.cpu)
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
