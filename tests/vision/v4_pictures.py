"""What tests of DeepSeek-V4's pictures share: the released numbers, and slow truths to compare with."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from foveal.vision.v4 import END, START, V4ImageConfig

REAL_KEYS: dict[str, Any] = {
    "vision_patch_size": 14,
    "vision_downsample_ratio": 3,
    "vision_max_n_token": 384,
    "vision_min_pixels": 147456,
    "vision_max_wh_ratio": 8,
}
REAL = V4ImageConfig.from_dict(REAL_KEYS)
SMALL = V4ImageConfig(8, 2, 48, 2304, 4)  # the numbers of the golden variant vision_small


def normalised(patches: npt.NDArray[np.uint8]) -> npt.NDArray[np.float32]:
    """Pixels as the tower gets them, before they are rounded to bfloat16."""
    scaled: npt.NDArray[np.float32] = patches.astype(np.float32) / np.float32(255)
    return (scaled - np.float32(0.5)) / np.float32(0.5)


def span_reach(
    ids: Sequence[int], vocab_size: int
) -> tuple[npt.NDArray[np.int64], npt.NDArray[np.int64]]:
    """How far each token sees to the left and to the right inside its picture, token by token (spec 6.1)."""
    left, right = np.zeros((2, len(ids)), dtype=np.int64)
    start = -1
    for position, token_id in enumerate(ids):
        if token_id == vocab_size + START:
            start = position
        elif token_id == vocab_size + END:
            inside = np.arange(start, position + 1)
            left[inside], right[inside] = inside - start, position - inside
            start = -1
    return left, right
