"""Operations composed of torch's library calls: the default body where no native one exists.

Weights may be stored in bfloat16 or float16 while activations are float32 (CPUs). A product of few rows is bound by
reading the weight and runs in the weight's type; one of many rows is bound by arithmetic and runs in float32 with the
widened weight, which is exact. Narrow arithmetic there is four times slower on CPUs without matrix units, and with them
its rounding flips close choices of experts (mean cosine of logits 0.986 instead of 1.000 on a model with groups).
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional as F

from foveal.ops import reference
from foveal.ops.packed import PackedWeight, Weight

# Up to this many rows a product is bound by reading the weight, so it runs in the weight's own narrow type.
MAX_NARROW_ROWS = 8
MIN_ONEDNN_ROWS, MAX_ONEDNN_ROWS = 2, 512
HAS_ONEDNN = torch.backends.mkldnn.is_available() and hasattr(torch.ops.mkldnn, "_linear_pointwise")


def _suits_onednn(x: Tensor, weight: Tensor) -> bool:
    """Is this a float32 product of few rows on a CPU, which oneDNN runs up to 1.4 times as fast as torch's default?

    Measured for 8 to 443 rows (docs/experiments.md); with one row, and beyond that range, the default is as fast. The
    call has no derivative, so training keeps the default.
    """
    rows = x.numel() // max(1, x.shape[-1])
    return (
        HAS_ONEDNN
        and MIN_ONEDNN_ROWS <= rows <= MAX_ONEDNN_ROWS
        and x.dtype is weight.dtype is torch.float32
        and x.device.type == "cpu"
        and not torch.is_grad_enabled()
    )


def linear(x: Tensor, weight: Weight, bias: Tensor | None) -> Tensor:
    if isinstance(weight, PackedWeight):
        weight = weight.dense(x.dtype)
    if x.dtype is torch.float32 and weight.dtype in (torch.bfloat16, torch.float16):
        return _mixed_linear(x, weight, bias)
    if _suits_onednn(x, weight):
        out: Tensor = torch.ops.mkldnn._linear_pointwise(x, weight, bias, "none", [], "")
        return out
    return F.linear(x, weight, bias)


def _mixed_linear(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    rows = x.numel() // max(1, x.shape[-1])
    if rows > MAX_NARROW_ROWS:
        return F.linear(x, weight.float(), None if bias is None else bias.float())
    if weight.dtype is torch.float16:
        # Scaling each row by a power of two is exact and keeps sums below float16's limit of 65,504.
        exponent = torch.frexp(x.abs().amax(-1, keepdim=True)).exponent
        out = F.linear(torch.ldexp(x, -exponent).to(weight.dtype), weight).float()
        out = torch.ldexp(out, exponent)
    else:
        out = F.linear(x.to(weight.dtype), weight).float()
    return out if bias is None else out + bias.float()


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    return F.rms_norm(x.float(), (x.shape[-1],), weight, eps)


def attention(q: Tensor, k: Tensor, v: Tensor, scale: float) -> Tensor:
    new, total = q.shape[0], k.shape[0]
    repeat = q.shape[1] // k.shape[1]
    if repeat > 1:
        k, v = k.repeat_interleave(repeat, 1), v.repeat_interleave(repeat, 1)
    mask = None
    if 1 < new < total:
        mask = torch.ones(new, total, dtype=torch.bool, device=q.device).tril(total - new)
    # [rows, heads, width] -> [1, heads, rows, width]
    q4, k4, v4 = (t.transpose(0, 1)[None] for t in (q, k, v))
    is_causal = new > 1 and new == total
    out = F.scaled_dot_product_attention(q4, k4, v4, mask, is_causal=is_causal, scale=scale)
    return out[0].transpose(0, 1)


def mla_absorbed(
    q_nope: Tensor, q_pe: Tensor, latent: Tensor, k_pe: Tensor, kv_b: Tensor, scale: float
) -> Tensor:
    """The decode form: queries move into the latent space, keys are never expanded (spec 6.4)."""
    nope = q_nope.shape[-1]
    up_k, up_v = kv_b[:, :nope].to(q_nope.dtype), kv_b[:, nope:].to(q_nope.dtype)
    q_latent = torch.bmm(q_nope.transpose(0, 1), up_k)  # [H, new, R]
    new, total = q_nope.shape[0], latent.shape[0]
    scores = reference.wide(q_latent @ latent.T + q_pe.transpose(0, 1) @ k_pe.T) * scale
    if new > 1:
        visible = torch.ones(new, total, dtype=torch.bool, device=scores.device).tril(total - new)
        scores = scores.masked_fill(~visible, float("-inf"))
    mixed = scores.softmax(-1).to(latent.dtype) @ latent  # [H, new, R]
    return torch.bmm(mixed, up_v.transpose(1, 2)).transpose(0, 1)


def mla_expanded(
    q_nope: Tensor, q_pe: Tensor, latent: Tensor, k_pe: Tensor, kv_b: Tensor, scale: float
) -> Tensor:
    """The prefill form: keys and values of every head are expanded from the latent."""
    heads, rows, rank = kv_b.shape
    nope = q_nope.shape[-1]
    expanded = linear(latent, kv_b.reshape(heads * rows, rank), None).unflatten(-1, (heads, rows))
    k = torch.cat((expanded[..., :nope], k_pe[:, None, :].expand(-1, heads, -1)), -1)
    return attention(torch.cat((q_nope, q_pe), -1), k, expanded[..., nope:], scale)


def mla_attention(
    q_nope: Tensor, q_pe: Tensor, latent: Tensor, k_pe: Tensor, kv_b: Tensor, scale: float
) -> Tensor:
    form = mla_absorbed if q_nope.shape[0] <= MAX_NARROW_ROWS else mla_expanded
    return form(q_nope, q_pe, latent, k_pe, kv_b, scale)


def encoder_attention(q: Tensor, k: Tensor, v: Tensor, scale: float) -> Tensor:
    q4, k4, v4 = (t.transpose(1, 2) for t in (q, k, v))
    return F.scaled_dot_product_attention(q4, k4, v4, scale=scale).transpose(1, 2)


def moe(
    x: Tensor, weights: Tensor, ids: Tensor, w13: Weight, w2: Weight, limit: float = 0.0
) -> Tensor:
    """Tokens are sorted by expert, each expert runs once over its own rows. Weights are never gathered."""
    tokens, top_k = ids.shape
    if not tokens:
        return torch.zeros_like(x, dtype=torch.float32)
    order = torch.sort(ids.flatten(), stable=True).indices
    rows = order // top_k
    shares = weights.flatten()[order].unsqueeze(-1)
    counts = torch.bincount(ids.flatten(), minlength=w13.shape[0]).tolist()
    x_sorted = x.index_select(0, rows)
    outputs = []
    start = 0
    for expert, count in enumerate(counts):
        if count:
            gate_up = linear(x_sorted[start : start + count], w13[expert], None)
            inner = reference.swiglu(gate_up, limit)
            outputs.append(linear(inner, w2[expert], None).float())
            start += count
    # Back to (token, slot) order, then a sum over the slots in a fixed order: no result depends on the batch.
    scattered = torch.cat(outputs) * shares
    inverse = torch.empty_like(order)
    inverse[order] = torch.arange(order.numel(), device=order.device)
    return scattered.index_select(0, inverse).view(tokens, top_k, -1).sum(1)
