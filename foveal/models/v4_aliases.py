"""Other spellings of a DeepSeek-V4 checkpoint, turned into the released one before anything else looks at it.

Three are in use beside the released one, and a file may mix them:

    transformers in memory     model.layers.0.self_attn.q_a_proj.weight, stacked mlp.experts.gate_up_proj [E, 2M, D]
    transformers as written    model.layers.0.attn.wq_a.weight, model.embed_tokens.weight, attn.norm for attn.kv_norm
    what the released converter takes   model.layers.0.self_attn.wq_a.weight_scale_inv

`config.json` has two spellings as well. Source: V4 spec 2.8; names as transformers 5.23 writes them.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from dataclasses import replace
from typing import Any

from foveal.errors import CheckpointError
from foveal.models.safetensors_header import DTYPE_BITS, TensorInfo

# Whole names, without a leading "model.".
TOP_NAMES: Mapping[str, str] = {
    "embed_tokens.weight": "embed.weight",
    "lm_head.weight": "head.weight",
    "hc_head.hc_fn": "hc_head_fn",
    "hc_head.hc_base": "hc_head_base",
    "hc_head.hc_scale": "hc_head_scale",
}
# Beginnings of names behind "layers.N."; the longest that ends at a dot or at the end of the name counts.
LAYER_NAMES: Mapping[str, str] = {
    "input_layernorm": "attn_norm",
    "post_attention_layernorm": "ffn_norm",
    "attn_hc.fn": "hc_attn_fn",
    "attn_hc.base": "hc_attn_base",
    "attn_hc.scale": "hc_attn_scale",
    "ffn_hc.fn": "hc_ffn_fn",
    "ffn_hc.base": "hc_ffn_base",
    "ffn_hc.scale": "hc_ffn_scale",
    "self_attn": "attn",
    "self_attn.sinks": "attn.attn_sink",
    "self_attn.q_a_proj": "attn.wq_a",
    "self_attn.q_a_norm": "attn.q_norm",
    "self_attn.q_b_proj": "attn.wq_b",
    "self_attn.kv_proj": "attn.wkv",
    "self_attn.o_a_proj": "attn.wo_a",
    "self_attn.o_b_proj": "attn.wo_b",
    "self_attn.norm": "attn.kv_norm",
    "self_attn.compressor.kv_proj": "attn.compressor.wkv",
    "self_attn.compressor.gate_proj": "attn.compressor.wgate",
    "self_attn.compressor.position_bias": "attn.compressor.ape",
    "self_attn.compressor.kv_norm": "attn.compressor.norm",
    "self_attn.compressor.indexer.q_b_proj": "attn.indexer.wq_b",
    "self_attn.compressor.indexer.scorer.weights_proj": "attn.indexer.weights_proj",
    "self_attn.compressor.indexer.kv_proj": "attn.indexer.compressor.wkv",
    "self_attn.compressor.indexer.gate_proj": "attn.indexer.compressor.wgate",
    "self_attn.compressor.indexer.position_bias": "attn.indexer.compressor.ape",
    "self_attn.compressor.indexer.kv_norm": "attn.indexer.compressor.norm",
    "attn.norm": "attn.kv_norm",
    "mlp": "ffn",
    "mlp.gate.e_score_correction_bias": "ffn.gate.bias",
    "ffn.gate.e_score_correction_bias": "ffn.gate.bias",
    "mlp.shared_experts.gate_proj": "ffn.shared_experts.w1",
    "mlp.shared_experts.up_proj": "ffn.shared_experts.w3",
    "mlp.shared_experts.down_proj": "ffn.shared_experts.w2",
}
# Last words, behind everything else.
ENDINGS: Mapping[str, str] = {"weight_scale_inv": "scale", "weight_scale": "scale"}
# Stacks of experts: the matrices that lie one below the other in each.
STACKS: Mapping[str, tuple[str, ...]] = {"gate_up_proj": ("w1", "w3"), "down_proj": ("w2",)}

_LAYER = re.compile(r"layers\.(\d+)\.(.+)")
_STACK = re.compile(
    r"(layers\.\d+\.ffn\.experts)\.(gate_up_proj|down_proj)(?:\.weight|_(scale)_inv)?"
)


def released_name(name: str) -> str:
    """The released spelling of a tensor's name; released names and unknown ones come back as they are."""
    bare = name.removeprefix("model.")
    if bare in TOP_NAMES:
        return TOP_NAMES[bare]
    match = _LAYER.fullmatch(bare)
    if match is None:
        return bare
    words = _layer_name(match[2]).split(".")
    words[-1] = ENDINGS.get(words[-1], words[-1])
    return f"layers.{match[1]}.{'.'.join(words)}"


def released_names(name: str, num_experts: int) -> list[str]:
    """The released tensors that `name` stands for: many for a stack of experts, one for the others."""
    new = released_name(name)
    match = _STACK.fullmatch(new)
    if match is None:
        return [new]
    ending = match[3] or "weight"
    return [
        f"{match[1]}.{expert}.{matrix}.{ending}"
        for expert in range(num_experts)
        for matrix in STACKS[match[2]]
    ]


def _layer_name(name: str) -> str:
    words = name.split(".")
    for count in range(len(words), 0, -1):
        found = LAYER_NAMES.get(".".join(words[:count]))
        if found is not None:
            return ".".join((found, *words[count:]))
    return name


def released_tensors(tensors: Mapping[str, TensorInfo]) -> dict[str, TensorInfo]:
    """`tensors` under their released names; stacks of experts become views of their slices, which nothing copies.

    Raises CheckpointError where two spellings of one tensor are there.
    """
    found: dict[str, TensorInfo] = {}
    for name, info in tensors.items():
        for new, part in _unstacked(released_name(name), info):
            if new in found:
                raise CheckpointError(
                    f"{info.path.name} has tensor {name!r}, another spelling of {new!r}, which is there too; "
                    "keep the files of one model in a folder"
                )
            found[new] = part
    return found


def _unstacked(name: str, info: TensorInfo) -> Iterator[tuple[str, TensorInfo]]:
    """The matrices of a stack [E, rows, columns]; other tensors as they are."""
    match, bits = _STACK.fullmatch(name), DTYPE_BITS.get(info.dtype)
    matrices = STACKS[match[2]] if match is not None else ()
    if match is None or bits is None or len(info.shape) != 3 or info.shape[1] % len(matrices):
        yield name, info
        return
    count, rows, columns = info.shape
    shape = (rows // len(matrices), columns)
    size = shape[0] * columns * bits // 8
    ending, start = match[3] or "weight", info.start
    for expert in range(count):
        for matrix in matrices:
            piece = replace(info, shape=shape, start=start, end=start + size)
            yield f"{match[1]}.{expert}.{matrix}.{ending}", piece
            start += size


# --- configuration ----------------------------------------------------------------------------------

_RATES = {"compressed_sparse_attention": 4, "heavily_compressed_attention": 128}


def released_config(values: Mapping[str, Any]) -> dict[str, Any]:
    """A parsed `config.json` with the keys of the release, where transformers wrote its own. Raises CheckpointError."""
    known = dict(values)
    kinds = values.get("layer_types")
    if "compress_ratios" not in values and isinstance(kinds, list):
        rates = {"sliding_attention": 0} | _RATES | dict(values.get("compress_rates") or {})
        unknown = sorted({str(kind) for kind in kinds if kind not in rates})
        if unknown:
            raise CheckpointError(
                f"config.json: layer_types has {', '.join(unknown)}; known: {', '.join(rates)}"
            )
        known["compress_ratios"] = [rates[kind] for kind in kinds]
    if "num_hash_layers" not in values and "mlp_layer_types" in values:
        known["num_hash_layers"] = _num_hash_layers(values["mlp_layer_types"])
    rope = values.get("rope_parameters")
    if isinstance(rope, Mapping) and isinstance(rope.get("compress"), Mapping):
        known |= _rope_keys(rope.get("main") or {}, rope["compress"])
    return known


def _num_hash_layers(kinds: list[str]) -> int:
    """Hash layers come first in every release; there is no key for another order."""
    count = kinds.count("hash_moe")
    if any(kind == "hash_moe" for kind in kinds[count:]):
        raise CheckpointError(
            f"config.json: mlp_layer_types {kinds} has hash_moe behind other layers; hash layers must come first"
        )
    return count


def _rope_keys(main: Mapping[str, Any], compress: Mapping[str, Any]) -> dict[str, Any]:
    keys: dict[str, Any] = {}
    if "rope_theta" in main:
        keys["rope_theta"] = main["rope_theta"]
    if "rope_theta" in compress:
        keys["compress_rope_theta"] = compress["rope_theta"]
    kind = compress.get("rope_type", "default")
    keys["rope_scaling"] = None if kind == "default" else {**compress, "type": kind}
    return keys
