"""A cache of drawn scenes on disk, so that training does not wait for drawing.

The cache is a function of (seed, counts); it lies under `training/.cache`, which git ignores, and can be deleted.
"""

from __future__ import annotations

import json
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import numpy.typing as npt
from PIL import Image, ImageOps

from training.cells import FAMILIES, NUM_CELLS, TILE, label_cells
from training.questions import KINDS_OF_TASK, Task
from training.scenes import KINDS, Content, Item, Kind, make_scene

CACHE = Path(__file__).parent / ".cache"
MAX_ITEMS = 5
FILL = (127, 127, 127)  # colour of the padding, as the processor computes it from a mean of 0.5
DEFAULT_COUNTS: dict[Kind, int] = {"shapes": 24000, "crowd": 14000, "digit": 12000, "word": 24000}


def to_tile(picture: Image.Image) -> npt.NDArray[np.uint8]:
    """The global view that the processor makes of a picture: [3, TILE, TILE] uint8 (spec 3.3)."""
    tile = ImageOps.pad(picture, (TILE, TILE), color=FILL)
    return np.asarray(tile, dtype=np.uint8).transpose(2, 0, 1)


@dataclass(frozen=True, slots=True, eq=False)
class Pool:
    """Drawn scenes: `tiles` [N, 3, TILE, TILE] uint8, labels as in `cells.CellLabels`, and the contents."""

    tiles: npt.NDArray[np.uint8]
    classes: npt.NDArray[np.uint8]
    owner: npt.NDArray[np.int8]
    centre: npt.NDArray[np.uint8]
    contents: list[Content]

    def members(self, task: Task) -> npt.NDArray[np.int64]:
        """Scenes that questions of `task` may be about."""
        kinds = KINDS_OF_TASK.get(task, KINDS)
        return np.array([i for i, c in enumerate(self.contents) if c.kind in kinds], dtype=np.int64)


_Chunk = tuple[
    npt.NDArray[np.uint8],
    npt.NDArray[np.uint8],
    npt.NDArray[np.int8],
    npt.NDArray[np.uint8],
    list[Content],
]


def draw_chunk(kind: Kind, seed: int, start: int, count: int, held_out: bool) -> _Chunk:
    """Draw and label scenes [start, start + count) of `kind`."""
    tiles = np.empty((count, 3, TILE, TILE), np.uint8)
    classes = np.empty((count, len(FAMILIES), NUM_CELLS), np.uint8)
    owner = np.empty((count, NUM_CELLS), np.int8)
    centre = np.zeros((count, MAX_ITEMS), np.uint8)
    contents = []
    for i in range(count):
        scene = make_scene(kind, seed, start + i, held_out=held_out)
        labels = label_cells(scene.content)
        tiles[i], classes[i], owner[i] = to_tile(scene.picture), labels.classes, labels.owner
        centre[i, : len(labels.centre)] = labels.centre
        contents.append(scene.content)
    return tiles, classes, owner, centre, contents


def draw_pool(
    seed: int, counts: dict[Kind, int], *, held_out: bool, workers: int = 1, chunk: int = 500
) -> Pool:
    """Draw a pool in memory."""
    jobs = [
        (kind, seed, start, min(chunk, count - start), held_out)
        for kind, count in counts.items()
        for start in range(0, count, chunk)
    ]
    if workers > 1:
        with ProcessPoolExecutor(workers) as executor:
            parts = list(executor.map(draw_chunk, *zip(*jobs, strict=True)))
    else:
        parts = [draw_chunk(*job) for job in jobs]
    arrays = [np.concatenate([part[field] for part in parts]) for field in range(4)]
    contents = [content for part in parts for content in part[4]]
    return Pool(arrays[0], arrays[1], arrays[2], arrays[3], contents)


def load_pool(seed: int, counts: dict[Kind, int], *, workers: int = 2) -> Pool:
    """The training pool from the cache; drawn and stored first when it is not there."""
    name = f"pool-{seed}-" + "-".join(f"{kind}{count}" for kind, count in counts.items())
    folder = CACHE / name
    if not (folder / "contents.json").exists():
        folder.mkdir(parents=True, exist_ok=True)
        _store(draw_pool(seed, counts, held_out=False, workers=workers), folder)
    arrays = {
        f: np.load(folder / f"{f}.npy", mmap_mode="r")
        for f in ("tiles", "classes", "owner", "centre")
    }
    contents = [_from_json(c) for c in json.loads((folder / "contents.json").read_text())]
    return Pool(contents=contents, **arrays)


def _store(pool: Pool, folder: Path) -> None:
    for field in ("tiles", "classes", "owner", "centre"):
        np.save(folder / f"{field}.npy", getattr(pool, field))
    values = [
        [c.kind, c.size, [[item.kind, item.name, item.colour, item.box] for item in c.items]]
        for c in pool.contents
    ]
    # The contents come last: their presence says that the cache is whole.
    (folder / "contents.json").write_text(json.dumps(values))


def _from_json(values: list[list[object]]) -> Content:
    kind, size, items = values
    made = [Item(k, n, c, (b[0], b[1], b[2], b[3])) for k, n, c, b in items]  # type: ignore[union-attr,misc]
    return Content(kind, (size[0], size[1]), tuple(made))  # type: ignore[arg-type,index]
