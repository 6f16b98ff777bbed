"""Lines of ``lowbit bench rtf`` as a chapter of docs/numbers.md, and as drawings."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from lowbit.bench import markdown
from lowbit.prove.report import Bar, Point, bars, plot

Line = Mapping[str, Any]
RUN = ("chip", "model", "torch", "commit", "date", "steps", "source")
OURS = ("fp16", "w8a8", "w4a8", "w4a4")
TARGETS = {172: 0.95, 685: 1.5, 1890: 3.6}  # ms of the layers, w4a8, on the chip below
TARGETS_OF = "NVIDIA H200"
BASELINE = "packed-compile"
TEN = "en_10s"  # of rtf_set: 5 s of reference, 10 s of speech
TOLD = """RTF: seconds of work over seconds of audio *asked for*, medians over the rounds, engines in turns, equal seeds, the
reference encoded beforehand. "loop" is the decoding, "+ codec" everything but the post-processing on the CPU, "whole" is `generate`.
"first" is the time until something can be played: of a text in chunks its first chunk by itself, else the whole. Tokens: the
share that agrees with the reference engine (marked \\*) at equal seeds, which one near-tie can end. KL: nats between the guided
distributions at the slots that the reference reveals, on the reference's own boards."""
STEPS = """Milliseconds of the 28 layers over M packed rows, and of the same rows in the bucket that `generate` takes; "whole step"
is with embedding, heads, score and reveal. Stock's rows are padded: 2 × c. `packed-compile` is plain torch over packed rows,
`torch.compile` and a CUDA graph. × is the time over `packed-compile`'s."""


def runs(lines: Sequence[Line]) -> list[list[Line]]:
    found: dict[tuple[str, ...], list[Line]] = {}
    for line in lines:
        found.setdefault(tuple(str(line.get(key)) for key in RUN), []).append(line)
    return list(found.values())


def chapter(lines: Sequence[Line], addresses: Mapping[str, str] | None = None) -> str:
    """Every run: engines, samples, steps. ``addresses``: {name of a drawing: where it is}."""
    parts, told, stepped = [], False, False
    for number, run in enumerate(runs(lines)):
        first = run[0]
        commit = f", commit {first['commit']}" if first.get("commit") else ""
        cuda = f", CUDA {first['cuda']}" if first.get("cuda") else f", {first['threads']} threads"
        parts.append(f"## Voice clone: {first['chip']}, {first['date']}, {first['model']}, {first['steps']} steps")
        parts.append(f"lowbit {first['lowbit']}{commit}, torch {first['torch']}{cuda}; lines: `{first['source']}`")
        for name in drawings(run, number):
            if addresses and name in addresses:
                parts.append(f"![real-time factors of {first['source']}]({addresses[name]})")
        parts += [text for text in (_engines(run), "" if told else TOLD, _reached(run), _samples(run)) if text]
        told = True
        steps = _steps(run)
        if steps:
            parts += [steps] if stepped else [steps, STEPS]
            stepped = True
        parts += _reasons(run)
    return "\n\n".join(parts)


def _engines(run: Sequence[Line]) -> str:
    mine = [x for x in run if x["kind"] == "engine" and "why" not in x]
    stock = next((x for x in mine if x["engine"] == "stock"), None)
    rows = [
        [
            f"{x['engine']}\\*" if x.get("reference") else x["engine"],
            *(f"{x[key]:.4f}" for key in ("rtf_loop", "rtf_codec", "rtf")),
            f"{stock['rtf'] / x['rtf']:.2f}" if stock else "",
            f"{x['p50_ms']:.0f} / {x['p95_ms']:.0f}", f"{x['first_ms']:.0f}",
            f"{x['memory_mib']:.0f}" if x.get("memory_mib") else "", f"{x['made_s']:.1f}",
            _share(x.get("tokens_same")), _nats(x.get("kl")), _share(x.get("top1")),
            *(_score(x.get(key)) for key in ("wer", "similarity", "mos")),
        ]
        for x in mine
    ]  # fmt: skip
    head = ("engine", "loop", "+ codec", "whole", "× stock", "p50 / p95 ms", "first ms", "peak MiB", "start-up s", "tokens",
            "KL", "top-1", "WER", "voice", "MOS")  # fmt: skip
    return markdown.table(head, rows) if rows else ""


def _reached(run: Sequence[Line]) -> str:
    """What was to be reached on one chip beside what was measured, bold where it is within."""
    if run[0]["chip"] != TARGETS_OF or run[0]["steps"] != 32:
        return ""
    rows: list[list[str]] = []

    def row(what: str, value: float | None, most: float, more: bool, unit: str) -> None:
        if value is not None:
            good = value >= most if more else value <= most
            text = f"{value:.2f}{unit}"
            rows.append([what, f"{'≥' if more else '≤'} {most:g}{unit}", f"**{text}**" if good else text])

    whole = {(x["sample"], x["engine"]): x["total_ms"] for x in run if x["kind"] == "sample"}
    steps = {(x["m"], x["engine"]): x["ms"] for x in run if x["kind"] == "step" and "ms" in x}
    for engine in OURS:
        stock, ours = whole.get((TEN, "stock")), whole.get((TEN, engine))
        row(
            f"{engine}: 10 s of speech, all of it, over stock eager",
            stock / ours if stock and ours else None,
            12,
            True,
            "×",
        )
    for m, most in TARGETS.items():
        row(f"w4a8: layers over {m} rows", steps.get((m, "w4a8")), most, False, " ms")
        base, mine = steps.get((m, BASELINE)), steps.get((m, "w4a8"))
        row(f"w4a8: layers over {m} rows, over {BASELINE}", base / mine if base and mine else None, 1.6, True, "×")
    for x in run:
        if x["kind"] == "engine" and x["engine"] in OURS and "made_s" in x:
            row(f"{x['engine']}: start-up, all buckets captured", x["made_s"], 30, False, " s")
    return markdown.table(("", "to reach", "measured"), rows) if rows else ""


def _samples(run: Sequence[Line]) -> str:
    """RTF of the whole, a row a sample."""
    mine = [x for x in run if x["kind"] == "sample"]
    engines = list(dict.fromkeys(x["engine"] for x in mine))
    names = dict.fromkeys((x["sample"], x["seconds"]) for x in mine)
    known = {(x["sample"], x["engine"]): x["rtf"] for x in mine}
    rows = [
        [name, f"{seconds:g}", *(f"{known[name, e]:.4f}" if (name, e) in known else "" for e in engines)]
        for name, seconds in names
    ]
    return markdown.table(("sample", "seconds", *engines), rows) if rows else ""


def _steps(run: Sequence[Line]) -> str:
    mine = [x for x in run if x["kind"] == "step" and "ms" in x]
    base = {x["m"]: x["ms"] for x in mine if x["engine"] == BASELINE}
    rows = []
    for x in mine:
        ms = f"{x['ms']:.3f}"
        most = TARGETS.get(x["m"]) if x["engine"] == "w4a8" and str(x["chip"]) == TARGETS_OF else None
        rows.append([
            f"{x['m']} = {x['c']} + {x['u']}", x["engine"],
            f"**{ms}** (≤ {most:g})" if most and x["ms"] <= most else f"{ms} (≤ {most:g})" if most else ms,
            f"{x['bucket_ms']:.3f} ({x['bucket']})" if "bucket_ms" in x else "",
            f"{x['step_ms']:.3f}" if "step_ms" in x else "",
            f"{x['ms'] / base[x['m']]:.2f}" if x["m"] in base else "", str(x["rounds"]),
        ])  # fmt: skip
    head = ("M = c + u", "engine", "layers, ms", "in its bucket", "whole step", "×", "rounds")
    return markdown.table(head, rows) if rows else ""


def _reasons(run: Sequence[Line]) -> list[str]:
    """Engines that did not run, and why."""
    why = dict.fromkeys(f"`{x['engine']}`: {x['why']}" for x in run if "why" in x)
    return ["Not run: " + "; ".join(why) + "."] if why else []


def _share(value: Any) -> str:
    return "" if value is None else f"{100 * value:.1f} %"


def _nats(value: Any) -> str:
    return "" if value is None else f"{value:.1e}"


def _score(value: Any) -> str:
    return "" if value is None else value if isinstance(value, str) else f"{value:.3f}"


def drawings(run: Sequence[Line], number: int = 0) -> dict[str, str]:
    """File name -> SVG of one run: engines as bars, samples as points."""
    first = run[0]
    where = f"{first['chip']}, {first['date']}"
    mine = [x for x in run if x["kind"] == "engine" and "why" not in x]
    found = {}
    if mine:
        slow = max(x["rtf"] for x in mine)
        panels = [
            (title, [Bar(x["engine"], 1 / x[key], f"RTF {x[key]:.4f}, ×{slow / x['rtf']:.2f} of the slowest" if key == "rtf"
                         else f"RTF {x[key]:.4f}", x["engine"] in OURS) for x in mine])
            for title, key in (("whole utterances", "rtf"), ("the decoding loop alone", "rtf_loop"))
        ]  # fmt: skip
        found[f"rtf-{number + 1}-engines.svg"] = bars(panels, f"Seconds of speech a second of work. {where}")
    points: dict[str, list[Point]] = {}
    for x in run:
        if x["kind"] == "sample":
            points.setdefault(x["engine"], []).append(
                Point(x["seconds"], x["rtf"], tip=f"{x['engine']}, {x['sample']}")
            )
    if points:
        label = f"real-time factor ({where})"
        found[f"rtf-{number + 1}-samples.svg"] = plot(points, "seconds of speech", label, x_from=0, y_log=True)
    return found
