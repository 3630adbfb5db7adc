"""The DeepSeek-V4 backbone: hyper-connections, shared-KV window attention with compressed entries, hashed experts.

Legend: T tokens of the batch, N streams, D hidden width, H heads, d head width (keys are values), G output groups, r
compression ratio of a layer (0, 4 or 128). Streams and everything between the big products are float32. Source: V4 spec
section 4.

Token ids of pictures are `vocab_size + type`; they reach every router, because hash layers look ids up and
picture tokens are routed by their own bias.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor, nn

from foveal import ops
from foveal.models.context import CompressorRows, IndexerRows, SparseContext, SparseRows
from foveal.models.layers import (
    Factory,
    Linear,
    RMSNorm,
    SwiGLU,
    routed_experts,
    yarn_frequencies,
)
from foveal.models.v4_config import V4LanguageConfig


def rotary_frequencies(c: V4LanguageConfig, ratio: int) -> Tensor:
    """Frequencies [dr / 2] float32. Compressed layers have their own base and YaRN, without magnitude (3.6)."""
    dim = c.qk_rope_head_dim
    base = c.compress_rope_theta if ratio else c.rope_theta
    plain = 1.0 / (base ** (torch.arange(0, dim, 2, dtype=torch.float32) / dim))
    if not ratio or c.rope_scaling is None:
        return plain
    return yarn_frequencies(plain, base, c.rope_scaling, trained=65536)


@dataclass(frozen=True, slots=True)
class Rotation:
    """Rotates by absolute position with one set of frequencies."""

    frequencies: Tensor

    def angles(self, positions: Tensor) -> tuple[Tensor, Tensor]:
        angles = positions.to(torch.float32)[:, None] * self.frequencies.to(positions.device)
        return angles.cos(), angles.sin()

    def __call__(self, x: Tensor, positions: Tensor) -> Tensor:
        return ops.rope_neighbours(x, *self.angles(positions))

    def back(self, x: Tensor, positions: Tensor) -> Tensor:
        cos, sin = self.angles(positions)
        return ops.rope_neighbours(x, cos, -sin)


class HyperConnection(nn.Module):
    """Reads one row from N streams for a sublayer and writes its result back. All float32. Source: 4.2."""

    def __init__(self, c: V4LanguageConfig, make: Factory) -> None:
        super().__init__()
        n = c.hc_mult
        self.fn = make.empty32(2 * n + n * n, n * c.hidden_size)
        self.base = make.empty32(2 * n + n * n)
        self.scale = make.empty32(3)
        self.rule = ops.HyperRule(c.hc_sinkhorn_iters, c.hc_eps, c.rms_norm_eps)

    def read(self, streams: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        return ops.hyper_pre(streams, self.fn, self.scale, self.base, self.rule)


class HyperHead(nn.Module):
    """The final collapse of the streams."""

    def __init__(self, c: V4LanguageConfig, make: Factory) -> None:
        super().__init__()
        self.fn = make.empty32(c.hc_mult, c.hc_mult * c.hidden_size)
        self.base = make.empty32(c.hc_mult)
        self.scale = make.empty32(1)
        self.rule = ops.HyperRule(c.hc_sinkhorn_iters, c.hc_eps, c.rms_norm_eps)

    def forward(self, streams: Tensor) -> Tensor:
        return ops.hyper_head(streams, self.fn, self.scale, self.base, self.rule)


class Compressor(nn.Module):
    """Pools `ratio` tokens into one entry; windows of ratio 4 overlap by one window. float32 inside. Source: 4.5.

    `is_index` marks the one that makes the indexer's keys: they are rounded in another way where rounding is simulated.
    """

    def __init__(
        self, c: V4LanguageConfig, ratio: int, width: int, make: Factory, *, is_index: bool = False
    ) -> None:
        super().__init__()
        rows = width * (2 if ratio == 4 else 1)
        wide = Factory(torch.float32, torch.float32, make.device)
        self.ratio, self.rounding = ratio, make.rounding
        self.rotated, self.is_index = c.qk_rope_head_dim, is_index
        self.ape = make.empty32(ratio, rows)
        self.wkv, self.wgate = Linear(c.hidden_size, rows, wide), Linear(c.hidden_size, rows, wide)
        self.norm = RMSNorm(width, wide, c.rms_norm_eps)

    def rows(self, x: Tensor, positions: Tensor, rotation: Rotation) -> CompressorRows:
        """What tokens at `positions` [T] contribute; their place in the window comes from the absolute position."""
        wide = x.float()
        gates = self.wgate(wide) + self.ape[positions % self.ratio]

        def finish(pooled: Tensor, starts: Tensor) -> Tensor:
            normed = self.rounding.narrow(self.norm(self.rounding.narrow(pooled)))
            return self._rounded(rotation(normed, starts))

        return CompressorRows(self.ratio, self.wkv(wide), gates, finish)

    def _rounded(self, entries: Tensor) -> Tensor:
        if self.is_index:
            return self.rounding.index_rows(entries)
        return self.rounding.key_rows(entries, self.rotated)


class Indexer(nn.Module):
    """Chooses which compressed entries a query of a ratio-4 layer sees. Source: 4.6."""

    def __init__(self, c: V4LanguageConfig, make: Factory) -> None:
        super().__init__()
        self.heads, self.width, self.top_k = c.index_n_heads, c.index_head_dim, c.index_topk
        self.wq_b = Linear(c.q_lora_rank, self.heads * self.width, make)
        self.weights_proj = Linear(c.hidden_size, self.heads, make.exact)
        self.compressor = Compressor(c, 4, self.width, make, is_index=True)
        self.rounding = make.rounding

    def rows(
        self, x: Tensor, low_rank_q: Tensor, positions: Tensor, rotation: Rotation
    ) -> IndexerRows:
        queries = rotation(self.wq_b(low_rank_q).unflatten(-1, (self.heads, self.width)), positions)
        weights = self.rounding.narrow(self.weights_proj(x).float())
        weights = self.rounding.narrow(weights * (self.width**-0.5 * self.heads**-0.5))
        keys = self.compressor.rows(x, positions, rotation)
        return IndexerRows(self.rounding.index_rows(queries), weights, keys, self.top_k)


class SparseAttention(nn.Module):
    """Window attention with a sink over shared keys and values, plus compressed entries. Source: 4.3-4.7."""

    def __init__(self, c: V4LanguageConfig, layer: int, make: Factory) -> None:
        super().__init__()
        self.layer, self.ratio, self.config = layer, c.ratios[layer], c
        heads, d, width = c.num_attention_heads, c.head_dim, c.hidden_size
        self.wq_a, self.q_norm = (
            Linear(width, c.q_lora_rank, make),
            RMSNorm(c.q_lora_rank, make, c.rms_norm_eps),
        )
        self.wq_b = Linear(c.q_lora_rank, heads * d, make)
        self.wkv, self.kv_norm = Linear(width, d, make), RMSNorm(d, make, c.rms_norm_eps)
        self.wo_a = Linear(heads * d // c.o_groups, c.o_groups * c.o_lora_rank, make.exact)
        self.wo_b = Linear(c.o_groups * c.o_lora_rank, width, make)
        self.attn_sink = make.empty32(heads)
        self.compressor = Compressor(c, self.ratio, d, make) if self.ratio else None
        self.indexer = Indexer(c, make) if self.ratio == 4 else None
        self.rotation = Rotation(rotary_frequencies(c, self.ratio))
        self.rounding = make.rounding

    def forward(self, x: Tensor, positions: Tensor, ctx: SparseContext) -> Tensor:
        mixed = self.rounding.narrow(ctx.attend_sparse(self.layer, self.rows(x, positions)))
        return self.project(self.rotation.back(mixed, positions))

    def rows(self, x: Tensor, positions: Tensor) -> SparseRows:
        """Queries, shared keys and what the compressors get, for rows `x` [T, D]."""
        c = self.config
        low_rank_q = self.q_norm(self.wq_a(x))
        q = self.wq_b(low_rank_q).unflatten(-1, (c.num_attention_heads, c.head_dim))
        q = self.rounding.head_norm(q, c.rms_norm_eps)
        kv = self.kv_norm(self.wkv(x))
        compressed = indexer = None
        if self.compressor is not None:
            compressed = self.compressor.rows(x, positions, self.rotation)
        if self.indexer is not None:
            indexer = self.indexer.rows(x, low_rank_q, positions, self.rotation)
        return SparseRows(
            self.rounding.narrow(self.rotation(q, positions)),
            self.rounding.key_rows(self.rotation(kv, positions), c.qk_rope_head_dim),
            self.attn_sink,
            c.head_dim**-0.5,
            compressed,
            indexer,
        )

    def project(self, mixed: Tensor) -> Tensor:
        """Grouped low-rank output: heads of a group share one product. [T, H, d] -> [T, D]."""
        groups, rank = self.config.o_groups, self.config.o_lora_rank
        mixed = self.rounding.narrow(mixed)
        grouped = mixed.unflatten(1, (groups, -1)).flatten(2)  # [T, G, H / G * d]
        weights = self.wo_a.weight.unflatten(0, (groups, rank))
        parts = [ops.linear(grouped[:, g], weights[g]) for g in range(groups)]
        out: Tensor = self.wo_b(self.rounding.narrow(torch.cat(parts, -1)))
        return out


class V4Router(nn.Module):
    """Experts by token id (hash layers), by score plus `bias` (text), or by score plus `bias_vl` (pictures). 4.8.

    The weights are the scores without any bias. Float32 throughout.
    """

    def __init__(self, c: V4LanguageConfig, layer: int, make: Factory, *, has_vision: bool) -> None:
        super().__init__()
        self.vocab_size = c.vocab_size
        self.weight = make.empty32(c.n_routed_experts, c.hidden_size)
        self.is_hash = c.is_hash_layer(layer)
        if self.is_hash:
            table = torch.empty(
                c.vocab_size, c.num_experts_per_tok, dtype=torch.int64, device=make.device
            )
            self.tid2eid = nn.Parameter(table, requires_grad=False)
        else:
            self.bias = make.empty32(c.n_routed_experts)
        if has_vision:
            self.bias_vl = make.empty32(c.n_routed_experts)
        self.has_vision = has_vision
        self.rule = ops.RouterRule(
            top_k=c.num_experts_per_tok,
            scoring=c.scoring_func,  # type: ignore[arg-type]  # checked by the configuration
            renormalise=c.norm_topk_prob and c.scoring_func != "softmax",
            scale=c.routed_scaling_factor,
        )

    def forward(self, x: Tensor, ids: Tensor) -> tuple[Tensor, Tensor]:
        """`x` [T, D], raw token ids [T] -> (weights [T, K], experts [T, K])."""
        logits = ops.linear(x.float(), self.weight)
        is_picture = ids >= self.vocab_size
        has_pictures = self.has_vision and bool(is_picture.any())
        if not self.is_hash:
            bias = (
                torch.where(is_picture[:, None], self.bias_vl, self.bias)
                if has_pictures
                else self.bias
            )
            return ops.route(logits, bias, self.rule)
        experts = self.tid2eid[torch.where(is_picture, 0, ids)]
        if has_pictures:
            _, scored = ops.route(logits, self.bias_vl, self.rule)
            experts = torch.where(is_picture[:, None], scored, experts)
        return ops.route_fixed(logits, experts, self.rule), experts


class V4MoE(nn.Module):
    """Routed experts and the shared one, all with the clamped SwiGLU."""

    def __init__(self, c: V4LanguageConfig, layer: int, make: Factory, *, has_vision: bool) -> None:
        super().__init__()
        self.router = V4Router(c, layer, make, has_vision=has_vision)
        inner, limit = c.moe_intermediate_size, c.swiglu_limit
        self.experts = routed_experts(c.n_routed_experts, c.hidden_size, inner, make, limit=limit)
        self.shared = SwiGLU(c.hidden_size, inner * c.n_shared_experts, make, limit=limit)

    def forward(self, x: Tensor, ids: Tensor) -> Tensor:
        weights, experts = self.router(x, ids)
        out: Tensor = self.experts(x, weights, experts) + self.shared(x).float()
        return out


class V4Layer(nn.Module):
    """Two sublayers, each read from and written to the streams; there is no other residual connection."""

    def __init__(self, c: V4LanguageConfig, layer: int, make: Factory, *, has_vision: bool) -> None:
        super().__init__()
        self.attn_hc, self.ffn_hc = HyperConnection(c, make), HyperConnection(c, make)
        self.attn_norm = RMSNorm(c.hidden_size, make, c.rms_norm_eps)
        self.ffn_norm = RMSNorm(c.hidden_size, make, c.rms_norm_eps)
        self.attn = SparseAttention(c, layer, make)
        self.ffn = V4MoE(c, layer, make, has_vision=has_vision)
        self.rounding = make.rounding

    def forward(
        self, streams: Tensor, positions: Tensor, ids: Tensor, ctx: SparseContext
    ) -> Tensor:
        """`streams` [T, N, D] float32."""
        narrow = self.rounding.narrow
        row, post, comb = self.attn_hc.read(streams)
        update = self.attn(self.attn_norm(narrow(row)), positions, ctx)
        streams = narrow(ops.hyper_post(update, streams, post, comb))
        row, post, comb = self.ffn_hc.read(streams)
        update = narrow(self.ffn(self.ffn_norm(narrow(row)), ids))
        return narrow(ops.hyper_post(update, streams, post, comb))


class DeepseekV4LM(nn.Module):
    """Embedding, layers, collapse, final norm and head."""

    def __init__(self, c: V4LanguageConfig, make: Factory, *, has_vision: bool = False) -> None:
        super().__init__()
        self.config = c
        self.embed_tokens = Linear(c.hidden_size, c.vocab_size, make.exact)  # used as a table
        layers = (V4Layer(c, i, make, has_vision=has_vision) for i in range(c.num_hidden_layers))
        self.layers = nn.ModuleList(layers)
        self.hc_head = HyperHead(c, make)
        self.norm = RMSNorm(c.hidden_size, make, c.rms_norm_eps)
        self.lm_head = Linear(c.hidden_size, c.vocab_size, make.exact)
        self.rounding = make.rounding

    def embed(self, ids: Tensor) -> Tensor:
        """`ids` [T] -> rows [T, D] float32; ids beyond the vocabulary (pictures) give row 0, to be overwritten."""
        return self.embed_tokens.weight[torch.where(ids < self.config.vocab_size, ids, 0)].float()

    def forward(self, rows: Tensor, positions: Tensor, ids: Tensor, ctx: SparseContext) -> Tensor:
        """Input rows [T, D] float32 with their raw ids [T] -> final streams [T, N, D]."""
        streams = rows.unsqueeze(1).expand(-1, self.config.hc_mult, -1)
        for layer in self.layers:
            streams = layer(streams, positions, ids, ctx)
        return streams

    def collapse(self, streams: Tensor) -> Tensor:
        """Streams [n, N, D] -> hidden rows [n, D] after the final norm."""
        out: Tensor = self.norm(self.rounding.narrow(self.hc_head(streams)))
        return out

    def logits(self, hidden: Tensor) -> Tensor:
        """Hidden rows [n, D] -> [n, vocabulary] float32."""
        out: Tensor = self.lm_head(hidden)
        return out.float()
