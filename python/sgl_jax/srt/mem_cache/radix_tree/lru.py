"""Recency: the tick counter and an ordered index of eviction candidates whose costs do not grow with its size."""

from __future__ import annotations

import heapq
import itertools
from collections import OrderedDict
from collections.abc import Callable, Iterator
from typing import Any, Protocol


class Aged(Protocol):
    """What the index needs of a node."""

    @property
    def id(self) -> int: ...

    @property
    def end(self) -> int | None: ...


_COMPACT_SLACK = 64


#: The next tick. Strictly increasing within the process, shared by all trees and components.
get_and_increase_time_counter: Callable[[], float] = itertools.count(1.0).__next__


class LruIndex:
    """Candidates of one rank and component, oldest first.

    Nodes usually arrive as the most recent ones and go to the end of an ``OrderedDict``; a node that becomes a candidate with
    an old age (its last child went, its lock ended) goes to a small heap. Both give their oldest in O(1) or O(log n). Equal
    ages: the node nearer to the root first, so that a branch loses its far end before its trailing window (D26).
    ``age`` reads a node's age; whoever changes an age calls :meth:`refile`.
    """

    __slots__ = ("_age", "_filings", "_late", "_late_place", "_newest", "_recent")

    def __init__(self, age: Callable[[Any], float]) -> None:
        self._age = age
        self._recent: OrderedDict[int, Any] = OrderedDict()
        self._newest: tuple[float, int] = (float("-inf"), 0)
        self._late: list[
            tuple[float, int, int, Any]
        ] = []  # (age, end, filing, node); stale when the filing is
        self._late_place: dict[int, int] = {}
        self._filings = 0

    def __len__(self) -> int:
        return len(self._recent) + len(self._late_place)

    def __contains__(self, node: Aged) -> bool:
        return node.id in self._recent or node.id in self._late_place

    def __iter__(self) -> Iterator[Any]:
        """Every candidate, in no particular order."""
        yield from self._recent.values()
        yield from (entry[3] for entry in self._late if self._is_filed(entry))

    def _is_filed(self, entry: tuple[float, int, int, Any]) -> bool:
        return self._late_place.get(entry[3].id) == entry[2]

    def add(self, node: Aged) -> None:
        """File ``node`` under its present age. No change when it is already filed."""
        if node.id in self._recent or node.id in self._late_place:
            return
        place = (self._age(node), node.end or 0)
        if place >= self._newest or not self._recent:
            self._recent[node.id] = node
            self._newest = place
            return
        self._filings += 1
        self._late_place[node.id] = self._filings
        heapq.heappush(self._late, (*place, self._filings, node))
        if len(self._late) > 2 * len(self._late_place) + _COMPACT_SLACK:
            self._late = [entry for entry in self._late if self._is_filed(entry)]
            heapq.heapify(self._late)

    def discard(self, node: Aged) -> None:
        """Forget ``node``; no error when it is not filed."""
        if node.id in self._recent:
            del self._recent[node.id]
        elif node.id in self._late_place:
            del self._late_place[node.id]

    def refile(self, node: Aged) -> None:
        """The age of ``node`` changed: file it anew if it is a candidate."""
        if node in self:
            self.discard(node)
            self.add(node)

    def oldest(self) -> Any | None:
        """The candidate to evict next, left in place; None when there is none."""
        late = self._late
        while late and not self._is_filed(late[0]):
            heapq.heappop(late)
        first = next(iter(self._recent.values()), None)
        if not late:
            return first
        if first is None or late[0][:2] < (self._age(first), first.end or 0):
            return late[0][3]
        return first
