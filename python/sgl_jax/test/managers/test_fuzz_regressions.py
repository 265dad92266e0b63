"""Cases that the scheduler fuzzer found, shrunk: each failed once and must not fail again."""

from __future__ import annotations

from typing import Any

import pytest

from sgl_jax.test.managers.fuzz.config import FuzzConfig
from sgl_jax.test.managers.fuzz.runner import run_case
from sgl_jax.test.managers.fuzz.traffic import Submit


def corner(**changes: Any) -> FuzzConfig:
    """A quiet corner of the configuration space with some of its values changed."""
    values: dict[str, Any] = {
        "route": "unified_swa",
        "page": 1,
        "window": 4,
        "dp": 1,
        "overlap": True,
        "chunk": -1,
        "max_prefill": 4096,
        "step_limit": 1 << 20,
        "full_pages": 64,
        "swa_pages": 32,
        "seats": 4,
        "context": 60,
        "policy": "fcfs",
        "dp_policy": "min_running_queue",
        "conservativeness": 0.01,
        "eos": 0,
        "max_queued": None,
    }
    return FuzzConfig(**(values | changes))


@pytest.mark.parametrize(
    ("config", "submit"),
    [
        # The stored prompt stays locked as one node of five tokens beside a decode peak of six.
        (
            corner(route="legacy_swa", window=2, full_pages=23, swa_pages=8, context=43),
            Submit(5, 5, continued=1, max_new=10),
        ),
        (
            corner(
                route="legacy_swa",
                window=1,
                overlap=False,
                chunk=64,
                max_prefill=7,
                full_pages=207,
                swa_pages=5,
                context=205,
            ),
            Submit(5, 73, max_new=60),
        ),
        # Eleven of 21 window slots are locked, and the request decodes up to twenty of its own.
        (corner(window=9, overlap=False, full_pages=64, swa_pages=21), Submit(0, 13, max_new=40)),
    ],
)
def test_an_accepted_request_alone_on_a_smallest_window_pool_is_served_to_its_end(config, submit):
    """Its own lock is narrowed to the window instead of ending it with an out-of-memory reason (D39, D44)."""
    world = run_case(config, [("submit", submit)], every=1)
    assert world.stats.ends == {"length": 1}
