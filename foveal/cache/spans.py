"""Media in a prompt, as the cache and the scheduler see it: where it is, what it is, whether it may be split."""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise

from foveal.types import MediaItem, V4MediaItem


@dataclass(frozen=True, slots=True)
class Span:
    """`length` tokens from position `start` on that show the media named by `content_id`.

    An `is_atomic` span is computed in one piece, since its tokens see later ones of the same span: no chunk and no
    prefix hit ends inside it. A list of spans is in order of their starts, without overlaps.
    """

    start: int
    length: int
    content_id: bytes
    is_atomic: bool = False

    @property
    def end(self) -> int:
        """The position after the last token."""
        return self.start + self.length


def media_span(item: MediaItem | V4MediaItem, content_id: bytes) -> Span:
    """The span of a picture. VL2's pictures are causal and may be split; V4's run from START to END, without pads."""
    if isinstance(item, V4MediaItem):
        start, last = item.span
        return Span(start, last + 1 - start, content_id, is_atomic=True)
    return Span(item.start, item.length, content_id)


def check_spans(spans: Sequence[Span]) -> None:
    """The order that all else here relies on; processors give it."""
    for span in spans:
        assert span.start >= 0, f"{span} starts before the prompt"
        assert span.length >= 1, f"{span} is empty"
    for before, after in pairwise(spans):
        assert before.end <= after.start, f"{before} and {after} overlap or are out of order"


def last_legal_end(spans: Sequence[Span], position: int) -> int:
    """The last position at or before `position` where a chunk or a prefix hit may end.

    An end is legal if no atomic span has start < end < its own end. Source: V4 spec 6.3.
    """
    at = bisect_left(spans, position, key=lambda span: span.start) - 1
    if at >= 0 and spans[at].is_atomic and position < spans[at].end:
        return spans[at].start
    return position


def is_legal_end(spans: Sequence[Span], position: int) -> bool:
    return last_legal_end(spans, position) == position


def overlapping_spans(spans: Sequence[Span], start: int, end: int) -> Iterator[Span]:
    """The spans with a token in [start, end)."""
    first = bisect_right(spans, start, key=lambda span: span.end)
    for span in spans[first:]:
        if span.start >= end:
            return
        yield span
