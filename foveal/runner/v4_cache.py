"""Per-request state of a DeepSeek-V4 model, addressed by absolute position, and the context that serves the model.

    window      ring of raw rows, row = position mod (W + margin)
    residue     ring of what tokens gave a compressor, row = position mod (slots + margin)
    entries     list of compressed rows, row = window index = position // r
    keys        list of indexer keys, the same

`num_computed_tokens` is the only record of progress. How many entries exist and which ring rows are valid follows
from it, so any split into chunks gives the same state, and going back by up to `MARGIN` tokens is lowering the
number: rejected rows are overwritten before anything reads them. Source: V4 spec 4.4-4.6, 5.1-5.5, 6.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from foveal import ops
from foveal.models.context import CompressorRows, SparseRows
from foveal.models.v4_config import V4LanguageConfig

# Tokens that may be taken back. A rejected write must never have destroyed a row that is still needed.
MARGIN = 8
# Queries that attend at once; bounds the size of masks and scores in long chunks.
QUERY_BLOCK = 256


@dataclass(frozen=True, slots=True)
class Span:
    """Positions of a picture's tokens from START to END, both included: computed in one pass, visible to each other."""

    start: int
    end: int


class Ring:
    """Rows of the newest positions: row = position mod size."""

    def __init__(
        self, size: int, width: int, dtype: torch.dtype, device: torch.device | str
    ) -> None:
        self.size = size
        self.rows = torch.zeros(size, width, dtype=dtype, device=device)

    def read(self, start: int, end: int) -> Tensor:
        """Rows of positions [start, end)."""
        return self.rows[torch.arange(start, end, device=self.rows.device) % self.size]

    def write(self, start: int, rows: Tensor) -> None:
        """Store rows of positions [start, start + n); only the last `size` of them survive."""
        skipped = max(0, rows.shape[0] - self.size)
        first, kept = start + skipped, rows[skipped:]
        positions = torch.arange(first, first + kept.shape[0], device=self.rows.device)
        self.rows[positions % self.size] = kept.to(self.rows.dtype)


class CompressorState:
    """One compressor's residue and its entries."""

    def __init__(
        self, ratio: int, width: int, capacity: int, device: torch.device | str, dtype: torch.dtype
    ) -> None:
        halves = 2 if ratio == 4 else 1
        self.ratio, self.width = ratio, width
        size = halves * ratio + MARGIN
        self.values = Ring(size, halves * width, torch.float32, device)
        self.gates = Ring(size, halves * width, torch.float32, device)
        self.entries = torch.zeros(capacity // ratio, width, dtype=dtype, device=device)

    def extend(self, start: int, rows: CompressorRows) -> Tensor:
        """Take in the tokens from `start` on; returns all entries that exist after them, [end // ratio, width]."""
        r, end = self.ratio, start + rows.values.shape[0]
        first, stop = start // r, end // r
        if first < stop:
            pooled = self._pool(start, end, first, stop, rows)
            window_starts = torch.arange(first, stop, device=pooled.device) * r
            self.entries[first:stop] = rows.finish(pooled, window_starts).to(self.entries.dtype)
        self.values.write(start, rows.values)
        self.gates.write(start, rows.gates)
        return self.entries[:stop]

    def _pool(self, start: int, end: int, first: int, stop: int, rows: CompressorRows) -> Tensor:
        """Pool the windows [first, stop), the last of which ends at or before `end`."""
        r, overlapping = self.ratio, rows.is_overlapping
        oldest = max(0, (first - 1 if overlapping else first) * r)
        history = min(oldest, start)
        values = torch.cat((self.values.read(history, start), rows.values))[
            oldest - history : stop * r - history
        ]
        gates = torch.cat((self.gates.read(history, start), rows.gates))[
            oldest - history : stop * r - history
        ]
        if not overlapping:
            return ops.compress(values.unflatten(0, (-1, r)), gates.unflatten(0, (-1, r)))
        if first == 0:  # entry 0 has no window before it
            values = torch.cat((torch.zeros_like(values[:r]), values))
            gates = torch.cat((torch.full_like(gates[:r], float("-inf")), gates))
        windows = [t.unflatten(0, (-1, r)) for t in (values, gates)]
        # The first half of a row belongs to the window after its own, the second half to its own.
        slots = [torch.cat((t[:-1, :, : self.width], t[1:, :, self.width :]), 1) for t in windows]
        return ops.compress(slots[0], slots[1])


class V4LayerState:
    """What one layer keeps for one request."""

    def __init__(
        self,
        c: V4LanguageConfig,
        ratio: int,
        capacity: int,
        device: torch.device | str,
        dtype: torch.dtype,
    ) -> None:
        self.window = Ring(c.sliding_window + MARGIN, c.head_dim, dtype, device)
        self.main = CompressorState(ratio, c.head_dim, capacity, device, dtype) if ratio else None
        is_indexed = ratio == 4
        self.index = (
            CompressorState(4, c.index_head_dim, capacity, device, dtype) if is_indexed else None
        )


class V4SequenceCache:
    """State of one request: `capacity` positions at most, `spans` of its pictures."""

    def __init__(
        self,
        config: V4LanguageConfig,
        capacity: int,
        *,
        spans: Sequence[Span] = (),
        dtype: torch.dtype = torch.float32,
        device: torch.device | str = "cpu",
    ) -> None:
        self.capacity, self.spans, self.window_size = capacity, tuple(spans), config.sliding_window
        self.num_computed_tokens = 0
        self.layers = [
            V4LayerState(config, ratio, capacity, device, dtype) for ratio in config.ratios
        ]

    def legal_end(self, end: int) -> int:
        """The nearest chunk end at or after `end` that splits no span."""
        for span in self.spans:
            if span.start < end <= span.end:
                return span.end + 1
        return end

    def visible_range(self, start: int, end: int) -> tuple[Tensor, Tensor]:
        """First and last raw position that each query in [start, end) sees (spec 6.1)."""
        positions = torch.arange(start, end)
        first = (positions - self.window_size + 1).clamp(min=0)
        last = positions.clone()
        for span in self.spans:
            inside = (positions >= span.start) & (positions <= span.end)
            first = torch.where(inside, first.clamp(max=span.start), first)
            last = torch.where(inside, span.end, last)
        return first, last

    def attend(self, layer: int, rows: SparseRows) -> Tensor:
        state, start = self.layers[layer], self.num_computed_tokens
        end = start + rows.kv.shape[0]
        assert end <= self.capacity, f"cache of {self.capacity} positions cannot hold {end}"
        oldest = max(0, start - self.window_size + 1)
        raw = torch.cat((state.window.read(oldest, start).to(rows.kv.dtype), rows.kv))
        entries = index_keys = None
        if rows.compressed is not None and state.main is not None:
            entries = state.main.extend(start, rows.compressed)
        if rows.indexer is not None and state.index is not None:
            index_keys = state.index.extend(start, rows.indexer.keys)
        state.window.write(start, rows.kv)
        outputs = []
        for at in range(start, end, QUERY_BLOCK):
            stop = min(end, at + QUERY_BLOCK)
            outputs.append(
                self._attend_block(rows, (start, at, stop), raw, oldest, entries, index_keys)
            )
        return torch.cat(outputs)

    def _attend_block(
        self,
        rows: SparseRows,
        bounds: tuple[int, int, int],
        raw: Tensor,
        oldest: int,
        entries: Tensor | None,
        index_keys: Tensor | None,
    ) -> Tensor:
        """Queries [at, stop) of a chunk that begins at `start`; `raw` holds the rows from position `oldest` on."""
        start, at, stop = bounds
        first, last = self.visible_range(at, stop)
        low, high = int(first.min()), int(last.max()) + 1
        keys = raw[low - oldest : high - oldest]
        positions = torch.arange(low, low + keys.shape[0])
        visible = (positions >= first[:, None]) & (positions <= last[:, None])
        visible = visible.to(keys.device)
        if entries is not None and rows.compressed is not None:
            ready = (torch.arange(at, stop, device=keys.device) + 1) // rows.compressed.ratio
            reached = torch.arange(entries.shape[0], device=keys.device) < ready[:, None]
            if rows.indexer is not None and index_keys is not None:
                reached = select_entries(rows, slice(at - start, stop - start), index_keys, reached)
            keys = torch.cat((keys, entries.to(keys.dtype)))
            visible = torch.cat((visible, reached), 1)
        query = rows.q[at - start : stop - start]
        return ops.sparse_attention(query, keys, visible, rows.sink, rows.scale)


def select_entries(rows: SparseRows, queries: slice, index_keys: Tensor, reached: Tensor) -> Tensor:
    """The indexer's choice among the entries that are ready; all of them while there are at most top-k."""
    indexer = rows.indexer
    assert indexer is not None
    if index_keys.shape[0] <= indexer.top_k:
        return reached
    scores = ops.index_scores(indexer.queries[queries], index_keys, indexer.head_weights[queries])
    return ops.top_entries(scores, reached, indexer.top_k)


class V4Context:
    """Attention over several requests at once: request i owns the next `counts[i]` rows of the batch."""

    def __init__(self, caches: Sequence[V4SequenceCache], counts: Sequence[int]) -> None:
        self.caches, self.counts = list(caches), list(counts)

    def positions(self, device: torch.device) -> Tensor:
        starts = [cache.num_computed_tokens for cache in self.caches]
        pieces = [torch.arange(s, s + n) for s, n in zip(starts, self.counts, strict=True)]
        return torch.cat(pieces).to(device)

    def attend_sparse(self, layer: int, rows: SparseRows) -> Tensor:
        if len(self.caches) == 1:
            return self.caches[0].attend(layer, rows)
        outputs, at = [], 0
        for cache, count in zip(self.caches, self.counts, strict=True):
            outputs.append(cache.attend(layer, rows.part(slice(at, at + count))))
            at += count
        return torch.cat(outputs)

    def commit(self) -> None:
        """The rows of this pass are computed."""
        for cache, count in zip(self.caches, self.counts, strict=True):
            cache.num_computed_tokens += count
