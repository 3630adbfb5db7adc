"""Families are told by the keys of `config.json`; what this version does not run is refused by name."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from foveal.errors import CheckpointError
from foveal.models.registry import detect_family
from tests import v4_toy


@pytest.mark.parametrize("name", ["v4_vision_exp", "v4_flash_0731", "v4_transformers"])
def test_v4_configurations_are_recognised(repository: Path, name: str) -> None:
    values = json.loads((repository / "tests" / "data" / f"{name}_config.json").read_text())
    assert detect_family(values) == "deepseek_v4"
    assert detect_family({k: v for k, v in values.items() if k != "architectures"}) == "deepseek_v4"


@pytest.mark.parametrize("vision", [True, False])
def test_v4_needs_no_model_type(vision: bool) -> None:
    keys = {"hc_mult": 4, "compress_rope_theta": 160000}
    values = v4_toy.TEXT | (v4_toy.VISION if vision else {}) | keys
    del values["model_type"]
    assert detect_family(values) == "deepseek_v4"


@pytest.mark.parametrize(
    "values",
    [
        {"model_type": "deepseek_v41"},
        {"model_type": "deepseek_v41", "architectures": ["DeepseekV4ForCausalLM"]},
        v4_toy.TEXT | v4_toy.VISION | {"model_type": "deepseek_v41"},
    ],
)
def test_C023_v41_is_another_architecture_and_refused_by_name(values: dict[str, Any]) -> None:
    with pytest.raises(CheckpointError, match=r"this is a DeepSeek-V4\.1 checkpoint"):
        detect_family(values)


def test_other_families_are_named() -> None:
    with pytest.raises(CheckpointError, match=r"'deepseek_v3'.*neither a DeepSeek-VL2 nor a Deep"):
        detect_family({"model_type": "deepseek_v3"})
