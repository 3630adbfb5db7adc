"""Laws of a DeepSeek-V4 model, checked on a loaded one: every way of splitting the work is one answer.

Text is a list of seeded ids, so that a checkpoint without a tokenizer is checked too; a vision checkpoint is shown a
picture of noise as well.
"""

from __future__ import annotations

import functools
from collections.abc import Callable

import numpy as np
import torch
from torch import Tensor

from foveal.errors import FovealError
from foveal.runner.v4_cache import MARGIN
from foveal.types import Picture, Prompt
from foveal.verify.compare import Array, compare_equal, compare_floats
from foveal.verify.laws import COLUMN, LIMITS, NUM_COMPARED, NUM_GREEDY, noise_picture
from foveal.verify.report import CaseResult, Check, Report
from foveal.verify.subject import to_numpy
from foveal.verify.v4_subject import V4Subject

# Past a window of ratio 128 and not at a multiple of either ratio.
TEXT_LENGTH = 150
SIDE = 96  # of the noise picture, before the model's own rules scale it


class _Bench:
    """What the laws share: a text and a prompt with a picture, and their input rows."""

    def __init__(self, subject: V4Subject) -> None:
        self.subject = subject
        self.limit = LIMITS[subject.model.language.embed_tokens.weight.dtype]

    @functools.cached_property
    def text(self) -> Prompt:
        vocabulary = self.subject.config.language.vocab_size
        ids = np.random.default_rng(0).integers(0, vocabulary, TEXT_LENGTH)
        return Prompt(tuple(int(token) for token in ids))

    def picture(self, seed: int) -> Prompt | None:
        """The text around one picture; None for a text checkpoint."""
        processor = self.subject.processor
        if processor is None or not self.subject.model.has_tower:
            return None
        ids = list(self.text.token_ids)
        noise: Picture = noise_picture(SIDE, SIDE, seed=seed)
        return processor.process_segments([ids[:5], ids[5:40]], [noise])

    @functools.cached_property
    def richest(self) -> Prompt:
        """The prompt with a picture where there can be one."""
        return self.picture(1) or self.text

    def rows(self, prompt: Prompt) -> Tensor:
        return self.subject.runner.prompt_rows(prompt)

    def whole(self, prompt: Prompt) -> Array:
        return self.last(self.subject.hidden(prompt, self.rows(prompt)))

    def last(self, hidden: Tensor) -> Array:
        return to_numpy(self.subject.runner.logits(hidden[-NUM_COMPARED:]))

    def compare(self, expected: Array, actual: Array) -> Check:
        return compare_floats(
            "logits", expected, actual, self.limit, column=COLUMN, is_relative=True
        )


Law = Callable[[_Bench], Check | None]


def verify_v4_laws(
    subject: V4Subject, *, on_case: Callable[[CaseResult], None] | None = None
) -> Report:
    """Run all laws that apply to the model; `on_case` sees each result as it is there."""
    bench, results = _Bench(subject), []
    for name, law in V4_LAWS.items():
        try:
            check = law(bench)
        except FovealError as error:  # logits that are not finite, for one
            results.append(CaseResult(name, error=str(error)))
        else:
            if check is None:
                continue
            results.append(CaseResult(name, (check,)))
        if on_case is not None:
            on_case(results[-1])
    return Report(tuple(results))


def _finite(bench: _Bench) -> Check:
    logits = bench.whole(bench.richest)
    count = int((~np.isfinite(logits)).sum())
    detail = f"{count} of {logits.size} are not finite" if count else ""
    return Check("logits", COLUMN, count == 0, detail=detail)


def _oracle(bench: _Bench) -> Check:
    rows = bench.rows(bench.richest)
    expected = bench.subject.oracle_logits(bench.richest, rows)[-NUM_COMPARED:]
    return bench.compare(expected, bench.whole(bench.richest))


def _chunks(prompt_of: Callable[[_Bench], Prompt], size: int) -> Law:
    def law(bench: _Bench) -> Check:
        prompt = prompt_of(bench)
        hidden = bench.subject.hidden(prompt, bench.rows(prompt), chunk_size=size)
        return bench.compare(bench.whole(prompt), bench.last(hidden))

    return law


def _rollback(bench: _Bench) -> Check:
    """Tokens that are taken back leave no trace."""
    runner, prompt, rows = bench.subject.runner, bench.text, bench.rows(bench.text)
    ids, kept = runner.prompt_ids(prompt), 128 - MARGIN // 2  # the tokens cross a multiple of 128
    cache = runner.new_cache(len(rows) + MARGIN, prompt)
    runner.extend([cache], [rows[:kept]], [ids[:kept]])
    runner.extend([cache], [rows[:MARGIN]], [ids[:MARGIN]])
    cache.num_computed_tokens = kept
    hidden = runner.extend([cache], [rows[kept:]], [ids[kept:]])
    return bench.compare(bench.whole(prompt), bench.last(hidden))


def _batched(bench: _Bench) -> Check:
    runner, prompts = bench.subject.runner, [bench.text, bench.richest]
    rows = [bench.rows(prompt) for prompt in prompts]
    caches = [runner.new_cache(len(r), p) for r, p in zip(rows, prompts, strict=True)]
    hidden = runner.extend(caches, rows, [runner.prompt_ids(prompt) for prompt in prompts])
    together = [bench.last(part) for part in hidden.split([len(r) for r in rows])]
    alone = [bench.whole(prompt) for prompt in prompts]
    return bench.compare(np.stack(alone), np.stack(together))


def _repeatable(bench: _Bench) -> Check:
    first, _ = bench.subject.greedy(bench.richest, NUM_GREEDY)
    again, _ = bench.subject.greedy(bench.richest, NUM_GREEDY)
    return compare_equal("tokens", first, again, column=COLUMN)


@torch.inference_mode()
def _packed(bench: _Bench) -> Check | None:
    """Two pictures packed together give the rows that each gives alone."""
    prompts = [bench.picture(seed) for seed in (1, 2)]
    items = [prompt.items[0] for prompt in prompts if prompt is not None]
    if not items:
        return None
    runner, model = bench.subject.runner, bench.subject.model
    patches = [runner.patch_values(item) for item in items]  # type: ignore[arg-type]  # V4 prompts hold V4 items
    grids = [item.vit_grid for item in items]  # type: ignore[union-attr]
    alone = torch.cat([model.encode_picture(p, g) for p, g in zip(patches, grids, strict=True)])
    together = model.encode_packed(torch.cat(patches), grids)
    return bench.compare(to_numpy(alone), to_numpy(together))


def _seen(bench: _Bench) -> Check | None:
    """Another picture changes the logits: the picture reaches the answer."""
    one, two = bench.picture(1), bench.picture(2)
    if one is None or two is None:
        return None
    is_seen = not np.array_equal(bench.whole(one), bench.whole(two))
    detail = "" if is_seen else "two pictures give the same logits"
    return Check("logits", COLUMN, is_seen, detail=detail)


V4_LAWS: dict[str, Law] = {
    "logits are finite": _finite,
    "prefill = slow whole-sequence forward": _oracle,
    "token by token = whole": _chunks(lambda bench: bench.text, 1),
    "chunks of 7 = whole, pictures in one piece": _chunks(lambda bench: bench.richest, 7),
    "chunks of 64 = whole": _chunks(lambda bench: bench.text, 64),
    "a rollback leaves no trace": _rollback,
    "batched = alone": _batched,
    "greedy answers repeat": _repeatable,
    "packed pictures = single ones": _packed,
    "another picture, other logits": _seen,
}
