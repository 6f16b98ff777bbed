"""A model over several processes: which layer gets which style, by the plan that transformers has for its architecture."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from fnmatch import fnmatchcase
from typing import Any

from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import Replicate
from torch.distributed.tensor.parallel import ParallelStyle, parallelize_module

from lowbit.nn import QuantLinear
from lowbit.nn.parallel import ColwiseQuant, Link, RowwiseQuant, Style, replace_by_part
from lowbit.types import FormatError

# transformers' words for the ways to cut a linear
STYLES: dict[str, Style] = {
    "colwise": ColwiseQuant(),
    "colwise_rep": ColwiseQuant(output_layouts=Replicate()),
    "colwise_gather_output": ColwiseQuant(output_layouts=Replicate()),
    "rowwise": RowwiseQuant(),
    "rowwise_rep": RowwiseQuant(input_layouts=Replicate()),
    "rowwise_split_input": RowwiseQuant(input_layouts=Replicate()),
}
WHOLE = ("replicate", "replicated_with_grad_allreduce", "mla_kv_a_proj")  # every rank has all of it

Plan = Mapping[str, "str | ParallelStyle"]


def parallelize(model: nn.Module, mesh: DeviceMesh, plan: Plan | None = None) -> nn.Module:
    """Cut the linears of ``model`` over the processes of ``mesh`` (one dimension), in place; each calls this with the same
    model. Returns the model.

    ``plan``: a pattern of module names ("model.layers.*.mlp.up_proj") to a style of
    ``torch.distributed.tensor.parallel`` or to transformers' word for one ("colwise", "rowwise"); None takes the plan that
    transformers has for the architecture. Packed linears, and dense ones of the plan, are cut; all else stays whole on every
    rank. FormatError names the layer and its values where groups, heads or features cannot be divided, before
    anything is changed.
    """
    if mesh.ndim != 1:
        raise FormatError(f"mesh: found {mesh.ndim} dimensions, accepted is 1 (mesh['tp'])")
    found = list(matches(model, _plan_of(model) if plan is None else plan, plan is None, (QuantLinear, nn.Linear)))
    for name, module, style in found:
        check(model, name, module, style, mesh.size())
    for name, module, style in found:
        if isinstance(module, QuantLinear):
            assert isinstance(style, (ColwiseQuant, RowwiseQuant))
            replace_by_part(module, style, mesh, name)
        else:
            parallelize_module(module, mesh, style, src_data_rank=None)  # every rank has read it
    return model


def cutting(model: Any, place: type[nn.Module]) -> Callable[[nn.Module, str, Any], tuple[Any, Link | None]]:
    """For ``from_pretrained``, which was asked for ranks (``config.distributed_config``) and has a ``place`` where each packed
    layer will be: a function of (model, name, plain weight) that gives this process's part of it and its link.

    FormatError as ``parallelize``; groups are looked at when a weight is cut.
    """
    asked = model.config.distributed_config
    if not hasattr(model, "_mesh_manager"):
        raise FormatError(
            "transformers: found one without a mesh for tp_plan, accepted is 5.24 (lowbit.parallelize: any)"
        )
    for field in ("pp_size", "fsdp_size", "dp_replicate_size"):
        if getattr(asked, field, 1) not in (1, None):
            raise FormatError(f"{field}: found {getattr(asked, field)}, accepted with packed layers is 1")
    plan = dict(model._tp_plan or {})
    if isinstance(asked.tp_plan, dict):
        plan = plan | asked.tp_plan if asked.tp_plan else {}
    styles: dict[str, Any] = {}
    for name, module, style in matches(model, plan, True, (place,)):
        check(model, name, module, style, asked.tp_size)
        styles[name] = style

    def cut(model: Any, name: str, plain: Any) -> tuple[Any, Link | None]:
        if name not in styles:
            return plain, None
        made: tuple[Any, Link] = styles[name].cut(plain, model._mesh_manager.get_mesh("tp"), name)
        return made

    return cut


def matches(
    model: nn.Module, plan: Plan, own: bool, kinds: tuple[type[nn.Module], ...]
) -> Iterator[tuple[str, Any, ParallelStyle]]:
    """(name, linear, style) of every linear of these ``kinds`` that the plan cuts. ``own``: the plan is the architecture's, which
    may name what this model has not, and modules that need no cutting at inference."""
    used = set()
    for name, module in model.named_modules():
        if not isinstance(module, kinds):
            continue
        for pattern, style in plan.items():
            if _fits(name, pattern):
                used.add(pattern)
                made = _style(name, module, style)
                if made is not None:
                    yield name, module, made
                break
    unused = [pattern for pattern in plan if pattern not in used]
    if unused and not own:
        raise FormatError(f"plan: found {unused[0]!r}, which names no linear of {type(model).__name__}")


def check(model: nn.Module, name: str, module: Any, style: ParallelStyle, ranks: int) -> None:
    """Refuse a layer that cannot be cut: heads that ranks would have to share, then what the style says."""
    # attention reads the number of its heads off the width that it gets
    size = getattr(model.get_submodule(name.rpartition(".")[0]), "head_dim", None)
    features = None
    if isinstance(style, ColwiseQuant) and not isinstance(style.output_layouts[0], Replicate):
        features = module.out_features
    elif isinstance(style, RowwiseQuant) and not isinstance(style.input_layouts[0], Replicate):
        features = module.in_features
    if isinstance(size, int) and features is not None and features % (size * ranks):
        raise FormatError(
            f"{name}: found {features // size} heads of {size}, accepted on {ranks} ranks is a multiple of {ranks} "
            f"(a plan that leaves the attention out cuts the rest)"
        )
    if isinstance(module, QuantLinear) and isinstance(style, (ColwiseQuant, RowwiseQuant)):
        module.refuse_part(name, "to be cut")
        style.check(module, ranks, name)


def _fits(name: str, pattern: str) -> bool:
    names, patterns = name.split("."), pattern.split(".")
    return len(names) == len(patterns) and all(map(fnmatchcase, names, patterns))


def _style(name: str, module: nn.Module, style: str | ParallelStyle) -> ParallelStyle | None:
    """The style for a linear; None where it stays whole."""
    made = STYLES.get(style) if isinstance(style, str) else style
    if isinstance(style, str) and style in WHOLE:
        return None
    if made is None or (isinstance(module, QuantLinear) and not isinstance(made, (ColwiseQuant, RowwiseQuant))):
        words = ", ".join((*STYLES, *WHOLE))
        found = repr(style) if isinstance(style, str) else type(style).__name__
        raise FormatError(f"{name}: found the style {found}, accepted are ColwiseQuant, RowwiseQuant, {words}")
    return made


def _plan_of(model: nn.Module) -> Plan:
    plan: Plan | None = getattr(model, "_tp_plan", None)
    if not plan:
        raise FormatError(f"plan: found none in {type(model).__name__}, accepted is plan={{pattern: style}}")
    return plan
