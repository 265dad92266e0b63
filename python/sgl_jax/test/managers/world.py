"""A whole scheduler in one process over a numpy device, for tests: real caches, real allocators, no model.

The device (:class:`HashWorker`) keeps token ids in paged memory and samples a hash of what it reads back, so a slot that changed
hands too early, a wrong row or a missing window page changes the output or raises.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from sgl_jax.srt.managers.config import SchedulerConfig
from sgl_jax.srt.managers.io_struct import (
    AbortReq,
    ControlReq,
    GenerateReq,
    Reply,
    SamplingParams,
    TokenBatch,
    TokenOut,
)
from sgl_jax.srt.managers.kv_memory import KVMemory
from sgl_jax.srt.managers.request import Req
from sgl_jax.srt.managers.scheduler import Scheduler, SchedulerOptions
from sgl_jax.srt.mem_cache.allocator import (
    PagedTokenToKVPoolAllocator,
    SWATokenToKVPoolAllocator,
    TokenToKVPoolAllocator,
)
from sgl_jax.srt.mem_cache.cache_init_params import CacheInitParams
from sgl_jax.srt.mem_cache.memory_pool import ReqToTokenPool, SWAKVPool
from sgl_jax.srt.model_executor.noop_worker import HashWorker, NoOpWorker, hash_reference

VOCAB = 997
CACHES = ("unified", "legacy", "chunk")


def prompt(length: int, first: int = 3) -> list[int]:
    """``first``, ``first + 1``, ...: prompts with the same ``first`` share their prefix."""
    return [first + i % (VOCAB - first) for i in range(length)]


@dataclass(frozen=True)
class Setup:
    """One corner of the test space. Pages are per rank. ``cache``: unified, legacy, chunk (hybrid) or plain, plain_radix, plain_chunk."""

    cache: str = "unified"
    page: int = 1
    window: int = 4
    dp: int = 1
    full_pages: int = 64
    swa_pages: int = 48
    seats: int = 8
    context: int = 512
    chunk: int | None = 8
    max_prefill: int = 64
    overlap: bool = True
    policy: str = "fcfs"
    dp_policy: str = "cache_aware"
    eos: frozenset[int] = frozenset()
    max_queued: int | None = None
    conservativeness: float = 1.0
    noop: bool = False
    tokenizer: Any = None
    crash_dir: str = "crash-bundles"

    @property
    def hybrid(self) -> bool:
        return not self.cache.startswith("plain")


def build_cache(setup: Setup, rows: ReqToTokenPool) -> tuple[Any, Any]:
    """(cache, allocator) of a setup."""
    size = setup.full_pages * setup.page * setup.dp
    if not setup.hybrid:
        allocator: Any = (
            TokenToKVPoolAllocator(size, None, setup.dp)
            if setup.page == 1
            else PagedTokenToKVPoolAllocator(size, setup.page, None, dp_size=setup.dp)
        )
        allocator.strict = True
        return _plain_cache(setup, rows, allocator), allocator
    swa_size = setup.swa_pages * setup.page * setup.dp
    kv = SWAKVPool.host_only(size, swa_size, setup.page, setup.dp)
    allocator = SWATokenToKVPoolAllocator(size, swa_size, kv, setup.page, setup.dp, strict=True)
    if setup.cache == "chunk":
        from sgl_jax.srt.mem_cache.chunk_cache import SWAChunkCache

        return SWAChunkCache(rows, allocator, setup.page, setup.window), allocator
    if setup.cache == "legacy":
        from sgl_jax.srt.mem_cache.swa_radix_cache import SWARadixCache

        return SWARadixCache(rows, allocator, setup.window, setup.page), allocator
    from sgl_jax.srt.mem_cache.unified_cache_components import ComponentType
    from sgl_jax.srt.mem_cache.unified_radix_cache import UnifiedRadixCache

    params = CacheInitParams(rows, allocator, setup.page, sliding_window_size=setup.window)
    cache = UnifiedRadixCache(
        rows,
        allocator,
        page_size=setup.page,
        tree_components=(ComponentType.FULL, ComponentType.SWA),
        component_init_params=params,
    )
    return cache, allocator


def _plain_cache(setup: Setup, rows: ReqToTokenPool, allocator: Any) -> Any:
    if setup.cache == "plain_chunk":
        from sgl_jax.srt.mem_cache.chunk_cache import ChunkCache

        return ChunkCache(rows, allocator, setup.page)
    if setup.cache == "plain_radix":
        from sgl_jax.srt.mem_cache.radix_cache import RadixCache

        return RadixCache(rows, allocator, page_size=setup.page)
    from sgl_jax.srt.mem_cache.unified_radix_cache import UnifiedRadixCache

    return UnifiedRadixCache(rows, allocator, page_size=setup.page)


@dataclass
class World:
    """A scheduler with everything it sent. ``outputs[rid]`` collects token ids, ``ends[rid]`` the terminal messages."""

    setup: Setup
    scheduler: Scheduler
    worker: Any
    outputs: dict[str, list[int]] = field(default_factory=dict)
    ends: dict[str, list[TokenOut]] = field(default_factory=dict)
    outs: list[TokenOut] = field(default_factory=list)
    replies: list[Reply] = field(default_factory=list)
    now: float = 1000.0
    prompts: dict[str, list[int]] = field(default_factory=dict)

    def receive(self, message: Any) -> None:
        if isinstance(message, Reply):
            self.replies.append(message)
            return
        assert isinstance(message, TokenBatch)
        for out in message.outs:
            self.outs.append(out)
            self.outputs.setdefault(out.rid, []).extend(out.token_ids)
            if out.finish is not None:
                self.ends.setdefault(out.rid, []).append(out)

    # ------------------------------------------------------------------------------------------------------------ driving
    def submit(self, rid: str, prompt: list[int], max_new: int = 8, **extra: Any) -> None:
        names = ("stream", "return_logprob", "logprob_start_len", "top_logprobs_num", "extra_key", "dp_rank")
        top = {name: extra.pop(name) for name in names if name in extra}
        sampling = SamplingParams(max_new_tokens=max_new, temperature=0.0, **extra)
        self.prompts[rid] = prompt
        self.scheduler.handle(GenerateReq(rid=rid, input_ids=prompt, sampling=sampling, **top))

    def abort(self, rid: str = "", **extra: Any) -> None:
        self.scheduler.handle(AbortReq(rid=rid, **extra))

    def control(self, kind: str, **args: Any) -> Reply:
        self.scheduler.handle(ControlReq(kind=kind, req_id="c", args=args))
        return self.replies[-1]

    def step(self, count: int = 1) -> None:
        for _ in range(count):
            self.scheduler.step()

    def run(self) -> None:
        self.scheduler.run_until_idle(20_000)

    # ------------------------------------------------------------------------------------------------------------- looking
    def req(self, rid: str) -> Req:
        return self.scheduler.roster.by_rid[rid]

    def finish_type(self, rid: str) -> str:
        (end,) = self.ends[rid]
        assert end.finish is not None
        return end.finish.type

    def expected(self, rid: str, new_tokens: int) -> list[int]:
        """What the device generates for the request alone, without paging."""
        window = self.setup.window if self.setup.hybrid else None
        return hash_reference(self.prompts[rid], new_tokens, VOCAB, window)

    def check_balanced(self) -> None:
        """Idle, zero locks, and available + evictable == capacity in both pools of every rank."""
        scheduler, memory = self.scheduler, self.scheduler.memory
        assert scheduler.idle.is_fully_idle(), scheduler.idle.pending()
        scheduler.idle.check_memory()
        assert scheduler.idle.violations(require_idle=True) == []
        for rank in range(self.setup.dp):
            capacity, free, evictable = memory.capacity(rank), memory.available(rank), memory.evictable(rank)
            assert memory.protected(rank).full == 0
            assert free.full + evictable.full == capacity.full
            if memory.hybrid:
                assert memory.protected(rank).swa == 0
                assert free.swa + evictable.swa == capacity.swa

    def check_books(self) -> None:
        """Ownership is sound right now, busy or not."""
        assert self.scheduler.idle.violations(require_idle=False) == []


def until(world: World, condition: Callable[[], bool], limit: int = 2000) -> None:
    """Step until the condition holds."""
    for _ in range(limit):
        if condition():
            return
        world.step()
    raise AssertionError("condition not reached")


def make_world(setup: Setup | None = None, **changes: Any) -> World:
    setup = replace(setup or Setup(), **changes)
    rows = ReqToTokenPool(setup.seats * setup.dp, setup.context)
    cache, allocator = build_cache(setup, rows)
    worker: Any
    if setup.noop:
        worker = NoOpWorker(VOCAB, dp_size=setup.dp)
    else:
        worker = HashWorker(
            VOCAB,
            setup.page,
            setup.full_pages,
            window=setup.window if setup.hybrid else None,
            swa_pages_per_rank=setup.swa_pages,
            dp_size=setup.dp,
        )
    config = SchedulerConfig(
        page_size=setup.page,
        dp_size=setup.dp,
        context_len=setup.context,
        vocab_size=VOCAB,
        max_running=setup.seats,
        chunk_size=setup.chunk,
        max_prefill_tokens=setup.max_prefill,
        window=setup.window if setup.hybrid else None,
        eos_token_ids=setup.eos,
        schedule_policy=setup.policy,
        dp_schedule_policy=setup.dp_policy,
        conservativeness=setup.conservativeness,
        overlap=setup.overlap,
        max_queued=setup.max_queued,
        route=setup.cache,
    )
    world = World(setup, None, worker)  # type: ignore[arg-type]
    options = SchedulerOptions(
        load_tokenizer=None if setup.tokenizer is None else lambda: setup.tokenizer,
        clock=lambda: world.now,
        crash_dir=Path(setup.crash_dir),
    )
    memory = KVMemory(cache, allocator, rows, setup.page, setup.dp)
    world.scheduler = Scheduler(config, memory, worker, world.receive, options)
    return world
