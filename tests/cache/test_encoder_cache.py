"""Encoder entries: reserved as a whole, never evicted while somebody needs them, never in each other's way."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule

from foveal.cache.encoder_cache import EncoderCache

CAT, DOG, BIRD = b"cat", b"dog", b"bird"
A, B = ("a", 0), ("b", 0)


def cache(num_rows: int = 10) -> EncoderCache:
    return EncoderCache(budget_bytes=num_rows * 8 + 7, row_bytes=8)


def test_the_budget_counts_whole_rows() -> None:
    assert cache(10).num_rows == 10


def test_an_item_is_ready_when_its_last_unit_is_planned() -> None:
    entries = cache()
    assert entries.acquire(CAT, 6, 3, A)
    assert entries.plan_units(CAT, 2) == range(0, 2)
    assert not entries.is_ready(CAT)
    assert entries.plan_units(CAT, 2) == range(2, 3)
    assert entries.is_ready(CAT)
    assert list(entries.plan_units(CAT, 2)) == []


def test_rows_are_reserved_as_a_whole_with_the_first_unit() -> None:
    entries = cache(10)
    assert entries.acquire(CAT, 6, 9, A)
    entries.plan_units(CAT, 1)
    assert entries.num_free_rows == 4
    assert not entries.acquire(DOG, 5, 9, B), "two half-done items could never be finished"
    assert entries.get(DOG) is None
    entries.plan_units(CAT, 8)
    entries.release(CAT, A)
    assert entries.acquire(DOG, 5, 9, B)
    assert entries.take_evicted() == (CAT,)


def test_two_requests_share_one_picture() -> None:
    entries = cache()
    entries.acquire(CAT, 6, 2, A)
    entries.plan_units(CAT, 1)
    assert entries.acquire(CAT, 6, 2, B)
    assert entries.plan_units(CAT, 9) == range(1, 2), (
        "the second one goes on where the first one is"
    )
    entries.release(CAT, A)
    assert entries.num_used_rows == 6
    entries.release(CAT, B)
    assert (entries.num_used_rows, entries.is_ready(CAT)) == (0, True)
    assert (entries.stats.num_queries, entries.stats.num_hits) == (2, 1)


def test_a_picture_that_stands_twice_in_a_prompt_is_held_until_both_are_read() -> None:
    entries = cache()
    entries.acquire(CAT, 6, 1, ("a", 0))
    entries.acquire(CAT, 6, 1, ("a", 1))
    entries.release(CAT, ("a", 0))
    assert entries.num_used_rows == 6
    entries.release(CAT, ("a", 1))
    assert entries.num_used_rows == 0


def test_acquiring_again_changes_nothing() -> None:
    entries = cache()
    for _ in range(3):
        assert entries.acquire(CAT, 6, 1, A)
    assert entries.stats.num_queries == 1
    entries.release(CAT, A)
    assert entries.num_used_rows == 0


def test_unused_entries_stay_until_room_is_wanted_the_longest_unused_goes_first() -> None:
    entries = cache(9)
    for name in (CAT, DOG, BIRD):
        entries.acquire(name, 3, 1, A)
        entries.release(name, A)
    entries.acquire(CAT, 3, 1, B)  # used again
    entries.release(CAT, B)
    assert entries.take_evicted() == ()
    entries.acquire(b"fish", 4, 1, A)
    assert entries.take_evicted() == (DOG, BIRD)
    assert entries.get(CAT) is not None
    assert entries.stats.num_evictions == 2


def test_a_failed_acquire_evicts_nothing() -> None:
    entries = cache(9)
    entries.acquire(CAT, 5, 1, A)
    entries.acquire(DOG, 3, 1, B)
    entries.release(DOG, B)
    assert not entries.acquire(BIRD, 5, 1, B)
    assert entries.get(DOG) is not None
    assert entries.take_evicted() == ()


def test_look_ahead_holds_nothing_against_a_user() -> None:
    entries = cache(10)
    assert entries.reserve_ahead(CAT, 6, 2)
    entries.plan_units(CAT, 1)
    assert entries.acquire(DOG, 8, 1, A), "what waits may not stop what runs"
    assert entries.take_evicted() == (CAT,)


def test_look_ahead_takes_only_rows_that_are_neither_used_nor_reserved_ahead() -> None:
    entries = cache(10)
    entries.acquire(CAT, 4, 1, A)
    entries.release(CAT, A)
    assert entries.reserve_ahead(DOG, 6, 1)
    assert not entries.reserve_ahead(BIRD, 5, 1)
    assert entries.get(CAT) is not None, "nothing is evicted in vain"
    assert entries.reserve_ahead(BIRD, 4, 1)
    assert entries.take_evicted() == (CAT,)


def test_the_latest_entry_ahead_is_evicted_first() -> None:
    entries = cache(9)
    for name in (CAT, DOG, BIRD):
        entries.reserve_ahead(name, 3, 1)
    entries.acquire(b"fish", 3, 1, A)
    assert entries.take_evicted() == (BIRD,)


def test_work_done_ahead_counts_when_the_request_comes() -> None:
    entries = cache()
    entries.reserve_ahead(CAT, 6, 3)
    entries.plan_units(CAT, 2)
    assert entries.acquire(CAT, 6, 3, A)
    assert entries.plan_units(CAT, 9) == range(2, 3)
    assert entries.stats.num_hits == 1


def test_looking_ahead_at_a_kept_entry_saves_it() -> None:
    entries = cache(6)
    entries.acquire(CAT, 3, 1, A)
    entries.acquire(DOG, 3, 1, A)
    entries.release(CAT, A)
    entries.release(DOG, A)
    assert entries.reserve_ahead(CAT, 3, 1)
    entries.acquire(BIRD, 3, 1, B)
    assert entries.take_evicted() == (DOG,)


def test_an_entry_nobody_will_come_to_is_evicted_first() -> None:
    entries = cache(9)
    entries.acquire(CAT, 3, 1, A)
    entries.release(CAT, A)
    entries.reserve_ahead(DOG, 3, 1)
    entries.forget_ahead(DOG)
    entries.forget_ahead(BIRD)  # never reserved
    entries.acquire(b"fish", 6, 1, B)
    assert entries.take_evicted() == (DOG,)


def test_an_evicted_item_starts_from_its_first_unit() -> None:
    entries = cache(6)
    entries.acquire(CAT, 6, 3, A)
    entries.plan_units(CAT, 3)
    entries.release(CAT, A)
    entries.acquire(DOG, 6, 1, A)
    entries.release(DOG, A)
    entries.acquire(CAT, 6, 3, A)
    assert entries.take_evicted() == (CAT, DOG), "the runner drops before it runs units"
    assert entries.plan_units(CAT, 9) == range(0, 3)


def test_release_is_idempotent_in_any_state() -> None:
    entries = cache()
    entries.release(CAT, A)
    entries.release_request("a")
    entries.acquire(CAT, 3, 2, ("a", 0))
    entries.acquire(DOG, 3, 2, ("a", 1))
    entries.acquire(DOG, 3, 2, B)
    for _ in range(2):
        entries.release_request("a")
    assert entries.num_used_rows == 3
    entries.check_integrity()


def test_discard_drops_an_entry_whose_work_failed() -> None:
    entries = cache()
    entries.acquire(CAT, 6, 2, A)
    entries.discard(CAT)
    entries.discard(CAT)
    assert (entries.get(CAT), entries.num_free_rows) == (None, 10)
    assert entries.take_evicted() == (CAT,)
    entries.release(CAT, A)
    entries.check_integrity()


def test_reset_keeps_what_requests_hold() -> None:
    entries = cache()
    entries.acquire(CAT, 3, 1, A)
    entries.acquire(DOG, 3, 1, B)
    entries.release(DOG, B)
    entries.reserve_ahead(BIRD, 3, 1)
    entries.reset()
    assert set(entries.take_evicted()) == {DOG, BIRD}
    assert (entries.num_free_rows, entries.stats.num_queries) == (7, 0)
    entries.check_integrity()


def test_one_id_with_two_sizes_is_a_bug() -> None:
    entries = cache()
    entries.acquire(CAT, 3, 1, A)
    with pytest.raises(AssertionError, match="two sizes"):
        entries.acquire(CAT, 4, 1, B)


def test_the_integrity_check_sees_damage() -> None:
    entries = cache()
    entries.acquire(CAT, 3, 1, A)
    entries._num_reserved_rows = 2
    with pytest.raises(AssertionError, match="rows"):
        entries.check_integrity()


# --- random moves -----------------------------------------------------------------------------------

# id -> rows and units
ITEMS = {b"%d" % n: (n % 5 + 1, n % 3 + 1) for n in range(8)}
REQUESTS = [f"r{n}" for n in range(4)]
item_ids = st.sampled_from(sorted(ITEMS))


@given(
    st.lists(st.lists(item_ids, max_size=4), max_size=4),
    st.lists(item_ids, max_size=20),
    st.integers(5, 9),
)
def test_requests_that_take_their_items_in_order_always_finish(
    requests: list[list[bytes]], ahead: list[bytes], num_rows: int
) -> None:
    # 5 rows hold the largest item. A step runs one unit for each request, and looks ahead at some item.
    entries = EncoderCache(num_rows, row_bytes=1)
    at, guesses = [0] * len(requests), iter(ahead)
    most_steps = sum(ITEMS[item][1] for items in requests for item in items) + 1
    for _ in range(most_steps):
        if (guess := next(guesses, None)) is not None:
            entries.reserve_ahead(guess, *ITEMS[guess])
        for number, items in enumerate(requests):
            if at[number] == len(items):
                continue
            item, user = items[at[number]], (REQUESTS[number], at[number])
            if entries.acquire(item, *ITEMS[item], user):
                entries.plan_units(item, 1)
                if entries.is_ready(item):
                    entries.release(item, user)
                    at[number] += 1
        entries.check_integrity()
    assert at == [len(items) for items in requests], "requests wait for each other"


class EncoderMoves(RuleBasedStateMachine):
    """Requests that want items in order, against a runner that keeps rows for what it was told."""

    @initialize()
    def start(self) -> None:
        self.entries = EncoderCache(budget_bytes=9, row_bytes=1)
        self.holds: set[tuple[bytes, tuple[str, int]]] = set()
        self.runner: dict[bytes, int] = {}

    def drop_evicted(self) -> None:
        for content_id in self.entries.take_evicted():
            self.runner.pop(content_id, None)

    def held_rows(self) -> int:
        return sum(ITEMS[content_id][0] for content_id in {c for c, _ in self.holds})

    @rule(content_id=item_ids, request=st.sampled_from(REQUESTS), item=st.integers(0, 1))
    def acquire(self, content_id: bytes, request: str, item: int) -> None:
        user = (request, item)
        is_held = any(c == content_id for c, _ in self.holds)
        fits = is_held or self.held_rows() + ITEMS[content_id][0] <= self.entries.num_rows
        is_there = self.entries.get(content_id) is not None
        acquired = self.entries.acquire(content_id, *ITEMS[content_id], user)
        assert acquired == (fits or is_there), "only used entries may be in the way"
        if acquired:
            self.holds.add((content_id, user))

    @rule(content_id=item_ids)
    def look_ahead(self, content_id: bytes) -> None:
        held = {c for c, _ in self.holds}
        self.entries.reserve_ahead(content_id, *ITEMS[content_id])
        assert all(self.entries.get(c) for c in held)

    @rule(content_id=item_ids, limit=st.integers(0, 3))
    def run_units(self, content_id: bytes, limit: int) -> None:
        """A step of the runner: drop what was evicted, then run units in order."""
        if self.entries.get(content_id) is None:
            return
        units = self.entries.plan_units(content_id, limit)
        self.drop_evicted()
        assert self.runner.get(content_id, 0) == units.start, "units lost or run twice"
        self.runner[content_id] = units.stop

    @rule(request=st.sampled_from(REQUESTS), item=st.integers(0, 1))
    def read(self, request: str, item: int) -> None:
        """A request reads rows that are ready, and lets go."""
        self.drop_evicted()
        for content_id, user in sorted(self.holds):
            if user == (request, item) and self.entries.is_ready(content_id):
                assert self.runner[content_id] == ITEMS[content_id][1], "rows are not there"
                self.entries.release(content_id, user)
                self.holds.discard((content_id, user))

    @rule(request=st.sampled_from(REQUESTS))
    def abort(self, request: str) -> None:
        self.entries.release_request(request)
        self.holds = {hold for hold in self.holds if hold[1][0] != request}

    @rule(content_id=item_ids)
    def forget(self, content_id: bytes) -> None:
        self.entries.forget_ahead(content_id)

    @rule(content_id=item_ids)
    def fail(self, content_id: bytes) -> None:
        self.entries.discard(content_id)
        self.holds = {hold for hold in self.holds if hold[0] != content_id}

    @rule()
    def reset(self) -> None:
        self.entries.reset()

    @invariant()
    def entries_are_sound(self) -> None:
        self.entries.check_integrity()
        assert self.entries.num_used_rows == self.held_rows()
        for content_id, user in self.holds:
            entry = self.entries.get(content_id)
            assert entry is not None, "a held entry was evicted"
            assert user in entry.users

    def teardown(self) -> None:
        if hasattr(self, "entries"):
            for request in REQUESTS:
                self.entries.release_request(request)
            self.entries.reset()
            self.drop_evicted()
            assert self.entries.num_free_rows == self.entries.num_rows
            assert not self.runner, "the runner keeps rows that nobody names"


class TestEncoderMoves(EncoderMoves.TestCase):
    settings = settings(max_examples=30, stateful_step_count=40, deadline=None)


@pytest.mark.slow
class TestManyEncoderMoves(EncoderMoves.TestCase):
    settings = settings(max_examples=300, stateful_step_count=100, deadline=None)
