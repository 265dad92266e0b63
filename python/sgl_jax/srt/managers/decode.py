"""Chooses and prepares the next decode step: reclaim, room on every rank, one slot per row."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from sgl_jax.srt.managers.kv_memory import KVMemory
from sgl_jax.srt.managers.retract import Measure, Retractor
from sgl_jax.srt.managers.roster import Roster
from sgl_jax.srt.mem_cache.sizing import CapRules
from sgl_jax.srt.mem_cache.window import reclaim_interval

Int32 = npt.NDArray[np.int32]
Int64 = npt.NDArray[np.int64]

NO_SEATS: Int64 = np.empty(0, np.int64)
NO_SLOTS: Int32 = np.empty(0, np.int32)


@dataclass(frozen=True, slots=True)
class DecodePlan:
    """Per rank: the seats that run and the slot of each seat's new token."""

    seats: list[Int64]
    slots: list[Int32]


class DecodeScheduler:
    """Plans decode steps.

    ``drain()`` processes every step in flight and tells whether there was one: it runs before anything that needs the host's
    view to be complete (penalties, retraction).
    """

    def __init__(
        self,
        roster: Roster,
        memory: KVMemory,
        retractor: Retractor,
        rules: CapRules,
        drain: Callable[[], bool],
        *,
        overlap: bool,
    ) -> None:
        self._roster = roster
        self._memory = memory
        self._retractor = retractor
        self._drain = drain
        schedule = memory.cache.reclaim_schedule if memory.reclaims else None
        self._reclaims = schedule is not None and rules.window is not None
        self._offset = 0
        self._interval = 1
        if schedule is not None and rules.window is not None:
            self._offset = schedule.decode_offset_overlap if overlap else schedule.decode_offset
            self._interval = reclaim_interval(rules.window, rules.page_size, rules.interval_multiplier)
        self.retracted: Callable[[], None] = lambda: None

    def plan(self) -> DecodePlan | None:
        """The next step, its slots allocated and written to the rows; None when nothing decodes.

        Raises RuntimeError when slots that were counted as available or evictable cannot be had (rule 10).
        """
        while True:
            chosen = [seats.runnable() for seats in self._roster.seats]
            if not any(len(seats) for seats in chosen):
                return None
            if self._needs_history(chosen) and self._drain():
                continue
            self._reclaim_due(chosen)
            if all(self._fits(rank, seats) for rank, seats in enumerate(chosen)):
                break
        slots = [self._take(rank, seats) for rank, seats in enumerate(chosen)]
        return DecodePlan(chosen, slots)

    def _needs_history(self, chosen: list[Int64]) -> bool:
        return any(
            bool(table.penalised[seats].any())
            for table, seats in zip(self._roster.seats, chosen, strict=True)
        )

    def _reclaim_due(self, chosen: list[Int64]) -> None:
        """The periodic reclaim of the seats whose decode step count is due."""
        if not self._reclaims:
            return
        for rank, seats in enumerate(chosen):
            since = self._roster.seats[rank].decode_steps[seats] - self._offset
            self._retractor.reclaim(rank, seats[(since >= 0) & (since % self._interval == 0)])

    def _fits(self, rank: int, seats: Int64) -> bool:
        """Whether the rank's step fits as chosen. False: something changed (drained, retracted, ended), choose again."""
        if not len(seats):
            return True
        demand = self._memory.decode_demand(self._roster.seats[rank].length[seats] + 1)
        while not self._memory.has_room(demand, rank):
            if self._drain():
                return False
            if self._retractor.make_room(rank) is not Measure.RECLAIMED:
                self.retracted()
                return False
        return True

    def _take(self, rank: int, seats: Int64) -> Int32:
        """One slot per seat, written to the rows::

        [0, length)            as before
        [length, length + 1)   the new token's slot, request-owned
        """
        if not len(seats):
            return NO_SLOTS
        table = self._roster.seats[rank]
        lengths, rows = table.length[seats], table.row[seats]
        slots = self._memory.alloc_decode(lengths + 1, self._memory.table[rows, lengths - 1], rank)
        if slots is None:
            raise RuntimeError(
                f"decode out of memory although it was counted as available: {self._memory.report(rank)}"
            )
        self._memory.rows.write((rows, lengths), slots)
        table.length[seats] = lengths + 1
        table.budget[seats] -= 1
        table.decode_steps[seats] += 1
        return slots
