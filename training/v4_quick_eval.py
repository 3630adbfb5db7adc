"""Fast accuracy of demo-v4 on held-out scenes during training: whole batches, no cache."""

from __future__ import annotations

from functools import lru_cache

import numpy as np
import torch

from foveal.types import END, START
from training.pool import Pool
from training.questions import QA, TASKS
from training.quick_eval import COUNTS, MAX_ANSWER, SEED, questions_for
from training.scoring import is_right
from training.v4_batches import Pictures, cell_places
from training.v4_context import DenseSparseContext, SparseLayout
from training.v4_learner import V4Learner
from training.v4_pool import V4Pool, draw_v4_pool


@lru_cache(maxsize=1)
def held_out_pool() -> V4Pool:
    return draw_v4_pool(SEED, COUNTS, held_out=True)


def quick_accuracy(learner: V4Learner, count: int) -> dict[str, float]:
    """Share of right answers a task, on `count` scenes each."""
    pool = held_out_pool()
    nothing = np.zeros(0, np.uint8)
    scenes = Pool(nothing, nothing, nothing.astype(np.int8), nothing, pool.contents)
    found: dict[str, float] = {}
    for task in TASKS:
        pairs = questions_for(scenes, task, count)
        answers = answer_batch(learner, pairs, pool)
        right = [is_right(qa, answer) for (_, qa), answer in zip(pairs, answers, strict=True)]
        found[task] = round(sum(right) / len(right), 4)
    return found


@torch.no_grad()
def answer_batch(learner: V4Learner, pairs: list[tuple[int, QA]], pool: V4Pool) -> list[str]:
    """Greedy answers to questions about scenes of the pool, each step a whole forward pass."""
    cells = _cells(learner, [scene for scene, _ in pairs], pool)
    places = [cell_places(pool.grids[scene]) for scene, _ in pairs]
    tokens = [learner.text.prompt(qa.question, pool.grids[scene]) for scene, qa in pairs]
    starts = [len(t) for t in tokens]
    end = learner.text.end
    open_rows = list(range(len(tokens)))
    for _ in range(MAX_ANSWER):
        mine = [tokens[b] for b in open_rows]
        chosen = _next(learner, mine, [places[b] for b in open_rows], [cells[b] for b in open_rows])
        for b, token in zip(open_rows, chosen, strict=True):
            tokens[b].append(token)
        open_rows = [b for b in open_rows if tokens[b][-1] != end]
        if not open_rows:
            break
    answers = [
        [t for t in ids[start:] if t != end] for ids, start in zip(tokens, starts, strict=True)
    ]
    return [learner.text.decode(ids) for ids in answers]


def _cells(learner: V4Learner, scenes: list[int], pool: V4Pool) -> list[torch.Tensor]:
    """Aligner rows of each scene."""
    found = []
    for scene in scenes:
        grid = pool.grids[scene]
        none = torch.zeros(0)
        patches = torch.from_numpy(pool.patches(scene))
        found.append(learner.cells(Pictures(patches, [grid], none, none, none, none, none, none)))
    return found


def _next(
    learner: V4Learner, tokens: list[list[int]], places: list[np.ndarray], cells: list[torch.Tensor]
) -> list[int]:
    """The likeliest next token of each row."""
    length, c = max(len(t) for t in tokens), learner.model.config.language
    ids = np.zeros((len(tokens), length), np.int64)
    segments = np.full_like(ids, -1)
    for row, mine in enumerate(tokens):
        ids[row, : len(mine)], segments[row, : len(mine)] = mine, 0
    positions = np.arange(length)[None].repeat(len(tokens), 0)
    is_open = np.cumsum(ids == c.vocab_size + START, 1) > np.cumsum(ids == c.vocab_size + END, 1)
    spans = np.where(is_open | (ids == c.vocab_size + END), 0, -1)
    layout = SparseLayout.of(segments, positions, spans, c.sliding_window, set(c.ratios))
    at = torch.from_numpy(np.concatenate([row * length + p for row, p in enumerate(places)]))
    tensor = torch.from_numpy(ids)
    rows = learner.rows(tensor, at, torch.cat(cells))
    hidden = learner.hidden(tensor, torch.from_numpy(positions), rows, DenseSparseContext(layout))
    last = torch.tensor([row * length + len(mine) - 1 for row, mine in enumerate(tokens)])
    return [int(t) for t in learner.model.logits(hidden[last]).argmax(-1)]
