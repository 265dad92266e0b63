"""Page size > 1: pages are handed out, tokens of one page are consecutive slots."""

from __future__ import annotations

from typing import Any

import numpy as np

from sgl_jax.srt.mem_cache.allocator.base import IntVector
from sgl_jax.srt.mem_cache.allocator.extend import ExtendPlan, extend_slots, page_slots, plan_extend
from sgl_jax.srt.mem_cache.allocator.rank_pool import (
    ALLOCATED,
    FREE,
    PENDING,
    BoolArray,
    IntArray,
    Mark,
    as_indices,
    empty_ids,
)
from sgl_jax.srt.mem_cache.allocator.single import SinglePoolAllocator
from sgl_jax.srt.mem_cache.errors import OwnershipError, Violation


class PagedTokenToKVPoolAllocator(SinglePoolAllocator):
    """Pages ``1..pages_per_rank`` per rank; slot = ``page * page_size + offset``.

    Tokens of a page are allocated in order, so one count per page says which are: offsets ``[0, filled)``. ``alloc``,
    ``alloc_extend`` and ``alloc_decode`` keep it; the dual allocator asks it whether a free names a whole page.
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
        self.num_pages = size // page_size
        self.pages_per_rank = self.num_pages // dp_size
        super().__init__(size, page_size, kvcache, dp_size, units_per_rank=self.pages_per_rank, strict=strict)
        self.debug_mode = debug_mode
        self._filled = [np.zeros((self.pages_per_rank + 1,), np.int32) for _ in range(dp_size)]

    def alloc(self, need_size: int, dp_rank: int | None = None) -> IntArray | None:
        """Whole pages. Raises AssertionError when ``need_size`` is not a page multiple."""
        rank = self.rank_of(dp_rank)
        if need_size < 0 or need_size % self.page_size:
            raise AssertionError(f"need_size={need_size} must be a multiple of page_size={self.page_size}")
        pages = self._pools[rank].take(need_size // self.page_size)
        if pages is None:
            return None
        self._filled[rank][pages] = self.page_size
        return page_slots(pages, self.page_size)

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
        O(1) numpy calls however many sequences and pages.
        """
        plan = plan_extend(prefix_lens, seq_lens, last_loc, extend_num_tokens, self.page_size)
        return self.extend_planned(plan, self.rank_of(dp_rank))

    def extend_planned(self, plan: ExtendPlan, rank: int) -> IntArray | None:
        """:meth:`alloc_extend` for a plan made by the caller (the dual allocator plans once for both pools)."""
        self._check_last_loc(plan.last_loc, plan.prefix, plan.continues(), rank)
        pages = self._pools[rank].take(plan.new_pages)
        if pages is None:
            return None
        filled = self._filled[rank]
        filled[pages] = self.page_size
        if plan.seq.size == 1:
            tail = int(plan.seq[0]) % self.page_size
            if pages.size and tail:
                filled[pages[-1]] = tail
        elif pages.size:
            grew = plan.pages > 0
            last = pages[np.cumsum(plan.pages[grew]) - 1]
            filled[last] -= -plan.seq[grew] % self.page_size
        self._set_fill(rank, plan.last_loc + plan.fill, plan)
        return extend_slots(plan, pages)

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
        out = last + 1
        if pages.size:
            out[crosses] = pages * self.page_size
        touched = out // self.page_size
        self._filled[rank][touched] = out - touched * self.page_size + 1
        return out if out.size else empty_ids()

    def reset_rank(self, rank: int) -> None:
        super().reset_rank(rank)
        self._filled[rank].fill(0)

    def restore_state(self, state: tuple[list[IntArray], list[IntArray]]) -> None:
        super().restore_state(state)
        for pool, filled in zip(self._pools, self._filled, strict=True):
            filled[(pool.state == ALLOCATED) & (filled == 0)] = self.page_size

    # -- unit level ----------------------------------------------------------------------------------------------

    def filled(self, rank: int) -> IntArray:
        """``int32[pages + 1]``: allocated tokens of every page (stale for pages that are not allocated). A view."""
        return self._filled[rank]

    def unextend(self, rank: int, mark: Mark, plan: ExtendPlan) -> None:
        """Undo the extend of ``plan`` made since ``mark``: new pages and the fill of the half-filled ones (rule 5)."""
        self.rewind(rank, mark)
        self._set_fill(rank, plan.last_loc, plan)

    def undecode(self, rank: int, mark: Mark, seq_lens: IntArray, last_loc: IntArray) -> None:
        """Undo an ``alloc_decode`` made since ``mark``."""
        self.rewind(rank, mark)
        kept = last_loc[(seq_lens - 1) % self.page_size != 0]
        self._filled[rank][kept // self.page_size] = kept % self.page_size + 1

    def _set_fill(self, rank: int, last_filled: IntArray, plan: ExtendPlan) -> None:
        """Record that the half-filled pages of ``plan`` end at slot ``last_filled`` (per sequence)."""
        if plan.seq.size == 1:
            if plan.fill[0]:
                page, offset = divmod(int(last_filled[0]), self.page_size)
                self._filled[rank][page] = offset + 1
            return
        last = last_filled[plan.continues()]
        self._filled[rank][last // self.page_size] = last % self.page_size + 1

    def _check_last_loc(
        self, last_loc: IntArray, next_position: IntArray, continues: BoolArray, rank: int
    ) -> None:
        """A continued page must be allocated and filled exactly up to ``last_loc``, the slot before ``next_position``."""
        if not (self.strict or self.debug_mode):
            return
        page, offset = np.divmod(last_loc, self.page_size)
        bad = continues & ((offset + 1 - next_position) % self.page_size != 0)
        self._refuse_last_loc(bad, last_loc, rank, "is not the slot before the next token")
        if self.strict:
            known = np.where((page > 0) & (page <= self.pages_per_rank), page, 0)
            last = self.units_allocated(known, rank) & (self._filled[rank][known] == offset + 1)
            self._refuse_last_loc(
                continues & ~last, last_loc, rank, "is not the last allocated slot of its page"
            )

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

    def check(self) -> list[Violation]:
        found = super().check()
        for rank, (pool, filled) in enumerate(zip(self._pools, self._filled, strict=True)):
            held = (pool.state != FREE) & (pool.state != PENDING)
            held[0] = False
            bad = np.flatnonzero(held & ((filled < 1) | (filled > self.page_size)))
            if bad.size:
                detail = f"{bad.size} allocated pages hold no token or more than {self.page_size}"
                found.append(self._violation("fill_count", rank, detail, bad))
        return found
