"""Tokenizers that several test files use."""

from __future__ import annotations

from pathlib import Path

import pytest

from foveal.text.tokenizer import Tokenizer
from tests.text.toy_tokenizers import byte_level, llama, load


@pytest.fixture(scope="session")
def toy(tmp_path_factory: pytest.TempPathFactory) -> Tokenizer:
    """Byte-level, some merges, every mark an added token."""
    words = ("th", "the", "Ġthe", "Ġt", "Ġth", "ima", "image", "im", "ge")
    merges = ("t h", "th e", "Ġ the", "Ġ t", "Ġ th", "i m", "im a", "g e", "ima ge")
    return load(tmp_path_factory.mktemp("toy"), byte_level(words, merges))


@pytest.fixture(scope="session")
def toy_llama(tmp_path_factory: pytest.TempPathFactory) -> Tokenizer:
    return load(tmp_path_factory.mktemp("toy_llama"), llama())


@pytest.fixture(scope="session")
def golden_tokenizer(golden_vl2: Path) -> Tokenizer:
    return Tokenizer.load(golden_vl2 / "a_tiny" / "checkpoint")
