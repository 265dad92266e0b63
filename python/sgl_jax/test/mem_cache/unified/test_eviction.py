"""RFC-0035 section 4: internal eviction, leaf eviction, cascade; each pool exactly once, at the cost of what is freed."""

from __future__ import annotations

import pytest

from sgl_jax.srt.mem_cache.base_prefix_cache import EvictParams, EvictResult
from sgl_jax.srt.mem_cache.unified_cache_components import EvictLayer
from sgl_jax.test.mem_cache.unified.desk import FULL, GEOMETRY, GEOMETRY_IDS, SWA, Desk

geometry = pytest.mark.parametrize(("page", "dp"), GEOMETRY, ids=GEOMETRY_IDS)


@geometry
def test_internal_eviction_frees_swa_only(page: int, dp: int) -> None:
    """RFC 4: mapping cleared, FULL value and tree as they were, the counter falls by what was mapped."""
    desk = Desk(page, 2 * page, dp)
    desk.insert("abcd")
    swa = desk.cache.components[SWA]
    assert swa.evict_component(desk.node("ab"), EvictLayer.DEVICE) == (2 * page, 0)
    assert desk.sums() == (4, 0, 2, 0)
    assert desk.mapped(1, 2, 3, 4) == [0, 0, 3, 4]
    assert desk.pages(desk.node("ab").component_data[FULL].value) == [1, 2]
    assert swa.evict_component(desk.node("ab")) == (0, 0)
    assert desk.available() == (60, 62)
    desk.sound()


@geometry
def test_leaf_eviction_frees_both_pools_and_reports_both(page: int, dp: int) -> None:
    """CONTRACT 7: asked for less than a node, gives and reports the whole node; the FULL value is cleared."""
    desk = Desk(page, 2 * page, dp)
    desk.insert("ab")
    desk.insert("cd")
    leaf = desk.node("ab")
    result = desk.cache.evict(EvictParams(swa_num_tokens=1, dp_rank=desk.rank))
    assert result == EvictResult(2 * page, 2 * page)
    assert leaf.component_data[FULL].value is None and leaf.parent is None
    assert desk.picture() == ["/cd S"] and desk.available() == (62, 62)
    desk.sound()


def test_the_order_within_a_leaf_is_full_then_swa(monkeypatch: pytest.MonkeyPatch) -> None:
    """RFC 4: free_full, then free_swa, then the value is cleared."""
    desk = Desk(1, 4)
    desk.insert("abcd")
    leaf = desk.node("abcd")
    seen: list[tuple[str, bool]] = []
    for name in ("free_full", "free_swa"):
        real = getattr(desk.allocator, name)

        def spy(slots, *, dp_rank, real=real, name=name):
            seen.append((name, leaf.component_data[FULL].value is not None))
            return real(slots, dp_rank=dp_rank)

        monkeypatch.setattr(desk.allocator, name, spy)
    tracker = {FULL: 0, SWA: 0}
    desk.cache._evict_device_leaf(leaf, tracker)
    assert seen == [("free_full", True), ("free_swa", True)]
    assert tracker == {FULL: 4, SWA: 4}
    assert desk.available() == (64, 64)


@geometry
def test_each_pool_is_evicted_by_its_own_deficit(page: int, dp: int) -> None:
    """D27: SWA asked, FULL not: internal SWA goes, no leaf has to."""
    desk = Desk(page, 2 * page, dp)
    desk.insert("abcdefgh")
    assert desk.evict(swa=3) == (0, 4)
    assert desk.picture() == ["/ab T", "ab/cd T", "abcd/ef S", "abcdef/gh S"]
    assert desk.evict(full=1, swa=1) == (2, 2)
    assert desk.picture() == ["/ab T", "ab/cd T", "abcd/ef S"]
    assert desk.evict() == (0, 0)
    desk.sound()


@geometry
def test_the_cascade_takes_ancestors_that_nothing_can_match(page: int, dp: int) -> None:
    """Rule 8, fault 9: T - T - leaf; the leaf goes and both tombstones with it, FULL included."""
    desk = Desk(page, 2 * page, dp)
    desk.insert("abcdef")
    desk.tombstone("ab")
    desk.tombstone("abcd")
    assert desk.evict(swa=1) == (6, 2)
    assert desk.picture() == [] and desk.available() == (64, 64)


@geometry
def test_the_cascade_stops_at_a_lock_a_child_and_a_live_node(page: int, dp: int) -> None:
    """D28."""
    desk = Desk(page, 2 * page, dp)
    desk.insert("abcdef")
    desk.insert("abgh")
    desk.tombstone("ab")
    assert desk.picture() == ["/ab T", "ab/cd S", "ab/gh S", "abcd/ef S"]
    assert desk.evict(full=1) == (2, 2)
    assert desk.evict(full=1) == (2, 2)
    assert desk.picture() == ["/ab T", "ab/gh S"]
    held = desk.lock("ab")
    assert desk.evict(full=1) == (2, 2)
    assert desk.picture() == ["/ab T"]
    desk.cache.dec_lock_ref(*held)
    assert desk.picture() == [] and desk.available() == (64, 64)


def test_a_parent_follows_its_leaf_only_in_its_turn() -> None:
    """D84: a parent that was used later than the leaf it lost waits for the leaves between."""
    desk = Desk(1, 4)
    desk.insert("abcd")
    desk.insert("xy")
    desk.match("ab")
    assert desk.evict(full=3) == (4, 4)
    assert desk.picture() == ["/ab S"]
    desk.insert("abcdefgh")
    assert desk.evict(full=5) == (6, 6)
    assert desk.picture() == ["/ab S"]


def test_the_driver_removes_leaves_that_became_unmatchable() -> None:
    """DECISIONS 7: never inside ``evict_component``; by the next eviction that wants anything."""
    desk = Desk(1, 4)
    desk.insert("abcd")
    desk.insert("mnop")
    desk.tombstone("abcd")
    assert desk.picture() == ["/abcd T", "/mnop S"]
    assert desk.evict() == (0, 0)
    assert desk.evict(full=1) == (4, 0)
    assert desk.picture() == ["/mnop S"]
    desk.sound()


@geometry
def test_swa_eviction_of_a_full_locked_leaf_only_tombstones(page: int, dp: int) -> None:
    """D22: the SWA lock ended early, the FULL lock has not."""
    desk = Desk(page, 2 * page, dp)
    desk.insert("abcd")
    node, receipt = desk.lock("abcd")
    desk.cache.components[SWA].release_component_lock(node, receipt)
    assert desk.sums() == (0, 4, 4, 0)
    assert desk.evict(swa=64) == (0, 4)
    assert desk.picture() == ["/ab T", "ab/cd T"]
    assert desk.match("abcd", full_only=True) == [1, 2, 3, 4]


def test_nothing_locked_is_ever_evicted() -> None:
    desk = Desk(1, 4)
    desk.insert("abcdefgh")
    held = desk.lock("abcdefgh")
    assert desk.evict(full=64, swa=64) == (0, 4)
    assert desk.picture() == ["/abcd T", "abcd/efgh S"]
    assert desk.cache.evictable_device_leaves == set()
    assert desk.node("abcdefgh") not in desk.cache.aux_evictable_device_nodes[SWA]
    desk.cache.dec_lock_ref(*held)
    assert desk.cache.evictable_device_leaves == {desk.node("abcdefgh")}
    assert desk.node("abcdefgh") in desk.cache.aux_evictable_device_nodes[SWA]
    assert desk.node("abcd") not in desk.cache.aux_evictable_device_nodes[SWA]


def test_ranks_are_evicted_apart() -> None:
    """D49, fault 7, G11: rank 1 gives, rank 0 keeps; an omitted rank is refused."""
    desk = Desk(4, 8, dp=2)
    for rank in (0, 1):
        desk.rank = rank
        desk.insert("abcd")
    assert desk.evict(full=64, swa=64) == (4, 4)
    desk.rank = 0
    assert (desk.sums(), desk.available()) == ((4, 0, 4, 0), (60, 60))
    with pytest.raises(ValueError, match=r"dp_rank. is None on 2"):
        desk.cache.evict(EvictParams(num_tokens=1))


def test_event_totals_are_counted_per_rank() -> None:
    """CONTRACT 12: cumulative; reset keeps them, a snapshot reads them."""
    desk = Desk(1, 4, dp=2)
    desk.insert("abcdefgh")
    desk.evict(swa=1)
    desk.insert("abcd")
    desk.evict(full=8)
    assert desk.cache._ledger_event_totals == {
        1: {
            "swa_evicted_total": 12,
            "tombstone_created_total": 1,
            "tombstone_healed_total": 1,
            "full_evicted_total": 8,
        }
    }
    assert desk.cache._event_token_totals == {1: {"tombstone_created_total": 4, "tombstone_healed_total": 4}}
    desk.cache.reset()
    snapshot = desk.cache.cache_ledger_snapshot(1, [])
    assert (snapshot["swa_evicted_total"], snapshot["tombstone_healed_total"]) == (12, 1)
    assert 0 not in desk.cache._ledger_event_totals
