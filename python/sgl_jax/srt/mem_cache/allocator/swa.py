"""The dual pool of hybrid models: one FULL and one SWA allocator joined by a rank-local mapping (RFC-0035 section 2).

::

    call                      FULL slots     SWA slots       mapping
    alloc*                    new            new, paired     set for every slot handed out
    free                      surrendered    surrendered     cleared at once
    free_full                 surrendered    untouched       untouched (first half of a cascade)
    free_swa                  untouched      surrendered     cleared at once
    transfer_swa_mapping      source freed   change hands    moved from source to target

Surrendered means free, or pending-free inside a group. At page size > 1 a page moves as a whole: a call that names only
some of the tokens a page holds leaves that page alone (strict: PartialPageError and no change at all). Calls are judged
one by one, also inside a group: two calls that name half a page each release nothing (rule 6, D01, DECISIONS 1).
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, NamedTuple

import numpy as np
import numpy.typing as npt

from sgl_jax.srt.mem_cache.allocator.base import BaseTokenToKVPoolAllocator, IntVector
from sgl_jax.srt.mem_cache.allocator.extend import fill_len, plan_extend
from sgl_jax.srt.mem_cache.allocator.mapping import RankMapping
from sgl_jax.srt.mem_cache.allocator.named_pages import BoolArray, LiveTokens, named_pages, whole_pages
from sgl_jax.srt.mem_cache.allocator.paged import PagedTokenToKVPoolAllocator
from sgl_jax.srt.mem_cache.allocator.rank_pool import IntArray, as_indices, empty_ids
from sgl_jax.srt.mem_cache.allocator.token import TokenToKVPoolAllocator
from sgl_jax.srt.mem_cache.allocator.transfer import TransferView, check_transfer
from sgl_jax.srt.mem_cache.errors import (
    OwnershipError,
    PartialPageError,
    SlotRangeError,
    UnmappedSlotError,
    Violation,
)

if TYPE_CHECKING:
    from sgl_jax.srt.mem_cache.memory_pool.swa import SWAKVPool

SubAllocator = TokenToKVPoolAllocator | PagedTokenToKVPoolAllocator
_SHOWN = 16


class Cascade(NamedTuple):
    """The last ``free_full``, for the ``free_swa`` that follows: the read-only slots it was given and their whole pages."""

    rank: int
    slots: IntArray
    pages: IntArray


class SWATokenToKVPoolAllocator(BaseTokenToKVPoolAllocator):
    """Allocates FULL slots with an SWA slot each; callers hold FULL indices only.

    ``full_to_swa_index_mapping`` is one int32 array at ``dp_size == 1``, else a list of one per rank; it is shared with
    ``kvcache`` and written in place only.
    """

    full_attn_allocator: SubAllocator
    swa_attn_allocator: SubAllocator

    def __init__(
        self,
        size: int,
        size_swa: int,
        kvcache: SWAKVPool,
        page_size: int = 1,
        dp_size: int = 1,
        strict: bool = False,
    ) -> None:
        from sgl_jax.srt.mem_cache.memory_pool.swa import SWAKVPool

        if not isinstance(kvcache, SWAKVPool):
            raise AssertionError(f"kvcache must be a SWAKVPool, got {type(kvcache).__name__}")
        super().__init__(size, page_size, kvcache, dp_size)
        self._size_swa = size_swa
        if page_size == 1:
            self.full_attn_allocator = TokenToKVPoolAllocator(size, kvcache, dp_size)
            self.swa_attn_allocator = TokenToKVPoolAllocator(size_swa, kvcache, dp_size)
        else:
            self.full_attn_allocator = PagedTokenToKVPoolAllocator(size, page_size, kvcache, dp_size=dp_size)
            self.swa_attn_allocator = PagedTokenToKVPoolAllocator(
                size_swa, page_size, kvcache, dp_size=dp_size
            )
        self.swa_attn_allocator.set_pool_name("swa")
        self.strict = strict
        self.is_not_in_free_group = True
        self._maps = [RankMapping(self.size_per_rank, page_size, r) for r in range(dp_size)]
        arrays = [m.tokens for m in self._maps]
        self.full_to_swa_index_mapping: IntArray | list[IntArray] = arrays[0] if dp_size == 1 else arrays
        kvcache.full_to_swa_index_mapping = self.full_to_swa_index_mapping
        self._cascade: Cascade | None = None

    # -- sizes ---------------------------------------------------------------------------------------------------

    @property
    def strict(self) -> bool:
        """Raise named errors on double, partial and out-of-range frees, in both pools."""
        return self.full_attn_allocator.strict

    @strict.setter
    def strict(self, value: bool) -> None:
        self.full_attn_allocator.strict = value
        self.swa_attn_allocator.strict = value

    @property
    def size_full(self) -> int:
        return self.size

    @property
    def size_swa(self) -> int:
        return self._size_swa

    @property
    def free_pages(self) -> list[IntArray]:
        return self.full_attn_allocator.free_pages

    @property
    def release_pages(self) -> list[IntArray]:
        return self.full_attn_allocator.release_pages

    @property
    def free_group(self) -> list[list[IntArray]]:
        """The FULL pool's queue of the open group."""
        return self.full_attn_allocator.free_group

    def full_available_size(self, dp_rank: int | None = None) -> int:
        return self.full_attn_allocator.available_size(self.rank_of(dp_rank))

    def swa_available_size(self, dp_rank: int | None = None) -> int:
        return self.swa_attn_allocator.available_size(self.rank_of(dp_rank))

    def available_size(self, dp_rank: int | None = None) -> int:
        """Tokens both pools can give: the smaller of the two."""
        return min(self.full_available_size(dp_rank), self.swa_available_size(dp_rank))

    def debug_print(self) -> str:
        """One line with both availabilities of every rank."""
        sizes = ", ".join(
            f"dp={r}: full {self.full_available_size(r)} swa {self.swa_available_size(r)}"
            for r in range(self.dp_size)
        )
        return f"{type(self).__name__}(available tokens: {sizes}; in_group={not self.is_not_in_free_group})"

    def merge_and_sort_free(self, dp_rank: int | None = None) -> None:
        rank = self.rank_of(dp_rank)
        self.full_attn_allocator.merge_and_sort_free(rank)
        self.swa_attn_allocator.merge_and_sort_free(rank)

    # -- allocation ----------------------------------------------------------------------------------------------

    def alloc(self, need_size: int, dp_rank: int | None = None) -> IntArray | None:
        """All or nothing over both pools. On failure both pools and the mapping are byte for byte as before."""
        rank = self.rank_of(dp_rank)
        full_slots, swa_slots = self._both(
            rank, lambda pool, _: pool.alloc(need_size, dp_rank=rank), (empty_ids(), empty_ids())
        )
        if full_slots is None or swa_slots is None:
            return None
        self._maps[rank].write_run(full_slots, swa_slots, 0)
        return full_slots

    def alloc_extend(
        self,
        prefix_lens: IntVector,
        seq_lens: IntVector,
        last_loc: IntVector,
        extend_num_tokens: int,
        dp_rank: int | None = None,
    ) -> IntArray | None:
        """FULL slots of all new tokens, paired with SWA slots at the same offsets; None and no change when short.

        A half-filled page is continued in both pools. Raises UnmappedSlotError, before any change, when its SWA half
        is gone: continuing would write into reserved page 0 (rule 7). At page size 1 this is ``alloc``.
        """
        rank = self.rank_of(dp_rank)
        if len(seq_lens) == 1 and self.page_size > 1:
            return self._extend_one(prefix_lens, seq_lens, last_loc, extend_num_tokens, rank)
        plan = plan_extend(prefix_lens, seq_lens, last_loc, extend_num_tokens, self.page_size)
        if self.page_size == 1:
            return self.alloc(plan.total, rank)
        swa_last = self._swa_last_loc(plan.last_loc, plan.continues(), rank)
        full_slots, swa_slots = self._both(
            rank,
            lambda pool, last: pool.alloc_extend(plan.prefix, plan.seq, last, plan.total, dp_rank=rank),
            (plan.last_loc, swa_last),
        )
        if full_slots is None or swa_slots is None:
            return None
        mapping = self._maps[rank]
        if plan.new_pages:
            ends = np.cumsum(plan.seq - plan.prefix)[plan.pages > 0]
            mapping.wipe_pages(full_slots[ends - 1] // self.page_size)
        mapping.write(full_slots, swa_slots)
        return full_slots

    def _extend_one(
        self, prefix_lens: IntVector, seq_lens: IntVector, last_loc: IntVector, num_tokens: int, rank: int
    ) -> IntArray | None:
        """:meth:`alloc_extend` for one sequence: the mapping is written by pages, not by tokens."""
        fill = fill_len(int(prefix_lens[0]), int(seq_lens[0]), self.page_size)
        last = as_indices(last_loc)
        swa_last = self._swa_last_loc(last, np.array([fill > 0]), rank) if fill > 0 else last
        full_slots, swa_slots = self._both(
            rank,
            lambda pool, last_of: pool.alloc_extend(prefix_lens, seq_lens, last_of, num_tokens, dp_rank=rank),
            (last, swa_last),
        )
        if full_slots is None or swa_slots is None:
            return None
        self._maps[rank].write_run(full_slots, swa_slots, fill)
        return full_slots

    def alloc_decode(
        self, seq_lens: IntVector, last_loc: IntVector, dp_rank: int | None = None
    ) -> IntArray | None:
        """One FULL slot per sequence with its SWA slot; pages only where a sequence crosses one. As ``alloc_extend``."""
        rank = self.rank_of(dp_rank)
        seq, last = as_indices(seq_lens), as_indices(last_loc)
        if self.page_size == 1:
            return self.alloc(seq.size, rank)
        crosses = (seq - 1) % self.page_size == 0
        swa_last = self._swa_last_loc(last, ~crosses, rank)
        full_slots, swa_slots = self._both(
            rank, lambda pool, last_of: pool.alloc_decode(seq, last_of, dp_rank=rank), (last, swa_last)
        )
        if full_slots is None or swa_slots is None:
            return None
        mapping = self._maps[rank]
        fresh = full_slots[crosses]
        if fresh.size:
            mapping.wipe_pages(fresh // self.page_size)
        mapping.write(full_slots, swa_slots)
        return full_slots

    def _both(
        self,
        rank: int,
        take: Callable[[SubAllocator, IntArray], IntArray | None],
        last_locs: tuple[IntArray, IntArray],
    ) -> tuple[IntArray | None, IntArray | None]:
        """``take`` from FULL, then from SWA; when SWA is short or raises, FULL is as before, byte for byte (rule 5)."""
        self._cascade = None  # pages may get new owners
        full = self.full_attn_allocator
        mark = full.mark(rank)
        full_slots = take(full, last_locs[0])
        swa_slots = None
        if full_slots is not None:
            try:
                swa_slots = take(self.swa_attn_allocator, last_locs[1])
            finally:
                if swa_slots is None:
                    full.rewind(rank, mark)
        return full_slots, swa_slots

    def _swa_last_loc(self, last_loc: IntArray, continues: BoolArray, rank: int) -> IntArray:
        swa_last = self._maps[rank].read(last_loc)
        if np.count_nonzero(swa_last) == swa_last.size:
            return swa_last
        unmapped = continues & (swa_last == 0)
        if unmapped.any():
            raise UnmappedSlotError(
                f"dp_rank={rank} pool=swa: cannot continue the pages of FULL slots "
                f"{last_loc[unmapped][:_SHOWN].tolist()}: their SWA slots were reclaimed; the window of a running "
                f"request must stay mapped"
            )
        return swa_last

    # -- release -------------------------------------------------------------------------------------------------

    def free(self, free_index: npt.ArrayLike, dp_rank: int | None = None) -> None:
        """Surrender FULL slots and the SWA slots mapped to them. Idempotent; empty input is a no-op."""
        rank = self.rank_of(dp_rank)
        indices = self._usable(free_index, rank)
        if indices.size == 0:
            return
        units = self._named(indices, rank, "full+swa", self._live_either(rank))
        full_owned = self.full_attn_allocator.owned_units(units, rank)
        self._release_swa(units, rank, keep_full=False)
        self._release_full(full_owned, indices, rank)

    def free_full(self, full_indices: npt.ArrayLike, *, dp_rank: int | None = None) -> None:
        """Surrender FULL slots only; SWA slots and mapping stay for the ``free_swa`` that follows in a cascade.

        A read-only array of whole pages is looked at once: ``free_swa`` of the same array takes the pages found here.
        """
        rank = self.rank_of(dp_rank)
        self._cascade = cascade = self._read_once(full_indices, rank)
        if cascade is not None:
            self._release_full(cascade.pages, cascade.slots, rank)
            return
        indices = self._usable(full_indices, rank)
        if indices.size:
            units = self._named(indices, rank, "full", self._live_full(rank))
            self._release_full(self.full_attn_allocator.owned_units(units, rank), indices, rank)

    def free_swa(self, free_index: npt.ArrayLike, dp_rank: int | None = None) -> None:
        """Surrender the SWA slots mapped to FULL ``free_index``; unmapped ones are a no-op, so repeats are too.

        The physical slots are captured and the mapping cleared now, whatever the group does later (D02).
        """
        rank = self.rank_of(dp_rank)
        cascade, self._cascade = self._cascade, None
        if cascade is not None and cascade.slots is free_index and cascade.rank == rank:
            self._release_swa(cascade.pages, rank, keep_full=False)
            return
        indices = self._usable(free_index, rank)
        if indices.size:
            self._release_swa(self._named(indices, rank, "swa", self._live_swa(rank)), rank, keep_full=True)

    def transfer_swa_mapping(
        self, source_full: npt.ArrayLike, target_full: npt.ArrayLike, *, dp_rank: int | None = None
    ) -> None:
        """Move SWA ownership from source to target FULL slots, then surrender the source FULL slots (rule 1, D16).

        Offsets in the page are kept and pages move whole. Raises ValueError, before any change, for unequal shapes,
        repeated, unmapped or part-named sources and for targets that are mapped already.
        """
        rank = self.rank_of(dp_rank)
        source, target = as_indices(source_full), as_indices(target_full)
        full, mapping = self.full_attn_allocator, self._maps[rank]
        units = check_transfer(source, target, TransferView(mapping, self._live_either(rank), self._limit()))
        if source.size == 0:
            return
        if self.strict:
            unowned = target[~full.units_allocated(target // self.page_size, rank)]
            if unowned.size:
                raise OwnershipError(
                    f"dp_rank={rank} pool=full: target slots {unowned[:_SHOWN].tolist()} of the SWA transfer are not "
                    f"allocated"
                )
        owned = full.owned_units(units, rank)
        swa_slots = mapping.read(source)
        mapping.clear_tokens(source)
        mapping.write(target, swa_slots)
        self._release_full(owned, source, rank)

    def _release_full(self, owned: IntArray, indices: IntArray, rank: int) -> None:
        if owned.size == 0:
            return
        if not self.is_not_in_free_group:
            self.full_attn_allocator.free_group[rank].append(indices)
        self.full_attn_allocator.surrender_units(owned, rank)

    def _release_swa(self, units: IntArray, rank: int, *, keep_full: bool) -> None:
        if units.size == 0:
            return
        mapping, swa = self._maps[rank], self.swa_attn_allocator
        targets = mapping.swa_units(units)
        mapped = np.count_nonzero(targets)
        if mapped == 0:
            return
        if mapped != targets.size:
            units, targets = units[targets > 0], targets[targets > 0]
        # FULL units named twice are one surrender, not a double free of the SWA unit.
        owned = swa.owned_units(targets, rank)
        mapping.clear_pages(units, keep_full)
        swa.surrender_units(owned, rank)

    def _limit(self) -> int:
        """First FULL slot beyond the usable ones."""
        return (self.full_attn_allocator.units_per_rank + 1) * self.page_size

    def _usable(self, free_index: npt.ArrayLike, rank: int) -> IntArray:
        indices = as_indices(free_index)
        limit = self._limit()
        if indices.size == 0 or int(indices.view(np.uint32).max()) < limit:
            return indices
        inside = (indices >= 0) & (indices < limit)
        if self.strict:
            raise SlotRangeError(
                f"dp_rank={rank} pool=full: slots {indices[~inside][:_SHOWN].tolist()} are outside "
                f"{self.page_size}..{limit - 1}"
            )
        return indices[inside]

    def _read_once(self, slots: npt.ArrayLike, rank: int) -> Cascade | None:
        """The cascade of read-only ``slots`` that are whole, distinct and allocated pages; None for any other."""
        if self.page_size == 1 or not isinstance(slots, np.ndarray) or slots.flags.writeable:
            return None
        if slots.dtype != np.int32 or slots.ndim != 1 or slots.size == 0:
            return None
        pages = whole_pages(slots, self.page_size)
        if pages is None or self.full_attn_allocator.owned_units(pages, rank) is not pages:
            return None
        return Cascade(rank, slots, pages)

    # -- which tokens of a page a call has to name -----------------------------------------------------------------

    def _named(self, indices: IntArray, rank: int, pool: str, live_tokens: LiveTokens) -> IntArray:
        """Units the call may release; partial pages are left out, or raise in strict mode."""
        if self.page_size == 1:
            return indices
        complete, partial = named_pages(indices, self.page_size, live_tokens)
        if partial.size and self.strict:
            slots = indices[np.isin(indices // self.page_size, partial)]
            raise PartialPageError(
                f"dp_rank={rank} pool={pool}: slots {slots[:_SHOWN].tolist()} are a part of pages "
                f"{partial[:_SHOWN].tolist()}, which hold more tokens; name every allocated slot of a page to release it"
            )
        return complete

    def _live_full(self, rank: int) -> LiveTokens:
        full, mapping = self.full_attn_allocator, self._maps[rank]
        return lambda pages: mapping.held_rows(pages) & full.units_allocated(pages, rank)[:, None]

    def _live_swa(self, rank: int) -> LiveTokens:
        return self._maps[rank].mapped_rows

    def _live_either(self, rank: int) -> LiveTokens:
        full, mapping = self._live_full(rank), self._maps[rank]
        return lambda pages: full(pages) | mapping.mapped_rows(pages)

    # -- mapping queries -------------------------------------------------------------------------------------------

    def translate_full_to_swa(
        self, full_indices: npt.ArrayLike, *, dp_rank: int | None = None, require_mapped: bool = True
    ) -> IntArray:
        """A fresh int32 array of the mapped SWA slots. Unmapped: ValueError, or 0 without ``require_mapped``."""
        rank = self.rank_of(dp_rank)
        indices = as_indices(full_indices)
        if indices.size == 0:
            return empty_ids()
        swa_slots = self._maps[rank].read(indices)
        if require_mapped and np.count_nonzero(swa_slots) != swa_slots.size:
            missing = indices[swa_slots == 0][:_SHOWN].tolist()
            raise ValueError(f"dp_rank={rank}: FULL slots without an SWA mapping: {missing}")
        return swa_slots

    def count_swa_mapped(self, indices: npt.ArrayLike, dp_rank: int | None = None) -> int:
        """How many of the FULL ``indices`` have a live mapping."""
        return int(np.count_nonzero(self._maps[self.rank_of(dp_rank)].read(as_indices(indices))))

    # -- group mode and reset --------------------------------------------------------------------------------------

    def free_group_begin(self) -> None:
        self.is_not_in_free_group = False
        self.full_attn_allocator.free_group_begin()
        self.swa_attn_allocator.free_group_begin()

    def free_group_end(self) -> None:
        """Flush both physical queues; the mapping is not read (D02)."""
        self.full_attn_allocator.free_group_end()
        self.swa_attn_allocator.free_group_end()
        self.is_not_in_free_group = True

    def clear(self, dp_rank: int | None = None) -> None:
        """All ranks: pools, mappings, queues, group mode. One rank: only its own; group mode survives."""
        if dp_rank is None:
            self.full_attn_allocator.clear()
            self.swa_attn_allocator.clear()
            for mapping in self._maps:
                mapping.clear()
            self.is_not_in_free_group = True
            return
        rank = self.rank_of(dp_rank)
        self.full_attn_allocator.reset_rank(rank)
        self.swa_attn_allocator.reset_rank(rank)
        self._maps[rank].clear()

    def check(self) -> list[Violation]:
        """Violations of both pools and of the mapping."""
        full, swa = self.full_attn_allocator, self.swa_attn_allocator
        found = [*full.check(), *swa.check()]
        for rank, mapping in enumerate(self._maps):
            found += mapping.check(full.allocated_mask(rank), swa.allocated_mask(rank))
        return found
