"""Faults D15-D19: tombstones, healing and the reclaim cursor."""

from __future__ import annotations

import numpy as np
import pytest

from sgl_jax.srt.mem_cache.base_prefix_cache import InsertParams
from sgl_jax.srt.mem_cache.radix_tree.key import RadixKey
from sgl_jax.srt.mem_cache.window import reclaim_boundary
from sgl_jax.test.faults.kit import Kit, seq
from sgl_jax.test.oracle.observe import free_pages
from sgl_jax.test.stateful.build import build_allocator


def tombstoned_head(kit: Kit, lock: bool = False) -> tuple[list[int], object]:
    """12 tokens in nodes of 4, FULL slots 1..12; [0,4) is a tombstone; optionally locked from the end."""
    tokens = seq(12)
    kit.insert(tokens)
    receipt = kit.cache.inc_lock_ref(kit.node(12)).to_dec_params() if lock else None
    assert kit.evict(swa=1) == (0, 4)
    assert kit.shape() == [(0, 4, False), (4, 8, True), (8, 12, True)]
    assert kit.allocator.full_to_swa_index_mapping[1:5].tolist() == [0, 0, 0, 0]
    return tokens, receipt


def test_a_heal_frees_only_the_tombstones_old_full_slots() -> None:
    """D15: B recomputes [0,6): its 13..16 replace 1..4, its duplicates 17, 18 go; nothing leaks under load."""
    kit = Kit(window=4, full=32, swa=24)
    tokens, _ = tombstoned_head(kit)
    b = kit.admit(tokens[:6])
    assert kit.slots(b) == [13, 14, 15, 16, 17, 18]
    swa = kit.allocator.full_to_swa_index_mapping[13:17].tolist()
    kit.commit(b)
    assert kit.slots(b) == [13, 14, 15, 16, 5, 6]
    assert kit.allocator.full_to_swa_index_mapping[13:19].tolist() == [*swa, 0, 0]
    assert kit.available() == (32 - 12, 24 - 12)
    free = free_pages(kit.allocator.full_attn_allocator, 0, 1)
    assert {1, 2, 3, 4, 17, 18} <= set(free)
    kit.finish(b)
    assert kit.match(tokens) == [13, 14, 15, 16, *range(5, 13)]
    kit.assert_cold_after_evicting_all()


def test_a_heal_under_a_foreign_full_lock_moves_the_mapping() -> None:
    """D16, rule 1: A reads FULL 1..4 while B heals the node: the slots stay, B's SWA is re-pointed to them."""
    kit = Kit(window=4, full=32, swa=24)
    tokens, receipt = tombstoned_head(kit, lock=True)
    b = kit.admit(tokens[:6])
    assert kit.slots(b) == [13, 14, 15, 16, 17, 18]
    swa = kit.allocator.full_to_swa_index_mapping[13:17].tolist()
    kit.commit(b)
    assert kit.slots(b) == [1, 2, 3, 4, 5, 6]
    assert kit.allocator.full_to_swa_index_mapping[1:5].tolist() == swa
    assert kit.allocator.full_to_swa_index_mapping[13:19].tolist() == [0] * 6
    assert set(range(1, 13)).isdisjoint(free_pages(kit.allocator.full_attn_allocator, 0, 1))
    assert kit.available() == (32 - 12, 24 - 12)
    kit.finish(b)
    kit.cache.dec_lock_ref(kit.node(12), receipt)
    assert kit.match(tokens) == list(range(1, 13))
    kit.assert_cold_after_evicting_all()


@pytest.mark.parametrize("how", ["commit", "finish"])
def test_the_cursor_travels_with_every_insert(how: str) -> None:
    """D17: W=4, P=1, 12 tokens, reclaim(12): [0,7) enters as a tombstone, [7,8) and [8,12) live."""
    kit = Kit(window=4)
    req = kit.admit(seq(12))
    kit.cache.evict_req_swa(req, 12, dp_rank=0)
    assert req.swa_evicted_seqlen == 7
    (kit.commit if how == "commit" else kit.finish)(req)
    assert kit.shape() == [(0, 7, False), (7, 8, True), (8, 12, True)]
    assert sum(kit.sums()[2:]) == 5
    assert kit.allocator.full_to_swa_index_mapping[:13].tolist() == [0] * 8 + [8, 9, 10, 11, 12]
    if how == "commit":
        kit.finish(req)
    kit.assert_cold_after_evicting_all()


def test_a_retracted_request_inserts_no_reclaimed_slot() -> None:
    """D17: after retract and re-admission the cursor starts again at 0 and everything recomputed is live."""
    kit = Kit(window=4)
    req = kit.admit(seq(12))
    kit.cache.evict_req_swa(req, 12, dp_rank=0)
    kit.abort(req)
    req.reset_for_retract()
    assert req.swa_evicted_seqlen == 0 and kit.views() == []
    kit.insert(seq(12))
    assert kit.shape() == [(0, 4, True), (4, 8, True), (8, 12, True)]
    kit.assert_cold_after_evicting_all()


def test_the_boundary_keeps_a_window_for_every_length() -> None:
    """D18: P=256, W=128, pre_len 400 reclaims nothing; sweep over 1..4P keeps a live window behind any leaf."""
    assert reclaim_boundary(0, 0, 400, 128, 256) == (0, 0)
    for page in (1, 128, 256):
        for window in (1, 4, 100, 128, 256, 300):
            for length in range(1, 4 * page + 1):
                old, new = reclaim_boundary(0, 0, length, window, page)
                assert old == 0 and new % page == 0
                assert new == 0 or (length // page * page) - new >= window


@pytest.mark.parametrize("length", [256, 400, 512, 640, 641, 1000, 1024])
def test_the_newest_leaf_is_never_all_tombstone(length: int) -> None:
    """D18: with the page larger than the window, insert after reclaim always ends in live tokens."""
    kit = Kit(page=256, window=128, full=2048, swa=2048)
    req = kit.admit(seq(length))
    kit.cache.evict_req_swa(req, length, dp_rank=0)
    kit.commit(req)
    aligned = length // 256 * 256
    assert kit.shape()[-1][1:] == (aligned, True)
    assert len(kit.match(seq(length))) == aligned
    kit.finish(req)
    kit.assert_cold_after_evicting_all()


def test_translation_names_rank_and_slot_of_an_unmapped_position() -> None:
    """D19: inside the window an unmapped entry fails loudly; outside it becomes the reserved slot 0."""
    alloc = build_allocator(1, 8, 8, 2)
    slots = alloc.alloc(4, dp_rank=1)
    alloc.free_swa(slots[2:3], dp_rank=1)
    with pytest.raises(ValueError, match=r"dp_rank=1.*3"):
        alloc.translate_full_to_swa(slots, dp_rank=1)
    out = alloc.translate_full_to_swa(slots, dp_rank=1, require_mapped=False)
    assert out.tolist() == [1, 2, 0, 4] and out.dtype == np.int32
    out[:] = 9
    assert alloc.full_to_swa_index_mapping[1][1:5].tolist() == [1, 2, 0, 4]
    assert alloc.translate_full_to_swa(np.empty((0,), np.int32), dp_rank=0).dtype == np.int32


@pytest.mark.parametrize("cursor_len", [12, 16])
def test_healing_inside_and_behind_a_tombstone(cursor_len: int) -> None:
    """RFC 4, cases 2 and 3: a cursor inside [0,8) splits it at the page; behind it the tombstone stays."""
    kit = Kit(page=4, window=4, full=128, swa=128)
    tokens = seq(24)
    kit.insert(tokens)
    receipt = kit.cache.inc_lock_ref(kit.node(24)).to_dec_params()
    kit.evict(swa=1000)
    assert kit.shape()[:2] == [(0, 4, False), (4, 8, False)]
    kit.cache.dec_lock_ref(kit.node(24), receipt)
    b = kit.admit(tokens[:20])
    assert b.cache_protected_len == 0
    kit.cache.evict_req_swa(b, cursor_len, dp_rank=0)
    assert b.swa_evicted_seqlen == cursor_len - 8
    kit.commit(b)
    live = [(v.start, v.end) for v in kit.views() if v.swa is not None]
    assert min(start for start, _ in live) == cursor_len - 8
    kit.finish(b)
    kit.assert_cold_after_evicting_all()


@pytest.mark.parametrize("dead_head", [False, True])
def test_a_direct_insert_leaves_what_the_tree_owns_alone(dead_head: bool) -> None:
    """RFC 3, D31: ``prev_prefix_len`` 8: [0, 8) is the tree's own, live or tombstone; only [8, 12) changes hands."""
    kit = Kit(window=4)
    tokens = seq(12)
    kit.insert(tokens[:8])
    if dead_head:
        hold = kit.cache.inc_lock_ref(kit.node(8)).to_dec_params()
        assert kit.evict(swa=1) == (0, 4)
        kit.cache.dec_lock_ref(kit.node(8), hold)
    fresh = kit.allocator.alloc(4, dp_rank=0)
    value = np.concatenate([np.arange(1, 9, dtype=np.int32), fresh])
    result = kit.cache.insert(InsertParams(key=RadixKey(tokens, None, 0), value=value, prev_prefix_len=8))
    assert result.prefix_len == 8
    assert kit.shape() == [(0, 4, not dead_head), (4, 8, True), (8, 12, True)]
    assert kit.match(tokens) == [*range(1, 9), *fresh.tolist()]
    kit.assert_cold_after_evicting_all()
