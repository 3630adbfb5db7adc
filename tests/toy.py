"""Seeded toy models for tests: real architecture, tiny sizes, random numbers."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from foveal.models.config import VL2Config
from foveal.models.layers import Factory
from foveal.models.siglip import VisionMode
from foveal.models.vl2 import VL2Model

VISION = {"image_size": 28, "patch_size": 4, "width": 32, "layers": 2, "heads": 4, "mlp_ratio": 2}
PROJECTOR = {"input_dim": 32, "n_embed": 48}
MHA = {
    "vocab_size": 160,
    "hidden_size": 48,
    "intermediate_size": 64,
    "moe_intermediate_size": 24,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 4,
    "n_shared_experts": 2,
    "n_routed_experts": 8,
    "num_experts_per_tok": 3,
    "first_k_dense_replace": 1,
    "topk_method": "greedy",
    "use_mla": False,
    "max_position_embeddings": 512,
    "bos_token_id": 0,
    "eos_token_id": 1,
}
MLA = MHA | {
    "use_mla": True,
    "q_lora_rank": None,
    "kv_lora_rank": 24,
    "qk_nope_head_dim": 16,
    "qk_rope_head_dim": 8,
    "v_head_dim": 12,
}
NOAUX = {
    "topk_method": "noaux_tc",
    "scoring_func": "sigmoid",
    "norm_topk_prob": True,
    "routed_scaling_factor": 2.0,
    "n_group": 1,
    "topk_group": 1,
}
LANGUAGES: dict[str, dict[str, Any]] = {
    "mha": MHA,
    "mha-gqa": MHA | {"num_key_value_heads": 2, "attention_bias": True},
    "mla": MLA,
    "mla-low-rank-q": MLA | {"q_lora_rank": 20, "attention_bias": True},
    "mla-noaux": MLA | NOAUX,
    "mla-groups": MLA | NOAUX | {"n_group": 4, "topk_group": 2},
    "mla-group-limited": MLA
    | {"topk_method": "group_limited_greedy", "n_group": 4, "topk_group": 2},
    "mha-moe-freq": MHA | {"moe_layer_freq": 2, "first_k_dense_replace": 0},
    "mha-tied": MHA | {"tie_word_embeddings": True, "n_shared_experts": None},
    "mla-yarn": MLA
    | {
        "rope_scaling": {
            "type": "yarn",
            "factor": 4.0,
            "original_max_position_embeddings": 64,
            "mscale": 0.7,
            "mscale_all_dim": 0.7,
        }
    },
}


def config(language: str | dict[str, Any] = "mha", **overrides: Any) -> VL2Config:
    """A toy configuration; `overrides` replace top-level keys."""
    values: dict[str, Any] = {
        "model_type": "deepseek_vl_v2",
        "tile_tag": "2D",
        "candidate_resolutions": [[28, 28], [28, 56], [56, 28], [56, 56]],
        "vision_config": VISION,
        "projector_config": PROJECTOR,
        "language_config": LANGUAGES[language] if isinstance(language, str) else language,
    }
    return VL2Config.from_dict(values | overrides)


def fill(model: VL2Model, seed: int = 0) -> VL2Model:
    """Random numbers that are exact in bfloat16, scaled so that logits spread over a few units."""
    generator = torch.Generator().manual_seed(seed)
    for name, parameter in model.named_parameters():
        values = torch.randn(parameter.shape, generator=generator)
        if "norm" in name and name.endswith("weight"):
            values = 1 + 0.1 * values
        elif parameter.dim() > 1 and "embed" not in name:
            values = values * parameter.shape[-1] ** -0.5 * 1.5
        elif parameter.dim() == 1:
            values = values * 0.1
        parameter.data.copy_(values.bfloat16())
    return model


def model(
    language: str | dict[str, Any] = "mha",
    *,
    seed: int = 0,
    dtype: torch.dtype = torch.float32,
    vision_mode: VisionMode = "official",
    **overrides: Any,
) -> VL2Model:
    make = Factory(dtype, torch.float32)
    return fill(
        VL2Model(
            config(language, **overrides), vision=make, language=make, vision_mode=vision_mode
        ),
        seed,
    )


def rows(model: VL2Model, count: int, seed: int = 0) -> Tensor:
    """Input rows of `count` random tokens."""
    generator = torch.Generator().manual_seed(seed)
    ids = torch.randint(3, model.config.language.vocab_size, (count,), generator=generator)
    return model.embed(ids)
