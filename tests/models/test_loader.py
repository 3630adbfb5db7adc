"""Safetensors files into tensors: exact numbers, little memory, and one clear error for each way to be broken."""

from __future__ import annotations

import contextlib
import importlib.util
import json
import os
import struct
import subprocess
import sys
import tempfile
import threading
from collections.abc import Mapping
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors import safe_open
from safetensors.torch import save_file

from foveal.errors import CheckpointError
from foveal.models.config import VL2Config
from foveal.models.loader import Checkpoint, load_parameters
from foveal.models.names import ParameterSpec, Source, parameter_specs
from foveal.models.safetensors_header import MAX_HEADER_BYTES, read_header
from foveal.parallel.sharding import Plan

VARIANTS = (
    "a_tiny", "a_tiny_384", "b_small", "c_base", "c_groups", "d_linear", "d_tail_depth3",
)  # fmt: skip


def spec(name: str, shape: tuple[int, ...], *sources: Source) -> ParameterSpec:
    return ParameterSpec(name, shape, sources or (Source(name, shape),), Plan.REPLICATE, "language")


def header_bytes(entries: Mapping[str, Any]) -> bytes:
    text = json.dumps(entries).encode()
    return struct.pack("<Q", len(text)) + text


def entry(dtype: str, shape: list[int], begin: int, end: int) -> dict[str, Any]:
    return {"dtype": dtype, "shape": shape, "data_offsets": [begin, end]}


def written(folder: Path, tensors: dict[str, torch.Tensor]) -> Checkpoint:
    save_file(tensors, folder / "model.safetensors")
    return Checkpoint.open(folder)


# --- numbers ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("variant", VARIANTS)
def test_golden_checkpoint_loads_equal_to_the_format_library(
    golden_vl2: Path, variant: str, dtype: torch.dtype
) -> None:
    folder = golden_vl2 / variant / "checkpoint"
    specs = parameter_specs(VL2Config.load(folder))
    checkpoint = Checkpoint.open(folder)
    filled = {s.name: torch.full(s.shape, float("nan"), dtype=dtype) for s in specs}
    load_parameters(specs, checkpoint, filled)
    opened = {path: safe_open(path, "pt") for path in folder.glob("*.safetensors")}
    for one in specs:
        assert not filled[one.name].isnan().any(), one.name
        for source in one.sources:
            file: Any = opened[checkpoint.tensors[source.name].path]
            stored = file.get_tensor(source.name).to(dtype)
            base = filled[one.name] if source.index is None else filled[one.name][source.index]
            rows = base[source.offset : source.offset + stored.shape[0]]
            assert torch.equal(rows, stored.view(rows.shape)), source.name


def test_stacks_and_fused_rows_land_in_their_places(tmp_path: Path) -> None:
    parts = {f"e{e}.{half}": torch.randn(2, 3) for e in range(3) for half in ("gate", "up")}
    sources = [
        Source(f"e{e}.{half}", (2, 3), offset, e)
        for e in range(3)
        for offset, half in ((0, "gate"), (2, "up"))
    ]
    filled = {"w13": torch.empty(3, 4, 3)}
    load_parameters([spec("w13", (3, 4, 3), *sources)], written(tmp_path, parts), filled)
    expected = [torch.cat((parts[f"e{e}.gate"], parts[f"e{e}.up"])) for e in range(3)]
    assert torch.equal(filled["w13"], torch.stack(expected))


@pytest.mark.parametrize("stored", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("wanted", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("readers", [1, 2])
def test_each_dtype_converts_in_pieces_as_torch_does(
    tmp_path: Path, stored: torch.dtype, wanted: torch.dtype, readers: int
) -> None:
    # 700,001 numbers are more than one piece of 1 MiB in every dtype, and end in a part of a piece.
    tensors = {"a": torch.randn(700_001).to(stored), "b": torch.randn(5, 1).to(stored)}
    specs = [spec("a", (700_001,)), spec("b", (5, 1))]
    filled = {s.name: torch.empty(s.shape, dtype=wanted) for s in specs}
    load_parameters(specs, written(tmp_path, tensors), filled, num_readers=readers)
    for name, tensor in tensors.items():
        assert torch.equal(filled[name], tensor.to(wanted))


def test_zero_and_one_element_tensors_load(tmp_path: Path) -> None:
    tensors = {"none": torch.empty(0, 4), "one": torch.tensor(3.5), "last": torch.ones(1)}
    specs = [spec("none", (0, 4)), spec("one", ()), spec("last", (1,))]
    filled = {s.name: torch.empty(s.shape) for s in specs}
    load_parameters(specs, written(tmp_path, tensors), filled)
    assert float(filled["one"]) == 3.5


def test_progress_counts_every_byte_once_in_the_callers_thread(tmp_path: Path) -> None:
    tensors = {"a": torch.randn(700_001), "b": torch.randn(9)}
    specs = [spec("a", (700_001,)), spec("b", (9,))]
    calls: list[tuple[int, int]] = []

    def progress(done: int, total: int) -> None:
        assert threading.current_thread() is threading.main_thread()
        calls.append((done, total))

    filled = {s.name: torch.empty(s.shape) for s in specs}
    load_parameters(specs, written(tmp_path, tensors), filled, progress)
    total = 4 * 700_010
    assert calls[0] == (0, total)
    assert calls[-1] == (total, total)
    assert [done for done, _ in calls] == sorted({done for done, _ in calls})


def test_an_error_in_progress_stops_the_load(tmp_path: Path) -> None:
    checkpoint = written(tmp_path, {"a": torch.randn(3_000_000)})

    def interrupt(done: int, total: int) -> None:
        if done:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        load_parameters(
            [spec("a", (3_000_000,))], checkpoint, {"a": torch.empty(3_000_000)}, interrupt
        )


def test_ignored_tensors_are_never_read(golden_vl2: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = golden_vl2 / "a_tiny" / "checkpoint"
    checkpoint = Checkpoint.open(folder)
    ignored = [info for name, info in checkpoint.tensors.items() if "attn_pool" in name]
    assert len(ignored) == 13
    read: list[tuple[str, int, int]] = []
    real = os.preadv

    def watched(descriptor: int, buffers: Any, offset: int) -> int:
        got = real(descriptor, buffers, offset)
        read.append((os.readlink(f"/proc/self/fd/{descriptor}"), offset, offset + got))
        return got

    monkeypatch.setattr(os, "preadv", watched)
    specs = parameter_specs(VL2Config.load(folder))
    load_parameters(specs, checkpoint, {s.name: torch.empty(s.shape) for s in specs})
    for info in ignored:
        touched = [r for r in read if r[0] == os.path.realpath(info.path)]
        assert touched
        assert all(end <= info.start or start >= info.end for _, start, end in touched)


# --- folders ----------------------------------------------------------------------------------------


def test_c007_neither_architectures_nor_the_folders_name_matter(
    tmp_path: Path, golden_vl2: Path
) -> None:
    source = golden_vl2 / "b_small" / "checkpoint"
    folder = tmp_path / "моя модель (1)"
    folder.mkdir()
    for path in source.iterdir():
        (folder / path.name).write_bytes(path.read_bytes())
    config = json.loads((folder / "config.json").read_text())
    for key in ("architectures", "auto_map"):
        del config[key], config["language_config"][key]
    (folder / "config.json").write_text(json.dumps(config))
    specs = parameter_specs(VL2Config.load(folder))
    load_parameters(specs, Checkpoint.open(folder), {s.name: torch.empty(s.shape) for s in specs})


def test_c016_plain_heads_of_width_zero_in_the_config_load(golden_vl2: Path) -> None:
    folder = golden_vl2 / "a_tiny" / "checkpoint"
    config = VL2Config.load(folder)
    assert (config.language.qk_nope_head_dim, config.language.qk_rope_head_dim) == (0, 0)
    assert not config.language.uses_mla
    specs = parameter_specs(config)
    load_parameters(specs, Checkpoint.open(folder), {s.name: torch.empty(s.shape) for s in specs})


@pytest.mark.parametrize("name", ["pytorch_model.bin", "consolidated.00.pth", "model.pt", "x.ckpt"])
def test_c106_pickled_weights_are_refused_with_the_way_out(tmp_path: Path, name: str) -> None:
    (tmp_path / name).write_bytes(b"\x80\x04never unpickled")
    with pytest.raises(CheckpointError, match=r"pickles only.*run code.*save_file") as caught:
        Checkpoint.open(tmp_path)
    assert name in str(caught.value)


def test_pickled_weights_beside_safetensors_are_left_alone(tmp_path: Path) -> None:
    (tmp_path / "pytorch_model.bin").write_bytes(b"\x80\x04never unpickled")
    assert list(written(tmp_path, {"a": torch.ones(1)}).tensors) == ["a"]


def test_a_folder_without_weights_says_so(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match=r"no \*\.safetensors file"):
        Checkpoint.open(tmp_path)
    with pytest.raises(CheckpointError, match="is not a folder"):
        Checkpoint.open(tmp_path / "absent")


def write_index(folder: Path, weight_map: object) -> None:
    text = json.dumps({"metadata": {}, "weight_map": weight_map})
    (folder / "model.safetensors.index.json").write_text(text)


def test_missing_shards_are_listed(tmp_path: Path) -> None:
    save_file({"a": torch.ones(1)}, tmp_path / "one.safetensors")
    write_index(
        tmp_path, {"a": "one.safetensors", "b": "two.safetensors", "c": "three.safetensors"}
    )
    with pytest.raises(
        CheckpointError, match=r"lacks 2 of 3 .*: three.safetensors, two.safetensors;"
    ):
        Checkpoint.open(tmp_path)


@pytest.mark.parametrize("name", ["../one.safetensors", "/etc/passwd", "a/../../b.safetensors"])
def test_an_index_cannot_point_outside_the_folder(tmp_path: Path, name: str) -> None:
    write_index(tmp_path, {"a": name})
    with pytest.raises(CheckpointError, match="outside the model's folder"):
        Checkpoint.open(tmp_path)


@pytest.mark.parametrize("weight_map", [None, [], {"a": 3}, "x"])
def test_an_index_without_a_weight_map_is_an_error(tmp_path: Path, weight_map: object) -> None:
    write_index(tmp_path, weight_map)
    with pytest.raises(CheckpointError, match=r"index\.json has no 'weight_map'"):
        Checkpoint.open(tmp_path)


def test_a_tensor_in_two_files_is_an_error(tmp_path: Path) -> None:
    for name in ("one", "two"):
        save_file({"a": torch.ones(1)}, tmp_path / f"{name}.safetensors")
    with pytest.raises(
        CheckpointError, match=r"'a' is in one\.safetensors and in two\.safetensors"
    ):
        Checkpoint.open(tmp_path)


# --- tables that do not agree -----------------------------------------------------------------------


def test_one_error_lists_missing_extra_misshapen_and_unreadable(tmp_path: Path) -> None:
    tensors = {
        "shape": torch.ones(2, 3),
        "whole": torch.ones(4, dtype=torch.int32),
        "surplus": torch.ones(1),
        "vision.attn_pool.latent": torch.ones(1),
        "layers.0.rotary_emb.inv_freq": torch.ones(1),
    }
    specs = [spec("absent", (1,)), spec("shape", (3, 2)), spec("whole", (4,))]
    filled = {s.name: torch.zeros(s.shape) for s in specs}
    with pytest.raises(CheckpointError) as caught:
        load_parameters(specs, written(tmp_path, tensors), filled)
    message = str(caught.value)
    assert str(tmp_path) in message
    assert "1 missing: absent." in message
    assert "1 extra: surplus." in message
    assert "1 misshapen: shape (expected [3, 2], found [2, 3])." in message
    assert "whole (I32; readable: BF16, F16, F32)" in message


def test_long_lists_are_cut_but_counted(tmp_path: Path) -> None:
    specs = [spec(f"t{i:03}", (1,)) for i in range(123)]
    with pytest.raises(CheckpointError, match=r"123 missing: t000, .*t019 and 103 more\."):
        load_parameters(specs, written(tmp_path, {}), {s.name: torch.zeros(1) for s in specs})


def test_the_caller_can_ignore_more_tensors(tmp_path: Path) -> None:
    checkpoint = written(tmp_path, {"a": torch.ones(1), "tied": torch.ones(1)})
    filled = {"a": torch.zeros(1)}
    load_parameters([spec("a", (1,))], checkpoint, filled, ignored=lambda name: name == "tied")
    assert float(filled["a"]) == 1.0


# --- broken files -----------------------------------------------------------------------------------


@pytest.mark.parametrize("kept", [0, 3, 8, 40, 0.5, 0.99])
def test_a_truncated_file_is_named(tmp_path: Path, kept: float) -> None:
    written(tmp_path, {"a": torch.randn(40), "b": torch.randn(8, 8)})
    path = tmp_path / "model.safetensors"
    whole = path.read_bytes()
    path.write_bytes(whole[: int(kept if kept >= 1 else kept * len(whole))])
    with pytest.raises(
        CheckpointError, match=r"model\.safetensors is truncated: .*; download"
    ) as caught:
        Checkpoint.open(tmp_path)
    assert str(path) in str(caught.value)


def test_a_file_cut_after_it_was_opened_is_named(tmp_path: Path) -> None:
    checkpoint = written(tmp_path, {"a": torch.randn(4096)})
    os.truncate(tmp_path / "model.safetensors", 5000)
    with pytest.raises(
        CheckpointError, match=r"model\.safetensors is truncated: it ends at byte 5000"
    ):
        load_parameters([spec("a", (4096,))], checkpoint, {"a": torch.empty(4096)})


def test_a_file_removed_after_it_was_opened_is_named(tmp_path: Path) -> None:
    checkpoint = written(tmp_path, {"a": torch.randn(4)})
    (tmp_path / "model.safetensors").unlink()
    with pytest.raises(CheckpointError, match=r"model\.safetensors cannot be read: No such file"):
        load_parameters([spec("a", (4,))], checkpoint, {"a": torch.empty(4)})


def test_a_git_lfs_pointer_is_recognised(tmp_path: Path) -> None:
    path = tmp_path / "model.safetensors"
    path.write_text("version https://git-lfs.github.com/spec/v1\noid sha256:00\nsize 6740000000\n")
    with pytest.raises(CheckpointError, match=r"Git LFS pointer.*git lfs pull"):
        read_header(path)


FLOAT = entry("F32", [2], 0, 8)
BROKEN: dict[str, bytes] = {
    "header over the limit": struct.pack("<Q", MAX_HEADER_BYTES + 1) + b"{}",
    "not JSON": struct.pack("<Q", 4) + b"nope",
    "not UTF-8": struct.pack("<Q", 2) + b"\xff\xfe",
    "a list": struct.pack("<Q", 2) + b"[]",
    "nested too deep": struct.pack("<Q", 200_000) + b"[" * 200_000,
    "a name twice": struct.pack("<Q", 14) + b'{"a":1,"a":{}}',
    "entry is no object": header_bytes({"a": 3}),
    "no offsets": header_bytes({"a": {"dtype": "F32", "shape": [2]}}) + bytes(8),
    "shape of fractions": header_bytes({"a": {**FLOAT, "shape": [2.0]}}) + bytes(8),
    "shape of booleans": header_bytes({"a": {**FLOAT, "shape": [True]}}) + bytes(8),
    "negative shape": header_bytes({"a": {**FLOAT, "shape": [-2]}}) + bytes(8),
    "negative offset": header_bytes({"a": {**FLOAT, "data_offsets": [-8, 0]}}) + bytes(8),
    "three offsets": header_bytes({"a": {**FLOAT, "data_offsets": [0, 4, 8]}}) + bytes(8),
    "dtype is no word": header_bytes({"a": {**FLOAT, "dtype": 7}}) + bytes(8),
    "size of another shape": header_bytes({"a": {**FLOAT, "shape": [3]}}) + bytes(8),
    "end before begin": header_bytes({"a": entry("ODD", [2], 8, 0)}) + bytes(8),
    "huge shape": header_bytes({"a": {**FLOAT, "shape": [1 << 62, 1 << 62]}}) + bytes(8),
    "overlap": header_bytes({"a": FLOAT, "b": entry("F32", [2], 4, 12)}) + bytes(12),
    "gap": header_bytes({"a": FLOAT, "b": entry("F32", [2], 12, 20)}) + bytes(20),
    "starts late": header_bytes({"a": entry("F32", [2], 8, 16)}) + bytes(16),
    "bytes left over": header_bytes({"a": FLOAT}) + bytes(9),
}


@pytest.mark.parametrize("name", BROKEN)
def test_a_corrupt_file_is_named(tmp_path: Path, name: str) -> None:
    path = tmp_path / "shard 1.safetensors"
    path.write_bytes(BROKEN[name])
    with pytest.raises(
        CheckpointError, match=r"shard 1\.safetensors is corrupt: .*; download or copy"
    ):
        read_header(path)


def test_metadata_and_padding_are_allowed(tmp_path: Path) -> None:
    text = json.dumps({"__metadata__": {"format": "pt"}, "a": FLOAT}).encode() + b" " * 11
    path = tmp_path / "x.safetensors"
    path.write_bytes(struct.pack("<Q", len(text)) + text + bytes(8))
    info = read_header(path)["a"]
    assert (info.dtype, info.shape, info.num_bytes) == ("F32", (2,), 8)
    assert info.end == path.stat().st_size


@settings(max_examples=150)
@given(st.data())
def test_no_damage_to_a_header_escapes_as_another_error(data: st.DataObject) -> None:
    whole = header_bytes({"a": FLOAT, "b": entry("BF16", [2, 2], 8, 16)}) + bytes(16)
    damaged = bytearray(whole)
    for _ in range(data.draw(st.integers(1, 3))):
        damaged[data.draw(st.integers(0, len(whole) - 1))] = data.draw(st.integers(0, 255))
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "damaged.safetensors"
        path.write_bytes(bytes(damaged))
        tensors = {}
        with contextlib.suppress(CheckpointError):
            tensors = read_header(path)
    assert all(info.end <= len(whole) for info in tensors.values())


# --- memory -----------------------------------------------------------------------------------------

PEAK_SCRIPT = """
import sys
from pathlib import Path
import torch
from foveal.models.config import VL2Config
from foveal.models.loader import Checkpoint, load_parameters
from foveal.models.names import parameter_specs

def status(key):
    line = next(l for l in Path("/proc/self/status").read_text().splitlines() if l.startswith(key))
    return int(line.split()[1]) * 1024

torch.set_num_threads(1)
torch.zeros(1).bfloat16()
dtype = getattr(torch, sys.argv[2])
folder = Path(sys.argv[1])
before = status("VmRSS")
specs = parameter_specs(VL2Config.load(folder))
kinds = {"model": dtype, "float32": torch.float32}
filled = {s.name: torch.empty(s.shape, dtype=kinds[s.dtype]) for s in specs}
load_parameters(specs, Checkpoint.open(folder), filled)
weights = sum(t.numel() * t.element_size() for t in filled.values())
print(weights, max(status("VmHWM"), status("VmRSS")) - before)
"""


def benchmark_module(repository: Path, name: str) -> ModuleType:
    found = importlib.util.spec_from_file_location(name, repository / "benchmarks" / f"{name}.py")
    assert found is not None
    assert found.loader is not None
    module = importlib.util.module_from_spec(found)
    sys.modules[name] = module
    found.loader.exec_module(module)
    return module


@pytest.fixture(scope="session")
def random_checkpoint(repository: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A random model of 130 M parameters, 259 MB in bfloat16."""
    folder = tmp_path_factory.mktemp("random-vl2")
    benchmark_module(repository, "make_random_vl2").make_checkpoint(folder, "midi")
    return folder


@pytest.mark.skipif(not Path("/proc/self/status").exists(), reason="needs /proc")
@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])  # read in place, converted
def test_peak_memory_stays_within_115_percent_of_the_weights(
    repository: Path, random_checkpoint: Path, dtype: str
) -> None:
    done = subprocess.run(
        [sys.executable, "-c", PEAK_SCRIPT, str(random_checkpoint), dtype],
        cwd=repository, capture_output=True, text=True, check=True,
    )  # fmt: skip
    weights, peak = map(int, done.stdout.split())
    assert weights > 200e6
    assert peak <= 1.15 * weights, f"{peak / 1e6:.0f} MB for {weights / 1e6:.0f} MB of weights"
