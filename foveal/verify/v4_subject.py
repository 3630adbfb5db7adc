"""A DeepSeek-V4 model under test: its outputs and its inside, as numpy arrays. What runs is the engine's own path."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor, nn

from foveal.models.build import load_v4
from foveal.models.config import read_json
from foveal.models.context import SparseRows
from foveal.models.deepseek_v4 import DeepseekV4LM
from foveal.models.reference_v4 import reference_v4_forward
from foveal.models.v4_config import V4Config
from foveal.runner import v4_cache
from foveal.runner.v4_runner import V4Runner
from foveal.text.tokenizer import Tokenizer
from foveal.types import Picture, Prompt, SamplingParams, V4MediaItem
from foveal.verify.subject import Floats, to_numpy
from foveal.vision.v4 import V4ImageConfig
from foveal.vision.v4_processor import V4Processor


@dataclass(slots=True, eq=False)
class V4Inside:
    """What a forward pass shows on its way: `streams[n]` [T, N, D] before layer n; `hidden` [T, D] after the final
    norm; `entries[layer]` [T, m], the compressed entries that each query chose."""

    streams: list[Floats] = field(default_factory=list)
    hidden: Floats | None = None
    entries: dict[int, npt.NDArray[np.bool_]] = field(default_factory=dict)


class V4Subject:
    """A model loaded from `folder`. Text checkpoints need no tokenizer here: their cases are ids."""

    def __init__(
        self,
        folder: Path,
        *,
        device: str = "auto",
        dtype: str = "float32",
        progress: Callable[[int, int], None] | None = None,
    ) -> None:
        values = read_json(folder / "config.json")
        self.config = V4Config.from_dict(values)
        self.processor: V4Processor | None = None
        if (folder / "tokenizer.json").is_file():
            images = V4ImageConfig.from_dict(values) if self.config.vision is not None else None
            tokenizer = Tokenizer.load(folder, extra_tokens=())
            vocabulary = self.config.language.vocab_size
            self.processor = V4Processor(images, tokenizer, vocabulary, None)
        loaded = load_v4(folder, self.config, dtype=dtype, device=device, progress=progress)
        self.model, self.runner = loaded.model, V4Runner(loaded.model)

    def prompt(self, rendered: str, pictures: Sequence[Picture]) -> Prompt:
        """A rendered golden prompt, begin of sequence included, with its pictures."""
        assert self.processor is not None, "cases with text need a tokenizer"
        return self.processor.process_rendered(rendered, pictures)

    @torch.inference_mode()
    def tower(self, item: V4MediaItem) -> tuple[Floats, Floats, Floats]:
        """Patches, tower features and aligner rows of one picture."""
        patches = self.runner.patch_values(item)
        features = self.model.vision(patches, [item.vit_grid])
        aligned = self.model.aligner(features, item.vit_grid)
        return to_numpy(patches), to_numpy(features), to_numpy(aligned)

    def hidden(self, prompt: Prompt, rows: Tensor, *, chunk_size: int | None = None) -> Tensor:
        cache = self.runner.new_cache(len(rows), prompt)
        ids = self.runner.prompt_ids(prompt)
        return self.runner.prefill(rows, cache, ids=ids, chunk_size=chunk_size or len(rows))

    def logits(self, prompt: Prompt, rows: Tensor, *, chunk_size: int | None = None) -> Floats:
        """Logits [T, vocabulary] of all positions, the prompt in one go or in chunks."""
        return to_numpy(self.runner.logits(self.hidden(prompt, rows, chunk_size=chunk_size)))

    def oracle_logits(self, prompt: Prompt, rows: Tensor) -> Floats:
        """The same by the slow whole-sequence forward."""
        ids = self.runner.prompt_ids(prompt)
        spans = [item.span for item in prompt.items if isinstance(item, V4MediaItem)]
        return to_numpy(reference_v4_forward(self.model.language, rows, ids, spans))

    def inside(self, prompt: Prompt, rows: Tensor) -> V4Inside:
        with _watching(self.model.language) as inside:
            inside.hidden = to_numpy(self.hidden(prompt, rows))
        return inside

    def greedy(self, prompt: Prompt, count: int) -> tuple[list[int], Floats]:
        """`count` greedy tokens, end-of-sequence ignored, and the logits [count, vocabulary] behind them."""
        seen: list[Tensor] = []
        params = SamplingParams(max_tokens=count, ignore_eos=True)
        tokens = list(self.runner.generate(prompt, params, on_logits=seen.append))
        return tokens, np.stack([to_numpy(row) for row in seen])


@contextmanager
def _watching(language: DeepseekV4LM) -> Iterator[V4Inside]:
    """Streams through hooks; the indexer's choices by listening to the function that makes them."""
    inside, current = V4Inside(), [0]
    choices: dict[int, list[Tensor]] = {}
    choose = v4_cache.select_entries

    def listening(rows: SparseRows, queries: slice, index_keys: Tensor, reached: Tensor) -> Tensor:
        chosen = choose(rows, queries, index_keys, reached)
        choices.setdefault(current[0], []).append(chosen)
        return chosen

    def enter(layer: int) -> Callable[[nn.Module, tuple[Tensor, ...]], None]:
        def hook(_module: nn.Module, inputs: tuple[Tensor, ...]) -> None:
            current[0] = layer
            inside.streams.append(to_numpy(inputs[0]))

        return hook

    handles = [layer.register_forward_pre_hook(enter(i)) for i, layer in enumerate(language.layers)]
    v4_cache.select_entries = listening
    try:
        yield inside
    finally:
        v4_cache.select_entries = choose
        for handle in handles:
            handle.remove()
    inside.entries = {layer: torch.cat(masks).cpu().numpy() for layer, masks in choices.items()}
