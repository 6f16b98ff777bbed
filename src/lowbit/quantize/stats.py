"""What is measured from the inputs of a linear while calibration text runs through the model.

Rows are cut into chunks of a fixed length before any sum is taken, so that the statistics depend on the sequence of
tokens alone and not on how it was split into batches. Sums are float32 inside a chunk and float64 across chunks.
"""

from __future__ import annotations

import torch
from torch import Tensor

from ..types import FormatError

_CHUNK = 2048  # rows per sum
_PANEL = 256  # columns of the Hessian computed at once: only the lower half is computed
_WIDE = 1e15  # |x| above which a float32 sum of squares could overflow


class NonFinite(FormatError):
    """An activation is NaN or Inf. ``row`` is the row of the flattened input [tokens, K], counted before masking."""

    def __init__(self, row: int, channel: int, value: float) -> None:
        self.row, self.channel, self.value = row, channel, value
        super().__init__(f"activations: found {value} in row {row}, channel {channel}; accepted are finite values")


class InputStats:
    """Streaming statistics of the inputs [..., K] of one linear, or of several that read the same tensor.

    ``hessian`` False keeps absmax, rms and the sample only. ``rows`` bounds the sample; ``seed`` makes it reproducible.
    Everything stays on the device of the first rows; which rows are drawn is decided on the CPU, so it is the same
    everywhere.
    """

    def __init__(self, k: int, *, hessian: bool = True, rows: int = 256, seed: int = 0) -> None:
        self.k = k
        self.tokens = 0
        self._rows = rows
        self._generator = torch.Generator().manual_seed(seed)
        self._pending: list[Tensor] = []  # fewer than _CHUNK rows, float32
        self._waiting = 0
        self._hessian = hessian
        self._keys = torch.empty(0)
        self._sum: Tensor | None
        self._place(torch.device("cpu"))

    def _place(self, device: torch.device) -> None:
        k = self.k
        self._sum = (
            torch.zeros(k, k, dtype=torch.float64, device=device) if self._hessian else None
        )  # lower panels only
        self._squares = torch.zeros(k, dtype=torch.float64, device=device)
        self._absmax = torch.zeros(k, device=device)
        self._sample = torch.empty(0, k, device=device)

    def add(self, x: Tensor, mask: Tensor | None = None) -> None:
        """Count the rows of x [..., K], any float dtype; ``mask`` [...] is False at padding. NonFinite on NaN or Inf."""
        if x.shape[-1] != self.k:
            raise FormatError(f"activations: found width {x.shape[-1]}, accepted is {self.k}")
        rows = x.detach().reshape(-1, self.k)
        kept: Tensor | None = None
        if mask is not None:
            if mask.numel() != rows.shape[0]:
                raise FormatError(f"mask: found {mask.numel()} entries, accepted are {rows.shape[0]} (one a row)")
            kept = mask.to(rows.device).reshape(-1).bool().nonzero()[:, 0]
            rows = rows[kept]
        rows = rows.float()
        if not rows.numel():
            return
        total = rows.sum()  # NaN and Inf survive a sum, so the common case costs one pass
        if not bool(torch.isfinite(total)) and not bool(torch.isfinite(rows).all()):
            row, channel = (int(i) for i in (~torch.isfinite(rows)).nonzero()[0])
            raise NonFinite(int(kept[row]) if kept is not None else row, channel, float(rows[row, channel]))
        if not self.tokens and rows.device != self._absmax.device:
            self._place(rows.device)
        rows = rows.to(self._absmax.device)
        self.tokens += rows.shape[0]
        while self._waiting + rows.shape[0] >= _CHUNK:
            take = _CHUNK - self._waiting
            self._reduce(torch.cat([*self._pending, rows[:take]]) if self._pending else rows[:take])
            self._pending, self._waiting, rows = [], 0, rows[take:]
        if rows.shape[0]:
            self._pending.append(rows.clone())
            self._waiting += rows.shape[0]

    def hessian(self) -> Tensor:
        """Σ x xᵀ / tokens, float32 [K, K], symmetric to the bit. Zero where no token was seen."""
        self._flush()
        if self._sum is None:
            raise ValueError("these statistics were made without a Hessian")
        lower = self._sum.tril()
        return ((lower + lower.tril(-1).T) / max(self.tokens, 1)).float()

    def rms(self) -> Tensor:
        """Root mean square of each channel, float32 [K]."""
        self._flush()
        return (self._squares / max(self.tokens, 1)).sqrt().float()

    def absmax(self) -> Tensor:
        """Largest |x| of each channel, float32 [K]."""
        self._flush()
        return self._absmax.clone()

    def cautious(self) -> tuple[Tensor, Tensor]:
        """(rms, absmax), float32 [K] each, as if every channel that fired at all were to fire once more, with the median
        absmax A of those: rms² + A² / tokens, and absmax no smaller. A channel that calibration hardly saw would else get a scale of almost
        nothing, behind which its weights are rounded away; Whisper's GELUs have many such, and some fire in the next clip.
        """
        rms, absmax = self.rms(), self.absmax()
        live = absmax > 0
        if not bool(live.any()):
            return rms, absmax
        once = absmax[live].median().square() / self.tokens
        rms = torch.where(live, (rms.square() + once).sqrt(), rms)
        return rms, torch.maximum(absmax, rms)

    def sample(self) -> Tensor:
        """At most ``rows`` input rows, float32 [R, K], every token seen equally likely to be among them."""
        self._flush()
        return self._sample.clone()

    def _flush(self) -> None:
        if self._pending:
            self._reduce(torch.cat(self._pending))
            self._pending, self._waiting = [], 0

    def _reduce(self, x: Tensor) -> None:
        """Take one chunk [rows, K] float32 into the sums."""
        largest = x.abs().amax(0)
        self._absmax = torch.maximum(self._absmax, largest)
        exact = x.double() if float(largest.max()) > _WIDE else x
        if self._sum is None:
            self._squares += exact.double().square().sum(0)
        else:
            for i in range(0, self.k, _PANEL):
                end = min(i + _PANEL, self.k)
                self._sum[i:end, :end] += exact[:, i:end].T @ exact[:, :end]
            self._squares = self._sum.diagonal().clone()
        keys = torch.rand(x.shape[0], generator=self._generator)
        if self._keys.numel() >= self._rows > 0:
            better = (keys < self._keys[-1]).nonzero()[:, 0]
        else:
            better = torch.arange(x.shape[0])
        keys = torch.cat([self._keys, keys[better]])
        sample = torch.cat([self._sample, x[better.to(x.device)]])
        order = keys.argsort(stable=True)[: self._rows]
        self._keys, self._sample = keys[order], sample[order.to(x.device)]
