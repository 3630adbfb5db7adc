"""Comparisons say where and by how much two arrays differ."""

from __future__ import annotations

import numpy as np
import pytest

from foveal.verify.compare import compare_equal, compare_floats, pad_left


def floats(*values: float) -> np.ndarray:
    return np.array(values, dtype=np.float32)


def test_equal_floats_pass_with_difference_0() -> None:
    check = compare_floats("x", floats(1, 2), floats(1, 2), 0.0, column="c")
    assert check.is_passed
    assert check.difference == 0.0


def test_a_difference_beyond_the_limit_names_place_and_values() -> None:
    check = compare_floats("x", floats(1, 2, 3), floats(1, 2.5, 3), 1e-3, column="c")
    assert not check.is_passed
    assert check.difference == pytest.approx(0.5)
    assert "at [1]: 2.5, expected 2" in check.detail


def test_nan_is_never_close() -> None:
    check = compare_floats("x", floats(1, 2), floats(1, float("nan")), 1.0, column="c")
    assert not check.is_passed
    assert "at [1]" in check.detail


def test_infinity_is_never_close() -> None:
    assert not compare_floats("x", floats(1), floats(float("inf")), 1.0, column="c").is_passed


def test_a_sample_is_every_stepth_number_of_the_flattened_whole() -> None:
    whole = np.arange(24, dtype=np.float32).reshape(2, 3, 4)
    sample = whole.flatten()[::5]
    assert compare_floats("x", sample, whole, 0.0, step=5, column="c").is_passed
    changed = whole.copy()
    changed[0, 2, 2] += 1  # flat index 10, the third of the sample
    check = compare_floats("x", sample, changed, 0.0, step=5, column="c")
    assert "at [10]: 11, expected 10" in check.detail


def test_a_sample_of_another_length_fails_with_both_shapes() -> None:
    check = compare_floats("x", floats(1, 2), np.ones((3, 4), np.float32), 1.0, step=5, column="c")
    assert check.detail == "shape [3], expected [2]"


def test_masked_positions_mean_nothing() -> None:
    expected = np.zeros((1, 3, 2), np.float32)
    actual = expected.copy()
    actual[0, 0] = np.nan
    mask = np.array([[False, True, True]])
    assert compare_floats("x", expected, actual, 0.0, mask=mask, column="c").is_passed
    actual[0, 1] = 1
    assert not compare_floats("x", expected, actual, 0.0, mask=mask, column="c").is_passed


def test_a_mask_reaches_samples_too() -> None:
    expected = np.zeros((1, 4, 3), np.float32)
    actual = expected.copy()
    actual[0, :2] = 9
    mask = np.array([[False, False, True, True]])
    sample = expected.flatten()[::2]
    assert compare_floats("x", sample, actual, 0.0, step=2, mask=mask, column="c").is_passed


def test_relative_differences_are_of_the_rows_largest_value() -> None:
    expected = np.array([[1000.0, 1.0], [1.0, 0.5]], np.float32)
    actual = expected + np.array([[0.1, 0.1], [0.0, 0.0]], np.float32)
    assert compare_floats("x", expected, actual, 2e-4, is_relative=True, column="c").is_passed
    actual[1, 0] += 0.1
    assert not compare_floats("x", expected, actual, 2e-4, is_relative=True, column="c").is_passed


def test_a_leading_one_in_the_shape_does_not_matter() -> None:
    assert compare_floats("x", np.ones((1, 3, 2)), np.ones((3, 2)), 0.0, column="c").is_passed
    assert not compare_floats("x", np.ones((2, 3)), np.ones((3, 2)), 0.0, column="c").is_passed


def test_equal_integers_and_the_first_that_differs() -> None:
    assert compare_equal("x", [1, 2], np.array([1, 2]), column="c").is_passed
    check = compare_equal("x", [[1, 2], [3, 4]], [[1, 2], [3, 5]], column="c")
    assert check.detail == "at [1, 1]: 5, expected 4"


def test_ragged_lists_are_compared_as_they_are() -> None:
    assert compare_equal("x", [[], [41], [41, 129]], [[], [41], [41, 129]], column="c").is_passed
    assert not compare_equal("x", [[], [41]], [[], [42]], column="c").is_passed
    assert compare_equal("x", [[]], [[]], column="c").is_passed


def test_padding_goes_before_shorter_rows() -> None:
    padded = pad_left([np.array([1]), np.array([2, 3])], 3, fill=9)
    assert padded.tolist() == [[9, 9, 1], [9, 2, 3]]


def test_a_row_longer_than_the_case_is_an_error() -> None:
    with pytest.raises(ValueError, match="4 positions, more than the case's 3"):
        pad_left([np.zeros(4)], 3)
