"""The dual allocator alone against the token-level oracle: groups, rollback, cascades, transfers, both ranks."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from sgl_jax.srt.mem_cache.errors import DoubleFreeError, PartialPageError
from sgl_jax.srt.mem_cache.page import new_pages
from sgl_jax.test.oracle.observe import free_pages, mapping_of
from sgl_jax.test.oracle.pool import DualOracle
from sgl_jax.test.stateful.build import build_allocator
from sgl_jax.test.stateful.verify import need


class AllocWorld:
    """Sequences of slots ("rows") held by nobody in particular, on every rank."""

    def __init__(self, page: int, full_pages: int, swa_pages: int, dp: int, strict: bool = True) -> None:
        self.page, self.dp, self.strict = page, dp, strict
        self.allocator = build_allocator(page, full_pages, swa_pages, dp, strict)
        self.pools = [DualOracle(r, full_pages, swa_pages, page) for r in range(dp)]
        self.rows: list[tuple[int, list[int]]] = []
        self.in_group = False
        self.serial = 0

    # ------------------------------------------------------------------ helpers
    def _map(self, rank: int) -> np.ndarray:  # type: ignore[type-arg]
        return np.asarray(mapping_of(self.allocator, rank, self.dp))

    def _pick(self, a: int, test: Callable[[int, list[int]], bool] = lambda _r, _s: True) -> int | None:
        found = [i for i, (rank, slots) in enumerate(self.rows) if slots and test(rank, slots)]
        return found[a % len(found)] if found else None

    def _take(self, rank: int, slots: Any, last: int | None) -> list[int]:
        slots = np.asarray(slots)
        need(slots.dtype == np.int32, f"alloc returns {slots.dtype}")
        full = slots.tolist()
        self.serial += 1
        owner = f"a{self.serial}" if last is None else self.pools[rank].full.owner[last]
        self.pools[rank].take_pair(full, self._map(rank)[full].tolist(), owner, last)
        return full

    def _live(self, rank: int, slots: list[int]) -> bool:
        return all(s in self.pools[rank].mapping for s in slots)

    def _whole(self, slots: list[int], first: int, count: int) -> list[int]:
        """All held slots of ``count`` pages of the row, from page ``first``."""
        pages = list(dict.fromkeys(s // self.page for s in slots))
        chosen = set(pages[first % len(pages) :][: 1 + count % len(pages)])
        return [s for s in slots if s // self.page in chosen]

    def _room(self, rank: int, pages: int) -> bool:
        pool = self.pools[rank]
        return min(pool.full.available(), pool.swa.available()) >= pages * self.page

    def _must_agree(self, out: Any, room: bool, what: str) -> None:
        need((out is not None) == room, f"{what} gave {out is not None}, room {room}")

    # ------------------------------------------------------------------ operations
    def alloc(self, a: int, b: int) -> None:
        rank, pages = a % self.dp, 1 + b % 4
        out = self.allocator.alloc(pages * self.page, dp_rank=rank)
        self._must_agree(out, self._room(rank, pages), f"[dp={rank}] alloc of {pages} pages")
        if out is not None:
            self.rows.append((rank, self._take(rank, out, None)))

    def extend(self, a: int, b: int) -> None:
        """A new sequence or the continuation of a live one, any number of tokens."""
        i = self._pick(a, self._live) if a % 2 else None
        rank, slots = self.rows[i] if i is not None else (a % self.dp, [])
        end = len(slots) + 1 + b % (3 * self.page)
        last = slots[-1] if slots else -1
        if slots and (len(slots) - 1) % self.page != slots[-1] % self.page:
            return
        pages = new_pages(len(slots), end, self.page)
        if self.page == 1:
            out = self.allocator.alloc(end - len(slots), dp_rank=rank)
        else:
            args = ([len(slots)], [end], np.array([last], np.int32), end - len(slots))
            out = self.allocator.alloc_extend(*args, dp_rank=rank)
        self._must_agree(out, self._room(rank, pages), f"[dp={rank}] extend {len(slots)}->{end}")
        if out is not None:
            got = self._take(rank, out, slots[-1] if slots else None)
            if i is None:
                self.rows.append((rank, got))
            else:
                slots += got

    def decode(self, a: int, b: int) -> None:
        """One token for each live sequence of a rank, all or nothing."""
        rank = a % self.dp
        rows = [
            s
            for r, s in self.rows
            if r == rank and s and self._live(r, s) and (len(s) - 1) % self.page == s[-1] % self.page
        ]
        if not rows or self.page == 1:
            return
        lens = [len(s) + 1 for s in rows]
        out = self.allocator.alloc_decode(lens, np.array([s[-1] for s in rows], np.int32), dp_rank=rank)
        pages = sum(1 for s in rows if len(s) % self.page == 0)
        self._must_agree(
            out, self._room(rank, pages), f"[dp={rank}] decode of {len(rows)} rows, {pages} pages"
        )
        if out is not None:
            for slots, slot in zip(rows, np.asarray(out)):
                slots += self._take(rank, np.array([slot], np.int32), slots[-1])

    def free(self, a: int, b: int) -> None:
        """Composite free of whole pages, in any order; the row loses them."""
        i = self._pick(a)
        if i is None:
            return
        rank, slots = self.rows[i]
        chosen = self._whole(slots, b, b // 7)
        self.allocator.free(np.array(chosen[::-1] if b % 2 else chosen, np.int32), dp_rank=rank)
        self.pools[rank].release_pair(chosen)
        self.rows[i] = (rank, [s for s in slots if s not in set(chosen)])

    def free_swa(self, a: int, b: int) -> None:
        """SWA half of whole pages; then again, which must be a no-op."""
        i = self._pick(a)
        if i is None:
            return
        rank, slots = self.rows[i]
        chosen = np.array(self._whole(slots, b, b // 5), np.int32)
        for _ in range(1 + b % 2):
            self.allocator.free_swa(chosen, dp_rank=rank)
            self.pools[rank].release_swa(chosen.tolist())

    def cascade(self, a: int, b: int) -> None:
        """``free_full`` then ``free_swa``: the leaf cascade."""
        i = self._pick(a)
        if i is None:
            return
        rank, slots = self.rows[i]
        chosen = np.array(self._whole(slots, b, b // 3), np.int32)
        before = self._map(rank).copy()
        self.allocator.free_full(chosen, dp_rank=rank)
        need((self._map(rank) == before).all(), f"[dp={rank}] free_full touched the mapping")
        self.pools[rank].release_full(chosen.tolist())
        self.allocator.free_swa(chosen, dp_rank=rank)
        self.pools[rank].release_swa(chosen.tolist())
        self.rows[i] = (rank, [s for s in slots if s not in set(chosen.tolist())])

    def partial(self, a: int, b: int) -> None:
        """Some tokens of a page: refused in strict mode, nothing otherwise (D01)."""
        i = self._pick(a)
        if i is None or self.page == 1:
            return
        rank, slots = self.rows[i]
        page = self._whole(slots, b, 0)
        page = [s for s in page if s // self.page == page[0] // self.page]
        if len(page) < 2:
            return
        some = np.array(page[: 1 + b % (len(page) - 1)], np.int32)
        calls = [self.allocator.free, self.allocator.free_full]
        if self._live(rank, page):
            calls.append(self.allocator.free_swa)
        call = calls[b % len(calls)]
        if self.strict:
            with pytest.raises(PartialPageError):
                call(some, dp_rank=rank)
        else:
            call(some, dp_rank=rank)

    def double(self, a: int, b: int) -> None:
        """A page that is free is freed again."""
        rank = a % self.dp
        free = sorted(self.pools[rank].full.free_pages())
        if not free:
            return
        page = free[b % len(free)]
        slots = np.arange(page * self.page, (page + 1) * self.page, dtype=np.int32)
        if self.strict:
            with pytest.raises(DoubleFreeError):
                self.allocator.free(slots, dp_rank=rank)
        else:
            self.allocator.free(slots, dp_rank=rank)

    def transfer(self, a: int, b: int) -> None:
        """SWA of one row's pages moves to another row's tombstoned pages; the source FULL slots are freed."""
        i = self._pick(a, self._live)
        if i is None:
            return
        rank, source = self.rows[i]
        pool = self.pools[rank]
        src = [s for s in source if s // self.page == source[0] // self.page]

        def fits(r: int, slots: list[int]) -> bool:
            head = [s for s in slots if s // self.page == slots[0] // self.page]
            return r == rank and len(head) == len(src) and not any(s in pool.mapping for s in head)

        j = self._pick(b, fits)
        if j is None or j == i:
            return
        target = self.rows[j][1]
        dst = [s for s in target if s // self.page == target[0] // self.page]
        self.allocator.transfer_swa_mapping(np.array(src, np.int32), np.array(dst, np.int32), dp_rank=rank)
        pool.move_mapping(src, dst, "moved")
        self.rows[i] = (rank, source[len(src) :])

    def group(self, a: int, b: int) -> None:
        """Open or close the free group; opening twice must not drop what is queued."""
        if not self.in_group or a % 4 == 0:
            self.allocator.free_group_begin()
            self.in_group = True
            for pool in self.pools:
                pool.group_begin()
        else:
            self.allocator.free_group_end()
            self.in_group = False
            for pool in self.pools:
                pool.group_end()

    def clear_rank(self, a: int, b: int) -> None:
        """Rank-local clear: the other rank and the group mode survive."""
        if b % 6:
            return
        rank = a % self.dp
        self.allocator.clear(dp_rank=rank)
        self.pools[rank].clear()
        self.rows = [(r, s) for r, s in self.rows if r != rank]

    # ------------------------------------------------------------------ comparison
    def verify(self) -> None:
        for rank, pool in enumerate(self.pools):
            subs = (
                (self.allocator.full_attn_allocator, pool.full),
                (self.allocator.swa_attn_allocator, pool.swa),
            )
            sizes = (self.allocator.full_available_size(rank), self.allocator.swa_available_size(rank))
            for (sub, oracle), size in zip(subs, sizes):
                need(
                    size == oracle.available(),
                    f"[dp={rank}][{oracle.name}] available {size}, oracle {oracle.available()}",
                )
                got = free_pages(sub, rank, self.page)
                need(
                    sorted(got) == sorted(oracle.free_pages()),
                    f"[dp={rank}][{oracle.name}] free {sorted(got)}",
                )
            expected = np.zeros((pool.full.pages + 1) * self.page, np.int32)
            expected[list(pool.mapping)] = list(pool.mapping.values())
            bad = np.flatnonzero(self._map(rank) != expected)
            need(bad.size == 0, f"[dp={rank}] mapping differs at {bad[:6].tolist()}")
        need(self.allocator.is_not_in_free_group is not self.in_group, "group mode differs")
        violations = self.allocator.check()
        need(violations == [], f"check(): {[str(v) for v in violations[:3]]}")
