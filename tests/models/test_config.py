from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from foveal.errors import CheckpointError
from foveal.models.config import VL2Config
from foveal.models.registry import detect_family
from tests import toy

DATA = Path(__file__).parents[1] / "data"


def shipped(size: str) -> dict[str, Any]:
    values: dict[str, Any] = json.loads((DATA / f"vl2_{size}_config.json").read_text())
    return values


# The table of spec 1.4 after filling in the vendor's defaults.
SHIPPED = {
    "tiny": {"num_hidden_layers": 12, "vocab_size": 129280, "bos_token_id": 0, "eos_token_id": 1},
    "small": {
        "num_hidden_layers": 27,
        "vocab_size": 102400,
        "bos_token_id": 100000,
        "eos_token_id": 100001,
    },
    "base": {"num_hidden_layers": 30, "vocab_size": 129280, "num_attention_heads": 32},
}


@pytest.mark.parametrize("size", SHIPPED)
def test_missing_keys_take_the_vendors_defaults(size: str) -> None:
    config = VL2Config.from_dict(shipped(size))
    for key, value in SHIPPED[size].items():
        assert getattr(config.language, key) == value, key
    assert config.language.max_position_embeddings == 4096
    assert config.language.rope_scaling is None
    assert config.vision.grid == 27
    assert config.vision.mlp_hidden == 4304
    assert config.vision.heads == 16
    assert config.tokens_per_side == 14
    assert len(config.candidate_resolutions) == 23


def test_attention_kind_and_routing_of_the_three_sizes() -> None:
    tiny, small, base = (VL2Config.from_dict(shipped(size)).language for size in SHIPPED)
    assert not tiny.uses_mla
    assert small.uses_mla
    assert base.uses_mla
    assert (small.kv_lora_rank, small.qk_head_dim, small.v_head_dim, small.q_lora_rank) == (
        512,
        192,
        128,
        None,
    )
    assert (base.topk_method, base.scoring_func, base.routed_scaling_factor) == (
        "noaux_tc",
        "sigmoid",
        2.0,
    )
    assert base.norm_topk_prob
    assert not tiny.norm_topk_prob
    assert [c.is_moe_layer(0) for c in (tiny, small, base)] == [False] * 3
    assert [c.is_moe_layer(1) for c in (tiny, small, base)] == [True] * 3
    assert [c.cache_row_elements() * c.num_hidden_layers for c in (tiny, small, base)] == [
        30720,
        15552,
        17280,
    ]


def test_small_without_n_embed_has_2048() -> None:
    assert "n_embed" not in shipped("small")["projector_config"]
    assert VL2Config.from_dict(shipped("small")).projector.n_embed == 2048


def test_C016_zero_head_sizes_mean_plain_attention_even_without_use_mla() -> None:
    language = {k: v for k, v in toy.MHA.items() if k != "use_mla"}
    zeros = {"qk_nope_head_dim": 0, "qk_rope_head_dim": 0, "v_head_dim": 0, "kv_lora_rank": None}
    assert not toy.config(language | zeros).language.uses_mla


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"tile_tag": "1D"}, ["tile_tag '1D'", "'2D'"]),
        ({"projector_config": toy.PROJECTOR | {"projector_type": "wide"}}, ["'wide'", "linear"]),
        ({"projector_config": toy.PROJECTOR | {"input_dim": 31}}, ["32", "31"]),
        ({"projector_config": toy.PROJECTOR | {"n_embed": 47}}, ["47", "48"]),
        ({"projector_config": toy.PROJECTOR | {"projector_type": "identity"}}, ["identity", "32"]),
        ({"projector_config": toy.PROJECTOR | {"token_pooling": True}}, ["token_pooling"]),
        ({"language_config": toy.MHA | {"topk_method": "gready"}}, ["'gready'", "greedy"]),
        ({"language_config": toy.MHA | {"scoring_func": "tanh"}}, ["'tanh'", "softmax"]),
        ({"language_config": toy.MHA | {"rope_scaling": {"type": "su"}}}, ["'su'", "yarn"]),
        ({"language_config": toy.MHA | {"hidden_act": "gelu"}}, ["'gelu'"]),
        ({"language_config": toy.MHA | {"hidden_size": "48"}}, ["hidden_size", "'48'"]),
        ({"language_config": toy.MHA | {"num_hidden_layers": 0}}, ["num_hidden_layers", "0"]),
        ({"language_config": toy.MHA | {"num_experts_per_tok": 9}}, ["9", "8 experts"]),
        ({"vision_config": toy.VISION | {"heads": 5}}, ["32", "5"]),
    ],
)
def test_a_wrong_setting_is_named(changes: dict[str, Any], words: list[str]) -> None:
    with pytest.raises(CheckpointError) as caught:
        toy.config(**changes)
    assert all(word in str(caught.value) for word in words), caught.value


def test_missing_tile_tag_is_refused_as_in_the_vendors_code() -> None:
    values = shipped("tiny")
    del values["tile_tag"]
    with pytest.raises(CheckpointError, match="tile_tag"):
        VL2Config.from_dict(values)


@pytest.mark.parametrize(
    ("config", "name"),
    [
        (
            {"architectures": ["DeepseekOCRForCausalLM"], "model_type": "deepseek_vl_v2"},
            "DeepSeek-OCR",
        ),
        (
            {"architectures": ["DeepseekOCR2ForCausalLM"], "model_type": "deepseek_vl_v2"},
            "DeepSeek-OCR-2",
        ),
        (
            {"vision_config": {"width": {"sam_vit_b": {}}}, "model_type": "deepseek_vl_v2"},
            "DeepSeek-OCR",
        ),
        ({"model_type": "llama"}, "llama"),
        ({}, "None"),
    ],
)
def test_other_models_are_refused_by_name(config: dict[str, Any], name: str) -> None:
    with pytest.raises(CheckpointError, match=name):
        detect_family(config)


def test_C007_architectures_are_not_needed() -> None:
    assert "architectures" not in shipped("base")
    assert detect_family(shipped("base")) == "deepseek_vl2"
    without_type = {k: v for k, v in shipped("base").items() if k != "model_type"}
    assert detect_family(without_type) == "deepseek_vl2"
