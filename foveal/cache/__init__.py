"""What is kept between steps and between requests: specs, block hashes, blocks, tables, encoder entries.

Bookkeeping only: which block, which row, whose. It imports no torch; tensors are the storage's business.
"""

from __future__ import annotations

from foveal.cache.block_pool import NULL_BLOCK, BlockPool
from foveal.cache.content_ids import content_id, item_content_id, picture_content_id
from foveal.cache.encoder_cache import EncoderCache, EncoderEntry, EncoderStats
from foveal.cache.hashing import BlockHasher, HashChain
from foveal.cache.kv_manager import Allocation, GroupUsage, KVManager, PrefixHit, PrefixStats
from foveal.cache.spans import Span, is_legal_end, last_legal_end, media_span
from foveal.cache.spec import CacheGroup, CacheRows, CacheSpec, v4_cache_spec, vl2_cache_spec

__all__ = [
    "NULL_BLOCK",
    "Allocation",
    "BlockHasher",
    "BlockPool",
    "CacheGroup",
    "CacheRows",
    "CacheSpec",
    "EncoderCache",
    "EncoderEntry",
    "EncoderStats",
    "GroupUsage",
    "HashChain",
    "KVManager",
    "PrefixHit",
    "PrefixStats",
    "Span",
    "content_id",
    "is_legal_end",
    "item_content_id",
    "last_legal_end",
    "media_span",
    "picture_content_id",
    "v4_cache_spec",
    "vl2_cache_spec",
]
