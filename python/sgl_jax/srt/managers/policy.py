"""Order in which waiting requests are looked at: fcfs, lpm (longest cached prefix first) or random (seeded)."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence

from sgl_jax.srt.managers.request import Req

POLICIES = ("fcfs", "lpm", "random")

#: Above this queue length lpm falls back to fcfs: matching every waiting prompt each step would cost more than it wins.
LPM_QUEUE_LIMIT = 128


class SchedulePolicy:
    """Orders one rank's queue. ``match_length`` tells the cached prefix of a waiting request, in tokens.

    Raises ValueError for an unknown name.
    """

    def __init__(self, name: str, match_length: Callable[[Req], int], seed: int = 0) -> None:
        if name not in POLICIES:
            raise ValueError(f"--schedule-policy {name!r}: use one of {', '.join(POLICIES)}")
        self.name = name
        self._match_length = match_length
        self._random = random.Random(seed)

    def order(self, queue: Sequence[Req]) -> list[Req]:
        """The queue in the order of admission. Retracted requests keep their place at the head."""
        if self.name == "fcfs" or len(queue) < 2 or (self.name == "lpm" and len(queue) > LPM_QUEUE_LIMIT):
            return list(queue)
        retracted = [req for req in queue if req.is_retracted]
        fresh = [req for req in queue if not req.is_retracted]
        if self.name == "random":
            self._random.shuffle(fresh)
        else:
            lengths = {id(req): self._match_length(req) for req in fresh}
            fresh.sort(key=lambda req: -lengths[id(req)])
        return retracted + fresh
