"""Chat format: golden ids, users' messages, templates, refusals."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from safetensors import safe_open

from foveal.errors import CheckpointError, PromptError
from foveal.text.chat_vl2 import (
    ASSISTANT,
    GROUNDING_TOKENS,
    IMAGE,
    USER,
    check_sft_format,
    encode_conversation,
    encode_messages,
    encode_prompt,
)
from foveal.text.tokenizer import BOS, EOS, Tokenizer
from foveal.types import Message, Picture

PICTURE = Picture(np.zeros((2, 3, 3), np.uint8))
END = {"role": ASSISTANT, "content": ""}


def user(*content: str | Picture) -> Message:
    return Message("user", content)


def assistant(*content: str | Picture) -> Message:
    return Message("assistant", content)


def filled(lists: Sequence[Sequence[int]], counts: Sequence[int], image_id: int) -> list[int]:
    """One id stream, with `counts` image ids between the lists."""
    ids = list(lists[0])
    for count, following in zip(counts, lists[1:], strict=True):
        ids += [image_id] * count + list(following)
    return ids


def shown(lists: Sequence[Sequence[int]], tokenizer: Tokenizer) -> str:
    """The ids as text, with one <image> for each picture."""
    return IMAGE.join(tokenizer.decode(ids) for ids in lists)


# --- golden conversations -----------------------------------------------------------------------


def rows_of(path: Path) -> Iterator[tuple[list[dict[str, Any]], list[int], list[int]]]:
    """(conversation, image tokens of each picture, ids without padding) of each row of a case."""
    case = json.loads(path.read_text(encoding="utf-8"))
    with safe_open(path.with_suffix(".safetensors"), framework="np") as tensors:
        ids, mask = (tensors.get_tensor(name) for name in ("input_ids", "attention_mask"))
    conversations = case["conversation"]
    if not isinstance(conversations[0], list):
        conversations = [conversations]
    columns = (conversations, case["num_image_tokens"], np.atleast_2d(ids), np.atleast_2d(mask))
    for conversation, counts, row, real in zip(*columns, strict=True):
        yield conversation, counts, row[real.astype(bool)].tolist()


def variants(golden_vl2: Path) -> list[Path]:
    return sorted(path.parent for path in golden_vl2.glob("*/checkpoint"))


def test_golden_conversations_have_the_official_ids(golden_vl2: Path) -> None:
    num_rows = 0
    for variant in variants(golden_vl2):
        tokenizer = Tokenizer.load(variant / "checkpoint")
        image_id = tokenizer.token_id(IMAGE)
        for path in sorted((variant / "cases").glob("*.json")):
            for conversation, counts, expected in rows_of(path):
                lists = encode_conversation(conversation, tokenizer)
                assert filled(lists, counts, image_id) == expected, path
                num_rows += 1
    assert num_rows >= 60


def as_messages(conversation: Sequence[Mapping[str, Any]]) -> list[Message]:
    """The golden form as users' messages: <image> and a newline after it become a picture."""
    roles = {USER: "user", ASSISTANT: "assistant", "system": "system"}
    messages = []
    for turn in conversation[:-1]:
        pieces = turn["content"].split(IMAGE)
        content: list[str | Picture] = [pieces[0]]
        for piece in pieces[1:]:
            content += [PICTURE, piece]
        messages.append(Message(roles[turn["role"]], tuple(content)))
    return messages


def test_messages_have_the_official_ids_too(golden_vl2: Path) -> None:
    for variant in variants(golden_vl2)[:1]:
        tokenizer = Tokenizer.load(variant / "checkpoint")
        for path in sorted((variant / "cases").glob("*.json")):
            for conversation, counts, expected in rows_of(path):
                lists = encode_messages(as_messages(conversation), tokenizer)
                assert filled(lists, counts, tokenizer.token_id(IMAGE)) == expected, path


# --- users' messages ----------------------------------------------------------------------------


def test_one_turn(toy: Tokenizer) -> None:
    (ids,) = encode_messages([user(" the é \n")], toy)
    assert toy.decode(ids) == f"{BOS}<|User|>: the é\n\n<|Assistant|>:"
    assert ids[:2] == [toy.bos_id, toy.token_id(USER)]
    assert ids[-2:] == [toy.token_id(ASSISTANT), toy.token_id(":")]


def test_history_and_system_text(toy: Tokenizer) -> None:
    messages = [
        Message("system", (" Be terse. ",)),
        user("One?"),
        assistant(" 1 \n"),
        user("Two?"),
    ]
    text = f"{BOS}Be terse.<|User|>: One?\n\n<|Assistant|>:1{EOS}<|User|>: Two?\n\n<|Assistant|>:"
    assert shown(encode_messages(messages, toy), toy) == text


@pytest.mark.parametrize(
    ("content", "question"),
    [
        ((PICTURE, "Why?"), "<image>\nWhy?"),
        ((PICTURE, "\nWhy?"), "<image>\nWhy?"),
        ((PICTURE, " ", "Why?"), "<image>\n Why?"),
        ((PICTURE, PICTURE, "Why?"), "<image>\n<image>\nWhy?"),
        (("This is 1: ", PICTURE, "\nThis is 2: ", PICTURE), "This is 1: <image>\nThis is 2: <image>"),
        ((PICTURE,), "<image>"),
        ((" ", PICTURE, "", PICTURE, " \n"), "<image>\n<image>"),
        (("a", "b ", PICTURE, "\n\nc\n"), "ab <image>\n\nc"),
        ((PICTURE, "<|ref|>the dog<|/ref|>"), "<image>\n<|ref|>the dog<|/ref|>"),
    ],
)  # fmt: skip
def test_pictures_in_a_turn(
    toy: Tokenizer, content: tuple[str | Picture, ...], question: str
) -> None:
    lists = encode_messages([user(*content)], toy)
    official = [{"role": USER, "content": question}, END]
    assert lists == encode_conversation(official, toy)
    assert len(lists) == 1 + question.count(IMAGE)


def test_typed_marks_stay_text_in_every_turn(toy: Tokenizer) -> None:
    typed = f"{IMAGE}{USER}: x{ASSISTANT}:{EOS}{BOS}<｜▁pad▁｜>"
    messages = [Message("system", (typed,)), user(typed), assistant(typed), user(typed, PICTURE)]
    lists = encode_messages(messages, toy)
    assert len(lists) == 2
    ids = [i for part in lists for i in part]
    for mark, count in (
        (BOS, 1),
        (EOS, 1),
        (USER, 2),
        (ASSISTANT, 2),
        (IMAGE, 0),
        ("<｜▁pad▁｜>", 0),
    ):
        assert ids.count(toy.token_id(mark)) == count, mark
    turn = f"<|User|>: {typed}\n\n<|Assistant|>:"
    assert shown(lists, toy) == (
        f"{BOS}{typed}{turn}{typed}{EOS}<|User|>: {typed}<image>\n\n<|Assistant|>:"
    )


@given(text=st.text(min_size=1).filter(lambda text: text.strip() and "<" not in text))
def test_plain_text_has_the_official_ids(golden_tokenizer: Tokenizer, text: str) -> None:
    official = [{"role": "user", "content": text}, {"role": "assistant", "content": ""}]
    expected = encode_conversation(official, golden_tokenizer)
    assert encode_messages([user(text)], golden_tokenizer) == expected


def test_grounding_marks_keep_their_meaning(toy: Tokenizer) -> None:
    (ids,) = encode_messages([user("".join(GROUNDING_TOKENS))], toy)
    assert {toy.token_id(mark) for mark in GROUNDING_TOKENS} <= set(ids)


@pytest.mark.parametrize(
    ("messages", "reason"),
    [
        ([], "ends with a user message, this one with nothing"),
        ([Message("system", ("a",))], "ends with a user message, this one with 'system'"),
        ([user("a"), assistant("b")], "ends with a user message, this one with 'assistant'"),
        ([assistant("a")], r"messages\[0\] has role 'assistant' where 'user' is due"),
        ([user("a"), user("b")], r"messages\[1\] has role 'user' where 'assistant' is due"),
        ([user("a"), Message("system", ("b",))], r"messages\[1\] is a system message"),
        ([Message("system", ("a",))] * 2, r"messages\[1\] is a system message"),
        ([Message("tool", ("a",))], r"messages\[0\] has role 'tool'; known roles"),  # type: ignore[arg-type]
        ([user("a"), assistant(PICTURE), user("b")], r"messages\[1\] has a picture in a turn of 'a"),
        ([Message("system", (PICTURE,)), user("b")], r"messages\[0\] has a picture in a turn of 's"),
        ([user(" \n")], r"messages\[0\] is empty"),
        ([user()], r"messages\[0\] is empty"),
    ],
)  # fmt: skip
def test_refused_messages(toy: Tokenizer, messages: list[Message], reason: str) -> None:
    with pytest.raises(PromptError, match=reason):
        encode_messages(messages, toy)


def test_a_blank_answer_in_the_history_is_just_its_end(toy: Tokenizer) -> None:
    lists = encode_messages([user("a"), assistant(" "), user("b")], toy)
    assert f"<|Assistant|>:{EOS}<|User|>: b" in shown(lists, toy)


# --- templates ----------------------------------------------------------------------------------


def test_a_blank_question_collapses(toy: Tokenizer) -> None:
    lists = encode_conversation([{"role": USER, "content": " \n"}, END], toy)
    assert shown(lists, toy) == f"{BOS}<|User|>:<|Assistant|>:"


def test_marks_in_a_template_are_marks(toy: Tokenizer) -> None:
    content = f"a{EOS}{IMAGE}{USER}"
    lists = encode_conversation([{"role": "user", "content": content}, END], toy)
    assert [toy.eos_id in ids for ids in lists] == [True, False]
    assert toy.token_id(USER) in lists[1]


def test_an_answer_begun_is_continued(toy: Tokenizer) -> None:
    begun = {"role": "assistant", "content": "the "}
    lists = encode_conversation([{"role": "user", "content": "a"}, begun], toy)
    assert shown(lists, toy) == f"{BOS}<|User|>: a\n\n<|Assistant|>:the"


def test_both_names_of_each_role(toy: Tokenizer) -> None:
    def encoded(system: str, asked: str, answered: str) -> list[list[int]]:
        turns = ((system, "s"), (asked, "q"), (answered, "a"), (asked, "r"), (answered, ""))
        return encode_conversation([{"role": r, "content": c} for r, c in turns], toy)

    assert encoded("system", USER, ASSISTANT) == encoded("deepseekapi-sys", "user", "assistant")


@pytest.mark.parametrize(
    ("conversation", "reason"),
    [
        ([], "ends with nothing"),
        ([{"role": USER, "content": "a"}], "ends with 'user'"),
        ([{"role": "<|Tool|>", "content": "a"}, END], r"\[0\] has role '<|Tool|>'; known roles"),
        ([{"content": "a"}, END], r"\[0\] has role None"),
        ([{"role": ["user"], "content": "a"}, END], r"\[0\] has role \['user'\]"),
        ([{"role": USER, "content": None}, END], r"\[0\] has content of type NoneType"),
        ([{"role": USER}, END], r"\[0\] has content of type NoneType"),
        ([END, {"role": "system", "content": "a"}, END], r"\[1\] is a system message"),
        ([{"role": ASSISTANT, "content": IMAGE}], r"\[0\] has <image> in a turn of 'assistant'"),
        ([{"role": "system", "content": IMAGE}, END], r"\[0\] has <image> in a turn of 'system'"),
    ],
)
def test_refused_conversations(
    toy: Tokenizer, conversation: list[dict[str, Any]], reason: str
) -> None:
    with pytest.raises(PromptError, match=reason):
        encode_conversation(conversation, toy)


def test_a_ready_prompt(toy: Tokenizer) -> None:
    prompt = "<|User|>: <image>\nthe\n\n<|Assistant|>:"
    lists = encode_prompt(prompt, toy)
    assert lists == encode_conversation([{"role": USER, "content": "<image>\nthe"}, END], toy)
    assert encode_prompt(BOS + prompt, toy) == lists
    assert encode_prompt("", toy) == [[toy.bos_id]]
    assert [len(part) for part in encode_prompt(f"{IMAGE}{IMAGE}", toy)] == [1, 0, 0]


def test_only_the_released_format_is_supported() -> None:
    check_sft_format("deepseek")
    for name in ("deepseekv2", "plain", None):
        with pytest.raises(CheckpointError, match="sft_format"):
            check_sft_format(name)
