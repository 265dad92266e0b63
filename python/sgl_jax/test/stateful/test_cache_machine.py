"""Hypothesis drives the simulated scheduler over the real cache; the oracle judges every step (issue: RFC 1-6)."""

from __future__ import annotations

import os
import random

import pytest
from hypothesis import HealthCheck, Phase, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, rule, run_state_machine_as_test

from sgl_jax.test.stateful.build import WorldConfig
from sgl_jax.test.stateful.configs import ALL, BIG, SMALL
from sgl_jax.test.stateful.replay import WEIGHTS, draw_ops, run_ops
from sgl_jax.test.stateful.world import World

#: The mutation check only asks whether something fails: it sets the variable and saves the shrinking.
PHASES = (Phase.generate,) if os.environ.get("SGL_JAX_NO_SHRINK") else (Phase.generate, Phase.shrink)
_INT = st.integers(0, (1 << 16) - 1)
_OPS = [name for name, weight in WEIGHTS.items() for _ in range(max(1, weight // 4))]


class CacheMachine(RuleBasedStateMachine):
    """One world per example. ``step`` compares implementation and oracle; ``teardown`` demands cold pools."""

    def __init__(self, cfg: WorldConfig) -> None:
        super().__init__()
        self.world = World(cfg)
        self.broken = False

    @rule(shape=_INT, seed=_INT, rank=_INT)
    def admit(self, shape: int, seed: int, rank: int) -> None:
        self._step("admit", rank, shape, seed)

    @rule(name=st.sampled_from(_OPS), a=_INT, b=_INT, c=_INT)
    def any_operation(self, name: str, a: int, b: int, c: int) -> None:
        self._step(name, a, b, c)

    @rule(a=_INT, b=_INT, c=_INT)
    def advance(self, a: int, b: int, c: int) -> None:
        """What a scheduler does most: commit a chunk, take the next one, decode."""
        self._step("commit", a, b, c)
        self._step("next_chunk", a, b, c)
        self._step("decode", a, b, c)

    def _step(self, name: str, a: int, b: int, c: int) -> None:
        try:
            self.world.step(name, a, b, c)
        except BaseException:
            self.broken = True
            raise

    def teardown(self) -> None:
        if not self.broken:
            self.world.drain()


def _settings(examples: int, steps: int) -> settings:
    return settings(
        max_examples=examples,
        stateful_step_count=steps,
        deadline=None,
        derandomize=True,
        database=None,
        phases=PHASES,
        suppress_health_check=list(HealthCheck),
        print_blob=False,
    )


@pytest.mark.parametrize("cfg", SMALL, ids=lambda c: c.label())
def test_small_pages_follow_the_oracle(cfg: WorldConfig) -> None:
    run_state_machine_as_test(lambda: CacheMachine(cfg), settings=_settings(12, 40))


@pytest.mark.parametrize("cfg", BIG, ids=lambda c: c.label())
def test_big_pages_follow_the_oracle(cfg: WorldConfig) -> None:
    run_state_machine_as_test(lambda: CacheMachine(cfg), settings=_settings(5, 30))


@pytest.mark.parametrize("cfg", ALL, ids=lambda c: c.label())
def test_seeded_walks_follow_the_oracle(cfg: WorldConfig) -> None:
    """The soak's driver for a moment: weighted like real traffic, so it gets deeper than uniform choices do."""
    for seed in range(3):
        run_ops(cfg, draw_ops(random.Random(f"{cfg.label()}/{seed}"), 150))
