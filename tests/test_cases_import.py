"""The case list, section A (importing checkpoints): each input of its own, with the value that is right.

`VALUES` is the table: a layer's tensors and configuration, x, and y. Every row is read by the format's importer and
computed three ways: by the dequantized weight in float64, and by `QuantLinear` with float and with int8 activations.
"""

from __future__ import annotations

import json
import warnings
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
from safetensors.torch import save_file
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from lowbit.checkpoint import open_checkpoint
from lowbit.formats import FORMATS, detect, quantized_layers, read_layer
from lowbit.nn import QuantLinear
from lowbit.reference import dequantize
from lowbit.types import FormatError, QuantizedWeight
from samples import awq_words, word, words

L = "model.layers.0.mlp.down_proj"
GPTQ = {"quant_method": "gptq", "bits": 4}


class Value(NamedTuple):
    """One row: what is in the file, the input, and y for every output (or one value for all)."""

    format: str
    tensors: dict[str, Tensor]
    config: dict[str, Any]
    x: Tensor
    y: list[float] | float
    warns: str = ""  # part of the one warning this row must give; "" means none
    perm: bool = False


def fill(value: int, *shape: int) -> Tensor:
    """int32 words of one bit pattern."""
    return torch.full(shape, word(value), dtype=torch.int32)


def gptq(
    codes: Tensor, qzeros: Tensor, scales: Tensor, g_idx: Tensor | None = None, bias: Tensor | None = None
) -> dict[str, Tensor]:
    """codes [K, N] of 4 bits, qzeros words [G, N / 8], scales [G, N]."""
    tensors = {"qweight": words(codes, 0), "qzeros": qzeros, "scales": scales}
    tensors.update({"g_idx": g_idx} if g_idx is not None else {})
    tensors.update({"bias": bias} if bias is not None else {})
    return tensors


def ramp(n: int = 8, k: int = 32) -> Tensor:
    return (torch.arange(k)[:, None] + torch.arange(n)[None, :]) % 16


def flat(k: int, scales: Tensor, n: int = 8, **more: Any) -> dict[str, Tensor]:
    """Code 9, zero 8 (stored 7): w is its scale. scales [G] for every output."""
    groups = scales.numel()
    spread = scales.half()[:, None].expand(groups, n).contiguous()
    return gptq(torch.full((k, n), 9), fill(0x77777777, groups, -(-n // 8)), spread, **more)


def halves(value: float, *shape: int) -> Tensor:
    return torch.full(shape, value, dtype=torch.float16)


def ones(k: int) -> Tensor:
    return torch.ones(k)


def last(k: int, count: int) -> Tensor:
    return torch.cat([torch.zeros(k - count), torch.ones(count)])


def unit(k: int, at: int) -> Tensor:
    return torch.nn.functional.one_hot(torch.tensor(at), k).float()


def even(k: int) -> Tensor:
    return (torch.arange(k) % 2 == 0).float()


SYM = {**GPTQ, "group_size": 32, "sym": True, "desc_act": False}
ASYM = {**GPTQ, "group_size": 32, "sym": False, "desc_act": False, "checkpoint_format": "gptq"}
FOUR = torch.tensor([1.0, 2, 3, 4])
ZEROS = [0, 5, 8, 15, 0, 1, 2, 3]
# The zero points above as the weight itself: code 0, scale 1, one input: y = -zero.
IMP02 = {"codes": torch.zeros(32, 8, dtype=torch.long), "scales": torch.ones(1, 8).half()}
WRAP_Y = [-float(zero) for zero in ZEROS]
EIGHT = torch.where(torch.arange(32) % 2 == 0, 0, 255).to(torch.uint8)[:, None].expand(32, 32).contiguous()
EIGHT_BIT = {
    "qweight": EIGHT.t().contiguous().view(torch.int32).t().contiguous(),  # four codes along K to a word
    "qzeros": fill(0x7F7F7F7F, 1, 8),
    "scales": torch.ones(1, 32).half(),
}
CT_CODES = (torch.arange(32)[None, :] + torch.arange(8)[:, None]) % 16  # [N, K], stored as q + 8


def ct(symmetric: bool, group: int | None = 32, **more: Any) -> dict[str, Any]:
    weights = {
        "num_bits": 4,
        "type": "int",
        "symmetric": symmetric,
        "strategy": "group" if group else "channel",
        "group_size": group,
    }
    row = {"targets": ["Linear"], "weights": weights, "input_activations": None, "format": "pack-quantized"}
    return {
        "quant_method": "compressed-tensors",
        "format": "pack-quantized",
        "config_groups": {"group_0": row},
        "ignore": [],
        **more,
    }


def packed(**more: Tensor) -> dict[str, Tensor]:
    base = {
        "weight_packed": words(CT_CODES, 1),
        "weight_scale": halves(0.5, 8, 1),
        "weight_shape": torch.tensor([8, 32]),
    }
    return {**base, **more}


def awq_config(group: int = 32) -> dict[str, Any]:
    return {"quant_method": "awq", "version": "gemm", "bits": 4, "group_size": group, "zero_point": True}


VALUES: dict[str, Value] = {
    # IMP-01: the zero point and its label
    "01a label gptq": Value(
        "gptq",
        gptq(ramp(), fill(0x77777777, 1, 1), halves(0.5, 1, 8)),
        {**SYM, "checkpoint_format": "gptq"},
        ones(32),
        -8,
    ),
    "01a no label": Value("gptq", gptq(ramp(), fill(0x77777777, 1, 1), halves(0.5, 1, 8)), SYM, ones(32), -8),
    "01b gptq_v2": Value(
        "gptq_v2",
        gptq(ramp(), fill(0x88888888, 1, 1), halves(0.5, 1, 8)),
        {**SYM, "checkpoint_format": "gptq_v2"},
        ones(32),
        -8,
    ),
    "01c label gptq, stored as v2": Value(
        "gptq",
        gptq(ramp(), fill(0x88888888, 1, 1), halves(0.5, 1, 8)),
        {**SYM, "checkpoint_format": "gptq"},
        ones(32),
        -8,
        "sym is true",
    ),
    "01c label gptq_v2, stored as v1": Value(
        "gptq_v2",
        gptq(ramp(), fill(0x77777777, 1, 1), halves(0.5, 1, 8)),
        {**SYM, "format": "gptq_v2"},
        ones(32),
        -8,
        "sym is true",
    ),
    # IMP-02: zero point 0 in three encodings
    "02 v2": Value(
        "gptq_v2",
        gptq(qzeros=fill(0x3210F850, 1, 1), **IMP02),
        {**ASYM, "checkpoint_format": "gptq_v2"},
        unit(32, 0),
        WRAP_Y,
    ),
    "02 v1 by field": Value(
        "gptq",
        gptq(qzeros=fill(0x210FE74F, 1, 1), **IMP02),
        {**ASYM, "meta": {"quantizer": ["olive:0.9"]}},
        unit(32, 0),
        WRAP_Y,
    ),
    "02 v1 by word": Value(
        "gptq",
        gptq(qzeros=fill(0x20FFE73F, 1, 1), **IMP02),
        {**ASYM, "meta": {"quantizer": ["gptqmodel:7.7.0"]}},
        unit(32, 0),
        WRAP_Y,
    ),
    "02 v1 by word, no writer": Value(
        "gptq", gptq(qzeros=fill(0x20FFE73F, 1, 1), **IMP02), ASYM, unit(32, 0), WRAP_Y, "meta.quantizer"
    ),
    # IMP-03: a g_idx that says nothing
    "03a missing": Value("gptq", flat(128, FOUR), SYM, last(128, 32), 128),
    "03a shape [0]": Value("gptq", flat(128, FOUR, g_idx=torch.empty(0, dtype=torch.int32)), SYM, last(128, 32), 128),
    "03a all 0": Value("gptq", flat(128, FOUR, g_idx=torch.zeros(128, dtype=torch.int32)), SYM, last(128, 32), 128),
    "03a all -1": Value("gptq", flat(128, FOUR, g_idx=fill(0xFFFFFFFF, 128)), SYM, last(128, 32), 128),
    "03a k//32": Value("gptq", flat(128, FOUR, g_idx=(torch.arange(128) // 32).int()), SYM, last(128, 32), 128),
    "03b one group, order declared": Value(
        "gptq",
        flat(128, torch.tensor([0.25]), g_idx=torch.zeros(128, dtype=torch.int32)),
        {**SYM, "group_size": -1, "desc_act": True},
        ones(128),
        32,
    ),
    "03e int64": Value("gptq", flat(128, FOUR, g_idx=torch.arange(128) // 32), SYM, last(128, 32), 128),
    # IMP-04: real activation order
    "04 q": Value(
        "gptq",
        flat(64, torch.tensor([1.0, 100]), g_idx=(torch.arange(64) % 2).int()),
        {**SYM, "desc_act": True},
        even(64),
        32,
        perm=True,
    ),
    "04 k": Value(
        "gptq",
        flat(64, torch.tensor([1.0, 100]), g_idx=(torch.arange(64) // 32).int()),
        {**SYM, "desc_act": True},
        even(64),
        1616,
    ),
    "04 v": Value(
        "gptq",
        flat(64, torch.tensor([1.0, 100]), g_idx=(1 - torch.arange(64) % 2).int()),
        {**SYM, "desc_act": True},
        even(64),
        3200,
        perm=True,
    ),
    # IMP-05: K and the group
    "05a short last group": Value(
        "gptq", flat(192, torch.tensor([1.0, 2]), n=32), {**SYM, "group_size": 128}, ones(192), 256
    ),
    "05b": Value("gptq", flat(160, torch.ones(5), n=32), SYM, ones(160), 160),
    "05e AWQ -1": Value(
        "awq",
        {"qweight": awq_words(ramp()), "qzeros": fill(0x88888888, 1, 1), "scales": halves(0.5, 1, 8)},
        {"quant_method": "awq", "version": "GEMM", "w_bit": 4, "q_group_size": -1, "zero_point": True},
        ones(32),
        -8,
    ),
    # IMP-06: N
    "06 N=48": Value("gptq", gptq(ramp(48), fill(0x77777777, 1, 6), halves(0.5, 1, 48)), SYM, ones(32), -8),
    "06 N=40": Value("gptq", gptq(ramp(40), fill(0x77777777, 1, 5), halves(0.5, 1, 40)), SYM, ones(32), -8),
    # IMP-07: 8 bits
    "07b low": Value("gptq", EIGHT_BIT, {**SYM, "bits": 8}, unit(32, 0), -128),
    "07b high": Value("gptq", EIGHT_BIT, {**SYM, "bits": 8}, unit(32, 1), 127),
    # IMP-08: compressed-tensors
    "08a symmetric": Value("compressed-tensors", packed(), ct(True), ones(32), -8),
    "08b asymmetric": Value(
        "compressed-tensors",
        packed(weight_zero_point=fill(0xBA987654, 1, 1)),
        ct(False),
        ones(32),
        [56, 40, 24, 8, -8, -24, -40, -56],
    ),
    "08d logical shape": Value(
        "compressed-tensors",
        {
            # 20 codes of q = 1 and four of padding that must never count
            "weight_packed": words(torch.tensor([[9] * 20 + [15] * 4] * 2), 1),
            "weight_scale": halves(0.5, 2, 1),
            "weight_shape": torch.tensor([2, 20]),
        },
        ct(True, None),
        ones(20),
        10,
    ),
    "08e channel": Value("compressed-tensors", packed(), ct(True, None), ones(32), -8),
    # IMP-12: scales
    "12a bfloat16 98304": Value(
        "gptq",
        gptq(torch.full((32, 8), 9), fill(0x77777777, 1, 1), torch.full((1, 8), 98304, dtype=torch.bfloat16)),
        SYM,
        torch.full((32,), 2.0**-10),
        3072,
    ),
    "12b float32 1e-9": Value(
        "gptq",
        gptq(torch.full((32, 8), 15), fill(0x77777777, 1, 1), torch.full((1, 8), 1e-9)),
        SYM,
        torch.full((32,), 1000.0),
        2.24e-4,
    ),
    "12c smallest float16": Value(
        "gptq",
        gptq(torch.full((32, 8), 9), fill(0x77777777, 1, 1), halves(2.0**-24, 1, 8)),
        SYM,
        ones(32),
        32 * 2.0**-24,
    ),
    "12d zero": Value("gptq", gptq(torch.full((32, 8), 9), fill(0x77777777, 1, 1), halves(0, 1, 8)), SYM, ones(32), 0),
    "12d negative": Value(
        "gptq", gptq(torch.full((32, 8), 9), fill(0x77777777, 1, 1), halves(-0.5, 1, 8)), SYM, ones(32), -16
    ),
    # IMP-13: bias
    "13a bias once": Value(
        "gptq",
        flat(32, torch.tensor([1.0]), bias=torch.arange(1.0, 9).half()),
        SYM,
        torch.zeros(32),
        [1, 2, 3, 4, 5, 6, 7, 8],
    ),
    "13b no bias": Value("gptq", flat(32, torch.tensor([1.0])), SYM, torch.zeros(32), 0),
    "13d bias bfloat16": Value(
        "gptq",
        flat(32, torch.tensor([1.0]), bias=torch.arange(1.0, 9).bfloat16()),
        SYM,
        torch.zeros(32),
        [1, 2, 3, 4, 5, 6, 7, 8],
    ),
}


def named(tensors: Mapping[str, Tensor], prefix: str = L) -> dict[str, Tensor]:
    return {f"{prefix}.{suffix}": tensor for suffix, tensor in tensors.items()}


def read(row: Value) -> QuantizedWeight:
    return read_layer(named(row.tensors), L, row.format, row.config)


def float64(q: QuantizedWeight, x: Tensor) -> Tensor:
    y = dequantize(q).double() @ x.double()
    return (y if q.bias is None else y + q.bias.double()).float()


def by_layer(activation: str | None, rows: int) -> Callable[[QuantizedWeight, Tensor], Tensor]:
    def run(q: QuantizedWeight, x: Tensor) -> Tensor:
        y = QuantLinear.from_quantized(q, activation=activation)(x.float()[None, :].expand(rows, -1).contiguous())
        assert torch.equal(y, y[:1].expand_as(y))
        return y[0]

    return run


WAYS: dict[str, Callable[[QuantizedWeight, Tensor], Tensor]] = {
    "float64": float64,
    "float activations": by_layer(None, 1),
    "float activations, 200 rows": by_layer(None, 200),
    "int8 per token": by_layer("token", 1),
    "int8 per group, 200 rows": by_layer("group", 200),
}


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("case", VALUES)
def test_value(case: str, way: str) -> None:
    row = VALUES[case]
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        q = read(row)
    assert [row.warns in str(one.message) for one in caught] == ([True] if row.warns else [])
    assert (q.perm is not None) == row.perm
    if row.warns:
        assert any(row.warns in note for note in q.notes)
    expected = torch.tensor(row.y, dtype=torch.float32)
    found = WAYS[way](q, row.x)
    tolerance = 0.0 if way == "float64" and not case.startswith("12b") else 1e-6
    torch.testing.assert_close(found, expected.expand_as(found), rtol=tolerance, atol=0)


def test_01_a_and_b_are_bit_equal() -> None:
    a, b = read(VALUES["01a label gptq"]), read(VALUES["01b gptq_v2"])
    assert torch.equal(a.codes, b.codes) and torch.equal(a.scales, b.scales)
    assert a.zeros is None and b.zeros is None


def test_02_the_zero_points_themselves() -> None:
    for case in ("02 v2", "02 v1 by field", "02 v1 by word"):
        q = read(VALUES[case])
        assert q.zeros is not None and q.zeros.flatten().tolist() == ZEROS, case


@pytest.mark.parametrize("format", ["gptq", "gptq_v2"])
def test_02_our_writer_reads_itself_back(format: str) -> None:
    q = read(VALUES["02 v2"])
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        again = read_layer(FORMATS[format].write(q, L), L, format, {**ASYM, "checkpoint_format": format,
                                                                     "meta": {"quantizer": ["lowbit:1"]}})  # fmt: skip
    assert again.zeros is not None and again.zeros.flatten().tolist() == ZEROS


def test_02_no_stored_15_decodes_freely() -> None:
    q = read(Value("gptq", gptq(qzeros=fill(0x76543210, 1, 1), **IMP02), ASYM, ones(32), 0))
    assert q.zeros is not None and q.zeros.flatten().tolist() == [1, 2, 3, 4, 5, 6, 7, 8]
    assert q.notes == ()


def test_10_awq_columns() -> None:
    """Column values in the words of the case list, N = 8 and 24, other rows for the zero points than for the codes."""
    low, high = 0x75316420, 0xFDB9ECA8
    assert word(high) == -38146904
    for n in (8, 24):
        rows = torch.tensor([[low] * (n // 8), [high] * (n // 8)] * 16, dtype=torch.int64)
        qweight = torch.where(rows >= 2**31, rows - 2**32, rows).int()
        tensors = {"qweight": qweight, "qzeros": fill(high, 1, n // 8), "scales": torch.ones(1, n).half()}
        q = read_layer(named(tensors), L, "awq", awq_config())
        assert q.codes[:, 0].tolist() == list(range(8)) * (n // 8)
        assert q.codes[:, 1].tolist() == list(range(8, 16)) * (n // 8)
        assert q.zeros is not None and q.zeros[:, 0].tolist() == list(range(8, 16)) * (n // 8)


REFUSED: dict[str, tuple[str, dict[str, Tensor], dict[str, Any], str]] = {
    # case: format, tensors, configuration, what the one line must say
    "01 sym with many zero points": (
        "gptq",
        gptq(qzeros=fill(0x20FFE73F, 1, 1), **IMP02),
        SYM,
        r"sym: found true with zero points 0 \.\. 15",
    ),
    "02 old AutoGPTQ": (
        "gptq",
        gptq(qzeros=fill(0xFFFFFFFF, 1, 1), **IMP02),
        {**ASYM, "meta": {"quantizer": "auto_gptq:0.4"}},
        "qzeros: found a zero point of 0 written by auto_gptq",
    ),
    "03c": (
        "gptq",
        flat(128, FOUR, g_idx=torch.zeros(128, dtype=torch.int32)),
        {**SYM, "desc_act": True},
        "g_idx: found all 0",
    ),
    "03c missing": ("gptq", flat(128, FOUR), {**SYM, "desc_act": True}, "g_idx: found nothing"),
    "03d": (
        "gptq",
        flat(128, FOUR, g_idx=torch.where(torch.arange(128) == 5, 4, torch.arange(128) // 32).int()),
        SYM,
        r"g_idx\[5\]: found 4, accepted is 0 \.\. 3",
    ),
    "03 negative": (
        "gptq",
        flat(128, FOUR, g_idx=torch.where(torch.arange(128) == 5, -2, torch.arange(128) // 32).int()),
        SYM,
        r"g_idx\[5\]: found -2",
    ),
    "03 uneven groups": (
        "gptq",
        flat(128, FOUR, g_idx=(torch.arange(128) // 43).int()),
        SYM,
        "g_idx: found groups of",
    ),
    "03 dtype": ("gptq", flat(128, FOUR, g_idx=torch.zeros(128)), SYM, "g_idx: found float32"),
    "05c AWQ": (
        "awq",
        {"qweight": fill(0, 80, 1), "qzeros": fill(0, 2, 1), "scales": halves(1, 2, 8)},
        awq_config(),
        "group_size: found 32 with 2 rows of scales for K = 80",
    ),
    "05c compressed-tensors": (
        "compressed-tensors",
        {
            "weight_packed": fill(0, 8, 10),
            "weight_scale": halves(1, 8, 2),
            "weight_shape": torch.tensor([8, 80]),
        },
        ct(True),
        r"weight_scale: found shape \[8, 2\], accepted is \[8, 3\]",
    ),
    "06 N=48, 4 words": (
        "gptq",
        gptq(ramp(48), fill(0x77777777, 1, 4), halves(0.5, 1, 48)),
        SYM,
        r"qzeros: found shape \[1, 4\] for scales \[1, 48\], accepted is \[1, 6\]",
    ),
    "06 N=40, 4 words": (
        "gptq",
        gptq(ramp(40), fill(0x77777777, 1, 4), halves(0.5, 1, 40)),
        SYM,
        r"qzeros: found shape \[1, 4\] for scales \[1, 40\], accepted is \[1, 5\]",
    ),
    "06 N=12": (
        "gptq",
        gptq(ramp(12), fill(0x77777777, 1, 1), halves(0.5, 1, 12)),
        SYM,
        r"qzeros: found shape \[1, 1\] for scales \[1, 12\], accepted is \[1, 1\.5\]",
    ),
    "06 N=1": (
        "gptq",
        gptq(ramp(1), fill(0x77777777, 1, 0), halves(0.5, 1, 1)),
        SYM,
        r"qzeros: found shape \[1, 0\] for scales \[1, 1\]",
    ),
    "07a": (
        "gptq",
        {"qweight": fill(0, 3, 32), "qzeros": fill(0, 1, 3), "scales": halves(1, 1, 32)},
        {**SYM, "bits": 3},
        "bits: found 3, accepted is 4, 8",
    ),
    "07c": ("gptq", EIGHT_BIT, SYM, r"bits: found 4 in the configuration, 8 in qzeros \[1, 8\]"),
    "07e": ("gptq", flat(32, torch.ones(1)), {**SYM, "bits": 2}, "bits: found 2, accepted is 4, 8"),
    "07 no bits": (
        "gptq",
        flat(32, torch.ones(1)),
        {"quant_method": "gptq", "group_size": 32},
        "bits: found nothing",
    ),
    "08c": ("compressed-tensors", packed(), ct(False), "weight_zero_point: found none"),
    "08 shape": (
        "compressed-tensors",
        packed(weight_shape=torch.tensor([8, 40])),
        ct(True),
        r"weight_shape: found \[8, 40\]",
    ),
    "12d inf": (
        "gptq",
        gptq(ramp(), fill(0x77777777, 1, 1), halves(float("inf"), 1, 8)),
        SYM,
        "scales: found NaN or Inf",
    ),
    "12d NaN": (
        "gptq",
        gptq(ramp(), fill(0x77777777, 1, 1), halves(float("nan"), 1, 8)),
        SYM,
        "scales: found NaN or Inf",
    ),
    "12e float64": (
        "gptq",
        gptq(ramp(), fill(0x77777777, 1, 1), torch.ones(1, 8, dtype=torch.float64)),
        SYM,
        "scales: found float64",
    ),
    "12e int32": (
        "gptq",
        gptq(ramp(), fill(0x77777777, 1, 1), torch.ones(1, 8, dtype=torch.int32)),
        SYM,
        "scales: found int32",
    ),
    "12d AWQ NaN": (
        "awq",
        {"qweight": awq_words(ramp()), "qzeros": fill(0, 1, 1), "scales": halves(float("nan"), 1, 8)},
        awq_config(),
        "scales: found NaN or Inf",
    ),
    "12d compressed-tensors inf": (
        "compressed-tensors",
        packed(weight_scale=halves(float("inf"), 8, 1)),
        ct(True),
        "weight_scale: found NaN or Inf",
    ),
    "13 bias shape": (
        "gptq",
        flat(32, torch.ones(1), bias=torch.ones(7).half()),
        SYM,
        r"bias: found shape \[7\], accepted is \[8\]",
    ),
    "14 group of the tensors": (
        "gptq",
        flat(128, FOUR),
        {**SYM, "group_size": 128},
        "group_size: found 128 in the configuration, 4 groups in scales",
    ),
    "14 bits a word": ("gptq", flat(32, torch.ones(1)), {**SYM, "bits": "four"}, "bits: found 'four'"),
    "17 incomplete": (
        "gptq",
        {"qweight": fill(0, 4, 8)},
        SYM,
        f"tensors: found no {L}.qzeros, {L}.scales",
    ),
}


class Untouched(TorchDispatchMode):
    """No operator may see one of these tensors; shapes and dtypes are free."""

    def __init__(self, weights: list[Tensor]) -> None:
        super().__init__()
        self.weights = weights

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        assert not any(arg is weight for arg in args for weight in self.weights), f"{func} on a weight"
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize("case", REFUSED)
def test_refused_before_a_weight_is_copied(case: str) -> None:
    format, tensors, config, message = REFUSED[case]
    weights = [tensors[name] for name in ("qweight", "weight_packed") if name in tensors]
    with Untouched(weights), pytest.raises(FormatError, match=message) as caught:
        read_layer(named(tensors), L, format, config)
    assert str(caught.value).startswith(L) and "accepted" in str(caught.value) and "\n" not in str(caught.value)


def test_the_watch_sees_a_weight() -> None:
    row = VALUES["04 k"]
    with Untouched([row.tensors["qweight"]]), pytest.raises(AssertionError, match="on a weight"):
        read(row)


def dynamic_checkpoint(rule: dict[str, Any]) -> tuple[dict[str, Tensor], dict[str, Any]]:
    down = {**EIGHT_BIT, "scales": torch.ones(1, 32).half()}
    up = flat(128, torch.tensor([2.0]))
    tensors = {**named(down, "mlp.down"), **named(up, "mlp.up"), "router.weight": torch.ones(4, 32).half()}
    config = {**SYM, "group_size": 128, "dynamic": {"-:.*router.*": {}, "+:.*down.*": rule}}
    return tensors, config


def test_07d_each_module_by_its_own_rule() -> None:
    tensors, config = dynamic_checkpoint({"bits": 8, "group_size": 32})
    layers = quantized_layers(tensors, "gptq", config)
    assert layers == ["mlp.down", "mlp.up"]
    down, up = (read_layer(tensors, layer, "gptq", config) for layer in layers)
    assert (down.bits, down.group_size, up.bits, up.group_size) == (8, 32, 4, 128)
    assert torch.equal(float64(down, unit(32, 0)), torch.full((32,), -128.0))
    assert torch.equal(float64(up, ones(128)), torch.full((8,), 256.0))


@pytest.mark.parametrize(
    "rule, message",
    [({"bits": 8, "group_size": 32, "rotation": "x"}, "unknown key 'rotation'"), ({"bits": 3}, "bits: found 3")],
)
def test_07d_rules_that_are_refused(rule: dict[str, Any], message: str) -> None:
    tensors, config = dynamic_checkpoint(rule)
    with pytest.raises(FormatError, match=message):
        read_layer(tensors, "mlp.down", "gptq", config)


def test_07d_a_dense_module_with_quantized_tensors_is_refused() -> None:
    tensors, config = dynamic_checkpoint({"bits": 8, "group_size": 32})
    with pytest.raises(FormatError, match="leaves it dense"):
        read_layer(tensors, "mlp.down", "gptq", {**config, "dynamic": {"-:.*down": {}}})


def test_08_the_words_of_the_case() -> None:
    stored = packed()["weight_packed"]
    assert int(stored[0, 0]) == word(0x76543210) and int(stored[3, 0]) == word(0xA9876543)


# IMP-14: which configuration file wins


def directory(path: Path, tensors: Mapping[str, Tensor], **files: Any) -> Path:
    path.mkdir(exist_ok=True)
    save_file({name: tensor.contiguous() for name, tensor in tensors.items()}, path / "model.safetensors")
    for name, content in files.items():
        text = content if isinstance(content, str) else json.dumps(content)
        (path / f"{name}.json").write_text(text, encoding="utf-8")
    return path


def first_layer(path: Path) -> QuantizedWeight:
    checkpoint = open_checkpoint(path)
    format = detect(checkpoint.quantization, checkpoint)
    assert format is not None
    (layer,) = quantized_layers(checkpoint, format, checkpoint.quantization or {})
    return read_layer(checkpoint, layer, format, checkpoint.quantization or {})


LAYER = named(flat(128, FOUR))


@pytest.mark.parametrize(
    "files",
    [
        {"config": {"quantization_config": SYM}},
        {"config": {}, "quantize_config": SYM},
        {"config": {}, "quantize_config": {"bits": 4, "group_size": 32, "sym": True, "desc_act": False}},
        {"config": {}, "quantization_config": SYM},
        {"config": {"quantization_config": {**SYM, "bits": "4"}}},
        {"config": {"text_config": {"quantization_config": SYM}}},
        {"config": {"quantization_config": SYM}, "quantize_config": {**SYM, "bits": "4"}},
    ],
    ids=["a", "b", "b without a method", "c", "g", "h", "agreeing"],
)
def test_14_loads(tmp_path: Path, files: dict[str, Any]) -> None:
    assert torch.equal(
        float64(first_layer(directory(tmp_path / "m", LAYER, **files)), last(128, 32)), torch.full((8,), 128.0)
    )


def test_14f_old_awq_spelling(tmp_path: Path) -> None:
    tensors = {"qweight": awq_words(ramp()), "qzeros": fill(0x88888888, 1, 1), "scales": halves(0.5, 1, 8)}
    config = {"zero_point": True, "q_group_size": 32, "w_bit": 4, "version": "GEMM"}
    for files in ({"config": {"quantization_config": config}}, {"config": {}, "quant_config": config}):
        path = directory(tmp_path / "-".join(files), named(tensors), **files)
        assert torch.equal(float64(first_layer(path), ones(32)), torch.full((8,), -8.0))


@pytest.mark.parametrize(
    "files, message",
    [
        (
            {"config": {"quantization_config": {**SYM, "group_size": 128}}, "quantize_config": SYM},
            "group_size: found 128 in config.json, 32 in quantize_config.json",
        ),
        ({"config": {}}, "quantization_config: found none"),
        ({"config": "{"}, "config.json: content: found invalid JSON"),
        ({"config": "\ufeff{}"}, "config.json: content: found a byte order mark"),
        ({"config": "[]"}, "config.json: content: found list"),
        ({"config": {"quantization_config": "gptq"}}, "quantization_config: found str"),
        (
            {"config": {"quantization_config": {**SYM, "model_file_base_name": "../x"}}},
            r"model_file_base_name: found '\.\./x'",
        ),
    ],
    ids=["d", "e", "i", "i BOM", "i list", "no object", "base name"],
)
def test_14_refused(tmp_path: Path, files: dict[str, Any], message: str) -> None:
    path = directory(tmp_path / "m", LAYER, **files)
    with pytest.raises(FormatError, match=message) as caught:
        first_layer(path)
    assert "accepted is" in str(caught.value)
