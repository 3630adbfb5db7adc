"""A picture with boxes drawn on it, readable on any ground. The same input gives the same file, byte for byte."""

from __future__ import annotations

import unicodedata
from collections.abc import Sequence
from io import BytesIO
from pathlib import Path
from typing import TypeAlias

from PIL import Image, ImageDraw, ImageFont, features

from foveal.errors import RequestError
from foveal.types import Box, Picture

Font: TypeAlias = ImageFont.FreeTypeFont | ImageFont.ImageFont
Colour: TypeAlias = tuple[int, int, int]
Area: TypeAlias = tuple[int, int, int, int]

# Far apart in hue and lightness (after Okabe and Ito: told apart with any kind of colour vision).
COLOURS: tuple[Colour, ...] = (
    (230, 159, 0),
    (86, 180, 233),
    (0, 158, 115),
    (240, 228, 66),
    (0, 114, 178),
    (213, 94, 0),
    (204, 121, 167),
)
BLACK: Colour = (0, 0, 0)
WHITE: Colour = (255, 255, 255)
LONGEST_LABEL = 40


def draw_boxes(picture: Picture, boxes: Sequence[Box], path: str | Path) -> None:
    """Write `picture` with `boxes` and their labels as a PNG file of the same size.

    Boxes are drawn whatever their numbers are: corners in any order, parts outside the picture cut. Raises RequestError
    where the file cannot be written.
    """
    image = Image.fromarray(picture.rgb)
    draw = ImageDraw.Draw(image)
    thickness = max(1, min(image.size) // 160)
    font = _font(max(10, min(28, min(image.size) // 24)))
    areas = [_clipped(box.box, image.size) for box in boxes]
    for i, area in enumerate(areas):
        _draw_frame(draw, area, COLOURS[i % len(COLOURS)], thickness)
    # Labels after all frames, so that no frame crosses a word.
    for i, (box, area) in enumerate(zip(boxes, areas, strict=True)):
        text = _drawable(box.label) or f"box {i + 1}"
        _draw_label(draw, text, area, COLOURS[i % len(COLOURS)], font, image.size)
    _write_png(image, Path(path))


def _font(size: int) -> Font:
    # Without FreeType Pillow has one bitmap font, of one size.
    return ImageFont.load_default(size) if features.check("freetype2") else ImageFont.load_default()


def _clipped(box: Area, size: tuple[int, int]) -> Area:
    """Corners in order and inside the picture; a box beside the picture lands on its edge."""
    xs = sorted(min(max(x, 0), size[0] - 1) for x in box[0::2])
    ys = sorted(min(max(y, 0), size[1] - 1) for y in box[1::2])
    return xs[0], ys[0], xs[1], ys[1]


def _draw_frame(draw: ImageDraw.ImageDraw, area: Area, colour: Colour, thickness: int) -> None:
    """A coloured frame between a dark and a light line: one of the three differs from whatever lies under it."""
    shorter = min(area[2] - area[0], area[3] - area[1])
    if shorter < 4:  # no room for three lines
        draw.rectangle(area, fill=colour, outline=colour)
        return
    # A line thicker than half the box would turn it inside out.
    thickness = min(thickness, max(1, (shorter - 3) // 2))
    for inset, line, width in ((0, BLACK, 1), (1, colour, thickness), (1 + thickness, WHITE, 1)):
        corners = (area[0] + inset, area[1] + inset, area[2] - inset, area[3] - inset)
        if corners[0] <= corners[2] and corners[1] <= corners[3]:
            draw.rectangle(corners, outline=line, width=width)


def _draw_label(
    draw: ImageDraw.ImageDraw,
    text: str,
    area: Area,
    colour: Colour,
    font: Font,
    size: tuple[int, int],
) -> None:
    """Text on a plate of the box's colour, at the box's left edge."""
    left, top, right, bottom = draw.textbbox((0, 0), text, font=font)
    width, height = int(right - left) + 6, int(bottom - top) + 6
    x = max(0, min(area[0], size[0] - width))
    y = _label_top(area, height, size[1])
    draw.rectangle((x, y, x + width - 1, y + height - 1), fill=colour, outline=BLACK)
    ink = BLACK if _lightness(colour) > 110 else WHITE
    draw.text((x + 3 - left, y + 3 - top), text, font=font, fill=ink)


def _label_top(area: Area, height: int, picture_height: int) -> int:
    """Above the box where there is room, else inside a large box or below a small one."""
    top, bottom = area[1], area[3]
    if top >= height:
        return top - height
    if bottom - top < 2 * height and bottom + height < picture_height:
        return bottom + 1
    return max(0, min(top, picture_height - height))


def _lightness(colour: Colour) -> float:
    """Luma, 0 to 255 (ITU-R BT.601)."""
    red, green, blue = colour
    return 0.299 * red + 0.587 * green + 0.114 * blue


def _drawable(label: str) -> str:
    """The label as the built-in font can show it, "" where nothing is left of it.

    The font knows ASCII: accents are dropped, other characters become question marks.
    """
    bare = (c for c in unicodedata.normalize("NFKD", label) if not unicodedata.combining(c))
    text = "".join(c if " " <= c <= "~" else "?" for c in " ".join("".join(bare).split()))
    if not text.strip("? "):
        return ""
    return text if len(text) <= LONGEST_LABEL else text[: LONGEST_LABEL - 3] + "..."


def _write_png(image: Image.Image, path: Path) -> None:
    data = BytesIO()
    image.save(data, "PNG")
    try:
        path.write_bytes(data.getvalue())
    except (OSError, ValueError) as error:
        reason = getattr(error, "strerror", None) or "the path is not valid"
        raise RequestError(f"{path} cannot be written: {reason}; choose another path") from None
