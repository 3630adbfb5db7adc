"""Conversations and pictures into prompts: the ids of the text, with each picture's placeholders in their place.

Contract: `text.chat_vl2` encodes the text around n pictures as n + 1 lists of ids; `vision.vl2` cuts the pictures; here
they are put together, and what does not fit the context is refused before a pixel is touched. It knows no model but its
context length and the width of its rows.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from foveal.errors import PromptError, PromptTooLongError
from foveal.text.chat_vl2 import IMAGE, encode_conversation, encode_messages, encode_prompt
from foveal.text.tokenizer import Tokenizer
from foveal.types import (
    MediaItem,
    Message,
    Picture,
    PictureInput,
    PrecomputedEmbeds,
    PrecomputedTiles,
    Prompt,
)
from foveal.vision.precomputed import (
    check_image_embeds,
    check_pixel_values,
)
from foveal.vision.vl2 import VL2ImageConfig, grid_for, is_tiled, make_tiles, num_image_tokens


@dataclass(frozen=True, slots=True)
class _Plan:
    """One picture before it is cut: its local tiles (cols, rows) and its number of placeholders."""

    picture: PictureInput
    grid: tuple[int, int]
    length: int


class VL2Processor:
    """Makes prompts for DeepSeek-VL2.

    `max_tokens` is the model's context (None: no limit). `embeds_width` is the width of its rows, for checking
    precomputed ones (None: unchecked). Wherever a picture may stand, `PrecomputedTiles` or `PrecomputedEmbeds` may.
    """

    def __init__(
        self,
        image_config: VL2ImageConfig,
        tokenizer: Tokenizer,
        max_tokens: int | None,
        *,
        embeds_width: int | None = None,
    ) -> None:
        self.image_config = image_config
        self.tokenizer = tokenizer
        self.max_tokens = max_tokens
        self.embeds_width = embeds_width
        self.image_token_id = tokenizer.token_id(IMAGE)

    def process_chat(self, messages: Sequence[Message]) -> Prompt:
        """A prompt for messages whose pictures are parts; their texts are literal, `<image>` too."""
        parts = [part for message in messages for part in message.content]
        pictures = [part for part in parts if not isinstance(part, str)]
        return self._assemble(encode_messages(messages, self.tokenizer), pictures)

    def process_conversation(
        self, conversation: Sequence[Mapping[str, Any]], pictures: Sequence[PictureInput] = ()
    ) -> Prompt:
        """A prompt for role/content dictionaries in which `<image>` marks a picture and special tokens are special."""
        return self._assemble(encode_conversation(conversation, self.tokenizer), pictures)

    def process_prompt(self, prompt: str, pictures: Sequence[PictureInput] = ()) -> Prompt:
        """A prompt from a ready string in which `<image>` marks a picture; begin-of-sentence is put before it."""
        return self._assemble(encode_prompt(prompt, self.tokenizer), pictures)

    def precomputed(
        self,
        *,
        pixel_values: Any = None,
        images_spatial_crop: Any = None,
        image_embeds: Any = None,
    ) -> list[PictureInput]:
        """Tensors as pictures to pass to the methods above; [] where there are none, `pixel_values` before
        `image_embeds` where there are both (spec 8.5). Raises MediaError.
        """
        size = self.image_config.image_size
        if pixel_values is not None:
            return [*check_pixel_values(pixel_values, images_spatial_crop, image_size=size)]
        if image_embeds is not None:
            return [*check_image_embeds(image_embeds, width=self.embeds_width)]
        return []

    def image_tokens(self, width: int, height: int, *, num_pictures: int = 1) -> int:
        """Tokens that a picture of this size takes in a conversation of `num_pictures`."""
        cols, rows = grid_for(width, height, self.image_config, tiled=is_tiled(num_pictures))
        return num_image_tokens(cols, rows, self.image_config.tokens_per_side)

    def _assemble(
        self, segments: Sequence[Sequence[int]], pictures: Sequence[PictureInput]
    ) -> Prompt:
        num_slots = len(segments) - 1
        if num_slots != len(pictures):
            raise PromptError(
                f"the text has {num_slots} {IMAGE} placeholders, but {len(pictures)} pictures came with it; give one "
                "placeholder for each picture"
            )
        tiled = is_tiled(len(pictures))
        plans = [self._plan(picture, tiled=tiled) for picture in pictures]
        self._check_length(sum(map(len, segments)), plans)
        token_ids = list(segments[0])
        items = []
        for plan, segment in zip(plans, segments[1:], strict=True):
            items.append(self._item(plan, start=len(token_ids), tiled=tiled))
            token_ids.extend([self.image_token_id] * plan.length)
            token_ids.extend(segment)
        return Prompt(tuple(token_ids), tuple(items))

    def _plan(self, picture: PictureInput, *, tiled: bool) -> _Plan:
        if isinstance(picture, PrecomputedEmbeds):
            (embeds,) = check_image_embeds([picture.rows], width=self.embeds_width)
            return _Plan(embeds, (0, 0), len(embeds.rows))
        if isinstance(picture, PrecomputedTiles):
            size = self.image_config.image_size
            (picture,) = check_pixel_values(picture.pixel_values, [picture.grid], image_size=size)
            grid = picture.grid
        elif isinstance(picture, Picture):
            grid = grid_for(picture.width, picture.height, self.image_config, tiled=tiled)
        else:
            raise PromptError(
                f"a picture is a {type(picture).__name__}; decode files with load_picture, pass tensors through "
                "`precomputed`"
            )
        return _Plan(picture, grid, num_image_tokens(*grid, self.image_config.tokens_per_side))

    def _check_length(self, num_text_tokens: int, plans: Sequence[_Plan]) -> None:
        num_image = sum(plan.length for plan in plans)
        total = num_text_tokens + num_image
        if self.max_tokens is None or total <= self.max_tokens:
            return
        each = " + ".join(str(plan.length) for plan in plans)
        raise PromptTooLongError(
            f"the prompt has {total} tokens ({num_text_tokens} of text, {num_image} of {len(plans)} pictures"
            f"{f': {each}' if 0 < len(plans) <= 4 else ''}), and the model's context is {self.max_tokens}; shorten "
            "the text or send fewer, smaller or less elongated pictures"
        )

    def _item(self, plan: _Plan, *, start: int, tiled: bool) -> MediaItem:
        picture, grid, length = plan.picture, plan.grid, plan.length
        if isinstance(picture, PrecomputedEmbeds):
            return MediaItem(grid, start, length, embeds=picture.rows)
        if isinstance(picture, PrecomputedTiles):
            return MediaItem(grid, start, length, pixel_values=picture.pixel_values)
        assert isinstance(picture, Picture), "other kinds are refused in `_plan`"
        tiles, made = make_tiles(picture.rgb, self.image_config, tiled=tiled)
        assert made == grid, f"planned {grid} tiles, cut {made}"
        return MediaItem(grid, start, length, (picture.width, picture.height), tiles=tiles)
