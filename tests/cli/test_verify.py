"""`foveal verify`: passes what is right, fails what is not, and says where."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from foveal.cli.main import main

# Small cases that hold every kind of tensor of the format between them.
CASES = ("text_only", "single_grad_30x20", "batch_left_padded")


@pytest.fixture
def variant(golden_vl2: Path, tmp_path: Path) -> Path:
    """A writable copy of b_small with a few cases; pictures where the format says."""
    source, target = golden_vl2 / "b_small", tmp_path / "variant"
    copy_files(source / "checkpoint", target / "checkpoint")
    copy_files(source / "cases", target / "cases", names=CASES)
    copy_files(golden_vl2 / "images", tmp_path / "images")
    return target


def copy_files(source: Path, target: Path, names: tuple[str, ...] | None = None) -> None:
    target.mkdir(parents=True)
    for path in source.iterdir():
        if names is None or path.stem in names:
            (target / path.name).write_bytes(path.read_bytes())  # not the read-only mode


def verify(variant: Path, *flags: str) -> int:
    return main(["verify", str(variant / "checkpoint"), "--golden", str(variant), *flags])


def edit_tensors(path: Path, change: Callable[[dict[str, Any]], None]) -> None:
    tensors = dict(load_file(path))
    change(tensors)
    save_file({name: np.ascontiguousarray(value) for name, value in tensors.items()}, path)


def edit_json(path: Path, change: Callable[[dict[str, Any]], None]) -> None:
    facts = json.loads(path.read_text())
    change(facts)
    path.write_text(json.dumps(facts))


def test_a_right_checkpoint_passes_every_case(
    variant: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert verify(variant) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[-1] == "3 of 3 cases pass"
    heading = next(line for line in lines if line.startswith("case "))
    for column in ("prompt", "pixels", "tower", "projector", "embeds", "logits", "greedy"):
        assert column in heading
    for column in ("hidden", "routing", "chunks"):
        assert column in heading
    assert "not checked: greedy_text, sft_format (3 cases)" in lines


def test_a_scaled_final_norm_fails(variant: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """The weights stay plausible and so does the text; only numbers can tell."""
    name = "language.model.norm.weight"
    index = json.loads((variant / "checkpoint" / "model.safetensors.index.json").read_text())
    shard = variant / "checkpoint" / index["weight_map"][name]
    scale_tensor(shard, name, 1.01)
    assert verify(variant) == 1
    lines = capsys.readouterr().out.splitlines()
    assert lines[-1] == "0 of 3 cases pass"
    assert any(line.startswith("text_only: logits: largest difference") for line in lines)


def scale_tensor(shard: Path, name: str, factor: float) -> None:
    import torch
    from safetensors.torch import load_file as load_torch
    from safetensors.torch import save_file as save_torch

    tensors = load_torch(shard)
    tensors[name] = (tensors[name].float() * factor).to(torch.float32)
    save_torch(tensors, shard, metadata={"format": "pt"})


CHANGES: dict[str, tuple[str, Callable[[dict[str, Any]], None]]] = {
    "one token id": ("input_ids", lambda t: t["input_ids"].__setitem__((0, 5), 7)),
    "one pixel": ("pixel_values", lambda t: t["pixel_values"].__setitem__((0, 0, 3, 3), 0.9)),
    "one feature": ("vit_features", lambda t: t["vit_features"].__setitem__((1, 2, 3), 9.0)),
    "one row": ("projector_out", lambda t: t["projector_out"].__setitem__((1, 2, 3), 9.0)),
    "one embedding": ("inputs_embeds", lambda t: t["inputs_embeds"].__setitem__((0, 9, 3), 9.0)),
    "one logit": ("logits", lambda t: t["logits"].__setitem__((0, 9, 3), 99.0)),
    "one greedy token": ("greedy_tokens", lambda t: t["greedy_tokens"].__setitem__((0, 23), 0)),
    "a grid": ("images_spatial_crop", lambda t: t["images_spatial_crop"].__setitem__((0, 0), 2)),
    "one mask bit": ("images_seq_mask", lambda t: t["images_seq_mask"].__setitem__((0, 1), 1)),
    "one hidden number": (
        "hidden_states.1",
        lambda t: t["hidden_states.1"].__setitem__((0, 3, 3), 9),
    ),
    "one expert": (
        "routing.language.model.layers.1.mlp.gate",
        lambda t: t["routing.language.model.layers.1.mlp.gate"].__setitem__((3, 0), 15),
    ),
    "the last step": (
        "greedy_last_step_logits",
        lambda t: t["greedy_last_step_logits"].__setitem__((0, 3), 99.0),
    ),
}


@pytest.mark.parametrize("what", list(CHANGES))
def test_each_kind_of_tensor_is_really_compared(
    what: str, variant: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    for path in (variant / "cases").iterdir():
        if path.stem != "single_grad_30x20":
            path.unlink()
    name, change = CHANGES[what]
    edit_tensors(variant / "cases" / "single_grad_30x20.safetensors", change)
    assert verify(variant) == 1
    lines = capsys.readouterr().out.splitlines()
    assert any(line.startswith(f"single_grad_30x20: {name}: ") for line in lines)
    assert lines[-1] == "0 of 1 cases pass"


def test_padding_of_a_batch_is_masked(variant: Path, capsys: pytest.CaptureFixture[str]) -> None:
    def spoil(tensors: dict[str, Any]) -> None:
        rows, positions = tensors["attention_mask"].shape[0], tensors["logits_positions"]
        for row in range(rows):
            start = int(np.argmax(tensors["attention_mask"][row]))
            tensors["logits_at_positions"][row, positions < start] = np.nan

    edit_tensors(variant / "cases" / "batch_left_padded.safetensors", spoil)
    assert verify(variant) == 0
    assert capsys.readouterr().out.splitlines()[-1] == "3 of 3 cases pass"


def test_both_sample_forms_are_compared(variant: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = variant / "cases" / "single_grad_30x20.safetensors"

    def sample(tensors: dict[str, Any]) -> None:
        logits = tensors.pop("logits")
        tensors["logits.sample_every_13"] = logits.flatten()[::13]
        features = tensors.pop("vit_features")
        tensors["vit_features.sample"] = features.flatten()[::7]

    edit_tensors(path, sample)
    edit_json(
        path.with_suffix(".json"),
        lambda facts: facts.update(big_tensors={"vit_features": {"sample_step": 7}}),
    )
    assert verify(variant, "--json") == 0
    report = json.loads(capsys.readouterr().out)
    (case,) = [c for c in report["cases"] if c["case"] == "single_grad_30x20"]
    assert {"logits", "vit_features"} <= {check["name"] for check in case["checks"]}
    edit_tensors(path, lambda t: t["logits.sample_every_13"].__setitem__(100, 99.0))
    assert verify(variant) == 1


def test_what_a_case_holds_beyond_the_checks_is_said(
    variant: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    edit_tensors(
        variant / "cases" / "text_only.safetensors", lambda t: t.update(mystery=np.zeros(3))
    )
    assert verify(variant) == 0
    assert "not checked: greedy_text, mystery, sft_format (1 case)" in capsys.readouterr().out


def test_a_case_that_cannot_be_read_fails_alone(
    variant: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (variant / "cases" / "text_only.json").write_text("{")
    (variant / "cases" / "stray.json").write_text('{"conversation": [[5]]}')
    assert verify(variant) == 1
    lines = capsys.readouterr().out.splitlines()
    assert lines[-1] == "2 of 4 cases pass"
    assert any(line.startswith("text_only: text_only.json cannot be read") for line in lines)
    assert any(line.startswith("stray: ") for line in lines)


def test_a_missing_picture_fails_its_case(
    variant: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (variant.parent / "images" / "grad_30x20.png").unlink()
    assert verify(variant) == 1
    captured = capsys.readouterr()
    assert "no picture 'grad_30x20'" in captured.out
    assert captured.out.splitlines()[-1] == "1 of 3 cases pass"


def test_no_cases_is_exit_code_1(variant: Path, capsys: pytest.CaptureFixture[str]) -> None:
    shutil.rmtree(variant / "cases")
    assert verify(variant) == 1
    captured = capsys.readouterr()
    assert "has no cases/ folder" in captured.err
    assert captured.out.splitlines()[-1] == "0 of 0 cases pass"
    (variant / "cases").mkdir()
    assert verify(variant) == 1
    assert "holds no case" in capsys.readouterr().err


def test_a_checkpoint_that_does_not_load_passes_no_case(
    variant: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    shard = variant / "checkpoint" / "model-00002-of-000002.safetensors"
    shard.write_bytes(shard.read_bytes()[:1000])
    assert verify(variant) == 1
    lines = capsys.readouterr().out.splitlines()
    assert lines[-1] == "0 of 3 cases pass"
    assert any(shard.name in line for line in lines)


def test_golden_data_is_compared_in_float32_only(
    variant: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert verify(variant, "--dtype", "bfloat16") == 2
    assert "--dtype bfloat16" in capsys.readouterr().err


# --- laws -------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["a_tiny", "b_small", "c_groups"])
def test_laws_hold_on_a_right_checkpoint(
    name: str, golden_vl2: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["verify", str(golden_vl2 / name / "checkpoint"), "--json"]) == 0
    report = json.loads(capsys.readouterr().out)
    laws = [case["case"] for case in report["cases"]]
    assert ("absorbed = expanded latent attention" in laws) == (name != "a_tiny")
    assert report["passed"] == report["total"] >= 13


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_laws_hold_in_half_precision(
    dtype: str, golden_vl2: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    argv = ["verify", str(golden_vl2 / "b_small" / "checkpoint"), "--dtype", dtype]
    assert main(argv) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[-1].endswith("cases pass")


def test_laws_find_a_weight_that_is_not_a_number(
    variant: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    name = "language.model.norm.weight"
    index = json.loads((variant / "checkpoint" / "model.safetensors.index.json").read_text())
    scale_tensor(variant / "checkpoint" / index["weight_map"][name], name, float("nan"))
    assert main(["verify", str(variant / "checkpoint")]) == 1
    assert "logits are finite" in capsys.readouterr().out
