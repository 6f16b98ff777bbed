"""What the layout promises: what objects export, which way imports flow, what is public, what no file may say."""

from __future__ import annotations

import ast
import re
import shutil
import subprocess
import warnings
from pathlib import Path

import pytest

import lowbit
from lowbit.dispatch import KERNELS
from lowbit.formats import FORMATS
from lowbit.layouts import LAYOUTS

ROOT = Path(__file__).parents[1]
# (folder, ending) -> lines that are a habit; more is reported, not refused
HABITS = {("src", ".py"): 300, ("csrc", ".h"): 420, ("csrc", ".cpp"): 420, ("csrc", ".cu"): 420, ("csrc", ".cuh"): 420}
LAYERS = (
    ("cli",), ("doctor",), ("selftest",), ("cluster",), ("bench",), ("prove",), ("omnivoice",), ("engines",), ("models", "functional"), ("nn",), ("cuda",), ("dispatch",), ("plain",),
    ("formats", "quantize", "layouts", "ops_cuda", "checkpoint"), ("ops",), ("reference",), ("types", "native"),
)  # fmt: skip


def sources() -> list[Path]:
    """Every file that is, or will be, in the repository."""
    if shutil.which("git") and (ROOT / ".git").exists():
        command = ["git", "ls-files", "--cached", "--others", "--exclude-standard", "-z"]
        listed = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True).stdout.split("\0")
        files = [ROOT / name for name in listed if name]
    else:
        skipped = {".venv", "build", "dist", "__pycache__", ".git"}
        files = [f for f in ROOT.rglob("*") if not skipped & set(f.relative_to(ROOT).parts) and f.suffix != ".so"]
    return sorted(f for f in files if f.is_file() and not f.is_symlink())


def texts() -> dict[str, str]:
    out = {}
    for file in sources():
        data = file.read_bytes()
        if b"\0" not in data[:8192]:
            out[str(file.relative_to(ROOT))] = data.decode("utf-8")
    return out


def test_the_repository_has_its_parts() -> None:
    parts = (
        "Makefile .ci/run README.md LICENSE pyproject.toml CMakeLists.txt .clang-format docs/tour.md docs/formats.md "
        "docs/layouts.md docs/kernels.md docs/adding.md requirements/torch.txt requirements/all.txt demo/demo.py"
    ).split()
    assert [part for part in parts if not (ROOT / part).is_file()] == []
    assert "make" in (ROOT / ".ci/run").read_text() and (ROOT / ".ci/run").stat().st_mode & 0o100


def test_no_file_names_a_machine_path_or_a_registry_host() -> None:
    # put together here, so that this file does not hold what it looks for
    folders = "|".join(("work", "root", "tmp", "home", "opt"))
    path = re.compile(r"(?<![\w.$}~/-])/(?:" + folders + r")/[\w.]+")
    names = (
        "py" + "pi",
        "python" + "hosted",
        "npm" + "js",
        "debi" + "an",
        "crat" + "es",
        "ana" + "conda",
        "dock" + "er",
    )
    hosts = re.compile(r"\b(?:" + "|".join(names) + r")\.(?:org|io|com|net)\b")
    assert path.search("in /wor" + "k/x") and hosts.search("at files.py" + "pi.org/x")  # neither pattern is blind
    found = []
    for name, text in texts().items():
        for number, line in enumerate(text.splitlines(), 1):
            found += [f"{name}:{number}: {m[0]}" for pattern in (path, hosts) for m in pattern.finditer(line)]
    assert found == []


def test_the_public_names_are_those_of_the_contract() -> None:
    names = (
        "ColwiseQuant FormatError LowbitConfig QuantLinear QuantizedWeight RowwiseQuant disable_transformers "
        "enable_transformers explain load parallelize quantize save"
    ).split()
    assert sorted(lowbit.__all__) == names
    for name in names:
        assert callable(getattr(lowbit, name)), name
    public = {n for n in dir(lowbit) if not n.startswith("_")}
    modules = {f.stem for f in (ROOT / "src" / "lowbit").iterdir()} | {"annotations"}
    extra = public - set(names) - modules - {"sys", "import_module", "ModuleType", "TYPE_CHECKING", "Any"}
    assert extra == set()


FUNCTIONAL = (
    "pack_w4 from_gptq from_awq dequant_w4 quantize_activation w4a8_linear w8a8_linear fp16_gemv QuantLinear".split()
)


@pytest.mark.parametrize("name", FUNCTIONAL)
def test_the_nine_tensor_level_names_are_there(name: str) -> None:
    from lowbit import functional

    assert name in functional.__all__ and callable(getattr(functional, name))
    assert len(functional.__all__) == len(FUNCTIONAL)


def test_every_format_and_layout_is_named_in_a_test() -> None:
    here = Path(__file__).name
    tested = "\n".join(f.read_text("utf-8") for f in (ROOT / "tests").rglob("*.py") if f.name != here)
    assert {"gptq", "gptq_v2", "awq", "compressed-tensors", "lowbit"} <= set(FORMATS)
    missing = [name for name in FORMATS if f'"{name}"' not in tested and "in FORMATS" not in tested]
    missing += [name for name in LAYOUTS if f'"{name}"' not in tested and "LAYOUTS" not in tested]
    assert missing == []


def test_every_kernel_row_reads_a_layout_that_exists() -> None:
    assert [k.name for k in KERNELS if k.layout not in LAYOUTS and k.layout != "plain"] == []
    assert len({k.name for k in KERNELS}) == len(KERNELS)


def test_imports_flow_down() -> None:
    """The same contract as import-linter's, by our own reading: no file imports from its own row's neighbours or above."""
    row_of = {name: row for row, names in enumerate(LAYERS) for name in names}
    wrong = []
    base = ROOT / "src" / "lowbit"
    for file in base.rglob("*.py"):
        relative = file.relative_to(base)
        mine = relative.parts[0].removesuffix(".py")
        if mine not in row_of:  # __init__ and __main__ of the package
            continue
        package = ["lowbit", *relative.parts[:-1]]
        for node in ast.walk(ast.parse(file.read_text("utf-8"))):
            targets: list[str] = []
            if isinstance(node, ast.Import):
                targets = [alias.name for alias in node.names]
            elif isinstance(node, ast.ImportFrom):
                start = package[: len(package) - node.level + 1] if node.level else []
                stem = ".".join([*start, *([node.module] if node.module else [])])
                targets = [stem] if stem != "lowbit" else [f"lowbit.{alias.name}" for alias in node.names]
            for target in targets:
                part = target.split(".")[1] if target.startswith("lowbit.") else mine
                if part != mine and part in row_of and row_of[part] <= row_of[mine]:
                    wrong.append(f"{relative}: {target}")
    assert wrong == []


def test_kernels_never_include_torch() -> None:
    folders, endings = ("cpu", "cuda"), ("*.h", "*.cpp", "*.cuh", "*.cu")
    native = [f for folder in folders for ending in endings for f in (ROOT / "csrc" / folder).rglob(ending)]
    assert native
    assert [f.name for f in native if re.search(r"#include\s*[<\"](torch|ATen|c10)", f.read_text())] == []


def test_files_keep_to_their_habitual_length() -> None:
    """A report, not a wall: long files are named in a warning."""
    long = [
        f"{name} has {text.count(chr(10))} lines, the habit is {most}"
        for name, text in texts().items()
        for (folder, ending), most in HABITS.items()
        if name.startswith(f"{folder}/") and name.endswith(ending) and text.count("\n") > most
    ]
    for line in long:
        warnings.warn(line, stacklevel=1)


OBJECTS = sorted(f for f in ROOT.glob("build/**/*.o") if f.parent.name == "isa")


@pytest.mark.skipif(not OBJECTS or not shutil.which("nm"), reason="no objects under build/, or no nm")
def test_an_isa_object_exports_its_table_and_nothing_else() -> None:
    """A second symbol could be a shared function compiled for an instruction set that the CPU lacks."""
    for file in OBJECTS:
        command = ["nm", "--defined-only", "--extern-only", "-C", str(file)]
        done = subprocess.run(command, capture_output=True, text=True, check=True)
        names = [line.split(maxsplit=2)[2] for line in done.stdout.splitlines()]
        assert len(names) == 1 and re.fullmatch(r"lowbit::cpu::k\w+Table", names[0]), (file.name, names)


def test_every_instruction_set_is_built_listed_and_named_alike() -> None:
    sets = sorted(f.stem for f in (ROOT / "csrc" / "cpu" / "isa").glob("*.cpp"))
    build, dispatch = (ROOT / "CMakeLists.txt").read_text(), (ROOT / "csrc/cpu/dispatch.cpp").read_text()
    for name in sets:
        table = (ROOT / f"csrc/cpu/isa/{name}.cpp").read_text()
        symbol = re.search(r"constinit const KernelTable (\w+) = \{\"(\w+)\"", table)
        assert symbol and symbol[2] == name, name
        assert symbol[1] in dispatch and re.search(rf"\b{name}\b", build), name


def test_the_drawings_of_the_layouts_are_what_pack_does() -> None:
    import doctest

    result = doctest.testfile(str(ROOT / "docs" / "layouts.md"), module_relative=False, encoding="utf-8")
    assert result.attempted >= 10 and result.failed == 0


def test_pages_name_files_that_exist() -> None:
    """Links between pages, and the files that the tour walks through."""
    wrong = []
    for page in [ROOT / "README.md", *(ROOT / "docs").glob("*.md")]:
        text = page.read_text("utf-8")
        targets = [page.parent / link for link in re.findall(r"\]\(([^)#:]+)\)", text)]
        targets += [ROOT / name for name in re.findall(r"`((?:src|csrc|tests|docs|demo)/[\w./-]+)`", text)]
        wrong += [f"{page.name}: {target}" for target in targets if not target.exists()]
    assert wrong == []


def test_the_tour_names_what_is_in_the_code() -> None:
    """Short names of files are the end of one that exists; every other word in backticks is one of the sources'."""
    tour = (ROOT / "docs" / "tour.md").read_text("utf-8")
    files = [name for name in texts() if name.startswith(("src/", "csrc/", "docs/"))]
    code = "\n".join(text for name, text in texts().items() if name.startswith(("src/", "csrc/")))
    words = set(re.findall(r"[\w-]+", code)) | {"nn"}
    wrong = []
    for named in set(re.findall(r"`([^`\n]+)`", tour)):
        if re.fullmatch(r"[\w./-]+\.(?:py|h|cpp|cu|cuh|md)", named):
            wrong += [] if any(f"/{file}".endswith(f"/{named}") for file in files) else [named]
        elif not named.endswith("/") and "=" not in named:
            found = re.findall(r"[A-Za-z_][\w-]{2,}", named.replace("MODEL", ""))
            wrong += [f"{named}: {word}" for word in found if word not in words]
    assert wrong == []
