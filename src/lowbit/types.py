"""The one value that travels: a quantized linear layer in plain, unpacked, device-independent form."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Literal, NamedTuple

import torch
from torch import Tensor

Granularity = Literal["token", "group", "none"]


class FormatError(ValueError):
    """Something malformed was refused: one line with the file or layer, the field, the value found, what is accepted."""


def one_line(error: BaseException) -> str:
    """An error as one line; those that are not refusals of ours name their type."""
    text = " ".join(str(error).split())
    return text if isinstance(error, FormatError) and text else f"{type(error).__name__}: {text}"


class LowRank(NamedTuple):
    """A low-rank correction: y += up @ (downᵀ @ x')."""

    down: Tensor  # [K, R] float
    up: Tensor  # [N, R] float


class Activation(NamedTuple):
    """How the rows of x are quantized before the integer product.

    ``bits`` 8 or 4; ``granularity`` one scale per ``token`` (row), per weight ``group`` of a row, or ``none``
    (float activations); ``clip`` multiplies amax before the 4-bit scale is taken.
    """

    bits: int = 8
    granularity: Granularity = "group"
    clip: float = 1.0


@dataclass(frozen=True)
class Scheme:
    """What a linear becomes: storage of the weight and of the activations. ``group_size`` -1 is one group of K."""

    name: str  # of SCHEMES, or another
    bits: int = 4  # 4, 8; 16 is fp16 storage with float arithmetic
    group_size: int = 64
    symmetric: bool = False  # signed codes without zero points
    activation: Activation = Activation()  # 16 bits are float

    def group_of(self, k: int) -> int:
        """The group size for a layer of K = k in features. Nothing is refused."""
        return k if self.group_size == -1 else self.group_size


SCHEMES: dict[str, Scheme] = {
    "w4a8": Scheme("w4a8"),
    "w8a8": Scheme("w8a8", bits=8, group_size=-1, symmetric=True, activation=Activation(8, "token")),
    "w4a16": Scheme("w4a16", activation=Activation(16, "none")),
    "w4a4": Scheme("w4a4", symmetric=True, activation=Activation(4, "group")),
    "fp16": Scheme("fp16", bits=16, group_size=-1, symmetric=True, activation=Activation(16, "none")),
}


@dataclass(frozen=True, eq=False)
class QuantizedWeight:
    """W [N, K] as integer codes and one scale (and zero point) per output row and group of input columns.

    With ``w[n, k] = scales[n, k // group_size] * (codes[n, k] - zeros[n, k // group_size])`` (zeros 0 where None),
    ``W[:, perm] = w``. The layer computes ``y = w @ A(x')[perm] + up @ (downᵀ @ x') + bias`` with
    ``x' = Hᵀ (x / smooth)``; A is the activation quantizer and H the block Hadamard, identity where ``hadamard`` is 0.
    N = out features, K = in features, G = ceil(K / group_size); the last group may be short.
    """

    codes: Tensor  # [N, K] uint8 with zeros, int8 without
    scales: Tensor  # [N, G] float16, bfloat16 or float32; may be negative, never NaN or Inf
    group_size: int  # columns that share a scale, 1 .. K
    bits: int  # 4 or 8
    zeros: Tensor | None = None  # [N, G] uint8, 0 .. 2**bits - 1
    perm: Tensor | None = None  # [K] int32: column j of `codes` belongs to input perm[j]
    low_rank: LowRank | None = None  # added to y, from x'
    smooth: Tensor | None = None  # [K] float, > 0
    hadamard: int = 0  # 0, or 64: block size of H
    activation: Activation | None = None  # None: the checkpoint declares nothing
    bias: Tensor | None = None  # [N] float
    notes: tuple[str, ...] = ()  # what an importer met on the way, for `lowbit inspect`

    def __post_init__(self) -> None:
        n, k = self._shape("codes", self.codes, (None, None))
        if self.bits not in (4, 8):
            raise FormatError(f"bits: found {self.bits}, accepted are 4 and 8")
        if self.group_size < 1 or self.group_size > max(k, 1):
            raise FormatError(f"group_size: found {self.group_size}, accepted is 1 .. {k} (K)")
        groups = -(-k // self.group_size)
        self._shape("scales", self.scales, (n, groups))
        if not self.scales.is_floating_point() or self.scales.dtype == torch.float64:
            raise FormatError(f"scales: found {self.scales.dtype}, accepted are float16, bfloat16, float32")
        want = torch.int8 if self.zeros is None else torch.uint8
        if self.codes.dtype != want:
            raise FormatError(
                f"codes: found {self.codes.dtype}, accepted is {want} {'with' if self.zeros is not None else 'without'} zeros"
            )
        if self.zeros is not None:
            self._shape("zeros", self.zeros, (n, groups))
            if self.zeros.dtype != torch.uint8:
                raise FormatError(f"zeros: found {self.zeros.dtype}, accepted is torch.uint8")
        if self.perm is not None:
            self._shape("perm", self.perm, (k,))
        if self.smooth is not None:
            self._shape("smooth", self.smooth, (k,))
        if self.bias is not None:
            self._shape("bias", self.bias, (n,))
        if self.low_rank is not None:
            _, rank = self._shape("low_rank.down", self.low_rank.down, (k, None))
            self._shape("low_rank.up", self.low_rank.up, (n, rank))
        if self.hadamard not in (0, 64):
            raise FormatError(f"hadamard: found {self.hadamard}, accepted are 0 and 64")

    @staticmethod
    def _shape(field: str, tensor: Tensor, want: tuple[int | None, ...]) -> tuple[int, ...]:
        found = tuple(tensor.shape)
        if len(found) != len(want) or any(w is not None and w != f for f, w in zip(found, want, strict=True)):
            shown = [("?" if w is None else w) for w in want]
            raise FormatError(f"{field}: found shape {list(found)}, accepted is {shown}".replace("'", ""))
        return found

    @property
    def n(self) -> int:
        """Out features."""
        return self.codes.shape[0]

    @property
    def k(self) -> int:
        """In features."""
        return self.codes.shape[1]

    @property
    def groups(self) -> int:
        """Groups of columns, G."""
        return self.scales.shape[1]

    @property
    def symmetric(self) -> bool:
        """Whether the codes are signed and have no zero points."""
        return self.zeros is None

    def with_(self, **changes: object) -> QuantizedWeight:
        """A copy with some fields replaced; FormatError where they do not fit the others."""
        return replace(self, **changes)  # type: ignore[arg-type]

    def to(self, device: torch.device | str) -> QuantizedWeight:
        """The same on a device; RuntimeError of torch where there is none."""

        def there(tensor: Tensor | None) -> Tensor | None:
            return None if tensor is None else tensor.to(device)

        branch = None if self.low_rank is None else LowRank(*(t.to(device) for t in self.low_rank))
        moved = {name: there(getattr(self, name)) for name in ("codes", "scales", "zeros", "perm", "smooth", "bias")}
        return replace(self, **moved, low_rank=branch)  # type: ignore[arg-type]

    def check_values(self, layer: str = "") -> None:
        """FormatError for what shapes cannot show: codes out of range, scales that are not finite, a perm that is none. Reads all
        data. ``layer`` begins the message."""
        where = f"{layer}: " if layer else ""
        top = 2**self.bits - 1
        low, high = (0, top) if self.zeros is not None else (-(2 ** (self.bits - 1)), 2 ** (self.bits - 1) - 1)
        if self.codes.numel():
            found_low, found_high = int(self.codes.min()), int(self.codes.max())
            if found_low < low or found_high > high:
                raise FormatError(f"{where}codes: found {found_low} .. {found_high}, accepted is {low} .. {high}")
        if self.zeros is not None and self.zeros.numel() and int(self.zeros.max()) > top:
            raise FormatError(f"{where}zeros: found {int(self.zeros.max())}, accepted is 0 .. {top}")
        for field, tensor in (("scales", self.scales), ("smooth", self.smooth), ("bias", self.bias)):
            if tensor is not None and not bool(torch.isfinite(tensor).all()):
                raise FormatError(f"{where}{field}: found NaN or Inf, accepted are finite values")
        if self.smooth is not None and not bool((self.smooth > 0).all()):
            raise FormatError(f"{where}smooth: found {float(self.smooth.min())}, accepted are values > 0")
        if self.perm is not None:
            seen = torch.zeros(self.k, dtype=torch.bool, device=self.perm.device)
            inside = (self.perm >= 0) & (self.perm < self.k)
            if not bool(inside.all()) or not bool(seen.index_fill(0, self.perm.long(), True).all()):
                raise FormatError(f"{where}perm: found no permutation of 0 .. {self.k - 1}")
