"""Monotonic counters per rank, gauges per pool and rank, and the log lines people grep.

Rates are for the reader: only totals are kept. A query counts once, at its first admission; a re-admission after retraction is
not a hit (D70), and nothing is ever set back (D71).
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from sgl_jax.srt.managers.kv_memory import KVMemory
from sgl_jax.srt.managers.roster import Roster
from sgl_jax.srt.mem_cache.ledger.snapshot import event_token_totals, event_totals
from sgl_jax.srt.mem_cache.window import reclaim_ends

logger = logging.getLogger(__name__)

#: Metric -> ledger event, for models with a window pool. Evictions count tokens, tombstones count nodes ...
_HYBRID_EVENTS = {
    "full_evicted_total": "full_evicted_total",
    "swa_evicted_total": "swa_evicted_total",
    "swa_evicted_tokens_total": "swa_evicted_total",
    "tombstone_created_total": "tombstone_created_total",
    "tombstone_healed_total": "tombstone_healed_total",
}
#: ... and these the tokens of those nodes.
_HYBRID_TOKENS = {
    "tombstoned_tokens_total": "tombstone_created_total",
    "healed_tokens_total": "tombstone_healed_total",
}


@dataclass(slots=True)
class Counters:
    """Totals since start, one entry per rank."""

    dp_size: int
    requests: list[int] = field(init=False)
    aborted: list[int] = field(init=False)
    retracted: list[int] = field(init=False)
    prompt_tokens: list[int] = field(init=False)
    cached_tokens: list[int] = field(init=False)
    swa_short_tokens: list[int] = field(init=False)
    readmitted_cached_tokens: list[int] = field(init=False)
    generation_tokens: list[int] = field(init=False)

    def __post_init__(self) -> None:
        for name in (
            "requests",
            "aborted",
            "retracted",
            "prompt_tokens",
            "cached_tokens",
            "swa_short_tokens",
            "readmitted_cached_tokens",
            "generation_tokens",
        ):
            setattr(self, name, [0] * self.dp_size)

    def admitted(self, rank: int, prompt: int, cached: int, swa_short: int, *, first: bool) -> None:
        """``swa_short``: tokens that FULL had beyond the hit and a missing window made useless."""
        if first:
            self.prompt_tokens[rank] += prompt
            self.cached_tokens[rank] += cached
            self.swa_short_tokens[rank] += swa_short
        else:
            self.readmitted_cached_tokens[rank] += cached

    def hit_rates(self) -> list[float]:
        """Per rank, the cached share of all prompt tokens so far; 0 before the first."""
        return [
            cached / prompt if prompt else 0.0
            for cached, prompt in zip(self.cached_tokens, self.prompt_tokens)
        ]

    def totals(self) -> dict[str, list[int]]:
        """By Prometheus name, without the ``sglang:`` prefix."""
        return {
            "num_requests_total": list(self.requests),
            "num_aborted_requests_total": list(self.aborted),
            "num_retracted_reqs": list(self.retracted),
            "prompt_tokens_total": list(self.prompt_tokens),
            "cached_tokens_total": list(self.cached_tokens),
            "readmitted_cached_tokens_total": list(self.readmitted_cached_tokens),
            "generation_tokens_total": list(self.generation_tokens),
        }


def _joined(values: Sequence[Any]) -> str:
    """One value, or the per-rank list."""
    return str(values[0]) if len(values) == 1 else "[" + ", ".join(str(value) for value in values) + "]"


class Stats:
    """Reads gauges from the managers and writes the periodic log lines."""

    def __init__(
        self, counters: Counters, roster: Roster, memory: KVMemory, *, decode_log_interval: int
    ) -> None:
        self.counters = counters
        self._roster = roster
        self._memory = memory
        self._interval = decode_log_interval
        self._decode_steps = 0
        self._logged_at = 0.0
        self._logged_tokens = 0
        self.gen_throughput = 0.0

    # ------------------------------------------------------------------------------------------------------------- gauges
    def rank_gauges(self, rank: int) -> dict[str, Any]:
        """Gauges of one rank, by Prometheus name without prefix; tokens are slots of the rank."""
        memory, seats = self._memory, self._roster.seats[rank]
        capacity, free, evictable = memory.capacity(rank), memory.available(rank), memory.evictable(rank)
        used = capacity.full - free.full - evictable.full
        gauges: dict[str, Any] = {
            "num_running_reqs": seats.taken_count,
            "num_queue_reqs": len(self._roster.waiting[rank]),
            "num_used_tokens": used,
            "full_token_usage": used / capacity.full if capacity.full else 0.0,
            "max_total_num_tokens": capacity.full,
            "page_size": memory.page_size,
            "kv_available_tokens": free.full,
            "kv_evictable_tokens": evictable.full,
            "gen_throughput": self.gen_throughput,
        }
        gauges["token_usage"] = gauges["full_token_usage"]
        if memory.hybrid:
            swa_used = capacity.swa - free.swa - evictable.swa
            usage = swa_used / capacity.swa if capacity.swa else 0.0
            gauges.update(
                swa_used_tokens=swa_used,
                swa_token_usage=usage,
                max_total_num_tokens_swa=capacity.swa,
                swa_available_tokens=free.swa,
                swa_evictable_tokens=evictable.swa,
                swa_lock_held_tokens=memory.protected(rank).swa,
                reclaim_lag_tokens=self._reclaim_lag(rank),
                token_usage=max(usage, gauges["full_token_usage"]),
            )
        return gauges

    def _reclaim_lag(self, rank: int) -> int:
        """Tokens of running requests that left the window and still hold a window slot: what a reclaim would free now."""
        seats, window = self._roster.seats[rank], getattr(self._memory.cache, "sliding_window_size", 0) or 0
        ends = reclaim_ends(seats.processed[seats.taken], window, self._memory.page_size)
        return int(np.maximum(ends - seats.reclaimed[seats.taken], 0).sum())

    def snapshot(self) -> dict[str, Any]:
        """What a heartbeat carries: per-rank gauges and monotonic totals (lists over ranks)."""
        cache, ranks = self._memory.cache, range(self._roster.dp_size)
        counters: dict[str, list[int]] = self.counters.totals()
        events = [event_totals(cache, rank) for rank in ranks]
        counters["evicted_tokens_total"] = [int(totals.get("full_evicted_total", 0)) for totals in events]
        if self._memory.hybrid:
            tokens = [event_token_totals(cache, rank) for rank in ranks]
            for name, source in _HYBRID_EVENTS.items():
                counters[name] = [int(totals.get(source, 0)) for totals in events]
            for name, source in _HYBRID_TOKENS.items():
                counters[name] = [int(totals.get(source, 0)) for totals in tokens]
            counters["full_hit_swa_short_tokens_total"] = list(self.counters.swa_short_tokens)
        return {
            "ranks": [self.rank_gauges(rank) for rank in range(self._roster.dp_size)],
            "counters": counters,
        }

    # ---------------------------------------------------------------------------------------------------------- log lines
    def log_prefill(self, new_seqs: Sequence[int], new_tokens: Sequence[int], cached: Sequence[int]) -> None:
        if not logger.isEnabledFor(logging.INFO):
            return
        gauges = [self.rank_gauges(rank) for rank in range(self._roster.dp_size)]
        logger.info(
            "Prefill batch. #new-seq: %s, #new-token: %s, #cached-token: %s, %s, #running-req: %s, #queue-req: %s, "
            "cache hit rate: %s",
            _joined(new_seqs),
            _joined(new_tokens),
            _joined(cached),
            self._usage(gauges, with_tokens=False),
            _joined([g["num_running_reqs"] for g in gauges]),
            _joined([g["num_queue_reqs"] for g in gauges]),
            _joined([f"{100 * rate:.2f}%" for rate in self.counters.hit_rates()]),
        )

    def decode_step_done(self, now: float) -> None:
        """Count a decode step; every ``decode_log_interval`` of them writes the line and renews the throughput."""
        self._decode_steps += 1
        if self._decode_steps % self._interval:
            return
        total = sum(self.counters.generation_tokens)
        elapsed = now - self._logged_at
        if self._logged_at and elapsed > 0:
            self.gen_throughput = (total - self._logged_tokens) / elapsed
        self._logged_at, self._logged_tokens = now, total
        if not logger.isEnabledFor(logging.INFO):
            return
        gauges = [self.rank_gauges(rank) for rank in range(self._roster.dp_size)]
        logger.info(
            "Decode batch. #running-req: %s, %s, gen throughput (token/s): %.2f, #queue-req: %s",
            _joined([g["num_running_reqs"] for g in gauges]),
            self._usage(gauges, with_tokens=True),
            self.gen_throughput,
            _joined([g["num_queue_reqs"] for g in gauges]),
        )

    def _usage(self, gauges: Sequence[dict[str, Any]], *, with_tokens: bool) -> str:
        def column(name: str) -> str:
            return _joined([g[name] if isinstance(g[name], int) else f"{g[name]:.2f}" for g in gauges])

        if not self._memory.hybrid:
            tokens = f"#token: {column('num_used_tokens')}, " if with_tokens else ""
            return f"{tokens}token usage: {column('token_usage')}"
        if not with_tokens:
            return f"full token usage: {column('full_token_usage')}, swa token usage: {column('swa_token_usage')}"
        return (
            f"#full token: {column('num_used_tokens')}, full token usage: {column('full_token_usage')}, "
            f"#swa token: {column('swa_used_tokens')}, swa token usage: {column('swa_token_usage')}"
        )
