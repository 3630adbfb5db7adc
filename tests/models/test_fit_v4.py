"""What `fit` says of DeepSeek-V4 must be what the published files hold and what loading and running then take."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

from foveal.models import v4_fit
from foveal.models.fit import FORMAT_BYTES, PlanName
from foveal.models.layers import Factory
from foveal.models.loader import Checkpoint
from foveal.models.v4 import V4Model
from foveal.models.v4_config import V4Config
from foveal.models.v4_fit import (
    growing_bytes_per_token,
    inspect_v4_folder,
    packed_bytes,
    plan_v4_memory,
    state_bytes,
    state_item_bytes,
    weight_bytes,
)
from foveal.models.v4_inventory import StoredTensor, v4_inventory
from foveal.models.v4_names import v4_parameter_specs
from foveal.ops.packed import BLOCK_COLUMNS, PackedFormat, PackedWeight, Packing
from foveal.runner import v4_cache
from foveal.runner.v4_cache import V4SequenceCache
from tests import v4_toy
from tests.v4_packed import packed_config

# Published (spec 2.5): tensors, bytes, FP8 matrices.
PUBLISHED = {
    "v4_vision_exp": (72_633, 167_811_372_792, 390),
    "v4_flash_0731": (72_317, 166_878_536_440, 390),
}
GOLDEN = (
    "v4_text/flash_like", "v4_text/pro_like", "v4_text/flash_fp8_fp4",
    "v4_vision/vision_small", "v4_vision/vision_real_tiles",
)  # fmt: skip


def real(repository: Path, name: str) -> V4Config:
    text = (repository / "tests" / "data" / f"{name}_config.json").read_text()
    return V4Config.from_dict(json.loads(text))


# --- tensors ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", PUBLISHED)
def test_the_inventory_gives_the_published_totals_to_the_byte(repository: Path, name: str) -> None:
    inventory = v4_inventory(real(repository, name))
    tensors, num_bytes, num_fp8 = PUBLISHED[name]
    assert len(inventory) == len({tensor.name for tensor in inventory}) == tensors
    assert sum(tensor.num_bytes for tensor in inventory) == num_bytes
    assert sum(tensor.dtype == "F8_E4M3" for tensor in inventory) == num_fp8
    is_trunk = [t.part == "language" and t.is_used and "bias_vl" not in t.name for t in inventory]
    assert sum(is_trunk) == 67_612


def test_the_vision_half_has_its_published_size(repository: Path) -> None:
    inventory = v4_inventory(real(repository, "v4_vision_exp"))

    def size(*prefixes: str) -> tuple[int, int]:
        found: list[StoredTensor] = [t for t in inventory if t.name.startswith(prefixes)]
        return len(found), sum(t.num_bytes for t in found)

    assert size("vision.") == (259, 823_685_120)
    assert size("aligner.") == (4, 109_068_288)
    assert size("image_") == (4, 32_768)


@pytest.mark.parametrize("variant", GOLDEN)
def test_golden_checkpoints_hold_what_their_inventory_says(golden: Path, variant: str) -> None:
    folder = golden / variant / "checkpoint"
    stored = {n: (t.dtype, t.shape) for n, t in Checkpoint.open(folder).tensors.items()}
    inventory = v4_inventory(V4Config.load(folder))
    assert {tensor.name: (tensor.dtype, tensor.shape) for tensor in inventory} == stored
    files = inspect_v4_folder(folder, V4Config.load(folder))
    assert (files.source, files.num_tensors) == ("index", len(stored))
    assert (files.missing, files.extra, files.missing_files) == ((), (), ())


def test_missing_and_extra_tensors_are_told_before_loading(tmp_path: Path) -> None:
    config = V4Config.from_dict(packed_config(vision=True, compress_ratios=[0, 4, 128, 4, 0]))
    names = {tensor.name for tensor in v4_inventory(config)}
    names -= {"layers.2.attn.wkv.scale", "mtp.0.norm.weight", "layers.0.ffn.gate.bias"}
    names |= {"layers.0.ffn.gate.surprise", "mtp.0.surprise"}
    index = {"weight_map": dict.fromkeys(sorted(names), "a.safetensors")}
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps(index))
    files = inspect_v4_folder(tmp_path, config)
    assert files.missing == ("layers.2.attn.wkv.scale",)
    assert files.extra == ("layers.0.ffn.gate.surprise",)
    assert files.missing_files == ("a.safetensors",)


def test_stacks_in_transformers_names_count_as_their_experts(
    repository: Path, tmp_path: Path
) -> None:
    rows = json.loads((repository / "tests/data/v4_transformers_names.json").read_text())
    config = json.loads((repository / "tests/data/v4_transformers_config.json").read_text())
    config |= {"num_hidden_layers": 1, "layer_types": ["sliding_attention"], "mlp_layer_types": []}
    config["num_hash_layers"] = 1
    kept = [r[0] for r in rows["memory"] if "layers." not in r[0] or "layers.0." in r[0]]
    index = {"weight_map": dict.fromkeys(kept, "a.safetensors")}
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps(index))
    files = inspect_v4_folder(tmp_path, V4Config.from_dict(config))
    assert (files.missing, files.extra) == ((), ())


# --- memory -----------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["packed", *FORMAT_BYTES])
@pytest.mark.parametrize("kind", ["fp4", "fp8"])
def test_planned_weights_are_what_the_model_allocates(name: PlanName, kind: PackedFormat) -> None:
    config = V4Config.from_dict(packed_config(vision=True, expert_dtype=kind))
    dtype = getattr(torch, "bfloat16" if name == "packed" else name)
    packing = Packing(kind, has_float_scales=kind == "fp8") if name == "packed" else None
    model = V4Model(config, vision=Factory(dtype), language=Factory(dtype, packing=packing))
    allocated = sum(t.nbytes for t in (*model.parameters(), *model.buffers()))
    assert weight_bytes(v4_parameter_specs(config), name, kind) == allocated
    plans = {plan.name: plan for plan in plan_v4_memory(config, available_bytes=None).formats}
    assert plans[name].weight_bytes == allocated


def test_the_plan_without_torch_knows_the_packed_formats() -> None:
    assert v4_fit.SCALE_COLUMNS == BLOCK_COLUMNS
    for kind in BLOCK_COLUMNS:
        packing = Packing(kind, has_float_scales=kind == "fp8")
        for shape in ((3, 10, 20), (1, 4, 160)):
            assert packed_bytes(kind, shape) == PackedWeight.empty(shape, packing).num_bytes


def test_packed_is_planned_only_where_experts_are_packed(repository: Path) -> None:
    plain = plan_v4_memory(v4_toy.config(), available_bytes=None)
    assert [row.name for row in plain.formats] == list(FORMAT_BYTES)
    plan = plan_v4_memory(real(repository, "v4_flash_0731"), available_bytes=None)
    assert [row.name for row in plan.formats] == ["packed", *FORMAT_BYTES]
    # The drafters stay on disk, and each packed row has its own scales: close to the files, less the stages.
    assert plan.file_bytes == PUBLISHED["v4_flash_0731"][1]
    assert 0.96 < plan.formats[0].weight_bytes / plan.file_bytes < 1


@pytest.mark.parametrize("tokens", [0, 3, 4, 127, 128, 300, 1000])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_planned_state_is_what_the_cache_allocates(tokens: int, dtype: torch.dtype) -> None:
    for ratios in ([0, 4, 128, 4], [128, 0, 0, 4]):
        c = v4_toy.config(compress_ratios=ratios).language
        cache = V4SequenceCache(c, tokens, dtype=dtype)
        allocated = 0
        for layer in cache.layers:
            allocated += layer.window.rows.nbytes
            for state in (layer.main, layer.index):
                if state is not None:
                    parts = (state.values.rows, state.gates.rows, state.entries)
                    allocated += sum(part.nbytes for part in parts)
        assert state_bytes(c, tokens, dtype.itemsize) == allocated


def test_the_plan_knows_the_runners_pieces() -> None:
    assert v4_fit.RING_MARGIN == v4_cache.MARGIN
    assert v4_fit.QUERY_BLOCK == v4_cache.QUERY_BLOCK


@pytest.mark.parametrize("name", PUBLISHED)
def test_state_of_the_real_configuration_grows_by_6_9_kb_a_token(
    repository: Path, name: str
) -> None:
    c = real(repository, name).language
    assert growing_bytes_per_token(c, 2) == 21 * (128 + 32) * 2 + 20 * 4 * 2 == 6880
    assert state_bytes(c, 128_000, 2) - state_bytes(c, 0, 2) == 128_000 * 6880
    fixed = 43 * (128 + 8) * 512 * 2  # windows
    fixed += 21 * 2 * 16 * 2 * (512 + 128) * 4 + 20 * 2 * 136 * 512 * 4  # residues, float32
    assert state_bytes(c, 0, 2) == fixed == 20_570_112
    assert state_item_bytes("bfloat16", "cuda") == state_item_bytes("packed", "cuda") == 2
    assert state_item_bytes("bfloat16", "cpu") == 4


@pytest.mark.parametrize("name", PUBLISHED)
def test_verdicts_follow_from_the_sums(repository: Path, name: str) -> None:
    config = real(repository, name)
    plan = plan_v4_memory(config, available_bytes=None, context=32_768)
    for row in plan.formats:
        parts = row.weight_bytes + row.cache_bytes + row.activation_bytes + plan.process_bytes
        assert row.total_bytes == parts
        assert (row.fits, row.largest_context) == (None, None)
    least = min(plan.formats, key=lambda row: row.total_bytes)
    assert least.name == "packed"
    just = plan_v4_memory(config, available_bytes=least.total_bytes, context=32_768)
    assert just.fitting == ("packed",)
    assert just.formats[0].largest_context is not None
    assert just.formats[0].largest_context >= 32_768
    less = plan_v4_memory(config, available_bytes=least.total_bytes - 1, context=32_768)
    assert less.fitting == ()


def test_the_context_is_cut_to_what_the_model_can(repository: Path) -> None:
    plan = plan_v4_memory(real(repository, "v4_flash_0731"), available_bytes=None, context=1 << 30)
    assert plan.context == 1_048_576


# --- which family -----------------------------------------------------------------------------------


@pytest.mark.parametrize("name", PUBLISHED)
def test_towers_and_drafters_are_told_by_keys_alone(repository: Path, name: str) -> None:
    config = real(repository, name)
    assert (config.vision is not None) is (name == "v4_vision_exp")
    assert config.dspark is not None
    assert config.language.num_drafter_stages == 3
    text = (repository / "tests" / "data" / f"{name}_config.json").read_text()
    values = {k: v for k, v in json.loads(text).items() if not k.startswith(("dspark", "vision"))}
    preview = V4Config.from_dict(values)
    assert (preview.vision, preview.dspark) == (None, None)
