"""What demo-v4 is and how it is trained. Shares of tasks and scenes are those of demo-vl2."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from training.recipe import CONTEXT, EXTRA_KINDS, ROW_KINDS, SHARES, Recipe
from training.v4_batches import V4Plan
from training.v4_pool import IMAGE_CONFIG

LENGTH = 168  # tokens of a row: longer than the window and than one window of ratio 128


def checkpoint_config(vocabulary: int) -> dict[str, Any]:
    """The model's `config.json`, with the keys of the vision release (V4 spec 1.2-1.4)."""
    return {
        "architectures": ["DeepseekV4ForCausalLM"],
        "attention_bias": False,
        "attention_dropout": 0.0,
        "bos_token_id": 0,
        "compress_ratios": [0, 4, 128, 4, 0],
        "compress_rope_theta": 160000,
        "eos_token_id": 1,
        "expert_dtype": "bf16",
        "hc_eps": 1e-06,
        "hc_mult": 4,
        "hc_sinkhorn_iters": 3,
        "head_dim": 64,
        "hidden_act": "silu",
        "hidden_size": 192,
        "index_head_dim": 32,
        "index_n_heads": 4,
        "index_topk": 64,
        "max_position_embeddings": CONTEXT,
        "model_type": "deepseek_v4",
        "moe_intermediate_size": 128,
        "n_routed_experts": 4,
        "n_shared_experts": 1,
        "norm_topk_prob": True,
        "num_attention_heads": 6,
        "num_experts_per_tok": 2,
        "num_hash_layers": 1,
        "num_hidden_layers": 5,
        "num_key_value_heads": 1,
        "o_groups": 2,
        "o_lora_rank": 96,
        "q_lora_rank": 96,
        "qk_rope_head_dim": 16,
        "rms_norm_eps": 1e-06,
        "rope_scaling": None,
        "rope_theta": 10000,
        "routed_scaling_factor": 1.5,
        "scoring_func": "sqrtsoftplus",
        "sliding_window": 128,
        "swiglu_limit": 10.0,
        "tie_word_embeddings": False,
        "topk_method": "noaux_tc",
        "torch_dtype": "bfloat16",
        "vision_dim": 160,
        "vision_downsample_ratio": IMAGE_CONFIG.downsample_ratio,
        "vision_inter_dim": 384,
        "vision_max_n_token": IMAGE_CONFIG.max_n_token,
        "vision_max_wh_ratio": IMAGE_CONFIG.max_wh_ratio,
        "vision_min_pixels": IMAGE_CONFIG.min_pixels,
        "vision_n_heads": 4,
        "vision_n_layers": 4,
        "vision_patch_size": IMAGE_CONFIG.patch_size,
        "vision_rope_theta": 10000.0,
        "vocab_size": vocabulary,
    }


@dataclass(frozen=True, slots=True)
class V4Recipe(Recipe):
    """As `Recipe`. `balance_rate`: how far a router's bias moves in a step to even the load; `hyper_rate`: AdamW's for
    hyper-connections."""

    steps: int = 1700
    rows: int = 24
    tiles: int = 48
    symbolic_until: int = 400
    seeing_from: int = 800
    balance_rate: float = 0.002
    hyper_rate: float = 4e-4
    losses: dict[str, float] = field(
        default_factory=lambda: {
            "answer": 1.0,
            "cell": 0.15,
            "near": 0.3,
            "offset": 2.0,
            "spot": 1.0,
            "look": 0.3,
            "anchor": 0.1,
        }
    )

    def v4_plan(self, ranks: int) -> V4Plan:
        """One rank's part of a batch."""
        rows, tiles = self.rows // ranks, self.tiles // ranks
        return V4Plan(rows, tiles, LENGTH, ROW_KINDS, EXTRA_KINDS, SHARES, chat=0.25, talk=0.5)
