"""`foveal verify` for DeepSeek-V4: golden cases, laws, and that a wrong model is caught."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from foveal.cli.main import main
from foveal.verify import V4Subject, verify_v4_golden, verify_v4_laws

VARIANTS = [
    "v4_text/flash_like",
    "v4_text/pro_like",
    "v4_text/flash_fp8_fp4",
    "v4_vision/vision_small",
    "v4_vision/vision_real_tiles",
]
NEVER_CHECKED = {"logits_qat_last32", "mtp_input_ids", "mtp_logits"}


@pytest.mark.parametrize("variant", VARIANTS)
def test_all_golden_cases_pass(variant: str, golden: Path) -> None:
    report = verify_v4_golden(V4Subject(golden / variant / "checkpoint"), golden / variant)
    assert report.is_passed, "\n".join(report.remarks())
    assert {name for case in report.cases for name in case.not_checked} <= NEVER_CHECKED


@pytest.mark.parametrize("variant", ["v4_text/flash_like", "v4_vision/vision_small"])
def test_laws_hold(variant: str, golden: Path) -> None:
    report = verify_v4_laws(V4Subject(golden / variant / "checkpoint"))
    assert report.is_passed, "\n".join(report.remarks())


def changed(variant: Path, folder: Path, name: str, factor: float) -> Path:
    """A copy of a golden variant with one tensor scaled and a single case."""
    copy = folder / variant.name
    shutil.copytree(variant / "checkpoint", copy / "checkpoint")
    (copy / "cases").mkdir()
    for path in (variant / "cases").glob("image_mid.*"):
        shutil.copy(path, copy / "cases")
    shutil.copytree(variant.parent / "images", folder / "images")
    for path in (copy / "checkpoint").glob("*.safetensors"):
        path.chmod(0o644)
        tensors = load_file(path)
        if name in tensors:
            tensors[name] = (tensors[name].float() * factor).to(tensors[name].dtype)
            save_file({key: value.contiguous() for key, value in tensors.items()}, path)
    return copy


@pytest.mark.parametrize(
    ("tensor", "factor"),
    [
        ("norm.weight", 1.01),
        ("aligner.w2.weight", 1.01),
        ("layers.1.attn.indexer.wq_b.weight", -1.0),
    ],
)
def test_a_changed_tensor_fails(
    golden: Path, tmp_path: Path, tensor: str, factor: float, capsys: pytest.CaptureFixture[str]
) -> None:
    copy = changed(golden / "v4_vision" / "vision_small", tmp_path, tensor, factor)
    assert main(["verify", str(copy / "checkpoint"), "--golden", str(copy)]) == 1
    assert capsys.readouterr().out.splitlines()[-1] == "0 of 1 cases pass"


@pytest.mark.parametrize("release", ["release_preview", "release_vision"])
def test_the_chat_encoding_is_compared_without_weights(
    golden: Path, release: str, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = golden / "v4_encoding"
    assert main(["verify", str(folder / release), "--golden", str(folder)]) == 0
    assert capsys.readouterr().out.splitlines()[-1] == "16 of 16 cases pass"


def test_patches_are_compared_bit_by_bit(golden: Path) -> None:
    """A tower that ran on patches which were not rounded to bfloat16 must be noticed."""
    variant = golden / "v4_vision" / "vision_small"
    subject = V4Subject(variant / "checkpoint")
    exact = subject.runner.patch_values
    subject.runner.patch_values = lambda item: exact(item) + torch.tensor(1e-4)  # type: ignore[method-assign]
    report = verify_v4_golden(subject, variant)
    assert report.num_passed == 1, "the case without a picture"
