"""The DeepSeek mixture-of-experts language model of DeepSeek-VL2. Source: spec section 6.

Legend: T tokens of all sequences in the batch, D hidden width, H heads, R latent rank, dn/dr/dv the widths of a head's
unrotated, rotated and value part. The residual stream is float32.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

from foveal import ops
from foveal.models.config import LanguageConfig
from foveal.models.context import AttentionContext
from foveal.models.layers import Factory, Linear, MoE, RMSNorm, RotaryTable, SwiGLU, rotary_table

# The vendor's code fixes this for the two latent norms, whatever rms_norm_eps says.
LATENT_NORM_EPS = 1e-6


class HeadAttention(nn.Module):
    """Plain multi-head attention with half-split rotation (the "tiny" model). Source: spec 6.3."""

    def __init__(self, c: LanguageConfig, layer: int, make: Factory) -> None:
        super().__init__()
        self.layer = layer
        self.heads, self.kv_heads, self.head_dim = c.num_attention_heads, c.num_kv_heads, c.head_dim
        rows = (self.heads + 2 * self.kv_heads) * self.head_dim
        self.qkv = Linear(c.hidden_size, rows, make, bias=c.attention_bias)
        self.o = Linear(self.heads * self.head_dim, c.hidden_size, make, bias=c.attention_bias)

    def forward(
        self, x: Tensor, rope: tuple[Tensor, Tensor], factor: float, ctx: AttentionContext
    ) -> Tensor:
        split = (self.heads, self.kv_heads, self.kv_heads)
        q, k, v = self.qkv(x).unflatten(-1, (-1, self.head_dim)).split(split, 1)
        q, k = ops.rope_half(q, *rope), ops.rope_half(k, *rope)
        mixed = ctx.attend(self.layer, q, k, v, self.head_dim**-0.5 * factor)
        out: Tensor = self.o(mixed.flatten(1))
        return out


class LatentAttention(nn.Module):
    """Multi-head latent attention (small and base). Source: spec 6.4.

    The cache holds the normed latent [R] and the rotated shared key part [dr] of each token.
    """

    def __init__(self, c: LanguageConfig, layer: int, make: Factory) -> None:
        super().__init__()
        self.layer, self.heads = layer, c.num_attention_heads
        self.nope, self.rope_dim, self.v_dim = c.qk_nope_head_dim, c.qk_rope_head_dim, c.v_head_dim
        self.rank = int(c.kv_lora_rank or 0)
        width, bias, q_rows = c.hidden_size, c.attention_bias, self.heads * c.qk_head_dim
        if c.q_lora_rank is None:
            self.q = Linear(width, q_rows, make)
        else:
            self.q_a = Linear(width, c.q_lora_rank, make, bias=bias)
            self.q_a_norm = RMSNorm(c.q_lora_rank, make, LATENT_NORM_EPS)
            self.q_b = Linear(c.q_lora_rank, q_rows, make)
        self.has_low_rank_q = c.q_lora_rank is not None
        self.kv_a = Linear(width, self.rank + self.rope_dim, make, bias=bias)
        self.kv_a_norm = RMSNorm(self.rank, make, LATENT_NORM_EPS)
        self.kv_b = Linear(self.rank, self.heads * (self.nope + self.v_dim), make)
        self.o = Linear(self.heads * self.v_dim, width, make, bias=bias)

    def forward(
        self, x: Tensor, rope: tuple[Tensor, Tensor], factor: float, ctx: AttentionContext
    ) -> Tensor:
        q = self.q_b(self.q_a_norm(self.q_a(x))) if self.has_low_rank_q else self.q(x)
        q_nope, q_pe = q.unflatten(-1, (self.heads, -1)).split((self.nope, self.rope_dim), -1)
        latent, k_pe = self.kv_a(x).split((self.rank, self.rope_dim), -1)
        q_pe = ops.rope_interleaved(q_pe, *rope)
        k_pe = ops.rope_interleaved(k_pe.unsqueeze(1), *rope).squeeze(1)
        kv_b = self.kv_b.weight.unflatten(0, (self.heads, -1))
        scale = (self.nope + self.rope_dim) ** -0.5 * factor
        mixed = ctx.attend_latent(
            self.layer, q_nope, q_pe, self.kv_a_norm(latent), k_pe, kv_b, scale
        )
        out: Tensor = self.o(mixed.flatten(1))
        return out


class DecoderLayer(nn.Module):
    def __init__(self, c: LanguageConfig, layer: int, make: Factory) -> None:
        super().__init__()
        self.input_layernorm = RMSNorm(c.hidden_size, make, c.rms_norm_eps)
        attention = LatentAttention if c.uses_mla else HeadAttention
        self.attn = attention(c, layer, make)
        self.post_attention_layernorm = RMSNorm(c.hidden_size, make, c.rms_norm_eps)
        self.mlp: nn.Module = (
            MoE(c, make)
            if c.is_moe_layer(layer)
            else SwiGLU(c.hidden_size, c.intermediate_size, make)
        )

    def forward(
        self, h: Tensor, rope: tuple[Tensor, Tensor], factor: float, ctx: AttentionContext
    ) -> Tensor:
        """`h` [T, D] float32."""
        h = h + self.attn(self.input_layernorm(h), rope, factor, ctx).float()
        out: Tensor = h + self.mlp(self.post_attention_layernorm(h)).float()
        return out


class DeepseekLM(nn.Module):
    """Embedding, decoder layers, final norm and head."""

    def __init__(self, c: LanguageConfig, make: Factory) -> None:
        super().__init__()
        self.config = c
        self.embed_tokens = Linear(c.hidden_size, c.vocab_size, make)  # used as a table
        self.layers = nn.ModuleList(DecoderLayer(c, i, make) for i in range(c.num_hidden_layers))
        self.norm = RMSNorm(c.hidden_size, make, c.rms_norm_eps)
        if not c.tie_word_embeddings:
            self.lm_head = Linear(c.hidden_size, c.vocab_size, make)
        self.rope: RotaryTable = rotary_table(c)

    def embed(self, ids: Tensor) -> Tensor:
        """`ids` [T] -> rows [T, D] float32; embeddings are not scaled."""
        return self.embed_tokens.weight[ids].float()

    def forward(self, h: Tensor, positions: Tensor, ctx: AttentionContext) -> Tensor:
        """`h` [T, D] float32, `positions` [T] -> [T, D] after the final norm."""
        rope = self.rope(positions)
        for layer in self.layers:
            h = layer(h, rope, self.rope.softmax_factor, ctx)
        out: Tensor = self.norm(h)
        return out

    def logits(self, hidden: Tensor) -> Tensor:
        """Rows after the final norm [n, D] -> [n, vocabulary] float32."""
        head = self.embed_tokens if self.config.tie_word_embeddings else self.lm_head
        out: Tensor = head(hidden)
        return out.to(torch.float32)
