"""Rows of the case log about pictures of DeepSeek-V4, from files to slots; the log's table of sizes."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from foveal.errors import PromptError
from foveal.text.tokenizer import BOS, Tokenizer
from foveal.types import Picture, V4MediaItem
from foveal.vision.decode import load_picture
from foveal.vision.v4 import block_length, llm_grid_for, vit_grid_for
from foveal.vision.v4_processor import PLACEHOLDER, V4Processor
from tests.vision.pictures import encoded
from tests.vision.v4_pictures import REAL


@pytest.fixture(scope="module")
def processor(golden: Path) -> V4Processor:
    """The real size rules, no limit on the context."""
    checkpoint = golden / "v4_vision" / "vision_real_tiles" / "checkpoint"
    return V4Processor(REAL, Tokenizer.load(checkpoint), 512, None)


# size: resized size and slots without alignment pads
SLOTS = {
    (1, 1): ((392, 392), 114),
    (24, 16): ((476, 322), 106),
    (257, 27): ((1092, 140), 110),
    (384, 384): ((392, 392), 114),
    (640, 480): ((644, 490), 206),
    (1000, 1000): ((756, 756), 346),
    (1920, 1080): ((1036, 588), 366),
    (1080, 1920): ((560, 1008), 362),
    (4000, 3000): ((882, 658), 354),
    (2000, 2000): ((756, 756), 346),
    (4000, 4000): ((756, 756), 346),
    (8192, 8192): ((756, 756), 346),
    (3600, 400): ((2016, 252), 298),
    (400, 3600): ((210, 1890), 278),
    (10000, 4): ((1092, 140), 110),
    (4, 10000): ((42, 7896), 378),
}


@pytest.mark.parametrize(("size", "expected"), SLOTS.items())
def test_slots_of_the_logs_sizes(
    size: tuple[int, int], expected: tuple[tuple[int, int], int]
) -> None:
    rows, cols = vit_grid_for(*size, REAL)
    assert ((cols * 14, rows * 14), block_length(llm_grid_for((rows, cols), REAL))) == expected


@pytest.mark.parametrize(
    ("case", "size", "cells", "slots"),
    [
        ("C059", (257, 27), (4, 26), 110),
        ("C060", (1, 1), (10, 10), 114),
        ("C061", (4, 10000), (188, 1), 378),
        ("C061", (10000, 4), (4, 26), 110),
        ("C061", (1, 10000), (188, 1), 378),
        ("C061", (10000, 1), (4, 26), 110),
        ("C062", (3600, 400), (6, 48), 298),
        ("C062", (400, 3600), (45, 5), 278),
    ],
)
def test_C059_C060_C061_C062_odd_sizes_get_their_slots(
    processor: V4Processor, case: str, size: tuple[int, int], cells: tuple[int, int], slots: int
) -> None:
    picture = load_picture(encoded(Image.new("RGB", size, "white"), "PNG"))
    prompt = processor.process_rendered(f"{BOS}abc{PLACEHOLDER}?", [picture])
    (item,) = prompt.items
    assert isinstance(item, V4MediaItem)
    assert (item.llm_grid, item.length - item.num_pads) == (cells, slots)
    assert item.size == size
    assert item.patches is not None
    assert item.patches.shape == (item.vit_grid[0] * item.vit_grid[1], 3, 14, 14)
    assert (item.patches == 255).any(), "some of the picture is there"


def test_C076_each_placeholder_needs_its_picture(processor: V4Processor) -> None:
    picture = Picture(np.full((100, 100, 3), 90, np.uint8))
    assert processor.process_rendered(f"{BOS}{PLACEHOLDER} What?", [picture]).num_image_tokens > 0
    with pytest.raises(PromptError, match=r"2 .* placeholders, but 1 pictures"):
        processor.process_rendered(f"{BOS}{PLACEHOLDER}{PLACEHOLDER} What?", [picture])
