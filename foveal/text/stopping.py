"""When an answer is over although the model would go on."""

from __future__ import annotations

import re
from collections.abc import Sequence

MAX_NGRAM = 32
# Coordinates have at most three digits; a longer run inside a box never ends well.
MAX_COORDINATE_DIGITS = 4
_OPEN_DET = re.compile(r"<\|det\|>(?:(?!<\|/det\|>).)*\Z", re.DOTALL)
_DIGIT_RUN = re.compile(rf"[0-9]{{{MAX_COORDINATE_DIGITS + 1}}}\Z")


def is_looping(tokens: Sequence[int], repeats: int) -> bool:
    """True if `tokens` end in one n-gram (n <= 32), `repeats` times in a row. `repeats` below 2 is never met."""
    if repeats < 2:
        return False
    size = len(tokens)
    for n in range(1, min(MAX_NGRAM, size // repeats) + 1):
        tail = tokens[size - n * repeats :]
        if all(tail[i] == tail[i % n] for i in range(n, len(tail))):
            return True
    return False


def is_runaway_box(text: str) -> bool:
    """True inside an open `<|det|>` whose last number has more digits than any coordinate."""
    tail = text[-4096:]
    return _DIGIT_RUN.search(tail) is not None and _OPEN_DET.search(tail) is not None
