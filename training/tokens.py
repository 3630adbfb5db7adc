"""The demo model's own tokenizer: byte-level BPE with the vendor's special tokens.

Each digit and each capital letter is a token of its own, so that printed words and coordinates are spelt out.
Special tokens keep the vendor's strings (spec 7.1); their ids are looked up by string everywhere.
"""

from __future__ import annotations

import json
import re
from pathlib import Path

import numpy as np
from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, pre_tokenizers, trainers

from training.drawing import COLOURS, SHAPES
from training.questions import KINDS_OF_TASK, Task, ask
from training.scenes import Kind, make_scene

BOS, EOS, PAD = "<｜begin▁of▁sentence｜>", "<｜end▁of▁sentence｜>", "<｜▁pad▁｜>"
IMAGE, USER, ASSISTANT = "<image>", "<|User|>", "<|Assistant|>"
GROUNDING = ("<|ref|>", "<|/ref|>", "<|det|>", "<|/det|>", "<|grounding|>")
SPECIAL = (BOS, EOS, PAD, IMAGE, *GROUNDING, USER, ASSISTANT)
VOCABULARY = 640
# One digit, one capital, a comma with its space before a number, a lower-case word with its space, line breaks, the
# rest.
PIECES = r"[0-9A-Z]|, (?=[0-9])| ?[a-z']+|\n+| ?[^\sA-Za-z0-9]+|\s+"


def train_tokenizer(
    seed: int = 7, samples: int = 400, special: tuple[str, ...] = SPECIAL
) -> Tokenizer:
    """Learn the merges from generated questions and answers. demo-v4 (`v4_tokens.py`) has other `special` tokens."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(PIECES), "isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=VOCABULARY,
        special_tokens=[AddedToken(t, special=True, normalized=False) for t in special],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(_corpus(seed, samples), trainer)
    return tokenizer


def _corpus(seed: int, samples: int) -> list[str]:
    """Texts that decide which merges exist; colour and shape words often enough to be one token with and without
    space.
    """
    texts: list[str] = []
    tasks: list[Task] = [*KINDS_OF_TASK, "chat"]
    kinds: tuple[Kind, ...] = ("shapes", "crowd", "digit", "word")
    scenes = {
        kind: [make_scene(kind, seed, i, held_out=False).content for i in range(60)]
        for kind in kinds
    }
    for t, task in enumerate(tasks):
        for i in range(samples):
            rng = np.random.default_rng([seed, t, i])
            pool = scenes[KINDS_OF_TASK.get(task, kinds)[0]]
            qa = ask(task, pool[i % len(pool)], rng)
            if qa is not None:
                # Special tokens are cut out before merges apply, so their letters must not make merges of their own.
                texts += re.split(r"<\|/?[a-z]+\|>", f"{qa.question}\n\n") + re.split(
                    r"<\|/?[a-z]+\|>", qa.answer
                )
    words = [*COLOURS, *SHAPES, "left", "right", "above", "below", "yes", "no", "the"]
    return texts + [form for word in words for form in (word, f" {word}")] * 200


def special_ids(tokenizer: Tokenizer) -> dict[str, int]:
    found = {token: tokenizer.token_to_id(token) for token in SPECIAL}
    return {token: int(i) for token, i in found.items() if i is not None}


def write_tokenizer(tokenizer: Tokenizer, folder: Path, context: int) -> None:
    """The three tokenizer files in the vendor's layout."""
    tokenizer.save(str(folder / "tokenizer.json"), pretty=False)
    flags = {
        "lstrip": False,
        "normalized": False,
        "rstrip": False,
        "single_word": False,
        "special": True,
    }
    decoder = {str(i): {"content": token, **flags} for token, i in special_ids(tokenizer).items()}
    names = {"bos_token": BOS, "eos_token": EOS, "pad_token": PAD}
    settings = {
        "add_bos_token": False,
        "add_eos_token": False,
        "added_tokens_decoder": decoder,
        **names,
        "unk_token": None,
        "clean_up_tokenization_spaces": False,
        "legacy": True,
        "model_max_length": context,
        "tokenizer_class": "LlamaTokenizerFast",
        "use_default_system_prompt": False,
    }
    _write_json(folder / "tokenizer_config.json", settings)
    extra = [IMAGE, *GROUNDING, USER, ASSISTANT]
    _write_json(folder / "special_tokens_map.json", {**names, "additional_special_tokens": extra})


def _write_json(path: Path, values: object) -> None:
    path.write_text(json.dumps(values, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")
