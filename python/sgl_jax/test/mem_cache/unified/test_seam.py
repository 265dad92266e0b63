"""CONTRACT 7 and 8: names, signatures and attributes that sglang-jax's own tests read or poke."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any
from unittest.mock import MagicMock

import numpy as np
import pytest

from sgl_jax.srt.mem_cache.allocator import SWATokenToKVPoolAllocator, TokenToKVPoolAllocator
from sgl_jax.srt.mem_cache.base_prefix_cache import BasePrefixCache, InsertParams, MatchPrefixParams
from sgl_jax.srt.mem_cache.cache_init_params import CacheInitParams
from sgl_jax.srt.mem_cache.radix_tree.key import RadixKey, TokenBuffer
from sgl_jax.srt.mem_cache.radix_tree.request_key import build_radix_key
from sgl_jax.srt.mem_cache.unified_cache_components import (
    _NUM_COMPONENT_TYPES,
    BASE_COMPONENT_TYPE,
    CacheTransferPhase,
    ComponentData,
    ComponentType,
    EvictLayer,
    InsertResult,
    LRURefreshPhase,
    SWAComponent,
    next_component_uuid,
)
from sgl_jax.srt.mem_cache.unified_radix_cache import COMPONENT_REGISTRY, UnifiedRadixCache, UnifiedTreeNode
from sgl_jax.test.mem_cache.unified.desk import FULL, SWA, Desk, dual_allocator


def params(pool: Any, allocator: Any, **changes: Any) -> CacheInitParams:
    fields: dict[str, Any] = {"page_size": 4, "sliding_window_size": 8} | changes
    return CacheInitParams(pool, allocator, **fields)


def test_enums() -> None:
    assert [str(t) for t in ComponentType] == ["full", "swa", "recurrent"]
    assert (_NUM_COMPONENT_TYPES, BASE_COMPONENT_TYPE) == (3, ComponentType.FULL)
    assert ComponentType.FULL.is_full and ComponentType.SWA.is_swa and ComponentType.RECURRENT.is_recurrent
    assert (EvictLayer.DEVICE, EvictLayer.HOST, EvictLayer.ALL) == (1, 2, 3)
    assert [str(p) for p in LRURefreshPhase] == ["walkdown", "match_end", "insert_end"]
    assert [str(p) for p in CacheTransferPhase] == ["backup_host", "load_back", "backup_storage", "prefetch"]
    assert next_component_uuid() < next_component_uuid()
    assert set(COMPONENT_REGISTRY) == {FULL, SWA}


def test_nodes() -> None:
    first, second = UnifiedTreeNode((FULL, SWA)), UnifiedTreeNode((FULL,))
    assert second.id == first.id + 1 and UnifiedTreeNode.counter == second.id + 1
    assert [len(n.component_data) for n in (first, second)] == [3, 3]
    assert first.component_data[SWA].metadata == {} and first.component_data[SWA].metadata is not (
        second.component_data[SWA].metadata
    )
    assert (first.children, first.parent, first.hit_count, first.evicted, first.backuped) == (
        {},
        None,
        0,
        False,
        False,
    )
    first.last_access_time, second.last_access_time = 2.0, 1.0
    assert second < first
    assert ComponentData().metadata is not ComponentData().metadata
    assert ComponentData(metadata={"x": 1}).metadata == {"x": 1}


def test_the_root() -> None:
    root = Desk().cache.root_node
    assert len(root.key) == 0 and root.component_data[FULL].value == []
    assert [root.component_data[ct].lock_ref for ct in (FULL, SWA)] == [1, 1]


@pytest.mark.parametrize("kinds", [(FULL,), (FULL, SWA)])
def test_construction_over_a_mocked_allocator(kinds: tuple[ComponentType, ...]) -> None:
    """No instance attribute of the allocator exists on a spec'd mock; no method of it is called."""
    allocator, pool = MagicMock(spec=SWATokenToKVPoolAllocator), MagicMock()
    cache = UnifiedRadixCache(
        pool, allocator, page_size=4, tree_components=kinds, component_init_params=params(pool, allocator)
    )
    assert allocator.mock_calls == [] and pool.mock_calls == []
    assert cache.supports_swa() is (SWA in kinds)
    assert cache.sliding_window_size == (8 if SWA in kinds else None)


def test_defaults() -> None:
    allocator = TokenToKVPoolAllocator(16, None)
    cache = UnifiedRadixCache(MagicMock(), allocator)
    assert (cache.tree_components, cache.page_size, cache.disable, cache.is_eagle) == (
        (FULL,),
        1,
        False,
        False,
    )
    assert cache.component_init_params.page_size == 1 and cache.hicache_enabled is False
    assert cache.supports_recurrent() is cache.recurrent_extra_buffer_active() is False
    assert cache.insert(InsertParams(RadixKey([5, 6, 7]))) == InsertResult(0)
    assert cache.match_prefix(MatchPrefixParams(RadixKey([5, 6, 9]))).device_indices.tolist() == [5, 6]


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("req_to_token_pool", object()),
        ("token_to_kv_pool_allocator", object()),
        ("page_size", 8),
        ("is_eagle", True),
        ("enable_recurrent_extra_buffer", True),
        ("recurrent_track_interval", 4),
        ("sliding_window_size", None),
        ("sliding_window_size", 0),
        ("sliding_window_size", -4),
    ],
)
def test_init_params_must_agree(field: str, value: Any) -> None:
    """RFC 3, fault 6: the field that differs is named; a window that is not positive builds nothing."""
    pool, allocator = MagicMock(), MagicMock(spec=SWATokenToKVPoolAllocator)
    fields = {
        "req_to_token_pool": pool,
        "token_to_kv_pool_allocator": allocator,
        "page_size": 4,
        "sliding_window_size": 8,
    }
    with pytest.raises(ValueError, match=field):
        UnifiedRadixCache(
            pool,
            allocator,
            page_size=4,
            tree_components=(FULL, SWA),
            component_init_params=CacheInitParams(**(fields | {field: value})),
        )
    assert allocator.mock_calls == []


def test_swa_needs_a_window_and_absent_components_are_named() -> None:
    with pytest.raises(ValueError, match="sliding_window_size"):
        UnifiedRadixCache(MagicMock(), MagicMock(), tree_components=(FULL, SWA))
    with pytest.raises(ValueError, match="sliding_window_size=None"):
        SWAComponent(MagicMock())
    with pytest.raises(ValueError, match=r"ComponentType\.RECURRENT is not available"):
        UnifiedRadixCache(MagicMock(), MagicMock(), tree_components=(FULL, ComponentType.RECURRENT))
    with pytest.raises(ValueError, match=r"must contain ComponentType\.FULL"):
        UnifiedRadixCache(MagicMock(), MagicMock(), tree_components=(SWA,))
    with pytest.raises(ValueError, match="page_size=0"):
        UnifiedRadixCache(MagicMock(), MagicMock(), page_size=0)
    with pytest.raises(ValueError, match=r"page_size=6 is no multiple of the allocator's page_size=4"):
        UnifiedRadixCache(MagicMock(), dual_allocator(4), page_size=6)


def test_capabilities_without_init() -> None:
    """CONTRACT 8: schedulers' tests use ``__new__`` and ask capabilities only."""
    bare = UnifiedRadixCache.__new__(UnifiedRadixCache)
    assert bare.supports_swa() is False and bare.supports_recurrent() is False
    assert bare.hicache_enabled is False and callable(bare.evict_req_swa)
    schedule = UnifiedRadixCache.reclaim_schedule
    assert schedule is not None and (
        schedule.decode_offset,
        schedule.decode_offset_overlap,
        schedule.on_extend,
    ) == (0, 1, True)
    assert BasePrefixCache.supports_swa(BasePrefixCache) is False  # type: ignore[arg-type]


def test_counters_and_candidates_by_name() -> None:
    desk = Desk(1, 4)
    desk.insert("abcdef")
    cache = desk.cache
    assert cache.component_evictable_size_[FULL][0] == cache.component_evictable_size_[SWA][0] == 6
    assert cache.component_protected_size_[SWA][7] == 0
    assert set(cache.aux_evictable_device_nodes) == {SWA}
    view = cache.aux_evictable_device_nodes[SWA]
    assert desk.node("ab") in view and len(view) == 2 and "x" not in view
    assert cache.evictable_device_leaves == {desk.node("abcdef")}
    assert (
        cache.total_size(),
        cache.full_lru_list_evictable_size(),
        cache.swa_lru_list_evictable_size(),
    ) == (6, 6, 6)
    assert (cache.evictable_size(0), cache.protected_size(0), cache.recurrent_evictable_size(0)) == (6, 0, 0)
    assert cache.root_node.children[cache.get_child_key_fn(desk.key("ab"))] is desk.node("ab")
    node = desk.node("ab")
    node.component_data[SWA].lock_ref = 1
    cache._update_aux_evictable_node_sets(node)
    assert node not in view
    assert set(cache.iter_nodes()) == {node, desk.node("abcdef")}


def test_hook_defaults() -> None:
    """The seam's hooks exist on every component and do nothing where there is nothing to do."""
    desk = Desk(1, 4)
    desk.insert("abcd")
    node = desk.node("abcd")
    for component in desk.cache.components.values():
        assert component.node_has_component_data(node) and component.value_len(node) == 4
        assert not component.node_has_component_data(node, EvictLayer.HOST)
        assert component.evict_component(node, EvictLayer.HOST) == (0, 0)
        assert component.eviction_priority(True) == 0
        assert component.build_hicache_transfers(node, CacheTransferPhase.BACKUP_HOST) == []
        assert component.commit_hicache_transfer(node, CacheTransferPhase.BACKUP_HOST) is None
        assert component.drive_host_eviction(SimpleNamespace(), {}) is None  # type: ignore[arg-type]
        assert component.on_parent_gains_child(node) is None
        assert component.can_end_match(node)
    assert [c.eviction_priority(False) for c in desk.cache.components.values()] == [2, 1]
    host_only = UnifiedTreeNode((FULL,))
    host_only.component_data[FULL].host_value = np.arange(1)
    full = desk.cache.components[FULL]
    assert full.create_match_validator()(host_only) and not full.create_match_validator(True)(host_only)


def test_the_operation_log_is_bounded_and_readable() -> None:
    desk = Desk(1, 4)
    for _ in range(600):
        desk.insert("ab")
        desk.match("ab")
    assert len(desk.cache.op_log) == 1000
    assert desk.cache.op_log[-1]._asdict() == {"op": "match", "rank": 0, "rid": "", "asked": 2, "got": 2}
    req = desk.request("abcd", "r1")
    desk.cache.cache_unfinished_req(req)
    assert [(r.op, r.rid, r.asked, r.got) for r in list(desk.cache.op_log)[-3:]] == [
        ("insert", "r1", 4, 2),
        ("lock", "", 4, 2),
        ("unlock", "", 2, 0),
    ]


def test_the_picture_for_people(capsys: pytest.CaptureFixture[str]) -> None:
    desk = Desk(1, 4)
    desk.insert("abcdef")
    desk.tombstone("ab")
    desk.lock("abcdef")
    text = desk.cache.pretty_print()
    upper, lower = desk.node("ab").id, desk.node("abcdef").id
    assert capsys.readouterr().out == f"{text}\n"
    assert text.splitlines() == [
        "root, 6 tokens",
        f"  {upper} dp=0 [0,2) T locks full=1 swa=0",
        f"    {lower} dp=0 [2,6) S locks full=1 swa=1",
    ]


def test_bigram_keys() -> None:
    """EAGLE: position i holds ids i and i+1; one slot fewer than tokens."""
    cache = UnifiedRadixCache(MagicMock(), TokenToKVPoolAllocator(16, None), is_eagle=True)
    cache.insert(InsertParams(RadixKey([1, 2, 3, 4]), np.array([5, 6, 7, 8], np.int32)))
    assert cache.match_prefix(MatchPrefixParams(RadixKey([1, 2, 3, 9]))).device_indices.tolist() == [5, 6]
    assert cache.total_size() == 3


def test_request_keys() -> None:
    """CONTRACT 4: radix ids, else origin ids, with outputs; else fill_ids; namespaces of the request."""
    req = SimpleNamespace(
        rid="q", origin_input_ids=[1, 2], output_ids=[3], fill_ids=[1, 2, 3, 4], extra_key="x", dp_rank=1
    )
    key = build_radix_key(req, 2)
    assert (key.token_ids, key.extra_key, key.dp_rank) == ([1, 2], "x", 1)
    assert build_radix_key(req, 3).token_ids == [1, 2, 3]
    assert build_radix_key(req, 4).token_ids == [1, 2, 3, 4]
    req.radix_input_ids = [8, 9]
    assert build_radix_key(req, 3).token_ids == [8, 9, 3]
    req.radix_tokens = TokenBuffer([6, 6, 6])
    assert build_radix_key(req, 2).token_ids == [6, 6]
    with pytest.raises(ValueError, match="request q: 9 tokens"):
        build_radix_key(req, 9)
