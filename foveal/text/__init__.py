"""Text in and out: tokenizer, chat format, streaming decoding, grounding. Imports no torch and no picture library."""

from __future__ import annotations

from foveal.text.chat_vl2 import encode_conversation, encode_messages, encode_prompt
from foveal.text.detokenize import StreamDetokenizer
from foveal.text.grounding import locate_prompt, parse_grounding, strip_grounding
from foveal.text.tokenizer import Tokenizer

__all__ = [
    "StreamDetokenizer",
    "Tokenizer",
    "encode_conversation",
    "encode_messages",
    "encode_prompt",
    "locate_prompt",
    "parse_grounding",
    "strip_grounding",
]
