"""Blocks of one cache group: who holds them, which can be found again, which goes next.

    spare       count 0, no hash      taken first, newest first
    evictable   count 0, hash         findable; taken after the spare ones, oldest first
    referenced  count >= 1            held by that many tables; findable if it has a hash

Block 0 is the null block. It pads tables and takes writes that nobody reads; it is never handed out. Nothing is ever
copied: only full blocks get a hash, and a block that is still being written is in one table only. The pool knows ids
and hashes; it knows no tokens and no storage.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping

NULL_BLOCK = 0


class Block:
    """One block's record. `previous` and `next` link it into a list; alone it points to itself."""

    __slots__ = ("block_hash", "block_id", "next", "previous", "ref_count")

    def __init__(self, block_id: int) -> None:
        self.block_id = block_id
        self.ref_count = 0
        self.block_hash: bytes | None = None
        self.previous = self.next = self


class BlockList:
    """A doubly linked list through the blocks themselves: a hit takes its block out of the middle at once."""

    def __init__(self) -> None:
        self._root = Block(-1)
        self._length = 0

    def __len__(self) -> int:
        return self._length

    def __iter__(self) -> Iterator[Block]:
        block = self._root.next
        while block is not self._root:
            yield block
            block = block.next

    def append(self, block: Block) -> None:
        self._insert_before(self._root, block)

    def append_left(self, block: Block) -> None:
        self._insert_before(self._root.next, block)

    def _insert_before(self, place: Block, block: Block) -> None:
        assert block.next is block, f"block {block.block_id} is in a list already"
        block.previous, block.next = place.previous, place
        place.previous.next = place.previous = block
        self._length += 1

    def pop_left(self) -> Block:
        assert self._length > 0, "pop from an empty list of blocks"
        block = self._root.next
        self.remove(block)
        return block

    def remove(self, block: Block) -> None:
        assert block.next is not block, f"block {block.block_id} is in no list"
        block.previous.next, block.next.previous = block.next, block.previous
        block.previous = block.next = block
        self._length -= 1


class BlockPool:
    """`num_blocks` blocks, the null block among them."""

    def __init__(self, num_blocks: int) -> None:
        assert num_blocks >= 2, f"a pool of {num_blocks} blocks has none beside the null block"
        self._blocks = [Block(block_id) for block_id in range(num_blocks)]
        self._spare, self._evictable = BlockList(), BlockList()
        self._by_hash: dict[bytes, Block] = {}
        self.num_evictions = 0
        for block in self._blocks[1:]:
            self._spare.append(block)

    @property
    def num_blocks(self) -> int:
        """Blocks that can be handed out: all but the null block."""
        return len(self._blocks) - 1

    @property
    def num_evictable(self) -> int:
        return len(self._evictable)

    @property
    def num_available(self) -> int:
        """Blocks that nobody holds, with or without a hash."""
        return len(self._spare) + len(self._evictable)

    @property
    def num_findable(self) -> int:
        return len(self._by_hash)

    def ref_count(self, block_id: int) -> int:
        return self._blocks[block_id].ref_count

    def block_hash(self, block_id: int) -> bytes | None:
        return self._blocks[block_id].block_hash

    def find(self, block_hash: bytes) -> int | None:
        """The block with this hash; it is not taken yet."""
        block = self._by_hash.get(block_hash)
        return None if block is None else block.block_id

    def touch(self, block_id: int) -> None:
        """One table more holds this block, which was found by its hash."""
        block = self._blocks[block_id]
        assert block.block_hash is not None, f"block {block_id} has no hash: it cannot be shared"
        if block.ref_count == 0:
            self._evictable.remove(block)
        block.ref_count += 1

    def allocate(self, count: int) -> list[int]:
        """Hand out `count` blocks, each to one table. What they held is gone."""
        assert count <= self.num_available, (
            f"{count} blocks wanted, {self.num_available} available; ask num_available first"
        )
        taken = [self._take() for _ in range(count)]
        for block in taken:
            block.ref_count = 1
        return [block.block_id for block in taken]

    def _take(self) -> Block:
        if self._spare:
            return self._spare.pop_left()
        block = self._evictable.pop_left()
        self._forget(block)
        self.num_evictions += 1
        return block

    def register(self, block_id: int, block_hash: bytes) -> bool:
        """Make a full, final block findable. False if the hash has a block already: this one then stays private."""
        block = self._blocks[block_id]
        assert block.ref_count > 0, f"block {block_id} is held by nobody: its content is not known"
        assert block.block_hash is None, f"block {block_id} has a hash already"
        if block_hash in self._by_hash:
            return False
        block.block_hash = block_hash
        self._by_hash[block_hash] = block
        return True

    def free(self, block_ids: Iterable[int], *, evict_first: bool = False) -> None:
        """One table less holds each of these blocks.

        Those that nobody holds any more are evicted in the order given, after all that were freed before; with
        `evict_first` before those.
        """
        for block_id in block_ids:
            block = self._blocks[block_id]
            assert block.ref_count > 0, f"block {block_id} is freed more often than it was taken"
            block.ref_count -= 1
            if block.ref_count > 0:
                continue
            if block.block_hash is None:
                self._spare.append_left(block)
            elif evict_first:
                self._evictable.append_left(block)
            else:
                self._evictable.append(block)

    def reset(self) -> None:
        """Nothing can be found any more. Blocks that tables hold stay theirs."""
        for block in list(self._by_hash.values()):
            self._forget(block)
        while self._evictable:
            self._spare.append(self._evictable.pop_left())

    def _forget(self, block: Block) -> None:
        assert block.block_hash is not None, f"block {block.block_id} has no hash to forget"
        del self._by_hash[block.block_hash]
        block.block_hash = None

    def check_integrity(self, counts: Mapping[int, int]) -> None:
        """Raises AssertionError unless blocks are conserved; `counts` says how many table entries hold each."""
        assert counts.get(NULL_BLOCK, 0) == 0, "the null block is owned"
        assert self._blocks[NULL_BLOCK].ref_count == 0, "the null block is counted"
        for name, blocks, is_hashed in (
            ("spare", self._spare, False),
            ("evictable", self._evictable, True),
        ):
            listed = list(blocks)
            assert len(listed) == len(blocks), f"{name} list: {len(listed)} linked, {len(blocks)=}"
            for block in listed:
                assert block.next.previous is block, f"block {block.block_id} is linked one way"
                assert block.ref_count == 0, f"block {block.block_id} is {name} and referenced"
                assert (block.block_hash is not None) == is_hashed, f"{block.block_id} in {name}"
        referenced = 0
        for block in self._blocks[1:]:
            held = counts.get(block.block_id, 0)
            assert block.ref_count == held, (
                f"block {block.block_id}: count {block.ref_count}, in {held} tables"
            )
            referenced += block.ref_count > 0
            if block.block_hash is not None:
                assert self._by_hash.get(block.block_hash) is block, "a hash leads elsewhere"
        hashed = sum(block.block_hash is not None for block in self._blocks)
        assert hashed == len(self._by_hash), f"{hashed} hashed blocks, {len(self._by_hash)} found"
        total = self.num_available + referenced
        assert total == self.num_blocks, f"{total} blocks accounted for, {self.num_blocks} exist"
