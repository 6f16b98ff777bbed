"""`make hub`: lay out build/hub/quant-matmul/build/<variant>/ for the `kernels` loader, from the sources of lowbit.

    python hub/build.py [--only noarch] [--out FOLDER]

A variant is the public files of hub/quant-matmul, the Python files of lowbit that lowbit.functional needs (found by reading
their imports) in `_lowbit`, the libraries, and metadata.json with a digest of all of it. Every variant has an operator
namespace of its own, made of its name and a hash of the sources. The loader picks a variant by how torch was built, not by
what the machine has, so the CUDA variants carry the CPU kernels too, and one without CUDA kernels stands where we have none.
The libraries are linked in the wheels' build folders, from the same objects.
"""

from __future__ import annotations

import argparse
import ast
import base64
import hashlib
import json
import os
import shutil
import subprocess
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).resolve().parents[1]
PUBLIC = ROOT / "hub" / "quant-matmul"
PACKAGE = ROOT / "src" / "lowbit"
OUT = ROOT / "build" / "hub" / "quant-matmul"
VERSION = 1  # of the public surface: the branch v1 of the hub repository
ALLOWED = {"torch"}  # beside the standard library, by the rules of the hub
# The package's own __init__ files import everything in their folder; of three of them this kernel needs less.
SHORT = {
    "__init__.py": '"""The part of lowbit that quant-matmul needs."""\n',
    "nn/__init__.py": '"""QuantLinear."""\n\nfrom .linear import QuantLinear as QuantLinear\n',
    "formats/__init__.py": '"""Readers of loose tensors."""\n',
    "quantize/__init__.py": '"""Rounding to nearest."""\n\nfrom .gptq import effective as effective\nfrom .rtn import rtn as rtn\n',
}


class Variant(NamedTuple):
    name: str
    backend: str  # of torch: cpu or cuda
    machine: str  # "" where nothing is compiled
    cuda: bool = False  # carries the CUDA library

    @property
    def copy(self) -> str:
        return self.name.replace("torch-stable-abi210-", "").replace("torch-", "noarch-").replace("-linux", "")


VARIANTS = (
    Variant("torch-stable-abi210-cpu-x86_64-linux", "cpu", "x86_64"),
    Variant("torch-stable-abi210-cpu-aarch64-linux", "cpu", "aarch64"),
    Variant("torch-stable-abi210-cu130-x86_64-linux", "cuda", "x86_64", cuda=True),
    # torch for CUDA 12 on x86_64, and every torch since 2.11 that the registry has for aarch64: the CPU kernels alone
    Variant("torch-stable-abi210-cu126-x86_64-linux", "cuda", "x86_64"),
    Variant("torch-stable-abi210-cu130-aarch64-linux", "cuda", "aarch64"),
    Variant("torch-cpu", "cpu", ""),
    Variant("torch-cuda", "cuda", ""),
)
COMPILERS = {"x86_64": "g++", "aarch64": "aarch64-linux-gnu-g++"}


def closure() -> list[str]:
    """The files of lowbit that lowbit.functional needs, as paths inside the package."""
    found: dict[str, None] = {}
    todo = ["functional.py", *SHORT]
    while todo:
        name = todo.pop()
        if name in found:
            continue
        found[name] = None
        for target in imports(name, source(name)):
            folder = PACKAGE / target
            if folder.with_suffix(".py").is_file():
                todo.append(f"{target}.py")
            elif (folder / "__init__.py").is_file():
                todo.append(f"{target}/__init__.py")
    return sorted(found)


def source(name: str) -> str:
    return SHORT.get(name) or (PACKAGE / name).read_text("utf-8")


def imports(name: str, text: str) -> Iterator[str]:
    """What a file of the package imports from it, as paths; SystemExit where it imports what the hub does not allow."""
    package = Path(name).parent.parts
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, ast.Import):
            outside = [alias.name.split(".")[0] for alias in node.names]
        elif isinstance(node, ast.ImportFrom) and not node.level:
            outside = [(node.module or "").split(".")[0]]
        elif isinstance(node, ast.ImportFrom):
            base = package[: len(package) - node.level + 1]
            stem = "/".join([*base, *(node.module.split(".") if node.module else [])])
            yield from ([stem] if node.module else [])
            yield from ("/".join([*([stem] if stem else []), alias.name]) for alias in node.names)
            continue
        else:
            continue
        for top in outside:
            if top not in sys.stdlib_module_names and top not in ALLOWED:
                raise SystemExit(f"{name}: imports {top}, accepted in the hub are the standard library and torch")


def tree_hash() -> str:
    """Of every source that goes into a variant: 12 hex digits."""
    folders = [*(ROOT / "csrc").rglob("*"), *(ROOT / "cmake").rglob("*"), *PUBLIC.rglob("*"), ROOT / "CMakeLists.txt"]
    files = [
        f
        for f in folders
        if f.is_file() and f.suffix in (".cpp", ".h", ".cu", ".cuh", ".inc", ".cmake", ".map", ".py", ".txt")
    ]
    digest = hashlib.sha256()
    for file in sorted({*files, *(PACKAGE / name for name in closure())}):
        digest.update(str(file.relative_to(ROOT)).encode() + b"\0" + file.read_bytes() + b"\0")
    return digest.hexdigest()[:12]


def identity(variant: Variant, digest: str) -> str:
    return f"_quant_matmul_{variant.copy.replace('-', '_')}_{digest}"


def libraries(machine: str, ids: Sequence[str], with_cuda: Sequence[str]) -> Path:
    """Link the copies in the folder where the wheel of that machine is built, whose objects serve here too."""
    folder = ROOT / "build" / f"py3-none-linux_{machine}"
    targets = [f"_C-{name}" for name in ids] + [f"_cuda13-{name}" for name in with_cuda]
    options = [f"-DLOWBIT_COPIES={';'.join(ids)}", f"-DPython3_EXECUTABLE={sys.executable}", "-DLOWBIT_CUDA=ON"]
    if machine == "aarch64":
        options.append(f"-DCMAKE_TOOLCHAIN_FILE={ROOT / 'cmake' / 'aarch64-linux-gnu.cmake'}")
    for command in (
        ["cmake", "-G", "Ninja", "-S", str(ROOT), "-B", str(folder), *options],
        ["cmake", "--build", str(folder), "--target", *targets],
    ):
        done = subprocess.run(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
        if done.returncode:
            raise SystemExit(f"{done.stdout}\nfailed: {' '.join(command)}")
    return folder


def digest_of(folder: Path) -> dict[str, object]:
    files = {
        file.relative_to(folder).as_posix(): base64.b64encode(hashlib.sha256(file.read_bytes()).digest()).decode()
        for file in sorted(folder.rglob("*"))
        if file.is_file()
    }
    return {"algorithm": "sha256", "files": files}


def lay_out(variant: Variant, digest: str, out: Path) -> Path:
    """Write one variant, complete but for its libraries' being there."""
    name = identity(variant, digest)
    folder = out / "build" / variant.name
    shutil.rmtree(folder, ignore_errors=True)
    for file in PUBLIC.rglob("*.py"):
        inside = file.relative_to(PUBLIC)
        if inside.parts[0] != "tests":
            (folder / inside).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy(file, folder / inside)
    for inside in closure():
        text = source(inside)
        if inside == "native.py":
            assert text.count('OPS = "lowbit"') == 1
            text = text.replace('OPS = "lowbit"', f'OPS = "{name}"')
        (folder / "_lowbit" / inside).parent.mkdir(parents=True, exist_ok=True)
        (folder / "_lowbit" / inside).write_text(text, "utf-8")
    if variant.machine:
        built = ROOT / "build" / f"py3-none-linux_{variant.machine}"
        strip = {"x86_64": "strip", "aarch64": "aarch64-linux-gnu-strip"}[variant.machine]
        for stem in ("_C", "_cuda13")[: 1 + variant.cuda]:
            target = folder / "_lowbit" / f"{stem}.so"
            subprocess.run([strip, "-o", target, built / f"{stem}-{name}.so"], check=True)
    metadata = {
        "name": "quant-matmul",
        "id": name,
        "version": VERSION,
        "license": "Apache-2.0",
        "python-depends": [],
        "kernel-depends": [],
        "backend": {"type": variant.backend},
        "digest": digest_of(folder),
    }
    (folder / "metadata.json").write_text(json.dumps(metadata, indent=2) + "\n", "utf-8")
    return folder


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "--only", choices=("x86_64", "aarch64", "noarch"), nargs="+", default=["x86_64", "aarch64", "noarch"]
    )
    parser.add_argument("--out", type=Path, default=OUT)
    args = parser.parse_args(argv)
    sys.path.insert(0, str(ROOT / "wheels"))
    import abi

    digest = tree_hash()
    wanted = [variant for variant in VARIANTS if (variant.machine or "noarch") in args.only]
    missing = sorted({v.machine for v in wanted if v.machine and not shutil.which(COMPILERS[v.machine])})
    for machine in missing:
        print(f"SKIPPED hub variants for {machine}: {COMPILERS[machine]} not found", flush=True)
    wanted = [variant for variant in wanted if variant.machine not in missing]
    for machine in sorted({variant.machine for variant in wanted} - {""}):
        mine = [variant for variant in wanted if variant.machine == machine]
        ids, with_cuda = [identity(v, digest) for v in mine], [identity(v, digest) for v in mine if v.cuda]
        print(f"== linking {len(ids)} copies for {machine}", flush=True)
        folder = libraries(machine, ids, with_cuda)
        files = [folder / f"_C-{name}.so" for name in ids] + [folder / f"_cuda13-{name}.so" for name in with_cuda]
        if abi.main(list(map(os.fspath, files))):
            return 1
    for variant in wanted:
        made = lay_out(variant, digest, args.out)
        size = sum(file.stat().st_size for file in made.rglob("*") if file.is_file())
        print(f"{variant.name}: {identity(variant, digest)}, {size / 1e6:.1f} MB", flush=True)
    card = PUBLIC / "README.md"
    shutil.copy(card, args.out / "README.md")
    shutil.copy(ROOT / "LICENSE", args.out / "LICENSE")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
