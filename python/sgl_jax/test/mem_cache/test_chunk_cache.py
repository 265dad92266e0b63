"""CONTRACT 5: caches without sharing; slots stay with their request, the SWA one reclaims its own tail."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from sgl_jax.srt.mem_cache.base_prefix_cache import (
    EvictParams,
    EvictResult,
    IncLockRefResult,
    MatchPrefixParams,
)
from sgl_jax.srt.mem_cache.chunk_cache import ChunkCache, SWAChunkCache
from sgl_jax.srt.mem_cache.common import release_kv_cache
from sgl_jax.srt.mem_cache.memory_pool import ReqToTokenPool
from sgl_jax.srt.mem_cache.radix_tree.key import RadixKey
from sgl_jax.test.mem_cache.unified.desk import GEOMETRY, GEOMETRY_IDS, dual_allocator

geometry = pytest.mark.parametrize(("page", "dp"), GEOMETRY, ids=GEOMETRY_IDS)


def build(page: int = 1, window: int = 4, dp: int = 1) -> SWAChunkCache:
    return SWAChunkCache(ReqToTokenPool(4, 64 * page + 8), dual_allocator(page, 32, 32, dp), page, window)


def request(cache: Any, pages: int, rank: int = 0, committed: int | None = None) -> Any:
    length = pages * cache.page_size
    req = SimpleNamespace(
        rid="r",
        dp_rank=rank,
        req_pool_idx=None,
        is_chunked=0,
        fill_ids=list(range(length)),
        last_node=None,
        cache_lock_params=None,
        swa_uuid_for_lock=None,
        swa_evicted_seqlen=0,
        cache_protected_len=0,
        kv_committed_len=length if committed is None else committed,
        kv_allocated_len=length,
    )
    req.pop_committed_kv_cache = lambda: req.kv_committed_len
    req.pop_overallocated_kv_cache = lambda: (req.kv_committed_len, req.kv_allocated_len)
    cache.req_to_token_pool.alloc([req])
    cache.req_to_token_pool.req_to_token[req.req_pool_idx, :length] = cache.token_to_kv_pool_allocator.alloc(
        length, dp_rank=rank
    )
    return req


def available(cache: Any, rank: int = 0) -> tuple[int, int]:
    a = cache.token_to_kv_pool_allocator
    return a.full_available_size(rank) // cache.page_size, a.swa_available_size(rank) // cache.page_size


def test_nothing_is_remembered() -> None:
    cache = build()
    result = cache.match_prefix(MatchPrefixParams(RadixKey([1, 2, 3], None, 0)))
    assert result.device_indices.tolist() == [] and result.last_device_node is None
    assert cache.inc_lock_ref(None) == IncLockRefResult(delta=0) and cache.dec_lock_ref(None) == 0
    assert cache.evict(EvictParams(5, 5, 0)) == EvictResult()
    assert (cache.pretty_print(), cache.total_size(), cache.check(), cache.reset()) == ("", 0, [], None)
    assert not hasattr(cache, "root_node")
    sizes = ("full_evictable_size", "swa_evictable_size", "full_protected_size", "swa_protected_size")
    assert [getattr(cache, name)(0) for name in sizes] == [0, 0, 0, 0]


def test_capabilities() -> None:
    assert build().supports_swa() is True and build().supports_recurrent() is False
    assert ChunkCache(None, None, 1).supports_swa() is False
    assert ChunkCache.reclaim_schedule is None
    schedule = SWAChunkCache.reclaim_schedule
    assert schedule is not None and (schedule.decode_offset, schedule.decode_offset_overlap) == (0, 0)


@pytest.mark.parametrize("window", [0, -4, None])
def test_a_window_that_is_not_positive_is_refused(window: int | None) -> None:
    with pytest.raises(ValueError, match="sliding_window_size"):
        SWAChunkCache(None, None, 1, window)  # type: ignore[arg-type]


def test_unfinished_shows_a_copy_of_the_row() -> None:
    cache = build()
    req = request(cache, 3)
    cache.cache_unfinished_req(req)
    row = cache.req_to_token_pool.req_to_token[req.req_pool_idx]
    row[0] = 99
    assert req.prefix_indices.tolist() == [1, 2, 3]


@geometry
def test_finished_gives_everything_back(page: int, dp: int) -> None:
    cache = build(page, 2 * page, dp)
    req = request(cache, 5, dp - 1)
    assert available(cache, dp - 1) == (27, 27)
    release_kv_cache(req, cache)
    assert available(cache, dp - 1) == (32, 32) and req.req_pool_idx is None


def test_the_contracts_reclaim_numbers() -> None:
    """CONTRACT 5: page 1, window 4, pre_len 16 → SWA of [0, 11)."""
    cache = build()
    req = request(cache, 16)
    cache.evict_req_swa(req, 16)
    assert req.swa_evicted_seqlen == 11 and available(cache) == (16, 27)
    cache.evict_req_swa(req, 10)
    assert req.swa_evicted_seqlen == 11
    release_kv_cache(req, cache)
    assert available(cache) == (32, 32)


@geometry
def test_reclaim_is_page_safe_and_per_rank(page: int, dp: int) -> None:
    """[0, floor(pre_len - W - P)); the other rank and FULL are untouched."""
    cache = build(page, 2 * page, dp)
    req = request(cache, 8, dp - 1)
    cache.evict_req_swa(req, 8 * page - 1, dp - 1)
    assert req.swa_evicted_seqlen == 4 * page
    assert available(cache, dp - 1) == (24, 28)
    if dp == 2:
        assert available(cache, 0) == (32, 32)
        with pytest.raises(ValueError, match="evict_req_swa without dp_rank on 2"):
            cache.evict_req_swa(req, 8 * page)
        with pytest.raises(ValueError, match="dp_rank=0 for a request of dp_rank=1"):
            cache.evict_req_swa(req, 8 * page, 0)
        req.dp_rank = None
        with pytest.raises(ValueError, match="has no dp_rank on 2"):
            release_kv_cache(req, cache)
        assert available(cache, 0) == (32, 32) and available(cache, 1) == (24, 28)


def test_reclaim_without_a_row_does_nothing() -> None:
    cache = build()
    assert cache.evict_req_swa(SimpleNamespace(req_pool_idx=None, dp_rank=0), 100) is None


def test_receipts_are_exchanged_and_released(monkeypatch: pytest.MonkeyPatch) -> None:
    """CONTRACT 5: unfinished releases the old receipt and stores a new one; finished releases exactly that object."""
    cache = build()
    req = request(cache, 3)
    released: list[tuple[Any, Any]] = []
    monkeypatch.setattr(cache, "inc_lock_ref", lambda node: IncLockRefResult(0, 41))
    monkeypatch.setattr(cache, "dec_lock_ref", lambda node, params=None: released.append((node, params)))
    req.last_node = "node"
    cache.cache_unfinished_req(req)
    first = req.cache_lock_params
    assert released == [] and req.swa_uuid_for_lock == first.swa_uuid_for_lock == 41
    cache.cache_unfinished_req(req)
    assert released == [("node", first)] and req.cache_lock_params is not first
    second = req.cache_lock_params
    cache.cache_finished_req(req)
    assert released[-1][1] is second
    assert (req.cache_lock_params, req.swa_uuid_for_lock) == (None, None)


def test_a_half_committed_page_leaves_as_a_whole() -> None:
    cache = build(4, 8)
    req = request(cache, 3, committed=5)
    release_kv_cache(req, cache, allow_overallocated=True)
    assert available(cache) == (32, 32)


def test_the_ledger_of_a_chunk_cache_balances() -> None:
    cache = build()
    req = request(cache, 16)
    cache.evict_req_swa(req, 16)
    snapshot = cache.cache_ledger_snapshot(0, [req])
    assert (snapshot["full_request_owned"], snapshot["swa_request_owned"], snapshot["swa_available"]) == (
        16,
        5,
        27,
    )
    assert np.sum([snapshot[k] for k in ("full_tree_evictable", "full_tree_protected")]) == 0
