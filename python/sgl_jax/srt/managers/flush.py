"""Flush: forget the tree, the rows and every slot, and say per rank what was freed and whether anything had leaked."""

from __future__ import annotations

from typing import Any

from sgl_jax.srt.managers.kv_memory import KVMemory


def flush_pools(memory: KVMemory) -> list[dict[str, Any]]:
    """Reset tree, then rows, then allocator. Legal only when fully idle.

    Per rank and pool: ``freed`` tokens that the cache held, ``leaked`` tokens nobody held (negative: counted twice),
    ``available`` afterwards and the cold ``capacity`` (equal, or something is wrong).
    """
    pools = ("full", "swa") if memory.hybrid else ("full",)
    before = []
    for rank in range(memory.dp_size):
        held = [memory.available(rank), memory.evictable(rank), memory.protected(rank)]
        before.append({pool: [getattr(part, pool) for part in held] for pool in pools})
    memory.cache.reset()
    memory.rows.clear()
    memory.allocator.clear()
    report = []
    for rank, counts in enumerate(before):
        entry: dict[str, Any] = {"dp_rank": rank, "pools": {}}
        for pool, (available, evictable, protected) in counts.items():
            capacity = getattr(memory.capacity(rank), pool)
            after = getattr(memory.available(rank), pool)
            entry["pools"][pool] = {
                "freed": evictable + protected,
                "leaked": capacity - available - evictable - protected,
                "available": after,
                "capacity": capacity,
            }
        report.append(entry)
    return report
