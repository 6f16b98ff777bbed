"""The linears that read one input, quantized together: one Hessian, one set of channel scales, one pass of GPTQ."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal, NamedTuple

import torch
from torch import Tensor

from ..types import FormatError, QuantizedWeight, Scheme
from .channel import channel_scales
from .gptq import effective, output_error, solve
from .rtn import rtn, take
from .stats import InputStats

Method = Literal["rtn", "gptq"]
METHODS: tuple[Method, ...] = ("rtn", "gptq")


@dataclass(frozen=True)
class Options:
    """How weights are quantized; everything that changes the result and is not in the Scheme."""

    method: Method = "gptq"
    channel_scales: bool = True
    act_order: bool = True
    clip: bool = True
    damp: float = 0.01

    def __post_init__(self) -> None:
        if self.method not in METHODS:
            raise FormatError(f"method: found {self.method!r}, accepted are {', '.join(METHODS)}")
        if not 0 <= self.damp <= 10:
            raise FormatError(f"damp: found {self.damp}, accepted is 0 .. 10")


class Row(NamedTuple):
    """What was done to one linear. Errors are ||X (W - Wq)ᵀ|| / ||X Wᵀ|| on the sample rows; NaN without samples."""

    name: str
    method: str  # "gptq", "rtn", either with "+scales"
    damping: float | None
    tokens: int
    error_before: float  # plain round-to-nearest
    error_after: float
    notes: tuple[str, ...] = ()


def quantize_linears(
    weights: Mapping[str, Tensor], stats: InputStats | None, scheme: Scheme, options: Options
) -> dict[str, tuple[QuantizedWeight, Row]]:
    """Quantize weights {name: [N_i, K]} that read the same input, measured in ``stats``.

    Without statistics, or where no token was seen, every weight is rounded to nearest. Where GPTQ would be worse than
    plain round-to-nearest in ||X (W - Wq)|| the layer is rounded to nearest, and its row says so. (With one activation
    scale a token, channel scales pay on the activation's side: there only GPTQ's own row-by-row comparison is made.)
    """
    joined = torch.cat([w.detach().float() for w in weights.values()])
    if stats is None or stats.tokens == 0:
        why = () if stats is None else ("saw no token: rounded to nearest",)
        nan = float("nan")
        return {n: (rtn(w, scheme), Row(n, "rtn", None, 0, nan, nan, why)) for n, w in weights.items()}

    sample = stats.sample().to(joined.device)
    notes: list[str] = []
    smooth: Tensor | None = None
    if options.channel_scales:
        found = channel_scales(joined, sample, stats.rms(), stats.absmax(), scheme)
        smooth = found.smooth
        notes.append(f"channel scales {found.rule}")
    s = smooth.float().to(joined.device) if smooth is not None else None
    scaled = joined if s is None else joined * s

    plain = rtn(joined, scheme)
    hessian = stats.hessian().to(joined.device) if options.method == "gptq" else None
    damping: float | None = None
    kept = torch.zeros(joined.shape[0], dtype=torch.bool)
    bound = plain_error = torch.zeros(joined.shape[0])
    method: str = options.method
    if hessian is not None:
        inside = hessian if s is None else hessian / (s[:, None] * s[None, :])
        outcome = solve(scaled, inside, scheme, act_order=options.act_order, clip=options.clip, damp=options.damp)
        q, damping, bound, kept = outcome.weight, outcome.damping, outcome.error, outcome.kept
        if s is not None and scheme.activation.granularity != "token":  # without scales, solve has compared already
            plain_error = output_error(joined, plain, hessian)
        if damping is None:
            method = "rtn"
            notes += q.notes
        elif len(outcome.tried) > 1:
            notes.append("damping tried: " + ", ".join(f"{d:g}" for d in outcome.tried))
    else:
        q = rtn(scaled, scheme)
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


def _relative(x: Tensor, weight: Tensor, restored: Tensor) -> float:
    size = float((x @ weight.T).norm())
    return float((x @ (weight - restored.to(weight.device)).T).norm()) / size if size > 0 else 0.0
