"""Routing rules of spec 6.6, each against numbers worked out by hand or by a loop."""

from __future__ import annotations

import pytest
import torch

from foveal.ops import RouterRule, route


def test_tiny_path_weights_are_raw_softmax_values() -> None:
    logits = torch.randn(5, 16, generator=torch.Generator().manual_seed(0))
    weights, ids = route(logits, None, RouterRule(6))
    assert torch.allclose(weights, logits.softmax(-1).gather(-1, ids))
    assert (weights.sum(-1) < 1).all(), "not renormalised"


def test_base_path_takes_weights_from_unbiased_scores_and_sums_to_the_scale() -> None:
    logits = torch.randn(5, 16, generator=torch.Generator().manual_seed(1))
    bias = -torch.arange(
        16, dtype=torch.float32
    )  # negative, and strong enough to decide the choice
    rule = RouterRule(4, "sigmoid", renormalise=True, scale=2.0, group_score="top2")
    weights, ids = route(logits, bias, rule)
    assert (ids.sort(-1).values == torch.arange(4)).all(), "the bias decides"
    picked = logits.sigmoid().gather(-1, ids)
    assert torch.allclose(weights, picked / picked.sum(-1, keepdim=True) * 2.0)
    assert torch.allclose(weights.sum(-1), torch.full((5,), 2.0))


def test_group_limited_keeps_whole_groups() -> None:
    logits = torch.tensor([[5.0, 0.0, 4.0, 3.9, 1.0, 3.0]])
    rule = RouterRule(3, num_groups=3, kept_groups=2)
    weights, ids = route(logits, None, rule)
    assert ids.tolist() == [[0, 2, 3]], "groups of 5.0 and 4.0 are kept, 3.0 is not"
    assert torch.allclose(weights, logits.softmax(-1).gather(-1, ids))


def test_noaux_rates_a_group_by_its_two_best() -> None:
    scores = torch.tensor([[0.9, 0.05, 0.6, 0.55, 0.5, 0.5]])
    rule = RouterRule(2, "sigmoid", num_groups=3, kept_groups=1, group_score="top2")
    _, ids = route(scores.logit(), torch.zeros(6), rule)
    assert ids.tolist() == [[2, 3]], "0.6 + 0.55 beats 0.9 + 0.05"


def test_masked_groups_score_zero_not_minus_infinity() -> None:
    """With negative biased scores a masked expert (0.0) beats a kept one, as in the vendor's code."""
    scores = torch.full((1, 4), 0.5)
    bias = torch.tensor([-0.6, -0.6, -2.0, -2.0])
    rule = RouterRule(2, "sigmoid", num_groups=2, kept_groups=1, group_score="top2")
    _, ids = route(scores.logit(), bias, rule)
    assert ids.tolist() == [[2, 3]]


@pytest.mark.parametrize("rule", [RouterRule(3), RouterRule(3, num_groups=2, kept_groups=2)])
def test_equal_scores_go_to_the_lower_id(rule: RouterRule) -> None:
    _, ids = route(torch.zeros(4, 8), None, rule)
    assert ids.tolist() == [[0, 1, 2]] * 4


def test_top_one_is_scaled_but_never_renormalised() -> None:
    logits = torch.tensor([[1.0, 2.0]])
    weights, _ = route(logits, None, RouterRule(1, renormalise=True, scale=3.0))
    assert torch.allclose(weights, logits.softmax(-1).amax(-1, keepdim=True) * 3.0)
