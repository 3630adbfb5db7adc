"""From a folder to its family."""

from __future__ import annotations

from pathlib import Path

from foveal.families.base import Family, LoadOptions
from foveal.families.v4 import V4Family
from foveal.families.vl2 import VL2Family
from foveal.models.config import read_json
from foveal.models.registry import detect_family


def open_family(folder: Path, options: LoadOptions) -> Family:
    """Load the model in `folder`. Raises CheckpointError, ResourceError, PromptError."""
    values = read_json(folder / "config.json")
    if detect_family(values) == "deepseek_v4":
        return V4Family(folder, values, options)
    return VL2Family(folder, values, options)
