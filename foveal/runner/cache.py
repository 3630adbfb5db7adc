"""Per-request storage of attention state, and the context through which the model reaches it.

One contiguous buffer a layer and request. `num_computed_tokens` is the only record of progress: rows beyond it are
garbage that the next write replaces, so going back is lowering the number.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from foveal import ops
from foveal.models.config import LanguageConfig


class SequenceCache:
    """KV cache of one request: `capacity` rows in each layer.

    Multi-head layers keep k and v [capacity, Hkv, d]; latent layers keep the normed latent
    [capacity, R] and the rotated shared key part [capacity, dr].
    """

    def __init__(
        self,
        config: LanguageConfig,
        capacity: int,
        *,
        dtype: torch.dtype = torch.float32,
        device: torch.device | str = "cpu",
    ) -> None:
        if config.uses_mla:
            shapes: tuple[tuple[int, ...], ...] = (
                (int(config.kv_lora_rank or 0),),
                (config.qk_rope_head_dim,),
            )
        else:
            shapes = ((config.num_kv_heads, config.head_dim),) * 2
        self.capacity = capacity
        self.num_computed_tokens = 0
        self._layers = [
            tuple(torch.empty((capacity, *shape), dtype=dtype, device=device) for shape in shapes)
            for _ in range(config.num_hidden_layers)
        ]

    def legal_end(self, end: int) -> int:
        """Any chunk may end anywhere: pictures are causal."""
        return end

    def store(self, layer: int, rows: tuple[Tensor, Tensor]) -> tuple[Tensor, Tensor]:
        """Write new rows behind the computed ones; returns views of everything up to and with them."""
        start = self.num_computed_tokens
        end = start + rows[0].shape[0]
        assert end <= self.capacity, f"cache of {self.capacity} rows cannot hold {end}"
        first, second = self._layers[layer]
        first[start:end], second[start:end] = rows
        return first[:end], second[:end]


class SequenceContext:
    """Attention over several requests at once: request i owns the next `counts[i]` rows of the batch."""

    def __init__(self, caches: Sequence[SequenceCache], counts: Sequence[int]) -> None:
        self.caches, self.counts = list(caches), list(counts)

    def positions(self, device: torch.device) -> Tensor:
        """Absolute positions of the batch's rows, [T]."""
        starts = [cache.num_computed_tokens for cache in self.caches]
        pieces = [
            torch.arange(start, start + count)
            for start, count in zip(starts, self.counts, strict=True)
        ]
        return torch.cat(pieces).to(device)

    def attend(self, layer: int, q: Tensor, k: Tensor, v: Tensor, scale: float) -> Tensor:
        outputs = []
        pieces = zip(self.caches, *(t.split(self.counts) for t in (q, k, v)), strict=True)
        for cache, q_new, k_new, v_new in pieces:
            keys, values = cache.store(layer, (k_new, v_new))
            outputs.append(ops.attention(q_new, keys, values, scale))
        return torch.cat(outputs)

    def attend_latent(
        self,
        layer: int,
        q_nope: Tensor,
        q_pe: Tensor,
        latent: Tensor,
        k_pe: Tensor,
        kv_b: Tensor,
        scale: float,
    ) -> Tensor:
        outputs = []
        rows = (t.split(self.counts) for t in (q_nope, q_pe, latent, k_pe))
        for cache, nope_new, pe_new, latent_new, k_pe_new in zip(self.caches, *rows, strict=True):
            latents, keys = cache.store(layer, (latent_new, k_pe_new))
            outputs.append(ops.mla_attention(nope_new, pe_new, latents, keys, kv_b, scale))
        return torch.cat(outputs)

    def commit(self) -> None:
        """The rows of this pass are computed."""
        for cache, count in zip(self.caches, self.counts, strict=True):
            cache.num_computed_tokens += count
