"""Steps in flight: launch step k + 1 before processing step k.

The device runs launched steps in order, so a step may read what the one before it writes: its rows' tokens come from that
step's samples (future rows), and a page freed while a step is in flight is used by later steps only (rule 9). Results do not
depend on the depth; without overlap every step is processed right after its launch.
"""

from __future__ import annotations

from collections import deque

import numpy as np

from sgl_jax.srt.managers.batch import Batch, LaunchedStep
from sgl_jax.srt.managers.request import Req
from sgl_jax.srt.managers.roster import Roster
from sgl_jax.srt.managers.seats import NEVER
from sgl_jax.srt.model_executor.forward_inputs import Worker


class Pipeline:
    """Launches batches and hands the steps back in launch order. ``depth``: steps that may stay unprocessed (0 or 1)."""

    def __init__(self, worker: Worker, roster: Roster, *, overlap: bool) -> None:
        self._worker = worker
        self._roster = roster
        self.depth = 1 if overlap else 0
        self._pending: deque[LaunchedStep] = deque()
        self.launched = 0

    def __len__(self) -> int:
        return len(self._pending)

    @property
    def flight(self) -> int:
        """Number of the newest unprocessed step, or -1: the step that future rows point into."""
        return self._pending[-1].number if self._pending else NEVER

    def launch(self, batch: Batch) -> LaunchedStep:
        handle = self._worker.launch(batch.inputs)
        step = LaunchedStep(self.launched, batch, handle)
        self.launched += 1
        for table, rows in zip(self._roster.seats, batch.ranks, strict=True):
            if len(rows):
                table.flight_step[rows.seats] = step.number
                table.flight_row[rows.seats] = np.arange(len(rows), dtype=np.int32)
        self._pending.append(step)
        return step

    def take_due(self) -> LaunchedStep | None:
        """The oldest step once more than ``depth`` are unprocessed."""
        return self._pending.popleft() if len(self._pending) > self.depth else None

    def take_any(self) -> LaunchedStep | None:
        """The oldest unprocessed step, if any."""
        return self._pending.popleft() if self._pending else None

    def carries(self, req: Req) -> bool:
        """Whether an unprocessed step has a row of this seated request."""
        if not self._pending or req.seat < 0:
            return False
        return bool(self._roster.seats_of(req).flight_step[req.seat] >= self._pending[0].number)
