"""Training's batch form of V4 attention is the runner's, for plain rows and for rows of several questions."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from torch import Tensor

from foveal.models.v4 import V4Model
from foveal.runner.v4_cache import Span
from foveal.runner.v4_runner import V4Runner
from foveal.types import END, START
from foveal.vision.v4 import block_types
from tests import v4_toy
from training.v4_context import DenseSparseContext, SparseLayout


@pytest.fixture(scope="module")
def toy() -> V4Model:
    return v4_toy.model(seed=4)


def prompt(rng: np.random.Generator, length: int, grid: tuple[int, int] | None) -> np.ndarray:
    """Raw ids: two words, a picture if `grid` is given, words up to `length`."""
    vocabulary = v4_toy.TEXT["vocab_size"]
    head = rng.integers(0, vocabulary, 2)
    block = np.zeros(0, np.int64) if grid is None else vocabulary + block_types(grid, 2)
    return np.concatenate((head, block, rng.integers(0, vocabulary, length - 2 - len(block))))


def spans_of(ids: np.ndarray) -> np.ndarray:
    """Number of the picture at each place, -1 outside."""
    vocabulary = v4_toy.TEXT["vocab_size"]
    started, ended = np.cumsum(ids == vocabulary + START), np.cumsum(ids == vocabulary + END)
    return np.where((started > ended) | (ids == vocabulary + END), started - 1, -1)


def runner_logits(model: V4Model, ids: np.ndarray) -> Tensor:
    """The product's logits; rows of pictures are plain embeddings of id 0, which is enough here."""
    runner, spans = V4Runner(model), spans_of(ids)
    cache = runner.new_cache(len(ids))
    if (spans >= 0).any():
        inside = np.flatnonzero(spans == 0)
        cache.spans = (Span(int(inside[0]), int(inside[-1])),)
    tokens = torch.from_numpy(ids)
    return runner.logits(runner.prefill(model.embed(tokens), cache, ids=tokens))


def batch_logits(
    model: V4Model, ids: np.ndarray, segments: np.ndarray, positions: np.ndarray
) -> Tensor:
    c = model.config.language
    spans = np.stack([spans_of(row) for row in ids])
    layout = SparseLayout.of(segments, positions, spans, c.sliding_window, set(c.ratios))
    tokens = torch.from_numpy(ids).flatten()
    with torch.no_grad():
        hidden = model(
            model.embed(tokens),
            torch.from_numpy(positions).flatten(),
            tokens,
            DenseSparseContext(layout),
        )
        return model.logits(hidden).unflatten(0, ids.shape)


def test_padded_rows_equal_the_runner(toy: V4Model) -> None:
    rng = np.random.default_rng(0)
    prompts = [
        prompt(rng, 150, (3, 3)),
        prompt(rng, 45, (4, 2)),
        prompt(rng, 9, None),
        prompt(rng, 131, None),
    ]
    length = max(len(p) for p in prompts)
    ids, segments, positions = np.zeros((3, len(prompts), length), np.int64)
    segments -= 1
    for b, p in enumerate(prompts):
        ids[b, : len(p)], segments[b, : len(p)], positions[b, : len(p)] = p, 0, np.arange(len(p))
    found = batch_logits(toy, ids, segments, positions)
    for b, p in enumerate(prompts):
        torch.testing.assert_close(found[b, : len(p)], runner_logits(toy, p), rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("tails", [(7, 12, 20), (1, 140, 3)])
def test_questions_behind_one_picture_are_computed_as_if_alone(
    toy: V4Model, tails: tuple[int, ...]
) -> None:
    rng = np.random.default_rng(1)
    shared = prompt(rng, 2 + 1 + len(block_types((3, 3), 3)), (3, 3))
    ends = [rng.integers(0, v4_toy.TEXT["vocab_size"], n) for n in tails]
    ids = np.concatenate((shared, *ends, [0, 0]))[None]
    numbers = [np.full(len(e), i) for i, e in enumerate((shared, *ends))]
    segments = np.concatenate((*numbers, [-1, -1]))[None]
    places = [
        np.arange(len(shared)),
        *(len(shared) + np.arange(len(e)) for e in ends),
        np.zeros(2, np.int64),
    ]
    found = batch_logits(toy, ids, segments, np.concatenate(places)[None])[0]
    for i, end in enumerate(ends, 1):
        alone = runner_logits(toy, np.concatenate((shared, end)))
        torch.testing.assert_close(
            found[segments[0] == i], alone[len(shared) :], rtol=1e-4, atol=1e-4
        )


def test_gradients_reach_every_trained_parameter(toy: V4Model) -> None:
    model = v4_toy.model(seed=5, sliding_window=8)
    trained = [(n, p) for n, p in model.language.named_parameters() if p.is_floating_point()]
    for _, p in trained:
        p.requires_grad_(True)
    ids = prompt(np.random.default_rng(2), 150, None)[None]
    positions = np.arange(150)[None]
    layout = SparseLayout.of(np.zeros_like(ids), positions, np.full_like(ids, -1), 8, {0, 4, 128})
    tokens = torch.from_numpy(ids).flatten()
    hidden = model(
        model.embed(tokens),
        torch.from_numpy(positions).flatten(),
        tokens,
        DenseSparseContext(layout),
    )
    model.logits(hidden).square().mean().backward()  # type: ignore[no-untyped-call]
    untouched = {n for n, p in trained if p.grad is None}
    assert all("indexer" in n or "bias" in n for n in untouched), (
        f"no gradient: {sorted(untouched)}"
    )
