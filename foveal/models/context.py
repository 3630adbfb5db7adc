"""What a model asks of its surroundings during a forward pass. Passed as an argument, never a global."""

from __future__ import annotations

from typing import Protocol

from torch import Tensor


class AttentionContext(Protocol):
    """Owner of the KV cache and of the split of the T rows into sequences.

    Each call stores the layer's new rows and returns the attention output of the T query rows. Rows are in the order of
    the ids given to `forward`; what belongs together is the context's knowledge.
    """

    def attend(self, layer: int, q: Tensor, k: Tensor, v: Tensor, scale: float) -> Tensor:
        """Multi-head attention: `q` [T, H, d], `k` and `v` [T, Hkv, d], rotated -> [T, H, d]."""
        ...

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
        """Latent attention: `latent` [T, R] normed, `k_pe` [T, dr] rotated; see `ops.mla_attention` -> [T, H, dv]."""
        ...
