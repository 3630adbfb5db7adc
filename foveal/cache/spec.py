"""What a model keeps of the tokens it computed, as data. Pools, rings and the memory plan are made from it.

    CacheSpec
    ├── groups    paged storage: a pool of blocks and one table a request each, all with the same block size
    │   ├── full      VL2: a row of each token. V4: compressed entries and indexer keys of a block's tokens
    │   └── window    V4 only: raw rows, which only the next `window - 1` tokens look back to, and the boundary
    │                 state: what a compressor of ratio 4 needs of the tokens before the block's end
    └── rings     V4 only: what the compressors hold back; one set a request slot, row = position mod num_rows

It knows no torch: widths are numbers a row, sizes are bytes. Source: V4 spec 5.1-5.5.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from foveal.models.config import LanguageConfig
    from foveal.models.v4_config import V4LanguageConfig

FULL, WINDOW = "full", "window"
# On CPUs; a block of VL2-tiny in bfloat16 is 2 MB then.
VL2_BLOCK_SIZE = 32
# Tokens that are in flight or may be taken back at once. A rejected write must not destroy a row still needed.
MARGIN = 8
FLOAT32_BYTES = 4


@dataclass(frozen=True, slots=True)
class CacheRows:
    """`num_rows` rows of `width` numbers that one layer keeps in each block of a group, or in a ring."""

    layer: int
    name: str
    num_rows: int
    width: int
    element_bytes: int

    @property
    def size_bytes(self) -> int:
        return self.num_rows * self.width * self.element_bytes


@dataclass(frozen=True, slots=True)
class CacheGroup:
    """Layers' rows that are paged together. With `window`, a token sees itself and the `window - 1` tokens before."""

    name: str
    block_size: int
    rows: tuple[CacheRows, ...]
    window: int | None = None

    @property
    def bytes_per_block(self) -> int:
        return sum(rows.size_bytes for rows in self.rows)

    @property
    def bytes_per_token(self) -> float:
        return self.bytes_per_block / self.block_size

    def num_blocks_for(self, num_tokens: int) -> int:
        """Entries of a table that reaches over the first `num_tokens` tokens."""
        return -(-num_tokens // self.block_size)

    def first_needed_block(self, position: int) -> int:
        """The oldest block that the token at `position`, or one after it, reads rows of."""
        if self.window is None:
            return 0
        return max(0, position - self.window + 1) // self.block_size

    def first_stored_block(self, end: int) -> int:
        """The oldest block that a chunk stores which ends before position `end`.

        What the next tokens look back to, and the last full block in any case: so each chunk leaves a place where a
        prefix hit can end.
        """
        if self.window is None:
            return 0
        return max(0, end - max(self.window, self.block_size)) // self.block_size

    def max_stored_blocks(self, margin: int) -> int:
        """Blocks at most from `first_stored_block` up to `margin` tokens behind a chunk's end."""
        assert self.window is not None, f"group {self.name} stores every block"
        length = max(self.window, self.block_size) + margin
        return self.num_blocks_for(length - 1) + 1


@dataclass(frozen=True, slots=True)
class CacheSpec:
    """Storage of one model. `margin` is how many tokens may be in flight or unverified at once."""

    groups: tuple[CacheGroup, ...]
    rings: tuple[CacheRows, ...] = ()
    margin: int = MARGIN

    def __post_init__(self) -> None:
        sizes = {group.block_size for group in self.groups}
        assert len(sizes) == 1, f"block sizes {sizes}: block hashes are shared, so sizes must agree"
        assert min(sizes) >= 1, f"block size {min(sizes)}: a block holds at least one token"
        windows = [group.window is not None for group in self.groups]
        assert windows in ([False], [False, True]), "one full group, then at most one with a window"
        narrow = [group.window for group in self.groups if group.window == 1]
        assert not narrow, "a window of one token keeps nothing; use a spec without that group"

    @property
    def block_size(self) -> int:
        return self.groups[0].block_size

    @property
    def bytes_per_slot(self) -> int:
        """What a request slot costs beside its blocks."""
        return sum(ring.size_bytes for ring in self.rings)


def vl2_cache_spec(
    config: LanguageConfig, dtype_bytes: int, block_size: int = VL2_BLOCK_SIZE
) -> CacheSpec:
    """Keys and values of each head, or the latent and the shared rotated key where attention is latent."""
    if config.uses_mla:
        widths = {"latent": int(config.kv_lora_rank or 0), "k_pe": config.qk_rope_head_dim}
    else:
        widths = dict.fromkeys(("k", "v"), config.num_kv_heads * config.head_dim)
    rows = tuple(
        CacheRows(layer, name, block_size, width, dtype_bytes)
        for layer in range(config.num_hidden_layers)
        for name, width in widths.items()
    )
    return CacheSpec((CacheGroup(FULL, block_size, rows),))


def v4_cache_spec(
    config: V4LanguageConfig,
    dtype_bytes: int,
    *,
    num_draft_stages: int = 0,
    margin: int = MARGIN,
) -> CacheSpec:
    """Both groups and the rings of a DeepSeek-V4 model.

    A block holds whole windows of every compressor and at least one attention window: 128 tokens in released models.
    Draft stages follow the trunk's layers and keep raw rows only.
    """
    block_size = v4_block_size(config)
    ratios = config.ratios + (0,) * num_draft_stages
    full = tuple(
        CacheRows(layer, name, block_size // ratio, width, dtype_bytes)
        for layer, ratio in enumerate(ratios)
        for name, width in _compressors(config, ratio)
    )
    window = tuple(
        rows
        for layer, ratio in enumerate(ratios)
        for rows in (
            CacheRows(layer, "raw", block_size, config.head_dim, dtype_bytes),
            *_boundary_rows(config, layer, ratio),
        )
    )
    rings = tuple(
        CacheRows(layer, f"{name}.{part}", reach + margin, halves * width, FLOAT32_BYTES)
        for layer, ratio in enumerate(ratios)
        for halves, reach in [(2, 2 * ratio) if ratio == 4 else (1, ratio)]
        for name, width in _compressors(config, ratio)
        for part in ("values", "gates")
    )
    groups = (
        CacheGroup(FULL, block_size, full),
        CacheGroup(WINDOW, block_size, window, config.sliding_window),
    )
    return CacheSpec(groups, rings, margin)


def v4_block_size(config: V4LanguageConfig) -> int:
    """The smallest multiple of all compression ratios that is at least the sliding window."""
    multiple = math.lcm(*(ratio for ratio in config.ratios if ratio))
    return -(-config.sliding_window // multiple) * multiple


def _compressors(config: V4LanguageConfig, ratio: int) -> Iterator[tuple[str, int]]:
    """Name and width of what a layer's compressors make: entries, and for ratio 4 the indexer's keys."""
    if ratio:
        yield "entries", config.head_dim
    if ratio == 4:
        yield "index_keys", config.index_head_dim


def _boundary_rows(config: V4LanguageConfig, layer: int, ratio: int) -> Iterator[CacheRows]:
    """The A-halves of the last four tokens of a block, values and gates, fp32.

    The entry after the block's end pools them. Other ratios have nothing pending at a multiple of the block size.
    """
    if ratio == 4:
        for name, width in _compressors(config, ratio):
            for part in ("values", "gates"):
                yield CacheRows(layer, f"{name}.boundary.{part}", ratio, width, FLOAT32_BYTES)
