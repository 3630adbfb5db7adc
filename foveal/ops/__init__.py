"""The seam under the models: every operation whose body may differ by machine, with its contract.

A model calls `ops.linear(...)` and so on; which body runs is chosen once (`use`) and can be read (`chosen`). Two bodies
exist: `reference` (plain, float32, the oracle) and `library` (torch's own fast calls, the default). No operation sees a
request. Shapes: T tokens, H heads, K chosen experts, E experts, M inner width; widths are named where they matter.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from torch import Tensor

from foveal.ops import library, reference
from foveal.ops.packed import PackedWeight, Packing, Weight
from foveal.ops.types import HyperRule, RouterRule

__all__ = [
    "HyperRule",
    "PackedWeight",
    "Packing",
    "RouterRule",
    "Weight",
    "attention",
    "chosen",
    "compress",
    "encoder_attention",
    "forced",
    "hyper_head",
    "hyper_post",
    "hyper_pre",
    "index_scores",
    "linear",
    "mla_attention",
    "moe",
    "rms_norm",
    "rope_half",
    "rope_interleaved",
    "rope_neighbours",
    "route",
    "route_fixed",
    "sparse_attention",
    "swiglu",
    "top_entries",
    "use",
]

_BODIES: dict[str, dict[str, Callable[..., Any]]] = {
    "linear": {"reference": reference.linear, "library": library.linear},
    "rms_norm": {"reference": reference.rms_norm, "library": library.rms_norm},
    "rope_half": {"reference": reference.rope_half},
    "rope_interleaved": {"reference": reference.rope_interleaved},
    "attention": {"reference": reference.attention, "library": library.attention},
    "mla_attention": {"reference": reference.mla_attention, "library": library.mla_attention},
    "encoder_attention": {
        "reference": reference.encoder_attention,
        "library": library.encoder_attention,
    },
    "route": {"reference": reference.route},
    "moe": {"reference": reference.moe, "library": library.moe},
    "swiglu": {"reference": reference.swiglu},
    "hyper_pre": {"reference": reference.hyper_pre},
    "hyper_post": {"reference": reference.hyper_post},
    "hyper_head": {"reference": reference.hyper_head},
    "rope_neighbours": {"reference": reference.rope_neighbours},
    "sparse_attention": {"reference": reference.sparse_attention},
    "compress": {"reference": reference.compress},
    "index_scores": {"reference": reference.index_scores},
    "top_entries": {"reference": reference.top_entries},
}
_active: dict[str, Callable[..., Any]] = {}
_names: dict[str, str] = {}


def use(body: str) -> None:
    """Choose `body` ("library" or "reference") for every operation that has it; the others keep their reference."""
    for op, bodies in _BODIES.items():
        _names[op] = body if body in bodies else "reference"
        _active[op] = bodies[_names[op]]


def chosen() -> dict[str, str]:
    """Which body each operation runs."""
    return dict(_names)


@contextmanager
def forced(body: str) -> Iterator[None]:
    """Run with another body for the length of a `with` block (tests and comparisons)."""
    before = dict(_names)
    use(body)
    try:
        yield
    finally:
        for op, name in before.items():
            _names[op], _active[op] = name, _BODIES[op][name]


use("library")


def linear(x: Tensor, weight: Weight, bias: Tensor | None = None) -> Tensor:
    """`x` [..., in] times `weight` [out, in] transposed, plus `bias` [out]; result in x's dtype.

    A half-precision weight with float32 `x` is allowed; sums are float32 or better than the weight's own rounding. A
    packed weight gives what its numbers in x's dtype give.
    """
    out: Tensor = _active["linear"](x, weight, bias)
    return out


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """Root-mean-square norm over the last dimension, float32 inside and float32 out. Source: spec 6.1."""
    out: Tensor = _active["rms_norm"](x, weight, eps)
    return out


def rope_half(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotate pairs (j, j + d/2). `x` [T, H, d]; `cos`, `sin` [T, d/2] float32. Source: spec 6.3."""
    out: Tensor = _active["rope_half"](x, cos, sin)
    return out


def rope_interleaved(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotate pairs (2j, 2j + 1); results are stored as halves (all first members, then all second). Spec 6.4."""
    out: Tensor = _active["rope_interleaved"](x, cos, sin)
    return out


def attention(q: Tensor, k: Tensor, v: Tensor, scale: float) -> Tensor:
    """Causal attention of the newest tokens of one sequence.

    `q` [new, H, d] holds the last `new` of the `total` positions of `k` [total, Hkv, d] and `v` [total, Hkv, dv];
    H is a multiple of Hkv. Returns [new, H, dv] in q's dtype; softmax in float32.
    """
    out: Tensor = _active["attention"](q, k, v, scale)
    return out


def mla_attention(
    q_nope: Tensor, q_pe: Tensor, latent: Tensor, k_pe: Tensor, kv_b: Tensor, scale: float
) -> Tensor:
    """Causal multi-head latent attention of the newest tokens of one sequence (spec 6.4).

    `q_nope` [new, H, dn], `q_pe` [new, H, dr] (rotated); `latent` [total, R] (normed), `k_pe` [total, dr] (rotated);
    `kv_b` [H, dn + dv, R]. Returns [new, H, dv]. Few rows use the absorbed form, many the expanded one; both are equal
    up to rounding.
    """
    out: Tensor = _active["mla_attention"](q_nope, q_pe, latent, k_pe, kv_b, scale)
    return out


def encoder_attention(q: Tensor, k: Tensor, v: Tensor, scale: float) -> Tensor:
    """Bidirectional attention inside each tile: all of [B, N, H, d]; softmax in float32."""
    out: Tensor = _active["encoder_attention"](q, k, v, scale)
    return out


def route(logits: Tensor, bias: Tensor | None, rule: RouterRule) -> tuple[Tensor, Tensor]:
    """Choose experts: `logits` [T, E] float32, `bias` [E] float32 for the choice only.

    Returns (weights [T, K] float32, ids [T, K] int64), best first; equal scores go to the lower id. Source: spec 6.6.
    """
    out: tuple[Tensor, Tensor] = _active["route"](logits, bias, rule)
    return out


def moe(
    x: Tensor, weights: Tensor, ids: Tensor, w13: Weight, w2: Weight, limit: float = 0.0
) -> Tensor:
    """Weighted sum of the chosen experts' SwiGLU MLPs (`limit`: see `swiglu`).

    `x` [T, D]; `weights`, `ids` [T, K]; `w13` [E, 2M, D] (gate rows, then up rows); `w2` [E, D, M]; both may be packed.
    Returns [T, D] float32: expert outputs are weighted and summed in float32. Source: spec 6.7.
    """
    out: Tensor = _active["moe"](x, weights, ids, w13, w2, limit)
    return out


def swiglu(gate_up: Tensor, limit: float = 0.0) -> Tensor:
    """silu(first half) * second half over the last dimension.

    A `limit` other than 0 clamps before: the gate from above only, the other half on both sides (V4, spec 4.8).
    """
    out: Tensor = _active["swiglu"](gate_up, limit)
    return out


def hyper_pre(
    streams: Tensor, fn: Tensor, scale: Tensor, base: Tensor, rule: HyperRule
) -> tuple[Tensor, Tensor, Tensor]:
    """Collapse the streams for a sublayer: `streams` [T, N, D] -> (y [T, D], post [T, N], comb [T, N, N]), float32.

    `fn` [2N + N*N, N*D], `scale` [3], `base` [2N + N*N]. Source: V4 spec 4.2.
    """
    out: tuple[Tensor, Tensor, Tensor] = _active["hyper_pre"](streams, fn, scale, base, rule)
    return out


def hyper_post(update: Tensor, streams: Tensor, post: Tensor, comb: Tensor) -> Tensor:
    """Streams after a sublayer: post_k * update + sum over j of comb_jk * stream_j -> [T, N, D] float32."""
    out: Tensor = _active["hyper_post"](update, streams, post, comb)
    return out


def hyper_head(streams: Tensor, fn: Tensor, scale: Tensor, base: Tensor, rule: HyperRule) -> Tensor:
    """The final collapse: [T, N, D] -> [T, D] float32; `fn` [N, N*D], `scale` [1], `base` [N]."""
    out: Tensor = _active["hyper_head"](streams, fn, scale, base, rule)
    return out


def rope_neighbours(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotate neighbouring pairs of the last dims of `x` [T, ..., d] by position; `cos`, `sin` [T, dr / 2] float32.

    The first d - dr entries pass through. A negated `sin` turns back. Source: V4 spec 3.6.
    """
    out: Tensor = _active["rope_neighbours"](x, cos, sin)
    return out


def sparse_attention(q: Tensor, kv: Tensor, visible: Tensor, sink: Tensor, scale: float) -> Tensor:
    """Attention whose keys are its values, with a sink: `q` [n, H, d], `kv` [m, d], `visible` [n, m], `sink` [H].

    The sink enlarges the softmax's denominator by exp(sink) and has no value. Every query sees at least one key.
    Source: V4 spec 3.7.
    """
    out: Tensor = _active["sparse_attention"](q, kv, visible, sink, scale)
    return out


def compress(values: Tensor, gates: Tensor) -> Tensor:
    """Pool windows channel by channel: softmax of `gates` [n, slots, d] over the slots, times `values` -> [n, d]."""
    out: Tensor = _active["compress"](values, gates)
    return out


def index_scores(queries: Tensor, keys: Tensor, head_weights: Tensor) -> Tensor:
    """Indexer scores [n, m]: relu(query . key) summed over heads with weights (V4 spec 4.6).

    `queries` [n, Hi, di], `keys` [m, di], `head_weights` [n, Hi] (may be negative).
    """
    out: Tensor = _active["index_scores"](queries, keys, head_weights)
    return out


def top_entries(scores: Tensor, visible: Tensor, count: int) -> Tensor:
    """The `count` best visible entries of each row as a mask [n, m]; equal scores go to the lower index."""
    out: Tensor = _active["top_entries"](scores, visible, count)
    return out


def route_fixed(logits: Tensor, ids: Tensor, rule: RouterRule) -> Tensor:
    """Weights [T, K] of experts that a table has chosen: `ids` [T, K]."""
    return reference.router_weights(reference.router_scores(logits, rule), ids, rule)
