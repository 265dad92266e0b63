"""Measure one case at one size, or one whole workload, in this process: thread CPU time first, op counts beside it."""

from __future__ import annotations

import gc
import statistics
import struct
import time
from dataclasses import asdict, dataclass
from typing import Any

from sgl_jax.tools.bench.cases import BY_NAME, Case
from sgl_jax.tools.bench.opcount import count
from sgl_jax.tools.bench.stats import percentile

_COUNT_RUNS = 3


@dataclass(frozen=True, slots=True)
class Sample:
    """One case at one size. Times in microseconds of thread CPU; counts are medians of three runs."""

    case: str
    size: int
    cpu_us: float
    p99_us: float
    wall_us: float
    calls: float
    numpy_calls: float
    peak_bytes: float
    wrong: list[str]

    def to_dict(self) -> dict[str, Any]:
        return asdict(self)


def measure_case(case: Case, kind: str, size: int, *, counts_only: bool = False) -> Sample:
    """Prepare once, run ``case.repeats`` times (never less than the counts need), verify."""
    prepared = case.build(kind, size)
    cpu: list[float] = []
    wall: list[float] = []
    gc.collect()
    gc.disable()
    try:
        for _ in range(0 if counts_only else case.repeats):
            operation = prepared.fresh()
            began_wall, began = time.perf_counter(), time.thread_time()
            operation()
            cpu.append((time.thread_time() - began) * 1e6)
            wall.append((time.perf_counter() - began_wall) * 1e6)
        counts = [count(prepared.fresh) for _ in range(_COUNT_RUNS)]
    finally:
        gc.enable()
    middle = {
        name: statistics.median(getattr(c, name) for c in counts)
        for name in ("calls", "numpy_calls", "peak_bytes")
    }
    return Sample(
        case=case.name,
        size=size,
        cpu_us=statistics.median(cpu) if cpu else 0.0,
        p99_us=percentile(cpu, 0.99) if cpu else 0.0,
        wall_us=statistics.median(wall) if wall else 0.0,
        wrong=prepared.verify(),
        **middle,
    )


def measure(name: str, kind: str, size: int) -> Sample:
    """By name. Raises ValueError listing the cases for an unknown one."""
    if name not in BY_NAME:
        raise ValueError(f"unknown case {name!r}: one of {', '.join(BY_NAME)}")
    return measure_case(BY_NAME[name], kind, size)


def calibrate() -> dict[str, float]:
    """Kernels that say how fast this process runs now, in microseconds: packing, comparing, dictionary look-ups."""
    ids = list(range(1 << 15))
    packed = struct.pack(f"<{len(ids)}i", *ids)
    table = {packed[i : i + 512]: i for i in range(0, len(packed), 512)}
    probes = list(table)

    def timed(action: Any) -> float:
        costs = []
        for _ in range(15):
            began = time.thread_time()
            action()
            costs.append((time.thread_time() - began) * 1e6)
        return statistics.median(costs)

    return {
        "pack_32k": timed(lambda: struct.pack(f"<{len(ids)}i", *ids)),
        "compare_128kB": timed(lambda: [packed.startswith(packed) for _ in range(16)]),
        "dict_4k": timed(lambda: [table[p] for _ in range(16) for p in probes]),
    }
