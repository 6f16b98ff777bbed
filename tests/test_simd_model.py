"""The tiers of CPUs that this machine may not be: built over a model of their instructions and held to scalar's bytes.

simd_model/model.h says what AVX-VNNI and AVX-512 do, in AVX2; simd_model/compare.cpp runs every kernel table on random
and extreme inputs. The same program, linked with the plain objects, checks the real instructions of this CPU.
"""

from __future__ import annotations

import platform
import re
import shutil
import subprocess
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

HERE = Path(__file__).parent / "simd_model"
CPU = Path(__file__).parents[1] / "csrc" / "cpu"
COMPILER = shutil.which("g++")
AVX2 = ["-mavx2", "-mfma", "-mf16c"]
MODEL = [*AVX2, "-include", str(HERE / "model.h")]
TIERS = {"avx2": AVX2, "avxvnni": MODEL, "avx512vnni": [*MODEL, "-DLOWBIT_MODEL_AVX512", "-O0"]}


def cpu_flags() -> set[str]:
    try:
        line = next(v for v in Path("/proc/cpuinfo").read_text().splitlines() if v.startswith("flags"))
    except (OSError, StopIteration):
        return set()
    return set(line.split())


pytestmark = [
    pytest.mark.skipif(COMPILER is None, reason="no g++"),
    pytest.mark.skipif(platform.machine() not in ("x86_64", "AMD64"), reason="the model is written in AVX2"),
    pytest.mark.skipif(not {"avx2", "fma", "f16c"} <= cpu_flags(), reason="this CPU lacks AVX2, FMA or F16C"),
]


def compile_(source: Path, target: Path, *flags: str) -> Path:
    command = [
        str(COMPILER),
        "-std=c++20",
        "-O1",
        "-ffp-contract=off",
        f"-I{CPU}",
        *flags,
        "-c",
        str(source),
        "-o",
        str(target),
    ]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    return target


def link(objects: list[Path], target: Path) -> Path:
    done = subprocess.run(
        [str(COMPILER), *map(str, objects), "-o", str(target)], capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    return target


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("simd")


@pytest.fixture(scope="module")
def common(folder: Path) -> list[Path]:
    sources = [HERE / "compare.cpp", CPU / "dispatch.cpp", CPU / "isa" / "scalar.cpp"]
    return [compile_(s, folder / f"{s.stem}.o") for s in sources]


@pytest.fixture(scope="module")
def program(folder: Path, common: list[Path]) -> Path:
    with ThreadPoolExecutor(2) as pool:
        jobs = [
            pool.submit(compile_, CPU / "isa" / f"{t}.cpp", folder / f"{t}.o", *flags) for t, flags in TIERS.items()
        ]
        return link([*common, *(j.result() for j in jobs)], folder / "compare")


@pytest.mark.parametrize("tier", TIERS)
def test_a_tier_gives_the_bytes_of_scalar(program: Path, tier: str) -> None:
    done = subprocess.run([str(program), "--all", tier], capture_output=True, text=True, timeout=300, check=False)
    assert done.returncode == 0, done.stdout
    found = re.search(rf"^{tier}: (\d+) outputs compared with scalar, 0 differ$", done.stdout, re.M)
    assert found and int(found[1]) > 2000, done.stdout


# One wrong detail at a time, put in by the preprocessor: the comparison must notice every one of them.
BREAKS = {
    "vpdpbusd saturates": ["-DLOWBIT_BREAK_SATURATE"],
    "products and sums rounded apart": ["-DLOWBIT_BREAK_FMA"],
    "toward zero": ["-DLOWBIT_BREAK_ROUND"],
    "NaN payload kept": ["-DLOWBIT_BREAK_NAN"],
}


@pytest.mark.parametrize("what", BREAKS)
def test_a_broken_tier_is_noticed(folder: Path, common: list[Path], program: Path, what: str) -> None:
    flags = [*TIERS["avx512vnni"], *BREAKS[what]]
    name = BREAKS[what][0][2:].lower()
    broken = compile_(CPU / "isa" / "avx512vnni.cpp", folder / f"{name}.o", *flags)
    whole = [folder / "avx2.o", folder / "avxvnni.o"]
    done = subprocess.run(
        [str(link([*common, *whole, broken], folder / name)), "--all", "avx512vnni", "stop"],
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 1 and "differs" in done.stdout, done.stdout
