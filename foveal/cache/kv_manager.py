"""Which request holds which blocks: prefix hits, admission, allocation, window trimming, release.

    find_prefix -> can_admit -> admit -> (allocate -> commit)* -> free

Tables of a DeepSeek-V4 request, in the middle of a long prompt ("·" is the null block):

    full     [ 7  3  9  4  8  2 ]     every block, as long as the request lives
    window   [ ·  ·  ·  ·  5  6 ]     blocks that the next token looks back to; older ones are let go, or were
                                      never stored because a chunk passed over them

The manager holds no progress counter of a request and no tokens: positions come in with each call. What goes out is
plain data for a runner. Only `commit` makes blocks findable, and only those whose tokens are all computed and can not
be taken back; so what is found is final, and hits are exact.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field

from foveal.cache.block_pool import NULL_BLOCK, BlockPool
from foveal.cache.spans import Span, is_legal_end
from foveal.cache.spec import CacheGroup, CacheSpec

Blocks = tuple[int, ...]
# Blocks that admission leaves for each running request to grow into; a preemption costs more than a short wait.
RESERVE_BLOCKS = 2


@dataclass(frozen=True, slots=True)
class PrefixHit:
    """The first `num_tokens` tokens of a request are in the cache.

    `blocks` are its tables so far, one a group; blocks that a window no longer needs are null. `boundary_block` is the
    window block whose boundary state goes to the request's rings before its first step; None where there is none.
    The hit is good until the manager is next changed.
    """

    num_tokens: int
    blocks: tuple[Blocks, ...]
    boundary_block: int | None = None


@dataclass(frozen=True, slots=True)
class Allocation:
    """Storage for one step of one request.

    `new_blocks` go to the ends of its tables, one tuple a group; writes to null blocks are dropped. `boundary_blocks`
    are (window block, position after its last token): the step computes that token, and stores the boundary state of
    the tokens before that position in the block. A step that repeats rejected tokens stores it again.
    """

    new_blocks: tuple[Blocks, ...]
    boundary_blocks: tuple[tuple[int, int], ...] = ()


@dataclass(frozen=True, slots=True)
class GroupUsage:
    """Blocks of one group: `num_blocks` = `num_spare` + `num_evictable` + `num_referenced`."""

    name: str
    num_blocks: int
    num_spare: int
    num_evictable: int
    num_referenced: int


@dataclass(slots=True)
class PrefixStats:
    """Counted when requests are admitted; a request that comes back after preemption counts again."""

    num_requests: int = 0
    num_query_tokens: int = 0
    num_hit_tokens: int = 0


@dataclass(slots=True)
class _Held:
    """What one request holds. `num_known_tokens` are those that it had when it was admitted."""

    tables: tuple[list[int], ...]
    num_known_tokens: int
    num_final_tokens: int
    num_offered_blocks: int
    first_kept_block: int = 0
    turn_blocks: set[int] = field(default_factory=set)


class KVManager:
    """Tables of all running requests over one pool a group.

    `num_blocks` are the pools' sizes in the order of `spec.groups`, null blocks included.
    """

    def __init__(
        self, spec: CacheSpec, num_blocks: Sequence[int], *, reserve_blocks: int = RESERVE_BLOCKS
    ) -> None:
        self.spec = spec
        self.block_size = spec.block_size
        self.pools = tuple(BlockPool(count) for count in num_blocks)
        assert len(self.pools) == len(spec.groups), "one pool a group"
        self.stats = PrefixStats()
        self._reserve_blocks = reserve_blocks
        self._held: dict[str, _Held] = {}

    # --- questions: nothing changes ---------------------------------------------------------------

    def find_prefix(
        self, hashes: Sequence[bytes], num_tokens: int, spans: Sequence[Span] = ()
    ) -> PrefixHit:
        """The longest exact hit for a request of `num_tokens` tokens whose full blocks have `hashes`.

        At least the last token is left to compute, since its logits are wanted. With a window, blocks that the next
        token looks back to must be found as well. A hit does not end inside an atomic span.
        """
        limit = min(len(hashes), max(0, num_tokens - 1) // self.block_size)
        run: list[int] = []
        for block_hash in hashes[:limit]:
            block = self.pools[0].find(block_hash)
            if block is None:
                break
            run.append(block)
        for count in range(len(run), 0, -1):
            if not is_legal_end(spans, count * self.block_size):
                continue
            if len(self.pools) == 1:
                return PrefixHit(count * self.block_size, (tuple(run[:count]),))
            window = self._find_window(hashes, count)
            if window is not None:
                blocks = (tuple(run[:count]), window)
                return PrefixHit(count * self.block_size, blocks, window[-1])
        return PrefixHit(0, ((),) * len(self.pools))

    def _find_window(self, hashes: Sequence[bytes], count: int) -> Blocks | None:
        """The window group's table for a hit of `count` blocks, None if one that is needed is gone."""
        first = self.spec.groups[1].first_needed_block(count * self.block_size)
        tail = [self.pools[1].find(block_hash) for block_hash in hashes[first:count]]
        found = [block for block in tail if block is not None]
        return (NULL_BLOCK,) * first + tuple(found) if len(found) == len(tail) else None

    def can_admit(self, num_tokens: int, hit: PrefixHit) -> bool:
        """Whether a request's whole prompt, and one token more, fits beside what is promised to running requests.

        Running requests keep what their own prompts still need, and a reserve. Alone, a request of up to
        `max_num_tokens` tokens always fits.
        """
        for at, (group, pool) in enumerate(zip(self.spec.groups, self.pools, strict=True)):
            shared = sum(b != NULL_BLOCK and pool.ref_count(b) > 0 for b in hit.blocks[at])
            wanted = _demand(group, num_tokens, self.spec.margin) - shared
            if wanted > pool.num_available - self._num_promised(at):
                return False
        return True

    def _num_promised(self, at: int) -> int:
        """Blocks of group `at` that running requests do not hold yet, but were admitted for or will grow into."""
        group, margin = self.spec.groups[at], self.spec.margin
        promised = 0
        for held in self._held.values():
            wanted = _demand(group, held.num_known_tokens, margin)
            # Window blocks before the first kept one are null.
            own = held.tables[at][held.first_kept_block :] if at else held.tables[at]
            if group.window is None:
                promised += self._reserve_blocks
            elif held.num_final_tokens >= held.num_known_tokens:
                wanted = group.max_stored_blocks(margin)
            promised += max(0, wanted - len(own) + own.count(NULL_BLOCK))
        return promised

    @property
    def max_num_tokens(self) -> int:
        """Tokens that a request alone can hold in the pools, the one after its last included."""
        most = self.pools[0].num_blocks * self.block_size
        for group, pool in zip(self.spec.groups[1:], self.pools[1:], strict=True):
            if pool.num_blocks < _window_demand(group, self.spec.margin):
                most = min(most, pool.num_blocks * self.block_size)
        return most - 1

    @property
    def num_requests(self) -> int:
        return len(self._held)

    def table(self, request_id: str, group: int = 0) -> Blocks:
        return tuple(self._held[request_id].tables[group])

    def usage(self) -> tuple[GroupUsage, ...]:
        return tuple(
            GroupUsage(
                group.name,
                pool.num_blocks,
                pool.num_available - pool.num_evictable,
                pool.num_evictable,
                pool.num_blocks - pool.num_available,
            )
            for group, pool in zip(self.spec.groups, self.pools, strict=True)
        )

    # --- a request's life ------------------------------------------------------------------------

    def admit(
        self, request_id: str, hit: PrefixHit, hashes: Sequence[bytes], num_tokens: int
    ) -> None:
        """Start tables with the blocks of `hit`. `num_tokens` are all tokens known, as for `find_prefix`."""
        assert request_id not in self._held, f"request {request_id} is admitted already"
        for pool, blocks in zip(self.pools, hit.blocks, strict=True):
            for index, block in enumerate(blocks):
                if block != NULL_BLOCK:
                    assert pool.find(hashes[index]) == block, "the hit is stale; look it up again"
                    pool.touch(block)
        num_blocks = hit.num_tokens // self.block_size
        tables = tuple(list(blocks) for blocks in hit.blocks)
        self._held[request_id] = _Held(tables, num_tokens, hit.num_tokens, num_blocks)
        self.stats.num_requests += 1
        self.stats.num_query_tokens += num_tokens
        self.stats.num_hit_tokens += hit.num_tokens

    def allocate(
        self,
        request_id: str,
        num_computed_tokens: int,
        num_new_tokens: int,
        *,
        num_unverified_tokens: int = 0,
        num_lookahead_tokens: int = 0,
    ) -> Allocation | None:
        """Storage for the tokens [num_computed_tokens, num_computed_tokens + num_new_tokens).

        The last `num_unverified_tokens` of them, counting those of earlier steps in flight, may be taken back.
        `num_lookahead_tokens` more get room behind them. None, and nothing is changed, if a pool has too few blocks.
        """
        held, margin = self._held[request_id], self.spec.margin
        assert num_computed_tokens >= held.num_final_tokens, "final tokens are not written again"
        if len(self.pools) > 1:
            ahead = num_unverified_tokens + num_lookahead_tokens
            assert ahead <= margin, f"{ahead} tokens unverified or ahead, the rings have {margin=}"
        end = num_computed_tokens + num_new_tokens
        wanted: list[tuple[int, int]] = []
        for group, pool, table in zip(self.spec.groups, self.pools, held.tables, strict=True):
            first = max(len(table), group.first_stored_block(end - num_unverified_tokens))
            last = max(first, group.num_blocks_for(end + num_lookahead_tokens))
            if last - first > pool.num_available:
                return None
            # A chunk passes over window blocks that no later step reads; they are not stored.
            wanted.append((first - len(table), last - first))
        new_blocks = tuple(
            (NULL_BLOCK,) * num_skipped + tuple(pool.allocate(num_taken))
            for pool, (num_skipped, num_taken) in zip(self.pools, wanted, strict=True)
        )
        for table, blocks in zip(held.tables, new_blocks, strict=True):
            table.extend(blocks)
        if end <= held.num_known_tokens:
            held.turn_blocks.add(end // self.block_size - 1)
        return Allocation(new_blocks, self._boundaries(held, num_computed_tokens, end))

    def _boundaries(self, held: _Held, start: int, end: int) -> tuple[tuple[int, int], ...]:
        """Stored window blocks whose last token is in [start, end)."""
        size = self.block_size
        return tuple(
            (table[index], (index + 1) * size)
            for table in held.tables[1:]
            for index in range(start // size, end // size)
            if table[index] != NULL_BLOCK
        )

    def commit(self, request_id: str, num_final_tokens: int, hashes: Sequence[bytes]) -> None:
        """The first `num_final_tokens` tokens are computed, verified and can not be taken back.

        Their full blocks become findable under `hashes` (empty: no prefix cache), and window blocks that no later
        token looks back to are let go.
        """
        held = self._held[request_id]
        assert num_final_tokens >= held.num_final_tokens, "final tokens were taken back"
        held.num_final_tokens = num_final_tokens
        num_full = min(num_final_tokens // self.block_size, len(hashes))
        for index in range(held.num_offered_blocks, num_full):
            for pool, table in zip(self.pools, held.tables, strict=True):
                if table[index] != NULL_BLOCK:
                    pool.register(table[index], hashes[index])
        held.num_offered_blocks = max(held.num_offered_blocks, num_full)
        self._trim(held)

    def _trim(self, held: _Held) -> None:
        """Let window blocks go. Ends of chunks and of the prompt are what users come back to: they stay longest."""
        for group, pool, table in zip(
            self.spec.groups[1:], self.pools[1:], held.tables[1:], strict=True
        ):
            first = min(group.first_needed_block(held.num_final_tokens), len(table))
            for index in range(held.first_kept_block, first):
                block, table[index] = table[index], NULL_BLOCK
                if block != NULL_BLOCK:
                    pool.free([block], evict_first=index not in held.turn_blocks)
            held.first_kept_block = max(held.first_kept_block, first)

    def free(self, request_id: str) -> None:
        """A request has ended or is preempted: its blocks go back, the tail first. Unknown ids are fine."""
        held = self._held.pop(request_id, None)
        if held is None:
            return
        for pool, table in zip(self.pools, held.tables, strict=True):
            pool.free(block for block in reversed(table) if block != NULL_BLOCK)

    def reset(self) -> None:
        """Forget all prefixes and statistics. Running requests go on."""
        for pool in self.pools:
            pool.reset()
        self.stats = PrefixStats()

    def check_integrity(self) -> None:
        """Raises AssertionError if blocks are not conserved or a findable one is not final."""
        for at, (group, pool) in enumerate(zip(self.spec.groups, self.pools, strict=True)):
            counts: Counter[int] = Counter()
            for request_id, held in self._held.items():
                table = held.tables[at]
                own = [block for block in table if block != NULL_BLOCK]
                assert len(own) == len(set(own)), f"{request_id}: a block twice in {group.name}"
                if group.window is None:
                    assert len(own) == len(table), f"{request_id}: a full table has null blocks"
                needed = range(held.num_final_tokens // self.block_size, len(table))
                _check_private(pool, [table[i] for i in needed if table[i] != NULL_BLOCK])
                counts.update(own)
            pool.check_integrity(counts)


def _check_private(pool: BlockPool, blocks: Sequence[int]) -> None:
    """Blocks that may still be written have no hash and one owner."""
    for block in blocks:
        assert pool.block_hash(block) is None, f"block {block} is findable before it is final"
        assert pool.ref_count(block) == 1, f"block {block} is shared before it is final"


def _demand(group: CacheGroup, num_tokens: int, margin: int) -> int:
    """Blocks that a request needs at most to compute `num_tokens` tokens and one more."""
    total = group.num_blocks_for(num_tokens + 1)
    return total if group.window is None else min(total, _window_demand(group, margin))


def _window_demand(group: CacheGroup, margin: int) -> int:
    """While a chunk runs, the blocks before it are held, and those before its end."""
    return 2 * group.max_stored_blocks(margin)
