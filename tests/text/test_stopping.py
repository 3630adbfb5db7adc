from __future__ import annotations

import time

import pytest

from foveal.text.stopping import is_looping, is_runaway_box


@pytest.mark.parametrize(
    ("tokens", "repeats", "is_loop"),
    [
        ([1, 1, 1], 3, True),
        ([1, 1], 3, False),
        ([9, 1, 2, 1, 2, 1, 2], 3, True),
        ([1, 2, 1, 2, 1, 3], 3, False),
        (list(range(32)) * 4, 4, True),
        (list(range(33)) * 4, 4, False),
        ([1] * 10, 0, False),
        ([], 2, False),
    ],
)
def test_a_loop_is_one_ngram_repeated_at_the_end(
    tokens: list[int], repeats: int, is_loop: bool
) -> None:
    assert is_looping(tokens, repeats) is is_loop


@pytest.mark.parametrize(
    ("text", "is_runaway"),
    [
        ("<|det|>[[0, 5, 99999", True),
        ("<|det|>[[0, 5, 999", False),
        ("<|det|>[[1, 2, 3, 4]]<|/det|> 123456", False),
        ("123456", False),
        ("<|det|>[[1]]<|/det|><|det|>[[12345", True),
    ],
)
def test_C036_a_run_of_digits_inside_an_open_box_is_seen(text: str, is_runaway: bool) -> None:
    assert is_runaway_box(text) is is_runaway


def test_C036_the_check_is_fast_on_long_texts() -> None:
    text = "<|det|>" * 2000 + "9" * 50000
    start = time.perf_counter()
    is_runaway_box(text)
    assert time.perf_counter() - start < 0.5
