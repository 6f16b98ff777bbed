"""What the peers' scripts share: their command line, the samples, what is written. Needs torch and safetensors only."""

from __future__ import annotations

import argparse
import json
import shutil
import sys
import time
from collections.abc import Mapping
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor


def parser(doc: str | None) -> argparse.ArgumentParser:
    p = argparse.ArgumentParser(description=doc, formatter_class=argparse.RawDescriptionHelpFormatter)
    p.add_argument("model", type=Path, help="float32 directory in the layout of transformers")
    p.add_argument("samples", type=Path, help="JSON list of lists of token ids, all of one length")
    p.add_argument("out", type=Path, help="the same directory with the peer's dequantized weights")
    p.add_argument("--bits", type=int, default=4)
    p.add_argument("--group", type=int, default=64)
    p.add_argument("--sym", action=argparse.BooleanOptionalAction, default=True)
    p.add_argument("--device", default="cpu")
    p.add_argument("--nsamples", type=int, metavar="N", help="how many of the samples (default: all)")
    p.add_argument("--threads", type=int, metavar="N")
    p.add_argument("--beside", type=int, default=0, metavar="N", help="other runs on the device meanwhile: recorded")
    return p


def read_samples(path: Path, count: int | None) -> Tensor:
    """int64 [samples, tokens]."""
    rows = torch.tensor(json.loads(path.read_text("utf-8")), dtype=torch.long)
    if rows.ndim != 2 or (count is not None and count > len(rows)):
        sys.exit(f"{path}: found {list(rows.shape)}, accepted are rows of equal length, at least {count or 1}")
    return rows[:count]


def write_result(
    model: Path,
    out: Path,
    weights: Mapping[str, Tensor],
    settings: Mapping[str, Any],
    *,
    bits: int,
    group: int,
    order: Mapping[str, Tensor] | None = None,
) -> None:
    """``model`` again with ``weights`` ("model.layers.0.mlp.up_proj" -> [N, K]) in float32, and settings.json.

    Everything that is no linear of a block stays as it was, whatever the peer's own copy was rounded to. Stops where
    a group holds more values than ``bits`` can name, where a linear of a block was left alone, or at a NaN.
    ``order``: the group of every column, where groups are not ``group`` neighbours.
    """
    tensors = {name: t for path in sorted(model.glob("*.safetensors")) for name, t in load_file(path).items()}
    linears = {name.removesuffix(".weight") for name, t in tensors.items() if ".layers." in name and t.ndim == 2}
    if missing := sorted(linears ^ set(weights)):
        sys.exit(f"{missing[0]}: quantized by one and no linear of the other; {len(missing)} such in all")
    kept = 0
    for name, value in weights.items():
        before = tensors[f"{name}.weight"]
        after = value.detach().to("cpu", torch.float32).contiguous()
        if after.shape != before.shape or not after.isfinite().all():
            sys.exit(f"{name}: found {list(after.shape)} with {int((~after.isfinite()).sum())} values not finite")
        columns = after if order is None else after[:, torch.argsort(order[name], stable=True)]
        values = columns.reshape(after.shape[0], -1, group).sort(-1).values
        found = int((values.diff(dim=-1) != 0).sum(-1).max()) + 1
        if found > 2**bits:
            sys.exit(f"{name}: found {found} different values in a group, accepted are {2**bits}")
        kept += int(torch.equal(before, after))
        tensors[f"{name}.weight"] = after
    if kept:
        sys.exit(f"found {kept} linears that the peer left as they were")
    out.mkdir(parents=True, exist_ok=True)
    for path in model.iterdir():
        if path.suffix in (".json", ".jinja", ".txt", ".model") and not path.name.endswith(".index.json"):
            shutil.copy(path, out / path.name)
    save_file(tensors, out / "model.safetensors", {"format": "pt"})
    text = json.dumps({**settings, "linears": len(weights)}, indent=2, default=str)
    (out / "settings.json").write_text(text + "\n", "utf-8")
    print(text)


def stored_bits(weights: Mapping[str, Tensor], bits: int, group: int, sym: bool, ordered: bool) -> float:
    """Bits per weight: codes, a float16 scale a group, a ``bits`` wide zero point where asymmetric; with ``ordered``
    also the int32 group of every column. A file of theirs may hold more (zero points that are all the same)."""
    total = sum(w.numel() for w in weights.values())
    groups = sum(w.numel() // group for w in weights.values())
    index = sum(w.shape[1] for w in weights.values()) if ordered else 0
    return (total * bits + groups * (16 + (0 if sym else bits)) + 32 * index) / total


def versions(*names: str) -> dict[str, str]:
    found = {}
    for name in names:
        try:
            found[name] = version(name)
        except PackageNotFoundError:
            found[name] = "unknown"
    return found


def device_name(device: str) -> str:
    if device.startswith("cuda"):
        return torch.cuda.get_device_name(device)
    info = Path("/proc/cpuinfo")
    lines = info.read_text(errors="replace").splitlines() if info.exists() else []
    chip = next((line.partition(":")[2].strip() for line in lines if line.startswith("model name")), "cpu")
    return f"{chip}, {torch.get_num_threads()} threads"


class Clock:
    """Wall-clock seconds since it was made, GPU included, and the CPU's own of this process, which other work leaves be."""

    def __init__(self) -> None:
        self.began, self.used = time.perf_counter(), time.process_time()

    def seconds(self) -> dict[str, float]:
        if torch.cuda.is_available():
            torch.cuda.synchronize()
        wall, used = time.perf_counter() - self.began, time.process_time() - self.used
        return {"seconds": round(wall, 1), "cpu_seconds": round(used, 1)}
