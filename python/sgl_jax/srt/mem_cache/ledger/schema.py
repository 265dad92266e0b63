"""The one per-rank ledger schema (RFC-0035 section 6), the same 31 keys for every SWA-capable cache.

Units are token slots of one DP rank unless a field says "total" (cumulative events since the cache was built).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, fields
from typing import Any

POOLS = ("full", "swa")

#: Names under which caches count events in ``_ledger_event_totals[rank][name]`` (created lazily, never by a snapshot).
EVENT_NAMES = ("full_evicted_total", "swa_evicted_total", "tombstone_created_total", "tombstone_healed_total")

#: Diagnostics of one pool that must be zero at every snapshot outside a free group.
POOL_DIAGNOSTICS = (
    "duplicate_tree_owner_count",
    "tree_bucket_overlap_count",
    "duplicate_request_owner_count",
    "request_tree_overlap_count",
)

#: Diagnostics of the FULL -> SWA mapping that must be zero at every snapshot.
MAPPING_DIAGNOSTICS = (
    "mapping_invalid_count",
    "mapping_duplicate_count",
    "mapping_source_mismatch_count",
    "mapping_owner_mismatch_count",
    "mapping_pair_mismatch_count",
)


@dataclass(frozen=True, slots=True)
class CacheLedger:
    """Who owns the slots of one rank, pool by pool.

    ``available`` from the allocator's free structure, ``tree_*`` from node values (split by each pool's own lock),
    ``request_owned`` from live rows, ``reserved_page_slack`` = unowned slots of pages that have an owner (DECISIONS 12).
    Nothing is computed as a residual: the sum is a test, not a definition.
    """

    dp_rank: int
    full_capacity: int
    full_available: int
    full_tree_evictable: int
    full_tree_protected: int
    full_request_owned: int
    full_reserved_page_slack: int
    full_duplicate_tree_owner_count: int
    full_tree_bucket_overlap_count: int
    full_duplicate_request_owner_count: int
    full_request_tree_overlap_count: int
    full_evicted_total: int
    swa_capacity: int
    swa_available: int
    swa_tree_evictable: int
    swa_tree_protected: int
    swa_request_owned: int
    swa_reserved_page_slack: int
    swa_duplicate_tree_owner_count: int
    swa_tree_bucket_overlap_count: int
    swa_duplicate_request_owner_count: int
    swa_request_tree_overlap_count: int
    swa_evicted_total: int
    mapping_nonzero_count: int
    mapping_invalid_count: int
    mapping_duplicate_count: int
    mapping_source_mismatch_count: int
    mapping_owner_mismatch_count: int
    mapping_pair_mismatch_count: int
    tombstone_created_total: int
    tombstone_healed_total: int

    def to_dict(self) -> dict[str, int]:
        """Plain ints keyed by field name, in schema order."""
        return {name: int(getattr(self, name)) for name in LEDGER_FIELDS}

    @classmethod
    def from_dict(cls, snapshot: Mapping[str, Any]) -> CacheLedger:
        """Rebuild from a snapshot. Raises ValueError naming missing or unknown fields."""
        missing = [name for name in LEDGER_FIELDS if name not in snapshot]
        unknown = [name for name in snapshot if name not in LEDGER_FIELDS]
        if missing or unknown:
            raise ValueError(f"not a cache ledger: missing fields {missing}, unknown fields {unknown}")
        return cls(**{name: int(snapshot[name]) for name in LEDGER_FIELDS})


LEDGER_FIELDS: tuple[str, ...] = tuple(f.name for f in fields(CacheLedger))


@dataclass(frozen=True, slots=True)
class PoolTally:
    """Owners of one pool of one rank, before they are written into the schema."""

    capacity: int
    available: int
    tree_evictable: int = 0
    tree_protected: int = 0
    request_owned: int = 0
    reserved_page_slack: int = 0
    duplicate_tree_owner_count: int = 0
    tree_bucket_overlap_count: int = 0
    duplicate_request_owner_count: int = 0
    request_tree_overlap_count: int = 0


@dataclass(frozen=True, slots=True)
class MappingTally:
    """Health of one rank's FULL -> SWA mapping; the field names follow the schema without their prefix."""

    nonzero_count: int
    invalid_count: int = 0
    duplicate_count: int = 0
    source_mismatch_count: int = 0
    owner_mismatch_count: int = 0
    pair_mismatch_count: int = 0


def assemble(
    rank: int, full: PoolTally, swa: PoolTally, mapping: MappingTally, events: Mapping[str, int]
) -> CacheLedger:
    """Join the tallies and the cumulative event counters of one rank into the schema."""
    values: dict[str, int] = {"dp_rank": rank}
    for pool, tally in (("full", full), ("swa", swa)):
        for item in fields(PoolTally):
            values[f"{pool}_{item.name}"] = int(getattr(tally, item.name))
    for item in fields(MappingTally):
        values[f"mapping_{item.name}"] = int(getattr(mapping, item.name))
    for name in EVENT_NAMES:
        values[name] = int(events.get(name, 0))
    return CacheLedger(**values)
