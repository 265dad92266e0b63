"""Random corners of the configuration space, and a whole scheduler for one, built as the server builds it."""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from sgl_jax.srt.configs.model_config import ModelConfig
from sgl_jax.srt.managers.build import build_memory, scheduler_config
from sgl_jax.srt.managers.io_struct import ToFrontEnd
from sgl_jax.srt.managers.scheduler import Scheduler, SchedulerOptions
from sgl_jax.srt.mem_cache.page import ceil_page
from sgl_jax.srt.mem_cache.registry import route_for
from sgl_jax.srt.mem_cache.sizing import (
    CapRules,
    PoolDemand,
    PoolPlan,
    full_request_cap,
    minimum_full_tokens,
    minimum_swa_tokens,
)
from sgl_jax.srt.server_args import ServerArgs
from sgl_jax.test.managers.fuzz.worker import DeferredHashWorker

VOCAB = 499
FIRST_TOKEN = 3
HYBRID = ("unified_swa", "legacy_swa", "swa_chunk")
PLAIN = ("unified_full", "radix", "chunk")
ROUTES = HYBRID + PLAIN
_LETTERS = "abcd"


@dataclass(frozen=True, slots=True)
class FuzzConfig:
    """One corner. Pages are per rank; ``chunk`` -1 is off; ``tight`` pools are below what the sizer would accept.

    ``prompts`` describes the prompt tree and the traffic, see ``traffic.py``.
    """

    route: str
    page: int
    window: int
    dp: int
    overlap: bool
    chunk: int
    max_prefill: int
    step_limit: int
    full_pages: int
    swa_pages: int
    seats: int
    context: int
    policy: str
    dp_policy: str
    conservativeness: float
    eos: int
    max_queued: int | None
    strict: bool = True
    tight: bool = False

    @property
    def hybrid(self) -> bool:
        return self.route in HYBRID

    @property
    def radix(self) -> bool:
        return self.route not in ("swa_chunk", "chunk")

    @property
    def eos_ids(self) -> frozenset[int]:
        """The ``eos`` lowest sampled ids end a request."""
        return frozenset(range(FIRST_TOKEN, FIRST_TOKEN + self.eos))

    @property
    def full_tokens(self) -> int:
        return self.full_pages * self.page

    @property
    def swa_tokens(self) -> int:
        return self.swa_pages * self.page

    @property
    def rules(self) -> CapRules:
        return CapRules(
            self.page,
            self.window if self.hybrid else None,
            self.chunk if self.chunk > 0 else None,
            1.0,
            2 if self.overlap else 1,
        )

    @property
    def plan(self) -> PoolPlan:
        demand = PoolDemand(1, 1 if self.hybrid else 0, self.dp, self.context, self.rules)
        return PoolPlan(demand, self.full_tokens, self.swa_tokens, ("fuzz",))


def _window(rng: random.Random, page: int) -> int:
    """Smaller than, equal to and larger than the page, and one off each of them."""
    choice = rng.choice([page // 2, page - 1, page, page + 1, 2 * page, 2 * page + 1, 3 * page - 1, 5, 9])
    return max(1, choice)


def draw_config(rng: random.Random, route: str | None = None) -> FuzzConfig:
    """A configuration; ``route`` pins that one dimension. Many requests in a small pool are drawn on purpose, see :func:`_squeezed`."""
    route = route or rng.choice(ROUTES + HYBRID + ("unified_swa", "unified_swa"))
    config = _draw(rng, route)
    return _squeezed(rng, config) if rng.random() < 0.4 else config


def _squeezed(rng: random.Random, config: FuzzConfig) -> FuzzConfig:
    """Short windows, many seats, and one pool just above its minimum: eviction, tombstones, healing and retraction all the time."""
    page, context = rng.choice([1, 1, 4]), rng.choice([60, 100])
    small = replace(
        config,
        page=page,
        window=rng.choice([1, 2, 3, 5, 9]),
        chunk=rng.choice([page, 2 * page, 8, 16, -1]),
        max_prefill=rng.choice([8, 64]),
        step_limit=1 << 20,
        seats=rng.choice([4, 8, 16]),
        context=context,
        conservativeness=0.01,
        tight=False,
        eos=rng.choice([0, 0, 3]),
    )
    full_min = full_request_cap(context, 0, small.rules) // page
    full = rng.choice([full_min // 2, full_min, full_min + 3, 3 * full_min])
    swa = 0
    if small.hybrid:
        swa = minimum_swa_tokens(context, small.rules) // page + rng.choice([0, 1, 3, 8, 20])
        full = max(full, swa)
    return replace(small, full_pages=full, swa_pages=swa)


def _draw(rng: random.Random, route: str) -> FuzzConfig:
    page = rng.choice([1, 1, 4, 4, 16, 128])
    window = _window(rng, page)
    overlap = rng.random() < 0.6
    chunk = rng.choice(
        [page, 2 * page, 3 * page, max(page, 16 // page * page), max(page, 64 // page * page), -1]
    )
    context = rng.choice([3, 5, 8]) * page + rng.choice([0, 40, 90, 200]) + rng.choice([0, 1, page // 2])
    context = max(context, 12)
    hybrid = route in HYBRID
    rules = CapRules(page, window if hybrid else None, chunk if chunk > 0 else None, 1.0, 2 if overlap else 1)
    tight = rng.random() < 0.12
    full_min, swa_min = minimum_full_tokens(rules) // page, minimum_swa_tokens(context, rules) // page
    largest = full_request_cap(context, 0, rules) // page
    spread = rng.choice([0, 1, 3, largest, 2 * largest])
    full = max(full_min, rng.choice([full_min + 1, largest // 2, largest, largest])) + rng.randint(0, spread)
    swa = swa_min + rng.randint(0, rng.choice([0, 2, 5, max(1, full)])) if hybrid else 0
    if tight:
        full, swa = max(2, full - rng.randint(0, 3)), max(2, swa - rng.randint(1, 6)) if hybrid else 0
    elif hybrid:
        full = max(full, swa)  # the ratio is at most 1
    seats = rng.choice([1, 2, 4, 6, 12, 12])
    radix = route not in ("swa_chunk", "chunk")
    return FuzzConfig(
        route=route,
        page=page,
        window=window,
        dp=rng.choice([1, 1, 2]),
        overlap=overlap,
        chunk=chunk,
        max_prefill=max(page, rng.choice([page, 2 * page, 64, 4 * page + 3, 4096])),
        step_limit=max(page, rng.choice([ceil_page(context, page), ceil_page(context // 2, page), 1 << 20])),
        full_pages=full,
        swa_pages=swa,
        seats=seats,
        context=context,
        policy=rng.choice(["fcfs", "lpm", "random"] if radix else ["fcfs", "random"]),
        dp_policy=rng.choice(["cache_aware", "min_running_queue", "round_robin"][0 if radix else 1 :]),
        conservativeness=rng.choice([0.01, 0.01, 0.01, 0.3, 1.0, 1.5]),
        eos=rng.choice([0, 0, 5, 40]),
        max_queued=rng.choice([None] * 7 + [3]),
        strict=rng.random() < 0.9,
        tight=tight,
    )


class LetterTokenizer:
    """One letter per token: enough for stop strings."""

    def decode(self, token_ids: list[int], skip_special_tokens: bool = True) -> str:
        return "".join(_LETTERS[token % len(_LETTERS)] for token in token_ids)


def _model(config: FuzzConfig) -> ModelConfig:
    raw: dict[str, Any] = {
        "architectures": ["Qwen3ForCausalLM"],
        "model_type": "qwen3",
        "dtype": "float32",
        "head_dim": 8,
        "hidden_act": "silu",
        "hidden_size": 16,
        "intermediate_size": 16,
        "max_position_embeddings": config.context,
        "num_attention_heads": 2,
        "num_key_value_heads": 2,
        "num_hidden_layers": 2,
        "vocab_size": VOCAB,
        "eos_token_id": sorted(config.eos_ids),
        "tie_word_embeddings": True,
    }
    if config.hybrid:
        raw |= {
            "architectures": ["Gemma3ForCausalLM"],
            "model_type": "gemma3_text",
            "hidden_activation": "gelu_pytorch_tanh",
        }
        raw |= {"layer_types": ["sliding_attention", "full_attention"], "sliding_window": config.window}
    return ModelConfig.from_hf_dict(raw)


def _server_args(config: FuzzConfig) -> ServerArgs:
    return ServerArgs(
        model_path="/nowhere",
        device="cpu",
        tp_size=config.dp,
        dp_size=config.dp,
        page_size=config.page,
        max_running_requests=config.seats * config.dp,
        chunked_prefill_size=config.chunk,
        max_prefill_tokens=config.max_prefill,
        disable_radix_cache=not config.radix,
        enable_unified_radix_tree=config.route.startswith("unified"),
        disable_overlap_schedule=not config.overlap,
        schedule_policy=config.policy,
        dp_schedule_policy=config.dp_policy,
        schedule_conservativeness=config.conservativeness,
        max_queued_requests=config.max_queued,
        debug_cache=config.strict,
        log_level="error",
    )


def build(
    config: FuzzConfig, send: Callable[[ToFrontEnd], None], clock: Callable[[], float], crash_dir: str | Path
) -> Scheduler:
    """The scheduler of a configuration over a numpy device that runs as late as it may."""
    args, model = _server_args(config), _model(config)
    route = route_for(args, config.hybrid)
    if route.name != config.route and not (config.route == "chunk" and route.name == "radix"):
        raise AssertionError(f"wanted route {config.route}, the registry gives {route.name}")
    worker = DeferredHashWorker(
        VOCAB,
        config.page,
        config.full_pages,
        window=config.window if config.hybrid else None,
        swa_pages_per_rank=config.swa_pages,
        dp_size=config.dp,
        max_extend_tokens=config.step_limit,
    )
    memory = build_memory(args, model, config.plan, None, config.seats)
    options = SchedulerOptions(load_tokenizer=LetterTokenizer, clock=clock, crash_dir=crash_dir)
    return Scheduler(
        scheduler_config(args, model, config.rules, config.seats, route), memory, worker, send, options
    )
