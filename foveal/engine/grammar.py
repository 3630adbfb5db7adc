"""Forms of answers (JSON, a schema, a pattern, a choice, a grammar) as masks over the vocabulary.

    Structure --GrammarCompiler.compile--> Grammar --matcher()--> Matcher, all one a request
    each step: masks(drafts) -> rows for the sampler;  accept(tokens) when they are committed;  is_done ends the request

A matcher's state is a function of the committed tokens alone; `masks` leaves it as it was. Special tokens and other
marks of the tokenizer are no text: they match no form, unless a Lark grammar names one (`<|ref|>`). End of sequence is
allowed where the form may end. The matching itself is llguidance's. No torch here.

Forms are compiled for each request (a millisecond, more for large schemas) and not shared: the library's copies of one
compiled form grow one automaton together, and what one request does with it could exhaust the limit of another.
"""

from __future__ import annotations

import json
import logging
import threading
from collections.abc import Sequence
from concurrent.futures import Executor, Future
from typing import TYPE_CHECKING, Any

import numpy as np

from foveal.errors import EngineError, PromptError
from foveal.step import TokenMask
from foveal.text.tokenizer import Tokenizer
from foveal.types import Structure

if TYPE_CHECKING:
    from llguidance import LLMatcher, LLTokenizer

_LOG = logging.getLogger(__name__)
# Between two tokens of JSON. Without a bound, a model that likes spaces never ends; indented JSON needs no more.
JSON_SPACE = r"[\x20\x0A\x0D\x09]{1,64}"
# Of the automaton that reads a form; one takes about 1 kB, so this bounds a form's memory at 50 MB.
MAX_LEXER_STATES = 50_000
# Longest piece of the library's message that goes to a user.
MAX_REASON = 600
_NEXT_STEP = {
    "json_object": "this is a fault of the program",
    "json_schema": "take this out of the schema or write it in another way",
    "regex": "write the pattern without look-around, back references and word borders",
    "choice": "send a JSON list of different texts",
    "grammar": "correct the grammar (Lark syntax, with a rule named start)",
}


class GrammarCompiler:
    """Compiles forms for one tokenizer; may be used from several threads.

    `vocab_size` is the width of the logits, which may exceed the tokenizer's ids. `eos_ids` end an answer.
    The library and its view of the vocabulary are loaded with the first form (some seconds for 129,280 entries).
    """

    def __init__(self, tokenizer: Tokenizer, vocab_size: int, eos_ids: Sequence[int]) -> None:
        self._tokenizer, self._eos_ids = tokenizer, tuple(eos_ids)
        self._num_words = -(-vocab_size // 32)
        self._lock = threading.Lock()
        self._vocabulary: LLTokenizer | None = None

    def compile(self, structure: Structure) -> Grammar:
        """The form for one request.

        Raises PromptError where it is faulty or asks for what is not supported, with the place or keyword.
        """
        from llguidance import LLMatcher, LLParserLimits

        try:
            text = _grammar_text(structure)
        except ValueError as error:  # half characters, numbers that are none
            raise _bad(structure, str(error)) from error
        limits = LLParserLimits(max_lexer_states=MAX_LEXER_STATES, verbose_errors=False)
        matcher = LLMatcher(self._loaded_vocabulary(), text, log_level=0, limits=limits)
        if matcher.is_error():
            raise _bad(structure, matcher.get_error())
        for message in matcher.get_grammar_warnings():
            _LOG.warning("structure %s: %s", structure.kind, message)
        return Grammar(matcher, structure, self._num_words)

    def compile_async(self, structure: Structure, pool: Executor) -> Future[Grammar]:
        """`compile` on a thread of `pool`; the future raises what it raises."""
        return pool.submit(self.compile, structure)

    def _loaded_vocabulary(self) -> LLTokenizer:
        with self._lock:
            if self._vocabulary is None:
                from llguidance import LLTokenizer, TokenizerWrapper

                wrapper = TokenizerWrapper(_Vocabulary(self._tokenizer, self._eos_ids))
                self._vocabulary = LLTokenizer(wrapper, eos_token=list(self._eos_ids))
            return self._vocabulary


class Grammar:
    """A compiled form for one request."""

    def __init__(self, compiled: LLMatcher, structure: Structure, num_words: int) -> None:
        self.structure = structure
        self._compiled, self._num_words = compiled, num_words

    def matcher(self) -> Matcher:
        """The state of the request while it has no output."""
        after = self.structure.after_token
        return Matcher(self._compiled.deep_copy(), self._num_words, after)


class Matcher:
    """How far one request's output fills its form. Not to be shared by threads."""

    def __init__(
        self,
        state: LLMatcher,
        num_words: int,
        after_token: int | None,
    ) -> None:
        self._state, self._num_words = state, num_words
        self._after_token, self._is_active = after_token, after_token is None

    @property
    def is_done(self) -> bool:
        """The form is complete, and nothing can follow."""
        return self._is_active and self._state.is_stopped()

    def masks(self, drafts: Sequence[int] = ()) -> tuple[int, TokenMask | None]:
        """How many of `drafts` may be tried, and the masks [that many + 1, words] of the rows behind them.

        The mask is None where no row is restricted (before `after_token`). A draft that ends the form is not among the
        valid ones: it would be the last token, and the row before it can give it. Raises PromptError where the form
        takes more work than the limits allow.
        """
        assert not self.is_done, "the form is complete; the request is over"
        rows = np.full((len(drafts) + 1, self._num_words), -1, dtype=np.int32)
        is_active, num_consumed, num_valid = self._is_active, 0, 0
        for place, row in enumerate(rows):
            num_valid = place
            if is_active:
                self._fill(row)
            if place == len(drafts):
                break
            if not is_active:
                is_active = drafts[place] == self._after_token
            elif self._consume(row, drafts[place]):
                num_consumed += 1
                if self._state.is_stopped():
                    break
            else:
                break
        if num_consumed and not self._state.rollback(num_consumed):
            raise EngineError(f"the form's state cannot go back {num_consumed} tokens")
        if not is_active:
            return num_valid, None
        return num_valid, rows[: num_valid + 1]

    def accept(self, tokens: Sequence[int]) -> None:
        """Committed tokens come in. Raises EngineError for one that the form does not allow; masks exclude that."""
        for token in tokens:
            if not self._is_active:
                self._is_active = token == self._after_token
            elif self._state.is_stopped() or not self._state.consume_token(token):
                raise EngineError(
                    f"token {token} does not fit the form that was asked for, although only fitting tokens may be "
                    "drawn; this is a fault of the program"
                )

    def _fill(self, row: TokenMask) -> None:
        try:
            octets = self._state.compute_bitmask()
        except ValueError as error:
            raise _too_complex(str(error)) from error
        if self._state.is_error():
            raise _too_complex(self._state.get_error())
        found = np.frombuffer(octets, dtype="<i4")[: row.shape[0]]
        row[: found.shape[0]] = found
        row[found.shape[0] :] = 0

    def _consume(self, row: TokenMask, draft: int) -> bool:
        """Go on by one draft. False, and nothing done, where the mask forbids it."""
        word, bit = divmod(draft, 32)
        is_allowed = 0 <= word < row.shape[0] and bool(int(row[word]) >> bit & 1)
        return is_allowed and self._state.consume_token(draft)


class _Vocabulary:
    """The tokenizer in the words of llguidance: the bytes of each id, and which ids are no text."""

    def __init__(self, tokenizer: Tokenizer, eos_ids: Sequence[int]) -> None:
        self._tokenizer = tokenizer
        self.eos_token_id, self.bos_token_id = eos_ids[0], tokenizer.bos_id
        self.tokens = [tokenizer.token_bytes(i) for i in range(tokenizer.vocab_size)]
        marks = {i for i, piece in enumerate(self.tokens) if self._is_mark(i, piece)}
        self.special_token_ids = sorted(tokenizer.special_ids | marks)

    def _is_mark(self, token_id: int, piece: bytes) -> bool:
        """Added tokens that mean something to the model although they are not flagged special (`<think>`)."""
        ends = (b"<", b">"), (b"[", b"]"), ("｜".encode(), "｜".encode())
        if len(piece) <= 2 or not any(piece.startswith(a) and piece.endswith(b) for a, b in ends):
            return False
        text = piece.decode(errors="replace")
        is_found = self._tokenizer.encode(text) == [token_id]
        return is_found and self._tokenizer.encode_literal(text) != [token_id]

    def __call__(self, text: bytes) -> list[int]:
        return self._tokenizer.encode_literal(text.decode())


def _grammar_text(structure: Structure) -> str:
    """The form in the library's language."""
    from llguidance import LLMatcher

    value = structure.value
    if structure.kind == "json_object":
        return _schema_text({"type": "object"})
    if structure.kind == "json_schema":
        schema = _parse_json(structure)
        if not isinstance(schema, dict) and schema is not True:
            raise _bad(structure, f"{value[:80]} is no JSON object")
        return _schema_text({} if schema is True else schema)
    if structure.kind == "regex":
        if not value:
            raise _bad(structure, "the pattern is empty")
        return LLMatcher.grammar_from_regex(value)
    if structure.kind == "choice":
        return LLMatcher.grammar_from_lark(_choice_rule(structure))
    if structure.kind == "grammar":
        return LLMatcher.grammar_from_lark(value)
    raise _bad(structure, "no such kind of form")


def _schema_text(schema: dict[str, Any]) -> str:
    from llguidance import LLMatcher

    return LLMatcher.grammar_from_json_schema(
        json.dumps(schema), defaults={"whitespace_pattern": JSON_SPACE}
    )


def _choice_rule(structure: Structure) -> str:
    texts = _parse_json(structure)
    is_list = isinstance(texts, list) and bool(texts)
    if not is_list or not all(isinstance(text, str) and text for text in texts):
        raise _bad(structure, f"{structure.value[:80]} is no list of non-empty texts")
    # Lark's strings are written as JSON's; the delete character alone has no short form there.
    literals = (json.dumps(text, ensure_ascii=False).replace("\x7f", "\\u007f") for text in texts)
    return "start: " + " | ".join(literals)


def _parse_json(structure: Structure) -> Any:
    try:
        return json.loads(structure.value, parse_constant=_refuse_constant)
    except json.JSONDecodeError as error:
        reason = f"it is no JSON: {error.msg} in line {error.lineno}, column {error.colno}"
        raise _bad(structure, reason) from error
    except RecursionError as error:
        raise _bad(structure, "it is nested too deeply") from error


def _refuse_constant(name: str) -> None:
    raise ValueError(f"{name} is no JSON")


def _bad(structure: Structure, reason: str) -> PromptError:
    advice = _NEXT_STEP.get(structure.kind, f"choose one of {', '.join(_NEXT_STEP)}")
    return PromptError(f"{structure.kind} cannot be used: {_shortened(reason)}; {advice}")


def _too_complex(reason: str) -> PromptError:
    return PromptError(
        f"the form that was asked for is too complex to follow: {_shortened(reason)}; "
        "ask for a simpler one, with fewer alternatives and shorter bounds"
    )


def _shortened(reason: str) -> str:
    text = reason.replace("<non-verbose/>", "").strip()
    return text if len(text) <= MAX_REASON else text[:MAX_REASON] + " ..."
