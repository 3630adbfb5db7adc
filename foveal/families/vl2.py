"""DeepSeek-VL2: tiny, small, base and every checkpoint of that format."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from foveal.errors import CheckpointError, PromptError
from foveal.families.base import ChatOptions, LoadOptions, LoadPicture, context_length
from foveal.messages import UserMessage, parse_messages
from foveal.models.build import load_vl2
from foveal.models.config import VL2Config, read_json
from foveal.runner.runner import VL2Runner
from foveal.text.chat_vl2 import GROUNDING_TOKENS
from foveal.text.tokenizer import Tokenizer
from foveal.types import Picture, Prompt
from foveal.vision.processor import VL2Processor
from foveal.vision.vl2 import VL2ImageConfig


class VL2Family:
    """A loaded DeepSeek-VL2 model. Raises CheckpointError, ResourceError."""

    name = "deepseek_vl2"

    def __init__(self, folder: Path, values: Mapping[str, Any], options: LoadOptions) -> None:
        self.config = VL2Config.from_dict(values)
        longest = self.config.language.max_position_embeddings
        self.max_model_len = context_length(longest, options.max_model_len)
        self.tokenizer = Tokenizer.load(folder)
        images = VL2ImageConfig.from_dict(read_json(folder / "processor_config.json"))
        check_grids(self.config, images)
        width = self.config.projector.n_embed
        self.processor = VL2Processor(
            images, self.tokenizer, self.max_model_len, embeds_width=width
        )
        tokens = (self.tokenizer.token_id(token) for token in GROUNDING_TOKENS)
        self.grounding_ids = frozenset(tokens)
        loaded = load_vl2(
            folder,
            self.config,
            dtype=options.dtype,
            device=options.device,
            vision_mode=options.vision_mode,
            progress=options.progress,
        )
        self.precision = loaded.precision
        self.runner = VL2Runner(loaded.model, mean=images.image_mean, std=images.image_std)

    def chat_prompt(
        self, messages: Sequence[UserMessage], load_picture: LoadPicture, options: ChatOptions
    ) -> Prompt:
        if options != ChatOptions():
            raise PromptError(
                "thinking, effort, tools and response formats are for models that were trained with them; "
                "DeepSeek-VL2 was not: leave them out"
            )
        return self.processor.process_chat(parse_messages(messages, load_picture))

    def parser(self, options: ChatOptions) -> None:
        """Answers are content alone."""

    def raw_prompt(self, text: str, pictures: Sequence[Picture]) -> Prompt:
        return self.processor.process_prompt(text, pictures)

    def facts(self) -> dict[str, Any]:
        return {"vision_mode": self.runner.model.vision.mode}


def check_grids(config: VL2Config, images: VL2ImageConfig) -> None:
    """The processor must count as many tokens a tile as the projector makes; raises CheckpointError if not."""
    if images.image_size != config.vision.image_size:
        raise CheckpointError(
            f"the processor cuts tiles of {images.image_size} pixels (processor_config.json, first candidate "
            f"resolution), but the tower takes {config.vision.image_size} (config.json, vision_config.image_size)"
        )
    if images.tokens_per_side != config.tokens_per_side:
        kind = config.projector.projector_type
        raise CheckpointError(
            f"the processor counts {images.tokens_per_side} tokens a tile side, but the {kind!r} projector "
            f"makes {config.tokens_per_side}; downsample_ratio in processor_config.json and projector_config "
            "do not fit together"
        )
