"""A bounded run of the scheduler fuzzer: fixed seeds, every route; ``python -m sgl_jax.tools.scheduler_soak`` runs it for hours."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

from sgl_jax.test.managers.fuzz.config import ROUTES
from sgl_jax.test.managers.fuzz.runner import case, failure, run_case, shrink
from sgl_jax.test.managers.fuzz.traffic import Submit
from sgl_jax.tools.scheduler_soak import main

CASES_PER_ROUTE = 5
SEED = 35


@pytest.mark.parametrize("route", ROUTES)
def test_random_cases_keep_every_promise(route):
    """One terminal message per rid, the device's own tokens, sane hits, balanced and cold pools at the end of every case."""
    seen = 0
    for index in range(CASES_PER_ROUTE):
        config, ops = case(SEED, index, route)
        assert config.route == route
        stats = run_case(config, ops).stats
        assert sum(stats.ends.values()) == stats.requests
        seen += stats.requests
    assert seen >= 8 * CASES_PER_ROUTE


@pytest.mark.parametrize("index", [1, 4])
def test_a_case_is_the_same_twice_and_in_another_process(index):
    """Nothing depends on hash seeds, object addresses or the clock."""
    config, ops = case(SEED, index)
    first = run_case(config, ops)
    again = run_case(config, ops, every=5)  # the checks change nothing
    assert first.digest.hexdigest() == again.digest.hexdigest()
    assert first.stats == again.stats
    code = (
        "from sgl_jax.test.managers.fuzz.runner import case, run_case;"
        f"print(run_case(*case({SEED}, {index})).digest.hexdigest())"
    )
    environment = {**os.environ, "PYTHONHASHSEED": "7"}
    other = subprocess.run(
        [sys.executable, "-c", code], env=environment, capture_output=True, text=True, timeout=300, check=True
    )
    assert other.stdout.strip() == first.digest.hexdigest()


def test_a_broken_scheduler_is_found_and_the_case_shrinks(monkeypatch):
    """The fuzzer itself: a request whose slots are never released fails, and one submit is enough to show it."""
    from sgl_jax.srt.managers.kv_memory import KVMemory

    config, ops = case(SEED, 0, "unified_full")
    assert failure(config, ops) is None
    monkeypatch.setattr(KVMemory, "release", lambda self, req, *, insert: None)
    found = failure(config, ops)
    assert found is not None
    kept = shrink(config, ops, attempts=60)
    assert len(kept) < len(ops)
    assert [name for name, _ in kept if name == "submit"]
    assert all(isinstance(value, Submit) for name, value in kept if name == "submit")


def test_the_command_reports_and_tells_how_to_replay(monkeypatch, capsys):
    """Exit code 0 and totals for a clean run; 1 and the replay command for a failing one."""
    assert main(["--seed", str(SEED), "--cases", "2", "--route", "chunk"]) == 0
    assert "2 cases" in capsys.readouterr().out
    monkeypatch.setattr("sgl_jax.tools.scheduler_soak.run_case", _fails)
    assert main(["--seed", str(SEED), "--cases", "2", "--route", "chunk"]) == 1
    assert f"--seed {SEED} --case 0 --route chunk" in capsys.readouterr().out


def _fails(config, ops, every):
    raise AssertionError("made up")
