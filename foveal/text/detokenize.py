"""Streamed answers: ids in, text out that never has to be taken back.

Shown text is whole characters only, and no text that could still turn into a stop string. The joined pieces equal
`Tokenizer.decode` of all ids, cut before the stop string; only a character that stays open at the very end is left out,
where whole decoding shows U+FFFD. The work for one token does not grow with the length of the answer.

Which stop string ends an answer: the one that is complete first; of those complete at the same character, the one that
begins first. So the result does not depend on how the text was cut into tokens. Knows no model and no stop token ids.
"""

from __future__ import annotations

from collections.abc import Sequence

from foveal.text.tokenizer import Tokenizer


class StreamDetokenizer:
    """Decodes one answer, token by token.

        ids -> TextDecoder -> [held: may begin a stop string] -> shown text

    `stopped_by` is the stop string met, or None. After it, `push` and `finish` give no more text. With `include_stop`
    the stop string itself is shown.
    """

    def __init__(
        self,
        tokenizer: Tokenizer,
        stop: Sequence[str] = (),
        skip_special: bool = False,
        *,
        include_stop: bool = False,
    ) -> None:
        self._decoder = tokenizer.text_decoder(skip_special=skip_special)
        self._include_stop = include_stop
        self._stop = tuple(dict.fromkeys(s for s in stop if s))
        self._held = ""
        self._shown: list[str] = []
        self.stopped_by: str | None = None

    @property
    def text(self) -> str:
        """All text shown so far."""
        if len(self._shown) > 1:
            self._shown = ["".join(self._shown)]
        return self._shown[0] if self._shown else ""

    def push(self, token_id: int) -> str:
        """The text that is safe to show after `token_id`; often empty."""
        if self.stopped_by is not None:
            return ""
        self._held += self._decoder.push(token_id)
        match = _first_match(self._held, self._stop)
        if match is not None:
            start, self.stopped_by = match
            shown = start + len(self.stopped_by) if self._include_stop else start
            return self._show(shown, drop_rest=True)
        return self._show(len(self._held) - _open_length(self._held, self._stop))

    def finish(self) -> str:
        """The text still held back, once no more tokens come. A character that is not whole is dropped."""
        return self._show(len(self._held))

    def _show(self, length: int, *, drop_rest: bool = False) -> str:
        text, self._held = self._held[:length], "" if drop_rest else self._held[length:]
        if text:
            self._shown.append(text)
        return text


def _first_match(text: str, stop: Sequence[str]) -> tuple[int, str] | None:
    """(start, stop string) of the match that ends first, then starts first."""
    found = ((text.find(s), s) for s in stop)
    matches = [(start + len(s), start, s) for start, s in found if start >= 0]
    if not matches:
        return None
    _, start, match = min(matches)
    return start, match


def _open_length(text: str, stop: Sequence[str]) -> int:
    """The length of the longest end of `text` that is the beginning of a stop string."""
    longest = 0
    for s in stop:
        for length in range(min(len(s) - 1, len(text)), longest, -1):
            if text.endswith(s[:length]):
                longest = length
                break
    return longest
