from __future__ import annotations

import math
from collections import Counter
from typing import Any

import pytest
import torch

from foveal.errors import EngineError, PromptError
from foveal.runner.sampler import candidates, penalise_repeats, sample, uniform
from foveal.types import SamplingParams

LOGITS = torch.tensor([1.0, 3.0, 2.0, -1.0, 0.5])


def draws(params: SamplingParams, count: int = 4000) -> Counter[int]:
    return Counter(sample(LOGITS, params, seed=7, position=i) for i in range(count))


def test_greedy_takes_the_lowest_of_equal_maxima() -> None:
    tied = torch.tensor([0.0, 2.0, 2.0, 2.0])
    assert sample(tied, SamplingParams(), seed=0, position=0) == 1


def test_a_token_is_a_function_of_seed_and_position() -> None:
    params = SamplingParams(temperature=1.0)
    first = [sample(LOGITS, params, seed=3, position=i) for i in range(50)]
    again = [sample(LOGITS, params, seed=3, position=i) for i in reversed(range(50))]
    assert first == again[::-1]
    assert first != [sample(LOGITS, params, seed=4, position=i) for i in range(50)]


def test_draws_follow_the_distribution() -> None:
    """Chi-square with 4 degrees of freedom stays below 23.5 (one false alarm in 10,000 seeds; this seed is fixed)."""
    counts, expected = draws(SamplingParams(temperature=1.0)), LOGITS.softmax(-1) * 4000
    chi2 = sum((counts[i] - e.item()) ** 2 / e.item() for i, e in enumerate(expected))
    assert chi2 < 23.5


def test_low_temperature_sharpens() -> None:
    assert draws(SamplingParams(temperature=0.2))[1] > draws(SamplingParams(temperature=2.0))[1]


@pytest.mark.parametrize(
    ("params", "allowed"),
    [
        ({"top_k": 2}, {1, 2}),
        ({"top_p": 0.5}, {1}),
        ({"top_p": 0.7}, {1, 2}),
        ({"min_p": 0.3}, {1, 2}),
        ({"top_k": 1}, {1}),
        ({"top_p": 1e-9}, {1}),
    ],
)
def test_filters_keep_only_their_candidates(params: dict[str, Any], allowed: set[int]) -> None:
    ids, probabilities = candidates(LOGITS, SamplingParams(temperature=1.0, **params))
    assert set(ids.tolist()) == allowed
    assert math.isclose(probabilities.sum().item(), 1.0)


def test_top_k_with_equal_scores_keeps_the_lower_ids() -> None:
    ids, _ = candidates(torch.zeros(10), SamplingParams(temperature=1.0, top_k=3))
    assert ids.tolist() == [0, 1, 2]


def test_repetition_penalty_shrinks_seen_ids_in_either_sign() -> None:
    out = penalise_repeats(LOGITS, [1, 3, 3], 2.0)
    assert out.tolist() == [1.0, 1.5, 2.0, -2.0, 0.5]
    assert penalise_repeats(LOGITS, [1], 1.0) is LOGITS


def test_uniform_numbers_are_uniform_and_independent_by_purpose() -> None:
    values = [uniform(1, i) for i in range(2000)]
    assert all(0 <= v < 1 for v in values)
    # The mean of 2,000 uniforms is within 5 standard errors of one half (fixed seed).
    assert abs(sum(values) / 2000 - 0.5) < 5 * math.sqrt(1 / 12 / 2000)
    assert uniform(1, 5, "draw") != uniform(1, 5, "accept")


@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
def test_logits_that_are_not_finite_are_an_error_with_the_next_step(bad: float) -> None:
    with pytest.raises(EngineError, match="float32"):
        sample(torch.tensor([0.0, bad]), SamplingParams(), seed=0, position=9)


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("temperature", -1),
        ("temperature", float("nan")),
        ("top_p", 0),
        ("top_p", 1.5),
        ("top_k", -1),
        ("min_p", 1.0),
        ("repetition_penalty", 0),
        ("max_tokens", 0),
        ("stop", ("",)),
    ],
)
def test_parameters_out_of_range_name_themselves(field: str, value: Any) -> None:
    with pytest.raises(PromptError, match=field):
        SamplingParams(**{field: value})
