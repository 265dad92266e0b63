"""SWATokenToKVPoolAllocator: the three frees, partial pages, groups, clear, ranks."""

from __future__ import annotations

import numpy as np
import pytest

from sgl_jax.srt.mem_cache.allocator import free_group
from sgl_jax.srt.mem_cache.errors import DoubleFreeError, PartialPageError, SlotRangeError
from sgl_jax.test.mem_cache.allocator.build import dual, ids, image, mapping_of, matrix, sizes, span


@matrix
def test_free_returns_both_halves_and_clears_the_mapping(page, dp):
    a = dual(page, 4, 4, dp)
    rank = dp - 1
    slots = a.alloc(3 * page, dp_rank=rank)
    a.free(slots[page : 2 * page], dp_rank=rank)
    assert sizes(a, rank) == (2 * page, 2 * page)
    assert a.count_swa_mapped(slots, rank) == 2 * page and a.check() == []
    a.free(np.empty((0,), np.int32), dp_rank=rank)
    assert sizes(a, rank) == (2 * page, 2 * page)


@matrix
def test_free_full_keeps_swa_and_mapping_for_the_cascade(page, dp):
    a = dual(page, 4, 4, dp)
    rank = dp - 1
    slots = a.alloc(2 * page, dp_rank=rank)
    before = mapping_of(a, rank).copy()
    a.free_full(slots, dp_rank=rank)
    assert sizes(a, rank) == (4 * page, 2 * page) and (mapping_of(a, rank) == before).all()
    a.free_swa(slots, dp_rank=rank)
    assert sizes(a, rank) == (4 * page, 4 * page) and not mapping_of(a, rank).any() and a.check() == []


@matrix
def test_free_swa_makes_a_tombstone_and_repeats_are_no_ops(page, dp):
    a = dual(page, 4, 4, dp)
    rank = dp - 1
    slots = a.alloc(2 * page, dp_rank=rank)
    a.free_swa(slots[:page], dp_rank=rank)
    after = image(a)
    assert sizes(a, rank) == (2 * page, 3 * page)
    assert mapping_of(a, rank)[slots].tolist() == [0] * page + list(range(2 * page, 3 * page))
    a.free_swa(slots[:page], dp_rank=rank)
    a.free_swa(span(3 * page, 4 * page), dp_rank=rank)  # never allocated: unmapped, so nothing
    assert image(a) == after and a.check() == []
    a.free(slots, dp_rank=rank)
    assert sizes(a, rank) == (4 * page, 4 * page)


def test_fabricated_slots_are_ignored_by_default_and_named_in_strict_mode():
    """DECISIONS 10."""
    for page in (1, 4):
        a = dual(page, 4, 4, strict=False)
        a.alloc(page)
        before = image(a)
        for call in (a.free, a.free_swa, a.free_full):
            call(span(100, 108), dp_rank=0)
            call(ids(-3, 0), dp_rank=0)
            call(span(2 * page, 3 * page), dp_rank=0)
        assert image(a) == before
        a.strict = True
        assert a.swa_attn_allocator.strict and a.full_attn_allocator.strict
        with pytest.raises(SlotRangeError, match=r"dp_rank=0 pool=full: slots \[100\]"):
            a.free(ids(100))
        with pytest.raises(DoubleFreeError, match=r"dp_rank=0 pool=full"):
            a.free_full(span(2 * page, 3 * page), dp_rank=0)
        with pytest.raises(SlotRangeError, match="0 is reserved"):
            a.free(span(0, page))
        a.free_swa(span(2 * page, 3 * page))  # unmapped: the RFC's no-op, never an error
        assert image(a) == before


def test_freeing_full_twice_hands_the_slot_out_once():
    """Fault 4, page size 1, both pools; strict mode raises and changes nothing."""
    a = dual(1, 4, 4, strict=False)
    slots = a.alloc(4)
    a.free(slots[:1])
    a.free(slots[:1])
    a.free(ids(1, 1))
    assert sizes(a) == (1, 1) and a.alloc(1).tolist() == [1] and a.alloc(1) is None
    a.free_full(ids(2), dp_rank=0)
    a.strict = True
    before = image(a)
    with pytest.raises(DoubleFreeError, match=r"slots \[2\] are already free"):
        a.free(ids(1, 2))
    assert image(a) == before


# -- partial pages: D01, fault 3, rule 6 -----------------------------------------------------------------------------


def test_partial_frees_change_nothing_and_leave_no_second_owner():
    """D01, fault 3: the page stays with its mapping; nobody else gets its SWA page."""
    a = dual(4, 4, 4, strict=False)
    slots = a.alloc(4)
    before = image(a)
    for named in (slots[1:2], slots[:3], ids(7, 5), ids(4, 4, 5, 5)):
        a.free_swa(named)
        a.free_full(named, dp_rank=0)
        a.free(named)
    assert image(a) == before
    other = a.alloc(4)
    assert not set(a.translate_full_to_swa(other, dp_rank=0)) & set(a.translate_full_to_swa(slots, dp_rank=0))


@pytest.mark.parametrize("order", [[4, 5, 6, 7], [7, 6, 5, 4], [5, 4, 7, 6, 5], [4, 5, 6, 7, 5]])
@pytest.mark.parametrize("call", ["free", "free_full", "free_swa"])
def test_all_tokens_of_a_page_in_any_order_release_it(call, order):
    a = dual(4, 4, 4)
    a.alloc(8)
    getattr(a, call)(ids(*order), dp_rank=0)
    assert sizes(a) == {"free": (12, 12), "free_full": (12, 8), "free_swa": (8, 12)}[call]


def test_consecutive_slots_across_a_boundary_are_two_partial_pages():
    a = dual(4, 4, 4, strict=False)
    a.alloc(8)
    before = image(a)
    a.free(span(5, 9))
    a.free_swa(span(6, 10))
    assert image(a) == before


def test_the_swa_half_of_a_free_full_page_is_still_freed_whole():
    """After ``free_full`` the mapping alone says which tokens a page holds."""
    a = dual(4, 4, 4, strict=False)
    slots = a.alloc(4)
    a.free_full(slots, dp_rank=0)
    a.free(slots[:2])
    assert sizes(a) == (16, 12) and a.count_swa_mapped(slots) == 4
    a.free(slots)
    assert sizes(a) == (16, 16)


def test_a_freed_short_page_is_a_double_free_not_a_partial_one():
    a = dual(4, 4, 4)
    slots = a.alloc_extend([0], [2], [-1], 2)
    a.free(slots)
    with pytest.raises(DoubleFreeError, match=r"pages \[1\] are already free"):
        a.free(slots)


def test_pages_are_judged_one_by_one():
    """DECISIONS 1: whole pages of a call go, the page named in part stays; strict refuses the whole call."""
    a = dual(4, 4, 4, strict=False)
    slots = a.alloc(12)
    a.strict = True
    before = image(a)
    with pytest.raises(PartialPageError, match=r"dp_rank=0 pool=full\+swa: slots \[12, 13\] .* pages \[3\]"):
        a.free(slots[:10])
    assert image(a) == before
    a.strict = False
    a.free(slots[:10])
    assert sizes(a) == (12, 12) and a.count_swa_mapped(slots) == 4
    a.free(slots[8:])
    assert sizes(a) == (16, 16)


@pytest.mark.parametrize("call", ["free", "free_full", "free_swa"])
@pytest.mark.parametrize("tail", [1, 2, 3])
def test_a_short_last_page_is_released_by_the_tokens_it_holds(call, tail):
    a = dual(4, 4, 4)
    slots = a.alloc_extend([0], [4 + tail], [-1], 4 + tail)
    if tail > 1:
        with pytest.raises(PartialPageError):
            getattr(a, call)(slots[:-1], dp_rank=0)
    getattr(a, call)(slots, dp_rank=0)
    assert sizes(a) == {"free": (16, 16), "free_full": (16, 8), "free_swa": (8, 16)}[call]


def test_the_count_of_a_page_follows_decode_and_outlives_its_swa_half():
    """A page that lost its SWA half is still released by exactly the tokens it holds."""
    a = dual(4, 1, 1)
    slots = a.alloc_extend([0], [2], [-1], 2)
    slots = np.concatenate([slots, a.alloc_decode([3], slots[-1:])])
    with pytest.raises(PartialPageError):
        a.free_swa(slots[:2])
    a.free_swa(slots)
    assert sizes(a) == (0, 4)
    with pytest.raises(PartialPageError):
        a.free(slots[:2])
    a.free(slots)
    assert sizes(a) == (4, 4)
    again = a.alloc(4)  # the same page; the count of its earlier life is forgotten
    a.free_swa(again)
    with pytest.raises(PartialPageError):
        a.free(again[:3])


@pytest.mark.parametrize("rank", [None, 0])
def test_clear_forgets_the_counts(rank):
    a = dual(4, 1, 1)
    a.free_swa(a.alloc_extend([0], [2], [-1], 2))
    a.clear(dp_rank=rank)
    again = a.full_attn_allocator.alloc(4)
    with pytest.raises(PartialPageError):
        a.free(again[:2])


def test_a_page_allocated_in_full_only_holds_all_its_tokens():
    a = dual(4, 4, 4)
    slots = a.full_attn_allocator.alloc(4)
    with pytest.raises(PartialPageError):
        a.free(slots[:3])
    a.free(slots)
    assert sizes(a) == (16, 16)


def test_two_halves_in_two_calls_release_nothing_also_in_a_group():
    """Calls are judged one by one (DECISIONS 1)."""
    a = dual(4, 4, 4, strict=False)
    slots = a.alloc(4)
    with free_group(a):
        a.free(slots[:2])
        a.free(slots[2:])
    assert sizes(a) == (12, 12) and a.count_swa_mapped(slots) == 4
    a.free(slots)
    assert sizes(a) == (16, 16)


@pytest.mark.parametrize("seed", range(6))
def test_random_named_sets_against_a_token_model(seed):
    """Rule 6: a page is released iff the call names every token it holds."""
    rng = np.random.default_rng(seed)
    for _ in range(40):
        a = dual(4, 6, 6, strict=False)
        n = int(rng.integers(1, 21))
        held = a.alloc_extend([0], [n], [-1], n).tolist()
        named = rng.choice(np.arange(0, 30), size=int(rng.integers(1, 30)), replace=True)
        if rng.random() < 0.5:
            named = np.concatenate([held, named])
        a.free(named.astype(np.int32))
        named_set = set(named.tolist())
        kept = [p for p in {s // 4 for s in held} if not {s for s in held if s // 4 == p} <= named_set]
        assert sizes(a) == (24 - 4 * len(kept), 24 - 4 * len(kept))
        assert a.check() == []


# -- groups -----------------------------------------------------------------------------------------------------------


@matrix
def test_a_group_dedups_across_the_three_frees(page, dp):
    a = dual(page, 4, 4, dp)
    rank = dp - 1
    slots = a.alloc(4 * page, dp_rank=rank)
    a.free_group_begin()
    a.free_full(slots[: 2 * page], dp_rank=rank)
    a.free_swa(slots[: 2 * page], dp_rank=rank)
    a.free(slots[: 3 * page], dp_rank=rank)
    a.free(slots[: 3 * page], dp_rank=rank)
    assert not a.is_not_in_free_group and sizes(a, rank) == (0, 0)
    assert a.free_group is a.full_attn_allocator.free_group and len(a.free_group[rank]) == 2
    assert a.alloc(page, dp_rank=rank) is None
    assert a.count_swa_mapped(slots, rank) == page
    a.free_group_begin()  # does not drop what is queued
    a.free_group_end()
    assert a.is_not_in_free_group and sizes(a, rank) == (3 * page, 3 * page)
    assert a.free_group[rank] == [] and a.check() == []
    taken = a.alloc(3 * page, dp_rank=rank)
    assert len(set(taken.tolist())) == 3 * page and a.alloc(page, dp_rank=rank) is None


@pytest.mark.parametrize("page", [1, 4])
def test_the_flush_releases_what_was_captured_not_what_is_mapped_now(page):
    """D02: the mapping is re-pointed by a heal inside the group; the new SWA slot stays live."""
    a = dual(page, 4, 4)
    old, new = a.alloc(page), a.alloc(page)
    s1 = a.translate_full_to_swa(old, dp_rank=0)
    a.free_group_begin()
    a.free_swa(old)
    assert a.count_swa_mapped(old) == 0
    a.transfer_swa_mapping(new, old, dp_rank=0)
    a.free_group_end()
    s2 = a.translate_full_to_swa(old, dp_rank=0)
    assert not set(s1) & set(s2) and sizes(a) == (3 * page, 3 * page) and a.check() == []


@pytest.mark.parametrize("page", [1, 4])
def test_the_flush_ignores_a_mapping_that_was_written_meanwhile(page):
    """D02 as filed: the mapping is written directly."""
    a = dual(page, 4, 4)
    slots = a.alloc(page)
    fresh = a.swa_attn_allocator.alloc(page)
    a.free_group_begin()
    a.free_swa(slots)
    mapping_of(a)[slots] = fresh
    a.free_group_end()
    assert sizes(a) == (3 * page, 3 * page) and a.check() == []


@pytest.mark.parametrize("page", [1, 4])
def test_a_rank_local_clear_keeps_group_mode_and_the_other_ranks_queue(page):
    a = dual(page, 4, 4, dp=2)
    rows = [a.alloc(2 * page, dp_rank=r) for r in (0, 1)]
    a.free_group_begin()
    for r in (0, 1):
        a.free(rows[r][:page], dp_rank=r)
    a.clear(dp_rank=0)
    assert not a.is_not_in_free_group
    assert sizes(a, 0) == (4 * page, 4 * page) and sizes(a, 1) == (2 * page, 2 * page)
    assert not mapping_of(a, 0).any() and a.count_swa_mapped(rows[1], 1) == page
    assert a.alloc(2 * page, dp_rank=0).tolist() == rows[0].tolist()  # the same ids as the first time
    a.free_group_end()
    assert sizes(a, 0) == (2 * page, 2 * page) and sizes(a, 1) == (3 * page, 3 * page) and a.check() == []


def test_clear_all_leaves_group_mode_and_keeps_the_shared_array():
    a = dual(4, 4, 4)
    mapping = a.full_to_swa_index_mapping
    a.alloc(8)
    a.free_group_begin()
    a.free(span(4, 8))
    a.clear()
    assert a.is_not_in_free_group and sizes(a) == (16, 16)
    assert a.full_to_swa_index_mapping is mapping and not mapping.any()
    a.free_group_end()
    assert sizes(a) == (16, 16) and a.check() == []


def test_a_rank_local_clear_at_dp_one_keeps_group_mode():
    a = dual(1, 4, 4)
    a.alloc(2)
    a.free_group_begin()
    a.clear(dp_rank=0)
    assert not a.is_not_in_free_group
    a.free_group_end()
    assert sizes(a) == (4, 4)


# -- ranks ------------------------------------------------------------------------------------------------------------


def test_an_omitted_rank_is_an_error_above_dp_one():
    """Fault 7: it used to hit rank 0 and to leak the other rank's window."""
    a = dual(4, 4, 4, dp=2)
    for r in (0, 1):
        a.alloc(8, dp_rank=r)
    before = image(a)
    calls = {
        "alloc": lambda: a.alloc(4),
        "alloc_extend": lambda: a.alloc_extend([0], [1], [-1], 1),
        "alloc_decode": lambda: a.alloc_decode([1], [-1]),
        "free": lambda: a.free(span(4, 8)),
        "free_swa": lambda: a.free_swa(span(4, 8)),
        "free_full": lambda: a.free_full(span(4, 8)),
        "translate": lambda: a.translate_full_to_swa(span(4, 8)),
        "transfer": lambda: a.transfer_swa_mapping(span(4, 8), span(8, 12)),
        "count": lambda: a.count_swa_mapped(span(4, 8)),
        "available": lambda: a.available_size(),
        "merge": lambda: a.merge_and_sort_free(),
    }
    for call in calls.values():
        with pytest.raises(ValueError, match=r"dp_rank was omitted.*dp_size=2"):
            call()
    with pytest.raises(ValueError, match=r"dp_rank=2 is outside 0\.\.1"):
        a.free(span(4, 8), dp_rank=2)
    with pytest.raises(ValueError, match=r"dp_rank=-1 is outside 0\.\.1"):
        a.clear(dp_rank=-1)
    assert image(a) == before


def test_an_omitted_rank_is_rank_zero_at_dp_one():
    a = dual(4, 4, 4)
    slots = a.alloc(4)
    assert a.translate_full_to_swa(slots).tolist() == [4, 5, 6, 7]
    a.free_swa(slots)
    a.free_full(slots)
    assert sizes(a) == (16, 16)


@matrix
def test_equal_local_ids_on_two_ranks_are_different_slots(page, dp):
    """D49: everything done on the last rank leaves the other untouched."""
    a = dual(page, 4, 4, dp)
    rows = [a.alloc(2 * page, dp_rank=r) for r in range(dp)]
    assert all(row.tolist() == rows[0].tolist() for row in rows)
    rank = dp - 1
    others = {r: mapping_of(a, r).copy() for r in range(dp - 1)}
    a.free_swa(rows[rank][:page], dp_rank=rank)
    a.free(rows[rank], dp_rank=rank)
    assert sizes(a, rank) == (4 * page, 4 * page)
    for r, mapping in others.items():
        assert sizes(a, r) == (2 * page, 2 * page) and (mapping_of(a, r) == mapping).all()
