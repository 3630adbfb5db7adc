"""Small tokenizers made at test time: byte-level BPE, and the Llama layout with byte fallback."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from foveal.text.decoder import byte_alphabet
from foveal.text.tokenizer import BOS, EOS, PAD, VL2_TOKENS, Tokenizer

MARKS = (BOS, EOS, PAD, *VL2_TOKENS)
BYTE_LEVEL = {
    "type": "ByteLevel",
    "add_prefix_space": False,
    "trim_offsets": True,
    "use_regex": False,
}
WHITE_SPACE_ALONE = {
    "type": "Sequence",
    "pretokenizers": [
        {"type": "Split", "pattern": {"Regex": r"\s"}, "behavior": "Isolated", "invert": False},
        BYTE_LEVEL,
    ],
}
LLAMA_DECODER = {
    "type": "Sequence",
    "decoders": [
        {"type": "Replace", "pattern": {"String": "▁"}, "content": " "},
        {"type": "ByteFallback"},
        {"type": "Fuse"},
        {"type": "Strip", "content": " ", "start": 1, "stop": 0},
    ],
}


def added(token_id: int, content: str, **flags: bool) -> dict[str, Any]:
    entry = {"single_word": False, "lstrip": False, "rstrip": False, "normalized": False}
    return {"id": token_id, "content": content, **entry, "special": True, **flags}


def bpe(vocab: Mapping[str, int], merges: Sequence[str] = (), **settings: Any) -> dict[str, Any]:
    fixed = {"type": "BPE", "dropout": None, "unk_token": None, "continuing_subword_prefix": None}
    fixed |= {"end_of_word_suffix": None, "fuse_unk": False, "byte_fallback": False}
    return {**fixed, "vocab": dict(vocab), "merges": list(merges), **settings}


def definition(model: dict[str, Any], **parts: Any) -> dict[str, Any]:
    empty = {"version": "1.0", "truncation": None, "padding": None, "added_tokens": []}
    rest = {"normalizer": None, "pre_tokenizer": None, "post_processor": None, "decoder": None}
    return {**empty, **rest, **parts, "model": model}


def byte_level(
    words: Sequence[str] = (),
    merges: Sequence[str] = (),
    *,
    marks: Sequence[str] = MARKS,
    pre_tokenizer: Mapping[str, Any] = BYTE_LEVEL,
    **settings: Any,
) -> dict[str, Any]:
    """256 bytes, then `words`, then `marks` as added tokens (at the word's id where a mark is also a word)."""
    vocab = {character: i for i, character in enumerate(byte_alphabet())}
    for word in words:
        vocab.setdefault(word, len(vocab))
    ids = dict(vocab)
    tokens = [added(ids.setdefault(mark, len(ids)), mark) for mark in marks]
    model = bpe(vocab, merges, **settings)
    return definition(
        model, added_tokens=tokens, pre_tokenizer=pre_tokenizer, decoder=dict(BYTE_LEVEL)
    )


def llama(
    pieces: str = "abcdefghij ,.", *, decoder: Mapping[str, Any] = LLAMA_DECODER
) -> dict[str, Any]:
    """Byte fallback for all characters but `pieces`; a space is written ▁ and one stands before the text."""
    names = ["<unk>", *(f"<0x{byte:02X}>" for byte in range(256)), "▁", *pieces.replace(" ", "")]
    vocab = {name: i for i, name in enumerate(names)}
    model = bpe(vocab, byte_fallback=True, unk_token="<unk>", fuse_unk=True)
    tokens = [added(len(vocab) + i, mark) for i, mark in enumerate(MARKS)]
    steps = [
        {"type": "Prepend", "prepend": "▁"},
        {"type": "Replace", "pattern": {"String": " "}, "content": "▁"},
    ]
    normalizer = {"type": "Sequence", "normalizers": steps}
    return definition(model, added_tokens=tokens, normalizer=normalizer, decoder=dict(decoder))


def load(folder: Path, values: Mapping[str, Any], **files: Mapping[str, Any]) -> Tokenizer:
    """Write `tokenizer.json` and other files (named without ".json") and load them."""
    folder.mkdir(parents=True, exist_ok=True)
    for name, content in {"tokenizer": values, **files}.items():
        (folder / f"{name}.json").write_text(json.dumps(content), encoding="utf-8")
    return Tokenizer.load(folder)
