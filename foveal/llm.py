"""The blocking front: a model, ready to answer."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import closing
from dataclasses import replace
from pathlib import Path
from typing import Any, Literal

from foveal.errors import PromptError, PromptTooLongError
from foveal.families import ChatOptions, Family, LoadOptions, open_family
from foveal.families.base import PictureMode
from foveal.messages import UserMessage
from foveal.models.fidelity import Fidelity
from foveal.models.hub import resolve_model
from foveal.models.siglip import VisionMode
from foveal.models.v4_weights import WeightsMode
from foveal.runner.base import Runner
from foveal.text.detokenize import StreamDetokenizer
from foveal.text.stopping import is_looping, is_runaway_box
from foveal.text.stream_parse import AnswerParser, ContentText, MalformedCall, ReasoningText
from foveal.text.stream_parse import ToolCall as ParsedCall
from foveal.text.tokenizer import Tokenizer
from foveal.types import (
    Delta,
    Picture,
    Prompt,
    RequestOutput,
    SamplingParams,
    ToolCall,
    Usage,
)
from foveal.vision.decode import load_picture

DEFAULT_MODEL = "demo-vl2"


class LLM:
    """A loaded model.

    `model` is a shipped id, a folder or a hub id. `dtype` "auto" is what suits the machine (`info["dtype_reason"]` says
    why). `vision_mode` "timm-pad" and `picture_mode` "vendor" are compatibility options (docs/vision-modes.md).
    For DeepSeek-V4, `weights` keeps packed experts packed or turns them into numbers, `fidelity` names roundings of
    the release to imitate (docs/v4-fidelity.md), and `image_limit` 0 loads a vision checkpoint without its tower.
    `max_model_len` may shorten the context. `progress` is called with (bytes done, bytes in all) while loading.
    Raises ModelNotFoundError, CheckpointError, ResourceError.
    """

    def __init__(
        self,
        model: str | Path = DEFAULT_MODEL,
        *,
        dtype: str = "auto",
        device: str = "auto",
        vision_mode: VisionMode = "official",
        picture_mode: PictureMode = "display",
        image_limit: int | None = None,
        weights: WeightsMode = "auto",
        fidelity: Fidelity = "plain",
        max_model_len: int | None = None,
        revision: str | None = None,
        progress: Callable[[int, int], None] | None = None,
    ) -> None:
        start = time.perf_counter()
        self.folder = resolve_model(str(model), revision=revision)
        options = LoadOptions(
            dtype=dtype,
            device=device,
            vision_mode=vision_mode,
            image_limit=image_limit,
            weights=weights,
            fidelity=fidelity,
            max_model_len=max_model_len,
            progress=progress,
        )
        self.family: Family = open_family(self.folder, options)
        self.picture_mode: PictureMode = picture_mode
        self.load_s = time.perf_counter() - start

    # Short ways to the family's parts.

    @property
    def config(self) -> Any:
        return self.family.config

    @property
    def tokenizer(self) -> Tokenizer:
        return self.family.tokenizer

    @property
    def processor(self) -> Any:
        return self.family.processor

    @property
    def runner(self) -> Runner[Any]:
        return self.family.runner

    @property
    def model(self) -> Any:
        return self.family.runner.model

    @property
    def max_model_len(self) -> int:
        return self.family.max_model_len

    @property
    def info(self) -> dict[str, Any]:
        """Facts about what was loaded and how."""
        precision = self.family.precision
        return {
            "model": self.folder.name,
            "family": self.family.name,
            "dtype": precision.name,
            "dtype_reason": precision.reason,
            "device": str(self.model.device),
            **self.family.facts(),
            "picture_mode": self.picture_mode,
            "max_model_len": self.max_model_len,
            "load_s": round(self.load_s, 3),
        }

    # --- prompts --------------------------------------------------------------------------------

    def load_picture(self, source: Any) -> Picture:
        """Decode a path, bytes, PIL image or array in this model's picture mode."""
        if isinstance(source, Picture):
            return source
        return load_picture(source, mode=self.picture_mode)

    def chat_prompt(
        self, messages: Sequence[UserMessage], options: ChatOptions | None = None
    ) -> Prompt:
        """Messages (see `messages.parse_messages`) as the tokens and pictures that the model gets."""
        return self.family.chat_prompt(messages, self.load_picture, options or ChatOptions())

    def raw_prompt(self, prompt: str, pictures: Sequence[Any] = ()) -> Prompt:
        """A ready prompt string, in which each `<image>` stands for one of `pictures`."""
        return self.family.raw_prompt(prompt, [self.load_picture(p) for p in pictures])

    # --- answers --------------------------------------------------------------------------------

    def chat(
        self,
        messages: Sequence[UserMessage],
        params: SamplingParams | None = None,
        options: ChatOptions | None = None,
    ) -> RequestOutput:
        """Answer a conversation that ends with a user's turn."""
        return collect(self.stream_chat(messages, params, options))

    def stream_chat(
        self,
        messages: Sequence[UserMessage],
        params: SamplingParams | None = None,
        options: ChatOptions | None = None,
    ) -> Iterator[Delta]:
        """Like `chat`, piece by piece."""
        options = options or ChatOptions()
        prompt = self.chat_prompt(messages, options)
        return self.stream(prompt, params, parser=self.family.parser(options))

    def generate(
        self, prompt: str, pictures: Sequence[Any] = (), params: SamplingParams | None = None
    ) -> RequestOutput:
        """Continue a raw prompt string."""
        return collect(self.stream(self.raw_prompt(prompt, pictures), params))

    def stream(
        self,
        prompt: Prompt,
        params: SamplingParams | None = None,
        *,
        parser: AnswerParser | None = None,
    ) -> Iterator[Delta]:
        """Answer a ready `Prompt`, piece by piece; the last delta has the finish reason and the usage.

        `parser` splits reasoning and tool calls from the answer's text. `max_tokens` is cut to what the context
        leaves. Raises PromptTooLongError where it leaves nothing.
        """
        params = params or SamplingParams()
        _check_supported(params)
        room = self.max_model_len - prompt.num_tokens
        if room < 1:
            raise PromptTooLongError(
                f"the prompt has {prompt.num_tokens} tokens ({prompt.num_image_tokens} of them for pictures), "
                f"which leaves no room for an answer in a context of {self.max_model_len}; shorten the text or "
                "send fewer or smaller pictures"
            )
        params = replace(params, max_tokens=min(params.max_tokens, room))
        return _Answer(self, prompt, params, parser).deltas()


# What needs the batched sampler, which this front does not drive yet.
_UNSUPPORTED = (
    "min_tokens",
    "presence_penalty",
    "frequency_penalty",
    "logit_bias",
    "bad_words",
    "logprobs",
    "structure",
)


def _check_supported(params: SamplingParams) -> None:
    """Raises PromptError for a parameter that would be ignored."""
    plain = SamplingParams()
    for name in _UNSUPPORTED:
        value = getattr(params, name)
        if value != getattr(plain, name):
            raise PromptError(f"{name}={value!r} is not supported by LLM yet; leave it out")


def collect(deltas: Iterable[Delta]) -> RequestOutput:
    """A whole answer from its pieces."""
    pieces = list(deltas)
    last = pieces[-1]
    assert last.finish_reason is not None, "a stream ends with a finish reason"
    assert last.usage is not None, "a stream ends with its usage"
    return RequestOutput(
        text="".join(piece.text for piece in pieces),
        token_ids=tuple(token for piece in pieces for token in piece.token_ids),
        finish_reason=last.finish_reason,
        usage=last.usage,
        stop_reason=last.stop_reason,
        reasoning="".join(piece.reasoning for piece in pieces),
        tool_calls=tuple(call for piece in pieces for call in piece.tool_calls),
    )


class _Answer:
    """One answer on its way: runs the model until something ends it."""

    def __init__(
        self, llm: LLM, prompt: Prompt, params: SamplingParams, parser: AnswerParser | None
    ) -> None:
        self.llm, self.prompt, self.params, self.parser = llm, prompt, params, parser
        self.detokenizer = StreamDetokenizer(
            llm.tokenizer,
            params.stop,
            params.skip_special_tokens,
            include_stop=params.include_stop,
        )
        eos = () if params.ignore_eos else (llm.tokenizer.eos_id,)
        self.eos = frozenset(eos)
        self.stop_ids = frozenset((*eos, *params.stop_token_ids))
        self.is_grounding = not llm.family.grounding_ids.isdisjoint(prompt.token_ids)
        self.tokens: list[int] = []

    def deltas(self) -> Iterator[Delta]:
        tokens = self.llm.runner.generate(self.prompt, self.params, stop_ids=self.stop_ids)
        with closing(tokens):  # type: ignore[type-var]  # a generator function's result can be closed
            for token in tokens:
                self.tokens.append(token)
                if token in self.stop_ids:
                    yield self._last("stop", token, None if token in self.eos else token)
                    return
                text = self.detokenizer.push(token)
                reason = self._stop_reason()
                if reason is not None:
                    yield self._last("stop", token, reason, text)
                    return
                if len(self.tokens) < self.params.max_tokens:
                    yield self._delta(text, token)
        yield self._last("length", token, None, text)

    def _stop_reason(self) -> str | None:
        if self.detokenizer.stopped_by is not None:
            return self.detokenizer.stopped_by
        if is_looping(self.tokens, self.params.loop_guard_repeats):
            return "repetition"
        if self.is_grounding and is_runaway_box(self.detokenizer.text):
            return "runaway_box"
        return None

    def _delta(self, text: str, token: int, *, is_last: bool = False) -> Delta:
        """A piece with what `text` completes: answer, reasoning, calls."""
        if self.parser is None:
            return Delta(text, (token,))
        events = [*self.parser.push(text), *(self.parser.finish() if is_last else ())]
        return Delta(
            "".join(e.text for e in events if isinstance(e, ContentText | MalformedCall)),
            (token,),
            reasoning="".join(e.text for e in events if isinstance(e, ReasoningText)),
            tool_calls=tuple(
                ToolCall(e.name, e.arguments) for e in events if isinstance(e, ParsedCall)
            ),
        )

    def _last(
        self,
        finish: Literal["stop", "length"],
        token: int,
        reason: str | int | None,
        text: str = "",
    ) -> Delta:
        usage = Usage(self.prompt.num_tokens, len(self.tokens), self.prompt.num_image_tokens)
        piece = self._delta(text + self.detokenizer.finish(), token, is_last=True)
        return replace(piece, finish_reason=finish, stop_reason=reason, usage=usage)
