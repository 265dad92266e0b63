"""What a ledger reads: the free structure of the allocator, the nodes of a tree and the rows of live requests.

Everything here is read-only: no key is created, no lazy state is merged, no array of the cache is written.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Any, NamedTuple, Protocol

import numpy as np
import numpy.typing as npt

IntArray = npt.NDArray[np.int32]
_EMPTY: IntArray = np.empty(0, np.int32)


class OwnedNode(NamedTuple):
    """One tree node as the ledger sees it. Arrays are token slots, int32 [node length]; None = that pool owns nothing.

    Locks: 0 or False = evictable; anything else = protected (a count makes fingerprints sharper).
    """

    node_id: int
    full: IntArray | None
    swa: IntArray | None
    full_locked: int
    swa_locked: int


class LedgerTree(Protocol):
    """The one method a tree cache offers to the ledger; a cache without a tree does not have it."""

    def iter_ledger_nodes(self, dp_rank: int) -> Iterator[OwnedNode]: ...


@dataclass(frozen=True, slots=True)
class PoolView:
    """One pool of one rank. ``free`` holds page ids (slot ids at page size 1), duplicates kept as they are."""

    name: str
    page_size: int
    capacity: int
    free: IntArray

    @property
    def first(self) -> int:
        """First usable slot: page 0 is reserved."""
        return self.page_size

    @property
    def end(self) -> int:
        """One past the last usable slot."""
        return self.page_size + self.capacity

    @property
    def available(self) -> int:
        return len(self.free) * self.page_size


@dataclass(frozen=True, slots=True)
class RequestRow:
    """Slots one live request owns::

    [0, protected)              tree-owned, not listed here
    [protected, allocated)      ``full``: request-owned FULL
    [max(cursor, protected), allocated)   ``full[swa_from:]``: request-owned SWA, through the mapping
    """

    rid: str
    row: int
    start: int
    full: IntArray
    swa_from: int

    @property
    def live(self) -> IntArray:
        """FULL slots whose SWA peers the request still owns."""
        return self.full[self.swa_from :]


@dataclass(frozen=True, slots=True)
class RankView:
    """Everything a snapshot of one rank needs, gathered once."""

    rank: int
    page_size: int
    full: PoolView
    swa: PoolView
    mapping: IntArray
    rows: tuple[RequestRow, ...]
    nodes: tuple[OwnedNode, ...]

    def pool(self, name: str) -> PoolView:
        """Raises ValueError for a name that is neither "full" nor "swa"."""
        if name not in ("full", "swa"):
            raise ValueError(f"pool {name!r}: use 'full' or 'swa'")
        return self.full if name == "full" else self.swa


def rank_of(req: Any) -> int:
    """Rank of a request; a missing rank means 0, as everywhere outside multi-rank SWA."""
    rank = getattr(req, "dp_rank", None)
    return 0 if rank is None else int(rank)


def _join(parts: list[IntArray]) -> IntArray:
    kept = [part for part in parts if len(part)]
    if not kept:
        return _EMPTY
    return kept[0] if len(kept) == 1 else np.concatenate(kept)


def pool_view(name: str, sub: Any, rank: int, page_size: int) -> PoolView:
    """Read the free structure of one sub-allocator: ``free_slots`` at page size 1, free and released pages above."""
    if hasattr(sub, "pages_per_rank"):
        released = sub.release_pages[rank] if sub.release_pages is not None else _EMPTY
        free = _join([np.asarray(sub.free_pages[rank], np.int32), np.asarray(released, np.int32)])
        return PoolView(name, page_size, int(sub.pages_per_rank) * page_size, free)
    return PoolView(name, page_size, int(sub.size_per_rank), np.asarray(sub.free_slots[rank], np.int32))


def rank_mapping(allocator: Any, rank: int) -> IntArray:
    """The rank's FULL -> SWA mapping: the array itself, or the rank's entry of the per-rank list."""
    mapping = allocator.full_to_swa_index_mapping
    if isinstance(mapping, (list, tuple)):
        mapping = mapping[rank]
    return np.asarray(mapping, np.int32)


def request_rows(pool: Any, live_reqs: Iterable[Any], rank: int, tree_backed: bool) -> Iterator[RequestRow]:
    """Rows of the live requests of one rank, each object once. Without a tree nothing of a row is tree-owned."""
    seen: set[int] = set()
    for req in live_reqs:
        if id(req) in seen or rank_of(req) != rank or req.req_pool_idx is None:
            continue
        seen.add(id(req))
        protected = int(req.cache_protected_len) if tree_backed else 0
        allocated = max(int(req.kv_allocated_len), protected)
        cursor = min(max(int(req.swa_evicted_seqlen), protected), allocated)
        row = int(req.req_pool_idx)
        slots = np.asarray(pool.req_to_token[row, protected:allocated], np.int32)
        yield RequestRow(str(getattr(req, "rid", "?")), row, protected, slots, cursor - protected)


def rank_view(cache: Any, rank: int, live_reqs: Iterable[Any]) -> RankView:
    """Gather one rank. Raises ValueError for a rank the allocator does not have."""
    allocator = cache.token_to_kv_pool_allocator
    dp_size = int(getattr(allocator, "dp_size", 1))
    if not 0 <= rank < dp_size:
        raise ValueError(
            f"dp_rank={rank} is outside [0, {dp_size}): the server runs {dp_size} data-parallel ranks"
        )
    page_size = int(allocator.page_size)
    tree_nodes = getattr(cache, "iter_ledger_nodes", None)
    rows = tuple(request_rows(cache.req_to_token_pool, live_reqs, rank, tree_nodes is not None))
    return RankView(
        rank=rank,
        page_size=page_size,
        full=pool_view("full", allocator.full_attn_allocator, rank, page_size),
        swa=pool_view("swa", allocator.swa_attn_allocator, rank, page_size),
        mapping=rank_mapping(allocator, rank),
        rows=rows,
        nodes=tuple(tree_nodes(rank)) if tree_nodes is not None else (),
    )
