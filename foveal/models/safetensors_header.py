"""The header of a safetensors file, read and checked by hand.

    | 8 bytes: N, little-endian | N bytes: JSON, padded with spaces | tensor data |

    {"__metadata__": {...}, "name": {"dtype": "BF16", "shape": [2, 3], "data_offsets": [begin, end]}, ...}

Offsets count from the end of the header. Every byte of the data belongs to exactly one tensor, so a file that was cut
off, or whose header is damaged, is found out here, before any number is read. No tensor library is needed, and none of
the data is touched.
"""

from __future__ import annotations

import json
import math
import os
import struct
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NoReturn

from foveal.errors import CheckpointError

MAX_HEADER_BYTES = 100_000_000  # the format's own limit
PREFIX_BYTES = 8

# Bits an element takes, for each dtype word of the format. What the loader can turn into parameters is its own matter.
DTYPE_BITS: Mapping[str, int] = {
    "BOOL": 8, "U8": 8, "I8": 8, "F8_E4M3": 8, "F8_E5M2": 8, "F8_E8M0": 8,
    "F4": 4, "F6_E2M3": 6, "F6_E3M2": 6,
    "U16": 16, "I16": 16, "F16": 16, "BF16": 16,
    "U32": 32, "I32": 32, "F32": 32,
    "U64": 64, "I64": 64, "F64": 64, "C64": 64,
}  # fmt: skip


@dataclass(frozen=True, slots=True)
class TensorInfo:
    """Where a tensor lies: bytes [start, end) of the file at `path`, counted from the file's first byte."""

    dtype: str
    shape: tuple[int, ...]
    start: int
    end: int
    path: Path

    @property
    def num_elements(self) -> int:
        return math.prod(self.shape)

    @property
    def num_bytes(self) -> int:
        return self.end - self.start


def read_header(path: Path) -> dict[str, TensorInfo]:
    """The tensors of one safetensors file by name, in the order of their data.

    Raises CheckpointError that names the file and says whether it is truncated or corrupt.
    """
    try:
        with path.open("rb") as file:
            size = os.fstat(file.fileno()).st_size
            prefix = file.read(PREFIX_BYTES)
            header_bytes = _header_length(path, prefix, size)
            text = file.read(header_bytes)
    except OSError as error:
        raise CheckpointError(f"{path} cannot be read: {error.strerror or error}") from None
    data_start = PREFIX_BYTES + header_bytes
    tensors = {
        name: _tensor_info(path, name, entry, data_start)
        for name, entry in _parse(path, text).items()
        if name != "__metadata__"
    }
    ordered = dict(sorted(tensors.items(), key=lambda item: (item[1].start, item[1].end)))
    _check_layout(path, ordered, data_start, size)
    return ordered


def _truncated(path: Path, reason: str) -> NoReturn:
    raise CheckpointError(f"{path} is truncated: {reason}; download or copy the file again")


def _corrupt(path: Path, reason: str) -> NoReturn:
    raise CheckpointError(f"{path} is corrupt: {reason}; download or copy the file again")


def _header_length(path: Path, prefix: bytes, size: int) -> int:
    if len(prefix) < PREFIX_BYTES:
        _truncated(path, f"it has {size} bytes, and a safetensors file has at least {PREFIX_BYTES}")
    if prefix == b"version ":
        raise CheckpointError(
            f"{path} is a Git LFS pointer and holds no weights; fetch the real file with `git lfs pull`"
        )
    length = int(struct.unpack("<Q", prefix)[0])
    if length > MAX_HEADER_BYTES:
        _corrupt(
            path,
            f"its header would take {length} bytes (limit {MAX_HEADER_BYTES}), so this is no safetensors file",
        )
    if PREFIX_BYTES + length > size:
        _truncated(path, f"its header takes {length} bytes, and the file has {size}")
    return length


def _parse(path: Path, text: bytes) -> dict[str, Any]:
    try:
        header = json.loads(text.decode("utf-8"), object_pairs_hook=_unique_keys)
    except (ValueError, RecursionError) as error:
        _corrupt(path, f"its header is not JSON ({str(error)[:120]})")
    if not isinstance(header, dict):
        _corrupt(path, f"its header is a {type(header).__name__}, not an object")
    return header


def _unique_keys(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    values = dict(pairs)
    if len(values) < len(pairs):
        raise ValueError("a name occurs twice")
    return values


def _whole_numbers(values: object) -> tuple[int, ...] | None:
    """`values` as a tuple if it is a list of whole numbers of at least 0, else None."""
    if isinstance(values, list) and all(type(value) is int and value >= 0 for value in values):
        return tuple(values)
    return None


def _tensor_info(path: Path, name: str, entry: object, data_start: int) -> TensorInfo:
    if not isinstance(entry, dict):
        _corrupt(path, f"the entry of tensor {name!r} is not an object")
    dtype = entry.get("dtype")
    shape, offsets = _whole_numbers(entry.get("shape")), _whole_numbers(entry.get("data_offsets"))
    if not isinstance(dtype, str) or shape is None or offsets is None or len(offsets) != 2:
        _corrupt(path, f"tensor {name!r} has no valid dtype, shape and data_offsets")
    begin, end = offsets
    bits = DTYPE_BITS.get(dtype)
    if bits is not None and (end - begin) * 8 != math.prod(shape) * bits:
        _corrupt(
            path,
            f"tensor {name!r} of {dtype} {list(shape)} needs {math.prod(shape) * bits // 8} bytes, "
            f"and its data_offsets give it {end - begin}",
        )
    return TensorInfo(dtype, shape, data_start + begin, data_start + end, path)


def _check_layout(
    path: Path, ordered: Mapping[str, TensorInfo], data_start: int, size: int
) -> None:
    """Tensors follow each other without gap or overlap and end with the file."""
    end, previous = data_start, "the header"
    for name, info in ordered.items():
        if info.end < info.start or info.start != end:
            what = "overlaps" if info.start < end else "does not follow"
            _corrupt(path, f"tensor {name!r} {what} {previous!r}")
        end, previous = info.end, name
    if end > size:
        _truncated(path, f"its header describes {end} bytes, and the file has {size}")
    if end < size:
        _corrupt(path, f"its header describes {end} bytes, and the file has {size}")
