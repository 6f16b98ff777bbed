"""Which kernel a weight gets, decided once when it is packed. Best first; the first row that takes the weight runs."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import NamedTuple

from . import layouts, native, ops, ops_cuda, plain
from .types import QuantizedWeight


class Kernel(NamedTuple):
    """A row: ``refuses`` gives None, or the reason why this kernel cannot run the weight."""

    name: str
    layout: str
    refuses: Callable[[QuantizedWeight, str], str | None]


# Functions of the module, no closures: a layer keeps its Choice and must be picklable.
def _int_panels(bits: int, q: QuantizedWeight, device: str) -> str | None:
    if device != "cpu":
        return f"the tensors are on {device}"
    if q.bits != bits:
        return f"the codes have {q.bits} bits"
    if bits == 8 and q.group_size > 66310:
        return f"a group of {q.group_size} 8-bit codes can exceed int32"
    return None


def _tiles(q: QuantizedWeight, device: str) -> str | None:
    if not device.startswith("cuda"):
        return f"the tensors are on {device}"
    return ops_cuda.refuses(device) or layouts.mma_tiles.refuses(q)


def _floats(q: QuantizedWeight, device: str) -> str | None:
    if not device.startswith("cuda"):
        return f"the tensors are on {device}"
    return ops_cuda.refuses(device) or ("K is odd" if q.bits == 4 and q.k % 2 else None)


def _takes_everything(q: QuantizedWeight, device: str) -> str | None:
    return None


KERNELS: tuple[Kernel, ...] = (
    Kernel("cpu_linear_w4", layouts.MACHINE, partial(_int_panels, 4)),
    Kernel("cpu_linear_w8", layouts.MACHINE, partial(_int_panels, 8)),
    Kernel("cuda_tiles", "mma_tiles", _tiles),
    Kernel("cuda_float", "plain", _floats),
    Kernel("reference", "plain", _takes_everything),
)


# The tiers of a build, best first: csrc/cpu/dispatch.cpp lists the same.
TIERS = {
    "x86_panels": ("amx", "avx512vnni", "avxvnni", "avx2", "scalar"),
    "arm_panels": ("i8mm", "dotprod", "neon", "scalar"),
}


class Choice(NamedTuple):
    kernel: Kernel
    passed_over: tuple[tuple[str, str], ...]  # (name, why not)


def choose(q: QuantizedWeight, device: str = "cpu") -> Choice:
    passed: list[tuple[str, str]] = []
    for kernel in KERNELS:
        why = kernel.refuses(q, device)
        if why is None:
            return Choice(kernel, tuple(passed))
        passed.append((kernel.name, why))
    raise AssertionError("the reference takes everything")


def tiers() -> list[tuple[str, str]]:
    """Every tier this build knows for the CPU, with "runs", "slower" or the reason why it does not run."""
    if not native.COMPILED:
        return [
            *((name, "this installation has no compiled kernels") for name in TIERS[layouts.MACHINE]),
            (plain.TIER, "runs"),
        ]
    have, chosen = ops.cpu_isas(), ops.cpu_isa()
    rows: list[tuple[str, str]] = []
    above = True
    for name in TIERS[layouts.MACHINE]:
        if name not in have:
            rows.append((name, "this CPU lacks it"))
        elif name == chosen:
            rows.append((name, "runs"))
            above = False
        else:
            rows.append((name, "QM_CPU_ISA lowers the choice" if above else "slower"))
    return rows
