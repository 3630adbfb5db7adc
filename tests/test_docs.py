"""What the documents say exists, exists; what they show runs."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

REPOSITORY = Path(__file__).resolve().parents[1]
DOCUMENTS = sorted(path for path in [*REPOSITORY.glob("*.md"), *(REPOSITORY / "docs").glob("*.md")])
FOLDERS = ("foveal", "tests", "docs", "training", "benchmarks", "examples")

LINK = re.compile(r"\[[^\]]+\]\(([^)\s]+)\)")
# `foveal/llm.py`, `foveal/vision/`, `foveal/llm.py:LLM.stream`
PATH = re.compile(rf"`((?:{'|'.join(FOLDERS)})/[\w./-]*)(?::([\w.]+))?`")


def found(pattern: re.Pattern[str]) -> Iterator[tuple[str, re.Match[str]]]:
    for path in DOCUMENTS:
        for match in pattern.finditer(path.read_text(encoding="utf-8")):
            yield f"{path.relative_to(REPOSITORY)}: {match[0]}", match


def test_links_lead_somewhere() -> None:
    dead = []
    for path in DOCUMENTS:
        for match in LINK.finditer(path.read_text(encoding="utf-8")):
            target = match[1].partition("#")[0]
            if target and "://" not in target and not (path.parent / target).exists():
                dead.append(f"{path.relative_to(REPOSITORY)}: {match[0]}")
    assert not dead, "\n".join(dead)


def test_named_files_exist() -> None:
    missing = [where for where, match in found(PATH) if not (REPOSITORY / match[1]).exists()]
    assert not missing, "\n".join(missing)


def test_named_functions_exist() -> None:
    missing = [
        where
        for where, match in found(PATH)
        if match[2] and not defines(REPOSITORY / match[1], match[2].split("."))
    ]
    assert not missing, "\n".join(missing)


def defines(path: Path, names: list[str]) -> bool:
    """True when the Python file defines `names`, each inside the one before."""
    body: list[ast.stmt] = ast.parse(path.read_text(encoding="utf-8")).body
    for name in names:
        inside = next((node for node in body if name in defined_by(node)), None)
        if inside is None:
            return False
        body = getattr(inside, "body", [])
    return True


def defined_by(node: ast.stmt) -> list[str]:
    if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
        return [node.name]
    targets = [node.target] if isinstance(node, ast.AnnAssign) else getattr(node, "targets", [])
    return [target.id for target in targets if isinstance(target, ast.Name)]


def test_every_document_is_in_the_index() -> None:
    index = (REPOSITORY / "docs" / "README.md").read_text(encoding="utf-8")
    pages = {path.name for path in (REPOSITORY / "docs").glob("*.md")} - {"README.md"}
    assert not {page for page in pages if f"({page})" not in index}


README_CODE = re.findall(
    r"```python\n(.*?)```", (REPOSITORY / "README.md").read_text(encoding="utf-8"), re.DOTALL
)


def test_the_readme_shows_code() -> None:
    assert README_CODE


@pytest.mark.parametrize("code", README_CODE)
def test_readme_code_runs(
    code: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(REPOSITORY)
    exec(compile(code, "README.md", "exec"), {})
    assert capsys.readouterr().out.strip()


def test_readme_commands_parse() -> None:
    """Every `foveal` command line in the README names known commands and flags."""
    import importlib
    import shlex

    from foveal.cli.main import COMMANDS
    from foveal.cli.parser import Parser

    text = (REPOSITORY / "README.md").read_text(encoding="utf-8")
    lines = re.findall(r"^\$ (?:\.venv/bin/)?foveal (.+?)(?:\s+#.*)?$", text, re.MULTILINE)
    assert lines
    for line in lines:
        name, *words = shlex.split(line)
        parser = Parser(prog=name, usage="", description="", epilog="")
        importlib.import_module(COMMANDS[name].module).add_arguments(parser)
        parser.parse_command(words)
