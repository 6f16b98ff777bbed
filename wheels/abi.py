"""What a library of ours may ask of the system that loads it: manylinux_2_28, no Python, torch's stable ABI of 2.10 alone.

    python wheels/abi.py build/*/_C.so        # before anything strips it: what reads .symtab passes a stripped file

The dynamic symbol table is read, by readelf, which reads every machine's files. Which of torch's C functions are newer than
the target is read from torch's own headers.
"""

from __future__ import annotations

import re
import subprocess
import sys
from collections.abc import Sequence
from importlib.util import find_spec
from pathlib import Path

LIMITS = {"GLIBC": (2, 28), "GLIBCXX": (3, 4, 24), "CXXABI": (1, 3, 11), "GCC": (7, 0, 0)}  # manylinux_2_28
TARGET = (2, 10)  # TORCH_TARGET_VERSION of CMakeLists.txt
# torch and what torch brings; libgomp comes with torch and is never asked for by name
NEEDED = {
    "libtorch.so", "libtorch_cpu.so", "libcudart.so.13", "libstdc++.so.6", "libm.so.6", "libgcc_s.so.1", "libc.so.6",
    "ld-linux-aarch64.so.1", "ld-linux-x86-64.so.2", "libpthread.so.0",
}  # fmt: skip


def readelf(*arguments: str) -> str:
    return subprocess.run(["readelf", "-W", *arguments], capture_output=True, text=True, check=True).stdout


def undefined(library: Path) -> list[str]:
    """Names with their versions, as name@VERSION, of what the library takes from others."""
    lines = [line.split() for line in readelf("--dyn-syms", str(library)).splitlines()]
    return [cells[7] for cells in lines if len(cells) >= 8 and cells[6] == "UND"]


def needed(library: Path) -> set[str]:
    return set(re.findall(r"\(NEEDED\).*\[(.*)\]", readelf("-d", str(library))))


def shims(headers: Path) -> dict[str, tuple[int, int]]:
    """torch's C functions and the version that brought each, from the guards of its headers; (0, 0): always there."""
    found: dict[str, tuple[int, int]] = {}
    for file in [*headers.glob("torch/csrc/stable/c/*.h"), *headers.glob("torch/csrc/inductor/aoti_torch/**/*.h")]:
        guards: list[tuple[int, int]] = []
        for line in file.read_text("utf-8", "replace").splitlines():
            if re.match(r"\s*#\s*if", line):
                said = re.search(r"TORCH_FEATURE_VERSION\s*>=\s*TORCH_VERSION_(\d+)_(\d+)", line)
                guards.append((int(said[1]), int(said[2])) if said else (0, 0))
            elif re.match(r"\s*#\s*endif", line) and guards:
                guards.pop()
            for name in re.findall(r"\b((?:aoti_)?torch_\w+)\s*\(", line):
                version = max(guards, default=(0, 0))
                found[name] = min(found.get(name, version), version)
    return found


def check(library: Path, known: dict[str, tuple[int, int]]) -> list[str]:
    """What is wrong with it, a line each."""
    wrong = []
    names = undefined(library)
    for symbol in names:
        name, _, version = symbol.partition("@")
        of = re.match(r"([A-Z]+)_([\d.]+)$", version.lstrip("@").split(" ")[0])
        if of and of[1] in LIMITS and tuple(map(int, of[2].split("."))) > LIMITS[of[1]]:
            wrong.append(f"{name} needs {of[0]}, accepted is {of[1]}_{'.'.join(map(str, LIMITS[of[1]]))} or older")
        if re.match(r"_?Py[A-Z_]", name):
            wrong.append(f"{name}: a symbol of Python")
        if re.match(r"_ZT?[A-Z]*N?K?(2at|3c10|5torch|5caffe)", name):
            wrong.append(f"{name}: an unstable symbol of torch")
        if re.match(r"(aoti_)?torch_", name) and known.get(name, (99, 0)) > TARGET:
            brought = "in no header" if name not in known else ".".join(map(str, known[name]))
            wrong.append(f"{name}: a function of torch {brought}, accepted is 2.10 or older")
    if not names or not any(name.startswith("aoti_torch_") for name in names):
        wrong.append("no symbol of torch found: is this one of ours?")
    wrong += [f"needs {name}, which no wheel may" for name in sorted(needed(library) - NEEDED)]
    if "RPATH" in readelf("-d", str(library)) or "RUNPATH" in readelf("-d", str(library)):
        wrong.append("has a run path")
    return wrong


def torch_headers() -> Path:
    spec = find_spec("torch")
    if spec is None or not spec.submodule_search_locations:
        raise SystemExit("torch was not found: the check reads its headers")
    return Path(spec.submodule_search_locations[0]) / "include"


def main(arguments: Sequence[str]) -> int:
    known = shims(torch_headers())
    status = 0
    for name in arguments:
        wrong = check(Path(name), known)
        status |= bool(wrong)
        print(f"{name}: " + ("\n  ".join(["", *wrong]) if wrong else "manylinux_2_28, stable torch 2.10, no Python"))
    return status


if __name__ == "__main__":
    raise SystemExit(main(sys.argv[1:]))
