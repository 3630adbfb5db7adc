"""Each operation in its plainest form: short enough to be believed, and the oracle of every faster body.

Everything is computed in float32, or in float64 where the inputs are. Shapes are in the docstrings of `foveal.ops`.
Legend: T tokens, H heads, D width, E experts, K chosen experts, M inner width of an expert.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional as F

from foveal.ops.types import RouterRule


def wide(x: Tensor) -> Tensor:
    """`x` in the type of the computation."""
    return x if x.dtype is torch.float64 else x.float()


def linear(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    out = wide(x) @ wide(weight).T
    return (out if bias is None else out + wide(bias)).to(x.dtype)


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    x32 = wide(x)
    return x32 * torch.rsqrt(x32.square().mean(-1, keepdim=True) + eps) * wide(weight)


def rope_half(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    half = x.shape[-1] // 2
    x32 = wide(x)
    first, second = x32[..., :half], x32[..., half:]
    c, s = cos[:, None, :], sin[:, None, :]
    return torch.cat((first * c - second * s, second * c + first * s), -1).to(x.dtype)


def rope_interleaved(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    x32 = wide(x)
    even, odd = x32[..., 0::2], x32[..., 1::2]
    c, s = cos[:, None, :], sin[:, None, :]
    return torch.cat((even * c - odd * s, odd * c + even * s), -1).to(x.dtype)


def attention(q: Tensor, k: Tensor, v: Tensor, scale: float) -> Tensor:
    new, total, heads = q.shape[0], k.shape[0], q.shape[1]
    repeat = heads // k.shape[1]
    k32 = wide(k).repeat_interleave(repeat, 1)
    v32 = wide(v).repeat_interleave(repeat, 1)
    scores = torch.einsum("qhd,khd->hqk", wide(q), k32) * scale
    positions = torch.arange(total, device=q.device)
    hidden = positions[None, :] > (positions[total - new :])[:, None]
    weights = scores.masked_fill(hidden, float("-inf")).softmax(-1)
    return torch.einsum("hqk,khd->qhd", weights, v32).to(q.dtype)


def mla_attention(
    q_nope: Tensor, q_pe: Tensor, latent: Tensor, k_pe: Tensor, kv_b: Tensor, scale: float
) -> Tensor:
    nope = q_nope.shape[-1]
    expanded = torch.einsum("tr,hnr->thn", wide(latent), wide(kv_b))
    shared = wide(k_pe)[:, None, :].expand(-1, kv_b.shape[0], -1)
    k = torch.cat((expanded[..., :nope], shared), -1)
    q = wide(torch.cat((q_nope, q_pe), -1))
    return attention(q, k, expanded[..., nope:], scale).to(q_nope.dtype)


def encoder_attention(q: Tensor, k: Tensor, v: Tensor, scale: float) -> Tensor:
    weights = (torch.einsum("bqhd,bkhd->bhqk", wide(q), wide(k)) * scale).softmax(-1)
    return torch.einsum("bhqk,bkhd->bqhd", weights, wide(v)).to(q.dtype)


def route(logits: Tensor, bias: Tensor | None, rule: RouterRule) -> tuple[Tensor, Tensor]:
    scores = logits.softmax(-1) if rule.scoring == "softmax" else logits.sigmoid()
    choice = scores if bias is None else scores + bias
    if rule.num_groups > 1:
        choice = _keep_best_groups(choice, rule)
    # A stable sort sends equal scores to the lower id on every device; top-k leaves their order open.
    ids = torch.sort(choice, dim=-1, descending=True, stable=True).indices[..., : rule.top_k]
    picked = scores if bias is not None else choice
    weights = picked.gather(-1, ids)
    if rule.top_k > 1 and rule.renormalise:
        weights = weights / (weights.sum(-1, keepdim=True) + 1e-20)
    return weights * rule.scale, ids


def _keep_best_groups(choice: Tensor, rule: RouterRule) -> Tensor:
    """Scores of the groups that are not kept become 0.0, as in the vendor's code (not minus infinity)."""
    grouped = choice.unflatten(-1, (rule.num_groups, -1))
    if rule.group_score == "top2":
        group_scores = grouped.topk(min(2, grouped.shape[-1]), -1).values.sum(-1)
    else:
        group_scores = grouped.amax(-1)
    order = torch.sort(group_scores, dim=-1, descending=True, stable=True).indices
    kept = torch.zeros_like(group_scores, dtype=torch.bool)
    kept.scatter_(-1, order[..., : rule.kept_groups], True)
    return torch.where(kept[..., None], grouped, torch.zeros_like(grouped)).flatten(-2)


def swiglu(gate_up: Tensor) -> Tensor:
    gate, up = gate_up.chunk(2, -1)
    return F.silu(gate) * up


def moe(x: Tensor, weights: Tensor, ids: Tensor, w13: Tensor, w2: Tensor) -> Tensor:
    """Every expert sees every token; what was not chosen has weight zero."""
    out = torch.zeros_like(wide(x))
    for e in range(w13.shape[0]):
        share = (weights * (ids == e)).sum(-1, keepdim=True)
        inner = swiglu(linear(x, w13[e], None))
        out = out + share * wide(linear(inner, w2[e], None))
    return out
