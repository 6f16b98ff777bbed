"""``lowbit quantize --jobs FILE``: many models or recipes, one after the other or spread over a Ray cluster.

A checkpoint that is finished holds ``lowbit_job.json``: the job, what it was made from, and the files that came of it. The
same jobs file again makes what is missing, or is not that any more.
"""

from __future__ import annotations

import argparse
import functools
import hashlib
import json
import os
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any, NamedTuple, NoReturn

from lowbit import cluster
from lowbit.cli import make
from lowbit.cli.show import as_json, megabytes, refuse_cluster, table
from lowbit.models.files import files_of
from lowbit.types import FormatError, one_line

RECORD = "lowbit_job.json"
_NOT_OF_A_JOB = ("jobs", "ray", "workers", "json", "debug", "threads", "command", "run", "resume_dir", "after_stop")


class Job(NamedTuple):
    """One line: the options of one ``lowbit quantize``, all paths whole."""

    where: str
    args: argparse.Namespace

    @property
    def out(self) -> Path:
        return Path(self.args.out)

    def record(self) -> dict[str, Any]:
        """What decides the result. FormatError where the model or the calibration is not there."""
        said = {key: value for key, value in vars(self.args).items() if key not in _NOT_OF_A_JOB}
        try:
            text = Path(said["calibration"]).read_bytes() if said["calibration"] else b""
        except OSError as error:
            found = error.strerror or error
            raise FormatError(f"{said['calibration']}: found {found}, accepted is a text or JSONL file") from error
        made_from = {"model": files_of(said["model"]), "calibration": hashlib.sha256(text).hexdigest()}
        found = json.loads(json.dumps({"job": said, "made_from": made_from}))
        assert isinstance(found, dict)
        return found

    def done(self) -> dict[str, Any] | None:
        """The row of the run that finished this very job, where its files are as it left them."""
        try:
            before = json.loads((self.out / RECORD).read_text("utf-8"))
            whole = before.pop("files") == files_of(self.out)[1:]
            row = before.pop("row")
        except (OSError, ValueError, KeyError, AttributeError):
            return None
        return {**row, "kept": True} if whole and before == self.record() else None

    def __call__(self) -> dict[str, Any]:
        """Do it, unless it is done. Blocks that an earlier try finished are not made again."""
        if row := self.done():
            return row
        record, began = self.record(), time.perf_counter()
        for left in self.out.glob(".lowbit-*.tmp"):  # of a worker that was ended while it wrote
            left.unlink()
        report = make.quantize_one(self.args)
        size = sum(file.stat().st_size for file in self.out.glob("*.safetensors"))
        row = {"out": str(self.out), "linears": len(report.rows), "file_bytes": size,
               "seconds": time.perf_counter() - began, "kept": False}  # fmt: skip
        partial = self.out / f"{RECORD}.partial"
        partial.write_text(json.dumps({**record, "files": files_of(self.out)[1:], "row": row}, indent=1), "utf-8")
        os.replace(partial, self.out / RECORD)
        return {**row, "worker": os.getpid()}


class _Parser(argparse.ArgumentParser):
    def error(self, message: str) -> NoReturn:
        raise FormatError(message)


def read_jobs(path: str, args: argparse.Namespace) -> list[Job]:
    """Every line of a jobs file; what it does not say, ``args`` do. A path begins at the folder of the file. FormatError
    naming the line, for a file without lines, and for two lines with one ``out``."""
    folder, jobs = Path(path).resolve().parent, list[Job]()
    try:
        lines = Path(path).read_text("utf-8").splitlines()
    except (OSError, UnicodeDecodeError) as error:
        raise FormatError(f"{path}: found {one_line(error)}, accepted is a .jsonl file of jobs") from error
    outs: dict[str, str] = {}
    for number, line in enumerate(lines, 1):
        if not line.strip():
            continue
        where = f"{path}, line {number}"
        try:
            job = Job(where, _job(json.loads(line), folder, args))
            make.method_of(job.args)
            job.record()
        except json.JSONDecodeError as error:
            raise FormatError(f"{where}: found no JSON ({error.msg}), accepted is an object") from error
        except FormatError as error:
            raise FormatError(f"{where}: {error}") from error
        if before := outs.get(job.args.out):
            raise FormatError(f"{where}: out: found {job.args.out} of {before}, accepted is another directory")
        outs[job.args.out] = where
        jobs.append(job)
    if not jobs:
        raise FormatError(f'{path}: found no line, accepted are lines {{"model": DIR, "out": DIR, "scheme": ...}}')
    return jobs


def _job(row: Any, folder: Path, args: argparse.Namespace) -> argparse.Namespace:
    if not isinstance(row, dict):
        raise FormatError(f"found {json.dumps(row)[:40]}, accepted is an object")
    for field in ("model", "out"):
        if not isinstance(row.get(field), str) or not row[field]:
            raise FormatError(f"{field}: found {json.dumps(row.get(field))[:40]}, accepted is a directory")
    if "resume_dir" in row:
        raise FormatError("resume_dir: found with --jobs, accepted is to leave it out: each job has OUT.partial")
    words = []
    for field, value in row.items():
        if field in ("model", "out") or value is None:
            continue
        name = field.replace("_", "-")
        if isinstance(value, bool):
            words.append(f"--{name}" if value else f"--no-{name}")
        else:
            words += [f"--{name}={one}" for one in (value if isinstance(value, list) else [value])]
    parser = _Parser(add_help=False, allow_abbrev=False)
    make.options(parser)
    base = {key: value for key, value in vars(args).items() if key not in _NOT_OF_A_JOB}
    job = parser.parse_args(words, argparse.Namespace(**base, resume_dir=None))
    if job.calibration:
        job.calibration = str((folder if row.get("calibration") else Path.cwd()) / job.calibration)
    model = next((at for at in (folder / row["model"], Path(row["model"])) if at.is_dir()), None)
    job.model = str(model.resolve()) if model else row["model"]
    job.out = str((folder / row["out"]).resolve())
    return job


def run(args: argparse.Namespace) -> int:
    if args.model is not None or args.resume_dir is not None:
        found = f"--resume-dir {args.resume_dir}" if args.model is None else args.model
        raise FormatError(f"--jobs: found {found} beside it, accepted is to leave it to the lines of the file")
    jobs = read_jobs(args.jobs, args)
    if args.ray:
        for job in jobs:
            refuse_cluster(argparse.Namespace(**{**vars(args), "device": job.args.device}), "jobs")
    args.after_stop = "finished jobs and blocks are kept, the same command goes on there"
    rows: dict[str, dict[str, Any]] = {}
    for job in jobs:
        if row := job.done():
            rows[job.where] = row
    left = [job for job in jobs if job.where not in rows]
    failed: dict[str, str] = {}
    for job, found, why in (_on_a_cluster if args.ray else _here)(args, left):
        if found is None:
            failed[job.where] = why
            print(f"lowbit: {job.where}: {why}", file=sys.stderr)
        else:
            rows[job.where] = found
            _note(f"{job.where}: {job.out} in {found['seconds']:.0f} s")
    shown = [
        {"where": job.where, "out": job.args.out, **rows.get(job.where, {"error": failed.get(job.where)})}
        for job in jobs
    ]
    if args.json:
        as_json({"jobs": shown})
    else:
        cells = [_cells(job, row) for job, row in zip(jobs, shown, strict=True)]
        table("", ["out", "scheme", "linears", "MB", "s", ""], cells)
    return 2 if failed else 0


def _cells(job: Job, row: dict[str, Any]) -> list[Any]:
    if "error" in row:
        return [job.out.name, job.args.scheme, "", "", "", "failed"]
    state = "was there" if row["kept"] else ""
    return [job.out.name, job.args.scheme, row["linears"], megabytes(row["file_bytes"]), f"{row['seconds']:.0f}", state]


def _here(args: argparse.Namespace, jobs: list[Job]) -> Iterator[tuple[Job, dict[str, Any] | None, str]]:
    for job in jobs:
        try:
            yield job, job(), ""
        except Exception as error:
            if args.debug:
                raise
            yield job, None, one_line(error)


def _on_a_cluster(args: argparse.Namespace, jobs: list[Job]) -> Iterator[tuple[Job, dict[str, Any] | None, str]]:
    cluster.package()
    if not jobs:
        return
    with ExitStack() as stack:
        marks = [stack.enter_context(cluster.mark(folder)) for folder in sorted({job.out.parent for job in jobs})]
        gpu = any(job.args.device == "cuda" for job in jobs)
        pool = stack.enter_context(cluster.cluster(args.workers, args.threads, gpu))
        heavy = sorted(jobs, key=_bytes, reverse=True)
        yield from cluster.spread(functools.partial(_worker, marks), [[job] for job in heavy], pool, _note)


def _note(text: str) -> None:
    print(f"note: {text}", file=sys.stderr)


def _bytes(job: Job) -> int:
    return sum(size for _, size, _ in files_of(job.args.model)[1:])


def _worker(marks: list[Path]) -> Callable[[Job], dict[str, Any]]:
    for mark in marks:
        cluster.seen(mark)
    return Job.__call__
