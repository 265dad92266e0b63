"""The internal ledger view: one snapshot per rank at a consistent point, with proof that looking changed nothing."""

from __future__ import annotations

from typing import Any

from sgl_jax.srt.managers.kv_memory import KVMemory
from sgl_jax.srt.managers.roster import Roster
from sgl_jax.srt.mem_cache.ledger import readonly_fingerprint, violations


def ledger_snapshots(roster: Roster, memory: KVMemory) -> list[dict[str, int]]:
    """The 31-key ledger of every rank.

    Raises NotImplementedError when the cache keeps no ledger, RuntimeError when two live requests share a rid or when the
    snapshot changed any ownership.
    """
    live = [roster.live_requests(rank) for rank in range(roster.dp_size)]
    seen: set[str] = set()
    for req in (req for requests in live for req in requests):
        if req.rid in seen:
            raise RuntimeError(f"Multiple live request objects share rid={req.rid!r}")
        seen.add(req.rid)
    if not memory.hybrid:
        raise NotImplementedError("the cache ledger covers hybrid models; this model has one KV pool")
    everyone = [req for requests in live for req in requests]
    before = readonly_fingerprint(memory.cache, everyone)
    snapshots = [memory.cache.cache_ledger_snapshot(rank, requests) for rank, requests in enumerate(live)]
    if readonly_fingerprint(memory.cache, everyone) != before:
        raise RuntimeError("the ledger snapshot mutated cache ownership state")
    return snapshots


def ledger_view(roster: Roster, memory: KVMemory, route: str, idle: bool) -> dict[str, Any]:
    """What ``/get_cache_ledger`` answers. Rank and route are the scheduler's own; ``violations`` as readable lines."""
    snapshots = ledger_snapshots(roster, memory)
    found = [str(item) for snapshot in snapshots for item in violations(snapshot, require_idle=idle)]
    return {"route": route, "idle": idle, "ranks": snapshots, "violations": found}
