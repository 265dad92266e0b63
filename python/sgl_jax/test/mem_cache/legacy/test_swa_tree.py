"""Match, insert, heal and evict on the legacy hybrid tree, as worked examples with literal slots."""

import numpy as np
import pytest

from sgl_jax.srt.mem_cache.base_prefix_cache import InsertParams, MatchPrefixParams
from sgl_jax.srt.mem_cache.radix_tree.key import RadixKey
from sgl_jax.srt.mem_cache.swa_radix_cache import SWARadixCache, TreeNode
from sgl_jax.srt.mem_cache.swa_radix_cache.node import Surrendered
from sgl_jax.test.counting import count_calls
from sgl_jax.test.mem_cache.legacy.kit import Desk, seq


def test_match_returns_the_inserted_slots_and_splits_on_a_partial_node():
    desk = Desk()
    assert desk.insert(seq(6)) == 0
    found = desk.match(seq(4))
    assert found.device_indices.tolist() == [1, 2, 3, 4]
    assert desk.shape() == [(0, 4, True), (4, 6, True)]
    assert found.last_device_node.end == 4
    desk.assert_sound()


def test_empty_match_is_int64_at_the_root():
    desk = Desk()
    found = desk.match(seq(3))
    assert found.device_indices.dtype == np.int64 and found.last_device_node is desk.cache.root_node


def test_a_short_key_is_aligned_away_before_descending():
    """D10, D11: a look-up below one page returns empty and changes nothing."""
    desk = Desk(page=4)
    desk.insert(seq(8))
    assert len(desk.match(seq(3)).device_indices) == 0
    assert desk.shape() == [(0, 8, True)]


def test_insert_frees_the_duplicates_and_returns_what_was_cached():
    desk = Desk()
    desk.insert(seq(4))
    assert desk.insert(seq(6)) == 4  # slots 5..10; 5..8 duplicate 1..4
    assert desk.match(seq(6)).device_indices.tolist() == [1, 2, 3, 4, 9, 10]
    assert desk.available() == (64 - 6, 64 - 6)
    desk.assert_sound()


def test_prefix_the_caller_did_not_bring_is_left_alone():
    """``prev_prefix_len`` tokens of the value are the tree's own slots and are not freed again."""
    desk = Desk()
    desk.insert(seq(4))
    value = np.concatenate([np.array([1, 2, 3, 4], np.int32), desk.allocator.alloc(2)])
    assert desk.cache.insert(InsertParams(RadixKey(seq(6), None, 0), value, prev_prefix_len=4)) == 4
    assert desk.match(seq(6)).device_indices.tolist() == [1, 2, 3, 4, 5, 6]
    desk.assert_sound()


def test_handing_a_node_its_own_slots_again_frees_nothing():
    desk = Desk()
    desk.insert(seq(4))
    desk.cache.insert(InsertParams(RadixKey(seq(4), None, 0), np.array([1, 2, 3, 4], np.int32)))
    assert desk.available() == (60, 60)
    desk.assert_sound()


def test_leaf_straddling_the_cursor_becomes_tombstone_and_live_suffix():
    """D17: [0, cursor) is a tombstone whichever path inserts it."""
    desk = Desk()
    desk.insert(seq(12), cursor=7)
    assert desk.shape() == [(0, 7, False), (7, 12, True)]
    assert desk.sums() == (12, 0, 5, 0)
    desk.assert_sound()


def test_leaf_wholly_below_the_cursor_is_not_created():
    desk = Desk()
    assert desk.insert(seq(4), cursor=4) == 0
    assert desk.shape() == [] and desk.available() == (64, 64)


@pytest.mark.parametrize(
    ("live", "expected"),
    [
        ([True, False, True], 3),  # 3 live tokens from the root are valid; 3 after the gap are not
        ([True, True, True], 9),
        ([False, True, True], 9),  # 6 live tokens cover the window of 4
        ([False, False, True], 0),
    ],
)
def test_the_live_counter_restarts_at_every_tombstone(live, expected):
    """D09. W = 4, nodes of 3."""
    desk = Desk()
    for end in (3, 6, 9):
        desk.insert(seq(end))
    for end, alive in zip((3, 6, 9), live, strict=True):
        if not alive:
            out = Surrendered()
            assert desk.cache._tree._bury(desk.node(end), out) == 3
            desk.cache._apply(out, 0)
    assert len(desk.match(seq(9)).device_indices) == expected


def test_internal_eviction_makes_a_tombstone_and_keeps_full():
    desk = Desk()
    desk.insert(seq(4))
    desk.insert(seq(8))
    desk.match(seq(8))
    assert desk.evict(swa=1) == (0, 4)  # the upper node is the older one
    assert desk.shape() == [(0, 4, False), (4, 8, True)]
    assert desk.sums() == (8, 0, 4, 0)
    assert desk.allocator.count_swa_mapped(np.array([1, 2, 3, 4])) == 0
    desk.assert_sound()


def test_leaf_eviction_takes_both_halves_and_the_dead_end_above():
    """Rule 8: the tombstone that lost its last child goes too, FULL included."""
    desk = Desk()
    desk.insert(seq(4))
    desk.insert(seq(8))
    desk.match(seq(8))
    desk.evict(swa=1)
    assert desk.evict(full=1) == (8, 4)
    assert desk.shape() == [] and desk.available() == (64, 64)


def test_full_eviction_is_least_recently_used_first():
    desk = Desk()
    desk.insert(seq(3, 100))
    desk.insert(seq(3, 200))
    desk.insert(seq(3, 300))
    desk.match(seq(3, 100))
    desk.evict(full=3)
    assert len(desk.match(seq(3, 200)).device_indices) == 0
    assert len(desk.match(seq(3, 100)).device_indices) == 3


def test_a_split_out_parent_is_refreshed_and_the_rest_keeps_its_age():
    """D84."""
    desk = Desk(window=2)
    desk.insert(seq(8))
    desk.insert(seq(2, 500))
    desk.match(seq(4))
    assert desk.evict(full=1) == (4, 4)
    assert desk.match(seq(8)).device_indices.tolist() == [1, 2, 3, 4]


def test_matching_refreshes_only_the_window_of_the_swa_order():
    """D25: the far part of a hot branch is older than another branch's tail."""
    desk = Desk(window=4)
    for end in (4, 8, 12, 16):
        desk.insert(seq(end))
    desk.insert(seq(4, 900))
    for _ in range(3):
        desk.match(seq(16))
    assert desk.evict(swa=8) == (0, 8)
    assert desk.shape() == [(0, 4, False), (0, 4, True), (4, 8, False), (8, 12, True), (12, 16, True)]


def test_heal_adopts_the_whole_slice_when_nobody_holds_the_node():
    """RFC 4 case 1; D15: only FULL slots are freed, the new mapping stays."""
    desk = Desk()
    desk.insert(seq(4))
    desk.insert(seq(8))
    desk.match(seq(8))
    desk.evict(swa=1)
    assert desk.insert(seq(8)) == 8  # slots 13..20
    assert desk.shape() == [(0, 4, True), (4, 8, True)]
    assert desk.node(4).value.tolist() == [13, 14, 15, 16]
    assert desk.available() == (56, 56)
    desk.assert_sound()


def test_heal_inside_a_node_splits_at_the_boundary():
    """RFC 4 case 2: the original object is the suffix, the tombstone its new parent."""
    desk = Desk()
    desk.insert(seq(6))
    desk.insert(seq(10))
    desk.match(seq(10))
    desk.evict(swa=1)
    node = desk.node(6)
    desk.insert(seq(10), cursor=2)  # slots 17..26
    assert desk.shape() == [(0, 2, False), (2, 6, True), (6, 10, True)]
    assert node.end == 6 and node.value.tolist() == [19, 20, 21, 22] and node.parent.swa_tombstone
    desk.assert_sound()


def test_heal_beyond_the_boundary_consumes_nothing():
    """RFC 4 case 3."""
    desk = Desk()
    desk.insert(seq(4))
    desk.insert(seq(8))
    desk.match(seq(8))
    desk.evict(swa=1)
    assert desk.insert(seq(8), cursor=4) == 8
    assert desk.shape() == [(0, 4, False), (4, 8, True)]
    assert desk.node(4).value.tolist() == [1, 2, 3, 4]
    desk.assert_sound()


def test_eviction_stays_on_its_rank():
    """Equal local slots on two ranks; only rank 1 is evicted (D49)."""
    desk = Desk(dp=2)
    desk.insert(seq(4), rank=0)
    desk.insert(seq(4), rank=1)
    assert (
        desk.match(seq(4), 0).device_indices.tolist()
        == desk.match(seq(4), 1).device_indices.tolist()
        == [1, 2, 3, 4]
    )
    assert desk.evict(full=4, rank=1) == (4, 4)
    assert desk.available(0) == (60, 60) and desk.available(1) == (64, 64)
    assert len(desk.match(seq(4), 0).device_indices) == 4
    desk.assert_sound()


def test_a_missing_rank_is_an_error_above_one_rank():
    desk = Desk(dp=2)
    with pytest.raises(ValueError, match="dp_rank"):
        desk.cache.match_prefix(MatchPrefixParams(key=RadixKey(seq(3))))
    with pytest.raises(ValueError, match="dp_rank"):
        desk.evict(full=1, rank=None)  # type: ignore[arg-type]


@pytest.mark.parametrize("window", [0, -4, None])
def test_a_window_that_is_not_positive_builds_no_cache(window):
    desk = Desk()
    with pytest.raises(ValueError, match="sliding_window_size"):
        SWARadixCache(desk.pool, desk.allocator, window, 1)


def test_a_single_pool_allocator_is_refused():
    with pytest.raises(AssertionError, match="dual-pool"):
        SWARadixCache(None, object(), 4, 1)


def test_sizes_of_both_pools():
    desk = Desk()
    desk.insert(seq(12), cursor=7)
    assert desk.cache.total_size() == (12, 5)
    assert desk.cache.evictable_size() == 5
    assert desk.cache.full_lru_list_evictable_size() == 12 and desk.cache.swa_lru_list_evictable_size() == 5
    with pytest.raises(NotImplementedError):
        desk.cache.protected_size()
    assert desk.cache.supports_swa() and isinstance(desk.node(12), TreeNode)
    desk.cache.sanity_check()
    assert "[7, 12) live" in desk.cache.pretty_print()


def test_reset_forgets_the_tree_and_keeps_the_event_totals():
    """D66: counters are cumulative, everything else is cold."""
    desk = Desk()
    desk.insert(seq(12), cursor=7)
    desk.cache.reset()
    desk.allocator.clear()
    assert desk.sums() == (0, 0, 0, 0) and desk.shape() == [] and desk.available() == (64, 64)
    assert desk.cache.cache_ledger_snapshot(0, [])["tombstone_created_total"] == 1
    assert desk.cache._event_token_totals == {0: {"tombstone_created_total": 7}}


def test_disabled_cache_matches_nothing_and_stores_nothing():
    desk = Desk()
    cache = SWARadixCache(desk.pool, desk.allocator, 4, 1, disable=True)
    assert cache.insert(InsertParams(RadixKey(seq(4)), desk.allocator.alloc(4))) == 0
    assert len(cache.match_prefix(MatchPrefixParams(RadixKey(seq(4)))).device_indices) == 0
    assert cache.inc_lock_ref(cache.root_node).delta == 0 and cache.dec_lock_ref(cache.root_node) == 0


def test_evicting_one_leaf_touches_one_leaf():
    """G9 shape: no heap over all leaves is rebuilt."""
    costs = []
    for leaves in (50, 400):
        desk = Desk(full=2048, swa=2048)
        for i in range(leaves):
            desk.insert(seq(4, 10_000 * (i + 1)))
        costs.append(count_calls(lambda desk=desk: desk.evict(full=1)))
    assert costs[1] <= costs[0] * 1.2
