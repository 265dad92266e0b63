"""The node every radix tree builds on: links, key, age and the position of its end."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from sgl_jax.srt.mem_cache.radix_tree.key import ChildKey, RadixKey
from sgl_jax.srt.mem_cache.radix_tree.node_ids import NumberedNodes

_NO_KEY = RadixKey(())


class RadixNode(metaclass=NumberedNodes):
    """One run of tokens of a cached prefix.

    ``end`` is the distance in tokens from the root to this node's last token. A split gives the upper part a new object
    and leaves the lower part, so ``end`` never changes: it positions the node in O(1). None on a hand-built node.
    ``access_time`` is the age in ticks; assigning ``last_access_time`` also tells the ``observer``, which re-files the node
    among the eviction candidates. ``slot`` is the key under which the parent holds the node; None on a hand-built node.
    """

    __slots__ = ("access_time", "children", "end", "hit_count", "id", "key", "observer", "parent", "slot")

    def __init__(self, node_id: int | None = None) -> None:
        self.id: int = type(self).take_id(node_id)
        self.children: dict[Any, Any] = {}
        self.parent: Any = None
        self.key: RadixKey = _NO_KEY
        self.end: int | None = None
        self.slot: ChildKey = None
        self.access_time: float = 0.0
        self.hit_count = 0
        self.observer: Callable[[Any, int], None] | None = None

    @property
    def last_access_time(self) -> float:
        return self.access_time

    @last_access_time.setter
    def last_access_time(self, value: float) -> None:
        self.access_time = value
        if self.observer is not None:
            self.observer(self, 0)

    def path_len(self) -> int:
        """Tokens from the root to the end of this node."""
        if self.end is not None:
            return self.end
        above = 0 if self.parent is None else self.parent.path_len()
        return int(above) + self.key.length

    def __lt__(self, other: RadixNode) -> bool:
        return self.access_time < other.access_time

    def __repr__(self) -> str:
        return f"{type(self).__name__}(id={self.id}, tokens={len(self.key)}, end={self.end})"
