"""TP4 (KV heads replicated where there are fewer) and DP2 x TP2 on 4 virtual CPU devices: the reference's greedy tokens.

A fresh process per case, because the number of virtual devices is fixed when JAX starts.
"""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

from sgl_jax.test.models.paged_engine import FAMILIES


@pytest.mark.parametrize("dp, tp", [(1, 4), (2, 2)], ids=["tp4", "dp2tp2"])
@pytest.mark.parametrize("family", FAMILIES)
def test_greedy_tokens_on_a_mesh(family, dp, tp):
    env = {**os.environ, "XLA_FLAGS": "--xla_force_host_platform_device_count=4", "NPROC": "16"}
    done = subprocess.run(
        [sys.executable, "-m", "sgl_jax.test.models.mesh_parity", family, str(dp), str(tp)],
        env=env,
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert done.stdout.split() == ["equal", family, str(dp), str(tp)]
