"""SWATokenToKVPoolAllocator: construction, allocation, rollback, continued pages."""

from __future__ import annotations

import numpy as np
import pytest

from sgl_jax.srt.mem_cache.allocator import (
    PagedTokenToKVPoolAllocator,
    SWATokenToKVPoolAllocator,
    TokenToKVPoolAllocator,
)
from sgl_jax.srt.mem_cache.errors import OwnershipError, UnmappedSlotError
from sgl_jax.srt.mem_cache.memory_pool.swa import SWAKVPool
from sgl_jax.test.mem_cache.allocator.build import dual, ids, image, mapping_of, matrix, sizes, span


def test_it_wants_a_hybrid_pool():
    with pytest.raises(AssertionError, match="SWAKVPool, got object"):
        SWATokenToKVPoolAllocator(8, 8, object())


@pytest.mark.parametrize("page,kind", [(1, TokenToKVPoolAllocator), (4, PagedTokenToKVPoolAllocator)])
def test_sub_allocators_sizes_and_mapping(page, kind):
    a = dual(page, 6, 5)
    assert type(a.full_attn_allocator) is type(a.swa_attn_allocator) is kind
    assert (a.size_full, a.size_swa, a.size, a.page_size) == (6 * page, 5 * page, 6 * page, page)
    assert (a.full_attn_allocator.size, a.swa_attn_allocator.size_per_rank) == (6 * page, 5 * page)
    assert a.full_to_swa_index_mapping.dtype == np.int32
    assert a.full_to_swa_index_mapping.shape == (6 * page + page,)
    assert a.get_kvcache().full_to_swa_index_mapping is a.full_to_swa_index_mapping
    assert a.available_size() == 5 * page


def test_the_mapping_is_a_list_per_rank_above_dp_one():
    a = dual(4, 6, 5, dp=2)
    mapping = a.full_to_swa_index_mapping
    assert isinstance(mapping, list) and [m.shape for m in mapping] == [(28,), (28,)]
    assert a.get_kvcache().full_to_swa_index_mapping is mapping
    a.alloc(8, dp_rank=1)
    assert not mapping[0].any() and mapping[1][4:12].tolist() == [4, 5, 6, 7, 8, 9, 10, 11]


def test_every_size_query_exists_for_the_dual_pool():
    """D07: no size method is inherited as "not implemented"."""
    a = dual(4, 6, 5, dp=2)
    assert a.full_attn_allocator.capacity(1) == 24 and a.swa_attn_allocator.capacity(1) == 20
    assert [f(1) for f in (a.available_size, a.full_available_size, a.swa_available_size)] == [20, 24, 20]
    assert [len(x) for x in (a.free_pages, a.release_pages, a.free_group)] == [2, 2, 2]
    assert "full 24 swa 20" in a.debug_print()
    a.merge_and_sort_free(1)
    assert a.count_swa_mapped(span(4, 8), 1) == 0
    for call in (a.backup_state, lambda: a.restore_state(([], []))):
        with pytest.raises(NotImplementedError):
            call()


@matrix
def test_alloc_pairs_slots_of_both_pools(page, dp):
    a = dual(page, 6, 4, dp)
    rank = dp - 1
    a.swa_attn_allocator.alloc(page, dp_rank=rank)  # so that the pairs differ
    got = a.alloc(2 * page, dp_rank=rank)
    assert got.tolist() == list(range(page, 3 * page))
    assert a.translate_full_to_swa(got, dp_rank=rank).tolist() == list(range(2 * page, 4 * page))
    assert a.count_swa_mapped(got, rank) == 2 * page
    assert sizes(a, rank) == (4 * page, page)
    if dp == 2:
        assert sizes(a, 0) == (6 * page, 4 * page) and not mapping_of(a, 0).any()


@matrix
@pytest.mark.parametrize("short", ["full", "swa"])
def test_alloc_is_all_or_nothing(page, dp, short):
    """D04 (a): whichever pool is short, both pools and the mapping are as before."""
    a = dual(page, 3, 5, dp) if short == "full" else dual(page, 5, 3, dp)
    rank = dp - 1
    held = a.alloc(2 * page, dp_rank=rank)
    a.free(held[:page], dp_rank=rank)
    before = image(a)
    assert a.alloc(3 * page, dp_rank=rank) is None
    assert image(a) == before and a.check() == []


@pytest.mark.parametrize("page", [1, 4])
def test_a_failing_swa_alloc_leaves_no_trace(page):
    """D04: forced failure after FULL had its slots, with a merge of the FULL window on the way."""
    a = dual(page, 4, 4)
    held = a.alloc(4 * page)
    a.free(held[: 2 * page])
    before = image(a)
    real, a.swa_attn_allocator.alloc = a.swa_attn_allocator.alloc, lambda need_size, dp_rank=0: None
    assert a.alloc(page) is None and image(a) == before
    a.swa_attn_allocator.alloc = lambda *args, **kwargs: 1 // 0
    with pytest.raises(ZeroDivisionError):
        a.alloc(page)
    assert image(a) == before
    a.swa_attn_allocator.alloc = real
    assert a.alloc(page).tolist() == list(range(page, 2 * page)) and a.check() == []


@pytest.mark.parametrize("lens", [[6], [6, 3]])
def test_extend_continues_both_half_filled_pages(lens):
    a = dual(4, 8, 8)
    a.swa_attn_allocator.alloc(4)
    first = a.alloc_extend([0] * len(lens), lens, [-1] * len(lens), sum(lens))
    assert first[:6].tolist() == [4, 5, 6, 7, 8, 9]
    assert a.translate_full_to_swa(first[:6], dp_rank=0).tolist() == [8, 9, 10, 11, 12, 13]
    grown = [n + 3 for n in lens]
    last = [9, 14][: len(lens)]
    out = a.alloc_extend(lens, grown, last, 3 * len(lens))
    expected = {1: [10, 11, 12], 2: [10, 11, 16, 15, 20, 21]}[len(lens)]
    assert out.tolist() == expected
    assert (a.translate_full_to_swa(out, dp_rank=0) - out == 4).all()
    assert a.count_swa_mapped(np.concatenate([first, out])) == np.count_nonzero(mapping_of(a)) == sum(grown)
    assert [v.slots for v in a.check()] == [(1,)]  # only the page the test itself took


def test_decode_pairs_the_new_slot_and_the_new_page():
    a = dual(4, 8, 8)
    a.swa_attn_allocator.alloc(8)
    a.alloc_extend([0, 0], [4, 2], [-1, -1], 6)
    out = a.alloc_decode([5, 3], [7, 9])
    assert out.tolist() == [12, 10]
    assert a.translate_full_to_swa(out, dp_rank=0).tolist() == [20, 18]
    assert mapping_of(a)[12:16].tolist() == [20, 0, 0, 0]
    assert [v.slots for v in a.check()] == [(1, 2)]  # only the pages the test itself took


@pytest.mark.parametrize("lens", [[6], [6, 3]])
def test_extend_and_decode_write_the_mapping_of_their_rank_only(lens):
    """D49."""
    a = dual(4, 8, 8, dp=2)
    out = a.alloc_extend([0] * len(lens), lens, [-1] * len(lens), sum(lens), dp_rank=1)
    last = out[np.cumsum(lens) - 1]
    out = np.concatenate([out, a.alloc_decode([n + 1 for n in lens], last, dp_rank=1)])
    assert not mapping_of(a, 0).any() and a.count_swa_mapped(out, 1) == sum(lens) + len(lens)
    assert sizes(a, 0) == (32, 32) and a.check() == []


@pytest.mark.parametrize("op", ["extend_one", "extend_many", "decode"])
@pytest.mark.parametrize("dp", [1, 2])
def test_rollback_returns_new_pages_and_keeps_the_live_half_filled_page(op, dp):
    """Fault 2, rule 5: a failed extend or decode gives back exactly what it took."""
    a = dual(4, 8, 3, dp)
    rank = dp - 1
    assert a.alloc_extend([0, 0], [6, 2], [-1, -1], 8, dp_rank=rank).tolist() == [4, 5, 6, 7, 8, 9, 12, 13]
    before = image(a)
    if op == "extend_one":
        assert a.alloc_extend([6], [9], [9], 3, dp_rank=rank) is None
    elif op == "extend_many":
        assert a.alloc_extend([6, 2], [7, 5], [9, 13], 4, dp_rank=rank) is None
    else:
        assert a.alloc_decode([7, 5], [9, 15], dp_rank=rank) is None
    assert image(a) == before and a.check() == []
    assert a.alloc_decode([7, 3], [9, 13], dp_rank=rank).tolist() == [10, 14]
    a.free(ids(4, 5, 6, 7, 8, 9, 10, 12, 13, 14), dp_rank=rank)
    assert sizes(a, rank) == (32, 12) and not mapping_of(a, rank).any()


@pytest.mark.parametrize("method", ["alloc_extend", "alloc_decode"])
def test_rollback_when_the_swa_call_raises(method):
    a = dual(4, 8, 8)
    a.alloc_extend([0], [6], [-1], 6)
    before = image(a)
    setattr(a.swa_attn_allocator, method, lambda *args, **kwargs: 1 // 0)
    with pytest.raises(ZeroDivisionError):
        if method == "alloc_extend":
            a.alloc_extend([6], [12], [9], 6)
        else:
            a.alloc_decode([9], [11])
    assert image(a) == before


def test_continuing_a_page_whose_swa_half_is_gone_is_refused():
    """Fault 8, rule 7: it would write inside reserved page 0."""
    a = dual(4, 8, 8)
    slots = a.alloc_extend([0], [6], [-1], 6)
    a.free_swa(slots)
    before = image(a)
    for call in (
        lambda: a.alloc_extend([6], [7], [9], 1),
        lambda: a.alloc_extend([6, 0], [7, 1], [9, -1], 2),
        lambda: a.alloc_decode([7], [9]),
    ):
        with pytest.raises(UnmappedSlotError, match=r"dp_rank=0 pool=swa.*\[9\]"):
            call()
    assert image(a) == before and not (a.swa_attn_allocator.allocated_mask(0)).any()


@pytest.mark.parametrize("last", [-1, 0, 9999])
def test_an_unmapped_last_loc_does_not_matter_on_a_page_boundary(last):
    a = dual(4, 8, 8)
    assert a.alloc_extend([0], [3], [last], 3).tolist() == [4, 5, 6]
    assert a.alloc_extend([0, 4], [2, 6], [last, last], 4).tolist() == [8, 9, 12, 13]
    assert a.alloc_decode([1], [last]).tolist() == [16]
    with pytest.raises(UnmappedSlotError):
        a.alloc_extend([2], [3], [last], 1)


def test_page_size_one_extends_and_decodes_by_alloc():
    a = dual(1, 8, 8)
    assert a.alloc_extend([0, 2], [2, 3], [-1, 5], 3).tolist() == [1, 2, 3]
    assert a.alloc_decode([3, 4], [2, 3]).tolist() == [4, 5]
    assert a.count_swa_mapped(span(1, 6)) == 5 and sizes(a) == (3, 3)
    with pytest.raises(ValueError, match="extend_num_tokens=9"):
        a.alloc_extend([0], [2], [-1], 9)


def test_the_last_page_fits_the_mapping():
    """D04 (b): the last slot of the last page is size + P - 1."""
    a = dual(4, 3, 3)
    a.alloc_extend([0], [11], [-1], 11)
    assert a.alloc_decode([12], [14]).tolist() == [15]
    assert mapping_of(a)[15] == 15 and mapping_of(a).size == 16


@pytest.mark.parametrize("how", ["free_full", "sub.free"])
@pytest.mark.parametrize("grow", ["alloc", "extend_one", "extend_many", "decode"])
def test_a_new_page_never_shows_a_mapping_of_an_earlier_life(how, grow):
    """D03: every allocation sets or clears the mapping of every slot of the pages it hands out."""
    a = dual(4, 1, 4, strict=False)
    slots = a.alloc(4)
    a.free_full(slots, dp_rank=0) if how == "free_full" else a.full_attn_allocator.free(slots, dp_rank=0)
    assert mapping_of(a)[4:8].tolist() == [4, 5, 6, 7]  # stale: the cascade's second half did not run
    out = {
        "alloc": lambda: a.alloc(4),
        "extend_one": lambda: a.alloc_extend([0], [2], [-1], 2),
        "extend_many": lambda: a.alloc_extend([0, 0], [2, 0], [-1, -1], 2),
        "decode": lambda: a.alloc_decode([5], [123]),
    }[grow]()
    expected = [8, 9, 10, 11][: len(out)] + [0] * (4 - len(out))
    assert mapping_of(a)[4:8].tolist() == expected
    assert [v.kind for v in a.check()] == ["swa_unmapped"]  # the leak is named


def test_strict_refuses_a_batch_that_continues_one_page_twice():
    a = dual(4, 8, 8)
    a.alloc_extend([0], [6], [-1], 6)
    before = image(a)
    with pytest.raises(OwnershipError, match="two sequences continue"):
        a.alloc_decode([7, 7], [9, 9])
    assert image(a) == before


def test_importing_and_using_the_dual_allocator_needs_no_jax():
    import subprocess
    import sys

    code = (
        "import sys\n"
        "from sgl_jax.srt.mem_cache.allocator import SWATokenToKVPoolAllocator\n"
        "from sgl_jax.srt.mem_cache.memory_pool.swa import SWAKVPool\n"
        "from sgl_jax.srt.mem_cache.memory_pool.req_to_token import ReqToTokenPool\n"
        "SWATokenToKVPoolAllocator(8, 8, SWAKVPool.host_only(8, 8)).alloc(3)\n"
        "ReqToTokenPool(2, 8)\n"
        "assert 'jax' not in sys.modules\n"
    )
    subprocess.run([sys.executable, "-c", code], check=True, timeout=300)


def test_the_kv_pool_class_is_what_is_asked_for():
    pool = SWAKVPool.host_only(8, 8)
    assert SWATokenToKVPoolAllocator(8, 8, pool).get_kvcache() is pool
