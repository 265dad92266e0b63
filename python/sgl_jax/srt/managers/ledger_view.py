"""The internal ledger view: one snapshot per rank at a consistent point, with proof that looking changed nothing."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

from sgl_jax.srt.managers.kv_memory import KVMemory
from sgl_jax.srt.managers.request import Req
from sgl_jax.srt.managers.roster import Roster
from sgl_jax.srt.mem_cache.ledger import readonly_fingerprint, violations, who_owns
from sgl_jax.srt.mem_cache.ledger.schema import POOLS

Fingerprint = Callable[[Iterable[Any]], Any]


class SlotQuestionError(ValueError):
    """A question about a slot that cannot be asked: names parameter, value and what is legal."""


@dataclass(frozen=True, slots=True)
class SlotQuestion:
    """Who owns this slot of a pool on a rank? Any slot may be asked about; one outside the pool is answered as such."""

    slot: int
    pool: str
    rank: int

    @classmethod
    def of(cls, args: Mapping[str, Any], dp_size: int) -> SlotQuestion | None:
        """From a control call's arguments; None when nothing was asked. Raises SlotQuestionError."""
        slot, pool, rank = args.get("slot"), args.get("pool", "full"), args.get("rank", 0)
        if slot is None:
            return None
        if isinstance(slot, bool) or not isinstance(slot, int) or slot < 0:
            raise SlotQuestionError(f"slot is {slot!r}, must be an integer, 0 or more")
        if pool not in POOLS:
            raise SlotQuestionError(f"pool is {pool!r}, must be one of {', '.join(POOLS)}")
        if isinstance(rank, bool) or not isinstance(rank, int) or not 0 <= rank < dp_size:
            raise SlotQuestionError(f"rank is {rank!r}, must be an integer in 0..{dp_size - 1}")
        return cls(slot, pool, rank)


def live_requests(roster: Roster) -> list[Req]:
    """Every live request, queued ones and seated ones, those with up-to-date lengths."""
    ranks = range(roster.dp_size)
    return [req for rank in ranks for req in (*roster.waiting[rank], *roster.live_requests(rank))]


def _check_rids(live: Sequence[Any]) -> None:
    owners: dict[str, Any] = {}
    for req in live:
        if owners.setdefault(req.rid, req) is not req:
            raise RuntimeError(f"Multiple live request objects share rid={req.rid!r}")


def _unchanged(look: Callable[[], Any], fingerprint: Callable[[], Any]) -> Any:
    """What ``look`` sees. Raises RuntimeError when ownership was different afterwards."""
    before = fingerprint()
    seen = look()
    if fingerprint() != before:
        raise RuntimeError("the ledger snapshot mutated cache ownership state")
    return seen


def ledger_snapshots(
    cache: Any, dp_size: int, live: Sequence[Any], fingerprint: Fingerprint | None = None
) -> list[dict[str, int]]:
    """The 31-key ledger of every rank; ``live`` are the requests of all ranks.

    Raises NotImplementedError when the cache keeps no ledger, RuntimeError when two live requests share a rid or when the
    snapshot changed any ownership.
    """
    _check_rids(live)
    if not cache.supports_swa():
        raise NotImplementedError("the cache ledger covers hybrid models; this model has one KV pool")
    taken: list[dict[str, int]] = _unchanged(
        lambda: [cache.cache_ledger_snapshot(rank, live) for rank in range(dp_size)],
        partial(fingerprint or partial(readonly_fingerprint, cache), live),
    )
    return taken


def slot_owner(cache: Any, live: Sequence[Any], asked: SlotQuestion) -> dict[str, Any]:
    """All owners of one slot, for people and for programs."""
    report = who_owns(cache, asked.rank, asked.pool, asked.slot, live)
    owners = [{"kind": owner.kind, "detail": owner.detail} for owner in report.owners]
    return {
        "dp_rank": report.rank,
        "pool": report.pool,
        "slot": report.slot,
        "owners": owners,
        "description": report.describe(),
    }


def ledger_view(
    roster: Roster, memory: KVMemory, route: str, idle: bool, asked: SlotQuestion | None = None
) -> dict[str, Any]:
    """What ``/get_cache_ledger`` answers. Rank and route are the scheduler's own; ``violations`` as readable lines."""
    live = live_requests(roster)
    snapshots = ledger_snapshots(memory.cache, roster.dp_size, live)
    found = [str(item) for snapshot in snapshots for item in violations(snapshot, require_idle=idle)]
    view: dict[str, Any] = {"route": route, "idle": idle, "ranks": snapshots, "violations": found}
    if asked is not None:
        view["slot"] = slot_owner(memory.cache, live, asked)
    return view
