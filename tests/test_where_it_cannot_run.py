"""The table "Where it cannot run" of docs/install.md: each row says in one line what is wrong and what to do, and nothing crashes.

`kernels` too old is in test_wheels.py (the artifact's fallback), other CUDAs and chips in test_cases_cuda.py, a library's own
words in test_doctor.py.
"""

from __future__ import annotations

import os
import platform
import subprocess
import sys
from pathlib import Path

import pytest
import torch

import lowbit
from lowbit import doctor, native, ops, ops_cuda
from lowbit.types import FormatError

ROOT = Path(native.__file__).parent
# A layer is the first that needs the operators; the command line says the same.
FIRST_USE = """
try:
    lowbit.QuantLinear
except ImportError as error:
    print(error)
"""
COMMAND = """
from lowbit.__main__ import main
sys.exit(main("bench layers --shape 64x64 --M 1".split()))
"""
OTHERS = """
import sys, lowbit
from lowbit import native
for content in (b"not a library", b"", bytes.fromhex(sys.argv[1])):
    native.LIBRARY.write_bytes(content)
"""
OLD = "import sys, torch, lowbit; torch.__version__ = '2.9.1+cpu'"


def indented(text: str) -> str:
    return "".join(f"    {line}\n" for line in text.splitlines())


def run(folder: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    environment = {**os.environ, "PYTHONPATH": str(folder), "OMP_NUM_THREADS": "1"}
    return subprocess.run([sys.executable, *arguments], capture_output=True, text=True, env=environment, timeout=300)


def test_a_wheel_whose_library_does_not_load(tmp_path: Path) -> None:
    """The package beside a library that is damaged, empty, or for another machine: one line each, and for the command too."""
    other, machine = ("x86_64", 62) if platform.machine() == "aarch64" else ("aarch64", 183)
    elf = b"\x7fELF\x02\x01\x01" + bytes(9) + b"\x03\0" + machine.to_bytes(2, "little") + bytes(64)
    (tmp_path / "lowbit").mkdir()
    for file in ROOT.iterdir():
        if file.suffix != ".so":
            (tmp_path / "lowbit" / file.name).symlink_to(file)
    (tmp_path / "lowbit" / "_C.so").touch()
    done = run(tmp_path, "-c", OTHERS + indented(FIRST_USE) + COMMAND, elf.hex())
    damaged, empty, foreign = done.stdout.splitlines()
    for line in (damaged, empty):
        assert line.startswith("_C.so: cannot be loaded (") and "reinstall" in line, line
    assert foreign.startswith(f"_C.so: found a library for {other}, this Python runs on {platform.machine()}: install")
    assert done.returncode == 2 and foreign in done.stderr and done.stderr.count("\n") == 1, done.stderr


def test_a_torch_that_is_too_old() -> None:
    done = run(ROOT.parent, "-c", OLD + FIRST_USE + COMMAND)
    said = "lowbit: found torch 2.9.1+cpu, accepted is 2.10 or newer: pip install 'torch>=2.10'"
    assert done.stdout.splitlines() == [said]
    assert done.returncode == 2 and said in done.stderr and done.stderr.count("\n") == 1, done.stderr


def test_a_cpu_without_avx2_is_a_note(monkeypatch: pytest.MonkeyPatch) -> None:
    """It runs, in scalar code (test_kernel_check.py runs it as a Nehalem); the page says that it is slow and why."""
    monkeypatch.delenv("QM_CPU_ISA", raising=False)
    monkeypatch.setattr(ops, "cpu_isa", lambda: "scalar")
    notes = {row.name: row for row in doctor.cpu() if row.state == doctor.NOTE}
    assert "no AVX2" in notes["speed"].found and "slow" in notes["speed"].todo
    assert [row for row in doctor.cpu() if row.state == doctor.RED] == []


@pytest.mark.parametrize(
    ("cuda", "said"),
    [(None, "this torch is built without CUDA"), ("13.0", "torch for CUDA 13.0 sees no GPU: no driver of 580 or newer")],
)  # fmt: skip
def test_a_gpu_that_torch_does_not_have(monkeypatch: pytest.MonkeyPatch, cuda: str | None, said: str) -> None:
    monkeypatch.setattr(torch.version, "cuda", cuda)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with pytest.raises(FormatError, match=f"device: found cuda, but {said}.*accepted here is cpu"):
        lowbit.load("no/such/directory", device="cuda")  # before the directory is looked at
    with pytest.raises(FormatError, match="--device: found 'gpu', accepted are cpu, cuda"):
        ops_cuda.device_there("gpu", "--device")
    assert ops_cuda.device_there("cpu") == torch.device("cpu")
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    assert ops_cuda.device_there("cuda:1") == torch.device("cuda:1")
    with pytest.raises(FormatError, match="found cuda:2, accepted are cuda:0 to cuda:1"):
        ops_cuda.device_there("cuda:2")
