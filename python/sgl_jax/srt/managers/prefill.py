"""Chooses what the next extend step prefills, per rank: the next chunk of a long prompt first, then waiting requests.

Admission of one request, in order: match on its rank, lock (the receipt goes on the request), room of both pools against its
need and the reservations of running requests, row and slots. Whatever is refused leaves request, cache and pools as they were
(D32); slots are allocated here and now, so nothing can run short between admission and launch (D43).
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from sgl_jax.srt.managers.admission import (
    Room,
    chunk_end,
    fit_extend,
    refusal,
    request_need,
    reserved_by_running,
)
from sgl_jax.srt.managers.batch import ExtendRow
from sgl_jax.srt.managers.kv_memory import KVMemory
from sgl_jax.srt.managers.lifecycle import Lifecycle
from sgl_jax.srt.managers.policy import SchedulePolicy
from sgl_jax.srt.managers.request import EMPTY_SLOTS, Req, WaitReason
from sgl_jax.srt.managers.roster import Roster
from sgl_jax.srt.mem_cache.page import floor_page
from sgl_jax.srt.mem_cache.sizing import CapRules, chunk_within

_NO_SLOT = -1


class PrefillScheduler:
    """Plans extend rows. ``step_tokens``: most prompt tokens of one rank in one step; ``whole_prompt_tokens``: the same for a
    prompt that cannot be cut (chunking off) and is alone in its step."""

    def __init__(
        self,
        roster: Roster,
        memory: KVMemory,
        lifecycle: Lifecycle,
        policy: SchedulePolicy,
        rules: CapRules,
        step_tokens: int,
        whole_prompt_tokens: int,
    ) -> None:
        self._roster = roster
        self._memory = memory
        self._lifecycle = lifecycle
        self._policy = policy
        self._rules = rules
        self._step_tokens = step_tokens
        self._whole = whole_prompt_tokens
        self.admitted: Callable[[Req, int], None] = lambda req, cached: None
        self.ratio: Callable[[], float] = lambda: 1.0

    def plan(self) -> list[list[ExtendRow]]:
        """Rows per rank; all empty when there is nothing to prefill. Admitted requests have their seats already."""
        return [self._plan_rank(rank) for rank in range(self._roster.dp_size)]

    def _plan_rank(self, rank: int) -> list[ExtendRow]:
        rows: list[ExtendRow] = []
        budget = self._step_tokens
        chunked = self._roster.chunked[rank]
        if chunked is not None:
            row = self._next_chunk(chunked, rank, budget)
            if row is not None:
                rows.append(row)
                budget -= row.end - row.start
            if self._roster.chunked[rank] is not None:
                if self._roster.waiting[rank]:
                    self._roster.waiting[rank][0].wait_reason = WaitReason.CHUNK_AHEAD
                return rows
        taken: list[Req] = []
        for req in self._policy.order(self._roster.waiting[rank]):
            row_or_reason = self._admit(req, rank, budget, first=not rows)
            if isinstance(row_or_reason, WaitReason):
                req.wait_reason = row_or_reason
                break
            rows.append(row_or_reason)
            taken.append(req)
            budget -= row_or_reason.end - row_or_reason.start
            if self._roster.chunked[rank] is not None:
                break
        self._roster.dequeue(rank, taken)
        return rows

    # ---------------------------------------------------------------------------------------------------------- admission
    def _admit(self, req: Req, rank: int, budget: int, *, first: bool) -> ExtendRow | WaitReason:
        seats = self._roster.seats[rank]
        if seats.free_count == 0:
            return WaitReason.NO_SEAT
        if budget <= 0:
            return WaitReason.TOKEN_BUDGET
        req.init_next_round_input(self._memory.cache)
        start, total = len(req.prefix_indices), len(req.fill_ids)
        end = self._wanted_end(start, total, budget, first)
        if end <= start:
            self._forget_match(req)
            return WaitReason.TOKEN_BUDGET
        self._lock(req)
        alone = seats.taken_count == 0
        reason = self._refusal(req, rank, start, total, alone)
        if reason is None:
            end = self._shrunk_end(req, rank, start, end, total, alone)
            reason = self._take(req, rank, start, end)
        if reason is None:
            return self._seat(req, rank, start, end, total)
        self._unlock(req)
        if alone:
            self._lifecycle.out_of_memory(req)
        return reason

    def _wanted_end(self, start: int, total: int, budget: int, first: bool) -> int:
        if self._rules.chunk_size is not None:
            return chunk_end(start, total, budget, self._rules.page_size)
        if total - start <= budget:
            return total
        # Alone in its step a prompt may use all the worker takes; only what exceeds even that (retracted output) is cut.
        return chunk_end(start, total, self._whole, self._rules.page_size) if first else start

    def _refusal(self, req: Req, rank: int, start: int, total: int, alone: bool) -> WaitReason | None:
        """None when both pools have room beside the running requests. A request alone on its rank is limited by the pools only."""
        if alone:
            return None
        new_tokens = max(0, req.max_new_tokens - len(req.output_ids))
        need = request_need(total, start, new_tokens, self._rules)
        return refusal(need, self._memory.room(rank).minus(self._reserved(rank)))

    def _shrunk_end(self, req: Req, rank: int, start: int, end: int, total: int, alone: bool) -> int:
        """``end``, or what fits when the prompt may be cut; ``start`` when the request has to wait (D41, D43).

        With chunking off a prompt runs whole; what a retracted request has generated since may be cut all the same.
        """
        cut = self._fitting_end(req, rank, start, end, total)
        may_cut = self._rules.chunk_size is not None or bool(req.output_ids)
        if cut == end or (may_cut and (alone or end < total)):
            return cut
        return start

    def _fitting_end(self, req: Req, rank: int, start: int, end: int, total: int) -> int:
        """``end``, cut to what both pools can hold right now, the request's own lock narrowed to its window if need be.

        With more chunks to come a chunk also stays within what leaves room for the next one, whatever the cache keeps locked of it.
        """
        fits = start + fit_extend(end - start, start, self._memory.room(rank), self._rules)
        if fits < end and self._memory.narrow_lock(req):
            fits = start + fit_extend(end - start, start, self._memory.room(rank), self._rules)
        if fits >= end == total or self._rules.window is None:
            return min(end, fits)
        page = self._rules.page_size
        longest = max(page, chunk_within(self._memory.capacity(rank).swa, self._rules))
        return min(end, fits, max(start, floor_page(start + longest, page)))

    def _take(self, req: Req, rank: int, start: int, end: int) -> WaitReason | None:
        """Row and slots for ``[start, end)``; on a shortage nothing is kept."""
        if end <= start:
            return self._short_pool(rank)
        if not self._memory.alloc_row(req):
            return WaitReason.NO_SEAT
        last = int(req.prefix_indices[-1]) if start else _NO_SLOT
        slots = self._memory.alloc_extend(start, end, last, rank)
        if slots is None:
            self._memory.free_row(req)
            return self._short_pool(rank)
        if start:
            self._memory.write_row(req, 0, req.prefix_indices)
        self._memory.write_row(req, start, slots)
        return None

    def _seat(self, req: Req, rank: int, start: int, end: int, total: int) -> ExtendRow:
        """The request holds ``[0, start)`` under its lock and ``[start, end)`` as owner::

        [0, start)     tree-owned, protected
        [start, end)   request-owned, computed by the step being planned
        """
        req.cache_protected_len = req.last_matched_prefix_len
        req.processed_len = start
        self._extend_to(req, start, end)
        self._roster.take_seat(req)
        self.admitted(req, start)
        return self._row(req, rank, start, end, total)

    # ------------------------------------------------------------------------------------------------------------- chunks
    def _next_chunk(self, req: Req, rank: int, budget: int) -> ExtendRow | None:
        """The next chunk, or None when it is refused or the request is about to be aborted; then nothing has changed (D32).

        The chunk before it enters the cache now: the device computes it before anything launched from here on. Then the
        request's own tail is reclaimed, before its need is compared with the room (D42).
        """
        if req.to_finish is not None:
            return None
        seats = self._roster.seats[rank]
        seats.settle(req)
        computed = len(req.fill_ids)
        if computed > len(req.prefix_indices):
            self._memory.store_unfinished(req)
        schedule = self._memory.cache.reclaim_schedule
        if schedule is not None and schedule.on_extend:
            self._memory.reclaim(req, req.processed_len, rank)
        seats.reread(req)
        total = req.seqlen
        end = chunk_end(computed, total, budget, self._rules.page_size)
        end = self._fitting_end(req, rank, computed, end, total)
        if end <= computed:
            return None
        last = int(self._memory.table[req.req_pool_idx, computed - 1])
        slots = self._memory.alloc_extend(computed, end, last, rank)
        if slots is None:
            return None
        self._memory.write_row(req, computed, slots)
        self._extend_to(req, computed, end)
        seats.reread(req)
        return self._row(req, rank, computed, end, total)

    # ------------------------------------------------------------------------------------------------------------ helpers
    def _extend_to(self, req: Req, start: int, end: int) -> None:
        req.fill_ids = (req.origin_input_ids + req.output_ids)[:end]
        req.extend_input_len = end - start
        req.kv_allocated_len = req.kv_committed_len = end
        req.extend_batch_idx += 1

    def _row(self, req: Req, rank: int, start: int, end: int, total: int) -> ExtendRow:
        seats = self._roster.seats[rank]
        samples = end == total
        seats.unprefilled[req.seat] = total - end
        if samples:
            req.is_chunked = 0
            if self._roster.chunked[rank] is req:
                self._roster.chunked[rank] = None
            seats.budget[req.seat] -= 1
            self._roster.start_decoding(req)
        else:
            req.is_chunked += 1
            self._roster.chunked[rank] = req
        return ExtendRow(req, start, end, samples)

    def _reserved(self, rank: int) -> Room:
        seats = self._roster.seats[rank]
        taken = np.flatnonzero(seats.taken)
        return reserved_by_running(
            np.maximum(seats.budget[taken], 0),
            seats.length[taken] - seats.reclaimed[taken],
            seats.unprefilled[taken],
            self.ratio(),
            self._rules,
        )

    def _short_pool(self, rank: int) -> WaitReason:
        room = self._memory.room(rank)
        return WaitReason.SWA_POOL if room.swa < room.full else WaitReason.FULL_POOL

    def _lock(self, req: Req) -> None:
        result = self._memory.cache.inc_lock_ref(req.last_node)
        req.cache_lock_params = result.to_dec_params()
        req.swa_uuid_for_lock = result.swa_uuid_for_lock

    def _unlock(self, req: Req) -> None:
        self._memory.cache.dec_lock_ref(req.last_node, req.cache_lock_params)
        req.cache_lock_params = None
        req.swa_uuid_for_lock = None
        self._forget_match(req)

    def _forget_match(self, req: Req) -> None:
        req.prefix_indices = EMPTY_SLOTS
        req.last_node = req.last_host_node = None
        req.fill_ids = []
        req.extend_input_len = req.last_matched_prefix_len = 0
