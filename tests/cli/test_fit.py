"""`foveal fit` says what a model needs without loading it."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest
from PIL import Image

from foveal.cli.main import main


@pytest.fixture
def tiny(repository: Path, tmp_path: Path) -> str:
    """A folder that holds nothing but the real tiny model's config.json."""
    shutil.copy(repository / "tests" / "data" / "vl2_tiny_config.json", tmp_path / "config.json")
    return str(tmp_path)


@pytest.mark.parametrize(
    ("size", "tensors", "parameters"),
    [
        ("tiny", 2582, 3_370_501_440),
        ("small", 5639, 16_148_349_504),
        ("base", 6973, 27_480_134_248),
    ],
)
def test_real_shapes_from_config_json_alone(
    size: str,
    tensors: int,
    parameters: int,
    repository: Path,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    source = repository / "tests" / "data" / f"vl2_{size}_config.json"
    shutil.copy(source, tmp_path / "config.json")
    assert main(["fit", str(tmp_path), "--device", "cpu", "--json"]) == 0
    facts = json.loads(capsys.readouterr().out)
    assert facts["files"]["num_tensors"] == tensors
    assert facts["memory"]["num_parameters"] == parameters
    formats = {row["name"]: row for row in facts["memory"]["formats"]}
    assert set(formats) == {"float32", "bfloat16", "float16"}
    # Weights in bfloat16: two bytes each, and a little for what stays float32, less the unused pooling head.
    assert formats["bfloat16"]["weight_bytes"] == pytest.approx(2 * parameters, rel=0.01)
    assert facts["tokens_per_picture"] == {"least": 421, "most": 2101}


def test_a_picture_costs_what_the_processor_counts(
    tiny: str, capsys: pytest.CaptureFixture[str]
) -> None:
    argv = ["fit", tiny, "--device", "cpu", "--json"]
    assert main([*argv, "--image", "1920x1080", "--image", "640X480"]) == 0
    facts = json.loads(capsys.readouterr().out)
    assert [row["cost"]["num_tokens"] for row in facts["pictures"]] == [1807, 1023]
    assert facts["picture_tokens"] == 2830


def test_three_pictures_are_not_tiled(tiny: str, capsys: pytest.CaptureFixture[str]) -> None:
    argv = ["fit", tiny, "--device", "cpu", "--json"]
    assert main([*argv, *["--image", "400x3600"] * 3]) == 0
    facts = json.loads(capsys.readouterr().out)
    assert [row["cost"]["num_tokens"] for row in facts["pictures"]] == [421] * 3


def test_a_picture_file_is_measured(
    tiny: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "wide.png"
    Image.new("RGB", (768, 384)).save(path)
    assert main(["fit", tiny, "--device", "cpu", "--image", str(path)]) == 0
    text = capsys.readouterr().out
    assert "768x384" in text
    assert "617" in text


def test_the_table_says_whether_it_fits(tiny: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["fit", tiny, "--device", "cpu"]) == 0
    text = capsys.readouterr().out
    assert "2,582 tensors" in text
    assert "bfloat16" in text
    assert text.splitlines()[-1].startswith(("fits in ", "does not fit: "))


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (["--image", "big"], "neither WIDTHxHEIGHT (640x480) nor a picture file"),
        (["--image", "0x5"], "at least 1 pixel"),
        (["--context", "0"], "at least 1 token"),
    ],
)
def test_wrong_flags_are_refused(
    tiny: str, flags: list[str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["fit", tiny, *flags]) == 2
    assert message in capsys.readouterr().err


def test_an_unknown_model_is_refused(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["fit", "./no-such-folder"]) == 2
    assert "no-such-folder" in capsys.readouterr().err


def test_a_checkpoint_with_its_index_is_compared_with_its_configuration(
    golden_vl2: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    source = golden_vl2 / "b_small" / "checkpoint"
    for name in ("config.json", "model.safetensors.index.json"):
        shutil.copy(source / name, tmp_path / name)
    index = json.loads((tmp_path / "model.safetensors.index.json").read_text())
    del index["weight_map"]["language.model.norm.weight"]
    index["weight_map"]["stranger"] = "model-00001-of-000002.safetensors"
    (tmp_path / "model.safetensors.index.json").chmod(0o644)
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps(index))
    assert main(["fit", str(tmp_path), "--device", "cpu"]) == 0
    text = capsys.readouterr().out
    assert "missing tensors: 1 (language.model.norm.weight)" in text
    assert "tensors of no such model: 1 (stranger)" in text
    assert "weight files not there yet: 2 (model-00001" in text


# --- DeepSeek-V4 ------------------------------------------------------------------------------------


@pytest.fixture(params=["v4_vision_exp", "v4_flash_0731"])
def v4(repository: Path, tmp_path: Path, request: pytest.FixtureRequest) -> tuple[str, str]:
    """The name of a real DeepSeek-V4 configuration, and a folder that holds nothing else."""
    source = repository / "tests" / "data" / f"{request.param}_config.json"
    shutil.copy(source, tmp_path / "config.json")
    return request.param, str(tmp_path)


def test_v4_from_config_json_alone(v4: tuple[str, str], capsys: pytest.CaptureFixture[str]) -> None:
    name, folder = v4
    assert main(["fit", folder, "--device", "cpu", "--json"]) == 0
    facts = json.loads(capsys.readouterr().out)
    tensors, num_bytes, reach = {
        "v4_vision_exp": (72_633, 167_811_372_792, {"least": None, "most": 384}),
        "v4_flash_0731": (72_317, 166_878_536_440, None),
    }[name]
    assert facts["files"]["num_tensors"] == facts["memory"]["num_tensors"] == tensors
    assert facts["memory"]["file_bytes"] == num_bytes
    assert facts["tokens_per_picture"] == reach
    formats = [row["name"] for row in facts["memory"]["formats"]]
    assert formats == ["packed", "float32", "bfloat16", "float16"]


def test_v4_says_what_pictures_and_tokens_take(
    v4: tuple[str, str], capsys: pytest.CaptureFixture[str]
) -> None:
    name, folder = v4
    argv = ["fit", folder, "--device", "cpu", "--context", "8192"]
    if name == "v4_flash_0731":
        assert main([*argv, "--image", "640x480"]) == 2
        assert "is a text model and takes no pictures" in capsys.readouterr().err
        return
    assert main([*argv, "--image", "1024x768", "--image", "30x30"]) == 0
    text = capsys.readouterr().out
    assert "72,633 tensors (config.json), 305 B parameters, 167.81 GB in files" in text
    assert "each further token takes 13.76 kB of cache" in text
    assert "21x16 (of 63x47 patches)  354 to 357" in text
    assert "up to 474" in text
    assert text.splitlines()[-1].startswith(("fits in ", "does not fit: packed needs 166."))


def test_v4_golden_folders_are_whole(golden: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder = golden / "v4_vision" / "vision_small" / "checkpoint"
    assert main(["fit", str(folder), "--device", "cpu"]) == 0
    text = capsys.readouterr().out
    assert "291 tensors (the index)" in text
    assert "missing" not in text
    assert "no such model" not in text
