"""Each operation in its plainest form: short enough to be believed, and the oracle of every faster body.

Everything is computed in float32, or in float64 where the inputs are. Shapes are in the docstrings of `foveal.ops`.
Legend: T tokens, H heads, D width, E experts, K chosen experts, M inner width of an expert.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional as F

from foveal.ops.packed import PackedWeight, Weight
from foveal.ops.types import HyperRule, RouterRule


def wide(x: Tensor) -> Tensor:
    """`x` in the type of the computation."""
    return x if x.dtype is torch.float64 else x.float()


def linear(x: Tensor, weight: Weight, bias: Tensor | None) -> Tensor:
    dense = weight.dense(wide(x).dtype) if isinstance(weight, PackedWeight) else wide(weight)
    out = wide(x) @ dense.T
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
    scores = router_scores(logits, rule)
    choice = scores if bias is None else scores + bias
    if rule.num_groups > 1:
        choice = _keep_best_groups(choice, rule)
    # A stable sort sends equal scores to the lower id on every device; top-k leaves their order open.
    ids = torch.sort(choice, dim=-1, descending=True, stable=True).indices[..., : rule.top_k]
    picked = scores if bias is not None else choice
    return router_weights(picked, ids, rule), ids


def router_scores(logits: Tensor, rule: RouterRule) -> Tensor:
    if rule.scoring == "softmax":
        return logits.softmax(-1)
    return logits.sigmoid() if rule.scoring == "sigmoid" else F.softplus(logits).sqrt()


def router_weights(scores: Tensor, ids: Tensor, rule: RouterRule) -> Tensor:
    weights = scores.gather(-1, ids)
    if rule.top_k > 1 and rule.renormalise:
        weights = weights / (weights.sum(-1, keepdim=True) + 1e-20)
    return weights * rule.scale


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


def swiglu(gate_up: Tensor, limit: float = 0.0) -> Tensor:
    gate, up = gate_up.chunk(2, -1)
    if limit:
        gate, up = gate.clamp(max=limit), up.clamp(-limit, limit)
    return F.silu(gate) * up


def moe(
    x: Tensor, weights: Tensor, ids: Tensor, w13: Weight, w2: Weight, limit: float = 0.0
) -> Tensor:
    """Every expert sees every token; what was not chosen has weight zero."""
    out = torch.zeros_like(wide(x))
    for e in range(w13.shape[0]):
        share = (weights * (ids == e)).sum(-1, keepdim=True)
        inner = swiglu(linear(x, w13[e], None), limit)
        out = out + share * wide(linear(inner, w2[e], None))
    return out


def hyper_mix(streams: Tensor, fn: Tensor, eps: float) -> Tensor:
    x = wide(streams).flatten(-2)
    scale = torch.rsqrt(x.square().mean(-1, keepdim=True) + eps)
    return x @ wide(fn).T * scale  # scaled after the product, as in the released code


def hyper_pre(
    streams: Tensor, fn: Tensor, scale: Tensor, base: Tensor, rule: HyperRule
) -> tuple[Tensor, Tensor, Tensor]:
    n = streams.shape[-2]
    pre, post, comb = hyper_mix(streams, fn, rule.norm_eps).split((n, n, n * n), -1)
    base_pre, base_post, base_comb = base.split((n, n, n * n))
    pre = (pre * scale[0] + base_pre).sigmoid() + rule.eps
    post = 2 * (post * scale[1] + base_post).sigmoid()
    comb = (comb * scale[2] + base_comb).unflatten(-1, (n, n))
    comb = comb.softmax(-1) + rule.eps
    comb = comb / (comb.sum(-2, keepdim=True) + rule.eps)
    for _ in range(rule.iterations - 1):
        comb = comb / (comb.sum(-1, keepdim=True) + rule.eps)
        comb = comb / (comb.sum(-2, keepdim=True) + rule.eps)
    return (pre.unsqueeze(-1) * wide(streams)).sum(-2), post, comb


def hyper_post(update: Tensor, streams: Tensor, post: Tensor, comb: Tensor) -> Tensor:
    mixed = torch.einsum("tjk,tjd->tkd", comb, wide(streams))
    return post.unsqueeze(-1) * wide(update).unsqueeze(-2) + mixed


def hyper_head(streams: Tensor, fn: Tensor, scale: Tensor, base: Tensor, rule: HyperRule) -> Tensor:
    pre = (hyper_mix(streams, fn, rule.norm_eps) * scale + base).sigmoid() + rule.eps
    return (pre.unsqueeze(-1) * wide(streams)).sum(-2)


def rope_neighbours(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotate pairs (2j, 2j + 1) of the last `2 * cos.shape[-1]` entries, in place of where they stand."""
    rotated = 2 * cos.shape[-1]
    kept, turned = wide(x).split((x.shape[-1] - rotated, rotated), -1)
    even, odd = turned[..., 0::2], turned[..., 1::2]
    shape = (cos.shape[0], *(1,) * (x.dim() - 2), cos.shape[-1])
    c, s = cos.view(shape), sin.view(shape)
    pairs = torch.stack((even * c - odd * s, odd * c + even * s), -1).flatten(-2)
    return torch.cat((kept, pairs), -1).to(x.dtype)


def sparse_attention(q: Tensor, kv: Tensor, visible: Tensor, sink: Tensor, scale: float) -> Tensor:
    scores = torch.einsum("qhd,kd->hqk", wide(q), wide(kv)) * scale
    scores = scores.masked_fill(~visible, float("-inf"))
    # The sink is one more entry of the denominator, without a value.
    with_sink = torch.cat(
        (scores, sink.view(-1, 1, 1).expand(-1, q.shape[0], 1).to(scores.dtype)), -1
    )
    weights = with_sink.softmax(-1)[..., :-1]
    return torch.einsum("hqk,kd->qhd", weights, wide(kv)).to(q.dtype)


def compress(values: Tensor, gates: Tensor) -> Tensor:
    return (values * gates.softmax(-2)).sum(-2)


def index_scores(queries: Tensor, keys: Tensor, head_weights: Tensor) -> Tensor:
    scores = torch.einsum("qhd,kd->qhk", wide(queries), wide(keys)).relu()
    return torch.einsum("qhk,qh->qk", scores, wide(head_weights))


def top_entries(scores: Tensor, visible: Tensor, count: int) -> Tensor:
    masked = scores.masked_fill(~visible, float("-inf"))
    order = torch.sort(masked, dim=-1, descending=True, stable=True).indices[..., :count]
    chosen = torch.zeros_like(visible)
    chosen.scatter_(-1, order, True)
    return chosen & visible
