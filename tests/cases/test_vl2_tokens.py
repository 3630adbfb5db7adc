"""Rows of the case log about DeepSeek-VL2's tokens and placeholders, as far as they need no server."""

from __future__ import annotations

import base64
import json
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from foveal.errors import PromptError
from foveal.messages import parse_messages
from foveal.text.tokenizer import Tokenizer
from foveal.types import Message, Picture
from foveal.vision import VL2ImageConfig, VL2Processor, load_picture
from tests.vision.pictures import encoded, noise


@pytest.fixture(scope="module")
def processor(golden_vl2: Path) -> VL2Processor:
    """The real tile numbers: 384 pixels, 23 canvases, 14x14 tokens a tile; no limit on the context."""
    checkpoint = golden_vl2 / "a_tiny_384" / "checkpoint"
    config = json.loads((checkpoint / "processor_config.json").read_text())
    return VL2Processor(VL2ImageConfig.from_dict(config), Tokenizer.load(checkpoint), None)


def picture(width: int, height: int) -> Picture:
    return Picture(np.full((height, width, 3), 90, np.uint8))


def lengths(processor: VL2Processor, *messages: Message) -> list[int]:
    return [item.length for item in processor.process_chat(messages).items]


@pytest.mark.parametrize(("count", "each"), [(1, 2101), (2, 2101), (3, 421), (4, 421)])
def test_C002_tiling_ends_with_the_third_picture(
    processor: VL2Processor, count: int, each: int
) -> None:
    tall = picture(400, 3600)
    prompt = processor.process_chat([Message("user", (*[tall] * count, "Compare."))])
    assert [item.length for item in prompt.items] == [each] * count
    assert processor.image_tokens(400, 3600, num_pictures=count) == each
    assert prompt.token_ids.count(processor.image_token_id) == each * count


def test_C003_a_third_picture_in_a_later_turn_changes_the_first_two(
    processor: VL2Processor,
) -> None:
    square = picture(1000, 1000)
    first = Message("user", (square, square, "Compare."))
    later = (Message("assistant", ("Equal.",)), Message("user", (square, "And this?")))
    assert lengths(processor, first) == [2017, 2017]
    assert lengths(processor, first, *later) == [421, 421, 421]
    first_only = processor.process_chat([first]).token_ids
    whole = processor.process_chat([first, *later]).token_ids
    assert whole[: len(first_only)] != first_only, "an old prefix must not fit"


def test_C030_turned_pictures_differ_in_tiles(processor: VL2Processor) -> None:
    wide, tall = (
        processor.process_chat([Message("user", (picture(*size), "What?"))]).items[0]
        for size in ((150, 30), (30, 150))
    )
    assert wide.tiles is not None
    assert tall.tiles is not None
    assert wide.tiles.shape != tall.tiles.shape or (wide.tiles != tall.tiles).any()


def test_C067_a_data_url_is_a_picture_and_not_text(processor: VL2Processor) -> None:
    data = encoded(Image.fromarray(noise(700, 420)), "JPEG", quality=95)
    assert len(data) > 200_000
    url = "data:image/jpeg;base64," + base64.b64encode(data).decode()
    message = {
        "role": "user",
        "content": [
            {"type": "image_url", "image_url": {"url": url}},
            {"type": "text", "text": "Which colour?"},
        ],
    }
    prompt = processor.process_chat(parse_messages([message], load_picture))
    assert prompt.num_image_tokens == processor.image_tokens(700, 420)
    assert prompt.num_tokens - prompt.num_image_tokens < 40


def test_C076_each_placeholder_needs_its_picture(processor: VL2Processor) -> None:
    prompt = processor.process_prompt("<image>\nWhich colour?", [picture(100, 100)])
    assert prompt.num_image_tokens == 421
    with pytest.raises(PromptError, match=r"2 <image> placeholders, but 1 pictures"):
        processor.process_prompt("<image>\n<image>\nWhich colour?", [picture(100, 100)])


def test_C072_image_as_characters_stays_text(processor: VL2Processor) -> None:
    prompt = processor.process_chat(
        [Message("system", ("Write alt text like <image> in HTML.",)), Message("user", ("Hi",))]
    )
    assert prompt.items == ()
    assert processor.image_token_id not in prompt.token_ids
