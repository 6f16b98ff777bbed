"""Kernels without torch: every tier of both architectures against the definition, byte for byte, and instruction counts.

kernel_check/ is one program: it reads cases that lowbit's own packers wrote, computes y by plain loops in int64 and runs
every kernel table that its CPU supports. It is built for this machine and, where the cross compiler is installed, for
aarch64; qemu-user stands in for the CPUs that are not here.
"""

from __future__ import annotations

import itertools
import os
import platform
import re
import shutil
import struct
import subprocess
import sys
from collections.abc import Callable, Sequence
from pathlib import Path

import pytest
import torch

import armcount
from lowbit import layouts
from lowbit.layouts import arm_panels
from lowbit.types import QuantizedWeight
from samples import weight

sys.path.insert(0, str(Path(__file__).parent / "kernel_check"))
import vectors  # noqa: E402

ROOT = Path(__file__).parents[1]
NATIVE_ARM = layouts.MACHINE == "arm_panels"
X86 = platform.machine() in ("x86_64", "AMD64")


def which(*names: str) -> str | None:
    return next((path for path in map(shutil.which, names) if path), None)


QEMU_ARM, QEMU_X86 = which("qemu-aarch64-static", "qemu-aarch64"), which("qemu-x86_64-static", "qemu-x86_64")
need_cross = pytest.mark.skipif(
    not (which("aarch64-linux-gnu-g++") and QEMU_ARM), reason="no aarch64-linux-gnu-g++ or no qemu-aarch64"
)
need_qemu_x86 = pytest.mark.skipif(not (X86 and QEMU_X86), reason="no qemu-x86_64, or not an x86 machine")


# ---- building --------------------------------------------------------------------------------------------------------
def build(machine: str, *options: str) -> Path:
    """The program, of the very objects that the wheel for that machine links: in its folder, which is kept, so that only
    what changed is compiled again."""
    # those of this Python before the system's, as the build of the wheel takes them: another cmake compiles all of it anew
    path = os.pathsep.join((str(Path(sys.executable).parent), os.environ.get("PATH", os.defpath)))
    cmake, ninja = shutil.which("cmake", path=path), shutil.which("ninja", path=path)
    if not cmake or not ninja:
        pytest.skip("no cmake or no ninja")
    folder = ROOT / "build" / f"py3-none-linux_{machine}"
    configure = [cmake, "-G", "Ninja", "-S", ROOT, "-B", folder, f"-DPython3_EXECUTABLE={sys.executable}", *options]
    for command in (configure, [cmake, "--build", folder, "--target", "kernel_check", "kernel_compare"]):
        done = subprocess.run([str(c) for c in command], capture_output=True, text=True, check=False)
        assert done.returncode == 0, done.stdout[-4000:] + done.stderr[-4000:]
    return folder / "kernel_check"


@pytest.fixture(scope="module")
def native() -> Path:
    return build(platform.machine())


@pytest.fixture(scope="module")
def aarch64() -> Path:
    return build("aarch64", f"-DCMAKE_TOOLCHAIN_FILE={ROOT / 'cmake' / 'aarch64-linux-gnu.cmake'}")


@pytest.fixture(scope="module")
def written(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], tuple[Path, int]]:
    """layout -> the file of its cases and their number."""
    folder, made = tmp_path_factory.mktemp("vectors"), dict[str, tuple[Path, int]]()

    def get(layout: str) -> tuple[Path, int]:
        if layout not in made:
            path = folder / f"{layout}.bin"
            made[layout] = path, vectors.write(path, layout)
        return made[layout]

    return get


def run(program: Path, *arguments: str | Path, emulator: Sequence[str] = ()) -> subprocess.CompletedProcess[str]:
    command = [*emulator, str(program), *map(str, arguments)]
    return subprocess.run(command, capture_output=True, text=True, check=False, timeout=600)


def check(program: Path, cases: tuple[Path, int], tiers: Sequence[str], emulator: Sequence[str] = ()) -> None:
    """Every named tier ran every case and none differs."""
    one = tiers if len(tiers) == 1 else ()
    done = run(program, "check", cases[0], *one, emulator=emulator)
    assert done.returncode == 0, done.stdout + done.stderr
    found = re.findall(r"^(\w+): (\d+) cases, (\d+) outputs, (\d+) cases differ$", done.stdout, re.M)
    print(done.stdout)
    assert [row[0] for row in found] == list(tiers)
    assert all(int(row[1]) == cases[1] and int(row[2]) > 50_000 and row[3] == "0" for row in found), done.stdout


# ---- every tier against the definition -------------------------------------------------------------------------------
def test_tiers_of_this_machine(native: Path, written: Callable[[str], tuple[Path, int]]) -> None:
    from lowbit import ops

    tiers = run(native, "tiers").stdout.split()
    assert [t for t in tiers if t != "amx"] == [t for t in ops.cpu_isas() if t != "amx"]
    check(native, written(layouts.MACHINE), tiers)


@need_qemu_x86
@pytest.mark.parametrize(("cpu", "tiers"), [("Nehalem", ["scalar"]), ("Haswell", ["avx2", "scalar"])])
def test_x86_tiers(native: Path, written: Callable[[str], tuple[Path, int]], cpu: str, tiers: list[str]) -> None:
    emulator = [str(QEMU_X86), "-cpu", cpu]
    assert run(native, "tiers", emulator=emulator).stdout.split() == tiers
    check(native, written("x86_panels"), tiers, emulator)


# qemu's CPU, all tiers it runs, and those that are checked on it
ARM = [
    ("cortex-a53", ["neon", "scalar"], ["neon", "scalar"]),
    ("cortex-a72", ["neon", "scalar"], ["neon"]),
    ("cortex-a76", ["dotprod", "neon", "scalar"], ["dotprod"]),
    ("neoverse-n1", ["dotprod", "neon", "scalar"], ["dotprod"]),
    ("max", ["i8mm", "dotprod", "neon", "scalar"], ["i8mm"]),
]


@need_cross
@pytest.mark.parametrize(("cpu", "tiers", "checked"), ARM, ids=[row[0] for row in ARM])
def test_aarch64_tiers(
    aarch64: Path, written: Callable[[str], tuple[Path, int]], cpu: str, tiers: list[str], checked: list[str]
) -> None:
    emulator = [str(QEMU_ARM), "-cpu", cpu]
    assert run(aarch64, "tiers", emulator=emulator).stdout.split() == tiers
    check(aarch64, written("arm_panels"), checked, emulator)


@need_cross
def test_aarch64_tiers_are_scalar_in_every_function(aarch64: Path) -> None:
    """simd_model/compare.cpp on random bytes: also what the cases above leave out, the functions between linears."""
    program = aarch64.with_name("kernel_compare")
    done = run(program, emulator=[str(QEMU_ARM), "-cpu", "max"])
    assert done.returncode == 0 and "differences: 0" in done.stdout, done.stdout
    found = re.findall(r"^(\w+): (\d+) outputs compared with scalar, 0 differ$", done.stdout, re.M)
    assert [name for name, _ in found] == ["i8mm", "dotprod", "neon"] and all(int(n) > 2000 for _, n in found)


def test_one_wrong_byte_is_noticed(native: Path, written: Callable[[str], tuple[Path, int]], tmp_path: Path) -> None:
    """The cases hold plain and packed values: where the two disagree in one code, the program has to say so."""
    case = next(c for c in vectors.cases() if c.bits == 4 and c.activation == 0 and c.n == 33 and c.fill == "random")
    path = tmp_path / "one.bin"
    with path.open("wb") as file:
        file.write(struct.pack("<2q", vectors.MAGIC, 1))
        vectors._write(file, case, layouts.MACHINE)
    assert run(native, "check", path).returncode == 0
    data = bytearray(path.read_bytes())
    q = weight(case.n, case.k, case.group, bits=4, fill="random")
    packed = layouts.pack(q)
    data[len(data) - packed.numel()] ^= 0x10  # the first packed byte: its high nibble by one
    path.write_bytes(data)
    done = run(native, "check", path)
    assert done.returncode == 1 and "scalar differs, first at output 0" in done.stdout, done.stdout
    data = data[:-1]
    path.write_bytes(data)
    assert run(native, "check", path).returncode == 2


# ---- the packer of aarch64 -------------------------------------------------------------------------------------------
@pytest.mark.parametrize("bits", [4, 8])
def test_where_each_code_lies_on_aarch64(bits: int) -> None:
    """One code at a time, against the drawing in kernels.h, written here a second time; the tail is that of x86."""
    n, k, g = 20, 50, 20  # 2 panels, 3 groups padded to 32 columns, the last one short
    per_line = 16 if bits == 4 else 8
    code_bytes = 32 // per_line * 128
    for row, column in itertools.product((0, 1, 15, 16, 19), (0, 7, 8, 15, 16, 19, 20, 39, 40, 49)):
        codes = torch.zeros(n, k, dtype=torch.uint8)
        codes[row, column] = 5
        q = QuantizedWeight(codes, torch.ones(n, 3).half(), g, bits, torch.full((n, 3), 3, dtype=torch.uint8))
        packed = arm_panels.pack(q)
        assert packed.shape == (2, 3, code_bytes + 64)
        group, inside = divmod(column, g)
        line, place = divmod(inside, per_line)
        byte = 128 * line + 8 * (row % 16) + place % 8
        assert packed[:, :, :code_bytes].nonzero().tolist() == [[row // 16, group, byte]]
        assert packed[row // 16, group, byte] == (5 << 4 if place >= 8 else 5)
        assert torch.equal(packed[:, :, code_bytes:], layouts.LAYOUTS["x86_panels"].pack(q)[:, :, code_bytes:])


# ---- instructions per 64 multiply-accumulates --------------------------------------------------------------------------
KERNEL = "lowbit3cpu.*(int_|linear_|finish_row|expand)"  # all that `linear` does after the rows are quantized
# tier, CPU, M, N, most instructions at group 128, and those of them that multiply, which are known
GATES = [
    ("dotprod", "cortex-a76", 1, 256, 12.5, 4.0),
    ("dotprod", "cortex-a76", 128, 16, 6.1, 4.0),
    ("neon", "cortex-a72", 1, 256, 20.0, 8.0),
    ("neon", "cortex-a72", 128, 16, 12.5, 8.0),
    ("i8mm", "max", 128, 16, 3.9, 2.0),
]


@need_cross
@pytest.mark.skipif(armcount.missing() is not None, reason=str(armcount.missing()))
@pytest.mark.parametrize(("tier", "cpu", "m", "n", "most", "dots"), GATES, ids=[f"{g[0]}-{g[2]}" for g in GATES])
def test_instruction_counts(aarch64: Path, tier: str, cpu: str, m: int, n: int, most: float, dots: float) -> None:
    k = 4096
    arguments = ["once", tier, "4", "0", str(m), str(n), str(k), "128"]  # int8 rows, one scale each
    r = armcount.count(aarch64, arguments, KERNEL, m * n * k, cpu)
    print(f"{tier} M={m}: {r['total']:.2f} instructions per 64 multiply-accumulates")
    assert abs(r["dot"] - dots) < 0.01, r  # nothing that multiplies was missed or counted twice
    assert r["total"] <= most, r


@need_cross
@pytest.mark.skipif(armcount.missing() is not None, reason=str(armcount.missing()))
@pytest.mark.parametrize("tier", ["dotprod", "neon", "i8mm"])
def test_one_load_of_w_serves_few_rows(aarch64: Path, tier: str) -> None:
    """Seven rows of x cost no more instructions per product than one: w is unpacked once for all of them."""
    each = {}
    for m in (1, 2, 4, 7):
        arguments = ["once", tier, "4", "0", str(m), "64", "512", "128"]
        each[m] = armcount.count(aarch64, arguments, KERNEL, m * 64 * 512)["total"]
    print(tier, each)
    assert each[7] < 0.95 * each[1] and each[4] < 0.95 * each[1] and each[2] < 1.05 * each[1], each


def test_the_tiers_of_dispatch_are_those_of_the_build() -> None:
    from lowbit.dispatch import TIERS

    text = (ROOT / "csrc" / "cpu" / "dispatch.cpp").read_text()
    listed = {name.lower() for name in re.findall(r"&k(\w+)Table,", text)}
    assert listed == {tier for tiers in TIERS.values() for tier in tiers}
