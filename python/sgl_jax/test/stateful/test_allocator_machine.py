"""Hypothesis drives the dual allocator alone: groups, rollback, cascades, transfers, partial and double frees."""

from __future__ import annotations

import os

import pytest
from hypothesis import HealthCheck, Phase, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule, run_state_machine_as_test

from sgl_jax.test.stateful.alloc_world import AllocWorld

#: The mutation check only asks whether something fails: it sets the variable and saves the shrinking.
PHASES = (Phase.generate,) if os.environ.get("SGL_JAX_NO_SHRINK") else (Phase.generate, Phase.shrink)
_INT = st.integers(0, (1 << 16) - 1)
_OPS = (
    "alloc",
    "alloc",
    "extend",
    "extend",
    "decode",
    "free",
    "free",
    "free_swa",
    "cascade",
    "partial",
    "double",
    "transfer",
    "group",
    "clear_rank",
)


class AllocatorMachine(RuleBasedStateMachine):
    def __init__(self, page: int, full_pages: int, swa_pages: int, dp: int, strict: bool) -> None:
        super().__init__()
        self.world = AllocWorld(page, full_pages, swa_pages, dp, strict)

    @rule(name=st.sampled_from(_OPS), a=_INT, b=_INT)
    def operation(self, name: str, a: int, b: int) -> None:
        getattr(self.world, name)(a, b)

    @rule(rank=_INT, b=_INT)
    def fill(self, rank: int, b: int) -> None:
        self.world.alloc(rank, b)

    @invariant()
    def equals_the_oracle(self) -> None:
        self.world.verify()


@pytest.mark.parametrize(
    ("page", "full_pages", "swa_pages", "dp", "strict"),
    [
        (1, 14, 9, 1, True),
        (1, 9, 12, 2, False),
        (4, 9, 6, 1, True),
        (4, 7, 9, 2, True),
        (4, 8, 5, 2, False),
        (128, 6, 4, 2, True),
        (256, 6, 5, 1, True),
    ],
)
def test_allocator_follows_the_oracle(
    page: int, full_pages: int, swa_pages: int, dp: int, strict: bool
) -> None:
    run_state_machine_as_test(
        lambda: AllocatorMachine(page, full_pages, swa_pages, dp, strict),
        settings=settings(
            max_examples=25 if page < 128 else 10,
            stateful_step_count=40,
            deadline=None,
            derandomize=True,
            database=None,
            phases=PHASES,
            suppress_health_check=list(HealthCheck),
        ),
    )
