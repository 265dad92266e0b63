"""Whole workloads and absolute figures: chat, a recorded trace, garbage collection, memory, ledger, a policy pass."""

from __future__ import annotations

import gc
import json
import statistics
import time
import tracemalloc
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from sgl_jax.tools.bench.stats import percentile
from sgl_jax.tools.bench.world import World

_TRACE_BLOCK = 512  # tokens per hash id of a trace line
Figures = dict[str, float]


@dataclass(frozen=True, slots=True)
class Workload:
    """``run(kind, scale)`` returns figures; ``aims`` are largest (or, for names ending in _per_s, smallest) good values."""

    name: str
    run: Callable[[str, int], tuple[Figures, list[str]]]
    quick: int
    full: int
    aims: dict[str, float]


def _filled(kind: str, page: int, tokens: int, leaf: int) -> World:
    world = World(kind, page, full=tokens + 2 * leaf)
    world.leaves(tokens // leaf, leaf)
    return world


def _full_collection_ms() -> float:
    costs = []
    for _ in range(5):
        began = time.thread_time()
        gc.collect()
        costs.append((time.thread_time() - began) * 1e3)
    return statistics.median(costs)


def collector(kind: str, tokens: int) -> tuple[Figures, list[str]]:
    """G15: what ``tokens`` cached at page 64 add to one full garbage collection, and the containers it has to visit."""
    idle = _full_collection_ms()
    before = len(gc.get_objects())
    world = _filled(kind, 64, tokens, 8192)
    loaded = _full_collection_ms()
    tracked = len(gc.get_objects()) - before
    return {"full_gc_added_ms": loaded - idle, "tracked_per_page": tracked / (tokens // 64)}, world.verify()


def memory(kind: str, tokens: int) -> tuple[Figures, list[str]]:
    """G16: bytes the cached tokens hold on the host, pools not counted, per million tokens."""
    figures: Figures = {}
    wrong: list[str] = []
    for page in (64, 1):
        world = World(kind, page, full=tokens + 16_384)
        tracemalloc.start()
        try:
            world.leaves(tokens // 8192, 8192)
            gc.collect()
            figures[f"mb_per_1m_page{page}"] = tracemalloc.get_traced_memory()[0] / tokens
        finally:
            tracemalloc.stop()
        wrong += world.verify()
    return figures, wrong


def ledger(kind: str, slots: int) -> tuple[Figures, list[str]]:
    """G17: snapshot of ``slots`` slots in 1,024-token nodes, milliseconds."""
    figures: Figures = {}
    wrong: list[str] = []
    for page in (128, 64, 1):
        world = _filled(kind, page, slots, 1024)
        if not hasattr(world.cache, "cache_ledger_snapshot"):
            return {}, []
        costs = []
        for _ in range(7):
            began = time.thread_time()
            snapshot = world.cache.cache_ledger_snapshot(0, [])
            costs.append((time.thread_time() - began) * 1e3)
        figures[f"snapshot_ms_page{page}"] = statistics.median(costs)
        owned = snapshot["full_available"] + snapshot["full_tree_evictable"]
        wrong += world.verify() + (
            [] if owned == snapshot["full_capacity"] else ["the ledger does not balance"]
        )
    return figures, wrong


def policy(kind: str, waiting: int) -> tuple[Figures, list[str]]:
    """G18: one look at every waiting request of 8k tokens, keys packed by the first pass and kept."""
    world = World(kind, 128, full=2 * 8192 * 8)
    prefix = world.ids(4096)
    prompts = [[int(i) for i in np.concatenate([prefix, world.ids(4096)])] for _ in range(waiting)]
    world.insert(prefix)
    keys: list[Any] = []
    began = time.thread_time()
    for prompt in prompts:
        keys.append(world.key(prompt))
        world.match(keys[-1])
    first = time.thread_time() - began
    lengths = []
    began = time.thread_time()
    for key in keys:
        lengths.append(len(world.match(key).device_indices))
    later = time.thread_time() - began
    wrong = [] if set(lengths) == {4096} else ["a waiting request matched another length"]
    return {"first_pass_ms": first * 1e3, "later_pass_ms": later * 1e3}, wrong + world.verify()


# ------------------------------------------------------------------------------------------------------ whole requests
def _serve(world: World, prompt: list[int], output: int, chunk: int) -> tuple[int, float]:
    """One request from admission to finish on the host, no model; returns (cached tokens, CPU seconds of the prefill)."""
    began = time.thread_time()
    req = world.admit(prompt)
    cached = req.cache_protected_len
    while req.kv_committed_len < len(prompt):
        world.compute(req, min(len(prompt), req.kv_committed_len + chunk))
        world.cache.cache_unfinished_req(req)
    prefill = time.thread_time() - began
    fresh = [int(i) for i in world.random.integers(1, 1 << 30, output)]
    for step in range(0, output, world.page):
        part = fresh[step : step + world.page]
        req.output_ids += part
        if req.radix_tokens is not None:
            req.radix_tokens.extend(part)
        world.compute(req, req.kv_committed_len + len(part))
        world.cache.evict_req_swa(req, req.kv_committed_len - 1, dp_rank=0)
    world.finish(req)
    return cached, prefill


def chat(kind: str, turns: int) -> tuple[Figures, list[str]]:
    """G13: 16 sessions in round robin, each turn re-sends the talk with 200 new tokens and gets 200 back."""
    world = World(kind, 128, full=16 * (turns * 400 + 4096), row=turns * 400 + 4096)
    system = [int(i) for i in world.ids(2048)]
    talks = [list(system) for _ in range(16)]
    prompt_tokens = hits = 0
    began = time.thread_time()
    for _ in range(turns):
        for talk in talks:
            talk += [int(i) for i in world.random.integers(1, 1 << 30, 200)]
            cached, _ = _serve(world, list(talk), 200, 2048)
            prompt_tokens, hits = prompt_tokens + len(talk), hits + cached
            talk += [int(i) for i in world.random.integers(1, 1 << 30, 200)]
    cpu = time.thread_time() - began
    return {"host_tokens_per_s": prompt_tokens / cpu, "hit_rate": hits / prompt_tokens}, world.verify()


def trace_requests(path: Path, limit: int) -> Iterator[tuple[list[int], int]]:
    """(prompt, output length) of the first ``limit`` lines: every hash id stands for one block of tokens."""
    with path.open() as lines:
        for _, line in zip(range(limit), lines):
            entry = json.loads(line)
            blocks = np.repeat(np.asarray(entry["hash_ids"], np.int64) * _TRACE_BLOCK + 1, _TRACE_BLOCK)
            offsets = np.tile(np.arange(_TRACE_BLOCK), len(entry["hash_ids"]))
            yield (blocks + offsets)[: entry["input_length"]].tolist(), int(entry["output_length"])


def trace(kind: str, path: Path, limit: int) -> tuple[Figures, list[str]]:
    """G13, G14: a recorded conversation trace; prefill is admission plus all chunks of 2,048 on the host."""
    requests = list(trace_requests(path, limit))
    world = World(kind, 128, full=1 << 20, row=max(len(p) + o for p, o in requests) + 256)
    prefills, prompt_tokens, hits = [], 0, 0
    began = time.thread_time()
    for prompt, output in requests:
        cached, prefill = _serve(world, prompt, output, 2048)
        prefills.append(prefill * 1e3)
        prompt_tokens, hits = prompt_tokens + len(prompt), hits + cached
    cpu = time.thread_time() - began
    figures = {
        "host_tokens_per_s": prompt_tokens / cpu,
        "prefill_ms_median": statistics.median(prefills),
        "prefill_ms_p99": percentile(prefills, 0.99),
        "hit_rate": hits / prompt_tokens,
    }
    return figures, world.verify()


WORKLOADS: tuple[Workload, ...] = (
    Workload("G13.chat", chat, 3, 12, {}),
    Workload("G15.gc_1m", collector, 1 << 20, 1 << 20, {"full_gc_added_ms": 15.0, "tracked_per_page": 0.2}),
    Workload("G16.memory", memory, 1 << 18, 1 << 20, {"mb_per_1m_page64": 6.0, "mb_per_1m_page1": 16.0}),
    Workload(
        "G17.ledger_1m", ledger, 1 << 20, 1 << 20, {"snapshot_ms_page128": 5.0, "snapshot_ms_page64": 5.0}
    ),
    Workload("G18.policy_64x8k", policy, 64, 64, {}),
)
BY_NAME = {workload.name: workload for workload in WORKLOADS}
