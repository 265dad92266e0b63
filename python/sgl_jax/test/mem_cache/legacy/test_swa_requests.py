"""Request lifecycle of the legacy hybrid cache: locks, receipts, healing under lock, reclaim, finish, abort."""

import numpy as np
import pytest

from sgl_jax.srt.mem_cache.base_prefix_cache import DecLockRefParams
from sgl_jax.srt.mem_cache.errors import LockReceiptError
from sgl_jax.test.mem_cache.legacy.kit import Desk, seq


# ------------------------------------------------------------------------------------------------------------- locks
def test_lock_takes_full_to_the_root_and_swa_until_the_window_is_filled():
    desk = Desk(window=4)
    for end in (3, 6, 9):
        desk.insert(seq(end))
    last = desk.match(seq(9)).last_device_node
    result = desk.cache.inc_lock_ref(last)
    assert result.delta == -9 and result.swa_uuid_for_lock == desk.node(6).swa_uuid is not None
    assert [desk.node(end).full_lock_ref for end in (3, 6, 9)] == [1, 1, 1]
    assert [desk.node(end).swa_lock_ref for end in (3, 6, 9)] == [0, 1, 1]
    assert desk.sums() == (0, 9, 3, 6)
    assert desk.cache.dec_lock_ref(last, result.to_dec_params()) == 9
    assert desk.sums() == (9, 0, 9, 0)
    assert desk.node(6).swa_uuid is not None  # the boundary keeps its name
    desk.assert_sound()


def test_two_locks_that_end_at_one_node_share_its_uuid():
    desk = Desk(window=4)
    desk.insert(seq(6))
    last = desk.match(seq(6)).last_device_node
    first, second = desk.cache.inc_lock_ref(last), desk.cache.inc_lock_ref(last)
    assert first.swa_uuid_for_lock == second.swa_uuid_for_lock is not None
    desk.cache.dec_lock_ref(last, first.to_dec_params())
    assert desk.sums() == (0, 6, 0, 6)
    desk.cache.dec_lock_ref(last, second.to_dec_params())
    assert desk.sums() == (6, 0, 6, 0)


def test_a_path_shorter_than_the_window_has_no_boundary():
    desk = Desk(window=8)
    desk.insert(seq(6))
    last = desk.match(seq(6)).last_device_node
    assert desk.cache.inc_lock_ref(last).swa_uuid_for_lock is None
    assert desk.cache.dec_lock_ref(last) == 6


def test_split_moves_the_uuid_up_and_the_receipt_still_fits():
    """D20, rule 3: the boundary node is split between lock and unlock."""
    desk = Desk(window=4)
    desk.insert(seq(8))
    last = desk.match(seq(8)).last_device_node
    held = desk.cache.inc_lock_ref(last)
    desk.match(seq(5))
    assert desk.shape() == [(0, 5, True), (5, 8, True)]
    assert desk.node(5).swa_uuid == held.swa_uuid_for_lock and desk.node(8).swa_uuid is None
    assert desk.node(5).swa_lock_ref == desk.node(8).swa_lock_ref == 1
    other = desk.cache.inc_lock_ref(desk.node(8))  # its window of 4 needs both nodes
    desk.cache.dec_lock_ref(desk.node(8), held.to_dec_params())
    assert desk.sums() == (0, 8, 0, 8)
    desk.cache.dec_lock_ref(desk.node(8), other.to_dec_params())
    assert desk.sums() == (8, 0, 8, 0)
    desk.assert_sound()


def test_releasing_without_the_receipt_raises_and_changes_nothing():
    """DECISIONS 6, D21: a lost boundary must not release all the way to the root."""
    desk = Desk(window=4)
    desk.insert(seq(4))
    desk.insert(seq(8))
    last = desk.match(seq(8)).last_device_node
    held = desk.cache.inc_lock_ref(last)
    with pytest.raises(LockReceiptError, match="receipt"):
        desk.cache.dec_lock_ref(last)
    with pytest.raises(LockReceiptError, match=r"not on the path|holds no SWA lock"):
        desk.cache.dec_lock_ref(last, DecLockRefParams(swa_uuid_for_lock=10**9))
    assert desk.sums() == (0, 8, 4, 4)
    desk.cache.dec_lock_ref(last, held.to_dec_params())
    with pytest.raises(LockReceiptError, match="released before"):
        desk.cache.dec_lock_ref(last, held.to_dec_params())
    desk.assert_sound()


def test_a_tombstone_inside_the_window_is_no_valid_lock():
    desk = Desk(window=4)
    desk.insert(seq(2))
    desk.insert(seq(4))
    desk.match(seq(4))
    desk.evict(swa=1)
    with pytest.raises(AssertionError, match="tombstone"):
        desk.cache.inc_lock_ref(desk.node(4))
    assert desk.sums() == (4, 0, 2, 0)


def test_locked_nodes_are_never_evicted():
    desk = Desk(window=4)
    desk.insert(seq(4))
    desk.insert(seq(8))
    held = desk.cache.inc_lock_ref(desk.match(seq(8)).last_device_node)
    assert desk.evict(full=100, swa=100) == (0, 4)  # the upper node is outside the window
    assert desk.shape() == [(0, 4, False), (4, 8, True)]
    desk.cache.dec_lock_ref(desk.node(8), held.to_dec_params())
    assert desk.evict(full=100) == (8, 4)


def test_under_pressure_a_lock_is_narrowed_to_the_window():
    """Two requests hold a node of 12 whole; each gives up what lies above its window of 4, and the node is cut once."""
    desk = Desk(page=2, window=4)
    first, second = desk.admit(seq(13)), desk.admit(seq(13))
    desk.commit(first)
    desk.commit(second)
    assert desk.sums() == (0, 12, 0, 12)
    assert desk.cache.narrow_lock(first) and not desk.cache.narrow_lock(first)
    assert desk.shape() == [(0, 8, True), (8, 12, True)] and desk.sums() == (0, 12, 0, 12)
    assert desk.cache.narrow_lock(second)
    assert desk.sums() == (0, 12, 8, 4)
    assert desk.evict(swa=8) == (0, 8)
    desk.assert_sound()
    desk.finish(first)
    desk.finish(second)
    desk.assert_cold_after_evicting_all()


def test_a_lock_within_its_window_has_nothing_to_give():
    desk = Desk(window=8)
    short = desk.admit(seq(6))
    desk.commit(short)
    assert not desk.cache.narrow_lock(short)
    desk.finish(short)
    fresh = desk.admit(seq(3, 900))
    assert not desk.cache.narrow_lock(fresh)
    desk.finish(fresh, is_insert=False)
    desk.assert_cold_after_evicting_all()


# ---------------------------------------------------------------------------------------------------------- requests
def test_unfinished_request_hands_its_pages_over_and_keeps_the_tail():
    desk = Desk(page=4, window=4)
    req = desk.admit(seq(20), end=10)
    assert desk.slots(req) == list(range(4, 14))
    desk.commit(req)
    assert desk.shape() == [(0, 8, True)]
    assert (req.cache_protected_len, req.prefix_indices.tolist()) == (8, list(range(4, 14)))
    assert req.cache_lock_params.swa_uuid_for_lock == req.swa_uuid_for_lock == desk.node(8).swa_uuid
    assert desk.sums() == (0, 8, 0, 8)
    desk.assert_sound()
    desk.extend(req, 20)
    desk.finish(req)
    assert desk.shape() == [(0, 8, True), (8, 20, True)]
    assert req.cache_lock_params is None and req.swa_uuid_for_lock is None
    desk.assert_cold_after_evicting_all()


def test_second_of_two_equal_prompts_is_repointed_to_the_first_ones_slots():
    """D35: the row reads the tree's slots, the duplicates are freed once."""
    desk = Desk(window=4)
    a, b = desk.admit(seq(6)), desk.admit(seq(6))
    assert desk.slots(b) == [7, 8, 9, 10, 11, 12]
    desk.commit(a)
    desk.commit(b)
    assert desk.slots(b) == desk.slots(a) == [1, 2, 3, 4, 5, 6]
    assert desk.available() == (58, 58) and desk.sums() == (0, 6, 0, 6)
    desk.assert_sound()
    desk.finish(a)
    desk.finish(b)
    desk.assert_cold_after_evicting_all()


def test_the_reclaim_cursor_travels_with_the_unfinished_insert():
    """D17: P=1, W=4, chunk of 12, reclaim(12) frees [0, 7)."""
    desk = Desk(window=4)
    req = desk.admit(seq(16), end=12)
    desk.reclaim(req, 12)
    assert req.swa_evicted_seqlen == 7 and desk.available() == (52, 59)
    desk.commit(req)
    assert desk.shape() == [(0, 7, False), (7, 12, True)]
    desk.assert_sound()


def test_healing_under_somebody_elses_full_lock_moves_the_mapping():
    """D16: A's row keeps its FULL slots; B's SWA slots move to them and B's FULL duplicates are freed."""
    desk = Desk(window=4)
    a = desk.admit(seq(12), end=4)
    desk.commit(a)
    desk.extend(a, 12)
    desk.commit(a)
    rows = desk.slots(a)
    assert desk.evict(swa=4) == (0, 4)
    assert desk.shape() == [(0, 4, False), (4, 12, True)]
    b = desk.admit(seq(4) + seq(3, 700))
    assert b.cache_protected_len == 0 and desk.slots(b) == [13, 14, 15, 16, 17, 18, 19]
    peers = desk.allocator.translate_full_to_swa(np.array([13, 14, 15, 16], np.int32), dp_rank=0).tolist()
    desk.commit(b)
    assert desk.slots(a) == rows == list(range(1, 13))
    assert desk.node(4).value.tolist() == [1, 2, 3, 4] and not desk.node(4).swa_tombstone
    assert desk.allocator.translate_full_to_swa(np.array([1, 2, 3, 4], np.int32), dp_rank=0).tolist() == peers
    assert desk.slots(b) == [1, 2, 3, 4, 17, 18, 19]
    desk.assert_sound()
    desk.finish(b)
    desk.finish(a)
    desk.assert_cold_after_evicting_all()


def test_abort_frees_only_the_private_part():
    """D31: [0, protected) stays with the tree."""
    desk = Desk(window=4)
    req = desk.admit(seq(16), end=8)
    desk.commit(req)
    desk.extend(req, 12)
    desk.finish(req, is_insert=False)
    assert desk.shape() == [(0, 8, True)] and desk.available() == (56, 56)
    assert desk.match(seq(8)).device_indices.tolist() == [1, 2, 3, 4, 5, 6, 7, 8]
    desk.assert_cold_after_evicting_all()


def test_finish_releases_the_half_filled_page_with_its_unused_tokens():
    """A page whose last tokens were allocated but not committed (overlap) goes back whole."""
    desk = Desk(page=4, window=4)
    req = desk.admit(seq(9))
    desk.extend(req, 10)
    req.kv_committed_len = 9
    desk.finish(req)
    assert desk.shape() == [(0, 8, True)] and desk.available() == (56, 56)
    desk.assert_cold_after_evicting_all()


def test_nothing_is_stored_while_the_live_part_is_shorter_than_a_window():
    desk = Desk(window=8)
    req = desk.admit(seq(16), end=12)
    desk.allocator.free_swa(desk.row(req)[:6].copy(), dp_rank=0)
    req.swa_evicted_seqlen = 6
    desk.commit(req)
    assert desk.shape() == [] and req.cache_protected_len == 0 and len(req.prefix_indices) == 12
    desk.finish(req, is_insert=False)
    desk.assert_cold_after_evicting_all()


# ----------------------------------------------------------------------------------------------------------- reclaim
@pytest.mark.parametrize(
    ("page", "window", "protected", "pre_len", "cursor"),
    [(4, 8, 8, 24, 12), (1, 4, 0, 16, 11), (256, 128, 0, 400, 0), (128, 128, 0, 512, 256), (4, 8, 16, 24, 0)],
)
def test_reclaim_boundary_on_rows(page, window, protected, pre_len, cursor):
    """RFC 5; D18: with a page above the window the newest page stays."""
    desk = Desk(page=page, window=window, full=4 * 256, swa=4 * 256)
    req = desk.admit(seq(pre_len + 1), end=protected or pre_len)
    if protected:
        desk.commit(req)
        desk.extend(req, pre_len)
    before = desk.available()[1]
    desk.reclaim(req, pre_len)
    assert req.swa_evicted_seqlen == cursor
    assert desk.available()[1] - before == max(0, cursor - protected)
    desk.reclaim(req, pre_len - 1)
    assert req.swa_evicted_seqlen == cursor
    desk.assert_sound()


def test_reclaim_schedule_is_data_of_the_class():
    from sgl_jax.srt.mem_cache.swa_radix_cache import SWARadixCache

    schedule = SWARadixCache.reclaim_schedule
    assert (schedule.decode_offset, schedule.decode_offset_overlap, schedule.on_extend) == (1, 1, False)


@pytest.mark.parametrize("page", [1, 128, 256])
@pytest.mark.parametrize("dp", [1, 2])
def test_full_lifecycle_returns_to_cold(page, dp):
    """D06, D08: 3 requests a rank with odd lengths, decode across a page, finish and abort; ends at cold capacity."""
    desk = Desk(page=page, window=128, full=4096, swa=4096, dp=dp)
    for rank in range(dp):
        first = desk.admit(seq(300), rank)
        desk.commit(first)
        second = desk.admit(seq(300) + seq(77, 900), rank)
        desk.commit(second)
        for token in range(260):
            desk.decode(first, 5000 + token)
            desk.reclaim(first, first.seqlen - 1)
        third = desk.admit(seq(41, 7000), rank)
        desk.assert_sound()
        desk.finish(first)
        desk.finish(third, is_insert=False)
        desk.finish(second)
    desk.assert_cold_after_evicting_all()
