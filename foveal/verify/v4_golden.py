"""Comparison of a DeepSeek-V4 model with golden cases, text (`v4_text`) and vision (`v4_vision`).

Text cases are lists of ids. Vision cases are rendered prompts with pictures: ids, blocks, patches and permutations are
made here and compared too. The limits are those of the golden README.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from torch import Tensor

from foveal.errors import FovealError
from foveal.text.tokenizer import BOS
from foveal.types import Prompt, V4MediaItem
from foveal.verify.cases import CaseError, GoldenCase, list_cases, read_case
from foveal.verify.compare import Array, compare_equal, compare_floats
from foveal.verify.golden import EMBEDS_LIMIT, HIDDEN_LIMIT, LOGITS_LIMIT, VISION_LIMIT
from foveal.verify.report import CaseResult, Check, Report
from foveal.verify.v4_subject import V4Inside, V4Subject
from foveal.vision.decode import load_picture

CHUNK_SIZES = (7, 100)
RENDERED_BOS = "<bos>"  # how the cases spell begin of sequence


@dataclass(frozen=True, slots=True, eq=False)
class _Run:
    """A case on its way: the prompt as the engine has it, and its input rows."""

    prompt: Prompt
    items: list[V4MediaItem]
    rows: Tensor


def verify_v4_golden(
    subject: V4Subject, folder: Path, *, on_case: Callable[[CaseResult], None] | None = None
) -> Report:
    """Run every case under `folder`/cases; see `golden.verify_golden`."""
    results = []
    for path in list_cases(folder):
        results.append(_run_case(subject, path))
        if on_case is not None:
            on_case(results[-1])
    return Report(tuple(results))


def _run_case(subject: V4Subject, path: Path) -> CaseResult:
    # As for VL2: whatever a foreign case file raises is that case's failure and hides no other.
    try:
        case = read_case(path, has_conversations=False)
        checks = tuple(_checks(subject, case))
    except FovealError as error:
        return CaseResult(path.stem, error=str(error))
    except Exception as error:
        return CaseResult(path.stem, error=f"{type(error).__name__}: {error}")
    return CaseResult(case.name, checks, case.not_checked)


def _checks(subject: V4Subject, case: GoldenCase) -> Iterator[Check]:
    prompt = _prompt(subject, case)
    items = [item for item in prompt.items if isinstance(item, V4MediaItem)]
    run = _Run(prompt, items, subject.runner.prompt_rows(prompt))
    yield from _check_prompt(case, run)
    yield from _check_pictures(subject, case, run)
    yield from _check_embeds(case, run)
    yield from _check_logits(case, subject.logits(prompt, run.rows))
    yield from _check_greedy(subject, case, run)
    yield from _check_inside(subject, case, run)
    yield _check_chunks(subject, run)


def _prompt(subject: V4Subject, case: GoldenCase) -> Prompt:
    rendered = case.fact("rendered")
    if rendered is None:
        ids = case.take_whole("input_ids")
        if ids is None:
            raise CaseError(f"{case.name} holds neither input_ids nor a rendered prompt")
        return Prompt(tuple(int(token) for token in ids.reshape(-1)))
    names = case.fact("images") or ()
    pictures = [load_picture(case.picture_path(str(name)), mode="vendor") for name in names]
    return subject.prompt(str(rendered).replace(RENDERED_BOS, BOS, 1), pictures)


def _check_prompt(case: GoldenCase, run: _Run) -> Iterator[Check]:
    ids = case.take_whole("input_ids")
    if ids is not None:
        yield compare_equal("input_ids", ids, np.array(run.prompt.token_ids), column="prompt")
    length, blocks = case.fact("length"), case.fact("image_blocks")
    if length is not None:
        yield compare_equal("length", [length], [run.prompt.num_tokens], column="prompt")
    if blocks is not None:
        facts = [_block_facts(item) for item in run.items]
        yield compare_equal(
            "image_blocks", [list(b.values()) for b in blocks], facts, column="prompt"
        )
    for k, item in enumerate(run.items):
        for name, values in (("types", item.types), ("perm", item.perm)):
            stored = case.take_whole(f"image{k}.{name}")
            if stored is not None:
                yield compare_equal(f"image{k}.{name}", stored, values, column="prompt")
    for name, sees in _visible(run).items():
        stored = case.take_whole(name)
        if stored is not None:
            yield compare_equal(name, stored, sees, column="spans")
    case.fact("vocab_size")


def _block_facts(item: V4MediaItem) -> list[object]:
    return [item.start, item.length, list(item.vit_grid), list(item.llm_grid)]


def _visible(run: _Run) -> dict[str, Array]:
    """How far a query inside a picture sees to both sides."""
    left, right = (np.zeros(run.prompt.num_tokens, dtype=np.int64) for _ in range(2))
    for item in run.items:
        start, end = item.span
        inside = np.arange(start, end + 1)
        left[inside], right[inside] = inside - start, end - inside
    return {"visible_left": left, "visible_right": right}


def _check_pictures(subject: V4Subject, case: GoldenCase, run: _Run) -> Iterator[Check]:
    columns = (("patches", "patches", 0.0), ("vit_features", "tower", VISION_LIMIT))
    for k, item in enumerate(run.items):
        outputs = subject.tower(item)
        for (name, column, limit), have in zip(
            (*columns, ("aligner_out", "aligner", VISION_LIMIT)), outputs, strict=True
        ):
            want = case.take(f"image{k}.{name}")
            if want is not None:
                full = f"image{k}.{name}"
                yield compare_floats(full, want.values, have, limit, column=column, step=want.step)


def _check_embeds(case: GoldenCase, run: _Run) -> Iterator[Check]:
    want = case.take("inputs_embeds")
    if want is not None:
        have = run.rows.float().cpu().numpy()[None]
        yield compare_floats(
            "inputs_embeds", want.values, have, EMBEDS_LIMIT, column="embeds", step=want.step
        )


def _check_logits(case: GoldenCase, logits: Array) -> Iterator[Check]:
    want, some = case.take("logits"), case.take("logits_at_positions")
    if want is not None:
        yield compare_floats(
            "logits", want.values, logits, LOGITS_LIMIT, column="logits", step=want.step
        )
    if some is None:
        return
    positions = case.take_whole("logits_positions")
    if positions is None:
        raise CaseError(f"{case.name} holds logits_at_positions without logits_positions")
    have = logits[positions.reshape(-1)]
    yield compare_floats(
        "logits_at_positions", some.values, have, LOGITS_LIMIT, column="logits", step=some.step
    )


def _check_greedy(subject: V4Subject, case: GoldenCase, run: _Run) -> Iterator[Check]:
    tokens, fact = case.take_whole("greedy_tokens"), case.fact("greedy_tokens")
    expected = tokens if tokens is not None else fact
    if expected is None:
        return
    chosen, logits = subject.greedy(run.prompt, int(np.asarray(expected).size))
    for stored in (tokens, fact):
        if stored is not None:
            yield compare_equal(
                "greedy_tokens", np.asarray(stored).reshape(-1), np.array(chosen), column="greedy"
            )
    want = case.take("greedy_step_logits")
    if want is not None:
        yield compare_floats(
            "greedy_step_logits", want.values, logits, LOGITS_LIMIT, column="steps", step=want.step
        )


def _check_inside(subject: V4Subject, case: GoldenCase, run: _Run) -> Iterator[Check]:
    """Streams before each layer, hidden rows after the last, and the entries that the indexer chose."""
    streams = case.names_like(r"hidden_streams\.\d+")
    choices = case.names_like(r"indexer_topk\.layer\d+")
    if not streams and not choices:
        return
    inside = subject.inside(run.prompt, run.rows)
    for name in streams:
        yield _check_streams(case, inside, name)
    for name in choices:
        yield _check_choice(case, inside, name)


def _check_streams(case: GoldenCase, inside: V4Inside, name: str) -> Check:
    index, want = int(name.rpartition(".")[2]), case.take(name)
    assert want is not None, "the name comes from the case"
    assert inside.hidden is not None, "a pass has ended"
    states = [*inside.streams, inside.hidden]
    if index >= len(states):
        return Check(
            name, "streams", False, detail=f"the model has states 0 to {len(states) - 1} only"
        )
    expected = want.values[0]
    have = states[index][-len(expected) :]  # longer cases hold the last positions only
    return compare_floats(
        name, expected, have, HIDDEN_LIMIT, column="streams", step=want.step, is_relative=True
    )


def _check_choice(case: GoldenCase, inside: V4Inside, name: str) -> Check:
    layer, want = int(name.rpartition("layer")[2]), case.take_whole(name)
    assert want is not None, "the name comes from the case"
    expected = want.reshape(-1, want.shape[-1]).astype(np.int64)
    if layer not in inside.entries:
        detail = f"layer {layer} of the model has no indexer"
        return Check(name, "indexer", False, detail=detail)
    have = np.full_like(expected, -1)
    for query, chosen in enumerate(inside.entries[layer]):
        ids = np.flatnonzero(chosen)[::-1][: have.shape[1]]  # descending, as the cases list them
        have[query, : len(ids)] = ids
    return compare_equal(name, expected, have, column="indexer")


def _check_chunks(subject: V4Subject, run: _Run) -> Check:
    """Law: whole and in chunks that leave pictures whole, all give the logits of the slow whole-sequence forward."""
    expected = subject.oracle_logits(run.prompt, run.rows)
    worst = Check("prefill", "chunks", True, 0.0, LOGITS_LIMIT)
    for size in (len(run.rows), *CHUNK_SIZES):
        actual = subject.logits(run.prompt, run.rows, chunk_size=size)
        name = f"prefill in chunks of {size}"
        check = compare_floats(name, expected, actual, LOGITS_LIMIT, column="chunks")
        if not check.is_passed:
            return check
        if (check.difference or 0.0) >= (worst.difference or 0.0):
            worst = check
    return worst
