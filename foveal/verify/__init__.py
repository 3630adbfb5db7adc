"""Checks a loaded model: against golden files (`golden`), or against laws that hold for every model (`laws`).

Prints nothing: a `Report` comes back, and `report` can lay it out as a table or as JSON-ready values.
"""

from foveal.verify.golden import verify_golden
from foveal.verify.laws import verify_laws
from foveal.verify.report import CaseResult, Check, Report

__all__ = ["CaseResult", "Check", "Report", "verify_golden", "verify_laws"]
