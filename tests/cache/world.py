"""A model world around the KV manager: rows are written by slot, read back, and compared with what they must be.

The state at a position is a function of all tokens up to it and of the media behind them; here it is just that, as a
tuple. A runner of a few lines writes it where the tables say. So a wrong hit, a block let go too early, a row written
twice or a boundary state that is missing shows as a wrong value and not only as a wrong count.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from foveal.cache import (
    NULL_BLOCK,
    BlockHasher,
    CacheGroup,
    CacheSpec,
    HashChain,
    KVManager,
    Span,
    last_legal_end,
)
from foveal.cache.kv_manager import PrefixHit

BLOCK_SIZE = 8
# Tokens before a block's end whose boundary state goes with the block.
BOUNDARY = 4
MARGIN = 4


def toy_spec(window: int | None, block_size: int = BLOCK_SIZE) -> CacheSpec:
    full = CacheGroup("full", block_size, ())
    if window is None:
        return CacheSpec((full,), margin=MARGIN)
    return CacheSpec((full, CacheGroup("window", block_size, (), window)), margin=MARGIN)


@dataclass(eq=False)
class Request:
    """Tokens that are known; `num_computed` of them are written, `num_final` of those are committed."""

    request_id: str
    tokens: list[int]
    chain: HashChain
    adapter: str | None = None
    num_computed: int = 0
    num_final: int = 0
    num_cached: int = 0
    drafts: list[int] = field(default_factory=list)

    @property
    def spans(self) -> Sequence[Span]:
        return self.chain.spans

    def state(self, position: int) -> Any:
        """What the cache must hold at `position`; drafts count as tokens."""
        tokens = (self.tokens + self.drafts)[: position + 1]
        media = [(s.content_id, s.start, s.length) for s in self.spans if s.start <= position]
        return tuple(tokens), tuple(media), self.adapter

    def boundary(self, end: int) -> Any:
        return tuple(self.state(p) for p in range(end - BOUNDARY, end) if p >= 0)


class World:
    """A manager, its storage, and the truth about findable blocks."""

    def __init__(self, spec: CacheSpec, num_blocks: Sequence[int], reserve_blocks: int = 0) -> None:
        self.spec = spec
        self.manager = KVManager(spec, num_blocks, reserve_blocks=reserve_blocks)
        self.hasher = BlockHasher("model", spec.block_size, seed=b"test")
        self.rows: list[dict[tuple[int, int], Any]] = [{} for _ in num_blocks]
        self.boundaries: dict[int, Any] = {}
        self.content: list[dict[bytes, Any]] = [{} for _ in num_blocks]
        self.running: list[Request] = []

    def request(
        self,
        request_id: str,
        tokens: Sequence[int],
        spans: Sequence[Span] = (),
        *,
        adapter: str | None = None,
        salt: str | None = None,
    ) -> Request:
        chain = self.hasher.start_chain(spans, adapter=adapter, salt=salt)
        chain.extend(tokens)
        return Request(request_id, list(tokens), chain, adapter)

    # --- a request's life ---------------------------------------------------------------------------

    def admit(self, request: Request, *, checked: bool = False) -> PrefixHit | None:
        """Look up, admit and check every row that the hit promises. None if `checked` and it does not fit."""
        hashes, num_tokens = request.chain.hashes, len(request.tokens)
        hit = self.manager.find_prefix(hashes, num_tokens, request.spans)
        assert hit.num_tokens == self.longest_hit(request), "not the longest legal hit"
        if checked and not self.manager.can_admit(num_tokens, hit):
            return None
        self.manager.admit(request.request_id, hit, hashes, num_tokens)
        request.num_computed = request.num_final = request.num_cached = hit.num_tokens
        request.drafts = []
        self.check_readable(request)
        if len(self.spec.groups) > 1 and hit.num_tokens:
            assert hit.boundary_block is not None
            assert self.boundaries[hit.boundary_block] == request.boundary(hit.num_tokens)
        self.running.append(request)
        return hit

    def longest_hit(self, request: Request) -> int:
        """The definition, tried out for every length."""
        size, hashes, best = self.spec.block_size, request.chain.hashes, 0
        for count in range(1, (len(request.tokens) - 1) // size + 1):
            found = [self.manager.pools[0].find(h) is not None for h in hashes[:count]]
            for group, pool in zip(self.spec.groups[1:], self.manager.pools[1:], strict=True):
                first = group.first_needed_block(count * size)
                found += [pool.find(h) is not None for h in hashes[first:count]]
            end = count * size
            splits = any(s.is_atomic and s.start < end < s.end for s in request.spans)
            if all(found) and not splits:
                best = end
        return best

    def step(
        self, request: Request, num_tokens: int, drafts: Sequence[int] = (), lookahead: int = 0
    ) -> bool:
        """Compute `num_tokens` known tokens and `drafts` behind them. False if no blocks could be had."""
        request.drafts = list(drafts)
        start, count = request.num_computed, num_tokens + len(drafts)
        allocation = self.manager.allocate(
            request.request_id,
            start,
            count,
            num_unverified_tokens=len(drafts),
            num_lookahead_tokens=lookahead,
        )
        if allocation is None:
            return False
        self.check_readable(request)
        tables = [self.manager.table(request.request_id, g) for g in range(len(self.rows))]
        for new, table in zip(allocation.new_blocks, tables, strict=True):
            assert table[len(table) - len(new) :] == new
        size = self.spec.block_size
        for position in range(start, start + count):
            for rows, table in zip(self.rows, tables, strict=True):
                if table[position // size] != NULL_BLOCK:
                    rows[table[position // size], position % size] = request.state(position)
        for block, end in allocation.boundary_blocks:
            assert start < end <= start + count, "the block does not end in this step"
            self.boundaries[block] = request.boundary(end)
        request.num_computed += count
        return True

    def settle(self, request: Request, num_accepted: int) -> None:
        """Keep `num_accepted` of the drafts that were computed; the others are taken back."""
        request.num_computed -= len(request.drafts) - num_accepted
        request.tokens += request.drafts[:num_accepted]
        request.drafts = []
        request.chain.extend(request.tokens)
        assert request.num_computed == len(request.tokens)

    def commit(self, request: Request, num_final: int | None = None) -> None:
        """All that is computed, or the first `num_final` tokens of it, will not be taken back."""
        request.num_final = request.num_computed if num_final is None else num_final
        self.manager.commit(request.request_id, request.num_final, request.chain.hashes)

    def prefill(self, request: Request, chunk: int = 10**6) -> None:
        """All known tokens, in chunks of at most `chunk` as far as spans allow it."""
        while request.num_computed < len(request.tokens):
            wanted = min(request.num_computed + chunk, len(request.tokens))
            end = last_legal_end(request.spans, wanted)
            if end <= request.num_computed:
                end = next(s.end for s in request.spans if s.start < wanted < s.end)
            assert self.step(request, end - request.num_computed)
            self.commit(request)

    def decode(
        self,
        request: Request,
        token: int,
        drafts: Sequence[int] = (),
        num_accepted: int = 0,
        lookahead: int = 0,
    ) -> bool:
        """`token` was sampled, and is computed with `drafts` behind it. False, and nothing is done, without blocks."""
        request.tokens.append(token)
        if not self.step(request, 1, drafts, lookahead):
            request.tokens.pop()
            request.drafts = []
            return False
        self.settle(request, num_accepted)
        self.commit(request)
        return True

    def free(self, request: Request) -> None:
        self.running.remove(request)
        request.num_computed = request.num_final = 0
        request.drafts = []
        self.manager.free(request.request_id)

    # --- what must hold -----------------------------------------------------------------------------

    def check_readable(self, request: Request) -> None:
        """All rows that the next token reads are there and right."""
        size = self.spec.block_size
        for at, (group, rows) in enumerate(zip(self.spec.groups, self.rows, strict=True)):
            table = self.manager.table(request.request_id, at)
            first = 0 if group.window is None else request.num_computed - group.window + 1
            for position in range(max(0, first), request.num_computed):
                block = table[position // size]
                assert block != NULL_BLOCK, f"{group.name}: position {position} was let go"
                assert rows[block, position % size] == request.state(position), (
                    f"{group.name}: wrong row at position {position} of {request.request_id}"
                )

    def check(self) -> None:
        """Conservation, and: findable is final, equal id means equal content."""
        self.manager.check_integrity()
        for pool, rows, content in zip(self.manager.pools, self.rows, self.content, strict=True):
            is_window = rows is not self.rows[0]
            for block in range(1, pool.num_blocks + 1):
                block_hash = pool.block_hash(block)
                if block_hash is None:
                    continue
                held = [rows[block, i] for i in range(self.spec.block_size)]
                if is_window:
                    held.append(self.boundaries[block])
                assert content.setdefault(block_hash, held) == held, "a findable block changed"
        for group, pool in zip(self.spec.groups[1:], self.manager.pools[1:], strict=True):
            most = 2 * group.max_stored_blocks(self.spec.margin) * max(1, len(self.running))
            assert pool.num_blocks - pool.num_available <= most, "window blocks are not let go"
