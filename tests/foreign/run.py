"""`make foreign`: the tools that own a format read our files, and must come to the same weights.

For every tool: an environment of its own under build/foreign (its package without dependencies, over the packages of
this one), the cases it can hold written by `lowbit`, and its reader script `read_<tool>.py`, which dequantizes by the
tool's own code and compares every layer with what `lowbit` says. Prints one table; exits 1 if any tool disagrees.

    python tests/foreign/run.py [TOOL ...]
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import sysconfig
import warnings
from pathlib import Path
from typing import NamedTuple

import torch

ROOT = Path(__file__).resolve().parents[2]
sys.path[:0] = [str(ROOT / "tests")]

from lowbit.checkpoint import write_checkpoint  # noqa: E402
from lowbit.formats import FORMATS, config_for, read_layer  # noqa: E402
from lowbit.reference import dequantize  # noqa: E402
from lowbit.types import Activation, QuantizedWeight  # noqa: E402
from samples import weight  # noqa: E402


class Tool(NamedTuple):
    """Packages of the environment, the script in it, the formats it is asked for, the cases it cannot hold."""

    packages: tuple[str, ...]
    script: str
    formats: tuple[str, ...]
    leave_out: tuple[str, ...] = ()


TOOLS = {
    "compressed-tensors": Tool(
        ("compressed-tensors==0.20.1", "loguru==0.7.3"),
        "read_compressed_tensors.py",
        ("compressed-tensors",),
        ("order",),  # activation order left the library in 0.19
    ),
    "compressed-tensors-0.13": Tool(
        ("compressed-tensors==0.13.0", "loguru==0.7.3"), "read_compressed_tensors.py", ("compressed-tensors",)
    ),
    "autoawq": Tool(("autoawq==0.2.9",), "read_autoawq.py", ("awq",)),
    "gptqmodel": Tool(
        (
            "gptqmodel==7.7.0",
            "threadpoolctl==3.7.0",
            "device-smi==0.5.7",
            "protobuf==7.36.2",
            "pypcre==0.6.4",
            "tokenicer==0.0.14",
            "logbar==0.4.15",
            "dill==0.4.1",
            "defuser==0.0.28",
            "torchao==0.18.0",
        ),
        "read_gptqmodel.py",
        ("gptq", "gptq_v2"),
    ),
}


def layers() -> dict[str, QuantizedWeight]:
    """One layer a case; the name says what it is. Sizes that every tool's own checks accept."""
    token = Activation(8, "token")
    rows = {
        "sym": weight(64, 128, 32, zeros=False),
        "asym": weight(64, 128, 32),
        "asym.low": weight(64, 128, 32, fill="low"),
        "asym.high": weight(64, 128, 32, fill="high"),  # every zero point 0: borrows through whole words
        "asym.spread": weight(64, 128, 32, fill="spread"),
        "sym.g64": weight(64, 192, 64, zeros=False),
        "channel": weight(64, 128, -1),
        "sym.bits8": weight(64, 128, 32, bits=8, zeros=False),
        "asym.bits8": weight(64, 128, 32, bits=8),
        "order.sym": weight(64, 128, 32, zeros=False, perm=True),
        "order.asym": weight(64, 128, 32, perm=True),
        "bias": weight(64, 128, 32, bias=True),
        "token.w4": weight(64, 128, 32, zeros=False, activation=token),
        "token.w8": weight(64, 128, -1, bits=8, zeros=False, activation=token),
        "token.asym": weight(64, 128, 32, activation=token),
        "odd": weight(24, 96, 32),
    }
    return rows


def write_cases(tool: Tool, folder: Path) -> int:
    """A directory for every format and case the format can hold; returns how many."""
    count = 0
    for format in tool.formats:
        for case, q in layers().items():
            held = format == "compressed-tensors" or not case.startswith("token")
            if format == "awq":
                held = held and q.bits == 4 and q.perm is None
            if not held or any(case.startswith(start) for start in tool.leave_out):
                continue
            prefix = "model.layers.0.mlp.up_proj"
            config = config_for(format, {prefix: q}, ["lm_head"])
            written = FORMATS[format].write(q, prefix)
            with warnings.catch_warnings():
                warnings.simplefilter("error")
                ours = dequantize(read_layer(written, prefix, format, config))
            assert torch.equal(ours, dequantize(q)), (format, case)
            where = folder / f"{format}.{case}"
            write_checkpoint(where, written, {"quantization_config": config})
            write_checkpoint(where / "expected", {"weight": ours, "bias": torch.tensor([])}, None)
            count += 1
    return count


def environment(name: str, tool: Tool) -> Path:
    """The Python of the tool's own environment, made once."""
    home = ROOT / "build" / "foreign" / name / "env"
    python = home / "bin" / "python"
    done = home / "packages.json"
    if done.exists() and json.loads(done.read_text()) == list(tool.packages):
        return python
    subprocess.run([sys.executable, "-m", "venv", "--clear", "--without-pip", str(home)], check=True)
    inside = subprocess.run(
        [str(python), "-c", "import sysconfig; print(sysconfig.get_path('purelib'))"],
        check=True,
        capture_output=True,
        text=True,
    ).stdout.strip()
    (Path(inside) / "parent.pth").write_text(sysconfig.get_path("purelib") + "\n")
    pip = [sys.executable, "-m", "pip", "--python", str(python), "install", "-qq"]
    subprocess.run([*pip, "--no-deps", "--no-build-isolation", *tool.packages], check=True)
    done.write_text(json.dumps(list(tool.packages)))
    return python


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("tools", nargs="*", default=list(TOOLS), help=f"any of {', '.join(TOOLS)}")
    asked = parser.parse_args().tools
    unknown = sorted(set(asked) - set(TOOLS))
    if unknown:
        parser.error(f"tool: found {unknown[0]}, accepted are {', '.join(TOOLS)}")
    lines = []
    for name in asked:
        tool = TOOLS[name]
        print(f"== {name}: {', '.join(tool.packages)}", flush=True)
        cases = ROOT / "build" / "foreign" / name / "cases"
        count = write_cases(tool, cases)
        try:
            python = environment(name, tool)
        except subprocess.CalledProcessError:
            lines.append((name, "no environment", count))
            continue
        script = Path(__file__).parent / tool.script
        code = subprocess.run([str(python), str(script), str(cases)], cwd=cases).returncode
        lines.append((name, "same weights" if code == 0 else "DIFFERENT", count))
    print(f"\n{'tool':28}{'layers':>8}  result")
    for name, result, count in lines:
        print(f"{name:28}{count:>8}  {result}")
    return 0 if all(result == "same weights" for _, result, _ in lines) else 1


if __name__ == "__main__":
    sys.exit(main())
