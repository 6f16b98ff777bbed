"""`make wheels`: every file that is released, built, checked and tried. Progress on stdout, the files in build/wheels.

    python wheels/build.py x86_64 aarch64 sdist [--torches 2.10.0 2.14.1]

x86_64: CPU tiers and the CUDA library. aarch64: CPU tiers, cross-compiled, tried under qemu by arm.py. sdist: built into a
wheel with a compiler, and without one into the package in plain torch. A wheel is tried in environments of its own
(build/wheels/env-<torch>, kept), which hold no more than pip installs with it.
"""

from __future__ import annotations

import argparse
import os
import re
import shutil
import subprocess
import sys
import tarfile
import zipfile
from collections.abc import Mapping, Sequence
from pathlib import Path

import abi

ROOT = Path(__file__).resolve().parents[1]
OUT = ROOT / "build" / "wheels"
LIBRARIES = {"x86_64": ("_C.so", "_cuda13.so"), "aarch64": ("_C.so",)}
TORCHES = ("2.10.0", "2.14.1")  # the oldest that is served, the newest that can be installed here
BUILD = ("-m", "pip", "wheel", "-qq", "--no-build-isolation", "--no-deps")


def say(text: str) -> None:
    print(f"== {text}", flush=True)


def run(*command: str | Path, env: Mapping[str, str] | None = None, cwd: Path = ROOT) -> None:
    """A command that must succeed; what it said is shown where it does not."""
    environment = {**os.environ, **(env or {})}
    done = subprocess.run(
        command, cwd=cwd, env=environment, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
    )
    lines = [line for line in done.stdout.splitlines() if "is ignored: it is neither" not in line]
    if done.returncode:
        raise SystemExit("\n".join([*lines, f"failed with {done.returncode}: {' '.join(map(str, command))}"]))
    for line in lines:
        if line.startswith("smoke:"):
            print(line, flush=True)


def wheel(machine: str) -> Path:
    """Build, check before stripping, retag, check what is inside."""
    say(f"building the wheel for {machine}")
    raw = OUT / "raw"
    options = {"x86_64": ["-Ccmake.define.LOWBIT_CUDA=ON"], "aarch64": []}[machine]
    environment = {"LOWBIT_NATIVE": "1"}
    if machine == "aarch64":
        options = [f"-Ccmake.define.CMAKE_TOOLCHAIN_FILE={ROOT / 'cmake' / 'aarch64-linux-gnu.cmake'}"]
        environment["_PYTHON_HOST_PLATFORM"] = "linux-aarch64"
    shutil.rmtree(raw, ignore_errors=True)
    run(sys.executable, *BUILD, "-w", raw, *options, ".", env=environment)
    (built,) = raw.glob("*.whl")
    if not built.name.endswith(f"py3-none-linux_{machine}.whl"):
        raise SystemExit(f"{built.name}: found another tag than py3-none-linux_{machine}")
    unstripped = [ROOT / "build" / f"py3-none-linux_{machine}" / name for name in LIBRARIES[machine]]
    known = abi.shims(abi.torch_headers())
    wrong = [f"{file.name}: {line}" for file in unstripped for line in abi.check(file, known)]
    wrong += [line for file in unstripped for line in second_opinion(file, machine)]
    if wrong:
        raise SystemExit("\n".join(wrong))
    say(f"abi: {', '.join(file.name for file in unstripped)} are manylinux_2_28, stable torch 2.10, without Python")
    return repaired(built, machine)


def second_opinion(library: Path, machine: str) -> list[str]:
    """What the check that the `kernels` project publishes finds, on the file that is not stripped."""
    from kernel_abi_check import ObjectFile

    found = ObjectFile(library).check_manylinux("manylinux_2_28")
    lines = [f"{library.name} ({machine}): {v.name} needs {v.dep}_{v.version}" for v in found]
    return lines + [f"{library.name}: {v.name} of Python" for v in ObjectFile(library).check_python_abi("3.10")]


def repaired(built: Path, machine: str) -> Path:
    """auditwheel's tag; nothing of others goes in."""
    tag = f"manylinux_2_28_{machine}"
    for old in OUT.glob(f"*{machine}.whl"):
        old.unlink()
    excluded = [word for name in ("libtorch.so", "libtorch_cpu.so", "libcudart.so.13") for word in ("--exclude", name)]
    # "auto": the oldest platform that fits; auditwheel knows another machine's platforms by no name
    audited = OUT / "audited"
    shutil.rmtree(audited, ignore_errors=True)
    run(sys.executable, "-m", "auditwheel", "repair", "--plat", "auto", "--only-plat", *excluded, "-w", audited, built)
    (file,) = audited.glob("*.whl")
    oldest = re.search(rf"manylinux_2_(\d+)_{machine}\.whl$", file.name)
    if not oldest or int(oldest[1]) > 28:
        raise SystemExit(f"auditwheel: found {file.name}, accepted is {tag} or older")
    run(sys.executable, "-m", "wheel", "tags", "--remove", "--platform-tag", tag, file)
    (file,) = audited.glob(f"lowbit-*-py3-none-{tag}.whl")
    file = file.rename(OUT / file.name)
    names = zipfile.ZipFile(file).namelist()
    libraries = sorted(name.rpartition("/")[2] for name in names if ".so" in name)
    if libraries != sorted(LIBRARIES[machine]) or any(".libs/" in name for name in names):
        raise SystemExit(f"{file.name}: found {libraries}, accepted is {sorted(LIBRARIES[machine])}")
    say(f"{file.name}: {file.stat().st_size / 1e6:.1f} MB")
    return file


def environment(torch: str) -> Path:
    """The Python of a fresh environment with that torch and what lowbit requires; made once."""
    folder = OUT / f"env-{torch}"
    python = folder / "bin" / "python"
    if not (folder / "ready").exists():
        say(f"environment with torch {torch} (the first time this downloads)")
        shutil.rmtree(folder, ignore_errors=True)
        run(sys.executable, "-m", "venv", folder)
        run(python, "-m", "pip", "install", "-qq", f"torch=={torch}", "numpy", "safetensors", "tqdm")
        (folder / "ready").touch()
    return python


def tried(file: Path, torch: str) -> None:
    """Install a wheel and run the smoke tests, outside the source tree."""
    python = environment(torch)
    say(f"{file.name} with torch {torch}")
    run(python, "-m", "pip", "install", "-qq", "--force-reinstall", "--no-deps", "--no-index", file)
    run(python, "-m", "pip", "check")
    run(python, ROOT / "wheels" / "smoke.py", cwd=OUT, env={"OMP_NUM_THREADS": "1"})


def sdist(torch: str) -> None:
    """The source archive; from it a wheel without CUDA, and without a compiler the package in plain torch."""
    say("building the sdist")
    for old in OUT.glob("*.tar.gz"):
        old.unlink()
    code = "import sys; from scikit_build_core.build import build_sdist; build_sdist(sys.argv[1])"
    run(sys.executable, "-c", code, OUT)
    (archive,) = OUT.glob("*.tar.gz")
    with tarfile.open(archive) as tar:
        names = [name.partition("/")[2] for name in tar.getnames()]
    for name in ("CMakeLists.txt", "LICENSE", "csrc/torch_ops.cpp", "cmake/compat/sys/single_threaded.h"):
        if name not in names:
            raise SystemExit(f"{archive.name}: found no {name}")
    stray = [name for name in names if re.search(r"\.(so|whl|o)$|^(build|\.venv)/", name)]
    if stray:
        raise SystemExit(f"{archive.name}: found {stray[0]}, accepted are sources")
    say(f"{archive.name}: {archive.stat().st_size / 1e6:.1f} MB; a wheel from it, without CUDA")
    folder = OUT / "from-sdist"
    for kind, options, env, tag in (
        ("compiled", ["-Ccmake.define.LOWBIT_CUDA=OFF"], {"LOWBIT_NATIVE": "1"}, "linux"),
        ("plain", [], {"CXX": "no-compiler-here", "LOWBIT_NATIVE": "0"}, "any"),
    ):
        shutil.rmtree(folder, ignore_errors=True)
        run(sys.executable, *BUILD, "-w", folder, *options, archive, env=env)
        (made,) = folder.glob("*.whl")
        libraries = [name for name in zipfile.ZipFile(made).namelist() if name.endswith(".so")]
        if (kind == "compiled") != (libraries == ["lowbit/_C.so"]) or f"-{tag}" not in made.name.replace("_", "-"):
            raise SystemExit(f"sdist, {kind}: found {made.name} with {libraries}")
        if kind == "compiled":
            tried(made, torch)
        else:
            python = environment(torch)
            run(python, "-m", "pip", "install", "-qq", "--force-reinstall", "--no-deps", "--no-index", made)
            run(python, ROOT / "wheels" / "smoke_plain.py", cwd=OUT, env={"OMP_NUM_THREADS": "1"})


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("what", nargs="*", default=["x86_64", "aarch64", "sdist"])
    parser.add_argument("--torches", nargs="+", default=list(TORCHES), help="versions the x86_64 wheel is tried with")
    args = parser.parse_args(argv)
    OUT.mkdir(parents=True, exist_ok=True)
    for what in args.what:
        if what == "x86_64":
            file = wheel(what)
            for torch in args.torches:
                tried(file, torch)
        elif what == "aarch64":
            file = wheel(what)
            run(sys.executable, ROOT / "wheels" / "arm.py", file, cwd=ROOT)
        elif what == "sdist":
            sdist(args.torches[-1])
        else:
            raise SystemExit(f"found {what!r}, accepted are x86_64, aarch64, sdist")
    say("all files: " + ", ".join(sorted(f.name for f in OUT.iterdir() if f.suffix in (".whl", ".gz"))))
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
