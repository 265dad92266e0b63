"""Page size > 1: pages are handed out, tokens of one page are consecutive slots."""

from __future__ import annotations

from typing import Any

import numpy as np

from sgl_jax.srt.mem_cache.allocator.base import IntVector
from sgl_jax.srt.mem_cache.allocator.extend import extend_slots, fill_len, page_slots, plan_extend, run_slots
from sgl_jax.srt.mem_cache.allocator.rank_pool import BoolArray, IntArray, as_indices
from sgl_jax.srt.mem_cache.allocator.single import SinglePoolAllocator
from sgl_jax.srt.mem_cache.errors import OwnershipError
from sgl_jax.srt.mem_cache.page import new_pages


class PagedTokenToKVPoolAllocator(SinglePoolAllocator):
    """Pages ``1..pages_per_rank`` per rank; slot = ``page * page_size + offset``.

    Tokens of a page are handed out in order, offset 0 first. Any token names its whole page in ``free``. ``debug_mode``
    raises AssertionError for a ``last_loc`` that does not fit its length, ``strict`` an OwnershipError.
    """

    def __init__(
        self,
        size: int,
        page_size: int,
        kvcache: Any,
        debug_mode: bool = False,
        dp_size: int = 1,
        dcp_size: int = 1,
        strict: bool = False,
    ) -> None:
        if dcp_size != 1:
            raise ValueError(
                f"dcp_size={dcp_size}: decode context parallelism is not supported; use dcp_size=1"
            )
        super().__init__(size, page_size, kvcache, dp_size, strict)
        self.num_pages = size // page_size
        self.pages_per_rank = self.units_per_rank
        self.debug_mode = debug_mode

    def alloc(self, need_size: int, dp_rank: int | None = None) -> IntArray | None:
        """Whole pages. Raises AssertionError when ``need_size`` is not a page multiple."""
        rank = self.rank_of(dp_rank)
        if need_size < 0 or need_size % self.page_size:
            raise AssertionError(f"need_size={need_size} must be a multiple of page_size={self.page_size}")
        pages = self._pools[rank].take(need_size // self.page_size)
        return None if pages is None else page_slots(pages, self.page_size)

    def alloc_extend(
        self,
        prefix_lens: IntVector,
        seq_lens: IntVector,
        last_loc: IntVector,
        extend_num_tokens: int,
        dp_rank: int | None = None,
    ) -> IntArray | None:
        """Slots for ``prefix_lens[i] .. seq_lens[i]`` of every sequence, in order; all or nothing.

        ``last_loc[i]`` is the slot of token ``prefix_lens[i] - 1`` (ignored when the prefix ends on a page boundary).
        O(1) numpy calls however many sequences and pages. Raises ValueError for lengths that do not fit together.
        """
        rank = self.rank_of(dp_rank)
        if len(seq_lens) == len(prefix_lens) == len(last_loc) == 1:
            start, end = int(prefix_lens[0]), int(seq_lens[0])
            if 0 <= start <= end and end - start == extend_num_tokens:
                return self._extend_one(start, end, int(last_loc[0]), rank)
        plan = plan_extend(prefix_lens, seq_lens, last_loc, extend_num_tokens, self.page_size)
        self._check_last_loc(plan.last_loc, plan.prefix, plan.continues(), rank)
        pages = self._pools[rank].take(plan.new_pages)
        return None if pages is None else extend_slots(plan, pages)

    def _extend_one(self, start: int, end: int, last: int, rank: int) -> IntArray | None:
        fill = fill_len(start, end, self.page_size)
        if fill and (self.strict or self.debug_mode):
            self._check_last_loc(np.array([last]), np.array([start]), np.array([True]), rank)
        pages = self._pools[rank].take(new_pages(start, end, self.page_size))
        return None if pages is None else run_slots(last, fill, pages, end - start, self.page_size)

    def alloc_decode(
        self, seq_lens: IntVector, last_loc: IntVector, dp_rank: int | None = None
    ) -> IntArray | None:
        """One slot per sequence, token ``seq_lens[i] - 1``; a new page only where that starts one (D45)."""
        rank = self.rank_of(dp_rank)
        seq, last = as_indices(seq_lens), as_indices(last_loc)
        if seq.size != last.size:
            raise ValueError(f"seq_lens and last_loc differ in length: {seq.size} and {last.size}")
        crosses = (seq - 1) % self.page_size == 0
        self._check_last_loc(last, seq - 1, ~crosses, rank)
        pages = self._pools[rank].take(int(np.count_nonzero(crosses)))
        if pages is None:
            return None
        out: IntArray = last + np.int32(1)
        if pages.size:
            out[crosses] = pages * self.page_size
        return out

    def _check_last_loc(
        self, last_loc: IntArray, next_position: IntArray, continues: BoolArray, rank: int
    ) -> None:
        """Strict: a continued page is allocated, belongs to one sequence, and ``last_loc`` precedes the next position."""
        if not (self.strict or self.debug_mode):
            return
        page, offset = np.divmod(last_loc, self.page_size)
        bad = continues & ((offset + 1 - next_position) % self.page_size != 0)
        self._refuse_last_loc(bad, last_loc, rank, "is not the slot before the next token")
        if not self.strict:
            return
        known = np.where((page > 0) & (page <= self.pages_per_rank), page, 0)
        owned = self.units_allocated(known, rank)
        self._refuse_last_loc(continues & ~owned, last_loc, rank, "is in a page that nobody owns")
        ordered = np.sort(page[continues])
        shared = continues & np.isin(page, ordered[1:][ordered[1:] == ordered[:-1]])
        self._refuse_last_loc(shared, last_loc, rank, "is in a page that two sequences continue")

    def _refuse_last_loc(self, bad: BoolArray, last_loc: IntArray, rank: int, why: str) -> None:
        if not bad.any():
            return
        slots = last_loc[bad][:16].tolist()
        text = f"dp_rank={rank} pool={self.pool_name}: last_loc {slots} {why} (page_size={self.page_size})"
        raise AssertionError(text) if self.debug_mode else OwnershipError(text)

    def _units(self, indices: IntArray) -> IntArray:
        pages = indices // self.page_size
        keep = np.empty((pages.size,), np.bool_)
        keep[0] = True
        np.not_equal(pages[1:], pages[:-1], out=keep[1:])
        return pages[keep]
