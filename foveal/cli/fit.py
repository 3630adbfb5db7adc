"""`foveal fit MODEL`: what a model needs, and whether this machine has it, before anything is loaded."""

from __future__ import annotations

import argparse
import dataclasses
import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from foveal.cli.output import bytes_text, table, write_json
from foveal.cli.parser import Parser, UsageError
from foveal.models.config import VL2Config, read_json
from foveal.models.fit import (
    MemoryPlan,
    ModelFiles,
    PictureCost,
    inspect_folder,
    picture_cost,
    picture_costs,
    plan_memory,
)
from foveal.models.hub import resolve_model
from foveal.models.memory import available_bytes
from foveal.models.registry import detect_family


@dataclass(frozen=True, slots=True)
class NamedCost:
    """A picture the user named, and what it costs."""

    picture: str
    width: int
    height: int
    cost: PictureCost


def add_arguments(parser: Parser) -> None:
    parser.add_argument(
        "model",
        metavar="MODEL",
        help="folder (config.json is enough), hub id or shipped model",
    )
    parser.add_argument(
        "--image",
        action="append",
        default=[],
        metavar="WIDTHxHEIGHT|FILE",
        help="say how many tokens this picture costs; repeat for a conversation with several",
    )
    parser.add_argument(
        "--context", type=int, metavar="N", help="tokens to keep room for (default: all it can)"
    )
    parser.add_argument("--device", choices=("auto", "cpu", "cuda"), default="auto")
    parser.add_argument("--json", action="store_true", help="print one JSON object")


def run(arguments: argparse.Namespace) -> int:
    if arguments.context is not None and arguments.context < 1:
        raise UsageError(f"--context {arguments.context} is not possible; give at least 1 token")
    folder = resolve_model(arguments.model, weights=False)
    values = read_json(folder / "config.json")
    detect_family(values)
    config = VL2Config.from_dict(values)
    costs = _costs(folder, config, arguments.image)
    device, free = _room(arguments.device)
    plan = plan_memory(config, available_bytes=free, context=arguments.context, device=device)
    files = inspect_folder(folder, config)
    if arguments.json:
        write_json(_as_json(folder, config, plan, files, costs, device))
    else:
        print(_as_text(folder, config, plan, files, costs, device))
    return 0


def _room(wanted: str) -> tuple[Literal["cpu", "cuda"], int | None]:
    """The kind of device that would be used, and its free bytes."""
    if wanted == "cpu":
        return "cpu", available_bytes()
    import torch

    from foveal.models.precision import resolve_device

    device = resolve_device(wanted)
    if device.type == "cpu":
        return "cpu", available_bytes()
    return "cuda", int(torch.cuda.mem_get_info(device)[0])


def _costs(folder: Path, config: VL2Config, pictures: Sequence[str]) -> list[NamedCost]:
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
        width, height = _size(name)
        grid = grid_for(width, height, image_config, tiled=is_tiled(len(pictures)))
        costs.append(NamedCost(name, width, height, picture_cost(config, *grid)))
    return costs


def _size(name: str) -> tuple[int, int]:
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


def _as_json(
    folder: Path,
    config: VL2Config,
    plan: MemoryPlan,
    files: ModelFiles,
    costs: list[NamedCost],
    device: str,
) -> dict[str, Any]:
    cheapest, dearest = _range(config)
    return {
        "model": folder.name,
        "device": device,
        "files": dataclasses.asdict(files),
        "memory": dataclasses.asdict(plan),
        "fits": None if plan.available_bytes is None else list(plan.fitting),
        "tokens_per_picture": {"least": cheapest.num_tokens, "most": dearest.num_tokens},
        "pictures": [dataclasses.asdict(cost) for cost in costs],
        "picture_tokens": sum(cost.cost.num_tokens for cost in costs),
    }


def _range(config: VL2Config) -> tuple[PictureCost, PictureCost]:
    costs = picture_costs(config)
    return costs[0], costs[-1]


def _as_text(
    folder: Path,
    config: VL2Config,
    plan: MemoryPlan,
    files: ModelFiles,
    costs: list[NamedCost],
    device: str,
) -> str:
    free = "unknown" if plan.available_bytes is None else bytes_text(plan.available_bytes)
    source = {"index": "the index", "files": "the files", "config": "config.json"}[files.source]
    lines = [
        f"{folder.name}: {files.num_tensors:,} tensors ({source}), {_count_text(plan.num_parameters)} parameters",
        *_file_problems(files, plan),
        f"free on this machine's {device}: {free}; room for {plan.context:,} tokens of context",
        "",
        _formats_table(plan),
        "",
        _pictures_text(config, costs),
        "",
        _verdict(plan, free),
    ]
    return "\n".join(lines)


def _file_problems(files: ModelFiles, plan: MemoryPlan) -> list[str]:
    problems = (
        ("missing tensors", files.missing),
        ("tensors of no such model", files.extra),
        ("weight files not there yet", files.missing_files),
    )
    lines = [
        f"{what}: {len(names):,} ({', '.join(names[:3])}{', ...' if len(names) > 3 else ''})"
        for what, names in problems
        if names
    ]
    if files.source != "config" and files.num_tensors != plan.num_tensors:
        lines.append(
            f"a complete checkpoint of this configuration has {plan.num_tensors:,} tensors"
        )
    return lines


def _formats_table(plan: MemoryPlan) -> str:
    rows = [
        ["format", "weights", "cache", "activations", "process", "total", "fits", "longest context"]
    ]
    words = {True: "yes", False: "no", None: "unknown"}
    for row in plan.formats:
        parts = (
            row.weight_bytes,
            row.cache_bytes,
            row.activation_bytes,
            plan.process_bytes,
            row.total_bytes,
        )
        longest = "-" if row.largest_context is None else f"{row.largest_context:,}"
        rows.append([row.name, *map(bytes_text, parts), words[row.fits], longest])
    return table(rows, right=range(1, 8))


def _pictures_text(config: VL2Config, costs: list[NamedCost]) -> str:
    cheapest, dearest = _range(config)
    text = f"a picture costs {cheapest.num_tokens:,} to {dearest.num_tokens:,} tokens"
    if not costs:
        return text + " (--image 1920x1080 says it for one)"
    rows = [["picture", "size", "tiles", "tokens"]]
    for named in costs:
        cost = named.cost
        tiles = f"{cost.num_tiles} (1 + {cost.cols}x{cost.rows})"
        size = f"{named.width}x{named.height}"
        rows.append([named.picture, size, tiles, f"{cost.num_tokens:,}"])
    if len(costs) > 1:
        total = sum(named.cost.num_tokens for named in costs)
        rows.append(["together", "", "", f"{total:,}"])
    return text + "\n" + table(rows, right=(3,))


def _verdict(plan: MemoryPlan, free: str) -> str:
    if plan.available_bytes is None:
        return "whether it fits cannot be told: this machine does not say how much memory is free"
    if plan.fitting:
        return "fits in " + ", ".join(plan.fitting)
    least = min(plan.formats, key=lambda row: row.total_bytes)
    step = (
        f"shorten --context to {least.largest_context:,}"
        if least.largest_context
        else "use a smaller model or a machine with more memory"
    )
    return f"does not fit: {least.name} needs {bytes_text(least.total_bytes)} and {free} are free; {step}"


def _count_text(count: int) -> str:
    return f"{count / 1e9:.3g} B" if count >= 1e9 else f"{count / 1e6:.3g} M"
