"""GPTQModel and auto-round on the model, the calibration windows and the text of ours: one JSON line a row and span.

    PYTHONPATH=src python bench/peer_accuracy/run.py MODEL c4.txt wiki.txt OUT.jsonl [--rows gptqmodel] [--device cuda]

Each tool gets an environment of its own, made as `make foreign` makes them; its weights, dequantized by its own code,
are scored by `score.py`. Quantized models are kept under build/peer_accuracy and not made again.
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
from pathlib import Path

HERE = Path(__file__).resolve().parent
ROOT = HERE.parents[1]
sys.path.insert(0, str(ROOT / "tests" / "foreign"))

import run as foreign  # noqa: E402  tests/foreign/run.py: this file is __main__

AUTO_ROUND = foreign.Tool(
    (
        "auto-round==0.16.1",
        "py-cpuinfo==9.0.0",
        "pydantic==2.14.4",
        "pydantic-core==2.50.5",
        "annotated-types==0.8.0",
        "typing-inspection==0.4.5",
    ),
    "",
    (),
)
TOOLS = {"gptqmodel": foreign.TOOLS["gptqmodel"], "auto_round": AUTO_ROUND}
ROWS = {
    "gptqmodel_sym": ("--sym",),
    "gptqmodel_asym": ("--no-sym",),
    "gptqmodel_sym_static": ("--sym", "--order", "static"),
    "gptqmodel_asym_static": ("--no-sym", "--order", "static"),
    "gptqmodel_sym_mse": ("--sym", "--order", "static", "--mse", "2.4"),
    "auto_round_sym": ("--sym",),
    "auto_round_asym": ("--no-sym",),
    "auto_round_sym_best": ("--sym", "--recipe", "best"),
    "auto_round_asym_best": ("--no-sym", "--recipe", "best"),
}


def main() -> int:
    p = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    p.add_argument("model", type=Path)
    p.add_argument("calibration", type=Path)
    p.add_argument("text", type=Path)
    p.add_argument("out", type=Path)
    p.add_argument("--rows", action="append", metavar="PART", help=f"of {', '.join(ROWS)} (repeatable; default: all)")
    p.add_argument("--device", default="cpu")
    p.add_argument("--threads", default="1", metavar="N")
    args = p.parse_args()
    model = args.model.resolve()
    rows = [name for name in ROWS if args.rows is None or any(part in name for part in args.rows)]
    if not rows:
        p.error(f"--rows: found {args.rows}, accepted are parts of {', '.join(ROWS)}")
    kept = ROOT / "build" / "peer_accuracy" / model.name
    kept.mkdir(parents=True, exist_ok=True)
    samples, quiet = kept / "samples.json", {**os.environ, "HF_HUB_OFFLINE": "1", "TOKENIZERS_PARALLELISM": "false"}
    common = ["--device", args.device, "--threads", args.threads]
    ours = [sys.executable, str(HERE / "windows.py"), str(model), str(args.calibration), str(samples)]
    subprocess.run(ours, check=True, env=quiet)
    made, failed = [], []
    for name in rows:
        if not (kept / name / "settings.json").exists():
            tool = next(tool for tool in TOOLS if name.startswith(tool))
            python = foreign.environment(tool.replace("_", "-"), TOOLS[tool])
            script = [str(python), str(HERE / f"quantize_{tool}.py"), str(model), str(samples), str(kept / name)]
            print(f"== {name}", flush=True)
            if subprocess.run([*script, *common, *ROWS[name]], env=quiet, cwd=kept).returncode:
                failed.append(name)
                continue
        made.append(str(kept / name))
    if made:
        last = [sys.executable, str(HERE / "score.py"), str(model), str(args.text), str(args.out), *made]
        subprocess.run([*last, *common], check=True, env=quiet)
    for name in failed:
        print(f"{name}: no result", file=sys.stderr)
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
