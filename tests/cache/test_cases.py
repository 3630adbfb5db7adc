"""Rows of the case log about reuse: the wrong blocks, the wrong embeddings, the missing tail."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt
import pytest

from foveal.cache import (
    BlockHasher,
    EncoderCache,
    HashChain,
    KVManager,
    Span,
    item_content_id,
    media_span,
    picture_content_id,
)
from foveal.types import MediaItem, Picture
from foveal.vision.vl2 import is_tiled
from tests.cache.samples import solid, v4_item, vl2_item
from tests.cache.world import World, toy_spec
from tests.vision.pictures import VL2, noise

IMAGE, TEXT = 500, 7
FINGERPRINT = "model"


class Server:
    """Computes prompts one after the other over one cache; says how much of each was found."""

    def __init__(self, block_size: int = 32, num_blocks: int = 2000) -> None:
        self.manager = KVManager(toy_spec(None, block_size), [num_blocks])
        self.hasher = BlockHasher(FINGERPRINT, block_size)
        self.num_requests = 0

    def run(self, token_ids: Sequence[int], spans: Sequence[Span] = ()) -> int:
        """The number of tokens that came from the cache."""
        chain: HashChain = self.hasher.start_chain(spans)
        chain.extend(token_ids)
        name, self.num_requests = f"r{self.num_requests}", self.num_requests + 1
        hit = self.manager.find_prefix(chain.hashes, len(token_ids), spans)
        self.manager.admit(name, hit, chain.hashes, len(token_ids))
        assert self.manager.allocate(name, hit.num_tokens, len(token_ids) - hit.num_tokens)
        self.manager.commit(name, len(token_ids), chain.hashes)
        self.manager.free(name)
        self.manager.check_integrity()
        return hit.num_tokens


def vl2_prompt(
    pictures: Sequence[npt.NDArray[np.uint8]], text: int = 40
) -> tuple[list[int], list[Span], list[MediaItem]]:
    """Five tokens of text, the pictures cut as the number of them demands, and `text` tokens more."""
    ids, spans, items = [TEXT] * 5, [], []
    for rgb in pictures:
        item = vl2_item(rgb, tiled=is_tiled(len(pictures)), start=len(ids), config=VL2)
        items.append(item)
        spans.append(media_span(item, item_content_id(item, fingerprint=FINGERPRINT)))
        ids += [IMAGE] * item.length
    return ids + [TEXT] * text, spans, items


def test_C003_a_third_picture_cuts_the_first_two_anew_and_reuses_nothing() -> None:
    pictures = [noise(1000, 1000, seed=seed) for seed in range(3)]
    first, first_spans, _ = vl2_prompt(pictures[:2])
    second, second_spans, _ = vl2_prompt(pictures)
    assert [span.length for span in first_spans] == [2017, 2017]
    assert [span.length for span in second_spans] == [421, 421, 421]
    ids = [span.content_id for span in first_spans + second_spans]
    assert len(set(ids)) == 5, "a picture that is cut another way needs its own embeddings"
    # All ids are equal up to the end of the first three pictures: only the content tells them apart.
    assert first[:1000] == second[:1000]
    server = Server()
    assert server.run(first, first_spans) == 0
    assert server.run(second, second_spans) == 0
    assert server.run(first, first_spans) == (len(first) - 1) // 32 * 32
    assert server.run(second, second_spans) == (len(second) - 1) // 32 * 32


def test_C003_a_second_picture_leaves_the_first_one_as_it_was() -> None:
    pictures = [noise(1000, 1000, seed=seed) for seed in range(2)]
    server = Server()
    one, one_spans, _ = vl2_prompt(pictures[:1], text=0)
    two, two_spans, _ = vl2_prompt(pictures)
    assert server.run(one, one_spans) == 0
    assert server.run(two, two_spans) == len(one) // 32 * 32


def test_C028_same_text_and_other_pictures_share_no_block_and_no_embedding() -> None:
    server, entries = Server(), EncoderCache(budget_bytes=40 * 421, row_bytes=1)
    prompts = [vl2_prompt([solid(50, 50, 8 * colour)]) for colour in range(32)]
    for number, (ids, spans, items) in enumerate(prompts):
        assert server.run(ids, spans) == 0, "block 0 holds the picture's first tokens"
        (span,), (item,) = spans, items
        assert entries.get(span.content_id) is None
        assert entries.acquire(span.content_id, item.length, item.num_tiles, (str(number), 0))
    assert entries.stats.num_hits == 0
    for ids, spans, _ in prompts:
        assert server.run(ids, spans) == (len(ids) - 1) // 32 * 32


def test_C028_a_block_before_the_picture_is_shared() -> None:
    server = Server(block_size=4)
    found = [
        server.run(ids, spans) for ids, spans, _ in (vl2_prompt([solid(50, 50, c)]) for c in (1, 2))
    ]
    assert found == [0, 4], "five tokens of text stand before the picture"


def test_C029_a_picture_of_another_size_reuses_no_blocks() -> None:
    server = Server()
    sizes = [(384, 384), (1000, 1000), (400, 3600)]
    prompts = [vl2_prompt([solid(*size, 90)]) for size in sizes]
    assert [spans[0].length for _, spans, _ in prompts] == [421, 2017, 2101]
    for ids, spans, _ in prompts:
        assert server.run(ids, spans) == 0


@pytest.mark.parametrize("cut", [vl2_item, v4_item])
def test_C030_turned_pictures_of_one_grey_are_different_pictures(cut: object) -> None:
    assert callable(cut)
    high, wide = solid(30, 150, 200), solid(150, 30, 200)
    ids = [item_content_id(cut(rgb), fingerprint=FINGERPRINT) for rgb in (high, wide)]
    assert ids[0] != ids[1]
    keys = [picture_content_id(Picture(rgb), {"tiled": True}) for rgb in (high, wide)]
    assert keys[0] != keys[1]


@pytest.mark.parametrize(("chunk", "num_cached"), [(8, 40), (16, 32), (20, 40), (1000, 0)])
def test_C032_a_warm_prefix_has_its_window_or_is_no_hit(chunk: int, num_cached: int) -> None:
    # Window 8, 40 shared tokens. A hit may end only where a chunk left its last window block behind.
    world = World(toy_spec(window=8), [30, 30])
    shared = list(range(100, 140))
    cold = world.request("cold", [*shared, 1, 2, 3, 4, 5, 6, 7, 8])
    world.admit(cold)
    world.prefill(cold, chunk)
    warm = world.request("warm", [*shared, 11, 12, 13])
    world.admit(warm)  # checks each row of the hit and the boundary state
    assert warm.num_cached == num_cached
    world.prefill(warm)  # checks each row that the steps read
    world.check()
