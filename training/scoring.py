"""When an answer counts as right."""

from __future__ import annotations

import re

from training.questions import QA

LEAST_OVERLAP = 0.5


def is_right(qa: QA, answer: str) -> bool:
    """Exact text; for boxes the right label and an overlap (intersection over union) of at least a half."""
    if qa.task != "locate":
        return answer == qa.answer
    said, true = ([int(v) for v in re.findall(r"\d+", text)] for text in (answer, qa.answer))
    label = qa.answer.split("<|det|>", maxsplit=1)[0]
    return answer.startswith(label) and len(said) == 4 and overlap(said, true) >= LEAST_OVERLAP


def overlap(a: list[int], b: list[int]) -> float:
    """Intersection over union of two boxes (x1, y1, x2, y2); 0 for an empty one."""
    width = min(a[2], b[2]) - max(a[0], b[0])
    height = min(a[3], b[3]) - max(a[1], b[1])
    common = max(0, width) * max(0, height)
    total = max(0, a[2] - a[0]) * max(0, a[3] - a[1]) + (b[2] - b[0]) * (b[3] - b[1]) - common
    return common / total if total > 0 else 0.0
