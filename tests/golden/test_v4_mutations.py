"""Golden cases must notice when a part of the model is missing: each removal makes one fail.

This guards the cases as much as the code: a comparison that passes without the part proves nothing.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from foveal import ops
from foveal.models.deepseek_v4 import Rotation
from foveal.models.v4 import V4Model
from foveal.runner import v4_cache
from tests.golden import v4_cases

NOTICED = 1e-2  # fifty times the limit of a correct implementation


@pytest.fixture(scope="module")
def model(golden: Path) -> V4Model:
    return v4_cases.load(golden / "v4_vision" / "vision_small")


@pytest.fixture(scope="module")
def case(golden: Path) -> v4_cases.Case:
    return v4_cases.read_case(golden / "v4_vision" / "vision_small" / "cases" / "image_mid.json")


def error(model: V4Model, case: v4_cases.Case, **options: Any) -> float:
    found = case.picked(v4_cases.engine_logits(model, case, **options))
    return float((found - case.logits).abs().max())


def test_nothing_removed_passes(model: V4Model, case: v4_cases.Case) -> None:
    assert error(model, case) < 2e-4


def test_span_visibility(model: V4Model, case: v4_cases.Case) -> None:
    assert error(model, case, with_spans=False) > NOTICED


def test_bias_vl(model: V4Model, case: v4_cases.Case) -> None:
    routers = [layer.ffn.router for layer in model.language.layers]
    stored = [router.bias_vl.data.clone() for router in routers]
    try:
        for router in routers:
            router.bias_vl.data.zero_()
        assert error(model, case) > NOTICED
    finally:
        for router, values in zip(routers, stored, strict=True):
            router.bias_vl.data.copy_(values)


def without_overlap(values: Tensor, gates: Tensor) -> Tensor:
    if values.shape[-2] == 8:
        values, gates = values[..., 4:, :], gates[..., 4:, :]
    return (values * gates.softmax(-2)).sum(-2)


def without_sink(q: Tensor, kv: Tensor, visible: Tensor, sink: Tensor, scale: float) -> Tensor:
    return ops.reference.sparse_attention(
        q, kv, visible, torch.full_like(sink, float("-inf")), scale
    )


def without_inverse_rotation(self: Rotation, x: Tensor, positions: Tensor) -> Tensor:
    return x


MUTATIONS: dict[str, Callable[[], AbstractContextManager[None]]] = {
    "overlap half of ratio 4": lambda: v4_cases.swapped(v4_cache.ops, "compress", without_overlap),
    "sink": lambda: v4_cases.swapped(v4_cache.ops, "sparse_attention", without_sink),
    "inverse rotation": lambda: v4_cases.swapped(Rotation, "back", without_inverse_rotation),
}


@pytest.mark.parametrize("part", MUTATIONS)
def test_removed_part_is_noticed(model: V4Model, case: v4_cases.Case, part: str) -> None:
    with MUTATIONS[part]():
        assert error(model, case) > NOTICED
    assert error(model, case) < 2e-4, "the part is back"
