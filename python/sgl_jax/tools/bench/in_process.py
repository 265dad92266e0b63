"""A whole scheduler over a worker that computes nothing, built the way a server builds it: for host-cost benchmarks."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from sgl_jax.srt.configs.model_config import TokenIds
from sgl_jax.srt.managers.build import build_scheduler
from sgl_jax.srt.managers.io_struct import GenerateReq, SamplingParams, ToFrontEnd
from sgl_jax.srt.managers.scheduler import Scheduler
from sgl_jax.srt.mem_cache.sizing import CapRules, PoolDemand, PoolPlan
from sgl_jax.srt.model_executor.forward_inputs import StepHandle, StepInputs
from sgl_jax.srt.model_executor.noop_worker import NoOpWorker
from sgl_jax.srt.server_args import ServerArgs

VOCAB = 32_000


@dataclass(frozen=True, slots=True)
class HybridShape:
    """The few facts about a model that scheduling depends on."""

    context_len: int
    sliding_window: int
    vocab_size: int = VOCAB
    is_hybrid_swa: bool = True
    dtype: str = "bfloat16"
    head_dim: int = 128
    num_hidden_layers: int = 2
    tokens: TokenIds = field(default_factory=lambda: TokenIds(None, (), None))

    def get_num_kv_heads(self, tensor_parallel_size: int) -> int:
        return 1


class TimedWorker(NoOpWorker):
    """Adds up the thread CPU time spent in the worker itself."""

    def __init__(self, dp_size: int, max_batch: int) -> None:
        super().__init__(VOCAB, dp_size=dp_size, max_batch=max_batch)
        self.cpu = 0.0

    def launch(self, step: StepInputs) -> StepHandle:
        began = time.thread_time()
        handle = super().launch(step)
        self.cpu += time.thread_time() - began
        return handle


def build(
    *,
    page_size: int,
    window: int,
    context_len: int,
    full_tokens: int,
    swa_tokens: int,
    batch: int,
    send: Callable[[ToFrontEnd], None] = lambda message: None,
    **flags: Any,
) -> tuple[Scheduler, TimedWorker]:
    """Scheduler and worker for a hybrid model; pool sizes are per rank. ``flags`` are server arguments."""
    args = ServerArgs(
        model_path="no-model",
        page_size=page_size,
        max_running_requests=batch,
        skip_tokenizer_init=True,
        log_level="error",
        **flags,
    )
    chunk = args.chunked_prefill_size
    rules = CapRules(
        page_size,
        window,
        chunk if chunk > 0 else None,
        chunks_in_flight=1 if args.disable_overlap_schedule else 2,
    )
    demand = PoolDemand(1, 1, args.dp_size, context_len, rules)
    plan = PoolPlan(demand, full_tokens, swa_tokens, ("benchmark",))
    worker = TimedWorker(args.dp_size, -(-batch // args.dp_size))
    model: Any = HybridShape(context_len, window)
    return build_scheduler(args, worker=worker, send=send, model_config=model, plan=plan), worker


def request(rid: str, prompt: list[int], new_tokens: int, *, stream: bool = True) -> GenerateReq:
    sampling = SamplingParams(max_new_tokens=new_tokens, temperature=0.0, ignore_eos=True)
    return GenerateReq(rid=rid, input_ids=prompt, sampling=sampling, stream=stream)
