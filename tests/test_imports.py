"""Imports point one way. Walks the import statements of the whole package, those inside functions too."""

from __future__ import annotations

import ast
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

PACKAGE = Path(__file__).resolve().parents[1] / "foveal"

# room -> rooms of ours that it may import (itself always). A room is a folder or a top-level module.
MAY_IMPORT = {
    "errors": set(),
    "types": {"errors"},
    "step": {"errors", "types"},
    "messages": {"errors", "types"},
    "text": {"errors", "types"},
    "vision": {"errors", "types", "text"},
    "parallel": {"errors", "types"},
    "ops": {"errors", "types"},
    "models": {"errors", "types", "ops", "parallel"},
    "runner": {"errors", "types", "step", "ops", "models"},
    "cache": {"errors", "types"},
    "engine": {"errors", "types", "step", "text", "cache"},
    "families": {"errors", "types", "messages", "text", "vision", "models", "runner"},
    "llm": {"errors", "types", "messages", "families", "text", "vision", "models", "runner"},
    "verify": {"errors", "types", "families", "ops", "text", "vision", "models", "runner", "llm"},
    "__init__": {"errors", "types", "families", "llm"},
}
EVERYTHING = {"cli", "__main__"}

# room or module -> libraries that it does without
NO_LIBRARY = {
    "errors": {"torch", "numpy"},
    "types": {"torch"},
    "messages": {"torch"},
    "step": {"torch"},
    "engine": {"torch", "PIL"},
    "cache": {"torch", "PIL", "tokenizers"},
    "text": {"torch", "PIL"},
    "vision": {"torch"},
    "ops": {"PIL", "tokenizers"},
    "models": {"PIL", "tokenizers"},
    "runner": {"PIL", "tokenizers"},
    "models.config": {"torch", "numpy"},
    "models.fit": {"torch"},
    "models.hub": {"torch"},
    "models.memory": {"torch"},
    "models.names": {"torch"},
    "models.v4_aliases": {"torch"},
    "models.v4_config": {"torch"},
    "models.v4_fit": {"torch"},
    "models.v4_inventory": {"torch"},
    "models.v4_names": {"torch"},
}


@dataclass(frozen=True)
class Import:
    """`importer` (without the leading "foveal.") imports `target`, at a line of its file."""

    importer: str
    target: str
    line: int

    @property
    def room(self) -> str:
        return self.importer.split(".")[0]

    def __str__(self) -> str:
        return f"foveal.{self.importer}, line {self.line}, imports {self.target}"


def module_name(path: Path) -> str:
    parts = path.relative_to(PACKAGE).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" and len(parts) > 1 else parts)


def imports_of(path: Path) -> Iterator[Import]:
    """All imports but those for type checkers only, which run nothing."""
    importer = module_name(path)
    for node in running_nodes(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            yield from (Import(importer, alias.name, node.lineno) for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path}: relative import; write the whole name"
            names = [f"{node.module}.{alias.name}" for alias in node.names]
            is_ours = node.module == "foveal"
            targets = names if is_ours else [str(node.module)]
            yield from (Import(importer, target, node.lineno) for target in targets)


def running_nodes(node: ast.AST) -> Iterator[ast.AST]:
    for child in ast.iter_child_nodes(node):
        if isinstance(child, ast.If) and "TYPE_CHECKING" in ast.dump(child.test):
            continue
        yield child
        yield from running_nodes(child)


ALL_IMPORTS = [found for path in sorted(PACKAGE.rglob("*.py")) for found in imports_of(path)]


def test_every_room_has_a_rule() -> None:
    rooms = {module_name(path).split(".")[0] for path in PACKAGE.rglob("*.py")}
    assert rooms <= set(MAY_IMPORT) | EVERYTHING, "say in MAY_IMPORT what a new room may import"


def test_imports_point_one_way() -> None:
    wrong = []
    for found in ALL_IMPORTS:
        head, _, rest = found.target.partition(".")
        if head != "foveal" or found.room in EVERYTHING:
            continue
        room = rest.split(".")[0]
        is_package_fact = room == "__version__"
        if room != found.room and not is_package_fact and room not in MAY_IMPORT[found.room]:
            wrong.append(str(found))
    assert not wrong, "\n".join(wrong)


def test_rooms_do_without_their_forbidden_libraries() -> None:
    wrong = [
        str(found)
        for found in ALL_IMPORTS
        for scope, libraries in NO_LIBRARY.items()
        if (found.importer == scope or found.importer.startswith(scope + "."))
        and found.target.split(".")[0] in libraries
    ]
    assert not wrong, "\n".join(wrong)


def test_only_declared_libraries_are_imported() -> None:
    ours = {"foveal"} | set(sys.stdlib_module_names)
    declared = {"torch", "numpy", "safetensors", "tokenizers", "huggingface_hub", "PIL", "tqdm"}
    declared.add("llguidance")
    wrong = [str(i) for i in ALL_IMPORTS if i.target.split(".")[0] not in ours | declared]
    assert not wrong, "\n".join(wrong)


def test_only_the_command_line_prints() -> None:
    wrong = [
        f"{path.relative_to(PACKAGE)}:{node.lineno}"
        for path in sorted(PACKAGE.rglob("*.py"))
        if path.parts[len(PACKAGE.parts)] != "cli"
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8")))
        if isinstance(node, ast.Call)
        and isinstance(node.func, ast.Name)
        and node.func.id == "print"
    ]
    assert not wrong, wrong


def test_nothing_evaluates_or_unpickles() -> None:
    forbidden = {"eval", "exec", "torch.load", "pickle.load", "pickle.loads", "compile"}
    wrong = [
        f"{path.relative_to(PACKAGE)}:{node.lineno} {ast.unparse(node.func)}"
        for path in sorted(PACKAGE.rglob("*.py"))
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8")))
        if isinstance(node, ast.Call) and ast.unparse(node.func) in forbidden
    ]
    assert not wrong, wrong


SIDE_EFFECTS = """
import logging, os, sys, warnings
before = (dict(os.environ), list(logging.root.handlers), list(warnings.filters))
{statement}
after = (dict(os.environ), list(logging.root.handlers), list(warnings.filters))
assert before[:2] == after[:2], "environment or logging changed"
assert "torch" not in sys.modules, "torch was imported"
"""


@pytest.mark.parametrize(
    "statement",
    [
        "import foveal",
        "import foveal; foveal.SamplingParams()",
        "import foveal.text, foveal.vision",
        "import foveal.cli.main",
        "from foveal.cli.main import main; assert main(['--help']) == 0",
        "from foveal.cli.main import main; assert main(['ask', '--help']) == 0",
        "from foveal.cli.main import main; assert main(['akk']) == 2",
    ],
)
def test_light_imports_have_no_side_effects_and_no_torch(statement: str) -> None:
    code = SIDE_EFFECTS.format(statement=statement)
    result = subprocess.run(
        [sys.executable, "-c", code],
        capture_output=True,
        text=True,
        cwd=PACKAGE.parent,
        check=False,
    )
    assert result.returncode == 0, result.stderr


def test_long_functions_are_split() -> None:
    limit = 60
    long = [
        f"{path.relative_to(PACKAGE)}: {node.name} has {node.end_lineno - node.lineno + 1} lines"
        for path in sorted(PACKAGE.rglob("*.py"))
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8")))
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)
        and node.end_lineno is not None
        and node.end_lineno - node.lineno >= limit
    ]
    assert not long, "\n".join(long)
