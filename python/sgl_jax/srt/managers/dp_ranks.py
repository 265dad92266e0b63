"""Which data-parallel rank a request runs on. The scheduler decides; a client's wish is checked first (D51)."""

from __future__ import annotations

import logging
from collections.abc import Callable

from sgl_jax.srt.managers.request import Req
from sgl_jax.srt.managers.roster import Roster

logger = logging.getLogger(__name__)

POLICIES = ("cache_aware", "min_running_queue", "round_robin")

#: A rank that is ahead of the least loaded one by more than this many requests gets no request for its cache alone.
MAX_IMBALANCE = 8


class RankAssigner:
    """Assigns ranks. Load counts running and queued requests; ties go to the rank with more free FULL slots, then the lower.

    ``match_length(req, rank)``: tokens of the prompt that the rank has cached; ``free(rank)``: free plus evictable FULL slots.
    """

    def __init__(
        self,
        policy: str,
        roster: Roster,
        match_length: Callable[[Req, int], int],
        free: Callable[[int], int],
    ) -> None:
        if policy not in POLICIES:
            raise ValueError(f"--dp-schedule-policy {policy!r}: use one of {', '.join(POLICIES)}")
        self._policy = policy
        self._roster = roster
        self._match_length = match_length
        self._free = free
        self._next = 0

    def assign(self, req: Req, wish: object = None) -> int:
        """The rank of a new request. A wish outside ``0..dp_size-1`` is dropped with a warning."""
        size = self._roster.dp_size
        if wish is not None:
            if isinstance(wish, int) and not isinstance(wish, bool) and 0 <= wish < size:
                return wish
            logger.warning(
                "Request %s asked for dp_rank %r; valid: 0..%d. Reassigned.", req.rid, wish, size - 1
            )
        if size == 1:
            return 0
        if self._policy == "round_robin":
            rank, self._next = self._next, (self._next + 1) % size
            return rank
        loads = [self._roster.load(rank) for rank in range(size)]
        least = min(range(size), key=lambda rank: (loads[rank], -self._free(rank), rank))
        if self._policy == "min_running_queue":
            return least
        return self._cache_aware(req, loads, least)

    def _cache_aware(self, req: Req, loads: list[int], least: int) -> int:
        hits = [self._match_length(req, rank) for rank in range(len(loads))]
        best = max(range(len(loads)), key=lambda rank: (hits[rank], -loads[rank], -rank))
        if hits[best] == 0 or loads[best] - loads[least] > MAX_IMBALANCE:
            return least
        return best
