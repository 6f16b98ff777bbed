"""Plain codes -> the tiles that the CUDA kernels read (csrc/cuda/tile.cuh has the drawing), and back. Runs on any device.

A tile is 64 channels x 128 columns, tiles lie in the order [N / 64][K / 128]; N is padded to 64, K to 256, with zeros.
Columns of a 64-block go by slots: slot (s, r, t, b) holds column 16t + 8s + 4r + b. In a 4-bit tile the 16-byte chunk of
(warp w, half h, lane = 4g + t) holds in byte b of word j the channel 16w + 8 (j & 1) + g: slot (0, j >> 1, t, b) of half h
in its low nibble, slot (1, j >> 1, t, b) in its high one. Behind 4096 B of codes: one int8 multiplier (two-level) or one
fp16 scale (group) per channel and half. An 8-bit tile is 64 rows of 128 columns by slots, chunk c of row r at c ^ (r & 7).
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn.functional import pad

from ..reference import two_level
from ..types import FormatError, LowRank, QuantizedWeight

CHANNELS, COLUMNS, GROUP, K_STEP = 64, 128, 64, 256
W8, CHANNEL, TWO_LEVEL, GROUPS = range(4)  # csrc/cuda/kernels.h: Mode
BYTES = (8192, 4096, 4224, 4352)  # of a tile


class Tiles(NamedTuple):
    """w[n, k] = channel[n] * (code * step or scale of its group of 64 columns)."""

    weight: Tensor  # uint8 [NP / 64, KP / 128, bytes]
    channel: Tensor  # float32 [NP]
    mode: int


class Branch(NamedTuple):
    """The low rank as matrix operands; ``down`` is divided and ``up`` multiplied by a power of two a rank, so that downᵀ
    times values up to 127 stays below fp16's 65504 whatever they are."""

    down: Tensor  # float16 [R / 16, ceil(K / 64) * 4, 32, 8]: of 64 columns step s has 16t + 4s .. + 3 for lane 4g + t
    up: Tensor  # float16 [R / 16, NP / 16, 32, 8]


def tile_order(columns: Tensor) -> Tensor:
    """[..., K] in plain column order -> byte order of a row of activations for the GEMM, K a multiple of 64."""
    blocks = columns.reshape(*columns.shape[:-1], columns.shape[-1] // 64, 4, 2, 2, 4)  # t, s, r, b
    return blocks.movedim(-4, -2).reshape(columns.shape)


def plain_order(columns: Tensor) -> Tensor:
    """The inverse of ``tile_order``."""
    blocks = columns.reshape(*columns.shape[:-1], columns.shape[-1] // 64, 2, 2, 4, 4)  # s, r, t, b
    return blocks.movedim(-2, -4).reshape(columns.shape)


def refuses(q: QuantizedWeight) -> str | None:
    """Why these tiles cannot hold the weight, or None."""
    if q.zeros is not None:
        return "the codes have zero points"
    whole = q.group_size == q.k
    if q.perm is not None:
        return "the columns are permuted"
    if q.bits == 8 and not whole:
        return f"8-bit codes have groups of {q.group_size}, accepted is one scale a row"
    if not whole and q.group_size % GROUP:
        return f"the group is {q.group_size} columns, accepted are multiples of {GROUP} and one group a row"
    if q.k % 16 or (q.hadamard and q.k % 64):
        return f"K is {q.k}, accepted are multiples of {64 if q.hadamard else 16}"
    if q.k > 32768:
        return f"K is {q.k}, accepted is at most 32768"
    if q.low_rank is not None and (q.low_rank.down.shape[1] % 16 or q.low_rank.down.shape[1] > 256):
        return f"the low rank is {q.low_rank.down.shape[1]}, accepted are multiples of 16 up to 256"
    if q.bits == 4 and not whole and two_level(q.scales) is None and _half_scales(q.scales) is None:
        return "the group scales of a row are no fp16 numbers times one power of two"
    return None


def pack(q: QuantizedWeight) -> Tiles:
    """FormatError where ``refuses`` says why."""
    why = refuses(q)
    if why is not None:
        raise FormatError(f"weight: {why}")
    rows, columns = -q.n % CHANNELS, -q.k % K_STEP
    codes = pad(q.codes, (0, columns, 0, rows))
    if q.group_size == q.k:
        channel = pad(q.scales[:, 0].float(), (0, rows))
        return Tiles(_bytes(codes) if q.bits == 8 else _nibbles(codes), channel, W8 if q.bits == 8 else CHANNEL)
    per = q.group_size // GROUP
    levels = two_level(q.scales)
    if levels is not None:
        side, channel, mode = levels.steps, levels.channel, TWO_LEVEL
    else:
        scaled = _half_scales(q.scales)
        assert scaled is not None  # refuses has looked
        (side, channel), mode = scaled, GROUPS
    wide = side.repeat_interleave(per, 1)[:, : -(-q.k // GROUP)]
    wide = pad(wide, (0, (q.k + columns) // GROUP - wide.shape[1], 0, rows))
    packed = torch.cat([_nibbles(codes + 8), _side(wide)], 2)
    return Tiles(packed, pad(channel, (0, rows)), mode)


class Rows(NamedTuple):
    """A 4-bit weight for INT4 tensor cores: rows as a checkpoint has them, N padded to 128, K to 256, with zeros."""

    weight: Tensor  # uint8 [NP, KP / 2], two's complement, element 2j in the low nibble
    scales: Tensor  # float32 [KP / 64, NP]


def gated_order(n: int) -> Tensor:
    """int64 [N]: the rows of a gate and of its up, N / 2 each, eight and eight in turn, as a GEMM that ends with
    silu(gate) * up takes them (N a multiple of 16)."""
    return torch.arange(n).view(2, n // 16, 8).transpose(0, 1).flatten()


def pack_rows(q: QuantizedWeight) -> Rows:
    """For a 4-bit weight that ``refuses`` does not refuse."""
    rows, columns = -q.n % 128, -q.k % K_STEP
    codes = pad(q.codes & 15, (0, columns, 0, rows)).to(torch.uint8)
    per = q.k if q.group_size == q.k else q.group_size
    scales = q.scales.float().repeat_interleave(-(-per // GROUP), 1)[:, : -(-q.k // GROUP)]
    wide = pad(scales, (0, (q.k + columns) // GROUP - scales.shape[1], 0, rows))
    return Rows((codes[:, ::2] | codes[:, 1::2] << 4).contiguous(), wide.T.contiguous())


def unpack(tiles: Tiles, n: int, k: int) -> tuple[Tensor, Tensor]:
    """-> codes int8 [n, k] and float32 scales [n, 1 or ceil(k / 64)], their product being the weight."""
    packed, channel, mode = tiles
    nt, kb = packed.shape[:2]
    if mode == W8:
        chunks = packed.reshape(nt, kb, CHANNELS, 8, 16).gather(3, _swizzle(packed.device).expand(nt, kb, -1, -1, 16))
        codes = plain_order(chunks.permute(0, 2, 1, 3, 4).reshape(nt * CHANNELS, kb * COLUMNS)).view(torch.int8)
        return codes[:n, :k], channel[:n, None]
    words = packed[..., :4096].reshape(nt, kb, 4, 2, 8, 4, 2, 2, 4)  # w h g t r jl b
    halves = torch.stack([words & 15, words >> 4], -1)  # ... s
    codes = halves.permute(0, 2, 7, 4, 1, 3, 5, 9, 6, 8).reshape(nt * CHANNELS, kb * COLUMNS)[:n, :k]
    if mode == CHANNEL:
        return ((codes ^ 8).to(torch.int8) - 8), channel[:n, None]
    raw = packed[..., 4096:].contiguous()
    side = raw.view(torch.int8) if mode == TWO_LEVEL else raw.view(torch.float16)
    rows = side.reshape(nt, kb, 4, 8, 2, 2).permute(0, 2, 5, 3, 1, 4).reshape(nt * CHANNELS, kb * 2)
    scales = rows.float() * channel[:, None]
    return codes.to(torch.int8) - 8, scales[:n, : -(-k // GROUP)]


def pack_branch(low_rank: LowRank, n: int, channels: int = CHANNELS) -> Branch:
    """``up`` is padded to a multiple of ``channels``. FormatError where fp16 cannot hold the factors."""
    down, up = (t.detach().float() for t in low_rank)
    most = down.abs().sum(0) * 127 / 65504
    shift = torch.where(most > 1, most.log2().ceil(), torch.zeros_like(most))
    down, up = (down * 2.0**-shift).half(), (up * 2.0**shift).half()
    if not bool(torch.isfinite(down).all()) or not bool(torch.isfinite(up).all()):
        raise FormatError(
            "low_rank: found values beyond float16, accepted is at most 65504 once the factors are balanced"
        )
    return Branch(
        _operand(_by_steps(pad(down, (0, 0, 0, -len(down) % 64)).T)),
        _operand(pad(up, (0, 0, 0, -n % channels)).T, transpose=True),
    )


def _by_steps(matrix: Tensor) -> Tensor:
    """[R, K], K a multiple of 64: column 16t + 4s + 2h + p of 64 -> 16s + 8h + 2t + p."""
    blocks = matrix.reshape(len(matrix), -1, 4, 4, 2, 2)  # t, s, h, p
    return blocks.permute(0, 1, 3, 4, 2, 5).reshape(matrix.shape)


def pack_smooth(smooth: Tensor) -> Tensor:
    """smooth [K] -> float32 [2, K]: what x is divided by, and one over it, which is all that the division takes."""
    s = smooth.detach().float()
    return torch.stack([s, torch.ones_like(s) / s])


def unpack_branch(branch: Branch, n: int, k: int) -> LowRank:
    """The factors as they were packed, float16; a power of two may have moved from one to the other."""
    chunks, columns = branch.down.shape[:2]
    rows = branch.up.shape[1]
    # step, g, t, column half, row half, pair -> columns (t, step, column half, pair), ranks (row half, g)
    down = branch.down.reshape(chunks, columns // 4, 4, 8, 4, 2, 2, 2).permute(1, 4, 2, 5, 7, 0, 6, 3)
    up = branch.up.reshape(chunks, rows, 8, 4, 2, 2, 2).permute(1, 5, 2, 0, 4, 3, 6)
    return LowRank(
        down.reshape(columns * 16, chunks * 16)[:k].contiguous(), up.reshape(rows * 16, chunks * 16)[:n].contiguous()
    )


def pack_low(low: Tensor) -> Tensor:
    """low [M, R] -> as cuda_quantize gives it, rows beyond M zero: for tests."""
    m, r = low.shape
    wide = pad(low.half(), (0, 0, 0, -m % 8)).reshape(-1, 8, r // 16, 2, 8)  # eight, row, chunk, half, rank
    return wide.permute(2, 0, 3, 1, 4).reshape(r // 16, -1, 128)


def unpack_low(packed: Tensor, m: int) -> Tensor:
    """The inverse: -> float16 [m, R]."""
    chunks, eights, _ = packed.shape
    return packed.reshape(chunks, eights, 2, 8, 8).permute(1, 3, 0, 2, 4).reshape(eights * 8, chunks * 16)[:m]


def _operand(matrix: Tensor, transpose: bool = False) -> Tensor:
    """[R, C] float16 -> A operands of 16 x 16, lane = 4g + t: rows g, g+8 and columns 2t, 2t+1, 2t+8, 2t+9 of a block.
    Rows are ranks (down), or with ``transpose`` the C (up). -> [R / 16, C / 16, 32, 8]"""
    r, c = matrix.shape
    blocks = (
        matrix.reshape(r // 16, 16, c // 16, 16).permute(0, 2, 3, 1)
        if transpose
        else matrix.reshape(r // 16, 16, c // 16, 16).permute(0, 2, 1, 3)
    )
    lanes = blocks.reshape(r // 16, c // 16, 2, 8, 2, 4, 2)  # row half, g, column half, t, pair
    return lanes.permute(0, 1, 3, 5, 4, 2, 6).reshape(r // 16, c // 16, 32, 8).contiguous()


def _nibbles(codes: Tensor) -> Tensor:
    n, k = codes.shape
    parts = (codes & 15).to(torch.uint8).reshape(n // 64, 4, 2, 8, k // 128, 2, 4, 2, 2, 4)  # w jl g | h t s r b
    words = parts.permute(0, 4, 1, 5, 3, 6, 8, 2, 9, 7)
    return (words[..., 0] | words[..., 1] << 4).reshape(n // 64, k // 128, 4096)


def _side(values: Tensor) -> Tensor:
    n, groups = values.shape
    parts = values.reshape(n // 64, 4, 2, 8, groups // 2, 2).permute(0, 4, 1, 3, 5, 2).contiguous()
    return parts.reshape(n // 64, groups // 2, 128).view(torch.uint8)


def _bytes(codes: Tensor) -> Tensor:
    n, k = codes.shape
    chunks = (
        tile_order(codes).reshape(n // 64, 64, k // 128, 8, 16).permute(0, 2, 1, 3, 4).contiguous().view(torch.uint8)
    )
    return chunks.gather(3, _swizzle(codes.device).expand(n // 64, k // 128, -1, -1, 16)).reshape(
        n // 64, k // 128, 8192
    )


def _swizzle(device: torch.device) -> Tensor:
    row, chunk = torch.arange(64, device=device)[:, None], torch.arange(8, device=device)
    return (chunk ^ (row & 7))[..., None]


def _half_scales(scales: Tensor) -> tuple[Tensor, Tensor] | None:
    """Group scales as fp16 times a power of two a row, exactly; None where that cannot be."""
    s = scales.float()
    _, exponent = torch.frexp(s.abs().amax(1))
    channel = torch.where(exponent > 15, exponent - 15, torch.where(exponent < -2, exponent + 2, 0)).float().exp2()
    half = (s / channel[:, None]).half()
    return (half, channel) if torch.equal(half.float() * channel[:, None], s) else None
