"""Code blocks of the Markdown pages: what they are, whether they may be run here, and what is checked of those that may not.

A block says what it is: ```python, ```sh, ```json (a document a line) or ```text (drawings, output). One that cannot run here has, on the line above,
`<!-- not run: the reason -->`; then its Python is compiled and what it imports of lowbit looked up, its `lowbit` lines go through the
command's own parser, and a `make` target must be there. Everything else is run.
"""

from __future__ import annotations

import argparse
import ast
import contextlib
import importlib
import io
import json
import os
import re
import shlex
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

from lowbit import cli, doctor

ROOT = Path(__file__).parents[1]
KINDS = ("python", "sh", "json", "text")
FENCE = re.compile(r"^(?P<indent> *)```(?P<kind>\S*)\s*$")
MARK = re.compile(r"<!-- not run: (.*?)-->\s*$")
COMMANDS = "quantize convert inspect run eval explain profile roofline bench speak doctor".split()
SHELL = re.compile(
    rf"^\s*(?:\$ |lowbit (?:{'|'.join(COMMANDS)})\b|make |pip |python3? |torchrun |apt-get |git |cd |export )", re.M
)


class Block(NamedTuple):
    """``why``: the reason for which it is not run, None where it is."""

    page: str
    line: int
    kind: str
    text: str
    why: str | None

    @property
    def where(self) -> str:
        return f"{self.page}:{self.line}"


class Wrong(AssertionError):
    """A block that is not as the rules say, or does not run: one line with page, line and what is wrong."""


def blocks(page: str, text: str) -> Iterator[Block]:
    """The blocks of a page. Raises Wrong for a fence that does not say what it is, and for a mark without a reason."""
    lines = text.splitlines()
    at = 0
    while at < len(lines):
        fence = FENCE.match(lines[at])
        if fence is None:
            if "```" in lines[at] and lines[at].lstrip().startswith("```"):
                raise Wrong(f"{page}:{at + 1}: a fence that is none: {lines[at].strip()!r}")
            at += 1
            continue
        start, kind = at + 1, fence["kind"]
        end = next((i for i in range(start, len(lines)) if lines[i].strip() == "```"), None)
        if end is None:
            raise Wrong(f"{page}:{start}: a block that does not end")
        if kind not in KINDS:
            raise Wrong(f"{page}:{start}: a block of kind {kind!r}, accepted are {', '.join(KINDS)}")
        body = "\n".join(line.removeprefix(fence["indent"]) for line in lines[start:end]) + "\n"
        above = lines[at - 1] if at else ""
        mark = MARK.search(above)
        if "<!--" in above and (mark is None or not re.search(r"\w{3}", mark[1])):
            raise Wrong(f"{page}:{at}: accepted above a block is <!-- not run: the reason -->, found {above.strip()!r}")
        if kind == "text" and SHELL.search(body):
            raise Wrong(f"{page}:{start}: commands in a block of kind text")
        yield Block(page, start, kind, body, mark[1].strip() if mark else None)
        at = end + 1


def commands(text: str) -> Iterator[list[str]]:
    """The words of every command: comments off, lines that end in a backslash joined, && and ; taken apart."""
    for line in text.replace("\\\n", " ").splitlines():
        lexer = shlex.shlex(line, posix=True, punctuation_chars=";&|<>")
        lexer.whitespace_split = True
        lexer.commenters = "#"
        words: list[str] = []
        for word in lexer:
            if word in ("&&", ";"):
                yield words
                words = []
            else:
                words.append(word)
        if words:
            yield words


class _Parsed(BaseException):
    """Thrown where a command's parser has accepted its line, so that nothing runs."""


@contextlib.contextmanager
def _only_parsing() -> Iterator[None]:
    original = argparse.ArgumentParser.parse_args

    def parse(self: argparse.ArgumentParser, *args: Any, **kwargs: Any) -> Any:
        original(self, *args, **kwargs)
        raise _Parsed

    argparse.ArgumentParser.parse_args = parse  # type: ignore[method-assign, assignment]
    try:
        yield
    finally:
        argparse.ArgumentParser.parse_args = original  # type: ignore[method-assign]


def _lowbit(words: list[str], where: str, run: bool) -> str:
    """Through the command line's ``main``; what it printed. Wrong where it is refused, or fails."""
    out, err = io.StringIO(), io.StringIO()
    code: int | str | None = 0
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
        try:
            with contextlib.nullcontext() if run else _only_parsing():
                code = cli.main(words)
        except _Parsed:
            code = 0
        except SystemExit as stop:
            code = stop.code
    if code not in (0, None):
        raise Wrong(f"{where}: lowbit {shlex.join(words)}: exit code {code}: {err.getvalue().strip()[-400:]}")
    return out.getvalue()


def _shell(block: Block, run: bool, extra: dict[str, list[str]]) -> None:
    for words in commands(block.text):
        while re.fullmatch(r"[A-Z_]+=.*", words[0]):  # a variable for this command alone
            words = words[1:]
        if ["-m", "lowbit"] in [words[i : i + 2] for i in range(len(words))]:  # python -m, torchrun -m
            _lowbit(words[words.index("lowbit") + 1 :], block.where, run=False)
        head, rest = words[0], words[1:]
        target = None
        if rest[-2:-1] in ([">"], [">>"]):
            target, rest = (rest[-2], rest[-1]), rest[:-2]
        if head == "lowbit":
            said = _lowbit([*rest, *(extra.get(rest[0], []) if run else [])], block.where, run)
            if run and target is not None:
                with open(target[1], "a" if target[0] == ">>" else "w", encoding="utf-8") as file:
                    file.write(said)
        elif run and words[:3] == ["python", "-m", "lowbit.doctor"]:
            doctor.main(words[3:])
        elif run:
            raise Wrong(f"{block.where}: {head!r} cannot be run here: mark the block <!-- not run: the reason -->")
        elif head == "make":
            targets = {word for word in rest if not word.startswith("-") and "=" not in word}
            missing = targets - set(re.findall(r"^([\w-]+):", (ROOT / "Makefile").read_text(), re.MULTILINE))
            if missing:
                raise Wrong(f"{block.where}: make has no target {', '.join(sorted(missing))}")


def _imports(tree: ast.AST, where: str) -> None:
    """What a block imports of lowbit is there, also where the block is not run."""
    for node in ast.walk(tree):
        names: list[tuple[str, str]] = []
        if isinstance(node, ast.Import):
            names = [(alias.name, "") for alias in node.names]
        elif isinstance(node, ast.ImportFrom) and not node.level:
            names = [(node.module or "", alias.name) for alias in node.names]
        for module, name in names:
            if module.split(".")[0] != "lowbit":
                continue
            try:
                found = importlib.import_module(module)
                if name and not hasattr(found, name):
                    importlib.import_module(f"{module}.{name}")
            except ImportError as error:
                raise Wrong(f"{where}: {error}") from error


def check(block: Block, space: dict[str, Any], run: bool = True, extra: dict[str, list[str]] | None = None) -> None:
    """Run a block in the current folder, or check it where it is marked (or ``run`` is False). ``space``: the page's names.

    ``extra``: options that make a command of the page shorter here. Raises Wrong.
    """
    run = run and block.why is None
    if block.kind == "json":
        try:
            [json.loads(line) for line in block.text.splitlines()]
        except ValueError as error:
            raise Wrong(f"{block.where}: {error}") from error
    elif block.kind == "sh":
        _shell(block, run, extra or {})
    elif block.kind == "python":
        try:
            code = compile(block.text, block.where, "exec")
        except SyntaxError as error:
            raise Wrong(f"{block.where}: {error}") from error
        _imports(ast.parse(block.text), block.where)
        if run:
            try:
                with contextlib.redirect_stdout(io.StringIO()):
                    exec(code, space)
            except Exception as error:
                raise Wrong(f"{block.where}: {type(error).__name__}: {error}") from error


def inline_commands(page: str, text: str) -> Iterator[tuple[str, str]]:
    """``lowbit ...`` between backticks outside the blocks: (where, the words)."""
    outside = re.sub(r"^ *```.*?^ *```\s*$", lambda m: "\n" * m[0].count("\n"), text, flags=re.MULTILINE | re.DOTALL)
    for found in re.finditer(r"`lowbit ([^`]+)`", outside):
        yield f"{page}:{outside[: found.start()].count(chr(10)) + 1}", " ".join(found[1].split())


def options_of(command: str) -> set[str]:
    """The options of a command, as its own --help lists them (``bench layers`` and its kind too)."""
    out = io.StringIO()
    words = command.split()
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(out), contextlib.suppress(SystemExit):
        os.environ.setdefault("COLUMNS", "100")
        cli.main([*words, "--help"])
    return set(re.findall(r"--[\w-]+", out.getvalue())) | set(re.findall(r"(?<![\w-])-\w\b", out.getvalue()))
