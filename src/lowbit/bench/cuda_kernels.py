"""The table of docs/kernels.md: bytes and operations of each CUDA kernel, the limit they set, the measured share of it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from lowbit.bench import markdown
from lowbit.bench.cuda_figures import TARGETS_OF, latest
from lowbit.layouts import mma_tiles as tiles

BEGIN, END = "<!-- made by lowbit bench numbers -->", "<!-- end -->"
BYTES_A_SECOND = 4.3e12  # copies on an H200, measured
PRODUCTS_A_SECOND = 132 * 4096 * 1.84e9  # int8 on its tensor cores: multiprocessors, products a cycle, clock under load


class Row(NamedTuple):
    """A kernel at one case: the line, its value, the bytes and int8 products of one launch (fp16 ones count twice), what is
    known to bound it."""

    kernel: str
    what: str
    case: tuple[Any, ...]  # kind, name, shape, m
    key: str
    bytes: float
    products: float
    bound: str


def _product(kernel: str, name: str, n: int, k: int, m: int, key: str, bound: str) -> Row:
    weight = n // 64 * (k // 128) * tiles.BYTES[tiles.TWO_LEVEL]
    return Row(
        kernel, f"{n}×{k}, M={m}", ("gemm", "w4two", name, m), key, weight + m * k + m * n * 2, m * n * k, bound
    )  # fmt: skip


def _attention(c: int, m: int, bound: str) -> Row:
    case = ("attention", f"{m} = {c} + {m - c} rows, 16/8 heads", None, None)
    products = 2 * 16 * 128 * (c * c + (m - c) ** 2)
    # fp16 runs at half the rate of int8
    return Row("`attention`", f"{m} rows, 16 on 8 heads", case, "us", m * (32 + 16) * 256, 2 * products, bound)


def _gemv(n: int, k: int, m: int, bound: str) -> Row:
    weight = n // 64 * (k // 128) * tiles.BYTES[tiles.TWO_LEVEL]
    return Row("`gemv`", f"{n}×{k}, M={m}", ("gemv", "w4two", f"{n}x{k}", m), "us", weight + m * (k + 2 * n), 0, bound)


_START = "launch and end of a CTA: the loop itself ran at 90 % of the tensor rate in the prototype's stamps"
_SPLIT = "L2 into the multiprocessors (small tiles), and the exchange of the split"
_TAIL = "the end of a tile (low rank, scales, transposing through shared memory) stops the tensor cores"
ROWS = (
    _product("`gemm_sm90`", "qkv", 4096, 1024, 685, "table", _START),
    _product("`gemm_sm90`", "gate_up", 6144, 1024, 685, "table", _START),
    _product("`gemm_sm90`", "o", 1024, 2048, 685, "table", _SPLIT),
    _product("`gemm_sm90`", "down", 1024, 3072, 685, "table", _SPLIT),
    _product("`gemm_sm90`", "qkv", 4096, 1024, 1890, "table", _TAIL),
    _product("`gemm_sm90`", "gate_up", 6144, 1024, 1890, "table", _TAIL),
    _product(
        "`gemm_mma`", "qkv", 4096, 1024, 685, "portable",
        "for other chips: on Hopper its warp-wide instructions reach a quarter of the rate that the limit takes",
    ),
    _gemv(4096, 4096, 1, "launch, and one round trip to memory"),
    _gemv(4096, 4096, 16, "the same"),
    _gemv(11008, 4096, 1, "2.6 groups of channels a CTA"),
    Row(
        "`quantize`", "685×1024, residual, norm, rank 16", ("quantize", "685x1024", None, None), "add_norm_r16",
        685 * 1024 * 7, 0, "one chain of latencies (docs/cuda.md has its cycles); 86 CTAs of eight rows on 132 multiprocessors",
    ),
    Row(
        "`quantize`", "1890×1024, residual, norm, rank 16", ("quantize", "1890x1024", None, None), "add_norm_r16",
        1890 * 1024 * 7, 0, "the same, several rows a CTA",
    ),
    *(Row(
        "`quantize`, plain", f"{m}×3072, nothing beside it", ("quantize", f"{m}x3072", None, None), "bare_r0",
        m * 3072 * 3, 0, "L2: x comes from there, not from memory; a warp has 1024 columns of a row",
    ) for m in (685, 1890)),
    Row(
        "`norm_rope`", "685 rows, 16 + 8 heads", ("rope", "685 rows, 16/8 heads", None, None), "us",
        685 * 24 * 128 * 4 + 685 * 512, 0, "launch, and one round trip to L2: a thread has two loads of x in flight",
    ),
    _attention(435, 685, "seven blocks of keys in a row and the start of a CTA; 88 CTAs on 132 multiprocessors"),
    _attention(1140, 1890, "36 blocks of keys on the fullest multiprocessor, 28 on average; a block takes twice its products' time"),
    Row(
        "`attention`, rounded", "685 rows, 16 on 8 heads", ("joined", "attention, 16 heads on 8", None, 685), "us",
        685 * (32 * 256 + 2048), 4 * 16 * 128 * (435**2 + 250**2), "the same, a cluster's launch, and the way of the maxima to its CTAs",
    ),
    Row(
        "`guided_score`", "250 frames, 8 books", ("guided_score", "250 frames, 8 books, 1025 classes, fp16", None, None), "us",
        2 * 250 * 8 * 1025 * 2, 0, "launch, and three passes over a row of classes",
    ),
    Row("`reveal`", "2000 slots", ("reveal", "2000 slots", None, None), "us", 2000 * 20, 0, "launch, one CTA"),
    Row(
        "`inverse_rms`", "685×1024", ("inverse_rms", "685x1024", None, None), "us",
        685 * 1024 * 2 + 685 * 4, 0, "by its size, launch",
    ),
    Row(
        "`dequantize`", "4096×4096, 4 bits, groups of 64", ("dequantize", "4096x4096", None, None), "us",
        4096 * 4096 * 2.5 + 4096 * 64 * 4, 0, "by its size, memory: what it writes",
    ),
)  # fmt: skip


def table(lines: Sequence[Mapping[str, Any]]) -> str:
    """The table of the latest lines of the H200, and what its columns are."""
    mine = {of[1:]: line for of, line in latest(lines).items() if of[0] == TARGETS_OF}
    rows = []
    for row in ROWS:
        memory, compute = 1e6 * row.bytes / BYTES_A_SECOND, 1e6 * row.products / PRODUCTS_A_SECOND
        limit, by = max((compute, "tensor cores"), (memory, "memory"))
        value = mine.get(row.case, {}).get(row.key)
        measured = ("not measured", "") if value is None else (f"{value:.1f}", f"{100 * limit / value:.0f} %")
        work = f"{row.products / 1e9:.1f} G" if row.products else ""
        rows.append([row.kernel, row.what, f"{row.bytes / 1e6:.1f}", work, f"{limit:.1f}, {by}", *measured, row.bound])
    head = ("kernel", "case", "MB", "int8 products", "limit, µs", "measured, µs", "share", "what bounds it")
    return markdown.table(head, rows)


def fill(page: str, lines: Sequence[Mapping[str, Any]]) -> str:
    """The page with the table between its two marks made anew; ValueError where a mark is missing."""
    before, began, rest = page.partition(BEGIN)
    _, ended, after = rest.partition(END)
    if not began or not ended:
        raise ValueError(f"found no {BEGIN} ... {END}, accepted is a page with both")
    return f"{before}{BEGIN}\n\n{table(lines)}\n\n{END}{after}"
