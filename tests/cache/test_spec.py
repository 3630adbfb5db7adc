"""Sizes against the numbers of the engine study and of the V4 spec."""

from __future__ import annotations

import subprocess
import sys
from typing import Any

import pytest

from foveal.cache.spec import CacheGroup, CacheRows, CacheSpec, v4_cache_spec, vl2_cache_spec
from foveal.models.config import LanguageConfig
from foveal.models.v4_config import V4LanguageConfig

TINY = LanguageConfig(
    hidden_size=1280,
    num_hidden_layers=12,
    num_attention_heads=10,
    num_key_value_heads=10,
    use_mla=False,
    qk_nope_head_dim=0,
    qk_rope_head_dim=0,
)
SMALL = LanguageConfig(hidden_size=2048, num_hidden_layers=27, num_attention_heads=16)
BASE = LanguageConfig(hidden_size=2560)
# Two plain layers, then ratios 4 and 128 in turn; three draft stages behind the trunk (V4 spec 1.2-1.3).
FLASH_RATIOS = (0, 0, *(4, 128) * 20, 4, 0, 0, 0)


def flash(**overrides: Any) -> V4LanguageConfig:
    values: dict[str, Any] = {
        "vocab_size": 129280,
        "hidden_size": 4096,
        "num_hidden_layers": 43,
        "num_attention_heads": 64,
        "head_dim": 512,
        "qk_rope_head_dim": 64,
        "q_lora_rank": 1024,
        "o_lora_rank": 1024,
        "o_groups": 8,
        "moe_intermediate_size": 2048,
        "n_routed_experts": 256,
        "num_experts_per_tok": 6,
        "compress_ratios": FLASH_RATIOS,
    }
    return V4LanguageConfig(**values | overrides)


def named(rows: tuple[CacheRows, ...], *, layer: int) -> dict[str, tuple[int, int, int]]:
    return {r.name: (r.num_rows, r.width, r.element_bytes) for r in rows if r.layer == layer}


@pytest.mark.parametrize(
    ("config", "bytes_per_token"), [(TINY, 61_440), (SMALL, 31_104), (BASE, 34_560)]
)
def test_bytes_of_a_vl2_token_in_bfloat16(config: LanguageConfig, bytes_per_token: int) -> None:
    (group,) = vl2_cache_spec(config, dtype_bytes=2).groups
    assert group.bytes_per_token == bytes_per_token
    assert group.bytes_per_token == (config.num_hidden_layers * config.cache_row_elements() * 2), (
        "the runner's own count"
    )


@pytest.mark.parametrize(("block_size", "dtype_bytes"), [(16, 2), (32, 4), (64, 4)])
def test_vl2_blocks_grow_with_their_size_and_dtype(block_size: int, dtype_bytes: int) -> None:
    spec = vl2_cache_spec(TINY, dtype_bytes, block_size)
    assert spec.groups[0].bytes_per_block == 30_720 * dtype_bytes * block_size
    assert spec.bytes_per_slot == 0


def test_a_default_vl2_tiny_block_is_two_megabytes_and_holds_keys_and_values() -> None:
    (group,) = vl2_cache_spec(TINY, dtype_bytes=2).groups
    assert group.block_size == 32
    assert group.bytes_per_block == 1_966_080
    assert named(group.rows, layer=11) == {"k": (32, 1280, 2), "v": (32, 1280, 2)}


def test_latent_layers_keep_the_latent_and_the_rotated_key() -> None:
    (group,) = vl2_cache_spec(SMALL, dtype_bytes=2).groups
    assert named(group.rows, layer=0) == {"latent": (32, 512, 2), "k_pe": (32, 64, 2)}


def test_v4_full_blocks_grow_by_69_kilobytes_for_ten_tokens() -> None:
    full, _ = v4_cache_spec(flash(), dtype_bytes=2).groups
    assert full.bytes_per_token == 6_880  # 6,720 of ratio 4, 160 of ratio 128
    assert full.bytes_per_block == 880_640


def test_v4_window_blocks_hold_raw_rows_and_boundary_state() -> None:
    _, window = v4_cache_spec(flash(), dtype_bytes=2).groups
    boundary = [rows for rows in window.rows if "boundary" in rows.name]
    raw = [rows for rows in window.rows if rows.name == "raw"]
    assert sum(rows.size_bytes for rows in boundary) == 21 * 20 * 1024  # 0.43 MB
    assert sum(rows.size_bytes for rows in raw) == 43 * 128 * 1024  # 5.6 MB
    assert window.bytes_per_block == 430_080 + 5_636_096  # about 6 MB
    assert window.window == 128


def test_v4_rings_are_twelve_megabytes_without_margin() -> None:
    spec = v4_cache_spec(flash(), dtype_bytes=2, margin=0)
    assert spec.bytes_per_slot == 21 * (64 + 16) * 1024 + 20 * 512 * 1024
    assert named(spec.rings, layer=2) == {
        "entries.values": (8, 1024, 4),
        "entries.gates": (8, 1024, 4),
        "index_keys.values": (8, 256, 4),
        "index_keys.gates": (8, 256, 4),
    }
    assert named(spec.rings, layer=3) == {
        "entries.values": (128, 512, 4),
        "entries.gates": (128, 512, 4),
    }
    assert named(spec.rings, layer=0) == {}


def test_the_margin_lengthens_each_ring() -> None:
    bare, spec = (v4_cache_spec(flash(), dtype_bytes=2, margin=m) for m in (0, 8))
    longer = [a.num_rows - b.num_rows for a, b in zip(spec.rings, bare.rings, strict=True)]
    assert set(longer) == {8}


def test_what_each_kind_of_v4_layer_keeps_in_a_block() -> None:
    full, window = v4_cache_spec(flash(), dtype_bytes=2).groups
    assert named(full.rows, layer=0) == {}
    assert named(full.rows, layer=2) == {"entries": (32, 512, 2), "index_keys": (32, 128, 2)}
    assert named(full.rows, layer=3) == {"entries": (1, 512, 2)}
    assert named(window.rows, layer=3) == {"raw": (128, 512, 2)}
    assert named(window.rows, layer=2) == {
        "raw": (128, 512, 2),
        "entries.boundary.values": (4, 512, 4),
        "entries.boundary.gates": (4, 512, 4),
        "index_keys.boundary.values": (4, 128, 4),
        "index_keys.boundary.gates": (4, 128, 4),
    }


def test_draft_stages_keep_raw_rows_under_the_same_tables() -> None:
    plain, drafted = (v4_cache_spec(flash(), 2, num_draft_stages=n) for n in (0, 3))
    assert drafted.groups[0] == plain.groups[0]
    assert drafted.rings == plain.rings
    assert drafted.groups[1].bytes_per_block - plain.groups[1].bytes_per_block == 3 * 128 * 1024
    assert named(drafted.groups[1].rows, layer=45) == {"raw": (128, 512, 2)}


@pytest.mark.parametrize(
    ("ratios", "window", "block_size"),
    [
        ((0, 4, 128), 128, 128),
        ((0, 4, 128), 16, 128),
        ((0, 4, 128), 129, 256),
        ((0, 4), 8, 8),
        ((0, 4), 6, 8),
        ((0, 0), 7, 7),
    ],
)
def test_v4_blocks_hold_whole_compressor_windows_and_the_attention_window(
    ratios: tuple[int, ...], window: int, block_size: int
) -> None:
    config = flash(num_hidden_layers=len(ratios), compress_ratios=ratios, sliding_window=window)
    assert v4_cache_spec(config, dtype_bytes=4).block_size == block_size


# --- what a window needs ------------------------------------------------------------------------


def window_group(block_size: int, window: int) -> CacheGroup:
    return CacheGroup("window", block_size, (), window)


@pytest.mark.parametrize(("block_size", "window"), [(8, 8), (8, 5), (8, 2), (8, 13), (128, 128)])
def test_needed_and_stored_blocks_cover_what_later_tokens_read(
    block_size: int, window: int
) -> None:
    group = window_group(block_size, window)
    for end in range(1, 5 * block_size):
        oldest_row = max(0, end - window + 1)
        assert group.first_needed_block(end) == oldest_row // block_size
        assert group.first_stored_block(end) <= group.first_needed_block(end)
        assert group.first_stored_block(end) <= max(0, end // block_size - 1), "no checkpoint left"
        for margin in (0, 1, 4, block_size):
            stored = group.num_blocks_for(end + margin) - group.first_stored_block(end)
            assert stored <= group.max_stored_blocks(margin)


def test_a_released_window_needs_one_block_at_each_multiple_of_its_size() -> None:
    group = window_group(128, 128)
    assert [group.first_needed_block(128 * n) for n in (1, 2, 7)] == [0, 1, 6]
    assert group.max_stored_blocks(8) == 3  # the study's ceil((127 + in flight) / 128) + 1


def test_a_group_without_window_needs_and_stores_everything() -> None:
    group = CacheGroup("full", 8, ())
    assert group.first_needed_block(1000) == group.first_stored_block(1000) == 0


def test_groups_share_one_block_size() -> None:
    with pytest.raises(AssertionError, match="sizes must agree"):
        CacheSpec((CacheGroup("full", 8, ()), window_group(16, 8)))


def test_a_spec_is_one_full_group_and_perhaps_a_window() -> None:
    with pytest.raises(AssertionError, match="one full group"):
        CacheSpec((window_group(8, 8),))


def test_the_room_imports_no_torch() -> None:
    code = "import foveal.cache, sys; assert 'torch' not in sys.modules"
    subprocess.run([sys.executable, "-c", code], check=True)
