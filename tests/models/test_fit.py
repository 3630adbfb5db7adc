"""What `fit` says must be what the published sizes are and what loading then takes."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch

from foveal.errors import CheckpointError
from foveal.models import fit
from foveal.models.config import VL2Config
from foveal.models.fit import (
    cache_bytes_per_token,
    checkpoint_inventory,
    inspect_folder,
    picture_cost,
    picture_costs,
    plan_memory,
    weight_bytes,
)
from foveal.models.names import parameter_specs
from foveal.models.precision import DTYPES, resolve_precision
from foveal.models.vl2 import VL2Model
from foveal.runner import base, runner
from foveal.runner.cache import SequenceCache

# Published: tensors, parameters, files; bytes of config.json and of the index (spec 1.6, 2.6, 13.2).
PUBLISHED = {
    "tiny": (2582, 3_370_501_440, 1, 2287, 247_252),
    "small": (5639, 16_148_349_504, 4, 2073, 553_330),
    "base": (6973, 27_480_134_248, 8, 2171, 686_834),
}
SIZES = tuple(PUBLISHED)


def config_text(repository: Path, size: str) -> str:
    return (repository / "tests" / "data" / f"vl2_{size}_config.json").read_text()


def index_of(config: VL2Config, num_files: int) -> dict[str, Any]:
    inventory = checkpoint_inventory(config)
    files = [f"model-{i:05d}-of-{num_files:06d}.safetensors" for i in range(1, num_files + 1)]
    placed = {t.name: files[i % num_files] for i, t in enumerate(inventory)}
    total = 2 * sum(tensor.num_elements for tensor in inventory)
    return {"metadata": {"total_size": total}, "weight_map": placed}


@pytest.mark.parametrize("size", SIZES)
def test_inventory_gives_the_published_counts(repository: Path, size: str) -> None:
    config = VL2Config.from_dict(json.loads(config_text(repository, size)))
    inventory = checkpoint_inventory(config)
    tensors, parameters, *_ = PUBLISHED[size]
    assert len(inventory) == len({tensor.name for tensor in inventory}) == tensors
    assert sum(tensor.num_elements for tensor in inventory) == parameters
    unused = [tensor for tensor in inventory if not tensor.is_used]
    assert (len(unused), sum(t.num_elements for t in unused)) == (13, 15_238_352)
    vision = [tensor for tensor in inventory if tensor.name.startswith("vision.")]
    assert len(vision) == 342


@pytest.mark.parametrize("size", SIZES)
def test_rebuilt_files_have_the_published_sizes_in_bytes(repository: Path, size: str) -> None:
    text = config_text(repository, size)
    _, _, num_files, config_bytes, index_bytes = PUBLISHED[size]
    assert len(text.encode()) == config_bytes
    index = index_of(VL2Config.from_dict(json.loads(text)), num_files)
    assert len((json.dumps(index, indent=2) + "\n").encode()) == index_bytes


@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("with_index", [True, False])
def test_a_folder_of_config_and_index_is_enough(
    repository: Path, tmp_path: Path, size: str, with_index: bool
) -> None:
    tensors, _, num_files, *_ = PUBLISHED[size]
    (tmp_path / "config.json").write_text(config_text(repository, size))
    config = VL2Config.load(tmp_path)
    if with_index:
        index = tmp_path / "model.safetensors.index.json"
        index.write_text(json.dumps(index_of(config, num_files)))
    files = inspect_folder(tmp_path, config)
    assert files.source == ("index" if with_index else "config")
    assert files.num_tensors == tensors
    assert len(files.missing_files) == (num_files if with_index else 0)
    assert (files.missing, files.extra) == ((), ())


@pytest.mark.parametrize("drop_index", [False, True])
@pytest.mark.parametrize("variant", ["a_tiny", "b_small", "c_base", "d_tail_depth3"])
def test_golden_folders_agree_with_their_inventory(
    golden_vl2: Path, tmp_path: Path, variant: str, drop_index: bool
) -> None:
    folder = tmp_path / "copy"
    folder.mkdir()
    for path in (golden_vl2 / variant / "checkpoint").iterdir():
        if not (drop_index and path.name.endswith(".index.json")):
            shutil.copyfile(path, folder / path.name)
    config = VL2Config.load(folder)
    files = inspect_folder(folder, config)
    assert files.source == ("files" if drop_index else "index")
    assert files.num_tensors == len(checkpoint_inventory(config))
    assert files.num_files == 2
    assert (files.missing_files, files.missing, files.extra) == ((), (), ())


def test_missing_and_extra_tensors_are_told_before_loading(
    golden_vl2: Path, tmp_path: Path
) -> None:
    config = VL2Config.load(golden_vl2 / "a_tiny" / "checkpoint")
    index = index_of(config, 1)
    del index["weight_map"]["image_newline"], index["weight_map"]["vision.attn_pool.latent"]
    index["weight_map"]["language.surprise"] = "model-00001-of-000001.safetensors"
    path = tmp_path / "model.safetensors.index.json"
    path.write_text(json.dumps(index))
    files = inspect_folder(tmp_path, config)
    assert files.missing == ("image_newline",)  # the unused pooling head is not missed
    assert files.extra == ("language.surprise",)
    path.write_text("{}")
    with pytest.raises(CheckpointError, match="no 'weight_map'"):
        inspect_folder(tmp_path, config)


# --- memory -----------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
@pytest.mark.parametrize("variant", ["a_tiny", "b_small", "c_base"])
def test_planned_weights_are_what_the_model_allocates(
    golden_vl2: Path, variant: str, dtype: str
) -> None:
    config = VL2Config.load(golden_vl2 / variant / "checkpoint")
    device = torch.device("cpu")
    precision = resolve_precision(dtype, device, num_parameters=1, available_bytes=None)
    make = precision.factory(device)
    model = VL2Model(config, vision=make, language=make)
    allocated = sum(p.numel() * p.element_size() for p in model.parameters())
    plans = {plan.name: plan for plan in plan_memory(config, available_bytes=None).formats}
    assert weight_bytes(parameter_specs(config), dtype) == allocated  # type: ignore[arg-type]
    assert plans[dtype].weight_bytes == allocated  # type: ignore[index]


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
@pytest.mark.parametrize("variant", ["a_tiny", "b_small"])
def test_planned_cache_is_what_the_runner_allocates(
    golden_vl2: Path, variant: str, dtype: str
) -> None:
    config = VL2Config.load(golden_vl2 / variant / "checkpoint")
    for device in ("cpu", "cuda"):
        precision = resolve_precision(
            dtype, torch.device(device), num_parameters=1, available_bytes=None
        )
        cache = SequenceCache(config.language, 7, dtype=precision.act_dtype)
        rows = (row for layer in cache._layers for row in layer)
        allocated = sum(row.numel() * row.element_size() for row in rows)
        assert 7 * cache_bytes_per_token(config.language, dtype, device) == allocated  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("size", "per_token"), [("tiny", 61_440), ("small", 31_104), ("base", 34_560)]
)
def test_cache_bytes_of_the_real_sizes(repository: Path, size: str, per_token: int) -> None:
    config = VL2Config.from_dict(json.loads(config_text(repository, size)))
    assert cache_bytes_per_token(config.language, "bfloat16", "cuda") == per_token
    assert cache_bytes_per_token(config.language, "bfloat16", "cpu") == 2 * per_token
    plan = plan_memory(config, available_bytes=None, context=1000, device="cuda")
    assert plan.formats[1].cache_bytes == 1000 * per_token


def test_the_plan_knows_every_format_and_no_other() -> None:
    assert set(fit.FORMAT_BYTES) == set(DTYPES)


def test_the_plan_knows_the_runners_pieces() -> None:
    assert fit.PATCHES_PER_PASS == runner.PATCHES_PER_PASS_CPU
    assert fit.PREFILL_ROWS == base.PREFILL_CHUNK


@pytest.mark.parametrize("size", SIZES)
def test_verdicts_follow_from_the_sums(repository: Path, size: str) -> None:
    config = VL2Config.from_dict(json.loads(config_text(repository, size)))
    open_plan = plan_memory(config, available_bytes=None)
    assert open_plan.context == 4096
    for row in open_plan.formats:
        parts = row.weight_bytes + row.cache_bytes + row.activation_bytes + open_plan.process_bytes
        assert row.total_bytes == parts
        assert (row.fits, row.largest_context) == (None, None)
        just = plan_memory(config, available_bytes=row.total_bytes)
        assert row.name in just.fitting
        less = plan_memory(config, available_bytes=row.total_bytes - 1)
        assert row.name not in less.fitting
        again = {r.name: r for r in less.formats}[row.name]
        assert again.largest_context is not None
        assert 4000 < again.largest_context < 4096
        shorter = plan_memory(
            config, available_bytes=row.total_bytes - 1, context=again.largest_context
        )
        assert row.name in shorter.fitting
    nothing = plan_memory(config, available_bytes=0)
    assert [row.largest_context for row in nothing.formats] == [0, 0, 0]


def test_the_context_is_cut_to_what_the_model_can(repository: Path) -> None:
    config = VL2Config.from_dict(json.loads(config_text(repository, "tiny")))
    assert plan_memory(config, available_bytes=None, context=1 << 20).context == 4096


# --- pictures ---------------------------------------------------------------------------------------


def test_pictures_cost_what_the_specification_counts(repository: Path) -> None:
    config = VL2Config.from_dict(json.loads(config_text(repository, "base")))
    costs = {(cost.cols, cost.rows): cost for cost in picture_costs(config)}
    assert len(costs) == 23
    for (cols, rows), cost in costs.items():
        assert cost.num_tokens == 211 + 14 * rows * (14 * cols + 1)
        assert cost.num_tiles == 1 + cols * rows
    assert costs[1, 1].num_tokens == min(cost.num_tokens for cost in costs.values()) == 421
    assert costs[1, 9].num_tokens == max(cost.num_tokens for cost in costs.values()) == 2101
    assert picture_cost(config, 9, 1) == costs[9, 1]
