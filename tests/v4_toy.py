"""Seeded toy DeepSeek-V4 models for tests: all layer kinds, tiny sizes, random numbers."""

from __future__ import annotations

from typing import Any

import torch

from foveal.models.v4 import V4Model
from foveal.models.v4_config import V4Config

TEXT: dict[str, Any] = {
    "model_type": "deepseek_v4",
    "vocab_size": 120,
    "hidden_size": 48,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "head_dim": 24,
    "qk_rope_head_dim": 8,
    "q_lora_rank": 32,
    "o_lora_rank": 12,
    "o_groups": 2,
    "moe_intermediate_size": 24,
    "n_routed_experts": 8,
    "num_experts_per_tok": 2,
    "num_hash_layers": 1,
    "compress_ratios": [0, 4, 128, 4],
    "sliding_window": 16,
    "index_n_heads": 8,
    "index_head_dim": 16,
    "index_topk": 6,
    "swiglu_limit": 3.0,
    "max_position_embeddings": 2048,
    "rope_scaling": {"type": "yarn", "factor": 16, "original_max_position_embeddings": 64},
}
VISION: dict[str, Any] = {
    "vision_n_layers": 2,
    "vision_dim": 32,
    "vision_n_heads": 2,
    "vision_inter_dim": 40,
    "vision_patch_size": 4,
    "vision_downsample_ratio": 2,
    "vision_max_n_token": 48,
    "vision_min_pixels": 256,
    "vision_max_wh_ratio": 8,
}


def config(*, vision: bool = True, **overrides: Any) -> V4Config:
    return V4Config.from_dict(TEXT | (VISION if vision else {}) | overrides)


def model(*, vision: bool = True, seed: int = 0, **overrides: Any) -> V4Model:
    built = V4Model(config(vision=vision, **overrides))
    generator = torch.Generator().manual_seed(seed)
    for name, parameter in built.named_parameters():
        if name.endswith("tid2eid"):
            scores = torch.rand(
                parameter.shape[0], built.config.language.n_routed_experts, generator=generator
            )
            parameter.data.copy_(scores.topk(parameter.shape[1], -1).indices)
            continue
        values = torch.randn(parameter.shape, generator=generator)
        if "norm" in name:
            values = 1 + 0.1 * values
        elif "hc" in name or "ape" in name:
            values = 0.5 * values
        elif parameter.dim() > 1 and "embed" not in name:
            values = values * parameter.shape[-1] ** -0.5 * 1.5
        parameter.data.copy_(values.bfloat16())
    return built
