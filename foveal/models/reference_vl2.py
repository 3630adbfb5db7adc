"""The slow truth: a whole sequence through the language model at once, without cache, context or chunks.

Every faster path is compared with this one. It shares the parameters and the rotary table with the model, and nothing
else: attention is a full masked softmax over expanded heads, experts see every token.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import torch
from torch import Tensor

from foveal.models.deepseek_lm import DecoderLayer, HeadAttention, LatentAttention
from foveal.models.layers import MoE, SwiGLU
from foveal.models.vl2 import VL2Model
from foveal.ops import reference


@dataclass(slots=True)
class Trace:
    """What a whole-sequence pass saw: `hidden` [T, D] before each layer and after the final norm; chosen experts
    [T, K] of each routed layer, sorted by id."""

    hidden: list[Tensor] = field(default_factory=list)
    experts: dict[int, Tensor] = field(default_factory=dict)


@torch.inference_mode()
def reference_forward(model: VL2Model, rows: Tensor, trace: Trace | None = None) -> Tensor:
    """Input rows [T, D] of one sequence -> logits [T, vocabulary] float32."""
    language = model.language
    h = rows.float()
    rope = language.rope(torch.arange(h.shape[0], device=h.device))
    for index, layer in enumerate(language.layers):
        assert isinstance(layer, DecoderLayer)
        if trace is not None:
            trace.hidden.append(h)
        normed = reference.rms_norm(h, layer.input_layernorm.weight, layer.input_layernorm.eps)
        h = h + _attention(layer, normed, rope, language.rope.softmax_factor)
        normed = reference.rms_norm(
            h, layer.post_attention_layernorm.weight, layer.post_attention_layernorm.eps
        )
        h = h + _mlp(layer, normed, index, trace)
    h = reference.rms_norm(h, language.norm.weight, language.norm.eps)
    if trace is not None:
        trace.hidden.append(h)
    head = language.embed_tokens if language.config.tie_word_embeddings else language.lm_head
    return reference.linear(h, head.weight, None)


def _attention(
    layer: DecoderLayer, x: Tensor, rope: tuple[Tensor, Tensor], factor: float
) -> Tensor:
    attn = layer.attn
    if isinstance(attn, LatentAttention):
        mixed = _latent(attn, x, rope, factor)
    else:
        assert isinstance(attn, HeadAttention)
        heads, kv, width = attn.heads, attn.kv_heads, attn.head_dim
        rows = reference.linear(x, attn.qkv.weight, attn.qkv.bias).unflatten(-1, (-1, width))
        q, k, v = rows.split((heads, kv, kv), 1)
        q, k = reference.rope_half(q, *rope), reference.rope_half(k, *rope)
        mixed = reference.attention(q, k, v, width**-0.5 * factor)
    return reference.linear(mixed.flatten(1), attn.o.weight, attn.o.bias)


def _latent(attn: LatentAttention, x: Tensor, rope: tuple[Tensor, Tensor], factor: float) -> Tensor:
    if attn.has_low_rank_q:
        low = reference.linear(x, attn.q_a.weight, attn.q_a.bias)
        low = reference.rms_norm(low, attn.q_a_norm.weight, attn.q_a_norm.eps)
        q = reference.linear(low, attn.q_b.weight, None)
    else:
        q = reference.linear(x, attn.q.weight, None)
    q_nope, q_pe = q.unflatten(-1, (attn.heads, -1)).split((attn.nope, attn.rope_dim), -1)
    down = reference.linear(x, attn.kv_a.weight, attn.kv_a.bias)
    latent, k_pe = down.split((attn.rank, attn.rope_dim), -1)
    latent = reference.rms_norm(latent, attn.kv_a_norm.weight, attn.kv_a_norm.eps)
    q_pe = reference.rope_interleaved(q_pe, *rope)
    k_pe = reference.rope_interleaved(k_pe.unsqueeze(1), *rope).squeeze(1)
    scale = (attn.nope + attn.rope_dim) ** -0.5 * factor
    kv_b = attn.kv_b.weight.unflatten(0, (attn.heads, -1))
    return reference.mla_attention(q_nope, q_pe, latent, k_pe, kv_b, scale)


def _mlp(layer: DecoderLayer, x: Tensor, index: int, trace: Trace | None) -> Tensor:
    mlp = layer.mlp
    if isinstance(mlp, SwiGLU):
        inner = reference.swiglu(reference.linear(x, mlp.gate_up.weight, None))
        return reference.linear(inner, mlp.down.weight, None)
    assert isinstance(mlp, MoE)
    logits = reference.linear(x, mlp.router.weight, None)
    weights, ids = reference.route(logits, mlp.router.bias, mlp.router.rule)
    if trace is not None:
        trace.experts[index] = ids.sort(-1).values
    out = reference.moe(x, weights, ids, mlp.experts.w13, mlp.experts.w2)
    if mlp.shared is not None:
        inner = reference.swiglu(reference.linear(x, mlp.shared.gate_up.weight, None))
        out = out + reference.linear(inner, mlp.shared.down.weight, None)
    return out
