"""DeepSeek-V4 prompts with pictures: equal to the golden cases, and what is refused."""

from __future__ import annotations

import json
import shutil
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file

from foveal.errors import CheckpointError, MediaError, PromptError, PromptTooLongError
from foveal.runner.v4_cache import Span, V4SequenceCache
from foveal.text.tokenizer import BOS, Tokenizer
from foveal.types import Picture, Prompt, V4MediaItem
from foveal.vision.decode import load_picture
from foveal.vision.v4 import END, IMAGE, PAD, START, V4ImageConfig
from foveal.vision.v4_ids import (
    BORROWED_TOKENS,
    RELEASED_BORROWED,
    borrowed_ids,
    canonical_ids,
)
from foveal.vision.v4_precomputed import PrecomputedPatches, round_to_bfloat16
from foveal.vision.v4_processor import PLACEHOLDER, V4Processor
from tests.v4_toy import config as toy_config
from tests.vision.pictures import noise
from tests.vision.v4_pictures import normalised, span_reach

VOCAB = 512
VARIANTS = ("vision_small", "vision_real_tiles")


@cache
def processor_of(checkpoint: Path, max_tokens: int | None = 4096) -> V4Processor:
    config = json.loads((checkpoint / "config.json").read_text())
    image_config = V4ImageConfig.from_dict(config)
    return V4Processor(image_config, Tokenizer.load(checkpoint), config["vocab_size"], max_tokens)


@pytest.fixture
def checkpoint(golden: Path) -> Path:
    return golden / "v4_vision" / "vision_small" / "checkpoint"


@pytest.fixture
def small(checkpoint: Path) -> V4Processor:
    """Patches of 8 pixels, cells of 2x2, blocks of at most 48 tokens."""
    return processor_of(checkpoint)


def picture(width: int, height: int, seed: int = 0) -> Picture:
    return Picture(noise(width, height, seed=seed))


def items_of(prompt: Prompt) -> list[V4MediaItem]:
    items = [item for item in prompt.items if isinstance(item, V4MediaItem)]
    assert len(items) == len(prompt.items)
    return items


# --- golden cases -------------------------------------------------------------------------------

GOLDEN_CASES = (
    *(("vision_small", n) for n in ("image_first", "image_mid", "image_rgba", "image_tall")),
    *(("vision_small", n) for n in ("image_wide", "text_only", "three_images", "two_images")),
    *(("vision_real_tiles", n) for n in ("image_first", "text_only", "two_images")),
)


@pytest.fixture(params=GOLDEN_CASES, ids="/".join)
def case(request: pytest.FixtureRequest, golden: Path) -> tuple[dict[str, Any], Any, Prompt]:
    """Facts, tensors, and the prompt that we make."""
    variant, name = request.param
    folder = golden / "v4_vision" / variant
    facts = json.loads((folder / "cases" / f"{name}.json").read_text())
    tensors = load_file(folder / "cases" / f"{name}.safetensors")
    pictures = [
        load_picture(golden / "v4_vision" / "images" / f"{image}.png", mode="vendor")
        for image in facts["images"]
    ]
    text = facts["rendered"].replace("<bos>", BOS)
    prompt = processor_of(folder / "checkpoint").process_rendered(text, pictures)
    assert [item.size for item in items_of(prompt)] == [(p.width, p.height) for p in pictures]
    return facts, tensors, prompt


def test_every_golden_case_is_listed(golden: Path) -> None:
    found = {(p.parents[1].name, p.stem) for p in (golden / "v4_vision").glob("*/cases/*.json")}
    assert found == set(GOLDEN_CASES)


def test_golden_ids_and_blocks_are_equal(case: tuple[dict[str, Any], Any, Prompt]) -> None:
    facts, tensors, prompt = case
    assert list(prompt.token_ids) == tensors["input_ids"][0].tolist()
    assert prompt.num_tokens == facts["length"]
    items = items_of(prompt)
    blocks = [
        {
            "start": item.start,
            "num_tokens": item.length,
            "vit_grid_hw": list(item.vit_grid),
            "llm_grid_hw": list(item.llm_grid),
        }
        for item in items
    ]
    assert blocks == facts["image_blocks"]
    for k, item in enumerate(items):
        assert item.types.dtype == item.perm.dtype == np.int64
        assert item.types.tolist() == tensors[f"image{k}.types"].tolist()
        assert item.perm.tolist() == tensors[f"image{k}.perm"].tolist()


def test_golden_patches_are_equal(case: tuple[dict[str, Any], Any, Prompt]) -> None:
    _, tensors, prompt = case
    for k, item in enumerate(items_of(prompt)):
        assert item.patches is not None
        assert item.patch_values is None
        pixels = torch.from_numpy(item.patches).float()
        values = ((pixels / 255 - 0.5) / 0.5).bfloat16()
        ours = torch.from_numpy(round_to_bfloat16(normalised(item.patches))).bfloat16()
        assert torch.equal(values, ours), "numpy and torch round alike"
        name = f"image{k}.patches"
        if name in tensors:
            assert torch.equal(values, tensors[name])
        else:
            assert torch.equal(values.flatten()[::97], tensors[f"{name}.sample_every_97"])


def test_golden_visibility_is_equal(case: tuple[dict[str, Any], Any, Prompt]) -> None:
    """From the ids by the rule of the release, and from the items' spans as the cache has it."""
    _, tensors, prompt = case
    left, right = span_reach(prompt.token_ids, VOCAB)
    assert left.tolist() == tensors["visible_left"][0].tolist()
    assert right.tolist() == tensors["visible_right"][0].tolist()
    spans = [Span(*item.span) for item in items_of(prompt)]
    cache = V4SequenceCache(toy_config(sliding_window=1).language, prompt.num_tokens, spans=spans)
    first, last = cache.visible_range(0, prompt.num_tokens)
    positions = np.arange(prompt.num_tokens)
    np.testing.assert_array_equal(positions - first.numpy(), left)
    np.testing.assert_array_equal(last.numpy() - positions, right)


def test_display_mode_lays_transparent_pictures_on_white(golden: Path, small: V4Processor) -> None:
    path = golden / "v4_vision" / "images" / "rgba_200x150.png"
    both = [load_picture(path), load_picture(path, mode="vendor")]
    shown, vendor = (items_of(small.process_segments([[0], []], [p]))[0] for p in both)
    assert shown.patches is not None
    assert vendor.patches is not None
    assert shown.patches.shape == vendor.patches.shape
    assert (shown.patches != vendor.patches).any()


# --- segments -----------------------------------------------------------------------------------


def test_pads_follow_from_the_position_in_the_expanded_prompt(small: V4Processor) -> None:
    square = picture(64, 64)
    for before in range(9):
        prompt = small.process_segments([[5] * before, [6], [7, 8]], [square, square])
        one, two = items_of(prompt)
        assert one.start == before
        assert two.start == before + one.length + 1
        for item in (one, two):
            assert item.num_pads == 3 - item.start % 4
            assert item.types[: item.num_pads].tolist() == [PAD] * item.num_pads
            assert prompt.token_ids[item.span[0]] == VOCAB + START
            assert prompt.token_ids[item.span[1]] == VOCAB + END
            assert item.span[0] % 4 == 3
        expected = [5] * before + (VOCAB + one.types).tolist() + [6]
        expected += [*(VOCAB + two.types).tolist(), 7, 8]
        assert list(prompt.token_ids) == expected
        assert prompt.num_image_tokens == one.length + two.length


def test_a_picture_may_stand_first_and_last(small: V4Processor) -> None:
    (item,) = items_of(small.process_segments([[], []], [picture(64, 64)]))
    assert (item.start, item.num_pads) == (0, 3)


def test_text_alone_needs_no_picture_settings(checkpoint: Path) -> None:
    text_model = V4Processor(None, Tokenizer.load(checkpoint), VOCAB, None)
    ids = text_model.tokenizer.encode("What is the sea?")
    for prompt in (
        text_model.process_segments([ids]),
        text_model.process_rendered("What is the sea?"),
        text_model.process_ids(ids),
    ):
        assert list(prompt.token_ids) == ids
        assert prompt.items == ()


@pytest.mark.parametrize("segments", [[[]], [[], []]])
def test_an_empty_prompt_is_refused(small: V4Processor, segments: list[list[int]]) -> None:
    pictures = [picture(8, 8)] * (len(segments) - 1)
    if pictures:
        assert small.process_segments(segments, pictures).num_tokens > 0
    else:
        with pytest.raises(PromptError, match="has no tokens"):
            small.process_segments(segments, pictures)


@pytest.mark.parametrize("bad", [-1, VOCAB, VOCAB + IMAGE, VOCAB + 7])
def test_text_cannot_smuggle_in_picture_tokens(small: V4Processor, bad: int) -> None:
    with pytest.raises(PromptError, match=f"token id {bad} at position 2 .* has 512 entries"):
        small.process_segments([[1, 2, bad]])


@pytest.mark.parametrize("wrong", ["a.png", b"bytes", None, np.zeros((4, 4, 3), np.uint8)])
def test_what_is_no_picture_is_refused(small: V4Processor, wrong: Any) -> None:
    with pytest.raises(PromptError, match=f"a picture is a {type(wrong).__name__}"):
        small.process_segments([[0], [1]], [wrong])


# --- limits -------------------------------------------------------------------------------------


def test_the_longest_prompt_fits_exactly(checkpoint: Path, small: V4Processor) -> None:
    pictures = [picture(64, 64), picture(30, 20)]
    segments = [[0], [5] * 6, [7]]
    total = small.process_segments(segments, pictures).num_tokens
    assert processor_of(checkpoint, total).process_segments(segments, pictures).num_tokens == total
    assert processor_of(checkpoint, None).process_segments(segments, pictures).num_tokens == total
    with pytest.raises(PromptTooLongError) as caught:
        processor_of(checkpoint, total - 1).process_segments(segments, pictures)
    assert f"{total} tokens (8 of text, {total - 8} of 2 pictures: 24 + " in str(caught.value)
    assert f"context is {total - 1}" in str(caught.value)


def test_what_is_too_long_is_refused_before_pictures_are_cut(
    checkpoint: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def never(*_args: object, **_kwargs: object) -> None:
        raise AssertionError("patches were made")

    monkeypatch.setattr("foveal.vision.v4_processor.make_patches", never)
    with pytest.raises(PromptTooLongError, match=r"6 pictures\)"):
        processor_of(checkpoint, 20).process_segments([[0]] * 7, [picture(64, 64)] * 6)


def test_a_model_loaded_without_pictures_says_so(checkpoint: Path, small: V4Processor) -> None:
    config, tokenizer = small.image_config, small.tokenizer
    without = V4Processor(config, tokenizer, VOCAB, None, image_limit=0)
    assert without.process_rendered("Hello").items == ()
    for refused in (
        lambda: without.process_segments([[0], [1]], [picture(8, 8)]),
        lambda: without.process_rendered(f"a{PLACEHOLDER}", [picture(8, 8)]),
        lambda: without.process_ids([0, VOCAB], [picture(8, 8)]),
        lambda: without.image_tokens(8, 8),
    ):
        with pytest.raises(MediaError, match=r"was loaded without pictures \(image limit 0\)"):
            refused()
    text_model = V4Processor(None, tokenizer, VOCAB, None)
    with pytest.raises(MediaError, match="has no vision tower"):
        text_model.process_segments([[0], [1]], [picture(8, 8)])


def test_more_pictures_than_the_limit_are_refused(small: V4Processor) -> None:
    limited = V4Processor(small.image_config, small.tokenizer, VOCAB, None, image_limit=2)
    assert len(limited.process_segments([[0]] * 3, [picture(8, 8)] * 2).items) == 2
    with pytest.raises(MediaError, match="has 3 pictures, and the limit is 2"):
        limited.process_segments([[0]] * 4, [picture(8, 8)] * 3)


def test_tokens_of_a_size(small: V4Processor) -> None:
    for start in range(5):
        prompt = small.process_segments([[9] * start, []], [picture(100, 41)])
        assert prompt.num_image_tokens == small.image_tokens(100, 41, start=start)
    assert small.image_tokens(100, 41) == small.image_tokens(100, 41, start=3)


# --- rendered text ------------------------------------------------------------------------------


@pytest.mark.parametrize(("num_slots", "num_pictures"), [(1, 0), (2, 1), (0, 1), (1, 3)])
def test_each_placeholder_needs_its_picture(
    small: V4Processor, num_slots: int, num_pictures: int
) -> None:
    text = "Look: " + PLACEHOLDER * num_slots + " and tell."
    message = f"has {num_slots} {PLACEHOLDER} placeholders, but {num_pictures} pictures came"
    with pytest.raises(PromptError, match=message):
        small.process_rendered(text, [picture(8, 8)] * num_pictures)
    with pytest.raises(PromptError, match=message):
        small.process_ids(small.tokenizer.encode(text), [picture(8, 8)] * num_pictures)


def without_token(checkpoint: Path, folder: Path, token: str, replacement: str) -> Tokenizer:
    """The tokenizer with one token called otherwise, as the text release has it."""
    for name in ("tokenizer.json", "tokenizer_config.json", "special_tokens_map.json"):
        text = (checkpoint / name).read_text(encoding="utf-8")
        (folder / name).write_text(text.replace(token, replacement), encoding="utf-8")
    return Tokenizer.load(folder)


def test_a_tokenizer_without_the_placeholder_is_named(
    checkpoint: Path, tmp_path: Path, small: V4Processor
) -> None:
    tokenizer = without_token(checkpoint, tmp_path, PLACEHOLDER, "<｜image2｜>")
    assert len(tokenizer.encode(PLACEHOLDER)) > 1
    processor = V4Processor(small.image_config, tokenizer, VOCAB, None)
    message = "no token '<｜deepseek_image｜>'.* tokenizer files of the vision release"
    with pytest.raises(CheckpointError, match=message):
        processor.process_rendered(f"What is {PLACEHOLDER}?", [picture(8, 8)])
    with pytest.raises(CheckpointError, match=message):
        processor.process_rendered(f"What is {PLACEHOLDER}?")
    assert processor.process_rendered("a < b").items == ()
    assert processor.process_ids(tokenizer.encode("a < b")).items == ()
    text_model = V4Processor(None, tokenizer, VOCAB, None)
    assert len(text_model.process_rendered(PLACEHOLDER).token_ids) > 1


# --- ids ----------------------------------------------------------------------------------------


def with_borrowed_tokens(checkpoint: Path, folder: Path) -> Tokenizer:
    """The tokenizer with the five reserved tokens that some programs write for pictures."""
    for name in ("tokenizer_config.json", "special_tokens_map.json"):
        shutil.copy(checkpoint / name, folder / name)
    definition = json.loads((checkpoint / "tokenizer.json").read_text(encoding="utf-8"))
    first = 1 + max(entry["id"] for entry in definition["added_tokens"])
    template = definition["added_tokens"][-1]
    definition["added_tokens"] += [
        {**template, "id": first + kind, "content": token}
        for kind, token in enumerate(BORROWED_TOKENS)
    ]
    (folder / "tokenizer.json").write_text(json.dumps(definition), encoding="utf-8")
    return Tokenizer.load(folder)


def test_borrowed_ids_come_from_the_tokenizer_or_the_released_vocabulary(
    checkpoint: Path, tmp_path: Path, small: V4Processor
) -> None:
    assert borrowed_ids(small.tokenizer, VOCAB) is None
    assert borrowed_ids(small.tokenizer, 129280) == (129257, 129258, 129259, 129260, 129261)
    tokenizer = with_borrowed_tokens(checkpoint, tmp_path)
    assert borrowed_ids(tokenizer, VOCAB) == (478, 479, 480, 481, 482)


def test_borrowed_ids_become_vocabulary_plus_type() -> None:
    ids = [0, 129258, 129257, 129259, 129260, 129258, 129261, 5]
    raw = [0, 129281, 129280, 129282, 129283, 129281, 129284, 5]
    assert canonical_ids(ids, 129280, RELEASED_BORROWED) == raw
    assert canonical_ids(raw, 129280, RELEASED_BORROWED) == raw
    assert canonical_ids(ids, 129280, None) == ids
    beside = [*raw, 129259]
    assert canonical_ids(beside, 129280, RELEASED_BORROWED) == beside, "a word of the text"
    for bad in (129285, -1):
        with pytest.raises(PromptError, match=f"token id {bad} at position 1"):
            canonical_ids([0, bad], 129280, RELEASED_BORROWED)


def test_all_ways_to_write_ids_give_the_same_prompt(
    checkpoint: Path, tmp_path: Path, small: V4Processor
) -> None:
    tokenizer = with_borrowed_tokens(checkpoint, tmp_path)
    processor = V4Processor(small.image_config, tokenizer, VOCAB, None)
    pictures = [picture(64, 64), picture(100, 41), picture(8, 8)]
    text = f"{BOS}Look {PLACEHOLDER}{PLACEHOLDER} and\n{PLACEHOLDER}"
    expected = processor.process_rendered(text, pictures)
    borrowed = borrowed_ids(tokenizer, VOCAB)
    assert borrowed is not None
    in_vocabulary = [borrowed[i - VOCAB] if i >= VOCAB else i for i in expected.token_ids]
    assert max(in_vocabulary) < VOCAB
    for ids in (tokenizer.encode(text), expected.token_ids, in_vocabulary):
        prompt = processor.process_ids(ids, pictures)
        assert prompt.token_ids == expected.token_ids
        for item, same in zip(items_of(prompt), items_of(expected), strict=True):
            assert (item.start, item.length, item.vit_grid) == (
                same.start,
                same.length,
                same.vit_grid,
            )


def test_reserved_words_in_a_text_are_no_pictures(checkpoint: Path, tmp_path: Path) -> None:
    tokenizer = with_borrowed_tokens(checkpoint, tmp_path)
    processor = processor_of(checkpoint)
    processor = V4Processor(processor.image_config, tokenizer, VOCAB, None)
    text = "".join(BORROWED_TOKENS)
    ids = [478, 479, 480, 481, 482]
    assert list(processor.process_rendered(text).token_ids) == ids
    assert list(processor.process_ids(ids).token_ids) == ids
    prompt = processor.process_rendered(text + PLACEHOLDER, [picture(8, 8)])
    assert list(prompt.token_ids[:5]) == ids
    assert processor.process_ids(prompt.token_ids, [picture(8, 8)]).token_ids == prompt.token_ids


def test_written_out_blocks_must_fit_their_pictures(small: V4Processor) -> None:
    pictures = [picture(64, 64)]
    ids = list(small.process_segments([[7, 7], [8]], pictures).token_ids)
    assert list(small.process_ids(ids, pictures).token_ids) == ids
    no_pad = [7, 7, *ids[3:]]
    with pytest.raises(PromptError, match=r"position 2 has the picture token START, .*token PAD"):
        small.process_ids(no_pad, pictures)
    text_inside = [*ids[:6], 9, *ids[7:]]
    with pytest.raises(PromptError, match="position 6 has the text id 9, and the picture token"):
        small.process_ids(text_inside, pictures)
    with pytest.raises(PromptError, match=r"position .* is needed"):
        small.process_ids(ids, [picture(100, 41)])
    cut = ids[:-2]
    with pytest.raises(PromptError, match=f"there are {len(cut)} ids, and {len(cut) + 1} are"):
        small.process_ids(cut, pictures)
    with pytest.raises(PromptError, match=r"has 1 .* placeholders, but 2 pictures"):
        small.process_ids(ids, pictures * 2)
    with pytest.raises(PromptError, match=r"has 1 .* placeholders, but 0 pictures"):
        small.process_ids(ids)


# --- precomputed pictures -----------------------------------------------------------------------


@pytest.mark.parametrize("kind", ["pixels", "floats", "bfloat16"])
def test_patches_fed_back_give_the_same_prompt(small: V4Processor, kind: str) -> None:
    prompt = small.process_segments([[1], [2], []], [picture(64, 64), picture(100, 41)])
    items = items_of(prompt)
    pixels = np.concatenate([item.patches for item in items if item.patches is not None])
    floats = normalised(pixels)
    data = {
        "pixels": pixels,
        "floats": floats,
        "bfloat16": torch.from_numpy(floats).bfloat16(),
    }[kind]
    ready = small.precomputed(
        patches=data,
        vit_grid=np.array([item.vit_grid for item in items]),
        llm_grid=np.array([item.llm_grid for item in items]),
        perm=np.concatenate([item.perm for item in items]),
    )
    again = small.process_segments([[1], [2], []], ready)
    assert again.token_ids == prompt.token_ids
    for item, old in zip(items_of(again), items, strict=True):
        assert (item.start, item.length, item.num_pads) == (old.start, old.length, old.num_pads)
        assert (item.vit_grid, item.llm_grid, item.size) == (old.vit_grid, old.llm_grid, (0, 0))
        assert item.perm.tolist() == old.perm.tolist()
        assert old.patches is not None
        if kind == "pixels":
            assert item.patch_values is None
            np.testing.assert_array_equal(item.patches, old.patches)
        else:
            assert item.patches is None
            assert item.patch_values is not None
            expected = round_to_bfloat16(normalised(old.patches))
            np.testing.assert_array_equal(item.patch_values, expected)


def test_precomputed_pictures_are_checked_however_they_come(small: V4Processor) -> None:
    perm = np.array([0, 2, 1, 3])
    wrong = PrecomputedPatches(np.zeros((15, 3, 8, 8), np.uint8), (4, 4), (2, 2), perm)
    with pytest.raises(MediaError, match="patches has 15 entries, but vit_grid needs 16"):
        small.process_segments([[0], [1]], [wrong])
    text_model = V4Processor(None, small.tokenizer, VOCAB, None)
    with pytest.raises(MediaError, match="has no vision tower"):
        text_model.precomputed(patches=1, vit_grid=1, llm_grid=1, perm=1)
