"""Runs the fast suite against each mutant in a temporary copy of the package."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

from sgl_jax.tools.mutants.mutant import PACKAGE_ROOT, Mutant

#: Quickest first: most mutants die in the worked examples.
SUITE: tuple[str, ...] = (
    "test/faults",
    "test/mem_cache/allocator/test_cascade.py",
    "test/mem_cache/unified/test_eviction.py",
    "test/stateful/test_lru_machine.py",
    "test/stateful/test_replays.py",
    "test/stateful/test_allocator_machine.py",
    "test/stateful/test_cache_machine.py",
)
_IGNORED = shutil.ignore_patterns(
    "__pycache__", "*.pyc", "models", "layers", "entrypoints", "evidence", ".hypothesis"
)
_CASE_SECONDS = 240.0


@dataclass(frozen=True, slots=True)
class Verdict:
    """``outcome``: killed, survived, timeout (counts as killed), not_run or broken."""

    mutant: str
    outcome: str
    seconds: float
    detail: str = ""


def copy_package(target: Path) -> Path:
    """The package without what the cache tests never import, below ``target/python``. Returns the copied package."""
    package = target / "python" / "sgl_jax"
    shutil.copytree(PACKAGE_ROOT, package, ignore=_IGNORED)
    pyproject = PACKAGE_ROOT.parents[1] / "pyproject.toml"
    if pyproject.is_file():
        shutil.copy(pyproject, target / "pyproject.toml")
    return package


def run_suite(package: Path, suite: Sequence[str], seconds: float) -> tuple[int | None, str]:
    """Exit code of pytest (None: ran out of time) and the end of its output."""
    root = package.parents[1]
    env = dict(os.environ, PYTHONPATH=str(root / "python"), PYTHONDONTWRITEBYTECODE="1", JAX_PLATFORMS="cpu")
    env["SGL_JAX_NO_SHRINK"] = "1"
    command = [sys.executable, "-m", "pytest", "-x", "-q", "-p", "no:cacheprovider", "-p", "no:xdist"]
    command += [str(package / part) for part in suite]
    process = subprocess.Popen(
        command,
        cwd=root,
        env=env,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        start_new_session=True,
    )
    try:
        out, _ = process.communicate(timeout=seconds)
    except subprocess.TimeoutExpired:
        os.killpg(process.pid, signal.SIGKILL)
        process.wait()
        return None, ""
    return process.returncode, out[-2000:]


def judge(mutant: Mutant, suite: Sequence[str], deadline: float) -> Verdict:
    """Apply one mutant in its own copy and run the suite."""
    start = time.monotonic()
    if start >= deadline:
        return Verdict(mutant.name, "not_run", 0.0)
    with tempfile.TemporaryDirectory(prefix="mutant-") as tmp:
        package = copy_package(Path(tmp))
        try:
            mutant.apply(package)
        except ValueError as error:
            return Verdict(mutant.name, "broken", 0.0, str(error))
        code, tail = run_suite(package, suite, _CASE_SECONDS)
    took = time.monotonic() - start
    if code is None:
        return Verdict(mutant.name, "timeout", took)
    if code == 0:
        return Verdict(mutant.name, "survived", took)
    if code not in (1, 2):  # 2: the mutant breaks a test module's import
        return Verdict(mutant.name, "broken", took, f"pytest exit {code}: {_last_line(tail)}")
    return Verdict(mutant.name, "killed", took, _first_failure(tail))


def _last_line(text: str) -> str:
    lines = [line for line in text.splitlines() if line.strip()]
    return lines[-1][:160] if lines else ""


def _first_failure(text: str) -> str:
    for line in text.splitlines():
        if line.startswith(("FAILED", "ERROR")):
            return line.split(" - ")[0].split("sgl_jax/")[-1][:140]
    return _last_line(text)


def baseline(suite: Sequence[str]) -> tuple[bool, str]:
    """The unmutated copy must pass, or no kill means anything."""
    with tempfile.TemporaryDirectory(prefix="mutant-base-") as tmp:
        code, tail = run_suite(copy_package(Path(tmp)), suite, _CASE_SECONDS)
    return code == 0, tail


def run_all(
    mutants: Sequence[Mutant], jobs: int, minutes: float, suite: Sequence[str] = SUITE
) -> list[Verdict]:
    """Judge all mutants with ``jobs`` at a time; those not started within ``minutes`` are ``not_run``."""
    deadline = time.monotonic() + 60 * minutes

    def one(mutant: Mutant) -> Verdict:
        verdict = judge(mutant, suite, deadline)
        print(
            f"{verdict.outcome:9s} {verdict.seconds:6.1f} s  {verdict.mutant}  {verdict.detail}", flush=True
        )
        return verdict

    with ThreadPoolExecutor(max_workers=jobs) as pool:
        return list(pool.map(one, mutants))
