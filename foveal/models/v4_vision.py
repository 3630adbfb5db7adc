"""The vision tower and aligner of DeepSeek-V4. Source: V4 spec 7.5, 7.6, 10.6.

Legend: n patches (of one picture, or of several one after the other), W tower width, D width of the language model, q
patches a cell side. Pictures never see each other; several may run packed, which gives each the rows it gets alone.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TypeAlias

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from foveal import ops
from foveal.models.layers import Factory, Linear, RMSNorm, merge_cells
from foveal.models.v4_config import V4VisionConfig

NORM_EPS = 1e-6  # fixed; not the language model's rms_norm_eps
Grid: TypeAlias = tuple[int, int]  # rows, columns


def patch_angles(grids: Sequence[Grid], head_dim: int, theta: float) -> tuple[Tensor, Tensor]:
    """cos and sin [n, head_dim / 2] float32 of all patches: row angles first, then column angles."""
    axis = head_dim // 2
    frequencies = 1.0 / (theta ** (torch.arange(0, axis, 2, dtype=torch.float32) / axis))
    pieces = []
    for rows, cols in grids:
        y = torch.arange(rows, dtype=torch.float32)[:, None, None] * frequencies
        x = torch.arange(cols, dtype=torch.float32)[None, :, None] * frequencies
        both = torch.cat((y.expand(rows, cols, -1), x.expand(rows, cols, -1)), -1)
        pieces.append(both.flatten(0, 1))
    angles = torch.cat(pieces)
    return angles.cos(), angles.sin()


class TowerAttention(nn.Module):
    """Bidirectional attention inside each picture, with a two-dimensional rotation of halves."""

    def __init__(self, c: V4VisionConfig, make: Factory) -> None:
        super().__init__()
        self.heads = c.vision_n_heads
        self.wqkv = Linear(c.vision_dim, 3 * c.vision_dim, make, bias=True)
        self.wo = Linear(c.vision_dim, c.vision_dim, make, bias=True)

    def forward(self, x: Tensor, angles: tuple[Tensor, Tensor], lengths: Sequence[int]) -> Tensor:
        q, k, v = self.wqkv(x).unflatten(-1, (3, self.heads, -1)).unbind(1)  # [n, H, d]
        q, k = ops.rope_half(q, *angles), ops.rope_half(k, *angles)
        scale = q.shape[-1] ** -0.5
        pictures = zip(*(t[None].split(list(lengths), 1) for t in (q, k, v)), strict=True)
        mixed = [ops.encoder_attention(qs, ks, vs, scale)[0] for qs, ks, vs in pictures]
        out: Tensor = self.wo(torch.cat(mixed).flatten(1))
        return out


class TowerMLP(nn.Module):
    """SwiGLU without biases; gate rows come first in `w1`."""

    def __init__(self, c: V4VisionConfig, make: Factory) -> None:
        super().__init__()
        self.w1 = Linear(c.vision_dim, 2 * c.vision_inter_dim, make)
        self.w2 = Linear(c.vision_inter_dim, c.vision_dim, make)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.w2(ops.swiglu(self.w1(x)))
        return out


class TowerBlock(nn.Module):
    def __init__(self, c: V4VisionConfig, make: Factory) -> None:
        super().__init__()
        self.norm1, self.attn = RMSNorm(c.vision_dim, make, NORM_EPS), TowerAttention(c, make)
        self.norm2, self.mlp = RMSNorm(c.vision_dim, make, NORM_EPS), TowerMLP(c, make)

    def forward(self, x: Tensor, angles: tuple[Tensor, Tensor], lengths: Sequence[int]) -> Tensor:
        """`x` [n, W] float32: the residual stream."""
        x = x + self.attn(self.norm1(x), angles, lengths).float()
        out: Tensor = x + self.mlp(self.norm2(x)).float()
        return out


class PatchProjection(nn.Module):
    def __init__(self, c: V4VisionConfig, make: Factory) -> None:
        super().__init__()
        self.proj = Linear(3 * c.vision_patch_size**2, c.vision_dim, make, bias=True)

    def forward(self, patches: Tensor) -> Tensor:
        out: Tensor = self.proj(patches.flatten(1))
        return out


class V4Tower(nn.Module):
    """Patches [n, 3, p, p] of pictures with `grids` -> features [n, W] after the final norm."""

    def __init__(self, c: V4VisionConfig, make: Factory) -> None:
        super().__init__()
        self.config, self.act_dtype = c, make.act_dtype
        self.patch_embed = PatchProjection(c, make)
        self.blocks = nn.ModuleList(TowerBlock(c, make) for _ in range(c.vision_n_layers))
        self.norm = RMSNorm(c.vision_dim, make, NORM_EPS)

    def forward(self, patches: Tensor, grids: Sequence[Grid]) -> Tensor:
        x, angles, lengths = self.begin(patches, grids)
        for block in self.blocks:
            x = block(x, angles, lengths)
        out: Tensor = self.norm(x)
        return out

    def begin(
        self, patches: Tensor, grids: Sequence[Grid]
    ) -> tuple[Tensor, tuple[Tensor, Tensor], list[int]]:
        """Residual stream before the first block, rotary angles, and patches of each picture."""
        c = self.config
        cos, sin = patch_angles(grids, c.vision_dim // c.vision_n_heads, c.vision_rope_theta)
        angles = (cos.to(patches.device), sin.to(patches.device))
        lengths = [rows * cols for rows, cols in grids]
        return self.patch_embed(patches.to(self.act_dtype)).float(), angles, lengths


class Aligner(nn.Module):
    """Tower features -> one row [D] for each cell of q x q patches, in reading order. GELU is the erf form."""

    def __init__(self, c: V4VisionConfig, width: int, make: Factory) -> None:
        super().__init__()
        self.q = c.vision_downsample_ratio
        self.w1 = Linear(c.vision_dim * self.q**2, width, make, bias=True)
        self.w2 = Linear(width, width, make, bias=True)

    def forward(self, features: Tensor, grid: Grid) -> Tensor:
        """One picture: [n, W] -> [cells, D]."""
        return self.mlp(merge_cells(features.unflatten(0, grid)[None], self.q, pad=True)[0])

    def packed(self, features: Tensor, grids: Sequence[Grid]) -> Tensor:
        """Several pictures one after the other, by a gather with a mask instead of a pad per picture."""
        index, mask = merge_index(grids, self.q)
        index, mask = index.to(features.device), mask.to(features.device)
        cells = features[index] * mask.unsqueeze(-1).to(features.dtype)  # [m, q*q, W]
        return self.mlp(cells.transpose(1, 2).flatten(1))

    def mlp(self, cells: Tensor) -> Tensor:
        out: Tensor = self.w2(F.gelu(self.w1(cells)))
        return out


def merge_index(grids: Sequence[Grid], q: int) -> tuple[Tensor, Tensor]:
    """Source rows [m, q*q] of each output cell in packed features, and a mask that is 0 outside a picture.

    Coordinates outside are clamped to the last row or column, so that the gather stays inside.
    """
    indices, masks, offset = [], [], 0
    for rows, cols in grids:
        y = (
            torch.arange(-(-rows // q))[:, None, None, None] * q
            + torch.arange(q)[None, None, :, None]
        )
        x = (
            torch.arange(-(-cols // q))[None, :, None, None] * q
            + torch.arange(q)[None, None, None, :]
        )
        inside = (y < rows) & (x < cols)
        source = offset + y.clamp(max=rows - 1) * cols + x.clamp(max=cols - 1)
        indices.append(source.flatten(2).flatten(0, 1))
        masks.append(inside.flatten(2).flatten(0, 1))
        offset += rows * cols
    return torch.cat(indices), torch.cat(masks)
