"""Which files a checkpoint may open: every name that a file gives of another file is checked before it."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open

from ..types import FormatError

INDEX = "model.safetensors.index.json"
SINGLE = "model.safetensors"
PICKLES = (".bin", ".pt", ".pth", ".ckpt", ".pkl", ".pickle")
METADATA_KEY = "lowbit"
DTYPES = {
    "F64": torch.float64, "F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16, "I64": torch.int64,
    "I32": torch.int32, "I16": torch.int16, "I8": torch.int8, "U8": torch.uint8, "BOOL": torch.bool,
    "F8_E4M3": torch.float8_e4m3fn, "F8_E5M2": torch.float8_e5m2,
    "U16": torch.uint16, "U32": torch.uint32, "U64": torch.uint64,
}  # fmt: skip
TAGS = {dtype: tag for tag, dtype in DTYPES.items()}


def locate(root: Path) -> tuple[dict[str, Path], dict[str, str] | None]:
    """The files of a directory by name, checked, and the index where there is one."""
    present = sorted(entry.name for entry in root.iterdir())
    if SINGLE in present:
        return {SINGLE: inside(root, SINGLE, SINGLE)}, None
    if INDEX in present:
        index = read_index(root)
        return {file: inside(root, file, INDEX) for file in dict.fromkeys(index.values())}, index
    lone = [name for name in present if name.endswith(".safetensors")]
    if len(lone) == 1:
        return {lone[0]: inside(root, lone[0], lone[0])}, None
    if lone:
        raise refuse(root, "files", f"{len(lone)} .safetensors files without {INDEX}", f"{SINGLE}, or an index")
    pickles = [name for name in present if name.endswith(PICKLES)]
    if pickles:
        raise refuse_pickle(root / pickles[0])
    raise refuse(root, "files", ", ".join(present[:6]) or "nothing", f"{SINGLE}, or {INDEX} with its shards")


def read_index(root: Path) -> dict[str, str]:
    weight_map = (json_file(root, INDEX) or {}).get("weight_map")
    if not isinstance(weight_map, dict):
        raise refuse(root / INDEX, "weight_map", repr(weight_map)[:60], "an object of tensor name to file name")
    for name, file in weight_map.items():
        plain(file, root / INDEX, f"weight_map[{name!r}]")
        if not file.endswith(".safetensors"):
            if file.endswith(PICKLES):
                raise refuse_pickle(root / file)
            raise refuse(root / INDEX, f"weight_map[{name!r}]", repr(file), "a name that ends in .safetensors")
    return weight_map


def plain(name: object, where: Path, field: str) -> str:
    """A file name without any directory in it, or a refusal."""
    bad = not isinstance(name, str) or name in ("", ".", "..") or any(sign in name for sign in "/\\:\0")
    if bad or not isinstance(name, str):
        raise refuse(where, field, repr(name), "a plain file name in the same directory")
    return name


def inside(root: Path, name: str, where: str) -> Path:
    """The file's real path, if it stays in the directory (or in the blobs of a hub cache, which links there)."""
    target = (root / name).resolve()
    real = root.resolve()
    homes = [real]
    if real.parent.name == "snapshots":
        homes.append(real.parent.parent / "blobs")
    if not any(target.is_relative_to(home) for home in homes):
        raise refuse(root / where, name, f"a link to {target}", "a file in the directory")
    if not target.is_file():
        raise refuse(root / where, name, "no such file", "a file in the directory")
    return target


def open_file(target: Path) -> Any:
    try:
        return safe_open(str(target), framework="pt")
    except Exception as error:
        with target.open("rb") as file:
            start = file.read(4)
        if start[:2] == b"PK" or start[:1] == b"\x80":
            raise refuse_pickle(target) from None
        raise refuse(target, "header", str(error), "a whole safetensors file") from None


def json_file(root: Path, name: str) -> dict[str, Any] | None:
    if not (root / name).exists() and not (root / name).is_symlink():
        return None
    target = inside(root, name, name)
    try:
        text = target.read_text(encoding="utf-8")
    except UnicodeDecodeError as error:
        raise refuse(target, "encoding", str(error), "UTF-8") from None
    return parse(root / name, "content", text)


def parse(where: Path, field: str, text: str) -> dict[str, Any]:
    if text.startswith("\ufeff"):
        raise refuse(where, field, "a byte order mark", "JSON that begins with {")
    try:
        found = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise refuse(where, field, f"invalid JSON ({error})", "a JSON object") from None
    if not isinstance(found, dict):
        raise refuse(where, field, type(found).__name__, "a JSON object")
    return found


def refuse(where: Path, field: str, found: str, accepted: str) -> FormatError:
    return FormatError(f"{where}: {field}: found {found}, accepted is {accepted}")


def refuse_pickle(target: Path) -> FormatError:
    name = target.name
    command = (
        f"""python -c "import torch; from safetensors.torch import save_file; save_file({{k: v.clone() for k, v in """
        f"""torch.load('{name}', weights_only=True).items()}}, 'model.safetensors')" """
    )
    return refuse(
        target, "file type", "a pickle, which is never opened", f"safetensors; convert it with: {command.strip()}"
    )
