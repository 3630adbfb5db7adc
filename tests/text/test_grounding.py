"""Grounding: the written rules of `foveal.text.grounding`, one by one."""

from __future__ import annotations

import time

import pytest
from hypothesis import given
from hypothesis import strategies as st

from foveal.errors import PromptError
from foveal.text.grounding import (
    MAX_REPORTED,
    REASONS,
    locate_prompt,
    parse_grounding,
    strip_grounding,
)
from foveal.types import Grounding

SIZE = (999, 1998)  # pixels equal numbers across and are twice them down


def parsed(content: str, label: str = "x") -> Grounding:
    return parse_grounding(f"<|ref|>{label}<|/ref|><|det|>{content}<|/det|>", SIZE)


def reasons(found: Grounding) -> list[str]:
    return [piece.reason for piece in found.malformed]


def raws(found: Grounding) -> list[tuple[int, int, int, int]]:
    return [box.raw for box in found.boxes]


def test_one_box_has_label_pixels_and_raw_numbers() -> None:
    (box,) = parsed("[[1, 2, 30, 400]]", " the cat ").boxes
    assert (box.label, box.raw, box.box, box.image) == (
        "the cat",
        (1, 2, 30, 400),
        (1, 4, 30, 800),
        0,
    )


@pytest.mark.parametrize("size", [(1, 1), (640, 480), (1920, 1080), (37, 8191)])
def test_pixels_are_rounded_down_as_the_official_formula_does(size: tuple[int, int]) -> None:
    for value in range(1000):
        text = f"<|ref|>x<|/ref|><|det|>[[{value}, 0, {value}, {value}]]<|/det|>"
        (box,) = parse_grounding(text, size).boxes
        x, y = int(value / 999 * size[0]), int(value / 999 * size[1])
        assert box.box == (x, 0, x, y)


def test_several_boxes_and_labels_between_words() -> None:
    text = (
        "I see <|ref|>a cat<|/ref|><|det|>[[1, 2, 3, 4], [5,6,7,8]]<|/det|> and, further off,\n"
        "<|ref|>dogs<|/ref|> <|det|>\n[[ 9,10,11,12 ]] <|/det|>. Also <|ref|>a bird<|/ref|>."
    )
    found = parse_grounding(text, SIZE, image=1)
    assert [(b.label, b.raw, b.image) for b in found.boxes] == [
        ("a cat", (1, 2, 3, 4), 1),
        ("a cat", (5, 6, 7, 8), 1),
        ("dogs", (9, 10, 11, 12), 1),
    ]
    assert found.malformed == ()


@pytest.mark.parametrize(
    "text",
    [
        "",
        "no boxes, [[1, 2, 3, 4]] in words",
        "<|ref|>a label<|/ref|> alone",
        "<|ref|>an open label",
        "<|/ref|> <|grounding|>",
    ],
)
def test_text_without_blocks_has_nothing(text: str) -> None:
    assert parse_grounding(text, SIZE) == Grounding()


def test_a_block_takes_the_last_label_and_uses_it_up() -> None:
    text = (
        "<|ref|>a<|/ref|> or <|ref|>b<|/ref|><|det|>[[1,2,3,4]]<|/det|><|det|>[[5,6,7,8]]<|/det|>"
    )
    found = parse_grounding(text, SIZE)
    assert [b.label for b in found.boxes] == ["b"]
    assert [(p.text, p.reason) for p in found.malformed] == [("[5,6,7,8]", "no_label")]


@pytest.mark.parametrize(
    "before",
    ["", "<|ref|><|/ref|>", "<|ref|> <|/ref|>", "<|ref|>open ", "<|ref|>a<|/ref|><|ref|>b"],
)
def test_a_block_without_a_label(before: str) -> None:
    found = parse_grounding(f"{before}<|det|>[[1,2,3,4],[1,2]]<|/det|>", SIZE)
    assert (found.boxes, reasons(found)) == ((), ["no_label", "arity"])


@pytest.mark.parametrize(
    ("box", "reason"),
    [
        ("[1,2,3]", "arity"),
        ("[1,2,3,4,5]", "arity"),
        ("[]", "arity"),
        ("[1,2,3,4,]", "arity"),
        ("[1,,3,4]", "arity"),
        ("[1,2,3,1000]", "range"),
        ("[-1,2,3,4]", "range"),
        ("[1,2,3," + "9" * 5000 + "]", "range"),
        ("[30,2,3,4]", "order"),
        ("[1,20,3,4]", "order"),
        ("[0.1,0.2,0.3,0.4]", "syntax"),
        ("[1 2 3 4]", "syntax"),
        ("[1,2,3,4e1]", "syntax"),
        ("[1,2,3,0x4]", "syntax"),
        ("[+1,2,3,4]", "syntax"),
        ("[1_0,2,30,4]", "syntax"),
        ("[١,٢,٣,٤]", "syntax"),
        ("[x,2,3,4]", "syntax"),
        ("[(1,2,3,4)]", "syntax"),
        ("[1,[2,3,4,5]]", "nested"),
        ("[[1,2,3,4]]", "nested"),
    ],
)
def test_reasons(box: str, reason: str) -> None:
    found = parsed(f"[[1,2,3,4], {box}, [5,6,7,8]]")
    assert raws(found) == [(1, 2, 3, 4), (5, 6, 7, 8)]
    assert reasons(found) == [reason]
    assert found.malformed[0].text.rstrip("…") in box


def test_edges_are_boxes() -> None:
    found = parsed("[[0, 0, 999, 999], [5, 5, 5, 5], [007, 0000, 010, 000999]]")
    assert [b.box for b in found.boxes] == [(0, 0, 999, 1998), (5, 10, 5, 10), (7, 0, 10, 1998)]
    assert found.malformed == ()


@pytest.mark.parametrize(
    ("content", "boxes", "pieces"),
    [
        ("[1,2,3,4]", [], ["[1,2,3,4]"]),
        ("", [], ["<|det|>"]),
        ("[]", [], ["[]"]),
        ("[1,2,3,4],[5,6,7,8]", [], ["[1,2,3,4],[5,6,7,8]"]),
        ("nothing", [], ["nothing"]),
        ("[[1,2,3,4]", [], ["[1,2,3,4]"]),
        ("[[1,2,3,4]]]", [], ["[1,2,3,4]", "]"]),
        ("[[1,2,3,4]] [[5,6,7,8]]", [(1, 2, 3, 4)], ["] [ [5,6,7,8]"]),
        ("[[1,2,3,4][5,6,7,8]]", [(1, 2, 3, 4)], ["[5,6,7,8]"]),
        ("[[1,2,3,4],,[5,6,7,8]]", [(1, 2, 3, 4)], [",, [5,6,7,8]"]),
        ("[cat [1,2,3,4]]", [], ["[cat [1,2,3,4]"]),
        ("[[1,2,3,4],]", [(1, 2, 3, 4)], [",]"]),
        ("[[1,2,3,4]] ok", [(1, 2, 3, 4)], ["ok"]),
    ],
)
def test_syntax_of_a_block(
    content: str, boxes: list[tuple[int, int, int, int]], pieces: list[str]
) -> None:
    found = parsed(content)
    assert raws(found) == boxes
    assert [(p.text, p.reason) for p in found.malformed] == [(p, "syntax") for p in pieces]


@pytest.mark.parametrize(
    ("content", "expected"),
    [
        ("", [("<|det|>", "unclosed")]),
        ("[[1,2,3,4]]", [("[1,2,3,4]", "unclosed")]),
        ("[[1,2,3,4]] and words", [("[1,2,3,4]", "unclosed")]),
        ("[[1,2,3,4], [5,6", [("[1,2,3,4]", "unclosed"), ("[5,6", "unclosed")]),
        ("[[1,2], [5,6,7000", [("[1,2]", "arity"), ("[5,6,7000", "range")]),
        ("[[", [("[", "unclosed")]),
        ("words", [("words", "unclosed")]),
    ],
)
@pytest.mark.parametrize("after", ["", "<|ref|>y<|/ref|>", "<|det|>[[1,2,3,4]]<|/det|>"])
def test_unclosed_blocks_give_no_boxes(
    content: str, expected: list[tuple[str, str]], after: str
) -> None:
    found = parse_grounding(f"<|ref|>x<|/ref|><|det|>{content}{after}", SIZE)
    assert found.boxes == ()
    malformed = [(p.text, p.reason) for p in found.malformed]
    assert malformed[: len(expected)] == expected
    assert malformed[len(expected) :] == ([("[1,2,3,4]", "no_label")] if "det" in after else [])


def test_a_closing_tag_alone_is_reported() -> None:
    found = parse_grounding("[[1,2,3,4]]<|/det|>", SIZE)
    assert [(p.text, p.reason) for p in found.malformed] == [("<|/det|>", "syntax")]


def test_long_pieces_are_shortened() -> None:
    (piece,) = parsed("[[" + "1," * 1000 + "]]").malformed
    assert len(piece.text) == MAX_REPORTED
    assert piece.text.endswith("…")


TAGS = ("<|ref|>", "<|/ref|>", "<|det|>", "<|/det|>", "<|grounding|>")
PIECES = st.sampled_from([*TAGS, "[", "]", "[[", "]]", ",", "-", " ", "1", "999", "12, 3", "cat"])


@given(text=st.lists(PIECES | st.text(max_size=3)).map("".join), width=st.integers(0, 5000))
def test_any_text_is_parsed(text: str, width: int) -> None:
    found = parse_grounding(text, (width, 7))
    for box in found.boxes:
        x1, y1, x2, y2 = box.box
        assert 0 <= x1 <= x2 <= width
        assert 0 <= y1 <= y2 <= 7
        assert box.label == box.label.strip() != ""
    assert {piece.reason for piece in found.malformed} <= set(REASONS)
    assert not any(tag in strip_grounding(text) for tag in TAGS)


@given(
    raw=st.tuples(*[st.integers(0, 999)] * 4),
    label=st.text(min_size=1).filter(lambda s: s.strip() == s and "<|" not in s),
)
def test_good_boxes_come_back(raw: tuple[int, int, int, int], label: str) -> None:
    x1, y1, x2, y2 = raw
    ordered = (min(x1, x2), min(y1, y2), max(x1, x2), max(y1, y2))
    found = parsed(str([list(ordered)]), label)
    assert [(b.label, b.raw) for b in found.boxes] == [(label, ordered)]


@pytest.mark.parametrize(
    "unit",
    ["[", "[[", "]", "9", "<|det|>", "<|ref|>x<|/ref|>", "<|det|>[[", "[1,2,3,4],", ",", " "],
)
def test_time_is_linear(unit: str) -> None:
    """Processor time, which other programs do not change: some 0.1 s; a quadratic parser would take minutes."""
    text = "<|ref|>x<|/ref|><|det|>[[" + unit * 20_000
    start = time.thread_time()
    parse_grounding(text, SIZE)
    strip_grounding(text)
    assert time.thread_time() - start < 2.0


# --- prompts ------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("text", "plain"),
    [
        ("Describe it.", "Describe it."),
        ("<|ref|>Describe it.<|/ref|>", "Describe it."),
        ("<|grounding|>What <|det|>is it?", "What is it?"),
        ("A <|ref|>cat<|/ref|><|det|>[[1, 2, 3, 4]]<|/det|>.", "A cat."),
        ("A <|ref|>cat<|/ref|><|det|>[[1, 2, 3, 4]] sits", "A cat sits"),
        ("<|/det|><|/ref|>", ""),
        ("<|re<|ref|>f|>a<|<|det|>ref|>", "a"),
        ("", ""),
    ],
)
def test_strip_grounding(text: str, plain: str) -> None:
    assert strip_grounding(text) == plain


def test_locate_prompt_adds_the_tags_once() -> None:
    assert locate_prompt(" the red cup ") == "<|ref|>the red cup<|/ref|>"
    assert locate_prompt("<|ref|>the red cup<|/ref|>") == "<|ref|>the red cup<|/ref|>"
    for blank in ("", "  ", "<|ref|> <|/ref|>"):
        with pytest.raises(PromptError, match="nothing to locate"):
            locate_prompt(blank)
