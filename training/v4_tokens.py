"""demo-v4's tokenizer: as demo-vl2's, with the marks of V4's chat grammar, and prompts exactly as the product makes
them.
"""

from __future__ import annotations

import json
from collections.abc import Iterable
from functools import cached_property
from pathlib import Path
from tempfile import TemporaryDirectory

import numpy as np
from tokenizers import Tokenizer

from foveal.text import tokenizer as product
from foveal.text.tokenizer import BOS, EOS
from foveal.text.v4_grammar import ASSISTANT, MARKS, THINK_END, USER
from foveal.vision.v4 import Grid, block_types, llm_grid_for
from training.tokens import GROUNDING, train_tokenizer
from training.v4_pool import IMAGE_CONFIG

SPECIAL = (*MARKS, *GROUNDING)  # begins with BOS and EOS: ids 0 and 1, as in the release
BLOCK_AT = 2  # position of a picture's first token, behind BOS and the user's mark


def write_v4_tokenizer(tokenizer: Tokenizer, folder: Path, context: int) -> None:
    """`tokenizer.json` and `tokenizer_config.json` in the vendor's layout; EOS pads."""
    tokenizer.save(str(folder / "tokenizer.json"), pretty=False)
    settings = {
        "add_bos_token": False,
        "add_eos_token": False,
        "bos_token": BOS,
        "eos_token": EOS,
        "pad_token": EOS,
        "unk_token": None,
        "clean_up_tokenization_spaces": False,
        "legacy": True,
        "model_max_length": context,
        "tokenizer_class": "LlamaTokenizerFast",
    }
    text = json.dumps(settings, indent=2, ensure_ascii=False)
    (folder / "tokenizer_config.json").write_text(text + "\n", encoding="utf-8")


class V4Text:
    """Texts to ids. What a user types is literal: marks spelled in it are plain characters, but for those in
    `keep`.
    """

    def __init__(self, backend: Tokenizer | None = None) -> None:
        self.backend = train_tokenizer(special=SPECIAL) if backend is None else backend
        with TemporaryDirectory() as folder:
            write_v4_tokenizer(self.backend, Path(folder), 1)
            self.product = product.Tokenizer.load(Path(folder))

    @cached_property
    def vocab_size(self) -> int:
        return int(self.backend.get_vocab_size())

    def mark(self, token: str) -> int:
        return self.product.token_id(token)

    @property
    def end(self) -> int:
        return self.mark(EOS)

    def picture_head(self, grid: Grid) -> list[int]:
        """Begin, the user's mark, and the block of a picture of `grid` patches."""
        types = block_types(llm_grid_for(grid, IMAGE_CONFIG), BLOCK_AT)
        return [self.mark(BOS), self.mark(USER), *(self.vocab_size + types).tolist()]

    def turn(
        self, question: str, *, lead: Iterable[int] = (), keep: tuple[str, ...] = ()
    ) -> list[int]:
        """`lead`, the question, and the marks that open the answer. Behind a picture the question begins with
        "\\n\\n".
        """
        words = self.product.encode_literal(question, keep)
        return [*lead, *words, self.mark(ASSISTANT), self.mark(THINK_END)]

    def prompt(self, question: str, grid: Grid | None = None) -> list[int]:
        """A whole prompt of one turn."""
        if grid is None:
            return self.turn(question, lead=(self.mark(BOS), self.mark(USER)))
        return self.turn(f"\n\n{question}", lead=self.picture_head(grid))

    def decode(self, ids: Iterable[int]) -> str:
        return self.product.decode(ids)


def random_experts(vocab_size: int, experts: int, chosen: int, seed: int) -> np.ndarray:
    """The table of a hash layer: `chosen` distinct experts for each token, [vocabulary, chosen] int64."""
    rng = np.random.default_rng(seed)
    return np.argsort(rng.random((vocab_size, experts)), 1)[:, :chosen].astype(np.int64)
