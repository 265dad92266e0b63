"""Operation lists: run them, shrink them, draw them from a seed. A shrunk list becomes a named worked example."""

from __future__ import annotations

import random
from collections.abc import Sequence

from sgl_jax.test.stateful.build import WorldConfig
from sgl_jax.test.stateful.world import World

Op = tuple[str, int, int, int]

#: How often a random driver picks each operation.
WEIGHTS: dict[str, int] = {
    "admit": 16,
    "admit_twins": 4,
    "readmit": 5,
    "commit": 20,
    "next_chunk": 14,
    "decode": 16,
    "reclaim": 10,
    "finish": 9,
    "abort": 2,
    "retract": 2,
    "give_up": 1,
    "group": 2,
    "match": 4,
    "evict": 9,
    "lock": 5,
    "unlock": 6,
    "flush": 1,
}
_LIMIT = 1 << 16


def draw_ops(rng: random.Random, count: int) -> list[Op]:
    """``count`` weighted operations."""
    names = rng.choices(list(WEIGHTS), list(WEIGHTS.values()), k=count)
    return [(n, rng.randrange(_LIMIT), rng.randrange(_LIMIT), rng.randrange(_LIMIT)) for n in names]


def run_ops(cfg: WorldConfig, ops: Sequence[Op], drain: bool = True, full_every: int = 1) -> World:
    """Run a list in a new world with all comparisons; ends with an empty, cold cache when ``drain``."""
    world = World(cfg)
    for i, (name, a, b, c) in enumerate(ops):
        world.step(name, a, b, c, full_check=i % full_every == 0)
    if drain:
        world.drain()
    return world


def fails(cfg: WorldConfig, ops: Sequence[Op]) -> BaseException | None:
    """The error the list ends in, or None."""
    try:
        run_ops(cfg, ops)
    except Exception as error:
        return error
    return None


def shrink(cfg: WorldConfig, ops: Sequence[Op], tries: int = 1500) -> list[Op]:
    """Smaller list that still fails (any error): drop runs of operations, then simplify the integers."""
    best = list(ops)
    size = max(1, len(best) // 2)
    while size and tries > 0:
        i, improved = 0, False
        while i < len(best) and tries > 0:
            shorter = best[:i] + best[i + size :]
            tries -= 1
            if fails(cfg, shorter) is not None:
                best, improved = shorter, True
            else:
                i += size
        size = size if improved and size == 1 else size // 2
    for i in range(len(best)):
        for position in (1, 2, 3):
            for small in (0, 1, 2, 3):
                if small >= best[i][position] or tries <= 0:
                    break
                op = list(best[i])
                op[position] = small
                changed = best[:i] + [tuple(op)] + best[i + 1 :]  # type: ignore[list-item]
                tries -= 1
                if fails(cfg, changed) is not None:
                    best = changed
                    break
    return best
