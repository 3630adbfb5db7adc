"""Media items for tests, cut by the real processors' functions."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from foveal.types import MediaItem, V4MediaItem
from foveal.vision.v4 import (
    V4ImageConfig,
    block_order,
    block_types,
    llm_grid_for,
    make_patches,
    num_pads,
)
from foveal.vision.vl2 import VL2ImageConfig, make_tiles, num_image_tokens
from tests.vision.v4_pictures import SMALL

# The candidate canvases of released models, with tiles of 24 pixels instead of 384.
VL2_SMALL = VL2ImageConfig(
    tuple(
        (24 * cols, 24 * rows) for cols in range(1, 10) for rows in range(1, 10) if cols * rows <= 9
    ),
    patch_size=4,
    downsample_ratio=2,
)


def vl2_item(
    rgb: npt.NDArray[np.uint8],
    *,
    tiled: bool = True,
    start: int = 0,
    config: VL2ImageConfig = VL2_SMALL,
) -> MediaItem:
    tiles, grid = make_tiles(rgb, config, tiled=tiled)
    length = num_image_tokens(*grid, config.tokens_per_side)
    return MediaItem(grid, start, length, (rgb.shape[1], rgb.shape[0]), tiles=tiles)


def v4_item(
    rgb: npt.NDArray[np.uint8], *, start: int = 0, config: V4ImageConfig = SMALL
) -> V4MediaItem:
    patches, vit_grid = make_patches(rgb, config)
    llm_grid = llm_grid_for(vit_grid, config)
    types = block_types(llm_grid, start)
    return V4MediaItem(
        start=start,
        length=len(types),
        num_pads=num_pads(start),
        types=types,
        perm=block_order(llm_grid),
        vit_grid=vit_grid,
        llm_grid=llm_grid,
        size=(rgb.shape[1], rgb.shape[0]),
        patches=patches,
    )


def solid(width: int, height: int, colour: int) -> npt.NDArray[np.uint8]:
    return np.full((height, width, 3), colour, dtype=np.uint8)
