"""Every tensor of a complete DeepSeek-V4 checkpoint, with the dtype it is stored in, from `config.json` alone.

The drafters' stages and the scales count too. The released totals come out to the byte: 72,633 tensors and
167,811,372,792 bytes for Vision-Exp, 72,317 and 166,878,536,440 for Flash-0731 (spec 2.5). No torch.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Literal, TypeAlias

from foveal.models.names import Part
from foveal.models.safetensors_header import DTYPE_BITS
from foveal.models.v4_config import WEIGHT_BLOCK, V4Config
from foveal.models.v4_names import DRAFTER_PREFIX, v4_parameter_specs

StoredPart: TypeAlias = Part | Literal["drafter"]

_FLOAT32 = re.compile(r".*(?:hc_(?:attn|ffn|head)_\w+|\.ape|\.attn_sink|gate\.bias(?:_vl)?)")
_FP8 = re.compile(
    r"(?:layers|mtp)\.\d+\."
    r"(?:attn\.(?:wq_a|wq_b|wkv|wo_a|wo_b|indexer\.wq_b)|ffn\.shared_experts\.w[123]|main_proj|e_proj|h_proj)\.weight"
)
_EXPERT = re.compile(r"(?:layers|mtp)\.\d+\.ffn\.experts\.\d+\.w[123]\.weight")
FP4_COLUMNS = 32  # columns that share a scale in packed experts


@dataclass(frozen=True, slots=True)
class StoredTensor:
    """One tensor as a file has it. `num_parameters` counts the numbers behind codes, and nothing for scales."""

    name: str
    shape: tuple[int, ...]
    dtype: str
    part: StoredPart
    num_parameters: int
    is_used: bool = True

    @property
    def num_bytes(self) -> int:
        return math.prod(self.shape) * DTYPE_BITS[self.dtype] // 8


def v4_inventory(config: V4Config) -> list[StoredTensor]:
    """All tensors that the vendor's checkpoint of this configuration holds."""
    tensors = [
        tensor
        for spec in v4_parameter_specs(config)
        for source in spec.sources
        for tensor in _stored(source.name, source.shape, config, spec.part)
    ]
    c = config.language
    if config.vision is not None:  # carried by vision releases, and used by nothing
        for layer in range(min(c.num_hash_layers, c.num_hidden_layers)):
            name = f"layers.{layer}.ffn.gate.bias"
            tensors.extend(_stored(name, (c.n_routed_experts,), config, "language", False))
    for stage in range(c.num_drafter_stages):
        for name, shape in _stage(config, stage).items():
            tensors.extend(_stored(name, shape, config, "drafter", False))
    return tensors


def _stored(
    name: str,
    shape: tuple[int, ...],
    config: V4Config,
    part: StoredPart,
    is_used: bool = True,
) -> Iterator[StoredTensor]:
    """A tensor of the name table as it is stored: with its scales where it is codes."""
    count = math.prod(shape)
    expert = config.language.expert_dtype if _EXPERT.fullmatch(name) else None
    scale = name.removesuffix(".weight") + ".scale"
    if config.is_quantized and expert == "fp4":
        rows, columns = shape
        yield StoredTensor(name, (rows, columns // 2), "I8", part, count, is_used)
        yield StoredTensor(scale, (rows, -(-columns // FP4_COLUMNS)), "F8_E8M0", part, 0, is_used)
    elif config.is_quantized and (expert == "fp8" or _FP8.fullmatch(name)):
        blocks = tuple(-(-n // block) for n, block in zip(shape, WEIGHT_BLOCK, strict=True))
        # Base releases, whose experts are FP8, store all their scales as float32.
        scale_dtype = "F32" if config.language.expert_dtype == "fp8" else "F8_E8M0"
        yield StoredTensor(name, shape, "F8_E4M3", part, count, is_used)
        yield StoredTensor(scale, blocks, scale_dtype, part, 0, is_used)
    else:
        yield StoredTensor(name, shape, _plain_dtype(name), part, count, is_used)


def _plain_dtype(name: str) -> str:
    if name.endswith("tid2eid"):
        return "I64"
    return "F32" if _FLOAT32.fullmatch(name) else "BF16"


def _stage(config: V4Config, stage: int) -> Mapping[str, tuple[int, ...]]:
    """Shapes of one drafter stage: a window layer with score routing, and what its kind adds (spec 2.2, 2.3)."""
    c = config.language
    layer = replace(c, num_hidden_layers=1, compress_ratios=(0,), num_hash_layers=0)
    at, prefix = "layers.0.", f"{DRAFTER_PREFIX}{stage}."
    shapes = {
        prefix + source.name.removeprefix(at): source.shape
        for spec in v4_parameter_specs(replace(config, language=layer), with_vision=False)
        for source in spec.sources
        if source.name.startswith(at)
    }
    d, n = c.hidden_size, c.hc_mult
    collapse = {"norm.weight": (d,), "hc_head_fn": (n, n * d), "hc_head_base": (n,)}
    extra: dict[str, tuple[int, ...]] = {}
    if config.dspark is None:
        extra |= {f"{name}_proj.weight": (d, d) for name in ("e", "h")}
        extra |= {"enorm.weight": (d,), "hnorm.weight": (d,), **collapse, "hc_head_scale": (1,)}
    else:
        if stage == 0:
            taps = len(config.dspark.dspark_target_layer_ids)
            extra |= {"main_proj.weight": (d, taps * d), "main_norm.weight": (d,)}
        if stage == c.num_drafter_stages - 1:
            rank = config.dspark.dspark_markov_rank
            for name in ("markov_w1", "markov_w2"):
                extra[f"markov_head.{name}.weight"] = (c.vocab_size, rank)
            extra["confidence_head.proj.weight"] = (1, d + rank)
            extra |= {**collapse, "hc_head_scale": (1,)}
    return shapes | {prefix + name: shape for name, shape in extra.items()}
