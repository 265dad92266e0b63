"""The front end's hub: sends requests to the scheduler, hands its answers to whoever waits, and knows whether it lives."""

from __future__ import annotations

import asyncio
import logging
import time
import uuid
from collections.abc import AsyncIterator
from dataclasses import dataclass
from typing import Any

from sgl_jax.srt.managers import io_struct
from sgl_jax.srt.managers.detokenizer import IncrementalDetokenizer
from sgl_jax.srt.managers.frontend.channel import SchedulerChannel
from sgl_jax.srt.managers.frontend.errors import RequestError
from sgl_jax.srt.managers.frontend.limits import Limits
from sgl_jax.srt.managers.frontend.request_state import RequestState
from sgl_jax.srt.managers.frontend.tokenizer import Tokenizer
from sgl_jax.srt.managers.io_struct import GenerateReq, Reply, TokenOut
from sgl_jax.srt.managers.prometheus_metrics import FrontEndMetrics
from sgl_jax.srt.server_args import ServerArgs

logger = logging.getLogger(__name__)

_LONG_TEXT = 20_000  # characters; a longer text is tokenized in a thread so that streams go on
_CONTROL_TIMEOUT = 30.0


@dataclass(frozen=True, slots=True)
class Liveness:
    """``alive``: the scheduler loop gave a sign of life within the watchdog's time. ``age`` seconds since the last one."""

    alive: bool
    age: float
    loop_count: int
    busy: bool


class TokenizerManager:
    """One per front end process; everything runs on its event loop.

    ``run`` must be running as a task. Requests may be sent once ``limits`` is known (the scheduler is ready).
    """

    def __init__(
        self,
        args: ServerArgs,
        channel: SchedulerChannel,
        tokenizer: Tokenizer | None,
        metrics: FrontEndMetrics,
    ) -> None:
        self.args = args
        self.tokenizer = tokenizer
        self.metrics = metrics
        self.info: dict[str, Any] = {}
        self.limits: Limits | None = None
        self.scheduler_ready = asyncio.Event()
        self.fatal: str | None = None
        self.fatal_is_mistake = False
        self.draining = False
        self._channel = channel
        self._states: dict[str, RequestState] = {}
        self._groups: dict[str, list[str]] = {}
        self._replies: dict[str, asyncio.Future[Reply]] = {}
        self._heartbeat = io_struct.Heartbeat(loop_count=0, busy=False)
        self._heartbeat_at = time.monotonic()
        self._flushing = False
        self._background: set[asyncio.Task[None]] = set()

    # ---- messages from the scheduler

    async def run(self) -> None:
        """Receives until cancelled."""
        while True:
            self._dispatch(await self._channel.receive())

    def _dispatch(self, message: io_struct.ToFrontEnd) -> None:
        now = time.monotonic()
        self._heartbeat_at = now  # every message is a sign of life
        if isinstance(message, io_struct.TokenBatch):
            for out in message.outs:
                self._take_output(out, now)
        elif isinstance(message, io_struct.Heartbeat):
            self._heartbeat = message
            self.metrics.update(message.stats)
        elif isinstance(message, Reply):
            future = self._replies.pop(message.req_id, None)
            if future is not None and not future.done():
                future.set_result(message)
        elif isinstance(message, io_struct.Ready):
            self.info = message.info
            self.limits = Limits.from_info(message.info, self.args.dp_size)
            self.metrics.set_capacities(message.info, self.args.page_size)
            self.scheduler_ready.set()
        else:
            self.scheduler_died(message.traceback, message.mistake)

    def _take_output(self, out: TokenOut, now: float) -> None:
        state = self._states.get(out.rid)
        if state is None:
            logger.warning("output for unknown request %s", out.rid)
            return
        if state.counted:
            self._count(state, out, now)
        if out.token_ids:
            state.first_output_at = state.first_output_at or now
            state.last_output_at = now
        state.apply(out, now)
        if out.finish is not None:
            del self._states[out.rid]
            if state.counted:
                self.metrics.finished(out.dp_rank, state.latency, out.finish.type == "abort")
            self._log_finish(state, out.finish.type)

    def _count(self, state: RequestState, out: TokenOut, now: float) -> None:
        """Metrics of one output; a prompt and its hit count at the first output (D70)."""
        fresh = 0 if state.drop_output else len(out.token_ids)
        if out.token_ids and state.first_output_at is None:
            self.metrics.first_output(
                out.dp_rank, state.prompt_tokens, out.cached_tokens, now - state.started, out.queue_time
            )
        elif fresh:
            self.metrics.inter_token(out.dp_rank, now - state.last_output_at, fresh)
        self.metrics.output(out.dp_rank, fresh)

    def _log_finish(self, state: RequestState, reason: str) -> None:
        if self.args.log_requests:
            logger.info(
                "Finish: rid=%s reason=%s prompt=%d cached=%d output=%d latency=%.3fs rank=%d",
                state.rid,
                reason,
                state.prompt_tokens,
                state.cached_tokens,
                state.completion_tokens,
                state.latency,
                state.dp_rank,
            )

    # ---- requests

    def require_ready(self) -> Limits:
        """The limits; raises RequestError 503 while the server starts, drains or after the scheduler died."""
        if self.fatal is not None:
            raise RequestError("the scheduler has died; the server is shutting down", 500)
        if self.draining:
            raise RequestError("the server is shutting down", 503)
        if self.limits is None:
            raise RequestError("the server is starting, try again when /ready answers 200", 503)
        return self.limits

    async def encode(self, text: str, name: str) -> list[int]:
        """Token ids of a prompt, with the model's own special tokens. Raises RequestError 400 without a tokenizer."""
        if self.tokenizer is None:
            raise RequestError(
                f"{name} is text, but the server runs without a tokenizer (--skip-tokenizer-init); send token ids",
                param=name,
            )
        if len(text) > _LONG_TEXT:
            return await asyncio.to_thread(self.tokenizer.encode, text)
        return self.tokenizer.encode(text)

    def decode(self, ids: list[int], skip_special_tokens: bool = False) -> str:
        """Text of ids; empty without a tokenizer."""
        if self.tokenizer is None:
            return ""
        return self.tokenizer.decode(ids, skip_special_tokens=skip_special_tokens)

    def reserve(self, rids: list[str], group: str | None = None) -> None:
        """Refuses ids that are in use or repeated, before anything is sent. ``group`` names them together for aborts."""
        for rid in rids:
            if rid in self._states or rids.count(rid) > 1 or (group != rid and rid in self._groups):
                raise RequestError(f"rid {rid!r} is in use by another request", param="rid")
        if group is not None:
            if group in self._groups or (group in self._states):
                raise RequestError(f"rid {group!r} is in use by another request", param="rid")
            self._groups[group] = rids

    def release_group(self, group: str | None) -> None:
        if group is not None:
            self._groups.pop(group, None)

    async def submit(
        self, request: GenerateReq, drop_output: bool = False, counted: bool = True
    ) -> RequestState:
        """Sends one sequence. ``drop_output``: the client asked for 0 tokens; the one that is made is not shown.

        ``counted`` False keeps the server's own probes out of the metrics.
        """
        self.require_ready()
        if request.rid in self._states:
            raise RequestError(f"rid {request.rid!r} is in use by another request", param="rid")
        detokenizer = None
        if self.tokenizer is not None:
            params = request.sampling
            detokenizer = IncrementalDetokenizer(
                self.tokenizer, request.input_ids, params.skip_special_tokens, params.stop
            )
        state = RequestState(request, detokenizer, drop_output, counted)
        self._states[request.rid] = state
        if self.args.log_requests:
            logger.info(
                "Receive: rid=%s prompt=%d max_new_tokens=%d stream=%s",
                request.rid,
                state.prompt_tokens,
                request.sampling.max_new_tokens,
                request.stream,
            )
        await self._channel.send(request)
        return state

    async def follow(self, state: RequestState) -> AsyncIterator[RequestState]:
        """Yields the state whenever it has news, last when it is done. Leaving early aborts the sequence."""
        try:
            while True:
                await state.wait()
                yield state
                if state.done:
                    return
        finally:
            self.drop(state)

    async def finish(self, state: RequestState) -> RequestState:
        """Waits for the end. Raises the request's error; a cancelled wait aborts the sequence."""
        async for _ in self.follow(state):
            pass
        return state

    def drop(self, state: RequestState) -> None:
        """Nobody waits for this sequence any more: abort it unless it is done. Idempotent, does not wait.

        The state stays in the table until the scheduler confirms the end (D68).
        """
        if state.done or state.abort_sent or state.rid not in self._states:
            return
        state.abort_sent = True
        task = asyncio.ensure_future(self._channel.send(io_struct.AbortReq(rid=state.rid)))
        self._background.add(task)
        task.add_done_callback(self._background.discard)

    @property
    def open_requests(self) -> int:
        return len(self._states)

    # ---- control calls

    async def abort(self, rid: str = "", abort_all: bool = False) -> dict[str, Any]:
        """Aborts one request (with all its sequences) or everything. An unknown id is no error: ``found`` is False."""
        rids = [] if abort_all else self._groups.get(rid, [rid])
        found = [r for r in rids if r in self._states]
        if abort_all:
            reply = await self._ask(io_struct.AbortReq(abort_all=True, req_id=_new_id()))
            return {"found": bool(self._states) or bool(reply.data.get("found")), **reply.data}
        for one in found:
            await self._ask(io_struct.AbortReq(rid=one, req_id=_new_id()))
        return {"found": bool(found), "rid": rid}

    async def control(
        self, kind: str, args: dict[str, Any] | None = None, timeout: float = _CONTROL_TIMEOUT
    ) -> Reply:
        """One control call. Raises RequestError 503 when the scheduler does not answer in time."""
        return await self._ask(io_struct.ControlReq(kind=kind, req_id=_new_id(), args=args or {}), timeout)

    async def flush_cache(self, timeout: float) -> Reply:
        """Flushes; at most one flush is pending at a time (D69)."""
        if self._flushing:
            message = "a flush is already in progress"
            return Reply(req_id="", ok=False, data={"message": message, "pending": ["flush"]})
        self._flushing = True
        try:
            return await self.control("flush_cache", {"timeout": timeout}, timeout + _CONTROL_TIMEOUT)
        finally:
            self._flushing = False

    async def get_cache_ledger(self, question: dict[str, Any] | None = None) -> Reply:
        """Snapshot of every rank; ``question``: slot, pool and rank whose owner is asked for."""
        return await self.control("ledger", question)

    async def _ask(
        self, message: io_struct.AbortReq | io_struct.ControlReq, timeout: float = _CONTROL_TIMEOUT
    ) -> Reply:
        if self.fatal is not None:
            raise RequestError("the scheduler has died; the server is shutting down", 500)
        if not self.scheduler_ready.is_set():
            raise RequestError("the server is starting, try again when /ready answers 200", 503)
        future: asyncio.Future[Reply] = asyncio.get_running_loop().create_future()
        self._replies[message.req_id] = future
        try:
            await self._channel.send(message)
            return await asyncio.wait_for(future, timeout)
        except TimeoutError:
            raise RequestError(f"the scheduler did not answer within {timeout:g} s", 503) from None
        finally:
            self._replies.pop(message.req_id, None)

    # ---- life and death

    def liveness(self) -> Liveness:
        """From the heartbeats of the scheduler loop: a slow step is not dead, a stuck loop is (D76). Loading may take any time."""
        age = time.monotonic() - self._heartbeat_at
        beating = age <= self.args.watchdog_timeout or not self.scheduler_ready.is_set()
        alive = self.fatal is None and beating
        return Liveness(alive, age, self._heartbeat.loop_count, self._heartbeat.busy)

    def scheduler_died(self, reason: str, mistake: bool = False) -> None:
        """Every open request and control call gets an error; nothing hangs. Idempotent; the first reason is kept.

        ``mistake``: the scheduler cannot start with the user's flags or checkpoint, and ``reason`` is the message for them.
        """
        if self.fatal is not None:
            return
        self.fatal, self.fatal_is_mistake = reason, mistake
        if not mistake:  # whoever serves says it, once
            logger.critical("the scheduler died: %s", reason.strip().splitlines()[-1])
        error = RequestError("the scheduler has died; the server is shutting down", 500)
        for state in self._states.values():
            state.fail(error)
        self._states.clear()
        for future in self._replies.values():
            if not future.done():
                future.set_exception(error)

    async def shut_down(self, drain: bool) -> None:
        """Asks the scheduler to end."""
        await self._channel.send(io_struct.ShutdownReq(drain=drain))


def _new_id() -> str:
    return uuid.uuid4().hex
