"""DeepSeek-V4, text and vision releases."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from foveal.errors import MediaError
from foveal.families.base import ChatOptions, LoadOptions, LoadPicture, context_length
from foveal.messages import UserMessage, parse_part
from foveal.models.build import load_v4
from foveal.models.v4_config import V4Config
from foveal.runner.v4_runner import V4Runner
from foveal.text.chat_v4 import encode_pieces, encode_v4_messages
from foveal.text.chat_vl2 import GROUNDING_TOKENS
from foveal.text.stream_parse import AnswerParser
from foveal.text.tokenizer import Tokenizer
from foveal.text.v4_prompts import V4Prompts
from foveal.text.v4_turns import with_tools
from foveal.types import Picture, PictureInput, Prompt
from foveal.vision.v4 import V4ImageConfig
from foveal.vision.v4_processor import V4Processor


class V4Family:
    """A loaded DeepSeek-V4 model. With `image_limit` 0 a vision checkpoint is loaded without its tower.

    Raises CheckpointError, ResourceError.
    """

    name = "deepseek_v4"

    def __init__(self, folder: Path, values: Mapping[str, Any], options: LoadOptions) -> None:
        self.config = V4Config.from_dict(values)
        language = self.config.language
        longest = language.max_position_embeddings
        self.max_model_len = context_length(longest, options.max_model_len)
        self.tokenizer = Tokenizer.load(folder, extra_tokens=())
        self.prompts = V4Prompts.load(folder)
        with_vision = options.image_limit != 0
        images = V4ImageConfig.from_dict(values) if self.config.vision is not None else None
        self.processor = V4Processor(
            images, self.tokenizer, language.vocab_size, self.max_model_len, options.image_limit
        )
        # The release has no grounding tags; a model that was trained with them has each as one token.
        single = {t: self.tokenizer.encode(t) for t in GROUNDING_TOKENS}
        self.grounding_tokens = tuple(token for token, ids in single.items() if len(ids) == 1)
        self.grounding_ids = frozenset(single[token][0] for token in self.grounding_tokens)
        loaded = load_v4(
            folder,
            self.config,
            dtype=options.dtype,
            device=options.device,
            with_vision=with_vision,
            weights=options.weights,
            fidelity=options.fidelity,
            progress=options.progress,
        )
        self.precision, self.loaded = loaded.precision, loaded
        self.runner = V4Runner(loaded.model)

    def chat_prompt(
        self, messages: Sequence[UserMessage], load_picture: LoadPicture, options: ChatOptions
    ) -> Prompt:
        chat = encode_v4_messages(
            with_tools(messages, options.tools, options.response_format),
            thinking=options.thinking,
            effort=options.effort,
            drop_thinking=not options.keep_thinking,
            prompts=self.prompts,
        )
        pictures = [
            _as_picture(source, f"picture {i + 1}", load_picture)
            for i, source in enumerate(chat.pictures)
        ]
        segments = encode_pieces(chat.pieces, self.tokenizer, keep=self.grounding_tokens)
        return self.processor.process_segments(segments, pictures)

    def parser(self, options: ChatOptions) -> AnswerParser:
        return AnswerParser(thinking=options.thinking, tools=True)

    def raw_prompt(self, text: str, pictures: Sequence[Picture]) -> Prompt:
        return self.processor.process_rendered(text, pictures)

    def facts(self) -> dict[str, Any]:
        chosen = self.loaded.weights
        return {
            "pictures": self.runner.model.has_tower,
            "weights": None if chosen is None else chosen.name,
            "weights_reason": None if chosen is None else chosen.reason,
            "fidelity": self.loaded.fidelity,
            "tensors_set_aside": len(self.loaded.report.set_aside),
        }


def _as_picture(source: object, where: str, load_picture: LoadPicture) -> PictureInput:
    part = parse_part(source, where, load_picture)
    if isinstance(part, str):
        raise MediaError(f"{where} is a text; a picture was expected there")
    return part
