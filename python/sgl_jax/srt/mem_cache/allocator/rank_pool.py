"""Free structure of one pool on one rank: a state byte per unit and a sorted window of free ids.

A *unit* is what the pool hands out: a slot at page size 1, else a page. Every unit is in exactly one state::

    RESERVED   unit 0, padding and "unmapped"
    FREE       in the window (handed out next, ascending) or in the released buffer (merged when the window runs dry)
    ALLOCATED  owned by a request or by a tree
    PENDING    surrendered inside a free group: nobody's, not allocatable, FREE at the flush (RFC-0035 section 1)

``take`` slices the window; ``surrender`` flips the states it was given. Neither looks at the rest of the pool: when the
window is short the released ids are sorted into it, which every released id pays for once (G1, G2, G4).
"""

from __future__ import annotations

from typing import Final, NamedTuple

import numpy as np
import numpy.typing as npt

from sgl_jax.srt.mem_cache.errors import DoubleFreeError, SlotRangeError

IntArray = npt.NDArray[np.int32]
BoolArray = npt.NDArray[np.bool_]

FREE: Final = 0
ALLOCATED: Final = 1
PENDING: Final = 2
RESERVED: Final = 3

#: Above this share of free units one scan of the state bytes is cheaper than sorting the released ids.
_SCAN_SHARE: Final = 8
_FIRST_BUFFER: Final = 64
_SHOWN: Final = 16
#: So few ids are cheaper to compare in a Python set than with three numpy calls.
_FEW: Final = 64


def empty_ids() -> IntArray:
    """A fresh empty int32 index array."""
    return np.empty((0,), np.int32)


def as_indices(indices: npt.ArrayLike) -> IntArray:
    """Any 1-D index sequence as int32; no copy when it already is."""
    array = np.asarray(indices, dtype=np.int32)
    return array if array.ndim == 1 else array.reshape(-1)


def all_true(mask: BoolArray) -> bool:
    """``mask.all()`` as one copy and one byte search: no reduction is set up, which is most of its price on a few pages."""
    return 0 not in mask.tobytes()


class IdBuffer:
    """Append-only int32 ids in one growing array: no Python object per id (G15)."""

    __slots__ = ("_data", "size")

    def __init__(self) -> None:
        self._data = np.empty((_FIRST_BUFFER,), np.int32)
        self.size = 0

    def append(self, ids: IntArray) -> None:
        end = self.size + ids.size
        if end > self._data.size:
            grown = np.empty((max(end, 2 * self._data.size),), np.int32)
            grown[: self.size] = self._data[: self.size]
            self._data = grown
        self._data[self.size : end] = ids
        self.size = end

    def view(self) -> IntArray:
        """The ids in append order; a view, valid until the next append."""
        return self._data[: self.size]


class Mark(NamedTuple):
    """Where a pool stood: what :meth:`RankPool.rewind` needs, O(1) to take."""

    window: IntArray
    head: int
    released: int


class RankPool:
    """Units ``1..count`` of one pool on one rank. ``label`` and ``unit`` only name them in errors."""

    __slots__ = (
        "_head",
        "_pending",
        "_released",
        "_scratch",
        "_window",
        "count",
        "label",
        "rank",
        "state",
        "unit",
    )

    def __init__(self, count: int, rank: int, label: str, unit: str) -> None:
        self.count = count
        self.rank = rank
        self.label = label
        self.unit = unit
        self.state: npt.NDArray[np.uint8] = np.empty((count + 1,), np.uint8)
        self._scratch: IntArray = np.empty((count + 1,), np.int32)
        self.reset()

    def reset(self) -> None:
        """Everything free again, ascending from unit 1; pending units included."""
        self.state.fill(FREE)
        self.state[0] = RESERVED
        self._window: IntArray = np.arange(1, self.count + 1, dtype=np.int32)
        self._head = 0
        self._released = IdBuffer()
        self._pending = IdBuffer()

    # -- queries -------------------------------------------------------------------------------------------------

    @property
    def available(self) -> int:
        """Allocatable units; O(1)."""
        return self._window.size - self._head + self._released.size

    def window(self) -> IntArray:
        """Copy of the ids handed out next."""
        return self._window[self._head :].copy()

    def released(self) -> IntArray:
        """Copy of the free ids that wait for the next merge, in release order."""
        return self._released.view().copy()

    def pending(self) -> IntArray:
        """Copy of the ids surrendered in the open group."""
        return self._pending.view().copy()

    def mask(self, state: int) -> BoolArray:
        """``bool[count + 1]``: units in ``state``."""
        result: BoolArray = self.state == state
        return result

    # -- allocation ----------------------------------------------------------------------------------------------

    def take(self, n: int) -> IntArray | None:
        """The ``n`` next ids (ascending within one window), now ALLOCATED; None and no change when short.

        The result is a view of the window: callers that hand it out copy it.
        """
        end = self._head + n
        if end > self._window.size:
            if n > self.available:
                return None
            self.merge()
            end = n
        ids = self._window[self._head : end]
        self._head = end
        if n:
            first, last = int(ids[0]), int(ids[-1])
            if last - first == n - 1:  # the window is sorted and distinct: a run
                self.state[first : last + 1] = ALLOCATED
            else:
                self.state[ids] = ALLOCATED
        return ids

    def merge(self) -> None:
        """Sort the released ids into the window."""
        if self._released.size == 0:
            self._window = self._window[self._head :]
        elif self.available * _SCAN_SHARE > self.count:
            self._window = np.flatnonzero(self.state == FREE).astype(np.int32)
        else:
            free = np.concatenate((self._window[self._head :], self._released.view()))
            free.sort()
            self._window = free
        self._head = 0
        self._released.size = 0

    def mark(self) -> Mark:
        """Position to :meth:`rewind` to; only allocations may happen in between."""
        return Mark(self._window, self._head, self._released.size)

    def rewind(self, mark: Mark) -> IntArray:
        """Undo every ``take`` since ``mark``, byte for byte; returns the units that are free again."""
        if self._window is mark.window:
            ids = self._window[mark.head : self._head].copy()
        else:  # a merge came in between: what was free at the mark and is not any more
            self._released.size = mark.released
            ids = np.concatenate((mark.window[mark.head :], self._released.view()))
            ids = ids[self.state[ids] == ALLOCATED]
        self.state[ids] = FREE
        self._window, self._head = mark.window, mark.head
        self._released.size = mark.released
        return ids

    # -- release -------------------------------------------------------------------------------------------------

    def owned(self, ids: IntArray, strict: bool) -> IntArray:
        """Distinct ALLOCATED units among ``ids``, in order of first mention up to duplicates; changes nothing.

        Ids that are free, pending or out of range are dropped. Strict: out of range raises SlotRangeError, already
        free raises DoubleFreeError; a pending id never does, because frees of one group share their dedup (RFC 2).
        """
        n = ids.size
        if n == 0:
            return ids
        try:
            # A negative id becomes a huge unsigned one, so one bounds check covers both ends.
            states = self.state.take(ids.view(np.uint32))
        except IndexError:
            ids = self._in_range(ids, strict)
            return self.owned(ids, strict)
        if states.tobytes().count(ALLOCATED) != n:
            if strict:
                self._refuse_free(ids, states)
            ids = ids[states == ALLOCATED]
        return self.distinct(ids)

    def distinct(self, ids: IntArray) -> IntArray:
        """In-range ids without duplicates: O(len), no sort."""
        n = ids.size
        if n <= _FEW:
            if n < 2 or len(set(ids.tolist())) == n:
                return ids
        elif all_true(ids[1:] > ids[:-1]):
            return ids
        order = np.arange(n, dtype=np.int32)
        self._scratch[ids] = order  # the last mention wins
        first: IntArray = ids[self._scratch[ids] == order]
        return first

    def surrender(self, owned: IntArray, defer: bool) -> None:
        """Give back distinct ALLOCATED units (from :meth:`owned`): FREE now, or PENDING when ``defer``."""
        if owned.size == 0:
            return
        self.state[owned] = PENDING if defer else FREE
        (self._pending if defer else self._released).append(owned)

    def flush(self) -> int:
        """Make every PENDING unit FREE; returns how many. The mapping is never read here (D02)."""
        n = self._pending.size
        if n:
            ids = self._pending.view()
            self.state[ids] = FREE
            self._released.append(ids)
            self._pending.size = 0
        return n

    def restore(self, free: IntArray, released: IntArray) -> None:
        """Set the free lists; units in neither list become ALLOCATED, pending ones stay pending."""
        pending = self._pending.view()
        self.state.fill(ALLOCATED)
        self.state[0] = RESERVED
        self.state[pending] = PENDING
        self._window, self._head = free.copy(), 0
        self._released = IdBuffer()
        self._released.append(released)
        self.state[free] = FREE
        self.state[released] = FREE

    def _in_range(self, ids: IntArray, strict: bool) -> IntArray:
        bad = (ids < 0) | (ids > self.count)
        if strict:
            raise SlotRangeError(
                f"dp_rank={self.rank} pool={self.label}: {self.unit}s {ids[bad][:_SHOWN].tolist()} are outside "
                f"1..{self.count}; free only what alloc returned on this rank"
            )
        inside: IntArray = ids[~bad]
        return inside

    def _refuse_free(self, ids: IntArray, states: npt.NDArray[np.uint8]) -> None:
        reserved = states == RESERVED
        if reserved.any():
            raise SlotRangeError(
                f"dp_rank={self.rank} pool={self.label}: {self.unit} 0 is reserved and was never allocated"
            )
        free = ids[states == FREE]
        if free.size:
            raise DoubleFreeError(
                f"dp_rank={self.rank} pool={self.label}: {self.unit}s {free[:_SHOWN].tolist()} are already free; "
                f"each owner frees once"
            )
