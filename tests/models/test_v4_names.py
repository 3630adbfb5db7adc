"""The name table names what the model has; other spellings of a checkpoint and of its configuration mean the same.

`v4_transformers_names.json` was made with transformers 5.23.0: it loaded the golden checkpoint and wrote it again, and
each tensor of the result was found among the released ones by its bytes. `v4_transformers_config.json` is the
`config.json` that it wrote.
"""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from foveal.errors import CheckpointError
from foveal.models.build import load_v4
from foveal.models.layers import destinations
from foveal.models.safetensors_header import TensorInfo
from foveal.models.v4_aliases import (
    released_config,
    released_name,
    released_names,
    released_tensors,
)
from foveal.models.v4_config import V4Config
from foveal.models.v4_inventory import v4_inventory
from foveal.models.v4_names import v4_parameter_specs
from foveal.ops.packed import PackedWeight
from tests import v4_toy
from tests.golden import v4_cases
from tests.v4_packed import packed_config, random_tensors, write_checkpoint

SPELLINGS = ("memory", "written")
Row = tuple[str, list[int], list[str]]


@pytest.fixture(scope="module")
def rows(repository: Path) -> dict[str, list[Row]]:
    """For each spelling: name there, shape, the released tensors behind it."""
    path = repository / "tests" / "data" / "v4_transformers_names.json"
    found: dict[str, list[Row]] = json.loads(path.read_text())
    return found


@pytest.mark.parametrize("vision", [True, False])
@pytest.mark.parametrize("ratios", [(0, 4, 128, 4), (128, 128, 4, 0), (0, 0, 0, 0)])
def test_the_table_names_exactly_the_models_parameters(vision: bool, ratios: Sequence[int]) -> None:
    config = v4_toy.config(vision=vision, compress_ratios=list(ratios))
    table = {spec.name: spec.shape for spec in v4_parameter_specs(config)}
    model = v4_toy.model(vision=vision, compress_ratios=list(ratios))
    assert table == {name: tuple(p.shape) for name, p in model.named_parameters()}


def test_sources_fill_each_parameter_exactly_once() -> None:
    specs = v4_parameter_specs(v4_toy.config())
    names = [source.name for spec in specs for source in spec.sources]
    assert len(names) == len(set(names))
    for spec in specs:
        assert math.prod(spec.shape) == sum(math.prod(s.shape) for s in spec.sources), spec.name


# --- names ------------------------------------------------------------------------------------------


@pytest.mark.parametrize("spelling", SPELLINGS)
def test_transformers_names_mean_the_released_tensors(
    rows: dict[str, list[Row]], spelling: str
) -> None:
    assert len(rows[spelling]) > 80
    for theirs, shape, ours in rows[spelling]:
        info = TensorInfo("F32", tuple(shape), 100, 100 + 4 * math.prod(shape), Path("a"))
        found = released_tensors({theirs: info})
        assert list(found) == ours, theirs
        assert released_names(theirs, 12) == ours
        assert sum(part.num_bytes for part in found.values()) == info.num_bytes
        at = 100  # parts lie one behind the other, in the order of the stack
        for part in found.values():
            assert part.start == at
            assert part.num_bytes == 4 * part.num_elements
            at = part.end


@pytest.mark.parametrize("vision", [True, False])
def test_released_names_stay_as_they_are(vision: bool) -> None:
    keys = {"dspark_target_layer_ids": [1, 2], "compress_ratios": [0, 4, 128, 4, 0, 0, 0]}
    for values in (packed_config(vision=vision, **keys), packed_config(vision=vision)):
        for tensor in v4_inventory(V4Config.from_dict(values)):
            assert released_name(tensor.name) == tensor.name
            assert released_name(released_name("model." + tensor.name)) == tensor.name


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("model.layers.7.self_attn.wq_a.weight_scale_inv", "layers.7.attn.wq_a.scale"),
        ("layers.7.mlp.gate.e_score_correction_bias", "layers.7.ffn.gate.bias"),
        ("model.layers.0.mlp.experts.12.w1.weight_scale_inv", "layers.0.ffn.experts.12.w1.scale"),
        ("model.layers.0.mlp.shared_experts.w2.weight", "layers.0.ffn.shared_experts.w2.weight"),
        ("model.layers.3.mlp.gate.bias_vl", "layers.3.ffn.gate.bias_vl"),
        ("lm_head.weight", "head.weight"),
        ("head.weight", "head.weight"),
        ("mtp.2.markov_head.markov_w1.weight", "mtp.2.markov_head.markov_w1.weight"),
        ("mtp.2.confidence_head.proj.weight", "mtp.2.confidence_head.proj.weight"),
        ("mtp.2.hc_head_fn", "mtp.2.hc_head_fn"),
        ("model.mtp.0.attn.wkv.weight", "mtp.0.attn.wkv.weight"),
        ("vision.blocks.0.mlp.w1.weight", "vision.blocks.0.mlp.w1.weight"),
        ("layers.0.surprise.weight", "layers.0.surprise.weight"),
    ],
)
def test_single_names(name: str, expected: str) -> None:
    assert released_name(name) == expected
    assert released_name(expected) == expected


@pytest.mark.parametrize("ending", ["", ".weight"])
def test_stacks_of_codes_are_cut_like_stacks_of_numbers(ending: str) -> None:
    at = "model.layers.5.mlp.experts."
    tensors = {
        f"{at}gate_up_proj{ending}": TensorInfo("I8", (2, 6, 4), 10, 58, Path("a")),
        f"{at}gate_up_proj_scale_inv": TensorInfo("F32", (2, 6, 1), 60, 108, Path("a")),
    }
    found = released_tensors(tensors)
    bounds = {name.split("experts.")[1]: (t.start, t.end, t.shape) for name, t in found.items()}
    assert bounds["0.w1.weight"] == (10, 22, (3, 4))
    assert bounds["1.w3.weight"] == (46, 58, (3, 4))
    assert bounds["1.w1.scale"] == (84, 96, (3, 1))
    assert len(found) == 8


def test_two_spellings_of_a_tensor_are_an_error() -> None:
    info = TensorInfo("F32", (1,), 0, 4, Path("a.safetensors"))
    with pytest.raises(CheckpointError, match=r"'lm_head\.weight', another spelling of 'head\.w"):
        released_tensors({"head.weight": info, "lm_head.weight": info})


def respelled(rows: list[Row], tensors: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Released tensors of the three layers that the rows tell, under the names of the rows."""
    found = {}
    for theirs, shape, ours in rows:
        parts = [tensors[name] for name in ours]
        joined = parts[0] if len(parts) == 1 else torch.cat(parts)
        found[theirs] = joined.reshape(shape).contiguous()
    return found


def test_a_checkpoint_in_transformers_names_loads_equal(
    golden: Path, tmp_path: Path, rows: dict[str, list[Row]]
) -> None:
    released = golden / "v4_text" / "flash_like" / "checkpoint"
    tensors: dict[str, torch.Tensor] = {}
    for path in released.glob("*.safetensors"):
        tensors |= load_file(path)
    # One sliding layer: its rows are there for every tensor, stacks included.
    kept = [r for r in rows["memory"] if "layers." not in r[0] or "layers.0." in r[0]]
    values = json.loads((released / "config.json").read_text()) | {
        "num_hidden_layers": 1,
        "compress_ratios": [0],
        "num_hash_layers": 1,
    }
    (tmp_path / "config.json").write_text(json.dumps(values))
    save_file(respelled(kept, tensors), tmp_path / "model.safetensors")
    config = V4Config.from_dict(values)
    filled = destinations(load_v4(tmp_path, config, dtype="float32", device="cpu").model)
    whole = destinations(v4_cases.load(golden / "v4_text" / "flash_like"))
    for spec in v4_parameter_specs(config):
        found, expected = filled[spec.name], whole[spec.name]
        assert isinstance(found, torch.Tensor)
        assert isinstance(expected, torch.Tensor)
        assert torch.equal(found, expected), spec.name


def test_stacked_codes_load_equal_to_single_ones(tmp_path: Path) -> None:
    values = packed_config()
    tensors = random_tensors(values)
    plain = write_checkpoint(tmp_path / "plain", values, tensors)
    count = values["n_routed_experts"]
    for layer in range(4):
        at = f"layers.{layer}.ffn.experts"
        for stack, matrices in (("gate_up_proj", ("w1", "w3")), ("down_proj", ("w2",))):
            for ending, suffix in (("weight", ""), ("scale", "_scale_inv")):
                parts = [
                    tensors.pop(f"{at}.{e}.{m}.{ending}") for e in range(count) for m in matrices
                ]
                height, width = parts[0].shape
                tensors[f"model.layers.{layer}.mlp.experts.{stack}{suffix}"] = type(parts[0])(
                    parts[0].dtype,
                    (count, len(matrices) * height, width),
                    b"".join(part.data for part in parts),
                )
    stacked = write_checkpoint(tmp_path / "stacked", values, tensors)
    config = V4Config.from_dict(values)
    models = [
        load_v4(folder, config, dtype="float32", device="cpu", weights="packed").model
        for folder in (plain, stacked)
    ]
    first, second = (destinations(model) for model in models)
    for name, expected in first.items():
        found = second[name]
        if isinstance(found, PackedWeight) and isinstance(expected, PackedWeight):
            assert torch.equal(found.codes, expected.codes)
            assert torch.equal(found.scales, expected.scales)
        else:
            assert isinstance(found, torch.Tensor)
            assert isinstance(expected, torch.Tensor)
            assert torch.equal(found, expected)


# --- configuration ----------------------------------------------------------------------------------


def test_transformers_configuration_means_the_released_one(golden: Path, repository: Path) -> None:
    text = (repository / "tests" / "data" / "v4_transformers_config.json").read_text()
    theirs = V4Config.from_dict(json.loads(text))
    ours = V4Config.load(golden / "v4_text" / "flash_like" / "checkpoint")
    assert theirs.language.ratios == ours.language.ratios
    for name in ours.language.__slots__:
        found, expected = getattr(theirs.language, name), getattr(ours.language, name)
        if name == "compress_ratios":
            expected = expected[:-1]  # the drafter's, which transformers does not know
        elif name == "rope_scaling":
            found = {key: found[key] for key in expected}
        assert found == expected, name


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"layer_types": ["sliding_attention", "linear_attention"]}, "has linear_attention"),
        ({"layer_types": [], "mlp_layer_types": ["moe", "hash_moe"]}, "must come first"),
    ],
)
def test_unknown_layers_in_a_transformers_configuration_are_named(
    changes: dict[str, Any], message: str
) -> None:
    with pytest.raises(CheckpointError, match=message):
        released_config(changes)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"quantization_config": {"quant_method": "awq"}}, "describes 'awq'"),
        ({"quantization_config": {"weight_block_size": [64, 64]}}, r"\[64, 64\]; known: 'fp8'"),
        ({"expert_dtype": "int4"}, "expert_dtype 'int4' is unknown; known: fp4, fp8, bf16"),
        ({"dspark_target_layer_ids": [1], "dspark_markov_rank": 0}, "dspark_markov_rank is 0"),
    ],
)
def test_formats_that_cannot_be_read_are_refused_by_the_configuration(
    changes: dict[str, Any], message: str
) -> None:
    with pytest.raises(CheckpointError, match=message):
        V4Config.from_dict(packed_config(**changes))


# --- transformers itself ----------------------------------------------------------------------------


@pytest.mark.parametrize("original", [True, False])
def test_what_transformers_writes_gives_its_logits(
    golden: Path, tmp_path: Path, original: bool
) -> None:
    transformers = pytest.importorskip("transformers", reason="the oracle is not installed")
    source = golden / "v4_text" / "flash_like" / "checkpoint"
    theirs = transformers.DeepseekV4ForCausalLM.from_pretrained(source, dtype=torch.float32)
    theirs.save_pretrained(tmp_path, save_original_format=original)
    config = V4Config.load(tmp_path)
    model = load_v4(tmp_path, config, dtype="float32", device="cpu").model
    case = v4_cases.read_case(source.parent / "cases" / "len_129.json")
    found = case.picked(v4_cases.engine_logits(model, case))
    assert (found - case.logits).abs().max() < 2e-4
