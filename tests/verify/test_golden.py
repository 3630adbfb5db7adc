"""Every golden case of every variant passes, within the limits of two correct float32 implementations."""

from __future__ import annotations

from pathlib import Path

import pytest

from foveal import LLM
from foveal.verify import verify_golden

VARIANTS = ("a_tiny", "a_tiny_384", "b_small", "c_base", "c_groups", "d_linear", "d_tail_depth3")


@pytest.mark.parametrize("variant", VARIANTS)
def test_all_cases_pass(variant: str, golden_vl2: Path) -> None:
    folder = golden_vl2 / variant
    llm = LLM(folder / "checkpoint", dtype="float32", device="cpu", picture_mode="vendor")
    report = verify_golden(llm, folder)
    assert len(report.cases) == len(list((folder / "cases").glob("*.json")))
    assert report.is_passed, "\n".join(report.remarks())
    assert {name for case in report.cases for name in case.not_checked} <= {
        "greedy_text",
        "sft_format",
    }
