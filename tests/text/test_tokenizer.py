"""The tokenizer: ids of marks, literal text, missing tokens, decoding, broken files."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import Tokenizer as Backend

from foveal.errors import CheckpointError, PromptError
from foveal.text.chat_vl2 import GROUNDING_TOKENS
from foveal.text.tokenizer import BOS, EOS, PAD, VL2_TOKENS, Tokenizer
from tests.text.toy_tokenizers import (
    LLAMA_DECODER,
    MARKS,
    WHITE_SPACE_ALONE,
    added,
    bpe,
    byte_level,
    definition,
    llama,
    load,
)

NOT_KEPT = tuple(mark for mark in MARKS if mark not in GROUNDING_TOKENS)
# Text in which marks, their halves and whole Unicode meet.
TEXTS = st.lists(st.sampled_from([*MARKS, "<", "|>", "image", " ", "\n", "the"]) | st.text()).map(
    "".join
)
ANY_IDS = st.lists(st.integers(-1, 700), max_size=40)


def ids_of(tokenizer: Tokenizer, marks: tuple[str, ...]) -> set[int]:
    return {tokenizer.token_id(mark) for mark in marks}


# --- names and ids ------------------------------------------------------------------------------


def test_names_of_begin_end_and_pad_come_from_the_files(tmp_path: Path) -> None:
    marks = ("<s>", "</s>", "<none>")
    names = {"bos_token": "<s>", "eos_token": {"content": "</s>", "special": True}}
    tokenizer = load(
        tmp_path,
        byte_level(marks=marks),
        tokenizer_config={**names, "pad_token": None},
        special_tokens_map={"pad_token": "<none>", "bos_token": "<none>"},
    )
    ids = (tokenizer.bos_id, tokenizer.eos_id, tokenizer.pad_id)
    assert ids == (256, 257, 258)


def test_names_default_to_those_of_the_released_models(toy: Tokenizer) -> None:
    assert (toy.bos_id, toy.eos_id, toy.pad_id) == tuple(toy.token_id(t) for t in (BOS, EOS, PAD))


def test_missing_marks_are_added_behind_the_last_id_in_the_official_order(tmp_path: Path) -> None:
    tokenizer = load(tmp_path, byte_level(marks=(BOS, EOS)))
    assert [tokenizer.token_id(t) for t in (PAD, *VL2_TOKENS)] == list(range(258, 267))
    assert tokenizer.vocab_size == 267
    assert set(range(256, 267)) <= tokenizer.special_ids


def test_a_missing_mark_that_is_an_ordinary_word_keeps_its_id(tmp_path: Path) -> None:
    tokenizer = load(tmp_path, byte_level(["<image>"], marks=(BOS, EOS)))
    assert tokenizer.encode("<image>") == [256]
    assert tokenizer.token_id("<|ref|>") == 260  # after bos, eos and pad


def test_tokens_that_only_the_settings_name_are_added_first(tmp_path: Path) -> None:
    listed = {"261": {"content": "<b>", "special": False}, "30": {"content": "<a>"}}
    tokenizer = load(
        tmp_path,
        byte_level(marks=(BOS, EOS)),
        tokenizer_config={"added_tokens_decoder": listed},
        special_tokens_map={"additional_special_tokens": ["<c>", "<|User|>"]},
    )
    order = ("<a>", "<b>", "<c>", "<|User|>", PAD, "<image>")
    assert [tokenizer.token_id(t) for t in order] == list(range(258, 264))
    assert tokenizer.token_id("<b>") not in tokenizer.special_ids


def test_a_pad_token_named_in_the_files_is_enough(tmp_path: Path) -> None:
    tokenizer = load(tmp_path, byte_level(marks=(BOS, EOS)), tokenizer_config={"pad_token": EOS})
    assert tokenizer.pad_id == tokenizer.eos_id
    with pytest.raises(CheckpointError, match="no token '<｜▁pad▁｜>'"):
        tokenizer.token_id(PAD)


def test_ids_of_the_golden_tokenizer(golden_tokenizer: Tokenizer) -> None:
    t = golden_tokenizer
    assert (t.bos_id, t.eos_id, t.pad_id, t.vocab_size) == (0, 1, 2, 568)
    assert [t.token_id(mark) for mark in VL2_TOKENS] == list(range(560, 568))


# --- literal text -------------------------------------------------------------------------------


@pytest.mark.parametrize("mark", NOT_KEPT)
def test_a_typed_mark_is_plain_text(toy: Tokenizer, mark: str) -> None:
    text = f"the {mark}{mark} <|ref|>the{mark}<|/ref|>"
    ids = toy.encode_literal(text, GROUNDING_TOKENS)
    assert ids_of(toy, NOT_KEPT).isdisjoint(ids)
    assert ids_of(toy, ("<|ref|>", "<|/ref|>")) <= set(ids)
    assert toy.decode(ids) == text
    assert toy.token_id(mark) in toy.encode(text)


def test_kept_marks_have_their_ids(toy: Tokenizer) -> None:
    text = "".join(GROUNDING_TOKENS)
    assert toy.encode_literal(text, GROUNDING_TOKENS) == [
        toy.token_id(mark) for mark in GROUNDING_TOKENS
    ]
    assert ids_of(toy, GROUNDING_TOKENS).isdisjoint(toy.encode_literal(text))


@given(text=TEXTS)
def test_literal_ids_decode_to_the_text(toy: Tokenizer, text: str) -> None:
    ids = toy.encode_literal(text, GROUNDING_TOKENS)
    assert ids_of(toy, NOT_KEPT).isdisjoint(ids)
    assert toy.decode(ids) == text


@given(text=TEXTS)
def test_literal_ids_decode_to_the_text_golden(golden_tokenizer: Tokenizer, text: str) -> None:
    ids = golden_tokenizer.encode_literal(text, ())
    assert ids_of(golden_tokenizer, MARKS).isdisjoint(ids)
    assert golden_tokenizer.decode(ids) == text


@given(text=st.text().filter(lambda text: not any(mark in text for mark in MARKS)))
def test_text_without_marks_has_the_ids_of_plain_encoding(
    toy: Tokenizer, toy_llama: Tokenizer, text: str
) -> None:
    for tokenizer in (toy, toy_llama):
        assert tokenizer.encode_literal(text, GROUNDING_TOKENS) == tokenizer.encode(text)


@pytest.mark.parametrize("keeps_whole_words", [False, True], ids=["merges", "ignore_merges"])
def test_a_mark_that_the_vocabulary_can_spell_stays_plain(
    tmp_path: Path, keeps_whole_words: bool
) -> None:
    """Marks are words of the vocabulary too, reached by merges or, with `ignore_merges`, as whole words."""
    words = ("im", "ima", "ge", "image", "<image", "<image>", "<image>s", "<|User|>")
    merges = ("i m", "im a", "g e", "ima ge", "< image", "<image >", "<image> s")
    values = byte_level(
        words, merges, pre_tokenizer=WHITE_SPACE_ALONE, ignore_merges=keeps_whole_words
    )
    tokenizer = load(tmp_path, values)
    text = "<image> <image>s <image> é<image>\n<|User|> <image><|ref|>"
    ids = tokenizer.encode_literal(text, GROUNDING_TOKENS)
    assert ids_of(tokenizer, NOT_KEPT).isdisjoint(ids)
    assert tokenizer.token_id("<|ref|>") == ids[-1]
    assert tokenizer.decode(ids) == text


def test_the_plain_spelling_of_a_mark_uses_ordinary_merges(toy: Tokenizer) -> None:
    assert toy.encode_literal("<image>") == [
        toy.token_id("<"),
        toy.token_id("image"),
        toy.token_id(">"),
    ]


def test_marks_with_flags_and_normalised_marks_stay_plain(tmp_path: Path) -> None:
    values = byte_level(marks=MARKS[1:])
    values["normalizer"] = {"type": "NFC"}
    last = max(entry["id"] for entry in values["added_tokens"])
    values["added_tokens"] += [
        added(last + 1, BOS, normalized=True),
        added(last + 2, "<|fim|>", special=False, normalized=True, lstrip=True, rstrip=True),
    ]
    tokenizer = load(tmp_path, values)
    text = f"a {BOS} <|fim|> b"
    assert tokenizer.encode(text)[2:4] == [tokenizer.bos_id, last + 2]
    ids = tokenizer.encode_literal(text, GROUNDING_TOKENS)
    assert {tokenizer.bos_id, last + 2}.isdisjoint(ids)
    assert tokenizer.decode(ids) == text


def test_added_tokens_that_are_ordinary_words_stay_words(tmp_path: Path) -> None:
    """Else the ids of a user's plain text would differ from the official ones."""
    values = byte_level()
    values["added_tokens"].append(added(267, "zebra", special=False))
    tokenizer = load(tmp_path, values)
    assert tokenizer.encode_literal("a zebra") == tokenizer.encode("a zebra")
    assert tokenizer.encode("a zebra")[-1] == 267


@pytest.mark.parametrize(
    "text", ["a<image>b", f"a {BOS}b <|User|>c", " <image>", "", "é 夢<|det|>"]
)
def test_literal_text_in_the_llama_layout(toy_llama: Tokenizer, text: str) -> None:
    ids = toy_llama.encode_literal(text)
    assert ids_of(toy_llama, MARKS).isdisjoint(ids)
    assert toy_llama.decode(ids) == text.replace("▁", " ")  # this layout writes both as ▁


def test_literal_text_in_a_word_vocabulary(tmp_path: Path) -> None:
    """The library finds a mark as a whole word; cut in two, its halves are unknown words."""
    vocab = {word: i for i, word in enumerate(("[UNK]", "a", "<image>"))}
    model = {"type": "WordLevel", "vocab": vocab, "unk_token": "[UNK]"}
    values = definition(model, pre_tokenizer={"type": "WhitespaceSplit"})
    tokenizer = load(tmp_path, values, tokenizer_config={"bos_token": "a", "eos_token": "a"})
    assert tokenizer.encode("a <image>") == [1, 2]
    assert tokenizer.encode_literal("a <image>") == [1, 0, 0]


def test_keeping_an_unknown_mark_is_an_error(toy: Tokenizer) -> None:
    with pytest.raises(CheckpointError, match="no token '<nothing>'"):
        toy.encode_literal("a", {"<nothing>"})


def test_half_a_character_is_refused(toy: Tokenizer) -> None:
    for encode in (toy.encode, toy.encode_literal):
        with pytest.raises(PromptError, match=r"lone surrogate.*position 2"):
            encode("ab\ud800")


# --- decoding -----------------------------------------------------------------------------------


@pytest.mark.parametrize("skip_special", [False, True])
@given(ids=ANY_IDS)
def test_decode_equals_the_library_byte_level(
    golden_vl2: Path, golden_tokenizer: Tokenizer, skip_special: bool, ids: list[int]
) -> None:
    backend = backend_of(golden_vl2 / "a_tiny" / "checkpoint")
    expected = backend.decode([i for i in ids if i >= 0], skip_special_tokens=skip_special)
    assert golden_tokenizer.decode(ids, skip_special=skip_special) == expected


_BACKENDS: dict[Path, Backend] = {}


def backend_of(folder: Path) -> Backend:
    if folder not in _BACKENDS:
        _BACKENDS[folder] = Backend.from_file(str(folder / "tokenizer.json"))
    return _BACKENDS[folder]


@given(text=st.text())
def test_decode_equals_the_library_llama_layout(toy_llama: Tokenizer, text: str) -> None:
    backend = Backend.from_str(json.dumps(llama()))
    ids = backend.encode(text, add_special_tokens=False).ids
    assert toy_llama.decode(ids) == backend.decode(ids, skip_special_tokens=False)


METASPACE = {"type": "Metaspace", "replacement": "▁", "split": True}
DECODERS = {
    "metaspace": {**METASPACE, "prepend_scheme": "always"},
    "metaspace never": {**METASPACE, "prepend_scheme": "never"},
    "sequence of one": {"type": "Sequence", "decoders": [{**METASPACE, "prepend_scheme": "first"}]},
    "no strip": {"type": "Sequence", "decoders": LLAMA_DECODER["decoders"][:3]},
    "two spaces": {
        "type": "Sequence",
        "decoders": [
            *LLAMA_DECODER["decoders"][:3],
            {"type": "Strip", "content": " ", "start": 2, "stop": 0},
        ],
    },
    "fuse": {"type": "Fuse"},
}


@pytest.mark.parametrize("name", DECODERS)
def test_decode_equals_the_library_other_decoders(tmp_path: Path, name: str) -> None:
    values = llama(decoder=DECODERS[name])
    tokenizer, backend = load(tmp_path, values), Backend.from_str(json.dumps(values))
    for ids in ([257, 257, 257, 258], [258, 257, 259], [900, 257, 258], [], [257], [258, 270, 259]):
        assert tokenizer.decode(ids) == backend.decode(ids, skip_special_tokens=False), ids


def test_without_a_decoder_tokens_are_joined_by_spaces(tmp_path: Path) -> None:
    values = {**byte_level(), "decoder": None}
    tokenizer, backend = load(tmp_path, values), Backend.from_str(json.dumps(values))
    ids = [32, 700, 33, 256]
    assert tokenizer.decode(ids) == backend.decode(ids, skip_special_tokens=False)


def test_invalid_byte_tokens_hide_no_valid_neighbours(toy_llama: Tokenizer) -> None:
    ids = [1 + byte for byte in (*"é".encode(), 0xFF, *"夢".encode())]
    assert toy_llama.decode(ids) == "é\ufffd夢"


def test_token_bytes(toy: Tokenizer, toy_llama: Tokenizer) -> None:
    assert b"".join(toy.token_bytes(i) for i in toy.encode(" the é")) == " the é".encode()
    assert toy.token_bytes(toy.token_id(BOS)) == BOS.encode()
    assert toy.token_bytes(10**6) == toy.token_bytes(-1) == toy.token_bytes(2**40) == b""
    assert toy_llama.token_bytes(1 + 0xE5) == b"\xe5"
    assert toy_llama.token_bytes(toy_llama.token_id("▁")) == b" "


# --- files --------------------------------------------------------------------------------------


def test_a_missing_file_is_named(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match=r"has no tokenizer\.json"):
        Tokenizer.load(tmp_path)


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"", "not valid JSON"),
        (b"\xff\xfe", "cannot be read"),
        (b"[]", "holds a list"),
        (b'{"version": "1.0"}', "not a tokenizer definition"),
        (json.dumps(byte_level()).encode()[:-40], "not valid JSON"),
    ],
)
def test_a_broken_file_is_named(tmp_path: Path, content: bytes, message: str) -> None:
    (tmp_path / "tokenizer.json").write_bytes(content)
    with pytest.raises(CheckpointError, match=rf"tokenizer\.json.*{message}"):
        Tokenizer.load(tmp_path)


def test_byte_order_mark_and_crlf_are_fine(tmp_path: Path) -> None:
    text = json.dumps(byte_level(), indent=1).replace("\n", "\r\n")
    (tmp_path / "tokenizer.json").write_text("\ufeff" + text, encoding="utf-8", newline="")
    assert Tokenizer.load(tmp_path).bos_id == 256


@pytest.mark.parametrize(
    "decoder",
    [
        {"type": "WordPiece", "prefix": "##", "cleanup": True},
        {"type": "Sequence", "decoders": [{"type": "Fuse"}, {"type": "BPEDecoder", "suffix": ""}]},
        {
            "type": "Sequence",
            "decoders": [
                {"type": "Strip", "content": " ", "start": 1, "stop": 0},
                {"type": "Fuse"},
            ],
        },
    ],
)
def test_an_unknown_decoder_is_refused(tmp_path: Path, decoder: dict[str, object]) -> None:
    with pytest.raises(CheckpointError, match="not supported"):
        load(tmp_path, {**byte_level(), "decoder": decoder})


def test_stored_truncation_and_padding_are_not_applied(tmp_path: Path) -> None:
    values = byte_level()
    values["truncation"] = {
        "max_length": 3,
        "strategy": "LongestFirst",
        "stride": 0,
        "direction": "Right",
    }
    values["padding"] = {
        "strategy": {"Fixed": 9},
        "direction": "Right",
        "pad_to_multiple_of": None,
        "pad_id": 0,
        "pad_type_id": 0,
        "pad_token": PAD,
    }
    tokenizer = load(tmp_path, values)
    for text in ("a", "abcdef"):
        assert len(tokenizer.encode(text)) == len(tokenizer.encode_literal(text)) == len(text)


def test_the_model_type_without_merges_is_fine(tmp_path: Path) -> None:
    tokenizer = load(tmp_path, definition(bpe({"a": 0, BOS: 1, EOS: 2})))
    assert (tokenizer.bos_id, tokenizer.eos_id, tokenizer.encode("a")) == (1, 2, [0])
