"""Pictures that arrive as tensors: normalised tiles (`pixel_values`) or ready rows of the language model's input.

Validates what spec 8.5 lists, plus what it recommends: as many tiles as the grids say, finite numbers. Takes numpy
arrays and whatever turns into one (`__array__`), torch tensors among them, without knowing torch. Only plain arrays of
floats get through: no objects, nothing sparse.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, TypeAlias

import numpy as np
import numpy.typing as npt

from foveal.errors import MediaError
from foveal.types import PrecomputedEmbeds, PrecomputedTiles
from foveal.vision.arrays import as_array, as_float32, check_shape

Floats: TypeAlias = npt.NDArray[np.float32]


def check_pixel_values(
    pixel_values: Any, images_spatial_crop: Any, *, image_size: int
) -> list[PrecomputedTiles]:
    """The pictures in a batch of tiles.

    `pixel_values` [tiles, 3, image_size, image_size], or a list of equal [3, image_size, image_size]: the tiles of all
    pictures after each other. `images_spatial_crop` [pictures, 2] whole numbers, (cols, rows) each; a row with a 0 ends
    the list, and only tiles of zeros may be left over then (the official padding). Raises MediaError.
    """
    if images_spatial_crop is None:
        raise MediaError(
            "Required field 'images_spatial_crop' is missing; give (cols, rows) of each picture"
        )
    grids, is_padded = _grids(images_spatial_crop)
    tiles = _stacked(pixel_values, "pixel_values")
    check_shape("pixel_values", tiles.shape, (None, 3, image_size, image_size))
    needed = sum(1 + cols * rows for cols, rows in grids)
    has_rest = len(tiles) > needed and is_padded and not tiles[needed:].any()
    if len(tiles) != needed and not has_rest:
        raise MediaError(
            f"pixel_values has {len(tiles)} tiles, but images_spatial_crop {[list(grid) for grid in grids]} needs "
            f"{needed}: one global view and cols*rows tiles for each picture"
        )
    pictures, start = [], 0
    for cols, rows in grids:
        end = start + 1 + cols * rows
        values = as_float32(tiles[start:end], "pixel_values")
        pictures.append(PrecomputedTiles(values, (cols, rows)))
        start = end
    return pictures


def check_image_embeds(embeds: Any, *, width: int | None = None) -> list[PrecomputedEmbeds]:
    """The pictures in precomputed rows.

    `embeds` [pictures, length, width], or a list of [length, width] whose lengths may differ. `width` is the language
    model's, None to leave it unchecked. Raises MediaError.
    """
    if isinstance(embeds, list | tuple):
        _not_empty(embeds, "image_embeds")
        named = [(f"image_embeds[{i}]", item) for i, item in enumerate(embeds)]
        arrays = [(name, as_array(item, name)) for name, item in named]
    else:
        batch = as_array(embeds, "image_embeds")
        check_shape("image_embeds", batch.shape, (None, None, width))
        arrays = [("image_embeds", rows) for rows in batch]
    pictures = []
    for name, rows in arrays:
        check_shape(name, rows.shape, (None, width))
        width = rows.shape[1]  # where the model's is unknown, all pictures must agree at least
        if len(rows) == 0:
            raise MediaError(f"{name} has no rows; a picture takes at least one")
        pictures.append(PrecomputedEmbeds(as_float32(rows, name)))
    return pictures


def _grids(crop: Any) -> tuple[list[tuple[int, int]], bool]:
    """Grids up to the first row that holds a 0, and whether there was one."""
    name = "images_spatial_crop"
    if isinstance(crop, list | tuple):
        _not_empty(crop, name)
        try:
            array = np.asarray(crop)
        except ValueError:
            raise MediaError(
                f"{name} contains inconsistent shapes; give [cols, rows] pairs"
            ) from None
    else:
        array = as_array(crop, name, kinds="iu")
    check_shape(name, array.shape, (None, 2))
    if array.dtype.kind not in "iu":
        raise MediaError(
            f"{name} has dtype {array.dtype}; give whole numbers of tiles, as in [[2, 3]]"
        )
    rows: list[list[int]] = array.tolist()
    grids: list[tuple[int, int]] = []
    for cols, height in rows:
        if cols < 0 or height < 0:
            raise MediaError(
                f"{name} holds [{cols}, {height}]; a picture has at least one tile a side"
            )
        if cols == 0 or height == 0:
            return grids, True
        grids.append((cols, height))
    return grids, False


def _not_empty(values: Sequence[Any], name: str) -> Sequence[Any]:
    if not values:
        raise MediaError(f"{name} is an empty sequence; leave it out where there are no pictures")
    return values


def _stacked(values: Any, name: str) -> npt.NDArray[Any]:
    """An array as it is; a list of equal arrays stacked."""
    if not isinstance(values, list | tuple):
        return as_array(values, name)
    items = [as_array(item, f"{name}[{i}]") for i, item in enumerate(_not_empty(values, name))]
    if any(item.ndim == 4 for item in items):
        # Lists of per-picture tiles are a common slip; stacking equal ones would give rank 5.
        raise MediaError(f"{name}: data has rank 5 but expected 4; concatenate the pictures' tiles")
    if len({item.shape for item in items}) > 1:
        raise MediaError(
            f"{name} contains inconsistent shapes {sorted({item.shape for item in items})}; all tiles are equal in size"
        )
    return np.stack(items)
