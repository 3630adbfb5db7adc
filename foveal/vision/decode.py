"""Files, bytes, PIL images and arrays into pictures.

Two modes. "display" shows what a viewer shows: EXIF rotation applied, transparency on a background, 16-bit samples
scaled. "vendor" is what the official loader does, `Image.open(...).convert("RGB")` and nothing else: alpha is dropped
(whatever colour was under it appears), orientation is ignored, 16-bit grey saturates.

The type is told from the bytes. Limits are checked on the header, before pixels are decoded. Messages are ours: those
of the decoder can hold addresses and paths. Pillow's warnings never leave this module.
"""

from __future__ import annotations

import os
import re
import stat
import struct
import threading
import warnings
import zlib
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from io import BytesIO
from pathlib import Path
from typing import Any, BinaryIO, Literal, TypeAlias, get_args

import numpy as np
import numpy.typing as npt
from PIL import Image, features

from foveal.errors import MediaError, ResourceError
from foveal.types import Picture
from foveal.vision.filetypes import (
    HEAD_BYTES,
    PILLOW_NAMES,
    is_cut_off,
    size_in_header,
    sniff,
)

PictureMode: TypeAlias = Literal["display", "vendor"]
PictureSource: TypeAlias = (
    str | os.PathLike[str] | bytes | bytearray | memoryview | Image.Image | npt.NDArray[np.generic]
)
Colour: TypeAlias = tuple[int, int, int]

# Where Pillow too refuses. Decoded to RGB this is 537 MB; a camera of 100 megapixels stays below it.
MAX_PIXELS = 178_956_970
# An uncompressed 16-bit RGB picture of 44 megapixels; a larger file is no photo, or was not scaled for this use.
MAX_FILE_BYTES = 256 * 2**20
WHITE: Colour = (255, 255, 255)

# What Pillow's readers raise on files that are broken in one way or another.
_BROKEN = (
    OSError,
    SyntaxError,
    ValueError,
    TypeError,
    AttributeError,
    LookupError,
    ArithmeticError,
    AssertionError,
    EOFError,
    RuntimeError,
    struct.error,
    zlib.error,
)
_ORIENTATION = 0x0112  # EXIF tag
_TURNS = {
    2: Image.Transpose.FLIP_LEFT_RIGHT,
    3: Image.Transpose.ROTATE_180,
    4: Image.Transpose.FLIP_TOP_BOTTOM,
    5: Image.Transpose.TRANSPOSE,
    6: Image.Transpose.ROTATE_270,
    7: Image.Transpose.TRANSVERSE,
    8: Image.Transpose.ROTATE_90,
}
# Warning filters belong to the process: two threads that change and restore them must not interleave.
_filters_lock = threading.Lock()


@dataclass(frozen=True, slots=True)
class _Options:
    """How to decode, and what the picture is called in messages."""

    name: str
    mode: PictureMode
    background: Colour
    max_pixels: int

    def error(self, problem: str) -> MediaError:
        return MediaError(f"{self.name} {problem}")


def load_picture(
    source: PictureSource,
    *,
    mode: PictureMode = "display",
    background: tuple[int, int, int] = WHITE,
    max_pixels: int = MAX_PIXELS,
    name: str | None = None,
) -> Picture:
    """Decode a picture.

    `source` is a path, the bytes of a file, a PIL image, or an array: uint8 or uint16, [height, width] or [height,
    width, channels] with 1, 3 or 4 channels (RGB order, straight alpha). `background` lies under transparent pixels in
    display mode. `name` is what messages call the picture (default: the file's name, else "picture"). Of several
    frames or pages the first is used, and a note says so.
    Raises MediaError, and ResourceError where memory does not suffice.
    """
    if mode not in get_args(PictureMode):
        raise MediaError(f"picture mode {mode!r} is unknown; choose 'display' or 'vendor'")
    if not isinstance(max_pixels, int) or not 1 <= max_pixels <= MAX_PIXELS:
        raise MediaError(f"max_pixels={max_pixels!r} must be between 1 and {MAX_PIXELS}")
    label = _label(source) if name is None else name
    options = _Options(label, mode, _check_background(background), max_pixels)
    try:
        return _load(source, options)
    except MemoryError:
        raise ResourceError(
            f"{options.name} needs more memory to decode than is free; scale it down or close other programs"
        ) from None


def _load(source: PictureSource, options: _Options) -> Picture:
    if isinstance(source, str | os.PathLike):
        return _load_path(source, options)
    if isinstance(source, bytes | bytearray | memoryview):
        return _load_stream(BytesIO(source), options)
    if isinstance(source, Image.Image):
        return _load_image(source, options)
    if isinstance(source, np.ndarray):
        return _load_array(source, options)
    raise MediaError(
        f"{options.name} is a {type(source).__name__}; give a path, the bytes of a picture file, a PIL image or a "
        "numpy array"
    )


def supported_types() -> tuple[str, ...]:
    """The formats that this machine's Pillow reads, of those that are taken at all."""
    optional = {"WebP": "webp", "AVIF": "avif", "JPEG": "jpg"}
    return tuple(
        kind for kind in PILLOW_NAMES if kind not in optional or features.check(optional[kind])
    )


def _check_background(background: object) -> Colour:
    if isinstance(background, tuple | list) and len(background) == 3:
        values = [x for x in background if isinstance(x, int | np.integer) and 0 <= x <= 255]
        if len(values) == 3:
            red, green, blue = (int(x) for x in values)
            return (red, green, blue)
    raise MediaError(
        f"background={background!r} is not a colour; give three numbers from 0 to 255, as in (255, 255, 255)"
    )


def _label(source: PictureSource) -> str:
    if isinstance(source, str | os.PathLike):
        path = os.fspath(source)
        return _short(Path(path).name or path)
    return "picture"


def _short(text: str, limit: int = 80) -> str:
    """`text` fit for one line of a message: a path can be a data URL by mistake."""
    text = "".join(c if c.isprintable() else "?" for c in text)
    return text if len(text) <= limit else text[: limit - 3] + "..."


# --- files --------------------------------------------------------------------------------------


def _load_path(path: str | os.PathLike[str], options: _Options) -> Picture:
    text = os.fspath(path)
    if text[:8].lower().startswith(("http://", "https://", "data:")):
        raise MediaError(
            f"{_short(text, 40)} is a link, and links are not fetched; give a path or the picture's bytes"
        )
    try:
        # The file is asked what it is before it is opened: opening a pipe waits for its writer.
        kind = os.stat(text).st_mode
        if not stat.S_ISREG(kind):
            what = "a folder" if stat.S_ISDIR(kind) else "not a regular file"
            raise options.error(f"is {what}; give the path of a picture file")
        with open(text, "rb") as stream:
            return _load_stream(stream, options)
    except FileNotFoundError:
        raise options.error("does not exist; check the path") from None
    except (OSError, ValueError) as error:  # ValueError: a NUL in the path
        reason = getattr(error, "strerror", None) or "the path is not valid"
        raise options.error(f"cannot be read: {reason}") from None


def _load_stream(stream: BinaryIO, options: _Options) -> Picture:
    size = stream.seek(0, os.SEEK_END)
    if size == 0:
        raise options.error("is empty (0 bytes); save or download it again")
    if size > MAX_FILE_BYTES:
        raise options.error(
            f"has {size / 2**20:.0f} MiB, and the limit is {MAX_FILE_BYTES // 2**20} MiB; scale it down or save it "
            "as JPEG or PNG"
        )
    stream.seek(0)
    head = stream.read(HEAD_BYTES)
    stream.seek(0)
    kind = sniff(head)
    if kind not in supported_types():
        taken = ", ".join(supported_types())
        raise options.error(f"holds {kind}, which is not taken; convert it to one of {taken}")
    claimed = size_in_header(kind, head)
    if claimed is not None:
        _check_size(claimed, options)
    with _quiet_pillow():
        try:
            with Image.open(stream, formats=[PILLOW_NAMES[kind]]) as image:
                return _convert(image, options, kind)
        except Image.DecompressionBombError as error:
            raise _too_large(error, options) from None
        except _BROKEN as error:
            if "truncated" in str(error).lower() or is_cut_off(kind, stream):
                problem = f"is truncated: the {kind} data ends too early"
            else:
                problem = f"is damaged: it starts as {kind} but does not decode"
            raise options.error(f"{problem}; save or download it again") from None


@contextmanager
def _quiet_pillow() -> Iterator[None]:
    """Pillow warns about large pictures, odd metadata and palettes; none of it is news to a user."""
    with _filters_lock, warnings.catch_warnings():
        warnings.simplefilter("ignore")
        yield


# --- images and arrays --------------------------------------------------------------------------


def _load_image(image: Image.Image, options: _Options) -> Picture:
    with _quiet_pillow():
        try:
            return _convert(image, options, image.format or "")
        except Image.DecompressionBombError as error:
            raise _too_large(error, options) from None
        except _BROKEN as error:
            state = "truncated" if "truncated" in str(error).lower() else "damaged or closed"
            raise options.error(
                f"is {state}: its pixels cannot be read; open its file again"
            ) from None


def _load_array(array: npt.NDArray[Any], options: _Options) -> Picture:
    if array.ndim == 3 and array.shape[2] == 1:
        array = array[:, :, 0]
    if array.ndim not in (2, 3) or (array.ndim == 3 and array.shape[2] not in (3, 4)):
        raise options.error(
            f"has shape {list(array.shape)}; an array must be [height, width], or [height, width, channels] with 1, 3 "
            "or 4 channels: move the channels to the end"
        )
    _check_size((array.shape[1], array.shape[0]), options)
    if array.dtype == np.uint16:
        # Pillow has 16-bit grey only; colour is scaled as its own readers scale it.
        array = array if array.ndim == 2 else (array >> 8).astype(np.uint8)
    elif array.dtype != np.uint8:
        raise options.error(
            f"has dtype {array.dtype}; samples must be uint8 or uint16: for floats from 0 to 1 pass "
            "(array * 255).round().astype(numpy.uint8)"
        )
    return _load_image(Image.fromarray(np.ascontiguousarray(array)), options)


def _convert(image: Image.Image, options: _Options, kind: str) -> Picture:
    """Decode the pixels of an opened image; Pillow's errors are the caller's to translate."""
    _check_size(image.size, options)
    image.load()
    notes: tuple[str, ...] = ()
    try:
        if options.mode == "vendor":
            rgb = image.convert("RGB")
        else:
            eight_bits, notes = _to_eight_bits(image)
            rgb = _turned(_flatten(eight_bits, options.background), _orientation(image))
    except ValueError:
        raise options.error(
            f"has pixels of kind {image.mode!r}, which do not convert to RGB; save it as an RGB picture"
        ) from None
    # Looking for more frames comes last: it may leave the image at another one.
    notes = _frame_notes(image, kind) + notes
    return Picture(np.asarray(rgb), options.name, notes)


def _too_large(error: Image.DecompressionBombError, options: _Options) -> MediaError:
    count = re.search(r"\d+", str(error))
    return options.error(
        f"has {count[0] if count else 'too many'} pixels, and the limit is {options.max_pixels}; scale it down"
    )


def _check_size(size: tuple[int, int], options: _Options) -> None:
    width, height = size
    if width < 1 or height < 1:
        raise options.error(f"is empty: {width} x {height} pixels")
    if width * height > options.max_pixels:
        raise options.error(
            f"has {width} x {height} = {width * height} pixels, and the limit is {options.max_pixels}; scale it down"
        )


def _frame_notes(image: Image.Image, kind: str) -> tuple[str, ...]:
    # Phones keep a gain map or a preview as a second "frame" of a JPEG: no reader would call those frames.
    if kind in ("JPEG", "MPO"):
        return ()
    try:
        count = int(getattr(image, "n_frames", 1))
    except _BROKEN:  # later frames are broken; the first may be whole
        return ()
    unit = "pages" if kind == "TIFF" else "frames"
    return (f"{count} {unit}, 1 used",) if count > 1 else ()


def _orientation(image: Image.Image) -> int:
    """The EXIF orientation, 1 to 8; 1 where there is none or it cannot be read."""
    try:
        value = image.getexif().get(_ORIENTATION, 1)
    except _BROKEN:
        return 1
    return value if isinstance(value, int) else 1


def _turned(rgb: Image.Image, orientation: int) -> Image.Image:
    turn = _TURNS.get(orientation)
    return rgb if turn is None else rgb.transpose(turn)


def _flatten(image: Image.Image, background: Colour) -> Image.Image:
    """RGB, with what is transparent showing `background`."""
    has_alpha = image.mode in ("RGBA", "LA", "PA", "RGBa", "La")
    if not has_alpha and "transparency" not in image.info:
        return image.convert("RGB")
    rgba = image.convert("LA").convert("RGBA") if image.mode == "La" else image.convert("RGBA")
    canvas = Image.new("RGB", image.size, background)
    canvas.paste(rgba, mask=rgba.getchannel("A"))
    return canvas


# --- deep samples -------------------------------------------------------------------------------


def _to_eight_bits(image: Image.Image) -> tuple[Image.Image, tuple[str, ...]]:
    """Grey of 16 bits and more scaled to 8 (Pillow's own conversion clips), and what there is to say about it.

    16-bit colour comes from Pillow scaled already, by taking the high byte; grey is scaled in the same way. 32-bit
    integers and floats have no fixed white: 65535 and 1 where all samples fit, else the largest sample.
    """
    if image.mode == "RGB":
        return _with_byte_transparency(image), ()
    if image.mode not in ("I", "F") and not image.mode.startswith("I;16"):
        return image, ()
    samples = np.asarray(image)
    if image.mode == "F":
        samples = np.nan_to_num(samples, nan=0.0, posinf=0.0, neginf=0.0)
    low, high = float(samples.min()), float(samples.max())
    if image.mode == "F" and low >= 0 and high <= 1:
        return _as_grey(image, np.rint(samples * 255)), ()
    if image.mode != "F" and low >= 0 and high <= 65535:
        return _as_grey(image, samples >> 8), ()
    scale = 255 / ((high - low) or 1.0)
    stretched = (samples.astype(np.float64) - low) * scale
    note = f"samples from {low:g} to {high:g} were stretched to 0..255"
    return _as_grey(image, stretched), (note,)


def _as_grey(image: Image.Image, values: npt.NDArray[Any]) -> Image.Image:
    """`values` (0..255) as the grey picture that `image` is, its one transparent value made alpha."""
    grey = Image.fromarray(values.astype(np.uint8))
    transparent = image.info.get("transparency")
    if not isinstance(transparent, int):
        return grey
    alpha = np.where(np.asarray(image) == transparent, 0, 255).astype(np.uint8)
    return Image.merge("LA", (grey, Image.fromarray(alpha)))


def _with_byte_transparency(image: Image.Image) -> Image.Image:
    """The transparent colour of a 16-bit PNG is given in 16 bits; its pixels have kept their high bytes only."""
    colour = image.info.get("transparency")
    if not isinstance(colour, tuple) or max(colour) <= 255:
        return image
    image = image.copy()
    image.info["transparency"] = tuple(value >> 8 for value in colour)
    return image
