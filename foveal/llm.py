"""The blocking front: a model, ready to answer. Everything between a user's words and pictures and the runner."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import closing
from pathlib import Path
from typing import Any, Literal

from foveal.errors import CheckpointError, PromptTooLongError, ResourceError
from foveal.messages import UserMessage, parse_messages
from foveal.models.config import VL2Config, read_json
from foveal.models.hub import resolve_model
from foveal.models.loader import Checkpoint, load_parameters
from foveal.models.memory import available_bytes
from foveal.models.names import is_ignored, parameter_specs
from foveal.models.precision import Precision, resolve_device, resolve_precision
from foveal.models.registry import detect_family
from foveal.models.siglip import VisionMode
from foveal.models.vl2 import VL2Model
from foveal.runner.runner import VL2Runner
from foveal.runner.stopping import is_looping, is_runaway_box
from foveal.text.chat_vl2 import GROUNDING_TOKENS
from foveal.text.detokenize import StreamDetokenizer
from foveal.text.tokenizer import Tokenizer
from foveal.types import Delta, Picture, Prompt, RequestOutput, SamplingParams, Usage
from foveal.vision.decode import load_picture
from foveal.vision.processor import VL2Processor
from foveal.vision.vl2 import VL2ImageConfig

PictureMode = Literal["display", "vendor"]
DEFAULT_MODEL = "demo-vl2"


class LLM:
    """A loaded model.

    `model` is a shipped id, a folder or a hub id. `dtype` "auto" is what suits the machine (`info["dtype_reason"]` says
    why). `vision_mode` "timm-pad" and `picture_mode` "vendor" are compatibility options (docs/vision-modes.md).
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
        max_model_len: int | None = None,
        revision: str | None = None,
        progress: Callable[[int, int], None] | None = None,
    ) -> None:
        start = time.perf_counter()
        self.folder = resolve_model(str(model), revision=revision)
        values = read_json(self.folder / "config.json")
        detect_family(values)
        self.config = VL2Config.from_dict(values)
        self.max_model_len = _context(self.config, max_model_len)
        self.tokenizer = Tokenizer.load(self.folder)
        image_config = VL2ImageConfig.from_dict(read_json(self.folder / "processor_config.json"))
        check_grids(self.config, image_config)
        self.processor = VL2Processor(image_config, self.tokenizer, self.max_model_len)
        self.picture_mode: PictureMode = picture_mode
        self.model, self.precision = load_model(
            self.folder,
            self.config,
            dtype=dtype,
            device=device,
            vision_mode=vision_mode,
            progress=progress,
        )
        self.runner = VL2Runner(
            self.model, mean=image_config.image_mean, std=image_config.image_std
        )
        self.load_s = time.perf_counter() - start

    @property
    def info(self) -> dict[str, Any]:
        """Facts about what was loaded and how."""
        return {
            "model": self.folder.name,
            "dtype": self.precision.name,
            "dtype_reason": self.precision.reason,
            "device": str(self.model.device),
            "vision_mode": self.model.vision.mode,
            "picture_mode": self.picture_mode,
            "max_model_len": self.max_model_len,
            "load_s": round(self.load_s, 3),
        }

    # --- prompts --------------------------------------------------------------------------------

    def load_picture(self, source: Any) -> Picture:
        """Decode a path, bytes, PIL image or array in this model's picture mode."""
        return (
            source if isinstance(source, Picture) else load_picture(source, mode=self.picture_mode)
        )

    def chat_prompt(self, messages: Sequence[UserMessage]) -> Prompt:
        """Messages (see `messages.parse_messages`) as the tokens and pictures that the model gets."""
        return self.processor.process_chat(parse_messages(messages, self.load_picture))

    def raw_prompt(self, prompt: str, pictures: Sequence[Any] = ()) -> Prompt:
        """A ready prompt string, in which each `<image>` stands for one of `pictures`."""
        return self.processor.process_prompt(prompt, [self.load_picture(p) for p in pictures])

    # --- answers --------------------------------------------------------------------------------

    def chat(
        self, messages: Sequence[UserMessage], params: SamplingParams | None = None
    ) -> RequestOutput:
        """Answer a conversation that ends with a user's turn."""
        return _collect(self.stream(self.chat_prompt(messages), params))

    def stream_chat(
        self, messages: Sequence[UserMessage], params: SamplingParams | None = None
    ) -> Iterator[Delta]:
        """Like `chat`, piece by piece."""
        return self.stream(self.chat_prompt(messages), params)

    def generate(
        self, prompt: str, pictures: Sequence[Any] = (), params: SamplingParams | None = None
    ) -> RequestOutput:
        """Continue a raw prompt string."""
        return _collect(self.stream(self.raw_prompt(prompt, pictures), params))

    def stream(self, prompt: Prompt, params: SamplingParams | None = None) -> Iterator[Delta]:
        """Answer a ready `Prompt`, piece by piece; the last delta has the finish reason and the usage.

        `max_tokens` is cut to what the context leaves. Raises PromptTooLongError where it leaves nothing.
        """
        params = params or SamplingParams()
        room = self.max_model_len - prompt.num_tokens
        if room < 1:
            raise PromptTooLongError(
                f"the prompt has {prompt.num_tokens} tokens ({prompt.num_image_tokens} of them for pictures), "
                f"which leaves no room for an answer in a context of {self.max_model_len}; shorten the text or "
                "send fewer or smaller pictures"
            )
        return _Answer(self, prompt, params, min(params.max_tokens, room)).deltas()


def _collect(deltas: Iterator[Delta]) -> RequestOutput:
    text: list[str] = []
    token_ids: list[int] = []
    for delta in deltas:
        text.append(delta.text)
        token_ids.extend(delta.token_ids)
    assert delta.finish_reason is not None, "a stream ends with a finish reason"
    assert delta.usage is not None, "a stream ends with its usage"
    return RequestOutput(
        "".join(text), tuple(token_ids), delta.finish_reason, delta.usage, delta.stop_reason
    )


class _Answer:
    """One answer on its way: runs the model until something ends it."""

    def __init__(self, llm: LLM, prompt: Prompt, params: SamplingParams, max_tokens: int) -> None:
        self.llm, self.prompt, self.params, self.max_tokens = llm, prompt, params, max_tokens
        self.detokenizer = StreamDetokenizer(llm.tokenizer, params.stop)
        eos = () if params.ignore_eos else (llm.tokenizer.eos_id,)
        self.eos = frozenset(eos)
        self.stop_ids = frozenset((*eos, *params.stop_token_ids))
        grounding = {llm.tokenizer.token_id(token) for token in GROUNDING_TOKENS}
        self.is_grounding = not grounding.isdisjoint(prompt.token_ids)
        self.tokens: list[int] = []

    def deltas(self) -> Iterator[Delta]:
        limited = _with_max_tokens(self.params, self.max_tokens)
        tokens = self.llm.runner.generate(self.prompt, limited, stop_ids=self.stop_ids)
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
                if len(self.tokens) < self.max_tokens:
                    yield Delta(text, (token,))
        yield self._last("length", token, None, text)

    def _stop_reason(self) -> str | None:
        if self.detokenizer.stopped_by is not None:
            return self.detokenizer.stopped_by
        if is_looping(self.tokens, self.params.loop_guard_repeats):
            return "repetition"
        if self.is_grounding and is_runaway_box(self.detokenizer.text):
            return "runaway_box"
        return None

    def _last(
        self,
        finish: Literal["stop", "length"],
        token: int,
        reason: str | int | None,
        text: str = "",
    ) -> Delta:
        usage = Usage(self.prompt.num_tokens, len(self.tokens), self.prompt.num_image_tokens)
        return Delta(text + self.detokenizer.finish(), (token,), finish, reason, usage)


def _with_max_tokens(params: SamplingParams, max_tokens: int) -> SamplingParams:
    from dataclasses import replace

    return replace(params, max_tokens=max_tokens)


def _context(config: VL2Config, wanted: int | None) -> int:
    longest = config.language.max_position_embeddings
    if wanted is None:
        return longest
    if not 1 <= wanted <= longest:
        raise PromptTooLongError(
            f"max_model_len={wanted} is not possible: the model's positions end at {longest}"
        )
    return wanted


def check_grids(config: VL2Config, image_config: VL2ImageConfig) -> None:
    """The processor must count as many tokens a tile as the projector makes; raises CheckpointError if not."""
    if image_config.image_size != config.vision.image_size:
        raise CheckpointError(
            f"the processor cuts tiles of {image_config.image_size} pixels (processor_config.json, first candidate "
            f"resolution), but the tower takes {config.vision.image_size} (config.json, vision_config.image_size)"
        )
    if image_config.tokens_per_side != config.tokens_per_side:
        kind = config.projector.projector_type
        raise CheckpointError(
            f"the processor counts {image_config.tokens_per_side} tokens a tile side, but the {kind!r} projector "
            f"makes {config.tokens_per_side}; downsample_ratio in processor_config.json and projector_config "
            "do not fit together"
        )


def load_model(
    folder: Path,
    config: VL2Config,
    *,
    dtype: str = "auto",
    device: str = "auto",
    vision_mode: VisionMode = "official",
    progress: Callable[[int, int], None] | None = None,
) -> tuple[VL2Model, Precision]:
    """Build the model and read its weights from `folder`. Raises CheckpointError or ResourceError."""
    specs = parameter_specs(config)
    where = resolve_device(device)
    count = sum(_num_elements(spec.shape) for spec in specs)
    free = available_bytes() if where.type == "cpu" else None
    precision = resolve_precision(dtype, where, num_parameters=count, available_bytes=free)
    needed = count * precision.dtype.itemsize
    if free is not None and needed > free:
        raise ResourceError(
            f"{precision.name} weights need {needed / 1e9:.1f} GB, but {free / 1e9:.1f} GB of memory are free; "
            f"`foveal fit {folder.name}` shows what each dtype needs"
        )
    checkpoint = Checkpoint.open(folder)
    factory = precision.factory(where)
    model = VL2Model(config, vision=factory, language=factory, vision_mode=vision_mode)
    load_parameters(
        specs,
        checkpoint,
        _destinations(model),
        progress,
        ignored=lambda name: is_ignored(name, config),
    )
    return model.eval(), precision


def _destinations(model: VL2Model) -> Mapping[str, Any]:
    return {name: parameter.data for name, parameter in model.named_parameters()}


def _num_elements(shape: tuple[int, ...]) -> int:
    total = 1
    for size in shape:
        total *= size
    return total
