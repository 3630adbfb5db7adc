"""Streaming: joined pieces equal whole decoding, stop strings end the text, work stays linear."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from foveal.text.decoder import TextDecoder, byte_alphabet
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


@settings(max_examples=200)
@given(ids=st.lists(st.integers(188, 255) | st.integers(0, 280), max_size=30))
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


@pytest.mark.parametrize(
    "data", [b"a\xed\xa0", b"\xed\xbf", b"\xed\xa0\x80", b"\xf4\x90", b"\xe0\x80"]
)
def test_bytes_that_nothing_completes_are_not_an_open_character(
    toy: Tokenizer, data: bytes
) -> None:
    ids = [next(i for i in range(256) if toy.token_bytes(i) == bytes((byte,))) for byte in data]
    assert "".join(stream(toy, ids)[0]) == toy.decode(ids) == data.decode(errors="replace")


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


def one_token_a_byte(tokenizer: Tokenizer, text: str) -> list[int]:
    characters = {byte: character for character, byte in byte_alphabet().items()}
    return [tokenizer.token_id(characters[byte]) for byte in text.encode()]


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
    for ids in (toy.encode_literal(text), one_token_a_byte(toy, text)):
        pieces, stopped_by = stream(toy, ids, stop)
        assert ("".join(pieces), stopped_by) == (shown, met)


def oracle(text: str, stop: Sequence[str]) -> tuple[str, str | None]:
    """The slow truth: the first end of a stop string at which any is complete, longest one first."""
    for end in range(len(text) + 1):
        met = [s for s in stop if s and text[:end].endswith(s)]
        if met:
            longest = max(met, key=len)
            return text[: end - len(longest)], longest
    return text, None


LETTERS = st.text(alphabet="abthe ", max_size=30)


@settings(max_examples=200)
@given(
    text=LETTERS,
    stop=st.lists(st.text(alphabet="abthe ", min_size=1, max_size=4), max_size=3),
    is_split=st.booleans(),
)
def test_stop_strings_do_not_depend_on_tokens(
    toy: Tokenizer, text: str, stop: list[str], is_split: bool
) -> None:
    ids = one_token_a_byte(toy, text) if is_split else toy.encode(text)
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
    pieces, _ = stream(toy, one_token_a_byte(toy, "ab the"), [" thx"])
    assert pieces == ["a", "b", "", "", "", " the", ""]


# --- cost ---------------------------------------------------------------------------------------


def test_each_token_is_decoded_once_and_little_text_is_held(
    toy: Tokenizer, monkeypatch: pytest.MonkeyPatch
) -> None:
    """So the cost of a token does not grow with the answer."""
    decoded: list[str] = []
    push = TextDecoder.push

    def counting_push(decoder: TextDecoder, token_id: int) -> str:
        decoded.append(push(decoder, token_id))
        return decoded[-1]

    monkeypatch.setattr(TextDecoder, "push", counting_push)
    stop = ["<|stop|>", "the end"]
    detokenizer = StreamDetokenizer(toy, stop)
    text = "the image é <|st> " * 500
    num_decoded = num_shown = 0
    for count, token_id in enumerate(toy.encode(text), 1):
        num_shown += len(detokenizer.push(token_id))
        num_decoded += len(decoded[-1])
        assert len(decoded) == count
        assert num_decoded - num_shown < max(map(len, stop))
    detokenizer.finish()
    assert detokenizer.text == text
