"""The tree itself: walk, cut, attach, detach. Mechanism only: no slot changes hands here.

Positions are tokens from the root. A cut gives the upper parts new node objects; the node that was cut keeps its identity,
its end and the locks that end at it::

    parent ─[ a b | c d | e f ] node        cut_node(node, (2, 4))        parent ─[ a b ]─[ c d ]─[ e f ] node
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from functools import partial
from itertools import pairwise
from typing import Any

from sgl_jax.srt.mem_cache.errors import TreeInvariantError, Violation
from sgl_jax.srt.mem_cache.page import floor_page
from sgl_jax.srt.mem_cache.radix_tree.key import RadixKey, packed_child_key
from sgl_jax.srt.mem_cache.radix_tree.lru import get_and_increase_time_counter
from sgl_jax.srt.mem_cache.unified_cache_components.component_types import ComponentType
from sgl_jax.srt.mem_cache.unified_cache_components.node import UnifiedTreeNode
from sgl_jax.srt.mem_cache.unified_cache_components.tree_component import TreeComponent
from sgl_jax.srt.mem_cache.unified_radix_cache.accounts import NodeAccounts
from sgl_jax.srt.mem_cache.unified_radix_cache.checks import check_tree


class PrefixTree:
    """All cached prefixes of all ranks and namespaces; a child is keyed by its first page's bytes and namespaces."""

    def __init__(self, page_size: int, components: tuple[TreeComponent, ...], accounts: NodeAccounts) -> None:
        self.page_size = page_size
        self.components = components
        self.accounts = accounts
        self.child_key: Callable[..., Any] = partial(packed_child_key, page_size=page_size)
        self.observer = accounts.refile
        self.kinds = tuple(component.component_type for component in components)
        self.root = self._make_root()

    def _make_root(self) -> UnifiedTreeNode:
        root = UnifiedTreeNode(self.kinds)
        root.end = 0
        root.observer = self.observer
        root.full_data.value = []
        for ct in self.kinds:
            if ct is ComponentType.FULL:
                root.full_data.own = 1
            else:
                root.component_data[ct].lock_ref = 1
        return root

    def new_node(self) -> UnifiedTreeNode:
        node = UnifiedTreeNode(self.kinds)
        node.observer = self.observer
        return node

    def owns(self, node: UnifiedTreeNode) -> bool:
        """Whether ``node`` belongs to this tree and not to one that was reset since (a hand-built node does)."""
        return node.observer is self.observer or node.observer is None

    def find_child(self, node: UnifiedTreeNode, key: RadixKey, start: int) -> UnifiedTreeNode | None:
        """The child that ``key[start:]`` enters, cut so that all of it matches; None when there is none.

        The rest is page aligned and not empty, hence so is every node (D10, D11).
        """
        return self.enter(node, self.child_key(key, start=start), key, start)

    def enter(self, node: UnifiedTreeNode, slot: Any, key: RadixKey, start: int) -> UnifiedTreeNode | None:
        """:meth:`find_child`, where ``slot`` is the child key of ``key[start:]``."""
        child: UnifiedTreeNode | None = node.children.get(slot)
        if child is None or key.startswith(child.key, start):
            return child
        shared = floor_page(child.key.match_len(key[start:]), self.page_size)
        if shared == 0:
            return None
        return self.cut_node(child, (shared,))[0]

    def walk(self, key: RadixKey) -> list[UnifiedTreeNode]:
        """Nodes that spell the longest cached prefix of ``key`` (page aligned), from the root down; may cut the last.

        One byte comparison per node; same steps as :meth:`find_child`, without a key object per node (G5-G7).
        """
        path: list[UnifiedTreeNode] = []
        length = len(key)
        if length == 0:
            return path
        raw = key.packed
        page_bytes = len(raw) // length * self.page_size
        spaced = key.extra_key is not None or key.dp_rank is not None
        node, at, end = self.root, 0, len(raw)
        while at < end:
            first: Any = raw[at : at + page_bytes]
            if spaced:
                first = (key.extra_key, key.dp_rank, first)
            child = node.children.get(first)
            if child is None:
                break
            own = child.key.packed
            if not raw.startswith(own, at):
                child = self.find_child(node, key, at * length // end)
                if child is not None:
                    path.append(child)
                break
            path.append(child)
            node = child
            at += len(own)
        return path

    def cut_node(self, child: UnifiedTreeNode, cuts: Sequence[int]) -> list[UnifiedTreeNode]:
        """Cut ``child`` at ascending offsets; returns the new nodes above it, top first. O(length + cuts).

        Raises TreeInvariantError for an offset outside the node, off a page boundary, or for the root.
        """
        parent, key = child.parent, child.key
        bounds = [0, *cuts, len(key)]
        legal = all(a < b for a, b in pairwise(bounds)) and not any(c % self.page_size for c in cuts)
        if parent is None or not legal:
            raise TreeInvariantError(
                f"node {child.id} of {len(key)} tokens cannot be cut at {list(cuts)} (page size {self.page_size})"
            )
        start = child.start
        slot = self.child_key(key) if child.slot is None else child.slot
        made: list[UnifiedTreeNode] = []
        for low, high in pairwise(bounds[:-1]):
            upper = self.new_node()
            upper.key = key.part(low, high)
            child.key = key[high:]
            upper.parent, upper.end, upper.slot = parent, start + high, slot
            parent.children[slot] = upper
            child.parent, child.slot = upper, self.child_key(child.key)
            upper.children[child.slot] = child
            for component in self.components:
                component.redistribute_on_node_split(upper, child)
            made.append(upper)
            parent, slot = upper, child.slot
        child.key = child.key.compact()
        self._own_values([*made, child])
        for node in made:
            self.accounts.sync(node)
        return made

    def _own_values(self, nodes: Sequence[UnifiedTreeNode]) -> None:
        """Halves of a cut hold copies, not views of the whole (D81)."""
        for ct in self.kinds:
            for node in nodes:
                data = node.component_data[ct]
                if data.value is not None:
                    data.value = data.value.copy()

    def attach_leaf(self, parent: UnifiedTreeNode, key: RadixKey, slot: Any = None) -> UnifiedTreeNode:
        """A new childless node below ``parent``, used this very moment; its values are still to come.

        ``key`` is compact and the node's own from now on; ``slot`` is its child key, where that is known already.
        """
        leaf = self.new_node()
        leaf.key = key
        leaf.parent, leaf.end = parent, parent.path_len() + key.length
        leaf.access_time = get_and_increase_time_counter()
        leaf.slot = slot = self.child_key(key) if slot is None else slot
        parent.children[slot] = leaf
        if parent is not self.root:
            self.accounts.sync(parent)
        return leaf

    def detach_leaf(self, leaf: UnifiedTreeNode) -> UnifiedTreeNode:
        """Unlink a childless, unlocked node whose slots were given back; returns its former parent.

        The FULL value goes with it. The parent inherits the leaf's age if that is younger: a use of the leaf was a use of the whole path.
        Raises TreeInvariantError when the leaf is not that.
        """
        parent = leaf.parent
        slot = self.child_key(leaf.key) if leaf.slot is None else leaf.slot
        if parent is None or leaf.children or leaf.in_use or parent.children.get(slot) is not leaf:
            raise TreeInvariantError(
                f"node {leaf.id} cannot be removed: root, detached, locked or with children"
            )
        del parent.children[slot]
        leaf.leave()
        self.accounts.forget(leaf)
        if parent is not self.root:
            parent.access_time = max(parent.access_time, leaf.access_time)
            self.accounts.sync(parent)
        return parent  # type: ignore[no-any-return]

    def nodes(self, rank: int | None = None) -> Iterator[UnifiedTreeNode]:
        """Every node but the root, parents first; of one rank or of all."""
        stack = [c for c in self.root.children.values() if rank is None or c.rank == rank]
        while stack:
            node = stack.pop()
            yield node
            stack.extend(node.children.values())

    def check(self) -> list[Violation]:
        """Broken structure, sums, candidates and lock counts of every rank; empty when sound. O(tree)."""
        return check_tree(self)
