"""What a chip allows: a time for every operator from its operations and bytes (Williams, Waterman, Patterson,
"Roofline", CACM 2009, section 3), and what that makes of a step and of an utterance.

All times here are floors with every operand from memory: every unit at its peak, memory at its bandwidth, one
overlapping the other, no time between kernels. Something that stays in a cache can be faster than its floor. They are
predicted, and say so wherever they stand beside something measured.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

from lowbit.prove import work
from lowbit.prove.chips import Chip
from lowbit.prove.shapes import OMNIVOICE, Shape
from lowbit.prove.work import GROUP, PRECISIONS, RANK, Segment, Work

FRAMES = 25  # of audio a second, OmniVoice's codec
STEPS = 32  # of an utterance
CODEC_FLOPS = 13.6e9  # a second of audio through the codec's decoder (counted on omnivoice 0.2.1), float32
CODEC_BYTES = 4 * 21_600_000  # its weights; activations are not counted


class Row(NamedTuple):
    """An operator on a chip, run ``times`` a step. Of one execution: ``operations``, ``bytes``, ``compute`` and ``memory`` in seconds."""

    name: str
    precision: str
    unit: str
    times: int
    operations: int
    bytes: int
    compute: float
    memory: float
    break_even: float
    note: str = ""

    @property
    def intensity(self) -> float:
        """Operations a byte."""
        return self.operations / self.bytes if self.bytes else 0.0

    @property
    def seconds(self) -> float:
        """The floor of one execution."""
        return max(self.compute, self.memory)

    @property
    def total(self) -> float:
        """The floor of all executions in a step."""
        return self.times * self.seconds

    @property
    def bound(self) -> str:
        """What takes longer: "compute" or "memory"."""
        return "compute" if self.compute > self.memory else "memory"

    @property
    def share(self) -> float:
        """Compute time over memory time: intensity over break-even where one unit does all; above 1 is compute-bound."""
        return self.compute / self.memory if self.memory else 0.0


def place(item: Work, chip: Chip, note: str = "") -> Row:
    """Put an operator on a chip. Work of several units takes their times one after the other."""
    compute, units = 0.0, []
    for wanted, operations in item.operations:
        unit, _ = chip.unit(wanted)
        units.append(unit)
        compute += operations / chip.rate(unit)
    operations = sum(count for _, count in item.operations)
    memory = item.bytes / chip.bandwidth.per_second
    return Row(
        item.name, item.precision, units[0], item.times, operations, item.bytes, compute, memory,
        chip.break_even(units[0]), note,
    )  # fmt: skip


def linears(
    sizes: Sequence[tuple[int, int, int]], chip: Chip, precisions: Sequence[str] = tuple(PRECISIONS),
    group: int = GROUP, rank: int = RANK,
) -> list[Row]:  # fmt: skip
    """Every size (M, N, K) in every precision; where x is quantized, the pass that does so is a row before the product."""
    found = []
    for m, n, k in sizes:
        for name in precisions:
            p, note = PRECISIONS[name].on(chip)
            found += [place(w, chip, note) for w in work.linear(m, n, k, p, group=group, rank=rank)]
    return found


class Step(NamedTuple):
    """A forward in one precision; ``rows`` in the order of execution."""

    precision: str
    note: str
    rows: list[Row]

    @property
    def seconds(self) -> float:
        """The floor of the step."""
        return sum(row.total for row in self.rows)

    @property
    def operations(self) -> int:
        return sum(row.times * row.operations for row in self.rows)

    @property
    def bytes(self) -> int:
        return sum(row.times * row.bytes for row in self.rows)

    @property
    def kernels(self) -> int:
        """Operators executed, each a launch of its own on a GPU."""
        return sum(row.times for row in self.rows)


def step(
    shape: Shape, segments: Sequence[Segment], chip: Chip, precision: str, group: int = GROUP, rank: int = RANK
) -> Step:
    """A forward of ``shape`` on ``chip``."""
    p, note = PRECISIONS[precision].on(chip)
    return Step(precision, note, [place(item, chip) for item in work.step(shape, segments, p, group=group, rank=rank)])


class Utterance(NamedTuple):
    """Floors in seconds: ``steps`` steps of the backbone, and the codec's decoder; ``rtf`` is their sum over the audio."""

    precision: str
    audio: float
    steps: int
    backbone: float
    codec: float

    @property
    def rtf(self) -> float:
        return (self.backbone + self.codec) / self.audio


def utterance(found: Step, chip: Chip, audio: float, steps: int = STEPS) -> Utterance:
    """``audio`` seconds from ``steps`` times ``found``. Prompt encoding and silence trimming on the CPU are left out."""
    compute = CODEC_FLOPS * audio / chip.rate(chip.unit("fp32")[0])
    codec = max(compute, CODEC_BYTES / chip.bandwidth.per_second)
    return Utterance(found.precision, audio, steps, steps * found.seconds, codec)


class Published(NamedTuple):
    """A real-time factor that others measured and published."""

    engine: str
    precision: str
    rtf: float


# Mean of ten voice-clone samples on an NVIDIA L4, lengths not given: T. Do, "W4A4 CUDA kernel for voice clone",
# blog.dotieuthien.com/posts/nunchaku-w4-quantization-memory-bound, section 5.
PUBLISHED = (
    Published("PyTorch", "fp16", 0.145),
    Published("TRT-LLM", "fp16", 0.094),
    Published("TRT-LLM", "fp8", 0.071),
    Published("W4A4 + CUDA graph", "w4a4", 0.056),
)
PUBLISHED_ON = "NVIDIA L4"


def published(shape: Shape | None, chip: Chip) -> tuple[Published, ...]:
    """What stands beside a prediction for this model on this chip: nothing but for OmniVoice at its size on an L4."""
    return PUBLISHED if shape == OMNIVOICE and chip.name == PUBLISHED_ON else ()


def frames(tokens: int, audio: float | None) -> int:
    """Frames of ``audio`` seconds; where None, the share that 10 s behind a reference of 5 s have of 685 tokens."""
    return round(tokens * 250 / 685) if audio is None else round(audio * FRAMES)


def as_dict(row: Row) -> dict[str, Any]:
    """For JSON. GFLOP and MB are decimal; ``us`` is one execution, ``us_total`` all in a step."""
    return {
        "name": row.name, "precision": row.precision or None, "runs_at": row.unit, "count": row.times,
        "gflop": row.operations / 1e9, "mb": row.bytes / 1e6, "flop_per_byte": row.intensity,
        "break_even": row.break_even, "share_of_break_even": row.share, "bound": row.bound,
        "us": 1e6 * row.seconds, "us_total": 1e6 * row.total, "note": row.note or None,
    }  # fmt: skip
