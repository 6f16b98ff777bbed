"""--budget: the choice by hand, what is refused, the measurement against a plain one, and the checkpoint that remembers."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

import lowbit
import samples
from lowbit import reference
from lowbit.checkpoint import open_checkpoint
from lowbit.cli import main
from lowbit.quantize.budget import Candidate, average, choose
from lowbit.types import Activation, FormatError

transformers = pytest.importorskip("transformers")


def candidates(*pairs: tuple[int, float]) -> list[Candidate]:
    return [Candidate((f"l{i}",), weights, gain) for i, (weights, gain) in enumerate(pairs)]


def test_the_most_gain_per_weight_comes_first() -> None:
    # gains per weight: 1, 4, 2, .5; 100 weights, so 5 bits on average are 25 weights at 8
    four = candidates((10, 10), (5, 20), (20, 40), (65, 32.5))
    assert choose(four, 5.0) == [4, 8, 8, 4]  # 5 + 20 fit to the last weight
    assert choose(four, 4.9) == [8, 8, 4, 4]  # 22.5: the 20 do not fit behind the 5, the 10 do
    assert choose(four, 4.0) == [4, 4, 4, 4] and choose(four, 8.0) == [8, 8, 8, 8]
    assert average(four, [8, 8, 4, 4]) == 4.6


def test_ties_go_to_the_earlier() -> None:
    equal = candidates((10, 10), (10, 10), (10, 10), (10, 10))
    assert choose(equal, 6.0) == [8, 8, 4, 4]
    assert choose(candidates((20, 20), (10, 10), (10, 10)), 5.0) == [4, 8, 4]  # the earlier one is too large


def test_what_gains_nothing_stays_at_4() -> None:
    assert choose(candidates((10, 0), (10, -1), (10, 1)), 7.0) == [4, 4, 8]
    assert choose(candidates((10, 0), (10, -1)), 8.0) == [8, 8]


def test_given_bits_count() -> None:
    fixed = [Candidate(("a",), 50, 0, 16), *candidates((25, 1), (25, 2))]
    with pytest.raises(FormatError, match="budget: found 8, accepted is 10 or more: the overrides take that much"):
        choose(fixed, 8.0)
    fixed[0] = fixed[0]._replace(bits=8)
    assert choose(fixed, 7.0) == [8, 4, 8] and choose(fixed, 6.0) == [8, 4, 4]


@pytest.mark.parametrize("budget", [3.5, 8.5, -1, math.nan, math.inf])
def test_a_budget_out_of_range_is_refused_with_its_value(budget: float) -> None:
    with pytest.raises(FormatError, match=rf"budget: found {budget:g}, accepted is 4 .. 8"):
        choose(candidates((1, 1)), budget)


def test_a_sensitivity_of_nan_is_refused_with_its_name() -> None:
    with pytest.raises(FormatError, match="budget: found a sensitivity of NaN for l1"):
        choose(candidates((1, 1), (1, math.nan)), 5)


@given(st.lists(st.tuples(st.integers(1, 9), st.floats(-1, 9)), min_size=1, max_size=9), st.floats(4, 8))
def test_no_choice_exceeds_its_budget_nor_leaves_room_for_what_gains(pairs: Any, budget: float) -> None:
    found = candidates(*pairs)
    bits = choose(found, budget)
    total = sum(c.weights for c in found)
    assert average(found, bits) <= budget + 1e-6 and set(bits) <= {4, 8}
    room = budget * total - sum(b * c.weights for b, c in zip(bits, found, strict=True))
    assert not [c for b, c in zip(bits, found, strict=True) if b == 4 and c.gain > 0 and 4 * c.weights < room - 1e-6]


def llama(layers: int = 2) -> Any:
    torch.manual_seed(1)
    config = transformers.LlamaConfig(
        hidden_size=64, intermediate_size=128, num_hidden_layers=layers, num_attention_heads=2, vocab_size=97,
        num_key_value_heads=1, head_dim=32, pad_token_id=0, bos_token_id=1, eos_token_id=2, initializer_range=0.2,
    )  # fmt: skip
    return transformers.LlamaForCausalLM(config).eval()


def ids(*shape: int) -> Tensor:
    return torch.randint(3, 97, shape, generator=torch.Generator().manual_seed(0))


def quantized(**options: Any) -> tuple[Any, Any]:
    model = llama()
    return model, lowbit.quantize(model, "w4a4", calibration=[ids(8, 64)], progress=False, **options)


def test_what_is_measured_is_the_divergence_of_one_input_at_4_bits() -> None:
    """Against whole passes of the model, without the shortcut through kept hidden states."""
    model, report = quantized(budget=5.0)
    again, _ = quantized()
    assert report.budget is not None
    text = ids(8, 64)
    with torch.inference_mode():
        eight = again(text).logits[:, 3::4].reshape(-1, 97)
        for choice in report.budget.choices:
            layers = [again.get_submodule(name) for name in choice.names]
            for layer in layers:
                layer.activation_bits = 4
            four = again(text).logits[:, 3::4].reshape(-1, 97)
            for layer in layers:
                layer.activation_bits = 8
            want = float(reference.divergence(eight, four).mean())
            assert choice.sensitivity == pytest.approx(want, rel=1e-6) and want > 0
        for layer in again.modules():
            if isinstance(layer, lowbit.QuantLinear):
                layer.activation_bits = 4
        want = float(reference.divergence(eight, again(text).logits[:, 3::4].reshape(-1, 97)).mean())
    assert report.budget.everything_at_4 == pytest.approx(want, rel=1e-6)
    assert 0 < report.budget.as_chosen < report.budget.everything_at_4 and report.budget.tokens == 512


def test_siblings_go_together_and_the_average_is_kept(tmp_path: Path) -> None:
    model, report = quantized(budget=5.5)
    found = report.budget
    assert found is not None and found.average <= 5.5
    inputs = [tuple(name.rpartition(".")[2] for name in c.names) for c in found.choices]
    assert inputs == 2 * [("q_proj", "k_proj", "v_proj"), ("o_proj",), ("gate_proj", "up_proj"), ("down_proj",)]
    want = {name: c.bits for c in found.choices for name in c.names}
    assert {4, 8} == set(want.values())
    sizes = {n: m.in_features * m.out_features for n, m in model.named_modules() if isinstance(m, lowbit.QuantLinear)}
    assert found.average == sum(want[n] * size for n, size in sizes.items()) / sum(sizes.values())
    lowbit.save(model, tmp_path / "out")
    loaded = lowbit.load(tmp_path / "out")
    for name, bits in want.items():
        declared = loaded.get_submodule(name).declares()
        assert declared.bits == bits and declared == (Activation(8, "token") if bits == 8 else declared)
    assert open_checkpoint(tmp_path / "out").metadata["budget"] == json.loads(json.dumps(found.to_dict()))
    lowbit.save(loaded, tmp_path / "again")
    assert open_checkpoint(tmp_path / "again").metadata["budget"]["asked"] == 5.5


def test_overrides_are_counted_and_left_alone() -> None:
    model, report = quantized(budget=6.0, overrides={"k_proj": "a16", "down_proj": "a8"})
    found = report.budget
    assert found is not None and found.average <= 6.0
    decided = {c.names: c.bits for c in found.choices if c.sensitivity is None}
    assert set(decided.values()) == {8, 16} and len(decided) == 4
    assert model.model.layers[0].mlp.down_proj.declares() == Activation(8, "group")
    assert ("model.layers.0.self_attn.q_proj", "model.layers.0.self_attn.v_proj") in [c.names for c in found.choices]


@pytest.mark.parametrize(
    ("scheme", "options", "said"),
    [
        ("w4a4", {"budget": 9.0, "calibration": [ids(2, 64)]}, "budget: found 9, accepted is 4 .. 8"),
        ("w4a8", {"budget": 5.0, "calibration": [ids(2, 64)]}, "budget: found 5 with scheme w4a8"),
        ("w4a4", {"budget": 5.0, "method": "rtn"}, "budget: found 5 without calibration"),
        ("w4a4", {"budget": 4.5, "overrides": {"down_proj": "a8", "gate_proj": "a8", "up_proj": "a8"},
                  "calibration": [ids(2, 64)]}, "budget: found 4.5, accepted is 6.66667 or more"),
    ],
)  # fmt: skip
def test_what_cannot_be_met_is_refused_before_any_work(scheme: str, options: dict[str, Any], said: str) -> None:
    model = llama()
    before = [p.clone() for p in model.parameters()]
    with pytest.raises(FormatError, match=said):
        lowbit.quantize(model, scheme, progress=False, **options)
    assert all(torch.equal(a, b) for a, b in zip(before, model.parameters(), strict=True))


def test_the_command_line_prints_what_was_spent(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    plain = tmp_path / "plain"
    samples.byte_tokenizer().save_pretrained(plain)
    config = transformers.LlamaConfig(
        hidden_size=64, intermediate_size=128, num_hidden_layers=1, num_attention_heads=2, vocab_size=259,
        num_key_value_heads=1, head_dim=32, pad_token_id=0, bos_token_id=1, eos_token_id=2, initializer_range=0.2,
    )  # fmt: skip
    transformers.LlamaForCausalLM(config).save_pretrained(plain)
    (plain / "text.txt").write_text("Sixty zippers were quickly picked from the woven jute bag. " * 30, "utf-8")
    common = ["quantize", str(plain), str(tmp_path / "out"), "--scheme", "w4a4", "--calibration",
              str(plain / "text.txt"), "--tokens", "512", "--budget"]  # fmt: skip
    assert main([*common, "5"]) == 0
    printed = capsys.readouterr().out
    assert "self_attn.q_proj, k_proj, v_proj" in printed and "bits on average (asked: 5)" in printed
    assert main([*common, "5", "--json"]) == 0
    found = json.loads(capsys.readouterr().out)["budget"]
    assert found["asked"] == 5 and len(found["choices"]) == 4
    assert main([*common, "2"]) == 2 and "budget: found 2, accepted is 4 .. 8" in capsys.readouterr().err
