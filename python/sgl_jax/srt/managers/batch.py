"""A step as the scheduler keeps it: which seats ran, what each row's end was, and what the worker was given."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from sgl_jax.srt.managers.request import Req
from sgl_jax.srt.model_executor.forward_inputs import ForwardMode, StepInputs

Int32 = npt.NDArray[np.int32]
Int64 = npt.NDArray[np.int64]
Bool = npt.NDArray[np.bool_]


@dataclass(frozen=True, slots=True)
class ExtendRow:
    """One row of an extend step: tokens ``[start, end)`` of the request; ``samples`` when that ends its prompt."""

    req: Req
    start: int
    end: int
    samples: bool


@dataclass(frozen=True, slots=True)
class RankRows:
    """Rows of one rank in a step, each array [B]: seat, generation of the seat, length after the step.

    ``extend`` is empty for decode steps.
    """

    seats: Int64
    generations: Int64
    ends: Int32
    extend: tuple[ExtendRow, ...] = ()

    def __len__(self) -> int:
        return len(self.seats)


NO_ROWS = RankRows(np.empty(0, np.int64), np.empty(0, np.int64), np.empty(0, np.int32))


@dataclass(frozen=True, slots=True)
class Batch:
    """A step ready to launch."""

    mode: ForwardMode
    ranks: tuple[RankRows, ...]
    inputs: StepInputs

    @property
    def row_count(self) -> int:
        return sum(len(rank) for rank in self.ranks)

    @property
    def token_count(self) -> int:
        return sum(len(rank.input_ids) for rank in self.inputs.ranks)


@dataclass(frozen=True, slots=True)
class LaunchedStep:
    """A step in flight. ``number`` counts launches; ``handle.result()`` blocks until the device is done."""

    number: int
    batch: Batch
    handle: Any
