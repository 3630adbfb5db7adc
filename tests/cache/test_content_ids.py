"""Content ids: equal ids mean equal content."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from foveal.cache.content_ids import content_id, item_content_id, picture_content_id
from foveal.types import MediaItem, Picture, V4MediaItem
from tests.cache.samples import solid, v4_item, vl2_item
from tests.vision.pictures import noise

NOISE = noise(60, 40)


def vl2_id(item: MediaItem, **options: Any) -> bytes:
    return item_content_id(item, **{"fingerprint": "m", **options})


def v4_id(item: V4MediaItem, **options: Any) -> bytes:
    return item_content_id(item, **{"fingerprint": "m", **options})


# --- framing --------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("a", "b"),
    [
        ({"a": "bc"}, {"ab": "c"}),
        ({"a": "b", "c": "d"}, {"a": "bc", "d": ""}),
        ({"a": 1}, {"a": True}),
        ({"a": 1}, {"a": "1"}),
        ({"a": 1}, {"a": 1.0}),
        ({"a": b"1"}, {"a": "1"}),
        ({"a": None}, {"a": ""}),
        ({"a": None}, {}),
        ({"a": (1, 2)}, {"a": (12,)}),
        ({"a": ("1", "2")}, {"a": ("12", "")}),
        ({"a": (1, 2)}, {"a": (2, 1)}),
        ({"a": np.zeros(4, np.uint8)}, {"a": np.zeros((2, 2), np.uint8)}),
        ({"a": np.zeros(4, np.uint8)}, {"a": np.zeros(4, np.int8)}),
        ({"a": np.zeros(0, np.uint8)}, {"a": np.zeros(0, np.float32)}),
        ({"a": np.zeros(1, np.float32)}, {"a": -np.zeros(1, np.float32)}),
    ],
)
def test_fields_do_not_run_into_each_other(a: dict[str, Any], b: dict[str, Any]) -> None:
    assert content_id("kind", a) != content_id("kind", b)


SCALARS = st.one_of(st.none(), st.booleans(), st.integers(), st.text(), st.binary())
FIELDS = st.dictionaries(st.text(max_size=3), SCALARS | st.lists(SCALARS, max_size=3), max_size=3)


def typed(fields: dict[str, Any]) -> str:
    return repr(sorted(fields.items()))


@given(FIELDS, FIELDS)
def test_ids_are_equal_exactly_where_fields_are(a: dict[str, Any], b: dict[str, Any]) -> None:
    assert (content_id("k", a) == content_id("k", b)) == (typed(a) == typed(b))


def test_the_order_of_fields_does_not_matter() -> None:
    assert content_id("k", {"a": 1, "b": 2}) == content_id("k", {"b": 2, "a": 1})


def test_kinds_are_apart() -> None:
    assert content_id("a", {}) != content_id("b", {})


def test_the_layout_in_memory_does_not_matter() -> None:
    array = NOISE[:, ::2]
    assert not array.flags.c_contiguous
    assert content_id("k", {"a": array}) == content_id("k", {"a": array.copy()})


@pytest.mark.parametrize("value", [{}, object(), np.array([object()])])
def test_values_without_agreed_bytes_are_refused(value: Any) -> None:
    with pytest.raises(TypeError, match="pass numbers"):
        content_id("k", {"a": value})


# --- VL2 ------------------------------------------------------------------------------------------


def test_a_picture_keeps_its_id_wherever_it_stands() -> None:
    item = vl2_item(NOISE)
    assert vl2_id(item) == vl2_id(vl2_item(NOISE, start=17))
    assert vl2_id(item) == vl2_id(replace(item, size=(1, 1)))


@pytest.mark.parametrize("options", [{"fingerprint": "m2"}, {"vision_adapter": "a"}])
def test_model_and_vision_adapter_are_part_of_the_id(options: dict[str, str]) -> None:
    item = vl2_item(NOISE)
    assert vl2_id(item) != vl2_id(item, **options)
    v4 = v4_item(NOISE)
    assert v4_id(v4) != v4_id(v4, **options)


def test_one_pixel_changes_the_id() -> None:
    item = vl2_item(NOISE)
    assert item.tiles is not None
    tiles = item.tiles.copy()
    tiles[0, 0, 0, 0] ^= 1
    assert vl2_id(item) != vl2_id(replace(item, tiles=tiles))


def test_equal_tiles_in_another_arrangement_are_another_picture() -> None:
    # Six tiles as 3x2 or 2x3: the same pixels, other newline rows.
    tiles = np.zeros((7, 3, 4, 4), np.uint8)
    wide, high = (MediaItem(grid, 0, 60, tiles=tiles) for grid in ((3, 2), (2, 3)))
    assert vl2_id(wide) != vl2_id(high)


def test_ways_of_giving_a_picture_are_apart() -> None:
    values = np.zeros((2, 3, 4, 4), np.float32)
    item = MediaItem((1, 1), 0, 10, pixel_values=values)
    half = MediaItem((1, 1), 0, 10, pixel_values=values.astype(np.float16))  # type: ignore[arg-type]
    raw = MediaItem((1, 1), 0, 10, tiles=values.astype(np.uint8))
    rows = MediaItem((1, 1), 0, 10, embeds=values)
    assert len({vl2_id(i) for i in (item, half, raw, rows)}) == 4


def test_tiling_that_changes_nothing_keeps_the_id() -> None:
    # A picture of one tile is cut the same way with and without tiling, so its embeddings may be shared.
    picture = noise(24, 24)
    assert vl2_id(vl2_item(picture, tiled=True)) == vl2_id(vl2_item(picture, tiled=False))


# --- V4 -------------------------------------------------------------------------------------------


def test_alignment_pads_are_not_part_of_a_v4_picture() -> None:
    ids = {v4_id(v4_item(NOISE, start=start)) for start in range(4)}
    assert len(ids) == 1


def test_grids_and_order_are_part_of_a_v4_id() -> None:
    item = v4_item(NOISE)
    rows, cols = item.vit_grid
    others = [
        replace(item, vit_grid=(cols, rows)),
        replace(item, llm_grid=item.llm_grid[::-1]),
        replace(item, perm=item.perm[::-1].copy()),
        replace(item, patches=None, patch_values=np.zeros((1, 3, 2, 2), np.float32)),
    ]
    assert len({v4_id(i) for i in (item, *others)}) == 5


def test_families_are_apart() -> None:
    assert vl2_id(vl2_item(NOISE)) != v4_id(v4_item(NOISE))


# --- pictures before they are cut -----------------------------------------------------------------


def test_a_processor_key_names_picture_and_call() -> None:
    picture = Picture(NOISE)
    key = picture_content_id(picture, {"tiled": True})
    assert key == picture_content_id(Picture(NOISE.copy(), source="b.png"), {"tiled": True})
    others = [
        picture_content_id(picture, {"tiled": False}),
        picture_content_id(picture, {"tiled": True, "version": 2}),
        picture_content_id(Picture(solid(60, 40, 1)), {"tiled": True}),
    ]
    assert len({key, *others}) == 4


def test_a_call_cannot_pose_as_the_picture() -> None:
    a, b = Picture(solid(2, 2, 1)), Picture(solid(2, 2, 2))
    assert picture_content_id(a, {"rgb": 0}) != picture_content_id(b, {"rgb": 0})
