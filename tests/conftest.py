"""What every test file shares: deterministic hypothesis, two threads, the `big` mark, and where shared material lies."""

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import Any

import hypothesis
import pytest
import torch

sys.path.insert(0, str(Path(__file__).parent))  # oracle.py, samples.py

SHARED = Path(__file__).parents[1] / ".." / "shared"

hypothesis.settings.register_profile(
    "lowbit",
    deadline=None,
    max_examples=int(os.environ.get("LOWBIT_EXAMPLES", "25")),
    derandomize=True,
    suppress_health_check=[hypothesis.HealthCheck.too_slow, hypothesis.HealthCheck.function_scoped_fixture],
)
hypothesis.settings.load_profile("lowbit")


def pytest_configure(config: pytest.Config) -> None:
    config.addinivalue_line("markers", "gpu: needs a CUDA device; skipped without one (make test-gpu runs these alone)")
    config.addinivalue_line("markers", "big: needs several GiB of memory; skipped where they are not free")


def free_gib() -> float:
    """GiB of memory that a new allocation can have, 0 where the system does not say."""
    try:
        lines = Path("/proc/meminfo").read_text().splitlines()
    except OSError:
        return 0.0
    return next(int(line.split()[1]) / 2**20 for line in lines if line.startswith("MemAvailable:"))


def pytest_runtest_setup(item: pytest.Item) -> None:
    if item.get_closest_marker("gpu") and not torch.cuda.is_available():
        pytest.skip("needs a CUDA device")
    if item.get_closest_marker("big") and free_gib() < 12:
        pytest.skip(f"needs 12 GiB of free memory, found {free_gib():.1f}")


def _gpu_outcomes(config: pytest.Config) -> dict[str, int] | None:
    """Of a run of ``-m gpu`` alone: how many tests had which outcome."""
    reporter = config.pluginmanager.get_plugin("terminalreporter")
    if reporter is None or config.option.markexpr != "gpu":
        return None
    return {name: len(reporter.stats.get(name, [])) for name in ("passed", "failed", "error", "skipped")}


def pytest_sessionfinish(session: pytest.Session) -> None:
    """A run of the GPU tests in which none ran has shown nothing."""
    outcomes = _gpu_outcomes(session.config)
    if outcomes is not None and not outcomes["passed"] and session.exitstatus == 0:
        session.exitstatus = 1


def pytest_terminal_summary(terminalreporter: Any, config: pytest.Config) -> None:
    outcomes = _gpu_outcomes(config)
    if outcomes is not None:
        ran = outcomes["passed"] + outcomes["failed"]
        told = ", ".join(f"{count} {name}" for name, count in outcomes.items())
        terminalreporter.write_line(f"GPU tests: {ran} ran ({told})")


@pytest.fixture(scope="session")
def shared() -> Path:
    """The folder of shared material; the test is skipped where it is absent."""
    if not SHARED.is_dir():
        pytest.skip("no ../shared beside the project")
    return SHARED


@pytest.fixture(autouse=True)
def _seeded() -> None:
    torch.manual_seed(0)
