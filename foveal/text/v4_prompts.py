"""The prompt texts that a DeepSeek-V4 release ships beside its weights, read as data.

`encoding/encoding_dsv4.py` of a model folder is parsed and never run: only constants count, and of those only the ones
with a known SHA-256, whatever they are called.

    reasoning effort    preview: one constant, for "max"; later: a table with that text for "high", another for "max"
    tools               section of the system text, with fields for marks and schemas
    response format     section of the system text, with a field for the schema

A release without the file, or with another text in it, still chats; only an option that needs a missing text fails, and
says so. Knows no messages and no tokens. Source: spec 9.3 and 9.4.
"""

from __future__ import annotations

import ast
import hashlib
import string
import warnings
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal, TypeAlias

from foveal.errors import CheckpointError, PromptError
from foveal.text.v4_grammar import DSML, THINK_END, THINK_START

FILE = Path("encoding") / "encoding_dsv4.py"
EFFORTS = ("low", "high", "max")
EFFORT_SHA256 = frozenset(
    {
        "f7a24f3b3050d4a83781e9b755b316aae2ec1d9dc87562541d90bcb04d7350f7",
        "53fb31b8392ec5b4a926481943efc67636748f137c1a49d493a7af4d4fa55d2c",
    }
)
TOOLS_SHA256 = "15edbf86d5eeee61b975cbd8069c4004560ddab8e60f5d7d5d854acb0dd5ec50"
RESPONSE_FORMAT_SHA256 = "012f31fcc1338bdfe25b132eaf56ab020ee75ab8e649f37b30b8e5f544fb17a5"
# The fields of the two templates, and what stands in their place when a template is hashed.
TOOLS_FIELDS = {
    "dsml_token": DSML,
    "thinking_start_token": THINK_START,
    "thinking_end_token": THINK_END,
    "tool_schemas": "@@",
}
RESPONSE_FORMAT_FIELDS = {"schema": "{schema}"}
MAX_CHARS = 1 << 20  # of the file and of any constant in it; the released files have under 40,000

Generation: TypeAlias = Literal["preview", "later"]
# Literal text, each piece with the name of the field that follows it.
Template: TypeAlias = tuple[tuple[str, str | None], ...]


@dataclass(frozen=True, slots=True)
class V4Prompts:
    """The texts of one release; `V4Prompts()` stands for a folder without any.

    `generation` is None where no effort text was found. `problem` says what is wrong with a file that is there.
    """

    path: str = str(FILE)
    is_present: bool = False
    problem: str = ""
    generation: Generation | None = None
    efforts: Mapping[str, str] = field(default_factory=dict)
    tools: Template | None = None
    response_format: Template | None = None

    @classmethod
    def load(cls, folder: str | Path) -> V4Prompts:
        """Read the texts of a model folder. Raises nothing: what is missing is told when it is asked for."""
        path = Path(folder) / FILE
        if not path.is_file():
            return cls(path=str(path))
        try:
            constants = _read_constants(path)
        except (OSError, ValueError, SyntaxError, RecursionError, MemoryError) as error:
            reason = " ".join(str(error).split()) or type(error).__name__
            return cls(path=str(path), is_present=True, problem=f"cannot be read: {reason}")
        generation, efforts = _efforts(constants)
        texts = [value for value in constants.values() if isinstance(value, str)]
        return cls(
            path=str(path),
            is_present=True,
            generation=generation,
            efforts=efforts,
            tools=_template(texts, TOOLS_FIELDS, TOOLS_SHA256),
            response_format=_template(texts, RESPONSE_FORMAT_FIELDS, RESPONSE_FORMAT_SHA256),
        )

    def effort_text(self, effort: str | None) -> str:
        """The text for a reasoning effort; None counts as "low", which adds nothing in any release.

        Raises PromptError for an unknown effort or a missing file, CheckpointError for a file without the text.
        """
        check_effort(effort)
        if effort is None or effort == "low":
            return ""
        text = self.efforts.get(effort)
        if text is None:
            raise self._lacks(f"reasoning effort {effort!r}")
        return text

    def tools_template(self) -> Template:
        """The section that tells the model about its tools; raises like `effort_text`."""
        if self.tools is None:
            raise self._lacks("the use of tools")
        return self.tools

    def response_format_template(self) -> Template:
        """The section that asks for a format of the answer; raises like `effort_text`."""
        if self.response_format is None:
            raise self._lacks("a response format")
        return self.response_format

    def _lacks(self, what: str) -> PromptError | CheckpointError:
        if not self.is_present:
            return PromptError(
                f"{what} needs a text that DeepSeek ships with the model as {self.path}, and there is no such file; "
                "copy the folder encoding/ from the model's original files, or do without"
            )
        problem = self.problem or "holds no text for it that a known release has"
        return CheckpointError(
            f"{what} needs a text from {self.path}, which {problem}; fetch the file again from the model's original "
            "files, or do without"
        )


def check_effort(effort: str | None) -> None:
    """Raises PromptError for a reasoning effort that no release knows; None is fine."""
    if effort is not None and effort not in EFFORTS:
        known = ", ".join(EFFORTS)
        raise PromptError(f"reasoning effort {effort!r} is not known; choose one of {known}")


# --- what the texts are recognised by -----------------------------------------------------------


def _sha256(text: str) -> str:
    # A lone surrogate can be written as an escape in the file; it is in no released text and must not crash.
    return hashlib.sha256(text.encode("utf-8", "surrogatepass")).hexdigest()


def _efforts(
    constants: Mapping[str, str | dict[str, str]],
) -> tuple[Generation | None, dict[str, str]]:
    """Which level selects which text. A release with a table says it itself; the first release had one text."""
    for value in constants.values():
        if not isinstance(value, dict):
            continue
        known = {
            k: v
            for k, v in value.items()
            if k in EFFORTS and (not v or _sha256(v) in EFFORT_SHA256)
        }
        if any(known.values()):
            return "later", known
    for value in constants.values():
        if isinstance(value, str) and _sha256(value) in EFFORT_SHA256:
            return "preview", {"high": "", "max": value}
    return None, {}


def _template(texts: Iterable[str], fields: Mapping[str, str], sha256: str) -> Template | None:
    for text in texts:
        template = _split(text, fields)
        if template is None:
            continue
        filled = "".join(literal + fields.get(name or "", "") for literal, name in template)
        if _sha256(filled) == sha256:
            return template
    return None


def _split(text: str, fields: Mapping[str, str]) -> Template | None:
    """A format string as literals and fields; None for a text with other fields or broken braces."""
    pieces = []
    try:
        for literal, name, spec, conversion in string.Formatter().parse(text):
            if spec or conversion or (name is not None and name not in fields):
                return None
            pieces.append((literal, name))
    except ValueError:
        return None
    return tuple(pieces)


# --- constants of a Python file, without running it ---------------------------------------------


def _read_constants(path: Path) -> dict[str, str | dict[str, str]]:
    """Strings, and dictionaries of strings, that the module's top level assigns to names."""
    if path.stat().st_size > 4 * MAX_CHARS:
        raise ValueError(f"it has {path.stat().st_size} bytes, more than {4 * MAX_CHARS}")
    source = path.read_text(encoding="utf-8-sig")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # odd escapes in foreign code are not our user's business
        module = ast.parse(source)
    constants: dict[str, str | dict[str, str]] = {}
    for name, node in _assignments(module):
        value = _constant(node, constants)
        if value is None:
            constants.pop(name, None)
        else:
            constants[name] = value
    return constants


def _assignments(module: ast.Module) -> Iterator[tuple[str, ast.expr]]:
    for statement in module.body:
        targets: list[ast.expr] = []
        if isinstance(statement, ast.Assign):
            targets = statement.targets
        elif isinstance(statement, ast.AnnAssign):
            targets = [statement.target]
        value = getattr(statement, "value", None)
        for target in targets:
            if isinstance(target, ast.Name) and value is not None:
                yield target.id, value


def _constant(
    node: ast.expr, known: Mapping[str, str | dict[str, str]]
) -> str | dict[str, str] | None:
    """The value of a literal, a sum of strings, or an earlier name; None for everything else."""
    if isinstance(node, ast.Constant):
        return node.value if isinstance(node.value, str) else None
    if isinstance(node, ast.Name):
        return known.get(node.id)
    if isinstance(node, ast.BinOp) and isinstance(node.op, ast.Add):
        left, right = _constant(node.left, known), _constant(node.right, known)
        if isinstance(left, str) and isinstance(right, str) and len(left + right) <= MAX_CHARS:
            return left + right
    if isinstance(node, ast.Dict):
        return dict(_entries(node, known))
    return None


def _entries(
    node: ast.Dict, known: Mapping[str, str | dict[str, str]]
) -> Iterator[tuple[str, str]]:
    for key_node, value_node in zip(node.keys, node.values, strict=True):
        key = None if key_node is None else _constant(key_node, known)
        value = _constant(value_node, known)
        if isinstance(key, str) and isinstance(value, str):
            yield key, value
