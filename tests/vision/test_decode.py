"""Sources, limits and messages of the decoder; what each format holds is in tests/cases/test_formats.py."""

from __future__ import annotations

import os
import threading
import warnings
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from PIL import Image

from foveal.errors import MediaError, ResourceError
from foveal.vision import decode
from foveal.vision.decode import load_picture
from tests.vision.pictures import encoded, noise, smooth

# --- files --------------------------------------------------------------------------------------


def test_a_file_is_named_after_itself(tmp_path: Path) -> None:
    file = tmp_path / "cat.png"
    pixels = noise(5, 4)
    file.write_bytes(encoded(Image.fromarray(pixels), "PNG"))
    picture = load_picture(file)
    assert picture.source == "cat.png"
    assert (picture.width, picture.height) == (5, 4)
    np.testing.assert_array_equal(picture.rgb, pixels)
    assert load_picture(file.read_bytes()).source == "picture"
    assert load_picture(memoryview(file.read_bytes()), name="image 2").source == "image 2"


def test_files_that_cannot_be_pictures_get_one_clear_message(tmp_path: Path) -> None:
    (tmp_path / "empty.png").touch()
    (tmp_path / "notes.png").write_text("milk, bread")
    os.mkfifo(tmp_path / "pipe.png")
    messages = {
        "empty.png": "empty.png is empty (0 bytes); save or download it again",
        "missing.png": "missing.png does not exist; check the path",
        "pipe.png": "pipe.png is not a regular file; give the path of a picture file",
        ".": f"{tmp_path.name} is a folder; give the path of a picture file",
        "nul\0.png": "nul?.png cannot be read: the path is not valid",
        "n" * 300: "n" * 77 + "... cannot be read: File name too long",
    }
    for name, message in messages.items():
        with pytest.raises(MediaError) as caught:
            load_picture(tmp_path / name)
        assert str(caught.value) == message
    with pytest.raises(MediaError, match=r"notes\.png holds text, which is not taken"):
        load_picture(tmp_path / "notes.png")


@pytest.mark.parametrize(
    "link", ["http://example.com/x.png", "HTTPS://example.com/x", "data:image/png;base64,AAAA"]
)
def test_links_are_not_fetched(link: str) -> None:
    with pytest.raises(MediaError, match="is a link, and links are not fetched"):
        load_picture(link + "A" * 5000)


def test_very_large_files_are_refused_unread(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(decode, "MAX_FILE_BYTES", 2**20)
    file = tmp_path / "large.tif"
    with open(file, "wb") as stream:
        stream.truncate(2 * 2**20)
    with pytest.raises(MediaError, match=r"large\.tif has 2 MiB, and the limit is 1 MiB"):
        load_picture(file)


@pytest.mark.parametrize("source", [None, 5, [1, 2], object()])
def test_other_sources_are_refused_by_type(source: Any) -> None:
    with pytest.raises(MediaError, match=f"picture is a {type(source).__name__}; give a path"):
        load_picture(source)


def test_a_picture_over_the_callers_limit_is_refused() -> None:
    data = encoded(Image.fromarray(noise(20, 10)), "PNG")
    assert load_picture(data, max_pixels=200).width == 20
    for source in (
        data,
        encoded(Image.fromarray(noise(20, 10)), "BMP"),
        noise(20, 10),
        Image.new("L", (20, 10)),
    ):
        with pytest.raises(MediaError, match=r"has 20 x 10 = 200 pixels, and the limit is 199"):
            load_picture(source, max_pixels=199)


@pytest.mark.parametrize("limit", [0, -1, 10**9, 1.5, None])
def test_the_limit_itself_has_limits(limit: Any) -> None:
    with pytest.raises(MediaError, match=r"max_pixels=.* must be between 1 and 178956970"):
        load_picture(noise(2, 2), max_pixels=limit)


def test_an_unknown_mode_is_refused() -> None:
    with pytest.raises(MediaError, match="mode 'exact' is unknown; choose 'display' or 'vendor'"):
        load_picture(noise(2, 2), mode="exact")  # type: ignore[arg-type]


def test_lack_of_memory_is_no_fault_of_the_picture(monkeypatch: pytest.MonkeyPatch) -> None:
    def out_of_memory(*_args: object) -> None:
        raise MemoryError

    monkeypatch.setattr(decode, "_flatten", out_of_memory)
    with pytest.raises(ResourceError, match="needs more memory to decode"):
        load_picture(noise(2, 2))


# --- arrays and images --------------------------------------------------------------------------


@pytest.mark.parametrize("channels", [None, 1, 3])
@pytest.mark.parametrize("mode", ["display", "vendor"])
def test_arrays_keep_their_numbers(channels: int | None, mode: Any) -> None:
    array = noise(6, 4, channels or 1)
    array = array if channels != 1 else array[:, :, None]
    rgb = load_picture(array, mode=mode).rgb
    assert rgb.shape == (4, 6, 3)
    np.testing.assert_array_equal(rgb, np.broadcast_to(array.reshape(4, 6, -1), (4, 6, 3)))


def test_arrays_with_alpha_are_flattened_or_stripped() -> None:
    array = noise(6, 4, 4)
    array[:, :3, 3], array[:, 3:, 3] = 0, 255
    rgb = load_picture(array).rgb
    assert (rgb[:, :3] == 255).all()
    np.testing.assert_array_equal(rgb[:, 3:], array[:, 3:, :3])
    np.testing.assert_array_equal(load_picture(array, mode="vendor").rgb, array[:, :, :3])


@pytest.mark.parametrize("shape", [(2, 256), (2, 256, 1), (2, 256, 3), (2, 256, 4)])
def test_16_bit_arrays_are_scaled(shape: tuple[int, ...]) -> None:
    array = np.full(shape, 65535, np.uint16)
    ramp = np.arange(256, dtype=np.uint16) * 257
    if len(shape) == 2:
        array[:] = ramp
    else:
        array[:, :, : min(3, shape[2])] = ramp[None, :, None]
    np.testing.assert_array_equal(load_picture(array).rgb[1, :, 1], np.arange(256))


@pytest.mark.parametrize(
    "layout", ["fortran", "reversed", "every second", "read-only", "big-endian"]
)
def test_arrays_of_any_layout_are_read(layout: str) -> None:
    array = noise(8, 6)
    if layout == "fortran":
        array = np.asfortranarray(array)
    elif layout == "reversed":
        array = array[::-1, ::-1, ::-1]
    elif layout == "every second":
        array = array[::2, ::2]
    elif layout == "read-only":
        array.flags.writeable = False
    else:
        deep = array[:, :, 0].astype(">u2") * 257
        np.testing.assert_array_equal(load_picture(deep).rgb[:, :, 0], array[:, :, 0])
        return
    np.testing.assert_array_equal(load_picture(array).rgb, array)


def test_an_array_changed_later_does_not_change_the_picture() -> None:
    array = noise(6, 4)
    before = array.copy()
    picture = load_picture(array)
    array[:] = 0
    np.testing.assert_array_equal(picture.rgb, before)


@pytest.mark.parametrize("shape", [(5,), (3, 480, 640), (4, 4, 2), (4, 4, 5), (1, 4, 4, 3), ()])
def test_arrays_of_wrong_shape_say_which_shape_is_needed(shape: tuple[int, ...]) -> None:
    with pytest.raises(MediaError, match=r"has shape .*\[height, width, channels\]"):
        load_picture(np.zeros(shape, np.uint8))


@pytest.mark.parametrize("dtype", ["f4", "f8", "i4", "?", "i1", "O", "c8"])
def test_arrays_of_wrong_dtype_say_what_to_pass(dtype: str) -> None:
    with pytest.raises(MediaError, match=r"has dtype .*; samples must be uint8 or uint16"):
        load_picture(np.zeros((4, 4, 3), dtype))


@pytest.mark.parametrize("shape", [(0, 4, 3), (4, 0), (0, 0, 3)])
def test_pictures_without_pixels_are_refused(shape: tuple[int, ...]) -> None:
    with pytest.raises(MediaError, match=f"is empty: {shape[1]} x {shape[0]} pixels"):
        load_picture(np.zeros(shape, np.uint8))
    with pytest.raises(MediaError, match=f"is empty: {shape[1]} x {shape[0]} pixels"):
        load_picture(Image.new("RGB", (shape[1], shape[0])))


@pytest.mark.parametrize(
    "mode",
    [
        "1",
        "L",
        "P",
        "LA",
        "PA",
        "RGB",
        "RGBA",
        "RGBX",
        "RGBa",
        "La",
        "CMYK",
        "YCbCr",
        "HSV",
        "I",
        "F",
        "I;16",
    ],
)
@pytest.mark.parametrize("picture_mode", ["display", "vendor"])
def test_every_mode_of_pillow_is_rgb_or_a_clear_error(mode: str, picture_mode: Any) -> None:
    image = Image.new(mode, (4, 3))
    try:
        picture = load_picture(image, mode=picture_mode)
    except MediaError as error:
        assert f"pixels of kind {mode!r}, which do not convert to RGB" in str(error)  # noqa: PT017
        assert picture_mode == "vendor"
    else:
        assert picture.rgb.shape == (3, 4, 3)
        assert picture.rgb.dtype == np.uint8


def test_a_mode_without_rgb_is_refused_by_name(monkeypatch: pytest.MonkeyPatch) -> None:
    def no_conversion(*_args: object) -> None:  # as Pillow without LittleCMS has for LAB
        raise ValueError("conversion not supported")

    monkeypatch.setattr(decode, "_flatten", no_conversion)
    with pytest.raises(MediaError, match="pixels of kind 'LAB', which do not convert to RGB"):
        load_picture(Image.new("LAB", (4, 3)))


def test_premultiplied_alpha_is_undone() -> None:
    image = Image.new("RGBa", (1, 1), (64, 0, 0, 128))
    assert load_picture(image).rgb.tolist() == [[[191, 127, 127]]]


def test_the_callers_image_is_left_as_it_was() -> None:
    image = Image.fromarray(noise(6, 4))
    image.info["transparency"] = (0x1200, 0, 0)
    load_picture(image)
    assert image.info == {"transparency": (0x1200, 0, 0)}
    assert image.mode == "RGB"


def test_a_closed_image_is_an_error_and_no_crash(tmp_path: Path) -> None:
    file = tmp_path / "x.png"
    file.write_bytes(encoded(Image.fromarray(noise(6, 4)), "PNG"))
    with Image.open(file) as image:
        pass
    with pytest.raises(MediaError, match="is damaged or closed: its pixels cannot be read"):
        load_picture(image)


def test_a_truncated_image_object_is_called_truncated() -> None:
    import io

    data = encoded(Image.fromarray(noise(60, 40)), "JPEG")
    with (
        Image.open(io.BytesIO(data[:-400])) as image,
        pytest.raises(MediaError, match="is truncated"),
    ):
        load_picture(image)


# --- robustness ---------------------------------------------------------------------------------

SEEDS = [
    encoded(Image.fromarray(smooth(24, 16)), kind, **options)
    for kind, options in (
        ("JPEG", {"quality": 60}),
        ("PNG", {}),
        ("GIF", {}),
        ("BMP", {}),
        ("TIFF", {"compression": "tiff_lzw"}),
        ("TIFF", {}),
        ("WEBP", {"lossless": True}),
        ("WEBP", {}),
    )
]


@settings(max_examples=300, suppress_health_check=[HealthCheck.too_slow])
@given(st.data())
def test_damaged_files_are_pictures_or_media_errors(data: st.DataObject) -> None:
    file = bytearray(data.draw(st.sampled_from(SEEDS)))
    for _ in range(data.draw(st.integers(1, 4))):
        position = data.draw(st.integers(0, min(len(file), 600) - 1))
        file[position] = data.draw(st.integers(0, 255))
    del file[data.draw(st.integers(1, len(file))) if data.draw(st.booleans()) else len(file) :]
    mode = data.draw(st.sampled_from(["display", "vendor"]))
    try:
        picture = load_picture(bytes(file), mode=mode, max_pixels=10_000)  # type: ignore[arg-type]
    except MediaError as error:
        assert "0x" not in str(error)  # noqa: PT017
    else:
        assert picture.rgb.ndim == 3
        assert picture.rgb.dtype == np.uint8


@given(st.binary(max_size=200))
def test_any_bytes_are_a_picture_or_a_media_error(data: bytes) -> None:
    try:
        load_picture(data, max_pixels=10_000)
    except MediaError as error:
        assert str(error).startswith("picture ")  # noqa: PT017


def test_warning_filters_survive_many_threads() -> None:
    data = encoded(Image.fromarray(smooth(64, 48)), "JPEG", exif=b"II*\0" + b"\xff" * 40)
    before = list(warnings.filters)
    failures: list[BaseException] = []

    def work() -> None:
        try:
            for _ in range(5):
                load_picture(data)
        except BaseException as error:
            failures.append(error)

    threads = [threading.Thread(target=work) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert failures == []
    assert list(warnings.filters) == before
