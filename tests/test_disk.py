"""Quantizing a model that stays on disk: the same bytes as in memory, one block at a time, resumed, written as it comes."""

from __future__ import annotations

import shutil
import weakref
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import lowbit
import samples
from lowbit.checkpoint import INDEX, write_checkpoint
from lowbit.models import calibrate
from lowbit.models.directory import quantize_directory
from lowbit.models.disk import DiskModel
from lowbit.models.recipes import block_lists, recipe_for
from lowbit.models.speech import Listener
from lowbit.types import FormatError

transformers = pytest.importorskip("transformers")
SIZES = dict(
    hidden_size=64, intermediate_size=128, num_hidden_layers=3, num_attention_heads=2, vocab_size=97, head_dim=32,
    num_key_value_heads=1, pad_token_id=0, bos_token_id=1, eos_token_id=2,
)  # fmt: skip


def plain(folder: Path, *, tied: bool = True, dtype: torch.dtype = torch.float32, shard: str = "50GB") -> Path:
    torch.manual_seed(4)
    config = transformers.Qwen2Config(**SIZES, tie_word_embeddings=tied)
    model = transformers.Qwen2ForCausalLM(config).to(dtype)
    model.save_pretrained(folder, max_shard_size=shard)
    return folder


def ids() -> list[Tensor]:
    return [torch.randint(3, 97, (6, 32), generator=torch.Generator().manual_seed(0))]


def in_memory(source: Path, out: Path, scheme: str, calibration: Any, *, head: bool = False, **options: Any) -> None:
    model = lowbit.load(source)
    skip = () if head else recipe_for(model).skip
    reader = Listener.of(model, source) if isinstance(calibration, Path) else None
    lowbit.quantize(model, scheme, calibration=calibration, skip=skip, tokenizer=reader, progress=False, **options)
    lowbit.save(model, out)


def files(folder: Path) -> dict[str, bytes]:
    return {f.name: f.read_bytes() for f in folder.iterdir()}


@pytest.mark.parametrize(
    ("scheme", "tied", "dtype", "shard", "head"),
    [
        ("w4a8", True, torch.float32, "50GB", False),
        ("w8a8", False, torch.bfloat16, "60KB", True),
        ("w4a4", True, torch.bfloat16, "60KB", True),
        ("fp16", True, torch.float32, "60KB", False),
    ],
)
def test_the_same_bytes_as_in_memory(
    scheme: str, tied: bool, dtype: torch.dtype, shard: str, head: bool, tmp_path: Path
) -> None:
    source = plain(tmp_path / "plain", tied=tied, dtype=dtype, shard=shard)
    assert (source / INDEX).exists() == (shard == "60KB")
    in_memory(source, tmp_path / "a", scheme, ids(), head=head)
    quantize_directory(
        source, tmp_path / "b", scheme, calibration=ids(), head=head, resume_dir=tmp_path / "work", progress=False
    )
    assert files(tmp_path / "a") == files(tmp_path / "b")
    x = ids()[0][:1]
    with torch.inference_mode():
        assert torch.equal(lowbit.load(tmp_path / "a")(x).logits, lowbit.load(tmp_path / "b")(x).logits)


@pytest.mark.parametrize("scheme", ["w4a8", "w4a4"])
def test_whisper_from_disk_and_from_memory(scheme: str, tmp_path: Path) -> None:
    source, calibration = samples.whisper(tmp_path / "plain"), samples.speech(tmp_path)
    in_memory(source, tmp_path / "a", scheme, calibration)
    report = quantize_directory(
        source, tmp_path / "b", scheme, calibration=calibration, resume_dir=tmp_path / "work", progress=False
    )
    assert len(report.rows) == 2 * 6 + 2 * 10 and all(row.tokens > 0 for row in report.rows)
    assert files(tmp_path / "a") == files(tmp_path / "b")
    assert {"preprocessor_config.json", "tokenizer.json"} <= {*files(tmp_path / "b")}


def test_one_block_is_in_memory_at_a_time(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    source = plain(tmp_path / "plain", shard="60KB")
    models: list[nn.Module] = []
    most: list[int] = []
    real = calibrate.quantize_linears

    def watching(*args: Any) -> Any:
        blocks = [b for _, b in block_lists(models[0], "model.layers")]
        most.append(sum(not p.is_meta for b in blocks for p in b.parameters()))
        assert sum(any(not p.is_meta for p in b.parameters()) for b in blocks) == 1
        return real(*args)

    build = DiskModel.__init__

    def remember(self: DiskModel, *args: Any, **options: Any) -> None:
        build(self, *args, **options)
        models.append(self.model)

    monkeypatch.setattr(calibrate, "quantize_linears", watching)
    monkeypatch.setattr(DiskModel, "__init__", remember)
    quantize_directory(source, tmp_path / "out", "w4a8", calibration=ids(), resume_dir=tmp_path / "w", progress=False)
    (model,) = models
    block = model.get_submodule("model.layers.0")
    assert most == [len(list(block.parameters()))] * 12
    assert all(p.is_meta for p in block.parameters()) and not model.get_parameter("model.embed_tokens.weight").is_meta
    assert not model.get_buffer("model.rotary_emb.inv_freq").is_meta
    assert model.get_parameter("lm_head.weight") is model.get_parameter("model.embed_tokens.weight")


def test_a_stopped_run_goes_on_to_the_same_bytes(tmp_path: Path) -> None:
    source = plain(tmp_path / "plain")
    quantize_directory(source, tmp_path / "a", "w4a8", calibration=ids(), resume_dir=tmp_path / "w1", progress=False)

    def stop(done: int, total: int, label: str) -> None:
        if done == 2:
            raise KeyboardInterrupt

    for progress in (stop, False):
        try:
            quantize_directory(
                source, tmp_path / "b", "w4a8", calibration=ids(), resume_dir=tmp_path / "w2", progress=progress
            )
        except KeyboardInterrupt:
            assert not (tmp_path / "b").exists() and len(list((tmp_path / "w2").glob("block-*"))) == 2
    assert files(tmp_path / "a") == files(tmp_path / "b")


def test_a_block_that_comes_again_is_read_again_as_quantized(tmp_path: Path) -> None:
    """The same model with its blocks called in turn twice: in memory and with the weights let go in between."""
    source = plain(tmp_path / "plain")

    def twice(model: nn.Module) -> None:
        layers = model.get_submodule("model.layers")
        assert isinstance(layers, nn.ModuleList)
        layers.extend([layers[0]])
        model.config.num_hidden_layers += 1  # type: ignore[union-attr, operator]
        model.config.layer_types += ["full_attention"]  # type: ignore[union-attr, operator]

    model = lowbit.load(source)
    twice(model)
    want, _ = calibrate.quantize_model(model, "w4a8", "gptq", ids(), progress=False)
    disk = DiskModel(source, "model.layers")
    twice(disk.model)
    found, report = calibrate.quantize_model(
        disk.model, "w4a8", "gptq", ids(), progress=False, present=disk.present, resume_dir=tmp_path / "w"
    )
    assert [row.name for row in report.rows] == [*want] == [*found] and len(want) == 21
    for name, q in want.items():
        assert torch.equal(q.codes, found[name].codes) and torch.equal(q.scales, found[name].scales)
    x = torch.randn(2, 3, 64)
    with disk.present(disk.model.get_submodule("model.layers.0")):
        inside = disk.model.get_submodule("model.layers.0.mlp")(x)
    whole = transformers.AutoModelForCausalLM.from_pretrained(source).get_submodule("model.layers.0.mlp")(x)
    assert torch.equal(inside, whole)  # the file is as it was


def test_what_cannot_be_quantized_from_disk_is_refused(tmp_path: Path) -> None:
    source = plain(tmp_path / "plain")
    quantize_directory(source, tmp_path / "a", "w8a8", "rtn", resume_dir=tmp_path / "w", progress=False)
    with pytest.raises(FormatError, match="a: found quantized weights, accepted are plain ones"):
        quantize_directory(tmp_path / "a", tmp_path / "b", "w8a8", "rtn", resume_dir=tmp_path / "w", progress=False)
    disk = DiskModel(source, "model.layers")
    with pytest.raises(FormatError, match="resume_dir: found None, accepted with weights that stay on disk"):
        calibrate.quantize_model(disk.model, "w8a8", "rtn", present=disk.present, progress=False)
    shutil.copy(source / "model.safetensors", tmp_path / "model.safetensors")
    with pytest.raises(FormatError, match="found no config.json"):
        DiskModel(tmp_path, "model.layers")


def test_a_checkpoint_is_written_one_tensor_at_a_time(tmp_path: Path) -> None:
    alive: list[weakref.ref[Tensor]] = []
    most = 0

    def stream() -> Iterator[tuple[str, Tensor]]:
        nonlocal most
        for i in range(8):
            tensor = torch.full((1000,), float(i), dtype=(torch.float32, torch.float16)[i % 2])
            alive.append(weakref.ref(tensor))
            most = max(most, sum(ref() is not None for ref in alive))
            yield f"t{i}", tensor
            del tensor

    write_checkpoint(tmp_path, stream(), {}, max_shard_bytes=9000)
    assert most <= 2
    found = lowbit.checkpoint.open_checkpoint(tmp_path)
    assert len({found.file(name) for name in found}) == 4
    assert all(torch.equal(found[f"t{i}"].float(), torch.full((1000,), float(i))) for i in range(8))
    assert not list(tmp_path.glob(".lowbit*"))
