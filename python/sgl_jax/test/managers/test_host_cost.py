"""Host cost by shape: a decode step makes no Python call per row, and the benchmarks run."""

from __future__ import annotations

import pytest

from sgl_jax.test.counting import count_calls
from sgl_jax.test.managers.world import make_world
from sgl_jax.tools.bench import no_sharing, scheduler


def calls_per_step(batch: int, page: int, *, stream: bool, overlap: bool) -> int:
    """Python and C calls of one steady decode step."""
    world = make_world(
        page=page,
        window=16,
        seats=batch,
        chunk=4096,
        max_prefill=4096,
        full_pages=batch * 200 // page,
        swa_pages=batch * 200 // page,
        overlap=overlap,
        noop=True,
    )
    for i in range(batch):
        world.submit(f"r{i}", [5 + i, 6, 7], 150, stream=stream)
    while world.scheduler.roster.seats[0].runnable().size < batch:
        world.step()
    world.step(4)
    # the lowest: page crossings and reclaims come in between
    return min(count_calls(world.scheduler.step) for _ in range(6))


@pytest.mark.parametrize("overlap", [True, False])
@pytest.mark.parametrize("page", [1, 16])
def test_calls_of_a_decode_step_do_not_grow_with_the_batch(page, overlap):
    """The tokens are appended row by row (one C call each); everything else works on arrays."""
    small, large = (calls_per_step(n, page, stream=False, overlap=overlap) for n in (8, 64))
    assert large - small <= 1.2 * 56


def test_a_streaming_row_costs_its_message_only():
    small, large = (calls_per_step(n, 16, stream=True, overlap=True) for n in (8, 64))
    assert large - small <= 12 * 56


def test_scheduler_benchmark_runs():
    cost = scheduler.measure(4, 16, overlap=True, cache="unified", steps=8, prompt=40)
    assert cost.batch == 4 and 0 < cost.median_ms <= cost.p99_ms


@pytest.mark.parametrize(("route", "most"), [("unified", 128 + 64 + 32), ("legacy", 128 + 128)])
def test_no_sharing_benchmark_runs_and_bounds_the_window_pool(route, most):
    """D78: peak non-evictable window slots of one request <= chunk + page-rounded window + one page.

    The legacy cache locks the whole node of the chunk before; only the Unified one is held to the limit.
    """
    load = no_sharing.Load(requests=4, prompt=512, output=40, batch=2, page_size=32, window=64, chunk=128)
    row = no_sharing.measure(load, route, 1)
    assert row.peak_limit == 128 + 64 + 32
    assert row.peak_swa <= most
    assert row.ratio > 0
