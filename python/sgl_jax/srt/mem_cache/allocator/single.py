"""What the token and the paged allocator share: one :class:`RankPool` per rank, group mode and invariants."""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt

from sgl_jax.srt.mem_cache.allocator.base import BaseTokenToKVPoolAllocator
from sgl_jax.srt.mem_cache.allocator.rank_pool import (
    ALLOCATED,
    FREE,
    PENDING,
    BoolArray,
    IntArray,
    Mark,
    RankPool,
    as_indices,
)
from sgl_jax.srt.mem_cache.errors import Violation

_SHOWN = 16


class SinglePoolAllocator(BaseTokenToKVPoolAllocator):
    """One pool; ids inside are units (slots at page size 1, else pages), tokens only at the seam.

    Besides the seam it offers unit-level calls for the dual allocator and the ledger: ``owned_units``,
    ``surrender_units``, ``mark``/``rewind`` and the masks.
    """

    def __init__(self, size: int, page_size: int, kvcache: Any, dp_size: int, strict: bool) -> None:
        super().__init__(size, page_size, kvcache, dp_size)
        self.strict = strict
        self.pool_name = "full"
        self.units_per_rank = units_per_rank = size // page_size // dp_size
        unit = "slot" if page_size == 1 else "page"
        self._pools = [RankPool(units_per_rank, r, self.pool_name, unit) for r in range(dp_size)]
        self.is_not_in_free_group = True
        self._queue: list[list[IntArray]] = [[] for _ in range(dp_size)]

    def set_pool_name(self, name: str) -> None:
        """Name this pool ("full", "swa") in errors and violations."""
        self.pool_name = name
        for pool in self._pools:
            pool.label = name

    # -- seam ----------------------------------------------------------------------------------------------------

    def rank_of(self, dp_rank: int | None) -> int:
        """As the base; omitted, it is the seam's default 0, except in strict mode. The dual allocator passes a rank always."""
        return 0 if dp_rank is None and not self.strict else super().rank_of(dp_rank)

    @property
    def free_pages(self) -> list[IntArray]:
        return [pool.window() for pool in self._pools]

    @property
    def release_pages(self) -> list[IntArray]:
        return [pool.released() for pool in self._pools]

    @property
    def free_group(self) -> list[list[IntArray]]:
        return self._queue

    def available_size(self, dp_rank: int | None = None) -> int:
        return self._pools[self.rank_of(dp_rank)].available * self.page_size

    def capacity(self, dp_rank: int | None = None) -> int:
        """Usable slots of one rank: all of them, whoever owns them."""
        self.rank_of(dp_rank)
        return self.units_per_rank * self.page_size

    def free(self, free_index: npt.ArrayLike, dp_rank: int | None = None) -> None:
        """Free the unit of every index; at page size > 1 any token names its whole page (DECISIONS 1)."""
        rank = self.rank_of(dp_rank)
        indices = as_indices(free_index)
        if indices.size == 0:
            return
        owned = self.owned_units(self._units(indices), rank)
        if not self.is_not_in_free_group:
            self._queue[rank].append(indices)
        self.surrender_units(owned, rank)

    def clear(self, dp_rank: int | None = None) -> None:
        """All ranks, or one: its queued frees go too. Leaves group mode; what other ranks queued is released by that."""
        for rank in range(self.dp_size) if dp_rank is None else (self.rank_of(dp_rank),):
            self.reset_rank(rank)
        self.free_group_end()

    def free_group_begin(self) -> None:
        self.is_not_in_free_group = False

    def free_group_end(self) -> None:
        self.is_not_in_free_group = True
        for rank, pool in enumerate(self._pools):
            pool.flush()
            self._queue[rank] = []

    def merge_and_sort_free(self, dp_rank: int | None = None) -> None:
        self._pools[self.rank_of(dp_rank)].merge()

    def backup_state(self) -> tuple[list[IntArray], list[IntArray]]:
        """Copies of the per-rank (free, released) ids."""
        return self.free_pages, self.release_pages

    def restore_state(self, state: tuple[list[IntArray], list[IntArray]]) -> None:
        """Set the free lists to a backup: what was allocated since is free, what was freed since is allocated."""
        if len(state) != 2:
            raise AssertionError(f"allocator state must be a pair (free, released), got {len(state)} parts")
        for pool, free, released in zip(self._pools, state[0], state[1], strict=True):
            pool.restore(free, released)

    # -- unit level ----------------------------------------------------------------------------------------------

    def owned_units(self, units: IntArray, rank: int) -> IntArray:
        """Distinct allocated units among ``units``; see :meth:`RankPool.owned` for what strict raises."""
        return self._pools[rank].owned(units, self.strict)

    def surrender_units(self, owned: IntArray, rank: int) -> None:
        """Give back units that :meth:`owned_units` returned; deferred inside a group."""
        self._pools[rank].surrender(owned, not self.is_not_in_free_group)

    def reset_rank(self, rank: int) -> None:
        """Forget one rank; group mode stays as it is."""
        self._pools[rank].reset()
        self._queue[rank] = []

    def mark(self, rank: int) -> Mark:
        """Point that :meth:`rewind` returns to; O(1)."""
        return self._pools[rank].mark()

    def rewind(self, rank: int, mark: Mark) -> IntArray:
        """Undo the allocations since ``mark``: exactly the new units are free again, in their old places (rule 5)."""
        return self._pools[rank].rewind(mark)

    def free_mask(self, rank: int) -> BoolArray:
        """``bool[units + 1]``: allocatable now."""
        return self._pools[rank].mask(FREE)

    def pending_mask(self, rank: int) -> BoolArray:
        """``bool[units + 1]``: surrendered in the open group."""
        return self._pools[rank].mask(PENDING)

    def allocated_mask(self, rank: int) -> BoolArray:
        """``bool[units + 1]``: owned by somebody."""
        return self._pools[rank].mask(ALLOCATED)

    def units_allocated(self, units: IntArray, rank: int) -> BoolArray:
        """``bool[len(units)]``: which in-range units are owned by somebody."""
        allocated: BoolArray = self._pools[rank].state[units] == ALLOCATED
        return allocated

    def _units(self, indices: IntArray) -> IntArray:
        return indices

    # -- invariants ----------------------------------------------------------------------------------------------

    def check(self) -> list[Violation]:
        """Free lists against state bytes, per rank: each free unit is listed once, nothing else is listed."""
        found: list[Violation] = []
        for rank, pool in enumerate(self._pools):
            listed = np.concatenate((pool.window(), pool.released()))
            free = np.flatnonzero(pool.state == FREE)
            self._compare(found, rank, "free_list", listed, free)
            queued = pool.pending()
            self._compare(found, rank, "pending_list", queued, np.flatnonzero(pool.state == PENDING))
            if queued.size and self.is_not_in_free_group:
                detail = f"{queued.size} {pool.unit}s are pending outside a free group"
                found.append(self._violation("pending_outside_group", rank, detail, queued))
            if pool.state[0] == ALLOCATED or pool.state[0] == FREE:
                found.append(self._violation("reserved_unit", rank, f"{pool.unit} 0 lost its reservation"))
        return found

    def _compare(
        self, found: list[Violation], rank: int, name: str, listed: IntArray, actual: npt.NDArray[np.intp]
    ) -> None:
        unique, counts = np.unique(listed, return_counts=True)
        unit = self._pools[rank].unit
        for kind, ids in (
            ("duplicate", unique[counts > 1]),
            ("surplus", np.setdiff1d(unique, actual)),
            ("deficit", np.setdiff1d(actual, unique)),
        ):
            if ids.size:
                detail = f"{ids.size} {unit}s: listed {listed.size}, in that state {actual.size}"
                found.append(self._violation(f"{name}_{kind}", rank, detail, ids))

    def _violation(self, kind: str, rank: int, detail: str, ids: npt.NDArray[Any] | None = None) -> Violation:
        shown = () if ids is None else tuple(int(i) for i in ids[:_SHOWN])
        return Violation(kind, rank, self.pool_name, detail, shown)
