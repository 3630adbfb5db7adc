"""Streaming: joined pieces equal whole decoding, stop strings end the text, work stays linear."""

from __future__ import annotations

import time
from collections.abc import Iterable, Sequence

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from foveal.text.detokenize import StreamDetokenizer
from foveal.text.tokenizer import EOS, Tokenizer


def stream(
    tokenizer: Tokenizer, ids: Iterable[int], stop: Sequence[str] = (), skip_special: bool = False
) -> tuple[list[str], str | None]:
    """(pieces, the last from `finish`; stop string met). Checks that `text` is what was shown."""
    detokenizer = StreamDetokenizer(tokenizer, stop, skip_special)
    pieces = [detokenizer.push(i) for i in ids]
    assert detokenizer.text == "".join(pieces)
    pieces.append(detokenizer.finish())
    assert detokenizer.text == "".join(pieces)
    assert detokenizer.finish() == ""
    return pieces, detokenizer.stopped_by


def expected_text(tokenizer: Tokenizer, ids: Sequence[int]) -> str:
    """Whole decoding without a character left open at the end."""
    data = b"".join(tokenizer.token_bytes(i) for i in ids)
    # An open character is at most three bytes; what is open has a completion that is one character more.
    for size in (3, 2, 1):
        head, tail = data[:-size], data[-size:]
        if len(tail) == size and is_open(tail):
            return head.decode(errors="replace")
    return data.decode(errors="replace")


def is_open(tail: bytes) -> bool:
    """True for a proper beginning of some character, by trying its completions."""
    if not tail or tail[0] < 0xC2:
        return False
    length = 2 if tail[0] < 0xE0 else 3 if tail[0] < 0xF0 else 4
    missing = length - len(tail)
    fillers = (bytes((first, *[0x80] * (missing - 1))) for first in range(0x80, 0xC0))
    return missing > 0 and any(is_character(tail + filler) for filler in fillers)


def is_character(data: bytes) -> bool:
    try:
        return len(data.decode()) == 1
    except UnicodeDecodeError:
        return False


@settings(max_examples=300)
@given(ids=st.lists(st.integers(0, 280), max_size=30))
def test_joined_pieces_equal_whole_decoding(toy: Tokenizer, ids: list[int]) -> None:
    pieces, _ = stream(toy, ids)
    text = "".join(pieces)
    assert text == expected_text(toy, ids)
    assert toy.decode(ids) in (text, text + "\ufffd")


@given(ids=st.lists(st.integers(0, 700), max_size=30), skip_special=st.booleans())
def test_joined_pieces_equal_whole_decoding_golden(
    golden_tokenizer: Tokenizer, ids: list[int], skip_special: bool
) -> None:
    text = "".join(stream(golden_tokenizer, ids, skip_special=skip_special)[0])
    whole = golden_tokenizer.decode(ids, skip_special=skip_special)
    assert whole in (text, text + "\ufffd")


@given(ids=st.lists(st.integers(0, 300), max_size=30))
def test_joined_pieces_equal_whole_decoding_llama(toy_llama: Tokenizer, ids: list[int]) -> None:
    text = "".join(stream(toy_llama, ids)[0])
    assert toy_llama.decode(ids) in (text, text + "\ufffd")


@given(text=st.text())
def test_valid_text_never_shows_a_replacement_character(toy: Tokenizer, text: str) -> None:
    text = text.replace("\ufffd", "")
    pieces, _ = stream(toy, toy.encode_literal(text))
    assert "".join(pieces) == text
    assert not any("\ufffd" in piece for piece in pieces)


def test_the_leading_space_goes_once(toy_llama: Tokenizer) -> None:
    space, a = toy_llama.token_id("▁"), toy_llama.token_id("a")
    assert stream(toy_llama, [9999, space, a, space, a])[0] == ["", "", "a", " ", "a", ""]
    assert "".join(stream(toy_llama, [space, space, a])[0]) == " a"


def test_special_tokens_show_or_not(toy: Tokenizer) -> None:
    ids = toy.encode(f"a<|ref|>b{EOS}")
    assert "".join(stream(toy, ids)[0]) == f"a<|ref|>b{EOS}"
    assert "".join(stream(toy, ids, skip_special=True)[0]) == "ab"


# --- stop strings -------------------------------------------------------------------------------


def by_character(tokenizer: Tokenizer, text: str) -> list[int]:
    """One token for each byte."""
    return [i for byte in text.encode() for i in tokenizer.encode_literal(chr(byte))[:1]]


@pytest.mark.parametrize(
    ("text", "stop", "shown", "met"),
    [
        ("one two three", ["two"], "one ", "two"),
        ("one two three", ["three", "two"], "one ", "two"),
        ("one two three", ["four"], "one two three", None),
        ("the image", ["mag"], "the i", "mag"),
        ("aab", ["ab"], "a", "ab"),
        ("ababac", ["abac"], "ab", "abac"),
        ("aaa", ["aa"], "", "aa"),
        ("x</s>", ["</s>", "/s>"], "x", "</s>"),  # complete together: the one that begins first
        ("abcd", ["abcd", "bc"], "a", "bc"),  # the one that is complete first
        ("ab", ["abc"], "ab", None),  # held back, then shown
        ("a\n\nb", ["\n\n"], "a", "\n\n"),
        ("ab", [""], "ab", None),
        ("夢の中", ["の"], "夢", "の"),
    ],
)
def test_stop_strings(
    toy: Tokenizer, text: str, stop: list[str], shown: str, met: str | None
) -> None:
    single_bytes = [toy.token_id(c) for c in map_bytes(text)]
    for ids in (toy.encode_literal(text), single_bytes):
        pieces, stopped_by = stream(toy, ids, stop)
        assert ("".join(pieces), stopped_by) == (shown, met)


def map_bytes(text: str) -> str:
    """The characters that stand for the bytes of `text` in a byte-level vocabulary."""
    from foveal.text.decoder import byte_alphabet

    characters = {byte: character for character, byte in byte_alphabet().items()}
    return "".join(characters[byte] for byte in text.encode())


def oracle(text: str, stop: Sequence[str]) -> tuple[str, str | None]:
    """The slow truth: the first end of a stop string at which any is complete, longest one first."""
    for end in range(len(text) + 1):
        met = [s for s in stop if s and text[:end].endswith(s)]
        if met:
            longest = max(met, key=len)
            return text[: end - len(longest)], longest
    return text, None


LETTERS = st.text(alphabet="abthe ", max_size=30)


@settings(max_examples=300)
@given(
    text=LETTERS,
    stop=st.lists(st.text(alphabet="abthe ", min_size=1, max_size=4), max_size=3),
    is_split=st.booleans(),
)
def test_stop_strings_do_not_depend_on_tokens(
    toy: Tokenizer, text: str, stop: list[str], is_split: bool
) -> None:
    ids = [toy.token_id(c) for c in map_bytes(text)] if is_split else toy.encode(text)
    pieces, stopped_by = stream(toy, ids, stop)
    assert ("".join(pieces), stopped_by) == oracle(text, stop)
    # What was shown before the end never has to be taken back.
    shown = ""
    for piece in pieces:
        shown += piece
        assert oracle(text, stop)[0].startswith(shown)


def test_no_text_after_a_stop_string(toy: Tokenizer) -> None:
    detokenizer = StreamDetokenizer(toy, ["b"])
    ids = toy.encode("a b")
    assert "".join(detokenizer.push(i) for i in ids) == "a "
    assert detokenizer.stopped_by == "b"
    assert (detokenizer.push(ids[0]), detokenizer.finish(), detokenizer.text) == ("", "", "a ")


def test_text_is_held_back_only_while_it_may_become_a_stop_string(toy: Tokenizer) -> None:
    pieces, _ = stream(toy, [toy.token_id(c) for c in "ab\u0120the"], [" thx"])
    assert pieces == ["a", "b", "", "", "", " the", ""]


# --- cost ---------------------------------------------------------------------------------------


def seconds_for(tokenizer: Tokenizer, count: int) -> float:
    ids = tokenizer.encode("the image é ")
    best = float("inf")
    for _ in range(3):
        detokenizer = StreamDetokenizer(tokenizer, ["<|stop|>", "the end"])
        start = time.perf_counter()
        for i in range(count):
            detokenizer.push(ids[i % len(ids)])
        best = min(best, time.perf_counter() - start)
    return best


def test_cost_of_a_token_does_not_grow(toy: Tokenizer) -> None:
    """Eight times the tokens take about eight times as long; decoding everything each time would take 64 times."""
    assert seconds_for(toy, 16_000) < 24 * max(seconds_for(toy, 2_000), 1e-3)
