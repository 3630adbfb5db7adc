"""Pictures and picture files for tests, made in memory."""

from __future__ import annotations

import io
import struct
import zlib
from typing import Any

import numpy as np
import numpy.typing as npt
from PIL import Image

from foveal.vision.vl2 import VL2ImageConfig

# Every (384 m, 384 n) with m*n <= 9, in the order of the published files (spec 1.5).
CANDIDATES = tuple(
    (384 * cols, 384 * rows)
    for cols, rows in (
        *(
            (1, 1),
            (1, 2),
            (2, 1),
            (1, 3),
            (3, 1),
            (1, 4),
            (4, 1),
            (2, 2),
            (1, 5),
            (5, 1),
            (1, 6),
            (6, 1),
        ),
        *((2, 3), (3, 2), (1, 7), (7, 1), (1, 8), (8, 1), (2, 4), (4, 2), (1, 9), (9, 1), (3, 3)),
    )
)
VL2 = VL2ImageConfig(CANDIDATES, patch_size=14, downsample_ratio=2)


def encoded(image: Image.Image, kind: str, **options: Any) -> bytes:
    """The bytes of a picture file."""
    stream = io.BytesIO()
    image.save(stream, kind, **options)
    return stream.getvalue()


def png_chunk(name: bytes, data: bytes) -> bytes:
    return struct.pack(">I", len(data)) + name + data + struct.pack(">I", zlib.crc32(name + data))


def png(
    width: int, height: int, *, depth: int, colour_type: int, pixels: bytes, extra: bytes = b""
) -> bytes:
    """A PNG from scratch: `pixels` are unfiltered rows without filter bytes, `extra` whole chunks before the data."""
    row = len(pixels) // height
    raw = b"".join(b"\0" + pixels[y * row : (y + 1) * row] for y in range(height))
    header = struct.pack(">IIBBBBB", width, height, depth, colour_type, 0, 0, 0)
    data = png_chunk(b"IHDR", header) + extra + png_chunk(b"IDAT", zlib.compress(raw))
    return b"\x89PNG\r\n\x1a\n" + data + png_chunk(b"IEND", b"")


def formula(width: int, height: int) -> npt.NDArray[np.uint8]:
    """The picture of the spec's pixel vectors (3.6)."""
    x, y = np.meshgrid(np.arange(width), np.arange(height))
    channels = ((7 * x + 3 * y) % 256, (5 * x + 11 * y) % 256, (x + y) % 256)
    return np.stack(channels, axis=-1).astype(np.uint8)


def noise(width: int, height: int, channels: int = 3, seed: int = 0) -> npt.NDArray[np.uint8]:
    values = np.random.default_rng(seed).integers(0, 256, (height, width, channels), dtype=np.uint8)
    return values if channels > 1 else values[:, :, 0]


def smooth(width: int, height: int) -> npt.NDArray[np.uint8]:
    """A picture that lossy formats keep well: slow gradients, another one in each channel."""
    x, y = np.meshgrid(np.linspace(0, 255, width), np.linspace(0, 255, height))
    return np.stack([x, y, (x + y) / 2], axis=-1).astype(np.uint8)
