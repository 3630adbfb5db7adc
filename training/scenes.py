"""Pictures with a known content: coloured shapes, one digit, or one printed word.

A scene is a function of (kind, seed, index) and of nothing else. `held_out` decides which handwritten digits may
appear: those before HELD_OUT_FROM in training, those from it on in evaluation. This module asks no questions
(`questions.py`) and knows no model.
"""

from __future__ import annotations

from dataclasses import dataclass
from itertools import pairwise
from typing import Literal, TypeAlias

import numpy as np
from PIL import Image

from training import drawing

Kind: TypeAlias = Literal["shapes", "crowd", "digit", "word"]
KINDS: tuple[Kind, ...] = ("shapes", "crowd", "digit", "word")
HELD_OUT_FROM = 1437  # handwritten digits from this index on are never trained on
MAX_LETTERS = 5
CELLS = 6  # the model sees a picture as CELLS x CELLS cells; letters and objects keep a cell of their own
_WORD_TEXT = """
A I GO NO UP ON IN IT WE HE SO TO AT BY OK HI SUN CAT DOG CAR BUS RED BIG NEW OLD HOT ICE TEA CUP
PEN MAP KEY BOX BED HAT SKY SEA EGG BEE FOX OWL ANT YES TEN ONE TWO SIX OUT TOP END DAY ART FUN RUN
WIN OPEN STOP EXIT SALE FREE HELP HOME LOVE TIME BOOK TREE FISH BIRD MOON STAR RAIN SNOW WIND FIRE
GOLD BLUE PINK MILK CAKE RICE SOUP SALT TAXI PARK ROAD SHOP BANK HOTEL HELLO WORLD QUICK BROWN JUMPS
WATER EARTH LIGHT NIGHT MUSIC PIANO APPLE LEMON GRAPE BREAD TIGER ZEBRA HORSE MOUSE SHEEP GREEN
WHITE BLACK SEVEN THREE EIGHT HOUSE TABLE CHAIR CLOCK PHONE VIDEO PIZZA PASTA SALAD JUICE
"""
WORDS = tuple(_WORD_TEXT.split())


@dataclass(frozen=True, slots=True)
class Item:
    """One thing in a picture. `box` is (x1, y1, x2, y2) in pixels of the picture, the ink's tight bounds."""

    kind: Literal["shape", "digit", "letter"]
    name: str
    colour: str
    box: tuple[int, int, int, int]

    @property
    def centre(self) -> tuple[float, float]:
        x1, y1, x2, y2 = self.box
        return (x1 + x2) / 2, (y1 + y2) / 2


@dataclass(frozen=True, slots=True)
class Content:
    """What is in a picture of `size` (width, height) pixels; letters come in reading order."""

    kind: Kind
    size: tuple[int, int]
    items: tuple[Item, ...]

    @property
    def text(self) -> str:
        """The printed word, or the digit."""
        return "".join(item.name for item in self.items if item.kind != "shape")


@dataclass(frozen=True, slots=True, eq=False)
class Scene:
    """A picture and the truth about it."""

    picture: Image.Image
    content: Content


def make_scene(
    kind: Kind, seed: int, index: int, *, held_out: bool, size: tuple[int, int] | None = None
) -> Scene:
    """Draw scene `index` of `kind`; `size` (width, height) is drawn too when it is not given."""
    rng = np.random.default_rng([seed, KINDS.index(kind), index, int(held_out)])
    while True:
        canvas = size or _canvas_size(rng)
        picture, grounds = drawing.background(canvas, rng)
        if kind == "digit":
            items = _draw_digit(picture, grounds, rng, held_out=held_out)
        elif kind == "word":
            items = _draw_word(picture, grounds, rng)
        else:
            items = _draw_shapes(picture, grounds, rng, crowd=kind == "crowd")
        if items:
            break
    if rng.random() < 0.3:
        picture = drawing.add_noise(picture, float(rng.uniform(1, 8)), rng)
    return Scene(picture, Content(kind, canvas, tuple(items)))


def _canvas_size(rng: np.random.Generator) -> tuple[int, int]:
    """Sides from 96 to 400 pixels; half of the pictures are square, the others up to 1.7 : 1."""
    longer = round(96 * float(400 / 96) ** rng.random())
    aspect = 1.0 if rng.random() < 0.5 else float(rng.uniform(1.05, 1.7))
    sides = (longer, max(56, round(longer / aspect)))
    return sides if rng.random() < 0.6 else (sides[1], sides[0])


def _ink(
    grounds: list[drawing.RGB], rng: np.random.Generator, names: list[str]
) -> tuple[str, drawing.RGB] | None:
    """A colour word of `names` and a paint that stands out from the background; None if eight tries fail."""
    for _ in range(8):
        name = names[int(rng.integers(len(names)))]
        colour = drawing.paint(name, rng)
        if all(drawing.contrast(colour, ground) >= drawing.MIN_CONTRAST for ground in grounds):
            return name, colour
    return None


def _draw_shapes(
    picture: Image.Image, grounds: list[drawing.RGB], rng: np.random.Generator, *, crowd: bool
) -> list[Item]:
    """One to five shapes that do not touch. A crowd has few kinds, so that counting one kind goes up to five."""
    number = int(rng.integers(1, 6))
    shapes, colours = list(drawing.SHAPES), list(drawing.COLOURS)
    if crowd:
        shapes = [
            shapes[i] for i in rng.choice(len(shapes), int(rng.integers(1, 3)), replace=False)
        ]
        if rng.random() < 0.6:
            colours = [
                colours[i] for i in rng.choice(len(colours), int(rng.integers(1, 3)), replace=False)
            ]
    smooth = bool(rng.random() < 0.75)
    items: list[Item] = []
    for _ in range(number):
        spot = _free_spot(picture.size, items, number, rng)
        ink = _ink(grounds, rng, colours)
        if spot is None or ink is None:
            return []
        x, y, side = spot
        shape = shapes[int(rng.integers(len(shapes)))]
        mask = drawing.shape_mask(shape, side, smooth=smooth)
        items.append(_paste(picture, mask, (x, y), ink, "shape", shape))
    return items


def _free_spot(
    size: tuple[int, int], items: list[Item], number: int, rng: np.random.Generator
) -> tuple[int, int, int] | None:
    """A square (x, y, side) clear of the items; sides are shares of the picture's longer side."""
    longer = max(size)
    largest = 0.48 if number <= 2 else 0.36 if number <= 3 else 0.28
    gap = 0.03 * longer
    for _ in range(30):
        side = round(min(float(rng.uniform(0.17, largest)) * longer, 0.8 * min(size)))
        x = int(rng.integers(1, max(2, size[0] - side)))
        y = int(rng.integers(1, max(2, size[1] - side)))
        apart = all(
            x + side + gap < b[0] or b[2] + gap < x or y + side + gap < b[1] or b[3] + gap < y
            for b in (item.box for item in items)
        )
        if apart and x + side < size[0] and y + side < size[1]:
            return x, y, side
    return None


def _paste(
    picture: Image.Image,
    mask: Image.Image,
    at: tuple[int, int],
    ink: tuple[str, drawing.RGB],
    kind: Literal["shape", "digit", "letter"],
    name: str,
) -> Item:
    picture.paste(ink[1], (at[0], at[1]), mask)
    box = mask.point([0] * 96 + [255] * 160).getbbox() or (0, 0, *mask.size)
    return Item(
        kind, name, ink[0], (at[0] + box[0], at[1] + box[1], at[0] + box[2], at[1] + box[3])
    )


def _draw_digit(
    picture: Image.Image, grounds: list[drawing.RGB], rng: np.random.Generator, *, held_out: bool
) -> list[Item]:
    """One digit: handwritten, or (one in five, in training only) printed."""
    ink = _ink(grounds, rng, list(drawing.COLOURS))
    side = round(min(float(rng.uniform(0.45, 1.0)) * max(picture.size), min(picture.size) - 2))
    images, labels = drawing.handwritten()
    first, end = (HELD_OUT_FROM, len(images)) if held_out else (0, HELD_OUT_FROM)
    index = int(rng.integers(first, end))
    name = str(labels[index])
    if not held_out and rng.random() < 0.2:
        name = str(rng.integers(10))
        mask = _printed(name, round(side * 0.9), rng)
    else:
        mask = drawing.digit_mask(index, side, rng)
    x = int(rng.integers(0, picture.width - mask.width + 1)) if mask.width <= picture.width else -1
    y = (
        int(rng.integers(0, picture.height - mask.height + 1))
        if mask.height <= picture.height
        else -1
    )
    if ink is None or x < 0 or y < 0:
        return []
    return [_paste(picture, mask, (x, y), ink, "digit", name)]


def _printed(text: str, em: int, rng: np.random.Generator) -> Image.Image:
    bold = int(rng.integers(0, max(1, em // 14) + 1))
    slant = float(rng.uniform(-0.05, 0.22)) if rng.random() < 0.25 else 0.0
    stretch = float(rng.uniform(0.85, 1.15)) if rng.random() < 0.5 else 1.0
    return drawing.glyph_mask(text, max(em, 8), bold=bold, slant=slant, stretch=stretch)


def _word(rng: np.random.Generator) -> str:
    if rng.random() < 0.3:
        return WORDS[int(rng.integers(len(WORDS)))]
    length = int(rng.choice(MAX_LETTERS, p=(0.1, 0.15, 0.2, 0.25, 0.3))) + 1
    return "".join(chr(ord("A") + int(c)) for c in rng.integers(0, 26, size=length))


def _draw_word(
    picture: Image.Image, grounds: list[drawing.RGB], rng: np.random.Generator
) -> list[Item]:
    """One word on one line; all letters share ink and style, and no two have their centre in one cell."""
    ink = _ink(grounds, rng, list(drawing.COLOURS))
    if ink is None:
        return []
    text = _word(rng)
    unit = max(picture.size) / (16 * CELLS)  # one pixel of the model's tile
    width, height = picture.size
    for _ in range(12):
        em = round(float(rng.uniform(15, min(76.0, 150.0 / len(text)))) * unit)
        style = int(rng.integers(1 << 30))
        # The same random stream for each letter gives all of them the same style.
        masks = [_printed(c, em, np.random.default_rng(style)) for c in text]
        spacing = float(rng.uniform(1.2, 5)) * unit
        pitch_floor = float(rng.uniform(12, 17)) * unit
        centres = [0.0]
        for left, right in pairwise(masks):
            centres.append(centres[-1] + max(pitch_floor, (left.width + right.width) / 2 + spacing))
        total = masks[0].width / 2 + centres[-1] + masks[-1].width / 2
        tallest = max(mask.height for mask in masks)
        if total > width - 2 or tallest > height - 2:
            continue
        x0 = float(rng.uniform(1, width - 1 - total)) + masks[0].width / 2
        base = int(rng.integers(tallest + 1, height))
        columns = {int((x0 + c + (max(picture.size) - width) / 2) / (16 * unit)) for c in centres}
        if len(columns) < len(text):
            continue
        return [
            _paste(
                picture, m, (round(x0 + c - m.width / 2), base - m.height), ink, "letter", letter
            )
            for letter, m, c in zip(text, masks, centres, strict=True)
        ]
    return []
