from __future__ import annotations

import pytest

from foveal.models.names import parameter_specs
from foveal.models.vl2 import VL2Model
from foveal.parallel.sharding import Plan
from tests import toy

PROJECTORS = {
    "downsample": {},
    "three-by-three": {"downsample_ratio": 3, "depth": 3, "mlp_ratio": 2},
    "depth-one": {"depth": 1},
    "linear": {"projector_type": "linear", "downsample_ratio": 1},
    "mlp_gelu": {"projector_type": "mlp_gelu", "depth": 3, "downsample_ratio": 1},
    "identity": {"projector_type": "identity", "input_dim": 32, "n_embed": 32},
    "pooling": {"projector_type": "linear", "token_pooling": True},
}


@pytest.mark.parametrize("language", toy.LANGUAGES)
def test_the_table_names_exactly_the_models_parameters(language: str) -> None:
    config = toy.config(language)
    table = {spec.name: spec.shape for spec in parameter_specs(config)}
    model = VL2Model(config)
    assert table == {name: tuple(p.shape) for name, p in model.named_parameters()}


@pytest.mark.parametrize("kind", PROJECTORS)
def test_every_projector_kind_has_its_tensors_in_the_table(kind: str) -> None:
    projector = toy.PROJECTOR | PROJECTORS[kind]
    language = toy.MHA | {"hidden_size": projector["n_embed"]}
    config = toy.config(language, projector_config=projector)
    table = {spec.name: spec.shape for spec in parameter_specs(config)}
    assert table == {name: tuple(p.shape) for name, p in VL2Model(config).named_parameters()}


@pytest.mark.parametrize("language", toy.LANGUAGES)
def test_sources_fill_each_parameter_exactly_once(language: str) -> None:
    for spec in parameter_specs(toy.config(language)):
        rows: list[tuple[int | None, int]] = []
        for source in spec.sources:
            assert (
                source.shape[1:] == spec.shape[-len(source.shape) + 1 :] or len(source.shape) == 1
            )
            rows += [(source.index, source.offset + i) for i in range(source.shape[0])]
        assert len(rows) == len(set(rows)), spec.name
        slices = {index for index, _ in rows}
        per_slice = spec.shape[1] if slices != {None} else spec.shape[0]
        assert len(rows) == len(slices) * per_slice, spec.name


def test_plans_follow_the_roles_of_parameters() -> None:
    plans = {spec.name: spec.plan for spec in parameter_specs(toy.config("mla"))}
    assert plans["language.embed_tokens.weight"] is Plan.VOCABULARY
    assert plans["language.lm_head.weight"] is Plan.VOCABULARY
    assert plans["language.layers.1.attn.kv_a.weight"] is Plan.REPLICATE  # shared by all heads
    assert plans["language.layers.1.attn.q.weight"] is Plan.COLUMN
    assert plans["language.layers.1.attn.o.weight"] is Plan.ROW
    assert plans["language.layers.1.mlp.experts.w13"] is Plan.EXPERT
    assert plans["language.layers.1.mlp.router.weight"] is Plan.REPLICATE
    assert plans["vision.blocks.0.mlp.fc1.bias"] is Plan.COLUMN
    assert plans["vision.blocks.0.mlp.fc2.bias"] is Plan.REPLICATE  # added once, after the sum
