"""How a DeepSeek-V4 model's weights are kept: in which type, and routed experts as numbers or as the file's codes."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Literal, TypeAlias, get_args

import torch

from foveal.errors import PromptError, ResourceError
from foveal.models import quant
from foveal.models.fit import FormatName
from foveal.models.names import ParameterSpec
from foveal.models.precision import HEADROOM, Precision, resolve_precision
from foveal.models.safetensors_header import TensorInfo
from foveal.models.v4_fit import weight_bytes
from foveal.ops.packed import Packing
from foveal.parallel.sharding import Plan

WeightsMode: TypeAlias = Literal["auto", "dense", "packed"]
WEIGHTS_CHOICES: tuple[WeightsMode, ...] = get_args(WeightsMode)


@dataclass(frozen=True, slots=True)
class WeightChoice:
    """A resolved choice. `packing` None keeps routed experts as numbers; `reason` says in one line why.

    `num_bytes` is the memory of all weights, `available_bytes` what was free when the choice was made.
    """

    precision: Precision
    packing: Packing | None
    reason: str
    num_bytes: int
    available_bytes: int | None = None

    @property
    def name(self) -> str:
        return "dense" if self.packing is None else "packed"

    def require_room(self, model: str) -> None:
        """Raises ResourceError where the weights alone are more than the free memory."""
        if self.available_bytes is not None and self.num_bytes > self.available_bytes:
            kind = self.precision.name if self.packing is None else f"packed {self.packing.format}"
            raise ResourceError(
                f"{kind} weights need {self.num_bytes / 1e9:.1f} GB, but {self.available_bytes / 1e9:.1f} GB of memory "
                f"are free; `foveal fit {model}` shows what each format needs"
            )


def stored_packing(
    specs: Sequence[ParameterSpec], tensors: Mapping[str, TensorInfo]
) -> Packing | None:
    """The format of the routed experts in a checkpoint; None where they are numbers, or not all of one kind."""
    found: set[Packing | None] = set()
    for spec in specs:
        for source in spec.sources if spec.plan is Plan.EXPERT else ():
            info, scale = tensors.get(source.name), tensors.get(quant.scale_name(source.name))
            is_coded = info is not None and quant.is_coded(source, info)
            found.add(quant.packing_of(info, scale) if is_coded and info and scale else None)
    return found.pop() if len(found) == 1 else None


def resolve_weights(
    specs: Sequence[ParameterSpec],
    stored: Packing | None,
    *,
    dtype: str,
    device: torch.device,
    weights: str,
    available_bytes: int | None,
) -> WeightChoice:
    """Choose type and form of the weights.

    "auto" takes the first that fits of: float32 numbers (on CPUs), bfloat16 numbers, packed experts with the rest in
    float32 (on CPUs), packed experts with the rest in bfloat16; numbers come first because products with packed experts
    turn each expert into numbers every time. Raises PromptError for what cannot be done.
    """
    if weights not in WEIGHTS_CHOICES:
        raise PromptError(
            f"weights {weights!r} is unknown; choose one of {', '.join(WEIGHTS_CHOICES)}"
        )
    if weights == "packed" and stored is None:
        raise PromptError(
            "weights 'packed' keeps experts in the codes of the checkpoint, and this one has numbers; use 'auto'"
        )
    forms: list[Packing | None] = [] if weights == "packed" else [None]
    if weights != "dense" and stored is not None:
        forms.append(stored)
    options = [
        (name, form, _num_bytes(specs, name, form))
        for form in forms
        for name in _dtypes(dtype, device)
    ]
    room = math.inf if available_bytes is None else available_bytes
    name, form, size = next((o for o in options if o[2] * HEADROOM <= room), options[-1])
    precision = resolve_precision(name, device, num_parameters=0, available_bytes=None)
    if dtype == "auto":
        precision = replace(precision, reason=_dtype_reason(name, device))
    reason = _reason(weights, stored, form, options, available_bytes)
    return WeightChoice(precision, form, reason, size, available_bytes)


def _dtypes(dtype: str, device: torch.device) -> list[FormatName]:
    """Storage types that may be used, the best first."""
    if dtype == "auto":
        return ["float32", "bfloat16"] if device.type == "cpu" else ["bfloat16"]
    resolve_precision(dtype, device, num_parameters=0, available_bytes=None)  # refuses unknown ones
    return [dtype]  # type: ignore[list-item]  # checked by the line above


def _num_bytes(specs: Sequence[ParameterSpec], name: FormatName, form: Packing | None) -> int:
    if form is None:
        return weight_bytes(specs, name)
    experts = [spec for spec in specs if spec.plan is Plan.EXPERT]
    others = [spec for spec in specs if spec.plan is not Plan.EXPERT]
    packed = (form.num_bytes(math.prod(s.shape[:-1]), s.shape[-1]) for s in experts)
    return weight_bytes(others, name) + sum(packed)


def _dtype_reason(name: FormatName, device: torch.device) -> str:
    if device.type != "cpu":
        return "the checkpoint's own type"
    if name == "float32":
        return "exact, and it fits into the free memory"
    return "float32 weights would not fit into the free memory"


def _reason(
    weights: str,
    stored: Packing | None,
    form: Packing | None,
    options: Sequence[tuple[FormatName, Packing | None, int]],
    available_bytes: int | None,
) -> str:
    if weights != "auto":
        return "as asked"
    if stored is None:
        return "numbers, as the checkpoint has them"
    if form is None:
        return "numbers, which fit into the free memory"
    least = min(size for _, packing, size in options if packing is None)
    free = (available_bytes or 0) / 1e9
    return (
        f"{form.format} codes, as the checkpoint has them: {least / 1e9:.1f} GB of numbers would not fit into the free "
        f"memory ({free:.1f} GB)"
    )
