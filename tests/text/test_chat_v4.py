"""DeepSeek-V4 chat format: golden prompts, the rules of roles, pictures, tools, literal text, ids."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import Tokenizer as Backend

from foveal.errors import CheckpointError, PromptError
from foveal.text.chat_v4 import (
    Mark,
    V4Chat,
    encode_pieces,
    encode_v4_messages,
    encode_v4_prompt,
)
from foveal.text.tokenizer import BOS, EOS, Tokenizer
from foveal.text.v4_grammar import (
    ASSISTANT,
    DSML,
    IMAGE,
    MARKS,
    REMINDER,
    TASKS,
    THINK_END,
    THINK_START,
    USER,
)
from foveal.text.v4_prompts import V4Prompts
from foveal.text.v4_turns import PICTURE_ROLES, PictureSlot, with_tools
from foveal.types import Message, Picture

PICTURE = Picture(np.zeros((2, 3, 3), np.uint8))
URL = {"type": "image_url", "image_url": {"url": "data:image/png;base64,AA=="}}
ANSWER, THOUGHT = ASSISTANT + THINK_END, ASSISTANT + THINK_START
B, Z, U = BOS, EOS, USER


def message(role: Any, content: Any = "", **fields: Any) -> dict[str, Any]:
    return {"role": role, "content": content, **fields}


def text_part(text: Any) -> dict[str, Any]:
    return {"type": "text", "text": text}


def prompt_of(*messages: Any, **options: Any) -> str:
    return encode_v4_messages(messages, **options).text


def call(name: str, arguments: Any, call_id: str = "") -> dict[str, Any]:
    return {"id": call_id, "type": "function", "function": {"name": name, "arguments": arguments}}


SYSTEM, HI, Q2 = message("system", "S"), message("user", "Hi"), message("user", "Q2")
YO = message("assistant", "Yo", reasoning_content="r1")


@pytest.fixture(scope="module")
def folder(golden: Path) -> Path:
    path = golden / "v4_encoding"
    if not path.is_dir():
        pytest.skip(f"no golden data in {path}")
    return path


@pytest.fixture(scope="module")
def later(folder: Path) -> V4Prompts:
    return V4Prompts.load(folder / "release_vision")


def checkpoints(golden: Path) -> list[Path]:
    found = sorted((golden / "v4_vision").glob("*/checkpoint"))
    if not found:
        pytest.skip(f"no golden data in {golden / 'v4_vision'}")
    return found


@pytest.fixture(scope="module")
def tokenizer_path(golden: Path) -> Path:
    return checkpoints(golden)[0]


@pytest.fixture(scope="module")
def tokenizer(tokenizer_path: Path) -> Tokenizer:
    return Tokenizer.load(tokenizer_path)


@pytest.fixture(scope="module")
def backend(tokenizer_path: Path) -> Backend:
    return Backend.from_file(str(tokenizer_path / "tokenizer.json"))


def read_cases(folder: Path) -> list[dict[str, Any]]:
    cases: list[dict[str, Any]] = json.loads((folder / "cases.json").read_text(encoding="utf-8"))
    return cases


# --- golden prompts -----------------------------------------------------------------------------


@pytest.mark.parametrize("release", ["release_preview", "release_vision"])
def test_golden_prompts_of_both_releases(release: str, folder: Path) -> None:
    prompts = V4Prompts.load(folder / release)
    for case in read_cases(folder):
        options = case["options"]
        chat = encode_v4_messages(
            case["messages"],
            thinking=options["thinking_mode"] == "thinking",
            effort=options.get("reasoning_effort"),
            drop_thinking=options.get("drop_thinking", True),
            prompts=prompts,
            rejects_placeholders=True,
        )
        expected = case["prompt"]
        if release == "release_vision":
            expected = case.get("second_implementation_prompt", expected)
        assert chat.text == expected, case["case"]


@pytest.mark.parametrize(
    ("messages", "options", "expected"),
    [
        ([message("user", "Hello")], {}, f"{B}{U}Hello{ANSWER}"),
        ([message("user", "Hello")], {"thinking": True}, f"{B}{U}Hello{THOUGHT}"),
        ([SYSTEM, HI, YO, Q2], {"thinking": True}, f"{B}S{U}Hi{ANSWER}Yo{Z}{U}Q2{THOUGHT}"),
        (
            [SYSTEM, HI, YO, Q2],
            {"thinking": True, "drop_thinking": False},
            f"{B}S{U}Hi{THOUGHT}r1{THINK_END}Yo{Z}{U}Q2{THOUGHT}",
        ),
        ([message("user", "Hi", task="title")], {}, f"{B}{U}Hi{TASKS['title']}"),
        (
            [message("user", [URL, text_part("What?")])],
            {},
            f"{B}{U}{IMAGE}\n\nWhat?{ANSWER}",
        ),
        (
            [message("user", [text_part("a"), URL, URL, text_part("b")])],
            {},
            f"{B}{U}a\n\n{IMAGE}\n\n{IMAGE}\n\nb{ANSWER}",
        ),
    ],
    ids=["chat", "thinking", "dropped", "kept", "task", "one picture", "two pictures"],
)
def test_examples_of_the_specification(
    messages: list[dict[str, Any]], options: dict[str, Any], expected: str
) -> None:
    assert prompt_of(*messages, **options) == expected


# --- turns and their transitions ----------------------------------------------------------------


def test_developer_turns_are_questions() -> None:
    assert prompt_of(message("developer", "D")) == f"{B}{U}D{ANSWER}"
    with pytest.raises(PromptError, match=r"messages\[0\] is empty"):
        prompt_of(message("developer", ""))


def test_a_reminder_stands_between_the_opened_answer_and_the_answer() -> None:
    reminder = message("latest_reminder", "R")
    assert prompt_of(HI, reminder, YO) == f"{B}{U}Hi{ANSWER}{REMINDER}RYo{Z}"
    assert prompt_of(reminder, HI) == f"{B}{REMINDER}R{U}Hi{ANSWER}"


def test_dropping_reasoning_drops_developer_turns_before_the_last_question() -> None:
    developer = message("developer", "D")
    assert prompt_of(developer, YO, Q2, thinking=True) == f"{B}Yo{Z}{U}Q2{THOUGHT}"
    assert prompt_of(HI, YO, developer, thinking=True) == f"{B}{U}Hi{ANSWER}Yo{Z}{U}D{THOUGHT}"
    assert prompt_of(developer, YO, Q2) == f"{B}{U}D{ANSWER}Yo{Z}{U}Q2{ANSWER}"


def test_the_answer_after_the_last_question_keeps_its_reasoning() -> None:
    assert prompt_of(HI, YO, thinking=True) == f"{B}{U}Hi{THOUGHT}r1{THINK_END}Yo{Z}"


def test_without_thinking_no_reasoning_is_written() -> None:
    assert prompt_of(HI, YO, Q2, drop_thinking=False) == f"{B}{U}Hi{ANSWER}Yo{Z}{U}Q2{ANSWER}"


def test_tools_keep_the_reasoning(later: V4Prompts) -> None:
    tools = [{"type": "function", "function": {"name": "f"}}]
    system = message("system", "S", tools=tools)
    text = prompt_of(system, HI, YO, Q2, thinking=True, prompts=later)
    assert text.endswith(f"{U}Hi{THOUGHT}r1{THINK_END}Yo{Z}{U}Q2{THOUGHT}")


@pytest.mark.parametrize(("name", "token"), TASKS.items())
def test_tasks(name: str, token: str) -> None:
    question = message("user", "Hi", task=name)
    opened = ANSWER if name == "action" else ""
    assert prompt_of(question) == f"{B}{U}Hi{opened}{token}"
    # The answer to a task is written without reasoning.
    assert prompt_of(question, YO, thinking=True).endswith(f"{token}Yo{Z}")


def test_an_open_answer_has_no_end_of_sequence() -> None:
    assert prompt_of(HI, message("assistant", "Yo", wo_eos=True)) == f"{B}{U}Hi{ANSWER}Yo"


def test_context_counts_and_is_not_written_again() -> None:
    whole = prompt_of(HI, YO, Q2, thinking=True)
    before = prompt_of(HI, YO, thinking=True, drop_thinking=True)
    rest = prompt_of(Q2, thinking=True, context=[HI, YO])
    assert rest == f"{U}Q2{THOUGHT}"
    assert whole.endswith(rest)
    assert before != whole[: -len(rest)]  # the old answer loses its reasoning once it is old
    assert prompt_of(Q2, context=[HI]) == f"{U}Q2{ANSWER}"  # two user turns, for they are apart


def test_begin_of_sequence_can_be_left_out() -> None:
    assert prompt_of(HI, adds_bos=False) == f"{U}Hi{ANSWER}"


def test_messages_as_objects_are_taken_too() -> None:
    objects = [Message("system", ("S",)), Message("user", (PICTURE, "What?"))]
    chat = encode_v4_messages(objects)
    assert chat.text == f"{B}S{U}{IMAGE}\n\nWhat?{ANSWER}"
    assert chat.pictures == [PICTURE]


def test_content_may_be_missing() -> None:
    assert prompt_of({"role": "system"}, message("user", None)) == f"{B}{U}{ANSWER}"


# --- effort -------------------------------------------------------------------------------------


def test_the_effort_text_comes_first_and_only_with_thinking(later: V4Prompts) -> None:
    text = later.effort_text("high")
    options = {"effort": "high", "prompts": later}
    assert prompt_of(SYSTEM, HI, thinking=True, **options) == f"{B}{text}S{U}Hi{THOUGHT}"
    assert prompt_of(HI, **options) == f"{B}{U}Hi{ANSWER}"
    assert prompt_of(Q2, context=[HI, YO], thinking=True, **options) == f"{U}Q2{THOUGHT}"


def test_plain_chat_needs_no_texts_and_effort_says_what_it_needs() -> None:
    assert prompt_of(HI, thinking=True, effort="low") == f"{B}{U}Hi{THOUGHT}"
    with pytest.raises(PromptError, match=r"encoding_dsv4\.py"):
        prompt_of(HI, thinking=True, effort="high")
    with pytest.raises(PromptError, match="'medium' is not known"):
        prompt_of(HI, effort="medium")
    with pytest.raises(PromptError, match="the use of tools needs a text"):
        prompt_of(message("system", "", tools=[{"function": {"name": "f"}}]), HI)
    with pytest.raises(PromptError, match="a response format needs a text"):
        prompt_of(message("system", "", response_format={"type": "json_object"}), HI)


# --- pictures -----------------------------------------------------------------------------------


def test_pictures_go_into_user_developer_and_reminder_turns_and_tool_results() -> None:
    chat = encode_v4_messages(
        [
            message("user", [URL, text_part("u")]),
            message("assistant", "", tool_calls=[call("look", {}, "1")]),
            message("tool", [text_part("seen:"), PICTURE], tool_call_id="1"),
            message("user", "and?"),
            message("latest_reminder", [text_part("r"), URL]),
            message("assistant", "ok"),
            message("developer", [URL, "d"]),
        ]
    )
    result = f"<tool_result>seen:\n\n{IMAGE}</tool_result>"
    block = f'\n\n<{DSML}tool_calls>\n<{DSML}invoke name="look">\n\n</{DSML}invoke>\n</{DSML}tool_calls>'
    assert chat.text == (
        f"{B}{U}{IMAGE}\n\nu{ANSWER}{block}{Z}{U}{result}\n\nand?{ANSWER}"
        f"{REMINDER}r\n\n{IMAGE}ok{Z}{U}{IMAGE}\n\nd{ANSWER}"
    )
    assert chat.pictures == [URL, PICTURE, URL, URL]
    assert len(chat.segments) == 5


@pytest.mark.parametrize("role", ["system", "assistant"])
def test_a_picture_in_another_role_is_refused(role: str) -> None:
    with pytest.raises(PromptError, match=rf"messages\[1\]\.content has a picture .*{role!r}"):
        prompt_of(HI, message(role, [PICTURE]))
    assert role not in PICTURE_ROLES


@pytest.mark.parametrize(
    "part",
    [
        {"type": "image_url", "image_url": "data:,x"},
        {"type": "image_url", "image_url": {"url": "data:,x", "detail": "low"}},
        {"type": "input_image", "image_url": "data:,x"},
        {"type": "image", "image": b"x"},
        {"type": "image", "source": {"type": "base64", "data": "AA=="}},
        {"type": "image", "url": "x.png"},
        {"type": "image", "data": "AA=="},
        PICTURE,
    ],
)
def test_pictures_come_in_many_shapes(part: Any) -> None:
    chat = encode_v4_messages([message("user", [part])])
    assert (chat.text, chat.pictures) == (f"{B}{U}{IMAGE}{ANSWER}", [part])


@pytest.mark.parametrize(
    "part",
    [
        {"type": "image"},
        {"type": "image", "data": ""},
        {"type": "image_url", "image_url": {"detail": "low"}},
        {"type": "input_image", "image_url": ""},
    ],
)
def test_a_picture_without_a_source_is_refused(part: dict[str, Any]) -> None:
    with pytest.raises(PromptError, match=r"messages\[0\]\.content\[0\] is a picture without"):
        prompt_of(message("user", [part]))


# --- tools --------------------------------------------------------------------------------------


def called(arguments: Any) -> str:
    return prompt_of(HI, message("assistant", "", tool_calls=[call("f", arguments)]))


@pytest.mark.parametrize(
    "arguments",
    [
        {"city": 'Pa"ris\n', "n": 2, "x": 2.5, "deep": {"é": [None, True]}},
        {},
        {"只": "世界 🌍"},
    ],
)
def test_arguments_as_object_and_as_text_are_the_same(arguments: dict[str, Any]) -> None:
    """Case C083."""
    assert called(arguments) == called(json.dumps(arguments))
    assert called(arguments) == called(json.dumps(arguments, ensure_ascii=False, indent=1))


def test_values_are_typed_and_not_escaped() -> None:
    lines = (
        f'<{DSML}invoke name="f">',
        f'<{DSML}parameter name="s" string="true">a "b" <c></{DSML}parameter>',
        f'<{DSML}parameter name="j" string="false">["é", 1]</{DSML}parameter>',
        f"</{DSML}invoke>",
    )
    assert "\n".join(lines) in called({"s": 'a "b" <c>', "j": ["é", 1]})


@pytest.mark.parametrize("arguments", ["{broken", "", "[1, 2]", "3", '"text"'])
def test_arguments_that_are_no_object_become_one_parameter(arguments: str) -> None:
    expected = f'name="arguments" string="true">{arguments}</{DSML}parameter>'
    assert expected in called(arguments)


def tool(call_id: str, content: Any) -> dict[str, Any]:
    return message("tool", content, tool_call_id=call_id)


def results(*contents: str) -> str:
    return "\n\n".join(f"<tool_result>{content}</tool_result>" for content in contents)


def asking(*ids: str) -> dict[str, Any]:
    return message("assistant", "", tool_calls=[call("f", {}, i) for i in ids])


def last_turn(*messages: Any) -> str:
    return prompt_of(*messages).rpartition(U)[2]


def test_results_follow_the_order_of_the_calls() -> None:
    shuffled = [tool("c", "3"), tool("a", "1"), tool("b", "2")]
    assert last_turn(HI, asking("a", "b", "c"), *shuffled) == results("1", "2", "3") + ANSWER


def test_only_results_change_places() -> None:
    turn = last_turn(HI, asking("a", "b"), tool("b", "2"), message("user", "mid"), tool("a", "1"))
    assert turn == f"{results('1')}\n\nmid\n\n{results('2')}{ANSWER}"


def test_the_order_is_that_of_the_calls_before() -> None:
    first = [HI, asking("a", "b"), tool("a", "1"), tool("b", "2")]
    assert last_turn(*first, asking("b", "a"), tool("a", "x"), tool("b", "y")) == (
        results("y", "x") + ANSWER
    )


def test_results_of_unknown_calls_stay_in_front_in_their_order() -> None:
    answers = [tool("b", "2"), tool("?", "u"), tool("a", "1"), tool("", "v")]
    assert last_turn(HI, asking("a", "b"), *answers) == results("u", "1", "v", "2") + ANSWER


def test_pictures_of_results_are_listed_in_the_order_of_the_prompt() -> None:
    one, two = dict(URL), {**URL, "second": True}
    chat = encode_v4_messages([HI, asking("a", "b"), tool("b", [two]), tool("a", [one])])
    assert chat.pictures == [one, two]


def test_a_list_of_a_tool_is_joined_and_unknown_parts_are_named() -> None:
    content = [text_part("a"), {"type": "audio"}, "b", 3, {"type": ["odd"]}]
    expected = "a\n\n[Unsupported audio]\n\nb\n\n[Unsupported int]\n\n[Unsupported ['odd']]"
    assert last_turn(HI, asking("a"), tool("a", content)) == results(expected) + ANSWER


def test_results_may_be_blocks_of_a_user_turn() -> None:
    block = {"type": "tool_result", "tool_use_id": "a", "content": "1"}
    for key in ("content", "content_blocks"):
        turn = {"role": "user", key: [block, text_part("t")]}
        assert last_turn(HI, asking("a"), turn) == f"{results('1')}\n\nt{ANSWER}"
    with pytest.raises(PromptError, match="tool result in a turn of 'developer'"):
        prompt_of(message("developer", [block]))


def test_neighbouring_user_turns_become_one() -> None:
    assert prompt_of(HI, Q2) == f"{B}{U}Hi\n\nQ2{ANSWER}"


def test_a_task_closes_a_user_turn() -> None:
    titled = message("user", "T", task="title")
    assert prompt_of(titled, Q2) == f"{B}{U}T{U}Q2{ANSWER}"
    assert prompt_of(HI, titled) == f"{B}{U}Hi\n\nT{TASKS['title']}"


def test_tools_and_format_of_a_developer_turn(later: V4Prompts) -> None:
    tools = [{"type": "function", "function": {"name": "f", "description": "é"}}]
    text = prompt_of(
        message("developer", "D", tools=tools, response_format={"a": 1}), prompts=later
    )
    assert text.startswith(f"{B}{U}D\n\n## Tools\n")
    assert '\n{"name": "f", "description": "é"}\n' in text
    assert text.endswith(f':\n{{"a": 1}}{ANSWER}')


def test_tools_of_a_request_go_into_the_first_system_message() -> None:
    tools = [{"type": "function", "function": {"name": "f"}}]
    given = [HI, SYSTEM, SYSTEM]
    assert with_tools(given) == given
    assert with_tools(given, tools) == [HI, {**SYSTEM, "tools": tools}, SYSTEM]
    alone = with_tools([HI], tools, {"type": "json_object"})
    assert alone[0] == message("system", "", tools=tools, response_format={"type": "json_object"})
    assert given == [HI, SYSTEM, SYSTEM], "the caller's messages stay as they are"
    with pytest.raises(PromptError, match="give them in one place"):
        with_tools([{**SYSTEM, "tools": tools}], tools)


# --- refusals -----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("messages", "words"),
    [
        ([], "non-empty list"),
        ("Hi", "must be a list"),
        ({"role": "user"}, "must be a list"),
        (["Hi"], r"messages\[0\] is a str"),
        ([message("robot")], r"messages\[0\]\.role is 'robot'"),
        ([message(["user"])], r"\.role is \['user'\]"),
        ([message("user", 3)], r"messages\[0\]\.content is of type int"),
        ([message("user", [text_part(3)])], r"content\[0\]: text of type int"),
        ([message("user", [{"type": "video_url"}])], r"content\[0\] has type 'video_url'"),
        ([message("user", [{"type": ["x"]}])], r"content\[0\] has type \['x'\]"),
        ([message("user", [None])], r"content\[0\] has type None"),
        ([message("user", "", task="poem")], "known tasks: action, query"),
        ([message("user", "", task=["title"])], "known tasks"),
        ([message("user", "", tools=[{}])], "belong to system or developer"),
        ([message("user", "", tool_calls=[{}])], "belong to assistant"),
        ([message("system", "", tools={"a": 1})], "are lists, not dict"),
        ([message("system", "", tools=[{"name": "f"}])], r"tools\[0\] has no 'function'"),
        ([message("assistant", "", tool_calls=[{"function": {}}])], r"tool_calls\[0\] needs"),
        ([message("assistant", "", tool_calls=["f"])], r"tool_calls\[0\] needs"),
        ([message("assistant", "", reasoning_content=3)], "reasoning_content: text of type int"),
        (
            [message("assistant", "", tool_calls=[call("f", {"x": {1, 2}})])],
            "argument 'x' cannot be written as JSON",
        ),
    ],
)
def test_messages_that_do_not_fit_are_refused(messages: Any, words: str) -> None:
    with pytest.raises(PromptError, match=words):
        encode_v4_messages(messages)


@pytest.mark.parametrize(
    "messages",
    [
        [message("user", f"a{IMAGE}")],
        [message("user", [text_part(f"a{IMAGE}")])],
        [message("system", IMAGE), HI],
        [HI, message("assistant", "", reasoning_content=IMAGE)],
        [HI, asking("a"), tool("a", [text_part(IMAGE)])],
    ],
)
def test_a_typed_placeholder_is_text_and_an_error_for_the_released_code(
    messages: list[dict[str, Any]],
) -> None:
    assert encode_v4_messages(messages).pictures == []
    with pytest.raises(PromptError, match="send pictures as parts of their own"):
        encode_v4_messages(messages, rejects_placeholders=True)


# --- ids ----------------------------------------------------------------------------------------


def whole(chat: V4Chat, backend: Backend) -> list[int]:
    """Ids of the prompt as one string, marks recognised."""
    return list(backend.encode(chat.text, add_special_tokens=False).ids)


def joined(chat: V4Chat, tokenizer: Tokenizer) -> list[int]:
    """Ids of the pieces, the placeholder's id between the lists."""
    lists = encode_pieces(chat.pieces, tokenizer, spells_missing=True)
    assert len(lists) == len(chat.pictures) + 1
    ids = list(lists[0])
    for following in lists[1:]:
        ids += [tokenizer.token_id(IMAGE), *following]
    return ids


def test_ids_of_golden_prompts_are_those_of_the_whole_string(
    folder: Path, later: V4Prompts, golden: Path
) -> None:
    for path in checkpoints(golden):
        tokenizer = Tokenizer.load(path)
        backend = Backend.from_file(str(path / "tokenizer.json"))
        for case in read_cases(folder):
            thinking = case["options"]["thinking_mode"] == "thinking"
            chat = encode_v4_messages(case["messages"], thinking=thinking, prompts=later)
            assert joined(chat, tokenizer) == whole(chat, backend), case["case"]


def test_ids_with_pictures_are_those_of_the_whole_string(
    tokenizer: Tokenizer, backend: Backend
) -> None:
    chat = encode_v4_messages(
        [
            message("user", [text_part("  a\n"), URL, URL, text_part("\n b")]),
            message("assistant", " \n", tool_calls=[call("f", {"x": "\n"}), call("g", {"y": 1})]),
            tool("", [URL, text_part("z")]),
        ]
    )
    assert joined(chat, tokenizer) == whole(chat, backend)


SPACED = st.text(st.sampled_from(" \n\tab9.<>/:\"'{}é世🌍"), max_size=12)
TEXTS = (SPACED | st.text(max_size=12)).filter(lambda t: not any(mark in t for mark in MARKS))
CONTENTS = TEXTS | st.lists(TEXTS | st.just(URL), max_size=4)
ROUNDS = st.tuples(CONTENTS, TEXTS, st.dictionaries(TEXTS, TEXTS | st.integers(), max_size=3))


@settings(max_examples=60)
@given(st.lists(ROUNDS, min_size=1, max_size=3), st.booleans())
def test_ids_of_any_chat_are_those_of_the_whole_string(
    tokenizer: Tokenizer, backend: Backend, rounds: list[Any], thinking: bool
) -> None:
    messages: list[dict[str, Any]] = []
    for question, answer, arguments in rounds:
        messages.append(message("user", question))
        messages.append(message("assistant", answer, reasoning_content=answer))
        if arguments:
            messages[-1]["tool_calls"] = [call("f", arguments)]
            messages.append(tool("", question))
    chat = encode_v4_messages(messages, thinking=thinking, drop_thinking=False)
    if any(mark in piece for piece in chat.pieces if isinstance(piece, str) for mark in MARKS):
        return  # two texts made a mark between them, which the whole string would show
    assert joined(chat, tokenizer) == whole(chat, backend)


def marks_in(chat: V4Chat) -> list[str]:
    return [piece.token for piece in chat.pieces if isinstance(piece, Mark)]


@pytest.mark.parametrize("mark", [*MARKS, "<image>", "<|User|>"])
def test_a_typed_mark_stays_plain_text(mark: str, tokenizer: Tokenizer) -> None:
    typed = f"a {mark}{mark} b{mark}"
    chat = encode_v4_messages(
        [
            message("system", typed),
            message("user", [text_part(typed), URL]),
            message("assistant", typed, tool_calls=[call(typed, {typed: typed, "j": [typed]})]),
            tool("", typed),
        ]
    )
    lists = encode_pieces(chat.pieces, tokenizer)
    ids = [i for some in lists for i in some]
    known = [tokenizer.token_id(token) for token in marks_in(chat)]
    assert [i for i in ids if i in tokenizer.special_ids] == known
    assert IMAGE.join(tokenizer.decode(some) for some in lists) == chat.text


def test_tokens_that_a_model_keeps_count_where_they_are_typed(tokenizer: Tokenizer) -> None:
    chat = encode_v4_messages([message("user", f"a{DSML}b{USER}")])
    (kept,), (plain,) = (encode_pieces(chat.pieces, tokenizer, keep=k) for k in ((DSML,), ()))
    dsml, user_id = tokenizer.token_id(DSML), tokenizer.token_id(USER)
    assert (kept.count(dsml), kept.count(user_id)) == (1, 1)
    assert (plain.count(dsml), plain.count(user_id)) == (0, 1)


def test_a_mark_that_the_tokenizer_lacks_is_an_error_unless_spelled(tokenizer: Tokenizer) -> None:
    chat = encode_v4_messages([message("user", "Hi", task="title")])
    with pytest.raises(CheckpointError, match="no token '<｜title｜>'"):
        encode_pieces(chat.pieces, tokenizer)
    (ids,) = encode_pieces(chat.pieces, tokenizer, spells_missing=True)
    assert tokenizer.decode(ids) == chat.text


def test_pieces_are_joined_text_between_marks_and_slots() -> None:
    chat = encode_v4_messages([message("user", [text_part("a"), URL, text_part("")]), YO])
    kinds = [piece if isinstance(piece, str) else type(piece) for piece in chat.pieces]
    assert kinds == [Mark, Mark, "a\n\n", PictureSlot, "\n\n", Mark, Mark, "Yo", Mark]


def test_golden_vision_prompts(golden: Path) -> None:
    """The golden ids, from the prompt as one string with placeholders."""
    from safetensors import safe_open

    for checkpoint in checkpoints(golden):
        tokenizer = Tokenizer.load(checkpoint)
        for path in sorted((checkpoint.parent / "cases").glob("*.json")):
            case: Mapping[str, Any] = json.loads(path.read_text(encoding="utf-8"))
            prompt = case["rendered"].replace("<bos>", BOS)
            lists = encode_v4_prompt(prompt, tokenizer)
            assert lists == encode_v4_prompt(prompt.removeprefix(BOS), tokenizer)
            with safe_open(path.with_suffix(".safetensors"), framework="np") as file:
                ids = file.get_tensor("input_ids").reshape(-1).tolist()
            assert text_lists(ids, case.get("image_blocks", ())) == lists, path.name


def text_lists(ids: list[int], blocks: Sequence[Mapping[str, int]]) -> list[list[int]]:
    """The ids between the picture blocks."""
    lists, start = [], 0
    for block in blocks:
        lists.append(ids[start : block["start"]])
        start = block["start"] + block["num_tokens"]
    return [*lists, ids[start:]]
