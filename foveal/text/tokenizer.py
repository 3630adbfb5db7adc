"""The checkpoint's own tokenizer: text to ids, ids to text, and the difference between a mark and its spelling.

A *mark* is an added token that means something to the model (`<image>`, a role tag, end of sequence, `<|ref|>` ...).
Where the text comes from a template, `encode` turns spelled-out marks into their ids. Where it comes from a user,
`encode_literal` keeps the marks that it is told to keep and encodes the spelling of all others as plain text.

Reads `tokenizer.json`, `tokenizer_config.json` and `special_tokens_map.json`. Knows no chat format. Source: spec 7.1.
"""

from __future__ import annotations

import json
from collections.abc import Collection, Iterable, Mapping, Sequence
from functools import cached_property
from pathlib import Path
from typing import Any

from tokenizers import AddedToken
from tokenizers import Tokenizer as Backend

from foveal.errors import CheckpointError, PromptError
from foveal.text.decoder import DecoderRules, TextDecoder, decoder_rules

BOS, EOS, PAD = "<｜begin▁of▁sentence｜>", "<｜end▁of▁sentence｜>", "<｜▁pad▁｜>"
# In the order in which the official processor adds those that a tokenizer lacks, which fixes their ids.
VL2_TOKENS = (
    "<image>",
    "<|ref|>",
    "<|/ref|>",
    "<|det|>",
    "<|/det|>",
    "<|grounding|>",
    "<|User|>",
    "<|Assistant|>",
)
_NAMED = {"bos_token": BOS, "eos_token": EOS, "pad_token": PAD}


class Tokenizer:
    """Encodes and decodes with a checkpoint's vocabulary; immutable after `load`."""

    def __init__(
        self, definition: str, backend: Backend, rules: DecoderRules, names: Mapping[str, str]
    ) -> None:
        self._definition, self._backend, self._rules = definition, backend, rules
        self._added: dict[int, AddedToken] = backend.get_added_tokens_decoder()
        self._special_ids = frozenset(i for i, token in self._added.items() if token.special)
        self._literal: dict[frozenset[str], _LiteralEncoder] = {}
        self._pieces: dict[int, bytes | None] = {}
        self.bos_id = self.token_id(names["bos_token"])
        self.eos_id = self.token_id(names["eos_token"])
        self.pad_id = self.token_id(names["pad_token"])

    @classmethod
    def load(
        cls, folder: str | Path, *, extra_tokens: Sequence[str] = (PAD, *VL2_TOKENS)
    ) -> Tokenizer:
        """Read the tokenizer files of a checkpoint folder.

        Those of `extra_tokens` that the files lack are added behind the last id, as VL2's official processor does.
        Without a pad token, end-of-sequence serves. Raises CheckpointError where a file is missing or broken.
        """
        path = Path(folder) / "tokenizer.json"
        definition = _read_text(path)
        values = _parse_object(path, definition)
        settings = _read_settings(Path(folder))
        backend = _build_backend(path, definition)
        _add_missing(backend, settings, extra_tokens)
        rules = decoder_rules(values.get("decoder"))
        names = {name: _content(settings.get(name)) or default for name, default in _NAMED.items()}
        if backend.token_to_id(names["pad_token"]) is None:
            names["pad_token"] = names["eos_token"]
        return cls(definition, backend, rules, names)

    @cached_property
    def vocab_size(self) -> int:
        """One more than the highest id. The model's embedding table may have more rows."""
        return 1 + max(self._backend.get_vocab(with_added_tokens=True).values())

    @property
    def special_ids(self) -> frozenset[int]:
        """The ids that `decode(skip_special=True)` leaves out."""
        return self._special_ids

    def token_id(self, token: str) -> int:
        """The id of a token by its exact string. Raises CheckpointError where the vocabulary lacks it."""
        found: int | None = self._backend.token_to_id(token)
        if found is None:
            raise CheckpointError(
                f"the tokenizer has no token {token!r}; check tokenizer.json and special_tokens_map.json "
                "against the model's original files"
            )
        return found

    # --- text to ids ----------------------------------------------------------------------------

    def encode(self, text: str) -> list[int]:
        """Ids of `text` in which spelled-out marks count as marks. No begin or end of sequence is added."""
        return list(self._backend.encode(_checked(text), add_special_tokens=False).ids)

    def encode_literal(self, text: str, keep: Collection[str] = ()) -> list[int]:
        """Ids of `text` as a user typed it: only marks in `keep` count as marks, all others are plain characters.

        Text without marks gets the same ids as from `encode`. Raises CheckpointError for a mark in `keep` that the
        tokenizer lacks.
        """
        kept = frozenset(keep)
        encoder = self._literal.get(kept)
        if encoder is None:
            encoder = self._literal[kept] = self._literal_encoder(kept)
        return encoder.encode(_checked(text))

    def _literal_encoder(self, keep: frozenset[str]) -> _LiteralEncoder:
        for token in keep:
            self.token_id(token)
        return _LiteralEncoder(json.loads(self._definition), self._added, keep)

    # --- ids to text ----------------------------------------------------------------------------

    def decode(self, ids: Iterable[int], *, skip_special: bool = False) -> str:
        """The text of `ids`. Ids outside the vocabulary add nothing; invalid UTF-8 becomes U+FFFD.

        `skip_special` also drops `<|ref|>` and `<|det|>`, so it loses boxes.
        """
        decoder = self.text_decoder(skip_special=skip_special)
        return "".join([decoder.push(token_id) for token_id in ids]) + decoder.flush()

    def text_decoder(self, *, skip_special: bool = False) -> TextDecoder:
        """A fresh incremental decoder, which `decode` and streaming share."""
        skipped = self._special_ids if skip_special else frozenset()

        def piece_of(token_id: int, is_first: bool) -> bytes | None:
            return None if token_id in skipped else self._piece(token_id, is_first)

        return TextDecoder(self._rules, piece_of)

    def token_bytes(self, token_id: int) -> bytes:
        """The bytes that a token stands for inside a text; empty for an id outside the vocabulary."""
        return self._piece(token_id, is_first=False) or b""

    def _piece(self, token_id: int, is_first: bool) -> bytes | None:
        if is_first:
            return self._lookup(token_id, is_first=True)
        if token_id not in self._pieces:
            self._pieces[token_id] = self._lookup(token_id, is_first=False)
        return self._pieces[token_id]

    def _lookup(self, token_id: int, *, is_first: bool) -> bytes | None:
        token = self._backend.id_to_token(token_id) if 0 <= token_id < 2**32 else None
        return None if token is None else self._rules.piece(token, is_first=is_first)


class _LiteralEncoder:
    """A second backend, with the same ids, that finds no mark but the kept ones.

    Kept marks are flagged "not special" and all others "special"; then the library is told to encode special tokens as
    text. Marks that the vocabulary itself could also spell (through a merge or a whole-word entry) are cut in two.
    """

    def __init__(
        self, definition: dict[str, Any], added: Mapping[int, AddedToken], keep: frozenset[str]
    ) -> None:
        marks = {i: t for i, t in added.items() if _is_mark(t) and t.content not in keep}
        definition["added_tokens"] = [
            _added_entry(i, token, is_special=i in marks) for i, token in sorted(added.items())
        ]
        _drop_merges(definition["model"], {token.content for token in marks.values()})
        self._backend = Backend.from_str(json.dumps(definition))
        self._backend.no_truncation()
        self._backend.no_padding()
        self._backend.encode_special_tokens = True
        self._forbidden = frozenset(marks)
        for i, token in added.items():
            if self._backend.token_to_id(token.content) != i:
                raise CheckpointError(
                    f"tokenizer.json: added token {token.content!r} does not keep its id {i}; the ids of added "
                    "tokens must follow each other behind the vocabulary"
                )

    def encode(self, text: str) -> list[int]:
        encoding = self._backend.encode(text, add_special_tokens=False)
        ids: list[int] = list(encoding.ids)
        if self._forbidden.isdisjoint(ids):
            return ids
        spans = zip(ids, encoding.offsets, strict=True)
        cuts = [a + 1 for i, (a, b) in spans if i in self._forbidden and b - a > 1]
        if not cuts:  # a mark of one character has no other spelling
            return ids
        parts = [text[a:b] for a, b in zip([0, *cuts], [*cuts, len(text)], strict=True)]
        return [i for part in parts for i in self.encode(part)]


def _is_mark(token: AddedToken) -> bool:
    """Added tokens that are plain words or characters, as some vocabularies have, are ordinary text."""
    content = token.content
    return token.special or (len(content) > 2 and content[0] + content[-1] in ("<>", "[]", "｜｜"))


def _drop_merges(model: dict[str, Any], marks: set[str]) -> None:
    """Take out the merges that end in a mark, in place. Merges are "a b" strings or [a, b] pairs."""
    merges: Sequence[str | list[str]] = model.get("merges") or []
    if merges and not marks.isdisjoint(model.get("vocab", ())):
        joined = ("".join(m.split(" ") if isinstance(m, str) else m) for m in merges)
        model["merges"] = [m for m, j in zip(merges, joined, strict=True) if j not in marks]


def _added_entry(token_id: int, token: AddedToken, *, is_special: bool) -> dict[str, Any]:
    return {
        "id": token_id,
        "content": token.content,
        "single_word": token.single_word,
        "lstrip": token.lstrip,
        "rstrip": token.rstrip,
        "normalized": token.normalized,
        "special": is_special,
    }


# --- files --------------------------------------------------------------------------------------


def _checked(text: str) -> str:
    try:
        text.encode()
    except UnicodeEncodeError as error:
        raise PromptError(
            f"the text has half a character (a lone surrogate, {text[error.start]!r}) at position {error.start}; "
            "send valid Unicode"
        ) from None
    return text


def _read_text(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8-sig")
    except FileNotFoundError:
        raise CheckpointError(
            f"{path.parent} has no {path.name}; copy it from the model's original files"
        ) from None
    except (OSError, UnicodeDecodeError) as error:
        raise CheckpointError(f"{path} cannot be read: {error}; fetch the file again") from error


def _parse_object(path: Path, text: str) -> dict[str, Any]:
    try:
        values = json.loads(text)
    except ValueError as error:
        raise CheckpointError(f"{path} is not valid JSON: {error}; fetch the file again") from error
    if not isinstance(values, dict):
        raise CheckpointError(f"{path} holds a {type(values).__name__}, not a JSON object")
    return values


def _read_settings(folder: Path) -> dict[str, Any]:
    """`special_tokens_map.json` overlaid with `tokenizer_config.json`; either may be absent."""
    settings: dict[str, Any] = {}
    for name in ("special_tokens_map.json", "tokenizer_config.json"):
        path = folder / name
        if path.is_file():
            found = _parse_object(path, _read_text(path))
            settings |= {key: value for key, value in found.items() if value is not None}
    return settings


def _build_backend(path: Path, definition: str) -> Backend:
    try:
        backend = Backend.from_str(definition)
    except Exception as error:  # the tokenizers library raises no narrower class
        raise CheckpointError(
            f"{path} is not a tokenizer definition: {error}; fetch the file again"
        ) from error
    backend.no_truncation()
    backend.no_padding()
    return backend


def _add_missing(
    backend: Backend, settings: Mapping[str, Any], extra_tokens: Sequence[str]
) -> None:
    """Add the tokens that the settings or the format ask for, in the official order.

    First those of `added_tokens_decoder` by id, then the named ones and the additional ones; then `extra_tokens`, the
    pad token among them only if none is named. One that the vocabulary has as an ordinary entry becomes special and
    keeps its id.
    """
    decoder = settings.get("added_tokens_decoder") or {}
    listed = [decoder[key] for key in sorted(decoder, key=int)]
    named = [settings.get(name) for name in ("bos_token", "eos_token", "unk_token", "pad_token")]
    additional = settings.get("additional_special_tokens") or []
    has_pad = bool(_content(settings.get("pad_token")))
    extra = [token for token in extra_tokens if token != PAD or not has_pad]
    known = {token.content for token in backend.get_added_tokens_decoder().values()}
    for entry in (*listed, *named, *additional, *extra):
        token = _as_added_token(entry)
        if token is not None and token.content not in known:
            known.add(token.content)
            add = backend.add_special_tokens if token.special else backend.add_tokens
            add([token])


def _as_added_token(entry: Any) -> AddedToken | None:
    content = _content(entry)
    if not content:
        return None
    flags: Mapping[str, Any] = entry if isinstance(entry, Mapping) else {}
    return AddedToken(
        content,
        single_word=bool(flags.get("single_word", False)),
        lstrip=bool(flags.get("lstrip", False)),
        rstrip=bool(flags.get("rstrip", False)),
        normalized=bool(flags.get("normalized", False)),
        special=bool(flags.get("special", True)),
    )


def _content(entry: Any) -> str:
    """The token's string: entries are strings or objects with `content`."""
    value = entry.get("content") if isinstance(entry, Mapping) else entry
    return value if isinstance(value, str) else ""
