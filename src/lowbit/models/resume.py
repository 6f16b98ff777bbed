"""The work directory of a long quantization: finished blocks on disk, so that a rerun continues to the same bytes."""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from safetensors.torch import save
from torch import Tensor, nn

from ..quantize import Row
from ..types import Activation, FormatError, LowRank, QuantizedWeight

Finished = dict[str, tuple[QuantizedWeight, Row]]
_FIELDS = ("codes", "scales", "zeros", "smooth")


class WorkDirectory:
    """Finished blocks under ``path``, valid for one ``run`` (JSON-able settings and input digests) alone."""

    def __init__(self, path: str | Path, run: Mapping[str, Any]) -> None:
        self.path = Path(path)
        self.path.mkdir(parents=True, exist_ok=True)
        settings = json.loads(json.dumps(run))
        record = self.path / "run.json"
        if not record.exists():
            _write(record, json.dumps(settings, indent=1).encode())
            return
        try:
            before = json.loads(record.read_text())
        except ValueError as error:
            raise FormatError(f"{record}: found no JSON, accepted is what an earlier run wrote") from error
        for field in sorted({*settings, *before}):
            if before.get(field) != settings.get(field):
                raise FormatError(
                    f"{record}: {field}: found {before.get(field)!r} of an earlier run, this run has "
                    f"{settings.get(field)!r}; use another work directory"
                )

    def load(self, index: int, linears: Mapping[str, nn.Linear]) -> Finished | None:
        """Block ``index`` as an earlier run finished it, or None. FormatError where the weights were others then."""
        file = self._file(index)
        if not file.exists():
            return None
        with safe_open(file, framework="pt") as f:
            weights = json.loads(f.metadata()["lowbit_block"])["weights"]
        if weights != weights_digest(linears):
            raise FormatError(f"{file}: weights: found another sha256 than the model's; start from the original model")
        return self.read(index)

    def read(self, index: int) -> Finished:
        """Block ``index``, which was finished. Its tensors are mapped from the file."""
        found: Finished = {}
        with safe_open(self._file(index), framework="pt") as f:
            names = set(f.keys())
            for entry in json.loads(f.metadata()["lowbit_block"])["rows"]:
                row = Row(**{**entry["row"], "notes": tuple(entry["row"]["notes"])})
                tensors = {t: f.get_tensor(f"{row.name}.{t}") for t in _FIELDS if f"{row.name}.{t}" in names}
                branch = [f.get_tensor(n) for t in ("down", "up") if (n := f"{row.name}.{t}") in names]
                q = QuantizedWeight(
                    **tensors,
                    **entry["fields"],
                    activation=Activation(*entry["activation"]),
                    low_rank=LowRank(*branch) if branch else None,
                )
                found[row.name] = (q, row)
        return found

    def save(self, index: int, digest: str, finished: Finished) -> None:
        """Write a block whole or not at all; ``digest`` is that of its weights before they were replaced."""
        tensors: dict[str, Tensor] = {}
        rows = []
        for name, (q, row) in finished.items():
            tensors |= {f"{name}.{t}": v for t in _FIELDS if (v := getattr(q, t)) is not None}
            if q.low_rank is not None:
                tensors |= {f"{name}.down": q.low_rank.down.contiguous(), f"{name}.up": q.low_rank.up.contiguous()}
            rows.append(
                {
                    "row": row._asdict(),
                    "fields": {"group_size": q.group_size, "bits": q.bits, "hadamard": q.hadamard},
                    "activation": tuple(q.activation or Activation(16, "none")),
                }
            )
        meta = json.dumps({"weights": digest, "rows": rows})
        _write(self._file(index), save(tensors, metadata={"lowbit_block": meta}))

    def _file(self, index: int) -> Path:
        return self.path / f"block-{index:04d}.safetensors"


class Stored(Mapping[str, QuantizedWeight]):
    """Finished linears that stay in a work directory: name -> value, one block in memory at a time."""

    def __init__(self, work: WorkDirectory) -> None:
        self._work = work
        self._where: dict[str, int] = {}
        self._biases: Mapping[str, Tensor | None] = {}
        self._held: tuple[int, Finished] = (-1, {})

    def add(self, index: int, names: Mapping[str, Any]) -> None:
        self._where |= dict.fromkeys(names, index)

    def block(self, index: int) -> Finished:
        """A whole block, without biases."""
        if self._held[0] != index:
            self._held = (index, self._work.read(index))
        return self._held[1]

    def with_biases(self, biases: Mapping[str, Tensor | None]) -> Stored:
        self._biases = biases
        return self

    def __getitem__(self, name: str) -> QuantizedWeight:
        return self.block(self._where[name])[name][0].with_(bias=self._biases.get(name))

    def __iter__(self) -> Iterator[str]:
        return iter(self._where)

    def __len__(self) -> int:
        return len(self._where)


def weights_digest(linears: Mapping[str, nn.Linear]) -> str:
    """sha256 of the names and weights of some linears."""
    h = hashlib.sha256()
    for name, linear in linears.items():
        h.update(name.encode())
        h.update(linear.weight.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy().tobytes())
    return h.hexdigest()


def _write(path: Path, data: bytes) -> None:
    temporary = path.with_name(path.name + ".part")
    with temporary.open("wb") as f:
        f.write(data)
        f.flush()
        os.fsync(f.fileno())
    os.replace(temporary, path)
