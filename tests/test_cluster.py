"""Work spread over a local Ray of two workers: nothing is lost or done twice where workers die, and files are those of one process."""

from __future__ import annotations

import json
import os
import shutil
import signal
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

import samples
import tiny_omnivoice as tiny
from lowbit import cluster
from lowbit.cli import jobs, main
from lowbit.engines import speaker
from lowbit.models.omnivoice import Line
from lowbit.models.speech import comment_of, write_wav

LINES = [
    {"text": tiny.TEXT, "ref_audio": "voice.wav", "ref_text": "The harbour was quiet."},
    {"text": "Two words."},
    {"text": "Hm.", "duration": 0.5},
    {"text": "Yes."},
    {"text": "No.", "ref_audio": "voice.wav", "ref_text": "The harbour was quiet."},
    {"text": "Good.", "language": "en"},
]


@pytest.fixture(scope="module")
def pool() -> Iterator[cluster.Pool]:
    """A Ray of this machine, as the commands start it, for all tests."""
    pytest.importorskip("ray", reason="needs ray: pip install lowbit[cluster]")
    before = os.environ.pop("RAY_ADDRESS", None)
    here = os.environ.get("PYTHONPATH")
    os.environ["PYTHONPATH"] = os.pathsep.join(
        [str(Path(__file__).parent), *([here] if here else [])]
    )  # this very file
    try:
        with cluster.cluster(2, 1, gpu=False) as found:
            yield found
    finally:
        os.environ.update({} if before is None else {"RAY_ADDRESS": before})
        os.environ.pop("PYTHONPATH")
        os.environ.update({} if here is None else {"PYTHONPATH": here})


# -- the pool -------------------------------------------------------------------------------------------------------


class Writes:
    """A worker that writes a file an item, and ends its process at some of them: "once" the first time, "always"."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def __call__(self, item: str) -> int:
        file, died = self.folder / f"{item}.done", self.folder / f"{item}.died"
        if item.startswith("fails"):
            raise ValueError("no such\nluck")
        if item.startswith("always") or (item.startswith("once") and not died.exists()):
            died.touch()
            os._exit(1)
        with file.open("a") as out:
            out.write(f"{os.getpid()}\n")
        return os.getpid()


def make(folder: Path) -> Writes:
    with (folder / "loads").open("a") as out:
        out.write(f"{os.getpid()}\n")
    return Writes(folder)


def refuses(folder: Path) -> Writes:
    raise ValueError(f"nothing works in {folder.name}")


def ends(folder: Path) -> Writes:
    os._exit(1)


class Partial:
    """A function of this file and its folder; of a module that the workers can import."""

    def __init__(self, function: str, folder: Path) -> None:
        self.function, self.folder = function, folder

    def __call__(self) -> Any:
        return getattr(sys.modules[__name__], self.function)(self.folder)


def test_an_item_whose_worker_ends_is_done_by_another_and_nothing_twice(
    pool: cluster.Pool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(cluster, "TRIES", 2)
    batches = [["a", "once", "b"], ["fails"], ["c", "d"], ["always"]]
    notes: list[str] = []
    found = list(cluster.spread(Partial("make", tmp_path), batches, pool._replace(workers=1), notes.append))
    assert sorted(item for item, _, _ in found) == sorted(sum(batches, []))
    why = {item: error for item, row, error in found if row is None}
    assert why["fails"] == "ValueError: no such luck" and why["always"].startswith("2 workers ended over it")
    assert set(why) == {"fails", "always"} and len(notes) == 3 and "is done again" in notes[0]
    loads = (tmp_path / "loads").read_text().split()
    assert len(set(loads)) == len(loads) == 3  # each worker once
    for item in ("once", "b", "c", "d"):
        row = next(row for name, row, _ in found if name == item)
        assert (tmp_path / f"{item}.done").read_text() == f"{row}\n" and str(row) in loads
    assert (tmp_path / "a.done").read_text().count("\n") == 2  # was done when its worker ended: a real one looks first


def test_workers_that_cannot_start_are_one_line(
    pool: cluster.Pool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert cluster._Actor(Partial("refuses", tmp_path), 1).load() == f"ValueError: nothing works in {tmp_path.name}"
    monkeypatch.setattr(cluster, "TRIES", 1)
    with pytest.raises(cluster.FormatError, match="1 workers in a row that ended as they started"):
        list(cluster.spread(Partial("ends", tmp_path), [["a"]], pool, print))


def test_batches_are_even_and_the_longest_comes_first() -> None:
    items = [9, 1, 1, 1, 1, 2, 40, 1]
    found = cluster.balanced(items, float, 1)  # 56 in all, 7 a batch at most
    assert found == [[40], [9], [2, 1, 1, 1, 1, 1]] and cluster.balanced([], float, 2) == []


def test_a_directory_that_a_machine_does_not_share_is_refused(tmp_path: Path) -> None:
    with cluster.mark(tmp_path / "new") as here:
        cluster.seen(here)
    assert list((tmp_path / "new").iterdir()) == []
    with pytest.raises(cluster.FormatError, match="accepted is one that all machines of the cluster share"):
        cluster.seen(here)


# -- speak ----------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model, a voice, lines."""
    return tiny.place(tmp_path_factory.mktemp("cluster"), "lines.jsonl", LINES)


def speak(place: Path, out: Path, *more: str) -> int:
    lines = ["--lines", str(place / "lines.jsonl"), "-o", str(out), "--seed", "3", "--threads", "1", "--json"]
    return main(["speak", "--model", str(place / "model"), "--steps", "2", *lines, *more])


def files(out: Path) -> dict[str, bytes]:
    return {file.name: file.read_bytes() for file in out.iterdir()}


@pytest.fixture(scope="module")
def want(place: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, bytes]:
    """The files that one process writes."""
    out = tmp_path_factory.mktemp("want")
    assert speak(place, out) == 0
    return files(out)


def test_lines_of_a_cluster_are_those_of_one_process_though_a_worker_is_killed(
    pool: cluster.Pool, place: Path, want: dict[str, bytes], tmp_path: Path, capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    killed: list[int] = []
    spread = cluster.spread

    def killing(make: Any, *rest: Any) -> Any:
        for item, row, why in spread(make, *rest):
            if not killed:  # who wrote the first line has begun the next by now
                killed.append(row.worker)
                os.kill(row.worker, signal.SIGKILL)
            yield item, row, why

    monkeypatch.setattr(cluster, "spread", killing)
    assert speak(place, tmp_path, "--ray", "--workers", "2") == 0
    out, err = capsys.readouterr()
    assert files(tmp_path) == want and sorted(want) == [f"{n:04}.wav" for n in range(1, 7)]
    told = json.loads(out.splitlines()[-1])  # the Ray of all tests may say more, later
    assert [Path(row["file"]).name for row in told["lines"]] == sorted(want)
    assert [row["text"] for row in told["lines"]] == [line["text"] for line in LINES]
    assert err.count("note: a worker ended") == 1
    workers = {row["worker"] for row in told["lines"]}
    assert os.getpid() not in workers and killed[0] in workers and len(workers) > 1


def test_a_second_run_speaks_what_is_missing_or_was_made_from_something_else(
    pool: cluster.Pool, place: Path, want: dict[str, bytes], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    capsys.readouterr()
    for name, data in want.items():
        (tmp_path / name).write_bytes(data)
    (tmp_path / "0002.wav").unlink()
    (tmp_path / "0004.wav").write_bytes(want["0005.wav"])  # of another line
    times = {name: (tmp_path / name).stat().st_mtime_ns for name in ("0001.wav", "0003.wav")}
    assert speak(place, tmp_path) == 0
    out, err = capsys.readouterr()
    assert files(tmp_path) == want and "4 of 6 lines are in" in err
    assert [row["kept"] for row in json.loads(out)["lines"]] == [True, False, True, False, True, True]
    assert all((tmp_path / name).stat().st_mtime_ns == time for name, time in times.items())
    assert speak(place, tmp_path, "--ray") == 0  # nothing left, so no worker starts
    assert all(row["kept"] for row in json.loads(capsys.readouterr().out)["lines"])
    assert speak(place, tmp_path, "--seed", "4") == 0  # with another seed nothing is kept
    assert not any(row["kept"] for row in json.loads(capsys.readouterr().out)["lines"])


def test_a_worker_keeps_what_another_has_written(place: Path, want: dict[str, bytes], tmp_path: Path) -> None:
    how = speaker.How(str(place / "model"), steps=2, seed=3)
    (what,) = speaker.utterances(how, [Line("Two words.")], [tmp_path / "a.wav"])
    says = speaker.speaks(how.anywhere(), lambda: None)
    first = says(what)
    assert not first.kept and (tmp_path / "a.wav").read_bytes() == want["0002.wav"]
    assert says(what) == first._replace(took=0.0, kept=True, worker=0)
    (tmp_path / "a.wav").write_bytes(want["0002.wav"][:-20])  # cut off: not what it was
    assert not says(what).kept and (tmp_path / "a.wav").read_bytes() == want["0002.wav"]


class FakeRay:
    """A Ray whose cluster is not there; the real one tries for minutes."""

    @staticmethod
    def is_initialized() -> bool:
        return False

    @staticmethod
    def init(address: str, **_: Any) -> None:
        raise ConnectionError("no one")

    @staticmethod
    def shutdown() -> None:
        pass


def test_what_does_not_fit_is_one_line(
    place: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    one = ["speak", "--model", str(place / "model"), "--text", "Hm.", "-o", str(tmp_path / "a.wav")]
    for arguments, message in (
        ([*one, "--ray"], "--ray: found no --lines, accepted is --lines FILE"),
        ([*one, "--workers", "2"], "--workers: found 2 without --ray"),
    ):
        assert main(arguments) == 2
        err = capsys.readouterr().err
        assert message in err and err.count("\n") == 1
    for more, message in (
        (("--workers", "0"), "--workers: found 0"),
        (("--device", "cuda:1"), "--device: found cuda:1, accepted with --ray"),
    ):
        assert speak(place, tmp_path, "--ray", *more) == 2
        assert message in capsys.readouterr().err
    monkeypatch.setenv("RAY_ADDRESS", "127.0.0.1:1")  # nobody answers
    monkeypatch.setattr(cluster, "package", lambda: FakeRay)
    assert speak(place, tmp_path / "other", "--ray") == 2
    err = capsys.readouterr().err
    assert "--ray: RAY_ADDRESS 127.0.0.1:1: found ConnectionError: no one" in err and err.count("\n") == 1
    monkeypatch.undo()
    monkeypatch.setitem(sys.modules, "ray", None)  # not installed
    assert speak(place, tmp_path / "new", "--ray") == 2
    err = capsys.readouterr().err
    assert "pip install lowbit[cluster]" in err and err.count("\n") == 1 and not (tmp_path / "new").exists()


def test_a_wav_says_what_it_was_made_from(tmp_path: Path) -> None:
    for comment in ("odd", "even", ""):
        write_wav(tmp_path / "a.wav", tiny.voice(0.01)[0].numpy(), 24000, comment)
        assert comment_of(tmp_path / "a.wav") == (comment or None)
        size = (tmp_path / "a.wav").stat().st_size
        assert int.from_bytes((tmp_path / "a.wav").read_bytes()[4:8], "little") == size - 8
    (tmp_path / "b.wav").write_bytes(b"no audio")
    assert comment_of(tmp_path / "b.wav") is None and comment_of(tmp_path / "no.wav") is None


# -- quantize -------------------------------------------------------------------------------------------------------

JOBS = [
    {"model": "llama", "out": "made/w8", "scheme": "w8a8", "method": "rtn"},
    {"model": "llama", "out": "made/w4", "calibration": "text.txt", "group": 32, "channel_scales": False},
    {"model": "llama", "out": "made/w4-skip", "calibration": "text.txt", "group": 32, "skip": ["down_proj", "q_proj"]},
]


@pytest.fixture(scope="module")
def llama(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a tiny model, a text and a jobs file."""
    transformers = pytest.importorskip("transformers")
    folder = tmp_path_factory.mktemp("jobs")
    words = samples.byte_tokenizer(bos_token="<s>", eos_token="</s>", pad_token="<pad>")
    words.save_pretrained(folder / "llama")
    config = transformers.LlamaConfig(
        vocab_size=len(words), hidden_size=32, intermediate_size=64, num_hidden_layers=2, num_attention_heads=2,
        num_key_value_heads=1, bos_token_id=1, eos_token_id=2, pad_token_id=0,
    )  # fmt: skip
    transformers.LlamaForCausalLM(config).save_pretrained(folder / "llama")
    (folder / "text.txt").write_text("The quick brown fox jumps over the lazy dog; it was not amused. " * 20)
    (folder / "jobs.jsonl").write_text("\n".join(json.dumps(job) for job in JOBS))
    return folder


def quantize(folder: Path, *more: str) -> int:
    return main(
        ["quantize", "--jobs", str(folder / "jobs.jsonl"), "--tokens", "512", "--threads", "1", "--json", *more]
    )


def made(folder: Path) -> dict[str, bytes]:
    """The checkpoints without their records, which hold times."""
    found = (file for file in (folder / "made").rglob("*") if file.is_file() and file.name != jobs.RECORD)
    return {str(file.relative_to(folder)): file.read_bytes() for file in found}


def test_jobs_of_a_cluster_are_those_of_one_process_though_a_worker_is_killed(
    pool: cluster.Pool, llama: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    assert quantize(llama) == 0
    told = json.loads(capsys.readouterr().out)["jobs"]
    want = made(llama)
    assert [row["linears"] for row in told] == [14, 14, 10] and not any(row["kept"] for row in told)
    assert {name.split("/")[1] for name in want} == {"w8", "w4", "w4-skip"}
    config = json.loads(want["made/w4/config.json"])["quantization_config"]
    assert config["quant_method"] == "lowbit" and "w8" not in json.dumps(config)
    assert quantize(llama) == 0  # all there
    assert all(row["kept"] for row in json.loads(capsys.readouterr().out)["jobs"])

    shutil.rmtree(llama / "made" / "w8")
    (llama / "made" / "w4" / "model.safetensors").write_bytes(b"")
    (llama / "made" / "w4-skip" / jobs.RECORD).unlink()
    killed: list[int] = []
    spread = cluster.spread

    def killing(make: Any, *rest: Any) -> Any:
        for job, row, why in spread(make, *rest):
            if not killed:
                killed.append(row["worker"])
                os.kill(row["worker"], signal.SIGKILL)
            yield job, row, why

    monkeypatch.setattr(cluster, "spread", killing)
    assert quantize(llama, "--ray", "--workers", "1") == 0
    out, err = capsys.readouterr()
    rows = json.loads(out.splitlines()[-1])["jobs"]
    assert made(llama) == want and err.count("note: a worker ended") == 1
    assert not any(row["kept"] for row in rows) and os.getpid() not in {row["worker"] for row in rows}


def test_a_job_that_fails_does_not_stop_the_others(llama: Path, tmp_path: Path, capsys: Any) -> None:
    (tmp_path / "llama").symlink_to(llama / "llama")
    rows = [{"model": "llama", "out": "a", "group": 7}, {"model": "llama", "out": "b", "group": 16}]
    (tmp_path / "jobs.jsonl").write_text("\n".join(json.dumps(row) for row in rows))
    assert main(["quantize", "--jobs", str(tmp_path / "jobs.jsonl"), "--method", "rtn", "--json"]) == 2
    out, err = capsys.readouterr()
    told = json.loads(out)["jobs"]
    assert "jobs.jsonl, line 1: " in err and "error" in told[0] and told[1]["linears"] == 14
    assert (tmp_path / "b" / "model.safetensors").exists() and not (tmp_path / "a" / "model.safetensors").exists()


def test_jobs_that_do_not_fit_are_one_line(llama: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    one = {"model": str(llama / "llama"), "out": "a", "method": "rtn"}
    for rows, message in (
        ([{"out": "a"}], "line 1: model: found null"),
        ([{**one, "schem": "w4a8"}], "line 1: unrecognized arguments: --schem=w4a8"),
        ([{**one, "scheme": "w3"}], "line 1: argument --scheme: invalid choice: 'w3'"),
        ([{**one, "method": "gptq"}], "line 1: --calibration: found nothing"),
        ([{**one, "calibration": "no.txt"}], "no.txt: found No such file"),
        ([{**one, "model": "nowhere"}], "line 1: nowhere: found no such directory"),
        ([{**one, "resume_dir": "x"}], "line 1: resume_dir: found with --jobs"),
        ([one, one], "line 2: out: found"),
        ([3], "line 1: found 3, accepted is an object"),
        ([], "found no line"),
    ):
        (tmp_path / "jobs.jsonl").write_text("\n".join(json.dumps(row) for row in rows))
        assert main(["quantize", "--jobs", str(tmp_path / "jobs.jsonl")]) == 2, message
        err = capsys.readouterr().err
        assert message in err and err.count("\n") == 1, err
    assert main(["quantize", str(llama), "--jobs", "x"]) == 2
    assert "--jobs: found" in capsys.readouterr().err
    assert main(["quantize", str(llama)]) == 2
    assert "accepted are MODEL and OUT, or --jobs FILE" in capsys.readouterr().err
    assert main(["quantize", str(llama), str(tmp_path / "o"), "--ray"]) == 2
    assert "--ray: found no --jobs" in capsys.readouterr().err
