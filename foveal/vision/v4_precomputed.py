"""Pictures for DeepSeek-V4 that arrive as tensors: patches with their grids and their order.

The fields say the same thing several times; they are checked against each other and against what the model's layout
makes of the grids (spec 7.4, 10.4). Takes numpy arrays and whatever turns into one, torch tensors among them, without
knowing torch.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise
from math import prod
from typing import Any, TypeAlias

import numpy as np
import numpy.typing as npt

from foveal.errors import MediaError
from foveal.types import PrecomputedPatches
from foveal.vision.arrays import as_array, as_float32, check_shape
from foveal.vision.v4 import (
    Grid,
    Integers,
    V4ImageConfig,
    block_length,
    block_order,
    block_types,
    llm_grid_for,
)

Floats: TypeAlias = npt.NDArray[np.float32]
# A block that begins here needs no alignment pads.
_ALIGNED = 3


def check_patches(
    patches: Any,
    vit_grid: Any,
    llm_grid: Any,
    perm: Any,
    types: Any = None,
    *,
    config: V4ImageConfig,
) -> list[PrecomputedPatches]:
    """The pictures in a batch of patches.

    `patches` [sum of patches, 3, p, p] of all pictures after each other: uint8 pixels, or normalised floats, which are
    rounded to bfloat16 as in the released code. `vit_grid` and `llm_grid` [pictures, 2] are (rows, cols) of patches and
    of cells. `perm` [sum of cells] says which cell each image token takes, counted in each picture on its own. `types`
    [sum of block lengths], where given, are those of the blocks without alignment pads. Raises MediaError.
    """
    fields = {"patches": patches, "vit_grid": vit_grid, "llm_grid": llm_grid, "perm": perm}
    for name, value in fields.items():
        if value is None:
            raise MediaError(
                f"Required field {name!r} is missing; patches, vit_grid, llm_grid and perm come together"
            )
    vit_grids, llm_grids = _grids(vit_grid, "vit_grid"), _grids(llm_grid, "llm_grid")
    _check_grids(vit_grids, llm_grids, config)
    pixels = _pixels(patches, config.patch_size)
    parts = _split(pixels, [prod(grid) for grid in vit_grids], "patches", "vit_grid")
    orders = _split(
        _whole_numbers(perm, "perm", (None,)), [prod(g) for g in llm_grids], "perm", "llm_grid"
    )
    for i, (order, grid) in enumerate(zip(orders, llm_grids, strict=True)):
        _check_order(order, grid, i)
    if types is not None:
        _check_types(_whole_numbers(types, "types", (None,)), llm_grids)
    return [
        PrecomputedPatches(*picture)
        for picture in zip(parts, vit_grids, llm_grids, orders, strict=True)
    ]


def round_to_bfloat16(values: Floats) -> Floats:
    """The nearest bfloat16 numbers, ties to even, as float32."""
    bits = values.view(np.uint32)
    is_odd = (bits >> np.uint32(16)) & np.uint32(1)
    rounded = (bits + np.uint32(0x7FFF) + is_odd) & np.uint32(0xFFFF0000)
    return rounded.view(np.float32)


def _pixels(patches: Any, side: int) -> npt.NDArray[np.uint8] | Floats:
    """A copy of the patches, checked: uint8, or float32 of bfloat16 numbers."""
    array = as_array(patches, "patches", kinds="fu")
    check_shape("patches", array.shape, (None, 3, side, side))
    if array.dtype == np.uint8:
        return np.array(array, dtype=np.uint8, order="C")
    if array.dtype.kind == "u":
        raise MediaError(f"patches has dtype {array.dtype}; give uint8 pixels or normalised floats")
    return as_float32(round_to_bfloat16(as_float32(array, "patches")), "patches")


def _whole_numbers(value: Any, name: str, shape: tuple[int | None, ...]) -> Integers:
    """Integers of `shape` (None: any side) from an array or nested lists."""
    if isinstance(value, list | tuple):
        try:
            value = np.asarray(value, dtype=None if len(value) else np.int64)
        except ValueError:
            raise MediaError(f"{name} contains inconsistent shapes; give equal rows") from None
        if value.size == 0:
            value = value.reshape([side or 0 for side in shape])
    array = as_array(value, name, kinds="iu")
    check_shape(name, array.shape, shape)
    if array.size and int(array.max()) > np.iinfo(np.int64).max:
        raise MediaError(f"{name} holds {int(array.max())}, which no picture needs")
    integers: Integers = array.astype(np.int64)
    return integers


def _grids(value: Any, name: str) -> list[Grid]:
    grids = [(int(rows), int(cols)) for rows, cols in _whole_numbers(value, name, (None, 2))]
    for grid in grids:
        if min(grid) < 1:
            raise MediaError(
                f"{name} holds {list(grid)}; a picture has at least one row and one column"
            )
    return grids


def _check_grids(vit_grids: list[Grid], llm_grids: list[Grid], config: V4ImageConfig) -> None:
    if len(vit_grids) != len(llm_grids):
        raise MediaError(
            f"vit_grid has {len(vit_grids)} pictures, but llm_grid has {len(llm_grids)}; give one row of each for "
            "each picture"
        )
    for i, (vit_grid, llm_grid) in enumerate(zip(vit_grids, llm_grids, strict=True)):
        needed = llm_grid_for(vit_grid, config)
        if llm_grid != needed:
            q = config.downsample_ratio
            raise MediaError(
                f"picture {i}: vit_grid {list(vit_grid)} in cells of {q}x{q} gives llm_grid {list(needed)}, not "
                f"{list(llm_grid)}; both are (rows, columns)"
            )
        length = block_length(llm_grid)
        if length > config.max_block:
            raise MediaError(
                f"picture {i}: llm_grid {list(llm_grid)} takes {length} tokens, and the model's limit is "
                f"{config.max_block}; resize it to fewer patches"
            )


def _split(values: Any, sizes: Sequence[int], name: str, grid_name: str) -> list[Any]:
    """`values` cut into one piece for each picture."""
    if len(values) != sum(sizes):
        shown = " + ".join(map(str, sizes)) if 0 < len(sizes) <= 4 else f"{len(sizes)} pictures"
        raise MediaError(
            f"{name} has {len(values)} entries, but {grid_name} needs {sum(sizes)} ({shown}); it must be that of all "
            "pictures one after the other"
        )
    ends = np.cumsum([0, *sizes]).tolist()
    return [values[a:b] for a, b in pairwise(ends)]


def _check_order(order: Integers, grid: Grid, picture: int) -> None:
    """A permutation, and the layout's own: with another one the cells would stand in the wrong places."""
    expected = block_order(grid)
    if not np.array_equal(np.sort(order), np.arange(len(expected))):
        raise MediaError(
            f"picture {picture}: perm must hold each of 0 to {len(expected) - 1} once, counted in this picture alone"
        )
    differing = np.flatnonzero(order != expected)
    if len(differing):
        at = int(differing[0])
        raise MediaError(
            f"picture {picture}: perm[{at}] is {order[at]}, but a block of {grid[0]} rows and {grid[1]} columns has "
            f"cell {expected[at]} there: rows in pairs, each pair column by column"
        )


def _check_types(types: Integers, llm_grids: list[Grid]) -> None:
    blocks = _split(types, [block_length(grid) for grid in llm_grids], "types", "llm_grid")
    for i, (block, grid) in enumerate(zip(blocks, llm_grids, strict=True)):
        expected = block_types(grid, _ALIGNED)
        differing = np.flatnonzero(block != expected)
        if len(differing):
            at = int(differing[0])
            raise MediaError(
                f"picture {i}: types[{at}] is {block[at]}, but a block of {grid[0]} rows and {grid[1]} columns has "
                f"{expected[at]} there (0 start, 1 pad, 2 image, 3 newline, 4 end; no alignment pads)"
            )
