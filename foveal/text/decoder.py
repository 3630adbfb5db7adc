"""How ids become text: the decoder of `tokenizer.json` as a table of bytes and an incremental state machine.

One code path serves whole and streamed decoding, so both give the same text. Supported decoders: byte-level; Metaspace;
a sequence of replacements, byte fallback, fuse and strip (the Llama layout); none (tokens joined by spaces).

    id --token--> piece (bytes) --UTF-8, invalid bytes to U+FFFD--> text --leading space rule--> text

Knows no chat format and no stop strings. One difference from the tokenizers library: where a run of byte-fallback
tokens is invalid UTF-8 somewhere, the library shows the whole run as U+FFFD; here only the invalid bytes become U+FFFD,
because a stream cannot take back the characters that it has shown.
"""

from __future__ import annotations

import codecs
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from foveal.errors import CheckpointError

_BYTE_TOKEN = re.compile(r"<0x([0-9A-Fa-f]{2})>")
_KNOWN = "ByteLevel, Metaspace, Sequence of Replace, ByteFallback, Fuse, Strip"


def byte_alphabet() -> dict[str, int]:
    """The 256 characters that stand for bytes in byte-level vocabularies.

    Printable Latin-1 characters stand for themselves, the other 68 bytes for U+0100 onwards, in order. Source: GPT-2.
    """
    printable = {*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)}
    others = [byte for byte in range(256) if byte not in printable]
    alphabet = {chr(byte): byte for byte in sorted(printable)}
    alphabet.update({chr(0x100 + i): byte for i, byte in enumerate(others)})
    return alphabet


_ALPHABET = byte_alphabet()


@dataclass(frozen=True, slots=True)
class DecoderRules:
    """What `tokenizer.json` says about decoding.

    `replacements` act on each token; `metaspace` is the character that vanishes from the first token; `strip` is
    removed from the start of the text, at most `strip_count` times; `joiner` goes between tokens.
    """

    is_byte_level: bool = False
    has_byte_fallback: bool = False
    replacements: tuple[tuple[str, str], ...] = ()
    metaspace: str = ""
    strip: str = ""
    strip_count: int = 0
    joiner: str = ""

    def piece(self, token: str, *, is_first: bool = False) -> bytes:
        """The bytes that `token` adds to a text, before the rule for the text's start."""
        if self.is_byte_level:
            # A token with a character outside the alphabet (a special token) is taken as it is written.
            codes = [_ALPHABET.get(character, -1) for character in token]
            return token.encode() if -1 in codes else bytes(codes)
        if is_first and self.metaspace:
            token = token.replace(self.metaspace, "")
        for old, new in self.replacements:
            token = token.replace(old, new)
        if self.has_byte_fallback:
            match = _BYTE_TOKEN.fullmatch(token)
            if match:
                return bytes((int(match[1], 16),))
        return token.encode()


def decoder_rules(decoder: Mapping[str, Any] | None) -> DecoderRules:
    """Read the `decoder` of a `tokenizer.json`. Raises CheckpointError for one that is not supported."""
    if decoder is None:
        return DecoderRules(joiner=" ")
    kind = decoder.get("type")
    if kind == "ByteLevel":
        return DecoderRules(is_byte_level=True)
    if kind == "Metaspace":
        mark = decoder.get("replacement", "▁")
        is_dropped = decoder.get("prepend_scheme", "always") != "never"
        return DecoderRules(replacements=((mark, " "),), metaspace=mark if is_dropped else "")
    if kind == "Sequence":
        steps = decoder.get("decoders", [])
        return decoder_rules(steps[0]) if len(steps) == 1 else _sequence_rules(steps)
    if kind in ("Replace", "ByteFallback", "Fuse"):
        return _sequence_rules([decoder])
    raise CheckpointError(f"tokenizer.json: decoder {kind!r} is not supported; known: {_KNOWN}")


def _sequence_rules(steps: list[Mapping[str, Any]]) -> DecoderRules:
    replacements: list[tuple[str, str]] = []
    kinds = [step.get("type") for step in steps]
    strip, strip_count = "", 0
    for i, step in enumerate(steps):
        has_fallback, is_fused = "ByteFallback" in kinds[:i], "Fuse" in kinds[:i]
        pattern = step.get("pattern", {})
        if kinds[i] == "Replace" and not (has_fallback or is_fused) and "String" in pattern:
            replacements.append((pattern["String"], step["content"]))
        elif kinds[i] == "Strip" and is_fused and not strip and not step.get("stop"):
            strip, strip_count = step["content"], step["start"]
        elif kinds[i] not in ("ByteFallback", "Fuse"):
            raise CheckpointError(
                f"tokenizer.json: step {i} of the decoder, {kinds[i]!r}, is not supported in this place; "
                "known: Replace of a string, then ByteFallback, Fuse, one Strip at the start"
            )
    return DecoderRules(
        has_byte_fallback="ByteFallback" in kinds,
        replacements=tuple(replacements),
        strip=strip,
        strip_count=strip_count,
    )


class TextDecoder:
    """Turns tokens into text one by one; holds back the bytes of a character that is not whole yet.

    `piece_of(id, is_first)` gives a token's bytes, or None for an id that leaves no trace at all.
    """

    def __init__(self, rules: DecoderRules, piece_of: Callable[[int, bool], bytes | None]) -> None:
        self._piece_of = piece_of
        self._joiner = rules.joiner.encode()
        self._strip, self._strip_left = rules.strip, rules.strip_count
        self._utf8 = codecs.getincrementaldecoder("utf-8")(errors="replace")
        self._is_first = True

    def push(self, token_id: int) -> str:
        """The characters that `token_id` completes; empty where a character is still open."""
        piece = self._piece_of(token_id, self._is_first)
        if piece is None:
            return ""
        if not self._is_first:
            piece = self._joiner + piece
        self._is_first = False
        text = self._utf8.decode(piece)
        if self._is_surrogate_open():
            text += self._utf8.decode(b"", final=True)
        return self._stripped(text)

    def _is_surrogate_open(self) -> bool:
        """True for ED A0..BF: no third byte makes it a character, yet Python's decoder waits for one."""
        held = self._utf8.getstate()[0]
        return held[:1] == b"\xed" and held[1:2] >= b"\xa0"

    def flush(self) -> str:
        """U+FFFD for a character that stayed open, as whole decoding shows it; otherwise empty."""
        return self._stripped(self._utf8.decode(b"", final=True))

    def _stripped(self, text: str) -> str:
        while self._strip_left and text:
            if not text.startswith(self._strip):
                self._strip_left = 0
                break
            self._strip_left -= 1
            text = text[len(self._strip) :]
        return text
