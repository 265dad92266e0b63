"""Faults D01-D08, D45, D49 and the allocator's part of the ten faults of the merged version."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from sgl_jax.srt.mem_cache.errors import CacheError, DoubleFreeError, PartialPageError, UnmappedSlotError
from sgl_jax.test.faults.kit import Kit, seq
from sgl_jax.test.oracle.observe import free_pages
from sgl_jax.test.stateful.build import build_allocator


def ids(*values: int) -> np.ndarray:  # type: ignore[type-arg]
    return np.array(values, np.int32)


def span(a: int, b: int) -> np.ndarray:  # type: ignore[type-arg]
    return np.arange(a, b, dtype=np.int32)


def sizes(alloc: Any, rank: int = 0) -> tuple[int, int]:
    return alloc.full_available_size(rank), alloc.swa_available_size(rank)


def test_freeing_one_token_of_a_page_changes_nothing() -> None:
    """D01, fault 3: the page stays, mapping intact; naming all its tokens releases it once."""
    alloc = build_allocator(4, 4, 4, 1, strict=False)
    assert alloc.alloc(4).tolist() == [4, 5, 6, 7]
    alloc.free_swa(ids(5))
    assert alloc.full_to_swa_index_mapping[4:8].tolist() == [4, 5, 6, 7]
    assert alloc.alloc(4).tolist() == [8, 9, 10, 11]
    assert alloc.full_to_swa_index_mapping[8:12].tolist() == [8, 9, 10, 11]
    alloc.free_swa(ids(6))
    alloc.free_full(ids(4, 7), dp_rank=0)
    alloc.free(ids(4, 5, 6))
    assert sizes(alloc) == (8, 8)
    alloc.free_swa(span(4, 8))
    alloc.free_swa(span(4, 8))
    assert sizes(alloc) == (8, 12)
    assert alloc.full_to_swa_index_mapping[4:8].tolist() == [0, 0, 0, 0]
    assert alloc.check() == []


@pytest.mark.parametrize("call", ["free", "free_full", "free_swa"])
def test_strict_mode_refuses_a_partial_page(call: str) -> None:
    """D01: strict mode raises and changes nothing."""
    alloc = build_allocator(4, 4, 4, 1)
    alloc.alloc(8)
    before = alloc.full_to_swa_index_mapping.copy()
    with pytest.raises(PartialPageError):
        getattr(alloc, call)(ids(4, 5, 6, 7, 9), dp_rank=0)
    assert (alloc.full_to_swa_index_mapping == before).all()
    assert sizes(alloc) == (8, 8)


def test_a_short_last_page_is_released_by_its_allocated_tokens() -> None:
    """D01: 'all allocated tokens' of a page of which only 2 are in use are these 2."""
    alloc = build_allocator(4, 4, 4, 1)
    out = alloc.alloc_extend([0], [6], ids(-1), 6, dp_rank=0)
    assert out.tolist() == [4, 5, 6, 7, 8, 9]
    alloc.free(ids(8, 9), dp_rank=0)
    assert sizes(alloc) == (12, 12)
    assert alloc.full_to_swa_index_mapping[4:12].tolist() == [4, 5, 6, 7, 0, 0, 0, 0]


def test_a_group_captures_the_slot_before_a_heal_repoints_the_mapping() -> None:
    """D02: the flush releases SWA 1 only; SWA 2, moved onto FULL 1 inside the group, stays live."""
    alloc = build_allocator(1, 6, 6, 1)
    assert alloc.alloc(1).tolist() == [1]
    assert alloc.alloc(1).tolist() == [2]
    alloc.free_group_begin()
    alloc.free_swa(ids(1))
    assert alloc.full_to_swa_index_mapping[1] == 0
    alloc.transfer_swa_mapping(ids(2), ids(1), dp_rank=0)
    assert sizes(alloc) == (4, 4)
    alloc.free_group_end()
    assert alloc.full_to_swa_index_mapping[:3].tolist() == [0, 2, 0]
    assert sorted(free_pages(alloc.full_attn_allocator, 0, 1)) == [2, 3, 4, 5, 6]
    assert sorted(free_pages(alloc.swa_attn_allocator, 0, 1)) == [1, 3, 4, 5, 6]


def test_recycled_full_slots_get_a_fresh_mapping() -> None:
    """D03: no slot of a new allocation carries its previous owner's SWA slot."""
    alloc = build_allocator(1, 3, 5, 1)
    assert alloc.alloc(3).tolist() == [1, 2, 3]
    alloc.free_swa(ids(1, 2))
    alloc.free(ids(1, 2, 3))
    assert alloc.full_to_swa_index_mapping.tolist() == [0, 0, 0, 0]
    again = alloc.alloc(3)
    mapped = alloc.full_to_swa_index_mapping[again].tolist()
    assert sorted(again.tolist()) == [1, 2, 3] and len(set(mapped)) == 3 and 0 not in mapped
    alloc.free(again)
    assert sizes(alloc) == (3, 5)


@pytest.mark.parametrize("op", ["extend", "decode", "alloc"])
def test_a_swa_shortage_rolls_everything_back(op: str) -> None:
    """D04 (a), fault 2: new pages go back, the live half-filled page stays, the mapping is byte-identical."""
    alloc = build_allocator(4, 8, 2, 1)
    assert alloc.alloc_extend([0], [6], ids(-1), 6, dp_rank=0).tolist() == list(range(4, 10))
    before, size = alloc.full_to_swa_index_mapping.copy(), sizes(alloc)
    if op == "extend":
        assert alloc.alloc_extend([6], [14], ids(9), 8, dp_rank=0) is None
    elif op == "decode":
        assert alloc.alloc_decode([7, 5], ids(9, 7), dp_rank=0) is None
    else:
        assert alloc.alloc(4, dp_rank=0) is None
    assert (alloc.full_to_swa_index_mapping == before).all()
    assert sizes(alloc) == size == (24, 0)
    assert alloc.alloc_decode([7], ids(9), dp_rank=0).tolist() == [10]
    alloc.free(span(4, 11))
    assert sizes(alloc) == (32, 8)


def test_a_forced_swa_failure_leaves_full_as_it_was() -> None:
    """D04: the sub-allocator itself fails after FULL succeeded."""
    alloc = build_allocator(1, 8, 8, 1)
    alloc.swa_attn_allocator.alloc = lambda *a, **k: None
    before = alloc.full_to_swa_index_mapping.copy()
    assert alloc.alloc(3) is None
    assert alloc.full_available_size(0) == 8 and (alloc.full_to_swa_index_mapping == before).all()


def test_the_last_page_can_be_filled_to_its_last_slot() -> None:
    """D04 (b): the largest index is size + P - 1 and the mapping has room for it."""
    alloc = build_allocator(4, 3, 3, 1)
    assert alloc.alloc_extend([0], [9], ids(-1), 9, dp_rank=0).tolist() == list(range(4, 13))
    for i, slot in enumerate((13, 14, 15)):
        assert alloc.alloc_decode([10 + i], ids(slot - 1), dp_rank=0).tolist() == [slot]
    assert alloc.full_to_swa_index_mapping[15] == 15 and len(alloc.full_to_swa_index_mapping) == 16
    assert alloc.alloc_decode([13], ids(15), dp_rank=0) is None


def test_two_full_slots_on_one_swa_slot_are_reported() -> None:
    """D05: a duplicate mapping is a violation before anything is freed."""
    alloc = build_allocator(1, 6, 6, 1)
    alloc.alloc(2)
    alloc.full_to_swa_index_mapping[2] = 1
    assert any("dup" in v.kind or "mapp" in v.kind for v in alloc.check())


def test_availability_returns_to_cold_every_round() -> None:
    """D06: page 64, lengths that are no page multiple, decode across a boundary, 50 rounds."""
    kit = Kit(page=64, window=100, full=64 * 12, swa=64 * 9)
    for i in range(50):
        req = kit.admit(seq(64 * 2 + 61 - i, start=1000 * i))
        kit.commit(req)
        for t in range(5 + i):
            kit.decode(req, t)
        kit.finish(req)
        kit.assert_cold_after_evicting_all()


def test_every_size_query_exists_on_the_dual_pool() -> None:
    """D07: nothing on a reachable path is 'not implemented'."""
    alloc = build_allocator(4, 6, 3, 2)
    assert (alloc.size_full, alloc.size_swa, alloc.page_size, alloc.dp_size) == (48, 24, 4, 2)
    assert [alloc.available_size(r) for r in (0, 1)] == [12, 12]
    assert [sizes(alloc, r) for r in (0, 1)] == [(24, 12), (24, 12)]
    assert alloc.count_swa_mapped(span(4, 8), dp_rank=1) == 0
    assert isinstance(alloc.debug_print(), str)
    alloc.merge_and_sort_free(dp_rank=1)
    assert alloc.get_kvcache() is not None


def test_a_surplus_is_refused_with_its_slots() -> None:
    """D08: freeing what is free would put availability above the total; strict mode names rank, pool, slots."""
    alloc = build_allocator(16, 4, 4, 2)
    alloc.alloc(32, dp_rank=1)
    alloc.free(span(16, 32), dp_rank=1)
    with pytest.raises(DoubleFreeError, match=r"dp_rank=1 .*full.*1"):
        alloc.free(span(16, 32), dp_rank=1)
    assert sizes(alloc, 1) == (48, 48)


def test_shared_part_filled_pages_never_push_availability_over_the_total() -> None:
    """D08: two requests share [0,16); each keeps its own part-filled second page."""
    kit = Kit(page=16, window=8, full=128, swa=128)
    first, second = kit.admit(seq(20)), kit.admit(seq(20))
    assert kit.available() == (64, 64)
    kit.finish(first)
    assert kit.available() == (80, 80)
    kit.finish(second)
    assert kit.available() == (112, 112)
    kit.assert_cold_after_evicting_all()


@pytest.mark.parametrize(("pages", "works"), [(3, False), (4, True)])
def test_decode_demand_counts_crossings_in_pages(pages: int, works: bool) -> None:
    """D45: page 32, four rows at a page boundary need four pages, not four tokens."""
    alloc = build_allocator(32, 4 + pages, 8, 1)
    rows = [alloc.alloc_extend([0], [32], ids(-1), 32, dp_rank=0) for _ in range(4)]
    lasts = np.array([r[-1] for r in rows], np.int32)
    out = alloc.alloc_decode([33] * 4, lasts, dp_rank=0)
    assert (out is not None) == works
    assert sizes(alloc) == ((0, 0) if works else (96, 128))
    if works:
        assert out.tolist() == [160, 192, 224, 256]


@pytest.mark.parametrize("page", [1, 4])
def test_ranks_with_equal_local_indices_do_not_touch_each_other(page: int) -> None:
    """D49: every alloc, free and mapping write of rank 0 leaves rank 1 byte-identical."""
    alloc = build_allocator(page, 8, 8, 2)
    a, b = alloc.alloc(2 * page, dp_rank=0), alloc.alloc(2 * page, dp_rank=1)
    assert a.tolist() == b.tolist()
    before = alloc.full_to_swa_index_mapping[1].copy()
    alloc.free_swa(a[:page], dp_rank=0)
    assert (alloc.full_to_swa_index_mapping[0][a[:page]] == 0).all()
    alloc.free(a, dp_rank=0)
    assert (alloc.full_to_swa_index_mapping[1] == before).all()
    assert sizes(alloc, 1) == (6 * page, 6 * page) and sizes(alloc, 0) == (8 * page, 8 * page)
    alloc.clear(dp_rank=0)
    assert alloc.translate_full_to_swa(b, dp_rank=1).tolist() == b.tolist()
    assert alloc.alloc(2 * page, dp_rank=0).tolist() == a.tolist()


def test_an_omitted_rank_is_an_error_with_two_ranks() -> None:
    """Fault 7: no call falls back to rank 0 when there is more than one rank."""
    alloc = build_allocator(1, 8, 8, 2)
    slots = alloc.alloc(2, dp_rank=1)
    for call in (alloc.free, alloc.free_swa, alloc.alloc, alloc.count_swa_mapped):
        with pytest.raises((ValueError, TypeError, CacheError), match="dp_rank"):
            call(2 if call == alloc.alloc else slots)
    assert sizes(alloc, 0) == (8, 8) and sizes(alloc, 1) == (6, 6)
    assert build_allocator(1, 8, 8, 1).alloc(2).tolist() == [1, 2]


@pytest.mark.parametrize("grouped", [False, True])
def test_freeing_full_twice_hands_no_slot_out_twice(grouped: bool) -> None:
    """Fault 4: page 1, default mode; also inside one group and across the two kinds of free."""
    alloc = build_allocator(1, 4, 4, 1, strict=False)
    alloc.alloc(4)
    if grouped:
        alloc.free_group_begin()
    alloc.free_full(ids(2, 2), dp_rank=0)
    alloc.free_full(ids(2), dp_rank=0)
    alloc.free(ids(2, 3))
    alloc.free_swa(ids(2, 3))
    if grouped:
        assert sizes(alloc) == (0, 0) and alloc.alloc(1) is None
        alloc.free_group_end()
    assert sizes(alloc) == (2, 2)
    assert sorted(alloc.alloc(2).tolist()) == [2, 3] and alloc.alloc(1) is None
    assert len(set(alloc.full_to_swa_index_mapping[1:].tolist())) == 4


@pytest.mark.parametrize("page", [4, 128])
@pytest.mark.parametrize("op", ["extend", "decode"])
def test_extending_behind_an_unmapped_slot_is_refused(op: str, page: int) -> None:
    """Fault 8, rule 7: the SWA half of the last page is gone; page 0 must not be allocated into."""
    alloc = build_allocator(page, 6, 6, 1)
    out = alloc.alloc_extend([0], [page + 2], ids(-1), page + 2, dp_rank=0)
    alloc.free_swa(out[page:])
    before, size = alloc.full_to_swa_index_mapping.copy(), sizes(alloc)
    with pytest.raises(UnmappedSlotError):
        if op == "extend":
            alloc.alloc_extend([page + 2], [2 * page + 1], out[-1:], page - 1, dp_rank=0)
        else:
            alloc.alloc_decode([page + 3], out[-1:], dp_rank=0)
    assert (alloc.full_to_swa_index_mapping == before).all() and sizes(alloc) == size


def test_a_page_that_grew_after_a_transfer_is_still_whole() -> None:
    """D01: page 1 held 2 tokens, lost and regained its SWA half, grew to 4 and lost it again: 2 tokens do not free it."""
    alloc = build_allocator(4, 4, 4, 1)
    assert alloc.alloc_extend([0], [2], ids(-1), 2, dp_rank=0).tolist() == [4, 5]
    alloc.free_swa(ids(4, 5))
    assert alloc.alloc_extend([0], [2], ids(-1), 2, dp_rank=0).tolist() == [8, 9]
    alloc.transfer_swa_mapping(ids(8, 9), ids(4, 5), dp_rank=0)
    assert alloc.alloc_decode([3], ids(5), dp_rank=0).tolist() == [6]
    assert alloc.alloc_decode([4], ids(6), dp_rank=0).tolist() == [7]
    alloc.free_swa(span(4, 8))
    with pytest.raises(PartialPageError):
        alloc.free(ids(4, 5))
    assert sizes(alloc) == (12, 16)


@pytest.mark.parametrize("op", ["extend", "batch", "decode"])
def test_nothing_of_an_earlier_life_shows_in_a_new_short_page(op: str) -> None:
    """D03: an entry left behind on page 2 (written by hand) is gone when the page is handed out for one token."""
    alloc = build_allocator(4, 6, 6, 1)
    assert alloc.alloc_extend([0], [4], ids(-1), 4, dp_rank=0).tolist() == [4, 5, 6, 7]
    alloc.full_to_swa_index_mapping[9:12] = [21, 22, 23]
    if op == "extend":
        assert alloc.alloc_extend([4], [5], ids(7), 1, dp_rank=0).tolist() == [8]
    elif op == "batch":
        assert alloc.alloc_extend([4, 0], [5, 1], ids(7, -1), 2, dp_rank=0).tolist() == [8, 12]
    else:
        assert alloc.alloc_decode([5], ids(7), dp_rank=0).tolist() == [8]
    assert alloc.full_to_swa_index_mapping[8:12].tolist() == [8, 0, 0, 0]
    assert alloc.check() == []


def test_a_short_transfer_onto_a_longer_page_is_refused() -> None:
    """D01, rule 6: page 1 holds 4 tokens; with SWA for two of them it would be released by naming these two."""
    alloc = build_allocator(4, 4, 4, 1)
    long = alloc.alloc(4)
    alloc.free_swa(long)
    short = alloc.alloc_extend([0], [2], ids(-1), 2, dp_rank=0)
    assert (long.tolist(), short.tolist()) == ([4, 5, 6, 7], [8, 9])
    with pytest.raises(ValueError, match="only in part"):
        alloc.transfer_swa_mapping(short, long[:2], dp_rank=0)
    assert alloc.full_to_swa_index_mapping[4:10].tolist() == [0, 0, 0, 0, 8, 9]
    assert sizes(alloc) == (8, 12)
