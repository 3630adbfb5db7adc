"""The tower against a second, plain statement of the two published variants (spec section 4)."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F

from foveal.models.siglip import SiglipTower, VisionMode
from tests import toy


def plain_tower(tower: SiglipTower, pixels: Tensor, *, pad: bool, approximate: str) -> Tensor:
    p, heads = tower.config.patch_size, tower.config.heads
    table = tower.pos_embed
    if pad:
        rest = -pixels.shape[-1] % p
        pixels = F.pad(pixels, (0, rest, 0, rest))
        side, new = tower.config.grid, pixels.shape[-1] // p
        square = table.reshape(1, side, side, -1).permute(0, 3, 1, 2)
        table = F.interpolate(square, (new, new), mode="bicubic", antialias=True)
        table = table.flatten(2).transpose(1, 2)
    kernel = tower.patch_embed.proj
    x = F.conv2d(pixels, kernel.weight, kernel.bias, stride=p).flatten(2).transpose(1, 2) + table
    for block in tower.blocks:
        y = F.layer_norm(x, (x.shape[-1],), block.norm1.weight, block.norm1.bias, 1e-6)
        q, k, v = F.linear(y, block.attn.qkv.weight, block.attn.qkv.bias).chunk(3, -1)
        q, k, v = (t.unflatten(-1, (heads, -1)).transpose(1, 2) for t in (q, k, v))
        weights = (q @ k.transpose(-1, -2) * q.shape[-1] ** -0.5).softmax(-1)
        mixed = (weights @ v).transpose(1, 2).flatten(2)
        x = x + F.linear(mixed, block.attn.proj.weight, block.attn.proj.bias)
        y = F.layer_norm(x, (x.shape[-1],), block.norm2.weight, block.norm2.bias, 1e-6)
        y = F.gelu(F.linear(y, block.mlp.fc1.weight, block.mlp.fc1.bias), approximate=approximate)
        x = x + F.linear(y, block.mlp.fc2.weight, block.mlp.fc2.bias)
    return F.layer_norm(x, (x.shape[-1],), tower.norm.weight, tower.norm.bias, 1e-6)


@pytest.mark.parametrize("mode", ["official", "timm-pad"])
@pytest.mark.parametrize("image_size", [28, 30])  # whole patches, and a rest of two pixels
def test_tower_equals_the_plain_statement(mode: VisionMode, image_size: int) -> None:
    vision = toy.VISION | {"image_size": image_size}
    tower = toy.model(vision_config=vision, vision_mode=mode).vision
    pixels = torch.randn(3, 3, image_size, image_size, generator=torch.Generator().manual_seed(1))
    is_padded = mode == "timm-pad"
    expected = plain_tower(
        tower, pixels, pad=is_padded, approximate="none" if is_padded else "tanh"
    )
    patches = -(-image_size // 4) if is_padded else image_size // 4
    assert expected.shape == (3, patches**2, 32)
    torch.testing.assert_close(tower(pixels), expected, rtol=1e-4, atol=2e-5)


def test_official_mode_never_sees_the_rest_of_the_pixels() -> None:
    tower = toy.model(vision_config=toy.VISION | {"image_size": 30}).vision
    pixels = torch.zeros(1, 3, 30, 30)
    changed = pixels.clone()
    changed[..., 28:, :] = 9.0
    changed[..., :, 28:] = -9.0
    assert torch.equal(tower(pixels), tower(changed))


def test_modes_differ_where_a_rest_exists() -> None:
    vision = toy.VISION | {"image_size": 30}
    pixels = torch.randn(1, 3, 30, 30, generator=torch.Generator().manual_seed(2))
    official = toy.model(vision_config=vision).encode_tiles(pixels)
    padded = toy.model(vision_config=vision, vision_mode="timm-pad").encode_tiles(pixels)
    assert official.shape == padded.shape, "both give the same number of rows a tile"
    assert (official - padded).abs().max() > 0.1
