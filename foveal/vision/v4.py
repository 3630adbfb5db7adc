"""DeepSeek-V4's view of a picture: its size, its patches, and the block of tokens that stands for it.

    picture -> canvas of whole patches -> patches in reading order      (tower and aligner: q x q patches are one cell)
    grid of cells + position -> types of the block's tokens, and which cell each image token takes

Equal to the released code (spec 7.2, 7.4), whose floats are kept: sizes at the edges depend on them. That code decodes
pictures as `load_picture` does in vendor mode. Pure functions of pixels, sizes and configuration. Sizes are (width,
height) in pixels, grids are (rows, cols).
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, fields
from typing import Any, TypeAlias

import numpy as np
import numpy.typing as npt
from PIL import Image

from foveal.errors import CheckpointError
from foveal.types import END, IMAGE, NEW_LINE, PAD, START
from foveal.vision.vl2 import Size, pad_to_canvas

Grid: TypeAlias = tuple[int, int]
Patches: TypeAlias = npt.NDArray[np.uint8]
Integers: TypeAlias = npt.NDArray[np.int64]

NUM_TYPES = 5  # START ... END
# START stands at a position that is 3 modulo 4: the content begins where a window of ratio-4 layers begins.
ALIGNMENT = 4
MAX_PADS = ALIGNMENT - 1
# One column of two cells, its newlines, START and END: less than this no block can have after it was shrunk.
MIN_BLOCK = 6
GREY = (127, 127, 127)


@dataclass(frozen=True, slots=True)
class V4ImageConfig:
    """What a vision checkpoint's `config.json` says about pictures (spec 1.4).

    `patch_size` in pixels; `downsample_ratio` patches a side become one cell; `max_n_token` bounds a block with its
    alignment pads; smaller pictures are scaled up to about `min_pixels`; `max_wh_ratio` limits width to height, of
    wide pictures only.
    """

    patch_size: int
    downsample_ratio: int
    max_n_token: int
    min_pixels: int
    max_wh_ratio: float

    @property
    def max_block(self) -> int:
        """The most tokens of a block without alignment pads."""
        return self.max_n_token - MAX_PADS

    @classmethod
    def from_dict(cls, values: Mapping[str, Any]) -> V4ImageConfig:
        """Read the `vision_*` keys. Raises CheckpointError for missing keys, all at once, and for senseless values."""
        keys = {field.name: f"vision_{field.name}" for field in fields(cls)}
        missing = [key for key in keys.values() if key not in values]
        if missing:
            raise CheckpointError(
                f"config.json lacks {', '.join(missing)}; take the file from the model's repository"
            )
        least = {"max_n_token": MIN_BLOCK + MAX_PADS, "min_pixels": 0}
        for name, key in keys.items():
            value, low = values[key], least.get(name, 1)
            kinds = (int, float) if name == "max_wh_ratio" else (int,)
            is_number = isinstance(value, kinds) and not isinstance(value, bool)
            if not is_number or not low <= value < math.inf:
                kind = "a number" if float in kinds else "a whole number"
                raise CheckpointError(
                    f"config.json: {key} is {value!r}; it must be {kind} of at least {low}"
                )
        return cls(**{name: values[key] for name, key in keys.items()})


# --- size ---------------------------------------------------------------------------------------


def vit_grid_for(width: int, height: int, config: V4ImageConfig) -> Grid:
    """The patches (rows, cols) that a picture of this size is resized to (spec 7.2, steps 2 to 7)."""
    w, h = min(width, config.max_wh_ratio * height), float(height)
    if w * h < config.min_pixels:
        scale = (config.min_pixels / (w * h)) ** 0.5
        w, h = math.trunc(w * scale), math.trunc(h * scale)
    grid = (math.ceil(h / config.patch_size), math.ceil(w / config.patch_size))
    budget = config.max_block
    # The solver estimates, so its own budget sinks until the block that it gives fits the true one.
    while block_length(llm_grid_for(grid, config)) > config.max_block:
        grid = _solve(w, h, budget, config)
        budget -= 1
    return grid


def _solve(w: float, h: float, budget: int, config: V4ImageConfig) -> Grid:
    """Patches of about the shape of `w` x `h` whose block has about `budget` tokens."""
    p, q = config.patch_size, config.downsample_ratio
    ratio = h / w
    cols = math.sqrt((budget - 2) / ratio + 0.25) - 0.5
    rows = cols * ratio
    if cols < 1:  # a column of cells, however much taller the picture is
        return (_even((budget - 2) // 2) * q, q)
    if rows < 2:
        return (2 * q, ((budget - 2) // 2 - 1) * q)
    scale = min(q * p * math.floor(cols) / w, q * p * _even(math.floor(rows)) / h)
    # With cells of one patch a side can come out below it; with larger cells it cannot.
    return (max(1, math.floor(h * scale / p)), max(1, math.floor(w * scale / p)))


def _even(number: int) -> int:
    return number - number % 2


def llm_grid_for(vit_grid: Grid, config: V4ImageConfig) -> Grid:
    """The cells (rows, cols) that patches are merged to; those at the edges may be partial."""
    q = config.downsample_ratio
    return (-(-vit_grid[0] // q), -(-vit_grid[1] // q))


# --- pixels -------------------------------------------------------------------------------------


def make_patches(rgb: npt.NDArray[np.uint8], config: V4ImageConfig) -> tuple[Patches, Grid]:
    """Resize and cut a picture. `rgb` [height, width, 3] uint8.

    Returns (patches, grid): uint8 [rows * cols, 3, p, p] in reading order. A picture as wide as the ratio limit or
    wider is stretched to its canvas; any other keeps its shape and is centred on grey.
    """
    height, width, _ = rgb.shape
    rows, cols = vit_grid_for(width, height, config)
    p = config.patch_size
    canvas: Size = (cols * p, rows * p)
    image = Image.fromarray(rgb)
    if width >= config.max_wh_ratio * height:
        pixels = np.asarray(image.resize(canvas, Image.Resampling.BICUBIC))
    else:
        pixels = pad_to_canvas(image, canvas, GREY)
    cut = pixels.reshape(rows, p, cols, p, 3).transpose(0, 2, 4, 1, 3)
    return np.ascontiguousarray(cut).reshape(rows * cols, 3, p, p), (rows, cols)


# --- block --------------------------------------------------------------------------------------


def num_pads(start: int) -> int:
    """Alignment pads before the START of a block whose first token is at position `start`: 0 to 3."""
    return (MAX_PADS - start) % ALIGNMENT


def block_length(llm_grid: Grid) -> int:
    """Tokens of a block without alignment pads."""
    content = (llm_grid[0] + llm_grid[0] % 2) * (llm_grid[1] + 1)
    return 2 + content + content % ALIGNMENT


def block_types(llm_grid: Grid, start: int) -> Integers:
    """Types of all tokens of a block at position `start`, alignment pads included (spec 7.4).

    Rows of cells end with a newline and are walked in pairs, column by column; a missing last row is all PAD.
    """
    rows, cols = llm_grid
    grid = np.full((rows + rows % 2, cols + 1), PAD, dtype=np.int64)
    grid[:rows, :cols] = IMAGE
    grid[:rows, cols] = NEW_LINE
    filled = [PAD] * (grid.size % ALIGNMENT)
    pieces = ([PAD] * num_pads(start), [START], _walk(grid), filled, [END])
    return np.concatenate([np.asarray(piece, dtype=np.int64) for piece in pieces])


def block_order(llm_grid: Grid) -> Integers:
    """The cell, counted in reading order, that each image token of a block takes: `perm` [rows * cols]."""
    rows, cols = llm_grid
    grid = np.full((rows + rows % 2, cols), -1, dtype=np.int64)
    grid[:rows] = np.arange(rows * cols).reshape(rows, cols)
    order = _walk(grid)
    return order[order >= 0]


def _walk(grid: Integers) -> Integers:
    """The entries of [rows, cols] in pairs of rows, each pair column by column."""
    return grid.reshape(-1, 2, grid.shape[1]).transpose(0, 2, 1).reshape(-1)
