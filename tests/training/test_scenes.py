"""Scenes are what they say, the same each time, and asked about only where the answer is clear."""

from __future__ import annotations

import numpy as np
import pytest

from training import drawing
from training.cells import FAMILIES, NONE, label_cells
from training.pool import to_tile
from training.questions import KINDS_OF_TASK, TASKS, Task, ask, norm_box, side_of
from training.scenes import HELD_OUT_FROM, KINDS, Content, Item, Kind, make_scene

COUNT = 30


@pytest.mark.parametrize("kind", KINDS)
def test_scene_depends_on_kind_seed_and_index_only(kind: Kind) -> None:
    first = make_scene(kind, 5, 3, held_out=True)
    make_scene("word", 1, 1, held_out=False)  # another draw in between
    again = make_scene(kind, 5, 3, held_out=True)
    assert first.content == again.content
    assert first.picture.tobytes() == again.picture.tobytes()
    assert make_scene(kind, 6, 3, held_out=True).picture.tobytes() != first.picture.tobytes()


@pytest.mark.parametrize("kind", KINDS)
def test_items_lie_inside_the_picture_and_show(kind: Kind) -> None:
    for index in range(COUNT):
        scene = make_scene(kind, 11, index, held_out=True)
        width, height = scene.picture.size
        assert scene.content.size == (width, height)
        for item in scene.content.items:
            x1, y1, x2, y2 = item.box
            assert 0 <= x1 < x2 <= width, f"{kind} {index}: {item}"
            assert 0 <= y1 < y2 <= height, f"{kind} {index}: {item}"


def test_wanted_size_is_kept() -> None:
    assert make_scene("shapes", 1, 1, held_out=True, size=(384, 288)).picture.size == (384, 288)


def test_training_never_draws_held_out_digits(monkeypatch: pytest.MonkeyPatch) -> None:
    drawn: list[int] = []
    original = drawing.digit_mask

    def spy(index: int, size: int, rng: np.random.Generator) -> object:
        drawn.append(index)
        return original(index, size, rng)

    monkeypatch.setattr(drawing, "digit_mask", spy)
    for index in range(200):
        make_scene("digit", 1, index, held_out=False)
    assert drawn
    assert max(drawn) < HELD_OUT_FROM == 1437
    drawn.clear()
    for index in range(100):
        make_scene("digit", 1, index, held_out=True)
    assert min(drawn) >= HELD_OUT_FROM
    assert max(drawn) < len(drawing.handwritten()[0]) == 1797


@pytest.mark.parametrize("task", TASKS)
def test_a_question_has_one_answer_in_its_scene(task: Task) -> None:
    """The facts that the question leaves open are fixed by the scene alone."""
    asked = 0
    for index in range(COUNT):
        content = make_scene(KINDS_OF_TASK[task][0], 21, index, held_out=True).content
        qa = ask(task, content, np.random.default_rng(index))
        if qa is None:
            continue
        asked += 1
        names = [item.name for item in content.items]
        colours = [item.colour for item in content.items]
        if task == "colour" and len(names) > 1:
            shape = next(name for name in drawing.SHAPES if f" {name}" in qa.question)
            assert names.count(shape) == 1
            assert qa.answer == colours[names.index(shape)]
        elif task == "shape" and len(names) > 1:
            colour = next(name for name in drawing.COLOURS if name in qa.question)
            assert colours.count(colour) == 1
            assert qa.answer == names[colours.index(colour)]
        elif task == "count":
            assert 1 <= int(qa.answer) <= len(names) <= 5
        elif task in ("digit", "word"):
            assert qa.answer == content.text
    assert asked >= COUNT // 2


def test_relation_is_asked_only_where_it_is_clear() -> None:
    a = Item("shape", "circle", "red", (10, 40, 30, 60))
    right = Item("shape", "square", "blue", (70, 42, 90, 62))
    aslant = Item("shape", "square", "blue", (60, 90, 80, 110))
    assert side_of(a, right, 120) == "left"
    assert side_of(right, a, 120) == "right"
    assert side_of(a, aslant, 120) is None
    content = Content("shapes", (120, 120), (a, aslant))
    assert ask("relation", content, np.random.default_rng(0)) is None


def test_boxes_are_normalised_by_the_original_picture() -> None:
    item = Item("shape", "circle", "red", (0, 50, 100, 100))
    assert norm_box(item, (200, 100)) == (0, 500, 500, 999)


def test_cells_know_their_item() -> None:
    # A square in the middle of the left third of a wide picture: the tile has grey bars above and below.
    item = Item("shape", "square", "red", (0, 0, 96, 96))
    labels = label_cells(Content("shapes", (192, 96), (item,)))
    owner = labels.owner.reshape(6, 6)
    assert (owner[:1] == -1).all()
    assert (owner[5:] == -1).all()
    assert (owner[2:4, :3] == 0).all()
    assert (owner[:, 3:] == -1).all()
    colours = labels.classes[list(FAMILIES).index("colour")].reshape(6, 6)
    assert set(colours[2:4, :3].flatten()) == {list(drawing.COLOURS).index("red")}
    assert (colours[:, 3:] == NONE).all()


def test_tile_is_padded_like_the_processor_does() -> None:
    scene = make_scene("shapes", 3, 0, held_out=True, size=(192, 96))
    tile = to_tile(scene.picture)
    assert tile.shape == (3, 96, 96)
    assert (tile[:, :24] == 127).all()
    assert (tile[:, 72:] == 127).all()
