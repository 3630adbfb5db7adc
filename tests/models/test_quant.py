"""Codes and scales stand for exact numbers, and a packed weight computes what its numbers compute."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from foveal import ops
from foveal.models.names import Source
from foveal.models.quant import plan_bands
from foveal.models.safetensors_header import TensorInfo
from foveal.ops.packed import (
    PackedFormat,
    PackedWeight,
    Packing,
    decode_fp4,
    decode_fp8,
    dequantise,
    scale_numbers,
)
from tests import v4_packed

FORMATS: tuple[PackedFormat, ...] = ("fp4", "fp8")
PACKINGS = (Packing("fp4"), Packing("fp8"), Packing("fp8", has_float_scales=True))
EVERY_BYTE = torch.arange(256, dtype=torch.uint8)


def random_packed(shape: tuple[int, ...], packing: Packing, seed: int = 0) -> PackedWeight:
    weight = PackedWeight.empty(shape, packing)
    generator = torch.Generator().manual_seed(seed)
    codes = torch.randint(0, 256, weight.codes.shape, generator=generator, dtype=torch.uint8)
    if packing.format == "fp8":  # 127 and 255 are not numbers
        codes = torch.where((codes & 0x7F) == 0x7F, codes ^ 1, codes)
    weight.codes.copy_(codes)
    if packing.has_float_scales:
        weight.scales.copy_(torch.rand(weight.scales.shape, generator=generator) * 2**-8)
    else:
        low, high = 110, 125
        scales = torch.randint(low, high, weight.scales.shape, generator=generator)
        weight.scales.copy_(scales.to(torch.uint8))
    return weight


# --- numbers ----------------------------------------------------------------------------------------


def test_every_e4m3_byte_is_its_number() -> None:
    found = decode_fp8(EVERY_BYTE)
    is_number = (EVERY_BYTE & 0x7F) != 0x7F
    expected = torch.tensor([v4_packed.e4m3(b) for b in range(256)])
    assert torch.equal(found[is_number], expected[is_number])
    assert found[~is_number].isnan().all()
    assert found[is_number].abs().max() == 448


def test_every_byte_of_two_e2m1_codes_is_its_two_numbers() -> None:
    found = decode_fp4(EVERY_BYTE[:, None])
    expected = [[v4_packed.e2m1(b & 15), v4_packed.e2m1(b >> 4)] for b in range(256)]
    assert torch.equal(found, torch.tensor(expected))


def test_every_e8m0_byte_is_a_power_of_two() -> None:
    found = scale_numbers(EVERY_BYTE)
    expected = torch.tensor([2.0 ** (u - 127) for u in range(255)])
    assert torch.equal(found[:255], expected)
    assert found[255].isnan()


def test_the_vector_of_the_specification() -> None:
    codes, scales = torch.tensor([[0xA5]], dtype=torch.uint8), torch.tensor([[127], [126]])
    for scale, expected in zip(scales, ([3.0, -1.0], [1.5, -0.5]), strict=True):
        assert dequantise(codes, scale[None].to(torch.uint8), "fp4").tolist() == [expected]


@pytest.mark.parametrize("packing", PACKINGS, ids=str)
@pytest.mark.parametrize("columns", [2, 30, 32, 128, 130, 384])
def test_each_block_of_columns_has_its_scale(packing: Packing, columns: int) -> None:
    weight = random_packed((3, columns), packing)
    factors = scale_numbers(weight.scales)
    plain = decode_fp4(weight.codes) if packing.format == "fp4" else decode_fp8(weight.codes)
    for row in range(3):
        for column in range(columns):
            expected = plain[row, column] * factors[row, column // packing.block]
            assert weight.dense()[row, column] == expected


@given(st.integers(1, 254), st.integers(0, 255), st.sampled_from(FORMATS))
def test_products_with_powers_of_two_are_exact_in_both_types(
    scale: int, code: int, kind: PackedFormat
) -> None:
    if kind == "fp8" and code & 0x7F == 0x7F:
        return
    codes = torch.tensor([[code]], dtype=torch.uint8)
    weight = PackedWeight(codes, torch.tensor([[scale]], dtype=torch.uint8), kind)
    halves = (code & 15, code >> 4)
    plain = [v4_packed.e2m1(h) for h in halves] if kind == "fp4" else [v4_packed.e4m3(code)]
    exact = [value * 2.0 ** (scale - 127) for value in plain]
    if any(value and not 2.0**-126 <= abs(value) < 2.0**127 for value in exact):
        return  # no weight is there: float32 and bfloat16 end
    assert weight.dense(torch.float32)[0].tolist() == exact
    assert weight.dense(torch.bfloat16)[0].tolist() == exact


def test_float_scales_round_once_in_bfloat16() -> None:
    weight = random_packed((4, 256), Packing("fp8", has_float_scales=True))
    assert torch.equal(weight.dense(torch.bfloat16), weight.dense().to(torch.bfloat16))


# --- storage ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("packing", PACKINGS, ids=str)
def test_shape_bytes_and_indexing_of_a_stack(packing: Packing) -> None:
    stack = random_packed((3, 6, 80), packing)
    assert stack.shape == (3, 6, 80)
    assert stack.packing == packing
    assert stack.num_bytes == packing.num_bytes(3 * 6, 80)
    assert stack[1].shape == (6, 80)
    assert stack[1].codes.data_ptr() == stack.codes[1].data_ptr()
    assert torch.equal(stack[1][2:4].dense(), stack.dense()[1, 2:4])


@pytest.mark.parametrize("piece_bytes", [1, 4096, 1 << 20])
@pytest.mark.parametrize(("dtype", "rows"), [("F8_E4M3", 300), ("I8", 300), ("F8_E4M3", 1)])
def test_bands_cover_each_row_once_in_bounded_pieces(
    dtype: str, rows: int, piece_bytes: int
) -> None:
    columns, block = 64, 128 if dtype == "F8_E4M3" else 1
    width = columns // 2 if dtype == "I8" else columns
    tensors = {
        "a.weight": TensorInfo(dtype, (rows, width), 8, 8 + rows * width, Path("a")),
        "a.scale": TensorInfo(
            "F8_E8M0", (-(-rows // block), 2 if dtype == "I8" else 1), 0, 0, Path("b")
        ),
    }
    target = torch.zeros(rows + 7, columns)
    bands = list(plan_bands(Source("a.weight", (rows, columns), 5), tensors, target, piece_bytes))
    assert [band.first for band in bands] == [0, *(band.stop for band in bands[:-1])]
    assert bands[-1].stop == rows
    assert all(band.first % block == 0 for band in bands)
    largest = max(4 * columns * (band.stop - band.first) for band in bands)
    assert largest <= max(piece_bytes, 4 * columns * block)
    for band in bands:
        assert isinstance(band.target, torch.Tensor)
        assert band.target.data_ptr() == target[5 + band.first].data_ptr()
        assert band.paths == (Path("a"), Path("b"))


# --- the seam ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("body", ["reference", "library"])
@pytest.mark.parametrize("packing", PACKINGS, ids=str)
@pytest.mark.parametrize("rows", [0, 1, 9, 70])
def test_linear_of_packed_rows_is_that_of_their_numbers(
    body: str, packing: Packing, rows: int
) -> None:
    weight = random_packed((40, 160), packing)
    x = torch.randn(rows, 160, generator=torch.Generator().manual_seed(1))
    with ops.forced(body):
        assert torch.equal(ops.linear(x, weight), ops.linear(x, weight.dense()))


def test_narrow_rows_meet_narrow_numbers() -> None:
    weight = random_packed((40, 160), Packing("fp4"))
    x = torch.randn(3, 160, generator=torch.Generator().manual_seed(1)).to(torch.bfloat16)
    found = ops.linear(x, weight)
    assert found.dtype is torch.bfloat16
    assert torch.equal(found, ops.linear(x, weight.dense(torch.bfloat16)))


@pytest.mark.parametrize("body", ["reference", "library"])
@pytest.mark.parametrize("packing", PACKINGS, ids=str)
@pytest.mark.parametrize("rows", [0, 1, 13])
def test_packed_experts_are_their_numbers(body: str, packing: Packing, rows: int) -> None:
    generator = torch.Generator().manual_seed(2)
    w13, w2 = random_packed((5, 48, 64), packing), random_packed((5, 64, 24), packing, seed=3)
    x = torch.randn(rows, 64, generator=generator)
    ids = torch.rand(rows, 5, generator=generator).topk(2, -1).indices
    shares = torch.rand(rows, 2, generator=generator)
    with ops.forced(body):
        found = ops.moe(x, shares, ids, w13, w2, 3.0)
        expected = ops.moe(x, shares, ids, w13.dense(), w2.dense(), 3.0)
    assert torch.equal(found, expected)
