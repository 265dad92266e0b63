"""The candidate index against a plain dict: any order of arrivals, departures and changed ages."""

from __future__ import annotations

import random
from dataclasses import dataclass

import pytest

from sgl_jax.srt.mem_cache.radix_tree.lru import LruIndex


@dataclass(eq=False)
class Entry:
    id: int
    end: int
    age: float


def place(entry: Entry) -> tuple[float, int]:
    return entry.age, entry.end


@pytest.mark.parametrize("seed", range(8))
def test_the_index_equals_a_sorted_dict(seed: int) -> None:
    """D83, D84: oldest, membership, length and iteration after each of 1500 random changes."""
    rng = random.Random(seed)
    index: LruIndex = LruIndex(lambda e: e.age)
    filed: dict[int, Entry] = {}
    known = [Entry(i, rng.randrange(1, 9), float(rng.randrange(6))) for i in range(40)]
    tick = 10.0
    for _ in range(1500):
        entry = rng.choice(known)
        action = rng.randrange(5)
        if action <= 1:
            if entry.id not in filed and rng.random() < 0.5:
                entry.age = tick = tick + 1 if rng.random() < 0.6 else tick - 3.5
            index.add(entry)
            filed[entry.id] = entry
        elif action == 2:
            index.discard(entry)
            filed.pop(entry.id, None)
        elif action == 3:
            entry.age = tick = tick + 1 if rng.random() < 0.5 else tick - 2.25
            index.refile(entry)
        else:
            oldest = index.oldest()
            assert (oldest is None) == (not filed)
            if oldest is not None:
                assert place(oldest) == min(place(e) for e in filed.values())
                if rng.random() < 0.5:
                    index.discard(oldest)
                    del filed[oldest.id]
        assert len(index) == len(filed) and all((e in index) == (e.id in filed) for e in known)
        assert sorted(e.id for e in index) == sorted(filed)
