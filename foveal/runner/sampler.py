"""From a row of logits to a token id.

A token is a function of (logits, parameters, seed, position): no generator state exists, so batch,
order of requests and restarts cannot change it. Equal scores go to the lower id.

Weights are exp(score - best score) in float32; all sums over them are in float64, in an order that the number of
scores alone decides.
"""

from __future__ import annotations

import hashlib
import secrets
from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from foveal.errors import EngineError
from foveal.types import SamplingParams

# Sums over a vocabulary go block by block: a plain float64 running sum over 129,280 entries takes ten times as long.
SUM_BLOCK = 512
# How many of the best ids top-p looks at, before it sorts the whole vocabulary.
TOP_P_SIZES = (64, 1024, 16384)
# Scores divided by less than this would leave float32; so sharp a draw takes the best id anyway.
LOWEST_TEMPERATURE = 1e-30


def fresh_seed() -> int:
    """A seed for a request that brought none."""
    return secrets.randbits(63)


def uniform(seed: int, position: int, purpose: str = "draw") -> float:
    """A number in [0, 1) that depends on its arguments only; 53 bits of a 64-bit hash."""
    key = f"{seed}:{position}:{purpose}".encode()
    bits = int.from_bytes(hashlib.blake2b(key, digest_size=8).digest(), "little")
    return (bits >> 11) * 2.0**-53


def not_finite_message(position: int) -> str:
    return (
        f"the model gave logits that are not finite at position {position}; the weights or the chosen "
        "dtype are at fault: try dtype float32, and check the model with `foveal verify`"
    )


def penalise_repeats(logits: Tensor, seen: Sequence[int], penalty: float) -> Tensor:
    """Scores of ids in `seen` shrink: positive ones are divided by `penalty`, negative ones multiplied.

    Ids behind the vocabulary, which stand for pictures, have no score.
    """
    known = sorted({token for token in seen if token < logits.shape[-1]})
    if penalty == 1.0 or not known:
        return logits
    ids = torch.tensor(known, device=logits.device)
    picked = logits[ids]
    out = logits.clone()
    out[ids] = torch.where(picked > 0, picked / penalty, picked * penalty)
    return out


def first_best(scores: Tensor) -> Tensor:
    """Ids [...] of the highest of `scores` [..., V]; of equal ones the lowest id."""
    if scores.device.type == "cpu":  # numpy's takes a tenth of the time of torch's
        return torch.from_numpy(np.asarray(scores.numpy().argmax(-1)))
    return scores.max(dim=-1).indices


def best_ids(scores: Tensor, count: int) -> Tensor:
    """Ids [count] of the highest of `scores` [V], best first; of equal ones the lower id comes first.

    Scores of -inf are left out, so that few allowed ids make a short list.
    """
    border = torch.finfo(scores.dtype).min
    if count < scores.shape[0]:
        # topk leaves open which of the equal scores at its border it takes.
        border = max(border, float(torch.topk(scores, count).values[-1]))
    ids = (scores >= border).nonzero()[:, 0]
    return ids[torch.sort(scores[ids], descending=True, stable=True).indices[:count]]


def block_sums(weights: Tensor) -> Tensor:
    """Sums [ceil(V / SUM_BLOCK)] float64 of `weights` [V] float32, block by block."""
    rest = -weights.shape[0] % SUM_BLOCK
    padded = torch.nn.functional.pad(weights, (0, rest)) if rest else weights
    return padded.view(-1, SUM_BLOCK).sum(-1, dtype=torch.float64)


def candidates(logits: Tensor, params: SamplingParams) -> tuple[Tensor, Tensor]:
    """Ids that survive top-k, top-p and min-p, best first, and their probabilities in float64 (sum 1).

    `logits` [V] are divided by the temperature already. The best candidate always survives. Top-p looks at the
    probabilities among the `top_k` best; min-p compares with the best one.
    """
    weights = (logits - logits.max()).exp()
    size = logits.shape[0]
    if params.top_k:
        ids = best_ids(logits, min(params.top_k, size))
        total = weights[ids].double().sum()
    else:
        total = block_sums(weights).sum()
        ids = _head(logits, weights, total, params)
    kept = weights[ids].double()
    keep = kept >= params.min_p * kept[0]
    if params.top_p < 1.0:
        keep[1:] &= kept.cumsum(-1)[:-1] < params.top_p * total
    keep[0] = True
    ids, kept = ids[keep], kept[keep]
    return ids, kept / kept.sum()


def _head(logits: Tensor, weights: Tensor, total: Tensor, params: SamplingParams) -> Tensor:
    """Ids, best first, among which are all that survive top-p and min-p."""
    if params.top_p < 1.0:
        for count in TOP_P_SIZES:
            ids = best_ids(logits, count)
            if bool(weights[ids].double().sum() * (1 - 1e-9) >= params.top_p * total):
                return ids
    elif params.min_p > 0.0:
        ids = (weights >= params.min_p).nonzero()[:, 0]
        return ids[torch.sort(logits[ids], descending=True, stable=True).indices]
    return best_ids(logits, logits.shape[0])


def draw(logits: Tensor, params: SamplingParams, u: float) -> int:
    """The id that `u` in [0, 1) falls on, for processed scores `logits` [V] and a temperature above 0.

    Inverse of the cumulative distribution: over the candidates, best first, where a filter is on; over all ids in
    order where none is. Ids with score -inf are never drawn; one score must be finite.
    """
    scaled = (logits - logits.max()) / max(params.temperature, LOWEST_TEMPERATURE)
    if params.top_k or params.top_p < 1.0 or params.min_p > 0.0:
        ids, probabilities = candidates(scaled, params)
        sums = probabilities.cumsum(-1)
        return int(ids[_reach(sums, u * float(sums[-1]))])
    weights = scaled.exp()
    sums = block_sums(weights).cumsum(-1)
    target = u * float(sums[-1])
    block = _reach(sums, target)
    inside = weights[block * SUM_BLOCK : (block + 1) * SUM_BLOCK].double().cumsum(-1)
    return block * SUM_BLOCK + _reach(inside, target - (float(sums[block - 1]) if block else 0.0))


def _reach(sums: Tensor, target: float) -> int:
    """The first place where rising `sums` exceed `target`. Where rounding leaves none, the last one that still rose."""
    limit = min(target, float(torch.nextafter(sums[-1], sums[-1].new_zeros(()))))
    return int(torch.searchsorted(sums, limit, right=True))


def sample(
    logits: Tensor, params: SamplingParams, *, seed: int, position: int, seen: Sequence[int] = ()
) -> int:
    """The next token id for one row `logits` [V] float32, for parameters without bias, bans and form.

    `position` is the place the token will have in the sequence, `seen` the prompt and output ids so far (used by the
    repetition penalty only). Raises EngineError where the logits are not finite.
    """
    if not torch.isfinite(logits).all():
        raise EngineError(not_finite_message(position))
    logits = penalise_repeats(logits, seen, params.repetition_penalty)
    if params.temperature == 0.0:
        return int(first_best(logits))
    return draw(logits, params, uniform(seed, position))
