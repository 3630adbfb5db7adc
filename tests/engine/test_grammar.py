from __future__ import annotations

import json
import random
import re
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import pytest

from foveal.engine.grammar import Grammar, GrammarCompiler, Matcher
from foveal.errors import EngineError, PromptError
from foveal.text.tokenizer import Tokenizer
from foveal.types import Structure, StructureKind
from tests.text.toy_tokenizers import MARKS, byte_level, load

EXTRA = 70  # logits are wider than the tokenizer, and not by a multiple of 32
SCHEMA = {
    "type": "object",
    "properties": {
        "colour": {"enum": ["red", "blue"]},
        "count": {"type": "integer", "minimum": 0, "maximum": 99},
        "name": {"type": "string", "maxLength": 6},
    },
    "required": ["colour", "count", "name"],
    "additionalProperties": False,
}
COLOURS = Structure("choice", json.dumps(["red", "blue", "blue-green"]))


@pytest.fixture(scope="session")
def tokenizer(repository: Path) -> Tokenizer:
    return Tokenizer.load(repository / "foveal" / "demo" / "demo-vl2")


@pytest.fixture(scope="session")
def compiler(tokenizer: Tokenizer) -> GrammarCompiler:
    return new_compiler(tokenizer)


def new_compiler(tokenizer: Tokenizer) -> GrammarCompiler:
    return GrammarCompiler(tokenizer, tokenizer.vocab_size + EXTRA, [tokenizer.eos_id])


def allowed_ids(mask_row: np.ndarray) -> list[int]:
    bits = np.unpackbits(np.ascontiguousarray(mask_row).view(np.uint8), bitorder="little")
    return [int(i) for i in np.flatnonzero(bits)]


def allowed_now(matcher: Matcher) -> list[int]:
    num_valid, mask = matcher.masks()
    assert num_valid == 0
    assert mask is not None
    assert mask.dtype == np.int32
    return allowed_ids(mask[0])


def walk(grammar: Grammar, tokenizer: Tokenizer, seed: int, limit: int = 400) -> list[int]:
    """A model without sense: any allowed token, until the form is complete."""
    choose, matcher, ids = random.Random(seed), grammar.matcher(), []
    while not matcher.is_done:
        assert len(ids) < limit, tokenizer.decode(ids)
        allowed = allowed_now(matcher)
        marks = tokenizer.special_ids.intersection(allowed) - {tokenizer.eos_id}
        assert not marks
        assert max(allowed) < tokenizer.vocab_size
        ids.append(choose.choice(allowed))
        matcher.accept(ids[-1:])
    return ids


def is_schema_met(text: str) -> bool:
    value = json.loads(text)
    return (
        set(value) == {"colour", "count", "name"}
        and value["colour"] in ("red", "blue")
        and 0 <= value["count"] <= 99
        and len(value["name"]) <= 6
    )


FORMS: list[tuple[StructureKind, str, Callable[[str], bool]]] = [
    ("json_schema", json.dumps(SCHEMA), is_schema_met),
    (
        "regex",
        r"[A-Z][a-z]{1,5}(, [0-9]+){2}",
        lambda t: re.fullmatch(r"[A-Z][a-z]{1,5}(, [0-9]+){2}", t) is not None,
    ),
    ("choice", COLOURS.value, lambda t: t in ("red", "blue", "blue-green")),
    (
        "grammar",
        'start: item ("," item)*\nitem: NAME "=" NUMBER\nNAME: /[a-z]{1,3}/\nNUMBER: /[0-9]{1,2}/\n',
        lambda t: re.fullmatch(r"[a-z]{1,3}=\d{1,2}(,[a-z]{1,3}=\d{1,2})*", t) is not None,
    ),
]


@pytest.mark.parametrize(("kind", "value", "is_met"), FORMS, ids=[form[0] for form in FORMS])
def test_any_allowed_tokens_make_an_answer_of_the_form(
    compiler: GrammarCompiler,
    tokenizer: Tokenizer,
    kind: StructureKind,
    value: str,
    is_met: Callable[[str], bool],
) -> None:
    grammar = compiler.compile(Structure(kind, value))
    for seed in range(12):
        ids = walk(grammar, tokenizer, seed)
        assert tokenizer.eos_id not in ids[:-1]
        text = tokenizer.decode(ids, skip_special=True)
        assert is_met(text), text


@pytest.mark.parametrize(
    "name", ["vl2/a_tiny/checkpoint", "v4_vision/vision_small/checkpoint"], ids=["vl2", "v4"]
)
def test_golden_tokenizers_work(golden: Path, name: str) -> None:
    extra = {} if name.startswith("vl2") else {"extra_tokens": ()}
    tokenizer = Tokenizer.load(golden / name, **extra)
    grammar = new_compiler(tokenizer).compile(Structure("json_schema", json.dumps(SCHEMA)))
    for seed in range(4):
        ids = walk(grammar, tokenizer, seed)
        assert is_schema_met(tokenizer.decode(ids, skip_special=True))


def test_C079_a_schema_with_enum_gives_json_that_matches(
    compiler: GrammarCompiler, tokenizer: Tokenizer
) -> None:
    schema = {
        "type": "object",
        "properties": {"colour": {"enum": ["red", "blue"]}},
        "required": ["colour"],
        "additionalProperties": False,
    }
    grammar = compiler.compile(Structure("json_schema", json.dumps(schema)))
    answers = [tokenizer.decode(walk(grammar, tokenizer, seed)) for seed in range(20)]
    assert {json.loads(answer)["colour"] for answer in answers} == {"red", "blue"}


@pytest.mark.parametrize("text", ["{}", '{"a": [1, {"b": null}], "c": "é \\" <|ref|>"}', "{ }"])
def test_json_object_takes_any_object(
    compiler: GrammarCompiler, tokenizer: Tokenizer, text: str
) -> None:
    matcher = compiler.compile(Structure("json_object")).matcher()
    matcher.accept(tokenizer.encode_literal(text))
    assert matcher.is_done


@pytest.mark.parametrize("text", ["[1]", "3", "text", '{"a" 1}', '{"a": 1}}', "{" + " " * 65])
def test_json_object_refuses_what_is_none(
    compiler: GrammarCompiler, tokenizer: Tokenizer, text: str
) -> None:
    matcher = compiler.compile(Structure("json_object")).matcher()
    with pytest.raises(EngineError, match="token"):
        matcher.accept(tokenizer.encode_literal(text))


@pytest.mark.parametrize(
    "text", ['a"b', "back\\slash", "two\nlines\tand", "é中🙂", "/x/", "del\x7f", "\x01", "<|User|>"]
)
def test_a_choice_may_be_any_text(
    compiler: GrammarCompiler, tokenizer: Tokenizer, text: str
) -> None:
    grammar = compiler.compile(Structure("choice", json.dumps([text, "other"])))
    matcher = grammar.matcher()
    matcher.accept(tokenizer.encode_literal(text))
    assert matcher.is_done


def test_a_form_that_may_go_on_ends_with_end_of_sequence(
    compiler: GrammarCompiler, tokenizer: Tokenizer
) -> None:
    matcher = compiler.compile(COLOURS).matcher()
    matcher.accept(tokenizer.encode_literal("blue"))
    assert not matcher.is_done
    assert tokenizer.eos_id in allowed_now(matcher)
    matcher.accept([tokenizer.eos_id])
    assert matcher.is_done


def test_a_grammar_may_name_marks(compiler: GrammarCompiler, tokenizer: Tokenizer) -> None:
    rule = "start: <|ref|> /[a-z]+/ <|/ref|>"
    matcher = compiler.compile(Structure("grammar", rule)).matcher()
    ref, end = tokenizer.token_id("<|ref|>"), tokenizer.token_id("<|/ref|>")
    assert allowed_now(matcher) == [ref]
    matcher.accept([ref, *tokenizer.encode_literal("cat"), end])
    assert matcher.is_done


def test_marks_that_are_not_flagged_special_are_no_text(tmp_path: Path) -> None:
    """`<think>` is one token that means something; its spelling inside a text is seven bytes."""
    values = byte_level(["<a>"], marks=(*MARKS, "<think>"))
    values["added_tokens"][-1]["special"] = False
    tokenizer = load(tmp_path, values)
    think, word = tokenizer.token_id("<think>"), tokenizer.token_id("<a>")
    matcher = new_compiler(tokenizer).compile(Structure("regex", "(.|\n){1,40}")).matcher()
    allowed = allowed_now(matcher)
    assert think not in allowed
    assert word in allowed
    matcher.accept(tokenizer.encode_literal("<think>"))
    with pytest.raises(EngineError, match=str(think)):
        matcher.accept([think])


# --- drafts -------------------------------------------------------------------------------------


def test_masks_for_drafts_are_those_of_single_steps(
    compiler: GrammarCompiler, tokenizer: Tokenizer
) -> None:
    grammar = compiler.compile(Structure("json_schema", json.dumps(SCHEMA)))
    ids = [i for i in walk(grammar, tokenizer, 5) if i != tokenizer.eos_id]
    at_once, stepping = grammar.matcher(), grammar.matcher()
    for place in range(len(ids)):
        drafts = ids[place : place + 4]
        # The token that completes the object is left to the row before it.
        expected = min(len(drafts), len(ids) - 1 - place)
        num_valid, mask = at_once.masks(drafts)
        assert num_valid == expected
        assert mask is not None
        assert mask.shape[0] == num_valid + 1
        copy = grammar.matcher()
        copy.accept(ids[:place])
        for row, draft in zip(mask, [*drafts[:num_valid], None], strict=True):
            assert allowed_ids(row) == allowed_now(copy)
            if draft is not None:
                copy.accept([draft])
        assert allowed_now(at_once) == allowed_now(stepping)
        at_once.accept([ids[place]])
        stepping.accept([ids[place]])
    assert at_once.is_done
    assert stepping.is_done


def test_drafts_behind_the_first_that_does_not_fit_are_dropped(
    compiler: GrammarCompiler, tokenizer: Tokenizer
) -> None:
    matcher = compiler.compile(Structure("regex", "[ab]{9}")).matcher()
    a, b, z = (tokenizer.encode_literal(letter)[0] for letter in "abz")
    for drafts, valid in (([a, b, z, a], 2), ([z, a], 0), ([a, tokenizer.eos_id], 1)):
        num_valid, mask = matcher.masks(drafts)
        assert num_valid == valid
        assert mask is not None
        assert mask.shape[0] == valid + 1
    assert matcher.masks([a, tokenizer.vocab_size + EXTRA + 500])[0] == 1


def test_an_end_of_sequence_is_no_valid_draft(
    compiler: GrammarCompiler, tokenizer: Tokenizer
) -> None:
    matcher = compiler.compile(COLOURS).matcher()
    matcher.accept(tokenizer.encode_literal("blue"))
    before = allowed_now(matcher)
    num_valid, mask = matcher.masks([tokenizer.eos_id, 7])
    assert num_valid == 0
    assert mask is not None
    assert allowed_ids(mask[0]) == before == allowed_now(matcher)


# --- behind reasoning ---------------------------------------------------------------------------


def test_a_form_behind_a_token_begins_when_that_is_committed(
    compiler: GrammarCompiler, tokenizer: Tokenizer
) -> None:
    end = tokenizer.token_id("<|/ref|>")
    matcher = compiler.compile(Structure("choice", COLOURS.value, after_token=end)).matcher()
    words = tokenizer.encode_literal("anything {")
    assert matcher.masks(words) == (len(words), None)
    matcher.accept(words)
    blue = tokenizer.encode_literal("blue")
    num_valid, mask = matcher.masks([words[0], end, *blue])
    assert num_valid == 2 + len(blue)
    assert mask is not None
    assert (mask[:2] == -1).all()
    plain = compiler.compile(COLOURS).matcher()
    assert allowed_ids(mask[2]) == allowed_now(plain)
    assert matcher.masks(words)[1] is None
    matcher.accept([end])
    assert allowed_now(matcher) == allowed_now(plain)


# --- compiling ----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("kind", "value", "word"),
    [
        (
            "json_schema",
            '{"type": "object", "unevaluatedProperties": false}',
            "unevaluatedProperties",
        ),
        ("json_schema", '{"type": "array", "uniqueItems": true}', "uniqueItems"),
        ("json_schema", '{"type": "objekt"}', "objekt"),
        ("json_schema", '{"$ref": "http://example.org/schema"}', "example.org"),
        ("json_schema", '{"type": "object",\n "properties": }', "line 2"),
        ("json_schema", "[1]", "object"),
        ("json_schema", "false", "object"),
        ("json_schema", '{"const": NaN}', "JSON"),
        ("choice", '["\\ud800"]', "surrogates"),
        ("json_schema", "[" * 100_000, "deep"),
        ("regex", "a(b", "unclosed"),
        ("regex", "(?=a)b", "look-around"),
        ("regex", "", "empty"),
        ("choice", "[]", "list"),
        ("choice", '["a", 3]', "list"),
        ("choice", '["a", ""]', "non-empty"),
        ("choice", "red", "line 1"),
        ("grammar", 'start: "a" | b', "unknown name"),
        ("grammar", 'start: "a"\nb: "x', "2\\("),
        ("grammar", "", "Empty"),
    ],
)
def test_a_faulty_form_is_an_error_that_names_the_place(
    compiler: GrammarCompiler, kind: StructureKind, value: str, word: str
) -> None:
    with pytest.raises(PromptError, match=word) as caught:
        compiler.compile(Structure(kind, value))
    assert str(caught.value).startswith(kind)
    assert len(str(caught.value)) < 1000


def test_a_form_too_complex_to_follow_is_its_own_request_s_fault(
    compiler: GrammarCompiler, tokenizer: Tokenizer
) -> None:
    pattern = "(" + "|".join(f"(.*{letter}.{{40}}){{20}}" for letter in "abcdefgh") + ")"
    form = Structure("regex", pattern)
    before = compiler.compile(form).matcher()
    with pytest.raises(PromptError, match="too complex"):
        walk(compiler.compile(form), tokenizer, 0, limit=10**9)
    assert allowed_now(before) == allowed_now(compiler.compile(form).matcher())


def test_threads_compile_and_follow_forms_together(tokenizer: Tokenizer) -> None:
    compiler = new_compiler(tokenizer)
    forms = [Structure(kind, value) for kind, value, _ in FORMS]
    alone = [walk(compiler.compile(form), tokenizer, 3) for form in forms]
    with ThreadPoolExecutor(4) as pool:
        futures = [compiler.compile_async(form, pool) for form in forms * 3]
        walks = [pool.submit(lambda f: walk(f.result(), tokenizer, 3), f) for f in futures]
        assert [w.result() for w in walks] == alone * 3
        bad = compiler.compile_async(Structure("regex", "a("), pool)
        with pytest.raises(PromptError):
            bad.result()


def test_a_mask_is_cheap(compiler: GrammarCompiler, tokenizer: Tokenizer) -> None:
    grammar = compiler.compile(Structure("json_schema", json.dumps(SCHEMA)))
    start = time.perf_counter()
    ids = walk(grammar, tokenizer, 1)
    assert (time.perf_counter() - start) / len(ids) < 0.02  # 0.1 ms where nothing else runs
