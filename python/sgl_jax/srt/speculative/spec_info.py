"""The speculative algorithms a server flag may name (none of them is supported yet: the start refuses them)."""

from __future__ import annotations

from enum import IntEnum


class SpeculativeAlgorithm(IntEnum):
    """Value of ``--speculative-algorithm``; NONE when the flag is not given."""

    NONE = 0
    EAGLE = 1
    EAGLE3 = 2
    NEXTN = 3
    STANDALONE = 4
    DFLASH = 5

    def is_none(self) -> bool:
        return self is SpeculativeAlgorithm.NONE

    def is_eagle(self) -> bool:
        """EAGLE and the algorithms that share its draft model layout."""
        return self in (SpeculativeAlgorithm.EAGLE, SpeculativeAlgorithm.EAGLE3, SpeculativeAlgorithm.NEXTN)

    def is_eagle3(self) -> bool:
        return self is SpeculativeAlgorithm.EAGLE3

    def is_nextn(self) -> bool:
        return self is SpeculativeAlgorithm.NEXTN

    def is_standalone(self) -> bool:
        return self is SpeculativeAlgorithm.STANDALONE

    def is_dflash(self) -> bool:
        return self is SpeculativeAlgorithm.DFLASH

    @classmethod
    def from_string(cls, name: str | None) -> SpeculativeAlgorithm:
        """By name, case-insensitive; None is NONE. Raises ValueError listing the legal names."""
        if name is None:
            return cls.NONE
        try:
            return cls[name.upper()]
        except KeyError:
            legal = ", ".join(member.name for member in cls)
            raise ValueError(f"--speculative-algorithm {name}: unknown; one of {legal}") from None
