"""A DeepSeek-V4 answer, split into what was thought, what is said, and which tools are called, while it arrives.

    reasoning --</think>--> content --⏎⏎<T tool_calls--> block --</T tool_calls>--> end
                                                         |   ^
                                            <T invoke ...v   |</T invoke>
                                                         call

Text of thoughts and of the answer comes out as soon as it cannot be part of a mark any more. A call comes out whole,
once its end is there, so nothing is ever taken back. A call that breaks the format is reported as `MalformedCall` with
its text; the calls after it are read all the same. The same machine reads a whole answer, so how the text was cut makes
no difference. A call block inside a thought is part of the thought: a model that muses about a call makes none.

White space between the tags of a block does not matter. Knows no tokens: feed it text that was decoded with special
tokens kept, for </think> and ｜DSML｜ may be such. Source: spec 9.7.

Reasons of `MalformedCall`:

    call_name             no name="..." in the opening tag of a call
    parameter_head        no name="..." string="true|false" in the opening tag of a parameter
    duplicate_parameter   two parameters of one name
    parameter_json        a value with string="false" that is no JSON
    stray_text            text between the tags of a block
    unfinished            the answer ends inside a call, or before the block's end
    text_after_end        text after the block, or after end of sequence
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterable
from dataclasses import dataclass, field, replace
from enum import Enum, auto
from functools import cache
from typing import NoReturn, TypeAlias

from foveal.text.tokenizer import EOS
from foveal.text.v4_grammar import DSML, THINK_END, Parameter, arguments_json

BLOCK_START, BLOCK_END = f"\n\n<{DSML}tool_calls", f"</{DSML}tool_calls>"
CALL_START, CALL_END = f"<{DSML}invoke", f"</{DSML}invoke>"
PARAMETER_START, PARAMETER_END = f"<{DSML}parameter", f"</{DSML}parameter>"


@dataclass(frozen=True, slots=True)
class ReasoningText:
    """A piece of what the model thinks."""

    text: str


@dataclass(frozen=True, slots=True)
class ContentText:
    """A piece of the answer itself."""

    text: str


@dataclass(frozen=True, slots=True)
class ToolCall:
    """A whole call. `index` counts the good calls of the answer from 0."""

    index: int
    name: str
    parameters: tuple[Parameter, ...]

    @property
    def arguments(self) -> str:
        """The arguments as the text of one JSON object. Values that are no strings keep their spelling."""
        return arguments_json(self.parameters)


@dataclass(frozen=True, slots=True)
class MalformedCall:
    """A part of a call block that is no call. `reason` is one of the codes listed in the module's docstring."""

    text: str
    reason: str


Event: TypeAlias = ReasoningText | ContentText | ToolCall | MalformedCall


@dataclass(frozen=True, slots=True)
class ParsedAnswer:
    """A whole answer. `is_thought_open` is True where it ends inside a thought."""

    reasoning: str
    content: str
    calls: tuple[ToolCall, ...]
    malformed: tuple[MalformedCall, ...]
    is_thought_open: bool


def parse_answer(text: str, *, thinking: bool, tools: bool = True) -> ParsedAnswer:
    """Read a whole answer; see `AnswerParser` for the options. Raises nothing."""
    parser = AnswerParser(thinking=thinking, tools=tools)
    events = [*parser.push(text), *parser.finish()]
    return ParsedAnswer(
        "".join(e.text for e in events if isinstance(e, ReasoningText)),
        "".join(e.text for e in events if isinstance(e, ContentText)),
        tuple(e for e in events if isinstance(e, ToolCall)),
        tuple(e for e in events if isinstance(e, MalformedCall)),
        parser.is_thought_open,
    )


def join_events(events: Iterable[Event]) -> list[Event]:
    """Neighbouring texts of one kind as one event."""
    joined: list[Event] = []
    for event in events:
        last = joined[-1] if joined else None
        if isinstance(last, ReasoningText | ContentText) and type(event) is type(last):
            joined[-1] = replace(last, text=last.text + event.text)
        else:
            joined.append(event)
    return joined


class _State(Enum):
    """What the text at hand belongs to."""

    REASONING = auto()
    CONTENT = auto()
    OPENING = auto()  # the rest of the block's own tag
    BETWEEN = auto()  # calls of a block
    CALL = auto()  # the rest of a call's opening tag
    PARAMETER = auto()  # the rest of a parameter's opening tag, and its value
    INSIDE = auto()  # a call, between its parameters
    TAIL = auto()  # after the block
    END = auto()  # after end of sequence


_NEXT_CALL = (CALL_START, BLOCK_END, EOS)
_NEXT_PARAMETER = (PARAMETER_START, CALL_END, BLOCK_END, EOS)
# What ends the text of a state. No string here contains another one of its state, so the one that begins first is also
# complete first, and cutting the text differently changes nothing.
_STOPS: dict[_State, tuple[str, ...]] = {
    _State.REASONING: (THINK_END, EOS),
    _State.CONTENT: (BLOCK_START, EOS),
    _State.OPENING: _NEXT_CALL,
    _State.BETWEEN: _NEXT_CALL,
    _State.CALL: _NEXT_PARAMETER,
    _State.PARAMETER: (PARAMETER_END, EOS),
    _State.INSIDE: _NEXT_PARAMETER,
    _State.TAIL: (EOS,),
    _State.END: (),
}


class AnswerParser:
    """Reads one answer, piece by piece; the work for a piece does not grow with the length of the answer.

    `thinking`: the prompt ended inside a thought, so the answer begins there. `tools`: call blocks are calls; without
    it they are content like all else. `is_thought_open` stays True until the thought is closed.
    """

    def __init__(self, *, thinking: bool, tools: bool = True) -> None:
        self._state = _State.REASONING if thinking else _State.CONTENT
        self._tools = tools
        self._held = ""  # may be the beginning of a stop
        self._events: list[Event] = []
        self._text: list[str] = []  # of the state, where text does not come out at once
        self._call = _OpenCall()
        self._num_calls = 0
        self.is_thought_open = thinking

    def push(self, text: str) -> list[Event]:
        """The events that `text` completes; often none."""
        text, start = self._held + text, 0
        while (match := _pattern(self._stops()).search(text, start)) is not None:
            self._take(text[start : match.start()])
            self._turn(match.group())
            start = match.end()
        end = len(text) - _open_length(text[start:], self._stops())
        self._take(text[start:end])
        self._held = text[end:]
        return self._taken()

    def finish(self) -> list[Event]:
        """What is still open, once no more text comes."""
        text, self._held = self._held, ""
        self._take(text)
        self._turn("")
        return self._taken()

    def _stops(self) -> tuple[str, ...]:
        if self._state is _State.CONTENT and not self._tools:
            return (EOS,)
        return _STOPS[self._state]

    def _taken(self) -> list[Event]:
        events, self._events = self._events, []
        return events

    def _take(self, text: str) -> None:
        if not text:
            return
        if self._state is _State.REASONING:
            self._events.append(ReasoningText(text))
        elif self._state is _State.CONTENT:
            self._events.append(ContentText(text))
        else:
            self._text.append(text)

    def _turn(self, stop: str) -> None:
        """Go on after `stop`, or end the answer after "". What was collected gets its meaning here."""
        text = "".join(self._text)
        self._text.clear()
        match self._state:
            case _State.REASONING if stop == THINK_END:
                self._state, self.is_thought_open = _State.CONTENT, False
            case _State.CONTENT if stop == BLOCK_START:
                self._state = _State.OPENING
            case _State.REASONING | _State.CONTENT:
                self._state = _State.END
            case _State.OPENING | _State.BETWEEN:
                self._turn_between(text, stop)
            case _State.CALL | _State.PARAMETER | _State.INSIDE:
                self._turn_inside(text, stop)
            case _State.TAIL | _State.END:
                self._report(text, "text_after_end")
                self._state = _State.END

    def _turn_between(self, text: str, stop: str) -> None:
        is_opening = self._state is _State.OPENING
        if stop in (CALL_START, BLOCK_END):
            gap = text.removeprefix(">") if is_opening else text
            self._report(gap, "stray_text")
            self._call = _OpenCall([CALL_START])
            self._state = _State.CALL if stop == CALL_START else _State.TAIL
        else:
            start = BLOCK_START.lstrip() if is_opening else ""
            self._events.append(MalformedCall(start + text, "unfinished"))
            self._state = _State.END

    def _turn_inside(self, text: str, stop: str) -> None:
        call = self._call
        if stop in (BLOCK_END, EOS, ""):
            call.blame("unfinished")
        elif self._state is _State.CALL:
            call.read_name(text)
        elif self._state is _State.PARAMETER:
            call.read_parameter(text)
        elif text.strip():
            call.blame("stray_text")
        call.raw += [text, stop if stop not in (BLOCK_END, EOS) else ""]
        following = {
            PARAMETER_START: _State.PARAMETER,
            PARAMETER_END: _State.INSIDE,
            CALL_END: _State.BETWEEN,
            BLOCK_END: _State.TAIL,
        }
        self._state = following.get(stop, _State.END)
        if self._state in (_State.BETWEEN, _State.TAIL, _State.END):
            self._close()

    def _close(self) -> None:
        event = self._call.result(self._num_calls)
        self._num_calls += isinstance(event, ToolCall)
        self._events.append(event)

    def _report(self, text: str, reason: str) -> None:
        if text.strip():
            self._events.append(MalformedCall(text, reason))


@dataclass(slots=True)
class _OpenCall:
    """A call that is being read: its text so far, and the first thing that is wrong with it."""

    raw: list[str] = field(default_factory=list)
    name: str = ""
    parameters: dict[str, Parameter] = field(default_factory=dict)
    fault: str = ""

    def blame(self, reason: str) -> None:
        self.fault = self.fault or reason

    def read_name(self, head: str) -> None:
        name = _between(head.strip(), 'name="', '">')
        if not name or '">' in name:
            self.blame("call_name")
        self.name = name or ""

    def read_parameter(self, text: str) -> None:
        head, _, rest = text.partition('" string="')
        kind, _, value = rest.partition('">')
        name = _between(head.lstrip(), 'name="', "")
        if name is None or kind not in ("true", "false"):
            self.blame("parameter_head")
        elif name in self.parameters:
            self.blame("duplicate_parameter")
        elif kind == "false" and not _is_json(value):
            self.blame("parameter_json")
        else:
            self.parameters[name] = Parameter(name, value, is_string=kind == "true")

    def result(self, index: int) -> ToolCall | MalformedCall:
        if self.fault:
            return MalformedCall("".join(self.raw), self.fault)
        return ToolCall(index, self.name, tuple(self.parameters.values()))


# --- text ---------------------------------------------------------------------------------------


def _between(text: str, start: str, end: str) -> str | None:
    """`text` without `start` and `end`, None where it lacks one of them."""
    if len(text) < len(start) + len(end) or not (text.startswith(start) and text.endswith(end)):
        return None
    return text[len(start) : len(text) - len(end)]


def _is_json(text: str) -> bool:
    try:
        json.loads(text, parse_constant=_refuse)
    except (ValueError, RecursionError):
        return False
    return True


def _refuse(name: str) -> NoReturn:
    raise ValueError(f"{name} is no JSON")


@cache
def _pattern(stops: tuple[str, ...]) -> re.Pattern[str]:
    """Finds the stop that begins first, in time linear in the text up to it; without stops, nothing."""
    return re.compile("|".join(map(re.escape, stops)) if stops else "(?!)")


def _open_length(text: str, stops: Iterable[str]) -> int:
    """The length of the longest end of `text` that is the beginning of a stop."""
    longest = 0
    for stop in stops:
        start = text.find(stop[0], max(0, len(text) - len(stop) + 1))
        while start >= 0 and not stop.startswith(text[start:]):
            start = text.find(stop[0], start + 1)
        if start >= 0:
            longest = max(longest, len(text) - start)
    return longest
