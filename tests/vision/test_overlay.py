"""Boxes drawn on pictures."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from PIL import Image

from foveal.errors import RequestError
from foveal.types import Box, Picture
from foveal.vision.overlay import COLOURS, _drawable, draw_boxes
from tests.vision.pictures import noise


def box(*corners: int, label: str = "cat") -> Box:
    return Box(label, (corners[0], corners[1], corners[2], corners[3]), (0, 0, 0, 0))


def plain(width: int, height: int, colour: tuple[int, int, int]) -> Picture:
    return Picture(np.full((height, width, 3), colour, np.uint8))


def drawn(picture: Picture, boxes: list[Box], path: Path) -> np.ndarray:
    draw_boxes(picture, boxes, path)
    with Image.open(path) as image:
        assert image.format == "PNG"
        assert image.mode == "RGB"
        return np.asarray(image)


GROUNDS = {
    "black": (0, 0, 0),
    "white": (255, 255, 255),
    "grey": (128, 128, 128),
    **{str(c): c for c in COLOURS},
}


@pytest.mark.parametrize("ground", GROUNDS.values(), ids=GROUNDS)
def test_frame_and_label_stand_out_on_any_ground(
    ground: tuple[int, int, int], tmp_path: Path
) -> None:
    pixels = drawn(plain(400, 300, ground), [box(100, 80, 300, 200)], tmp_path / "o.png")
    frame = pixels[120:180, 98:108].astype(int)  # the left side of the box, below its label
    assert np.abs(frame - ground).sum(axis=-1).max() > 150
    label = pixels[60:80, 100:130].astype(int)
    assert np.abs(label - label[0, 3]).sum(axis=-1).max() > 250, "ink against its plate"
    assert (pixels[150, 150] == ground).all(), "the inside is left alone"
    assert (pixels[250, 350] == ground).all(), "and so is the outside"


def test_box_lies_where_it_should(tmp_path: Path) -> None:
    pixels = drawn(plain(400, 300, (255, 255, 255)), [box(100, 80, 300, 200)], tmp_path / "o.png")
    ys, xs = np.nonzero((pixels[100:] != 255).any(axis=-1))
    assert (xs.min(), xs.max(), ys.max() + 100) == (100, 300, 200)


def test_neighbouring_boxes_have_different_colours(tmp_path: Path) -> None:
    boxes = [box(40 * i, 100, 40 * i + 30, 160, label="") for i in range(7)]
    pixels = drawn(plain(400, 300, (255, 255, 255)), boxes, tmp_path / "o.png")
    colours = {tuple(pixels[150, 40 * i + 1]) for i in range(7)}
    assert colours == set(COLOURS)


def test_same_input_same_bytes(tmp_path: Path) -> None:
    picture = Picture(noise(300, 200))
    boxes = [box(10, 10, 100, 90, label="dog"), box(50, 60, 250, 190, label="naïve café")]
    for name in ("one.png", "two.png"):
        draw_boxes(picture, boxes, tmp_path / name)
    assert (tmp_path / "one.png").read_bytes() == (tmp_path / "two.png").read_bytes()


def test_no_box_no_change(tmp_path: Path) -> None:
    picture = Picture(noise(30, 20))
    np.testing.assert_array_equal(drawn(picture, [], tmp_path / "o.png"), picture.rgb)


def test_the_picture_itself_is_not_drawn_on(tmp_path: Path) -> None:
    picture = Picture(noise(300, 200))
    before = picture.rgb.copy()
    draw_boxes(picture, [box(0, 0, 299, 199)], tmp_path / "o.png")
    np.testing.assert_array_equal(picture.rgb, before)


@pytest.mark.parametrize(
    "label",
    ["", " ", "淡定姐", "🦒", "a\nb\tc", "\0\x1b[31m", "x" * 500, "mixed 猫 cat", "\u202eleft"],
)
def test_any_label_is_drawn_somehow(label: str, tmp_path: Path) -> None:
    pixels = drawn(
        plain(200, 100, (0, 0, 0)), [box(50, 40, 150, 90, label=label)], tmp_path / "o.png"
    )
    assert (pixels[:40] != 0).any(), "a plate above the box, if only with its number"


@given(
    st.lists(st.tuples(*[st.integers(-2000, 2000)] * 4), max_size=4),
    st.sampled_from([(1, 1), (2, 3), (1, 50), (96, 96), (300, 5)]),
)
def test_numbers_out_of_range_never_crash(
    tmp_path_factory: pytest.TempPathFactory,
    corners: list[tuple[int, int, int, int]],
    size: tuple[int, int],
) -> None:
    path = tmp_path_factory.getbasetemp() / "overlay.png"
    pixels = drawn(plain(*size, (9, 9, 9)), [box(*c) for c in corners], path)
    assert pixels.shape == (size[1], size[0], 3)


def test_a_file_that_cannot_be_written_is_named(tmp_path: Path) -> None:
    with pytest.raises(RequestError, match=r"missing/o\.png cannot be written: No such file"):
        draw_boxes(plain(8, 8, (0, 0, 0)), [], tmp_path / "missing" / "o.png")


def test_without_freetype_the_bitmap_font_serves(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("foveal.vision.overlay.features.check", lambda _name: False)
    monkeypatch.setattr("PIL.ImageFont.core", ImportError("no FreeType"))
    pixels = drawn(
        plain(200, 100, (0, 0, 0)), [box(50, 40, 150, 90, label="café 猫")], tmp_path / "o.png"
    )
    assert (pixels[20:40] != 0).any()


def test_labels_are_written_in_what_the_font_knows() -> None:
    assert _drawable("naïve  café\n") == "naive cafe"
    assert _drawable("cat 猫") == "cat ?"
    assert _drawable("淡定姐") == ""
    assert _drawable("x" * 50) == "x" * 37 + "..."


def test_a_label_never_hides_a_small_box_at_the_top(tmp_path: Path) -> None:
    pixels = drawn(plain(300, 200, (9, 9, 9)), [box(100, 5, 112, 15)], tmp_path / "o.png")
    assert (pixels[10, 106] == 9).all(), "the inside of the box shows"
