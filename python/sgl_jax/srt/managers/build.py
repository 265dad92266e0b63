"""Construction order of a scheduler: refuse, model and pools, allocator, rows, cache, managers.

``build_scheduler`` is the one way in: the scheduler process, the tests, the equality matrix and the benchmarks all use it.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import Any

from sgl_jax.srt.configs.model_config import ModelConfig
from sgl_jax.srt.managers.config import SchedulerConfig
from sgl_jax.srt.managers.frontend.tokenizer import load_tokenizer
from sgl_jax.srt.managers.io_struct import ToFrontEnd
from sgl_jax.srt.managers.kv_memory import KVMemory
from sgl_jax.srt.managers.scheduler import Scheduler, SchedulerOptions
from sgl_jax.srt.mem_cache.kv_cache_builder import build_kv_cache, refuse_unsupported
from sgl_jax.srt.mem_cache.registry import Route, route_for
from sgl_jax.srt.mem_cache.sizing import CapRules, PoolPlan
from sgl_jax.srt.model_executor.forward_inputs import Worker
from sgl_jax.srt.server_args import ServerArgs

#: Folder for crash bundles; the working directory's ``crash-bundles`` without it.
CRASH_DIR_ENV = "SGL_JAX_CRASH_DIR"


def build_allocator(plan: PoolPlan, kv_pool: Any, *, strict: bool) -> Any:
    """The allocator over ``kv_pool``: dual for a plan with a window pool, else token or paged by page size.

    ``kv_pool`` None: a pool without device arrays (workers that keep no memory of their own).
    """
    from sgl_jax.srt.mem_cache.allocator import (
        PagedTokenToKVPoolAllocator,
        SWATokenToKVPoolAllocator,
        TokenToKVPoolAllocator,
    )
    from sgl_jax.srt.mem_cache.memory_pool import SWAKVPool

    page, dp = plan.page_size, plan.dp_size
    allocator: Any
    if plan.demand.hybrid:
        if kv_pool is None:
            kv_pool = SWAKVPool.host_only(plan.total_full_tokens, plan.total_swa_tokens, page, dp)
        allocator = SWATokenToKVPoolAllocator(
            plan.total_full_tokens, plan.total_swa_tokens, kv_pool, page, dp, strict=strict
        )
    elif page == 1:
        allocator = TokenToKVPoolAllocator(plan.total_full_tokens, kv_pool, dp)
    else:
        allocator = PagedTokenToKVPoolAllocator(plan.total_full_tokens, page, kv_pool, dp_size=dp)
    allocator.strict = strict
    return allocator


def build_memory(
    args: ServerArgs, model_config: ModelConfig, plan: PoolPlan, kv_pool: Any, seats: int
) -> KVMemory:
    """Allocator, request rows (one per seat and rank) and the routed cache. Raises ValueError for an unsupported route."""
    from sgl_jax.srt.mem_cache.memory_pool import ReqToTokenPool

    allocator = build_allocator(plan, kv_pool, strict=args.debug_cache)
    rows = ReqToTokenPool(seats * plan.dp_size, model_config.context_len)
    cache = build_kv_cache(
        server_args=args,
        model_config=model_config,
        req_to_token_pool=rows,
        token_to_kv_pool_allocator=allocator,
        page_size=plan.page_size,
        is_hybrid=plan.demand.hybrid,
        sliding_window_size=plan.demand.rules.window,
        tp_size=args.tp_size // args.dp_size,
        spec_algorithm=None,
    )
    return KVMemory(cache, allocator, rows, plan.page_size, plan.dp_size)


def scheduler_config(
    args: ServerArgs, model_config: ModelConfig, rules: CapRules, seats: int, route: Route
) -> SchedulerConfig:
    """The scheduler's constants from resolved arguments, model and caps."""
    return SchedulerConfig(
        page_size=args.page_size,
        dp_size=args.dp_size,
        context_len=model_config.context_len,
        vocab_size=model_config.vocab_size,
        max_running=seats,
        chunk_size=rules.chunk_size,
        max_prefill_tokens=args.max_prefill_tokens,
        window=rules.window,
        eos_token_ids=frozenset(model_config.tokens.eos),
        schedule_policy=args.schedule_policy,
        dp_schedule_policy=args.dp_schedule_policy,
        conservativeness=args.schedule_conservativeness,
        overlap=not args.disable_overlap_schedule,
        max_queued=args.max_queued_requests,
        decode_log_interval=args.decode_log_interval,
        random_seed=args.random_seed,
        reclaim_multiplier=rules.interval_multiplier,
        route=route.name,
    )


def build_scheduler(
    server_args: ServerArgs,
    *,
    worker: Worker | None = None,
    send: Callable[[ToFrontEnd], None],
    model_config: ModelConfig | None = None,
    plan: PoolPlan | None = None,
) -> Scheduler:
    """A scheduler in this process. ``worker`` None: the real model worker.

    A worker of your own brings ``model_config`` and ``plan`` as attributes, or takes the ones given here; its ``kv_pool`` may be
    None. Raises ValueError (flag, value, remedy) before anything is allocated when the route is unsupported.
    """
    model_config = model_config or getattr(worker, "model_config", None)
    if model_config is None:
        from sgl_jax.srt.model_executor.worker import resolve_model_config

        model_config = resolve_model_config(server_args)
    hybrid = model_config.is_hybrid_swa and not server_args.disable_hybrid_swa_memory
    route = route_for(server_args, hybrid)
    if route.inputs.new_route:
        refuse_unsupported(server_args, False, None)
    if worker is None:
        from sgl_jax.srt.model_executor.worker import ModelWorker

        worker = ModelWorker(server_args, model_config, plan)
    plan = plan or getattr(worker, "plan", None)
    if plan is None:
        from sgl_jax.srt.model_executor.memory_budget import make_plan

        plan = make_plan(server_args, model_config)
    wanted = server_args.max_running_requests
    seats = min(worker.max_batch, -(-wanted // plan.dp_size)) if wanted else worker.max_batch
    memory = build_memory(server_args, model_config, plan, worker.kv_pool, seats)
    check = getattr(worker, "check_allocator", None)
    if check is not None:
        check(memory.allocator)
    rules = plan.demand.rules
    effective = {
        "dtype": model_config.dtype,
        "chunked_prefill_size": min(rules.chunk_size or worker.max_extend_tokens, worker.max_extend_tokens),
    }
    options = SchedulerOptions(
        load_tokenizer=None if server_args.skip_tokenizer_init else lambda: load_tokenizer(server_args),
        crash_dir=os.environ.get(CRASH_DIR_ENV, "crash-bundles"),
        resolved_args=server_args.describe(),
        info={"cache_route": route.to_dict(), "plan": list(plan.sources), "effective": effective},
    )
    config = scheduler_config(server_args, model_config, rules, seats, route)
    return Scheduler(config, memory, worker, send, options)
