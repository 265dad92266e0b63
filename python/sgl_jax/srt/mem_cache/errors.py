"""Named errors and the violation record that every ``check()`` returns."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass


class CacheError(RuntimeError):
    """Base of all contract violations inside the cache subsystem."""


class OwnershipError(CacheError):
    """A slot was given back, taken or re-pointed by somebody who does not own it (strict mode)."""


class DoubleFreeError(OwnershipError):
    """A slot that is already free was freed again (strict mode). Names rank, pool and slots."""


class SlotRangeError(OwnershipError):
    """A slot id lies outside the usable range of its pool (strict mode). Names rank, pool and slots."""


class PartialPageError(OwnershipError):
    """A free names only some of the allocated tokens of a page (strict mode, D01)."""


class UnmappedSlotError(CacheError):
    """An SWA allocation would continue from a FULL slot that has no SWA peer (rule 7)."""


class LockReceiptError(CacheError):
    """A lock was released with parameters that do not describe what was acquired (rule 3)."""


class TreeInvariantError(CacheError):
    """A radix tree was asked to do something that would break its structure."""


@dataclass(frozen=True, slots=True)
class Violation:
    """One broken invariant.

    ``kind`` is a stable snake_case name, ``rank`` the DP rank, ``pool`` "full", "swa" or "" (structure),
    ``detail`` a sentence with the numbers, ``slots`` the first offending slots or node ids (at most 16).
    """

    kind: str
    rank: int
    pool: str
    detail: str
    slots: tuple[int, ...] = ()

    def __str__(self) -> str:
        where = f"[dp={self.rank}]" + (f"[{self.pool}]" if self.pool else "")
        tail = f" slots={list(self.slots)}" if self.slots else ""
        return f"{where} {self.kind}: {self.detail}{tail}"


class LedgerViolationError(CacheError):
    """``check()`` or a ledger audit found violations; the message lists all of them."""

    def __init__(self, violations: Sequence[Violation], context: str = "") -> None:
        self.violations = tuple(violations)
        head = f"{context}: " if context else ""
        lines = "\n".join(f"  - {v}" for v in self.violations)
        super().__init__(f"{head}{len(self.violations)} ownership violation(s)\n{lines}")
