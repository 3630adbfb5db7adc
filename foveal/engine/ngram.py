"""Draft tokens from a request's own tokens: what followed when its last few tokens stood there before.

Texts that copy (a table, a form, JSON, a repeated line) give long drafts at no cost; others give few or none. Knows no
model: whether a draft is right is decided by who verifies it.

    tokens   ... A B C  x y z ...  A B C |        the last three tokens stood there before
    drafts                               x y z

Of several places the one with the longest match counts (at most `max_n` tokens), and of those the latest.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence

MIN_N, MAX_N = 2, 4


class NgramIndex:
    """Where each n-gram of a growing sequence stood last. Work and memory for one token are constant.

    `vocab_size` and `excluded` say which ids are no text (pictures, placeholders): they are never proposed, and no
    n-gram reaches over one.
    """

    def __init__(
        self,
        vocab_size: int,
        *,
        excluded: Collection[int] = (),
        min_n: int = MIN_N,
        max_n: int = MAX_N,
    ) -> None:
        assert 1 <= min_n <= max_n, (
            f"min_n={min_n} and max_n={max_n}: 1 <= min_n <= max_n is needed"
        )
        self._vocab_size, self._excluded = vocab_size, frozenset(excluded)
        self._min_n, self._max_n = min_n, max_n
        self._tokens: list[int] = []
        # n-gram -> the place behind it. That of the sequence's own end is entered with the next token.
        self._places: dict[tuple[int, ...], int] = {}
        self._num_text = 0  # tokens since the last one that is no text

    def __len__(self) -> int:
        return len(self._tokens)

    def extend(self, tokens: Iterable[int]) -> None:
        """Committed tokens come in, in order."""
        for token in tokens:
            for ngram in self._ends():
                self._places[ngram] = len(self._tokens)
            self._tokens.append(token)
            self._num_text = self._num_text + 1 if self._is_text(token) else 0

    def propose(self, count: int) -> tuple[int, ...]:
        """At most `count` draft tokens; none where the end was never met before.

        Where the earlier place overlaps the end, the repetition goes on: after A B A B come A B A B ...
        """
        size = len(self._tokens)
        for ngram in self._ends():
            place = self._places.get(ngram)
            if place is not None:
                period = size - place
                return self._text(self._tokens[place + i % period] for i in range(count))
        return ()

    def _ends(self) -> list[tuple[int, ...]]:
        """The n-grams at the end of the sequence, longest first."""
        longest = min(self._max_n, self._num_text)
        return [tuple(self._tokens[-n:]) for n in range(longest, self._min_n - 1, -1)]

    def _is_text(self, token: int) -> bool:
        return token < self._vocab_size and token not in self._excluded

    def _text(self, tokens: Iterable[int]) -> tuple[int, ...]:
        """`tokens` up to the first that is no text."""
        drafts: list[int] = []
        for token in tokens:
            if not self._is_text(token):
                break
            drafts.append(token)
        return tuple(drafts)


def propose(
    tokens: Sequence[int], count: int, *, vocab_size: int, min_n: int = MIN_N, max_n: int = MAX_N
) -> tuple[int, ...]:
    """`NgramIndex.propose` for a sequence that is asked about once."""
    index = NgramIndex(vocab_size, min_n=min_n, max_n=max_n)
    index.extend(tokens)
    return index.propose(count)
