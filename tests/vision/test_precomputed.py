"""The validation table of spec 8.5, row by row, and what goes beyond it."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

from foveal.errors import MediaError
from foveal.vision.precomputed import check_image_embeds, check_pixel_values

F32 = np.float32


def tiles(*shape: int) -> np.ndarray:
    return np.zeros(shape, F32)


def crop(*rows: tuple[int, ...]) -> np.ndarray:
    return np.array(rows, dtype=np.int64)


# --- pixel values -------------------------------------------------------------------------------

TILE = (3, 384, 384)
ACCEPTED = {
    "one picture": (tiles(3, *TILE), crop((1, 2)), [(1, 2)]),
    "two pictures": (tiles(5, *TILE), crop((1, 2), (1, 1)), [(1, 2), (1, 1)]),
    "no picture": (tiles(0, *TILE), np.zeros((0, 2), np.int64), []),
    "list of tiles": ([tiles(*TILE)] * 3, crop((2, 1)), [(2, 1)]),
    "list of grids": (tiles(3, *TILE), [[1, 2]], [(1, 2)]),
    "half precision": (tiles(3, *TILE).astype(np.float16), crop((1, 2)), [(1, 2)]),
}


@pytest.mark.parametrize(("data", "grids", "expected"), ACCEPTED.values(), ids=ACCEPTED)
def test_accepted_pixel_values(data: Any, grids: Any, expected: list[tuple[int, int]]) -> None:
    pictures = check_pixel_values(data, grids, image_size=384)
    assert [p.grid for p in pictures] == expected
    for picture in pictures:
        cols, rows = picture.grid
        assert picture.pixel_values.shape == (1 + cols * rows, *TILE)
        assert picture.pixel_values.dtype == F32
        assert picture.pixel_values.flags.writeable


GOOD = tiles(3, *TILE)
REFUSED = {
    "tile count and grids": (tiles(7, *TILE), crop((1, 2)), r"has 7 tiles, .*\[\[1, 2\]\] needs 3"),
    "too few tiles": (tiles(2, *TILE), crop((1, 2)), "has 2 tiles, .* needs 3"),
    "rank 5": (tiles(1, 3, *TILE), crop((1, 2)), "data has rank 5 but expected 4"),
    "rank 3": (tiles(*TILE), crop((1, 2)), "data has rank 3 but expected 4"),
    "one channel": (tiles(3, 1, 384, 384), crop((1, 2)), r"data dim\[1\] expected 3, got 1"),
    "height": (tiles(3, 3, 224, 384), crop((1, 2)), r"data dim\[2\] expected 384, got 224"),
    "width": (tiles(3, 3, 384, 400), crop((1, 2)), r"data dim\[3\] expected 384, got 400"),
    "no grids": (GOOD, None, "Required field 'images_spatial_crop' is missing"),
    "grids of rank 1": (
        GOOD,
        np.array([1, 2]),
        "images_spatial_crop: data has rank 1 but expected 2",
    ),
    "grids of rank 3": (GOOD, crop((1, 2))[None], "data has rank 3 but expected 2"),
    "grids of three": (GOOD, crop((1, 2, 3)), r"data dim\[1\] expected 2, got 3"),
    "list of pictures": ([GOOD, GOOD], crop((1, 2)), "data has rank 5 but expected 4"),
    "ragged list of pictures": ([GOOD, GOOD[:2]], crop((1, 2)), "data has rank 5 but expected 4"),
    "ragged list of tiles": ([tiles(*TILE), tiles(3, 2, 2)], crop((1, 1)), "inconsistent shapes"),
    "empty list": ([], crop((1, 2)), "pixel_values is an empty sequence"),
    "empty list of grids": (GOOD, [], "images_spatial_crop is an empty sequence"),
    "no tensor": ("tiles", crop((1, 2)), "pixel_values is a str"),
    "list of no tensors": ([1.0, 2.0], crop((1, 2)), r"pixel_values\[0\] is a float"),
    "raw pixels": (GOOD.astype(np.uint8), crop((1, 2)), "dtype uint8; give normalised floats"),
    "objects": (np.array([object()] * 4), crop((1, 2)), "dtype object"),
    "float grids": (GOOD, np.array([[1.0, 2.0]]), "images_spatial_crop has dtype float64"),
    "list of float grids": (GOOD, [[1.0, 2.0]], "images_spatial_crop has dtype float64"),
    "ragged grids": (GOOD, [[1, 2], [1]], "images_spatial_crop contains inconsistent shapes"),
    "negative grids": (GOOD, crop((-1, -2)), r"holds \[-1, -2\]"),
    "grids beyond all memory": (GOOD, crop((2**40, 2**40)), "needs 1208925819614629174706177"),
    "not a number": (GOOD + np.nan, crop((1, 2)), "not finite"),
    "beyond float32": (GOOD.astype(np.float64) + 1e300, crop((1, 2)), "not finite"),
}


@pytest.mark.parametrize(("data", "grids", "message"), REFUSED.values(), ids=REFUSED)
def test_refused_pixel_values(data: Any, grids: Any, message: str) -> None:
    with pytest.raises(MediaError, match=message):
        check_pixel_values(data, grids, image_size=384)


def test_each_picture_gets_its_own_tiles() -> None:
    data = np.arange(5, dtype=F32).reshape(5, 1, 1, 1) * np.ones((5, 3, 2, 2), F32)
    one, two = check_pixel_values(data, crop((1, 2), (1, 1)), image_size=2)
    assert one.pixel_values[:, 0, 0, 0].tolist() == [0, 1, 2]
    assert two.pixel_values[:, 0, 0, 0].tolist() == [3, 4]
    data[:] = -1
    assert one.pixel_values[2, 0, 0, 0] == 2, "a copy, which the caller cannot change"


def test_official_padding_is_understood() -> None:
    """No picture: one tile of zeros and the grid (0, 0). A batch row: zero tiles and zero grids at the end."""
    assert check_pixel_values(tiles(1, 3, 2, 2), crop((0, 0)), image_size=2) == []
    data = tiles(4, 3, 2, 2)
    data[:2] = 1
    (picture,) = check_pixel_values(data, crop((1, 1), (0, 0)), image_size=2)
    assert picture.pixel_values.shape == (2, 3, 2, 2)
    data[3] = 1
    with pytest.raises(MediaError, match="has 4 tiles"):
        check_pixel_values(data, crop((1, 1), (0, 0)), image_size=2)
    with pytest.raises(MediaError, match="has 4 tiles"):
        check_pixel_values(tiles(4, 3, 2, 2), crop((1, 1)), image_size=2)


# --- embeddings ---------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("data", "lengths"),
    [
        (tiles(2, 5, 8), [5, 5]),
        ([tiles(5, 8), tiles(5, 8)], [5, 5]),
        ([tiles(5, 8), tiles(3, 8)], [5, 3]),
        (tiles(0, 5, 8), []),
    ],
    ids=["array", "equal list", "ragged list", "no picture"],
)
@pytest.mark.parametrize("width", [8, None])
def test_accepted_embeds(data: Any, lengths: list[int], width: int | None) -> None:
    pictures = check_image_embeds(data, width=width)
    assert [p.rows.shape for p in pictures] == [(length, 8) for length in lengths]
    assert all(p.rows.dtype == F32 and p.rows.flags.writeable for p in pictures)


@pytest.mark.parametrize(
    ("data", "message"),
    [
        (tiles(5, 8), "data has rank 2 but expected 3"),
        (tiles(1, 1, 5, 8), "data has rank 4 but expected 3"),
        ([tiles(1, 5, 8)], r"image_embeds\[0\]: data has rank 3 but expected 2"),
        (tiles(2, 5, 9), r"data dim\[2\] expected 8, got 9"),
        ([tiles(5, 8), tiles(5, 9)], r"image_embeds\[1\]: data dim\[1\] expected 8, got 9"),
        (tiles(2, 0, 8), "has no rows"),
        ([], "image_embeds is an empty sequence"),
        ("rows", "image_embeds is a str"),
        ([[1.0]], r"image_embeds\[0\] is a list"),
        (np.zeros((2, 5, 8), np.int64), "dtype int64; give normalised floats"),
        (tiles(1, 5, 8) + np.inf, "not finite"),
    ],
)
def test_refused_embeds(data: Any, message: str) -> None:
    with pytest.raises(MediaError, match=message):
        check_image_embeds(data, width=8)


def test_widths_must_agree_where_the_model_is_unknown() -> None:
    with pytest.raises(MediaError, match=r"image_embeds\[1\]: data dim\[1\] expected 8, got 9"):
        check_image_embeds([tiles(5, 8), tiles(5, 9)])


# --- tensors ------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16, torch.float64])
def test_torch_tensors_are_taken(dtype: torch.dtype) -> None:
    data = torch.full((1, 4, 8), 0.5, dtype=dtype, requires_grad=True)
    (picture,) = check_image_embeds(data, width=8)
    assert (picture.rows == 0.5).all()
    pixels = torch.zeros((3, 3, 4, 4), dtype=dtype)
    assert len(check_pixel_values(pixels, torch.tensor([[1, 2]]), image_size=4)) == 1


def test_C106_only_plain_arrays_of_the_right_shape_get_through() -> None:
    sparse = torch.zeros((1, 4, 8)).to_sparse()
    with pytest.raises(MediaError, match=r"sparse \(torch.sparse_coo\)"):
        check_image_embeds(sparse, width=8)
    with pytest.raises(MediaError, match="cannot be read as an array"):
        check_image_embeds(torch.zeros((1, 4, 8), device="meta"), width=8)
    with pytest.raises(MediaError, match="is a bytes"):
        check_image_embeds(b"\x80\x04K\x01.", width=8)
