"""Comparisons of arrays that say where and by how much two differ. Pure numpy."""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt

from foveal.verify.report import Check

Array = npt.NDArray[Any]


def compare_floats(
    name: str,
    expected: Array,
    actual: Array,
    limit: float,
    *,
    column: str,
    step: int = 1,
    mask: npt.NDArray[np.bool_] | None = None,
    is_relative: bool = False,
) -> Check:
    """Check that `actual` lies within `limit` of `expected` everywhere.

    With `step` > 1, `expected` is `full.flatten()[::step]`, and `actual` is full. `mask` has the shape of `actual` less
    trailing dimensions; where it is False, values mean nothing. With `is_relative`, a difference is divided by the
    largest expected value of its last dimension (of the whole array, for samples), or by 1 where that is smaller.
    """
    full_mask = _broadcast(mask, actual)
    if step > 1:
        actual, full_mask = actual.reshape(-1)[::step], full_mask.reshape(-1)[::step]
    elif _without_leading_ones(expected.shape) == _without_leading_ones(actual.shape):
        expected = expected.reshape(actual.shape)
    if expected.shape != actual.shape:
        detail = f"shape {list(actual.shape)}, expected {list(expected.shape)}"
        return Check(name, column, False, limit=limit, detail=detail)
    distance = np.abs(actual.astype(np.float64) - expected.astype(np.float64))
    if is_relative:
        distance /= _size(expected, step)
    distance = np.where(full_mask, distance, 0.0)
    # A value that is no number is never close; comparing it with > would say nothing.
    worst = float("nan") if np.isnan(distance).any() else float(distance.max(initial=0.0))
    if worst <= limit:
        return Check(name, column, True, worst, limit)
    index = np.unravel_index(np.argmax(~(distance <= limit)), distance.shape)
    place = [int(i) * (step if step > 1 else 1) for i in index]
    detail = (
        f"largest difference {worst:.3g}, limit {limit:g}; first at {place}: "
        f"{float(actual[index]):.6g}, expected {float(expected[index]):.6g}"
    )
    return Check(name, column, False, worst, limit, detail)


def compare_equal(
    name: str,
    expected: Any,
    actual: Any,
    *,
    column: str,
    mask: npt.NDArray[np.bool_] | None = None,
) -> Check:
    """Check that two integer arrays (or nested lists) are the same; ragged lists are compared as they are."""
    if _is_ragged(expected) or _is_ragged(actual):
        is_same = expected == actual
        detail = "" if is_same else f"{actual}, expected {expected}"
        return Check(name, column, is_same, detail=detail)
    want, have = np.asarray(expected), np.asarray(actual)
    if _without_leading_ones(want.shape) == _without_leading_ones(have.shape):
        want = want.reshape(have.shape)
    if want.shape != have.shape:
        detail = f"shape {list(have.shape)}, expected {list(want.shape)}"
        return Check(name, column, False, detail=detail)
    differs = (want != have) & _broadcast(mask, have)
    if not differs.any():
        return Check(name, column, True)
    index = np.unravel_index(np.argmax(differs), differs.shape)
    place = [int(i) for i in index]
    detail = f"at {place}: {have[index]}, expected {want[index]}"
    return Check(name, column, False, detail=detail)


def pad_left(rows: list[Array], length: int, fill: float = 0) -> Array:
    """Stack rows [t, ...] of different t into [rows, length, ...], `fill` before the shorter ones.

    Raises ValueError for a row that is longer than `length`.
    """
    longest = max((len(row) for row in rows), default=0)
    if longest > length:
        raise ValueError(f"a row has {longest} positions, more than the case's {length}")
    shape = (len(rows), length, *rows[0].shape[1:])
    padded = np.full(shape, fill, dtype=rows[0].dtype)
    for target, row in zip(padded, rows, strict=True):
        target[length - len(row) :] = row
    return padded


def _broadcast(mask: npt.NDArray[np.bool_] | None, like: Array) -> npt.NDArray[np.bool_]:
    if mask is None:
        return np.ones(like.shape, dtype=np.bool_)
    trailing = (1,) * (like.ndim - mask.ndim)
    return np.broadcast_to(mask.reshape(mask.shape + trailing), like.shape)


def _size(expected: Array, step: int) -> Array:
    magnitude = np.abs(expected.astype(np.float64))
    largest = magnitude.max(axis=-1, keepdims=True) if step == 1 else magnitude.max(initial=0.0)
    size: Array = np.maximum(largest, 1.0)
    return size


def _without_leading_ones(shape: tuple[int, ...]) -> tuple[int, ...]:
    first = next((i for i, side in enumerate(shape) if side != 1), len(shape))
    return shape[first:]


def _is_ragged(value: Any) -> bool:
    if not isinstance(value, list):
        return False
    lengths = {len(item) if isinstance(item, list) else -1 for item in value}
    return len(lengths) > 1 or lengths == {0} or any(_is_ragged(item) for item in value)
