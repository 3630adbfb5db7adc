"""Drives a DeepSeek-VL2 model: tiles through the tower, rows through the language model."""

from __future__ import annotations

import hashlib
import time
from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from foveal.models.vl2 import VL2Model
from foveal.runner.base import Runner, Timings
from foveal.runner.cache import SequenceCache, SequenceContext
from foveal.types import MediaItem, Prompt

# Rows of patches that one pass of the tower takes: enough to fill the product units, small enough to stay responsive.
PATCHES_PER_PASS_CPU = 1024
PATCHES_PER_PASS_GPU = 16384


class VL2Runner(Runner[SequenceCache]):
    """Runs a DeepSeek-VL2 model."""

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

    # --- the language model ---------------------------------------------------------------------

    def new_cache(self, capacity: int, prompt: Prompt | None = None) -> SequenceCache:
        act_dtype = self.model.language.norm.act_dtype
        config = self.model.config.language
        return SequenceCache(config, capacity, dtype=act_dtype, device=self.model.device)

    @torch.inference_mode()
    def extend(
        self, caches: Sequence[SequenceCache], rows: Sequence[Tensor], ids: Sequence[Tensor] = ()
    ) -> Tensor:
        """See `Runner.extend`; this family does not look at `ids`."""
        context = SequenceContext(caches, [piece.shape[0] for piece in rows])
        positions = context.positions(self.model.device)
        hidden: Tensor = self.model(torch.cat(list(rows)), positions, context)
        context.commit()
        return hidden
