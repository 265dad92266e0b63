"""How much of the running requests' remaining output admission reserves: falls while all goes well, jumps back on a retraction."""

from __future__ import annotations

_INITIAL = 0.7
_FLOOR = 0.14
_DECAY_STEPS = 600


class NewTokenRatio:
    """Share in (0, 1]. ``conservativeness`` above 1 starts (and stays) higher: fewer admissions, fewer retractions."""

    def __init__(self, conservativeness: float) -> None:
        self.initial = min(1.0, _INITIAL * conservativeness)
        self.floor = min(1.0, self.initial * _FLOOR)
        self._step = (self.initial - self.floor) / _DECAY_STEPS
        self.value = self.initial

    def decay(self) -> None:
        """One decode step without trouble."""
        self.value = max(self.floor, self.value - self._step)

    def reset(self) -> None:
        """After a retraction, and when idle."""
        self.value = self.initial
