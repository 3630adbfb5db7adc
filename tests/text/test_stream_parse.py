"""DeepSeek-V4 answers: reasoning, content and calls, whole and in pieces."""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence
from time import perf_counter
from typing import Any

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from foveal.text.chat_v4 import encode_v4_messages
from foveal.text.stream_parse import (
    BLOCK_END,
    BLOCK_START,
    CALL_END,
    CALL_START,
    PARAMETER_END,
    PARAMETER_START,
    AnswerParser,
    ContentText,
    Event,
    MalformedCall,
    ReasoningText,
    ToolCall,
    join_events,
    parse_answer,
)
from foveal.text.tokenizer import BOS, EOS
from foveal.text.v4_grammar import ASSISTANT, THINK_END, USER, Parameter


def parameter(name: str, value: str, kind: str = "true") -> str:
    return f'{PARAMETER_START} name="{name}" string="{kind}">{value}{PARAMETER_END}\n'


def invoke(name: str, *parameters: str) -> str:
    return f'{CALL_START} name="{name}">\n{"".join(parameters)}{CALL_END}\n'


def block(*calls: str) -> str:
    return f"{BLOCK_START}>\n{''.join(calls)}{BLOCK_END}"


def streamed(pieces: Iterable[str], **options: bool) -> list[Event]:
    parser = AnswerParser(**{"thinking": False, **options})
    events = [event for piece in pieces for event in parser.push(piece)]
    return [*events, *parser.finish()]


def whole(text: str, **options: bool) -> list[Event]:
    return join_events(streamed([text], **options))


def good(index: int, name: str, *parameters: tuple[str, str, bool]) -> ToolCall:
    return ToolCall(index, name, tuple(Parameter(*p) for p in parameters))


A, B = invoke("a", parameter("x", "1", "false")), invoke("b")
GOOD_A = good(0, "a", ("x", "1", False))

# --- whole answers ------------------------------------------------------------------------------


def test_reasoning_content_and_calls() -> None:
    calls = block(
        invoke("f", parameter("s", 'a "b"\n<c>'), parameter("j", '{"k": [1, null]}', "false")), B
    )
    answer = parse_answer(f"thought{THINK_END}text{calls}{EOS}", thinking=True)
    assert (answer.reasoning, answer.content) == ("thought", "text")
    assert answer.malformed == ()
    assert not answer.is_thought_open
    first, second = answer.calls
    assert first == good(0, "f", ("s", 'a "b"\n<c>', True), ("j", '{"k": [1, null]}', False))
    assert first.arguments == '{"s": "a \\"b\\"\\n<c>", "j": {"k": [1, null]}}'
    assert (second.index, second.name, second.arguments) == (1, "b", "{}")


@pytest.mark.parametrize("end", ["", EOS])
def test_without_thinking_the_answer_is_content_from_the_start(end: str) -> None:
    assert whole(f"hello{end}") == [ContentText("hello")]
    assert whole(f"a{THINK_END}b{end}") == [ContentText(f"a{THINK_END}b")]
    assert whole(end) == []


def test_a_thought_that_is_not_closed_is_said_to_be_open() -> None:
    for text in ("still thinking", f"still thinking{EOS}"):
        answer = parse_answer(text, thinking=True)
        assert (answer.reasoning, answer.content) == ("still thinking", "")
        assert answer.is_thought_open


def test_a_call_inside_a_thought_is_a_thought() -> None:
    text = f"maybe{block(A)} or not"
    assert whole(f"{text}{THINK_END}no", thinking=True) == [ReasoningText(text), ContentText("no")]


def test_only_the_first_end_of_a_thought_counts() -> None:
    assert whole(f"r{THINK_END}{THINK_END}c", thinking=True) == [
        ReasoningText("r"),
        ContentText(f"{THINK_END}c"),
    ]


def test_without_tools_a_block_is_content() -> None:
    text = f"see:{block(A)}"
    assert whole(f"{text}{EOS}", tools=False) == [ContentText(text)]


@pytest.mark.parametrize("lead", ["", "\n", "text\n"])
def test_a_block_begins_after_a_blank_line_only(lead: str) -> None:
    text = lead + block(A).lstrip()
    assert whole(text) == [ContentText(text)]
    assert whole(f"{lead}\n{block(A)}") == [ContentText(f"{lead}\n"), GOOD_A]


def test_white_space_between_tags_does_not_matter() -> None:
    text = block(A, B).replace(">\n", "> \n\n\t").replace("<", "\n <")[1:]
    text = "\n\n" + text.strip().replace("\n </", "</").replace(
        f"1{PARAMETER_END}", f"1{PARAMETER_END} "
    )
    assert whole(text + "\n") == [GOOD_A, good(1, "b")]


def test_values_keep_their_white_space() -> None:
    (event,) = whole(
        block(invoke("f", parameter("x", "\n a \n"), parameter("y", " 2.50 ", "false")))
    )
    assert event == good(0, "f", ("x", "\n a \n", True), ("y", " 2.50 ", False))
    assert json.loads(event.arguments) == {"x": "\n a \n", "y": 2.5}


# --- malformed blocks ---------------------------------------------------------------------------

OPEN_A = A.strip().removesuffix(CALL_END)


@pytest.mark.parametrize(
    ("bad", "reason"),
    [
        (A.replace('name="a"', "a"), "call_name"),
        (A.replace('name="a"', 'name=""'), "call_name"),
        (A.replace('name="a">', 'name="'), "call_name"),
        (A.replace('name="a">', 'name="a">stray'), "call_name"),
        (A.replace('name="x" ', ""), "parameter_head"),
        (A.replace('string="false"', 'string="maybe"'), "parameter_head"),
        (A.replace(' string="false"', ""), "parameter_head"),
        (A.replace(CALL_END, parameter("x", "2") + CALL_END), "duplicate_parameter"),
        (A.replace(">1<", ">one<"), "parameter_json"),
        (A.replace(">1<", "><"), "parameter_json"),
        (A.replace(">1<", ">NaN<"), "parameter_json"),
        (A.replace(">1<", ">" + "[" * 100_000 + "<"), "parameter_json"),
        (A.replace(CALL_END, "stray" + CALL_END), "stray_text"),
    ],
)
def test_a_malformed_call_is_reported_and_the_next_one_is_read(bad: str, reason: str) -> None:
    events = whole(f"c{block(bad, B)}{EOS}")
    assert events == [ContentText("c"), MalformedCall(bad.strip(), reason), good(0, "b")]


@pytest.mark.parametrize(
    "text",
    [
        OPEN_A,
        OPEN_A[:-40],
        f"{CALL_START} name=",
        f'{CALL_START} name="f">\n{PARAMETER_START} name="x" string="true">half a val',
    ],
)
def test_an_answer_that_ends_inside_a_call(text: str) -> None:
    for end in ("", EOS):
        assert whole(f"{BLOCK_START}>\n{B}{text}{end}") == [
            good(0, "b"),
            MalformedCall(text, "unfinished"),
        ]


def test_a_call_that_ends_with_its_block() -> None:
    assert whole(f"{BLOCK_START}>\n{OPEN_A}{BLOCK_END}") == [MalformedCall(OPEN_A, "unfinished")]


@pytest.mark.parametrize("end", ["", EOS])
def test_a_block_that_is_not_closed(end: str) -> None:
    assert whole(f"{BLOCK_START}>\n{A}{end}") == [GOOD_A, MalformedCall("\n", "unfinished")]
    start = BLOCK_START.lstrip()
    assert whole(f"c{BLOCK_START}{end}") == [ContentText("c"), MalformedCall(start, "unfinished")]


def test_text_where_none_belongs() -> None:
    assert whole(f"{block(f'one{A}two{B}three')}four{EOS}five") == [
        MalformedCall("\none", "stray_text"),
        GOOD_A,
        MalformedCall("\ntwo", "stray_text"),
        good(1, "b"),
        MalformedCall("\nthree", "stray_text"),
        MalformedCall("four", "text_after_end"),
        MalformedCall("five", "text_after_end"),
    ]
    assert whole(f"a{EOS}b{EOS}") == [ContentText("a"), MalformedCall(f"b{EOS}", "text_after_end")]


def test_half_a_block_start_is_content_in_the_end() -> None:
    for length in range(1, len(BLOCK_START)):
        text = f"c{BLOCK_START[:length]}"
        assert streamed(text) == [
            *map(ContentText, "c"),
            ContentText(BLOCK_START[:length]),
        ]


# --- streams ------------------------------------------------------------------------------------


def test_text_is_held_back_no_longer_than_it_may_be_a_mark() -> None:
    parser = AnswerParser(thinking=True)
    assert parser.push("a<b") == [ReasoningText("a<b")]
    assert parser.push("c</thi") == [ReasoningText("c")]
    assert parser.push("s") == [ReasoningText("</this"[:-1] + "s")]
    assert parser.push("</think") == []
    assert parser.push(">d\n") == [ContentText("d")]
    assert parser.push("\n\n") == [ContentText("\n")]
    assert parser.push("<｜x") == [ContentText("\n\n<｜x")]


def test_a_call_comes_as_soon_as_it_is_whole() -> None:
    parser = AnswerParser(thinking=False)
    text = f"{BLOCK_START}>\n{A.strip()}"
    assert parser.push(text[:-1]) == []
    assert parser.push(text[-1]) == [GOOD_A]
    assert parser.push(f"\n{BLOCK_END}") == parser.finish() == []


SNIPPETS = (
    THINK_END,
    EOS,
    BLOCK_START,
    BLOCK_END,
    CALL_START,
    CALL_END,
    PARAMETER_START,
    PARAMETER_END,
    f"{BLOCK_START}>\n",
    A,
    B,
    block(A, B),
    ' name="f">\n',
    ' name="x" string="true">',
    ' name="x" string="false">',
    "\n",
    "<",
    "text",
    "1",
)
ANSWERS = st.lists(st.sampled_from(SNIPPETS) | st.text(max_size=3), max_size=12).map("".join)


def cut(text: str, places: Sequence[int]) -> list[str]:
    ends = sorted({place % (len(text) + 1) for place in places} | {len(text)})
    return [text[a:b] for a, b in zip([0, *ends], ends, strict=False)]


@given(ANSWERS, st.lists(st.integers(0, 10_000), max_size=20), st.booleans(), st.booleans())
@example(f"r{THINK_END}c{block(A, B)}{EOS}", list(range(400)), True, True)
def test_any_cut_of_the_text_gives_the_same_events(
    text: str, places: list[int], thinking: bool, tools: bool
) -> None:
    expected = whole(text, thinking=thinking, tools=tools)
    for pieces in (cut(text, places), list(text)):
        assert join_events(streamed(pieces, thinking=thinking, tools=tools)) == expected


@given(ANSWERS, st.booleans())
def test_no_text_of_an_answer_is_lost_before_its_first_mark(text: str, thinking: bool) -> None:
    answer = parse_answer(text, thinking=thinking, tools=False)
    shown = answer.reasoning + (THINK_END if thinking and not answer.is_thought_open else "")
    assert (shown + answer.content + EOS).startswith(text.partition(EOS)[0])


@given(ANSWERS)
def test_arguments_of_calls_are_json_objects(text: str) -> None:
    for call in parse_answer(block(text), thinking=False).calls:
        assert isinstance(json.loads(call.arguments), dict)
        assert call.name


PLAIN = st.text(max_size=8).filter(lambda t: "｜" not in t)
KEYS = PLAIN.filter(lambda t: '"' not in t)
VALUES = PLAIN | st.integers() | st.booleans() | st.none() | st.lists(PLAIN, max_size=2)
CALLS = st.lists(
    st.tuples(
        st.text("abc_", min_size=1, max_size=5),
        st.dictionaries(KEYS, VALUES, max_size=3),
    ),
    max_size=3,
)


@given(CALLS, PLAIN, PLAIN)
def test_what_the_encoder_writes_is_read_back(
    calls: list[tuple[str, dict[str, Any]]], reasoning: str, content: str
) -> None:
    history = {
        "role": "assistant",
        "content": content,
        "reasoning_content": reasoning,
        "tool_calls": [{"function": {"name": n, "arguments": a}} for n, a in calls],
    }
    chat = encode_v4_messages([{"role": "user", "content": "q"}, history], thinking=True)
    text = chat.text.removeprefix(f"{BOS}{USER}q{ASSISTANT}<think>")
    answer = parse_answer(text, thinking=True)
    assert (answer.reasoning, answer.content) == (reasoning, content)
    assert [(call.name, json.loads(call.arguments)) for call in answer.calls] == calls
    assert answer.malformed == ()


def test_what_is_held_back_is_shorter_than_a_mark() -> None:
    """So the work for a piece does not grow with the answer, however long a value is."""
    text = "<a\n" * 50 + block(A, invoke("f", parameter("x", "<｜\n\n</" * 50)), B)
    parser = AnswerParser(thinking=False)
    for character in text:
        parser.push(character)
        assert len(parser._held) < len(BLOCK_START)
    assert parser.finish() == []


def test_long_answers_are_read_in_time_linear_in_their_length() -> None:
    """Takes about 0.2 s; with a search of the whole rest for each tag it would take far longer."""
    many, length = block(*[A] * 4_000), 200_000
    start = perf_counter()
    assert len(whole(many)) == 4_000
    (event,) = whole(block(invoke("f", parameter("x", "<" * length))))
    assert isinstance(event, ToolCall)
    assert len(event.parameters[0].value) == length
    assert perf_counter() - start < 15
