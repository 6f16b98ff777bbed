"""What nvcc made, read without a GPU: instructions, spills, symbols. Skipped where this build has no CUDA library."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
from pathlib import Path

import pytest

from lowbit.bench import predict, sass

LIBRARY = sass.LIBRARY

pytestmark = pytest.mark.skipif(
    not LIBRARY.exists(), reason="no _cuda13.so: nvcc 13 was not found when lowbit was built"
)


def tool(name: str) -> str:
    found = sass.tool(name)
    if found is None:
        pytest.skip(f"no {name} (requirements/cuda.txt)")
    return found


def functions(chip: str) -> dict[str, list[str]]:
    tool("cuobjdump"), tool("nvdisasm")
    return sass.functions(chip)


def spills(lines: list[str]) -> list[str]:
    return [line for line in lines if sass.word(line) in ("LDL", "STL")]


def test_the_reader_of_loops_is_not_blind() -> None:
    code = ["MOV R0, R1", "IADD3 R0", "@P0 BRA 0x10", "LDS R1", "@!P1 BRA 0x30", "BRA 0x50"]
    assert sass.loops(code) == [(1, 2), (3, 4)] and sass.loops(code, "IADD3") == [(1, 2)]
    assert sass.loops(code, "MOV") == [] and sass.loops(["NOP", "IMMA R0", "@P0 EXIT", "BRA 0x10"], "IMMA") == [(1, 3)]
    assert sass.loops(["EXIT", "BRA 0x10"]) == []  # the end of every kernel
    waits = ["MOV", "IMMA R0", "@P0 BRA 0x10", "SYNCS", "BRA 0x0"]
    assert sass.loops(waits, "IMMA") == [(1, 2)]  # not the way back from the wait
    assert spills(["@P0 STL [R1], R2", "LDS R2", "LDL.64 R2"]) == ["@P0 STL [R1], R2", "LDL.64 R2"]


def test_the_shortest_way_through_a_loop() -> None:
    code = ["MOV", "@P0 BRA 0x40", "LDGSTS [R1]", "LDGSTS [R2]", "IMMA", "@P1 BRA 0x0"]
    assert [sass.fewest(code, 0, 5, "LDGSTS", n) for n in range(3)] == [4, None, 6]
    inner = ["MOV", "LDGSTS", "@P0 BRA 0x10", "IMMA", "BRA 0x0"]
    assert [sass.fewest(inner, 0, 4, "LDGSTS", n) for n in (0, 1, 3)] == [None, 5, 9]


def test_hopper_gemms_use_the_warpgroup_instruction_and_keep_their_loops_in_registers() -> None:
    kernels = {n: c for n, c in functions("sm_90a").items() if "gemm_sm90" in n}
    assert len(kernels) >= 30
    for name, code in kernels.items():
        assert any("IGMMA" in line for line in code), name
        # such a load may rise above the wait for the grid that writes what it reads
        assert not any("LDG.E.CONSTANT" in line for line in code), name
        spans = sass.loops(code, "IGMMA")
        assert spans, name
        found = [line for a, b in spans for line in spills(code[a : b + 1])]
        assert not found, (name, found[:3])


@pytest.mark.parametrize("chip", ["sm_80", "sm_86", "sm_89"])
def test_the_int4_gemm_is_one_matrix_instruction_a_group_and_keeps_its_loop_in_registers(chip: str) -> None:
    kernels = {n: c for n, c in functions(chip).items() if "gemm_int4" in n}
    assert len(kernels) == 2  # tiles of 32 and 64 rows
    for name, code in kernels.items():
        matrix = [line for line in code if "IMMA" in line]  # HMMA: the low rank
        assert matrix and all(line.startswith("IMMA.16864.S4.S4") for line in matrix), (name, matrix[:3])
        ((first, last),) = sass.loops(code, "IMMA")
        assert sum("IMMA" in line for line in code[first:last]) == len(matrix), name  # all of them, in one loop
        assert not spills(code), (name, spills(code)[:3])
        assert sass.usage(chip)[name].stack == 0, name
        assert not any(sass.word(line) == "I2F" for line in code[first:last]), name  # the magic number instead


def test_the_portable_gemm_keeps_its_loops_in_registers() -> None:
    kernels = {n: c for n, c in functions("sm_80").items() if "gemm_mma" in n}
    assert len(kernels) == 8
    for name, code in kernels.items():
        spans = sass.loops(code, "IMMA.16832.S8.S8")
        assert spans, name
        assert not [line for a, b in spans for line in spills(code[a : b + 1])], name


def test_the_kept_predictions_are_what_this_build_gives() -> None:
    """`make predict` writes them anew where the INT4 GEMM has changed."""
    tool("cuobjdump"), tool("nvdisasm")
    file = Path(__file__).parents[1] / "bench" / "results" / "cuda" / "predicted-l4.jsonl"
    of_a_run = {"lowbit": None, "commit": None, "date": None}
    kept = [json.loads(text) | of_a_run for text in file.read_text("utf-8").splitlines()]
    assert kept == [line | of_a_run for line in predict.lines()]


def test_a_prediction_takes_the_longest_of_three() -> None:
    loops = {t: predict.Loop(t, t // 2, issued, 250) for t, issued in ((32, 8 * 300), (64, 8 * 640))}
    chip = predict.L4
    assert predict.cycles(chip, loops[64]) == (1024, 1280)
    busy = predict.product(chip, loops, 4096, 1024, 685)  # 32 x 11 tiles on 58 multiprocessors: 7 rounds of 4 blocks
    assert busy == {"us": round(7 * 4 * 1280 / 2.04e9 * 1e6, 2), "bound": "schedulers"}
    lean = {t: loop._replace(issued=8) for t, loop in loops.items()}
    assert predict.product(chip, lean, 4096, 1024, 685)["bound"] == "tensor cores"
    few = predict.product(chip, loops, 4096, 1024, 1)
    assert few == {"us": round((4096 * 1024 / 2 + 4096 * 16 * 4) / 300e9 * 1e6, 2), "bound": "memory"}
    # 64 or 32 rows of x and 128 of the weight by 256 threads, 8 chunks a row, and the scales
    assert (predict.copies(64), predict.copies(32)) == (7, 6)


def test_every_kernel_is_in_the_report(capsys: pytest.CaptureFixture[str]) -> None:
    """Registers and static shared memory, as `make cuda-report` prints them."""
    tool("cuobjdump"), tool("nvdisasm")
    assert sass.main() == 0
    lines = capsys.readouterr().out.splitlines()[1:-1]
    assert len(lines) == sum(len(sass.usage(chip)) for chip in ("sm_80", "sm_86", "sm_89", "sm_90"))
    for line in lines:
        assert 16 <= int(line.split()[-3]) <= 255, line
    print("\n" + "\n".join(lines))


@pytest.mark.parametrize("chip", ["sm_80", "sm_90"])
def test_portable_kernels_use_integer_matrix_instructions(chip: str) -> None:
    kernels = {n: c for n, c in functions(chip).items() if "gemv" in n}
    assert kernels
    for name, code in kernels.items():
        assert any("IMMA.16832.S8.S8" in line for line in code), name
        assert not spills(code), name


def test_no_kernel_of_this_build_is_without_code() -> None:
    """A body compiled away would leave the output as it was."""
    for chip in ("sm_80", "sm_90", "sm_90a"):
        assert functions(chip)
        assert all(len(code) > 100 for code in functions(chip).values()), chip


def test_there_is_code_for_every_chip_that_is_served() -> None:
    command = [tool("cuobjdump"), "--list-elf", str(LIBRARY)]
    listed = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    assert set(re.findall(r"sm_\d+a?", listed)) == {"sm_80", "sm_86", "sm_89", "sm_90", "sm_90a"}


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
