"""Faults D30, D31, D35, D37 in the cache, and faults 5 and 6: rows, receipts, release paths, idle checks."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from sgl_jax.srt.mem_cache.common import release_kv_cache
from sgl_jax.srt.mem_cache.errors import LockReceiptError
from sgl_jax.srt.mem_cache.ledger import validate_swa_cache_ledger
from sgl_jax.srt.mem_cache.window import reclaim_boundary
from sgl_jax.test.faults.kit import Kit, seq
from sgl_jax.test.oracle.observe import free_pages
from sgl_jax.test.stateful.build import build_allocator, build_cache
from sgl_jax.test.stateful.sim_request import SimReq


@pytest.mark.parametrize("page", [1, 4, 128])
@pytest.mark.parametrize("moment", ["before_commit", "after_commit", "second_chunk"])
def test_an_abort_between_chunks_returns_everything(page: int, moment: str) -> None:
    """D30: prompt of three chunks, aborted around the first: row, FULL, SWA and locks are back, the chunk stays cached."""
    kit = Kit(page=page, window=page, full=16 * page, swa=16 * page, rows=2)
    req = kit.admit(seq(9 * page + 1), end=3 * page)
    if moment != "before_commit":
        kit.commit(req)
    if moment == "second_chunk":
        kit.extend(req, 6 * page + 1)
    kit.abort(req)
    assert req.req_pool_idx is None and kit.pool.available_size() == 2
    assert kit.sums() == ((0, 0, 0, 0) if moment == "before_commit" else (3 * page, 0, 3 * page, 0))
    kit.assert_idle()
    kit.assert_cold_after_evicting_all()


def test_an_abort_leaves_the_committed_chunk_with_the_tree() -> None:
    """D31: slots 1..4 belong to the tree after the first chunk; the abort frees 5..8 only, and nobody gets 1..4."""
    kit = Kit(window=4, full=12, swa=12)
    req = kit.admit(seq(9), end=4)
    kit.commit(req)
    kit.extend(req, 8)
    assert kit.slots(req) == [1, 2, 3, 4, 5, 6, 7, 8]
    kit.abort(req)
    assert sorted(free_pages(kit.allocator.full_attn_allocator, 0, 1)) == [5, 6, 7, 8, 9, 10, 11, 12]
    assert kit.match(seq(4)) == [1, 2, 3, 4]
    other = kit.admit(seq(4, start=500))
    assert set(kit.slots(other)).isdisjoint({1, 2, 3, 4})
    kit.finish(other)
    kit.assert_cold_after_evicting_all()


@pytest.mark.parametrize("page", [1, 4, 128])
def test_the_row_is_repointed_before_duplicates_are_freed(page: int) -> None:
    """D35: A and B prefill the same prompt at once; B's row becomes the tree's slots and B's own are free."""
    kit = Kit(page=page, window=2 * page, full=12 * page, swa=12 * page)
    tokens = seq(3 * page + page // 2)
    a, b = kit.admit(tokens), kit.admit(tokens)
    mine, theirs = kit.slots(a), kit.slots(b)
    whole = 3 * page
    kit.commit(a)
    kit.commit(b)
    assert kit.slots(b)[:whole] == mine[:whole] and kit.slots(b)[whole:] == theirs[whole:]
    freed = {s // page for s in theirs[:whole]}
    assert freed <= set(free_pages(kit.allocator.full_attn_allocator, 0, page))
    assert {s // page for s in mine}.isdisjoint(free_pages(kit.allocator.full_attn_allocator, 0, page))
    other = kit.admit(seq(2 * page, start=5000))
    kit.decode(b, 7)
    assert set(kit.slots(b)).isdisjoint(kit.slots(other)) and kit.slots(b)[:whole] == mine[:whole]
    assert b.cache_protected_len == b.last_matched_prefix_len == whole
    assert np.asarray(b.prefix_indices).tolist() == kit.slots(b)[: len(tokens)]
    for req in (b, a, other):
        kit.finish(req)
    kit.assert_cold_after_evicting_all()


def test_reclaim_follows_the_processed_length_it_is_given() -> None:
    """D37: the boundary depends on the processed length alone, and a smaller one later never moves it back."""
    kit = Kit(window=4)
    req = kit.admit(seq(20))
    kit.cache.evict_req_swa(req, 12, dp_rank=0)
    assert req.swa_evicted_seqlen == 7
    assert kit.allocator.full_to_swa_index_mapping[1:21].tolist() == [0] * 7 + list(range(8, 21))
    kit.cache.evict_req_swa(req, 10, dp_rank=0)
    assert req.swa_evicted_seqlen == 7 and kit.available() == (44, 51)
    kit.cache.evict_req_swa(req, 20, dp_rank=0)
    assert req.swa_evicted_seqlen == 15 and kit.available() == (44, 59)
    kit.abort(req)
    assert kit.available() == (64, 64)


@pytest.mark.parametrize(
    ("evicted", "protected", "pre_len", "window", "page", "interval"),
    [
        (0, 0, 12, 4, 1, (0, 7)),
        (7, 0, 10, 4, 1, (7, 7)),
        (7, 0, 20, 4, 1, (7, 15)),
        (0, 8, 24, 8, 4, (8, 12)),
        (4, 8, 10, 8, 4, (8, 8)),
        (12, 8, 15, 8, 4, (12, 12)),
        (0, 0, 383, 128, 256, (0, 0)),
        (0, 0, 640, 128, 256, (0, 256)),
    ],
)
def test_the_reclaim_boundary_in_numbers(
    evicted: int, protected: int, pre_len: int, window: int, page: int, interval: tuple[int, int]
) -> None:
    """D37, D18: what was reclaimed before is not named again, the protected prefix never, and nothing moves back."""
    assert reclaim_boundary(evicted, protected, pre_len, window, page) == interval


def test_a_commit_below_the_cursor_keeps_its_leaf() -> None:
    """DECISIONS 8, D35: the request goes on reading FULL [0, 8), so the commit may not free it as unmatchable."""
    kit = Kit(window=4)
    req = kit.admit(seq(24))
    kit.cache.evict_req_swa(req, 24, dp_rank=0)
    assert req.swa_evicted_seqlen == 19
    req.fill_ids = seq(8)
    kit.commit(req)
    assert kit.shape() == [(0, 8, False)] and req.cache_protected_len == 8
    assert kit.slots(req) == list(range(1, 25)) and kit.available() == (40, 59)
    kit.assert_sound()
    req.fill_ids = seq(24)
    kit.commit(req)
    assert kit.shape() == [(0, 8, False), (8, 19, False), (19, 20, True), (20, 24, True)]
    kit.finish(req)
    kit.assert_cold_after_evicting_all()


def test_reclaim_numbers_of_the_contract() -> None:
    """RFC 5: page 4, window 8, tree 8, processed 24 gives 12; the tree's [0,8) is never touched."""
    kit = Kit(page=4, window=8)
    kit.insert(seq(8))
    req = kit.admit(seq(24))
    assert req.cache_protected_len == 8
    kit.cache.evict_req_swa(req, 24, dp_rank=0)
    assert req.swa_evicted_seqlen == 12
    mapped = kit.allocator.full_to_swa_index_mapping[kit.slots(req)] != 0
    assert mapped.tolist() == [True] * 8 + [False] * 4 + [True] * 12
    kit.finish(req)
    kit.assert_cold_after_evicting_all()


def test_receipts_are_replaced_and_cleared_symmetrically() -> None:
    """RFC 5: each commit stores a new receipt and its mirror; finish and abort set both to None, once."""
    kit = Kit(window=4)
    req = kit.admit(seq(20), end=8)
    first = req.cache_lock_params
    kit.commit(req)
    second = req.cache_lock_params
    assert second is not first and second.swa_uuid_for_lock == req.swa_uuid_for_lock is not None
    kit.extend(req, 16)
    kit.commit(req)
    assert req.cache_lock_params is not second and kit.sums() == (0, 16, 12, 4)
    kit.finish(req)
    assert req.cache_lock_params is None and req.swa_uuid_for_lock is None and req.req_pool_idx is None
    kit.finish(req)
    kit.assert_cold_after_evicting_all()


@pytest.mark.parametrize("page", [1, 128])
@pytest.mark.parametrize("rank", [0, 1])
def test_a_leaked_page_fails_the_idle_check(page: int, rank: int) -> None:
    """Fault 5: one page of each pool owned by nobody is a violation at any page size, on the right rank."""
    kit = Kit(page=page, window=page, full=8 * page, swa=8 * page, dp=2)
    kit.insert(seq(2 * page), rank=rank)
    for r in (0, 1):
        validate_swa_cache_ledger(kit.cache.cache_ledger_snapshot(r, []), require_idle=True)
    kit.allocator.alloc(page, dp_rank=rank)
    with pytest.raises(ValueError):
        validate_swa_cache_ledger(kit.cache.cache_ledger_snapshot(rank, []), require_idle=True)
    validate_swa_cache_ledger(kit.cache.cache_ledger_snapshot(1 - rank, []), require_idle=True)


@pytest.mark.parametrize("page", [4, 128])
def test_a_leaked_page_is_no_slack(page: int) -> None:
    """Fault 5, DECISIONS 12: the full page is not hidden in the slack of part-filled pages of a live request."""
    kit = Kit(page=page, window=page, full=8 * page, swa=8 * page)
    req = kit.admit(seq(page + 1))
    snap = kit.cache.cache_ledger_snapshot(0, [req])
    assert snap["full_request_owned"] == page + 1 and snap["full_reserved_page_slack"] == page - 1
    validate_swa_cache_ledger(snap, require_idle=False)
    kit.allocator.alloc(page, dp_rank=0)
    snap = kit.cache.cache_ledger_snapshot(0, [req])
    assert snap["full_reserved_page_slack"] == page - 1
    with pytest.raises(ValueError, match="balance"):
        validate_swa_cache_ledger(snap, require_idle=False)


@pytest.mark.parametrize("window", [0, -4, None])
def test_a_window_that_is_not_positive_builds_no_cache(window: int | None) -> None:
    """Fault 6: windows of 0, -4 and none are refused by name at construction."""
    with pytest.raises(ValueError, match="sliding_window_size"):
        Kit(window=window)  # type: ignore[arg-type]


def _chunk_request(page: int, tokens: int, rank: int = 0, dp: int = 1) -> tuple[Any, SimReq]:
    """A chunk cache and a request that computed ``tokens``."""
    alloc = build_allocator(page, 64 // page, 64 // page, dp)
    cache = build_cache("chunk", alloc, page, 4, 4, 64)
    req = SimReq("r", seq(tokens), rank)
    cache.req_to_token_pool.alloc([req])
    slots = alloc.alloc_extend([0], [tokens], np.array([-1], np.int32), tokens, dp_rank=rank)
    cache.req_to_token_pool.req_to_token[req.req_pool_idx, :tokens] = slots
    req.kv_committed_len = req.kv_allocated_len = tokens
    req.fill_ids = seq(tokens)
    return cache, req


def test_the_chunk_cache_reclaims_its_own_tail() -> None:
    """RFC 5, CONTRACT 5: page 1, window 4, processed 16 frees SWA of [0, 11); D37: never back, never twice."""
    cache, req = _chunk_request(1, 16)
    alloc = cache.token_to_kv_pool_allocator
    cache.evict_req_swa(req, 16, dp_rank=0)
    assert req.swa_evicted_seqlen == 11 and alloc.swa_available_size(0) == 64 - 5
    cache.evict_req_swa(req, 9, dp_rank=0)
    assert req.swa_evicted_seqlen == 11 and alloc.full_available_size(0) == 48
    release_kv_cache(req, cache, is_insert=False)
    assert (alloc.full_available_size(0), alloc.swa_available_size(0)) == (64, 64)


def test_the_chunk_cache_hands_out_copies_and_exchanges_receipts() -> None:
    """D33: the next chunk's prefix does not change when the host rewrites the row."""
    cache, req = _chunk_request(4, 10, rank=1, dp=2)
    cache.cache_unfinished_req(req)
    first = req.cache_lock_params
    assert req.prefix_indices.tolist() == list(range(4, 14)) and first is not None
    cache.req_to_token_pool.req_to_token[req.req_pool_idx, :10] = 0
    assert req.prefix_indices.tolist() == list(range(4, 14))
    cache.req_to_token_pool.req_to_token[req.req_pool_idx, :10] = req.prefix_indices
    cache.cache_unfinished_req(req)
    assert req.cache_lock_params is not first
    release_kv_cache(req, cache)
    assert req.cache_lock_params is None and req.req_pool_idx is None
    assert [cache.token_to_kv_pool_allocator.available_size(r) for r in (0, 1)] == [64, 64]


@pytest.mark.parametrize("window", [0, -4, None])
def test_a_chunk_cache_needs_a_positive_window(window: int | None) -> None:
    """Fault 6: the chunk cache refuses the same windows."""
    with pytest.raises(ValueError, match="sliding_window_size"):
        build_cache("chunk", build_allocator(1, 8, 8, 1), 1, window, 4, 64)  # type: ignore[arg-type]


@pytest.mark.parametrize("is_insert", [True, False])
@pytest.mark.parametrize("committed", [4, 5, 7, 8, 9])
@pytest.mark.parametrize("extra", [0, 1, 3, 4, 6])
def test_slots_beyond_the_committed_length_are_released(committed: int, extra: int, is_insert: bool) -> None:
    """D06, D36: page 4; whatever was allocated and not committed goes back, in the same page and beyond, exactly once."""
    kit = Kit(page=4, window=4, full=64, swa=64)
    req = kit.admit(seq(20), end=committed + extra)
    req.kv_committed_len = committed
    release_kv_cache(req, kit.cache, is_insert=is_insert, allow_overallocated=True)
    cached = committed // 4 * 4 if is_insert else 0
    assert kit.available() == (64 - cached, 64 - cached) and kit.cache.total_size() == cached
    kit.assert_cold_after_evicting_all()


def test_an_overallocated_end_is_an_error_that_leaks_nothing() -> None:
    """D06: without permission the release raises by name, after everything went back."""
    kit = Kit(page=4, window=4, full=64, swa=64)
    req = kit.admit(seq(20), end=11)
    req.kv_committed_len = 6
    with pytest.raises(AssertionError, match="committed"):
        release_kv_cache(req, kit.cache)
    assert kit.available() == (60, 60) and req.req_pool_idx is None
    kit.assert_cold_after_evicting_all()


@pytest.mark.parametrize("call", ["commit", "finish", "abort"])
def test_a_request_that_outlived_a_reset_touches_nothing(call: str) -> None:
    """D34: its FULL 1..8 belong to somebody else by now; the late call is refused before it frees or inserts them."""
    kit = Kit(window=4)
    late = kit.admit(seq(8))
    kit.commit(late)
    kit.cache.reset()
    kit.allocator.clear()
    other = kit.admit(seq(8, start=500))
    assert kit.slots(other) == kit.slots(late) == list(range(1, 9))
    with pytest.raises(LockReceiptError, match="not in the tree any more"):
        getattr(kit, call)(late)
    assert kit.available() == (56, 56) and kit.views() == []
    assert kit.allocator.full_to_swa_index_mapping[1:9].tolist() == list(range(1, 9))


@pytest.mark.parametrize("call", ["commit", "finish", "abort"])
def test_a_request_without_rank_is_refused_with_two_ranks(call: str) -> None:
    """Fault 7: rank 0 owns equal slots; a request of rank 1 that lost its rank must not give them back."""
    kit = Kit(page=4, window=4, dp=2)
    kit.insert(seq(8))
    req = kit.admit(seq(8), rank=1)
    assert kit.slots(req) == list(range(4, 12))
    req.dp_rank = None
    with pytest.raises(ValueError, match="no dp_rank on 2"):
        getattr(kit, call)(req)
    with pytest.raises(ValueError, match="without dp_rank on 2"):
        kit.cache.evict_req_swa(req, 24)
    assert kit.available(0) == kit.available(1) == (56, 56) and len(kit.match(seq(8))) == 8
    req.dp_rank = 1
    kit.finish(req)
    kit.assert_idle(0)
    kit.assert_idle(1)
