"""One process of several that test_parallel.py starts: runs every check, and writes down how each ended.

``python parallel_worker.py RANK RANKS BACKEND FOLDER`` meets the others over a file in FOLDER, so no port is needed.
"""

from __future__ import annotations

import copy
import io
import json
import os
import re
import sys
import traceback
from collections.abc import Callable
from contextlib import redirect_stderr, redirect_stdout
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.distributed.tensor.parallel import parallelize_module

import lowbit
from lowbit.engines.llama import refuses
from lowbit.nn import QuantLinear, W4A4Linear
from lowbit.nn.parallel import _gathered, _scattered
from lowbit.types import FormatError
from samples import cuttable, part_alone, rows

SIZE = 128


class Check:
    """What a check is given: the processes, and where their tensors are."""

    def __init__(self, mesh: DeviceMesh, device: torch.device, folder: Path) -> None:
        self.mesh, self.device, self.folder = mesh, device, folder
        self.rank, self.ranks = mesh.get_local_rank(), mesh.size()
        # cuBLAS picks the order of a sum by the shape, our CPU kernels never do
        self.exact = device.type == "cpu"

    def same(self, a: Tensor, b: Tensor) -> bool:
        return torch.equal(a, b) if self.exact else torch.allclose(a, b, rtol=1e-4, atol=1e-4)

    def everywhere(self, tensor: Tensor) -> list[Tensor]:
        parts = [torch.empty_like(tensor) for _ in range(self.ranks)]
        dist.all_gather(parts, tensor.contiguous())
        return parts


def _mlp(kind: str, activation: str | None, device: torch.device) -> nn.Sequential:
    """Two layers after each other, the second with whatever ``kind`` stands for."""
    up, down = cuttable("zeros", 2 * SIZE, SIZE), cuttable(kind, SIZE, 2 * SIZE)
    layers = (QuantLinear.from_quantized(q.to(device), activation) for q in (up, down))
    return nn.Sequential(*layers)


def column_wise_is_bit_identical(c: Check) -> None:
    for kind in ("zeros", "order", "svdquant"):
        whole = QuantLinear.from_quantized(cuttable(kind, SIZE, SIZE).to(c.device))
        x = rows(5, SIZE).to(c.device)
        want = whole(x)
        parallelize_module(whole, c.mesh, lowbit.ColwiseQuant(output_layouts=Replicate()))
        assert whole.out_features == SIZE // c.ranks and "column-wise" in repr(whole)
        assert c.same(whole(x), want), kind
    layer = QuantLinear.from_linear(nn.Linear(SIZE, SIZE).to(c.device), "fp16")
    x = rows(3, SIZE).to(c.device)
    want = layer(x).chunk(c.ranks, -1)[c.rank]
    assert c.same(parallelize_module(layer, c.mesh, lowbit.ColwiseQuant())(x), want)


def row_wise_is_the_sum_in_order_of_ranks(c: Check) -> None:
    for kind in ("zeros", "order", "order inside", "svdquant", "order behind hadamard", "channel"):
        for dtype in (torch.float32, torch.bfloat16):
            q = cuttable(kind, SIZE, 2 * SIZE)
            layer = QuantLinear.from_quantized(q.to(c.device))
            x = rows(5, 2 * SIZE, dtype).to(c.device)
            parts = [part_alone(q.to(c.device), x, rank, c.ranks) for rank in range(c.ranks)]
            want = parts[0].float()
            for part in parts[1:]:
                want = want + part
            parallelize_module(layer, c.mesh, lowbit.RowwiseQuant(input_layouts=Replicate()))
            got = layer(x)
            assert got.dtype == dtype and torch.equal(got, want.to(dtype)), (kind, dtype)
            assert all(torch.equal(got, other) for other in c.everywhere(got))
            assert not c.exact or torch.equal(layer(x[2:3]), got[2:3])  # a row of a batch as that row alone


def both_sums_give_the_same_bits(c: Check) -> None:
    y = torch.randn(7, 5, generator=torch.Generator().manual_seed(c.rank)).to(c.device)
    for dtype in (torch.float32, torch.bfloat16):
        assert torch.equal(_gathered(y, c.mesh.get_group(), dtype), _scattered(y, c.mesh.get_group(), dtype))


def two_layers_after_each_other(c: Check) -> None:
    x = rows(4, SIZE).to(c.device)
    plan = {"0": lowbit.ColwiseQuant(), "1": lowbit.RowwiseQuant()}
    for kind, activation in (("zeros", "group"), ("order", "group"), ("zeros", None), ("svdquant", "token")):
        whole = _mlp(kind, activation, c.device)
        cut = parallelize_module(copy.deepcopy(whole), c.mesh, plan)
        assert cut[1].in_features == 2 * SIZE // c.ranks
        error = float((cut(x) - whole(x)).norm() / whole(x).norm())
        limit = 0.01 if activation == "token" else 2e-6 if c.exact else 1e-4
        assert error < limit, (kind, activation, error)
        again = copy.deepcopy(cut)
        assert torch.equal(again(x), cut(x))
        if c.device.type == "cpu" and kind == "order":
            assert torch.equal(torch.compile(cut, backend="eager", fullgraph=True)(x), cut(x))


def layouts_other_than_the_usual(c: Check) -> None:
    whole = _mlp("order", "group", c.device)
    x = rows(2 * c.ranks, SIZE).to(c.device)
    want = whole(x)
    plan = {
        "0": lowbit.ColwiseQuant(input_layouts=Shard(0), use_local_output=False),
        "1": lowbit.RowwiseQuant(output_layouts=Shard(0), use_local_output=False),
    }
    got = parallelize_module(whole, c.mesh, plan)(x.chunk(c.ranks)[c.rank])
    assert isinstance(got, DTensor) and got.placements == (Shard(0),)
    assert torch.allclose(got.full_tensor(), want, rtol=1e-4, atol=1e-4)


def the_gradient_of_x(c: Check) -> None:
    for kind in ("zeros", "order"):
        whole = _mlp(kind, None, c.device)
        cut = parallelize_module(copy.deepcopy(whole), c.mesh, {"0": lowbit.ColwiseQuant(), "1": lowbit.RowwiseQuant()})
        grads = []
        for model in (whole, cut):
            x = rows(3, SIZE).to(c.device).requires_grad_()
            (model(x) * rows(3, SIZE, fill="spread").to(c.device)).sum().backward()
            assert x.grad is not None
            grads.append(x.grad)
        assert torch.allclose(*grads, rtol=1e-4, atol=1e-4), kind


def four_bit_layers(c: Check) -> None:
    q = cuttable("svdquant", SIZE, 2 * SIZE)
    layer = W4A4Linear.from_quantized(q.to(c.device), activation_bits=4)
    want = layer(rows(3, 2 * SIZE).to(c.device))
    parallelize_module(layer, c.mesh, lowbit.RowwiseQuant(input_layouts=Replicate()))
    got = layer(rows(3, 2 * SIZE).to(c.device))
    assert isinstance(layer, W4A4Linear) and layer.activation_bits == 4
    assert _error(got, want) < (1e-5 if c.exact else 1e-2)  # the groups of 64 are the same; a GPU rounds the low rank


def what_cannot_be_cut_is_refused(c: Check) -> None:
    def line(action: Callable[[], object]) -> str:
        try:
            action()
        except FormatError as error:
            return str(error)
        raise AssertionError("nothing was refused")

    odd = QuantLinear.from_quantized(cuttable("zeros", 5 * c.ranks + 1, SIZE).to(c.device))
    assert "out_features: found" in line(lambda: parallelize_module(odd, c.mesh, lowbit.ColwiseQuant()))
    layer = QuantLinear.from_quantized(cuttable("zeros", SIZE, 3 * 32).to(c.device))
    text = line(lambda: parallelize_module(layer, c.mesh, lowbit.RowwiseQuant()))
    assert "found 96 in groups of 32, 48 columns on each of 2 ranks" in text and layer.in_features == 96
    parallelize_module(layer, c.mesh, lowbit.ColwiseQuant())
    assert "accepted is a whole one" in line(lambda: parallelize_module(layer, c.mesh, lowbit.ColwiseQuant()))
    model = nn.ModuleDict({"a": _mlp("zeros", "group", c.device)})
    assert "which names no linear" in line(lambda: lowbit.parallelize(model, c.mesh, {"b.*": "colwise"}))
    assert "'packed_colwise'" in line(lambda: lowbit.parallelize(model, c.mesh, {"a.0": "packed_colwise"}))
    assert "plan: found none" in line(lambda: lowbit.parallelize(model, c.mesh))
    lowbit.parallelize(model, c.mesh, {"a.0": "colwise", "a.1": "rowwise"})
    assert "for saving" in line(lambda: lowbit.save(model, c.folder / "never"))  # type: ignore[arg-type]


def _ids(c: Check) -> Tensor:
    return torch.randint(3, 90, (2, 9), generator=torch.Generator().manual_seed(1)).to(c.device)


def _logits(model: Any, c: Check) -> Tensor:
    with torch.inference_mode():
        logits: Tensor = model(input_ids=_ids(c)).logits.float()
    return logits


def _new_tokens(model: Any, c: Check, **options: Any) -> list[list[int]]:
    rows_: list[list[int]] = model.generate(
        _ids(c), max_new_tokens=6, do_sample=False, eos_token_id=None, pad_token_id=0, **options
    ).tolist()
    return rows_


def _error(got: Tensor, want: Tensor) -> float:
    return float((got - want).norm() / want.norm())


def a_model_by_its_own_plan(c: Check) -> None:
    whole = lowbit.load(c.folder / "ordered", c.device, "none")
    want, tokens = _logits(whole, c), _new_tokens(whole, c)
    cut = lowbit.parallelize(lowbit.load(c.folder / "ordered", c.device, "none"), c.mesh)
    parts = [m for m in cut.modules() if isinstance(m, QuantLinear)]
    assert len(parts) == 14 and all(m.link is not None for m in parts)
    assert type(cut.lm_head) is nn.Linear and isinstance(cut.lm_head.weight, DTensor)
    assert _error(_logits(cut, c), want) < 2e-5
    assert _new_tokens(cut, c) == _new_tokens(cut, c, cache_implementation="static", disable_compile=True) == tokens
    assert "accepted by the native engine is a whole layer" in str(refuses(cut)) or not c.exact
    integers = lowbit.load(c.folder / "ordered", c.device, "group")
    want = _logits(integers, c)
    got = _logits(lowbit.parallelize(integers, c.mesh), c)
    assert _error(got, want) < 0.01 and all(torch.equal(got, other) for other in c.everywhere(got))


def from_pretrained_with_a_plan(c: Check) -> None:
    import transformers
    from transformers import AutoModelForCausalLM
    from transformers.distributed.configuration_utils import DistributedConfig

    lowbit.enable_transformers()
    try:
        quantization = lowbit.LowbitConfig(activation="none")
        options: dict[str, Any] = {"dtype": torch.float32, "quantization_config": quantization}
        if tuple(map(int, transformers.__version__.split(".")[:2])) < (5, 24):  # no mesh there to cut by
            try:
                config = DistributedConfig(tp_plan="auto")
                AutoModelForCausalLM.from_pretrained(c.folder / "gptq", distributed_config=config, **options)
            except FormatError as error:
                assert "accepted is 5.24" in str(error), error
                return
            raise AssertionError("an older transformers was taken")
        want = lowbit.load(c.folder / "gptq", c.device, "none")
        cut = AutoModelForCausalLM.from_pretrained(
            c.folder / "gptq", distributed_config=DistributedConfig(tp_plan="auto"), **options
        )
        parts = [m for m in cut.modules() if isinstance(m, QuantLinear)]
        assert len(parts) == 14 and all(m.link is not None for m in parts)
        assert _error(_logits(cut, c), _logits(want, c)) < 2e-5
        assert _new_tokens(cut, c) == _new_tokens(want, c)
        for use in (lambda: cut.save_pretrained(c.folder / "never"), lambda: cut.dequantize()):
            try:
                use()
            except FormatError as error:
                assert "whole layer" in str(error)
            else:
                raise AssertionError("a part of a model was taken for the whole")
        for folder, words in (("heads", "3 heads of 16"), ("plain", "plain weights")):
            try:
                AutoModelForCausalLM.from_pretrained(c.folder / folder, tp_plan="auto", **options)
            except FormatError as error:
                assert words in str(error), error
            else:
                raise AssertionError(f"{folder} was not refused")
    finally:
        lowbit.disable_transformers()


def a_model_whose_heads_do_not_divide(c: Check) -> None:
    model = lowbit.load(c.folder / "heads", c.device, "none")
    want = _logits(model, c)
    try:
        lowbit.parallelize(model, c.mesh)
    except FormatError as error:
        assert "model.layers.0.self_attn.q_proj: found 3 heads of 16" in str(error)
    else:
        raise AssertionError("3 heads on 2 ranks were not refused")
    assert torch.equal(_logits(model, c), want)  # nothing was changed
    plan = {"model.layers.*.mlp.*_proj": "colwise", "model.layers.*.mlp.down_proj": "rowwise"}
    plan = dict(reversed(plan.items()))  # the first pattern that fits decides
    lowbit.parallelize(model, c.mesh, plan)
    assert _error(_logits(model, c), want) < 2e-5


def the_page(c: Check) -> None:
    """The example of docs/parallel.md, as it stands there."""
    page = (Path(__file__).parents[1] / "docs" / "parallel.md").read_text("utf-8")
    code = page.partition("```python\n")[2].partition("```")[0]
    ending = "torch.distributed.destroy_process_group()"
    assert ending in code and "path/to/checkpoint" in code
    out = io.StringIO()
    with redirect_stdout(out):
        exec(code.replace(ending, "").replace("path/to/checkpoint", str(c.folder / "gptq")), {})
    want = lowbit.load(c.folder / "gptq").generate(torch.tensor([[1, 5, 9]]), max_new_tokens=8, do_sample=False)
    assert (out.getvalue() != "") == (c.rank == 0)
    printed = [int(word) for word in re.findall(r"\d+", out.getvalue())]
    assert c.rank != 0 or (len(printed) == want.numel() and printed[:4] == want[0, :4].tolist())


def the_command(c: Check) -> None:
    from lowbit.cli import main

    def run(*more: str) -> tuple[int, str, str]:
        out, err = io.StringIO(), io.StringIO()
        with redirect_stdout(out), redirect_stderr(err):
            code = main(["run", str(c.folder / "gptq"), "--prompt", "abc", "--max-new-tokens", "5", *more])
        return code, out.getvalue(), err.getvalue()

    os.environ["WORLD_SIZE"] = "1"
    _, want, _ = run("--activation", "none", "--engine", "transformers")
    os.environ["WORLD_SIZE"] = str(c.ranks)
    code, text, told = run("--activation", "none")
    assert code == 0 and text == (want if c.rank == 0 else "") and ("2 processes" in told) == (c.rank == 0), told
    code, text, told = run("--engine", "native")
    assert code == 2 and not text and "engine" in told and told.count("\n") == 1


LAYERS: tuple[Callable[[Check], None], ...] = (
    column_wise_is_bit_identical, row_wise_is_the_sum_in_order_of_ranks, both_sums_give_the_same_bits,
    two_layers_after_each_other, layouts_other_than_the_usual, the_gradient_of_x, four_bit_layers,
    what_cannot_be_cut_is_refused,
)  # fmt: skip
MODELS: tuple[Callable[[Check], None], ...] = (
    a_model_by_its_own_plan, from_pretrained_with_a_plan, a_model_whose_heads_do_not_divide, the_page, the_command,
)  # fmt: skip
ON_GPU = (*LAYERS, a_model_by_its_own_plan, from_pretrained_with_a_plan)


def main(rank: int, ranks: int, backend: str, folder: Path) -> None:
    torch.set_num_threads(1)
    device = torch.device("cpu")
    if backend == "nccl":
        device = torch.device("cuda", rank)
        torch.cuda.set_device(device)
    dist.init_process_group(
        backend, init_method=f"file://{folder / 'meet'}", rank=rank, world_size=ranks, timeout=timedelta(seconds=300)
    )
    os.environ.update(RANK=str(rank), LOCAL_RANK=str(rank), WORLD_SIZE=str(ranks))
    given = Check(init_device_mesh(device.type, (ranks,)), device, folder)
    ended: dict[str, str] = {}
    for check in (*LAYERS, *MODELS) if backend == "gloo" else ON_GPU:
        torch.manual_seed(0)
        try:
            check(given)
            ended[check.__name__] = ""
        except BaseException:
            ended[check.__name__] = traceback.format_exc()
        (folder / f"ended-{rank}.json").write_text(json.dumps(ended))
    dist.destroy_process_group()


if __name__ == "__main__":
    main(int(sys.argv[1]), int(sys.argv[2]), sys.argv[3], Path(sys.argv[4]))
