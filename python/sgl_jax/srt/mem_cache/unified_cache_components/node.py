"""The node of the unified tree: one run of tokens, one :class:`ComponentData` per component kind."""

from __future__ import annotations

from sgl_jax.srt.mem_cache.radix_tree.node import RadixNode
from sgl_jax.srt.mem_cache.unified_cache_components.component_types import (
    ComponentData,
    ComponentType,
)

FULL = ComponentType.FULL
_AUXILIARY = tuple(ct for ct in ComponentType if ct is not FULL)


class PathLockData(ComponentData):
    """FULL's data. A FULL lock protects the whole path to the root, and is kept where it can be taken in O(new nodes).

    ``own`` counts the locks that end at this node, ``below`` its locked children. A node is locked when either is positive,
    so taking a lock stops at the first ancestor that is locked already. ``lock_ref`` shows the number of locks on or below.
    """

    __slots__ = ("below", "own")

    def __init__(self, node: UnifiedTreeNode) -> None:
        self.own = self.below = 0
        self.value = self.host_value = self.age = self.boundary = self.component = self.other_metadata = None
        self.host_lock_ref = 0
        self.node = node

    @property
    def locked(self) -> bool:
        return self.own > 0 or self.below > 0

    @property
    def lock_ref(self) -> int:
        if self.node is None:
            return self.own
        total = 0
        stack = [self.node]
        while stack:
            node = stack.pop()
            data = node.full_data
            total += data.own
            if data.below:
                stack.extend(child for child in node.children.values() if child.full_data.locked)
        return total

    @lock_ref.setter
    def lock_ref(self, value: int) -> None:
        self.own = value - (self.lock_ref - self.own)


class UnifiedTreeNode(RadixNode):
    """``component_data`` always has one entry per :class:`ComponentType`, whatever the tree is made of."""

    __slots__ = ("component_data", "full_data", "tree_components")

    def __init__(self, tree_components: tuple[ComponentType, ...], node_id: int | None = None) -> None:
        super().__init__(node_id)
        self.tree_components = tree_components
        self.full_data = PathLockData(self)
        self.component_data: list[ComponentData] = [self.full_data]
        for ct in _AUXILIARY:
            data = ComponentData()
            if ct in tree_components:
                data.node, data.component = self, ct
            self.component_data.append(data)

    def leave(self) -> None:
        """Out of the tree: no link up, and none back from its parts, so that its memory goes with the last user (G15)."""
        self.parent = None
        for data in self.component_data:
            data.node = None

    @property
    def rank(self) -> int:
        """DP rank whose pools the slots of this node belong to."""
        return self.key.dp_rank or 0

    @property
    def start(self) -> int:
        """Tokens from the root to the beginning of this node."""
        return self.path_len() - self.key.length

    @property
    def evicted(self) -> bool:
        """A non-root node without a FULL value on the device."""
        return self.parent is not None and self.full_data.value is None

    @property
    def backuped(self) -> bool:
        return self.full_data.host_value is not None

    @property
    def in_use(self) -> bool:
        """Somebody holds a lock that covers this node, of any component or tier."""
        full = self.full_data
        _, swa, recurrent = self.component_data
        return (
            full.own > 0
            or full.below > 0
            or swa.lock_ref > 0
            or recurrent.lock_ref > 0
            or full.host_lock_ref > 0
            or swa.host_lock_ref > 0
            or recurrent.host_lock_ref > 0
        )
