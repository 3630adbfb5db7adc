from __future__ import annotations

import base64
import io
from typing import Any

import numpy as np
import pytest
from PIL import Image

from foveal.errors import FovealError, MediaError, PromptError
from foveal.messages import decode_data_url, parse_messages
from foveal.types import Message, Picture
from foveal.vision.decode import load_picture


def png() -> bytes:
    out = io.BytesIO()
    Image.new("RGB", (4, 3), (255, 0, 0)).save(out, "PNG")
    return out.getvalue()


ENCODED = base64.b64encode(png()).decode()
URL = f"data:image/png;base64,{ENCODED}"


@pytest.mark.parametrize(
    "part",
    [
        {"type": "image", "image": png()},
        {"type": "image", "image": np.full((3, 4, 3), 7, dtype=np.uint8)},
        {"type": "image_url", "image_url": {"url": URL}},
        {"type": "image_url", "image_url": URL},
        {"type": "input_image", "image_url": URL},
        {"type": "image", "url": URL},
        {"type": "image", "data": ENCODED},
        {"type": "image", "source": {"type": "base64", "media_type": "image/png", "data": ENCODED}},
        load_picture(png()),
    ],
)
def test_pictures_come_in_every_shape_that_clients_use(part: Any) -> None:
    content = [part, {"type": "text", "text": "What?"}, "plain"]
    (message,) = parse_messages([{"role": "user", "content": content}], load_picture)
    picture, *texts = message.content
    assert isinstance(picture, Picture)
    assert (picture.width, picture.height) == (4, 3)
    assert texts == ["What?", "plain"]


def test_messages_and_strings_pass_through() -> None:
    ready = Message("assistant", ("Hi.",))
    messages = parse_messages([{"role": "developer", "content": "Be brief."}, ready], load_picture)
    assert messages == [Message("system", ("Be brief.",)), ready]


# C068: what clients do to data URLs.
@pytest.mark.parametrize(
    "url",
    [
        URL.replace(",", ",\n"),
        URL.rstrip("="),
        "DATA:image/png;base64," + ENCODED,
        URL.replace("image/png", "image/png;charset=utf-8"),
        "data:image/png;base64," + base64.urlsafe_b64encode(png()).decode(),
        "data:;base64," + "\r\n ".join(ENCODED[i : i + 20] for i in range(0, len(ENCODED), 20)),
    ],
)
def test_C068_data_urls_of_many_spellings(url: str) -> None:
    assert decode_data_url(url) == png()


@pytest.mark.parametrize(
    ("messages", "error", "words"),
    [
        ([], PromptError, "non-empty list"),
        ("hello", PromptError, "non-empty list"),
        ([{"role": "robot", "content": "x"}], PromptError, "messages[0].role is 'robot'"),
        ([{"role": "user", "content": 5}], PromptError, "messages[0].content"),
        (
            [{"role": "user", "content": [{"type": "video_url"}]}],
            PromptError,
            "content[0] has type 'video_url'",
        ),
        ([{"role": "user", "content": [{"type": "image"}]}], PromptError, "has no picture"),
        (
            [
                {
                    "role": "user",
                    "content": ["a", {"type": "image_url", "image_url": "http://x/y.png"}],
                }
            ],
            MediaError,
            "messages[0].content[1]",
        ),
        (
            [
                {
                    "role": "user",
                    "content": [{"type": "image_url", "image_url": "data:image/png;base64,@@"}],
                }
            ],
            MediaError,
            "not valid base64",
        ),
        (
            [{"role": "user", "content": [{"type": "image", "image": b"text"}]}],
            MediaError,
            "content[0]",
        ),
        ([7], PromptError, "messages[0] is a int"),
    ],
)
def test_what_is_wrong_is_named_by_its_place(
    messages: Any, error: type[FovealError], words: str
) -> None:
    with pytest.raises(error) as caught:
        parse_messages(messages, load_picture)
    assert words in str(caught.value)
