"""Boxes in answers: `<|ref|>label<|/ref|><|det|>[[x1, y1, x2, y2], ...]<|/det|>` into labels and pixel boxes.

Rules. Text is scanned once for the four tags; nothing is ever evaluated.

- A label is the text between `<|ref|>` and the next tag, if that is `<|/ref|>`. A label with no det block is just text.
- A det block reaches from `<|det|>` to `<|/det|>`. It belongs to the last label before it, and each label serves one
  block. White space around labels, blocks and numbers does not count.
- A block is one list of boxes: `[` box, box, ... `]`, with single commas between boxes.
- A box is `[x1, y1, x2, y2]`: four integers of decimal digits, 0 to 999, with x1 <= x2 and y1 <= y2. They count
  999ths of the original picture: pixel = int(v / 999 * side), rounded down.

What is not a box is reported, piece by piece, with the first reason that fits. Nothing is clamped, swapped or repaired.
`text` of a piece is shortened to 80 characters.

reason      meaning
syntax      not a list of integers; text or a missing comma between boxes; brackets that do not balance; no list at all
nested      a list inside a box, such as [245,[234,543,542,244]]
arity       not exactly four numbers
range       a number below 0 or above 999
order       x1 > x2 or y1 > y2
unclosed    no `<|/det|>` before the next tag or the end
no_label    no label before the block, or an empty one

A block with unbalanced brackets, without end or without label gives no boxes: its good boxes are reported with the
block's reason, its bad ones with their own. Source of the format: spec 7.4. Knows no tokens and no pictures.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass

from foveal.errors import PromptError
from foveal.types import Box, Grounding, MalformedBox

MAX_COORDINATE = 999
MAX_REPORTED = 80  # characters of a malformed piece that are shown
REASONS = ("syntax", "nested", "arity", "range", "order", "unclosed", "no_label")

_TAG = re.compile(r"<\|/?(?:ref|det)\|>")
_ANY_TAG = re.compile(r"<\|(?:/?(?:ref|det)|grounding)\|>")
_BRACKET = re.compile(r"[\[\]]")
_LIST = re.compile(r"[\[\]0-9,\s]*[\[\]0-9,]")
_INTEGER = re.compile(r"-?[0-9]+")


@dataclass(frozen=True, slots=True)
class _Block:
    """One det block: what stands between its tags, the label it belongs to, and what is wrong with it as a whole."""

    content: str
    label: str
    fault: str | None = None


def parse_grounding(text: str, size: tuple[int, int], *, image: int = 0) -> Grounding:
    """Read the boxes in `text`.

    `size` is (width, height) in pixels of the original picture, `image` the index that boxes carry. Never raises for
    any text, and takes time linear in its length.
    """
    boxes: list[Box] = []
    malformed: list[MalformedBox] = []
    for block in _blocks(text):
        for piece, reason in _read_block(block):
            if reason is not None:
                malformed.append(MalformedBox(_shortened(piece), reason))
                continue
            raw = _numbers(piece)
            assert len(raw) == 4, "a piece without a reason is a box"
            boxes.append(Box(block.label, _to_pixels(raw, size), raw, image))
    return Grounding(tuple(boxes), tuple(malformed))


def strip_grounding(text: str) -> str:
    """`text` without grounding: labels and words stay; tags go, and det blocks with them.

    Of a block that is not closed, only what looks like its list goes. The result has no tags, not even ones that the
    removal of others would have put together.
    """
    while tags := [*_ANY_TAG.finditer(text)]:
        text = text[: tags[0].start()] + "".join(_kept_behind(text, tags))
    return text


def _kept_behind(text: str, tags: list[re.Match[str]]) -> Iterator[str]:
    """For each tag, what stays of the text between it and the next one."""
    for i, tag in enumerate(tags):
        start, is_last = tag.end(), i + 1 == len(tags)
        end = len(text) if is_last else tags[i + 1].start()
        if tag[0] == "<|det|>":
            is_closed = not is_last and tags[i + 1][0] == "<|/det|>"
            start = end if is_closed else _end_of_list(text, start, end)
        yield text[start:end]


def locate_prompt(label: str) -> str:
    """The question that asks where `label` is. Tags in `label` are dropped. Raises PromptError for a blank one."""
    name = strip_grounding(label).strip()
    if not name:
        raise PromptError(f"nothing to locate in {_shortened(label)!r}; say what to look for")
    return f"<|ref|>{name}<|/ref|>"


# --- from text to blocks, from blocks to pieces ----------------------------------------------------


def _blocks(text: str) -> Iterator[_Block]:
    tags = [*_TAG.finditer(text)]
    label, previous = "", ""
    for i, tag in enumerate(tags):
        following = tags[i + 1] if i + 1 < len(tags) else None
        content = text[tag.end() : following.start() if following else len(text)]
        end = following[0] if following else ""
        if tag[0] == "<|ref|>":
            label = content.strip() if end == "<|/ref|>" else ""
        elif tag[0] == "<|det|>":
            fault = "unclosed" if end != "<|/det|>" else None if label else "no_label"
            yield _Block(content, label, fault)
            label = ""
        elif tag[0] == "<|/det|>" and previous != "<|det|>":
            yield _Block(tag[0], "")
        previous = tag[0]


def _read_block(block: _Block) -> Iterator[tuple[str, str | None]]:
    """(text, reason) of each piece of a block; reason None is a good box.

    Boxes are lists at depth 2. What stands between them must be the outer bracket before the first, a comma before the
    others, and the outer bracket at the end.
    """
    content, fault = block.content, block.fault
    spans, is_balanced = _spans(content)
    if fault is None and not is_balanced:
        fault = "syntax"
    if not spans:
        yield content.strip() or "<|det|>", fault or "syntax"
        return
    cursor = 0
    for i, (start, end) in enumerate(spans):
        gap, piece = content[cursor:start].strip(), content[start:end]
        if gap != ("," if i else "["):
            yield f"{gap} {piece}".strip(), "syntax"
        else:
            yield piece.strip(), _fault_of(piece) or fault
        cursor = end
    rest = content[cursor:].strip()
    if rest.startswith("]"):
        rest = rest[1:].strip()
    if rest and block.fault != "unclosed":  # behind an unclosed block comes the rest of the answer
        yield rest, "syntax"


def _spans(content: str) -> tuple[list[tuple[int, int]], bool]:
    """(start, end) of the lists at depth 2, the last one perhaps without its end; and whether brackets balance."""
    spans: list[tuple[int, int]] = []
    depth, start, is_balanced = 0, 0, True
    for bracket in _BRACKET.finditer(content):
        if bracket[0] == "[":
            depth += 1
            if depth == 2:
                start = bracket.start()
            continue
        if depth == 2:
            spans.append((start, bracket.end()))
        is_balanced = is_balanced and depth > 0
        depth = max(depth - 1, 0)
    if depth >= 2:
        spans.append((start, len(content)))
    return spans, is_balanced and depth == 0


# --- one piece ------------------------------------------------------------------------------------


def _fault_of(piece: str) -> str | None:
    """The first reason why `[...]`, perhaps without its end, is not a box."""
    is_whole = piece.endswith("]")
    inner = piece[1:-1] if is_whole else piece[1:]
    if "[" in inner:
        return "nested"
    parts = [part.strip() for part in inner.split(",")]
    if not all(_INTEGER.fullmatch(part) for part in parts if part):
        return "syntax"
    if is_whole and (len(parts) != 4 or not all(parts)):
        return "arity"
    if any(_is_out_of_range(part) for part in parts):
        return "range"
    if not is_whole:
        return None
    x1, y1, x2, y2 = _numbers(piece)
    return None if x1 <= x2 and y1 <= y2 else "order"


def _is_out_of_range(number: str) -> bool:
    """By the digits alone: turning thousands of digits into an integer is slow, and Python refuses it."""
    digits = number.lstrip("-").lstrip("0")
    return len(digits) > len(str(MAX_COORDINATE)) or (number.startswith("-") and digits != "")


def _numbers(piece: str) -> tuple[int, ...]:
    """The numbers of a piece known to be a list of integers in range."""
    return tuple(
        int(part.strip().lstrip("-").lstrip("0") or "0") for part in piece[1:-1].split(",")
    )


def _to_pixels(raw: tuple[int, int, int, int], size: tuple[int, int]) -> tuple[int, int, int, int]:
    x1, y1, x2, y2 = raw
    width, height = size
    return _scaled(x1, width), _scaled(y1, height), _scaled(x2, width), _scaled(y2, height)


def _scaled(value: int, side: int) -> int:
    # In this order of floating-point operations, which the official code has too.
    return int(value / MAX_COORDINATE * side)


def _end_of_list(text: str, start: int, end: int) -> int:
    match = _LIST.match(text, start, end)
    return match.end() if match else start


def _shortened(text: str) -> str:
    return text if len(text) <= MAX_REPORTED else text[: MAX_REPORTED - 1] + "…"
