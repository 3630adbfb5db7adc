"""What a verification found. Knows neither models nor files."""

from __future__ import annotations

import math
from collections import Counter
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True, slots=True)
class Check:
    """One comparison.

    `column` is its place in the table, shared by checks of a kind. `difference` is the largest one found, None where
    things are only equal or not. `detail` says, for a failed check, where and by how much.
    """

    name: str
    column: str
    is_passed: bool
    difference: float | None = None
    limit: float | None = None
    detail: str = ""


@dataclass(frozen=True, slots=True)
class CaseResult:
    """All checks of one case; `error` is set instead where the case could not be run."""

    name: str
    checks: tuple[Check, ...] = ()
    not_checked: tuple[str, ...] = ()
    error: str = ""

    @property
    def is_passed(self) -> bool:
        """True when the case ran, something was checked, and everything checked passed."""
        return not self.error and bool(self.checks) and all(c.is_passed for c in self.checks)

    @property
    def problems(self) -> list[str]:
        """What went wrong, a line each."""
        if self.error:
            return [" ".join(self.error.split())]
        if not self.checks:
            return ["nothing in this case could be checked"]
        return [f"{c.name}: {c.detail}" for c in self.checks if not c.is_passed]


@dataclass(frozen=True, slots=True)
class Report:
    """The results of all cases, in order."""

    cases: tuple[CaseResult, ...]

    @property
    def num_passed(self) -> int:
        return sum(case.is_passed for case in self.cases)

    @property
    def is_passed(self) -> bool:
        """True when there are cases and all of them pass."""
        return bool(self.cases) and self.num_passed == len(self.cases)

    @property
    def closing_line(self) -> str:
        return f"{self.num_passed} of {len(self.cases)} cases pass"

    def rows(self) -> list[list[str]]:
        """A table: a heading, then one row a case with the largest difference of each check."""
        columns = list(dict.fromkeys(check.column for case in self.cases for check in case.checks))
        rows = [["case", "result", *columns]]
        for case in self.cases:
            result = "pass" if case.is_passed else "FAIL"
            rows.append([case.name, result, *(_cell(case, column) for column in columns)])
        return rows

    def remarks(self) -> list[str]:
        """What the table does not say: problems of failed cases, and what no check looked at."""
        lines = [
            f"{case.name}: {problem}"
            for case in self.cases
            if not case.is_passed
            for problem in case.problems
        ]
        groups = Counter(case.not_checked for case in self.cases if case.not_checked)
        for names, count in groups.items():
            where = f"{count} case" if count == 1 else f"{count} cases"
            lines.append(f"not checked: {', '.join(names)} ({where})")
        return lines

    def as_json(self) -> dict[str, Any]:
        """The same as JSON-ready values. Differences that are not finite become None."""
        return {
            "passed": self.num_passed,
            "total": len(self.cases),
            "is_passed": self.is_passed,
            "cases": [_case_as_json(case) for case in self.cases],
        }


def _cell(case: CaseResult, column: str) -> str:
    """The column's largest difference, or "equal" or "differs"; "!" marks a failure, "-" that nothing was checked."""
    checks = [check for check in case.checks if check.column == column]
    if not checks:
        return "-"
    mark = "" if all(check.is_passed for check in checks) else "!"
    differences = [check.difference for check in checks if check.difference is not None]
    if not differences:
        return "differs!" if mark else "equal"
    has_nan = any(math.isnan(difference) for difference in differences)
    return ("nan" if has_nan else f"{max(differences):.1e}") + mark


def _case_as_json(case: CaseResult) -> dict[str, Any]:
    return {
        "case": case.name,
        "is_passed": case.is_passed,
        "error": case.error or None,
        "not_checked": list(case.not_checked),
        "checks": [
            {
                "name": check.name,
                "is_passed": check.is_passed,
                "max_difference": _finite(check.difference),
                "limit": check.limit,
                "detail": check.detail or None,
            }
            for check in case.checks
        ],
    }


def _finite(value: float | None) -> float | None:
    return value if value is not None and math.isfinite(value) else None
