"""Golden DeepSeek-V4 cases, read for tests that look inside the model (`foveal verify` is the product's own way)."""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file
from torch import Tensor

from foveal.models.build import load_v4
from foveal.models.v4 import V4Model
from foveal.models.v4_config import V4Config
from foveal.runner.v4_cache import Span, V4SequenceCache
from foveal.runner.v4_runner import V4Runner


@dataclass(slots=True)
class Block:
    """One picture of a case as stored: patches are float32 copies of the bfloat16 ones."""

    start: int
    grid: tuple[int, int]
    types: Tensor
    perm: Tensor
    patches: Tensor

    @property
    def span(self) -> Span:
        pads = int((self.types == 0).nonzero()[0])
        return Span(self.start + pads, self.start + len(self.types) - 1)


@dataclass(slots=True)
class Case:
    name: str
    ids: Tensor
    tensors: dict[str, Tensor]
    facts: dict[str, Any]
    blocks: list[Block] = field(default_factory=list)

    @property
    def spans(self) -> list[Span]:
        return [block.span for block in self.blocks]

    def picked(self, logits: Tensor) -> Tensor:
        """The rows of `logits` [T, V] that the case stores."""
        return (
            logits if "logits" in self.tensors else logits[self.tensors["logits_positions"].long()]
        )

    @property
    def logits(self) -> Tensor:
        stored = self.tensors.get("logits", self.tensors.get("logits_at_positions"))
        assert stored is not None
        return stored[0]


def read_case(path: Path) -> Case:
    facts: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
    tensors = load_file(path.with_suffix(".safetensors"))
    blocks = []
    for k, block in enumerate(facts.get("image_blocks", ())):
        patches = tensors.get(f"image{k}.patches")
        if patches is None:
            break  # only a sample is stored; such cases are checked from the pictures
        rows, cols = block["vit_grid_hw"]
        types, perm = (tensors[f"image{k}.{name}"].long() for name in ("types", "perm"))
        blocks.append(Block(block["start"], (rows, cols), types, perm, patches.float()))
    return Case(path.stem, tensors["input_ids"][0], tensors, facts, blocks)


def read_cases(variant: Path) -> Iterator[Case]:
    for path in sorted((variant / "cases").glob("*.json")):
        yield read_case(path)


def load(variant: Path, **options: Any) -> V4Model:
    folder = variant / "checkpoint"
    return load_v4(folder, V4Config.load(folder), dtype="float32", device="cpu", **options).model


def input_rows(model: V4Model, case: Case) -> Tensor:
    pieces = []
    for block in case.blocks:
        aligned = model.encode_picture(block.patches, block.grid)
        pieces.append((block.start, model.block_rows(block.types, aligned, block.perm)))
    return model.embed(case.ids, pieces)


@torch.inference_mode()
def engine_logits(
    model: V4Model, case: Case, *, chunk: int = 10**6, with_spans: bool = True
) -> Tensor:
    """All logits [T, V] of a case by the engine's own path."""
    runner, rows = V4Runner(model), input_rows(model, case)
    spans = case.spans if with_spans else []
    cache = V4SequenceCache(model.config.language, len(rows) + 30, spans=spans)
    return runner.logits(runner.prefill(rows, cache, ids=case.ids, chunk_size=chunk))


@contextmanager
def swapped(holder: Any, name: str, value: Any) -> Iterator[None]:
    """Put another attribute in place for the length of a `with` block."""
    before = getattr(holder, name)
    setattr(holder, name, value)
    try:
        yield
    finally:
        setattr(holder, name, before)
