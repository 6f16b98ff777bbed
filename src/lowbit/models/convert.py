"""A quantized checkpoint to another format: same codes, same scales, no model built."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

from torch import Tensor

from lowbit.checkpoint import Checkpoint, open_checkpoint, write_checkpoint
from lowbit.formats import FORMATS, config_for, lowbit, quantized_layers
from lowbit.models.plan import format_of
from lowbit.models.save import copy_side_files
from lowbit.types import FormatError, QuantizedWeight


class Converted(NamedTuple):
    """What a conversion did. ``bytes`` is the size of the written weight files."""

    source: str
    target: str
    layers: int
    bytes: int
    notes: list[str]


def convert(source: Path, out: Path, target: str) -> Converted:
    """Write the checkpoint of directory ``source`` to ``out`` in format ``target``, a key of FORMATS.

    Dense tensors, tokenizer and generation config are copied as they are. Every layer is read and its new form made
    once before anything is written, so what the target cannot hold (FormatError, naming layer and part) leaves ``out``
    untouched. One layer is in memory at a time, besides the shard being written.
    """
    if target not in FORMATS:
        raise FormatError(f"target: found {target!r}, accepted are {', '.join(FORMATS)}")
    checkpoint = open_checkpoint(source)
    names = list(checkpoint)
    found, settings = format_of(checkpoint)
    if found is None:
        raise FormatError(f"{source}: found plain weights, accepted is a quantized checkpoint (see: lowbit quantize)")
    prefixes = quantized_layers(names, found, settings)
    shells: dict[str, QuantizedWeight] = {}
    notes: list[str] = []
    for prefix in prefixes:
        q = FORMATS[found].read(checkpoint, prefix, settings)
        q.check_values(prefix)
        FORMATS[target].write(q, prefix)  # refuses here
        notes += [f"{prefix}: {note}" for note in q.notes]
        shells[prefix] = _shell(q)
    inside = set(prefixes)
    dense = [name for name in names if name.rpartition(".")[0] not in inside]
    config = dict(checkpoint.config)
    config["quantization_config"] = config_for(target, shells, _dense_linears(checkpoint, dense))
    metadata = None
    if target == "lowbit":
        rows = {prefix: lowbit.describe(q) for prefix, q in shells.items()}
        method = str(settings.get("method") or settings.get("quant_method") or found)
        rank = max((q.low_rank.down.shape[1] for q in shells.values() if q.low_rank is not None), default=0)
        metadata = lowbit.metadata(rows, method, rank=rank, base_sha256=settings.get("base_sha256"))
        if settings.get("fp16_layers"):
            metadata["fp16_layers"] = settings["fp16_layers"]

    def tensors() -> Iterator[tuple[str, Tensor]]:
        for name in dense:
            yield name, checkpoint[name]
        for prefix in prefixes:
            yield from FORMATS[target].write(FORMATS[found].read(checkpoint, prefix, settings), prefix).items()

    copy_side_files(source, out)
    files = write_checkpoint(out, tensors(), config, metadata)
    return Converted(found, target, len(prefixes), sum(file.stat().st_size for file in files), notes)


def _shell(q: QuantizedWeight) -> QuantizedWeight:
    """The same without data: what configurations are made of."""

    def empty(tensor: Tensor | None) -> Tensor | None:
        return None if tensor is None else tensor.to("meta")

    return q.with_(
        codes=empty(q.codes), scales=empty(q.scales), zeros=empty(q.zeros), perm=empty(q.perm), smooth=None, bias=None
    )


def _dense_linears(checkpoint: Checkpoint, dense: list[str]) -> list[str]:
    """Module names that hold a dense matrix and are no embedding: what other tools are told to leave alone."""
    found = [
        name.removesuffix(".weight") for name in dense if name.endswith(".weight") and len(checkpoint.shape(name)) == 2
    ]
    return ["lm_head", *(name for name in found if "embed" not in name and name != "lm_head")]
