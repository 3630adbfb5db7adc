"""Tables, hits, admission, trimming, release. Rows are checked through the model world."""

from __future__ import annotations

from dataclasses import replace

import pytest

from foveal.cache import KVManager, Span
from foveal.cache.block_pool import NULL_BLOCK
from foveal.cache.kv_manager import PrefixHit
from tests.cache.world import MARGIN, Request, World, toy_spec

CAT, DOG = b"c" * 32, b"d" * 32


def vl2(num_blocks: int = 20, **options: int) -> World:
    return World(toy_spec(None), [num_blocks], **options)


def v4(num_blocks: int = 20, num_window: int = 20, window: int = 8, **options: int) -> World:
    return World(toy_spec(window), [num_blocks, num_window], **options)


def tokens(count: int, tail: int = 0) -> list[int]:
    return [*range(1, count + 1 - tail), *range(1001, 1001 + tail)]


def run(world: World, request: Request, chunk: int = 10**6) -> Request:
    """Admit and prefill."""
    world.admit(request)
    world.prefill(request, chunk)
    world.check()
    return request


# --- prefix hits ------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("num_shared", "num_tokens", "hit"),
    [(0, 20, 0), (7, 20, 0), (8, 20, 8), (15, 20, 8), (16, 20, 16), (40, 41, 40), (41, 41, 32)],
)
def test_a_vl2_hit_is_the_longest_run_of_full_blocks(
    num_shared: int, num_tokens: int, hit: int
) -> None:
    world = vl2()
    run(world, world.request("a", tokens(41)))
    again = world.request("b", tokens(num_tokens, tail=max(0, num_tokens - num_shared)))
    found = world.admit(again)
    assert found is not None
    # Of 41 shared tokens, 40 are in full blocks and the last one is computed anyway.
    assert found.num_tokens == (40 if num_shared == 41 else hit)


def test_the_last_token_of_a_prompt_is_always_computed() -> None:
    world = vl2()
    run(world, world.request("a", tokens(16)))
    found = world.admit(world.request("b", tokens(16)))
    assert found is not None
    assert found.num_tokens == 8


def test_a_hit_shares_blocks_and_copies_nothing() -> None:
    world = vl2()
    first = run(world, world.request("a", tokens(20)))
    second = run(world, world.request("b", tokens(20)))
    tables = [world.manager.table(r.request_id) for r in (first, second)]
    assert tables[0][:2] == tables[1][:2]
    assert tables[0][2] != tables[1][2], "a block that is being written is private"
    assert world.manager.usage()[0].num_referenced == 4


def test_blocks_are_found_after_their_request_has_ended() -> None:
    world = vl2()
    request = run(world, world.request("a", tokens(20)))
    world.free(request)
    assert world.manager.usage()[0].num_evictable == 2
    assert run(world, world.request("b", tokens(20))).num_cached == 16


def test_answers_are_found_by_the_next_turn() -> None:
    world = vl2()
    request = run(world, world.request("a", tokens(20)))
    for token in range(50, 65):
        world.decode(request, token)
    world.free(request)
    turn = world.request("b", [*request.tokens, 7, 7, 7, 7])
    run(world, turn)
    assert turn.num_cached == 32, "20 of the prompt, 12 of 15 of the answer"


def test_an_unfinished_prompt_is_found_as_far_as_it_is_computed() -> None:
    world = vl2()
    request = world.request("a", tokens(40))
    world.admit(request)
    world.step(request, 20)
    assert world.manager.find_prefix(request.chain.hashes, 40).num_tokens == 0
    world.commit(request)
    assert world.manager.find_prefix(request.chain.hashes, 40).num_tokens == 16


@pytest.mark.parametrize("other", [{"salt": "s"}, {"adapter": "a"}])
def test_salts_and_adapters_do_not_share(other: dict[str, str]) -> None:
    world = vl2()
    run(world, world.request("a", tokens(20)))
    assert run(world, world.request("b", tokens(20), **other)).num_cached == 0
    assert run(world, world.request("c", tokens(20), **other)).num_cached == 16


def test_two_requests_that_compute_the_same_keep_their_own_blocks() -> None:
    world = vl2()
    requests = [world.request(name, tokens(20)) for name in "ab"]
    for request in requests:
        world.admit(request)
    for request in requests:
        world.prefill(request)
        world.check()
    assert world.manager.usage()[0].num_referenced == 6
    world.free(requests[1])
    assert world.manager.usage()[0].num_evictable == 0, "the copy was never findable"


def test_without_hashes_nothing_is_cached() -> None:
    manager = KVManager(toy_spec(8), [10, 10])
    manager.admit("a", manager.find_prefix((), 20), (), 20)
    assert manager.allocate("a", 0, 20) is not None
    manager.commit("a", 20, ())
    manager.free("a")
    assert [usage.num_evictable for usage in manager.usage()] == [0, 0]


def test_a_stale_hit_is_refused() -> None:
    world = vl2(num_blocks=4)
    request = run(world, world.request("a", tokens(20)))
    world.free(request)
    hit = world.manager.find_prefix(request.chain.hashes, 20)
    world.free(run(world, world.request("b", tokens(24, tail=24))))
    with pytest.raises(AssertionError, match="stale"):
        world.manager.admit("c", hit, request.chain.hashes, 20)


# --- atomic spans ---------------------------------------------------------------------------------


def test_prefix_hit_never_ends_inside_an_atomic_span() -> None:
    world = vl2()
    picture = [Span(5, 14, CAT, is_atomic=True)]
    run(world, world.request("a", tokens(30), picture))
    # Blocks 0 to 2 are found; ends 8 and 16 lie inside the picture.
    found = [
        run(world, world.request(f"b{n}", tokens(n, tail=2), picture)).num_cached
        for n in (19, 23, 27, 30)
    ]
    assert found == [0, 0, 24, 24]


def test_a_span_that_may_be_split_stops_no_hit() -> None:
    world = vl2()
    picture = [Span(5, 14, CAT)]
    run(world, world.request("a", tokens(30), picture))
    assert run(world, world.request("b", tokens(19), picture)).num_cached == 16


def test_a_hit_may_end_where_a_span_begins_or_ends() -> None:
    world = vl2()
    picture = [Span(8, 8, CAT, is_atomic=True)]
    run(world, world.request("a", tokens(30), picture))
    assert run(world, world.request("b", tokens(17), picture)).num_cached == 16
    other = [Span(8, 8, DOG, is_atomic=True)]
    assert run(world, world.request("c", tokens(17), other)).num_cached == 8


def test_with_a_window_the_hit_goes_back_to_a_legal_end_that_has_its_window() -> None:
    world = v4()
    picture = [Span(11, 10, CAT, is_atomic=True)]
    run(world, world.request("a", tokens(40), picture), chunk=8)
    # Full blocks 0..2 of a 24-token prefix are found; 16 splits the picture, 8 has its window block.
    assert run(world, world.request("b", tokens(24), picture)).num_cached == 8


# --- windows --------------------------------------------------------------------------------------


def test_a_hit_with_a_window_needs_the_window_block_before_its_end() -> None:
    world = v4()
    run(world, world.request("a", tokens(40)), chunk=16)
    # Chunks ended at 16, 32 and 40: these are the places to go back to.
    cached = [
        run(world, world.request(f"b{n}", tokens(n, tail=4))).num_cached for n in (44, 37, 30)
    ]
    assert cached == [40, 32, 16]


def test_tables_after_a_hit_with_a_window() -> None:
    world = v4()
    first = run(world, world.request("a", tokens(40)), chunk=16)
    hit = world.admit(world.request("b", tokens(37)))
    assert hit is not None
    (full, window), (own_full, _) = hit.blocks, (world.manager.table("a", g) for g in (0, 1))
    assert full == own_full[:4]
    assert window[:3] == (NULL_BLOCK,) * 3
    assert hit.boundary_block == window[3] != NULL_BLOCK
    assert first.num_cached == 0


def test_only_the_tail_of_a_chunk_is_stored() -> None:
    world = v4()
    request = world.request("a", tokens(44))
    world.admit(request)
    allocation = world.manager.allocate("a", 0, 44)
    assert allocation is not None
    full, window = allocation.new_blocks
    assert NULL_BLOCK not in full
    assert [block != NULL_BLOCK for block in window] == [False] * 4 + [True, True]
    assert allocation.boundary_blocks == ((window[4], 40),)


def test_every_chunk_leaves_a_full_block_to_come_back_to() -> None:
    for num_tokens in range(8, 41):
        world = v4()
        world.free(run(world, world.request("a", tokens(num_tokens))))
        again = run(world, world.request("b", [*tokens(num_tokens), 7, 7]))
        assert again.num_cached == num_tokens // 8 * 8, num_tokens


def test_old_window_blocks_are_let_go_and_stay_findable() -> None:
    world = v4()
    request = run(world, world.request("a", tokens(9)))
    for token in range(100, 130):
        world.decode(request, token)
        world.check()
        held = [block for block in world.manager.table("a", 1) if block != NULL_BLOCK]
        assert len(held) <= 2
    usage = world.manager.usage()[1]
    assert (usage.num_referenced, usage.num_evictable) == (1, 4)


def test_a_window_block_left_in_mid_decode_goes_before_ends_of_prompts() -> None:
    world = v4(num_window=8)
    older = run(world, world.request("old", tokens(15, tail=15)))
    world.free(older)
    request = run(world, world.request("a", tokens(16)))
    for token in range(100, 117):
        world.decode(request, token)
    # Block 1, the prompt's end, and then block 2, in the answer, were let go after the older prompt's block 0.
    pool, hashes = world.manager.pools[1], request.chain.hashes

    def found() -> list[bool]:
        names = (older.chain.hashes[0], *hashes[1:3])
        return [pool.find(name) is not None for name in names]

    assert found() == [True, True, True]
    pool.allocate(pool.num_available - 2)
    assert found() == [True, True, False]
    pool.allocate(1)
    assert found() == [False, True, False]


def test_rejected_drafts_are_written_again_before_anything_reads_them() -> None:
    world = v4()
    request = run(world, world.request("a", tokens(13)))
    for drafts, accepted in [([1, 2, 3, 4], 0), ([5, 6, 7, 8], 2), ([9] * 4, 4), ([1] * 4, 0)]:
        assert world.decode(request, 77, drafts, accepted)
        world.check()
        world.check_readable(request)
    assert len(request.tokens) == 13 + 1 + 3 + 5 + 1


def test_drafts_are_not_findable_before_they_are_verified() -> None:
    world = v4()
    request = run(world, world.request("a", tokens(13)))
    request.tokens.append(99)
    assert world.step(request, 1, [1, 2, 3, 4])
    guess = world.request("b", [*request.tokens, 1, 2, 3, 4])
    assert world.manager.find_prefix(guess.chain.hashes, 18).num_tokens == 8
    world.settle(request, 2)
    world.commit(request)
    assert world.manager.find_prefix(guess.chain.hashes, 18).num_tokens == 16


def test_a_step_stores_what_is_read_after_its_unverified_tokens_are_taken_back() -> None:
    world = v4()
    request = world.request("a", tokens(20))
    world.admit(request)
    # Up to position 24 only block 2 would be stored; going back to 20 needs rows from 13 on.
    assert world.step(request, 20, [1, 1, 1, 1])
    world.settle(request, 0)
    world.commit(request)
    world.check_readable(request)


def test_more_unverified_tokens_than_the_margin_are_a_bug() -> None:
    world = v4()
    request = run(world, world.request("a", tokens(8)))
    with pytest.raises(AssertionError, match="margin=4"):
        world.decode(request, 99, [1] * (MARGIN + 1))


def test_look_ahead_gives_room_behind_the_tokens() -> None:
    world = v4()
    run(world, world.request("a", tokens(14)))
    allocation = world.manager.allocate("a", 14, 1, num_lookahead_tokens=4)
    assert allocation is not None
    assert [len(blocks) for blocks in allocation.new_blocks] == [1, 1]
    again = world.manager.allocate("a", 14, 1, num_lookahead_tokens=4)
    assert again == replace(allocation, new_blocks=((), ()))


def test_final_tokens_are_not_written_again() -> None:
    world = vl2()
    run(world, world.request("a", tokens(20)))
    with pytest.raises(AssertionError, match="not written again"):
        world.manager.allocate("a", 19, 1)
    with pytest.raises(AssertionError, match="taken back"):
        world.manager.commit("a", 19, ())


# --- admission ------------------------------------------------------------------------------------


def could_admit(world: World, request: Request) -> bool:
    hashes, num_tokens = request.chain.hashes, len(request.tokens)
    return world.manager.can_admit(num_tokens, world.manager.find_prefix(hashes, num_tokens))


@pytest.mark.parametrize(("num_tokens", "fits"), [(39, True), (40, False)])
def test_a_prompt_must_fit_as_a_whole_with_one_token_more(num_tokens: int, fits: bool) -> None:
    world = vl2(num_blocks=6)
    assert world.manager.max_num_tokens == 39
    assert could_admit(world, world.request("a", tokens(num_tokens))) is fits


def test_two_long_prompts_do_not_get_half_of_memory_each() -> None:
    world = vl2(num_blocks=11)
    first = world.request("a", tokens(47))
    assert world.admit(first, checked=True)
    world.step(first, 8)
    # Nine blocks are available, five of them are promised to the rest of the first prompt.
    assert not could_admit(world, world.request("b", tokens(40, tail=40)))
    assert could_admit(world, world.request("c", tokens(31, tail=31)))


def test_admission_leaves_a_reserve_for_each_running_request() -> None:
    for reserve_blocks, fits in [(1, True), (2, False)]:
        world = vl2(num_blocks=8, reserve_blocks=reserve_blocks)
        run(world, world.request("a", tokens(15)))
        assert could_admit(world, world.request("b", tokens(30, tail=30))) is fits


def test_a_request_alone_needs_no_reserve() -> None:
    world = vl2(num_blocks=6, reserve_blocks=50)
    assert could_admit(world, world.request("a", tokens(39)))


def test_blocks_that_a_running_request_holds_need_no_room() -> None:
    world = vl2(num_blocks=6)
    run(world, world.request("a", tokens(30)))
    assert could_admit(world, world.request("b", tokens(31))), "three blocks are shared"
    assert not could_admit(world, world.request("c", tokens(31, tail=31)))


def test_cached_blocks_that_nobody_holds_count_once() -> None:
    world = vl2(num_blocks=6)
    world.free(run(world, world.request("a", tokens(39))))
    assert could_admit(world, world.request("b", tokens(39)))
    assert not could_admit(world, world.request("c", tokens(40)))


def test_the_window_is_asked_for_its_cap_and_not_for_the_prompt() -> None:
    world = v4(num_blocks=200, num_window=7)
    group = world.spec.groups[1]
    assert 2 * group.max_stored_blocks(MARGIN) == 6
    request = world.request("a", tokens(1500))
    assert could_admit(world, request)
    assert world.admit(request, checked=True)
    assert not could_admit(world, world.request("b", tokens(100, tail=100)))
    world.prefill(request, chunk=64)
    # A decoding request is promised its cap of three blocks, so short prompts of three blocks fit beside it.
    assert could_admit(world, world.request("c", tokens(20, tail=20)))
    assert not could_admit(world, world.request("d", tokens(30, tail=30)))


def test_a_small_window_pool_bounds_the_length() -> None:
    assert v4(num_blocks=200, num_window=7).manager.max_num_tokens == 199 * 8 - 1
    assert v4(num_blocks=200, num_window=4).manager.max_num_tokens == 3 * 8 - 1


# --- allocation, release, reset -------------------------------------------------------------------


@pytest.mark.parametrize("num_new_tokens", [200, 107])
def test_a_failed_allocation_changes_nothing(num_new_tokens: int) -> None:
    # 200 tokens are too many for the full group, the end of 107 takes one window block too many.
    world = v4(num_blocks=20, num_window=4)
    request = run(world, world.request("a", tokens(20)), chunk=8)

    def state() -> object:
        return world.manager.usage(), [world.manager.table("a", group) for group in (0, 1)]

    before = state()
    assert world.manager.allocate("a", 20, num_new_tokens) is None
    assert state() == before
    assert world.decode(request, 5)
    world.check()


def test_a_request_alone_can_fill_the_pool_to_its_limit() -> None:
    world = vl2(num_blocks=6, reserve_blocks=3)
    request = world.request("a", tokens(21))
    assert world.admit(request, checked=True)
    world.prefill(request, chunk=5)
    while len(request.tokens) <= world.manager.max_num_tokens:
        assert world.decode(request, 3)
    world.check()
    assert world.manager.usage()[0].num_spare == 0
    assert not world.decode(request, 3)


def test_free_is_idempotent_and_knows_no_strangers() -> None:
    world = v4()
    run(world, world.request("a", tokens(20)))
    for _ in range(2):
        world.manager.free("a")
    world.manager.free("never seen")
    world.manager.check_integrity()
    assert all(usage.num_referenced == 0 for usage in world.manager.usage())


def test_a_preempted_request_finds_its_own_prefix() -> None:
    world = v4()
    request = run(world, world.request("a", tokens(29)), chunk=8)
    for token in range(5):
        world.decode(request, token)
    world.free(request)
    run(world, request)
    assert request.num_cached == 32, "the hit reaches into the answer, up to the block it was in"


def test_the_tail_of_a_prompt_is_evicted_before_its_head() -> None:
    world = vl2(num_blocks=8)
    request = run(world, world.request("a", tokens(40)))
    world.free(request)
    run(world, world.request("b", tokens(30, tail=30)))
    assert world.manager.find_prefix(request.chain.hashes, 40).num_tokens == 24


def test_reset_forgets_prefixes_and_lets_requests_go_on() -> None:
    world = v4()
    request = run(world, world.request("a", tokens(20)))
    world.manager.reset()
    world.check()
    assert world.manager.find_prefix(request.chain.hashes, 21).num_tokens == 0
    for token in range(10):
        world.decode(request, token)
        world.check()
    world.free(request)
    assert run(world, world.request("b", tokens(20))).num_cached == 0
    assert world.manager.stats.num_requests == 1


def test_after_drain_and_reset_all_counters_are_zero() -> None:
    world = v4()
    for name in "abc":
        run(world, world.request(name, tokens(20)))
    for name in "abc":
        world.manager.free(name)
    world.manager.reset()
    for usage in world.manager.usage():
        assert usage.num_spare == usage.num_blocks
        assert usage.num_evictable == usage.num_referenced == 0
    assert world.manager.num_requests == 0
    assert world.manager.stats.num_query_tokens == world.manager.stats.num_hit_tokens == 0


def test_queries_and_hits_are_counted_in_tokens() -> None:
    world = vl2()
    run(world, world.request("a", tokens(20)))
    run(world, world.request("b", tokens(22)))
    stats = world.manager.stats
    assert (stats.num_requests, stats.num_query_tokens, stats.num_hit_tokens) == (2, 42, 16)


def test_looking_up_changes_nothing() -> None:
    world = v4()
    request = run(world, world.request("a", tokens(20)))
    before = world.manager.usage()
    hit = world.manager.find_prefix(request.chain.hashes, 20)
    world.manager.can_admit(20, hit)
    assert world.manager.usage() == before
    assert world.manager.stats.num_requests == 1


def test_admitting_twice_is_a_bug() -> None:
    world = vl2()
    run(world, world.request("a", tokens(20)))
    with pytest.raises(AssertionError, match="admitted already"):
        world.manager.admit("a", PrefixHit(0, ((),)), (), 20)


@pytest.mark.parametrize("damage", ["shared", "lost", "null"])
def test_the_integrity_check_sees_damage(damage: str) -> None:
    world = v4()
    run(world, world.request("a", tokens(20)))
    table = world.manager._held["a"].tables[0]
    if damage == "shared":
        table[2] = table[0]
    elif damage == "lost":
        table.pop()
    else:
        table[1] = NULL_BLOCK
    with pytest.raises(AssertionError):
        world.manager.check_integrity()
