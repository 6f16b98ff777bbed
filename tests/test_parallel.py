"""Layers and models cut over processes: the cuts as functions, then two processes over gloo (two GPUs over NCCL)."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from torch import nn

import parallel_worker as worker
from lowbit import reference
from lowbit.checkpoint import write_checkpoint
from lowbit.formats import FORMATS, config_for
from lowbit.nn import QuantLinear
from lowbit.nn.shards import Half, column_half, column_shard, row_columns, row_half, row_shard
from lowbit.types import Activation, FormatError
from samples import CUTTABLE, byte_tokenizer, cuttable, part_alone, rows

FLOAT = Activation(16, "none")


# ---- the cuts --------------------------------------------------------------------------------------------------------
@pytest.mark.parametrize("ranks", [1, 2, 4])
@pytest.mark.parametrize("kind", CUTTABLE)
def test_column_wise_parts_beside_each_other_are_the_whole_to_the_bit(kind: str, ranks: int) -> None:
    q, x = cuttable(kind, 72, 256), rows(5, 256)
    parts = [column_shard(q, rank, ranks) for rank in range(ranks)]
    assert torch.equal(torch.cat([part.codes for part in parts]), q.codes)
    for activation in ("group", "token", None):
        whole = QuantLinear.from_quantized(q, activation)(x)
        each = [QuantLinear.from_quantized(part, activation)(x) for part in parts]
        assert torch.equal(torch.cat(each, -1), whole), activation


@pytest.mark.parametrize("ranks", [2, 4])
@pytest.mark.parametrize("kind", CUTTABLE)
def test_row_wise_parts_add_up_to_the_whole(kind: str, ranks: int) -> None:
    q, x = cuttable(kind, 40, 256), rows(400, 256)
    exact = reference.linear(x, q, FLOAT)

    def error(activation: Activation) -> tuple[float, float]:
        parts = [part_alone(q, x, rank, ranks, activation) for rank in range(ranks)]
        together, whole = torch.stack(parts).sum(0), reference.linear(x, q, activation)
        return float((together - whole).norm() / whole.norm()), float((together - exact).norm() / exact.norm())

    assert error(FLOAT)[0] < 2e-6
    if kind != "channel":  # its one group a row becomes one a rank
        assert error(Activation(8, "group"))[0] < 2e-6  # whole groups: the same activation scales
    whole = float((reference.linear(x, q, Activation(8, "token")) - exact).norm() / exact.norm())
    assert 0 < error(Activation(8, "token"))[1] < 1.03 * whole
    weights = [row_shard(q, rank, ranks).weight for rank in range(ranks)]
    assert [part.bias is not None for part in weights] == [q.bias is not None] + [False] * (ranks - 1)
    assert sum(part.codes.numel() for part in weights) == q.codes.numel()


def test_two_level_scales_stay_two_level() -> None:
    q = cuttable("two levels", 40, 256)
    assert reference.two_level(q.scales) is not None
    for part in (column_shard(q, 1, 2), row_shard(q, 1, 2).weight):
        assert reference.two_level(part.scales) is not None


def test_who_needs_all_of_x() -> None:
    for kind in ("zeros", "order inside", "svdquant", "channel"):
        assert row_shard(cuttable(kind, 8, 256), 1, 2).inputs is None, kind
    crossing = row_shard(cuttable("order", 8, 256), 1, 2)
    assert crossing.inputs is not None and crossing.weight.perm is None
    inside = torch.cat([torch.randperm(128), 128 + torch.randperm(128)])  # no group has columns of both ranks
    table, local = row_columns(256, 32, 2, inside.view(2, 128).flip(0).reshape(-1))
    assert local and table[0, 0] == 128 and table[1, 0] == 0
    assert row_columns(256, 256, 2, torch.randperm(256))[1]  # one group can be cut anywhere
    assert not row_columns(192, 32, 2, None, 64)[1]  # 96 columns would cut a Hadamard block of 64


def test_float16_storage() -> None:
    linear, x = nn.Linear(64, 24), rows(3, 64)
    half = Half(linear.weight.detach().half(), linear.bias.detach())
    whole = QuantLinear.from_half(*half)(x)
    columns = [QuantLinear.from_half(*column_half(half, rank, 2))(x) for rank in (0, 1)]
    assert torch.equal(torch.cat(columns, -1), whole)
    parts = [QuantLinear.from_half(*row_half(half, rank, 2))(x[:, 32 * rank : 32 * (rank + 1)]) for rank in (0, 1)]
    assert torch.allclose(parts[0] + parts[1], whole, rtol=1e-5, atol=1e-6)


def test_what_cannot_be_cut_is_refused_with_its_numbers() -> None:
    q = cuttable("zeros", 40, 11 * 32)
    with pytest.raises(FormatError) as caught:
        row_shard(q, 0, 2, "mlp.down_proj")
    assert str(caught.value) == (
        "mlp.down_proj: in_features: found 352 in groups of 32, 176 columns on each of 2 ranks, accepted is a multiple "
        "of 32 on each (numbers of ranks: 1, 11)"
    )
    with pytest.raises(FormatError, match=r"^q: out_features: found 40, accepted on 3 ranks is a multiple of 3$"):
        column_shard(q, 0, 3, "q")
    with pytest.raises(FormatError, match="in_features: found 352, accepted on 3 ranks"):
        row_shard(q, 0, 3)


# ---- processes -------------------------------------------------------------------------------------------------------
def run(folder: Path, backend: str, timeout: float) -> dict[str, str]:
    """How every check ended, "" or the traceback of the processes in which it failed."""
    environment = os.environ | {"OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo", "HF_HUB_OFFLINE": "1"}
    environment["PYTHONPATH"] = os.pathsep.join(filter(None, sys.path))
    command = [sys.executable, worker.__file__]
    processes = [
        subprocess.Popen([*command, str(rank), "2", backend, str(folder)], env=environment, cwd=folder)
        for rank in (0, 1)
    ]
    try:
        for process in processes:
            process.wait(timeout)
    finally:
        for process in processes:
            process.kill()
            process.wait()
    ended = [json.loads((folder / f"ended-{rank}.json").read_text()) for rank in (0, 1)]
    return {name: "\n".join(filter(None, (one.get(name, "") for one in ended))) for name in ended[0]}


def models(folder: Path) -> None:
    """What the checks load: GPTQ, the same with activation order of every linear, three heads, and plain weights."""
    pytest.importorskip("transformers")
    from test_models import save_as, save_plain, tiny

    made = save_as(tiny("qwen2", vocab_size=260), folder / "gptq", "gptq")
    byte_tokenizer(pad_token="<pad>", eos_token="</s>").save_pretrained(folder / "gptq")
    save_as(tiny(hidden_size=48, num_attention_heads=3, num_key_value_heads=3), folder / "heads", "gptq")
    save_plain(tiny(), folder / "plain")
    model = tiny("qwen2", vocab_size=260)
    layers = {name: q.with_(perm=torch.randperm(q.k).to(torch.int32)) for name, q in made.items()}
    inside = {f"{name}.{part}" for name in layers for part in ("weight", "bias")}
    tensors = {name: tensor for name, tensor in model.state_dict().items() if name not in inside}
    for name, q in layers.items():
        tensors |= FORMATS["gptq"].write(q, name)
    config = model.config.to_dict() | {"quantization_config": config_for("gptq", layers, ["lm_head"])}
    write_checkpoint(folder / "ordered", tensors, config)


@pytest.fixture(scope="module")
def over_gloo(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    if not torch.distributed.is_available():
        pytest.skip("this torch has no torch.distributed")
    folder = tmp_path_factory.mktemp("gloo")
    models(folder)
    return run(folder, "gloo", 600)


@pytest.mark.parametrize("check", [*worker.LAYERS, *worker.MODELS], ids=lambda check: check.__name__)
def test_two_processes_over_gloo(check: object, over_gloo: dict[str, str]) -> None:
    assert over_gloo[check.__name__] == ""  # type: ignore[attr-defined]


@pytest.mark.gpu
def test_two_gpus_over_nccl(tmp_path: Path) -> None:
    if torch.cuda.device_count() < 2:
        pytest.skip(f"needs two GPUs, found {torch.cuda.device_count()}")
    models(tmp_path)
    ended = run(tmp_path, "nccl", 600)
    assert set(ended) == {check.__name__ for check in worker.ON_GPU}
    assert {name: text for name, text in ended.items() if text} == {}
