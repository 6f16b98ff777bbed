"""A quantized linear layer on a CUDA device: what it keeps there, and its two launches."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from . import ops_cuda, reference
from .layouts import mma_tiles
from .types import LowRank, QuantizedWeight

FEW = 16  # rows of x up to which the GEMV runs


class Kept(torch.nn.Module):
    """Buffers that never change dtype with ``half()`` and the like, and that no state_dict holds: they are packed."""

    bias: Tensor | None
    smooth: Tensor | None
    down: Tensor | None
    up: Tensor | None

    def keep(self, **tensors: Tensor | None) -> None:
        for name, tensor in tensors.items():
            self.register_buffer(name, tensor, persistent=False)

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> Kept:
        for name, buffer in self._buffers.items():
            if buffer is not None:
                self._buffers[name] = fn(buffer.view(torch.uint8)).view(buffer.dtype)
        return self


def _sides(q: QuantizedWeight, channels: int) -> dict[str, Tensor | None]:
    """What the integer kernels read beside the weight, N padded to a multiple of ``channels``."""
    branch = None
    if q.low_rank is not None and q.low_rank.down.shape[1]:
        branch = mma_tiles.pack_branch(q.low_rank, q.n, channels)
    return {
        "bias": None if q.bias is None else torch.nn.functional.pad(q.bias.detach().float(), (0, -q.n % channels)),
        "smooth": None if q.smooth is None else mma_tiles.pack_smooth(q.smooth),
        "down": None if branch is None else branch.down,
        "up": None if branch is None else branch.up,
    }


class FourBitLinear(Kept):
    """The same layer with 4-bit activations in groups of 64 on INT4 tensor cores (emulated, slowly, on Hopper)."""

    weight: Tensor
    scales: Tensor

    def __init__(self, q: QuantizedWeight, clip: float) -> None:
        super().__init__()
        self.n, self.hadamard, self.clip = q.n, bool(q.hadamard), clip
        rows = mma_tiles.pack_rows(q)
        self.keep(weight=rows.weight, scales=rows.scales, **_sides(q, 128))

    def forward(self, x: Tensor) -> Tensor:
        return self.fused(x)

    def fused(
        self,
        x: Tensor,
        residual: Tensor | None = None,
        norm: Tensor | None = None,
        eps: float = 0.0,
        silu: bool = False,
    ) -> Tensor:
        """As ``DeviceLinear.fused``."""
        codes, groups, scales, low = ops_cuda.quantize4(
            x, residual=residual, norm=norm, eps=eps, silu=silu, smooth=self.smooth, down=self.down,
            hadamard=self.hadamard, clip=self.clip,
        )  # fmt: skip
        y = ops_cuda.linear4(codes, groups, scales, low, self.weight, self.scales, self.bias, self.up, self.n, x.dtype)
        return y.reshape(*x.shape[:-1], self.n)


class FloatLinear(Kept):
    """Float activations: the weight is made float anew for every call, and cuBLAS multiplies in the dtype of x.

    For what the integer kernels do not take: zero points, odd groups, permuted columns, ``activation=None``.
    """

    codes: Tensor
    scales: Tensor
    zeros: Tensor | None
    perm: Tensor | None

    def __init__(self, q: QuantizedWeight) -> None:
        super().__init__()
        self.k, self.group_size, self.bits, self.hadamard = q.k, q.group_size, q.bits, q.hadamard
        self.dtypes = (q.scales.dtype, torch.float32 if q.low_rank is None else q.low_rank.down.dtype)
        codes = q.codes.view(torch.uint8)
        if q.bits == 4:
            codes = torch.nn.functional.pad(codes & 15, (0, q.k % 2))
            codes = codes[:, ::2] | codes[:, 1::2] << 4
        low = q.low_rank if q.low_rank is not None and q.low_rank.down.shape[1] else None
        self.keep(
            codes=codes.contiguous(),
            scales=q.scales.float(),
            zeros=q.zeros,
            perm=q.perm,
            bias=None if q.bias is None else q.bias.float(),
            smooth=None if q.smooth is None else q.smooth.float(),
            down=None if low is None else low.down.float(),
            up=None if low is None else low.up.float(),
        )

    def forward(self, x: Tensor) -> Tensor:
        inside = x
        if self.smooth is not None or self.hadamard:
            inside = reference.inside(x, self.smooth, self.hadamard)
        columns = inside if self.perm is None else inside[..., self.perm]
        w = ops_cuda.dequantize(self.codes, self.scales, self.zeros, self.k, self.group_size, self.bits, x.dtype)
        y = torch.nn.functional.linear(columns.to(x.dtype), w, None if self.bias is None else self.bias.to(x.dtype))
        if self.down is not None and self.up is not None:
            y = y + ((inside.float() @ self.down) @ self.up.T).to(x.dtype)
        return y

    def weights(self) -> tuple[Tensor, Tensor, Tensor | None, LowRank | None]:
        """(codes, scales, zeros, low rank) as QuantizedWeight has them."""
        codes = self.codes
        if self.bits == 4:
            codes = torch.stack([codes & 15, codes >> 4], -1).reshape(len(codes), -1)[:, : self.k]
            codes = codes if self.zeros is not None else (codes ^ 8) - 8
        low = (
            None
            if self.down is None or self.up is None
            else LowRank(*(t.to(self.dtypes[1]) for t in (self.down, self.up)))
        )
        codes = codes.contiguous() if self.zeros is not None else codes.contiguous().view(torch.int8)
        return codes, self.scales.to(self.dtypes[0]), self.zeros, low


class DeviceLinear(Kept):
    """y [..., N] of x [..., K] with 8-bit activations per token, for a weight that ``mma_tiles.refuses`` does not refuse.

    Two launches: rows of x to int8 (smoothing, Hadamard and the low rank's first half on the way), then the product
    with the low rank's second half and the bias in its end; ``gated`` with silu(gate) * up [..., N / 2] behind them, for
    rows in the order of ``mma_tiles.gated_order`` where ``ops_cuda.gates``.
    """

    weight: Tensor
    channel: Tensor

    def __init__(self, q: QuantizedWeight, gated: bool = False) -> None:
        super().__init__()
        self.n, self.k, self.hadamard, self.gated = q.n, q.k, bool(q.hadamard), gated
        self.bits, self.group_size = q.bits, q.group_size
        self.dtype = q.scales.dtype
        tiles = mma_tiles.pack(q)
        self.mode = tiles.mode
        sides = _sides(q, mma_tiles.CHANNELS)
        self.keep(weight=tiles.weight, channel=tiles.channel, **sides)
        self.factors: LowRank | None = None  # in host memory, where the packed ones are not those of the checkpoint
        if q.low_rank is not None and not self._exact(q.low_rank):
            self.factors = LowRank(*(t.detach().cpu() for t in q.low_rank))

    def forward(self, x: Tensor) -> Tensor:
        return self.fused(x)

    def fused(
        self,
        x: Tensor,
        residual: Tensor | None = None,
        norm: Tensor | None = None,
        eps: float = 0.0,
        silu: bool = False,
    ) -> Tensor:
        """What stands before the layer goes into its quantizer: silu(gate) * up of x [..., 2K]; x added to ``residual``
        [..., K], in place; RMS norm with ``norm`` float32 [K] and ``eps``."""
        codes, scales, low = ops_cuda.quantize(
            x, residual=residual, norm=norm, eps=eps, silu=silu, smooth=self.smooth, down=self.down,
            hadamard=self.hadamard, tile_order=not self._few(x.numel() // x.shape[-1]),
        )  # fmt: skip
        y = self._multiply(codes, scales, low, x.dtype)
        return y.reshape(*x.shape[:-1], y.shape[-1])

    @property
    def plain(self) -> bool:
        """Whether rows are rounded as they come: no smoothing, no Hadamard, no low rank."""
        return self.smooth is None and self.down is None and not self.hadamard

    def of_attention(self, q: Tensor, k: Tensor, v: Tensor, bounds: Tensor, scale: float) -> Tensor:
        """self(ops_cuda.attention(...)) [M, N] of a ``plain`` layer, bit for bit; its rows are rounded by ``attention_quantize``."""
        codes, scales = ops_cuda.attention_quantize(q, k, v, bounds, scale, tile_order=not self._few(len(q)))
        return self._multiply(codes, scales, None, q.dtype)

    def _few(self, rows: int) -> bool:
        """Whether the GEMV runs, which reads codes in plain order."""
        return rows <= FEW and self.mode != mma_tiles.W8 and not self.gated

    def _multiply(self, codes: Tensor, scales: Tensor, low: Tensor | None, dtype: torch.dtype) -> Tensor:
        # Rows whose bytes are no multiple of 16 cannot be addressed by the copy engine: float32 and a cast.
        out = dtype if self.n % 8 == 0 else torch.float32
        row = ops_cuda.GEMV if self._few(len(codes)) else -1
        y = ops_cuda.linear(
            codes, scales, low, self.weight, self.channel, self.bias, self.up, self.n, self.mode, out, row, self.gated
        )
        return y.to(dtype)

    def weights(self) -> tuple[Tensor, Tensor, None, LowRank | None]:
        """(codes, scales, no zeros, low rank) as QuantizedWeight has them, bit for bit."""
        tiles = mma_tiles.Tiles(self.weight, self.channel, self.mode)
        codes, scales = mma_tiles.unpack(tiles, self.n, self.k)
        if self.group_size == self.k:
            scales = scales[:, :1]
        else:
            scales = scales[:, :: self.group_size // mma_tiles.GROUP]
        low = self._unpacked() if self.factors is None else LowRank(*(t.to(self.weight.device) for t in self.factors))
        return codes, scales.to(self.dtype).contiguous(), None, low

    def _unpacked(self) -> LowRank | None:
        if self.down is None or self.up is None:
            return None
        return mma_tiles.unpack_branch(mma_tiles.Branch(self.down, self.up), self.n, self.k)

    def _exact(self, low_rank: LowRank) -> bool:
        """Whether the packed factors are these: they hold float16, balanced by powers of two."""
        mine = self._unpacked()
        if mine is None:
            return True
        return all(torch.equal(a.to(b.dtype), b) for a, b in zip(mine, low_rank, strict=True))
