"""Fast accuracy on held-out scenes during training: whole batches, no cache. The public path is `evaluate.py`."""

from __future__ import annotations

from functools import lru_cache

import numpy as np
import torch
from tokenizers import Tokenizer

from training.batches import prompt_ids
from training.learner import DenseBatchContext, Learner
from training.pool import Pool, draw_pool
from training.questions import QA, TASKS, Task, ask
from training.scenes import Kind
from training.scoring import is_right
from training.tokens import EOS

SEED = 99
COUNTS: dict[Kind, int] = {"shapes": 500, "crowd": 150, "digit": 150, "word": 150}
SIZE = 100
MAX_ANSWER = 30


@lru_cache(maxsize=1)
def held_out_pool() -> Pool:
    return draw_pool(SEED, COUNTS, held_out=True)


def questions_for(pool: Pool, task: Task, count: int) -> list[tuple[int, QA]]:
    """The first `count` scenes that allow a question of `task`, one each."""
    pairs: list[tuple[int, QA]] = []
    for scene in pool.members(task):
        if task == "count" and pool.contents[scene].kind != "crowd":
            continue
        qa = ask(task, pool.contents[scene], np.random.default_rng([SEED, int(scene)]))
        if qa is not None:
            pairs.append((int(scene), qa))
        if len(pairs) == count:
            break
    return pairs


def quick_accuracy(learner: Learner, tokenizer: Tokenizer, count: int = SIZE) -> dict[str, float]:
    """Share of right answers a task, on `count` scenes each."""
    pool = held_out_pool()
    found = {}
    for task in TASKS:
        pairs = questions_for(pool, task, count)
        answers = answer_batch(learner, tokenizer, pairs, pool)
        right = [is_right(qa, answer) for (_, qa), answer in zip(pairs, answers, strict=True)]
        found[task] = round(sum(right) / len(right), 4)
    return found


@torch.no_grad()
def answer_batch(
    learner: Learner, tokenizer: Tokenizer, pairs: list[tuple[int, QA]], pool: Pool
) -> list[str]:
    """Greedy answers to questions about scenes of the pool, each step a whole forward pass."""
    cells = learner.cells(np.asarray(pool.tiles[[scene for scene, _ in pairs]]))
    tokens = [prompt_ids(tokenizer, qa.question, has_picture=True) for _, qa in pairs]
    starts = [len(t) for t in tokens]
    end = tokenizer.token_to_id(EOS)
    open_rows = list(range(len(tokens)))
    for _ in range(MAX_ANSWER):
        length = max(len(tokens[b]) for b in open_rows)
        ids = torch.zeros(len(open_rows), length, dtype=torch.int64)
        for row, b in enumerate(open_rows):
            ids[row, : len(tokens[b])] = torch.tensor(tokens[b])
        hidden = learner.hidden(ids, cells[open_rows], DenseBatchContext(len(open_rows)))
        last = torch.tensor([row * length + len(tokens[b]) - 1 for row, b in enumerate(open_rows)])
        chosen = learner.model.logits(hidden[last]).argmax(-1).tolist()
        for b, token in zip(open_rows, chosen, strict=True):
            tokens[b].append(token)
        open_rows = [b for b in open_rows if tokens[b][-1] != end]
        if not open_rows:
            break
    answers = [
        [t for t in ids[start:] if t != end] for ids, start in zip(tokens, starts, strict=True)
    ]
    return [tokenizer.decode(ids, skip_special_tokens=False) for ids in answers]
