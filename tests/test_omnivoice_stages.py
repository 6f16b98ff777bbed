"""Precision by decoding step, original weights put away, and the word about what runs in float: on the real class, tiny."""

from __future__ import annotations

import gc
import tempfile
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch

import tiny_omnivoice as tiny
from lowbit import omnivoice
from lowbit.engines import packed, packed_linears
from lowbit.engines.graphs import Graphs
from lowbit.engines.omnivoice_step import Step
from lowbit.engines.packed import Backbone
from lowbit.engines.packed_originals import Originals
from lowbit.engines.packed_stack import linears_of
from lowbit.layouts import mma_tiles
from lowbit.quantize import rtn
from lowbit.types import Activation, FormatError, Scheme
from test_omnivoice import CASES, WIDE, assert_same, assert_untouched, speak, state

pytest.importorskip("transformers")
EVERY = {"*": "fp32"}  # the same as "fp32" by another name, so that it is a backbone of its own


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Any:
    return tiny.ready(tiny.write(tmp_path_factory.mktemp("omnivoice")))


@pytest.fixture(autouse=True)
def _restored(model: Any) -> Any:
    yield
    omnivoice.restore(model)


def boards(model: Any, monkeypatch: pytest.MonkeyPatch, precision: Any, name: str = "single") -> list[Any]:
    """(number of the step object, tokens before it, tokens after it, the board) of every step of one utterance."""
    omnivoice.accelerate(model, precision=precision)
    steps, found = omnivoice.engine_of(model).steps, []
    run = Step.__call__

    def noted(step: Step, board: Any) -> None:
        before = board.tokens.clone()
        run(step, board)
        found.append((steps.index(step), before, board.tokens.clone(), board))

    with monkeypatch.context() as patch:
        patch.setattr(Step, "__call__", noted)
        speak(model, CASES[name], False)
    return found


# -- precision by step ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("warm", [False, True], ids=["greedy", "seeded"])
@pytest.mark.parametrize("name", ["single", "batch", "long", "drawn tokens", "one frame"])
@pytest.mark.parametrize("buckets", [None, (48, 128, 512)], ids=["plain", "buckets"])
def test_two_float_stages_are_stock_bit_by_bit(model: Any, name: str, warm: bool, buckets: Any) -> None:
    want = speak(model, CASES[name], warm)
    omnivoice.accelerate(model, None, [(2, "fp32"), (1, EVERY), (None, "fp32")], buckets, chunk_tokens=8192)
    engine = omnivoice.engine_of(model)
    assert len(engine.steps) == 2  # the third stage is the first's backbone again
    one, two = (step.backbone.layers[0].qkv.weight for step in engine.steps)
    assert one.data_ptr() == two.data_ptr() == model.llm.layers[0].self_attn.q_proj.weight.data_ptr()  # nothing twice
    assert_same(speak(model, CASES[name], warm), want)


@pytest.mark.parametrize("word", [None, "w8a8", {"*": "w4a8", "layers.0.*": "fp32"}], ids=["fp32", "w8a8", "mixed"])
def test_one_stage_is_the_plain_word(model: Any, word: Any) -> None:
    omnivoice.accelerate(model, precision=word)
    want, kinds = speak(model, CASES["single"], True), omnivoice.engine_of(model).explain()
    for stages in ([(None, word)], [(4, word)]):
        omnivoice.restore(model)
        omnivoice.accelerate(model, precision=stages)
        assert_same(speak(model, CASES["single"], True), want)
        assert omnivoice.engine_of(model).explain() == kinds and len(omnivoice.engine_of(model).steps) == 1


def test_each_step_runs_in_its_precision(model: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    in_float = boards(model, monkeypatch, None)
    omnivoice.restore(model)
    found = boards(model, monkeypatch, [(2, "fp32"), (None, "w8a8")])
    assert [at for at, *_ in found] == [0, 0, 1, 1]
    for mine, theirs in zip(found[:2], in_float[:2], strict=True):
        assert torch.equal(mine[2], theirs[2])
    omnivoice.restore(model)
    step = Step(model, Backbone(model.llm, "w8a8"))
    try:
        for _, before, after, board in found[2:]:
            board.tokens.copy_(before)
            masked = int((before == step.mask_id).sum())
            board.k.fill_(masked - int((after == step.mask_id).sum()))
            with torch.inference_mode():
                step(board)
            assert torch.equal(board.tokens, after) and masked
    finally:
        step.backbone.close()


def test_drawn_tokens_change_stages_too(model: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    omnivoice.accelerate(model, precision=[(1, "fp32"), (2, "w8a8"), (None, "fp32")])
    steps, found = omnivoice.engine_of(model).steps, []
    logits = Step.logits
    monkeypatch.setattr(Step, "logits", lambda step, board: found.append(steps.index(step)) or logits(step, board))
    speak(model, dict(CASES["single"], class_temperature=0.7), True)
    assert found == [0, 1, 1, 0]


def test_a_weight_lies_at_one_place_whoever_reads_it_first(model: Any) -> None:
    """q alone in float, then with its siblings in one weight: the first must not keep the memory of before."""
    omnivoice.accelerate(model, precision=[(2, {"*": "w8a8", "*.q_proj": "fp32"}), (None, "fp32")])
    alone, together = (step.backbone.layers[1].qkv for step in omnivoice.engine_of(model).steps)
    weight = model.llm.layers[1].self_attn.q_proj.weight
    assert alone.products[0].weight.data_ptr() == together.weight.data_ptr() == weight.data_ptr()


def test_what_runs_is_explained_by_step(model: Any) -> None:
    omnivoice.accelerate(model, precision=[(2, "fp32"), (1, "w8a8"), (None, "fp32")])
    kinds = omnivoice.engine_of(model).explain()
    assert len(kinds) == 8
    for kind in kinds.values():
        first, second, third = kind.split("; ")
        assert first == "float32 (steps 1 to 2)" and third == "float32 (from step 4)"
        assert second.startswith("cpu_linear_w8") and second.endswith("(steps 3 to 3)")


@pytest.mark.parametrize(
    "stages",
    [
        [(2, None), (None, "w8a8")],
        [(2, {"*": "w8a8", "*.q_proj": "fp32"}), (None, "fp32")],
        [(2, "w4a8"), (2, {"*": "w8a8", "layers.1.*": "fp32"})],
    ],
)
def test_restore_after_stages_leaves_no_trace(model: Any, stages: Any) -> None:
    before = state(model)
    omnivoice.accelerate(model, precision=stages)
    speak(model, CASES["single"], True)
    omnivoice.restore(model)
    assert_untouched(model, before)


def test_weights_are_watched_in_every_stage(model: Any) -> None:
    omnivoice.accelerate(model, precision=[(2, "fp32"), (None, "w8a8")])
    weight = model.llm.layers[1].mlp.down_proj.weight
    kept = weight.clone()
    try:
        with torch.no_grad():
            weight.mul_(2)  # float reads it, the integers are old
        with pytest.raises(FormatError, match="down_proj.weight: found other weights"):
            speak(model, CASES["single"], False)
    finally:
        with torch.no_grad():
            weight.copy_(kept)


@pytest.mark.parametrize(
    ("stages", "message"),
    [
        ([], "precision: found 'no stage', accepted by step are"),
        ([(None, "fp32"), (2, "w8a8")], r"found \(2, 'w8a8'\) after one of all other steps"),
        ([(0, "fp32"), (None, "w8a8")], r"precision: found \(0, 'fp32'\)"),
        ([(True, "fp32"), (None, "w8a8")], r"precision: found \(True, 'fp32'\)"),
        ([(1.5, "fp32"), (None, "w8a8")], r"precision: found \(1.5, 'fp32'\)"),
        (["fp32", "w8a8"], "precision: found 'fp32', accepted by step"),
        ([(2, "fp32"), (None, 8)], r"precision: found \(None, 8\)"),
        ([(2, "fp32"), (None, "w3a3")], "precision: found 'w3a3', accepted are"),
        ([(2, "fp32"), (None, "fp16")], "precision: found 'fp16' with a model in fp32"),
    ],
)
def test_stages_that_are_none_are_one_line(model: Any, stages: Any, message: str) -> None:
    before = state(model)
    with pytest.raises(FormatError, match=message) as caught:
        omnivoice.accelerate(model, precision=stages)
    assert "\n" not in str(caught.value)
    assert_untouched(model, before)


@pytest.mark.parametrize(
    ("stages", "message"),
    [
        ([(4, "fp32"), (None, "w8a8")], "num_step: found 4, .* is more than 4"),
        ([(3, "fp32"), (2, "w8a8")], "num_step: found 4, .* is 5"),
        ([(1, "fp32"), (2, "w8a8")], "num_step: found 4, .* is 3"),
    ],
)
def test_schedules_that_do_not_fit_are_one_line(model: Any, stages: Any, message: str) -> None:
    omnivoice.accelerate(model, precision=stages)
    for name in ("single", "long", "drawn tokens"):
        with pytest.raises(FormatError, match=message) as caught:
            speak(model, CASES[name], True)
        assert "\n" not in str(caught.value)
        torch.manual_seed(7)
        want = float(torch.rand(()))
        torch.manual_seed(7)
        with pytest.raises(FormatError):
            speak(model, CASES[name], True)
        assert float(torch.rand(())) == want  # nothing was drawn


def test_a_bucket_has_a_graph_of_every_stage(monkeypatch: pytest.MonkeyPatch) -> None:
    """The capture itself with a pretended device: what is captured, from the largest bucket down, and what is replayed."""
    told: list[Any] = []
    graphs: Graphs[list[int]] = Graphs(
        [lambda b: told.append(("one", b[0])), lambda b: told.append(("two", b[0]))], lambda size: [size],
        buckets=(4, 8), device="cpu",
    )  # fmt: skip

    class Quiet:
        def __init__(self, *_: Any, **__: Any) -> None: ...
        def __enter__(self) -> None: ...
        def __exit__(self, *_: Any) -> None: ...

    class Graph(Quiet):
        def __init__(self) -> None:
            self.number = len(told)

        def replay(self) -> None:
            told.append(told[self.number])

    monkeypatch.setattr(torch.cuda, "stream", Quiet)
    monkeypatch.setattr(torch.cuda, "graph", Quiet)
    monkeypatch.setattr(torch.cuda, "CUDAGraph", Graph)
    for size in (8, 4):
        slot = graphs.take(size)
        slot.capture(None, type("Stream", (), {"synchronize": lambda self: None})())
        assert slot.captured == 2
    assert told == [(word, size) for size in (8, 4) for word in ("one", "two") for _ in range(3)]
    told_before = list(told)
    graphs.take(3).run(1)
    graphs.take(8).run()
    assert told == [*told_before, ("two", 4), ("one", 8)]


# -- original weights ------------------------------------------------------------------------------------------------


def linears(model: Any) -> list[torch.nn.Linear]:
    return [one for block in model.llm.layers for one in block.modules() if isinstance(one, torch.nn.Linear)]


def held(model: Any) -> int:
    """Bytes of memory of the weights of the stack's linears."""
    return sum(0 if one.weight.is_meta else one.weight.untyped_storage().nbytes() for one in linears(model))


@pytest.mark.parametrize(
    ("precision", "left"),
    [("w8a8", 0), ([(2, "w8a8"), (None, "w4a8")], 0), ({"*": "w4a8", "layers.0.*": "fp32"}, 7)],
    ids=["w8a8", "two stages", "mixed"],
)
def test_originals_leave_memory_and_come_back_bit_by_bit(model: Any, precision: Any, left: int) -> None:
    before, objects, device = state(model), [id(one.weight) for one in linears(model)], model.device
    omnivoice.accelerate(model, precision=precision)
    want = speak(model, CASES["single"], True)
    assert held(model) > 0 and not any(one.weight.is_meta for one in linears(model))
    omnivoice.restore(model)
    kept = [one.weight for one in linears(model)]
    omnivoice.accelerate(model, precision=precision, free_originals=True)
    assert sum(not one.weight.is_meta for one in linears(model)) == left and (held(model) == 0) == (left == 0)
    assert sum(weight.numel() == 0 for weight in kept) == 14 - left  # nor does the old object hold any
    assert model.device == device
    assert_same(speak(model, CASES["single"], True), want)
    with pytest.raises((NotImplementedError, RuntimeError), match="meta"):
        linears(model)[-1].weight.cpu()
    omnivoice.restore(model)
    assert_untouched(model, before)
    assert [id(one.weight) for one in linears(model)] == objects


def test_a_layer_is_put_away_before_the_next_one_is_rounded(model: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """So that memory never holds all of both."""
    found = []
    make = packed_linears.product_of

    def noted(*arguments: Any) -> Any:
        found.append(sum(one.weight.is_meta for one in linears(model)))
        return make(*arguments)

    monkeypatch.setattr(packed, "product_of", noted)
    omnivoice.accelerate(model, precision="w8a8", free_originals=True)
    assert found == [0] * 4 + [7] * 4


def test_other_dtypes_and_places_come_back_too() -> None:
    """Of a CUDA device they would wait in CPU memory: the same code, told that they do."""
    for dtype in (torch.float16, torch.bfloat16, torch.float32):
        linear, originals = torch.nn.Linear(48, 32, dtype=dtype), Originals()
        weight = linear.weight
        with torch.no_grad():
            weight.view(-1)[:3] = torch.tensor([torch.nan, torch.inf, -0.0])
        want = weight.detach().clone()
        originals.put_away(linear)
        assert linear.weight.is_meta and linear.weight.shape == want.shape and linear.weight.dtype == dtype
        row = originals._away[0]
        assert row.held is None and originals._file is not None
        originals.close()
        assert linear.weight is weight and torch.equal(weight.view(torch.uint8), want.view(torch.uint8))
        originals._away.append(row._replace(held=want.clone()))
        originals.close()
        assert linear.weight is weight and torch.equal(weight.view(torch.uint8), want.view(torch.uint8))


def test_nothing_to_put_away_and_no_room_are_one_line(model: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    before = state(model)
    for precision in (None, [(2, "fp32"), (None, "w8a8")]):
        with pytest.raises(FormatError, match="free_originals: found every linear in float at some step"):
            omnivoice.accelerate(model, precision=precision, free_originals=True)

    class Full:
        """A file with room for some layers."""

        def __init__(self) -> None:
            self.file, self.left = tempfile.SpooledTemporaryFile(), 100_000

        def write(self, data: Any) -> int:
            self.left -= len(data)
            if self.left < 0:
                raise OSError(28, "No space left on device")
            return self.file.write(data)

        def readinto(self, data: Any) -> int:
            got = self.file.read(len(data))
            data[: len(got)] = got
            return len(got)

        def seek(self, *where: int) -> int:
            return self.file.seek(*where)

        def close(self) -> None:
            self.file.close()

    monkeypatch.setattr(tempfile, "TemporaryFile", lambda **_: Full())
    with pytest.raises(FormatError, match="free_originals: found No space left on device in .*TMPDIR") as caught:
        omnivoice.accelerate(model, precision="w8a8", free_originals=True)
    assert "\n" not in str(caught.value)
    assert_untouched(model, before)


# -- what runs in float ----------------------------------------------------------------------------------------------


def rounded(model: Any, which: str, scheme: Scheme) -> dict[str, Any]:
    found = {}
    for name, one in linears_of(model.llm).items():
        odd = which in name
        plain = Scheme("w4a8", symmetric=True, activation=Activation(8, "token"))
        found[name] = rtn(one.weight, scheme if odd else plain, *([] if odd else ["two-level"]))
    return found


@pytest.mark.parametrize(
    ("scheme", "why"),
    [
        (Scheme("w4a8", symmetric=False, activation=Activation(8, "token")), "the codes have zero points"),
        (Scheme("w4a8", symmetric=True, group_size=32, activation=Activation(8, "token")), "the group is 32 columns"),
    ],
)
def test_a_word_where_tiles_do_not_take_a_checkpoint(
    model: Any, monkeypatch: pytest.MonkeyPatch, scheme: Scheme, why: str
) -> None:
    weights = rounded(model, "layers.1.mlp", scheme)
    q = weights["layers.1.mlp.up_proj"]
    assert why in (packed_linears.off_tiles(q, torch.device("cuda")) or "")
    assert packed_linears.off_tiles(q, torch.device("cpu")) is None
    assert packed_linears.off_tiles(weights["layers.0.mlp.up_proj"], torch.device("cuda")) is None
    columns = torch.arange(q.k - 1, -1, -1, dtype=torch.int32)
    assert "permuted" in (
        packed_linears.off_tiles(weights["layers.0.mlp.up_proj"].with_(perm=columns[:64]), torch.device("cuda")) or ""
    )
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        omnivoice.accelerate(model, weights)  # a CPU has no such tiles
    omnivoice.restore(model)
    monkeypatch.setattr(packed_linears, "off_tiles", lambda q, device: mma_tiles.refuses(q))
    with pytest.warns(UserWarning) as caught:
        omnivoice.accelerate(model, weights)
    (line,) = (str(one.message) for one in caught)
    assert line.startswith("2 of 8 products cannot run the integer tiles of cpu") and "\n" not in line
    assert f"layers.1.gate_up, layers.1.down ({why}" in line and "layers.0" not in line
    assert Path(caught[0].filename) == Path(__file__)
    kinds = omnivoice.engine_of(model).explain()
    assert [name for name, kind in kinds.items() if why in kind] == ["layers.1.gate_up", "layers.1.down"]


def test_the_word_is_said_once_and_short(model: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(packed_linears, "off_tiles", lambda q, device: mma_tiles.refuses(q))
    before = state(model)
    with pytest.warns(UserWarning) as caught:
        omnivoice.accelerate(model, precision=[(2, "w4a8"), (None, {"*": "w4a8", "layers.0.*": "fp32"})])
    (line,) = (str(one.message) for one in caught)
    assert "8 of 8 products" in line and "layers.0.qkv, layers.0.o and 6 more (the codes have zero points)" in line
    omnivoice.restore(model)
    with warnings.catch_warnings(), pytest.raises(UserWarning):
        warnings.simplefilter("error")
        omnivoice.accelerate(model, precision="w4a8")
    assert_untouched(model, before)


# -- on a GPU -------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def on_gpu(tmp_path_factory: pytest.TempPathFactory) -> Any:
    return tiny.ready(tiny.write(tmp_path_factory.mktemp("wide"), **WIDE), "cuda", torch.float16)


@pytest.mark.gpu
def test_a_replay_of_stages_is_the_same_steps_run_in_python(on_gpu: Any) -> None:
    found = []
    for graphs in (False, True):
        stages = [(2, "fp16"), (None, "w4a8")]
        omnivoice.accelerate(on_gpu, None, stages, (128, 512), graphs=graphs, chunk_tokens=0)
        found += [speak(on_gpu, CASES["single"], True) for _ in range(2)]
        assert omnivoice.engine_of(on_gpu).stats()["captured"] == (4 if graphs else 0)
        omnivoice.restore(on_gpu)
    for one in found[1:]:
        assert_same(one, found[0])


@pytest.mark.gpu
def test_originals_leave_the_memory_of_a_gpu(on_gpu: Any) -> None:
    before, sizes, allocated = state(on_gpu), held(on_gpu), []
    for free in (False, True):
        omnivoice.accelerate(on_gpu, precision="w8a8", graphs=False, free_originals=free)
        gc.collect()  # of the engine before
        allocated.append(torch.cuda.memory_allocated())
        omnivoice.restore(on_gpu)
    assert allocated[0] - allocated[1] >= sizes
    assert_untouched(on_gpu, before)
