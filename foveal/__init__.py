"""Foveal runs DeepSeek's open vision-language models: exact, on the machine at hand.

    from foveal import LLM

    picture, question = {"type": "image", "image": "a.png"}, {"type": "text", "text": "What is this?"}
    print(LLM().chat([{"role": "user", "content": [picture, question]}]).text)

Importing the package is cheap: torch is imported with the first use of `LLM`.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from foveal.errors import (
    CheckpointError,
    EngineError,
    FovealError,
    MediaError,
    ModelNotFoundError,
    PromptError,
    PromptTooLongError,
    RequestError,
    ResourceError,
)
from foveal.types import (
    Box,
    Delta,
    Grounding,
    MalformedBox,
    Message,
    Picture,
    RequestOutput,
    SamplingParams,
    ToolCall,
    Usage,
)

if TYPE_CHECKING:
    from foveal.families import ChatOptions
    from foveal.llm import LLM

__version__ = "0.1.0"

__all__ = [
    "LLM",
    "Box",
    "ChatOptions",
    "CheckpointError",
    "Delta",
    "EngineError",
    "FovealError",
    "Grounding",
    "MalformedBox",
    "MediaError",
    "Message",
    "ModelNotFoundError",
    "Picture",
    "PromptError",
    "PromptTooLongError",
    "RequestError",
    "RequestOutput",
    "ResourceError",
    "SamplingParams",
    "ToolCall",
    "Usage",
    "__version__",
]


def __getattr__(name: str) -> Any:
    if name == "LLM":
        from foveal.llm import LLM

        return LLM
    if name == "ChatOptions":
        from foveal.families import ChatOptions

        return ChatOptions
    raise AttributeError(f"module 'foveal' has no attribute {name!r}")
