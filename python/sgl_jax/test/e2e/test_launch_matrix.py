"""Page size x ratio x route x chunking x total: a server starts and serves the longest prompt it accepts, or is refused by name.

Plans, caches, allocators and scheduler are the server's own; the device is numpy with real paged memory (:class:`HashWorker`).
"""

from __future__ import annotations

import re

import pytest

from sgl_jax.srt.configs.model_config import ModelConfig
from sgl_jax.srt.managers.build import build_scheduler
from sgl_jax.srt.managers.io_struct import GenerateReq, SamplingParams, TokenBatch
from sgl_jax.srt.mem_cache.sizing import PoolConfigError, PoolPlan
from sgl_jax.srt.model_executor.memory_budget import DeviceMemory, make_plan
from sgl_jax.srt.model_executor.noop_worker import HashWorker, hash_reference
from sgl_jax.srt.model_executor.worker import step_limits
from sgl_jax.srt.server_args import ServerArgs
from sgl_jax.test.models.reference_prompts import CHECKPOINT

HOST = DeviceMemory("cpu", 16 << 30, 8 << 30)
CONTEXT = 2048
ROUTES = {
    "UnifiedRadixCache(FULL,SWA)": {"enable_unified_radix_tree": True},
    "SWARadixCache": {},
    "SWAChunkCache": {"disable_radix_cache": True},
    "UnifiedRadixCache(FULL)": {"enable_unified_radix_tree": True, "disable_hybrid_swa_memory": True},
}


class Device(HashWorker):
    """Limits as the model worker derives them from the same arguments."""

    def __init__(self, args: ServerArgs, config: ModelConfig, plan: PoolPlan) -> None:
        super().__init__(
            config.vocab_size,
            plan.page_size,
            plan.full_pages,
            window=plan.demand.rules.window,
            swa_pages_per_rank=plan.swa_pages,
        )
        limits = step_limits(args, config, plan, on_cpu=True)
        self._max_batch, self._max_extend_tokens = limits.max_batch, limits.max_extend_tokens


def model(window: int) -> ModelConfig:
    overrides = {"sliding_window": window, "dtype": "float32", "context_length": CONTEXT}
    return ModelConfig.from_path(CHECKPOINT, overrides)


def serve(args: ServerArgs, config: ModelConfig, plan: PoolPlan, route: str) -> None:
    """Short prompts side by side, then the longest one twice; the tokens are the oracle's and the books balance."""
    messages: list = []
    scheduler = build_scheduler(
        args, worker=Device(args, config, plan), send=messages.append, model_config=config, plan=plan
    )
    info = scheduler.ready().info
    assert info["cache_route"]["impl"] == route
    longest = info["max_req_input_len"]
    assert longest == min(CONTEXT - 1, plan.full_tokens - plan.page_size - 1)
    assert plan.largest_request == longest + 1 or args.chunked_prefill_size == -1
    prompts = {f"short {n}": [3 + n] * 5 for n in range(3)} | {"long": [7 + i % 300 for i in range(longest)]}
    for phase in (list(prompts)[:3], ["long"], ["long"]):
        outputs: dict[str, list[int]] = {rid: [] for rid in phase}
        for rid in phase:
            sampling = SamplingParams(max_new_tokens=3, temperature=0.0, ignore_eos=True)
            scheduler.handle(GenerateReq(rid=rid, input_ids=prompts[rid], sampling=sampling))
        scheduler.run_until_idle(10_000)
        outs = [out for m in messages if isinstance(m, TokenBatch) for out in m.outs]
        messages.clear()
        for out in outs:
            outputs[out.rid] += out.token_ids
            if out.finish is not None and out.finish.type != "length":
                assert (out.rid, out.finish.status, args.chunked_prefill_size) == ("long", 400, -1)
                assert "set --chunked-prefill-size" in out.finish.message
                del outputs[out.rid]
        for rid, tokens in outputs.items():
            room = min(CONTEXT, plan.full_tokens - plan.page_size) - len(prompts[rid])
            want = hash_reference(prompts[rid], min(3, room), config.vocab_size, plan.demand.rules.window)
            assert tokens == want, rid
    assert scheduler.idle.violations(require_idle=True) == []


@pytest.mark.parametrize("window", [32, 160])
@pytest.mark.parametrize("chunk", [None, 256, -1])
@pytest.mark.parametrize("page", [1, 128, 256])
@pytest.mark.parametrize("route", ROUTES)
def test_every_combination_starts_and_serves_or_is_refused_by_name(route, page, chunk, window):
    """D74, D72: also the total that a refusal recommends starts and serves."""
    config = model(window)
    ratios = (None, 0.05, 1.0) if "disable_hybrid_swa_memory" not in ROUTES[route] else (None,)
    for ratio in ratios:
        for total in (1000, 30_000):
            given = {"page_size": page, "chunked_prefill_size": chunk, "swa_full_tokens_ratio": ratio}

            def arguments(total=total, given=given) -> ServerArgs:
                return ServerArgs(
                    model_path=str(CHECKPOINT),
                    device="cpu",
                    max_total_tokens=total,
                    max_running_requests=4,
                    debug_cache=True,
                    skip_tokenizer_init=True,
                    **ROUTES[route],
                    **{name: value for name, value in given.items() if value is not None},
                )

            try:
                plan = make_plan(arguments(), config, HOST)
            except PoolConfigError as error:
                assert f"--max-total-tokens {total}: " in str(error) and "minimum" in str(error)
                total = int(re.search(r"use --max-total-tokens (\d+) or more", str(error))[1])
                plan = make_plan(arguments(total), config, HOST)  # what the message recommends works
            serve(arguments(total), config, plan, route)
