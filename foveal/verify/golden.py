"""Comparison of a model with golden cases: what an independent implementation computed from the same checkpoint.

The limits are those that two correct float32 implementations keep (golden README). Positions that are left padding in a
batch mean nothing and are masked; every row of a batch is computed alone.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt
from torch import Tensor

from foveal.errors import FovealError
from foveal.types import Prompt
from foveal.verify.cases import CaseError, GoldenCase, list_cases, read_case
from foveal.verify.compare import Array, compare_equal, compare_floats, pad_left
from foveal.verify.report import CaseResult, Check, Report
from foveal.verify.subject import Inside, Subject, media_items

if TYPE_CHECKING:
    from foveal.llm import LLM

PIXEL_LIMIT = 1e-6
VISION_LIMIT = 5e-5
EMBEDS_LIMIT = 5e-5
LOGITS_LIMIT = 2e-4
HIDDEN_LIMIT = 2e-4  # of a row's largest value
CHUNK_SIZES = (1, 7, 64)


@dataclass(frozen=True, slots=True, eq=False)
class _Rows:
    """The rows of a case: prompts, their input rows, and which positions of the padded batch are real."""

    prompts: list[Prompt]
    inputs: list[Tensor]
    mask: npt.NDArray[np.bool_]  # [rows, length]

    @property
    def length(self) -> int:
        return int(self.mask.shape[1])

    def padded(self, rows: list[Array], fill: float = 0) -> Array:
        return pad_left(rows, self.length, fill)


def verify_golden(
    llm: LLM, folder: Path, *, on_case: Callable[[CaseResult], None] | None = None
) -> Report:
    """Run every case under `folder`/cases. `llm` must be loaded in float32.

    `on_case` sees each result as it is there. Raises CaseError where `folder` holds no cases/ folder; a case that
    cannot be read or run is a failed case.
    """
    subject = Subject(llm)
    results = []
    for path in list_cases(folder):
        results.append(_run_case(subject, path))
        if on_case is not None:
            on_case(results[-1])
    return Report(tuple(results))


def _run_case(subject: Subject, path: Path) -> CaseResult:
    # A case is a foreign file that may be wrong in ways nobody thought of, and one bad case must not hide the others:
    # whatever it raises is that case's failure.
    try:
        case = read_case(path)
        checks = tuple(_checks(subject, case))
    except FovealError as error:
        return CaseResult(path.stem, error=str(error))
    except Exception as error:
        return CaseResult(path.stem, error=f"{type(error).__name__}: {error}")
    return CaseResult(case.name, checks, case.not_checked)


def _checks(subject: Subject, case: GoldenCase) -> Iterator[Check]:
    rows = _rows(subject, case)
    yield from _check_prompt(subject, case, rows)
    yield from _check_vision(subject, case, rows)
    yield from _check_embeds(case, rows)
    whole = [subject.logits(inputs) for inputs in rows.inputs]
    yield from _check_logits(case, rows, whole)
    yield from _check_greedy(subject, case, rows)
    yield from _check_inside(subject, case, rows)
    yield _check_chunks(subject, rows)


def _rows(subject: Subject, case: GoldenCase) -> _Rows:
    prompts = [subject.prompt(c, case.picture_paths(c)) for c in case.conversations]
    ids = case.take_whole("input_ids")
    longest = max(prompt.num_tokens for prompt in prompts)
    length = int(ids.shape[-1]) if ids is not None else longest
    if longest > length:
        raise CaseError(f"the prompt has {longest} tokens, the case's input_ids {length}")
    mask = np.arange(length) >= length - np.array([[p.num_tokens] for p in prompts])
    return _Rows(prompts, [subject.rows(prompt) for prompt in prompts], mask)


def _check_prompt(subject: Subject, case: GoldenCase, rows: _Rows) -> Iterator[Check]:
    """Ids, masks, tile grids and counts: all equal."""
    pad = subject.processor.tokenizer.pad_id
    ids = [np.array(prompt.token_ids) for prompt in rows.prompts]
    grids = [[list(item.grid) for item in media_items(prompt)] for prompt in rows.prompts]
    most = max(1, *(len(row) for row in grids))
    actual: dict[str, Any] = {
        "input_ids": rows.padded(ids, fill=pad),
        "attention_mask": rows.mask.astype(np.int64),
        "images_seq_mask": rows.padded([_picture_mask(p) for p in rows.prompts]),
        "images_spatial_crop": np.array([row + [[0, 0]] * (most - len(row)) for row in grids]),
    }
    for name, values in actual.items():
        expected = case.take_whole(name)
        if expected is not None:
            yield compare_equal(name, expected, values, column="prompt")
    facts = {
        "seq_lens": [prompt.num_tokens for prompt in rows.prompts],
        "num_image_tokens": [[item.length for item in p.items] for p in rows.prompts],
        "images_spatial_crop": actual["images_spatial_crop"].tolist(),
    }
    for name, value in facts.items():
        fact = case.fact(name)
        if fact is not None:
            yield compare_equal(name, fact, value, column="prompt")


def _picture_mask(prompt: Prompt) -> Array:
    mask = np.zeros(prompt.num_tokens, dtype=np.int64)
    for item in prompt.items:
        mask[item.start : item.start + item.length] = 1
    return mask


def _check_vision(subject: Subject, case: GoldenCase, rows: _Rows) -> Iterator[Check]:
    names = ("pixel_values", "vit_features", "projector_out")
    stored = [case.take(name) for name in names]
    if all(item is None for item in stored):
        return
    output = subject.tower(rows.prompts)
    if output is None:
        raise CaseError(
            f"{case.name} holds pixel_values or features, but its conversation no picture"
        )
    actual = (output.pixels, output.features, output.projected)
    columns = (("pixels", PIXEL_LIMIT), ("tower", VISION_LIMIT), ("projector", VISION_LIMIT))
    for name, want, have, (column, limit) in zip(names, stored, actual, columns, strict=True):
        if want is not None:
            yield compare_floats(name, want.values, have, limit, column=column, step=want.step)


def _check_embeds(case: GoldenCase, rows: _Rows) -> Iterator[Check]:
    want = case.take("inputs_embeds")
    if want is None:
        return
    have = rows.padded([inputs.float().cpu().numpy() for inputs in rows.inputs])
    yield compare_floats(
        "inputs_embeds",
        want.values,
        have,
        EMBEDS_LIMIT,
        column="embeds",
        step=want.step,
        mask=rows.mask,
    )


def _check_logits(case: GoldenCase, rows: _Rows, whole: list[Array]) -> Iterator[Check]:
    want = case.take("logits")
    if want is not None:
        have = rows.padded(whole)
        yield compare_floats(
            "logits",
            want.values,
            have,
            LOGITS_LIMIT,
            column="logits",
            step=want.step,
            mask=rows.mask,
        )
    some = case.take("logits_at_positions")
    if some is None:
        return
    positions = case.take_whole("logits_positions")
    if positions is None:
        raise CaseError(f"{case.name} holds logits_at_positions without logits_positions")
    # One list of positions for all rows, or one a row.
    places = np.broadcast_to(positions, (len(whole), positions.shape[-1]))
    have = np.take_along_axis(rows.padded(whole), places[..., None], axis=1)
    mask = np.take_along_axis(rows.mask, places, axis=1)
    yield compare_floats(
        "logits_at_positions",
        some.values,
        have,
        LOGITS_LIMIT,
        column="logits",
        step=some.step,
        mask=mask,
    )


def _check_greedy(subject: Subject, case: GoldenCase, rows: _Rows) -> Iterator[Check]:
    tokens, fact = case.take_whole("greedy_tokens"), case.fact("greedy_tokens")
    last = case.take("greedy_last_step_logits")
    expected = tokens if tokens is not None else fact
    if expected is None:
        return
    count = int(np.asarray(expected).shape[-1])
    results = [subject.greedy(prompt, count) for prompt in rows.prompts]
    actual = np.array([chosen for chosen, _ in results])
    for stored in (tokens, fact):
        if stored is not None:
            yield compare_equal("greedy_tokens", stored, actual, column="greedy")
    if last is not None:
        have = np.stack([logits for _, logits in results])
        yield compare_floats(
            "greedy_last_step_logits",
            last.values,
            have,
            LOGITS_LIMIT,
            column="last step",
            step=last.step,
        )


def _check_inside(subject: Subject, case: GoldenCase, rows: _Rows) -> Iterator[Check]:
    """Hidden states after each layer, and the experts that each token was sent to."""
    hidden_names = case.names_like(r"hidden_states\.\d+")
    routing_names = case.names_like(r"routing\..*layers\.\d+\..*")
    if not hidden_names and not routing_names:
        return
    insides = [subject.inside(inputs) for inputs in rows.inputs]
    for name in hidden_names:
        yield _check_hidden(case, rows, insides, name)
    for name in routing_names:
        yield _check_routing(case, rows, insides, name)


def _check_hidden(case: GoldenCase, rows: _Rows, insides: list[Inside], name: str) -> Check:
    index = int(name.rpartition(".")[2])
    want = case.take(name)
    assert want is not None, "the name comes from the case"
    if index >= len(insides[0].hidden):
        detail = f"the model has hidden states 0 to {len(insides[0].hidden) - 1} only"
        return Check(name, "hidden", False, detail=detail)
    have = rows.padded([inside.hidden[index] for inside in insides])
    return compare_floats(
        name,
        want.values,
        have,
        HIDDEN_LIMIT,
        column="hidden",
        step=want.step,
        mask=rows.mask,
        is_relative=True,
    )


def _check_routing(case: GoldenCase, rows: _Rows, insides: list[Inside], name: str) -> Check:
    layer = int(re.findall(r"layers\.(\d+)", name)[-1])
    want = case.take_whole(name)
    assert want is not None, "the name comes from the case"
    if any(layer not in inside.experts for inside in insides):
        return Check(name, "routing", False, detail=f"layer {layer} of the model routes nothing")
    have = rows.padded([inside.experts[layer] for inside in insides])
    # The format lists tokens one after the other, row by row.
    have, mask = have.reshape(-1, have.shape[-1]), rows.mask.reshape(-1)
    return compare_equal(name, want.reshape(-1, want.shape[-1]), have, column="routing", mask=mask)


def _check_chunks(subject: Subject, rows: _Rows) -> Check:
    """Law: prefill in one go, in chunks and token by token all give the logits of the slow whole-sequence forward."""
    worst = Check("prefill", "chunks", True, 0.0, LOGITS_LIMIT)
    for inputs in rows.inputs:
        expected = subject.oracle_logits(inputs)
        for size in (len(inputs), *CHUNK_SIZES):
            actual = subject.logits(inputs, chunk_size=size)
            name = f"prefill in chunks of {size}"
            check = compare_floats(name, expected, actual, LOGITS_LIMIT, column="chunks")
            if not check.is_passed:
                return check
            if (check.difference or 0.0) >= (worst.difference or 0.0):
                worst = check
    return worst
