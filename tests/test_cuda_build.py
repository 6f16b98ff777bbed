"""What nvcc made, read without a GPU: instructions, spills, symbols. Skipped where this build has no CUDA library."""

from __future__ import annotations

import re
import shutil
import subprocess
import sysconfig
from functools import lru_cache
from pathlib import Path

import pytest

import lowbit

LIBRARY = Path(lowbit.__file__).with_name("_cuda13.so")
BIN = Path(sysconfig.get_path("purelib")) / "nvidia" / "cu13" / "bin"

pytestmark = pytest.mark.skipif(
    not LIBRARY.exists(), reason="no _cuda13.so: nvcc 13 was not found when lowbit was built"
)


def tool(name: str) -> str:
    found = shutil.which(name) or (str(BIN / name) if (BIN / name).exists() else None)
    if found is None:
        pytest.skip(f"no {name} (requirements/cuda.txt)")
    return found


@lru_cache(maxsize=2)
def functions(chip: str) -> dict[str, list[str]]:
    """Kernel name -> its instructions, for one chip."""
    command = [tool("cuobjdump"), "--dump-sass", "--gpu-architecture", chip, str(LIBRARY)]
    tool("nvdisasm")
    path = f"{BIN}:{sysconfig.get_path('scripts')}:/usr/bin:/bin"
    text = subprocess.run(command, capture_output=True, text=True, check=True, env={"PATH": path}).stdout
    out: dict[str, list[str]] = {}
    for block in re.split(r"\n\s*Function : ", text)[1:]:
        name, _, rest = block.partition("\n")
        out[name.strip()] = re.findall(r"/\*[0-9a-f]{4,}\*/\s+(.*?);", rest)
    return out


def loops(code: list[str], holding: str = "") -> list[list[str]]:
    """Bodies of backward jumps that hold an instruction and no smaller loop that holds it."""
    spans = []
    for i, line in enumerate(code):
        m = re.match(r"@\S+ BRA(?:\.\w+)*\s+(?:\S+,\s*)?0x([0-9a-f]+)", line)  # a plain jump back ends a wait, no loop
        if m and int(m[1], 16) // 16 <= i:
            spans.append((int(m[1], 16) // 16, i))
    spans = [(a, b) for a, b in spans if any(holding in line for line in code[a : b + 1])]
    inner = [s for s in spans if not any(o != s and s[0] <= o[0] and o[1] <= s[1] for o in spans)]
    return [code[a : b + 1] for a, b in inner]


def test_the_reader_of_loops_is_not_blind() -> None:
    code = ["MOV R0, R1", "IADD3 R0", "@P0 BRA 0x10", "EXIT"]
    assert loops(code) == [["IADD3 R0", "@P0 BRA 0x10"]] == loops(code, "IADD3") and loops(code, "MOV") == []


def test_hopper_gemms_use_the_warpgroup_instruction_and_keep_their_loops_in_registers() -> None:
    kernels = {n: c for n, c in functions("sm_90a").items() if "gemm_sm90" in n}
    assert len(kernels) >= 30
    for name, code in kernels.items():
        assert any("IGMMA" in line for line in code), name
        # such a load may rise above the wait for the grid that writes what it reads
        assert not any("LDG.E.CONSTANT" in line for line in code), name
        main = loops(code, "IGMMA")
        assert main, name
        spilled = [line for loop in main for line in loop if re.search(r"\b(LDL|STL)\b", line)]
        assert not spilled, (name, spilled[:3])


@pytest.mark.parametrize("chip", ["sm_80", "sm_90"])
def test_portable_kernels_use_integer_matrix_instructions(chip: str) -> None:
    kernels = {n: c for n, c in functions(chip).items() if "gemv" in n}
    assert kernels
    for name, code in kernels.items():
        assert any("IMMA.16832.S8.S8" in line for line in code), name
        assert not any(re.search(r"\b(LDL|STL)\b", line) for line in code), name


def test_no_kernel_of_this_build_is_without_code() -> None:
    """A body compiled away would leave the output as it was."""
    for chip in ("sm_80", "sm_90", "sm_90a"):
        assert functions(chip)
        assert all(len(code) > 100 for code in functions(chip).values()), chip


def test_there_is_ptx_for_newer_chips() -> None:
    command = [tool("cuobjdump"), "--list-ptx", str(LIBRARY)]
    listed = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    assert listed.count("sm_90.ptx") >= 3


@pytest.mark.skipif(not shutil.which("nm"), reason="no nm")
def test_the_library_needs_nothing_new() -> None:
    """manylinux_2_28: glibc 2.28, libstdc++ 3.4.24; no symbol of Python, none of torch but the stable ABI's."""
    limits = {"GLIBC": (2, 28), "GLIBCXX": (3, 4, 24), "CXXABI": (1, 3, 11), "GCC": (7, 0, 0)}
    command = ["nm", "-D", "--undefined-only", str(LIBRARY)]
    lines = subprocess.run(command, capture_output=True, text=True, check=True).stdout.splitlines()
    names = [line.split()[-1] for line in lines]
    assert any(n.startswith("cudaLaunchKernelExC") for n in names)
    for name in names:
        m = re.search(r"@([A-Z]+)_([\d.]+)$", name)
        if m and m[1] in limits:
            assert tuple(map(int, m[2].split("."))) <= limits[m[1]], name
        assert not re.match(r"_?Py[A-Z_]|_ZNK?(2at|3c10|5torch)", name), name


@pytest.mark.skipif(not shutil.which("readelf"), reason="no readelf")
def test_the_runtime_is_linked_by_name() -> None:
    dynamic = subprocess.run(["readelf", "-d", str(LIBRARY)], capture_output=True, text=True, check=True).stdout
    assert (
        "[libcudart.so.13]" in dynamic
        and "[libtorch.so]" in dynamic
        and "RPATH" not in dynamic
        and "RUNPATH" not in dynamic
    )
