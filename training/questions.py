"""Questions about a scene, and their true answers.

`ask` returns None where a question would be ambiguous: the colour of "the circle" is asked only when there is one
circle, a relation only when the direction is clear. An answer is made of parts; each part says which items of the
scene it rests on, which training uses to teach attention where to look. This module knows no pictures, tokens or
models.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal, TypeAlias

import numpy as np

from training.drawing import COLOURS, SHAPES
from training.scenes import Content, Item, Kind

Task: TypeAlias = Literal[
    "colour", "shape", "relation", "count", "digit", "locate", "word", "exists", "describe", "chat"
]
TASKS: tuple[Task, ...] = ("colour", "shape", "relation", "count", "digit", "locate", "word")
KINDS_OF_TASK: dict[Task, tuple[Kind, ...]] = {
    "colour": ("shapes",),
    "shape": ("shapes",),
    "relation": ("shapes",),
    "count": ("crowd", "shapes"),
    "digit": ("digit",),
    "locate": ("shapes",),
    "word": ("word",),
    "exists": ("shapes",),
    "describe": ("shapes",),
}
SINK_SHARE = 5.0  # a count's evidence is weighed against this many absent items


@dataclass(frozen=True, slots=True)
class Part:
    """A piece of an answer. `first` and `second` are the items (by index) it rests on: two heads look at them.

    `sink` is the weight of looking at nothing, against 1 for each item: an answer that counts items can read their
    number from how much is left for it.
    """

    text: str
    first: tuple[int, ...] = ()
    second: tuple[int, ...] = ()
    sink: float = 0.0


@dataclass(frozen=True, slots=True)
class QA:
    task: Task
    question: str
    parts: tuple[Part, ...]
    mentions: tuple[
        str, ...
    ] = ()  # the words of the question that name what is asked about: one thing, or two

    @property
    def answer(self) -> str:
        return "".join(part.text for part in self.parts)


def ask(task: Task, content: Content, rng: np.random.Generator) -> QA | None:
    """A question of `task` about the scene, in one of many wordings; None when the scene does not allow one."""
    drawn = _ASKERS[task](content, rng)
    if drawn is None:
        return None
    question, parts, mentions = drawn
    return QA(task, _vary(question, rng), tuple(parts), mentions)


# Question, parts of the answer, and the words that name what is asked about.
Drawn: TypeAlias = tuple[str, list[Part], tuple[str, ...]]


def _pick(options: tuple[str, ...] | list[str], rng: np.random.Generator) -> str:
    return options[int(rng.integers(len(options)))]


def _vary(question: str, rng: np.random.Generator) -> str:
    """American spelling, no final mark, a lower-case start: what people type."""
    if rng.random() < 0.5:
        question = question.replace("colour", "color")
    if question[-1] in "?." and rng.random() < 0.15:
        question = question[:-1]
    if rng.random() < 0.08 and question[0].isupper():
        question = question[0].lower() + question[1:]
    return question


def _only(content: Content, key: Callable[[Item], str]) -> list[int]:
    """Items whose key nobody else in the scene has."""
    keys = [key(item) for item in content.items]
    return [i for i, k in enumerate(keys) if keys.count(k) == 1]


def _shape(item: Item) -> str:
    return item.name


def _colour(item: Item) -> str:
    return item.colour


def _both(item: Item) -> str:
    return f"{item.colour} {item.name}"


def _choose(indices: list[int], rng: np.random.Generator) -> int | None:
    return indices[int(rng.integers(len(indices)))] if indices else None


def plural(word: str, number: int = 2) -> str:
    if number == 1:
        return word
    return word + ("es" if word.endswith("s") else "s")


_COLOUR_FORMS = (
    "What colour is the {x}?", "What colour is the {x}?", "What colour is the {x}?", "Which colour is the {x}?",
    "What is the colour of the {x}?", "Which colour does the {x} have?", "Tell me the colour of the {x}.",
    "The {x} is which colour?", "What colour is this {x}?", "Name the colour of the {x}.", "What colour has the {x}?",
    "Colour of the {x}?", "What's the colour of the {x}?",
)  # fmt: skip
_SHAPE_FORMS = (
    "Which shape is {x}?", "Which shape is {x}?", "What shape is {x}?", "What shape is the {x} object?",
    "What is the {x} shape?", "What shape is the {x} one?", "Which object is {x}?", "Name the {x} shape.",
    "What is {x}?", "What is the {x} object?", "What is the shape of the {x} object?", "The {x} shape is what?",
    "What {x} shape is there?", "What's the {x} shape?", "Which shape is the {x} one?",
)  # fmt: skip


def _ask_colour(content: Content, rng: np.random.Generator) -> Drawn | None:
    i = _choose(_only(content, _shape), rng)
    if i is None:
        return None
    noun = content.items[i].name
    if len(content.items) == 1 and rng.random() < 0.25:
        noun = _pick(["shape", "object", "thing"], rng)
    question = _pick(_COLOUR_FORMS, rng).format(x=noun)
    return question, [Part(content.items[i].colour, (i,), (i,))], (noun,)


def _ask_shape(content: Content, rng: np.random.Generator) -> Drawn | None:
    i = _choose(_only(content, _colour), rng)
    if i is None:
        return None
    mentions = (content.items[i].colour,)
    if len(content.items) == 1 and rng.random() < 0.25:
        mentions = ()
        question = _pick(
            [
                "Which shape is this?",
                "What shape is it?",
                "What shape is this?",
                "What shape do you see?",
            ],
            rng,
        )
    else:
        question = _pick(_SHAPE_FORMS, rng).format(x=content.items[i].colour)
    return question, [Part(content.items[i].name, (i,), (i,))], mentions


SIDES = ("left", "right", "above", "below")
_OPPOSITE = {"left": "right", "right": "left", "above": "below", "below": "above"}
_RELATION_FORMS = (
    "Where is the {a} relative to the {b}?", "Where is the {a} relative to the {b}?",
    "Where is the {a} seen from the {b}?",
    "Is the {a} left, right, above or below the {b}?", "On which side of the {b} is the {a}?",
    "What is the position of the {a} relative to the {b}?", "Where is the {a} with respect to the {b}?",
    "Where does the {a} lie relative to the {b}?", "In which direction from the {b} is the {a}?",
    "Where is the {a} compared to the {b}?",
)  # fmt: skip
_SIDE_PHRASES = {
    "left": ("left of", "to the left of", "on the left of"),
    "right": ("right of", "to the right of", "on the right of"),
    "above": ("above", "over"),
    "below": ("below", "under"),
}


def side_of(a: Item, b: Item, longer: int) -> str | None:
    """Where `a` is, seen from `b`; None when it is not clearly one direction. `longer` is the picture's longer
    side.
    """
    dx, dy = a.centre[0] - b.centre[0], a.centre[1] - b.centre[1]
    if abs(dx) > 1.6 * abs(dy) and abs(dx) > 0.15 * longer:
        return "left" if dx < 0 else "right"
    if abs(dy) > 1.6 * abs(dx) and abs(dy) > 0.15 * longer:
        return "above" if dy < 0 else "below"
    return None


def _ask_relation(content: Content, rng: np.random.Generator) -> Drawn | None:
    unique = _only(content, _both)
    pairs = [(i, j) for i in unique for j in unique if i != j]
    rng.shuffle(pairs)
    for i, j in pairs:
        side = side_of(content.items[i], content.items[j], max(content.size))
        if side is None:
            continue
        a, b = _reference(content, i, rng), _reference(content, j, rng)
        if rng.random() < 0.65:
            return _pick(_RELATION_FORMS, rng).format(a=a, b=b), [Part(side, (i,), (j,))], (a, b)
        is_true = rng.random() < 0.5
        said = side if is_true else _pick([s for s in SIDES if s != side], rng)
        phrase = _pick(_SIDE_PHRASES[said], rng)
        form = _pick(
            ["Is the {a} {p} the {b}?", "Is the {a} {p} the {b}?", "Does the {a} lie {p} the {b}?"],
            rng,
        )
        answer = Part("yes" if is_true else "no", (i,), (j,))
        return form.format(a=a, p=phrase, b=b), [answer], (a, b, phrase)
    return None


def _reference(content: Content, i: int, rng: np.random.Generator) -> str:
    """A name that fits item `i` only: colour and shape, or the shape alone where that is enough."""
    item = content.items[i]
    if rng.random() < 0.3 and i in _only(content, _shape):
        return item.name
    return _both(item)


_COUNT_FORMS = (
    "How many {x} are there?", "How many {x} are there?", "How many {x} do you see?",
    "How many {x} are in the picture?",
    "Count the {x}.", "How many {x} can you see?", "What is the number of {x}?", "How many {x}?",
    "How many {x} are in this image?", "How many {x} are shown?", "Tell me how many {x} there are.",
)  # fmt: skip


def _ask_count(content: Content, rng: np.random.Generator) -> Drawn | None:
    noun, counted = _countable(content, rng)
    if len(counted) == 1 and rng.random() < 0.6:  # otherwise half of all answers would be 1
        noun, counted = _countable(content, rng)
    part = Part(str(len(counted)), tuple(counted), tuple(counted), SINK_SHARE)
    return _pick(_COUNT_FORMS, rng).format(x=noun), [part], (noun,)


def _countable(content: Content, rng: np.random.Generator) -> tuple[str, list[int]]:
    """A noun in the plural that fits at least one item, and the items that it fits."""
    item = content.items[int(rng.integers(len(content.items)))]
    kind = rng.random()
    if kind < 0.35:
        return _pick(["shapes", "objects", "things"], rng), list(range(len(content.items)))
    if kind < 0.75:
        same = [i for i, other in enumerate(content.items) if other.name == item.name]
        return plural(item.name), same
    same = [i for i, other in enumerate(content.items) if other.colour == item.colour]
    return f"{item.colour} {_pick(['shapes', 'objects', 'ones'], rng)}", same


_DIGIT_FORMS = (
    "Which digit is this?", "Which digit is this?", "What digit is this?", "Which number is this?",
    "What number is it?",
    "Read the digit.", "What digit do you see?", "Which digit is shown?", "Which digit is in the picture?",
    "What number is shown?", "Which digit is written here?", "What is the digit?", "What is this digit?",
    "Which digit is it?",
)  # fmt: skip
_WORD_FORMS = (
    "What does it say?", "What word is this?", "Which word is this?", "Read the word.", "What is written here?",
    "What does the text say?", "Which word is printed?", "Read the text.", "What is the word?",
    "Which word do you see?",
    "What word is printed here?", "What does the picture say?", "What word is shown?", "What text is this?",
    "Which letters do you see?", "What is written in the picture?", "Read this word.",
)  # fmt: skip


def _ask_digit(content: Content, rng: np.random.Generator) -> Drawn | None:
    return _pick(_DIGIT_FORMS, rng), [Part(content.text, (0,), (0,))], ()


def _ask_word(content: Content, rng: np.random.Generator) -> Drawn | None:
    parts = [Part(item.name, (i,), (i,)) for i, item in enumerate(content.items)]
    return _pick(_WORD_FORMS, rng), parts, ()


def norm_box(item: Item, size: tuple[int, int]) -> tuple[int, int, int, int]:
    """The box as 0..999 of the original picture: x by its width, y by its height (spec 7.4)."""
    sides = (size[0], size[1], size[0], size[1])
    values = [
        min(999, max(0, round(v / side * 999))) for v, side in zip(item.box, sides, strict=True)
    ]
    return (values[0], values[1], values[2], values[3])


_LOCATE_FORMS = (
    "Locate the {x}.", "Locate the {x}.", "Locate the {x}.", "Find the {x}.", "Where is the {x}?", "Show me the {x}.",
    "Point to the {x}.", "Give the box of the {x}.", "Locate {x}.", "<|ref|>the {x}<|/ref|>",
    "<|ref|>the {x}<|/ref|>.",
    "Find <|ref|>the {x}<|/ref|>", "Locate <|ref|>the {x}<|/ref|>.", "<|ref|>The {x}.<|/ref|>", "<|ref|>{x}<|/ref|>",
    "<|grounding|>Locate the {x}.",
)  # fmt: skip


def _ask_locate(content: Content, rng: np.random.Generator) -> Drawn | None:
    i = _choose(_only(content, _both), rng)
    if i is None:
        return None
    name = _reference(content, i, rng)
    box = ", ".join(str(v) for v in norm_box(content.items[i], content.size))
    parts = [Part(f"<|ref|>the {name}<|/ref|><|det|>[["), Part(box, (i,), (i,)), Part("]]<|/det|>")]
    return _pick(_LOCATE_FORMS, rng).format(x=name), parts, (name,)


_EXISTS_FORMS = (
    "Is there a {x}?",
    "Do you see a {x}?",
    "Is there a {x} in the picture?",
    "Can you see a {x}?",
)


def _ask_exists(content: Content, rng: np.random.Generator) -> Drawn | None:
    wanted = _both(content.items[int(rng.integers(len(content.items)))])
    if rng.random() < 0.5:
        wanted = f"{_pick(list(COLOURS), rng)} {_pick(SHAPES, rng)}"
    if rng.random() < 0.3:
        wanted = wanted.split()[1]
    found = [i for i, item in enumerate(content.items) if wanted in (_both(item), item.name)]
    question = _pick(_EXISTS_FORMS, rng).format(x=wanted).replace(" a orange", " an orange")
    return question, [Part("yes" if found else "no", tuple(found), tuple(found), 1.0)], (wanted,)


_DESCRIBE_FORMS = (
    "Describe the picture.", "What do you see?", "Describe this image.", "What is in the picture?",
    "Describe the image.",
    "What is in this image?", "Describe what you see.",
)  # fmt: skip


def _ask_describe(content: Content, rng: np.random.Generator) -> Drawn | None:
    if len(content.items) > 3:
        return None
    order = sorted(range(len(content.items)), key=lambda i: content.items[i].centre[0])
    parts: list[Part] = []
    for place, i in enumerate(order):
        item = content.items[i]
        joint = "" if place == 0 else " and " if place == len(order) - 1 else ", "
        article = "an" if item.colour[0] in "aeiou" else "a"
        lead = article.capitalize() if place == 0 else article
        parts += [
            Part(joint + lead),
            Part(" " + item.colour, (i,), (i,)),
            Part(" " + item.name, (i,), (i,)),
        ]
    return _pick(_DESCRIBE_FORMS, rng), [*parts, Part(".")], ()


GREETINGS = (
    "Hello", "Hello!", "Hi", "Hi!", "Hi there!", "Hey", "Good morning", "Good evening!", "Hello, how are you?",
    "Hey there",
)  # fmt: skip
ABOUT = (
    "Who are you?", "What are you?", "What can you do?", "What is this?", "Help", "help", "How can you help me?",
    "Which model are you?", "What do you do?", "What can I ask?", "Tell me about yourself.", "What is your name?",
    "What questions can you answer?",
)  # fmt: skip
OTHER = (
    "What is the capital of France?", "Tell me a joke.", "Write a poem.", "How old are you?",
    "What is the weather like?",
    "Thanks!", "Thank you.", "Explain gravity.", "What time is it?", "Sing a song.", "What is two plus two?", "Why?",
    "Translate this to German.", "Write a story about a dog.", "Bye", "Who won the game?", "What is love?", "Test",
)  # fmt: skip
GREETING_ANSWER = (
    "Hello! I am the demo model. Show me a picture of shapes, a digit or a word, and ask about it."
)
ABOUT_ANSWER = (
    "I am the demo model. I name colours and shapes, count to five, locate, "
    "and read a digit or a short word."
)
OTHER_ANSWER = "I am only the demo model. I answer simple questions about pictures of shapes, digits and words."
BLIND_ANSWER = "I see no picture. Give me one with shapes, a digit or a word."


def _ask_chat(content: Content, rng: np.random.Generator) -> Drawn | None:
    """Turns without a picture; the scene only lends its wording to questions that would need one."""
    kind = int(rng.integers(4))
    if kind == 3:
        task: Task = (
            "word" if content.kind == "word" else "digit" if content.kind == "digit" else "count"
        )
        drawn = _ASKERS[task](content, rng)
        return None if drawn is None else (drawn[0], [Part(BLIND_ANSWER)], ())
    questions = (GREETINGS, ABOUT, OTHER)[kind]
    return _pick(questions, rng), [Part((GREETING_ANSWER, ABOUT_ANSWER, OTHER_ANSWER)[kind])], ()


_ASKERS: dict[Task, Callable[[Content, np.random.Generator], Drawn | None]] = {
    "colour": _ask_colour,
    "shape": _ask_shape,
    "relation": _ask_relation,
    "count": _ask_count,
    "digit": _ask_digit,
    "locate": _ask_locate,
    "word": _ask_word,
    "exists": _ask_exists,
    "describe": _ask_describe,
    "chat": _ask_chat,
}
