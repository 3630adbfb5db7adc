"""Drives a DeepSeek-V4 model: pictures through tower and aligner, rows with their raw ids through the backbone."""

from __future__ import annotations

import hashlib
import time
from collections.abc import Sequence

import torch
from torch import Tensor

from foveal.models.v4 import V4Model
from foveal.runner.base import Runner, Timings
from foveal.runner.v4_cache import Span, V4Context, V4SequenceCache
from foveal.types import Prompt, V4MediaItem


class V4Runner(Runner[V4SequenceCache]):
    """Runs a DeepSeek-V4 model, text or vision."""

    def __init__(self, model: V4Model) -> None:
        self.model = model
        self.timings = Timings()

    def patch_values(self, item: V4MediaItem) -> Tensor:
        """Normalised patches [n, 3, p, p] of a picture, rounded to bfloat16 as in the released code, as float32."""
        if item.patch_values is not None:
            values = torch.from_numpy(item.patch_values)
        else:
            assert item.patches is not None, "a picture has raw patches or patch values"
            values = (torch.from_numpy(item.patches).to(torch.float32) / 255.0 - 0.5) / 0.5
        return values.to(torch.bfloat16).float().to(self.model.device)

    @torch.inference_mode()
    def encode_pictures(self, items: Sequence[V4MediaItem]) -> list[Tensor]:
        """Input rows of each picture's block, pads and learned vectors included; equal pictures run once."""
        start = time.perf_counter()
        aligned: dict[bytes, Tensor] = {}
        outputs = []
        for item in items:
            patches = self.patch_values(item)
            key = hashlib.sha256(
                patches.numpy(force=True).tobytes() + repr(item.vit_grid).encode()
            ).digest()
            if key not in aligned:
                aligned[key] = self.model.encode_picture(patches, item.vit_grid)
            types, perm = (
                torch.from_numpy(t).to(self.model.device) for t in (item.types, item.perm)
            )
            outputs.append(self.model.block_rows(types, aligned[key], perm))
        self.timings.vision_s = time.perf_counter() - start
        self.timings.num_tiles_encoded = len(aligned)
        return outputs

    def new_cache(self, capacity: int, prompt: Prompt | None = None) -> V4SequenceCache:
        spans = [Span(*item.span) for item in prompt.items] if prompt is not None else []  # type: ignore[union-attr]
        act_dtype = self.model.language.norm.act_dtype
        config = self.model.config.language
        return V4SequenceCache(
            config, capacity, spans=spans, dtype=act_dtype, device=self.model.device
        )

    @torch.inference_mode()
    def extend(
        self, caches: Sequence[V4SequenceCache], rows: Sequence[Tensor], ids: Sequence[Tensor] = ()
    ) -> Tensor:
        """See `Runner.extend`; `ids` are needed: experts are chosen by them."""
        assert len(ids) == len(rows), "a DeepSeek-V4 model routes by token id"
        context = V4Context(caches, [piece.shape[0] for piece in rows])
        positions = context.positions(self.model.device)
        hidden: Tensor = self.model(torch.cat(list(rows)), positions, torch.cat(list(ids)), context)
        context.commit()
        return hidden
