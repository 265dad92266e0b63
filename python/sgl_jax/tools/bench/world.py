"""Pools, a cache and requests without device arrays, through the seam's names only, so that any tree with the seam can run it."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

KINDS = ("unified", "legacy")


@dataclass(eq=False)
class BenchReq:
    """The request fields caches read and write."""

    rid: str
    origin_input_ids: list[int]
    dp_rank: int | None = 0
    extra_key: str | None = None
    output_ids: list[int] = field(default_factory=list)
    fill_ids: Sequence[int] = field(default_factory=list)
    req_pool_idx: int | None = None
    prefix_indices: Any = field(default_factory=lambda: np.empty((0,), np.int32))
    last_node: Any = None
    last_host_node: Any = None
    host_hit_length: int = 0
    cache_protected_len: int = 0
    last_matched_prefix_len: int = 0
    kv_committed_len: int = 0
    kv_allocated_len: int = 0
    kv_committed_freed: bool = False
    kv_overallocated_freed: bool = False
    swa_evicted_seqlen: int = 0
    swa_uuid_for_lock: int | None = None
    cache_lock_params: Any = None
    is_chunked: int = 1
    radix_tokens: Any = None

    def pop_committed_kv_cache(self) -> int:
        self.kv_committed_freed = True
        return self.kv_committed_len


class World:
    """One cache of ``kind`` over pools of ``full`` / ``swa`` tokens per rank."""

    def __init__(
        self,
        kind: str,
        page: int,
        *,
        window: int = 1024,
        full: int,
        swa: int | None = None,
        dp: int = 1,
        row: int = 0,
    ) -> None:
        from sgl_jax.srt.mem_cache.allocator import SWATokenToKVPoolAllocator
        from sgl_jax.srt.mem_cache.memory_pool import ReqToTokenPool, SWAKVPool

        self.page, self.window, self.dp = page, window, dp
        self.capacity = (full // page * page, (full if swa is None else swa) // page * page)
        kv = SWAKVPool.__new__(SWAKVPool)  # no device arrays
        self.allocator = SWATokenToKVPoolAllocator(
            self.capacity[0] * dp, self.capacity[1] * dp, kv, page_size=page, dp_size=dp
        )
        self.pool = ReqToTokenPool(8, max(row, 16))
        self.cache = _make_cache(kind, self.pool, self.allocator, page, window)
        self.random = np.random.default_rng(0)

    # ------------------------------------------------------------------------------------------------------ allocation
    def extend(self, start: int, end: int, last: int, rank: int = 0) -> Any:
        """Slots for [start, end) of one sequence."""
        if self.page == 1:
            return self.allocator.alloc(end - start, dp_rank=rank)
        return self.allocator.alloc_extend(
            [start], [end], np.array([last], np.int32), end - start, dp_rank=rank
        )

    def ids(self, count: int) -> Any:
        """Random token ids, int32 [count]."""
        return self.random.integers(1, 1 << 30, count, dtype=np.int32)

    # ------------------------------------------------------------------------------------------------------------- tree
    def key(self, tokens: Any, rank: int = 0) -> Any:
        from sgl_jax.srt.mem_cache.radix_cache import RadixKey

        return RadixKey(tokens, None, rank)

    def insert(self, tokens: Any, rank: int = 0) -> None:
        """Insert fresh slots under a list or array of ids."""
        from sgl_jax.srt.mem_cache.base_prefix_cache import InsertParams

        value = self.allocator.alloc(len(tokens), dp_rank=rank)
        if value is None:
            raise RuntimeError(
                f"the pools are too small for the case: {len(tokens)} tokens more on rank {rank}"
            )
        self.cache.insert(InsertParams(key=self.key(_listed(tokens), rank), value=value))

    def leaves(self, count: int, tokens: int, rank: int = 0) -> None:
        """``count`` leaves of ``tokens`` random ids each below the root."""
        for _ in range(count):
            self.insert(self.ids(tokens), rank)

    def match(self, key: Any) -> Any:
        from sgl_jax.srt.mem_cache.base_prefix_cache import MatchPrefixParams

        return self.cache.match_prefix(MatchPrefixParams(key=key))

    def evict(self, full: int = 0, swa: int = 0, rank: int = 0) -> Any:
        from sgl_jax.srt.mem_cache.base_prefix_cache import EvictParams

        return self.cache.evict(EvictParams(num_tokens=full, swa_num_tokens=swa, dp_rank=rank))

    # --------------------------------------------------------------------------------------------------------- requests
    def admit(self, tokens: list[int], rank: int = 0, packed: bool = True) -> BenchReq:
        """Match, lock, take a row. Nothing is computed yet."""
        req = BenchReq("r", tokens, rank)
        if packed:
            req.radix_tokens = _token_buffer(tokens)
        buffer = req.radix_tokens
        key = self.key(tokens[:-1], rank) if buffer is None else buffer.key(len(tokens) - 1, None, rank)
        found = self.match(key)
        cached = len(found.device_indices)
        req.last_node, req.prefix_indices = found.last_device_node, found.device_indices
        req.cache_protected_len = req.last_matched_prefix_len = cached
        req.kv_committed_len = req.kv_allocated_len = cached
        held = self.cache.inc_lock_ref(req.last_node)
        req.cache_lock_params = held.to_dec_params() if hasattr(held, "to_dec_params") else None
        req.swa_uuid_for_lock = held.swa_uuid_for_lock
        if self.pool.alloc([req]) is None:
            raise RuntimeError("no request row left")
        self.pool.req_to_token[req.req_pool_idx, :cached] = found.device_indices
        return req

    def compute(self, req: BenchReq, end: int) -> None:
        """Slots for [committed, end) of the request, evicting when the pools are short."""
        start, rank = req.kv_committed_len, req.dp_rank or 0
        need = (-(-end // self.page) - -(-start // self.page)) * self.page
        full = need - self.allocator.full_available_size(dp_rank=rank)
        swa = need - self.allocator.swa_available_size(dp_rank=rank)
        if full > 0 or swa > 0:
            self.evict(max(full, 0), max(swa, 0), rank)
        row = self.pool.req_to_token[req.req_pool_idx]
        row[start:end] = self.extend(start, end, int(row[start - 1]) if start else -1, rank)
        req.kv_committed_len = req.kv_allocated_len = end
        # With a packed key only the length is read; copying the ids per chunk would be the harness's cost, not the cache's.
        packed = req.radix_tokens is not None
        req.fill_ids = range(end) if packed else (req.origin_input_ids + req.output_ids)[:end]

    def finish(self, req: BenchReq) -> None:
        self.cache.cache_finished_req(req)
        self.pool.free(req)

    # ----------------------------------------------------------------------------------------------------------- verdict
    def verify(self) -> list[str]:
        """Broken balances with no request running: available + evictable == capacity and nothing protected, per pool."""
        wrong = []
        for rank in range(self.dp):
            for index, pool in enumerate(("full", "swa")):
                available = getattr(self.allocator, f"{pool}_available_size")(dp_rank=rank)
                evictable = getattr(self.cache, f"{pool}_evictable_size")(rank)
                protected = getattr(self.cache, f"{pool}_protected_size")(rank)
                if protected or available + evictable != self.capacity[index]:
                    wrong.append(
                        f"rank {rank} {pool}: available {available} + evictable {evictable} + protected {protected} "
                        f"!= capacity {self.capacity[index]}"
                    )
        return wrong


@functools.cache
def packed_keys() -> bool:
    """Whether the tree under test has packed key buffers; others get lists."""
    try:
        from sgl_jax.srt.mem_cache.radix_tree import key
    except ImportError:
        return False
    return hasattr(key, "TokenBuffer")


def _listed(tokens: Any) -> Any:
    return tokens if packed_keys() else [int(token) for token in tokens]


def _token_buffer(tokens: list[int]) -> Any:
    if not packed_keys():
        return None
    from sgl_jax.srt.mem_cache.radix_tree.key import TokenBuffer

    return TokenBuffer(tokens)


def _make_cache(kind: str, pool: Any, allocator: Any, page: int, window: int) -> Any:
    makers: dict[str, Callable[[Any, Any, int, int], Any]] = {"unified": _unified, "legacy": _legacy}
    if kind not in makers:
        raise ValueError(f"cache {kind!r}: use one of {', '.join(KINDS)}")
    return makers[kind](pool, allocator, page, window)


def _legacy(pool: Any, allocator: Any, page: int, window: int) -> Any:
    from sgl_jax.srt.mem_cache.swa_radix_cache import SWARadixCache

    return SWARadixCache(pool, allocator, window, page)


def _unified(pool: Any, allocator: Any, page: int, window: int) -> Any:
    from sgl_jax.srt.mem_cache.cache_init_params import CacheInitParams
    from sgl_jax.srt.mem_cache.unified_cache_components import ComponentType
    from sgl_jax.srt.mem_cache.unified_radix_cache import UnifiedRadixCache

    return UnifiedRadixCache(
        pool,
        allocator,
        page_size=page,
        tree_components=(ComponentType.FULL, ComponentType.SWA),
        component_init_params=CacheInitParams(pool, allocator, page, sliding_window_size=window),
    )
