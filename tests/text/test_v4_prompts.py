"""Prompt texts of a release: found by their hashes in a file that is read and never run."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable
from pathlib import Path

import pytest

from foveal.errors import CheckpointError, PromptError
from foveal.text import v4_prompts
from foveal.text.v4_prompts import FILE, V4Prompts

Write = Callable[[str], V4Prompts]

# Stand-ins for the vendor's texts, which are no part of this repository.
TEXT_A, TEXT_B = "Think a lot.\n\n", "Think even more — and more.\n\n"
TOOLS = "Use {dsml_token}, {thinking_start_token} and {thinking_end_token}: {{x}}\n{tool_schemas}\nEnd.\n"
TOOLS_FILLED = "Use ｜DSML｜, <think> and </think>: {x}\n@@\nEnd.\n"
FORMAT = "Reply like {schema}"


def sha256(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()


@pytest.fixture
def stand_ins(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(v4_prompts, "EFFORT_SHA256", frozenset({sha256(TEXT_A), sha256(TEXT_B)}))
    monkeypatch.setattr(v4_prompts, "TOOLS_SHA256", sha256(TOOLS_FILLED))
    monkeypatch.setattr(v4_prompts, "RESPONSE_FORMAT_SHA256", sha256(FORMAT))


@pytest.fixture
def write(tmp_path: Path, stand_ins: None) -> Write:
    def load(source: str) -> V4Prompts:
        path = tmp_path / FILE
        path.parent.mkdir(exist_ok=True)
        path.write_text(source, encoding="utf-8")
        return V4Prompts.load(tmp_path)

    return load


# --- golden releases ----------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("release", "generation", "high", "max_chars"),
    [("release_preview", "preview", 0, 476), ("release_vision", "later", 476, 526)],
)
def test_released_texts_are_found(
    release: str, generation: str, high: int, max_chars: int, golden: Path
) -> None:
    folder = golden / "v4_encoding" / release
    if not folder.is_dir():
        pytest.skip(f"no golden data in {folder}")
    prompts = V4Prompts.load(folder)
    assert (prompts.generation, prompts.problem) == (generation, "")
    assert [prompts.effort_text(e) for e in (None, "low")] == ["", ""]
    assert len(prompts.effort_text("high")) == high
    assert len(prompts.effort_text("max")) == max_chars
    assert prompts.effort_text("max").startswith("Reasoning Effort:")
    section = "".join(
        literal + v4_prompts.TOOLS_FIELDS.get(name or "", "")
        for literal, name in prompts.tools_template()
    )
    assert (len(section), section.count("\n")) == (955, 25)
    assert [name for _, name in prompts.response_format_template()] == ["schema"]


# --- which constants count ----------------------------------------------------------------------


def test_preview_has_one_text_for_max(write: Write) -> None:
    prompts = write(f"X = {TEXT_A[:5]!r} + (\n    {TEXT_A[5:]!r}\n)\n")
    assert prompts.generation == "preview"
    assert prompts.effort_text("high") == ""
    assert prompts.effort_text("max") == TEXT_A


def test_later_release_has_a_table(write: Write) -> None:
    table = {"low": "", "high": TEXT_A, "max": TEXT_B, "odd": TEXT_B}
    prompts = write(f"T: dict[str, str] = {table!r}\n")
    assert prompts.generation == "later"
    assert [prompts.effort_text(e) for e in ("low", "high", "max")] == ["", TEXT_A, TEXT_B]


def test_templates_are_found_whatever_they_are_called(write: Write) -> None:
    source = (
        f"{TEXT_A!r}\nleft = {TOOLS[:9]!r}\nboth = other = left + {TOOLS[9:]!r}\nf = {FORMAT!r}\n"
    )
    prompts = write(source)
    assert [name for _, name in prompts.tools_template()] == [
        "dsml_token",
        "thinking_start_token",
        "thinking_end_token",
        None,  # where {{ was
        None,
        "tool_schemas",
        None,
    ]
    assert prompts.response_format_template() == (("Reply like ", "schema"),)
    assert prompts.generation is None  # a string that no name is given to is no constant


def test_code_of_the_file_never_runs(write: Write, tmp_path: Path) -> None:
    witness = tmp_path / "witness"
    prompts = write(
        f"open({str(witness)!r}, 'w').close()\n"
        f"A = open({str(witness)!r}, 'w') and {TEXT_A!r}\n"
        f'B = f"{{open({str(witness)!r}, chr(119))}}"\n'
        f"C = {FORMAT!r}\n"
    )
    assert not witness.exists()
    assert prompts.generation is None
    assert prompts.response_format is not None


def test_a_name_that_changes_its_value_counts_as_it_ends(write: Write) -> None:
    assert write(f"A = {TEXT_A!r}\nA = compute()\n").generation is None


def test_fields_of_other_kinds_are_no_template(write: Write) -> None:
    for text in ("{dsml_token.__class__}", "{dsml_token!r}", "{tool_schemas:>9}", "{0}", "{", "}"):
        assert write(f"A = {text!r}\nB = {FORMAT!r}\n").tools is None


def test_sums_that_explode_are_left_out(write: Write) -> None:
    doubling = "".join(f"a{i + 1} = a{i} + a{i}\n" for i in range(200))
    prompts = write(f"a0 = 'xxxxxxxx'\n{doubling}f = {FORMAT!r}\n")
    assert prompts.response_format is not None


# --- what is missing ----------------------------------------------------------------------------


def ask_all(prompts: V4Prompts) -> list[Exception]:
    """What happens to each option that needs a text."""
    errors: list[Exception] = []
    for ask in (
        lambda: prompts.effort_text("high"),
        lambda: prompts.effort_text("max"),
        prompts.tools_template,
        prompts.response_format_template,
    ):
        with pytest.raises((PromptError, CheckpointError)) as caught:
            ask()
        errors.append(caught.value)
    return errors


def test_without_the_file_only_what_needs_it_fails(tmp_path: Path) -> None:
    prompts = V4Prompts.load(tmp_path)
    assert prompts.effort_text(None) == prompts.effort_text("low") == ""
    for error in ask_all(prompts):
        assert isinstance(error, PromptError)
        assert str(tmp_path / FILE) in str(error)
        assert "copy the folder encoding/" in str(error)


@pytest.mark.parametrize(
    "source",
    [
        "",
        f"A = {TEXT_A + ' '!r}\nT = {TOOLS.upper()!r}\nF = {FORMAT + '.'!r}\n",
        "this is no Python",
        "A = '\\0'\0",
        "A = " + "(" * 5000,
        "A = '\\ud800'\n",
        "A = " + "+".join(["'x'"] * 20000),
    ],
    ids=["empty", "other texts", "no Python", "null byte", "nested", "surrogate", "long sum"],
)
def test_a_file_without_the_texts_is_a_fault_of_the_checkpoint(source: str, write: Write) -> None:
    prompts = write(source)
    assert prompts.effort_text("low") == ""
    for error in ask_all(prompts):
        assert isinstance(error, CheckpointError)
        assert "fetch the file again" in str(error)


def test_one_changed_text_of_a_table_spoils_its_level_only(write: Write) -> None:
    table = {"low": "", "high": TEXT_A, "max": TEXT_B + "!"}
    prompts = write(f"T = {table!r}\n")
    assert prompts.effort_text("high") == TEXT_A
    with pytest.raises(CheckpointError, match="reasoning effort 'max'"):
        prompts.effort_text("max")


def test_a_file_that_is_too_large_or_not_text_is_refused(tmp_path: Path) -> None:
    path = tmp_path / FILE
    path.parent.mkdir()
    path.write_bytes(b"#" * (4 * v4_prompts.MAX_CHARS + 1))
    with pytest.raises(CheckpointError, match="more than"):
        V4Prompts.load(tmp_path).tools_template()
    path.write_bytes(b"A = '\xff'")
    with pytest.raises(CheckpointError, match="cannot be read"):
        V4Prompts.load(tmp_path).tools_template()


def test_odd_escapes_in_the_file_warn_nobody(write: Write) -> None:
    assert write(f"A = '\\d'\nF = {FORMAT!r}\n").response_format is not None


@pytest.mark.parametrize("effort", ["medium", "", "HIGH", 50])
def test_unknown_efforts_are_refused(effort: str) -> None:
    with pytest.raises(PromptError, match="low, high, max"):
        V4Prompts().effort_text(effort)


def test_no_text_of_the_vendor_is_in_this_repository(golden: Path, repository: Path) -> None:
    """The texts are data of the model's folder. Chance hits are out of question at this length."""
    folder = golden / "v4_encoding" / "release_vision"
    if not folder.is_dir():
        pytest.skip(f"no golden data in {folder}")
    prompts = V4Prompts.load(folder)
    prose = [*prompts.efforts.values(), *(literal for literal, _ in prompts.tools_template())]
    sentences = {line.strip() for text in prose for line in text.split("\n") if len(line) > 60}
    assert len(sentences) >= 8
    for path in [*(repository / "foveal").rglob("*.py"), *(repository / "tests").rglob("*.py")]:
        text = path.read_text(encoding="utf-8")
        found = [s for s in sentences if s in text or json.dumps(s)[1:-1] in text]
        assert not found, f"{path} holds {found}"
