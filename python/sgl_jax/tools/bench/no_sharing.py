"""``sgl-jax bench no-sharing``: what the radix cache costs when no prompt shares anything (random prompts).

Host CPU time per request, the radix route against ``--disable-radix-cache``, same prompts, a worker that computes nothing, both
routes in turn; and the peak of window-pool slots that one request keeps from being evicted.
"""

from __future__ import annotations

import argparse
import gc
import json
import random
import statistics
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

from sgl_jax.srt.mem_cache.page import ceil_page
from sgl_jax.tools.bench.in_process import VOCAB, build, request

LIMIT = 1.05
_TURN = 32


@dataclass(frozen=True, slots=True)
class Load:
    """The workload: ``requests`` prompts of ``prompt`` random tokens, ``output`` tokens each, ``batch`` at a time."""

    requests: int = 64
    prompt: int = 2048
    output: int = 256
    batch: int = 16
    page_size: int = 128
    window: int = 1024
    chunk: int = 2048


@dataclass(frozen=True, slots=True)
class NoSharing:
    """``ratio``: median over repeats of (route / chunk cache), with the smallest and largest; CPU milliseconds per request.

    ``peak_swa``: most non-evictable window slots of a lone request; ``peak_limit`` = chunk + page-rounded window + one page.
    """

    route: str
    requests: int
    route_ms: float
    chunk_ms: float
    ratio: float
    ratio_low: float
    ratio_high: float
    peak_swa: int
    peak_limit: int


def _flags(route: str) -> dict[str, Any]:
    return {"disable_radix_cache": route == "chunk", "enable_unified_radix_tree": route == "unified"}


def _scheduler(load: Load, route: str, batch: int) -> Any:
    context = load.prompt + load.output + load.page_size
    pool = ceil_page(4 * max(batch, 4) * context, load.page_size)
    return build(
        page_size=load.page_size,
        window=load.window,
        context_len=context,
        full_tokens=pool,
        swa_tokens=pool,
        batch=batch,
        chunked_prefill_size=load.chunk,
        **_flags(route),
    )[0]


def _prompts(load: Load, count: int, seed: int) -> list[list[int]]:
    rng = random.Random(seed)
    return [[rng.randrange(3, VOCAB) for _ in range(load.prompt)] for _ in range(count)]


class Run:
    """One route under the load, advanced a few steps at a time; ``cpu`` is the thread CPU time of its steps, in seconds.

    The pools hold four times the batch: 64 requests evict hardly anything, with 256 every request evicts an older one. From the
    first arrival to the last token; the ledger check of the idle edge that follows is not a request's cost.
    """

    def __init__(self, load: Load, route: str, seed: int) -> None:
        self.cpu = 0.0
        self._scheduler = _scheduler(load, route, load.batch)
        prompts = _prompts(load, load.requests, seed)
        self._arrivals = [request(f"r{i}", prompt, load.output) for i, prompt in enumerate(prompts)]
        self._arrivals.append(request("last", prompts[-1][::-1], load.output + 1))

    def advance(self, steps: int) -> bool:
        """Up to ``steps`` steps; whether there is more to do."""
        began = time.thread_time()
        for arrival in self._arrivals:
            self._scheduler.handle(arrival)
        self._arrivals.clear()
        live = self._scheduler.roster.by_rid
        while steps and len(live) > 1:
            self._scheduler.step()
            steps -= 1
        self.cpu += time.thread_time() - began
        return len(live) > 1


def cpu_per_request(load: Load, routes: Sequence[str], seed: int) -> list[float]:
    """CPU milliseconds per request of every route, same prompts. They take turns, so that a machine that slows down slows all."""
    runs = [Run(load, route, seed) for route in routes]
    gc.collect()
    gc.freeze()  # as the server does once it is ready
    going = list(runs)
    while going:
        going = [run for run in going if run.advance(_TURN)]
    gc.unfreeze()
    return [run.cpu * 1e3 / load.requests for run in runs]


def peak_swa(load: Load, route: str) -> int:
    """Most window slots that are neither free nor evictable while one request runs alone, looked at after every step."""
    scheduler = _scheduler(load, route, 1)
    scheduler.handle(request("r0", _prompts(load, 1, 0)[0], load.output))
    memory, peak = scheduler.memory, 0
    while scheduler.step():
        held = memory.capacity(0).swa - memory.available(0).swa - memory.evictable(0).swa
        peak = max(peak, held)
    return peak


def measure(load: Load, route: str, repeats: int) -> NoSharing:
    """The ratio is taken within each repeat; the one that begins alternates."""
    pairs = []
    for repeat in range(repeats):
        order = (route, "chunk") if repeat % 2 == 0 else ("chunk", route)
        cost = dict(zip(order, cpu_per_request(load, order, repeat), strict=True))
        pairs.append((cost[route], cost["chunk"]))
    ratios = sorted(a / b for a, b in pairs)
    return NoSharing(
        route,
        load.requests,
        statistics.median(a for a, _ in pairs),
        statistics.median(b for _, b in pairs),
        statistics.median(ratios),
        ratios[0],
        ratios[-1],
        peak_swa(load, route),
        load.chunk + ceil_page(load.window, load.page_size) + load.page_size,
    )


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="sgl-jax bench no-sharing", description=__doc__)
    parser.add_argument("--route", nargs="+", choices=("unified", "legacy"), default=["unified", "legacy"])
    parser.add_argument(
        "--requests",
        type=int,
        nargs="+",
        default=[64, 256],
        help="prompts of a run, one row each; the pools hold about 64 (default: 64, which evicts hardly anything, and 256)",
    )
    parser.add_argument("--repeats", type=int, default=7)
    parser.add_argument("--page-size", type=int, default=128)
    parser.add_argument("--window", type=int, default=1024)
    parser.add_argument("--json", action="store_true", help="print the rows as JSON")
    options = parser.parse_args(argv)
    loads = [Load(n, page_size=options.page_size, window=options.window) for n in options.requests]
    cpu_per_request(loads[0], ("chunk", "unified"), 0)  # warm-up
    rows = [measure(load, route, options.repeats) for route in options.route for load in loads]
    if options.json:
        print(json.dumps([asdict(row) for row in rows], indent=2))
        return 0
    for row in rows:
        aim = (
            f" (aim <= {LIMIT}: {'met' if row.ratio <= LIMIT else 'missed'})"
            if row.route == "unified"
            else ""
        )
        print(
            f"{row.route}, {row.requests} requests: {row.route_ms:.2f} ms CPU per request, chunk cache {row.chunk_ms:.2f} ms, "
            f"ratio {row.ratio:.3f} [{row.ratio_low:.3f}..{row.ratio_high:.3f}]{aim}\n"
            f"  peak non-evictable window slots of one request: {row.peak_swa} (limit {row.peak_limit})"
        )
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
