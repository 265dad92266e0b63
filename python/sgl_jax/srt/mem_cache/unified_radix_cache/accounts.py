"""Sums and candidates: the one place where a node's value or lock changes (rule 4 of docs/ownership.md).

Per rank and component, at any moment::

    evictable = sum of value lengths of unlocked nodes          protected = the same over locked nodes
    leaves    = unlocked childless nodes with a FULL value      (FULL candidates, in FULL order)
    aux[ct]   = nodes with a value and no lock of ``ct``        (candidates of ``ct``, in its own order)
    barren    = leaves that can never end a match               (rule 8)

The sums follow every change at once. Candidates are filed when somebody asks for them: a node that changes ten times between
two evictions is looked at once.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator
from typing import Any

from sgl_jax.srt.mem_cache.errors import LockReceiptError
from sgl_jax.srt.mem_cache.radix_tree.lru import LruIndex
from sgl_jax.srt.mem_cache.unified_cache_components.component_types import ComponentType
from sgl_jax.srt.mem_cache.unified_cache_components.node import UnifiedTreeNode

FULL = ComponentType.FULL

#: Nodes whose filing may wait. Bounds what one question for a candidate can cost, about 2 µs a node.
_MAX_UNFILED = 256


class CandidateView:
    """Read-only view over the candidates of all ranks: ``in``, ``len`` and iteration. ``indexes`` is asked at every use."""

    __slots__ = ("_ask",)

    def __init__(self, indexes: Callable[[], dict[int, LruIndex]]) -> None:
        self._ask = indexes

    def __contains__(self, node: object) -> bool:
        return isinstance(node, UnifiedTreeNode) and any(node in index for index in self._ask().values())

    def __iter__(self) -> Iterator[UnifiedTreeNode]:
        for index in self._ask().values():
            yield from index

    def __len__(self) -> int:
        return sum(len(index) for index in self._ask().values())


def _aux_age(component: ComponentType) -> Callable[[UnifiedTreeNode], float]:
    def age(node: UnifiedTreeNode) -> float:
        return node.component_data[component].age or 0.0

    return age


def _full_age(node: UnifiedTreeNode) -> float:
    return node.access_time


class NodeAccounts:
    """Counters and candidate indexes of one tree. ``can_end_match`` asks every component of the tree (rule 8)."""

    def __init__(
        self, components: Iterable[ComponentType], can_end_match: Callable[[UnifiedTreeNode], bool]
    ) -> None:
        kinds = tuple(components)
        self._can_end_match = can_end_match
        self.evictable = {ct: defaultdict[int, int](int) for ct in ComponentType}
        self.protected = {ct: defaultdict[int, int](int) for ct in ComponentType}
        self._leaves: defaultdict[int, LruIndex] = defaultdict(lambda: LruIndex(_full_age))
        self._aux: dict[ComponentType, defaultdict[int, LruIndex]] = {}
        for ct in kinds:
            if ct is not FULL:
                age = _aux_age(ct)
                self._aux[ct] = defaultdict(lambda age=age: LruIndex(age))  # type: ignore[misc]
        self._barren: defaultdict[int, dict[int, UnifiedTreeNode]] = defaultdict(dict)
        self._unfiled: defaultdict[int, dict[int, UnifiedTreeNode]] = defaultdict(dict)

    # -- transitions -----------------------------------------------------------------------------------------------

    def set_value(self, node: UnifiedTreeNode, ct: ComponentType, value: Any) -> None:
        """Replace, give or take a node's value; the sums follow in the same breath."""
        data = node.component_data[ct]
        delta = (0 if value is None else len(value)) - (0 if data.value is None else len(data.value))
        data.value = value
        if delta:
            full = node.full_data
            locked = full.own > 0 or full.below > 0 if ct is FULL else data.lock_ref > 0
            (self.protected if locked else self.evictable)[ct][node.key.dp_rank or 0] += delta
        self._unfiled[node.key.dp_rank or 0][node.id] = node

    def change_lock(self, node: UnifiedTreeNode, ct: ComponentType, step: int) -> None:
        """Take (+1) or release (-1) one lock of an auxiliary component on one node.

        Raises LockReceiptError when there is nothing to release.
        """
        data = node.component_data[ct]
        if data.lock_ref + step < 0:
            raise LockReceiptError(
                f"[dp={node.rank}] node {node.id} holds no {ct} lock to release: the receipt is not what was acquired"
            )
        was = data.lock_ref > 0
        data.lock_ref += step
        if was != (data.lock_ref > 0):
            size = 0 if data.value is None else len(data.value)
            rank = node.key.dp_rank or 0
            self.evictable[ct][rank] += size if was else -size
            self.protected[ct][rank] += -size if was else size
            self._unfiled[rank][node.id] = node

    def lock_path(self, node: UnifiedTreeNode) -> int:
        """Take one FULL lock that ends at ``node``. Returns the tokens that became protected. O(newly locked nodes)."""
        if node.full_data.locked:
            node.full_data.own += 1
            return 0
        node.full_data.own = 1
        return self._flip_path(node, 1)

    def unlock_path(self, node: UnifiedTreeNode) -> int:
        """Release one FULL lock that ends at ``node``. Returns the tokens that became evictable.

        Raises LockReceiptError when no lock ends at ``node``.
        """
        self.require_path_lock(node)
        data = node.full_data
        data.own -= 1
        return 0 if data.locked else self._flip_path(node, -1)

    @staticmethod
    def require_path_lock(node: UnifiedTreeNode) -> None:
        """Raises LockReceiptError when no FULL lock ends at ``node``."""
        if node.full_data.own <= 0:
            raise LockReceiptError(
                f"[dp={node.rank}] no FULL lock ends at node {node.id}: it was released twice or never taken"
            )

    def _flip_path(self, node: UnifiedTreeNode, step: int) -> int:
        """``node`` just became locked (+1) or unlocked (-1): carry that upward as far as it changes anything."""
        moved = 0
        at = node
        while True:
            value = at.full_data.value
            moved += 0 if value is None else len(value)
            parent = at.parent
            if parent is None or parent.parent is None:
                break
            above = parent.full_data
            was = above.own > 0 or above.below > 0
            above.below += step
            if was == (above.own > 0 or above.below > 0):
                break
            at = parent
        rank = node.key.dp_rank or 0
        self.evictable[FULL][rank] -= step * moved
        self.protected[FULL][rank] += step * moved
        self._unfiled[rank][node.id] = node
        return moved

    # -- candidates ------------------------------------------------------------------------------------------------

    def sync(self, node: UnifiedTreeNode) -> None:
        """``node`` changed: its filing is out of date."""
        rank = node.key.dp_rank or 0
        unfiled = self._unfiled[rank]
        unfiled[node.id] = node
        if len(unfiled) > _MAX_UNFILED:
            self._settle(rank)

    def _settle(self, rank: int) -> None:
        """File what changed on ``rank`` since the last question. Amortised O(1) per change."""
        unfiled = self._unfiled[rank]
        if unfiled:
            self._unfiled[rank] = {}
            for node in unfiled.values():
                self._file(node, rank)

    def _settle_all(self) -> None:
        for rank in list(self._unfiled):
            self._settle(rank)

    def _file(self, node: UnifiedTreeNode, rank: int) -> None:
        """File ``node`` under every index it belongs to now, and under no other."""
        attached = node.parent is not None
        for ct, indexes in self._aux.items():
            data = node.component_data[ct]
            if attached and data.value is not None and data.lock_ref <= 0:
                indexes[rank].add(node)
            else:
                indexes[rank].discard(node)
        leaves, barren = self._leaves[rank], self._barren[rank]
        leaf = self.is_leaf(node)
        if leaf:
            leaves.add(node)
        else:
            leaves.discard(node)
        if leaf and not self._can_end_match(node):
            barren[node.id] = node
        elif barren:
            barren.pop(node.id, None)

    @property
    def leaves(self) -> defaultdict[int, LruIndex]:
        """FULL candidates per rank."""
        self._settle_all()
        return self._leaves

    @property
    def aux(self) -> dict[ComponentType, defaultdict[int, LruIndex]]:
        """Candidates per auxiliary component and rank."""
        self._settle_all()
        return self._aux

    def aux_of(self, ct: ComponentType) -> defaultdict[int, LruIndex]:
        """Candidates of one auxiliary component per rank."""
        return self.aux[ct]

    @staticmethod
    def is_leaf(node: UnifiedTreeNode) -> bool:
        """An attached, childless, unlocked node with a FULL value: evicting it takes every component along."""
        return (
            node.parent is not None
            and not node.children
            and node.full_data.value is not None
            and not node.in_use
        )

    def is_barren(self, node: UnifiedTreeNode) -> bool:
        """A leaf nothing can match any more (rule 8)."""
        return self.is_leaf(node) and not self._can_end_match(node)

    def forget(self, node: UnifiedTreeNode) -> None:
        """``node`` left the tree, unlocked: it is no candidate any more and its FULL value is gone."""
        rank = node.key.dp_rank or 0
        data = node.full_data
        if data.value is not None:
            self.evictable[FULL][rank] -= len(data.value)
            data.value = None
        self._unfiled[rank].pop(node.id, None)
        self._barren[rank].pop(node.id, None)
        self._leaves[rank].discard(node)
        for indexes in self._aux.values():
            indexes[rank].discard(node)

    def refile(self, node: UnifiedTreeNode, ct: int) -> None:
        """The age of ``node`` in ``ct`` changed. Nodes hold this method as their observer."""
        indexes = self._leaves if ct == FULL else self._aux[ct]  # type: ignore[index]  # an IntEnum hashes as its int
        indexes[node.key.dp_rank or 0].discard(node)
        self.sync(node)

    def oldest_leaf(self, rank: int) -> UnifiedTreeNode | None:
        """The leaf FULL evicts next on ``rank``."""
        if self._unfiled[rank]:
            self._settle(rank)
        node: UnifiedTreeNode | None = self._leaves[rank].oldest()
        return node

    def oldest(self, ct: ComponentType, rank: int) -> UnifiedTreeNode | None:
        """The node an auxiliary component evicts next on ``rank``."""
        self._settle(rank)
        node: UnifiedTreeNode | None = self._aux[ct][rank].oldest()
        return node

    def barren_nodes(self, rank: int) -> list[UnifiedTreeNode]:
        """Leaves of ``rank`` that only occupy slots."""
        if self._unfiled[rank]:
            self._settle(rank)
        return list(self._barren[rank].values())
