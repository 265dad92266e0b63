"""Function calls as a cost: the same on every machine, under any load."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from sgl_jax.tools.bench.opcount import profiled


def count_calls(action: Callable[[], object]) -> int:
    """Python and C calls made by ``action``, with its own call and the end of the count."""
    calls = 0

    def hook(_frame: Any, event: str, _arg: Any) -> None:
        nonlocal calls
        calls += event in ("call", "c_call")

    profiled(action, hook)
    return calls
