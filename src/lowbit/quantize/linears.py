"""The linears that read one input, quantized together: one Hessian, one set of channel scales, one pass of GPTQ."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Literal, NamedTuple

import torch
from torch import Tensor

from .. import reference
from ..types import Activation, FormatError, QuantizedWeight, Scheme
from .channel import ChannelScales, channel_scales
from .gptq import effective, output_error, solve
from .hadamard import BLOCK
from .rtn import rtn, take
from .scales import SCALES, Scales, scheme_for
from .smooth import activation_clip, smoothing
from .stats import InputStats
from .svdquant import Recipe, check, svdquant

Method = Literal["rtn", "gptq", "svdquant"]
METHODS: tuple[Method, ...] = ("rtn", "gptq", "svdquant")


@dataclass(frozen=True)
class Options:
    """How weights are quantized; everything that changes the result and is not in the Scheme."""

    method: Method = "gptq"
    channel_scales: bool = True
    act_order: bool = True
    clip: bool = True
    damp: float = 0.01
    scales: Scales = "group"
    # of svdquant alone:
    rank: int = 16
    recipe: Recipe = "default"
    hadamard: bool = True

    def __post_init__(self) -> None:
        check(self.rank, self.recipe)
        if self.scales not in SCALES:
            raise FormatError(f"scales: found {self.scales!r}, accepted are {', '.join(SCALES)}")
        if self.method not in METHODS:
            raise FormatError(f"method: found {self.method!r}, accepted are {', '.join(METHODS)}")
        if not 0 <= self.damp <= 10:
            raise FormatError(f"damp: found {self.damp}, accepted is 0 .. 10")


class Row(NamedTuple):
    """What was done to one linear. Errors are ||X (W - Wq)ᵀ|| / ||X Wᵀ|| on the sample rows; NaN without samples.

    Of svdquant they are those of the layer as it declares itself, with its activations rounded.
    """

    name: str
    method: str  # "gptq", "rtn", either with "+scales"; "svdquant16"
    damping: float | None
    tokens: int
    error_before: float  # plain round-to-nearest
    error_after: float
    notes: tuple[str, ...] = ()
    rank: int = 0  # of the low-rank branch
    clip: float | None = None  # of the largest entry, where the scales of 4-bit activations are taken; None: not 4 bits


def quantize_linears(
    weights: Mapping[str, Tensor],
    stats: InputStats | None,
    scheme: Scheme,
    options: Options,
    activations: Mapping[str, Activation] | None = None,
) -> dict[str, tuple[QuantizedWeight, Row]]:
    """Quantize weights {name: [N_i, K]} that read the same input, measured in ``stats``.

    ``activations`` {name: how its input is rounded} overrides the scheme's. The work is done on the device of the
    weights; what comes back is on the CPU.

    Without statistics, or where no token was seen, every weight is rounded to nearest. Where GPTQ would be worse than
    plain round-to-nearest in ||X (W - Wq)|| the layer is rounded to nearest, and its row says so. (With one activation
    scale a token, channel scales pay on the activation's side: there only GPTQ's own row-by-row comparison is made.)
    """
    if options.method == "svdquant":
        done = _with_branch(weights, stats, scheme, options, activations or {})
    else:
        done = _without_branch(weights, stats, scheme, options)
        for name, activation in (activations or {}).items():
            done[name] = (done[name][0].with_(activation=activation), done[name][1])
    return {name: (q.to("cpu"), _with_parts(row, q)) for name, (q, row) in done.items()}


def _with_parts(row: Row, q: QuantizedWeight) -> Row:
    """The row of a linear with what its weight has: rank and clip."""
    four = q.activation is not None and q.activation.bits == 4
    rank = 0 if q.low_rank is None else q.low_rank.down.shape[1]
    return row._replace(rank=rank, clip=q.activation.clip if q.activation is not None and four else None)


def _without_branch(
    weights: Mapping[str, Tensor], stats: InputStats | None, scheme: Scheme, options: Options
) -> dict[str, tuple[QuantizedWeight, Row]]:
    scheme_for(scheme, options.scales)
    joined = torch.cat([w.detach().float() for w in weights.values()])
    if stats is None or stats.tokens == 0:
        why = () if stats is None else ("saw no token: rounded to nearest",)
        nan = float("nan")
        return {n: (rtn(w, scheme, options.scales), Row(n, "rtn", None, 0, nan, nan, why)) for n, w in weights.items()}

    sample = stats.sample().to(joined.device)
    notes: list[str] = []
    smooth: Tensor | None = None
    if options.channel_scales:
        judged = scheme_for(scheme, "channel" if options.scales == "channel" else "group")
        found = channel_scales(joined, sample, *stats.cautious(), judged)
        smooth = found.smooth
        notes.append(f"channel scales {found.rule}")
    s = smooth.float().to(joined.device) if smooth is not None else None
    scaled = joined if s is None else joined * s

    plain = rtn(joined, scheme, options.scales)
    hessian = stats.hessian().to(joined.device) if options.method == "gptq" else None
    damping: float | None = None
    kept = torch.zeros(joined.shape[0], dtype=torch.bool, device=joined.device)
    bound = plain_error = torch.zeros(joined.shape[0], device=joined.device)
    method: str = options.method
    if hessian is not None:
        inside = hessian if s is None else hessian / (s[:, None] * s[None, :])
        outcome = solve(
            scaled,
            inside,
            scheme,
            act_order=options.act_order,
            clip=options.clip,
            damp=options.damp,
            scales=options.scales,
        )
        q, damping, bound, kept = outcome.weight, outcome.damping, outcome.error, outcome.kept
        if s is not None and scheme.activation.granularity != "token":  # without scales, solve has compared already
            plain_error = output_error(joined, plain, hessian)
        if damping is None:
            method = "rtn"
            notes += q.notes
        elif len(outcome.tried) > 1:
            notes.append("damping tried: " + ", ".join(f"{d:g}" for d in outcome.tried))
    else:
        q = rtn(scaled, scheme, options.scales)
    q = q.with_(smooth=smooth)

    def harmful(rows: slice) -> bool:
        """Whether GPTQ behind scales is worse than rounding without. (Without scales, ``solve`` has seen to it.)"""
        if hessian is None or s is None or damping is None or scheme.activation.granularity == "token":
            return False
        limit = float(plain_error[rows].sum())
        return (
            float(bound[rows].sum()) > limit and float(output_error(joined[rows], take(q, rows), hessian).sum()) > limit
        )

    done: dict[str, tuple[QuantizedWeight, Row]] = {}
    begin = 0
    for name, weight in weights.items():
        rows = slice(begin, begin + weight.shape[0])
        begin = rows.stop
        mine, own, label = q, [*notes], method + ("+scales" if smooth is not None else "")
        before, after = (_relative(sample, joined[rows], effective(take(c, rows))) for c in (plain, q))
        if harmful(rows):
            mine, label, after = plain, "rtn", before
            own.append("rounded to nearest: gptq was worse in ||X (W - Wq)||")
        if label.startswith("gptq") and (few := int(kept[rows].sum())):
            own.append(f"{few} of {weight.shape[0]} rows kept at round-to-nearest, where GPTQ was worse")
        row = Row(name, label, damping if label.startswith("gptq") else None, stats.tokens, before, after, tuple(own))
        done[name] = (take(mine, rows), row)
    return done


def _with_branch(
    weights: Mapping[str, Tensor],
    stats: InputStats | None,
    scheme: Scheme,
    options: Options,
    activations: Mapping[str, Activation],
) -> dict[str, tuple[QuantizedWeight, Row]]:
    """svdquant. Without a token seen: no smoothing, and the Hessian of white inputs (so siblings keep one form)."""
    parts = [w.detach().float() for w in weights.values()]
    device, k = parts[0].device, parts[0].shape[1]
    blind = stats is None or stats.tokens == 0
    default = options.recipe == "default"
    block = BLOCK if default and options.hadamard else 0
    each = [activations.get(name, scheme.activation) for name in weights]
    found = ChannelScales(None, "none", float("nan"), float("nan"))
    sample = torch.empty(0, k, device=device)
    if stats is None or stats.tokens == 0:
        hessian = torch.eye(k, device=device)
    else:
        hessian, sample = stats.hessian().to(device), stats.sample().to(device)
        if default and options.channel_scales:
            judged = replace(scheme_for(scheme, options.scales), activation=min(each, key=lambda a: a.bits))
            found = smoothing(
                parts, sample, *stats.cautious(), judged, rank=options.rank, hadamard=block
            )  # fmt: skip
    solved = svdquant(
        parts, hessian, scheme, rank=options.rank, recipe=options.recipe, smooth=found.smooth, hadamard=block,
        scales=options.scales, act_order=options.act_order, clip=options.clip, damp=options.damp,
    )  # fmt: skip
    if default and not blind and any(a == Activation(4, "group") for a in each):
        clip = activation_clip(parts, [s.weight for s in solved], sample)
        each = [a._replace(clip=clip) if a == Activation(4, "group") else a for a in each]
    done: dict[str, tuple[QuantizedWeight, Row]] = {}
    for name, w, activation, s in zip(weights, parts, each, solved, strict=True):
        q = s.weight.with_(activation=activation)
        own = ["saw no token: quantized for white inputs"] if blind else []
        own += [f"smoothing {found.rule}"] if not blind and default and options.channel_scales else []
        own += [f"rank {s.rank} of {options.rank}, all that the shape has"] if s.rank < options.rank else []
        own += ["damping tried: " + ", ".join(f"{d:g}" for d in s.tried)] if len(s.tried) > 1 else []
        own += [f"{s.kept} of {w.shape[0]} rows kept at round-to-nearest, where GPTQ was worse"] if s.kept else []
        own += ["no factorisation: codes rounded to nearest"] if s.damping is None else []
        before = after = float("nan")
        label = f"svdquant{options.rank}"
        if not blind:
            plain = rtn(w, scheme, options.scales).with_(activation=activation._replace(clip=1.0))
            want = sample @ w.T
            before, after = (
                reference.error(reference.linear(sample, c), want) if bool(want.any()) else 0.0 for c in (plain, q)
            )
            if after > before:
                q, label, after = plain, "rtn", before
                own.append("rounded to nearest: svdquant was worse")
        done[name] = (q, Row(name, label, s.damping, stats.tokens if stats else 0, before, after, tuple(own)))
    return done


def _relative(x: Tensor, weight: Tensor, restored: Tensor) -> float:
    size = float((x @ weight.T).norm())
    return float((x @ (weight - restored.to(weight.device)).T).norm()) / size if size > 0 else 0.0
