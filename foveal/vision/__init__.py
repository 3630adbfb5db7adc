"""Pictures: decoding files, cutting tiles, placing pictures in prompts, drawing boxes. Knows no torch and no model."""

from __future__ import annotations

from foveal.types import PrecomputedEmbeds, PrecomputedPatches, PrecomputedTiles
from foveal.vision.decode import load_picture
from foveal.vision.overlay import draw_boxes
from foveal.vision.precomputed import (
    check_image_embeds,
    check_pixel_values,
)
from foveal.vision.processor import VL2Processor
from foveal.vision.v4 import V4ImageConfig
from foveal.vision.v4_precomputed import check_patches
from foveal.vision.v4_processor import V4Processor
from foveal.vision.vl2 import VL2ImageConfig

__all__ = [
    "PrecomputedEmbeds",
    "PrecomputedPatches",
    "PrecomputedTiles",
    "V4ImageConfig",
    "V4Processor",
    "VL2ImageConfig",
    "VL2Processor",
    "check_image_embeds",
    "check_patches",
    "check_pixel_values",
    "draw_boxes",
    "load_picture",
]
