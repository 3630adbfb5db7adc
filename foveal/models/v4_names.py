"""DeepSeek-V4's tensor names as data, in the released spelling (others: `v4_aliases`). Source: V4 spec section 2.

Shapes are those of the numbers; that a file may hold codes and scales instead is the loader's matter. `mtp.*` belongs
to the drafters and is set aside here.
"""

from __future__ import annotations

import re
from collections.abc import Iterator

from foveal.models.names import ParameterSpec, Part, Source, Storage
from foveal.models.v4_config import V4Config, V4LanguageConfig, V4VisionConfig
from foveal.parallel.sharding import Plan

_SCORE_BIAS = re.compile(r"layers\.(\d+)\.ffn\.gate\.bias")
DRAFTER_PREFIX = "mtp."
VISION_PREFIXES = ("vision.", "aligner.", "image_")


def v4_parameter_specs(config: V4Config, *, with_vision: bool = True) -> list[ParameterSpec]:
    """All parameters for `config`; without vision, no tensor of tower, aligner and learned vectors is named."""
    specs = list(_language(config.language, has_vision=config.vision is not None))
    if config.vision is not None and with_vision:
        specs += _vision(config.vision, config.language.hidden_size)
    return specs


def _one(
    ours: str,
    theirs: str,
    shape: tuple[int, ...],
    plan: Plan = Plan.REPLICATE,
    dtype: Storage = "model",
    part: Part = "language",
) -> ParameterSpec:
    return ParameterSpec(ours, shape, (Source(theirs, shape),), plan, part, dtype)


def _language(c: V4LanguageConfig, *, has_vision: bool) -> Iterator[ParameterSpec]:
    d, n, table = c.hidden_size, c.hc_mult, (c.vocab_size, c.hidden_size)
    yield _one("language.embed_tokens.weight", "embed.weight", table, Plan.VOCABULARY)
    for layer in range(c.num_hidden_layers):
        ours, theirs = f"language.layers.{layer}", f"layers.{layer}"
        for kind in ("attn", "ffn"):
            hc, width = f"{theirs}.hc_{kind}", 2 * n + n * n
            yield _one(f"{ours}.{kind}_hc.fn", f"{hc}_fn", (width, n * d), dtype="float32")
            yield _one(f"{ours}.{kind}_hc.base", f"{hc}_base", (width,), dtype="float32")
            yield _one(f"{ours}.{kind}_hc.scale", f"{hc}_scale", (3,), dtype="float32")
            yield _one(
                f"{ours}.{kind}_norm.weight", f"{theirs}.{kind}_norm.weight", (d,), dtype="float32"
            )
        yield from _attention(c, layer, f"{ours}.attn", f"{theirs}.attn")
        yield from _experts(c, layer, f"{ours}.ffn", f"{theirs}.ffn", has_vision=has_vision)
    yield _one("language.hc_head.fn", "hc_head_fn", (n, n * d), dtype="float32")
    yield _one("language.hc_head.base", "hc_head_base", (n,), dtype="float32")
    yield _one("language.hc_head.scale", "hc_head_scale", (1,), dtype="float32")
    yield _one("language.norm.weight", "norm.weight", (d,), dtype="float32")
    yield _one("language.lm_head.weight", "head.weight", table, Plan.VOCABULARY)


def _attention(c: V4LanguageConfig, layer: int, ours: str, theirs: str) -> Iterator[ParameterSpec]:
    d, heads, width, ratio = c.hidden_size, c.num_attention_heads, c.head_dim, c.ratios[layer]
    grouped = c.o_groups * c.o_lora_rank
    matrices = (
        ("wq_a", (c.q_lora_rank, d), Plan.REPLICATE),
        ("wq_b", (heads * width, c.q_lora_rank), Plan.COLUMN),
        ("wkv", (width, d), Plan.REPLICATE),
        ("wo_a", (grouped, heads * width // c.o_groups), Plan.COLUMN),
        ("wo_b", (d, grouped), Plan.ROW),
    )
    for name, shape, plan in matrices:
        yield _one(f"{ours}.{name}.weight", f"{theirs}.{name}.weight", shape, plan)
    for name, size in (("q_norm", c.q_lora_rank), ("kv_norm", width)):
        yield _one(f"{ours}.{name}.weight", f"{theirs}.{name}.weight", (size,), dtype="float32")
    yield _one(f"{ours}.attn_sink", f"{theirs}.attn_sink", (heads,), Plan.COLUMN, "float32")
    if ratio:
        yield from _compressor(c, ratio, width, f"{ours}.compressor", f"{theirs}.compressor")
    if ratio == 4:
        at, to = f"{theirs}.indexer", f"{ours}.indexer"
        shape = (c.index_n_heads * c.index_head_dim, c.q_lora_rank)
        yield _one(f"{to}.wq_b.weight", f"{at}.wq_b.weight", shape)
        yield _one(f"{to}.weights_proj.weight", f"{at}.weights_proj.weight", (c.index_n_heads, d))
        yield from _compressor(c, 4, c.index_head_dim, f"{to}.compressor", f"{at}.compressor")


def _compressor(
    c: V4LanguageConfig, ratio: int, width: int, ours: str, theirs: str
) -> Iterator[ParameterSpec]:
    rows = width * (2 if ratio == 4 else 1)
    yield _one(f"{ours}.ape", f"{theirs}.ape", (ratio, rows), dtype="float32")
    for name in ("wkv", "wgate"):
        yield _one(
            f"{ours}.{name}.weight",
            f"{theirs}.{name}.weight",
            (rows, c.hidden_size),
            dtype="float32",
        )
    yield _one(f"{ours}.norm.weight", f"{theirs}.norm.weight", (width,), dtype="float32")


def _experts(
    c: V4LanguageConfig, layer: int, ours: str, theirs: str, *, has_vision: bool
) -> Iterator[ParameterSpec]:
    d, inner, count = c.hidden_size, c.moe_intermediate_size, c.n_routed_experts
    yield _one(f"{ours}.router.weight", f"{theirs}.gate.weight", (count, d), dtype="float32")
    if c.is_hash_layer(layer):
        shape = (c.vocab_size, c.num_experts_per_tok)
        yield _one(f"{ours}.router.tid2eid", f"{theirs}.gate.tid2eid", shape, dtype="int64")
    else:
        yield _one(f"{ours}.router.bias", f"{theirs}.gate.bias", (count,), dtype="float32")
    if has_vision:
        yield _one(f"{ours}.router.bias_vl", f"{theirs}.gate.bias_vl", (count,), dtype="float32")
    w13, w2 = [], []
    for e in range(count):
        at = f"{theirs}.experts.{e}"
        w13 += [
            Source(f"{at}.w1.weight", (inner, d), 0, e),
            Source(f"{at}.w3.weight", (inner, d), inner, e),
        ]
        w2.append(Source(f"{at}.w2.weight", (d, inner), 0, e))
    yield ParameterSpec(
        f"{ours}.experts.w13", (count, 2 * inner, d), tuple(w13), Plan.EXPERT, "language"
    )
    yield ParameterSpec(f"{ours}.experts.w2", (count, d, inner), tuple(w2), Plan.EXPERT, "language")
    shared, at = inner * c.n_shared_experts, f"{theirs}.shared_experts"
    sources = (
        Source(f"{at}.w1.weight", (shared, d)),
        Source(f"{at}.w3.weight", (shared, d), shared),
    )
    yield ParameterSpec(
        f"{ours}.shared.gate_up.weight", (2 * shared, d), sources, Plan.COLUMN, "language"
    )
    yield _one(f"{ours}.shared.down.weight", f"{at}.w2.weight", (d, shared), Plan.ROW)


def _vision(c: V4VisionConfig, d: int) -> Iterator[ParameterSpec]:
    w, inner, cell = c.vision_dim, c.vision_inter_dim, c.vision_dim * c.vision_downsample_ratio**2

    def tensor(
        name: str, shape: tuple[int, ...], plan: Plan = Plan.REPLICATE, dtype: Storage = "model"
    ) -> ParameterSpec:
        return _one(name, name, shape, plan, dtype, "vision")

    yield tensor("vision.patch_embed.proj.weight", (w, 3 * c.vision_patch_size**2))
    yield tensor("vision.patch_embed.proj.bias", (w,))
    for i in range(c.vision_n_layers):
        block = f"vision.blocks.{i}"
        yield tensor(f"{block}.norm1.weight", (w,), dtype="float32")
        yield tensor(f"{block}.norm2.weight", (w,), dtype="float32")
        yield tensor(f"{block}.attn.wqkv.weight", (3 * w, w), Plan.COLUMN)
        yield tensor(f"{block}.attn.wqkv.bias", (3 * w,), Plan.COLUMN)
        yield tensor(f"{block}.attn.wo.weight", (w, w), Plan.ROW)
        yield tensor(f"{block}.attn.wo.bias", (w,))
        yield tensor(f"{block}.mlp.w1.weight", (2 * inner, w), Plan.COLUMN)
        yield tensor(f"{block}.mlp.w2.weight", (w, inner), Plan.ROW)
    yield tensor("vision.norm.weight", (w,), dtype="float32")
    for name, shape in (("w1", (d, cell)), ("w2", (d, d))):
        yield _one(f"aligner.{name}.weight", f"aligner.{name}.weight", shape, part="projector")
        yield _one(f"aligner.{name}.bias", f"aligner.{name}.bias", (d,), part="projector")
    for name in ("image_start", "image_pad", "image_newline", "image_end"):
        yield _one(name, name, (d,), part="projector")


def is_set_aside(name: str, config: V4Config, *, with_vision: bool) -> bool:
    """True for tensors that are known and not loaded.

    They are the drafters', the vision half's where it is not wanted, and the selection bias of layers that look experts
    up, which vision releases carry (spec 2.1).
    """
    if name.startswith(DRAFTER_PREFIX) or (not with_vision and name.startswith(VISION_PREFIXES)):
        return True
    match = _SCORE_BIAS.fullmatch(name)
    return match is not None and config.language.is_hash_layer(int(match[1]))
