"""Training batches of demo-v4. Batch `step` is a function of (seed, step, rank).

A row holds a picture once and several questions about it, each computed as if it stood alone (`v4_context.py`); or,
now and then, one conversation of several turns, long enough for entries of ratio 128; or turns without a picture.
Legend: B rows of L tokens, N pictures (of rows, and further ones that only the tower sees), C cells of the rows'
pictures, R supervised places, A answer tokens.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

import numpy as np
import torch
from torch import Tensor

from foveal.text.v4_grammar import USER
from foveal.types import END, IMAGE, START
from foveal.vision.v4 import Grid, block_order, block_types, llm_grid_for
from training.batches import HEADS, _draw
from training.questions import KINDS_OF_TASK, QA, Part, Task, ask
from training.scenes import KINDS, Kind
from training.tokens import GROUNDING
from training.v4_context import SparseLayout
from training.v4_pool import IMAGE_CONFIG, GridLabels, V4Pool, label_grid
from training.v4_tokens import BLOCK_AT, V4Text

KEEPING = 0.3  # share of questions in which spelled grounding tags are marks: a front may let them through


@dataclass(frozen=True, slots=True)
class V4Plan:
    """One rank's part of a batch; see `BatchPlan`. `drawn` is the share of pictures that are not square."""

    rows: int
    tiles: int
    length: int
    kinds: Mapping[Kind, float]
    extra_kinds: Mapping[Kind, float]
    shares: Mapping[Task, float]
    chat: float
    talk: float
    drawn: float = 0.5


@dataclass(frozen=True, slots=True, eq=False)
class Pictures:
    """N pictures one after the other: `patches` [n, 3, p, p] uint8; for all their cells in reading order `classes`
    [cells, families, 1], `offsets` and `edges` [cells, 4]; `counts` cells of each. `shown` [C] cells go to the places
    `places` [C] of the flattened batch."""

    patches: Tensor
    grids: list[Grid]
    counts: Tensor
    classes: Tensor
    offsets: Tensor
    edges: Tensor
    shown: Tensor
    places: Tensor


@dataclass(frozen=True, slots=True, eq=False)
class V4Batch:
    """As `batches.Batch`, with what V4 needs beside."""

    ids: Tensor
    positions: Tensor
    segments: Tensor
    layout: SparseLayout
    pictures: Pictures
    rows: Tensor
    targets: Tensor
    weights: Tensor
    owners: Tensor
    tasks: tuple[Task, ...]
    seen_rows: Tensor
    seen: Tensor


@dataclass(slots=True)
class _Rows:
    """A batch while it is laid out."""

    ids: np.ndarray
    positions: np.ndarray
    segments: np.ndarray
    rows: list[int] = field(default_factory=list)
    targets: list[int] = field(default_factory=list)
    weights: list[float] = field(default_factory=list)
    owners: list[int] = field(default_factory=list)
    tasks: list[Task] = field(default_factory=list)
    seen_rows: list[tuple[int, int]] = field(default_factory=list)
    seen: list[np.ndarray] = field(default_factory=list)
    used: int = 0

    @classmethod
    def empty(cls, rows: int, length: int) -> _Rows:
        shape = (rows, length)
        return cls(
            np.zeros(shape, np.int64), np.zeros(shape, np.int64), np.full(shape, -1, np.int64)
        )

    def write(self, b: int, at: int, position: int, tokens: list[int], segment: int) -> None:
        here = slice(at, at + len(tokens))
        self.ids[b, here] = tokens
        self.positions[b, here] = np.arange(position, position + len(tokens))
        self.segments[b, here] = segment
        self.used = max(self.used, at + len(tokens))

    def answer(self, b: int, first: int, tokens: list[int], task: Task) -> None:
        count = len(tokens)
        self.rows += [b * self.ids.shape[1] + first + i for i in range(count)]
        self.targets += tokens
        self.weights += [1.0 / count] * count
        self.owners += [len(self.tasks)] * count
        self.tasks.append(task)


class V4BatchMaker:
    """Makes batches from a pool of scenes."""

    def __init__(
        self, pool: V4Pool, text: V4Text, seed: int, *, window: int, ratios: set[int]
    ) -> None:
        self.pool, self.text, self.seed, self.window, self.ratios = pool, text, seed, window, ratios
        kinds = np.array([content.kind for content in pool.contents])
        is_square = pool.where >= 0
        self._members = {
            (kind, drawn): np.flatnonzero((kinds == kind) & (is_square != drawn))
            for kind in KINDS
            for drawn in (False, True)
        }

    def make(self, step: int, plan: V4Plan, rank: int = 0) -> V4Batch:
        """Rank's part of batch `step`."""
        rng = np.random.default_rng([self.seed, step, rank])
        out = _Rows.empty(plan.rows, plan.length)
        scenes: list[int] = []
        labels: list[GridLabels] = []
        chats = int(rng.random() < plan.chat)
        talks = int(rng.random() < plan.talk)
        for b in range(plan.rows - chats):
            scene = self._scene(_draw(plan.kinds, rng), plan, rng)
            label = label_grid(self.pool.contents[scene], self.pool.grids[scene])
            self._picture_row(out, b, scene, label, plan, rng, is_talk=b < talks)
            scenes.append(scene)
            labels.append(label)
        if chats:
            self._chat_row(out, plan.rows - 1, rng)
        for _ in range(plan.tiles - len(scenes)):
            scenes.append(self._scene(_draw(plan.extra_kinds, rng), plan, rng))
            labels.append(label_grid(self.pool.contents[scenes[-1]], self.pool.grids[scenes[-1]]))
        return self.collate(out, scenes, labels, plan.rows - chats)

    def _scene(self, kind: Kind, plan: V4Plan, rng: np.random.Generator) -> int:
        members = self._members[kind, bool(rng.random() < plan.drawn)]
        if not len(members):
            members = np.concatenate((self._members[kind, False], self._members[kind, True]))
        return int(members[rng.integers(len(members))])

    def _picture_row(self, out: _Rows, b: int, scene: int, label: GridLabels, plan: V4Plan, rng: np.random.Generator,
                     *, is_talk: bool) -> None:  # fmt: skip
        """Questions about one scene until the row is full; a digit or a word is asked for twice at most."""
        kind = self.pool.contents[scene].kind
        fitting = {
            task: plan.shares[task] for task, kinds in KINDS_OF_TASK.items() if kind in kinds
        }
        head = self.text.picture_head(self.pool.grids[scene])
        cells = cell_places(self.pool.grids[scene])
        out.write(b, 0, 0, head, 0)
        at, segment, position = len(head), 1, len(head)
        most = 9 if is_talk else 2 if len(fitting) == 1 else 8
        for _ in range(most):
            qa = ask(_draw(fitting, rng), self.pool.contents[scene], rng)
            if qa is None:
                continue
            is_first = position == len(head)
            keep = GROUNDING if rng.random() < KEEPING else ()
            prompt = (self.text.turn(f"\n\n{qa.question}", keep=keep) if is_first
                      else self.text.turn(qa.question, lead=[self.text.mark(USER)], keep=keep))  # fmt: skip
            answer, parts = self.answer(qa)
            if at + len(prompt) + len(answer) > out.ids.shape[1]:
                continue
            out.write(b, at, position, prompt + answer, segment)
            out.answer(b, at + len(prompt) - 1, answer, qa.task)
            first = position + len(prompt) - 1
            for i, part in enumerate(parts):
                # What stands outside the window cannot be looked at.
                if part and (part.first or part.second or part.sink) and first + i < self.window:
                    out.seen_rows.append((b, at + len(prompt) - 1 + i))
                    out.seen.append(
                        look(part, label, cells, out.ids.shape[1], counting=qa.task == "count")
                    )
            at += len(prompt) + len(answer)
            if is_talk:
                position += len(prompt) + len(answer)
            else:
                segment += 1

    def answer(self, qa: QA) -> tuple[list[int], list[Part | None]]:
        """Answer ids with the end token; each belongs to the part that holds its last character."""
        encoding = self.text.backend.encode(qa.answer, add_special_tokens=False)
        owners = [part for part in qa.parts for _ in part.text]
        parts: list[Part | None] = [owners[end - 1] for _, end in encoding.offsets]
        # A word ends where no further letter is: the end token looks at nothing.
        parts.append(Part("", sink=1.0) if qa.task == "word" else None)
        return [*encoding.ids, self.text.end], parts

    def _chat_row(self, out: _Rows, b: int, rng: np.random.Generator) -> None:
        at = 0
        for segment in range(1, 6):
            scene = self.pool.contents[int(rng.integers(len(self.pool.contents)))]
            qa = ask("chat", scene, rng)
            if qa is None:
                continue
            prompt, (answer, _) = self.text.prompt(qa.question), self.answer(qa)
            if at + len(prompt) + len(answer) > out.ids.shape[1]:
                break
            out.write(b, at, 0, prompt + answer, segment)
            out.answer(b, at + len(prompt) - 1, answer, qa.task)
            at += len(prompt) + len(answer)

    def collate(
        self, out: _Rows, scenes: list[int], labels: list[GridLabels], shown: int
    ) -> V4Batch:
        """Tensors of a batch whose first `shown` scenes are those of its first rows."""
        vocabulary, full = self.text.vocab_size, out.ids.shape[1]
        used = out.used
        ids, positions, segments = (
            a[:, :used].copy() for a in (out.ids, out.positions, out.segments)
        )
        is_open = np.cumsum(ids == vocabulary + START, 1) > np.cumsum(ids == vocabulary + END, 1)
        spans = np.where(is_open | (ids == vocabulary + END), 0, -1)
        layout = SparseLayout.of(segments, positions, spans, self.window, self.ratios)
        rows = torch.tensor(out.rows)
        weights = torch.tensor(out.weights) / max(1, len(out.tasks))
        seen = np.array(out.seen, np.float32).reshape(-1, HEADS, full)[:, :, :used]
        return V4Batch(
            torch.from_numpy(ids), torch.from_numpy(positions), torch.from_numpy(segments), layout,
            self.pictures(scenes, labels, shown, used),
            rows // full * used + rows % full, torch.tensor(out.targets), weights, torch.tensor(out.owners),
            tuple(out.tasks), torch.tensor(out.seen_rows).reshape(-1, 2), torch.from_numpy(seen.copy()),
        )  # fmt: skip

    def pictures(
        self, scenes: list[int], labels: list[GridLabels], shown: int, length: int
    ) -> Pictures:
        """Pictures of equal grids come together, which lets the tower work on them at once."""
        order = sorted(range(len(scenes)), key=lambda n: self.pool.grids[scenes[n]])
        counts = [len(labels[n].edges) for n in order]
        starts = dict(zip(order, np.cumsum([0, *counts]).tolist(), strict=False))
        cells = [cell_places(self.pool.grids[scenes[b]]) for b in range(shown)]
        indices = [starts[b] + np.arange(len(places)) for b, places in enumerate(cells)]
        places = [b * length + at for b, at in enumerate(cells)]
        classes = np.concatenate([labels[n].cells.classes.T for n in order])
        none = [np.zeros(0, np.int64)]
        return Pictures(
            torch.from_numpy(np.concatenate([self.pool.patches(scenes[n]) for n in order])),
            [self.pool.grids[scenes[n]] for n in order],
            torch.tensor(counts),
            torch.from_numpy(classes.copy())[..., None],
            torch.from_numpy(np.concatenate([labels[n].offsets for n in order])),
            torch.from_numpy(np.concatenate([labels[n].edges for n in order])),
            torch.from_numpy(np.concatenate(indices + none)),
            torch.from_numpy(np.concatenate(places + none)),
        )


def cell_places(grid: Grid) -> np.ndarray:
    """Where in a prompt each cell of the picture stands, cells in reading order."""
    cells = llm_grid_for(grid, IMAGE_CONFIG)
    types = block_types(cells, BLOCK_AT)
    places = np.empty(cells[0] * cells[1], np.int64)
    places[block_order(cells)] = BLOCK_AT + np.flatnonzero(types == IMAGE)
    return places


def look(
    part: Part, label: GridLabels, places: np.ndarray, length: int, *, counting: bool
) -> np.ndarray:
    """Where the two heads should look: evenly over the evidence's cells, `sink` of it at the first token."""
    target = np.zeros((HEADS, length), np.float32)
    for head, items in enumerate((part.first, part.second)):
        for item in items:
            cells = np.flatnonzero(label.cells.owner == item)
            if counting or not len(cells):
                cells = label.cells.centre[item : item + 1].astype(np.int64)
            target[head, places[cells]] += 1.0 / len(cells)
        target[head, 0] += part.sink
        target[head] /= target[head].sum()
    return target
