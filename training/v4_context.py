"""Attention of DeepSeek-V4 layers over whole right-padded batches, for training: dense, differentiable, no cache.

Equal to `foveal.runner.v4_cache` for each row; a test compares the two. A row may also hold several segments that
share their beginning (segment 0) and do not see each other, each computed as if it stood alone behind it:

    positions  0 1 2 ... 48 | 49 50 ... | 49 50 51 ... | 0 0
    segments   0 0 0 ... 0  | 1  1  ... | 2  2  2  ... | -1

Legend: B rows of L tokens, H heads, d head width, r compression ratio, M compressed entries of a row at most.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TypeAlias

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from foveal import ops
from foveal.models.context import CompressorRows, SparseRows
from training.fast_bodies import attention_weights

LEAST = 1e-6  # keeps logarithms finite
Integers: TypeAlias = npt.NDArray[np.int64]


@dataclass(frozen=True, slots=True, eq=False)
class Entries:
    """The compressed entries of a batch for one ratio.

    `slots` [B, M, r] are the tokens of each entry's window, `before` those of the window before it, which entry 0
    lacks (`is_first` [B, M]); `starts` [B, M] the position of its first token; `visible` [B, L, M] which queries may
    see it.
    """

    slots: Tensor
    before: Tensor
    is_first: Tensor
    starts: Tensor
    visible: Tensor


@dataclass(frozen=True, slots=True, eq=False)
class SparseLayout:
    """What sees what in a batch: `raw` [B, L, L] tokens, `entries` by ratio."""

    raw: Tensor
    entries: dict[int, Entries]

    @classmethod
    def of(
        cls, segments: Integers, positions: Integers, spans: Integers, window: int, ratios: set[int]
    ) -> SparseLayout:
        """`segments`, `positions`, `spans` [B, L]; `spans` numbers the pictures of a row, START to END, -1 outside."""
        own = segments[:, :, None] == segments[:, None, :]
        related = own | (segments == 0)[:, None, :]
        behind = positions[:, :, None] - positions[:, None, :]
        inside = (spans[:, :, None] == spans[:, None, :]) & (spans >= 0)[:, :, None]
        raw = related & (((behind >= 0) & (behind < window)) | inside)
        entries = {r: _entries(segments, positions, r) for r in ratios if r}
        return cls(torch.from_numpy(raw), entries)


def _entries(segments: Integers, positions: Integers, ratio: int) -> Entries:
    rows = [_row_windows(s, ratio) for s in segments]
    count = max(len(row) for row in rows)
    batch = len(segments)
    slots, before = np.zeros((2, batch, count, ratio), np.int64)
    owner = np.full((batch, count), -2)  # no segment has this number
    number = np.zeros((batch, count), np.int64)
    for b, row in enumerate(rows):
        for m, (segment, window, own, earlier) in enumerate(row):
            slots[b, m], owner[b, m], number[b, m] = own, segment, window
            before[b, m] = earlier if window else own
    is_related = (owner[:, None, :] == segments[:, :, None]) | (owner == 0)[:, None, :]
    is_ready = number[:, None, :] < ((positions + 1) // ratio)[:, :, None]
    visible = is_related & is_ready & (segments >= 0)[:, :, None]
    own, earlier = torch.from_numpy(slots), torch.from_numpy(before)
    is_first, starts = torch.from_numpy(number == 0), torch.from_numpy(number * ratio)
    return Entries(own, earlier, is_first, starts, torch.from_numpy(visible))


_Window: TypeAlias = tuple[int, int, Integers, Integers]


def _row_windows(segments: Integers, ratio: int) -> list[_Window]:
    """(segment, number, tokens, tokens of the window before) of each complete window, those shared by all first."""
    shared = np.flatnonzero(segments == 0)
    found: list[_Window] = []
    complete = 0
    for segment in range(int(segments.max(initial=-1)) + 1):
        mine = np.flatnonzero(segments == segment)
        tokens = mine if segment == 0 else np.concatenate((shared, mine))
        for window in range(complete, len(tokens) // ratio):
            at = window * ratio
            found.append(
                (segment, window, tokens[at : at + ratio], tokens[max(0, at - ratio) : at])
            )
        if segment == 0:
            complete = len(tokens) // ratio
    return found


@dataclass(eq=False)
class DenseSparseContext:
    """A `SparseContext` for a batch. Keeps the losses of supervised heads.

    `seen_rows` [R, 2] (row, place) and `seen` [R, heads, L]: where the first heads of `layers` should look among the
    tokens. `anchor_rows` [R', 2] (row, place) look at the token `anchor` [R'] of their row with the last head of
    layer 0.
    """

    layout: SparseLayout
    layers: tuple[int, ...] = ()
    seen_rows: Tensor | None = None
    seen: Tensor | None = None
    anchor_rows: Tensor | None = None
    anchor: Tensor | None = None
    losses: list[Tensor] = field(default_factory=list)
    anchor_losses: list[Tensor] = field(default_factory=list)

    def attend_sparse(self, layer: int, rows: SparseRows) -> Tensor:
        size = len(self.layout.raw)
        q, keys = (t.unflatten(0, (size, -1)) for t in (rows.q, rows.kv))  # [B, L, H, d], [B, L, d]
        visible = self.layout.raw
        if (
            rows.compressed is not None
            and self.layout.entries[rows.compressed.ratio].starts.shape[1]
        ):
            entries = self.layout.entries[rows.compressed.ratio]
            reached = entries.visible
            if rows.indexer is not None and reached.shape[-1] > rows.indexer.top_k:
                reached = self._select(rows, entries)
            keys = torch.cat((keys, pool(rows.compressed, entries, size).to(keys.dtype)), 1)
            visible = torch.cat((visible, reached), -1)
        # One more key, of zeros, is the sink: a further column of the queries gives its score.
        sink = (rows.sink / rows.scale).to(q.dtype)[None, None, :, None].expand(*q.shape[:3], 1)
        queries = torch.cat((q, sink), -1).flatten(1, 2)  # [B, L * H, d + 1]
        wide = torch.nn.functional.pad(keys, (0, 1, 0, 1))
        wide = wide + torch.nn.functional.pad(
            wide.new_ones(1, 1), (keys.shape[-1], 0, keys.shape[1], 0)
        )
        hidden = torch.nn.functional.pad(~visible, (0, 1)).repeat_interleave(q.shape[2], 1)
        weights = attention_weights(queries, wide, rows.scale, hidden)
        self._note(layer, weights.unflatten(1, q.shape[1:3]))
        return (weights[..., :-1] @ keys).unflatten(1, q.shape[1:3]).flatten(0, 1)

    def _select(self, rows: SparseRows, entries: Entries) -> Tensor:
        """The indexer's choice, as in `runner.v4_cache`; it has no gradient."""
        indexer = rows.indexer
        assert indexer is not None
        size = len(self.layout.raw)
        with torch.no_grad():
            keys = pool(indexer.keys, entries, size)
            queries = indexer.queries.unflatten(0, (size, -1))
            weights = indexer.head_weights.unflatten(0, (size, -1))
            scores = torch.stack(
                [ops.index_scores(q, k, w) for q, k, w in zip(queries, keys, weights, strict=True)]
            )
            return ops.top_entries(scores, entries.visible, indexer.top_k)

    def _note(self, layer: int, weights: Tensor) -> None:
        """Keep how far supervised heads are from looking where they should; `weights` [B, L, H, keys]."""
        if (
            layer in self.layers
            and self.seen_rows is not None
            and self.seen is not None
            and len(self.seen_rows)
        ):
            b, place = self.seen_rows.unbind(1)
            share = weights[b, place][:, : self.seen.shape[1], : self.seen.shape[2]].float()
            entropy = -torch.special.xlogy(self.seen, self.seen)
            self.losses.append((-(self.seen * (share + LEAST).log()) - entropy).sum(-1).mean())
        if (
            layer == 0
            and self.anchor_rows is not None
            and self.anchor is not None
            and len(self.anchor_rows)
        ):
            b, place = self.anchor_rows.unbind(1)
            share = weights[b, place, -1].float().gather(1, self.anchor[:, None])
            self.anchor_losses.append(-(share + LEAST).log().mean())


def pool(rows: CompressorRows, entries: Entries, size: int) -> Tensor:
    """The compressed entries of a batch: [B, M, d]."""
    values, gates = (t.unflatten(0, (size, -1)) for t in (rows.values, rows.gates))
    batch = torch.arange(size)[:, None, None]
    own = values[batch, entries.slots], gates[batch, entries.slots]  # [B, M, r, c * d]
    if rows.is_overlapping:
        width = values.shape[-1] // 2
        earlier = (
            values[batch, entries.before][..., :width],
            gates[batch, entries.before][..., :width],
        )
        nothing = earlier[1].masked_fill(entries.is_first[..., None, None], float("-inf"))
        own = (
            torch.cat((earlier[0], own[0][..., width:]), 2),
            torch.cat((nothing, own[1][..., width:]), 2),
        )
    pooled = ops.compress(*(t.flatten(0, 1) for t in own))
    return rows.finish(pooled, entries.starts.flatten()).unflatten(0, (size, -1))
