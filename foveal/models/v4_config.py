"""DeepSeek-V4's `config.json`, text and vision, as typed, checked data. Source: spec (V4) sections 1.1-1.4.

Vision and drafter are told by their keys (`vision_n_layers`, `dspark_*`); class names are the same for all releases.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from foveal.errors import CheckpointError
from foveal.models.config import pick, read_json, require_positive, rope_scaling_type
from foveal.models.v4_aliases import released_config

SCORING_FUNCTIONS = ("sqrtsoftplus", "sigmoid", "softmax")
RATIOS = (0, 4, 128)
EXPERT_DTYPES = ("fp4", "fp8", "bf16")
# Rows and columns of a weight that share a scale in FP8 matrices.
WEIGHT_BLOCK = (128, 128)


@dataclass(frozen=True, slots=True)
class V4VisionConfig:
    """The vision tower and the size rules of pictures. All keys stand at the top level of `config.json`."""

    vision_n_layers: int = 0
    vision_dim: int = 1024
    vision_n_heads: int = 16
    vision_inter_dim: int = 2816
    vision_patch_size: int = 14
    vision_rope_theta: float = 10000.0
    vision_downsample_ratio: int = 3
    vision_max_n_token: int = 384
    vision_min_pixels: int = 147456
    vision_max_wh_ratio: float = 8

    def check(self) -> None:
        names = ("vision_dim", "vision_n_heads", "vision_inter_dim", "vision_patch_size")
        require_positive(self, "config", (*names, "vision_downsample_ratio", "vision_max_n_token"))
        if self.vision_dim % (4 * self.vision_n_heads):
            raise CheckpointError(
                f"config.json: vision_dim {self.vision_dim} does not give {self.vision_n_heads} heads whose width is a "
                "multiple of 4, which the two-dimensional rotation needs"
            )


@dataclass(frozen=True, slots=True)
class DSparkConfig:
    """The block drafter of newer releases, behind the trunk as `mtp.*`. Source: spec 8.2-8.5."""

    dspark_target_layer_ids: tuple[int, ...]
    dspark_markov_rank: int = 256
    dspark_block_size: int = 5
    dspark_noise_token_id: int = 128799

    def check(self) -> None:
        require_positive(self, "config", ("dspark_markov_rank", "dspark_block_size"))


@dataclass(frozen=True, slots=True)
class V4LanguageConfig:
    """The text backbone. Symbols of the spec: D hidden_size, N hc_mult, d head_dim, W sliding_window."""

    vocab_size: int
    hidden_size: int
    num_hidden_layers: int
    num_attention_heads: int
    head_dim: int
    qk_rope_head_dim: int
    q_lora_rank: int
    o_lora_rank: int
    o_groups: int
    moe_intermediate_size: int
    n_routed_experts: int
    num_experts_per_tok: int
    compress_ratios: tuple[int, ...]
    n_shared_experts: int = 1
    num_hash_layers: int = 0
    sliding_window: int = 128
    index_n_heads: int = 64
    index_head_dim: int = 128
    index_topk: int = 512
    hc_mult: int = 4
    hc_sinkhorn_iters: int = 20
    hc_eps: float = 1e-6
    rms_norm_eps: float = 1e-6
    scoring_func: str = "sqrtsoftplus"
    norm_topk_prob: bool = True
    routed_scaling_factor: float = 1.5
    swiglu_limit: float = 0.0
    rope_theta: float = 10000.0
    compress_rope_theta: float = 160000.0
    rope_scaling: Mapping[str, Any] | None = None
    max_position_embeddings: int = 1048576
    bos_token_id: int = 0
    eos_token_id: int = 1
    expert_dtype: str = "fp4"

    @property
    def ratios(self) -> tuple[int, ...]:
        """Compression ratio of each trunk layer; entries beyond the trunk belong to drafters."""
        return self.compress_ratios[: self.num_hidden_layers]

    @property
    def num_drafter_stages(self) -> int:
        """`mtp.S` stages behind the trunk; `num_nextn_predict_layers` is wrong in some releases (spec 1.1)."""
        return max(0, len(self.compress_ratios) - self.num_hidden_layers)

    def is_hash_layer(self, layer: int) -> bool:
        return layer < self.num_hash_layers

    def check(self) -> None:
        names = (
            "vocab_size",
            "hidden_size",
            "num_hidden_layers",
            "num_attention_heads",
            "head_dim",
            "hc_mult",
        )
        more = (
            "qk_rope_head_dim",
            "q_lora_rank",
            "o_lora_rank",
            "o_groups",
            "moe_intermediate_size",
        )
        require_positive(
            self,
            "config",
            (*names, *more, "n_routed_experts", "num_experts_per_tok", "sliding_window"),
        )
        if len(self.ratios) < self.num_hidden_layers or any(r not in RATIOS for r in self.ratios):
            raise CheckpointError(
                f"config.json: compress_ratios {list(self.compress_ratios)} must give one of {RATIOS} for each of "
                f"{self.num_hidden_layers} layers"
            )
        if self.scoring_func not in SCORING_FUNCTIONS:
            raise CheckpointError(
                f"config.json: scoring_func {self.scoring_func!r} is unknown; known: {', '.join(SCORING_FUNCTIONS)}"
            )
        if self.num_attention_heads % self.o_groups:
            raise CheckpointError(
                f"config.json: num_attention_heads {self.num_attention_heads} is not divisible by o_groups "
                f"{self.o_groups}"
            )
        if self.num_experts_per_tok > self.n_routed_experts:
            raise CheckpointError(
                f"config.json: num_experts_per_tok {self.num_experts_per_tok} is more than n_routed_experts "
                f"{self.n_routed_experts}"
            )
        if self.expert_dtype not in EXPERT_DTYPES:
            raise CheckpointError(
                f"config.json: expert_dtype {self.expert_dtype!r} is unknown; known: {', '.join(EXPERT_DTYPES)}"
            )
        if self.rope_scaling is not None and rope_scaling_type(self.rope_scaling) != "yarn":
            raise CheckpointError(
                f"config.json: rope_scaling type {rope_scaling_type(self.rope_scaling)!r} is unknown; known: yarn"
            )


@dataclass(frozen=True, slots=True)
class V4Config:
    """A whole DeepSeek-V4 model. `vision` is None for text checkpoints."""

    language: V4LanguageConfig
    vision: V4VisionConfig | None = None
    quantization: Mapping[str, Any] = field(default_factory=dict)
    dspark: DSparkConfig | None = None

    @property
    def is_quantized(self) -> bool:
        """True where the release stores FP8 matrices and packed experts; which tensors are, the files say."""
        return bool(self.quantization)

    @classmethod
    def from_dict(cls, values: Mapping[str, Any]) -> V4Config:
        """Read and check a parsed `config.json`; raises CheckpointError that names the key at fault."""
        known = released_config(values)
        known["compress_ratios"] = tuple(int(r) for r in known.get("compress_ratios") or ())
        language = pick(V4LanguageConfig, known, "config")
        language.check()
        vision = None
        if int(values.get("vision_n_layers") or 0) > 0:
            vision = pick(V4VisionConfig, values, "config")
            vision.check()
        dspark = None
        if any(key.startswith("dspark_") for key in values):
            layers = tuple(int(i) for i in values.get("dspark_target_layer_ids") or ())
            dspark = pick(DSparkConfig, {**values, "dspark_target_layer_ids": layers}, "config")
            dspark.check()
        quantization = values.get("quantization_config") or {}
        _check_quantization(quantization)
        return cls(language, vision, quantization, dspark)

    @classmethod
    def load(cls, folder: Path) -> V4Config:
        return cls.from_dict(read_json(folder / "config.json"))


def _check_quantization(settings: Mapping[str, Any]) -> None:
    """Raises CheckpointError for formats other than the release's."""
    if not settings:
        return
    method = settings.get("quant_method", "fp8")
    block = tuple(settings.get("weight_block_size") or WEIGHT_BLOCK)
    if method != "fp8" or block != WEIGHT_BLOCK:
        raise CheckpointError(
            f"config.json: quantization_config describes {method!r} with weight_block_size {list(block)}; known: 'fp8' "
            f"with {list(WEIGHT_BLOCK)}. Take the release's own checkpoint"
        )
