"""DeepSeek-VL2's view of a picture: which canvas, which tiles, how many tokens.

Bit-equal to the official processor, whose padding is Pillow's `ImageOps.pad` (spec 3.2-3.6). Pure functions of pixels
and configuration: it reads no file and knows no model. Sizes are (width, height) in pixels, grids are
(cols, rows) in tiles.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
from PIL import Image

from foveal.errors import CheckpointError
from foveal.text.chat_vl2 import IMAGE, SFT_FORMAT, check_sft_format

Size = tuple[int, int]
Tiles = npt.NDArray[np.uint8]

# With more pictures than this in the whole conversation, each is one global view and one full tile (spec 3.1).
MAX_TILED_PICTURES = 2
_HALF = (0.5, 0.5, 0.5)


@dataclass(frozen=True, slots=True)
class VL2ImageConfig:
    """What `processor_config.json` says about pictures.

    `candidate_resolutions` are the canvases (width, height) that a picture may be fitted to, in order; the first one is
    a tile. Pixels are (value / 255 - image_mean) / image_std a channel. `pad_colour` fills what a picture leaves of its
    canvas.
    """

    candidate_resolutions: tuple[Size, ...]
    patch_size: int
    downsample_ratio: int
    image_mean: tuple[float, ...] = _HALF
    image_std: tuple[float, ...] = _HALF
    pad_colour: tuple[int, ...] = (127, 127, 127)

    @property
    def image_size(self) -> int:
        """Side of a tile in pixels."""
        return self.candidate_resolutions[0][0]

    @property
    def tokens_per_side(self) -> int:
        """Tokens along one side of a tile."""
        return math.ceil((self.image_size // self.patch_size) / self.downsample_ratio)

    @classmethod
    def from_dict(cls, values: Mapping[str, Any]) -> VL2ImageConfig:
        """Read the processor's settings, with the official defaults (spec 1.6).

        Raises CheckpointError for missing keys, all of them at once, for values that describe no tiling, and for
        another chat format or image token.
        """
        required = ("candidate_resolutions", "patch_size", "downsample_ratio")
        missing = [name for name in required if name not in values]
        if missing:
            raise CheckpointError(
                f"processor_config.json lacks {', '.join(missing)}; take the file from the model's repository"
            )
        check_sft_format(values.get("sft_format", SFT_FORMAT))
        if values.get("image_token", IMAGE) != IMAGE:
            raise _wrong("image_token", values["image_token"], repr(IMAGE))
        mean = _channels(values, "image_mean")
        std = _channels(values, "image_std")
        if min(std) <= 0:
            raise _wrong("image_std", values["image_std"], "three numbers above 0")
        is_normalised = values.get("normalize", True)
        return cls(
            candidate_resolutions=_resolutions(values["candidate_resolutions"]),
            patch_size=_positive(values, "patch_size"),
            downsample_ratio=_positive(values, "downsample_ratio"),
            image_mean=mean if is_normalised else (0.0, 0.0, 0.0),
            image_std=std if is_normalised else (1.0, 1.0, 1.0),
            pad_colour=tuple(int(value * 255) for value in mean),
        )


def _wrong(name: str, value: object, rule: str) -> CheckpointError:
    return CheckpointError(f"processor_config.json: {name} is {value!r}; it must be {rule}")


def _is_count(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and value >= 1


def _positive(values: Mapping[str, Any], name: str) -> int:
    value = values[name]
    if not _is_count(value):
        raise _wrong(name, value, "a whole number of at least 1")
    return int(value)


def _channels(values: Mapping[str, Any], name: str) -> tuple[float, ...]:
    value = values.get(name, _HALF)
    numbers = isinstance(value, Sequence) and all(
        isinstance(x, int | float) and math.isfinite(x) for x in value
    )
    if not numbers or len(value) != 3:
        raise _wrong(name, value, "three numbers")
    return tuple(float(x) for x in value)


def _resolutions(value: object) -> tuple[Size, ...]:
    """Canvases as pairs; each side must be a whole number of tiles."""
    rule = (
        "a list of [width, height] pairs, a square tile first and whole numbers of tiles after it"
    )
    if not isinstance(value, Sequence) or isinstance(value, str) or not value:
        raise _wrong("candidate_resolutions", value, rule)
    for pair in value:
        is_pair = isinstance(pair, Sequence) and len(pair) == 2 and all(map(_is_count, pair))
        if not is_pair or pair[0] % value[0][0] or pair[1] % value[0][0]:
            raise _wrong("candidate_resolutions", value, f"{rule} (found {pair!r})")
    if value[0][0] != value[0][1]:
        raise _wrong("candidate_resolutions", value, rule)
    return tuple((int(width), int(height)) for width, height in value)


def is_tiled(num_pictures: int) -> bool:
    """Whether the pictures of a conversation with `num_pictures` of them, in all turns, are cut into tiles."""
    return num_pictures <= MAX_TILED_PICTURES


def select_best_resolution(width: int, height: int, candidates: Sequence[Size]) -> Size:
    """The canvas that keeps most of a picture's pixels and, among equals, wastes least; earlier ones win ties.

    Truncated float64 products, as the official code has them: exact arithmetic chooses otherwise for some sizes
    (607x2429, for one). Where every canvas scales a side to nothing, the least waste wins (spec 3.2).
    """
    best, best_kept, least_waste = candidates[0], 0, math.inf
    for canvas_width, canvas_height in candidates:
        scale = min(canvas_width / width, canvas_height / height)
        scaled = int(width * scale) * int(height * scale)
        kept = min(scaled, width * height)
        waste = canvas_width * canvas_height - kept
        if kept > best_kept or (kept == best_kept and waste < least_waste):
            best, best_kept, least_waste = (canvas_width, canvas_height), kept, waste
    return best


def grid_for(width: int, height: int, config: VL2ImageConfig, *, tiled: bool) -> Size:
    """The local tiles (cols, rows) of a picture; (1, 1) where pictures are not tiled."""
    if not tiled:
        return (1, 1)
    canvas = select_best_resolution(width, height, config.candidate_resolutions)
    return (canvas[0] // config.image_size, canvas[1] // config.image_size)


def num_image_tokens(cols: int, rows: int, tokens_per_side: int) -> int:
    """Tokens of a picture: global view, separator, mosaic of tiles; each row of tokens ends with a newline."""
    side = tokens_per_side
    return side * (side + 1) + 1 + rows * side * (cols * side + 1)


def make_tiles(
    rgb: npt.NDArray[np.uint8], config: VL2ImageConfig, *, tiled: bool
) -> tuple[Tiles, Size]:
    """Cut a picture. `rgb` [height, width, 3] uint8.

    Returns (tiles, grid): tiles uint8 [1 + cols*rows, 3, size, size], the global view first, then the tiles row by row.
    With a 1x1 grid the tile equals the global view and is there all the same.
    """
    height, width, _ = rgb.shape
    side = config.image_size
    cols, rows = grid_for(width, height, config, tiled=tiled)
    image = Image.fromarray(rgb)
    global_view = pad_to_canvas(image, (side, side), config.pad_colour)
    if (cols, rows) == (1, 1):
        mosaic = global_view
    else:
        mosaic = pad_to_canvas(image, (cols * side, rows * side), config.pad_colour)
    tiles = np.empty((1 + cols * rows, 3, side, side), dtype=np.uint8)
    tiles[0] = global_view.transpose(2, 0, 1)
    cut = mosaic.reshape(rows, side, cols, side, 3).transpose(0, 2, 4, 1, 3)
    tiles[1:] = cut.reshape(cols * rows, 3, side, side)
    return tiles, (cols, rows)


def pad_to_canvas(
    image: Image.Image, canvas: Size, colour: tuple[int, ...]
) -> npt.NDArray[np.uint8]:
    """The picture fitted into `canvas`, centred on `colour`: uint8 [height, width, 3].

    What `ImageOps.pad` of Pillow 13 gives, with any Pillow: bicubic, sides and offsets rounded half to even. A picture
    so thin that a side becomes 0 leaves the canvas empty.
    """
    width, height = _fitted(image.width, image.height, canvas)
    padded = np.empty((canvas[1], canvas[0], 3), dtype=np.uint8)
    padded[:] = np.array(colour, dtype=np.uint8)
    if width == 0 or height == 0:
        return padded
    resized = _resized(image, width, height)
    left = round((canvas[0] - width) * 0.5)
    top = round((canvas[1] - height) * 0.5)
    padded[top : top + height, left : left + width] = np.asarray(resized)
    return padded


def _resized(image: Image.Image, width: int, height: int) -> Image.Image:
    """Pillow's bicubic, one axis after the other in the order that Pillow 13 takes.

    Each pass rounds to 8 bits, so the order shows in the last bit; versions before 13 always begin with the width.
    """
    lost_width, lost_height = image.width - width, image.height - height
    is_height_first = lost_height > max(0, 2 * lost_width)
    between = (image.width, height) if is_height_first else (width, image.height)
    bicubic = Image.Resampling.BICUBIC
    return image.resize(between, bicubic).resize((width, height), bicubic)


def _fitted(width: int, height: int, canvas: Size) -> Size:
    """The size that a picture takes inside `canvas`: one side full, the other rounded half to even."""
    ratio, canvas_ratio = width / height, canvas[0] / canvas[1]
    if ratio > canvas_ratio:
        return canvas[0], round(height / width * canvas[0])
    if ratio < canvas_ratio:
        return round(width / height * canvas[1]), canvas[1]
    return canvas


def normalise(tiles: Tiles, config: VL2ImageConfig) -> npt.NDArray[np.float32]:
    """Pixels as the tower gets them: float32 of the same shape, rounded to it in each of three steps (spec 3.5)."""
    mean = np.array(config.image_mean, dtype=np.float32).reshape(3, 1, 1)
    std = np.array(config.image_std, dtype=np.float32).reshape(3, 1, 1)
    scaled: npt.NDArray[np.float32] = tiles.astype(np.float32) / np.float32(255)
    scaled -= mean
    scaled /= std
    return scaled
