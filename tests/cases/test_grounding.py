"""Public reports about grounding, turned into small inputs. C036's generation guard is tested with the runner."""

from __future__ import annotations

import time
from pathlib import Path

import pytest

from foveal.text.grounding import locate_prompt, parse_grounding, strip_grounding
from foveal.types import Grounding

SIZE = (1920, 1080)


def reasons(found: Grounding) -> list[str]:
    return [piece.reason for piece in found.malformed]


def det(content: str, end: str = "<|/det|>") -> str:
    return f"<|ref|>x<|/ref|><|det|>{content}{end}"


def test_C019_stray_grounding_tags_leave_a_description_request() -> None:
    asked = "<|ref|>Describe the picture.<|/ref|>"
    assert strip_grounding(asked) == "Describe the picture."


@pytest.mark.parametrize("label", ["the cat", "<|ref|>the cat<|/ref|>", " the cat"])
def test_C019_locate_adds_the_tags_itself(label: str) -> None:
    assert locate_prompt(label) == "<|ref|>the cat<|/ref|>"


def test_C033_boxes_are_999ths_of_the_picture_not_pixels() -> None:
    text = "<|ref|>cat<|/ref|><|det|>[[100, 200, 500, 800]]<|/det|>"
    (box,) = parse_grounding(text, SIZE).boxes
    assert (box.label, box.raw, box.box) == ("cat", (100, 200, 500, 800), (192, 216, 960, 864))


def test_C035_three_numbers_are_no_box() -> None:
    found = parse_grounding(det("[[533, 132, 457]]"), SIZE)
    assert (found.boxes, reasons(found)) == ((), ["arity"])
    assert found.malformed[0].text == "[533, 132, 457]"


def test_C035_a_list_inside_a_box_is_broken() -> None:
    found = parse_grounding(det("[[245,[234,543,542,244]]]"), SIZE)
    assert (found.boxes, reasons(found)) == ((), ["nested"])


@pytest.mark.parametrize("end", ["<|/det|>", ""], ids=["closed", "unclosed"])
@pytest.mark.parametrize("brackets", ["]]", ""], ids=["brackets", "no brackets"])
def test_C036_a_runaway_number_is_out_of_range_and_quick(end: str, brackets: str) -> None:
    text = det("[[0, 5, 533, " + "9" * 5000 + brackets, end)
    start = time.thread_time()
    found = parse_grounding(text, SIZE)
    assert time.thread_time() - start < 0.05
    assert (found.boxes, reasons(found)) == ((), ["range"])
    assert len(found.malformed[0].text) <= 80


@pytest.mark.parametrize(
    ("content", "reason"),
    [
        ("[[2, 311, 99999, 98]]", "range"),
        ("[[470,]]", "arity"),
        ("[[0, 5329, 5310, 9, 99999]]", "arity"),
        ("[[2, 311, 999, 98]]", "order"),
    ],
)
def test_C037_broken_boxes_have_a_reason_and_are_not_clamped(content: str, reason: str) -> None:
    found = parse_grounding(det(content), SIZE)
    assert (found.boxes, reasons(found)) == ((), [reason])


def test_C038_box_text_is_never_evaluated(tmp_path: Path) -> None:
    canary = tmp_path / "canary"
    found = parse_grounding(det(f"[[__import__('os').system('touch {canary}')]]"), SIZE)
    assert not canary.exists()
    assert (found.boxes, reasons(found)) == ((), ["syntax"])
