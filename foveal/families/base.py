"""What the front asks of a model family."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal, Protocol, TypeAlias

from foveal.errors import PromptTooLongError
from foveal.messages import UserMessage
from foveal.models.fidelity import Fidelity
from foveal.models.precision import Precision
from foveal.models.siglip import VisionMode
from foveal.models.v4_weights import WeightsMode
from foveal.runner.base import Runner
from foveal.text.stream_parse import AnswerParser
from foveal.text.tokenizer import Tokenizer
from foveal.types import Picture, Prompt

PictureMode: TypeAlias = Literal["display", "vendor"]
LoadPicture: TypeAlias = Callable[[Any], Picture]


@dataclass(frozen=True, slots=True, kw_only=True)
class LoadOptions:
    """How a model is loaded; see `LLM`."""

    dtype: str = "auto"
    device: str = "auto"
    vision_mode: VisionMode = "official"
    image_limit: int | None = None
    weights: WeightsMode = "auto"
    fidelity: Fidelity = "plain"
    max_model_len: int | None = None
    progress: Callable[[int, int], None] | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class ChatOptions:
    """How a conversation is put to the model. Families that cannot do what is asked for raise PromptError.

    `thinking` lets the model reason before it answers, with an `effort` where its release knows some; `tools` are
    function definitions in the OpenAI shape, `response_format` asks for an answer of a form. `keep_thinking` shows
    the model what it thought in earlier turns.
    """

    thinking: bool = False
    effort: str | None = None
    keep_thinking: bool = False
    tools: Sequence[Mapping[str, Any]] = ()
    response_format: Mapping[str, Any] | None = None


class Family(Protocol):
    """A loaded model with its processor and chat format."""

    name: str
    config: Any
    tokenizer: Tokenizer
    processor: Any
    precision: Precision
    max_model_len: int
    grounding_ids: frozenset[int]

    @property
    def runner(self) -> Runner[Any]: ...

    def chat_prompt(
        self, messages: Sequence[UserMessage], load_picture: LoadPicture, options: ChatOptions
    ) -> Prompt:
        """A conversation as the tokens and pictures that the model gets."""
        ...

    def parser(self, options: ChatOptions) -> AnswerParser | None:
        """What splits an answer into reasoning, content and tool calls; None where an answer is content alone."""
        ...

    def raw_prompt(self, text: str, pictures: Sequence[Picture]) -> Prompt:
        """A ready prompt string in which the family's placeholder stands for each picture."""
        ...

    def facts(self) -> dict[str, Any]:
        """What `LLM.info` says beyond the common facts."""
        ...


def context_length(longest: int, wanted: int | None) -> int:
    """The context in tokens: the model's own, or a shorter one that was asked for."""
    if wanted is None:
        return longest
    if not 1 <= wanted <= longest:
        raise PromptTooLongError(
            f"max_model_len={wanted} is not possible: the model's positions end at {longest}"
        )
    return wanted
