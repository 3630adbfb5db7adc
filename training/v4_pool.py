"""The pictures that demo-v4 learns from: the scenes of `pool.py`, through V4's preprocessing.

Square scenes are taken from the other pool: their tile is what V4 makes of them too. The others are drawn again,
since V4 stretches wide pictures and gives tall ones narrower grids; they lie in a cache of their own under
`training/.cache`.
"""

from __future__ import annotations

import json
import math
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import TypeAlias

import numpy as np
import numpy.typing as npt
from PIL import Image

from foveal.vision.v4 import Grid, V4ImageConfig, llm_grid_for, make_patches, vit_grid_for
from training.cells import FAMILIES, LEAST_SHARE, NONE, CellLabels, item_classes
from training.pool import CACHE, DEFAULT_COUNTS, Pool, load_pool
from training.scenes import KINDS, Content, Kind, make_scene

PATCH, CELL = 8, 16  # pixels a side
# Wide pictures are squeezed into a square of 6 x 6 cells, tall ones become 6 rows of fewer cells.
IMAGE_CONFIG = V4ImageConfig(
    patch_size=PATCH, downsample_ratio=2, max_n_token=49, min_pixels=9216, max_wh_ratio=1
)
SQUARE: Grid = (12, 12)
# How many of the scenes that are not square are drawn again; the rest of them is left out.
DRAWN: dict[Kind, int] = {"shapes": 6000, "crowd": 3500, "digit": 2500, "word": 6500}
_NAMES = list(FAMILIES)


def canvas_boxes(content: Content, grid: Grid) -> npt.NDArray[np.float64]:
    """The items' boxes in pixels of the canvas of `grid` patches: [items, 4]."""
    width, height = content.size
    rows, cols = grid[0] * PATCH, grid[1] * PATCH
    if width >= IMAGE_CONFIG.max_wh_ratio * height:
        scale, left, top = np.array([cols / width, rows / height]), 0.0, 0.0
    else:
        factor = min(cols / width, rows / height)
        scale = np.array([factor, factor])
        left, top = (cols - width * factor) / 2, (rows - height * factor) / 2
    boxes = np.array([item.box for item in content.items], dtype=np.float64)
    return boxes * np.tile(scale, 2) + np.array([left, top, left, top])


@dataclass(frozen=True, slots=True, eq=False)
class GridLabels:
    """Labels of a picture's cells, and `offsets` [cells, 4]: how far the item's edges are from the cell's centre, in
    units of half a square canvas; `edges` [cells, 4]: the same edges from -1 to 1 of the picture. Zero where there
    is no item."""

    cells: CellLabels
    offsets: npt.NDArray[np.float32]
    edges: npt.NDArray[np.float32]


def label_grid(content: Content, grid: Grid) -> GridLabels:
    """As `cells.label_cells`, for the cells of any grid of patches."""
    rows, cols = llm_grid_for(grid, IMAGE_CONFIG)
    boxes = canvas_boxes(content, grid)
    x, y = np.arange(cols) * CELL, np.arange(rows) * CELL
    across = np.minimum(boxes[:, 2:3], x + CELL) - np.maximum(boxes[:, 0:1], x)
    down = np.minimum(boxes[:, 3:4], y + CELL) - np.maximum(boxes[:, 1:2], y)
    cover = (down.clip(0)[:, :, None] * across.clip(0)[:, None, :]).reshape(len(boxes), -1)
    owner = np.where(cover.max(0) >= LEAST_SHARE * CELL**2, cover.argmax(0), -1).astype(np.int8)
    middle = ((boxes[:, :2] + boxes[:, 2:]) / 2 / CELL).astype(int).clip(0, [cols - 1, rows - 1])
    centre = (middle[:, 1] * cols + middle[:, 0]).astype(np.uint8)
    owner[centre] = np.arange(len(boxes))
    classes = np.full((len(FAMILIES), rows * cols), NONE, np.uint8)
    classes[[_NAMES.index("what"), _NAMES.index("centre")]] = 0
    offsets, edges = np.zeros((2, rows * cols, 4), np.float32)
    centres = np.stack([np.tile(x, rows), np.repeat(y, cols)], 1) + CELL / 2
    sides = np.array([*content.size, *content.size])
    for i, item in enumerate(content.items):
        mine = owner == i
        for family, value in item_classes(content, i).items():
            classes[_NAMES.index(family), mine] = value
        classes[_NAMES.index("centre"), centre[i]] = 1
        offsets[mine] = (boxes[i] - np.tile(centres[mine], 2)) / 48
        edges[mine] = np.array(item.box) / sides * 2 - 1
    return GridLabels(CellLabels(classes, owner, centre), offsets, edges)


@dataclass(frozen=True, slots=True, eq=False)
class V4Pool:
    """Scenes with their patches. `where[i]` is the row in `tiles` of a square scene, or -1 - number in `packed`, whose
    patches [all patches, 3, p, p] lie one picture after the other from `offsets` on."""

    contents: list[Content]
    grids: list[Grid]
    where: npt.NDArray[np.int64]
    tiles: npt.NDArray[np.uint8]
    packed: npt.NDArray[np.uint8]
    offsets: npt.NDArray[np.int64]

    def patches(self, i: int) -> npt.NDArray[np.uint8]:
        """[n, 3, p, p] uint8 in reading order."""
        at = int(self.where[i])
        if at < 0:
            return self.packed[self.offsets[-1 - at] : self.offsets[-at]]
        rows, cols = self.grids[i]
        tile = self.tiles[at]
        if self.grids[i] != SQUARE:  # some sizes lose a patch to rounding
            image = Image.fromarray(np.ascontiguousarray(tile.transpose(1, 2, 0)))
            resized = image.resize((cols * PATCH, rows * PATCH), Image.Resampling.BICUBIC)
            tile = np.asarray(resized).transpose(2, 0, 1)
        cut = tile.reshape(3, rows, PATCH, cols, PATCH).transpose(1, 3, 0, 2, 4)
        return np.ascontiguousarray(cut).reshape(rows * cols, 3, PATCH, PATCH)


_Drawn: TypeAlias = tuple[list[Content], list[npt.NDArray[np.uint8]]]


def _draw_job(job: tuple[Kind, int, list[int]]) -> _Drawn:
    return _draw(*job, held_out=False)


def _draw(kind: Kind, seed: int, indices: list[int], *, held_out: bool) -> _Drawn:
    contents, patches = [], []
    for index in indices:
        scene = make_scene(kind, seed, index, held_out=held_out)
        contents.append(scene.content)
        patches.append(make_patches(np.asarray(scene.picture.convert("RGB")), IMAGE_CONFIG)[0])
    return contents, patches


def draw_v4_pool(seed: int, counts: dict[Kind, int], *, held_out: bool) -> V4Pool:
    """Draw a small pool in memory."""
    parts = [
        _draw(kind, seed, list(range(count)), held_out=held_out) for kind, count in counts.items()
    ]
    contents = [content for part in parts for content in part[0]]
    patches = [p for part in parts for p in part[1]]
    where = -1 - np.arange(len(contents))
    return _pool(
        contents,
        where,
        np.zeros((0, 3, 96, 96), np.uint8),
        np.concatenate(patches),
        [len(p) for p in patches],
    )


def _pool(contents: list[Content], where: npt.NDArray[np.int64], tiles: npt.NDArray[np.uint8],
          packed: npt.NDArray[np.uint8], lengths: list[int]) -> V4Pool:  # fmt: skip
    grids = [vit_grid_for(*content.size, IMAGE_CONFIG) for content in contents]
    return V4Pool(contents, grids, where, tiles, packed, np.concatenate(([0], np.cumsum(lengths))))


def _folder(seed: int) -> Path:
    return CACHE / f"pool-v4-{seed}-{sum(DRAWN.values())}"


def has_v4_pool(seed: int) -> bool:
    """Whether the cache is there and whole."""
    return (_folder(seed) / "lengths.json").exists()


def load_v4_pool(seed: int, *, workers: int = 1) -> V4Pool:
    """The training pool; what is not square is drawn and stored first when it is not there."""
    base: Pool = load_pool(seed, DEFAULT_COUNTS)
    again = _drawn_again(base.contents)
    folder = _folder(seed)
    if not has_v4_pool(seed):
        folder.mkdir(parents=True, exist_ok=True)
        _store(base.contents, again, seed, folder, workers)
    square = [i for i, content in enumerate(base.contents) if content.size[0] == content.size[1]]
    where = np.concatenate((square, -1 - np.arange(len(again))))
    contents = [base.contents[i] for i in (*square, *again)]
    packed = np.load(folder / "packed.npy", mmap_mode="r")
    lengths = json.loads((folder / "lengths.json").read_text())
    return _pool(contents, where, base.tiles, packed, lengths)


def _drawn_again(contents: list[Content]) -> list[int]:
    """The scenes that are not square, the first of each kind."""
    kinds: dict[Kind, list[int]] = {kind: [] for kind in KINDS}
    for i, content in enumerate(contents):
        if content.size[0] != content.size[1]:
            kinds[content.kind].append(i)
    return [i for kind in KINDS for i in kinds[kind][: DRAWN[kind]]]


def _store(
    contents: list[Content],
    again: list[int],
    seed: int,
    folder: Path,
    workers: int,
    chunk: int = 100,
) -> None:
    firsts = {kind: sum(DEFAULT_COUNTS[k] for k in KINDS[:n]) for n, kind in enumerate(KINDS)}
    jobs: list[tuple[Kind, list[int]]] = []
    for kind in KINDS:
        mine = [i - firsts[kind] for i in again if contents[i].kind == kind]
        jobs += [(kind, mine[at : at + chunk]) for at in range(0, len(mine), chunk)]
    lengths = [math.prod(vit_grid_for(*contents[i].size, IMAGE_CONFIG)) for i in again]
    shape = (sum(lengths), 3, PATCH, PATCH)
    out = np.lib.format.open_memmap(folder / "packed.npy", "w+", np.dtype(np.uint8), shape)
    at, n = 0, 0
    with ProcessPoolExecutor(workers) as executor:
        for drawn, patches in executor.map(_draw_job, [(k, seed, i) for k, i in jobs]):
            for content, p in zip(drawn, patches, strict=True):
                assert content == contents[again[n]], "a scene came out differently"
                out[at : at + len(p)] = p
                at, n = at + len(p), n + 1
    out.flush()
    # The lengths come last: their presence says that the cache is whole.
    (folder / "lengths.json").write_text(json.dumps(lengths))
