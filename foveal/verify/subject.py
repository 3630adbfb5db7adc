"""The model under test: its outputs and its inside, as numpy arrays.

What runs is the engine's own path (processor, runner, model). Layers and routers are watched through forward hooks, so
what is compared is what the engine computes; only `oracle_logits` is another way to the same numbers.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor, nn

from foveal.families.vl2 import VL2Family
from foveal.models.reference_vl2 import reference_forward
from foveal.types import MediaItem, Prompt, SamplingParams
from foveal.vision.decode import load_picture

if TYPE_CHECKING:
    from foveal.llm import LLM

Floats = npt.NDArray[np.float32]
# Tiles that go through the tower together: bounds memory, changes no result.
TILES_PER_PASS = 4


@dataclass(frozen=True, slots=True, eq=False)
class TowerOutput:
    """`pixels` [tiles, 3, S, S], `features` [tiles, patches, W], `projected` [tiles, cells, D]."""

    pixels: Floats
    features: Floats
    projected: Floats


@dataclass(slots=True, eq=False)
class Inside:
    """What a forward pass shows on its way.

    `hidden[0]` is the input [T, D], `hidden[n]` what leaves layer n - 1, the last one what leaves the final norm.
    `experts[layer]` [T, K] are the chosen experts, sorted.
    """

    hidden: list[Floats] = field(default_factory=list)
    experts: dict[int, npt.NDArray[np.int64]] = field(default_factory=dict)


class Subject:
    """A loaded model as the checks see it."""

    def __init__(self, llm: LLM) -> None:
        assert isinstance(llm.family, VL2Family), "these checks look inside a DeepSeek-VL2 model"
        self.runner, self.processor = llm.family.runner, llm.family.processor
        self.model, self.config = self.runner.model, llm.family.config

    def prompt(self, conversation: Sequence[Mapping[str, Any]], paths: Sequence[Path]) -> Prompt:
        """A golden conversation as a prompt, its pictures decoded as the vendor's loader does."""
        pictures = [load_picture(path, mode="vendor") for path in paths]
        return self.processor.process_conversation(conversation, pictures)

    @torch.inference_mode()
    def tower(self, prompts: Sequence[Prompt]) -> TowerOutput | None:
        """Tower and projector on every tile of every picture, in prompt order; None where there are no pictures."""
        tiles = [
            self.runner.pixel_values(item) for prompt in prompts for item in media_items(prompt)
        ]
        if not tiles:
            return None
        pixels = torch.cat(tiles)
        features = [self.model.vision(part) for part in pixels.split(TILES_PER_PASS)]
        projected = [self.model.projector(part) for part in features]
        return TowerOutput(
            to_numpy(pixels), to_numpy(torch.cat(features)), to_numpy(torch.cat(projected))
        )

    def rows(self, prompt: Prompt) -> Tensor:
        """The language model's input [T, D], pictures merged in."""
        return self.runner.prompt_rows(prompt)

    def hidden(self, rows: Tensor, *, chunk_size: int | None = None) -> Tensor:
        """Hidden rows after the final norm [T, D], the prompt in one go or in chunks."""
        cache = self.runner.new_cache(len(rows))
        return self.runner.prefill(rows, cache, chunk_size=chunk_size or len(rows))

    def logits(self, rows: Tensor, *, chunk_size: int | None = None) -> Floats:
        """Logits [T, vocabulary] of all positions."""
        return to_numpy(self.runner.logits(self.hidden(rows, chunk_size=chunk_size)))

    def oracle_logits(self, rows: Tensor) -> Floats:
        """The same by the slow whole-sequence forward, which shares no code path with the runner."""
        return to_numpy(reference_forward(self.model, rows))

    def inside(self, rows: Tensor) -> Inside:
        """Hidden states and routing of one pass over the whole prompt."""
        with _watching(self.model.language) as inside:
            inside.hidden.append(to_numpy(rows))
            final = self.hidden(rows)
        # The last layer's raw output is not part of the format: the normed one takes its place.
        inside.hidden[-1] = to_numpy(final)
        return inside

    def greedy(self, prompt: Prompt, count: int) -> tuple[list[int], Floats]:
        """`count` greedy tokens, end-of-sequence ignored, and the logits that the last one was chosen from."""
        seen: list[Tensor] = []
        params = SamplingParams(max_tokens=count, temperature=0.0, ignore_eos=True)
        tokens = list(self.runner.generate(prompt, params, on_logits=seen.append))
        return tokens, to_numpy(seen[-1])


def media_items(prompt: Prompt) -> list[MediaItem]:
    """The pictures of a DeepSeek-VL2 prompt, in order."""
    items = [item for item in prompt.items if isinstance(item, MediaItem)]
    assert len(items) == len(prompt.items), "every picture of a DeepSeek-VL2 prompt has tiles"
    return items


def to_numpy(tensor: Tensor) -> Floats:
    """A float tensor of any device and precision as float32 numpy."""
    array: Floats = tensor.detach().to("cpu", torch.float32).numpy()
    return array


@contextmanager
def _watching(language: nn.Module) -> Iterator[Inside]:
    inside = Inside()
    handles = []
    for name, module in language.named_modules():
        layer = re.fullmatch(r"layers\.(\d+)(\.mlp\.router)?", name)
        if layer is None:
            continue
        hook = _router_hook(inside, int(layer[1])) if layer[2] else _layer_hook(inside)
        handles.append(module.register_forward_hook(hook))
    try:
        yield inside
    finally:
        for handle in handles:
            handle.remove()


def _layer_hook(inside: Inside) -> Any:
    def hook(_module: nn.Module, _inputs: Any, output: Tensor) -> None:
        inside.hidden.append(to_numpy(output))

    return hook


def _router_hook(inside: Inside, layer: int) -> Any:
    def hook(_module: nn.Module, _inputs: Any, output: tuple[Tensor, Tensor]) -> None:
        ids = output[1].detach().cpu().numpy().astype(np.int64)
        inside.experts[layer] = np.sort(ids, axis=-1)

    return hook
