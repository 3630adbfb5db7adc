"""Which model family a folder holds, told by the keys of its `config.json`.

Folder names and class names decide nothing, with one exception: DeepSeek-OCR ships the same `model_type` as
DeepSeek-VL2, so its class names are looked at to refuse it by name.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Literal, TypeAlias

from foveal.errors import CheckpointError

Family: TypeAlias = Literal["deepseek_vl2"]

_OCR_CLASSES = {
    "DeepseekOCRForCausalLM": "DeepSeek-OCR",
    "DeepseekOCR2ForCausalLM": "DeepSeek-OCR-2",
}
_VL2_KEYS = ("language_config", "projector_config", "vision_config")
_LATER = {"deepseek_v4": "DeepSeek-V4"}


def detect_family(config: Mapping[str, Any]) -> Family:
    """The family of a parsed `config.json`; raises CheckpointError that names what was found."""
    architectures = config.get("architectures") or ()
    vision = config.get("vision_config")
    for name in architectures if isinstance(architectures, list) else ():
        if name in _OCR_CLASSES:
            raise _refused(_OCR_CLASSES[name])
    if isinstance(vision, Mapping) and isinstance(vision.get("width"), Mapping):
        raise _refused("DeepSeek-OCR")  # its two encoders are described below `width`
    model_type = config.get("model_type")
    if model_type in _LATER:
        raise _refused(_LATER[str(model_type)])
    if model_type == "deepseek_vl_v2" or all(key in config for key in _VL2_KEYS):
        return "deepseek_vl2"
    raise CheckpointError(
        f"config.json describes model_type {model_type!r} (architectures {list(architectures)}), which is not a "
        "DeepSeek-VL2 model; `foveal env` lists what this version runs"
    )


def _refused(name: str) -> CheckpointError:
    return CheckpointError(
        f"this is a {name} checkpoint; this version runs DeepSeek-VL2 (tiny, small, base) only"
    )
