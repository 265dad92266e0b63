"""Applies operations to one scheduler and checks everything that can be said about what comes back."""

from __future__ import annotations

import hashlib
from dataclasses import dataclass, field
from typing import Any

from sgl_jax.srt.managers.io_struct import (
    AbortReq,
    ControlReq,
    GenerateReq,
    Reply,
    SamplingParams,
    ShutdownReq,
    ToFrontEnd,
    TokenBatch,
    TokenOut,
    decode_to_front_end,
    encode,
)
from sgl_jax.srt.mem_cache.page import floor_page
from sgl_jax.test.managers.fuzz.config import VOCAB, FuzzConfig, build
from sgl_jax.test.managers.fuzz.oracle import Sent, cached_bound, check_end, check_out
from sgl_jax.test.managers.fuzz.traffic import Op, Submit
from sgl_jax.test.managers.fuzz.worker import Known

MAX_STEPS = 30_000


def plain_copy(submit: Submit, max_new: int) -> Submit:
    """The same prompt on rank 0 without any extras."""
    return Submit(
        submit.base,
        submit.length,
        submit.continued,
        submit.tail,
        submit.tail_seed,
        max_new,
        ignore_eos=True,
        dp_rank=0,
    )


class FuzzFailure(AssertionError):
    """A promise of the scheduler that did not hold."""


@dataclass
class CaseStats:
    """What a case saw, for the report and for equality of two runs."""

    requests: int = 0
    steps: int = 0
    ends: dict[str, int] = field(default_factory=dict)
    retractions: int = 0
    cached: int = 0
    flushes: int = 0

    def count(self, kind: str) -> None:
        self.ends[kind] = self.ends.get(kind, 0) + 1


class FuzzWorld:
    """One case. ``every``: turns between two complete ownership checks while busy (1 for a replay)."""

    def __init__(self, config: FuzzConfig, crash_dir: str, every: int = 37) -> None:
        self.config = config
        self.every = every
        self.now = 1000.0
        self.stats = CaseStats()
        self.sent: dict[str, Sent] = {}
        self.order: list[str] = []
        self.past: list[Sent] = []
        self.asked: dict[str, str] = {}
        self.digest = hashlib.sha256()
        self.paused = self.shut = False
        self.scheduler = build(config, self.receive, lambda: self.now, crash_dir)

    # ------------------------------------------------------------------------------------------------------------ receiving
    def receive(self, message: ToFrontEnd) -> None:
        if decode_to_front_end(encode(message)) != message:
            raise FuzzFailure(f"{type(message).__name__} does not survive its encoding")
        if isinstance(message, Reply):
            self._reply(message)
            return
        if not isinstance(message, TokenBatch):
            raise FuzzFailure(f"unexpected message {message!r}")
        for out in message.outs:
            self._out(out)

    def _out(self, out: TokenOut) -> None:
        finish = None if out.finish is None else (out.finish.type, out.finish.matched, out.finish.status)
        seen = (out.rid, out.token_ids, finish, out.cached_tokens, out.dp_rank, out.retractions)
        self.digest.update(repr(seen).encode())
        sent = self.sent.get(out.rid)
        if sent is None:
            raise FuzzFailure(f"output for a rid that was never sent: {out}")
        self._check(check_out(self.config, sent, out))
        if sent.first is None and (out.token_ids or out.cached_tokens):
            sent.first = out
            peers = [peer for peer in (*self.past, *self.sent.values()) if peer is not sent]
            self._check(cached_bound(self.config, sent, out, peers))
            self.stats.cached += out.cached_tokens
        if out.finish is not None:
            sent.end = out
            self.stats.count(f"{out.finish.type}{out.finish.status or ''}")
            self.stats.retractions += out.retractions
            self._check(check_end(self.config, sent, out, shut=self.shut))

    def _reply(self, reply: Reply) -> None:
        kind = self.asked.pop(reply.req_id, None)
        if kind is None:
            raise FuzzFailure(f"a second or unasked reply: {reply}")
        self.digest.update(f"{kind} {reply.ok}".encode())
        if kind == "flush" and reply.ok:
            self.stats.flushes += 1
            self._check_cold()
            for sent in (*self.past, *self.sent.values()):
                sent.forgotten = True
            # The terminal message of a request that the flush itself drained comes after the reply.
            if self.scheduler.roster.by_rid:
                raise FuzzFailure(f"flushed while {sorted(self.scheduler.roster.by_rid)} were alive")
        elif kind == "flush" and not reply.data.get("pending"):
            raise FuzzFailure(f"a refused flush names nothing pending: {reply.data}")
        elif kind in ("view", "abort", "pause", "continue") and not reply.ok:
            raise FuzzFailure(f"{kind}: {reply.data}")
        elif kind == "refused" and reply.ok:
            raise FuzzFailure(f"accepted: {reply.data}")

    def _check(self, problem: str | None) -> None:
        if problem:
            raise FuzzFailure(problem)

    # -------------------------------------------------------------------------------------------------------------- applying
    def apply(self, op: Op) -> None:
        name, value = op
        getattr(self, f"_do_{name}")(value)

    def _do_submit(self, submit: Submit) -> None:
        for _ in range(submit.copies):
            self._submit(submit)

    def _submit(self, submit: Submit) -> Sent:
        config = self.config
        prompt = submit.prompt(config.window if config.hybrid else None)
        rid = self._rid(submit)
        self.order.append(rid)
        sent = self.sent[rid] = Sent(rid, submit, prompt, queued=self.scheduler.roster.queued_count)
        self.stats.requests += 1
        seed = self.stats.requests
        ends = set(submit.stop_ids) | (set() if submit.ignore_eos else set(config.eos_ids))
        self.scheduler.worker.known[seed] = Known(
            prompt, 1 + seed % 50, submit.min_new, frozenset(ends), 0.5 if submit.penalty else 0.0
        )
        sampling = SamplingParams(
            max_new_tokens=submit.max_new,
            min_new_tokens=submit.min_new,
            temperature=0.0,
            stop_token_ids=list(submit.stop_ids),
            stop=list(submit.stop),
            ignore_eos=submit.ignore_eos,
            seed=seed,
            top_k=1 + seed % 50,
            frequency_penalty=0.5 if submit.penalty else 0.0,
        )
        self.scheduler.handle(
            GenerateReq(
                rid=rid,
                input_ids=prompt,
                sampling=sampling,
                stream=submit.stream,
                return_logprob=submit.logprob,
                logprob_start_len=submit.logprob_start,
                top_logprobs_num=submit.top,
                extra_key=submit.extra_key,
                dp_rank=submit.dp_rank,
            )
        )
        return sent

    def _rid(self, submit: Submit) -> str:
        """A fresh rid, or that of a request that has ended."""
        ended = [sent for sent in self.sent.values() if sent.end is not None] if submit.reuse_rid else []
        if not ended:
            return f"r{len(self.order)}"
        self.past.append(ended[-1])
        return ended[-1].rid

    def _do_step(self, count: int) -> None:
        for _ in range(count):
            self._turn()

    def _turn(self) -> bool:
        self.now += 0.01
        self.stats.steps += 1
        progress = self.scheduler.step()
        if self.stats.steps % self.every == 0:
            self._check_books()
        return progress

    def _do_abort(self, back: int) -> None:
        if not self.order:
            return
        sent = self.sent[self.order[max(0, len(self.order) - 1 - back)]]
        self._abort([sent] if sent.end is None else [], AbortReq(rid=sent.rid, req_id=self._ask("abort")))

    def _do_abort_all(self, _: None) -> None:
        self._abort(self._alive(), AbortReq(abort_all=True, req_id=self._ask("abort")))

    def _abort(self, victims: list[Sent], message: AbortReq) -> None:
        for sent in victims:
            sent.aborted = True
        self.scheduler.handle(message)

    def _alive(self) -> list[Sent]:
        return [sent for sent in self.sent.values() if sent.end is None]

    def _do_pause(self, mode: str) -> None:
        if mode == "wrong":
            self._control("pause", "refused", mode=mode)
            return
        if mode == "abort":
            # What the step in flight ends comes first: those may end normally.
            for sent in self._alive():
                sent.may_abort = True
        self.paused = True
        self._control("pause", "pause", mode=mode)

    def _do_continue(self, _: None) -> None:
        self.paused = False
        self._control("continue", "continue")

    def _do_flush(self, timeout: float) -> None:
        kind = "refused" if "flush" in self.asked.values() else "flush"
        self._control("flush_cache", kind, timeout=timeout)

    def _do_view(self, kind: str) -> None:
        if kind == "heartbeat":
            encode(self.scheduler.heartbeat())
            encode(self.scheduler.ready())
        else:
            known = kind != "nonsense" and (kind != "ledger" or self.config.hybrid)
            self._control(kind, "view" if known else "any")

    def _control(self, kind: str, asked: str, **args: Any) -> None:
        self.scheduler.handle(ControlReq(kind=kind, req_id=self._ask(asked), args=args))

    def _ask(self, kind: str) -> str:
        self.digest.update(kind.encode())
        req_id = f"q{self.digest.hexdigest()[:12]}{len(self.order)}"
        self.asked[req_id] = kind
        return req_id

    def _do_tick(self, seconds: float) -> None:
        self.now += seconds

    def _do_shutdown(self, drain: bool) -> None:
        self.shut = True
        self.paused = False
        for sent in self._alive():
            sent.may_abort = not drain
        self.scheduler.handle(ShutdownReq(drain=drain))

    def _do_settle(self, _: None) -> None:
        if self.paused:
            self._do_continue(None)
        for _ in range(MAX_STEPS):
            if not self._turn():
                break
        else:
            raise FuzzFailure(f"still busy after {MAX_STEPS} turns: {self.scheduler.idle.pending()}")
        self._turn()
        self._check_idle()

    def _do_probe(self, submit: Submit) -> None:
        """Twice the same prompt alone on a cold cache: the second time the cache gives all it may (D13)."""
        self._do_settle(None)
        if self.shut:
            return
        self._do_flush(0.0)
        if "flush" in self.asked.values():
            return
        plain = Submit(
            submit.base, submit.length, submit.continued, submit.tail, submit.tail_seed, 1, dp_rank=0
        )
        hits = []
        for _ in range(2):
            sent = self._submit(plain)
            self._do_settle(None)
            end = sent.end
            if end is None or end.finish is None or end.finish.type == "abort":
                return
            hits.append(end.cached_tokens)
        wanted = floor_page(len(sent.prompt) - 1, self.config.page) if self.config.radix else 0
        if hits != [0, wanted] and not self.config.tight:
            raise FuzzFailure(
                f"a prompt of {len(sent.prompt)} tokens sent twice alone hits {hits}, expected [0, {wanted}]"
            )

    def _do_largest(self, new_tokens: int) -> None:
        """The largest request that the plan promises is served to its end on an empty rank (D44)."""
        self._do_settle(None)
        config = self.config
        total = config.plan.largest_request
        prompt = total - min(new_tokens, total - 1)
        if self.shut or config.tight or (config.chunk < 0 and prompt > config.step_limit):
            return
        sent = self._submit(Submit(0, prompt, max_new=total - prompt, ignore_eos=True, dp_rank=0))
        self._do_settle(None)
        if sent.end is None or sent.end.finish is None or sent.end.finish.type != "length":
            raise FuzzFailure(f"the plan promises {total} tokens; prompt {prompt} ended with {sent.end}")
        if len(sent.output) != total - prompt:
            raise FuzzFailure(f"the plan promises {total} tokens; prompt {prompt} got {len(sent.output)}")

    def _do_twin(self, submit: Submit) -> None:
        """The prompt of a running request, sent again, is cached already: it was stored when its prefill ended."""
        self._do_settle(None)
        if self.shut:
            return
        first = self._submit(plain_copy(submit, 200))
        for _ in range(MAX_STEPS):
            if first.first is not None or first.end is not None:
                break
            self._turn()
        second = self._submit(plain_copy(submit, 1))
        for _ in range(MAX_STEPS):
            if second.end is not None or first.end is not None:
                break
            self._turn()
        alive, hit = first.end is None, second.end
        exact = (
            self.config.hybrid and len(first.prompt) % self.config.page == 0
        )  # its window is not locked one page short
        if alive and hit is not None and hit.finish and hit.finish.type != "abort" and not exact:
            wanted = floor_page(len(first.prompt) - 1, self.config.page) if self.config.radix else 0
            retracted = self.scheduler.roster.by_rid[first.rid].retractions
            if hit.cached_tokens != wanted and not retracted:
                raise FuzzFailure(
                    f"the prompt of a running request hits {hit.cached_tokens}, expected {wanted}"
                )

    def finish(self) -> None:
        """The end of the case: everything ended, books balanced, pools cold after a flush."""
        self._do_settle(None)
        self.now += 1e6
        self._turn()
        if self.asked:
            raise FuzzFailure(f"never answered: {sorted(self.asked.values())}")
        open_ends = [sent.rid for sent in self._alive()]
        if open_ends:
            raise FuzzFailure(f"no terminal message: {open_ends}")
        if self.shut and not self.scheduler.finished:
            raise FuzzFailure("shut down and idle, but not finished")
        self._do_flush(0.0)
        if self.asked:
            raise FuzzFailure("the last flush was not answered at once")
        self._check_idle()

    # -------------------------------------------------------------------------------------------------------------- checking
    def _check_books(self) -> None:
        found = self.scheduler.idle.violations(require_idle=False)
        if found:
            raise FuzzFailure("; ".join(str(item) for item in found))

    def _check_cold(self) -> None:
        memory = self.scheduler.memory
        for rank in range(self.config.dp):
            if memory.available(rank) != memory.capacity(rank):
                raise FuzzFailure(f"after a flush: {memory.report(rank)}")

    def _check_idle(self) -> None:
        scheduler, memory = self.scheduler, self.scheduler.memory
        if not scheduler.idle.is_fully_idle():
            raise FuzzFailure(f"not idle: {scheduler.idle.pending()} {scheduler.control.describe_requests()}")
        scheduler.idle.check_memory()
        found = scheduler.idle.violations(require_idle=True)
        if found:
            raise FuzzFailure("; ".join(str(item) for item in found))
        for rank in range(self.config.dp):
            free, evictable, capacity = memory.available(rank), memory.evictable(rank), memory.capacity(rank)
            locked = memory.protected(rank)
            balanced = free.full + evictable.full == capacity.full and locked.full == 0
            if memory.hybrid:
                balanced = balanced and free.swa + evictable.swa == capacity.swa and locked.swa == 0
            seats = scheduler.roster.seats[rank]
            if not balanced or seats.taken_count or scheduler.roster.chunked[rank] is not None:
                raise FuzzFailure(
                    f"idle but not balanced: {memory.report(rank)}, {seats.taken_count} seats taken"
                )
        gauges = scheduler.load_view()["ranks"]
        if any(rank["num_running_reqs"] or rank["num_queue_reqs"] for rank in gauges):
            raise FuzzFailure(f"idle, but the gauges say {gauges}")


def run_ops(config: FuzzConfig, ops: list[Op], crash_dir: str, every: int = 37) -> FuzzWorld:
    """Run a case to its end. Raises whatever went wrong, FuzzFailure or the scheduler's own error."""
    world = FuzzWorld(config, crash_dir, every)
    for op in ops:
        world.apply(op)
    world.finish()
    return world


__all__ = ["VOCAB", "CaseStats", "FuzzFailure", "FuzzWorld", "run_ops"]
