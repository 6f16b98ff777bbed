"""Checkpoints that other projects' own tools wrote, against what those tools say the weights and outputs are."""

from __future__ import annotations

import json
import warnings
from pathlib import Path

import numpy as np
import pytest
import torch

from lowbit.checkpoint import Checkpoint, open_checkpoint
from lowbit.formats import config_for, detect, quantized_layers, read_layer, summary
from lowbit.reference import dequantize
from lowbit.types import Activation, QuantizedWeight

# fixture: format, quantized linears, and of q_proj: bits, group, symmetric, act-order, activation.
EXPECTED = {
    "autoawq-gemm-w4g32-1l": ("awq", 7, 4, 32, False, False, None),
    "autoround-autoawq-w4g64-asym-1l": ("awq", 7, 4, 64, False, False, None),
    "autoround-autogptq-w4g64-asym-edgezero-1l": ("gptq", 7, 4, 64, False, False, None),
    "autoround-autoround-w4g32-asym-1l": ("awq", 7, 4, 32, False, False, None),
    "autoround-autoround-w4g64-sym-1l": ("gptq", 7, 4, 64, True, False, None),
    "autoround-llmc-w4a16g64-sym-1l": ("compressed-tensors", 7, 4, 64, True, False, None),
    "gptqmodel-awq-gemm-w4g64-asym-1l": ("awq", 7, 4, 64, False, False, None),
    "gptqmodel-gptq-dynamic-1l": ("gptq", 6, 8, 32, True, False, None),
    "gptqmodel-gptq-w4g32-asym-descact-v2-1l": ("gptq_v2", 7, 4, 32, False, True, None),
    "gptqmodel-gptq-w4g64-asym-v1-edgezero-1l": ("gptq", 7, 4, 64, False, False, None),
    "gptqmodel-gptq-w4g64-asym-v2-1l": ("gptq_v2", 7, 4, 64, False, False, None),
    "gptqmodel-gptq-w4g64-sym-2l": ("gptq", 14, 4, 64, True, False, None),
    "gptqmodel-gptq-w4g64-sym-descact-1l": ("gptq", 7, 4, 64, True, True, None),
    "gptqmodel-gptq-w4gm1-sym-1l": ("gptq", 7, 4, 576, True, False, None),
    "llmc-gptq-w4a16g64-asym-1l": ("compressed-tensors", 7, 4, 64, False, False, None),
    "llmc-rtn-w4a16g64-sym-1l": ("compressed-tensors", 7, 4, 64, True, False, None),
    "llmc-rtn-w4a8-1l": ("compressed-tensors", 7, 4, 64, True, False, Activation(8, "token")),
    "llmc-rtn-w8a8-int8-1l": ("compressed-tensors", 7, 8, 576, True, False, Activation(8, "token")),
    "llmc09-gptq-w4a16g64-sym-actgroup-1l": ("compressed-tensors", 7, 4, 64, True, True, None),
}
BASE_ONLY = {"gguf-q4_0-1l", "gguf-q4_1-1l"}


def read(checkpoint: Checkpoint, layer: str) -> QuantizedWeight:
    name = detect(checkpoint.quantization, checkpoint)
    assert name is not None
    with warnings.catch_warnings():
        warnings.simplefilter("error")  # none of these files is odd enough for a warning
        return read_layer(checkpoint, layer, name, checkpoint.quantization or {})


def compare(directory: Path) -> None:
    """The tool's own weight rows exactly, its float64 outputs within 1e-6, its runtime within its own rounding."""
    checkpoint = open_checkpoint(directory)
    reference = np.load(directory / "reference.npz")
    modules = json.loads(str(reference["meta"]))["modules"]
    for short, layer in modules.items():
        q = read(checkpoint, layer)
        q.check_values(layer)
        weight = dequantize(q)
        rows = [name for name in reference.files if name.startswith(f"{short}.weight")]
        assert rows, short
        for name in rows:
            expected = torch.from_numpy(reference[name])
            assert float((weight[: expected.shape[0]] - expected).abs().max()) == 0.0, (short, name)
        y = weight.double() @ torch.from_numpy(reference[f"{short}.x"]).double()
        expected = torch.from_numpy(reference[f"{short}.y_fp64"])
        assert y.shape == expected.shape
        assert float((y - expected).norm() / expected.norm()) < 1e-6, short


def test_every_fixture_is_named(shared: Path) -> None:
    held = {entry.name for entry in (shared / "fixtures").iterdir() if entry.is_dir()}
    assert held == set(EXPECTED) | BASE_ONLY


@pytest.mark.parametrize("fixture", EXPECTED)
def test_weights_and_outputs(shared: Path, fixture: str) -> None:
    compare(shared / "fixtures" / fixture)


@pytest.mark.parametrize("fixture", EXPECTED)
def test_what_the_file_says(shared: Path, fixture: str) -> None:
    name, count, bits, group, symmetric, act_order, activation = EXPECTED[fixture]
    checkpoint = open_checkpoint(shared / "fixtures" / fixture)
    assert detect(checkpoint.quantization, checkpoint) == name
    layers = quantized_layers(checkpoint, name, checkpoint.quantization or {})
    assert len(layers) == count
    found = {layer: read(checkpoint, layer) for layer in layers}
    q = found["model.layers.0.self_attn.q_proj"]
    assert (q.bits, q.group_size, q.symmetric, q.perm is not None, q.activation) == (
        bits,
        group,
        symmetric,
        act_order,
        activation,
    )
    assert summary(q)["act_order"] == act_order
    # What was read can be written by the same format, and reads back to the same values.
    from lowbit.formats import FORMATS

    written = {}
    for layer, value in found.items():
        written.update(FORMATS[name].write(value, layer))
    config = config_for(name, found)
    for layer, value in found.items():
        again = read_layer(written, layer, name, config)
        assert torch.equal(dequantize(again), dequantize(value)), layer
        assert torch.equal(again.codes, value.codes) and torch.equal(again.scales, value.scales), layer


def test_dynamic_rules_leave_a_module_dense(shared: Path) -> None:
    checkpoint = open_checkpoint(shared / "fixtures" / "gptqmodel-gptq-dynamic-1l")
    layers = quantized_layers(checkpoint, "gptq", checkpoint.quantization or {})
    assert "model.layers.0.self_attn.o_proj" not in layers
    down = read(checkpoint, "model.layers.0.mlp.down_proj")
    assert (down.bits, down.group_size) == (4, 64)


def test_v1_zero_points_of_zero(shared: Path) -> None:
    """Whole words: by single nibbles 124 zero points of q_proj would be wrong."""
    checkpoint = open_checkpoint(shared / "fixtures" / "gptqmodel-gptq-w4g64-asym-v1-edgezero-1l")
    q = read(checkpoint, "model.layers.0.self_attn.q_proj")
    assert q.zeros is not None and int((q.zeros == 0).sum()) > 0
    assert any("gptqmodel" in note for note in q.notes)
    raw = checkpoint["model.layers.0.self_attn.q_proj.qzeros"]
    nibbles = torch.stack([(raw >> shift) & 15 for shift in range(0, 32, 4)], -1).flatten(-2)
    assert int((((nibbles + 1) & 15).t() != q.zeros).sum()) == 124


def test_scales_may_be_negative(shared: Path) -> None:
    q = read(
        open_checkpoint(shared / "fixtures" / "autoround-autoround-w4g64-sym-1l"), "model.layers.0.self_attn.q_proj"
    )
    assert 0.2 < float((q.scales < 0).float().mean()) < 0.8


def test_whole_model(shared: Path) -> None:
    directory = shared / "checkpoints" / "smollm2-135m-gptq-w4g64-sym"
    compare(directory)
    checkpoint = open_checkpoint(directory)
    assert len(quantized_layers(checkpoint, "gptq", checkpoint.quantization or {})) == 210
