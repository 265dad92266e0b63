"""PagedTokenToKVPoolAllocator: pages, extends and decodes with literal slots."""

from __future__ import annotations

import numpy as np
import pytest

from sgl_jax.srt.mem_cache.allocator import PagedTokenToKVPoolAllocator
from sgl_jax.srt.mem_cache.errors import DoubleFreeError, OwnershipError
from sgl_jax.test.mem_cache.allocator.build import ids, span


def paged(pages: int = 8, page: int = 4, **kwargs) -> PagedTokenToKVPoolAllocator:
    return PagedTokenToKVPoolAllocator(pages * page * kwargs.get("dp_size", 1), page, None, **kwargs)


def test_alloc_returns_whole_pages_from_page_one():
    a = paged()
    got = a.alloc(8)
    assert got.dtype == np.int32 and got.tolist() == [4, 5, 6, 7, 8, 9, 10, 11]
    assert a.available_size() == 24 and a.alloc(28) is None and a.alloc(0).dtype == np.int32
    for bad in (3, -4):
        with pytest.raises(AssertionError, match="multiple of page_size=4"):
            a.alloc(bad)


def test_pages_per_rank_is_floored():
    a = PagedTokenToKVPoolAllocator(64 * 4, 4, None, dp_size=3)
    assert (a.num_pages, a.pages_per_rank) == (64, 21)
    assert [len(p) for p in a.free_pages] == [21, 21, 21]
    assert [a.available_size(r) for r in range(3)] == [84, 84, 84] and a.capacity(2) == 84


def test_freed_pages_sit_in_release_pages_until_the_merge():
    a = paged(4)
    slots = a.alloc(16)
    a.free(slots[8:12])
    a.free(slots[:4])
    assert a.free_pages[0].tolist() == [] and a.release_pages[0].tolist() == [3, 1]
    assert a.available_size() == 8
    a.merge_and_sort_free(dp_rank=0)
    assert a.free_pages[0].tolist() == [1, 3] and a.release_pages[0].tolist() == []
    assert np.concatenate([a.free_pages[0], a.release_pages[0]]).dtype == np.int32


def test_free_reduces_to_unique_pages_and_is_idempotent():
    """DECISIONS 1: the sub-allocators keep "any token names its page"."""
    a = paged(3)
    a.alloc(12)
    a.free(ids(5, 13, 6, 12))
    a.free(ids(4))
    a.free(span(100, 140))
    assert a.available_size() == 8 and sorted(a.release_pages[0].tolist()) == [1, 3] and a.check() == []


def test_strict_free_raises_for_a_free_page():
    a = paged(3, strict=True)
    a.alloc(4)
    with pytest.raises(DoubleFreeError, match=r"pages \[2\] are already free"):
        a.free(ids(4, 8))


def test_a_group_queues_one_entry_per_call_and_frees_at_the_end():
    a = paged(4)
    slots = a.alloc(16)
    a.free_group_begin()
    assert a.free_group == [[]] and isinstance(a.free_group, list)
    for part in (slots[:4], slots[4:8], slots[4:8]):
        a.free(part)
    assert len(a.free_group[0]) == 3 and a.available_size() == 0
    a.free_group_end()
    assert a.free_group == [[]] and a.available_size() == 8 and a.check() == []


EXTENDS = [
    # prefix, seq, last_loc -> slots (fresh allocator after one alloc(4): page 1 is taken)
    ([0], [4], [-1], [8, 9, 10, 11]),
    ([0], [1], [-1], [8]),
    ([0], [9], [-1], [8, 9, 10, 11, 12, 13, 14, 15, 16]),
    ([2], [3], [5], [6]),
    ([2], [4], [5], [6, 7]),
    ([2], [7], [5], [6, 7, 8, 9, 10]),
    ([4], [6], [7], [8, 9]),
    ([4], [4], [7], []),
    ([2, 0], [5, 2], [5, -1], [6, 7, 8, 12, 13]),
    ([0, 0, 3], [4, 5, 4], [-1, -1, 6], [8, 9, 10, 11, 12, 13, 14, 15, 16, 7]),
    ([4, 2], [4, 3], [7, 5], [6]),
    ([0, 4, 0], [0, 4, 3], [-1, 7, -1], [8, 9, 10]),
]


@pytest.mark.parametrize("prefix,seq,last,expected", EXTENDS)
@pytest.mark.parametrize("kind", [list, lambda v: np.array(v, np.int32), lambda v: np.array(v, np.int64)])
def test_extend_fills_the_page_then_takes_new_ones(prefix, seq, last, expected, kind):
    a = paged()
    a.alloc(4)
    total = sum(seq) - sum(prefix)
    out = a.alloc_extend(kind(prefix), kind(seq), kind(last), total)
    assert out.dtype == np.int32 and out.tolist() == expected and a.check() == []


def naive_extend(
    prefix: list[int], seq: list[int], last: list[int], page: int, pages: list[int]
) -> list[int]:
    out = []
    pages = list(pages)
    for start, end, slot in zip(prefix, seq, last, strict=True):
        for position in range(start, end):
            slot = pages.pop(0) * page if position % page == 0 else slot + 1
            out.append(slot)
    return out


@pytest.mark.parametrize("page", [2, 4, 128])
@pytest.mark.parametrize("seqs", [1, 2, 7])
def test_extend_equals_the_token_by_token_model(page, seqs):
    rng = np.random.default_rng(page * 10 + seqs)
    for _ in range(25):
        a = paged(200, page, strict=True)
        prefix = [int(n) for n in rng.integers(0, 3 * page, seqs)]
        rows = [a.alloc(-(-n // page) * page) for n in prefix]
        last = [int(row[n - 1]) if n else -1 for row, n in zip(rows, prefix, strict=True)]
        seq = [n + int(rng.integers(0, 3 * page)) for n in prefix]
        expected = naive_extend(prefix, seq, last, page, a.free_pages[0].tolist())
        out = a.alloc_extend(prefix, seq, last, sum(seq) - sum(prefix))
        assert out.tolist() == expected
        assert a.check() == []


def test_extend_short_of_pages_changes_nothing():
    a = paged(3)
    a.alloc(8)
    before = a.free_pages[0].tolist(), a.release_pages[0].tolist()
    assert a.alloc_extend([2], [9], [5], 7) is None
    assert (a.free_pages[0].tolist(), a.release_pages[0].tolist()) == before
    assert a.alloc_extend([2], [8], [5], 6).tolist() == [6, 7, 12, 13, 14, 15]


@pytest.mark.parametrize(
    "args,text",
    [
        (([0], [4], [-1], 5), "extend_num_tokens=5.*sums to 4"),
        (([4], [3], [7], -1), "must not be smaller"),
        (([0, 0], [4], [-1], 4), "one entry per sequence, got 2, 1, 1"),
        (([0, 0], [4, 4], [-1], 8), "one entry per sequence, got 2, 2, 1"),
    ],
)
def test_extend_refuses_lengths_that_do_not_fit(args, text):
    with pytest.raises(ValueError, match=text):
        paged().alloc_extend(*args)


def test_decode_takes_a_page_only_at_a_boundary():
    """D45: the demand is the number of requests that cross a boundary, in pages."""
    a = paged(4)
    first = a.alloc_extend([0, 0], [4, 2], [-1, -1], 6)
    assert first.tolist() == [4, 5, 6, 7, 8, 9]
    out = a.alloc_decode([5, 3], [7, 9])
    assert out.dtype == np.int32 and out.tolist() == [12, 10]
    assert a.alloc_decode(np.array([6, 4], np.int32), np.array([12, 10], np.int32)).tolist() == [13, 11]
    assert a.available_size() == 4
    assert a.alloc_decode([], []).dtype == np.int32


def test_decode_is_all_or_nothing_when_pages_run_out():
    """D45: P=32, three requests at a boundary and two free pages, although 64 tokens look like plenty."""
    a = paged(5, 32)
    a.alloc(96)
    assert a.available_size() == 64
    assert a.alloc_decode([33, 33, 33], [63, 95, 127]) is None
    assert a.available_size() == 64 and a.check() == []
    assert a.alloc_decode([33, 33], [63, 95]).tolist() == [128, 160]
    with pytest.raises(ValueError, match="differ in length: 2 and 1"):
        a.alloc_decode([2, 2], [32])


def test_extend_and_decode_are_rank_local():
    """D49: the same local slots on both ranks."""
    a = paged(4, dp_size=2)
    for rank in (0, 1):
        assert a.alloc_extend([0], [5], [-1], 5, dp_rank=rank).tolist() == [4, 5, 6, 7, 8]
    assert a.alloc_decode([6], [8], dp_rank=1).tolist() == [9]
    assert [a.available_size(r) for r in (0, 1)] == [8, 8]


@pytest.mark.parametrize("mode,error", [("debug_mode", AssertionError), ("strict", OwnershipError)])
def test_a_last_loc_that_does_not_fit_its_length_is_refused(mode, error):
    a = paged(4, **{mode: True})
    a.alloc(8)
    with pytest.raises(error, match=r"last_loc \[6\] is not the slot before"):
        a.alloc_extend([2], [4], [6], 2)
    with pytest.raises(error, match=r"last_loc \[6\]"):
        a.alloc_extend([2, 4], [4, 8], [6, 11], 6)
    with pytest.raises(error, match=r"last_loc \[4\]"):
        a.alloc_decode([3], [4])
    assert a.available_size() == 8
    assert a.alloc_extend([4], [5], [123], 1).tolist() == [12]  # not continued: never read


def test_strict_refuses_pages_nobody_owns_and_shared_pages():
    a = paged(4, strict=True)
    a.alloc(8)
    with pytest.raises(OwnershipError, match=r"last_loc \[13\] is in a page that nobody owns"):
        a.alloc_extend([2], [4], [13], 2)
    with pytest.raises(OwnershipError, match=r"last_loc \[401\] is in a page that nobody owns"):
        a.alloc_decode([3], [401])
    with pytest.raises(OwnershipError, match=r"last_loc \[5, 6\] is in a page that two sequences continue"):
        a.alloc_decode([3, 4], [5, 6])


def test_backup_restore_and_masks():
    a = paged(4)
    a.alloc(8)
    a.free(ids(4))
    state = a.backup_state()
    a.alloc(12)
    a.restore_state(state)
    assert a.free_mask(0).tolist() == [False, True, False, True, True]
    assert a.allocated_mask(0).tolist() == [False, False, True, False, False]
    assert not a.pending_mask(0).any() and a.check() == []
    a.free_group_begin()
    a.free(ids(8))
    assert a.pending_mask(0).tolist() == [False, False, True, False, False]


def test_context_parallel_decode_is_refused_by_name():
    with pytest.raises(ValueError, match="dcp_size=2"):
        PagedTokenToKVPoolAllocator(16, 4, None, dcp_size=2)
