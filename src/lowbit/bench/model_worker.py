"""The worker of ``lowbit bench models``: one model in one runtime, in a process of its own.

`models.py` starts it under the Python that has the runtime. It imports no torch unless the peer runs on it, and counts
memory from an interpreter with torch for those peers, from a bare one for the others. The first line on stdin is a job,
a JSON object of paths, token ids and counts; every further line asks for one turn. An answer is one JSON object a line:
what loading took, or ``missing`` with the reason; then the times of each turn.
"""

from __future__ import annotations

import ctypes
import json
import os
import sys
import time
from pathlib import Path
from typing import Any

from lowbit.bench.engine import Engine, Job
from lowbit.bench.llama_cpp import requantize
from lowbit.bench.model_peers import PEERS


def memory(key: str) -> int:
    """Bytes of ``VmRSS`` or ``VmHWM`` of this process; 0 where the system does not say."""
    try:
        text = Path("/proc/self/status").read_text()
    except OSError:
        return 0
    return next((1024 * int(line.split()[1]) for line in text.splitlines() if line.startswith(key + ":")), 0)


def load(job: Job) -> tuple[Engine, dict[str, Any]]:
    """The engine of a job, after one generation and one prefill, and the first answer."""
    row = PEERS[job["peer"]]
    if row.torch:
        import torch

        torch.set_num_threads(job["threads"])
    base, began = memory("VmRSS"), time.perf_counter()
    engine = row.make(job)
    seconds = time.perf_counter() - began
    tokens, _ = engine.generate(job["short"], 1)
    answer: dict[str, Any] = {"error": _error(engine, job)}
    tokens, _ = engine.generate(job["short"], job["steps"] + 1)
    answer.update(
        load_s=round(seconds, 2), tokens=tokens[:16], resident=max(memory("VmRSS") - base, 0), base=base,
        version=engine.version, weight_bytes=engine.weight_bytes, above="torch" if row.torch else "bare interpreter",
    )  # fmt: skip
    engine.generate(job["long"], 1)
    return engine, answer


def _error(engine: Engine, job: Job) -> float | None:
    """Relative L2 distance of the logits after the prompt to float32's, which float32 itself writes down."""
    logits = engine.logits()
    if logits is None or not job["reference"]:
        return None
    import numpy

    kept = Path(job["reference"])
    if job["peer"] == "float32":
        numpy.save(kept, logits)
    if not kept.exists():
        return None
    wanted = numpy.load(kept)
    if wanted.shape != logits.shape:
        return None
    return float(numpy.linalg.norm(logits - wanted) / numpy.linalg.norm(wanted))


def turn(engine: Engine, job: Job) -> dict[str, Any]:
    """One generation and one prefill: seconds of every step and of the prefill, CPU seconds a second of the former."""
    engine.generate(job["short"], 4)  # wakes its threads, untimed
    cpu, began = time.process_time(), time.perf_counter()
    _, times = engine.generate(job["short"], job["steps"] + 1)
    cpu, spent = time.process_time() - cpu, time.perf_counter() - began
    again = time.perf_counter()
    engine.generate(job["long"], 1)
    prefill = time.perf_counter() - again
    steps = [after - before for before, after in zip(times, times[1:])]
    return {"steps": steps, "prefill": prefill, "cpu": cpu / spent, "peak": memory("VmHWM")}


def main() -> int:
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # what a runtime prints is no answer
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(1, 9)  # PR_SET_PDEATHSIG: a stopped worker does not outlive the bench
    job = json.loads(sys.stdin.readline())
    answer: dict[str, Any] = {}
    try:
        if "requantize" in job:
            requantize(job["ggml"], *job["requantize"])
            engine = Engine()
        else:
            engine, answer = load(job)
    except Exception as error:  # whatever a runtime raises: it lacks this model or this machine
        answer = {"missing": f"{type(error).__name__}: {' '.join(str(error).split())[:300]}"}
    print(json.dumps(answer), file=answers, flush=True)
    for _ in sys.stdin:
        print(json.dumps(turn(engine, job)), file=answers, flush=True)
    return 0
