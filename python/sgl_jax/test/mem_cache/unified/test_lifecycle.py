"""RFC-0035 section 5: unfinished, finished, abort, retract, reclaim; receipts, rows and slots after each."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from sgl_jax.srt.mem_cache.base_prefix_cache import DecLockRefParams
from sgl_jax.srt.mem_cache.common import release_kv_cache
from sgl_jax.srt.mem_cache.errors import TreeInvariantError
from sgl_jax.srt.mem_cache.radix_tree.key import TokenBuffer
from sgl_jax.test.mem_cache.unified.desk import FULL, GEOMETRY, GEOMETRY_IDS, SWA, Desk

geometry = pytest.mark.parametrize(("page", "dp"), GEOMETRY, ids=GEOMETRY_IDS)


def grow(desk: Desk, req: Any, letters: str) -> None:
    """Compute ``letters`` behind what the request has (whole pages)."""
    ids = desk.key(letters).token_ids
    start = len(req.fill_ids)
    req.fill_ids = req.fill_ids + ids
    req.origin_input_ids = req.fill_ids
    desk.row(req)[start : start + len(ids)] = desk.alloc(len(letters))
    req.kv_committed_len = req.kv_allocated_len = len(req.fill_ids)


@geometry
def test_unfinished_hands_over_full_pages_and_locks_them(page: int, dp: int) -> None:
    """[0, a) → tree, locked by a new receipt; the tail stays the request's."""
    desk = Desk(page, 2 * page, dp)
    tail = 3 if page > 1 else 0
    req = desk.request("abcd", tail=tail)
    old = req.cache_lock_params
    desk.cache.cache_unfinished_req(req)
    assert req.cache_protected_len == req.last_matched_prefix_len == 4 * page
    assert req.last_node is desk.node("abcd")
    assert req.cache_lock_params is not old
    assert req.cache_lock_params.swa_uuid_for_lock == req.swa_uuid_for_lock is not None
    assert req.prefix_indices.tolist() == desk.row(req)[: 4 * page + tail].tolist()
    assert desk.pages(req.prefix_indices[: 4 * page]) == [1, 2, 3, 4]
    assert desk.sums() == (0, 4, 2, 2)
    desk.sound()
    desk.cache.cache_finished_req(req)
    assert (req.cache_lock_params, req.swa_uuid_for_lock) == (None, None)
    assert desk.sums() == (4, 0, 4, 0)
    assert desk.available() == (60, 60)
    desk.sound()


@geometry
def test_two_requests_with_one_prompt_share_the_first_ones_slots(page: int, dp: int) -> None:
    """D35, rule 2: B's row shows A's pages before B's duplicates are freed; nothing B reads is free."""
    desk = Desk(page, 2 * page, dp)
    a, b = desk.request("abcd", "a"), desk.request("abcd", "b")
    assert (desk.row_pages(a), desk.row_pages(b)) == ([1, 2, 3, 4], [5, 6, 7, 8])
    desk.cache.cache_unfinished_req(a)
    desk.cache.cache_unfinished_req(b)
    assert (desk.row_pages(a), desk.row_pages(b)) == ([1, 2, 3, 4], [1, 2, 3, 4])
    assert b.cache_protected_len == 4 * page
    assert desk.available() == (60, 60)
    assert desk.node("abcd").component_data[FULL].lock_ref == 2
    for req in (a, b):
        desk.cache.cache_finished_req(req)
    assert desk.sums() == (4, 0, 4, 0)
    desk.sound()


@geometry
def test_a_heal_under_a_runners_lock_repoints_the_newcomer(page: int, dp: int) -> None:
    """D16 and rule 2 together: A reads FULL 1..4; B recomputes, gives its SWA to A's FULL slots and reads those too."""
    desk = Desk(page, 2 * page, dp)
    a = desk.request("abcd", "a")
    desk.cache.cache_unfinished_req(a)
    assert desk.evict(swa=1) == (0, 2)
    b = desk.request("abcd", "b")
    assert b.cache_protected_len == 0 and desk.row_pages(b) == [5, 6, 7, 8]
    desk.cache.cache_unfinished_req(b)
    assert desk.row_pages(a) == desk.row_pages(b) == [1, 2, 3, 4]
    assert desk.mapped(1, 2, 3, 4) == [5, 6, 3, 4]
    assert desk.available() == (60, 60)
    desk.sound()
    for req in (b, a):
        desk.cache.cache_finished_req(req)
    assert desk.sums() == (4, 0, 4, 0)


@geometry
def test_chunks_continue_from_the_locked_node(page: int, dp: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """The second commit starts at the request's own node and touches new pages only."""
    desk = Desk(page, 2 * page, dp)
    req = desk.request("abcd")
    desk.cache.cache_unfinished_req(req)
    grow(desk, req, "efgh")
    starts = []
    real = desk.cache.insert_below

    def spy(start, params, **kw):
        starts.append(start)
        return real(start, params, **kw)

    monkeypatch.setattr(desk.cache, "insert_below", spy)
    first = req.last_node
    desk.cache.cache_unfinished_req(req)
    assert starts == [first]
    assert desk.picture() == ["/ab S", "ab/cd S", "abcd/ef S", "abcdef/gh S"]
    assert desk.sums() == (0, 8, 6, 2)
    desk.sound()


def test_a_commit_walks_from_the_root_when_its_node_does_not_fit() -> None:
    """No locked node at the protected length: the whole key is walked, with the same result."""
    desk = Desk(1, 4)
    req = desk.request("abcd")
    desk.cache.cache_unfinished_req(req)
    node, receipt = req.last_node, req.cache_lock_params
    req.last_node = desk.cache.root_node
    req.cache_lock_params = None
    grow(desk, req, "ef")
    desk.cache.cache_unfinished_req(req)
    assert req.cache_protected_len == 6
    desk.cache.dec_lock_ref(node, receipt)
    desk.cache.cache_finished_req(req)
    assert desk.sums() == (6, 0, 6, 0)
    desk.sound()


@geometry
@pytest.mark.parametrize("path", ["unfinished", "finished"])
def test_the_cursor_travels_with_every_insert(page: int, dp: int, path: str) -> None:
    """D17: what the request reclaimed is a tombstone in the tree, whoever inserts it."""
    desk = Desk(page, 2 * page, dp)
    req = desk.request("abcdefgh")
    desk.cache.evict_req_swa(req, 8 * page, desk.rank)
    assert req.swa_evicted_seqlen == 5 * page
    assert desk.available() == (56, 61)
    if path == "unfinished":
        desk.cache.cache_unfinished_req(req)
    desk.cache.cache_finished_req(req)
    assert desk.picture() == ["/abcde T", "abcde/f S", "abcdef/gh S"]
    assert desk.sums() == (8, 0, 3, 0)
    assert desk.match("abcdefgh") == [1, 2, 3, 4, 5, 6, 7, 8]
    desk.sound()


@pytest.mark.parametrize(
    ("page", "window", "pre_len", "evicted", "protected", "expected"),
    [
        (4, 8, 24, 0, 8, 12),
        (4, 8, 23, 0, 8, 8),
        (4, 8, 40, 20, 8, 28),
        (4, 8, 24, 20, 8, 20),
        (1, 4, 16, 0, 0, 11),
        (256, 128, 400, 0, 0, 0),
        (256, 128, 1000, 0, 256, 512),
        (128, 128, 300, 0, 128, 128),
    ],
)
def test_reclaim_boundaries(
    page: int, window: int, pre_len: int, evicted: int, protected: int, expected: int
) -> None:
    """RFC 5: floor_page(max(old, pre_len - W - P)), monotonic, from the protected length on (page 4, window 8, 24 → 12; D18)."""
    desk = Desk(page, window)
    if protected:
        desk.insert("ab"[: protected // page])
    req = desk.request(
        "ab"[: protected // page]
        + "cdefghijklmnopqrstuvwx"[: max(0, pre_len // page + 1 - protected // page)]
    )
    assert req.cache_protected_len == protected
    req.swa_evicted_seqlen = evicted
    if evicted > protected:
        desk.allocator.free_swa(desk.row(req)[protected:evicted], dp_rank=0)
    before = desk.allocator.swa_available_size(0)
    desk.cache.evict_req_swa(req, pre_len, 0)
    assert req.swa_evicted_seqlen == expected
    assert desk.allocator.swa_available_size(0) - before == max(0, expected - max(evicted, protected))
    desk.cache.evict_req_swa(req, pre_len // 2, 0)
    assert req.swa_evicted_seqlen == expected
    desk.sound()


def test_reclaim_never_touches_the_tree() -> None:
    """RFC 5: the protected boundary is the path of the request's node, not a number the request carries."""
    desk = Desk(1, 4)
    desk.insert("abcdefgh")
    req = desk.request("abcdefghijkl")
    req.cache_protected_len = 0
    desk.cache.evict_req_swa(req, 12, 0)
    assert req.swa_evicted_seqlen == 8
    assert desk.mapped(1, 2, 3, 4, 5, 6, 7, 8) == [1, 2, 3, 4, 5, 6, 7, 8]


def test_reclaim_refuses_a_foreign_rank_and_an_odd_boundary() -> None:
    """Fault 7: an omitted or foreign rank for a request of rank 1 is an error, not a leak of the other window."""
    desk = Desk(4, 4, dp=2)
    req = desk.request("abcdefgh")
    with pytest.raises(ValueError, match="evict_req_swa without dp_rank on 2"):
        desk.cache.evict_req_swa(req, 32)
    with pytest.raises(ValueError, match="dp_rank=0 for a request of dp_rank=1"):
        desk.cache.evict_req_swa(req, 32, 0)
    req.last_node = SimpleNamespace(path_len=lambda: 3)
    with pytest.raises(TreeInvariantError, match="protected length 3"):
        desk.cache.evict_req_swa(req, 32, 1)
    req.req_pool_idx = None
    assert desk.cache.evict_req_swa(req, 32, 1) is None


@geometry
@pytest.mark.parametrize("when", ["before commit", "after commit", "second chunk"])
def test_an_abort_gives_back_what_is_the_requests(page: int, dp: int, when: str) -> None:
    """D30, D31: [0, protected) stays with the tree; everything else returns, at every point."""
    desk = Desk(page, 2 * page, dp)
    tail = 1 if page > 1 else 0
    req = desk.request("abcd", tail=0 if when == "second chunk" else tail)
    if when != "before commit":
        desk.cache.cache_unfinished_req(req)
    if when == "second chunk":
        grow(desk, req, "ef")
    release_kv_cache(req, desk.cache, is_insert=False)
    assert req.req_pool_idx is None and req.cache_lock_params is None
    kept = 0 if when == "before commit" else 4
    assert desk.available() == (64 - kept, 64 - kept)
    assert desk.sums() == (kept, 0, kept, 0)
    assert len(desk.rows.free_slots) == 8
    desk.sound()


@geometry
def test_the_rest_of_the_last_page_leaves_with_the_tail(page: int, dp: int) -> None:
    """DECISIONS 1: a page is released by all of its allocated tokens; later pages are the over-allocated tail."""
    if page == 1:
        page = 4
    desk = Desk(page, 2 * page, dp)
    req = desk.request("ab", tail=3)
    req.kv_committed_len = 2 * page + 1
    assert desk.available() == (61, 61)
    release_kv_cache(req, desk.cache, allow_overallocated=True)
    assert desk.sums() == (2, 0, 2, 0)
    assert desk.available() == (62, 62)
    desk.sound()


def test_finishing_below_the_cursor_leaves_no_tombstone_leaf() -> None:
    """A request that ends with its whole new part reclaimed: nothing enters the tree, nothing leaks."""
    desk = Desk(1, 4)
    req = desk.request("abcdefgh")
    desk.allocator.free_swa(desk.row(req)[:8], dp_rank=0)
    req.swa_evicted_seqlen = 8
    desk.cache.cache_finished_req(req)
    assert desk.picture() == [] and desk.available() == (64, 64)


def test_an_unfinished_insert_never_skips_its_leaf() -> None:
    """DECISIONS 8: the request goes on reading the slots, so the leaf is created, all tombstone, and dies with the lock."""
    desk = Desk(1, 4)
    req = desk.request("abcd")
    desk.allocator.free_swa(desk.row(req)[:4], dp_rank=0)
    req.swa_evicted_seqlen = 4
    desk.cache.cache_unfinished_req(req)
    assert desk.picture() == ["/abcd T"] and req.cache_protected_len == 4
    assert desk.sums() == (0, 4, 0, 0)
    desk.cache.cache_finished_req(req, is_insert=False)
    assert desk.picture() == [] and desk.available() == (64, 64)
    desk.sound()


def test_finished_releases_exactly_the_stored_receipt(monkeypatch: pytest.MonkeyPatch) -> None:
    """The receipt object on the request is the one that is released; fakes without one release None."""
    desk = Desk(1, 4)
    req = desk.request("abcd")
    calls: list[tuple[Any, Any]] = []
    monkeypatch.setattr(desk.cache, "dec_lock_ref", lambda node, params=None: calls.append((node, params)))
    node, receipt = req.last_node, req.cache_lock_params
    desk.cache.cache_finished_req(req)
    assert len(calls) == 1 and calls[0][0] is node and calls[0][1] is receipt
    bare = desk.request("efgh")
    del bare.cache_lock_params
    desk.cache.cache_finished_req(bare)
    assert calls[-1] == (desk.cache.root_node, None)


def test_everything_is_one_free_group(monkeypatch: pytest.MonkeyPatch) -> None:
    """Rule 2: nothing is allocatable between insert and re-pointing; an open group is joined, only the outermost flushes."""
    desk = Desk(1, 4)
    req = desk.request("mn")
    desk.insert("mn")
    seen = []
    real = desk.cache._lifecycle._repoint

    def spy(row, end, protected):
        seen.append(desk.allocator.is_not_in_free_group)
        real(row, end, protected)

    monkeypatch.setattr(desk.cache._lifecycle, "_repoint", spy)
    desk.cache.cache_unfinished_req(req)
    desk.allocator.free_group_begin()
    free = desk.available()
    desk.cache.cache_finished_req(desk.request("xy"), is_insert=False)
    assert desk.available() == (free[0] - 2, free[1] - 2)
    assert not desk.allocator.is_not_in_free_group
    desk.allocator.free_group_end()
    assert desk.available() == free
    assert seen == [False]


def test_a_packed_buffer_is_used_when_the_request_keeps_one() -> None:
    """G8: ``radix_tokens`` is the request's packed key; ids are not packed again."""
    desk = Desk(1, 4)
    req = desk.request("abcd")
    req.radix_tokens = TokenBuffer(desk.key("wxyz").token_ids)
    desk.cache.cache_unfinished_req(req)
    assert desk.picture() == ["/wxyz S"]


def test_only_known_tokens_are_cached() -> None:
    """D32: a range longer than what is known is refused by name, before anything moves."""
    desk = Desk(1, 4)
    req = desk.request("abcd")
    req.pop_committed_kv_cache = lambda: 9
    with pytest.raises(ValueError, match="request r: 9 tokens are to be cached, but only 4"):
        desk.cache.cache_finished_req(req)
    assert desk.picture() == []


def test_a_cap_of_zero_inserts_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    """CONTRACT 8: prefix_indices is a copy of the row, the lock is untouched."""
    desk = Desk(1, 4)
    req = desk.request("abcd")
    receipt = req.cache_lock_params
    monkeypatch.setattr(desk.cache.components[SWA], "prepare_for_caching_req", lambda *a: 0)
    desk.cache.cache_unfinished_req(req)
    assert req.prefix_indices.tolist() == [1, 2, 3, 4] and req.cache_lock_params is receipt
    assert desk.picture() == []


def test_disabled_keeps_nothing() -> None:
    """CONTRACT 8: finish frees the row without its zeros and clears the receipt; unfinished refreshes it."""
    desk = Desk(1, 4)
    desk.cache.disable = True
    req = desk.request("abcd")
    desk.cache.cache_unfinished_req(req)
    assert isinstance(req.cache_lock_params, DecLockRefParams) and req.swa_uuid_for_lock is None
    assert req.prefix_indices.tolist() == [1, 2, 3, 4]
    desk.row(req)[1] = 0
    desk.cache.cache_finished_req(req)
    assert desk.available() == (63, 63) and req.cache_lock_params is None
    assert desk.cache.evict_req_swa(req, 100, 0) is None
    assert np.array_equal(desk.cache.match_prefix(SimpleNamespace(key=desk.key("abcd"))).device_indices, [])


def test_full_alone_frees_its_duplicates_itself() -> None:
    """CONTRACT 8: with one component the request's path frees [protected, matched)."""
    desk = Desk(1, 4, kinds=(FULL,))
    a, b = desk.request("abcd", "a"), desk.request("abcdef", "b")
    desk.cache.cache_unfinished_req(a)
    desk.cache.cache_unfinished_req(b)
    assert desk.row_pages(b) == [1, 2, 3, 4, 9, 10]
    assert desk.available()[0] == 58
    for req in (a, b):
        desk.cache.cache_finished_req(req)
    assert desk.sums() == (6, 0, 0, 0)
    assert desk.cache.check() == []
