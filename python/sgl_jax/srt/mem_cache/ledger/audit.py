"""Judge a ledger snapshot, and look behind it: who owns a slot, what leaked, what changed between two snapshots."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from sgl_jax.srt.mem_cache.errors import LedgerViolationError, Violation
from sgl_jax.srt.mem_cache.ledger.exact import lookup, request_swa
from sgl_jax.srt.mem_cache.ledger.schema import LEDGER_FIELDS, MAPPING_DIAGNOSTICS, POOL_DIAGNOSTICS, POOLS
from sgl_jax.srt.mem_cache.ledger.source import IntArray, PoolView, RankView, rank_view

_MAX_SLOTS = 16


class LedgerAuditError(LedgerViolationError, ValueError):
    """A snapshot breaks the ledger's rules; ``violations`` holds every broken rule, the message all numbers."""

    def __init__(self, violations: Sequence[Violation]) -> None:
        super().__init__(violations, "cache ledger")
        lines = [f"[dp={v.rank}]" + (f"[{v.pool}] " if v.pool else " ") + v.detail for v in violations]
        self.args = ("; ".join(lines),)


def _balance(snapshot: Mapping[str, int], pool: str, rank: int) -> Violation | None:
    parts = {
        name: int(snapshot.get(f"{pool}_{name}", 0))
        for name in ("available", "tree_evictable", "tree_protected", "request_owned", "reserved_page_slack")
    }
    total, capacity = sum(parts.values()), int(snapshot[f"{pool}_capacity"])
    if total == capacity:
        return None
    terms = " + ".join(f"{name} {value}" for name, value in parts.items())
    side = f"{total - capacity} counted twice" if total > capacity else f"{capacity - total} leaked"
    return Violation(
        "balance_mismatch", rank, pool, f"balance mismatch: {terms} = {total} != capacity {capacity} ({side})"
    )


def _idle(snapshot: Mapping[str, int], pool: str, rank: int) -> list[Violation]:
    found = []
    for name in ("request_owned", "reserved_page_slack"):
        value = int(snapshot.get(f"{pool}_{name}", 0))
        if value:
            detail = f"{pool}_{name} = {value}, expected 0 when idle"
            found.append(Violation(f"idle_{name}", rank, pool, detail))
    return found


def violations(snapshot: Mapping[str, int], require_idle: bool) -> list[Violation]:
    """Every broken rule of one snapshot, in schema order. Diagnostics a snapshot lacks count as zero.

    Rules: per pool available + evictable + protected + request_owned + slack == capacity; every diagnostic is 0;
    ``mapping_nonzero_count`` equals the SWA owners; idle means no request owner and no slack.
    """
    rank = int(snapshot.get("dp_rank", 0))
    found: list[Violation] = []
    for pool in POOLS:
        broken = _balance(snapshot, pool, rank)
        if broken is not None:
            found.append(broken)
        for name in POOL_DIAGNOSTICS:
            field = f"{pool}_{name}"
            if snapshot.get(field, 0):
                found.append(Violation(name, rank, pool, f"{field} = {snapshot[field]}, expected 0"))
        if require_idle:
            found.extend(_idle(snapshot, pool, rank))
    for field in MAPPING_DIAGNOSTICS:
        if snapshot.get(field, 0):
            found.append(Violation(field, rank, "", f"{field} = {snapshot[field]}, expected 0"))
    if "mapping_nonzero_count" in snapshot:
        owners = sum(snapshot[f"swa_{n}"] for n in ("tree_evictable", "tree_protected", "request_owned"))
        if snapshot["mapping_nonzero_count"] != owners:
            detail = f"mapping_nonzero_count = {snapshot['mapping_nonzero_count']}, SWA owners = {owners}"
            found.append(Violation("mapping_nonzero_count", rank, "", detail))
    return found


def validate_swa_cache_ledger(snapshot: Mapping[str, int], *, require_idle: bool) -> None:
    """Raise :class:`LedgerAuditError` (a ValueError) listing every violation; return None when the ledger is sound."""
    found = violations(snapshot, require_idle)
    if found:
        raise LedgerAuditError(found)


def diff(before: Mapping[str, int], after: Mapping[str, int]) -> dict[str, tuple[int, int]]:
    """Fields that differ, ``{name: (before, after)}`` in schema order; a missing field counts as 0."""
    pairs = {name: (int(before.get(name, 0)), int(after.get(name, 0))) for name in LEDGER_FIELDS}
    return {name: pair for name, pair in pairs.items() if pair[0] != pair[1]}


# ---------------------------------------------------------------------------------------------------- owners of a slot
@dataclass(frozen=True, slots=True)
class SlotOwner:
    """One owner of a slot. ``kind``: free, tree, request, slack, leaked, reserved or out_of_range."""

    kind: str
    detail: str


@dataclass(frozen=True, slots=True)
class SlotReport:
    """All owners of one physical slot; exactly one is the rule."""

    rank: int
    pool: str
    slot: int
    owners: tuple[SlotOwner, ...]

    def describe(self) -> str:
        where = f"rank {self.rank}, {self.pool} slot {self.slot}"
        text = " AND ".join(f"{o.kind}: {o.detail}" for o in self.owners)
        warning = "  ** more than one owner **" if len(self.owners) > 1 else ""
        return f"{where} — {text}{warning}"


def _positions(slots: IntArray, slot: int) -> list[int]:
    return [int(i) for i in np.flatnonzero(slots == slot)]


def _node_owners(view: RankView, pool: str, slot: int) -> list[SlotOwner]:
    found = []
    for node in view.nodes:
        value = node.full if pool == "full" else node.swa
        locked = node.full_locked if pool == "full" else node.swa_locked
        size = 0 if value is None else len(value)
        for at in _positions(value, slot) if value is not None else ():
            state = "protected" if locked else "evictable"
            live = "" if pool == "swa" else (", SWA live" if node.swa is not None else ", SWA tombstone")
            found.append(SlotOwner("tree", f"node {node.node_id} token {at} of {size}, {state}{live}"))
    return found


def _row_owners(view: RankView, pool: str, slot: int) -> list[SlotOwner]:
    found = []
    for row in view.rows:
        slots = row.full if pool == "full" else lookup(view.mapping, row.live)
        base = row.start if pool == "full" else row.start + row.swa_from
        for at in _positions(slots, slot):
            found.append(SlotOwner("request", f"rid {row.rid} row {row.row} position {base + at}"))
    return found


def who_owns(cache: Any, rank: int, pool: str, slot: int, live_reqs: Iterable[Any]) -> SlotReport:
    """Every owner of one slot of ``pool`` ("full" or "swa") on ``rank``; never empty, never mutates."""
    view = rank_view(cache, rank, live_reqs)
    side = view.pool(pool)
    if slot < side.first or slot >= side.end:
        kind, detail = "out_of_range", f"usable slots are {side.first}..{side.end - 1}"
        if 0 <= slot < side.first:
            kind, detail = "reserved", "page 0 is padding and means unmapped"
        return SlotReport(rank, pool, slot, (SlotOwner(kind, detail),))
    owners = _node_owners(view, pool, slot) + _row_owners(view, pool, slot)
    free = int(np.count_nonzero(side.free == slot // side.page_size))
    owners += [SlotOwner("free", f"page {slot // side.page_size} is on the free list")] * free
    if not owners:
        owned = owned_mask(view, pool)
        page = slot // side.page_size * side.page_size
        if side.page_size > 1 and owned[page : page + side.page_size].any():
            owners = [SlotOwner("slack", f"page {slot // side.page_size} has an owner, this slot has none")]
        else:
            owners = [SlotOwner("leaked", f"page {slot // side.page_size} is neither free nor owned")]
    return SlotReport(rank, pool, slot, tuple(owners))


# ------------------------------------------------------------------------------------------------------ slot-level audit
def owned_mask(view: RankView, pool: str) -> npt.NDArray[np.bool_]:
    """Slots of ``pool`` that a node or a row owns; ids outside the pool are left out."""
    side = view.pool(pool)
    if pool == "full":
        parts = [n.full for n in view.nodes if n.full is not None] + [r.full for r in view.rows]
    else:
        parts = [n.swa for n in view.nodes if n.swa is not None] + request_swa(view)
    mask = np.zeros(side.end, np.bool_)
    for part in parts:
        mask[part[(part >= 0) & (part < side.end)]] = True
    return mask


def _pool_audit(view: RankView, side: PoolView) -> list[Violation]:
    """Free pages that are owned, pages that are neither, pages twice on the free list: balances cannot hide them."""
    page = side.page_size
    pages = side.end // page
    inside = side.free[(side.free >= 0) & (side.free < pages)]
    counts = np.bincount(inside, minlength=pages)
    owned = owned_mask(view, side.name).reshape(-1, page).any(axis=1)
    free = counts > 0
    checks = (
        ("free_and_owned", free & owned, "pages are free and owned"),
        ("leaked", ~free & ~owned, "pages are neither free nor owned"),
        ("freed_twice", counts > 1, "pages are on the free list more than once"),
    )
    found = []
    for kind, mask, text in checks:
        hits = np.flatnonzero(mask[1:]) + 1
        if len(hits):
            slots = tuple(int(h) * page for h in hits[:_MAX_SLOTS])
            found.append(Violation(kind, view.rank, side.name, f"{len(hits)} {text}", slots))
    if len(inside) != len(side.free) or counts[0]:
        found.append(Violation("free_out_of_range", view.rank, side.name, "the free list holds unusable ids"))
    return found


def _offset_audit(view: RankView) -> list[Violation]:
    """A page's mapping keeps offsets: token i of a FULL page maps to token i of one SWA page (attention reads pages)."""
    page = view.page_size
    mapped = np.flatnonzero(view.mapping)
    wrong = mapped[view.mapping[mapped] % page != mapped % page]
    heads = view.mapping[mapped // page * page]
    wrong = np.union1d(wrong, mapped[heads // page != view.mapping[mapped] // page])
    if not len(wrong):
        return []
    detail = f"{len(wrong)} mapped slots do not keep the offset in the page of their first token"
    return [Violation("mapping_offset", view.rank, "", detail, tuple(int(i) for i in wrong[:_MAX_SLOTS]))]


def audit_cache(cache: Any, rank: int, live_reqs: Iterable[Any], *, require_idle: bool) -> list[Violation]:
    """The full check of one rank: the snapshot's rules plus slot-level ownership, which finds faults that cancel out.

    (One page leaked and one page freed while owned leave every sum intact; D08.) Read-only. A sound rank costs what its
    snapshot costs; slots are looked at one by one only where something is wrong.
    """
    from sgl_jax.srt.mem_cache.ledger.snapshot import snapshot_of

    view = rank_view(cache, rank, live_reqs)
    snapshot, regular = snapshot_of(cache, view)
    found = violations(snapshot, require_idle)
    if require_idle:
        for pool in POOLS:
            held = snapshot[f"{pool}_tree_protected"]
            if held:
                found.append(
                    Violation("idle_tree_protected", rank, pool, f"{held} slots are locked while idle")
                )
    if regular and not found:
        return []
    for pool in POOLS:
        found.extend(_pool_audit(view, view.pool(pool)))
    return found + _offset_audit(view)
