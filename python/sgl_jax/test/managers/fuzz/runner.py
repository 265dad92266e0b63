"""Cases by seed and number, and the shrinker."""

from __future__ import annotations

import random
import tempfile
from collections.abc import Sequence

from sgl_jax.test.managers.fuzz.config import FuzzConfig, draw_config
from sgl_jax.test.managers.fuzz.traffic import Op, draw_ops
from sgl_jax.test.managers.fuzz.world import FuzzWorld, run_ops


def case(seed: int, index: int, route: str | None = None) -> tuple[FuzzConfig, list[Op]]:
    """Configuration and operations of case ``index`` of a seed."""
    rng = random.Random(f"{seed}/{index}")
    config = draw_config(rng, route)
    return config, draw_ops(rng, config)


def run_case(config: FuzzConfig, ops: Sequence[Op], every: int = 37) -> FuzzWorld:
    with tempfile.TemporaryDirectory() as crash_dir:
        return run_ops(config, list(ops), crash_dir, every)


def failure(config: FuzzConfig, ops: Sequence[Op], every: int = 37) -> str | None:
    """Type and text of what goes wrong, None when nothing does."""
    try:
        run_case(config, ops, every)
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    return None


def shrink(config: FuzzConfig, ops: Sequence[Op], attempts: int = 400) -> list[Op]:
    """Fewer operations that still fail, with the same type of error, by deleting ever smaller runs of them."""
    wanted = (failure(config, ops, 1) or failure(config, ops) or "").split(":")[0]
    kept, size = list(ops), max(1, len(ops) // 2)
    while size and attempts > 0:
        at = 0
        while at < len(kept) and attempts > 0:
            attempts -= 1
            shorter = kept[:at] + kept[at + size :]
            found = failure(config, shorter, 1)
            if found is not None and found.split(":")[0] == wanted:
                kept = shorter
            else:
                at += size
        size //= 2
    return kept
