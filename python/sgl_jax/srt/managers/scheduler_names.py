"""sglang-jax's names on the scheduler (CONTRACT 11): thin methods over the managers.

They also run on objects made with ``__new__`` that carry only the attributes a method reads: ``tree_cache``,
``token_to_kv_pool_allocator``, ``req_to_token_pool``, and per-rank lists such as ``chunked_reqs``.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any

from sgl_jax.srt.managers.idle import IdleMonitor
from sgl_jax.srt.managers.ledger_view import ledger_snapshots, live_requests
from sgl_jax.srt.managers.lifecycle import Lifecycle
from sgl_jax.srt.managers.memory_checks import check_memory
from sgl_jax.srt.managers.roster import Roster
from sgl_jax.srt.managers.token_ratio import NewTokenRatio
from sgl_jax.srt.mem_cache.common import release_kv_cache
from sgl_jax.srt.mem_cache.errors import LedgerViolationError
from sgl_jax.srt.mem_cache.ledger import readonly_fingerprint, validate_swa_cache_ledger

_REQUEST_LISTS = ("waiting_queue", "grammar_queue", "pending_reqs", "chunked_reqs", "abort_reqs")
_BATCHES = ("running_batch", "cur_batch", "last_batch")


def requests_by_name(owner: Any) -> Iterator[Any]:
    """Live requests of an object built the sglang-jax way, from its lists and batches; one may come several times."""
    for name in _REQUEST_LISTS:
        yield from (req for req in getattr(owner, name, None) or () if req is not None)
    for name in _BATCHES:
        for info in getattr(getattr(owner, name, None), "reqs_info", None) or ():
            yield from info.reqs or ()
            if info.chunked_req is not None:
                yield info.chunked_req


class SchedulerNames:
    """Base of the scheduler. ``chunked_reqs``: per rank, the prompt that is between two chunks, or None."""

    dp_size: int = 1
    tree_cache: Any
    token_to_kv_pool_allocator: Any
    req_to_token_pool: Any
    chunked_reqs: list[Any]
    waiting_queue: list[Any]
    idle: IdleMonitor
    lifecycle: Lifecycle
    roster: Roster
    ratio: NewTokenRatio

    # --------------------------------------------------------------------------------------------------------------- idle
    def is_fully_idle(self) -> bool:
        return self.idle.is_fully_idle()

    def check_memory(self) -> None:
        """Counter bounds per pool and rank, and no row held. Raises ValueError."""
        check_memory(self.tree_cache, self.token_to_kv_pool_allocator, self.req_to_token_pool, self.dp_size)

    def check_tree_cache(self) -> None:
        """The cache's own invariants. Raises LedgerViolationError listing all that are broken."""
        found = self.tree_cache.check()
        if found:
            raise LedgerViolationError(found, "prefix cache")

    def on_idle(self) -> None:
        """When fully idle: memory, tree, then the new-token ratio starts over. (The loop's own edge: ``IdleMonitor``.)"""
        if self.is_fully_idle():
            self.check_memory()
            self.check_tree_cache()
            self.new_token_ratio = self.init_new_token_ratio

    def _own_ratio(self) -> NewTokenRatio:
        made: NewTokenRatio = self.__dict__.setdefault("ratio", NewTokenRatio(1.0))
        return made

    @property
    def new_token_ratio(self) -> float:
        return self._own_ratio().value

    @new_token_ratio.setter
    def new_token_ratio(self, value: float) -> None:
        self._own_ratio().value = value

    @property
    def init_new_token_ratio(self) -> float:
        return self._own_ratio().initial

    @init_new_token_ratio.setter
    def init_new_token_ratio(self, value: float) -> None:
        self._own_ratio().initial = value

    # -------------------------------------------------------------------------------------------------------------- flush
    def _can_flush_cache(self) -> tuple[bool, str]:
        reasons = self.idle.pending()
        return not reasons, "; ".join(reasons)

    def flush_cache(self) -> tuple[bool, str, int]:
        """(flushed, message, available tokens over the ranks). Busy: ``(False, reasons, 0)`` and nothing is changed.

        Tree, then rows, then allocator; over a window pool the ledger is validated before and after.
        """
        possible, why = self._can_flush_cache()
        if not possible:
            return False, f"cache not flushed: {why}", 0
        swa = self.tree_cache.supports_swa() is True
        if swa:
            self._snapshot_swa_cache_ledger(require_idle=True)
        self.tree_cache.reset()
        self.req_to_token_pool.clear()
        self.token_to_kv_pool_allocator.clear()
        if swa:
            self._snapshot_swa_cache_ledger(require_idle=True)
        free = sum(
            int(self.token_to_kv_pool_allocator.available_size(dp_rank=r)) for r in range(self.dp_size)
        )
        return True, "cache flushed", free

    # ------------------------------------------------------------------------------------------------------------- ledger
    def _snapshot_swa_cache_ledger(self, require_idle: bool) -> list[dict[str, int]]:
        """One ledger per rank, validated. Raises RuntimeError (shared rid, mutation) or ValueError (violation)."""
        own = "roster" in self.__dict__
        live = live_requests(self.roster) if own else list(requests_by_name(self))
        snapshots = ledger_snapshots(
            self.tree_cache, self.dp_size, live, self._cache_ledger_readonly_fingerprint
        )
        for snapshot in snapshots:
            validate_swa_cache_ledger(snapshot, require_idle=require_idle)
        return snapshots

    def _cache_ledger_readonly_fingerprint(self, live_reqs: Iterable[Any] = ()) -> Any:
        """Digest of all ownership state: equal before and after a call that moved none."""
        return readonly_fingerprint(self.tree_cache, live_reqs)

    # ------------------------------------------------------------------------------------------------------------- chunks
    def _prepare_chunked_reqs_to_exclude(self) -> list[Any]:
        """The prompts between two chunks; what a chunk computed enters the cache, unless there is nothing new (D32)."""
        parked = [req for req in self.chunked_reqs if req is not None]
        for req in parked:
            seats = self.roster.seats_of(req) if "roster" in self.__dict__ else None
            if seats is not None:
                seats.settle(req)
            if len(req.fill_ids) > len(req.prefix_indices):
                self.tree_cache.cache_unfinished_req(req)
            if seats is not None:
                seats.reread(req)
        return parked

    def _retract_parked_chunked_reqs(self) -> list[Any]:
        """Retract every prompt that is between two chunks: released without an insert, first in its queue again (D30).

        Legal only while no step in flight carries one of them.
        """
        retracted = [(rank, req) for rank, req in enumerate(self.chunked_reqs) if req is not None]
        for rank, req in retracted:
            if "lifecycle" in self.__dict__:
                self.lifecycle.retract(req)
                continue
            release_kv_cache(req, self.tree_cache, is_insert=False, allow_overallocated=True)
            req.reset_for_retract()
            self.chunked_reqs[rank] = None
            self.waiting_queue.insert(0, req)
        return [req for _, req in retracted]
