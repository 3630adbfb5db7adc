"""The ids of picture tokens in a DeepSeek-V4 prompt: one scheme inside, two at the door.

Inside, a block's token has the id vocab_size + type. Some programs write five reserved entries of the vocabulary
instead; those are text to the vocabulary, so they are converted only where whole prompts come in as ids, never in
ids that a text gave. Source: spec 1.6.
"""

from __future__ import annotations

from collections.abc import Sequence

from foveal.errors import CheckpointError, PromptError
from foveal.text.tokenizer import Tokenizer
from foveal.types import START
from foveal.vision.v4 import NUM_TYPES

# In the order of the types.
BORROWED_TOKENS = tuple(f"<|place_holder_mm_span_{n:04d}|>" for n in range(431, 431 + NUM_TYPES))
# Where these tokens are in the released vocabulary, whatever a tokenizer file calls its entries.
RELEASED_VOCAB_SIZE = 129280
RELEASED_BORROWED = range(129257, 129257 + NUM_TYPES)


def borrowed_ids(tokenizer: Tokenizer, vocab_size: int) -> tuple[int, ...] | None:
    """The five vocabulary entries that stand for types 0 to 4 elsewhere; None where a vocabulary has none."""
    try:
        return tuple(tokenizer.token_id(token) for token in BORROWED_TOKENS)
    except CheckpointError:
        return tuple(RELEASED_BORROWED) if vocab_size == RELEASED_VOCAB_SIZE else None


def canonical_ids(ids: Sequence[int], vocab_size: int, borrowed: Sequence[int] | None) -> list[int]:
    """`ids` with vocab_size + type for each borrowed entry.

    `borrowed` lists five ids in the order of the types (None: nothing is borrowed). Ids that have vocab_size + type
    somewhere are in that scheme already: then a borrowed entry is a word like others, and nothing changes. Raises
    PromptError for ids that are neither in the vocabulary nor a type.
    """
    _check_range(ids, vocab_size + NUM_TYPES, vocab_size)
    if borrowed is None or any(i >= vocab_size for i in ids):
        return list(ids)
    assert len(borrowed) == NUM_TYPES, f"{len(borrowed)} borrowed ids for {NUM_TYPES} types"
    types = {token_id: kind for kind, token_id in enumerate(borrowed)}
    return [vocab_size + types[i] if i in types else i for i in ids]


def check_text_ids(ids: Sequence[int], vocab_size: int) -> None:
    """Raise PromptError for an id outside the vocabulary: it would count as a picture's token."""
    _check_range(ids, vocab_size, vocab_size)


def _check_range(ids: Sequence[int], end: int, vocab_size: int) -> None:
    if not ids or (min(ids) >= 0 and max(ids) < end):
        return
    for position, token_id in enumerate(ids):
        if not 0 <= token_id < end:
            raise PromptError(
                f"token id {token_id} at position {position} is not allowed: the vocabulary has {vocab_size} entries"
                f"{'' if end > vocab_size else ', and ids behind it are those of pictures'}; check that the tokenizer "
                "belongs to the model"
            )


def text_around_blocks(ids: Sequence[int], vocab_size: int) -> list[list[int]]:
    """The text of canonical `ids` around their n blocks, one for each START: n + 1 lists of ids.

    Whether the blocks are whole is not looked at.
    """
    segments: list[list[int]] = [[]]
    for token_id in ids:
        if token_id == vocab_size + START:
            segments.append([])
        elif token_id < vocab_size:
            segments[-1].append(token_id)
    return segments
