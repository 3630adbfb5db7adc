"""Text and pictures into DeepSeek-V4 prompts: raw ids, with a block of picture tokens in each picture's place.

Contract: the chat encoder gives text around n pictures, as n + 1 lists of ids or as a string with placeholders;
`vision.v4` knows sizes, patches and blocks; here they are put together from left to right, since a block's alignment
pads depend on all that stands before it. What does not fit the context is refused before a pixel is touched. It knows
no model but its vocabulary's size and its context length.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np

from foveal.errors import CheckpointError, MediaError, PromptError, PromptTooLongError
from foveal.text.tokenizer import Tokenizer
from foveal.types import Picture, PictureInput, PrecomputedPatches, Prompt, V4MediaItem
from foveal.vision.v4 import (
    Grid,
    V4ImageConfig,
    block_length,
    block_order,
    block_types,
    llm_grid_for,
    make_patches,
    num_pads,
    vit_grid_for,
)
from foveal.vision.v4_ids import borrowed_ids, canonical_ids, check_text_ids, text_around_blocks
from foveal.vision.v4_precomputed import check_patches

PLACEHOLDER = "<｜deepseek_image｜>"


@dataclass(frozen=True, slots=True)
class _Block:
    """A picture's place in the prompt, before its pixels are looked at."""

    picture: Picture | PrecomputedPatches
    vit_grid: Grid
    llm_grid: Grid
    start: int

    @property
    def length(self) -> int:
        return num_pads(self.start) + block_length(self.llm_grid)


class V4Processor:
    """Makes prompts for DeepSeek-V4.

    `image_config` is None for a text checkpoint. `vocab_size` is the model's, not the tokenizer's. `max_tokens` is the
    model's context (None: no limit). `image_limit` bounds the pictures of a prompt (None: no limit); with 0 the model
    was loaded without its tower. Wherever a picture may stand, `PrecomputedPatches` may.
    """

    def __init__(
        self,
        image_config: V4ImageConfig | None,
        tokenizer: Tokenizer,
        vocab_size: int,
        max_tokens: int | None,
        image_limit: int | None = None,
    ) -> None:
        self.image_config = image_config
        self.tokenizer = tokenizer
        self.vocab_size = vocab_size
        self.max_tokens = max_tokens
        self.image_limit = image_limit

    @cached_property
    def _placeholder_tokens(self) -> list[int]:
        return self.tokenizer.encode(PLACEHOLDER)

    @property
    def placeholder_id(self) -> int:
        """The one id of the placeholder. Raises CheckpointError where the tokenizer cuts it up."""
        ids = self._placeholder_tokens
        if len(ids) != 1:
            raise CheckpointError(
                f"the tokenizer has no token {PLACEHOLDER!r} (it becomes {len(ids)} tokens); use the tokenizer files "
                "of the vision release, those of the text release lack it"
            )
        return ids[0]

    # --- prompts --------------------------------------------------------------------------------

    def process_rendered(self, text: str, pictures: Sequence[PictureInput] = ()) -> Prompt:
        """A prompt from a rendered chat, begin-of-sentence included, in which the placeholder marks a picture.

        Special tokens in `text` are special. Nothing is added to it. To a text model the placeholder is text too.
        """
        config = self._config_for(pictures)
        ids = self.tokenizer.encode(text)
        if not pictures and (config is None or PLACEHOLDER not in text):
            return self.process_segments([ids])
        return self.process_segments(_split(ids, self.placeholder_id), pictures)

    def process_ids(self, ids: Sequence[int], pictures: Sequence[PictureInput] = ()) -> Prompt:
        """A prompt from ids: with placeholders, or with blocks written out in either id scheme.

        Written-out blocks must be those that the pictures get. Without pictures, and beside ids of vocab_size + type,
        borrowed ids are text. Raises PromptError.
        """
        config = self._config_for(pictures)
        is_known = config is not None and len(self._placeholder_tokens) == 1
        if is_known and self.placeholder_id in ids:
            return self.process_segments(_split(ids, self.placeholder_id), pictures)
        borrowed = borrowed_ids(self.tokenizer, self.vocab_size) if pictures else None
        raw = canonical_ids(ids, self.vocab_size, borrowed)
        prompt = self.process_segments(text_around_blocks(raw, self.vocab_size), pictures)
        if list(prompt.token_ids) != raw:
            raise self._wrong_blocks(raw, prompt)
        return prompt

    def process_segments(
        self, segments: Sequence[Sequence[int]], pictures: Sequence[PictureInput] = ()
    ) -> Prompt:
        """A prompt from n + 1 lists of text ids around n pictures.

        Raises PromptError for other counts and ids, PromptTooLongError, and MediaError for pictures that this model
        does not take.
        """
        config = self._config_for(pictures)
        num_slots = len(segments) - 1
        if num_slots != len(pictures):
            raise PromptError(
                f"the text has {max(0, num_slots)} {PLACEHOLDER} placeholders, but {len(pictures)} pictures came with "
                "it; give one placeholder for each picture"
            )
        for segment in segments:
            check_text_ids(segment, self.vocab_size)
        blocks: list[_Block] = []
        position = len(segments[0])
        for picture, segment in zip(pictures, segments[1:], strict=True):
            assert config is not None, "pictures without a configuration are refused above"
            blocks.append(_place(picture, position, config))
            position += blocks[-1].length + len(segment)
        self._check_length(position, blocks)
        items = [self._item(block) for block in blocks]
        token_ids = list(segments[0])
        for item, segment in zip(items, segments[1:], strict=True):
            token_ids.extend((self.vocab_size + item.types).tolist())
            token_ids.extend(segment)
        return Prompt(tuple(token_ids), tuple(items))

    def precomputed(
        self, *, patches: Any, vit_grid: Any, llm_grid: Any, perm: Any, types: Any = None
    ) -> list[PrecomputedPatches]:
        """Tensors as pictures to pass to the methods above; see `check_patches`. Raises MediaError."""
        return check_patches(
            patches, vit_grid, llm_grid, perm, types, config=self._config_or_refuse()
        )

    def image_tokens(self, width: int, height: int, *, start: int | None = None) -> int:
        """Tokens of a picture of this size: from position `start` on, or without alignment pads."""
        config = self._config_or_refuse()
        length = block_length(llm_grid_for(vit_grid_for(width, height, config), config))
        return length if start is None else num_pads(start) + length

    # --- checks ---------------------------------------------------------------------------------

    def _config_for(self, pictures: Sequence[PictureInput]) -> V4ImageConfig | None:
        """The picture settings, None where neither pictures nor settings are there."""
        if not pictures:
            return self.image_config
        if self.image_limit and len(pictures) > self.image_limit:
            raise MediaError(
                f"the prompt has {len(pictures)} pictures, and the limit is {self.image_limit}; send fewer or raise "
                "the image limit"
            )
        return self._config_or_refuse()

    def _config_or_refuse(self) -> V4ImageConfig:
        if self.image_config is None:
            raise MediaError(
                "this model has no vision tower and takes no pictures; use a vision checkpoint"
            )
        if self.image_limit == 0:
            raise MediaError(
                "this model was loaded without pictures (image limit 0); load it with a higher image limit"
            )
        return self.image_config

    def _check_length(self, total: int, blocks: Sequence[_Block]) -> None:
        if total == 0:
            raise PromptError("the prompt has no tokens; give it some text")
        if self.max_tokens is None or total <= self.max_tokens:
            return
        num_image = sum(block.length for block in blocks)
        each = " + ".join(str(block.length) for block in blocks)
        raise PromptTooLongError(
            f"the prompt has {total} tokens ({total - num_image} of text, {num_image} of {len(blocks)} pictures"
            f"{f': {each}' if 0 < len(blocks) <= 4 else ''}), and the model's context is {self.max_tokens}; shorten "
            "the text or send fewer or smaller pictures"
        )

    def _wrong_blocks(self, raw: Sequence[int], prompt: Prompt) -> PromptError:
        ids = prompt.token_ids
        at = next((i for i, (a, b) in enumerate(zip(raw, ids, strict=False)) if a != b), None)
        if at is None:
            what = f"there are {len(raw)} ids, and {len(ids)} are needed"
        else:
            what = f"position {at} has {self._named(raw[at])}, and {self._named(ids[at])} is needed"
        return PromptError(
            f"the picture tokens do not fit the pictures: {what}; give the placeholder {PLACEHOLDER} once for each "
            "picture instead of writing its block out"
        )

    def _named(self, token_id: int) -> str:
        if token_id < self.vocab_size:
            return f"the text id {token_id}"
        kinds = ("START", "PAD", "IMAGE", "NEW_LINE", "END")
        return f"the picture token {kinds[token_id - self.vocab_size]}"

    # --- pictures -------------------------------------------------------------------------------

    def _item(self, block: _Block) -> V4MediaItem:
        picture = block.picture
        patches = values = None
        size = (0, 0)
        if isinstance(picture, Picture):
            assert self.image_config is not None, "a block was placed without a configuration"
            patches, made = make_patches(picture.rgb, self.image_config)
            assert made == block.vit_grid, f"planned {block.vit_grid} patches, cut {made}"
            size = (picture.width, picture.height)
        elif picture.patches.dtype == np.uint8:
            patches = picture.patches.astype(np.uint8, copy=False)
        else:
            values = picture.patches.astype(np.float32, copy=False)
        return V4MediaItem(
            start=block.start,
            length=block.length,
            num_pads=num_pads(block.start),
            types=block_types(block.llm_grid, block.start),
            perm=block_order(block.llm_grid),
            vit_grid=block.vit_grid,
            llm_grid=block.llm_grid,
            size=size,
            patches=patches,
            patch_values=values,
        )


def _place(picture: PictureInput, start: int, config: V4ImageConfig) -> _Block:
    """The block of a picture at position `start`. Precomputed ones are checked again: anyone can make one."""
    if isinstance(picture, PrecomputedPatches):
        grids = ([picture.vit_grid], [picture.llm_grid])
        (picture,) = check_patches(picture.patches, *grids, picture.perm, config=config)
        return _Block(picture, picture.vit_grid, picture.llm_grid, start)
    if isinstance(picture, Picture):
        vit_grid = vit_grid_for(picture.width, picture.height, config)
        return _Block(picture, vit_grid, llm_grid_for(vit_grid, config), start)
    raise PromptError(
        f"a picture is a {type(picture).__name__}; decode files with load_picture, pass tensors through `precomputed`"
    )


def _split(ids: Sequence[int], placeholder: int) -> list[list[int]]:
    """`ids` cut at each placeholder, which disappears."""
    segments: list[list[int]] = [[]]
    for token_id in ids:
        if token_id == placeholder:
            segments.append([])
        else:
            segments[-1].append(token_id)
    return segments
