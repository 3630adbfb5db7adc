"""What pictures cost in tokens, for each model family."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from foveal.cli.output import table
from foveal.cli.parser import UsageError
from foveal.models.config import VL2Config, read_json
from foveal.models.fit import PictureCost, picture_cost, picture_costs
from foveal.models.v4_config import V4Config


@dataclass(frozen=True, slots=True)
class V4PictureCost:
    """A picture of `patches` (rows, cols) in the tower and `cells` (rows, cols) in the prompt.

    `num_tokens` counts its block without alignment pads, of which up to 3 come before it, by its position.
    """

    patches: tuple[int, int]
    cells: tuple[int, int]
    num_tokens: int
    most_tokens: int


@dataclass(frozen=True, slots=True)
class NamedCost:
    """A picture the user named, and what it costs."""

    picture: str
    width: int
    height: int
    cost: PictureCost | V4PictureCost

    @property
    def most_tokens(self) -> int:
        return self.cost.num_tokens if isinstance(self.cost, PictureCost) else self.cost.most_tokens


@dataclass(frozen=True, slots=True)
class TokenRange:
    """Tokens of any picture; `least` is None where it is not known."""

    least: int | None
    most: int

    @property
    def text(self) -> str:
        start = "at most" if self.least is None else f"{self.least:,} to"
        return f"a picture costs {start} {self.most:,} tokens"


def vl2_range(config: VL2Config) -> TokenRange:
    costs = picture_costs(config)
    return TokenRange(costs[0].num_tokens, costs[-1].num_tokens)


def v4_range(config: V4Config) -> TokenRange | None:
    """None for a model without a tower."""
    return None if config.vision is None else TokenRange(None, config.vision.vision_max_n_token)


def vl2_costs(folder: Path, config: VL2Config, pictures: Sequence[str]) -> list[NamedCost]:
    if not pictures:
        return []
    from foveal.vision.vl2 import VL2ImageConfig, grid_for, is_tiled

    settings = folder / "processor_config.json"
    image_config = VL2ImageConfig.from_dict(
        read_json(settings)
        if settings.is_file()
        else {
            "candidate_resolutions": config.candidate_resolutions,
            "patch_size": config.vision.patch_size,
            "downsample_ratio": config.projector.downsample_ratio,
        }
    )
    costs = []
    for name in pictures:
        width, height = picture_size(name)
        grid = grid_for(width, height, image_config, tiled=is_tiled(len(pictures)))
        costs.append(NamedCost(name, width, height, picture_cost(config, *grid)))
    return costs


def v4_costs(folder: Path, values: Mapping[str, Any], pictures: Sequence[str]) -> list[NamedCost]:
    """`values` is the parsed `config.json`, which has the rules for pictures."""
    if not pictures:
        return []
    if not values.get("vision_n_layers"):
        raise UsageError(f"--image: {folder.name} is a text model and takes no pictures")
    from foveal.vision.v4 import (
        MAX_PADS,
        V4ImageConfig,
        block_length,
        llm_grid_for,
        vit_grid_for,
    )

    image_config = V4ImageConfig.from_dict(values)
    costs = []
    for name in pictures:
        width, height = picture_size(name)
        patches = vit_grid_for(width, height, image_config)
        cells = llm_grid_for(patches, image_config)
        length = block_length(cells)
        cost = V4PictureCost(patches, cells, length, length + MAX_PADS)
        costs.append(NamedCost(name, width, height, cost))
    return costs


def picture_size(name: str) -> tuple[int, int]:
    """Width and height in pixels, from "640x480" or from a picture file."""
    match = re.fullmatch(r"(\d{1,9})[xX×](\d{1,9})", name)
    if match is not None:
        width, height = int(match[1]), int(match[2])
        if min(width, height) < 1:
            raise UsageError(f"--image {name}: both sides must be at least 1 pixel")
        return width, height
    if not Path(name).is_file():
        raise UsageError(f"--image {name!r} is neither WIDTHxHEIGHT (640x480) nor a picture file")
    from foveal.vision.decode import load_picture

    picture = load_picture(name)
    return picture.width, picture.height


def pictures_text(reach: TokenRange | None, costs: Sequence[NamedCost]) -> str:
    if reach is None:
        return "a text model: it takes no pictures"
    if not costs:
        return reach.text + " (--image 1920x1080 says it for one)"
    is_v4 = isinstance(costs[0].cost, V4PictureCost)
    rows = [["picture", "size", "cells" if is_v4 else "tiles", "tokens"]]
    for named in costs:
        size = f"{named.width}x{named.height}"
        rows.append([named.picture, size, _shape_text(named.cost), _tokens_text(named.cost)])
    if len(costs) > 1:
        most = sum(named.most_tokens for named in costs)
        rows.append(["together", "", "", f"up to {most:,}" if is_v4 else f"{most:,}"])
    return reach.text + "\n" + table(rows, right=(3,))


def _shape_text(cost: PictureCost | V4PictureCost) -> str:
    if isinstance(cost, PictureCost):
        return f"{cost.num_tiles} (1 + {cost.cols}x{cost.rows})"
    (rows, cols), (y, x) = cost.cells, cost.patches
    return f"{cols}x{rows} (of {x}x{y} patches)"


def _tokens_text(cost: PictureCost | V4PictureCost) -> str:
    if isinstance(cost, PictureCost):
        return f"{cost.num_tokens:,}"
    return f"{cost.num_tokens:,} to {cost.most_tokens:,}"
