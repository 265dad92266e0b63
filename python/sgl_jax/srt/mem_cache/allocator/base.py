"""The allocator contract: slots of a token pool, per rank, page granular inside (RFC-0035 section 2)."""

from __future__ import annotations

import abc
from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from sgl_jax.srt.mem_cache.errors import Violation

IntArray = npt.NDArray[np.int32]
IntVector = npt.NDArray[np.int32] | Sequence[int]


def resolve_rank(dp_rank: int | None, dp_size: int) -> int:
    """The rank a call means: omitted (None) is rank 0 of a one-rank allocator and an error above (DECISIONS 10).

    Raises ValueError for an omitted rank with ``dp_size > 1`` and for a rank outside ``0..dp_size-1``.
    """
    if dp_rank is None:
        if dp_size == 1:
            return 0
        raise ValueError(
            f"dp_rank was omitted on an allocator with dp_size={dp_size}; slot ids are rank-local, so pass "
            f"dp_rank=0..{dp_size - 1}"
        )
    if 0 <= dp_rank < dp_size:
        return int(dp_rank)
    raise ValueError(f"dp_rank={dp_rank} is outside 0..{dp_size - 1} (dp_size={dp_size})")


def check_geometry(size: int, page_size: int, dp_size: int) -> None:
    """Raise ValueError for a page size or rank count below 1 and for a negative size."""
    for name, value in (("page_size", page_size), ("dp_size", dp_size)):
        if value < 1:
            raise ValueError(f"{name}={value} must be at least 1")
    if size < 0:
        raise ValueError(f"size={size} must not be negative")


class BaseTokenToKVPoolAllocator(abc.ABC):
    """Hands out rank-local int32 slots; slot and page 0 are reserved, the first ids are slot 1 / page 1.

    Index arrays are 1-D int32. ``alloc*`` return None and change nothing when the rank is short. Frees are idempotent
    on slots that are already free or never were allocated; with ``strict`` they raise a named error instead.
    ``dp_rank`` may be omitted only at ``dp_size == 1``; a single pool outside strict mode takes it as rank 0.
    A subclass has to bring ``clear``, ``alloc`` and ``free``; the rest as far as it has the structure for it.
    """

    size: int
    page_size: int
    dp_size: int
    size_per_rank: int
    is_not_in_free_group: bool
    strict: bool

    def __init__(self, size: int, page_size: int, kvcache: Any, dp_size: int = 1) -> None:
        check_geometry(size, page_size, dp_size)
        self.size = size
        self.page_size = page_size
        self.dp_size = dp_size
        self.size_per_rank = size // dp_size
        self._kvcache = kvcache
        self.is_not_in_free_group = True

    @property
    def free_pages(self) -> list[IntArray]:
        """Per rank, the free ids that are handed out next (copies)."""
        raise self._absent("keeps no free list")

    @property
    def release_pages(self) -> list[IntArray]:
        """Per rank, the freed ids that wait for ``merge_and_sort_free`` (copies)."""
        raise self._absent("keeps no free list")

    @property
    def free_group(self) -> list[list[IntArray]]:
        """Per rank, one entry per free of the open group."""
        raise self._absent("has no free groups")

    def rank_of(self, dp_rank: int | None) -> int:
        """See :func:`resolve_rank`."""
        return resolve_rank(dp_rank, self.dp_size)

    def get_kvcache(self) -> Any:
        """The device pool whose slots this allocator hands out."""
        return self._kvcache

    def debug_print(self) -> str:
        """One line with the availability of every rank."""
        sizes = ", ".join(f"dp={r}: {self.available_size(r)}" for r in range(self.dp_size))
        return f"{type(self).__name__}(available tokens: {sizes}; in_group={not self.is_not_in_free_group})"

    def available_size(self, dp_rank: int | None = None) -> int:
        """Allocatable tokens of one rank; pending ones excluded."""
        raise self._absent("does not count its slots")

    @abc.abstractmethod
    def clear(self, dp_rank: int | None = None) -> None:
        """Forget all allocations of one rank, or of all when ``dp_rank`` is None."""

    @abc.abstractmethod
    def alloc(self, need_size: int, dp_rank: int | None = None) -> IntArray | None:
        """``need_size`` fresh slots (a page multiple), or None and no change."""

    @abc.abstractmethod
    def free(self, free_index: npt.ArrayLike, dp_rank: int | None = None) -> None:
        """Give slots back; deferred inside a group."""

    def free_group_begin(self) -> None:
        """Enter group mode; what is queued already stays queued."""
        raise self._absent("has no free groups")

    def free_group_end(self) -> None:
        """Release what the group surrendered and leave group mode."""
        raise self._absent("has no free groups")

    def merge_and_sort_free(self, dp_rank: int | None = None) -> None:
        """Sort the released ids of one rank into its free ids."""
        raise self._absent("keeps no free list")

    def check(self) -> list[Violation]:
        """Every broken invariant of the free structures, deficits and surpluses alike (D08). Mutates nothing."""
        return []

    def _absent(self, what: str) -> NotImplementedError:
        return NotImplementedError(f"{type(self).__name__} {what}")

    def backup_state(self) -> tuple[Any, Any]:
        raise NotImplementedError(
            f"{type(self).__name__} has no state to back up; its allocations roll back themselves"
        )

    def restore_state(self, state: tuple[Any, Any]) -> None:
        raise NotImplementedError(
            f"{type(self).__name__} has no state to restore; its allocations roll back themselves"
        )

    def get_cpu_copy(self, *args: Any, **kwargs: Any) -> Any:
        raise NotImplementedError(f"{type(self).__name__} does not copy slots to the host")

    def load_cpu_copy(self, *args: Any, **kwargs: Any) -> Any:
        raise NotImplementedError(f"{type(self).__name__} does not load slots from the host")

    def alloc_extend(
        self,
        prefix_lens: IntVector,
        seq_lens: IntVector,
        last_loc: IntVector,
        extend_num_tokens: int,
        dp_rank: int | None = None,
    ) -> IntArray | None:
        raise NotImplementedError(f"{type(self).__name__} is not paged; use alloc")

    def alloc_decode(
        self, seq_lens: IntVector, last_loc: IntVector, dp_rank: int | None = None
    ) -> IntArray | None:
        raise NotImplementedError(f"{type(self).__name__} is not paged; use alloc")
