"""What a model asks of its surroundings during a forward pass. Passed as an argument, never a global."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Protocol

from torch import Tensor


class AttentionContext(Protocol):
    """Owner of the KV cache and of the split of the T rows into sequences.

    Each call stores the layer's new rows and returns the attention output of the T query rows. Rows are in the order of
    the ids given to `forward`; what belongs together is the context's knowledge.
    """

    def attend(self, layer: int, q: Tensor, k: Tensor, v: Tensor, scale: float) -> Tensor:
        """Multi-head attention: `q` [T, H, d], `k` and `v` [T, Hkv, d], rotated -> [T, H, d]."""
        ...

    def attend_latent(
        self,
        layer: int,
        q_nope: Tensor,
        q_pe: Tensor,
        latent: Tensor,
        k_pe: Tensor,
        kv_b: Tensor,
        scale: float,
    ) -> Tensor:
        """Latent attention: `latent` [T, R] normed, `k_pe` [T, dr] rotated; see `ops.mla_attention` -> [T, H, dv]."""
        ...


@dataclass(frozen=True, slots=True)
class CompressorRows:
    """What the new tokens feed a compressor, and how a pooled window becomes an entry.

    `values`, `gates` [T, c * d] float32 (c = 2 where windows overlap; `gates` have their position bias added);
    `finish(pooled [n, d], positions [n])` norms and rotates to the window's first position -> [n, d].
    """

    ratio: int
    values: Tensor
    gates: Tensor
    finish: Callable[[Tensor, Tensor], Tensor]

    @property
    def is_overlapping(self) -> bool:
        return self.ratio == 4


@dataclass(frozen=True, slots=True)
class IndexerRows:
    """What the new tokens ask the indexer: `queries` [T, Hi, di], `head_weights` [T, Hi], its own compressor."""

    queries: Tensor
    head_weights: Tensor
    keys: CompressorRows
    top_k: int


@dataclass(frozen=True, slots=True)
class SparseRows:
    """One V4 layer's new rows: `q` [T, H, d] and `kv` [T, d] rotated, `sink` [H].

    Parts that the layer lacks are None.
    """

    q: Tensor
    kv: Tensor
    sink: Tensor
    scale: float
    compressed: CompressorRows | None = None
    indexer: IndexerRows | None = None

    def part(self, rows: slice) -> SparseRows:
        """The share of one request in a batch."""

        def cut(c: CompressorRows) -> CompressorRows:
            return replace(c, values=c.values[rows], gates=c.gates[rows])

        i = self.indexer
        return replace(
            self,
            q=self.q[rows],
            kv=self.kv[rows],
            compressed=self.compressed and cut(self.compressed),
            indexer=i
            and replace(
                i, queries=i.queries[rows], head_weights=i.head_weights[rows], keys=cut(i.keys)
            ),
        )


class SparseContext(Protocol):
    """Owner of a V4 model's window rows, compressed entries and compressor state, and of the picture spans."""

    def attend_sparse(self, layer: int, rows: SparseRows) -> Tensor:
        """Store the new rows, emit the entries that become complete, attend -> [T, H, d] (still rotated)."""
        ...
