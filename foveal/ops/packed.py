"""Matrices in the narrow formats that checkpoints ship, and the exact numbers behind their codes.

    fp8   a byte is an e4m3 number ("fn": largest 448, no infinities); one scale for each row and 128 columns
    fp4   a byte holds columns 2k (low half) and 2k + 1 (high half) as e2m1: sign bit, then an index into
          0, 0.5, 1, 1.5, 2, 3, 4, 6; one scale for each row and 32 columns

A scale is an e8m0 byte u, which means 2^(u - 127), or a float32 number. Files keep one fp8 scale for 128 rows too; here
every row has its own, which costs a byte for 128 codes and lets any rows be stacked or split.

A code times a power of two has at most four significant bits, so its product is exact in float32 and in bfloat16. Only
float32 scales round, and only in bfloat16. Source: V4 spec 2.6.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache
from typing import Literal, TypeAlias

import torch
from torch import Tensor
from torch.nn import functional as F

PackedFormat: TypeAlias = Literal["fp4", "fp8"]
# Columns that share a scale.
BLOCK_COLUMNS: Mapping[PackedFormat, int] = {"fp4": 32, "fp8": 128}
E2M1_MAGNITUDES = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)


@dataclass(frozen=True, slots=True)
class Packing:
    """How a weight is stored. `has_float_scales` False means e8m0 bytes."""

    format: PackedFormat
    has_float_scales: bool = False

    @property
    def block(self) -> int:
        return BLOCK_COLUMNS[self.format]

    def code_bytes(self, columns: int) -> int:
        """Bytes of a row's codes."""
        return columns // 2 if self.format == "fp4" else columns

    def num_scales(self, columns: int) -> int:
        """Scales of a row."""
        return -(-columns // self.block)

    def num_bytes(self, rows: int, columns: int) -> int:
        """Memory of a packed matrix."""
        scale_bytes = 4 if self.has_float_scales else 1
        return rows * (self.code_bytes(columns) + scale_bytes * self.num_scales(columns))


@dataclass(frozen=True, slots=True, eq=False)
class PackedWeight:
    """A matrix [rows, columns], or a stack of them, as codes and scales.

    `codes` [..., rows, bytes of a row] uint8; `scales` [..., rows, blocks of a row] uint8 (e8m0) or float32. Indexing
    picks from the first dimension and copies nothing.
    """

    codes: Tensor
    scales: Tensor
    format: PackedFormat

    @classmethod
    def empty(
        cls, shape: tuple[int, ...], packing: Packing, device: torch.device | str = "cpu"
    ) -> PackedWeight:
        """Storage for a weight of `shape`, to be filled by the loader."""
        *front, columns = shape
        codes = (*front, packing.code_bytes(columns))
        scales = (*front, packing.num_scales(columns))
        scale_dtype = torch.float32 if packing.has_float_scales else torch.uint8
        return cls(
            torch.empty(codes, dtype=torch.uint8, device=device),
            torch.empty(scales, dtype=scale_dtype, device=device),
            packing.format,
        )

    @property
    def shape(self) -> tuple[int, ...]:
        """The shape of the numbers."""
        *front, row_bytes = self.codes.shape
        return (*front, row_bytes * (2 if self.format == "fp4" else 1))

    @property
    def packing(self) -> Packing:
        return Packing(self.format, self.scales.dtype is torch.float32)

    @property
    def num_bytes(self) -> int:
        return self.codes.nbytes + self.scales.nbytes

    def __getitem__(self, index: int | slice) -> PackedWeight:
        return PackedWeight(self.codes[index], self.scales[index], self.format)

    def dense(self, dtype: torch.dtype = torch.float32) -> Tensor:
        """The numbers, [..., rows, columns]."""
        return dequantise(self.codes, self.scales, self.format).to(dtype)


# What operations take as a weight.
Weight: TypeAlias = Tensor | PackedWeight


def dequantise(codes: Tensor, scales: Tensor, kind: PackedFormat) -> Tensor:
    """Codes [..., bytes] and scales [..., blocks] -> float32 [..., columns]. The last block may be partial."""
    numbers = decode_fp4(codes) if kind == "fp4" else decode_fp8(codes)
    block, columns = BLOCK_COLUMNS[kind], numbers.shape[-1]
    factors = scale_numbers(scales)
    if columns % block == 0:
        numbers.unflatten(-1, (-1, block)).mul_(factors.unsqueeze(-1))
        return numbers
    return numbers.mul_(factors.repeat_interleave(block, -1)[..., :columns])


def decode_fp8(codes: Tensor) -> Tensor:
    """e4m3 bytes -> float32, without scale."""
    return codes.view(torch.float8_e4m3fn).float()


def decode_fp4(codes: Tensor) -> Tensor:
    """Bytes [..., n] of two e2m1 codes each -> float32 [..., 2n], without scale."""
    return F.embedding(codes.int(), _fp4_pairs().to(codes.device)).flatten(-2)


@cache
def _fp4_pairs() -> Tensor:
    """[256, 2]: what the low and the high half of each byte stand for."""
    halves = torch.tensor([*E2M1_MAGNITUDES, *(-m for m in E2M1_MAGNITUDES)])
    return torch.stack((halves.repeat(16), halves.repeat_interleave(16)), -1)


def scale_numbers(scales: Tensor) -> Tensor:
    """e8m0 bytes (reinterpreted, never converted: 2^-7 would become 0) or float32 scales -> float32."""
    return scales if scales.dtype is torch.float32 else scales.view(torch.float8_e8m0fnu).float()
