"""Named operation lists: the driver's reach, and shrunk failures as worked examples (each once failed on a wrong version)."""

from __future__ import annotations

import random
from collections import Counter

from sgl_jax.test.stateful.configs import SMALL
from sgl_jax.test.stateful.replay import draw_ops, run_ops

#: What a random walk over the small configurations must meet; a driver that misses one proves nothing about it.
EVENTS = (
    "inserted_live",
    "inserted_dead",
    "duplicate",
    "duplicate_dead",
    "heal_exchanged",
    "heal_moved",
    "tombstoned",
    "tombstoned_locked",
    "evicted_live",
    "evicted_dead",
    "pruned_at_unlock",
    "out_of_memory",
    "out_of_memory_decode",
)


def test_the_driver_meets_every_kind_of_event() -> None:
    """Heals of both kinds, tombstones under lock, pruning, honest out-of-memory: each many times in 8 worlds."""
    events: Counter[str] = Counter()
    for i in range(8):
        cfg = SMALL[i]
        events += run_ops(cfg, draw_ops(random.Random(f"events/{i}"), 250), full_every=50).tree.events
    missing = [name for name in EVENTS if events[name] < 3]
    assert missing == [], f"too rare: {missing} in {dict(events)}"
