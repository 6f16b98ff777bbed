"""Every block of the README and of docs/*.md runs here, on tiny models that lie where the pages say; doc_blocks.py has the rules."""

from __future__ import annotations

import decimal
import doctest
import json
import re
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

import doc_blocks
import samples
import tiny_omnivoice
from doc_blocks import ROOT, Wrong, blocks, check
from lowbit.cli import main

transformers = pytest.importorskip("transformers")
TEXT = "The quick brown fox jumps over the lazy dog; it was not amused. " * 60
PAGES = [ROOT / "README.md", ROOT / "hub" / "quant-matmul" / "README.md", *sorted((ROOT / "docs").rglob("*.md"))]
SPOKEN = {"text": "Two words.", "ref_audio": "voice.wav", "ref_text": "The harbour was quiet."}


def plain(place: Path) -> Path:
    """A llama of 259 tokens: three special ones and every byte."""
    tokenizer = samples.byte_tokenizer(bos_token="<s>", eos_token="</s>", pad_token="<pad>")
    torch.manual_seed(0)
    config = transformers.LlamaConfig(
        vocab_size=len(tokenizer), hidden_size=64, intermediate_size=128, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=2, bos_token_id=1, eos_token_id=2, pad_token_id=0, initializer_range=0.2,
    )  # fmt: skip
    transformers.LlamaForCausalLM(config).save_pretrained(place)
    tokenizer.save_pretrained(place)
    return place


def gptq(place: Path) -> Path:
    """The same as a GPTQ checkpoint."""
    made = plain(place.with_name("plain")), place.with_name("ours")
    assert main(["quantize", str(made[0]), str(made[1]), "--method", "rtn", "--group", "32", "--json"]) == 0
    assert main(["convert", str(made[1]), str(place), "--to", "gptq", "--json"]) == 0
    for folder in made:
        shutil.rmtree(folder)
    return place


def text(place: Path) -> Path:
    place.write_text(TEXT, "utf-8")
    return place


def speech(place: Path) -> Path:
    """Paths in it are whole ones: it is not read where it was made."""
    folder = place.with_suffix("")
    folder.mkdir()
    rows = [json.loads(line) for line in samples.speech(folder).read_text().splitlines()]
    place.write_text("".join(json.dumps({**row, "audio": str(folder / row["audio"])}) + "\n" for row in rows))
    return place


def voice(place: Path) -> Path:
    return samples.wav(place, 2.0, 24000)


def prompts(place: Path) -> Path:
    place.write_text(json.dumps(SPOKEN) + "\n", "utf-8")
    return place


# What the pages call by these names, and what lies there while they run.
NAMES: dict[str, Callable[[Path], Path]] = {
    "path/to/model": plain, "path/to/checkpoint": gptq, "MODEL": plain, "OTHER": plain, "WHISPER": samples.whisper,
    "k2-fsa/OmniVoice": tiny_omnivoice.write, "calibration.txt": text, "c4.txt": text, "wiki.txt": text,
    "speech.jsonl": speech, "other_clips.jsonl": speech, "clips.jsonl": speech, "voice.wav": voice,
    "prompts.jsonl": prompts, "bench": lambda place: ROOT / "bench",
}  # fmt: skip
# What the pages say for a GPU, for text of real length or for real sizes, and what is run here instead.
HERE = {
    "--device cuda": "--device cpu", 'device_map="cuda:0", dtype=torch.float16': 'device_map="cpu", dtype=torch.float32',
    "--tokens 8192": "--tokens 256", "--skip 60000": "--skip 60", "--skip 100000": "--skip 100",
    "--steps 32 --audio 10": "--steps 2 --audio 0.4", "--dtype float16": "--dtype float32",
    "--shape 4096x4096": "--shape 64x128",
    "(layer, fullgraph=True)(": '(layer, fullgraph=True, backend="eager")(',
    "from kernels import get_kernel": "from lowbit import functional",
    'get_kernel("lowbit/quant-matmul", version=1, trust_remote_code=True)\n\n': "functional\n\n",
    "(0, 16, (4096, 4096))": "(0, 16, (64, 4096))", "(4096, 32)": "(64, 32)",
}  # fmt: skip
# Options that make a command shorter here.
SHORTER = {
    "quantize": ["--tokens", "64"], "run": ["--max-new-tokens", "4"], "speak": ["--steps", "2", "--duration", "0.4"],
    "eval": ["--context", "64"], "bench": ["--seconds", "0.002"],
}  # fmt: skip


def omnivoice() -> bool:
    try:
        import omnivoice  # noqa: F401
    except (ImportError, OSError):
        return False
    return True


@pytest.fixture(scope="module")
def shelf(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("shelf")


@pytest.fixture()
def place(tmp_path: Path, shelf: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[[str], None]]:
    """The current folder, empty; a call puts there what a page names. What the page changes outside is put back."""

    def lay(page: str) -> None:
        for name, make in NAMES.items():
            if name not in page:
                continue
            kept = shelf / name.replace("/", "-")
            if not kept.exists():
                kept.parent.mkdir(exist_ok=True)
                made = make(kept)
                kept = made if make is not NAMES["bench"] else kept
                if not kept.exists():
                    kept.symlink_to(made)
            (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
            (tmp_path / name).symlink_to(kept)

    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    threads = torch.get_num_threads()
    yield lay
    torch.set_num_threads(threads)
    from lowbit import disable_transformers

    disable_transformers()


@pytest.mark.parametrize("page", [str(page.relative_to(ROOT)) for page in PAGES])
def test_every_block_of_the_page_runs(page: str, place: Callable[[str], None]) -> None:
    """In the order of the page, in one folder and one namespace: what a block leaves, the next one has."""
    source = (ROOT / page).read_text("utf-8")
    found = list(blocks(page, source))
    wanting = set() if omnivoice() else {block for block in found if block.why is None and "OmniVoice" in block.text}
    place("".join(block.text for block in found if block.why is None and block not in wanting))
    space: dict[str, Any] = {"__name__": "__main__"}
    for block in found:
        here = block.text
        for theirs, ours in HERE.items():
            here = here.replace(theirs, ours)
        check(block._replace(text=here), space, block not in wanting, SHORTER)
    if wanting:
        pytest.skip(f"without the package omnivoice {len(wanting)} blocks were parsed only; all others ran")


# ---- the rules themselves: a block that does not run is found -------------------------------------------------------------
BAD = {
    "raises": "```python\n1 / 0\n```\n",
    "no such name": "```python\nfrom lowbit import frobnicate\n```\n",
    "no such name, marked": "<!-- not run: a GPU -->\n```python\nfrom lowbit.models import frobnicate\n```\n",
    "no Python, marked": "<!-- not run: a GPU -->\n```python\nlowbit run x\n```\n",
    "no such command": "```sh\nlowbit frobnicate\n```\n",
    "no such option, marked": "<!-- not run: a GPU -->\n```sh\nlowbit run MODEL --prompt x --frobnicate\n```\n",
    "no such option of a bench, marked": "<!-- not run: a GPU -->\n```sh\nlowbit bench rtf --frobnicate\n```\n",
    "fails": "```sh\nlowbit inspect nowhere\n```\n",
    "another program": "```sh\nmake test\n```\n",
    "no such option behind another program, marked": "<!-- not run: processes -->\n```sh\nX=1 torchrun -m lowbit run M --frobnicate\n```\n",
    "no such target, marked": "<!-- not run: minutes -->\n```sh\nmake frobnicate\n```\n",
    "kind not said": "```\nlowbit run x\n```\n",
    "kind unknown": "```console\nlowbit run x\n```\n",
    "commands as text": "```text\nlowbit run x --prompt y\n```\n",
    "no JSON": "```json\n{'a': 1}\n```\n",
    "no reason": "<!-- not run: -->\n```sh\nmake test\n```\n",
    "a mark of another form": "<!-- skip -->\n```sh\nmake test\n```\n",
    "no end": "```sh\nmake test\n",
    "second of two": "```sh\nlowbit roofline --device l4 --linear 7x64x64 && lowbit frobnicate\n```\n",
}


@pytest.mark.parametrize("case", BAD)
def test_a_block_that_is_wrong_is_found(case: str, place: Callable[[str], None]) -> None:
    with pytest.raises(Wrong, match="^page.md:"):
        for block in blocks("page.md", BAD[case]):
            check(block, {})


def test_what_is_right_passes_and_leaves_its_names_and_files(place: Callable[[str], None], tmp_path: Path) -> None:
    page = (
        "```python\nx = 3\n```\n```python\nassert x == 3\n```\n<!-- not run: downloads -->\n```sh\npip install lowbit\n"
        "make test WHEELS=x\n```\n   ```sh\n   lowbit roofline --device l4 \\\n   --linear 7x64x64 --json > found.json  # x\n   ```\n"
        "```text\na drawing\n```\n"
    )
    space: dict[str, Any] = {}
    found = list(blocks("page.md", page))
    for block in found:
        check(block, space)
    assert [(block.kind, block.line) for block in found] == [
        ("python", 1), ("python", 4), ("sh", 8), ("sh", 12), ("text", 16),
    ]  # fmt: skip
    assert space["x"] == 3 and json.loads((tmp_path / "found.json").read_text())


@pytest.mark.parametrize("page", [str(page.relative_to(ROOT)) for page in PAGES])
def test_commands_in_the_text_name_options_that_there_are(page: str) -> None:
    wrong = []
    for where, words in doc_blocks.inline_commands(page, (ROOT / page).read_text("utf-8")):
        command, *rest = words.split()
        if command not in doc_blocks.COMMANDS:
            wrong.append(f"{where}: lowbit {command}")
            continue
        name = f"{command} {rest[0]}" if command == "bench" and rest else command
        known = doc_blocks.options_of(name) if any(word.startswith("-") for word in rest) else set()
        wrong += [
            f"{where}: lowbit {name} {word}"
            for word in rest
            if re.match("-+[a-z]", word) and word.split("=")[0] not in known
        ]
    assert wrong == []


def test_sessions_in_the_pages_say_what_python_says() -> None:
    pages = [page for page in PAGES if ">>> " in page.read_text("utf-8")]
    assert ROOT / "docs" / "layouts.md" in pages
    for page in pages:
        result = doctest.testfile(str(page), module_relative=False, encoding="utf-8")
        assert result.attempted and not result.failed, page.name


# ---- figures are those of docs/numbers.md --------------------------------------------------------------------------------
NATIVE, LLAMA = "| lowbit native | {} |", "| llama.cpp Q4_0 | {} |"
HADAMARD, GPTQ = "| w4 g64 symmetric, smoothing and Hadamard | a8-token |", "| w4 g64 {}, gptq | a8 |"
PEER, RTN = "| GPTQModel 7.7.0, g64 {} | a16 |", "| w4 g64 asymmetric, rtn | a8 |"
AUTO_ROUND = "| auto-round 0.16.1, g64 symmetric, 200 iterations | a16 |"
EPYC, XEON = "| {} | 1 | gptqmodel TorchAtenLinear |", "| 1 | 1 | ggml Q4_0 {} |"
# (page, what it says, where each number is: the beginning of a row, behind the shape, and the cell)
SAID: list[tuple[str, str, list[tuple[str, int]]]] = [
    ("README.md", "decodes {:.1f} tokens a second; llama.cpp Q4_0 {:.1f}, torch bfloat16 {:.1f}",
     [(NATIVE.format(1), 3), (LLAMA.format(1), 3), ("| torch bfloat16 | 1 |", 3)]),
    ("README.md", "factor {:.4f} in w4a8, {:.4f} in fp16; stock {:.4f}",
     [("| w4a8 | 0.", 4), ("| fp16\\* |", 4), ("| stock | 0.", 4)]),
    ("README.md", "× {:.3f} and {:.3f} on two texts at {:.2f} bits a weight", [(HADAMARD, 4), (HADAMARD, 6), (HADAMARD, 3)]),
    ("README.md", "× {:.3f} and {:.3f} at {:.2f} |", [(AUTO_ROUND, 4), (AUTO_ROUND, 6), (AUTO_ROUND, 3)]),
    ("README.md", "one row: {:.3f} ms; torch's own 4-bit product {:.2f} times",
     [("| 1 | 1 | lowbit w4a8 token amx |", 4), ("| 1 | 1 | torch int4pack bfloat16 |", 9)]),
    ("docs/coming-from.md", "defaults {:.3f} and {:.3f} symmetric, {:.3f} and {:.3f} asymmetric;",
     [(PEER.format(s), c) for s in ("symmetric", "asymmetric") for c in (4, 6)]),
    ("docs/coming-from.md", "int8 activations, {:.3f} and {:.3f}, {:.3f} and {:.3f};",
     [(GPTQ.format(s), c) for s in ("symmetric", "asymmetric") for c in (4, 6)]),
    ("docs/coming-from.md", "--rank 0` {:.3f} and {:.3f} (same", [(HADAMARD, 4), (HADAMARD, 6)]),
    ("docs/coming-from.md", "takes {:.1f} times as long as w4a8 for one row, {:.1f} times for 128",
     [(EPYC.format(1), 9), (EPYC.format(128), 9)]),
    ("docs/coming-from.md", "× {:.2f} and {:.2f} at 4 bits in groups of 64, against × {:.2f} and {:.2f} for",
     [(RTN, 4), (RTN, 6), (HADAMARD, 4), (HADAMARD, 6)]),
    ("docs/coming-from.md", "Q4_0: {:.1f} tokens a second against {:.1f}, prefill {:.0f} against {:.0f}; on two threads {:.1f} against {:.1f}",
     [(NATIVE.format(1), 3), (LLAMA.format(1), 3), (NATIVE.format(1), 6), (LLAMA.format(1), 6), (NATIVE.format(2), 3), (LLAMA.format(2), 3)]),
    ("docs/coming-from.md", "prompt are {:.3f} from float32's against {:.3f}", [(NATIVE.format(1), 15), (LLAMA.format(1), 15)]),
    ("docs/coming-from.md", "way: {:.0f} MB resident beyond an interpreter with torch against {:.0f} beyond a bare one, and {:.0f} against {:.0f} at",
     [(NATIVE.format(1), 9), (LLAMA.format(1), 9), (NATIVE.format(1), 10), (LLAMA.format(1), 10)]),
    ("docs/coming-from.md", "Q4_0 takes {:.2f} times as long there and {:.2f} times", [(XEON.format("haswell"), 9), (XEON.format("zen4"), 9)]),
    ("docs/coming-from.md", "both: × {:.3f} and × {:.3f} at", [("| w4a4 rank 16 | a4 |", 4), ("| w4a4 rank 16, iterative | a4 |", 4)]),
]  # fmt: skip


def measured(row: str, cell: int) -> decimal.Decimal:
    """A number of docs/numbers.md: of the first row that begins so, or does behind its shape."""
    shape, lines = "| 4096×4096 ", (ROOT / "docs" / "numbers.md").read_text("utf-8").splitlines()
    found = next(line for line in lines if line.startswith(row) or line.startswith(shape + row))
    cells = found.removeprefix(shape).split("|")
    number = re.match(r"[*\s]*([\d.]+)", cells[cell])
    assert number, (row, cell, cells[cell])
    return decimal.Decimal(number[1])


def test_figures_are_those_that_were_measured() -> None:
    said: dict[str, list[str]] = {}
    for page, words, places in SAID:
        with decimal.localcontext(decimal.Context(rounding=decimal.ROUND_HALF_UP)):
            told = words.format(*(measured(*place) for place in places))
        assert told in " ".join((ROOT / page).read_text("utf-8").split()), (page, told)
        said.setdefault(page, []).append(told)
    table = [
        line.split("|")[2] for line in (ROOT / "README.md").read_text("utf-8").splitlines() if line.startswith("| ")
    ]
    told = " ".join(said["README.md"])
    assert [n for n in re.findall(r"\d+\.\d+", " ".join(table)) if n not in told] == []
