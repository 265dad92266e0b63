"""The counter checks of an idle server: bounds per pool and rank, and no request row held. Pure reads, no instance state of a cache."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from sgl_jax.srt.mem_cache.errors import Violation


@dataclass(frozen=True, slots=True)
class PoolCounts:
    """One pool of one rank, in tokens."""

    rank: int
    pool: str
    page_size: int
    capacity: int
    available: int
    evictable: int
    protected: int

    @property
    def where(self) -> str:
        return f"[dp={self.rank}][{self.pool}]"


def pool_capacity(allocator: Any, page_size: int) -> int:
    """Usable tokens of one rank of a single-pool allocator: whole pages where it has pages."""
    pages = getattr(allocator, "pages_per_rank", None)
    return int(pages * page_size if pages is not None else allocator.size_per_rank)


def pool_counts(cache: Any, allocator: Any, rank: int) -> list[PoolCounts]:
    """FULL and, over a dual allocator, SWA counts of a rank."""
    page = int(allocator.page_size)
    dual = hasattr(type(allocator), "swa_available_size") or "swa_attn_allocator" in vars(allocator)
    if not dual:
        full = (pool_capacity(allocator, page), int(allocator.available_size(dp_rank=rank)))
        return [
            PoolCounts(
                rank, "full", page, *full, cache.full_evictable_size(rank), cache.full_protected_size(rank)
            )
        ]
    counts = []
    for pool, sub in (("full", allocator.full_attn_allocator), ("swa", allocator.swa_attn_allocator)):
        counts.append(
            PoolCounts(
                rank,
                pool,
                page,
                pool_capacity(sub, page),
                int(getattr(allocator, f"{pool}_available_size")(dp_rank=rank)),
                int(getattr(cache, f"{pool}_evictable_size")(rank)),
                int(getattr(cache, f"{pool}_protected_size")(rank)),
            )
        )
    return counts


def check_counts(counts: PoolCounts) -> None:
    """Raise ValueError for the first bound that is broken.

    A page may be taken for a single owned token, so the bounds are: at least one owned token per taken page, at most all of them.
    The ledger audit does what counters cannot.
    """
    c = counts
    if c.capacity % c.page_size or c.available % c.page_size:
        raise ValueError(
            f"{c.where} capacity={c.capacity} and available={c.available} must be page-aligned ({c.page_size})"
        )
    if not 0 <= c.available <= c.capacity:
        raise ValueError(f"{c.where} available={c.available} is outside [0, {c.capacity}]")
    owned, reserved = c.evictable + c.protected, c.capacity - c.available
    if owned > reserved:
        raise ValueError(
            f"{c.where} owned={owned}, reserved_capacity={reserved}: more slots have owners than are taken"
        )
    if owned < reserved // c.page_size:
        raise ValueError(
            f"{c.where} owned={owned}, reserved_pages={reserved // c.page_size}: taken pages without an owner"
        )


def check_rows(rows: Any) -> None:
    """Raise ValueError while a request row is held."""
    free = rows.available_size()
    if free != rows.size:
        raise ValueError(f"{rows.size - free} of {rows.size} request rows are held while idle")


def counter_violations(cache: Any, allocator: Any, rows: Any, dp_size: int) -> list[Violation]:
    """All that :func:`check_memory` would raise for, one after the other."""
    found = []
    for rank in range(dp_size):
        for counts in pool_counts(cache, allocator, rank):
            try:
                check_counts(counts)
            except ValueError as error:
                found.append(Violation("counters", rank, counts.pool, str(error)))
    try:
        check_rows(rows)
    except ValueError as error:
        found.append(Violation("held_rows", 0, "", str(error)))
    return found


def check_memory(cache: Any, allocator: Any, rows: Any, dp_size: int) -> None:
    """All counter checks of an idle server. Raises ValueError."""
    for rank in range(dp_size):
        for counts in pool_counts(cache, allocator, rank):
            check_counts(counts)
    check_rows(rows)
