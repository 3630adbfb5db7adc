"""Chat messages as users write them (the OpenAI shape) into `types.Message`. Pictures are decoded here, once."""

from __future__ import annotations

import base64
import binascii
from collections.abc import Callable, Mapping, Sequence
from typing import Any, TypeAlias
from urllib.parse import unquote_to_bytes

from foveal.errors import FovealError, MediaError, PromptError
from foveal.types import Message, Part, Picture, Precomputed, Role

LoadPicture: TypeAlias = Callable[[Any], Picture]
UserMessage: TypeAlias = Message | Mapping[str, Any]

_ROLES: dict[str, Role] = {
    "system": "system",
    "developer": "system",
    "user": "user",
    "assistant": "assistant",
}
_TEXT_TYPES = ("text", "input_text")
_PICTURE_KEYS = {
    "image": ("image", "source", "url", "data"),
    "image_url": ("image_url",),
    "input_image": ("image_url",),
}


def parse_messages(messages: Sequence[UserMessage], load_picture: LoadPicture) -> list[Message]:
    """Messages with literal texts and decoded pictures.

    `content` is a string or a list of parts: {"type": "text", "text": ...}, {"type": "image", "image": path, bytes, PIL
    image or array}, {"type": "image_url", "image_url": {"url": data URL}}. Raises PromptError or MediaError naming the
    message and part at fault.
    """
    if isinstance(messages, str | bytes | Mapping) or not messages:
        raise PromptError("messages must be a non-empty list of {'role': ..., 'content': ...}")
    return [
        message
        if isinstance(message, Message)
        else _parse_message(message, f"messages[{i}]", load_picture)
        for i, message in enumerate(messages)
    ]


def _parse_message(message: Mapping[str, Any], where: str, load_picture: LoadPicture) -> Message:
    if not isinstance(message, Mapping):
        raise PromptError(
            f"{where} is a {type(message).__name__}; an object with role and content is needed"
        )
    role = message.get("role")
    if role not in _ROLES:
        raise PromptError(f"{where}.role is {role!r}; known roles: {', '.join(_ROLES)}")
    content = message.get("content")
    if isinstance(content, str):
        return Message(_ROLES[role], (content,))
    if not isinstance(content, Sequence):
        raise PromptError(f"{where}.content is {content!r}; a string or a list of parts is needed")
    parts = [parse_part(p, f"{where}.content[{i}]", load_picture) for i, p in enumerate(content)]
    return Message(_ROLES[role], tuple(parts))


def parse_part(part: Any, where: str, load_picture: LoadPicture) -> Part:
    """One part of a content list. Raises PromptError or MediaError naming `where`."""
    if isinstance(part, str | Picture | Precomputed):
        return part
    kind = part.get("type") if isinstance(part, Mapping) else None
    if kind in _TEXT_TYPES and isinstance(part.get("text"), str):
        text: str = part["text"]
        return text
    if kind not in _PICTURE_KEYS:
        known = ", ".join((*_TEXT_TYPES, *_PICTURE_KEYS))
        raise PromptError(f"{where} has type {kind!r}; known part types: {known}")
    try:
        return load_picture(_picture_source(part, where))
    except FovealError as error:
        raise type(error)(f"{where}: {error}") from None


def _picture_source(part: Mapping[str, Any], where: str) -> Any:
    """What a picture part holds: something to decode (path, bytes, PIL image, array), links and data URLs read."""
    key = next((key for key in _PICTURE_KEYS[part["type"]] if part.get(key) is not None), None)
    if key is None:
        wanted = " or ".join(_PICTURE_KEYS[part["type"]])
        raise PromptError(f"{where} of type {part['type']!r} has no picture; give {wanted}")
    value = part[key]
    if isinstance(value, Mapping):  # {"url": ...}, or {"type": "base64", "data": ...}
        key, value = next(((k, value[k]) for k in ("url", "data") if value.get(k)), ("url", None))
    if key == "data" and isinstance(value, str) and value[:5].lower() != "data:":
        value = f"data:;base64,{value}"
    return value if key == "image" else decode_data_url(value, where)


def decode_data_url(url: Any, where: str = "image_url") -> bytes:
    """The bytes of a base64 or percent-encoded `data:` URL; links are not followed. Raises MediaError."""
    if not isinstance(url, str) or url[:5].lower() != "data:":
        shown = repr(url)[:60]
        raise MediaError(
            f"{where}: {shown} is not a data URL; links are not fetched: pass a path or the bytes"
        )
    header, comma, payload = url.partition(",")
    if not comma:
        raise MediaError(f"{where}: the data URL has no comma between its header and its data")
    if not header.lower().rstrip().endswith(";base64"):
        return unquote_to_bytes(payload)
    compact = "".join(payload.split()).rstrip("=").translate(str.maketrans("-_", "+/"))
    try:
        return base64.b64decode(compact + "=" * (-len(compact) % 4), validate=True)
    except (binascii.Error, ValueError):
        raise MediaError(f"{where}: the data URL is not valid base64") from None
