"""What is trained and how: sizes of the model, shares of the tasks, weights of the losses, course of the rates."""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import Any

from training.batches import BatchPlan
from training.cells import TILE
from training.questions import Task
from training.scenes import Kind

CONTEXT = 1024


def checkpoint_config(vocabulary: int, bos: int, eos: int) -> dict[str, Any]:
    """The model's `config.json`, in the vendor's layout (spec 1): plain heads, experts from layer 1 on."""
    width = 192
    language = {
        "architectures": ["DeepseekV2ForCausalLM"],
        "bos_token_id": bos,
        "eos_token_id": eos,
        "first_k_dense_replace": 1,
        "hidden_size": width,
        "intermediate_size": 512,
        "kv_lora_rank": None,
        "lm_head": True,
        "max_position_embeddings": CONTEXT,
        "model_type": "deepseek_v2",
        "moe_intermediate_size": 128,
        "n_group": 1,
        "n_routed_experts": 4,
        "n_shared_experts": 1,
        "num_attention_heads": 4,
        "num_experts_per_tok": 2,
        "num_hidden_layers": 5,
        "num_key_value_heads": 4,
        "q_lora_rank": None,
        "qk_nope_head_dim": 0,
        "qk_rope_head_dim": 0,
        "rm_head": False,
        "topk_group": 1,
        "topk_method": "greedy",
        "torch_dtype": "bfloat16",
        "use_mla": False,
        "v_head_dim": 0,
        "vocab_size": vocabulary,
    }
    return {
        "candidate_resolutions": [[TILE, TILE]],
        "global_view_pos": "head",
        "language_config": language,
        "model_type": "deepseek_vl_v2",
        "projector_config": {"input_dim": 160, "model_type": "mlp_projector", "n_embed": width},
        "tile_tag": "2D",
        "torch_dtype": "bfloat16",
        "transformers_version": "4.38.2",
        "vision_config": {
            "heads": 4,
            "image_size": TILE,
            "layers": 4,
            "mlp_ratio": 4,
            "model_type": "vision",
            "patch_size": 8,
            "width": 160,
        },
    }


# Relative frequency of the tasks among questions about one scene, of scenes that are asked about, and of pictures that
# only the tower learns from: letters and handwriting take it longest.
SHARES: dict[Task, float] = {
    "colour": 1.0,
    "shape": 1.0,
    "relation": 3.0,
    "count": 1.6,
    "digit": 1.0,
    "locate": 2.4,
    "word": 1.0,
    "exists": 0.5,
    "describe": 0.35,
}
ROW_KINDS: dict[Kind, float] = {"shapes": 0.45, "crowd": 0.2, "digit": 0.1, "word": 0.25}
EXTRA_KINDS: dict[Kind, float] = {"shapes": 0.12, "crowd": 0.08, "digit": 0.3, "word": 0.5}
LENGTH = 184  # tokens of a row: a picture and three to five questions


@dataclass(frozen=True, slots=True)
class Recipe:
    """One training run. `steps` fixes the schedule; how long it takes is the machine's matter.

    Rates stay constant up to `flat` of the run, then fall along a cosine. Samples see cells made from the truth
    ("symbolic") always up to step `symbolic_until`, half of the time up to `half_until`, never from `seeing_from` on.
    """

    seed: int = 1
    steps: int = 3600
    rows: int = 28
    tiles: int = 96
    muon_rate: float = 0.01
    adam_rate: float = 2e-3
    warmup: int = 100
    flat: float = 0.5
    symbolic_until: int = 1000
    half_until: int = 3300
    seeing_from: int = 3500
    losses: dict[str, float] = field(
        default_factory=lambda: {
            "answer": 1.0,
            "cell": 0.15,
            "near": 0.3,
            "place": 10.0,
            "ask": 0.3,
            "look": 1.0,
            "balance": 0.02,
        }
    )

    def plan(self, ranks: int) -> BatchPlan:
        """One rank's part of a batch."""
        rows, tiles = self.rows // ranks, self.tiles // ranks
        return BatchPlan(rows, tiles, LENGTH, ROW_KINDS, EXTRA_KINDS, SHARES, chat=0.25)

    def rate(self, step: int) -> float:
        """Factor of both rates at `step`."""
        if step < self.warmup:
            return (step + 1) / self.warmup
        done = step / self.steps
        if done < self.flat:
            return 1.0
        return 0.01 + 0.99 * 0.5 * (
            1 + math.cos(math.pi * min(1.0, (done - self.flat) / (1 - self.flat)))
        )

    def symbolic_share(self, step: int) -> float:
        if step < self.symbolic_until:
            return 1.0
        if step < self.half_until:
            return 0.5
        return max(0.0, 0.5 * (self.seeing_from - step) / (self.seeing_from - self.half_until))
