"""DeepSeek-V4 as one module: backbone, and for vision checkpoints tower, aligner, learned vectors (V4 spec 7)."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor, nn

from foveal.models.context import SparseContext
from foveal.models.deepseek_v4 import DeepseekV4LM
from foveal.models.layers import Factory
from foveal.models.v4_config import V4Config
from foveal.models.v4_vision import Aligner, Grid, V4Tower
from foveal.types import IMAGE


class V4Model(nn.Module):
    """All parameters of a DeepSeek-V4 checkpoint on one device.

    `with_vision` False builds no tower, no aligner and no learned vectors; text is computed as before.
    """

    def __init__(
        self,
        config: V4Config,
        *,
        vision: Factory | None = None,
        language: Factory | None = None,
        with_vision: bool = True,
    ) -> None:
        super().__init__()
        vision, language = vision or Factory(), language or Factory()
        self.config = config
        self.language = DeepseekV4LM(
            config.language, language, has_vision=config.vision is not None
        )
        self.has_tower = config.vision is not None and with_vision
        if config.vision is not None and with_vision:
            width = config.language.hidden_size
            self.vision = V4Tower(config.vision, vision)
            self.aligner = Aligner(config.vision, width, vision)
            self.image_start, self.image_pad = vision.empty(width), vision.empty(width)
            self.image_newline, self.image_end = vision.empty(width), vision.empty(width)

    @property
    def device(self) -> torch.device:
        return self.language.norm.weight.device

    def encode_picture(self, patches: Tensor, grid: Grid) -> Tensor:
        """Patches [n, 3, p, p], rounded to bfloat16 numbers, -> aligner rows [cells, D] float32 in reading order."""
        out: Tensor = self.aligner(self.vision(patches, [grid]), grid)
        return out.float()

    def encode_packed(self, patches: Tensor, grids: Sequence[Grid]) -> Tensor:
        """Several pictures' patches one after the other -> their aligner rows one after the other."""
        return self.aligner.packed(self.vision(patches, grids), grids).float()

    def block_rows(self, types: Tensor, aligned: Tensor, perm: Tensor) -> Tensor:
        """Input rows [length, D] of one picture's block: learned vectors, and aligner rows in the block's order."""
        table = torch.stack(
            (self.image_start, self.image_pad, self.image_pad, self.image_newline, self.image_end)
        )
        rows = table[types].float()
        rows[types == IMAGE] = aligned[perm].float()
        return rows

    def embed(self, ids: Tensor, pictures: Sequence[tuple[int, Tensor]] = ()) -> Tensor:
        """The table's rows for raw `ids` [T], overwritten by (start, rows) pieces of pictures."""
        rows = self.language.embed(ids)
        for start, piece in pictures:
            rows[start : start + piece.shape[0]] = piece.to(rows.dtype)
        return rows

    def forward(self, rows: Tensor, positions: Tensor, ids: Tensor, ctx: SparseContext) -> Tensor:
        """Input rows [T, D] with raw ids [T] -> hidden rows [T, D] after the final norm."""
        return self.language.collapse(self.language(rows, positions, ids, ctx))

    def logits(self, hidden: Tensor) -> Tensor:
        return self.language.logits(hidden)
