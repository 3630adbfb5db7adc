"""Blocks are conserved; what goes first and what goes last."""

from __future__ import annotations

from collections import Counter

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule

from foveal.cache.block_pool import NULL_BLOCK, Block, BlockList, BlockPool


def name(number: int) -> bytes:
    return b"hash %d" % number


def cached(pool: BlockPool, count: int, first: int = 0) -> list[int]:
    """Blocks with hashes `first`, `first` + 1 ... that nobody holds any more, freed in this order."""
    blocks = pool.allocate(count)
    for number, block in enumerate(blocks):
        assert pool.register(block, name(first + number))
    pool.free(blocks)
    return blocks


# --- the list ---------------------------------------------------------------------------------------


def test_a_list_gives_back_blocks_in_order_and_lets_go_of_any() -> None:
    blocks = [Block(i) for i in range(5)]
    line = BlockList()
    for block in blocks[:4]:
        line.append(block)
    line.append_left(blocks[4])
    assert [b.block_id for b in line] == [4, 0, 1, 2, 3]
    for at in (4, 1, 3):
        line.remove(blocks[at])
    assert [b.block_id for b in line] == [0, 2]
    assert line.pop_left() is blocks[0]
    assert len(line) == 1


def test_a_block_is_in_one_list_once() -> None:
    line, block = BlockList(), Block(1)
    line.append(block)
    with pytest.raises(AssertionError, match="in a list already"):
        BlockList().append(block)
    line.remove(block)
    with pytest.raises(AssertionError, match="in no list"):
        line.remove(block)
    with pytest.raises(AssertionError, match="empty"):
        line.pop_left()


# --- the pool ---------------------------------------------------------------------------------------


def test_the_null_block_is_never_handed_out() -> None:
    pool = BlockPool(5)
    assert pool.num_blocks == pool.num_available == 4
    assert NULL_BLOCK not in pool.allocate(4)
    with pytest.raises(AssertionError, match="4 blocks wanted, 0 available"):
        pool.allocate(4)


def test_found_blocks_come_back_to_life_out_of_the_middle() -> None:
    pool = BlockPool(6)
    blocks = cached(pool, 5)
    assert pool.find(name(2)) == blocks[2]
    pool.touch(blocks[2])
    pool.touch(blocks[2])
    assert (pool.ref_count(blocks[2]), pool.num_evictable) == (2, 4)
    pool.check_integrity({blocks[2]: 2})
    assert pool.allocate(4) == [blocks[0], blocks[1], blocks[3], blocks[4]]


def test_findable_blocks_are_evicted_in_the_order_they_were_freed() -> None:
    pool = BlockPool(4)
    cached(pool, 3)
    pool.allocate(2)
    assert [pool.find(name(n)) is None for n in range(3)] == [True, True, False]
    assert pool.num_evictions == 2


def test_blocks_without_a_hash_are_reused_before_any_findable_one() -> None:
    pool = BlockPool(4)
    kept = cached(pool, 2)
    (private,) = pool.allocate(1)
    pool.free([private])
    assert pool.allocate(1) == [private]
    pool.free([private])
    assert pool.allocate(3) == [private, *kept]


def test_evict_first_goes_before_older_findable_blocks() -> None:
    pool = BlockPool(4)
    old = cached(pool, 2)
    (young,) = pool.allocate(1)
    pool.register(young, name(9))
    pool.free([young], evict_first=True)
    assert pool.allocate(3) == [young, *old]


def test_freeing_in_reverse_evicts_the_tail_of_a_prompt_before_its_head() -> None:
    pool = BlockPool(4)
    table = pool.allocate(3)
    for number, block in enumerate(table):
        pool.register(block, name(number))
    pool.free(reversed(table))
    pool.allocate(1)
    assert [pool.find(name(n)) for n in range(3)] == [table[0], table[1], None]


def test_a_hash_that_is_taken_leaves_the_second_block_private() -> None:
    pool = BlockPool(4)
    first, second = pool.allocate(2)
    assert pool.register(first, name(0))
    assert not pool.register(second, name(0))
    assert pool.find(name(0)) == first
    pool.free([second])
    assert pool.allocate(1) == [second], "a private block is spare again"
    pool.check_integrity({first: 1, second: 1})


def test_reset_forgets_everything_and_takes_nothing_away() -> None:
    pool = BlockPool(5)
    cached(pool, 3)
    (held,) = pool.allocate(1)
    pool.register(held, name(7))
    pool.reset()
    assert (pool.num_findable, pool.num_evictable, pool.num_available) == (0, 0, 3)
    assert pool.ref_count(held) == 1
    pool.check_integrity({held: 1})
    pool.free([held])
    assert pool.num_available == 4


def test_misuse_is_noticed() -> None:
    pool = BlockPool(3)
    (block,) = pool.allocate(1)
    with pytest.raises(AssertionError, match="cannot be shared"):
        pool.touch(block)
    pool.register(block, name(0))
    with pytest.raises(AssertionError, match="has a hash already"):
        pool.register(block, name(1))
    pool.free([block])
    with pytest.raises(AssertionError, match="freed more often"):
        pool.free([block])
    with pytest.raises(AssertionError, match="held by nobody"):
        pool.register(block, name(1))


def test_a_pool_needs_a_block_beside_the_null_block() -> None:
    with pytest.raises(AssertionError, match="none beside the null block"):
        BlockPool(1)


@pytest.mark.parametrize("damage", ["count", "hash", "list"])
def test_the_integrity_check_sees_damage(damage: str) -> None:
    pool = BlockPool(4)
    cached(pool, 2)
    block = pool._blocks[pool.allocate(1)[0]]
    counts = {block.block_id: 1}
    pool.check_integrity(counts)
    if damage == "count":
        block.ref_count = 2
    elif damage == "hash":
        block.block_hash = name(0)
    else:
        pool._evictable.pop_left()
    with pytest.raises(AssertionError):
        pool.check_integrity(counts)


# --- random moves -----------------------------------------------------------------------------------

POOL_BLOCKS = 7


class PoolMoves(RuleBasedStateMachine):
    """Tables that take, share, register and free blocks, against a model made of plain lists.

    The model keeps the order of eviction as a list: what is evicted must be its first entry.
    """

    @initialize()
    def start(self) -> None:
        self.pool = BlockPool(POOL_BLOCKS)
        self.tables: list[list[int]] = []
        self.content: dict[bytes, int] = {}
        self.order: list[bytes] = []
        self.next_hash = 0

    def counts(self) -> Counter[int]:
        return Counter(block for table in self.tables for block in table)

    @rule(count=st.integers(0, POOL_BLOCKS))
    def allocate(self, count: int) -> None:
        if count > self.pool.num_available:
            return
        num_spare = self.pool.num_available - len(self.order)
        evicted = self.order[: max(0, count - num_spare)]
        taken = self.pool.allocate(count)
        assert len(set(taken)) == count
        assert NULL_BLOCK not in taken
        assert not set(taken) & set(self.counts()), "a held block was handed out"
        for block_hash in evicted:
            assert self.content.pop(block_hash) in taken
        del self.order[: len(evicted)]
        self.tables.append(taken)

    @rule(at=st.integers(0, 99))
    def share(self, at: int) -> None:
        """A new table that begins with a found block."""
        if self.content:
            block_hash = sorted(self.content)[at % len(self.content)]
            block = self.pool.find(block_hash)
            assert block == self.content[block_hash]
            self.pool.touch(block)
            if block_hash in self.order:
                self.order.remove(block_hash)
            self.tables.append([block])

    @rule(at=st.integers(0, 99), is_copy=st.booleans())
    def register(self, at: int, is_copy: bool) -> None:
        private = [b for t in self.tables for b in t if self.pool.block_hash(b) is None]
        if not private:
            return
        block = private[at % len(private)]
        if is_copy and self.content:
            assert not self.pool.register(block, next(iter(self.content)))
            return
        block_hash = name(self.next_hash)
        self.next_hash += 1
        assert self.pool.register(block, block_hash)
        self.content[block_hash] = block

    @rule(at=st.integers(0, 99), evict_first=st.booleans())
    def free(self, at: int, evict_first: bool) -> None:
        if not self.tables:
            return
        table = self.tables.pop(at % len(self.tables))
        held = self.counts()
        self.pool.free(table, evict_first=evict_first)
        for block in table:
            block_hash = self.pool.block_hash(block)
            if block_hash is not None and not held[block]:
                self.order.insert(0 if evict_first else len(self.order), block_hash)

    @rule()
    def reset(self) -> None:
        self.pool.reset()
        self.content.clear()
        self.order.clear()

    @invariant()
    def blocks_are_conserved(self) -> None:
        self.pool.check_integrity(self.counts())
        assert self.pool.num_evictable == len(self.order)
        assert self.pool.num_findable == len(self.content)
        for block_hash, block in self.content.items():
            assert self.pool.find(block_hash) == block

    def teardown(self) -> None:
        if hasattr(self, "pool"):
            for table in self.tables:
                self.pool.free(table)
            self.pool.check_integrity({})
            assert self.pool.num_available == self.pool.num_blocks


class TestPoolMoves(PoolMoves.TestCase):
    settings = settings(max_examples=30, stateful_step_count=40, deadline=None)


@pytest.mark.slow
class TestManyPoolMoves(PoolMoves.TestCase):
    settings = settings(max_examples=300, stateful_step_count=100, deadline=None)
