"""Names for media as the tower will see it: equal ids mean equal embeddings and equal tokens.

A content id is a SHA-256 of framed fields. Each field carries its name, its type and its length, so that no two lists
of fields give the same bytes, and arrays carry their shape: 30x150 and 150x30 pixels of one grey differ (C030).
"""

from __future__ import annotations

import hashlib
import struct
from collections.abc import Mapping, Sequence
from typing import Any, Protocol, TypeAlias

import numpy as np
import numpy.typing as npt

from foveal.types import MediaItem, Picture, V4MediaItem

Scalar: TypeAlias = bool | int | float | str | bytes | None
Field: TypeAlias = Scalar | npt.NDArray[Any] | Sequence[Scalar]


class Hasher(Protocol):
    def update(self, data: Any, /) -> None: ...


def content_id(kind: str, fields: Mapping[str, Field]) -> bytes:
    """32 bytes that commit to `kind` and to the names, types and values of all `fields`, whatever their order.

    Raises TypeError for values that have no agreed bytes, such as dictionaries.
    """
    hasher = hashlib.sha256()
    _feed(hasher, "kind", kind)
    for name in sorted(fields):
        _feed(hasher, name, fields[name])
    return hasher.digest()


def item_content_id(
    item: MediaItem | V4MediaItem, *, fingerprint: str, vision_adapter: str | None = None
) -> bytes:
    """The id of a picture that is cut already; key of its embeddings, and its name in block hashes.

    `fingerprint` stands for the weights, their dtype and their format. `vision_adapter` is the adapter's id where it
    touches tower or projector, None otherwise. The number of tiles commits to the way of tiling. Where the picture
    stands in the prompt and its original size are left out: they change no embedding.
    """
    facts: dict[str, Field] = {"fingerprint": fingerprint, "vision_adapter": vision_adapter}
    if isinstance(item, V4MediaItem):
        block: dict[str, Field] = {
            "vit_grid": item.vit_grid,
            "llm_grid": item.llm_grid,
            # Alignment pads follow from the position and are not part of the picture.
            "types": item.types[item.num_pads :],
            "perm": item.perm,
            "patches": item.patches,
            "patch_values": item.patch_values,
        }
        return content_id("v4", facts | block)
    tiles: dict[str, Field] = {
        "grid": item.grid,
        "length": item.length,
        "tiles": item.tiles,
        "pixel_values": item.pixel_values,
        "embeds": item.embeds,
    }
    return content_id("vl2", facts | tiles)


def picture_content_id(picture: Picture, call: Mapping[str, Field]) -> bytes:
    """The id of a decoded picture together with what the call decides about it; key of a processor's results.

    `call` must name everything that changes tiles or tokens: whether it is tiled (from the number of pictures), limits
    on pixels, the processor's version and settings.
    """
    named: dict[str, Field] = {f"call.{name}": value for name, value in call.items()}
    return content_id("picture", named | {"rgb": picture.rgb})


def _feed(hasher: Hasher, name: str, value: Field) -> None:
    """Frame: name, type tag, number of bytes or elements, then the bytes."""
    tag = name.encode()
    hasher.update(struct.pack("<I", len(tag)) + tag)
    if isinstance(value, np.ndarray):
        _feed_array(hasher, value)
    elif isinstance(value, Sequence) and not isinstance(value, str | bytes):
        hasher.update(b"q" + struct.pack("<Q", len(value)))
        for element in value:
            _feed(hasher, "", element)
    else:
        type_tag, data = _scalar_bytes(name, value)
        hasher.update(type_tag + struct.pack("<Q", len(data)) + data)


def _feed_array(hasher: Hasher, array: npt.NDArray[Any]) -> None:
    if array.dtype.hasobject:
        raise TypeError("an array of objects has no bytes to hash; pass numbers")
    layout = f"{array.dtype.str}{array.shape}".encode()
    hasher.update(b"a" + struct.pack("<QQ", len(layout), array.nbytes) + layout)
    hasher.update(np.ascontiguousarray(array).reshape(-1).view(np.uint8))


def _scalar_bytes(name: str, value: Scalar) -> tuple[bytes, bytes]:
    match value:
        case None:
            return b"n", b""
        case bool():
            return b"b", bytes([value])
        case int():
            return b"i", str(value).encode()
        case float():
            return b"f", struct.pack("<d", value)
        case str():
            return b"s", value.encode()
        case bytes():
            return b"y", value
    raise TypeError(f"field {name!r} is a {type(value).__name__}; pass numbers, texts or arrays")
