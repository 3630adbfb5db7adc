"""Golden cases as files: `cases/NAME.json` with `cases/NAME.safetensors`, pictures in a folder the case names.

Knows the files' format and no model. A case may store a big tensor X as a strided sample of `X.flatten()`: as
`X.sample`, whose step is in the JSON's `big_tensors`, or as `X.sample_every_STEP`.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy.typing as npt
import torch
from safetensors import SafetensorError
from safetensors.torch import load_file

from foveal.errors import CheckpointError

# What a case's JSON says about the case itself, and not about outputs of the model.
DESCRIPTION_KEYS = frozenset(
    {
        "batch",
        "big_tensors",
        "cache_modes_vs_uncached",
        "cached_vs_uncached_max_abs_diff",
        "case",
        "conversation",
        "effect_of_image_span_visibility_max_abs_logit",
        "first_small_margin_step",
        "greedy_agrees_with_transformers",
        "greedy_logits_vs_transformers",
        "image_token_ids",
        "images",
        "images_dir",
        "min_greedy_top1_top2_margin",
        "min_indexer_margin",
        "min_router_margin",
        "min_routing_margin",
        "mtp",
        "official_generate_agrees",
        "prompt",
        "reference_prefill_vs_transformers",
        "reference_with_kv_rounding_vs_without",
        "second_implementation",
    }
)
DEFAULT_IMAGES = "../../images"
_SAMPLE_NAME = re.compile(r"(?P<name>.+?)\.sample(?:_every_(?P<step>\d+))?")

Conversation = list[dict[str, Any]]


class CaseError(CheckpointError):
    """A golden case cannot be read."""

    code = "invalid_golden_case"


@dataclass(frozen=True, slots=True, eq=False)
class Stored:
    """A tensor as stored: the whole of it (`step` 1), or every `step`-th number of it."""

    values: npt.NDArray[Any]
    step: int = 1


@dataclass(slots=True, eq=False)
class GoldenCase:
    """One case. `take` and `fact` hand out what it expects and note that it was looked at."""

    name: str
    conversations: list[Conversation]
    images_folder: Path
    facts: Mapping[str, Any]
    tensors: Mapping[str, Stored]
    _seen: set[str] = field(default_factory=set)

    def take(self, name: str) -> Stored | None:
        """The tensor `name`, whole or as a sample; None where the case does not hold it."""
        self._seen.add(name)
        return self.tensors.get(name)

    def take_whole(self, name: str) -> npt.NDArray[Any] | None:
        """The tensor `name`, which the format never samples. Raises CaseError for a sample."""
        stored = self.take(name)
        if stored is not None and stored.step != 1:
            raise CaseError(f"{self.name}: {name} is a sample; this tensor must be whole")
        return None if stored is None else stored.values

    def fact(self, name: str) -> Any:
        """The JSON's value `name`, or None."""
        self._seen.add(name)
        return self.facts.get(name)

    def names_like(self, pattern: str) -> list[str]:
        """Tensors whose whole name matches, in order."""
        return sorted(name for name in self.tensors if re.fullmatch(pattern, name))

    @property
    def not_checked(self) -> tuple[str, ...]:
        """What the case holds and nothing has looked at, descriptions of the case left out."""
        held = set(self.tensors) | (set(self.facts) - DESCRIPTION_KEYS)
        return tuple(sorted(held - self._seen))

    def picture_paths(self, conversation: Conversation) -> list[Path]:
        """The conversation's pictures in order. Raises CaseError for one that is not there."""
        names = [name for message in conversation for name in message.get("images") or ()]
        return [self.picture_path(str(name)) for name in names]

    def picture_path(self, name: str) -> Path:
        """The picture `name`, with or without suffix. Raises CaseError where it is not there."""
        exact = self.images_folder / name
        if exact.is_file():
            return exact
        found = sorted(p for p in self.images_folder.glob("*") if p.stem == name and p.is_file())
        if not found:
            raise CaseError(f"{self.name}: no picture {name!r} in {self.images_folder}")
        return found[0]


def list_cases(folder: Path) -> list[Path]:
    """The case files under `folder`/cases, sorted. Raises CaseError where there is no such folder."""
    cases = folder / "cases"
    if not cases.is_dir():
        raise CaseError(
            f"{folder} has no cases/ folder; give the folder that holds cases/ (and checkpoint/)"
        )
    return sorted(cases.glob("*.json"))


def read_case(path: Path, *, has_conversations: bool = True) -> GoldenCase:
    """Read `path` (a case's JSON) and the tensors beside it. Raises CaseError naming the file at fault.

    Tensors in bfloat16 come as float32, which holds them exactly.
    """
    facts = _read_json(path)
    tensors = _read_tensors(path.with_suffix(".safetensors"), facts)
    return GoldenCase(
        name=path.stem,
        conversations=_conversations(facts, path) if has_conversations else [],
        images_folder=_images_folder(path.parent, facts),
        facts=facts,
        tensors=tensors,
    )


def _read_json(path: Path) -> dict[str, Any]:
    try:
        facts = json.loads(path.read_text(encoding="utf-8-sig"))
    except (OSError, UnicodeDecodeError, json.JSONDecodeError) as error:
        raise CaseError(f"{path.name} cannot be read: {error}") from None
    if not isinstance(facts, dict):
        raise CaseError(f"{path.name} holds a {type(facts).__name__}, not an object")
    return facts


def _read_tensors(path: Path, facts: Mapping[str, Any]) -> dict[str, Stored]:
    try:
        loaded = load_file(path)
    except (OSError, ValueError, KeyError, SafetensorError) as error:
        raise CaseError(f"{path.name} cannot be read: {error}") from None
    tensors = {}
    for name, tensor in loaded.items():
        values = (tensor.float() if tensor.dtype is torch.bfloat16 else tensor).numpy()
        match = _SAMPLE_NAME.fullmatch(name)
        if match is None:
            tensors[name] = Stored(values)
        else:
            step = match["step"] or _sample_step(facts, match["name"], path)
            tensors[match["name"]] = Stored(values, int(step))
    return tensors


def _sample_step(facts: Mapping[str, Any], name: str, path: Path) -> int:
    try:
        step = facts["big_tensors"][name]["sample_step"]
    except (KeyError, TypeError):
        step = None
    if not isinstance(step, int) or step < 1:
        raise CaseError(
            f"{path.name} holds {name}.sample, but the JSON's big_tensors gives no sample_step for it"
        )
    return step


def _conversations(facts: Mapping[str, Any], path: Path) -> list[Conversation]:
    """The case's rows: a list of conversations, also where the file has a single one."""
    value = facts.get("conversation")
    if isinstance(value, list) and value:
        rows = value if all(isinstance(row, list) for row in value) else [value]
        if all(isinstance(message, dict) for row in rows for message in row) and all(rows):
            return rows
    raise CaseError(
        f"{path.name}: 'conversation' must be a list of messages, or a list of such lists"
    )


def _images_folder(cases: Path, facts: Mapping[str, Any]) -> Path:
    named = cases / str(facts.get("images_dir") or DEFAULT_IMAGES)
    return named if named.is_dir() else cases / DEFAULT_IMAGES
