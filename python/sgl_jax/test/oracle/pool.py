"""Naive token-level model of the two KV pools of one rank: a dict of slot -> owner, and a dict as the mapping."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence


class Mismatch(AssertionError):
    """The implementation did something the texts forbid, or the oracle was told something impossible."""


class PoolOracle:
    """One pool of one rank. Usable slots are ``P .. (pages + 1) * P - 1``; page 0 is nobody's.

    A slot is owned (``owner``), pending (surrendered inside a group) or neither. A page is free when none of its slots is
    owned or pending; a slot of a page with an owner that nobody owns is slack, and never handed to somebody else.
    """

    def __init__(self, name: str, rank: int, pages: int, page_size: int) -> None:
        self.name, self.rank, self.pages, self.page_size = name, rank, pages, page_size
        self.owner: dict[int, str] = {}
        self.pending: set[int] = set()
        self.in_group = False
        self.on_release: Callable[[Iterable[int]], None] = lambda _slots: None

    def _where(self) -> str:
        return f"[dp={self.rank}][{self.name}]"

    def busy_pages(self) -> set[int]:
        """Pages with an owned or pending slot."""
        size = self.page_size
        return {s // size for s in self.owner} | {s // size for s in self.pending}

    def free_pages(self) -> set[int]:
        return set(range(1, self.pages + 1)) - self.busy_pages()

    def available(self) -> int:
        return (self.pages - len(self.busy_pages())) * self.page_size

    def take(self, slots: Sequence[int], owner: str, last_slot: int | None = None) -> None:
        """``owner`` receives ``slots``. Only fresh pages, or the slack behind the owner's own ``last_slot``."""
        size = self.page_size
        low, high = size, (self.pages + 1) * size
        fresh = self.free_pages()
        previous = last_slot
        for slot in slots:
            if not low <= slot < high:
                raise Mismatch(f"{self._where()} slot {slot} outside [{low}, {high})")
            if slot in self.owner or slot in self.pending:
                raise Mismatch(
                    f"{self._where()} slot {slot} handed out while {self.owner.get(slot, 'pending')}"
                )
            continues = previous is not None and slot == previous + 1 and slot % size != 0
            if not continues and not (slot // size in fresh and slot % size == 0):
                raise Mismatch(
                    f"{self._where()} slot {slot} neither continues {previous} nor opens a free page"
                )
            self.owner[slot] = owner
            previous = slot

    def pass_on(self, slots: Iterable[int], owner: str) -> None:
        """Owned slots change owner."""
        for slot in slots:
            if slot not in self.owner:
                raise Mismatch(f"{self._where()} slot {slot} changes owner but has none")
            self.owner[slot] = owner

    def release(self, slots: Iterable[int]) -> None:
        """Owners surrender ``slots``; a group only makes them pending."""
        slots = list(slots)
        for slot in slots:
            if self.owner.pop(slot, None) is None:
                raise Mismatch(f"{self._where()} slot {slot} released but not owned")
            if self.in_group:
                self.pending.add(slot)
        self.on_release(slots)

    def group_end(self) -> None:
        self.in_group = False
        self.pending.clear()

    def clear(self) -> None:
        self.on_release(list(self.owner))
        self.owner.clear()
        self.pending.clear()


class DualOracle:
    """FULL and SWA pool of one rank joined by the mapping FULL slot -> SWA slot."""

    def __init__(self, rank: int, full_pages: int, swa_pages: int, page_size: int) -> None:
        self.rank, self.page_size = rank, page_size
        self.full = PoolOracle("full", rank, full_pages, page_size)
        self.swa = PoolOracle("swa", rank, swa_pages, page_size)
        self.mapping: dict[int, int] = {}

    def group_begin(self) -> None:
        self.full.in_group = self.swa.in_group = True

    def group_end(self) -> None:
        self.full.group_end()
        self.swa.group_end()

    def take_pair(self, full: Sequence[int], swa: Sequence[int], owner: str, last: int | None = None) -> None:
        """An allocation: FULL and SWA slot side by side, offsets equal (page-wise mapping must be offset-preserving)."""
        if len(full) != len(swa):
            raise Mismatch(f"[dp={self.rank}] {len(full)} FULL slots but {len(swa)} SWA slots")
        self.full.take(full, owner, last)
        self.swa.take(swa, owner, self.mapping.get(last) if last is not None else None)
        for f, s in zip(full, swa):
            if f in self.mapping:
                raise Mismatch(
                    f"[dp={self.rank}] FULL slot {f} allocated with a stale mapping {self.mapping[f]}"
                )
            if f % self.page_size != s % self.page_size:
                raise Mismatch(f"[dp={self.rank}] mapping {f} -> {s} does not preserve the page offset")
            self.mapping[f] = s

    def pass_on(self, full: Iterable[int], owner: str) -> None:
        full = list(full)
        self.full.pass_on(full, owner)
        self.swa.pass_on([self.mapping[f] for f in full if f in self.mapping], owner)

    def release_swa(self, full: Iterable[int]) -> int:
        """Surrender the SWA half; mapping goes at once. Unmapped slots are ignored. Returns how many were mapped."""
        slots = [self.mapping.pop(f) for f in full if f in self.mapping]
        self.swa.release(slots)
        return len(slots)

    def release_full(self, full: Iterable[int]) -> None:
        self.full.release(full)

    def release_pair(self, full: Iterable[int]) -> None:
        full = list(full)
        self.release_swa(full)
        self.full.release(full)

    def move_mapping(self, source: Sequence[int], target: Sequence[int], owner: str) -> None:
        """SWA of ``source`` now belongs to ``target``; the source FULL slots are surrendered (rule 1)."""
        for s, t in zip(source, target, strict=True):
            if t in self.mapping:
                raise Mismatch(f"[dp={self.rank}] target {t} already mapped")
            self.mapping[t] = self.mapping.pop(s)
        self.swa.pass_on([self.mapping[t] for t in target], owner)
        self.full.release(source)

    def clear(self) -> None:
        self.mapping.clear()
        self.full.clear()
        self.swa.clear()
