"""Block hashes: what they commit to, and what they leave out."""

from __future__ import annotations

import hashlib
import struct
from collections.abc import Sequence
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from foveal.cache.hashing import BlockHasher
from foveal.cache.spans import Span

SEED = bytes(32)
HASHER = BlockHasher("model", 4, SEED)
TOKENS = list(range(100, 116))
CAT, DOG = b"c" * 32, b"d" * 32


def hashes(
    tokens: Sequence[int] = TOKENS,
    spans: Sequence[Span] = (),
    hasher: BlockHasher = HASHER,
    **options: Any,
) -> list[bytes]:
    chain = hasher.start_chain(spans, **options)
    chain.extend(tokens)
    return chain.hashes


def first_difference(a: Sequence[bytes], b: Sequence[bytes]) -> int:
    """The first block whose hash differs; from there on all must."""
    differing = [i for i, (x, y) in enumerate(zip(a, b, strict=True)) if x != y]
    assert differing == list(range(differing[0], len(a))), f"chain is broken: {differing}"
    return differing[0]


def test_equal_prefixes_have_equal_hashes() -> None:
    assert hashes([*TOKENS[:9], 1, 2, 3])[:2] == hashes()[:2]


def test_hashes_have_at_least_128_bits() -> None:
    assert {len(h) * 8 for h in hashes()} == {256}


def test_only_full_blocks_are_hashed() -> None:
    assert [len(hashes(TOKENS[:n])) for n in (0, 3, 4, 7, 8, 16)] == [0, 0, 1, 1, 2, 4]


@pytest.mark.parametrize("position", [0, 3, 4, 15])
def test_a_block_commits_to_its_tokens_and_to_all_before(position: int) -> None:
    changed = list(TOKENS)
    changed[position] += 1
    assert first_difference(hashes(), hashes(changed)) == position // 4


def test_the_same_block_elsewhere_has_another_hash() -> None:
    same = [7, 8, 9, 10]
    assert len(set(hashes(same * 3))) == 3


@pytest.mark.parametrize(
    ("other", "block"),
    [
        ([Span(5, 6, DOG)], 1),  # another picture
        ([Span(6, 5, CAT)], 1),  # elsewhere in its first block
        ([Span(5, 7, CAT)], 1),  # longer, which a first token may depend on
        ([Span(5, 6, CAT), Span(12, 2, CAT)], 3),  # one more picture
        ([], 1),
    ],
)
def test_a_block_commits_to_each_span_that_overlaps_it(other: list[Span], block: int) -> None:
    assert first_difference(hashes(spans=[Span(5, 6, CAT)]), hashes(spans=other)) == block


def test_the_first_block_of_an_atomic_span_commits_to_what_comes_after_it() -> None:
    # Tokens of an atomic span see later ones: block 0 differs though its own tokens are the same.
    a, b = ([Span(2, n, CAT, is_atomic=True)] for n in (8, 9))
    assert first_difference(hashes(spans=a), hashes(spans=b)) == 0


def test_blocks_without_the_span_do_not_name_it() -> None:
    spans = [Span(5, 3, CAT)]
    assert hashes(spans=spans)[0] == hashes()[0]


@pytest.mark.parametrize(
    "options",
    [{"adapter": "a"}, {"salt": "s"}, {"salt": ""}, {"adapter": ""}, {"salt": "a"}],
)
def test_every_block_commits_to_adapter_and_salt(options: dict[str, str]) -> None:
    assert first_difference(hashes(), hashes(**options)) == 0


def test_adapter_and_salt_do_not_mix() -> None:
    seen = [
        hashes(adapter="ab", salt="c"),
        hashes(adapter="a", salt="bc"),
        hashes(adapter="c", salt="ab"),
        hashes(adapter="abc"),
        hashes(salt="abc"),
    ]
    assert len({h[0] for h in seen}) == len(seen)


def test_every_block_commits_to_model_and_seed() -> None:
    other_model = BlockHasher("model2", 4, SEED)
    other_seed = BlockHasher("model", 4, b"1" * 32)
    assert first_difference(hashes(), hashes(hasher=other_model)) == 0
    assert first_difference(hashes(), hashes(hasher=other_seed)) == 0


def test_the_seed_is_drawn_unless_given() -> None:
    a, b = BlockHasher("model", 4), BlockHasher("model", 4)
    assert hashes(hasher=a) == hashes(hasher=a)
    assert hashes(hasher=a) != hashes(hasher=b)


def framed_sha256(*fields: bytes) -> bytes:
    text = struct.pack("<I", len(fields))
    for field in fields:
        text += struct.pack("<Q", len(field)) + field
    return hashlib.sha256(text).digest()


def test_hashes_agree_between_processes_that_share_a_seed() -> None:
    # The layout written out once more: a change of it breaks caches that are shared on purpose.
    root = framed_sha256(b"foveal block", SEED, b"model", b"=a", b"")
    first = framed_sha256(root, struct.pack("<4q", *TOKENS[:4]))
    span = struct.pack("<qq", 1, 6) + CAT
    second = framed_sha256(first, struct.pack("<4q", *TOKENS[4:8]), span)
    third = framed_sha256(
        second, struct.pack("<4q", *TOKENS[8:12]), struct.pack("<qq", -3, 6) + CAT
    )
    assert hashes(TOKENS[:12], [Span(5, 6, CAT)], adapter="a") == [first, second, third]


def test_raw_ids_beyond_the_vocabulary_are_taken() -> None:
    ids = [129280, 129284, 2**40, 0]
    assert hashes(ids) != hashes([*ids[:2], 2**40 + 1, 0])


@given(st.lists(st.integers(0, 3), max_size=40), st.lists(st.integers(0, 40), max_size=8))
def test_growing_step_by_step_equals_hashing_at_once(ids: list[int], ends: list[int]) -> None:
    spans = [Span(3, 6, CAT), Span(10, 2, DOG)]
    chain = HASHER.start_chain(spans)
    for end in sorted(ends):
        chain.extend(ids[:end])
    chain.extend(ids)
    assert chain.hashes == hashes(ids, spans)


def test_a_block_is_hashed_once() -> None:
    chain = HASHER.start_chain()
    chain.extend(TOKENS[:8])
    chain.extend([0] * 8)  # tokens of hashed blocks are not looked at again
    assert chain.hashes == hashes()[:2]
    chain.extend(TOKENS)
    assert chain.hashes == hashes()


def test_overlapping_spans_are_refused() -> None:
    with pytest.raises(AssertionError, match="overlap"):
        HASHER.start_chain([Span(0, 4, CAT), Span(3, 4, DOG)])
