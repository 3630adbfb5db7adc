"""The benchmark scripts: random checkpoints are complete and repeatable, the arithmetic behind the shares is right."""

from __future__ import annotations

import importlib.util
import json
import sys
from pathlib import Path
from types import ModuleType

import numpy as np
import pytest
import torch
from tokenizers import Tokenizer

from foveal.models.config import VL2Config
from foveal.models.fit import inspect_folder
from foveal.models.loader import Checkpoint, load_parameters
from foveal.models.names import parameter_specs


def script(repository: Path, name: str) -> ModuleType:
    found = importlib.util.spec_from_file_location(name, repository / "benchmarks" / f"{name}.py")
    assert found is not None
    assert found.loader is not None
    module = importlib.util.module_from_spec(found)
    sys.modules[name] = module
    found.loader.exec_module(module)
    return module


@pytest.fixture(scope="module")
def maker(repository: Path) -> ModuleType:
    return script(repository, "make_random_vl2")


@pytest.fixture(scope="module")
def mini(maker: ModuleType, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("mini")
    maker.make_checkpoint(folder, "mini")
    return folder


def loaded(folder: Path) -> dict[str, torch.Tensor]:
    specs = parameter_specs(VL2Config.load(folder))
    filled = {s.name: torch.empty(s.shape) for s in specs}
    load_parameters(specs, Checkpoint.open(folder), filled)
    return filled


def test_a_random_checkpoint_is_complete_and_sane(mini: Path) -> None:
    files = inspect_folder(mini, VL2Config.load(mini))
    assert (files.source, files.num_files) == ("index", 2)
    assert (files.missing, files.extra, files.missing_files) == ((), (), ())
    for name, tensor in loaded(mini).items():
        assert bool(tensor.isfinite().all()), name
        assert float(tensor.abs().max()) < 5, name


def test_the_numbers_depend_on_the_seed_and_the_name_only(
    maker: ModuleType, mini: Path, tmp_path: Path
) -> None:
    for name, seed, shards in (("same", 0, 3), ("other", 1, 2)):
        maker.make_checkpoint(tmp_path / name, "mini", seed=seed, num_shards=shards)
    first, same, other = loaded(mini), loaded(tmp_path / "same"), loaded(tmp_path / "other")
    for name, tensor in first.items():
        assert torch.equal(tensor, same[name]), name
        assert not torch.equal(tensor, other[name]), name


def test_rounding_to_bfloat16_is_torchs(maker: ModuleType) -> None:
    values = np.random.default_rng(0).standard_normal(10_000, dtype=np.float32)
    values[:4] = (0.0, -0.0, 1.00390625, 1.01171875)  # the last two are halfway cases
    expected = torch.from_numpy(values).bfloat16().view(torch.int16).numpy().astype(np.uint16)
    assert np.array_equal(maker.to_bfloat16(values), expected)


@pytest.mark.parametrize(
    ("vocab_size", "bos", "image"), [(129280, 0, 128815), (102400, 100000, 100003)]
)
def test_the_tokenizer_has_the_real_special_ids(
    maker: ModuleType, tmp_path: Path, vocab_size: int, bos: int, image: int
) -> None:
    maker.write_tokenizer(tmp_path, vocab_size, bos)
    tokenizer = Tokenizer.from_file(str(tmp_path / "tokenizer.json"))
    assert tokenizer.get_vocab_size() == vocab_size
    names = (maker.BOS, maker.EOS, maker.PAD, "<image>", "<|User|>", "<|Assistant|>")
    ids = (bos, bos + 1, bos + 2, image, image + 6, image + 7)
    assert tuple(tokenizer.token_to_id(name) for name in names) == ids
    text = "Grüße <image> 汉字\n"
    encoded = tokenizer.encode(text, add_special_tokens=False).ids
    assert image in encoded
    assert tokenizer.decode(encoded, skip_special_tokens=False) == text
    assert tokenizer.decode([vocab_size - 1]) != ""


def test_settings_are_the_published_ones(maker: ModuleType, repository: Path) -> None:
    text = (repository / "tests" / "data" / "vl2_tiny_config.json").read_text()
    assert maker.preset_config("tiny") == json.loads(text)
    settings = maker.processor_settings(json.loads(text))
    assert (settings["patch_size"], settings["downsample_ratio"]) == (14, 2)
    assert len(settings["candidate_resolutions"]) == 23


def test_a_tile_of_the_real_tower_is_0_67_tflop(maker: ModuleType, repository: Path) -> None:
    sys.path.insert(0, str(repository / "benchmarks"))
    try:
        bench = script(repository, "bench_vl2")
    finally:
        sys.path.remove(str(repository / "benchmarks"))
    config = VL2Config.from_dict(maker.preset_config("tiny"))
    assert bench.tower_flops(config) == pytest.approx(0.67e12, rel=0.01)
    assert bench.make_picture((30, 20), 1).shape == (20, 30, 3)
    assert not np.array_equal(bench.make_picture((30, 20), 1), bench.make_picture((30, 20), 2))
