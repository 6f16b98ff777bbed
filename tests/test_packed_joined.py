"""Attention of the packed engine that rounds its rows for o: the same bits as apart, and where it does."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from lowbit import ops_cuda
from lowbit.engines import packed, packed_attention, packed_linears
from lowbit.engines.graphs import Graphs
from lowbit.engines.packed import Backbone
from lowbit.engines.packed_attention import Spans
from lowbit.engines.packed_linears import TileProduct
from lowbit.engines.packed_stack import linears_of
from lowbit.quantize import rtn
from lowbit.types import Activation, LowRank, QuantizedWeight, Scheme
from test_packed import LENGTHS, linear, norm_rope, positions, quantize, spans, stack

SIZES = dict(hidden_size=256, intermediate_size=320, num_hidden_layers=3, head_dim=128)  # 4 heads on 2
SCHEME = Scheme("w4a8", symmetric=True, activation=Activation(8, "token"))
Calls = list[str]


def attention(q: Tensor, k: Tensor, v: Tensor, bounds: Tensor, scale: float) -> Tensor:
    return packed_attention.ATTENTIONS["segments"](Spans(bounds, 0))(q, k, v, scale)


def attention_quantize(
    q: Tensor, k: Tensor, v: Tensor, bounds: Tensor, scale: float, tile_order: bool
) -> tuple[Tensor, Tensor]:
    assert tile_order  # the GEMV's rows are never joined
    y = attention(q, k, v, bounds, scale).flatten(1)
    none: dict[str, Any] = dict(residual=None, norm=None, eps=0.0, silu=False, smooth=None, down=None, hadamard=False)
    return quantize(y, **none, tile_order=tile_order)[:2]


@pytest.fixture
def calls(monkeypatch: pytest.MonkeyPatch) -> Calls:
    """A CPU that has the operators of a Hopper, done by the reference: what was called."""
    found: Calls = []
    for function in (quantize, linear, norm_rope, attention, attention_quantize):

        def noted(*args: Any, _do: Any = function, **kwargs: Any) -> Any:
            found.append(_do.__name__)
            if kwargs.get("smooth") is not None:  # as packed: what x is divided by, and what it is multiplied by
                kwargs["smooth"] = kwargs["smooth"][0]
            return _do(*args, **kwargs)

        monkeypatch.setattr(ops_cuda, function.__name__, noted)
    joins = ops_cuda.joins
    monkeypatch.setattr(ops_cuda, "joins", lambda _, *heads: joins(torch.device("cuda"), *heads))
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda *_: (9, 0))
    monkeypatch.setattr(packed, "choose", lambda *_: "ours")
    monkeypatch.setattr(packed_linears, "integer_product", lambda q, word, gate=False: TileProduct(q, gate))
    return found


def made(
    joined: bool = True,
    precision: Any = "w4a8",
    dtype: torch.dtype = torch.float16,
    sides: dict[str, dict[str, Any]] | None = None,
    **changes: Any,
) -> Backbone:
    """``sides``: what the weight of a linear has beside its codes."""
    model = stack("cpu", dtype, **{**SIZES, **changes})
    words = packed.resolve(precision, linears_of(model), {}, torch.device("cpu"))
    weights = {
        name: rtn(one.weight.float(), SCHEME, "two-level").with_(**(sides or {}).get(name, {}))
        for name, one in linears_of(model).items()
        if words[name] == "w4a8"
    }
    backbone = Backbone(model, precision, weights, joined=joined)
    backbone.kernel_rope = True
    return backbone


def run(backbone: Backbone, x: Tensor, lengths: tuple[int, ...] = LENGTHS, rows: Tensor | None = None) -> Tensor:
    with torch.inference_mode():
        return backbone(x, backbone.angles(positions(lengths)), spans(str(x.device), lengths), rows)


def inputs(rows: int = sum(LENGTHS)) -> Tensor:
    return torch.randn(rows, 256, generator=torch.Generator().manual_seed(5)).half()


PRODUCT = ["quantize", "linear"]
APART = [*PRODUCT, "norm_rope", "attention", *PRODUCT, *PRODUCT, *PRODUCT]
JOINED = [*PRODUCT, "norm_rope", "attention_quantize", "linear", *PRODUCT, *PRODUCT]


@pytest.mark.parametrize("precision", ["w4a8", "w8a8"])
def test_a_layer_of_nine_launches_has_the_bits_of_the_ten(calls: Calls, precision: str) -> None:
    x = inputs()
    kept = x.clone()
    want = run(made(False, precision), x)
    assert calls == APART * 3
    calls.clear()
    together = made(True, precision)
    assert torch.equal(run(together, x), want) and torch.equal(x, kept)
    assert calls == JOINED * 3
    rows = torch.tensor([3, 70, 3])
    assert torch.equal(run(together, x, rows=rows), want[rows])


@pytest.mark.parametrize("joined", [True, False])
def test_from_how_many_rows_on(calls: Calls, joined: bool) -> None:
    """With up to 16 the GEMV runs, whose codes are in another order."""
    backbone = made(joined, num_hidden_layers=1)
    for m in (1, 16, 17, 300):
        calls.clear()
        run(backbone, inputs(m), (m,))
        assert calls == (JOINED if joined and m > 16 else APART), m
    said = "w4, activations int8 a row, from 17 rows on rounded by attention"
    assert (said in backbone.kinds["layers.0.o"]) == joined
    assert "attention" not in "".join(kind for name, kind in backbone.kinds.items() if not name.endswith(".o"))


O1 = "layers.1.self_attn.o_proj"
EVERY, NONE, NOT_THE_SECOND = [True] * 3, [False] * 3, [True, False, True]


@pytest.mark.parametrize(
    ("found", "given"),
    [
        (EVERY, dict(dtype=torch.bfloat16, precision="w8a8")),
        (EVERY, dict(sides={"layers.1.mlp.down_proj": dict(hadamard=64)})),
        (NOT_THE_SECOND, dict(sides={O1: dict(hadamard=64)})),
        (NOT_THE_SECOND, dict(sides={O1: dict(smooth=torch.linspace(0.5, 2, 512).half())})),
        (NOT_THE_SECOND, dict(precision={"*": "w4a8", O1: "fp16"})),
        (NONE, dict(precision=None)),
        (NONE, dict(num_key_value_heads=1)),  # four query heads on one
        (NONE, dict(num_attention_heads=2, num_key_value_heads=1)),  # no cluster
        (NONE, dict(num_attention_heads=18, num_key_value_heads=9)),  # a larger one than there is
    ],
)
def test_where_it_is_joined(calls: Calls, found: list[bool], given: dict[str, Any]) -> None:
    backbone = made(**given)
    assert [layer.joined is not None for layer in backbone.layers] == found
    assert ["by attention" in backbone.kinds[f"layers.{index}.o"] for index in range(3)] == found
    if backbone.dtype == torch.float16:
        want = run(made(False, **given), inputs())
        calls.clear()
        assert torch.equal(run(backbone, inputs()), want)
        assert calls.count("attention_quantize") == sum(found) and calls.count("attention") == 3 - sum(found)


def test_a_low_rank_of_o_is_not_joined(calls: Calls) -> None:
    g = torch.Generator().manual_seed(2)
    low = LowRank(torch.randn(512, 16, generator=g).half(), torch.randn(256, 16, generator=g).half())
    backbone = made(sides={O1: dict(low_rank=low)})
    assert [layer.joined is not None for layer in backbone.layers] == NOT_THE_SECOND


def test_another_chip_and_another_attention_join_nothing(calls: Calls, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(packed, "choose", lambda *_: "segments")
    assert all(layer.joined is None for layer in made().layers)
    monkeypatch.setattr(packed, "choose", lambda *_: "ours")
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda *_: (8, 9))
    assert all(layer.joined is None for layer in made().layers)


# -- on a GPU -------------------------------------------------------------------------------------------------------

WIDE = dict(
    hidden_size=1024, intermediate_size=3072, num_hidden_layers=3, num_attention_heads=16, num_key_value_heads=8, head_dim=128
)  # fmt: skip
SPLITS = {
    17: (17,), 40: (23, 0, 16, 1), 172: (111, 61), 685: (435, 250), 1890: (64, 0, 1000, 0, 0, 65, 1, 760),
}  # fmt: skip


def on_gpu(name: str, one: torch.nn.Linear, word: str, seed: int) -> QuantizedWeight:
    """Nearest codes, with everything that a checkpoint may bring in all but o of the first two layers."""
    q = packed_linears.nearest(one, word)
    if name in ("layers.0.self_attn.o_proj", O1):
        return q
    g = torch.Generator(device="cuda").manual_seed(seed)
    down = torch.randn(q.k, 16, generator=g, device="cuda") / q.k**0.5
    q = q.with_(low_rank=LowRank(down.half(), (torch.randn(q.n, 16, generator=g, device="cuda") / 32).half()))
    return q.with_(hadamard=64, smooth=torch.linspace(0.5, 2, q.k, device="cuda").half())


@pytest.fixture(scope="module", params=[torch.float16, torch.bfloat16], ids=["fp16", "bf16"])
def wide(request: pytest.FixtureRequest) -> Any:
    if torch.cuda.get_device_capability() != (9, 0):
        pytest.skip("attention rounds its rows on 9.0")
    return stack("cuda", request.param, **WIDE)


def both(model: Any, precision: str) -> tuple[Backbone, Backbone]:
    weights = {name: on_gpu(name, one, precision, seed) for seed, (name, one) in enumerate(linears_of(model).items())}
    together, apart = (Backbone(model, precision, weights, joined=joined) for joined in (True, False))
    assert [layer.joined is not None for layer in together.layers] == [True, True, False]
    assert all(layer.joined is None for layer in apart.layers)
    return together, apart


@pytest.mark.gpu
@pytest.mark.parametrize("precision", ["w4a8", "w8a8", "w4a4"])
def test_on_a_gpu_joined_launches_have_the_bits_of_the_ten(wide: Any, precision: str) -> None:
    together, apart = both(wide, precision)
    for m, lengths in SPLITS.items():
        x = torch.randn(m, 1024, generator=torch.Generator().manual_seed(m)).to("cuda", wide.dtype)
        want = run(apart, x, lengths)
        assert bool(want.isfinite().all()) and torch.equal(run(together, x, lengths), want), m
        assert torch.equal(run(together, x, lengths), want), m
        some = torch.arange(0, m, 3, device="cuda")
        assert torch.equal(run(together, x, lengths, some), run(apart, x, lengths, some)), m


@pytest.mark.gpu
def test_on_a_gpu_a_replay_of_joined_launches_is_the_plain_call(wide: Any) -> None:
    """Buckets that stay captured while others run, and segments that end where the rows of the bucket do."""
    together, apart = both(wide, "w4a8")

    def buffers(size: int) -> dict[str, Tensor]:
        zeros = torch.zeros(size, dtype=torch.int64, device="cuda")
        bounds = torch.tensor([0, 0, size], dtype=torch.int32, device="cuda")
        cosines, sines = together.angles(zeros)
        x = torch.zeros(size, 1024, dtype=wide.dtype, device="cuda")
        return {"x": x, "bounds": bounds, "cosines": cosines.clone(), "sines": sines.clone()}

    def step(b: dict[str, Tensor], backbone: Backbone = together) -> Tensor:
        rotation = packed.Rotation(b["cosines"], b["sines"])
        return backbone(b["x"], rotation, Spans(b["bounds"], len(b["x"])))

    with torch.inference_mode():
        graphs = Graphs(step, buffers, buckets=(64, 192, 704), device="cuda", watch=together.check)
        for m, first in ((685, 435), (50, 50), (172, 111), (190, 1), (704, 704), (60, 0)):
            slot = graphs.take(m)
            b = slot.buffers
            g = torch.Generator().manual_seed(m)
            b["x"].copy_(torch.randn(slot.size, 1024, generator=g))
            b["bounds"].copy_(torch.tensor([0, first, slot.size], dtype=torch.int32))
            angles = together.angles(torch.arange(slot.size))
            b["cosines"].copy_(angles.cosines)
            b["sines"].copy_(angles.sines)
            got = slot.run()
            assert got is not None and torch.equal(got, step(b, apart)), m
