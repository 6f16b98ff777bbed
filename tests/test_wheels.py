"""The checks that `make wheels hub` stand on: each finds what it is for. The files themselves are built there, not here."""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path
from types import ModuleType

import pytest

from lowbit import native

ROOT = Path(__file__).parents[1]
KNOWN = {"aoti_torch_old": (0, 0), "aoti_torch_of_2_10": (2, 10), "aoti_torch_of_2_11": (2, 11)}


def script(folder: str, name: str) -> ModuleType:
    sys.path.insert(0, str(ROOT / folder))
    try:
        import importlib

        return importlib.import_module(name)
    finally:
        sys.path.pop(0)


abi = script("wheels", "abi")
shell = script("wheels", "shell")
hub = script("hub", "build")
needs_tools = pytest.mark.skipif(not (shutil.which("g++") and shutil.which("readelf")), reason="no g++ or no readelf")


def library(folder: Path, body: str, *options: str) -> Path:
    (folder / "x.cpp").write_text(body)
    out = folder / "x.so"
    command = ["g++", "-shared", "-fPIC", *options, str(folder / "x.cpp"), "-o", str(out)]
    subprocess.run(command, check=True, capture_output=True)
    return out


@needs_tools
@pytest.mark.parametrize(
    ("body", "options", "said"),
    [
        ('extern "C" void aoti_torch_of_2_11(); void f() { aoti_torch_of_2_11(); }', (), "a function of torch 2.11"),
        ('extern "C" void aoti_torch_unheard(); void f() { aoti_torch_unheard(); }', (), "in no header"),
        ("namespace c10 { void warn(int); } void f() { c10::warn(1); }", (), "an unstable symbol of torch"),
        ("namespace at { struct T { void g() const; }; } void f(at::T& t) { t.g(); }", (), "an unstable symbol of torch"),
        ('extern "C" void PyList_New(); void f() { PyList_New(); }', (), "a symbol of Python"),
        ("int x;", ("-Wl,--no-as-needed", "-lgomp"), "needs libgomp.so.1"),
        ("int x;", ("-Wl,-rpath,/usr/lib/x",), "has a run path"),
        ("int x;", (), "no symbol of torch found"),
    ],
)  # fmt: skip
def test_a_library_that_no_wheel_may_hold_is_named(
    tmp_path: Path, body: str, options: tuple[str, ...], said: str
) -> None:
    assert any(said in line for line in abi.check(library(tmp_path, body, *options), KNOWN))


@needs_tools
def test_a_version_newer_than_the_platform_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    body = '#include <cstdio>\nextern "C" void aoti_torch_of_2_10(); void f() { aoti_torch_of_2_10(); std::puts(""); }'
    file = library(tmp_path, body)
    assert abi.check(file, KNOWN) == []
    monkeypatch.setitem(abi.LIMITS, "GLIBC", (2, 1))
    assert any(line.startswith("puts needs GLIBC_2.") for line in abi.check(file, KNOWN))


def test_the_versions_of_torchs_functions_are_read_from_its_headers(tmp_path: Path) -> None:
    folder = tmp_path / "torch" / "csrc" / "stable" / "c"
    folder.mkdir(parents=True)
    (folder / "shim.h").write_text(
        "int torch_a(int);\n#ifdef X\nint torch_b(\n    int);\n#if TORCH_FEATURE_VERSION >= TORCH_VERSION_2_12_0\n"
        "int torch_c(int);\n#endif\n#endif\nint torch_d(void);\n"
    )
    assert abi.shims(tmp_path) == {"torch_a": (0, 0), "torch_b": (0, 0), "torch_c": (2, 12), "torch_d": (0, 0)}
    real = abi.shims(abi.torch_headers())
    assert real["aoti_torch_delete_tensor_object"] <= (2, 10) and max(real.values()) >= (2, 11)


@needs_tools
@pytest.mark.skipif(not native.COMPILED, reason="no compiled kernels here")
@pytest.mark.parametrize("file", [native.LIBRARY, native.CUDA_LIBRARY], ids=["cpu", "cuda"])
def test_the_libraries_of_this_build_may_be_in_a_wheel(file: Path) -> None:
    if not file.exists():
        pytest.skip("no CUDA library in this build")
    assert abi.check(file, abi.shims(abi.torch_headers())) == []


def test_the_fallback_variant_is_whole_and_imports_nothing_of_ours(tmp_path: Path) -> None:
    """As `kernels` would import it, without `kernels` and without lowbit."""
    assert hub.main(["--only", "noarch", "--out", str(tmp_path)]) == 0
    folder = tmp_path / "build" / "torch-cpu"
    metadata = json.loads((folder / "metadata.json").read_text())
    files = {f.relative_to(folder).as_posix() for f in folder.rglob("*") if f.is_file() and f.suffix != ".pyc"}
    assert set(metadata["digest"]["files"]) == files - {"metadata.json"} and metadata["backend"] == {"type": "cpu"}
    other = json.loads((tmp_path / "build" / "torch-cuda" / "metadata.json").read_text())
    assert other["id"] != metadata["id"]
    code = (
        "import importlib.util, sys, torch, warnings\nsys.modules['lowbit'] = None\n"
        "from importlib import metadata\nmetadata.version = lambda name: '0.14.1'\n"
        "spec = importlib.util.spec_from_file_location(sys.argv[1], sys.argv[2] + '/__init__.py')\n"
        "k = importlib.util.module_from_spec(spec); sys.modules[sys.argv[1]] = k\n"
        "with warnings.catch_warnings(record=True) as caught:\n"
        "    warnings.simplefilter('always'); spec.loader.exec_module(k)\n"
        "(said,) = [str(w.message) for w in caught if 'lowbit' in str(w.message)]\n"
        "assert 'found kernels 0.14.1, torch ' in said and said.endswith(\"pip install -U 'kernels>=0.15.1'\"), said\n"
        "assert k._requires.number('0.15.1rc2') == k._requires.OLDEST_KERNELS > k._requires.number('0.9')\n"
        "y = k.QuantLinear.from_linear(torch.nn.Linear(64, 8), 'w4a8')(torch.randn(3, 64))\n"
        "assert y.shape == (3, 8) and hasattr(torch.ops, sys.argv[1]) and 'layers' in k.__all__\n"
        "print(sorted(k.__all__) == sorted(n for n in vars(k) if not n.startswith('_')))\n"
    )
    done = subprocess.run([sys.executable, "-c", code, metadata["id"], str(folder)], capture_output=True, text=True)
    assert done.returncode == 0 and done.stdout.strip() == "True", done.stderr


def test_a_download_that_fails_or_hangs_is_skipped_aloud(capsys: pytest.CaptureFixture[str]) -> None:
    """And is a failure where nothing may be skipped; a check that fails is never a skip."""
    says = "print('WARNING: slow'); print('ERROR: no route'); print('tail'); raise SystemExit(1)"
    for strict in (False, True):
        parts = shell.Parts(strict)
        parts.part("a", lambda: shell.fetch("torch", sys.executable, "-c", says))
        parts.part("b", lambda: shell.fetch("it", sys.executable, "-c", "import time; time.sleep(60)", seconds=0.2))
        parts.part("c", lambda: shell.fetch("lists", "no-such-command-here"))
        parts.part("d", lambda: None)
        assert parts.end() == strict
        out = capsys.readouterr().out.splitlines()[-4:]
        assert out[0] == "SKIPPED a: torch could not be downloaded: ERROR: no route"
        assert out[1:3] == [
            "SKIPPED b: it: no end of the download in 0 seconds",
            "SKIPPED c: lists: no-such-command-here not found",
        ]
        assert out[3].startswith("== d: ")
    with pytest.raises(SystemExit, match="failed with 3"):
        shell.Parts().part("e", lambda: shell.run(sys.executable, "-c", "raise SystemExit(3)"))


def test_an_environment_that_cannot_be_had_is_asked_for_once(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """And leaves nothing behind. The modules of wheels/ are loaded by path: hub/ has a build.py too."""
    import importlib.util

    monkeypatch.syspath_prepend(str(ROOT / "wheels"))
    spec = importlib.util.spec_from_file_location("wheels_build", ROOT / "wheels" / "build.py")
    assert spec and spec.loader
    wheels = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(wheels)
    asked = []

    def fails(what: str, *command: object) -> None:
        asked.append(what)
        raise shell.Unavailable("no network")

    monkeypatch.setattr(wheels, "OUT", tmp_path)
    monkeypatch.setattr(wheels, "fetch", fails)
    monkeypatch.setattr(wheels, "run", lambda *command: (tmp_path / "env-9.9").mkdir())
    for _ in range(2):
        with pytest.raises(shell.Unavailable, match="no network"):
            wheels.environment("9.9")
    assert asked == ["torch 9.9"] and not (tmp_path / "env-9.9").exists()
    assert wheels.pinned().count(".") == 2


@pytest.mark.skipif(not (shutil.which("bash") and shutil.which("timeout")), reason="no bash or no timeout")
@pytest.mark.parametrize(
    ("test", "wheels", "status"),
    [("exit 0", "exit 0", 0), ("exit 2", "exit 0", 1), ("exit 0", "exit 3", 1), ("exit 0", "sleep 60", 1)],
    ids=["both pass", "tests fail", "wheels fail", "wheels hang"],
)
def test_continuous_integration_fails_where_either_does(tmp_path: Path, test: str, wheels: str, status: int) -> None:
    """.ci/run with a make of ours: both run whatever the first gave, both are reported, a skip is said again."""
    (tmp_path / ".ci").mkdir()
    script = (ROOT / ".ci" / "run").read_text()
    script = re.sub(r"minutes_in_all=\d+", "minutes_in_all=0", script).replace("left > 60 ? left : 60", "1")
    (tmp_path / ".ci" / "run").write_text(script)
    tools = tmp_path / "tools"
    tools.mkdir()
    make = f'echo "ran $*"; case "$*" in "-k test") {test};; *) echo "SKIPPED a part: no network"; {wheels};; esac'
    for name, body in (("make", make), ("apt-get", "exit 1")):
        (tools / name).write_text(f"#!/bin/bash\n{body}\n")
        (tools / name).chmod(0o755)
    environment = {**os.environ, "PATH": f"{tools}:{os.environ['PATH']}"}
    command = ["bash", str(tmp_path / ".ci" / "run")]
    done = subprocess.run(command, capture_output=True, text=True, env=environment, timeout=60)
    out = done.stdout
    assert done.returncode == status, out + done.stderr
    assert "ran -k test" in out and "ran -k wheels hub" in out and ".ci/run: SKIPPED a part: no network" in out
    ends = re.findall(r"^\.ci/run: make (.*) exited with (\d+) after", out, re.MULTILINE)
    assert ends[0] == ("-k test", test[5:]) and ends[1][0] == "-k wheels hub"
    assert ("wheels-hub was stopped after 1 seconds" in done.stderr) == (wheels == "sleep 60") == (ends[1][1] == "124")


def test_the_hub_refuses_what_its_rules_forbid() -> None:
    assert "native.py" in hub.closure() and "checkpoint/files.py" not in hub.closure()
    with pytest.raises(SystemExit, match="imports safetensors, accepted in the hub"):
        list(hub.imports("x.py", "import safetensors.torch"))
    assert list(hub.imports("nn/x.py", "from ..layouts import panels")) == ["layouts", "layouts/panels"]
    assert list(hub.imports("x.py", "from . import ops")) == ["ops"]
    ids = {hub.identity(variant, "0" * 12) for variant in hub.VARIANTS}
    assert len(ids) == len(hub.VARIANTS)


def test_the_namespace_depends_on_the_sources(monkeypatch: pytest.MonkeyPatch) -> None:
    before = hub.tree_hash()
    assert hub.tree_hash() == before
    read = Path.read_bytes
    for changed in (
        hub.PUBLIC / "layers" / "__init__.py",
        ROOT / "csrc" / "torch_ops.cpp",
        hub.PACKAGE / "reference.py",
    ):
        monkeypatch.setattr(Path, "read_bytes", lambda self, c=changed: read(self) + (b"#" if self == c else b""))
        assert hub.tree_hash() != before
