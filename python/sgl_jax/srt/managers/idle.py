"""Idle means nothing waiting, seated or in flight. On every busy -> idle edge the books must balance, slot by slot.

Every edge checks the counters and audits the ledger of every rank once (DECISIONS 14; milliseconds at a million slots), faults
that cancel out in the sums included. A flush, and with ``--debug-cache`` every edge, also checks the cache's own structures. A violation
writes a crash bundle and raises: a server that lost track of its memory must not go on.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from sgl_jax.srt.managers.kv_memory import KVMemory
from sgl_jax.srt.managers.memory_checks import check_memory, counter_violations
from sgl_jax.srt.managers.overlap import Pipeline
from sgl_jax.srt.managers.roster import Roster
from sgl_jax.srt.mem_cache.errors import LedgerViolationError, Violation
from sgl_jax.srt.mem_cache.ledger import audit_cache, write_crash_bundle

logger = logging.getLogger(__name__)


class IdleMonitor:
    """Watches for the busy -> idle edge. ``crash_dir``: where bundles go; ``resolved_args``: what they record."""

    def __init__(
        self,
        roster: Roster,
        memory: KVMemory,
        pipeline: Pipeline,
        *,
        crash_dir: str | Path = "crash-bundles",
        resolved_args: Mapping[str, Any] | None = None,
    ) -> None:
        self._roster = roster
        self._memory = memory
        self._pipeline = pipeline
        self._crash_dir = Path(crash_dir)
        self._resolved_args = dict(resolved_args or {})
        self._was_busy = False
        self._deep = bool(getattr(memory.allocator, "strict", False))
        self.became_idle: Callable[[], None] = lambda: None

    @property
    def memory(self) -> KVMemory:
        return self._memory

    # -------------------------------------------------------------------------------------------------------------- state
    def is_fully_idle(self) -> bool:
        """Nothing waiting, seated, chunked, or launched and not processed (D34)."""
        return self._roster.is_empty() and len(self._pipeline) == 0

    def pending(self) -> list[str]:
        """What keeps the scheduler from being idle, in words."""
        roster = self._roster
        chunked = sum(req is not None for req in roster.chunked)
        counts = (
            (roster.queued_count, "queued request(s)"),
            (roster.running_count - chunked, "running request(s)"),
            (chunked, "request(s) between prefill chunks"),
            (len(self._pipeline), "launched step(s) not processed yet"),
        )
        return [f"{count} {what}" for count, what in counts if count]

    def observe(self, busy: bool) -> None:
        """Call once per loop turn; runs the checks on the edge from busy to idle. Raises LedgerViolationError."""
        if busy:
            self._was_busy = True
        elif self._was_busy and self.is_fully_idle():
            self._was_busy = False
            self.on_idle()

    def on_idle(self) -> None:
        """The edge itself. Raises LedgerViolationError, after the crash bundle, with all that counters and ledger find."""
        memory = self._memory
        found = counter_violations(memory.cache, memory.allocator, memory.rows, self._roster.dp_size)
        check = self.violations if self._deep else self._ledger_violations
        self._fail_on(found + check(require_idle=True))
        self.became_idle()

    # ------------------------------------------------------------------------------------------------------------- checks
    def check_memory(self) -> None:
        """Counters only. Raises ValueError starting with ``[dp=r][pool]`` for the first bound that is broken, and for held rows."""
        memory = self._memory
        check_memory(memory.cache, memory.allocator, memory.rows, self._roster.dp_size)

    def audit(self, *, require_idle: bool) -> None:
        """The slot-level check of every rank. Writes a crash bundle and raises LedgerViolationError on a violation."""
        self._fail_on(self.violations(require_idle=require_idle))

    def _fail_on(self, found: list[Violation]) -> None:
        if not found:
            return
        bundle = self._write_bundle()
        error = LedgerViolationError(found, f"KV ownership broken; crash bundle in {bundle}")
        logger.critical("%s", error)
        raise error

    def _ledger_violations(self, *, require_idle: bool) -> list[Violation]:
        """The ledger of every rank, slot by slot."""
        memory, roster = self._memory, self._roster
        if not memory.hybrid:
            return self._plain_leaks() if require_idle else []
        found: list[Violation] = []
        for rank in range(roster.dp_size):
            live = roster.live_requests(rank)
            found.extend(audit_cache(memory.cache, rank, live, require_idle=require_idle))
        return found

    def violations(self, *, require_idle: bool) -> list[Violation]:
        """Everything that is wrong now: the allocator's and the cache's own invariants, and the audit of every rank."""
        found: list[Violation] = []
        for part in (self._memory.allocator, self._memory.cache):
            check = getattr(part, "check", None)
            if check is not None:
                found.extend(check())
        found.extend(self._ledger_violations(require_idle=require_idle))
        return found

    def _plain_leaks(self) -> list[Violation]:
        """Models without a window pool: available + evictable == capacity, nothing protected."""
        found = []
        for rank in range(self._roster.dp_size):
            capacity = self._memory.capacity(rank).full
            available, evictable = self._memory.available(rank).full, self._memory.evictable(rank).full
            protected = self._memory.protected(rank).full
            if protected or available + evictable != capacity:
                detail = f"capacity {capacity}, available {available}, evictable {evictable}, protected {protected}"
                found.append(Violation("idle_balance", rank, "full", detail))
        return found

    def _write_bundle(self) -> Path:
        memory = self._memory
        snapshots = []
        if memory.hybrid:
            for rank in range(self._roster.dp_size):
                live = self._roster.live_requests(rank)
                snapshots.append(memory.cache.cache_ledger_snapshot(rank, live))
        tree = memory.cache.describe()
        return write_crash_bundle(
            self._crash_dir, snapshots, tree, list(memory.operations), self._resolved_args
        )
