"""New requests: validation with the limits of admission, then a rank and a place in its queue."""

from __future__ import annotations

from collections.abc import Callable

from sgl_jax.srt.managers.admission import clip_new_tokens, never_fits
from sgl_jax.srt.managers.config import SchedulerConfig
from sgl_jax.srt.managers.dp_ranks import RankAssigner
from sgl_jax.srt.managers.finish import StopStrings
from sgl_jax.srt.managers.io_struct import GenerateReq
from sgl_jax.srt.managers.kv_memory import KVMemory
from sgl_jax.srt.managers.lifecycle import Lifecycle
from sgl_jax.srt.managers.request import Req
from sgl_jax.srt.managers.roster import Roster
from sgl_jax.srt.managers.stats import Counters
from sgl_jax.srt.mem_cache.sizing import CapRules

_SEED_MIX = 0x9E3779B1


class Intake:
    """Accepts or refuses. ``step_limit``: tokens the worker takes in one prefill step; ``clock`` gives the queue time."""

    def __init__(
        self,
        config: SchedulerConfig,
        rules: CapRules,
        roster: Roster,
        memory: KVMemory,
        lifecycle: Lifecycle,
        counters: Counters,
        step_limit: int,
    ) -> None:
        self._config = config
        self._rules = rules
        self._roster = roster
        self._memory = memory
        self._lifecycle = lifecycle
        self._counters = counters
        self._step_limit = step_limit
        self._arrivals = 0
        self._ranks = RankAssigner(
            config.dp_schedule_policy,
            roster,
            memory.match_length,
            lambda rank: memory.room(rank).full,
        )

    def accept(self, message: GenerateReq, stops: StopStrings, clock: Callable[[], float]) -> Req | None:
        """Queue the request, or answer its refusal (400 for what never fits, 503 for a full queue) and return None."""
        req = self._request(message, clock())
        refusal = self._refusal(req, message, stops)
        if refusal is not None:
            self._lifecycle.refuse(req, *refusal)
            return None
        capacity = self._memory.capacity(0)
        prompt = len(req.origin_input_ids)
        req.max_new_tokens = clip_new_tokens(
            prompt, message.sampling.max_new_tokens, capacity, self._config.context_len, self._rules
        )
        rank = self._ranks.assign(req, message.dp_rank)
        self._counters.requests[rank] += 1
        self._roster.enqueue(req, rank)
        return req

    def _request(self, message: GenerateReq, now: float) -> Req:
        req = Req(
            message.rid,
            "",
            message.input_ids,
            message.sampling,
            return_logprob=message.return_logprob,
            top_logprobs_num=message.top_logprobs_num,
            stream=message.stream,
            extra_key=message.extra_key,
            eos_token_ids=self._config.eos_token_ids,
            vocab_size=self._config.vocab_size,
            logprob_start_len=message.logprob_start_len,
            received_at=now,
        )
        self._arrivals += 1
        seed = message.sampling.seed
        drawn = (self._config.random_seed + self._arrivals * _SEED_MIX) if seed is None else seed
        req.seed = drawn & 0xFFFFFFFF
        return req

    def _refusal(self, req: Req, message: GenerateReq, stops: StopStrings) -> tuple[str, int] | None:
        """(message, HTTP status), or None when the request may wait."""
        config, prompt = self._config, len(req.origin_input_ids)
        if req.rid in self._roster.by_rid:
            return f"rid {req.rid!r} is in use by a request that has not ended", 400
        if config.max_queued is not None and self._roster.queued_count >= config.max_queued:
            return f"the queue is full: {self._roster.queued_count} waiting (--max-queued-requests)", 503
        if prompt == 0:
            return "input_ids is empty: give at least one token", 400
        ids = req.tokens(0, prompt)
        low, high = int(ids.min()), int(ids.max())
        if low < 0 or high >= config.vocab_size:
            wrong = low if low < 0 else high
            return f"input_ids holds {wrong}; valid token ids are 0..{config.vocab_size - 1}", 400
        if message.sampling.stop and not stops.available:
            return "stop strings need a tokenizer (--skip-tokenizer-init is set): use stop_token_ids", 400
        broken = never_fits(
            prompt, self._memory.capacity(0), config.context_len, self._step_limit, self._rules
        )
        return None if broken is None else (broken.message, 400)
