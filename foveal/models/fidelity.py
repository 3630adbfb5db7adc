"""The rounding that the released DeepSeek-V4 code does while it runs, simulated; off unless it is asked for by name.

    plain               the checkpoint's numbers in the chosen precision (default)
    cache-rounding      what the release's cache holds:
        raw and compressed keys, but for their rotated dims -> FP8, 64 to a scale       (spec 4.3, 4.5)
        indexer queries and keys: Hadamard transform, then FP4, 32 to a scale       (spec 3.4, 3.5)
    release-rounding    that, and
        rows of products with FP8 and FP4 weights -> FP8, 128 to a scale       (spec 3.2, 3.3)
        everything between modules, and the norm of query heads in all its steps -> bfloat16       (spec 2.7, 3.1)

Each rounded number is put back into the type it came in, so products run as before. What stays different from the
release: the order of sums, the attention weights (rounded there to bfloat16 against a running maximum), and the
indexer's sums over heads. What the mode changes is measured in docs/v4-fidelity.md.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, TypeAlias

import torch
from torch import Tensor
from torch.nn import functional as F

from foveal import ops
from foveal.errors import PromptError
from foveal.ops import Weight

Fidelity: TypeAlias = Literal["plain", "cache-rounding", "release-rounding"]

PRODUCT_BLOCK = 128  # numbers of a row that share a scale before a product
KEY_BLOCK = 64
INDEX_BLOCK = 32
FP8_LARGEST, FP8_FLOOR = 448.0, 1e-4
FP4_LARGEST, FP4_FLOOR = 6.0, 6 * 2.0**-126


def power_of_two_above(x: Tensor) -> Tensor:
    """The smallest power of two that is at least `x` (float32, positive, normal), told from its bits."""
    bits = x.view(torch.int32)
    exponent = (bits >> 23) + (bits & 0x7FFFFF != 0)
    power: Tensor = (exponent << 23).view(torch.float32)
    return power


def _scales(blocks: Tensor, largest: float, floor: float) -> Tensor:
    """A power of two for each block [..., n, block] that brings its numbers within `largest` -> [..., n, 1]."""
    reach = blocks.abs().amax(-1, keepdim=True).clamp(min=floor)
    # The release multiplies by the float32 reciprocal.
    return power_of_two_above(reach * torch.tensor(1 / largest, dtype=torch.float32))


def _blocks(x: Tensor, block: int) -> Tensor:
    """[..., n] -> float32 [..., blocks, block]; zeros fill a last block that is not full and change no scale."""
    blocks: Tensor = F.pad(x.float(), (0, -x.shape[-1] % block)).unflatten(-1, (-1, block))
    return blocks


def _joined(blocks: Tensor, like: Tensor) -> Tensor:
    return blocks.flatten(-2)[..., : like.shape[-1]].to(like.dtype)


def round_fp8(x: Tensor, block: int) -> Tensor:
    """`x` as e4m3 codes with a power-of-two scale a block would give it back. Source: spec 3.3."""
    blocks = _blocks(x, block)
    scales = _scales(blocks, FP8_LARGEST, FP8_FLOOR)
    codes = (blocks / scales).clamp(-FP8_LARGEST, FP8_LARGEST).to(torch.float8_e4m3fn)
    return _joined(codes.float() * scales, x)


def round_fp4(x: Tensor, block: int = INDEX_BLOCK) -> Tensor:
    """`x` as e2m1 codes with a power-of-two scale a block would give it back; ties to the even code. Spec 3.4."""
    blocks = _blocks(x, block)
    scales = _scales(blocks, FP4_LARGEST, FP4_FLOOR)
    scaled = (blocks / scales).clamp(-FP4_LARGEST, FP4_LARGEST)
    size = scaled.abs()
    # Distance of neighbours on the grid 0, 0.5, 1, 1.5, 2, 3, 4, 6; `round` sends ties to the even multiple.
    step = torch.where(size < 2, 0.5, torch.where(size < 4, 1.0, 2.0))
    return _joined((scaled / step).round() * step * scales, x)


def hadamard(x: Tensor) -> Tensor:
    """The Walsh-Hadamard transform of the last dim (a power of two), natural order, orthogonal. Source: spec 3.5."""
    width = x.shape[-1]
    assert width & (width - 1) == 0, f"a Hadamard transform needs a power of two, not {width}"
    out, half = x.float(), 1
    while half < width:
        pairs = out.unflatten(-1, (-1, 2, half))
        low, high = pairs[..., 0, :], pairs[..., 1, :]
        out = torch.stack((low + high, low - high), -2).flatten(-3)
        half *= 2
    turned: Tensor = (out * width**-0.5).to(x.dtype)
    return turned


@dataclass(frozen=True, slots=True)
class Rounding:
    """Which of the release's roundings are simulated. Each method gives its input back where its part is off."""

    products: bool = False
    keys: bool = False
    index: bool = False
    bfloat16: bool = False

    def narrow(self, x: Tensor) -> Tensor:
        """What one module hands to the next."""
        return x.to(torch.bfloat16).to(x.dtype) if self.bfloat16 else x

    def operand(self, x: Tensor) -> Tensor:
        """Rows of a product whose weight the release stores in FP8 or FP4."""
        return round_fp8(self.narrow(x), PRODUCT_BLOCK) if self.products else x

    def head_norm(self, q: Tensor, eps: float) -> Tensor:
        """The norm of each query head [T, H, d], which has no weight; in bfloat16 throughout in the release."""
        if not self.bfloat16:
            rows = q.float()
            mean = rows.square().mean(-1, keepdim=True)
            return (rows * torch.rsqrt(mean + eps)).to(q.dtype)
        # Step by step: torch on CPUs rounds inside its bfloat16 mean and rsqrt, the release's GPUs at their ends.
        rows = q.to(torch.bfloat16)
        mean = rows.square().float().mean(-1, keepdim=True).to(torch.bfloat16)
        factor = torch.rsqrt((mean + eps).float()).to(torch.bfloat16)
        return (rows * factor).to(q.dtype)

    def key_rows(self, rows: Tensor, rotated: int) -> Tensor:
        """Keys [n, d] after rotation; their last `rotated` dims stay as they are."""
        rows = self.narrow(rows)
        if not self.keys:
            return rows
        kept, turned = rows.split((rows.shape[-1] - rotated, rotated), -1)
        return torch.cat((round_fp8(kept, KEY_BLOCK), turned), -1)

    def index_rows(self, rows: Tensor) -> Tensor:
        """Indexer queries or keys [..., di] after rotation."""
        rows = self.narrow(rows)
        return round_fp4(self.narrow(hadamard(rows))) if self.index else rows

    def moe(
        self, x: Tensor, weights: Tensor, ids: Tensor, w13: Weight, w2: Weight, limit: float
    ) -> Tensor:
        """`ops.moe`, or its rounded form."""
        if not self.products:
            return ops.moe(x, weights, ids, w13, w2, limit)
        return _rounded_moe(self, x, weights, ids, w13, w2, limit)


EXACT = Rounding()
ROUNDINGS: dict[Fidelity, Rounding] = {
    "plain": EXACT,
    "cache-rounding": Rounding(keys=True, index=True),
    "release-rounding": Rounding(products=True, keys=True, index=True, bfloat16=True),
}


def check_fidelity(name: str) -> None:
    """Raises PromptError for a mode that does not exist."""
    if name not in ROUNDINGS:
        raise PromptError(f"fidelity {name!r} is unknown; choose one of {', '.join(ROUNDINGS)}")


def _rounded_moe(
    rounding: Rounding,
    x: Tensor,
    weights: Tensor,
    ids: Tensor,
    w13: Weight,
    w2: Weight,
    limit: float,
) -> Tensor:
    """Expert by expert; a token's weight is applied before the second product, where it meets the rounding (4.8)."""
    out = torch.zeros_like(x, dtype=torch.float32)
    rows = rounding.operand(x)
    for expert in ids.unique().tolist():
        tokens, slots = (ids == expert).nonzero(as_tuple=True)
        gate_up = rounding.narrow(ops.linear(rows[tokens], w13[expert]))
        inner = ops.swiglu(gate_up.float(), limit) * weights[tokens, slots].unsqueeze(-1)
        product = ops.linear(rounding.operand(inner.to(x.dtype)), w2[expert])
        out[tokens] += rounding.narrow(product).float()
    return out
