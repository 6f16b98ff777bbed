"""Ceilings of chips: memory bandwidth and dense arithmetic rates, each with where it comes from.

A rate with structured sparsity is twice the dense one on every NVIDIA chip below; data sheets of Ada and Hopper print
that one first. Here all are dense, with float32 (or int32) accumulation.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import NamedTuple

from lowbit.types import FormatError

UNITS = ("fp32", "fp16", "fp8", "int8", "int4")  # fp32: the vector units; the others: tensor cores or dot products
_FALLBACK = {"int4": "int8", "fp8": "fp16", "fp16": "fp32"}


class Rate(NamedTuple):
    """``per_second``: operations (a multiply-add is two) or bytes; ``source``: data sheet, arithmetic or measurement."""

    per_second: float
    source: str


class Chip(NamedTuple):
    """``rates``: a unit of ``UNITS`` to its rate, of all cores; what the chip lacks is absent. ``cores`` of a CPU, else
    None. ``pattern`` finds the chip in the ``chip`` field of the benches' lines (see ``bench/timer.py``)."""

    name: str
    bandwidth: Rate
    rates: Mapping[str, Rate]
    pattern: str
    cores: int | None = None

    def unit(self, wanted: str) -> tuple[str, str]:
        """The unit that does the work of ``wanted`` here, and what to say where it is another one ("" where not)."""
        found = wanted
        while found not in self.rates and found in _FALLBACK:
            found = _FALLBACK[found]
        if found == wanted:
            return found, ""
        kind = "tensor core" if self.cores is None else "arithmetic"
        return found, f"no {wanted.upper()} {kind}: runs at {found.upper()}"

    def rate(self, unit: str) -> float:
        """Operations per second of a unit that the chip has."""
        return self.rates[unit].per_second

    def break_even(self, unit: str) -> float:
        """Operations per byte at which memory and arithmetic take the same time."""
        return self.rate(unit) / self.bandwidth.per_second

    def of_cores(self, count: int) -> Chip:
        """The same CPU with ``count`` of its cores at work; bandwidth is shared and stays. A GPU stays as it is."""
        if self.cores is None:
            return self
        if not 1 <= count <= self.cores:
            raise FormatError(f"--threads: found {count}, accepted on {self.name} is 1 to {self.cores}")
        share = count / self.cores
        rates = {unit: Rate(rate.per_second * share, f"{count} of {rate.source}") for unit, rate in self.rates.items()}
        return self._replace(rates=rates, cores=count)

    def matches(self, chip: str) -> bool:
        """Whether a bench's ``chip`` field means this one."""
        return re.search(self.pattern, chip) is not None


def _tera(source: str, **rates: float) -> dict[str, Rate]:
    return {unit: Rate(rate * 1e12, source) for unit, rate in rates.items()}


def _giga(bandwidth: float, source: str) -> Rate:
    return Rate(bandwidth * 1e9, source)


def _cycles(cores: int, ghz: float, what: str, **per_cycle: int) -> dict[str, Rate]:
    """Rates of a CPU from operations a cycle and core."""
    return {
        unit: Rate(cores * ghz * 1e9 * each, f"{cores} cores x {ghz} GHz x {each} operations a cycle: {what}")
        for unit, each in per_cycle.items()
    }


_L4 = "NVIDIA L4 data sheet (2023), which prints rates with sparsity: half of them"
_ADA = "NVIDIA Ada GPU architecture white paper (2022), RTX 4090 table, float32 accumulation, dense"
_HOPPER = "NVIDIA data sheet, SXM, which prints rates with sparsity: half of them"

CHIPS: dict[str, Chip] = {
    "l4": Chip(
        "NVIDIA L4", _giga(300, "NVIDIA L4 data sheet (2023)"),
        _tera(_L4, fp32=30.3, fp16=121, fp8=242.5, int8=242.5)
        | _tera("twice INT8, as in the Ada white paper; the data sheet has no INT4 row", int4=485),
        r"\bL4\b",
    ),
    "a10": Chip(
        "NVIDIA A10", _giga(600, "NVIDIA A10 data sheet (2021)"),
        _tera("NVIDIA A10 data sheet (2021), dense", fp32=31.2, fp16=125, int8=250, int4=500), r"\bA10\b",
    ),
    "a100": Chip(
        "NVIDIA A100 80 GB SXM", _giga(2039, "NVIDIA A100 data sheet (2021)"),
        _tera("NVIDIA A100 white paper (2020), dense", fp32=19.5, fp16=312, int8=624, int4=1248), r"\bA100\b",
    ),
    "h100": Chip(
        "NVIDIA H100 SXM", _giga(3350, "NVIDIA H100 data sheet (2023)"),
        _tera(_HOPPER, fp32=67, fp16=989.5, fp8=1979, int8=1979), r"\bH100\b",
    ),
    "h200": Chip(
        "NVIDIA H200 SXM", _giga(4800, "NVIDIA H200 data sheet (2023); copies reach 4300, docs/cuda.md"),
        _tera(_HOPPER, fp32=67, fp16=989.5, fp8=1979, int8=1979), r"\bH200\b",
    ),
    "rtx4090": Chip(
        "NVIDIA RTX 4090", _giga(1008, _ADA), _tera(_ADA, fp32=82.6, fp16=165.2, fp8=330.3, int8=660.6, int4=1321.2),
        r"RTX 4090",
    ),
    "pi5": Chip(
        "Raspberry Pi 5", _giga(12, "what copies and reads reach, docs/kernels.md; LPDDR4X-4267 x 32 bit is 17.1"),
        _cycles(4, 2.4, "Cortex-A76, two 128-bit fmla", fp32=16)
        | _cycles(4, 2.4, "Cortex-A76, two 128-bit sdot", int8=64),
        r"\b0xd0b\b|Cortex-A76|Raspberry Pi 5", 4,
    ),
    "pi4": Chip(
        "Raspberry Pi 4", _giga(4.3, "what copies and reads reach, docs/kernels.md; LPDDR4-3200 x 32 bit is 12.8"),
        _cycles(4, 1.8, "Cortex-A72, one 128-bit fmla", fp32=8)
        | _cycles(4, 1.8, "Cortex-A72, one smlal of 8 products", int8=16),
        r"\b0xd08\b|Cortex-A72|Raspberry Pi 4", 4,
    ),
    "zen5": Chip(
        "AMD Ryzen 9 9950X (Zen 5)", _giga(89.6, "two channels of DDR5-5600"),
        _cycles(16, 4.3, "base clock, two 512-bit fma", fp32=64)
        | _cycles(16, 4.3, "base clock, two 512-bit vpdpbusd", int8=256),
        r"family 26\b|Ryzen 9 99", 16,
    ),
}  # fmt: skip


def preset(name: str) -> Chip:
    """A chip by its key; letters, spaces and dashes are read freely ("RTX 4090"). FormatError lists the keys."""
    key = re.sub(r"[^a-z0-9]", "", name.lower())
    if key not in CHIPS:
        raise FormatError(f"--device: found {name!r}, accepted are {', '.join(CHIPS)}, or cpu or cuda with --measure")
    return CHIPS[key]
