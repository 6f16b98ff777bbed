"""What nvcc made of the kernels, read without a GPU: instructions, loops, registers. ``make cuda-report`` prints it.

Needs cuobjdump and nvdisasm (requirements/cuda.txt).
"""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
import sysconfig
from collections import Counter
from collections.abc import Iterator, Sequence
from functools import lru_cache
from pathlib import Path
from typing import NamedTuple

from lowbit import ops
from lowbit.bench.shell import padded
from lowbit.types import FormatError

LIBRARY = Path(ops.__file__).with_name("_cuda13.so")
CHIPS = ("sm_80", "sm_86", "sm_89", "sm_90", "sm_90a")
_WHEEL = Path(sysconfig.get_path("purelib")) / "nvidia" / "cu13" / "bin"
_STEP = 16  # bytes of an instruction


class Usage(NamedTuple):
    """What ptxas gave a kernel: registers a thread; bytes of stack a thread, and of static shared memory a CTA."""

    registers: int
    stack: int
    shared: int


def tool(name: str) -> str | None:
    """Where the tool is, or None."""
    return shutil.which(name) or (str(_WHEEL / name) if (_WHEEL / name).exists() else None)


@lru_cache(maxsize=8)
def _dump(chip: str, what: str, library: Path) -> str:
    program = tool("cuobjdump")
    if program is None or tool("nvdisasm") is None:
        raise FormatError("cuobjdump, nvdisasm: found neither, accepted are those of requirements/cuda.txt")
    if not library.exists():
        raise FormatError(f"{library.name}: found none, accepted is a build with CUDA kernels (nvcc 13)")
    environment = {**os.environ, "PATH": f"{_WHEEL}{os.pathsep}{os.environ.get('PATH', '')}"}
    command = [program, what, "--gpu-architecture", chip, str(library)]
    return subprocess.run(command, capture_output=True, text=True, check=True, env=environment).stdout


def functions(chip: str, library: Path = LIBRARY) -> dict[str, list[str]]:
    """Mangled name of a kernel -> its instructions for that chip; FormatError where a tool or the library is missing.

    cuobjdump takes sm_90 and sm_90a for one chip, so either name gives the kernels of both.
    """
    out: dict[str, list[str]] = {}
    text = _dump("sm_90" if chip == "sm_90a" else chip, "--dump-sass", library)
    for block in re.split(r"\n\s*Function : ", text)[1:]:
        name, _, rest = block.partition("\n")
        out[name.strip()] = re.findall(r"/\*[0-9a-f]{4,}\*/\s+(.*?);", rest)
    return out


def usage(chip: str, library: Path = LIBRARY) -> dict[str, Usage]:
    """Mangled name of a kernel -> what it takes on that chip."""
    text = _dump("sm_90" if chip == "sm_90a" else chip, "--dump-resource-usage", library)
    rows = re.findall(r"Function (\S+):\s+REG:(\d+) STACK:(\d+) SHARED:(\d+)", text)
    return {name: Usage(int(registers), int(stack), int(shared)) for name, registers, stack, shared in rows}


def word(line: str) -> str:
    """The instruction without its predicate, modifiers and operands."""
    return re.sub(r"^@\S+\s+", "", line).split()[0].split(".")[0]


def jump(line: str) -> tuple[int, bool] | None:
    """(index of the target, whether there is a condition) of a jump to a constant place, or None."""
    m = re.match(r"(@\S+\s+)?BRA(?:\.\w+)*\s+(?:\S+,\s*)?0x([0-9a-f]+)", line)
    return None if m is None else (int(m[2], 16) // _STEP, m[1] is not None)


def loops(code: Sequence[str], holding: str = "") -> list[tuple[int, int]]:
    """(first, last) instruction of the smallest loops that hold an instruction. They end in a jump back with a condition;
    one without ends a wait that was moved out of the way, and counts where nothing else does. A jump to itself ends a
    kernel and is none."""
    found: dict[bool, list[tuple[int, int]]] = {True: [], False: []}
    for i, line in enumerate(code):
        to = jump(line)
        if to is not None and to[0] < i and any(holding in other for other in code[to[0] : i + 1]):
            found[to[1]].append((to[0], i))
    spans = found[True] or found[False]
    return [s for s in spans if not any(o != s and s[0] <= o[0] and o[1] <= s[1] for o in spans)]


def fewest(code: Sequence[str], first: int, last: int, counted: str, wanted: int) -> int | None:
    """Instructions on the shortest way through a loop that meets ``wanted`` instructions named ``counted``; None if
    there is no such way. One that is skipped by its predicate is issued all the same, and counts."""
    reached, edge, steps = {(first, 0)}, [(first, 0)], 0
    while edge:
        steps += 1
        ahead = set()
        for at, met in edge:
            met += word(code[at]) == counted
            to = jump(code[at])
            if at == last and met == wanted:
                return steps
            if met > wanted or word(code[at]) == "EXIT" and not code[at].startswith("@"):
                continue
            places = ([] if to is None else [to[0]]) + ([at + 1] if to is None or to[1] else [])
            ahead |= {(p, met) for p in places if first <= p <= last and (at, p) != (last, first)}
        edge = sorted(ahead - reached)
        reached |= ahead
    return None


def spelled(names: Sequence[str]) -> list[str]:
    """Mangled names as C++ has them, without namespaces and arguments (as they are where there is no c++filt)."""
    program = shutil.which("c++filt")
    if program is None:
        return list(names)
    text = subprocess.run([program], input="\n".join(names), capture_output=True, text=True, check=True).stdout
    text = re.sub(r"lowbit::cuda::|\(anonymous namespace\)::|^void |\((?:\w+::)*Mode\)", "", text, flags=re.MULTILINE)
    return [re.sub(r"\((?:[^()]|\([^()]*\))*\)$", "", line).strip() for line in text.splitlines()]


def report(chips: Sequence[str] = CHIPS, library: Path = LIBRARY) -> Iterator[list[str]]:
    """Rows of the table: a kernel and chip each, with the registers, stack and static shared memory that it takes."""
    yield ["kernel", "chip", "registers", "stack", "static shared"]
    for chip in dict.fromkeys("sm_90" if chip == "sm_90a" else chip for chip in chips):
        rows = usage(chip, library)
        for name, row in sorted(zip(spelled(list(rows)), rows.values())):
            yield [name, "sm_90a" if "sm90" in name else chip, *map(str, row)]


def hottest(code: Sequence[str], holding: str) -> Counter[str]:
    """How often each instruction stands in the loop that holds most of ``holding``."""
    spans = loops(code, holding)
    bodies = [code[a : b + 1] for a, b in spans]
    most = max(bodies, key=lambda body: sum(holding in line for line in body), default=[])
    return Counter(map(word, most))


def main() -> int:
    try:
        print("\n".join(padded(list(report()))))
    except FormatError as error:
        print(error, file=sys.stderr)
        return 2
    print("dynamic shared memory is chosen at launch: stages of the ring times the bytes of a stage (docs/cuda.md)")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
