"""From the logits of a step to the tokens of its requests: all sampling parameters, forms, drafts.

Order for each row: float32 logits -> bias -> bans (stop tokens before `min_tokens`, banned sequences) -> penalties ->
mask of the form -> temperature -> top-k, top-p, min-p -> draw. Log-probabilities are those of the raw logits.

Drafts: each row gets the token that plain decoding would draw there, with the same number of (seed, position). A draft
is accepted where it is that token. So drafts change the time an answer takes and nothing else, sampled or greedy.

No row looks at another one, and no error ends more than its own request.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from foveal.errors import EngineError, FovealError, PromptError
from foveal.runner.sampler import (
    best_ids,
    block_sums,
    draw,
    first_best,
    not_finite_message,
    penalise_repeats,
    uniform,
)
from foveal.step import SampledRows, TokenMask
from foveal.types import SamplingParams, TokenLogprob


@dataclass(frozen=True, slots=True)
class SampleRow:
    """A request whose next tokens are wanted.

    Its logits are rows [first_row, first_row + len(drafts) + 1): that of the last committed token, then of each draft.
    `tokens` are all committed tokens, the first `num_prompt_tokens` of them the prompt. `stop_ids` end the answer (and
    are not drawn before `min_tokens`), `banned` are sequences that the output may not complete, `mask`
    [len(drafts) + 1, words] are the tokens that a form allows (see `step.TokenMask`).
    """

    slot: int
    request_id: str
    params: SamplingParams
    seed: int
    tokens: Sequence[int]
    num_prompt_tokens: int
    first_row: int
    drafts: tuple[int, ...] = ()
    stop_ids: frozenset[int] = frozenset()
    banned: tuple[tuple[int, ...], ...] = ()
    mask: TokenMask | None = None


@dataclass(frozen=True, slots=True)
class _Facts:
    """What one pass over all rows says: the id of the (first) maximum, and whether all of a row is finite."""

    best: list[int]
    is_finite: list[bool]


def sample_batch(logits: Tensor, rows: Sequence[SampleRow]) -> list[SampledRows]:
    """Accepted drafts and one token more for each of `rows`, from `logits` [N, V] float32.

    Nothing follows a stop token or the last of `max_tokens`. Logits that are not finite, a bias for an id outside the
    vocabulary, and rules that leave no token end their own request, with the error in its result.
    """
    if not rows:
        return []
    assert logits.dtype == torch.float32, f"logits are float32, not {logits.dtype}"
    # NaN wins both comparisons.
    finite = torch.isfinite(logits.amax(dim=-1)) & torch.isfinite(logits.amin(dim=-1))
    facts = _Facts(first_best(logits).tolist(), finite.tolist())
    return [_sample_request(logits, row, facts) for row in rows]


def _sample_request(logits: Tensor, row: SampleRow, facts: _Facts) -> SampledRows:
    drawn: list[int] = []
    logprobs: list[TokenLogprob] = []
    try:
        for place in range(len(row.drafts) + 1):
            token = _sample_row(logits, row, drawn, facts)
            if row.params.logprobs is not None:
                scores = logits[row.first_row + place]
                logprobs.append(token_logprob(scores, token, row.params.logprobs))
            drawn.append(token)
            is_accepted = place < len(row.drafts) and token == row.drafts[place]
            if not is_accepted or _is_last(row, token, len(drawn)):
                break
    except FovealError as error:
        # A fault behind accepted drafts is met again in the next step, as without drafts.
        if not drawn:
            return SampledRows(row.slot, row.request_id, error=str(error))
    return SampledRows(row.slot, row.request_id, tuple(drawn), tuple(logprobs))


def _is_last(row: SampleRow, token: int, num_drawn: int) -> bool:
    num_output = len(row.tokens) - row.num_prompt_tokens + num_drawn
    return token in row.stop_ids or num_output >= row.params.max_tokens


def _sample_row(logits: Tensor, row: SampleRow, drawn: list[int], facts: _Facts) -> int:
    """The token behind `row.tokens` and `drawn`, which are the drafts accepted so far."""
    index, position = row.first_row + len(drawn), len(row.tokens) + len(drawn)
    if not facts.is_finite[index]:
        raise EngineError(not_finite_message(position))
    params = row.params
    scores = _processed(logits[index], row, drawn)
    if scores is None:
        if params.temperature == 0.0:
            return facts.best[index]
        return draw(logits[index], params, uniform(row.seed, position))
    best = float(scores.max())
    if not np.isfinite(best):
        raise PromptError(_no_token_message(best, position))
    if params.temperature == 0.0:
        return int(first_best(scores))
    return draw(scores, params, uniform(row.seed, position))


def _no_token_message(best: float, position: int) -> str:
    if best == -np.inf:
        return (
            f"no token is allowed at position {position}: min_tokens, bad_words and the form that was asked for "
            "leave none together; relax one of them"
        )
    return (
        f"penalties move scores out of float32's range at position {position}; "
        "bring repetition_penalty closer to 1"
    )


def _processed(logits: Tensor, row: SampleRow, drawn: list[int]) -> Tensor | None:
    """Scores [V] after bias, bans, penalties and mask; None where they are the logits themselves."""
    params, device = row.params, logits.device
    num_output = len(row.tokens) - row.num_prompt_tokens + len(drawn)
    forbidden = list(row.stop_ids) if num_output < params.min_tokens else []
    output: list[int] = []
    has_counts = params.presence_penalty != 0.0 or params.frequency_penalty != 0.0
    if has_counts or row.banned:
        output = [*row.tokens[row.num_prompt_tokens :], *drawn]
        forbidden += [s[-1] for s in row.banned if _completes(output, s)]
    has_mask, has_repeats = row.mask is not None, params.repetition_penalty != 1.0
    if not (params.logit_bias or forbidden or has_counts or has_repeats or has_mask):
        return None
    scores = logits.clone()
    if params.logit_bias:
        _add_bias(scores, params.logit_bias)
    if forbidden:
        known = [token for token in forbidden if token < scores.shape[0]]
        scores[torch.tensor(known, dtype=torch.int64, device=device)] = -torch.inf
    if has_repeats:
        scores = penalise_repeats(scores, [*row.tokens, *drawn], params.repetition_penalty)
    if has_counts and output:
        _penalise_output(scores, output, params)
    if row.mask is not None:
        assert row.mask.shape[0] == len(row.drafts) + 1, "a mask has a row for each row of logits"
        allowed = allowed_tokens(row.mask[len(drawn)], scores.shape[0])
        scores.masked_fill_(~torch.from_numpy(allowed).to(device), -torch.inf)
    return scores


def _completes(output: Sequence[int], sequence: tuple[int, ...]) -> bool:
    """True if the last token of `sequence` would complete it behind `output`."""
    before = len(sequence) - 1
    return before >= 0 and (before == 0 or tuple(output[-before:]) == sequence[:-1])


def _add_bias(scores: Tensor, bias: tuple[tuple[int, float], ...]) -> None:
    size = scores.shape[0]
    for token, _ in bias:
        if not 0 <= token < size:
            raise PromptError(
                f"logit_bias names token id {token}, but the model's ids go from 0 to {size - 1}"
            )
    ids = torch.tensor([token for token, _ in bias], device=scores.device)
    amounts = torch.tensor([amount for _, amount in bias], device=scores.device)
    scores.index_add_(0, ids, amounts)


def _penalise_output(scores: Tensor, output: Sequence[int], params: SamplingParams) -> None:
    """Each id of the output loses presence_penalty once, and frequency_penalty as often as it occurs."""
    ids, counts = np.unique(np.asarray(output, dtype=np.int64), return_counts=True)
    amounts = params.presence_penalty + params.frequency_penalty * counts
    losses = torch.from_numpy(amounts.astype(np.float32)).to(scores.device)
    scores.index_add_(0, torch.from_numpy(ids).to(scores.device), -losses)


def allowed_tokens(mask_row: TokenMask, size: int) -> np.ndarray:
    """[size] bool from one row of a `TokenMask`; ids behind its words are not allowed."""
    octets = np.ascontiguousarray(mask_row, dtype="<i4").view(np.uint8)
    bits = np.unpackbits(octets, bitorder="little")[:size]
    if bits.shape[0] < size:
        bits = np.pad(bits, (0, size - bits.shape[0]))
    return bits.view(np.bool_)


def token_logprob(logits: Tensor, token: int, num_top: int) -> TokenLogprob:
    """What `logits` [V] say of `token`, and of the `num_top` best ids. Of equal ones the lower id ranks first."""
    best = logits.max()
    log_sum = block_sums((logits - best).exp()).sum().log() + best.double()
    score = logits[token]
    rank = 1 + int((logits > score).sum()) + int((logits[:token] == score).sum())
    top: tuple[tuple[int, float], ...] = ()
    if num_top:
        ids = best_ids(logits, num_top)
        values = (logits[ids].double() - log_sum).tolist()
        top = tuple(zip(ids.tolist(), values, strict=True))
    return TokenLogprob(token, float(score.double() - log_sum), rank, top)
