"""Public reports about streamed text, turned into small inputs."""

from __future__ import annotations

from pathlib import Path

import pytest

from foveal.text.decoder import byte_alphabet
from foveal.text.detokenize import StreamDetokenizer
from foveal.text.tokenizer import Tokenizer
from tests.text.toy_tokenizers import byte_level, llama, load


@pytest.fixture(params=["byte level", "byte fallback"])
def tokenizer(request: pytest.FixtureRequest, tmp_path: Path) -> Tokenizer:
    return load(tmp_path, byte_level() if request.param == "byte level" else llama())


def byte_ids(tokenizer: Tokenizer, data: bytes) -> list[int]:
    """One token a byte, in either kind of vocabulary."""
    characters = {byte: character for character, byte in byte_alphabet().items()}
    is_fallback = tokenizer.token_bytes(1) == b"\x00"
    names = [f"<0x{byte:02X}>" if is_fallback else characters[byte] for byte in data]
    return [tokenizer.token_id(name) for name in names]


@pytest.mark.parametrize("character", ["夢", "ď", "🦊", "👩‍🚀"])
def test_C088_split_characters_come_out_whole(tokenizer: Tokenizer, character: str) -> None:
    ids = byte_ids(tokenizer, f"a{character}b{character}".encode())
    detokenizer = StreamDetokenizer(tokenizer)
    pieces = [*map(detokenizer.push, ids), detokenizer.finish()]
    assert not any("\ufffd" in piece for piece in pieces)
    assert "".join(pieces) == tokenizer.decode(ids) == f"a{character}b{character}"
    assert all(piece == "" or piece in f"ab{character}" for piece in pieces)


@pytest.mark.parametrize("character", ["夢", "ď", "🦊"])
def test_C088_a_lone_tail_is_dropped(tokenizer: Tokenizer, character: str) -> None:
    data = character.encode()
    for length in range(1, len(data)):
        ids = byte_ids(tokenizer, b"a" + data[:length])
        detokenizer = StreamDetokenizer(tokenizer)
        pieces = [*map(detokenizer.push, ids), detokenizer.finish()]
        assert "".join(pieces) == detokenizer.text == "a"


def test_C088_truly_invalid_bytes_show_as_in_whole_decoding(tokenizer: Tokenizer) -> None:
    ids = byte_ids(tokenizer, b"a\xffb\xe5c")
    detokenizer = StreamDetokenizer(tokenizer)
    pieces = [*map(detokenizer.push, ids), detokenizer.finish()]
    assert "".join(pieces) == tokenizer.decode(ids) == "a\ufffdb\ufffdc"
