"""Every way of splitting a golden case is one answer: whole, half then decode, one by one, chunks, after a rollback."""

from __future__ import annotations

from functools import cache
from pathlib import Path

import pytest
import torch
from torch import Tensor

from foveal.models.reference_v4 import reference_v4_forward
from foveal.models.v4 import V4Model
from foveal.runner.v4_cache import V4SequenceCache
from foveal.runner.v4_runner import V4Runner
from tests.golden import v4_cases

LIMIT = 2e-4
VARIANTS = [
    ("v4_text", "flash_like"),
    ("v4_text", "pro_like"),
    ("v4_text", "flash_fp8_fp4"),
    ("v4_vision", "vision_small"),
]
# Long cases add time and no boundary that the others lack.
LONGEST = 310


@cache
def loaded(folder: Path) -> tuple[V4Model, tuple[v4_cases.Case, ...]]:
    cases = [case for case in v4_cases.read_cases(folder) if len(case.ids) <= LONGEST]
    return v4_cases.load(folder), tuple(cases)


@pytest.fixture(params=VARIANTS, ids=lambda v: v[1])
def variant(
    request: pytest.FixtureRequest, golden: Path
) -> tuple[V4Model, tuple[v4_cases.Case, ...]]:
    kind, name = request.param
    return loaded(golden / kind / name)


def test_whole_sequence_equals_the_golden_logits(
    variant: tuple[V4Model, tuple[v4_cases.Case, ...]],
) -> None:
    model, cases = variant
    for case in cases:
        spans = [(s.start, s.end) for s in case.spans]
        with torch.inference_mode():
            rows = v4_cases.input_rows(model, case)
        found = case.picked(reference_v4_forward(model.language, rows, case.ids, spans))
        assert (found - case.logits).abs().max() < LIMIT, case.name


@pytest.mark.parametrize("chunk", [10**6, 7, 100])
def test_chunks_equal_the_golden_logits(
    variant: tuple[V4Model, tuple[v4_cases.Case, ...]], chunk: int
) -> None:
    model, cases = variant
    for case in cases:
        found = case.picked(v4_cases.engine_logits(model, case, chunk=chunk))
        assert (found - case.logits).abs().max() < LIMIT, case.name


def decoded(
    runner: V4Runner, cache_: V4SequenceCache, rows: Tensor, ids: Tensor, start: int
) -> Tensor:
    """One by one from `start` on, but for pictures, which go as one piece."""
    at, pieces = start, []
    while at < len(rows):
        end = cache_.legal_end(at + 1)
        pieces.append(runner.extend([cache_], [rows[at:end]], [ids[at:end]]))
        at = end
    return runner.logits(torch.cat(pieces))


@torch.inference_mode()
def test_half_then_decode_and_one_by_one(
    variant: tuple[V4Model, tuple[v4_cases.Case, ...]],
) -> None:
    model, cases = variant
    runner = V4Runner(model)
    for case in cases:
        rows = v4_cases.input_rows(model, case)
        whole = v4_cases.engine_logits(model, case)
        for start in {0, len(rows) // 2}:
            cache_ = V4SequenceCache(model.config.language, len(rows), spans=case.spans)
            start = cache_.legal_end(start)
            if start:
                runner.extend([cache_], [rows[:start]], [case.ids[:start]])
            found = decoded(runner, cache_, rows, case.ids, start)
            assert (found - whole[start:]).abs().max() < LIMIT, f"{case.name} from {start}"


@torch.inference_mode()
def test_rollback_around_window_borders(variant: tuple[V4Model, tuple[v4_cases.Case, ...]]) -> None:
    """Back by 1 to 6 tokens from positions around multiples of 4 and 128, moved behind a picture they fall into."""
    model, cases = variant
    runner = V4Runner(model)
    for case in cases:
        rows, whole = v4_cases.input_rows(model, case), v4_cases.engine_logits(model, case)
        points = {b + d for b in (8, 124, 128, 256) for d in (-1, 0, 1, 2)}
        for index, position in enumerate(sorted(p for p in points if 6 < p < len(rows))):
            back = index % 6 + 1
            cache_ = V4SequenceCache(model.config.language, len(rows) + 8, spans=case.spans)
            keep = cache_.legal_end(position - back)
            end = min(keep + back, len(rows))
            if cache_.legal_end(end) != end or any(
                s.start < end and s.end >= keep for s in case.spans
            ):
                continue  # the rejected tokens are text: drafts never hold pictures
            runner.prefill(rows[:keep], cache_, ids=case.ids[:keep])
            wrong = case.ids[:back].clamp(max=model.config.language.vocab_size - 1)
            runner.extend([cache_], [model.embed(wrong)], [wrong])
            cache_.num_computed_tokens = keep
            stop = min(len(rows), max(keep + 9, cache_.legal_end(keep + 9)))
            found = runner.logits(runner.prefill(rows[keep:stop], cache_, ids=case.ids[keep:stop]))
            gap = (found - whole[keep:stop]).abs().max()
            assert gap < LIMIT, f"{case.name}: back {back} from {keep + back}: {gap:.2e}"
