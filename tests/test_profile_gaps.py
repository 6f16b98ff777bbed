"""Gaps and kernel boundaries inside a generation, on traces written by hand as torch.profiler writes them for CUDA."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from lowbit.cli import main
from lowbit.prove import profile, profile_table, trace
from lowbit.prove.trace import Event
from lowbit.types import FormatError


def item(cat: str, name: str, ts: float, dur: float, correlation: int | None = None) -> dict[str, Any]:
    args = {} if correlation is None else {"correlation": correlation, "device": 0, "stream": 7}
    return {"ph": "X", "cat": cat, "name": name, "ts": ts, "dur": dur, "pid": 1, "tid": 2, "args": args}


#  CPU   [generation 100 ............................................ 400]   [codec's kernel is sent at 450]
#         prepare   replay A sent at 110        replay B sent at 220
#  GPU   50-60 | A: 120-130 132-140 138-150 157-160 | B: 230-240 240-250 252.5-260 | 470-480
#        between in A:  2, overlap 2, 7 (above 5);  A to B: 70;  in B: 0, 2.5
ITEMS = [
    item("user_annotation", "lowbit call 0, 2 steps", 0, 500),
    item("user_annotation", trace.GENERATION, 100, 300),
    item("python_function", "graphs.py(70): run", 105, 290),
    item("cuda_runtime", "cudaLaunchKernel", 40, 3, 1),
    item("cuda_driver", "cuLaunchKernelEx", 41, 1, 1),
    item("cuda_runtime", "cudaGraphLaunch", 110, 5, 2),
    item("cuda_runtime", "cudaGraphLaunch", 220, 5, 3),
    item("cuda_runtime", "cudaEventRecord", 226, 1, 9),
    item("cuda_runtime", "cudaLaunchKernelExC", 450, 5, 4),
    item("kernel", "embed", 50, 10, 1),
    item("kernel", "quantize_rows", 120, 10, 2), item("kernel", "gemm_sm90", 132, 8, 2),
    item("kernel", "attention", 138, 12, 2), item("gpu_memset", "Memset (Device)", 157, 3, 2),
    item("kernel", "quantize_rows", 230, 10, 3), item("kernel", "gemm_sm90", 240, 10, 3), item("kernel", "reveal", 252.5, 7.5, 3),
    item("kernel", "conv", 470, 10, 4),
    item("gpu_user_annotation", trace.GENERATION, 120, 140),
]  # fmt: skip


def read(tmp_path: Path, items: list[dict[str, Any]]) -> profile.Profile:
    file = tmp_path / "trace.json"
    file.write_text(json.dumps({"traceEvents": items}))
    return profile.of_file(file)


def test_the_generation_is_told_from_what_is_around_it(tmp_path: Path) -> None:
    found = read(tmp_path, ITEMS)
    assert found.steps == 2 and found.events == 9 and found.launches == 4  # the driver's is the runtime's
    inside = found.inside
    assert inside is not None and (inside.of, inside.runs, inside.events) == ("generation", 1, 7)
    assert inside.span_us == 140 and inside.busy_us == 10 + 18 + 3 + 20 + 7.5
    assert (inside.gap_count, inside.gap_us) == (2, 77) and [gap.us for gap in inside.gaps] == [70, 7]
    assert (inside.step_gaps, inside.step_gap_us) == (
        2,
        77,
    )  # from replay A to replay B; what comes before is not in it
    first, second = inside.gaps
    assert (first.before, first.after, first.late) == ("Memset (Device)", "quantize_rows", True)
    assert first.stack[-2:] == (trace.GENERATION, "graphs.py(70): run") and second.late is False
    assert found.gap_count == 6 and found.gaps[0].us == 210  # the whole trace: to the codec


def test_boundaries_and_overlaps_are_of_neighbours_in_one_replay(tmp_path: Path) -> None:
    inside = read(tmp_path, ITEMS).inside
    assert inside is not None and (inside.replays, inside.replay_events) == (2, 7)
    assert (inside.boundaries, inside.boundary_us) == (3, 4.5)  # 2, 0 and 2.5: neither 7 nor what is between replays
    assert inside.boundary_mean_us == pytest.approx(4.5 / 7)
    assert (inside.overlaps, inside.overlap_us) == (1, 2)


def test_a_kernel_inside_another_hides_no_boundary() -> None:
    def gpu(start: float, end: float) -> Event:
        return Event("k", start, end - start, "gpu", "device 0 stream 7", 1)

    events = [
        Event("cudaGraphLaunch", 0, 1, "launch", "1/1", 1),
        gpu(2, 20),
        gpu(5, 9),
        gpu(21, 30),
        gpu(30 - 1e-9, 31),
    ]
    inside = profile.analyse(events).inside
    assert inside is not None and (inside.of, inside.gap_count, inside.gaps) == ("trace", 0, [])
    assert (inside.boundaries, inside.boundary_us) == (2, pytest.approx(1)) and (
        inside.overlaps,
        inside.overlap_us,
    ) == (1, 4)


def test_calls_without_generations_and_no_graph(tmp_path: Path) -> None:
    items = [
        item("user_annotation", "lowbit call 0, 1 steps", 0, 50), item("user_annotation", "lowbit call 1, 1 steps", 60, 50),
        *(item("cuda_runtime", "cudaLaunchKernel", ts, 1, n) for n, ts in enumerate((1, 5, 61, 65))),
        *(item("kernel", "k", ts, 2, n) for n, ts in enumerate((3, 15, 70, 73))),
    ]  # fmt: skip
    found = read(tmp_path, items)
    inside = found.inside
    assert inside is not None and (inside.of, inside.runs, inside.span_us, inside.busy_us) == ("call", 2, 19, 8)
    assert (inside.gap_count, inside.gap_us) == (1, 10) and found.gap_count == 3  # 53 us lie between the calls
    assert (inside.replays, inside.boundaries, inside.boundary_mean_us) == (0, 0, 0)


def test_side_by_side(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    names = []
    for name, items in (("ours", ITEMS), ("stock", ITEMS[:5] + ITEMS[9:10])):
        source, out = tmp_path / f"{name}-trace.json", tmp_path / f"{name}.json"
        source.write_text(json.dumps({"traceEvents": items}))
        assert main(["profile", str(source), "--out", str(out)]) == 0
        names.append(str(out))
    assert "inside 1 x generation" in capsys.readouterr().out
    page = tmp_path / "page.md"
    page.write_text(f"# Head\n{profile_table.BEGIN}\nold\n{profile_table.END}\ntail\n")
    for _ in range(2):
        assert main(["profile", "--tabulate", *names, "--into", str(page)]) == 0
    capsys.readouterr()
    text = page.read_text()
    assert text.startswith("# Head\n") and text.endswith(f"{profile_table.END}\ntail\n") and "old" not in text
    rows = {
        cells[1].strip(): [c.strip() for c in cells[2:-1]]
        for line in text.splitlines()
        if (cells := line.split("|"))[1:]
    }
    assert rows["gaps above 5 µs inside the generation"] == ["1.00", "-"]
    assert rows["boundaries of kernels inside replays, µs"] == ["2.2", "-"] and rows["kernels"] == ["4", "0"]
    assert rows["GEMM, ms"] == ["0.014", "-"] and rows["of it in the decoding loop, ms"] == ["0.07", "-"]
    assert main(["profile", "--tabulate", *names]) == 0 and capsys.readouterr().out.strip() in text
    (tmp_path / "bare.md").write_text("nothing")
    for arguments, words in (
        (
            ["--tabulate", str(tmp_path / "ours-trace.json")],
            "found no 'what', accepted is what lowbit profile --out wrote",
        ),
        (["--tabulate", str(tmp_path / "no.json")], "No such file"),
        (["--tabulate", names[0], "--into", str(tmp_path / "bare.md")], "found no marks"),
        ([names[0], "--into", "x"], "accepted with --tabulate"),
    ):
        assert main(["profile", *arguments]) == 2
        out, err = capsys.readouterr()
        assert not out and words in err and len(err.splitlines()) == 1
    with pytest.raises(FormatError):
        profile_table.read([page])
    capsys.readouterr()


def test_the_page_has_a_place_for_the_table() -> None:
    page = (Path(__file__).parents[1] / "docs" / "omnivoice.md").read_text()
    assert page.count(profile_table.BEGIN) == page.partition(profile_table.BEGIN)[2].count(profile_table.END) == 1


def test_random_weights_by_the_command_line(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    pytest.importorskip("omnivoice")
    out = tmp_path / "out.json"
    line = ["profile", "--random", "tiny", "--accelerate", "w4a8", "--steps", "2", "--audio", "0.4", "--out", str(out)]
    assert main([*line, "--no-stacks"]) == 0
    capsys.readouterr()
    found = json.loads(out.read_text())
    assert found["steps"] == 2 and found["device"] == "cpu" and found["inside"] is None and found["date"]
    assert found["what"] == "0.4 s of speech in 2 steps, accelerated"
    assert {"GEMM", "attention"} <= {row["category"] for row in found["rows"]}
