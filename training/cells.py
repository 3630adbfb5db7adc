"""What each cell of the model's view of a picture shows: the labels of the auxiliary losses.

The model sees a picture padded and scaled to TILE x TILE pixels, as CELLS x CELLS cells of the projector. Only
training uses these labels; the finished model holds nothing of them.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from training.drawing import COLOURS, SHAPES
from training.questions import norm_box
from training.scenes import CELLS, Content, Item

TILE = 96
NUM_CELLS = CELLS * CELLS
NONE = 255  # the family does not apply to the cell
LEAST_SHARE = 0.2  # of a cell's area, for an item to own the cell

# Families of classes and how many classes each has. Coordinates are two families each: hundreds and tens of 0..999.
COORDINATES = ("x1", "y1", "x2", "y2")
FAMILIES: dict[str, int] = {
    "what": 4,
    "colour": len(COLOURS),
    "shape": len(SHAPES),
    "digit": 10,
    "letter": 26,
    "order": 5,
    "last": 2,
    "centre": 2,
    **{f"{c}_{place}": 10 for place in ("hundreds", "tens") for c in COORDINATES},
}
# How much each family counts in the loss. Letters and handwriting take the tower longest.
FAMILY_WEIGHTS: dict[str, float] = {
    "what": 1.0,
    "colour": 1.0,
    "shape": 1.5,
    "digit": 2.0,
    "letter": 3.0,
    "order": 1.0,
    "last": 0.5,
    "centre": 1.0,
    **{f"{c}_hundreds": 0.6 for c in COORDINATES},
    **{f"{c}_tens": 0.6 for c in COORDINATES},
}
# Length of a family's part of a symbolic cell. Eight families of coordinates at full length would drown colour and
# shape.
FAMILY_SCALES: dict[str, float] = {
    name: 0.5 if name.endswith("hundreds") else 0.3 if name.endswith("tens") else 1.0
    for name in FAMILIES
}
_INDEX = {name: i for i, name in enumerate(FAMILIES)}
_WHAT = {"shape": 1, "digit": 2, "letter": 3}


@dataclass(frozen=True, slots=True)
class CellLabels:
    """`classes` [families, cells] uint8, NONE where a family does not apply; `owner` [cells] int8, -1 for background;
    `centre` [items] uint8: the cell of each item's centre."""

    classes: npt.NDArray[np.uint8]
    owner: npt.NDArray[np.int8]
    centre: npt.NDArray[np.uint8]


def tile_box(item: Item, size: tuple[int, int]) -> tuple[float, float, float, float]:
    """The item's box in pixels of the padded tile."""
    scale = TILE / max(size)
    left, top = (TILE - size[0] * scale) / 2, (TILE - size[1] * scale) / 2
    x1, y1, x2, y2 = item.box
    return x1 * scale + left, y1 * scale + top, x2 * scale + left, y2 * scale + top


def label_cells(content: Content) -> CellLabels:
    """Give each cell to the item that covers most of it."""
    pitch = TILE / CELLS
    edges = np.arange(CELLS) * pitch
    boxes = np.array([tile_box(item, content.size) for item in content.items])
    across = np.minimum(boxes[:, 2:3], edges + pitch) - np.maximum(boxes[:, 0:1], edges)
    down = np.minimum(boxes[:, 3:4], edges + pitch) - np.maximum(boxes[:, 1:2], edges)
    cover = (down.clip(0)[:, :, None] * across.clip(0)[:, None, :]).reshape(len(boxes), -1)
    owner = np.where(cover.max(0) >= LEAST_SHARE * pitch**2, cover.argmax(0), -1).astype(np.int8)
    middle = np.clip((boxes[:, :2] + boxes[:, 2:]) / 2 / pitch, 0, CELLS - 1).astype(int)
    centre = (middle[:, 1] * CELLS + middle[:, 0]).astype(np.uint8)
    owner[centre] = np.arange(len(boxes))
    classes = np.full((len(FAMILIES), NUM_CELLS), NONE, np.uint8)
    classes[_INDEX["what"]] = 0
    classes[_INDEX["centre"]] = 0
    for i in range(len(content.items)):
        mine = owner == i
        for family, value in item_classes(content, i).items():
            classes[_INDEX[family], mine] = value
        classes[_INDEX["centre"], centre[i]] = 1
    return CellLabels(classes, owner, centre)


def item_classes(content: Content, i: int) -> dict[str, int]:
    """The classes that item `i` gives to its cells."""
    item = content.items[i]
    values = {"what": _WHAT[item.kind]}
    if item.kind == "letter":
        is_last = i == len(content.items) - 1
        return values | {"letter": ord(item.name) - ord("A"), "order": i, "last": int(is_last)}
    if item.kind == "digit":
        return values | {"digit": int(item.name)}
    values |= {"colour": list(COLOURS).index(item.colour), "shape": SHAPES.index(item.name)}
    for name, value in zip(COORDINATES, norm_box(item, content.size), strict=True):
        values |= {f"{name}_hundreds": value // 100, f"{name}_tens": value // 10 % 10}
    return values
