"""Public reports about prompt ids and about characters that look like marks, turned into small inputs."""

from __future__ import annotations

import numpy as np
import pytest

from foveal.text.chat_vl2 import (
    ASSISTANT,
    GROUNDING_TOKENS,
    IMAGE,
    USER,
    encode_conversation,
    encode_messages,
    encode_prompt,
)
from foveal.text.tokenizer import BOS, EOS, PAD, Tokenizer
from foveal.types import Message, Picture
from tests.text.toy_tokenizers import byte_level, load

PICTURE = Picture(np.zeros((4, 4, 3), np.uint8))
NOT_FOR_USERS = (IMAGE, USER, ASSISTANT, BOS, EOS, PAD)


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> Tokenizer:
    """One token a byte, so that ids can be written down by hand."""
    return load(tmp_path_factory.mktemp("bytes"), byte_level())


def characters(tokenizer: Tokenizer, text: str) -> list[int]:
    """The ids of printable ASCII and newlines, one by one."""
    return [tokenizer.token_id({"\n": "Ċ", " ": "Ġ"}.get(c, c)) for c in text]


def question(tokenizer: Tokenizer) -> list[list[int]]:
    """`BOS <|User|>: <image>\\nWhich colour?\\n\\n<|Assistant|>:`, by hand."""
    bos, user, assistant = (tokenizer.token_id(mark) for mark in (BOS, USER, ASSISTANT))
    head = [bos, user, *characters(tokenizer, ": ")]
    tail = [*characters(tokenizer, "\nWhich colour?\n\n"), assistant, *characters(tokenizer, ":")]
    return [head, tail]


def test_C017_ids_are_the_vendors(tokenizer: Tokenizer) -> None:
    """One begin of sequence, a blank line before the assistant's tag, nothing after the colon."""
    expected = question(tokenizer)
    assert encode_messages([Message("user", (PICTURE, "Which colour?"))], tokenizer) == expected
    official = [
        {"role": USER, "content": "<image>\nWhich colour?"},
        {"role": ASSISTANT, "content": ""},
    ]
    assert encode_conversation(official, tokenizer) == expected
    for prompt in ("", BOS):
        prompt += "<|User|>: <image>\nWhich colour?\n\n<|Assistant|>:"
        assert encode_prompt(prompt, tokenizer) == expected


def test_C017_a_past_answer_ends_with_eos_and_no_blank_line(tokenizer: Tokenizer) -> None:
    messages = [
        Message("user", (PICTURE, "Which colour?")),
        Message("assistant", ("Red.",)),
        Message("user", ("Sure?",)),
    ]
    head, tail = encode_messages(messages, tokenizer)
    first = question(tokenizer)
    user, assistant = tokenizer.token_id(USER), tokenizer.token_id(ASSISTANT)
    answer = [*characters(tokenizer, "Red."), tokenizer.eos_id]
    second = [user, *characters(tokenizer, ": Sure?\n\n"), assistant, *characters(tokenizer, ":")]
    assert (head, tail) == (first[0], first[1] + answer + second)


def test_C072_image_characters_in_a_system_prompt_are_text(tokenizer: Tokenizer) -> None:
    text = "Write alt text like <image> in HTML."
    messages = [Message("system", (text,)), Message("user", ("Hi",))]
    (ids,) = encode_messages(messages, tokenizer)
    assert ids[1 : 1 + len(text)] == characters(tokenizer, text)
    assert tokenizer.token_id(IMAGE) not in ids


@pytest.mark.parametrize("role", ["system", "user", "assistant"])
def test_C073_image_characters_in_any_turn_are_text(tokenizer: Tokenizer, role: str) -> None:
    """VL2 has no tool turn; tool output reaches it as text of one of these."""
    text = "fix: <image> tag false positive"
    turns = [("system", "S"), ("user", "U"), ("assistant", "A"), ("user", "V")]
    messages = [Message(r, (text if r == role else c,)) for r, c in turns]  # type: ignore[arg-type]
    (ids,) = encode_messages(messages, tokenizer)
    assert tokenizer.token_id(IMAGE) not in ids
    assert text in tokenizer.decode(ids)


@pytest.mark.parametrize("mark", NOT_FOR_USERS)
def test_C073_typed_marks_are_text(tokenizer: Tokenizer, mark: str) -> None:
    plain = encode_messages([Message("user", ("a",))], tokenizer)[0]
    (ids,) = encode_messages([Message("user", (f"a{mark}",))], tokenizer)
    mark_id = tokenizer.token_id(mark)
    assert ids.count(mark_id) == plain.count(mark_id)
    assert f"a{mark}\n\n" in tokenizer.decode(ids)


def test_C073_grounding_marks_keep_their_meaning(tokenizer: Tokenizer) -> None:
    (ids,) = encode_messages([Message("user", ("".join(GROUNDING_TOKENS),))], tokenizer)
    assert [i for i in ids if i in {tokenizer.token_id(t) for t in GROUNDING_TOKENS}] == [
        tokenizer.token_id(t) for t in GROUNDING_TOKENS
    ]


def test_C076_placeholders_of_a_raw_prompt_are_counted_as_written(tokenizer: Tokenizer) -> None:
    """n placeholders give n + 1 lists; the processor compares n with the pictures sent."""
    for count in range(3):
        assert len(encode_prompt("a <image>" * count, tokenizer)) == count + 1
