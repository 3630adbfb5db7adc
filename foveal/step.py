"""What one step of the engine is: the plan that goes to the runner, and the result that comes back. Plain data.

    scheduler --StepPlan--> runner: dropped content ids -> released slots -> new slots -> encoder jobs -> rows
              <--StepResult-- tokens for each row that was to be sampled

A request lives in a slot of the runner while it runs. All tokens travel in the plan, so that a runner on another rank
needs nothing else. No torch here.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, TypeAlias

import numpy as np
import numpy.typing as npt

from foveal.types import MediaItem, SamplingParams, TokenLogprob, V4MediaItem

Blocks: TypeAlias = tuple[int, ...]
# One bit a vocabulary entry, little end first: bit (id % 32) of word id // 32. [rows, ceil(vocabulary / 32)] int32.
TokenMask: TypeAlias = npt.NDArray[np.int32]


@dataclass(frozen=True, slots=True)
class PlacedMedia:
    """A picture in a request: `length` tokens from `start` on take the embedding rows of `content_id`.

    For DeepSeek-V4 the rows are those of the whole block, and the runner places it with `item` (pads differ by
    position); `span` are the first and last position of what is computed in one piece, None where tokens are causal.
    """

    content_id: bytes
    start: int
    length: int
    item: MediaItem | V4MediaItem
    span: tuple[int, int] | None = None


@dataclass(frozen=True, slots=True)
class NewSlot:
    """A request enters the runner, for the first time or again after preemption.

    `token_ids` are all tokens known: the prompt, and outputs of earlier runs. The first `num_computed_tokens` of them
    are in the blocks of `tables` (one a cache group). `boundary_block` is the window block whose boundary state goes
    to the slot's rings, None where there is none to restore. `banned` are token sequences that may not be completed.
    """

    slot: int
    request_id: str
    token_ids: tuple[int, ...]
    num_prompt_tokens: int
    num_computed_tokens: int
    tables: tuple[Blocks, ...]
    params: SamplingParams
    seed: int
    media: tuple[PlacedMedia, ...] = ()
    boundary_block: int | None = None
    stop_ids: frozenset[int] = frozenset()
    banned: tuple[tuple[int, ...], ...] = ()


@dataclass(frozen=True, slots=True)
class ScheduledRows:
    """Tokens [start, start + len(token_ids)) of the request in `slot` are computed in this step.

    The last `num_drafts` of them are guesses. With `is_sampled`, the rows of the last committed token and of each
    draft get logits, and tokens are drawn: between 1 and `num_drafts + 1` of them. `mask` [num_drafts + 1, words]
    forbids tokens in those rows, None where all are allowed. `new_blocks` and `boundary_blocks`: see
    `cache.kv_manager.Allocation`.
    """

    slot: int
    request_id: str
    start: int
    token_ids: tuple[int, ...]
    new_blocks: tuple[Blocks, ...]
    boundary_blocks: tuple[tuple[int, int], ...] = ()
    num_drafts: int = 0
    is_sampled: bool = False
    mask: TokenMask | None = None

    @property
    def num_logit_rows(self) -> int:
        return self.num_drafts + 1 if self.is_sampled else 0


@dataclass(frozen=True, slots=True)
class EncoderJob:
    """Run units [first_unit, last_unit) of a picture; with the last of `num_units` its rows become ready."""

    content_id: bytes
    first_unit: int
    last_unit: int
    num_units: int
    item: MediaItem | V4MediaItem


@dataclass(frozen=True, slots=True)
class StepPlan:
    """One step. The runner works through the fields in this order; decode rows come first in `rows`."""

    step_id: int
    dropped_content_ids: tuple[bytes, ...] = ()
    released_slots: tuple[int, ...] = ()
    new_slots: tuple[NewSlot, ...] = ()
    encoder_jobs: tuple[EncoderJob, ...] = ()
    rows: tuple[ScheduledRows, ...] = ()

    @property
    def num_tokens(self) -> int:
        return sum(len(rows.token_ids) for rows in self.rows)

    @property
    def is_empty(self) -> bool:
        """Nothing is computed. Dropped and released things may still be told."""
        return not self.rows and not self.encoder_jobs


@dataclass(frozen=True, slots=True)
class SampledRows:
    """What came of one `ScheduledRows` with `is_sampled`: accepted drafts, then one token more.

    `logprobs` are those of `token_ids` where the request wants them. `error` ends the request; no token then.
    """

    slot: int
    request_id: str
    token_ids: tuple[int, ...] = ()
    logprobs: tuple[TokenLogprob, ...] = ()
    error: str | None = None


@dataclass(frozen=True, slots=True)
class StepResult:
    """`rows` in the order of the plan's sampled rows. `failed_content_ids`: pictures whose work failed, with reasons.

    Seconds are of the encoder's jobs, and of all that follows them.
    """

    step_id: int
    rows: tuple[SampledRows, ...] = ()
    failed_content_ids: tuple[tuple[bytes, str], ...] = ()
    encoder_s: float = 0.0
    model_s: float = 0.0
    facts: dict[str, Any] = field(default_factory=dict)
