"""Training batches: which scenes, which questions, which tokens, and where attention should look.

Batch `step` is a function of (seed, step, rank), so a run that was interrupted goes on with the same batches.

One row of a batch holds a picture once and several questions about it. A question sees the picture and its own turn,
and its positions go on from the picture's, so that each is computed exactly as if it stood alone:

    tokens     bos <|User|> : _ [picture: 85] | \n question 1 ... answer 1 eos | \n question 2 ... answer 2 eos | pad
    positions  0 1 2 3 4 ... 88               | 89 90 ...                      | 89 90 ...
    segments   0                              | 1                              | 2                              | -1

A row without a picture holds whole conversations of its own, and nothing is shared.
Legend: B rows, P of them with a picture (they come first), L padded length, R supervised places, A answer tokens.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TypeVar

import numpy as np
import torch
from tokenizers import Tokenizer
from torch import Tensor

from training.cells import CELLS
from training.pool import Pool
from training.questions import KINDS_OF_TASK, QA, Part, Task, ask
from training.scenes import KINDS, Kind
from training.tokens import ASSISTANT, BOS, EOS, IMAGE, USER

ROW = CELLS + 1  # cells of one row of a view, and its newline
VIEW = CELLS * ROW
IMAGE_TOKENS = 2 * VIEW + 1  # global view, separator, the one local tile
HEADS = 2  # heads a layer whose attention is supervised


@dataclass(frozen=True, slots=True)
class Sample:
    """One turn: prompt ids after what is shared, answer ids (with the end token), and for each of these its part."""

    qa: QA
    prompt: list[int]
    answer: list[int]
    parts: list[Part | None]
    weights: list[float]  # how much each answer token counts
    mentions: list[list[int]]  # places in `prompt` of the words that name what is asked about

    @property
    def length(self) -> int:
        return len(self.prompt) + len(self.answer)


@dataclass(frozen=True, slots=True)
class Row:
    """A scene and questions about it; `scene` is None for turns without a picture."""

    scene: int | None
    samples: list[Sample]


@dataclass(frozen=True, slots=True, eq=False)
class Batch:
    """`ids`, `positions`, `segments` [B, L] int64; `scenes` [tiles] indices into the pool, those of the P rows first.

    `rows`, `targets`, `weights`, `owners` [A]: places (of the flattened batch) that predict an answer token, the
    token, a weight that makes each sample count the same, and the number of its sample, whose task is in `tasks`.
    `seen_rows` [R, 2] (row, place) and `seen` [R, HEADS, L]: where the supervised heads of these places should look,
    each summing to one; `seen_weights` [R] make each sample count the same. `asked_rows`, `asked` are the same for
    an earlier layer, which collects what is asked about.
    """

    scenes: np.ndarray
    pictures: int
    ids: Tensor
    positions: Tensor
    segments: Tensor
    rows: Tensor
    targets: Tensor
    weights: Tensor
    owners: Tensor
    tasks: tuple[Task, ...]
    seen_rows: Tensor
    seen: Tensor
    seen_weights: Tensor
    asked_rows: Tensor
    asked: Tensor

    def hidden_keys(self) -> Tensor:
        """[B, L, L], True where a query must not see a key: later ones, and other segments but the shared one."""
        own = self.segments[:, :, None] == self.segments[:, None, :]
        shared = (self.segments == 0)[:, None, :]
        length = self.ids.shape[1]
        return ~(own | shared) | torch.ones(length, length, dtype=torch.bool).triu(1)


def picture_start(tokenizer: Tokenizer) -> int:
    """Position of a picture's first placeholder."""
    return 1 + len(tokenizer.encode(f"{USER}: ", add_special_tokens=False).ids)


def prompt_ids(tokenizer: Tokenizer, question: str, *, has_picture: bool) -> list[int]:
    """Ids of one turn exactly as the product makes them (spec 7.2)."""
    bos, image = tokenizer.token_to_id(BOS), tokenizer.token_to_id(IMAGE)
    if not has_picture:
        return [bos, *_encode(tokenizer, f"{USER}: {question}\n\n{ASSISTANT}:")]
    head, tail = (
        _encode(tokenizer, f"{USER}: "),
        _encode(tokenizer, f"\n{question}\n\n{ASSISTANT}:"),
    )
    return [bos, *head, *[image] * IMAGE_TOKENS, *tail]


def _encode(tokenizer: Tokenizer, text: str) -> list[int]:
    return list(tokenizer.encode(text, add_special_tokens=False).ids)


def make_sample(tokenizer: Tokenizer, qa: QA) -> Sample:
    """Tokens of a question and its answer; each answer token belongs to the part that holds its last character."""
    encoding = tokenizer.encode(qa.answer, add_special_tokens=False)
    owners = [part for part in qa.parts for _ in part.text]
    parts: list[Part | None] = [owners[end - 1] for _, end in encoding.offsets]
    # A word ends where no further letter is: the end token looks at nothing.
    parts.append(Part("", sink=1.0) if qa.task == "word" else None)
    has_picture = qa.task != "chat"
    prompt = prompt_ids(tokenizer, qa.question, has_picture=has_picture)
    shared = picture_start(tokenizer) + IMAGE_TOKENS if has_picture else 0
    end = tokenizer.token_to_id(EOS)
    mentions = find_mentions(tokenizer, qa) if has_picture else []
    answer = [*encoding.ids, end]
    weights = token_weights(qa.task, [*encoding.tokens, ""])
    return Sample(qa, prompt[shared:], answer, parts, weights, mentions)


# Long answers count more, though not by their length.
SAMPLE_WEIGHTS: dict[Task, float] = {"locate": 4.0, "word": 2.0, "count": 1.5}


def token_weights(task: Task, tokens: list[str]) -> list[float]:
    """Weights of an answer's tokens. Of a coordinate the first two digits matter; the third cannot be seen exactly."""
    total = SAMPLE_WEIGHTS.get(task, 1.0)
    if task != "locate":
        return [total / len(tokens)] * len(tokens)
    weights, digits = [], 0
    for token in tokens:
        digits = digits + 1 if token.isdigit() else 0
        weights.append(0.25 if digits == 0 else 1.0 if digits <= 2 else 0.15)
    return [total * w / sum(weights) for w in weights]


def find_mentions(tokenizer: Tokenizer, qa: QA) -> list[list[int]]:
    """For each mention the tokens (counted after the picture) that hold a letter of it."""
    text = f"\n{qa.question}\n\n{ASSISTANT}:"
    offsets = tokenizer.encode(text, add_special_tokens=False).offsets
    found = []
    for mention in qa.mentions:
        start = text.lower().index(mention.lower())
        stop = start + len(mention)
        found.append([i for i, (a, b) in enumerate(offsets) if a < stop and b > start])
    return found


@dataclass(frozen=True, slots=True)
class BatchPlan:
    """Sizes of a rank's batch: `rows` of `length` tokens, and `tiles` pictures, those of the rows among them.

    `kinds` are the shares of the scenes of rows, `extra_kinds` of the pictures that only the tower sees, `shares` of
    the tasks; a row is without a picture with probability `chat`.
    """

    rows: int
    tiles: int
    length: int
    kinds: Mapping[Kind, float]
    extra_kinds: Mapping[Kind, float]
    shares: Mapping[Task, float]
    chat: float


class BatchMaker:
    """Makes batches from a pool of scenes."""

    def __init__(self, pool: Pool, tokenizer: Tokenizer, seed: int) -> None:
        self.pool, self.tokenizer, self.seed = pool, tokenizer, seed
        self.start = picture_start(tokenizer)
        kinds = np.array([content.kind for content in pool.contents])
        self._members = {kind: np.flatnonzero(kinds == kind) for kind in KINDS}
        head = prompt_ids(tokenizer, "", has_picture=True)
        self.shared = head[: self.start + IMAGE_TOKENS]

    def make(self, step: int, plan: BatchPlan, rank: int = 0) -> Batch:
        """Rank's part of batch `step`."""
        rng = np.random.default_rng([self.seed, step, rank])
        chats = int(rng.random() < plan.chat)
        rows = [
            self._picture_row(_draw(plan.kinds, rng), plan, rng) for _ in range(plan.rows - chats)
        ]
        rows += [self._chat_row(plan, rng) for _ in range(chats)]
        extra = [
            self._scene(_draw(plan.extra_kinds, rng), rng)
            for _ in range(plan.tiles - plan.rows + chats)
        ]
        return self.collate(rows, extra, plan.length)

    def _scene(self, kind: Kind, rng: np.random.Generator) -> int:
        return int(self._members[kind][rng.integers(len(self._members[kind]))])

    def _picture_row(self, kind: Kind, plan: BatchPlan, rng: np.random.Generator) -> Row:
        """Questions about one scene until the row is full; a digit or a word is asked for twice at most."""
        fitting = {
            task: plan.shares[task] for task, kinds in KINDS_OF_TASK.items() if kind in kinds
        }
        while True:
            scene, row = self._scene(kind, rng), Row(0, [])
            room = plan.length - len(self.shared)
            for _ in range(2 if kind in ("digit", "word") else 8):
                qa = ask(_draw(fitting, rng), self.pool.contents[scene], rng)
                sample = make_sample(self.tokenizer, qa) if qa else None
                if sample and sample.length <= room:
                    row.samples.append(sample)
                    room -= sample.length
            if row.samples:
                return Row(scene, row.samples)

    def _chat_row(self, plan: BatchPlan, rng: np.random.Generator) -> Row:
        row, room = Row(None, []), plan.length
        for _ in range(5):
            scene = self.pool.contents[int(rng.integers(len(self.pool.contents)))]
            qa = ask("chat", scene, rng)
            sample = make_sample(self.tokenizer, qa) if qa else None
            if sample and sample.length <= room:
                row.samples.append(sample)
                room -= sample.length
        return row

    def collate(self, rows: list[Row], extra: list[int], length: int) -> Batch:
        """Lay out rows (those without a picture last) of `length` tokens; `extra` are scenes that only the tower
        sees.
        """
        out = _Layout(len(rows), length)
        for b, row in enumerate(rows):
            shared = self.shared if row.scene is not None else []
            out.write(b, 0, 0, shared, 0)
            at = len(shared)
            for segment, sample in enumerate(row.samples, 1):
                out.write(b, at, len(shared), sample.prompt + sample.answer, segment)
                first = at + len(sample.prompt) - 1
                out.answer(b, first, sample)
                if sample.mentions:
                    out.asked_rows.append((b, first))
                    out.asked.append(_look_back(sample.mentions, at, length))
                if row.scene is not None:
                    self._add_looks(out, (b, first), sample, row.scene)
                at += sample.length
        scenes = [row.scene for row in rows if row.scene is not None]
        return out.batch(scenes, extra)

    def _add_looks(self, out: _Layout, at: tuple[int, int], sample: Sample, scene: int) -> None:
        """Note where the heads should look for each answer token that rests on something in the picture."""
        length, counting = out.ids.shape[1], sample.qa.task == "count"
        looking = [
            (i, part)
            for i, part in enumerate(sample.parts)
            if part and (part.first or part.second or part.sink)
        ]
        for i, part in looking:
            out.seen_rows.append((at[0], at[1] + i))
            out.seen.append(self._look(part, scene, length, counting=counting))
            out.seen_weights.append(1 / len(looking))

    def _look(self, part: Part, scene: int, length: int, *, counting: bool) -> np.ndarray:
        """Where the two heads should look: evenly over the evidence's cells in both views, `sink` of it at bos."""
        target = np.zeros((HEADS, length), np.float32)
        for head, items in enumerate((part.first, part.second)):
            for item in items:
                cells = np.flatnonzero(self.pool.owner[scene] == item)
                if counting or not len(cells):
                    cells = self.pool.centre[scene, item : item + 1].astype(np.int64)
                places = self.start + cells // CELLS * ROW + cells % CELLS
                target[head, places] += 0.5 / len(cells)
                target[head, places + VIEW + 1] += 0.5 / len(cells)
            target[head, 0] += part.sink
            target[head] /= target[head].sum()
        return target


def _look_back(mentions: list[list[int]], at: int, length: int) -> np.ndarray:
    """Where heads should look to collect what is asked about: two at the same words when it is one thing, a third only
    at what is claimed of two things ("left of")."""
    target = np.zeros((HEADS + 1, length), np.float32)
    for head in range(max(HEADS, len(mentions))):
        places = [at + i for i in mentions[min(head, len(mentions) - 1)]]
        target[head, places] = 1 / len(places)
    return target


Name = TypeVar("Name", bound=str)


def _draw(shares: Mapping[Name, float], rng: np.random.Generator) -> Name:
    names, weights = list(shares), np.array(list(shares.values()))
    return names[int(rng.choice(len(names), p=weights / weights.sum()))]


class _Layout:
    """Arrays of a batch while it is laid out."""

    def __init__(self, rows: int, length: int) -> None:
        self.ids = np.zeros((rows, length), np.int64)
        self.positions = np.zeros((rows, length), np.int64)
        self.segments = np.full((rows, length), -1, np.int64)
        self.rows: list[int] = []
        self.targets: list[int] = []
        self.weights: list[float] = []
        self.seen_rows: list[tuple[int, int]] = []
        self.seen: list[np.ndarray] = []
        self.seen_weights: list[float] = []
        self.asked_rows: list[tuple[int, int]] = []
        self.asked: list[np.ndarray] = []
        self.owners: list[int] = []
        self.tasks: list[Task] = []

    def write(self, b: int, at: int, position: int, tokens: list[int], segment: int) -> None:
        here = slice(at, at + len(tokens))
        self.ids[b, here] = tokens
        self.positions[b, here] = np.arange(position, position + len(tokens))
        self.segments[b, here] = segment

    def answer(self, b: int, first: int, sample: Sample) -> None:
        count = len(sample.answer)
        self.rows += [b * self.ids.shape[1] + first + i for i in range(count)]
        self.targets += sample.answer
        self.weights += sample.weights
        self.owners += [len(self.tasks)] * count
        self.tasks.append(sample.qa.task)

    def batch(self, scenes: list[int], extra: list[int]) -> Batch:
        tensors = [torch.from_numpy(a) for a in (self.ids, self.positions, self.segments)]
        weights = torch.tensor(self.weights) / len(self.tasks)
        places = (
            torch.tensor(self.rows),
            torch.tensor(self.targets),
            weights,
            torch.tensor(self.owners),
        )
        looks = (
            torch.tensor(self.seen_rows).reshape(-1, 2),
            self._targets(self.seen, HEADS),
            torch.tensor(self.seen_weights) / sum(self.seen_weights),
            torch.tensor(self.asked_rows).reshape(-1, 2),
            self._targets(self.asked, HEADS + 1),
        )
        every = np.array([*scenes, *extra], dtype=np.int64)
        return Batch(every, len(scenes), *tensors, *places, tuple(self.tasks), *looks)

    def _targets(self, looks: list[np.ndarray], heads: int) -> Tensor:
        shape = (-1, heads, self.ids.shape[1])
        return torch.from_numpy(np.array(looks, np.float32).reshape(shape))
