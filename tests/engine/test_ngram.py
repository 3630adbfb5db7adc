from __future__ import annotations

import time

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from foveal.engine.ngram import NgramIndex, propose

VOCAB = 100
PICTURE, PLACEHOLDER = 103, 9


def by_search(
    tokens: list[int], count: int, excluded: frozenset[int], min_n: int, max_n: int
) -> tuple[int, ...]:
    """The definition, by looking at every place."""

    def is_text(token: int) -> bool:
        return token < VOCAB and token not in excluded

    for n in range(min(max_n, len(tokens)), min_n - 1, -1):
        tail = tokens[-n:]
        if not all(is_text(t) for t in tail):
            continue
        for end in range(len(tokens) - 1, n - 1, -1):
            if tokens[end - n : end] == tail:
                drafts = list(tokens)
                for i in range(count):
                    if not is_text(drafts[end + i]):
                        break
                    drafts.append(drafts[end + i])
                return tuple(drafts[len(tokens) :])
    return ()


@pytest.mark.parametrize(
    ("tokens", "count", "drafts"),
    [
        ([1, 2, 3, 4, 1, 2], 2, (3, 4)),
        ([1, 2, 3, 4, 1, 2], 1, (3,)),
        ([1, 2, 3, 1, 2, 4, 1, 2], 1, (4,)),  # the latest place
        ([7, 1, 2, 3, 8, 1, 2, 4, 7, 1, 2], 1, (3,)),  # a longer match goes before a later one
        ([5, 5, 5], 3, (5, 5, 5)),
        ([1, 2, 1, 2], 5, (1, 2, 1, 2, 1)),
        ([1, 2, 3, 4], 3, ()),
        ([1, 3, 1], 3, ()),  # one token is no n-gram
        ([1, 2, 3, 1, 2], 0, ()),
        ([], 3, ()),
    ],
)
def test_drafts_are_what_followed_before(
    tokens: list[int], count: int, drafts: tuple[int, ...]
) -> None:
    assert propose(tokens, count, vocab_size=VOCAB) == drafts


def test_a_draft_ends_before_a_picture() -> None:
    index = NgramIndex(VOCAB, excluded=[PLACEHOLDER])
    index.extend([1, 2, 3, PLACEHOLDER, PLACEHOLDER, 4, 5, 6, PICTURE, 1, 2])
    assert index.propose(4) == (3,)
    index.extend([4, 5])
    assert index.propose(4) == (6,)


def test_no_match_reaches_over_a_picture() -> None:
    index = NgramIndex(VOCAB, excluded=[PLACEHOLDER])
    index.extend([1, PLACEHOLDER, 2, 3, 1, PLACEHOLDER, 2])
    assert index.propose(4) == ()


@settings(max_examples=300)
@given(
    st.lists(st.sampled_from([1, 2, 3, PLACEHOLDER, PICTURE]), max_size=40),
    st.integers(0, 6),
    st.sampled_from([(1, 1), (1, 3), (2, 4), (3, 3)]),
)
def test_the_index_finds_what_a_search_finds(
    tokens: list[int], count: int, sizes: tuple[int, int]
) -> None:
    index = NgramIndex(VOCAB, excluded=[PLACEHOLDER], min_n=sizes[0], max_n=sizes[1])
    for size in range(len(tokens)):
        expected = by_search(tokens[:size], count, frozenset([PLACEHOLDER]), *sizes)
        assert index.propose(count) == expected, f"after {size} tokens of {tokens}"
        index.extend([tokens[size]])
    assert len(index) == len(tokens)


def test_a_token_costs_the_same_in_a_long_sequence() -> None:
    """A search of the whole sequence would take a thousand times as long."""
    index = NgramIndex(VOCAB)
    index.extend(i * i % 97 for i in range(50_000))
    start = time.perf_counter()
    for token in range(200):
        index.extend([token % 97])
        index.propose(4)
    assert time.perf_counter() - start < 0.2  # 2 ms in truth
