"""Where chunks and hits may end."""

from __future__ import annotations

import numpy as np
import pytest

from foveal.cache.spans import (
    Span,
    check_spans,
    is_legal_end,
    last_legal_end,
    media_span,
    overlapping_spans,
)
from foveal.types import MediaItem
from foveal.vision.v4 import llm_grid_for, vit_grid_for
from tests.cache.samples import v4_item
from tests.vision.v4_pictures import SMALL

ID = b"picture"
# START at 3, END at 8, as in the toy example of V4 spec 6.4.
ATOMIC = Span(3, 6, ID, is_atomic=True)


def test_an_end_is_illegal_only_behind_the_first_token_of_an_atomic_span() -> None:
    legal = [end for end in range(13) if is_legal_end([ATOMIC], end)]
    assert legal == [0, 1, 2, 3, 9, 10, 11, 12]


@pytest.mark.parametrize(("wanted", "legal"), [(3, 3), (4, 3), (8, 3), (9, 9), (12, 12)])
def test_last_legal_end_goes_back_to_the_start_of_the_span(wanted: int, legal: int) -> None:
    assert last_legal_end([ATOMIC], wanted) == legal


def test_spans_that_may_be_split_forbid_nothing() -> None:
    assert all(is_legal_end([Span(3, 6, ID)], end) for end in range(13))


def test_neighbours_meet_at_a_legal_end() -> None:
    spans = [ATOMIC, Span(9, 4, ID, is_atomic=True)]
    assert [end for end in range(15) if is_legal_end(spans, end)] == [0, 1, 2, 3, 9, 13, 14]


def test_legal_ends_equal_the_definition_for_many_spans() -> None:
    rng = np.random.default_rng(0)
    for _ in range(50):
        spans, at = [], 0
        for _ in range(rng.integers(0, 5)):
            start = at + int(rng.integers(0, 4))
            spans.append(Span(start, int(rng.integers(1, 5)), ID, bool(rng.integers(0, 2))))
            at = spans[-1].end
        for end in range(at + 3):
            splits = any(s.is_atomic and s.start < end < s.end for s in spans)
            assert is_legal_end(spans, end) is not splits


def test_overlap_counts_a_token_and_not_a_border() -> None:
    spans = [Span(0, 4, ID), Span(4, 4, ID), Span(20, 4, ID)]
    assert list(overlapping_spans(spans, 4, 8)) == [spans[1]]
    assert list(overlapping_spans(spans, 3, 21)) == spans
    assert list(overlapping_spans(spans, 8, 20)) == []


@pytest.mark.parametrize(
    "spans", [[Span(4, 4, ID), Span(0, 4, ID)], [Span(0, 5, ID), Span(4, 1, ID)], [Span(0, 0, ID)]]
)
def test_disordered_and_empty_spans_are_bugs(spans: list[Span]) -> None:
    with pytest.raises(AssertionError):
        check_spans(spans)


def test_a_vl2_picture_is_a_span_that_may_be_split() -> None:
    item = MediaItem((1, 1), start=7, length=421, tiles=np.zeros((2, 3, 4, 4), np.uint8))
    assert media_span(item, ID) == Span(7, 421, ID, is_atomic=False)


@pytest.mark.parametrize("start", [0, 1, 2, 3])
def test_a_v4_span_leaves_out_the_pads_before_start(start: int) -> None:
    item = v4_item(np.zeros((40, 40, 3), np.uint8), start=start)
    span = media_span(item, ID)
    assert span.is_atomic
    assert (span.start, span.end - 1) == item.span
    assert span.start == start + item.num_pads
    assert span.end == item.start + item.length
    assert item.llm_grid == llm_grid_for(vit_grid_for(40, 40, SMALL), SMALL)
