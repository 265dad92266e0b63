"""The one place where the unified cache makes slots change hands."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any

import numpy as np
import numpy.typing as npt

from sgl_jax.srt.mem_cache.allocator.free_group import free_group

IntArray = npt.NDArray[np.int32]


def _own(slots: npt.ArrayLike) -> IntArray:
    """A copy: the caller's array may be a view of a row that is about to be re-pointed."""
    return np.array(slots, dtype=np.int32)


class SlotApplier:
    """Acts at once outside a transaction. Inside one every physical release waits for its end (DECISIONS 8).

    ``dual``: the allocator has two pools and FULL is freed apart from SWA.
    """

    def __init__(self, allocator: Any, dual: bool) -> None:
        self._allocator = allocator
        self._dual = dual
        self._batch: dict[tuple[str, int], list[IntArray]] | None = None

    def transaction(self) -> AbstractContextManager[None]:
        """A free group around insert, re-pointing and lock exchange; joins one that is open already."""
        if getattr(self._allocator, "is_not_in_free_group", None) is None:
            return nullcontext()
        return free_group(self._allocator)

    @contextmanager
    def batch(self) -> Iterator[None]:
        """One ``free_full`` and one ``free_swa`` per rank for the whole block, in that order, at its end (G9).

        For evictions only: nothing in the block may read the mapping or the free structure of what it gave back.
        """
        collected: dict[tuple[str, int], list[IntArray]] = {}
        self._batch = collected
        try:
            yield
        finally:
            self._batch = None
            for (pool, rank), parts in sorted(collected.items()):
                slots = parts[0] if len(parts) == 1 else np.concatenate(parts)
                (self.free_full if pool == "full" else self.free_swa)(slots, rank)

    def _collect(self, pool: str, slots: IntArray, rank: int) -> bool:
        if self._batch is None:
            return False
        self._batch.setdefault((pool, rank), []).append(slots)
        return True

    def free(self, slots: IntArray, rank: int) -> None:
        """Both halves of ``slots`` → free (FULL slots whose SWA half is gone: FULL only)."""
        if len(slots):
            self._allocator.free(_own(slots), dp_rank=rank)

    def free_full(self, slots: IntArray, rank: int) -> None:
        """FULL half → free; SWA half and mapping stay for the one who frees or adopts them."""
        if not len(slots) or self._collect("full", slots, rank):
            return
        if self._dual:
            self._allocator.free_full(_own(slots), dp_rank=rank)
        else:
            self._allocator.free(_own(slots), dp_rank=rank)

    def free_swa(self, full_slots: IntArray, rank: int) -> None:
        """SWA half → free, mapping cleared now; named by FULL slots."""
        if len(full_slots) and not self._collect("swa", full_slots, rank):
            self._allocator.free_swa(_own(full_slots), dp_rank=rank)

    def move_mapping(self, source: IntArray, target: IntArray, rank: int) -> None:
        """SWA half of ``source`` → ``target``; FULL half of ``source`` → free."""
        self._allocator.transfer_swa_mapping(_own(source), _own(target), dp_rank=rank)

    def translate(self, full_slots: IntArray, rank: int) -> IntArray:
        """SWA slots of mapped FULL slots, a copy. Raises ValueError for an unmapped one."""
        swa: IntArray = self._allocator.translate_full_to_swa(full_slots, dp_rank=rank)
        return swa
