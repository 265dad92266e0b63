"""Equality matrix: {unified, legacy, chunk} x {page 1, 128, 256} x {overlap} x {DP1, DP2} x {chunked}, windows below and above a page.

One test per corner (page, window, DP): its twelve cases share one compiled worker (DECISIONS 21). Token equality is asserted on
checked-in prompts with a margin (DECISIONS 20).
"""

from __future__ import annotations

import json
import os
import subprocess
import sys

import pytest

from sgl_jax.test.managers.matrix import CaseResult

#: (page, window): the window above and below the page where that is possible.
CORNERS = [(1, 32), (128, 32), (128, 160), (256, 160), (256, 300)]


def corner(page: int, window: int, dp: int) -> list[CaseResult]:
    """The corner in a process of its own, with as many virtual devices as ranks."""
    env = {**os.environ, "XLA_FLAGS": f"--xla_force_host_platform_device_count={dp}"}
    command = [sys.executable, "-m", "sgl_jax.test.managers.matrix", str(page), str(window), str(dp)]
    done = subprocess.run(command, env=env, capture_output=True, text=True, timeout=550)
    assert done.returncode == 0, done.stderr[-4000:]
    return [CaseResult(**entry) for entry in json.loads(done.stdout.splitlines()[-1])]


@pytest.mark.parametrize("dp", [1, 2])
@pytest.mark.parametrize(("page", "window"), CORNERS)
def test_every_configuration_generates_the_same(page, window, dp):
    """D13, D16, D37, D78, D85: identical greedy ids whatever the route, overlap or chunking; books balanced after every case."""
    results = corner(page, window, dp)
    assert len(results) == 12
    assert [(r.route, r.overlap, r.chunked, r.wrong) for r in results if r.wrong] == []
    assert [(r.route, r.overlap, r.chunked, r.unbalanced) for r in results if r.unbalanced] == []
    assert all(r.retracted >= dp for r in results)
    for chunked in (True, False):
        hits = {r.route: r.hits for r in results if r.overlap and r.chunked is chunked}
        assert hits["unified"] == hits["legacy"]
        assert sum(hits["unified"]) > 0 and sum(hits["chunk"]) == 0
        for route, values in hits.items():
            assert values == next(
                r.hits for r in results if not r.overlap and r.chunked is chunked and r.route == route
            )
