"""Checks a loaded model: against golden files (`golden`), or against laws that hold for every model (`laws`).

Prints nothing: a `Report` comes back, and `report` can lay it out as a table or as JSON-ready values.
"""

from foveal.verify.encoding import verify_encoding
from foveal.verify.golden import verify_golden
from foveal.verify.laws import verify_laws
from foveal.verify.report import CaseResult, Check, Report
from foveal.verify.v4_golden import verify_v4_golden
from foveal.verify.v4_laws import verify_v4_laws
from foveal.verify.v4_subject import V4Subject

__all__ = [
    "CaseResult",
    "Check",
    "Report",
    "V4Subject",
    "verify_encoding",
    "verify_golden",
    "verify_laws",
    "verify_v4_golden",
    "verify_v4_laws",
]
