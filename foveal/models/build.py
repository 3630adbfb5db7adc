"""From a folder to a model with its weights: the one place that puts configuration, precision and loader together."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Generic, TypeVar

import torch
from torch import nn

from foveal.errors import ResourceError
from foveal.models.config import VL2Config
from foveal.models.fidelity import ROUNDINGS, Fidelity, check_fidelity
from foveal.models.layers import destinations
from foveal.models.loader import Checkpoint, LoadReport, load_parameters
from foveal.models.memory import available_bytes
from foveal.models.names import ParameterSpec, is_ignored, parameter_specs
from foveal.models.precision import Precision, resolve_device, resolve_precision
from foveal.models.siglip import VisionMode
from foveal.models.v4 import V4Model
from foveal.models.v4_aliases import released_tensors
from foveal.models.v4_config import V4Config
from foveal.models.v4_names import is_set_aside, v4_parameter_specs
from foveal.models.v4_weights import WeightChoice, WeightsMode, resolve_weights, stored_packing
from foveal.models.vl2 import VL2Model

Progress = Callable[[int, int], None]
ModelT = TypeVar("ModelT", bound=nn.Module)


@dataclass(frozen=True, slots=True)
class Loaded(Generic[ModelT]):
    """A model on its device, in which types it is kept, and what was read.

    `weights` says for DeepSeek-V4 whether experts are numbers or the checkpoint's codes, and why.
    """

    model: ModelT
    precision: Precision
    report: LoadReport
    weights: WeightChoice | None = None
    fidelity: Fidelity = "plain"


def load_vl2(
    folder: Path,
    config: VL2Config,
    *,
    dtype: str = "auto",
    device: str = "auto",
    vision_mode: VisionMode = "official",
    progress: Progress | None = None,
) -> Loaded[VL2Model]:
    """Build a DeepSeek-VL2 model from `folder`. Raises CheckpointError, ResourceError, PromptError."""
    specs = parameter_specs(config)
    where, precision = _place(folder, specs, dtype, device)
    checkpoint = Checkpoint.open(folder)
    make = precision.factory(where)
    model = VL2Model(config, vision=make, language=make, vision_mode=vision_mode)
    report = _fill(model, specs, checkpoint, progress, lambda name: is_ignored(name, config))
    return Loaded(model.eval(), precision, report)


def load_v4(
    folder: Path,
    config: V4Config,
    *,
    dtype: str = "auto",
    device: str = "auto",
    with_vision: bool = True,
    weights: WeightsMode = "auto",
    fidelity: Fidelity = "plain",
    progress: Progress | None = None,
) -> Loaded[V4Model]:
    """Build a DeepSeek-V4 model from `folder`; without vision no tensor of tower and aligner is read.

    `weights` "packed" keeps routed experts in the checkpoint's codes, "dense" turns them into numbers, "auto" decides
    by the free memory. `fidelity` "release-rounding" simulates the release's rounding (`models.fidelity`). Raises
    CheckpointError, ResourceError, PromptError.
    """
    check_fidelity(fidelity)
    specs = v4_parameter_specs(config, with_vision=with_vision)
    checkpoint = Checkpoint.open(folder, spelling=released_tensors)
    where = resolve_device(device)
    stored = stored_packing(specs, checkpoint.tensors)
    choice = resolve_weights(
        specs,
        stored,
        dtype=dtype,
        device=where,
        weights=weights,
        available_bytes=_free_bytes(where),
    )
    choice.require_room(folder.name)
    make = choice.precision.factory(where)
    language = replace(make, packing=choice.packing, rounding=ROUNDINGS[fidelity])
    model = V4Model(config, vision=make, language=language, with_vision=with_vision)

    def ignored(name: str) -> bool:
        return is_set_aside(name, config, with_vision=with_vision)

    report = _fill(model, specs, checkpoint, progress, ignored)
    return Loaded(model.eval(), choice.precision, report, choice, fidelity)


def _free_bytes(device: torch.device) -> int | None:
    if device.type == "cuda":
        return int(torch.cuda.mem_get_info(device)[0])
    return available_bytes()


def _place(
    folder: Path, specs: Sequence[ParameterSpec], dtype: str, device: str
) -> tuple[torch.device, Precision]:
    """Where the model goes and in which type; refuses what the memory cannot hold."""
    where = resolve_device(device)
    count = sum(math.prod(spec.shape) for spec in specs)
    free = available_bytes() if where.type == "cpu" else None
    precision = resolve_precision(dtype, where, num_parameters=count, available_bytes=free)
    needed = count * precision.dtype.itemsize
    if free is not None and needed > free:
        raise ResourceError(
            f"{precision.name} weights need {needed / 1e9:.1f} GB, but {free / 1e9:.1f} GB of memory are free; "
            f"`foveal fit {folder.name}` shows what each dtype needs"
        )
    return where, precision


def _fill(
    model: nn.Module,
    specs: Sequence[ParameterSpec],
    checkpoint: Checkpoint,
    progress: Progress | None,
    ignored: Callable[[str], bool],
) -> LoadReport:
    return load_parameters(specs, checkpoint, destinations(model), progress, ignored=ignored)
