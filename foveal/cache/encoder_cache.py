"""Which media have embeddings, and which work is left for them. It knows no pixels and no embeddings.

    used     some request will read the rows: never evicted
    ahead    reserved for a request that may come to it: evicted only for a user, the latest first
    kept     read by all who wanted them: evicted first, the longest unused first

An entry's rows are reserved as a whole with its first unit (a tile, or whatever the tower takes at once), so items
that are half done can not keep each other from being finished. Units are counted when they are planned, like tokens:
steps run in order, and within a step units run before tokens. A step drops what `take_evicted` names before it runs
its units. Look-ahead takes no reference: whoever waits for a request in front of it may not hold what that one needs.
"""

from __future__ import annotations

from collections import OrderedDict
from dataclasses import dataclass, field
from typing import TypeAlias

# A request and the number of the item in it: one picture may stand in a prompt twice.
User: TypeAlias = tuple[str, int]


@dataclass(slots=True)
class EncoderEntry:
    """Rows of embeddings for one content id; `users` have yet to read them."""

    content_id: bytes
    num_rows: int
    num_units: int
    num_planned_units: int = 0
    users: set[User] = field(default_factory=set)

    @property
    def is_ready(self) -> bool:
        """All units are planned: tokens of the same step, or of a later one, may use the rows."""
        return self.num_planned_units == self.num_units


@dataclass(slots=True)
class EncoderStats:
    """`num_hits` of `num_queries` items were found, ready or in work, when a request came to them."""

    num_queries: int = 0
    num_hits: int = 0
    num_evictions: int = 0


class EncoderCache:
    """Bookkeeping for `budget_bytes` of rows with `row_bytes` each."""

    def __init__(self, budget_bytes: int, row_bytes: int) -> None:
        assert row_bytes >= 1, f"rows of {row_bytes} bytes hold nothing"
        self.num_rows = budget_bytes // row_bytes
        self.row_bytes = row_bytes
        self.stats = EncoderStats()
        self._used: dict[bytes, EncoderEntry] = {}
        self._ahead: OrderedDict[bytes, EncoderEntry] = OrderedDict()
        self._kept: OrderedDict[bytes, EncoderEntry] = OrderedDict()
        self._num_reserved_rows = 0
        self._evicted: list[bytes] = []

    # --- questions ------------------------------------------------------------------------------

    @property
    def num_free_rows(self) -> int:
        """Rows that no entry has reserved."""
        return self.num_rows - self._num_reserved_rows

    @property
    def num_used_rows(self) -> int:
        return sum(entry.num_rows for entry in self._used.values())

    def get(self, content_id: bytes) -> EncoderEntry | None:
        """The entry, to look at."""
        for entries in (self._used, self._ahead, self._kept):
            if content_id in entries:
                return entries[content_id]
        return None

    def is_ready(self, content_id: bytes) -> bool:
        entry = self.get(content_id)
        return entry is not None and entry.is_ready

    # --- an entry's life ------------------------------------------------------------------------

    def acquire(self, content_id: bytes, num_rows: int, num_units: int, user: User) -> bool:
        """Hold the entry for `user` until `release`, reserving it where it is not there.

        False, and nothing is changed, if used entries leave too few rows. The caller acquires items in the order of
        its prompt, and releases each before it waits for one that did not fit.
        """
        entry = self.get(content_id)
        is_new_user = entry is None or user not in entry.users
        if entry is None:
            if not self._make_room(num_rows, [self._kept, self._ahead]):
                return False
            entry = self._add(content_id, num_rows, num_units)
        else:
            self.stats.num_hits += is_new_user
        assert (entry.num_rows, entry.num_units) == (num_rows, num_units), "one id, two sizes"
        self.stats.num_queries += is_new_user
        self._ahead.pop(content_id, None)
        self._kept.pop(content_id, None)
        self._used[content_id] = entry
        entry.users.add(user)
        return True

    def reserve_ahead(self, content_id: bytes, num_rows: int, num_units: int) -> bool:
        """Make an entry that nobody holds yet, in rows that are neither used nor reserved ahead. False if none fit."""
        if self.get(content_id) is not None:
            self._kept_to_ahead(content_id)
            return True
        if not self._make_room(num_rows, [self._kept]):
            return False
        self._ahead[content_id] = self._add(content_id, num_rows, num_units)
        return True

    def _kept_to_ahead(self, content_id: bytes) -> None:
        entry = self._kept.pop(content_id, None)
        if entry is not None:
            self._ahead[content_id] = entry

    def plan_units(self, content_id: bytes, limit: int) -> range:
        """The next units to run, at most `limit`; empty if all are planned."""
        entry = self.get(content_id)
        assert entry is not None, "units of an entry that is not reserved"
        first = entry.num_planned_units
        entry.num_planned_units = min(entry.num_units, first + max(0, limit))
        return range(first, entry.num_planned_units)

    def release(self, content_id: bytes, user: User) -> None:
        """`user` has read the rows for good, or ends. Without users an entry stays until its rows are wanted."""
        entry = self._used.get(content_id)
        if entry is None:
            return
        entry.users.discard(user)
        if not entry.users:
            self._kept[content_id] = self._used.pop(content_id)

    def release_request(self, request_id: str) -> None:
        """All that a request still holds; for its end in any state."""
        for entry in list(self._used.values()):
            for user in [user for user in entry.users if user[0] == request_id]:
                self.release(entry.content_id, user)

    def forget_ahead(self, content_id: bytes) -> None:
        """Nobody will come to an entry that was reserved ahead: it becomes the first to be evicted."""
        entry = self._ahead.pop(content_id, None)
        if entry is not None:
            self._kept[content_id] = entry
            self._kept.move_to_end(content_id, last=False)

    def discard(self, content_id: bytes) -> None:
        """Drop an entry whose work failed. The requests that hold it must end: they will not find it any more."""
        for entries in (self._used, self._ahead, self._kept):
            entry = entries.pop(content_id, None)
            if entry is not None:
                self._drop(entry)

    def take_evicted(self) -> tuple[bytes, ...]:
        """Ids whose rows the runner drops with the next step, before its units run. Each is told once."""
        evicted, self._evicted = tuple(self._evicted), []
        return evicted

    def reset(self) -> None:
        """Evict all that no request holds, and start the statistics anew."""
        for entries in (self._kept, self._ahead):
            while entries:
                self._evict(entries)
        self.stats = EncoderStats()

    # --- room -----------------------------------------------------------------------------------

    def _make_room(self, num_rows: int, victims: list[OrderedDict[bytes, EncoderEntry]]) -> bool:
        evictable = sum(entry.num_rows for entries in victims for entry in entries.values())
        if num_rows > self.num_free_rows + evictable:
            return False
        for entries in victims:
            while entries and num_rows > self.num_free_rows:
                self._evict(entries)
        return True

    def _evict(self, entries: OrderedDict[bytes, EncoderEntry]) -> None:
        # The oldest of the kept ones; of those ahead the latest, whose request is last in the queue.
        _, entry = entries.popitem(last=entries is self._ahead)
        self.stats.num_evictions += 1
        self._drop(entry)

    def _drop(self, entry: EncoderEntry) -> None:
        self._num_reserved_rows -= entry.num_rows
        self._evicted.append(entry.content_id)

    def _add(self, content_id: bytes, num_rows: int, num_units: int) -> EncoderEntry:
        assert num_rows >= 1, "an entry without rows"
        assert num_units >= 1, "an entry without work"
        self._num_reserved_rows += num_rows
        return EncoderEntry(content_id, num_rows, num_units)

    def check_integrity(self) -> None:
        """Raises AssertionError if rows are not conserved or an entry is in a wrong place."""
        places = (self._used, self._ahead, self._kept)
        everything = [entry for entries in places for entry in entries.values()]
        ids = [entry.content_id for entry in everything]
        assert len(ids) == len(set(ids)), "an entry is in two places"
        reserved = sum(entry.num_rows for entry in everything)
        assert reserved == self._num_reserved_rows, f"{reserved} != {self._num_reserved_rows} rows"
        assert reserved <= self.num_rows, f"{reserved} rows reserved, {self.num_rows} exist"
        for entries in places:
            for content_id, entry in entries.items():
                assert entry.content_id == content_id, "an entry has another one's place"
                assert bool(entry.users) == (entries is self._used), "users without a hold, or back"
                assert 0 <= entry.num_planned_units <= entry.num_units, f"{entry}: too many units"
