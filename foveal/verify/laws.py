"""Laws that hold for every model, checked on a loaded one: no golden data needed.

Each law compares two ways to one result, or states a property of a result. They find a broken cache, mask, batch or
kernel; they cannot find weights that were wrong from the start, which only golden data can.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING

import numpy as np
import torch
from torch import Tensor

from foveal.errors import FovealError
from foveal.types import Message, Picture, Prompt
from foveal.verify.compare import Array, compare_equal, compare_floats
from foveal.verify.report import CaseResult, Check, Report
from foveal.verify.subject import Subject, media_items, to_numpy

if TYPE_CHECKING:
    from foveal.llm import LLM

COLUMN = "difference"
# Relative to a row's largest value. Float32 paths differ by the order of sums; with half-precision weights, paths for
# few and for many rows also round at different places.
LIMITS = {torch.float32: 2e-4, torch.bfloat16: 5e-2, torch.float16: 2e-2}
NUM_COMPARED = 16  # last positions whose logits are compared: a whole vocabulary for each position would fill memory
NUM_GREEDY = 8
TEXT = "Count to ten, then say what you see: 1, 2, 3."
ROUND_TRIPS = (
    "Hello, world!",
    "  two  spaces\n\n\ttab",
    "naïve café – 请用中文回答 🙂",
    "<image> 12345",
)


class _Bench:
    """What the laws share: prompts with and without a picture, and their input rows, computed once."""

    def __init__(self, llm: LLM) -> None:
        self.subject = Subject(llm)
        self.limit = LIMITS[self.subject.model.language.embed_tokens.weight.dtype]

    @property
    def tile(self) -> int:
        size: int = self.subject.config.vision.image_size
        return size

    def prompt(self, *content: str | Picture) -> Prompt:
        return self.subject.processor.process_chat([Message("user", content)])

    @functools.cached_property
    def text_rows(self) -> Tensor:
        return self.subject.rows(self.prompt(TEXT))

    @functools.cached_property
    def picture_prompt(self) -> Prompt:
        """A question about one picture that takes a single local tile."""
        return self.prompt(noise_picture(self.tile, self.tile, seed=1), TEXT)

    @functools.cached_property
    def picture_rows(self) -> Tensor:
        return self.subject.rows(self.picture_prompt)

    def last_logits(self, hidden: Tensor) -> Array:
        return to_numpy(self.subject.runner.logits(hidden[-NUM_COMPARED:]))

    def compare(self, name: str, expected: Array, actual: Array) -> Check:
        return compare_floats(name, expected, actual, self.limit, column=COLUMN, is_relative=True)


Law = Callable[[_Bench], Check | None]


def verify_laws(llm: LLM, *, on_case: Callable[[CaseResult], None] | None = None) -> Report:
    """Run all laws that apply to the model; `on_case` sees each result as it is there."""
    bench = _Bench(llm)
    results = []
    for result in _run(bench):
        results.append(result)
        if on_case is not None:
            on_case(result)
    return Report(tuple(results))


def _run(bench: _Bench) -> Iterator[CaseResult]:
    for name, law in LAWS.items():
        try:
            check = law(bench)
        except FovealError as error:  # logits that are not finite, for one
            yield CaseResult(name, error=str(error))
            continue
        if check is not None:
            yield CaseResult(name, (check,))


def noise_picture(width: int, height: int, *, seed: int) -> Picture:
    """A picture of seeded noise: every tile of it differs."""
    pixels = np.random.default_rng(seed).integers(0, 256, (height, width, 3), dtype=np.uint8)
    return Picture(pixels)


def _round_trip(bench: _Bench) -> Check:
    tokenizer = bench.subject.processor.tokenizer
    texts = [tokenizer.decode(tokenizer.encode_literal(text, ())) for text in ROUND_TRIPS]
    bad = [
        f"{have!r}, expected {want!r}"
        for have, want in zip(texts, ROUND_TRIPS, strict=True)
        if have != want
    ]
    return Check("text", COLUMN, not bad, detail="; ".join(bad))


def _known_ids(bench: _Bench) -> Check:
    """Every id that a prompt can hold has a row in the embedding table."""
    size = bench.subject.config.language.vocab_size
    largest = max(bench.picture_prompt.token_ids)
    detail = "" if largest < size else f"id {largest}, but the table has {size} rows"
    return Check("ids", COLUMN, largest < size, detail=detail)


def _placeholders(bench: _Bench) -> Check:
    """A wide picture has as many placeholders as its grid says, and as many rows."""
    prompt = bench.prompt(noise_picture(2 * bench.tile, bench.tile, seed=2), TEXT)
    (item,) = media_items(prompt)
    (rows,) = bench.subject.runner.encode_pictures([item])
    expected = bench.subject.config.num_image_tokens(*item.grid)
    return compare_equal("counts", [expected, expected], [item.length, len(rows)], column=COLUMN)


def _one_tile(bench: _Bench) -> Check:
    """Where the grid is 1x1, the local tile equals the global view, and is encoded once."""
    (item,) = media_items(bench.picture_prompt)
    pixels = to_numpy(bench.subject.runner.pixel_values(item))
    bench.subject.runner.encode_pictures([item])
    actual = [*item.grid, bench.subject.runner.timings.num_tiles_encoded]
    if actual == [1, 1, 1] and np.array_equal(pixels[0], pixels[1]):
        return Check("tiles", COLUMN, True)
    return Check(
        "tiles",
        COLUMN,
        False,
        detail=f"columns, rows, tiles encoded are {actual}, expected [1, 1, 1]",
    )


def _finite(bench: _Bench) -> Check:
    logits = bench.last_logits(bench.subject.hidden(bench.picture_rows))
    count = int((~np.isfinite(logits)).sum())
    return Check(
        "logits",
        COLUMN,
        count == 0,
        detail=f"{count} of {logits.size} are not finite" if count else "",
    )


def _oracle(bench: _Bench) -> Check:
    expected = bench.subject.oracle_logits(bench.text_rows)[-NUM_COMPARED:]
    return bench.compare(
        "logits", expected, bench.last_logits(bench.subject.hidden(bench.text_rows))
    )


def _chunks(bench: _Bench, rows: Tensor, size: int) -> Check:
    expected = bench.last_logits(bench.subject.hidden(rows))
    return bench.compare(
        "logits", expected, bench.last_logits(bench.subject.hidden(rows, chunk_size=size))
    )


def _one_by_one(bench: _Bench) -> Check:
    return _chunks(bench, bench.text_rows, 1)


def _chunks_of_7(bench: _Bench) -> Check:
    return _chunks(bench, bench.text_rows, 7)


def _chunks_of_64(bench: _Bench) -> Check:
    return _chunks(bench, bench.picture_rows, 64)


def _absorbed(bench: _Bench) -> Check | None:
    """Few rows take the absorbed form of latent attention, many the expanded one."""
    if not bench.subject.config.language.uses_mla:
        return None
    return _chunks(bench, bench.picture_rows[-4 * NUM_COMPARED :], 8)


def _batched(bench: _Bench) -> Check:
    """Two requests in one pass give what each gives alone."""
    runner, pieces = bench.subject.runner, [bench.text_rows, bench.picture_rows]
    hidden = runner.extend([runner.new_cache(len(piece)) for piece in pieces], pieces)
    together = [bench.last_logits(part) for part in hidden.split([len(piece) for piece in pieces])]
    alone = [bench.last_logits(bench.subject.hidden(piece)) for piece in pieces]
    return bench.compare("logits", np.stack(alone), np.stack(together))


def _decode(bench: _Bench) -> Check:
    """Logits of generated tokens are those of a prefill over prompt and tokens."""
    tokens, last = bench.subject.greedy(bench.picture_prompt, NUM_GREEDY)
    continuation = bench.subject.model.embed(
        torch.tensor(tokens[:-1], device=bench.subject.model.device)
    )
    rows = torch.cat((bench.picture_rows, continuation))
    return bench.compare("logits", bench.last_logits(bench.subject.hidden(rows))[-1], last)


def _repeatable(bench: _Bench) -> Check:
    first, _ = bench.subject.greedy(bench.picture_prompt, NUM_GREEDY)
    again, _ = bench.subject.greedy(bench.picture_prompt, NUM_GREEDY)
    return compare_equal("tokens", first, again, column=COLUMN)


def _seen(bench: _Bench) -> Check:
    """Another picture changes the logits: the picture reaches the answer."""
    other = bench.prompt(noise_picture(bench.tile, bench.tile, seed=3), TEXT)
    one = bench.last_logits(bench.subject.hidden(bench.picture_rows))
    two = bench.last_logits(bench.subject.hidden(bench.subject.rows(other)))
    is_seen = not np.array_equal(one, two)
    return Check(
        "logits", COLUMN, is_seen, detail="" if is_seen else "two pictures give the same logits"
    )


LAWS: dict[str, Law] = {
    "text survives encoding and decoding": _round_trip,
    "prompt ids have embedding rows": _known_ids,
    "placeholders match the tile grid": _placeholders,
    "a single tile is encoded once": _one_tile,
    "logits are finite": _finite,
    "prefill = slow whole-sequence forward": _oracle,
    "token by token = whole": _one_by_one,
    "chunks of 7 = whole": _chunks_of_7,
    "chunks of 64 = whole, with a picture": _chunks_of_64,
    "absorbed = expanded latent attention": _absorbed,
    "batched = alone": _batched,
    "decode = prefill": _decode,
    "greedy answers repeat": _repeatable,
    "another picture, other logits": _seen,
}
