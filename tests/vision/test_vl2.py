"""Canvas, tiles and token counts against the official processor's numbers (spec 3) and its golden data."""

from __future__ import annotations

import hashlib
import json
from pathlib import Path

import numpy as np
import PIL
import pytest
from hypothesis import example, given
from hypothesis import strategies as st
from PIL import Image, ImageOps

from foveal.errors import CheckpointError
from foveal.vision.vl2 import (
    VL2ImageConfig,
    grid_for,
    is_tiled,
    make_tiles,
    normalise,
    num_image_tokens,
    pad_to_canvas,
    select_best_resolution,
)
from tests.vision.pictures import CANDIDATES, VL2, formula, noise

GREY = (127, 127, 127)


# --- choice of the canvas -----------------------------------------------------------------------


def test_published_candidates_are_all_canvases_of_up_to_nine_tiles() -> None:
    every = {(384 * m, 384 * n) for m in range(1, 10) for n in range(1, 10) if m * n <= 9}
    assert set(CANDIDATES) == every
    assert len(CANDIDATES) == 23


def test_best_resolution_equals_golden(golden_vl2: Path) -> None:
    golden = json.loads((golden_vl2 / "best_resolution_384.json").read_text())
    candidates = [tuple(pair) for pair in golden["candidate_resolutions"]]
    assert len(golden["cases"]) > 10
    for case in golden["cases"]:
        best = select_best_resolution(*case["image_size"], candidates)
        assert list(best) == case["best_resolution"], case["image_size"]


@pytest.mark.parametrize(
    ("size", "canvas"),
    [
        ((607, 2429), (384, 1536)),  # exact arithmetic would say 384x1920
        ((385, 384), (768, 384)),
        ((400, 400), (768, 768)),
        ((1, 10000), (384, 384)),
        ((10000, 1), (384, 384)),
        ((4, 10000), (384, 3456)),
    ],
)
def test_float_arithmetic_of_the_official_choice_is_kept(
    size: tuple[int, int], canvas: tuple[int, int]
) -> None:
    assert select_best_resolution(*size, CANDIDATES) == canvas


def test_truncation_loses_a_pixel_where_the_product_is_just_below_a_whole_number() -> None:
    assert int(188 * min(384 / 1, 384 / 188)) == 383


@given(st.integers(1, 4000), st.integers(1, 4000))
def test_order_of_candidates_does_not_matter_without_ties(width: int, height: int) -> None:
    # False alarm: no tie is known among 2.1 million sizes (spec 3.2).
    forward = select_best_resolution(width, height, CANDIDATES)
    assert forward == select_best_resolution(width, height, CANDIDATES[::-1])


def test_a_tie_goes_to_the_earlier_candidate() -> None:
    candidates = [(100, 100), (100, 200), (200, 100)]
    assert select_best_resolution(150, 150, candidates) == (100, 100)
    assert select_best_resolution(150, 150, candidates[:0:-1]) == (200, 100)
    assert select_best_resolution(150, 150, candidates[1:]) == (100, 200)


# --- tokens -------------------------------------------------------------------------------------

TOKENS = {
    **{(1, 1): 421, (1, 2): 631, (2, 1): 617, (1, 3): 841, (3, 1): 813, (1, 4): 1051, (4, 1): 1009},
    **{(2, 2): 1023, (1, 5): 1261, (5, 1): 1205, (1, 6): 1471, (6, 1): 1401, (2, 3): 1429},
    **{(3, 2): 1415, (1, 7): 1681, (7, 1): 1597, (1, 8): 1891, (8, 1): 1793, (2, 4): 1835},
    **{(4, 2): 1807, (1, 9): 2101, (9, 1): 1989, (3, 3): 2017},
}


@pytest.mark.parametrize(("grid", "tokens"), TOKENS.items())
def test_token_table(grid: tuple[int, int], tokens: int) -> None:
    assert VL2.tokens_per_side == 14
    assert num_image_tokens(*grid, 14) == tokens


def test_token_table_is_whole_and_its_maximum_known() -> None:
    assert {(w // 384, h // 384) for w, h in CANDIDATES} == set(TOKENS)
    assert max(TOKENS.values()) == TOKENS[1, 9] == 2101


EXAMPLES = {
    421: [(1, 1), (224, 224), (300, 300), (384, 384), (24, 16), (257, 27), (1, 10000), (10000, 1)],
    1023: [(400, 400), (512, 512), (600, 600), (640, 480), (480, 640), (768, 768)],
    1415: [(800, 600), (1024, 768), (769, 768)],
    617: [(768, 384), (385, 384), (512, 384)],
    631: [(383, 385)],
    2017: [(1000, 1000), (1152, 1152), (2304, 2304), (1240, 1754), (4000, 3000), (8192, 8192)],
    1807: [(1920, 1080), (1280, 720), (3840, 2160), (3000, 1000), (1366, 768)],
    1835: [(1080, 1920), (720, 1280), (1000, 3000)],
    1793: [(4000, 500)],
    1891: [(500, 4000)],
    1401: [(2000, 100)],
    1471: [(100, 2000)],
    1989: [(3600, 400), (10000, 4)],
    2101: [(400, 3600), (4, 10000)],
}


@pytest.mark.parametrize(
    ("size", "tokens"), [(size, tokens) for tokens, sizes in EXAMPLES.items() for size in sizes]
)
def test_worked_examples(size: tuple[int, int], tokens: int) -> None:
    assert num_image_tokens(*grid_for(*size, VL2, tiled=True), 14) == tokens
    assert num_image_tokens(*grid_for(*size, VL2, tiled=False), 14) == 421


def test_two_pictures_are_tiled_and_three_are_not() -> None:
    assert [is_tiled(n) for n in (0, 1, 2, 3, 4)] == [True, True, True, False, False]


# --- padding and tiles --------------------------------------------------------------------------

# picture, canvas chosen, global resize and offset, local resize and offset
GEOMETRY = [
    ((640, 480), (768, 768), (384, 288, 0, 48), (768, 576, 0, 96)),
    ((1920, 1080), (1536, 768), (384, 216, 0, 84), (1365, 768, 86, 0)),
    ((1080, 1920), (768, 1536), (216, 384, 84, 0), (768, 1365, 0, 86)),
    ((500, 4000), (384, 3072), (48, 384, 168, 0), (384, 3072, 0, 0)),
    ((385, 384), (768, 384), (384, 383, 0, 0), (385, 384, 192, 0)),
    ((383, 385), (384, 768), (382, 384, 1, 0), (384, 386, 0, 191)),
    ((1000, 1000), (1152, 1152), (384, 384, 0, 0), (1152, 1152, 0, 0)),
    ((2000, 100), (2304, 384), (384, 19, 0, 182), (2304, 115, 0, 134)),
]


def placed(width: int, height: int, canvas: tuple[int, int]) -> tuple[int, int, int, int]:
    """Where a white picture lies on a black canvas: width, height, left, top."""
    canvas_pixels = pad_to_canvas(Image.new("RGB", (width, height), "white"), canvas, (0, 0, 0))
    ys, xs = np.nonzero(canvas_pixels[:, :, 0])
    return (int(np.ptp(xs)) + 1, int(np.ptp(ys)) + 1, int(xs.min()), int(ys.min()))


@pytest.mark.parametrize(("size", "canvas", "global_place", "local_place"), GEOMETRY)
def test_geometry_table(
    size: tuple[int, int],
    canvas: tuple[int, int],
    global_place: tuple[int, ...],
    local_place: tuple[int, ...],
) -> None:
    assert select_best_resolution(*size, CANDIDATES) == canvas
    assert placed(*size, (384, 384)) == global_place
    assert placed(*size, canvas) == local_place


# picture of the formula -> sum of each tile, first 16 digits of the SHA-256 over all tiles (Pillow 13)
PIXELS = {
    (300, 300): ([56113987, 56113987], "f6690c542feec356"),
    (385, 384): ([56399827, 56539136, 56042048], "94ebf736676b3c73"),
    (640, 480): ([56419874, 56457481, 56406948, 56386034, 56428431], "9fd0c4954398b461"),
    (1920, 1080): (
        [
            *(56295124, 56266826, 56426844, 56445943, 56269871),
            *(56352162, 56434522, 56424027, 56277676),
        ],
        "ffa7a0ef1aa3e0dd",
    ),
    (500, 4000): (
        [
            *(56209364, 56419721, 56411941, 56410034, 56403424),
            *(56402173, 56404219, 56410426, 56409830),
        ],
        "067c824790174f49",
    ),
}


@pytest.mark.parametrize("size", PIXELS)
def test_pixel_vectors(size: tuple[int, int]) -> None:
    tiles, grid = make_tiles(formula(*size), VL2, tiled=True)
    sums, digest = PIXELS[size]
    assert tiles.dtype == np.uint8
    assert tiles.shape == (1 + grid[0] * grid[1], 3, 384, 384)
    assert [int(tile.sum()) for tile in tiles.astype(np.int64)] == sums
    assert hashlib.sha256(np.ascontiguousarray(tiles).tobytes()).hexdigest()[:16] == digest


@pytest.mark.skipif(int(PIL.__version__.split(".")[0]) < 13, reason="resizes in another order")
@given(
    st.integers(1, 300),
    st.integers(1, 300),
    st.sampled_from([(48, 48), (96, 48), (48, 144), (30, 50)]),
)
@example(60, 300, (48, 48))  # height first
@example(300, 60, (48, 48))
@example(40, 40, (48, 144))
@example(1, 200, (48, 48))  # nothing left
def test_padding_equals_pillow(width: int, height: int, canvas: tuple[int, int]) -> None:
    image = Image.fromarray(noise(width, height, seed=width * 1000 + height))
    expected = np.asarray(ImageOps.pad(image, canvas, color=GREY))
    np.testing.assert_array_equal(pad_to_canvas(image, canvas, GREY), expected)


@pytest.mark.parametrize("size", [(1, 10000), (10000, 1)])
def test_a_side_of_nothing_leaves_only_padding(size: tuple[int, int]) -> None:
    tiles, grid = make_tiles(np.zeros((size[1], size[0], 3), np.uint8), VL2, tiled=True)
    assert grid == (1, 1)
    assert (tiles == 127).all()


def test_a_thin_picture_shows_in_its_mosaic() -> None:
    tiles, grid = make_tiles(np.zeros((4, 10000, 3), np.uint8), VL2, tiled=True)
    assert grid == (9, 1)
    assert (tiles[0] == 127).all(), "0.15 pixels high in the global view"
    assert (tiles[1:].min(axis=(1, 2, 3)) == 0).all(), "a line of one pixel through all tiles"


@pytest.mark.parametrize("tiled", [True, False])
def test_a_single_tile_equals_the_global_view(tiled: bool) -> None:
    rgb = noise(300, 200) if tiled else noise(1000, 700)
    tiles, grid = make_tiles(rgb, VL2, tiled=tiled)
    assert grid == (1, 1)
    np.testing.assert_array_equal(tiles[0], tiles[1])


def test_tiles_run_row_by_row() -> None:
    rgb = np.zeros((768, 1152, 3), np.uint8)
    for row in range(2):
        for col in range(3):
            rgb[384 * row : 384 * (row + 1), 384 * col : 384 * (col + 1)] = 10 * row + col
    tiles, grid = make_tiles(rgb, VL2, tiled=True)
    assert grid == (3, 2)
    assert [int(tile[0, 200, 200]) for tile in tiles[1:]] == [0, 1, 2, 10, 11, 12]


def test_tiles_are_writable_and_leave_the_picture_alone() -> None:
    rgb = noise(384, 384)
    before = rgb.copy()
    tiles, _ = make_tiles(rgb, VL2, tiled=True)
    tiles[:] = 0
    np.testing.assert_array_equal(rgb, before)


def test_normalisation_rounds_to_float32_in_each_step() -> None:
    values = normalise(np.array([0, 127, 128, 255], np.uint8).reshape(1, 1, 2, 2).repeat(3, 1), VL2)
    assert values.dtype == np.float32
    assert values[0, 0].ravel().tolist() == [-1.0, -0.003921568393707275, 0.003921627998352051, 1.0]


def test_normalisation_goes_by_channel() -> None:
    config = VL2ImageConfig(CANDIDATES, 14, 2, image_mean=(0, 0.5, 1), image_std=(1, 0.5, 2))
    values = normalise(np.full((1, 3, 1, 1), 255, np.uint8), config)
    assert values.ravel().tolist() == [1.0, 1.0, 0.0]


# --- settings -----------------------------------------------------------------------------------

SETTINGS = {
    "candidate_resolutions": [[384, 384], [384, 768]],
    "patch_size": 14,
    "downsample_ratio": 2,
}


def test_missing_settings_get_the_official_defaults() -> None:
    config = VL2ImageConfig.from_dict(SETTINGS)
    assert config == VL2ImageConfig(((384, 384), (384, 768)), 14, 2)
    assert (config.image_size, config.tokens_per_side, config.pad_colour) == (384, 14, GREY)


def test_settings_are_read_from_golden_checkpoints(golden_vl2: Path) -> None:
    for path in sorted(golden_vl2.glob("*/checkpoint/processor_config.json")):
        values = json.loads(path.read_text())
        config = VL2ImageConfig.from_dict(values)
        assert [list(pair) for pair in config.candidate_resolutions] == values[
            "candidate_resolutions"
        ]


def test_own_mean_and_std_set_the_colour_of_the_padding() -> None:
    values = {"image_mean": [0.48, 0.457, 0.408], "image_std": [0.268, 0.261, 0.275]}
    config = VL2ImageConfig.from_dict(SETTINGS | values)
    assert config.pad_colour == (122, 116, 104)
    assert config.image_std == (0.268, 0.261, 0.275)


def test_switched_off_normalisation_leaves_numbers_from_0_to_1() -> None:
    config = VL2ImageConfig.from_dict(SETTINGS | {"normalize": False})
    assert config.pad_colour == GREY
    assert normalise(np.full((1, 3, 1, 1), 255, np.uint8), config).ravel().tolist() == [1.0] * 3


def test_odd_grids_are_rounded_up() -> None:
    values = SETTINGS | {"candidate_resolutions": [[100, 100]]}
    assert VL2ImageConfig.from_dict(values).tokens_per_side == 4  # 7 patches by 2
    assert VL2ImageConfig.from_dict(values | {"downsample_ratio": 3}).tokens_per_side == 3


def test_all_missing_keys_are_named_at_once() -> None:
    with pytest.raises(CheckpointError, match="lacks candidate_resolutions, downsample_ratio;"):
        VL2ImageConfig.from_dict({"patch_size": 14})


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("candidate_resolutions", []),
        ("candidate_resolutions", "384x384"),
        ("candidate_resolutions", [[384, 768], [384, 384]]),
        ("candidate_resolutions", [[384, 384], [384, 500]]),
        ("candidate_resolutions", [[384, 384], [384]]),
        ("candidate_resolutions", [[0, 0]]),
        ("candidate_resolutions", [384, 384]),
        ("patch_size", 0),
        ("patch_size", "14"),
        ("downsample_ratio", True),
        ("image_mean", [0.5]),
        ("image_mean", "0.5"),
        ("image_std", [0.5, 0.5, 0]),
        ("image_std", [0.5, 0.5, float("nan")]),
        ("image_token", "<picture>"),
        ("sft_format", "plain"),
    ],
)
def test_settings_that_describe_no_tiling_are_named(name: str, value: object) -> None:
    with pytest.raises(CheckpointError, match=name):
        VL2ImageConfig.from_dict(SETTINGS | {name: value})
