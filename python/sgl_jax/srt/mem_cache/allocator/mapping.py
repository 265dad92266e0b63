"""FULL -> SWA mapping of one rank: token granular, 0 = unmapped, offset preserving within a page."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from sgl_jax.srt.mem_cache.allocator.rank_pool import IntArray
from sgl_jax.srt.mem_cache.errors import Violation

BoolArray = npt.NDArray[np.bool_]
_SHOWN = 16


class RankMapping:
    """``tokens[full_slot] = swa_slot``; the array is shared with the KV pool and the attention backend, never replaced.

    Length ``size_per_rank + page_size``: pages start at 1, so the last slot is ``size_per_rank + page_size - 1`` (D04).

    It also answers which tokens a FULL page holds. Both pools hand out the tokens of a page in order and together, so for
    a mapped page they are its mapped tokens. For an unmapped one ``clear_pages`` remembered how many there were: a page
    that lost its SWA half cannot grow any more (rule 7).
    """

    __slots__ = ("_held", "_rows", "page_size", "rank", "tokens")

    def __init__(self, size_per_rank: int, page_size: int, rank: int) -> None:
        self.rank = rank
        self.page_size = page_size
        self.tokens: IntArray = np.zeros((size_per_rank + page_size,), np.int32)
        pages = self.tokens.size // page_size
        self._rows = self.tokens[: pages * page_size].reshape(pages, page_size)
        self._held: IntArray = np.full((pages,), page_size, np.int32)

    def clear(self) -> None:
        self.tokens.fill(0)
        self._held.fill(self.page_size)

    # -- writes --------------------------------------------------------------------------------------------------

    def write(self, full: IntArray, swa: IntArray) -> None:
        """Point FULL slots at SWA slots, one by one."""
        self.tokens[full] = swa

    def write_run(self, full: IntArray, swa: IntArray, fill: int) -> None:
        """Point the slots of one allocation: ``fill`` tokens of a live page, whole new pages, a short new page.

        Every slot of a new page is set or cleared, so nothing of an earlier life shows through (D03).
        """
        page_size = self.page_size
        if fill:
            first = int(full[0])
            self.tokens[first : first + fill] = swa[:fill]
        short = (full.size - fill) % page_size
        body = full.size - short
        if body > fill:
            pages = full[fill:body:page_size] // page_size
            self._rows[pages] = swa[fill:body].reshape(-1, page_size)
        if short:
            row = self._rows[int(full[body]) // page_size]
            row[:short] = swa[body:]
            row[short:] = 0

    def wipe_pages(self, pages: IntArray) -> None:
        """Clear the rows of pages that are being handed out (D03)."""
        self._rows[pages] = 0

    def clear_pages(self, units: IntArray, keep_full: bool) -> None:
        """Unmap whole units. ``keep_full``: the FULL side stays allocated, so remember how many tokens it holds."""
        if self.page_size == 1:
            self.tokens[units] = 0
            return
        if keep_full:
            last = self.tokens.take((units + 1) * self.page_size - 1)
            if np.count_nonzero(last) == last.size:
                self._held[units] = self.page_size
            else:  # some page is short
                self._held[units] = np.count_nonzero(self._rows[units], axis=1)
        self._rows[units] = 0

    def clear_tokens(self, full: IntArray) -> None:
        """Unmap single slots; ids must be inside the array."""
        self.tokens[full] = 0

    # -- queries -------------------------------------------------------------------------------------------------

    def read(self, full: IntArray) -> IntArray:
        """A fresh int32 array; ids outside the array read as unmapped."""
        try:
            return self.tokens.take(full.view(np.uint32))
        except IndexError:
            inside = (full >= 0) & (full < self.tokens.size)
            out = np.zeros((full.size,), np.int32)
            out[inside] = self.tokens[full[inside]]
            return out

    def mapped_rows(self, pages: IntArray) -> BoolArray:
        """``bool[len(pages), page_size]``: tokens with a mapping."""
        mapped: BoolArray = self._rows[pages] != 0
        return mapped

    def held_rows(self, pages: IntArray) -> BoolArray:
        """``bool[len(pages), page_size]``: tokens that allocated FULL pages hold, mapped or not."""
        mapped = self.mapped_rows(pages)
        unmapped = ~mapped.any(axis=1)
        mapped[unmapped] = np.arange(self.page_size) < self._held[pages[unmapped], None]
        return mapped

    def swa_units(self, units: IntArray) -> IntArray:
        """SWA unit of every FULL unit in ``units`` (0 where no token of it is mapped)."""
        if self.page_size == 1:
            return self.tokens.take(units)
        swa: IntArray = self.tokens.take(units * self.page_size) // self.page_size
        if np.count_nonzero(swa) != swa.size:
            swa = self._rows[units].max(axis=1, initial=0) // self.page_size
        return swa

    def nonzero(self) -> IntArray:
        """FULL slots with a mapping, ascending."""
        return np.flatnonzero(self.tokens).astype(np.int32)

    # -- invariants ----------------------------------------------------------------------------------------------

    def check(self, full_allocated: BoolArray, swa_allocated: BoolArray) -> list[Violation]:
        """Sources and targets in range and allocated, offsets preserved, no shared target, no orphaned SWA unit.

        ``*_allocated`` are ``bool[units + 1]`` masks.
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
            "FULL slots mapped to an SWA slot without an owner",
        )
        moved = full[(full - swa) % self.page_size != 0]
        self._report(found, "mapping_offset", moved, "FULL slots whose offset in the page is not preserved")
        first_unmapped = full[(full % self.page_size > 0) & (self.tokens[full - 1] == 0)]
        self._report(
            found, "mapping_gap", first_unmapped, "mapped slots after an unmapped slot of their page"
        )
        unique, counts = np.unique(swa, return_counts=True)
        self._report(
            found, "mapping_duplicate_target", unique[counts > 1], "SWA slots with several FULL slots (D05)"
        )
        if self.page_size > 1:
            pairs = np.unique(np.stack((target, source), axis=1), axis=0)[:, 0]
            shared, owners = np.unique(pairs, return_counts=True)
            self._report(found, "mapping_page_shared", shared[owners > 1], "SWA pages of several FULL pages")
        orphan = swa_allocated.copy()
        orphan[target] = False
        self._report(
            found, "swa_unmapped", np.flatnonzero(orphan), "allocated SWA units that no FULL slot maps to"
        )
        return found

    def _report(
        self, found: list[Violation], kind: str, slots: npt.NDArray[np.signedinteger], detail: str
    ) -> None:
        if slots.size:
            shown = tuple(int(s) for s in slots[:_SHOWN])
            found.append(Violation(kind, self.rank, "swa", f"{slots.size} {detail}", shown))
