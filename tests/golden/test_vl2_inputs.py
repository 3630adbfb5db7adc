"""Golden numbers fed back through the other doors: ready pixels, ready rows, half precision, batches.

Tower and language model run as the engine runs them; the limit of 2e-4 is that of two correct float32 implementations.
"""

from __future__ import annotations

import json
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor

from foveal import LLM
from foveal.types import Prompt
from foveal.vision.decode import load_picture

LIMIT = 2e-4
VARIANTS = ("a_tiny", "b_small", "c_base", "c_groups", "d_tail_depth3", "d_linear")


@cache
def loaded(folder: Path, dtype: str = "float32") -> LLM:
    return LLM(folder / "checkpoint", dtype=dtype, device="cpu", picture_mode="vendor")


def read(folder: Path, name: str) -> tuple[dict[str, Any], dict[str, Tensor]]:
    path = folder / "cases" / f"{name}.json"
    return json.loads(path.read_text(encoding="utf-8")), load_file(path.with_suffix(".safetensors"))


def logits(llm: LLM, prompt: Prompt) -> Tensor:
    runner = llm.runner
    rows = runner.prompt_rows(prompt)
    return runner.logits(runner.prefill(rows, runner.new_cache(len(rows))))


def stored(tensors: dict[str, Tensor], found: Tensor) -> tuple[Tensor, Tensor]:
    if "logits" in tensors:
        return found, tensors["logits"].flatten(0, -2)
    return found[tensors["logits_positions"].flatten()], tensors["logits_at_positions"].flatten(
        0, -2
    )


@pytest.mark.parametrize("variant", VARIANTS)
@pytest.mark.parametrize("door", ["pixel_values", "image_embeds"])
def test_ready_pictures_give_the_golden_logits(golden_vl2: Path, variant: str, door: str) -> None:
    llm = loaded(golden_vl2 / variant)
    facts, tensors = read(golden_vl2 / variant, "single_grad_30x20")
    if door == "pixel_values":
        crop = tensors["images_spatial_crop"].reshape(-1, 2)
        pictures = llm.processor.precomputed(
            pixel_values=tensors["pixel_values"], images_spatial_crop=crop
        )
    else:
        mask = tensors["images_seq_mask"].flatten().bool()
        rows = tensors["inputs_embeds"].flatten(0, 1)[mask]
        pictures = llm.processor.precomputed(image_embeds=[rows])
    prompt = llm.processor.process_conversation(facts["conversation"], pictures)
    assert list(prompt.token_ids) == tensors["input_ids"].flatten().tolist()
    found, expected = stored(tensors, logits(llm, prompt))
    assert (found - expected).abs().max() < LIMIT


def test_C025_a_picture_changes_the_logits_in_every_split(golden_vl2: Path) -> None:
    """A fluent answer that never saw the picture is the fault to catch: chunks agree, and differ from a blank."""
    llm = loaded(golden_vl2 / "a_tiny")
    runner = llm.runner
    answers = []
    for colour in ((255, 0, 0), (0, 0, 255)):
        picture = load_picture(np.full((60, 60, 3), colour, dtype=np.uint8))
        conversation = [
            {"role": "user", "content": "<image>\nWhich colour?"},
            {"role": "assistant", "content": ""},
        ]
        rows = runner.prompt_rows(llm.processor.process_conversation(conversation, [picture]))
        splits = [
            runner.logits(runner.prefill(rows, runner.new_cache(len(rows)), chunk_size=chunk))
            for chunk in (len(rows), 1, 7, 64)
        ]
        for split in splits[1:]:
            assert (split - splits[0]).abs().max() < LIMIT
        answers.append(splits[0][-1])
    assert (answers[0] - answers[1]).abs().max() > 0.1, "C015: two pictures, two answers"


def test_C020_rows_of_a_batch_equal_the_same_rows_alone(golden_vl2: Path) -> None:
    """The golden left-padded batch: each conversation alone, then all three in one pass, then the golden logits."""
    llm = loaded(golden_vl2 / "b_small")
    facts, _ = read(golden_vl2 / "b_small", "batch_left_padded")
    runner, prompts = llm.runner, []
    images = golden_vl2 / "images"
    for conversation in facts["conversation"]:
        names = [name for turn in conversation for name in turn.get("images", ())]
        pictures = [load_picture(images / f"{name}.png", mode="vendor") for name in names]
        prompts.append(llm.processor.process_conversation(conversation, pictures))
    rows = [runner.prompt_rows(prompt) for prompt in prompts]
    together = runner.logits(runner.extend([runner.new_cache(len(r)) for r in rows], rows))
    for part, prompt in zip(together.split([len(r) for r in rows]), prompts, strict=True):
        assert (part - logits(llm, prompt)).abs().max() < 1e-4


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
@pytest.mark.parametrize("variant", VARIANTS)
def test_half_precision_stays_close_and_finite(golden_vl2: Path, variant: str, dtype: str) -> None:
    folder = golden_vl2 / variant
    for name in ("single_grad_30x20", "single_rings_640x480", "text_only"):
        facts, _ = read(folder, name)
        turns = facts["conversation"]
        pictures = [
            load_picture(golden_vl2 / "images" / f"{image}.png", mode="vendor")
            for turn in turns
            for image in turn.get("images", ())
        ]
        both = [loaded(folder), loaded(folder, dtype)]
        exact, half = (
            logits(llm, llm.processor.process_conversation(turns, pictures)) for llm in both
        )
        assert torch.isfinite(half).all()
        cosine = torch.nn.functional.cosine_similarity(exact, half, dim=-1).mean()
        assert cosine >= 0.999, f"{name}: mean cosine {cosine:.5f}"
