"""Five hundred mixed requests on tiny pools: every answer right, retractions certain, and the books balanced at the end.

One long run; the corners of the configuration space are ``test_scheduler_fuzz.py``'s.
"""

from __future__ import annotations

import random

import pytest

from sgl_jax.test.managers.world import VOCAB, World, make_world

EOS = frozenset(range(3, 33))


def traffic(world: World, count: int, seed: int) -> dict[str, int]:
    """Shared prefixes, divergence, aborts at any time, pauses, penalties, minimum lengths; returns rid -> max new tokens."""
    rng = random.Random(seed)
    bases = [[rng.randrange(3, VOCAB) for _ in range(rng.randrange(5, 60))] for _ in range(6)]
    sent: dict[str, int] = {}
    turns = 0
    while len(sent) < count or not world.scheduler.idle.is_fully_idle():
        for _ in range(rng.randrange(0, 4) if len(sent) < count else 0):
            if len(sent) == count:
                break
            base = rng.choice(bases)
            tail = [rng.randrange(3, VOCAB) for _ in range(rng.randrange(0, 20))]
            tokens = base[: rng.randrange(1, len(base) + 1)] + tail
            new, rid = rng.choice([1, 2, 5, 17, 40, 90]), f"r{len(sent)}"
            penalty = {"frequency_penalty": 0.1} if rng.random() < 0.05 else {}
            least = rng.choice([0, 0, 3]) if new > 3 else 0
            world.submit(rid, tokens, new, stream=rng.random() < 0.5, min_new_tokens=least, **penalty)
            sent[rid] = new
        if sent and rng.random() < 0.06:
            world.abort(f"r{rng.randrange(max(0, len(sent) - 12), len(sent))}")
        if rng.random() < 0.01:
            world.control("pause", mode=rng.choice(["retract", "in_place"]))
            world.step(2)
            world.control("continue")
        world.step()
        turns += 1
        if turns % 97 == 0:
            world.check_books()
        assert turns < 20_000
    return sent


@pytest.mark.parametrize(
    ("cache", "page", "window", "dp", "overlap", "count"),
    [
        ("unified", 4, 9, 1, True, 500),
        ("unified", 8, 3, 2, False, 100),
        ("legacy", 4, 9, 1, True, 100),
    ],
)
def test_mixed_traffic_on_tiny_pools(cache, page, window, dp, overlap, count):
    swa_pages = max(3 * -(-window // page) + 7, 60 // page)
    world = make_world(
        cache=cache,
        page=page,
        window=window,
        dp=dp,
        overlap=overlap,
        full_pages=max(20, 170 // page),
        swa_pages=swa_pages,
        seats=12,
        chunk=16,
        eos=EOS,
        conservativeness=0.01,
    )
    sent = traffic(world, count, seed=page * 100 + window)
    world.check_balanced()
    assert sum(world.scheduler.counters.retracted) > 0
    kinds = {world.finish_type(rid) for rid in sent}
    assert kinds == {"stop", "length", "abort"}
    for rid, new in sent.items():
        output = world.outputs[rid]
        assert output == world.expected(rid, len(output))
        if world.finish_type(rid) == "length":
            assert len(output) == new
        elif world.finish_type(rid) == "stop":
            assert output[-1] in EOS
        else:
            assert world.ends[rid][0].finish.message == "aborted by the client"
    reply = world.control("flush_cache")
    assert reply.ok and not reply.data["leaked"]
    memory = world.scheduler.memory
    assert all(memory.available(rank) == memory.capacity(rank) for rank in range(dp))
