"""Sizes, patches and blocks of DeepSeek-V4's pictures against golden data and the tables of its specification."""

from __future__ import annotations

import hashlib
import json
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from PIL import Image, ImageOps

from foveal.errors import CheckpointError
from foveal.runner.v4_cache import Span, V4SequenceCache
from foveal.vision.decode import load_picture
from foveal.vision.v4 import (
    END,
    IMAGE,
    NEW_LINE,
    PAD,
    START,
    V4ImageConfig,
    block_length,
    block_order,
    block_types,
    llm_grid_for,
    make_patches,
    num_pads,
    vit_grid_for,
)
from foveal.vision.v4_precomputed import round_to_bfloat16
from tests.v4_toy import config as toy_config
from tests.vision.pictures import formula, noise
from tests.vision.v4_pictures import REAL, REAL_KEYS, SMALL, normalised, span_reach

sizes = st.integers(1, 6000)


# --- golden data --------------------------------------------------------------------------------


@cache
def golden_cases(folder: Path) -> dict[str, Any]:
    facts: dict[str, Any] = json.loads((folder / "v4_vision" / "preprocessing.json").read_text())
    return facts


@pytest.fixture(params=["real", "small"])
def numbers(request: pytest.FixtureRequest, golden: Path) -> tuple[V4ImageConfig, list[Any]]:
    facts = golden_cases(golden)[request.param]
    assert len(facts["cases"]) == 20
    return V4ImageConfig.from_dict(facts["config"]), facts["cases"]


def test_golden_sizes_and_blocks_are_equal(numbers: tuple[V4ImageConfig, list[Any]]) -> None:
    config, cases = numbers
    for case in cases:
        where = case["image_size"]
        rows, cols = vit_grid_for(*where, config)
        assert [cols * config.patch_size, rows * config.patch_size] == case["resized_size"], where
        assert [rows, cols] == case["vit_grid_hw"], where
        llm_grid = llm_grid_for((rows, cols), config)
        assert list(llm_grid) == case["llm_grid_hw"], where
        assert block_order(llm_grid).tolist() == case["perm"], where
        assert len(case["by_start_pos"]) == 5, where
        for start, block in case["by_start_pos"].items():
            types = block_types(llm_grid, int(start))
            assert "".join(map(str, types)) == block["types"], (where, start)
            assert num_pads(int(start)) + block_length(llm_grid) == block["num_tokens"], where


def test_golden_patches_are_equal_bit_for_bit(
    golden: Path, numbers: tuple[V4ImageConfig, list[Any]]
) -> None:
    config, cases = numbers
    num_checked = 0
    for case in cases:
        if case["image"] is None:
            continue
        picture = load_picture(golden / "v4_vision" / case["image"], mode="vendor")
        patches, grid = make_patches(picture.rgb, config)
        assert list(grid) == case["vit_grid_hw"], case["image"]
        values = round_to_bfloat16(normalised(patches))
        step = values.size // 16
        assert values.ravel()[::step][:16].tolist() == case["patches_sample"], case["image"]
        halves = (values.view(np.uint32) >> 16).astype("<u2")
        digest = hashlib.sha256(halves.tobytes()).hexdigest()
        assert digest == case["patches_bf16_sha256"], case["image"]
        assert values.mean() == pytest.approx(case["patches_mean"], abs=1e-6)
        assert values.std(ddof=1) == pytest.approx(case["patches_std"], abs=1e-6)
        num_checked += 1
    assert num_checked == 15


# --- size: the table of spec 7.3 ------------------------------------------------------------------

# sizes (width, height): final size, patches (rows, cols), cells (rows, cols), tokens without pads
GEOMETRY: list[tuple[list[tuple[int, int]], tuple[int, int], tuple[int, int], tuple[int, int], int]]
GEOMETRY = [
    ([(640, 480)], (644, 490), (35, 46), (12, 16), 206),
    ([(1000, 200)], (1008, 210), (15, 72), (5, 24), 154),
    ([(30, 30), (224, 224), (384, 384), (1, 1)], (392, 392), (28, 28), (10, 10), 114),
    ([(4000, 3000), (1024, 768)], (882, 658), (47, 63), (16, 21), 354),
    ([(512, 512)], (518, 518), (37, 37), (13, 13), 198),
    ([(511, 377)], (518, 378), (27, 37), (9, 13), 142),
    ([(377, 511)], (378, 518), (37, 27), (13, 9), 142),
    ([(800, 600)], (812, 602), (43, 58), (15, 20), 338),
    ([(768, 1024)], (630, 840), (60, 45), (20, 15), 322),
    ([(798, 798), (1024, 1024), (2048, 2048)], (756, 756), (54, 54), (18, 18), 346),
    ([(1536, 768)], (1008, 504), (36, 72), (12, 24), 302),
    ([(3000, 2000)], (882, 588), (42, 63), (14, 21), 310),
    ([(1920, 1080)], (1036, 588), (42, 74), (14, 25), 366),
    ([(1080, 1920)], (560, 1008), (72, 40), (24, 14), 362),
    (
        [(800, 100), (801, 100), (1000, 60), (2000, 120), (10000, 10)],
        (1092, 140),
        (10, 78),
        (4, 26),
        110,
    ),
    ([(100, 800)], (140, 1092), (78, 10), (26, 4), 134),
    ([(60, 1000)], (98, 1568), (112, 7), (38, 3), 154),
    ([(120, 2000)], (126, 2002), (143, 9), (48, 3), 194),
    ([(10, 10000)], (42, 7896), (564, 3), (188, 1), 378),
    ([(1932, 336)], (1932, 336), (24, 138), (8, 46), 378),
]


@pytest.mark.parametrize(
    ("size", "canvas", "vit_grid", "llm_grid", "length"),
    [(size, *row) for found, *row in GEOMETRY for size in found],
)
def test_worked_geometry(
    size: tuple[int, int],
    canvas: tuple[int, int],
    vit_grid: tuple[int, int],
    llm_grid: tuple[int, int],
    length: int,
) -> None:
    rows, cols = vit_grid_for(*size, REAL)
    assert (rows, cols) == vit_grid
    assert (cols * 14, rows * 14) == canvas
    assert llm_grid_for(vit_grid, REAL) == llm_grid
    assert block_length(llm_grid) == length
    assert [len(block_types(llm_grid, start)) for start in range(4)] == [
        length + 3,
        length + 2,
        length + 1,
        length,
    ]


@given(sizes, sizes)
def test_every_picture_fits_the_budget(width: int, height: int) -> None:
    for config, largest in ((REAL, 378), (SMALL, 45)):
        rows, cols = vit_grid_for(width, height, config)
        assert rows >= 1
        assert cols >= 1
        assert block_length(llm_grid_for((rows, cols), config)) <= largest <= config.max_block


@pytest.mark.parametrize("ratio", [1, 2, 3])
@pytest.mark.parametrize("max_n_token", [9, 10, 15, 20, 48])
def test_small_budgets_end_too(ratio: int, max_n_token: int) -> None:
    config = V4ImageConfig(4, ratio, max_n_token, 0, 1)
    for width in (1, 2, 3, 5, 9, 40, 100, 1000):
        for height in (1, 2, 3, 5, 9, 40, 1000, 178_956_970 // width, 13 * width // 5):
            grid = vit_grid_for(width, height, config)
            assert min(grid) >= 1
            assert block_length(llm_grid_for(grid, config)) <= config.max_block


def test_scaled_up_sides_are_cut_and_not_rounded() -> None:
    """200x191 becomes 392.94 x 375.26: 392 pixels are 28 patches, 393 would be 29."""
    assert vit_grid_for(200, 191, REAL) == (27, 28)


def test_only_wide_pictures_are_limited_in_ratio() -> None:
    assert vit_grid_for(100_000, 100, REAL) == vit_grid_for(800, 100, REAL)
    rows, cols = vit_grid_for(100, 1600, REAL)
    assert rows > 8 * cols


# --- pixels -------------------------------------------------------------------------------------


def picture_of(patches: np.ndarray, grid: tuple[int, int]) -> np.ndarray:
    """The canvas [height, width, 3] that patches were cut from, one by one."""
    rows, cols = grid
    side = patches.shape[-1]
    canvas = np.empty((rows * side, cols * side, 3), np.uint8)
    for i, patch in enumerate(patches):
        y, x = i // cols * side, i % cols * side
        canvas[y : y + side, x : x + side] = patch.transpose(1, 2, 0)
    return canvas


def test_letter_box_rounds_half_to_even() -> None:
    """640x480 on 644x490 becomes 644x483: an offset of 3.5 is 4."""
    patches, grid = make_patches(np.zeros((480, 640, 3), np.uint8), REAL)
    canvas = picture_of(patches, grid)
    is_grey = (canvas == 127).all(axis=(1, 2))
    assert np.flatnonzero(~is_grey).tolist() == list(range(4, 4 + 483))


@pytest.mark.parametrize("size", [(640, 480), (377, 511), (30, 20), (257, 33), (100, 800), (1, 1)])
def test_letter_box_is_the_image_librarys(size: tuple[int, int]) -> None:
    rgb = formula(*size)
    patches, grid = make_patches(rgb, REAL)
    canvas = (grid[1] * 14, grid[0] * 14)
    bicubic = Image.Resampling.BICUBIC
    padded = ImageOps.pad(Image.fromarray(rgb), canvas, method=bicubic, color=(127, 127, 127))
    np.testing.assert_array_equal(picture_of(patches, grid), np.asarray(padded))


@pytest.mark.parametrize("width", [799, 800, 801])
def test_eight_to_one_and_wider_is_stretched(width: int) -> None:
    patches, grid = make_patches(np.zeros((100, width, 3), np.uint8), REAL)
    assert (picture_of(patches, grid) == 0).all() == (width >= 800)
    if width >= 800:
        rgb = noise(width, 100)
        patches, grid = make_patches(rgb, REAL)
        plain = Image.fromarray(rgb).resize((1092, 140), Image.Resampling.BICUBIC)
        np.testing.assert_array_equal(picture_of(patches, grid), np.asarray(plain))


def test_tall_pictures_are_never_stretched() -> None:
    patches, grid = make_patches(np.zeros((2000, 120, 3), np.uint8), REAL)
    assert (picture_of(patches, grid) == 127).any()


def test_a_picture_that_shrinks_to_nothing_leaves_the_canvas_grey() -> None:
    patches, grid = make_patches(np.zeros((20000, 1, 3), np.uint8), REAL)
    assert grid == (564, 3)
    assert (patches == 127).all()


def test_a_patch_is_channels_then_rows_then_columns() -> None:
    rgb = formula(392, 392)
    patches, _ = make_patches(rgb, REAL)
    assert patches.dtype == np.uint8
    assert patches.flags.c_contiguous
    np.testing.assert_array_equal(patches[28 + 3], rgb[14:28, 42:56].transpose(2, 0, 1))
    flat = patches[28 + 3].reshape(-1)
    assert flat[2 * 196 + 5 * 14 + 9] == rgb[14 + 5, 42 + 9, 2]


def test_rounding_to_bfloat16_is_that_of_torch() -> None:
    every = np.arange(256, dtype=np.uint8).reshape(1, 1, 16, 16)
    values = round_to_bfloat16(normalised(every)).ravel()
    assert values[[0, 127, 255]].tolist() == [-1, -0.003936767578125, 1]
    draws = np.random.default_rng(0).standard_normal(10_000).astype(np.float32)
    halves = np.array([1.00390625, 1.01171875, -1.00390625, 0.0, -0.0], np.float32)  # ties
    for numbers in (normalised(every), draws, halves):
        expected = torch.from_numpy(numbers).bfloat16().float().numpy()
        np.testing.assert_array_equal(round_to_bfloat16(numbers), expected)


# --- blocks: the table of spec 7.4 ----------------------------------------------------------------

LETTERS = dict(zip("SPINE", (START, PAD, IMAGE, NEW_LINE, END), strict=True))
BLOCKS = {
    (1, 1): ("S I P N P E", [0]),
    (1, 2): ("S I P I P N P P P E", [0, 1]),
    (2, 1): ("S I I N N E", [0, 1]),
    (2, 2): ("S I I I I N N P P E", [0, 2, 1, 3]),
    (2, 3): ("S I I I I I I N N E", [0, 3, 1, 4, 2, 5]),
    (3, 2): ("S I I I I N N I P I P N P E", [0, 2, 1, 3, 4, 5]),
    (3, 3): ("S I I I I I I N N I P I P I P N P E", [0, 3, 1, 4, 2, 5, 6, 7, 8]),
    (4, 2): ("S I I I I N N I I I I N N E", [0, 2, 1, 3, 4, 6, 5, 7]),
}


@pytest.mark.parametrize(("grid", "block"), BLOCKS.items())
def test_block_table(grid: tuple[int, int], block: tuple[str, list[int]]) -> None:
    types = [LETTERS[letter] for letter in block[0].split()]
    assert block_order(grid).tolist() == block[1]
    for start in range(8):
        pads = [3, 2, 1, 0][start % 4]
        assert num_pads(start) == pads
        assert block_types(grid, start).tolist() == [PAD] * pads + types
    assert block_length(grid) == len(types)


@given(st.integers(1, 30), st.integers(1, 30), st.integers(0, 400))
def test_blocks_keep_the_layouts_promises(rows: int, cols: int, start: int) -> None:
    types, order = block_types((rows, cols), start), block_order((rows, cols))
    first = start + num_pads(start)
    last = start + len(types) - 1
    assert (first % 4, last % 4) == (3, 0)
    assert len(types) == num_pads(start) + block_length((rows, cols))
    assert (types[first - start], types[-1]) == (START, END)
    assert np.bincount(types, minlength=5)[[START, IMAGE, NEW_LINE, END]].tolist() == [
        1,
        rows * cols,
        rows,
        1,
    ]
    np.testing.assert_array_equal(np.sort(order), np.arange(rows * cols))


def test_windows_of_four_hold_neighbours() -> None:
    """Each window of a ratio-4 layer inside a block of even sides holds 2x2 cells."""
    rows, cols = 4, 5  # an odd number of cell columns: with the newlines they pair up
    order = iter(block_order((rows, cols)))
    content = block_types((rows, cols), 3)[1:-1].reshape(-1, 4)
    for window in content:
        cells = [divmod(int(next(order)), cols) for kind in window if kind == IMAGE]
        ys, xs = {y for y, _ in cells}, {x for _, x in cells}
        assert (max(ys) - min(ys), max(xs) - min(xs)) in ((1, 1), (1, 0))


# --- visibility: spec 6.1 and 6.4 ----------------------------------------------------------------


def test_toy_visibility() -> None:
    vocab = 100
    kinds = [-1, -1, PAD, START, IMAGE, IMAGE, NEW_LINE, NEW_LINE, END, -1, -1, -1]
    ids = [7 if kind < 0 else vocab + kind for kind in kinds]
    left, right = span_reach(ids, vocab)
    assert left.tolist() == [0, 0, 0, 0, 1, 2, 3, 4, 5, 0, 0, 0]
    assert right.tolist() == [0, 0, 0, 5, 4, 3, 2, 1, 0, 0, 0, 0]
    window = 4
    positions = np.arange(len(ids))
    reach = window - 1
    first = np.maximum(0, positions - reach - np.maximum(left - reach, 0))
    last = positions + right
    expected = "0-0 0-1 0-2 0-8 1-8 2-8 3-8 3-8 3-8 6-9 7-10 8-11"
    assert " ".join(f"{a}-{b}" for a, b in zip(first, last, strict=True)) == expected
    language = toy_config(sliding_window=window).language
    cache = V4SequenceCache(language, len(ids), spans=[Span(3, 8)])
    seen = [bound.tolist() for bound in cache.visible_range(0, len(ids))]
    assert seen == [first.tolist(), last.tolist()]


# --- configuration ------------------------------------------------------------------------------


def test_settings_are_read_from_the_models_configuration() -> None:
    config = V4ImageConfig.from_dict({"vocab_size": 129280, "vision_dim": 1024, **REAL_KEYS})
    assert config == REAL == V4ImageConfig(14, 3, 384, 147456, 8)
    assert config.max_block == 381


def test_missing_settings_are_all_named() -> None:
    with pytest.raises(CheckpointError, match="lacks vision_patch_size, vision_min_pixels"):
        V4ImageConfig.from_dict(
            {
                key: value
                for key, value in REAL_KEYS.items()
                if key not in ("vision_patch_size", "vision_min_pixels")
            }
        )


@pytest.mark.parametrize(
    ("key", "value", "rule"),
    [
        ("vision_patch_size", 0, "a whole number of at least 1"),
        ("vision_patch_size", 14.0, "a whole number of at least 1"),
        ("vision_downsample_ratio", True, "a whole number of at least 1"),
        ("vision_max_n_token", 8, "a whole number of at least 9"),
        ("vision_min_pixels", -1, "a whole number of at least 0"),
        ("vision_max_wh_ratio", 0.5, "a number of at least 1"),
        ("vision_max_wh_ratio", float("inf"), "a number of at least 1"),
        ("vision_max_wh_ratio", None, "a number of at least 1"),
    ],
)
def test_senseless_settings_are_refused(key: str, value: object, rule: str) -> None:
    with pytest.raises(CheckpointError, match=f"{key} is .* must be {rule}"):
        V4ImageConfig.from_dict({**REAL_KEYS, key: value})
