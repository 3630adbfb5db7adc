"""Bodies of V4 operations that train faster on CPUs, and the tower over groups of equal pictures.

Results are equal to `foveal.ops.reference` up to rounding. Hyper-connections stay in float32 under autocast: streams
pass through every sublayer, and roundings would add up.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import groupby
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from foveal import ops
from foveal.models.v4 import V4Model
from foveal.models.v4_vision import Grid, TowerBlock
from training import fast_bodies


class HyperMix(torch.autograd.Function):
    """`streams` [T, N * D] times `fn` transposed, scaled by the streams' inverse root mean square: [T, outputs].

    Written as one step, because the chain of its parts goes over the streams four times as often.
    """

    @staticmethod
    def forward(ctx: Any, x: Tensor, fn: Tensor, eps: float) -> Tensor:
        scale = (
            torch.linalg.vector_norm(x, dim=-1, keepdim=True).square() / x.shape[-1] + eps
        ).rsqrt()
        product = x @ fn.T
        ctx.save_for_backward(x, fn, scale, product)
        return product * scale

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor, None]:
        x, fn, scale, product = ctx.saved_tensors
        inner = grad * scale
        along = -(inner * product).sum(-1, keepdim=True) * scale.square() / x.shape[-1]
        return (inner @ fn).addcmul_(x, along), inner.T @ x, None


def hyper_mix(streams: Tensor, fn: Tensor, eps: float) -> Tensor:
    out: Tensor = HyperMix.apply(streams.flatten(-2), fn, eps)  # type: ignore[no-untyped-call]
    return out


class Turn(torch.autograd.Function):
    """Rotates neighbouring pairs of the last dims; the rest is copied once. Its gradient is the opposite rotation."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        ctx.save_for_backward(cos, sin)
        return turned(x, cos, sin)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None]:
        cos, sin = ctx.saved_tensors
        return turned(grad, cos, -sin), None, None


def turned(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    pairs = cos.shape[-1]
    shape = (cos.shape[0], *(1,) * (x.dim() - 2), pairs)
    c, s = cos.view(shape), sin.view(shape)
    out = x.clone(memory_format=torch.contiguous_format)
    tail = out[..., x.shape[-1] - 2 * pairs :].unflatten(-1, (pairs, 2))
    even, odd = tail[..., 0].float(), tail[..., 1].float()
    tail[..., 0], tail[..., 1] = even * c - odd * s, odd * c + even * s
    return out


def rope_neighbours(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    out: Tensor = Turn.apply(x, cos, sin)  # type: ignore[no-untyped-call]
    return out


def hyper_pre(
    streams: Tensor, fn: Tensor, scale: Tensor, base: Tensor, rule: ops.HyperRule
) -> tuple[Tensor, Tensor, Tensor]:
    with torch.autocast("cpu", enabled=False):
        n = streams.shape[-2]
        factors = scale.repeat_interleave(torch.tensor([n, n, n * n]))
        pre, post, comb = (hyper_mix(streams, fn, rule.norm_eps) * factors + base).split(
            (n, n, n * n), -1
        )
        comb = comb.unflatten(-1, (n, n)).softmax(-1) + rule.eps
        comb = comb / (comb.sum(-2, keepdim=True) + rule.eps)
        for _ in range(rule.iterations - 1):
            comb = comb / (comb.sum(-1, keepdim=True) + rule.eps)
            comb = comb / (comb.sum(-2, keepdim=True) + rule.eps)
        row = torch.bmm((pre.sigmoid() + rule.eps)[:, None, :], streams)[:, 0]
        return row, 2 * post.sigmoid(), comb


def hyper_post(update: Tensor, streams: Tensor, post: Tensor, comb: Tensor) -> Tensor:
    with torch.autocast("cpu", enabled=False):
        written = post.unsqueeze(-1) * update.float().unsqueeze(-2)
        return torch.baddbmm(written, comb.transpose(1, 2), streams)


def hyper_head(
    streams: Tensor, fn: Tensor, scale: Tensor, base: Tensor, rule: ops.HyperRule
) -> Tensor:
    with torch.autocast("cpu", enabled=False):
        pre = (hyper_mix(streams, fn, rule.norm_eps) * scale + base).sigmoid() + rule.eps
        return torch.bmm(pre[:, None, :], streams)[:, 0]


def moe(
    x: Tensor, weights: Tensor, ids: Tensor, w13: Tensor, w2: Tensor, limit: float = 0.0
) -> Tensor:
    """As `fast_bodies.moe`. Nothing is clamped: values stay far below the limit, and the passes cost 5% of a step."""
    experts, inner = w13.shape[0], w2.shape[2]
    shares = torch.zeros(len(x), experts, dtype=weights.dtype).scatter(1, ids, weights)
    gate, up = F.linear(x, w13.flatten(0, 1)).unflatten(1, (experts, 2, inner)).unbind(2)
    h = F.silu(gate) * up * shares[:, :, None].to(gate.dtype)
    return F.linear(h.flatten(1), w2.transpose(0, 1).flatten(1)).float()


def swiglu(gate_up: Tensor, limit: float = 0.0) -> Tensor:
    """Without the clamp, as in `moe`."""
    gate, up = gate_up.chunk(2, -1)
    return F.silu(gate) * up


def install() -> None:
    """Make the operations of this process use these bodies."""
    ops._active["encoder_attention"] = fast_bodies.encoder_attention
    for body in (hyper_pre, hyper_post, hyper_head, moe, swiglu, rope_neighbours):
        ops._active[body.__name__] = body


def tower_cells(model: V4Model, patches: Tensor, grids: Sequence[Grid]) -> Tensor:
    """Aligner rows [cells, D] of packed pictures; attention runs over all neighbours of equal length at once."""
    x, angles, lengths = model.vision.begin(patches, grids)
    groups = [(length, len(list(group))) for length, group in groupby(lengths)]
    for block in model.vision.blocks:
        assert isinstance(block, TowerBlock)
        attn = block.attn
        q, k, v = attn.wqkv(block.norm1(x)).unflatten(-1, (3, attn.heads, -1)).unbind(1)
        q, k = ops.rope_half(q, *angles), ops.rope_half(k, *angles)
        pieces = zip(*(t.split([n * count for n, count in groups]) for t in (q, k, v)), strict=True)
        mixed = [
            ops.encoder_attention(
                *(t.unflatten(0, (count, n)) for t in piece), q.shape[-1] ** -0.5
            ).flatten(0, 1)
            for (n, count), piece in zip(groups, pieces, strict=True)
        ]
        x = x + attn.wo(torch.cat(mixed).flatten(1)).float()
        x = x + block.mlp(block.norm2(x)).float()
    return model.aligner.packed(model.vision.norm(x), grids).float()
