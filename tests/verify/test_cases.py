"""Golden case files: what is read, what is refused."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import save_file

from foveal.verify.cases import CaseError, list_cases, read_case

TURN = {"role": "<|User|>", "content": "<image>\nWhat?", "images": ["dot"]}
END = {"role": "<|Assistant|>", "content": ""}


def write(folder: Path, facts: dict[str, Any], tensors: dict[str, np.ndarray]) -> Path:
    cases = folder / "cases"
    cases.mkdir(exist_ok=True, parents=True)
    path = cases / "one.json"
    path.write_text(json.dumps(facts))
    save_file(tensors, path.with_suffix(".safetensors"))
    return path


def test_a_single_conversation_is_one_row(tmp_path: Path) -> None:
    path = write(tmp_path, {"conversation": [TURN, END]}, {"input_ids": np.zeros((1, 2))})
    assert read_case(path).conversations == [[TURN, END]]


def test_a_batch_is_one_row_a_conversation(tmp_path: Path) -> None:
    path = write(tmp_path, {"conversation": [[TURN, END], [TURN, END]]}, {})
    assert len(read_case(path).conversations) == 2


def test_both_sample_forms_are_read(tmp_path: Path) -> None:
    facts = {"conversation": [TURN], "big_tensors": {"a": {"sample_step": 7}}}
    values = np.arange(3, dtype=np.float32)
    path = write(tmp_path, facts, {"a.sample": values, "b.sample_every_5": values, "c": values})
    case = read_case(path)
    steps = {name: stored.step for name, stored in case.tensors.items()}
    assert steps == {"a": 7, "b": 5, "c": 1}


def test_a_sample_without_its_step_is_refused(tmp_path: Path) -> None:
    path = write(tmp_path, {"conversation": [TURN]}, {"a.sample": np.zeros(3)})
    with pytest.raises(
        CaseError, match=r"a\.sample, but the JSON's big_tensors gives no sample_step"
    ):
        read_case(path)


def test_what_nobody_looked_at_is_listed(tmp_path: Path) -> None:
    facts = {"conversation": [TURN], "min_routing_margin": 1, "mystery": 2, "seq_lens": [1]}
    case = read_case(write(tmp_path, facts, {"logits": np.zeros(3), "extra.tensor": np.zeros(3)}))
    assert case.take("logits") is not None
    assert case.fact("seq_lens") == [1]
    assert case.take("vit_features") is None
    assert case.not_checked == ("extra.tensor", "mystery")


def test_pictures_are_found_beside_the_variant_with_any_suffix(tmp_path: Path) -> None:
    images = tmp_path / "images"
    images.mkdir()
    (images / "dot.png").touch()
    case = read_case(write(tmp_path / "variant", {"conversation": [TURN]}, {}))
    assert [path.resolve() for path in case.picture_paths([TURN])] == [images / "dot.png"]


def test_pictures_are_found_where_the_case_says(tmp_path: Path) -> None:
    images = tmp_path / "pictures"
    images.mkdir()
    (images / "dot.jpg").touch()
    facts = {"conversation": [TURN], "images_dir": "../../pictures"}
    case = read_case(write(tmp_path / "variant", facts, {}))
    assert case.picture_paths([TURN])[0].name == "dot.jpg"


def test_a_missing_picture_is_named(tmp_path: Path) -> None:
    case = read_case(write(tmp_path, {"conversation": [TURN]}, {}))
    with pytest.raises(CaseError, match="no picture 'dot'"):
        case.picture_paths([TURN])


@pytest.mark.parametrize("value", [None, [], "text", [[]], [1, 2], {}])
def test_a_conversation_of_another_shape_is_refused(tmp_path: Path, value: Any) -> None:
    path = write(tmp_path, {"conversation": value}, {})
    with pytest.raises(CaseError, match="'conversation' must be a list of messages"):
        read_case(path)


def test_broken_json_is_named(tmp_path: Path) -> None:
    path = write(tmp_path, {"conversation": [TURN]}, {})
    path.write_text("{")
    with pytest.raises(CaseError, match=r"one\.json cannot be read"):
        read_case(path)


@pytest.mark.parametrize("content", [b"", b"not tensors", None])
def test_broken_tensors_are_named(tmp_path: Path, content: bytes | None) -> None:
    path = write(tmp_path, {"conversation": [TURN]}, {})
    tensors = path.with_suffix(".safetensors")
    tensors.unlink()
    if content is not None:
        tensors.write_bytes(content)
    with pytest.raises(CaseError, match=r"one\.safetensors cannot be read"):
        read_case(path)


def test_a_folder_without_cases_is_refused(tmp_path: Path) -> None:
    with pytest.raises(CaseError, match="has no cases/ folder"):
        list_cases(tmp_path)
