"""DeepSeek-VL2 as one module: tower, projector, two-dimensional arrangement, language model. Source: spec 4-6.

Legend: B tiles, N patches a tile, g cells a side after the projector, D hidden width.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor, nn

from foveal.models.config import ProjectorConfig, VL2Config
from foveal.models.context import AttentionContext
from foveal.models.deepseek_lm import DeepseekLM
from foveal.models.layers import Factory, Linear, merge_cells
from foveal.models.names import projector_layer_sizes
from foveal.models.siglip import SiglipTower, VisionMode


class Projector(nn.Module):
    """Tower features [B, N, W] -> rows [B, g*g, D]. GELU is the erf form here. Source: spec 5.1-5.2."""

    def __init__(self, config: VL2Config, make: Factory) -> None:
        super().__init__()
        self.config: ProjectorConfig = config.projector
        width = self.config.input_dim
        if self.config.token_pooling:
            self.token_pooling_layer = Linear(4 * width, width, make, bias=True)
        sizes = projector_layer_sizes(config)
        if self.config.projector_type == "linear":
            self.layers: nn.Module = Linear(width, self.config.n_embed, make, bias=True)
        else:
            # Odd places stand for the activations, so that linear maps keep the checkpoint's even numbers.
            modules: list[nn.Module] = []
            for _, outputs, inputs in sizes:
                modules += [Linear(inputs, outputs, make, bias=True), nn.GELU()]
            self.layers = nn.Sequential(*modules[:-1])

    def forward(self, x: Tensor) -> Tensor:
        side = int(x.shape[1] ** 0.5)
        if self.config.token_pooling:
            x = self.token_pooling_layer(merge_cells(x.unflatten(1, (side, side)), 2, pad=False))
        elif self.config.projector_type == "downsample_mlp_gelu":
            k = self.config.downsample_ratio
            x = merge_cells(x.unflatten(1, (side, side)), k, pad=True)
        out: Tensor = self.layers(x)
        return out


class VL2Model(nn.Module):
    """All parameters of a DeepSeek-VL2 checkpoint on one device.

    `vision` and `language` say in which types the two halves keep and compute their numbers.
    """

    def __init__(
        self,
        config: VL2Config,
        *,
        vision: Factory | None = None,
        language: Factory | None = None,
        vision_mode: VisionMode = "official",
    ) -> None:
        super().__init__()
        vision, language = vision or Factory(), language or Factory()
        self.config = config
        self.vision = SiglipTower(config.vision, vision, vision_mode)
        self.projector = Projector(config, vision)
        self.image_newline = vision.empty(config.projector.n_embed)
        self.view_seperator = vision.empty(config.projector.n_embed)
        self.language = DeepseekLM(config.language, language)

    @property
    def device(self) -> torch.device:
        return self.image_newline.device

    def encode_tiles(self, pixels: Tensor) -> Tensor:
        """Normalised tiles [B, 3, S, S] -> rows [B, g*g, D] float32."""
        out: Tensor = self.projector(self.vision(pixels))
        return out.float()

    def assemble(self, tiles: Tensor, grid: tuple[int, int]) -> Tensor:
        """Lay out one picture's tiles [1 + cols*rows, g*g, D] as its placeholder rows [length, D] (spec 5.3).

        Each row of the global view and of the local mosaic ends with the newline vector; a separator stands between the
        two views, which come in the order that the configuration says.
        """
        cols, rows = grid
        g = int(tiles.shape[1] ** 0.5)
        width = tiles.shape[-1]
        newline, separator = self.image_newline.to(tiles.dtype), self.view_seperator.to(tiles.dtype)
        cells = tiles[1:].reshape(rows, cols, g, g, width)
        mosaic = cells.permute(0, 2, 1, 3, 4).reshape(rows * g, cols * g, width)
        views = [self._with_newlines(v, newline) for v in (tiles[0].reshape(g, g, width), mosaic)]
        if self.config.global_view_pos != "head":
            views.reverse()
        return torch.cat((views[0], separator[None], views[1]))

    @staticmethod
    def _with_newlines(view: Tensor, newline: Tensor) -> Tensor:
        ends = newline.expand(view.shape[0], 1, -1)
        return torch.cat((view, ends), 1).flatten(0, 1)

    def embed(self, ids: Tensor, pictures: Sequence[tuple[int, Tensor]] = ()) -> Tensor:
        """Rows of the language model's input: the table's rows for `ids` [T], overwritten by (start, rows) pieces."""
        rows = self.language.embed(ids)
        for start, piece in pictures:
            rows[start : start + piece.shape[0]] = piece.to(rows.dtype)
        return rows

    def forward(self, rows: Tensor, positions: Tensor, ctx: AttentionContext) -> Tensor:
        """Input rows [T, D] float32 -> hidden rows [T, D] after the final norm."""
        out: Tensor = self.language(rows, positions, ctx)
        return out

    def logits(self, hidden: Tensor) -> Tensor:
        return self.language.logits(hidden)
