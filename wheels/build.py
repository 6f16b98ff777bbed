"""`make wheels`: every file that is released, built, checked and tried. Progress on stdout, the files in build/wheels.

    python wheels/build.py x86_64 aarch64 sdist [--torches 2.10.0 2.14.1] [--strict]

x86_64: CPU tiers and the CUDA library. aarch64: CPU tiers, cross-compiled, tried under qemu by arm.py. sdist: built into a
wheel with a compiler, and without one into the package in plain torch. A wheel is tried in environments of its own
(build/wheels/env-<torch>, kept), which hold no more than pip installs with it: by default with the torch of
requirements/torch.txt, in `make nightly` with the oldest and the newest, whose builds for CUDA take 6 GB each. The libraries
are linked where `make test` built them, build/py3-none-linux_x86_64, and what is up to date there is not compiled again.
"""

from __future__ import annotations

import argparse
import re
import shutil
import sys
import tarfile
import zipfile
from collections.abc import Sequence
from functools import partial
from pathlib import Path

import abi
import arm
from shell import ROOT, Parts, Unavailable, fetch, run, say

OUT = ROOT / "build" / "wheels"
LIBRARIES = {"x86_64": ("_C.so", "_cuda13.so"), "aarch64": ("_C.so",)}
OLDEST, NEWEST = "2.10.0", "2.14.1"  # that is served; that can be installed here
FAILED: dict[str, Unavailable] = {}  # an environment that cannot be had is asked for once
BUILD = ("-m", "pip", "wheel", "-qq", "--no-build-isolation", "--no-deps")


def smoke(python: Path, script: str) -> None:
    """Run the tests outside the source tree, and show what they found."""
    said = run(python, ROOT / "wheels" / script, cwd=OUT, env={"OMP_NUM_THREADS": "1"})
    print("\n".join(line for line in said.splitlines() if line.startswith("smoke:")), flush=True)


def wheel(machine: str) -> Path:
    """Build, check before stripping, retag, check what is inside."""
    say(f"building the wheel for {machine}")
    raw = OUT / "raw"
    options = {"x86_64": ["-Ccmake.define.LOWBIT_CUDA=ON"], "aarch64": []}[machine]
    environment = {"LOWBIT_NATIVE": "1"}
    if machine == "aarch64":
        if not shutil.which(arm.COMPILER):
            raise Unavailable(f"{arm.COMPILER} not found: on Debian and Ubuntu, install g++-aarch64-linux-gnu")
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


def pinned() -> str:
    """The torch of .venv, for which pip has downloaded everything already."""
    said = re.search(r"^torch==(\S+)", (ROOT / "requirements" / "torch.txt").read_text(), re.MULTILINE)
    assert said
    return said[1]


def environment(torch: str) -> Path:
    """The Python of a fresh environment with that torch and what lowbit requires; made once."""
    folder = OUT / f"env-{torch}"
    python = folder / "bin" / "python"
    if torch in FAILED:
        raise FAILED[torch]
    if not (folder / "ready").exists():
        say(f"environment with torch {torch} (the first time this downloads)")
        shutil.rmtree(folder, ignore_errors=True)
        run(sys.executable, "-m", "venv", folder)
        wanted = (f"torch=={torch}", "numpy", "safetensors", "tqdm")
        try:
            fetch(f"torch {torch}", python, "-m", "pip", "install", "-qq", *wanted)
        except Unavailable as why:
            shutil.rmtree(folder)  # half of it would fill the disk for the parts to come
            FAILED[torch] = why
            raise
        (folder / "ready").touch()
    return python


def tried(file: Path, torch: str) -> None:
    """Install a wheel and run the smoke tests."""
    python = environment(torch)
    say(f"{file.name} with torch {torch}")
    run(python, "-m", "pip", "install", "-qq", "--force-reinstall", "--no-deps", "--no-index", file)
    run(python, "-m", "pip", "check")
    run(python.with_name("lowbit"), "--help")  # the command is there
    smoke(python, "smoke.py")


def sdist() -> Path:
    """The source archive."""
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
    say(f"{archive.name}: {archive.stat().st_size / 1e6:.1f} MB")
    return archive


def from_sdist(archive: Path) -> dict[str, Path]:
    """Two wheels of the archive: without CUDA, and without a compiler, which gives the package in plain torch."""
    wheels = {}
    for kind, options, env, tag in (
        ("compiled", ["-Ccmake.define.LOWBIT_CUDA=OFF"], {"LOWBIT_NATIVE": "1"}, "linux"),
        ("plain", [], {"CXX": "no-compiler-here", "LOWBIT_NATIVE": "0"}, "any"),
    ):
        say(f"a wheel from {archive.name}: {kind}")
        folder = OUT / f"from-sdist-{kind}"
        shutil.rmtree(folder, ignore_errors=True)
        run(sys.executable, *BUILD, "-w", folder, *options, archive, env=env)
        (made,) = folder.glob("*.whl")
        libraries = [name for name in zipfile.ZipFile(made).namelist() if name.endswith(".so")]
        if (kind == "compiled") != (libraries == ["lowbit/_C.so"]) or f"-{tag}" not in made.name.replace("_", "-"):
            raise SystemExit(f"sdist, {kind}: found {made.name} with {libraries}")
        wheels[kind] = made
    return wheels


def plain(file: Path, torch: str) -> None:
    """Install the package without compiled kernels and see that it says so and computes."""
    python = environment(torch)
    run(python, "-m", "pip", "install", "-qq", "--force-reinstall", "--no-deps", "--no-index", file)
    smoke(python, "smoke_plain.py")


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("what", nargs="*", default=["x86_64", "aarch64", "sdist"])
    parser.add_argument(
        "--torches", nargs="+", default=[pinned()], help="versions the wheels of this machine are tried with"
    )
    parser.add_argument("--strict", action="store_true", help="a part that is skipped is a failure")
    args = parser.parse_args(argv)
    unknown = sorted(set(args.what) - {"x86_64", "aarch64", "sdist"})
    if unknown:
        parser.error(f"found {unknown[0]!r}, accepted are x86_64, aarch64, sdist")
    OUT.mkdir(parents=True, exist_ok=True)
    parts = Parts(args.strict)
    made: dict[str, Path] = {}
    for machine in ("x86_64", "aarch64"):
        if machine in args.what:
            parts.part(f"wheel for {machine}", lambda machine=machine: made.update({machine: wheel(machine)}))
    if "x86_64" in made:
        for torch in args.torches:
            parts.part(f"x86_64 with torch {torch}", partial(tried, made["x86_64"], torch))
    if "aarch64" in made:
        parts.part("aarch64 under qemu", partial(arm.tried, made["aarch64"]))
    if "sdist" in args.what:
        archive = sdist()
        parts.part("wheels of the sdist", lambda: made.update(from_sdist(archive)))
        parts.part("sdist, compiled", partial(tried, made["compiled"], args.torches[-1]))
        parts.part("sdist, plain", partial(plain, made["plain"], args.torches[-1]))
    say("all files: " + ", ".join(sorted(f.name for f in OUT.iterdir() if f.suffix in (".whl", ".gz"))))
    return parts.end()


if __name__ == "__main__":
    raise SystemExit(main())
