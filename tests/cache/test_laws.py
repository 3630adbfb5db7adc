"""Random lives of requests over tiny pools: whatever happens, what the cache gives is what computing would give.

Named invariants (engine study, section 24): conservation; findable is final; equal id, equal content. They are checked
after each move by `World.check`, and each row that a step may read is compared with the truth before the step.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import ClassVar

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    invariant,
    precondition,
    rule,
    run_state_machine_as_test,
)

from foveal.cache import Span, last_legal_end
from tests.cache.world import MARGIN, Request, World, toy_spec

PICTURES = (b"c" * 32, b"d" * 32)
# Positions and lengths of pictures in the prompts of each family.
FAMILIES: tuple[tuple[tuple[int, int], ...], ...] = ((), ((5, 14),), ((0, 3), (3, 5), (20, 9)))
TEXT_ENDS = (0, 19, 29)
MAX_RUNNING = 3
picks = st.integers(0, 99)


class Lives(RuleBasedStateMachine):
    """Requests are added, admitted, computed in chunks, decoded with drafts, preempted, finished; caches are reset."""

    window: ClassVar[int | None] = None
    is_atomic: ClassVar[bool] = False
    num_blocks: ClassVar[list[int]] = [14]

    @initialize(reserve_blocks=st.integers(0, 2))
    def start(self, reserve_blocks: int) -> None:
        self.world = World(toy_spec(self.window), self.num_blocks, reserve_blocks)
        self.waiting: list[Request] = []
        self.num_added = self.num_hits = self.num_preempted = 0

    def one(self, pick: int) -> Request:
        return self.world.running[pick % len(self.world.running)]

    @rule(
        family=st.integers(0, 2),
        picture=st.sampled_from(PICTURES),
        more=st.integers(1, 30),
        tail=st.integers(0, 3),
        salt=st.sampled_from([None, None, None, "s"]),
        adapter=st.sampled_from([None, None, None, "a"]),
    )
    def add(
        self,
        family: int,
        picture: bytes,
        more: int,
        tail: int,
        salt: str | None,
        adapter: str | None,
    ) -> None:
        length = TEXT_ENDS[family] + more
        spans = [
            Span(start, count, picture if at == 0 else PICTURES[0], self.is_atomic)
            for at, (start, count) in enumerate(FAMILIES[family])
        ]
        tokens = [family + 1] * (length - min(tail, more)) + [tail] * min(tail, more)
        request = self.world.request(
            f"r{self.num_added}", tokens, spans, salt=salt, adapter=adapter
        )
        self.num_added += 1
        if length <= self.world.manager.max_num_tokens:
            self.waiting.append(request)

        self.admit()

    def admit(self) -> None:
        """First come, first served, as long as there is room."""
        while self.waiting and len(self.world.running) < MAX_RUNNING:
            is_alone = not self.world.running
            hit = self.world.admit(self.waiting[0], checked=True)
            if hit is None:
                assert not is_alone, "a request that fits the pool is not admitted to an empty one"
                return
            self.waiting.pop(0)
            self.num_hits += hit.num_tokens > 0

    @precondition(lambda self: self.world.running)
    @rule(pick=picks, wanted=st.integers(1, 40), is_committed=st.booleans())
    def chunk(self, pick: int, wanted: int, is_committed: bool) -> None:
        """A legal chunk of a prompt, committed at once or after the next chunk was planned."""
        request = self.one(pick)
        start, num_tokens = request.num_computed, len(request.tokens)
        if start == num_tokens:
            return
        end = last_legal_end(request.spans, min(start + wanted, num_tokens))
        if end <= start:
            end = next(span.end for span in request.spans if span.end > start)
        if self.got_blocks(request, lambda: self.world.step(request, end - start)):
            self.world.commit(request, request.num_computed if is_committed else start)

    @precondition(lambda self: self.world.running)
    @rule(
        pick=picks,
        wanted=st.integers(5, 40),
        steps=st.lists(st.lists(st.integers(0, 3), max_size=MARGIN), min_size=1, max_size=6),
    )
    def decode(self, pick: int, wanted: int, steps: list[list[int]]) -> None:
        """Finish the prompt, then tokens and drafts, of which those are accepted that a fixed rule had sampled."""
        request = self.one(pick)
        while request in self.world.running and request.num_computed < len(request.tokens):
            self.chunk(self.world.running.index(request), wanted, True)
        for drafts in steps:
            room = self.world.manager.max_num_tokens - len(request.tokens)
            if request not in self.world.running or room < 1:
                return
            drafts = drafts[: room - 1]
            num_accepted = next((i for i, draft in enumerate(drafts) if draft != 1), len(drafts))
            ahead = MARGIN - len(drafts)
            if not self.world.decode(request, 1, drafts, num_accepted, lookahead=ahead):
                self.got_blocks(request, lambda: self.world.decode(request, 1))

    def got_blocks(self, request: Request, act: Callable[[], bool]) -> bool:
        """Try, commit what is in flight, then preempt the newest until blocks are there or `request` itself is gone."""
        if act():
            return True
        for running in self.world.running:
            self.world.commit(running)
        while not act():
            assert len(self.world.running) > 1, "a request alone gets no blocks"
            newest = self.world.running[-1]
            self.num_preempted += 1
            self.world.free(newest)
            self.waiting.insert(0, newest)
            if newest is request:
                return False
        return True

    @precondition(lambda self: self.world.running)
    @rule(pick=picks, comes_back=st.booleans())
    def end(self, pick: int, comes_back: bool) -> None:
        """A request finishes, is aborted or is preempted, whatever it is doing."""
        request = self.one(pick)
        self.world.free(request)
        self.world.manager.free(request.request_id)
        if comes_back:
            self.waiting.insert(0, request)
        self.admit()

    @rule(is_meant=st.integers(0, 3))
    def reset(self, is_meant: int) -> None:
        if is_meant == 0:
            self.world.manager.reset()

    @invariant()
    def all_is_well(self) -> None:
        if hasattr(self, "world"):
            self.world.check()
            for request in self.world.running:
                assert 0 <= request.num_computed <= len(request.tokens), "one counter"
                self.world.check_readable(request)

    def teardown(self) -> None:
        if hasattr(self, "world"):
            for request in list(self.world.running):
                self.world.free(request)
            self.world.manager.reset()
            for usage in self.world.manager.usage():
                assert usage.num_spare == usage.num_blocks, "blocks are lost"


class LivesWithWindow(Lives):
    """DeepSeek-V4's two groups, pictures in one piece; three blocks of window more than one request may need."""

    window = 8
    is_atomic = True
    num_blocks: ClassVar[list[int]] = [16, 10]


class LivesWithNarrowWindow(LivesWithWindow):
    window = 5


class LivesWithWideWindow(LivesWithWindow):
    window = 13
    num_blocks: ClassVar[list[int]] = [16, 12]


class LivesWithScarceWindow(LivesWithWindow):
    """The window pool bounds the length of requests."""

    num_blocks: ClassVar[list[int]] = [16, 5]


MACHINES = (
    Lives,
    LivesWithWindow,
    LivesWithNarrowWindow,
    LivesWithWideWindow,
    LivesWithScarceWindow,
)
SHORT = settings(max_examples=15, stateful_step_count=30, deadline=None)
LONG = settings(max_examples=200, stateful_step_count=100, deadline=None)


def test_random_lives(machine: type[Lives]) -> None:
    """Short and shrinkable: hypothesis looks for the smallest way to break something."""
    run_state_machine_as_test(machine, settings=SHORT)


@pytest.mark.slow
def test_many_random_lives(machine: type[Lives]) -> None:
    run_state_machine_as_test(machine, settings=LONG)


def test_one_long_life(machine: type[Lives]) -> None:
    """Long: pools that have been full and empty many times. Hypothesis does not reach so far in reasonable time."""
    lives = walk(machine, seed=0, num_moves=600)
    assert lives.num_hits > 0, "nothing was found"
    assert min(pool.num_evictions for pool in lives.world.manager.pools) > 0, "nothing was evicted"
    # Where the window bounds all lengths, three requests do not fill the other pool.
    assert lives.num_preempted > 0 or machine is LivesWithScarceWindow, "nothing was preempted"


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(1, 11))
def test_many_long_lives(machine: type[Lives], seed: int) -> None:
    walk(machine, seed, num_moves=2000)


@pytest.fixture(params=MACHINES, ids=lambda machine: machine.__name__)
def machine(request: pytest.FixtureRequest) -> type[Lives]:
    chosen: type[Lives] = request.param
    return chosen


def walk(machine: type[Lives], seed: int, num_moves: int) -> Lives:
    """The same moves, drawn from a plain generator; checked after each."""
    rng = random.Random(seed)
    lives = machine()
    lives.start(reserve_blocks=seed % 3)
    for move in range(num_moves):
        try:
            one_move(lives, rng)
            lives.all_is_well()
        except AssertionError as error:
            raise AssertionError(f"seed {seed}, move {move}: {error}") from error
    lives.teardown()
    return lives


def one_move(lives: Lives, rng: random.Random) -> None:
    pick, kind = rng.randrange(100), rng.random()
    if kind < 0.3 and len(lives.waiting) < 4:
        lives.add(
            family=rng.randrange(3),
            picture=rng.choice(PICTURES),
            more=rng.randint(1, 30),
            tail=rng.choice([0, 0, 1, 3]),
            salt=rng.choice([None] * 9 + ["s"]),
            adapter=rng.choice([None] * 9 + ["a"]),
        )
    elif kind > 0.997:
        lives.reset(is_meant=0)
    elif not lives.world.running:
        return
    elif kind < 0.6:
        lives.chunk(pick, wanted=rng.randint(1, 40), is_committed=rng.random() < 0.7)
    elif kind < 0.9:
        drafts = [rng.choices([0, 1], k=rng.randint(0, MARGIN)) for _ in range(rng.randint(1, 6))]
        lives.decode(pick, wanted=rng.randint(5, 40), steps=drafts)
    else:
        lives.end(pick, comes_back=rng.random() < 0.5)
