"""Grouped free: surrender now, reuse at the end (RFC-0035 section 2).

Inside a group surrendered slots are pending-free: not owned, not allocatable. Groups do not nest; the context manager
joins an open one, so only the outermost flushes (DECISIONS 8).
"""

from __future__ import annotations

from typing import Protocol


class Groupable(Protocol):
    """What an allocator offers for grouped frees."""

    is_not_in_free_group: bool

    def free_group_begin(self) -> None: ...

    def free_group_end(self) -> None: ...


class free_group:
    """Defer every physical release in the block to its end; joins an open group. Flushes on exceptions as well."""

    __slots__ = ("_allocator", "_outermost")

    def __init__(self, allocator: Groupable) -> None:
        self._allocator = allocator
        self._outermost = False

    def __enter__(self) -> None:
        self._outermost = self._allocator.is_not_in_free_group
        if self._outermost:
            self._allocator.free_group_begin()

    def __exit__(self, *_error: object) -> None:
        if self._outermost:
            self._allocator.free_group_end()
