"""The scaling cases: one operation at three sizes, named after the rows of the table in docs/performance.md.

A case prepares a world of one size and returns ``fresh``; each call of ``fresh`` restores the state and returns the one
operation that is measured. The limits are exponents of op counts over the sizes: they hold on any machine.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np

from sgl_jax.tools.bench.world import World

Operation = Callable[[], object]
FLAT, LINEAR = 0.15, 1.05


@dataclass(slots=True)
class Prepared:
    """A world ready to be measured; ``verify`` lists what is wrong after the last operation."""

    fresh: Callable[[], Operation]
    verify: Callable[[], list[str]]


@dataclass(frozen=True, slots=True)
class Case:
    """``calls`` / ``bytes``: largest exponent allowed for calls and peak bytes; ``unit``: what the sizes count."""

    name: str
    unit: str
    quick: tuple[int, ...]
    full: tuple[int, ...]
    build: Callable[[str, int], Prepared]
    calls: float
    bytes: float
    repeats: int = 30


def _fragment(world: World) -> None:
    """Half of every pool free, in a random order, as after hours of traffic."""
    unit = world.page
    slots = np.asarray(world.allocator.alloc(world.capacity[0], dp_rank=0)).reshape(-1, unit)
    order = world.random.permutation(len(slots))
    for part in np.array_split(order[: len(order) // 2], 64):
        world.allocator.free(slots[part].reshape(-1), dp_rank=0)


def _alloc(page: int) -> Callable[[str, int], Prepared]:
    def build(kind: str, size: int) -> Prepared:
        world = World(kind, page, full=size)
        held: list[Any] = []
        _fragment(world)

        def fresh() -> Operation:
            while held:
                world.allocator.free(held.pop(), dp_rank=0)
            return lambda: held.append(world.extend(0, 2048, -1))

        return Prepared(fresh, lambda: [] if len(held[-1]) == 2048 else ["a short allocation"])

    return build


def _free(page: int) -> Callable[[str, int], Prepared]:
    def build(kind: str, size: int) -> Prepared:
        world = World(kind, page, full=size)
        _fragment(world)
        before = world.allocator.available_size(dp_rank=0)

        def fresh() -> Operation:
            slots = world.extend(0, 2048, -1)
            return lambda: world.allocator.free(slots, dp_rank=0)

        def verify() -> list[str]:
            after = world.allocator.available_size(dp_rank=0)
            return [] if after == before else [f"available {after} after, {before} before"]

        return Prepared(fresh, verify)

    return build


def _decode(kind: str, rows: int) -> Prepared:
    world = World(kind, 128, full=128 * 8 * rows)
    last = np.array([int(world.extend(0, 1, -1)[0]) for _ in range(rows)], np.int32)
    lens = np.ones(rows, np.int32)

    def operation() -> object:
        nonlocal last, lens
        lens = lens + 1
        out = world.allocator.alloc_decode(lens, last, dp_rank=0)
        last = np.asarray(out, np.int32)
        return out

    return Prepared(lambda: operation, lambda: [] if len(last) == rows else ["a row got no slot"])


def _match(packed: bool, node: int | None) -> Callable[[str, int], Prepared]:
    def build(kind: str, tokens: int) -> Prepared:
        world = World(kind, 128, full=2 * tokens)
        ids = world.ids(tokens)
        world.insert(ids)
        for end in range(tokens - node, 0, -node) if node else ():
            world.match(world.key(ids[:end] if packed else [int(i) for i in ids[:end]]))  # splits
        listed = [int(i) for i in ids]
        key = world.key(ids if packed else listed)
        length = []

        def fresh() -> Operation:
            if packed:
                return lambda: length.append(len(world.match(key).device_indices))
            return lambda: length.append(len(world.match(world.key(listed)).device_indices))

        wrong = ["the match is not the whole key"]
        return Prepared(fresh, lambda: (wrong if length[-1] != tokens else []) + world.verify())

    return build


def _insert(kind: str, history: int) -> Prepared:
    """+512 tokens on a cached history, from the root."""
    world = World(kind, 128, full=4 * history + 65_536)
    base = world.ids(history)
    world.insert(base)

    def fresh() -> Operation:
        from sgl_jax.srt.mem_cache.base_prefix_cache import InsertParams

        if world.allocator.available_size(dp_rank=0) < 8192:
            world.evict(full=8192, swa=8192)
        value = np.concatenate(
            [world.match(world.key(base)).device_indices, world.allocator.alloc(512, dp_rank=0)]
        )
        key = world.key(np.concatenate([base, world.ids(512)]))
        params = InsertParams(key=key, value=value.astype(np.int32), prev_prefix_len=history)
        return lambda: world.cache.insert(params)

    return Prepared(fresh, world.verify)


def _insert_new(kind: str, tokens: int) -> Prepared:
    """A prompt nobody has seen: a leaf of all its tokens, cut at the window in one pass."""
    world = World(kind, 128, full=2 * tokens)
    sizes = []

    def fresh() -> Operation:
        from sgl_jax.srt.mem_cache.base_prefix_cache import InsertParams

        world.evict(full=2 * tokens, swa=2 * tokens)
        params = InsertParams(
            key=world.key(world.ids(tokens)), value=world.allocator.alloc(tokens, dp_rank=0)
        )

        def operation() -> object:
            result = world.cache.insert(params)
            sizes.append(world.cache.full_evictable_size(0))
            return result

        return operation

    return Prepared(
        fresh, lambda: ([] if sizes[-1] == tokens else [f"{sizes[-1]} tokens cached"]) + world.verify()
    )


def _commit(kind: str, history: int) -> Prepared:
    """One 512-token chunk of a request with a committed history."""
    world = World(kind, 128, full=4 * (history + 2048), row=history + 2048)
    running: list[Any] = []

    def fresh() -> Operation:
        while running:
            world.finish(running.pop())
        prompt = [int(i) for i in world.ids(history + 512)]
        req = world.admit(prompt)
        running.append(req)
        world.compute(req, history)
        world.cache.cache_unfinished_req(req)
        world.compute(req, history + 512)
        return lambda: world.cache.cache_unfinished_req(req)

    def verify() -> list[str]:
        wrong = [] if running[-1].cache_protected_len == history + 512 else ["the chunk was not committed"]
        world.finish(running.pop())
        return wrong + world.verify()

    return Prepared(fresh, verify)


def _evict(leaves_asked: int) -> Callable[[str, int], Prepared]:
    def build(kind: str, leaves: int) -> Prepared:
        world = World(kind, 64, window=64, full=64 * (leaves + 256))
        world.leaves(leaves, 64)

        def fresh() -> Operation:
            missing = (world.allocator.full_available_size(dp_rank=0) - 256 * 64) // 64
            world.leaves(max(missing, 0), 64)
            return lambda: world.evict(full=64 * leaves_asked)

        return Prepared(fresh, world.verify)

    return build


def _evict_swa(kind: str, nodes: int) -> Prepared:
    """Live internal nodes become tombstones; half of the live nodes are internal."""
    world = World(kind, 64, window=64, full=64 * (nodes + 512))

    def pair() -> None:
        ids = world.ids(128)
        world.insert(ids[:64])
        world.insert(ids)

    for _ in range(nodes // 2):
        pair()

    def fresh() -> Operation:
        pair()
        if world.allocator.full_available_size(dp_rank=0) < 64 * 64:
            world.evict(full=64 * 128)
        return lambda: world.evict(swa=64)

    return Prepared(fresh, world.verify)


def _evict_other_rank(kind: str, leaves: int) -> Prepared:
    world = World(kind, 64, window=64, full=64 * (leaves + 256), dp=2)
    world.leaves(leaves, 64, rank=0)
    world.leaves(64, 64, rank=1)

    def fresh() -> Operation:
        world.leaves(1, 64, rank=1)
        return lambda: world.evict(full=64, rank=1)

    return Prepared(fresh, world.verify)


def _lock(kind: str, leaves: int) -> Prepared:
    """Lock and unlock a 16-node path in a tree of ``leaves`` other leaves."""
    world = World(kind, 64, window=1024, full=64 * (leaves + 256))
    world.leaves(leaves, 64)
    ids = world.ids(1024)
    for end in range(64, 1025, 64):
        world.insert(ids[:end])
    node = world.match(world.key(ids)).last_device_node

    def operation() -> object:
        held = world.cache.inc_lock_ref(node)
        receipt = held.to_dec_params() if hasattr(held, "to_dec_params") else held.swa_uuid_for_lock
        return world.cache.dec_lock_ref(node, receipt)

    return Prepared(lambda: operation, world.verify)


def _reclaim(kind: str, size: int) -> Prepared:
    world = World(kind, 128, full=size, row=8192)
    running: list[Any] = []

    def fresh() -> Operation:
        while running:
            world.finish(running.pop())
        req = world.admit([int(i) for i in world.ids(4096)])
        running.append(req)
        world.compute(req, 4096)
        return lambda: world.cache.evict_req_swa(req, 4096, dp_rank=0)

    def verify() -> list[str]:
        cursor = running[-1].swa_evicted_seqlen
        wrong = [] if cursor == 4096 - 1024 - 128 else [f"the cursor is {cursor}"]
        world.finish(running.pop())
        return wrong + world.verify()

    return Prepared(fresh, verify)


_POOL_Q, _POOL_F = (65_536, 262_144, 1_048_576), (65_536, 262_144, 1_048_576)
_TOK_Q, _TOK_F = (4096, 16_384, 65_536), (8192, 32_768, 131_072)
_LEAF_Q, _LEAF_F = (300, 1200, 4800), (1000, 10_000, 100_000)

CASES: tuple[Case, ...] = (
    Case("G1.alloc_extend_2k", "pool tokens", _POOL_Q, _POOL_F, _alloc(128), FLAT, FLAT),
    Case("G2.free_2k", "pool tokens", _POOL_Q, _POOL_F, _free(128), FLAT, FLAT),
    Case("G3.alloc_decode", "rows", (16, 64, 256), (16, 64, 256), _decode, FLAT, LINEAR),
    Case("G4.alloc_2k_page1", "pool tokens", _POOL_Q, _POOL_F, _alloc(1), FLAT, FLAT),
    Case("G4.free_2k_page1", "pool tokens", _POOL_Q, _POOL_F, _free(1), FLAT, FLAT),
    Case("G5.match_list", "tokens", _TOK_Q, _TOK_F, _match(False, None), LINEAR, LINEAR),
    Case("G6.match_packed", "tokens", _TOK_Q, _TOK_F, _match(True, None), LINEAR, LINEAR),
    Case("G7.match_fragmented", "tokens", _TOK_Q, _TOK_F, _match(True, 128), LINEAR, LINEAR),
    Case("G8.insert_512", "tokens of history", _TOK_Q, _TOK_F, _insert, LINEAR, LINEAR),
    Case("G8.insert_new", "tokens", _TOK_Q, _TOK_F, _insert_new, LINEAR, LINEAR, 10),
    Case("G8.commit_512", "tokens of history", _TOK_Q, _TOK_F, _commit, FLAT, LINEAR, 15),
    Case("G9.evict_1", "leaves", _LEAF_Q, _LEAF_F, _evict(1), FLAT, FLAT, 15),
    Case("G9.evict_64", "leaves", _LEAF_Q, _LEAF_F, _evict(64), FLAT, FLAT, 8),
    Case("G10.evict_swa", "live nodes", _LEAF_Q, _LEAF_F, _evict_swa, FLAT, FLAT, 15),
    Case(
        "G11.evict_other_rank",
        "leaves of the other rank",
        _LEAF_Q,
        _LEAF_F,
        _evict_other_rank,
        FLAT,
        FLAT,
        15,
    ),
    Case("G12.lock_unlock_16", "leaves", _LEAF_Q, _LEAF_F, _lock, FLAT, FLAT),
    Case("reclaim_3k", "pool tokens", _POOL_Q, _POOL_F, _reclaim, FLAT, FLAT),
)
BY_NAME = {case.name: case for case in CASES}
