"""SWATokenToKVPoolAllocator: translate, transfer, invariants."""

from __future__ import annotations

import numpy as np
import pytest

from sgl_jax.srt.mem_cache.allocator import free_group
from sgl_jax.srt.mem_cache.errors import OwnershipError, PartialPageError
from sgl_jax.test.mem_cache.allocator.build import dual, ids, image, mapping_of, matrix, sizes, span


def test_translate_returns_a_copy_and_names_unmapped_slots():
    a = dual(1, 8, 8)
    slots = a.alloc(4)
    out = a.translate_full_to_swa(slots, dp_rank=0)
    out[:] = 0
    assert a.count_swa_mapped(slots) == 4 and out.dtype == np.int32
    a.free_swa(ids(3))
    with pytest.raises(ValueError, match=r"dp_rank=0.*3"):
        a.translate_full_to_swa(slots, dp_rank=0)
    assert a.translate_full_to_swa(slots, dp_rank=0, require_mapped=False).tolist() == [1, 2, 0, 4]
    assert a.translate_full_to_swa([100, -2], dp_rank=0, require_mapped=False).tolist() == [0, 0]
    with pytest.raises(ValueError, match=r"dp_rank=0.*\[100\]"):
        a.translate_full_to_swa([100], dp_rank=0)


def test_translate_of_nothing_is_a_new_empty_int32_array():
    a = dual(1, 8, 8)
    empty = np.empty((0,), np.int32)
    out = a.translate_full_to_swa(empty, dp_rank=0)
    assert out.dtype == np.int32 and out.size == 0 and out is not empty


@matrix
def test_transfer_moves_swa_ownership_and_frees_the_source_full(page, dp):
    """Rule 1, D16: healing under somebody's FULL lock."""
    a = dual(page, 6, 6, dp)
    rank = dp - 1
    old, new = a.alloc(2 * page, dp_rank=rank), a.alloc(2 * page, dp_rank=rank)
    a.free_swa(old, dp_rank=rank)
    fresh = a.translate_full_to_swa(new, dp_rank=rank)
    a.transfer_swa_mapping(new, old, dp_rank=rank)
    assert (a.translate_full_to_swa(old, dp_rank=rank) == fresh).all()
    assert a.count_swa_mapped(new, rank) == 0
    assert sizes(a, rank) == (4 * page, 4 * page) and a.check() == []
    a.transfer_swa_mapping(ids(), ids(), dp_rank=rank)


@pytest.mark.parametrize("page", [1, 4])
def test_transfer_in_a_group_defers_the_source(page):
    a = dual(page, 6, 6)
    old, new = a.alloc(page), a.alloc(page)
    with free_group(a):
        a.free_swa(old)
        a.transfer_swa_mapping(new, old, dp_rank=0)
        a.free_full(new, dp_rank=0)  # dedup with the transfer's own free
        assert sizes(a) == (4 * page, 4 * page)
    assert sizes(a) == (5 * page, 5 * page) and a.check() == []


def test_transfer_takes_pages_in_any_order():
    a = dual(4, 6, 6)
    old, new = a.alloc(8), a.alloc(8)
    a.free_swa(old)
    swapped = np.concatenate([old[4:], old[:4]])
    a.transfer_swa_mapping(new, swapped, dp_rank=0)
    assert a.translate_full_to_swa(swapped, dp_rank=0).tolist() == list(range(12, 20)) and a.check() == []


@pytest.mark.parametrize(
    "source,target,text",
    [
        ([8, 9, 10, 11], [4, 5, 6], "as many targets as sources, got 4 and 3"),
        ([16, 17, 18, 19], [4, 5, 6, 7], "source slots are unmapped.*16"),
        ([8, 9, 10, 11], [12, 13, 14, 15], "target slots are already mapped.*12"),
        ([8, 9, 10, 11], [8, 9, 10, 11], "target slots are already mapped"),
        ([8, 9, 10, 10], [4, 5, 6, 6], "source slots named twice.*10"),
        ([8, 9, 10, 11], [4, 5, 6, 6], "target slots named twice.*6"),
        ([8, 9, 10, 11], [5, 4, 6, 7], "differ in page offset"),
        ([8, 9, 10], [4, 5, 6], "named only in part.*2"),
        ([8, 9, 10, 11], [4, 5, 22, 23], "torn apart"),
        ([8, 9, 10, 11, 12, 13, 14, 15], [4, 5, 22, 23, 20, 21, 6, 7], "torn apart"),
        ([8, 9, 10, 11], [100, 101, 102, 103], "target slots outside the pool.*100"),
        ([-1], [4], "source slots outside the pool"),
    ],
)
def test_transfer_refuses_what_would_break_ownership(source, target, text):
    a = dual(4, 6, 6)
    a.alloc(12)
    a.full_attn_allocator.alloc(12)
    a.free_swa(span(4, 8))
    before = image(a)
    with pytest.raises(ValueError, match=rf"dp_rank=0.*{text}"):
        a.transfer_swa_mapping(ids(*source), ids(*target), dp_rank=0)
    assert image(a) == before


def test_transfer_refuses_a_target_page_that_is_partly_mapped():
    a = dual(4, 6, 6)
    first = a.alloc_extend([0], [2], [-1], 2)
    second = a.alloc_extend([0], [2], [-1], 2)
    mapping_of(a)[first] = 0
    mapping_of(a)[first[0] + 3] = 7
    with pytest.raises(ValueError, match="partly mapped"):
        a.transfer_swa_mapping(second, first, dp_rank=0)


def test_transfer_refuses_a_target_page_that_holds_more_tokens():
    """Rule 6, D01: FULL page 1 holds 4 tokens; with SWA for 4 and 5 only it would be released by naming these two."""
    a = dual(4, 6, 6)
    long = a.alloc(4)
    a.free_swa(long)
    short = a.alloc_extend([0], [2], [-1], 2)
    before = image(a)
    with pytest.raises(ValueError, match=r"target pages are named only in part: \[1\]"):
        a.transfer_swa_mapping(short, long[:2], dp_rank=0)
    assert image(a) == before
    with pytest.raises(PartialPageError, match=r"slots \[4, 5\]"):
        a.free(long[:2])
    assert sizes(a) == (16, 20)


def test_strict_transfer_refuses_a_target_nobody_owns():
    a = dual(4, 6, 6)
    slots = a.alloc(4)
    with pytest.raises(
        OwnershipError, match=r"dp_rank=0 pool=full: target slots \[8, 9, 10, 11\] of the SWA"
    ):
        a.transfer_swa_mapping(slots, span(8, 12), dp_rank=0)


# -- check(): every kind of damage is named ------------------------------------------------------------------------------


def kinds(allocator) -> list[str]:
    return sorted({f"{v.rank}:{v.pool}:{v.kind}" for v in allocator.check()})


@matrix
def test_a_sound_allocator_has_no_violations(page, dp):
    a = dual(page, 6, 5, dp)
    rank = dp - 1
    slots = a.alloc(3 * page, dp_rank=rank)
    a.free_swa(slots[:page], dp_rank=rank)
    with free_group(a):
        a.free(slots[page : 2 * page], dp_rank=rank)
        assert a.check() == []
    assert a.check() == []


def test_check_names_a_duplicate_target_before_anything_is_freed():
    """D05: two FULL slots on one SWA slot."""
    a = dual(1, 8, 8, dp=2)
    a.alloc(3, dp_rank=1)
    mapping_of(a, 1)[3] = 1
    assert kinds(a) == ["1:swa:mapping_duplicate_target", "1:swa:swa_unmapped"]
    violation = next(v for v in a.check() if v.kind == "mapping_duplicate_target")
    assert violation.slots == (1,) and "D05" in str(violation)


@pytest.mark.parametrize(
    "full,swa,expected",
    [
        (4, 0, ["mapping_gap"]),
        (8, 0, ["mapping_gap"]),
        (7, 0, []),  # a short page looks like that
        (5, 9, ["mapping_duplicate_target", "mapping_page_shared"]),
        (5, 6, ["mapping_duplicate_target", "mapping_offset"]),
        (16, 16, ["mapping_source_free", "mapping_target_free"]),
        (0, 4, ["mapping_out_of_range"]),
        (7, 999, ["mapping_out_of_range"]),
        (7, 2, ["mapping_out_of_range"]),
        (12, 12, ["mapping_target_free"]),
    ],
)
def test_check_names_damage_to_the_mapping(full, swa, expected):
    a = dual(4, 5, 5)
    a.alloc(8)
    a.full_attn_allocator.alloc(4)
    mapping_of(a)[full] = swa
    assert kinds(a) == [f"0:swa:{kind}" for kind in expected]


def test_check_names_leaks_and_surpluses_alike():
    """D08: a page listed twice is as much a violation as one listed nowhere."""
    a = dual(4, 4, 4, dp=2)
    full = a.full_attn_allocator
    full._pools[1]._released.append(ids(2))
    assert kinds(a) == ["1:full:free_list_duplicate"]
    full._pools[1]._released.size = 0
    full._pools[1].take(1)
    full._pools[1].state[1] = 0
    assert kinds(a) == ["1:full:free_list_deficit"]
    full._pools[1].state[1:3] = 1
    assert kinds(a) == ["1:full:free_list_surplus"]
    assert next(v for v in a.check()).slots == (2,)


def test_check_names_pending_slots_outside_a_group_and_a_lost_reservation():
    a = dual(1, 4, 4)
    slots = a.alloc(2)
    a.free_group_begin()
    a.free(slots)
    a.full_attn_allocator.is_not_in_free_group = True
    assert kinds(a) == ["0:full:pending_outside_group"]
    a.free_group_end()
    a.swa_attn_allocator._pools[0].state[0] = 1
    assert "0:swa:reserved_unit" in kinds(a)


def test_check_names_an_swa_slot_nobody_maps_to():
    """A leak of the SWA pool that no counter shows."""
    a = dual(4, 4, 4)
    a.swa_attn_allocator.alloc(4)
    assert kinds(a) == ["0:swa:swa_unmapped"]
    assert a.check()[0].slots == (1,)
