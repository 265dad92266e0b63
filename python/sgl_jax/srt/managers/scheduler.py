"""The scheduler: receive -> schedule -> forward -> process. It only sequences; the work is in the managers beside it.

One turn of the loop (:meth:`Scheduler.step`) launches at most one step and processes at most one; with overlap the processed
one is the step before. Single-threaded: messages are handled between turns.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from sgl_jax.srt.managers.batch import Batch, LaunchedStep
from sgl_jax.srt.managers.batch_builder import BatchBuilder
from sgl_jax.srt.managers.config import SchedulerConfig
from sgl_jax.srt.managers.control import Control
from sgl_jax.srt.managers.decode import DecodeScheduler
from sgl_jax.srt.managers.finish import StopStrings, abort_reason
from sgl_jax.srt.managers.idle import IdleMonitor
from sgl_jax.srt.managers.intake import Intake
from sgl_jax.srt.managers.io_struct import (
    AbortReq,
    ControlReq,
    GenerateReq,
    Heartbeat,
    Ready,
    ShutdownReq,
    ToFrontEnd,
    TokenBatch,
    ToScheduler,
)
from sgl_jax.srt.managers.kv_memory import KVMemory
from sgl_jax.srt.managers.ledger_view import SlotQuestion, ledger_view
from sgl_jax.srt.managers.lifecycle import Lifecycle
from sgl_jax.srt.managers.output_processing import OutputProcessor
from sgl_jax.srt.managers.overlap import Pipeline
from sgl_jax.srt.managers.policy import SchedulePolicy
from sgl_jax.srt.managers.prefill import PrefillScheduler
from sgl_jax.srt.managers.request import Req, WaitReason
from sgl_jax.srt.managers.retract import Retractor
from sgl_jax.srt.managers.roster import Roster
from sgl_jax.srt.managers.scheduler_names import SchedulerNames
from sgl_jax.srt.managers.stats import Counters, Stats
from sgl_jax.srt.managers.token_ratio import NewTokenRatio
from sgl_jax.srt.mem_cache.sizing import CapRules
from sgl_jax.srt.model_executor.forward_inputs import Worker

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class SchedulerOptions:
    """Everything optional: tokenizer for stop strings, clock, crash bundles, what ``Ready`` adds to the limits.

    The clock measures waits and deadlines, so it must not be one that somebody sets.
    """

    load_tokenizer: Callable[[], Any] | None = None
    clock: Callable[[], float] = time.monotonic
    crash_dir: str | Path = "crash-bundles"
    resolved_args: Mapping[str, Any] = field(default_factory=dict)
    info: Mapping[str, Any] = field(default_factory=dict)


class Scheduler(SchedulerNames):
    """Owns the managers and their order. ``send`` takes every message to the front end.

    In-process use: :meth:`handle` messages, then :meth:`step` or :meth:`run_until_idle`.
    """

    def __init__(
        self,
        config: SchedulerConfig,
        memory: KVMemory,
        worker: Worker,
        send: Callable[[ToFrontEnd], None],
        options: SchedulerOptions | None = None,
    ) -> None:
        options = options or SchedulerOptions()
        self.config, self.memory, self.worker = config, memory, worker
        self._send, self._clock, self._info = send, options.clock, options.info
        self.tree_cache, self.token_to_kv_pool_allocator = memory.cache, memory.allocator
        self.req_to_token_pool, self.dp_size = memory.rows, config.dp_size
        rules = cap_rules(config, memory)
        self.roster = Roster(config.dp_size, min(config.max_running, worker.max_batch))
        self.chunked_reqs = self.roster.chunked
        self.counters = Counters(config.dp_size)
        self.stats = Stats(self.counters, self.roster, memory, decode_log_interval=config.decode_log_interval)
        self.lifecycle = Lifecycle(self.roster, memory, self.counters)
        self.pipeline = Pipeline(worker, self.roster, overlap=config.overlap)
        self.ratio = NewTokenRatio(config.conservativeness)
        self.stops = StopStrings(options.load_tokenizer)
        self.loop_count = 0
        self.shutting_down = False
        self._cached_in_step = [0] * config.dp_size
        self._make_planners(rules)
        self._make_control(rules, options)

    def _make_planners(self, rules: CapRules) -> None:
        """What chooses and builds steps, and what applies their results."""
        config, memory, worker, roster = self.config, self.memory, self.worker, self.roster
        self.builder = BatchBuilder(roster, memory, config.window)
        self.retractor = Retractor(roster, memory, self.lifecycle, rules)
        self.decode = DecodeScheduler(
            roster, memory, self.retractor, rules, self.drain, overlap=config.overlap
        )
        self.decode.retracted = self.ratio.reset
        policy = SchedulePolicy(
            config.schedule_policy,
            lambda req: memory.match_length(req, roster.rank_of(req)),
            config.random_seed,
        )
        self.prefill = PrefillScheduler(
            roster,
            memory,
            self.lifecycle,
            policy,
            rules,
            _step_tokens(config, worker),
            worker.max_extend_tokens,
        )
        self.prefill.admitted = self._on_admitted
        self.prefill.ratio = lambda: self.ratio.value
        self.processor = OutputProcessor(
            roster,
            memory,
            self.lifecycle,
            self.counters,
            self.stops,
            config.eos_token_ids,
            worker.vocab_size,
        )

    def _make_control(self, rules: CapRules, options: SchedulerOptions) -> None:
        """What lets requests in and what answers calls."""
        self.idle = IdleMonitor(
            self.roster,
            self.memory,
            self.pipeline,
            crash_dir=options.crash_dir,
            resolved_args=options.resolved_args,
        )
        self.idle.became_idle = self.ratio.reset
        self.control = Control(
            self.roster, self.lifecycle, self.pipeline, self.idle, self.drain, self._send, options.clock
        )
        self.control.views.update(
            internal_state=lambda _: self.internal_state(),
            load=lambda _: self.load_view(),
            ledger=lambda args: self.ledger_view(SlotQuestion.of(args, self.dp_size)),
        )
        self.intake = Intake(
            self.config,
            rules,
            self.roster,
            self.memory,
            self.lifecycle,
            self.counters,
            self.worker.max_extend_tokens,
        )

    # ----------------------------------------------------------------------------------------------------------- messages
    def handle(self, message: ToScheduler) -> None:
        """Apply one message. Never raises on a client's mistake; the answer says what was wrong."""
        match message:
            case GenerateReq():
                self._accept(message)
            case AbortReq():
                self.control.abort(message)
            case ControlReq():
                self.control.handle(message)
            case ShutdownReq():
                self._shut_down(drain=message.drain)
        self._send_outputs()

    def _accept(self, message: GenerateReq) -> None:
        if self.shutting_down:
            refused = Req(message.rid, "", message.input_ids, message.sampling)
            self.lifecycle.refuse(refused, "the server is shutting down", 503)
            return
        req = self.intake.accept(message, self.stops, self._clock)
        if req is not None and self.control.paused:
            req.wait_reason = WaitReason.PAUSED

    def _shut_down(self, *, drain: bool) -> None:
        """Take no more requests; finish what is there, or abort it."""
        self.shutting_down = True
        self.control.paused = False
        if not drain:
            for req in list(self.roster.by_rid.values()):
                self.control.abort_request(req, abort_reason("the server is shutting down", 503))

    @property
    def finished(self) -> bool:
        """Shut down and drained: the process may exit 0."""
        return self.shutting_down and self.idle.is_fully_idle()

    # --------------------------------------------------------------------------------------------------------------- loop
    def step(self) -> bool:
        """One turn: launch what is ready, process what is due. False when there was nothing to do.

        Raises RuntimeError when live requests can make no progress at all: a stuck scheduler must not look idle.
        """
        self.loop_count += 1
        self.control.tick()
        batch = None if self.control.paused else self._next_batch()
        if batch is not None:
            self._launch(batch)
        due = self.pipeline.take_due() if batch is not None else self.pipeline.take_any()
        if due is not None:
            self._process(due)
        progress = batch is not None or due is not None or bool(self.lifecycle.outbox)
        if not progress:
            progress = self._unstick()
        self._send_outputs()
        self.idle.observe(progress or not self.idle.is_fully_idle())
        return progress

    def run_until_idle(self, max_steps: int = 1_000_000) -> None:
        """Step until nothing is left to do. Raises RuntimeError after ``max_steps`` turns."""
        for _ in range(max_steps):
            if not self.step():
                return
        raise RuntimeError(f"still busy after {max_steps} steps: {'; '.join(self.idle.pending())}")

    def drain(self) -> bool:
        """Process every step in flight; whether there was one."""
        drained = False
        while (step := self.pipeline.take_any()) is not None:
            self._process(step)
            drained = True
        return drained

    def _next_batch(self) -> Batch | None:
        """Prefill first, else decode."""
        self._cached_in_step = [0] * self.config.dp_size
        rows = self.prefill.plan()
        if any(rows):
            batch = self.builder.extend(rows)
            self.stats.log_prefill(
                [len(rank) for rank in rows],
                [sum(row.end - row.start for row in rank) for rank in rows],
                self._cached_in_step,
            )
            return batch
        plan = self.decode.plan()
        if plan is None:
            return None
        self.ratio.decay()
        return self.builder.decode(plan.seats, plan.slots, self.pipeline.flight)

    def _launch(self, batch: Batch) -> None:
        self.pipeline.launch(batch)
        if batch.mode.is_decode():
            self.stats.decode_step_done(self._clock())

    def _process(self, step: LaunchedStep) -> None:
        self.processor.process(step)

    def _unstick(self) -> bool:
        """Nothing could be launched and nothing is in flight: a prompt in chunks that is alone on its rank cannot go on (D39)."""
        if self.control.paused or self.roster.is_empty():
            return False
        ended = False
        for rank, req in enumerate(self.roster.chunked):
            if req is not None and not self.roster.seats[rank].decoding.any():
                self.lifecycle.out_of_memory(req)
                ended = True
        if not ended:
            raise RuntimeError(f"the scheduler is stuck: {self.control.describe_requests()}")
        return True

    def _send_outputs(self) -> None:
        outs = self.lifecycle.outbox
        if outs:
            self.lifecycle.outbox = []
            self._send(TokenBatch(outs=outs))

    def _on_admitted(self, req: Req, cached: int) -> None:
        """Count the hit once, at the first admission (D70)."""
        rank = self.roster.rank_of(req)
        first = req.admitted_at is None
        if first:
            req.admitted_at = self._clock()
            req.cached_tokens = cached
        self._cached_in_step[rank] += cached
        short = max(0, req.full_hit_length - cached)
        self.counters.admitted(rank, len(req.origin_input_ids), cached, short, first=first)

    # -------------------------------------------------------------------------------------------------------------- views
    def heartbeat(self) -> Heartbeat:
        return Heartbeat(
            loop_count=self.loop_count, busy=not self.idle.is_fully_idle(), stats=self.stats.snapshot()
        )

    def ready(self) -> Ready:
        """Limits and capacities for the front end, with what the builder adds (plan, route inputs)."""
        capacity = self.memory.capacity(0)
        config = self.config
        info: dict[str, Any] = {
            "max_total_num_tokens": capacity.full * config.dp_size,
            "swa_max_total_num_tokens": capacity.swa * config.dp_size if self.memory.hybrid else 0,
            "capacities": [self._capacity(rank) for rank in range(config.dp_size)],
            "context_len": config.context_len,
            "max_req_input_len": max(0, min(config.context_len - 1, capacity.full - config.page_size - 1)),
            "max_running_requests": self.roster.seats[0].capacity * config.dp_size,
            "route": config.route,
            "vocab_size": config.vocab_size,
            **self._info,
        }
        return Ready(info=info)

    def _capacity(self, rank: int) -> dict[str, int]:
        room = self.memory.capacity(rank)
        return {"dp_rank": rank, "full": room.full, "swa": room.swa if self.memory.hybrid else 0}

    def internal_state(self) -> dict[str, Any]:
        return {
            "paused": self.control.paused,
            "idle": self.idle.is_fully_idle(),
            "pending": self.idle.pending(),
            "loop_count": self.loop_count,
            "new_token_ratio": self.ratio.value,
            "requests": self.control.describe_requests(),
            **self.stats.snapshot(),
        }

    def load_view(self) -> dict[str, Any]:
        ranks = []
        for rank in range(self.config.dp_size):
            gauges = self.stats.rank_gauges(rank)
            names = ("num_running_reqs", "num_queue_reqs", "num_used_tokens", "token_usage")
            ranks.append({"dp_rank": rank, **{name: gauges[name] for name in names}})
        return {"ranks": ranks}

    def ledger_view(self, asked: SlotQuestion | None = None) -> dict[str, Any]:
        idle = self.idle.is_fully_idle()
        return ledger_view(self.roster, self.memory, self.config.route, idle, asked)


def cap_rules(config: SchedulerConfig, memory: KVMemory) -> CapRules:
    """The constants of every cap; with overlap one more chunk is in flight before its tail can be reclaimed (rule 9)."""
    return CapRules(
        config.page_size,
        config.window if memory.hybrid else None,
        config.chunk_size,
        config.reclaim_multiplier,
        2 if config.overlap else 1,
    )


def _step_tokens(config: SchedulerConfig, worker: Worker) -> int:
    """Most prompt tokens of one rank in one step. Raises ValueError when not even a page fits."""
    limits = [config.max_prefill_tokens, worker.max_extend_tokens]
    if config.chunk_size is not None:
        limits.append(config.chunk_size)
    tokens = min(limits)
    if tokens < config.page_size:
        raise ValueError(
            f"a prefill step takes {tokens} tokens, less than a page of {config.page_size}: raise --chunked-prefill-size and "
            "--max-prefill-tokens to at least --page-size"
        )
    return tokens
