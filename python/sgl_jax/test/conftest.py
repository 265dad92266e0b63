"""Strict JAX, CPU only, and no unlisted skips.

Environment variables are set before anything imports jax, so that host-only tests never pay for the import.
"""

from __future__ import annotations

import os
import tomllib
from pathlib import Path

import pytest

_ROOT = Path(__file__).resolve().parents[3]

os.environ.setdefault("JAX_PLATFORMS", "cpu")
os.environ.setdefault("JAX_NUMPY_DTYPE_PROMOTION", "strict")
os.environ.setdefault("JAX_NUMPY_RANK_PROMOTION", "raise")
os.environ.setdefault("JAX_COMPILATION_CACHE_DIR", str(_ROOT / ".cache" / "jax-tests"))
os.environ.setdefault("JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS", "0.3")
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
os.environ.setdefault("HF_HUB_OFFLINE", "1")


def _allowed_skips() -> dict[str, str]:
    data = tomllib.loads((_ROOT / "test" / "manifests" / "skip_allowlist.toml").read_text())
    return {entry["test"]: entry["reason"] for entry in data.get("skip", [])}


@pytest.hookimpl(hookwrapper=True)
def pytest_runtest_makereport(item, call):
    """A skip or xfail that the allowlist does not name is a failure."""
    outcome = yield
    report = outcome.get_result()
    expected_failure = hasattr(report, "wasxfail")
    if not (report.skipped or expected_failure):
        return
    path, _, name = report.nodeid.partition("::")
    nodeid = f"{path if path.startswith('python/') else 'python/sgl_jax/test/' + path}::{name}"
    if nodeid not in _allowed_skips():
        report.outcome = "failed"
        report.longrepr = (
            f"{nodeid} was skipped or xfailed, and test/manifests/skip_allowlist.toml does not list it"
        )
