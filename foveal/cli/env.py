"""`foveal env`: what a bug report needs to know of the machine and the installation. Shows no secret."""

from __future__ import annotations

import argparse
import os
import platform
import sys
from collections.abc import Callable, Mapping
from importlib import metadata
from typing import Any

from foveal import __version__
from foveal.cli.output import bytes_text, table, write_json
from foveal.cli.parser import Parser
from foveal.models.hub import shipped_models

DEPENDENCIES = ("torch", "numpy", "safetensors", "tokenizers", "huggingface_hub", "pillow", "tqdm")
# Flags that decide how fast arithmetic is, by the name torch gives them.
CPU_FLAGS = ("avx2", "avx512_f", "avx512_vnni", "avx_vnni", "avx512_bf16", "amx_bf16", "amx_int8")
VARIABLES = (
    "CUDA_VISIBLE_DEVICES",
    "HF_HOME",
    "HF_HUB_OFFLINE",
    "MKL_NUM_THREADS",
    "OMP_NUM_THREADS",
)


def add_arguments(parser: Parser) -> None:
    parser.add_argument("--json", action="store_true", help="print one JSON object")


def run(arguments: argparse.Namespace) -> int:
    facts = collect()
    if arguments.json:
        write_json(facts)
    else:
        print(table(list(_rows(facts))))
    return 0


def collect() -> dict[str, Any]:
    """All facts as JSON-ready values; a fact that this machine does not give is None."""
    return {
        "foveal": __version__,
        "python": platform.python_version(),
        "platform": platform.platform(),
        "dependencies": {name: _version_of(name) for name in DEPENDENCIES},
        "cpu": _cpu(),
        "memory": _memory(),
        "devices": _devices(),
        "models": shipped_models(),
        "hub_cache": _hub_cache(),
        "variables": {name: os.environ[name] for name in VARIABLES if name in os.environ},
    }


def _version_of(name: str) -> str | None:
    try:
        return metadata.version(name)
    except metadata.PackageNotFoundError:
        return None


def _cpu() -> dict[str, Any]:
    import torch

    # Not in every torch that Foveal takes, and not typed.
    read: Callable[[], Mapping[str, Any]] | None = getattr(torch.cpu, "get_capabilities", None)
    known: Mapping[str, Any] = read() if read is not None else {}
    return {
        "name": known.get("cpu_name") or platform.processor() or None,
        "cores": os.cpu_count(),
        "usable_cores": len(os.sched_getaffinity(0)) if sys.platform == "linux" else os.cpu_count(),
        "torch_threads": torch.get_num_threads(),
        "torch_capability": torch.backends.cpu.get_cpu_capability(),
        "flags": {flag: bool(known[flag]) for flag in CPU_FLAGS if flag in known},
    }


def _memory() -> dict[str, int | None]:
    """Bytes of memory: the machine's, and what this process may still take."""
    from foveal.models.memory import available_bytes, total_bytes

    return {"total": total_bytes(), "available": available_bytes()}


def _devices() -> list[dict[str, Any]]:
    import torch

    devices: list[dict[str, Any]] = [{"device": "cpu", "name": platform.machine()}]
    for index in range(torch.cuda.device_count()):
        properties = torch.cuda.get_device_properties(index)
        devices.append(
            {"device": f"cuda:{index}", "name": properties.name, "memory": properties.total_memory}
        )
    return devices


def _hub_cache() -> str:
    from huggingface_hub.constants import HF_HUB_CACHE

    return HF_HUB_CACHE


def _rows(facts: Mapping[str, Any]) -> list[tuple[str, str]]:
    cpu, memory = facts["cpu"], facts["memory"]
    flags = [name for name, is_there in cpu["flags"].items() if is_there]
    rows = [
        ("foveal", facts["foveal"]),
        ("python", f"{facts['python']} on {facts['platform']}"),
        *((name, value or "missing") for name, value in facts["dependencies"].items()),
        (
            "cpu",
            f"{cpu['name'] or 'unknown'}, {cpu['usable_cores']} of {cpu['cores']} cores usable",
        ),
        ("cpu flags", " ".join(flags) or "unknown"),
        ("torch", f"{cpu['torch_threads']} threads, {cpu['torch_capability']} kernels"),
        ("memory", ", ".join(f"{bytes_text(v)} {k}" for k, v in memory.items() if v) or "unknown"),
    ]
    for device in facts["devices"]:
        size = f", {bytes_text(device['memory'])}" if "memory" in device else ""
        rows.append((device["device"], f"{device['name']}{size}"))
    rows.append(("models", ", ".join(facts["models"]) or "none shipped"))
    rows.append(("hub cache", facts["hub_cache"]))
    rows.extend(sorted(facts["variables"].items()))
    return rows
