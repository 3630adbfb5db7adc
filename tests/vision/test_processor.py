"""Prompts with pictures: equal to the official processor's on every golden case, and what is refused."""

from __future__ import annotations

import hashlib
import json
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import load_file

from foveal.errors import MediaError, PromptError, PromptTooLongError
from foveal.text.tokenizer import Tokenizer
from foveal.types import Message, Picture, Prompt
from foveal.vision import (
    PrecomputedEmbeds,
    PrecomputedTiles,
    VL2ImageConfig,
    VL2Processor,
    load_picture,
)
from foveal.vision.vl2 import normalise
from tests.vision.pictures import noise


@cache
def processor_of(checkpoint: Path, max_tokens: int | None = 4096) -> VL2Processor:
    config = json.loads((checkpoint / "processor_config.json").read_text())
    return VL2Processor(
        VL2ImageConfig.from_dict(config), Tokenizer.load(checkpoint), max_tokens, embeds_width=64
    )


@pytest.fixture
def tiny(golden_vl2: Path) -> VL2Processor:
    """Tiles of 100 pixels, 4x4 tokens each."""
    return processor_of(golden_vl2 / "a_tiny" / "checkpoint")


def picture(width: int, height: int, seed: int = 0) -> Picture:
    return Picture(noise(width, height, seed=seed))


# --- golden cases -------------------------------------------------------------------------------


@cache
def golden_picture(path: Path) -> Picture:
    return load_picture(path, mode="vendor")


def golden_prompts(case: Path) -> tuple[dict[str, Any], list[Prompt]]:
    facts = json.loads(case.read_text())
    rows = facts["conversation"]
    rows = rows if isinstance(rows[0], list) else [rows]
    processor = processor_of(case.parents[1] / "checkpoint")
    folder = case.parents[2] / "images"
    prompts = []
    for row in rows:
        names = [name for message in row for name in message.get("images") or ()]
        pictures = [golden_picture(folder / f"{name}.png") for name in names]
        prompts.append(processor.process_conversation(row, pictures))
    return facts, prompts


def padded(rows: list[list[Any]], length: int, fill: Any) -> np.ndarray:
    return np.array([[fill] * (length - len(row)) + row for row in rows])


def image_mask(prompt: Prompt) -> list[bool]:
    mask = [False] * prompt.num_tokens
    for item in prompt.items:
        mask[item.start : item.start + item.length] = [True] * item.length
    return mask


def test_golden_prompts_are_equal(golden_vl2: Path) -> None:
    cases = sorted(golden_vl2.glob("*/cases/*.json"))
    assert len(cases) >= 40
    for case in cases:
        where = f"{case.parents[1].name}/{case.stem}"
        facts, prompts = golden_prompts(case)
        tensors = load_file(case.with_suffix(".safetensors"))
        ids = tensors["input_ids"]
        pad = processor_of(case.parents[1] / "checkpoint").tokenizer.pad_id
        actual = padded([list(p.token_ids) for p in prompts], ids.shape[1], pad)
        np.testing.assert_array_equal(actual, ids, err_msg=where)
        masks = padded([image_mask(p) for p in prompts], ids.shape[1], False)
        np.testing.assert_array_equal(masks, tensors["images_seq_mask"].astype(bool), err_msg=where)
        ones = padded([[1] * p.num_tokens for p in prompts], ids.shape[1], 0)
        np.testing.assert_array_equal(ones, tensors["attention_mask"], err_msg=where)
        assert [p.num_tokens for p in prompts] == facts["seq_lens"], where
        assert [[i.length for i in p.items] for p in prompts] == facts["num_image_tokens"], where
        most = max(1, *(len(p.items) for p in prompts))
        grids = [[list(i.grid) for i in p.items] for p in prompts]
        grids = [row + [[0, 0]] * (most - len(row)) for row in grids]
        np.testing.assert_array_equal(grids, tensors["images_spatial_crop"], err_msg=where)
        assert grids == facts["images_spatial_crop"], where


def golden_sizes(facts: dict[str, Any], folder: Path) -> list[list[tuple[int, int]]]:
    rows = facts["conversation"]
    rows = rows if isinstance(rows[0], list) else [rows]
    names = [[n for message in row for n in message.get("images") or ()] for row in rows]
    pictures = [[golden_picture(folder / f"{n}.png") for n in row] for row in names]
    return [[(p.width, p.height) for p in row] for row in pictures]


def test_golden_pixels_are_equal_bit_for_bit(golden_vl2: Path) -> None:
    num_exact = 0
    for case in sorted(golden_vl2.glob("*/cases/*.json")):
        where = f"{case.parents[1].name}/{case.stem}"
        facts, prompts = golden_prompts(case)
        config = processor_of(case.parents[1] / "checkpoint").image_config
        tiles = [i.tiles for p in prompts for i in p.items if i.tiles is not None]
        if not tiles:
            continue
        pixels = normalise(np.concatenate(tiles), config)
        tensors = load_file(case.with_suffix(".safetensors"))
        if "pixel_values" in tensors:
            np.testing.assert_array_equal(pixels, tensors["pixel_values"], err_msg=where)
        else:
            big = facts["big_tensors"]["pixel_values"]
            assert list(pixels.shape) == big["shape"], where
            sample = tensors["pixel_values.sample"]
            np.testing.assert_array_equal(pixels.ravel()[:: big["sample_step"]], sample, where)
            assert hashlib.sha256(pixels.tobytes()).hexdigest() == big["sha256_fp32_bytes"], where
            num_exact += 1
        sizes = [[i.size for i in p.items] for p in prompts]
        assert sizes == golden_sizes(facts, case.parents[2] / "images"), where
    assert num_exact >= 10


# --- chat messages ------------------------------------------------------------------------------


def test_chat_ids_equal_the_golden_form(tiny: VL2Processor) -> None:
    pictures = [picture(120, 300), picture(40, 30)]
    chat = tiny.process_chat(
        [
            Message("system", ("Be brief.",)),
            Message("user", (pictures[0], "What is shown?")),
            Message("assistant", ("A board.",)),
            Message("user", (pictures[1], "And here?")),
        ]
    )
    golden = tiny.process_conversation(
        [
            {"role": "system", "content": "Be brief."},
            {"role": "<|User|>", "content": "<image>\nWhat is shown?"},
            {"role": "<|Assistant|>", "content": "A board."},
            {"role": "<|User|>", "content": "<image>\nAnd here?"},
            {"role": "<|Assistant|>", "content": ""},
        ],
        pictures,
    )
    assert chat.token_ids == golden.token_ids
    assert [(i.grid, i.start, i.length, i.size) for i in chat.items] == [
        (i.grid, i.start, i.length, i.size) for i in golden.items
    ]
    for one, other in zip(chat.items, golden.items, strict=True):
        np.testing.assert_array_equal(one.tiles, other.tiles)


def test_typed_placeholders_are_text_and_no_picture(tiny: VL2Processor) -> None:
    prompt = tiny.process_chat([Message("user", ("What does <image> do in a prompt?",))])
    assert tiny.image_token_id not in prompt.token_ids
    assert prompt.items == ()
    with_picture = tiny.process_chat([Message("user", (picture(30, 20), "Is <image> a tag?"))])
    (item,) = with_picture.items
    assert with_picture.token_ids.count(tiny.image_token_id) == item.length == 41


def test_items_lie_where_the_placeholders_are(tiny: VL2Processor) -> None:
    prompt = tiny.process_chat([Message("user", (picture(30, 20), picture(120, 300), "Compare."))])
    inside = {p for i in prompt.items for p in range(i.start, i.start + i.length)}
    placeholders = {p for p, t in enumerate(prompt.token_ids) if t == tiny.image_token_id}
    assert inside == placeholders
    assert prompt.num_image_tokens == len(placeholders)


@pytest.mark.parametrize("part", [b"bytes", 5, None])
def test_parts_that_are_no_picture_are_refused(tiny: VL2Processor, part: Any) -> None:
    with pytest.raises(PromptError, match=f"is a {type(part).__name__}"):
        tiny.process_chat([Message("user", (part, "What is it?"))])


def test_the_longest_prompt_fits_exactly(golden_vl2: Path, tiny: VL2Processor) -> None:
    messages = [Message("user", (picture(30, 20), "What is in this picture?"))]
    total = tiny.process_chat(messages).num_tokens
    checkpoint = golden_vl2 / "a_tiny" / "checkpoint"
    assert processor_of(checkpoint, total).process_chat(messages).num_tokens == total
    assert processor_of(checkpoint, None).process_chat(messages).num_tokens == total
    with pytest.raises(PromptTooLongError) as caught:
        processor_of(checkpoint, total - 1).process_chat(messages)
    text = total - 41
    assert f"{total} tokens ({text} of text, 41 of 1 pictures: 41)" in str(caught.value)
    assert f"context is {total - 1}" in str(caught.value)


def test_a_prompt_that_is_too_long_is_refused_before_pictures_are_cut(
    golden_vl2: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def never(*_args: object, **_kwargs: object) -> None:
        raise AssertionError("tiles were made")

    monkeypatch.setattr("foveal.vision.processor.make_tiles", never)
    processor = processor_of(golden_vl2 / "a_tiny" / "checkpoint", 50)
    with pytest.raises(PromptTooLongError):
        processor.process_chat([Message("user", (picture(100, 1000), "What?"))])


def test_image_tokens_follow_the_number_of_pictures(tiny: VL2Processor) -> None:
    whole = tiny.process_chat([Message("user", (picture(120, 300), "What?"))])
    assert tiny.image_tokens(120, 300) == whole.num_image_tokens == 129
    assert tiny.image_tokens(120, 300, num_pictures=2) == 129
    assert tiny.image_tokens(120, 300, num_pictures=3) == 41


@pytest.mark.parametrize("num_pictures", [0, 1, 3])
def test_a_conversation_needs_a_picture_for_each_placeholder(
    tiny: VL2Processor, num_pictures: int
) -> None:
    conversation = [
        {"role": "user", "content": "<image>\n<image>\nCompare."},
        {"role": "assistant", "content": ""},
    ]
    message = f"has 2 <image> placeholders, but {num_pictures} pictures came"
    with pytest.raises(PromptError, match=message):
        tiny.process_conversation(conversation, [picture(4, 4)] * num_pictures)


# --- precomputed pictures -----------------------------------------------------------------------


def test_tiles_fed_back_give_the_same_prompt(tiny: VL2Processor) -> None:
    pictures = [picture(120, 300), picture(30, 20)]
    messages = [Message("user", (*pictures, "Compare."))]
    prompt = tiny.process_chat(messages)
    values = [normalise(i.tiles, tiny.image_config) for i in prompt.items if i.tiles is not None]
    ready = tiny.precomputed(
        pixel_values=np.concatenate(values), images_spatial_crop=[i.grid for i in prompt.items]
    )
    again = tiny.process_chat([Message("user", (*ready, "Compare."))])  # type: ignore[arg-type]
    assert again.token_ids == prompt.token_ids
    for item, expected, old in zip(again.items, values, prompt.items, strict=True):
        assert (item.grid, item.start, item.length) == (old.grid, old.start, old.length)
        assert item.tiles is None
        assert item.embeds is None
        np.testing.assert_array_equal(item.pixel_values, expected)


def test_rows_set_the_number_of_placeholders(tiny: VL2Processor) -> None:
    embeds = [np.ones((7, 64), np.float32), np.ones((3, 64), np.float16)]
    conversation = [
        {"role": "user", "content": "<image>\nand <image>"},
        {"role": "assistant", "content": ""},
    ]
    prompt = tiny.process_conversation(conversation, tiny.precomputed(image_embeds=embeds))
    assert [item.length for item in prompt.items] == [7, 3]
    assert prompt.token_ids.count(tiny.image_token_id) == 10
    for item, rows in zip(prompt.items, embeds, strict=True):
        assert (item.tiles, item.pixel_values) == (None, None)
        assert item.embeds is not None
        assert item.embeds.dtype == np.float32
        np.testing.assert_array_equal(item.embeds, rows.astype(np.float32))


def test_precomputed_pictures_count_for_the_two_picture_rule(tiny: VL2Processor) -> None:
    ready = [PrecomputedEmbeds(np.ones((5, 64), np.float32))] * 2
    prompt = tiny.process_prompt("<image><image><image>", [*ready, picture(120, 300)])
    assert [item.length for item in prompt.items] == [5, 5, 41]


def test_pixel_values_win_over_embeds_and_nothing_is_no_picture(tiny: VL2Processor) -> None:
    assert tiny.precomputed() == []
    tiles = np.zeros((2, 3, 100, 100), np.float32)
    (ready,) = tiny.precomputed(
        pixel_values=tiles, images_spatial_crop=[[1, 1]], image_embeds=np.zeros((1, 5, 64))
    )
    assert isinstance(ready, PrecomputedTiles)


def test_precomputed_pictures_are_checked_however_they_come(tiny: VL2Processor) -> None:
    wrong_grid = PrecomputedTiles(np.zeros((3, 3, 100, 100), np.float32), (1, 1))
    with pytest.raises(MediaError, match=r"has 3 tiles, .* needs 2"):
        tiny.process_prompt("<image>", [wrong_grid])
    wrong_width = PrecomputedEmbeds(np.zeros((3, 65), np.float32))
    with pytest.raises(MediaError, match=r"dim\[1\] expected 64, got 65"):
        tiny.process_prompt("<image>", [wrong_width])
    with pytest.raises(MediaError, match=r"dim\[2\] expected 100, got 384"):
        tiny.precomputed(
            pixel_values=np.zeros((2, 3, 384, 384), np.float32), images_spatial_crop=[[1, 1]]
        )
