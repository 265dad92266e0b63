"""Calls that act on the scheduler between steps: abort, flush, pause, and the read-only views.

All of them run at a consistent point, with no half-applied step. An abort of a request that a step in flight carries waits for
that step; everything else takes effect at once (D30, D36).
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from sgl_jax.srt.managers.finish import abort_reason
from sgl_jax.srt.managers.flush import flush_pools
from sgl_jax.srt.managers.idle import IdleMonitor
from sgl_jax.srt.managers.io_struct import AbortReq, ControlReq, FinishReason, Reply
from sgl_jax.srt.managers.ledger_view import SlotQuestionError
from sgl_jax.srt.managers.lifecycle import Lifecycle
from sgl_jax.srt.managers.overlap import Pipeline
from sgl_jax.srt.managers.request import Req, WaitReason
from sgl_jax.srt.managers.roster import Roster

logger = logging.getLogger(__name__)

PAUSE_MODES = ("abort", "retract", "in_place")
_SHOWN_REQUESTS = 200


@dataclass(frozen=True, slots=True)
class _PendingFlush:
    req_id: str
    deadline: float


class Control:
    """Handles control messages. ``views`` answer the read-only kinds by name, from the call's arguments; ``reply`` sends an answer."""

    def __init__(
        self,
        roster: Roster,
        lifecycle: Lifecycle,
        pipeline: Pipeline,
        idle: IdleMonitor,
        drain: Callable[[], bool],
        reply: Callable[[Reply], None],
        clock: Callable[[], float],
    ) -> None:
        self._roster = roster
        self._lifecycle = lifecycle
        self._pipeline = pipeline
        self._idle = idle
        self._drain = drain
        self._reply = reply
        self._clock = clock
        self._flush: _PendingFlush | None = None
        self.paused = False
        self.views: dict[str, Callable[[Mapping[str, Any]], dict[str, Any]]] = {}

    # -------------------------------------------------------------------------------------------------------------- abort
    def abort(self, message: AbortReq) -> None:
        """Abort one request or all. Unknown and finished rids answer ``found: false`` (DECISIONS 19)."""
        if message.abort_all:
            targets = list(self._roster.by_rid.values())
        else:
            known = self._roster.by_rid.get(message.rid)
            targets = [known] if known is not None else []
        for req in targets:
            self.abort_request(req, abort_reason("aborted by the client"))
        if message.req_id:
            data = {"found": bool(targets), "aborted": [req.rid for req in targets]}
            self._reply(Reply(req_id=message.req_id, ok=True, data=data))

    def abort_request(self, req: Req, reason: FinishReason) -> None:
        """End the request now, or when the step that carries it is processed. Repeating it changes nothing."""
        if req.to_finish is not None or req.finished():
            return
        if not self._pipeline.carries(req):
            self._lifecycle.finish(req, reason)
            return
        req.to_finish = reason
        seats = self._roster.seats_of(req)
        seats.decoding[req.seat] = False
        seats.attention[req.seat] = True

    # ------------------------------------------------------------------------------------------------------------ control
    def handle(self, message: ControlReq) -> None:
        """Answer a control call; an unknown kind or bad argument is answered, never raised."""
        kind, args = message.kind, message.args
        if kind == "flush_cache":
            self._start_flush(message.req_id, args)
        elif kind == "pause":
            self._answer(message.req_id, *self._pause(str(args.get("mode", "abort"))))
        elif kind == "continue":
            self.paused = False
            self._answer(message.req_id, True, {"paused": False})
        elif kind == "health":
            self._answer(message.req_id, True, {"paused": self.paused})
        elif kind in self.views:
            try:
                data = self.views[kind](args)
            except NotImplementedError as error:
                self._answer(message.req_id, False, {"message": str(error), "status": 501})
            except SlotQuestionError as error:
                self._answer(message.req_id, False, {"message": str(error), "status": 400})
            else:
                self._answer(message.req_id, True, data)
        else:
            known = sorted({"flush_cache", "pause", "continue", "health", *self.views})
            self._answer(
                message.req_id,
                False,
                {"message": f"unknown control call {kind!r}; known: {', '.join(known)}"},
            )

    def _answer(self, req_id: str, ok: bool, data: dict[str, Any]) -> None:
        self._reply(Reply(req_id=req_id, ok=ok, data=data))

    def _pause(self, mode: str) -> tuple[bool, dict[str, Any]]:
        """Stop generating. ``abort`` ends every request, ``retract`` queues the running ones again, ``in_place`` keeps their memory."""
        if mode not in PAUSE_MODES:
            return False, {"message": f"pause mode {mode!r}: use one of {', '.join(PAUSE_MODES)}"}
        self._drain()
        self.paused = True
        if mode == "abort":
            for req in list(self._roster.by_rid.values()):
                self.abort_request(req, abort_reason("generation was paused with mode abort"))
        elif mode == "retract":
            for req in reversed(list(self._roster.seated())):
                self._lifecycle.retract(req, WaitReason.PAUSED)
        self._roster.mark_waiting(WaitReason.PAUSED)
        return True, {"paused": True, "mode": mode}

    # -------------------------------------------------------------------------------------------------------------- flush
    def _start_flush(self, req_id: str, args: dict[str, Any]) -> None:
        """Flush when idle; wait up to ``timeout`` seconds for it; one pending flush at a time (D65, D69)."""
        timeout = args.get("timeout") or 0.0
        if isinstance(timeout, bool) or not isinstance(timeout, int | float) or timeout < 0:
            self._answer(req_id, False, {"message": f"timeout {timeout!r}: seconds, 0 or more"})
        elif self._flush is not None:
            self._answer(
                req_id, False, {"message": "a flush is already in progress", "pending": ["another flush"]}
            )
        else:
            self._drain()
            if self._idle.is_fully_idle():
                self._flush_now(req_id)
            elif timeout:
                self._flush = _PendingFlush(req_id, self._clock() + timeout)
            else:
                self._refuse_flush(req_id, "the server is busy")

    def tick(self) -> None:
        """Serve or expire the pending flush. Call once per loop turn."""
        pending = self._flush
        if pending is None:
            return
        if self._idle.is_fully_idle():
            self._flush = None
            self._flush_now(pending.req_id)
        elif self._clock() >= pending.deadline:
            self._flush = None
            self._refuse_flush(pending.req_id, "the server did not become idle in time")

    def _refuse_flush(self, req_id: str, why: str) -> None:
        reasons = self._idle.pending()
        message = f"cache not flushed, {why}: {'; '.join(reasons)}. Pass timeout=SECONDS to wait"
        self._answer(req_id, False, {"message": message, "pending": reasons})

    def _flush_now(self, req_id: str) -> None:
        self._idle.audit(require_idle=True)
        ranks = flush_pools(self._idle.memory)
        self._idle.audit(require_idle=True)  # cold: everything free, no owner, no mapping left
        leaked = any(pool["leaked"] for rank in ranks for pool in rank["pools"].values())
        verdict = "memory leaked" if leaked else "no leak"
        logger.info("Cache flushed: %s", verdict)
        self._answer(
            req_id, not leaked, {"message": f"cache flushed, {verdict}", "ranks": ranks, "leaked": leaked}
        )

    # -------------------------------------------------------------------------------------------------------------- views
    def describe_requests(self) -> list[dict[str, Any]]:
        """State of live requests with wait reasons, at most 200."""
        shown = []
        for rank, queue in enumerate(self._roster.waiting):
            for at, req in enumerate(queue):
                reason = req.wait_reason
                if at and reason is WaitReason.ARRIVED:
                    reason = WaitReason.BEHIND
                shown.append(self._describe(req, rank, reason.value))
        shown.extend(self._describe(req, self._roster.rank_of(req), "") for req in self._roster.seated())
        return shown[:_SHOWN_REQUESTS]

    def _describe(self, req: Req, rank: int, reason: str) -> dict[str, Any]:
        return {
            "rid": req.rid,
            "state": req.state.value,
            "dp_rank": rank,
            "prompt_tokens": len(req.origin_input_ids),
            "output_tokens": len(req.output_ids),
            "wait_reason": reason,
        }
