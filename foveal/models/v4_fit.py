"""What a DeepSeek-V4 model needs, said before anything is loaded; the plan of `fit` for this family.

Weights and state are exact, activations are estimates of the largest intermediate results. No torch, no tensor read.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from pathlib import Path
from typing import Literal

from foveal.models.fit import (
    FORMAT_BYTES,
    PREFILL_ROWS,
    PROCESS_BYTES,
    FormatPlan,
    MemoryPlan,
    ModelFiles,
    PlanName,
    compare_folder,
    largest,
)
from foveal.models.names import ParameterSpec
from foveal.models.v4_aliases import released_names
from foveal.models.v4_config import V4Config, V4LanguageConfig
from foveal.models.v4_inventory import FP4_COLUMNS, v4_inventory
from foveal.models.v4_names import is_set_aside, v4_parameter_specs
from foveal.parallel.sharding import Plan

# The runner's pieces (runner/v4_cache.py): rows of a ring that may be taken back, queries that attend at a time.
RING_MARGIN = 8
QUERY_BLOCK = 256
SCALE_COLUMNS = {"fp4": FP4_COLUMNS, "fp8": 128}
Device = Literal["cpu", "cuda"]


def inspect_v4_folder(folder: Path, config: V4Config) -> ModelFiles:
    """Compare the tensor names in `folder` with those that `config` needs. Weights need not be there.

    Raises CheckpointError for an index or a weight file that cannot be read.
    """
    inventory = v4_inventory(config)
    used = {tensor.name for tensor in inventory if tensor.is_used}

    def is_known(name: str) -> bool:
        return is_set_aside(name, config, with_vision=True)

    experts = config.language.n_routed_experts
    return compare_folder(
        folder, used, len(inventory), is_known, lambda name: released_names(name, experts)
    )


def plan_v4_memory(
    config: V4Config,
    *,
    available_bytes: int | None,
    context: int | None = None,
    device: Device = "cpu",
) -> MemoryPlan:
    """What a model of shape `config` needs in each format, with the state of one request of `context` tokens.

    "packed" is there where the release ships packed experts. `available_bytes` None leaves the verdicts open.
    """
    longest = config.language.max_position_embeddings
    wanted = min(context or longest, longest)
    specs, inventory = v4_parameter_specs(config), v4_inventory(config)
    names: list[PlanName] = ["packed", *FORMAT_BYTES] if packed_format(config) else [*FORMAT_BYTES]
    return MemoryPlan(
        context=wanted,
        available_bytes=available_bytes,
        process_bytes=PROCESS_BYTES,
        num_tensors=len(inventory),
        num_parameters=sum(tensor.num_parameters for tensor in inventory),
        num_used_parameters=sum(math.prod(spec.shape) for spec in specs),
        formats=tuple(
            _format_plan(config, specs, name, wanted, available_bytes, device) for name in names
        ),
        file_bytes=sum(tensor.num_bytes for tensor in inventory),
    )


def _format_plan(
    config: V4Config,
    specs: list[ParameterSpec],
    name: PlanName,
    context: int,
    available_bytes: int | None,
    device: Device,
) -> FormatPlan:
    weights = weight_bytes(specs, name, packed_format(config))
    size = state_item_bytes(name, device)

    def total(tokens: int) -> int:
        state = state_bytes(config.language, tokens, size)
        return weights + state + activation_bytes(config, name, tokens) + PROCESS_BYTES

    fits = longest = None
    if available_bytes is not None:
        fits = total(context) <= available_bytes
        longest = largest(
            lambda tokens: total(tokens) <= available_bytes, config.language.max_position_embeddings
        )
    return FormatPlan(
        name=name,
        weight_bytes=weights,
        cache_bytes_per_token=math.ceil(growing_bytes_per_token(config.language, size)),
        cache_bytes=state_bytes(config.language, context, size),
        activation_bytes=activation_bytes(config, name, context),
        total_bytes=total(context),
        fits=fits,
        largest_context=longest,
    )


# --- weights ----------------------------------------------------------------------------------------


def packed_format(config: V4Config) -> Literal["fp4", "fp8"] | None:
    """How the release ships its routed experts; None for numbers."""
    kind = config.language.expert_dtype
    if not config.is_quantized or kind == "bf16":
        return None
    return "fp4" if kind == "fp4" else "fp8"


def weight_bytes(
    specs: Iterable[ParameterSpec],
    name: PlanName,
    packed: Literal["fp4", "fp8"] | None = None,
) -> int:
    """Memory of all parameters. In "packed", routed experts are codes and everything else is bfloat16."""
    size = FORMAT_BYTES["bfloat16" if name == "packed" else name]
    total = 0
    for spec in specs:
        if name == "packed" and packed and spec.plan is Plan.EXPERT:
            total += packed_bytes(packed, spec.shape)
        else:
            fixed = {"float32": 4, "int64": 8}.get(spec.dtype)
            total += math.prod(spec.shape) * (fixed or size)
    return total


def packed_bytes(kind: Literal["fp4", "fp8"], shape: tuple[int, ...]) -> int:
    """Memory of packed matrices: codes, and a scale for each row and block of columns (`ops.packed`).

    FP8 experts come with float32 scales.
    """
    *front, columns = shape
    blocks = -(-columns // SCALE_COLUMNS[kind])
    row = columns // 2 + blocks if kind == "fp4" else columns + 4 * blocks
    return math.prod(front) * row


# --- state ------------------------------------------------------------------------------------------


def state_item_bytes(name: PlanName, device: Device) -> int:
    """Bytes of a number in keys and entries. They have the type of activations: float32 on CPUs and with float16."""
    return 4 if device == "cpu" or name in ("float16", "float32") else 2


def growing_bytes_per_token(c: V4LanguageConfig, size: int) -> float:
    """What each further token adds to a request's state: compressed entries, and indexer keys in ratio-4 layers."""
    widths = ((r, c.head_dim + (c.index_head_dim if r == 4 else 0)) for r in c.ratios if r)
    return sum(width * size / ratio for ratio, width in widths)


def state_bytes(c: V4LanguageConfig, tokens: int, size: int) -> int:
    """State of one request that holds `tokens`: entries, window rings, and what compressors remember (float32)."""
    total = 0
    for ratio in c.ratios:
        total += (c.sliding_window + RING_MARGIN) * c.head_dim * size
        for width in _compressed_widths(c, ratio):
            halves = 2 if ratio == 4 else 1
            total += tokens // ratio * width * size
            total += 2 * (halves * ratio + RING_MARGIN) * halves * width * 4
    return total


def _compressed_widths(c: V4LanguageConfig, ratio: int) -> tuple[int, ...]:
    if not ratio:
        return ()
    return (c.head_dim, c.index_head_dim) if ratio == 4 else (c.head_dim,)


# --- activations ------------------------------------------------------------------------------------


def activation_bytes(config: V4Config, name: PlanName, context: int) -> int:
    """Estimate of the largest intermediate results, in float32: the tower's pass or a prefill chunk, never both."""
    rows = min(context, PREFILL_ROWS)
    numbers = max(_tower_numbers(config), _prefill_numbers(config.language, rows, context))
    if name != "float32":
        numbers += _widened_numbers(config.language)
    # Input rows of the whole prompt, and a few rows of logits.
    held = context * config.language.hidden_size + 4 * config.language.vocab_size
    return 4 * (numbers + held)


def _tower_numbers(config: V4Config) -> int:
    """One picture of the largest block: stream and norm, and the wider of q/k/v with their mix and the MLP."""
    v = config.vision
    if v is None:
        return 0
    patches = v.vision_max_n_token * v.vision_downsample_ratio**2
    return patches * (2 * v.vision_dim + max(5 * v.vision_dim, 3 * v.vision_inter_dim))


def _prefill_numbers(c: V4LanguageConfig, rows: int, context: int) -> int:
    """Streams before and after a sublayer, and the widest of queries, attention scores and routed experts."""
    heads = c.num_attention_heads
    queries = 3 * rows * heads * c.head_dim
    keys = c.sliding_window + QUERY_BLOCK + max((context // r for r in c.ratios if r), default=0)
    # Scores, their masked copy, the copy with the sink, and the weights.
    scores = 4 * min(rows, QUERY_BLOCK) * heads * keys
    experts = 4 * c.num_experts_per_tok * c.hidden_size * rows
    streams = 3 * rows * c.hc_mult * c.hidden_size
    return streams + 4 * c.hidden_size * rows + max(queries + scores, experts)


def _widened_numbers(c: V4LanguageConfig) -> int:
    """A narrow or packed weight that is turned to float32 for one product."""
    attention = c.num_attention_heads * c.head_dim * c.q_lora_rank
    return max(attention, 2 * c.moe_intermediate_size * c.hidden_size)
