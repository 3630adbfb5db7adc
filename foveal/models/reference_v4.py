"""The slow truth of DeepSeek-V4: a whole sequence at once, without cache, chunks or rings.

It shares parameters, projections and rotary frequencies with the model. Windows are pooled one by one, visibility is a
full matrix written down from the rules, experts see every token. Source: V4 spec sections 4 and 6.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from foveal.models.context import CompressorRows, SparseRows
from foveal.models.deepseek_v4 import DeepseekV4LM, V4Layer
from foveal.ops import reference


@dataclass(slots=True)
class V4Trace:
    """What a pass saw: `streams` [T, N, D] before each layer and after the last, `hidden` [T, D] after the final norm,
    `entries` [T, m] (chosen compressed entries) of each indexed layer, `experts` [T, K] of each layer."""

    streams: list[Tensor] = field(default_factory=list)
    hidden: Tensor | None = None
    entries: dict[int, Tensor] = field(default_factory=dict)
    experts: dict[int, Tensor] = field(default_factory=dict)


@torch.inference_mode()
def reference_streams(
    model: DeepseekV4LM,
    rows: Tensor,
    ids: Tensor,
    spans: Sequence[tuple[int, int]] = (),
    trace: V4Trace | None = None,
) -> Tensor:
    """Input rows [T, D] and raw ids [T] of one sequence -> final streams [T, N, D]. `spans` are (START, END)."""
    positions = torch.arange(rows.shape[0])
    streams = rows.float().unsqueeze(1).repeat(1, model.config.hc_mult, 1)
    visible = raw_visibility(rows.shape[0], model.config.sliding_window, spans)
    for index, layer in enumerate(model.layers):
        assert isinstance(layer, V4Layer)
        if trace is not None:
            trace.streams.append(streams)
        hc = layer.attn_hc
        row, post, comb = reference.hyper_pre(streams, hc.fn, hc.scale, hc.base, hc.rule)
        x = reference.rms_norm(row, layer.attn_norm.weight, layer.attn_norm.eps)
        update = _attention(layer, x, positions, visible, index, trace)
        streams = reference.hyper_post(update, streams, post, comb)
        hc = layer.ffn_hc
        row, post, comb = reference.hyper_pre(streams, hc.fn, hc.scale, hc.base, hc.rule)
        x = reference.rms_norm(row, layer.ffn_norm.weight, layer.ffn_norm.eps)
        streams = reference.hyper_post(_experts(layer, x, ids, index, trace), streams, post, comb)
    if trace is not None:
        trace.streams.append(streams)
    return streams


@torch.inference_mode()
def reference_v4_forward(
    model: DeepseekV4LM,
    rows: Tensor,
    ids: Tensor,
    spans: Sequence[tuple[int, int]] = (),
    trace: V4Trace | None = None,
) -> Tensor:
    """Input rows [T, D] -> logits [T, vocabulary] float32."""
    hidden = model.collapse(reference_streams(model, rows, ids, spans, trace))
    if trace is not None:
        trace.hidden = hidden
    return reference.linear(hidden, model.lm_head.weight, None).float()


def raw_visibility(count: int, window: int, spans: Sequence[tuple[int, int]]) -> Tensor:
    """[T, T]: a query sees the newest `window` positions up to itself, and inside a picture all of the picture."""
    q, k = torch.arange(count)[:, None], torch.arange(count)[None, :]
    visible = (k <= q) & (k > q - window)
    for start, end in spans:
        inside = torch.zeros(count, dtype=torch.bool)
        inside[start : end + 1] = True
        visible |= inside[:, None] & inside[None, :]
    return visible


def _attention(
    layer: V4Layer, x: Tensor, positions: Tensor, visible: Tensor, index: int, trace: V4Trace | None
) -> Tensor:
    attn = layer.attn
    rows = attn.rows(x, positions)
    keys = rows.kv
    if rows.compressed is not None:
        entries = pool_windows(rows.compressed)
        reached = torch.arange(len(entries))[None, :] < ((positions + 1) // attn.ratio)[:, None]
        if rows.indexer is not None:
            reached = _indexed(rows, reached)
            if trace is not None:
                trace.entries[index] = reached
        keys = torch.cat((keys, entries))
        visible = torch.cat((visible, reached), 1)
    mixed = reference.sparse_attention(rows.q, keys, visible, rows.sink, rows.scale)
    return attn.project(attn.rotation.back(mixed, positions))


def pool_windows(rows: CompressorRows) -> Tensor:
    """All entries of a sequence, one window after the other."""
    r = rows.ratio
    width = rows.values.shape[1] // (2 if rows.is_overlapping else 1)
    pooled = []
    for w in range(rows.values.shape[0] // r):
        own = slice(w * r, (w + 1) * r)
        if not rows.is_overlapping:
            values, gates = rows.values[own], rows.gates[own]
        else:
            values, gates = rows.values[own, width:], rows.gates[own, width:]
            if w:
                before = slice((w - 1) * r, w * r)
                values = torch.cat((rows.values[before, :width], values))
                gates = torch.cat((rows.gates[before, :width], gates))
        pooled.append((values * gates.softmax(0)).sum(0))
    if not pooled:
        return rows.values.new_zeros(0, width)
    return rows.finish(torch.stack(pooled), torch.arange(len(pooled)) * r)


def _indexed(rows: SparseRows, reached: Tensor) -> Tensor:
    indexer = rows.indexer
    assert indexer is not None
    keys = pool_windows(indexer.keys)
    scores = reference.index_scores(indexer.queries, keys, indexer.head_weights)
    return reference.top_entries(scores, reached, indexer.top_k)


def _experts(layer: V4Layer, x: Tensor, ids: Tensor, index: int, trace: V4Trace | None) -> Tensor:
    ffn = layer.ffn
    weights, experts = ffn.router(x, ids)
    if trace is not None:
        trace.experts[index] = experts.sort(-1).values
    limit = ffn.shared.limit
    out = reference.moe(x, weights, experts, ffn.experts.w13, ffn.experts.w2, limit)
    inner = reference.swiglu(reference.linear(x, ffn.shared.gate_up.weight, None), limit)
    return out + reference.linear(inner, ffn.shared.down.weight, None)
