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
    Int32,
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


class RowError(AssertionError):
    """A row of a step carries another request's parameters, or a stale history."""


@dataclass(frozen=True, slots=True)
class Known:
    """What the client asked for under a seed: prompt, and what the rows of the request must carry."""

    prompt: list[int]
    top_k: int
    min_new: int
    ends: frozenset[int]
    penalty: float


class DeferredHashWorker(HashWorker):
    """As :class:`HashWorker`, later. ``max_extend_tokens`` bounds a step of one rank.

    ``known`` by seed: the rows of every extend and every fourth decode step are compared with what the request of
    their seed asked for.
    """

    def __init__(self, *args: Any, max_extend_tokens: int = 1 << 20, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._max_extend_tokens = max_extend_tokens
        self._queue: deque[_Deferred] = deque()
        self._extends = False
        self._prefilled: set[int] = set()
        self.known: dict[int, Known] = {}

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
            self._extends = handle.step.mode.is_extend()
            handle.value = super().launch(handle.step).result()

    def _sample(self, rank_index: int, rank: RankInputs, inputs: Int32) -> Int32:
        tokens = super()._sample(rank_index, rank, inputs)
        if self._extends or self.steps % 4 == 0:
            for row in range(rank.batch_size):
                seed = int(rank.sampling.seed[row])
                known = self.known.get(seed)
                if known is not None:
                    ends_prompt = int(rank.seq_lens[row]) == len(known.prompt) and seed not in self._prefilled
                    if (
                        ends_prompt
                    ):  # once: what comes later is the same prompt after a retraction, with output behind it
                        self._prefilled.add(seed)
                    self._check_row(rank_index, rank, row, known, samples=ends_prompt or not self._extends)
        return tokens

    def _check_row(self, rank_index: int, rank: RankInputs, row: int, known: Known, *, samples: bool) -> None:
        length, prompt = int(rank.seq_lens[row]), known.prompt
        pages = rank.full_pages[rank.full_page_start[row] : rank.full_page_start[row + 1]]
        found = self._read(self.full[:, rank_index], pages, 0, 0, length, "full_pages").tolist()
        sampling = rank.sampling
        if found[: len(prompt)] != prompt[:length] or sampling.top_k[row] != known.top_k:
            raise RowError(f"rank {rank_index} row {row}: the seed is another request's")
        penalties, bias = sampling.penalties, None
        if penalties is not None and float(penalties.frequency[row]) != known.penalty:
            raise RowError(
                f"rank {rank_index} row {row}: penalty {penalties.frequency[row]}, asked {known.penalty}"
            )
        if known.penalty and penalties is None:
            raise RowError(f"rank {rank_index} row {row}: its penalties are missing")
        if not samples:
            return
        if penalties is not None and known.penalty:
            history = [token for token in penalties.output_ids[row].tolist() if token >= 0]
            if rank.future_rows is not None and rank.future_rows[row] >= 0:
                history.append(found[-1])
            if history != found[len(prompt) :]:
                raise RowError(f"rank {rank_index} row {row}: history {history} for {found[len(prompt) :]}")
        if sampling.bias_ids is not None:
            bias = {token for token in sampling.bias_ids[row].tolist() if token >= 0}
        wanted = known.ends if length - len(prompt) < known.min_new else frozenset()
        if (bias or set()) != wanted:
            raise RowError(
                f"rank {rank_index} row {row}: {length - len(prompt)} produced, ends forbidden {bias}, expected {sorted(wanted)}"
            )
