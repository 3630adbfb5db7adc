"""Drives a DeepSeek-VL2 model for requests: pictures, prefill, decode.

Contract: prompts arrive as token ids with their pictures (`types.Prompt`); token ids leave. It knows no tokenizer, no
stop string and no file.
"""

from __future__ import annotations

import hashlib
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field

import numpy as np
import torch
from torch import Tensor

from foveal.models.vl2 import VL2Model
from foveal.runner.cache import SequenceCache, SequenceContext
from foveal.runner.sampler import fresh_seed, sample
from foveal.types import MediaItem, Prompt, SamplingParams

# Rows of patches that one pass of the tower takes: enough to fill the product units, small enough to stay responsive.
PATCHES_PER_PASS_CPU = 1024
PATCHES_PER_PASS_GPU = 16384
# Longest piece of a prompt in one forward pass; bounds the memory of activations, changes no result.
PREFILL_CHUNK = 2048


@dataclass(slots=True)
class Timings:
    """Seconds and counts of the newest request, for benchmarks and `--json` outputs."""

    vision_s: float = 0.0
    num_tiles_encoded: int = 0
    prefill_s: float = 0.0
    decode_s: list[float] = field(default_factory=list)


class VL2Runner:
    """Runs `model`. Not thread-safe: one request at a time; use one runner per thread of work."""

    def __init__(
        self,
        model: VL2Model,
        *,
        mean: Sequence[float] = (0.5,) * 3,
        std: Sequence[float] = (0.5,) * 3,
    ) -> None:
        self.model = model
        self.timings = Timings()
        self._mean = torch.tensor(mean, dtype=torch.float32, device=model.device).view(3, 1, 1)
        self._std = torch.tensor(std, dtype=torch.float32, device=model.device).view(3, 1, 1)

    # --- pictures -------------------------------------------------------------------------------

    def pixel_values(self, item: MediaItem) -> Tensor:
        """Normalised tiles [tiles, 3, S, S] float32 of a picture that is not precomputed rows (spec 3.5)."""
        if item.pixel_values is not None:
            return torch.from_numpy(item.pixel_values).to(self.model.device)
        assert item.tiles is not None, "a picture has tiles, pixel values or rows"
        return self._normalise(item.tiles)

    def _normalise(self, tiles: np.ndarray) -> Tensor:
        raw = torch.from_numpy(np.ascontiguousarray(tiles)).to(self.model.device)
        return (raw.to(torch.float32) / 255.0 - self._mean) / self._std

    @torch.inference_mode()
    def encode_pictures(self, items: Sequence[MediaItem]) -> list[Tensor]:
        """The placeholder rows of each picture, [length, D] float32 each.

        Identical tiles, of one picture or of several, run through the tower once.
        """
        start = time.perf_counter()
        keys, unique = self._unique_tiles(items)
        rows = self._encode_unique(unique)
        outputs = []
        for item, tile_keys in zip(items, keys, strict=True):
            if item.embeds is not None:
                outputs.append(torch.from_numpy(item.embeds).to(self.model.device))
            else:
                tiles = torch.stack([rows[key] for key in tile_keys])
                outputs.append(self.model.assemble(tiles, item.grid))
        self.timings.vision_s = time.perf_counter() - start
        self.timings.num_tiles_encoded = len(unique)
        return outputs

    def _unique_tiles(
        self, items: Sequence[MediaItem]
    ) -> tuple[list[list[bytes]], dict[bytes, Tensor]]:
        """Content keys of each picture's tiles, and the normalised pixels behind each different key."""
        keys: list[list[bytes]] = []
        unique: dict[bytes, Tensor] = {}
        for item in items:
            tiles = item.tiles if item.tiles is not None else item.pixel_values
            keys.append([])
            for tile in () if tiles is None or item.embeds is not None else tiles:
                digest = hashlib.sha256(np.ascontiguousarray(tile).tobytes())
                key = digest.digest() + tile.dtype.char.encode()
                keys[-1].append(key)
                if key not in unique:
                    is_raw = tile.dtype == np.uint8
                    pixels = self._normalise(tile) if is_raw else torch.from_numpy(tile)
                    unique[key] = pixels.to(self.model.device)
        return keys, unique

    def _encode_unique(self, unique: dict[bytes, Tensor]) -> dict[bytes, Tensor]:
        on_cpu = self.model.device.type == "cpu"
        patches = PATCHES_PER_PASS_CPU if on_cpu else PATCHES_PER_PASS_GPU
        per_pass = max(1, patches // self.model.config.vision.grid**2)
        keys = list(unique)
        rows: dict[bytes, Tensor] = {}
        for at in range(0, len(keys), per_pass):
            group = keys[at : at + per_pass]
            encoded = self.model.encode_tiles(torch.stack([unique[key] for key in group]))
            rows.update(zip(group, encoded, strict=True))
        return rows

    @torch.inference_mode()
    def prompt_rows(self, prompt: Prompt) -> Tensor:
        """The language model's input rows for a prompt, pictures merged in: [T, D] float32."""
        ids = torch.tensor(prompt.token_ids, device=self.model.device)
        pieces = self.encode_pictures(prompt.items)
        for item, piece in zip(prompt.items, pieces, strict=True):
            assert piece.shape[0] == item.length, (
                f"a picture has {piece.shape[0]} rows for {item.length} placeholders"
            )
        starts = [item.start for item in prompt.items]
        return self.model.embed(ids, list(zip(starts, pieces, strict=True)))

    # --- the language model ---------------------------------------------------------------------

    def new_cache(self, capacity: int) -> SequenceCache:
        norm = self.model.language.norm
        return SequenceCache(
            self.model.config.language, capacity, dtype=norm.act_dtype, device=self.model.device
        )

    @torch.inference_mode()
    def extend(self, caches: Sequence[SequenceCache], rows: Sequence[Tensor]) -> Tensor:
        """Compute further tokens of one or more requests in one pass.

        `rows[i]` [n_i, D] are the next input rows of the request behind `caches[i]`. Returns hidden rows [sum n_i, D]
        after the final norm, in the same order.
        """
        context = SequenceContext(caches, [piece.shape[0] for piece in rows])
        hidden: Tensor = self.model(
            torch.cat(list(rows)), context.positions(self.model.device), context
        )
        context.commit()
        return hidden

    @torch.inference_mode()
    def prefill(
        self, rows: Tensor, cache: SequenceCache, *, chunk_size: int = PREFILL_CHUNK
    ) -> Tensor:
        """Compute all of `rows` [T, D] in chunks; returns all hidden rows [T, D]."""
        return torch.cat([self.extend([cache], [piece]) for piece in rows.split(chunk_size)])

    @torch.inference_mode()
    def logits(self, hidden: Tensor) -> Tensor:
        """Head rows [n, vocabulary] float32 for hidden rows [n, D]."""
        return self.model.logits(hidden)

    @torch.inference_mode()
    def step(self, cache: SequenceCache, token: int) -> Tensor:
        """Feed one token; returns the logits [vocabulary] that follow it."""
        ids = torch.tensor([token], device=self.model.device)
        return self.logits(self.extend([cache], [self.model.embed(ids)]))[0]

    def generate(
        self,
        prompt: Prompt,
        params: SamplingParams,
        *,
        stop_ids: frozenset[int] = frozenset(),
        on_logits: Callable[[Tensor], None] | None = None,
    ) -> Iterator[int]:
        """Token ids of an answer, at most `params.max_tokens`; an id of `stop_ids` is yielded and ends it.

        `on_logits` sees each row of raw logits before it is sampled.
        """
        self.timings = Timings()
        rows = self.prompt_rows(prompt)
        start = time.perf_counter()
        cache = self.new_cache(prompt.num_tokens + params.max_tokens)
        for piece in rows.split(PREFILL_CHUNK):
            hidden = self.extend([cache], [piece])  # only the last row needs the head
        logits = self.logits(hidden[-1:])[0]
        self.timings.prefill_s = time.perf_counter() - start
        seed = fresh_seed() if params.seed is None else params.seed
        tokens = list(prompt.token_ids)
        for count in range(1, params.max_tokens + 1):
            if on_logits is not None:
                on_logits(logits)
            token = sample(logits, params, seed=seed, position=len(tokens), seen=tokens)
            tokens.append(token)
            yield token
            if token in stop_ids or count == params.max_tokens:
                return
            start = time.perf_counter()
            logits = self.step(cache, token)
            self.timings.decode_s.append(time.perf_counter() - start)
