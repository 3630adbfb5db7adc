"""DeepSeek-VL2's `config.json` as typed, checked data.

The vendor saved each file as a difference against the defaults of its own configuration classes, so a missing key means
*that* default and no other (base omits `num_hidden_layers` and has 30 layers). Source: spec sections 1.1-1.5.
This module knows no tensor names and no torch.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import MISSING, dataclass, fields
from pathlib import Path
from typing import Any, TypeVar

from foveal.errors import CheckpointError

PROJECTOR_TYPES = ("downsample_mlp_gelu", "identity", "linear", "mlp_gelu")
SCORING_FUNCTIONS = ("softmax", "sigmoid")
TOPK_METHODS = ("greedy", "group_limited_greedy", "noaux_tc")
ROPE_SCALING_TYPES = ("linear", "dynamic", "yarn")

T = TypeVar("T")


def pick(cls: type[T], values: Mapping[str, Any], where: str) -> T:
    """Build `cls` from the keys it knows; a wrong kind of value is an error that names the key."""
    known = {f.name: f for f in fields(cls)}  # type: ignore[arg-type]  # every caller passes a dataclass
    chosen = {key: value for key, value in values.items() if key in known}
    missing = [
        f.name
        for f in known.values()
        if f.default is MISSING and f.default_factory is MISSING and f.name not in chosen
    ]
    if missing:
        raise CheckpointError(f"config.json: {where} lacks {', '.join(missing)}")
    for key, value in chosen.items():
        default = known[key].default
        wants_number = isinstance(default, int | float) and not isinstance(default, bool)
        if value is None and "None" in str(known[key].type):
            continue
        if wants_number and (isinstance(value, bool) or not isinstance(value, int | float)):
            raise CheckpointError(f"config.json: {where}.{key} is {value!r}; a number is needed")
    return cls(**chosen)


def require_positive(part: object, where: str, names: tuple[str, ...]) -> None:
    for name in names:
        value = getattr(part, name)
        if not isinstance(value, int) or value < 1:
            raise CheckpointError(
                f"config.json: {where}.{name} is {value!r}; it must be a whole number of at least 1"
            )


@dataclass(frozen=True, slots=True)
class VisionConfig:
    """The vision tower: a SigLIP trunk. Sizes in pixels, widths in features."""

    image_size: int = 384
    patch_size: int = 16
    width: int = 1024
    layers: int = 24
    heads: int = 16
    mlp_ratio: float = 4.0

    @property
    def grid(self) -> int:
        """Patches a side; pixels beyond `grid * patch_size` are never seen."""
        return self.image_size // self.patch_size

    @property
    def mlp_hidden(self) -> int:
        return int(self.width * self.mlp_ratio)

    def check(self) -> None:
        names = ("image_size", "patch_size", "width", "layers", "heads")
        require_positive(self, "vision_config", names)
        if self.width % self.heads:
            raise CheckpointError(
                f"config.json: vision_config.width {self.width} is not divisible by heads {self.heads}"
            )
        if self.grid < 1:
            raise CheckpointError(
                f"config.json: vision_config.patch_size {self.patch_size} is larger than "
                f"image_size {self.image_size}"
            )


@dataclass(frozen=True, slots=True)
class ProjectorConfig:
    """From tower features to rows of the language model's input."""

    projector_type: str = "downsample_mlp_gelu"
    input_dim: int = 1152
    n_embed: int = 2048
    depth: int = 2
    mlp_ratio: int = 1
    downsample_ratio: int = 2
    token_pooling: bool = False

    def side(self, grid: int) -> int:
        """Cells a side that come out for `grid` patches a side."""
        if self.token_pooling:
            return grid // 2
        if self.projector_type == "downsample_mlp_gelu":
            return -(-grid // self.downsample_ratio)
        return grid

    def check(self) -> None:
        names = ("input_dim", "n_embed", "depth", "mlp_ratio", "downsample_ratio")
        require_positive(self, "projector_config", names)
        if self.projector_type not in PROJECTOR_TYPES:
            raise CheckpointError(
                f"config.json: projector_config.projector_type {self.projector_type!r} is unknown; "
                f"known: {', '.join(PROJECTOR_TYPES)}"
            )
        if self.projector_type == "identity" and self.input_dim != self.n_embed:
            raise CheckpointError(
                f"config.json: an identity projector cannot turn {self.input_dim} features into "
                f"{self.n_embed}; projector_config.input_dim and n_embed must be equal"
            )
        merges = self.projector_type == "downsample_mlp_gelu" and self.downsample_ratio > 1
        if self.token_pooling and merges:
            raise CheckpointError(
                "config.json: projector_config.token_pooling replaces the merge of "
                f"downsample_mlp_gelu, whose first layer expects {self.downsample_ratio}x"
                f"{self.downsample_ratio} patches; set downsample_ratio to 1 or token_pooling to false"
            )


@dataclass(frozen=True, slots=True)
class LanguageConfig:
    """The mixture-of-experts language model. Defaults are those of the vendor's DeepseekV2Config."""

    vocab_size: int = 102400
    hidden_size: int = 4096
    intermediate_size: int = 11008
    moe_intermediate_size: int = 1407
    num_hidden_layers: int = 30
    num_attention_heads: int = 32
    num_key_value_heads: int | None = 32
    n_shared_experts: int | None = None
    n_routed_experts: int | None = None
    num_experts_per_tok: int | None = None
    first_k_dense_replace: int = 0
    moe_layer_freq: int = 1
    topk_method: str = "gready"
    scoring_func: str = "softmax"
    norm_topk_prob: bool = False
    routed_scaling_factor: float = 1.0
    n_group: int | None = None
    topk_group: int | None = None
    use_mla: bool = True
    q_lora_rank: int | None = 1536
    kv_lora_rank: int | None = 512
    qk_nope_head_dim: int = 128
    qk_rope_head_dim: int = 64
    v_head_dim: int = 128
    max_position_embeddings: int = 2048
    rope_theta: float = 10000.0
    rope_scaling: Mapping[str, Any] | None = None
    rms_norm_eps: float = 1e-6
    attention_bias: bool = False
    hidden_act: str = "silu"
    tie_word_embeddings: bool = False
    bos_token_id: int = 100000
    eos_token_id: int = 100001

    @property
    def uses_mla(self) -> bool:
        """Multi-head latent attention; plain heads when switched off or when both q/k dims are 0."""
        return self.use_mla and (self.qk_nope_head_dim > 0 or self.qk_rope_head_dim > 0)

    @property
    def num_kv_heads(self) -> int:
        return self.num_key_value_heads or self.num_attention_heads

    @property
    def head_dim(self) -> int:
        """Head width of plain multi-head attention."""
        return self.hidden_size // self.num_attention_heads

    @property
    def qk_head_dim(self) -> int:
        return self.qk_nope_head_dim + self.qk_rope_head_dim

    @property
    def rope_dim(self) -> int:
        return self.qk_rope_head_dim if self.uses_mla else self.head_dim

    def is_moe_layer(self, layer: int) -> bool:
        return (
            self.n_routed_experts is not None
            and layer >= self.first_k_dense_replace
            and layer % self.moe_layer_freq == 0
        )

    def cache_row_elements(self) -> int:
        """Numbers that one token leaves in the cache of one layer."""
        if self.uses_mla:
            return int(self.kv_lora_rank or 0) + self.qk_rope_head_dim
        return 2 * self.num_kv_heads * self.head_dim

    def check(self) -> None:
        names = ("vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers")
        require_positive(self, "language_config", (*names, "num_attention_heads", "moe_layer_freq"))
        if self.hidden_act != "silu":
            raise CheckpointError(
                f"config.json: language_config.hidden_act {self.hidden_act!r} is not supported; only 'silu' is"
            )
        self._check_attention()
        if self.n_routed_experts is not None:
            self._check_routing()
        if self.rope_scaling is not None:
            kind = rope_scaling_type(self.rope_scaling)
            if kind not in ROPE_SCALING_TYPES:
                raise CheckpointError(
                    f"config.json: language_config.rope_scaling type {kind!r} is unknown; "
                    f"known: {', '.join(ROPE_SCALING_TYPES)}"
                )

    def _check_attention(self) -> None:
        if self.uses_mla:
            names = ("kv_lora_rank", "qk_nope_head_dim", "qk_rope_head_dim", "v_head_dim")
            require_positive(self, "language_config", names)
            return
        heads, kv_heads = self.num_attention_heads, self.num_kv_heads
        if self.hidden_size % heads or heads % kv_heads:
            raise CheckpointError(
                f"config.json: hidden_size {self.hidden_size}, num_attention_heads {heads} and "
                f"num_key_value_heads {kv_heads} do not divide each other"
            )

    def _check_routing(self) -> None:
        names = ("n_routed_experts", "num_experts_per_tok", "moe_intermediate_size")
        require_positive(self, "language_config", names)
        for key, allowed in (("topk_method", TOPK_METHODS), ("scoring_func", SCORING_FUNCTIONS)):
            if getattr(self, key) not in allowed:
                raise CheckpointError(
                    f"config.json: language_config.{key} {getattr(self, key)!r} is not supported; "
                    f"supported: {', '.join(allowed)}"
                )
        experts, top_k = int(self.n_routed_experts or 0), int(self.num_experts_per_tok or 0)
        groups, kept = self.n_group or 1, self.topk_group or 1
        if experts % groups or kept > groups or top_k > experts // groups * kept:
            raise CheckpointError(
                f"config.json: {experts} experts in {groups} groups of which {kept} are kept cannot give "
                f"num_experts_per_tok={top_k}"
            )


def rope_scaling_type(scaling: Mapping[str, Any]) -> str:
    return str(scaling.get("type", scaling.get("rope_type")))


@dataclass(frozen=True, slots=True)
class VL2Config:
    """A whole DeepSeek-VL2 model."""

    vision: VisionConfig
    projector: ProjectorConfig
    language: LanguageConfig
    candidate_resolutions: tuple[tuple[int, int], ...] = ((384, 384),)
    global_view_pos: str = "head"
    tile_tag: str = "tile_tag"

    @property
    def tokens_per_side(self) -> int:
        """Cells a side that the projector makes of one tile."""
        return self.projector.side(self.vision.grid)

    def num_image_tokens(self, cols: int, rows: int) -> int:
        """Placeholders of one picture cut into `cols` x `rows` local tiles (spec 3.6)."""
        g = self.tokens_per_side
        return g * (g + 1) + 1 + rows * g * (cols * g + 1)

    @classmethod
    def from_dict(cls, values: Mapping[str, Any]) -> VL2Config:
        """Read and check a parsed `config.json`; raises CheckpointError that names the key at fault."""
        config = cls(
            vision=pick(VisionConfig, values.get("vision_config") or {}, "vision_config"),
            projector=pick(
                ProjectorConfig, values.get("projector_config") or {}, "projector_config"
            ),
            language=pick(LanguageConfig, values.get("language_config") or {}, "language_config"),
            candidate_resolutions=tuple(
                (int(w), int(h)) for w, h in values.get("candidate_resolutions", ((384, 384),))
            ),
            global_view_pos=str(values.get("global_view_pos", "head")),
            tile_tag=str(values.get("tile_tag", "tile_tag")),
        )
        config.check()
        return config

    @classmethod
    def load(cls, folder: Path) -> VL2Config:
        return cls.from_dict(read_json(folder / "config.json"))

    def check(self) -> None:
        self.vision.check()
        self.projector.check()
        self.language.check()
        if self.tile_tag != "2D":
            raise CheckpointError(
                f"config.json: tile_tag {self.tile_tag!r} is not supported; only '2D' is (a missing "
                "tile_tag is an error in the vendor's code as well)"
            )
        if self.vision.width != self.projector.input_dim:
            raise CheckpointError(
                f"config.json: the tower gives {self.vision.width} features, but "
                f"projector_config.input_dim is {self.projector.input_dim}"
            )
        if self.projector.n_embed != self.language.hidden_size:
            raise CheckpointError(
                f"config.json: projector_config.n_embed {self.projector.n_embed} differs from "
                f"language_config.hidden_size {self.language.hidden_size}"
            )


def read_json(path: Path) -> dict[str, Any]:
    """A JSON object from a model folder; raises CheckpointError naming the file. A byte order mark is allowed."""
    try:
        values = json.loads(path.read_text(encoding="utf-8-sig"))
    except FileNotFoundError:
        raise CheckpointError(
            f"{path} is missing; a model folder needs it (copy it from the model's page)"
        ) from None
    except (OSError, UnicodeDecodeError, json.JSONDecodeError) as error:
        raise CheckpointError(
            f"{path} cannot be read as JSON ({error}); download it again"
        ) from None
    if not isinstance(values, dict):
        raise CheckpointError(f"{path} holds a {type(values).__name__}, not a JSON object")
    return values
