"""Modules shared by the model families: linear maps, norms, rotary angles, experts.

Parameters are created empty (`torch.empty`) in the storage type they are given; the loader fills them.
Norms, router and residual stream are float32 always; `act_dtype` is the type in which the big products
get their rows (float32 on CPUs).
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any, Literal

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from foveal import ops
from foveal.models.config import LanguageConfig, rope_scaling_type
from foveal.models.fidelity import EXACT, Rounding


@dataclass(frozen=True, slots=True)
class Factory:
    """Where and in which types one part of a model keeps its numbers.

    `packing` is the format in which routed experts stay as the checkpoint has them (None: numbers like the others);
    `rounding` says which of a release's roundings are simulated.
    """

    dtype: torch.dtype = torch.float32
    act_dtype: torch.dtype = torch.float32
    device: torch.device | str = "cpu"
    packing: ops.Packing | None = None
    rounding: Rounding = EXACT

    @property
    def exact(self) -> Factory:
        """The same for products whose rows a release does not round."""
        return replace(self, rounding=EXACT)

    def empty(self, *shape: int) -> nn.Parameter:
        """A parameter in the part's storage type."""
        tensor = torch.empty(shape, dtype=self.dtype, device=self.device)
        return nn.Parameter(tensor, requires_grad=False)

    def empty32(self, *shape: int) -> nn.Parameter:
        """A parameter that stays float32: norms, router, position table."""
        tensor = torch.empty(shape, dtype=torch.float32, device=self.device)
        return nn.Parameter(tensor, requires_grad=False)


class Linear(nn.Module):
    """`weight` [out, in] and, if asked for, `bias` [out], over `ops.linear`."""

    def __init__(self, inputs: int, outputs: int, make: Factory, *, bias: bool = False) -> None:
        super().__init__()
        self.weight = make.empty(outputs, inputs)
        self.bias = make.empty(outputs) if bias else None
        self.rounding = make.rounding

    def forward(self, x: Tensor) -> Tensor:
        rows = self.rounding.operand(x)
        return self.rounding.narrow(ops.linear(rows, self.weight, self.bias))


class RMSNorm(nn.Module):
    """Float32 inside; the result has the activation type."""

    def __init__(self, width: int, make: Factory, eps: float) -> None:
        super().__init__()
        self.weight = make.empty32(width)
        self.eps = eps
        self.act_dtype = make.act_dtype
        self.rounding = make.rounding

    def forward(self, x: Tensor) -> Tensor:
        out = ops.rms_norm(x, self.weight, self.eps).to(self.act_dtype)
        return self.rounding.narrow(out)


class SwiGLU(nn.Module):
    """down(silu(gate(x)) * up(x)); gate and up are one weight; `limit` clamps both (V4). Source: spec 6.2."""

    def __init__(self, width: int, inner: int, make: Factory, *, limit: float = 0.0) -> None:
        super().__init__()
        self.limit = limit
        self.gate_up = Linear(width, 2 * inner, make)
        self.down = Linear(inner, width, make)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.down(ops.swiglu(self.gate_up(x), self.limit))
        return out


def merge_cells(grid: Tensor, k: int, *, pad: bool) -> Tensor:
    """Concatenate k x k neighbouring cells: [B, h, w, C] -> [B, my * mx, C * k * k], channel slowest.

    A rest is padded with zeros at the bottom and right, or dropped where `pad` is false. Source: VL2 spec 5.1, V4 7.6.
    """
    height, width = grid.shape[1:3]
    if pad:
        grid = F.pad(grid, (0, 0, 0, -width % k, 0, -height % k))
    my, mx = grid.shape[1] // k, grid.shape[2] // k
    cells = (
        grid[:, : my * k, : mx * k].unflatten(2, (mx, k)).unflatten(1, (my, k))
    )  # [B, my, ky, mx, kx, C]
    merged: Tensor = cells.permute(0, 1, 3, 5, 2, 4).flatten(3).flatten(1, 2)
    return merged


def router_rule(c: LanguageConfig) -> ops.RouterRule:
    """The routing rule of a checked configuration (spec 6.6)."""
    grouped = c.topk_method in ("group_limited_greedy", "noaux_tc")
    scoring: Literal["softmax", "sigmoid"] = "sigmoid" if c.scoring_func == "sigmoid" else "softmax"
    return ops.RouterRule(
        top_k=int(c.num_experts_per_tok or 0),
        scoring=scoring,
        renormalise=c.norm_topk_prob,
        scale=c.routed_scaling_factor,
        num_groups=(c.n_group or 1) if grouped else 1,
        kept_groups=(c.topk_group or 1) if grouped else 1,
        group_score="top2" if c.topk_method == "noaux_tc" else "max",
    )


class Router(nn.Module):
    """Scores and choice of experts, float32 throughout. `bias` steers the choice and never the weights."""

    def __init__(
        self, width: int, experts: int, make: Factory, rule: ops.RouterRule, *, bias: bool
    ) -> None:
        super().__init__()
        self.weight = make.empty32(experts, width)
        self.bias = make.empty32(experts) if bias else None
        self.rule = rule

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        return ops.route(ops.linear(x.float(), self.weight), self.bias, self.rule)


class Experts(nn.Module):
    """The routed experts' weights, stacked: `w13` [E, 2M, D], `w2` [E, D, M]."""

    def __init__(
        self, count: int, width: int, inner: int, make: Factory, *, limit: float = 0.0
    ) -> None:
        super().__init__()
        self.limit, self.rounding = limit, make.rounding
        self.w13 = make.empty(count, 2 * inner, width)
        self.w2 = make.empty(count, width, inner)

    def forward(self, x: Tensor, weights: Tensor, ids: Tensor) -> Tensor:
        return self.rounding.moe(x, weights, ids, self.w13, self.w2, self.limit)


class PackedExperts(nn.Module):
    """The same, kept in the checkpoint's codes and scales (`ops.packed`); an expert becomes numbers when it runs."""

    w13_codes: Tensor
    w13_scales: Tensor
    w2_codes: Tensor
    w2_scales: Tensor

    def __init__(
        self,
        count: int,
        width: int,
        inner: int,
        make: Factory,
        packing: ops.Packing,
        *,
        limit: float = 0.0,
    ) -> None:
        super().__init__()
        self.limit, self.rounding, self.packing = limit, make.rounding, packing
        for name, rows, columns in (("w13", 2 * inner, width), ("w2", width, inner)):
            weight = ops.PackedWeight.empty((count, rows, columns), packing, make.device)
            self.register_buffer(f"{name}_codes", weight.codes)
            self.register_buffer(f"{name}_scales", weight.scales)

    @property
    def w13(self) -> ops.PackedWeight:
        return ops.PackedWeight(self.w13_codes, self.w13_scales, self.packing.format)

    @property
    def w2(self) -> ops.PackedWeight:
        return ops.PackedWeight(self.w2_codes, self.w2_scales, self.packing.format)

    def forward(self, x: Tensor, weights: Tensor, ids: Tensor) -> Tensor:
        return self.rounding.moe(x, weights, ids, self.w13, self.w2, self.limit)


def routed_experts(
    count: int, width: int, inner: int, make: Factory, *, limit: float = 0.0
) -> Experts | PackedExperts:
    """Routed experts in the form that `make` asks for."""
    if make.packing is None:
        return Experts(count, width, inner, make, limit=limit)
    return PackedExperts(count, width, inner, make, make.packing, limit=limit)


def destinations(model: nn.Module) -> dict[str, Tensor | ops.PackedWeight]:
    """What a loader fills, by the names of the name table: parameters, and the stacks of packed experts."""
    found: dict[str, Tensor | ops.PackedWeight] = {
        name: parameter.data for name, parameter in model.named_parameters()
    }
    for name, module in model.named_modules():
        if isinstance(module, PackedExperts):
            found |= {f"{name}.w13": module.w13, f"{name}.w2": module.w2}
    return found


class MoE(nn.Module):
    """Routed experts, plus shared ones that every token takes. `x` [T, D] -> [T, D]. Source: spec 6.7."""

    def __init__(self, c: LanguageConfig, make: Factory) -> None:
        super().__init__()
        width, inner, count = c.hidden_size, c.moe_intermediate_size, int(c.n_routed_experts or 0)
        has_bias = c.topk_method == "noaux_tc"
        self.router = Router(width, count, make, router_rule(c), bias=has_bias)
        self.experts = Experts(count, width, inner, make)
        shared = inner * (c.n_shared_experts or 0)
        self.shared = SwiGLU(width, shared, make) if shared else None

    def forward(self, x: Tensor) -> Tensor:
        weights, ids = self.router(x)
        out: Tensor = self.experts(x, weights, ids)
        return out if self.shared is None else out + self.shared(x).float()


@dataclass(frozen=True, slots=True)
class RotaryTable:
    """Rotary angles as a function of position. Frequencies are float32 whatever the model's type (spec trap 10).

    `scale` multiplies cos and sin, `softmax_factor` the attention scale; both are 1 without YaRN. Source: spec 6.5.
    """

    inv_freq: Tensor
    scale: float = 1.0
    softmax_factor: float = 1.0

    def __call__(self, positions: Tensor) -> tuple[Tensor, Tensor]:
        """cos and sin, each [T, dim / 2] float32, for `positions` [T]."""
        angles = positions.to(torch.float32)[:, None] * self.inv_freq.to(positions.device)[None, :]
        return angles.cos() * self.scale, angles.sin() * self.scale


def rotary_table(c: LanguageConfig) -> RotaryTable:
    """The table that a configuration asks for.

    "dynamic" scaling starts beyond `max_position_embeddings`, which is also this engine's longest context, so its
    angles are the plain ones.
    """
    dim = c.rope_dim
    exponents = torch.arange(0, dim, 2, dtype=torch.float32) / dim
    plain = 1.0 / (c.rope_theta**exponents)
    if c.rope_scaling is None:
        return RotaryTable(plain)
    kind = rope_scaling_type(c.rope_scaling)
    if kind == "linear":
        return RotaryTable(plain / float(c.rope_scaling["factor"]))
    if kind == "yarn":
        return _yarn(plain, c.rope_theta, c.rope_scaling)
    return RotaryTable(plain)


def yarn_frequencies(
    plain: Tensor, base: float, scaling: Mapping[str, Any], *, trained: int
) -> Tensor:
    """Frequencies under YaRN: fast pairs keep theirs, slow ones are divided by the factor, a ramp between.

    `plain` [dim / 2] are the frequencies of `base`; `trained` is the context that `scaling` takes for granted.
    """
    dim, factor = 2 * plain.shape[0], float(scaling["factor"])
    context = float(scaling.get("original_max_position_embeddings", trained))

    def corrected(turns: float) -> float:
        return dim * math.log(context / (turns * 2 * math.pi)) / (2 * math.log(base))

    low = max(math.floor(corrected(float(scaling.get("beta_fast", 32)))), 0)
    high: float = min(math.ceil(corrected(float(scaling.get("beta_slow", 1)))), dim - 1)
    if high == low:
        high += 0.001
    ramp = ((torch.arange(dim // 2, dtype=torch.float32) - low) / (high - low)).clamp(0, 1)
    return plain / factor * ramp + plain * (1 - ramp)


def _yarn(plain: Tensor, base: float, scaling: Mapping[str, Any]) -> RotaryTable:
    factor = float(scaling["factor"])

    def magnitude(weight: float) -> float:
        return 1.0 if factor <= 1 else 0.1 * weight * math.log(factor) + 1.0

    per_head, all_dims = float(scaling.get("mscale", 1)), float(scaling.get("mscale_all_dim", 0))
    softmax_factor = magnitude(all_dims) ** 2 if all_dims else 1.0
    frequencies = yarn_frequencies(plain, base, scaling, trained=4096)
    return RotaryTable(frequencies, magnitude(per_head) / magnitude(all_dims), softmax_factor)
