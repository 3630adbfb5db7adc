"""How many blocks each pool gets: what the cache may take, set against what requests could ever use.

    free memory after loading
      - activations of one step, encoder cache, rings of all slots      (fixed)
      = room for blocks  ->  window pool (a cap a slot, then kept ends)  ->  full pool

Nothing is allocated here, and nothing is measured: numbers in, a plan out. Source: V4 spec 5.
"""

from __future__ import annotations

from dataclasses import dataclass

from foveal.cache.spec import CacheSpec
from foveal.errors import ResourceError

# Of what is free, the cache takes this share at most unless a size is asked for: other programs run here too.
SHARE_OF_FREE = 0.5
# Blocks for ends of chunks and prompts that stay findable, for each block of the full pool.
KEPT_WINDOW_SHARE = 1 / 8


@dataclass(frozen=True, slots=True)
class CachePlan:
    """Blocks of each pool, null block included, in the order of the spec's groups; sizes in bytes.

    `max_request_tokens` is what one request alone can hold, `is_cut` True where that is less than the model's context.
    """

    num_blocks: tuple[int, ...]
    block_bytes: int
    ring_bytes: int
    encoder_bytes: int
    free_bytes: int | None
    max_request_tokens: int
    is_cut: bool

    @property
    def total_bytes(self) -> int:
        return self.block_bytes + self.ring_bytes + self.encoder_bytes

    def table(self) -> tuple[tuple[str, int], ...]:
        """Rows for people: what, bytes."""
        return (
            ("cache blocks", self.block_bytes),
            ("request slots", self.ring_bytes),
            ("picture embeddings", self.encoder_bytes),
            ("in all", self.total_bytes),
        )


def plan_cache(
    spec: CacheSpec,
    *,
    max_num_seqs: int,
    max_model_len: int,
    encoder_bytes: int,
    free_bytes: int | None,
    cache_bytes: int | None = None,
    is_length_fixed: bool = False,
) -> CachePlan:
    """The pools for `max_num_seqs` requests of up to `max_model_len` tokens.

    `cache_bytes` is what blocks and rings may take (None: a share of `free_bytes`, or all that could be used where that
    is unknown). Where a request of `max_model_len` tokens does not fit, the plan says how long one may be; with
    `is_length_fixed` that is an error. Raises ResourceError with the numbers.
    """
    rings = max_num_seqs * spec.bytes_per_slot
    room = cache_bytes
    if room is None and free_bytes is not None:
        room = int(max(0, free_bytes - encoder_bytes) * SHARE_OF_FREE)
    wanted = _blocks_for(spec, max_num_seqs * (max_model_len + 1), max_num_seqs)
    alone = _blocks_for(spec, max_model_len + 1, 1)
    if room is None or _size(spec, wanted) + rings <= room:
        return _plan(spec, wanted, rings, encoder_bytes, free_bytes, max_model_len)
    blocks = _largest(spec, wanted, room - rings, max_num_seqs)
    if blocks is None or (is_length_fixed and _length(spec, blocks) < max_model_len):
        need = _size(spec, alone) + spec.bytes_per_slot
        longest = 0 if blocks is None else _length(spec, blocks)
        raise ResourceError(
            f"a context of {max_model_len} tokens needs {need / 1e9:.2f} GB of cache, and "
            f"{max(0, room) / 1e9:.2f} GB may be taken; the longest context that fits is {longest} tokens: set "
            "max_model_len, allow more with cache_bytes, or serve fewer requests at once with max_num_seqs"
        )
    return _plan(spec, blocks, rings, encoder_bytes, free_bytes, max_model_len)


def _blocks_for(spec: CacheSpec, num_tokens: int, num_requests: int) -> tuple[int, ...]:
    """Blocks that `num_requests` requests of `num_tokens` tokens in all could use, null block included."""
    full = spec.groups[0].num_blocks_for(num_tokens) + num_requests
    counts = [full + 1]
    for group in spec.groups[1:]:
        least = _window_floor(spec, num_requests)
        counts.append(
            min(full, least + int(full * KEPT_WINDOW_SHARE)) + 1 if group.window else full + 1
        )
    return tuple(counts)


def _window_floor(spec: CacheSpec, num_requests: int) -> int:
    """Window blocks that this many running requests hold at most: those before a chunk and those before its end."""
    return num_requests * 2 * spec.groups[1].max_stored_blocks(spec.margin)


def _size(spec: CacheSpec, blocks: tuple[int, ...]) -> int:
    return sum(n * g.bytes_per_block for n, g in zip(blocks, spec.groups, strict=True))


def _largest(
    spec: CacheSpec, wanted: tuple[int, ...], room: int, num_requests: int
) -> tuple[int, ...] | None:
    """The largest pools within `room`; the window's floor comes first. None if not even one block fits."""
    low, high = 1, wanted[0]
    if _size(spec, _scaled(spec, 2, num_requests)) > room:
        return None
    while low < high:
        middle = (low + high + 1) // 2
        fits = _size(spec, _scaled(spec, middle, num_requests)) <= room
        low, high = (middle, high) if fits else (low, middle - 1)
    return _scaled(spec, low, num_requests)


def _scaled(spec: CacheSpec, full: int, num_requests: int) -> tuple[int, ...]:
    windows = [
        min(full, _window_floor(spec, num_requests) + int(full * KEPT_WINDOW_SHARE)) + 1
        for _ in spec.groups[1:]
    ]
    return (full, *windows)


def _length(spec: CacheSpec, blocks: tuple[int, ...]) -> int:
    return (blocks[0] - 1) * spec.block_size - 1


def _plan(
    spec: CacheSpec,
    blocks: tuple[int, ...],
    rings: int,
    encoder_bytes: int,
    free_bytes: int | None,
    max_model_len: int,
) -> CachePlan:
    longest = _length(spec, blocks)
    return CachePlan(
        blocks,
        _size(spec, blocks),
        rings,
        encoder_bytes,
        free_bytes,
        min(longest, max_model_len),
        longest < max_model_len,
    )
