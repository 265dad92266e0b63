"""Naive model of the unified tree: a trie of single pages ("cells"). Node boundaries do not exist here.

A cell is one page of one cached prefix: its FULL slots, its SWA slots or None (tombstone), and how many locks stand on
each half. What the real tree calls a node is any run of cells of one path; the checks demand that it is uniform.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence

from sgl_jax.test.oracle.pool import DualOracle, Mismatch

TREE = "tree"
Page = tuple[int, ...]


class Cell:
    """One cached page. ``full_locks`` / ``swa_locks`` count receipts that stand on it."""

    __slots__ = (
        "children",
        "full",
        "full_locks",
        "page",
        "parent",
        "swa",
        "swa_locks",
        "used",
        "used_surely",
    )

    def __init__(self, page: Page, parent: Cell | None, full: list[int], swa: list[int] | None) -> None:
        self.page, self.parent, self.full, self.swa = page, parent, full, swa
        self.children: dict[Page, Cell] = {}
        self.full_locks = 0
        self.swa_locks = 0
        #: Last use: between ``used_surely`` and ``used`` (whether a call that adds nothing is a use is left open).
        self.used = self.used_surely = 0


class Receipt:
    """What one lock took: the FULL cells up to the root and the SWA cells of the window's whole nodes."""

    def __init__(self, full: list[Cell], swa: list[Cell]) -> None:
        self.full, self.swa = full, swa


class TreeOracle:
    """All cached prefixes of all ranks and namespaces."""

    def __init__(self, page_size: int, window: int, pools: list[DualOracle]) -> None:
        self.page_size, self.window, self.pools = page_size, window, pools
        self.roots: dict[tuple[int, str | None], Cell] = {}
        self.clock = 0
        self.events: Counter[str] = Counter()  # pages by what happened to them

    def touch(self, path: Sequence[Cell], surely: bool = True) -> None:
        """``path`` was used now."""
        self.clock += 1
        for cell in path:
            cell.used = self.clock
            if surely:
                cell.used_surely = self.clock

    def root(self, rank: int, extra: str | None) -> Cell:
        return self.roots.setdefault((rank, extra), Cell((), None, [], None))

    def cells(self, rank: int | None = None) -> Iterator[tuple[int, Cell]]:
        """Every (rank, cell), parents first."""
        for (r, _extra), root in self.roots.items():
            if rank is None or r == rank:
                stack = list(root.children.values())
                while stack:
                    cell = stack.pop()
                    yield r, cell
                    stack.extend(cell.children.values())

    def pages(self, tokens: Sequence[int]) -> list[Page]:
        size = self.page_size
        return [tuple(tokens[i : i + size]) for i in range(0, len(tokens) - size + 1, size)]

    def common(self, rank: int, extra: str | None, tokens: Sequence[int]) -> list[Cell]:
        """The cached pages of ``tokens``, whatever their SWA state (FULL-only match)."""
        at, path = self.root(rank, extra), []
        for page in self.pages(tokens):
            if page not in at.children:
                break
            at = at.children[page]
            path.append(at)
        return path

    def match(self, rank: int, extra: str | None, tokens: Sequence[int]) -> list[Cell]:
        """Longest prefix with ``W`` live tokens up to its end, or with no gap from the root."""
        path = self.common(rank, extra, tokens)
        for end in range(len(path), 0, -1):
            live = 0
            for cell in reversed(path[:end]):
                if cell.swa is None:
                    break
                live += self.page_size
            if live >= self.window or live == end * self.page_size:
                return path[:end]
        return []

    def insert(
        self,
        rank: int,
        extra: str | None,
        tokens: Sequence[int],
        row: list[int],
        protected: int,
        cursor: int,
    ) -> list[Cell]:
        """A request gives ``row`` for the whole pages of ``tokens``; ``row`` is re-pointed in place. Returns the path.

        ::

            [0, protected)             tree's already
            [protected, cursor)        FULL only: the request reclaimed its SWA half
            existing live page         request's copy is surrendered
            existing tombstone         healed when it starts at or after max(cursor, protected), else copy surrendered
            missing page               taken over; tombstone below the cursor
        """
        pool, size = self.pools[rank], self.page_size
        at, path = self.root(rank, extra), []
        boundary = max(protected, cursor)
        for index, page in enumerate(self.pages(tokens)):
            start = index * size
            mine = row[start : start + size]
            cell = at.children.get(page)
            if cell is None:
                if start < protected:
                    raise Mismatch(f"[dp={rank}] protected page at {start} is not in the tree")
                self.events["inserted_dead" if start < cursor else "inserted_live"] += 1
                swa = None if start < cursor else [pool.mapping[f] for f in mine]
                cell = at.children[page] = Cell(page, at, mine, swa)
                pool.pass_on(mine, TREE)
            elif start >= protected:
                if cell.swa is None and start >= boundary:
                    self._heal(pool, cell, mine)
                else:
                    self.events["duplicate" if cell.swa is not None else "duplicate_dead"] += 1
                    pool.release_pair(mine)
            row[start : start + size] = cell.full
            path.append(cell)
            at = cell
        self.touch(path, surely=len(path) * size > protected)
        return path

    def _heal(self, pool: DualOracle, cell: Cell, mine: list[int]) -> None:
        """A tombstone becomes live: under somebody's FULL lock the mapping moves, else the FULL slots are exchanged."""
        self.events["heal_moved" if cell.full_locks else "heal_exchanged"] += 1
        if cell.full_locks:
            pool.move_mapping(mine, cell.full, TREE)
        else:
            pool.release_full(cell.full)
            cell.full = mine
            pool.pass_on(mine, TREE)
        cell.swa = [pool.mapping[f] for f in cell.full]

    def path_to(self, cell: Cell) -> list[Cell]:
        path = []
        while cell.parent is not None:
            path.append(cell)
            cell = cell.parent
        return path[::-1]

    def lock(self, end: Cell | None, swa_cells: list[Cell]) -> tuple[Receipt, int]:
        """Lock the path of ``end``. Returns the receipt and the FULL tokens that became protected."""
        full = self.path_to(end) if end is not None else []
        moved = sum(self.page_size for c in full if c.full_locks == 0)
        for cell in full:
            cell.full_locks += 1
        for cell in swa_cells:
            cell.swa_locks += 1
        return Receipt(full, list(swa_cells)), moved

    def unlock(self, rank: int, receipt: Receipt) -> None:
        for cell in receipt.full:
            cell.full_locks -= 1
        for cell in receipt.swa:
            cell.swa_locks -= 1
        if receipt.full:
            self.prune(rank, receipt.full[-1])

    def prune(self, rank: int, cell: Cell) -> None:
        """Remove the unlocked childless tombstones from ``cell`` upward (rule 8)."""
        while cell.parent is not None and not cell.children and cell.swa is None and cell.full_locks == 0:
            self.events["pruned_at_unlock"] += 1
            self.pools[rank].release_full(cell.full)
            del cell.parent.children[cell.page]
            cell = cell.parent

    def drop(self, rank: int, cell: Cell) -> None:
        """An eviction removed this childless unlocked page, both halves."""
        if cell.full_locks or cell.swa_locks or cell.children:
            raise Mismatch(
                f"[dp={rank}] evicted a page with {cell.full_locks} FULL locks, {cell.swa_locks} SWA locks, "
                f"{len(cell.children)} children: slots {cell.full[:4]}"
            )
        self.events["evicted_live" if cell.swa is not None else "evicted_dead"] += 1
        self.pools[rank].release_pair(cell.full)
        assert cell.parent is not None
        del cell.parent.children[cell.page]

    def tombstone(self, rank: int, cell: Cell) -> None:
        """An eviction gave back this page's SWA half only."""
        if cell.swa_locks or cell.swa is None:
            raise Mismatch(
                f"[dp={rank}] tombstoned a page with {cell.swa_locks} SWA locks: slots {cell.full[:4]}"
            )
        self.events["tombstoned_locked" if cell.full_locks else "tombstoned"] += 1
        self.pools[rank].release_swa(cell.full)
        cell.swa = None

    def sums(self, rank: int) -> dict[str, int]:
        """Evictable and protected tokens per pool, straight from the cells."""
        out = {"full_evictable": 0, "full_protected": 0, "swa_evictable": 0, "swa_protected": 0}
        for _r, cell in self.cells(rank):
            out["full_protected" if cell.full_locks else "full_evictable"] += self.page_size
            if cell.swa is not None:
                out["swa_protected" if cell.swa_locks else "swa_evictable"] += self.page_size
        return out

    def clear(self) -> None:
        self.roots.clear()
