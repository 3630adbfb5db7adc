"""The vision tower of DeepSeek-VL2: a SigLIP trunk without pooling. Source: spec section 4.

Legend: B tiles, S tile side in pixels, N patches a tile, W width.

Two modes give different numbers for the same weights (spec 4.6). "official" drops the pixels beyond the
last whole patch and uses the tanh form of GELU; the checkpoints were trained with it. "timm-pad" is what
engines built on timm compute: the tile is zero-padded to whole patches, the position table is resampled,
and GELU is the erf form. It exists to compare with such engines.
"""

from __future__ import annotations

from typing import Literal, TypeAlias

from torch import Tensor, nn
from torch.nn import functional as F

from foveal import ops
from foveal.models.config import VisionConfig
from foveal.models.layers import Factory, Linear

VisionMode: TypeAlias = Literal["official", "timm-pad"]
LAYER_NORM_EPS = 1e-6


class LayerNorm(nn.Module):
    """Float32 inside; the result has the activation type."""

    def __init__(self, width: int, make: Factory) -> None:
        super().__init__()
        self.weight, self.bias = make.empty32(width), make.empty32(width)
        self.act_dtype = make.act_dtype

    def forward(self, x: Tensor) -> Tensor:
        normed = F.layer_norm(x, (x.shape[-1],), self.weight, self.bias, LAYER_NORM_EPS)
        return normed.to(self.act_dtype)


class PatchKernel(nn.Module):
    """Weights of a convolution whose stride is its kernel size."""

    def __init__(self, config: VisionConfig, make: Factory) -> None:
        super().__init__()
        self.weight = make.empty(config.width, 3, config.patch_size, config.patch_size)
        self.bias = make.empty(config.width)


class PatchEmbed(nn.Module):
    """Non-overlapping patches through one linear map."""

    def __init__(self, config: VisionConfig, make: Factory) -> None:
        super().__init__()
        self.patch_size, self.act_dtype = config.patch_size, make.act_dtype
        self.proj = PatchKernel(config, make)

    def forward(self, pixels: Tensor) -> Tensor:
        """[B, 3, S, S] -> [B, (S // p)**2, W], rows of patches first; a rest of pixels is not seen."""
        p, grid = self.patch_size, pixels.shape[-1] // self.patch_size
        used = pixels[..., : grid * p, : grid * p]
        patches = used.unflatten(-1, (grid, p)).unflatten(-3, (grid, p))  # [B, 3, gy, p, gx, p]
        rows = patches.permute(0, 2, 4, 1, 3, 5).flatten(3).flatten(1, 2)
        weight = self.proj.weight.flatten(1)
        return ops.linear(rows.to(self.act_dtype), weight, self.proj.bias)


class Attention(nn.Module):
    def __init__(self, config: VisionConfig, make: Factory) -> None:
        super().__init__()
        self.heads = config.heads
        self.qkv = Linear(config.width, 3 * config.width, make, bias=True)
        self.proj = Linear(config.width, config.width, make, bias=True)

    def forward(self, x: Tensor) -> Tensor:
        """[B, N, W] -> [B, N, W]; every patch of a tile sees every other."""
        q, k, v = self.qkv(x).unflatten(-1, (3, self.heads, -1)).unbind(2)
        mixed = ops.encoder_attention(q, k, v, q.shape[-1] ** -0.5)
        out: Tensor = self.proj(mixed.flatten(-2))
        return out


class MLP(nn.Module):
    def __init__(self, config: VisionConfig, make: Factory, approximate: str) -> None:
        super().__init__()
        self.fc1 = Linear(config.width, config.mlp_hidden, make, bias=True)
        self.fc2 = Linear(config.mlp_hidden, config.width, make, bias=True)
        self.approximate = approximate

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.fc2(F.gelu(self.fc1(x), approximate=self.approximate))
        return out


class Block(nn.Module):
    def __init__(self, config: VisionConfig, make: Factory, approximate: str) -> None:
        super().__init__()
        self.norm1, self.attn = LayerNorm(config.width, make), Attention(config, make)
        self.norm2, self.mlp = LayerNorm(config.width, make), MLP(config, make, approximate)

    def forward(self, x: Tensor) -> Tensor:
        """`x` [B, N, W] float32: the residual stream."""
        x = x + self.attn(self.norm1(x))
        out: Tensor = x + self.mlp(self.norm2(x))
        return out


class SiglipTower(nn.Module):
    """`forward` [B, 3, S, S] normalised pixels -> [B, N, W] features after the final norm."""

    def __init__(self, config: VisionConfig, make: Factory, mode: VisionMode = "official") -> None:
        super().__init__()
        self.config, self.mode = config, mode
        self.patch_embed = PatchEmbed(config, make)
        self.pos_embed = make.empty32(1, config.grid**2, config.width)
        approximate = "tanh" if mode == "official" else "none"
        self.blocks = nn.ModuleList(Block(config, make, approximate) for _ in range(config.layers))
        self.norm = LayerNorm(config.width, make)

    def forward(self, pixels: Tensor) -> Tensor:
        x = self.embed(pixels)
        for block in self.blocks:
            x = block(x)
        out: Tensor = self.norm(x)
        return out

    def embed(self, pixels: Tensor) -> Tensor:
        """Patches with their positions, [B, N, W] float32."""
        if self.mode == "timm-pad":
            rest = -pixels.shape[-1] % self.config.patch_size
            pixels = F.pad(pixels, (0, rest, 0, rest))
        patches: Tensor = self.patch_embed(pixels)
        return patches.float() + self._positions(pixels.shape[-1])

    def _positions(self, side: int) -> Tensor:
        """The position table, resampled where the mode sees another number of patches than was stored."""
        stored, wanted = self.config.grid, side // self.config.patch_size
        if stored == wanted:
            return self.pos_embed
        table = self.pos_embed.float().unflatten(1, (stored, stored)).permute(0, 3, 1, 2)
        resampled = F.interpolate(table, size=(wanted, wanted), mode="bicubic", antialias=True)
        return resampled.permute(0, 2, 3, 1).flatten(1, 2)
