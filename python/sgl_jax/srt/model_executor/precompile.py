"""Compile every step shape before the first request, with a line per shape."""

from __future__ import annotations

import logging
import time

from sgl_jax.srt.model_executor.runner import ModelRunner
from sgl_jax.srt.model_executor.sampler import SampleKind
from sgl_jax.srt.model_executor.sampling_batch import SampleVariant

logger = logging.getLogger(__name__)

#: what an ordinary request needs; logprobs, penalties and bias compile when first used, with a log line
COMMON_VARIANTS = (
    SampleVariant(SampleKind.GREEDY),
    SampleVariant(SampleKind.TEMPERATURE),
    SampleVariant(SampleKind.FILTERED),
)


def precompile(runner: ModelRunner) -> float:
    """Run an empty step of every shape and common sampler. Changes only page 0 of the pools. Returns the seconds it took."""
    shapes = runner.table.shapes()
    began = time.perf_counter()
    sampled: set[int] = set()
    for index, shape in enumerate(shapes, 1):
        started = time.perf_counter()
        # A sampler depends on the row count alone, so each count is compiled once.
        variants = COMMON_VARIANTS[:1] if shape.seqs in sampled else COMMON_VARIANTS
        sampled.add(shape.seqs)
        runner.warm_up(shape, variants)
        logger.info("precompile [%d/%d] %s: %.1f s", index, len(shapes), shape, time.perf_counter() - started)
    return time.perf_counter() - began
