"""How results are counted and shown."""

from __future__ import annotations

from foveal.verify.report import CaseResult, Check, Report

GOOD = Check("logits", "logits", True, 1e-6, 2e-4)
BAD = Check("input_ids", "prompt", False, detail="at [0, 3]: 5, expected 4")


def test_a_report_passes_when_all_cases_do() -> None:
    report = Report((CaseResult("a", (GOOD,)), CaseResult("b", (GOOD,))))
    assert report.is_passed
    assert report.closing_line == "2 of 2 cases pass"


def test_no_cases_is_no_pass() -> None:
    assert not Report(()).is_passed
    assert Report(()).closing_line == "0 of 0 cases pass"


def test_a_case_without_checks_is_no_pass() -> None:
    case = CaseResult("a", not_checked=("mystery",))
    assert not case.is_passed
    assert case.problems == ["nothing in this case could be checked"]


def test_one_failed_check_fails_the_case_and_is_explained() -> None:
    report = Report((CaseResult("a", (GOOD, BAD)), CaseResult("b", error="no file")))
    assert report.closing_line == "0 of 2 cases pass"
    assert report.remarks() == ["a: input_ids: at [0, 3]: 5, expected 4", "b: no file"]


def test_the_table_shows_the_largest_difference_of_a_column() -> None:
    other = Check("logits_at_positions", "logits", True, 3e-5, 2e-4)
    case = CaseResult("a", (GOOD, other, BAD))
    assert Report((case,)).rows() == [
        ["case", "result", "logits", "prompt"],
        ["a", "FAIL", "3.0e-05", "differs!"],
    ]


def test_a_failed_difference_is_marked_and_a_missing_one_is_a_dash() -> None:
    wrong = Check("logits", "logits", False, 0.5, 2e-4, "too far")
    not_a_number = Check("logits", "logits", False, float("nan"), 2e-4, "nan")
    equal = Check("ids", "prompt", True)
    report = Report(
        (CaseResult("a", (wrong,)), CaseResult("b", (equal,)), CaseResult("c", (not_a_number,)))
    )
    assert report.rows()[1:] == [
        ["a", "FAIL", "5.0e-01!", "-"],
        ["b", "pass", "-", "equal"],
        ["c", "FAIL", "nan!", "-"],
    ]


def test_what_was_not_checked_is_said_once_for_equal_cases() -> None:
    cases = tuple(CaseResult(name, (GOOD,), ("greedy_text", "sft_format")) for name in "ab")
    other = CaseResult("c", (GOOD,), ("mystery",))
    assert Report((*cases, other)).remarks() == [
        "not checked: greedy_text, sft_format (2 cases)",
        "not checked: mystery (1 case)",
    ]


def test_json_holds_no_numbers_that_json_cannot_write() -> None:
    check = Check("logits", "logits", False, float("nan"), 2e-4, "nan")
    values = Report((CaseResult("a", (check,)),)).as_json()
    assert values["cases"][0]["checks"][0]["max_difference"] is None
    assert values["passed"] == 0
