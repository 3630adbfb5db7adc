"""The marks of the DeepSeek-V4 chat grammar, and the one shape that a tool call has on both ways through it.

A mark is one token of the model's vocabulary. The call block is spelled with one mark inside ordinary text:

    <T tool_calls>                                        T is ｜DSML｜, without the space after it
    <T invoke name="NAME">
    <T parameter name="KEY" string="true|false">VALUE</T parameter>
    </T invoke>
    </T tool_calls>

`chat_v4` writes this, `stream_parse` reads it. Source: spec 9.
"""

from __future__ import annotations

import json
from dataclasses import dataclass

from foveal.text.tokenizer import BOS, EOS

USER, ASSISTANT, REMINDER = "<｜User｜>", "<｜Assistant｜>", "<｜latest_reminder｜>"
THINK_START, THINK_END = "<think>", "</think>"
DSML = "｜DSML｜"
IMAGE = "<｜deepseek_image｜>"
TASKS = {
    name: f"<｜{name}｜>"
    for name in ("action", "query", "authority", "domain", "title", "read_url")
}
MARKS = (BOS, EOS, USER, ASSISTANT, REMINDER, THINK_START, THINK_END, DSML, IMAGE, *TASKS.values())


@dataclass(frozen=True, slots=True)
class Parameter:
    """One argument of a call: `value` as it stands in the block, bare text if `is_string`, JSON otherwise."""

    name: str
    value: str
    is_string: bool

    @property
    def as_json(self) -> str:
        """`value` as JSON."""
        return json.dumps(self.value, ensure_ascii=False) if self.is_string else self.value


def arguments_json(parameters: tuple[Parameter, ...]) -> str:
    """The arguments as one JSON object, in the order of the block. Numbers keep their spelling."""
    entries = (f"{json.dumps(p.name, ensure_ascii=False)}: {p.as_json}" for p in parameters)
    return "{" + ", ".join(entries) + "}"
