"""Verification of the chat encoding against golden prompts."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from foveal.verify.cases import CaseError
from foveal.verify.encoding import first_difference, verify_encoding

HELLO: dict[str, Any] = {
    "case": "hello",
    "messages": [{"role": "user", "content": "Hello"}],
    "options": {"thinking_mode": "chat"},
    "prompt": "<｜begin▁of▁sentence｜><｜User｜>Hello<｜Assistant｜></think>",
}


@pytest.fixture(scope="module")
def folder(golden: Path) -> Path:
    path = golden / "v4_encoding"
    if not path.is_dir():
        pytest.skip(f"no golden data in {path}")
    return path


def write(folder: Path, cases: Any) -> Path:
    path = folder / "cases.json"
    path.write_text(json.dumps(cases), encoding="utf-8")
    return path


@pytest.mark.parametrize("release", ["release_preview", "release_vision"])
def test_every_golden_case_passes(release: str, folder: Path) -> None:
    report = verify_encoding(folder / release, folder / "cases.json")
    assert report.is_passed, "\n".join(report.remarks())
    assert len(report.cases) == len(json.loads((folder / "cases.json").read_text()))


def test_without_texts_the_cases_that_need_them_fail(folder: Path, tmp_path: Path) -> None:
    report = verify_encoding(tmp_path, folder / "cases.json")
    failed = {case.name for case in report.cases if not case.is_passed}
    assert failed == {
        "effort_high",
        "effort_max",
        "response_format",
        "tool_round",
        "tool_round_done",
        "tools_think",
    }
    assert all("encoding_dsv4.py" in case.error for case in report.cases if case.error)


def test_the_first_difference_is_shown(tmp_path: Path) -> None:
    wrong = {**HELLO, "case": "wrong", "prompt": HELLO["prompt"].replace("Hello", "Help")}
    report = verify_encoding(tmp_path, write(tmp_path, [HELLO, wrong]))
    assert report.closing_line == "1 of 2 cases pass"
    assert report.rows()[2][:3] == ["wrong", "FAIL", "differs!"]
    (remark,) = report.remarks()
    assert remark.startswith("wrong: prompt: at character 32: 'lo<｜Assistant｜>")


def test_where_texts_part() -> None:
    assert first_difference("same", "same") == ""
    assert first_difference("abc", "ab") == "at character 2: '', expected 'c'"
    assert first_difference("ab", "abc") == "at character 2: 'c', expected ''"


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"options": {"thinking_mode": "deep"}}, "option thinking_mode='deep' is not known"),
        ({"options": {"speed": 1}}, "option speed=1 is not known"),
        ({"messages": [{"role": "robot"}]}, "role is 'robot'"),
        ({"messages": 3}, "TypeError"),
    ],
)
def test_a_case_that_cannot_be_encoded_fails_alone(
    change: dict[str, Any], words: str, tmp_path: Path
) -> None:
    report = verify_encoding(tmp_path, write(tmp_path, [{**HELLO, **change}, HELLO]))
    assert [case.is_passed for case in report.cases] == [False, True]
    assert words in report.cases[0].error


def test_options_of_the_released_function(tmp_path: Path) -> None:
    later = {
        "case": "later",
        "messages": [{"role": "user", "content": "b"}],
        "options": {
            "thinking_mode": "thinking",
            "context": [{"role": "user", "content": "a"}],
            "drop_thinking": False,
            "reasoning_effort": "low",
        },
        "prompt": "<｜User｜>b<｜Assistant｜><think>",
    }
    bare = {**HELLO, "options": {"add_default_bos_token": False}}
    bare["prompt"] = "<｜User｜>Hello<｜Assistant｜></think>"
    assert verify_encoding(tmp_path, write(tmp_path, [later, bare])).is_passed


@pytest.mark.parametrize("cases", [{}, [], [3], [{"case": "x"}], [{**HELLO, "prompt": 1}]])
def test_a_file_without_cases_is_an_error(cases: Any, tmp_path: Path) -> None:
    with pytest.raises(CaseError, match="not a list of chat encoding cases"):
        verify_encoding(tmp_path, write(tmp_path, cases))


def test_a_file_that_cannot_be_read_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(CaseError, match="cannot be read"):
        verify_encoding(tmp_path, tmp_path / "none.json")
    (tmp_path / "cases.json").write_text("{")
    with pytest.raises(CaseError, match="cannot be read"):
        verify_encoding(tmp_path, tmp_path / "cases.json")
