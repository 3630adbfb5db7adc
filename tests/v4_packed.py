"""Toy DeepSeek-V4 checkpoints that hold codes and scales, and a slow decoder that shares nothing with the library."""

from __future__ import annotations

import json
import math
import struct
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from foveal.models.v4_config import V4Config
from foveal.models.v4_inventory import v4_inventory
from tests import v4_toy

QUANTIZED = {"quant_method": "fp8", "fmt": "e4m3", "weight_block_size": [128, 128]}
Numbers = npt.NDArray[np.float64]


@dataclass(frozen=True)
class Stored:
    """A tensor as a file has it."""

    dtype: str
    shape: tuple[int, ...]
    data: bytes


def write_safetensors(path: Path, tensors: Mapping[str, Stored]) -> None:
    header: dict[str, Any] = {}
    at = 0
    for name, tensor in tensors.items():
        end = at + len(tensor.data)
        header[name] = {"dtype": tensor.dtype, "shape": tensor.shape, "data_offsets": [at, end]}
        at = end
    text = json.dumps(header).encode()
    body = b"".join(tensor.data for tensor in tensors.values())
    path.write_bytes(struct.pack("<Q", len(text)) + text + body)


def packed_config(*, vision: bool = False, **overrides: Any) -> dict[str, Any]:
    """The `config.json` of a toy model whose matrices are FP8 and whose experts are packed. Blocks are partial."""
    values = v4_toy.TEXT | (v4_toy.VISION if vision else {})
    return values | {"quantization_config": QUANTIZED, "expert_dtype": "fp4"} | overrides


def random_tensors(values: Mapping[str, Any], seed: int = 0) -> dict[str, Stored]:
    """Random contents for every tensor that a checkpoint of this configuration holds."""
    config = V4Config.from_dict(values)
    generator = np.random.default_rng(seed)
    return {
        tensor.name: Stored(tensor.dtype, tensor.shape, _random(tensor, config, generator))
        for tensor in v4_inventory(config)
    }


def _random(tensor: Any, config: V4Config, generator: np.random.Generator) -> bytes:
    count = math.prod(tensor.shape)
    if tensor.dtype == "I64":
        experts, chosen = config.language.n_routed_experts, tensor.shape[1]
        rows = [generator.permutation(experts)[:chosen] for _ in range(tensor.shape[0])]
        return np.array(rows, np.int64).tobytes()
    if tensor.dtype == "F8_E4M3":
        codes = generator.integers(0, 256, count, np.uint8)
        return np.where(codes & 0x7F == 0x7F, codes ^ 1, codes).astype(np.uint8).tobytes()
    if tensor.dtype == "I8":
        return generator.integers(0, 256, count, np.uint8).tobytes()
    if tensor.dtype == "F8_E8M0":
        low = 112 if tensor.shape[-1] == 1 else 118
        return generator.integers(low, low + 4, count).astype(np.uint8).tobytes()
    if tensor.name.endswith(".scale"):
        return (2**-12 * generator.uniform(0.5, 2, count)).astype(np.float32).tobytes()
    numbers = generator.standard_normal(count).astype(np.float32)
    numbers *= 0.5 if len(tensor.shape) < 2 else tensor.shape[-1] ** -0.5
    if "norm" in tensor.name:
        numbers = 1 + 0.1 * numbers
    if tensor.dtype == "F32":
        return numbers.tobytes()
    return (numbers.view(np.uint32) >> 16).astype(np.uint16).tobytes()  # bfloat16, cut off


def write_checkpoint(
    folder: Path, values: Mapping[str, Any], tensors: Mapping[str, Stored]
) -> Path:
    folder.mkdir(exist_ok=True)
    (folder / "config.json").write_text(json.dumps(values))
    write_safetensors(folder / "model.safetensors", tensors)
    return folder


# --- the slow decoder -------------------------------------------------------------------------------


def e4m3(byte: int) -> float:
    sign, exponent, mantissa = -1 if byte & 0x80 else 1, (byte >> 3) & 15, byte & 7
    if exponent == 0:
        return sign * mantissa / 8 * 2.0**-6
    return sign * (1 + mantissa / 8) * 2.0 ** (exponent - 7)


def e2m1(nibble: int) -> float:
    return (-1 if nibble & 8 else 1) * (0, 0.5, 1, 1.5, 2, 3, 4, 6)[nibble & 7]


E4M3 = np.array([e4m3(byte) for byte in range(256)])
E2M1 = np.array([e2m1(nibble) for nibble in range(16)])


def numbers_of(name: str, tensors: Mapping[str, Stored]) -> Numbers:
    """The numbers of a tensor in float64, which holds all of them."""
    tensor = tensors[name]
    raw = np.frombuffer(tensor.data, np.uint8)
    if tensor.dtype == "BF16":
        bits = np.frombuffer(tensor.data, np.uint16).astype(np.uint32) << 16
        return bits.view(np.float32).astype(np.float64).reshape(tensor.shape)
    if tensor.dtype in ("F32", "I64"):
        kind = {"F32": np.float32, "I64": np.int64}[tensor.dtype]
        return np.frombuffer(tensor.data, kind).astype(np.float64).reshape(tensor.shape)
    scale = tensors[name.removesuffix(".weight") + ".scale"]
    if scale.dtype == "F32":
        factors = np.frombuffer(scale.data, np.float32).astype(np.float64)
    else:
        factors = 2.0 ** (np.frombuffer(scale.data, np.uint8).astype(np.float64) - 127)
    factors = factors.reshape(scale.shape)
    if tensor.dtype == "I8":
        halves = np.stack((raw & 15, raw >> 4), -1).reshape(tensor.shape[0], -1)
        rows, columns = np.indices(halves.shape)
        return E2M1[halves] * factors[rows, columns // 32]
    rows, columns = np.indices(tensor.shape)
    return E4M3[raw.reshape(tensor.shape)] * factors[rows // 128, columns // 128]


def stored_file(path: Path) -> dict[str, Stored]:
    """Every tensor of a safetensors file, read without the library."""
    data = path.read_bytes()
    length = struct.unpack("<Q", data[:8])[0]
    header = json.loads(data[8 : 8 + length])
    header.pop("__metadata__", None)
    body = data[8 + length :]
    return {
        name: Stored(e["dtype"], tuple(e["shape"]), body[slice(*e["data_offsets"])])
        for name, e in header.items()
    }
