"""Comparison of the chat encoding with golden prompts: a model folder's `encoding/`, no weights, no tokenizer.

A cases file is a list of {"case", "messages", "options", "prompt"}; `options` are arguments of the released
`encode_messages`. Releases differ in what reasoning effort selects: `prompt` is what the first one writes, and
`second_implementation_prompt`, where there is one, what the later ones write.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from foveal.errors import FovealError
from foveal.text.chat_v4 import V4Chat, encode_v4_messages
from foveal.text.v4_prompts import V4Prompts
from foveal.verify.cases import CaseError
from foveal.verify.report import CaseResult, Check, Report

LATER_PROMPT = "second_implementation_prompt"
_THINKING = {"chat": False, "thinking": True}
# Arguments of the released function, by the names that they have here.
_OPTIONS = {
    "reasoning_effort": "effort",
    "drop_thinking": "drop_thinking",
    "context": "context",
    "add_default_bos_token": "adds_bos",
}


def verify_encoding(folder: Path, cases: Path) -> Report:
    """Encode every case of the file `cases` with the prompt texts of `folder`.

    A case's check says where the first difference is. Raises CaseError for a file that holds no cases; a case that
    cannot be encoded is a failed case.
    """
    prompts = V4Prompts.load(folder)
    return Report(tuple(_run_case(case, prompts) for case in _read_cases(cases)))


def encode_case(messages: Any, options: Mapping[str, Any], prompts: V4Prompts) -> V4Chat:
    """The chat that the released `encode_messages(messages, **options)` writes; CaseError for unknown options."""
    arguments: dict[str, Any] = {}
    for name, value in options.items():
        if name == "thinking_mode" and value in tuple(_THINKING):
            arguments["thinking"] = _THINKING[value]
        elif name in _OPTIONS:
            arguments[_OPTIONS[name]] = value
        else:
            known = ", ".join(("thinking_mode", *_OPTIONS))
            raise CaseError(f"option {name}={value!r} is not known; known options: {known}")
    return encode_v4_messages(messages, prompts=prompts, rejects_placeholders=True, **arguments)


def _run_case(case: Mapping[str, Any], prompts: V4Prompts) -> CaseResult:
    name = str(case["case"])
    expected = case["prompt"]
    if prompts.generation == "later":
        expected = case.get(LATER_PROMPT, expected)
    try:
        actual = encode_case(case["messages"], case.get("options") or {}, prompts).text
    except FovealError as error:
        return CaseResult(name, error=str(error))
    except Exception as error:  # a foreign file may be wrong in ways nobody thought of
        return CaseResult(name, error=f"{type(error).__name__}: {error}")
    detail = first_difference(expected, actual)
    return CaseResult(name, (Check("prompt", "prompt", not detail, detail=detail),))


def first_difference(expected: str, actual: str) -> str:
    """Where two texts part and how they go on; "" where they are the same."""
    if expected == actual:
        return ""
    pairs = enumerate(zip(expected, actual, strict=False))
    shorter = min(len(expected), len(actual))
    place = next((i for i, (want, have) in pairs if want != have), shorter)
    have, want = (text[place : place + 40] for text in (actual, expected))
    return f"at character {place}: {have!r}, expected {want!r}"


def _read_cases(path: Path) -> list[Mapping[str, Any]]:
    try:
        cases = json.loads(path.read_text(encoding="utf-8-sig"))
    except (OSError, ValueError) as error:
        raise CaseError(f"{path} cannot be read: {error}") from None
    keys = ("case", "messages", "prompt")
    is_valid = isinstance(cases, list) and all(
        isinstance(case, dict)
        and all(key in case for key in keys)
        and all(isinstance(case.get(key, ""), str) for key in ("prompt", LATER_PROMPT))
        and isinstance(case.get("options") or {}, dict)
        for case in cases
    )
    if not is_valid or not cases:
        raise CaseError(
            f"{path} is not a list of chat encoding cases; each is an object with {', '.join(keys)}"
        )
    return list(cases)
