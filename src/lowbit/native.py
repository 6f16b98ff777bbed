"""The compiled library: where it is, what its operators are called, and what to say where it is absent or does not load.

An installation without it (built where there was no compiler) has the same operators in plain torch: their schemas are
here, what they compute is in plain.py.
"""

from __future__ import annotations

import platform
import sys
import warnings
from pathlib import Path
from typing import Any

OPS = "lowbit"  # the operator namespace; a copy laid out for the `kernels` loader has one of its own
OLDEST_TORCH = (2, 10)
LIBRARY = Path(__file__).with_name("_C.so")
CUDA_LIBRARY = Path(__file__).with_name("_cuda13.so")
COMPILED = LIBRARY.exists()
# What to do where it is absent; a copy for the `kernels` loader has its own words.
REMEDY = "Install a wheel for this platform, or build from source with a C++20 compiler (docs/install.md)"

# As csrc/torch_ops.cpp, packed_ops.cpp and decoder_ops.cpp have them; tests/test_plain.py compares.
SCHEMAS = (
    "cpu_isas() -> str",
    "cpu_isa() -> str",
    'quantize_rows(Tensor x, int group_size=0, str isa="", *, Tensor? perm=None, Tensor? smooth=None, int hadamard=0)'
    " -> (Tensor, Tensor)",
    "linear(Tensor x, Tensor weight, int n, int group_size, int bits, int activation, Tensor? bias=None, "
    'Tensor? perm=None, Tensor? smooth=None, str isa="", *, int hadamard=0, Tensor? down=None, Tensor? up=None) -> Tensor',
    "cuda_quantize(Tensor x, Tensor(a!)? residual, Tensor? norm, float eps, Tensor? smooth, Tensor? down, int rank, "
    "bool hadamard, bool silu, bool tile_order) -> (Tensor, Tensor, Tensor)",
    "cuda_linear(Tensor codes, Tensor scales, Tensor? low, Tensor weight, Tensor channel, Tensor? bias, Tensor? up, "
    "int n, int mode, int out, int row=-1, bool gated=False) -> Tensor",
    "cuda_quantize4(Tensor x, Tensor(a!)? residual, Tensor? norm, float eps, Tensor? smooth, Tensor? down, int rank, "
    "bool hadamard, bool silu, float clip) -> (Tensor, Tensor, Tensor, Tensor)",
    "cuda_linear4(Tensor codes, Tensor group_scales, Tensor scales, Tensor? low, Tensor weight, Tensor weight_scales, "
    "Tensor? bias, Tensor? up, int n, int out) -> Tensor",
    "cuda_norm_rope(Tensor(a!) qkv, Tensor? q_norm, Tensor? k_norm, Tensor cosines, Tensor sines, int heads, "
    "int kv_heads, float eps) -> ()",
    "cuda_dequantize(Tensor codes, Tensor scales, Tensor? zeros, int k, int group_size, int bits, int out) -> Tensor",
    "cuda_inverse_rms(Tensor x, float eps) -> Tensor",
    "cuda_guided_score(Tensor logits, Tensor guidance, Tensor penalty, Tensor temperature, Tensor noise, Tensor valid, "
    "Tensor tokens, int mask_id) -> (Tensor, Tensor)",
    "cuda_attention(Tensor q, Tensor k, Tensor v, Tensor bounds, float scale) -> Tensor",
    "cuda_attention_quantize(Tensor q, Tensor k, Tensor v, Tensor bounds, float scale, bool tile_order) -> (Tensor, Tensor)",
    "cuda_reveal(Tensor(a!) tokens, Tensor pred, Tensor score, Tensor k) -> ()",
    'add_norm(Tensor(a!) x, Tensor? add, Tensor weight, float eps, str isa="") -> Tensor',
    'silu_mul(Tensor x, str isa="") -> Tensor',
    "packed_attention(Tensor(a!) qkv, Tensor? q_norm, Tensor? k_norm, Tensor cosines, Tensor sines, Tensor bounds, "
    'int heads, int kv_heads, float eps, float scale, str isa="") -> Tensor',
    "decoder_new(Tensor[] tensors, int[] sizes, float eps, float scale) -> int",
    "decoder_free(int decoder) -> ()",
    "decoder_scratch(int decoder, int rows) -> int",
    "decoder_step(int decoder, Tensor ids, int position, Tensor(a!) keys, Tensor(b!) values, Tensor cosines, "
    'Tensor sines, Tensor(c!) scratch, Tensor(d!) out, str isa="") -> ()',
)
_KEPT: list[Any] = []  # the operators of plain torch live as long as their Library


def warn_if_plain() -> None:
    """Say once that this installation is slow: when the package is imported."""
    if not COMPILED and not _KEPT:
        _KEPT.append(None)
        warnings.warn(
            "lowbit: this installation has no compiled kernels (_C.so), so the slow reference in plain torch runs. "
            + REMEDY,
            stacklevel=3,
        )


def load() -> None:
    """Give torch the operators. ImportError in one line where torch is too old or the library does not load."""
    import torch

    version = tuple(int(part) for part in torch.__version__.split("+")[0].split(".")[:2])
    if version < OLDEST_TORCH:
        raise ImportError(
            f"lowbit: found torch {torch.__version__}, accepted is 2.10 or newer: pip install 'torch>=2.10'"
        )
    # Two libraries under one namespace end the process, so the second is refused here.
    if str(LIBRARY.resolve()) not in torch.ops.loaded_libraries and hasattr(getattr(torch.ops, OPS), "cpu_isa"):
        raise ImportError(
            f"lowbit: found another copy with the operators torch.ops.{OPS} in this process, accepted is one"
        )
    if not COMPILED:
        warn_if_plain()
        library: Any = torch.library.Library(OPS, "DEF")  # type: ignore[no-untyped-call]
        for schema in SCHEMAS:
            library.define(schema)
        _KEPT.append(library)
        return
    try:
        torch.ops.load_library(str(LIBRARY))  # type: ignore[no-untyped-call]
    except OSError as error:
        raise ImportError(unloadable(LIBRARY, str(error))) from error


def implement(name: str, function: object, key: str) -> None:
    """What an operator of plain torch computes under a dispatch key. For plain.py alone."""
    library = _KEPT[-1]
    library.impl(name, function, key)


def unloadable(library: Path, said: str) -> str:
    """Why a library did not load, in one line: for another machine, another libc, or as the loader says."""
    machine, built = platform.machine(), _machine_of(library)
    if built and built != machine:
        return f"{library.name}: found a library for {built}, this Python runs on {machine}: install the wheel for {machine}"
    why, remedy = (
        libc() or "cannot be loaded",
        "" if libc() else ": reinstall lowbit, and report it with `lowbit doctor`",
    )
    return f"{library.name}: {why} ({' '.join(said.split())}){remedy}"


def libc() -> str:
    """Why the libc of this Python cannot run a wheel, or ""."""
    name, version = platform.libc_ver()
    if sys.platform != "linux":
        return ""
    if name != "glibc":
        return f"found {name or 'an unknown libc (musl?)'}, accepted is glibc 2.28 or newer: musl (Alpine) has no wheels, use an image with glibc"
    if tuple(int(part) for part in version.split(".")[:2]) < (2, 28):
        return f"found glibc {version}, accepted is 2.28 or newer: use a newer system or image"
    return ""


def _machine_of(library: Path) -> str:
    """The machine that an ELF file is for, "" where that is another kind of file or machine."""
    with library.open("rb") as file:
        head = file.read(20)
    if head[:4] != b"\x7fELF":
        return ""
    return {62: "x86_64", 183: "aarch64"}.get(int.from_bytes(head[18:20], "little"), "")
