"""Public bug reports about roles, tools and reasoning, as small inputs to the DeepSeek-V4 chat encoding."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from foveal.text.chat_v4 import encode_pieces, encode_v4_messages
from foveal.text.tokenizer import Tokenizer
from foveal.text.v4_grammar import IMAGE
from foveal.text.v4_turns import V4Message

USER = {"role": "user", "content": "Hi"}


@pytest.fixture(scope="module")
def tokenizer(golden: Path) -> Tokenizer:
    folder = golden / "v4_vision" / "vision_small" / "checkpoint"
    if not folder.is_dir():
        pytest.skip(f"no golden data in {folder}")
    return Tokenizer.load(folder)


def is_plain(messages: list[V4Message], typed: str, tokenizer: Tokenizer) -> bool:
    """Whether `typed` is in the prompt as ordinary characters, with no picture and no mark in its place."""
    chat = encode_v4_messages(messages)
    (ids,) = encode_pieces(chat.pieces, tokenizer)
    return typed in tokenizer.decode(ids, skip_special=True)


@pytest.mark.parametrize("typed", ["<image>", IMAGE, "<think>"])
def test_C072_a_system_prompt_may_spell_a_marker(typed: str, tokenizer: Tokenizer) -> None:
    system = {"role": "system", "content": f"Write alt text like {typed} in HTML."}
    assert is_plain([system, USER], typed, tokenizer)


@pytest.mark.parametrize("typed", ["<image>", IMAGE, "</think>"])
def test_C073_tool_output_may_spell_a_marker(typed: str, tokenizer: Tokenizer) -> None:
    function = {"name": "run", "arguments": "{}"}
    messages: list[V4Message] = [
        USER,
        {"role": "assistant", "content": "", "tool_calls": [{"id": "1", "function": function}]},
        {"role": "tool", "tool_call_id": "1", "content": f"fix: {typed} tag false positive"},
    ]
    assert is_plain(messages, typed, tokenizer)


def test_C083_arguments_of_history_as_text_and_as_object() -> None:
    arguments: dict[str, Any] = {"city": "Zürich", "days": 2, "units": {"t": "°C"}, "raw": "a\nb"}
    prompts = {
        encode_v4_messages(
            [
                USER,
                {
                    "role": "assistant",
                    "content": None,
                    "tool_calls": [{"id": "1", "function": {"name": "f", "arguments": form}}],
                },
                {"role": "tool", "tool_call_id": "1", "content": "ok"},
            ]
        ).text
        for form in (arguments, json.dumps(arguments), json.dumps(arguments, ensure_ascii=False))
    }
    assert len(prompts) == 1


@pytest.mark.parametrize("thinking", [False, True])
@pytest.mark.parametrize("drop_thinking", [False, True])
def test_C086_history_without_reasoning_is_fine(thinking: bool, drop_thinking: bool) -> None:
    answers: list[dict[str, Any]] = [{}, {"reasoning_content": None}, {"reasoning": ""}]
    prompts = {
        encode_v4_messages(
            [USER, {"role": "assistant", "content": "Yo", **answer}, USER],
            thinking=thinking,
            drop_thinking=drop_thinking,
        ).text
        for answer in answers
    }
    assert len(prompts) == 1


def test_C086_both_names_of_reasoning_are_read() -> None:
    prompts = [
        encode_v4_messages(
            [USER, {"role": "assistant", "content": "Yo", name: "why"}, USER],
            thinking=True,
            drop_thinking=False,
        ).text
        for name in ("reasoning_content", "reasoning")
    ]
    assert prompts[0] == prompts[1]
    assert "<think>why</think>Yo" in prompts[0]
