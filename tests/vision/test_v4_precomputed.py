"""Patches that arrive as tensors: what is taken, and each way in which their fields can disagree."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

from foveal.errors import MediaError
from foveal.vision.v4 import block_order, block_types
from foveal.vision.v4_precomputed import check_patches
from tests.vision.v4_pictures import REAL, SMALL

# Two pictures of the small numbers: 3x4 and 4x2 patches, 2x2 and 2x1 cells.
VIT, LLM = [(3, 4), (4, 2)], [(2, 2), (2, 1)]
PERM = [0, 2, 1, 3, 0, 1]
FIELDS = ("patches", "vit_grid", "llm_grid", "perm", "types")


def pixels(count: int = 20) -> np.ndarray:
    return np.arange(count * 192, dtype=np.uint8).reshape(count, 3, 8, 8)


def floats(count: int = 20) -> np.ndarray:
    return np.full((count, 3, 8, 8), 0.3, np.float32)


def good(**changes: Any) -> dict[str, Any]:
    return {
        "patches": pixels(),
        "vit_grid": np.array(VIT),
        "llm_grid": np.array(LLM),
        "perm": np.array(PERM),
        **changes,
    }


def test_each_picture_gets_its_own_part() -> None:
    values = good()
    one, two = check_patches(**values, config=SMALL)
    assert (one.vit_grid, one.llm_grid) == (VIT[0], LLM[0])
    assert (two.vit_grid, two.llm_grid) == (VIT[1], LLM[1])
    np.testing.assert_array_equal(one.patches, pixels()[:12])
    np.testing.assert_array_equal(two.patches, pixels()[12:])
    assert (one.perm.tolist(), two.perm.tolist()) == (PERM[:4], PERM[4:])
    values["patches"][:] = 0
    assert two.patches.any(), "a copy, which the caller cannot change"


def test_types_may_come_along() -> None:
    types = np.concatenate([block_types(grid, 3) for grid in LLM])
    assert len(check_patches(**good(types=types), config=SMALL)) == 2
    assert len(check_patches(**good(types=types.astype(np.int32).tolist()), config=SMALL)) == 2


@pytest.mark.parametrize("dtype", [np.float32, np.float16, np.float64])
def test_floats_are_rounded_to_bfloat16(dtype: Any) -> None:
    one, _ = check_patches(**good(patches=floats().astype(dtype)), config=SMALL)
    assert one.patches.dtype == np.float32
    assert (one.patches == 0.30078125).all()


@pytest.mark.parametrize(
    ("dtype", "expected"),
    [(torch.bfloat16, np.float32), (torch.float32, np.float32), (torch.uint8, np.uint8)],
)
def test_torch_tensors_are_taken(dtype: torch.dtype, expected: Any) -> None:
    tensors = {
        "patches": torch.ones((20, 3, 8, 8), dtype=dtype),
        "vit_grid": torch.tensor(VIT),
        "llm_grid": torch.tensor(LLM, dtype=torch.int32),
        "perm": torch.tensor(PERM),
    }
    one, two = check_patches(**tensors, config=SMALL)
    assert one.patches.dtype == two.patches.dtype == expected
    assert (two.patches == 1).all()


def test_lists_of_whole_numbers_are_taken() -> None:
    assert len(check_patches(**good(vit_grid=VIT, llm_grid=LLM, perm=PERM), config=SMALL)) == 2


@pytest.mark.parametrize("empty", [np.zeros((0, 2), np.int64), []])
def test_no_picture_is_no_picture(empty: Any) -> None:
    nothing = {"vit_grid": empty, "llm_grid": empty, "perm": np.zeros(0, np.int64)}
    assert check_patches(**good(patches=pixels(0), **nothing), config=SMALL) == []


def test_real_numbers() -> None:
    perm = block_order((10, 10))
    values = {"patches": np.zeros((784, 3, 14, 14), np.uint8), "perm": perm}
    (one,) = check_patches(**values, vit_grid=[[28, 28]], llm_grid=[[10, 10]], config=REAL)
    assert one.patches.shape == (784, 3, 14, 14)


PADDED = np.concatenate([block_types(grid, 2) for grid in LLM])
WRONG_TYPES = np.concatenate([block_types(grid, 3) for grid in LLM])
WRONG_TYPES[3] = 3
BIG = block_order((7, 7))
REFUSED: dict[str, tuple[dict[str, Any], str]] = {
    **{f"no {name}": ({name: None}, f"Required field '{name}' is missing") for name in FIELDS[:4]},
    "too few patches": (
        {"patches": pixels(19)},
        r"patches has 19 entries, but vit_grid needs 20 \(12 \+ 8\)",
    ),
    "too many patches": ({"patches": pixels(21)}, "patches has 21 entries, but vit_grid needs 20"),
    "flat patches": ({"patches": pixels().reshape(20, 192)}, "data has rank 2 but expected 4"),
    "one channel": ({"patches": pixels()[:, :1]}, r"data dim\[1\] expected 3, got 1"),
    "patch size": (
        {"patches": np.zeros((20, 3, 14, 14), np.uint8)},
        r"data dim\[2\] expected 8, got 14",
    ),
    "no tensor": ({"patches": "pixels"}, "patches is a str"),
    "wide samples": ({"patches": pixels().astype(np.uint16)}, "dtype uint16; give uint8 pixels"),
    "signed samples": ({"patches": pixels().astype(np.int64)}, "patches has dtype int64"),
    "objects": ({"patches": np.array([object()] * 4)}, "dtype object"),
    "sparse": ({"patches": torch.zeros((20, 3, 8, 8)).to_sparse()}, "patches is sparse"),
    "not a number": ({"patches": floats() + np.nan}, "patches holds numbers that are not finite"),
    "beyond bfloat16": ({"patches": floats() + np.float32(3.4e38)}, "not finite"),
    "grids of rank 1": ({"vit_grid": np.array([3, 4])}, "vit_grid: data has rank 1 but expected 2"),
    "grids of three": (
        {"llm_grid": np.ones((2, 3), np.int64)},
        r"llm_grid: data dim\[1\] expected 2, got 3",
    ),
    "ragged grids": ({"vit_grid": [[3, 4], [4]]}, "vit_grid contains inconsistent shapes"),
    "float grids": ({"vit_grid": np.array(VIT, np.float32)}, "vit_grid has dtype float32"),
    "grid of text": ({"vit_grid": "3x4"}, "vit_grid is a str"),
    "zero grid": ({"vit_grid": [(3, 0), (4, 2)]}, r"vit_grid holds \[3, 0\]"),
    "negative grid": ({"llm_grid": [(2, 2), (-2, 1)]}, r"llm_grid holds \[-2, 1\]"),
    "number of grids": ({"llm_grid": LLM[:1]}, "vit_grid has 2 pictures, but llm_grid has 1"),
    "grids that disagree": (
        {"llm_grid": [(2, 2), (2, 2)]},
        r"picture 1: vit_grid \[4, 2\] in cells of 2x2 gives llm_grid \[2, 1\], not \[2, 2\]",
    ),
    "floor for ceil": ({"llm_grid": [(1, 2), (2, 1)]}, r"picture 0: .* gives llm_grid \[2, 2\]"),
    "columns first": ({"vit_grid": [(4, 2), (3, 4)]}, r"picture 0: .* are \(rows, columns\)"),
    "too large": (
        {"patches": pixels(196), "vit_grid": [(14, 14)], "llm_grid": [(7, 7)], "perm": BIG},
        r"picture 0: llm_grid \[7, 7\] takes 66 tokens, and the model's limit is 45",
    ),
    "beyond all memory": (
        {"vit_grid": [(2**40, 2**40)], "llm_grid": [(2**39, 2**39)], "perm": []},
        "and the model's limit is 45",
    ),
    "perm of one picture": (
        {"perm": PERM[:4]},
        r"perm has 4 entries, but llm_grid needs 6 \(4 \+ 2\)",
    ),
    "perm counted through": (
        {"perm": [0, 2, 1, 3, 4, 5]},
        "picture 1: perm must hold each of 0 to 1 once",
    ),
    "perm with a double": (
        {"perm": [0, 2, 2, 3, 0, 1]},
        "picture 0: perm must hold each of 0 to 3",
    ),
    "perm in reading order": (
        {"perm": [0, 1, 2, 3, 0, 1]},
        r"picture 0: perm\[1\] is 1, but a block of 2 rows and 2 columns has cell 2 there",
    ),
    "perm of rank 2": ({"perm": [PERM]}, "perm: data has rank 2 but expected 1"),
    "float perm": ({"perm": np.array(PERM, np.float32)}, "perm has dtype float32"),
    "perm beyond all numbers": (
        {"perm": np.array([2**64 - 1] * 6, np.uint64)},
        "perm holds 1844674",
    ),
    "types with pads": (
        {"types": PADDED},
        r"types has 18 entries, but llm_grid needs 16 \(10 \+ 6\)",
    ),
    "wrong types": (
        {"types": WRONG_TYPES},
        r"picture 0: types\[3\] is 3, but a block of 2 rows and 2 columns has 2 there",
    ),
}


@pytest.mark.parametrize(("changes", "message"), REFUSED.values(), ids=REFUSED)
def test_refused(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(MediaError, match=message):
        check_patches(**good(**changes), config=SMALL)
