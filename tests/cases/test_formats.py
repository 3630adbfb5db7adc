"""Rows of the case log about picture files, as far as they concern the library."""

from __future__ import annotations

import re
import struct
import subprocess
import sys
import textwrap
import zlib
from pathlib import Path

import numpy as np
import numpy.typing as npt
import pytest
from PIL import Image

from foveal.errors import MediaError
from foveal.types import Picture
from foveal.vision.decode import load_picture, supported_types
from foveal.vision.vl2 import grid_for, num_image_tokens
from tests.vision.pictures import VL2, encoded, noise, png, png_chunk, smooth

RED = (255, 0, 0)


def tokens(picture: Picture) -> int:
    grid = grid_for(picture.width, picture.height, VL2, tiled=True)
    return num_image_tokens(*grid, VL2.tokens_per_side)


# --- orientation --------------------------------------------------------------------------------

# What each EXIF orientation asks for, as operations on rows and columns of an array.
UPRIGHT = {
    1: lambda a: a,
    2: lambda a: a[:, ::-1],
    3: lambda a: a[::-1, ::-1],
    4: lambda a: a[::-1],
    5: lambda a: a.transpose(1, 0, 2),
    6: lambda a: a.transpose(1, 0, 2)[:, ::-1],
    7: lambda a: a.transpose(1, 0, 2)[::-1, ::-1],
    8: lambda a: a.transpose(1, 0, 2)[::-1],
}


def with_orientation(image: Image.Image, kind: str, orientation: int) -> bytes:
    exif = Image.Exif()
    exif[0x0112] = orientation
    options = {"WEBP": {"lossless": True}, "AVIF": {"quality": 100}}.get(kind, {})
    return encoded(image, kind, exif=exif, **options)


def phone_photo() -> bytes:
    """640x480, stored sideways: a red bar at the left, a green one at the bottom."""
    pixels = np.zeros((480, 640, 3), dtype=np.uint8)
    pixels[-60:] = (0, 255, 0)
    pixels[:, :60] = RED
    return with_orientation(Image.fromarray(pixels), "JPEG", 6)


@pytest.mark.parametrize("way", ["path", "str", "bytes", "bytearray", "PIL"])
def test_C050_orientation_is_applied_on_every_path(way: str, tmp_path: Path) -> None:
    data = phone_photo()
    file = tmp_path / "photo.jpg"
    file.write_bytes(data)
    sources = {"path": file, "str": str(file), "bytes": data, "bytearray": bytearray(data)}
    if way == "PIL":
        with Image.open(file) as image:
            picture = load_picture(image)
    else:
        picture = load_picture(sources[way])
    assert (picture.width, picture.height) == (480, 640)
    assert np.abs(picture.rgb[10, 240].astype(int) - RED).max() < 20, "red is on top"
    assert np.abs(picture.rgb[320, 10].astype(int) - (0, 255, 0)).max() < 20, "green is at the left"
    assert tokens(picture) == 1023


@pytest.mark.parametrize("orientation", range(1, 9))
@pytest.mark.parametrize("kind", ["PNG", "WEBP", "TIFF"])
def test_C050_each_orientation_gives_the_upright_picture(kind: str, orientation: int) -> None:
    pixels = noise(7, 5)
    picture = load_picture(with_orientation(Image.fromarray(pixels), kind, orientation))
    np.testing.assert_array_equal(picture.rgb, UPRIGHT[orientation](pixels))


@pytest.mark.parametrize("orientation", range(1, 9))
@pytest.mark.parametrize("kind", ["JPEG", "AVIF"])
def test_C050_each_orientation_in_lossy_formats(kind: str, orientation: int) -> None:
    if kind not in supported_types():
        pytest.skip(f"this Pillow has no {kind}")
    pixels = smooth(64, 48)
    picture = load_picture(with_orientation(Image.fromarray(pixels), kind, orientation))
    expected = UPRIGHT[orientation](pixels)
    assert picture.rgb.shape == expected.shape
    assert np.abs(picture.rgb.astype(int) - expected).max() <= 16


@pytest.mark.parametrize(
    "exif", [b"Exif\0\0garbage", b"", b"Exif\0\0MM\0*\0\0\0\xff", b"II*\0" + b"\xff" * 40]
)
def test_C050_broken_exif_is_no_orientation(exif: bytes) -> None:
    pixels = smooth(64, 48)
    assert load_picture(encoded(Image.fromarray(pixels), "JPEG", exif=exif)).rgb.shape == (
        48,
        64,
        3,
    )


def test_C050_vendor_mode_ignores_orientation() -> None:
    picture = load_picture(phone_photo(), mode="vendor")
    assert (picture.width, picture.height) == (640, 480)


# --- transparency -------------------------------------------------------------------------------


def letters_on_noise() -> npt.NDArray[np.uint8]:
    """272x92 RGBA: black bars opaque, random colours where nothing should be seen, half-transparent between them."""
    rgba = noise(272, 92, 4, seed=52)
    rgba[:, :, 3] = 0
    rgba[20:70, 30:60] = (0, 0, 0, 255)
    rgba[20:70, 100:130] = (0, 0, 0, 128)
    return rgba


@pytest.mark.parametrize("kind", ["PNG", "WEBP", "TIFF"])
def test_C052_transparent_pixels_show_white(kind: str) -> None:
    rgba = letters_on_noise()
    options = {"lossless": True, "exact": True} if kind == "WEBP" else {}
    rgb = load_picture(encoded(Image.fromarray(rgba), kind, **options)).rgb
    assert (rgb[20:70, 30:60] == 0).all()
    assert (rgb[20:70, 100:130] == 127).all(), "half black on white"
    hidden = rgba[:, :, 3] == 0
    assert (rgb[hidden] == 255).all()


def test_C052_vendor_mode_drops_alpha() -> None:
    rgba = letters_on_noise()
    picture = load_picture(encoded(Image.fromarray(rgba), "PNG"), mode="vendor")
    np.testing.assert_array_equal(picture.rgb, rgba[:, :, :3])


def test_C053_background_can_be_chosen() -> None:
    rgba = letters_on_noise()
    rgb = load_picture(encoded(Image.fromarray(rgba), "PNG"), background=(0, 0, 0)).rgb
    assert not rgb.any()
    rgb = load_picture(Image.fromarray(rgba), background=(10, 20, 30)).rgb
    assert (rgb[rgba[:, :, 3] == 0] == (10, 20, 30)).all()


@pytest.mark.parametrize(
    "background", [[300, 0], (300, 0, 0), (-1, 0, 0), "white", None, (0, 0), (0.5, 0, 0)]
)
def test_C053_a_wrong_background_is_named(background: object) -> None:
    with pytest.raises(MediaError, match=r"background=.* is not a colour.*0 to 255"):
        load_picture(noise(4, 4), background=background)  # type: ignore[arg-type]


def palette_png(width: int = 600, height: int = 400) -> bytes:
    """Left third entry 0 (opaque red), middle entry 1 (transparent, green underneath), right entry 2 (half blue)."""
    index = (np.arange(width) * 3 // width).astype(np.uint8)
    pixels = np.broadcast_to(index, (height, width)).tobytes()
    palette = png_chunk(b"PLTE", bytes([255, 0, 0, 0, 255, 0, 0, 0, 255]))
    return png(
        width,
        height,
        depth=8,
        colour_type=3,
        pixels=pixels,
        extra=palette + png_chunk(b"tRNS", bytes([255, 0, 128])),
    )


def test_C054_transparent_palette_entries_turn_white() -> None:
    picture = load_picture(palette_png())
    assert picture.rgb[0, [0, 300, 599]].tolist() == [[255, 0, 0], [255, 255, 255], [127, 127, 255]]
    assert tokens(picture) == tokens(load_picture(noise(600, 400)))


def test_C054_palette_bytes_do_not_warn_in_vendor_mode() -> None:
    picture = load_picture(palette_png(), mode="vendor")
    assert picture.rgb[0, [0, 300, 599]].tolist() == [[255, 0, 0], [0, 255, 0], [0, 0, 255]]


@pytest.mark.parametrize("kind", ["1", "L", "LA", "P", "PA", "RGBA", "RGB"])
@pytest.mark.parametrize("file", [True, False], ids=["file", "PIL"])
def test_C054_every_small_mode_becomes_rgb(kind: str, file: bool) -> None:
    grey = Image.fromarray(
        np.where(np.arange(600) < 300, 0, 255).astype(np.uint8)[None].repeat(400, 0)
    )
    image = grey.convert("P").convert("PA") if kind == "PA" else grey.convert(kind)
    picture = load_picture(encoded(image, "PNG") if file and kind != "PA" else image)
    assert picture.rgb.shape == (400, 600, 3)
    assert picture.rgb.dtype == np.uint8
    assert (picture.rgb[:, :300] == 0).all()
    assert (picture.rgb[:, 300:] == 255).all()
    assert tokens(picture) == 1023


@pytest.mark.parametrize(("kind", "value"), [("1", 0), ("L", 7), ("RGB", (1, 2, 3)), ("P", 1)])
def test_C054_one_transparent_colour_turns_white(kind: str, value: object) -> None:
    image = Image.new(kind, (4, 4), 1 if kind in "1P" else (9 if kind == "L" else (9, 9, 9)))
    if kind == "P":
        image.putpalette([0, 0, 0, 10, 20, 30])
        image.putpixel((0, 0), 0)
        expected = [0, 0, 0]
    else:
        image.putpixel((0, 0), value)  # type: ignore[arg-type]
        expected = None
    picture = load_picture(encoded(image, "PNG", transparency=value))
    if expected is None:
        assert picture.rgb[0, 0].tolist() == [255, 255, 255]
        assert picture.rgb[1, 1].tolist() == ([255] * 3 if kind == "1" else [9] * 3)
    else:
        assert picture.rgb[0, 0].tolist() == expected
        assert picture.rgb[1, 1].tolist() == [255, 255, 255]


# --- deep samples -------------------------------------------------------------------------------

RAMP = np.linspace(0, 65535, 256).round().astype(">u2")  # k * 257


def deep_png(colour_type: int, channels: list[npt.NDArray[np.uint16]], extra: bytes = b"") -> bytes:
    pixels = np.stack(channels, axis=-1).astype(">u2").tobytes()
    return png(256, 1, depth=16, colour_type=colour_type, pixels=pixels, extra=extra)


def test_C055_16_bit_grey_is_scaled() -> None:
    picture = load_picture(deep_png(0, [RAMP]))
    np.testing.assert_array_equal(picture.rgb[0], np.arange(256)[:, None].repeat(3, 1))


def test_C055_vendor_mode_saturates_16_bit_grey() -> None:
    rgb = load_picture(deep_png(0, [RAMP]), mode="vendor").rgb
    assert (rgb[0, 1:] == 255).all()


def test_C055_16_bit_colour_and_alpha_are_scaled() -> None:
    full = np.full_like(RAMP, 65535)
    up, down = np.arange(256), np.arange(256)[::-1]
    rgb = load_picture(deep_png(2, [RAMP, RAMP[::-1], full])).rgb[0]
    np.testing.assert_array_equal(rgb, np.stack([up, down, up * 0 + 255], -1))
    rgb = load_picture(deep_png(6, [RAMP, RAMP, RAMP, full])).rgb[0]
    np.testing.assert_array_equal(rgb, up[:, None].repeat(3, 1))
    rgb = load_picture(deep_png(4, [full * 0, RAMP])).rgb[0]
    np.testing.assert_array_equal(rgb, down[:, None].repeat(3, 1))


@pytest.mark.parametrize("value", [0x1234, 0x00FE, 0])
def test_C055_transparent_values_of_16_bit_files_turn_white(value: int) -> None:
    samples = np.full(256, 0x5678, dtype=">u2")
    samples[3] = value
    grey = load_picture(deep_png(0, [samples], png_chunk(b"tRNS", struct.pack(">H", value)))).rgb[0]
    assert grey[3].tolist() == [255] * 3
    assert (np.delete(grey, 3, axis=0) == 0x56).all()
    if value >> 8 or not value:
        rgb = load_picture(
            deep_png(2, [samples] * 3, png_chunk(b"tRNS", struct.pack(">HHH", *[value] * 3)))
        ).rgb[0]
        assert rgb[3].tolist() == [255] * 3
        assert (np.delete(rgb, 3, axis=0) == 0x56).all()


@pytest.mark.parametrize("dtype", ["<u2", ">u2", "<i4"])
@pytest.mark.parametrize("way", ["PIL", "TIFF"])
def test_C055_16_bit_modes_of_pillow_are_scaled(dtype: str, way: str) -> None:
    image = Image.fromarray(RAMP.astype(dtype)[None])
    source = encoded(image, "TIFF") if way == "TIFF" else image
    picture = load_picture(source)
    np.testing.assert_array_equal(picture.rgb[0, :, 0], np.arange(256))
    assert picture.notes == ()


def test_C055_floats_and_wide_integers_are_stretched_with_a_note() -> None:
    unit = np.linspace(0, 1, 256, dtype=np.float32)[None]
    picture = load_picture(encoded(Image.fromarray(unit), "TIFF"))
    np.testing.assert_array_equal(picture.rgb[0, :, 0], np.arange(256))
    assert picture.notes == ()
    for values in (unit * 20 - 10, (unit * 1e9).astype(np.int32)):
        picture = load_picture(encoded(Image.fromarray(values), "TIFF"))
        assert np.abs(picture.rgb[0, :, 0] - np.arange(256)).max() <= 1
        assert "stretched to 0..255" in picture.notes[0]
    odd = np.array([[np.nan, np.inf, 0.5, 1.0]], dtype=np.float32)
    assert load_picture(Image.fromarray(odd)).rgb[0, :, 0].tolist() == [0, 0, 128, 255]


# --- formats ------------------------------------------------------------------------------------


@pytest.mark.parametrize("alpha", [False, True])
@pytest.mark.parametrize("lossless", [False, True])
def test_C056_webp_is_read_whatever_its_label(lossless: bool, alpha: bool, tmp_path: Path) -> None:
    pixels = smooth(1024, 1024)
    image = Image.fromarray(pixels)
    if alpha:
        image.putalpha(255)
    data = encoded(image, "WEBP", lossless=lossless, quality=90, method=0)
    file = tmp_path / "screenshot.png"
    file.write_bytes(data)
    for source in (data, file):
        picture = load_picture(source)
        assert (picture.width, picture.height) == (1024, 1024)
        assert np.abs(picture.rgb.astype(int) - pixels).max() <= (0 if lossless else 16)


def frames(kind: str, **options: object) -> bytes:
    first, second = Image.new("RGB", (20, 10), RED), Image.new("RGB", (20, 10), (0, 0, 255))
    if kind == "GIF":
        first, second = first.convert("P"), second.convert("P")
    return encoded(first, kind, save_all=True, append_images=[second], **options)


@pytest.mark.parametrize("kind", ["GIF", "WEBP", "PNG", "AVIF"])
def test_C057_the_first_frame_is_used_and_said(kind: str) -> None:
    if kind == "AVIF" and kind not in supported_types():
        pytest.skip("this Pillow has no AVIF")
    picture = load_picture(frames(kind, **({"lossless": True} if kind == "WEBP" else {})))
    assert np.abs(picture.rgb.astype(int) - RED).max() <= 3
    assert picture.notes == ("2 frames, 1 used",)
    assert load_picture(noise(3, 3)).notes == ()


def test_C057_a_broken_later_frame_does_not_matter() -> None:
    data = frames("GIF")
    picture = load_picture(data[: len(data) - 12])
    assert (picture.rgb == RED).all()


@pytest.mark.parametrize("has_marker", [True, False])
def test_C058_cmyk_jpeg_keeps_its_colour(has_marker: bool) -> None:
    data = encoded(Image.new("CMYK", (256, 256), (0, 255, 255, 0)), "JPEG", quality=95)
    start = data.index(b"\xff\xee")
    assert data[start + 4 : start + 9] == b"Adobe"
    if not has_marker:
        length = int.from_bytes(data[start + 2 : start + 4], "big")
        data = data[:start] + data[start + 2 + length :]
    for mode in ("display", "vendor"):
        picture = load_picture(data, mode=mode)  # type: ignore[arg-type]
        assert np.abs(picture.rgb.astype(int) - RED).max() <= 6


def test_C058_cmyk_tiff_keeps_its_colour() -> None:
    picture = load_picture(encoded(Image.new("CMYK", (8, 8), (0, 255, 255, 0)), "TIFF"))
    assert (picture.rgb == RED).all()


@pytest.mark.parametrize(
    ("case", "size", "expected"),
    [
        ("C059", (257, 27), 421),
        ("C060", (1, 1), 421),
        ("C061", (4, 10000), 2101),
        ("C061", (10000, 4), 1989),
        ("C061", (1, 10000), 421),
        ("C061", (10000, 1), 421),
        ("C062", (3600, 400), 1989),
        ("C062", (400, 3600), 2101),
    ],
)
def test_C059_C060_C061_C062_odd_sizes_are_read_from_files(
    case: str, size: tuple[int, int], expected: int
) -> None:
    picture = load_picture(encoded(Image.new("RGB", size, "white"), "PNG"))
    assert (picture.width, picture.height) == size
    assert tokens(picture) == expected


def test_C063_a_truncated_jpeg_is_called_truncated() -> None:
    data = encoded(Image.fromarray(noise(256, 256)), "JPEG")
    with pytest.raises(MediaError, match=r"^image 1 is truncated"):
        load_picture(data[:-2000], name="image 1")


TAKEN = {
    "JPEG": {},
    "PNG": {},
    "WebP": {"lossless": True},
    "GIF": {},
    "BMP": {},
    "TIFF": {"compression": "tiff_lzw"},
    "AVIF": {},
}


@pytest.mark.parametrize("kind", TAKEN)
@pytest.mark.parametrize("mode", ["display", "vendor"])
def test_C063_a_cut_file_is_truncated_or_whole_but_never_half_a_picture(
    kind: str, mode: str
) -> None:
    if kind not in supported_types():
        pytest.skip(f"this Pillow has no {kind}")
    data = encoded(Image.fromarray(noise(48, 32)), kind, **TAKEN[kind])
    whole = load_picture(data).rgb
    ends = {*range(16, len(data), max(1, len(data) // 24)), *(len(data) - k for k in range(1, 30))}
    messages = set()
    for end in ends:
        try:
            rgb = load_picture(data[:end], mode=mode).rgb  # type: ignore[arg-type]
        except MediaError as error:
            messages.add(str(error))
        else:
            np.testing.assert_array_equal(rgb, whole, err_msg=f"cut at {end} of {len(data)}")
    assert messages == {
        f"picture is truncated: the {kind} data ends too early; save or download it again"
    }


@pytest.mark.parametrize("kind", TAKEN)
def test_C064_taken_types_decode(kind: str) -> None:
    if kind not in supported_types():
        pytest.skip(f"this Pillow has no {kind}")
    picture = load_picture(encoded(Image.new("RGB", (8, 8), RED), kind, **TAKEN[kind]))
    assert np.abs(picture.rgb.astype(int) - RED).max() <= 3


def test_C064_the_first_page_is_used_and_said() -> None:
    picture = load_picture(frames("TIFF"))
    assert (picture.rgb == RED).all()
    assert picture.notes == ("2 pages, 1 used",)


FTYP_HEIC = struct.pack(">I4s4sI4s4s", 24, b"ftyp", b"heic", 0, b"mif1", b"heic")
NOT_TAKEN = {
    "HEIC": FTYP_HEIC + b"\0" * 100,
    "SVG": b'<?xml version="1.0"?>\n<svg xmlns="http://www.w3.org/2000/svg" width="8" height="8"/>',
    "PDF": b"%PDF-1.7\n%\xe2\xe3\xcf\xd3\n",
    "text": b"just words, whatever the name says\n",
    "HTML": b"<!DOCTYPE html><html><body>not found</body></html>",
    "JPEG XL": b"\xff\x0a" + b"\x12" * 20,
    "MP4 video": struct.pack(">I4s4sI", 16, b"ftyp", b"isom", 512) + b"\0" * 20,
    "ZIP": b"PK\x03\x04" + b"\0" * 30,
    "unknown data": bytes(range(200, 256)) * 4 + b"\0\1\2",
    "empty data": b"\0" * 64,
}


@pytest.mark.parametrize("kind", NOT_TAKEN)
def test_C064_other_types_are_named_with_the_types_taken(kind: str, tmp_path: Path) -> None:
    file = tmp_path / "picture.png"
    file.write_bytes(NOT_TAKEN[kind])
    with pytest.raises(MediaError) as caught:
        load_picture(file)
    taken = ", ".join(supported_types())
    assert (
        str(caught.value)
        == f"picture.png holds {kind}, which is not taken; convert it to one of {taken}"
    )
    assert "PNG" in taken


# --- guards -------------------------------------------------------------------------------------


def blank_png(width: int, height: int) -> bytes:
    """A valid one-colour picture with one bit a pixel: small as a file, huge once decoded."""
    packer = zlib.compressobj(9)
    row = b"\0" * (1 + (width + 7) // 8)
    data = b"".join(packer.compress(row) for _ in range(height)) + packer.flush()
    header = struct.pack(">IIBBBBB", width, height, 1, 0, 0, 0, 0)
    chunks = png_chunk(b"IHDR", header) + png_chunk(b"IDAT", data) + png_chunk(b"IEND", b"")
    return b"\x89PNG\r\n\x1a\n" + chunks


def test_C103_a_huge_canvas_is_refused_from_its_header(tmp_path: Path) -> None:
    data = blank_png(19000, 19000)
    assert len(data) < 100_000
    file = tmp_path / "huge.png"
    file.write_bytes(data)
    code = """
        import resource, sys
        from foveal.errors import MediaError
        from foveal.vision.decode import load_picture
        load_picture(b"GIF89a\\1\\0\\1\\0\\x80\\0\\0\\0\\0\\0\\xff\\xff\\xff,\\0\\0\\0\\0\\1\\0\\1\\0\\0\\2\\2D\\1\\0;")
        before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
        try:
            load_picture(sys.argv[1])
        except MediaError as error:
            print(error)
        grown = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before
        assert grown < 50 * 1024, f"{grown} KiB"
    """
    result = subprocess.run(
        [sys.executable, "-W", "error", "-c", textwrap.dedent(code), str(file)],
        capture_output=True,
        text=True,
        cwd=Path(__file__).resolve().parents[2],
        check=False,
    )
    assert result.returncode == 0, result.stderr
    assert re.match(r"huge\.png has .*361000000 pixels, and the limit is 178956970", result.stdout)


def huge_jpeg() -> bytes:
    data = encoded(Image.new("RGB", (8, 16)), "JPEG")
    assert data.count(struct.pack(">HH", 16, 8)) == 1
    return data.replace(struct.pack(">HH", 16, 8), struct.pack(">HH", 30000, 30000))


def huge_webp(chunk: bytes, body: bytes) -> bytes:
    data = b"WEBP" + chunk + struct.pack("<I", len(body)) + body
    return b"RIFF" + struct.pack("<I", len(data)) + data


@pytest.mark.parametrize(
    "data",
    [
        b"\x89PNG\r\n\x1a\n"
        + png_chunk(b"IHDR", struct.pack(">IIBBBBB", 30000, 30000, 8, 2, 0, 0, 0)),
        b"GIF89a" + struct.pack("<HHBBB", 30000, 30000, 0, 0, 0) + b"\0" * 20 + b";",
        b"BM"
        + struct.pack("<IIIIiiHHIIIIII", 54, 0, 54, 40, 30000, 30000, 1, 24, 0, 0, 0, 0, 0, 0),
        huge_jpeg(),
        huge_webp(b"VP8X", b"\0\0\0\0" + (15999).to_bytes(3, "little") * 2),
        huge_webp(b"VP8L", b"\x2f" + (15999 | 15999 << 14).to_bytes(4, "little") + b"\0" * 5),
        huge_webp(b"VP8 ", b"\0\0\0\x9d\1\x2a" + struct.pack("<HH", 16000, 16000) + b"\0" * 4),
    ],
    ids=["PNG", "GIF", "BMP", "JPEG", "WebP extended", "WebP lossless", "WebP lossy"],
)
def test_C103_every_format_is_guarded(data: bytes) -> None:
    with pytest.raises(
        MediaError, match=r"has .*\d+ pixels, and the limit is 178956970; scale it down"
    ):
        load_picture(data)


def test_C103_a_long_side_is_not_a_fault_in_the_library() -> None:
    assert load_picture(blank_png(8193, 10)).width == 8193


def test_C103_large_pictures_below_the_limit_do_not_warn() -> None:
    # Pillow warns from half the limit on; the filters of these tests make any warning an error.
    with pytest.raises(MediaError, match="truncated"):
        load_picture(blank_png(10000, 10000)[:60])


@pytest.mark.parametrize(
    "data",
    [
        b"not an image",
        b"\x89PNG\r\n\x1a\n" + b"\0" * 40,
        b"\xff\xd8\xff",
        b"II*\0\1",
        b"RIFF1234WEBP",
    ],
)
@pytest.mark.parametrize("way", ["bytes", "path"])
def test_C104_messages_hold_no_address_and_no_path(data: bytes, way: str, tmp_path: Path) -> None:
    file = tmp_path / "upload.bin"
    file.write_bytes(data)
    with pytest.raises(MediaError) as caught:
        load_picture(data if way == "bytes" else file)
    message = str(caught.value)
    assert not re.search(r"0x[0-9a-f]|/|\\|Traceback|object at|BytesIO", message), message
    error = caught.value
    assert error.__cause__ is None
    assert error.__context__ is None or error.__suppress_context__, "the decoder's message is shown"
