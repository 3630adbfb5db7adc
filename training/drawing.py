"""Masks and colours that scenes are made of: shapes, printed glyphs, handwritten digits, backgrounds.

A mask is an 8-bit Pillow image ("L"), 255 where ink goes. This module knows nothing of questions, models or tokens.
"""

from __future__ import annotations

import math
from functools import lru_cache

import numpy as np
import numpy.typing as npt
from PIL import Image, ImageDraw, ImageFont

RGB = tuple[int, int, int]

# Each colour word with the paints that go by it; a drawn colour is one of these, slightly moved.
COLOURS: dict[str, tuple[RGB, ...]] = {
    "red": ((255, 0, 0), (220, 30, 30), (190, 20, 30)),
    "orange": ((255, 165, 0), (240, 130, 20), (255, 140, 0)),
    "yellow": ((255, 255, 0), (240, 215, 40), (255, 235, 60)),
    "green": ((0, 128, 0), (40, 170, 70), (0, 220, 0)),
    "blue": ((0, 0, 255), (30, 90, 220), (30, 60, 170)),
    "purple": ((128, 0, 128), (140, 60, 190), (110, 30, 150)),
    "pink": ((255, 105, 180), (255, 160, 190), (240, 130, 180)),
    "brown": ((139, 69, 19), (110, 70, 40), (120, 60, 30)),
    "black": ((0, 0, 0), (30, 30, 30), (15, 15, 20)),
    "white": ((255, 255, 255), (240, 240, 240), (250, 250, 245)),
}
SHAPES = ("circle", "square", "triangle", "star", "cross", "diamond")

JITTER = 10  # how far a channel may move from the paint
MIN_CONTRAST = 100.0  # distance in RGB between ink and background


def paint(name: str, rng: np.random.Generator) -> RGB:
    """A colour that goes by `name`."""
    base = COLOURS[name][int(rng.integers(len(COLOURS[name])))]
    moved = [int(np.clip(c + rng.integers(-JITTER, JITTER + 1), 0, 255)) for c in base]
    return (moved[0], moved[1], moved[2])


def contrast(a: RGB, b: RGB) -> float:
    return math.dist(a, b)


def _regular(points: int, inner: float) -> list[tuple[float, float]]:
    """Corners of a star with `points` tips on the unit circle, the first one straight up."""
    corners = []
    for i in range(2 * points):
        radius = 1.0 if i % 2 == 0 else inner
        angle = math.pi * i / points - math.pi / 2
        corners.append((radius * math.cos(angle), radius * math.sin(angle)))
    return corners


_CROSS = (
    (-1, -3),
    (1, -3),
    (1, -1),
    (3, -1),
    (3, 1),
    (1, 1),
    (1, 3),
    (-1, 3),
    (-1, 1),
    (-3, 1),
    (-3, -1),
    (-1, -1),
)
_POLYGONS: dict[str, list[tuple[float, float]]] = {
    "square": [(-1, -1), (1, -1), (1, 1), (-1, 1)],
    "triangle": [(0, -1), (1, 1), (-1, 1)],
    "star": _regular(5, 0.42),
    "cross": [(float(x), float(y)) for x, y in _CROSS],
    "diamond": [(0, -1), (1, 0), (0, 1), (-1, 0)],
}


def shape_mask(shape: str, size: int, *, smooth: bool) -> Image.Image:
    """The shape filling a square of `size` pixels; `smooth` gives soft edges, otherwise they are hard."""
    scale = 3 if smooth else 1
    side = max(size, 4) * scale
    mask = Image.new("L", (side, side), 0)
    draw = ImageDraw.Draw(mask)
    if shape == "circle":
        draw.ellipse((0, 0, side - 1, side - 1), fill=255)
    else:
        points = np.array(_POLYGONS[shape])
        low, high = points.min(axis=0), points.max(axis=0)
        unit = (points - low) / (high - low).max()
        draw.polygon([(float(x), float(y)) for x, y in unit * (side - 1)], fill=255)
    return mask.reduce(scale) if smooth else mask


@lru_cache(maxsize=512)
def _font(size: int) -> ImageFont.FreeTypeFont | ImageFont.ImageFont:
    """Pillow's own scalable font, so that no system font is needed."""
    return ImageFont.load_default(size)


def glyph_mask(text: str, size: int, *, bold: int, slant: float, stretch: float) -> Image.Image:
    """One printed letter or digit, cut to its ink. `size` is the em in pixels, `slant` the shear of italics."""
    font = _font(size)
    mask = Image.new("L", (2 * size + 4, 2 * size + 4), 0)
    ImageDraw.Draw(mask).text((size // 2, size // 4), text, fill=255, font=font, stroke_width=bold)
    if slant:
        shear = (1.0, slant, -slant * size, 0.0, 1.0, 0.0)
        mask = mask.transform(mask.size, Image.Transform.AFFINE, shear, Image.Resampling.BILINEAR)
    box = mask.getbbox()
    cut = mask.crop(box) if box else mask
    if stretch != 1.0:
        cut = cut.resize(
            (max(2, round(cut.width * stretch)), cut.height), Image.Resampling.BILINEAR
        )
    return cut


@lru_cache(maxsize=1)
def handwritten() -> tuple[npt.NDArray[np.uint8], npt.NDArray[np.int64]]:
    """scikit-learn's 1,797 handwritten digits: [N, 8, 8] uint8 with 255 for full ink, and their labels [N]."""
    from sklearn.datasets import load_digits  # only here: the rest works without scikit-learn

    data = load_digits()
    return np.rint(data.images / 16.0 * 255.0).astype(np.uint8), data.target.astype(np.int64)


def digit_mask(index: int, size: int, rng: np.random.Generator) -> Image.Image:
    """Handwritten digit `index`, turned and sheared a little, on a square of `size` pixels."""
    images, _ = handwritten()
    canvas = Image.new("L", (12, 12), 0)
    canvas.paste(Image.fromarray(images[index]), (2, 2))
    filters = (Image.Resampling.BICUBIC, Image.Resampling.BILINEAR, Image.Resampling.LANCZOS)
    big = canvas.resize((size, size), filters[int(rng.integers(len(filters)))])
    angle, shear = rng.uniform(-0.2, 0.2), rng.uniform(-0.15, 0.15)
    wide, tall = rng.uniform(0.85, 1.2), rng.uniform(0.85, 1.15)
    cos, sin, half = math.cos(angle), math.sin(angle), size / 2
    a, b = cos * wide, (sin + shear) * wide
    d, e = -sin * tall, cos * tall
    turn = (a, b, half - a * half - b * half, d, e, half - d * half - e * half)
    mask = big.transform((size, size), Image.Transform.AFFINE, turn, Image.Resampling.BICUBIC)
    gain = rng.uniform(1.0, 1.6)
    return mask.point([min(255, round(v * gain)) for v in range(256)])


def background(size: tuple[int, int], rng: np.random.Generator) -> tuple[Image.Image, list[RGB]]:
    """A picture without objects, and the colours that ink on it has to differ from."""
    first = _ground(rng)
    if rng.random() < 0.8:
        return Image.new("RGB", size, first), [first]
    second = tuple(int(np.clip(c + rng.integers(-50, 51), 0, 255)) for c in first)
    ramp = Image.linear_gradient("L").resize(size)
    if rng.random() < 0.5:
        ramp = Image.linear_gradient("L").rotate(90).resize(size)
    over = (second[0], second[1], second[2])
    return Image.composite(Image.new("RGB", size, over), Image.new("RGB", size, first), ramp), [
        first,
        over,
    ]


def _ground(rng: np.random.Generator) -> RGB:
    kind = rng.random()
    if kind < 0.3:
        return (255, 255, 255)
    if kind < 0.6:
        low, high = 190, 256  # pale
    elif kind < 0.8:
        low, high = 0, 80  # dark
    else:
        low, high = 0, 256
    values = rng.integers(low, high, size=3)
    return (int(values[0]), int(values[1]), int(values[2]))


def add_noise(picture: Image.Image, strength: float, rng: np.random.Generator) -> Image.Image:
    """The picture with Gaussian noise of `strength` grey levels."""
    values = np.asarray(picture, dtype=np.float32)
    noise = rng.standard_normal(values.shape, dtype=np.float32) * strength
    return Image.fromarray(np.clip(values + noise, 0, 255).astype(np.uint8))
