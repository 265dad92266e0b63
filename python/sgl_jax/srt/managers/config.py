"""What the scheduler needs to know, resolved once: plain values, no server arguments and no model."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class SchedulerConfig:
    """Limits are per DP rank unless a name says otherwise.

    ``window`` W (keys a query sees, itself included) is None for models without a window pool. ``chunk_size`` None: prompts
    are prefilled whole. ``max_running`` is also the number of seats. ``reclaim_multiplier`` scales the reclaim interval.
    """

    page_size: int
    dp_size: int
    context_len: int
    vocab_size: int
    max_running: int
    chunk_size: int | None
    max_prefill_tokens: int
    window: int | None = None
    eos_token_ids: frozenset[int] = frozenset()
    schedule_policy: str = "fcfs"
    dp_schedule_policy: str = "cache_aware"
    conservativeness: float = 1.0
    overlap: bool = True
    max_queued: int | None = None
    decode_log_interval: int = 40
    random_seed: int = 42
    reclaim_multiplier: float = 1.0
    route: str = ""
