"""Small frozen facts that operations take beside their tensors."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal


@dataclass(frozen=True, slots=True)
class RouterRule:
    """How a router turns scores into chosen experts (spec 6.6).

    `group_score` "top2" rates a group by the sum of its two best experts (noaux_tc), "max" by its best one.
    """

    top_k: int
    scoring: Literal["softmax", "sigmoid"] = "softmax"
    renormalise: bool = False
    scale: float = 1.0
    num_groups: int = 1
    kept_groups: int = 1
    group_score: Literal["max", "top2"] = "max"
