"""Checkpoints: lazy mapped reading, hostile files (section F of the case list), atomic writing."""

from __future__ import annotations

import json
import os
import pickle
import struct
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from safetensors.torch import load_file, save_file
from torch import Tensor

from lowbit.checkpoint import INDEX, files, open_checkpoint, write_checkpoint
from lowbit.checkpoint.files import DTYPES
from lowbit.checkpoint.residency import drop_clean_pages
from lowbit.types import FormatError

TENSORS = {
    "a.qweight": torch.arange(64, dtype=torch.int32).reshape(8, 8),
    "a.scales": torch.arange(8).half(),
    "norm.weight": torch.ones(5, dtype=torch.bfloat16),
    "flag": torch.tensor(True),
    "empty": torch.empty(0, 3),
    "odd": torch.arange(3, dtype=torch.uint8),
}


def same(found: Any, expected: dict[str, Tensor]) -> bool:
    return set(found) == set(expected) and all(
        found[name].dtype == tensor.dtype and torch.equal(found[name], tensor) for name, tensor in expected.items()
    )


def raw(path: Path, header: Any, data: bytes = b"", length: int | None = None) -> Path:
    """A safetensors file with any header and any claimed header length."""
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    path.write_bytes(struct.pack("<Q", len(text) if length is None else length) + text + data)
    return path


# Reading


@pytest.mark.parametrize("limit", [5_000_000_000, 40])
def test_round_trip_and_headers(tmp_path: Path, limit: int) -> None:
    written = write_checkpoint(tmp_path, TENSORS, {"hidden": 5}, {"version": 1, "linears": {}}, max_shard_bytes=limit)
    assert (len(written) > 1) == (limit == 40)
    found = open_checkpoint(tmp_path)
    assert same(found, TENSORS) and found.config == {"hidden": 5} and found.metadata == {"version": 1, "linears": {}}
    for name, tensor in TENSORS.items():
        assert (found.shape(name), found.dtype(name)) == (tuple(tensor.shape), tensor.dtype)
        assert found.nbytes(name) == tensor.numel() * tensor.element_size()
        assert found.file(name) in {file.name for file in written}
    with pytest.raises(KeyError):
        found["absent"]
    assert "absent" not in found and len(found) == len(TENSORS)


@given(
    st.dictionaries(
        st.text(min_size=1, max_size=8).filter(lambda name: name != "__metadata__"),
        st.tuples(st.sampled_from(sorted(DTYPES, key=str)), st.lists(st.integers(0, 3), max_size=3)),
        max_size=6,
    ),
    st.integers(1, 64),
)
def test_any_tensors_round_trip(tmp_path_factory: pytest.TempPathFactory, shapes: dict[str, Any], limit: int) -> None:
    tensors = {
        name: torch.randint(0, 2, shape, dtype=torch.uint8).to(DTYPES[tag]) for name, (tag, shape) in shapes.items()
    }
    path = tmp_path_factory.mktemp("any")
    write_checkpoint(path, iter(tensors.items()), None, max_shard_bytes=limit)
    found = open_checkpoint(path)
    assert set(found) == set(tensors)
    for name, tensor in tensors.items():
        assert found[name].dtype == tensor.dtype and found[name].shape == tensor.shape
        assert found[name].reshape(-1).view(torch.uint8).tolist() == tensor.reshape(-1).view(torch.uint8).tolist()


def test_the_reference_reader_reads_our_files(tmp_path: Path) -> None:
    write_checkpoint(tmp_path, TENSORS, {})
    assert same(load_file(tmp_path / "model.safetensors"), TENSORS)


def test_single_file_and_other_names(tmp_path: Path) -> None:
    save_file(TENSORS, tmp_path / "gptq_model-4bit.safetensors")
    assert same(open_checkpoint(tmp_path / "gptq_model-4bit.safetensors"), TENSORS)
    assert same(open_checkpoint(tmp_path), TENSORS)
    save_file(TENSORS, tmp_path / "second.safetensors")
    with pytest.raises(FormatError, match="2 .safetensors files without"):
        open_checkpoint(tmp_path)


def anonymous_kib() -> int:
    lines = Path("/proc/self/smaps_rollup").read_text().splitlines()
    return int(next(line for line in lines if line.startswith("Anonymous:")).split()[1])


def test_tensors_are_mapped(tmp_path: Path) -> None:
    if not Path("/proc/self/smaps_rollup").exists():
        pytest.skip("no /proc/self/smaps_rollup on this system")
    write_checkpoint(tmp_path, {"big": torch.ones(64 << 20, dtype=torch.uint8)}, {})
    found = open_checkpoint(tmp_path)
    before = anonymous_kib()
    tensor = found["big"]
    assert int(tensor.view(torch.int64).count_nonzero()) == 8 << 20  # every page has been read
    assert anonymous_kib() - before < 8 << 10


def test_missing(tmp_path: Path) -> None:
    with pytest.raises(FormatError, match="path: found nothing there"):
        open_checkpoint(tmp_path / "absent")
    with pytest.raises(FormatError, match="files: found nothing"):
        open_checkpoint(tmp_path)


# Malformed files

ENTRY = {"dtype": "F32", "shape": [2], "data_offsets": [0, 8]}


@pytest.mark.parametrize(
    "header, data, length",
    [
        (b"", b"", 0),
        ({"a": ENTRY}, b"", None),
        ({"a": ENTRY}, b"1234567", None),
        ({"a": ENTRY}, b"12345678", 2**63),
        ({"a": ENTRY}, b"12345678", 10_000),
        ({"a": ENTRY}, b"12345678", 3),
        ([1], b"", None),
        (b"{not json}", b"", None),
        (b"\xff\xfe{}", b"", None),
        ({"a": {**ENTRY, "data_offsets": [0, 9]}}, b"123456789", None),
        ({"a": {**ENTRY, "data_offsets": [8, 0]}}, b"12345678", None),
        ({"a": {**ENTRY, "data_offsets": [0, 2**62]}}, b"12345678", None),
        ({"a": ENTRY, "b": ENTRY}, b"12345678", None),
        ({"a": ENTRY, "b": {**ENTRY, "data_offsets": [4, 12]}}, b"123456789012", None),
        ({"a": ENTRY, "b": {**ENTRY, "data_offsets": [12, 20]}}, b"12345678901234567890", None),
        ({"a": ENTRY}, b"12345678" + b"trailing", None),
        ({"a": {**ENTRY, "dtype": "Q4"}}, b"12345678", None),
        ({"a": {**ENTRY, "shape": [2**40, 2**40]}}, b"12345678", None),
        ({"a": {**ENTRY, "shape": [-2]}}, b"12345678", None),
        ({"a": {"dtype": "F32", "shape": [2]}}, b"12345678", None),
    ],
)
def test_malformed_headers(tmp_path: Path, header: Any, data: bytes, length: int | None) -> None:
    path = raw(tmp_path / "model.safetensors", header, data, length)
    for target in (path, tmp_path):
        with pytest.raises(
            FormatError, match="model.safetensors: header: found .*accepted is a whole safetensors file"
        ):
            open_checkpoint(target)


@pytest.mark.parametrize("size", [0, 1, 7, 8, 9, 40])
def test_truncated(tmp_path: Path, size: int) -> None:
    save_file(TENSORS, tmp_path / "model.safetensors")
    whole = (tmp_path / "model.safetensors").read_bytes()
    (tmp_path / "model.safetensors").write_bytes(whole[:size])
    with pytest.raises(FormatError, match="header"):
        open_checkpoint(tmp_path)
    (tmp_path / "model.safetensors").write_bytes(whole[:-1])
    with pytest.raises(FormatError, match="header"):
        open_checkpoint(tmp_path)


@given(st.binary(max_size=200))
def test_garbage(tmp_path_factory: pytest.TempPathFactory, content: bytes) -> None:
    path = tmp_path_factory.mktemp("garbage") / "model.safetensors"
    path.write_bytes(content)
    with pytest.raises(FormatError):
        open_checkpoint(path)


def test_tensors_that_are_not_aligned(tmp_path: Path) -> None:
    """A header of any length is legal; the values must be right or the file refused, never garbage."""
    header = {"a": {"dtype": "U8", "shape": [1], "data_offsets": [0, 1]}, "b": {**ENTRY, "data_offsets": [1, 9]}}
    path = raw(tmp_path / "model.safetensors", header, b"\x07" + struct.pack("<2f", 1.5, -2.5))
    found = open_checkpoint(path)
    assert found["a"].tolist() == [7] and found["b"].tolist() == [1.5, -2.5]


@pytest.mark.parametrize("text", ["{", "[]", "\ufeff{}", "7"])
def test_malformed_metadata(tmp_path: Path, text: str) -> None:
    save_file(TENSORS, tmp_path / "model.safetensors", metadata={"lowbit": text})
    with pytest.raises(FormatError, match="model.safetensors: metadata lowbit: found"):
        open_checkpoint(tmp_path)


def test_config_that_is_not_utf8(tmp_path: Path) -> None:
    save_file(TENSORS, tmp_path / "model.safetensors")
    (tmp_path / "config.json").write_bytes(b"\xff\xfe{\x00}\x00")
    with pytest.raises(FormatError, match="config.json: encoding"):
        open_checkpoint(tmp_path)
    (tmp_path / "config.json").write_text("[" * 200_000)
    with pytest.raises(FormatError, match="config.json: content: found invalid JSON"):
        open_checkpoint(tmp_path)


# SEC-02: pickles


class Hook:
    def __init__(self, marker: Path) -> None:
        self.marker = marker

    def __reduce__(self) -> Any:
        return (Path.touch, (self.marker,))


@pytest.fixture
def pickled(tmp_path: Path) -> Iterator[tuple[Path, bytes]]:
    marker = tmp_path / "marker"
    content = pickle.dumps(Hook(marker))
    pickle.loads(content)
    assert marker.exists()  # the hook works
    marker.unlink()
    model = tmp_path / "model"
    model.mkdir()
    yield model, content
    assert not marker.exists()


@pytest.mark.parametrize("name", ["pytorch_model.bin", "model.pt", "model.pth", "voice.ckpt", "calibration.pkl"])
def test_sec_02_pickles_are_refused_with_the_command(pickled: tuple[Path, bytes], name: str) -> None:
    model, content = pickled
    (model / name).write_bytes(content)
    for target in (model, model / name):
        with pytest.raises(FormatError, match=f"{name}: file type: found a pickle") as caught:
            open_checkpoint(target)
        assert "weights_only=True" in str(caught.value) and "save_file" in str(caught.value)
        assert "\n" not in str(caught.value)


def test_sec_02_beside_a_good_file(pickled: tuple[Path, bytes]) -> None:
    model, content = pickled
    (model / "pytorch_model.bin").write_bytes(content)
    save_file(TENSORS, model / "model.safetensors")
    assert same(open_checkpoint(model), TENSORS)


def test_sec_02_renamed(pickled: tuple[Path, bytes]) -> None:
    model, content = pickled
    (model / "model.safetensors").write_bytes(content)
    with pytest.raises(FormatError, match="found a pickle"):
        open_checkpoint(model)
    torch.save({"a": torch.ones(2)}, model / "model.safetensors")  # a zip
    with pytest.raises(FormatError, match="found a pickle"):
        open_checkpoint(model)


def test_sec_02_inside_an_index(pickled: tuple[Path, bytes]) -> None:
    model, content = pickled
    (model / "pytorch_model.bin").write_bytes(content)
    (model / INDEX).write_text(json.dumps({"weight_map": {"a": "pytorch_model.bin"}}))
    with pytest.raises(FormatError, match="found a pickle"):
        open_checkpoint(model)


# SEC-03: names that leave the directory


@pytest.fixture
def opened(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The weight files that were opened."""
    paths: list[str] = []
    original = files.safe_open

    def watch(path: str, **options: Any) -> Any:
        paths.append(path)
        return original(path, **options)

    monkeypatch.setattr(files, "safe_open", watch)
    return paths


def test_the_watch_sees_an_open(tmp_path: Path, opened: list[str]) -> None:
    save_file(TENSORS, tmp_path / "model.safetensors")
    open_checkpoint(tmp_path)
    assert opened == [str(tmp_path / "model.safetensors")]


BAD_NAMES = [
    "../x.safetensors",
    "ABSOLUTE",
    "a/../../x.safetensors",
    "..\\x.safetensors",
    "C:x",
    "",
    ".",
    "..",
    "x\0y",
    7,
    None,
    ["x.safetensors"],
    "sub/x.safetensors",
]


@pytest.mark.parametrize("name", BAD_NAMES, ids=repr)
def test_sec_03_shard_names(tmp_path: Path, opened: list[str], name: Any) -> None:
    outside = tmp_path / "x.safetensors"
    save_file({"a": torch.ones(1)}, outside)
    model = tmp_path / "model"
    (model / "a").mkdir(parents=True)
    name = str(outside) if name == "ABSOLUTE" else name
    (model / INDEX).write_text(json.dumps({"weight_map": {"a": name}}))
    with pytest.raises(FormatError, match="accepted is a plain file name"):
        open_checkpoint(model)
    assert opened == []


@pytest.mark.parametrize("name", ["x.safetensors", "model.safetensors"])
def test_sec_03_a_link_to_outside(tmp_path: Path, opened: list[str], name: str) -> None:
    save_file({"a": torch.ones(1)}, tmp_path / "x.safetensors")
    model = tmp_path / "model"
    model.mkdir()
    (model / name).symlink_to(tmp_path / "x.safetensors")
    if name == "x.safetensors":
        (model / INDEX).write_text(json.dumps({"weight_map": {"a": name}}))
    with pytest.raises(FormatError, match="accepted is a file in the directory"):
        open_checkpoint(model)
    assert opened == []


def test_sec_03_a_configuration_link_to_outside(tmp_path: Path) -> None:
    model = tmp_path / "model"
    model.mkdir()
    save_file(TENSORS, model / "model.safetensors")
    (tmp_path / "secret.json").write_text("{}")
    (model / "config.json").symlink_to(tmp_path / "secret.json")
    with pytest.raises(FormatError, match="accepted is a file in the directory"):
        open_checkpoint(model)


def test_sec_03_the_hub_cache_and_inner_links_load(tmp_path: Path) -> None:
    blobs, snapshot = tmp_path / "models--x" / "blobs", tmp_path / "models--x" / "snapshots" / "0123"
    blobs.mkdir(parents=True)
    snapshot.mkdir(parents=True)
    save_file(TENSORS, blobs / "abc")
    (blobs / "def").write_text("{}")
    (snapshot / "model.safetensors").symlink_to(Path("..") / ".." / "blobs" / "abc")
    (snapshot / "config.json").symlink_to(Path("..") / ".." / "blobs" / "def")
    assert same(open_checkpoint(snapshot), TENSORS)
    (tmp_path / "link").symlink_to(snapshot)
    assert same(open_checkpoint(tmp_path / "link"), TENSORS)


@pytest.mark.parametrize(
    "index, message",
    [
        ({}, "weight_map: found None"),
        ({"weight_map": []}, "weight_map: found"),
        ({"weight_map": {"a": "x.txt"}}, "accepted is a name that ends in .safetensors"),
        ({"weight_map": {"a": "absent.safetensors"}}, "absent.safetensors: found no such file"),
        ({"weight_map": {"b": "x.safetensors"}}, "1 tensors not in their shard: b"),
    ],
)
def test_a_bad_index(tmp_path: Path, index: Any, message: str) -> None:
    save_file({"a": torch.ones(1)}, tmp_path / "x.safetensors")
    (tmp_path / INDEX).write_text(json.dumps(index))
    with pytest.raises(FormatError, match=message):
        open_checkpoint(tmp_path)


def test_tensors_outside_the_index_are_not_there(tmp_path: Path) -> None:
    save_file({"a": torch.ones(1), "b": torch.ones(1)}, tmp_path / "x.safetensors")
    (tmp_path / INDEX).write_text(json.dumps({"weight_map": {"a": "x.safetensors"}}))
    assert list(open_checkpoint(tmp_path)) == ["a"]


# Writing


def old_and_new() -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    return {f"w{i}": torch.full((8,), float(i)) for i in range(3)}, {
        f"w{i}": torch.full((8,), -float(i)) for i in range(3)
    }


LIMITS = {"single": 1 << 30, "shards": 32}


@pytest.mark.parametrize("after", LIMITS)
@pytest.mark.parametrize("before", LIMITS)
def test_replacing_leaves_nothing_behind(tmp_path: Path, before: str, after: str) -> None:
    old, new = old_and_new()
    write_checkpoint(tmp_path, old, {"v": 1}, max_shard_bytes=LIMITS[before])
    (tmp_path / "tokenizer.json").write_text("{}")
    for _ in range(2):
        written = write_checkpoint(tmp_path, new, {"v": 2}, max_shard_bytes=LIMITS[after])
        found = open_checkpoint(tmp_path)
        assert same(found, new) and found.config == {"v": 2}
        expected = (
            {file.name for file in written}
            | {"config.json", "tokenizer.json"}
            | ({INDEX} if after == "shards" else set())
        )
        assert {entry.name for entry in tmp_path.iterdir()} == expected


@pytest.mark.parametrize("after", LIMITS)
@pytest.mark.parametrize("before", LIMITS)
@pytest.mark.parametrize("call", ["replace", "fsync"])
def test_an_interrupted_save_leaves_the_old_one_whole(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, before: str, after: str, call: str
) -> None:
    """Stop at every flush and every rename in turn: the old weights, or (past the last rename) the new, never a mix."""
    old, new = old_and_new()
    original = getattr(os, call)
    seen_old, step = 0, 0
    while True:
        root = tmp_path / str(step)
        write_checkpoint(root, old, {"v": 1}, max_shard_bytes=LIMITS[before])
        left = [step]

        def stop(*args: Any, left: list[int] = left, **options: Any) -> Any:
            if left[0] == 0:
                raise KeyboardInterrupt
            left[0] -= 1
            return original(*args, **options)

        with monkeypatch.context() as patch:
            patch.setattr(os, call, stop)
            try:
                write_checkpoint(root, new, {"v": 2}, max_shard_bytes=LIMITS[after])
            except KeyboardInterrupt:
                pass
            else:
                break
        found = open_checkpoint(root)
        assert same(found, old) or same(found, new)
        if same(found, old):
            assert found.config == {"v": 1}
            seen_old += 1
        assert not list(root.glob(".lowbit-*"))
        step += 1
    assert seen_old >= (1 if after == "single" else 3)


def test_an_error_while_tensors_are_made_leaves_the_old_one(tmp_path: Path) -> None:
    old, new = old_and_new()
    write_checkpoint(tmp_path, old, {"v": 1})
    names = sorted(entry.name for entry in tmp_path.iterdir())

    def stream() -> Iterator[tuple[str, Tensor]]:
        yield from new.items()
        raise RuntimeError("out of luck")

    with pytest.raises(RuntimeError, match="out of luck"):
        write_checkpoint(tmp_path, stream(), {"v": 2}, max_shard_bytes=32)
    assert same(open_checkpoint(tmp_path), old)
    assert sorted(entry.name for entry in tmp_path.iterdir()) == names


def test_a_checkpoint_can_be_written_over_itself(tmp_path: Path) -> None:
    old, _ = old_and_new()
    write_checkpoint(tmp_path, old, {})
    found = open_checkpoint(tmp_path)
    write_checkpoint(tmp_path, found, {})
    assert same(open_checkpoint(tmp_path), old) and same(found, old)


def test_views_and_transposes_are_written_by_value(tmp_path: Path) -> None:
    base = torch.arange(12.0).reshape(3, 4)
    tensors = {"t": base.t(), "row": base[1], "tied": base, "also": base}
    write_checkpoint(tmp_path, tensors, {})
    assert same(open_checkpoint(tmp_path), tensors)


def test_what_cannot_be_written(tmp_path: Path) -> None:
    with pytest.raises(FormatError, match="a: name: found twice"):
        write_checkpoint(tmp_path, iter([("a", torch.ones(1)), ("a", torch.ones(1))]), {})
    with pytest.raises(FormatError, match="a: dtype: found torch.complex64"):
        write_checkpoint(tmp_path, {"a": torch.ones(1, dtype=torch.complex64)}, {})
    assert not list(tmp_path.iterdir())


def resident(path: Path) -> int:
    text = Path("/proc/self/smaps").read_text().split(str(path))[1:]
    return sum(int(part.split("Rss:")[1].split()[0]) for part in text)


@pytest.mark.skipif(not Path("/proc/self/smaps").exists(), reason="this system has no smaps")
def test_pages_of_a_mapped_file_are_given_back_unless_someone_wrote_to_them(tmp_path: Path) -> None:
    for name in ("read", "written"):
        (tmp_path / name).mkdir()
        write_checkpoint(tmp_path / name, {"w": torch.arange(1 << 20)}, {})
    read, written = (open_checkpoint(tmp_path / name)["w"] for name in ("read", "written"))
    total = int(read.sum()) + int(written.sum())
    written[5] = -7
    assert resident(tmp_path / "read") > 6000 and drop_clean_pages(tmp_path / "read") > 6_000_000
    assert resident(tmp_path / "read") < 200
    assert drop_clean_pages(tmp_path / "written") == 0 and drop_clean_pages(tmp_path / "nowhere") == 0
    assert int(read.sum()) + int(written.sum()) == total - 12
