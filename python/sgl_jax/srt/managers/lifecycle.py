"""Ends and restarts of requests: one place that releases, forgets, counts and reports. Every path is idempotent."""

from __future__ import annotations

import logging

from sgl_jax.srt.managers.finish import abort_reason, out_of_memory_reason
from sgl_jax.srt.managers.io_struct import FinishReason, TokenOut
from sgl_jax.srt.managers.kv_memory import KVMemory
from sgl_jax.srt.managers.request import Req, RequestState, WaitReason
from sgl_jax.srt.managers.roster import Roster
from sgl_jax.srt.managers.stats import Counters

logger = logging.getLogger(__name__)


class Lifecycle:
    """Moves requests out of their seats. ``outbox`` collects what the front end is told at the end of the step."""

    def __init__(self, roster: Roster, memory: KVMemory, counters: Counters) -> None:
        self._roster = roster
        self._memory = memory
        self._counters = counters
        self.outbox: list[TokenOut] = []

    def finish(self, req: Req, reason: FinishReason) -> None:
        """End a request: release its row (into the cache, unless aborted), one terminal message, gone from all lists.

        Legal for seated requests without an unprocessed step, for seated requests while their last step is being processed,
        and for waiting requests. Ending twice does nothing (D30, D36).
        """
        if req.state is RequestState.FINISHED:
            return
        rank = self._roster.rank_of(req)
        if req.seat >= 0:
            self._vacate(req, insert=reason.type != "abort")
        else:
            self._roster.waiting[rank] = [other for other in self._roster.waiting[rank] if other is not req]
        req.finished_reason = reason
        self._roster.forget(req)
        if reason.type == "abort":
            self._counters.aborted[rank] += 1
        self.outbox.append(self.token_out(req, reason))

    def refuse(self, req: Req, message: str, status: int = 400) -> None:
        """A request that never entered a queue."""
        req.state = RequestState.FINISHED
        req.finished_reason = abort_reason(message, status)
        self.outbox.append(self.token_out(req, req.finished_reason))

    def out_of_memory(self, req: Req) -> None:
        """End a request that cannot continue although it is alone; the server lives on (D39)."""
        report = self._memory.report(self._roster.rank_of(req))
        logger.error("Request %s ended: out of memory (%s)", req.rid, report)
        self.finish(req, out_of_memory_reason(report))

    def retract(self, req: Req, reason: WaitReason = WaitReason.RETRACTED) -> None:
        """Give up the row of a seated request without inserting it and put it back at the head of its queue.

        Illegal while a step in flight carries the request: drain first.
        """
        rank = self._roster.rank_of(req)
        self._vacate(req, insert=False)
        req.reset_for_retract()
        req.retractions += 1
        if not req.input_logprobs_complete:
            req.input_logprobs, req.input_top = [], []
        self._counters.retracted[rank] += 1
        self._roster.enqueue(req, rank, front=True)
        req.wait_reason = reason

    def _vacate(self, req: Req, *, insert: bool) -> None:
        self._roster.seats_of(req).settle(req)
        self._memory.release(req, insert=insert)
        self._roster.leave_seat(req)

    def token_out(self, req: Req, finish: FinishReason | None) -> TokenOut:
        """The tokens produced since the last report, with cumulative counts."""
        start, end = req.reported, len(req.output_ids)
        req.reported = end
        out = TokenOut(
            rid=req.rid,
            token_ids=req.output_ids[start:end],
            finish=finish,
            prompt_tokens=len(req.origin_input_ids),
            completion_tokens=end,
            cached_tokens=req.cached_tokens,
            dp_rank=req.dp_rank or 0,
            retractions=req.retractions,
            queue_time=0.0 if req.admitted_at is None else max(0.0, req.admitted_at - req.received_at),
        )
        if req.return_logprob:
            self._add_logprobs(req, out, start, end)
        return out

    def _add_logprobs(self, req: Req, out: TokenOut, start: int, end: int) -> None:
        out.logprobs = req.output_logprobs[start:end]
        if req.top_logprobs_num:
            out.top_logprobs = req.output_top[start:end]
        if req.wants_input_logprobs and req.input_logprobs_complete and not req.input_logprobs_sent:
            req.input_logprobs_sent = True
            out.input_logprobs = req.input_logprobs
            if req.top_logprobs_num:
                out.input_top_logprobs = req.input_top
