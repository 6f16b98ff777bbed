"""``lowbit doctor``: what this installation is, which kernels it gets, whether they are right, and what to do about it.

One page, to be put into a bug report. It runs where the rest of the package cannot be imported: only the standard library
is imported here, everything else where it is looked at.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import re
import subprocess
import sys
from collections.abc import Callable, Iterator, Sequence
from importlib import metadata
from pathlib import Path
from typing import Any, NamedTuple

OK, NOTE, RED = "ok", "note", "RED"
SELF_TEST_SECONDS = 900  # it takes 3; under emulation, on a busy machine, minutes
EXTRAS = {  # package -> what to install for it
    "transformers": "lowbit[models]",
    "omnivoice": "lowbit[speech]",
    "matplotlib": "lowbit[report]",
    "ray": "lowbit[cluster]",
    "kernels": "kernels>=0.15.1",
}
OLDEST = {"transformers": "5.0", "kernels": "0.15.1"}  # kernels: the first with variants for torch's stable ABI
# Flags of /proc/cpuinfo that a tier needs, or torch's own kernels use.
FLAGS = (
    "avx2 fma f16c avx_vnni avx512f avx512bw avx512vl avx512_vnni avx512_bf16 amx_tile amx_int8 "
    "asimd asimddp asimdhp i8mm bf16 sve"
).split()


class Row(NamedTuple):
    """A line of the page; ``todo`` says what to do about a red one, or how to get what is absent."""

    part: str  # heading on the page
    name: str  # of what was looked at
    state: str  # OK, NOTE or RED
    found: str  # in words
    todo: str = ""


def versions() -> Iterator[Row]:
    """Python, the system, the packages that lowbit needs."""
    from lowbit import __version__, native

    built = "compiled kernels" if native.COMPILED else "no compiled kernels: the slow reference in plain torch runs"
    todo = "" if native.COMPILED else "install a wheel for this platform, or build from source with a C++20 compiler"
    yield Row("versions", "lowbit", OK if native.COMPILED else RED, f"{__version__}, {built}", todo)
    yield Row("versions", "python", OK, f"{platform.python_version()} at {sys.executable}")
    name, version = platform.libc_ver()
    wrong = native.libc()
    system = f"{platform.system()} {platform.release()} {platform.machine()}, {name} {version}".rstrip(", ")
    yield Row("versions", "system", RED if wrong else OK, system, wrong)
    for package in ("torch", "safetensors", "numpy", "tqdm"):
        found = installed(package)
        wanted = package + (">=2.10" if package == "torch" else "")
        state = OK if found and (package != "torch" or _numbers(found) >= native.OLDEST_TORCH) else RED
        yield Row("versions", package, state, found or "absent", "" if state == OK else f"pip install '{wanted}'")


def installed(package: str) -> str:
    """Its version, or ""."""
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return ""


def _numbers(version: str) -> tuple[int, ...]:
    """The leading numbers: (0, 15, 0) of 0.15.0rc1."""
    return tuple(int(number) for number in re.findall(r"(?:^|\.)(\d+)", version.split("+")[0]))


def cpu() -> Iterator[Row]:
    """The chip, its features, the tiers it has and the one that runs."""
    chip, flags = cpuinfo()
    yield Row("cpu", "chip", OK, chip or platform.processor() or "unknown")
    yield Row("cpu", "features", OK, " ".join(flag for flag in FLAGS if flag in flags) or "none that a tier needs")
    from lowbit import dispatch, ops

    runs = ops.cpu_isa()
    for name, why in dispatch.tiers():
        yield Row("cpu", f"tier {name}", OK if why in ("runs", "slower") else NOTE, why)
    forced = os.environ.get("QM_CPU_ISA")
    if forced:
        yield Row("cpu", "QM_CPU_ISA", NOTE, forced, "unset it, or the best tier does not run")
    if runs == "scalar" and not forced:
        yield Row(
            "cpu",
            "speed",
            NOTE,
            "scalar code: this CPU has no AVX2",
            "right but slow; any x86 CPU since 2013-2015 has AVX2",
        )


def cpuinfo() -> tuple[str, set[str]]:
    """Name and flags of the CPU as Linux gives them; ("", none) elsewhere."""
    try:
        text = Path("/proc/cpuinfo").read_text()
    except OSError:
        return "", set()
    fields = dict(line.split(":", 1) for line in reversed(text.splitlines()) if ":" in line)
    pairs = {key.strip(): value.strip() for key, value in fields.items()}
    flags = pairs.get("flags") or pairs.get("Features") or ""
    name = (
        pairs.get("model name")
        or f"CPU part {pairs.get('CPU part', '?')} of implementer {pairs.get('CPU implementer', '?')}"
    )
    return name, set(flags.split())


def threads() -> Iterator[Row]:
    """What torch may use, beside what the process has."""
    import torch

    mine = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    count = torch.get_num_threads()
    limits = [f"{name}={os.environ[name]}" for name in ("OMP_NUM_THREADS", "MKL_NUM_THREADS") if name in os.environ]
    found = f"{count} of torch, {mine} cores for this process" + "".join(f", {limit}" for limit in limits)
    if count > mine:
        yield Row(
            "cpu",
            "threads",
            RED,
            found,
            f"more threads than cores is many times slower: OMP_NUM_THREADS={mine} or --threads {mine}",
        )
    else:
        yield Row("cpu", "threads", OK, found)


def gpu() -> Iterator[Row]:
    """The devices that torch sees and what they run, or why not."""
    import torch

    from lowbit import native, ops_cuda

    build = f"torch for CUDA {torch.version.cuda}" if torch.version.cuda else "torch without CUDA"
    library = "with" if native.CUDA_LIBRARY.exists() else "without"
    found = f"{build}, lowbit {library} CUDA kernels"
    if not torch.cuda.is_available():
        chips = any(Path("/dev").glob("nvidia[0-9]*"))
        todo = "a GPU is there: install a torch for CUDA 13 and a driver of 580 or newer" if chips else ""
        yield Row("gpu", "CUDA", RED if chips else NOTE, f"{found}; torch sees no device", todo)
        return
    yield Row("gpu", "CUDA", OK, found)
    for i in range(torch.cuda.device_count()):
        name, (major, minor) = torch.cuda.get_device_name(i), torch.cuda.get_device_capability(i)
        why = ops_cuda.refuses(i)
        chip = f"{name}, {major}.{minor}, {torch.cuda.get_device_properties(i).total_memory / 2**30:.0f} GiB"
        if why:
            todo = "pip install a torch built with CUDA 13, and a wheel of lowbit with CUDA kernels"
            yield Row("gpu", f"device {i}", RED, f"{chip}: the reference runs ({why})", todo)
            continue
        kind = "Hopper's" if (major, minor) == (9, 0) else "portable"
        four = "INT4 tensor cores" if ops_cuda.has_int4(i) else "no INT4 tensor cores: 4-bit activations run in 8"
        yield Row("gpu", f"device {i}", OK, f"{chip}: {kind} INT8 GEMMs, {four}")


def extras() -> Iterator[Row]:
    """What optional packages are there."""
    for package, install in EXTRAS.items():
        found, oldest = installed(package), OLDEST.get(package, "0")
        if found and _numbers(found) < _numbers(oldest):
            hint = f"pip install -U '{package}>={oldest}'"
            yield Row("extras", package, RED, f"{found}, accepted is {oldest} or newer", hint)
        else:
            yield Row(
                "extras", package, OK if found else NOTE, found or "absent", "" if found else f"pip install '{install}'"
            )


def self_test() -> Iterator[Row]:
    """Every tier against the reference, in a process of its own: an instruction that the chip lacks ends only that."""
    command = [sys.executable, "-m", "lowbit.selftest"]
    environment = {**os.environ, "QM_CPU_ISA": ""}
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=SELF_TEST_SECONDS, env=environment)
    except subprocess.TimeoutExpired:
        yield Row("self-test", "all", RED, f"no answer in {SELF_TEST_SECONDS} seconds", "report it with this page")
        return
    started = ""
    for line in done.stdout.splitlines():
        said: dict[str, Any] = json.loads(line)
        if "start" in said:
            started = said["start"]
            continue
        started = ""
        other = "this device" if said["tier"].startswith("cuda") else "this tier (QM_CPU_ISA=scalar)"
        todo = "" if said["right"] else f"wrong results: do not use {other} and report this page"
        yield Row("self-test", said["tier"], OK if said["right"] else RED, said["found"], todo)
    if done.returncode:
        last = " ".join((done.stderr.strip().splitlines() or [""])[-1].split())
        found = f"ended by signal {-done.returncode}" if done.returncode < 0 else last
        yield Row("self-test", started or "start", RED, found, "set QM_CPU_ISA to a lower tier and report this page")


PARTS: tuple[Callable[[], Iterator[Row]], ...] = (versions, cpu, threads, gpu, extras, self_test)


def examine(parts: Sequence[Callable[[], Iterator[Row]]] = PARTS) -> list[Row]:
    """All lines. Nothing is refused: a part that raises an Error of any kind is a red line itself."""
    rows: list[Row] = []
    for part in parts:
        try:
            rows += part()
        except Exception as error:
            said = " ".join(str(error).split())
            rows.append(
                Row(
                    part.__name__.replace("_", "-"),
                    "error",
                    RED,
                    f"{type(error).__name__}: {said}",
                    "the first red line says why",
                )
            )
    return rows


def page(rows: Sequence[Row]) -> str:
    """The page as text: a heading a part, then what to do about what is red. ValueError for no rows."""
    lines: list[str] = []
    part = ""
    width = max(len(row.name) for row in rows)
    for row in rows:
        if row.part != part:
            part = row.part
            lines.append(f"\n{part}" if lines else part)
        hint = f"  ({row.todo})" if row.todo and row.state == NOTE else ""
        lines.append(f"  {row.state:<4}  {row.name:<{width}}  {row.found}{hint}")
    red = [row for row in rows if row.state == RED]
    lines.append("\nnothing is red" if not red else "\nwhat to do")
    lines += [f"  {row.part}, {row.name}: {row.todo}" for row in red]
    return "\n".join(lines)


def add(commands: Any, common: argparse.ArgumentParser) -> None:
    """Register the command."""
    command = commands.add_parser(
        "doctor", parents=[common], help="what this installation is and runs; for bug reports"
    )
    command.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    """Print the page. 0, or 1 where a line is red."""
    rows = examine()
    red = any(row.state == RED for row in rows)
    print(json.dumps({"red": red, "rows": [row._asdict() for row in rows]}) if args.json else page(rows))
    return int(red)


def main(argv: Sequence[str] | None = None) -> int:
    """``python -m lowbit.doctor``: the same where the command line itself cannot be imported."""
    parser = argparse.ArgumentParser(prog="lowbit doctor")
    parser.add_argument("--json", action="store_true")
    return run(parser.parse_known_args(argv)[0])


if __name__ == "__main__":
    raise SystemExit(main())
