"""Chat messages in the OpenAI shape as turns of a DeepSeek-V4 conversation.

    messages -> parse_turns -> merge_turns -> order_results -> (drop_reasoning) -> turns for `chat_v4` to write

Everything that can be wrong with a message is found here and named by its place. Knows no tokens and no template, and
does not look into pictures: a `PictureSlot` carries the part as it came. Source: spec 9.1, 9.2, 9.4, 9.5.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, TypeAlias, TypeVar

from foveal.errors import PromptError
from foveal.text.v4_grammar import IMAGE, TASKS, Parameter
from foveal.types import Message, Picture

PICTURE_ROLES = ("user", "developer", "latest_reminder", "tool")
ROLES = ("system", *PICTURE_ROLES, "assistant")
# Where the fields that not every turn can show belong. Elsewhere they would be lost without a word.
FIELD_ROLES = {
    "tools": ("system", "developer"),
    "response_format": ("system", "developer"),
    "tool_calls": ("assistant",),
}
_TEXT_TYPES = ("text", "input_text")
_PICTURE_KEYS = {
    "image": ("image", "source", "url", "data"),
    "image_url": ("image_url",),
    "input_image": ("image_url",),
}

V4Message: TypeAlias = Message | Mapping[str, Any]
_Part = TypeVar("_Part")


@dataclass(frozen=True, slots=True, eq=False)
class PictureSlot:
    """The place of a picture; `source` is what the message held there (a `Picture`, or the part of a content list)."""

    source: object


@dataclass(frozen=True, slots=True)
class ToolResult:
    """What a tool answered to the call `call_id`."""

    call_id: str
    parts: tuple[str | PictureSlot, ...]


@dataclass(frozen=True, slots=True)
class Call:
    """A tool call in the history."""

    call_id: str
    name: str
    parameters: tuple[Parameter, ...]


Block: TypeAlias = str | PictureSlot | ToolResult


@dataclass(frozen=True, slots=True, kw_only=True)
class Turn:
    """One turn. `schemas` and `response_format` are JSON; `is_open` leaves an assistant turn without end of sequence.

    `is_context` marks turns that are encoded already: they count for the rules and are not written again.
    """

    role: str
    blocks: tuple[Block, ...] = ()
    reasoning: str = ""
    calls: tuple[Call, ...] = ()
    schemas: tuple[str, ...] = ()
    response_format: str | None = None
    task: str | None = None
    is_open: bool = False
    is_context: bool = False


def with_tools(
    messages: Sequence[V4Message],
    tools: Sequence[Mapping[str, Any]] = (),
    response_format: Mapping[str, Any] | None = None,
) -> list[V4Message]:
    """Messages with a request's tools and response format, which the format keeps in the first system message.

    An empty system message is put in front where there is none. Raises PromptError where that message has its own.
    """
    found: dict[str, Any] = {}
    if tools:
        found["tools"] = list(tools)
    if response_format:
        found["response_format"] = response_format
    if not found:
        return list(messages)
    items = [_as_mapping(message, f"messages[{i}]") for i, message in enumerate(messages)]
    place = next((i for i, item in enumerate(items) if item.get("role") == "system"), None)
    if place is None:
        return [{"role": "system", "content": "", **found}, *items]
    for key in found:
        if items[place].get(key):
            raise PromptError(
                f"messages[{place}] has {key} and so has the request; give them in one place"
            )
    return [{**item, **found} if i == place else item for i, item in enumerate(items)]


# --- rules between turns ------------------------------------------------------------------------


def merge_turns(turns: Iterable[Turn], *, is_context: bool = False) -> list[Turn]:
    """Tool results become blocks of user turns, and neighbouring user turns become one.

    A user turn with a task takes no further user turn into itself; one that joins another brings its task along.
    """
    merged: list[Turn] = []
    for message in turns:
        turn = replace(message, is_context=is_context)
        before = merged[-1] if merged and merged[-1].role == "user" else None
        if turn.role not in ("user", "tool"):
            merged.append(turn)
        elif before is None or (turn.role == "user" and before.task is not None):
            merged.append(replace(turn, role="user"))
        else:
            task = before.task or turn.task
            merged[-1] = replace(before, blocks=before.blocks + turn.blocks, task=task)
    return merged


def order_results(turns: Iterable[Turn]) -> list[Turn]:
    """Tool results of a turn in the order of the calls before it; all other blocks keep their places.

    A result for an unknown call counts as one for the first call, and equals keep their order.
    """
    places: dict[str, int] = {}
    ordered = []
    for turn in turns:
        if turn.calls:
            places = {call.call_id: i for i, call in enumerate(turn.calls) if call.call_id}
        ordered.append(replace(turn, blocks=_ordered(turn.blocks, places)))
    return ordered


def _ordered(blocks: tuple[Block, ...], places: Mapping[str, int]) -> tuple[Block, ...]:
    results = [block for block in blocks if isinstance(block, ToolResult)]
    by_call = iter(sorted(results, key=lambda result: places.get(result.call_id, 0)))
    return tuple(next(by_call) if isinstance(block, ToolResult) else block for block in blocks)


def last_question(turns: Sequence[Turn]) -> int:
    """The index of the last user or developer turn, -1 where there is none."""
    return max((i for i, t in enumerate(turns) if t.role in ("user", "developer")), default=-1)


def drop_reasoning(turns: Sequence[Turn]) -> list[Turn]:
    """The turns without what earlier answers thought; developer turns before the last question go as well."""
    last = last_question(turns)
    return [
        replace(turn, reasoning="") if i < last else turn
        for i, turn in enumerate(turns)
        if i >= last or turn.role != "developer"
    ]


# --- messages -----------------------------------------------------------------------------------


def parse_turns(
    messages: Sequence[V4Message], *, name: str = "messages", rejects_placeholders: bool = False
) -> list[Turn]:
    """One turn a message. Raises PromptError naming message and part.

    With `rejects_placeholders`, text that spells the picture placeholder is an error, as in the released code.
    """
    if isinstance(messages, str | bytes | Mapping):
        raise PromptError(f"{name} must be a list of {{'role': ..., 'content': ...}}")
    parser = _Parser(rejects_placeholders)
    return [parser.turn(message, f"{name}[{i}]") for i, message in enumerate(messages)]


@dataclass(frozen=True, slots=True)
class _Parser:
    rejects_placeholders: bool

    def turn(self, message: V4Message, where: str) -> Turn:
        values = _as_mapping(message, where)
        role = values.get("role")
        if role not in ROLES:
            raise PromptError(f"{where}.role is {role!r}; known roles: {', '.join(ROLES)}")
        _check_fields(values, role, where)
        blocks = self._blocks(values, role, where)
        if role == "developer" and not any(blocks):
            raise PromptError(f"{where} is empty; a developer message needs content")
        return Turn(
            role=role,
            blocks=blocks,
            reasoning=self._reasoning(values, where) if role == "assistant" else "",
            calls=_calls(values.get("tool_calls"), where),
            schemas=_schemas(values.get("tools"), where),
            response_format=_response_format(values.get("response_format"), where),
            task=values.get("task"),
            is_open=bool(values.get("wo_eos")),
        )

    def _blocks(self, values: Mapping[str, Any], role: str, where: str) -> tuple[Block, ...]:
        key = "content"
        if role == "user" and values.get("content_blocks") is not None:
            key = "content_blocks"
        where = f"{where}.{key}"
        if role == "tool":
            return (self._result(values.get("tool_call_id"), values.get(key), where),)
        blocks = self._content(values.get(key), where, self._question_part)
        if role not in PICTURE_ROLES and any(isinstance(b, PictureSlot) for b in blocks):
            roles = ", ".join(PICTURE_ROLES)
            raise PromptError(
                f"{where} has a picture in a turn of {role!r}; pictures go into turns of {roles}"
            )
        if role != "user" and any(isinstance(b, ToolResult) for b in blocks):
            raise PromptError(
                f"{where} has a tool result in a turn of {role!r}; send it as a message of role 'tool'"
            )
        return blocks

    def _content(
        self, content: Any, where: str, parse: Callable[[Any, str], _Part]
    ) -> tuple[_Part | str, ...]:
        if content is None:
            return ()
        if isinstance(content, str):
            return (self._text(content, where),)
        if not isinstance(content, Sequence) or isinstance(content, bytes):
            raise PromptError(
                f"{where} is of type {type(content).__name__}; a string or a list of parts is needed"
            )
        return tuple(parse(part, f"{where}[{i}]") for i, part in enumerate(content))

    def _question_part(self, part: Any, where: str) -> Block:
        kind = part.get("type") if isinstance(part, Mapping) else None
        if isinstance(part, Mapping) and kind == "tool_result":
            call_id = part.get("tool_use_id") or part.get("tool_call_id")
            return self._result(call_id, part.get("content"), where)
        known = self._part(part, where)
        if known is None:
            types = ", ".join((*_TEXT_TYPES, *_PICTURE_KEYS, "tool_result"))
            raise PromptError(f"{where} has type {kind!r}; known part types: {types}")
        return known

    def _result_part(self, part: Any, where: str) -> str | PictureSlot:
        """What tools send is not the user's fault: the model is told about a part that it cannot get."""
        known = self._part(part, where)
        kind = part.get("type") if isinstance(part, Mapping) else type(part).__name__
        return f"[Unsupported {kind}]" if known is None else known

    def _result(self, call_id: Any, content: Any, where: str) -> ToolResult:
        parts = self._content(content, where, self._result_part)
        return ToolResult(call_id if isinstance(call_id, str) else "", parts)

    def _part(self, part: Any, where: str) -> str | PictureSlot | None:
        """A text or a picture; None for a part of another kind."""
        if isinstance(part, Picture):
            return PictureSlot(part)
        if isinstance(part, str):
            return self._text(part, where)
        kind = part.get("type") if isinstance(part, Mapping) else None
        if kind in _TEXT_TYPES:
            return self._text(part.get("text"), where)
        if not isinstance(kind, str) or kind not in _PICTURE_KEYS:
            return None
        keys = _PICTURE_KEYS[kind]
        if not any(_is_source(part.get(key)) for key in keys):
            raise PromptError(
                f"{where} is a picture without a source; give it as {' or '.join(keys)}"
            )
        return PictureSlot(part)

    def _text(self, text: Any, where: str) -> str:
        if text is None:
            return ""
        if not isinstance(text, str):
            raise PromptError(f"{where}: text of type {type(text).__name__}; a string is needed")
        if self.rejects_placeholders and IMAGE in text:
            raise PromptError(
                f"{where} spells {IMAGE}, which marks a picture; send pictures as parts of their own"
            )
        return text

    def _reasoning(self, values: Mapping[str, Any], where: str) -> str:
        """Both names that clients use are read; history without reasoning is fine (case C086)."""
        key = "reasoning_content" if values.get("reasoning_content") is not None else "reasoning"
        return self._text(values.get(key), f"{where}.{key}")


def _is_source(value: Any) -> bool:
    if isinstance(value, Mapping):
        return bool(value.get("url") or value.get("data"))
    return value is not None and not (isinstance(value, str | bytes) and not value)


def _as_mapping(message: V4Message, where: str) -> Mapping[str, Any]:
    if isinstance(message, Message):
        return {"role": message.role, "content": list(message.content)}
    if not isinstance(message, Mapping):
        raise PromptError(
            f"{where} is a {type(message).__name__}; an object with role and content is needed"
        )
    return message


def _check_fields(values: Mapping[str, Any], role: str, where: str) -> None:
    for key, roles in FIELD_ROLES.items():
        if values.get(key) and role not in roles:
            raise PromptError(
                f"{where} has {key} in a turn of {role!r}; they belong to {' or '.join(roles)} messages"
            )
    task = values.get("task")
    if task is not None and task not in tuple(TASKS):
        raise PromptError(f"{where}.task is {task!r}; known tasks: {', '.join(TASKS)}")


def _calls(calls: Any, where: str) -> tuple[Call, ...]:
    return tuple(
        _call(call, f"{where}.tool_calls[{i}]") for i, call in enumerate(_list(calls, where))
    )


def _call(call: Any, where: str) -> Call:
    function = call.get("function") if isinstance(call, Mapping) else None
    name = function.get("name") if isinstance(function, Mapping) else None
    if not isinstance(function, Mapping) or not isinstance(name, str):
        raise PromptError(f"{where} needs a function with a name and arguments")
    call_id = call.get("id") or function.get("id")
    return Call(
        call_id if isinstance(call_id, str) else "",
        name,
        _parameters(function.get("arguments"), where),
    )


def _parameters(arguments: Any, where: str) -> tuple[Parameter, ...]:
    """Arguments come as an object or as its JSON, with the same result (case C083).

    What is no object becomes one parameter called "arguments", as it stands.
    """
    values = arguments
    if isinstance(arguments, str):
        try:
            values = json.loads(arguments)
        except (ValueError, RecursionError):
            values = None
    elif arguments is None:
        values = {}
    if not isinstance(values, Mapping):
        values = {"arguments": arguments}
    return tuple(_parameter(str(key), value, where) for key, value in values.items())


def _parameter(name: str, value: Any, where: str) -> Parameter:
    if isinstance(value, str):
        return Parameter(name, value, is_string=True)
    return Parameter(name, _to_json(value, f"{where}: argument {name!r}"), is_string=False)


def _schemas(tools: Any, where: str) -> tuple[str, ...]:
    schemas = []
    for i, tool in enumerate(_list(tools, where)):
        function = tool.get("function") if isinstance(tool, Mapping) else None
        if not isinstance(function, Mapping):
            raise PromptError(
                f"{where}.tools[{i}] has no 'function' object; a tool is {{'type': 'function', 'function': ...}}"
            )
        schemas.append(_to_json(function, f"{where}.tools[{i}]"))
    return tuple(schemas)


def _response_format(value: Any, where: str) -> str | None:
    return _to_json(value, f"{where}.response_format") if value else None


def _list(value: Any, where: str) -> Sequence[Any]:
    if not value:
        return ()
    if isinstance(value, str | bytes | Mapping) or not isinstance(value, Sequence):
        raise PromptError(f"{where}: tools and tool_calls are lists, not {type(value).__name__}")
    return value


def _to_json(value: Any, where: str) -> str:
    try:
        return json.dumps(value, ensure_ascii=False)
    except (TypeError, ValueError, RecursionError) as error:
        raise PromptError(f"{where} cannot be written as JSON: {error}") from None
