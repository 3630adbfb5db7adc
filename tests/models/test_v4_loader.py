"""DeepSeek-V4 checkpoints into models: exact numbers from codes, codes kept as they are, and what is left on disk."""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from foveal.errors import CheckpointError, PromptError, ResourceError
from foveal.models.build import Loaded, load_v4
from foveal.models.layers import PackedExperts, destinations
from foveal.models.loader import Checkpoint, load_parameters
from foveal.models.names import ParameterSpec, Source
from foveal.models.reference_v4 import reference_v4_forward
from foveal.models.v4 import V4Model
from foveal.models.v4_config import V4Config
from foveal.models.v4_names import is_set_aside, v4_parameter_specs
from foveal.models.v4_weights import resolve_weights, stored_packing
from foveal.ops.packed import PackedWeight, Packing
from foveal.parallel.sharding import Plan
from tests.golden import v4_cases
from tests.v4_packed import (
    Stored,
    numbers_of,
    packed_config,
    random_tensors,
    stored_file,
    write_checkpoint,
    write_safetensors,
)

KINDS: dict[str, dict[str, Any]] = {
    "fp4": packed_config(),
    "fp8 with float32 scales": packed_config(expert_dtype="fp8"),
    "numbers": packed_config(quantization_config=None),
}


def load(folder: Path, **options: Any) -> Loaded[V4Model]:
    options = {"dtype": "float32", "device": "cpu"} | options
    return load_v4(folder, V4Config.load(folder), **options)


def logits(model: V4Model, ids: list[int]) -> torch.Tensor:
    tokens = torch.tensor(ids)
    with torch.inference_mode():
        return reference_v4_forward(model.language, model.embed(tokens), tokens)


def expected_numbers(spec: ParameterSpec, tensors: Mapping[str, Stored]) -> torch.Tensor:
    filled = np.full(spec.shape, np.nan)
    for source in spec.sources:
        base = filled if source.index is None else filled[source.index]
        rows = numbers_of(source.name, tensors)
        base[source.offset : source.offset + source.shape[0]] = rows
    return torch.from_numpy(filled)


# --- numbers ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_the_golden_checkpoint_gives_its_numbers(golden: Path, dtype: str) -> None:
    folder = golden / "v4_text" / "flash_fp8_fp4" / "checkpoint"
    tensors: dict[str, Stored] = {}
    for path in sorted(folder.glob("*.safetensors")):
        tensors |= stored_file(path)
    model = load(folder, dtype=dtype, weights="dense").model
    filled = destinations(model)
    for spec in v4_parameter_specs(V4Config.load(folder)):
        found, expected = filled[spec.name], expected_numbers(spec, tensors)
        assert isinstance(found, torch.Tensor)
        assert torch.equal(found.double(), expected.to(found.dtype).double()), spec.name
        if dtype == "bfloat16" and spec.dtype == "model":
            assert torch.equal(found.double(), expected), f"{spec.name} is exact in bfloat16"


@pytest.mark.parametrize("kind", KINDS)
def test_toy_checkpoints_with_partial_blocks_give_their_numbers(tmp_path: Path, kind: str) -> None:
    values = KINDS[kind]
    tensors = random_tensors(values)
    filled = destinations(load(write_checkpoint(tmp_path, values, tensors), weights="dense").model)
    for spec in v4_parameter_specs(V4Config.from_dict(values)):
        found = filled[spec.name]
        assert isinstance(found, torch.Tensor)
        assert torch.equal(found, expected_numbers(spec, tensors).to(found.dtype)), spec.name


@pytest.mark.parametrize("readers", [1, 3])
def test_large_matrices_are_read_in_bands(tmp_path: Path, readers: int) -> None:
    generator = np.random.default_rng(0)
    tensors = {
        "a.weight": Stored("I8", (700, 640), generator.bytes(700 * 640)),
        "a.scale": Stored("F8_E8M0", (700, 40), bytes(generator.integers(120, 125, 28_000, "u1"))),
        "b.weight": Stored("F8_E4M3", (700, 640), bytes([v % 120 for v in range(700 * 640)])),
        "b.scale": Stored("F32", (6, 5), generator.random(30).astype(np.float32).tobytes()),
    }
    write_safetensors(tmp_path / "model.safetensors", tensors)
    specs = [
        ParameterSpec(n, shape, (Source(n, shape),), Plan.REPLICATE, "language")
        for n, shape in (("a.weight", (700, 1280)), ("b.weight", (700, 640)))
    ]
    filled = {spec.name: torch.empty(spec.shape) for spec in specs}
    calls: list[tuple[int, int]] = []
    report = load_parameters(
        specs,
        Checkpoint.open(tmp_path),
        filled,
        lambda done, total: calls.append((done, total)),
        num_readers=readers,
    )
    assert len(calls) > 4  # more than one band each
    # Neighbouring bands may share a row of scales.
    assert calls[-1][0] == calls[-1][1] == report.num_bytes >= sum(map(_size, tensors.values()))
    for name in filled:
        expected = torch.from_numpy(numbers_of(name, tensors)).float()
        assert torch.equal(filled[name], expected)


def _size(tensor: Stored) -> int:
    return len(tensor.data)


def test_scales_may_lie_in_another_file_and_be_stored_as_plain_bytes(tmp_path: Path) -> None:
    values = packed_config()
    tensors = random_tensors(values)
    whole = write_checkpoint(tmp_path / "whole", values, tensors)
    folder = write_checkpoint(tmp_path / "split", values, tensors)
    scales = {n: replace(t, dtype="U8") for n, t in tensors.items() if t.dtype == "F8_E8M0"}
    others = {n: t for n, t in tensors.items() if n not in scales}
    write_safetensors(folder / "model.safetensors", others)
    write_safetensors(folder / "scales.safetensors", scales)
    ids = [3, 1, 4, 1, 5, 9, 2, 6]
    assert torch.equal(logits(load(folder).model, ids), logits(load(whole).model, ids))


def test_tables_of_experts_are_whole_numbers(tmp_path: Path) -> None:
    table = np.array([[2**53 + 1, -1], [2**31, 7]], np.int64)
    tensors = {
        "t": Stored("I64", (2, 2), table.tobytes()),
        "u": Stored("I32", (2,), np.array([5, 6], np.int32).tobytes()),
    }
    write_safetensors(tmp_path / "model.safetensors", tensors)
    specs = [
        ParameterSpec(n, s, (Source(n, s),), Plan.REPLICATE, "language", "int64")
        for n, s in (("t", (2, 2)), ("u", (2,)))
    ]
    filled = {spec.name: torch.zeros(spec.shape, dtype=torch.int64) for spec in specs}
    load_parameters(specs, Checkpoint.open(tmp_path), filled)
    assert filled["t"].tolist() == table.tolist()
    assert filled["u"].tolist() == [5, 6]


def test_a_table_of_experts_must_not_be_fractions(tmp_path: Path) -> None:
    values = packed_config()
    tensors = random_tensors(values)
    name = "layers.0.ffn.gate.tid2eid"
    count = len(tensors[name].data) // 8
    tensors[name] = Stored("F32", tensors[name].shape, bytes(4 * count))
    with pytest.raises(CheckpointError, match=r"tid2eid \(F32; readable: I64, I32\)"):
        load(write_checkpoint(tmp_path, values, tensors))


# --- packed -----------------------------------------------------------------------------------------


def test_golden_logits_are_the_same_bits_from_codes(golden: Path) -> None:
    variant = golden / "v4_text" / "flash_fp8_fp4"
    case = v4_cases.read_case(variant / "cases" / "len_129.json")
    found = {
        weights: v4_cases.engine_logits(v4_cases.load(variant, weights=weights), case, chunk=50)
        for weights in ("dense", "packed")
    }
    assert torch.equal(found["dense"], found["packed"])
    assert (case.picked(found["packed"]) - case.logits).abs().max() < 2e-4


@pytest.mark.parametrize("kind", ["fp4", "fp8 with float32 scales"])
def test_packed_experts_keep_the_files_codes(tmp_path: Path, kind: str) -> None:
    values = KINDS[kind]
    tensors = random_tensors(values)
    folder = write_checkpoint(tmp_path, values, tensors)
    dense, packed = load(folder, weights="dense"), load(folder, weights="packed")
    stacks = [m for m in packed.model.modules() if isinstance(m, PackedExperts)]
    assert len(stacks) == 4
    codes = stacks[2].w13.codes[5]  # the gate's rows, then the up rows, of expert 5
    stored = b"".join(tensors[f"layers.2.ffn.experts.5.{m}.weight"].data for m in ("w1", "w3"))
    assert codes.numpy().tobytes() == stored
    for spec in v4_parameter_specs(V4Config.from_dict(values)):
        kept = destinations(packed.model)[spec.name]
        numbers = destinations(dense.model)[spec.name]
        assert isinstance(numbers, torch.Tensor)
        assert torch.equal(kept.dense() if isinstance(kept, PackedWeight) else kept, numbers)
    ids = [7, 7, 0, 99, 3, 20, 41, 6, 6]
    assert torch.equal(logits(packed.model, ids), logits(dense.model, ids))


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("weights", ["dense", "packed"])
def test_the_choice_counts_what_the_model_then_takes(
    tmp_path: Path, weights: str, dtype: str
) -> None:
    values = packed_config(vision=True)
    loaded = load(
        write_checkpoint(tmp_path, values, random_tensors(values)), weights=weights, dtype=dtype
    )
    tensors = [*loaded.model.parameters(), *loaded.model.buffers()]
    assert loaded.weights is not None
    assert loaded.weights.num_bytes == sum(t.nbytes for t in tensors)
    assert loaded.weights.name == weights


def test_experts_of_two_kinds_become_numbers(tmp_path: Path) -> None:
    values = packed_config()
    tensors = random_tensors(values)
    name = "layers.1.ffn.experts.3.w2"
    rows, columns = 48, 24
    tensors[f"{name}.weight"] = Stored("BF16", (rows, columns), bytes(2 * rows * columns))
    del tensors[f"{name}.scale"]
    folder = write_checkpoint(tmp_path, values, tensors)
    specs = v4_parameter_specs(V4Config.from_dict(values))
    assert stored_packing(specs, Checkpoint.open(folder).tensors) is None
    loaded = load(folder)
    assert loaded.weights is not None
    assert loaded.weights.packing is None
    with pytest.raises(PromptError, match="this one has numbers"):
        load(folder, weights="packed")


def test_codes_of_another_kind_cannot_fill_a_packed_weight(tmp_path: Path) -> None:
    shape = (2, 64)
    tensors = {
        "a.weight": Stored("F8_E4M3", shape, bytes(128)),
        "a.scale": Stored("F8_E8M0", (1, 1), b"\x7f"),
        "b.weight": Stored("BF16", shape, bytes(256)),
    }
    write_safetensors(tmp_path / "model.safetensors", tensors)
    specs = [
        ParameterSpec(n, shape, (Source(n, shape),), Plan.EXPERT, "language")
        for n in ("a.weight", "b.weight")
    ]
    filled = {spec.name: PackedWeight.empty(shape, Packing("fp4")) for spec in specs}
    with pytest.raises(CheckpointError) as caught:
        load_parameters(specs, Checkpoint.open(tmp_path), filled)
    assert "a.weight (F8_E4M3 with F8_E8M0 scales; kept packed as fp4)" in str(caught.value)
    assert "b.weight (BF16; kept packed as fp4)" in str(caught.value)


# --- choice -----------------------------------------------------------------------------------------

GB = 10**9
CPU, GPU = torch.device("cpu"), torch.device("cuda")


def real_specs(repository: Path) -> list[ParameterSpec]:
    text = (repository / "tests" / "data" / "v4_vision_exp_config.json").read_text()
    return v4_parameter_specs(V4Config.from_dict(json.loads(text)))


@pytest.mark.parametrize(
    ("device", "dtype", "free", "expected"),
    [
        (CPU, "auto", None, ("float32", "dense")),
        (CPU, "auto", 1400 * GB, ("float32", "dense")),
        (CPU, "auto", 700 * GB, ("bfloat16", "dense")),
        (CPU, "auto", 250 * GB, ("float32", "packed")),
        (CPU, "auto", 190 * GB, ("bfloat16", "packed")),
        (CPU, "float32", 700 * GB, ("float32", "packed")),
        (CPU, "bfloat16", 700 * GB, ("bfloat16", "dense")),
        (GPU, "auto", 700 * GB, ("bfloat16", "dense")),
        (GPU, "auto", 190 * GB, ("bfloat16", "packed")),
    ],
)
def test_numbers_where_they_fit_else_codes(
    repository: Path,
    device: torch.device,
    dtype: str,
    free: int | None,
    expected: tuple[str, str],
) -> None:
    choice = resolve_weights(
        real_specs(repository),
        Packing("fp4"),
        dtype=dtype,
        device=device,
        weights="auto",
        available_bytes=free,
    )
    assert (choice.precision.name, choice.name) == expected
    choice.require_room("model")
    if expected[1] == "packed":
        assert choice.reason.startswith("fp4 codes, as the checkpoint has them: ")
        assert "would not fit" in choice.reason


def test_a_machine_without_room_is_told_what_is_needed(repository: Path) -> None:
    choice = resolve_weights(
        real_specs(repository),
        Packing("fp4"),
        dtype="auto",
        device=CPU,
        weights="auto",
        available_bytes=20 * GB,
    )
    with pytest.raises(
        ResourceError, match=r"packed fp4 weights need 163\.5 GB, but 20\.0 GB .*`foveal fit flash`"
    ):
        choice.require_room("flash")


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"weights": "tight"}, "weights 'tight' is unknown; choose one of auto, dense, packed"),
        ({"dtype": "int3"}, "dtype 'int3' is unknown"),
        ({"fidelity": "exact"}, "fidelity 'exact' is unknown"),
    ],
)
def test_unknown_choices_are_refused(tmp_path: Path, options: dict[str, str], message: str) -> None:
    values = packed_config()
    folder = write_checkpoint(tmp_path, values, random_tensors(values))
    with pytest.raises(PromptError, match=message):
        load(folder, **options)


# --- what is wrong with a checkpoint ----------------------------------------------------------------


def test_one_error_lists_every_scale_that_is_missing_or_misshapen(tmp_path: Path) -> None:
    values = packed_config()
    tensors = random_tensors(values)
    del tensors["layers.0.attn.wq_a.scale"], tensors["layers.1.ffn.experts.2.w1.scale"]
    tensors["layers.2.attn.wkv.scale"] = Stored("F8_E8M0", (1, 2), b"\x7f\x7f")
    tensors["layers.2.attn.wq_b.scale"] = Stored("F16", (1, 1), b"\0\0")
    tensors["layers.3.ffn.experts.0.w2.weight"] = Stored("I8", (48, 24), bytes(48 * 24))
    tensors["layers.3.attn_norm.scale"] = Stored("F32", (1,), bytes(4))
    with pytest.raises(CheckpointError) as caught:
        load(write_checkpoint(tmp_path, values, tensors))
    message = str(caught.value)
    assert "2 missing: layers.0.attn.wq_a.scale, layers.1.ffn.experts.2.w1.scale." in message
    assert "1 extra: layers.3.attn_norm.scale." in message
    assert "2 misshapen: layers.2.attn.wkv.scale (expected [1, 1], found [1, 2])" in message
    assert "layers.3.ffn.experts.0.w2.weight (expected [48, 12] for fp4, found [48, 24])" in message
    assert "layers.2.attn.wq_b.scale (F16; readable: F8_E8M0, U8, F32)" in message


@pytest.mark.parametrize("kind", ["fp4", "fp8 with float32 scales"])
@pytest.mark.parametrize("weights", ["dense", "packed"])
def test_a_scale_that_is_no_number_is_found(tmp_path: Path, kind: str, weights: str) -> None:
    values = KINDS[kind]
    tensors = random_tensors(values)
    name = "layers.1.ffn.experts.6.w2.scale"
    raw = bytearray(tensors[name].data)
    raw[-4:] = np.float32(np.inf).tobytes() if kind != "fp4" else b"\xff" * 4
    tensors[name] = replace(tensors[name], data=bytes(raw))
    folder = write_checkpoint(tmp_path, values, tensors)
    with pytest.raises(
        CheckpointError, match=r"model\.safetensors has a weight scale that is not a finite"
    ):
        load(folder, weights=weights)


# --- what stays on disk -----------------------------------------------------------------------------


@pytest.fixture
def touched(monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[[Path, int, int], bool]]:
    """Says whether any byte of a range of a file was read after the fixture was set up."""
    read: list[tuple[str, int, int]] = []
    real = os.preadv

    def watched(descriptor: int, buffers: Any, offset: int) -> int:
        got = real(descriptor, buffers, offset)
        read.append((os.readlink(f"/proc/self/fd/{descriptor}"), offset, offset + got))
        return got

    monkeypatch.setattr(os, "preadv", watched)

    def is_touched(path: Path, start: int, end: int) -> bool:
        assert read, "nothing was read at all"
        name = os.path.realpath(path)
        return any(p == name and low < end and start < high for p, low, high in read)

    return is_touched


@pytest.mark.parametrize("with_vision", [True, False])
def test_without_pictures_no_tensor_of_the_vision_half_is_read(
    golden: Path, touched: Callable[[Path, int, int], bool], with_vision: bool
) -> None:
    variant = golden / "v4_vision" / "vision_small"
    model = v4_cases.load(variant, with_vision=with_vision)
    assert model.has_tower is with_vision
    tensors = Checkpoint.open(variant / "checkpoint").tensors
    vision = [
        info for name, info in tensors.items() if name.startswith(("vision.", "aligner.", "image_"))
    ]
    assert len(vision) == 2 + 2 * 8 + 1 + 4 + 4
    for info in vision:
        assert touched(info.path, info.start, info.end) is with_vision
    bias = tensors["layers.0.ffn.gate.bias_vl"]
    assert touched(bias.path, bias.start, bias.end), "picture ids could still be routed"


def test_text_is_the_same_bits_without_the_tower(golden: Path) -> None:
    variant = golden / "v4_vision" / "vision_small"
    case = v4_cases.read_case(variant / "cases" / "text_only.json")
    models = [v4_cases.load(variant, with_vision=w) for w in (True, False)]
    found = [v4_cases.engine_logits(model, case) for model in models]
    assert torch.equal(found[0], found[1])


@pytest.mark.parametrize("dspark", [False, True])
def test_drafters_and_unused_biases_are_set_aside_and_counted(
    tmp_path: Path, touched: Callable[[Path, int, int], bool], dspark: bool
) -> None:
    keys = {"dspark_target_layer_ids": [1, 2], "dspark_markov_rank": 8} if dspark else {}
    ratios = [0, 4, 128, 4, *([0, 0, 0] if dspark else [0])]
    values = packed_config(vision=True, compress_ratios=ratios, **keys)
    tensors = random_tensors(values)
    loaded = load(write_checkpoint(tmp_path, values, tensors))
    aside = {name for name in tensors if name.startswith("mtp.")}
    assert any("main_proj" in name for name in aside) is dspark
    aside.add("layers.0.ffn.gate.bias")  # layer 0 looks its experts up
    assert set(loaded.report.set_aside) == aside
    assert loaded.report.num_tensors == len(tensors) - len(aside)
    opened = Checkpoint.open(tmp_path).tensors
    assert not any(touched(opened[n].path, opened[n].start, opened[n].end) for n in aside)


def test_only_biases_of_hash_layers_are_set_aside() -> None:
    config = V4Config.from_dict(packed_config(num_hash_layers=2))
    found = [
        layer
        for layer in range(4)
        if is_set_aside(f"layers.{layer}.ffn.gate.bias", config, with_vision=True)
    ]
    assert found == [0, 1]
    assert not is_set_aside("layers.0.ffn.gate.bias_vl", config, with_vision=True)
    assert is_set_aside("mtp.0.ffn.gate.bias", config, with_vision=True)
    assert not is_set_aside("image_start", config, with_vision=True)
    assert is_set_aside("image_start", config, with_vision=False)
