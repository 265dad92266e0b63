"""Who gives way when a rank's decode step does not fit: pure choice, and the steps that lead up to it.

The order of measures, per rank (D48): evict what is counted (always), reclaim every running request's tail (D40), narrow locks to
their windows, retract the prompt in chunks, retract decoding requests one by one, and end the last one with an out-of-memory reason (D39).
"""

from __future__ import annotations

from enum import Enum

import numpy as np
import numpy.typing as npt

from sgl_jax.srt.managers.kv_memory import KVMemory
from sgl_jax.srt.managers.lifecycle import Lifecycle
from sgl_jax.srt.managers.request import Req
from sgl_jax.srt.managers.roster import Roster
from sgl_jax.srt.managers.seats import RankSeats
from sgl_jax.srt.mem_cache.sizing import CapRules
from sgl_jax.srt.mem_cache.window import reclaim_ends

Int64 = npt.NDArray[np.int64]


class Measure(Enum):
    """What was done to make room."""

    RECLAIMED = "reclaimed"
    RETRACTED = "retracted"
    ENDED = "ended"


def choose_victim(seats: RankSeats) -> int:
    """Seat of the decoding request that loses least: fewest generated tokens, then the most slots, then the highest seat.

    Raises ValueError when nobody decodes.
    """
    candidates = np.flatnonzero(seats.decoding)
    if not len(candidates):
        raise ValueError("no decoding request to retract")
    order = np.lexsort((-candidates, -seats.length[candidates], seats.generated[candidates]))
    return int(candidates[order[0]])


class Retractor:
    """Makes room on one rank, one measure per call. Legal only while no step is in flight."""

    def __init__(self, roster: Roster, memory: KVMemory, lifecycle: Lifecycle, rules: CapRules) -> None:
        self._roster = roster
        self._memory = memory
        self._lifecycle = lifecycle
        self._rules = rules

    def make_room(self, rank: int) -> Measure:
        """The mildest measure that still has an effect."""
        if self.reclaim_all(rank) or self.narrow_all(rank):
            return Measure.RECLAIMED
        chunked = self._roster.chunked[rank]
        if chunked is not None:
            self._lifecycle.retract(chunked)
            return Measure.RETRACTED
        seats = self._roster.seats[rank]
        victim = seats.reqs[choose_victim(seats)]
        if victim is None:
            raise RuntimeError(f"rank {rank}: a decoding seat is empty")
        if seats.taken_count == 1:
            self._lifecycle.out_of_memory(victim)
            return Measure.ENDED
        self._lifecycle.retract(victim)
        return Measure.RETRACTED

    def reclaim_all(self, rank: int) -> bool:
        """Reclaim every request of the rank that can give back a page; whether anything was given back."""
        seats = self._roster.seats[rank]
        return self.reclaim(rank, np.flatnonzero(seats.taken))

    def narrow_all(self, rank: int) -> bool:
        """Give back what the rank's locks hold beyond their windows; whether that was anything."""
        return sum(self._memory.narrow_lock(req) for req in self._roster.seats[rank].requests()) > 0

    def reclaim(self, rank: int, chosen: Int64) -> bool:
        """Reclaim those of the chosen seats whose tail holds at least a whole page (D80), in one group."""
        window = self._rules.window
        if window is None or not self._memory.reclaims or not len(chosen):
            return False
        seats, page = self._roster.seats[rank], self._rules.page_size
        ends = reclaim_ends(seats.processed[chosen], window, page)
        due = chosen[ends > seats.reclaimed[chosen]]
        if not len(due):
            return False
        with self._memory.free_group():
            for seat in due.tolist():
                req = seats.reqs[seat]
                if req is not None:
                    self._reclaim_one(req, rank, seats)
        return True

    def _reclaim_one(self, req: Req, rank: int, seats: RankSeats) -> None:
        self._memory.reclaim(req, int(seats.processed[req.seat]), rank)
        seats.reclaimed[req.seat] = max(req.swa_evicted_seqlen, req.cache_protected_len)
