"""Exponents, medians and ratios of measurements."""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence


def exponent(sizes: Sequence[int], costs: Sequence[float]) -> float:
    """Least-squares slope of log cost over log size: 0 = flat, 1 = linear. Costs below 1 count as 1."""
    xs = [math.log(size) for size in sizes]
    ys = [math.log(max(cost, 1.0)) for cost in costs]
    mean_x, mean_y = statistics.fmean(xs), statistics.fmean(ys)
    spread = sum((x - mean_x) ** 2 for x in xs)
    if spread == 0:
        return 0.0
    return sum((x - mean_x) * (y - mean_y) for x, y in zip(xs, ys)) / spread


def percentile(values: Sequence[float], share: float) -> float:
    """Value below which ``share`` (0..1) of the sorted values lie, the nearest one."""
    ordered = sorted(values)
    return ordered[min(len(ordered) - 1, int(share * len(ordered)))]


def ratio_text(ratios: Sequence[float]) -> str:
    """Median with the range, e.g. ``3.1x [2.9..3.4]``."""
    return f"{statistics.median(ratios):.2f}x [{min(ratios):.2f}..{max(ratios):.2f}]"
