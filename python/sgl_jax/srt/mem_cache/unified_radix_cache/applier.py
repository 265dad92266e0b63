"""The one place where the unified cache makes slots change hands."""

from __future__ import annotations

import operator
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import numpy as np
import numpy.typing as npt

from sgl_jax.srt.mem_cache.allocator.free_group import free_group

IntArray = npt.NDArray[np.int32]


def _own(slots: npt.ArrayLike) -> IntArray:
    """A copy: the caller's array may be a view of a row that is about to be re-pointed."""
    return np.array(slots, dtype=np.int32)


def _joined(parts: list[IntArray]) -> IntArray | None:
    """All of ``parts`` as one read-only array, which both pools may look at as one; None without any."""
    if not parts:
        return None
    slots = parts[0].view() if len(parts) == 1 else np.concatenate(parts)
    slots.flags.writeable = False
    return slots


class SlotApplier:
    """Acts at once outside a transaction. Inside one every physical release waits for its end (DECISIONS 8).

    ``dual``: the allocator has two pools and FULL is freed apart from SWA.
    """

    def __init__(self, allocator: Any, dual: bool) -> None:
        self._allocator = allocator
        self._dual = dual
        self._gathered: tuple[list[IntArray], list[IntArray]] | None = None

    def transaction(self) -> AbstractContextManager[None]:
        """A free group around insert, re-pointing and lock exchange; joins one that is open already."""
        if getattr(self._allocator, "is_not_in_free_group", None) is None:
            return nullcontext()
        return free_group(self._allocator)

    def gather(self) -> None:
        """From here to :meth:`release_gathered` ``free_full`` and ``free_swa`` only note what they were given (G9).

        For evictions of one rank: nothing in between may read the mapping or the free structure of what was given back.
        """
        self._gathered = ([], [])

    def release_gathered(self, rank: int) -> None:
        """One ``free_full`` and one ``free_swa`` for all that was gathered, in that order."""
        gathered, self._gathered = self._gathered, None
        if gathered is None:
            return
        full_parts, swa_parts = gathered
        full = _joined(full_parts)
        if full is not None:
            self.free_full(full, rank)
        same = len(full_parts) == len(swa_parts) and all(map(operator.is_, full_parts, swa_parts))
        swa = full if same else _joined(swa_parts)
        if swa is not None:
            self.free_swa(swa, rank)

    def free(self, slots: IntArray, rank: int) -> None:
        """Both halves of ``slots`` → free (FULL slots whose SWA half is gone: FULL only)."""
        if len(slots):
            self._allocator.free(_own(slots), dp_rank=rank)

    def free_full(self, slots: IntArray, rank: int) -> None:
        """FULL half → free; SWA half and mapping stay for the one who frees or adopts them. ``slots`` are a node's own."""
        if self._gathered is not None:
            self._gathered[0].append(slots)
        elif self._dual:
            self._allocator.free_full(slots, dp_rank=rank)
        else:
            self._allocator.free(slots, dp_rank=rank)

    def free_swa(self, full_slots: IntArray, rank: int) -> None:
        """SWA half → free, mapping cleared now; named by FULL slots."""
        if self._gathered is not None:
            self._gathered[1].append(full_slots)
        else:
            self._allocator.free_swa(full_slots, dp_rank=rank)

    def move_mapping(self, source: IntArray, target: IntArray, rank: int) -> None:
        """SWA half of ``source`` → ``target``; FULL half of ``source`` → free."""
        self._allocator.transfer_swa_mapping(_own(source), _own(target), dp_rank=rank)

    def translate(self, full_slots: IntArray, rank: int) -> IntArray:
        """SWA slots of mapped FULL slots, a copy. Raises ValueError for an unmapped one."""
        swa: IntArray = self._allocator.translate_full_to_swa(full_slots, dp_rank=rank)
        return swa
