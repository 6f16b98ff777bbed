"""Weights that nothing reads while integers stand for them: put away, and brought back bit by bit."""

from __future__ import annotations

import tempfile
from typing import IO, Any, NamedTuple

import torch
from torch import Tensor, nn

from lowbit.types import FormatError


class _Away(NamedTuple):
    linear: nn.Linear
    weight: nn.Parameter  # the model's own object, without memory meanwhile
    shape: torch.Size
    device: torch.device
    held: Tensor | None  # in CPU memory; None: in the file, at ``offset``
    offset: int


class Originals:
    """A CUDA device's weights wait in CPU memory, a CPU's in a temporary file (of TMPDIR) that has no name.

    Meanwhile the linear has a weight on the meta device, of the same shape: what would read or save it fails.
    """

    def __init__(self) -> None:
        self._away: list[_Away] = []
        self._file: IO[bytes] | None = None

    def put_away(self, linear: nn.Linear) -> None:
        """FormatError where the file finds no room; the linear is as it was then."""
        with torch.inference_mode(False), torch.no_grad():
            weight: Any = linear.weight
            data, offset = weight.data, 0
            held = None if data.device.type == "cpu" else data.to("cpu", copy=True)
            if held is None:
                offset = self._write(data)
            self._away.append(_Away(linear, weight, data.shape, data.device, held, offset))
            meta = torch.empty_like(data, device="meta")
            linear._parameters["weight"] = nn.Parameter(meta, requires_grad=weight.requires_grad)
            weight.data = torch.empty(0, dtype=data.dtype, device=data.device)

    def close(self) -> None:
        """Bring all of them back."""
        with torch.inference_mode(False), torch.no_grad():
            while self._away:
                row = self._away[-1]
                dtype = row.weight.dtype
                data = torch.empty(row.shape, dtype=dtype) if row.held is None else row.held
                if row.held is None:
                    self._read(data, row.offset)
                row.weight.data = data.to(row.device)
                row.linear._parameters["weight"] = row.weight
                self._away.pop()
            if self._file is not None:
                self._file.close()
                self._file = None

    def _write(self, data: Tensor) -> int:
        try:
            if self._file is None:
                self._file = tempfile.TemporaryFile(buffering=0)
            offset, left = self._file.seek(0, 2), _bytes(data.contiguous())
            while len(left):
                left = left[self._file.write(left) :]
        except OSError as error:
            raise FormatError(
                f"free_originals: found {error.strerror or error} in {tempfile.gettempdir()}, accepted is room for the weights "
                "there (TMPDIR names another place)"
            ) from error
        return offset

    def _read(self, data: Tensor, offset: int) -> None:
        assert self._file is not None
        self._file.seek(offset)
        left = _bytes(data)
        while len(left):
            count = self._file.readinto(left)  # type: ignore[attr-defined]
            if not count:
                raise OSError("the file of the original weights ends early")
            left = left[count:]


def _bytes(data: Tensor) -> Any:
    flat: Any = data.view(torch.uint8).numpy().reshape(-1)
    return memoryview(flat)
