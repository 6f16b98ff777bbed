"""Plain codes <-> the panels that every aarch64 tier reads (csrc/cpu/kernels.h has the drawing). pack then unpack is identity.

Panels, groups, scales, zero points and padding are those of ``panels``; only the order of the codes differs. A line is
128 bytes, 16 rows of 8 bytes, so that 16 bytes are 2 rows x 8 columns: what SMMLA takes whole, SDOT as 4 x 4 and SMLAL as
8 and 8. 4 bit: byte 8n + j of a line holds code[n][k + j] in its low nibble and code[n][k + 8 + j] in its high one (16
columns); 8 bit: byte 8n + j holds code[n][k + j] (8 columns).
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn.functional import pad

from ..types import QuantizedWeight
from . import panels
from .panels import PANEL, padded_group

ROW = 8  # bytes of a row that lie side by side


def pack(q: QuantizedWeight) -> Tensor:
    """-> uint8 [panels, G, code bytes + tail]; tail is 64 bytes with float16 scales, 128 with float32 ones."""
    packed = panels.pack(q)  # for all that follows the codes
    middle = 1 << (q.bits - 1)
    codes = q.codes if q.zeros is not None else q.codes.view(torch.uint8) + middle  # modulo 256
    group, groups = padded_group(q.group_size), q.groups
    codes = pad(codes, (0, groups * q.group_size - q.k)).reshape(q.n, groups, q.group_size)
    codes = pad(codes, (0, group - q.group_size, 0, 0, 0, -q.n % PANEL)).reshape(-1, PANEL, groups, group)
    if q.bits == 4:
        halves = codes.reshape(*codes.shape[:-1], group // (2 * ROW), 2, ROW)
        lines = halves[..., 0, :] | halves[..., 1, :] << 4
    else:
        lines = codes.reshape(*codes.shape[:-1], group // ROW, ROW)
    target = packed[..., : group * PANEL * q.bits // 8]
    target.copy_(lines.permute(0, 2, 3, 1, 4).flatten(2))  # [P, 16, G, L, 8] -> [P, G, L * 128]
    return packed


def unpack(
    packed: Tensor, n: int, k: int, group_size: int, bits: int, *, symmetric: bool = False
) -> tuple[Tensor, Tensor, Tensor | None]:
    """The inverse: codes [N, K], scales [N, G], zeros [N, G] (None and int8 codes where ``symmetric``)."""
    _, scales, zeros = panels.unpack(packed, n, k, group_size, bits)  # refuses shapes that do not fit
    group = padded_group(group_size)
    count, groups, _ = packed.shape
    lines = packed[..., : group * PANEL * bits // 8].reshape(count, groups, -1, PANEL, ROW).permute(0, 3, 1, 2, 4)
    if bits == 4:
        halves = lines.new_empty(*lines.shape[:-1], 2, ROW)
        halves[..., 0, :], halves[..., 1, :] = lines & 15, lines >> 4
        lines = halves
    codes = lines.reshape(count * PANEL, groups, group)[:n, :, :group_size].reshape(n, -1)[:, :k].contiguous()
    if symmetric:
        return (codes - (1 << (bits - 1))).view(torch.int8), scales, None
    return codes, scales, zeros
