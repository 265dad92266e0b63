"""Costs that do not depend on the machine: calls made, numpy calls among them, and bytes held at the peak."""

from __future__ import annotations

import gc
import sys
import tracemalloc
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np


@dataclass(frozen=True, slots=True)
class OpCount:
    """``calls``: Python and C function calls; ``numpy_calls``: those into numpy; ``peak_bytes``: extra memory at the peak."""

    calls: int
    numpy_calls: int
    peak_bytes: int


def _is_numpy(function: Any) -> bool:
    if str(getattr(function, "__module__", "") or "").startswith("numpy"):
        return True
    return isinstance(getattr(function, "__self__", None), np.ndarray | np.generic)


def profiled(action: Callable[[], object], hook: Callable[[Any, str, Any], None]) -> None:
    """Run ``action`` under a profile hook, which also sees its call and the switching off, and without a collection in between:
    whoever has a callback in each collection is no cost of the action.
    """
    collects = gc.isenabled()
    gc.disable()
    sys.setprofile(hook)
    try:
        action()
    finally:
        sys.setprofile(None)
        if collects:
            gc.enable()


def count_calls(action: Callable[[], object]) -> tuple[int, int]:
    """(calls, numpy calls) of one run of ``action``, the call of ``action`` itself left out."""
    calls = numpy_calls = 0

    def hook(_frame: Any, event: str, argument: Any) -> None:
        nonlocal calls, numpy_calls
        if event == "c_call":
            calls += 1
            numpy_calls += _is_numpy(argument)
        elif event == "call":
            calls += 1

    profiled(action, hook)
    return calls - 2, numpy_calls  # the action and the switching off


def peak_bytes(action: Callable[[], object]) -> int:
    """Most bytes that one run of ``action`` held on top of what was there; its result is part of it."""
    started_here = not tracemalloc.is_tracing()
    if started_here:
        tracemalloc.start()
    try:
        tracemalloc.reset_peak()
        before = tracemalloc.get_traced_memory()[0]
        keep = action()
        peak = tracemalloc.get_traced_memory()[1]
        del keep
        return max(0, peak - before)
    finally:
        if started_here:
            tracemalloc.stop()


def count(fresh: Callable[[], Callable[[], object]]) -> OpCount:
    """Counts of one operation; ``fresh`` prepares the state and returns the operation, once per count."""
    calls, numpy_calls = count_calls(fresh())
    return OpCount(calls, numpy_calls, peak_bytes(fresh()))
