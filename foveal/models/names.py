"""DeepSeek-VL2's tensor names as data: which checkpoint tensors fill which parameter, and how it may be split.

One table (`parameter_specs`) serves the loader, the inventory of `fit`, and later tensor parallelism. The model files
know none of these names. Source of names and shapes: spec section 2.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Literal, TypeAlias

from foveal.models.config import LanguageConfig, VisionConfig, VL2Config
from foveal.parallel.sharding import Plan

Part: TypeAlias = Literal["vision", "projector", "language"]
Storage: TypeAlias = Literal["model", "float32", "int64"]

# Present in every checkpoint and never used by the model: the tower's pooling head (spec 2.2).
IGNORED_PREFIXES = ("vision.attn_pool.",)
IGNORED_SUFFIXES = ("rotary_emb.inv_freq",)


@dataclass(frozen=True, slots=True)
class Source:
    """A checkpoint tensor. It fills rows [offset, offset + shape[0]) of the parameter, or of its `index`-th slice."""

    name: str
    shape: tuple[int, ...]
    offset: int = 0
    index: int | None = None


@dataclass(frozen=True, slots=True)
class ParameterSpec:
    """A parameter of the model and where its numbers come from.

    `dtype` "float32" marks small tensors whose precision matters (norms, router): they are held in float32 always.
    """

    name: str
    shape: tuple[int, ...]
    sources: tuple[Source, ...]
    plan: Plan
    part: Part
    dtype: Storage = "model"


def is_ignored(name: str, config: VL2Config) -> bool:
    """True for checkpoint tensors that are known and dropped."""
    if config.language.tie_word_embeddings and name == "language.lm_head.weight":
        return True
    return name.startswith(IGNORED_PREFIXES) or name.endswith(IGNORED_SUFFIXES)


def parameter_specs(config: VL2Config) -> list[ParameterSpec]:
    """All parameters of the model for `config`, in the order of the forward pass."""
    specs = list(_vision(config.vision))
    specs += _projector(config)
    specs += _language(config.language)
    return specs


def ignored_tensor_shapes(config: VL2Config) -> dict[str, tuple[int, ...]]:
    """The pooling head that vendor checkpoints carry: 13 tensors, for inventories that count the file (spec 2.2)."""
    w, hidden = config.vision.width, config.vision.mlp_hidden
    shapes: dict[str, tuple[int, ...]] = {"latent": (1, 1, w)}
    for name, rows, cols in (("q", w, w), ("kv", 2 * w, w), ("proj", w, w)):
        shapes |= {f"{name}.weight": (rows, cols), f"{name}.bias": (rows,)}
    shapes |= {"norm.weight": (w,), "norm.bias": (w,)}
    for name, rows, cols in (("mlp.fc1", hidden, w), ("mlp.fc2", w, hidden)):
        shapes |= {f"{name}.weight": (rows, cols), f"{name}.bias": (rows,)}
    return {f"vision.attn_pool.{name}": shape for name, shape in shapes.items()}


def _same(
    name: str,
    shape: tuple[int, ...],
    part: Part,
    *,
    plan: Plan = Plan.REPLICATE,
    source: str | None = None,
    dtype: Storage = "model",
) -> ParameterSpec:
    """A parameter that is one checkpoint tensor as it stands."""
    return ParameterSpec(name, shape, (Source(source or name, shape),), plan, part, dtype)


def _stacked(
    name: str, parts: list[tuple[str, int]], tail: tuple[int, ...], *, plan: Plan
) -> ParameterSpec:
    """A language parameter made of several checkpoint tensors, one below the other."""
    sources, offset = [], 0
    for source, rows in parts:
        sources.append(Source(source, (rows, *tail), offset))
        offset += rows
    return ParameterSpec(name, (offset, *tail), tuple(sources), plan, "language")


def _affine(
    name: str, rows: int, tail: tuple[int, ...], plan: Plan, part: Part
) -> list[ParameterSpec]:
    bias_plan = Plan.REPLICATE if plan is Plan.ROW else plan
    return [
        _same(f"{name}.weight", (rows, *tail), part, plan=plan),
        _same(f"{name}.bias", (rows,), part, plan=bias_plan),
    ]


def _layer_norm(name: str, width: int) -> list[ParameterSpec]:
    return [
        _same(f"{name}.{kind}", (width,), "vision", dtype="float32") for kind in ("weight", "bias")
    ]


def _vision(config: VisionConfig) -> Iterator[ParameterSpec]:
    w, p = config.width, config.patch_size
    yield _same("vision.pos_embed", (1, config.grid**2, w), "vision", dtype="float32")
    yield from _affine("vision.patch_embed.proj", w, (3, p, p), Plan.REPLICATE, "vision")
    for layer in range(config.layers):
        block = f"vision.blocks.{layer}"
        yield from _layer_norm(f"{block}.norm1", w)
        yield from _affine(f"{block}.attn.qkv", 3 * w, (w,), Plan.REPLICATE, "vision")
        yield from _affine(f"{block}.attn.proj", w, (w,), Plan.REPLICATE, "vision")
        yield from _layer_norm(f"{block}.norm2", w)
        yield from _affine(f"{block}.mlp.fc1", config.mlp_hidden, (w,), Plan.COLUMN, "vision")
        yield from _affine(f"{block}.mlp.fc2", w, (config.mlp_hidden,), Plan.ROW, "vision")
    yield from _layer_norm("vision.norm", w)


def projector_layer_sizes(config: VL2Config) -> list[tuple[str, int, int]]:
    """The projector's linear layers as (name below `projector.`, outputs, inputs). Source: spec 5.1-5.2."""
    p = config.projector
    if p.projector_type == "identity":
        return []
    if p.projector_type == "linear":
        return [("layers", p.n_embed, p.input_dim)]
    if p.projector_type == "mlp_gelu":
        first, inner = p.input_dim, p.n_embed
        count = p.depth
    else:
        first, inner = p.input_dim * p.downsample_ratio**2, p.n_embed * p.mlp_ratio
        count = max(p.depth, 2)  # depth 1 still has two layers in the vendor's code
    widths = [first] + [inner] * (count - 1) + [p.n_embed]
    return [(f"layers.{2 * i}", widths[i + 1], widths[i]) for i in range(count)]


def _projector(config: VL2Config) -> Iterator[ParameterSpec]:
    p = config.projector
    if p.token_pooling:
        name = "projector.token_pooling_layer"
        yield from _affine(name, p.input_dim, (4 * p.input_dim,), Plan.REPLICATE, "projector")
    for name, outputs, inputs in projector_layer_sizes(config):
        yield from _affine(f"projector.{name}", outputs, (inputs,), Plan.REPLICATE, "projector")
    yield _same("image_newline", (p.n_embed,), "projector")
    yield _same("view_seperator", (p.n_embed,), "projector")  # the checkpoint's spelling


def _language(config: LanguageConfig) -> Iterator[ParameterSpec]:
    d, vocabulary = config.hidden_size, (config.vocab_size, config.hidden_size)
    yield _language_tensor("embed_tokens.weight", vocabulary, Plan.VOCABULARY)
    for layer in range(config.num_hidden_layers):
        ours, theirs = f"language.layers.{layer}", f"language.model.layers.{layer}"
        for norm in ("input_layernorm.weight", "post_attention_layernorm.weight"):
            source = f"{theirs}.{norm}"
            yield _same(f"{ours}.{norm}", (d,), "language", source=source, dtype="float32")
        attention = _latent_attention if config.uses_mla else _head_attention
        yield from attention(config, f"{ours}.attn", f"{theirs}.self_attn")
        if config.is_moe_layer(layer):
            yield from _moe(config, f"{ours}.mlp", f"{theirs}.mlp")
        else:
            yield from _mlp(f"{ours}.mlp", f"{theirs}.mlp", d, config.intermediate_size)
    yield _language_tensor("norm.weight", (d,), Plan.REPLICATE, dtype="float32")
    if not config.tie_word_embeddings:
        source = "language.lm_head.weight"
        yield _same(source, vocabulary, "language", plan=Plan.VOCABULARY)


def _language_tensor(
    name: str, shape: tuple[int, ...], plan: Plan, *, dtype: Storage = "model"
) -> ParameterSpec:
    source = f"language.model.{name}"
    return _same(f"language.{name}", shape, "language", plan=plan, source=source, dtype=dtype)


def _head_attention(c: LanguageConfig, ours: str, theirs: str) -> Iterator[ParameterSpec]:
    d, q_rows, kv_rows = (
        c.hidden_size,
        c.num_attention_heads * c.head_dim,
        c.num_kv_heads * c.head_dim,
    )
    rows = [("q_proj", q_rows), ("k_proj", kv_rows), ("v_proj", kv_rows)]
    for kind, tail in (("weight", (d,)), ("bias", ())):
        if kind == "weight" or c.attention_bias:
            parts = [(f"{theirs}.{name}.{kind}", count) for name, count in rows]
            yield _stacked(f"{ours}.qkv.{kind}", parts, tail, plan=Plan.COLUMN)
    yield from _output_projection(c, ours, theirs, q_rows)


def _output_projection(
    c: LanguageConfig, ours: str, theirs: str, inputs: int
) -> Iterator[ParameterSpec]:
    source, shape = f"{theirs}.o_proj", (c.hidden_size, inputs)
    yield _same(f"{ours}.o.weight", shape, "language", plan=Plan.ROW, source=f"{source}.weight")
    if c.attention_bias:
        yield _same(f"{ours}.o.bias", (c.hidden_size,), "language", source=f"{source}.bias")


def _latent_attention(c: LanguageConfig, ours: str, theirs: str) -> Iterator[ParameterSpec]:
    d, heads, rank = c.hidden_size, c.num_attention_heads, int(c.kv_lora_rank or 0)
    q_rows = heads * c.qk_head_dim
    down = [("kv_a", "kv_a_proj_with_mqa", rank + c.qk_rope_head_dim)]
    up = [("q", "q_proj", q_rows, d)]
    norms = [("kv_a_norm", "kv_a_layernorm", rank)]
    if c.q_lora_rank is not None:
        down.append(("q_a", "q_a_proj", c.q_lora_rank))
        up = [("q_b", "q_b_proj", q_rows, c.q_lora_rank)]
        norms.append(("q_a_norm", "q_a_layernorm", c.q_lora_rank))
    up.append(("kv_b", "kv_b_proj", heads * (c.qk_nope_head_dim + c.v_head_dim), rank))
    for name, source, rows in down:
        # The latents are shared by all heads, so every rank holds them.
        yield _same(
            f"{ours}.{name}.weight", (rows, d), "language", source=f"{theirs}.{source}.weight"
        )
        if c.attention_bias:
            yield _same(
                f"{ours}.{name}.bias", (rows,), "language", source=f"{theirs}.{source}.bias"
            )
    for name, source, rows in norms:
        at = f"{theirs}.{source}.weight"
        yield _same(f"{ours}.{name}.weight", (rows,), "language", source=at, dtype="float32")
    for name, source, rows, inputs in up:
        at = f"{theirs}.{source}.weight"
        yield _same(
            f"{ours}.{name}.weight", (rows, inputs), "language", plan=Plan.COLUMN, source=at
        )
    yield from _output_projection(c, ours, theirs, heads * c.v_head_dim)


def _mlp(ours: str, theirs: str, d: int, inner: int) -> Iterator[ParameterSpec]:
    parts = [(f"{theirs}.gate_proj.weight", inner), (f"{theirs}.up_proj.weight", inner)]
    yield _stacked(f"{ours}.gate_up.weight", parts, (d,), plan=Plan.COLUMN)
    source = f"{theirs}.down_proj.weight"
    yield _same(f"{ours}.down.weight", (d, inner), "language", plan=Plan.ROW, source=source)


def _moe(c: LanguageConfig, ours: str, theirs: str) -> Iterator[ParameterSpec]:
    experts, d, inner = int(c.n_routed_experts or 0), c.hidden_size, c.moe_intermediate_size
    gate = f"{theirs}.gate"
    yield _same(
        f"{ours}.router.weight", (experts, d), "language", source=f"{gate}.weight", dtype="float32"
    )
    if c.topk_method == "noaux_tc":
        source = f"{gate}.e_score_correction_bias"
        yield _same(f"{ours}.router.bias", (experts,), "language", source=source, dtype="float32")
    w13, w2 = [], []
    for e in range(experts):
        at = f"{theirs}.experts.{e}"
        w13.append(Source(f"{at}.gate_proj.weight", (inner, d), 0, e))
        w13.append(Source(f"{at}.up_proj.weight", (inner, d), inner, e))
        w2.append(Source(f"{at}.down_proj.weight", (d, inner), 0, e))
    name, shape = f"{ours}.experts.w13", (experts, 2 * inner, d)
    yield ParameterSpec(name, shape, tuple(w13), Plan.EXPERT, "language")
    yield ParameterSpec(
        f"{ours}.experts.w2", (experts, d, inner), tuple(w2), Plan.EXPERT, "language"
    )
    if c.n_shared_experts:
        shared = inner * c.n_shared_experts  # one fused MLP, not several experts
        yield from _mlp(f"{ours}.shared", f"{theirs}.shared_experts", d, shared)
