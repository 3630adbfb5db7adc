"""Arrays that come from outside: read as plain numbers of the right shape, or refused by name. Knows no torch."""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt

from foveal.errors import MediaError


def as_array(value: Any, name: str, kinds: str = "f") -> npt.NDArray[Any]:
    """`value` as an array whose dtype is of one of `kinds`."""
    if not hasattr(value, "__array__"):
        raise MediaError(f"{name} is a {type(value).__name__}; give a numpy array or a tensor")
    layout = str(getattr(value, "layout", "torch.strided"))
    if layout != "torch.strided":
        raise MediaError(f"{name} is sparse ({layout}); give a dense array")
    try:
        if hasattr(value, "detach"):
            value = value.detach().cpu()
            if str(value.dtype) == "torch.bfloat16":  # numpy has no such type
                value = value.float()
        array = np.asarray(value)
    except (TypeError, ValueError, RuntimeError):
        raise MediaError(f"{name} cannot be read as an array; give a numpy array") from None
    if array.dtype.kind not in kinds:
        wanted = "normalised floats" if "f" in kinds else "whole numbers"
        raise MediaError(f"{name} has dtype {array.dtype}; give {wanted}")
    return array


def check_shape(name: str, shape: tuple[int, ...], expected: tuple[int | None, ...]) -> None:
    """Rank first, then each side that is fixed (None: any)."""
    shown = "[" + ", ".join("*" if side is None else str(side) for side in expected) + "]"
    if len(shape) != len(expected):
        raise MediaError(
            f"{name}: data has rank {len(shape)} but expected {len(expected)}; its shape must be {shown}, not "
            f"{list(shape)}"
        )
    for i, (side, wanted) in enumerate(zip(shape, expected, strict=True)):
        if wanted is not None and side != wanted:
            raise MediaError(
                f"{name}: data dim[{i}] expected {wanted}, got {side}; its shape must be {shown}, not {list(shape)}"
            )


def as_float32(values: npt.NDArray[Any], name: str) -> npt.NDArray[np.float32]:
    """A float32 copy, writable and contiguous. Raises MediaError for numbers that float32 does not hold."""
    with np.errstate(over="ignore"):
        copy: npt.NDArray[np.float32] = np.array(values, dtype=np.float32, order="C")
    if not np.isfinite(copy).all():
        raise MediaError(f"{name} holds numbers that are not finite; check how it was computed")
    return copy
