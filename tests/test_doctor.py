"""`lowbit doctor`: the page, its red lines, and that it speaks where nothing else can."""

from __future__ import annotations

import json
import os
import platform
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from lowbit import cli, doctor, native, ops, selftest

SRC = Path(native.__file__).parents[1]


def test_the_page_names_every_tier_and_is_json_too(capsys: pytest.CaptureFixture[str], monkeypatch: Any) -> None:
    monkeypatch.setattr(doctor, "threads", lambda: iter(()))  # this machine may be short of cores
    monkeypatch.setattr(doctor, "PARTS", (doctor.versions, doctor.cpu, doctor.gpu, doctor.extras, doctor.self_test))
    code = cli.main(["doctor", "--json"])
    said = json.loads(capsys.readouterr().out)
    assert {row["part"] for row in said["rows"]} == {"versions", "cpu", "gpu", "extras", "self-test"}
    tested = [row["name"] for row in said["rows"] if row["part"] == "self-test"]
    assert tested[: len(ops.cpu_isas())] == ops.cpu_isas()
    assert code == int(said["red"]) == int(any(row["state"] == "RED" for row in said["rows"]))
    assert [row for row in said["rows"] if row["part"] in ("cpu", "self-test") and row["state"] == "RED"] == []


def test_a_red_line_says_what_to_do(monkeypatch: Any) -> None:
    old = {"torch": "2.9.1", "numpy": ""}
    monkeypatch.setattr(doctor, "installed", lambda name: old.get(name, "1.0"))
    rows = doctor.examine([doctor.versions])
    assert {(row.name, row.found) for row in rows if row.state == doctor.RED} == {
        ("torch", "2.9.1"),
        ("numpy", "absent"),
    }
    text = doctor.page(rows)
    assert "versions, torch: pip install 'torch>=2.10'" in text and "versions, numpy: pip install 'numpy'" in text
    assert "nothing is red" not in text


def test_an_extra_that_is_too_old_is_red(monkeypatch: Any) -> None:
    have = {"kernels": "0.14.1", "transformers": "5.0.0rc1+x", "ray": ""}
    monkeypatch.setattr(doctor, "installed", lambda name: have.get(name, "1.0"))
    rows = {row.name: row for row in doctor.extras()}
    assert rows["kernels"].state == doctor.RED and rows["kernels"].todo == "pip install -U 'kernels>=0.15.1'"
    assert rows["kernels"].found == "0.14.1, accepted is 0.15.1 or newer"
    assert (rows["transformers"].state, rows["ray"].state) == (doctor.OK, doctor.NOTE)
    have["kernels"] = "0.15.1"
    assert {row.name: row.state for row in doctor.extras()}["kernels"] == doctor.OK


def test_too_many_threads_are_red(monkeypatch: Any) -> None:
    monkeypatch.setattr(torch, "get_num_threads", lambda: 10_000)
    (row,) = doctor.threads()
    assert row.state == doctor.RED and "OMP_NUM_THREADS=" in row.todo


def test_a_tier_that_crashes_or_is_wrong_is_one_red_line(monkeypatch: Any) -> None:
    lines = [{"start": "amx"}, {"tier": "amx", "right": False, "found": "error 0.5"}, {"start": "avx2"}]
    out = "\n".join(map(json.dumps, lines))
    monkeypatch.setattr(subprocess, "run", lambda *a, **k: subprocess.CompletedProcess(a, -4, out, ""))
    wrong, crashed = doctor.examine([doctor.self_test])
    assert (wrong.name, wrong.state, crashed.name, crashed.state) == ("amx", "RED", "avx2", "RED")
    assert "QM_CPU_ISA" in wrong.todo and "signal 4" in crashed.found and "QM_CPU_ISA" in crashed.todo


def test_the_self_test_sees_a_wrong_kernel(monkeypatch: Any) -> None:
    right, _ = selftest.of_tier("scalar")
    assert right <= selftest.TOLERANCE
    linear = ops.linear

    def off(*args: Any, **kwargs: Any) -> torch.Tensor:
        y = linear(*args, **kwargs)
        y[0, 0] += 1e-3 * y.abs().max()
        return y

    monkeypatch.setattr(ops, "linear", off)
    assert selftest.of_tier("scalar")[0] > selftest.TOLERANCE


def run(arguments: list[str], *first: Path) -> subprocess.CompletedProcess[str]:
    paths = os.pathsep.join(map(str, [*first, SRC]))
    environment = {**os.environ, "PYTHONPATH": paths, "OMP_NUM_THREADS": "1"}
    command = [sys.executable, "-m", "lowbit", *arguments]
    return subprocess.run(command, capture_output=True, text=True, env=environment, timeout=120)


@pytest.mark.gpu
def test_the_self_test_of_a_gpu_is_right_of_every_layer() -> None:
    assert selftest.of_device("cuda:0") <= selftest.CUDA_TOLERANCE


def test_it_speaks_where_torch_cannot_be_imported(tmp_path: Path) -> None:
    (tmp_path / "torch.py").write_text('raise ImportError("libcudart.so.13: cannot open")\n')
    done = run(["doctor"], tmp_path)
    assert done.returncode == 1 and "what to do" in done.stdout and "libcudart.so.13" in done.stdout
    assert "Traceback" not in done.stdout + done.stderr
    other = run(["inspect", "x"], tmp_path)
    assert other.returncode == 2 and "libcudart.so.13" in other.stderr and other.stderr.count("\n") == 1


def test_what_a_library_is_refused_for_is_one_line(tmp_path: Path, monkeypatch: Any) -> None:
    def elf(machine: int) -> Path:
        file = tmp_path / f"{machine}.so"
        file.write_bytes(b"\x7fELF" + bytes(14) + machine.to_bytes(2, "little"))
        return file

    here = {"x86_64": 62, "aarch64": 183}.get(platform.machine(), 62)
    other = 183 if here == 62 else 62
    assert "this Python runs on" in native.unloadable(elf(other), "wrong ELF class")
    monkeypatch.setattr(platform, "libc_ver", lambda: ("glibc", "2.17"))
    assert "found glibc 2.17" in native.unloadable(elf(here), "GLIBC_2.28 not\nfound")
    monkeypatch.setattr(platform, "libc_ver", lambda: ("", ""))
    said = native.unloadable(elf(here), "Error relocating")
    assert "musl" in said and "\n" not in said
    monkeypatch.setattr(torch, "__version__", "2.9.1+cpu")
    with pytest.raises(ImportError, match="found torch 2.9.1.cpu, accepted is 2.10 or newer"):
        native.load()


def test_a_second_copy_under_one_namespace_is_refused(tmp_path: Path, monkeypatch: Any) -> None:
    """torch would end the process."""
    native.load()  # the same file again is nothing new
    monkeypatch.setattr(native, "LIBRARY", tmp_path / "_C.so")
    with pytest.raises(ImportError, match="found another copy with the operators torch.ops.lowbit"):
        native.load()
