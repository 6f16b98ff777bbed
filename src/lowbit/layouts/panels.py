"""Plain codes <-> the panels that every x86 tier reads (csrc/cpu/kernels.h has the drawing). pack then unpack is identity.

A panel is 16 output rows side by side. Per group: lines of 64 bytes, then 16 scales, 16 zero points and padding to 64.
4 bit: byte 4n + j of a line holds code[n][k + j] in its low nibble and code[n][k + 4 + j] in its high one;
8 bit: byte 4n + j holds code[n][k + j]. Groups are padded to a multiple of 32 columns, N to a multiple of 16. The
last 4 bytes of a group hold its number of columns, so that a packed weight knows its K.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn.functional import pad

from ..types import FormatError, QuantizedWeight
from . import pages

PANEL = 16
STEP = 32


def padded_group(group_size: int) -> int:
    return -(-group_size // STEP) * STEP


def fits_half(scales: Tensor) -> bool:
    """Whether float16 holds every scale exactly; otherwise the stream carries float32. Never rounded in silence."""
    if (
        scales.dtype == torch.float16 or torch.compiler.is_compiling()
    ):  # a graph cannot ask for values: float32 holds all
        return scales.dtype == torch.float16
    return bool((scales.to(torch.float16).float() == scales.float()).all())


def _panels(t: Tensor) -> Tensor:
    """[N, ...] -> [P, 16, ...], N padded with zeros."""
    n = t.shape[0]
    rows = -(-n // PANEL) * PANEL
    if rows != n:
        t = torch.cat([t, t.new_zeros(rows - n, *t.shape[1:])])
    return t.reshape(rows // PANEL, PANEL, *t.shape[1:])


def _wider(t: Tensor, by: int) -> Tensor:
    """Zeros after the last dimension. By none is no copy, which pad makes all the same: a sixth of loading a model."""
    return pad(t, (0, by)) if by else t


def pack(q: QuantizedWeight) -> Tensor:
    """-> uint8 [panels, G, code bytes + tail]; tail is 64 bytes with float16 scales, 128 with float32 ones."""
    middle = 1 << (q.bits - 1)
    codes = q.codes if q.zeros is not None else q.codes.view(torch.uint8) + middle  # modulo 256
    zeros = q.zeros if q.zeros is not None else torch.full_like(q.scales, middle, dtype=torch.uint8)
    group, groups = padded_group(q.group_size), q.groups
    codes = _wider(codes, groups * q.group_size - q.k).reshape(q.n, groups, q.group_size)
    codes = _panels(_wider(codes, group - q.group_size))  # [P, 16, G, padded]
    if q.bits == 4:
        halves = codes.reshape(*codes.shape[:-1], group // 8, 2, 4)
        codes = halves[..., 0, :] | halves[..., 1, :] << 4
    else:
        codes = codes.reshape(*codes.shape[:-1], group // 4, 4)
    lines = codes.permute(0, 2, 3, 1, 4).flatten(2)  # [P, 16, G, L, 4] -> [P, G, L * 64]
    scales = _panels(q.scales.to(torch.float16 if fits_half(q.scales) else torch.float32)).mT.contiguous()
    parts = [lines, scales.view(torch.uint8), _panels(zeros).mT]
    tail = parts[1].shape[-1] + PANEL
    rest = lines.new_zeros(*lines.shape[:2], -tail % 64)
    columns = torch.full((groups, 1), q.group_size, dtype=torch.int32)
    columns[-1] = q.k - (groups - 1) * q.group_size
    rest[..., -4:] = columns.view(torch.uint8)
    parts.append(rest)
    out = pages.empty((*lines.shape[:2], sum(part.shape[-1] for part in parts)), torch.uint8)
    return torch.cat(parts, -1, out=out)


def packed_columns(packed: Tensor, group_size: int) -> int:
    """K, which stands in the last bytes of every group."""
    last = packed[0, -1, -4:].clone().view(torch.int32)
    return (packed.shape[1] - 1) * group_size + int(last)


def unpack(
    packed: Tensor, n: int, k: int, group_size: int, bits: int, *, symmetric: bool = False
) -> tuple[Tensor, Tensor, Tensor | None]:
    """The inverse: codes [N, K], scales [N, G], zeros [N, G] (None and int8 codes where ``symmetric``)."""
    group = padded_group(group_size)
    panels, groups, width = packed.shape
    code_bytes = group * PANEL * bits // 8
    wide = width - code_bytes == 128
    if -(-n // PANEL) != panels or -(-k // group_size) != groups or width - code_bytes not in (64, 128):
        raise FormatError(
            f"packed: found shape {list(packed.shape)}, accepted for N={n} K={k} group {group_size} bits {bits} is "
            f"[{-(-n // PANEL)}, {-(-k // group_size)}, {code_bytes + 64} or {code_bytes + 128}]"
        )
    lines = packed[..., :code_bytes].reshape(panels, groups, -1, PANEL, 4).permute(0, 3, 1, 2, 4)  # [P, 16, G, L, 4]
    codes = torch.stack([lines & 15, lines >> 4], -2) if bits == 4 else lines
    codes = codes.reshape(panels * PANEL, groups, group)[:n, :, :group_size].reshape(n, -1)[:, :k].contiguous()
    rest = packed[..., code_bytes:]
    scale_bytes = PANEL * (4 if wide else 2)
    scales = rest[..., :scale_bytes].contiguous().view(torch.float32 if wide else torch.float16)
    scales = scales.mT.reshape(-1, groups)[:n].contiguous()
    zeros = rest[..., scale_bytes : scale_bytes + PANEL].mT.reshape(-1, groups)[:n].contiguous()
    if symmetric:
        return codes.view(torch.int8) - (1 << (bits - 1)), scales, None
    return codes, scales, zeros


def pack_half(weight: Tensor, dtype: torch.dtype = torch.float16) -> Tensor:
    """float16 [N, K] -> float16 [panels, K rounded up to 4, 16] on its device, or the same of another ``dtype``."""
    panels = _panels(pad(weight.to(dtype), (0, -weight.shape[1] % 4))).mT
    return pages.empty(tuple(panels.shape), dtype).copy_(panels) if panels.device.type == "cpu" else panels.contiguous()


def unpack_half(packed: Tensor, n: int, k: int) -> Tensor:
    return packed.mT.flatten(0, 1)[:n, :k].contiguous()
