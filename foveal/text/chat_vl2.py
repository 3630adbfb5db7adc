"""Conversations into token ids, as DeepSeek-VL2 was trained ("deepseek" format).

    BOS system <|User|>: question\\n\\n<|Assistant|>:answer EOS <|User|>: question\\n\\n<|Assistant|>:

Nothing follows the last colon, and nothing stands between system text and the first role tag. A blank question has no
space and no blank line: `<|User|>:<|Assistant|>:`. Source: spec 7.2; the ids are the contract, not this display.

All functions return the ids around the pictures: n pictures give n + 1 lists, and the caller puts as many image ids
between two lists as the picture there needs. This module knows no picture sizes and no token counts.

`encode_messages` is for users' words: every text is literal, pictures are parts of their own, and only the five
grounding marks are marks. `encode_conversation` and `encode_prompt` are for text that is a template already: `<image>`
marks a picture, and spelled-out marks count as marks.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from foveal.errors import CheckpointError, PromptError
from foveal.text.tokenizer import Tokenizer
from foveal.types import Message, Part

IMAGE = "<image>"
USER, ASSISTANT = "<|User|>", "<|Assistant|>"
GROUNDING_TOKENS = ("<|ref|>", "<|/ref|>", "<|det|>", "<|/det|>", "<|grounding|>")
SFT_FORMAT = "deepseek"

_ROLES = {
    USER: "user",
    "user": "user",
    ASSISTANT: "assistant",
    "assistant": "assistant",
    "system": "system",
    "deepseekapi-sys": "system",
}


def check_sft_format(name: object) -> None:
    """`sft_format` of `processor_config.json`; raises CheckpointError for a format other than "deepseek"."""
    if name != SFT_FORMAT:
        raise CheckpointError(
            f"sft_format {name!r} in processor_config.json is not supported; the released DeepSeek-VL2 models "
            f"use {SFT_FORMAT!r}"
        )


# --- users' messages ----------------------------------------------------------------------------


def encode_messages(messages: Sequence[Message], tokenizer: Tokenizer) -> list[list[int]]:
    """Ids of a chat, up to the point where the model's answer begins.

    A picture is followed by a newline unless the text after it begins with one, so that [picture, question] gives the
    ids of "<image>\\nquestion". White space at both ends of a turn is dropped. Raises PromptError for an unknown role,
    turns out of order, a picture outside a user turn, or a user turn with neither text nor picture.
    """
    _check_turns(messages)
    ids = _Ids(tokenizer)
    for message in messages:
        parts = _stripped(message.content)
        if message.role == "user":
            _add_question(ids, parts)
            continue
        ids.add_literal("".join(part for part in parts if isinstance(part, str)))
        if message.role == "assistant":
            ids.add_ids([tokenizer.eos_id])
    return ids.lists


def _check_turns(messages: Sequence[Message]) -> None:
    """An optional system turn, then user and assistant in turn; the last one is the user's."""
    turns = list(enumerate(messages))
    for i, message in turns:
        if message.role not in ("system", "user", "assistant"):
            raise PromptError(
                f"messages[{i}] has role {message.role!r}; known roles: system, user, assistant"
            )
        _check_parts(i, message)
    if turns and messages[0].role == "system":
        turns = turns[1:]
    for count, (i, message) in enumerate(turns):
        expected = ("user", "assistant")[count % 2]
        if message.role == "system":
            raise PromptError(
                f"messages[{i}] is a system message; only the first one may be, move its text there"
            )
        if message.role != expected:
            raise PromptError(
                f"messages[{i}] has role {message.role!r} where {expected!r} is due; user and assistant "
                "take turns, beginning with user: join neighbouring messages of one role"
            )
    if not turns or turns[-1][1].role != "user":
        last = repr(messages[-1].role) if messages else "nothing"
        raise PromptError(f"a conversation ends with a user message, this one with {last}; add one")


def _check_parts(i: int, message: Message) -> None:
    has_picture = any(not isinstance(part, str) for part in message.content)
    if has_picture and message.role != "user":
        raise PromptError(
            f"messages[{i}] has a picture in a turn of {message.role!r}; put it into a user message"
        )
    texts = [part for part in message.content if isinstance(part, str)]
    if message.role == "user" and not has_picture and not "".join(texts).strip():
        raise PromptError(f"messages[{i}] is empty; a user message needs text or a picture")


def _add_question(ids: _Ids, parts: Sequence[Part]) -> None:
    """One user turn and the assistant's tag. Template and text of a piece are encoded as one string."""
    ids.add_mark(USER)
    text = ": "
    for i, part in enumerate(parts):
        if isinstance(part, str):
            text += part
            continue
        ids.add_literal(text)
        ids.add_picture()
        text = _break_before(parts[i + 1 :])
    ids.add_literal(text + "\n\n")
    ids.add_mark(ASSISTANT)
    ids.add_literal(":")


def _break_before(rest: Sequence[Part]) -> str:
    """The newline between a picture and what follows it, unless nothing does or it brings its own."""
    has_break = not rest or (isinstance(rest[0], str) and rest[0].startswith("\n"))
    return "" if has_break else "\n"


def _stripped(content: Sequence[Part]) -> list[Part]:
    """Neighbouring texts joined, empty ones dropped, white space gone from both ends of the turn."""
    parts: list[Part] = []
    for part in content:
        if isinstance(part, str) and parts and isinstance(parts[-1], str):
            parts[-1] += part
        else:
            parts.append(part)
    if parts and isinstance(parts[0], str):
        parts[0] = parts[0].lstrip()
    if parts and isinstance(parts[-1], str):
        parts[-1] = parts[-1].rstrip()
    return [part for part in parts if not isinstance(part, str) or part]


# --- templates ----------------------------------------------------------------------------------


def encode_conversation(
    conversation: Sequence[Mapping[str, Any]], tokenizer: Tokenizer
) -> list[list[int]]:
    """Ids of a conversation in the official form: mappings with `role`, `content` and maybe `images`.

    Roles are "<|User|>" or "user", "<|Assistant|>" or "assistant", and "system" for the first message. `<image>` in a
    user's content marks a picture. The last message is the assistant's, usually with content ""; its end of sequence is
    left out, so that the model goes on from there. Raises PromptError where the official processor refuses.
    """
    turns = [_turn(i, message) for i, message in enumerate(conversation)]
    if not turns or turns[-1][0] != "assistant":
        last = repr(turns[-1][0]) if turns else "nothing"
        raise PromptError(
            f"the conversation ends with {last}; end it with an assistant message, of content '' for a new answer"
        )
    ids = _Ids(tokenizer)
    for role, content in turns:
        if role == "user":
            question = f": {content}\n\n" if content else ":"
            ids.add_template(f"{USER}{question}{ASSISTANT}:")
            continue
        ids.add_ids(tokenizer.encode(content))
        if role == "assistant":
            ids.add_ids([tokenizer.eos_id])
    ids.lists[-1].pop()
    return ids.lists


def encode_prompt(prompt: str, tokenizer: Tokenizer) -> list[list[int]]:
    """Ids of a ready prompt string, in which `<image>` marks a picture.

    Begin of sequence comes first exactly once, whether or not the string spells it.
    """
    ids = _Ids(tokenizer)
    ids.add_template(prompt)
    first = ids.lists[0]
    if first[1:2] == [tokenizer.bos_id]:
        del first[1]
    return ids.lists


def _turn(i: int, message: Mapping[str, Any]) -> tuple[str, str]:
    """(role, stripped content) of one message."""
    role, content = message.get("role"), message.get("content")
    known = _ROLES.get(role) if isinstance(role, str) else None
    if known is None:
        raise PromptError(f"conversation[{i}] has role {role!r}; known roles: {', '.join(_ROLES)}")
    if not isinstance(content, str):
        raise PromptError(
            f"conversation[{i}] has content of type {type(content).__name__}; a string is needed, with "
            f"{IMAGE} where a picture goes"
        )
    if known == "system" and i:
        raise PromptError(f"conversation[{i}] is a system message; only the first one may be")
    if known != "user" and IMAGE in content:
        raise PromptError(
            f"conversation[{i}] has {IMAGE} in a turn of {known!r}; pictures go into user messages"
        )
    return known, content.strip()


class _Ids:
    """The id lists under construction, beginning with begin of sequence."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer
        self.lists: list[list[int]] = [[tokenizer.bos_id]]

    def add_picture(self) -> None:
        self.lists.append([])

    def add_ids(self, ids: Sequence[int]) -> None:
        self.lists[-1].extend(ids)

    def add_mark(self, mark: str) -> None:
        self.add_ids([self._tokenizer.token_id(mark)])

    def add_literal(self, text: str) -> None:
        self.add_ids(self._tokenizer.encode_literal(text, GROUNDING_TOKENS))

    def add_template(self, text: str) -> None:
        """Each piece between `<image>` marks is encoded on its own, as the official processor does."""
        for i, piece in enumerate(text.split(IMAGE)):
            if i:
                self.add_picture()
            self.add_ids(self._tokenizer.encode(piece))
