from __future__ import annotations

import math
from collections import Counter
from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from foveal.runner.batch_sampler import SampleRow, allowed_tokens, sample_batch, token_logprob
from foveal.runner.sampler import SUM_BLOCK, _reach, best_ids, candidates, draw, sample
from foveal.step import SampledRows, TokenMask
from foveal.types import SamplingParams

SIZE = 1200  # more than two blocks of the sum, and no multiple of one
PROMPT = (5, 6, 7)


def noise(count: int, size: int = SIZE, seed: int = 0) -> Tensor:
    """Logits with many equal scores."""
    random = torch.Generator().manual_seed(seed)
    return (torch.randn(count, size, generator=random) * 6).round() / 2


def row(params: SamplingParams | None = None, **changes: Any) -> SampleRow:
    fixed: dict[str, Any] = {"slot": 0, "request_id": "a", "seed": 3, "first_row": 0}
    fixed |= {"tokens": PROMPT, "num_prompt_tokens": len(PROMPT)}
    return SampleRow(params=params or SamplingParams(), **(fixed | changes))


def one(logits: Tensor, params: SamplingParams | None = None, **changes: Any) -> int:
    result = sample_batch(logits, [row(params, **changes)])[0]
    assert result.error is None, result.error
    return result.token_ids[0]


def mask_of(rows: Sequence[Sequence[int]], size: int = SIZE) -> TokenMask:
    mask = np.zeros((len(rows), -(-size // 32)), dtype=np.int64)
    for i, allowed in enumerate(rows):
        for token in allowed:
            mask[i, token // 32] |= 1 << (token % 32)
    return mask.astype(np.uint32).view(np.int32)


# --- one row ------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "params",
    [
        {},
        {"temperature": 1.0},
        {"temperature": 0.7, "top_k": 20},
        {"temperature": 1.5, "top_p": 0.8},
        {"temperature": 1.0, "min_p": 0.2, "repetition_penalty": 1.3},
    ],
)
def test_a_row_gets_the_token_of_the_plain_sampler(params: dict[str, Any]) -> None:
    how = SamplingParams(**params)
    for i, logits in enumerate(noise(20)):
        tokens = [*PROMPT, *range(i)]
        expected = sample(logits, how, seed=3, position=len(tokens), seen=tokens)
        assert one(logits[None], how, tokens=tokens) == expected


def test_draws_without_filters_follow_the_distribution() -> None:
    """Numbers that run evenly through [0, 1) give each id its share, at first and last places of blocks too."""
    logits = torch.full((SIZE,), -torch.inf)
    ids = [0, SUM_BLOCK - 1, SUM_BLOCK, 2 * SUM_BLOCK - 1, SIZE - 1]
    weights = torch.tensor([1.0, 2.0, 3.0, 4.0, 5.0])
    logits[ids] = weights.log()
    count = 3000
    drawn = Counter(draw(logits, SamplingParams(temperature=1.0), i / count) for i in range(count))
    for token, share in zip(ids, (weights / 15).tolist(), strict=True):
        assert abs(drawn[token] - share * count) < 2  # one at each end
    assert set(drawn) == set(ids)


@pytest.mark.parametrize("u", [0.0, 1 - 2**-53])
@pytest.mark.parametrize("filters", [{}, {"top_p": 0.999999}, {"top_k": 3}])
def test_the_ends_of_the_distribution_never_give_an_impossible_token(
    u: float, filters: dict[str, Any]
) -> None:
    logits = torch.full((SIZE,), -torch.inf)
    logits[[40, 700]] = torch.tensor([1.0, 1.0])
    token = draw(logits, SamplingParams(temperature=1e-40, **filters), u)
    assert token == (40 if u == 0.0 else 700)


def test_a_sum_that_rounding_leaves_too_small_gives_the_last_possible_place() -> None:
    sums = torch.tensor([0.0, 1.0, 2.0, 2.0], dtype=torch.float64)
    assert [_reach(sums, target) for target in (0.0, 1.0, 2.0, 2.5)] == [1, 2, 2, 2]


@settings(max_examples=60)
@given(st.integers(0, 10**6), st.integers(1, 60))
def test_the_best_ids_are_those_of_a_stable_sort(seed: int, count: int) -> None:
    scores = noise(1, 50, seed)[0].round()
    expected = sorted(range(50), key=lambda i: (-scores[i].item(), i))[:count]
    assert best_ids(scores, count).tolist() == expected


def test_few_allowed_ids_make_a_short_list() -> None:
    allowed = torch.full((SIZE,), -torch.inf)
    allowed[[3, 900]] = torch.tensor([1.0, 2.0])
    assert best_ids(allowed, 5).tolist() == best_ids(allowed, SIZE).tolist() == [900, 3]


@settings(max_examples=60)
@given(st.integers(0, 10**6), st.floats(0.01, 0.999), st.sampled_from([0.0, 0.01, 0.3]))
def test_top_p_keeps_what_a_full_sort_keeps(seed: int, top_p: float, min_p: float) -> None:
    logits = noise(1, 3000, seed)[0] / 3
    ids, probabilities = candidates(logits, SamplingParams(top_p=top_p, min_p=min_p))
    p = logits.double().softmax(-1)
    order = torch.sort(logits, descending=True, stable=True).indices
    before = p[order].cumsum(-1) - p[order]
    # An id whose border is as near as rounding may go either way.
    sure = order[(before < top_p - 1e-6) & (p[order] >= min_p * p.max() * (1 + 1e-6))]
    may = order[(before < top_p + 1e-6) & (p[order] >= min_p * p.max() * (1 - 1e-6))]
    assert ids[: len(sure)].tolist() == sure.tolist()
    assert len(ids) <= max(len(may), 1)
    torch.testing.assert_close(probabilities, p[ids] / p[ids].sum(), rtol=1e-5, atol=0)


# --- bias, bans, penalties, forms ---------------------------------------------------------------


def scores(**values: float) -> Tensor:
    """Logits [1, SIZE] that are -20 but for ids given as t0=..., t1=..."""
    out = torch.full((1, SIZE), -20.0)
    for name, value in values.items():
        out[0, int(name[1:])] = value
    return out


def test_bias_moves_a_token_and_adds_up() -> None:
    logits = scores(t1=3.0, t2=2.0)
    assert one(logits, SamplingParams(logit_bias=((2, 0.4), (2, 0.4)))) == 1
    assert one(logits, SamplingParams(logit_bias=((2, 0.6), (2, 0.6)))) == 2


def test_a_bias_for_an_unknown_token_ends_its_request_only() -> None:
    rows = [row(SamplingParams(logit_bias=((SIZE, 1.0),))), row(request_id="b", first_row=1)]
    bad, good = sample_batch(noise(2), rows)
    assert bad.error is not None
    assert str(SIZE) in bad.error
    assert bad.token_ids == ()
    assert good.error is None


def test_no_stop_token_is_drawn_before_min_tokens() -> None:
    logits = scores(t1=3.0, t2=2.0)
    params = SamplingParams(min_tokens=2)
    stops = frozenset({1, SIZE + 5})
    assert one(logits, params, stop_ids=stops) == 2
    assert one(logits, params, stop_ids=stops, tokens=(*PROMPT, 9)) == 2
    assert one(logits, params, stop_ids=stops, tokens=(*PROMPT, 9, 9)) == 1


def test_banned_sequences_are_not_completed_in_the_output() -> None:
    logits = scores(t1=3.0, t2=2.0)
    banned = ((8, 9, 1),)
    assert one(logits, banned=banned, tokens=(*PROMPT, 8, 9)) == 2
    assert one(logits, banned=banned, tokens=(*PROMPT, 9, 9)) == 1
    assert one(logits, banned=banned, tokens=(*PROMPT, 9)) == 1
    assert one(logits, banned=((1,),)) == 2
    # The beginning of the sequence is the prompt's, not the answer's.
    assert one(logits, banned=((6, 7, 1),)) == 1


@pytest.mark.parametrize(
    ("params", "tokens", "expected"),
    [
        ({"repetition_penalty": 2.0}, (*PROMPT, 1), 2),
        ({"repetition_penalty": 2.0}, (1, 6, 7), 2),  # the prompt counts
        ({"repetition_penalty": 2.0}, (SIZE + 3, 6, 7), 1),  # a picture's id has no score
        ({"presence_penalty": 1.5}, (*PROMPT, 1), 2),
        ({"presence_penalty": 1.5}, (1, 6, 7), 1),  # the prompt does not count
        ({"presence_penalty": 0.9}, (*PROMPT, 1, 1), 1),
        ({"frequency_penalty": 0.6}, (*PROMPT, 1), 1),
        ({"frequency_penalty": 0.6}, (*PROMPT, 1, 1), 2),
        ({"frequency_penalty": -0.6}, (*PROMPT, 2, 2), 2),
    ],
)
def test_penalties_look_at_their_tokens(
    params: dict[str, Any], tokens: tuple[int, ...], expected: int
) -> None:
    assert one(scores(t1=3.0, t2=2.0), SamplingParams(**params), tokens=tokens) == expected


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_only_allowed_tokens_are_drawn(temperature: float) -> None:
    allowed = [0, 31, 32, 63, SIZE - 1]
    params = SamplingParams(temperature=temperature)
    drawn = {
        one(noise(1, seed=seed), params, seed=seed, mask=mask_of([allowed])) for seed in range(200)
    }
    assert drawn == set(allowed)


def test_a_mask_is_read_bit_by_bit_and_may_be_short() -> None:
    mask = mask_of([[0, 5, 31, 33]], 40)[0]
    assert np.flatnonzero(allowed_tokens(mask, 40)).tolist() == [0, 5, 31, 33]
    assert np.flatnonzero(allowed_tokens(mask, 33)).tolist() == [0, 5, 31]
    assert np.flatnonzero(allowed_tokens(mask, 200)).tolist() == [0, 5, 31, 33]


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_rules_that_leave_no_token_are_an_error_with_the_next_step(temperature: float) -> None:
    params = SamplingParams(temperature=temperature, min_tokens=1)
    rows = [row(params, stop_ids=frozenset({4}), mask=mask_of([[4]]))]
    result = sample_batch(noise(1), rows)[0]
    assert result.token_ids == ()
    assert result.error is not None
    assert "min_tokens" in result.error


def test_a_penalty_out_of_range_is_an_error() -> None:
    params = SamplingParams(repetition_penalty=1e-45, temperature=1.0)
    result = sample_batch(torch.ones(1, SIZE), [row(params)])[0]
    assert result.error is not None
    assert "repetition_penalty" in result.error


# --- the batch ----------------------------------------------------------------------------------

PARAMS = (
    SamplingParams(logprobs=2),
    SamplingParams(temperature=1.0),
    SamplingParams(temperature=0.8, top_p=0.9, logprobs=0),
    SamplingParams(temperature=1.2, top_k=7, min_p=0.01, presence_penalty=0.5),
    SamplingParams(repetition_penalty=1.4, logit_bias=((3, 5.0),)),
)


def test_a_result_does_not_depend_on_the_batch() -> None:
    logits = noise(len(PARAMS))
    rows = [row(p, request_id=str(i), first_row=i, seed=i) for i, p in enumerate(PARAMS)]
    together = sample_batch(logits, rows)
    order = [3, 0, 4, 2, 1]
    assert sample_batch(logits, [rows[i] for i in order]) == [together[i] for i in order]
    for i, p in enumerate(PARAMS):
        alone = sample_batch(logits[i : i + 1].clone(), [row(p, request_id=str(i), seed=i)])
        assert alone == [together[i]]


@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
def test_logits_that_are_not_finite_end_their_row_only(bad: float) -> None:
    logits = noise(3)
    clean = sample_batch(logits, [row(first_row=i) for i in range(3)])
    logits[1, 77] = bad
    results = sample_batch(logits, [row(first_row=i) for i in range(3)])
    assert results[1].error is not None
    assert "float32" in results[1].error
    assert results[1].token_ids == ()
    assert [results[0], results[2]] == [clean[0], clean[2]]


def test_an_empty_batch_is_no_work() -> None:
    assert sample_batch(torch.empty(0, SIZE), []) == []


def test_logprobs_are_of_the_raw_logits_and_ranks_go_to_the_lower_id() -> None:
    logits = scores(t1=2.0, t7=2.0, t9=1.0)
    expected = logits[0].double().log_softmax(-1)
    params = SamplingParams(logprobs=3, logit_bias=((7, 1.0),), temperature=0.0)
    result = sample_batch(logits, [row(params)])[0]
    (found,) = result.logprobs
    assert (found.token_id, found.rank) == (7, 2)
    assert math.isclose(found.logprob, expected[7].item(), rel_tol=1e-6)
    assert [token for token, _ in found.top] == [1, 7, 9]
    assert [v for _, v in found.top] == pytest.approx(expected[[1, 7, 9]].tolist(), rel=1e-6)
    assert token_logprob(logits[0], 9, 0).top == ()


# --- drafts -------------------------------------------------------------------------------------


def next_logits(tokens: Sequence[int]) -> Tensor:
    """A model: logits [SIZE] that the last two tokens decide."""
    return noise(1, seed=hash(tuple(tokens[-2:])) % 2**31)[0]


def plain(params: SamplingParams, count: int, **facts: Any) -> list[int]:
    tokens = list(PROMPT)
    for _ in range(count):
        tokens.append(one(next_logits(tokens)[None], params, tokens=tuple(tokens), **facts))
        if tokens[-1] in facts.get("stop_ids", ()):
            break
    return tokens[len(PROMPT) :]


def verify(params: SamplingParams, drafts: Sequence[int], **facts: Any) -> SampledRows:
    tokens = [*PROMPT, *drafts]
    logits = torch.stack([next_logits(tokens[: len(PROMPT) + i]) for i in range(len(drafts) + 1)])
    return sample_batch(logits, [row(params, drafts=tuple(drafts), **facts)])[0]


@pytest.mark.parametrize("params", [*PARAMS, SamplingParams(temperature=1.0, seed=1)])
@pytest.mark.parametrize("wrong_at", [0, 1, 3, 5])
def test_drafts_change_no_token(params: SamplingParams, wrong_at: int) -> None:
    facts = {"banned": ((50, 60), (3, 3)), "stop_ids": frozenset[int]()}
    answer = plain(params, 6, **facts)
    drafts = answer[:5]
    if wrong_at < 5:
        drafts[wrong_at] = (drafts[wrong_at] + 1) % SIZE
    result = verify(params, drafts, **facts)
    assert list(result.token_ids) == answer[: wrong_at + 1]
    assert len(result.logprobs) == (len(result.token_ids) if params.logprobs is not None else 0)


@pytest.mark.parametrize(
    "params", [{"presence_penalty": 1.0}, {"frequency_penalty": 1.0}, {"repetition_penalty": 2.0}]
)
def test_penalties_see_the_drafts_before_a_row(params: dict[str, float]) -> None:
    logits = scores(t1=3.0, t2=2.5).expand(3, SIZE)
    result = sample_batch(logits, [row(SamplingParams(**params), drafts=(1, 2))])[0]
    assert result.token_ids == (1, 2, 1)


def test_each_row_has_its_own_mask() -> None:
    mask = mask_of([[4], [8], [9]])
    result = sample_batch(noise(3), [row(drafts=(4, 8), mask=mask)])[0]
    assert result.token_ids == (4, 8, 9)


def test_nothing_follows_a_stop_token_or_the_last_token() -> None:
    answer = plain(SamplingParams(), 4)
    stops = frozenset({answer[1]})
    first = answer.index(answer[1]) + 1
    assert list(verify(SamplingParams(), answer, stop_ids=stops).token_ids) == answer[:first]
    assert list(verify(SamplingParams(max_tokens=2), answer).token_ids) == answer[:2]


def test_a_fault_behind_accepted_drafts_waits_for_the_next_step() -> None:
    logits = scores(t1=3.0).repeat(3, 1)
    logits[1, 5] = math.nan
    result = sample_batch(logits, [row(drafts=(1, 1))])[0]
    assert (result.token_ids, result.error) == ((1,), None)
    refused = sample_batch(logits[1:], [row(drafts=(1,), tokens=(*PROMPT, 1))])[0]
    assert refused.error is not None
