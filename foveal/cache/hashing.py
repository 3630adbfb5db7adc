"""Names for full blocks: equal hashes mean that the same tokens stand before and in the block, media included.

    root = hash(seed, model fingerprint, adapter, salt)
    H(block 0) = hash(root,       token ids, spans that overlap it)
    H(block i) = hash(H(block i-1), token ids, spans that overlap it)

A span enters with its content id, its start relative to the block (negative if it began earlier) and its length: a
picture's first tokens may depend on all of it, also on tokens of later blocks. The hashes are SHA-256, so nobody can
make two that collide; the seed is drawn for each process, so nobody outside can compute them.
"""

from __future__ import annotations

import hashlib
import os
import struct
from collections.abc import Sequence

from foveal.cache.spans import Span, check_spans, overlapping_spans

SEED_BYTES = 32


class BlockHasher:
    """Starts chains of block hashes for one model.

    `fingerprint` stands for everything about the model that changes its state: weights, dtype, format, processor.
    `seed` is random unless given; give it only to share hashes between processes.
    """

    def __init__(self, fingerprint: str, block_size: int, seed: bytes | None = None) -> None:
        assert block_size >= 1, f"block size {block_size}: a block holds at least one token"
        self.block_size = block_size
        self._fingerprint = fingerprint.encode()
        self._seed = os.urandom(SEED_BYTES) if seed is None else seed

    def start_chain(
        self, spans: Sequence[Span] = (), *, adapter: str | None = None, salt: str | None = None
    ) -> HashChain:
        """An empty chain for a request; `spans` are those of its whole prompt, `salt` keeps users apart."""
        fields = (b"foveal block", self._seed, self._fingerprint, _optional(adapter))
        return HashChain(_digest(*fields, _optional(salt)), self.block_size, spans)


class HashChain:
    """Hashes of a request's full blocks, in order. They are computed once and grow as tokens are appended."""

    def __init__(self, root: bytes, block_size: int, spans: Sequence[Span]) -> None:
        check_spans(spans)
        self.block_size = block_size
        self.spans = tuple(spans)
        self.hashes: list[bytes] = []
        self._parent = root

    def extend(self, token_ids: Sequence[int]) -> None:
        """Hash the blocks that have become full. `token_ids` are all tokens of the request, drafts left out."""
        size = self.block_size
        for start in range(len(self.hashes) * size, len(token_ids) // size * size, size):
            ids = struct.pack(f"<{size}q", *token_ids[start : start + size])
            spans = overlapping_spans(self.spans, start, start + size)
            self._parent = _digest(self._parent, ids, *(_span_bytes(s, start) for s in spans))
            self.hashes.append(self._parent)


def _span_bytes(span: Span, block_start: int) -> bytes:
    return struct.pack("<qq", span.start - block_start, span.length) + span.content_id


def _optional(value: str | None) -> bytes:
    """No value and an empty one differ."""
    return b"" if value is None else b"=" + value.encode()


def _digest(*fields: bytes) -> bytes:
    """SHA-256 over fields, each behind its length, so that no bytes can move from one field to the next."""
    hasher = hashlib.sha256(struct.pack("<I", len(fields)))
    for field in fields:
        hasher.update(struct.pack("<Q", len(field)) + field)
    return hasher.digest()
