"""Formats: what is written reads back bit for bit, what cannot be held is refused by name, and names are recognised."""

from __future__ import annotations

import copy
import warnings
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from lowbit.formats import (
    FORMATS,
    bitpack,
    config_for,
    detect,
    lowbit,
    quantized_layers,
    read_layer,
    summary,
    with_zeros,
)
from lowbit.reference import dequantize
from lowbit.types import SCHEMES, Activation, FormatError, LowRank, QuantizedWeight, Scheme
from samples import weight

P = "model.layers.3.mlp.up_proj"


def equal(a: torch.Tensor | None, b: torch.Tensor | None) -> bool:
    if a is None or b is None:
        return a is b
    return a.dtype == b.dtype and torch.equal(a, b)


def assert_same(a: QuantizedWeight, b: QuantizedWeight) -> None:
    """Every field that a format holds, bit for bit."""
    assert (a.bits, a.group_size) == (b.bits, b.group_size)
    for field in ("codes", "scales", "zeros", "perm", "smooth", "bias"):
        assert equal(getattr(a, field), getattr(b, field)), field
    assert torch.equal(dequantize(a), dequantize(b))


def sorted_perm(q: QuantizedWeight) -> QuantizedWeight:
    """The same weight with its permutation ascending within every group, as g_idx stands for it."""
    if q.perm is None:
        return q
    group = torch.arange(q.k) // q.group_size
    order = torch.argsort(group * q.k + q.perm.long())
    return q.with_(codes=q.codes[:, order], perm=q.perm[order])


@st.composite
def weights(draw: st.DrawFn, *, bits: tuple[int, ...] = (4, 8), step_n: int = 1, step_k: int = 1, whole: bool = False,
            order: bool = False) -> QuantizedWeight:  # fmt: skip
    n = step_n * draw(st.integers(1, 6))
    group = draw(st.sampled_from([1, 3, 8, 32, 64]))
    k = draw(st.integers(1, 5)) * (group if whole else 1) * step_k
    group = draw(st.sampled_from([min(group, k), k]))
    q = weight(
        n,
        k,
        group,
        bits=draw(st.sampled_from(bits)),
        zeros=draw(st.booleans()),
        fill=draw(st.sampled_from(["random", "low", "high", "spread"])),
        bias=draw(st.booleans()),
        perm=order and draw(st.booleans()),
    )
    return sorted_perm(q)


def canonical(q: QuantizedWeight) -> QuantizedWeight:
    """What a format with zero points makes of it: none where all are the middle."""
    if q.zeros is None or not bool((q.zeros == bitpack.middle(q.bits)).all()):
        return q
    return q.with_(codes=bitpack.to_signed(q.codes, q.bits), zeros=None)


def round_trip(q: QuantizedWeight, format: str) -> QuantizedWeight:
    written = FORMATS[format].write(q, P)
    assert all(name.startswith(P + ".") and tensor.is_contiguous() for name, tensor in written.items())
    config = config_for(format, {P: q})
    assert detect(config, written) == format
    assert quantized_layers(written, format, config) == [P]
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        return read_layer(written, P, format, config)


def trivial(q: QuantizedWeight) -> bool:
    """A permutation that moves no column to another group is no activation order to these formats."""
    return q.perm is not None and torch.equal(q.perm.long(), torch.arange(q.k))


@given(q=weights(step_n=8, step_k=8, order=True))
@pytest.mark.parametrize("format", ["gptq", "gptq_v2"])
def test_gptq_round_trip(format: str, q: QuantizedWeight) -> None:
    again = round_trip(q, format)
    assert_same(again, canonical(q.with_(perm=None) if trivial(q) else q))


@given(q=weights(bits=(4,), step_n=8, whole=True))
def test_awq_round_trip(q: QuantizedWeight) -> None:
    assert_same(round_trip(q, "awq"), canonical(q))


@given(q=weights(whole=True, order=True))
def test_compressed_tensors_packed_round_trip(q: QuantizedWeight) -> None:
    again = round_trip(q, "compressed-tensors")
    assert_same(again, canonical(q.with_(perm=None) if trivial(q) else q))
    assert again.activation is None


@given(q=weights(whole=True))
def test_compressed_tensors_int_round_trip(q: QuantizedWeight) -> None:
    declared = q.with_(activation=Activation(8, "token"))
    written = FORMATS["compressed-tensors"].write(declared, P)
    assert written[f"{P}.weight"].dtype == torch.int8 and f"{P}.weight_packed" not in written
    again = round_trip(declared, "compressed-tensors")
    assert_same(again, canonical(q))
    assert again.activation == Activation(8, "token")


@given(q=weights(order=True), data=st.data())
def test_lowbit_round_trip(q: QuantizedWeight, data: st.DataObject) -> None:
    """Everything has a place: odd K, short last groups, any permutation, smoothing, low rank, activations."""
    if data.draw(st.booleans()):
        q = q.with_(smooth=(torch.rand(q.k) + 0.5).half())
    if data.draw(st.booleans()):
        rank = data.draw(st.integers(1, 4))
        q = q.with_(low_rank=LowRank(torch.randn(q.k, rank).half(), torch.randn(q.n, rank).half()))
    bits, granularity = data.draw(st.sampled_from([(8, "token"), (8, "group"), (4, "group"), (16, "none")]))
    q = q.with_(activation=data.draw(st.sampled_from([None, Activation(bits, granularity, 0.875)])))
    q = q.with_(hadamard=data.draw(st.sampled_from([0, 64])))
    written = FORMATS["lowbit"].write(q, P)
    metadata = lowbit.metadata({P: lowbit.describe(q)}, "rtn")
    assert detect(metadata, written) == "lowbit" and detect(None, written) == "lowbit"
    again = read_layer(written, P, "lowbit", metadata)
    assert_same(again, q)
    assert (again.activation, again.hadamard, again.low_rank is None) == (q.activation, q.hadamard, q.low_rank is None)
    if q.low_rank is not None and again.low_rank is not None:
        assert all(map(equal, again.low_rank, q.low_rank))


def test_lowbit_layout() -> None:
    """Element 2j in the low nibble, two's complement; with zero points unsigned; an odd K padded with one nibble."""
    codes = torch.tensor([[-8, 7, -1, 1, 2]], dtype=torch.int8)
    q = QuantizedWeight(codes, torch.ones(1, 1).half(), 5, 4)
    written = lowbit.write(q, "l")
    assert written["l.qweight"].tolist() == [[0x78, 0x1F, 0x02]]
    unsigned = QuantizedWeight((codes + 8).to(torch.uint8), q.scales, 5, 4, zeros=torch.full((1, 1), 8).byte())
    written = lowbit.write(unsigned, "l")
    assert written["l.qweight"].tolist() == [[0xF0, 0x97, 0x0A]] and written["l.w_zeros"].tolist() == [[8]]


@pytest.mark.parametrize("groups", [1, 2, 3, 8])
def test_lowbit_zeros_two_a_byte(groups: int) -> None:
    """Zero points of 4-bit codes stand two a byte; files that have a byte each are read as well."""
    q = weight(4, 32 * groups, 32, zeros=True)
    assert q.zeros is not None
    written = lowbit.write(q, P)
    stored = written[f"{P}.w_zeros"]
    assert tuple(stored.shape) == (4, -(-groups // 2))
    assert [int(b) & 15 for b in stored[0]] == q.zeros[0, 0::2].tolist()
    assert [int(b) >> 4 for b in stored[0]][: groups // 2] == q.zeros[0, 1::2].tolist()
    metadata = lowbit.metadata({P: lowbit.describe(q)}, "rtn")
    assert_same(read_layer(written, P, "lowbit", metadata), q)
    assert_same(read_layer(written | {f"{P}.w_zeros": q.zeros}, P, "lowbit", metadata), q)


def test_lowbit_scales_are_never_rounded() -> None:
    q = weight(4, 64, 32, scale_dtype=torch.float32)
    assert lowbit.write(q, "l")["l.w_scales"].dtype == torch.float32
    exact = q.with_(scales=q.scales.half().float())
    assert lowbit.write(exact, "l")["l.w_scales"].dtype == torch.float16
    tiny = q.with_(scales=torch.full_like(q.scales, 2.0**-30).bfloat16())
    written = lowbit.write(tiny, "l")["l.w_scales"]
    assert written.dtype == torch.float32 and torch.equal(written, tiny.scales.float())


def test_svdquant_form_without_metadata() -> None:
    """Signed 4 bits, group = K / w_scales.shape[1], and a warning that the base is unchecked."""
    q = weight(8, 128, 64, zeros=False)
    q = q.with_(low_rank=LowRank(torch.randn(128, 16).half(), torch.randn(8, 16).half()))
    written = lowbit.write(q, "layers.0.q")
    with pytest.warns(UserWarning, match="base weights unchecked"):
        again = read_layer(written, "layers.0.q", "lowbit", {})
    assert_same(again, q)
    assert (again.group_size, again.hadamard, again.activation) == (64, 0, None)
    assert again.notes


GOOD = weight(8, 64, 32, zeros=True, smooth=True)
METADATA = lowbit.metadata({P: lowbit.describe(GOOD)}, "rtn")


@pytest.mark.parametrize(
    "change, message",
    [
        ({"qweight": torch.zeros(8, 31, dtype=torch.uint8)}, "k: found 64 with 31 bytes"),
        ({"qweight": torch.zeros(8, 32)}, "qweight: found float32"),
        ({"qweight": torch.zeros(8, 64, dtype=torch.int8)}, "bits: found 4 with qweight int8"),
        ({"w_scales": torch.ones(8, 3).half()}, "group_size: found 32 with 3 groups"),
        ({"w_scales": torch.ones(7, 2).half()}, r"w_scales: found shape \[7, 2\]"),
        ({"w_scales": torch.ones(8, 2).double()}, "w_scales: found float64"),
        ({"w_scales": torch.full((8, 2), float("nan")).half()}, "w_scales: found NaN or Inf"),
        ({"w_zeros": torch.full((8, 2), 16, dtype=torch.uint8)}, r"w_zeros: found 16, accepted is 0 \.\. 15"),
        ({"w_zeros": torch.zeros(8, 3, dtype=torch.uint8)}, r"w_zeros: found shape \[8, 3\]"),
        ({"w_zeros": torch.zeros(7, 1, dtype=torch.uint8)}, r"w_zeros: found shape \[7, 1\]"),
        ({"perm": torch.zeros(64, dtype=torch.int32)}, "perm: found values that are no permutation"),
        ({"perm": torch.arange(64)}, "perm: found int64"),
        ({"smooth": torch.zeros(64).half()}, r"smooth: found 0\.0, accepted is values > 0"),
        ({"proj_down": torch.zeros(64, 4).half()}, "no .*proj_up"),
    ],
)
def test_lowbit_refuses(change: dict[str, torch.Tensor], message: str) -> None:
    written = FORMATS["lowbit"].write(GOOD, P) | {f"{P}.{name}": tensor for name, tensor in change.items()}
    with pytest.raises(FormatError, match=message):
        read_layer(written, P, "lowbit", METADATA)


@pytest.mark.parametrize(
    "path, value, message",
    [
        (["version"], 2, "version: found 2, accepted is 1"),
        (["linears"], [], "linears: found"),
        (["linears", P, "bits"], 5, "bits: found 5"),
        (["linears", P, "hadamard"], 32, "hadamard: found 32"),
        (["linears", P, "group_size"], 0, "group_size: found 0"),
        (["linears", P, "activation"], {"bits": 8, "granularity": "row"}, "activation.granularity: found 'row'"),
        (["linears", P, "activation"], {"bits": 8, "granularity": "token", "clip": 0}, "activation.clip: found 0"),
    ],
)
def test_lowbit_metadata_refuses(path: list[str], value: Any, message: str) -> None:
    metadata = copy.deepcopy(METADATA)
    inner = metadata
    for key in path[:-1]:
        inner = inner[key]
    inner[path[-1]] = value
    with pytest.raises(FormatError, match=message):
        read_layer(FORMATS["lowbit"].write(GOOD, P), P, "lowbit", metadata)


# What a format cannot hold


PLAIN = weight(8, 64, 32)
RANK = LowRank(torch.zeros(64, 2), torch.zeros(8, 2))


@pytest.mark.parametrize("format", ["gptq", "gptq_v2", "awq", "compressed-tensors"])
@pytest.mark.parametrize(
    "change, part",
    [
        ({"smooth": torch.ones(64).half()}, "smooth"),
        ({"low_rank": RANK}, "low_rank"),
        ({"hadamard": 64}, "hadamard"),
        ({"activation": Activation(4, "group")}, "activation"),
        ({"smooth": torch.ones(64).half(), "low_rank": RANK}, "low_rank, smooth"),
    ],
)
def test_extras_are_refused_by_name(format: str, change: dict[str, Any], part: str) -> None:
    with pytest.raises(FormatError, match=f"{P}: {part}: found in a layer to be written as {format}"):
        FORMATS[format].write(PLAIN.with_(**change), P)


@pytest.mark.parametrize(
    "format, q, message",
    [
        ("gptq", weight(8, 60, 30), "K: found 60, accepted is a multiple of 8"),
        ("gptq", weight(12, 64, 32), "N: found 12, accepted is a multiple of 8"),
        ("gptq", weight(8, 64, 32, scale_dtype=torch.float32), "scales: found float32 values that float16 would round"),
        ("awq", weight(8, 64, 32, bits=8), "bits: found 8, accepted is 4"),
        ("awq", weight(8, 64, 32, perm=True), "perm: found activation order"),
        ("awq", weight(12, 64, 32), "N: found 12"),
        ("awq", weight(8, 80, 32), "group_size: found 32 for K = 80"),
        ("compressed-tensors", weight(8, 80, 32), "group_size: found 32 for K = 80"),
        (
            "compressed-tensors",
            weight(8, 64, 32, perm=True, activation=Activation(8, "token")),
            "perm: found activation order",
        ),
    ],
)
def test_writers_refuse(format: str, q: QuantizedWeight, message: str) -> None:
    with pytest.raises(FormatError, match=message):
        FORMATS[format].write(q, P)


# compressed-tensors: what is not supported is refused by name


def ct(**changes: Any) -> dict[str, Any]:
    """A W8A8 configuration with one value changed; keys are paths with double underscores."""
    config = config_for(
        "compressed-tensors", {P: weight(8, 64, -1, bits=8, zeros=False, activation=Activation(8, "token"))}
    )
    for path, value in changes.items():
        inner: Any = config if path.startswith("top__") else config["config_groups"]["group_0"]
        *outer, last = path.removeprefix("top__").split("__")
        for key in outer:
            inner = inner[key]
        inner[last] = value
    return config


@pytest.mark.parametrize(
    "changes, message",
    [
        ({"weights__type": "float"}, "weights.type: found 'float', accepted is int"),
        ({"weights__num_bits": 3}, "bits: found 3"),
        ({"weights__strategy": "block"}, "weights.strategy: found 'block'"),
        ({"weights__strategy": "tensor"}, "weights.strategy: found 'tensor'"),
        ({"weights__block_structure": [128, 128]}, r"weights.block_structure: found \[128, 128\]"),
        ({"weights__dynamic": True}, "weights.dynamic: found True"),
        ({"weights__actorder": "magic"}, "actorder: found 'magic'"),
        ({"weights": None}, "weights: found null"),
        ({"input_activations__dynamic": False}, "input_activations.dynamic: found False, accepted is true"),
        ({"input_activations__dynamic": "local"}, "input_activations.dynamic: found 'local'"),
        ({"input_activations__strategy": "tensor"}, "input_activations.strategy: found 'tensor'"),
        ({"input_activations__type": "float"}, "input_activations.type: found 'float'"),
        ({"input_activations__num_bits": 4}, "input_activations.num_bits: found 4"),
        ({"input_activations__symmetric": False}, "input_activations.symmetric: found False"),
        ({"output_activations": {"num_bits": 8}}, "output_activations: found a scheme"),
        ({"format": "float-quantized"}, "format: found 'float-quantized'"),
        ({"format": "marlin-24"}, "format: found 'marlin-24'"),
        ({"targets": ["re:.*q_proj"]}, "no group that names this module"),
        ({"targets": ["re:("]}, "regular expressions"),
        ({"top__ignore": ["re:.*up_proj"]}, "no quantized tensors for an ignored module"),
        ({"top__kv_cache_scheme": {"num_bits": 8}}, "kv_cache_scheme: found a scheme"),
        ({"top__sparsity_config": {"format": "sparse-24-bitmask"}}, "sparsity_config: found 'sparse-24-bitmask'"),
        ({"top__transform_config": {"config_groups": {"u": {}}}}, "transform_config: found transforms"),
    ],
)
def test_compressed_tensors_refuses(changes: dict[str, Any], message: str) -> None:
    q = weight(8, 64, -1, bits=8, zeros=False, activation=Activation(8, "token"))
    written = FORMATS["compressed-tensors"].write(q, P)
    assert read_layer(written, P, "compressed-tensors", ct()).activation == Activation(8, "token")
    with pytest.raises(FormatError, match=message):
        read_layer(written, P, "compressed-tensors", ct(**changes))


def test_compressed_tensors_codes_out_of_range() -> None:
    q = weight(8, 64, -1, bits=8, zeros=False, activation=Activation(8, "token"))
    written = FORMATS["compressed-tensors"].write(q, P)
    with pytest.raises(FormatError, match=r"weight: found codes -1.* accepted is -8 \.\. 7 at 4 bits"):
        read_layer(written, P, "compressed-tensors", ct(weights__num_bits=4))


def test_compressed_tensors_activation_groups() -> None:
    q = weight(8, 64, 32, bits=8, zeros=False, activation=Activation(8, "token"))
    written = FORMATS["compressed-tensors"].write(q, P)
    declared = {"weights__strategy": "group", "weights__group_size": 32, "input_activations__strategy": "group"}
    config = ct(**declared, input_activations__group_size=32)
    assert read_layer(written, P, "compressed-tensors", config).activation == Activation(8, "group")
    with pytest.raises(FormatError, match="input_activations.group_size: found 16 with weights in groups of 32"):
        read_layer(written, P, "compressed-tensors", ct(**declared, input_activations__group_size=16))


def test_compressed_tensors_unpacked_zero_points() -> None:
    """Early files hold the zero points of a packed layer as int8 [N, G]."""
    q = weight(8, 64, 32)
    written = FORMATS["compressed-tensors"].write(q, P)
    assert q.zeros is not None
    written[f"{P}.weight_zero_point"] = bitpack.to_signed(q.zeros, 4)
    assert_same(read_layer(written, P, "compressed-tensors", config_for("compressed-tensors", {P: q})), q)


def test_a_symmetric_scheme_with_zero_points() -> None:
    q = weight(8, 64, 32, zeros=False)
    config = config_for("compressed-tensors", {P: q})
    explicit = FORMATS["compressed-tensors"].write(with_zeros(q), P)
    assert_same(read_layer(explicit, P, "compressed-tensors", config), q)  # all 0: harmless
    with pytest.raises(FormatError, match="values other than 0 in a symmetric scheme"):
        read_layer(FORMATS["compressed-tensors"].write(weight(8, 64, 32), P), P, "compressed-tensors", config)


# Whole files


MIXED = {
    "a.q": weight(8, 64, 32, zeros=False),
    "a.k": weight(8, 64, 32, zeros=False),
    "a.v": weight(8, 64, 16, bits=8, zeros=False),
    "a.up": weight(16, 64, 32),
    "a.down": weight(8, 64, -1, perm=False),
}


@pytest.mark.parametrize("format", ["gptq", "gptq_v2", "compressed-tensors"])
def test_mixed_layers_in_one_file(format: str) -> None:
    layers = MIXED | {"a.o": sorted_perm(weight(8, 64, 32, perm=True))}
    written = {
        name: tensor for prefix, q in layers.items() for name, tensor in FORMATS[format].write(q, prefix).items()
    }
    config = config_for(format, layers, ["lm_head"])
    assert set(quantized_layers(written, format, config)) == set(layers)
    for prefix, q in layers.items():
        assert_same(read_layer(written, prefix, format, config), q)


def test_awq_holds_one_group_size() -> None:
    with pytest.raises(FormatError, match=r"a\.v: group_size"):
        config_for("awq", MIXED)


@pytest.mark.parametrize("format", FORMATS)
def test_a_layer_whose_only_group_is_the_common_one(format: str) -> None:
    layers = {"a": weight(8, 128, 64), "b": weight(8, 64, 64), "c": weight(8, 128, 64)}
    config = config_for(format, layers)
    assert "dynamic" not in config and len(config.get("config_groups", {"": 0})) == 1
    if format != "lowbit":
        for prefix, q in layers.items():
            assert_same(read_layer(FORMATS[format].write(q, prefix), prefix, format, config), q)


@pytest.mark.parametrize("format", FORMATS)
@pytest.mark.parametrize("scheme", [SCHEMES["w4a8"], SCHEMES["w8a8"], SCHEMES["w4a16"], Scheme("x", 4, 32, True)])
def test_config_of_a_scheme(format: str, scheme: Scheme) -> None:
    """The configuration alone reads what was written by that scheme."""
    if format == "awq" and scheme.bits == 8:
        with pytest.raises(FormatError, match="bits: found 8"):
            FORMATS[format].config(scheme, [])
        return
    group = scheme.group_of(64)
    q = weight(8, 64, group, bits=scheme.bits, zeros=not scheme.symmetric, activation=scheme.activation)
    config = FORMATS[format].config(scheme, ["lm_head"])
    written = FORMATS[format].write(q, P)
    assert detect(config, written) == format
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert_same(read_layer(written, P, format, config), q)


@pytest.mark.parametrize(
    "config, names, expected",
    [
        ({}, ["lm_head.weight"], None),
        (None, ["lm_head.weight"], None),
        ({"quant_method": "gptq", "bits": 4}, [], "gptq"),
        ({"quant_method": "gptq", "checkpoint_format": "gptq_v2"}, [], "gptq_v2"),
        ({"quant_method": "awq", "version": "GEMM"}, [], "awq"),
        ({"quant_method": "auto-round", "packing_format": "auto_round:auto_gptq"}, [], "gptq"),
        ({"quant_method": "auto-round", "packing_format": "auto_round:auto_awq"}, [], "awq"),
        ({"quant_method": "auto-round", "packing_format": "auto_round:llm_compressor"}, [], "compressed-tensors"),
        ({"quant_method": "compressed-tensors"}, [], "compressed-tensors"),
        ({"config_groups": {}}, [], "compressed-tensors"),
        ({"bits": 4, "group_size": 128}, [], "gptq"),
        ({"w_bit": 4, "q_group_size": 128}, [], "awq"),
        ({}, ["a.qweight", "a.w_scales"], "lowbit"),
    ],
)
def test_detect(config: dict[str, Any] | None, names: list[str], expected: str | None) -> None:
    assert detect(config, names) == expected


@pytest.mark.parametrize(
    "config, names, message",
    [
        ({"quant_method": "bitsandbytes"}, [], "quant_method: found 'bitsandbytes'"),
        ({"quant_method": "awq", "version": "gemv"}, [], "version: found 'gemv', accepted is gemm"),
        ({"quant_method": "awq", "version": "gemv_fast"}, [], "version: found 'gemv_fast'"),
        ({"quant_method": "gptq", "checkpoint_format": "marlin"}, [], "checkpoint_format: found 'marlin'"),
        ({"quant_method": "gptq", "checkpoint_format": "gptq", "format": "gptq_v2"}, [], "found 'gptq' beside"),
        ({"quant_method": "gptq", "is_marlin_format": True}, [], "is_marlin_format: found true"),
        ({"quant_method": "auto-round", "packing_format": "auto_round:fp8"}, [], "packing_format: found"),
        ({}, ["a.qweight", "a.qzeros", "a.scales"], "quantization_config: found none"),
        ({}, ["a.weight_packed"], "quantization_config: found none"),
    ],
)
def test_detect_refuses(config: dict[str, Any], names: list[str], message: str) -> None:
    with pytest.raises(FormatError, match=message):
        detect(config, names)


def test_auto_round_per_module() -> None:
    q, wide = weight(8, 64, 32, zeros=False), weight(8, 64, 16, bits=8, zeros=False)
    written = FORMATS["gptq"].write(q, "a") | FORMATS["gptq"].write(wide, "b")
    config = {
        "quant_method": "auto-round",
        "packing_format": "auto_round:auto_gptq",
        "bits": 4,
        "group_size": 32,
        "sym": True,
        "extra_config": {"b": {"bits": 8, "group_size": 16, "data_type": "int"}},
    }
    assert_same(read_layer(written, "a", "gptq", config), q)
    assert_same(read_layer(written, "b", "gptq", config), wide)


def test_summary_for_inspect() -> None:
    row = summary(GOOD)
    assert (row["bits"], row["group_size"], row["n"], row["k"], row["groups"]) == (4, 32, 8, 64, 2)
    assert row["smooth"] and not row["act_order"] and row["activation"] is None and row["notes"] == []
