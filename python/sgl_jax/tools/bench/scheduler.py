"""``sgl-jax bench scheduler``: host CPU time of one decode step with a worker that computes nothing.

Thread CPU time of ``Scheduler.step``, every request streaming; the worker's own share is shown besides. The aim is a median
of at most 0.5 ms at batch 64.
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

from sgl_jax.srt.managers.io_struct import ToFrontEnd, encode
from sgl_jax.tools.bench.in_process import VOCAB, build, request

AIM_MS = 0.5


@dataclass(frozen=True, slots=True)
class StepCost:
    """Milliseconds of thread CPU per decode step."""

    batch: int
    page_size: int
    overlap: bool
    cache: str
    median_ms: float
    p99_ms: float
    worker_ms: float


def _encode_and_drop(message: ToFrontEnd) -> None:
    """What sending costs, without a socket."""
    encode(message)


def measure(
    batch: int, page_size: int, *, overlap: bool, cache: str, steps: int, prompt: int = 1024
) -> StepCost:
    """Cost of a steady decode step: prompts are prefilled first, and no request ends while measuring."""
    context = prompt + steps + 64 + page_size
    tokens = -(-(batch * (context + 2 * page_size)) // page_size) * page_size
    flags = {
        "disable_overlap_schedule": not overlap,
        "disable_radix_cache": cache == "chunk",
        "enable_unified_radix_tree": cache == "unified",
    }
    scheduler, worker = build(
        page_size=page_size,
        window=1024,
        context_len=context,
        full_tokens=2 * tokens,
        swa_tokens=2 * tokens,
        batch=batch,
        send=_encode_and_drop,
        **flags,
    )
    rng = random.Random(0)
    for i in range(batch):
        scheduler.handle(request(f"r{i}", [rng.randrange(3, VOCAB) for _ in range(prompt)], steps + 60))
    while any(
        int(seats.runnable().size) < seats.taken_count or not seats.taken_count
        for seats in scheduler.roster.seats
    ):
        scheduler.step()
    for _ in range(8):
        scheduler.step()
    gc.collect()
    gc.freeze()
    costs, worker.cpu = [], 0.0
    for _ in range(steps):
        began = time.thread_time()
        scheduler.step()
        costs.append((time.thread_time() - began) * 1e3)
    gc.unfreeze()
    costs.sort()
    return StepCost(
        batch,
        page_size,
        overlap,
        cache,
        statistics.median(costs),
        costs[int(len(costs) * 0.99)],
        worker.cpu * 1e3 / steps,
    )


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="sgl-jax bench scheduler", description=__doc__)
    parser.add_argument("--batch", type=int, nargs="+", default=[1, 64, 256])
    parser.add_argument("--page-size", type=int, nargs="+", default=[128])
    parser.add_argument("--cache", nargs="+", choices=("unified", "legacy", "chunk"), default=["unified"])
    parser.add_argument("--steps", type=int, default=400)
    parser.add_argument("--json", action="store_true", help="print the rows as JSON")
    options = parser.parse_args(argv)
    rows = [
        measure(batch, page, overlap=overlap, cache=cache, steps=options.steps)
        for cache in options.cache
        for page in options.page_size
        for batch in options.batch
        for overlap in (True, False)
    ]
    if options.json:
        print(json.dumps([asdict(row) for row in rows], indent=2))
        return 0
    print(
        f"{'cache':8} {'page':>5} {'batch':>6} {'overlap':>8} {'median ms':>10} {'p99 ms':>8} {'of it no-op worker':>19}"
    )
    for row in rows:
        mark = (
            ""
            if row.batch != 64
            else ("  (aim <= 0.5: met)" if row.median_ms <= AIM_MS else "  (aim <= 0.5: missed)")
        )
        overlap = "on" if row.overlap else "off"
        print(
            f"{row.cache:8} {row.page_size:5} {row.batch:6} {overlap:>8} {row.median_ms:10.3f} {row.p99_ms:8.3f} "
            f"{row.worker_ms:19.3f}{mark}"
        )
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
