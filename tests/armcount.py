"""Count the instructions that functions of a static aarch64 program execute, under qemu-user on any machine.

qemu runs one instruction per translation block and logs each inside the address range of the functions; the program
counters are looked up in objdump's listing. So the count is exact, dynamic and the same on every machine: loop control,
epilogues and calls are inside, and no trip count is guessed. With --mca the executed trace, not a loop cut out by hand, is
given to llvm-mca, each function by itself.

    python tests/armcount.py --sym 'int_|linear_' --macs 1048576 --mca neoverse-n1:4 PROGRAM once dotprod 4 0 1 256 4096 128

--mca takes cpu:width where width is how many instructions the front end decodes a cycle: llvm-mca knows the issue ports but
not that limit, so the larger of its cycles and instructions / width is taken. LLVM 19 models neither Cortex-A76 (ask for
neoverse-n1, the same core family) nor, before 15, Neoverse N1 and V1.
"""

from __future__ import annotations

import argparse
import array
import collections
import json
import os
import re
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

CLASSES = (  # the first that matches counts
    ("dot", r"^([us]dot|usdot|sudot|[us]mmla|usmmla|[us]ml[as]l2?|[us]mull2?)$"),
    ("load", r"^ld"),
    ("store", r"^st"),
    ("branch", r"^(b$|b\.|bl$|blr$|br$|ret|cbz|cbnz|tbz|tbnz)"),
    ("other", ""),
)
NM, OBJDUMP = "aarch64-linux-gnu-nm", "aarch64-linux-gnu-objdump"
QEMU = ("qemu-aarch64-static", "qemu-aarch64")
MCA = ("llvm-mca-19", "llvm-mca-20", "llvm-mca-21", "llvm-mca")


class CountError(RuntimeError):
    """What is missing or did not match, in one line."""


class Instruction(NamedTuple):
    word: int
    name: str


def tool(names: Sequence[str]) -> str:
    for name in names:
        if shutil.which(name):
            return name
    raise CountError(f"none of {', '.join(names)} is in PATH")


def missing() -> str | None:
    """Why counting cannot work here, or None."""
    absent = [names[0] for names in ((NM,), (OBJDUMP,), QEMU) if not any(map(shutil.which, names))]
    return f"no {', '.join(absent)}" if absent else None


def _output(command: Sequence[str | Path], **options: Any) -> str:
    return subprocess.run(command, capture_output=True, text=True, check=True, **options).stdout


def functions(elf: Path, pattern: str) -> list[tuple[int, int, str]]:
    """(address, bytes, mangled name) of the functions whose name matches."""
    rows = (line.split() for line in _output([NM, "-S", elf]).splitlines())
    found = {
        (int(r[0], 16), int(r[1], 16), r[3])
        for r in rows
        if len(r) == 4 and r[2] in "tTwW" and re.search(pattern, r[3])
    }
    if not found:
        raise CountError(f"no function in {elf} matches {pattern}")
    return sorted(found)


def disassemble(elf: Path) -> dict[int, Instruction]:
    pattern = re.compile(r"\s*([0-9a-f]+):\s+([0-9a-f]{8})\s+(\S+)")
    matches = map(pattern.match, _output([OBJDUMP, "-d", elf]).splitlines())
    return {int(m[1], 16): Instruction(int(m[2], 16), m[3]) for m in matches if m}


def trace(elf: Path, cpu: str, ranges: Sequence[tuple[int, int, str]], arguments: Sequence[str]) -> array.array[int]:
    """The program counters of every executed instruction inside the ranges, in order."""
    qemu = tool(QEMU)
    single = "-one-insn-per-tb" if "one-insn-per-tb" in _output([qemu, "--help"]) else "-singlestep"
    only = ",".join(f"{start:#x}+{size:#x}" for start, size, _ in ranges)
    pcs = array.array("Q")
    with tempfile.TemporaryDirectory() as folder:
        fifo = os.path.join(folder, "log")
        os.mkfifo(fifo)
        command = [qemu, "-cpu", cpu, single, "-d", "exec,nochain", "-dfilter", only, "-D", fifo, str(elf), *arguments]
        run = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
        with open(fifo) as log:
            for line in log:
                if line.startswith("Trace"):
                    pcs.append(int(line.split("/", 2)[1], 16))
                elif line.startswith("Stopped"):
                    pcs.pop()
        text = run.communicate()[0]
    if run.returncode:
        raise CountError(f"qemu ended with {run.returncode}: {text}")
    if not pcs:
        raise CountError("the functions were never entered")
    return pcs


def _assembly(words: Sequence[int]) -> list[str]:
    unique = sorted(set(words))
    data = "\n".join(" ".join(f"{(w >> s) & 255:#x}" for s in (0, 8, 16, 24)) for w in unique)
    mc = tool(MCA).replace("mca", "mc")
    text = _output([mc, "-disassemble", "-triple=aarch64", "-mattr=+all"], input=data)
    lines = [line for line in text.splitlines() if line.startswith("\t") and not line.startswith("\t.")]
    if len(lines) != len(unique):
        raise CountError("llvm-mc did not decode every instruction")
    table = dict(zip(unique, lines, strict=True))
    return [table[w] for w in words]


def cycles(words: Sequence[int], cpu: str, width: float, window: int = 24000) -> float:
    """Cycles an instruction of the trace: llvm-mca on its middle, caches warm and branches predicted."""
    n = min(len(words), window)
    start = (len(words) - n) // 2
    command = [tool(MCA), "-mtriple=aarch64-linux-gnu", f"-mcpu={cpu}", "-iterations=1", "-instruction-info=0"]
    text = _output([*command, "-resource-pressure=0"], input="\n".join(_assembly(words[start : start + n])) + "\n")
    total = re.search(r"Total Cycles:\s+(\d+)", text)
    assert total, text
    return max(int(total[1]) / n, 1 / width)


def count(
    elf: Path, arguments: Sequence[str], symbols: str, macs: float, cpu: str = "max", models: Sequence[str] = ()
) -> dict[str, Any]:
    """Per 64 multiply-accumulates: ``total``, the classes, ``names`` (each mnemonic), ``cycles`` (of each model)."""
    ranges = functions(elf, symbols)
    code = disassemble(elf)
    pcs = trace(elf, cpu, ranges, arguments)
    per = macs / 64
    names = collections.Counter(code[pc].name for pc in pcs)
    result: dict[str, Any] = {"instructions": len(pcs), "total": len(pcs) / per}
    result |= {kind: 0.0 for kind, _ in CLASSES}
    for name, n in names.items():
        result[next(kind for kind, pattern in CLASSES if re.match(pattern, name))] += n / per
    result["names"] = {name: n / per for name, n in names.most_common()}
    if models:
        of_function = [[code[pc].word for pc in pcs if start <= pc < start + size] for start, size, _ in ranges]
        result["cycles"] = {}
        for model in models:
            name, _, width = model.partition(":")
            each = (len(words) * cycles(words, name, float(width or 99)) for words in of_function if words)
            result["cycles"][name] = sum(each) / per
    return result


def main() -> None:
    p = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    p.add_argument("--cpu", default="max", help="of qemu")
    p.add_argument("--sym", required=True, help="regular expression of the (mangled) functions that count")
    p.add_argument("--macs", type=float, required=True, help="multiply-accumulates of the run")
    p.add_argument("--mca", default="", help="cpu:width,… for llvm-mca")
    p.add_argument("--hist", action="store_true", help="print every mnemonic")
    p.add_argument("--at-most", type=float, help="exit 1 where there are more instructions per 64 multiply-accumulates")
    p.add_argument("--json", action="store_true")
    p.add_argument("elf", type=Path)
    p.add_argument("args", nargs=argparse.REMAINDER)
    a = p.parse_args()
    try:
        r = count(a.elf, a.args, a.sym, a.macs, a.cpu, [m for m in a.mca.split(",") if m])
    except CountError as error:
        sys.exit(f"armcount: {error}")
    if a.json:
        print(json.dumps(r))
    else:
        kinds = ", ".join(f"{kind} {r[kind]:.2f}" for kind, _ in CLASSES)
        model = "".join(f" | {k}: {v:.2f} cycles" for k, v in r.get("cycles", {}).items())
        print(f"{r['instructions']} instructions | per 64 MACs: {r['total']:.2f} = {kinds}{model}")
        if a.hist:
            print("  " + ", ".join(f"{k} {v:.3f}" for k, v in r["names"].items()))
    if a.at_most and r["total"] > a.at_most:
        sys.exit(f"armcount: {r['total']:.2f} instructions per 64 MACs, at most {a.at_most} are allowed")


if __name__ == "__main__":
    main()
