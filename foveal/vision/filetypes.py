"""What kind of file some bytes are, told from the bytes alone: names and labels lie.

Reads headers only and decodes nothing. Also knows how each picture format shows that its end is missing.
"""

from __future__ import annotations

import os
import struct
from typing import BinaryIO

# How much of a file's start and end is looked at.
HEAD_BYTES = 4096
TAIL_BYTES = 64

# Our word for a format -> Pillow's.
PILLOW_NAMES = {
    "JPEG": "JPEG",
    "PNG": "PNG",
    "WebP": "WEBP",
    "GIF": "GIF",
    "BMP": "BMP",
    "TIFF": "TIFF",
    "AVIF": "AVIF",
}

_SIGNATURES = (
    (b"\xff\xd8\xff", "JPEG"),
    (b"\x89PNG\r\n\x1a\n", "PNG"),
    (b"GIF87a", "GIF"),
    (b"GIF89a", "GIF"),
    (b"BM", "BMP"),
    (b"II*\0", "TIFF"),
    (b"MM\0*", "TIFF"),
    (b"II+\0", "TIFF"),
    (b"MM\0+", "TIFF"),
    (b"%PDF", "PDF"),
    (b"8BPS", "PSD"),
    (b"PK\x03\x04", "ZIP"),
    (b"\x1f\x8b", "gzip"),
    (b"\0\0\1\0", "ICO"),
    (b"\0\0\0\x0cjP  ", "JPEG 2000"),
    (b"\xff\x4f\xff\x51", "JPEG 2000"),
    (b"\0\0\0\x0cJXL ", "JPEG XL"),
    (b"\xff\x0a", "JPEG XL"),
    (b"qoif", "QOI"),
    (b"\x1aE\xdf\xa3", "Matroska video"),
)
_HEIF_BRANDS = {b"heic", b"heix", b"heim", b"heis", b"hevc", b"hevx", b"mif1", b"msf1"}
_AVIF_BRANDS = {b"avif", b"avis"}
# Control characters that text does not hold.
_NOT_TEXT = bytes(set(range(32)) - set(b"\t\n\v\f\r\x1b"))


def sniff(head: bytes) -> str:
    """The kind of file that starts with `head` (up to HEAD_BYTES of it), as a word for people."""
    if not head.strip(b"\0"):
        return "empty data"
    for signature, kind in _SIGNATURES:
        if head.startswith(signature):
            return kind
    if head[:4] == b"RIFF":
        return "WebP" if head[8:12] == b"WEBP" else "RIFF audio or video"
    if head[4:8] == b"ftyp":
        return _iso_media(head)
    return _text_kind(head)


def _iso_media(head: bytes) -> str:
    """HEIF family and video share a container; the brands in its first box tell them apart."""
    (size,) = struct.unpack(">I", head[:4])
    brands = {head[8:12], *(head[i : i + 4] for i in range(16, min(size, len(head)) - 3, 4))}
    if brands & _AVIF_BRANDS:
        return "AVIF"
    return "HEIC" if brands & _HEIF_BRANDS else "MP4 video"


def _text_kind(head: bytes) -> str:
    """SVG, HTML, XML or other text; "unknown data" where it is none."""
    if head.startswith((b"\xff\xfe", b"\xfe\xff")):
        return "text"
    if head.translate(None, _NOT_TEXT) != head:
        return "unknown data"
    try:
        # A character may be cut at the end of the head.
        text = head.decode("utf-8-sig", errors="ignore" if len(head) >= HEAD_BYTES else "strict")
    except UnicodeDecodeError:
        return "unknown data"
    start = text.lstrip().lower()
    if "<svg" in start and start.startswith("<"):
        return "SVG"
    if start.startswith(("<!doctype html", "<html")):
        return "HTML"
    return "XML" if start.startswith("<?xml") else "text"


def size_in_header(kind: str, head: bytes) -> tuple[int, int] | None:
    """The (width, height) that a PNG, GIF or WebP file claims; None for other kinds and where its header is broken.

    Read by hand because Pillow's readers do more before they can be asked: the one for WebP allocates the canvas.
    """
    if len(head) < 30:
        return None
    if kind == "PNG" and head[12:16] == b"IHDR":
        width, height = struct.unpack(">II", head[16:24])
        return width, height
    if kind == "GIF":
        width, height = struct.unpack("<HH", head[6:10])
        return width, height
    return _webp_size(head) if kind == "WebP" else None


def _webp_size(head: bytes) -> tuple[int, int] | None:
    chunk = head[12:16]
    if chunk == b"VP8X":
        canvas = (int.from_bytes(head[i : i + 3], "little") for i in (24, 27))
        return next(canvas) + 1, next(canvas) + 1
    if chunk == b"VP8L":
        bits = int.from_bytes(head[21:25], "little")
        return (bits & 0x3FFF) + 1, (bits >> 14 & 0x3FFF) + 1
    if chunk == b"VP8 ":
        width, height = struct.unpack("<HH", head[26:30])
        return width & 0x3FFF, height & 0x3FFF
    return None


def is_cut_off(kind: str, stream: BinaryIO) -> bool:
    """Whether a file that did not decode lacks its end.

    Asked only about files that failed: some writers leave the end mark out, and decoders are content.
    """
    size = stream.seek(0, os.SEEK_END)
    stream.seek(max(0, size - TAIL_BYTES))
    tail = stream.read().rstrip(b"\0")
    stream.seek(0)
    head = stream.read(HEAD_BYTES)
    if kind == "JPEG":
        return not tail.endswith(b"\xff\xd9")
    if kind == "PNG":
        return b"IEND" not in tail
    if kind == "GIF":
        return not tail.endswith(b";")
    if kind == "WebP":
        return size < 8 + int.from_bytes(head[4:8], "little")
    if kind == "BMP":
        return size < int.from_bytes(head[2:6], "little")
    if kind == "TIFF":
        return _is_tiff_cut_off(stream, size)
    return kind == "AVIF" and _is_avif_cut_off(stream, size)


# Bytes of a TIFF field's element, by its type number.
_TIFF_TYPES = dict(enumerate((1, 1, 2, 4, 8, 1, 1, 2, 4, 8, 4, 8, 4), start=1)) | {
    16: 8,
    17: 8,
    18: 8,
}


def _is_tiff_cut_off(stream: BinaryIO, size: int) -> bool:
    """Whether the first directory, or a field that it points to, lies beyond the end; it often comes last."""
    head = _read(stream, 0, 16)
    order = "<" if head.startswith(b"II") else ">"
    is_big = b"+" in head[2:4]
    word, number, field = ("Q", "Q", "HHQQ") if is_big else ("I", "H", "HHII")
    try:
        (start,) = struct.unpack_from(order + word, head, 8 if is_big else 4)
        (count,) = struct.unpack(order + number, _read(stream, start, struct.calcsize(number)))
        start += struct.calcsize(order + number)
        length = count * struct.calcsize(order + field)
        if start + length > size:
            return True
        fields = list(struct.iter_unpack(order + field, _read(stream, start, length)))
    except (struct.error, OverflowError):  # the file ends inside a number, or one points to nowhere
        return True
    inline = struct.calcsize(word)
    return any(
        _TIFF_TYPES.get(kind, 0) * elements > inline
        and offset + _TIFF_TYPES[kind] * elements > size
        for _, kind, elements, offset in fields
    )


def _is_avif_cut_off(stream: BinaryIO, size: int) -> bool:
    """Walks the top boxes: the last one must end inside the file, and the one with the pixels must be there."""
    position, names = 0, set()
    while position + 8 <= size:
        length, name = struct.unpack(">I4s", _read(stream, position, 8))
        if length < 8:  # "to the end of the file", or a 64-bit length: not worth guessing
            return False
        names.add(name)
        position += length
    return position > size or b"mdat" not in names


def _read(stream: BinaryIO, start: int, length: int) -> bytes:
    stream.seek(start)
    return stream.read(length)
