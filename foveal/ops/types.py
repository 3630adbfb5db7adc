"""Small frozen facts that operations take beside their tensors."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal


@dataclass(frozen=True, slots=True)
class RouterRule:
    """How a router turns scores into chosen experts (VL2: spec 6.6, V4: spec 4.8).

    `group_score` "top2" rates a group by the sum of its two best experts (noaux_tc), "max" by its best one.
    """

    top_k: int
    scoring: Literal["softmax", "sigmoid", "sqrtsoftplus"] = "softmax"
    renormalise: bool = False
    scale: float = 1.0
    num_groups: int = 1
    kept_groups: int = 1
    group_score: Literal["max", "top2"] = "max"


@dataclass(frozen=True, slots=True)
class HyperRule:
    """Constants of the hyper-connections: `iterations` counts the softmax and its column step as the first one."""

    iterations: int = 20
    eps: float = 1e-6
    norm_eps: float = 1e-6
