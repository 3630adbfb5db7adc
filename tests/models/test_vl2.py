from __future__ import annotations

import pytest
import torch
from torch.nn import functional as F

from foveal.models.layers import merge_cells
from tests import toy

# The 23 tile grids of the shipped models: all (cols, rows) with at most nine tiles.
GRIDS = [(c, r) for c in range(1, 10) for r in range(1, 10) if c * r <= 9]


def test_there_are_23_grids() -> None:
    assert len(GRIDS) == 23


@pytest.mark.parametrize("position", ["head", "tail"])
@pytest.mark.parametrize("grid", GRIDS)
def test_rows_of_a_picture_follow_the_inverse_map(grid: tuple[int, int], position: str) -> None:
    """Tile t, cell c holds t*1000+c; the inverse map of spec 5.3 must find it for every row."""
    cols, rows = grid
    model = toy.model(global_view_pos=position)
    model.image_newline.data.fill_(-1.0)
    model.view_seperator.data.fill_(-2.0)
    g, tiles = 14, 1 + cols * rows
    value = torch.arange(tiles)[:, None] * 1000 + torch.arange(g * g)[None, :]
    out = model.assemble(value[..., None].expand(-1, -1, 48).float(), grid)
    assert torch.equal(out, out[:, :1].expand(-1, 48))
    expected_global = [float(r * g + c) if c < g else -1.0 for r in range(g) for c in range(g + 1)]
    width = g * cols + 1
    expected_local = []
    for p in range(g * rows * width):
        r, c = divmod(p, width)
        tile = 1 + (r // g) * cols + c // g
        expected_local.append(-1.0 if c == g * cols else tile * 1000.0 + (r % g) * g + c % g)
    views = [expected_global, expected_local]
    if position == "tail":
        views.reverse()
    assert out[:, 0].tolist() == [*views[0], -2.0, *views[1]]
    assert len(out) == 211 + 14 * rows * (14 * cols + 1)


def test_merge_puts_the_channel_slowest() -> None:
    """x[c, y, x] = 16c + 4y + x on 4x4: the first cell's two channels (spec 13, item 6)."""
    c, y, x = torch.meshgrid(torch.arange(2), torch.arange(4), torch.arange(4), indexing="ij")
    features = (16 * c + 4 * y + x).permute(1, 2, 0).reshape(1, 16, 2).float()
    merged = merge_cells(features.unflatten(1, (4, 4)), 2, pad=True)
    assert merged.shape == (1, 4, 8)
    assert merged[0, 0].tolist() == [0, 1, 4, 5, 16, 17, 20, 21]


@pytest.mark.parametrize(("side", "k"), [(7, 2), (7, 3), (6, 3), (4, 2), (3, 1), (2, 3)])
def test_merge_equals_unfold_after_padding_at_the_bottom_and_right(side: int, k: int) -> None:
    features = torch.randn(2, side * side, 5, generator=torch.Generator().manual_seed(side))
    square = features.transpose(1, 2).reshape(2, 5, side, side)
    rest = -side % k
    unfolded = F.unfold(F.pad(square, (0, rest, 0, rest)), k, stride=k).transpose(1, 2)
    assert torch.equal(merge_cells(features.unflatten(1, (side, side)), k, pad=True), unfolded)


def test_pooling_drops_the_rest_instead_of_padding() -> None:
    features = torch.randn(1, 49, 5, generator=torch.Generator().manual_seed(0))
    square = features.transpose(1, 2).reshape(1, 5, 7, 7)
    unfolded = F.unfold(square, 2, stride=2).transpose(1, 2)
    assert torch.equal(merge_cells(features.unflatten(1, (7, 7)), 2, pad=False), unfolded)


@pytest.mark.parametrize(
    ("projector", "side"),
    [
        ({}, 4),
        ({"downsample_ratio": 3}, 3),
        ({"projector_type": "linear"}, 7),
        ({"projector_type": "mlp_gelu", "depth": 3}, 7),
        ({"projector_type": "identity", "n_embed": 32}, 7),
        ({"projector_type": "linear", "token_pooling": True}, 3),
    ],
)
def test_projector_kinds_give_the_side_that_the_configuration_says(
    projector: dict[str, object], side: int
) -> None:
    values = toy.PROJECTOR | projector
    language = toy.MHA | {"hidden_size": values["n_embed"]}
    model = toy.model(language, projector_config=values)
    assert model.config.tokens_per_side == side
    tiles = model.encode_tiles(torch.zeros(2, 3, 28, 28))
    assert tiles.shape == (2, side * side, values["n_embed"])


def test_mlp_projector_uses_the_erf_form() -> None:
    model = toy.model(projector_config=toy.PROJECTOR | {"projector_type": "mlp_gelu"})
    first, _, second = model.projector.layers
    x = torch.randn(1, 4, 32, generator=torch.Generator().manual_seed(3)) * 3
    inner = F.gelu(F.linear(x, first.weight, first.bias), approximate="none")
    expected = F.linear(inner, second.weight, second.bias)
    torch.testing.assert_close(model.projector(x), expected)


def test_embed_overwrites_only_the_placeholders() -> None:
    model = toy.model()
    ids = torch.arange(10)
    piece = torch.full((3, 48), 7.0)
    rows = model.embed(ids, [(4, piece)])
    assert torch.equal(rows[4:7], piece)
    assert torch.equal(rows[:4], model.language.embed_tokens.weight[:4])
    assert torch.equal(rows[7:], model.language.embed_tokens.weight[7:10])
