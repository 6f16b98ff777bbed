"""Lines of bench/accuracy.py as tables beside what was to be reached, and as charts."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any, NamedTuple

from lowbit.bench import markdown
from lowbit.prove.report import Bar, Point, bars, plot

Line = Mapping[str, Any]

TABLES = {
    "w4": "4-bit weights, float or 8-bit activations",
    "peers": "4-bit weights of other tools: their own dequantized weights, our evaluator",
    "checkpoints": "Checkpoints of other tools, our evaluator",
    "w8a8": "8-bit weights and activations",
    "w4a4": "4-bit weights with a low rank, 4- and 8-bit activations",
}
TOLD = """Ratios are of perplexity to float32's over the same tokens, ± their paired standard error; **bold** where the ratio is
within what was to be reached. KL is KL(float32 || model) a token, in nats. Bits count everything that is stored of the
linears. `a8` is one int8 scale a weight group of a row, `a8-token` one a row, `a4` one 4-bit scale 64 columns with the
clip that was chosen; `budget B` is what `lowbit quantize --budget B` does; float arithmetic is `a16`. The linears were run
by `lowbit.prove.simulate`, which is the reference in float32. Choices of ours were made on the first span alone, if on
any; nothing was ever chosen on the second. "Beside 9": so many jobs of this kind shared the device while it was timed."""
THEIRS = ("peers", "checkpoints")  # tables of what other tools made, each with settings of its own
LEFT_OUT = (", no ", "without", "iterative")  # words of names that the plot leaves out
MOST = 1.6  # ratios above are left out of the charts, and counted there


class Target(NamedTuple):
    """The ratio to reach and the one aimed at, with at most so many bits a weight."""

    reach: float
    aim: float
    bits: float = float("inf")


_MIXED = Target(1.14, 1.11)
NAMED: dict[tuple[str, str], Target] = {
    ("w8 per row, gptq", "a8-token"): Target(1.015, 1.008),
    ("w4a4 rank 16", "a4"): Target(1.20, 1.14),
    ("w4a4 rank 16", "a4, gate and up a8"): _MIXED,
    ("w4a4 rank 16", "a4, gate and up a8-token"): _MIXED,
    ("w4a4 rank 16, two-level scales", "a8-token"): Target(1.08, 1.05),
    ("w4a4 rank 16, channel scales", "a8-token"): Target(1.10, 1.07),
}
GROUPS: dict[tuple[int, str], Target] = {  # of the table "w4", all that are not plain rounding
    (64, "a16"): Target(1.12, 1.09, 4.35),
    (64, "a8"): Target(1.12, 1.09, 4.35),
    (32, "a8"): Target(1.08, 1.06, 4.68),
}


def models(lines: Sequence[Line]) -> list[list[Line]]:
    """Lines that can stand in one chapter: of one model on one text."""
    found: dict[tuple[str, ...], list[Line]] = {}
    for line in lines:
        found.setdefault((line["model"], line["text"], str(line["context"])), []).append(line)
    return list(found.values())


def chapter(lines: Sequence[Line], charts: Mapping[str, str]) -> str:
    """The tables of one model; ``charts`` {what of ``drawings``: address}."""
    first = lines[0]
    spans = sorted({tuple(x["span"]) for x in lines})
    plain = "; ".join(f"tokens {a} … {b - 1}: {_reference(lines, (a, b)):.3f}" for a, b in spans)
    made = next((x["calibration"] for x in lines if x["calibration"] and x["table"] not in THEIRS), None)
    on = "" if made is None else f" Calibrated on {made[0]}, {made[1]} tokens in windows of {made[2]}."
    where = _several(f"{x['device']}, torch {x['torch']}, lowbit {x['lowbit']}, {x['date']}" for x in lines)
    commits = _several(str(x["commit"]) for x in lines)
    sources = ", ".join(f"`{name}`" for name in dict.fromkeys(x["source"] for x in lines))
    parts = [
        f"## Accuracy: {first['model']}",
        f"Text {first['text']}, context {first['context']}; float32's perplexity: {plain}.{on}\n{where}; commits {commits}; "
        f"lines: {sources}",
        *(f"![{what} of every way to quantize]({address})" for what, address in charts.items()),
    ]
    for key, title in TABLES.items():
        some = [x for x in lines if x["table"] == key]
        if some:
            parts += [f"### {title}", table(some, spans)]
    return "\n\n".join([*parts, TOLD])


def _several(words: Iterable[str]) -> str:
    return "; ".join(dict.fromkeys(words))


def table(lines: Sequence[Line], spans: Sequence[tuple[int, ...]]) -> str:
    """A row for each way of quantizing and of activations, in the order of the lines; two columns a span.

    Other tools' rows have their settings where ours have what was to be reached.
    """
    theirs = lines[0]["table"] in THEIRS
    rows: dict[tuple[str, ...], dict[int, Line]] = {}
    for line in lines:
        rows.setdefault(row_of(line), {})[line["span"][0]] = line
    heads = [f"{word} {a} …" for a, _ in spans for word in ("ratio", "KL")]
    columns = ["weights", "activations", "bits", *heads, "settings" if theirs else "to reach (aim)", "quantized in"]
    out = []
    for by_span in rows.values():
        line = next(iter(by_span.values()))
        target = target_of(line)
        mixed = line.get("activation_bits") not in (None, 4, 8, 16)
        act = f"{line['act']} ({line['activation_bits']:.2f} bits)" if mixed else line["act"]
        cells = [line["name"], act, f"{line['bits_per_weight']:.3f}"]
        for start, _ in spans:
            cells += _figures(by_span.get(start), target)
        seconds, where = line["quantize_s"], line.get("quantize_device")
        wanted = "" if target is None else f"{target.reach:g} ({target.aim:g})"
        if theirs:
            wanted = ", ".join(f"{key} {value}" for key, value in line.get("settings", {}).items()).replace("|", "/")
        took = "" if seconds is None else f"{seconds:.0f} s" + (f" on {where}" if where else "")
        took += f" beside {line['beside']}" if took and line.get("beside") else ""
        out.append([*cells, wanted, took])
    return markdown.table(columns, out)


def row_of(line: Line) -> tuple[str, ...]:
    """Lines with equal keys share a row: they differ in the span alone."""
    return tuple(str(line.get(key)) for key in ("model", "text", "context", "name", "act", "device", "commit", "date"))


def target_of(line: Line) -> Target | None:
    """What its row was to reach; None where the issue names nothing, or where it takes more bits than the target allows."""
    target = NAMED.get((line["name"], line["act"]))
    if line["table"] == "w4" and line["method"] != "rtn":
        target = GROUPS.get((line["options"]["group"], line["act"]))
    return None if target is None or line["bits_per_weight"] > target.bits else target


def drawings(lines: Sequence[Line]) -> dict[str, str]:
    """{what it shows: SVG}, of the last span, on which nothing was chosen."""
    last = max(line["span"][0] for line in lines)
    kept = [x for x in lines if x["span"][0] == last]
    return {"loss": _bars(kept, last), "bits": _plot(kept, last)}


def _bars(lines: Sequence[Line], start: int) -> str:
    """A panel a table: how much more perplexity, in percent; less is better."""
    panels = []
    for key, title in TABLES.items():
        some = [x for x in lines if x["table"] == key]
        shown = [
            Bar(
                f"{x['name']} | {x['act']}",
                max(100 * (x["ratio"] - 1), 0.0),
                f"{100 * (x['ratio'] - 1):.1f} ± {100 * x['se']:.1f} %, {x['bits_per_weight']:.2f} bits",
                x["method"] != "rtn" and key not in THEIRS,
            )
            for x in some
            if x["ratio"] <= MOST
        ]
        more = f" ({len(some) - len(shown)} above {MOST:g} left out)" if len(shown) < len(some) else ""
        if some:
            panels.append((title + more, shown))
    return bars(panels, f"Perplexity above float32's, percent; tokens {start} …; grey: plain rounding and other tools")


def _plot(lines: Sequence[Line], start: int) -> str:
    """Quality against bits a weight, a colour for each kind of activations.

    Ways to quantize with a part left out are in the tables alone; of the others the first mark has the name.
    """
    series: dict[str, list[Point]] = {}
    named: set[str] = set()
    for line in lines:
        if any(word in line["name"] + line["act"] for word in LEFT_OUT):
            continue
        kind = "a4 and a8" if line["act"].startswith("a4, ") else line["act"]
        value = line["ratio"] if line["ratio"] <= MOST else float("nan")
        label = "" if line["name"] in named else line["name"]
        named.add(line["name"])
        series.setdefault(kind, []).append(Point(line["bits_per_weight"], value, label))
    bits = "bits a weight, everything stored counted"
    return plot(series, bits, f"perplexity over float32's (tokens {start} …)", y_from=1.0)


def _figures(line: Line | None, target: Target | None) -> list[str]:
    if line is None:
        return ["", ""]
    ratio = f"{line['ratio']:.4f}"
    if target is not None and line["ratio"] <= target.reach:
        ratio = f"**{ratio}**"
    kl = f"{line['kl']:.4f} ± {line['kl_se']:.4f}" if "kl" in line else ""
    return [f"{ratio} ± {line['se']:.4f}", kl]


def _reference(lines: Sequence[Line], span: tuple[int, ...]) -> float:
    return float(next(x["ppl_ref"] for x in lines if tuple(x["span"]) == span))
