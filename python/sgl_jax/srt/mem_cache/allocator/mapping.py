"""FULL -> SWA mapping of one rank: token granular, 0 = unmapped, offset preserving within a page."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from sgl_jax.srt.mem_cache.allocator.rank_pool import IntArray
from sgl_jax.srt.mem_cache.errors import Violation

_SHOWN = 16


class RankMapping:
    """``tokens[full_slot] = swa_slot``; the array is shared with the KV pool and the attention backend, never replaced.

    Length ``size_per_rank + page_size``: pages start at 1, so the last slot is ``size_per_rank + page_size - 1`` (D04).
    """

    __slots__ = ("_rows", "page_size", "rank", "tokens")

    def __init__(self, size_per_rank: int, page_size: int, rank: int) -> None:
        self.rank = rank
        self.page_size = page_size
        self.tokens: IntArray = np.zeros((size_per_rank + page_size,), np.int32)
        pages = self.tokens.size // page_size
        self._rows = self.tokens[: pages * page_size].reshape(pages, page_size)

    def clear(self) -> None:
        self.tokens.fill(0)

    def write(self, full: IntArray, swa: IntArray) -> None:
        """Point every FULL slot of an allocation at its SWA slot; whatever was there before is gone (D03)."""
        n = full.size
        if n > 1 and int(full[-1]) - int(full[0]) == n - 1 and bool((full[1:] > full[:-1]).all()):
            self.tokens[int(full[0]) : int(full[-1]) + 1] = swa
        else:
            self.tokens[full] = swa

    def read(self, full: IntArray) -> IntArray:
        """A fresh int32 array; ids outside the array read as unmapped."""
        try:
            return self.tokens[full.view(np.uint32)]
        except IndexError:
            inside = (full >= 0) & (full < self.tokens.size)
            out = np.zeros((full.size,), np.int32)
            out[inside] = self.tokens[full[inside]]
            return out

    def rows(self, pages: IntArray) -> IntArray:
        """Copy of the mapping of whole FULL pages: int32 ``[len(pages), page_size]``."""
        return self._rows[pages]

    def swa_pages(self, pages: IntArray) -> IntArray:
        """SWA page of every FULL page in ``pages`` (0 where no token of it is mapped)."""
        swa: IntArray = self._rows[pages, 0] // self.page_size
        if not swa.all():
            swa = self._rows[pages].max(axis=1, initial=0) // self.page_size
        return swa

    def clear_pages(self, pages: IntArray) -> None:
        self._rows[pages] = 0

    def clear_tokens(self, full: IntArray) -> None:
        """Clear single entries; ids must be inside the array."""
        self.tokens[full] = 0

    def nonzero(self) -> IntArray:
        """FULL slots with a mapping, ascending."""
        return np.flatnonzero(self.tokens).astype(np.int32)

    # -- invariants ----------------------------------------------------------------------------------------------

    def check(
        self,
        full_allocated: npt.NDArray[np.bool_],
        swa_allocated: npt.NDArray[np.bool_],
        filled: IntArray | None,
    ) -> list[Violation]:
        """Sources and targets in range and allocated, offsets preserved, no shared target, no orphaned SWA unit.

        ``*_allocated`` are ``bool[units + 1]`` masks, ``filled`` the allocated tokens per FULL page (None at page size 1).
        """
        full = self.nonzero()
        swa = self.tokens[full]
        found: list[Violation] = []
        source, target = full // self.page_size, swa // self.page_size
        in_range = (
            (source >= 1) & (source < full_allocated.size) & (target >= 1) & (target < swa_allocated.size)
        )
        self._report(
            found, "mapping_out_of_range", full[~in_range], "source or target outside the usable slots"
        )
        full, swa, source, target = full[in_range], swa[in_range], source[in_range], target[in_range]
        self._report(
            found, "mapping_source_free", full[~full_allocated[source]], "mapped FULL slots without an owner"
        )
        self._report(
            found,
            "mapping_target_free",
            full[~swa_allocated[target]],
            "FULL slots mapped to a SWA slot without an owner",
        )
        self._report(
            found,
            "mapping_offset",
            full[(full - swa) % self.page_size != 0],
            "offset in the page not preserved",
        )
        if filled is not None:
            beyond = full % self.page_size >= filled[source]
            self._report(
                found, "mapping_beyond_fill", full[beyond], "mapped beyond the allocated tokens of the page"
            )
        unique, counts = np.unique(swa, return_counts=True)
        self._report(
            found, "mapping_duplicate_target", unique[counts > 1], "SWA slots with several FULL slots (D05)"
        )
        pairs = np.unique(np.stack((target, source), axis=1), axis=0)[:, 0]
        shared, owners = np.unique(pairs, return_counts=True)
        self._report(
            found, "mapping_page_shared", shared[owners > 1], "SWA pages or slots of several FULL pages"
        )
        orphan = swa_allocated.copy()
        orphan[target] = False
        orphans = np.flatnonzero(orphan).astype(np.int32)
        self._report(found, "swa_unmapped", orphans, "allocated SWA pages or slots that no FULL slot maps to")
        return found

    def _report(self, found: list[Violation], kind: str, slots: IntArray, detail: str) -> None:
        if slots.size:
            shown = tuple(int(s) for s in slots[:_SHOWN])
            found.append(Violation(kind, self.rank, "swa", f"{slots.size} {detail}", shown))
