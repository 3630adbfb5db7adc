"""What a model needs, said before anything is loaded: tensors, parameters, memory per format, tokens per picture.

Everything follows from `config.json` alone; an index or the weight files, where they are there, are compared with it.
No tensor is read and torch is not imported. Sizes of weights and cache are exact; those of activations are estimates,
made of the largest intermediate results that the runner holds at a time.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Set
from dataclasses import dataclass
from pathlib import Path
from typing import Literal, TypeAlias

from foveal.errors import CheckpointError
from foveal.models.config import LanguageConfig, VL2Config, read_json
from foveal.models.names import (
    ParameterSpec,
    Part,
    ignored_tensor_shapes,
    is_ignored,
    parameter_specs,
)
from foveal.models.safetensors_header import read_header

FormatName: TypeAlias = Literal["float32", "bfloat16", "float16"]
# "packed": experts in the checkpoint's codes, everything else bfloat16. DeepSeek-V4 only.
PlanName: TypeAlias = FormatName | Literal["packed"]
FORMAT_BYTES: Mapping[FormatName, int] = {"float32": 4, "bfloat16": 2, "float16": 2}

# Python, torch and the tokenizer before any weight is there (0.25 GB resident), and work buffers of the libraries.
PROCESS_BYTES = 400 * 10**6
# The runner's pieces (runner/runner.py): patches that go through the tower, and rows that are prefilled, at a time.
PATCHES_PER_PASS = 1024
PREFILL_ROWS = 2048


# --- tensors ----------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class InventoryTensor:
    """One tensor of a complete checkpoint. `is_used` is False for those that the model drops."""

    name: str
    shape: tuple[int, ...]
    part: Part
    is_used: bool = True

    @property
    def num_elements(self) -> int:
        return math.prod(self.shape)


def checkpoint_inventory(config: VL2Config) -> list[InventoryTensor]:
    """Every tensor that the vendor's checkpoint of this shape holds, the unused pooling head included (spec 2.6)."""
    tensors = [
        InventoryTensor(source.name, source.shape, spec.part)
        for spec in parameter_specs(config)
        for source in spec.sources
    ]
    unused = ignored_tensor_shapes(config).items()
    return tensors + [InventoryTensor(name, shape, "vision", False) for name, shape in unused]


@dataclass(frozen=True, slots=True)
class ModelFiles:
    """A model folder beside the inventory of its configuration.

    `source` says where the tensor names come from: the index, the weight files' headers, or, where neither is there,
    the configuration. `missing` are used tensors that no file has, `extra` tensors that the model does not know.
    """

    source: Literal["index", "files", "config"]
    num_tensors: int
    num_files: int
    missing_files: tuple[str, ...] = ()
    missing: tuple[str, ...] = ()
    extra: tuple[str, ...] = ()


def inspect_folder(folder: Path, config: VL2Config) -> ModelFiles:
    """Compare the tensor names in `folder` with those that `config` needs. Weights need not be there.

    Raises CheckpointError for an index or a weight file that cannot be read.
    """
    inventory = checkpoint_inventory(config)
    used = {tensor.name for tensor in inventory if tensor.is_used}
    return compare_folder(folder, used, len(inventory), lambda name: is_ignored(name, config))


def compare_folder(
    folder: Path,
    used: Set[str],
    num_tensors: int,
    is_known: Callable[[str], bool],
    spelling: Callable[[str], Iterable[str]] = lambda name: (name,),
) -> ModelFiles:
    """The names in `folder` beside `used`, of `num_tensors` in a complete checkpoint.

    Unused names are extra unless `is_known`. `spelling` turns a file's name into the tensors that it stands for.
    """
    indexes = sorted(folder.glob("*.safetensors.index.json"))
    paths = sorted(folder.glob("*.safetensors"))
    source: Literal["index", "files"] = "files"
    absent: tuple[str, ...] = ()
    if indexes:
        weight_map = read_json(indexes[0]).get("weight_map")
        if not isinstance(weight_map, dict):
            raise CheckpointError(f"{indexes[0]} has no 'weight_map'; download it again")
        source, names = "index", list(weight_map)
        files = sorted({str(name) for name in weight_map.values()})
        absent = tuple(name for name in files if not (folder / name).is_file())
    elif paths:
        files = [path.name for path in paths]
        names = [name for path in paths for name in read_header(path)]
    else:
        return ModelFiles("config", num_tensors, 0)
    found = {new for name in names for new in spelling(name)}
    extra = sorted(name for name in found - used if not is_known(name))
    missing = tuple(sorted(used - found))
    return ModelFiles(source, len(set(names)), len(files), absent, missing, tuple(extra))


# --- pictures ---------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class PictureCost:
    """What a picture cut into `cols` x `rows` local tiles costs; `num_tiles` counts the global view too."""

    cols: int
    rows: int
    num_tiles: int
    num_tokens: int


def picture_cost(config: VL2Config, cols: int, rows: int) -> PictureCost:
    return PictureCost(cols, rows, 1 + cols * rows, config.num_image_tokens(cols, rows))


def picture_costs(config: VL2Config) -> tuple[PictureCost, ...]:
    """Every tile grid that the model's candidate resolutions allow, cheapest first."""
    side = config.vision.image_size
    grids = {(max(1, w // side), max(1, h // side)) for w, h in config.candidate_resolutions}
    costs = (picture_cost(config, cols, rows) for cols, rows in grids)
    return tuple(sorted(costs, key=lambda cost: (cost.num_tokens, cost.cols)))


# --- memory -----------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class FormatPlan:
    """Bytes that one weight format takes, for the context of its `MemoryPlan`.

    `cache_bytes` is `cache_bytes_per_token` times the context, and what a request takes whatever its length.
    `largest_context` is the longest context that fits into the memory available: 0 if none does, None if the memory is
    not known.
    """

    name: PlanName
    weight_bytes: int
    cache_bytes_per_token: int
    cache_bytes: int
    activation_bytes: int
    total_bytes: int
    fits: bool | None
    largest_context: int | None


@dataclass(frozen=True, slots=True)
class MemoryPlan:
    """One row for each format. `total_bytes` of a row is weights, cache, activations and `process_bytes`.

    `file_bytes` is what the tensors take in the vendor's files, where that is not two bytes a number.
    """

    context: int
    available_bytes: int | None
    process_bytes: int
    num_tensors: int
    num_parameters: int
    num_used_parameters: int
    formats: tuple[FormatPlan, ...]
    file_bytes: int | None = None

    @property
    def fitting(self) -> tuple[PlanName, ...]:
        """Names of the formats that fit."""
        return tuple(plan.name for plan in self.formats if plan.fits)


def plan_memory(
    config: VL2Config,
    *,
    available_bytes: int | None,
    context: int | None = None,
    device: Literal["cpu", "cuda"] = "cpu",
) -> MemoryPlan:
    """What a model of shape `config` needs in each format, with a cache of `context` tokens (None: all it can).

    `available_bytes` is what the machine can still give (`models.memory.available_bytes()`); None leaves the verdicts
    open.
    """
    longest = config.language.max_position_embeddings
    wanted = min(context or longest, longest)
    specs = parameter_specs(config)
    inventory = checkpoint_inventory(config)
    return MemoryPlan(
        context=wanted,
        available_bytes=available_bytes,
        process_bytes=PROCESS_BYTES,
        num_tensors=len(inventory),
        num_parameters=sum(tensor.num_elements for tensor in inventory),
        num_used_parameters=sum(math.prod(spec.shape) for spec in specs),
        formats=tuple(
            _format_plan(config, specs, name, wanted, available_bytes, device)
            for name in FORMAT_BYTES
        ),
    )


def _format_plan(
    config: VL2Config,
    specs: list[ParameterSpec],
    name: FormatName,
    context: int,
    available_bytes: int | None,
    device: Literal["cpu", "cuda"],
) -> FormatPlan:
    weights = weight_bytes(specs, name)
    per_token = cache_bytes_per_token(config.language, name, device)

    def total(tokens: int) -> int:
        acts = activation_bytes(config, name, tokens)
        return weights + per_token * tokens + acts + PROCESS_BYTES

    return FormatPlan(
        name=name,
        weight_bytes=weights,
        cache_bytes_per_token=per_token,
        cache_bytes=per_token * context,
        activation_bytes=activation_bytes(config, name, context),
        total_bytes=total(context),
        fits=None if available_bytes is None else total(context) <= available_bytes,
        largest_context=None
        if available_bytes is None
        else largest(
            lambda tokens: total(tokens) <= available_bytes, config.language.max_position_embeddings
        ),
    )


def largest(holds: Callable[[int], bool], most: int) -> int:
    """The largest number in [0, most] for which `holds`, which is true up to some point and false beyond."""
    low, high = 0, most
    while low < high:
        middle = (low + high + 1) // 2
        low, high = (middle, high) if holds(middle) else (low, middle - 1)
    return low


def weight_bytes(specs: Iterable[ParameterSpec], name: FormatName) -> int:
    """Memory of all parameters; those marked so stay float32 in every format."""
    return sum(
        math.prod(spec.shape) * (4 if spec.dtype == "float32" else FORMAT_BYTES[name])
        for spec in specs
    )


def cache_bytes_per_token(
    config: LanguageConfig, name: FormatName, device: Literal["cpu", "cuda"] = "cpu"
) -> int:
    """KV cache of one token in all layers. It has the type of activations: float32 on CPUs and with float16."""
    is_wide = device == "cpu" or name == "float16"
    size = 4 if is_wide else FORMAT_BYTES[name]
    return config.num_hidden_layers * config.cache_row_elements() * size


def activation_bytes(config: VL2Config, name: FormatName, context: int) -> int:
    """Estimate of the largest intermediate results, in float32: the tower's pass or a prefill chunk, never both."""
    numbers = max(
        _tower_numbers(config), _prefill_numbers(config, min(context, PREFILL_ROWS), context)
    )
    if FORMAT_BYTES[name] < 4:
        numbers += _widened_numbers(config)
    return 4 * (numbers + _held_numbers(config, context))


def _tower_numbers(config: VL2Config) -> int:
    """Residual stream and norm, and the wider of q/k/v with their mix and the MLP before and after its activation."""
    v = config.vision
    rows = max(1, PATCHES_PER_PASS // v.grid**2) * v.grid**2
    return rows * (2 * v.width + max(5 * v.width, 2 * v.mlp_hidden))


def _prefill_numbers(config: VL2Config, rows: int, context: int) -> int:
    """Residual stream and norm, and the widest of attention, dense MLP, routed experts."""
    c = config.language
    parts = [4 * c.intermediate_size * rows]
    if c.n_routed_experts is not None:
        # Rows sorted by expert, results by expert, their concatenation, and that times the shares.
        parts.append(4 * int(c.num_experts_per_tok or 0) * c.hidden_size * rows)
        parts.append(4 * (c.n_shared_experts or 0) * c.moe_intermediate_size * rows)
    if c.uses_mla:
        # Keys and values of every head are expanded from the latents of the whole context.
        head = c.qk_nope_head_dim + c.v_head_dim + c.qk_head_dim
        parts.append(c.num_attention_heads * (head * context + 2 * c.qk_head_dim * rows))
    else:
        parts.append(4 * c.num_attention_heads * c.head_dim * rows)
    # A later chunk needs a mask over the whole context: booleans and what the attention call makes of them.
    mask = rows * context * 5 // 4 if context > rows else 0
    return rows * 2 * c.hidden_size + mask + max(parts)


def _widened_numbers(config: VL2Config) -> int:
    """A 16-bit weight that is turned to float32 for one product of many rows, where the CPU has no fast 16-bit one."""
    c, v = config.language, config.vision
    return max(2 * c.intermediate_size * c.hidden_size, v.mlp_hidden * v.width)


def _held_numbers(config: VL2Config, context: int) -> int:
    """Input rows of the prompt, tiles of one picture of the largest grid, and a few rows of logits."""
    c, tiles = config.language, max(cost.num_tiles for cost in picture_costs(config))
    pixels = 3 * config.vision.image_size**2
    return 2 * context * c.hidden_size + 2 * tiles * pixels + 4 * c.vocab_size
