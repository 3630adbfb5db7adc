"""What all model families share: prefill in chunks, decode, and the loop from a prompt to token ids.

Contract: prompts arrive as token ids with their pictures (`types.Prompt`); token ids leave. A runner knows no
tokenizer, no stop string and no file.
"""

from __future__ import annotations

import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, Generic, Protocol, TypeVar

import torch
from torch import Tensor

from foveal.runner.sampler import fresh_seed, sample
from foveal.types import MediaItem, Prompt, SamplingParams, V4MediaItem

# Longest piece of a prompt in one forward pass; bounds the memory of activations, changes no result.
PREFILL_CHUNK = 2048


class Cache(Protocol):
    """State of one request."""

    num_computed_tokens: int

    def legal_end(self, end: int) -> int:
        """The nearest end of a chunk at or after `end` that splits no picture which must stay whole."""
        ...


CacheT = TypeVar("CacheT", bound=Cache)


@dataclass(slots=True)
class Timings:
    """Seconds and counts of the newest request, for benchmarks."""

    vision_s: float = 0.0
    num_tiles_encoded: int = 0
    prefill_s: float = 0.0
    decode_s: list[float] = field(default_factory=list)


class Runner(ABC, Generic[CacheT]):
    """Runs one model. Not thread-safe: one request at a time; use one runner per thread of work."""

    model: Any
    timings: Timings

    @abstractmethod
    def encode_pictures(self, items: Sequence[Any]) -> list[Tensor]:
        """The rows of each picture's placeholders, [length, D] float32 each; identical work is done once."""

    @abstractmethod
    def new_cache(self, capacity: int, prompt: Prompt | None = None) -> CacheT:
        """State for a request of at most `capacity` tokens that begins with `prompt`."""

    @abstractmethod
    def extend(
        self, caches: Sequence[CacheT], rows: Sequence[Tensor], ids: Sequence[Tensor] = ()
    ) -> Tensor:
        """Compute further tokens of one or more requests in one pass.

        `rows[i]` [n_i, D] are the next input rows of the request behind `caches[i]`, `ids[i]` [n_i] their raw token ids
        (needed by families that route by id). Returns hidden rows [sum n_i, D] after the final norm, in the same order.
        """

    @torch.inference_mode()
    def prompt_rows(self, prompt: Prompt) -> Tensor:
        """The language model's input rows for a prompt, pictures merged in: [T, D] float32."""
        pieces = self.encode_pictures(prompt.items)
        placed: list[tuple[int, Tensor]] = []
        items: Sequence[MediaItem | V4MediaItem] = prompt.items
        for item, piece in zip(items, pieces, strict=True):
            assert piece.shape[0] == item.length, (
                f"a picture has {piece.shape[0]} rows for {item.length} placeholders"
            )
            placed.append((item.start, piece))
        rows: Tensor = self.model.embed(self.prompt_ids(prompt), placed)
        return rows

    def prompt_ids(self, prompt: Prompt) -> Tensor:
        return torch.tensor(prompt.token_ids, dtype=torch.int64, device=self.model.device)

    @torch.inference_mode()
    def prefill(
        self,
        rows: Tensor,
        cache: CacheT,
        *,
        ids: Tensor | None = None,
        chunk_size: int = PREFILL_CHUNK,
    ) -> Tensor:
        """Compute all of `rows` [T, D] in chunks that end legally; returns all hidden rows [T, D]."""
        return torch.cat(list(self._chunks(rows, cache, ids, chunk_size)))

    def _chunks(
        self, rows: Tensor, cache: CacheT, ids: Tensor | None, chunk_size: int
    ) -> Iterator[Tensor]:
        at, count = 0, rows.shape[0]
        while at < count:
            end = min(count, cache.legal_end(min(count, at + chunk_size)))
            yield self.extend([cache], [rows[at:end]], [] if ids is None else [ids[at:end]])
            at = end

    @torch.inference_mode()
    def logits(self, hidden: Tensor) -> Tensor:
        """Head rows [n, vocabulary] float32 for hidden rows [n, D]."""
        rows: Tensor = self.model.logits(hidden)
        return rows

    @torch.inference_mode()
    def step(self, cache: CacheT, token: int) -> Tensor:
        """Feed one token; returns the logits [vocabulary] that follow it."""
        ids = torch.tensor([token], device=self.model.device)
        return self.logits(self.extend([cache], [self.model.embed(ids)], [ids]))[0]

    @torch.inference_mode()
    def start(self, prompt: Prompt, capacity: int) -> tuple[CacheT, Tensor]:
        """Compute a whole prompt; returns its state and the logits [vocabulary] of the first new token."""
        self.timings = Timings()
        rows = self.prompt_rows(prompt)
        begin = time.perf_counter()
        cache = self.new_cache(capacity, prompt)
        for piece in self._chunks(rows, cache, self.prompt_ids(prompt), PREFILL_CHUNK):
            hidden = piece  # only the last row needs the head
        logits = self.logits(hidden[-1:])[0]
        self.timings.prefill_s = time.perf_counter() - begin
        return cache, logits

    def generate(
        self,
        prompt: Prompt,
        params: SamplingParams,
        *,
        stop_ids: frozenset[int] = frozenset(),
        on_logits: Callable[[Tensor], None] | None = None,
    ) -> Iterator[int]:
        """Token ids of an answer, at most `params.max_tokens`; an id of `stop_ids` is yielded and ends it.

        `on_logits` sees each row of raw logits before it is sampled.
        """
        cache, logits = self.start(prompt, prompt.num_tokens + params.max_tokens)
        seed = fresh_seed() if params.seed is None else params.seed
        tokens = list(prompt.token_ids)
        for count in range(1, params.max_tokens + 1):
            if on_logits is not None:
                on_logits(logits)
            token = sample(logits, params, seed=seed, position=len(tokens), seen=tokens)
            tokens.append(token)
            yield token
            if token in stop_ids or count == params.max_tokens:
                return
            begin = time.perf_counter()
            logits = self.step(cache, token)
            self.timings.decode_s.append(time.perf_counter() - begin)
