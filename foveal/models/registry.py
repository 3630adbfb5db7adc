"""Which model family a folder holds, told by the keys of its `config.json`.

Folder names decide nothing, and class names nothing either, with one exception: DeepSeek-OCR ships the same
`model_type` as DeepSeek-VL2, so its class names are looked at to refuse it by name. Whether a DeepSeek-V4 checkpoint
has a tower or a DSpark drafter is told by its keys too, see `v4_config`.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Literal, TypeAlias

from foveal.errors import CheckpointError

FamilyName: TypeAlias = Literal["deepseek_vl2", "deepseek_v4"]

_OCR_CLASSES = {
    "DeepseekOCRForCausalLM": "DeepSeek-OCR",
    "DeepseekOCR2ForCausalLM": "DeepSeek-OCR-2",
}
_VL2_KEYS = ("language_config", "projector_config", "vision_config")
# Keys that no other family has together, for configurations without `model_type`.
_V4_KEYS = ("hc_mult", "o_lora_rank", "compress_rope_theta")
# Another architecture than DeepSeek-V4 in spite of its name: ratios 1 and 2, other hyper-connections and blocks.
_REFUSED_TYPES = {"deepseek_v41": "DeepSeek-V4.1"}


def detect_family(config: Mapping[str, Any]) -> FamilyName:
    """The family of a parsed `config.json`; raises CheckpointError that names what was found."""
    architectures = config.get("architectures") or ()
    vision = config.get("vision_config")
    for name in architectures if isinstance(architectures, list) else ():
        if name in _OCR_CLASSES:
            raise _refused(_OCR_CLASSES[name])
    if isinstance(vision, Mapping) and isinstance(vision.get("width"), Mapping):
        raise _refused("DeepSeek-OCR")  # its two encoders are described below `width`
    model_type = config.get("model_type")
    if model_type in _REFUSED_TYPES:
        raise _refused(_REFUSED_TYPES[str(model_type)])
    if model_type == "deepseek_vl_v2" or all(key in config for key in _VL2_KEYS):
        return "deepseek_vl2"
    if model_type == "deepseek_v4" or (
        model_type is None and all(key in config for key in _V4_KEYS)
    ):
        return "deepseek_v4"
    raise CheckpointError(
        f"config.json describes model_type {model_type!r} (architectures {list(architectures)}), which is neither a "
        "DeepSeek-VL2 nor a DeepSeek-V4 model; `foveal env` lists what this version runs"
    )


def _refused(name: str) -> CheckpointError:
    return CheckpointError(
        f"this is a {name} checkpoint; this version runs DeepSeek-VL2 (tiny, small, base) and DeepSeek-V4 only"
    )
