"""A numpy device that computes a launched step only when its result is wanted, in launch order.

What a real device does and :class:`HashWorker` does not: between launch and execution the host goes on. A host array that is
written after its launch (rule 9 forbids it) is found by comparison; a page that changes hands too early shows in the tokens.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, fields
from typing import Any

import numpy as np

from sgl_jax.srt.model_executor.forward_inputs import (
    RankInputs,
    SamplingInputs,
    StepHandle,
    StepInputs,
    StepResult,
)
from sgl_jax.srt.model_executor.noop_worker import HashWorker


class MutatedInputError(AssertionError):
    """The host changed an array of a step after launching it."""


_RANK_FIELDS = tuple(item.name for item in fields(RankInputs))
_SAMPLING_FIELDS = tuple(item.name for item in fields(SamplingInputs))


def _contents(step: StepInputs) -> dict[str, bytes]:
    """Every array of a step, by name."""
    found: dict[str, bytes] = {}
    for at, rank in enumerate(step.ranks):
        for part, names in ((rank, _RANK_FIELDS), (rank.sampling, _SAMPLING_FIELDS)):
            for name in names:
                value = getattr(part, name)
                if isinstance(value, np.ndarray):
                    found[f"rank {at} {name}"] = value.tobytes()
    return found


@dataclass(eq=False)
class _Deferred:
    worker: DeferredHashWorker
    step: StepInputs
    frozen: dict[str, bytes]
    value: StepResult | None = None

    def result(self) -> StepResult:
        if self.value is None:
            self.worker.run_until(self)
        assert self.value is not None
        return self.value


class DeferredHashWorker(HashWorker):
    """As :class:`HashWorker`, later. ``max_extend_tokens`` bounds a step of one rank."""

    def __init__(self, *args: Any, max_extend_tokens: int = 1 << 20, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._max_extend_tokens = max_extend_tokens
        self._queue: deque[_Deferred] = deque()

    def launch(self, step: StepInputs) -> StepHandle:
        for at, rank in enumerate(step.ranks):
            if rank.batch_size and int(rank.extend_lens.min()) < 1:
                raise AssertionError(f"rank {at}: an empty row in a step")
            if step.mode.is_extend() and len(rank.input_ids) > self._max_extend_tokens:
                raise AssertionError(f"rank {at}: {len(rank.input_ids)} tokens in one step")
        handle = _Deferred(self, step, _contents(step))
        self._queue.append(handle)
        return handle

    def run_until(self, wanted: _Deferred) -> None:
        while wanted.value is None:
            handle = self._queue.popleft()
            for name, content in _contents(handle.step).items():
                if content != handle.frozen[name]:
                    raise MutatedInputError(f"{name} changed after launch")
            handle.value = super().launch(handle.step).result()
