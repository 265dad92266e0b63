"""Build one rank's ledger snapshot (RFC-0035 section 6): read-only, exact, nothing residual."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from sgl_jax.srt.mem_cache.ledger.exact import tally_exact
from sgl_jax.srt.mem_cache.ledger.regular import tally_regular
from sgl_jax.srt.mem_cache.ledger.schema import assemble
from sgl_jax.srt.mem_cache.ledger.source import RankView, rank_view


def event_totals(cache: Any, rank: int) -> Mapping[str, int]:
    """Cumulative events of one rank, read without creating a key."""
    return _of_rank(getattr(cache, "_ledger_event_totals", None), rank)


def event_token_totals(cache: Any, rank: int) -> Mapping[str, int]:
    """Tokens that those events were about, where a cache counts them: tombstones are events of whole nodes."""
    return _of_rank(getattr(cache, "_event_token_totals", None), rank)


def _of_rank(totals: Mapping[int, Mapping[str, int]] | None, rank: int) -> Mapping[str, int]:
    return (totals or {}).get(rank) or {}


def build_snapshot(cache: Any, dp_rank: int, live_reqs: Iterable[Any]) -> dict[str, int]:
    """The 31-key ledger of ``dp_rank``; one implementation for Unified, legacy SWA and chunk caches.

    Legal outside a free group and between scheduler steps. Never mutates: no key is created, no lazy free list merged.
    ``live_reqs`` are all requests that hold a row, of any rank; each object counts once. Raises ValueError for a rank the
    allocator does not have. Cost: one pass over the mapping and over what is owned, page by page when the state is sound.
    """
    return snapshot_of(cache, rank_view(cache, dp_rank, live_reqs))[0]


def snapshot_of(cache: Any, view: RankView) -> tuple[dict[str, int], bool]:
    """The ledger of a gathered rank, and whether the state is regular: then balanced sums leave no fault to look for."""
    regular = tally_regular(view)
    full, swa, mapping = regular or tally_exact(view)
    ledger = assemble(view.rank, full, swa, mapping, event_totals(cache, view.rank))
    return ledger.to_dict(), regular is not None
