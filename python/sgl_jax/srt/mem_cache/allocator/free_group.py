"""Grouped free: surrender now, reuse at the end (RFC-0035 section 2).

Inside a group surrendered slots are pending-free: not owned, not allocatable. Groups do not nest; the context manager
joins an open one, so only the outermost flushes (DECISIONS 8).
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Protocol


class Groupable(Protocol):
    """What an allocator offers for grouped frees."""

    is_not_in_free_group: bool

    def free_group_begin(self) -> None: ...

    def free_group_end(self) -> None: ...


@contextmanager
def free_group(allocator: Groupable) -> Iterator[None]:
    """Defer every physical release in the block to its end; joins an open group. Flushes on exceptions as well."""
    if not allocator.is_not_in_free_group:
        yield
        return
    allocator.free_group_begin()
    try:
        yield
    finally:
        allocator.free_group_end()
