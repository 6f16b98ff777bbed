"""What operators do: operations by unit and the bytes that have to move, for linears and for steps of a transformer.

Bytes are compulsory ones: every operand read once, every result written once, nothing kept in a cache between
operators. Operators are those of a fused engine: qkv and gate-up are one product each; norm, SiLU·mul and quantize are
one pass; attention keeps its scores to itself.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from lowbit.prove.chips import Chip
from lowbit.prove.shapes import Shape
from lowbit.types import FormatError

GROUP = 64  # columns of a 4-bit weight that share a scale
RANK = 16  # of the low-rank branch of w4a4, one a product
_QUANTIZE = 3  # vector operations an element: maximum, multiply, round
_HADAMARD = 6  # log2(64) additions an element
_NORM = 5  # residual, square, sum, and two products an element
_SILU = 6
_ROPE = 12  # norm, two products and a sum for each of a pair
_SCORE = (
    12  # guidance, running maximum and sum of exponentials, for one class of a conditional and an unconditional row
)


class Precision(NamedTuple):
    """``unit`` multiplies; ``weight`` and ``act`` are bits as stored. Outputs and all else are 16-bit."""

    name: str
    unit: str
    weight: int
    act: int
    low_rank: bool = False

    def on(self, chip: Chip) -> tuple[Precision, str]:
        """As it runs on ``chip``: activations in a width its unit reads, and the reason where that is another unit."""
        unit, why = chip.unit(self.unit)
        widths = {"int8": 8, "fp8": 8, "int4": 4}
        return self._replace(unit=unit, act=max(self.act, widths.get(unit, 16))), why


PRECISIONS: dict[str, Precision] = {
    p.name: p
    for p in (
        Precision("fp16", "fp16", 16, 16),
        Precision("fp8", "fp8", 8, 8),
        Precision("w8a8", "int8", 8, 8),
        Precision("w4a8", "int8", 4, 8),
        Precision("w4a4", "int4", 4, 4, low_rank=True),
    )
}


class Work(NamedTuple):
    """One operator: ``operations`` [(unit, how many)], the main unit first; ``bytes`` moved; run ``times`` a step;
    ``precision`` of a product and of what makes its x, "" of all else."""

    name: str
    operations: tuple[tuple[str, int], ...]
    bytes: int
    times: int = 1
    precision: str = ""


def product(
    name: str, m: int, n: int, k: int, p: Precision, *, wide: int = 2, group: int = GROUP, rank: int = RANK,
    count: int = 1,
) -> Work:  # fmt: skip
    """y [M, N] = x [M, K] W [N, K]ᵀ, with the second half of the low rank where ``p`` has one.

    ``wide``: bytes of an element of y and of an unquantized x. A quantized x has a float32 scale a row, in 4 bits one
    per 64 columns; a weight has a float32 scale a row in 8 bits, an fp16 one per ``group`` columns in 4.
    """
    moved = n * k * p.weight // 8 + m * n * wide
    moved += m * k * wide if p.act == 16 else _codes(m, k, p)
    moved += 0 if p.weight == 16 else 4 * n if p.weight == 8 else 2 * n * -(-k // group)
    operations = [(p.unit, 2 * m * n * k)]
    if p.low_rank and rank:
        moved += 2 * rank * (m + n)
        operations.append(("fp16", 2 * m * n * rank))
    return Work(name, tuple(operations), moved, count, p.name)


def _codes(m: int, k: int, p: Precision) -> int:
    """Bytes of quantized rows [M, K] with their scales."""
    return m * k * p.act // 8 + 4 * m * (-(-k // 64) if p.act == 4 else 1)


def rows(
    name: str, m: int, k: int, p: Precision, *, reads: int = 1, keeps: int = 0, extra: int = 0, wide: int = 2,
    rank: int = RANK, count: int = 1,
) -> Work:  # fmt: skip
    """One pass over rows [M, K] that ends as the x of a product: ``reads`` elements in and ``keeps`` elements written
    back (a residual) for each one out, ``extra`` vector operations an element before the rounding; with the Hadamard
    and the first half of the low rank where ``p`` has one."""
    moved = m * k * wide * (reads + keeps)
    if p.act == 16:
        return Work(name, (("fp32", m * k * extra),), moved + m * k * wide, count, p.name)
    each = extra + _QUANTIZE + (_HADAMARD if p.low_rank else 0)
    moved += _codes(m, k, p)
    operations = [("fp32", m * k * each)]
    if p.low_rank and rank:
        moved += 2 * rank * (m + k)
        operations.append(("fp16", 2 * m * k * rank))
    return Work(name, tuple(operations), moved, count, p.name)


def linear(m: int, n: int, k: int, p: Precision, **more: int) -> list[Work]:
    """A linear of its own: the product, after a pass that quantizes x where ``p`` does so."""
    size = f"{m}x{n}x{k}"
    first = {key: value for key, value in more.items() if key != "group"}
    return ([] if p.act == 16 else [rows(f"quantize {size}", m, k, p, **first)]) + [product(size, m, n, k, p, **more)]


class Segment(NamedTuple):
    """Rows that attend to each other: ``queries`` new ones, ``keys`` with those that a cache holds."""

    queries: int
    keys: int
    causal: bool

    @property
    def pairs(self) -> int:
        """Query and key pairs that are scored."""
        seen = self.queries * self.keys
        return seen - self.queries * (self.queries - 1) // 2 if self.causal else seen


def attention(shape: Shape, segments: Sequence[Segment], count: int = 1) -> Work:
    """Scores and values of every head; keys and values are read once for all queries of a segment."""
    pairs, queries, keys = (sum(x) for x in zip(*((s.pairs, s.queries, s.keys) for s in segments)))
    moved = 2 * shape.head_dim * (2 * queries * shape.heads + 2 * keys * shape.kv_heads)
    return Work("attention", (("fp16", 4 * pairs * shape.heads * shape.head_dim),), moved, count)


def text_segments(tokens: int, context: int) -> list[Segment]:
    """``tokens`` new ones behind ``context`` in the cache."""
    return [Segment(tokens, context + tokens, True)]


def audio_segments(tokens: int, target: int) -> list[Segment]:
    """The packed rows of a guided step: with the prompt, and the ``target`` frames alone. Both ways, no cache."""
    if not 0 < 2 * target <= tokens:
        raise FormatError(
            f"--tokens: found {tokens} for {target} frames of audio, accepted is {2 * target} or more: "
            "the frames go through with the prompt and once more without it"
        )
    return [Segment(tokens - target, tokens - target, False), Segment(target, target, False)]


def step(
    shape: Shape, segments: Sequence[Segment], p: Precision, *, group: int = GROUP, rank: int = RANK
) -> list[Work]:
    """A forward over the rows of ``segments``: the layers, and what stands around them. Heads are 16-bit."""
    m, n, h = sum(s.queries for s in segments), shape.layers, shape.hidden
    queries, both = shape.heads * shape.head_dim, (shape.heads + shape.kv_heads) * shape.head_dim
    more = {"rank": rank, "count": n}
    sized = {"group": group, **more}
    rotated = Work(
        "norm, rope of q, k" if shape.qk_norm else "rope of q, k", (("fp32", m * both * _ROPE),), 4 * m * both
    )
    layers = [
        rows("add, norm" + _quantize(p), m, h, p, reads=2, keeps=1, extra=_NORM, **more),
        product("qkv", m, both + shape.kv_heads * shape.head_dim, h, p, **sized),
        rotated._replace(times=n),
        attention(shape, segments, n),
        *([] if p.act == 16 else [rows("quantize", m, queries, p, **more)]),
        product("o", m, h, queries, p, **sized),
        rows("add, norm" + _quantize(p) + " (2)", m, h, p, reads=2, keeps=1, extra=_NORM, **more),
        product("gate, up", m, 2 * shape.intermediate, h, p, **sized),
        rows("silu, mul" + _quantize(p), m, shape.intermediate, p, reads=2, extra=_SILU, **more),
        product("down", m, h, shape.intermediate, p, **sized),
    ]
    return layers + _around(shape, segments, m)


def _quantize(p: Precision) -> str:
    return "" if p.act == 16 else ", quantize"


def _around(shape: Shape, segments: Sequence[Segment], m: int) -> list[Work]:
    """Embedding, last norm and heads; of audio, the embeddings of all codebooks and the scoring of what they predict."""
    half, h, rows_out = PRECISIONS["fp16"], shape.hidden, 1
    moved, sums = 4 * m * h, 0
    if shape.codebooks:
        target = segments[-1].queries
        rows_out = 2 * target
        sums = rows_out * h * (shape.codebooks - 1)
        moved = 2 * target * h * shape.codebooks + 2 * h * rows_out  # the prompt's rows stay as they are
    out = [
        Work("embed", (("fp32", sums),), moved),
        rows("norm (last)", rows_out, h, half, reads=2, extra=_NORM),
        product("heads" if shape.codebooks else "head", rows_out, shape.classes, h, half),
    ]
    if shape.codebooks:
        scored = rows_out // 2 * shape.classes
        out.append(Work("guide, score", (("fp32", scored * _SCORE),), 2 * rows_out * shape.classes))
    return out
