"""Stored matrices that are codes and scales, found by name and turned into the numbers they stand for.

    X.weight  F8_E4M3 [out, in]          X.scale [ceil(out / 128), ceil(in / 128)]  F8_E8M0 or F32
    X.weight  I8 [out, in / 2], packed   X.scale [out, ceil(in / 32)]               F8_E8M0

What the codes mean is said in `ops.packed`. A band of rows is read at a time, so the memory beside the parameter stays
at a few pieces whatever the size of the matrix. A target that is packed itself gets the codes as they are.
Source: V4 spec 2.1, 2.6.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Literal, TypeAlias

import torch

from foveal.errors import CheckpointError
from foveal.models.names import Source
from foveal.models.safetensors_header import TensorInfo
from foveal.ops.packed import PackedFormat, PackedWeight, Packing, dequantise, scale_numbers

# Fills the memory with bytes of a file from an offset on; raises CheckpointError.
ReadBytes: TypeAlias = Callable[[Path, int, memoryview], None]
Problem: TypeAlias = tuple[Literal["missing", "misshapen", "unreadable"], str]

CODE_DTYPES: Mapping[str, PackedFormat] = {"F8_E4M3": "fp8", "I8": "fp4", "U8": "fp4"}
# Writers without an e8m0 type store its bytes as U8.
SCALE_DTYPES: Mapping[str, torch.dtype] = {
    "F8_E8M0": torch.uint8,
    "U8": torch.uint8,
    "F32": torch.float32,
}
# Rows that share a scale in a file.
BLOCK_ROWS: Mapping[PackedFormat, int] = {"fp8": 128, "fp4": 1}


def scale_name(weight_name: str) -> str:
    """The name of the tensor that holds the scales of `X.weight`."""
    return weight_name.removesuffix(".weight") + ".scale"


def is_coded(source: Source, info: TensorInfo) -> bool:
    """True where a matrix is stored as codes, so that its numbers need scales too."""
    is_matrix = len(source.shape) == 2 and source.name.endswith(".weight")
    return is_matrix and info.dtype in CODE_DTYPES


def packing_of(info: TensorInfo, scale: TensorInfo) -> Packing:
    """How a coded matrix is stored."""
    return Packing(CODE_DTYPES[info.dtype], scale.dtype == "F32")


def find_problems(
    source: Source, tensors: Mapping[str, TensorInfo], wanted: Packing | None = None
) -> Iterator[Problem]:
    """What keeps a coded matrix from being read. `wanted` is the format that the target keeps; None is numbers."""
    info, name = tensors[source.name], scale_name(source.name)
    kind = CODE_DTYPES[info.dtype]
    rows, columns = source.shape
    codes, scales = _stored_shapes(kind, rows, columns)
    if info.shape != codes or (kind == "fp4" and columns % 2):
        yield "misshapen", f"{source.name} (expected {list(codes)} for {kind}, {_found(info)})"
    scale = tensors.get(name)
    if scale is None:
        yield "missing", name
        return
    if scale.shape != scales:
        yield "misshapen", f"{name} (expected {list(scales)}, {_found(scale)})"
    if scale.dtype not in SCALE_DTYPES:
        yield "unreadable", f"{name} ({scale.dtype}; readable: {', '.join(SCALE_DTYPES)})"
    elif wanted is not None and packing_of(info, scale) != wanted:
        yield (
            "unreadable",
            f"{source.name} ({info.dtype} with {scale.dtype} scales; kept packed as {wanted.format})",
        )


def _found(info: TensorInfo) -> str:
    return f"found {list(info.shape)}"


def _stored_shapes(
    kind: PackedFormat, rows: int, columns: int
) -> tuple[tuple[int, int], tuple[int, int]]:
    """Shapes in the file of the codes and of the scales of a matrix [rows, columns]."""
    packing = Packing(kind)
    scale_rows = -(-rows // BLOCK_ROWS[kind])
    return (rows, packing.code_bytes(columns)), (scale_rows, packing.num_scales(columns))


@dataclass(frozen=True, slots=True)
class Band:
    """Rows [first, stop) of a coded matrix, and the rows of the target [stop - first, columns] that they fill."""

    weight: TensorInfo
    scale: TensorInfo
    first: int
    stop: int
    target: torch.Tensor | PackedWeight

    @property
    def path(self) -> Path:
        return self.weight.path

    @property
    def start(self) -> int:
        return self.weight.start + self.first * self.weight.shape[1]

    @property
    def paths(self) -> tuple[Path, ...]:
        """Codes and scales may lie in different files."""
        return (self.weight.path, self.scale.path)

    @property
    def _scale_rows(self) -> tuple[int, int]:
        """First and last (excluded) row of stored scales that the band needs."""
        block = BLOCK_ROWS[CODE_DTYPES[self.weight.dtype]]
        return self.first // block, -(-self.stop // block)

    @property
    def _scale_row_bytes(self) -> int:
        return self.scale.shape[1] * SCALE_DTYPES[self.scale.dtype].itemsize

    @property
    def num_bytes(self) -> int:
        low, high = self._scale_rows
        codes = (self.stop - self.first) * self.weight.shape[1]
        return codes + (high - low) * self._scale_row_bytes

    def run(self, read: ReadBytes) -> int:
        """Read the band and fill the target; returns the bytes read."""
        kind = CODE_DTYPES[self.weight.dtype]
        rows = self.stop - self.first
        codes = torch.empty(rows, self.weight.shape[1], dtype=torch.uint8)
        read(self.weight.path, self.start, _memory(codes))
        scales = self._scales(read).repeat_interleave(BLOCK_ROWS[kind], 0)[:rows]
        if isinstance(self.target, PackedWeight):
            self.target.codes.copy_(codes)
            self.target.scales.copy_(scales)
        else:
            self.target.copy_(dequantise(codes, scales, kind))
        return self.num_bytes

    def _scales(self, read: ReadBytes) -> torch.Tensor:
        low, high = self._scale_rows
        shape, dtype = (high - low, self.scale.shape[1]), SCALE_DTYPES[self.scale.dtype]
        scales = torch.empty(shape, dtype=dtype)
        read(self.scale.path, self.scale.start + low * self._scale_row_bytes, _memory(scales))
        if not scale_numbers(scales).isfinite().all():
            raise CheckpointError(
                f"{self.scale.path} has a weight scale that is not a finite number (bytes "
                f"{self.scale.start} to {self.scale.end}); download or copy the file again"
            )
        return scales


def _memory(tensor: torch.Tensor) -> memoryview:
    return memoryview(tensor.flatten().view(torch.uint8).numpy().data)


def plan_bands(
    source: Source,
    tensors: Mapping[str, TensorInfo],
    target: torch.Tensor | PackedWeight,
    piece_bytes: int,
) -> Iterator[Band]:
    """Cut a checked matrix into bands whose float32 numbers take about `piece_bytes`.

    `target` is the whole parameter (or stack), of which `source` says the rows.
    """
    weight, scale = tensors[source.name], tensors[scale_name(source.name)]
    base = target if source.index is None else target[source.index]
    rows, columns = source.shape
    block = BLOCK_ROWS[CODE_DTYPES[weight.dtype]]
    step = max(1, piece_bytes // (4 * max(1, columns)) // block) * block
    for first in range(0, rows, step):
        stop = min(rows, first + step)
        yield Band(weight, scale, first, stop, base[source.offset + first : source.offset + stop])
