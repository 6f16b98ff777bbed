"""The walk over models of several runs: encoder-decoders, and blocks that give several tensors or change shape."""

from __future__ import annotations

import copy
import json
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import lowbit
import samples
from lowbit.models.calibrate import quantize_model
from lowbit.models.calibration_inputs import read_calibration
from lowbit.models.recipes import block_lists, linear_names, recipe_for
from lowbit.models.walk import Walk
from lowbit.quantize import InputStats, Options, effective, quantize_linears
from lowbit.types import SCHEMES, FormatError

transformers = pytest.importorskip("transformers")
W4 = SCHEMES["w4a8"]
IDS = dict(pad_token_id=0, bos_token_id=1, eos_token_id=2, decoder_start_token_id=1)


def numbers(*shape: int, seed: int = 0) -> Tensor:
    return torch.randint(3, 97, shape, generator=torch.Generator().manual_seed(seed))


def model_of(family: str) -> nn.Module:
    torch.manual_seed(2)
    if family == "whisper":
        config = transformers.WhisperConfig(
            vocab_size=97, num_mel_bins=16, d_model=64, encoder_layers=2, decoder_layers=2, encoder_attention_heads=2,
            decoder_attention_heads=2, encoder_ffn_dim=128, decoder_ffn_dim=128, max_source_positions=20,
            max_target_positions=32, **IDS,
        )  # fmt: skip
        model: nn.Module = transformers.WhisperForConditionalGeneration(config)
    elif family == "bart":
        config = transformers.BartConfig(
            vocab_size=97, d_model=64, encoder_layers=2, decoder_layers=3, encoder_attention_heads=2,
            decoder_attention_heads=2, encoder_ffn_dim=128, decoder_ffn_dim=128, max_position_embeddings=64, **IDS,
        )  # fmt: skip
        model = transformers.BartForConditionalGeneration(config)
    else:
        config = transformers.T5Config(
            vocab_size=97, d_model=64, d_kv=32, d_ff=128, num_layers=2, num_heads=2, feed_forward_proj="gated-gelu",
            **IDS,
        )  # fmt: skip
        model = transformers.T5ForConditionalGeneration(config)
    with torch.no_grad():
        for p in model.parameters():
            p.add_(torch.randn_like(p) * 0.05)
    return model.eval()


def inputs(family: str, seed: int = 0) -> dict[str, Tensor]:
    if family == "whisper":
        features = torch.randn(2, 16, 40, generator=torch.Generator().manual_seed(seed))
        return {"input_features": features, "decoder_input_ids": numbers(2, 9, seed=seed)}
    return {"input_ids": numbers(2, 12, seed=seed), "decoder_input_ids": numbers(2, 9, seed=seed + 50)}


FAMILIES = ("whisper", "bart", "t5")


@pytest.mark.parametrize("family", FAMILIES)
def test_blocks_run_alone_give_what_the_model_gives(family: str) -> None:
    """Every block's output on the walk, to the bit; the decoder's run begins when the encoder's is done."""
    model = model_of(family)
    blocks = block_lists(model, recipe_for(model).blocks)
    assert ["encoder" in name for name, _ in blocks] == sorted(["encoder" in name for name, _ in blocks], reverse=True)
    batches = read_calibration([inputs(family), inputs(family, 1)])
    want: list[list[Tensor]] = [[] for _ in blocks]

    def first(out: Any) -> Tensor:
        found: Tensor = out[0] if isinstance(out, tuple) else out
        return found

    handles = [
        block.register_forward_hook(lambda _, __, out, i=i: want[i].append(first(out)))
        for i, (_, block) in enumerate(blocks)
    ]
    with torch.no_grad():
        for batch in batches:
            model(**batch.inputs, use_cache=False)
        for handle in handles:
            handle.remove()
        walk = Walk(model, [block for _, block in blocks], batches)
        order: list[int] = []
        runs = 0
        while (run := walk.next_run()) is not None:
            runs += 1
            for step, index in enumerate(run.order):
                order.append(index)
                for number, trace in enumerate(run.traces):
                    trace.advance(blocks[index][1], step)
                    assert torch.equal(first(trace.outputs[step]), want[index][number])
            walk.close(run, len(run.order))
    assert order == list(range(len(blocks))) and runs == 2


@pytest.mark.parametrize("family", FAMILIES)
def test_the_decoder_is_measured_on_the_quantized_encoder(family: str) -> None:
    """An independent walk with plain hooks over the whole model, weights replaced one block at a time."""
    model, twin = model_of(family), model_of(family)
    result, report = quantize_model(model, W4, "gptq", [inputs(family), inputs(family, 1)], progress=False)
    names = linear_names(twin, recipe_for(twin), ("lm_head", "proj_out"))
    assert list(result) == names and [row.name for row in report.rows] == names
    assert all(row.tokens == (36 if "decoder" in row.name else 80 if family == "whisper" else 48)
               for row in report.rows if "encoder_attn" not in row.name and "EncDec" not in row.name)  # fmt: skip
    for prefix, _ in block_lists(twin, recipe_for(twin).blocks):
        mine = {name: twin.get_submodule(name) for name in names if name.startswith(f"{prefix}.")}
        stats: dict[str, InputStats] = {}
        seen: dict[str, list[Tensor]] = {name: [] for name in mine}
        handles = [m.register_forward_pre_hook(lambda _, a, s=seen[n]: s.append(a[0])) for n, m in mine.items()]
        with torch.no_grad():
            for seed in (0, 1):
                twin(**inputs(family, seed), use_cache=False)
        for handle in handles:
            handle.remove()
        groups: dict[tuple[int, ...], list[str]] = {}
        for name, tensors in seen.items():
            groups.setdefault(tuple(map(id, tensors)), []).append(name)
            stats[name] = InputStats(tensors[0].shape[-1])
            for x in tensors:
                stats[name].add(x)
        for group in groups.values():
            done = quantize_linears({n: mine[n].weight for n in group}, stats[group[0]], W4, Options())
            for name, (q, _) in done.items():
                assert float((q.codes == result[name].codes).float().mean()) > 0.998, name
                mine[name].weight.data.copy_(effective(result[name]))
    with torch.no_grad():
        a, b = (m(**inputs(family, 7), use_cache=False).logits for m in (model, twin))
    assert torch.equal(a, b)


@pytest.mark.parametrize("stop_after", (1, 3))
def test_an_interrupted_encoder_decoder_resumes_to_the_same_bytes(stop_after: int, tmp_path: Path) -> None:
    whole, _ = quantize_model(model_of("whisper"), W4, "gptq", [inputs("whisper")], progress=False)

    def stop(done: int, total: int, label: str) -> None:
        assert total == 4
        if done == stop_after:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        quantize_model(model_of("whisper"), W4, "gptq", [inputs("whisper")], resume_dir=tmp_path, progress=stop)
    assert len(list(tmp_path.glob("block-*"))) == stop_after
    again, _ = quantize_model(model_of("whisper"), W4, "gptq", [inputs("whisper")], resume_dir=tmp_path, progress=False)
    assert all(
        torch.equal(q.codes, whole[n].codes) and torch.equal(q.scales, whole[n].scales) for n, q in again.items()
    )


def test_masks_of_encoder_and_decoder_leave_padding_out() -> None:
    batch = {
        **inputs("bart"),
        "attention_mask": torch.ones(2, 12, dtype=torch.long).index_fill(1, torch.tensor([10, 11]), 0),
        "decoder_attention_mask": torch.ones(2, 9, dtype=torch.long).index_fill(1, torch.tensor([8]), 0),
    }
    _, report = quantize_model(model_of("bart"), W4, "gptq", [batch], progress=False)
    cross = ("encoder_attn.k_proj", "encoder_attn.v_proj")
    for row in report.rows:
        assert row.tokens == (20 if "encoder.layers" in row.name or row.name.endswith(cross) else 16), row.name
    same = {"input_ids": numbers(1, 6), "decoder_input_ids": numbers(1, 6)}
    same |= {
        "attention_mask": torch.tensor([[1, 1, 1, 1, 0, 0]]),
        "decoder_attention_mask": torch.tensor([[0] + [1] * 5]),
    }
    (one,) = read_calibration([same])
    mask = one.mask_of(6)
    assert mask is not None and mask.tolist() == [False, True, True, True, False, False] and one.mask_of(7) is None


# --- modules that transformers does not know


class Mix(nn.Module):
    """A block of two streams, both of which go on: (a, b) -> (b', a')."""

    def __init__(self) -> None:
        super().__init__()
        self.left, self.right = nn.Linear(64, 64), nn.Linear(64, 64)

    def forward(self, a: Tensor, *, other: Tensor, first: Tensor | None = None) -> tuple[Tensor, Tensor]:
        extra = 0.0 if first is None else 0.1 * first
        return other + torch.tanh(self.right(a)), a + torch.tanh(self.left(other)) + extra


class Halve(nn.Module):
    """A block that halves the number of rows."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(128, 64)

    def forward(self, x: Tensor) -> Tensor:
        return torch.tanh(self.inner(x.reshape(x.shape[0], x.shape[1] // 2, 128)))


class Odd(nn.Module):
    """Two streams through one list, something of its own between, then a list of blocks that change shape."""

    def __init__(self) -> None:
        super().__init__()
        self.pairs = nn.ModuleList(Mix() for _ in range(4))
        self.tower = nn.ModuleDict({"stages": nn.ModuleList(Halve() for _ in range(3))})
        self.head = nn.Linear(64, 3)

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        first = None
        for index, block in enumerate(self.pairs):
            x, y = block(x, other=y, first=first)
            first = y if first is None else first
            if index == 1:
                x = x * 1.5  # between two blocks: a new run
        z = torch.cat([x, y], 1)
        for block in self.tower["stages"]:
            z = block(z)
        found: Tensor = self.head(z.mean(1))
        return found


def odd() -> nn.Module:
    torch.manual_seed(3)
    return Odd().eval()


def pair(seed: int, rows: int = 4) -> dict[str, Tensor]:
    g = torch.Generator().manual_seed(seed)
    return {"x": torch.randn(2, rows, 64, generator=g), "y": torch.randn(2, rows, 64, generator=g)}


def test_any_module_with_several_lists(tmp_path: Path) -> None:
    """Quantized block by block with plain hooks over the whole model, and by us: the same codes; then saved."""
    batches = [pair(0), pair(1, 8)]
    paths = "pairs, tower.stages"
    model, twin = odd(), odd()
    result, report = quantize_model(model, W4, "gptq", batches, blocks=paths, progress=False)
    assert len(result) == 4 * 2 + 3 and all(row.tokens > 0 for row in report.rows)
    for name in result:
        linear = twin.get_submodule(name)
        stats = InputStats(linear.in_features)
        handle = linear.register_forward_pre_hook(lambda _, a, s=stats: s.add(a[0]))
        with torch.no_grad():
            for batch in batches:
                twin(**batch)
        handle.remove()
        q, _ = quantize_linears({name: linear.weight}, stats, W4, Options())[name]
        assert float((q.codes == result[name].codes).float().mean()) > 0.998, name
        if name.endswith(("right", "inner")):  # the block is done
            for other in (name, name.replace("right", "left")):
                twin.get_submodule(other).weight.data.copy_(effective(result[other]))
    third = odd().requires_grad_(False)
    before = third(**pair(5))
    found = lowbit.quantize(third, "w8a8", "rtn", blocks=paths, progress=False)
    assert len(found.rows) == 11 and isinstance(third.head, nn.Linear)
    assert 0 < float((third(**pair(5)) - before).norm() / before.norm()) < 0.05
    lowbit.models.save.save(third, tmp_path)  # type: ignore[arg-type]
    config = json.loads((tmp_path / "config.json").read_text())
    assert [*config] == ["quantization_config"]


def test_lists_that_are_not_there_are_named() -> None:
    with pytest.raises(FormatError, match=r"blocks: found no module 'tower.steps' in Odd, accepted are dotted paths"):
        quantize_model(odd(), W4, "gptq", [pair(0)], blocks="pairs,tower.steps", progress=False)
    with pytest.raises(FormatError, match="tower.stages: found no linear to quantize"):
        quantize_model(odd(), W4, "gptq", [pair(0)], blocks="tower.stages", skip=("inner",), progress=False)


def test_a_list_that_is_never_called_is_rounded_with_a_warning() -> None:
    model = odd()
    whole = copy.deepcopy(model)
    model.unused = nn.ModuleList([nn.Linear(64, 64)])
    with pytest.warns(UserWarning, match=r"unused.0: saw no token in calibration: rounded to nearest"):
        result, report = quantize_model(
            model, W4, "gptq", [pair(0)], blocks="unused,pairs,tower.stages", progress=False
        )
    plain, _ = quantize_model(whole, W4, "gptq", [pair(0)], blocks="pairs,tower.stages", progress=False)
    assert [*result] == ["unused.0", *plain] and report.rows[0].tokens == 0
    assert all(torch.equal(plain[name].codes, result[name].codes) for name in plain)


def test_the_head_of_whisper_is_not_among_the_blocks(tmp_path: Path) -> None:
    model = model_of("whisper")
    recipe = recipe_for(model)
    assert recipe.blocks == "model.encoder.layers,model.decoder.layers" and recipe.skip == ("proj_out",)
    assert len(linear_names(model, recipe)) == 2 * 6 + 2 * 10
    assert samples.whisper(tmp_path).joinpath("preprocessor_config.json").is_file()
