"""Core data types. This module imports nothing of ours but the errors, and no torch."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Literal, TypeAlias

import numpy as np
import numpy.typing as npt

from foveal.errors import PromptError

FinishReason: TypeAlias = Literal["stop", "length", "abort", "error"]
Role: TypeAlias = Literal["system", "user", "assistant"]


StructureKind: TypeAlias = Literal["json_object", "json_schema", "regex", "choice", "grammar"]


@dataclass(frozen=True, slots=True)
class Structure:
    """A form that an answer must have: what `kind` means is in `value`.

    json_object: empty; json_schema: the schema as JSON text; regex: a pattern for the whole answer; choice: a JSON list
    of texts; grammar: a Lark grammar. `after_token` starts the form behind that token id (the end of reasoning).
    """

    kind: StructureKind
    value: str = ""
    after_token: int | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class SamplingParams:
    """How the next token is chosen and when generation ends.

    `temperature` 0 is greedy. `top_k` 0, `top_p` 1 and `min_p` 0 switch their filter off. `repetition_penalty` looks at
    prompt and output, `presence_penalty` and `frequency_penalty` at the output. `logit_bias` are (token id, amount)
    pairs, `bad_words` texts that may not appear. Before `min_tokens` no stop token is drawn. `seed` None draws a fresh
    seed. The tokens are a function of (logits, these parameters, seed, position) and of nothing else.
    `logprobs` n asks for the log-probability of each token and of the n best ones, from the raw logits.
    `structure` asks for a form. `include_stop` keeps a stop string in the text, `skip_special_tokens` leaves out
    special tokens, grounding tags too. `loop_guard_repeats` ends generation when the output's tail is one
    n-gram repeated that many times (0: off).
    Raises PromptError for values out of range.
    """

    max_tokens: int = 512
    min_tokens: int = 0
    temperature: float = 0.0
    top_p: float = 1.0
    top_k: int = 0
    min_p: float = 0.0
    repetition_penalty: float = 1.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    logit_bias: tuple[tuple[int, float], ...] = ()
    bad_words: tuple[str, ...] = ()
    seed: int | None = None
    stop: tuple[str, ...] = ()
    stop_token_ids: tuple[int, ...] = ()
    include_stop: bool = False
    ignore_eos: bool = False
    logprobs: int | None = None
    structure: Structure | None = None
    skip_special_tokens: bool = False
    loop_guard_repeats: int = 0

    def __post_init__(self) -> None:
        rules = (
            ("max_tokens", self.max_tokens >= 1, "at least 1"),
            ("min_tokens", 0 <= self.min_tokens <= self.max_tokens, "between 0 and max_tokens"),
            ("temperature", 0.0 <= self.temperature <= 100.0, "between 0 and 100"),
            ("top_p", 0.0 < self.top_p <= 1.0, "above 0 and at most 1"),
            ("top_k", self.top_k >= 0, "0 (off) or more"),
            ("min_p", 0.0 <= self.min_p < 1.0, "at least 0 and below 1"),
            ("repetition_penalty", 0.0 < self.repetition_penalty < math.inf, "above 0"),
            ("presence_penalty", -2.0 <= self.presence_penalty <= 2.0, "between -2 and 2"),
            ("frequency_penalty", -2.0 <= self.frequency_penalty <= 2.0, "between -2 and 2"),
            (
                "logit_bias",
                all(math.isfinite(v) and -100.0 <= v <= 100.0 for _, v in self.logit_bias),
                "pairs of a token id and a number between -100 and 100",
            ),
            ("bad_words", all(self.bad_words), "a list of non-empty strings"),
            ("loop_guard_repeats", self.loop_guard_repeats >= 0, "0 (off) or more"),
            ("stop", all(self.stop), "a list of non-empty strings"),
            ("logprobs", self.logprobs is None or 0 <= self.logprobs <= 20, "between 0 and 20"),
        )
        for name, is_valid, rule in rules:
            if not is_valid:
                raise PromptError(
                    f"{name}={getattr(self, name)!r} is not allowed: it must be {rule}"
                )


@dataclass(frozen=True, slots=True)
class TokenLogprob:
    """Natural logarithm of a token's probability; `rank` 1 is the likeliest. `top` holds the best ones in order."""

    token_id: int
    logprob: float
    rank: int
    top: tuple[tuple[int, float], ...] = ()


@dataclass(frozen=True, slots=True)
class Picture:
    """A decoded picture: `rgb` [height, width, 3] uint8 after EXIF rotation, and what was done to get it."""

    rgb: npt.NDArray[np.uint8]
    source: str = "picture"
    notes: tuple[str, ...] = ()

    @property
    def width(self) -> int:
        return int(self.rgb.shape[1])

    @property
    def height(self) -> int:
        return int(self.rgb.shape[0])


@dataclass(frozen=True, slots=True, eq=False)
class PrecomputedTiles:
    """A picture cut and normalised elsewhere: `pixel_values` float [1 + cols*rows, 3, size, size], global view first,
    then the tiles row by row; `grid` is (cols, rows).
    """

    pixel_values: npt.NDArray[np.float32]
    grid: tuple[int, int]


@dataclass(frozen=True, slots=True, eq=False)
class PrecomputedEmbeds:
    """A picture encoded elsewhere: `rows` float [length, width], newline and separator rows included (VL2 spec 5.3)."""

    rows: npt.NDArray[np.float32]


@dataclass(frozen=True, slots=True, eq=False)
class PrecomputedPatches:
    """A picture cut elsewhere for DeepSeek-V4: `patches` [rows * cols of `vit_grid`, 3, p, p] in reading order.

    uint8 patches are raw pixels; float32 ones are normalised and rounded to bfloat16 numbers. Grids are (rows, cols).
    """

    patches: npt.NDArray[np.uint8] | npt.NDArray[np.float32]
    vit_grid: tuple[int, int]
    llm_grid: tuple[int, int]
    perm: npt.NDArray[np.int64]


# What may stand for a picture in a prompt, and what a message is made of.
Precomputed: TypeAlias = PrecomputedTiles | PrecomputedEmbeds | PrecomputedPatches
PictureInput: TypeAlias = Picture | Precomputed
Part: TypeAlias = str | PictureInput


@dataclass(frozen=True, slots=True)
class Message:
    """One turn. `content` is a list of literal texts and pictures, in order; texts never hold placeholders."""

    role: Role
    content: tuple[Part, ...]


@dataclass(frozen=True, slots=True, eq=False)
class MediaItem:
    """One picture as the model gets it.

    Exactly one of `tiles` (uint8 [1 + cols*rows, 3, size, size], global view first), `pixel_values` (float32, the same
    shape, already normalised) and `embeds` (float32 [length, width], ready rows of the language model's input) is set.
    `grid` is (cols, rows) of the local tiles; `start` and `length` give its placeholders in the prompt; `size` is
    (width, height) of the original picture in pixels, (0, 0) where it is not known.
    """

    grid: tuple[int, int]
    start: int
    length: int
    size: tuple[int, int] = (0, 0)
    tiles: npt.NDArray[np.uint8] | None = None
    pixel_values: npt.NDArray[np.float32] | None = None
    embeds: npt.NDArray[np.float32] | None = None

    @property
    def num_tiles(self) -> int:
        return 1 + self.grid[0] * self.grid[1]


# Types of a DeepSeek-V4 picture's tokens; their raw ids are vocab_size + type.
START, PAD, IMAGE, NEW_LINE, END = range(5)


@dataclass(frozen=True, slots=True, eq=False)
class V4MediaItem:
    """One picture as a DeepSeek-V4 model gets it: a block of sentinel tokens and the patches behind it.

    The block is `length` tokens from position `start` on, of which the first `num_pads` are alignment pads;
    `types` [length] says what each is (START ... END). `patches` [rows * cols of
    `vit_grid`, 3, p, p] are uint8 pixels in reading order, or `patch_values` the same already normalised and
    rounded to bfloat16 numbers. The k-th image token takes aligner row `perm[k]`. Grids are (rows, cols).
    `size` is (width, height) of the original.
    """

    start: int
    length: int
    num_pads: int
    types: npt.NDArray[np.int64]
    perm: npt.NDArray[np.int64]
    vit_grid: tuple[int, int]
    llm_grid: tuple[int, int]
    size: tuple[int, int] = (0, 0)
    patches: npt.NDArray[np.uint8] | None = None
    patch_values: npt.NDArray[np.float32] | None = None

    @property
    def span(self) -> tuple[int, int]:
        """Positions of the block's START and END token: what lies between is computed in one piece."""
        return self.start + self.num_pads, self.start + self.length - 1


@dataclass(frozen=True, slots=True, eq=False)
class Prompt:
    """What a request sends to the model: raw token ids (each placeholder counted) and the pictures behind them."""

    token_ids: tuple[int, ...]
    items: tuple[MediaItem, ...] | tuple[V4MediaItem, ...] = ()

    @property
    def num_tokens(self) -> int:
        return len(self.token_ids)

    @property
    def num_image_tokens(self) -> int:
        return sum(item.length for item in self.items)


@dataclass(frozen=True, slots=True)
class Usage:
    """Token counts of one request. `image_tokens` is the share of `prompt_tokens` that pictures take, `cached_tokens`
    the share that was found in the prefix cache, `reasoning_tokens` the share of `completion_tokens` before the answer.
    """

    prompt_tokens: int
    completion_tokens: int
    image_tokens: int
    cached_tokens: int = 0
    reasoning_tokens: int = 0


@dataclass(frozen=True, slots=True)
class ToolCall:
    """A call that the model makes: `arguments` is the text of a JSON object."""

    name: str
    arguments: str


@dataclass(frozen=True, slots=True)
class Delta:
    """One piece of a streamed answer. The last one has `finish_reason` set.

    `text` is the answer itself, `reasoning` what the model thinks before it; a call comes out whole.
    """

    text: str
    token_ids: tuple[int, ...] = ()
    finish_reason: FinishReason | None = None
    stop_reason: str | int | None = None
    usage: Usage | None = None
    reasoning: str = ""
    tool_calls: tuple[ToolCall, ...] = ()
    logprobs: tuple[TokenLogprob, ...] = ()


@dataclass(frozen=True, slots=True)
class RequestOutput:
    """A whole answer.

    `stop_reason` says more about `finish_reason`: the stop string or stop token id met, or "repetition" where a loop
    guard ended the answer; None for end of sequence and for length. `reasoning` and `tool_calls` are parts of the
    answer that `text` does not hold, for models that have them.
    """

    text: str
    token_ids: tuple[int, ...]
    finish_reason: FinishReason
    usage: Usage
    stop_reason: str | int | None = None
    reasoning: str = ""
    tool_calls: tuple[ToolCall, ...] = ()
    logprobs: tuple[TokenLogprob, ...] = ()


@dataclass(frozen=True, slots=True)
class Box:
    """A box in an answer. `box` is (x1, y1, x2, y2) in pixels of the original picture, `raw` the 0..999 numbers."""

    label: str
    box: tuple[int, int, int, int]
    raw: tuple[int, int, int, int]
    image: int = 0


@dataclass(frozen=True, slots=True)
class MalformedBox:
    """A piece of grounding text that is not a box. `reason` is one of the codes listed in `text.grounding`."""

    text: str
    reason: str


@dataclass(frozen=True, slots=True)
class Grounding:
    """Boxes read from an answer, and what could not be read."""

    boxes: tuple[Box, ...] = ()
    malformed: tuple[MalformedBox, ...] = field(default=())


ImageSizes: TypeAlias = Sequence[tuple[int, int]]
