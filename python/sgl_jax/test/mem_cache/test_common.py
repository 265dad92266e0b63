"""CONTRACT 10: allocation evicts exactly what each pool lacks; one release path."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any
from unittest.mock import MagicMock

import pytest

from sgl_jax.srt.mem_cache.allocator import TokenToKVPoolAllocator
from sgl_jax.srt.mem_cache.base_prefix_cache import EvictParams, InsertParams
from sgl_jax.srt.mem_cache.common import (
    OverAllocationError,
    alloc_paged_token_slots_extend,
    alloc_token_slots,
    available_and_evictable_str,
    evict_from_tree_cache,
    extend_demand,
    release_kv_cache,
)
from sgl_jax.srt.mem_cache.radix_tree.key import RadixKey
from sgl_jax.srt.mem_cache.unified_radix_cache import UnifiedRadixCache
from sgl_jax.test.mem_cache.unified.desk import Desk


def recorded(desk: Desk, monkeypatch: pytest.MonkeyPatch) -> list[EvictParams]:
    seen: list[EvictParams] = []
    real = desk.cache.evict
    monkeypatch.setattr(desk.cache, "evict", lambda p: (seen.append(p), real(p))[1])
    return seen


def test_each_pool_asks_for_its_own_shortfall(monkeypatch: pytest.MonkeyPatch) -> None:
    """D27: 10 FULL and 6 SWA slots, 4 used; 8 wanted → FULL lacks 2, SWA lacks 6."""
    desk = Desk(1, 4, full_pages=10, swa_pages=6)
    desk.insert("abcd")
    seen = recorded(desk, monkeypatch)
    evict_from_tree_cache(desk.cache, 8, dp_rank=0)
    assert seen == [EvictParams(num_tokens=2, swa_num_tokens=6, dp_rank=0)]
    evict_from_tree_cache(desk.cache, 6, dp_rank=0)
    assert len(seen) == 1


def test_no_cache_nothing_to_evict() -> None:
    assert evict_from_tree_cache(None, 100) is None


def test_a_single_pool_asks_for_its_shortfall() -> None:
    allocator = TokenToKVPoolAllocator(8, None)
    cache = UnifiedRadixCache(MagicMock(), allocator)
    cache.insert(InsertParams(RadixKey([1, 2]), allocator.alloc(2)))
    cache.insert(InsertParams(RadixKey([3, 4]), allocator.alloc(2)))
    slots = alloc_token_slots(cache, 6)
    assert len(slots) == 6 and cache.total_size() == 2
    slots, state = alloc_token_slots(cache, 0, backup_state=True)
    assert len(slots) == 0 and len(state) == 2
    with pytest.raises(RuntimeError, match=r"Out of memory. Tried to allocate 9 tokens on dp_rank=0"):
        alloc_token_slots(cache, 9)
    assert (
        available_and_evictable_str(cache) == "Available tokens: 2 (available=2 + evictable=0, dp_rank=0)\n"
    )


@pytest.mark.parametrize(
    ("prefix", "seq", "page", "demand"),
    [
        ([0], [5], 4, 8),
        ([4], [5], 4, 4),
        ([5], [8], 4, 0),
        ([0, 3], [1, 5], 4, 8),
        ([7], [9], 1, 2),
        ([255], [257], 256, 256),
    ],
)
def test_demand_is_whole_new_pages(prefix: list[int], seq: list[int], page: int, demand: int) -> None:
    """D45: a sequence that crosses a boundary needs a page, others nothing."""
    assert extend_demand(prefix, seq, page) == demand


def test_extend_evicts_what_the_new_pages_lack() -> None:
    desk = Desk(4, 8, full_pages=6, swa_pages=6)
    desk.insert("abcd")
    slots: Any = alloc_paged_token_slots_extend(desk.cache, [0], [13], [-1], 13)
    assert len(slots) == 13 and desk.picture() == ["/ab S"]
    with pytest.raises(RuntimeError, match="Prefill out of memory"):
        alloc_paged_token_slots_extend(desk.cache, [0], [13], [-1], 13)
    assert available_and_evictable_str(desk.cache) == (
        "Available full tokens: 8 (available=8 + evictable=0, dp_rank=0)\n"
        "Available swa tokens: 8 (available=8 + evictable=0, dp_rank=0)\n"
    )


def test_release_returns_slots_and_row() -> None:
    desk = Desk(4, 8)
    req = desk.request("abc", tail=2)
    release_kv_cache(req, desk.cache)
    assert req.req_pool_idx is None and len(desk.rows.free_slots) == 8
    assert desk.available() == (61, 61) and desk.sums() == (3, 0, 3, 0)
    assert release_kv_cache(req, desk.cache) is None


@pytest.mark.parametrize("allowed", [True, False])
def test_over_allocated_pages_return_and_are_reported(allowed: bool) -> None:
    """[ceil(committed), allocated) is freed; who did not expect it gets a named AssertionError afterwards."""
    desk = Desk(4, 8)
    req = desk.request("abcd")
    req.kv_committed_len = 5
    if allowed:
        release_kv_cache(req, desk.cache, allow_overallocated=True)
    else:
        with pytest.raises(OverAllocationError, match="16 slots allocated and 5 committed") as caught:
            release_kv_cache(req, desk.cache)
        assert isinstance(caught.value, AssertionError)
    assert desk.available() == (63, 63) and desk.sums() == (1, 0, 1, 0) and req.req_pool_idx is None


def test_release_without_a_row_touches_nothing() -> None:
    cache = MagicMock()
    release_kv_cache(SimpleNamespace(req_pool_idx=None), cache)
    assert cache.mock_calls == []
