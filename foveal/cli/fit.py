"""`foveal fit MODEL`: what a model needs, and whether this machine has it, before anything is loaded."""

from __future__ import annotations

import argparse
import dataclasses
from dataclasses import dataclass
from typing import Any, Literal

from foveal.cli.fit_pictures import (
    NamedCost,
    TokenRange,
    pictures_text,
    v4_costs,
    v4_range,
    vl2_costs,
    vl2_range,
)
from foveal.cli.output import bytes_text, table, write_json
from foveal.cli.parser import Parser, UsageError
from foveal.models.config import VL2Config, read_json
from foveal.models.fit import MemoryPlan, ModelFiles, inspect_folder, plan_memory
from foveal.models.hub import resolve_model
from foveal.models.memory import available_bytes
from foveal.models.registry import detect_family
from foveal.models.v4_config import V4Config
from foveal.models.v4_fit import inspect_v4_folder, plan_v4_memory

DeviceKind = Literal["cpu", "cuda"]


@dataclass(frozen=True, slots=True)
class Facts:
    """All that the command says about a model. `reach` is None where it takes no pictures."""

    name: str
    device: DeviceKind
    plan: MemoryPlan
    files: ModelFiles
    reach: TokenRange | None
    costs: list[NamedCost]


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
    device, free = _room(arguments.device)
    if detect_family(values) == "deepseek_v4":
        v4 = V4Config.from_dict(values)
        plan = plan_v4_memory(v4, available_bytes=free, context=arguments.context, device=device)
        costs, reach = v4_costs(folder, values, arguments.image), v4_range(v4)
        files = inspect_v4_folder(folder, v4)
    else:
        vl2 = VL2Config.from_dict(values)
        plan = plan_memory(vl2, available_bytes=free, context=arguments.context, device=device)
        costs, reach = vl2_costs(folder, vl2, arguments.image), vl2_range(vl2)
        files = inspect_folder(folder, vl2)
    facts = Facts(folder.name, device, plan, files, reach, costs)
    if arguments.json:
        write_json(_as_json(facts))
    else:
        print(_as_text(facts))
    return 0


def _room(wanted: str) -> tuple[DeviceKind, int | None]:
    """The kind of device that would be used, and its free bytes."""
    if wanted == "cpu":
        return "cpu", available_bytes()
    import torch

    from foveal.models.precision import resolve_device

    device = resolve_device(wanted)
    if device.type == "cpu":
        return "cpu", available_bytes()
    return "cuda", int(torch.cuda.mem_get_info(device)[0])


def _as_json(facts: Facts) -> dict[str, Any]:
    plan = facts.plan
    return {
        "model": facts.name,
        "device": facts.device,
        "files": dataclasses.asdict(facts.files),
        "memory": dataclasses.asdict(plan),
        "fits": None if plan.available_bytes is None else list(plan.fitting),
        "tokens_per_picture": None if facts.reach is None else dataclasses.asdict(facts.reach),
        "pictures": [dataclasses.asdict(cost) for cost in facts.costs],
        "picture_tokens": sum(cost.most_tokens for cost in facts.costs),
    }


def _as_text(facts: Facts) -> str:
    plan, files = facts.plan, facts.files
    free = "unknown" if plan.available_bytes is None else bytes_text(plan.available_bytes)
    source = {"index": "the index", "files": "the files", "config": "config.json"}[files.source]
    size = _count_text(plan.num_parameters) + " parameters"
    if plan.file_bytes is not None:
        size += f", {bytes_text(plan.file_bytes)} in files"
    per_token = sorted({row.cache_bytes_per_token for row in plan.formats})
    lines = [
        f"{facts.name}: {files.num_tensors:,} tensors ({source}), {size}",
        *_file_problems(files, plan),
        f"free on this machine's {facts.device}: {free}; room for {plan.context:,} tokens of context",
        "",
        _formats_table(plan),
        f"each further token takes {' or '.join(map(bytes_text, per_token))} of cache",
        "",
        pictures_text(facts.reach, facts.costs),
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
