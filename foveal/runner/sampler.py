"""From a row of logits to a token id.

A token is a function of (logits, parameters, seed, position): no generator state exists, so batch,
order of requests and restarts cannot change it. Equal scores go to the lower id.
"""

from __future__ import annotations

import hashlib
import secrets
from collections.abc import Sequence

import torch
from torch import Tensor

from foveal.errors import EngineError
from foveal.types import SamplingParams


def fresh_seed() -> int:
    """A seed for a request that brought none."""
    return secrets.randbits(63)


def uniform(seed: int, position: int, purpose: str = "draw") -> float:
    """A number in [0, 1) that depends on its arguments only; 53 bits of a 64-bit hash."""
    key = f"{seed}:{position}:{purpose}".encode()
    bits = int.from_bytes(hashlib.blake2b(key, digest_size=8).digest(), "little")
    return (bits >> 11) * 2.0**-53


def penalise_repeats(logits: Tensor, seen: Sequence[int], penalty: float) -> Tensor:
    """Scores of ids in `seen` shrink: positive ones are divided by `penalty`, negative ones multiplied."""
    if penalty == 1.0 or not seen:
        return logits
    ids = torch.tensor(sorted(set(seen)), device=logits.device)
    picked = logits[ids]
    out = logits.clone()
    out[ids] = torch.where(picked > 0, picked / penalty, picked * penalty)
    return out


def candidates(logits: Tensor, params: SamplingParams) -> tuple[Tensor, Tensor]:
    """Ids that survive top-k, top-p and min-p, best first, and their probabilities in float64 (sum 1).

    `logits` [V] are divided by the temperature already. The best candidate always survives.
    """
    ordered = torch.sort(logits, descending=True, stable=True)
    values, ids = ordered.values, ordered.indices
    if params.top_k:
        values, ids = values[: params.top_k], ids[: params.top_k]
    probabilities = values.double().softmax(-1)
    keep = torch.ones_like(ids, dtype=torch.bool)
    if params.top_p < 1.0:
        before = probabilities.cumsum(-1) - probabilities
        keep &= before < params.top_p
    if params.min_p > 0.0:
        keep &= probabilities >= params.min_p * probabilities[0]
    keep[0] = True
    kept = probabilities[keep]
    return ids[keep], kept / kept.sum()


def sample(
    logits: Tensor, params: SamplingParams, *, seed: int, position: int, seen: Sequence[int] = ()
) -> int:
    """The next token id for one row `logits` [V] float32.

    `position` is the place the token will have in the sequence, `seen` the prompt and output ids so far (used by the
    repetition penalty only). Raises EngineError where the logits are not finite.
    """
    if not torch.isfinite(logits).all():
        raise EngineError(
            f"the model gave logits that are not finite at position {position}; the weights or the chosen "
            "dtype are at fault: try dtype float32, and check the model with `foveal verify`"
        )
    logits = penalise_repeats(logits, seen, params.repetition_penalty)
    if params.temperature == 0.0:
        # argmax leaves ties open; the first of the equal maxima is wanted.
        return int((logits == logits.max()).nonzero()[0])
    ids, probabilities = candidates(logits / params.temperature, params)
    reached = probabilities.cumsum(-1) > uniform(seed, position)
    place = int(reached.nonzero()[0]) if bool(reached.any()) else len(ids) - 1
    return int(ids[place])
